//! The suite of operators that the opaque device has kernels for runs on every target, with equal
//! answers.

use crate::support::{axis, floats, ints, layer, layer_data};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Graph, GraphBuilder, ValueId};
use ort_core::tensor::Tensor;
use ort_testkit::{Case, OpaqueDevice, Suite, Target, read_case};

/// The shape and elements of each output.
type Expected = &'static [(&'static [usize], &'static [f32])];
type Build = fn(&mut GraphBuilder, ValueId) -> Result<Vec<ValueId>>;

/// A case on one input `x` of [2, 3]: 1, -2, 3 and 0.5, 0, -1. The expected outputs are NumPy's.
fn on_x(name: &str, build: Build, expected: Expected) -> Result<Case> {
    let mut builder = GraphBuilder::new(name);
    let x = builder.input("x", DType::F32, &["rows", "columns"]);
    let outputs = build(&mut builder, x)?;
    let graph: Graph = builder.finish(&outputs)?;
    let expected = expected
        .iter()
        .map(|(shape, elements)| Ok(floats(shape, elements)?.into()))
        .collect::<Result<_>>()?;
    let x = floats(&[2, 3], &[1.0, -2.0, 3.0, 0.5, 0.0, -1.0])?;
    Ok(Case::of_graph(name, graph, vec![x.into()], expected))
}

