//! `GroupQueryAttention`: grouped-query attention with a KV cache, which grows or stays in a buffer
//! that past and present share.

use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use ort_gpu::Arg;

use super::attend::{Attend, Causal, Lengths, Sinks, Sizes};
use super::elementwise::FLOATS;
use super::heads::{Placing, Rotation, Rows};
use super::multi_head::{bias_of, scale_of};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};

wgpu_kernels![WgpuKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "GroupQueryAttention",
        types: &[("T", FLOATS), ("T_CACHE", FLOATS)],
        in_place: &[(3, 1), (4, 2)],
        shared_buffers: &[(3, 1), (4, 2)],
        host_inputs: &[6],
        when,
        ..KernelDef::BASE
    },
    dispatches,
    workspace: Some(workspace),
}];

/// Returns whether the kernel covers the node: no quantized cache or sliding-window cache, no score
/// output, and no norms of heads.
fn when(node: &NodeView<'_>) -> bool {
    let attrs = node.attrs();
    let plain = |name: &str| attrs.find_string(name).is_none_or(|kind| kind == "NONE");
    let wants_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    let window = attrs.find_int("local_window_size").unwrap_or(-1);
    plain("k_quant_type")
        && plain("v_quant_type")
        && attrs.find_int("sliding_window_cache").unwrap_or(0) == 0
        && (window == -1 || window > 0)
        && !wants_scores
        && node.input(14).is_none()
        && node.input(15).is_none()
}

/// The sizes of a node for some shapes.
struct Plan {
    batch: usize,
    heads: usize,
    key_heads: usize,
    queries: usize,
    size: usize,
    /// The rows of the past's tensors.
    past: usize,
    /// Whether keys and values are packed in the query.
    is_packed: bool,
    rotates: bool,
}

impl Plan {
    fn new(cx: &OpCx<'_>) -> Result<Plan> {
        let count = |name: &str| -> Result<usize> {
            let count = usize::try_from(cx.attrs.int(name)?).ok().filter(|count| *count > 0);
            count.ok_or_else(|| error!(InvalidGraph, "{name} must be at least 1"))
        };
        let (heads, key_heads) = (count("num_heads")?, count("kv_num_heads")?);
        let query = cx.input(0)?;
        let &[batch, queries, width] = &*query.shape else {
            return Err(error!(InvalidArgument, "query has shape {:?}", query.shape));
        };
        let is_packed = cx.find_input(1).is_none();
        let all = if is_packed { heads.saturating_add(key_heads.saturating_mul(2)) } else { heads };
        ensure!(
            width % all == 0,
            InvalidArgument,
            "query has width {width}, expected a multiple of the {all} heads"
        );
        let size = width / all;
        for key in [1, 2].into_iter().filter(|_| !is_packed) {
            let shape = &cx.input(key)?.shape;
            let fits = **shape == [batch, queries, key_heads.saturating_mul(size)];
            ensure!(fits, InvalidArgument, "key or value has shape {shape:?}");
        }
        let past = cx.find_input(3).map_or(0, |past| past.size(2));
        for past_input in [3, 4] {
            let Some(given) = cx.find_input(past_input) else { continue };
            let fits = *given.shape == [batch, key_heads, past, size];
            ensure!(
                fits,
                InvalidArgument,
                "the past has shape {:?}, which does not match keys and values",
                given.shape
            );
        }
        let rotates = cx.attrs.find_int("do_rotary").unwrap_or(0) != 0;
        Ok(Plan { batch, heads, key_heads, queries, size, past, is_packed, rotates })
    }

