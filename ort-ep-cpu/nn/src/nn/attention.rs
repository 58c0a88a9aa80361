//! `Attention`: its sizes, its KV cache, and the unfused kernel.
//!
//! The unfused kernel is for nodes that output scores or compute in double precision.
//! `attention_fused` handles all other nodes.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::HIDDEN_IS_NAN;
use ort_core::tensor::TensorView;
use ort_core::{Error, Result, ensure, error};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::attention_mask::Mask;
use ort_cpu_gemm::{Cpu, RhsSource};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::heap::{elements, tables};
use ort_cpu_kernel::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::interrupt::{self, spend, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::elementwise::Unary;

const HALVES: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);
const DOUBLE: TypeSet = TypeSet::of(&[DType::F64]);

/// The fused kernel, for nodes that do not output scores.
const FUSED: KernelDef = KernelDef {
    op: "Attention",
    types: &[("T1", HALVES), ("T2", HALVES)],
    rank: 1,
    when: |node| is_single(node) && !wants_scores(node),
    make: super::attention_fused::make,
    ..KernelDef::BASE
};

cpu_kernels![
    KernelDef {
        types: &[("T1", SINGLE), ("T2", HALVES)],
        rank: 2,
        in_place: &[(0, 0)],
        when: |node| (FUSED.when)(node) && node.dtype(0) == Some(DType::F32),
        ..FUSED
    },
    FUSED,
    KernelDef {
        op: "Attention",
        types: &[("T1", HALVES), ("T2", HALVES)],
        when: is_single,
        make: |cx| via_f32(cx, make::<f32>),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "Attention",
        types: &[("T1", DOUBLE), ("T2", DOUBLE)],
        make: make::<f64>,
        ..KernelDef::BASE
    },
];

/// Queries in a block.
const ROWS: usize = 64;

/// The fewest elements that are worth copying in a task of their own.
const WORTH_A_TASK: usize = 1 << 14;

/// Returns whether a node outputs scores.
fn wants_scores(node: &NodeView<'_>) -> bool {
    node.node.outputs.get(3).is_some_and(Option::is_some)
}

/// Returns whether the softmax is in single precision. The operator's decomposition computes one in
/// double.
fn is_single(node: &NodeView<'_>) -> bool {
    node.attrs().find_int("softmax_precision") != Some(i64::from(DType::F64.onnx_code()))
}

pub(super) struct Attention<T> {
    query_heads: usize,
    key_heads: usize,
    pub(super) scale: Option<f32>,
    pub(super) softcap: f32,
    is_causal: bool,
    /// How many keys before and after its own position a query may see; negative if unbounded.
    windows: [i64; 2],
    score_mode: i64,
    /// Whether a query whose scores are all -inf gets NaN instead of 0.
    pub(super) hidden_is_nan: bool,
    /// Whether the mask must be converted to the compute type.
    widens_mask: bool,
    element: std::marker::PhantomData<fn() -> T>,
}

fn make<T: Real>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Attention::<T>::new(cx)?))
}

impl<T: Real> Attention<T> {
    pub(super) fn new(cx: &CompileCx<'_>) -> Result<Attention<T>> {
        let attrs: &Attributes = cx.attrs();
        let heads = |name: &str| -> Result<usize> {
            let count = attrs.find_int(name).unwrap_or(0);
            usize::try_from(count).map_err(|_| error!(InvalidGraph, "{name} is {count}, expected 0 or more"))
        };
        let windows = [attrs.int("left_window_size")?, attrs.int("right_window_size")?];
        // -1 stands for unbounded.
        ensure!(
            windows.iter().all(|size| *size >= -1),
            InvalidGraph,
            "window sizes are {windows:?}, expected -1 or more"
        );
        let score_mode = attrs.int("qk_matmul_output_mode")?;
        ensure!(
            (0..=3).contains(&score_mode),
            InvalidGraph,
            "qk_matmul_output_mode is {score_mode}, expected 0 to 3"
        );
        Ok(Attention {
            query_heads: heads("q_num_heads")?,
            key_heads: heads("kv_num_heads")?,
            scale: attrs.find_float("scale"),
            softcap: attrs.float("softcap")?,
            is_causal: attrs.flag("is_causal")?,
            windows,
            score_mode,
            hidden_is_nan: attrs.find_int(HIDDEN_IS_NAN) == Some(1),
            widens_mask: cx.node.dtype(3).is_some_and(|dtype| dtype != DType::Bool && dtype != T::DTYPE),
            element: std::marker::PhantomData::<fn() -> T>,
        })
    }
}

