//! Reading graphs: `Graph_*`.

use std::ffi::{CString, c_char};
use std::ptr::null;

use ort_sys::os_char;

use crate::entry::{Array, ArrayMut, In, Object, Out, Owned, entries};
use crate::graph_objects::{EditedModel, Graph, Initializer, Node, Owner, ValueInfo};
use crate::metadata::Metadata;
use crate::model_editor::copy_of;
use crate::model_proto::IR_VERSION;
use crate::status::{Outcome, invalid};

/// Fills an array of a caller, which has to hold all elements.
pub(crate) fn fill<T>(
    places: &mut ArrayMut<T>,
    len: usize,
    elements: impl ExactSizeIterator<Item = T>,
    what: &str,
) -> Outcome {
    let places = places.get(len, what)?;
    if places.len() < elements.len() {
        return invalid(format!(
            "Not enough space for {what}: expected space for {} elements, got {len}",
            elements.len()
        ));
    }
    places.iter_mut().zip(elements).for_each(|(place, element)| *place = element);
    Ok(())
}

/// The model of a graph that was added to one.
fn model_of(graph: &Graph) -> Outcome<&EditedModel> {
    match graph.model.get() {
        Some(model) => Ok(model),
        None => invalid("the graph has no operator sets: add it to a model with AddGraphToModel"),
    }
}

/// Copies some nodes of a graph to a graph of their own. What they read from outside becomes an
/// input, what is read of them outside becomes an output.
fn view(graph: In<Graph>, nodes: &[In<Node>]) -> Outcome<Graph> {
    let source = graph.get()?;
    let mut view = Graph::new();
    for node in nodes {
        let inner = node.get()?;
        if inner.graph.address() != graph.address() {
            return invalid(format!("node '{}' is not of this graph", inner.name.to_string_lossy()));
        }
        view.nodes.push(Owned::new(copy_of(inner)));
    }
    let is_made = |name: &CString| view.nodes.iter().any(|node| node.outputs.contains(name));
    let is_inside = |node: &Owned<Node>| nodes.iter().any(|known| known.address() == node.address());
    let info = |name: &CString| {
        let known = source.inputs().iter().chain(source.outputs()).find(|info| info.name == *name);
        let ty = known.and_then(|info| info.ty.clone());
        Owned::new(ValueInfo { name: name.clone(), ty, graph: Owner::none() })
    };
    let (mut inputs, mut outputs, mut initializers): (Vec<Owned<ValueInfo>>, Vec<_>, Vec<_>) =
        Default::default();
    let has = |infos: &[Owned<ValueInfo>], name: &CString| infos.iter().any(|info| info.name == *name);
    for name in view.nodes.iter().flat_map(|node| &node.inputs) {
        if name.is_empty() || is_made(name) || has(&inputs, name) {
            continue;
        }
        match source.initializer(name) {
            Some(known) if !initializers.iter().any(|other: &Initializer| other.name == *name) => {
                let (name, value) = (name.clone(), Owned::new((*known.value).clone()));
                initializers.push(Initializer { name, value, is_external: known.is_external });
            }
            Some(_) => {}
            None => inputs.push(info(name)),
        }
    }
    for name in view.nodes.iter().flat_map(|node| &node.outputs) {
        let is_read_outside = source.consumers(name).any(|reader| !is_inside(reader.node));
        if !name.is_empty() && (is_read_outside || has(source.outputs(), name)) {
            outputs.push(info(name));
        }
    }
    (view.inputs, view.outputs, view.initializers) = (Some(inputs), Some(outputs), initializers);
    Ok(view)
}

