//! Max unpooling: `MaxUnpool` scatters the values of a max pool back to its indices.

use super::geometry::Windows;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::tensor::index_gradients;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{ErrorKind, Result, ensure};

static MAX_UNPOOL: OpSpec = OpSpec {
    name: "MaxUnpool",
    grad: Grad::Rule(index_gradients::of_max_unpool),
    since: 22,
    first: 9,
    inputs: &[one("X", "T1"), one("I", "T2"), opt("output_shape", "T2").host()],
    outputs: &[one("output", "T1")],
    types: &[var("T1", TypeSet::FLOATS), var("T2", TypeSet::of(&[DType::I64]))],
    attrs: &[
        attr::required("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
    ],
    infer,
    ..OP
};

ops![MAX_UNPOOL];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(image) = cx.shape(0) else { return Ok(()) };
    cx.require_shape(1, image, ErrorKind::Fail)?;
    let windows = Windows::of_pool(cx.attrs, image.len())?;
    let (outer, spatial) = image.split_at_checked(2).unwrap_or((image, &[]));
    let mut shape = outer.to_vec();
    shape.extend(windows.transposed_outputs(cx.attrs, spatial)?);
    // `output_shape` decides. If its elements are unknown, the output's rank still is known.
    if cx.has_input(2) {
        let rank = shape.len();
        shape = cx.dims(2).unwrap_or_else(|| (0..rank).map(|_| Dim::unknown()).collect());
        ensure!(
            shape.len() == rank,
            InvalidGraph,
            "output_shape has {} values, expected {rank}",
            shape.len()
        );
    }
    cx.set_shape(0, shape)
}
