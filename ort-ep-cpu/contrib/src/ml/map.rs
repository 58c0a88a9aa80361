//! Conversions from and to maps: `CastMap`, `DictVectorizer` and `ZipMap`.

use ort_core::dtype::text::format_float;
use ort_core::dtype::{DType, Element};
use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::ir::ValueType;
use ort_core::spec::ONNX_ML;
use ort_core::tensor::{CompactString, MapKeys, MapValue, SequenceValue, Tensor, Value, ValueView};
use ort_core::{Result, ensure, error, for_each_type};

use super::scores::Labels;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{Pace, UNITS_OF_A_TEXT, spend_text, spending};

/// The bytes of a map besides its keys and values: the value itself, and the box, the tensor and
/// its allocation.
const MAP_BYTES: usize = 256;

cpu_kernels![
    KernelDef {
        domain: ONNX_ML,
        op: "DictVectorizer",
        outputs: OutputsFrom::Kernel,
        make: make_vectorizer,
        ..KernelDef::BASE
    },
    KernelDef {
        domain: ONNX_ML,
        op: "CastMap",
        outputs: OutputsFrom::Kernel,
        make: make_cast,
        ..KernelDef::BASE
    },
    KernelDef {
        domain: ONNX_ML,
        op: "ZipMap",
        outputs: OutputsFrom::Kernel,
        make: make_zip,
        ..KernelDef::BASE
    },
];

/// Returns the keys and values of the map at input 0.
fn map_of<'a>(cx: &RunCx<'a>) -> Result<(&'a MapKeys, &'a Tensor)> {
    match cx.input_value(0)? {
        ValueView::Value(Value::Map(map)) => match &*map.values {
            Value::Tensor(values) => Ok((&map.keys, values)),
            // An empty map ends up here too, because it has no values that would tell the tensor's
            // type.
            _ => Err(error!(InvalidArgument, "the map has no values, or they are no single elements")),
        },
        _ => Err(error!(InvalidArgument, "expected a map")),
    }
}

/// Gathers elements of `values`. An absent place produces zero or an empty string.
fn pick(cx: &RunCx<'_>, values: &Tensor, places: &[Option<usize>]) -> Result<Tensor> {
    let shape = [1, places.len()];
    if let Ok(texts) = values.strings() {
        let text =
            |place: &Option<usize>| place.and_then(|place| texts.get(place).cloned()).unwrap_or_default();
        return cx.strings(&shape, places.iter().map(text));
    }
    let dtype = values.dtype();
    let mut output = cx.allocate(dtype, &shape)?;
    for_each_type!(dtype in [I64, F32, F64], T => {
        let from = values.to_vec::<T>()?;
        for (place, to) in spending(2, places.iter().zip(output.as_mut_slice::<T>()?)) {
            *to = place.and_then(|place| from.get(place).copied()).unwrap_or_default();
        }
    }, else => return Err(error!(NotImplemented, "a map of {} is not supported", DType::name(dtype))));
    output.finish()
}

fn make_vectorizer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let ints = cx.attrs().find_ints("int64_vocabulary").unwrap_or(&[]).to_vec();
    let strings = cx.attrs().find_strings("string_vocabulary").unwrap_or(&[]).to_vec();
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let (keys, values) = map_of(cx)?;
        let places: Vec<Option<usize>> = match keys {
            MapKeys::Ints(_, keys) => {
                let keys = spending(16, keys).copied();
                // The keys come from the input, so the map is seeded. The vocabulary decides the
                // order.
                let places: ort_core::seeded::HashMap<i64, usize> = keys.zip(0..).collect();
                spending(16, &ints).map(|word| places.get(word).copied()).collect()
            }
            MapKeys::Strings(keys) => {
                let keys = keys.iter().inspect(|key| spend_text(key)).map(String::as_str);
                let places: ort_core::seeded::HashMap<&str, usize> = keys.zip(0..).collect();
                let words = strings.iter().inspect(|word| spend_text(word));
                words.map(|word| places.get(word.as_str()).copied()).collect()
            }
        };
        let output = pick(cx, values, &places)?;
        cx.set(0, output)
    }))
}

fn make_cast(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let sparse = cx.attrs().string("map_form")? == "SPARSE";
    let most = usize::try_from(cx.attrs().int("max_map")?).unwrap_or(0);
    let to = match cx.attrs().string("cast_to")? {
        "TO_FLOAT" => DType::F32,
        "TO_INT64" => DType::I64,
        _ => DType::String,
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let (MapKeys::Ints(_, keys), values) = map_of(cx)? else {
            return Err(error!(InvalidArgument, "the keys of the map are strings, expected integers"));
        };
        // `max_map` may be any number: the places and the numbers of the row are reserved first.
        let columns = if sparse { most } else { keys.len() };
        let each_key = size_of::<(i64, usize)>() + size_of::<f32>();
        let tables = columns.saturating_mul(size_of::<Option<usize>>());
        let _tables = cx.reserve(tables.saturating_add(keys.len().saturating_mul(each_key)))?;
        // Sorted by key, because a map has no order of its own.
        let mut order: Vec<(i64, usize)> = spending(1, keys).copied().zip(0..).collect();
        let pace = Pace::default();
        order.sort_unstable_by(|a, b| {
            pace.step(2);
            a.cmp(b)
        });
        let negative = order.first().is_some_and(|(key, _)| *key < 0);
        ensure!(!(sparse && negative), InvalidArgument, "a key is negative, and map_form is SPARSE");
        // A sparse result has `max_map` columns, and a key is its column. For each column, its
        // place among the values.
        let mut places: Vec<Option<usize>> = vec![None; ort_core::tensor::element_count(&[1, columns])?];
        for (rank, (key, place)) in spending(2, order).enumerate() {
            // A dense result packs the values in the order of their keys.
            let column = if sparse { usize::try_from(key).ok() } else { Some(rank) };
            // Keys from `max_map` on have no column and are dropped.
            if let Some(column) = column.and_then(|column| places.get_mut(column)) {
                *column = Some(place);
            }
        }
        let output = cast(cx, values, &places, to)?;
        cx.set(0, output)
    }))
}

