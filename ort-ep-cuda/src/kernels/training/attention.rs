//! `TrainingAttention` and its gradient. The forward pass is one launch. The backward pass is one
//! launch for the softmax statistics of each query, and one per gradient. No pass stores scores.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};

use super::step::suffix;
use crate::driver::TENSOR_CORES;
use crate::kernels::rows::SHORT_FLOATS;
use crate::kernels::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, THREADS, strides};

const MASKS: TypeSet = SHORT_FLOATS.union(TypeSet::of(&[DType::Bool]));

const FORWARD: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "TrainingAttention",
    types: &[("T", SHORT_FLOATS), ("M", MASKS)],
    when: |node| has_few_axes(node, 0),
    ..KernelDef::BASE
};

cuda_kernels![
    CudaKernel::new(FORWARD, |cx| AttentionProblem::new(cx, 0)?.forward(cx)),
    CudaKernel {
        workspace: Some(|cx| {
            let mut taken = 0;
            AttentionProblem::new(cx, 1)?.statistics(cx, &mut taken);
            Ok(taken)
        }),
        ..CudaKernel::new(
            KernelDef { op: "TrainingAttentionGrad", when: |node| has_few_axes(node, 1), ..FORWARD },
            |cx| AttentionProblem::new(cx, 1)?.backward(cx)
        )
    },
];

/// Whether the mask's rank is within the kernels' limit.
fn has_few_axes(node: &NodeView<'_>, first: usize) -> bool {
    node.rank(first).is_some_and(|rank| rank <= MOST_AXES)
}

/// Rows of a block, as in the kernels.
const ROWS: usize = 64;
/// The number of words in the kernels' structure `Attention`.
const WORDS: usize = 13 + 2 * MOST_AXES;
/// The largest head size of the tensor core kernels.
const MOST_OF_MMA: usize = 128;
/// The number of statistics per query.
const NUMBERS: usize = 3;

/// What a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttentionPass {
    Forward,
    Statistics,
    ByQueries,
    ByKeys,
    ByValues,
}

/// How a launch computes: on tensor cores or in register tiles, its entry, the result columns of a
/// block, and its threads.
struct AttentionDivision {
    kind: &'static str,
    entry: String,
    columns: usize,
    threads: u32,
}

/// One attention: its inputs and sizes.
struct AttentionProblem<'a> {
    /// The input index of the queries; keys and values follow.
    first: usize,
    q: &'a Operand,
    k: &'a Operand,
    v: &'a Operand,
    heads: usize,
    queries: usize,
    keys: usize,
    size: usize,
    value_size: usize,
}

