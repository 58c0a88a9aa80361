//! Recomputable subgraphs, clustered by their operators as in ONNX Runtime's memory optimizer.
//!
//! The name `FusedMatMul+Add+Softmax+` lists the operators in execution order. A request enables
//! the first N subgraphs of a name.

#![allow(
    clippy::indexing_slicing,
    reason = "blocks and steps are numbered by the session, and each table has an entry for each"
)]

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::path::Path;
use std::str::FromStr;

use indexmap::IndexMap;
use ort_core::dim::Dim;
use ort_core::{Error, Result, Within, advise, ensure, error};

use super::liveness::Joint;

/// The strategy of recomputing a subgraph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Strategy {
    /// No recomputation (0).
    Disabled,
    /// From values that are kept for the backward pass anyway (1).
    Recompute,
    /// From the input of a widening `Cast`, which is kept instead (2).
    Compromised,
}

impl Strategy {
    /// The number in a configuration.
    pub(super) fn number(self) -> u8 {
        match self {
            Strategy::Disabled => 0,
            Strategy::Recompute => 1,
            Strategy::Compromised => 2,
        }
    }
}

/// One entry of a configuration: `"<ClusterID>:<Strategy>:<RequestCount>"`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanRequest {
    /// The operators, each followed by `+`.
    pub cluster: String,
    /// The strategy.
    pub strategy: Strategy,
    /// The number of subgraphs, in execution order. `None` stands for all of them (-1).
    pub count: Option<usize>,
}

impl PlanRequest {
    /// Reads a configuration file: a JSON array of strings, each with one or more comma-separated
    /// entries.
    pub fn read(path: impl AsRef<Path>) -> Result<Vec<PlanRequest>> {
        let path = path.as_ref();
        let place = || format!("memory optimizer configuration '{}'", path.display());
        // A configuration is a short list. The bound keeps a wrong path from filling the memory.
        let text = ort_core::files::read_text(path, 1 << 20)
            .map_err(|problem| error!(NoSuchFile, "{problem}"))
            .within(place)?;
        let entries: Vec<String> = serde_json::from_str(&text)
            .map_err(|problem| {
                error!(InvalidArgument, "{problem}").help("write an array of strings: [\"Gelu+:1:-1\"]")
            })
            .within(place)?;
        let lists = entries.iter().map(|entry| PlanRequest::parse_list(entry));
        Ok(lists.collect::<Result<Vec<_>>>().within(place)?.concat())
    }

    /// Parses comma-separated entries.
    ///
    /// ```
    /// use ort_train::{PlanRequest, Strategy};
    ///
    /// let requests = PlanRequest::parse_list("Gelu+:1:-1,Dropout+:1:2")?;
    /// assert_eq!(requests[1].count, Some(2));
    /// assert_eq!(requests[0].strategy, Strategy::Recompute);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn parse_list(text: &str) -> Result<Vec<PlanRequest>> {
        text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).map(str::parse).collect()
    }
}

impl FromStr for PlanRequest {
    type Err = Error;

    fn from_str(text: &str) -> Result<PlanRequest> {
        let advice = "write <ClusterID>:<Strategy>:<RequestCount>, such as Gelu+:1:-1; strategies are 0, 1 and 2, a count of -1 is all";
        let parts: Vec<&str> = text.split(':').map(str::trim).collect();
        let [cluster, strategy, count] = parts.as_slice() else {
            return Err(
                error!(InvalidArgument, "'{text}' has {} parts, expected 3", parts.len()).help(advice)
            );
        };
        let strategy = match *strategy {
            "0" => Strategy::Disabled,
            "1" => Strategy::Recompute,
            "2" => Strategy::Compromised,
            other => return Err(error!(InvalidArgument, "'{text}' has strategy '{other}'").help(advice)),
        };
        let number: i64 = count.parse().map_err(|_| {
            error!(InvalidArgument, "'{text}' has the count '{count}', which is not an integer").help(advice)
        })?;
        ensure!(number >= -1, InvalidArgument, help = advice, "'{text}' has the count {number}");
        Ok(PlanRequest { cluster: (*cluster).to_string(), strategy, count: usize::try_from(number).ok() })
    }
}

