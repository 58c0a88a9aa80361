//! `GridSample` and `AffineGrid` kernels.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::{Result, ensure, error};

use super::lines::{SHORT_FLOATS, suffix};
use super::movement::{MOVED, by_bytes, element_bytes};
use super::resize::{choice, each};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const fn grid_sample(
    types: &'static [(&'static str, TypeSet)],
    when: fn(&NodeView<'_>) -> bool,
) -> CudaKernel {
    CudaKernel::new(KernelDef { op: "GridSample", types, when, ..KernelDef::BASE }, sampled)
}

cuda_kernels![
    grid_sample(&[("T1", MOVED), ("T2", SHORT_FLOATS)], |node| picks(node) && of_image(node)),
    grid_sample(&[("T1", SHORT_FLOATS), ("T2", SHORT_FLOATS)], |node| !picks(node) && of_image(node)),
    CudaKernel::new(
        KernelDef { op: "AffineGrid", types: &[("T1", SHORT_FLOATS)], host_inputs: &[1], ..KernelDef::BASE },
        affine_grid
    ),
];

/// Attribute values, by their numbers in `cu/sample.cu`.
const MODES: &[&str] = &["nearest", "linear", "cubic"];
const PADDINGS: &[&str] = &["zeros", "border", "reflection"];

fn picks(node: &NodeView<'_>) -> bool {
    node.attrs().find_string("mode") == Some("nearest")
}

/// Whether the input has one to three spatial axes.
fn of_image(node: &NodeView<'_>) -> bool {
    node.rank(0).is_none_or(|rank| (3..=5).contains(&rank))
}

fn sampled(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, grid, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let ([batch, planes, image @ ..], Some((rank, places))) = (&*x.shape, grid.shape.split_last()) else {
        return Err(error!(
            InvalidArgument,
            "the image of shape {:?} does not match the grid of shape {:?}", x.shape, grid.shape
        ));
    };
    let fits = *rank == image.len() && places.len() == image.len() + 1 && places.first() == Some(batch);
    ensure!(
        fits && (1..=3).contains(rank),
        InvalidArgument,
        "the image of shape {:?} does not match the grid of shape {:?}",
        x.shape,
        grid.shape
    );
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let points = y.count() / batch / planes;
    let each = each(y.count(), *planes);
    let groups = planes.div_ceil(each);
    let kind = match grid.dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    let sizes = std::iter::repeat_n(&1, 3 - rank).chain(image).map(|size| *size as i64);
    let mut words: Vec<i64> = sizes.chain([*rank as i64]).collect();
    words.extend([choice(cx, "mode", MODES)?, choice(cx, "padding_mode", PADDINGS)?]);
    words.extend([i64::from(cx.attrs.flag("align_corners")?), kind]);
    words.extend([*planes, points, each, groups].map(|number| number as i64));
    let count = points.saturating_mul(groups).saturating_mul(*batch);
    let launch = match cx.attrs.string("mode")? {
        "nearest" => by_bytes("sample", "grid_nearest", element_bytes(x.dtype)?),
        _ => Launch::new("sample", format!("grid_sums_{}", suffix(x.dtype)?)),
    };
    let launch = launch.threads(count)?.tensor(x).tensor(grid).tensor(y);
    Ok(vec![launch.ints::<12>(&words)?.uint(count)?])
}

fn affine_grid(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (theta, y) = (cx.input(0)?, cx.output(0)?);
    let (Some(rank), Some(spatial)) = (y.shape.last(), y.shape.get(1..y.rank().saturating_sub(1))) else {
        return Err(error!(InvalidArgument, "a grid of shape {:?}", y.shape));
    };
    let fits = *theta.shape == [y.size(0), *rank, rank + 1] && spatial.len() == *rank && *rank <= 3;
    ensure!(fits, InvalidArgument, "maps of shape {:?} for a grid of shape {:?}", theta.shape, y.shape);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    // Coordinates are listed from the innermost axis outwards.
    let missing = std::iter::repeat_n(&1, 3 - rank);
    let mut numbers: Vec<usize> = spatial.iter().rev().chain(missing).copied().collect();
    numbers.extend([*rank, spatial.iter().product(), usize::from(cx.attrs.flag("align_corners")?)]);
    let launch = Launch::new("sample", format!("affine_grid_{}", suffix(theta.dtype)?)).threads(y.count())?;
    Ok(vec![launch.tensor(theta).tensor(y).uints::<6>(&numbers)?.uint(y.count())?])
}
