//! `MultiHeadAttention` of `com.microsoft`.

use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use ort_gpu::Arg;

use super::attend::{Attend, Causal, Lengths, Mask, Padded, Padding, Sinks, Sizes};
use super::elementwise::FLOATS;
use super::heads::{Placing, Rows};
use super::lines::product;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};

wgpu_kernels![WgpuKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "MultiHeadAttention",
        types: &[("T", FLOATS)],
        in_place: &[(6, 1), (7, 2)],
        host_inputs: &[8],
        when,
        ..KernelDef::BASE
    },
    dispatches,
    workspace: Some(workspace),
}];

/// The default for `mask_filter_value`, which is added to the scores of padding.
const MASKED: f32 = -10000.0;
/// Below this, a `mask_filter_value` is as low as what hides keys: those hidden by the causal mask
/// would share the weight of padded ones.
const AS_LOW_AS_HIDDEN: f32 = -1e30;

fn when(node: &NodeView<'_>) -> bool {
    let wants_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    let is_causal = node.attrs().flag("unidirectional").unwrap_or(false);
    let padded = node.attrs().find_float("mask_filter_value").unwrap_or(MASKED);
    let has_padding = node.input(4).is_some();
    !wants_scores && node.input(9).is_none() && !(is_causal && has_padding && padded < AS_LOW_AS_HIDDEN)
}

/// The layout of queries, keys and values.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Separate: (batch, sequence, width) each.
    Apart,
    /// Packed in query: (batch, sequence, heads, 3, size).
    PackedAll,
    /// Keys and values packed in key: (batch, sequence, heads, 2, size).
    PackedKeys,
    /// Cross attention: keys and values (batch, heads, sequence, size), without a bias.
    Crossed,
}

/// The sizes and workspace of a node for some shapes.
struct Plan {
    form: Form,
    batch: usize,
    heads: usize,
    queries: usize,
    /// The number of new keys.
    fresh: usize,
    size: usize,
    value_size: usize,
    /// The rows of the past's tensors.
    past: usize,
    /// The rows of the present's tensors.
    capacity: usize,
    /// Whether attention reads keys and values straight from the inputs.
    reads_inputs: bool,
    /// The keys and values in the workspace, if no output has them.
    joined: [Option<Operand>; 2],
    taken: usize,
}

/// Returns the layout, followed by batches, queries, query width, new keys and value width.
fn form_of(cx: &OpCx<'_>, heads: usize) -> Result<(Form, [usize; 5])> {
    let shape = |index: usize| cx.find_input(index).map(|operand| &*operand.shape);
    let wide = |size: usize| heads.saturating_mul(size);
    match (shape(0).unwrap_or_default(), shape(1), shape(2)) {
        (&[batch, rows, n, 3, size], None, None) if n == heads => {
            Ok((Form::PackedAll, [batch, rows, wide(size), rows, wide(size)]))
        }
        (&[batch, rows, width], Some(&[b, fresh, n, 2, size]), None)
            if [b, n, wide(size)] == [batch, heads, width] =>
        {
            Ok((Form::PackedKeys, [batch, rows, width, fresh, width]))
        }
        (&[batch, rows, width], Some(&[b, fresh, w]), Some(&[c, same, value_width]))
            if [b, c, w, same] == [batch, batch, width, fresh] =>
        {
            Ok((Form::Apart, [batch, rows, width, fresh, value_width]))
        }
        (&[batch, rows, width], Some(&[b, n, fresh, size]), Some(&[c, m, same, value_size]))
            if [b, c, n, m, same, wide(size)] == [batch, batch, heads, heads, fresh, width] =>
        {
            Ok((Form::Crossed, [batch, rows, width, fresh, wide(value_size)]))
        }
        shapes => Err(error!(InvalidArgument, "query, key and value of shapes {shapes:?} do not match")),
    }
}

