//! Elementwise operators: scalar formulas, casts and `Clip`, with broadcasting.

use std::sync::OnceLock;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::{BinaryFn, MICROSOFT, RUNTIME, ScalarExpr, UnaryFn};
use ort_core::{Result, ensure, error};
use ort_gpu::formula::{FormulaTypes, formula_kernels};

use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::formula::{Entry, InputPlace, Number, Source, is_short_float, render};
use crate::launch::{Launch, OpCx, Operand, Walk, strides};

/// The types that formulas compute with.
pub(super) const FLOATS: TypeSet = TypeSet::FLOATS;
const NUMBERS: TypeSet = TypeSet::NUMERIC;
const ALL: TypeSet = TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool]));
/// The types that these kernels cast from. They do not cast to types with several elements per
/// byte.
const CASTABLE: TypeSet = ALL.union(TypeSet::of(&[DType::I4, DType::U4, DType::I2, DType::U2]));
/// The most inputs: the parameters of a kernel have 4096 bytes.
const MOST_INPUTS: usize = 32;
/// The least number of elements for which a thread computes four: with fewer, multiprocessors would
/// idle.
const LEAST_FOUR: usize = 1 << 16;

/// The kernels of all records with a formula.
pub(super) fn derived() -> &'static [CudaKernel] {
    static KERNELS: OnceLock<Vec<CudaKernel>> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let types = FormulaTypes {
            selection: &[(KernelDef::INPUTS, ALL)],
            integer: &[(KernelDef::INPUTS, NUMBERS)],
            float: &[(KernelDef::INPUTS, FLOATS)],
        };
        formula_kernels(types, is_covered).map(|def| CudaKernel::new(def, launches)).collect()
    })
}

const BASE: KernelDef = KernelDef { types: &[("T", FLOATS)], when: is_covered, ..KernelDef::BASE };
const BIAS: KernelDef = KernelDef { domain: MICROSOFT, ..BASE };
const CAST: KernelDef = KernelDef { types: &[("T1", CASTABLE), ("T2", ALL)], ..BASE };

// Formulas that depend on which inputs are present, or that mix types. If element sizes differ, the
// output may alias no input, even if both tensors have the same bytes: a thread would overwrite
// elements that others still read.
cuda_kernels![
    CudaKernel::new(
        KernelDef { op: "Pow", types: &[("T", NUMBERS), ("T1", NUMBERS)], in_place: &[(0, 0)], ..BASE },
        powers
    ),
    CudaKernel::new(KernelDef { op: "IsInf", types: &[("T1", FLOATS)], ..BASE }, infinite),
    CudaKernel::new(KernelDef { op: "Clip", types: &[("T", NUMBERS)], in_place: &[(0, 0)], ..BASE }, limited),
    CudaKernel::new(KernelDef { op: "Cast", ..CAST }, cast),
    CudaKernel::new(KernelDef { op: "CastLike", ..CAST }, cast),
    CudaKernel::new(KernelDef { op: "FastGelu", in_place: &[(0, 0)], ..BIAS }, fast_gelu),
    CudaKernel::new(KernelDef { op: "BiasAdd", in_place: &[(0, 0), (2, 0)], ..BIAS }, bias_add),
    CudaKernel::new(KernelDef { op: "BiasSplitGelu", ..BIAS }, bias_split_gelu),
    CudaKernel::new(
        KernelDef {
            domain: RUNTIME,
            op: "FusedElementwise",
            in_place: &[(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)],
            ..BASE
        },
        launches
    ),
];

/// Whether the kernel supports the number of inputs and their known ranks.
fn is_covered(node: &NodeView<'_>) -> bool {
    let inputs = node.node.inputs.len();
    let mut ranks = (0..inputs).filter_map(|index| node.rank(index));
    inputs <= MOST_INPUTS && ranks.all(|rank| rank <= MOST_AXES)
}

