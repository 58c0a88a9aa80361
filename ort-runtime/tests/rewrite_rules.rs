//! Every rewrite rule, on the samples of its table: the pattern with the rule and without it gives the same.
#![cfg(feature = "cpu")]

use ort_runtime::dtype::DType;
use ort_runtime::rewrite::{Level, Optimizer, Rule, rule_sets, sample};
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{Error, ErrorKind, Model, Result, Session, Tensor, Value, Within};

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

/// docs/RULES.md is written from the tables; `GOLDEN_UPDATE=1` writes it anew.
#[test]
fn the_page_of_rules_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/RULES.md");
    let page = page();
    if std::env::var_os("GOLDEN_UPDATE").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let stale = "docs/RULES.md is stale: GOLDEN_UPDATE=1 cargo test -p ort-runtime --test rewrite_rules";
    assert!(std::fs::read_to_string(path).unwrap_or_default() == page, "{stale}");
}

fn page() -> String {
    let mut page = String::from(
        "# Rewrite rules\n\nWhat may replace what before a graph runs, from the tables under `ort-core/src/rules`. A name in a pattern is a value, \
         `#name` a constant, a number\nthat number, `~` nearly so, `_` anything. `ort optimize MODEL OUT` tells which rules a model hits, `--without-rule NAME` leaves one\nout. \
         Besides these, constants are folded, what is common is computed once, what nobody reads is left out, and chains of elementwise\noperators \
         become one (`elementwise_chain`), and for devices that prefer it images get their channels last (`channels_last`).\n",
    );
    for set in rule_sets() {
        page += &format!(
            "\n## {}, from level `{}`\n\n| rule | looks for | what it is |\n| --- | --- | --- |\n",
            set.family,
            set.level.name()
        );
        for rule in set.rules {
            let pattern = rule.pattern.replace('|', "\\|");
            page += &format!("| `{}` | `{pattern}` | {} |\n", rule.name, rule.doc.trim());
        }
    }
    page
}

#[test]
fn a_rule_changes_no_result() -> Result<()> {
    let mut problems = Vec::new();
    for (rule, level) in rules() {
        for &text in rule.samples {
            if let Err(problem) = try_sample(rule, level, text) {
                problems.push(format!("{}: {text}: {problem}", rule.name));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// Runs a sample with this rule alone, and without any.
fn try_sample(rule: &'static Rule, level: Level, text: &'static str) -> Result<()> {
    let model = Model::from_graph(sample(rule, text)?);
    let others = rules().map(|(other, _)| other.name).filter(|name| *name != rule.name);
    let only = Optimizer { level, disabled: others.map(String::from).collect(), stop_after: None };
    let with = Session::builder(&model).threads(1).optimizer(only).build()?;
    let without = Session::builder(&model).threads(1).opt_level(Level::Disabled).build()?;
    let hits = with.rewrites().hits().iter().find(|(name, _)| *name == rule.name);
    if hits.is_none() {
        return Err(Error::new(ErrorKind::Fail, "the rule does not find its own pattern"));
    }
    let inputs = model.inputs().into_iter().enumerate();
    let inputs = inputs.map(|(index, input)| Ok((input.name.clone(), made_up(&input.ty, index)?)));
    let inputs: Vec<(String, Value)> = inputs.collect::<Result<_>>()?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let (expected, actual) = (without.run(&given)?, with.run(&given)?);
    for ((name, expected), (_, actual)) in expected.iter().zip(&actual) {
        let part = if expected.tensor()?.dtype() == DType::F16 { 4e-3 } else { 2e-5 };
        let tolerance = Tolerance { relative: part, absolute: part };
        compare(actual, expected, tolerance).within(|| name.clone())?;
    }
    Ok(())
}

/// Numbers on both sides of zero, no two alike.
fn made_up(ty: &ort_runtime::ir::ValueType, seed: usize) -> Result<Value> {
    let shape = ty.shape().into_iter().flatten().map(|dim| dim.as_constant().unwrap_or(3) as usize);
    let shape: Vec<usize> = shape.collect();
    let count = shape.iter().product();
    let number = |index: usize| (((index * 37 + seed * 11) % 101) as f32 - 50.0) / 25.0;
    let floats = || (0..count).map(number);
    Ok(Value::from(match ty.dtype() {
        Some(DType::F16) => Tensor::from_vec(&shape, floats().map(half::f16::from_f32).collect())?,
        Some(DType::F64) => Tensor::from_vec(&shape, floats().map(f64::from).collect())?,
        Some(DType::I64) => Tensor::from_vec(&shape, (0..count as i64).map(|v| v % 5).collect())?,
        Some(DType::I32) => Tensor::from_vec(&shape, (0..count as i32).map(|v| v % 5).collect())?,
        Some(DType::U8) => Tensor::from_vec(&shape, (0..count).map(|v| (v * 37 % 251) as u8).collect())?,
        Some(DType::I8) => {
            Tensor::from_vec(&shape, (0..count).map(|v| (v * 37 % 251) as u8 as i8).collect())?
        }
        Some(DType::Bool) => Tensor::from_bools(&shape, &(0..count).map(|v| v % 3 != 0).collect::<Vec<_>>())?,
        _ => Tensor::from_vec(&shape, floats().collect())?,
    }))
}
