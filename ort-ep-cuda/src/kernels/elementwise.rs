//! Elementwise operators: scalar formulas, casts and `Clip`, with broadcasting.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ir::{Attribute, Attributes};
use ort_core::spec::{BinaryFn, MICROSOFT, RUNTIME, Registry, ScalarExpr, UnaryFn};
use ort_core::{Result, ensure, error};

use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::formula::{Entry, Number, Place, Source, is_short_float, render};
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

const fn formula(op: &'static str) -> CudaKernel {
    typed(op, &[("T", FLOATS)])
}

const fn arithmetic(op: &'static str) -> CudaKernel {
    typed(op, &[("T", NUMBERS)])
}

const fn comparison(op: &'static str) -> CudaKernel {
    in_place(&[], typed(op, &[("T", ALL)]))
}

/// Sets which inputs the output may alias. If element sizes differ, it may alias none, even if both
/// tensors have the same bytes: a thread would overwrite elements that others still read.
const fn in_place(pairs: &'static [(usize, usize)], kernel: CudaKernel) -> CudaKernel {
    CudaKernel { def: KernelDef { in_place: pairs, ..kernel.def }, ..kernel }
}

const fn typed(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> CudaKernel {
    let def = KernelDef { op, types, in_place: &[(0, 0), (1, 0)], when: is_covered, ..KernelDef::BASE };
    CudaKernel::new(def, launches)
}

const fn of_domain(domain: &'static str, kernel: CudaKernel) -> CudaKernel {
    CudaKernel { def: KernelDef { domain, ..kernel.def }, ..kernel }
}

const fn cast(op: &'static str) -> CudaKernel {
    in_place(&[], typed(op, &[("T1", CASTABLE), ("T2", ALL)]))
}

cuda_kernels![
    arithmetic("Abs"),
    arithmetic("Neg"),
    arithmetic("Sign"),
    formula("Floor"),
    formula("Ceil"),
    formula("Round"),
    formula("Reciprocal"),
    formula("Sqrt"),
    formula("Exp"),
    formula("Log"),
    formula("Erf"),
    formula("Sin"),
    formula("Cos"),
    formula("Tan"),
    formula("Asin"),
    formula("Acos"),
    formula("Atan"),
    formula("Sinh"),
    formula("Cosh"),
    formula("Tanh"),
    formula("Asinh"),
    formula("Acosh"),
    formula("Atanh"),
    arithmetic("Relu"),
    formula("LeakyRelu"),
    formula("Elu"),
    formula("Selu"),
    formula("Celu"),
    formula("ThresholdedRelu"),
    formula("HardSigmoid"),
    formula("HardSwish"),
    formula("Sigmoid"),
    formula("Softplus"),
    formula("Softsign"),
    formula("Mish"),
    formula("Gelu"),
    formula("Swish"),
    formula("SwiGLU"),
    arithmetic("PRelu"),
    formula("Shrink"),
    arithmetic("Add"),
    arithmetic("Sub"),
    arithmetic("Mul"),
    arithmetic("Div"),
    arithmetic("Mod"),
    in_place(&[(0, 0)], typed("Pow", &[("T", NUMBERS), ("T1", NUMBERS)])),
    typed("Min", &[("T", ALL)]),
    typed("Max", &[("T", ALL)]),
    arithmetic("Sum"),
    formula("Mean"),
    comparison("Equal"),
    comparison("Less"),
    comparison("LessOrEqual"),
    comparison("Greater"),
    comparison("GreaterOrEqual"),
    comparison("And"),
    comparison("Or"),
    comparison("Xor"),
    comparison("Not"),
    in_place(&[], typed("IsNaN", &[("T1", FLOATS)])),
    in_place(&[], typed("IsInf", &[("T1", FLOATS)])),
    in_place(&[(1, 0), (2, 0)], typed("Where", &[("T", ALL)])),
    in_place(&[(0, 0)], arithmetic("Clip")),
    cast("Cast"),
    cast("CastLike"),
    of_domain(MICROSOFT, formula("BiasGelu")),
    of_domain(MICROSOFT, in_place(&[(0, 0)], formula("FastGelu"))),
    of_domain(MICROSOFT, in_place(&[(0, 0), (2, 0)], formula("BiasAdd"))),
    CudaKernel { launches: bias_split_gelu, ..of_domain(MICROSOFT, in_place(&[], formula("BiasSplitGelu"))) },
    of_domain(
        RUNTIME,
        in_place(
            &[(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)],
            formula("FusedElementwise")
        )
    ),
];

/// Whether the kernel supports the number of inputs and their known ranks.
fn is_covered(node: &NodeView<'_>) -> bool {
    let inputs = node.node.inputs.len();
    let mut ranks = (0..inputs).filter_map(|index| node.rank(index));
    inputs <= MOST_INPUTS && ranks.all(|rank| rank <= MOST_AXES)
}

/// Returns the formula of an operator that folds any number of inputs.
fn folded(op: &str, count: usize) -> Option<ScalarExpr> {
    let function = match op {
        "Min" => BinaryFn::Min,
        "Max" => BinaryFn::Max,
        "Sum" | "Mean" => BinaryFn::Add,
        _ => return None,
    };
    let terms = (0..count).map(ScalarExpr::Input);
    let whole = terms.reduce(|left, right| ScalarExpr::binary(function, left, right))?;
    Some(if op == "Mean" { whole / count as f64 } else { whole })
}

/// Returns the formula over the inputs that are present, in their order.
fn formula_of(cx: &OpCx<'_>, inputs: &[Operand]) -> Result<ScalarExpr> {
    let x = || ScalarExpr::Input(0);
    Ok(match cx.op {
        "Cast" | "CastLike" => x(),
        "Clip" => limited(cx),
        "IsInf" => infinite(cx.attrs)?,
        "FastGelu" => {
            let sum = if inputs.len() > 1 { x() + ScalarExpr::Input(1) } else { x() };
            replaced(&gelu("tanh")?, &sum)
        }
        "BiasAdd" => x() + ScalarExpr::Input(1) + ScalarExpr::Input(2),
        op => match folded(op, inputs.len()) {
            Some(folded) => folded,
            None => registered(op, cx.attrs)?,
        },
    })
}

/// Returns the formula that the operator registry has.
fn registered(op: &str, attrs: &Attributes) -> Result<ScalarExpr> {
    let registry = Registry::global()?;
    let spec = ["", MICROSOFT, RUNTIME].into_iter().find_map(|domain| registry.find(domain, op));
    let scalar = spec.and_then(|spec| spec.scalar);
    scalar.ok_or_else(|| error!(Fail, "{op} has no formula"))?(attrs)
}

/// Returns the formula of `Gelu`: exact (`none`) or with the `tanh` approximation.
fn gelu(approximate: &str) -> Result<ScalarExpr> {
    let spec = Registry::global()?.find("", "Gelu").ok_or_else(|| error!(Fail, "Gelu has no formula"))?;
    let given = vec![("approximate".to_owned(), Attribute::String(approximate.to_owned()))];
    registered("Gelu", &Attributes::new(spec, given)?)
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

/// Returns the formula of `Clip`. If the limits cross, the upper one wins; NaN stays NaN. Either
/// limit may be missing.
fn limited(cx: &OpCx<'_>) -> ScalarExpr {
    let mut value = ScalarExpr::Input(0);
    let mut next = 1;
    for index in [1, 2] {
        if cx.find_input(index).is_some() {
            let limit = ScalarExpr::Input(next);
            let beyond = match index {
                1 => value.clone().less(limit.clone()),
                _ => limit.clone().less(value.clone()),
            };
            value = ScalarExpr::select(beyond, limit, value);
            next += 1;
        }
    }
    value
}

fn infinite(attrs: &Attributes) -> Result<ScalarExpr> {
    let x = || ScalarExpr::Input(0);
    let equal = |value: f64| ScalarExpr::binary(BinaryFn::Equal, x(), value.into());
    Ok(match (attrs.flag("detect_negative")?, attrs.flag("detect_positive")?) {
        (true, true) => x().apply(UnaryFn::IsInf),
        (true, false) => equal(f64::NEG_INFINITY),
        (false, true) => equal(f64::INFINITY),
        // Neither sign is detected.
        (false, false) => ScalarExpr::Constant(0.0),
    })
}

/// Returns the inputs of the formula. The limits of `Clip` are scalars, whatever their shape.
fn operands(cx: &OpCx<'_>) -> Result<Vec<Operand>> {
    let given = if cx.op == "CastLike" { 1 } else { cx.inputs.len() };
    let mut operands = Vec::with_capacity(given);
    for (index, input) in cx.inputs.iter().take(given).enumerate() {
        let Some(input) = input else { continue };
        if cx.op != "Clip" || index == 0 {
            operands.push(input.clone());
            continue;
        }
        ensure!(input.count() == 1, InvalidArgument, "a limit of Clip has {} elements", input.count());
        operands.push(input.with_shape(&[]));
    }
    Ok(operands)
}

/// Returns the arithmetic type. Boolean conditions do not determine it, unless all inputs are
/// boolean.
fn number_of(op: &str, inputs: &[Operand]) -> Result<Number> {
    if let ("Pow", [base, exponent]) = (op, inputs) {
        return match (base.dtype, exponent.dtype) {
            (base, exponent) if base == exponent || FLOATS.contains(base) => Number::of(base),
            // The result truncates or wraps when it is stored.
            (_, exponent) if FLOATS.contains(exponent) => Ok(Number::F64),
            _ => Ok(Number::S64),
        };
    }
    let of_numbers = inputs.iter().find(|input| input.dtype != DType::Bool).or(inputs.first());
    of_numbers.map_or(Ok(Number::F32), |input| Number::of(input.dtype))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (inputs, y) = (operands(cx)?, cx.output(0)?);
    let shapes: Vec<&[usize]> = inputs.iter().map(|input| &*input.shape).collect();
    let walk = Walk::broadcast(&y.shape, &shapes)?;
    let (formula, number) = (formula_of(cx, &inputs)?, number_of(cx.op, &inputs)?);
    let inputs: Vec<(&Operand, usize)> = inputs.iter().map(|input| (input, 0)).collect();
    computed(&formula, number, (&walk, &inputs), y)
}

/// Computes `(x0 + b0) * gelu(x1 + b1)`, where `x0` and `x1` are the halves of each row and `b0`
/// and `b1` those of the bias.
fn bias_split_gelu(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, bias, y) = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
    let width = x.shape.last().copied().unwrap_or(1);
    let split = (width / 2).max(1);
    ensure!(bias.count() == width, InvalidArgument, "{} biases for rows of {width}", bias.count());
    let of_x = vec![width as i64, 1];
    let steps = [of_x.clone(), vec![0, 1], of_x, vec![0, 1]];
    let walk = Walk::new(&[y.count() / split, split], &steps);
    let [x0, x1, x2, x3] = [0, 1, 2, 3].map(ScalarExpr::Input);
    let formula = (x0 + x1) * replaced(&gelu("none")?, &(x2 + x3));
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
    let stepped = |source: &Source| matches!(source.place, Place::Steps { .. });
    if sources.iter().any(stepped) {
        launch = launch.uints::<MOST_AXES>(&walk.sizes)?;
    }
    for (steps, _) in walk.steps.iter().zip(&sources).filter(|(_, source)| stepped(source)) {
        launch = launch.ints::<MOST_AXES>(steps)?;
    }
    let threads = if four { count / 4 } else { count };
    Ok(vec![launch.threads(threads)?])
}

/// Returns how the elements of each input are addressed.
fn sources(walk: &Walk, inputs: &[(&Operand, usize)]) -> Result<Vec<Source>> {
    let same: Vec<i64> = strides(&walk.sizes).into_iter().map(|step| step as i64).collect();
    let mut sources = Vec::with_capacity(inputs.len());
    for ((input, start), steps) in inputs.iter().zip(&walk.steps) {
        let place = match steps.last().copied() {
            _ if *steps == same => Place::Same,
            _ if steps.iter().all(|step| *step == 0) => Place::One,
            Some(last @ (0 | 1)) => Place::Steps { last: last == 1 },
            last => return Err(error!(Fail, "a formula steps by {last:?} elements along the last axis")),
        };
        sources.push(Source { dtype: input.dtype, place, start: *start });
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use ort_core::ep::operand::Arg;

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
        let number = |a, b| number_of("Pow", &[of(a), of(b)]).unwrap();
        assert_eq!(number(DType::F16, DType::I64), Number::F32);
        assert_eq!(number(DType::I32, DType::F32), Number::F64);
        assert_eq!(number(DType::I32, DType::I64), Number::S64);
        assert_eq!(number(DType::I32, DType::I32), Number::S32);
    }

    #[test]
    fn every_operator_has_a_formula() {
        let sum = ScalarExpr::Input(0) + ScalarExpr::Input(1);
        assert_eq!(folded("Sum", 2), Some(sum));
        let by_formula: fn(&OpCx<'_>) -> Result<Vec<Launch>> = launches;
        let all = crate::kernels::all();
        for kernel in all.filter(|kernel| std::ptr::fn_addr_eq(kernel.launches, by_formula)) {
            let op = kernel.def.op;
            let own = ["Cast", "CastLike", "Clip", "IsInf", "FastGelu", "BiasAdd", "FusedElementwise"];
            if own.contains(&op) || folded(op, 2).is_some() {
                continue;
            }
            let registry = Registry::global().unwrap();
            let spec = ["", MICROSOFT].into_iter().find_map(|domain| registry.find(domain, op)).unwrap();
            assert!(spec.scalar.is_some(), "{op}");
        }
        assert!(gelu("tanh").unwrap().to_string().contains("tanh"));
    }
}