/// Substitutes a formula for the input of a unary formula.
pub(super) fn replaced(formula: &ScalarExpr, by: &ScalarExpr) -> ScalarExpr {
    let inner = |formula: &ScalarExpr| replaced(formula, by);
    match formula {
        ScalarExpr::Input(_) => by.clone(),
        ScalarExpr::Constant(value) => ScalarExpr::Constant(*value),
        ScalarExpr::Unary(function, x) => ScalarExpr::unary(*function, inner(x)),
        ScalarExpr::Binary(function, a, b) => ScalarExpr::binary(*function, inner(a), inner(b)),
        ScalarExpr::Select(a, b, c) => ScalarExpr::select(inner(a), inner(b), inner(c)),
    }
}

/// The formula of the operator's record.
fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let inputs = present(cx);
    over(cx, &cx.spec.formula(cx.attrs, inputs.len())?, &inputs)
}

fn powers(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let inputs = present(cx);
    in_numbers(cx, &cx.spec.formula(cx.attrs, inputs.len())?, number_of_power(&inputs)?, &inputs)
}

/// The conversion is that of storing another type.
fn cast(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    over(cx, &ScalarExpr::Input(0), std::slice::from_ref(cx.input(0)?))
}

/// `Clip`, whose limits are scalars, whatever their shape. If they cross, the upper one wins; NaN
/// stays NaN. Either limit may be missing.
fn limited(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (mut value, mut inputs) = (ScalarExpr::Input(0), vec![cx.input(0)?.clone()]);
    for index in [1, 2] {
        let Some(input) = cx.find_input(index) else { continue };
        ensure!(input.count() == 1, InvalidArgument, "a limit of Clip has {} elements", input.count());
        // Only present inputs are listed, so an upper limit alone is input 1.
        let limit = ScalarExpr::Input(inputs.len());
        let beyond = match index {
            1 => value.clone().less(limit.clone()),
            _ => limit.clone().less(value.clone()),
        };
        value = ScalarExpr::select(beyond, limit, value);
        // A limit of shape `[]` broadcasts, whatever shape the model gives it.
        inputs.push(input.with_shape(&[]));
    }
    over(cx, &value, &inputs)
}

fn infinite(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let x = || ScalarExpr::Input(0);
    let equal = |value: f64| ScalarExpr::binary(BinaryFn::Equal, x(), value.into());
    let formula = match (cx.attrs.flag("detect_negative")?, cx.attrs.flag("detect_positive")?) {
        (true, true) => x().apply(UnaryFn::IsInf),
        (true, false) => equal(f64::NEG_INFINITY),
        (false, true) => equal(f64::INFINITY),
        // Neither sign is detected.
        (false, false) => ScalarExpr::Constant(0.0),
    };
    let inputs = present(cx);
    over(cx, &formula, &inputs)
}

/// The `tanh` approximation of `Gelu`, of the input or of its sum with a bias.
fn fast_gelu(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (inputs, x) = (present(cx), ScalarExpr::Input(0));
    let sum = if inputs.len() > 1 { x + ScalarExpr::Input(1) } else { x };
    over(cx, &sum.gelu_tanh(), &inputs)
}

fn bias_add(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let [x, bias, skip] = [0, 1, 2].map(ScalarExpr::Input);
    let inputs = present(cx);
    over(cx, &(x + bias + skip), &inputs)
}

/// Returns the inputs that are present, which are those of the formula.
fn present(cx: &OpCx<'_>) -> Vec<Operand> {
    cx.inputs.iter().flatten().cloned().collect()
}

/// Returns the arithmetic type. Boolean conditions do not determine it, unless all inputs are
/// boolean.
fn number_of(inputs: &[Operand]) -> Result<Number> {
    let of_numbers = inputs.iter().find(|input| input.dtype != DType::Bool).or(inputs.first());
    of_numbers.map_or(Ok(Number::F32), |input| Number::of(input.dtype))
}

