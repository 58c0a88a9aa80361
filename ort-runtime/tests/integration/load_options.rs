//! Changes to a model at load time, and writing the optimized model.

use std::path::Path;

use bytes::Bytes;
use ort_runtime::onnx::proto::tensor_proto::DataLocation;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use ort_runtime::onnx::{FileAccess, Source, WarningKind, Weights, tensor_to_proto};
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, ErrorKind, LoadOptions, Model, Result, Session, Tensor};
use prost::Message;

/// The weight in the model or its data file, and one to replace it. Below, a row of the product
/// with ones.
const OWN: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
const OTHER: [f32; 6] = [1.0, 0.0, 0.0, 1.0, 2.0, 0.5];
const OWN_ROW: [f32; 2] = [9.0, 12.0];
const OTHER_ROW: [f32; 2] = [3.0, 1.5];

/// A declared value whose dimensions are numbers or names, with a denotation or an empty one.
fn info(name: &str, dims: &[(&str, &str)]) -> ValueInfoProto {
    let dim = |(text, denotation): &(&str, &str)| Dimension {
        denotation: (!denotation.is_empty()).then(|| (*denotation).into()),
        value: Some(match text.parse() {
            Ok(size) => dimension::Value::DimValue(size),
            Err(_) => dimension::Value::DimParam((*text).into()),
        }),
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(1), shape };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        name: Some(format!("{op}_{output}")),
        op_type: Some(op.into()),
        input: inputs.iter().map(|name| (*name).to_string()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

/// y = x * w for x [batch, 3], and z = -u for u [2*batch, seq].
fn model(weight: TensorProto) -> ModelProto {
    let wide = [("2*batch", ""), ("seq", "")];
    let graph = GraphProto {
        name: Some("g".into()),
        node: vec![node("MatMul", &["x", "w"], "y"), node("Neg", &["u"], "z")],
        input: vec![info("x", &[("batch", "DATA_BATCH"), ("3", "DATA_CHANNEL")]), info("u", &wide)],
        output: vec![info("y", &[("batch", ""), ("2", "")]), info("z", &wide)],
        initializer: vec![weight],
        ..GraphProto::default()
    };
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(21) }],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

fn weight(elements: &[f32; 6]) -> Tensor {
    Tensor::from_slice(&[3, 2], elements).unwrap()
}

/// The weight in the model.
fn inside() -> TensorProto {
    tensor_to_proto("w", &weight(&OWN)).unwrap()
}

/// The weight in a data file, from the eighth byte on.
fn outside() -> TensorProto {
    let entry =
        |key: &str, value: &str| StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) };
    TensorProto {
        raw_data: None,
        data_location: Some(DataLocation::External as i32),
        external_data: vec![entry("location", "weights.bin"), entry("offset", "8")],
        ..inside()
    }
}

/// The content of the data file.
fn file() -> Bytes {
    let weight = weight(&OWN);
    [&[0; 8][..], &weight.bytes().unwrap()[..], &[0; 3][..]].concat().into()
}

fn load(weight: TensorProto, options: &LoadOptions) -> Result<Model> {
    Model::from_source_with(Source::from_bytes(model(weight).encode_to_vec()), options)
}

fn owned(names: &[(&str, i64)]) -> Vec<(String, i64)> {
    names.iter().map(|(name, size)| ((*name).to_string(), *size)).collect()
}

fn dimensions(names: &[(&str, i64)], denotations: &[(&str, i64)]) -> LoadOptions {
    let (free_dimensions, free_denotations) = (owned(names), owned(denotations));
    LoadOptions { free_dimensions, free_denotations, ..LoadOptions::default() }
}

fn initializers(given: &[(&str, Tensor)]) -> LoadOptions {
    let initializers = given.iter().map(|(name, tensor)| ((*name).to_string(), tensor.clone())).collect();
    LoadOptions { initializers, ..LoadOptions::default() }
}

fn external(given: &[(&str, Tensor)]) -> LoadOptions {
    let external_initializers = initializers(given).initializers;
    LoadOptions { external_initializers, ..LoadOptions::default() }
}

fn files(given: &[(&str, Bytes)]) -> LoadOptions {
    let external_files = given.iter().map(|(name, bytes)| ((*name).to_string(), bytes.clone())).collect();
    LoadOptions { external_files, ..LoadOptions::default() }
}

/// The product with this number of rows of ones.
fn run(session: &Session, rows: usize) -> Result<Vec<f32>> {
    let x = Tensor::from_slice(&[rows, 3], &vec![1.0f32; rows * 3])?;
    let u = Tensor::from_slice(&[2 * rows, 1], &vec![1.0f32; 2 * rows])?;
    let outputs = session.run(&[("x", x.into()), ("u", u.into())])?;
    outputs[0].1.tensor()?.to_vec::<f32>()
}

