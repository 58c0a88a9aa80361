//! `OrtGraph` and what it is made of: nodes, values and initializers that a caller adds.
//!
//! A graph owns what was added to it, and a model its graph. C keeps the pointers: releasing an
//! object that has an owner does nothing, as in ONNX Runtime.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::entry::{Kind, Object, Owned, Released, entries, kinds};
use crate::op_attr::OpAttr;
use crate::type_info::TypeInfo;
use crate::value::Value;

/// The object that owns another one; none before it was added.
pub(crate) struct Owner<T>(AtomicPtr<Object<T>>);

impl<T: Kind> Owner<T> {
    pub(crate) fn none() -> Owner<T> {
        Owner(AtomicPtr::new(null_mut()))
    }

    pub(crate) fn set(&self, owner: *const Object<T>) {
        self.0.store(owner.cast_mut(), Ordering::Release);
    }

    pub(crate) fn address(&self) -> *const Object<T> {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn is_some(&self) -> bool {
        !self.address().is_null()
    }

    /// The owner, which outlives what it owns.
    pub(crate) fn get(&self) -> Option<&T> {
        let owner = self.address();
        // SAFETY: the owner was alive when it was set, and drops what it owns before its own end.
        unsafe { owner.as_ref() }.map(|owner| &owner.inner)
    }
}

/// A value of a graph: its name and its type, if the type is known.
pub(crate) struct ValueInfo {
    pub(crate) name: CString,
    pub(crate) ty: Option<Object<TypeInfo>>,
    pub(crate) graph: Owner<Graph>,
}

/// A node.
pub(crate) struct Node {
    pub(crate) operator: CString,
    /// Empty for the standard's own operators.
    pub(crate) domain: CString,
    pub(crate) name: CString,
    pub(crate) inputs: Vec<CString>,
    pub(crate) outputs: Vec<CString>,
    pub(crate) attributes: Vec<Owned<OpAttr>>,
    /// The place in the graph.
    pub(crate) id: AtomicUsize,
    pub(crate) graph: Owner<Graph>,
}

/// A tensor that a caller adds.
pub(crate) struct Initializer {
    pub(crate) name: CString,
    pub(crate) value: Owned<Value>,
    /// Whether the caller keeps the memory for the life of all sessions.
    pub(crate) is_external: bool,
}

/// A graph, or the changes to one.
pub(crate) struct Graph {
    /// `None` if the caller did not set them: in a change, those of the graph stay.
    pub(crate) inputs: Option<Vec<Owned<ValueInfo>>>,
    pub(crate) outputs: Option<Vec<Owned<ValueInfo>>>,
    pub(crate) initializers: Vec<Initializer>,
    pub(crate) nodes: Vec<Owned<Node>>,
    pub(crate) model: Owner<EditedModel>,
    /// Values that no caller described, made when a caller asks for them.
    found: Mutex<BTreeMap<CString, Owned<ValueInfo>>>,
}

/// A model that a caller makes.
pub(crate) struct EditedModel {
    /// The version of each operator set, by domain.
    pub(crate) opsets: BTreeMap<CString, i32>,
    pub(crate) graph: Option<Owned<Graph>>,
}

kinds! {
    ValueInfo => "OrtValueInfo", b"OrtValIn";
    Node => "OrtNode", b"OrtNode\0";
    Graph => "OrtGraph", b"OrtGraph";
    EditedModel => "OrtModel", b"OrtModel";
}

/// A node that reads or writes a value, and at which of its ports.
pub(crate) struct NodeUse<'g> {
    pub(crate) node: &'g Owned<Node>,
    pub(crate) port: usize,
}

impl Graph {
    pub(crate) fn new() -> Graph {
        Graph {
            inputs: None,
            outputs: None,
            initializers: Vec::new(),
            nodes: Vec::new(),
            model: Owner::none(),
            found: Mutex::default(),
        }
    }

    pub(crate) fn inputs(&self) -> &[Owned<ValueInfo>] {
        self.inputs.as_deref().unwrap_or_default()
    }

    pub(crate) fn outputs(&self) -> &[Owned<ValueInfo>] {
        self.outputs.as_deref().unwrap_or_default()
    }

    pub(crate) fn initializer(&self, name: &CString) -> Option<&Initializer> {
        self.initializers.iter().find(|initializer| initializer.name == *name)
    }

    /// The value of a name: as an input or output describes it, else by its name alone. Null for
    /// the empty name, which stands for what is left out. `graph` is the address of this graph.
    pub(crate) fn value(&self, graph: *const Object<Graph>, name: &CString) -> *const Object<ValueInfo> {
        if name.is_empty() {
            return std::ptr::null();
        }
        if let Some(known) = self.inputs().iter().chain(self.outputs()).find(|info| info.name == *name) {
            return known.address();
        }
        let mut found = self.found.lock();
        if let Some(known) = found.get(name) {
            return known.address();
        }
        let ty = self.initializer(name).and_then(|initializer| initializer.value.type_info());
        let info =
            Owned::new(ValueInfo { name: name.clone(), ty: ty.map(Object::new), graph: Owner::none() });
        info.graph.set(graph);
        let address = info.address();
        found.insert(name.clone(), info);
        address
    }

    pub(crate) fn producer<'g>(&'g self, name: &'g CString) -> Option<NodeUse<'g>> {
        self.ports(name, |node| &node.outputs).next()
    }

    pub(crate) fn consumers<'g>(&'g self, name: &'g CString) -> impl Iterator<Item = NodeUse<'g>> {
        self.ports(name, |node| &node.inputs)
    }

    fn ports<'g>(
        &'g self,
        name: &'g CString,
        of: impl Fn(&'g Node) -> &'g Vec<CString> + Copy,
    ) -> impl Iterator<Item = NodeUse<'g>> {
        self.nodes.iter().flat_map(move |node| {
            let named = of(node).iter().enumerate().filter(move |(_, other)| *other == name);
            named.map(move |(port, _)| NodeUse { node, port })
        })
    }
}

entries! {
    /// 285
    fn ReleaseValueInfo(info: Released<ValueInfo>) -> (), else (), {
        if info.get().is_ok_and(|info| !info.graph.is_some()) {
            info.release();
        }
    }

    /// 286
    fn ReleaseNode(node: Released<Node>) -> (), else (), {
        if node.get().is_ok_and(|node| !node.graph.is_some()) {
            node.release();
        }
    }

    /// 287
    fn ReleaseGraph(graph: Released<Graph>) -> (), else (), {
        if graph.get().is_ok_and(|graph| !graph.model.is_some()) {
            graph.release();
        }
    }

    /// 288
    fn ReleaseModel(model: Released<EditedModel>) -> (), else (), {
        model.release();
    }
}
