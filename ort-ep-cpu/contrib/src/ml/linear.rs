//! Linear models: `LinearClassifier` and `LinearRegressor`.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::ONNX_ML;
use ort_core::{Result, ensure};

use super::scores::{Labels, Transform, dot, doubles, floats, largest, matrix, write_scores};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_threads::interrupt::{PIECE, pieces_mut, spend};

cpu_kernels![
    KernelDef { domain: ONNX_ML, op: "LinearClassifier", make: make_classifier, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "LinearRegressor", make: make_regressor, ..KernelDef::BASE },
];

/// Linear functions of a row of features, computed in `f64`.
struct Functions {
    count: usize,
    coefficients: Vec<f64>,
    intercepts: Vec<f64>,
    transform: Transform,
}

impl Functions {
    /// Returns the scores of all rows, `count` for each.
    fn scores(&self, cx: &RunCx<'_>) -> Result<Vec<f64>> {
        let input = cx.input(0)?;
        let (rows, features) = matrix(input.shape())?;
        ensure!(
            // Both factors are hostile: the attribute and the input's shape.
            self.count.checked_mul(features) == Some(self.coefficients.len()),
            InvalidArgument,
            "{} coefficients for {} functions of {features} features",
            self.coefficients.len(),
            self.count
        );
        let values = doubles(&input)?;
        let mut scores = Vec::with_capacity(rows * self.count);
        for row in 0..rows {
            let row = &values[row * features..(row + 1) * features];
            for index in 0..self.count {
                spend(4 + features.min(PIECE));
                let weights = &self.coefficients[index * features..(index + 1) * features];
                scores.push(dot(row, weights) + self.intercepts.get(index).copied().unwrap_or(0.0));
            }
        }
        Ok(scores)
    }
}

/// Returns the bytes of the features as `f64` and of `each_row` more numbers per row.
fn heap_bytes(shapes: &IoShapes<'_>, each_row: usize) -> usize {
    let rows = matrix(shapes.input(0)).map_or(0, |(rows, _)| rows);
    let numbers = elements(shapes.input(0)).saturating_add(rows.saturating_mul(each_row));
    numbers.saturating_mul(size_of::<f64>())
}

fn make_regressor(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    // A negative number of targets becomes 0, which only an empty list of coefficients fits.
    let count = usize::try_from(attrs.int("targets")?).unwrap_or(0);
    let intercepts = floats(attrs, "intercepts");
    ensure!(
        intercepts.is_empty() || intercepts.len() == count,
        InvalidGraph,
        "got {} intercepts, expected one for each of the {count} targets",
        intercepts.len()
    );
    let functions = Functions {
        count,
        coefficients: floats(attrs, "coefficients"),
        intercepts,
        transform: Transform::named(attrs)?,
    };
    let bound = move |shapes: &IoShapes<'_>| heap_bytes(shapes, count);
    let run = move |cx: &mut RunCx<'_>| {
        let mut scores = functions.scores(cx)?;
        if functions.count == 1 {
            let scores = pieces_mut(&mut scores).flatten();
            scores.for_each(|score| *score = functions.transform.apply_to_one(*score));
        } else {
            scores.chunks_mut(functions.count.max(1)).for_each(|row| functions.transform.apply(row));
        }
        write_scores(cx, 0, &scores)
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn make_classifier(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let labels = Labels::read(attrs, "classlabels_ints", "classlabels_strings")?;
    let intercepts = floats(attrs, "intercepts");
    // Intercepts, if given, count the functions. A single function separates two labels.
    let count = attrs.find_floats("intercepts").map_or(labels.count(), <[f32]>::len).max(1);
    ensure!(
        count == 1 || count <= labels.count(),
        InvalidGraph,
        "{count} functions for {} class labels",
        labels.count()
    );
    let functions = Functions {
        count,
        coefficients: floats(attrs, "coefficients"),
        intercepts,
        transform: Transform::named(attrs)?,
    };
    // The raw scores, the class, and the transformed scores.
    let each_row = count.saturating_add(1).saturating_add(count.max(2));
    let bound = move |shapes: &IoShapes<'_>| heap_bytes(shapes, each_row);
    Ok(Box::new(WithHeap { bound, run: move |cx: &mut RunCx<'_>| classify(cx, &functions, &labels) }))
}

/// Returns the class and the scores of a single linear function.
///
/// With two labels, the scores are negatives of each other before the transform, as in the
/// standard's evaluator; ONNX Runtime skips the softmax. Without a transform they match ONNX
/// Runtime. With one label, the transformed score decides, as in the evaluator; ONNX Runtime
/// rejects such a model.
fn decide(score: f64, transform: Transform, labels: usize) -> (usize, (Option<f64>, f64)) {
    match (transform, labels) {
        (_, 1) => {
            let transformed = transform.apply_to_one(score);
            let least = if transform == Transform::None { 0.0 } else { 0.5 };
            let is_chosen = transformed >= least;
            (usize::from(!is_chosen), (None, transformed))
        }
        (Transform::None, 2) => {
            let [first, second] = transform.pair(score, false);
            (usize::from(score > 0.0), (Some(first), second))
        }
        (_, 2) => {
            let mut pair = [-score, score];
            transform.apply(&mut pair);
            (usize::from(score > 0.0), (Some(pair[0]), pair[1]))
        }
        _ => (usize::from(score > 0.0), (None, transform.apply_to_one(score))),
    }
}

fn classify(cx: &mut RunCx<'_>, functions: &Functions, labels: &Labels) -> Result<()> {
    let raw = functions.scores(cx)?;
    let rows = raw.len().checked_div(functions.count).unwrap_or(0);
    let mut classes = Vec::with_capacity(rows);
    let mut scores = Vec::with_capacity(rows.saturating_mul(functions.count.max(2)));
    for row in raw.chunks(functions.count) {
        spend(16);
        // A single function writes one score, or two for two labels.
        if let [score] = *row {
            let (class, (first, second)) = decide(score, functions.transform, labels.count());
            classes.push(class);
            scores.extend(first);
            scores.push(second);
            continue;
        }
        classes.push(largest(row));
        let mut row = row.to_vec();
        functions.transform.apply(&mut row);
        scores.extend(row);
    }
    labels.write(cx, classes.into_iter())?;
    write_scores(cx, 1, &scores)
}
