//! "Did you mean" suggestions for misspelled names.

use crate::{Error, Result, error, shown};

/// Longer names are machine-generated, and comparing them is slow.
const LONGEST: usize = 64;
/// With more candidates than this, no suggestion is searched for.
const MOST: usize = 20_000;
/// The most names that advice lists.
const FEW: usize = 24;

/// Returns the candidate that `name` most likely misspells: at most a third of its characters
/// differ, ignoring case. A shared prefix or suffix is no evidence by itself: `p1.weight` is not a
/// misspelling of `dw.weight`.
///
/// ```
/// use ort_core::nearest;
/// assert_eq!(nearest("Rleu", ["Relu", "Elu", "Add"]), Some("Relu"));
/// assert_eq!(nearest("softmax", ["Relu", "Softmax"]), Some("Softmax"));
/// assert_eq!(nearest("Frobnicate", ["Relu", "Softmax"]), None);
/// ```
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST {
        return None;
    }
    let lower = name.to_lowercase();
    // Of two letters one may be missing: `Ad` for `Add`.
    let is_short = lower.len() == 2;
    let most = if is_short { 1 } else { lower.len() / 3 };
    let mut best: Option<(usize, &str)> = None;
    for (count, candidate) in known.into_iter().enumerate() {
        if count >= MOST {
            return None;
        }
        // The length difference is a lower bound of the edit distance, and much cheaper.
        let differs = candidate.len().abs_diff(name.len());
        if differs > most || candidate == name || (is_short && candidate.len() <= name.len()) {
            continue;
        }
        let folded = candidate.to_lowercase();
        let distance = strsim::osa_distance(&lower, &folded);
        // If the whole middle differs, the two share a prefix and suffix only. One edit is a typo
        // even so.
        if distance > 1 && distance >= differing(&lower, &folded) {
            continue;
        }
        // Break ties by name, so that the suggestion is deterministic.
        if distance <= most && best.is_none_or(|best| (distance, candidate) < best) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Counts the characters of the longer name between the common prefix and the common suffix.
fn differing(a: &str, b: &str) -> usize {
    let (long, short) = if a.chars().count() < b.chars().count() { (b, a) } else { (a, b) };
    let begin = long.chars().zip(short.chars()).take_while(|(a, b)| a == b).count();
    let ends = long.chars().rev().zip(short.chars().rev());
    let end = ends.take(short.chars().count() - begin).take_while(|(a, b)| a == b).count();
    long.chars().count() - begin - end
}

/// Returns advice for someone who asked for `name`: the nearest of `known`, and the whole list if
/// it is short. `what` names the candidates in the plural.
pub fn advise<'a>(what: &str, name: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    advise_listed(what, name, known, &format!("there are more than {FEW} {what}"))
}

/// [`advise`] with a place that lists the names, for those that are too many for a message.
pub fn advise_listed<'a>(
    what: &str,
    name: &str,
    known: impl IntoIterator<Item = &'a str> + Clone,
    listed: &str,
) -> String {
    let near = nearest(name, known.clone()).map(|near| format!("did you mean '{near}'?"));
    // The names may come from files too, and a list of long ones would take megabytes.
    let mut all: Vec<_> = known.into_iter().take(FEW + 1).map(|name| shown(name, LONGEST)).collect();
    all.sort_unstable();
    match (near, all.len()) {
        (None, 0) => format!("there are no {what}: leave it out"),
        (None, 1..=FEW) => format!("the {what} are {}", all.join(", ")),
        (None, _) => format!("check the spelling; {listed}"),
        (Some(near), 0..=FEW) => format!("{near} the {what} are {}", all.join(", ")),
        (Some(near), _) => near,
    }
}

/// Returns the error for a string attribute or setting whose value is not among its choices.
pub fn unknown_name(what: &str, value: &str, choices: &[&str]) -> Error {
    let near = nearest(value, choices.iter().copied());
    let problem =
        error!(InvalidGraph, "{what} '{}' is not known, expected {}", shown(value, LONGEST), or(choices));
    match near {
        Some(near) => problem.help(format!("did you mean '{near}'?")),
        None => problem.help("use one of them"),
    }
}

/// Refuses a string attribute or setting whose value is not among its choices.
pub fn one_of(what: &str, value: &str, choices: &[&str]) -> Result<()> {
    if choices.contains(&value) { Ok(()) } else { Err(unknown_name(what, value, choices)) }
}

/// Joins the choices as `'a', 'b' or 'c'`.
fn or(choices: &[&str]) -> String {
    match choices {
        [] => "nothing".into(),
        [one] => format!("'{one}'"),
        [first @ .., last] => format!("'{}' or '{last}'", first.join("', '")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_understood_and_other_words_are_not() {
        let known = ["axis", "axes", "keepdims", "kernel_shape", "auto_pad"];
        let cases = [
            ("axsi", Some("axis")),
            ("Axis", Some("axis")),
            ("keep_dims", Some("keepdims")),
            ("kernelshape", Some("kernel_shape")),
            ("autopad", Some("auto_pad")),
            ("alpha", None),
            ("to", None),
            ("", None),
        ];
        for (name, expected) in cases {
            assert_eq!(nearest(name, known), expected, "{name}");
        }
        assert_eq!(nearest("Ad", ["Add", "Abs", "Or"]), Some("Add"));
        assert_eq!(nearest("x1", ["x2", "y", "x1y2"]), None);
        assert_eq!(nearest(&"a".repeat(1 << 20), ["aaa"]), None);
    }

    #[test]
    fn advice_lists_what_there_is() {
        let attributes = |name, known: &[&'static str]| advise("attributes", name, known.iter().copied());
        assert_eq!(attributes("axsi", &["to", "axis"]), "did you mean 'axis'? the attributes are axis, to");
        assert_eq!(attributes("alpha", &["axis"]), "the attributes are axis");
        assert_eq!(attributes("alpha", &[]), "there are no attributes: leave it out");
        let many: Vec<String> = (0..99).map(|index| format!("attribute_{index}")).collect();
        let near = advise("attributes", "atribute_10", many.iter().map(String::as_str));
        assert_eq!(near, "did you mean 'attribute_10'?");
    }

    #[test]
    fn values_are_listed() {
        let problem = unknown_name("mode", "edges", &["constant", "edge"]).to_string();
        assert_eq!(
            problem,
            "invalid graph: mode 'edges' is not known, expected 'constant' or 'edge'; did you mean 'edge'?"
        );
        assert!(one_of("mode", "edge", &["constant", "edge"]).is_ok());
    }
}
