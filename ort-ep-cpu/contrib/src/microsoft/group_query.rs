//! Grouped-query attention (`GroupQueryAttention`).
//!
//! The kernel applies the per-head norm and rotary embedding to new queries and keys and appends
//! keys and values to the cache. The cache grows from run to run, or past and present share one
//! preallocated buffer. It does not support quantized or sliding-window caches.

use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::nn::attention::problem::{self, Causal, GroupQueryProblem, ScoreStage, SdpaSizes};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use smallvec::SmallVec;

use super::attend::{Additions, Bias, HeadSlice, Problem, Span, Spans};
use super::rotary::{Angles, Positions, positions};
use ort_cpu_attention::{self as attention, Elements, HiddenKeys};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{via_f32, via_f32_except};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::interrupt::{self, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_threads::thread_scratch::with_thread_scratch;
use ort_cpu_vector::convert::{bf16_from_f32, f16_from_f32};
use ort_cpu_vector::norm::RowNorm;
use ort_cpu_vector::simd::Isa;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);
const HALVES: TypeSet = TypeSet::of(&[DType::F16, DType::BF16]);

cpu_kernels![
    KernelDef {
        domain: MICROSOFT,
        op: "GroupQueryAttention",
        types: &[("T", SINGLE), ("T_CACHE", SINGLE)],
        in_place: &[(3, 1), (4, 2)],
        shared_buffers: &[(3, 1), (4, 2)],
        when: is_full_cache,
        make,
        ..KernelDef::BASE
    },
    KernelDef {
        domain: MICROSOFT,
        op: "GroupQueryAttention",
        types: &[("T", HALVES), ("T_CACHE", HALVES)],
        in_place: &[(3, 1), (4, 2)],
        shared_buffers: &[(3, 1), (4, 2)],
        when: |node| is_full_cache(node) && !writes_scores(node),
        // Only the cache stays in half precision; all other tensors are widened.
        make: |cx| via_f32_except(cx, &[3, 4], &[1, 2], make),
        ..KernelDef::BASE
    },
    KernelDef {
        domain: MICROSOFT,
        op: "GroupQueryAttention",
        types: &[("T", HALVES), ("T_CACHE", HALVES)],
        when: |node| is_full_cache(node) && writes_scores(node),
        make: |cx| via_f32(cx, make),
        ..KernelDef::BASE
    },
];

/// Whether the cache is unquantized and holds all positions.
fn is_full_cache(node: &NodeView<'_>) -> bool {
    problem::GroupQuery::has_full_cache(node.attrs())
}

/// Whether a node outputs scores.
fn writes_scores(node: &NodeView<'_>) -> bool {
    let is_wanted = node.node.outputs.get(3).is_some_and(Option::is_some);
    is_wanted && node.attrs().find_int("qk_output").unwrap_or(0) != 0
}

struct GroupQuery {
    node: problem::GroupQuery,
    window: Option<usize>,
    /// The stage of the scores that the node outputs.
    stage: Option<ScoreStage>,
    epsilon: f32,
    /// Whether the cache may be in half precision.
    is_narrow: bool,
    precision: Precision,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let is_narrow = cx.node.output_dtype(1).or(cx.node.dtype(0)) != Some(DType::F32);
    let attrs = cx.attrs();
    let node = problem::GroupQuery::new(attrs)?;
    let window = node.window;
    ensure!(
        window == -1 || (node.causal != Causal::No && window > 0),
        InvalidGraph,
        "local_window_size is {window}, expected -1, or at least 1 where attention is causal"
    );
    let stage = match attrs.int("qk_output")? {
        0 => None,
        1 => Some(ScoreStage::Masked),
        2 => Some(ScoreStage::Weights),
        other => return Err(error!(InvalidGraph, "qk_output is {other}, expected 0, 1 or 2")),
    };
    Ok(Box::new(GroupQuery {
        node,
        window: usize::try_from(window).ok(),
        stage,
        epsilon: attrs.float("qk_norm_epsilon")?,
        is_narrow,
        precision: cx.precision,
    }))
}

/// The layout of one run, derived from its shapes.
#[derive(Clone, Copy)]
struct Layout {
    problem: GroupQueryProblem,
    /// Whether queries are normalized or rotated before use.
    changes: bool,
}

impl Layout {
    fn queries_len(&self) -> Result<usize> {
        let SdpaSizes { batch, heads, queries, size, .. } = self.problem.sizes;
        if !self.changes {
            return Ok(0);
        }
        Ok(element_count(&[batch, heads, queries, size])?.next_multiple_of(16))
    }

    fn cache_len(&self, rows: usize) -> Result<usize> {
        let SdpaSizes { batch, key_heads, size, .. } = self.problem.sizes;
        Ok(element_count(&[batch, key_heads, rows, size])?.next_multiple_of(16))
    }

