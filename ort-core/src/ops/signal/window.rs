//! Window functions (`HannWindow`, `HammingWindow`, `BlackmanWindow`) and `MelWeightMatrix`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{Grad, InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, ensure, error};

const SIZES: TypeSet = TypeSet::of(&[DType::I32, DType::I64]);

const WINDOW: OpSpec = OpSpec {
    since: 17,
    inputs: &[one("size", "T1").host()],
    outputs: &[one("output", "T2")],
    types: &[var("T1", SIZES), var("T2", TypeSet::NUMERIC)],
    attrs: &[attr::int("output_datatype", 1), attr::int("periodic", 1)],
    infer: infer_window,
    ..OP
};

static HANN_WINDOW: OpSpec = OpSpec { name: "HannWindow", first: 17, ..WINDOW };
static HAMMING_WINDOW: OpSpec = OpSpec { name: "HammingWindow", first: 17, ..WINDOW };
static BLACKMAN_WINDOW: OpSpec = OpSpec { name: "BlackmanWindow", first: 17, ..WINDOW };

static MEL_WEIGHT_MATRIX: OpSpec = OpSpec {
    name: "MelWeightMatrix",
    grad: Grad::Zero("the edges of its filters are rounded"),
    since: 17,
    first: 17,
    inputs: &[
        one("num_mel_bins", "T1").host(),
        one("dft_length", "T1").host(),
        one("sample_rate", "T1"),
        one("lower_edge_hertz", "T2"),
        one("upper_edge_hertz", "T2"),
    ],
    outputs: &[one("output", "T3")],
    types: &[var("T1", SIZES), var("T2", TypeSet::FLOATS), var("T3", TypeSet::NUMERIC)],
    attrs: &[attr::int("output_datatype", 1)],
    infer: infer_mel,
    ..OP
};

ops![HANN_WINDOW, HAMMING_WINDOW, BLACKMAN_WINDOW, MEL_WEIGHT_MATRIX];

fn output_datatype(cx: &InferCx<'_>) -> Result<DType> {
    let code = cx.attrs.int("output_datatype")?;
    let dtype = i32::try_from(code).ok().and_then(DType::from_onnx);
    dtype
        .filter(|dtype| TypeSet::NUMERIC.contains(*dtype))
        .ok_or_else(|| error!(InvalidGraph, "output_datatype {code} is not a numeric type"))
}

/// The size that an input holds, or a fresh symbolic dimension if it is not constant.
fn size(cx: &InferCx<'_>, index: usize) -> Result<Dim> {
    let size = match cx.dims(index).as_deref() {
        Some([size]) => size.clone(),
        Some(_) => return Err(error!(InvalidGraph, "input {index} must hold one number")),
        None => cx.fresh(),
    };
    let negative = size.as_constant().is_some_and(|size| size < 0);
    ensure!(!negative, InvalidGraph, "input {index} is {size}, expected a size of 0 or more");
    Ok(size)
}

fn infer_window(cx: &mut InferCx<'_>) -> Result<()> {
    let (dtype, size) = (output_datatype(cx)?, size(cx, 0)?);
    cx.set(0, dtype, Some(vec![size]));
    Ok(())
}

fn infer_mel(cx: &mut InferCx<'_>) -> Result<()> {
    let (dtype, bands, length) = (output_datatype(cx)?, size(cx, 0)?, size(cx, 1)?);
    // One filter per column: [dft_length / 2 + 1, num_mel_bins].
    let bins = length.floor_div(&Dim::constant(2)) + 1;
    cx.set(0, dtype, Some(vec![bins, bands]));
    Ok(())
}