    /// Allocates the workspace: rotated queries, and a cache of `rows` rows for keys and values
    /// that no output has.
    fn buffers(&self, cx: &OpCx<'_>, rows: usize) -> Result<([Option<Operand>; 3], usize)> {
        let (mut taken, mut buffers) = (0, [None, None, None]);
        for (index, place) in buffers.iter_mut().enumerate() {
            let (wanted, dtype, shape) = match index {
                0 => (self.rotates, DType::F32, [self.batch, self.heads, self.queries, self.size]),
                _ => {
                    let dtype = cx.find_input(3).unwrap_or(cx.input(0)?).dtype;
                    let shape = [self.batch, self.key_heads, rows, self.size];
                    (cx.find_output(index).is_none(), dtype, shape)
                }
            };
            if wanted {
                *place = Some(cx.workspace(&mut taken, dtype, &shape));
            }
        }
        Ok((buffers, taken))
    }

    fn sizes(&self, keys: usize) -> Sizes {
        let Plan { batch, heads, key_heads, queries, size, .. } = *self;
        Sizes { batch, heads, key_heads, queries, keys, size, value_size: size }
    }

    /// Returns the new queries (0), keys (1) or values (2), as the inputs have them.
    fn incoming(&self, cx: &OpCx<'_>, which: usize) -> Result<Rows> {
        let Plan { heads, key_heads, queries, size, .. } = *self;
        if !self.is_packed {
            let own = if which == 0 { heads } else { key_heads };
            return Ok(Rows::interleaved(cx.input(which)?, [own, queries, size]));
        }
        let rows = Rows::interleaved(
            cx.input(0)?,
            [heads.saturating_add(key_heads.saturating_mul(2)), queries, size],
        );
        let before = match which {
            0 => 0,
            1 => heads,
            _ => heads.saturating_add(key_heads),
        };
        Ok(Rows { first: before.saturating_mul(size), ..rows })
    }

