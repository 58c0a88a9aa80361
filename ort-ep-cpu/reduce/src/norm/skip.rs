//! Residual addition fused with layer normalization, row by row.
//!
//! These are `SkipLayerNormalization` and `SkipSimplifiedLayerNormalization`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::{Binary, Operand, binary, binary_in_place};
use ort_cpu_vector::norm::RowNorm;
use ort_cpu_vector::simd::Isa;

const LAYER: KernelDef = KernelDef {
    domain: MICROSOFT,
    op: "SkipLayerNormalization",
    types: &[("T", TypeSet::of(&[DType::F32]))],
    in_place: &[(0, 0), (1, 0), (0, 3), (1, 3)],
    make: |cx| make(cx, true),
    ..KernelDef::BASE
};

const SIMPLIFIED: KernelDef =
    KernelDef { op: "SkipSimplifiedLayerNormalization", make: |cx| make(cx, false), ..LAYER };

const HALF: TypeSet = TypeSet::of(&[DType::F16, DType::BF16]);

cpu_kernels![
    LAYER,
    SIMPLIFIED,
    KernelDef { types: &[("T", HALF)], in_place: &[], make: |cx| via_f32(cx, |cx| make(cx, true)), ..LAYER },
    KernelDef {
        types: &[("T", HALF)],
        in_place: &[],
        make: |cx| via_f32(cx, |cx| make(cx, false)),
        ..SIMPLIFIED
    },
];

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 13;

struct Skip {
    epsilon: f32,
    /// Whether the mean is subtracted.
    centers: bool,
}

fn make(cx: &mut CompileCx<'_>, centers: bool) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Skip { epsilon: cx.attrs().float("epsilon")?, centers }))
}

/// The place of a row of input or skip.
#[derive(Clone, Copy)]
enum Side<'a> {
    /// Rows of its own, which repeat after the last.
    Rows(&'a [f32]),
    /// The memory of the result.
    InResult,
    /// The memory of the sum.
    InSum,
}

/// Scale, shift, and the bias of the sum.
#[derive(Clone, Copy)]
struct Parameters<'a> {
    gamma: &'a [f32],
    beta: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

/// Some rows of each output.
struct Rows<'a> {
    result: &'a mut [f32],
    sum: Option<&'a mut [f32]>,
    mean: Option<&'a mut [f32]>,
    factor: Option<&'a mut [f32]>,
}

impl Executable for Skip {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let shape = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?;
        let len = shape.last().copied().unwrap_or(0);
        let wants_sum = cx.wants(3);
        let side = |index: usize| -> Result<Side<'_>> {
            // Without an output for the sum, it is computed in the memory of the result.
            match (cx.in_place(0) == Some(index), cx.in_place(3) == Some(index)) {
                (true, _) if wants_sum => Ok(Side::InResult),
                (false, false) => Ok(Side::Rows(cx.input(index)?.as_slice()?)),
                _ => Ok(Side::InSum),
            }
        };
        let sides = [side(0)?, side(1)?];
        let parameter = |index: usize| cx.find_input(index).map(|view| view.as_slice::<f32>()).transpose();
        let (beta, bias) = if self.centers { (parameter(3)?, parameter(4)?) } else { (None, parameter(3)?) };
        let parameters = Parameters { gamma: cx.input(2)?.as_slice()?, beta, bias };
        let fits = |values: &[f32]| values.len() == len;
        ensure!(
            fits(parameters.gamma) && beta.is_none_or(fits) && bias.is_none_or(fits),
            InvalidArgument,
            "gamma, beta or bias does not have {len} values"
        );
        let threads = cx.threads();
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        if result.is_empty() {
            return Ok(());
        }
        let whole = |side: &Side<'_>| match side {
            Side::Rows(rows) => !rows.is_empty() && rows.len().is_multiple_of(len),
            Side::InResult | Side::InSum => true,
        };
        ensure!(sides.iter().all(whole), InvalidArgument, "input or skip is not made of rows of {len}");
        let [mean, factor, sum] = [output(cx, 1)?, output(cx, 2)?, output(cx, 3)?];
        // All outputs are cut alike, so a task owns the same rows of each.
        let at_once = (GRAIN / len).max(1);
        let mut parts = cut((result, sum, mean, factor), len, at_once);
        for_each_chunk_mut(threads, &mut parts, 1, |part, rows| {
            for rows in rows {
                self.normalize(sides, parameters, rows, (part * at_once, len));
            }
        });
        Ok(())
    }
}

