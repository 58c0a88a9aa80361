//! `Col2Im` kernel: each thread accumulates one pixel of the image.

use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::Col2ImAxis;
use ort_core::{Result, ensure};
use ort_gpu::read;

use super::rows::{SHORT_FLOATS, suffix};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel::new(
    KernelDef {
        op: "Col2Im",
        types: &[("T", SHORT_FLOATS)],
        host_inputs: &[1, 2],
        when: |node| read::has_few_image_axes(node, MOST_AXES),
        ..KernelDef::BASE
    },
    launches
)];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y, blocks) = (cx.input(0)?, cx.output(0)?, read::col2im(cx)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let (pixels, rows) = (blocks.volume(|axis| axis.size), blocks.volume(|axis| axis.block));
    let columns = blocks.volume(|axis| axis.places);
    let mut words = [blocks.axes.len(), pixels, rows, columns].map(|number| number as i64).to_vec();
    let lists: [fn(&Col2ImAxis) -> i64; 6] = [
        |axis| axis.size as i64,
        |axis| axis.block as i64,
        |axis| axis.places as i64,
        |axis| axis.stride,
        |axis| axis.begin,
        |axis| axis.dilation,
    ];
    let rank = blocks.axes.len();
    ensure!(rank <= MOST_AXES, NotImplemented, "an image of {rank} axes");
    for of in lists {
        words.extend(blocks.axes.iter().map(of).chain(std::iter::repeat(1)).take(MOST_AXES));
    }
    let launch = Launch::new("sample", format!("col2im_{}", suffix(x.dtype)?)).threads(y.count())?;
    let launch = launch.tensor(x).tensor(y).ints::<{ 4 + 6 * MOST_AXES }>(&words)?;
    Ok(vec![launch.uint(y.count())?])
}
