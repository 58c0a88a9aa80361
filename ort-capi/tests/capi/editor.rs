//! Models that a caller makes by calls, and attributes of their nodes.

use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};

use ort_sys::{
    OrtGraph, OrtModel, OrtModelEditorApi, OrtNode, OrtOpAttr, OrtOpAttrType, OrtSession, OrtStatusPtr,
    OrtTypeInfo, OrtValue, OrtValueInfo,
};

use crate::library::{
    api, bytes_of, c, call, data, element_type, env, json, make, raw, refusal, run, run_one, string, tensor,
};

fn editor() -> &'static OrtModelEditorApi {
    // SAFETY: the table is one of the library.
    unsafe { raw!(GetModelEditorApi()).as_ref() }.unwrap()
}

/// Calls a function of the model editor.
macro_rules! edit {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the arguments are those that the header demands, or null.
        refusal(unsafe { (editor().$name)($($argument),*) })
    };
}

type Refused = Option<(i32, String)>;

fn done(refused: Refused) {
    assert_eq!(refused, None);
}

fn ty(kind: i32, dims: &[i64]) -> *mut OrtTypeInfo {
    let info: *mut ort_sys::OrtTensorTypeAndShapeInfo = make!(CreateTensorTypeAndShapeInfo());
    call!(SetTensorElementType(info, element_type(kind)));
    call!(SetDimensions(info, dims.as_ptr(), dims.len()));
    let mut ty = null_mut();
    done(edit!(CreateTensorTypeInfo(info, &mut ty)));
    raw!(ReleaseTensorTypeAndShapeInfo(info));
    ty
}

fn value(name: &str, kind: i32, dims: &[i64]) -> *mut OrtValueInfo {
    let (mut info, ty) = (null_mut(), ty(kind, dims));
    done(edit!(CreateValueInfo(c(name).as_ptr(), ty, &mut info)));
    raw!(ReleaseTypeInfo(ty));
    info
}

struct Call<'a> {
    operator: &'a str,
    inputs: &'a [&'a str],
    outputs: &'a [&'a str],
    attribute: *mut OrtOpAttr,
    domain: &'a str,
}

fn node(call: &Call<'_>) -> *mut OrtNode {
    let texts = |names: &[&str]| names.iter().map(|name| c(name)).collect::<Vec<CString>>();
    let (inputs, outputs) = (texts(call.inputs), texts(call.outputs));
    let pointers = |names: &[CString]| names.iter().map(|name| name.as_ptr()).collect::<Vec<*const c_char>>();
    let (input_names, output_names) = (pointers(&inputs), pointers(&outputs));
    let mut attributes = [call.attribute];
    let count = usize::from(!call.attribute.is_null());
    let mut node = null_mut();
    done(edit!(CreateNode(
        c(call.operator).as_ptr(),
        c(call.domain).as_ptr(),
        c"node".as_ptr(),
        input_names.as_ptr(),
        input_names.len(),
        output_names.as_ptr(),
        output_names.len(),
        attributes.as_mut_ptr(),
        count,
        &mut node
    )));
    assert!(count == 0 || attributes[0].is_null(), "the node owns the attribute");
    node
}

fn attribute<T>(name: &str, content: &[T], kind: OrtOpAttrType) -> *mut OrtOpAttr {
    make!(CreateOpAttr(c(name).as_ptr(), content.as_ptr().cast(), content.len() as i32, kind))
}

fn empty_graph() -> *mut OrtGraph {
    let mut graph = null_mut();
    done(edit!(CreateGraph(&mut graph)));
    graph
}

fn model(opsets: &[(&str, i32)], graph: *mut OrtGraph) -> *mut OrtModel {
    let domains: Vec<CString> = opsets.iter().map(|(domain, _)| c(domain)).collect();
    let domains: Vec<_> = domains.iter().map(|domain| domain.as_ptr()).collect();
    let versions: Vec<i32> = opsets.iter().map(|(_, version)| *version).collect();
    let mut model = null_mut();
    done(edit!(CreateModel(domains.as_ptr(), versions.as_ptr(), versions.len(), &mut model)));
    done(edit!(AddGraphToModel(model, graph)));
    model
}

