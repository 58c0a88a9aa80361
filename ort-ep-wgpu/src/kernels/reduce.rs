//! `Reduce` operators and `SumTo`: each row by a team of lanes; few long rows in two passes.

use std::sync::OnceLock;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::NodeView;
use ort_core::ops::reduce::problem::{Reduction, reduced_axes};
use ort_core::{Result, ensure, error};
use ort_gpu::reduce::{ReductionTypes, reduction_kernels};

use super::WgpuKernel;
use super::elementwise::FLOATS;
use super::rows::TeamRows;
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Element, MOST_AXES, Shader};

/// Without 64-bit integers, whose sums might exceed 32 bits.
const NUMBERS: TypeSet = FLOATS.union(TypeSet::of(&[DType::I32, DType::U32]));
const ORDERED: TypeSet =
    NUMBERS.union(TypeSet::of(&[DType::I64, DType::U64, DType::I8, DType::U8, DType::Bool]));
/// The length from which on rows are split, if there are few of them.
const LONG: usize = 8192;
/// The least length of a piece of a split row.
const PIECE: usize = 2048;
/// The number of pieces, over all rows, that keeps a device busy.
const PIECES: usize = 256;

/// The kernels of the `Reduce` operators and `SumTo`.
pub(super) fn derived() -> &'static [WgpuKernel] {
    static KERNELS: OnceLock<Vec<WgpuKernel>> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let types = ReductionTypes {
            numbers: &[("T", NUMBERS)],
            ordered: &[("T", ORDERED)],
            floats: &[("T", FLOATS)],
        };
        let kernel = |def| WgpuKernel { def, dispatches, workspace: Some(workspace) };
        reduction_kernels(types, when).map(kernel).collect()
    })
}

fn when(node: &NodeView<'_>) -> bool {
    let is_wide = matches!(node.dtype(0), Some(DType::I64 | DType::U64));
    let is_empty = node.fixed_shape(0).is_some_and(|shape| shape.contains(&0));
    // The extremes of no elements are those of the type, and shaders cannot write 64-bit ones.
    node.rank(0).is_some_and(|rank| rank <= MOST_AXES) && !(is_wide && is_empty)
}

/// A reduction as WGSL expressions: the initial value, the map of an element `v`, the combination
/// of `a` and `b`, and the final function of the whole `v`.
struct Fold {
    start: String,
    map: &'static str,
    join: &'static str,
    finish: &'static str,
}

fn fold_of(reduction: Reduction, dtype: DType) -> Result<Fold> {
    let is_float = Element::of(dtype)?.value == "f32";
    let zero = || "x_t(0)".to_owned();
    let fold = |start, map, join, finish| Ok(Fold { start, map, join, finish });
    match reduction {
        Reduction::Sum => fold(zero(), "v", "a + b", "v"),
        // The mean of no elements is 0 / 0.
        Reduction::Mean => fold(zero(), "v", "a + b", "select(v / f32(p.combined), nan(), p.combined == 0u)"),
        Reduction::Max => fold(least(dtype), "v", if is_float { "max_(a, b)" } else { "max(a, b)" }, "v"),
        Reduction::Min => fold(greatest(dtype), "v", if is_float { "min_(a, b)" } else { "min(a, b)" }, "v"),
        Reduction::Prod => fold("x_t(1)".to_owned(), "v", "a * b", "v"),
        Reduction::L1 => fold(zero(), "abs(v)", "a + b", "v"),
        Reduction::L2 => fold(zero(), "v * v", "a + b", "sqrt(v)"),
        Reduction::LogSum => fold(zero(), "v", "a + b", "log_(v)"),
        Reduction::SumSquare => fold(zero(), "v * v", "a + b", "v"),
        // Its shader is that of `log_sum_exp`.
        Reduction::LogSumExp => Err(error!(Fail, "a sum of exponentials is no single fold")),
    }
}

/// The least value of a type, as an expression.
pub(super) fn least(dtype: DType) -> String {
    let least = match dtype {
        DType::I64 | DType::I32 => "bitcast<i32>(0x80000000u)",
        DType::I8 => "-128i",
        DType::U64 | DType::U32 | DType::U8 | DType::Bool => "0u",
        _ => "-infinity()",
    };
    least.to_owned()
}

/// The greatest value of a type, as an expression.
pub(super) fn greatest(dtype: DType) -> String {
    let greatest = match dtype {
        DType::I64 | DType::I32 => "0x7fffffffi",
        DType::I8 => "127i",
        DType::U64 | DType::U32 => "0xffffffffu",
        DType::U8 => "255u",
        DType::Bool => "1u",
        _ => "infinity()",
    };
    greatest.to_owned()
}

/// Returns the number of pieces that each row is split into.
fn splits(reduction: Reduction, rows: usize, len: usize) -> usize {
    // A sum of exponentials sweeps a row twice in one dispatch, and has no partial results.
    let few = reduction != Reduction::LogSumExp && len >= LONG && rows > 0 && rows <= PIECES / 4;
    if few { (len / PIECE).min(PIECES / rows).max(1) } else { 1 }
}