    /// The sizes of an attention over this many past and new keys.
    fn sizes(&self, keys: usize) -> SdpaSizes {
        SdpaSizes { keys, ..self.problem.sizes }
    }

    /// Returns the new queries (0), keys (1) or values (2) as the inputs hold them.
    fn incoming<'a>(&self, cx: &RunCx<'a>, which: usize) -> Result<HeadSlice<'a>> {
        let (input, rows) = self.problem.incoming(which);
        Ok(HeadSlice::new(cx.input(input)?.as_slice()?, rows, self.problem.sizes.size))
    }
}

/// One number per batch.
type Few = SmallVec<[i64; 8]>;

/// The sequence lengths of all batches.
struct Lengths {
    spans: Spans,
    /// The longest sequence, past and new tokens.
    total: usize,
    /// Rows of the present tensors.
    capacity: usize,
}

impl GroupQuery {
    fn layout<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<Layout> {
        let changes = self.node.rotates || shape(14).is_some();
        Ok(Layout { problem: self.node.problem(shape)?, changes })
    }

    /// Checks `seqlens_k` and `total_sequence_length` against the buffers.
    fn lengths(&self, cx: &RunCx<'_>, problem: &GroupQueryProblem) -> Result<Lengths> {
        let (SdpaSizes { batch, queries, .. }, past) = (problem.sizes, problem.past);
        let totals: Few = cx.input(6)?.collect_ints()?;
        let total = problem.total(totals.first().copied().unwrap_or(-1))?;
        let lengths: Few = cx.input(5)?.collect_ints()?;
        ensure!(
            lengths.len() == batch,
            InvalidArgument,
            "seqlens_k has {} values, expected {batch}",
            lengths.len()
        );
        // The batches of a prompt may be padded, so they may have fewer keys than queries.
        let is_prompt = queries == total;
        let mut spans = Spans::with_capacity(batch);
        for length in lengths {
            let keys = length.checked_add(1).and_then(|keys| usize::try_from(keys).ok());
            let keys = keys.filter(|keys| (1..=total).contains(keys) && (is_prompt || *keys >= queries));
            let keys = keys.ok_or_else(|| {
                let least = if is_prompt { 0 } else { queries.saturating_sub(1) };
                error!(
                    InvalidArgument,
                    "seqlens_k holds {length}, expected {least} to {}",
                    total.saturating_sub(1)
                )
            })?;
            spans.push(Span { keys, before: if is_prompt { 0 } else { keys - queries } });
        }
        Ok(Lengths { spans, total, capacity: past.max(total) })
    }
}

/// What happens to new queries and keys: an RMS norm per head, then the rotary embedding.
struct Change<'a> {
    norm: Option<&'a [f32]>,
    epsilon: f32,
    rotation: Option<(Angles<'a>, &'a [usize])>,
    queries: usize,
}

impl Change<'_> {
    fn apply(&self, batch: usize, row: usize, from: &[f32], to: &mut [f32]) {
        match self.norm {
            Some(scale) => {
                let norm = RowNorm { centers: false, epsilon: self.epsilon, scale: Some(scale), bias: None };
                norm.apply(Isa::current(), from, to);
            }
            None => to.copy_from_slice(from),
        }
        if let Some((angles, positions)) = &self.rotation
            && let Some(position) = positions.get(batch * self.queries + row)
        {
            angles.rotate(*position, to);
        }
    }
}

impl GroupQuery {
    fn cpu(&self, threads: usize) -> Cpu {
        Cpu::with_threads(threads).in_precision(self.precision)
    }
}

