//! Non-maximum suppression of boxes (`NonMaxSuppression`).

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{Pace, spend, spending};

cpu_kernels![KernelDef { op: "NonMaxSuppression", outputs: OutputsFrom::Kernel, make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let centred = cx.attrs().flag("center_point_box")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| run(cx, centred)))
}

/// A box as its lower and upper bound along two axes.
type Corners = [[f32; 2]; 2];

struct Limits {
    boxes: usize,
    overlap: f32,
    score: Option<f32>,
}

fn first_float(view: Option<TensorView<'_>>) -> Result<Option<f32>> {
    Ok(view.map(|view| view.to_vec::<f32>()).transpose()?.and_then(|values| values.first().copied()))
}

fn run(cx: &mut RunCx<'_>, centred: bool) -> Result<()> {
    let (boxes, scores) = (cx.input(0)?, cx.input(1)?);
    let (&[batches, count, 4], &[score_batches, classes, score_count]) = (boxes.shape(), scores.shape())
    else {
        let shapes = (boxes.shape(), scores.shape());
        return Err(error!(
            Fail,
            "boxes and scores have shapes {shapes:?}, expected [batch, boxes, 4] and [batch, classes, boxes]"
        ));
    };
    let fits = batches == score_batches && count == score_count;
    ensure!(
        fits,
        Fail,
        "boxes of shape {:?} do not match scores of shape {:?}, expected [batch, boxes, 4] and [batch, classes, boxes]",
        boxes.shape(),
        scores.shape()
    );
    let most = cx.find_input(2).map(|most| most.to_ints()).transpose()?;
    let most = most.and_then(|most| most.first().copied()).unwrap_or(0);
    let limits = Limits {
        boxes: usize::try_from(most).unwrap_or(0),
        overlap: first_float(cx.find_input(3))?.unwrap_or(0.0),
        score: first_float(cx.find_input(4))?,
    };
    // All corners, and for one class the candidates, the sort's scratch, and the kept boxes.
    let each_box = batches.saturating_mul(count).saturating_mul(size_of::<Corners>());
    let candidates = count.saturating_mul(4 * size_of::<usize>());
    let mut held = cx.reserve(each_box.saturating_add(candidates))?;
    let corners: Vec<Corners> =
        spending(4, boxes.as_slice::<f32>()?.chunks_exact(4)).map(|b| corners(b, centred)).collect();
    let scores = scores.as_slice::<f32>()?;
    let mut selected: Vec<i64> = Vec::new();
    if limits.boxes > 0 && count > 0 {
        for (index, scores) in scores.chunks_exact(count).enumerate() {
            cx.check()?;
            // Scores are [batch, classes, boxes].
            let (batch, class) = (index / classes, index % classes);
            if selected.len() + 3 * limits.boxes.min(count) > selected.capacity() {
                let more = selected.capacity().max(3 * limits.boxes.min(count));
                // While a list grows, its old copy is alive too.
                held.absorb(cx.reserve(more.saturating_mul(2 * size_of::<i64>()))?);
                selected.reserve_exact(more);
            }
            for chosen in select(&corners[batch * count..][..count], scores, &limits) {
                selected.extend([batch as i64, class as i64, chosen as i64]);
            }
        }
    }
    let mut output = cx.allocate(DType::I64, &[selected.len() / 3, 3])?;
    output.as_mut_slice::<i64>()?.copy_from_slice(&selected);
    cx.set(0, ort_core::tensor::Value::Tensor(output.finish()?))
}

fn corners(values: &[f32], centred: bool) -> Corners {
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    // [x, y, width, height]; otherwise [y1, x1, y2, x2], with the corners in any order.
    if centred {
        let side = |axis: usize| {
            let half = at(axis + 2) / 2.0;
            [at(axis) - half, at(axis) + half]
        };
        return [side(1), side(0)];
    }
    let side = |axis: usize| [at(axis).min(at(axis + 2)), at(axis).max(at(axis + 2))];
    [side(0), side(1)]
}

/// Returns the kept boxes, best first. Ties go by index, and NaN is the lowest score.
fn select(corners: &[Corners], scores: &[f32], limits: &Limits) -> Vec<usize> {
    let (all, pace) = (spending(1, 0..scores.len()), Pace::default());
    // No list grows, because a list that grows takes more than was reserved for it.
    let mut candidates: Vec<usize> = Vec::with_capacity(scores.len());
    candidates.extend(all.filter(|&index| limits.score.is_none_or(|least| scores[index] > least)));
    // NaN sorts below all numbers, because sorting needs a total order.
    candidates.sort_by(|&a, &b| {
        pace.step(2);
        let by_value = scores[b].partial_cmp(&scores[a]);
        by_value.unwrap_or_else(|| scores[a].is_nan().cmp(&scores[b].is_nan()))
    });
    let mut kept: Vec<usize> = Vec::with_capacity(limits.boxes.min(candidates.len()));
    for candidate in candidates {
        if kept.len() == limits.boxes {
            break;
        }
        // Each candidate is compared with all kept boxes.
        spend(8 + 4 * kept.len());
        if !kept.iter().any(|&other| overlaps(&corners[candidate], &corners[other], limits.overlap)) {
            kept.push(candidate);
        }
    }
    kept
}

fn area(corners: &Corners) -> f32 {
    (corners[0][1] - corners[0][0]) * (corners[1][1] - corners[1][0])
}

/// Whether the intersection over union exceeds the threshold.
fn overlaps(a: &Corners, b: &Corners, threshold: f32) -> bool {
    let side = |axis: usize| a[axis][1].min(b[axis][1]) - a[axis][0].max(b[axis][0]);
    let (height, width) = (side(0), side(1));
    // Boxes that only touch do not overlap.
    if height <= 0.0 || width <= 0.0 {
        return false;
    }
    let shared = height * width;
    let (first, second) = (area(a), area(b));
    let all = first + second - shared;
    // A box without area overlaps nothing, and the division below it has no zero divisor.
    first > 0.0 && second > 0.0 && all > 0.0 && shared / all > threshold
}
