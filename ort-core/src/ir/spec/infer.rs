//! Shape inference: types, symbolic shapes and symbolic elements, node by node.
//!
//! The same rules run twice. At load time they see symbolic dimensions. At run time they see
//! concrete shapes, for values whose shape depends on data.

use std::borrow::Cow;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use super::requirement::{NodeRequirement, Requirement};
use super::typing::{Bound, bind_named_types, bound_dtype};
use super::{OpSpec, SymTensor, broadcast};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attributes, Graph, Node, Subgraph, SymShape, ValueId, ValueInfo, ValueType};
use crate::limits::check_deadline;
use crate::seeded::HashSet;
use crate::tensor::{Shape, TensorView};
use crate::{ErrorKind, Result, Within, ensure, error};

/// What inference knows about one input.
#[derive(Clone, Debug, Default)]
pub struct InputFacts<'a> {
    /// The value's name for errors; empty if it is not known.
    pub name: &'a str,
    /// The type.
    pub ty: Cow<'a, ValueType>,
    /// The elements, if they are known numbers.
    pub known: Option<TensorView<'a>>,
    /// The elements as expressions, for small integer tensors.
    pub symbolic: Option<Arc<SymTensor>>,
}

impl<'a> InputFacts<'a> {
    /// Returns the facts of a tensor at run time: type, shape, and the elements if they are in host
    /// memory.
    pub fn concrete(view: TensorView<'a>) -> InputFacts<'a> {
        let shape = view.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
        InputFacts {
            name: "",
            ty: Cow::Owned(ValueType::tensor(view.dtype(), Some(shape))),
            // Elements in device memory cannot be read here.
            known: view.is_host().then_some(view),
            symbolic: None,
        }
    }
}

/// Context of an inference rule.
#[derive(Debug)]
pub struct InferCx<'a> {
    spec: &'static OpSpec,
    /// The attributes of the node.
    pub attrs: &'a Attributes,
    inputs: &'a [Option<InputFacts<'a>>],
    /// The type variables that the inputs bind.
    bound: Bound<'a>,
    /// The outputs of the node; `None` without a reader.
    wanted: &'a [Option<ValueId>],
    outputs: Outputs,
    /// What the rule requires of sizes that it did not compare.
    requirements: RefCell<Vec<Requirement>>,
    subgraphs: &'a mut [Subgraph],
}

impl<'a> InferCx<'a> {
    /// Returns the number of input positions of the node, including omitted ones.
    pub fn input_count(&self) -> usize {
        self.inputs.len()
    }

    /// Returns the number of output positions of the node.
    pub fn output_count(&self) -> usize {
        self.outputs.len()
    }

    /// Returns whether the input at `index` is present.
    pub fn has_input(&self, index: usize) -> bool {
        self.facts(index).is_some()
    }

    /// Returns whether the output at `index` has a reader.
    pub fn has_output(&self, index: usize) -> bool {
        self.wanted.get(index).is_some_and(Option::is_some)
    }

    fn facts(&self, index: usize) -> Option<&'a InputFacts<'a>> {
        self.inputs.get(index).and_then(Option::as_ref)
    }

