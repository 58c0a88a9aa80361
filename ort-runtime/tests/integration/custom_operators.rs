//! Custom operators: schemas, inference, kernels, plans, and what the optimizer leaves alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_runtime::dim::Dim;
use ort_runtime::dtype::{Element, TypeSet};
use ort_runtime::ep::{Executable, NodeView, RunCx, Unary};
use ort_runtime::ir::Attribute;
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, type_proto,
};
use ort_runtime::onnx::{Source, tensor_to_proto};
use ort_runtime::spec::{Arity, InferCx};
use ort_runtime::{
    Budget, CustomOperator, CustomOperators, CustomParam, CustomSchema, DType, ErrorKind, LoadOptions, Model,
    Result, Session, Tensor, Value,
};
use prost::Message;

const F32: TypeSet = TypeSet::of(&[DType::F32]);
const VARIADIC: Arity = Arity::Variadic { min: 2, homogeneous: true };

type Infer = fn(&mut InferCx<'_>) -> Result<()>;
type Kernel = fn(&NodeView<'_>) -> Result<Box<dyn Executable>>;

/// An operator of the tests, which counts the runs of its kernels.
struct Operator {
    schema: CustomSchema,
    infer: Infer,
    kernel: Kernel,
    runs: Arc<AtomicUsize>,
}

/// A kernel behind a counter.
struct Counted(Box<dyn Executable>, Arc<AtomicUsize>);

impl Executable for Counted {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.run(cx)
    }
}

impl CustomOperator for Operator {
    fn schema(&self) -> &CustomSchema {
        &self.schema
    }

    fn infer(&self, cx: &mut InferCx<'_>) -> Result<()> {
        (self.infer)(cx)
    }

    fn kernel(&self, node: &NodeView<'_>) -> Result<Box<dyn Executable>> {
        Ok(Box::new(Counted((self.kernel)(node)?, self.runs.clone())))
    }
}

fn schema(name: &str) -> CustomSchema {
    CustomSchema {
        inputs: vec![CustomParam::one("X", "T", F32)],
        outputs: vec![CustomParam::one("Y", "T", F32)],
        ..CustomSchema::new("test", name)
    }
}

fn same_shape(cx: &mut InferCx<'_>) -> Result<()> {
    let shape = cx.shape(0).map(<[Dim]>::to_vec);
    shape.map_or(Ok(()), |shape| cx.set_shape(0, shape))
}

fn open(_: &mut InferCx<'_>) -> Result<()> {
    Ok(())
}

/// y = x + 1, in memory of the plan.
fn increment(_: &NodeView<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(|cx: &mut RunCx<'_>| {
        match cx.unary::<f32>(0, 0)? {
            Unary::InPlace(values) => values.iter_mut().for_each(|value| *value += 1.0),
            Unary::Apart(from, to) => to.iter_mut().zip(from).for_each(|(to, from)| *to = from + 1.0),
        }
        Ok(())
    }))
}

/// The positive elements of x, in memory that the kernel asks for.
fn positive(_: &NodeView<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(|cx: &mut RunCx<'_>| {
        let kept: Vec<f32> = cx.input(0)?.as_slice::<f32>()?.iter().copied().filter(|x| *x > 0.0).collect();
        let mut made = cx.allocate(DType::F32, &[kept.len()])?;
        made.as_mut_slice()?.copy_from_slice(&kept);
        cx.set(0, made.finish()?)
    }))
}

/// The sum of all inputs that are given, times the attribute `factor`.
fn sum(node: &NodeView<'_>) -> Result<Box<dyn Executable>> {
    let factor = node.attrs().find_float("factor").unwrap_or(1.0);
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let mut sum = 0.0;
        for index in 0..cx.input_count() {
            sum += cx.find_input(index).map_or(Ok(vec![]), |x| x.to_vec::<f32>())?.iter().sum::<f32>();
        }
        let mut made = cx.allocate(DType::F32, &[])?;
        made.as_mut_slice()?.fill(sum * factor);
        cx.set(0, made.finish()?)
    }))
}

struct Given {
    operators: CustomOperators,
    runs: Arc<AtomicUsize>,
}

