//! Rewrites of the canonical graph: constants folded, what is common computed once, what nobody
//! needs left out, and tables of rules ([`mod@crate::rules`]) that replace patterns of nodes by
//! better ones.
//!
//! A rule is data: a pattern and a template, both as text, with a guard or a function where text
//! cannot say it. The driver finds patterns from their root, refuses a match whose inner values are
//! read elsewhere, and puts a result in place only if its types and shapes are those of what it
//! replaces. Each rule has samples, from which a test builds the pattern and runs it with and
//! without the rule.

mod attention_cache;
mod cse;
mod dce;
mod driver;
mod elementwise_fusion;
mod fold;
mod matching;
mod nhwc;
mod patch;
mod rule;
mod sample;
mod term;
mod weight_vectors;

pub use matching::{Match, known_ints, scalar};
pub use patch::Patch;
pub use rule::{Found, Known, Level, Rule, RuleSet, Then};
pub use sample::{Declared, sample};

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::ir::{Attribute, Attributes, Graph, Node, Subgraph, ValueId};
use crate::spec::Registry;
use crate::tensor::Tensor;
use crate::{Result, Within, advise, ensure, error};
use rule::Compiled;

/// What may be rewritten.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Optimizer {
    /// How much.
    pub level: Level,
    /// Rules that do not apply, by name.
    pub disabled: Vec<String>,
    /// Stops after this many rewrites by rules: to find the one that does harm, by bisection.
    pub stop_after: Option<usize>,
}

impl Optimizer {
    /// All rules of a level.
    pub fn at(level: Level) -> Optimizer {
        Optimizer { level, ..Optimizer::default() }
    }

    /// Refuses names of rules that do not exist.
    fn check(&self) -> Result<()> {
        let tables = || rule_sets().iter().flat_map(|set| set.rules).map(|rule| rule.name);
        let names = || tables().chain([ATTENTION_CACHE, ELEMENTWISE_CHAIN, CHANNELS_LAST, WEIGHT_VECTORS]);
        for name in &self.disabled {
            ensure!(
                names().any(|known| known == name),
                InvalidArgument,
                help = advise("rewrite rules", name, names()),
                "there is no rewrite rule '{name}'"
            );
        }
        Ok(())
    }
}

/// What was rewritten.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    hits: Vec<(&'static str, usize)>,
    /// Nodes that were computed while optimizing, their results kept as constants.
    pub folded: usize,
    /// Nodes that computed what another computes.
    pub common: usize,
    /// Nodes whose results nobody read.
    pub unread: usize,
}

impl Report {
    /// How often each rule applied, by name; those that never did are left out.
    pub fn hits(&self) -> &[(&'static str, usize)] {
        &self.hits
    }

    /// How often any rule applied.
    pub fn total(&self) -> usize {
        self.hits.iter().map(|(_, count)| count).sum()
    }

    /// How many nodes went away for other reasons than a rule.
    fn without_rules(&self) -> usize {
        self.folded + self.common + self.unread
    }

    fn count(&mut self, rule: &'static str) {
        match self.hits.binary_search_by_key(&rule, |(name, _)| *name) {
            Ok(index) => self.hits.iter_mut().skip(index).take(1).for_each(|(_, count)| *count += 1),
            Err(index) => self.hits.insert(index, (rule, 1)),
        }
    }
}

/// Runs a graph without inputs and gives its outputs.
pub(crate) type Evaluate<'a> = &'a dyn Fn(Graph) -> Result<Vec<Tensor>>;

/// The place, in a session's order, of the first device that claims a node; none where no device
/// does.
pub(crate) type FirstClaim<'a> = &'a dyn Fn(&Graph, &Node) -> Option<usize>;

/// What rewriting asks of the session.
#[derive(Clone, Copy)]
pub(crate) struct Environment<'a> {
    pub(crate) evaluate: Evaluate<'a>,
    /// No rule moves work to a later device than it was on.
    pub(crate) first_claim: FirstClaim<'a>,
    /// For each device, in a session's order, whether it prefers images with the channels last.
    pub(crate) channels_last: &'a [bool],
    /// For each device, the bytes of the vectors in which it reads matrices.
    pub(crate) vector_bytes: &'a [usize],
    /// When rewriting gives up.
    pub(crate) until: Option<Instant>,
}

