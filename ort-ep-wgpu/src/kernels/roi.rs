//! `RoiAlign`: pools regions of feature maps to a fixed size, one invocation per output element. A
//! batch index out of range reads the nearest image.

use ort_core::ep::KernelDef;
use ort_core::ops::vision::problem::{Regions, RoiAlign};
use ort_core::{Result, ensure};

use super::elementwise::FLOATS;
use super::indexing::check_source;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::Shader;

/// The largest `sampling_ratio`. It bounds the loops of an invocation.
const MOST_SAMPLES: usize = 4096;
/// The most samples along one axis of a bin that has as many as it is wide, as on the CPU. Only
/// those on the map are visited.
const MOST_ELEMENTS: usize = 1 << 20;

wgpu_kernels![WgpuKernel::new(
    KernelDef {
        op: "RoiAlign",
        types: &[("T1", FLOATS)],
        when: |node| node.attrs().find_int("sampling_ratio").unwrap_or(0) <= MOST_SAMPLES as i64,
        ..KernelDef::BASE
    },
    dispatches
)];

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, rois, images, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    let regions = Regions::new(cx.attrs, &x.shape, &rois.shape, 4, &y.shape)?;
    let (given, expected) = (images.count(), regions.count);
    ensure!(given == expected, InvalidArgument, "{given} images for {expected} regions");
    check_source(x, y)?;
    let RoiAlign { half_pixel, greatest, samples } = RoiAlign::new(cx.attrs)?;
    let shader = Shader::new(cx)
        .read("x", x)
        .read("rois", rois)
        .read("images", images)
        .write("y", y)
        .number("batch", regions.images)
        .number("channels", regions.channels)
        .sizes("size", &regions.size)
        .sizes("pooled", &regions.pooled)
        .number("samples", samples)
        .constant("MOST_ELEMENTS", MOST_ELEMENTS)
        .float("scale", regions.scale)
        .float("shift", if half_pixel { 0.5 } else { 0.0 })
        // Only the mode `output_half_pixel` forces regions to a size of at least 1.
        .float("least_extent", if half_pixel { -3.0e38 } else { 1.0 });
    let (combined, result) = match greatest {
        true => (
            "if (!found || value > total) { total = value; } found = true;",
            "select(total, max(total, 0.0), off)",
        ),
        false => ("total += value;", "total / max(f32(rows.count) * f32(columns.count), 1.0)"),
    };
    let code = include_str!("roi_align.wgsl").replace("COMBINED", combined).replace("RESULT", result);
    Ok(vec![shader.each(y.count(), &code)?])
}
