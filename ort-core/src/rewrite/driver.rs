//! Rewrite driver: applies rules to a graph until a fixed point.
//!
//! A sweep visits the nodes in order and tries each as the root of a pattern. Shape inference runs
//! on a replacement at once. Its types and shapes must match or refine those of the root. Otherwise
//! the matched nodes stay, and the rule is not tried on that root again. They also stay if less is
//! known about them than the rule requires. Sweeps end when one changes nothing.

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::environment::{Environment, FirstClaim};
use super::matching::{Finder, Found, Match, Uses};
use super::nodes::in_order;
use super::optimizer::Optimizer;
use super::patch::Patch;
use super::report::Report;
use super::rule::{Compiled, Known, Then};
use super::term::Term;
use crate::Result;
use crate::dim::Dim;
use crate::ir::{Graph, Node, NodeId, ValueId, ValueInfo, ValueType};
use crate::limits::{NODES_PER_DEADLINE_CHECK, check_deadline};
use crate::spec::{OpSpec, Traits, infer_at};

/// Maximum number of sweeps over one graph. A rule set that needs more undoes its own work.
const MOST_SWEEPS: usize = 32;

/// The rules, indexed by the operator at their root.
pub(super) type Index<'a> = FxHashMap<*const OpSpec, Vec<&'a Compiled>>;

/// Indexes the enabled rules by root.
pub(super) fn index<'a>(rules: &'a [Compiled], optimizer: &Optimizer) -> Index<'a> {
    let mut index = Index::default();
    let on = |compiled: &&Compiled| {
        compiled.level <= optimizer.level && !optimizer.disabled.iter().any(|name| name == compiled.rule.name)
    };
    for compiled in rules.iter().filter(on) {
        for op in compiled.pattern.root().into_iter().flat_map(|root| &root.ops) {
            index.entry(std::ptr::from_ref(*op)).or_default().push(compiled);
        }
    }
    index
}

/// Applies the rules to a graph; returns whether anything changed.
pub(super) fn apply(
    graph: &mut Graph,
    rules: &Index<'_>,
    optimizer: &Optimizer,
    environment: Environment<'_>,
    report: &mut Report,
) -> Result<bool> {
    let mut changed = false;
    let mut refused = FxHashSet::default();
    for _ in 0..MOST_SWEEPS {
        let mut sweep = Sweep::new(graph, optimizer, environment.first_claim, report);
        // Keep refusals across sweeps, or each sweep would build the same misfits again.
        sweep.refused = std::mem::take(&mut refused);
        let hits = sweep.run(rules, environment.until)?;
        refused = std::mem::take(&mut sweep.refused);
        if hits == 0 {
            return Ok(changed);
        }
        sweep.finish()?;
        changed = true;
    }
    tracing::warn!("the rewrite rules do not converge after {MOST_SWEEPS} sweeps");
    Ok(changed)
}

struct Sweep<'g> {
    graph: &'g mut Graph,
    optimizer: &'g Optimizer,
    first_claim: FirstClaim<'g>,
    report: &'g mut Report,
    producers: Vec<Option<NodeId>>,
    /// Read count of each value: by nodes, by captures of their subgraphs, and as a graph output.
    reads: Vec<usize>,
    /// Whether a `QuantizeLinear` reads each value, or did so before this sweep.
    quantized: Vec<bool>,
    is_output: Vec<bool>,
    /// Position of each node; a new node has that of the root it replaces.
    places: Vec<usize>,
    dead: Vec<bool>,
    /// The alias of each value: the value that replaces it.
    aliases: Vec<Option<ValueId>>,
    /// Rules whose replacement did not fit, with the name of the node. Unlike ids, names survive a
    /// sweep.
    refused: FxHashSet<(&'static str, Arc<str>)>,
}