/// A row of the recomputation table.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRow {
    /// The operators, each followed by `+`.
    pub cluster: String,
    /// The strategy.
    pub strategy: Strategy,
    /// Whether it is enabled.
    pub is_on: bool,
    /// The number of subgraphs.
    pub frequency: usize,
    /// The bytes by which the simulated peak falls if all of these subgraphs, and no others, are
    /// recomputed.
    pub max_saving: u64,
    /// The bytes that are no longer kept, as a formula of the model's symbolic dimensions.
    pub symbolic_saving: String,
}

impl Display for PlanRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:-1", self.cluster, self.strategy.number())
    }
}

/// The subgraphs of one name and strategy, in execution order.
pub(crate) struct Cluster {
    /// The step whose outputs each recomputes, and the blocks that it drops.
    pub(crate) subgraphs: Vec<(usize, BTreeSet<usize>)>,
    /// The bytes that are no longer kept.
    symbolic: Dim,
}

/// Finds all recomputable subgraphs, by name and strategy, in the order of first occurrence.
pub(crate) fn clusters(joint: &Joint<'_>) -> IndexMap<(String, Strategy), Cluster> {
    let mut found: IndexMap<(String, Strategy), Cluster> = IndexMap::new();
    let forward_steps = joint.forward_steps();
    let mut by_maker: IndexMap<usize, Vec<usize>> = IndexMap::new();
    for block in joint.stashed.iter().filter(|block| joint.bytes[**block] > 0) {
        if let Some(maker) = joint.maker[*block] {
            by_maker.entry(maker).or_default().push(*block);
        }
    }
    // Steps are numbered in execution order, and a request counts subgraphs in that order.
    by_maker.sort_unstable_keys();
    for (maker, entry) in by_maker {
        for strategy in [Strategy::Recompute, Strategy::Compromised] {
            let Some(blocks) = subgraph(joint, &entry, strategy) else { continue };
            let symbolic = entry.iter().map(|block| bytes_of(joint, *block));
            let symbolic = symbolic.fold(Dim::constant(0), |sum, bytes| &sum + &bytes);
            let key = (name_of(joint, &forward_steps, &blocks), strategy);
            let cluster = found
                .entry(key)
                .or_insert_with(|| Cluster { subgraphs: Vec::new(), symbolic: Dim::constant(0) });
            cluster.symbolic = &cluster.symbolic + &symbolic;
            cluster.subgraphs.push((maker, blocks));
        }
    }
    found
}

/// Returns the blocks that are recomputed together with those of the entry, back to what is kept
/// for the backward pass anyway. Returns `None` if a block on the way cannot be recomputed.
fn subgraph(joint: &Joint<'_>, entry: &[usize], strategy: Strategy) -> Option<BTreeSet<usize>> {
    let mut blocks: BTreeSet<usize> = entry.iter().copied().collect();
    let mut work: Vec<usize> = entry.to_vec();
    let mut stopped = false;
    while let Some(block) = work.pop() {
        // A block without a producer is an input, which is there anyway.
        let Some(maker) = joint.maker[block] else { continue };
        let stops = strategy == Strategy::Compromised && widens(joint, maker);
        stopped |= stops;
        for &read in &joint.steps[maker].reads {
            let ends = stops || joint.is_stashed[read] || joint.maker[read].is_none();
            if ends || blocks.contains(&read) {
                continue;
            }
            if !joint.droppable[read] {
                return None;
            }
            blocks.insert(read);
            work.push(read);
        }
    }
    // Without a widening cast, the compromise would be the same plan as `Recompute`.
    (strategy == Strategy::Recompute || stopped).then_some(blocks)
}

/// Whether a step is a cast to wider elements.
fn widens(joint: &Joint<'_>, step: usize) -> bool {
    let parts = &joint.steps[step];
    let node = parts.node.and_then(|node| joint.graph.nodes.get(node));
    let read: u64 = parts.reads.iter().map(|block| joint.bytes[*block]).sum();
    let made: u64 = parts.makes.iter().map(|made| made.bytes).sum();
    // A cast keeps the number of elements, so more bytes mean wider elements.
    node.is_some_and(|node| node.spec.name == "Cast") && read < made
}

