//! Evaluation: the loss and the accuracy on held-out samples.

use anyhow::{Context, Result};
use ort_runtime::train::Trainer;
use ort_runtime::{DType, Tensor, Value};
use serde::Serialize;

use super::data::{DataSet, Pace};

/// The result of an evaluation. A field is `None` if there are no samples, or if the loss has no
/// classes.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Score {
    #[serde(rename = "validation_loss")]
    pub(super) loss: Option<f64>,
    /// The share of labels whose class has the highest score.
    pub(super) accuracy: Option<f64>,
}

/// Evaluates all samples in batches. If the model fixes the batch size, samples that fill no batch
/// are left out.
pub(super) fn evaluate(
    trainer: &mut Trainer,
    data: &DataSet,
    pace: Pace,
    ignored: Option<i64>,
) -> Result<Score> {
    let pace = Pace { rows: data.rows, ..pace };
    let rows: Vec<usize> = (0..data.rows).collect();
    let (mut sum, mut samples) = (0.0, 0);
    let (mut right, mut counted) = (0, 0);
    for rows in rows.chunks(pace.batch).take(pace.batches()) {
        let batch = data.batch(rows)?;
        if is_all_ignored(&batch, ignored)? {
            continue;
        }
        let (loss, output) = trainer.evaluate(&batch)?;
        // The last batch may be smaller, so weight each batch by its samples.
        sum += f64::from(loss) * rows.len() as f64;
        samples += rows.len();
        let scores = output.tensor()?;
        if let Some(axis) = trainer.options().loss.class_axis(scores.shape().len()) {
            let (more_right, more) = hits(scores, axis, &batch, ignored)?;
            right += more_right;
            counted += more;
        }
    }
    let share = |part: f64, whole: usize| (whole > 0).then(|| part / whole as f64);
    Ok(Score { loss: share(sum, samples), accuracy: share(right as f64, counted) })
}

/// Returns whether all labels of a batch are ignored. The mean loss over no labels is NaN, and so
/// is its gradient, so such batches must be skipped.
pub(super) fn is_all_ignored(batch: &[(&str, Value)], ignored: Option<i64>) -> Result<bool> {
    let labels = batch.iter().find(|(name, _)| *name == "labels");
    let (Some(ignored), Some((_, labels))) = (ignored, labels) else { return Ok(false) };
    Ok(labels.tensor()?.view().as_slice::<i64>()?.iter().all(|label| *label == ignored))
}

/// Returns the number of correct labels, and the number of labels that are not ignored.
fn hits(
    scores: &Tensor,
    axis: usize,
    batch: &[(&str, Value)],
    ignored: Option<i64>,
) -> Result<(usize, usize)> {
    let labels = batch.iter().find(|(name, _)| *name == "labels").context("there are no labels")?;
    let labels = labels.1.tensor()?.to_vec::<i64>()?;
    let classes = scores.shape().get(axis).copied().unwrap_or(0);
    let inner = scores.shape().iter().skip(axis + 1).product();
    let best = match scores.dtype() {
        DType::F64 => largest(&scores.to_vec::<f64>()?, classes, inner),
        _ => largest(&scores.to_vec::<f32>()?, classes, inner),
    };
    let counted = labels.iter().zip(best).filter(|(label, _)| ignored != Some(**label));
    Ok(counted.fold((0, 0), |(right, count), (label, best)| {
        (right + usize::from(*label == best as i64), count + 1)
    }))
}

/// Returns the class with the highest score for each position. Scores of one position are `inner`
/// elements apart.
fn largest<T: PartialOrd + Copy>(scores: &[T], classes: usize, inner: usize) -> Vec<usize> {
    // The scores are [.., classes, inner], so each group holds one index of the outer axes.
    let groups = scores.chunks_exact((classes * inner).max(1));
    let of_group = |group: &[T]| -> Vec<usize> {
        let column = |place: usize| {
            let scores = group.iter().skip(place).step_by(inner.max(1)).enumerate();
            // Of equal scores the first class counts, as in NumPy's argmax.
            let best = scores.reduce(|best, next| if next.1 > best.1 { next } else { best });
            best.map_or(0, |(class, _)| class)
        };
        (0..inner).map(column).collect()
    };
    groups.flat_map(of_group).collect()
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_largest_score_of_each_place() {
        assert_eq!(largest(&[1.0f32, 3.0, 2.0, 9.0, 0.0, 4.0], 3, 1), [1, 0]);
        // Two classes, three positions: the columns of a 2 × 3 matrix.
        assert_eq!(largest(&[1.0f64, 5.0, 2.0, 4.0, 0.0, 3.0], 2, 3), [1, 0, 1]);
        assert!(largest::<f32>(&[], 3, 1).is_empty());
    }
}