    /// Returns the type of an input.
    pub fn input_type(&self, index: usize) -> Option<&'a ValueType> {
        self.facts(index).map(|facts| &*facts.ty)
    }

    /// Returns the element type of a tensor input.
    pub fn dtype(&self, index: usize) -> Result<DType> {
        self.input_type(index)
            .and_then(ValueType::dtype)
            .ok_or_else(|| error!(InvalidGraph, "the element type of input {index} is not known"))
    }

    /// Returns the shape of a tensor input, if its rank is known.
    pub fn shape(&self, index: usize) -> Option<&'a [Dim]> {
        self.input_type(index).and_then(ValueType::shape)
    }

    /// Returns the elements of an input, if they are known numbers.
    pub fn known(&self, index: usize) -> Option<TensorView<'a>> {
        self.facts(index).and_then(|facts| facts.known)
    }

    /// Returns a small integer input as a tensor of expressions.
    pub fn symbolic(&self, index: usize) -> Option<Arc<SymTensor>> {
        let facts = self.facts(index)?;
        match &facts.symbolic {
            Some(symbolic) => Some(symbolic.clone()),
            None => SymTensor::from_view(facts.known.as_ref()?).map(Arc::new),
        }
    }

    /// Returns the elements of a small integer input as expressions.
    pub fn dims(&self, index: usize) -> Option<Vec<Dim>> {
        self.symbolic(index).map(|symbolic| symbolic.elements.clone())
    }

    /// Returns the elements of a small integer input, if all are known numbers.
    pub fn ints(&self, index: usize) -> Option<Vec<i64>> {
        self.symbolic(index).and_then(|symbolic| symbolic.as_ints())
    }

    /// Returns the elements of a float input, if they are known.
    pub fn floats(&self, index: usize) -> Option<Vec<f32>> {
        self.known(index).and_then(|view| view.to_vec::<f32>().ok())
    }

    /// Checks constant sizes now, and records what is required of others for the plans.
    ///
    /// Only for what no kernel checks.
    pub fn require(&self, requirement: Requirement) -> Result<()> {
        match requirement.constants() {
            Some(sizes) => return requirement.check(sizes),
            None if requirement.is_certain() => {}
            None => self.requirements.borrow_mut().push(requirement),
        }
        Ok(())
    }

    /// Requires something that only a run checks, even of constant sizes: ONNX Runtime loads models
    /// whose kernels would refuse their inputs.
    pub fn require_in_run(&self, requirement: Requirement) {
        let is_met = |sizes: [i64; 2]| requirement.check(sizes).is_ok();
        if !requirement.is_certain() && !requirement.constants().is_some_and(is_met) {
            self.requirements.borrow_mut().push(requirement);
        }
    }

    /// Requires a size to be equal to another. `what` names it in the error.
    pub fn require_equal(
        &self,
        what: impl Into<Cow<'static, str>>,
        actual: &Dim,
        expected: &Dim,
    ) -> Result<()> {
        self.require(Requirement::equal(what, actual, expected))
    }

    /// Requires an input, if it is given, to have this shape. `kind` is the error of a run that
    /// contradicts it. Loading does not compare sizes that are constants, because ONNX Runtime
    /// compares the shapes of most inputs only in its kernels.
    pub fn require_shape(&self, index: usize, expected: &[Dim], kind: ErrorKind) -> Result<()> {
        let Some(shape) = self.shape(index) else { return Ok(()) };
        let name = self.spec.input_param(index).map_or("", |param| param.name);
        let (rank, given) = (expected.len(), shape.len());
        ensure!(rank == given, InvalidGraph, "input '{name}' has rank {given}, expected {rank}");
        for (axis, (size, expected)) in shape.iter().zip(expected).enumerate() {
            // Most sizes agree already, and need no text.
            if size != expected {
                let what = format!("size {axis} of input '{name}'");
                self.requirements.borrow_mut().push(Requirement::equal(what, size, expected).of_kind(kind));
            }
        }
        Ok(())
    }

    /// Returns a fresh symbol for a size that is known only at run time.
    pub fn fresh(&self) -> Dim {
        Dim::unknown()
    }

    /// Returns the broadcast shape of the inputs at `indices`. `None` if a rank is unknown.
    pub fn broadcast(&self, indices: &[usize]) -> Result<Option<SymShape>> {
        let shapes: Option<Vec<&[Dim]>> = indices.iter().map(|&index| self.shape(index)).collect();
        shapes.map(|shapes| broadcast::dims(&shapes)).transpose()
    }

    /// Sets the shape of a tensor output. Its element type follows from the type variables of the
    /// record.
    pub fn set_shape(&mut self, index: usize, shape: SymShape) -> Result<()> {
        let Some(param) = self.spec.output_param(index) else { return Ok(()) };
        let dtype = bound_dtype(&self.bound, self.spec, param)?;
        self.set(index, dtype, Some(shape));
        Ok(())
    }

    /// Sets the element type and shape of a tensor output.
    pub fn set(&mut self, index: usize, dtype: DType, shape: Option<SymShape>) {
        self.set_type(index, ValueType::tensor(dtype, shape));
    }

    /// Sets the type of an output.
    pub fn set_type(&mut self, index: usize, ty: ValueType) {
        if let Some(output) = self.outputs.get_mut(index) {
            output.0 = ty;
        }
    }

    /// Sets the elements of a small integer output as expressions.
    pub fn set_symbolic(&mut self, index: usize, symbolic: SymTensor) {
        if let Some(output) = self.outputs.get_mut(index) {
            output.1 = Some(Arc::new(symbolic));
        }
    }

    /// Whether the output at `index` has no type yet.
    pub(crate) fn is_open(&self, index: usize) -> bool {
        self.outputs.get(index).is_some_and(|(ty, _)| *ty == ValueType::Unknown)
    }

    /// Returns the shape that an output was set to, if its rank is known.
    pub fn output_shape(&self, index: usize) -> Option<&[Dim]> {
        self.outputs.get(index).and_then(|(ty, _)| ty.shape())
    }

    /// Returns the number of subgraphs.
    pub fn subgraph_count(&self) -> usize {
        self.subgraphs.len()
    }

    /// Infers the subgraph at `index` with these input types, and returns its output types.
    pub fn infer_subgraph(&mut self, index: usize, inputs: &[ValueType]) -> Result<Vec<ValueType>> {
        let Some(subgraph) = self.subgraphs.get_mut(index) else {
            return Err(error!(InvalidGraph, "subgraph {index} is missing"));
        };
        let graph = &mut subgraph.graph;
        for (id, ty) in graph.inputs.clone().into_iter().zip(inputs) {
            // An unknown type keeps the one that the subgraph declares.
            if *ty != ValueType::Unknown {
                graph.value_mut(id).ty = ty.clone();
            }
        }
        infer_graph(graph).within(|| subgraph.attr)?;
        Ok(graph.outputs.iter().map(|&id| graph.value(id).ty.clone()).collect())
    }

    /// Infers a branch that may never be taken. If inference fails, this returns `None` and stores
    /// the error in the branch, where it is raised once the branch is taken.
    pub fn infer_branch(&mut self, index: usize) -> Option<Vec<ValueType>> {
        // A branch of `If` has no inputs, only captures.
        let inferred = self.infer_subgraph(index, &[]);
        let graph = &mut self.subgraphs.get_mut(index)?.graph;
        match inferred {
            Ok(types) => {
                graph.broken = None;
                Some(types)
            }
            Err(problem) => {
                graph.broken = Some(problem);
                None
            }
        }
    }

    /// Returns the subgraph at `index` in its current state of inference.
    pub fn subgraph(&self, index: usize) -> Option<&Subgraph> {
        self.subgraphs.get(index)
    }

    /// Returns the index of the subgraph held by the attribute `attr`.
    pub fn find_subgraph(&self, attr: &str) -> Option<usize> {
        self.subgraphs.iter().position(|subgraph| subgraph.attr == attr)
    }

    /// Sets the outputs whose type the rule left open to tensors of the element type of their type
    /// variable, if that is known.
    fn finish(mut self) -> Outputs {
        for (index, (ty, _)) in self.outputs.iter_mut().enumerate() {
            if *ty != ValueType::Unknown {
                continue;
            }
            let Some(param) = self.spec.output_param(index) else { continue };
            let bound = self.bound.iter().find(|(name, _)| *name == param.ty).map(|(_, ty)| *ty);
            *ty = match (bound, bound_dtype(&self.bound, self.spec, param)) {
                // A container is not a tensor of its element type, so it stays unknown.
                (Some(ValueType::Sequence(_) | ValueType::Optional(_)), _) => continue,
                (_, Ok(dtype)) => ValueType::tensor(dtype, None),
                (_, Err(_)) => continue,
            };
        }
        for (ty, symbolic) in &mut self.outputs {
            if ty.dtype() == Some(DType::I32)
                && let Some(symbolic) = symbolic
            {
                SymTensor::forget_wide(symbolic);
            }
        }
        self.outputs
    }
}

