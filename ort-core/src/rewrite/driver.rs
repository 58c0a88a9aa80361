//! Applies rules to a graph until none applies any more.
//!
//! A sweep goes through the nodes in their order and offers each as the root of a pattern. What a
//! rule puts in place of a match is inferred at once: it must have the types and shapes of what it
//! replaces, or tell more of them, else the match stays and the rule is reported. A match of which
//! less is known than its rule asks for stays, too. Sweeps end when one changes nothing.

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::matching::{Finder, Match};
use super::patch::Patch;
use super::rule::{Compiled, Found, Known, Then};
use super::term::Term;
use super::{Environment, FirstClaim, Optimizer, Report};
use crate::Result;
use crate::dim::Dim;
use crate::ir::{Graph, Node, NodeId, ValueId, ValueInfo, ValueType};
use crate::limits::{NODES_PER_DEADLINE_CHECK, check_deadline};
use crate::spec::{OpSpec, infer_at};

/// The most sweeps over one graph; a rule set that needs more undoes its own work.
const MOST_SWEEPS: usize = 32;

/// The rules by the operator at their root.
pub(super) type Index<'a> = FxHashMap<*const OpSpec, Vec<&'a Compiled>>;

/// The rules that are in force, by root.
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
        sweep.refused = std::mem::take(&mut refused);
        let hits = sweep.run(rules, environment.until)?;
        refused = std::mem::take(&mut sweep.refused);
        if hits == 0 {
            return Ok(changed);
        }
        sweep.finish()?;
        changed = true;
    }
    tracing::warn!("the rewrite rules still find something after {MOST_SWEEPS} sweeps");
    Ok(changed)
}

