//! The `Reduce` operators and `SumTo`.

use std::sync::OnceLock;

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ops::reduce::problem::{Reduction, reduced_axes};
use ort_gpu::reduce::{ReductionTypes, reduction_kernels};

use super::CudaKernel;
use super::rows::{SHORT_FLOATS, TeamRows, few_axes, suffix, teams};
use crate::launch::{Launch, OpCx, Operand};

const NUMBERS: TypeSet = SHORT_FLOATS.union(TypeSet::of(&[DType::I32, DType::I64]));

/// The kernels of the `Reduce` operators and `SumTo`.
pub(super) fn derived() -> &'static [CudaKernel] {
    static KERNELS: OnceLock<Vec<CudaKernel>> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let numbers = &[("T", NUMBERS)];
        let types = ReductionTypes { numbers, ordered: numbers, floats: &[("T", SHORT_FLOATS)] };
        let kernel = |def| CudaKernel::new(def, launches).with_workspace(workspace);
        reduction_kernels(types, few_axes).map(kernel).collect()
    })
}

/// Rows of at least this length are split into pieces if there are few of them.
const LONG: usize = 4096;
/// The length of a piece of a split row.
const PIECE: usize = 1024;
/// The number of blocks that keep a device busy.
const BLOCKS: usize = 1024;
/// Adjacent rows that a block handles.
const ABREAST: usize = 32;

/// Returns the reduction's number in `cu/reduce.cu`.
fn number_of(reduction: Reduction) -> usize {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Mean => 1,
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Prod => 4,
        Reduction::L1 => 5,
        Reduction::L2 => 6,
        Reduction::LogSum => 7,
        Reduction::SumSquare => 8,
        Reduction::LogSumExp => 9,
    }
}

/// Returns how many pieces to split each row into, if whole rows take this many blocks.
fn splits(reduction: Reduction, blocks: usize, len: usize) -> usize {
    let cuts = reduction != Reduction::LogSumExp && len >= LONG;
    if cuts { (len / PIECE).min(BLOCKS / blocks.max(1)).max(1) } else { 1 }
}

/// Reserves the partial results of all rows in the workspace.
fn pieces(cx: &OpCx<'_>, taken: &mut usize, rows: usize, splits: usize) -> Result<Operand> {
    let dtype = match cx.input(0)?.dtype {
        // Partial results keep the accumulator's precision.
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    };
    Ok(cx.workspace(taken, dtype, &[rows, splits]))
}

/// Sizes the workspace for adjacent rows, which are split into the most pieces. Whether rows are
/// adjacent depends on the axes, a host input that is not known yet.
fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let (x, y, reduction) = (cx.input(0)?, cx.output(0)?, Reduction::of(cx.op)?);
    let (rows, len) = (y.count(), x.count().checked_div(y.count()).unwrap_or(0));
    let mut taken = 0;
    match splits(reduction, rows.div_ceil(ABREAST), len) {
        1 => {}
        splits => drop(pieces(cx, &mut taken, rows, splits)?),
    }
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y, reduction) = (cx.input(0)?, cx.output(0)?, Reduction::of(cx.op)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let given = cx.find_ints(1)?.unwrap_or_default();
    let rows = TeamRows::new(&x.shape, &reduced_axes(cx.op, cx.attrs, &x.shape, &given)?);
    rows.check_results(y.count())?;
    let (fold, suffix) = (number_of(reduction), suffix(x.dtype)?);
    let blocks = if rows.in_columns() { rows.count.div_ceil(ABREAST) } else { rows.count };
    let splits = splits(reduction, blocks, rows.len);
    let pieces = match splits {
        1 => None,
        splits => Some(pieces(cx, &mut 0, rows.count, splits)?),
    };
    let launch = rows.launch("reduce", &format!("reduce_{suffix}"), splits)?;
    let launch = launch.tensor(x).tensor(y).find_tensor(pieces.as_ref());
    let mut launches = vec![rows.param(launch)?.uint(fold)?];
    if let Some(pieces) = &pieces {
        let join = teams(Launch::new("reduce", format!("join_pieces_{suffix}")), rows.count, 32, 1)?;
        let join = join.tensor(pieces).tensor(y).uint(rows.count)?.uint(splits)?;
        launches.push(join.uint(rows.len)?.uint(fold)?);
    }
    Ok(launches)
}