/// The type of each output, and its elements as expressions for small integer tensors.
type Outputs = SmallVec<[(ValueType, Option<Arc<SymTensor>>); 1]>;

/// The type of an input without facts.
static UNKNOWN: ValueType = ValueType::Unknown;

/// Infers one node from the facts about its inputs. Also returns what it requires of sizes that it
/// did not compare.
fn infer_node(
    node: &Node,
    inputs: &[Option<InputFacts<'_>>],
    subgraphs: &mut [Subgraph],
) -> Result<(Outputs, Vec<Requirement>)> {
    let spec = node.spec;
    let type_of = |index: usize| match inputs.get(index) {
        Some(Some(facts)) => &*facts.ty,
        _ => &UNKNOWN,
    };
    let name_of = |index: usize| inputs.get(index).and_then(Option::as_ref).map_or("", |facts| facts.name);
    let bound = bind_named_types(spec, node, type_of, name_of)?;
    let outputs = node.outputs.iter().map(|_| (ValueType::Unknown, None)).collect();
    let (attrs, wanted, requirements) = (&node.attrs, &node.outputs[..], RefCell::default());
    let mut cx = InferCx { spec, attrs, inputs, bound, wanted, outputs, requirements, subgraphs };
    // Shapes that contradict each other are a `Fail` to ONNX Runtime, unlike types that an operator
    // does not have.
    let inferred = (spec.infer)(&mut cx);
    inferred.map_err(|problem| problem.reclassified(&[ErrorKind::InvalidGraph], ErrorKind::Fail))?;
    let requirements = cx.requirements.take();
    Ok((cx.finish(), requirements))
}

/// Infers every value of a graph in node order, including subgraphs.
pub fn infer_graph(graph: &mut Graph) -> Result<()> {
    infer_until(graph, None)
}

/// The same with a deadline.
pub(crate) fn infer_until(graph: &mut Graph, until: Option<Instant>) -> Result<()> {
    infer_comparing(graph, until, &mut |_, _| Ok(()))
}

/// Callback for each inferred value: its current facts, which hold the declared type, and the
/// inferred type.
pub(crate) type Compare<'c> = &'c mut dyn FnMut(&ValueInfo, &ValueType) -> Result<()>;

/// The same. `compare` sees the declared types before the inferred ones replace them.
pub(crate) fn infer_comparing(graph: &mut Graph, until: Option<Instant>, compare: Compare<'_>) -> Result<()> {
    (0..graph.nodes.len()).try_for_each(|index| {
        check_deadline(until, "inferring")?;
        infer_node_at(graph, index, compare)
    })
}

/// Infers the outputs of one node. Its inputs must be inferred already.
pub(crate) fn infer_at(graph: &mut Graph, index: usize) -> Result<()> {
    infer_node_at(graph, index, &mut |_, _| Ok(()))
}

fn infer_node_at(graph: &mut Graph, index: usize, compare: Compare<'_>) -> Result<()> {
    let Some(node) = graph.nodes.get_mut(index) else { return Ok(()) };
    // Rules change subgraphs while inputs borrow the graph, so detach them from the node.
    let mut subgraphs = std::mem::take(&mut node.subgraphs);
    let inferred = infer_detached(graph, index, &mut subgraphs, compare);
    // Also after an error: a broken branch keeps its nodes with their bodies.
    if let Some(node) = graph.nodes.get_mut(index) {
        node.subgraphs = subgraphs;
    }
    inferred
}

/// [`infer_node_at`] of a node whose subgraphs are detached.
fn infer_detached(
    graph: &mut Graph,
    index: usize,
    subgraphs: &mut [Subgraph],
    compare: Compare<'_>,
) -> Result<()> {
    for subgraph in &mut *subgraphs {
        pass_captures(graph, subgraph);
    }
    let Some(node) = graph.nodes.get(index) else { return Ok(()) };
    node.spec.check_arity(node).within(|| node.place())?;
    let inputs: SmallVec<[Option<InputFacts<'_>>; 4]> =
        node.inputs.iter().map(|input| input.map(|id| facts_of(graph, id))).collect();
    let (outputs, _) = infer_node(node, &inputs, subgraphs)
        // Before the run no caller has given an argument.
        .map_err(|problem| problem.reclassified(&[ErrorKind::InvalidArgument], ErrorKind::Fail))
        .map_err(|problem| problem.help(inputs_in_words(graph, node)))
        .within(|| node.place())?;
    // The facts borrow the graph, which changes below.
    drop(inputs);
    for (position, (ty, symbolic)) in outputs.into_iter().enumerate() {
        let id = graph.nodes.get(index).and_then(|node| node.outputs.get(position).copied().flatten());
        let Some(id) = id else { continue };
        let value = graph.value_mut(id);
        // An unknown result keeps the declared type.
        if ty != ValueType::Unknown {
            compare(value, &ty)?;
            value.ty = ty;
        }
        // Also if there are none: elements of an earlier inference need not hold for these inputs.
        value.symbolic = symbolic;
    }
    Ok(())
}

/// Finds what the nodes of an inferred graph, and of its subgraphs, require of sizes that inference
/// has not compared.
pub(crate) fn find_requirements(graph: &mut Graph) {
    let (mut found, mut known) = (Vec::new(), HashSet::default());
    for node in &graph.nodes {
        // Control flow requires nothing of sizes itself.
        if !node.subgraphs.is_empty() {
            continue;
        }
        let inputs: SmallVec<[Option<InputFacts<'_>>; 4]> =
            node.inputs.iter().map(|input| input.map(|id| facts_of(graph, id))).collect();
        // An error here was reported by inference, or an enclosing branch is broken.
        let Ok((_, requirements)) = infer_node(node, &inputs, &mut []) else { continue };
        for requirement in requirements {
            // Layers of one model require the same of the same symbols. The first one is named.
            let (name, op) = (node.name.clone(), node.spec.name);
            if known.insert((op, requirement.clone())) {
                found.push(NodeRequirement { node: name, op, requirement });
            }
        }
    }
    graph.requirements = found;
    for subgraph in graph.nodes.iter_mut().flat_map(|node| &mut node.subgraphs) {
        find_requirements(&mut subgraph.graph);
    }
}

/// Returns the help text of errors that have none of their own: the inputs of the node.
fn inputs_in_words(graph: &Graph, node: &Node) -> String {
    let input = |(index, id): (usize, &Option<ValueId>)| {
        let value = graph.value((*id)?);
        let name = node.spec.input_param(index).map_or("", |param| param.name);
        Some(format!("{name} = '{}' {}", value.name, value.ty))
    };
    // Variadic operators may have hundreds of inputs.
    let inputs: Vec<String> = node.inputs.iter().enumerate().filter_map(input).take(12).collect();
    match inputs.as_slice() {
        [] => "check its attributes; it has no inputs".to_string(),
        inputs => format!("check its attributes and its inputs: {}", inputs.join(", ")),
    }
}

fn facts_of(graph: &Graph, id: ValueId) -> InputFacts<'_> {
    let value = graph.value(id);
    let known = graph.constants.get(&id).map(|tensor| tensor.view());
    let (name, ty, symbolic) = (&*value.name, Cow::Borrowed(&value.ty), value.symbolic.clone());
    InputFacts { name, ty, known, symbolic }
}

/// Copies the facts about captured values into the subgraph.
fn pass_captures(graph: &Graph, subgraph: &mut Subgraph) {
    for capture in &subgraph.captures {
        let outer = graph.value(capture.outer);
        let constant = graph.constants.get(&capture.outer).map(|tensor| tensor.view());
        // The subgraph has no copy of the constant, so its elements travel as expressions.
        let symbolic = match &outer.symbolic {
            Some(symbolic) => Some(symbolic.clone()),
            None => constant.and_then(|view| SymTensor::from_view(&view)).map(Arc::new),
        };
        let inner = subgraph.graph.value_mut(capture.inner);
        inner.ty = outer.ty.clone();
        inner.symbolic = symbolic;
    }
}

/// For each output the element type and, if known, the shape. `None` for an output that is not a
/// tensor.
pub type OutputShapes = Vec<Option<(DType, Option<Shape>)>>;

/// Infers the outputs of a node at run time. The shape is `None` if it depends on more than
/// inference sees.
pub fn infer_concrete(node: &Node, inputs: &[Option<InputFacts<'_>>]) -> Result<OutputShapes> {
    // Without subgraphs: callers handle control flow, whose output shapes only running it tells.
    let (outputs, requirements) = infer_node(node, inputs, &mut [])?;
    requirements.iter().try_for_each(|requirement| {
        requirement.constants().map_or(Ok(()), |sizes| requirement.check(sizes))
    })?;
    let concrete = |ty: &ValueType| -> Result<Option<(DType, Option<Shape>)>> {
        let Some(tensor) = ty.as_tensor() else { return Ok(None) };
        let sizes: Option<Vec<i64>> =
            tensor.shape.as_ref().and_then(|shape| shape.iter().map(Dim::as_constant).collect());
        let shape = match sizes {
            None => None,
            Some(sizes) => {
                let negative = sizes.iter().any(|&size| size < 0);
                ensure!(
                    !negative,
                    Fail,
                    help = "the sizes come from the elements of an input: give it sizes of 0 or more",
                    "an output of shape {sizes:?} would have a negative size"
                );
                Some(sizes.into_iter().map(|size| size as usize).collect())
            }
        };
        Ok(Some((tensor.dtype, shape)))
    };
    outputs.iter().map(|(ty, _)| concrete(ty)).collect()
}
