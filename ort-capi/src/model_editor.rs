//! `OrtModelEditorApi`: models that a caller makes or changes.
//!
//! An object that was added to another one belongs to it. The caller may still read it, and
//! releasing it does nothing.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_runtime::spec::canonical_domain;
use ort_sys::OrtModelEditorApi;

use crate::abi::slot;
use crate::entry::{
    Array, ArrayMut, In, InMut, Object, Out, Owned, PathText, Place, Released, Text, entries,
};
use crate::env::Env;
use crate::graph_objects::{EditedModel, Graph, Initializer, Node, Owner, ValueInfo};
use crate::model_proto::DeclaredModel;
use crate::op_attr::OpAttr;
use crate::session::{PrepackedWeights, Session, copy, open};
use crate::session_edit::Unfinished;
use crate::session_options::SessionOptions;
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::type_info::{TensorInfo, TypeInfo};
use crate::value::Value;

/// The least bytes of a tensor that stays in the caller's memory, as in ONNX Runtime. Shape
/// inference reads smaller ones.
const EXTERNAL_BYTES: usize = 128;

static TABLE: OrtModelEditorApi = OrtModelEditorApi {
    CreateTensorTypeInfo: slot(CreateTensorTypeInfo),
    CreateSparseTensorTypeInfo: slot(CreateSparseTensorTypeInfo),
    CreateMapTypeInfo: slot(CreateMapTypeInfo),
    CreateSequenceTypeInfo: slot(CreateSequenceTypeInfo),
    CreateOptionalTypeInfo: slot(CreateOptionalTypeInfo),
    CreateValueInfo: slot(CreateValueInfo),
    CreateNode: slot(CreateNode),
    CreateGraph: slot(CreateGraph),
    SetGraphInputs: slot(SetGraphInputs),
    SetGraphOutputs: slot(SetGraphOutputs),
    AddInitializerToGraph: slot(AddInitializerToGraph),
    AddNodeToGraph: slot(AddNodeToGraph),
    CreateModel: slot(CreateModel),
    AddGraphToModel: slot(AddGraphToModel),
    CreateSessionFromModel: slot(CreateSessionFromModel),
    CreateModelEditorSession: slot(CreateModelEditorSession),
    CreateModelEditorSessionFromArray: slot(CreateModelEditorSessionFromArray),
    SessionGetOpsetForDomain: slot(SessionGetOpsetForDomain),
    ApplyModelToModelEditorSession: slot(ApplyModelToModelEditorSession),
    FinalizeModelEditorSession: slot(FinalizeModelEditorSession),
};

/// A domain as graphs name it: the standard's own is the empty text.
fn canonical(domain: &Text, what: &str) -> Outcome<CString> {
    Ok(CString::new(canonical_domain(domain.get(what)?)).unwrap_or_default())
}

fn owned(text: &Text, what: &str) -> Outcome<CString> {
    Ok(CString::new(text.get(what)?).unwrap_or_default())
}

fn names(texts: &Array<Text>, count: usize, what: &str) -> Outcome<Vec<CString>> {
    texts.get(count, what)?.iter().map(|text| owned(text, what)).collect()
}

fn named(name: &Text) -> Outcome<CString> {
    if name.is_null() || name.bytes("the name")?.is_empty() {
        return invalid("name cannot be null or empty string");
    }
    owned(name, "the name")
}

/// Copies a node, which then has no graph.
pub(crate) fn copy_of(node: &Node) -> Node {
    Node {
        operator: node.operator.clone(),
        domain: node.domain.clone(),
        name: node.name.clone(),
        inputs: node.inputs.clone(),
        outputs: node.outputs.clone(),
        attributes: node.attributes.iter().map(|attribute| Owned::new((**attribute).clone())).collect(),
        id: AtomicUsize::new(0),
        graph: Owner::none(),
    }
}

/// Takes the inputs or outputs of a graph over.
fn take_infos(
    graph: &InMut<Graph>,
    infos: &mut [Released<ValueInfo>],
    what: &str,
) -> Outcome<Vec<Owned<ValueInfo>>> {
    for (place, handle) in infos.iter().enumerate() {
        if handle.is_null() {
            return invalid(format!("{what} cannot contain null entries"));
        }
        if infos.iter().take(place).any(|other| other.address() == handle.address()) {
            return invalid(format!(
                "Duplicate OrtValueInfo pointer found in {what} array. Each OrtValueInfo can only appear once."
            ));
        }
        if handle.get()?.graph.is_some() {
            return invalid(
                "This OrtValueInfo pointer has already been added to the graph. Each OrtValueInfo must only be added \
                 once.",
            );
        }
    }
    let mut taken = Vec::with_capacity(infos.len());
    for handle in infos {
        let info = handle.take()?;
        info.graph.set(graph.address());
        taken.push(info);
    }
    Ok(taken)
}