/// Returns the arithmetic type of a power. The result truncates or wraps when it is stored.
fn number_of_power(inputs: &[Operand]) -> Result<Number> {
    match inputs {
        [base, exponent] if base.dtype == exponent.dtype || FLOATS.contains(base.dtype) => {
            Number::of(base.dtype)
        }
        // An integer base to a fractional power is a fraction until it is stored.
        [_, exponent] if FLOATS.contains(exponent.dtype) => Ok(Number::F64),
        // As a signed number, an exponent from 2^63 on would be negative. Products wrap to the same
        // bits in both.
        [_, exponent] if exponent.dtype == DType::U64 => Ok(Number::U64),
        _ => Ok(Number::S64),
    }
}

/// Returns the launch of a formula over inputs that broadcast to the output.
fn over(cx: &OpCx<'_>, formula: &ScalarExpr, inputs: &[Operand]) -> Result<Vec<Launch>> {
    in_numbers(cx, formula, number_of(inputs)?, inputs)
}

fn in_numbers(
    cx: &OpCx<'_>,
    formula: &ScalarExpr,
    number: Number,
    inputs: &[Operand],
) -> Result<Vec<Launch>> {
    let y = cx.output(0)?;
    let shapes: Vec<&[usize]> = inputs.iter().map(|input| &*input.shape).collect();
    let walk = Walk::broadcast(&y.shape, &shapes)?;
    let inputs: Vec<(&Operand, usize)> = inputs.iter().map(|input| (input, 0)).collect();
    computed(formula, number, (&walk, &inputs), y)
}

/// Computes `(x0 + b0) * gelu(x1 + b1)`, where `x0` and `x1` are the halves of each row and `b0`
/// and `b1` those of the bias.
fn bias_split_gelu(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, bias, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let width = x.shape.last().copied().unwrap_or(1);
    let split = (width / 2).max(1);
    ensure!(bias.count() == width, InvalidArgument, "{} biases for rows of {width}", bias.count());
    // A row of `x` has both halves, so both step by the full width. The bias is the same for all
    // rows.
    let of_x = vec![width as i64, 1];
    let steps = [of_x.clone(), vec![0, 1], of_x, vec![0, 1]];
    let walk = Walk::new(&[y.count() / split, split], &steps);
    let [x0, x1, x2, x3] = [0, 1, 2, 3].map(ScalarExpr::Input);
    let formula = (x0 + x1) * (x2 + x3).gelu();
    let inputs = [(x, 0), (bias, 0), (x, split), (bias, split)];
    computed(&formula, Number::of(x.dtype)?, (&walk, &inputs), y)
}

/// Returns the launch of a formula over the walk of the result. Each input starts at the given
/// element.
pub(super) fn computed(
    formula: &ScalarExpr,
    number: Number,
    (walk, inputs): (&Walk, &[(&Operand, usize)]),
    y: &Operand,
) -> Result<Vec<Launch>> {
    let count = y.count();
    if count == 0 {
        return Ok(Vec::new());
    }
    let sources = sources(walk, inputs)?;
    let run = walk.sizes.last().copied().unwrap_or(1);
    // An input with stride 0 along the last axis is one scalar load, so its alignment does not
    // matter.
    let dense = walk.steps.iter().filter(|steps| steps.last() == Some(&1));
    let mut outer = dense.flat_map(|steps| steps.split_last().map_or(&[][..], |(_, outer)| outer));
    // Four adjacent results need four adjacent elements of each dense input, so all outer strides
    // must be multiples of four.
    let four = count >= LEAST_FOUR
        && run % 4 == 0
        && is_short_float(y.dtype)
        && inputs.iter().all(|(input, _)| is_short_float(input.dtype))
        && outer.all(|step| step % 4 == 0);
    let rank = walk.sizes.len();
    let text = render(&Entry { formula, number, inputs: &sources, output: y.dtype, rank, four })?;
    let mut launch = Launch::rendered(text, "elementwise");
    for (input, _) in inputs {
        launch = launch.tensor(input);
    }
    launch = launch.tensor(y).uint(count)?;
    let stepped = |source: &Source| matches!(source.place, InputPlace::Steps { .. });
    if sources.iter().any(stepped) {
        launch = launch.uints::<MOST_AXES>(&walk.sizes)?;
    }
    for (steps, _) in walk.steps.iter().zip(&sources).filter(|(_, source)| stepped(source)) {
        launch = launch.ints::<MOST_AXES>(steps)?;
    }
    // Four elements of a thread lie on the last axis, so the count is a multiple of four here.
    let threads = if four { count / 4 } else { count };
    Ok(vec![launch.threads(threads)?])
}

