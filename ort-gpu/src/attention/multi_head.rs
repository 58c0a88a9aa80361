//! `MultiHeadAttention` of `com.microsoft`.

use ort_core::Result;
use ort_core::ep::NodeView;
use ort_core::ops::nn::attention::problem::{
    Causal, HeadRows, MultiHead, MultiHeadProblem, PaddingMask, SdpaSizes,
};

use super::{
    AttentionPlan, AttentionScratch, HeadTensor, KeyLengths, Padding, Placing, Sdpa, Sinks, bias_of,
};
use crate::operand::{Arg, OpCx, Operand};

/// The pairs of past and present, which may share a buffer.
pub const CACHES: &[(usize, usize)] = &[(6, 1), (7, 2)];

/// Below this filter value, causally hidden keys would gain weight beside padded ones. The kernels
/// exclude hidden keys outright, so they decline such nodes.
const AS_LOW_AS_HIDDEN: f32 = -1e30;

/// Whether the GPU providers cover a node: no beams, no score output, and no padding that is as low
/// as hidden keys.
pub fn is_covered(node: &NodeView<'_>) -> bool {
    let has_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    // A node whose attributes cannot be read fails in the run, which says why.
    let counts_hidden = MultiHead::new(node.attrs()).is_ok_and(|attrs| {
        attrs.causal != Causal::No && node.input(4).is_some() && attrs.mask_filter_value < AS_LOW_AS_HIDDEN
    });
    !(has_scores || node.input(9).is_some() || counts_hidden)
}

/// Reads the node's shapes. Whether past and present share a buffer is known only in a run, from
/// the presence of a host input; the plan reserves for separate ones, which take at least as much.
fn problem_of<L>(cx: &OpCx<'_, L>, node: &MultiHead) -> Result<MultiHeadProblem> {
    node.problem(|index| cx.find_shape(index), cx.find_host(8).is_some())
}

/// Reserves keys and values in the workspace, if no output holds them. Returns the bytes too.
fn buffers<L>(cx: &OpCx<'_, L>, problem: &MultiHeadProblem) -> Result<([Option<Operand>; 2], usize)> {
    let (SdpaSizes { batch, heads, .. }, dtype) = (problem.sizes, cx.input(0)?.dtype);
    let mut taken = 0;
    let buffers = [1, 2].map(|which| {
        // Keys and values may have rows of different sizes.
        let shape = [batch, heads, problem.capacity(), problem.row_size(which)];
        let wanted = !problem.reads_inputs() && cx.find_output(which).is_none();
        wanted.then(|| cx.workspace(&mut taken, dtype, &shape))
    });
    Ok((buffers, taken))
}

/// Returns what the workspace depends on.
///
/// # Errors
///
/// Shapes do not fit together.
pub fn scratch<L>(cx: &OpCx<'_, L>) -> Result<AttentionScratch> {
    let problem = problem_of(cx, &MultiHead::new(cx.attrs)?)?;
    Ok(AttentionScratch {
        sizes: SdpaSizes { keys: problem.capacity(), ..problem.sizes },
        types: [cx.input(0)?.dtype; 2],
        has_scores: false,
        taken: buffers(cx, &problem)?.1,
    })
}

/// Returns what a node computes.
///
/// # Errors
///
/// Shapes or attributes do not fit.
pub fn plan<'a, L>(cx: &'a OpCx<'_, L>) -> Result<AttentionPlan<'a>> {
    let node = MultiHead::new(cx.attrs)?;
    let problem = problem_of(cx, &node)?;
    let ([k_buffer, v_buffer], taken) = buffers(cx, &problem)?;
    let lengths = cx.find_ints(8)?.unwrap_or_default();
    let past = problem.past_length(lengths.first().copied().unwrap_or(-1))?;
    let mut placings = Vec::new();
    let k = keys_of(cx, &problem, 1, past, k_buffer, &mut placings)?;
    let v = keys_of(cx, &problem, 2, past, v_buffer, &mut placings)?;
    let sizes = SdpaSizes { keys: past.saturating_add(problem.sizes.keys), ..problem.sizes };
    let (input, rows) = problem.incoming(0);
    let by_token = HeadRows::by_token([sizes.heads, sizes.queries, sizes.value_size]);
    let padding = match cx.find_input(4) {
        Some(operand) => PaddingMask::new(&operand.shape, &sizes)?.map(|mask| Padding {
            operand,
            mask,
            added: node.mask_filter_value,
        }),
        None => None,
    };
    let sdpa = Sdpa {
        sizes,
        q: HeadTensor::new(cx.input(input)?, rows),
        k,
        v,
        y: HeadTensor::new(cx.output(0)?, by_token),
        q_bias: cx.find_input(3),
        scale: sizes.scale(node.scale),
        softcap: 0.0,
        causal: node.causal,
        windows: [-1, -1],
        lengths: KeyLengths::All { before: past },
        mask: bias_of(cx, 5, &sizes)?,
        padding,
        sinks: Sinks::None,
        hidden_is_nan: false,
        scores: None,
    };
    Ok(AttentionPlan { placings, conversions: Vec::new(), sdpa, taken })
}

/// Returns the keys (1) or values (2) that the attention reads: the input, or an output or `buffer`
/// in which the new rows are placed after `past` ones.
fn keys_of<'a, L>(
    cx: &'a OpCx<'_, L>,
    problem: &MultiHeadProblem,
    which: usize,
    past: usize,
    buffer: Option<Operand>,
    placings: &mut Vec<Placing<'a>>,
) -> Result<HeadTensor> {
    let (input, rows) = problem.incoming(which);
    let incoming = HeadTensor::new(cx.input(input)?, rows);
    let Some(to) = cx.find_output(which).or(buffer.as_ref()) else { return Ok(incoming) };
    let SdpaSizes { batch, heads, keys, .. } = problem.sizes;
    let sizes = [batch, heads, keys, problem.row_size(which)];
    // `past_key` and `past_value` are inputs 6 and 7.
    let old = cx.find_input(which + 5);
    // An aliased past is in place already: only new rows are written.
    let is_in_place = old.is_some_and(|old| old.arg == Arg::Output(which));
    let bias = match problem.bias_start(which) {
        Some(first) => Some((cx.input(3)?, first)),
        None => None,
    };
    let placing = Placing {
        bias,
        past: old.filter(|_| !is_in_place),
        lengths: KeyLengths::All { before: past },
        keeps: is_in_place,
        ..Placing::new(sizes, incoming.clone(), to, problem.capacity())
    };
    // The output is written all the same, but the attention need not wait for it.
    let rows = if problem.reads_inputs() { incoming } else { placing.to.clone() };
    placings.push(placing);
    Ok(rows)
}
