//! Libraries of execution providers, and what a session assigned to providers.

use std::ffi::{CString, c_char, c_void};

use ort_runtime::onnx::{FileAccess, Source};
use ort_runtime::onnxruntime::name_of;
use ort_sys::OrtKeyValuePairs;

use crate::allocator::Allocator;
use crate::custom_library::load_library;
use crate::devices::EpDevice;
use crate::entry::{Array, In, Out, Owned, PathText, Text, entries, kinds};
use crate::env::Env;
use crate::session::Session;
use crate::session_options::SessionOptions;
use crate::status::{Outcome, code, fail, invalid};
use crate::value::Value;

/// The prefix of metadata by which a compiled model says what it was compiled for.
const COMPATIBILITY: &str = "ep_compatibility_info.";

/// A node that a session assigned.
pub(crate) struct AssignedNode {
    name: CString,
    domain: CString,
    operator: CString,
}

/// The nodes that a session assigned to one provider.
pub(crate) struct AssignedNodes {
    provider: CString,
    nodes: Vec<Owned<AssignedNode>>,
    /// The addresses of the nodes, as C reads them.
    handles: Vec<In<AssignedNode>>,
}

/// What a session assigned, by provider, as C reads it.
pub(crate) struct Assignment {
    _nodes: Vec<Owned<AssignedNodes>>,
    handles: Vec<In<AssignedNodes>>,
}

// SAFETY: the handles lead to the nodes beside them, which do not change.
unsafe impl Send for Assignment {}
// SAFETY: as above.
unsafe impl Sync for Assignment {}
// SAFETY: as above.
unsafe impl Send for AssignedNodes {}
// SAFETY: as above.
unsafe impl Sync for AssignedNodes {}

kinds! {
    AssignedNode => "OrtEpAssignedNode", b"OrtAssNo";
    AssignedNodes => "OrtEpAssignedSubgraph", b"OrtAssSu";
}

fn text(text: &str) -> CString {
    CString::new(text.replace('\0', "\\0")).unwrap_or_default()
}

impl Assignment {
    pub(crate) fn of(engine: &ort_runtime::Session) -> Assignment {
        let mut assigned: Vec<AssignedNodes> = Vec::new();
        for placed in engine.placement() {
            let provider = text(name_of(placed.provider));
            // The domain comes before the operator, if it is not ONNX's own.
            let (domain, operator) = placed.operator.rsplit_once('.').unwrap_or(("", &placed.operator));
            let node = Owned::new(AssignedNode {
                name: text(&placed.node),
                domain: text(domain),
                operator: text(operator),
            });
            match assigned.iter_mut().find(|known| known.provider == provider) {
                Some(known) => known.nodes.push(node),
                None => assigned.push(AssignedNodes { provider, nodes: vec![node], handles: Vec::new() }),
            }
        }
        for known in &mut assigned {
            known.handles = known.nodes.iter().map(|node| In::of(node.address())).collect();
        }
        let nodes: Vec<Owned<AssignedNodes>> = assigned.into_iter().map(Owned::new).collect();
        let handles = nodes.iter().map(|nodes| In::of(nodes.address())).collect();
        Assignment { _nodes: nodes, handles }
    }
}

/// Loads the library of a provider as far as ONNX Runtime's loader goes.
fn load(path: &std::path::Path) -> Outcome {
    let shown = path.display();
    let library = load_library(path)?;
    for name in ["CreateEpFactories", "ReleaseEpFactory"] {
        // SAFETY: the symbol is only looked up.
        let found = unsafe { library.get::<*const c_void>(name.as_bytes()) };
        if let Err(problem) = found {
            return fail(code::FAIL, format!("Failed to get symbol {name} with error: {problem}"));
        }
    }
    let text = format!("the library {shown} has an execution provider; this build takes none from libraries");
    fail(code::NOT_IMPLEMENTED, text)
}

/// The compatibility that a model states for a provider.
fn compatibility(source: &Source, provider: &str, allocator: Allocator) -> Outcome<*mut c_char> {
    let model = source.decode()?;
    let key = format!("{COMPATIBILITY}{provider}");
    match model.metadata_props.iter().find(|entry| entry.key() == key) {
        Some(entry) => allocator.text(entry.value().as_bytes()),
        None => Ok(std::ptr::null_mut()),
    }
}

