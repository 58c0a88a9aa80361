//! Activation patterns: what the backward pass keeps, node by node.
//!
//! Nodes that are alike in everything that their recomputation depends on form one pattern.

use std::collections::BTreeSet;
use std::fmt::Write;

use indexmap::IndexMap;
use ort_core::dim::Dim;
use ort_core::ir::ValueId;

use super::clusters::{Cluster, Strategy, clusters};
use super::level::Recompute;
use super::liveness::Joint;

/// Forward nodes whose outputs are kept for the backward pass, and which are alike in the subgraphs
/// that would recompute them and in the sizes of their outputs.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationPattern {
    /// The number of nodes.
    pub frequency: usize,
    /// The ways to recompute their outputs. They are mutually exclusive.
    pub options: Vec<PatternOption>,
}

/// One way to recompute the outputs of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PatternOption {
    /// The operators of the subgraph, each followed by `+`.
    pub cluster: String,
    /// The strategy: what it is recomputed from.
    pub strategy: Strategy,
    /// The number of nodes that have it enabled.
    pub applied: usize,
    /// The outputs of the node that are kept without it.
    pub activations: Vec<StashedActivation>,
}

/// An output that is kept for the backward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StashedActivation {
    /// Its index among the outputs of the node.
    pub output: usize,
    /// The number of backward nodes that read it.
    pub readers: usize,
    /// The number of elements as a formula of the symbolic dimensions.
    pub elements: String,
    /// The bytes per element. `None` if elements share bytes.
    pub bytes_per_element: Option<usize>,
    /// The share of its bytes that is no longer kept, in percent.
    pub saved_percent: u64,
}

/// Returns the patterns, most frequent first. Patterns of equal frequency are in descending order
/// of their names. `dropped` is what is recomputed now.
pub(crate) fn patterns(joint: &Joint<'_>, dropped: &[bool]) -> Vec<ActivationPattern> {
    let readers = joint.backward_readers();
    let mut by_entry: IndexMap<usize, Vec<(PatternOption, bool)>> = IndexMap::new();
    for ((cluster, strategy), Cluster { subgraphs, .. }) in clusters(joint) {
        for (entry, blocks) in subgraphs {
            // Subgraphs may share blocks, so one counts as enabled only if all of its blocks are
            // dropped.
            let is_on = blocks.iter().all(|block| dropped.get(*block).copied().unwrap_or(false));
            let activations = activations(joint, entry, &readers, &blocks);
            let option = PatternOption { cluster: cluster.clone(), strategy, applied: 0, activations };
            by_entry.entry(entry).or_default().push((option, is_on));
        }
    }
    let mut alike: IndexMap<Vec<PatternOption>, (usize, Vec<usize>)> = IndexMap::new();
    for options in by_entry.into_values() {
        let (options, on): (Vec<PatternOption>, Vec<bool>) = options.into_iter().unzip();
        // `applied` stays 0 in the key, because nodes of one pattern may differ in it.
        let (frequency, applied) = alike.entry(options).or_insert_with(|| (0, vec![0; on.len()]));
        *frequency += 1;
        applied.iter_mut().zip(on).for_each(|(applied, on)| *applied += usize::from(on));
    }
    let pattern = |(mut options, (frequency, applied)): (Vec<PatternOption>, (usize, Vec<usize>))| {
        options.iter_mut().zip(applied).for_each(|(option, applied)| option.applied = applied);
        ActivationPattern { frequency, options }
    };
    let mut patterns: Vec<ActivationPattern> = alike.into_iter().map(pattern).collect();
    let key = |pattern: &ActivationPattern| pattern.options.first().map(|option| option.cluster.clone());
    patterns.sort_by_cached_key(|pattern| std::cmp::Reverse((pattern.frequency, key(pattern))));
    patterns
}

/// Returns the outputs of a step that are kept for the backward pass, and how much of them is saved
/// if these blocks are recomputed. `readers` has the number of backward readers of each block.
fn activations(
    joint: &Joint<'_>,
    entry: usize,
    readers: &[usize],
    blocks: &BTreeSet<usize>,
) -> Vec<StashedActivation> {
    let Some(step) = joint.steps.get(entry) else { return Vec::new() };
    let node = step.node.and_then(|node| joint.graph.nodes.get(node));
    let kept = kept_instead(joint, blocks);
    let all: u64 = step.makes.iter().map(|made| made.bytes).sum();
    let stashed = step.makes.iter().filter(|made| joint.is_stashed.get(made.block) == Some(&true));
    let activation = |made: &ort_core::plan::LiveBlock| {
        let value = node.and_then(|node| node.outputs.get(made.output).copied().flatten());
        StashedActivation {
            output: made.output,
            readers: readers.get(made.block).copied().unwrap_or(0),
            elements: value.and_then(|value| elements(joint, value)).unwrap_or_else(|| "unknown".to_string()),
            bytes_per_element: value.and_then(|value| joint.graph.value(value).ty.dtype()?.byte_size()),
            // The share that is kept instead may exceed the whole, and saves nothing then.
            saved_percent: 100 - (100 * kept.min(all)).checked_div(all).unwrap_or(0),
        }
    };
    stashed.map(activation).collect()
}

