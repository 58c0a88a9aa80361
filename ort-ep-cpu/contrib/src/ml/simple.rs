//! Small feature transforms: `Imputer`, `Normalizer`, `OneHotEncoder`, `CategoryMapper` and
//! `FeatureVectorizer`.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::seeded::HashMap;
use ort_core::spec::ONNX_ML;
use ort_core::{Result, ensure, error, for_each_type};

use super::scores::doubles;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_threads::interrupt::{self, PIECE, pieces, pieces_mut, spending};

cpu_kernels![
    KernelDef { domain: ONNX_ML, op: "Imputer", make: make_imputer, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "Normalizer", make: make_normalizer, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "OneHotEncoder", make: make_one_hot, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "CategoryMapper", make: make_mapper, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "FeatureVectorizer", make: make_vectorizer, ..KernelDef::BASE },
];

fn make_imputer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let (missing_int, missing_float) =
        (attrs.int("replaced_value_int64")?, attrs.float("replaced_value_float")?);
    let ints = attrs.find_ints("imputed_value_int64s").unwrap_or(&[]).to_vec();
    let floats = attrs.find_floats("imputed_value_floats").unwrap_or(&[]).to_vec();
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let features = input.shape().last().copied().unwrap_or(1);
        // One value for all features, or one per feature.
        let given = if input.dtype().is_float() { floats.len() } else { ints.len() };
        let fits = given == 1 || (given == features && given > 0);
        ensure!(
            fits,
            InvalidArgument,
            "got {given} imputed values, expected one for each of the {features} features"
        );
        let dtype = input.dtype();
        let output = cx.output(0)?;
        match dtype {
            DType::F32 | DType::F64 => for_each_type!(dtype in [F32, F64], T => {
                // The sentinel and the values are `f32` attributes; widening them is exact.
                let missing = T::from(missing_float);
                let pairs = input.as_slice::<T>()?.iter().zip(output.as_mut_slice::<T>()?);
                for (index, (x, y)) in spending(2, pairs).enumerate() {
                    // A NaN sentinel matches every NaN.
                    let is_missing = *x == missing || (x.is_nan() && missing.is_nan());
                    *y = if is_missing { T::from(floats[index % given]) } else { *x };
                }
                Ok(())
            }, else => Err(error!(NotImplemented, "Imputer of {} is not supported", DType::name(dtype)))),
            _ => for_each_type!(dtype in [I32, I64], T => {
                let fit = |value: i64| {
                    T::try_from(value).map_err(|_| error!(InvalidGraph, "{value} is no {}", DType::name(dtype)))
                };
                // A sentinel that the element type cannot hold matches nothing.
                let missing = fit(missing_int).ok();
                let values = ints.iter().map(|&value| fit(value)).collect::<Result<Vec<T>>>()?;
                let pairs = input.as_slice::<T>()?.iter().zip(output.as_mut_slice::<T>()?);
                for (index, (x, y)) in spending(2, pairs).enumerate() {
                    *y = if missing == Some(*x) { values[index % given] } else { *x };
                }
                Ok(())
            }, else => Err(error!(NotImplemented, "Imputer of {} is not supported", DType::name(dtype)))),
        }
    }))
}

/// The norm that each row is divided by.
#[derive(Clone, Copy)]
enum Norm {
    Max,
    L1,
    L2,
}