impl Executable for GroupQuery {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let layout = self.layout(|index| shapes.inputs.get(index)?.as_deref())?;
        // Caches that are not outputs need scratch.
        let missing =
            [1, 2].iter().filter(|index| shapes.outputs.get(**index).is_none_or(Option::is_none)).count();
        let caches = missing * layout.cache_len(layout.problem.bound())?;
        let sinks = layout.problem.sizes.heads.next_multiple_of(16);
        let is_wanted = self.stage.is_some() && shapes.outputs.get(3).is_some_and(Option::is_some);
        let (sizes, cpu) = (layout.sizes(layout.problem.bound()), self.cpu(shapes.threads));
        let attention = attention::scratch_len::<f32>(&sizes, cpu, is_wanted, self.is_narrow);
        bytes_of::<f32>(layout.queries_len()? + caches + sinks + attention)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let threads = cx.threads();
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        // If past and present share memory, the past is no longer readable as an input.
        let layout = self.layout(|index| match index {
            3 | 4 if cx.in_place(index - 2) == Some(index) => cx.output_shape(index - 2),
            _ => cx.find_input(index).map(|view| view.shape()),
        })?;
        let SdpaSizes { batch, heads, queries, size, .. } = layout.problem.sizes;
        let lengths = self.lengths(cx, &layout.problem)?;
        let positions = self.positions(cx, &layout.problem.sizes, &lengths)?;
        let rotation = match &positions {
            Some(positions) => {
                Some((Angles::new(cx.input(7)?, cx.input(8)?, self.node.is_interleaved)?, &positions[..]))
            }
            None => None,
        };
        let change = |norm: Option<usize>| -> Result<Change<'_>> {
            let norm = match norm.and_then(|index| cx.find_input(index)) {
                Some(view) if view.shape() == [size] => Some(view.as_slice::<f32>()?),
                Some(view) => {
                    return Err(error!(InvalidArgument, "a norm's weight has shape {:?}", view.shape()));
                }
                None => None,
            };
            Ok(Change { norm, epsilon: self.epsilon, rotation, queries })
        };
        let (for_queries, for_keys) = (change(Some(14))?, change(Some(15))?);
        let for_values = Change { norm: None, epsilon: 0.0, rotation: None, queries };
        let mut q = layout.incoming(cx, 0)?;
        if layout.changes {
            let len = batch * heads * queries * size;
            let to = &mut take(&mut rest, layout.queries_len()?)?[..len];
            for_each_chunk_mut(threads, to, queries * size, |index, to| {
                place(&for_queries, q, [index / heads, index % heads], to);
            });
            q = HeadSlice::by_head(to, [heads, queries, size]);
        }
        let mut caches: SmallVec<[_; 2]> = SmallVec::new();
        for (which, change) in [(1, &for_keys), (2, &for_values)] {
            let spare = if cx.wants(which) { 0 } else { layout.cache_len(layout.problem.bound())? };
            let spare = take(&mut rest, spare)?;
            caches.push(cache_of(cx, &layout, &lengths, (which, change), spare)?);
        }
        // Smooth softmax is a sink of 0: it adds exp(0) = 1 to the sum.
        let smooth = take(&mut rest, heads.next_multiple_of(16))?;
        smooth.fill(0.0);
        let sinks = match cx.find_input(11) {
            Some(view) if view.shape() == [heads] => Some(view.as_slice::<f32>()?),
            Some(view) => return Err(error!(InvalidArgument, "head_sink has shape {:?}", view.shape())),
            None if self.node.is_smooth => Some(&smooth[..]),
            None => None,
        };
        let sizes = layout.sizes(lengths.total);
        let bias =
            cx.find_input(10).map(|view| Bias::new(view.as_slice()?, view.shape(), &sizes)).transpose()?;
        let mut scores = if cx.wants(3) { Some(cx.output(3)?.as_mut_slice::<f32>()?) } else { None };
        // The node declares scores but asks for no stage, so they are zeros.
        if self.stage.is_none() {
            scores.take().into_iter().for_each(|scores| interrupt::fill(scores, 0.0));
        }
        let problem = Problem {
            sizes,
            q,
            k: caches[0],
            v: caches[1],
            spans: lengths.spans,
            scale: layout.problem.sizes.scale(self.node.scale),
            softcap: self.node.softcap,
            causal: self.node.causal != Causal::No,
            window: self.window,
            last_sees_all: false,
            hidden: HiddenKeys::Excluded,
            additions: Additions { padding: None, bias },
            sinks,
            stage: self.stage.unwrap_or(ScoreStage::Weights),
        };
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        problem.run(self.cpu(threads), result, scores, rest)
    }
}

impl GroupQuery {
    /// Returns the position of each new token, if the node applies the rotary embedding.
    fn positions(&self, cx: &RunCx<'_>, sizes: &SdpaSizes, lengths: &Lengths) -> Result<Option<Positions>> {
        if !self.node.rotates {
            return Ok(None);
        }
        let angles = Angles::new(cx.input(7)?, cx.input(8)?, self.node.is_interleaved)?;
        let SdpaSizes { batch, queries, size, .. } = *sizes;
        let width = angles.width();
        ensure!(width <= size, InvalidArgument, "the caches rotate {width} elements of heads of {size}");
        if let Some(ids) = cx.find_input(9) {
            return positions(&angles, ids, [batch, queries]).map(Some);
        }
        // Without ids, new tokens continue each batch's past.
        let mut all = Positions::with_capacity(batch * queries);
        for span in &lengths.spans {
            for query in 0..queries {
                all.push(angles.check((span.before + query) as i64)?);
            }
        }
        Ok(Some(all))
    }
}

/// Writes the new rows of a head, normalized and rotated.
fn place(change: &Change<'_>, from: HeadSlice<'_>, [batch, head]: [usize; 2], to: &mut [f32]) {
    for (row, to) in spending(4 + from.size, to.chunks_exact_mut(from.size.max(1))).enumerate() {
        if let Ok(from) = from.row([batch, head, row]) {
            change.apply(batch, row, from, to);
        }
    }
}