impl Plan {
    fn new(cx: &OpCx<'_>, is_shared: bool) -> Result<Plan> {
        let heads = usize::try_from(cx.attrs.int("num_heads")?).ok().filter(|heads| *heads > 0);
        let heads = heads.ok_or_else(|| error!(InvalidGraph, "num_heads must be at least 1"))?;
        let (form, [batch, queries, width, fresh, value_width]) = form_of(cx, heads)?;
        let divides = width % heads == 0 && value_width % heads == 0;
        ensure!(divides, InvalidArgument, "widths {width} and {value_width} are no {heads} heads");
        let (size, value_size) = (width / heads, value_width / heads);
        let past = cx.find_input(6).map_or(0, |past| past.size(2));
        for (input, size) in [(6, size), (7, value_size)] {
            let Some(given) = cx.find_input(input) else { continue };
            let fits = *given.shape == [batch, heads, past, size];
            ensure!(
                fits,
                InvalidArgument,
                "the past has shape {:?}, which does not match keys and values",
                given.shape
            );
        }
        let bias = cx.find_input(3);
        if let Some(bias) = bias {
            let expected = width.saturating_mul(2).saturating_add(value_width);
            ensure!(*bias.shape == [expected], InvalidArgument, "bias has shape {:?}", bias.shape);
        }
        let reads_inputs = past == 0 && !is_shared && (bias.is_none() || form == Form::Crossed);
        let capacity = if is_shared { past } else { past.saturating_add(fresh) };
        let (mut taken, mut joined) = (0, [None, None]);
        for (index, (place, size)) in joined.iter_mut().zip([size, value_size]).enumerate() {
            if !reads_inputs && cx.find_output(1 + index).is_none() {
                let shape = [batch, heads, capacity, size];
                *place = Some(cx.workspace(&mut taken, cx.input(0)?.dtype, &shape));
            }
        }
        let sizes = Plan {
            form,
            batch,
            heads,
            queries,
            fresh,
            size,
            value_size,
            past,
            capacity,
            reads_inputs,
            joined,
            taken,
        };
        Ok(sizes)
    }

    fn sizes(&self, keys: usize) -> Sizes {
        let Plan { batch, heads, queries, size, value_size, .. } = *self;
        Sizes { batch, heads, key_heads: heads, queries, keys, size, value_size }
    }

    /// Returns the new queries (0), keys (1) or values (2), as the inputs have them.
    fn incoming(&self, cx: &OpCx<'_>, which: usize) -> Result<Rows> {
        let Plan { heads, queries, fresh, size, .. } = *self;
        let own = if which == 2 { self.value_size } else { size };
        Ok(match (self.form, which) {
            (Form::PackedAll, _) => Rows::parts(cx.input(0)?, [heads, queries, size], (3, which)),
            (_, 0) => Rows::interleaved(cx.input(0)?, [heads, queries, size]),
            (Form::PackedKeys, _) => Rows::parts(cx.input(1)?, [heads, fresh, size], (2, which - 1)),
            (Form::Apart, _) => Rows::interleaved(cx.input(which)?, [heads, fresh, own]),
            (Form::Crossed, _) => Rows::by_head(cx.input(which)?, [heads, fresh, own]),
        })
    }

    /// Returns the keys (1) or values (2): the input, or the cache with past and new rows.
    fn cache(
        &self,
        cx: &OpCx<'_>,
        (which, past): (usize, usize),
        dispatches: &mut Vec<Dispatch>,
    ) -> Result<Rows> {
        let incoming = self.incoming(cx, which)?;
        let joined = self.joined.get(which - 1).and_then(Option::as_ref);
        let Some(to) = cx.find_output(which).or(joined) else { return Ok(incoming) };
        let size = if which == 2 { self.value_size } else { self.size };
        let to = to.with_shape(&[self.batch, self.heads, self.capacity, size]);
        let old = cx.find_input(which + 5);
        // An aliased past is in place already: only new rows are written.
        let is_in_place = old.is_some_and(|old| old.arg == Arg::Output(which));
        let has_bias = self.form != Form::Crossed;
        let first = which.saturating_mul(self.heads).saturating_mul(self.size);
        let placing = Placing {
            sizes: [self.batch, self.heads, self.fresh, size],
            fresh: &incoming,
            bias: cx.find_input(3).filter(|_| has_bias).map(|bias| (bias, first)),
            rotation: None,
            past: old.filter(|_| !is_in_place),
            lengths: Lengths::All { before: past },
            at_front: false,
            keeps: is_in_place,
        };
        dispatches.push(placing.dispatch(cx, &to)?);
        Ok(if self.reads_inputs { incoming } else { Rows::by_head(&to, [self.heads, self.capacity, size]) })
    }
}

