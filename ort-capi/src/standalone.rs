//! `OrtOp`: an operator of the engine, run by a client's kernel.
//!
//! It is a session of a model with one node, so that versions, attributes and checks are those of
//! any model. Sessions are kept by the types of the inputs.

use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::sync::Arc;

use ort_runtime::ep::RunControl;
use ort_runtime::fork::Mutex;
use ort_runtime::onnx::Source;
use ort_runtime::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TypeProto, ValueInfoProto,
    type_proto,
};
use ort_runtime::spec::{OpSpec, Registry};
use ort_runtime::{DType, SessionOptions as EngineOptions};

use prost::Message as _;

use crate::element_type::of_number;
use crate::entry::{Array, ArrayMut, In, Object, Out, Released, Text, entries, kinds};
use crate::kernel_context::KernelContext;
use crate::kernel_info::KernelInfo;
use crate::op_attr::OpAttr;
use crate::run::{Request, RunKind, run};
use crate::session::Session;
use crate::session_options::SessionOptions;
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::value::Value;

/// The element type of each input; `None` for one that is left out.
type InputTypes = Vec<Option<i32>>;

/// What a session of an operator is built for.
#[derive(PartialEq, Eq, Hash)]
struct SessionKey {
    types: InputTypes,
    threads: usize,
}

/// An operator with attributes.
pub(crate) struct Operator {
    name: String,
    domain: String,
    version: i64,
    attributes: Vec<AttributeProto>,
    input_count: usize,
    output_count: usize,
    sessions: Mutex<HashMap<SessionKey, Arc<Session>>>,
}

kinds! {
    Operator => "OrtOp", b"OrtOp\0\0\0";
}

impl Operator {
    /// The types of all inputs, if the constraints of the operator's type variables say them.
    fn constrained(&self, spec: &OpSpec, constraints: &[(String, DType)]) -> Option<InputTypes> {
        let dtype = |index: usize| {
            let param = spec.input_param(index)?;
            let fixed = || DType::from_name(param.ty.strip_prefix("tensor(")?.strip_suffix(')')?);
            let bound = constraints.iter().find(|(name, _)| name == param.ty);
            bound.map(|(_, dtype)| *dtype).or_else(fixed).map(|dtype| Some(dtype.onnx_code()))
        };
        (0..self.input_count).map(dtype).collect()
    }

    /// The session for these types. 0 threads stand for the default number.
    fn session(&self, types: InputTypes, threads: usize) -> Outcome<Arc<Session>> {
        let mut key = SessionKey { types, threads };
        if let Some(known) = self.sessions.lock().get(&key) {
            return Ok(Arc::clone(known));
        }
        // Built without the lock: another thread may build the same, and either is right.
        let built = Arc::new(self.build(&key.types, threads)?);
        key.threads = built.engine.threads();
        Ok(Arc::clone(self.sessions.lock().entry(key).or_insert(built)))
    }

    fn build(&self, types: &InputTypes, threads: usize) -> Outcome<Session> {
        let engine = EngineOptions { intra_op_num_threads: threads, ..EngineOptions::default() };
        let options = SessionOptions { engine, ..SessionOptions::default() };
        Session::create(Some(&options), Source::from_bytes(self.model(types).encode_to_vec()))
    }