fn session(model: &Model) -> Result<Session> {
    Session::builder(model).threads(1).build()
}

/// The kinds of the model's warnings.
fn warned(model: &Model) -> Vec<WarningKind> {
    model.warnings().iter().map(|warning| warning.kind).collect()
}

#[test]
fn fixed_dimensions_are_fixed_wherever_their_name_is() -> Result<()> {
    let free = ["float[batch, 3]", "float[2*batch, seq]", "float[batch, 2]", "float[2*batch, seq]"];
    let four = ["float[4, 3]", "float[8, seq]", "float[4, 2]", "float[8, seq]"];
    let product = ["float[batch, 3]", "float[6, seq]", "float[batch, 2]", "float[6, seq]"];
    let empty = ["float[batch, 3]", "float[2*batch, 0]", "float[batch, 2]", "float[2*batch, 0]"];
    let denoted = ["float[4, 3]", "float[2*batch, seq]", "float[4, 2]", "float[2*batch, seq]"];
    let cases = [
        ("none", dimensions(&[], &[]), free, 0),
        ("by name", dimensions(&[("batch", 4)], &[]), four, 0),
        ("the last size counts", dimensions(&[("batch", 5), ("batch", 4)], &[]), four, 0),
        ("a name that is an expression", dimensions(&[("2*batch", 6)], &[]), product, 0),
        ("size 0", dimensions(&[("seq", 0)], &[]), empty, 0),
        ("unknown name", dimensions(&[("zzz", 4)], &[]), free, 1),
        ("by denotation", dimensions(&[], &[("DATA_BATCH", 4)]), denoted, 0),
        ("denotation in lower case", dimensions(&[], &[("data_batch", 4)]), denoted, 0),
        ("denotation of the declared size", dimensions(&[], &[("DATA_CHANNEL", 3)]), free, 0),
        ("unknown denotation", dimensions(&[], &[("OTHER", 4), ("", 5)]), free, 2),
        ("a name before a denotation", dimensions(&[("batch", 4)], &[("DATA_BATCH", 5)]), four, 0),
    ];
    for (name, options, expected, warnings) in cases {
        let session = session(&load(inside(), &options)?)?;
        let specs = [session.inputs(), session.outputs()].concat();
        let shapes: Vec<String> = specs.iter().map(|spec| spec.ty.to_string()).collect();
        assert_eq!(shapes, expected, "{name}");
        assert_eq!(warned(session.model()), vec![WarningKind::LoadOption; warnings], "{name}");
    }
    let session = session(&load(inside(), &dimensions(&[("batch", 4)], &[]))?)?;
    assert_eq!(run(&session, 4)?, OWN_ROW.repeat(4));
    assert_eq!(run(&session, 3).expect_err("another size").kind(), ErrorKind::InvalidArgument);
    Ok(())
}

#[test]
fn dimensions_that_contradict_the_model_are_refused() {
    for (options, word) in [
        (dimensions(&[("batch", -1)], &[]), "size -1, expected 0 or more"),
        (dimensions(&[], &[("DATA_BATCH", i64::MIN)]), "expected 0 or more"),
        (dimensions(&[], &[("DATA_CHANNEL", 5)]), "Invalid free dimension override"),
    ] {
        let problem = load(inside(), &options).map(drop).expect_err(word);
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument, "{problem}");
        assert!(problem.to_string().contains(word), "{problem}");
    }
    let strict = Source::from_bytes(model(inside()).encode_to_vec()).strict(true);
    let problem = Model::from_source_with(strict, &dimensions(&[("zzz", 4)], &[])).map(drop);
    assert!(problem.expect_err("it is strict").to_string().contains("no input has the dimension 'zzz'"));
}