/// Refuses attributes that a node cannot take over: nothing is taken if one of them is wrong.
fn check_attributes(attributes: &[Released<OpAttr>]) -> Outcome {
    for (place, attribute) in attributes.iter().enumerate() {
        attribute.get()?;
        let is_repeated = attributes.iter().take(place).any(|other| other.is(attribute.address()));
        if is_repeated || attribute.is_owned() {
            return invalid(format!(
                "attribute {place} of the node is used twice; each OrtOpAttr belongs to one node"
            ));
        }
    }
    Ok(())
}

/// Refuses a value that cannot be an initializer.
fn check_initializer(graph: &Graph, name: &CString, value: &Released<Value>, is_external: bool) -> Outcome {
    let tensor = value.get()?;
    if !tensor.is_tensor() {
        return invalid("Only Tensor is currently supported.");
    }
    if graph.initializer(name).is_some() {
        return invalid("An initializer with this name has already been added to the graph.");
    }
    if value.is_owned() {
        return invalid(
            "This OrtValue pointer has already been added to the graph. Each OrtValue must only be added once.",
        );
    }
    if is_external && tensor.numbers()?.len() < EXTERNAL_BYTES {
        return invalid(format!(
            "data_is_external=true requires the tensor to be larger than 127 bytes (got {} bytes). For smaller \
             tensors, copy the data into an ORT-allocated tensor via CreateTensorAsOrtValue and pass \
             data_is_external=false.",
            tensor.numbers()?.len()
        ));
    }
    Ok(())
}

/// A session that is not finished.
fn unfinished(session: &Session) -> Outcome<&Unfinished> {
    match &session.unfinished {
        Some(unfinished) => Ok(unfinished),
        None => fail(code::MODEL_LOADED, "This session has already been initialized.".to_owned()),
    }
}

fn put_session(place: Place<'_, *mut Object<Session>>, session: Session) {
    place.put(Object::give(session));
}

