//! What a rule is, and the table form rules are written in.

use super::matching::Match;
use super::patch::Patch;
use super::term::Term;
use crate::ir::{Graph, ValueId};
use crate::spec::OpSpec;
use crate::{Result, Within, ensure};

/// How much of a graph may change. Each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Level {
    /// The graph runs as it was loaded.
    Disabled,
    /// What is exact and needs no special kernel: constants folded, what is common computed once, what nobody needs
    /// left out, algebra.
    Basic,
    /// Fused operators.
    Extended,
    /// Everything, layouts included.
    #[default]
    All,
}

impl Level {
    /// The levels by name.
    pub const NAMES: [(&'static str, Level); 4] = [
        ("disabled", Level::Disabled),
        ("basic", Level::Basic),
        ("extended", Level::Extended),
        ("all", Level::All),
    ];

    /// The level called `name`.
    pub fn named(name: &str) -> Option<Level> {
        Level::NAMES.iter().find(|(known, _)| *known == name).map(|(_, level)| *level)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Level::NAMES.iter().find(|(_, level)| *level == self).map_or("", |(name, _)| name)
    }
}

/// A rule as it is written: a row of a table.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Its name, unique among all rules.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub doc: &'static str,
    /// What it looks for; see the module `term` for the syntax.
    pub pattern: &'static str,
    /// What must hold besides.
    pub when: Option<fn(&Found<'_>) -> bool>,
    /// What stands there afterwards.
    pub then: Then,
    /// Whether values inside the pattern may be read by others. Those stay.
    pub keep: bool,
    /// Inputs that it applies to: an example of the pattern, for the test of the rule. Values are `name=type[sizes]`,
    /// constants too; attributes of named nodes are `node.attribute=value`.
    pub samples: &'static [&'static str],
}

/// The right side of a rule.
#[derive(Clone, Copy, Debug)]
pub enum Then {
    /// A template.
    Template(&'static str),
    /// Adds nodes, and returns the values that stand for the outputs of the pattern's root; none where it does not
    /// apply after all.
    Build(fn(&mut Patch<'_>) -> Result<Option<Vec<ValueId>>>),
}

/// A table of rules of one level.
#[derive(Clone, Copy, Debug)]
pub struct RuleSet {
    /// The family, as its file is called.
    pub family: &'static str,
    /// From which level on they apply.
    pub level: Level,
    /// The rules; of two that match the first applies.
    pub rules: &'static [Rule],
}

/// A match in its graph, as guards see it.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// What the names of the pattern stand for.
    pub found: &'a Match,
}

/// A rule whose texts are parsed.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) rule: &'static Rule,
    pub(crate) level: Level,
    pub(crate) pattern: Term,
    pub(crate) template: Option<Term>,
    /// Nodes of the pattern whose two inputs may be swapped.
    pub(crate) swaps: u32,
    /// What must stand before the root: for each node there, its operators.
    before: Vec<Vec<&'static OpSpec>>,
    /// Whether one of the root's inputs must be a constant.
    needs_constant: bool,
}

/// The most nodes with two exchangeable inputs in one pattern: each doubles the tries.
const MOST_SWAPS: u32 = 8;

impl Compiled {
    pub(crate) fn new(rule: &'static Rule, level: Level) -> Result<Compiled> {
        let parse = || {
            let pattern = Term::parse(rule.pattern)?;
            let swaps = pattern.root().map_or(0, |node| {
                node.nodes().iter().filter(|node| super::matching::may_swap(node)).count() as u32
            });
            ensure!(pattern.root().is_some(), Fail, "a pattern needs an operator at its root");
            ensure!(swaps <= MOST_SWAPS, Fail, "a pattern has {swaps} nodes to swap, at most {MOST_SWAPS}");
            let template = match rule.then {
                Then::Template(text) => Some(Term::parse(text)?),
                Then::Build(_) => None,
            };
            let args = pattern.root().into_iter().flat_map(|root| &root.args).filter_map(Term::root);
            let before = args.map(|node| node.ops.clone()).collect();
            let constant = |arg: &Term| matches!(arg, Term::Number { .. } | Term::Constant(_));
            let needs_constant = pattern.root().is_some_and(|root| root.args.iter().any(constant));
            Ok(Compiled { rule, level, pattern, template, swaps, before, needs_constant })
        };
        parse().within(|| format!("rule '{}'", rule.name))
    }

    /// Whether a root with these operators before it can match, from what takes no search: most rules end here.
    pub(crate) fn may_match(&self, before: &[&'static OpSpec], has_constant: bool) -> bool {
        let stands = |op: &&'static OpSpec| before.iter().any(|spec| std::ptr::eq(*spec, *op));
        (has_constant || !self.needs_constant) && self.before.iter().all(|ops| ops.iter().any(stands))
    }
}

/// Writes a table of rules: documentation, name, pattern, an optional guard, and either a template or a function.
#[macro_export]
#[doc(hidden)]
macro_rules! rules {
    ($family:literal, $level:ident; $(
        $(#[doc = $doc:literal])+
        $name:ident: $pattern:tt $(if $when:expr)? => $then:expr, $samples:expr $(, keep $keep:literal)?;
    )*) => {
        pub(super) static RULES: $crate::rewrite::RuleSet = $crate::rewrite::RuleSet {
            family: $family,
            level: $crate::rewrite::Level::$level,
            rules: &[$($crate::rewrite::Rule {
                name: stringify!($name),
                doc: concat!($($doc),+),
                pattern: $pattern,
                when: $crate::rewrite::first_of(&[$($when,)?]),
                then: $then,
                keep: $crate::rewrite::first_flag(&[$($keep,)?]),
                samples: &$samples,
            }),*],
        };
    };
}
