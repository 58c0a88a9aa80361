//! `RoiAlign` and `MaxRoiPool`: pool regions of feature maps to one size, with a thread per result.
//! An image index out of range reads the nearest image.

use ort_core::ep::KernelDef;
use ort_core::ops::vision::problem::{Regions, RoiAlign};
use ort_core::{Result, ensure};

use super::resize::bits;
use super::rows::{SHORT_FLOATS, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

/// The largest `sampling_ratio`. It bounds the loops of a thread.
const MOST_SAMPLES: i64 = 4096;

cuda_kernels![
    CudaKernel::new(
        KernelDef {
            op: "RoiAlign",
            types: &[("T1", SHORT_FLOATS)],
            when: |node| node.attrs().find_int("sampling_ratio").unwrap_or(0) <= MOST_SAMPLES,
            ..KernelDef::BASE
        },
        align
    ),
    CudaKernel::new(
        KernelDef { op: "MaxRoiPool", types: &[("T", SHORT_FLOATS)], ..KernelDef::BASE },
        max_pool
    ),
];

/// Fills the structure `Regions` of `cu/sample.cu`; each region has `numbers` values.
fn regions(cx: &OpCx<'_>, numbers: usize, flags: [i64; 3]) -> Result<Vec<i64>> {
    let (x, rois, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let Regions { images, channels, size: [height, width], pooled: [rows, columns], scale, .. } =
        Regions::new(cx.attrs, &x.shape, &rois.shape, numbers, &y.shape)?;
    let sizes = [images, channels, height, width, rows, columns].map(|size| size as i64);
    Ok([&sizes[..], &flags, &[bits(scale)]].concat())
}

fn align(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, rois, images, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    let RoiAlign { half_pixel, greatest, samples } = RoiAlign::new(cx.attrs)?;
    let words = regions(cx, 4, [samples as i64, half_pixel.into(), greatest.into()])?;
    let (given, expected) = (images.count(), y.size(0));
    ensure!(given == expected, InvalidArgument, "{given} images for {expected} regions");
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let launch = Launch::new("sample", format!("roi_align_{}", suffix(x.dtype)?)).threads(y.count())?;
    let launch = launch.tensor(x).tensor(rois).tensor(images).tensor(y);
    Ok(vec![launch.ints::<10>(&words)?.uint(y.count())?])
}

fn max_pool(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, rois, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let words = regions(cx, 5, [0, 0, 1])?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let launch = Launch::new("sample", format!("max_roi_pool_{}", suffix(x.dtype)?)).threads(y.count())?;
    Ok(vec![launch.tensor(x).tensor(rois).tensor(y).ints::<10>(&words)?.uint(y.count())?])
}
