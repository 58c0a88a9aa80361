//! Inputs that do not fit the model: one clear error each, word for word.

use crate::support::{floats, session};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId, ValueType};
use ort_runtime::tensor::{MapKeys, MapValue, OptionalValue, SequenceValue};
use ort_runtime::{DType, ErrorKind, Result, Tensor, Value};

/// `x + y` with x of [n, 3] and y of [n, 1].
fn sum() -> Result<Graph> {
    let mut builder = GraphBuilder::new("sum");
    let x = builder.input("x", DType::F32, &["n", "3"]);
    let y = builder.input("y", DType::F32, &["n", "1"]);
    let sum = builder.node("Add", &[x, y], &[])?;
    builder.finish(&[sum])
}

#[test]
fn each_mistake_is_named() -> Result<()> {
    let session = session(sum()?)?;
    let zeros =
        |shape: &[usize]| -> Result<Value> { Ok(floats(shape, &vec![0.0; shape.iter().product()])?.into()) };
    let sequence = Value::Sequence(SequenceValue { element_type: Default::default(), elements: Vec::new() });
    let (x, y) = (zeros(&[2, 3])?, zeros(&[2, 1])?);
    let cases: Vec<(Vec<(&str, Value)>, &str)> = vec![
        (
            vec![("x", x.clone()), ("z", y.clone())],
            "invalid argument: the model has no input 'z'; the inputs are x, y",
        ),
        (vec![("x", x.clone()), ("x", x.clone())], "invalid argument: input 'x' is given twice"),
        (
            vec![("x", x.clone())],
            "invalid argument: input 'y' (float[n, 1]) is not given; \
             give a value for each input that has no default",
        ),
        (
            vec![("x", Tensor::from_slice(&[1, 3], &[0.0f64; 3])?.into()), ("y", y.clone())],
            "invalid argument: input 'x' is double, expected float",
        ),
        (
            vec![("x", zeros(&[3])?), ("y", y.clone())],
            "invalid argument: input 'x' has rank 1, expected rank 2: float[n, 3]; give it a tensor of that rank",
        ),
        (
            vec![("x", zeros(&[2, 4])?), ("y", y.clone())],
            "invalid argument: input 'x': axis 1 has size 4, expected 3: \
             got shape [2, 4], expected float[n, 3]; \
             use the size that the model declares",
        ),
        (
            vec![("x", x.clone()), ("y", zeros(&[5, 1])?)],
            "invalid argument: input 'y': axis 0 has size 5, expected n with n=2: \
             got shape [5, 1], expected float[n, 1]; \
             use one size for all dimensions of that name",
        ),
        (
            vec![("x", sequence), ("y", y.clone())],
            "invalid argument: input 'x': expected a tensor, got a sequence",
        ),
    ];
    let mut wrong = Vec::new();
    for (inputs, expected) in cases {
        match session.run(&inputs) {
            Ok(_) => wrong.push(format!("no error, expected {expected}")),
            Err(problem) => {
                assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
                if problem.to_string() != expected {
                    wrong.push(format!("{problem}\n  expected {expected}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(session.run(&[("y", y), ("x", x)]).is_ok(), "the session stays usable, in any order of inputs");
    Ok(())
}

/// Types of inputs, values for them, and what is wrong with those, if anything.
#[test]
fn values_of_other_types_than_tensors_are_compared() -> Result<()> {
    let of = |dtype| ValueType::tensor(dtype, None);
    let sequence = |ty| ValueType::Sequence(Box::new(ty));
    let optional = |ty| ValueType::Optional(Box::new(ty));
    let map = |key| ValueType::Map(key, Box::new(of(DType::F32)));
    let single = || -> Result<Value> { Ok(floats(&[1], &[1.0])?.into()) };
    let double = || -> Result<Value> { Ok(Tensor::from_slice(&[1], &[1.0f64])?.into()) };
    let list = |elements: Vec<Value>| {
        let element_type = elements.first().map(Value::value_type).unwrap_or_default();
        Value::Sequence(SequenceValue { element_type, elements })
    };
    let maybe = |value: Option<Value>| {
        let element_type = value.as_ref().map(Value::value_type).unwrap_or_default();
        Value::Optional(OptionalValue { element_type, element: value.map(Box::new) })
    };
    let of_texts = |values| Value::Map(MapValue { keys: MapKeys::Strings(vec!["a".into()]), values });
    let of_ints = |values| Value::Map(MapValue { keys: MapKeys::Ints(DType::I64, vec![7]), values });
    let floats = sequence(of(DType::F32));
    let cases = [
        (floats.clone(), list(vec![single()?]), ""),
        (floats.clone(), list(vec![]), ""),
        (floats.clone(), list(vec![double()?]), "float[..] in seq(float[..]), got double[1]"),
        (floats.clone(), list(vec![single()?, double()?]), "float[..] in seq(float[..]), got double[1]"),
        (floats.clone(), list(vec![list(vec![])]), "float[..] in seq(float[..]), got seq(?)"),
        (floats.clone(), single()?, "seq(float[..]), got a tensor of float"),
        (floats.clone(), of_ints(Box::new(single()?)), "seq(float[..]), got map(int64, float[1])"),
        (sequence(map(DType::I64)), list(vec![of_ints(Box::new(single()?))]), ""),
        (optional(of(DType::F32)), maybe(None), ""),
        (optional(of(DType::F32)), maybe(Some(single()?)), ""),
        (optional(of(DType::F32)), single()?, ""),
        (optional(of(DType::F32)), double()?, "optional(float[..]), got a tensor of double"),
        (optional(of(DType::F32)), maybe(Some(double()?)), "float[..] in optional(float[..]), got double[1]"),
        (optional(floats.clone()), list(vec![single()?]), ""),
        (map(DType::I64), of_ints(Box::new(single()?)), ""),
        (map(DType::I64), of_ints(Box::new(list(vec![single()?]))), ""),
        (map(DType::I64), of_texts(Box::new(single()?)), "map(int64, float[..]), got map(string, float[1])"),
        (
            map(DType::String),
            of_texts(Box::new(double()?)),
            "float[..] in map(string, float[..]), got double[1]",
        ),
        (map(DType::I64), list(vec![]), "map(int64, float[..]), got seq(?)"),
    ];
    for (ty, value, expected) in cases {
        let mut builder = GraphBuilder::new("unchanged");
        let x = builder.typed_input("x", ty.clone());
        let session = session(builder.finish(&[x])?)?;
        let problem = session.run(&[("x", value)]).err().map(|problem| problem.to_string());
        let expected =
            (!expected.is_empty()).then(|| format!("invalid argument: input 'x': expected {expected}"));
        assert_eq!(problem, expected, "{ty}");
    }
    Ok(())
}

#[test]
fn inputs_of_no_elements_run() -> Result<()> {
    let session = session(sum()?)?;
    let outputs = session.run(&[("x", floats(&[0, 3], &[])?.into()), ("y", floats(&[0, 1], &[])?.into())])?;
    assert_eq!(outputs[0].1.tensor()?.shape(), [0, 3]);
    Ok(())
}

/// `-Reshape(|x|, Shape(y))`, whose sizes only a run tells.
#[test]
fn a_reshape_to_more_or_less_is_refused() -> Result<()> {
    let mut builder = GraphBuilder::new("reshape");
    let x = builder.input("x", DType::F32, &["n"]);
    let y = builder.input("y", DType::F32, &["m", "k"]);
    let shape = builder.node("Shape", &[y], &[])?;
    let magnitude = builder.node("Abs", &[x], &[])?;
    let reshaped = builder.node("Reshape", &[magnitude, shape], &[])?;
    let result = builder.node("Neg", &[reshaped], &[])?;
    let session = session(builder.finish(&[result])?)?;
    for (count, shape, fits) in [(6, [2, 3], true), (6, [2, 2], false), (6, [3, 3], false), (0, [0, 3], true)]
    {
        let x = floats(&[count], &vec![1.0; count])?.into();
        let y = floats(&shape, &vec![1.0; shape.iter().product()])?.into();
        let outcome = session.run(&[("x", x), ("y", y)]);
        assert_eq!(outcome.is_ok(), fits, "{count} elements as {shape:?}: {outcome:?}");
        if let Err(problem) = outcome {
            assert_eq!(problem.kind(), ErrorKind::InvalidArgument, "{problem}");
        }
    }
    Ok(())
}

/// A node over inputs whose shapes only the run knows, on zeros of these shapes.
fn run_on_zeros(
    op: &str,
    dtype: DType,
    attrs: &[(&str, Attribute)],
    shapes: &[&[usize]],
) -> Result<Vec<(String, Value)>> {
    let mut builder = GraphBuilder::new(op);
    let names: Vec<String> = (0..shapes.len()).map(|index| format!("x{index}")).collect();
    let input = |name| Some(builder.typed_input(name, ValueType::tensor(dtype, None)));
    let inputs: Vec<Option<ValueId>> = names.iter().map(String::as_str).map(input).collect();
    let outputs = builder.add(("", op), &inputs, attrs, 1, Vec::new())?;
    let session = session(builder.finish(&outputs)?)?;
    let zeros = |shape: &[usize]| {
        let count = ort_runtime::tensor::element_count(shape)?;
        Ok(match dtype {
            DType::F64 => Tensor::from_vec(shape, vec![0.0f64; count])?,
            DType::U8 => Tensor::from_vec(shape, vec![0u8; count])?,
            _ => Tensor::from_vec(shape, vec![0.0f32; count])?,
        })
    };
    let tensors = shapes.iter().map(|shape| zeros(shape)).collect::<Result<Vec<Tensor>>>()?;
    let inputs: Vec<(&str, Value)> =
        names.iter().zip(tensors).map(|(name, tensor)| (name.as_str(), tensor.into())).collect();
    session.run(&inputs)
}

#[test]
fn products_of_hostile_sizes_do_not_overflow() {
    const HUGE: usize = 1 << 40;
    let group = |group| ("group", Attribute::Int(group));
    let offset_group = ("offset_group", Attribute::Int(1 << 62));
    // Only tensors without elements can have such sizes.
    let cases: [(&str, DType, Vec<(&str, Attribute)>, Vec<&[usize]>); 7] = [
        ("Conv", DType::F64, vec![group(1 << 30)], vec![&[1, 4, 5, 5], &[0, HUGE, 3, 3]]),
        ("Conv", DType::F64, vec![], vec![&[0, 4, HUGE, HUGE], &[2, 4, 3, 3]]),
        ("ConvTranspose", DType::F64, vec![group(1 << 30)], vec![&[1, 0, 5, 5], &[0, HUGE, 3, 3]]),
        ("ConvInteger", DType::U8, vec![group(1 << 30)], vec![&[1, 4, 5, 5, 5], &[0, HUGE, 3, 3, 3]]),
        ("ConvInteger", DType::U8, vec![], vec![&[0, 4, HUGE, HUGE, 3], &[2, 4, 3, 3, 3]]),
        (
            "DeformConv",
            DType::F32,
            vec![group(1 << 62)],
            vec![&[1, 4, 5, 5], &[0, HUGE, 3, 3], &[1, 18, 3, 3]],
        ),
        ("DeformConv", DType::F32, vec![offset_group], vec![&[1, 0, 5, 5], &[1, 0, 3, 3], &[1, 18, 3, 3]]),
    ];
    for (op, dtype, attrs, shapes) in cases {
        match run_on_zeros(op, dtype, &attrs, &shapes) {
            Ok(outputs) => assert_eq!(outputs.len(), 1),
            Err(problem) => assert!(!problem.to_string().contains("panicked"), "{op} {shapes:?}: {problem}"),
        }
    }
}
