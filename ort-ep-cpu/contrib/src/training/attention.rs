//! `TrainingAttention` and its gradient.
//!
//! Heads are computed independently, a block of queries at a time, so no matrix of all scores is in
//! memory.
//!
//! The blocks follow from the sizes alone, and each head accumulates its blocks in order. The
//! number of threads therefore changes no bits.

use num_traits::Float;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::tensor::TensorView;
use ort_core::{Error, Result, ensure, error};
use parking_lot::Mutex;
use smallvec::SmallVec;

use ort_cpu_gemm::{Cpu, RhsSource};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::interrupt::spending;
use ort_cpu_vector::random::{Dropout, dropout};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::training::score_gradient;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const DOUBLE: TypeSet = TypeSet::of(&[DType::F64]);

const FORWARD: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "TrainingAttention",
    types: &[("T", SINGLE)],
    make: |cx| via_f32(cx, |cx| make::<f32>(cx, 0)),
    ..KernelDef::BASE
};

const BACKWARD: KernelDef =
    KernelDef { op: "TrainingAttentionGrad", make: |cx| via_f32(cx, |cx| make::<f32>(cx, 1)), ..FORWARD };

cpu_kernels![
    FORWARD,
    KernelDef { types: &[("T", DOUBLE)], make: |cx| make::<f64>(cx, 0), ..FORWARD },
    BACKWARD,
    KernelDef { types: &[("T", DOUBLE)], make: |cx| make::<f64>(cx, 1), ..BACKWARD },
];

/// The approximate number of scores in a block, which stay in the processor's cache.
const BLOCK: usize = 1 << 15;

struct TrainingAttention<T> {
    /// The input index of the queries. They come after the upstream gradient, if there is one.
    first: usize,
    fill: T,
    stream: i64,
    drops: bool,
}

fn make<T: Real + Float>(cx: &mut CompileCx<'_>, first: usize) -> Result<Box<dyn Executable>> {
    Ok(Box::new(TrainingAttention::<T> {
        first,
        fill: T::from_f64(f64::from(cx.attrs().float("fill")?)),
        stream: cx.attrs().int("stream")?,
        drops: cx.node.dtype(first + 4).is_some(),
    }))
}

/// The sizes of a run.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    queries: usize,
    keys: usize,
    size: usize,
    value_size: usize,
}

impl Sizes {
    fn of(q: &[usize], k: &[usize], v: &[usize]) -> Result<Sizes> {
        match (q, k, v) {
            (
                [heads @ .., queries, size],
                [key_heads @ .., keys, key_size],
                [value_heads @ .., rows, value_size],
            ) if heads == key_heads && heads == value_heads && size == key_size && keys == rows => {
                let heads = heads.iter().product();
                Ok(Sizes { heads, queries: *queries, keys: *keys, size: *size, value_size: *value_size })
            }
            _ => Err(error!(InvalidArgument, "queries {q:?}, keys {k:?} and values {v:?} do not match")),
        }
    }

    /// Returns the number of queries in a block.
    fn rows(&self) -> usize {
        (BLOCK / self.keys.max(1)).clamp(8, 256).min(self.queries.max(1))
    }

    /// Returns the CPU configuration of GEMMs inside a head, which use threads only if there is one
    /// head.
    fn cpu(&self, threads: usize) -> Cpu {
        Cpu::with_threads(if self.heads == 1 { threads } else { 1 })
    }

    /// Returns the length of a block's score matrix, in values.
    fn block_len(&self) -> usize {
        (self.rows() * self.keys).next_multiple_of(16)
    }