/// Returns a row of numbers.
fn row<T: Element>(
    cx: &RunCx<'_>,
    columns: usize,
    numbers: impl Iterator<Item = Result<T>>,
) -> Result<Tensor> {
    let mut output = cx.allocate(T::DTYPE, &[1, columns])?;
    for (to, number) in output.as_mut_slice::<T>()?.iter_mut().zip(numbers) {
        *to = number?;
    }
    output.finish()
}

/// Returns a row of the values at `places`, cast to another type.
fn cast(cx: &RunCx<'_>, values: &Tensor, places: &[Option<usize>], to: DType) -> Result<Tensor> {
    let columns = places.len();
    let no_number = |text: &str| error!(InvalidArgument, "'{text}' in a map is not a number");
    if let Ok(texts) = values.strings() {
        let text =
            |place: &Option<usize>| place.and_then(|place| texts.get(place)).map(CompactString::as_str);
        let places = || spending(UNITS_OF_A_TEXT, places);
        return match to {
            DType::String => {
                cx.strings(&[1, columns], places().map(|place| text(place).unwrap_or("0.f").to_string()))
            }
            DType::I64 => {
                let parse = |text: &str| text.trim().parse::<i64>().map_err(|_| no_number(text));
                row(cx, columns, places().map(|place| text(place).map_or(Ok(0), parse)))
            }
            _ => {
                let parse = |text: &str| text.trim().parse::<f32>().map_err(|_| no_number(text));
                row(cx, columns, places().map(|place| text(place).map_or(Ok(0.0), parse)))
            }
        };
    }
    let numbers = values.to_vec::<f32>()?;
    let number = |place: &Option<usize>| place.and_then(|place| numbers.get(place).copied());
    let each = |units: usize| spending(units, places);
    match to {
        DType::String => {
            // Six digits, like `%f` in C.
            let text = |x: f32| if x.is_finite() { format!("{x:.6}") } else { format_float(f64::from(x)) };
            let texts = each(UNITS_OF_A_TEXT);
            let texts = texts.map(|place| number(place).map_or("0.f".to_string(), text));
            cx.strings(&[1, columns], texts)
        }
        DType::I64 => row(cx, columns, each(2).map(|place| Ok(number(place).unwrap_or(0.0) as i64))),
        _ => row(cx, columns, each(2).map(|place| Ok(number(place).unwrap_or(0.0)))),
    }
}

fn make_zip(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let labels = Labels::read(cx.attrs(), "classlabels_int64s", "classlabels_strings")?;
    let (dtype, keys) = match labels {
        Labels::Ints(labels) => (DType::I64, MapKeys::Ints(DType::I64, labels)),
        Labels::Strings(labels) => (DType::String, MapKeys::Strings(labels)),
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let count = match &keys {
            MapKeys::Ints(_, keys) => keys.len(),
            MapKeys::Strings(keys) => keys.len(),
        };
        let input = cx.input(0)?;
        let columns = input.shape().last().copied().unwrap_or(0);
        ensure!(columns == count && count > 0, InvalidArgument, "{columns} columns for {count} labels");
        let rows = input.as_slice::<f32>()?.chunks(count);
        // Each row's keys, values, and the map itself.
        let key_bytes = match &keys {
            MapKeys::Ints(_, keys) => keys.len().saturating_mul(size_of::<i64>()),
            MapKeys::Strings(keys) => keys.iter().fold(0, |sum: usize, key| {
                sum.saturating_add(key.len()).saturating_add(size_of::<String>() + 32)
            }),
        };
        let row_bytes = key_bytes.saturating_add(count.saturating_mul(size_of::<f32>()) + MAP_BYTES);
        let _maps = cx.reserve(rows.len().saturating_mul(row_bytes))?;
        let mut elements = Vec::with_capacity(rows.len());
        let each_key = if dtype == DType::String { UNITS_OF_A_TEXT } else { 1 };
        // Each map gets its own copy of the keys, because maps own them.
        for row in spending(64 + each_key * count, rows) {
            let values = Box::new(Value::Tensor(Tensor::from_slice(&[count], row)?));
            elements.push(Value::Map(MapValue { keys: keys.clone(), values }));
        }
        let value = ValueType::tensor(DType::F32, None);
        let element_type = ValueType::Map(dtype, Box::new(value));
        cx.set(0, Value::Sequence(SequenceValue { element_type, elements }))
    }))
}