/// Returns how the elements of each input are addressed.
fn sources(walk: &Walk, inputs: &[(&Operand, usize)]) -> Result<Vec<Source>> {
    let same: Vec<i64> = strides(&walk.sizes).into_iter().map(|step| step as i64).collect();
    let mut sources = Vec::with_capacity(inputs.len());
    for ((input, start), steps) in inputs.iter().zip(&walk.steps) {
        let place = match steps.last().copied() {
            _ if *steps == same => InputPlace::Same,
            _ if steps.iter().all(|step| *step == 0) => InputPlace::One,
            Some(last @ (0 | 1)) => InputPlace::Steps { last: last == 1 },
            last => return Err(error!(Fail, "a formula steps by {last:?} elements along the last axis")),
        };
        sources.push(Source { dtype: input.dtype, place, start: *start });
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use ort_gpu::Arg;

    use super::*;
    use crate::launch::Param;

    fn tensor(arg: Arg, dtype: DType, shape: &[usize]) -> Operand {
        Operand { arg, dtype, shape: shape.into() }
    }

    fn run(formula: &str, shapes: &[&[usize]], y: &[usize], dtype: DType) -> Vec<Launch> {
        let inputs: Vec<Operand> =
            shapes.iter().enumerate().map(|(index, shape)| tensor(Arg::Input(index), dtype, shape)).collect();
        let walk = Walk::broadcast(y, shapes).unwrap();
        let inputs: Vec<(&Operand, usize)> = inputs.iter().map(|input| (input, 0)).collect();
        let y = tensor(Arg::Output(0), dtype, y);
        computed(&formula.parse().unwrap(), Number::of(dtype).unwrap(), (&walk, &inputs), &y).unwrap()
    }

    #[test]
    fn what_is_walked_alike_has_no_steps() {
        let launches = run("add(x0, x1)", &[&[2, 3], &[]], &[2, 3], DType::I64);
        let params = launches.first().map_or(0, |launch| launch.params.len());
        assert_eq!(params, 4, "two inputs, the result, the count");
        assert!(run("add(x0, x1)", &[&[0, 3], &[3]], &[0, 3], DType::F32).is_empty());
    }

    #[test]
    fn long_rows_are_computed_by_fours() {
        let launches = run("add(x0, x1)", &[&[512, 1024], &[1024]], &[512, 1024], DType::F16);
        let [launch] = launches.as_slice() else { panic!("{launches:?}") };
        assert_eq!((launch.grid, launch.params.len()), ([512, 1, 1], 6));
        assert!(matches!(launch.params.last(), Some(Param::Bytes(bytes)) if bytes.len() == 32));
        let launches = run("add(x0, x1)", &[&[512, 1023], &[1023]], &[512, 1023], DType::F16);
        assert_eq!(launches.first().map(|launch| launch.grid), Some([2046, 1, 1]));
    }

    #[test]
    fn powers_of_mixed_types() {
        let of = |dtype| tensor(Arg::Input(0), dtype, &[]);
        let number = |a, b| number_of_power(&[of(a), of(b)]).unwrap();
        assert_eq!(number(DType::F16, DType::I64), Number::F32);
        assert_eq!(number(DType::I32, DType::F32), Number::F64);
        assert_eq!(number(DType::I32, DType::I64), Number::S64);
        assert_eq!(number(DType::I32, DType::U32), Number::S64);
        assert_eq!(number(DType::I64, DType::U64), Number::U64);
        assert_eq!(number(DType::I32, DType::I32), Number::S32);
    }
}
