//! What a rule is, and the table form rules are written in.

use rustc_hash::FxHashMap;

use super::matching::Match;
use super::patch::Patch;
use super::term::{NodeTerm, Term};
use crate::ir::{Graph, ValueId};
use crate::spec::OpSpec;
use crate::{Result, Within, ensure, error};

/// How much of a graph may change. Each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Level {
    /// The graph runs as it was loaded.
    Disabled,
    /// What is exact and needs no special kernel: constants folded, what is common computed once,
    /// what nobody needs left out, algebra.
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

/// What must be known of a match before a rule may apply to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Known {
    /// The rank of every value that the pattern names, and of what it computes.
    #[default]
    Ranks,
    /// The element types. What the pattern computes has the shape of the value it starts from. If
    /// the rank of that value is unknown, constants of the pattern must have no dimensions, because
    /// others may add axes by broadcasting.
    Types,
    /// Nothing: the rule holds for any shapes, because it broadcasts nothing and names no axes.
    Nothing,
}

impl Known {
    /// What documentation says of it.
    pub fn text(self) -> &'static str {
        match self {
            Known::Ranks => "ranks",
            Known::Types => "types",
            Known::Nothing => "nothing",
        }
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
    /// What must be known of the match.
    pub known: Known,
    /// What must hold besides.
    pub when: Option<fn(&Found<'_>) -> bool>,
    /// What stands there afterwards.
    pub then: Then,
    /// Whether values inside the pattern may be read by others. Those stay.
    pub keep: bool,
    /// Inputs that it applies to: an example of the pattern, for the test of the rule. Values are
    /// `name=type[sizes]`, constants too; attributes of named nodes are `node.attribute=value`.
    pub samples: &'static [&'static str],
}

/// The right side of a rule.
#[derive(Clone, Copy, Debug)]
pub enum Then {
    /// A template.
    Template(&'static str),
    /// Adds nodes, and returns the values that stand for the outputs of the pattern's root; none
    /// where it does not apply after all.
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
    /// The level that the graph is rewritten at.
    pub level: Level,
}

impl Found<'_> {
    /// Whether ONNX Runtime has to run the result: it loads what is written up to level `extended`,
    /// and its kernels take less than the standard allows.
    pub fn must_be_portable(&self) -> bool {
        self.level < Level::All
    }
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
            template.iter().try_for_each(|template| check_template(&pattern, template))?;
            let args = pattern.root().into_iter().flat_map(|root| &root.args).filter_map(Term::root);
            let before = args.map(|node| node.ops.clone()).collect();
            let constant = |arg: &Term| matches!(arg, Term::Number { .. } | Term::Constant(_));
            let needs_constant = pattern.root().is_some_and(|root| root.args.iter().any(constant));
            Ok(Compiled { rule, level, pattern, template, swaps, before, needs_constant })
        };
        parse().within(|| format!("rule '{}'", rule.name))
    }

    /// Whether a root with these operators before it can match, from what takes no search: most
    /// rules end here.
    pub(crate) fn may_match(&self, before: &[&'static OpSpec], has_constant: bool) -> bool {
        let stands = |op: &&'static OpSpec| before.iter().any(|spec| std::ptr::eq(*spec, *op));
        (has_constant || !self.needs_constant) && self.before.iter().all(|ops| ops.iter().any(stands))
    }
}

/// Refuses a template that the pattern cannot fill in: a value that no match binds, or that some
/// leave out while the template does not, a number, attributes of an unknown node.
fn check_template(pattern: &Term, template: &Term) -> Result<()> {
    let mut bound = FxHashMap::default();
    // What the root computes is what the template takes the place of.
    let args = pattern.root().into_iter().flat_map(|root| &root.args);
    args.for_each(|arg| note_values(arg, &mut bound));
    let nodes: Vec<&str> =
        pattern.root().into_iter().flat_map(NodeTerm::nodes).filter_map(|node| node.name).collect();
    check_term(template, &bound, &nodes)
}

