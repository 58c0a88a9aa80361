//! Constant folding: nodes that depend on constants alone are computed while the session is built.
//!
//! Folding never makes the constants of a graph larger, except by results of at most [`SMALL`]
//! bytes each and [`GROWTH`] bytes together in one round. Larger results that are equal share one
//! tensor across a graph and its subgraphs.

use std::hash::{BuildHasher, RandomState};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::environment::Evaluate;
use super::report::Report;
use crate::Result;
use crate::ir::{Graph, Node, ValueId};
use crate::spec::{SymTensor, Traits};
use crate::tensor::{Tensor, byte_count};

/// Results of up to this many bytes are folded even if that frees nothing: scalars, shapes,
/// per-channel scales.
pub(super) const SMALL: usize = 1024;

/// Maximum number of bytes that small results may add to the constants of a graph in one round.
const GROWTH: usize = 64 << 10;

/// Maximum length of an integer list that becomes a constant because inference knows its elements.
const MOST_KNOWN: usize = 64;

/// Replaces small integer values by constants if inference knows their elements.
pub(super) fn known_values(graph: &mut Graph, report: &mut Report) -> Result<()> {
    let outputs: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let mut known = Vec::new();
    for node in &graph.nodes {
        // A node with several outputs may have to run for the others.
        let &[Some(output)] = node.outputs.as_slice() else { continue };
        if outputs.contains(&output) {
            continue;
        }
        let value = graph.value(output);
        let (Some(symbolic), Some(dtype)) = (&value.symbolic, value.ty.dtype()) else { continue };
        let ints = symbolic.as_ints().filter(|ints| ints.len() <= MOST_KNOWN);
        known.extend(ints.and_then(|ints| Some((output, SymTensor::to_tensor(symbolic, dtype, &ints)?))));
    }
    if known.is_empty() {
        return Ok(());
    }
    report.folded += known.len();
    let known: FxHashMap<ValueId, Tensor> = known.into_iter().collect();
    graph
        .nodes
        .retain(|node| !matches!(node.outputs.as_slice(), [Some(output)] if known.contains_key(output)));
    // Insert in id order, so that the same model always yields the same graph.
    let mut known: Vec<(ValueId, Tensor)> = known.into_iter().collect();
    known.sort_unstable_by_key(|(id, _)| *id);
    graph.constants.extend(known);
    Ok(())
}

/// Folds nodes whose inputs are constants and whose results take at most `most` bytes; returns
/// whether there were any. If one of them fails, all stay, and the run reports the failure. Running
/// into the memory limit is an error instead: without the folding the graph would be rewritten
/// differently, and the bits of results must not depend on the limit.
pub(super) fn constants(
    graph: &mut Graph,
    evaluate: Evaluate<'_>,
    most: usize,
    shared: &mut Shared,
    report: &mut Report,
) -> Result<bool> {
    let chosen = choose(graph, most);
    if chosen.is_empty() {
        return Ok(false);
    }
    let (part, results) = extract(graph, &chosen)?;
    let read: FxHashSet<usize> = part.constants.values().filter_map(Tensor::address).collect();
    let tensors = match evaluate(part) {
        Ok(tensors) => tensors,
        Err(problem) if problem.shortage().is_some() => return Err(problem.within("folding constants")),
        Err(problem) => {
            tracing::debug!(%problem, "constants stay unfolded");
            return Ok(false);
        }
    };
    report.folded += chosen.len();
    shared.forget(&read);
    let mut index = 0;
    graph.nodes.retain(|_| {
        index += 1;
        !chosen.contains(&(index - 1))
    });
    for (id, tensor) in results.into_iter().zip(tensors) {
        graph.constants.insert(id, shared.one_of(tensor));
    }
    Ok(true)
}

/// Results of more than [`SMALL`] bytes, by a hash of their bytes with a random seed: no file can
/// be made for collisions.
pub(super) struct Shared {
    seed: u64,
    tensors: FxHashMap<u64, Vec<Tensor>>,
}

