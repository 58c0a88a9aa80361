//! `GridSample` and `AffineGrid` kernels.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::problem::{AffineGrid, GridSample};
use ort_core::{Result, ensure};

use super::elements::{MOVED, by_bytes, element_bytes};
use super::resize::{choice, each};
use super::rows::{SHORT_FLOATS, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const fn grid_sample(
    types: &'static [(&'static str, TypeSet)],
    when: fn(&NodeView<'_>) -> bool,
) -> CudaKernel {
    CudaKernel::new(KernelDef { op: "GridSample", types, when, ..KernelDef::BASE }, sampled)
}

cuda_kernels![
    grid_sample(&[("T1", MOVED), ("T2", SHORT_FLOATS)], |node| GridSample::moves(node.attrs())
        && of_image(node)),
    grid_sample(&[("T1", SHORT_FLOATS), ("T2", SHORT_FLOATS)], |node| !GridSample::moves(node.attrs())
        && of_image(node)),
    CudaKernel::new(
        KernelDef { op: "AffineGrid", types: &[("T1", SHORT_FLOATS)], host_inputs: &[1], ..KernelDef::BASE },
        affine_grid
    ),
];

/// Attribute values, by their numbers in `cu/sample.cu`.
const MODES: &[&str] = &["nearest", "linear", "cubic"];
const PADDINGS: &[&str] = &["zeros", "border", "reflection"];

/// Whether the input has one to three spatial axes.
fn of_image(node: &NodeView<'_>) -> bool {
    node.rank(0).is_none_or(|rank| (3..=5).contains(&rank))
}

fn sampled(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, grid, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let GridSample { batch, channels: planes, image, points } = GridSample::new(&x.shape, &grid.shape)?;
    let rank = image.len();
    ensure!(
        (1..=3).contains(&rank),
        InvalidArgument,
        "the image of shape {:?} does not match the grid of shape {:?}",
        x.shape,
        grid.shape
    );
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let each = each(y.count(), planes);
    let groups = planes.div_ceil(each);
    let kind = match grid.dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    let sizes = std::iter::repeat_n(&1, 3 - rank).chain(&image).map(|size| *size as i64);
    let mut words: Vec<i64> = sizes.chain([rank as i64]).collect();
    words.extend([choice(cx, "mode", MODES)?, choice(cx, "padding_mode", PADDINGS)?]);
    words.extend([i64::from(cx.attrs.flag("align_corners")?), kind]);
    words.extend([planes, points, each, groups].map(|number| number as i64));
    let count = points.saturating_mul(groups).saturating_mul(batch);
    let launch = match cx.attrs.string("mode")? {
        "nearest" => by_bytes("sample", "grid_nearest", element_bytes(x.dtype)?),
        _ => Launch::new("sample", format!("grid_sums_{}", suffix(x.dtype)?)),
    };
    let launch = launch.threads(count)?.tensor(x).tensor(grid).tensor(y);
    Ok(vec![launch.ints::<12>(&words)?.uint(count)?])
}

fn affine_grid(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (theta, y) = (cx.input(0)?, cx.output(0)?);
    let grid = AffineGrid::new(cx.attrs, &theta.shape, &y.shape)?;
    let rank = grid.inner_first.len();
    ensure!(rank <= 3, InvalidArgument, "a grid of shape {:?}", y.shape);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    // Coordinates are listed from the innermost axis outwards.
    let mut numbers = grid.inner_first;
    numbers.resize(3, 1);
    numbers.extend([rank, grid.points, usize::from(grid.align_corners)]);
    let launch = Launch::new("sample", format!("affine_grid_{}", suffix(theta.dtype)?)).threads(y.count())?;
    Ok(vec![launch.tensor(theta).tensor(y).uints::<6>(&numbers)?.uint(y.count())?])
}