/// Returns whether past and present share a buffer longer than its contents. Host inputs are
/// unknown before a run.
fn is_shared(cx: &OpCx<'_>) -> bool {
    cx.find_host(8).is_some()
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    // Reserve for a past of exact length, which takes as much as a shared buffer plus the new rows.
    let plan = Plan::new(cx, false)?;
    let mut taken = plan.taken;
    plan.sizes(plan.capacity).parts(cx, &mut taken);
    Ok(taken)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let plan = Plan::new(cx, is_shared(cx))?;
    let Plan { heads, queries, size, value_size, .. } = plan;
    let mut dispatches = Vec::new();
    let past = past_length(cx, &plan)?;
    let sizes = plan.sizes(past.saturating_add(plan.fresh));
    let k = plan.cache(cx, (1, past), &mut dispatches)?;
    let v = plan.cache(cx, (2, past), &mut dispatches)?;
    let attend = Attend {
        sizes,
        q: plan.incoming(cx, 0)?,
        k,
        v,
        y: Rows::interleaved(cx.output(0)?, [heads, queries, value_size]),
        q_bias: cx.find_input(3),
        scale: scale_of(cx, size),
        softcap: 0.0,
        causal: if cx.attrs.flag("unidirectional")? { Causal::ButTheLast } else { Causal::No },
        windows: [-1, -1],
        lengths: Lengths::All { before: past },
        mask: cx.find_input(5).map(|bias| bias_of(bias, &sizes)).transpose()?,
        padding: cx.find_input(4).map(|mask| padding_of(cx, mask, &sizes)).transpose()?.flatten(),
        sinks: Sinks::None,
        hidden_is_nan: false,
        scores: None,
    };
    dispatches.extend(attend.dispatches(cx, plan.taken)?);
    Ok(dispatches)
}

/// Returns the scale of the scores; 0 selects the default.
pub(super) fn scale_of(cx: &OpCx<'_>, size: usize) -> f32 {
    let given = cx.attrs.find_float("scale").filter(|scale| *scale != 0.0);
    given.unwrap_or(1.0 / (size as f32).sqrt())
}

/// Returns the number of valid rows in the past.
fn past_length(cx: &OpCx<'_>, plan: &Plan) -> Result<usize> {
    let Some(lengths) = cx.find_ints(8)? else { return Ok(plan.past) };
    let length = lengths.first().copied().unwrap_or(-1);
    let fits = usize::try_from(length).ok();
    let fits = fits.filter(|length| length.checked_add(plan.fresh).is_some_and(|total| total <= plan.past));
    let (fresh, capacity) = (plan.fresh, plan.past);
    fits.ok_or_else(|| {
        error!(
            InvalidArgument,
            "past_sequence_length is {length}, for {fresh} new keys in a buffer of {capacity}"
        )
    })
}

/// Returns `attention_bias` as an additive mask. Its shape is (batch or 1, heads or 1, queries, at
/// least the keys).
pub(super) fn bias_of<'a>(operand: &'a Operand, sizes: &Sizes) -> Result<Mask<'a>> {
    let wrong = || error!(InvalidArgument, "attention_bias has shape {:?} for {sizes:?}", operand.shape);
    let &[batch, heads, queries, keys] = &*operand.shape else { return Err(wrong()) };
    let fits = (batch == 1 || batch == sizes.batch)
        && (heads == 1 || heads == sizes.heads)
        && queries == sizes.queries
        && keys >= sizes.keys;
    let step = |size: usize, behind: &[usize]| if size == 1 { 0 } else { product(behind) };
    let steps = [step(batch, &[heads, queries, keys]), step(heads, &[queries, keys]), keys];
    fits.then_some(Mask { operand, steps, keys }).ok_or_else(wrong)
}

/// Parses the padding mask. It has lengths (batch), ends and starts (2 * batch), lengths and
/// offsets (3 * batch + 2), or elements (batch, keys), (batch, queries, keys) or (batch, 1, at
/// least keys, at least keys).
fn padding_of<'a>(cx: &OpCx<'_>, operand: &'a Operand, sizes: &Sizes) -> Result<Option<Padding<'a>>> {
    let Sizes { batch, queries, keys, .. } = *sizes;
    let elements = |first: usize, steps: [usize; 2]| Padded::Elements { first, steps };
    let kind = match *operand.shape {
        [len] if len == batch || len == batch.saturating_mul(3).saturating_add(2) => Padded::From,
        [len] if len == batch.saturating_mul(2) => Padded::FromAndBefore,
        [b, k] if [b, k] == [batch, keys] => elements(0, [keys, 0]),
        // A single element for all keys changes nothing, and ONNX Runtime ignores it.
        [b, 1] if b == batch || b == 1 => return Ok(None),
        [b, q, k] if [b, q, k] == [batch, queries, keys] => elements(0, [queries.saturating_mul(keys), keys]),
        // Of a square over all positions, use the rows of the queries, which are the last ones.
        [b, 1, rows, columns] if b == batch && rows >= keys && columns >= keys && keys >= queries => {
            elements((keys - queries).saturating_mul(columns), [rows.saturating_mul(columns), columns])
        }
        ref shape => {
            return Err(error!(InvalidArgument, "the padding mask has shape {shape:?} for {sizes:?}"));
        }
    };
    Ok(Some(Padding { operand, kind, added: cx.attrs.find_float("mask_filter_value").unwrap_or(MASKED) }))
}
