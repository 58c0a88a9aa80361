//! Variants of the samples of rewrite rules, and the numbers they run on.

use ort_runtime::dtype::DType;
use ort_runtime::ir::ValueType;
use ort_runtime::{Model, Result, Tensor, Value};

/// About how many variants of one change, and how many of two, are tried for a sample.
const MOST: usize = 8;

/// What inputs hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    /// Numbers on both sides of zero, no two alike.
    Plain,
    /// Every kind of float.
    Special,
    /// Plain numbers, and masks that hide some keys from some queries and all from others.
    Masked,
}

/// An entry of a sample: its name, and what it says of it.
type Entry = (String, String);

/// The texts of samples that differ from `text` in one or two respects. Not all are valid graphs.
pub(crate) fn variants(pattern: &str, text: &str) -> Vec<&'static str> {
    let split =
        |entry: &str| entry.split_once('=').map(|(name, value)| (name.to_string(), value.to_string()));
    let entries: Vec<Entry> = text.split_whitespace().filter_map(split).collect();
    let once = changes(pattern, &entries);
    let twice: Vec<Vec<Entry>> = once.iter().flat_map(|changed| changes(pattern, changed)).collect();
    // A fixed choice, spread over all of them.
    let spread = |all: &[Vec<Entry>]| -> Vec<String> {
        all.iter().step_by((all.len() / MOST).max(1)).map(|entries| join(entries)).collect()
    };
    let mut texts = [spread(&once), spread(&twice)].concat();
    texts.sort_unstable();
    texts.dedup();
    texts.into_iter().map(|text| &*Box::leak(text.into_boxed_str())).collect()
}

fn join(entries: &[Entry]) -> String {
    entries.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

/// The entries with each single change.
fn changes(pattern: &str, entries: &[Entry]) -> Vec<Vec<Entry>> {
    let mut all = Vec::new();
    for (index, (name, value)) in entries.iter().enumerate() {
        if pattern.contains(&format!("{name}?")) {
            all.push(entries.iter().filter(|(other, _)| other != name).cloned().collect());
        }
        for changed in other_values(name, value) {
            let mut entries = entries.to_vec();
            if let Some(entry) = entries.get_mut(index) {
                entry.1 = changed;
            }
            all.push(entries);
        }
    }
    all.extend(equal_sizes(entries));
    all.extend(["f64", "f16"].into_iter().map(|dtype| of_type(entries, dtype)));
    if !entries.iter().any(|(name, _)| name == "numbers") {
        let sizes = ["f32[1]", "f32[1,1]", "f32[1,1,1]", "f32[1,1,1,1,1]"];
        all.extend(sizes.map(|sizes| [entries, &[("numbers".to_string(), sizes.to_string())]].concat()));
    }
    all
}

/// What else a value could be: of other sizes, or of more axes.
fn other_values(name: &str, value: &str) -> Vec<String> {
    if name.contains('.') || name == "numbers" {
        return Vec::new();
    }
    if let Some(sizes) = list(value) {
        return regrouped(&sizes).iter().map(|sizes| braced(sizes)).collect();
    }
    if let Some((dtype, number)) = value.split_once(':').filter(|(dtype, _)| *dtype != "const") {
        let dtype = dtype.split('[').next().unwrap_or(dtype);
        let shapes = ["", "[1]", "[1,1]", "[1,1,1]", "[1,1,1,1]", "[1,1,1,1,1]"];
        return shapes.map(|shape| format!("{dtype}{shape}:{number}")).to_vec();
    }
    let Some((dtype, sizes)) = value.split_once('[') else { return Vec::new() };
    let Some(sizes) = list(&format!("[{sizes}")) else { return Vec::new() };
    other_sizes(&sizes).iter().map(|sizes| format!("{dtype}{}", braced(sizes))).collect()
}

fn list(text: &str) -> Option<Vec<i64>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    inner.split(',').filter(|size| !size.is_empty()).map(|size| size.parse().ok()).collect()
}

fn braced(sizes: &[i64]) -> String {
    format!("[{}]", sizes.iter().map(i64::to_string).collect::<Vec<_>>().join(","))
}

/// Sizes of 1 here and there, axes more and less, axes exchanged.
fn other_sizes(sizes: &[i64]) -> Vec<Vec<i64>> {
    let with = |axis: usize, size: i64| {
        let mut sizes = sizes.to_vec();
        sizes.iter_mut().skip(axis).take(1).for_each(|own| *own = size);
        sizes
    };
    let mut all: Vec<Vec<i64>> = (0..sizes.len()).map(|axis| with(axis, 1)).collect();
    all.extend([
        vec![1; sizes.len()],
        [&[1], sizes].concat(),
        [&[2], sizes].concat(),
        [sizes, &[1]].concat(),
    ]);
    all.extend([Vec::new(), vec![1], vec![1; 5], [sizes, sizes].concat()]);
    if let [first, rest @ ..] = sizes {
        all.extend([rest.to_vec(), vec![*first, 1], [rest, &[*first]].concat(), with(0, 0)]);
    }
    if let [lead @ .., before, last] = sizes {
        all.push([lead, &[*last, *before]].concat());
        all.push([lead, &[1, *last]].concat());
    }
    all
}