/// The type of the partial results.
fn kept_type(dtype: DType) -> Result<DType> {
    Ok(match Element::of(dtype)?.value {
        "f32" => DType::F32,
        "i32" => DType::I32,
        _ => DType::U32,
    })
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let (x, y, reduction) = (cx.input(0)?, cx.output(0)?, Reduction::of(cx.op)?);
    // A result without elements has no rows to divide by.
    let (rows, len) = (y.count(), x.count().checked_div(y.count()).unwrap_or(0));
    let mut taken = 0;
    match splits(reduction, rows, len) {
        1 => Ok(0),
        splits => {
            cx.workspace(&mut taken, kept_type(x.dtype)?, &[rows, splits]);
            Ok(taken)
        }
    }
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y, reduction) = (cx.input(0)?, cx.output(0)?, Reduction::of(cx.op)?);
    let given = cx.find_ints(1)?.unwrap_or_default();
    let rows = TeamRows::new(&x.shape, &reduced_axes(cx.op, cx.attrs, &x.shape, &given)?);
    rows.check_results(y.count())?;
    let is_wide = matches!(x.dtype, DType::I64 | DType::U64);
    ensure!(!is_wide || rows.len > 0, NotImplemented, "extremes of no 64-bit integers");
    if reduction == Reduction::LogSumExp {
        return Ok(vec![log_sum_exp(cx, &rows, x, y)?]);
    }
    let fold = fold_of(reduction, x.dtype)?;
    let splits = splits(reduction, rows.count, rows.len);
    let whole = FoldPass { rows: &rows, splits, combined: rows.len };
    if splits == 1 {
        return Ok(vec![folded(cx, whole, &fold, x, y)?]);
    }
    // Two passes: reduce the pieces to partial results, then reduce those.
    let pieces = cx.workspace(&mut 0, kept_type(x.dtype)?, &[rows.count, splits]);
    // The first pass maps elements, the second finishes results.
    let first = Fold { finish: "v", start: fold.start.clone(), ..fold };
    let second = Fold { map: "v", ..fold };
    let partials = TeamRows::rows(rows.count, splits);
    Ok(vec![
        folded(cx, whole, &first, x, &pieces)?,
        folded(cx, FoldPass { rows: &partials, splits: 1, ..whole }, &second, &pieces, y)?,
    ])
}

/// The rows that a dispatch reduces, and the pieces of each.
#[derive(Clone, Copy)]
struct FoldPass<'a> {
    rows: &'a TeamRows,
    splits: usize,
    /// The number of elements in each final result.
    combined: usize,
}

/// Reduces the rows of `x`, each in pieces, to `y`.
fn folded(cx: &OpCx<'_>, pass: FoldPass<'_>, fold: &Fold, x: &Operand, y: &Operand) -> Result<Dispatch> {
    let (Fold { start, map, join, finish }, FoldPass { rows, splits, combined }) = (fold, pass);
    let code = format!(
        "fn join(a: x_t, b: x_t) -> x_t {{ return {join}; }}
        {tree}
        fn group(index: u32, lane: u32) {{
            let row = row_of(index, lane);
            let first = index % p.splits * p.chunk;
            let end = select(0u, min(first + p.chunk, p.length), row < p.rows);
            let begin = at_row(row);
            var all: x_t = {start};
            for (var r = first + part_of(lane); r < end; r += PARTS) {{
                let v = x(begin + at_along(r));
                all = join(all, {map});
            }}
            let v = whole(all, lane);
            if (row < p.rows && part_of(lane) == 0u) {{
                set_y(row * p.splits + index % p.splits, {finish});
            }}
        }}",
        tree = rows.tree("whole", "x_t", "join(a, b)"),
    );
    let shader = Shader::new(cx)
        .read("x", x)
        .write("y", y)
        .number("chunk", rows.len.div_ceil(splits))
        .number("combined", combined);
    rows.dispatch(shader, splits, &code)
}

/// Reduces a row in two sweeps: the maximum first, so that no exponential overflows.
fn log_sum_exp(cx: &OpCx<'_>, rows: &TeamRows, x: &Operand, y: &Operand) -> Result<Dispatch> {
    let code = format!(
        "{greatest}
        {total}
        fn group(index: u32, lane: u32) {{
            let row = row_of(index, lane);
            let end = select(0u, p.length, row < p.rows);
            let begin = at_row(row);
            var top = -infinity();
            for (var r = part_of(lane); r < end; r += PARTS) {{ top = max_(top, x(begin + at_along(r))); }}
            top = greatest(top, lane);
            let shift = select(top, 0.0, is_inf(top));
            var sum = 0.0;
            for (var r = part_of(lane); r < end; r += PARTS) {{
                sum += exp_(x(begin + at_along(r)) - shift);
            }}
            sum = total(sum, lane);
            if (row < p.rows && part_of(lane) == 0u) {{ set_y(row, log_(sum) + shift); }}
        }}",
        greatest = rows.tree("greatest", "f32", "max_(a, b)"),
        total = rows.tree("total", "f32", "a + b"),
    );
    rows.dispatch(Shader::new(cx).read("x", x).write("y", y), 1, &code)
}