fn given(list: Vec<(CustomSchema, Infer, Kernel)>) -> Result<Given> {
    let runs = Arc::new(AtomicUsize::new(0));
    let operator = |(schema, infer, kernel)| -> Arc<dyn CustomOperator> {
        Arc::new(Operator { schema, infer, kernel, runs: runs.clone() })
    };
    Ok(Given { operators: CustomOperators::new(list.into_iter().map(operator))?, runs: runs.clone() })
}

fn info(name: &str, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| Dimension {
        value: Some(match text.parse() {
            Ok(size) => dimension::Value::DimValue(size),
            Err(_) => dimension::Value::DimParam((*text).into()),
        }),
        ..Dimension::default()
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(1), shape };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// A node of the domain `test`, or of the standard for operators that the tests do not define.
fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let is_standard = ["Exp", "Neg", "Add"].contains(&op);
    NodeProto {
        name: Some(format!("{op}_{}", outputs.join("_"))),
        op_type: Some(op.into()),
        domain: Some(if is_standard { "" } else { "test" }.into()),
        input: inputs.iter().map(|name| (*name).to_string()).collect(),
        output: outputs.iter().map(|name| (*name).to_string()).collect(),
        ..NodeProto::default()
    }
}

/// A model over x [n] with these nodes. Its weight w is [1, 2].
fn model(nodes: Vec<NodeProto>, outputs: &[&str]) -> ModelProto {
    let output = |name: &&str| ValueInfoProto { name: Some((*name).into()), ..ValueInfoProto::default() };
    let weight = Tensor::from_slice(&[2], &[1.0f32, 2.0]).unwrap();
    let weight: TensorProto = tensor_to_proto("w", &weight).unwrap();
    let opset =
        |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![opset("", 21), opset("test", 3)],
        graph: Some(GraphProto {
            name: Some("g".into()),
            node: nodes,
            input: vec![info("x", &["n"])],
            output: outputs.iter().map(output).collect(),
            initializer: vec![weight],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    }
}

fn load(model: &ModelProto, given: &Given) -> Result<Model> {
    let options = LoadOptions { operators: given.operators.clone(), ..LoadOptions::default() };
    Model::from_source_with(Source::from_bytes(model.encode_to_vec()), &options)
}

fn session(model: &ModelProto, given: &Given) -> Result<Session> {
    Session::builder(&load(model, given)?).threads(1).build()
}

fn run(session: &Session, x: &[f32]) -> Result<Vec<Vec<f32>>> {
    let outputs = session.run(&[("x", Value::from(Tensor::from_slice(&[x.len()], x)?))])?;
    outputs.iter().map(|(_, value)| value.tensor()?.to_vec()).collect()
}

fn said<T>(result: Result<T>) -> (Option<ErrorKind>, String) {
    match result {
        Ok(_) => (None, String::new()),
        Err(problem) => (Some(problem.kind()), problem.to_string()),
    }
}

#[test]
fn known_shapes_are_planned_and_take_what_the_plan_says() -> Result<()> {
    for in_place in [vec![], vec![(0, 0)]] {
        let exact = CustomSchema { has_exact_shapes: true, in_place: in_place.clone(), ..schema("Inc") };
        let given = given(vec![(exact, same_shape, increment)])?;
        let nodes =
            vec![node("Exp", &["x"], &["a"]), node("Inc", &["a"], &["b"]), node("Neg", &["b"], &["y"])];
        let model = load(&model(nodes, &["y"]), &given)?;
        let budget = Budget::new(None);
        let session = Session::builder(&model).threads(1).budget(&budget).build()?;
        let plan = session.plan(&[("n", 1000)])?;
        let x: Vec<f32> = (0..1000u16).map(|x| f32::from(x) / 1000.0).collect();
        let before = budget.in_use();
        let found = run(&session, &x)?;
        let expected: Vec<f32> = x.iter().map(|x| -(x.exp() + 1.0)).collect();
        for (found, expected) in found[0].iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-6, "{found} instead of {expected}");
        }
        assert_eq!(plan.peak_bytes, Some(budget.peak() - before), "{in_place:?}");
        assert_eq!(given.runs.load(Ordering::Relaxed), 1);
    }
    Ok(())
}

