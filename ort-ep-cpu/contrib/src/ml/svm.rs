//! Support vector machines with libsvm's semantics: `SVMClassifier` and `SVMRegressor`.

use num_traits::AsPrimitive;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::spec::ONNX_ML;
use ort_core::{Result, ensure, error, for_each_type};

use super::scores::{Labels, Transform, dot, floats, largest, logistic, matrix, probit};
use super::svm_kernel::Vectors;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_threads::interrupt::{spend, spending};

cpu_kernels![
    KernelDef { domain: ONNX_ML, op: "SVMClassifier", make: make_classifier, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "SVMRegressor", make: make_regressor, ..KernelDef::BASE },
];

/// Multiplications below which more threads cost more than they save.
const SMALL: usize = 20_000;

/// Reads one row of the input as `f64`.
type ReadRow<'a> = &'a (dyn Fn(usize, &mut [f64]) + Sync);

/// Calls `work` with the number of input rows and a function that reads one of them.
fn with_rows(
    cx: &mut RunCx<'_>,
    features: usize,
    work: impl FnOnce(&mut RunCx<'_>, usize, ReadRow<'_>) -> Result<()>,
) -> Result<()> {
    let input = cx.input(0)?;
    let (rows, own) = matrix(input.shape())?;
    ensure!(
        features == own,
        InvalidArgument,
        "the rows have {own} features, but the support vectors have {features}"
    );
    let dtype = input.dtype();
    for_each_type!(dtype in [F32, F64, I32, I64], T => {
        let elements = input.as_slice::<T>()?;
        work(cx, rows, &|row, to| {
            let from = elements.get(row * features..).unwrap_or(&[]);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = AsPrimitive::<f64>::as_(*from));
        })
    }, else => Err(error!(NotImplemented, "features of {} are not supported", DType::name(dtype))))
}

/// Returns how many threads are worth using on `rows` rows.
fn useful_threads(cx: &RunCx<'_>, rows: usize, vectors: &Vectors) -> usize {
    if rows.saturating_mul(vectors.len()) < SMALL { 1 } else { cx.threads() }
}

/// Returns the workspace bytes: `doubles` numbers for each parallel part of the rows.
fn workspace_of(shapes: &IoShapes<'_>, doubles: usize) -> Result<usize> {
    // A single dimension is one row, as `matrix` reads it.
    let rows = match *shapes.input(0) {
        [rows, _] => rows,
        _ => 1,
    };
    bytes_of::<f64>(doubles.saturating_mul(part_count(shapes.threads, rows)))
}

struct Regressor {
    vectors: Vectors,
    weights: Vec<f64>,
    rho: f64,
    one_class: bool,
    transform: Transform,
}

fn make_regressor(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let supports = attrs.int("n_supports")?;
    let supports = usize::try_from(supports)
        .map_err(|_| error!(InvalidGraph, "n_supports is {supports}, expected 0 or more"))?;
    let coefficients = attrs.find_floats("coefficients").unwrap_or(&[]);
    let (vectors, weights) = if supports > 0 {
        let given = coefficients.len();
        ensure!(
            given == supports,
            InvalidGraph,
            "{given} coefficients for {supports} support vectors; give one for each"
        );
        (Vectors::support(attrs, supports)?, floats(attrs, "coefficients"))
    } else {
        (Vectors::linear(coefficients, 1)?, vec![1.0])
    };
    Ok(Box::new(Regressor {
        vectors,
        weights,
        rho: first_rho(attrs),
        one_class: attrs.flag("one_class")?,
        transform: Transform::named(attrs)?,
    }))
}

fn first_rho(attrs: &Attributes) -> f64 {
    floats(attrs, "rho").first().copied().unwrap_or(0.0)
}

impl Regressor {
    /// Returns the score of the row in `features`; `kernels` is scratch.
    fn score(&self, features: &[f64], kernels: &mut [f64]) -> f64 {
        self.vectors.kernels(features, kernels);
        let score = dot(kernels, &self.weights) + self.rho;
        // libsvm's one-class SVM predicts the side of the boundary, without a transform.
        if self.one_class {
            return if score > 0.0 { 1.0 } else { -1.0 };
        }
        let mut score = [score];
        self.transform.apply(&mut score);
        score[0]
    }
}

