//! `MultiHeadAttention` kernels.

use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use ort_gpu::Arg;

use super::attend::{Attend, Causal, Lengths, Mask, Padded, Padding, Sinks, Sizes};
use super::heads::{Placing, Rows};
use super::lines::SHORT_FLOATS;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![CudaKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "MultiHeadAttention",
        types: &[("T", SHORT_FLOATS)],
        in_place: &[(6, 1), (7, 2)],
        host_inputs: &[8],
        when,
        ..KernelDef::BASE
    },
    launches,
    workspace: Some(workspace),
    counted: None,
}];

/// The default for `mask_filter_value`, which is added to the scores of padding.
const MASKED: f32 = -10000.0;
/// Below this filter value, causally hidden keys would gain weight beside padded ones. The kernel
/// excludes hidden keys outright, so it declines such nodes.
const AS_LOW_AS_HIDDEN: f32 = -1e30;

fn padded_by(attrs: &ort_core::ir::Attributes) -> f32 {
    attrs.find_float("mask_filter_value").unwrap_or(MASKED)
}

fn when(node: &NodeView<'_>) -> bool {
    let (attrs, has) = (node.attrs(), |input: usize| node.input(input).is_some());
    let is_causal = attrs.flag("unidirectional").unwrap_or(false);
    let wants_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    let counts_hidden = is_causal && has(4) && padded_by(attrs) < AS_LOW_AS_HIDDEN;
    !(wants_scores || has(9) || counts_hidden)
}

/// The inputs and layouts of queries, keys and values.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Separate tensors, each (batch, sequence, width).
    Apart,
    /// All in query: (batch, sequence, heads, 3, size).
    PackedAll,
    /// Keys and values in key: (batch, sequence, heads, 2, size).
    PackedKeys,
    /// Keys and values as (batch, heads, sequence, size), without a bias.
    Crossed,
}

/// What a node computes for some shapes.
struct Plan {
    form: Form,
    /// The sizes; `keys` counts the new keys only.
    sizes: Sizes,
    /// Rows of the past's and of the present's tensors.
    past: usize,
    capacity: usize,
    /// Whether the attention reads keys and values directly from the inputs.
    reads_inputs: bool,
    /// Keys and values in the workspace, if no output holds them.
    joined: [Option<Operand>; 2],
    taken: usize,
}

/// Returns the form, and batch, queries, new keys, and head sizes of keys and values.
fn form_of(cx: &OpCx<'_>, heads: usize) -> Result<(Form, [usize; 5])> {
    let shape = |index: usize| cx.find_input(index).map_or(&[][..], |operand| &operand.shape);
    let (query, key, value) = (shape(0), shape(1), shape(2));
    let wrong = || error!(InvalidArgument, "shapes {query:?}, {key:?} and {value:?} do not match");
    if let (&[batch, rows, n, 3, size], [], []) = (query, key, value) {
        ensure!(n == heads, InvalidArgument, "{n} heads, not {heads}");
        return Ok((Form::PackedAll, [batch, rows, rows, size, size]));
    }
    let &[batch, rows, width] = query else { return Err(wrong()) };
    let size = width.checked_div(heads).filter(|size| size.checked_mul(heads) == Some(width));
    let size = size.ok_or_else(wrong)?;
    let (form, fresh, value_size, fits) = match (key, value) {
        (&[b, fresh, n, 2, own], []) => (Form::PackedKeys, fresh, own, [b, n, own] == [batch, heads, size]),
        (&[b, fresh, own], &[c, same, wide]) => {
            let fits = [b, c, own, same] == [batch, batch, width, fresh] && wide % heads == 0;
            (Form::Apart, fresh, wide / heads, fits)
        }
        (&[b, n, fresh, own], &[c, m, same, of_value]) => {
            let fits = [b, c, n, m] == [batch, batch, heads, heads] && [own, same] == [size, fresh];
            (Form::Crossed, fresh, of_value, fits)
        }
        _ => return Err(wrong()),
    };
    if fits { Ok((form, [batch, rows, fresh, size, value_size])) } else { Err(wrong()) }
}