/// A tensor of two elements in memory of the library.
fn small() -> *mut OrtValue {
    let allocator = make!(GetAllocatorWithDefaultOptions());
    make!(CreateTensorAsOrtValue(allocator, [2i64].as_ptr(), 1, element_type(1)))
}

/// A model of one product with a weight in the memory of the caller.
fn gemm(opsets: &[(&str, i32)], right: &str, weight: &mut [u8]) -> (*mut OrtModel, *mut OrtGraph) {
    let graph = empty_graph();
    let (mut inputs, mut outputs) = ([value("X", 1, &[3, 4])], [value("Z", 1, &[3, 8])]);
    done(edit!(SetGraphInputs(graph, inputs.as_mut_ptr(), 1)));
    done(edit!(SetGraphOutputs(graph, outputs.as_mut_ptr(), 1)));
    assert!(inputs[0].is_null() && outputs[0].is_null(), "the graph owns them");
    let attribute = attribute("alpha", &[2f32], OrtOpAttrType::ORT_OP_ATTR_FLOAT);
    let call = Call { operator: "Gemm", inputs: &["X", right], outputs: &["Z"], attribute, domain: "" };
    done(edit!(AddNodeToGraph(graph, node(&call))));
    done(edit!(AddInitializerToGraph(graph, c"Y".as_ptr(), tensor(weight, &[4, 8], 1), true)));
    (model(opsets, graph), graph)
}

fn weight() -> Vec<u8> {
    (1..=32).flat_map(|number| (number as f32).to_le_bytes()).collect()
}

/// A cast before the input of the model `add`.
fn change(opsets: &[(&str, i32)], with_input: bool, domain: &str) -> *mut OrtModel {
    let graph = empty_graph();
    let attribute = attribute("to", &[1i64], OrtOpAttrType::ORT_OP_ATTR_INT);
    let call = Call { operator: "Cast", inputs: &["i"], outputs: &["x"], attribute, domain };
    done(edit!(AddNodeToGraph(graph, node(&call))));
    if with_input {
        done(edit!(SetGraphInputs(graph, [value("i", 7, &[2, 3])].as_mut_ptr(), 1)));
    }
    model(opsets, graph)
}

fn unfinished() -> *mut OrtSession {
    let bytes = std::fs::read(data("models/add.onnx")).unwrap();
    let mut session = null_mut();
    done(edit!(CreateModelEditorSessionFromArray(
        env(),
        bytes.as_ptr().cast::<c_void>(),
        bytes.len(),
        null(),
        &mut session
    )));
    session
}

fn apply(session: *mut OrtSession, model: *mut OrtModel) -> Refused {
    let refused = edit!(ApplyModelToModelEditorSession(session, model));
    raw!(ReleaseModel(model));
    refused
}

fn finish(session: *mut OrtSession) -> Refused {
    edit!(FinalizeModelEditorSession(session, null(), null_mut()))
}

fn session_of(model: *mut OrtModel) -> Refused {
    let mut session = null_mut();
    let refused = edit!(CreateSessionFromModel(env(), model, null(), &mut session));
    raw!(ReleaseModel(model));
    refused
}