#[test]
fn weights_and_files_from_memory_are_used_where_they_lie() -> Result<()> {
    let other = weight(&OTHER);
    let unaligned = [&[0][..], &other.bytes().unwrap()[..]].concat();
    let unaligned = Tensor::from_bytes(DType::F32, &[3, 2], Bytes::from(unaligned).slice(1..))?;
    let (in_file, both) = (file(), files(&[("weights.bin", file())]));
    let both = LoadOptions { external_initializers: vec![("w".into(), other.clone())], ..both };
    let two = files(&[("weights.bin", in_file.clone()), ("more.bin", Bytes::new())]);
    let address = |tensor: &Tensor| tensor.bytes().unwrap().as_ptr().addr();
    let file_address = in_file.as_ptr().addr() + 8;
    let cases = [
        ("ordinary", inside(), initializers(&[("w", other.clone())]), OTHER_ROW, Some(address(&other)), 0),
        ("unaligned", inside(), initializers(&[("w", unaligned.clone())]), OTHER_ROW, None, 0),
        ("unknown", inside(), initializers(&[("zzz", other.clone())]), OWN_ROW, None, 1),
        ("of a file", outside(), initializers(&[("w", other.clone())]), OTHER_ROW, Some(address(&other)), 0),
        ("external", outside(), external(&[("w", other.clone())]), OTHER_ROW, Some(address(&other)), 0),
        ("file", outside(), files(&[("weights.bin", in_file)]), OWN_ROW, Some(file_address), 0),
        ("unread file", outside(), two, OWN_ROW, Some(file_address), 1),
        ("value and file", outside(), both, OTHER_ROW, Some(address(&other)), 1),
    ];
    for (name, weight, options, row, at, warnings) in cases {
        let model = load(weight, &options)?;
        // The model keeps alive what it uses.
        drop(options);
        let id = model.graph().find_value("w").unwrap();
        assert!(at.is_none_or(|at| address(&model.graph().constants[&id]) == at), "{name}: a copy");
        assert_eq!(warned(&model), vec![WarningKind::LoadOption; warnings], "{name}");
        for level in [Level::Disabled, Level::All] {
            let session = Session::builder(&model).threads(1).opt_level(level).build()?;
            assert_eq!(run(&session, 3)?, row.repeat(3), "{name} {level:?}");
        }
    }
    Ok(())
}

#[test]
fn weights_that_do_not_fit_are_refused() -> Result<()> {
    use ErrorKind::{Fail, InvalidArgument};
    let other = weight(&OTHER);
    let doubles = Tensor::from_slice(&[3, 2], &[1.0f64; 6])?;
    let turned = other.reshape(&[2, 3])?;
    let short = file().slice(..8 + 23);
    let both = LoadOptions { initializers: vec![("w".into(), other.clone())], ..LoadOptions::default() };
    let both = LoadOptions { external_initializers: vec![("w".into(), other.clone())], ..both };
    let cases = [
        (inside(), initializers(&[("w", doubles.clone())]), InvalidArgument, "'w' is float[3, 2]"),
        (inside(), initializers(&[("w", turned.clone())]), InvalidArgument, "for it is float[2, 3]"),
        (outside(), external(&[("w", doubles)]), InvalidArgument, "for it is double[3, 2]"),
        (outside(), external(&[("w", turned)]), InvalidArgument, "'w' is float[3, 2]"),
        (
            inside(),
            initializers(&[("w", other.clone()), ("w", other.clone())]),
            InvalidArgument,
            "already been added: w",
        ),
        (outside(), both, InvalidArgument, "already been added: w"),
        (inside(), external(&[("w", other.clone())]), Fail, "Trying to replace non-external initializer"),
        (outside(), external(&[("W", other)]), Fail, "Failed to find existing initializer with name W."),
        (outside(), files(&[("weights.bin", short)]), Fail, "out of bounds"),
        (outside(), files(&[("weights.bin", Bytes::new())]), Fail, "out of bounds"),
        (outside(), files(&[("other.bin", file())]), Fail, "loaded from memory"),
        (
            outside(),
            files(&[("weights.bin", file()), ("weights.bin", file())]),
            InvalidArgument,
            "already been added: weights.bin",
        ),
    ];
    for (weight, options, kind, word) in cases {
        let problem = load(weight, &options).map(drop).expect_err(word);
        assert_eq!(problem.kind(), kind, "{problem}");
        assert!(problem.to_string().contains(word), "{problem}");
    }
    Ok(())
}