/// Returns the operators of a subgraph in execution order.
fn name_of(joint: &Joint<'_>, forward_steps: &[Vec<usize>], blocks: &BTreeSet<usize>) -> String {
    let steps: BTreeSet<usize> = blocks.iter().flat_map(|block| &forward_steps[*block]).copied().collect();
    let nodes = steps.iter().filter_map(|step| joint.graph.nodes.get(joint.steps[*step].node?));
    nodes.map(|node| format!("{}+", node.spec.name)).collect()
}

/// Returns the bytes of a block as a formula of the symbolic dimensions.
fn bytes_of(joint: &Joint<'_>, block: usize) -> Dim {
    let value = || {
        let step = &joint.steps[joint.maker[block]?];
        let output = step.makes.iter().find(|made| made.block == block)?.output;
        joint.graph.nodes.get(step.node?)?.outputs.get(output).copied().flatten()
    };
    let known = || {
        let ty = &joint.graph.value(value()?).ty;
        let elements = ty.shape()?.iter().fold(Dim::constant(1), |product, dim| &product * dim);
        Some(&elements * &Dim::constant(ty.dtype()?.byte_size()? as i64))
    };
    // Without a known shape, the bytes at the current sizes stand for the formula.
    known().unwrap_or_else(|| Dim::constant(joint.bytes[block] as i64))
}

/// Returns the blocks that the requests drop.
///
/// # Errors
///
/// A request names no subgraph of the graph. The error suggests the nearest name.
pub(crate) fn requested(joint: &Joint<'_>, requests: &[PlanRequest]) -> Result<Vec<bool>> {
    let known = clusters(joint);
    let mut last: IndexMap<(&str, Strategy), Option<usize>> = IndexMap::new();
    for request in requests {
        let named = || known.keys().map(|(name, _)| name.as_str());
        let found = known.keys().any(|(name, strategy)| {
            *name == request.cluster
                && (request.strategy == Strategy::Disabled || *strategy == request.strategy)
        });
        ensure!(
            found,
            InvalidArgument,
            help = advise("clusters", &request.cluster, named()),
            "the graph has no subgraph '{}' for strategy {}",
            request.cluster,
            request.strategy.number()
        );
        // The last entry for a cluster wins.
        last.retain(|(name, _), _| *name != request.cluster);
        last.insert((&request.cluster, request.strategy), request.count);
    }
    let mut dropped = vec![false; joint.maker.len()];
    for ((name, strategy), count) in last {
        let Some(cluster) = known.get(&(name.to_string(), strategy)) else { continue };
        let chosen = cluster.subgraphs.iter().take(count.unwrap_or(usize::MAX));
        chosen.flat_map(|(_, blocks)| blocks).for_each(|block| dropped[*block] = true);
    }
    Ok(dropped)
}

/// Returns the recomputation table, with the largest saving first.
pub(crate) fn rows(joint: &Joint<'_>, dropped: &[bool]) -> Vec<PlanRow> {
    let before = joint.outcome(&vec![false; joint.maker.len()], 0).peak;
    let row = |((cluster, strategy), found): ((String, Strategy), Cluster)| {
        let mut alone = vec![false; joint.maker.len()];
        found.subgraphs.iter().flat_map(|(_, blocks)| blocks).for_each(|block| alone[*block] = true);
        let is_on = found.subgraphs.iter().any(|(_, blocks)| blocks.iter().all(|block| dropped[*block]));
        PlanRow {
            cluster,
            strategy,
            is_on,
            frequency: found.subgraphs.len(),
            max_saving: before.saturating_sub(joint.outcome(&alone, 0).peak),
            symbolic_saving: found.symbolic.to_string(),
        }
    };
    let mut rows: Vec<PlanRow> = clusters(joint).into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.max_saving));
    rows
}