impl Default for Shared {
    fn default() -> Shared {
        Shared { seed: RandomState::new().hash_one(0), tensors: FxHashMap::default() }
    }
}

impl Shared {
    /// Drops the tensors at these addresses, which folding has read: as a rule nothing else does,
    /// and they would stay in memory beside what was made of them.
    fn forget(&mut self, read: &FxHashSet<usize>) {
        let stays = |tensor: &Tensor| tensor.address().is_none_or(|address| !read.contains(&address));
        self.tensors.values_mut().for_each(|tensors| tensors.retain(stays));
    }

    /// Returns a tensor of the same elements that exists already, or else this one.
    fn one_of(&mut self, tensor: Tensor) -> Tensor {
        let Some(bytes) = tensor.bytes().filter(|bytes| bytes.len() > SMALL) else { return tensor };
        let known = self.tensors.entry(xxh3_64_with_seed(bytes, self.seed)).or_default();
        let is_same = |known: &&Tensor| {
            known.dtype() == tensor.dtype() && known.shape() == tensor.shape() && known.bytes() == Some(bytes)
        };
        match known.iter().find(is_same) {
            Some(same) => same.clone(),
            None => {
                known.push(tensor.clone());
                tensor
            }
        }
    }
}

/// Maximum number of iterations of [`choose`] towards a fixed point.
const MOST_CHOICES: usize = 8;

/// Returns the indices of the nodes to fold. What folding frees depends on the choice itself: the
/// first iteration assumes everything, and each later one corrects that from the choice before.
fn choose(graph: &Graph, most: usize) -> FxHashSet<usize> {
    let count = |ids: &mut dyn Iterator<Item = ValueId>| {
        let mut reads = vec![0usize; graph.value_count()];
        ids.for_each(|id| reads.iter_mut().skip(id.index()).take(1).for_each(|reads| *reads += 1));
        reads
    };
    let reads = count(&mut graph.nodes.iter().flat_map(Node::reads).chain(graph.outputs.iter().copied()));
    let mut freed: Vec<bool> = vec![true; reads.len()];
    for _ in 0..MOST_CHOICES {
        let chosen = choose_with(graph, most, &freed);
        if chosen.is_empty() {
            return chosen;
        }
        let nodes = graph.nodes.iter().enumerate().filter(|(index, _)| chosen.contains(index));
        let folded = count(&mut nodes.flat_map(|(_, node)| node.reads()));
        // A value stays if nodes that are not folded read it as well.
        let stays = |index: usize| folded.get(index) != reads.get(index) && folded.get(index) != Some(&0);
        let mut is_right = true;
        for (index, freed) in freed.iter_mut().enumerate().filter(|(_, freed)| **freed) {
            *freed = !stays(index);
            is_right &= *freed;
        }
        if is_right {
            return chosen;
        }
    }
    // No fixed point: assume only values with a single read to be freed, which always holds.
    let single: Vec<bool> = reads.iter().map(|reads| *reads == 1).collect();
    choose_with(graph, most, &single)
}