    /// Returns the largest workspace of a block's GEMMs.
    fn product_len<T: Real>(&self, cpu: Cpu, is_backward: bool) -> usize {
        let Sizes { queries, keys, size, value_size, .. } = *self;
        let len = |rows: usize| {
            let forward = [
                T::workspace_len(cpu, [rows, keys, size], RhsSource::Strided),
                T::workspace_len(cpu, [rows, value_size, keys], RhsSource::Rows),
            ];
            let backward = [
                T::workspace_len(cpu, [rows, keys, value_size], RhsSource::Strided),
                T::workspace_len(cpu, [keys, value_size, rows], RhsSource::Rows),
                T::workspace_len(cpu, [rows, size, keys], RhsSource::Rows),
                T::workspace_len(cpu, [keys, size, rows], RhsSource::Rows),
            ];
            let backward = backward.into_iter().filter(|_| is_backward);
            forward.into_iter().chain(backward).max().unwrap_or(0)
        };
        // The last block may have fewer rows.
        let rows = self.rows();
        len(rows).max(len(queries % rows)).next_multiple_of(16)
    }
}

/// The mask, broadcast to the scores by strides.
struct Mask<'a, T> {
    values: MaskValues<'a, T>,
    /// The strides and sizes of leading axes.
    heads: SmallVec<[(usize, usize); 4]>,
    /// The stride of queries.
    query: usize,
    /// The stride of keys.
    key: usize,
}