impl<'g> Sweep<'g> {
    fn new(
        graph: &'g mut Graph,
        optimizer: &'g Optimizer,
        first_claim: FirstClaim<'g>,
        report: &'g mut Report,
    ) -> Sweep<'g> {
        let mut sweep = Sweep {
            producers: graph.producers(),
            reads: vec![0; graph.value_count()],
            quantized: vec![false; graph.value_count()],
            is_output: vec![false; graph.value_count()],
            places: (0..graph.nodes.len()).collect(),
            dead: vec![false; graph.nodes.len()],
            aliases: Vec::new(),
            refused: FxHashSet::default(),
            graph,
            optimizer,
            first_claim,
            report,
        };
        for id in sweep.graph.nodes.iter().flat_map(Node::reads).chain(sweep.graph.outputs.iter().copied()) {
            if let Some(reads) = sweep.reads.get_mut(id.index()) {
                *reads += 1;
            }
        }
        for id in sweep.graph.nodes.iter().filter_map(quantized_input) {
            if let Some(quantized) = sweep.quantized.get_mut(id.index()) {
                *quantized = true;
            }
        }
        for id in &sweep.graph.outputs {
            if let Some(is_output) = sweep.is_output.get_mut(id.index()) {
                *is_output = true;
            }
        }
        sweep
    }

    /// Visits every node once, and new nodes as rules create them; returns the number of rule
    /// applications.
    fn run(&mut self, rules: &Index<'_>, until: Option<Instant>) -> Result<usize> {
        let mut hits = 0;
        for index in 0..self.graph.nodes.len() {
            if index % NODES_PER_DEADLINE_CHECK == 0 {
                check_deadline(until, "optimizing")?;
            }
            let mut visits: SmallVec<[NodeId; 8]> = SmallVec::from_slice(&[NodeId(index as u32)]);
            // A rule may apply to nodes that another created. The bound stops two rules that undo
            // each other.
            for _ in 0..MOST_SWEEPS {
                let Some(id) = visits.pop() else { break };
                if self.dead.get(id.index()).is_none_or(|dead| *dead) {
                    continue;
                }
                // Earlier rewrites may have aliased its inputs: patterns must see the aliases.
                self.resolve(id);
                // Checked before each visit, so that the sweep stops after exactly this many
                // applications.
                if self.optimizer.stop_after.is_some_and(|most| self.report.total() >= most) {
                    return Ok(hits);
                }
                let before = self.graph.nodes.len();
                if self.visit(id, rules) {
                    hits += 1;
                    // Reversed, so that the first new node is popped first.
                    visits.extend((before..self.graph.nodes.len()).rev().map(|new| NodeId(new as u32)));
                }
            }
        }
        Ok(hits)
    }

    /// Tries the rules of one root in order; returns whether one applied.
    fn visit(&mut self, root: NodeId, rules: &Index<'_>) -> bool {
        let Some(node) = self.graph.nodes.get(root.index()) else { return false };
        let Some(candidates) = rules.get(&std::ptr::from_ref(node.spec)) else { return false };
        // Collected once for all rules, because `may_match` rejects most of them by these two.
        let producer = |id: &ValueId| self.producers.get(id.index()).copied().flatten();
        let inputs = || node.inputs.iter().flatten();
        let before = inputs().filter_map(producer).filter_map(|id| self.graph.nodes.get(id.index()));
        let before: SmallVec<[&'static OpSpec; 4]> = before.map(|node| node.spec).collect();
        let is_constant = |id: &ValueId| producer(id).is_none() && self.graph.constants.contains_key(id);
        let has_constant = inputs().any(is_constant);
        for compiled in candidates.iter().filter(|compiled| compiled.may_match(&before, has_constant)) {
            let Some(pattern) = compiled.pattern.root() else { continue };
            for orientation in 0..1u32 << compiled.swaps {
                let finder = Finder { graph: self.graph, producers: &self.producers };
                let Some(found) = finder.find(pattern, root, orientation) else { continue };
                if !self.is_known(&found, compiled.rule.known, root)
                    || !self.is_free(&found, compiled.rule.keep)
                {
                    continue;
                }
                let uses =
                    Uses { producers: &self.producers, reads: &self.reads, quantized: &self.quantized };
                let view = Found { graph: self.graph, found: &found, level: self.optimizer.level, uses };
                if compiled.rule.when.is_some_and(|when| !when(&view)) {
                    continue;
                }
                if self.replace(compiled, &found, root) {
                    return true;
                }
            }
        }
        false
    }

    /// Whether as much is known about a match as its rule requires.
    fn is_known(&self, found: &Match, known: Known, root: NodeId) -> bool {
        let Some(root) = self.graph.nodes.get(root.index()) else { return false };
        let ty = |id: ValueId| &self.graph.value(id).ty;
        let mut outputs = root.outputs.iter().flatten();
        let has_rank = |id: ValueId| ty(id).shape().is_some();
        let mut named = found.values.iter().map(|(_, value)| *value);
        match known {
            Known::Nothing => true,
            Known::Types => {
                let has_type = outputs.all(|id| ty(*id).dtype().is_some());
                has_type && (found.constant_rank == 0 || named.all(has_rank))
            }
            Known::Ranks => outputs.all(|id| has_rank(*id)) && named.all(has_rank),
        }
    }

    /// Whether no node outside the match reads its inner values, or the rule allows that.
    fn is_free(&self, found: &Match, keep: bool) -> bool {
        // The root is left out: any node may read its outputs, which the replacement computes.
        let [_, inner @ ..] = found.nodes.as_slice() else { return false };
        keep || inner.iter().all(|id| {
            let node = self.graph.nodes.get(id.index());
            // Other readers keep the dequantized value. The replacement reads the quantized one, so
            // no work is duplicated.
            if node.is_some_and(|node| node.spec.name == "DequantizeLinear") {
                return true;
            }
            let outputs = node.map(|node| node.outputs.as_slice());
            outputs.unwrap_or_default().iter().flatten().all(|output| {
                let readers = found.nodes.iter().filter_map(|id| self.graph.nodes.get(id.index()));
                let inside = readers.flat_map(Node::reads).filter(|read| read == output).count();
                self.reads.get(output.index()) == Some(&inside)
            })
        })
    }

    /// Replaces a match by its rule's right-hand side, if that fits. If the rule fails, the match
    /// stays, because the graph is correct without it.
    fn replace(&mut self, compiled: &Compiled, found: &Match, root: NodeId) -> bool {
        let Some(node) = self.graph.nodes.get(root.index()) else { return false };
        let key = (compiled.rule.name, node.name.clone());
        if self.refused.contains(&key) {
            return false;
        }
        let fits = match &compiled.template {
            // A template that is a single value needs no nodes.
            Some(Term::Value { name, .. }) => {
                let value = found.value(name);
                value.is_some_and(|value| self.alias(root, &[value]))
            }
            _ => match self.replace_by_nodes(compiled, found, root) {
                Ok(Some(fits)) => fits,
                // Declined, not refused: the builder may accept the match after other rewrites.
                Ok(None) => return false,
                Err(problem) => {
                    tracing::warn!(
                        rule = key.0,
                        node = &*key.1,
                        "a rewrite rule failed and is skipped: {problem}"
                    );
                    false
                }
            },
        };
        if !fits {
            self.refused.insert(key);
            return false;
        }
        self.report.count(compiled.rule.name);
        let (rule, number) = (compiled.rule.name, self.report.total());
        tracing::trace!(rule, node = &*key.1, number, "rewritten");
        self.kill(root);
        true
    }

    /// Builds a rule's replacement. Either new nodes compute all of the root's outputs, or the rule
    /// adds none and existing values alias the outputs; a mix does not fit. `None` if the rule
    /// declines this match.
    fn replace_by_nodes(&mut self, compiled: &Compiled, found: &Match, root: NodeId) -> Result<Option<bool>> {
        let Some(node) = self.graph.nodes.get(root.index()).cloned() else { return Ok(None) };
        let uses = Uses { producers: &self.producers, reads: &self.reads, quantized: &self.quantized };
        let mut patch = Patch::new(self.graph, (found, uses), &node, self.optimizer.level);
        let values = match (&compiled.template, compiled.rule.then) {
            (Some(template), _) => patch.build(template)?.map(|value| vec![value]),
            (None, Then::Build(build)) => build(&mut patch)?,
            (None, Then::Template(_)) => None,
        };
        let Some(values) = values else { return Ok(None) };
        if values.len() < wanted_outputs(&node) {
            return Ok(None);
        }
        let made = patch.draft.emitted_values();
        if values.iter().all(|value| made.contains(value)) {
            patch.draft.replace(&values)?;
            let nodes = patch.draft.finish()?;
            let matched = found.nodes.iter().filter_map(|id| self.graph.nodes.get(id.index()));
            // Devices are numbered in the session's order, so the least number is the preferred
            // one.
            let device = matched.filter_map(|node| (self.first_claim)(self.graph, node)).min();
            let end = Replaced { node: &node, id: root, known: compiled.rule.known, device };
            return Ok(Some(self.accept(end, nodes)));
        }
        let none_made = made.is_empty();
        drop(patch);
        Ok(Some(none_made && self.alias(root, &values)))
    }

    /// Adds the nodes that replace a root. If their outputs contradict the root's, or they would
    /// run on a later device, undoes that and returns false.
    fn accept(&mut self, replaced: Replaced<'_>, nodes: Vec<Node>) -> bool {
        let Replaced { node: old, id: root, known, device } = replaced;
        let first = self.graph.nodes.len();
        let outputs: Vec<ValueId> = old.outputs.iter().flatten().copied().collect();
        let before: Vec<ValueInfo> = outputs.iter().map(|id| self.graph.value(*id).clone()).collect();
        let last = nodes.len().saturating_sub(1);
        for (number, mut node) in nodes.into_iter().enumerate() {
            node.name = match number == last {
                true => old.name.clone(),
                false => {
                    format!("{}/{}_{}", old.name, node.spec.name, self.graph.value_count() + number).into()
                }
            };
            self.graph.nodes.push(node);
        }
        let added = first..self.graph.nodes.len();
        let inferred = added.clone().try_for_each(|index| infer_at(self.graph, index));
        // Devices are asked last, because they claim by the inferred types and shapes.
        let fits = inferred.is_ok()
            && outputs.iter().zip(&before).all(|(id, before)| {
                tells_enough(&self.graph.value(*id).ty, known) && refine(self.graph.value_mut(*id), before)
            })
            && self.graph.nodes.iter().skip(first).all(|node| self.runs_on(node, device));
        if !fits {
            tracing::debug!(node = &*old.name, problem = ?inferred.err(), "a rule's result does not fit");
            // Inference has changed the types of the outputs, so these are restored, too.
            self.graph.nodes.truncate(first);
            outputs.into_iter().zip(before).for_each(|(id, info)| *self.graph.value_mut(id) = info);
            return false;
        }
        let place = self.places.get(root.index()).copied().unwrap_or(first);
        self.reads.resize(self.graph.value_count(), 0);
        self.producers.resize(self.graph.value_count(), None);
        self.is_output.resize(self.graph.value_count(), false);
        self.quantized.resize(self.graph.value_count(), false);
        for index in added {
            self.places.push(place);
            self.dead.push(false);
            self.note_node(NodeId(index as u32));
        }
        true
    }

    /// Whether a device no later than `device` claims a node. If no device claimed the match, none
    /// has to claim its replacement.
    fn runs_on(&self, node: &Node, device: Option<usize>) -> bool {
        let claimed = (self.first_claim)(self.graph, node);
        device.is_none_or(|device| claimed.is_some_and(|claimed| claimed <= device))
    }

    /// Counts the reads of a new node and registers it as the producer of its outputs.
    fn note_node(&mut self, id: NodeId) {
        let Some(node) = self.graph.nodes.get(id.index()) else { return };
        for value in node.reads() {
            if let Some(reads) = self.reads.get_mut(value.index()) {
                *reads += 1;
            }
        }
        if let Some(quantized) = quantized_input(node).and_then(|value| self.quantized.get_mut(value.index()))
        {
            *quantized = true;
        }
        for output in node.outputs.iter().flatten() {
            if let Some(producer) = self.producers.get_mut(output.index()) {
                *producer = Some(id);
            }
        }
    }

    /// Aliases a root's outputs to existing values. A graph output keeps its name, so its alias
    /// must be computed by a node and must not be a graph output itself.
    fn alias(&mut self, root: NodeId, values: &[ValueId]) -> bool {
        let Some(old) = self.graph.nodes.get(root.index()) else { return false };
        if values.len() < wanted_outputs(old) {
            return false;
        }
        let pairs = || old.outputs.iter().zip(values).filter_map(|(old, new)| old.map(|old| (old, *new)));
        let is_output = |id: ValueId| self.is_output.get(id.index()).copied().unwrap_or(true);
        let fits = pairs().all(|(old, new)| {
            let computed = self.producers.get(new.index()).copied().flatten().is_some();
            let nameable = !is_output(old) || (computed && !is_output(new));
            let (new, old) = (self.graph.value(new), self.graph.value(old));
            nameable && (new.ty == old.ty || refine(&mut new.clone(), old))
        });
        if !fits {
            return false;
        }
        let pairs: SmallVec<[(ValueId, ValueId); 2]> = pairs().collect();
        for (old, new) in pairs {
            if self.is_output.get(old.index()).copied().unwrap_or(false) {
                self.stand_for_output(old, new);
            }
            let moved = self.reads.get_mut(old.index()).map(std::mem::take).unwrap_or(0);
            if let Some(reads) = self.reads.get_mut(new.index()) {
                *reads += moved;
            }
            self.aliases.resize(self.graph.value_count(), None);
            self.aliases.iter_mut().skip(old.index()).take(1).for_each(|alias| *alias = Some(new));
        }
        true
    }

    /// Makes `new` the graph output instead of `old`, under the name of `old`.
    fn stand_for_output(&mut self, old: ValueId, new: ValueId) {
        // Swap the names, so that each stays unique.
        let (old_name, new_name) = (self.graph.value(old).name.clone(), self.graph.value(new).name.clone());
        self.graph.value_mut(old).name = new_name;
        self.graph.value_mut(new).name = old_name;
        self.graph.outputs.iter_mut().filter(|id| **id == old).for_each(|id| *id = new);
        for (id, is_output) in [(old, false), (new, true)] {
            if let Some(flag) = self.is_output.get_mut(id.index()) {
                *flag = is_output;
            }
        }
    }

    /// Makes a node read the aliases of its inputs and captures.
    fn resolve(&mut self, id: NodeId) {
        if self.aliases.is_empty() {
            return;
        }
        let aliases = &self.aliases;
        let resolved = |mut value: ValueId| {
            // A later rewrite may have replaced an alias as well.
            while let Some(next) = aliases.get(value.index()).copied().flatten() {
                value = next;
            }
            value
        };
        let Some(node) = self.graph.nodes.get_mut(id.index()) else { return };
        node.inputs.iter_mut().flatten().for_each(|input| *input = resolved(*input));
        let captures = node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures);
        captures.for_each(|capture| capture.outer = resolved(capture.outer));
    }

    /// Removes a node, and recursively the producers that no one reads then.
    fn kill(&mut self, root: NodeId) {
        // A worklist instead of recursion, because the depth of a graph has no bound.
        let mut doomed = vec![root];
        while let Some(id) = doomed.pop() {
            let Some(dead) = self.dead.get_mut(id.index()).filter(|dead| !**dead) else { continue };
            *dead = true;
            let reads: SmallVec<[ValueId; 4]> = match self.graph.nodes.get(id.index()) {
                Some(node) => node.reads().collect(),
                None => continue,
            };
            for value in reads {
                if let Some(count) = self.reads.get_mut(value.index()) {
                    *count = count.saturating_sub(1);
                }
                let Some(producer) = self.producers.get(value.index()).copied().flatten() else { continue };
                // `reads` also counts graph outputs, so their producers stay.
                let needed = self.graph.nodes.get(producer.index()).is_none_or(|node| {
                    let mut outputs = node.outputs.iter().flatten();
                    let has_effects = node.spec.traits.has(Traits::EFFECTS);
                    has_effects
                        || outputs.any(|output| self.reads.get(output.index()).is_none_or(|&reads| reads > 0))
                });
                if !needed {
                    doomed.push(producer);
                }
            }
        }
    }

    /// Resolves all aliases and drops the dead nodes.
    fn finish(mut self) -> Result<()> {
        (0..self.graph.nodes.len()).for_each(|index| self.resolve(NodeId(index as u32)));
        let nodes = std::mem::take(&mut self.graph.nodes);
        let living = nodes.into_iter().zip(&self.places).zip(&self.dead).filter(|(_, dead)| !**dead);
        let mut living: Vec<(usize, Node)> = living.map(|((node, place), _)| (*place, node)).collect();
        // A stable sort: new nodes at one position keep the order in which the rule added them.
        living.sort_by_key(|(place, _)| *place);
        self.graph.nodes = living.into_iter().map(|(_, node)| node).collect();
        if !in_order(self.graph) {
            self.graph.sort()?;
        }
        Ok(())
    }
}

