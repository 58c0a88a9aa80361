//! Scaled dot-product attention for the attention operators of `com.microsoft`.
//!
//! Heads may have any strides. If scores are neither an output nor needed as a whole, the work goes
//! to the fused [`ort_cpu_attention`]. Otherwise [`attend`] materializes the scores for a block of
//! queries at a time.

use std::ops::Range;

use ort_core::ops::nn::attention::problem::{BroadcastMask, HeadRows, SdpaSizes};
use ort_core::{Error, Result, ensure, error};
use parking_lot::Mutex;
use smallvec::SmallVec;

use ort_cpu_attention as attention;
use ort_cpu_attention::Elements;
use ort_cpu_gemm::{Cpu, RhsSource};
use ort_cpu_kernel::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_vector::elementwise::Unary;

/// Queries per block.
const ROWS: usize = 64;

/// Rows of heads in a slice, with the strides of batches, heads and rows.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) values: &'a [f32],
    pub(super) strides: [usize; 3],
    /// Elements per row.
    pub(super) size: usize,
}

impl<'a> Rows<'a> {
    /// Rows of a layout in a tensor.
    pub(super) fn new(values: &'a [f32], HeadRows { first, strides }: HeadRows, size: usize) -> Rows<'a> {
        Rows { values: values.get(first..).unwrap_or(&[]), strides, size }
    }

    /// A (batch, heads, rows, size) tensor.
    pub(super) fn by_head(values: &'a [f32], [heads, rows, size]: [usize; 3]) -> Rows<'a> {
        Rows { values, strides: [heads * rows * size, rows * size, size], size }
    }

    /// Returns the elements from the start of a row on.
    pub(super) fn from(&self, [batch, head, row]: [usize; 3]) -> &'a [f32] {
        let [batches, heads, rows] = self.strides;
        self.values.get(batch * batches + head * heads + row * rows..).unwrap_or(&[])
    }

    /// Returns the elements of a row.
    pub(super) fn row(&self, place: [usize; 3]) -> Result<&'a [f32]> {
        let row = self.from(place).get(..self.size);
        row.ok_or_else(|| error!(Fail, "row {place:?} is outside its tensor"))
    }
}

/// The sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    /// Heads of keys and values. Each serves `heads / key_heads` consecutive query heads.
    pub(super) key_heads: usize,
    pub(super) queries: usize,
    /// The longest key sequence of a batch, and the columns of the scores that are written out.
    pub(super) keys: usize,
    /// The key count that scratch is sized for: at least `keys`, and known before the run.
    pub(super) capacity: usize,
    pub(super) size: usize,
    pub(super) value_size: usize,
}

impl Sizes {
    /// The sizes of a problem, with the key count that scratch is sized for.
    pub(super) fn new(sizes: SdpaSizes, capacity: usize) -> Sizes {
        let SdpaSizes { batch, heads, key_heads, queries, keys, size, value_size } = sizes;
        Sizes { batch, heads, key_heads, queries, keys, capacity, size, value_size }
    }

    /// The sizes without the capacity.
    pub(super) fn sdpa(&self) -> SdpaSizes {
        let Sizes { batch, heads, key_heads, queries, keys, size, value_size, .. } = *self;
        SdpaSizes { batch, heads, key_heads, queries, keys, size, value_size }
    }

    fn group(&self) -> usize {
        self.heads / self.key_heads.max(1)
    }

    /// Returns the maximum rows of one GEMM: queries of one head, or, for a single query, the heads
    /// that share its keys.
    fn rows(&self) -> usize {
        if self.queries == 1 { self.group() } else { self.queries.min(ROWS) }.max(1)
    }

    fn task_count(&self) -> usize {
        self.batch * self.key_heads * self.queries.div_ceil(ROWS)
    }

    /// Converts to the sizes of [`ort_cpu_attention`].
    fn fused(&self) -> attention::Sizes {
        let Sizes { batch, heads, key_heads, queries, keys, size, value_size, .. } = *self;
        attention::Sizes { batch, heads, key_heads, queries, keys, size, value_size }
    }