/// The layout of queries, keys or values: heads interleaved in each row (rank 3), or one head after
/// another (rank 4).
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) rows: usize,
    pub(super) size: usize,
    pub(super) interleaved: bool,
}

impl Layout {
    fn new(shape: &[usize], heads: usize) -> Result<Layout> {
        match *shape {
            [batch, heads, rows, size] => Ok(Layout { batch, heads, rows, size, interleaved: false }),
            [batch, rows, width] if heads > 0 && width.is_multiple_of(heads) => {
                Ok(Layout { batch, heads, rows, size: width / heads, interleaved: true })
            }
            _ => Err(error!(InvalidArgument, "shape {shape:?} does not split into {heads} heads")),
        }
    }

    fn row_stride(&self) -> usize {
        if self.interleaved { self.heads * self.size } else { self.size }
    }

    /// Returns the strides of batch, head and row.
    pub(super) fn strides(&self) -> [usize; 3] {
        let head = if self.interleaved { self.size } else { self.rows * self.size };
        [self.heads * self.rows * self.size, head, self.row_stride()]
    }

    pub(super) fn len(&self) -> usize {
        self.batch * self.heads * self.rows * self.size
    }

    /// Returns the index of the first element of a head's row.
    fn at(&self, batch: usize, head: usize, row: usize) -> usize {
        match self.interleaved {
            true => ((batch * self.rows + row) * self.heads + head) * self.size,
            false => ((batch * self.heads + head) * self.rows + row) * self.size,
        }
    }
}

/// The sizes of a run.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) q: Layout,
    pub(super) k: Layout,
    pub(super) v: Layout,
    pub(super) past: usize,
    /// Queries in a block.
    rows: usize,
    has_scores: bool,
}

impl Sizes {
    pub(super) fn total(&self) -> usize {
        self.past + self.k.rows
    }

    fn task_count(&self) -> usize {
        let heads = if self.q.interleaved { 1 } else { self.q.heads };
        self.q.batch * heads * self.q.rows.div_ceil(self.rows)
    }
}

/// Keys or values as one array: the input itself, or past and new rows joined.
#[derive(Clone, Copy)]
struct Cache<'a, T> {
    values: &'a [T],
    layout: Layout,
}

/// A block of queries of one head, or of all heads if they are interleaved.
struct Task<'a, T> {
    batch: usize,
    heads: std::ops::Range<usize>,
    first: usize,
    result: &'a mut [T],
    scores: Option<&'a mut [T]>,
}

/// The operands that all tasks read.
struct Shared<'a, T: Real> {
    q: &'a [T],
    k: Cache<'a, T>,
    v: Cache<'a, T>,
    mask: Option<Mask<'a, T>>,
    reach: Reach,
    sizes: Sizes,
    scale: f64,
    cpu: Cpu,
}

/// What determines by position which keys a query may see.
pub(super) struct Reach {
    /// How many keys of each batch are not padding.
    pub(super) lengths: Option<SmallVec<[i64; 8]>>,
    past: usize,
    queries: usize,
}

impl Reach {
    pub(super) fn new(cx: &RunCx<'_>, sizes: &Sizes) -> Result<Reach> {
        let lengths: Option<SmallVec<[i64; 8]>> =
            cx.find_input(6).map(|view| view.collect_ints()).transpose()?;
        let enough = lengths.as_ref().is_none_or(|lengths| lengths.len() == sizes.q.batch);
        ensure!(enough, InvalidArgument, "nonpad_kv_seqlen does not have a value for each batch");
        Ok(Reach { lengths, past: sizes.past, queries: sizes.q.rows })
    }

    /// Returns how many keys precede the first query.
    fn offset(&self, batch: usize) -> i64 {
        match &self.lengths {
            // Without a past, the queries are the last of the keys.
            Some(lengths) if self.past == 0 => lengths[batch].saturating_sub(self.queries as i64),
            _ => self.past as i64,
        }
    }
}

impl<T: Real> Attention<T> {
    pub(super) fn sizes(&self, [q, k, v]: [&[usize]; 3], past: &[usize], has_scores: bool) -> Result<Sizes> {
        let q = Layout::new(q, self.query_heads)?;
        let (k, v) = (Layout::new(k, self.key_heads)?, Layout::new(v, self.key_heads)?);
        let past = match past {
            [] => 0,
            [batch, heads, rows, size] if [*batch, *heads, *size] == [k.batch, k.heads, k.size] => *rows,
            _ => {
                let [batch, heads, size] = [k.batch, k.heads, k.size];
                return Err(error!(
                    InvalidArgument,
                    "past_key has shape {past:?}, expected [{batch}, {heads}, rows of the past, {size}]"
                ));
            }
        };
        let fits = q.batch == k.batch
            && k.batch == v.batch
            && q.size == k.size
            && k.rows == v.rows
            && k.heads == v.heads
            && k.heads > 0
            && q.heads.is_multiple_of(k.heads);
        ensure!(fits, InvalidArgument, "queries, keys and values do not match");
        // All scores of a head are output at once, so one block holds all its queries.
        let rows = if has_scores { q.rows } else { q.rows.min(ROWS) };
        Ok(Sizes { q, k, v, past, rows: rows.max(1), has_scores })
    }

