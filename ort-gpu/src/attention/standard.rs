//! `Attention` of the standard.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::NodeView;
use ort_core::ops::nn::attention::problem::{
    Attention, AttentionProblem, BroadcastMask, HeadLayout, ScoreStage,
};

use super::{AttentionPlan, AttentionScratch, HeadTensor, KeyLengths, Mask, Placing, Scores, Sdpa, Sinks};
use crate::operand::{OpCx, Operand};

/// Whether the GPU providers cover a node.
pub fn is_covered(node: &NodeView<'_>) -> bool {
    let attrs = node.attrs();
    let is_double = attrs.find_int("softmax_precision") == Some(i64::from(DType::F64.onnx_code()));
    let has_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    let mode = attrs.find_int("qk_matmul_output_mode").unwrap_or(0);
    // The softmax turns the score output into weights in place, and a narrower type would round the
    // scores in between.
    let keeps = mode < ScoreStage::Weights as i64 || node.dtype(0) == Some(DType::F32);
    !is_double && (!has_scores || keeps)
}

/// The keys or values of a node.
struct Cache {
    layout: HeadLayout,
    /// Past and new rows in the workspace, if no output holds them.
    joined: Option<Operand>,
    /// The rows in float32, if keys and values have two types and the kernel takes one.
    in_f32: Option<Operand>,
}

/// What a node computes, and its tensors in the workspace.
struct StandardLayout {
    node: Attention,
    problem: AttentionProblem,
    caches: [Cache; 2],
    taken: usize,
}

impl StandardLayout {
    fn new<L>(cx: &OpCx<'_, L>, takes_one_type: bool) -> Result<StandardLayout> {
        let node = Attention::new(cx.attrs)?;
        let problem = node.problem(|index| cx.find_shape(index))?;
        let types = [cx.input(1)?.dtype, cx.input(2)?.dtype];
        let (mut taken, keys) = (0, problem.sizes().keys);
        let mut cache = |which: usize, layout: HeadLayout, dtype: DType| {
            let shape = [layout.batch, layout.heads, keys, layout.size];
            // Without a past the input has all rows, and an output holds them anyway.
            let joins = problem.past > 0 && cx.find_output(which).is_none();
            // Only if the two types differ, and only the one that is not float32 yet.
            let widens = takes_one_type && types != [dtype; 2] && dtype != DType::F32;
            let joined = if joins { Some(cx.workspace(&mut taken, dtype, &shape)) } else { None };
            let in_f32 = if widens { Some(cx.workspace(&mut taken, DType::F32, &shape)) } else { None };
            Cache { layout, joined, in_f32 }
        };
        let [k_type, v_type] = types;
        let caches = [cache(1, problem.k, k_type), cache(2, problem.v, v_type)];
        Ok(StandardLayout { node, problem, caches, taken })
    }
}

/// Returns what the workspace depends on. With `takes_one_type`, keys and values of two types are
/// converted to float32.
///
/// # Errors
///
/// Shapes do not fit together.
pub fn scratch<L>(cx: &OpCx<'_, L>, takes_one_type: bool) -> Result<AttentionScratch> {
    let layout = StandardLayout::new(cx, takes_one_type)?;
    let (k_type, v_type) = (cx.input(1)?.dtype, cx.input(2)?.dtype);
    Ok(AttentionScratch {
        sizes: layout.problem.sizes(),
        types: [cx.input(0)?.dtype, if k_type == v_type { k_type } else { DType::F32 }],
        has_scores: cx.find_output(3).is_some(),
        taken: layout.taken,
    })
}

/// Returns what a node computes; `takes_one_type` as in [`scratch`].
///
/// # Errors
///
/// Shapes or attributes do not fit.
pub fn plan<'a, L>(cx: &'a OpCx<'_, L>, takes_one_type: bool) -> Result<AttentionPlan<'a>> {
    let StandardLayout { node, problem, caches, taken } = StandardLayout::new(cx, takes_one_type)?;
    let sizes = problem.sizes();
    let (mut placings, mut conversions) = (Vec::new(), Vec::new());
    let mut cache = |which: usize, Cache { layout, joined, in_f32 }: &Cache| -> Result<HeadTensor> {
        let mut rows = HeadTensor::new(cx.input(which)?, layout.rows_of(layout.size));
        if let Some(to) = cx.find_output(which).or(joined.as_ref()) {
            let placing = Placing {
                past: cx.find_input(3 + which),
                lengths: KeyLengths::All { before: problem.past },
                ..Placing::new(layout.sizes(), rows.clone(), to, sizes.keys)
            };
            // Without a past, the input has all rows already.
            if problem.past > 0 {
                rows = placing.to.clone();
            }
            placings.push(placing);
        }
        if let Some(to) = in_f32 {
            // All rows are converted, past and new: [batch, heads, keys, size].
            let [batch, heads, _, size] = layout.sizes();
            let placing = Placing::new([batch, heads, sizes.keys, size], rows, to, sizes.keys);
            rows = placing.to.clone();
            conversions.push(placing);
        }
        Ok(rows)
    };
    let [k, v] = &caches;
    let (k, v) = (cache(1, k)?, cache(2, v)?);
    let mask = match cx.find_input(3) {
        Some(operand) => Some(Mask { operand, layout: BroadcastMask::new(&operand.shape, &sizes)? }),
        None => None,
    };
    let sdpa = Sdpa {
        sizes,
        q: HeadTensor::new(cx.input(0)?, problem.q.rows_of(sizes.size)),
        k,
        v,
        y: HeadTensor::new(cx.output(0)?, problem.q.rows_of(sizes.value_size)),
        q_bias: None,
        scale: sizes.scale(node.scale),
        softcap: node.softcap,
        causal: node.causal,
        windows: node.windows,
        lengths: lengths_of(cx, &problem)?,
        mask,
        padding: None,
        sinks: Sinks::None,
        hidden_is_nan: node.hidden_is_nan,
        scores: cx.find_output(3).map(|operand| Scores { operand, stage: node.stage }),
    };
    Ok(AttentionPlan { placings, conversions, sdpa, taken })
}

fn lengths_of<'a, L>(cx: &'a OpCx<'_, L>, problem: &AttentionProblem) -> Result<KeyLengths<'a>> {
    let before = problem.past;
    let Some(lengths) = cx.find_input(6) else { return Ok(KeyLengths::All { before }) };
    problem.check_lengths(lengths.count())?;
    Ok(match before {
        0 => KeyLengths::AtEnd { lengths, more: 0 },
        _ => KeyLengths::Each { lengths, more: 0, before },
    })
}
