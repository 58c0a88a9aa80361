//! Shared parts of classifiers and regressors: features as floats, class labels, and score
//! transforms.

use ort_core::dtype::DType;
use ort_core::ep::RunCx;
use ort_core::ir::Attributes;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_threads::interrupt::{PIECE, pieces, spend, spending};

/// The post-transform of a row's scores.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Transform {
    None,
    Softmax,
    Logistic,
    SoftmaxZero,
    Probit,
}

impl Transform {
    /// Reads the attribute `post_transform`.
    pub(super) fn named(attrs: &Attributes) -> Result<Transform> {
        Ok(match attrs.string("post_transform")? {
            "NONE" => Transform::None,
            "SOFTMAX" => Transform::Softmax,
            "LOGISTIC" => Transform::Logistic,
            "SOFTMAX_ZERO" => Transform::SoftmaxZero,
            "PROBIT" => Transform::Probit,
            other => return Err(error!(InvalidGraph, "post_transform '{other}' is not known")),
        })
    }

    /// Transforms the only score of a row. The softmax of one score is 1.
    pub(super) fn apply_to_one(self, score: f64) -> f64 {
        let mut scores = [score];
        self.apply(&mut scores);
        scores[0]
    }

    /// Transforms the scores of one row in place.
    pub(super) fn apply(self, scores: &mut [f64]) {
        if self != Transform::None {
            spend(4 * scores.len());
        }
        match self {
            Transform::None => {}
            Transform::Logistic => scores.iter_mut().for_each(|x| *x = logistic(*x)),
            Transform::Probit => scores.iter_mut().for_each(|x| *x = probit(*x)),
            Transform::Softmax | Transform::SoftmaxZero => {
                // `SoftmaxZero` leaves scores of zero alone.
                let kept = |x: f64| self == Transform::Softmax || x.abs() > 1e-7;
                // Shifting by the greatest score keeps `exp` from overflowing.
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().filter(|x| kept(**x)).map(|x| (x - largest).exp()).sum();
                for x in scores.iter_mut().filter(|x| kept(**x)) {
                    *x = (*x - largest).exp() / sum;
                }
            }
        }
    }

    /// Returns the scores of both classes from the single score of a binary decision function. The
    /// first class gets `-score` if `opposite`, otherwise `1 - score`. The logistic transform
    /// always uses opposite scores, so that both results are probabilities.
    pub(super) fn pair(self, score: f64, opposite: bool) -> [f64; 2] {
        match (self, opposite) {
            (Transform::Logistic, _) => [logistic(-score), logistic(score)],
            (_, true) => [-score, score],
            (_, false) => [1.0 - score, score],
        }
    }
}

pub(super) fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The quantile function of the normal distribution, as `PROBIT` defines it. It uses Winitzki's
/// approximation of the inverse error function, like the standard's evaluator and ONNX Runtime,
/// with an error of up to 0.2 %.
pub(super) fn probit(p: f64) -> f64 {
    const A: f64 = 0.147;
    let x = 2.0 * p - 1.0;
    // The product is exact near both ends, where `1 - x * x` cancels.
    let log = ((1.0 - x) * (1.0 + x)).ln();
    let v = 2.0 / (std::f64::consts::PI * A) + 0.5 * log;
    // The exact square is never negative, but rounding may put it slightly below zero.
    let square = -v + (v * v - log / A).sqrt();
    std::f64::consts::SQRT_2
        * if x < 0.0 { -1.0 } else { 1.0 }
        * if square < 0.0 { 0.0 } else { square.sqrt() }
}

/// Class labels.
pub(super) enum Labels {
    Ints(Vec<i64>),
    Strings(Vec<String>),
}

impl Labels {
    /// Reads the labels from one of two attributes. Strings win if both are given.
    pub(super) fn read(attrs: &Attributes, ints: &str, strings: &str) -> Result<Labels> {
        match (attrs.find_strings(strings), attrs.find_ints(ints)) {
            (Some(labels), _) if !labels.is_empty() => Ok(Labels::Strings(labels.to_vec())),
            (_, Some(labels)) if !labels.is_empty() => Ok(Labels::Ints(labels.to_vec())),
            _ => Err(error!(InvalidGraph, "there are no class labels; give '{ints}' or '{strings}'")),
        }
    }