fn make_normalizer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let norm = match cx.attrs().string("norm")? {
        "MAX" => Norm::Max,
        "L1" => Norm::L1,
        "L2" => Norm::L2,
        other => return Err(error!(InvalidGraph, "norm is '{other}', expected MAX, L1 or L2")),
    };
    // The elements as `f64`.
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(0)).saturating_mul(size_of::<f64>());
    let run = move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let features = input.shape().last().copied().unwrap_or(1).max(1);
        let values = doubles(&input)?;
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        let rows = values.chunks(features).zip(output.chunks_mut(features));
        for (from, to) in spending(4 + 2 * features.min(PIECE), rows) {
            let elements = || pieces(from).flatten();
            let size = match norm {
                // The standard's MAX is the greatest element, not the greatest magnitude.
                Norm::Max => elements().copied().fold(f64::NEG_INFINITY, f64::max),
                Norm::L1 => elements().map(|x| x.abs()).sum(),
                Norm::L2 => elements().map(|x| x * x).sum::<f64>().sqrt(),
            };
            // Rows whose norm is 0 stay unchanged.
            let size = if size == 0.0 { 1.0 } else { size };
            for (from, to) in from.chunks(PIECE).zip(pieces_mut(to)) {
                from.iter().zip(to).for_each(|(x, y)| *y = (x / size) as f32);
            }
        }
        Ok(())
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn make_one_hot(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let zeros = attrs.flag("zeros")?;
    let strings = attrs.find_strings("cats_strings").unwrap_or(&[]).to_vec();
    let ints = attrs.find_ints("cats_int64s").unwrap_or(&[]).to_vec();
    // Only one list is given. The row has a column for each category.
    let count = strings.len().max(ints.len());
    let strings: HashMap<String, usize> = strings.into_iter().zip(0..).collect();
    let ints: HashMap<i64, usize> = ints.into_iter().zip(0..).collect();
    // The elements converted to another type, and an `Option<usize>` for each.
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(0)).saturating_mul(24);
    let run = move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let places: Vec<Option<usize>> = match input.strings() {
            Ok(texts) => spending(32, texts).map(|text| strings.get(text.as_str()).copied()).collect(),
            // Integers bypass `f64`, because beyond 2^53 it is not exact.
            Err(_) if !input.dtype().is_float() => {
                spending(8, &input.to_ints()?).map(|key| ints.get(key).copied()).collect()
            }
            Err(_) => spending(8, &doubles(&input)?).map(|&key| ints.get(&(key as i64)).copied()).collect(),
        };
        ensure!(
            zeros || places.iter().all(Option::is_some),
            InvalidArgument,
            "an element is none of the {count} categories, and 'zeros' does not allow that"
        );
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        // Elements of no category keep a row of zeros.
        interrupt::fill(output, 0.0);
        for (place, to) in spending(2, places.iter().zip(output.chunks_mut(count.max(1)))) {
            if let Some(one) = place.and_then(|place| to.get_mut(place)) {
                *one = 1.0;
            }
        }
        Ok(())
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn make_mapper(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let (unknown, nameless) = (attrs.int("default_int64")?, attrs.string("default_string")?.to_string());
    let ints = attrs.find_ints("cats_int64s").unwrap_or(&[]).to_vec();
    let strings = attrs.find_strings("cats_strings").unwrap_or(&[]).to_vec();
    // Pairs of the two lists, in both directions; of duplicates the last one wins.
    let to_int: HashMap<String, i64> = strings.iter().cloned().zip(ints.iter().copied()).collect();
    let to_string: HashMap<i64, String> = ints.into_iter().zip(strings).collect();
    // The integers; strings are looked up where they are.
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(0)).saturating_mul(size_of::<i64>());
    let run = move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        if let Ok(texts) = input.strings() {
            let output = cx.output(0)?.as_mut_slice::<i64>()?;
            for (text, to) in spending(32, texts.iter().zip(output)) {
                *to = to_int.get(text.as_str()).copied().unwrap_or(unknown);
            }
            return Ok(());
        }
        let texts = input.to_ints()?;
        let texts = texts.iter().map(|key| to_string.get(key).unwrap_or(&nameless).clone());
        let texts = cx.strings(input.shape(), texts)?;
        cx.set(0, texts)
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn make_vectorizer(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let sizes = cx.attrs().find_ints("inputdimensions").map(<[i64]>::to_vec);
    // The elements of one input at a time as `f64`.
    let bound = |shapes: &IoShapes<'_>| {
        let most = shapes.inputs.iter().flatten().map(|shape| elements(shape)).max();
        most.unwrap_or(0).saturating_mul(size_of::<f64>())
    };
    let run = move |cx: &mut RunCx<'_>| {
        let (rows, width) = match cx.output_shape(0) {
            Some(&[rows, width]) => (rows, width),
            _ => return Err(error!(Fail, "the output is not a matrix")),
        };
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        // Inputs narrower than `inputdimensions` leave zeros behind them.
        interrupt::fill(output, 0.0);
        let mut first = 0;
        for index in 0..cx.input_count() {
            let input = cx.input(index)?;
            // Every input is taken as rows, whatever its rank.
            let own = input.element_count() / rows.max(1);
            ensure!(
                own * rows == input.element_count(),
                InvalidArgument,
                "input {index} has shape {:?}, expected {rows} rows",
                input.shape()
            );
            let size = match sizes.as_ref().and_then(|sizes| sizes.get(index)) {
                Some(&size) => usize::try_from(size).unwrap_or(0),
                None => own,
            };
            let values = doubles(&input)?;
            let rows = values.chunks(own.max(1)).zip(output.chunks_mut(width.max(1)));
            for (from, to) in spending(4 + own.min(PIECE), rows) {
                // Sizes come from the model: what lies beyond the output's width is dropped.
                let to = to.get_mut(first..).unwrap_or(&mut []);
                let values = pieces(from).flatten().take(size);
                values.zip(to).for_each(|(x, y)| *y = *x as f32);
            }
            first = first.saturating_add(size);
        }
        Ok(())
    };
    Ok(Box::new(WithHeap { bound, run }))
}