impl<'a> AttentionProblem<'a> {
    fn new(cx: &'a OpCx<'_>, first: usize) -> Result<AttentionProblem<'a>> {
        let [q, k, v] = [cx.input(first)?, cx.input(first + 1)?, cx.input(first + 2)?];
        match (q.shape.as_slice(), k.shape.as_slice(), v.shape.as_slice()) {
            (
                [heads @ .., queries, size],
                [key_heads @ .., keys, key_size],
                [value_heads @ .., rows, value_size],
            ) if heads == key_heads && heads == value_heads && size == key_size && keys == rows => {
                let heads = heads.iter().copied().fold(1, usize::saturating_mul);
                let [queries, keys, size, value_size] = [*queries, *keys, *size, *value_size];
                Ok(AttentionProblem { first, q, k, v, heads, queries, keys, size, value_size })
            }
            (q, k, v) => {
                Err(error!(InvalidArgument, "queries {q:?}, keys {k:?} and values {v:?} do not match"))
            }
        }
    }

    /// Reserves the statistics of each query, which later launches read.
    fn statistics(&self, cx: &OpCx<'_>, taken: &mut usize) -> Operand {
        cx.workspace(taken, DType::F32, &[NUMBERS, self.heads, self.queries])
    }

    fn forward(&self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        self.launch(cx, AttentionPass::Forward, cx.find_output(0), None)
            .map(|launch| launch.into_iter().collect())
    }

    fn backward(&self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        let upstream = cx.input(0)?;
        ensure!(
            upstream.count() == self.heads * self.queries * self.value_size,
            InvalidArgument,
            "the upstream gradient has shape {:?}, which is not that of the output",
            upstream.shape
        );
        let statistics = self.statistics(cx, &mut 0);
        let mut launches = Vec::new();
        // All gradients read the softmax statistics, so these come first.
        launches.extend(self.launch(cx, AttentionPass::Statistics, None, Some(&statistics))?);
        for (index, mode) in
            [AttentionPass::ByQueries, AttentionPass::ByKeys, AttentionPass::ByValues].into_iter().enumerate()
        {
            if let Some(y) = cx.find_output(index) {
                launches.extend(self.launch(cx, mode, Some(y), Some(&statistics))?);
            }
        }
        Ok(launches)
    }

    /// Returns the launch of a mode, or `None` if its result is empty.
    fn launch(
        &self,
        cx: &OpCx<'_>,
        mode: AttentionPass,
        y: Option<&Operand>,
        statistics: Option<&Operand>,
    ) -> Result<Option<Launch>> {
        let rows = if matches!(mode, AttentionPass::ByKeys | AttentionPass::ByValues) {
            self.keys
        } else {
            self.queries
        };
        let width = match mode {
            AttentionPass::Forward | AttentionPass::ByValues => self.value_size,
            AttentionPass::ByQueries | AttentionPass::ByKeys => self.size,
            AttentionPass::Statistics => 1,
        };
        if self.heads == 0 || rows == 0 || width == 0 {
            return Ok(None);
        }
        let AttentionDivision { kind, entry, columns, threads } = self.cut(cx, mode, width)?;
        let input = |index: usize| cx.find_input(self.first + index);
        let upstream = if self.first == 0 { None } else { cx.find_input(0) };
        let family = format!("training_attention_{kind}");
        let launch = Launch::of_type(&family, suffix(self.q.dtype)?, entry)?
            .grid([self.heads.saturating_mul(rows.div_ceil(ROWS)), width.div_ceil(columns), 1])?
            .block([threads, 1, 1])
            .tensor(self.q)
            .tensor(self.k)
            .tensor(self.v)
            .find_tensor(upstream)
            .find_tensor(input(3))
            .find_tensor(input(4))
            .find_tensor(input(5))
            .find_tensor(input(6))
            .find_tensor(statistics)
            .find_tensor(y)
            .ints::<WORDS>(&self.words(cx)?)?;
        Ok(Some(launch))
    }

    /// Chooses the kernel for a mode and a result width.
    fn cut(&self, cx: &OpCx<'_>, mode: AttentionPass, width: usize) -> Result<AttentionDivision> {
        let (dtype, suffix) = (self.q.dtype, suffix(self.q.dtype)?);
        let name = match mode {
            AttentionPass::Forward => "attend",
            AttentionPass::Statistics => "statistics",
            AttentionPass::ByQueries => "by_queries",
            AttentionPass::ByKeys => "by_keys",
            AttentionPass::ByValues => "by_values",
        };
        let columns_of = |size: usize| if size <= 64 { 64 } else { 128 };
        let widest = self.size.max(self.value_size);
        if dtype != DType::F32 && cx.limits.capability >= TENSOR_CORES && widest <= MOST_OF_MMA {
            let entry = format!("{name}_cores_{}_{suffix}", columns_of(widest));
            return Ok(AttentionDivision { kind: "cores", entry, columns: MOST_OF_MMA, threads: 128 });
        }
        let columns = columns_of(width);
        let entry = match mode {
            AttentionPass::Statistics => format!("{name}_tiles_{suffix}"),
            _ => format!("{name}_tiles_{columns}_{suffix}"),
        };
        Ok(AttentionDivision { kind: "tiles", entry, columns, threads: THREADS })
    }

    /// Fills the kernels' structure `Attention`.
    fn words(&self, cx: &OpCx<'_>) -> Result<Vec<i64>> {
        let mask = cx.find_input(self.first + 3);
        let (sizes, steps) = match mask {
            Some(mask) => self.mask_steps(mask)?,
            None => (Vec::new(), vec![0; 2]),
        };
        let kind = match mask.map(|mask| mask.dtype) {
            None => -1,
            Some(DType::F32) => 0,
            Some(DType::F16) => 1,
            Some(DType::BF16) => 2,
            Some(DType::Bool) => 3,
            Some(other) => return Err(error!(NotImplemented, "a mask of {other} is not supported")),
        };
        let word = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let own = [self.heads, self.queries, self.keys, self.size, self.value_size];
        let mut words: Vec<i64> = own.into_iter().map(word).collect();
        let [outer @ .., of_query, of_key] = steps.as_slice() else {
            return Err(error!(Fail, "a mask without axes of queries and keys"));
        };
        words.extend([kind, word(outer.len()), word(*of_query), word(*of_key)]);
        words.push(i64::from(cx.find_input(self.first + 4).is_some()));
        let stream = cx.attrs.int("stream")?;
        words.push(i64::from(cx.attrs.float("fill")?.to_bits().cast_signed()));
        words.extend([i64::from(stream as i32), stream >> 32]);
        for list in [sizes.as_slice(), outer] {
            words.extend((0..MOST_AXES).map(|axis| list.get(axis).copied().map_or(0, word)));
        }
        Ok(words)
    }

    /// Returns the sizes of the leading axes, and the mask's strides along all axes; 0 where it
    /// broadcasts.
    fn mask_steps(&self, mask: &Operand) -> Result<(Vec<usize>, Vec<usize>)> {
        let mut full = self.q.shape.to_vec();
        full.pop();
        full.push(self.keys);
        let fits = mask.rank() <= full.len()
            && mask.shape.iter().rev().zip(full.iter().rev()).all(|(size, to)| *size == 1 || size == to);
        ensure!(
            fits,
            InvalidArgument,
            "the mask of shape {:?} does not broadcast to scores of shape {full:?}",
            mask.shape
        );
        let missing = full.len() - mask.rank();
        let own = mask.shape.iter().zip(strides(&mask.shape));
        let own = own.map(|(size, step)| if *size == 1 { 0 } else { step });
        let steps: Vec<usize> = std::iter::repeat_n(0, missing).chain(own).collect();
        full.truncate(full.len() - 2);
        Ok((full, steps))
    }
}