/// Returns the value that a `QuantizeLinear` reads.
fn quantized_input(node: &Node) -> Option<ValueId> {
    node.inputs.first().copied().flatten().filter(|_| node.spec.name == "QuantizeLinear")
}

/// The root of a match, whose outputs the new nodes must compute.
struct Replaced<'a> {
    node: &'a Node,
    id: NodeId,
    /// What the rule requires to be known.
    known: Known,
    /// The earliest device that claims a node of the match.
    device: Option<usize>,
}

/// Whether inference knows as much about a replacement as its rule requires.
fn tells_enough(ty: &ValueType, known: Known) -> bool {
    match known {
        Known::Ranks => ty.shape().is_some(),
        Known::Types => ty.dtype().is_some(),
        Known::Nothing => *ty != ValueType::Unknown,
    }
}

/// Returns the number of outputs of a node, up to the last that is not omitted.
fn wanted_outputs(node: &Node) -> usize {
    node.outputs.iter().rposition(Option::is_some).map_or(0, |last| last + 1)
}

/// Merges what is known about a value before and after a rewrite; false if the two contradict.
fn refine(info: &mut ValueInfo, before: &ValueInfo) -> bool {
    let fits = match (&mut info.ty, &before.ty) {
        (_, ValueType::Unknown) => true,
        (ValueType::Tensor(now), ValueType::Tensor(then)) => {
            now.dtype == then.dtype
                && match (&mut now.shape, &then.shape) {
                    (_, None) => true,
                    (Some(now), Some(then)) => {
                        now.len() == then.len()
                            && now.iter_mut().zip(then).all(|(now, then)| refine_dim(now, then))
                    }
                    (now @ None, Some(then)) => {
                        *now = Some(then.clone());
                        true
                    }
                }
        }
        (now, then) => now == then,
    };
    if info.symbolic.is_none() {
        info.symbolic = before.symbolic.clone();
    }
    fits
}

/// Merges two sizes. A data-dependent size matches any, and a known size replaces it. Two different
/// known sizes contradict each other.
fn refine_dim(now: &mut Dim, then: &Dim) -> bool {
    if now == then || then.has_unknown() {
        return true;
    }
    if now.has_unknown() {
        *now = then.clone();
        return true;
    }
    false
}