    fn inner_cpu(&self, threads: usize) -> Cpu {
        // A lone task gives its GEMMs all threads; several tasks run in parallel on one thread
        // each.
        Cpu::with_threads(if self.task_count() == 1 { threads } else { 1 })
    }

    /// Returns the scratch elements of one part: scores, results, and the GEMM workspace.
    fn part_len(&self, cpu: Cpu) -> usize {
        let rows = self.rows();
        let first = f32::workspace_len(cpu, [rows, self.capacity, self.size], RhsSource::Strided);
        let second = f32::workspace_len(cpu, [rows, self.value_size, self.capacity], RhsSource::Rows);
        // With fewer keys than `capacity`, a GEMM may use another blocking, which needs at most two
        // more panels.
        let slack = 2 * 64 * 512 * cpu.threads;
        let scores = (rows * (self.capacity + 1)).next_multiple_of(16);
        let results = (rows * self.value_size).next_multiple_of(16);
        scores + results + first.max(second).next_multiple_of(16) + slack
    }

    /// Returns the scratch elements that [`attend`] needs. Pass [`Scores::Written`] if scores are
    /// an output, and `is_narrow` if the cache may be in half precision.
    pub(super) fn scratch_len(&self, cpu: Cpu, scores: Scores, is_narrow: bool) -> usize {
        if scores == Scores::Passing {
            return self.fused().scratch_len(cpu, is_narrow);
        }
        part_count(cpu.threads, self.task_count()) * self.part_len(self.inner_cpu(cpu.threads))
    }
}

/// Whether the score matrix must be materialized.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scores {
    /// No: the fused attention can stream over it.
    Passing,
    /// Yes: scores are an output, or hidden keys take part in the softmax.
    Written,
}

/// The keys of one batch: their count, and how many precede the first query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) keys: usize,
    pub(super) before: usize,
}

/// One span per batch.
pub(super) type Spans = SmallVec<[Span; 8]>;

/// How the causal mask treats a key that a query must not see.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hidden {
    /// The key is left out of the softmax; its score and weight are 0.
    Excluded,
    /// `f32::MIN` is added to its score.
    Lowered,
}

/// The padding mask.
pub(super) struct Padding<'a> {
    pub(super) mask: PaddingMask<'a>,
    /// The value added to the scores of padded keys.
    pub(super) added: f32,
}

/// Which keys are padding.
pub(super) enum PaddingMask<'a> {
    /// Keys outside a range, one range per batch.
    Ranges(Vec<Range<usize>>),
    /// Keys whose element is not positive, with the strides of batches and queries.
    Elements(&'a [i32], [usize; 2]),
}

impl Padding<'_> {
    /// Whether the mask differs from query to query.
    fn is_by_query(&self) -> bool {
        matches!(self.mask, PaddingMask::Elements(_, [_, queries]) if queries != 0)
    }

    /// Adds the mask to a query's scores, for the keys from `first` on.
    fn add(&self, batch: usize, query: usize, first: usize, scores: &mut [f32]) {
        match &self.mask {
            PaddingMask::Ranges(ranges) => {
                let Some(range) = ranges.get(batch) else { return };
                for (key, score) in scores.iter_mut().enumerate() {
                    if !range.contains(&(first + key)) {
                        *score += self.added;
                    }
                }
            }
            PaddingMask::Elements(elements, [batches, queries]) => {
                let row = elements.get(batch * batches + query * queries + first..).unwrap_or(&[]);
                for (score, element) in scores.iter_mut().zip(row) {
                    if *element <= 0 {
                        *score += self.added;
                    }
                }
            }
        }
    }
}

/// A tensor added to the scores, broadcast over batches and heads.
pub(super) struct Bias<'a> {
    values: &'a [f32],
    strides: [usize; 3],
}

