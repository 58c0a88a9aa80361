//! Model inputs: read from files, or generated at random.

use std::collections::HashSet;

use anyhow::{Context, Result, anyhow, bail};
use half::{bf16, f16};
use num_complex::Complex;
use ort_runtime::dim::{Bindings, Dim, Symbol, unify};
use ort_runtime::dtype::{CastOptions, convert};
use ort_runtime::ir::{TensorType, ValueType};
use ort_runtime::tensor::{OptionalValue, SequenceValue, byte_count, element_count};
use ort_runtime::{DType, Error, ErrorKind, Model, Tensor, TensorBuffer, Value, ValueSpec, advise};
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rand_pcg::Pcg64;

use crate::args::{ModelArgs, human_bytes};
use crate::arrays::{Room, conversion, open_npz, read_npy};
use crate::output::listed;
use crate::usage::wrong_usage;

/// Returns the inputs of `model`: those given, and random values for the rest.
pub(crate) fn gather(args: &ModelArgs, model: &Model) -> Result<Vec<(String, Value)>> {
    let specs = model.inputs();
    let known: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    // A misspelled name would silently leave the shape at its default.
    if let Some((name, _)) = args.shapes.iter().find(|(name, _)| !known.contains(name.as_str())) {
        bail!("--shape: {}", no_input(name, &specs));
    }
    // Sizes in a file are untrusted, so all inputs share one memory budget.
    let mut room = Room::new(args.memory_limit);
    let mut given = read(args, (&specs, &known), &mut room)?;
    // Sizes are checked before random inputs are allocated for them.
    check_sizes(args, model, &given)?;
    let is_given: HashSet<String> = given.iter().map(|(name, _)| name.clone()).collect();
    let bindings = bindings(args, model)?;
    // One generator serves all inputs in the model's order, so a seed repeats them exactly.
    let mut random = Pcg64::seed_from_u64(args.seed);
    for spec in &specs {
        // An input with a default needs no value: an old model lists its weights among its inputs.
        if is_given.contains(&spec.name) || spec.has_default {
            continue;
        }
        let shape = args.shapes.iter().find(|(name, _)| *name == spec.name).map(|(_, shape)| shape.clone());
        let value = make_up(spec, shape, &bindings, &mut random, &room)
            .with_context(|| format!("input '{}' ({})", spec.name, spec.ty))?;
        // Random inputs share the budget of the arrays that were read.
        room.take(value.byte_count());
        given.push((spec.name.clone(), value));
    }
    Ok(given)
}

/// Reads the inputs given as files. Arrays that are not inputs of the model are an error before any
/// data is read.
fn read(
    args: &ModelArgs,
    (specs, known): (&[ValueSpec], &HashSet<&str>),
    room: &mut Room,
) -> Result<Vec<(String, Value)>> {
    let mut given: Vec<(String, Value)> = Vec::new();
    if let Some(path) = &args.inputs {
        let mut archive = open_npz(path)?;
        let names: Vec<String> = archive.names().map(str::to_string).collect();
        if let Some(other) = names.iter().find(|name| !known.contains(name.as_str())) {
            bail!("{}: {}; rename the array", path.display(), no_input(other, specs));
        }
        for name in &names {
            let tensor =
                archive.read(name, room.most()).with_context(|| format!("reading {}", path.display()))?;
            room.take(tensor.byte_count());
            check_type(name, &tensor, specs).with_context(|| path.display().to_string())?;
            given.push((name.clone(), tensor.into()));
        }
    }
    for (name, file) in &args.input {
        if !known.contains(name.as_str()) {
            bail!("{}", no_input(name, specs));
        }
        if given.iter().any(|(known, _)| known == name) {
            bail!("input '{name}' is given twice; leave one out");
        }
        let tensor = read_npy(file.as_ref(), room.most()).with_context(|| format!("input '{name}'"))?;
        room.take(tensor.byte_count());
        check_type(name, &tensor, specs)?;
        given.push((name.clone(), tensor.into()));
    }
    Ok(given)
}

/// Refuses an array of another type than the input's, before anything is computed.
fn check_type(name: &str, tensor: &Tensor, specs: &[ValueSpec]) -> Result<()> {
    let spec = specs.iter().find(|spec| spec.name == name);
    let Some(ValueType::Tensor(expected)) = spec.map(|spec| &spec.ty) else { return Ok(()) };
    let (given, expected) = (tensor.dtype(), expected.dtype);
    if given != expected {
        let advice = conversion("array", expected);
        let advice = advice.map_or_else(String::new, |advice| format!("; {advice}"));
        bail!("input '{name}' is {}, expected {}{advice}", given.name(), expected.name());
    }
    Ok(())
}