fn suite() -> Result<Suite> {
    let (input, output) = layer_data()?;
    let mut cases = vec![Case::of_graph("layer", layer()?, vec![input], vec![output])];
    const WIDE: &[usize] = &[2, 3];
    let table: &[(&str, Build, Expected)] = &[
        ("relu", |b, x| Ok(vec![b.node("Relu", &[x], &[])?]), &[(WIDE, &[1.0, 0.0, 3.0, 0.5, 0.0, 0.0])]),
        ("neg", |b, x| Ok(vec![b.node("Neg", &[x], &[])?]), &[(WIDE, &[-1.0, 2.0, -3.0, -0.5, 0.0, 1.0])]),
        (
            "broadcast",
            |b, x| {
                let row = b.constant(floats(&[3], &[10.0, 20.0, 30.0])?);
                let column = b.constant(floats(&[2, 1], &[2.0, 4.0])?);
                let sum = b.node("Add", &[row, x], &[])?;
                let product = b.node("Mul", &[sum, column], &[])?;
                Ok(vec![b.node("Sub", &[product, x], &[])?])
            },
            &[(WIDE, &[21.0, 38.0, 63.0, 41.5, 80.0, 117.0])],
        ),
        (
            "divide",
            |b, x| {
                let by = b.constant(floats(&[], &[4.0])?);
                Ok(vec![b.node("Div", &[x, by], &[])?])
            },
            &[(WIDE, &[0.25, -0.5, 0.75, 0.125, 0.0, -0.25])],
        ),
        (
            "softmax over columns",
            |b, x| Ok(vec![b.node("Softmax", &[x], &axis(0))?]),
            &[(WIDE, &[0.622_459_35, 0.119_202_92, 0.982_013_76, 0.377_540_65, 0.880_797_1, 0.017_986_21])],
        ),
        (
            "transpose",
            |b, x| Ok(vec![b.node("Transpose", &[x], &[])?]),
            &[(&[3, 2], &[1.0, 0.5, -2.0, 0.0, 3.0, -1.0])],
        ),
        (
            "concat",
            |b, x| {
                let y = b.node("Neg", &[x], &[])?;
                Ok(vec![b.node("Concat", &[x, y], &axis(1))?])
            },
            &[(&[2, 6], &[1.0, -2.0, 3.0, -1.0, 2.0, -3.0, 0.5, 0.0, -1.0, -0.5, 0.0, 1.0])],
        ),
        (
            "reshape to an output",
            |b, x| {
                let shape = b.constant(ints(&[-1])?);
                let y = b.node("Neg", &[x], &[])?;
                Ok(vec![b.node("Reshape", &[y, shape], &[])?])
            },
            &[(&[6], &[-1.0, 2.0, -3.0, -0.5, 0.0, 1.0])],
        ),
        (
            "split across rows",
            |b, x| {
                let sizes = b.constant(ints(&[1, 2])?);
                let parts = b.add(("", "Split"), &[Some(x), Some(sizes)], &axis(1), 2, Vec::new())?;
                Ok(vec![b.node("Relu", &[parts[1]], &[])?, b.node("Relu", &[parts[0]], &[])?])
            },
            &[(&[2, 2], &[0.0, 3.0, 0.0, 0.0]), (&[2, 1], &[1.0, 0.5])],
        ),
        (
            "matrix stacks",
            |b, x| {
                // [2, 3] read as two matrices of [1, 3], each times its own [3, 1].
                let shape = b.constant(ints(&[2, 1, 3])?);
                let stack = b.node("Reshape", &[x, shape], &[])?;
                let right = b.constant(floats(&[2, 3, 1], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?);
                Ok(vec![b.node("MatMul", &[stack, right], &[])?])
            },
            &[(&[2, 1, 1], &[6.0, -4.0])],
        ),
    ];
    for (name, build, expected) in table {
        cases.push(on_x(name, *build, expected)?);
    }
    Ok(Suite { cases, ..Suite::default() })
}

#[test]
fn every_target_gives_the_expected_answers() -> Result<()> {
    let suite = suite()?;
    let device = OpaqueDevice::new(None);
    for target in [Target::cpu()?, Target::opaque(&device), Target::mixed(&device)?] {
        let report = suite.run(&target);
        assert!(report.is_ok(), "{report}");
        assert_eq!(report.passed, suite.cases.len());
    }
    Ok(())
}

#[test]
fn a_wrong_answer_fails_and_a_list_of_ignored_cases_must_be_right() -> Result<()> {
    let mut suite = suite()?;
    suite.cases.truncate(2);
    suite.cases[0].expected[0] = floats(&[2, 4], &[0.0; 8])?.into();
    let target = Target::cpu()?;
    let report = suite.run(&target);
    assert_eq!((report.passed, report.problems.len()), (1, 1), "{report}");
    suite.ignored = vec![("layer", "it expects a wrong answer")];
    assert!(suite.run(&target).is_ok());
    suite.ignored = vec![("layer", "it expects a wrong answer"), ("relu", "none"), ("absent", "none")];
    let problems: Vec<String> = suite.run(&target).problems.into_iter().map(|(name, _)| name).collect();
    assert_eq!(problems, ["relu", "absent"]);
    Ok(())
}

#[test]
fn a_folder_is_a_case() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let data = folder.path().join("test_data_set_0");
    std::fs::create_dir(&data).expect("a folder for the data");
    let (info, path) = (Default::default(), folder.path().join("model.onnx"));
    ort_core::onnx::save(&layer()?, &info, path, &ort_core::onnx::Weights::Inside)?;
    let (input, output) = layer_data()?;
    for (file, name, value) in [("input_0.pb", "x", input), ("output_0.pb", "y", output)] {
        let bytes = ort_core::onnx::value_to_bytes(name, &value)?;
        std::fs::write(data.join(file), bytes).expect("the data file is written");
    }
    let case = read_case(folder.path())?;
    let device = OpaqueDevice::new(None);
    for target in [Target::cpu()?, Target::opaque(&device)] {
        case.check(&target.session(&case.model)?)?;
    }
    Ok(())
}

#[test]
fn tensors_of_other_types_are_refused_by_the_device() -> Result<()> {
    let mut builder = GraphBuilder::new("doubles");
    let x = builder.input("x", DType::F64, &["2"]);
    let y = builder.node("Neg", &[x], &[])?;
    let graph = builder.finish(&[y])?;
    let x = Tensor::from_slice(&[2], &[1.0f64, -2.0])?;
    let y = Tensor::from_slice(&[2], &[-1.0f64, 2.0])?;
    let case = Case::of_graph("doubles", graph, vec![x.into()], vec![y.into()]);
    let device = OpaqueDevice::new(None);
    let problem = Target::opaque(&device).session(&case.model).err().map(|problem| problem.to_string());
    let problem = problem.expect("the device has no kernel for double");
    assert!(problem.contains("Neg") && problem.contains("type double of T is not among float"), "{problem}");
    case.check(&Target::mixed(&device)?.session(&case.model)?)
}
