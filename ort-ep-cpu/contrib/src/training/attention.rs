//! `TrainingAttention` and its gradient: their operands, mask and dropout.

use std::ops::Range;

use num_traits::Float;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_attention::{
    Attention, Compute, Elements, Gradients, HiddenKeys, Rows, ScoreMask, Scores, SdpaSizes, WeightMap,
    training_scratch_len,
};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_vector::random::{Dropout, dropout};
use ort_cpu_vector::simd::Isa;

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

struct TrainingAttention<T> {
    /// The input index of the queries. They come after the upstream gradient, if there is one.
    first: usize,
    fill: T,
    stream: i64,
    drops: bool,
}

fn make<T: Compute + Float>(cx: &mut CompileCx<'_>, first: usize) -> Result<Box<dyn Executable>> {
    Ok(Box::new(TrainingAttention::<T> {
        first,
        fill: T::from_f64(f64::from(cx.attrs().float("fill")?)),
        stream: cx.attrs().int("stream")?,
        drops: cx.node.dtype(first + 4).is_some(),
    }))
}

/// Returns the sizes of a run. All leading axes count as heads.
fn sizes_of(q: &[usize], k: &[usize], v: &[usize]) -> Result<SdpaSizes> {
    match (q, k, v) {
        (
            [heads @ .., queries, size],
            [key_heads @ .., keys, key_size],
            [value_heads @ .., rows, value_size],
        ) if heads == key_heads && heads == value_heads && size == key_size && keys == rows => {
            let (heads, queries) = (heads.iter().product(), *queries);
            let (keys, size, value_size) = (*keys, *size, *value_size);
            Ok(SdpaSizes { batch: 1, heads, key_heads: heads, queries, keys, size, value_size })
        }
        _ => Err(error!(InvalidArgument, "queries {q:?}, keys {k:?} and values {v:?} do not match")),
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
    /// The score of a key that a boolean mask does not keep.
    fill: T,
}

enum MaskValues<'a, T> {
    Added(&'a [T]),
    Kept(&'a [u8]),
}

impl<'a, T: Compute> Mask<'a, T> {
    fn new(view: TensorView<'a>, queries: &[usize], keys: usize, fill: T) -> Result<Mask<'a, T>> {
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
        Ok(Mask { values, heads: strides.into_iter().zip(full).collect(), query, key, fill })
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
}

impl<T: Compute> ScoreMask<T> for Mask<'_, T> {
    fn is_by_query(&self) -> bool {
        self.query != 0
    }

    /// Adds the mask to scores, or fills the scores that it does not keep.
    fn apply(&self, [_, head, query]: [usize; 3], keys: Range<usize>, scores: &mut [T]) {
        let place = self.row(head, query) + keys.start * self.key;
        match (&self.values, self.key) {
            (MaskValues::Added(values), 0) => {
                let added = values[place];
                scores.iter_mut().for_each(|score| *score = *score + added);
            }
            (MaskValues::Added(values), _) => {
                let added = &values[place..place + keys.len()];
                scores.iter_mut().zip(added).for_each(|(score, added)| *score = *score + *added);
            }
            (MaskValues::Kept(values), key) => fill_hidden(&values[place..], key, scores, self.fill),
        }
    }

    fn clear_gradients(&self, [_, head, query]: [usize; 3], gradients: &mut [T]) {
        if let MaskValues::Kept(values) = &self.values {
            fill_hidden(&values[self.row(head, query)..], self.key, gradients, T::ZERO);
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

/// The operands of a run.
struct Operands<'a, T> {
    inputs: [&'a [T]; 3],
    mask: Option<Mask<'a, T>>,
    dropout: Option<(Dropout, T)>,
    sizes: SdpaSizes,
}

impl<'a, T: Compute + Float> Operands<'a, T> {
    fn new(cx: &RunCx<'a>, node: &TrainingAttention<T>) -> Result<Operands<'a, T>> {
        let first = node.first;
        let [q, k, v] = [cx.input(first)?, cx.input(first + 1)?, cx.input(first + 2)?];
        let sizes = sizes_of(q.shape(), k.shape(), v.shape())?;
        let mask = cx.find_input(first + 3).map(|mask| Mask::new(mask, q.shape(), sizes.keys, node.fill));
        let dropout = if node.drops { node.dropout(cx)? } else { None };
        Ok(Operands {
            inputs: [q.as_slice()?, k.as_slice()?, v.as_slice()?],
            mask: mask.transpose()?,
            dropout,
            sizes,
        })
    }

    /// Calls `then` with the attention and what changes its weights.
    fn run(
        &self,
        then: impl FnOnce(&Attention<'_, T>, Option<&WeightMap<'_, T>>) -> Result<()>,
    ) -> Result<()> {
        let SdpaSizes { queries, keys, size, value_size, .. } = self.sizes;
        let rows = |which: usize, rows: usize, size: usize| Rows {
            elements: Elements::Full(self.inputs[which]),
            strides: [0, rows * size, size],
        };
        let attention = Attention {
            sizes: self.sizes,
            queries: Some(rows(0, queries, size)),
            keys: rows(1, keys, size),
            values: rows(2, keys, value_size),
            // Queries come scaled.
            scale: 1.0,
            softcap: 0.0,
            visible: &|_| 0..keys,
            mask: self.mask.as_ref().map(|mask| mask as &dyn ScoreMask<T>),
            sinks: None,
            hidden: HiddenKeys::ExcludedOrNan,
        };
        let drop = self.dropout.as_ref().map(|(rule, kept)| {
            move |[_, head, query]: [usize; 3], weights: &mut [T]| {
                let first = (head * queries + query) * keys;
                dropout(Isa::current(), rule, first as u64, *kept, weights);
            }
        });
        then(&attention, drop.as_ref().map(|drop| drop as &WeightMap<'_, T>))
    }
}

impl<T: Compute + Float> TrainingAttention<T> {
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

    fn run_forward(&self, cx: &mut RunCx<'_>, operands: &Operands<'_, T>, scratch: &mut [T]) -> Result<()> {
        let SdpaSizes { queries, value_size, .. } = operands.sizes;
        let (cpu, output) = (Cpu::with_threads(cx.threads()), cx.output(0)?.as_mut_slice::<T>()?);
        let strides = [output.len(), queries * value_size, value_size];
        operands.run(|attention, drop| attention.run(cpu, (output, strides), Scores::Trained(drop), scratch))
    }

    fn run_backward(&self, cx: &mut RunCx<'_>, operands: &Operands<'_, T>, scratch: &mut [T]) -> Result<()> {
        let (threads, upstream) = (cx.threads(), cx.input(0)?.as_slice::<T>()?);
        let mut wanted = |index: usize| match cx.wants(index) {
            true => cx.output(index)?.as_mut_slice::<T>().map(Some),
            false => Ok(None),
        };
        let to = Gradients { by_queries: wanted(0)?, by_keys: wanted(1)?, by_values: wanted(2)? };
        operands.run(|attention, drop| attention.gradients(threads, upstream, drop, to, scratch))
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

impl<T: Compute + Float> Executable for TrainingAttention<T> {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let input = |index: usize| shapes.input(self.first + index);
        let sizes = sizes_of(input(0), input(1), input(2))?;
        bytes_of::<T>(training_scratch_len::<T>(&sizes, shapes.threads, self.is_backward(), self.drops))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let operands = Operands::new(cx, self)?;
        let workspace = scratch::<T>(cx.workspace()?)?;
        let SdpaSizes { heads, queries, keys, .. } = operands.sizes;
        match self.is_backward() {
            _ if heads * queries * keys == 0 => self.run_empty(cx),
            false => self.run_forward(cx, &operands, workspace),
            true => self.run_backward(cx, &operands, workspace),
        }
    }
}
