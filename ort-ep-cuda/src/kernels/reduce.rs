//! The `Reduce` operators and `SumTo`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::reduce::problem::reduced_axes;
use ort_core::spec::RUNTIME;
use ort_core::{Result, error};

use super::lines::{Lines, SHORT_FLOATS, few_axes, suffix, teams};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const NUMBERS: TypeSet = SHORT_FLOATS.union(TypeSet::of(&[DType::I32, DType::I64]));

const fn reduction(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> CudaKernel {
    let def = KernelDef { op, types, host_inputs: &[1], when: few_axes, ..KernelDef::BASE };
    CudaKernel { workspace: Some(workspace), ..CudaKernel::new(def, launches) }
}

cuda_kernels![
    reduction("ReduceSum", &[("T", NUMBERS)]),
    reduction("ReduceMean", &[("T", SHORT_FLOATS)]),
    reduction("ReduceMax", &[("T", NUMBERS)]),
    reduction("ReduceMin", &[("T", NUMBERS)]),
    reduction("ReduceProd", &[("T", NUMBERS)]),
    reduction("ReduceL1", &[("T", NUMBERS)]),
    reduction("ReduceL2", &[("T", SHORT_FLOATS)]),
    reduction("ReduceLogSum", &[("T", SHORT_FLOATS)]),
    reduction("ReduceLogSumExp", &[("T", SHORT_FLOATS)]),
    reduction("ReduceSumSquare", &[("T", NUMBERS)]),
    {
        let sum = reduction("SumTo", &[("T", SHORT_FLOATS)]);
        CudaKernel { def: KernelDef { domain: RUNTIME, ..sum.def }, ..sum }
    },
];

/// Lines of at least this length are split into pieces if there are few of them.
const LONG: usize = 4096;
/// The length of a piece of a split line.
const PIECE: usize = 1024;
/// The number of blocks that keep a device busy.
const BLOCKS: usize = 1024;
/// Adjacent lines that a block handles.
const ABREAST: usize = 32;

/// Returns the reduction's number in `cu/reduce.cu`.
fn fold_of(op: &str) -> Result<usize> {
    Ok(match op {
        "ReduceSum" | "SumTo" => 0,
        "ReduceMean" => 1,
        "ReduceMax" => 2,
        "ReduceMin" => 3,
        "ReduceProd" => 4,
        "ReduceL1" => 5,
        "ReduceL2" => 6,
        "ReduceLogSum" => 7,
        "ReduceSumSquare" => 8,
        "ReduceLogSumExp" => 9,
        _ => return Err(error!(Fail, "{op} is not a reduction")),
    })
}

/// Returns how many pieces to split each line into, if whole lines take this many blocks.
fn splits(op: &str, blocks: usize, len: usize) -> usize {
    let cuts = op != "ReduceLogSumExp" && len >= LONG;
    if cuts { (len / PIECE).min(BLOCKS / blocks.max(1)).max(1) } else { 1 }
}

/// Reserves the partial results of all lines in the workspace.
fn pieces(cx: &OpCx<'_>, taken: &mut usize, lines: usize, splits: usize) -> Result<Operand> {
    let dtype = match cx.input(0)?.dtype {
        // Partial results keep the accumulator's precision.
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    };
    Ok(cx.workspace(taken, dtype, &[lines, splits]))
}

/// Sizes the workspace for adjacent lines, which are split into the most pieces. Whether lines are
/// adjacent depends on the axes, a host input that is not known yet.
fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (lines, len) = (y.count(), x.count().checked_div(y.count()).unwrap_or(0));
    let mut taken = 0;
    match splits(cx.op, lines.div_ceil(ABREAST), len) {
        1 => {}
        splits => drop(pieces(cx, &mut taken, lines, splits)?),
    }
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let given = cx.find_ints(1)?.unwrap_or_default();
    let lines = Lines::new(&x.shape, &reduced_axes(cx.op, cx.attrs, &x.shape, &given)?);
    lines.check_results(y.count())?;
    let (fold, suffix) = (fold_of(cx.op)?, suffix(x.dtype)?);
    let blocks = if lines.in_columns() { lines.count.div_ceil(ABREAST) } else { lines.count };
    let splits = splits(cx.op, blocks, lines.len);
    let pieces = match splits {
        1 => None,
        splits => Some(pieces(cx, &mut 0, lines.count, splits)?),
    };
    let launch = lines.launch("reduce", &format!("reduce_{suffix}"), splits)?;
    let launch = launch.tensor(x).tensor(y).find_tensor(pieces.as_ref());
    let mut launches = vec![lines.param(launch)?.uint(fold)?];
    if let Some(pieces) = &pieces {
        let join = teams(Launch::new("reduce", format!("join_pieces_{suffix}")), lines.count, 32, 1)?;
        let join = join.tensor(pieces).tensor(y).uint(lines.count)?.uint(splits)?;
        launches.push(join.uint(lines.len)?.uint(fold)?);
    }
    Ok(launches)
}