/// All tables of rules.
pub fn rule_sets() -> &'static [&'static RuleSet] {
    crate::rules::ALL
}

/// The rules, parsed once. One that does not parse is left out with a warning: a graph runs without
/// it as well.
fn compiled() -> &'static [Compiled] {
    static COMPILED: OnceLock<Vec<Compiled>> = OnceLock::new();
    let parse = |(rule, level)| match Compiled::new(rule, level) {
        Ok(compiled) => Some(compiled),
        Err(problem) => {
            tracing::warn!("a rewrite rule is left out: {problem}");
            None
        }
    };
    COMPILED.get_or_init(|| {
        let rules = rule_sets().iter().flat_map(|set| set.rules.iter().map(|rule| (rule, set.level)));
        rules.filter_map(parse).collect()
    })
}

/// Applies the rules of these families alone to an inferred graph, and computes nothing. What the
/// graph has as outputs stays.
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

/// Rewrites an inferred graph. A shared graph is copied first, unless nothing is to be done.
pub(crate) fn optimize(
    graph: &mut Arc<Graph>,
    optimizer: &Optimizer,
    environment: Environment<'_>,
) -> Result<Report> {
    let mut report = Report::default();
    optimizer.check()?;
    if optimizer.level == Level::Disabled {
        return Ok(report);
    }
    let mut driver = Driver { optimizer, environment, report: &mut report, shared: fold::Shared::default() };
    driver.graph(Arc::make_mut(graph))?;
    tracing::info!(
        rules = report.total(),
        folded = report.folded,
        common = report.common,
        unread = report.unread,
        "optimized"
    );
    Ok(report)
}

/// What the fusion of attention with its cache, which has more than one result, is called among the
/// rules.
const ATTENTION_CACHE: &str = "attention_cache";

/// What the fusion of elementwise operators, which no pattern can say, is called among the rules.
const ELEMENTWISE_CHAIN: &str = "elementwise_chain";

/// What the change of layout for devices that prefer another is called among the rules.
const CHANNELS_LAST: &str = "channels_last";

/// What the transposition of weights for devices that read vectors is called among the rules.
const WEIGHT_VECTORS: &str = "weight_vectors";

/// The most rounds of folding and rewriting; each may give the other something to do.
const MOST_ROUNDS: usize = 8;

struct Driver<'a> {
    optimizer: &'a Optimizer,
    environment: Environment<'a>,
    report: &'a mut Report,
    /// What folding made.
    shared: fold::Shared,
}

