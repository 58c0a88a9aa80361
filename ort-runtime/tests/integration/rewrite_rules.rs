//! Every rewrite rule, on the samples of its table and on variants of them: the pattern with the
//! rule and without it gives the same.

use ort_runtime::dtype::DType;
use ort_runtime::rewrite::{Declared, Level, Optimizer, Rule, rule_sets, sample};
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{Error, ErrorKind, Model, Result, Session, Tensor, Value, Within};

use crate::rewrite_support::{Data, inputs, variants};

/// All rules, with the level of their table.
fn rules() -> impl Iterator<Item = (&'static Rule, Level)> {
    rule_sets().iter().flat_map(|set| set.rules.iter().map(|rule| (rule, set.level)))
}

#[test]
fn names_are_unique_and_every_rule_says_what_it_does() {
    let mut names: Vec<&str> = rules().map(|(rule, _)| rule.name).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count, "two rules have one name");
    for (rule, _) in rules() {
        assert!(rule.doc.trim().ends_with('.'), "rule {} has no sentence", rule.name);
        assert!(!rule.samples.is_empty(), "rule {} has no sample", rule.name);
    }
}

/// docs/RULES.md is written from the tables; `GOLDEN_UPDATE=1` writes it again.
#[test]
fn the_page_of_rules_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/RULES.md");
    let page = page();
    if std::env::var_os("GOLDEN_UPDATE").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let stale =
        "docs/RULES.md is stale: GOLDEN_UPDATE=1 cargo test -p ort-runtime --test integration page_of_rules";
    assert!(std::fs::read_to_string(path).unwrap_or_default() == page, "{stale}");
}

/// The opening of docs/RULES.md.
const HEAD: &str = "\
# Rewrite rules

The rules that rewrite a graph before it runs, from the tables in `ort-core/src/rules`. In a pattern
a name is a value, `#name` a constant, a number that number, `~` approximately that number, and `_`
anything. A rule applies only if the facts that it must know are known: types, or the ranks of its
values. `ort optimize MODEL OUT` lists the rules that apply to a model, and `--without-rule NAME`
disables one.

Other rewrites are constant folding, common-subexpression elimination, dead-code elimination, and
the fusion of elementwise chains (`elementwise_chain`). On devices that prefer it, images become
NHWC (`channels_last`), and weights are transposed if their columns are whole vectors and their rows
are not (`weight_vectors`). From level `all`, attention between transposes with a KV cache becomes
one operator (`attention_cache`). A value that a `Loop` or `Scan` passes
through unchanged is captured instead of carried (`loop_invariant`).
";

fn page() -> String {
    let mut page = String::from(HEAD);
    for set in rule_sets() {
        page += &format!(
            "\n## {}, from level `{}`\n\n| rule | pattern | must know | what it does |\n| --- | --- | --- | --- |\n",
            set.family,
            set.level.name()
        );
        for rule in set.rules {
            let pattern = rule.pattern.replace('|', "\\|");
            let known = rule.known.text();
            page += &format!("| `{}` | `{pattern}` | {known} | {} |\n", rule.name, rule.doc.trim());
        }
    }
    page
}

/// A rule with a sample, or a variant of one, and what its inputs hold.
struct Trial {
    rule: &'static Rule,
    family: &'static str,
    level: Level,
    text: &'static str,
    data: Data,
}

/// All samples, each with its rule.
fn samples() -> impl Iterator<Item = Trial> {
    rule_sets().iter().flat_map(|set| {
        set.rules.iter().flat_map(|rule| {
            let trial = |text| Trial { rule, family: set.family, level: set.level, text, data: Data::Plain };
            rule.samples.iter().copied().map(trial)
        })
    })
}

#[test]
fn a_rule_changes_no_result() {
    check(samples(), |trial| {
        let model = Model::from_graph(sample(trial.rule, trial.text, Declared::Sizes)?);
        let with = trial.session(&model)?;
        if !with.rewrites().hits().iter().any(|(name, _)| *name == trial.rule.name) {
            return Err(Error::new(ErrorKind::Fail, "the rule does not find its own pattern"));
        }
        trial.compare(&with, &trial.run_plainly(&model, &model)?, &model)?;
        Ok(true)
    });
}

/// Unknown sizes, axes of one element, other ranks, other types, constants of one element that have
/// axes, inputs left out: if the graph runs as it is, it runs with the rule alone and with all
/// rules, and gives the same.
#[test]
fn a_rule_changes_no_result_of_a_variant() {
    let variants = samples().flat_map(|trial| {
        let texts = variants(trial.rule.pattern, trial.text);
        texts.into_iter().map(move |text| Trial { text, ..trial })
    });
    check(variants, |trial| trial.in_all_forms());
}

/// Numbers that are none, infinite, negative zeros, or at the ends of their type, in rules of
/// single elements; and masks that hide all keys.
#[test]
fn a_rule_changes_no_result_of_special_numbers() {
    let trials = samples().filter_map(|trial| {
        let data = match trial.family {
            "activation" | "algebra" | "codes" => Data::Special,
            "attention" => Data::Masked,
            _ => return None,
        };
        Some(Trial { data, ..trial })
    });
    check(trials, |trial| trial.in_all_forms());
}

