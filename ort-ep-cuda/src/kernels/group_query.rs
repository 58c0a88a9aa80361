//! `GroupQueryAttention`. The key-value cache either grows, or stays in a buffer that past and
//! present share.

use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use ort_gpu::Arg;

use super::attend::{Attend, Causal, Lengths, Sinks, Sizes};
use super::heads::{Placing, Positions, Rotation, Rows};
use super::lines::SHORT_FLOATS;
use super::multi_head::{bias_of, scale_of};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const CACHES: &[(usize, usize)] = &[(3, 1), (4, 2)];

cuda_kernels![CudaKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "GroupQueryAttention",
        types: &[("T", SHORT_FLOATS), ("T_CACHE", SHORT_FLOATS)],
        in_place: CACHES,
        shared_buffers: CACHES,
        host_inputs: &[6],
        when,
        ..KernelDef::BASE
    },
    launches,
    workspace: Some(workspace),
    counted: None,
}];

/// Whether the cache is unquantized and keeps all positions, and neither scores nor per-head norms
/// are requested.
fn when(node: &NodeView<'_>) -> bool {
    let (attrs, has) = (node.attrs(), |input: usize| node.input(input).is_some());
    let is_quantized = ["k_quant_type", "v_quant_type"]
        .iter()
        .any(|name| attrs.find_string(name).is_some_and(|kind| kind != "NONE"));
    let slides = attrs.find_int("sliding_window_cache").unwrap_or(0) != 0;
    let window = attrs.find_int("local_window_size").unwrap_or(-1);
    let wants_scores = node.node.outputs.get(3).is_some_and(Option::is_some);
    !(is_quantized || slides || wants_scores || has(14) || has(15)) && (window == -1 || window > 0)
}

/// What a node computes for some shapes.
struct Plan {
    /// The sizes; `keys` counts the new keys only.
    sizes: Sizes,
    /// Rows of the past's tensors.
    past: usize,
    /// Whether `query` also contains keys and values.
    is_packed: bool,
    rotates: bool,
    cache_type: DType,
}

impl Plan {
    fn new(cx: &OpCx<'_>) -> Result<Plan> {
        let count = |name: &str| -> Result<usize> {
            let count = usize::try_from(cx.attrs.int(name)?).unwrap_or(0);
            ensure!(count > 0, InvalidGraph, "{name} must be at least 1");
            Ok(count)
        };
        let (heads, key_heads, query) = (count("num_heads")?, count("kv_num_heads")?, cx.input(0)?);
        let is_packed = cx.find_input(1).is_none();
        let all = if is_packed { heads.saturating_add(key_heads.saturating_mul(2)) } else { heads };
        let (batch, queries, size) = match *query.shape {
            [batch, queries, width] if width % all == 0 => (batch, queries, width / all),
            ref shape => {
                return Err(error!(
                    InvalidArgument,
                    "query of shape {shape:?} does not split into {all} heads"
                ));
            }
        };
        let fresh: &[usize] = &[batch, queries, key_heads.saturating_mul(size)];
        let past = cx.find_input(3).map_or(0, |past| past.size(2));
        let old: &[usize] = &[batch, key_heads, past, size];
        let fresh_inputs = [1, 2].map(|input| (input, fresh)).into_iter().filter(|_| !is_packed);
        for (input, expected) in fresh_inputs.chain([(3, old), (4, old)]) {
            let given = cx.find_input(input).map_or(expected, |given| &given.shape);
            ensure!(given == expected, InvalidArgument, "input {input} is {given:?}, not {expected:?}");
        }
        let rotates = cx.attrs.find_int("do_rotary").unwrap_or(0) != 0;
        let cache_type = cx.find_input(3).unwrap_or(query).dtype;
        let sizes = Sizes { batch, heads, key_heads, queries, keys: queries, size, value_size: size };
        Ok(Plan { sizes, past, is_packed, rotates, cache_type })
    }

    /// Reserves the workspace: rotated queries, and caches of `rows` rows that no output holds.
    /// Returns the bytes too.
    fn buffers(&self, cx: &OpCx<'_>, rows: usize) -> Result<([Option<Operand>; 3], usize)> {
        let Sizes { batch, heads, key_heads, queries, size, .. } = self.sizes;
        let mut taken = 0;
        let mut room = |wanted: bool, dtype, shape: [usize; 4]| {
            if wanted { Some(cx.workspace(&mut taken, dtype, &shape)) } else { None }
        };
        let turned = room(self.rotates, cx.input(0)?.dtype, [batch, heads, queries, size]);
        let [k, v] = [1, 2].map(|output| {
            room(cx.find_output(output).is_none(), self.cache_type, [batch, key_heads, rows, size])
        });
        Ok(([turned, k, v], taken))
    }

    /// Returns the new queries (0), keys (1) or values (2) as the inputs hold them.
    fn incoming(&self, cx: &OpCx<'_>, which: usize) -> Result<Rows> {
        let Sizes { heads, key_heads, queries, size, .. } = self.sizes;
        if !self.is_packed {
            let own = if which == 0 { heads } else { key_heads };
            return Ok(Rows::by_token(cx.input(which)?, [own, queries, size], (0, 1)));
        }
        let all = heads.saturating_add(key_heads.saturating_mul(2));
        let before = [0, heads, heads.saturating_add(key_heads)].get(which).copied().unwrap_or(0);
        let rows = Rows::by_token(cx.input(0)?, [all, queries, size], (0, 1));
        Ok(Rows { first: before.saturating_mul(size), ..rows })
    }