struct Sweep<'g> {
    graph: &'g mut Graph,
    optimizer: &'g Optimizer,
    first_claim: FirstClaim<'g>,
    report: &'g mut Report,
    producers: Vec<Option<NodeId>>,
    /// How often each value is read: by nodes, their subgraphs, and as an output.
    reads: Vec<usize>,
    is_output: Vec<bool>,
    /// Where each node stands: new nodes stand where their match's root stood.
    places: Vec<usize>,
    dead: Vec<bool>,
    /// For each value the one that stands for it now.
    aliases: Vec<Option<ValueId>>,
    /// Rules whose result did not fit, with the node.
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
        for id in &sweep.graph.outputs {
            if let Some(is_output) = sweep.is_output.get_mut(id.index()) {
                *is_output = true;
            }
        }
        sweep
    }

    /// Visits every node once, and new ones as they come; returns how often a rule applied.
    fn run(&mut self, rules: &Index<'_>, until: Option<Instant>) -> Result<usize> {
        let mut hits = 0;
        for index in 0..self.graph.nodes.len() {
            if index % NODES_PER_DEADLINE_CHECK == 0 {
                check_deadline(until, "optimizing")?;
            }
            let mut visits: SmallVec<[NodeId; 8]> = SmallVec::from_slice(&[NodeId(index as u32)]);
            // A rule may apply to what another made; a bound keeps two that undo each other from
            // going on for ever.
            for _ in 0..MOST_SWEEPS {
                let Some(id) = visits.pop() else { break };
                if self.dead.get(id.index()).is_none_or(|dead| *dead) {
                    continue;
                }
                self.resolve(id);
                if self.optimizer.stop_after.is_some_and(|most| self.report.total() >= most) {
                    return Ok(hits);
                }
                let before = self.graph.nodes.len();
                if self.visit(id, rules) {
                    hits += 1;
                    visits.extend((before..self.graph.nodes.len()).rev().map(|new| NodeId(new as u32)));
                }
            }
        }
        Ok(hits)
    }

    /// Tries the rules of one root in turn; returns whether one applied.
    fn visit(&mut self, root: NodeId, rules: &Index<'_>) -> bool {
        let Some(node) = self.graph.nodes.get(root.index()) else { return false };
        let Some(candidates) = rules.get(&std::ptr::from_ref(node.spec)) else { return false };
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
                let view = Found { graph: self.graph, found: &found, level: self.optimizer.level };
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

    /// Whether as much is known of a match as its rule asks for.
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

    /// Whether nobody outside the match reads what is inside of it.
    fn is_free(&self, found: &Match, keep: bool) -> bool {
        let [_, inner @ ..] = found.nodes.as_slice() else { return false };
        keep || inner.iter().all(|id| {
            let node = self.graph.nodes.get(id.index());
            // Whoever else reads the numbers of codes goes on to do so; nothing is computed twice.
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

    /// Puts the right side of a rule in the place of a match, if it fits. A rule that fails leaves
    /// the match as it is: the graph runs without it as well.
    fn replace(&mut self, compiled: &Compiled, found: &Match, root: NodeId) -> bool {
        let Some(node) = self.graph.nodes.get(root.index()) else { return false };
        let key = (compiled.rule.name, node.name.clone());
        if self.refused.contains(&key) {
            return false;
        }
        let fits = match &compiled.template {
            Some(Term::Value { name, .. }) => {
                let value = found.value(name);
                value.is_some_and(|value| self.alias(root, &[value]))
            }
            _ => match self.replace_by_nodes(compiled, found, root) {
                Ok(Some(fits)) => fits,
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

    /// Builds the right side of a rule; what it makes must take the place of the root, or values
    /// that exist stand for it. None where the rule makes nothing of this match.
    fn replace_by_nodes(&mut self, compiled: &Compiled, found: &Match, root: NodeId) -> Result<Option<bool>> {
        let Some(node) = self.graph.nodes.get(root.index()).cloned() else { return Ok(None) };
        let mut patch = Patch::new(self.graph, found, &node, self.optimizer.level);
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
            let device = matched.filter_map(|node| (self.first_claim)(self.graph, node)).min();
            let end = Replaced { node: &node, id: root, known: compiled.rule.known, device };
            return Ok(Some(self.accept(end, nodes)));
        }
        let none_made = made.is_empty();
        drop(patch);
        Ok(Some(none_made && self.alias(root, &values)))
    }

    /// Adds the nodes that take a root's place, unless their outputs contradict it or they would
    /// not run on its device.
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
        let fits = inferred.is_ok()
            && outputs.iter().zip(&before).all(|(id, before)| {
                tells_enough(&self.graph.value(*id).ty, known) && refine(self.graph.value_mut(*id), before)
            })
            && self.graph.nodes.iter().skip(first).all(|node| self.runs_on(node, device));
        if !fits {
            tracing::debug!(node = &*old.name, problem = ?inferred.err(), "a rule's result does not fit");
            self.graph.nodes.truncate(first);
            outputs.into_iter().zip(before).for_each(|(id, info)| *self.graph.value_mut(id) = info);
            return false;
        }
        let place = self.places.get(root.index()).copied().unwrap_or(first);
        self.reads.resize(self.graph.value_count(), 0);
        self.producers.resize(self.graph.value_count(), None);
        self.is_output.resize(self.graph.value_count(), false);
        for index in added {
            self.places.push(place);
            self.dead.push(false);
            self.note_node(NodeId(index as u32));
        }
        true
    }

    /// Whether a device that comes no later claims a node. What no device claimed before, none need
    /// claim now.
    fn runs_on(&self, node: &Node, device: Option<usize>) -> bool {
        let claimed = (self.first_claim)(self.graph, node);
        device.is_none_or(|device| claimed.is_some_and(|claimed| claimed <= device))
    }

    /// Counts what a new node reads, and notes what it computes.
    fn note_node(&mut self, id: NodeId) {
        let Some(node) = self.graph.nodes.get(id.index()) else { return };
        for value in node.reads() {
            if let Some(reads) = self.reads.get_mut(value.index()) {
                *reads += 1;
            }
        }
        for output in node.outputs.iter().flatten() {
            if let Some(producer) = self.producers.get_mut(output.index()) {
                *producer = Some(id);
            }
        }
    }

    /// Lets values that exist stand for a root's outputs. An output of the graph keeps its name, so
    /// only a value that a node computes, and that is no output itself, can stand for it.
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

    /// Makes `new` an output of the graph in the place of `old`, under its name.
    fn stand_for_output(&mut self, old: ValueId, new: ValueId) {
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

    /// Lets a node read the values that stand for those it reads.
    fn resolve(&mut self, id: NodeId) {
        if self.aliases.is_empty() {
            return;
        }
        let aliases = &self.aliases;
        let resolved = |mut value: ValueId| {
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

    /// Takes a node away, and all before it that nobody needs then.
    fn kill(&mut self, root: NodeId) {
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
                let needed = self.graph.nodes.get(producer.index()).is_none_or(|node| {
                    let mut outputs = node.outputs.iter().flatten();
                    outputs.any(|output| self.reads.get(output.index()).is_none_or(|&reads| reads > 0))
                });
                if !needed {
                    doomed.push(producer);
                }
            }
        }
    }

    /// Leaves the nodes that live, in their order.
    fn finish(mut self) -> Result<()> {
        (0..self.graph.nodes.len()).for_each(|index| self.resolve(NodeId(index as u32)));
        let nodes = std::mem::take(&mut self.graph.nodes);
        let living = nodes.into_iter().zip(&self.places).zip(&self.dead).filter(|(_, dead)| !**dead);
        let mut living: Vec<(usize, Node)> = living.map(|((node, place), _)| (*place, node)).collect();
        living.sort_by_key(|(place, _)| *place);
        self.graph.nodes = living.into_iter().map(|(_, node)| node).collect();
        if !super::in_order(self.graph) {
            self.graph.sort()?;
        }
        Ok(())
    }
}

/// The root of a match, whose outputs a rule's nodes are to compute.
struct Replaced<'a> {
    node: &'a Node,
    id: NodeId,
    /// What the rule asks to be known.
    known: Known,
    /// The first device that claims a node of the match.
    device: Option<usize>,
}

/// Whether inference tells as much of a rule's result as the rule asks for.
fn tells_enough(ty: &ValueType, known: Known) -> bool {
    match known {
        Known::Ranks => ty.shape().is_some(),
        Known::Types => ty.dtype().is_some(),
        Known::Nothing => *ty != ValueType::Unknown,
    }
}

/// How many outputs a node has, up to the last that anybody wants.
fn wanted_outputs(node: &Node) -> usize {
    node.outputs.iter().rposition(Option::is_some).map_or(0, |last| last + 1)
}

/// Joins what is known of a value before and after a rewrite; false where they contradict each
/// other.
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

/// Sizes that only a run tells fit any; of two that are known in part the one known before stays.
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