    /// Returns the threads inside a task: all of them if there is a single task, else one.
    fn inner_cpu(threads: usize, sizes: Sizes) -> Cpu {
        Cpu::with_threads(if sizes.task_count() == 1 { threads } else { 1 })
    }

    /// Returns the scratch of one part, in values: scores and GEMM workspace.
    fn part_len(cpu: Cpu, sizes: Sizes) -> usize {
        let (rows, total) = (sizes.rows, sizes.total());
        let first = T::workspace_len(cpu, [rows, total, sizes.q.size], RhsSource::Strided);
        let second = T::workspace_len(cpu, [rows, sizes.v.size, total], RhsSource::Rows);
        // With fewer keys, the GEMM may choose other blocks, which never take more than two panels
        // more.
        let slack = 2 * 64 * 512 * cpu.threads;
        (rows * total).next_multiple_of(16) + first.max(second).next_multiple_of(16) + slack
    }
}

/// Joins past and new rows of each head.
pub(super) fn join<T: Copy + Send + Sync>(
    threads: usize,
    (past, past_rows): (&[T], usize),
    new: &[T],
    layout: Layout,
    to: &mut [T],
) {
    let Layout { heads, rows, size, .. } = layout;
    let head_len = (past_rows + rows) * size;
    if head_len == 0 {
        return;
    }
    for_each_row_chunk_mut(threads, to, head_len, (WORTH_A_TASK / head_len).max(1), |first, to| {
        for (index, to) in to.chunks_mut(head_len).enumerate() {
            let index = first + index;
            let (old, fresh) = to.split_at_mut(past_rows * size);
            interrupt::copy(&past[index * past_rows * size..][..past_rows * size], old);
            for (row, fresh) in spending(4 + size / 4, fresh.chunks_exact_mut(size)).enumerate() {
                let from = layout.at(index / heads, index % heads, row);
                fresh.copy_from_slice(&new[from..from + size]);
            }
        }
    });
}