impl<'a> Bias<'a> {
    /// Wraps a tensor of `shape` (batch or 1, heads or 1, queries, at least the keys).
    pub(super) fn new(values: &'a [f32], shape: &[usize], sizes: &Sizes) -> Result<Bias<'a>> {
        let BroadcastMask { strides, .. } = BroadcastMask::bias(shape, &sizes.sdpa())?;
        Ok(Bias { values, strides })
    }

    fn add(&self, [batch, head, query]: [usize; 3], keys: Range<usize>, scores: &mut [f32]) {
        let [batches, heads, queries] = self.strides;
        let row = self.values.get(batch * batches + head * heads + query * queries + keys.start..);
        for (score, bias) in scores.iter_mut().zip(row.unwrap_or(&[])) {
            *score += bias;
        }
    }
}

/// The stage at which scores are written out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// After scaling, softcap, bias and mask.
    Scores,
    /// After the softmax.
    Weights,
}

/// One attention to compute.
pub(super) struct Problem<'a> {
    pub(super) sizes: Sizes,
    pub(super) q: Rows<'a>,
    pub(super) k: attention::Rows<'a>,
    pub(super) v: attention::Rows<'a>,
    /// One per batch.
    pub(super) spans: Spans,
    pub(super) scale: f32,
    /// If positive, scores become `softcap * tanh(score / softcap)`.
    pub(super) softcap: f32,
    pub(super) causal: bool,
    /// Sliding window: the maximum number of keys that a query sees, its own included.
    pub(super) window: Option<usize>,
    pub(super) hidden: Hidden,
    pub(super) padding: Option<Padding<'a>>,
    pub(super) bias: Option<Bias<'a>>,
    /// For each head, the logarithm of a term added to the softmax's sum (attention sink).
    pub(super) sinks: Option<&'a [f32]>,
    pub(super) stage: Stage,
}

/// A block of queries, for all heads that share keys and values.
struct Task<'a> {
    batch: usize,
    key_head: usize,
    /// The first query of the block.
    first: usize,
    /// For each query, the output slice of those heads.
    results: Vec<&'a mut [f32]>,
    /// For each of those heads, the output slice of the block's scores.
    scores: Vec<&'a mut [f32]>,
}

