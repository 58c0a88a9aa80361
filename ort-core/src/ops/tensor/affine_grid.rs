//! `AffineGrid`: sampling positions of an affine map, for `GridSample`.

use super::index_gradients;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{Grad, InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, ensure, error};

static AFFINE_GRID: OpSpec = OpSpec {
    name: "AffineGrid",
    grad: Grad::Rule(index_gradients::of_affine_grid),
    since: 20,
    first: 20,
    inputs: &[one("theta", "T1"), one("size", "T2").host()],
    outputs: &[one("grid", "T1")],
    types: &[var("T1", TypeSet::FLOATS), var("T2", TypeSet::of(&[DType::I64]))],
    attrs: &[attr::int("align_corners", 0)],
    infer,
    ..OP
};

ops![AFFINE_GRID];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    if let Some(theta) = cx.shape(0) {
        ensure!(theta.len() == 3, InvalidGraph, "theta has shape {theta:?}, expected [N, 2, 3] or [N, 3, 4]");
    }
    let Some(size) = cx.dims(1) else { return Ok(()) };
    let (4 | 5, [batch, _, spatial @ ..]) = (size.len(), size.as_slice()) else {
        return Err(error!(InvalidGraph, "size is {size:?}, expected [N, C, H, W] or [N, C, D, H, W]"));
    };
    let negative = size.iter().any(|size| size.as_constant().is_some_and(|size| size < 0));
    ensure!(!negative, InvalidGraph, "size {size:?} has a negative value");
    // [N, H, W, 2] or [N, D, H, W, 3]: a position for each pixel of the output.
    let mut shape = vec![batch.clone()];
    shape.extend_from_slice(spatial);
    shape.push(Dim::constant(spatial.len() as i64));
    cx.set_shape(0, shape)
}