/// Returns the cache of keys (1) or values (2), past and new, in the present output or in `spare`.
/// Rows beyond the valid ones are zeroed, except in place, where they keep their contents and no
/// one may read them.
fn cache_of<'a>(
    cx: &mut RunCx<'a>,
    layout: &Layout,
    lengths: &Lengths,
    (which, change): (usize, &Change<'_>),
    spare: &'a mut [f32],
) -> Result<attention::Rows<'a>> {
    let SdpaSizes { batch, key_heads, size, .. } = layout.problem.sizes;
    let len = batch * key_heads * lengths.capacity * size;
    let is_in_place = cx.in_place(which) == Some(which + 2);
    ensure!(
        !is_in_place || lengths.capacity == layout.problem.past,
        InvalidArgument,
        help = "bind a longer buffer, or a smaller total_sequence_length",
        "the cache that past and present share has {} rows, the run needs {}",
        layout.problem.past,
        lengths.capacity
    );
    let past = cx.find_input(which + 2);
    let cache = Cache { problem: &layout.problem, lengths, is_in_place, threads: cx.threads() };
    let incoming = layout.incoming(cx, which)?;
    let elements = match (past.map(|past| past.dtype()), cx.wants(which)) {
        (_, true) => {
            let output = cx.output(which)?;
            match output.dtype() {
                DType::F16 => Elements::F16(cache.fill(past, incoming, change, output.as_mut_slice()?)?),
                DType::BF16 => Elements::BF16(cache.fill(past, incoming, change, output.as_mut_slice()?)?),
                _ => Elements::Full(cache.fill(past, incoming, change, output.as_mut_slice()?)?),
            }
        }
        (dtype, false) => {
            // `spare` is sized for `f32`, twice what half precision needs.
            let spare = spare.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
            match dtype {
                Some(DType::F16) => {
                    let spare = &mut bytemuck::cast_slice_mut(spare)[..len];
                    Elements::F16(cache.fill(past, incoming, change, spare)?)
                }
                Some(DType::BF16) => {
                    let spare = &mut bytemuck::cast_slice_mut(spare)[..len];
                    Elements::BF16(cache.fill(past, incoming, change, spare)?)
                }
                _ => Elements::Full(cache.fill(past, incoming, change, spare)?),
            }
        }
    };
    let capacity = lengths.capacity;
    Ok(attention::Rows { elements, strides: [key_heads * capacity * size, capacity * size, size] })
}

/// A cache to fill.
struct Cache<'a> {
    problem: &'a GroupQueryProblem,
    lengths: &'a Lengths,
    is_in_place: bool,
    threads: usize,
}

impl Cache<'_> {
    /// Copies the past to `to`, unless the two share memory, and appends the new rows.
    fn fill<'t, T: CacheElement>(
        &self,
        past: Option<TensorView<'_>>,
        incoming: HeadSlice<'_>,
        change: &Change<'_>,
        to: &'t mut [T],
    ) -> Result<&'t [T]> {
        let SdpaSizes { key_heads, queries, size, .. } = self.problem.sizes;
        let past = match past {
            Some(view) if !self.is_in_place => view.as_slice::<T>()?,
            _ => &[],
        };
        for_each_chunk_mut(self.threads, to, self.lengths.capacity * size, |index, to| {
            let before = self.lengths.spans[index / key_heads].before;
            let (old, rest) = to.split_at_mut(before * size);
            let (new, unused) = rest.split_at_mut(queries * size);
            if !self.is_in_place {
                interrupt::copy(&past[index * self.problem.past * size..][..before * size], old);
                interrupt::fill(unused, T::default());
            }
            T::place(change, incoming, [index / key_heads, index % key_heads], new);
        });
        Ok(to)
    }
}

/// An element type of a cache.
trait CacheElement: Element + Default {
    /// Writes the new rows of a head.
    fn place(change: &Change<'_>, from: HeadSlice<'_>, place: [usize; 2], to: &mut [Self]);
}

impl CacheElement for f32 {
    fn place(change: &Change<'_>, from: HeadSlice<'_>, at: [usize; 2], to: &mut [f32]) {
        place(change, from, at, to);
    }
}

macro_rules! narrow_cache {
    ($($element:ty, $convert:path;)*) => {$(
        impl CacheElement for $element {
            fn place(change: &Change<'_>, from: HeadSlice<'_>, at: [usize; 2], to: &mut [$element]) {
                with_thread_scratch(|wide: &mut Vec<f32>| {
                    wide.clear();
                    wide.resize(to.len(), 0.0);
                    place(change, from, at, wide);
                    $convert(Isa::current(), wide, to);
                });
            }
        }
    )*};
}

narrow_cache! {
    half::f16, f16_from_f32;
    half::bf16, bf16_from_f32;
}
