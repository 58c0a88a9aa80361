//! Grouped-query attention (`GroupQueryAttention`).
//!
//! The kernel applies the per-head norm and rotary embedding to new queries and keys and appends
//! keys and values to the cache. The cache grows from run to run, past and present share one
//! preallocated buffer, or the cache is a window of the latest positions. Its elements are floats,
//! or quantized to 8 or 4 bits.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::nn::attention::problem::{self, Causal, GroupQueryProblem, ScoreStage, SdpaSizes};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::element_count;
use ort_core::{Result, ensure, error};

use smallvec::SmallVec;

use super::attend::{Additions, Bias, HeadSlice, Problem};
use super::group_cache::{Cache, Change, Lengths, Store};
use super::rotary::{Angles, Positions, positions};
use ort_cpu_attention::{self as attention, HiddenKeys};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{via_f32, via_f32_except};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take, whole_lines};
use ort_cpu_threads::interrupt;
use ort_cpu_threads::parallel::for_each_chunk_mut;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);
const HALVES: TypeSet = TypeSet::of(&[DType::F16, DType::BF16]);
const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

/// What all of the kernels have in common.
const GROUP_QUERY: KernelDef = KernelDef {
    domain: MICROSOFT,
    op: "GroupQueryAttention",
    in_place: &[(3, 1), (4, 2)],
    shared_buffers: &[(3, 1), (4, 2)],
    make,
    ..KernelDef::BASE
};

cpu_kernels![
    KernelDef {
        types: &[("T", SINGLE), ("T_CACHE", SINGLE)],
        when: |node| is_unquantized(node) && !(slides(node) && writes_scores(node)),
        takes: "a cache of floats with k_quant_type = v_quant_type = NONE, and qk_output = 0 with sliding_window_cache",
        ..GROUP_QUERY
    },
    KernelDef {
        types: &[("T", HALVES), ("T_CACHE", HALVES)],
        when: |node| is_unquantized(node) && !writes_scores(node),
        // Only the cache stays in half precision; all other tensors are widened.
        make: |cx| via_f32_except(cx, &[3, 4], &[1, 2], make),
        ..GROUP_QUERY
    },
    KernelDef {
        types: &[("T", HALVES), ("T_CACHE", HALVES)],
        in_place: &[],
        shared_buffers: &[],
        when: |node| is_unquantized(node) && writes_scores(node) && !slides(node),
        takes: "a cache of floats with k_quant_type = v_quant_type = NONE, and qk_output = 0 with sliding_window_cache",
        make: |cx| via_f32(cx, make),
        ..GROUP_QUERY
    },
    KernelDef {
        types: &[("T", SINGLE.union(HALVES)), ("T_CACHE", BYTES)],
        when: |node| is_quantized(node) && !writes_scores(node),
        takes: "an int8 cache with kv_cache_bit_width = 8 or a uint8 cache with 4, k_quant_type and v_quant_type PER_TENSOR or PER_CHANNEL, and qk_output = 0",
        make: |cx| via_f32_except(cx, &[3, 4], &[1, 2], make),
        ..GROUP_QUERY
    },
];

/// Whether the cache holds floats.
fn is_unquantized(node: &NodeView<'_>) -> bool {
    problem::GroupQuery::new(node.attrs()).is_ok_and(|node| node.quantization.is_none())
}

/// Whether the cache is quantized to as many bits as its type holds.
fn is_quantized(node: &NodeView<'_>) -> bool {
    let bits = problem::GroupQuery::new(node.attrs()).ok().and_then(|node| Some(node.quantization?.bits));
    let dtype = node.bound_dtype("T_CACHE");
    matches!((bits, dtype), (Some(8), Some(DType::I8)) | (Some(4), Some(DType::U8)))
}

