//! Graph optimizer: rewrites of the canonical graph.
//!
//! It folds constants, eliminates common subexpressions and dead code, and applies tables of rules
//! ([`mod@crate::rules`]) that replace patterns of nodes by cheaper ones. Larger rewrites are
//! passes of their own: elementwise fusion, attention with its KV cache, NHWC layout, transposed
//! weights, loop-invariant state.
//!
//! A rule is data: a pattern and a template, both as text, with a guard or a builder function for
//! what text cannot say. The driver matches a pattern from its root towards the inputs. It rejects
//! a match whose inner values are read elsewhere, and a replacement whose types or shapes
//! contradict the root's. Each rule has samples; a test builds the pattern from them and compares a
//! run with the rule to one without it.

mod attention_cache;
mod cse;
mod dce;
mod driver;
mod elementwise_fusion;
mod environment;
mod fold;
mod level;
mod loop_invariant;
mod matching;
mod nhwc;
mod nodes;
mod optimizer;
mod patch;
mod report;
mod rule;
mod sample;
mod term;
mod weight_vectors;

pub(crate) use environment::Environment;
pub use level::Level;
pub use matching::{Found, Match, known_ints, scalar};
pub use optimizer::Optimizer;
pub use patch::Patch;
pub use report::Report;
pub use rule::{Known, Rule, RuleSet, Then};
#[doc(hidden)]
pub use rule::{first_flag, first_known, first_of};
pub use sample::{Declared, sample};

use std::sync::{Arc, OnceLock};

use ort_alloc::fork::get_or_init;

use crate::ir::{Graph, Subgraph};
use crate::{Result, Within, advise_listed, ensure, error};
use rule::Compiled;

/// Returns all tables of rules.
pub fn rule_sets() -> &'static [&'static RuleSet] {
    crate::rules::ALL
}

/// Returns the rules, parsed once. A rule that does not parse is skipped with a warning, because
/// the graph is correct without it.
fn compiled() -> &'static [Compiled] {
    static COMPILED: OnceLock<Vec<Compiled>> = OnceLock::new();
    let parse = |(rule, level)| match Compiled::new(rule, level) {
        Ok(compiled) => Some(compiled),
        Err(problem) => {
            tracing::warn!("a rewrite rule is left out: {problem}");
            None
        }
    };
    get_or_init(&COMPILED, || {
        let rules = rule_sets().iter().flat_map(|set| set.rules.iter().map(|rule| (rule, set.level)));
        rules.filter_map(parse).collect()
    })
    .as_slice()
}

/// Applies only the rules of these families to an inferred graph, without folding constants. The
/// names of the graph's outputs stay.
pub fn apply_families(graph: &mut Graph, families: &[&str]) -> Result<Report> {
    let others = rule_sets().iter().filter(|set| !families.contains(&set.family));
    let disabled = others.flat_map(|set| set.rules).map(|rule| rule.name.to_string()).collect();
    let optimizer = Optimizer { disabled, ..Optimizer::default() };
    let environment = Environment {
        evaluate: &|_| Err(error!(Fail, "rules alone compute no constants")),
        first_claim: &|_, _| None,
        channels_last: &[],
        vector_bytes: &[],
        until: None,
    };
    let mut report = Report::default();
    let index = driver::index(compiled(), &optimizer);
    if driver::apply(graph, &index, &optimizer, environment, &mut report)? {
        graph.verify()?;
    }
    Ok(report)
}

/// The names of the passes that can be disabled like a rule.
const PASSES: [&str; 5] =
    [attention_cache::RULE, elementwise_fusion::RULE, loop_invariant::RULE, nhwc::RULE, weight_vectors::RULE];

/// The names of the rewrite rules, for [`Optimizer::disabled`].
pub fn rule_names() -> impl Iterator<Item = &'static str> + Clone {
    rule_sets().iter().flat_map(|set| set.rules).map(|rule| rule.name).chain(PASSES)
}

/// Returns an error if `optimizer.disabled` names an unknown rule.
fn check_disabled(optimizer: &Optimizer) -> Result<()> {
    for name in &optimizer.disabled {
        ensure!(
            rule_names().any(|known| known == name),
            InvalidArgument,
            help = advise_listed(
                "rewrite rules",
                name,
                rule_names(),
                "`ort optimize` lists the rules that apply, docs/RULES.md lists all"
            ),
            "there is no rewrite rule '{name}'"
        );
    }
    Ok(())
}

/// Optimizes an inferred graph. A shared graph is copied first, unless the level is `Disabled`.
pub(crate) fn optimize(
    graph: &mut Arc<Graph>,
    optimizer: &Optimizer,
    environment: Environment<'_>,
) -> Result<Report> {
    let mut report = Report::default();
    // Before the early return, so that a misspelled rule is an error at every level.
    check_disabled(optimizer)?;
    if optimizer.level == Level::Disabled {
        return Ok(report);
    }
    let mut driver = Driver { optimizer, environment, report: &mut report, shared: fold::Shared::default() };
    let graph = Arc::make_mut(graph);
    // First, so that the rules see in bodies what loops passed to them.
    if driver.applies(loop_invariant::RULE) && loop_invariant::apply(graph, driver.report)? {
        graph.verify()?;
    }
    driver.graph(graph)?;
    tracing::info!(
        rules = report.total(),
        folded = report.folded,
        common = report.common,
        unread = report.unread,
        "optimized"
    );
    Ok(report)
}

/// Maximum number of rounds of rules and folding; each may enable the other.
const MOST_ROUNDS: usize = 8;