entries! {
    /// 301
    fn RegisterExecutionProviderLibrary(env: In<Env>, name: Text, path: PathText) {
        env.get()?;
        name.get("the name of the registration")?;
        load(&path.get("the path of the library")?)
    }

    /// 302
    fn UnregisterExecutionProviderLibrary(env: In<Env>, name: Text) {
        env.get()?;
        let name = name.get("the name of the registration")?;
        fail(code::FAIL, format!("Execution provider library: {name} was not registered."))
    }

    /// 306. Sessions run on the providers that the options name, and on the CPU: there is no choice
    /// to ask for.
    fn SessionOptionsSetEpSelectionPolicyDelegate(options: In<SessionOptions>, _delegate: *const c_void, _state: *mut c_void) {
        options.get().map(drop)
    }

    /// 375. The CPU has one kind of memory, that of the default allocator.
    fn CreateSharedAllocator(env: In<Env>, device: In<EpDevice>, _memory: i32, _kind: i32, _settings: *const OrtKeyValuePairs, out: Out<*mut c_void>) {
        out.place()?;
        env.get()?;
        device.get()?;
        invalid("Invalid memory type for OrtEpDevice.")
    }

    /// 377
    fn ReleaseSharedAllocator(env: In<Env>, device: In<EpDevice>, _memory: i32) {
        env.get()?;
        device.get()?;
        invalid("Invalid memory type for OrtEpDevice.")
    }

    /// 383
    fn CreateSyncStreamForEpDevice(device: In<EpDevice>, _settings: *const OrtKeyValuePairs, out: Out<*mut c_void>) {
        out.place()?;
        device.get()?;
        invalid("ep_device does not use DEFAULT memory of a non-CPU device.")
    }

    /// 386. All tensors are in host memory.
    fn CopyTensors(env: In<Env>, from: Array<In<Value>>, to: Array<In<Value>>, _stream: *mut c_void, count: usize) {
        env.get()?;
        let from = from.get(count, "the array of tensors to copy")?;
        let to = to.get(count, "the array of tensors to write")?;
        for (from, to) in from.iter().zip(to) {
            let (from, to) = (from.get()?.numbers()?, to.get()?.numbers()?);
            if from.tensor().dtype() != to.tensor().dtype() || from.dims() != to.dims() {
                return invalid("the tensors to copy and to write differ in type or shape");
            }
            to.fill(from.tensor())?;
        }
        Ok(())
    }

    /// 388. 0 stands for a model that was not compiled for the provider.
    fn GetModelCompatibilityForEpDevices(devices: Array<In<EpDevice>>, count: usize, info: Text, out: Out<i32>) {
        let out = out.place()?;
        let devices = devices.get(count, "the array of devices")?;
        if devices.is_empty() {
            return invalid("Must provide one or more OrtEpDevice instances.");
        }
        devices.iter().try_for_each(|device| device.get().map(drop))?;
        info.get("the compatibility info")?;
        out.put(0);
        Ok(())
    }

    /// 404. Null if the model states nothing for the provider.
    fn GetCompatibilityInfoFromModel(path: PathText, provider: Text, allocator: Allocator, out: Out<*mut c_char>) {
        let out = out.place()?;
        let path = path.get("the path of the model")?;
        let provider = provider.get("the provider")?;
        let source = Source::open(&path, FileAccess::default())
            .map_err(|error| crate::session::load_failure(Some(&path), &error))?;
        out.put(compatibility(&source, provider, allocator)?);
        Ok(())
    }

    /// 405
    fn GetCompatibilityInfoFromModelBytes(data: Array<u8>, len: usize, provider: Text, allocator: Allocator, out: Out<*mut c_char>) {
        let out = out.place()?;
        let bytes = bytes::Bytes::copy_from_slice(data.get(len, "the model")?);
        out.put(compatibility(&Source::from_bytes(bytes), provider.get("the provider")?, allocator)?);
        Ok(())
    }

    /// 407
    fn Session_GetEpGraphAssignmentInfo(session: In<Session>, out: Out<*const In<AssignedNodes>>, count: Out<usize>) {
        let (out, count) = (out.place()?, count.place()?);
        let Some(assignment) = &session.get()?.assignment else {
            return fail(code::FAIL, "Session configuration entry 'session.record_ep_graph_assignment_info' must be \
                                     set to \"1\" to retrieve EP graph assignment information.".to_owned());
        };
        out.put(assignment.handles.as_ptr());
        count.put(assignment.handles.len());
        Ok(())
    }

    /// 408
    fn EpAssignedSubgraph_GetEpName(nodes: In<AssignedNodes>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(nodes.get()?.provider.as_ptr());
        Ok(())
    }

    /// 409
    fn EpAssignedSubgraph_GetNodes(nodes: In<AssignedNodes>, out: Out<*const In<AssignedNode>>, count: Out<usize>) {
        let (out, count) = (out.place()?, count.place()?);
        let nodes = nodes.get()?;
        out.put(nodes.handles.as_ptr());
        count.put(nodes.handles.len());
        Ok(())
    }

    /// 410
    fn EpAssignedNode_GetName(node: In<AssignedNode>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(node.get()?.name.as_ptr());
        Ok(())
    }

    /// 411
    fn EpAssignedNode_GetDomain(node: In<AssignedNode>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(node.get()?.domain.as_ptr());
        Ok(())
    }

    /// 412
    fn EpAssignedNode_GetOperatorType(node: In<AssignedNode>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(node.get()?.operator.as_ptr());
        Ok(())
    }
}