/// Converts each element, in memory of its own.
fn convert<From: Element, To: Element>(change: fn(From) -> To) -> Box<dyn Executable> {
    Box::new(move |cx: &mut RunCx<'_>| {
        assert_eq!(cx.in_place(0), None, "the output is in the memory of the input");
        let from: &[From] = cx.input(0)?.as_slice()?;
        let to: &mut [To] = cx.output(0)?.as_mut_slice()?;
        to.iter_mut().zip(from).for_each(|(to, from)| *to = change(*from));
        Ok(())
    })
}

fn to_int(_: &NodeView<'_>) -> Result<Box<dyn Executable>> {
    Ok(convert(|x: f32| x as i32))
}

fn to_float(_: &NodeView<'_>) -> Result<Box<dyn Executable>> {
    Ok(convert(|x: i32| x as f32))
}

#[test]
fn memory_is_shared_by_values_of_one_type_only() -> Result<()> {
    let between = |name, from, to| {
        let types = |dtype| TypeSet::of(&[dtype]);
        CustomSchema {
            inputs: vec![CustomParam::one("X", "T", types(from))],
            outputs: vec![CustomParam::one("Y", "U", types(to))],
            in_place: vec![(0, 0)],
            has_exact_shapes: true,
            ..CustomSchema::new("test", name)
        }
    };
    let given = given(vec![
        (between("Int", DType::F32, DType::I32), same_shape, to_int),
        (between("Float", DType::I32, DType::F32), same_shape, to_float),
    ])?;
    let nodes = vec![node("Neg", &["x"], &["a"]), node("Int", &["a"], &["b"]), node("Float", &["b"], &["y"])];
    let session = session(&model(nodes, &["y"]), &given)?;
    assert_eq!(run(&session, &[1.0, -2.5])?, [[-1.0, 2.0]]);
    Ok(())
}

#[test]
fn shapes_that_only_the_kernel_knows_are_left_open_by_the_plan() -> Result<()> {
    let given = given(vec![(schema("Positive"), open, positive)])?;
    let nodes = vec![node("Positive", &["x"], &["a"]), node("Neg", &["a"], &["y"])];
    let session = session(&model(nodes, &["y"]), &given)?;
    let plan = session.plan(&[("n", 4)])?;
    let open = plan.values.iter().find(|value| value.name == "a").map(|value| value.bytes);
    assert_eq!(open, Some(None), "{:?}", plan.values);
    assert_eq!(run(&session, &[1.0, -2.0, 3.0, 0.0])?, [[-1.0, -3.0]]);
    assert_eq!(run(&session, &[-1.0])?, [[0.0f32; 0]]);
    Ok(())
}

#[test]
fn impure_nodes_run_once_each_whatever_reads_them() -> Result<()> {
    // Unread, on constants, and twice the same.
    let nodes = || {
        vec![
            node("Sum", &["x", "w"], &["unread"]),
            node("Sum", &["w", "w"], &["a"]),
            node("Sum", &["w", "w"], &["b"]),
            node("Add", &["a", "b"], &["y"]),
        ]
    };
    for (is_pure, expected) in [(false, 3), (true, 0)] {
        let inputs = vec![CustomParam::one("X", "T", F32).taking(VARIADIC)];
        let schema = CustomSchema { inputs, is_pure, ..schema("Sum") };
        let given = given(vec![(schema, open, sum)])?;
        let model = model(nodes(), &["y"]);
        let session = session(&model, &given)?;
        let built = given.runs.load(Ordering::Relaxed);
        assert_eq!(run(&session, &[5.0])?, [[12.0]]);
        let runs = given.runs.load(Ordering::Relaxed) - built;
        match is_pure {
            false => assert_eq!((built, runs), (0, expected)),
            // The plan does not know the sizes, so that nothing is folded; equal nodes are merged.
            true => assert_eq!((built, runs), (0, 1), "merged and left out"),
        }
    }
    Ok(())
}

