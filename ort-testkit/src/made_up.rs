//! Synthetic inputs of models: positions count up, masks are 1, types 0, other integers below 100,
//! and floats from -1 to 1.

use half::{bf16, f16};
use ort_core::dim::{Bindings, Symbol};
use ort_core::dtype::DType;
use ort_core::session::{Model, ValueSpec};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, ensure, error};

/// The values that runs cycle through, by the name of a symbol or an input: `16` is the size of a
/// symbol, `3x16` the shape of an input, `@16` the value of its elements.
pub type Given = Vec<(String, Vec<String>)>;

/// Parses words of the form `NAME=ONE,OTHER...`.
pub fn given<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Given> {
    let parse = |word: &str| {
        let (name, list) = word
            .split_once('=')
            .ok_or_else(|| error!(InvalidArgument, "'{word}' is not NAME=VALUE,VALUE..."))?;
        Ok((name.to_owned(), list.split(',').map(str::to_owned).collect()))
    };
    words.into_iter().map(parse).collect()
}

/// Returns the inputs of a run. Sizes that are not given are 1.
///
/// # Errors
///
/// A name is neither a symbol of the model nor an input, or an input has an unsupported type.
pub fn inputs(model: &Model, given: &Given, run: usize) -> Result<Vec<(String, Value)>> {
    // A list without values must not divide by zero.
    let turn = |list: &[String]| list.get(run % list.len().max(1)).cloned().unwrap_or_default();
    let given: Vec<(&str, String)> = given.iter().map(|(name, list)| (name.as_str(), turn(list))).collect();
    let (symbols, specs) = (model.symbols(), model.inputs());
    let mut bindings = Bindings::new();
    for (name, written) in &given {
        let symbol = Symbol::named(*name);
        let is_symbol = symbols.contains(&symbol);
        ensure!(
            is_symbol || specs.iter().any(|spec| spec.name == *name),
            InvalidArgument,
            "the model has no size and no input '{name}'"
        );
        if is_symbol {
            bindings.insert(symbol, number(name, written)? as i64);
        }
    }
    let specs = specs.into_iter().enumerate();
    specs
        .map(|(index, spec)| {
            let own = given.iter().find(|(name, _)| *name == spec.name).map(|(_, own)| own.as_str());
            let value = made_up(&spec, own, &bindings, run * 31 + index)?;
            Ok((spec.name, value.into()))
        })
        .collect()
}

fn number(name: &str, text: &str) -> Result<usize> {
    text.parse().map_err(|_| error!(InvalidArgument, "'{name}': '{text}' is no number"))
}

/// Generates an input with the shape given for it, or the one that follows from the symbols' sizes.
fn made_up(spec: &ValueSpec, own: Option<&str>, bindings: &Bindings, seed: usize) -> Result<Tensor> {
    let value = own.and_then(|own| own.strip_prefix('@')).map(|text| number(&spec.name, text)).transpose()?;
    let sizes: Vec<usize> = match own.filter(|own| !own.starts_with('@')) {
        Some(shape) => shape.split('x').map(|size| number(&spec.name, size)).collect::<Result<_>>()?,
        None => {
            let shape =
                spec.ty.shape().ok_or_else(|| error!(InvalidArgument, "'{}' has no shape", spec.name))?;
            let size = |evaluated: Option<i64>| evaluated.and_then(|size| usize::try_from(size).ok());
            shape.iter().map(|dim| size(dim.evaluate(bindings).ok()).unwrap_or(1)).collect()
        }
    };
    let count: usize = sizes.iter().product();
    // A multiplicative hash, so that values differ between runs, inputs and elements but are
    // reproducible.
    let mix = |at: usize| ((at * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    // A last axis of size 0 has no elements, but it must not divide by zero.
    let width = sizes.last().copied().unwrap_or(1).max(1);
    let integer = |at: usize| match (value, spec.name.as_str()) {
        (Some(value), _) => value as i64,
        (_, name) if name.contains("position") => (at % width) as i64,
        (_, name) if name.contains("mask") => 1,
        (_, name) if name.contains("type") => 0,
        _ => i64::from(mix(at) % 100),
    };
    // 24 bits, which float32 holds exactly: the result is in [-1, 1).
    let float = |at: usize| value.map_or(mix(at) as f32 / (1 << 23) as f32 - 1.0, |value| value as f32);
    match spec.ty.dtype() {
        Some(DType::F32) => Tensor::from_vec(&sizes, (0..count).map(float).collect()),
        Some(DType::F16) => Tensor::from_vec(&sizes, (0..count).map(|at| f16::from_f32(float(at))).collect()),
        Some(DType::BF16) => {
            Tensor::from_vec(&sizes, (0..count).map(|at| bf16::from_f32(float(at))).collect())
        }
        Some(DType::I64) => Tensor::from_vec(&sizes, (0..count).map(integer).collect()),
        other => Err(error!(NotImplemented, "input '{}' of the type {other:?} is not made up", spec.name)),
    }
}