/// Checks all trials; `of` says whether one is a graph that runs. Not all are, but half must be.
fn check(trials: impl Iterator<Item = Trial>, of: impl Fn(&Trial) -> Result<bool>) {
    let (mut count, mut ran, mut problems) = (0, 0, Vec::new());
    for trial in trials {
        count += 1;
        match of(&trial) {
            Ok(has_run) => ran += usize::from(has_run),
            Err(problem) => problems.push(format!("{}: {}: {problem}", trial.rule.name, trial.text)),
        }
    }
    println!("{ran} of {count} ran");
    assert!(problems.is_empty(), "{} of {count}:\n{}", problems.len(), problems.join("\n"));
    assert!(ran * 2 > count, "{ran} of {count} ran, which tests little");
}

impl Trial {
    /// A session with this rule alone.
    fn session(&self, model: &Model) -> Result<Session> {
        let others = rules().map(|(other, _)| other.name).filter(|name| *name != self.rule.name);
        let only =
            Optimizer { level: self.level, disabled: others.map(String::from).collect(), stop_after: None };
        Session::builder(model).threads(1).optimizer(only).build()
    }

    /// The variant with sizes, symbols and types alone, each with the rule and with all rules, if
    /// it is one that runs; whether it is.
    fn in_all_forms(&self) -> Result<bool> {
        let Ok(concrete) = sample(self.rule, self.text, Declared::Sizes) else { return Ok(false) };
        let concrete = Model::from_graph(concrete);
        let Ok(expected) = self.run_plainly(&concrete, &concrete) else { return Ok(false) };
        for declared in [Declared::Sizes, Declared::EqualSymbols, Declared::Symbols, Declared::Types] {
            let Ok(graph) = sample(self.rule, self.text, declared) else { continue };
            let model = Model::from_graph(graph);
            let all = Session::builder(&model).threads(1).opt_level(Level::All).build();
            let both = [("the rule alone", self.session(&model)), ("all rules", all)];
            for (kind, session) in both {
                let outcome = session.and_then(|session| self.compare(&session, &expected, &concrete));
                // An error counts only if the graph runs without rules.
                if outcome.is_err() && self.run_plainly(&model, &concrete).is_ok() {
                    outcome.within(|| format!("{declared:?}, {kind}"))?;
                }
            }
        }
        Ok(true)
    }

    fn run_plainly(&self, model: &Model, concrete: &Model) -> Result<Vec<(String, Value)>> {
        let without = Session::builder(model).threads(1).opt_level(Level::Disabled).build()?;
        run(&without, &inputs(concrete, self.data)?)
    }

    /// Compares what a session gives with what the graph gives without rules, on inputs of the
    /// sizes that `concrete` has.
    fn compare(&self, session: &Session, expected: &[(String, Value)], concrete: &Model) -> Result<()> {
        let actual = run(session, &inputs(concrete, self.data)?)?;
        for ((name, expected), (_, actual)) in expected.iter().zip(&actual) {
            let are_codes = matches!(expected.tensor()?.dtype(), DType::U8 | DType::I8);
            let [expected, actual] = [self.codes_as_numbers(expected)?, self.codes_as_numbers(actual)?];
            compare(&actual, &expected, self.tolerance(&expected, are_codes)?).within(|| name.clone())?;
            if self.is_exact() {
                let bits = |value: &Value| value.tensor().map(|tensor| tensor.bytes().cloned());
                let same = bits(&expected)? == bits(&actual)?;
                let different = || Error::new(ErrorKind::Fail, "the bits differ");
                same.then_some(()).ok_or_else(different).within(|| name.clone())?;
            }
        }
        Ok(())
    }

    /// Whether a rule only leaves nodes out, so that not even the sign of a zero may change.
    fn is_exact(&self) -> bool {
        self.family == "algebra" && self.rule.name != "square"
    }

    /// Codes as numbers, of rules whose sums and products may round to the next code.
    fn codes_as_numbers(&self, value: &Value) -> Result<Value> {
        let tensor = value.tensor()?;
        match tensor.dtype() {
            DType::U8 | DType::I8 if self.family == "qdq" => {
                let codes = tensor.to_doubles()?.into_iter().map(|code| code as f32).collect();
                Ok(Tensor::from_vec(tensor.shape(), codes)?.into())
            }
            _ => Ok(value.clone()),
        }
    }

    fn tolerance(&self, expected: &Value, are_codes: bool) -> Result<Tolerance> {
        let (relative, absolute) = match expected.tensor()?.dtype() {
            DType::F16 => (1e-2, 1e-2),
            DType::F64 => (1e-12, 1e-12),
            _ if self.family == "qdq" && are_codes => (0.0, 1.0),
            _ => (2e-5, 2e-5),
        };
        Ok(Tolerance { relative, absolute })
    }
}

fn run(session: &Session, inputs: &[(String, Value)]) -> Result<Vec<(String, Value)>> {
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    session.run(&given)
}