/// Returns the bytes of what is kept additionally, so that these blocks can be recomputed.
fn kept_instead(joint: &Joint<'_>, blocks: &BTreeSet<usize>) -> u64 {
    let makers = blocks.iter().filter_map(|block| joint.steps.get(joint.maker.get(*block).copied()??));
    let reads: BTreeSet<usize> = makers.flat_map(|step| step.reads.iter().copied()).collect();
    let is_new = |block: &&usize| {
        let is_made = joint.maker.get(**block).copied().flatten().is_some();
        is_made && !blocks.contains(block) && joint.is_stashed.get(**block) == Some(&false)
    };
    reads.iter().filter(is_new).filter_map(|block| joint.bytes.get(*block)).sum()
}

/// The number of elements of a value as a formula of the symbolic dimensions.
fn elements(joint: &Joint<'_>, value: ValueId) -> Option<String> {
    let shape = joint.graph.value(value).ty.shape()?;
    Some(shape.iter().fold(Dim::constant(1), |product, dim| &product * dim).to_string())
}

/// The minimum width of the first column.
const FREQUENCY: usize = 7;
/// The width of the title in a line.
const TITLE: usize = 15;
/// The length of the rules around a block.
const BORDER: usize = 140;

/// Formats the patterns as ONNX Runtime prints them at log level `DEVINFO`. `config` is the
/// configuration file, or the entries, of the request.
///
/// ```
/// use ort_train::{ActivationPattern, PatternOption, Recompute, StashedActivation, Strategy, memory_insight};
///
/// let activation = StashedActivation {
///     output: 0,
///     readers: 1,
///     elements: "65536*batch".to_string(),
///     bytes_per_element: Some(4),
///     saved_percent: 100,
/// };
/// let option = PatternOption {
///     cluster: "Gelu+".to_string(),
///     strategy: Strategy::Recompute,
///     applied: 0,
///     activations: vec![activation],
/// };
/// let text = memory_insight(&Recompute::AsLimited, None, &[ActivationPattern { frequency: 4, options: vec![option] }]);
/// assert!(text.contains("4      |For each row options are mutually exclusive"));
/// assert!(text.contains("|>>Option 1     : Recompute subgraph Gelu+"));
/// assert!(text.contains("|   - Output 0  : [65536*batch], byte/elem: 4, 100% saved"));
/// ```
pub fn memory_insight(recompute: &Recompute, config: Option<&str>, patterns: &[ActivationPattern]) -> String {
    let path = config.unwrap_or("not provided");
    let border = "=".repeat(BORDER);
    let mut text = format!("MemoryInsight Summary - User config file path: {path}\n{border}\n");
    let head = "Memory Optimization Opportunities (Clustered by node-level activation patterns)";
    line(&mut text, "Freq", head);
    for pattern in patterns {
        line(&mut text, "_ _ _ _", "_ ".repeat((BORDER - FREQUENCY) / 2).trim_end());
        let one = "For each row options are mutually exclusive, only one of them can be enabled.";
        line(&mut text, &pattern.frequency.to_string(), one);
        for (index, option) in pattern.options.iter().enumerate() {
            let title = format!(">>Option {}", index + 1);
            let kind = if option.strategy == Strategy::Compromised {
                "RecomputeWithCompromise"
            } else {
                "Recompute"
            };
            let what = format!("{kind} subgraph {}", option.cluster);
            line(&mut text, "", &titled(&title, &what));
            line(&mut text, "", &titled("  Status", &status(recompute, option)));
            line(&mut text, "", "  Stashed Activations:");
            for shown in stashed(option) {
                line(&mut text, "", &shown);
            }
        }
    }
    let _ = writeln!(text, "{border}");
    text + "Note: use comma as a separator for enabling more than one subgraphs.\n"
}

/// Describes whether an option is enabled, and how to enable it.
fn status(recompute: &Recompute, option: &PatternOption) -> String {
    if option.applied == 0 {
        let key = format!("{}:{}:-1", option.cluster, option.strategy.number());
        return format!("Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG={key}");
    }
    let asked = match recompute {
        Recompute::Plans(requests) => {
            // The last entry for a cluster wins, as in `requested`.
            let own = requests.iter().rev().find(|request| request.cluster == option.cluster);
            own.and_then(|request| request.count).map_or("-1".to_string(), |count| count.to_string())
        }
        _ => "-1".to_string(),
    };
    format!("Enabled, requested count={asked}, actual applied count={}", option.applied)
}

/// The lines about kept outputs: the number of readers of those that have several, then their
/// sizes.
fn stashed(option: &PatternOption) -> Vec<String> {
    let often = option.activations.iter().filter(|activation| activation.readers > 1);
    let often: String = often.map(|it| format!(" Output {}({}),", it.output, it.readers)).collect();
    let reused = (!often.is_empty()).then(|| titled("   - ReuseFreq", often.trim_start()));
    let size = |it: &StashedActivation| {
        let bytes = it.bytes_per_element.map_or("packed".to_string(), |bytes| bytes.to_string());
        let what = format!("[{}], byte/elem: {bytes}, {}% saved", it.elements, it.saved_percent);
        titled(&format!("   - Output {}", it.output), &what)
    };
    reused.into_iter().chain(option.activations.iter().map(size)).collect()
}

/// A title, padded to its column, and a text.
fn titled(title: &str, what: &str) -> String {
    format!("{title:<TITLE$}: {what}")
}

/// Appends a line with its first column.
fn line(text: &mut String, first: &str, rest: &str) {
    let _ = writeln!(text, "{first:<FREQUENCY$}|{rest}");
}