    pub(super) fn count(&self) -> usize {
        match self {
            Labels::Ints(labels) => labels.len(),
            Labels::Strings(labels) => labels.len(),
        }
    }

    /// Writes the label of each row's class to output 0. A class without a label becomes 0 or an
    /// empty string: a single function with a single label produces one for rows that it rejects.
    pub(super) fn write(
        &self,
        cx: &mut RunCx<'_>,
        classes: impl ExactSizeIterator<Item = usize>,
    ) -> Result<()> {
        if !cx.wants(0) {
            return Ok(());
        }
        match self {
            Labels::Ints(labels) => {
                let to = cx.output(0)?.as_mut_slice::<i64>()?;
                for (to, class) in spending(1, to.iter_mut().zip(classes)) {
                    *to = labels.get(class).copied().unwrap_or(0);
                }
                Ok(())
            }
            Labels::Strings(labels) => {
                let label = |class: usize| labels.get(class).cloned().unwrap_or_default();
                let labels = cx.strings(&[classes.len()], classes.map(label))?;
                cx.set(0, labels)
            }
        }
    }
}

/// Returns the index of the largest score, the first one on a tie.
pub(super) fn largest(scores: &[f64]) -> usize {
    let mut best = 0;
    for (index, score) in scores.iter().enumerate() {
        // NaN is never greater, so it wins only in the first place.
        if scores.get(best).is_some_and(|most| score > most) {
            best = index;
        }
    }
    best
}

/// Returns the rows and columns of features: `[N, F]`, or `[F]` for one row.
pub(super) fn matrix(shape: &[usize]) -> Result<(usize, usize)> {
    match *shape {
        [features] => Ok((1, features)),
        [rows, features] => Ok((rows, features)),
        _ => Err(error!(InvalidArgument, "features have rank 1 or 2, got shape {shape:?}")),
    }
}

/// Converts the elements of a numeric tensor to `f64`.
pub(super) fn doubles(view: &TensorView<'_>) -> Result<Vec<f64>> {
    let dtype = view.dtype();
    for_each_type!(dtype in [F32, F64, I32, I64, F16], T => {
        let elements = view.to_cow::<T>()?;
        Ok(spending(1, &*elements).map(|x| num_traits::AsPrimitive::<f64>::as_(*x)).collect())
    }, else => Err(error!(NotImplemented, "features of {} are not supported", DType::name(dtype))))
}

/// Writes scores to an `f32` output.
pub(super) fn write_scores(cx: &mut RunCx<'_>, index: usize, scores: &[f64]) -> Result<()> {
    if !cx.wants(index) {
        return Ok(());
    }
    let to = cx.output(index)?.as_mut_slice::<f32>()?;
    ensure!(to.len() == scores.len(), Fail, "{} scores for an output of {}", scores.len(), to.len());
    spending(1, to.iter_mut().zip(scores)).for_each(|(to, score)| *to = *score as f32);
    Ok(())
}

/// Reads a list attribute as `f64`; an absent one is empty.
pub(super) fn floats(attrs: &Attributes, name: &str) -> Vec<f64> {
    attrs.find_floats(name).unwrap_or(&[]).iter().map(|&x| f64::from(x)).collect()
}

/// Returns the dot product of two rows.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    // Short rows need no work counting, so they skip the nested iterator.
    if a.len() <= PIECE {
        return a.iter().zip(b).map(|(a, b)| a * b).sum();
    }
    pieces(a).flatten().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::probit;

    /// From `compute_probit` of the onnx package, which returns 0 where the function is undefined.
    #[test]
    fn quantiles() {
        let table =
            [(0.5, 0.0), (0.0001, -3.7118484), (0.01, -2.3240900), (0.3, -0.5244457), (0.99, 2.3240900)];
        for (p, expected) in table {
            assert!((probit(p) - expected).abs() < 1e-6, "probit({p}) = {}", probit(p));
        }
        assert_eq!((probit(0.0), probit(1.0)), (f64::NEG_INFINITY, f64::INFINITY));
        assert!(probit(1.5).is_nan() && probit(f64::NAN).is_nan());
    }
}