impl Executable for Regressor {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        workspace_of(shapes, self.vectors.scratch_len())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_rows(cx, self.vectors.features, |cx, rows, read| {
            let threads = useful_threads(cx, rows, &self.vectors);
            let workspace = scratch::<f64>(cx.workspace()?)?;
            let output = cx.output(0)?.as_mut_slice::<f32>()?;
            for_each_unit(
                threads,
                (output, 1),
                (workspace, self.vectors.scratch_len()),
                |row, score, scratch| {
                    let (features, kernels) = scratch.split_at_mut(self.vectors.features);
                    read(row, features);
                    score.fill(self.score(features, kernels) as f32);
                },
            );
            Ok(())
        })
    }
}

struct Classifier {
    labels: Labels,
    vectors: Vectors,
    decision: Decision,
    transform: Transform,
}

/// How the kernel values decide the class.
enum Decision {
    /// One linear function per class, plus a constant.
    Linear(f64),
    /// One-vs-one voting between all pairs of classes.
    Pairs(Pairs),
}

/// The one-vs-one decision functions of all pairs of classes.
struct Pairs {
    /// For each class, the range of its support vectors.
    ranges: Vec<(usize, usize)>,
    /// Dual coefficients: for each class but one, a row with one weight per support vector. For i <
    /// j, the vectors of i have their weights against j in row j - 1, those of j against i in row
    /// i.
    weights: Vec<f64>,
    rho: Vec<f64>,
    /// Slope and offset of the logistic function of each pair's score (Platt scaling). Empty if the
    /// model has no probabilities.
    logistics: Vec<(f64, f64)>,
}

fn make_classifier(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let labels = Labels::read(attrs, "classlabels_ints", "classlabels_strings")?;
    let transform = Transform::named(attrs)?;
    let (ranges, total) = ranges(attrs)?;
    let (vectors, decision) = if total > 0 {
        let pairs = Pairs::read(attrs, labels.count(), ranges, total)?;
        (Vectors::support(attrs, total)?, Decision::Pairs(pairs))
    } else {
        let coefficients = attrs.find_floats("coefficients").unwrap_or(&[]);
        (Vectors::linear(coefficients, labels.count())?, Decision::Linear(first_rho(attrs)))
    };
    Ok(Box::new(Classifier { labels, vectors, decision, transform }))
}

/// Returns the range of support vectors of each class, and their total.
fn ranges(attrs: &Attributes) -> Result<(Vec<(usize, usize)>, usize)> {
    let mut ranges = Vec::new();
    let mut total = 0usize;
    // Vectors are grouped by class; the counts are hostile, so the sum is checked.
    for &size in attrs.find_ints("vectors_per_class").unwrap_or(&[]) {
        let end = usize::try_from(size).ok().and_then(|size| total.checked_add(size));
        let end = end.ok_or_else(|| error!(InvalidGraph, "vectors_per_class has the element {size}"))?;
        ranges.push((total, end));
        total = end;
    }
    Ok((ranges, total))
}

impl Pairs {
    fn read(attrs: &Attributes, classes: usize, ranges: Vec<(usize, usize)>, total: usize) -> Result<Pairs> {
        let (a, b) = (floats(attrs, "prob_a"), floats(attrs, "prob_b"));
        let (weights, rho) = (floats(attrs, "coefficients"), floats(attrs, "rho"));
        let pairs = pair_count(classes);
        // One row of coefficients for each class but one, as libsvm stores them.
        let wanted = total.checked_mul(classes.saturating_sub(1));
        let has = |name: &str, given: usize, wanted: usize| {
            ensure!(
                given >= wanted,
                InvalidGraph,
                "{given} elements of '{name}' for {classes} classes, expected {wanted}"
            );
            Ok(())
        };
        ensure!(
            ranges.len() == classes,
            InvalidGraph,
            "{} elements of 'vectors_per_class' for {classes} classes; give one for each",
            ranges.len()
        );
        has("coefficients", weights.len(), wanted.unwrap_or(usize::MAX))?;
        has("rho", rho.len(), pairs)?;
        if !a.is_empty() {
            has("prob_a", a.len(), pairs.max(1))?;
        }
        ensure!(
            a.len() == b.len(),
            InvalidGraph,
            "{} elements of 'prob_a' and {} of 'prob_b'; give as many of both",
            a.len(),
            b.len()
        );
        Ok(Pairs { ranges, weights, rho, logistics: a.into_iter().zip(b).collect() })
    }