/// Returns the nodes to fold, given which constants and results are `freed` with their last reader.
/// New results may take up as many bytes as those free.
fn choose_with(graph: &Graph, most: usize, freed: &[bool]) -> FxHashSet<usize> {
    let outputs: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let mut bytes: FxHashMap<ValueId, usize> =
        graph.constants.iter().map(|(id, tensor)| (*id, tensor.byte_count())).collect();
    // The freed bytes that no result has taken up yet, by value.
    let mut places = bytes.clone();
    places.retain(|id, _| freed.get(id.index()) == Some(&true));
    let mut chosen = FxHashSet::default();
    let mut growth = 0usize;
    for (index, node) in graph.nodes.iter().enumerate() {
        if node.spec.traits.has(Traits::RANDOM) || !node.subgraphs.is_empty() || node.inputs.is_empty() {
            continue;
        }
        // QDQ rules match `DequantizeLinear`: fold it only after they have all been tried.
        if most <= SMALL && node.spec.name == "DequantizeLinear" {
            continue;
        }
        let given: Option<Vec<usize>> =
            node.inputs.iter().flatten().map(|id| bytes.get(id).copied()).collect();
        if given.is_none() || node.outputs.iter().flatten().any(|id| outputs.contains(id)) {
            continue;
        }
        let Some(made) = output_bytes(graph, node) else { continue };
        let made_bytes = made.iter().fold(0usize, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let mut inputs: SmallVec<[ValueId; 4]> = node.inputs.iter().flatten().copied().collect();
        // An input that is read twice frees its bytes once.
        inputs.sort_unstable();
        inputs.dedup();
        let place: usize = inputs.iter().filter_map(|id| places.get(id)).sum();
        let grown = made_bytes.saturating_sub(place);
        if made_bytes > most || (grown > 0 && (made_bytes > SMALL || growth + grown > GROWTH)) {
            continue;
        }
        growth += grown;
        chosen.insert(index);
        // Charge the result to the bytes that its inputs free.
        let mut taken = made_bytes - grown;
        for id in &inputs {
            let Some(place) = places.get_mut(id) else { continue };
            let part = taken.min(*place);
            (*place, taken) = (*place - part, taken - part);
        }
        bytes.extend(made.iter().copied());
        places.extend(made.into_iter().filter(|(id, _)| freed.get(id.index()) == Some(&true)));
    }
    chosen
}

/// Returns the bytes of each output of a node, if all are tensors of fixed sizes.
fn output_bytes(graph: &Graph, node: &Node) -> Option<Vec<(ValueId, usize)>> {
    let bytes = |id: &ValueId| {
        let ty = graph.value(*id).ty.as_tensor()?;
        let sizes = ty.shape.as_ref()?.iter();
        let sizes: Option<Vec<usize>> = sizes.map(|size| usize::try_from(size.as_constant()?).ok()).collect();
        Some((*id, byte_count(ty.dtype, &sizes?).ok()?))
    };
    node.outputs.iter().flatten().map(bytes).collect()
}

/// Extracts the chosen nodes into a graph of their own. Also returns the values of `graph` that its
/// outputs compute.
fn extract(graph: &Graph, chosen: &FxHashSet<usize>) -> Result<(Graph, Vec<ValueId>)> {
    let mut part = Graph::new("constants");
    let mut ids: FxHashMap<ValueId, ValueId> = FxHashMap::default();
    let mut results = Vec::new();
    // Results that only chosen nodes read are not worth keeping, so they are no outputs of the
    // part.
    let read_outside: FxHashSet<ValueId> = {
        let outside = graph.nodes.iter().enumerate().filter(|(index, _)| !chosen.contains(index));
        outside.flat_map(|(_, node)| node.reads()).collect()
    };
    for (index, node) in graph.nodes.iter().enumerate().filter(|(index, _)| chosen.contains(index)) {
        let mut node = node.clone();
        for id in node.inputs.iter_mut().flatten() {
            if let Some(tensor) = graph.constants.get(id)
                && !ids.contains_key(id)
            {
                ids.insert(*id, part.add_constant(graph.value(*id).name.clone(), tensor.clone()));
            }
            *id =
                ids.get(id).copied().ok_or_else(|| crate::error!(Fail, "node {index} reads no constant"))?;
        }
        for id in node.outputs.iter_mut().flatten() {
            // Named by its id: names need only be unique here.
            let own = part.add_value(id.0.to_string(), graph.value(*id).ty.clone());
            part.value_mut(own).symbolic = graph.value(*id).symbolic.clone();
            if read_outside.contains(id) {
                results.push(*id);
                part.outputs.push(own);
            }
            ids.insert(*id, own);
            *id = own;
        }
        part.nodes.push(node);
    }
    Ok((part, results))
}