entries! {
    fn CreateTensorTypeInfo(tensor: In<TensorInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give(TypeInfo::Tensor(Object::new(tensor.get()?.clone()))));
        Ok(())
    }

    fn CreateSparseTensorTypeInfo(tensor: In<TensorInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give(TypeInfo::Sparse(Object::new(tensor.get()?.clone()))));
        Ok(())
    }

    fn CreateMapTypeInfo(key: i32, value: In<TypeInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give(TypeInfo::map(key, value.get()?.clone())?));
        Ok(())
    }

    fn CreateSequenceTypeInfo(element: In<TypeInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give(TypeInfo::sequence(element.get()?.clone())));
        Ok(())
    }

    fn CreateOptionalTypeInfo(element: In<TypeInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give(TypeInfo::optional(element.get()?.clone())));
        Ok(())
    }

    fn CreateValueInfo(name: Text, ty: In<TypeInfo>, out: Out<*mut Object<ValueInfo>>) {
        let out = out.place()?;
        let name = named(&name)?;
        if ty.is_null() {
            return invalid("type_info cannot be null");
        }
        let ty = ty.get()?.clone();
        if !matches!(ty, TypeInfo::Tensor(_)) {
            return fail(code::FAIL, "Only tensor types are supported currently".to_owned());
        }
        out.put(Object::give(ValueInfo { name, ty: Some(Object::new(ty)), graph: Owner::none() }));
        Ok(())
    }

    fn CreateNode(operator: Text, domain: Text, name: Text, inputs: Array<Text>, input_count: usize, outputs: Array<Text>, output_count: usize, attributes: ArrayMut<Released<OpAttr>>, attribute_count: usize, out: Out<*mut Object<Node>>) {
        let out = out.place()?;
        let mut node = Node {
            operator: owned(&operator, "the operator of the node")?,
            domain: canonical(&domain, "the domain of the node")?,
            name: owned(&name, "the name of the node")?,
            inputs: names(&inputs, input_count, "the input names of the node")?,
            outputs: names(&outputs, output_count, "the output names of the node")?,
            attributes: Vec::new(),
            id: AtomicUsize::new(0),
            graph: Owner::none(),
        };
        if !attributes.is_null() {
            let attributes = attributes.get(attribute_count, "the attributes of the node")?;
            check_attributes(attributes)?;
            node.attributes = attributes.iter_mut().map(Released::take).collect::<Outcome<_>>()?;
        }
        out.put(Object::give(node));
        Ok(())
    }

    fn CreateGraph(out: Out<*mut Object<Graph>>) {
        out.place()?.put(Object::give(Graph::new()));
        Ok(())
    }

    fn SetGraphInputs(graph: InMut<Graph>, infos: ArrayMut<Released<ValueInfo>>, count: usize) {
        graph.get()?;
        let infos = infos.get(count, "inputs")?;
        let taken = take_infos(&graph, infos, "inputs")?;
        graph.get()?.inputs = Some(taken);
        Ok(())
    }

    fn SetGraphOutputs(graph: InMut<Graph>, infos: ArrayMut<Released<ValueInfo>>, count: usize) {
        graph.get()?;
        let infos = infos.get(count, "outputs")?;
        let taken = take_infos(&graph, infos, "outputs")?;
        graph.get()?.outputs = Some(taken);
        Ok(())
    }

    fn AddInitializerToGraph(graph: InMut<Graph>, name: Text, value: Released<Value>, is_external: bool) {
        let name = named(&name)?;
        if value.is_null() {
            return invalid("tensor cannot be null");
        }
        let graph = graph.get()?;
        check_initializer(graph, &name, &value, is_external)?;
        graph.initializers.push(Initializer { name, value: value.take()?, is_external });
        Ok(())
    }

    fn AddNodeToGraph(graph: InMut<Graph>, node: Released<Node>) {
        if node.is_null() {
            return invalid("node cannot be null");
        }
        if node.get()?.graph.is_some() {
            return invalid("This OrtNode pointer has already been added to the graph. Each OrtNode must only be added once.");
        }
        let address = graph.address();
        let graph = graph.get()?;
        let node = node.take()?;
        node.id.store(graph.nodes.len(), Ordering::Relaxed);
        node.graph.set(address);
        graph.nodes.push(node);
        Ok(())
    }

    fn CreateModel(domains: Array<Text>, versions: Array<i32>, count: usize, out: Out<*mut Object<EditedModel>>) {
        let out = out.place()?;
        let domains = domains.get(count, "the domains of operator sets")?;
        let versions = versions.get(count, "the versions of operator sets")?;
        let mut opsets = BTreeMap::new();
        for (domain, version) in domains.iter().zip(versions) {
            opsets.insert(canonical(domain, "the domain of an operator set")?, *version);
        }
        out.put(Object::give(EditedModel { opsets, graph: None }));
        Ok(())
    }

    fn AddGraphToModel(model: InMut<EditedModel>, graph: Released<Graph>) {
        let address = model.address();
        let model = model.get()?;
        if graph.is_null() {
            return invalid("graph cannot be null");
        }
        if model.graph.is_some() {
            return invalid("Model already has a graph. Each OrtModel can only have one graph.");
        }
        if graph.get()?.model.is_some() {
            return invalid("This graph has already been added to a model. Each OrtGraph can only be added once.");
        }
        let graph = graph.take()?;
        graph.model.set(address);
        model.graph = Some(graph);
        Ok(())
    }

    fn CreateSessionFromModel(env: In<Env>, model: In<EditedModel>, options: In<SessionOptions>, out: Out<*mut Object<Session>>) {
        out.place()?.put(std::ptr::null_mut());
        env.get()?;
        let declared = DeclaredModel::of(model.get()?)?;
        put_session(out.place()?, Session::of_declared(options.optional()?, declared)?);
        Ok(())
    }

    fn CreateModelEditorSession(env: In<Env>, path: PathText, options: In<SessionOptions>, out: Out<*mut Object<Session>>) {
        out.place()?.put(std::ptr::null_mut());
        env.get()?;
        let options = options.optional()?;
        let source = open(options, &path.get("the path of the model")?)?;
        put_session(out.place()?, Session::unfinished(options, source)?);
        Ok(())
    }

    fn CreateModelEditorSessionFromArray(env: In<Env>, data: Array<u8>, len: usize, options: In<SessionOptions>, out: Out<*mut Object<Session>>) {
        out.place()?.put(std::ptr::null_mut());
        env.get()?;
        let options = options.optional()?;
        let source = copy(options, data.get(len, "the model")?)?;
        put_session(out.place()?, Session::unfinished(options, source)?);
        Ok(())
    }

    fn SessionGetOpsetForDomain(session: In<Session>, domain: Text, out: Out<i32>) {
        let out = out.place()?;
        let domain = owned(&domain, "the domain")?;
        let opsets = session.get()?.opsets();
        let version = opsets.iter().find(|(known, _)| known.as_bytes() == domain.as_bytes()).map(|(_, version)| version);
        let version = version.ok_or_else(|| Failure::new(code::FAIL, "Domain not used by model."))?;
        out.put(i32::try_from(*version).unwrap_or(i32::MAX));
        Ok(())
    }

    fn ApplyModelToModelEditorSession(session: InMut<Session>, model: In<EditedModel>) {
        let session = session.get()?;
        let mut changed = unfinished(session)?.clone();
        changed.model.change(model.get()?)?;
        session.load_unfinished(changed)
    }

    fn FinalizeModelEditorSession(session: InMut<Session>, options: In<SessionOptions>, container: In<PrepackedWeights>) {
        container.optional()?;
        let session = session.get()?;
        // A session that is finished stays as it is.
        if let Some(Unfinished { model, options: own }) = session.unfinished.as_deref() {
            // The session has the options that it was made with. Only providers are added now.
            let mut all = own.clone();
            if let Some(options) = options.optional()? {
                all.providers.clone_from(&options.providers);
            }
            *session = Session::of_declared(Some(&all), model.clone())?;
        }
        Ok(())
    }

    /// 291
    fn GetModelEditorApi() -> *const c_void, else std::ptr::null(), {
        (&raw const TABLE).cast()
    }
}