    /// Computes the score of each pair and counts the votes. A positive score is a vote for the
    /// first class of the pair.
    fn scores(&self, kernels: &[f64], votes: &mut [f64], scores: &mut [f64]) {
        votes.fill(0.0);
        // `read` checked that every row of weights is complete.
        let part = |row: usize, (start, end): (usize, usize)| {
            dot(&self.weights[row * kernels.len()..][start..end], &kernels[start..end])
        };
        let pairs = pairs_of(self.ranges.len()).zip(scores.iter_mut().zip(&self.rho));
        for ((i, j), (score, rho)) in pairs {
            // There is a pair, so there are at least two classes.
            spend(4 + kernels.len() / self.ranges.len());
            *score = part(j - 1, self.ranges[i]) + part(i, self.ranges[j]) + rho;
            votes[if *score > 0.0 { i } else { j }] += 1.0;
        }
    }
}

/// Iterates over the pairs of classes in the order of their scores.
fn pairs_of(classes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..classes).flat_map(move |i| (i + 1..classes).map(move |j| (i, j)))
}

fn pair_count(classes: usize) -> usize {
    classes.saturating_mul(classes.saturating_sub(1)) / 2
}

/// The result of one row: its class, and its scores if the output is wanted.
struct Outcome<'a> {
    class: usize,
    scores: &'a mut [f32],
}

impl Classifier {
    /// Returns the `f64` elements of scratch for one row: features and kernel values, and for
    /// one-vs-one voting the pair scores and four lists over the classes.
    fn scratch_len(&self) -> usize {
        let classes = self.labels.count();
        let own = match self.decision {
            Decision::Linear(_) => 0,
            Decision::Pairs(_) => pair_count(classes).saturating_add(classes.saturating_mul(4)),
        };
        self.vectors.scratch_len().saturating_add(own)
    }

    /// Classifies the row whose features are at the start of `scratch`, and writes its scores.
    fn classify(&self, scratch: &mut [f64], outcome: &mut Outcome<'_>) {
        let classes = self.labels.count();
        let (features, scratch) = scratch.split_at_mut(self.vectors.features);
        let (kernels, scratch) = scratch.split_at_mut(self.vectors.count);
        self.vectors.kernels(features, kernels);
        let pairs = match &self.decision {
            Decision::Linear(rho) => {
                // The vectors are the coefficients of the classes, so the kernel values are their
                // scores.
                kernels.iter_mut().for_each(|score| *score += rho);
                outcome.class = largest(kernels);
                return self.finish(kernels, outcome);
            }
            Decision::Pairs(pairs) => pairs,
        };
        let (votes, scratch) = scratch.split_at_mut(classes);
        let (scores, scratch) = scratch.split_at_mut(pair_count(classes));
        pairs.scores(kernels, votes, scores);
        outcome.class = largest(votes);
        if !pairs.logistics.is_empty() {
            // libsvm's `sigmoid_predict`: `1 / (1 + exp(slope * score + offset))`.
            for (score, (slope, offset)) in scores.iter_mut().zip(&pairs.logistics) {
                // Clamping keeps probabilities of 0 and 1 out of the coupling.
                *score = (1.0 - logistic(*score * slope + offset)).clamp(1e-7, 1.0 - 1e-7);
            }
            let (probabilities, scratch) = scratch.split_at_mut(classes);
            couple(scores, probabilities, scratch);
            return self.finish(probabilities, outcome);
        }
        match *scores {
            [] => outcome.scores.fill(0.0),
            [score] => {
                let pair = self.pair(score);
                outcome.scores.iter_mut().zip(pair).for_each(|(to, score)| *to = score as f32);
            }
            _ => self.finish(scores, outcome),
        }
    }

    /// Returns the scores of two classes from the score of their pair. With a transform other than
    /// the logistic one, ONNX Runtime treats the score as a probability.
    fn pair(&self, score: f64) -> [f64; 2] {
        match self.transform {
            Transform::Probit => {
                let quantile = probit(score);
                [quantile, -quantile]
            }
            transform => transform.pair(score, matches!(transform, Transform::None | Transform::Logistic)),
        }
    }

