//! `GroupQueryAttention` of `com.microsoft`. The key-value cache either grows, or stays in a buffer
//! that past and present share.

use ort_core::dtype::DType;
use ort_core::ep::NodeView;
use ort_core::ops::nn::attention::problem::{Causal, GroupQuery, GroupQueryProblem, HeadRows, SdpaSizes};
use ort_core::{Result, ensure, error};

use super::{
    AttentionPlan, AttentionScratch, HeadTensor, KeyLengths, Placing, Positions, Rotation, Sdpa, Sinks,
    bias_of,
};
use crate::operand::{Arg, OpCx, Operand};

/// The pairs of past and present, which may share a buffer.
pub const CACHES: &[(usize, usize)] = &[(3, 1), (4, 2)];

/// Whether the GPU providers cover a node: the cache is unquantized and keeps all positions, and
/// neither scores nor norms of heads are requested.
pub fn is_covered(node: &NodeView<'_>) -> bool {
    let has_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    let window = node.attrs().find_int("local_window_size").unwrap_or(-1);
    GroupQuery::has_full_cache(node.attrs())
        && (window == -1 || window > 0)
        && !has_scores
        && node.input(14).is_none()
        && node.input(15).is_none()
}

/// A node with its shapes.
struct GroupLayout {
    node: GroupQuery,
    problem: GroupQueryProblem,
    cache_type: DType,
    /// The type of rotated queries in the workspace.
    rotated_type: DType,
}

/// Tensors in the workspace: rotated queries, and caches that no output holds.
struct GroupBuffers {
    rotated: Option<Operand>,
    caches: [Option<Operand>; 2],
    taken: usize,
}

impl GroupLayout {
    fn new<L>(cx: &OpCx<'_, L>, rotated_type: DType) -> Result<GroupLayout> {
        let node = GroupQuery::new(cx.attrs)?;
        let problem = node.problem(|index| cx.find_shape(index))?;
        let cache_type = cx.find_input(3).unwrap_or(cx.input(0)?).dtype;
        Ok(GroupLayout { node, problem, cache_type, rotated_type })
    }

    /// Reserves the workspace for caches of `capacity` rows.
    fn buffers<L>(&self, cx: &OpCx<'_, L>, capacity: usize) -> GroupBuffers {
        let SdpaSizes { batch, heads, key_heads, queries, size, .. } = self.problem.sizes;
        let mut taken = 0;
        let shape = [batch, heads, queries, size];
        let rotates = self.node.rotates;
        let rotated = rotates.then(|| cx.workspace(&mut taken, self.rotated_type, &shape));
        let caches = [1, 2].map(|which| {
            let shape = [batch, key_heads, capacity, size];
            let wanted = cx.find_output(which).is_none();
            wanted.then(|| cx.workspace(&mut taken, self.cache_type, &shape))
        });
        GroupBuffers { rotated, caches, taken }
    }

    /// Returns the new queries (0), keys (1) or values (2) as the inputs hold them.
    fn incoming<L>(&self, cx: &OpCx<'_, L>, which: usize) -> Result<HeadTensor> {
        let (input, rows) = self.problem.incoming(which);
        Ok(HeadTensor::new(cx.input(input)?, rows))
    }

    fn rotation<'a, L>(&self, cx: &'a OpCx<'_, L>) -> Result<Option<Rotation<'a>>> {
        if !self.node.rotates {
            return Ok(None);
        }
        let SdpaSizes { batch, queries, size, .. } = self.problem.sizes;
        let (cos, sin) = (cx.input(7)?, cx.input(8)?);
        let (rows, half) = (cos.size(0), cos.size(1));
        // [positions, pairs]. With fewer pairs than half a head, a part of each head stays as it
        // is.
        let fits = cos.rank() == 2 && cos.shape == sin.shape && cos.count() > 0 && half <= size / 2;
        let shapes = [&cos.shape, &sin.shape];
        ensure!(fits, InvalidArgument, "cos_cache and sin_cache have shapes {shapes:?} for heads of {size}");
        let tokens = batch.saturating_mul(queries);
        let positions = match cx.find_input(9) {
            None => Positions::ByPlace,
            Some(ids) if ids.rank() == 2 && ids.count() == tokens => Positions::ByToken(ids),
            Some(ids) => {
                return Err(error!(InvalidArgument, "position_ids {:?} for {tokens} tokens", ids.shape));
            }
        };
        let is_interleaved = self.node.is_interleaved;
        Ok(Some(Rotation { cos, sin, half, cache_rows: rows, positions, is_interleaved }))
    }