impl Plan {
    fn new(cx: &OpCx<'_>, is_shared: bool) -> Result<Plan> {
        let heads = usize::try_from(cx.attrs.int("num_heads")?).ok().filter(|heads| *heads > 0);
        let heads = heads.ok_or_else(|| error!(InvalidGraph, "num_heads must be at least 1"))?;
        let (form, [batch, queries, fresh, size, value_size]) = form_of(cx, heads)?;
        let past = cx.find_input(6).map_or(0, |past| past.size(2));
        for (input, size) in [(6, size), (7, value_size)] {
            let given = cx.find_input(input);
            let fits = given.is_none_or(|given| *given.shape == [batch, heads, past, size]);
            ensure!(
                fits,
                InvalidArgument,
                "the past has shape {:?}, which does not match keys and values",
                given.map(|given| &given.shape)
            );
        }
        let bias = cx.find_input(3);
        let all = size.saturating_mul(2).saturating_add(value_size).saturating_mul(heads);
        let fits = bias.is_none_or(|bias| *bias.shape == [all]);
        ensure!(fits, InvalidArgument, "bias does not have {all} elements");
        let reads_inputs = past == 0 && !is_shared && (bias.is_none() || form == Form::Crossed);
        let capacity = if is_shared { past } else { past.saturating_add(fresh) };
        let sizes = Sizes { batch, heads, key_heads: heads, queries, keys: fresh, size, value_size };
        let mut taken = 0;
        let mut joined = |output: usize, size: usize| -> Result<Option<Operand>> {
            let wanted = !reads_inputs && cx.find_output(output).is_none();
            let (dtype, shape) = (cx.input(0)?.dtype, [batch, heads, capacity, size]);
            Ok(wanted.then(|| cx.workspace(&mut taken, dtype, &shape)))
        };
        let joined = [joined(1, size)?, joined(2, value_size)?];
        Ok(Plan { form, sizes, past, capacity, reads_inputs, joined, taken })
    }

    /// Returns the new queries (0), keys (1) or values (2) as the inputs hold them.
    fn incoming(&self, cx: &OpCx<'_>, which: usize) -> Result<Rows> {
        let Sizes { heads, queries, keys, size, value_size, .. } = self.sizes;
        let own = if which == 2 { value_size } else { size };
        let rows = if which == 0 { queries } else { keys };
        let (input, part) = match (self.form, which) {
            (Form::PackedAll, _) => (0, (which, 3)),
            (Form::PackedKeys, 1 | 2) => (1, (which - 1, 2)),
            (Form::Crossed, 1 | 2) => return Ok(Rows::by_head(cx.input(which)?, [heads, rows, own])),
            _ => (which, (0, 1)),
        };
        Ok(Rows::by_token(cx.input(input)?, [heads, rows, own], part))
    }