    /// Transforms the scores and writes them if they are wanted.
    fn finish(&self, scores: &mut [f64], outcome: &mut Outcome<'_>) {
        // ONNX Runtime transforms the score of a single class only if the transform is probit.
        if scores.len() > 1 || self.transform == Transform::Probit {
            self.transform.apply(scores);
        }
        outcome.scores.iter_mut().zip(scores).for_each(|(to, score)| *to = *score as f32);
    }
}

impl Executable for Classifier {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        workspace_of(shapes, self.scratch_len())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_rows(cx, self.vectors.features, |cx, rows, read| {
            let threads = useful_threads(cx, rows, &self.vectors);
            let workspace = scratch::<f64>(cx.workspace()?)?;
            let mut outcomes: Vec<Outcome<'_>> = Vec::with_capacity(rows);
            if cx.wants(1) {
                let scores = cx.output(1)?.as_mut_slice::<f32>()?;
                // Without rows there is nothing to divide; `chunks_mut` refuses a length of 0.
                let columns = scores.len().checked_div(rows).unwrap_or(0).max(1);
                let rows = spending(1, scores.chunks_mut(columns));
                outcomes.extend(rows.map(|scores| Outcome { class: 0, scores }));
            }
            // Without a scores output, all rows still need an outcome for their class.
            outcomes.resize_with(rows, || Outcome { class: 0, scores: &mut [] });
            for_each_unit(
                threads,
                (&mut outcomes, 1),
                (workspace, self.scratch_len()),
                |row, outcome, scratch| {
                    read(row, &mut scratch[..self.vectors.features]);
                    outcome.iter_mut().for_each(|outcome| self.classify(scratch, outcome));
                },
            );
            let classes: Vec<usize> = spending(1, &outcomes).map(|outcome| outcome.class).collect();
            self.labels.write(cx, classes.into_iter())
        })
    }
}

/// Estimates class probabilities from pairwise probabilities (Wu, Lin and Weng, "Probability
/// Estimates for Multi-class Classification by Pairwise Coupling", 2004, second approach).
/// `scratch` holds two numbers per class.
fn couple(pairs: &[f64], p: &mut [f64], scratch: &mut [f64]) {
    let classes = p.len();
    let (diagonal, rest) = scratch.split_at_mut(classes);
    let qp = &mut rest[..classes];
    // Pair (i, j) with i < j follows the pairs of all earlier classes.
    let at = |i: usize, j: usize| pairs[i * (2 * classes - i - 1) / 2 + (j - i - 1)];
    // The probability of i against j; `pairs` stores it only for i < j.
    let r = |i: usize, j: usize| if i < j { at(i, j) } else { 1.0 - at(j, i) };
    // Q of the paper: `Q[i][i]` is the sum of `r[j][i]^2`, `Q[i][j]` is `-r[j][i] * r[i][j]`.
    for (i, sum) in diagonal.iter_mut().enumerate() {
        *sum = (0..classes).filter(|&j| j != i).map(|j| r(j, i) * r(j, i)).sum();
    }
    let diagonal = &*diagonal;
    let q = |i: usize, j: usize| if i == j { diagonal[i] } else { -r(j, i) * r(i, j) };
    p.fill(1.0 / classes as f64);
    // The limits on rounds and on the error are libsvm's.
    for _ in 0..classes.max(100) {
        for (i, sum) in qp.iter_mut().enumerate() {
            spend(4 * classes);
            *sum = (0..classes).map(|j| q(i, j) * p[j]).sum();
        }
        // At the optimum, all elements of `Q * p` equal `p' * Q * p`.
        let mut pqp = dot(p, qp);
        if qp.iter().all(|x| (x - pqp).abs() < 0.005 / classes as f64) {
            return;
        }
        for i in 0..classes {
            let step = (pqp - qp[i]) / q(i, i);
            p[i] += step;
            // Updates `p' * Q * p` and `Q * p` for the normalized p, instead of computing them
            // again.
            pqp = (pqp + step * (step * q(i, i) + 2.0 * qp[i])) / (1.0 + step) / (1.0 + step);
            for (j, (qp, p)) in qp.iter_mut().zip(p.iter_mut()).enumerate() {
                *qp = (*qp + step * q(i, j)) / (1.0 + step);
                *p /= 1.0 + step;
            }
        }
    }
}