/// Computes the attention. `result` is (batch, queries, heads, value size), `scores` is (batch,
/// heads, queries, keys).
pub(super) fn attend(
    problem: &Problem<'_>,
    cpu: Cpu,
    result: &mut [f32],
    scores: Option<&mut [f32]>,
    scratch: &mut [f32],
) -> Result<()> {
    let sizes = problem.sizes;
    let divides = sizes.key_heads > 0 && sizes.heads.is_multiple_of(sizes.key_heads);
    ensure!(
        divides,
        InvalidArgument,
        "{} query heads are not a multiple of {} key heads",
        sizes.heads,
        sizes.key_heads
    );
    ensure!(sizes.keys <= sizes.capacity, Fail, "{} keys in scratch for {}", sizes.keys, sizes.capacity);
    ensure!(problem.spans.len() == sizes.batch, Fail, "there are {} spans", problem.spans.len());
    if result.is_empty() {
        return Ok(());
    }
    if scores.is_none() && problem.hides_fully() {
        return problem.run_fused(cpu, result, scratch);
    }
    // Written scores are computed in float32, so this drops the session's precision.
    let (threads, cpu) = (cpu.threads, sizes.inner_cpu(cpu.threads));
    let part_len = sizes.part_len(cpu);
    let mut tasks = tasks(&sizes, result, scores);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    for_each_unit(threads, (&mut tasks, 1), (scratch, part_len), |_, tasks, scratch| {
        for task in tasks {
            if let Err(error) = problem.run_task(cpu, task, scratch) {
                failure.lock().get_or_insert(error);
            }
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Splits the outputs into tasks, ordered by batch, key head and block.
fn tasks<'a>(sizes: &Sizes, result: &'a mut [f32], scores: Option<&'a mut [f32]>) -> Vec<Task<'a>> {
    let (group, blocks) = (sizes.group(), sizes.queries.div_ceil(ROWS));
    let mut tasks: Vec<Task<'a>> = Vec::with_capacity(sizes.task_count());
    for batch in 0..sizes.batch {
        for key_head in 0..sizes.key_heads {
            for block in 0..blocks {
                let (results, scores) = (Vec::with_capacity(ROWS), Vec::new());
                tasks.push(Task { batch, key_head, first: block * ROWS, results, scores });
            }
        }
    }
    let width = group * sizes.value_size;
    for (index, row) in result.chunks_mut((sizes.key_heads * width).max(1)).enumerate() {
        let (batch, query) = (index / sizes.queries, index % sizes.queries);
        for (key_head, row) in row.chunks_mut(width.max(1)).enumerate() {
            if let Some(task) = tasks.get_mut((batch * sizes.key_heads + key_head) * blocks + query / ROWS) {
                task.results.push(row);
            }
        }
    }
    let plane = sizes.queries * sizes.keys;
    for (index, plane) in scores.into_iter().flat_map(|scores| scores.chunks_mut(plane.max(1))).enumerate() {
        for (block, scores) in plane.chunks_mut((ROWS * sizes.keys).max(1)).enumerate() {
            if let Some(task) = tasks.get_mut(index / group * blocks + block) {
                task.scores.push(scores);
            }
        }
    }
    tasks
}

/// Padding below this is so low that hidden keys weigh in beside padded ones.
const AS_LOW_AS_HIDDEN: f32 = -1e30;

/// Returns whether scores must be materialized, given the `padding` added to padded keys and a
/// causal mask that lowers scores.
pub(super) fn scores_of(is_wanted: bool, causal: bool, padding: f32) -> Scores {
    match is_wanted || (causal && padding < AS_LOW_AS_HIDDEN) {
        true => Scores::Written,
        false => Scores::Passing,
    }
}

impl<'a> Rows<'a> {
    /// Converts to the rows of [`ort_cpu_attention`].
    pub(super) fn plain(&self) -> attention::Rows<'a> {
        attention::Rows { elements: Elements::F32(self.values), strides: self.strides }
    }
}

/// Returns the rows of an `f32` cache.
fn singles<'a>(rows: &attention::Rows<'a>, size: usize) -> Result<Rows<'a>> {
    match rows.elements {
        Elements::F32(values) => Ok(Rows { values, strides: rows.strides, size }),
        _ => Err(error!(Fail, "scores of a cache in half precision are not written out")),
    }
}

impl Problem<'_> {
    /// Whether hidden keys can be left out of the softmax.
    fn hides_fully(&self) -> bool {
        let lowest = self.padding.as_ref().map_or(0.0, |padding| padding.added);
        self.hidden == Hidden::Excluded || scores_of(false, self.causal, lowest) == Scores::Passing
    }

    fn run_fused(&self, cpu: Cpu, result: &mut [f32], scratch: &mut [f32]) -> Result<()> {
        let sizes = self.sizes;
        let write = |[batch, head, query]: [usize; 3], keys: Range<usize>, to: &mut [f32]| {
            to.fill(0.0);
            if let Some(bias) = &self.bias {
                bias.add([batch, head, query], keys.clone(), to);
            }
            if let Some(padding) = &self.padding {
                padding.add(batch, query, keys.start, to);
            }
        };
        let is_by_query = self.bias.is_some() || self.padding.as_ref().is_some_and(Padding::is_by_query);
        let attention = attention::Attention {
            sizes: sizes.fused(),
            queries: Some(self.q.plain()),
            keys: self.k,
            values: self.v,
            scale: self.scale,
            softcap: self.softcap,
            visible: &|[batch, query]| {
                let keys = self.spans.get(batch).map_or(0, |span| span.keys.min(sizes.keys));
                self.visible(batch, query, keys)
            },
            mask: (self.bias.is_some() || self.padding.is_some())
                .then_some(attention::Mask { write: &write, is_by_query }),
            sinks: self.sinks,
            hidden_is_nan: false,
        };
        let row = sizes.heads * sizes.value_size;
        let strides = [sizes.queries * row, sizes.value_size, row];
        let refused = |refused: attention::Refused| error!(InvalidArgument, "{refused}");
        attention.run(cpu, result, strides, scratch).map_err(refused)
    }

    fn run_task(&self, cpu: Cpu, task: &mut Task<'_>, scratch: &mut [f32]) -> Result<()> {
        let (sizes, group) = (self.sizes, self.sizes.group());
        let first_head = task.key_head * group;
        // Decoding: one GEMM covers all heads that share keys, with a row per head.
        if sizes.queries == 1 {
            let heads = first_head..first_head + group;
            return self.run_strip(cpu, task, Strip { heads, queries: 0..1 }, scratch);
        }
        let queries = task.first..task.first + task.results.len();
        for head in first_head..first_head + group {
            let strip = Strip { heads: head..head + 1, queries: queries.clone() };
            self.run_strip(cpu, task, strip, scratch)?;
        }
        Ok(())
    }

    fn run_strip(&self, cpu: Cpu, task: &mut Task<'_>, strip: Strip, scratch: &mut [f32]) -> Result<()> {
        let (sizes, batch) = (self.sizes, task.batch);
        let (rows, keys) = (strip.rows(), self.key_count(batch, strip.queries.end));
        // The sink takes one more column.
        let width = keys + usize::from(self.sinks.is_some());
        let (scores, rest) = split(scratch, sizes.rows() * (sizes.capacity + 1))?;
        let (results, workspace) = split(rest, sizes.rows() * sizes.value_size)?;
        let scores = &mut scores[..rows * width];
        let (k, v) = (singles(&self.k, sizes.size)?, singles(&self.v, sizes.value_size)?);
        let (keys_of, values_of) = (k.from([batch, task.key_head, 0]), v.from([batch, task.key_head, 0]));
        let by_head = strip.heads.len() > 1;
        let queries = Matrix {
            values: self.q.from([batch, strip.heads.start, strip.queries.start]),
            shape: [rows, sizes.size],
            strides: [self.q.strides[if by_head { 1 } else { 2 }], 1],
        };
        let transposed =
            Matrix { values: keys_of, shape: [sizes.size, keys], strides: [1, self.k.strides[2]] };
        f32::multiply(
            cpu,
            queries,
            Rhs::Plain(transposed),
            GemmTarget::write(&mut *scores, width),
            workspace,
        )?;
        for (index, row) in scores.chunks_mut(width.max(1)).enumerate() {
            let (head, query) = strip.place(index);
            self.weigh([batch, head, query], row, task.written(&strip, index, sizes.keys));
        }
        let weights = Matrix { values: &*scores, shape: [rows, keys], strides: [width, 1] };
        let values =
            Matrix { values: values_of, shape: [keys, sizes.value_size], strides: [self.v.strides[2], 1] };
        let results = &mut results[..rows * sizes.value_size];
        f32::multiply(
            cpu,
            weights,
            Rhs::Plain(values),
            GemmTarget::write(&mut *results, sizes.value_size),
            workspace,
        )?;
        for (index, result) in results.chunks(sizes.value_size.max(1)).enumerate() {
            let (head, query) = strip.place(index);
            let start = (head - task.key_head * sizes.group()) * sizes.value_size;
            let to = task.results.get_mut(query - task.first).and_then(|row| row.get_mut(start..));
            let to = to.and_then(|row| row.get_mut(..result.len()));
            to.ok_or_else(|| error!(Fail, "the output is too short"))?.copy_from_slice(result);
        }
        Ok(())
    }

    /// Returns the maximum number of keys that queries before `end` can see.
    fn key_count(&self, batch: usize, end: usize) -> usize {
        let Span { keys, before } = self.spans[batch];
        let keys = keys.min(self.sizes.keys);
        // If padding is as low as the causal mask, a query that sees only padding also weighs
        // hidden keys. Scores are written before the softmax, so they need every key as well.
        let all_count = self.hidden == Hidden::Lowered
            && (self.stage_needs_all()
                || self.padding.as_ref().is_some_and(|padding| padding.added < AS_LOW_AS_HIDDEN));
        if self.causal && !all_count && !self.is_last(end - 1) { keys.min(before + end) } else { keys }
    }

    fn stage_needs_all(&self) -> bool {
        self.stage == Stage::Scores
    }

    /// Whether this is the last query. With `Hidden::Lowered` it sees all keys, as in ONNX Runtime,
    /// which differs from a causal mask only if more keys follow it.
    fn is_last(&self, query: usize) -> bool {
        self.hidden == Hidden::Lowered && query + 1 == self.sizes.queries
    }

    /// Returns the keys that a query may see by its position.
    fn visible(&self, batch: usize, query: usize, keys: usize) -> Range<usize> {
        let end = self.spans[batch].before + query + 1;
        if !self.causal || self.is_last(query) {
            return 0..keys;
        }
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        start.min(keys)..end.min(keys)
    }

    /// Turns a row of dot products into attention weights. `written` receives the row at the stage
    /// that the node outputs.
    fn weigh(&self, place: [usize; 3], row: &mut [f32], mut written: Option<&mut [f32]>) {
        let [batch, head, query] = place;
        let keys = row.len() - usize::from(self.sinks.is_some());
        let visible = self.visible(batch, query, keys);
        let counted = if self.hidden == Hidden::Excluded { visible.clone() } else { 0..keys };
        row[..counted.start].fill(0.0);
        row[counted.end..].fill(0.0);
        let scores = &mut row[counted.clone()];
        f32::map(Unary::Affine { scale: self.scale, shift: 0.0 }, scores);
        if self.softcap > 0.0 {
            f32::map(Unary::Affine { scale: 1.0 / self.softcap, shift: 0.0 }, scores);
            f32::map(Unary::Tanh, scores);
            f32::map(Unary::Affine { scale: self.softcap, shift: 0.0 }, scores);
        }
        if let Some(bias) = &self.bias {
            bias.add(place, counted.clone(), scores);
        }
        if let Some(padding) = &self.padding {
            padding.add(batch, query, counted.start, scores);
        }
        // `Lowered`: hidden keys stay in the softmax with a very low score.
        if counted != visible {
            scores[visible.end..].iter_mut().for_each(|score| *score += f32::MIN);
        }
        if let (Stage::Scores, Some(to)) = (self.stage, written.as_deref_mut()) {
            store(&row[..keys], to);
        }
        if let Some(sink) = self.sinks.and_then(|sinks| sinks.get(head)) {
            // The sink is one more key in the softmax, and its weight is dropped.
            row[counted.end] = *sink;
            f32::softmax(&mut row[counted.start..=counted.end]);
            row[counted.end] = 0.0;
        } else if !counted.is_empty() {
            f32::softmax(&mut row[counted]);
        }
        if let (Stage::Weights, Some(to)) = (self.stage, written) {
            store(&row[..keys], to);
        }
    }
}

