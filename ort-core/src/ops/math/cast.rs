//! Type conversions: `Cast`, `CastLike` and `BitCast`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{
    AttrKind, AttrSpec, Draft, Grad, GradCx, InferCx, OP, OpSpec, SymTensor, Traits, Upgrade, attr, one, var,
};
use crate::{Result, ensure, error};

const WITHOUT_COMPLEX: TypeSet = TypeSet::ALL_TENSOR_IR13.difference(TypeSet::COMPLEX);
const CASTABLE: TypeSet = WITHOUT_COMPLEX.union(TypeSet::of(&[DType::F6E2M3, DType::F6E3M2]));
const REINTERPRETABLE: TypeSet = TypeSet::ALL_TENSOR_IR13.difference(TypeSet::of(&[DType::String]));

const SATURATE: AttrSpec = attr::int("saturate", 1);
const ROUND_MODE: AttrSpec = attr::string("round_mode", "up");
const TO: AttrSpec = attr::required("to", AttrKind::Int);

static CAST: OpSpec = OpSpec {
    name: "Cast",
    since: 28,
    inputs: &[one("input", "T1")],
    outputs: &[one("output", "T2")],
    types: &[var("T1", CASTABLE), var("T2", CASTABLE)],
    attrs: &[ROUND_MODE, SATURATE, TO],
    traits: Traits::ELEMENTWISE,
    infer: infer_cast,
    upgrades: &[Upgrade { before: 6, apply: name_to_code }],
    grad: Grad::Rule(gradient_of_cast),
    ..OP
};

static CAST_LIKE: OpSpec = OpSpec {
    name: "CastLike",
    since: 25,
    first: 15,
    inputs: &[one("input", "T1"), one("target_type", "T2")],
    outputs: &[one("output", "T2")],
    types: &[var("T1", WITHOUT_COMPLEX), var("T2", WITHOUT_COMPLEX)],
    attrs: &[ROUND_MODE, SATURATE],
    traits: Traits::ELEMENTWISE,
    infer: infer_cast_like,
    lower: Some(lower_cast_like),
    grad: Grad::Rule(gradient_of_cast),
    ..OP
};

static BIT_CAST: OpSpec = OpSpec {
    name: "BitCast",
    grad: Grad::None("its output is the same bits as another type"),
    since: 26,
    first: 26,
    inputs: &[one("input", "T1")],
    outputs: &[one("output", "T2")],
    types: &[var("T1", REINTERPRETABLE), var("T2", REINTERPRETABLE)],
    attrs: &[TO],
    traits: Traits::ELEMENTWISE,
    infer: infer_bit_cast,
    ..OP
};

ops![CAST, CAST_LIKE, BIT_CAST];

/// Returns the type that the attribute `to` names, which must be among `allowed`.
fn target(cx: &InferCx<'_>, allowed: TypeSet) -> Result<DType> {
    let code = cx.attrs.int("to")?;
    i32::try_from(code).ok().and_then(DType::from_onnx).filter(|dtype| allowed.contains(*dtype)).ok_or_else(
        || {
            error!(InvalidGraph, "attribute 'to' is {code}, which is not a supported type")
                .help("it is one of TensorProto.DataType: 1 for float, 7 for int64 ...")
        },
    )
}

fn infer_cast(cx: &mut InferCx<'_>) -> Result<()> {
    let to = target(cx, CASTABLE)?;
    set_converted(cx, to)
}

fn infer_cast_like(cx: &mut InferCx<'_>) -> Result<()> {
    match cx.dtype(1) {
        Ok(to) => set_converted(cx, to),
        // Without the type of `target_type`, the output's type stays open.
        Err(_) => Ok(()),
    }
}

/// Infers an output of type `to`, with the symbolic elements of the input if the conversion keeps
/// them known.
fn set_converted(cx: &mut InferCx<'_>, to: DType) -> Result<()> {
    let mode = cx.attrs.string("round_mode")?;
    ensure!(
        matches!(mode, "up" | "down" | "nearest"),
        InvalidGraph,
        "the round_mode is '{mode}', expected up, down or nearest"
    );
    cx.set(0, to, cx.shape(0).map(<[_]>::to_vec));
    let Some(from) = cx.symbolic(0) else { return Ok(()) };
    let Some(elements) = from.elements.iter().map(|element| convert(element, to)).collect() else {
        return Ok(());
    };
    cx.set_symbolic(0, SymTensor::new(&from.shape, elements)?);
    Ok(())
}

/// Converts a symbolic element to another type. `None` if its value is then unknown.
fn convert(element: &Dim, to: DType) -> Option<Dim> {
    match (to, element.as_constant()) {
        (DType::I64, _) => Some(element.clone()),
        // The standard has out-of-range integers lose their high bits, in two's complement.
        (DType::I32, Some(value)) => Some(Dim::constant(i64::from(value as i32))),
        // A symbolic size is taken to fit 32 bits, because an int32 tensor could not hold a larger
        // one either.
        (DType::I32, None) => Some(element.clone()),
        (DType::Bool, Some(value)) => Some(Dim::constant(i64::from(value != 0))),
        (DType::Bool, None) => element.is_known_positive().then(|| Dim::constant(1)),
        // Inference follows integers and booleans only, see `SymTensor::follows`.
        _ => None,
    }
}

/// Decomposes `CastLike` into `Cast` to the second input's type.
fn lower_cast_like(draft: &mut Draft<'_>) -> Result<()> {
    let (input, to) = (draft.required(0)?, draft.dtype(1)?);
    let mut attrs = vec![("to", Attribute::Int(i64::from(to.onnx_code())))];
    for name in ["saturate", "round_mode"] {
        attrs.extend(draft.attr(name).cloned().map(|value| (name, value)));
    }
    draft.become_op("Cast", &[input], &attrs);
    Ok(())
}

/// The gradient of a cast: the upstream gradient, cast back to the input's type.
fn gradient_of_cast(cx: &mut GradCx<'_>) -> Result<()> {
    let (upstream, to) = (cx.upstream()?, cx.dtype(cx.input(0)?)?);
    let gradient = cx.cast(upstream, to)?;
    cx.set(0, gradient);
    Ok(())
}

fn infer_bit_cast(cx: &mut InferCx<'_>) -> Result<()> {
    let to = target(cx, REINTERPRETABLE)?;
    if let Ok(from) = cx.dtype(0) {
        ensure!(
            from.bits() == to.bits(),
            InvalidGraph,
            "BitCast from {} to {}, which have different widths",
            from.name(),
            to.name()
        );
    }
    cx.set(0, to, cx.shape(0).map(<[_]>::to_vec));
    Ok(())
}

/// Before version 6 the target was a name, such as `FLOAT`.
fn name_to_code(draft: &mut Draft<'_>) -> Result<()> {
    let Some(Attribute::String(name)) = draft.attr("to") else { return Ok(()) };
    let name = name.to_ascii_lowercase();
    let dtype = DType::from_name(&name)
        .ok_or_else(|| error!(InvalidGraph, "attribute 'to' is '{name}', which is not a type"))?;
    draft.set_attr("to", Attribute::Int(i64::from(dtype.onnx_code())));
    Ok(())
}
