//! Rewrite rules, and the `rules!` macro that tables of them are written in.
//!
//! A [`Rule`] is a row as written; `Compiled` is the same rule parsed and checked.

use rustc_hash::FxHashMap;

use super::level::Level;
use super::matching::Found;
use super::patch::Patch;
use super::term::{NodeTerm, Term};
use crate::ir::ValueId;
use crate::spec::OpSpec;
use crate::{Result, Within, ensure, error};

/// What inference must know about a match before a rule may apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Known {
    /// The ranks of all values that the pattern names, and of the root's outputs.
    #[default]
    Ranks,
    /// The element types of the root's outputs, which have the shape of the pattern's input.
    /// Constants with dimensions could add axes to it by broadcasting. If the pattern matches one,
    /// the ranks of all named values must be known too.
    Types,
    /// Nothing: the rule holds for any shape, because it neither broadcasts nor names axes.
    Nothing,
}

impl Known {
    /// Returns the word for it in docs/RULES.md.
    pub fn text(self) -> &'static str {
        match self {
            Known::Ranks => "ranks",
            Known::Types => "types",
            Known::Nothing => "nothing",
        }
    }
}

/// A rewrite rule: a row of a table.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The name, unique among all rules.
    pub name: &'static str,
    /// What the rule does, in one sentence. docs/RULES.md is generated from it.
    pub doc: &'static str,
    /// The pattern. Module `term` has the syntax.
    pub pattern: &'static str,
    /// What must be known about the match.
    pub known: Known,
    /// The guard: a further condition on the match.
    pub when: Option<fn(&Found<'_>) -> bool>,
    /// The replacement.
    pub then: Then,
    /// Whether nodes outside the match may read its inner values. Inner nodes that are still read
    /// then stay.
    pub keep: bool,
    /// Examples of the pattern, for the test of the rule. Values and constants are written
    /// `name=type[sizes]`, attributes of named nodes `node.attribute=value`. Module `sample` has
    /// the full syntax.
    pub samples: &'static [&'static str],
}

/// The replacement (right-hand side) of a rule.
#[derive(Clone, Copy, Debug)]
pub enum Then {
    /// A template, in the syntax of patterns.
    Template(&'static str),
    /// A function that adds nodes and returns one value per output of the pattern's root. `None` if
    /// the rule does not apply after all.
    Build(fn(&mut Patch<'_>) -> Result<Option<Vec<ValueId>>>),
}

/// A table of rules of one level.
#[derive(Clone, Copy, Debug)]
pub struct RuleSet {
    /// The family, named after its file.
    pub family: &'static str,
    /// The lowest level at which the rules apply.
    pub level: Level,
    /// The rules in order of priority: the first that matches applies.
    pub rules: &'static [Rule],
}

/// A rule with its pattern and template parsed.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) rule: &'static Rule,
    pub(crate) level: Level,
    pub(crate) pattern: Term,
    pub(crate) template: Option<Term>,
    /// Number of pattern nodes whose two inputs may be swapped.
    pub(crate) swaps: u32,
    /// For each input of the root that the pattern makes a node, its possible operators.
    before: Vec<Vec<&'static OpSpec>>,
    /// Whether the pattern requires a constant among the root's inputs.
    needs_constant: bool,
}

/// Maximum number of swappable nodes in one pattern: each doubles the orientations to try.
const MOST_SWAPS: u32 = 8;

impl Compiled {
    pub(crate) fn new(rule: &'static Rule, level: Level) -> Result<Compiled> {
        // A closure, so that every error gets the name of the rule.
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
            // Lists of integers do not count: they also match values that only inference knows.
            let constant = |arg: &Term| matches!(arg, Term::Number { .. } | Term::Constant(_));
            let needs_constant = pattern.root().is_some_and(|root| root.args.iter().any(constant));
            Ok(Compiled { rule, level, pattern, template, swaps, before, needs_constant })
        };
        parse().within(|| format!("rule '{}'", rule.name))
    }

    /// Whether a root with these producers can match: a cheap filter that rejects most rules before
    /// the search.
    pub(crate) fn may_match(&self, before: &[&'static OpSpec], has_constant: bool) -> bool {
        let stands = |op: &&'static OpSpec| before.iter().any(|spec| std::ptr::eq(*spec, *op));
        (has_constant || !self.needs_constant) && self.before.iter().all(|ops| ops.iter().any(stands))
    }
}

/// Checks that a match can fill in the template. Every value must be bound by the pattern, and
/// bound in every match unless the template makes it optional. Copied attributes must be of a named
/// node. Numbers are rejected, because a template does not know their type.
fn check_template(pattern: &Term, template: &Term) -> Result<()> {
    let mut bound = FxHashMap::default();
    // Only the root's arguments bind values: its own value is what the template replaces.
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

/// Collects the values that a match binds, each with whether some matches leave it out.
fn note_values(pattern: &Term, bound: &mut FxHashMap<&'static str, bool>) {
    match pattern {
        Term::Any | Term::Ints(_) | Term::Number { .. } => {}
        Term::Constant(name) => {
            bound.insert(*name, false);
        }
        // A name that also occurs without `?` is always bound.
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

/// Returns the guard of a rule, if it has one. For the `rules!` macro.
#[doc(hidden)]
pub const fn first_of(guards: &[fn(&Found<'_>) -> bool]) -> Option<fn(&Found<'_>) -> bool> {
    match guards {
        [first, ..] => Some(*first),
        [] => None,
    }
}

/// Returns what a rule requires to be known; ranks by default. For the `rules!` macro.
#[doc(hidden)]
pub const fn first_known(known: &[Known]) -> Known {
    match known {
        [first, ..] => *first,
        [] => Known::Ranks,
    }
}

/// Returns an optional flag; false by default. For the `rules!` macro.
#[doc(hidden)]
pub const fn first_flag(flags: &[bool]) -> bool {
    matches!(flags, [true, ..])
}

/// Defines a table of rules. A row has documentation, name, pattern, an optional guard, a template
/// or function, and samples. Then `keep true` follows if outside nodes may read inner values, and
/// `known Types` or `known Nothing` if ranks need not be known.
#[macro_export]
#[doc(hidden)]
macro_rules! rules {
    ($family:literal, $level:ident; $(
        $(#[doc = $doc:literal])+
        $name:ident: $pattern:literal $(if $when:expr)? => $then:expr, $samples:expr $(, keep $keep:literal)? $(, known $known:ident)?;
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