entries! {
    /// 333
    fn Graph_GetName(graph: In<Graph>, out: Out<*const c_char>) {
        let out = out.place()?;
        graph.get()?;
        out.put(c"ModelEditorGraph".as_ptr());
        Ok(())
    }

    /// 334. Graphs of the editor have no file.
    fn Graph_GetModelPath(graph: In<Graph>, out: Out<*const os_char>) {
        let out = out.place()?;
        graph.get()?;
        static NONE: [os_char; 1] = [0];
        out.put(NONE.as_ptr());
        Ok(())
    }

    /// 335
    fn Graph_GetOnnxIRVersion(graph: In<Graph>, out: Out<i64>) {
        let out = out.place()?;
        graph.get()?;
        out.put(IR_VERSION);
        Ok(())
    }

    /// 336
    fn Graph_GetNumOperatorSets(graph: In<Graph>, out: Out<usize>) {
        let out = out.place()?;
        out.put(model_of(graph.get()?)?.opsets.len());
        Ok(())
    }

    /// 337
    fn Graph_GetOperatorSets(graph: In<Graph>, domains: ArrayMut<*const c_char>, versions: ArrayMut<i64>, count: usize) {
        let opsets = &model_of(graph.get()?)?.opsets;
        fill(&mut domains, count, opsets.keys().map(|domain| domain.as_ptr()), "the domains of operator sets")?;
        fill(&mut versions, count, opsets.values().map(|version| i64::from(*version)), "the versions of operator sets")
    }

    /// 338
    fn Graph_GetNumInputs(graph: In<Graph>, out: Out<usize>) {
        let out = out.place()?;
        out.put(graph.get()?.inputs().len());
        Ok(())
    }

    /// 339
    fn Graph_GetInputs(graph: In<Graph>, places: ArrayMut<*const Object<ValueInfo>>, count: usize) {
        fill(&mut places, count, graph.get()?.inputs().iter().map(Owned::address), "the inputs of the graph")
    }

    /// 340
    fn Graph_GetNumOutputs(graph: In<Graph>, out: Out<usize>) {
        let out = out.place()?;
        out.put(graph.get()?.outputs().len());
        Ok(())
    }

    /// 341
    fn Graph_GetOutputs(graph: In<Graph>, places: ArrayMut<*const Object<ValueInfo>>, count: usize) {
        fill(&mut places, count, graph.get()?.outputs().iter().map(Owned::address), "the outputs of the graph")
    }

    /// 342
    fn Graph_GetNumInitializers(graph: In<Graph>, out: Out<usize>) {
        let out = out.place()?;
        out.put(graph.get()?.initializers.len());
        Ok(())
    }

    /// 343
    fn Graph_GetInitializers(graph: In<Graph>, places: ArrayMut<*const Object<ValueInfo>>, count: usize) {
        let (inner, address) = (graph.get()?, graph.address());
        let infos = inner.initializers.iter().map(|initializer| inner.value(address, &initializer.name));
        fill(&mut places, count, infos, "the initializers of the graph")
    }

    /// 344
    fn Graph_GetNumNodes(graph: In<Graph>, out: Out<usize>) {
        let out = out.place()?;
        out.put(graph.get()?.nodes.len());
        Ok(())
    }

    /// 345
    fn Graph_GetNodes(graph: In<Graph>, places: ArrayMut<*const Object<Node>>, count: usize) {
        fill(&mut places, count, graph.get()?.nodes.iter().map(Owned::address), "the nodes of the graph")
    }

    /// 346. Graphs of the editor are not inside of nodes.
    fn Graph_GetParentNode(graph: In<Graph>, out: Out<*const Object<Node>>) {
        let out = out.place()?;
        graph.get()?;
        out.put(null());
        Ok(())
    }

    /// 347
    fn Graph_GetGraphView(graph: In<Graph>, nodes: Array<In<Node>>, count: usize, out: Out<*mut Object<Graph>>) {
        let out = out.place()?;
        let made = Object::give(view(graph, nodes.get(count, "the nodes of the view")?)?);
        // SAFETY: `give` made it, and no other thread has it yet.
        let inner = unsafe { &(*made).inner };
        let infos = inner.inputs().iter().chain(inner.outputs());
        infos.for_each(|info| info.graph.set(made));
        for (place, node) in inner.nodes.iter().enumerate() {
            node.id.store(place, std::sync::atomic::Ordering::Relaxed);
            node.graph.set(made);
        }
        out.put(made);
        Ok(())
    }

    /// 387
    fn Graph_GetModelMetadata(graph: In<Graph>, out: Out<*mut Object<Metadata>>) {
        let out = out.place()?;
        graph.get()?;
        out.put(Object::give(Metadata::default()));
        Ok(())
    }
}
