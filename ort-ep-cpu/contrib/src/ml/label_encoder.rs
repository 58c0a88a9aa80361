//! Key-to-value mapping (`LabelEncoder`).

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, OutputsFrom, RunCx};
use ort_core::ir::Attributes;
use ort_core::seeded::HashMap;
use ort_core::spec::ONNX_ML;
use ort_core::tensor::{CompactString, Tensor, TensorView};
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_threads::interrupt::{spend_text, spending};

cpu_kernels![KernelDef {
    domain: ONNX_ML,
    op: "LabelEncoder",
    outputs: OutputsFrom::Kernel,
    make,
    ..KernelDef::BASE
}];

/// A hashable key of any input type.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    Int(i64),
    /// The bits of a canonical `f64`: all NaNs are equal, and so are both zeros.
    Float(u64),
    Text(CompactString),
}

fn float_key(value: f64) -> Key {
    // Adding 0 turns a negative zero to a positive one (IEEE 754, round to nearest).
    let canonical = if value.is_nan() { f64::NAN } else { value + 0.0 };
    Key::Float(canonical.to_bits())
}

fn keys_of(view: &TensorView<'_>) -> Result<Vec<Key>> {
    Ok(match view.dtype() {
        DType::String => {
            let texts = view.strings()?.iter().inspect(|text| spend_text(text));
            texts.cloned().map(Key::Text).collect()
        }
        DType::F32 => spending(2, view.to_vec::<f32>()?).map(|key| float_key(f64::from(key))).collect(),
        DType::F64 => spending(2, view.to_vec::<f64>()?).map(float_key).collect(),
        _ => spending(2, view.to_ints()?).map(Key::Int).collect(),
    })
}

/// Reads the keys or the values from whichever of the four attributes is given.
fn listed(attrs: &Attributes, what: &str) -> Result<Tensor> {
    let name = |kind: &str| format!("{what}_{kind}");
    // The tensor attributes of opset 4 win over the lists.
    if let Some(tensor) = attrs.find_tensor(&name("tensor")) {
        return Ok(tensor.clone());
    }
    if let Some(ints) = attrs.find_ints(&name("int64s")) {
        return Tensor::from_slice(&[ints.len()], ints);
    }
    if let Some(floats) = attrs.find_floats(&name("floats")) {
        return Tensor::from_slice(&[floats.len()], floats);
    }
    let strings = attrs.find_strings(&name("strings"));
    let strings = strings.ok_or_else(|| error!(InvalidGraph, "LabelEncoder has no {what}"))?;
    Tensor::from_strings(&[strings.len()], strings.to_vec())
}

/// Returns the value for elements that have no key.
fn default_value(attrs: &Attributes, values: &Tensor) -> Result<Tensor> {
    // A default tensor belongs to a tensor of values; the lists have typed defaults.
    if attrs.get("values_tensor").is_some()
        && let Some(tensor) = attrs.find_tensor("default_tensor")
    {
        ensure!(
            tensor.dtype() == values.dtype() && tensor.element_count() == 1,
            InvalidGraph,
            "default_tensor is not a single {}",
            values.dtype().name()
        );
        return Ok(tensor.clone());
    }
    let number = attrs.int("default_int64")?;
    match values.dtype() {
        DType::String => Tensor::from_strings(&[1], vec![attrs.string("default_string")?.to_string()]),
        DType::F32 => Tensor::scalar(attrs.float("default_float")?),
        DType::F64 => Tensor::scalar(f64::from(attrs.float("default_float")?)),
        DType::I64 => Tensor::scalar(number),
        DType::I32 => Tensor::scalar(number as i32),
        DType::I16 => Tensor::scalar(number as i16),
        other => Err(error!(InvalidGraph, "LabelEncoder with values of {}", other.name())),
    }
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let keys = keys_of(&listed(cx.attrs(), "keys")?.view())?;
    let values = listed(cx.attrs(), "values")?;
    ensure!(
        keys.len() == values.element_count(),
        InvalidGraph,
        "got {} keys, expected one for each of the {} values",
        keys.len(),
        values.element_count()
    );
    let default = default_value(cx.attrs(), &values)?;
    // Of duplicate keys, the last one wins.
    let places: HashMap<Key, usize> = keys.into_iter().zip(0..).collect();
    // The keys, and the integers that some are converted from.
    let bound =
        |shapes: &IoShapes<'_>| elements(shapes.input(0)).saturating_mul(size_of::<Key>() + size_of::<i64>());
    Ok(Box::new(WithHeap { bound, run: move |cx: &mut RunCx<'_>| encode(cx, &places, &values, &default) }))
}

fn encode(cx: &mut RunCx<'_>, places: &HashMap<Key, usize>, values: &Tensor, default: &Tensor) -> Result<()> {
    let input = cx.input(0)?;
    // String keys are clones, so their bytes count too.
    let texts = spending(2, input.strings().unwrap_or(&[]));
    let texts = texts.fold(0, |sum: usize, text| sum.saturating_add(text.len().saturating_add(32)));
    // Held until the keys are dropped at the end of the function.
    let _texts = if texts > 0 { Some(cx.reserve(texts)?) } else { None };
    let found = spending(8, keys_of(&input)?).map(|key| places.get(&key).copied());
    if values.dtype() == DType::String {
        let (values, default) = (values.strings()?, default.strings()?);
        let default = default.first().ok_or_else(|| error!(Fail, "the default value is missing"))?;
        let labels = found.map(|place| place.map_or(default, |place| &values[place]).clone());
        let labels = cx.strings(input.shape(), labels)?;
        return cx.set(0, labels);
    }
    let width = values.dtype().byte_size().unwrap_or(1);
    let (from, default) = (values.view().bytes()?, default.view().bytes()?);
    let mut output = cx.allocate(values.dtype(), input.shape())?;
    for (place, to) in found.zip(output.bytes_mut()?.chunks_exact_mut(width)) {
        to.copy_from_slice(place.map_or(default, |place| &from[place * width..(place + 1) * width]));
    }
    let output = output.finish()?;
    cx.set(0, output)
}