/// Returns the error of a run on these inputs. If random integers may be the cause, it says so.
pub(crate) fn explained(args: &ModelArgs, inputs: &[(String, Value)], problem: Error) -> anyhow::Error {
    // These failures do not depend on the values of inputs.
    let is_of_values =
        !matches!(problem.kind(), ErrorKind::OutOfMemory | ErrorKind::Cancelled | ErrorKind::EpFail);
    let mut given: HashSet<String> = args.input.iter().map(|(name, _)| name.clone()).collect();
    if let Some(archive) = args.inputs.as_deref().and_then(|path| open_npz(path).ok()) {
        given.extend(archive.names().map(str::to_string));
    }
    let is_integer = |value: &Value| value.tensor().is_ok_and(|tensor| tensor.dtype().is_integer());
    let random = inputs.iter().filter(|(name, value)| !given.contains(name) && is_integer(value));
    let random: Vec<String> = random.map(|(name, _)| format!("'{name}'")).collect();
    if random.is_empty() || !is_of_values {
        return problem.into();
    }
    anyhow!(
        "{problem}; the values of {} were random, 0 or 1: if the model needs others, give them with --input",
        listed(&random)
    )
}

fn no_input(name: &str, specs: &[ValueSpec]) -> String {
    let names = specs.iter().map(|spec| spec.name.as_str());
    format!("the model has no input '{name}'; {}", advise("inputs", name, names))
}

/// Refuses a `--dim` or `--shape` that an input contradicts: it would have no effect.
fn check_sizes(args: &ModelArgs, model: &Model, given: &[(String, Value)]) -> Result<()> {
    let asked = asked_sizes(args, &model.symbols())?;
    let tensors = || given.iter().filter_map(|(name, value)| Some((name, value.tensor().ok()?.shape())));
    for (name, shape) in &args.shapes {
        if let Some((_, actual)) = tensors().find(|(given, _)| *given == name)
            && actual != shape
        {
            bail!(
                "--shape {name}: the file of input '{name}' has shape {actual:?}, --shape says {shape:?}; leave it out"
            );
        }
    }
    let shapes = args.shapes.iter().map(|(name, shape)| (name, shape.as_slice()));
    for (name, shape) in tensors().chain(shapes) {
        let declared = model.inputs().into_iter().find(|spec| spec.name == *name);
        let Some(formal) = declared.as_ref().and_then(|spec| spec.ty.shape()) else { continue };
        for (axis, (dim, &size)) in formal.iter().zip(shape).enumerate() {
            // Only sizes from the command line are checked here. The run checks the others.
            let own = dim.symbols().into_iter().find_map(|symbol| Some((asked.get(&symbol)?, symbol)));
            if let Some((value, symbol)) = own
                // Solving may bind further symbols, so it works on a copy of the given sizes.
                && unify(dim, i64::try_from(size)?, &mut asked.clone()).is_err()
            {
                bail!(
                    "--dim {symbol}={value} contradicts input '{name}': its axis {axis} is the dimension \
                     '{dim}', but has size {size}; leave --dim {symbol} out, or give an input of that size"
                );
            }
        }
    }
    Ok(())
}

/// Returns the sizes of the symbolic dimensions: those given, otherwise 1.
fn bindings(args: &ModelArgs, model: &Model) -> Result<Bindings> {
    // Every symbol gets a size, because random tensors need concrete shapes.
    let symbols = model.symbols();
    let mut bindings = Bindings::new();
    for symbol in &symbols {
        bindings.insert(symbol.clone(), 1);
    }
    for (symbol, size) in asked_sizes(args, &symbols)?.iter() {
        bindings.insert(symbol.clone(), size);
    }
    Ok(bindings)
}

/// Returns the sizes given with `--dim`. A name that the model does not have is an error, and so
/// are two sizes for one name.
fn asked_sizes(args: &ModelArgs, symbols: &[Symbol]) -> Result<Bindings> {
    let mut asked = Bindings::new();
    for (name, size) in args.single_dims()? {
        let Some(symbol) = symbols.iter().find(|symbol| symbol.to_string() == name) else {
            if let Some((_, size)) = args.fix_dims.iter().find(|(fixed, _)| *fixed == name) {
                bail!(
                    "--dim {name}: --fix-dim has fixed '{name}' to {size} at load time; leave --dim {name} out"
                );
            }
            let known: Vec<String> = symbols.iter().map(Symbol::to_string).collect();
            let advice = advise("symbolic dimensions", &name, known.iter().map(String::as_str));
            bail!("the model has no symbolic dimension '{name}'; {advice}");
        };
        if let Some(other) = asked.get(symbol).filter(|other| *other != size) {
            wrong_usage!("--dim {name} is given twice, as {other} and {size}; give it once");
        }
        asked.insert(symbol.clone(), size);
    }
    Ok(asked)
}