/// The cases of values, nodes and graphs.
fn objects() -> Vec<(String, Refused)> {
    let (graph, info, plain) = (empty_graph(), value("v", 1, &[1]), ty(1, &[1]));
    let (mut sequence, mut out) = (null_mut(), null_mut());
    done(edit!(CreateSequenceTypeInfo(plain, &mut sequence)));
    let dims = {
        let info = make!(CreateTensorTypeAndShapeInfo());
        refusal(raw!(SetDimensions(info, [-2i64].as_ptr(), 1)))
    };
    let mut cases = vec![
        ("value without a name", edit!(CreateValueInfo(c"".as_ptr(), plain, &mut out))),
        ("value without a type", edit!(CreateValueInfo(c"v".as_ptr(), null(), &mut out))),
        ("value of a sequence", edit!(CreateValueInfo(c"v".as_ptr(), sequence, &mut out))),
        ("dimension -2", dims),
        ("input twice", edit!(SetGraphInputs(graph, [info, info].as_mut_ptr(), 2))),
        ("null input", edit!(SetGraphInputs(graph, [null_mut()].as_mut_ptr(), 1))),
    ];
    done(edit!(SetGraphInputs(graph, [info].as_mut_ptr(), 1)));
    cases.push(("input that is an output", edit!(SetGraphOutputs(graph, [info].as_mut_ptr(), 1))));
    let relu =
        node(&Call { operator: "Relu", inputs: &["v"], outputs: &["w"], attribute: null_mut(), domain: "" });
    done(edit!(AddNodeToGraph(graph, relu)));
    cases.push(("node twice", edit!(AddNodeToGraph(graph, relu))));
    cases.push(("null node", edit!(AddNodeToGraph(graph, null_mut()))));
    let (weight, other) = (small(), small());
    done(edit!(AddInitializerToGraph(graph, c"a".as_ptr(), weight, false)));
    cases.extend([
        ("initializer of a known name", edit!(AddInitializerToGraph(graph, c"a".as_ptr(), other, false))),
        ("initializer twice", edit!(AddInitializerToGraph(graph, c"b".as_ptr(), weight, false))),
        ("small initializer", edit!(AddInitializerToGraph(graph, c"c".as_ptr(), other, true))),
        ("null initializer", edit!(AddInitializerToGraph(graph, c"c".as_ptr(), null_mut(), false))),
    ]);
    let model = model(&[("", 18)], graph);
    cases.push(("second graph", edit!(AddGraphToModel(model, empty_graph()))));
    // What was added belongs to the model.
    raw!(ReleaseNode(relu));
    raw!(ReleaseValueInfo(info));
    raw!(ReleaseGraph(graph));
    raw!(ReleaseModel(model));
    raw!(ReleaseValue(other));
    cases.into_iter().map(|(name, refused)| (name.to_owned(), refused)).collect()
}

/// The cases of sessions.
fn sessions() -> Vec<(String, Refused)> {
    let (mut weight, mut x, mut opset) = (weight(), [0u8; 24], 0);
    let session = unfinished();
    let x = tensor(&mut x, &[2, 3], 1);
    let early = run(session, &[("x", x.cast_const())], &["y"], &mut [null_mut()]);
    let mut cases = vec![
        ("no operator sets", session_of(gemm(&[], "Y", &mut weight).0)),
        ("missing value", session_of(gemm(&[("", 18)], "missing", &mut weight).0)),
        ("unused domain", edit!(SessionGetOpsetForDomain(session, c"unused".as_ptr(), &mut opset))),
        ("run too early", early),
        ("other operator set", apply(session, change(&[("", 11)], true, ""))),
        ("written input", apply(unfinished(), change(&[], false, ""))),
    ];
    done(edit!(SessionGetOpsetForDomain(session, c"".as_ptr(), &mut opset)));
    assert_eq!(opset, 21);
    done(finish(session));
    done(finish(session));
    cases.push(("change too late", apply(session, change(&[], true, ""))));
    cases.into_iter().map(|(name, refused)| (name.to_owned(), refused)).collect()
}

/// Calls a function with a number that `OrtOpAttrType` may not have.
fn read(attribute: *const OrtOpAttr, number: i32, memory: &mut [u8]) -> (Refused, usize) {
    type Read = unsafe extern "C" fn(*const OrtOpAttr, i32, *mut c_void, usize, *mut usize) -> OrtStatusPtr;
    // SAFETY: an enumeration of C is an `i32`, and the library takes any number.
    let read = unsafe { std::mem::transmute::<usize, Read>(api().ReadOpAttr as usize) };
    let mut size = 77;
    // SAFETY: the memory has its length.
    let status = unsafe { read(attribute, number, memory.as_mut_ptr().cast(), memory.len(), &mut size) };
    (refusal(status), size)
}