#[test]
fn a_changed_model_has_entries_of_its_own_in_the_compiled_cache() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (path, cache) = (folder.path().join("model.onnx"), folder.path().join("cache"));
    std::fs::write(&path, model(inside()).encode_to_vec()).unwrap();
    let load =
        |options: &LoadOptions| Model::from_source_with(Source::open(&path, FileAccess::default())?, options);
    let other = initializers(&[("w", weight(&OTHER))]);
    let third = initializers(&[("w", weight(&[2.0; 6]))]);
    let two = dimensions(&[("batch", 2)], &[]);
    for (options, row, entries) in [
        (&LoadOptions::default(), OWN_ROW, 1),
        (&other, OTHER_ROW, 2),
        (&third, [6.0, 6.0], 3),
        (&two, OWN_ROW, 4),
        (&LoadOptions::default(), OWN_ROW, 4),
        (&other, OTHER_ROW, 4),
        (&dimensions(&[("zzz", 2)], &[]), OWN_ROW, 4),
    ] {
        for _ in 0..2 {
            let session = Session::builder(&load(options)?).threads(1).cache_dir(&cache).build()?;
            assert_eq!(run(&session, 2)?, row.repeat(2));
            assert_eq!(session.memory().packed, 0, "all of it is in the entry");
        }
        let files = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
        assert_eq!(
            files.filter(|path| path.extension().is_some_and(|end| end == "compiled")).count(),
            entries
        );
    }
    // A compiled model holds the files as they are, so only the content of files may be given.
    let compiled = folder.path().join("model.compiled");
    for options in [other, two] {
        let problem = Session::builder(&load(&options)?).save_compiled(&compiled).expect_err("changed");
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument, "{problem}");
    }
    std::fs::write(&path, model(outside()).encode_to_vec()).unwrap();
    let model = load(&files(&[("weights.bin", file())]))?;
    Session::builder(&model).threads(1).save_compiled(&compiled)?;
    let session = session(&Model::load(&compiled)?)?;
    assert_eq!((run(&session, 2)?, session.memory().packed), (OWN_ROW.repeat(2), 0));
    Ok(())
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn the_optimized_model_is_written_with_what_loading_changed() -> Result<()> {
    let changes =
        LoadOptions { initializers: vec![("w".into(), weight(&OTHER))], ..dimensions(&[("batch", 2)], &[]) };
    let model = load(inside(), &changes)?;
    let named = |least| Weights::Named { name: "w.bin".into(), least };
    for level in [Level::Disabled, Level::Basic, Level::Extended, Level::All] {
        for (weights, expected) in [
            (Weights::Inside, &["out.onnx"][..]),
            (Weights::Beside { least: 1 }, &["out.onnx", "out.onnx.data"][..]),
            (named(1), &["out.onnx", "w.bin"][..]),
            (named(1000), &["out.onnx"][..]),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("out.onnx");
            let builder = Session::builder(&model).threads(1).opt_level(level);
            let (graph, _) = builder.save_optimized(&path, &weights)?;
            assert_eq!(names(folder.path()), expected, "{level:?} {weights:?}");
            let again = Model::load(&path)?;
            assert_eq!(again.graph().nodes.len(), graph.nodes.len());
            assert_eq!(again.inputs()[0].ty.to_string(), "float[2, 3]");
            assert_eq!(run(&session(&again)?, 2)?, OTHER_ROW.repeat(2), "{level:?} {weights:?}");
            let file = Source::open(&path, FileAccess::default())?.decode()?;
            let nodes = file.graph.unwrap_or_default().node;
            let is_standard = nodes.iter().all(|node| node.domain().is_empty());
            assert!(is_standard || level > Level::Basic, "{level:?}");
        }
    }
    Ok(())
}

#[test]
fn an_optimized_model_replaces_no_data_of_the_model() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let base = load(inside(), &LoadOptions::default())?;
    Session::builder(&base).save_optimized(place("base.onnx"), &Weights::Beside { least: 1 })?;
    let content = || -> Vec<Vec<u8>> {
        names(folder.path()).iter().map(|name| std::fs::read(place(name)).unwrap()).collect()
    };
    let before = content();
    let model = Model::load(place("base.onnx"))?;
    let named = |name: &str| Weights::Named { name: name.into(), least: 1 };
    let cases = [
        ("missing/out.onnx", Weights::Inside, "there is no such folder"),
        ("base.onnx.data", Weights::Inside, "external data 'base.onnx.data'"),
        ("out.onnx", named("base.onnx.data"), "external data 'base.onnx.data'"),
        ("out.onnx", named("base.onnx"), "would replace the model that is read"),
        ("out.onnx", named("out.onnx"), "would replace the model file"),
        ("out.onnx", named("OUT.onnx"), "would replace the model file"),
        ("out.onnx", named("sub/w.bin"), "not a file name"),
        ("out.onnx", named("../w.bin"), "not a file name"),
        ("out.onnx", named(""), "not a file name"),
    ];
    for (file, weights, word) in cases {
        let problem = Session::builder(&model).save_optimized(place(file), &weights).map(drop);
        let problem = problem.expect_err(word);
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument, "{problem}");
        assert!(problem.to_string().contains(word), "{problem}");
    }
    assert!(content() == before, "nothing changes");
    // The model file itself may be replaced.
    Session::builder(&model).save_optimized(place("base.onnx"), &Weights::Inside)?;
    assert_eq!(run(&session(&Model::load(place("base.onnx"))?)?, 2)?, OWN_ROW.repeat(2));
    Ok(())
}