    /// Returns keys (1) or values (2): directly from the inputs, or appended to `past` rows.
    fn cache(
        &self,
        cx: &OpCx<'_>,
        (which, past): (usize, usize),
        launches: &mut Vec<Launch>,
    ) -> Result<Rows> {
        let incoming = self.incoming(cx, which)?;
        let joined = self.joined.get(which.saturating_sub(1)).and_then(Option::as_ref);
        let Some(to) = cx.find_output(which).or(joined) else { return Ok(incoming) };
        let Sizes { batch, heads, keys, size, value_size, .. } = self.sizes;
        let own = if which == 2 { value_size } else { size };
        let to = Rows::by_head(to, [heads, self.capacity, own]);
        let old = cx.find_input(which + 5);
        let is_in_place = old.is_some_and(|old| old.arg == Arg::Output(which));
        let first = which.saturating_mul(heads).saturating_mul(size);
        let placing = Placing {
            bias: cx.find_input(3).filter(|_| self.form != Form::Crossed).map(|bias| (bias, first)),
            past: old.filter(|_| !is_in_place),
            lengths: Lengths::all(past),
            keeps: is_in_place,
            ..Placing::new([batch, heads, keys, own], &incoming)
        };
        launches.extend(placing.launches(&to, self.capacity)?);
        Ok(if self.reads_inputs { incoming } else { to })
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    // Size for a growing past: a shared buffer needs no more than that. Which of the two it is
    // depends on a host input, which is not known yet.
    let plan = Plan::new(cx, false)?;
    let (mut taken, types) = (plan.taken, [cx.input(0)?.dtype; 2]);
    Sizes { keys: plan.capacity, ..plan.sizes }.parts(cx, types, false, &mut taken)?;
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    // If `past_sequence_length` is given, the past is a buffer that is longer than its contents.
    let plan = Plan::new(cx, cx.find_host(8).is_some())?;
    let mut launches = Vec::new();
    let past = past_length(cx, &plan)?;
    let sizes = Sizes { keys: past.saturating_add(plan.sizes.keys), ..plan.sizes };
    let k = plan.cache(cx, (1, past), &mut launches)?;
    let v = plan.cache(cx, (2, past), &mut launches)?;
    let attend = Attend {
        sizes,
        q: plan.incoming(cx, 0)?,
        k,
        v,
        y: Rows::by_token(cx.output(0)?, [sizes.heads, sizes.queries, sizes.value_size], (0, 1)),
        q_bias: cx.find_input(3),
        scale: scale_of(cx, sizes.size),
        softcap: 0.0,
        causal: if cx.attrs.flag("unidirectional")? { Causal::ButTheLast } else { Causal::No },
        windows: [-1, -1],
        lengths: Lengths::all(past),
        mask: cx.find_input(5).map(|bias| bias_of(bias, &sizes)).transpose()?,
        padding: cx.find_input(4).map(|mask| padding_of(cx, mask, &sizes)).transpose()?.flatten(),
        sinks: Sinks::None,
        hidden_is_nan: false,
        scores: None,
    };
    launches.extend(attend.launches(cx, plan.taken)?);
    Ok(launches)
}

/// Returns the scale of the scores; 0 means the default.
pub(super) fn scale_of(cx: &OpCx<'_>, size: usize) -> f32 {
    let given = cx.attrs.find_float("scale").filter(|scale| *scale != 0.0);
    given.unwrap_or(1.0 / (size as f32).sqrt())
}

/// Returns how many rows of the past are valid.
fn past_length(cx: &OpCx<'_>, plan: &Plan) -> Result<usize> {
    let Some(lengths) = cx.find_ints(8)? else { return Ok(plan.past) };
    let (fresh, capacity) = (plan.sizes.keys, plan.past);
    let given = lengths.first().copied().unwrap_or(-1);
    let length = usize::try_from(given).unwrap_or(usize::MAX);
    let fits = length.saturating_add(fresh) <= capacity;
    ensure!(
        fits,
        InvalidArgument,
        "past_sequence_length is {given}, for {fresh} new keys in a buffer of {capacity}"
    );
    Ok(length)
}

/// Checks a bias for the scores: (batch or 1, heads or 1, queries, at least the keys).
pub(super) fn bias_of<'a>(operand: &'a Operand, sizes: &Sizes) -> Result<Mask<'a>> {
    let shape: Option<[usize; 4]> = operand.shape.as_ref().try_into().ok();
    let one_or = |size: usize, whole: usize| size == 1 || size == whole;
    let fits = |[batch, heads, queries, keys]: &[usize; 4]| {
        let rows = one_or(*batch, sizes.batch) && one_or(*heads, sizes.heads);
        rows && *queries == sizes.queries && *keys >= sizes.keys
    };
    let shape = shape.filter(fits).ok_or_else(|| {
        error!(InvalidArgument, "attention_bias has shape {:?} for {sizes:?}", operand.shape)
    })?;
    Ok(Mask::new(operand, shape))
}

/// Interprets the padding mask by its shape. It holds lengths (batch), ends and starts (2 * batch),
/// lengths and offsets (3 * batch + 2), or elements: (batch, keys), (batch, queries, keys), or
/// (batch, 1, at least keys, at least keys).
fn padding_of<'a>(cx: &OpCx<'_>, operand: &'a Operand, sizes: &Sizes) -> Result<Option<Padding<'a>>> {
    let Sizes { batch, queries, keys, .. } = *sizes;
    let kind = match *operand.shape {
        [len] if len == batch || len == batch.saturating_mul(3).saturating_add(2) => Padded::From,
        [len] if len == batch.saturating_mul(2) => Padded::FromAndBefore,
        [b, k] if [b, k] == [batch, keys] => Padded::Elements([0, keys, 0]),
        // One element for all keys would change nothing, and ONNX Runtime ignores it.
        [b, 1] if b == batch || b == 1 => return Ok(None),
        [b, q, k] if [b, q, k] == [batch, queries, keys] => {
            Padded::Elements([0, queries.saturating_mul(keys), keys])
        }
        // The mask covers all positions squared; the queries are its last rows.
        [b, 1, rows, columns] if b == batch && rows >= keys && columns >= keys && keys >= queries => {
            let first = (keys - queries).saturating_mul(columns);
            Padded::Elements([first, rows.saturating_mul(columns), columns])
        }
        ref shape => {
            return Err(error!(InvalidArgument, "the padding mask has shape {shape:?} for {sizes:?}"));
        }
    };
    Ok(Some(Padding { operand, kind, added: padded_by(cx.attrs) }))
}