fn attributes() -> Vec<(String, Refused)> {
    type Create =
        unsafe extern "C" fn(*const c_char, *const c_void, i32, i32, *mut *mut OrtOpAttr) -> OrtStatusPtr;
    // SAFETY: as above.
    let create = unsafe { std::mem::transmute::<usize, Create>(api().CreateOpAttr as usize) };
    let mut made = null_mut();
    let mut cases = Vec::new();
    for number in [0, 7, 8, 9] {
        // SAFETY: no element is read.
        let refused = refusal(unsafe { create(c"a".as_ptr(), null(), 0, number, &mut made) });
        cases.push((format!("attribute of type {number}"), refused));
    }
    let ints = attribute("a", &[1i64, 2], OrtOpAttrType::ORT_OP_ATTR_INTS);
    for (what, number) in [("ints", 2), ("a float", 3), ("a graph", 7)] {
        cases.push((format!("memory for {what}"), read(ints, number, &mut []).0));
    }
    cases.push(("no int".to_owned(), read(ints, 1, &mut [0; 8]).0));
    cases.push(("no float".to_owned(), read(ints, 3, &mut [0; 8]).0));
    let no_tensor = refusal(raw!(OpAttr_GetTensorAttributeAsOrtValue(ints, &mut null_mut())));
    cases.push(("no tensor".to_owned(), no_tensor));
    raw!(ReleaseOpAttr(ints));
    cases
}

/// Our text begins with ONNX Runtime's, and may go on with the numbers of the case.
#[test]
fn refusals_are_those_of_onnx_runtime() {
    let recorded = &json("editor.json")["errors"];
    let cases: Vec<_> = objects().into_iter().chain(sessions()).chain(attributes()).collect();
    for (name, refused) in &cases {
        let expected = recorded.get(name).unwrap_or_else(|| panic!("'{name}' is not recorded"));
        let (code, text) = refused.as_ref().unwrap_or_else(|| panic!("'{name}' is not refused"));
        assert_eq!(i64::from(*code), expected["code"].as_i64().unwrap(), "{name}: {text}");
        let words = expected["text"].as_str().unwrap();
        assert!(text.starts_with(words), "{name}: '{text}' does not begin with '{words}'");
    }
    assert_eq!(cases.len(), recorded.as_object().unwrap().len(), "each recorded case is tested");
}

#[test]
fn a_domain_without_an_import_is_named() {
    let (code, text) = apply(unfinished(), change(&[], true, "invalid_domain")).unwrap();
    assert_eq!(code, 10);
    assert!(
        text.starts_with("This is an invalid model. In Node, (\"node\", Cast, \"invalid_domain\", -1)"),
        "{text}"
    );
    assert!(text.contains("Error No opset import for domain 'invalid_domain'"), "{text}");
}

