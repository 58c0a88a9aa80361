//! Custom operators of a library: versions of the table, inputs and outputs of each kind,
//! attributes, inference, memory, failures, and operators of the engine inside a kernel.
//!
//! With `ORT_CAPI_LIBRARY` the tests load another library with the same interface: the expected
//! results are those of ONNX Runtime 1.31.1.

use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock};

use ort_runtime::Tensor;
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, type_proto,
};
use ort_runtime::onnx::tensor_to_proto;
use ort_sys::{
    ONNXTensorElementDataType as Element, OrtAllocatorType, OrtMemType, OrtSession, OrtSessionOptions,
    OrtStatusPtr, OrtValue,
};
use prost::Message;

use crate::library::{call, env, make, raw, refusal};

/// The calls of kernels are traced in the library, so that tests that read them take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The library, which cargo builds beside the test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.with_file_name(libloading::library_filename("custom_ops"))
}

/// What was called since the last time.
fn calls() -> Vec<String> {
    static LIBRARY: OnceLock<libloading::Library> = OnceLock::new();
    // SAFETY: the library has no initialisers that depend on anything.
    let library = LIBRARY.get_or_init(|| unsafe { libloading::Library::new(library()) }.unwrap());
    let mut buffer = vec![0u8; 1 << 16];
    // SAFETY: the function has this type, and the buffer has as many bytes.
    let count = unsafe {
        let take = library.get::<extern "system" fn(*mut u8, usize) -> usize>(b"custom_ops_trace").unwrap();
        take(buffer.as_mut_ptr(), buffer.len())
    };
    let text = String::from_utf8(buffer[..count].to_vec()).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn options() -> *mut OrtSessionOptions {
    let options = make!(CreateSessionOptions());
    call!(SetIntraOpNumThreads(options, 2));
    let path = CString::new(library().to_str().unwrap()).unwrap();
    call!(RegisterCustomOpsLibrary_V2(options, path.as_ptr().cast()));
    options
}

const FLOAT: i32 = 1;
const INT64: i32 = 7;
const STRING: i32 = 8;

fn info(name: &str, element: i32, size: &str) -> ValueInfoProto {
    let value = match size.parse() {
        Ok(size) => dimension::Value::DimValue(size),
        Err(_) => dimension::Value::DimParam(size.into()),
    };
    let shape = TensorShapeProto { dim: vec![Dimension { value: Some(value), ..Dimension::default() }] };
    let tensor = type_proto::Tensor { elem_type: Some(element), shape: Some(shape) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

fn named(name: &str, ty: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(ty as i32), ..AttributeProto::default() }
}

fn number(name: &str, value: f32) -> AttributeProto {
    AttributeProto { f: Some(value), ..named(name, AttributeType::Float) }
}

fn whole(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: Some(value), ..named(name, AttributeType::Int) }
}

fn node(op: &str, inputs: &[&str], outputs: &[&str], attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        name: Some(format!("the_{op}")),
        op_type: Some(op.into()),
        domain: Some(if op == "Neg" { "" } else { "test.custom" }.into()),
        input: inputs.iter().map(|name| (*name).to_string()).collect(),
        output: outputs.iter().map(|name| (*name).to_string()).collect(),
        attribute,
        ..NodeProto::default()
    }
}

/// A model over x, with weights b [10, 20] and k [2], and outputs of these types.
fn model(element: i32, nodes: Vec<NodeProto>, outputs: &[(&str, i32)]) -> Vec<u8> {
    let opset =
        |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
    let weight = |name: &str, tensor: Tensor| -> TensorProto { tensor_to_proto(name, &tensor).unwrap() };
    let graph = GraphProto {
        name: Some("g".into()),
        node: nodes,
        input: vec![info("x", element, "n")],
        output: outputs.iter().map(|(name, element)| info(name, *element, "m")).collect(),
        initializer: vec![
            weight("b", Tensor::from_slice(&[2], &[10.0f32, 20.0]).unwrap()),
            weight("k", Tensor::from_slice(&[1], &[2i64]).unwrap()),
        ],
        ..GraphProto::default()
    };
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![opset("", 17), opset("test.custom", 1)],
        graph: Some(graph),
        ..ModelProto::default()
    };
    model.encode_to_vec()
}

fn create(model: &[u8]) -> Result<*mut OrtSession, (i32, String)> {
    let mut session = null_mut();
    let options = options();
    let status =
        raw!(CreateSessionFromArray(env(), model.as_ptr().cast(), model.len(), options, &raw mut session));
    raw!(ReleaseSessionOptions(options));
    refusal(status).map_or(Ok(session), Err)
}