fn make_up(
    spec: &ValueSpec,
    shape: Option<Vec<usize>>,
    bindings: &Bindings,
    random: &mut Pcg64,
    room: &Room,
) -> Result<Value> {
    match &spec.ty {
        ValueType::Tensor(ty) => Ok(random_tensor(ty, shape, bindings, random, room)?.into()),
        // Sequences and optionals stay empty: their types do not give a number of elements.
        ValueType::Sequence(element) => {
            let element_type = (**element).clone();
            Ok(Value::Sequence(SequenceValue { element_type, elements: Vec::new() }))
        }
        ValueType::Optional(element) => {
            Ok(Value::Optional(OptionalValue { element_type: (**element).clone(), element: None }))
        }
        other => bail!("there are no random values of type {other}; give the input with --input"),
    }
}

/// Returns a random tensor: standard normal floats, integers 0 or 1, `true`, empty strings.
fn random_tensor(
    ty: &TensorType,
    shape: Option<Vec<usize>>,
    bindings: &Bindings,
    random: &mut Pcg64,
    room: &Room,
) -> Result<Tensor> {
    let declared = || -> Result<Vec<usize>> {
        let sizes =
            ty.shape.as_ref().context("the model does not declare its rank; give its shape with --shape")?;
        let size = |dim: &Dim| {
            // An expression without a value, for instance with a division by 0, counts as 1.
            let size = dim.evaluate(bindings).unwrap_or(1);
            usize::try_from(size).with_context(|| {
                format!("dimension {dim} is {size}, expected 0 or more; give other sizes with --dim")
            })
        };
        sizes.iter().map(size).collect()
    };
    let shape = shape.map_or_else(declared, Ok)?;
    let count = element_count(&shape)?;
    let bytes = match ty.dtype {
        DType::String => count.saturating_mul(size_of::<String>()),
        dtype => byte_count(dtype, &shape)?,
    };
    // Check before allocating: a symbolic size may be any number.
    if bytes > room.most() {
        let (needed, most) = (human_bytes(bytes), human_bytes(room.most()));
        bail!("shape {shape:?} needs {needed}, but {most} are available; {}", room.advice());
    }
    if ty.dtype == DType::String {
        // Reserving reports a failed allocation as an error, where `vec!` would abort.
        let mut texts = Vec::new();
        texts.try_reserve_exact(count).with_context(|| format!("{count} strings"))?;
        texts.resize(count, String::new());
        return Ok(Tensor::from_strings(&shape, texts)?);
    }
    // Fill the tensor in place, because a second copy might not fit in memory.
    let mut tensor = TensorBuffer::new(ty.dtype, &shape)?;
    let mut normal = || -> f64 { random.sample(StandardNormal) };
    match ty.dtype {
        DType::F32 => tensor.as_mut_slice::<f32>()?.fill_with(|| normal() as f32),
        DType::F64 => tensor.as_mut_slice::<f64>()?.fill_with(normal),
        DType::F16 => tensor.as_mut_slice::<f16>()?.fill_with(|| f16::from_f64(normal())),
        DType::BF16 => tensor.as_mut_slice::<bf16>()?.fill_with(|| bf16::from_f64(normal())),
        DType::C64 => {
            tensor
                .as_mut_slice::<Complex<f32>>()?
                .fill_with(|| Complex::new(normal() as f32, normal() as f32));
        }
        DType::C128 => tensor.as_mut_slice::<Complex<f64>>()?.fill_with(|| Complex::new(normal(), normal())),
        DType::Bool => tensor.bytes_mut()?.fill(1),
        // The remaining types are converted from float32.
        _ => draw_others(&mut tensor, count, random)?,
    }
    Ok(tensor.tensor()?)
}

/// Fills a tensor with integers 0 or 1, or with floats narrower than 16 bits. Chunks are drawn as
/// float32 and converted.
fn draw_others(tensor: &mut TensorBuffer, count: usize, random: &mut Pcg64) -> Result<()> {
    /// The elements per chunk. Sub-byte types pack several elements per byte, so chunks are a
    /// multiple of eight elements.
    const PART: usize = 1 << 12;
    let (dtype, is_float) = (tensor.dtype(), tensor.dtype().is_float());
    let part_bytes = byte_count(dtype, &[PART])?;
    let mut left = count;
    for part in tensor.bytes_mut()?.chunks_mut(part_bytes.max(1)) {
        let elements = left.min(PART);
        let mut draw = || -> f32 {
            if is_float { random.sample(StandardNormal) } else { f32::from(random.random_range(0..2u8)) }
        };
        // A chunk of float32 values takes 16 KiB, so the copy is negligible.
        let drawn: Vec<u8> = (0..elements).flat_map(|_| draw().to_le_bytes()).collect();
        convert(DType::F32, &drawn, dtype, part, elements, CastOptions::default())?;
        left -= elements;
    }
    Ok(())
}
