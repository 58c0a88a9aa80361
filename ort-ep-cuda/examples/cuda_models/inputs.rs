//! Made-up inputs: positions count up, masks are 1, types 0, other integers below 100, and floats from -1 to 1.

use half::{bf16, f16};
use ort_core::dim::{Bindings, Symbol};
use ort_core::dtype::DType;
use ort_core::session::{Model, ValueSpec};
use ort_core::tensor::Tensor;
use ort_core::{Result, error};

/// The inputs of a model whose symbols have these sizes, and 1 where they are not named.
pub(crate) fn make(model: &Model, sizes: &[(&str, usize)], seed: usize) -> Result<Vec<(String, Tensor)>> {
    let mut bindings = Bindings::new();
    let symbols = model.symbols();
    for (name, size) in sizes {
        let symbol = Symbol::named(*name);
        if !symbols.contains(&symbol) {
            return Err(error!(InvalidArgument, "the model has no size '{name}'"));
        }
        bindings.insert(symbol, *size as i64);
    }
    let specs = model.inputs().into_iter().enumerate();
    specs.map(|(index, spec)| Ok((spec.name.clone(), one(&spec, &bindings, seed * 31 + index)?))).collect()
}

fn one(spec: &ValueSpec, bindings: &Bindings, seed: usize) -> Result<Tensor> {
    let shape = spec.ty.shape().ok_or_else(|| error!(InvalidArgument, "'{}' has no shape", spec.name))?;
    let shape: Vec<usize> = shape.iter().map(|dim| dim.evaluate(bindings).unwrap_or(1) as usize).collect();
    let count: usize = shape.iter().product();
    let width = shape.last().copied().unwrap_or(1).max(1);
    let mix = |at: usize| ((at * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    let float = |at: usize| mix(at) as f32 / (1 << 23) as f32 - 1.0;
    let integer = |at: usize| match spec.name.as_str() {
        name if name.contains("position") => (at % width) as i64,
        name if name.contains("mask") => 1,
        name if name.contains("type") => 0,
        _ => i64::from(mix(at) % 100),
    };
    match spec.ty.dtype() {
        Some(DType::F32) => Tensor::from_vec(&shape, (0..count).map(float).collect()),
        Some(DType::F16) => Tensor::from_vec(&shape, (0..count).map(|at| f16::from_f32(float(at))).collect()),
        Some(DType::BF16) => {
            Tensor::from_vec(&shape, (0..count).map(|at| bf16::from_f32(float(at))).collect())
        }
        Some(DType::I64) => Tensor::from_vec(&shape, (0..count).map(integer).collect()),
        other => Err(error!(NotImplemented, "input '{}' of the type {other:?} is not made up", spec.name)),
    }
}