/// Elements of a tensor.
#[derive(Debug, PartialEq, Clone)]
enum Data {
    Floats(Vec<f32>),
    Ints(Vec<i64>),
    Texts(Vec<String>),
}

fn value(data: &mut Data) -> *mut OrtValue {
    let memory =
        make!(CreateCpuMemoryInfo(OrtAllocatorType::OrtDeviceAllocator, OrtMemType::OrtMemTypeDefault));
    let (pointer, count, width, element): (*mut c_void, _, _, _) = match data {
        Data::Floats(list) => {
            (list.as_mut_ptr().cast(), list.len(), 4, Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
        }
        Data::Ints(list) => {
            (list.as_mut_ptr().cast(), list.len(), 8, Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
        }
        Data::Texts(list) => {
            let texts: Vec<CString> = list.iter().map(|text| CString::new(text.as_str()).unwrap()).collect();
            let pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
            let shape = [list.len() as i64];
            let value = make!(CreateTensorAsOrtValue(
                make!(GetAllocatorWithDefaultOptions()),
                shape.as_ptr(),
                1,
                Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING
            ));
            call!(FillStringTensor(value, pointers.as_ptr(), pointers.len()));
            return value;
        }
    };
    let shape = [count as i64];
    make!(CreateTensorWithDataAsOrtValue(memory, pointer, count * width, shape.as_ptr(), 1, element))
}

fn read(value: *mut OrtValue) -> Data {
    let info = make!(GetTensorTypeAndShape(value));
    let count: usize = make!(GetTensorShapeElementCount(info));
    let element: Element = make!(GetTensorElementType(info));
    raw!(ReleaseTensorTypeAndShapeInfo(info));
    match element as i32 {
        STRING => {
            let text = |index| {
                let len: usize = make!(GetStringTensorElementLength(value, index));
                let mut text = vec![0u8; len];
                call!(GetStringTensorElement(value, len, index, text.as_mut_ptr().cast()));
                String::from_utf8(text).unwrap()
            };
            Data::Texts((0..count).map(text).collect())
        }
        element => {
            let data: *mut c_void = make!(GetTensorMutableData(value));
            // SAFETY: the tensor has as many elements of this type.
            unsafe {
                match element {
                    FLOAT => Data::Floats(std::slice::from_raw_parts(data.cast(), count).to_vec()),
                    _ => Data::Ints(std::slice::from_raw_parts(data.cast(), count).to_vec()),
                }
            }
        }
    }
}

type Ran = Result<Vec<Data>, (i32, String)>;

fn run(session: *mut OrtSession, mut x: Data, outputs: &[(&str, i32)]) -> Ran {
    let input = value(&mut x);
    let names: Vec<CString> = outputs.iter().map(|(name, _)| CString::new(*name).unwrap()).collect();
    let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let mut made = vec![null_mut(); outputs.len()];
    let status: OrtStatusPtr = raw!(Run(
        session,
        null(),
        [c"x".as_ptr()].as_ptr(),
        [input.cast_const()].as_ptr(),
        1,
        names.as_ptr(),
        names.len(),
        made.as_mut_ptr()
    ));
    raw!(ReleaseValue(input));
    if let Some(refused) = refusal(status) {
        return Err(refused);
    }
    Ok(made
        .into_iter()
        .map(|value| {
            let data = read(value);
            raw!(ReleaseValue(value));
            data
        })
        .collect())
}

fn ran(element: Data, nodes: Vec<NodeProto>, outputs: &[(&str, i32)]) -> Ran {
    let number = match element {
        Data::Floats(_) => FLOAT,
        Data::Ints(_) => INT64,
        Data::Texts(_) => STRING,
    };
    let session = create(&model(number, nodes, outputs))?;
    let ran = run(session, element, outputs);
    raw!(ReleaseSession(session));
    ran
}

fn floats(list: &[f32]) -> Data {
    Data::Floats(list.to_vec())
}

fn attributes(mode: i64) -> Vec<AttributeProto> {
    let tensor = tensor_to_proto("", &Tensor::from_slice(&[2], &[0.25f32, 0.5]).unwrap()).unwrap();
    vec![
        number("float", 1.0),
        whole("mode", mode),
        AttributeProto { floats: vec![2.0, 3.0], ..named("floats", AttributeType::Floats) },
        AttributeProto { ints: vec![4, 5], ..named("ints", AttributeType::Ints) },
        AttributeProto { s: Some("text".into()), ..named("text", AttributeType::String) },
        AttributeProto { t: Some(Box::new(tensor)), ..named("tensor", AttributeType::Tensor) },
    ]
}

const Y: &[(&str, i32)] = &[("y", FLOAT)];

#[test]
fn every_kind_of_operator_computes_what_it_says() {
    let _turn = TURN.lock();
    let (one, two) = (["x"], ["x", "b"]);
    let scale = |op: &str| {
        vec![node(op, &one, &["a"], vec![number("factor", 3.0)]), node("Neg", &["a"], &["y"], vec![])]
    };
    let both: &[(&str, i32)] = &[("y", FLOAT), ("z", FLOAT)];
    let x = || floats(&[1.0, 2.0]);
    let cases: Vec<(&str, Ran, Vec<Data>)> = vec![
        ("version 1", ran(x(), scale("Scale1"), Y), vec![floats(&[-3.0, -6.0])]),
        ("version 16", ran(x(), scale("Scale16"), Y), vec![floats(&[-3.0, -6.0])]),
        ("version 31", ran(x(), scale("ScaleNew"), Y), vec![floats(&[-3.0, -6.0])]),
        ("left out", ran(x(), vec![node("Optional10", &one, &["y"], vec![])], Y), vec![x()]),
        (
            "optional",
            ran(x(), vec![node("Optional10", &two, &["y", "z"], vec![])], both),
            vec![floats(&[11.0, 22.0]), floats(&[2.0])],
        ),
        (
            "omitted",
            ran(x(), vec![node("Optional10", &["x", ""], &["y", "z"], vec![])], both),
            vec![x(), floats(&[1.0])],
        ),
        (
            "variadic",
            ran(x(), vec![node("Variadic14", &["x", "b", "x"], &["y"], vec![])], Y),
            vec![floats(&[36.0])],
        ),
        (
            "variadic outputs",
            ran(x(), vec![node("Variadic14", &two, &["y", "z"], vec![])], both),
            vec![floats(&[3.0]), floats(&[30.0])],
        ),
        (
            "attributes",
            ran(x(), vec![node("Attributes16", &one, &["y"], attributes(0))], Y),
            vec![floats(&[19.75, 39.5])],
        ),
        (
            "inference",
            ran(
                x(),
                vec![
                    node("Repeat17", &one, &["a"], vec![whole("times", 2)]),
                    node("Neg", &["a"], &["y"], vec![]),
                ],
                Y,
            ),
            vec![floats(&[-1.0, -2.0, -1.0, -2.0])],
        ),
        (
            "in place",
            ran(
                x(),
                vec![
                    node("Neg", &one, &["a"], vec![]),
                    node("Increment18", &["a"], &["c"], vec![]),
                    node("Neg", &["c"], &["y"], vec![]),
                ],
                Y,
            ),
            vec![floats(&[0.0, 1.0])],
        ),
        ("any type", ran(x(), vec![node("Any", &one, &["y"], vec![])], Y), vec![x()]),
        (
            "any type, integers",
            ran(Data::Ints(vec![5, -6]), vec![node("Any", &one, &["y"], vec![])], &[("y", INT64)]),
            vec![Data::Ints(vec![5, -6])],
        ),
        ("overload", ran(x(), vec![node("Over", &one, &["y"], vec![])], Y), vec![x()]),
        (
            "overload, integers",
            ran(Data::Ints(vec![7]), vec![node("Over", &one, &["y"], vec![])], &[("y", INT64)]),
            vec![Data::Ints(vec![7])],
        ),
        (
            "strings",
            ran(
                Data::Texts(vec!["ä".into(), String::new()]),
                vec![node("Shout", &one, &["y"], vec![])],
                &[("y", STRING)],
            ),
            vec![Data::Texts(vec!["ä!".into(), "!".into()])],
        ),
        ("Add", ran(x(), vec![node("Double", &one, &["y"], vec![])], Y), vec![floats(&[2.0, 4.0])]),
        (
            "TopK",
            ran(
                floats(&[1.0, 9.0, 3.0]),
                vec![node("Largest", &["x", "k"], &["y", "z"], vec![])],
                &[("y", FLOAT), ("z", INT64)],
            ),
            vec![floats(&[9.0, 3.0]), Data::Ints(vec![1, 2])],
        ),
    ];
    for (name, found, expected) in cases {
        assert_eq!(found, Ok(expected), "{name}");
    }
    let many: Vec<f32> = (0..10_000u16).map(f32::from).collect();
    let expected = many.iter().map(|x| x * 2.0).collect();
    let parallel = vec![node("Parallel", &one, &["y"], vec![number("factor", 2.0)])];
    assert_eq!(ran(Data::Floats(many), parallel, Y), Ok(vec![Data::Floats(expected)]));
}

#[test]
fn failures_have_the_code_and_the_words_of_the_kernel() {
    let _turn = TURN.lock();
    let x = || floats(&[1.0, 2.0]);
    let one = ["x"];
    let cases = [
        (
            ran(x(), vec![node("Attributes16", &one, &["y"], attributes(1))], Y),
            6,
            "Exception during initialization: no kernel in mode 1",
        ),
        (
            ran(x(), vec![node("Attributes16", &one, &["y"], attributes(2))], Y),
            2,
            "Non-zero status code returned while running Attributes16 node. Name:'the_Attributes16' Status Message: \
             no result in mode 2",
        ),
        (
            ran(x(), vec![node("Attributes16", &one, &["y"], vec![whole("mode", 0)])], Y),
            6,
            "No attribute with name:'float'is defined.",
        ),
        (
            ran(x(), vec![node("Attributes16", &one, &["y"], vec![number("mode", 0.0)])], Y),
            6,
            "Attribute name and type don't match",
        ),
        (
            ran(x(), vec![node("Unknown", &one, &["y"], vec![])], Y),
            1,
            "test.custom:Unknown(-1) is not a registered",
        ),
    ];
    for (found, code, words) in cases {
        let (found, text) = found.unwrap_err();
        assert!(found == code && text.contains(words), "{found} {text}");
    }
}

#[test]
fn kernels_are_made_once_and_destroyed_with_the_session() {
    let _turn = TURN.lock();
    calls();
    // The first output has no reader, and two nodes are equal.
    let scale = |output: &str| node("Scale16", &["b"], &[output], vec![number("factor", 2.0)]);
    let nodes = vec![
        NodeProto { name: Some("unread".into()), ..scale("unread") },
        NodeProto { name: Some("one".into()), ..scale("one") },
        NodeProto { name: Some("other".into()), ..scale("other") },
        node("Variadic14", &["x", "one", "other"], &["y"], vec![]),
    ];
    let session = create(&model(FLOAT, nodes, Y)).unwrap();
    let create = |op: &str| format!("create {op}");
    let made = ["Scale16", "Scale16", "Scale16", "Variadic14"];
    assert_eq!(calls(), made.map(create));
    for _ in 0..2 {
        assert_eq!(run(session, floats(&[1.0]), Y), Ok(vec![floats(&[121.0])]));
        // The order of nodes that do not depend on each other is open.
        let mut computed = calls();
        computed.sort();
        assert_eq!(computed, made.map(|op| format!("compute {op}")));
    }
    raw!(ReleaseSession(session));
    let mut destroyed = calls();
    destroyed.sort();
    assert_eq!(destroyed, made.map(|op| format!("destroy {op}")));
}

#[test]
fn libraries_that_cannot_be_used_are_refused() {
    let options: *mut OrtSessionOptions = make!(CreateSessionOptions());
    let path = CString::new(crate::library::path().to_str().unwrap()).unwrap();
    let cases = [
        (
            raw!(RegisterCustomOpsLibrary_V2(options, c"/no/such/library.so".as_ptr().cast())),
            1,
            "Failed to load library",
        ),
        (
            raw!(RegisterCustomOpsLibrary_V2(options, path.as_ptr().cast())),
            1,
            "Failed to get symbol RegisterCustomOps",
        ),
        (
            raw!(RegisterCustomOpsUsingFunction(options, c"".as_ptr())),
            2,
            "RegisterCustomOpsUsingFunction: Registration function name must be specified.",
        ),
        (
            raw!(RegisterCustomOpsUsingFunction(options, c"NoSuchFunction".as_ptr())),
            2,
            "RegisterCustomOpsUsingFunction: Registration function was not found",
        ),
        (
            raw!(EnableOrtCustomOps(options)),
            1,
            "EnableOrtCustomOps: Custom operators in onnxruntime-extensions are not enabled",
        ),
    ];
    for (status, code, words) in cases {
        let (found, text) = refusal(status).unwrap();
        assert!(found == code && text.contains(words), "{found} {text}");
    }
    let mut handle = null_mut();
    let path = CString::new(library().to_str().unwrap()).unwrap();
    call!(RegisterCustomOpsLibrary(options, path.as_ptr(), &raw mut handle));
    assert!(!handle.is_null(), "the caller closes it");
    raw!(ReleaseSessionOptions(options));
}