    /// A [`Placing`] of new rows without past or rotation.
    fn placing<'a>(&self, rows: &'a Rows, heads: usize, lengths: Lengths<'a>) -> Placing<'a> {
        Placing {
            sizes: [self.batch, heads, self.queries, self.size],
            fresh: rows,
            bias: None,
            rotation: None,
            past: None,
            lengths,
            at_front: false,
            keeps: false,
        }
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let plan = Plan::new(cx)?;
    // `total_sequence_length` is unknown before a run, so reserve for the most rows.
    let most = plan.past.saturating_add(plan.queries);
    let (_, mut taken) = plan.buffers(cx, most)?;
    plan.sizes(most).parts(cx, &mut taken);
    Ok(taken)
}

fn rotation_of<'a>(cx: &'a OpCx<'_>, plan: &Plan) -> Result<Option<Rotation<'a>>> {
    if !plan.rotates {
        return Ok(None);
    }
    let (cos, sin) = (cx.input(7)?, cx.input(8)?);
    let fits = cos.rank() == 2 && cos.shape == sin.shape && cos.count() > 0 && cos.size(1) <= plan.size / 2;
    ensure!(fits, InvalidArgument, "cos_cache and sin_cache have shapes {:?} and {:?}", cos.shape, sin.shape);
    let positions = cx.find_input(9);
    let each = plan.batch.saturating_mul(plan.queries);
    let fits = positions.is_none_or(|positions| positions.count() == each && positions.rank() == 2);
    ensure!(fits, InvalidArgument, "position_ids is not one for each of {each} tokens");
    let interleaved = cx.attrs.find_int("rotary_interleaved").unwrap_or(0) != 0;
    Ok(Some(Rotation { cos, sin, positions, interleaved }))
}

/// Returns the keys of the longest batch, including new ones.
fn total_of(cx: &OpCx<'_>, plan: &Plan) -> Result<usize> {
    let given = cx.ints(6)?.first().copied().unwrap_or(-1);
    let most = plan.past.saturating_add(plan.queries);
    let total = usize::try_from(given).ok();
    // In a shared buffer any total that fits is valid; else past and new rows must add up.
    let total = total.filter(|total| *total == most || *total <= plan.past);
    total.ok_or_else(|| {
        let past = plan.past;
        error!(
            InvalidArgument,
            "total_sequence_length is {given}, expected {most}, or 0 to {past} in a shared buffer"
        )
    })
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let plan = Plan::new(cx)?;
    let Plan { batch, heads, key_heads, queries, size, .. } = plan;
    let total = total_of(cx, &plan)?;
    let capacity = plan.past.max(total);
    let counts = cx.input(5)?;
    ensure!(
        counts.count() == batch,
        InvalidArgument,
        "seqlens_k has {} values, expected {batch}",
        counts.count()
    );
    // The tokens of a prompt begin at position 0, however many are padding.
    let is_prompt = queries == total;
    let lengths = match is_prompt {
        true => Lengths::Of { lengths: counts, before: 0, more: 1 },
        false => Lengths::AtEnd { lengths: counts, more: 1 },
    };
    let rotation = rotation_of(cx, &plan)?;
    let ([buffer, joined @ ..], taken) = plan.buffers(cx, capacity)?;
    let mut dispatches = Vec::new();
    let mut q = plan.incoming(cx, 0)?;
    if let Some(to) = buffer {
        let placing = Placing { rotation, at_front: true, ..plan.placing(&q, heads, lengths) };
        dispatches.push(placing.dispatch(cx, &to)?);
        q = Rows::by_head(&to, [heads, queries, size]);
    }
    let mut caches = Vec::with_capacity(2);
    for (which, joined) in [1, 2].into_iter().zip(&joined) {
        let to = cx.find_output(which).or(joined.as_ref());
        let to = to.ok_or_else(|| error!(Fail, "there is no room for the cache"))?;
        let to = to.with_shape(&[batch, key_heads, capacity, size]);
        let (rows, past) = (plan.incoming(cx, which)?, cx.find_input(which + 2));
        let keeps = past.is_some_and(|past| past.arg == Arg::Output(which));
        ensure!(
            !keeps || capacity == plan.past,
            InvalidArgument,
            help = "bind a longer buffer, or a smaller total_sequence_length",
            "the cache that past and present share has {} rows, the run needs {capacity}",
            plan.past
        );
        let placing = Placing {
            rotation: rotation.filter(|_| which == 1),
            past: past.filter(|_| !keeps),
            keeps,
            ..plan.placing(&rows, key_heads, lengths)
        };
        dispatches.push(placing.dispatch(cx, &to)?);
        caches.push(Rows::by_head(&to, [key_heads, capacity, size]));
    }
    let (Some(v), Some(k)) = (caches.pop(), caches.pop()) else {
        return Err(error!(Fail, "there are two caches"));
    };
    dispatches.extend(attend(cx, plan.sizes(total), [q, k, v], lengths)?.dispatches(cx, taken)?);
    Ok(dispatches)
}

fn attend<'a>(
    cx: &'a OpCx<'_>,
    sizes: Sizes,
    [q, k, v]: [Rows; 3],
    lengths: Lengths<'a>,
) -> Result<Attend<'a>> {
    let is_causal = cx.attrs.flag("causal")?;
    let sinks = match cx.find_input(11) {
        Some(sinks) if sinks.count() == sizes.heads => Sinks::Each(sinks),
        Some(sinks) => return Err(error!(InvalidArgument, "head_sink has shape {:?}", sinks.shape)),
        None if cx.attrs.int("smooth_softmax")? == 1 => Sinks::Zero,
        None => Sinks::None,
    };
    let window = cx.attrs.int("local_window_size")?;
    Ok(Attend {
        sizes,
        q,
        k,
        v,
        y: Rows::interleaved(cx.output(0)?, [sizes.heads, sizes.queries, sizes.value_size]),
        q_bias: None,
        scale: scale_of(cx, sizes.size),
        softcap: cx.attrs.find_float("softcap").unwrap_or(0.0),
        causal: if is_causal { Causal::Yes } else { Causal::No },
        // `local_window_size` counts the query's own key, too.
        windows: [if window > 0 && is_causal { window - 1 } else { -1 }, -1],
        lengths,
        mask: cx.find_input(10).map(|bias| bias_of(bias, &sizes)).transpose()?,
        padding: None,
        sinks,
        hidden_is_nan: false,
        scores: None,
    })
}