/// Returns an output; none if the run does not need it.
fn output<'a>(cx: &mut RunCx<'a>, index: usize) -> Result<Option<&'a mut [f32]>> {
    cx.wants(index).then(|| cx.output(index)?.as_mut_slice()).transpose()
}

type Outputs<'a> = (&'a mut [f32], Option<&'a mut [f32]>, Option<&'a mut [f32]>, Option<&'a mut [f32]>);

/// Splits the outputs into parts of `at_once` rows of `len` values.
fn cut<'a>((result, sum, mean, factor): Outputs<'a>, len: usize, at_once: usize) -> SmallVec<[Rows<'a>; 4]> {
    let mut sum = sum.map(|sum| sum.chunks_mut(at_once * len));
    let mut mean = mean.map(|mean| mean.chunks_mut(at_once));
    let mut factor = factor.map(|factor| factor.chunks_mut(at_once));
    result
        .chunks_mut(at_once * len)
        .map(|result| Rows {
            result,
            sum: sum.as_mut().and_then(Iterator::next),
            mean: mean.as_mut().and_then(Iterator::next),
            factor: factor.as_mut().and_then(Iterator::next),
        })
        .collect()
}

impl Skip {
    /// Normalizes rows of `len` values, starting with row `first`.
    fn normalize(
        &self,
        sides: [Side<'_>; 2],
        parameters: Parameters<'_>,
        rows: &mut Rows<'_>,
        (first, len): (usize, usize),
    ) {
        let isa = Isa::current();
        let Parameters { gamma, beta, bias } = parameters;
        for (index, result) in rows.result.chunks_exact_mut(len).enumerate() {
            let row = |side| match side {
                // Skip may be broadcast over the batch, so its rows repeat.
                Side::Rows(rows) => Side::Rows(&rows[(first + index) * len % rows.len()..][..len]),
                other => other,
            };
            let sides = sides.map(row);
            let mut sum = rows.sum.as_mut().map(|sum| &mut sum[index * len..][..len]);
            match &mut sum {
                Some(sum) => add(isa, sides, Some(result), sum),
                // Without an output for the sum, it is normalized where it is.
                None => add(isa, sides, None, result),
            }
            let row = sum.as_deref_mut().unwrap_or(result);
            if let Some(bias) = bias {
                binary_in_place(isa, Binary::Add, row, Operand::Slice(bias));
            }
            let norm =
                RowNorm { centers: self.centers, epsilon: self.epsilon, scale: Some(gamma), bias: beta };
            let moments = match sum {
                Some(sum) => norm.apply(isa, sum, result),
                None => norm.apply_in_place(isa, result),
            };
            rows.mean.iter_mut().for_each(|mean| mean[index] = moments.mean);
            rows.factor.iter_mut().for_each(|factor| factor[index] = moments.inv_std_dev);
        }
    }
}

/// Computes `sum = a + b`. Either side may already be in `sum`, or in the row of the result.
fn add(isa: Isa, sides: [Side<'_>; 2], result: Option<&[f32]>, sum: &mut [f32]) {
    let read = |side| match side {
        Side::Rows(row) => Some(Operand::Slice(row)),
        Side::InResult => result.map(Operand::Slice),
        Side::InSum => None,
    };
    match sides.map(read) {
        [Some(a), Some(b)] => binary(isa, Binary::Add, a, b, sum),
        [Some(other), None] | [None, Some(other)] => binary_in_place(isa, Binary::Add, sum, other),
        // Both operands are in `sum`, so they are the same tensor.
        [None, None] => binary_in_place(isa, Binary::Mul, sum, Operand::Scalar(2.0)),
    }
}