fn hex(text: &serde_json::Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn a_made_model_computes_what_onnx_runtime_computes() {
    let recorded = &json("editor.json")["results"]["gemm"];
    let mut weight = weight();
    let (model, _) = gemm(&[("ai.onnx", 18)], "Y", &mut weight);
    let mut session = null_mut();
    done(edit!(CreateSessionFromModel(env(), model, null(), &mut session)));
    // The session does not need the model.
    raw!(ReleaseModel(model));
    let mut input = hex(&recorded["input"]);
    let output = run_one(session, &[("X", tensor(&mut input, &[3, 4], 1).cast_const())], "Z");
    assert_eq!(bytes_of(output), hex(&recorded["output"]));
    raw!(ReleaseSession(session));
}

#[test]
fn a_changed_model_computes_what_onnx_runtime_computes() {
    let recorded = &json("editor.json")["results"]["cast"];
    let session = unfinished();
    done(apply(session, change(&[], true, "")));
    let allocator = make!(GetAllocatorWithDefaultOptions());
    assert_eq!(string(make!(SessionGetInputName(session, 0, allocator))), "i");
    done(finish(session));
    let mut input = hex(&recorded["input"]);
    let output = run_one(session, &[("i", tensor(&mut input, &[2, 3], 7).cast_const())], "y");
    assert_eq!(bytes_of(output), hex(&recorded["output"]));
    raw!(ReleaseSession(session));
}

#[test]
fn a_changed_model_keeps_the_options_of_its_session() {
    let bytes = std::fs::read(data("models/add.onnx")).unwrap();
    let options: *mut ort_sys::OrtSessionOptions = make!(CreateSessionOptions());
    let key = c"session.record_ep_graph_assignment_info";
    call!(AddSessionConfigEntry(options, key.as_ptr(), c"1".as_ptr()));
    let other: *mut ort_sys::OrtSessionOptions = make!(CreateSessionOptions());
    for given in [null(), other.cast_const()] {
        let mut session = null_mut();
        let data = bytes.as_ptr().cast::<c_void>();
        done(edit!(CreateModelEditorSessionFromArray(env(), data, bytes.len(), options, &mut session)));
        done(apply(session, change(&[], true, "")));
        done(edit!(FinalizeModelEditorSession(session, given, null_mut())));
        let (mut assigned, mut count) = (null(), 0);
        call!(Session_GetEpGraphAssignmentInfo(session, &mut assigned, &mut count));
        assert!(count > 0);
        raw!(ReleaseSession(session));
    }
}

/// An allocator that counts what is given back to it.
#[repr(C)]
struct Counter {
    table: ort_sys::OrtAllocator,
    freed: usize,
}

extern "system" fn count(counter: *mut ort_sys::OrtAllocator, _: *mut c_void) {
    // SAFETY: the test passes its counter.
    unsafe { (*counter.cast::<Counter>()).freed += 1 };
}

extern "system" fn host(_: *const ort_sys::OrtAllocator) -> *const ort_sys::OrtMemoryInfo {
    crate::library::memory_info()
}

#[test]
fn an_external_initializer_stays_in_the_callers_memory_until_the_session_ends() {
    let table = ort_sys::OrtAllocator {
        version: 31,
        Alloc: None,
        Free: Some(count),
        Info: Some(host),
        Reserve: None,
        GetStats: None,
        AllocOnStream: None,
        Shrink: None,
    };
    let mut counter = Counter { table, freed: 0 };
    let allocator = (&raw mut counter).cast::<ort_sys::OrtAllocator>();
    let mut weight: Vec<u8> = (0..1000).flat_map(|number| (number as f32).to_le_bytes()).collect();
    let graph = empty_graph();
    done(edit!(SetGraphInputs(graph, [value("x", 1, &[1000])].as_mut_ptr(), 1)));
    done(edit!(SetGraphOutputs(graph, [value("z", 1, &[1000])].as_mut_ptr(), 1)));
    let attribute = null_mut();
    let add = Call { operator: "Add", inputs: &["x", "w"], outputs: &["z"], attribute, domain: "" };
    done(edit!(AddNodeToGraph(graph, node(&add))));
    let tensor_of_weight = make!(CreateTensorWithDataAndDeleterAsOrtValue(
        allocator,
        weight.as_mut_ptr().cast(),
        weight.len(),
        [1000i64].as_ptr(),
        1,
        element_type(1)
    ));
    done(edit!(AddInitializerToGraph(graph, c"w".as_ptr(), tensor_of_weight, true)));
    let model = model(&[("", 18)], graph);
    let mut session = null_mut();
    done(edit!(CreateSessionFromModel(env(), model, null(), &mut session)));
    raw!(ReleaseModel(model));
    assert_eq!(counter.freed, 0);
    // The session reads the memory itself: what is written there shows.
    weight[..4].copy_from_slice(&7.5f32.to_le_bytes());
    let mut input = vec![0u8; 4000];
    let output = run_one(session, &[("x", tensor(&mut input, &[1000], 1).cast_const())], "z");
    assert_eq!(bytes_of(output), weight);
    raw!(ReleaseValue(output));
    raw!(ReleaseSession(session));
    assert_eq!(counter.freed, 1);
}

#[test]
fn a_constant_node_takes_a_number_under_the_name_value() {
    let graph = empty_graph();
    done(edit!(SetGraphInputs(graph, [value("x", 1, &[2])].as_mut_ptr(), 1)));
    done(edit!(SetGraphOutputs(graph, [value("z", 1, &[2])].as_mut_ptr(), 1)));
    let two = attribute("value", &[2f32], OrtOpAttrType::ORT_OP_ATTR_FLOAT);
    let constant = Call { operator: "Constant", inputs: &[], outputs: &["c"], attribute: two, domain: "" };
    let mul =
        Call { operator: "Mul", inputs: &["x", "c"], outputs: &["z"], attribute: null_mut(), domain: "" };
    // Nodes may be in any order.
    done(edit!(AddNodeToGraph(graph, node(&mul))));
    done(edit!(AddNodeToGraph(graph, node(&constant))));
    let model = model(&[("", 18)], graph);
    let mut session = null_mut();
    done(edit!(CreateSessionFromModel(env(), model, null(), &mut session)));
    raw!(ReleaseModel(model));
    let mut input: Vec<u8> = [1f32, 3.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    let output = run_one(session, &[("x", tensor(&mut input, &[2], 1).cast_const())], "z");
    let expected: Vec<u8> = [2f32, 6.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    assert_eq!(bytes_of(output), expected);
}

#[test]
fn attributes_are_read_as_they_were_made() {
    let texts = [c"ab".as_ptr(), c"cde".as_ptr()];
    let floats: Vec<u8> = [1f32, 2.0].iter().flat_map(|float| float.to_le_bytes()).collect();
    let ints: Vec<u8> = [5i64, -6].iter().flat_map(|int| int.to_le_bytes()).collect();
    use OrtOpAttrType::*;
    let cases = [
        (attribute("a", &[-3i64], ORT_OP_ATTR_INT), ORT_OP_ATTR_INT, (-3i64).to_le_bytes().to_vec()),
        (attribute("a", &[5i64, -6], ORT_OP_ATTR_INTS), ORT_OP_ATTR_INTS, ints),
        (attribute("a", &[1.5f32], ORT_OP_ATTR_FLOAT), ORT_OP_ATTR_FLOAT, 1.5f32.to_le_bytes().to_vec()),
        (attribute("a", &[1f32, 2.0], ORT_OP_ATTR_FLOATS), ORT_OP_ATTR_FLOATS, floats),
        (attribute("a", b"x\0y", ORT_OP_ATTR_STRING), ORT_OP_ATTR_STRING, b"x\0y".to_vec()),
        (attribute("a", &texts, ORT_OP_ATTR_STRINGS), ORT_OP_ATTR_STRINGS, b"ab\0cde\0".to_vec()),
    ];
    for (attribute, kind, expected) in cases {
        assert_eq!(make!(OpAttr_GetType(attribute)), kind);
        assert_eq!(string(make!(OpAttr_GetName(attribute))), "a");
        let mut memory = [0u8; 64];
        let (refused, size) = read(attribute, kind as i32, &mut memory);
        assert_eq!((refused, &memory[..size]), (None, &expected[..]), "{kind:?}");
        let (refused, size) = read(attribute, kind as i32, &mut memory[..expected.len() - 1]);
        assert_eq!((refused.map(|(code, _)| code), size), (Some(2), expected.len()), "{kind:?}");
        raw!(ReleaseOpAttr(attribute));
    }
}

#[test]
fn a_made_graph_can_be_read() {
    let mut weight = weight();
    let (model, graph) = gemm(&[("", 18)], "Y", &mut weight);
    let count = |index: usize| -> usize { index };
    assert_eq!(count(make!(Graph_GetNumInputs(graph))), 1);
    assert_eq!(count(make!(Graph_GetNumOutputs(graph))), 1);
    assert_eq!(count(make!(Graph_GetNumInitializers(graph))), 1);
    assert_eq!(count(make!(Graph_GetNumNodes(graph))), 1);
    assert_eq!(count(make!(Graph_GetNumOperatorSets(graph))), 1);
    let (mut domain, mut version) = ([null()], [0i64]);
    call!(Graph_GetOperatorSets(graph, domain.as_mut_ptr(), version.as_mut_ptr(), 1));
    assert_eq!((string(domain[0]), version[0]), (String::new(), 18));
    let mut nodes = [null::<OrtNode>()];
    call!(Graph_GetNodes(graph, nodes.as_mut_ptr(), 1));
    let node = nodes[0];
    assert_eq!(string(make!(Node_GetOperatorType(node))), "Gemm");
    assert_eq!(string(make!(Node_GetDomain(node))), "");
    assert_eq!(make!(Node_GetSinceVersion(node)), 13);
    let back: *const OrtGraph = make!(Node_GetGraph(node));
    assert!(std::ptr::eq(back, graph));
    let attribute: *const OrtOpAttr = make!(Node_GetAttributeByName(node, c"alpha".as_ptr()));
    let mut memory = [0u8; 4];
    assert_eq!(read(attribute, 3, &mut memory), (None, 4));
    assert_eq!(f32::from_le_bytes(memory), 2.0);
    let mut inputs = [null::<OrtValueInfo>(); 2];
    call!(Node_GetInputs(node, inputs.as_mut_ptr(), 2));
    let [x, y] = inputs;
    assert_eq!(string(make!(GetValueInfoName(y))), "Y");
    let role = |info, index: usize| -> [bool; 4] {
        let is = [
            make!(ValueInfo_IsRequiredGraphInput(info)),
            make!(ValueInfo_IsOptionalGraphInput(info)),
            make!(ValueInfo_IsGraphOutput(info)),
            make!(ValueInfo_IsConstantInitializer(info)),
        ];
        assert_eq!(is.iter().position(|is| *is), Some(index));
        is
    };
    role(x, 0);
    role(y, 3);
    let initializer: *const OrtValue = make!(ValueInfo_GetInitializerValue(y));
    assert_eq!(bytes_of(initializer), weight);
    let mut outputs = [null::<OrtValueInfo>()];
    call!(Node_GetOutputs(node, outputs.as_mut_ptr(), 1));
    role(outputs[0], 2);
    let (mut producer, mut port) = (null(), 9);
    call!(ValueInfo_GetValueProducer(outputs[0], &mut producer, &mut port));
    assert!(std::ptr::eq(producer, node) && port == 0);
    let (mut readers, mut ports) = ([null::<OrtNode>()], [9i64]);
    assert_eq!(count(make!(ValueInfo_GetValueNumConsumers(y))), 1);
    call!(ValueInfo_GetValueConsumers(y, readers.as_mut_ptr(), ports.as_mut_ptr(), 1));
    assert!(std::ptr::eq(readers[0], node) && ports[0] == 1);
    let view: *mut OrtGraph = make!(Graph_GetGraphView(graph, nodes.as_mut_ptr(), 1));
    assert_eq!(count(make!(Graph_GetNumInputs(view))), 1);
    assert_eq!(count(make!(Graph_GetNumInitializers(view))), 1);
    raw!(ReleaseGraph(view));
    raw!(ReleaseModel(model));
}

#[test]
fn an_object_has_one_owner() {
    let axis = attribute("axis", &[1i64], OrtOpAttrType::ORT_OP_ATTR_INT);
    let refused = |attributes: &mut [*mut OrtOpAttr]| {
        let mut node = null_mut();
        let (names, count) = (null::<*const c_char>(), attributes.len());
        let (code, text) = edit!(CreateNode(
            c"Softmax".as_ptr(),
            c"".as_ptr(),
            c"node".as_ptr(),
            names,
            0,
            names,
            0,
            attributes.as_mut_ptr(),
            count,
            &mut node
        ))
        .unwrap();
        assert!(code == 2 && text.contains("belongs to one node") && node.is_null(), "{code} {text}");
    };
    refused(&mut [axis, axis]);
    let owner =
        node(&Call { operator: "Softmax", inputs: &["x"], outputs: &["y"], attribute: axis, domain: "" });
    refused(&mut [axis]);
    // The node still has it afterwards.
    raw!(ReleaseOpAttr(axis));
    let mut name = null();
    call!(OpAttr_GetName(axis, &mut name));
    raw!(ReleaseNode(owner));

    let (weight, graph, other) = (small(), empty_graph(), empty_graph());
    done(edit!(AddInitializerToGraph(graph, c"w".as_ptr(), weight, false)));
    assert!(edit!(AddInitializerToGraph(other, c"w".as_ptr(), weight, false)).is_some());
    raw!(ReleaseValue(weight));
    let mut is_tensor = 0;
    call!(IsTensor(weight, &mut is_tensor));
    assert_eq!(is_tensor, 1);
    raw!(ReleaseGraph(graph));
    raw!(ReleaseGraph(other));
}