    /// Places the new keys (1) or values (2) after those of the past, in an output or in `buffer`.
    fn place<'a, L>(
        &self,
        cx: &'a OpCx<'_, L>,
        which: usize,
        buffer: Option<&Operand>,
        capacity: usize,
        lengths: KeyLengths<'a>,
    ) -> Result<Placing<'a>> {
        let SdpaSizes { batch, key_heads, queries, size, .. } = self.problem.sizes;
        let to = cx.find_output(which).or(buffer);
        let to = to.ok_or_else(|| error!(Fail, "there is no room for the cache"))?;
        let past = cx.find_input(which + 2);
        // Past and present share a buffer: only the new rows are written, so it must be long
        // enough.
        let keeps = past.is_some_and(|past| past.arg == Arg::Output(which));
        ensure!(
            !keeps || capacity == self.problem.past,
            InvalidArgument,
            help = "bind a longer buffer, or a smaller total_sequence_length",
            "the cache that past and present share has {} rows, the run needs {capacity}",
            self.problem.past
        );
        Ok(Placing {
            // Values are never rotated.
            rotation: if which == 1 { self.rotation(cx)? } else { None },
            past: past.filter(|_| !keeps),
            lengths,
            keeps,
            ..Placing::new([batch, key_heads, queries, size], self.incoming(cx, which)?, to, capacity)
        })
    }
}

/// Returns what the workspace depends on. `rotated_type` is the type of rotated queries there.
///
/// # Errors
///
/// Shapes do not fit together.
pub fn scratch<L>(cx: &OpCx<'_, L>, rotated_type: DType) -> Result<AttentionScratch> {
    let layout = GroupLayout::new(cx, rotated_type)?;
    // `total_sequence_length` is unknown before a run, so reserve for the most rows.
    let keys = layout.problem.bound();
    Ok(AttentionScratch {
        sizes: SdpaSizes { keys, ..layout.problem.sizes },
        types: [cx.input(0)?.dtype, layout.cache_type],
        has_scores: false,
        taken: layout.buffers(cx, keys).taken,
    })
}

/// Returns what a node computes; `rotated_type` as in [`scratch`].
///
/// # Errors
///
/// Shapes, attributes or lengths do not fit.
pub fn plan<'a, L>(cx: &'a OpCx<'_, L>, rotated_type: DType) -> Result<AttentionPlan<'a>> {
    let layout = GroupLayout::new(cx, rotated_type)?;
    let SdpaSizes { batch, heads, queries, size, .. } = layout.problem.sizes;
    let total = layout.problem.total(cx.ints(6)?.first().copied().unwrap_or(-1))?;
    // A shared buffer may be longer than the run needs: it has room for later tokens.
    let capacity = layout.problem.past.max(total);
    // `seqlens_k` is the number of keys less 1, which `more` adds.
    let counts = cx.input(5)?;
    ensure!(
        counts.count() == batch,
        InvalidArgument,
        "seqlens_k has {} values, expected {batch}",
        counts.count()
    );
    // The tokens of a prompt begin at position 0, however many are padding.
    let lengths = match queries == total {
        true => KeyLengths::Each { lengths: counts, more: 1, before: 0 },
        false => KeyLengths::AtEnd { lengths: counts, more: 1 },
    };
    let GroupBuffers { rotated, caches: [k_buffer, v_buffer], taken } = layout.buffers(cx, capacity);
    let mut placings = Vec::with_capacity(3);
    let mut q = layout.incoming(cx, 0)?;
    if let Some(to) = rotated {
        let placing = Placing {
            rotation: layout.rotation(cx)?,
            lengths,
            at_front: true,
            ..Placing::new([batch, heads, queries, size], q, &to, queries)
        };
        q = placing.to.clone();
        placings.push(placing);
    }
    let k = layout.place(cx, 1, k_buffer.as_ref(), capacity, lengths)?;
    let v = layout.place(cx, 2, v_buffer.as_ref(), capacity, lengths)?;
    let sizes = SdpaSizes { keys: total, ..layout.problem.sizes };
    let sdpa = attention(cx, &layout.node, sizes, [q, k.to.clone(), v.to.clone()], lengths)?;
    placings.extend([k, v]);
    Ok(AttentionPlan { placings, conversions: Vec::new(), sdpa, taken })
}

fn attention<'a, L>(
    cx: &'a OpCx<'_, L>,
    node: &GroupQuery,
    sizes: SdpaSizes,
    [q, k, v]: [HeadTensor; 3],
    lengths: KeyLengths<'a>,
) -> Result<Sdpa<'a>> {
    let sinks = match cx.find_input(11) {
        Some(sinks) if sinks.count() == sizes.heads => Sinks::Each(sinks),
        Some(sinks) => return Err(error!(InvalidArgument, "head_sink has shape {:?}", sinks.shape)),
        None if node.is_smooth => Sinks::Zero,
        None => Sinks::None,
    };
    // `local_window_size` counts the query's own key, too.
    let has_window = node.causal != Causal::No && node.window > 0;
    let before = if has_window { node.window - 1 } else { -1 };
    let by_token = HeadRows::by_token([sizes.heads, sizes.queries, sizes.value_size]);
    Ok(Sdpa {
        sizes,
        q,
        k,
        v,
        y: HeadTensor::new(cx.output(0)?, by_token),
        q_bias: None,
        scale: sizes.scale(node.scale),
        softcap: node.softcap,
        causal: node.causal,
        windows: [before, -1],
        lengths,
        mask: bias_of(cx, 10, &sizes)?,
        padding: None,
        sinks,
        hidden_is_nan: false,
        scores: None,
    })
}
