//! `Reduce` operators and `SumTo`: each line by a team of lanes; few long lines in two passes.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::reduce::problem::reduced_axes;
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::lines::Lines;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Element, MOST_AXES, Shader};

/// Without 64-bit integers, whose sums might exceed 32 bits.
const NUMBERS: TypeSet = FLOATS.union(TypeSet::of(&[DType::I32, DType::U32]));
const ORDERED: TypeSet =
    NUMBERS.union(TypeSet::of(&[DType::I64, DType::U64, DType::I8, DType::U8, DType::Bool]));
/// The length from which on lines are split, if there are few of them.
const LONG: usize = 8192;
/// The least length of a piece of a split line.
const PIECE: usize = 2048;
/// The number of pieces, over all lines, that keeps a device busy.
const PIECES: usize = 256;

const fn reduction(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> WgpuKernel {
    let def = KernelDef { op, types, host_inputs: &[1], when, ..KernelDef::BASE };
    WgpuKernel { def, dispatches, workspace: Some(workspace) }
}

wgpu_kernels![
    reduction("ReduceSum", &[("T", NUMBERS)]),
    reduction("ReduceMean", &[("T", FLOATS)]),
    reduction("ReduceMax", &[("T", ORDERED)]),
    reduction("ReduceMin", &[("T", ORDERED)]),
    reduction("ReduceProd", &[("T", NUMBERS)]),
    reduction("ReduceL1", &[("T", NUMBERS)]),
    reduction("ReduceL2", &[("T", FLOATS)]),
    reduction("ReduceLogSum", &[("T", FLOATS)]),
    reduction("ReduceLogSumExp", &[("T", FLOATS)]),
    reduction("ReduceSumSquare", &[("T", NUMBERS)]),
    {
        let sum = reduction("SumTo", &[("T", FLOATS)]);
        WgpuKernel { def: KernelDef { domain: RUNTIME, ..sum.def }, ..sum }
    },
];

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

fn fold_of(op: &str, dtype: DType) -> Result<Fold> {
    let is_float = Element::of(dtype)?.value == "f32";
    let zero = || "x_t(0)".to_owned();
    let fold = |start, map, join, finish| Ok(Fold { start, map, join, finish });
    match op {
        "ReduceSum" | "SumTo" => fold(zero(), "v", "a + b", "v"),
        "ReduceMean" => fold(zero(), "v", "a + b", "select(v / f32(p.combined), nan(), p.combined == 0u)"),
        "ReduceMax" => fold(least(dtype), "v", if is_float { "max_(a, b)" } else { "max(a, b)" }, "v"),
        "ReduceMin" => fold(greatest(dtype), "v", if is_float { "min_(a, b)" } else { "min(a, b)" }, "v"),
        "ReduceProd" => fold("x_t(1)".to_owned(), "v", "a * b", "v"),
        "ReduceL1" => fold(zero(), "abs(v)", "a + b", "v"),
        "ReduceL2" => fold(zero(), "v * v", "a + b", "sqrt(v)"),
        "ReduceLogSum" => fold(zero(), "v", "a + b", "log_(v)"),
        "ReduceSumSquare" => fold(zero(), "v * v", "a + b", "v"),
        _ => Err(error!(Fail, "{op} is not a reduction")),
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

/// Returns the number of pieces that each line is split into.
fn splits(op: &str, lines: usize, len: usize) -> usize {
    // `ReduceLogSumExp` sweeps a line twice in one dispatch, and has no partial results.
    let few = op != "ReduceLogSumExp" && len >= LONG && lines > 0 && lines <= PIECES / 4;
    if few { (len / PIECE).min(PIECES / lines).max(1) } else { 1 }
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
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (lines, len) = (y.count(), x.count().checked_div(y.count()).unwrap_or(0));
    let mut taken = 0;
    match splits(cx.op, lines, len) {
        1 => Ok(0),
        splits => {
            cx.workspace(&mut taken, kept_type(x.dtype)?, &[lines, splits]);
            Ok(taken)
        }
    }
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let given = cx.find_ints(1)?.unwrap_or_default();
    let lines = Lines::new(&x.shape, &reduced_axes(cx.op, cx.attrs, &x.shape, &given)?);
    lines.check_results(y.count())?;
    let is_wide = matches!(x.dtype, DType::I64 | DType::U64);
    ensure!(!is_wide || lines.len > 0, NotImplemented, "extremes of no 64-bit integers");
    if cx.op == "ReduceLogSumExp" {
        return Ok(vec![log_sum_exp(cx, &lines, x, y)?]);
    }
    let fold = fold_of(cx.op, x.dtype)?;
    let splits = splits(cx.op, lines.count, lines.len);
    let combined = lines.len;
    if splits == 1 {
        return Ok(vec![folded(cx, (&lines, 1, combined), &fold, x, y)?]);
    }
    // Two passes: reduce the pieces to partial results, then reduce those.
    let pieces = cx.workspace(&mut 0, kept_type(x.dtype)?, &[lines.count, splits]);
    let first = Fold { finish: "v", start: fold.start.clone(), ..fold };
    let second = Fold { map: "v", ..fold };
    let rows = Lines::rows(lines.count, splits);
    Ok(vec![
        folded(cx, (&lines, splits, combined), &first, x, &pieces)?,
        folded(cx, (&rows, 1, combined), &second, &pieces, y)?,
    ])
}

/// Reduces the lines of `x`, each in `splits` pieces, to `y`. `combined` is the number of elements
/// in each final result.
fn folded(
    cx: &OpCx<'_>,
    (lines, splits, combined): (&Lines, usize, usize),
    fold: &Fold,
    x: &Operand,
    y: &Operand,
) -> Result<Dispatch> {
    let Fold { start, map, join, finish } = fold;
    let code = format!(
        "fn join(a: x_t, b: x_t) -> x_t {{ return {join}; }}
        {tree}
        fn group(index: u32, lane: u32) {{
            let line = line_of(index, lane);
            let first = index % p.splits * p.chunk;
            let end = select(0u, min(first + p.chunk, p.length), line < p.lines);
            let begin = at_line(line);
            var all: x_t = {start};
            for (var r = first + part_of(lane); r < end; r += PARTS) {{
                let v = x(begin + at_along(r));
                all = join(all, {map});
            }}
            let v = whole(all, lane);
            if (line < p.lines && part_of(lane) == 0u) {{
                set_y(line * p.splits + index % p.splits, {finish});
            }}
        }}",
        tree = lines.tree("whole", "x_t", "join(a, b)"),
    );
    let shader = Shader::new(cx)
        .read("x", x)
        .write("y", y)
        .number("chunk", lines.len.div_ceil(splits))
        .number("combined", combined);
    lines.dispatch(shader, splits, &code)
}

/// Reduces a line in two sweeps: the maximum first, so that no exponential overflows.
fn log_sum_exp(cx: &OpCx<'_>, lines: &Lines, x: &Operand, y: &Operand) -> Result<Dispatch> {
    let code = format!(
        "{greatest}
        {total}
        fn group(index: u32, lane: u32) {{
            let line = line_of(index, lane);
            let end = select(0u, p.length, line < p.lines);
            let begin = at_line(line);
            var top = -infinity();
            for (var r = part_of(lane); r < end; r += PARTS) {{ top = max_(top, x(begin + at_along(r))); }}
            top = greatest(top, lane);
            let shift = select(top, 0.0, is_inf(top));
            var sum = 0.0;
            for (var r = part_of(lane); r < end; r += PARTS) {{
                sum += exp_(x(begin + at_along(r)) - shift);
            }}
            sum = total(sum, lane);
            if (line < p.lines && part_of(lane) == 0u) {{ set_y(line, log_(sum) + shift); }}
        }}",
        greatest = lines.tree("greatest", "f32", "max_(a, b)"),
        total = lines.tree("total", "f32", "a + b"),
    );
    lines.dispatch(Shader::new(cx).read("x", x).write("y", y), 1, &code)
}