enum MaskValues<'a, T> {
    Added(&'a [T]),
    Kept(&'a [u8]),
}

impl<'a, T: Real> Mask<'a, T> {
    fn new(view: TensorView<'a>, queries: &[usize], keys: usize) -> Result<Mask<'a, T>> {
        let mut full: SmallVec<[usize; 6]> = queries.into();
        full.pop();
        full.push(keys);
        let shape = view.shape();
        let fits = shape.len() <= full.len()
            && shape.iter().rev().zip(full.iter().rev()).all(|(size, to)| *size == 1 || size == to);
        ensure!(
            fits,
            InvalidArgument,
            "the mask of shape {shape:?} does not broadcast to scores of shape {full:?}"
        );
        let mut strides: SmallVec<[usize; 6]> = SmallVec::from_elem(0, full.len());
        let mut step = 1;
        for (stride, size) in strides.iter_mut().rev().zip(shape.iter().rev()) {
            *stride = if *size == 1 { 0 } else { step };
            step *= size;
        }
        let (key, query) = (strides.pop().unwrap_or(0), strides.pop().unwrap_or(0));
        let values = match view.dtype() {
            DType::Bool => MaskValues::Kept(view.bytes()?),
            _ => MaskValues::Added(view.as_slice()?),
        };
        Ok(Mask { values, heads: strides.into_iter().zip(full).collect(), query, key })
    }

    /// Returns the offset of a row.
    fn row(&self, mut head: usize, query: usize) -> usize {
        let mut place = query * self.query;
        for (stride, size) in self.heads.iter().rev() {
            place += head % size * stride;
            head /= size;
        }
        place
    }

    /// Calls `then` for each row of a block, with the mask's offset for it and its scores.
    fn each_row(
        &self,
        head: usize,
        first: usize,
        scores: &mut [T],
        keys: usize,
        then: impl Fn(usize, &mut [T]),
    ) {
        for (row, scores) in spending(keys, scores.chunks_exact_mut(keys.max(1))).enumerate() {
            then(self.row(head, first + row), scores);
        }
    }

    /// Adds the mask to scores, or fills the scores that it does not keep.
    fn apply(&self, (head, first): (usize, usize), scores: &mut [T], keys: usize, fill: T) {
        self.each_row(head, first, scores, keys, |place, scores| match (&self.values, self.key) {
            (MaskValues::Added(values), 0) => {
                let added = values[place];
                scores.iter_mut().for_each(|score| *score = *score + added);
            }
            (MaskValues::Added(values), _) => {
                let added = &values[place..place + keys];
                scores.iter_mut().zip(added).for_each(|(score, added)| *score = *score + *added);
            }
            (MaskValues::Kept(values), key) => fill_hidden(&values[place..], key, scores, fill),
        });
    }

    /// Clears the gradients of scores that were filled.
    fn clear(&self, (head, first): (usize, usize), scores: &mut [T], keys: usize) {
        if let MaskValues::Kept(values) = &self.values {
            self.each_row(head, first, scores, keys, |place, scores| {
                fill_hidden(&values[place..], self.key, scores, T::ZERO);
            });
        }
    }
}

/// Fills the scores that a row of a boolean mask does not keep.
fn fill_hidden<T: Copy>(kept: &[u8], key: usize, scores: &mut [T], fill: T) {
    match key {
        0 if kept[0] == 0 => scores.fill(fill),
        0 => {}
        _ => scores.iter_mut().zip(kept).for_each(|(score, kept)| {
            *score = if *kept == 0 { fill } else { *score };
        }),
    }
}

/// The operands that all heads read.
struct Shared<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    mask: Option<Mask<'a, T>>,
    dropout: Option<(Dropout, T)>,
    fill: T,
    sizes: Sizes,
    cpu: Cpu,
}

/// A block of queries of a head.
#[derive(Clone, Copy)]
struct Place {
    head: usize,
    first: usize,
    rows: usize,
}

impl<'a, T: Real + Float> Shared<'a, T> {
    fn new(cx: &RunCx<'a>, attention: &TrainingAttention<T>) -> Result<Shared<'a, T>> {
        let first = attention.first;
        let [q, k, v] = [cx.input(first)?, cx.input(first + 1)?, cx.input(first + 2)?];
        let sizes = Sizes::of(q.shape(), k.shape(), v.shape())?;
        let mask = cx.find_input(first + 3).map(|mask| Mask::new(mask, q.shape(), sizes.keys)).transpose()?;
        let dropout = if attention.drops { attention.dropout(cx)? } else { None };
        let (q, k, v) = (q.as_slice()?, k.as_slice()?, v.as_slice()?);
        Ok(Shared { q, k, v, mask, dropout, fill: attention.fill, sizes, cpu: sizes.cpu(cx.threads()) })
    }

    /// Returns the rows of a head, of `size` values each.
    fn rows_of(values: &'a [T], head: usize, rows: usize, size: usize) -> Matrix<'a, T> {
        Matrix::rows(&values[head * rows * size..][..rows * size], rows, size)
    }

    fn queries(&self, Place { head, first, rows }: Place) -> Matrix<'a, T> {
        let Sizes { queries, size, .. } = self.sizes;
        Matrix::rows(&self.q[(head * queries + first) * size..][..rows * size], rows, size)
    }

    /// Computes the softmax of the scores of some queries, before dropout.
    fn weigh(&self, place: Place, weights: &mut [T], workspace: &mut [T]) -> Result<()> {
        let Sizes { keys, size, .. } = self.sizes;
        let turned = Matrix::transposed(&self.k[place.head * keys * size..][..keys * size], size, keys);
        T::multiply(
            self.cpu,
            self.queries(place),
            Rhs::Plain(turned),
            GemmTarget::write(weights, keys),
            workspace,
        )?;
        if let Some(mask) = &self.mask {
            mask.apply((place.head, place.first), weights, keys, self.fill);
        }
        weights.chunks_exact_mut(keys).for_each(T::softmax);
        Ok(())
    }

    fn drop(&self, Place { head, first, .. }: Place, weights: &mut [T]) {
        if let Some((rule, kept)) = &self.dropout {
            let first = (head * self.sizes.queries + first) * self.sizes.keys;
            dropout(Isa::current(), rule, first as u64, *kept, weights);
        }
    }

    /// Returns the blocks of a head.
    fn blocks(&self, head: usize) -> impl Iterator<Item = Place> + use<T> {
        let (rows, queries) = (self.sizes.rows(), self.sizes.queries);
        (0..queries).step_by(rows).map(move |first| Place { head, first, rows: rows.min(queries - first) })
    }

    fn forward(&self, head: usize, output: &mut [T], scratch: &mut [T]) -> Result<()> {
        let Sizes { keys, value_size, .. } = self.sizes;
        let (weights, workspace) = scratch.split_at_mut(self.sizes.block_len());
        for place in self.blocks(head) {
            let weights = &mut weights[..place.rows * keys];
            self.weigh(place, weights, workspace)?;
            self.drop(place, weights);
            let weights = Matrix::rows(weights, place.rows, keys);
            let values = Rhs::Plain(Self::rows_of(self.v, head, keys, value_size));
            let output = &mut output[place.first * value_size..][..place.rows * value_size];
            T::multiply(self.cpu, weights, values, GemmTarget::write(output, value_size), workspace)?;
        }
        Ok(())
    }

    fn backward(&self, upstream: &[T], task: &mut Task<'_, T>, scratch: &mut [T]) -> Result<()> {
        let Sizes { queries, keys, size, value_size, .. } = self.sizes;
        let (head, mut rest) = (task.head, scratch);
        let block = self.sizes.block_len();
        let weights = take(&mut rest, block)?;
        let gradients = take(&mut rest, block)?;
        let copies = take(&mut rest, if self.dropout.is_some() { block } else { 0 })?;
        for place in self.blocks(head) {
            // The first block overwrites the gradients of keys and values, later blocks add to
            // them.
            let (len, adds) = (place.rows * keys, place.first > 0);
            let (weights, gradients) = (&mut weights[..len], &mut gradients[..len]);
            self.weigh(place, weights, rest)?;
            // The gradient needs the weights before and after dropout.
            let mut copy = copies.get_mut(..len);
            if let Some(copy) = &mut copy {
                copy.copy_from_slice(weights);
                self.drop(place, copy);
            }
            let dropped: &[T] = copy.as_deref().unwrap_or(weights);
            let start = (head * queries + place.first) * value_size;
            let upstream =
                Matrix::rows(&upstream[start..][..place.rows * value_size], place.rows, value_size);
            if let Some(by_values) = &mut task.by_values {
                let turned = Matrix::transposed(dropped, keys, place.rows);
                T::multiply(
                    self.cpu,
                    turned,
                    Rhs::Plain(upstream),
                    GemmTarget { values: by_values, row_stride: value_size, add: adds },
                    rest,
                )?;
            }
            let values = &self.v[head * keys * value_size..][..keys * value_size];
            let turned = Rhs::Plain(Matrix::transposed(values, value_size, keys));
            T::multiply(self.cpu, upstream, turned, GemmTarget::write(gradients, keys), rest)?;
            score_gradient(Isa::current(), keys, weights, dropped, gradients);
            if let Some(mask) = &self.mask {
                mask.clear((head, place.first), gradients, keys);
            }
            if let Some(by_queries) = &mut task.by_queries {
                let by_queries = &mut by_queries[place.first * size..][..place.rows * size];
                let keys_of = Rhs::Plain(Self::rows_of(self.k, head, keys, size));
                let left = Matrix::rows(&*gradients, place.rows, keys);
                T::multiply(self.cpu, left, keys_of, GemmTarget::write(by_queries, size), rest)?;
            }
            if let Some(by_keys) = &mut task.by_keys {
                let left = Matrix::transposed(&*gradients, keys, place.rows);
                let right = Rhs::Plain(self.queries(place));
                T::multiply(
                    self.cpu,
                    left,
                    right,
                    GemmTarget { values: by_keys, row_stride: size, add: adds },
                    rest,
                )?;
            }
        }
        Ok(())
    }
}

/// The gradients of one head.
struct Task<'a, T> {
    head: usize,
    by_queries: Option<&'a mut [T]>,
    by_keys: Option<&'a mut [T]>,
    by_values: Option<&'a mut [T]>,
}

impl<T: Real + Float> TrainingAttention<T> {
    fn dropout(&self, cx: &RunCx<'_>) -> Result<Option<(Dropout, T)>> {
        let ratio = cx.input(self.first + 4)?.to_scalar::<f32>()?;
        ensure!(
            (0.0..1.0).contains(&ratio),
            InvalidArgument,
            help = "the ratio is the share that is dropped",
            "the ratio of dropout is {ratio}, expected 0 or more and less than 1"
        );
        let [seed, step] = [5, 6].map(|index| cx.input(self.first + index)?.to_scalar::<i64>());
        let rule = Dropout::new(ratio, seed?, self.stream, step?);
        // As in `CounterDropout`, in the compute type.
        let kept = if size_of::<T>() == 4 { f64::from(1.0 - ratio) } else { 1.0 - f64::from(ratio) };
        Ok((ratio > 0.0).then(|| (rule, T::from_f64(kept))))
    }

    fn is_backward(&self) -> bool {
        self.first > 0
    }

    /// Returns the scratch of one part, in values.
    fn part_len(&self, sizes: Sizes, threads: usize) -> usize {
        let matrices = match (self.is_backward(), self.drops) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => 3,
        };
        matrices * sizes.block_len() + sizes.product_len::<T>(sizes.cpu(threads), self.is_backward())
    }

    fn run_forward(&self, cx: &mut RunCx<'_>, shared: &Shared<'_, T>, scratch: &mut [T]) -> Result<()> {
        let output = cx.output(0)?.as_mut_slice::<T>()?;
        let (threads, sizes) = (cx.threads(), shared.sizes);
        let failure = Failure::default();
        let scratch = (scratch, self.part_len(sizes, threads));
        for_each_unit(
            threads,
            (output, sizes.queries * sizes.value_size),
            scratch,
            |head, output, scratch| {
                failure.keep(shared.forward(head, output, scratch));
            },
        );
        failure.into_result()
    }

    fn run_backward(&self, cx: &mut RunCx<'_>, shared: &Shared<'_, T>, scratch: &mut [T]) -> Result<()> {
        let upstream = cx.input(0)?.as_slice::<T>()?;
        let (threads, sizes) = (cx.threads(), shared.sizes);
        ensure!(
            upstream.len() == sizes.heads * sizes.queries * sizes.value_size,
            InvalidArgument,
            "the upstream gradient has shape {:?}, which is not that of the output",
            cx.input(0)?.shape()
        );
        let lens = [sizes.queries * sizes.size, sizes.keys * sizes.size, sizes.keys * sizes.value_size];
        let mut outputs = Vec::with_capacity(lens.len());
        for (index, len) in lens.into_iter().enumerate() {
            let wanted = if cx.wants(index) { Some(cx.output(index)?.as_mut_slice::<T>()?) } else { None };
            outputs.push(wanted.map(|output| output.chunks_exact_mut(len.max(1))));
        }
        let mut next =
            |index: usize| outputs.get_mut(index).and_then(Option::as_mut).and_then(Iterator::next);
        let task = |head| Task { head, by_queries: next(0), by_keys: next(1), by_values: next(2) };
        let mut tasks: Vec<Task<'_, T>> = (0..sizes.heads).map(task).collect();
        let failure = Failure::default();
        let scratch = (scratch, self.part_len(sizes, threads));
        for_each_unit(threads, (&mut tasks, 1), scratch, |_, tasks, scratch| {
            for task in tasks {
                failure.keep(shared.backward(upstream, task, scratch));
            }
        });
        failure.into_result()
    }

    /// Clears the outputs: without keys or queries, there is nothing to sum.
    fn run_empty(&self, cx: &mut RunCx<'_>) -> Result<()> {
        for index in 0..cx.output_count() {
            if cx.wants(index) {
                cx.output(index)?.bytes_mut()?.fill(0);
            }
        }
        Ok(())
    }
}

/// The first error of any task.
#[derive(Default)]
struct Failure(Mutex<Option<Error>>);

impl Failure {
    fn keep(&self, result: Result<()>) {
        if let Err(error) = result {
            self.0.lock().get_or_insert(error);
        }
    }

    fn into_result(self) -> Result<()> {
        self.0.into_inner().map_or(Ok(()), Err)
    }
}

impl<T: Real + Float> Executable for TrainingAttention<T> {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let input = |index: usize| shapes.input(self.first + index);
        let sizes = Sizes::of(input(0), input(1), input(2))?;
        bytes_of::<T>(part_count(shapes.threads, sizes.heads) * self.part_len(sizes, shapes.threads))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let shared = Shared::new(cx, self)?;
        let workspace = scratch::<T>(cx.workspace()?)?;
        let Sizes { heads, queries, keys, .. } = shared.sizes;
        match self.is_backward() {
            _ if heads * queries * keys == 0 => self.run_empty(cx),
            false => self.run_forward(cx, &shared, workspace),
            true => self.run_backward(cx, &shared, workspace),
        }
    }
}