impl Driver<'_> {
    fn graph(&mut self, graph: &mut Graph) -> Result<()> {
        for node in &mut graph.nodes {
            let place = node.place();
            for subgraph in node.subgraphs.iter_mut().filter(|subgraph| subgraph.graph.broken.is_none()) {
                self.graph(&mut subgraph.graph).within(|| subgraph.attr).within(|| place.clone())?;
                forget_unread_captures(subgraph);
            }
        }
        let basic = Optimizer { level: Level::Basic.min(self.optimizer.level), ..self.optimizer.clone() };
        let before = self.report.clone();
        self.apply_all(graph, &basic, fold::SMALL)?;
        if self.optimizer.level > Level::Basic {
            self.apply_all(graph, &self.optimizer.clone(), usize::MAX)?;
            if self.optimizer.level == Level::All && self.applies(ATTENTION_CACHE) {
                self.fuse_caches(graph)?;
            }
            if self.applies(ELEMENTWISE_CHAIN) {
                elementwise_fusion::fuse(graph, self.environment.first_claim, self.report)?;
            }
            dce::remove_dead(graph, self.report);
            if self.optimizer.level == Level::All && self.applies(CHANNELS_LAST) {
                self.move_channels(graph)?;
            }
            if self.optimizer.level == Level::All && self.applies(WEIGHT_VECTORS) {
                self.transpose_weights(graph)?;
            }
        } else {
            self.apply_all(graph, &basic, usize::MAX)?;
        }
        if *self.report == before { Ok(()) } else { graph.verify() }
    }

    /// Whether what is called this is not left out.
    fn applies(&self, name: &str) -> bool {
        !self.optimizer.disabled.iter().any(|disabled| disabled == name)
    }

    /// Fuses attention with its cache; what that leaves of reshapes and transpositions is for the
    /// rules.
    fn fuse_caches(&mut self, graph: &mut Graph) -> Result<()> {
        if attention_cache::apply(graph, self.environment.first_claim, self.report)? {
            dce::remove_dead(graph, self.report);
            self.apply_all(graph, &self.optimizer.clone(), usize::MAX)?;
        }
        Ok(())
    }

    /// Moves channels behind where devices prefer that; filters are moved ahead.
    fn move_channels(&mut self, graph: &mut Graph) -> Result<()> {
        let Environment { evaluate, first_claim, channels_last, .. } = self.environment;
        if nhwc::apply(graph, first_claim, channels_last, self.report)? {
            cse::merge(graph, self.report);
            fold::constants(graph, evaluate, usize::MAX, &mut self.shared, self.report)?;
            dce::remove_dead(graph, self.report);
        }
        Ok(())
    }

    /// Transposes weights that devices cannot read in vectors as they are.
    fn transpose_weights(&mut self, graph: &mut Graph) -> Result<()> {
        let Environment { evaluate, first_claim, vector_bytes, .. } = self.environment;
        if weight_vectors::apply(graph, first_claim, vector_bytes, self.report)? {
            fold::constants(graph, evaluate, usize::MAX, &mut self.shared, self.report)?;
            dce::remove_dead(graph, self.report);
        }
        Ok(())
    }

    /// Folds constants of up to `most` bytes and applies rules, until neither finds anything.
    fn apply_all(&mut self, graph: &mut Graph, optimizer: &Optimizer, most: usize) -> Result<()> {
        let index = driver::index(compiled(), optimizer);
        fold::known_values(graph, self.report)?;
        for _ in 0..MOST_ROUNDS {
            let rewritten = driver::apply(graph, &index, optimizer, self.environment, self.report)?;
            let before = self.report.without_rules();
            let folded =
                fold::constants(graph, self.environment.evaluate, most, &mut self.shared, self.report)?;
            if rewritten || folded || most == fold::SMALL {
                cse::merge(graph, self.report);
                dce::remove_dead(graph, self.report);
                fold::known_values(graph, self.report)?;
            }
            // No rule applies any more, unless something else has changed since.
            if self.report.without_rules() == before {
                break;
            }
        }
        Ok(())
    }
}

/// Takes captures away that the subgraph does not read any more.
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

/// Whether each node reads only what comes before it.
fn in_order(graph: &Graph) -> bool {
    let producers = graph.producers();
    graph.nodes.iter().enumerate().all(|(index, node)| {
        node.reads().all(|value| {
            producers.get(value.index()).copied().flatten().is_none_or(|producer| producer.index() < index)
        })
    })
}

/// The first of at most one, for the macro of rules.
#[doc(hidden)]
pub const fn first_of(guards: &[fn(&Found<'_>) -> bool]) -> Option<fn(&Found<'_>) -> bool> {
    match guards {
        [first, ..] => Some(*first),
        [] => None,
    }
}

/// The first of at most one, for the macro of rules.
#[doc(hidden)]
pub const fn first_known(known: &[Known]) -> Known {
    match known {
        [first, ..] => *first,
        [] => Known::Ranks,
    }
}

/// The first of at most one, for the macro of rules.
#[doc(hidden)]
pub const fn first_flag(flags: &[bool]) -> bool {
    matches!(flags, [true, ..])
}

/// A node of a rewrite, with its operator looked up.
fn new_node(
    (domain, op): (&str, &str),
    name: &str,
    inputs: &[Option<ValueId>],
    outputs: &[Option<ValueId>],
    attrs: Vec<(String, Attribute)>,
) -> Result<Node> {
    let spec = Registry::global()?.find(domain, op);
    let spec = spec.ok_or_else(|| crate::error!(Fail, "there is no operator {op}"))?;
    let (attrs, subgraphs) = (Attributes::new(spec, attrs)?, Vec::new());
    Ok(Node { name: name.into(), spec, inputs: inputs.into(), outputs: outputs.into(), attrs, subgraphs })
}

/// Whether the second node would be claimed by the device that claims the first one, or by one
/// before it.
fn is_no_later(graph: &Graph, first_claim: FirstClaim<'_>, nodes: [&Node; 2]) -> bool {
    let claims = nodes.map(|node| first_claim(graph, node));
    matches!(claims, [Some(before), Some(after)] if after <= before)
}
