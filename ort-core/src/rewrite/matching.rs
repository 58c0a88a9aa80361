//! Pattern matching, from the root of a pattern towards its inputs.

use smallvec::SmallVec;

use super::level::Level;
use super::term::{Literal, NodeTerm, Term};
use crate::ir::{Attribute, Graph, Node, NodeId, ValueId};
use crate::spec::{SymTensor, Traits};
use crate::tensor::Tensor;

/// A matched pattern: the bindings of its names, and its nodes.
#[derive(Clone, Debug, Default)]
pub struct Match {
    pub(super) values: SmallVec<[(&'static str, ValueId); 8]>,
    pub(super) named: SmallVec<[(&'static str, NodeId); 4]>,
    /// The matched nodes, the root first.
    pub(super) nodes: SmallVec<[NodeId; 8]>,
    /// The highest rank of the constants that `#name` and number terms match. Such constants may
    /// add axes to what they are broadcast with.
    pub(super) constant_rank: usize,
}

impl Match {
    /// Returns the value bound to `name`; `None` if it is optional and left out.
    pub fn value(&self, name: &str) -> Option<ValueId> {
        self.values.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Returns the node bound to `name`.
    pub fn node(&self, name: &str) -> Option<NodeId> {
        self.named.iter().find(|(known, _)| *known == name).map(|(_, node)| *node)
    }

    fn bind(&mut self, name: &'static str, value: ValueId) -> bool {
        match self.value(name) {
            Some(known) => known == value,
            None => {
                self.values.push((name, value));
                true
            }
        }
    }
}

/// Whether the term's two inputs may come in either order.
pub(super) fn may_swap(term: &NodeTerm) -> bool {
    let commutes = term.ops.iter().any(|op| op.traits.has(Traits::COMMUTATIVE));
    // Swapping two equal arguments would only repeat the search.
    commutes && term.args.len() == 2 && term.args.first() != term.args.get(1)
}

/// A graph with the producer of each value.
#[derive(Clone, Copy)]
pub(super) struct Finder<'a> {
    pub(super) graph: &'a Graph,
    pub(super) producers: &'a [Option<NodeId>],
}

impl<'a> Finder<'a> {
    /// Matches a pattern at `root`. Each bit of `orientation` swaps the inputs of one swappable
    /// pattern node, in the order of the search.
    pub(super) fn find(&self, pattern: &NodeTerm, root: NodeId, orientation: u32) -> Option<Match> {
        let mut search = Search { finder: *self, found: Match::default(), orientation };
        search.node(pattern, root).then_some(search.found)
    }

    fn producer(&self, value: ValueId) -> Option<NodeId> {
        self.producers.get(value.index()).copied().flatten()
    }

    fn node(&self, id: NodeId) -> Option<&'a Node> {
        self.graph.nodes.get(id.index())
    }
}

struct Search<'a> {
    finder: Finder<'a>,
    found: Match,
    orientation: u32,
}

impl Search<'_> {
    fn node(&mut self, term: &NodeTerm, id: NodeId) -> bool {
        let Some(node) = self.finder.node(id) else { return false };
        // Consume the bit before any check: bits belong to pattern nodes, whatever the graph has
        // here.
        let swapped = may_swap(term) && self.next_bit();
        if !term.ops.iter().any(|op| std::ptr::eq(*op, node.spec)) || !attrs_match(term, node) {
            return false;
        }
        if !self.found.nodes.contains(&id) {
            self.found.nodes.push(id);
        }
        if let Some(name) = term.name {
            // A pattern may read two outputs of one node, and then names it twice.
            if self.found.node(name).is_some_and(|known| known != id) {
                return false;
            }
            self.found.named.push((name, id));
        }
        let given = node.inputs.len();
        if !term.rest && node.inputs.iter().skip(term.args.len()).any(Option::is_some) {
            return false;
        }
        // One of the term's operators commutes, but not the one found here.
        if swapped && !node.spec.traits.has(Traits::COMMUTATIVE) {
            return false;
        }
        term.args.iter().enumerate().all(|(index, arg)| {
            // A term that may be swapped has two inputs, 0 and 1.
            let index = if swapped { 1usize.wrapping_sub(index) } else { index };
            let value = if index < given { node.inputs.get(index).copied().flatten() } else { None };
            self.term(arg, value)
        })
    }

    fn name_output(&mut self, name: &'static str, value: ValueId) -> bool {
        self.found.value(name).is_some() || self.found.bind(name, value)
    }

    fn note_rank(&mut self, constant: &Tensor) {
        self.found.constant_rank = self.found.constant_rank.max(constant.shape().len());
    }

    fn next_bit(&mut self) -> bool {
        let bit = self.orientation & 1 == 1;
        self.orientation >>= 1;
        bit
    }

    fn term(&mut self, term: &Term, value: Option<ValueId>) -> bool {
        let graph = self.finder.graph;
        let constant = |value: Option<ValueId>| value.and_then(|value| graph.constants.get(&value));
        match (term, value) {
            (Term::Any, _) | (Term::Value { optional: true, .. }, None) => true,
            (Term::Value { name, .. }, Some(value)) => self.found.bind(name, value),
            (Term::Constant(name), Some(value_id)) => constant(value).is_some_and(|tensor| {
                self.note_rank(tensor);
                self.found.bind(name, value_id)
            }),
            (Term::Number { value: number, tolerant }, value) => constant(value).is_some_and(|tensor| {
                self.note_rank(tensor);
                is_number(tensor, *number, *tolerant)
            }),
            (Term::Ints(ints), Some(value)) => known_ints(graph, value).is_some_and(|known| known == *ints),
            (Term::Node(term), Some(value)) => {
                let producer = self.finder.producer(value);
                let at_output = |id: &NodeId| {
                    let node = self.finder.node(*id);
                    node.is_some_and(|node| node.outputs.get(term.output).copied().flatten() == Some(value))
                };
                // The name of a node is also that of the value it computes.
                match producer.filter(at_output) {
                    Some(id) => {
                        self.node(term, id) && term.name.is_none_or(|name| self.name_output(name, value))
                    }
                    None => false,
                }
            }
            (_, None) => false,
        }
    }
}

fn attrs_match(term: &NodeTerm, node: &Node) -> bool {
    term.attrs.iter().all(|(name, literal)| match (literal, node.attrs.get(name)) {
        (Literal::Number(number), Some(Attribute::Int(value))) => *value as f64 == *number,
        (Literal::Number(number), Some(Attribute::Float(value))) => *value == *number as f32,
        (Literal::Text(text), Some(Attribute::String(value))) => value == text,
        (Literal::Ints(ints), Some(Attribute::Ints(value))) => value == ints,
        // An empty literal in a pattern also matches an attribute that is absent.
        (Literal::Ints(ints), None) => ints.is_empty(),
        (Literal::Text(text), None) => text.is_empty(),
        _ => false,
    })
}

/// Relative tolerances of a `~` number. [`TOLERANCE`] covers the digits that exporters leave out,
/// and half types allow for one rounding. Doubles must be exact up to rounding, because a fused
/// operator computes with the exact number.
const TOLERANCE: f64 = 1e-4;
const HALF_TOLERANCE: f64 = 4e-3;
const DOUBLE_TOLERANCE: f64 = 4.0 * f64::EPSILON;

fn is_number(tensor: &Tensor, number: f64, tolerant: bool) -> bool {
    let Some(value) = scalar(tensor) else { return false };
    let part = match tensor.dtype() {
        crate::dtype::DType::F16 => TOLERANCE.max(1e-3),
        crate::dtype::DType::BF16 => HALF_TOLERANCE,
        crate::dtype::DType::F64 => DOUBLE_TOLERANCE,
        _ => TOLERANCE,
    };
    match tolerant {
        true => (value - number).abs() <= part * number.abs(),
        // The number itself, or its rounding to single precision if the tensor is F32.
        false => {
            value == number
                || (tensor.dtype() == crate::dtype::DType::F32 && value == f64::from(number as f32))
        }
    }
}

/// Returns the number that a constant of one element holds.
pub fn scalar(tensor: &Tensor) -> Option<f64> {
    use crate::dtype::DType;
    if tensor.element_count() != 1 {
        return None;
    }
    let view = tensor.view();
    match tensor.dtype() {
        DType::F32 => view.to_vec::<f32>().ok()?.first().map(|&value| f64::from(value)),
        DType::F64 => view.to_vec::<f64>().ok()?.first().copied(),
        DType::F16 => view.to_vec::<half::f16>().ok()?.first().map(|value| value.to_f64()),
        DType::BF16 => view.to_vec::<half::bf16>().ok()?.first().map(|value| value.to_f64()),
        _ => view.to_ints().ok()?.first().map(|&value| value as f64),
    }
}

/// Returns the elements of a small integer value if all are known, from a constant or by inference.
pub fn known_ints(graph: &Graph, value: ValueId) -> Option<Vec<i64>> {
    match graph.constants.get(&value) {
        Some(tensor) => SymTensor::from_view(&tensor.view())?.as_ints(),
        None => graph.value(value).symbolic.as_ref()?.as_ints(),
    }
}

/// Who makes and who reads the values of a graph, by value index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uses<'a> {
    pub(crate) producers: &'a [Option<NodeId>],
    /// Read counts, outputs of the graph included.
    pub(crate) reads: &'a [usize],
    /// Whether a `QuantizeLinear` reads the value.
    pub(crate) quantized: &'a [bool],
}

/// A match in its graph, as guards see it.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The bindings of the pattern's names.
    pub found: &'a Match,
    /// The optimization level.
    pub level: Level,
    pub(crate) uses: Uses<'a>,
}

impl<'a> Found<'a> {
    /// Returns the node that computes a value.
    pub fn producer(&self, value: ValueId) -> Option<&'a Node> {
        let id = self.uses.producers.get(value.index()).copied().flatten()?;
        self.graph.nodes.get(id.index())
    }

    /// Returns how often a value is read, by nodes and as an output of the graph.
    pub fn reads(&self, value: ValueId) -> usize {
        self.uses.reads.get(value.index()).copied().unwrap_or(0)
    }

    /// Whether a `QuantizeLinear` reads a value.
    pub fn is_quantized(&self, value: ValueId) -> bool {
        self.uses.quantized.get(value.index()) == Some(&true)
    }

    /// Whether ONNX Runtime must be able to run the result. It loads graphs written at levels up to
    /// `extended`, and its kernels accept less than the standard allows.
    pub fn must_be_portable(&self) -> bool {
        self.level < Level::All
    }
}
