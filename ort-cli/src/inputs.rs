//! The inputs of a run: from files, or made up at random.

use anyhow::{Context, Result, bail};
use half::{bf16, f16};
use num_complex::Complex;
use ort_runtime::dim::{Bindings, Dim, Symbol};
use ort_runtime::dtype::{CastOptions, convert};
use ort_runtime::ir::{TensorType, ValueType};
use ort_runtime::tensor::{OptionalValue, SequenceValue, byte_count, element_count};
use ort_runtime::{DType, Model, Tensor, Value, ValueSpec, advise, host_memory_bytes};
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rand_pcg::Pcg64;

use crate::args::ModelArgs;
use crate::arrays::{read_npy, read_npz};

/// The inputs of `model`: those given, and the rest made up from the seed.
pub(crate) fn gather(args: &ModelArgs, model: &Model) -> Result<Vec<(String, Value)>> {
    let mut given: Vec<(String, Value)> = Vec::new();
    if let Some(path) = &args.inputs {
        given.extend(read_npz(path)?.into_iter().map(|(name, tensor)| (name, tensor.into())));
    }
    for (name, file) in &args.input {
        given.push((name.clone(), read_npy(file.as_ref())?.into()));
    }
    let specs = model.inputs();
    for (name, _) in &args.shapes {
        if !specs.iter().any(|spec| spec.name == *name) {
            bail!("--shape: {}", no_input(name, &specs));
        }
    }
    for (name, _) in &given {
        if !specs.iter().any(|spec| spec.name == *name) {
            bail!("{}", no_input(name, &specs));
        }
    }
    let bindings = bindings(args, model)?;
    let mut random = Pcg64::seed_from_u64(args.seed);
    for spec in &specs {
        if given.iter().any(|(name, _)| *name == spec.name) || spec.has_default {
            continue;
        }
        let shape = args.shapes.iter().find(|(name, _)| *name == spec.name).map(|(_, shape)| shape.clone());
        let value = make_up(spec, shape, &bindings, &mut random, args.memory_limit)
            .with_context(|| format!("input '{}' ({})", spec.name, spec.ty))?;
        given.push((spec.name.clone(), value));
    }
    Ok(given)
}

fn no_input(name: &str, specs: &[ValueSpec]) -> String {
    let names = specs.iter().map(|spec| spec.name.as_str());
    format!("the model has no input '{name}'; {}", advise("inputs", name, names))
}

/// The sizes of symbolic dimensions: those given, else 1.
fn bindings(args: &ModelArgs, model: &Model) -> Result<Bindings> {
    let symbols = model.symbols();
    let mut bindings = Bindings::new();
    for symbol in &symbols {
        bindings.insert(symbol.clone(), 1);
    }
    for (name, size) in args.single_dims()? {
        let Some(symbol) = symbols.iter().find(|symbol| symbol.to_string() == name) else {
            let known: Vec<String> = symbols.iter().map(Symbol::to_string).collect();
            let advice = advise("symbolic dimensions", &name, known.iter().map(String::as_str));
            bail!("the model has no symbolic dimension '{name}'; {advice}");
        };
        bindings.insert(symbol.clone(), size);
    }
    Ok(bindings)
}

fn make_up(
    spec: &ValueSpec,
    shape: Option<Vec<usize>>,
    bindings: &Bindings,
    random: &mut Pcg64,
    memory_limit: Option<usize>,
) -> Result<Value> {
    match &spec.ty {
        ValueType::Tensor(ty) => Ok(random_tensor(ty, shape, bindings, random, memory_limit)?.into()),
        ValueType::Sequence(element) => {
            let element_type = (**element).clone();
            Ok(Value::Sequence(SequenceValue { element_type, elements: Vec::new() }))
        }
        ValueType::Optional(element) => {
            Ok(Value::Optional(OptionalValue { element_type: (**element).clone(), element: None }))
        }
        other => bail!("values of type {other} cannot be made up; give it with --input"),
    }
}

/// Floats from the standard normal distribution, integers 0 or 1, booleans true, strings empty.
fn random_tensor(
    ty: &TensorType,
    shape: Option<Vec<usize>>,
    bindings: &Bindings,
    random: &mut Pcg64,
    memory_limit: Option<usize>,
) -> Result<Tensor> {
    let declared = || -> Result<Vec<usize>> {
        let sizes = ty.shape.as_ref().context("its rank is not known; give it with --shape")?;
        let size = |dim: &Dim| {
            let size = dim.evaluate(bindings).unwrap_or(1);
            usize::try_from(size).with_context(|| format!("dimension {dim} would be {size}"))
        };
        sizes.iter().map(size).collect()
    };
    let shape = shape.map_or_else(declared, Ok)?;
    let count = element_count(&shape)?;
    // Numbers are drawn as they are, or as float32 and then converted.
    let bytes = byte_count(ty.dtype, &shape)?.max(count.saturating_mul(4));
    let most = host_memory_bytes().unwrap_or(isize::MAX as usize).min(memory_limit.unwrap_or(usize::MAX));
    if bytes > most {
        bail!("shape {shape:?} would take {bytes} bytes of the {most} there are; use smaller dimensions");
    }
    let mut normal = || -> f64 { random.sample(StandardNormal) };
    Ok(match ty.dtype {
        DType::F32 => Tensor::from_vec(&shape, (0..count).map(|_| normal() as f32).collect())?,
        DType::F64 => Tensor::from_vec(&shape, (0..count).map(|_| normal()).collect())?,
        DType::F16 => Tensor::from_vec(&shape, (0..count).map(|_| f16::from_f64(normal())).collect())?,
        DType::BF16 => Tensor::from_vec(&shape, (0..count).map(|_| bf16::from_f64(normal())).collect())?,
        DType::C64 => {
            let elements = (0..count).map(|_| Complex::new(normal() as f32, normal() as f32)).collect();
            Tensor::from_vec(&shape, elements)?
        }
        DType::C128 => {
            Tensor::from_vec(&shape, (0..count).map(|_| Complex::new(normal(), normal())).collect())?
        }
        DType::Bool => Tensor::from_bools(&shape, &vec![true; count])?,
        DType::String => Tensor::from_strings(&shape, vec![String::new(); count])?,
        dtype => {
            let float = dtype.is_float();
            let drawn: Vec<f32> = (0..count)
                .map(|_| {
                    if float { random.sample(StandardNormal) } else { f32::from(random.random_range(0..2u8)) }
                })
                .collect();
            let mut bytes = vec![0u8; byte_count(dtype, &shape)?];
            let source: Vec<u8> = drawn.iter().flat_map(|value| value.to_le_bytes()).collect();
            convert(DType::F32, &source, dtype, &mut bytes, count, CastOptions::default())?;
            Tensor::from_bytes(dtype, &shape, bytes.into())?.to_owned_copy()?
        }
    })
}