#[test]
fn a_pure_node_of_constants_is_folded() -> Result<()> {
    let exact = CustomSchema { has_exact_shapes: true, is_pure: true, ..schema("Inc") };
    let given = given(vec![(exact, same_shape, increment)])?;
    let nodes = vec![node("Inc", &["w"], &["a"]), node("Add", &["x", "a"], &["y"])];
    let session = session(&model(nodes, &["y"]), &given)?;
    assert_eq!(given.runs.load(Ordering::Relaxed), 1);
    assert_eq!(run(&session, &[10.0, 20.0])?, [[12.0, 23.0]]);
    assert_eq!(given.runs.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn overloads_differ_by_types_and_versions() -> Result<()> {
    let ints = |name| CustomSchema {
        inputs: vec![CustomParam::one("X", "T", TypeSet::of(&[DType::I64]))],
        outputs: vec![CustomParam::one("Y", "T", F32)],
        ..schema(name)
    };
    // The first does not take floats, the second is not in version 3.
    let old = CustomSchema { versions: 1..=2, ..schema("Op") };
    let new = CustomSchema { versions: 3..=9, ..schema("Op") };
    let other = CustomSchema { versions: 3..=9, ..ints("Op") };
    let refuses: Kernel = |_| Err(ort_runtime::Error::new(ErrorKind::Fail, "the wrong overload"));
    let given = given(vec![(other, open, refuses), (old, open, refuses), (new, open, positive)])?;
    let session = session(&model(vec![node("Op", &["x"], &["y"])], &["y"]), &given)?;
    assert_eq!(run(&session, &[1.0, -1.0])?, [[1.0]]);
    Ok(())
}

#[test]
fn attributes_of_all_kinds_reach_the_kernel() -> Result<()> {
    let kernel: Kernel = |node| {
        let attrs = node.attrs();
        let strings = attrs.strings("strings")?.to_vec();
        let is_right = attrs.int("int")? == 7
            && attrs.ints("ints")? == [1, 2]
            && attrs.float("float")? == 0.5
            && attrs.floats("floats")? == [0.25]
            && attrs.string("string")? == "text"
            && strings == ["a", "b"]
            && attrs.tensor("tensor")?.to_vec::<f32>()? == [1.0, 2.0]
            && matches!(attrs.get("bytes"), Some(Attribute::Bytes(bytes)) if bytes[..] == [0xff, 0]);
        let is_constant = node.constant(1).is_some() && node.constant(0).is_none();
        assert!(is_right && is_constant, "{attrs:?}");
        sum(node)
    };
    let inputs = vec![CustomParam::one("X", "T", F32).taking(VARIADIC)];
    let given = given(vec![(CustomSchema { inputs, ..schema("Sum") }, open, kernel)])?;
    let named = |name: &str, ty: AttributeType| AttributeProto {
        name: Some(name.into()),
        r#type: Some(ty as i32),
        ..AttributeProto::default()
    };
    let tensor = tensor_to_proto("", &Tensor::from_slice(&[2], &[1.0f32, 2.0])?)?;
    let attribute = vec![
        AttributeProto { i: Some(7), ..named("int", AttributeType::Int) },
        AttributeProto { ints: vec![1, 2], ..named("ints", AttributeType::Ints) },
        AttributeProto { f: Some(0.5), ..named("float", AttributeType::Float) },
        AttributeProto { floats: vec![0.25], ..named("floats", AttributeType::Floats) },
        AttributeProto { s: Some("text".into()), ..named("string", AttributeType::String) },
        AttributeProto { s: Some(vec![0xff, 0].into()), ..named("bytes", AttributeType::String) },
        AttributeProto { strings: vec!["a".into(), "b".into()], ..named("strings", AttributeType::Strings) },
        AttributeProto { t: Some(Box::new(tensor)), ..named("tensor", AttributeType::Tensor) },
        AttributeProto { f: Some(2.0), ..named("factor", AttributeType::Float) },
    ];
    let node = NodeProto { attribute, ..node("Sum", &["x", "w"], &["y"]) };
    let model = model(vec![node], &["y"]);
    assert_eq!(run(&session(&model, &given)?, &[4.0])?, [[14.0]]);
    // A saved model has them, too.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved.onnx");
    let weights = ort_runtime::onnx::Weights::Inside;
    Session::builder(&load(&model, &given)?).save_optimized(&path, &weights)?;
    let saved = ModelProto::decode(&*std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(run(&session(&saved, &given)?, &[4.0])?, [[14.0]]);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_with_the_place() -> Result<()> {
    let optional = CustomParam::one("B", "T", F32).taking(Arity::Optional);
    let inputs = vec![CustomParam::one("X", "T", F32), optional];
    let two = CustomSchema { inputs, ..schema("Two") };
    let many =
        CustomSchema { inputs: vec![CustomParam::one("X", "T", F32).taking(VARIADIC)], ..schema("Many") };
    let far = CustomSchema { provider: "cuda".into(), ..schema("Far") };
    let ints = CustomSchema {
        inputs: vec![CustomParam::one("X", "I", TypeSet::of(&[DType::I64]))],
        ..schema("Ints")
    };
    let newer = CustomSchema { versions: 4..=5, ..schema("Newer") };
    let fails: Kernel = |_| {
        Ok(Box::new(|_: &mut RunCx<'_>| Err(ort_runtime::Error::new(ErrorKind::NotImplemented, "no luck"))))
    };
    let list = vec![
        (two, open as Infer, sum as Kernel),
        (many, open, sum),
        (far, open, sum),
        (ints, open, sum),
        (newer, open, sum),
        (schema("Fails"), open, fails),
    ];
    let given = given(list)?;
    let cases = [
        (node("Two", &["x"], &["y"]), None, ""),
        (node("Two", &["x", "w"], &["y"]), None, ""),
        (node("Two", &["x", "w", "w"], &["y"]), Some(ErrorKind::InvalidGraph), "input size 3"),
        (node("Two", &["", "w"], &["y"]), Some(ErrorKind::InvalidGraph), "input 0 is marked single"),
        (node("Many", &["x"], &["y"]), Some(ErrorKind::InvalidGraph), "min=2"),
        (node("Far", &["x"], &["y"]), Some(ErrorKind::NotImplemented), "no kernel for cpu"),
        (node("Ints", &["x"], &["y"]), Some(ErrorKind::InvalidGraph), "Input 'X' takes tensor(int64)"),
        (node("Newer", &["x"], &["y"]), Some(ErrorKind::InvalidGraph), "exists in versions 4..=5"),
        (node("Other", &["x"], &["y"]), Some(ErrorKind::Fail), "test:Other(-1) is not a registered"),
        (node("Fails", &["x"], &["y"]), Some(ErrorKind::NotImplemented), "no luck"),
    ];
    for (node, kind, words) in cases {
        let ran = session(&model(vec![node], &["y"]), &given).and_then(|session| run(&session, &[1.0]));
        let (found, text) = said(ran);
        assert!(found == kind && text.contains(words), "{found:?} {text}");
    }
    Ok(())
}

#[test]
fn schemas_that_contradict_each_other_are_refused() {
    let list = |schemas: Vec<CustomSchema>| {
        said(given(schemas.into_iter().map(|schema| (schema, open as Infer, sum as Kernel)).collect())).1
    };
    let one = || CustomParam::one("X", "T", F32);
    let first = CustomSchema { inputs: vec![one().taking(VARIADIC), one()], ..schema("Op") };
    assert!(list(vec![first]).contains("Only the last input to a custom op may be marked variadic"));
    let more = CustomSchema { inputs: vec![one(), one()], ..schema("Op") };
    assert!(list(vec![schema("Op"), more]).contains("have different inputs"));
    let untyped = CustomSchema { inputs: vec![CustomParam::one("X", "T", TypeSet::EMPTY)], ..schema("Op") };
    assert!(list(vec![untyped]).contains("takes no element type"));
    let beyond = CustomSchema { in_place: vec![(0, 1)], ..schema("Op") };
    assert!(list(vec![beyond]).contains("shares memory of [(0, 1)]"));
    assert!(list(vec![schema("")]).contains("has no name"));
}