    /// Returns the number of keys in the longest batch, new ones included.
    fn total(&self, cx: &OpCx<'_>) -> Result<usize> {
        let given = cx.ints(6)?.first().copied().unwrap_or(-1);
        let (past, most) = (self.past, self.past.saturating_add(self.sizes.queries));
        let total = usize::try_from(given).ok().filter(|total| *total == most || *total <= past);
        total.ok_or_else(|| {
            let what = "total_sequence_length";
            error!(InvalidArgument, "{what} is {given}, expected {most}, or 0 to {past} in a shared buffer")
        })
    }

    fn rotation<'a>(&self, cx: &'a OpCx<'_>) -> Result<Option<Rotation<'a>>> {
        if !self.rotates {
            return Ok(None);
        }
        let (cos, sin, half) = (cx.input(7)?, cx.input(8)?, cx.input(7)?.size(1));
        let fits =
            cos.rank() == 2 && cos.shape == sin.shape && cos.count() > 0 && half <= self.sizes.size / 2;
        ensure!(
            fits,
            InvalidArgument,
            "cos_cache and sin_cache have shapes {:?}, {:?}",
            cos.shape,
            sin.shape
        );
        let tokens = self.sizes.batch.saturating_mul(self.sizes.queries);
        let positions = match cx.find_input(9) {
            None => Positions::ByPlace,
            Some(ids) if ids.rank() == 2 && ids.count() == tokens => Positions::ByToken(ids),
            Some(ids) => {
                return Err(error!(InvalidArgument, "position_ids {:?} for {tokens} tokens", ids.shape));
            }
        };
        let interleaved = cx.attrs.find_int("rotary_interleaved").unwrap_or(0) != 0;
        Ok(Some(Rotation { angles: [cos, sin], half, positions, interleaved }))
    }

    /// Writes new keys (1) or values (2) into `to`, which has `capacity` rows, after those of the
    /// past.
    fn place(
        &self,
        cx: &OpCx<'_>,
        (which, to): (usize, &Rows),
        capacity: usize,
        (lengths, rotation): (Lengths<'_>, Option<Rotation<'_>>),
    ) -> Result<Vec<Launch>> {
        let Sizes { batch, key_heads, queries, size, .. } = self.sizes;
        let past = cx.find_input(which + 2);
        // Past and present share a buffer: only the new rows are written, so it must be long
        // enough.
        let keeps = past.is_some_and(|past| past.arg == Arg::Output(which));
        ensure!(
            !keeps || capacity == self.past,
            InvalidArgument,
            help = "bind a longer buffer, or a smaller total_sequence_length",
            "the cache that past and present share has {} rows, the run needs {capacity}",
            self.past
        );
        let rows = self.incoming(cx, which)?;
        // Values are never rotated.
        let placing = Placing {
            rotation: rotation.filter(|_| which == 1),
            past: past.filter(|_| !keeps),
            lengths,
            keeps,
            ..Placing::new([batch, key_heads, queries, size], &rows)
        };
        placing.launches(to, capacity)
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let plan = Plan::new(cx)?;
    let keys = plan.past.saturating_add(plan.sizes.queries);
    let (_, mut taken) = plan.buffers(cx, keys)?;
    let types = [cx.input(0)?.dtype, plan.cache_type];
    Sizes { keys, ..plan.sizes }.parts(cx, types, false, &mut taken)?;
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let plan = Plan::new(cx)?;
    let Sizes { batch, heads, key_heads, queries, size, .. } = plan.sizes;
    let total = plan.total(cx)?;
    let capacity = plan.past.max(total);
    let counts = cx.input(5)?;
    ensure!(
        counts.count() == batch,
        InvalidArgument,
        "seqlens_k has {} values, expected {batch}",
        counts.count()
    );
    // A prompt starts at row 0, however many of its tokens are padding.
    let lengths = Lengths { of: Some(counts), more: 1, at_end: queries != total, before: 0 };
    let rotation = plan.rotation(cx)?;
    let ([turned, k, v], taken) = plan.buffers(cx, capacity)?;
    let mut launches = Vec::new();
    let mut q = plan.incoming(cx, 0)?;
    if let Some(turned) = turned {
        let to = Rows::by_head(&turned, [heads, queries, size]);
        let placing =
            Placing { rotation, lengths, at_front: true, ..Placing::new([batch, heads, queries, size], &q) };
        launches.extend(placing.launches(&to, queries)?);
        q = to;
    }
    let mut cache = |which: usize, joined: &Option<Operand>| -> Result<Rows> {
        let to = cx.find_output(which).or(joined.as_ref());
        let to = to.ok_or_else(|| error!(Fail, "there is no room for the cache"))?;
        let to = Rows::by_head(to, [key_heads, capacity, size]);
        launches.extend(plan.place(cx, (which, &to), capacity, (lengths, rotation))?);
        Ok(to)
    };
    let (k, v) = (cache(1, &k)?, cache(2, &v)?);
    launches
        .extend(attend(cx, Sizes { keys: total, ..plan.sizes }, [q, k, v], lengths)?.launches(cx, taken)?);
    Ok(launches)
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
    // The window includes the query's own position.
    let window = cx.attrs.int("local_window_size")?.saturating_sub(1);
    Ok(Attend {
        sizes,
        q,
        k,
        v,
        y: Rows::by_token(cx.output(0)?, [sizes.heads, sizes.queries, sizes.value_size], (0, 1)),
        q_bias: None,
        scale: scale_of(cx, sizes.size),
        softcap: cx.attrs.find_float("softcap").unwrap_or(0.0),
        causal: if is_causal { Causal::Yes } else { Causal::No },
        windows: [if is_causal { window.max(-1) } else { -1 }, -1],
        lengths,
        mask: cx.find_input(10).map(|bias| bias_of(bias, &sizes)).transpose()?,
        padding: None,
        sinks,
        hidden_is_nan: false,
        scores: None,
    })
}