impl<T: Real> Executable for Attention<T> {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let inputs = [shapes.input(0), shapes.input(1), shapes.input(2)];
        let has_scores = shapes.outputs.get(3).is_some_and(Option::is_some);
        let sizes = self.sizes(inputs, shapes.input(4), has_scores)?;
        let joined = |layout: Layout, output: usize| {
            let wanted = shapes.outputs.get(output).is_some_and(Option::is_some);
            let len = layout.batch * layout.heads * sizes.total() * layout.size;
            // The joined rows go to the output if there is one.
            if sizes.past == 0 || wanted { 0 } else { len.next_multiple_of(16) }
        };
        let cpu = Self::inner_cpu(shapes.threads, sizes);
        let parts = part_count(shapes.threads, sizes.task_count()) * Self::part_len(cpu, sizes);
        bytes_of::<T>(joined(sizes.k, 1) + joined(sizes.v, 2) + parts)
    }

    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // A mask is first read in its own type, then converted to the compute type.
        let mask = if self.widens_mask { elements(shapes.input(3)) } else { 0 };
        Ok(tables(mask.saturating_mul(size_of::<f64>() + size_of::<T>())))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let threads = cx.threads();
        let mut rest = scratch::<T>(cx.workspace()?)?;
        let (q, k, v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
        let past = cx.find_input(4);
        let past_shape = past.map_or(&[][..], |past| past.shape());
        let sizes = self.sizes([q.shape(), k.shape(), v.shape()], past_shape, cx.wants(3))?;
        let mut cache = |new: TensorView<'_>, layout: Layout, past: usize, output: usize| -> Result<_> {
            let new = new.as_slice::<T>()?;
            let full = Layout { rows: sizes.total(), interleaved: false, ..layout };
            if sizes.past == 0 && !cx.wants(output) {
                return Ok((None, layout, new.len()));
            }
            let old = match cx.find_input(past) {
                Some(view) => view.as_slice::<T>()?,
                None => &[],
            };
            let len = full.batch * full.heads * full.rows * full.size;
            ensure!(
                old.len() + new.len() == len,
                InvalidArgument,
                "past_key or past_value does not fit the new rows"
            );
            let to = match cx.wants(output) {
                true => cx.output(output)?.as_mut_slice::<T>()?,
                false => &mut take(&mut rest, len.next_multiple_of(16))?[..len],
            };
            join(threads, (old, sizes.past), new, layout, to);
            Ok((Some(&*to), full, len))
        };
        let (joined_k, k_layout, _) = cache(k, sizes.k, 4, 1)?;
        let (joined_v, v_layout, _) = cache(v, sizes.v, 5, 2)?;
        let keys = match joined_k {
            Some(values) => values,
            None => k.as_slice::<T>()?,
        };
        let values = match joined_v {
            Some(values) => values,
            None => v.as_slice::<T>()?,
        };
        let full = [sizes.q.batch, sizes.q.heads, sizes.q.rows, sizes.total()];
        let shared = Shared {
            q: q.as_slice()?,
            k: Cache { values: keys, layout: k_layout },
            v: Cache { values, layout: v_layout },
            mask: cx.find_input(3).map(|view| Mask::new(view, full)).transpose()?,
            reach: Reach::new(cx, &sizes)?,
            sizes,
            scale: self.scale.map_or_else(|| T::inverse_root(sizes.q.size), f64::from),
            cpu: Self::inner_cpu(threads, sizes),
        };
        let scores = if cx.wants(3) { Some(cx.output(3)?.as_mut_slice::<T>()?) } else { None };
        let result = cx.output(0)?.as_mut_slice::<T>()?;
        let mut tasks = tasks(sizes, result, scores);
        // `for_each_unit` cannot return an error, so tasks leave the first one here.
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let part_len = Self::part_len(shared.cpu, sizes);
        for_each_unit(threads, (&mut tasks, 1), (rest, part_len), |_, tasks, scratch| {
            for task in tasks {
                if let Err(error) = self.run_task(&shared, task, scratch) {
                    failure.lock().get_or_insert(error);
                }
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }
}

/// Splits the outputs into blocks of queries.
fn tasks<'a, T>(sizes: Sizes, result: &'a mut [T], scores: Option<&'a mut [T]>) -> Vec<Task<'a, T>> {
    let Sizes { q, v, rows, .. } = sizes;
    let mut tasks = Vec::with_capacity(sizes.task_count());
    let (row_len, head_count) = if q.interleaved { (q.heads * v.size, q.heads) } else { (v.size, 1) };
    let whole = q.rows * row_len;
    if whole == 0 {
        return tasks;
    }
    // If scores are output, a block holds all queries.
    let mut score_chunks =
        scores.map(|scores| scores.chunks_mut((head_count * q.rows * sizes.total()).max(1)));
    let heads_per_batch = q.heads / head_count;
    for (index, result) in result.chunks_mut(whole).enumerate() {
        let (batch, head) = (index / heads_per_batch, index % heads_per_batch * head_count);
        for (block, result) in result.chunks_mut(rows * row_len).enumerate() {
            let scores = score_chunks.as_mut().and_then(Iterator::next);
            tasks.push(Task { batch, heads: head..head + head_count, first: block * rows, result, scores });
        }
    }
    tasks
}

impl<T: Real> Attention<T> {
    /// Returns the most keys that the queries of a block can see; all keys if scores are output.
    fn key_count(&self, shared: &Shared<'_, T>, batch: usize, last_query: usize) -> usize {
        let total = shared.sizes.total();
        // Scores that are output include those of masked keys.
        if shared.sizes.has_scores {
            return total;
        }
        let mut end = total as i64;
        if let Some(lengths) = &shared.reach.lengths {
            end = end.min(lengths[batch]);
        }
        if self.is_causal {
            end = end.min(last_query as i64 + shared.reach.offset(batch) + 1);
        }
        end.max(0) as usize
    }

    fn run_task(&self, shared: &Shared<'_, T>, task: &mut Task<'_, T>, scratch: &mut [T]) -> Result<()> {
        let Sizes { q, k, v, .. } = shared.sizes;
        let row_stride = if q.interleaved { q.heads * v.size } else { v.size };
        let rows = task.result.len() / row_stride;
        let keys = self.key_count(shared, task.batch, task.first + rows - 1);
        let (scores, workspace) =
            scratch.split_at_mut((shared.sizes.rows * shared.sizes.total()).next_multiple_of(16));
        let scores = &mut scores[..rows * keys];
        for head in task.heads.clone() {
            // Grouped-query attention: several query heads share a key head.
            let key_head = head / (q.heads / k.heads);
            let queries = Matrix {
                values: &shared.q[q.at(task.batch, head, task.first)..],
                shape: [rows, q.size],
                strides: [q.row_stride(), 1],
            };
            // Without keys, the offset could be past the end.
            let cache =
                |cache: &Cache<'_, T>| cache.layout.at(task.batch, key_head, 0).min(cache.values.len());
            let transposed = Rhs::Plain(Matrix {
                values: &shared.k.values[cache(&shared.k)..],
                shape: [q.size, keys],
                strides: [1, shared.k.layout.row_stride()],
            });
            T::multiply(shared.cpu, queries, transposed, GemmTarget::write(&mut *scores, keys), workspace)?;
            T::scale(shared.scale, scores);
            let place = (head - task.heads.start) * rows * keys;
            let out = task.scores.as_mut().and_then(|out| out.get_mut(place..place + rows * keys));
            self.weigh(shared, [task.batch, head, task.first], (scores, keys), out);
            let weights = Matrix::rows(&*scores, rows, keys);
            let values = Rhs::Plain(Matrix {
                values: &shared.v.values[cache(&shared.v)..],
                shape: [keys, v.size],
                strides: [shared.v.layout.row_stride(), 1],
            });
            let first = (head - task.heads.start) * v.size;
            let result = GemmTarget::write(&mut task.result[first..], row_stride);
            T::multiply(shared.cpu, weights, values, result, workspace)?;
        }
        Ok(())
    }

    /// Turns scores into weights: softcap, mask and softmax, row by row. `out` receives the scores
    /// of the stage that `qk_matmul_output_mode` selects.
    fn weigh(
        &self,
        shared: &Shared<'_, T>,
        [batch, head, first]: [usize; 3],
        (scores, keys): (&mut [T], usize),
        mut out: Option<&mut [T]>,
    ) {
        let mut store = |mode: i64, scores: &[T]| {
            if let Some(out) = out.as_deref_mut().filter(|_| mode == self.score_mode) {
                interrupt::copy(scores, out);
            }
        };
        store(0, scores);
        if self.softcap > 0.0 {
            T::divide(scores, self.softcap);
            T::map(Unary::Tanh, scores);
            T::scale(f64::from(self.softcap), scores);
        }
        store(1, scores);
        let hidden = T::from_f64(f64::NEG_INFINITY);
        let mut masked = Vec::new();
        for (row, scores) in scores.chunks_mut(keys.max(1)).enumerate() {
            spend(4 * keys);
            let query = first + row;
            let allowed = self.allowed(&shared.reach, batch, query, keys);
            let mask = shared.mask.as_ref().map(|mask| (mask, mask.row([batch, head, query])));
            let mut any = false;
            for (key, score) in scores.iter_mut().enumerate() {
                let added = match &mask {
                    _ if !allowed.contains(&key) => hidden,
                    Some((mask, row)) => mask.at(*row, key),
                    None => T::ZERO,
                };
                if added == hidden && !self.hidden_is_nan {
                    // Assigned, not added: a NaN or +inf plus -inf is NaN.
                    *score = hidden;
                } else {
                    any = true;
                    *score = *score + added;
                }
            }
            if !any {
                masked.push(row);
            }
        }
        store(2, scores);
        for (row, scores) in scores.chunks_mut(keys.max(1)).enumerate() {
            spend(4 * keys);
            // A row without a visible key has weights of zero, but the softmax would return NaN.
            if masked.contains(&row) || scores.iter().all(|score| *score == hidden) {
                scores.fill(if self.hidden_is_nan { T::from_f64(f64::NAN) } else { T::ZERO });
            } else {
                T::softmax(scores);
            }
        }
        store(3, scores);
    }

    /// Returns the keys that a query may see by position.
    pub(super) fn allowed(
        &self,
        reach: &Reach,
        batch: usize,
        query: usize,
        keys: usize,
    ) -> std::ops::Range<usize> {
        let place = query as i64 + reach.offset(batch);
        let (mut start, mut end) = (0, keys as i64);
        if self.is_causal {
            end = end.min(place + 1);
        }
        let [left, right] = self.windows;
        if left >= 0 {
            start = start.max(place.saturating_sub(left));
        }
        if right >= 0 {
            end = end.min(place.saturating_add(right).saturating_add(1));
        }
        if let Some(lengths) = &reach.lengths {
            end = end.min(lengths[batch]);
        }
        let end = end.max(0);
        start.clamp(0, end) as usize..end as usize
    }
}