/// Copies a row to the output and zeroes the keys beyond it.
fn store(row: &[f32], to: &mut [f32]) {
    let (from, rest) = to.split_at_mut(row.len().min(to.len()));
    from.copy_from_slice(&row[..from.len()]);
    rest.fill(0.0);
}

/// Splits off the first `len` values of scratch. The rest starts at the next cache line.
fn split(scratch: &mut [f32], len: usize) -> Result<(&mut [f32], &mut [f32])> {
    let halves = scratch.split_at_mut_checked(len.next_multiple_of(16));
    halves.ok_or_else(|| error!(Fail, "the workspace is too small"))
}

/// The rows of one GEMM: queries of one head, or one query of several heads.
struct Strip {
    heads: Range<usize>,
    queries: Range<usize>,
}

impl Strip {
    fn rows(&self) -> usize {
        self.heads.len() * self.queries.len()
    }

    /// Returns the head and the query of a row.
    fn place(&self, row: usize) -> (usize, usize) {
        if self.heads.len() > 1 {
            (self.heads.start + row, self.queries.start)
        } else {
            (self.heads.start, self.queries.start + row)
        }
    }
}

impl Task<'_> {
    /// Returns the output slice for the scores of a strip's row.
    fn written(&mut self, strip: &Strip, row: usize, keys: usize) -> Option<&mut [f32]> {
        let (head, query) = strip.place(row);
        let heads = self.scores.len().max(1);
        let plane = self.scores.get_mut(head % heads)?;
        plane.get_mut((query - self.first) * keys..)?.get_mut(..keys)
    }
}