struct Driver<'a> {
    optimizer: &'a Optimizer,
    environment: Environment<'a>,
    report: &'a mut Report,
    /// Deduplicates folded tensors across the graph and its subgraphs.
    shared: fold::Shared,
}

impl Driver<'_> {
    fn graph(&mut self, graph: &mut Graph) -> Result<()> {
        // Subgraphs first: what they no longer capture becomes dead code in this graph.
        for node in &mut graph.nodes {
            let place = node.place();
            for subgraph in node.subgraphs.iter_mut().filter(|subgraph| subgraph.graph.broken.is_none()) {
                self.graph(&mut subgraph.graph).within(|| subgraph.attr).within(|| place.clone())?;
                forget_unread_captures(subgraph);
            }
        }
        // Basic rules and small constants first, so that fused patterns find shapes and scales as
        // constants. Larger results fold only after the rules of each round, because QDQ rules
        // match the `DequantizeLinear` of a weight.
        let basic = Optimizer { level: Level::Basic.min(self.optimizer.level), ..self.optimizer.clone() };
        let before = self.report.clone();
        self.apply_all(graph, &basic, fold::SMALL)?;
        if self.optimizer.level > Level::Basic {
            self.apply_all(graph, &self.optimizer.clone(), usize::MAX)?;
            if self.optimizer.level == Level::All && self.applies(attention_cache::RULE) {
                self.fuse_caches(graph)?;
            }
            // After the rules: a fused chain hides its operators from their patterns.
            if self.applies(elementwise_fusion::RULE) {
                elementwise_fusion::fuse(graph, self.environment.first_claim, self.report)?;
            }
            dce::remove_dead(graph, self.report);
            // After fusion: the layout pass converts fused convolutions and chains as whole nodes.
            if self.optimizer.level == Level::All && self.applies(nhwc::RULE) {
                self.move_channels(graph)?;
            }
            if self.optimizer.level == Level::All && self.applies(weight_vectors::RULE) {
                self.transpose_weights(graph)?;
            }
        } else {
            // The QDQ rules are not on at this level, so large results need not wait for them.
            self.apply_all(graph, &basic, usize::MAX)?;
        }
        if *self.report == before { Ok(()) } else { graph.verify() }
    }

    /// Whether the rule or pass of this name is enabled.
    fn applies(&self, name: &str) -> bool {
        !self.optimizer.disabled.iter().any(|disabled| disabled == name)
    }

    /// Fuses attention with its KV cache, then reruns the rules on the reshapes and transpositions
    /// that are left.
    fn fuse_caches(&mut self, graph: &mut Graph) -> Result<()> {
        if attention_cache::apply(graph, self.environment.first_claim, self.report)? {
            dce::remove_dead(graph, self.report);
            self.apply_all(graph, &self.optimizer.clone(), usize::MAX)?;
        }
        Ok(())
    }

    /// Converts images to NHWC for devices that prefer it. Filters are transposed now, by folding.
    fn move_channels(&mut self, graph: &mut Graph) -> Result<()> {
        let Environment { evaluate, first_claim, channels_last, .. } = self.environment;
        if nhwc::apply(graph, first_claim, channels_last, self.report)? {
            // Convolutions that share a filter each transposed it: merge those before folding.
            cse::merge(graph, self.report);
            fold::constants(graph, evaluate, usize::MAX, &mut self.shared, self.report)?;
            dce::remove_dead(graph, self.report);
        }
        Ok(())
    }

    /// Transposes weights whose rows a device cannot read in whole vectors.
    fn transpose_weights(&mut self, graph: &mut Graph) -> Result<()> {
        let Environment { evaluate, first_claim, vector_bytes, .. } = self.environment;
        if weight_vectors::apply(graph, first_claim, vector_bytes, self.report)? {
            fold::constants(graph, evaluate, usize::MAX, &mut self.shared, self.report)?;
            dce::remove_dead(graph, self.report);
        }
        Ok(())
    }

    /// Alternates rules and folding of nodes with up to `most` bytes of results, until neither
    /// finds anything.
    fn apply_all(&mut self, graph: &mut Graph, optimizer: &Optimizer, most: usize) -> Result<()> {
        let index = driver::index(compiled(), optimizer);
        fold::known_values(graph, self.report)?;
        for _ in 0..MOST_ROUNDS {
            let rewritten = driver::apply(graph, &index, optimizer, self.environment, self.report)?;
            let before = self.report.without_rules();
            let folded =
                fold::constants(graph, self.environment.evaluate, most, &mut self.shared, self.report)?;
            // The first pass, over small constants, cleans up in any case: the loaded graph may
            // have duplicates and dead nodes.
            if rewritten || folded || most == fold::SMALL {
                cse::merge(graph, self.report);
                dce::remove_dead(graph, self.report);
                fold::known_values(graph, self.report)?;
            }
            // `driver::apply` ran the rules to a fixed point. They can match again only if folding,
            // CSE or DCE changed the graph since.
            if self.report.without_rules() == before {
                break;
            }
        }
        Ok(())
    }
}

/// Removes captures that the subgraph no longer reads.
fn forget_unread_captures(subgraph: &mut Subgraph) {
    let mut read = vec![false; subgraph.graph.value_count()];
    let reads = subgraph.graph.nodes.iter().flat_map(|node| node.reads());
    for id in reads.chain(subgraph.graph.outputs.iter().copied()) {
        if let Some(read) = read.get_mut(id.index()) {
            *read = true;
        }
    }
    subgraph.captures.retain(|capture| read.get(capture.inner.index()).copied().unwrap_or(true));
}