/// A list of sizes with factors moved from one to another, a size left to be found, or one taken
/// over.
fn regrouped(sizes: &[i64]) -> Vec<Vec<i64>> {
    let mut all = Vec::new();
    for from in 0..sizes.len() {
        for number in [0, -1, 1] {
            let mut changed = sizes.to_vec();
            changed.iter_mut().skip(from).take(1).for_each(|size| *size = number);
            all.push(changed);
        }
        for to in (0..sizes.len()).filter(|to| *to != from) {
            for factor in [2, 3, 5, 7] {
                let mut changed = sizes.to_vec();
                let Some(size) = changed.get_mut(from).filter(|size| **size > 0 && **size % factor == 0)
                else {
                    continue;
                };
                *size /= factor;
                changed.iter_mut().skip(to).take(1).for_each(|size| *size *= factor);
                all.push(changed);
            }
        }
    }
    all
}

/// Two sizes that are different made equal, wherever they stand.
fn equal_sizes(entries: &[Entry]) -> Vec<Vec<Entry>> {
    let sizes_of = |value: &str| {
        let at = value.find('[').unwrap_or(value.len());
        value.get(at..).and_then(list).unwrap_or_default()
    };
    let is_value = |name: &str| !name.contains('.');
    let mut sizes: Vec<i64> =
        entries.iter().filter(|(name, _)| is_value(name)).flat_map(|(_, value)| sizes_of(value)).collect();
    sizes.retain(|size| *size > 1);
    sizes.sort_unstable();
    sizes.dedup();
    let pairs = sizes.iter().flat_map(|from| sizes.iter().map(move |to| (*from, *to)));
    let replaced = |(from, to): (i64, i64)| -> Vec<Entry> {
        let change = |(name, value): &Entry| {
            let Some((head, _)) = value.split_once('[').filter(|_| is_value(name)) else {
                return (name.clone(), value.clone());
            };
            let tail = value.rsplit_once(']').map_or("", |(_, tail)| tail);
            let sizes: Vec<i64> =
                sizes_of(value).into_iter().map(|size| if size == from { to } else { size }).collect();
            (name.clone(), format!("{head}{}{tail}", braced(&sizes)))
        };
        entries.iter().map(change).collect()
    };
    pairs.filter(|(from, to)| from != to).map(replaced).collect()
}

/// The entries with another type of floats.
fn of_type(entries: &[Entry], dtype: &str) -> Vec<Entry> {
    let mut changed: Vec<Entry> = entries
        .iter()
        .map(|(name, value)| (name.clone(), value.replace("f32", dtype).replace("f64", dtype)))
        .collect();
    if !changed.iter().any(|(name, _)| name == "numbers") {
        changed.push(("numbers".to_string(), dtype.to_string()));
    }
    changed
}

/// Inputs for the sizes that a model declares, each of 3 where it is a symbol.
pub(crate) fn inputs(model: &Model, data: Data) -> Result<Vec<(String, Value)>> {
    let numbered = model.inputs().into_iter().enumerate();
    numbered
        .map(|(index, input)| {
            let is_mask = data == Data::Masked && input.name == "mask";
            let data = if data == Data::Masked && !is_mask { Data::Plain } else { data };
            Ok((input.name.clone(), tensor(&input.ty, index, data)?))
        })
        .collect()
}

/// Floats that rules must pass on as they are, or compute with as the formula does.
const SPECIAL: [f32; 16] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    f32::MIN_POSITIVE,
    1e30,
    -1e30,
    90.0,
    -90.0,
    20.0,
    -20.0,
    1.0,
    -3.0,
];

fn tensor(ty: &ValueType, seed: usize, data: Data) -> Result<Value> {
    let shape = ty.shape().into_iter().flatten().map(|dim| dim.as_constant().unwrap_or(3) as usize);
    let shape: Vec<usize> = shape.collect();
    let count: usize = shape.iter().product();
    let width = shape.last().copied().unwrap_or(1).max(1);
    let number = |index: usize| match data {
        Data::Special => SPECIAL[index % SPECIAL.len()],
        // Every other row hides all keys, the others every third.
        Data::Masked if (index / width).is_multiple_of(2) || index % width % 3 == 1 => f32::NEG_INFINITY,
        _ => (((index * 37 + seed * 11) % 101) as f32 - 50.0) / 25.0,
    };
    let floats = || (0..count).map(number);
    Ok(Value::from(match ty.dtype() {
        Some(DType::F16) => Tensor::from_vec(&shape, floats().map(half::f16::from_f32).collect())?,
        Some(DType::F64) => Tensor::from_vec(&shape, floats().map(f64::from).collect())?,
        Some(DType::I64) => Tensor::from_vec(&shape, (0..count as i64).map(|v| v % 5).collect())?,
        Some(DType::I32) => Tensor::from_vec(&shape, (0..count as i32).map(|v| v % 5).collect())?,
        Some(DType::U8) => Tensor::from_vec(&shape, (0..count).map(|v| (v * 37 % 251) as u8).collect())?,
        Some(DType::I8) => {
            Tensor::from_vec(&shape, (0..count).map(|v| (v * 37 % 251) as u8 as i8).collect())?
        }
        Some(DType::Bool) => Tensor::from_bools(&shape, &(0..count).map(|v| v % 3 != 0).collect::<Vec<_>>())?,
        _ => Tensor::from_vec(&shape, floats().collect())?,
    }))
}