fn check_term(template: &Term, bound: &FxHashMap<&str, bool>, nodes: &[&str]) -> Result<()> {
    let check = |name: &str, may_be_missing: bool| match bound.get(name) {
        None => Err(error!(Fail, "the template names '{name}', which the pattern does not bind")),
        Some(true) if !may_be_missing => Err(error!(
            Fail,
            "the template needs '{name}', which the pattern leaves optional; write '{name}?'"
        )),
        Some(_) => Ok(()),
    };
    match template {
        Term::Any | Term::Ints(_) => Ok(()),
        Term::Number { .. } => Err(error!(Fail, "a template cannot tell the type of a number")),
        Term::Value { name, optional } => check(name, *optional),
        Term::Constant(name) => check(name, false),
        Term::Node(node) => {
            let unknown = node.copies.iter().find(|name| !nodes.contains(name));
            if let Some(name) = unknown {
                return Err(error!(
                    Fail,
                    "the template copies attributes of '{name}', which is no node of the pattern"
                ));
            }
            node.args.iter().try_for_each(|arg| check_term(arg, bound, nodes))
        }
    }
}

/// Notes the values that a match of a pattern binds, and whether some matches leave them out.
fn note_values(pattern: &Term, bound: &mut FxHashMap<&'static str, bool>) {
    match pattern {
        Term::Any | Term::Ints(_) | Term::Number { .. } => {}
        Term::Constant(name) => {
            bound.insert(*name, false);
        }
        // A name that stands in another place without a question mark is always there.
        Term::Value { name, optional } => {
            let entry = bound.entry(*name).or_insert(*optional);
            *entry = *entry && *optional;
        }
        Term::Node(node) => {
            bound.extend(node.name.map(|name| (name, false)));
            node.args.iter().for_each(|arg| note_values(arg, bound));
        }
    }
}

/// Writes a table of rules: documentation, name, pattern, an optional guard, either a template or a
/// function, and samples; then `keep true` if others may read inner values, and `known Types` or
/// `known Nothing` if ranks need not be known.
#[macro_export]
#[doc(hidden)]
macro_rules! rules {
    ($family:literal, $level:ident; $(
        $(#[doc = $doc:literal])+
        $name:ident: $pattern:tt $(if $when:expr)? => $then:expr, $samples:expr $(, keep $keep:literal)? $(, known $known:ident)?;
    )*) => {
        pub(super) static RULES: $crate::rewrite::RuleSet = $crate::rewrite::RuleSet {
            family: $family,
            level: $crate::rewrite::Level::$level,
            rules: &[$($crate::rewrite::Rule {
                name: stringify!($name),
                doc: concat!($($doc),+),
                pattern: $pattern,
                known: $crate::rewrite::first_known(&[$($crate::rewrite::Known::$known,)?]),
                when: $crate::rewrite::first_of(&[$($when,)?]),
                then: $then,
                keep: $crate::rewrite::first_flag(&[$($keep,)?]),
                samples: &$samples,
            }),*],
        };
    };
}

#[cfg(test)]
mod tests {
    use super::super::rule_sets;
    use super::*;

    #[test]
    fn every_rule_parses_and_its_template_names_what_the_pattern_binds() {
        let rules = rule_sets().iter().flat_map(|set| set.rules.iter().map(|rule| (rule, set.level)));
        let problems: Vec<String> =
            rules.filter_map(|(rule, level)| Some(Compiled::new(rule, level).err()?.to_string())).collect();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    #[test]
    fn a_template_that_the_pattern_cannot_fill_in_is_refused() -> Result<()> {
        let pattern = Term::parse("r@Relu(m@Gemm(a, #b, bias?; alpha=1))")?;
        for good in ["Gemm(a, b, bias?; ..m)", "Relu(a)", "Gemm(a, #b; ..r)", "Add(m, a)"] {
            check_template(&pattern, &Term::parse(good)?)?;
        }
        for wrong in [
            "Gemm(a, b, bias)",
            "Relu(x)",
            "Relu(#c)",
            "Gemm(a, b; ..n)",
            "Mul(a, 2)",
            "Relu(Relu(x))",
            "Neg(r)",
        ] {
            assert!(check_template(&pattern, &Term::parse(wrong)?).is_err(), "{wrong}");
        }
        let pattern = Term::parse("Mul(x?, Add(x, y?))")?;
        check_template(&pattern, &Term::parse("Add(x, y?)")?)
    }
}