fn slides(node: &NodeView<'_>) -> bool {
    node.attrs().find_int("sliding_window_cache").unwrap_or(0) != 0
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
    /// The bytes of an element of the cache.
    cache_width: usize,
    precision: Precision,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let cache_width = match cx.node.bound_dtype("T_CACHE") {
        Some(DType::I8 | DType::U8) => 1,
        // With scores, half precision is widened before the kernel sees it.
        Some(DType::F16 | DType::BF16) if !writes_scores(&cx.node) => 2,
        _ => 4,
    };
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
        cache_width,
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

    /// Returns the `f32` elements that a cache of `rows` rows per head takes.
    fn cache_len(&self, rows: usize, width: usize) -> Result<usize> {
        let SdpaSizes { batch, key_heads, .. } = self.problem.sizes;
        let bytes = element_count(&[batch, key_heads, rows, self.problem.cache_row, width])?;
        Ok(whole_lines(bytes.div_ceil(size_of::<f32>())))
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

impl GroupQuery {
    fn layout<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<Layout> {
        let changes = self.node.rotates || shape(14).is_some();
        Ok(Layout { problem: self.node.problem(shape)?, changes })
    }

    /// Returns the `f32` elements of the cache of keys (1) or values (2) that is not an output: all
    /// past and new rows of a window, or a cache without a reader.
    fn spare_len(&self, layout: &Layout, is_wanted: bool) -> Result<usize> {
        let is_staged = self.node.slides && layout.problem.sizes.queries > 1;
        if is_wanted && !is_staged {
            return Ok(0);
        }
        layout.cache_len(layout.problem.bound(), self.cache_width)
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
        let mut caches = 0;
        for index in [1, 2] {
            let is_wanted = shapes.outputs.get(index).is_some_and(Option::is_some);
            caches += self.spare_len(&layout, is_wanted)?;
        }
        let sinks = layout.problem.sizes.heads.next_multiple_of(16);
        let is_wanted = self.stage.is_some() && shapes.outputs.get(3).is_some_and(Option::is_some);
        let (sizes, cpu) = (layout.sizes(layout.problem.bound()), self.cpu(shapes.threads));
        let attention = attention::scratch_len::<f32>(&sizes, cpu, is_wanted, self.cache_width < 4);
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
        let lengths = Lengths::new(cx, &self.node, &layout.problem)?;
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
                for_queries.place(q, [index / heads, index % heads], to);
            });
            q = HeadSlice::by_head(to, [heads, queries, size]);
        }
        let mut caches: SmallVec<[_; 2]> = SmallVec::new();
        for (which, change) in [(1, &for_keys), (2, &for_values)] {
            let spare = take(&mut rest, self.spare_len(&layout, cx.wants(which))?)?;
            caches.push(self.append(cx, &layout, &lengths, change, (which, spare))?);
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
        // A window's columns of the bias are those of all positions.
        let bias = match cx.find_input(10) {
            Some(view) => Some(Bias::new(view.as_slice()?, view.shape(), &layout.sizes(lengths.total))?),
            None => None,
        };
        let bias = bias.map(|bias| bias.starting_at(lengths.bases.clone()));
        let sizes = layout.sizes(if self.node.slides { lengths.keys } else { lengths.total });
        let mut scores = if cx.wants(3) { Some(cx.output(3)?.as_mut_slice::<f32>()?) } else { None };
        // The node declares scores but asks for no stage, so they are zeros.
        if self.stage.is_none() {
            scores.take().into_iter().for_each(|scores| interrupt::fill(scores, 0.0));
        }
        let problem = Problem {
            sizes,
            q,
            k: caches[0].rows,
            v: caches[1].rows,
            spans: lengths.spans.clone(),
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
        problem.run(self.cpu(threads), result, scores, rest)?;
        for Appended { store, staged, .. } in caches {
            let Some((staged, rows, present, is_in_place)) = staged else { continue };
            let cache = Cache { problem: &layout.problem, lengths: &lengths, store, threads };
            cache.settle(staged, rows, present, is_in_place);
        }
        Ok(())
    }
}

/// The cache of keys or values with the new rows.
struct Appended<'a> {
    rows: attention::Rows<'a>,
    store: Store<'a>,
    /// For a window that is read before old positions leave it: its rows and how many a head has,
    /// the present tensor, and whether that holds the past.
    staged: Option<(&'a [u8], usize, &'a mut [u8], bool)>,
}

impl GroupQuery {
    /// Appends the new keys (1) or values (2) to the past, in the present output or in `spare`.
    fn append<'a>(
        &self,
        cx: &mut RunCx<'a>,
        layout: &Layout,
        lengths: &Lengths,
        change: &Change<'_>,
        (which, spare): (usize, &'a mut [f32]),
    ) -> Result<Appended<'a>> {
        let (problem, threads) = (&layout.problem, cx.threads());
        let is_in_place = cx.in_place(which) == Some(which + 2);
        ensure!(
            !is_in_place || lengths.capacity == problem.past,
            InvalidArgument,
            help = "bind a longer buffer, or a smaller total_sequence_length",
            "the cache that past and present share has {} rows, the run needs {}",
            problem.past,
            lengths.capacity
        );
        let past = cx.find_input(which + 2);
        let incoming = layout.incoming(cx, which)?;
        let output = if cx.wants(which) { Some(cx.output(which)?) } else { None };
        let dtype = output.as_ref().map(|output| output.dtype()).or(past.map(|past| past.dtype()));
        let dtype = dtype.unwrap_or(DType::F32);
        let store = Store::new(cx, which - 1, dtype, self.node.quantization, &problem.sizes)?;
        let cache = Cache { problem, lengths, store, threads };
        let past = past.map(|past| past.bytes()).transpose()?;
        let present = output.map(|output| output.bytes_mut()).transpose()?;
        let (to, present) = match present {
            Some(present) if !lengths.is_staged => {
                let past = if is_in_place { None } else { Some(past.unwrap_or(&[])) };
                cache.fill(past, incoming, change, present, lengths.capacity);
                return Ok(Appended { rows: cache.rows(present, lengths.capacity), store, staged: None });
            }
            present => (bytemuck::cast_slice_mut::<f32, u8>(spare), present),
        };
        // All past and new rows, of which only the latest stay.
        let rows = if lengths.is_staged { problem.bound() } else { lengths.capacity };
        let SdpaSizes { batch, key_heads, .. } = problem.sizes;
        let len = batch * key_heads * rows * problem.cache_row * self.cache_width;
        let to = to.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
        let past = if is_in_place { present.as_deref() } else { past };
        cache.fill(Some(past.unwrap_or(&[])), incoming, change, to, rows);
        let to = &*to;
        let staged = present.map(|present| (to, rows, present, is_in_place)).filter(|_| lengths.is_staged);
        Ok(Appended { rows: cache.rows(to, rows), store, staged })
    }

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
        for (span, base) in lengths.spans.iter().zip(&lengths.bases) {
            for query in 0..queries {
                all.push(angles.check((base + span.before + query) as i64)?);
            }
        }
        Ok(Some(all))
    }
}