    /// The model of the one node. Its inputs are named `i0` and so on, its outputs `o0` and so on.
    fn model(&self, types: &InputTypes) -> ModelProto {
        let name = |kind: char, index: usize| format!("{kind}{index}");
        let input = |(index, code): (usize, &Option<i32>)| {
            let tensor = type_proto::Tensor { elem_type: Some((*code)?), ..type_proto::Tensor::default() };
            let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
            let (name, r#type) = (Some(name('i', index)), Some(ty));
            Some(ValueInfoProto { name, r#type, ..ValueInfoProto::default() })
        };
        let listed = |(index, code): (usize, &Option<i32>)| match code {
            Some(_) => name('i', index),
            None => String::new(),
        };
        let outputs: Vec<String> = (0..self.output_count).map(|index| name('o', index)).collect();
        let node = NodeProto {
            input: types.iter().enumerate().map(listed).collect(),
            output: outputs.clone(),
            name: Some(format!("standalone_{}", self.name)),
            op_type: Some(self.name.clone()),
            domain: Some(self.domain.clone()),
            attribute: self.attributes.clone(),
            ..NodeProto::default()
        };
        let output = |name: String| ValueInfoProto { name: Some(name), ..ValueInfoProto::default() };
        let graph = GraphProto {
            name: Some("standalone".to_owned()),
            node: vec![node],
            input: types.iter().enumerate().filter_map(input).collect(),
            output: outputs.into_iter().map(output).collect(),
            ..GraphProto::default()
        };
        let opset = |domain: &str, version| OperatorSetIdProto {
            domain: Some(domain.to_owned()),
            version: Some(version),
        };
        ModelProto {
            ir_version: Some(8),
            graph: Some(graph),
            opset_import: vec![opset(&self.domain, self.version)],
            ..ModelProto::default()
        }
    }
}

fn length(count: c_int, what: &str) -> Outcome<usize> {
    usize::try_from(count).map_err(|_| Failure::invalid(format!("the number of {what} is {count}")))
}

/// Names of inputs or outputs that are given, with the values.
fn named(kind: char, places: impl Iterator<Item = usize>) -> Vec<CString> {
    places.map(|place| CString::new(format!("{kind}{place}")).unwrap_or_default()).collect()
}

fn texts(names: &[CString]) -> Vec<Text> {
    names.iter().map(|name| Text::of(name.as_ptr())).collect()
}

/// Runs an operator on the values of a kernel.
fn invoke(
    operator: &Operator,
    control: &RunControl,
    inputs: &[In<Value>],
    outputs: &mut [*mut Object<Value>],
) -> Outcome {
    if inputs.len() != operator.input_count {
        return invalid(format!(
            "invalid node input count: {}, the operator was created with {}",
            inputs.len(),
            operator.input_count
        ));
    }
    if outputs.len() != operator.output_count {
        return invalid(format!(
            "invalid node output count: {}, the operator was created with {}",
            outputs.len(),
            operator.output_count
        ));
    }
    let type_of = |value: &In<Value>| match value.optional()? {
        Some(value) => {
            value.described().map(|(number, _)| Some(of_number(number).map(DType::onnx_code)))?.transpose()
        }
        None => Ok(None),
    };
    let types: InputTypes = inputs.iter().map(type_of).collect::<Outcome<_>>()?;
    let given = || inputs.iter().enumerate().filter(|(_, value)| !value.is_null());
    let input_names = named('i', given().map(|(place, _)| place));
    let values: Vec<In<Value>> = given().map(|(_, value)| *value).collect();
    let output_names = named('o', 0..outputs.len());
    run(Request {
        session: &*operator.session(types, control.threads)?,
        options: None,
        input_names: &texts(&input_names),
        inputs: &values,
        output_names: &texts(&output_names),
        outputs,
        kind: RunKind::Nested(control.cancel.clone()),
    })
}

entries! {
    /// 213
    fn CreateOp(info: In<KernelInfo>, name: Text, domain: Text, version: c_int, type_names: Array<Text>, types: Array<i32>, type_count: c_int, attributes: Array<In<OpAttr>>, attribute_count: c_int, input_count: c_int, output_count: c_int, out: Out<*mut Object<Operator>>) {
        let out = out.place()?;
        info.get()?;
        let (name, domain) = (name.get("the name of the operator")?, domain.or_empty("the domain")?);
        let count = length(type_count, "type constraints")?;
        let type_names = type_names.get(count, "the array of type constraints")?;
        let types = types.get(count, "the array of types")?;
        let constraint = |(name, number): (&Text, &i32)| {
            Ok((name.get("the name of a type constraint")?.to_owned(), of_number(*number)?))
        };
        let constraints: Vec<(String, DType)> =
            type_names.iter().zip(types).map(constraint).collect::<Outcome<_>>()?;
        let attributes = attributes.get(length(attribute_count, "attributes")?, "the array of attributes")?;
        let attributes = attributes.iter().map(|attribute| Ok(attribute.get()?.proto().clone()));
        let operator = Operator {
            name: name.to_owned(),
            domain: domain.to_owned(),
            version: i64::from(version),
            attributes: attributes.collect::<Outcome<_>>()?,
            input_count: length(input_count, "inputs")?,
            output_count: length(output_count, "outputs")?,
            sessions: Mutex::new(HashMap::new()),
        };
        let Some(spec) = Registry::global()?.find(domain, name) else {
            return fail(code::NOT_IMPLEMENTED, format!("Failed to find kernel for {name}({version})"));
        };
        // Attributes and types that do not fit are refused here, where all types are known.
        if let Some(types) = operator.constrained(spec, &constraints) {
            operator.session(types, 0)?;
        }
        out.put(Object::give(operator));
        Ok(())
    }

    /// 214
    fn InvokeOp(context: In<KernelContext>, operator: In<Operator>, inputs: Array<In<Value>>, input_count: c_int, outputs: ArrayMut<*mut Object<Value>>, output_count: c_int) {
        let control = context.get()?.control();
        let operator = operator.get()?;
        let inputs = inputs.get(length(input_count, "inputs")?, "the array of inputs")?;
        let outputs = outputs.get(length(output_count, "outputs")?, "the array of outputs")?;
        // The caller keeps its array: a value that it leaves null cannot be returned.
        if outputs.iter().any(|output| output.is_null()) {
            return invalid("an output of InvokeOp is null; give a value of its shape");
        }
        let mut outputs = outputs.to_vec();
        invoke(operator, control, inputs, &mut outputs)
    }

    /// 215
    fn ReleaseOp(operator: Released<Operator>) -> (), else (), {
        operator.release();
    }
}
