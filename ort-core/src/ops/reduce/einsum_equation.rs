//! Equations of Einstein summation, for inference, gradients and the kernels.

use std::collections::BTreeMap;

use crate::{Result, ensure, error};

/// The subscript of one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Label {
    /// A dimension that the ellipsis covers, counted from the last one, because ellipses align like
    /// broadcasting.
    Ellipsis(usize),
    /// A letter.
    Letter(char),
}

/// A parsed equation: a subscript for each dimension of each input and of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Equation {
    /// The subscripts of each input, outermost dimension first.
    pub inputs: Vec<Vec<Label>>,
    /// The subscripts of the output, outermost dimension first.
    pub output: Vec<Label>,
}

impl Equation {
    /// Parses an equation for inputs of these ranks.
    ///
    /// Without `->` the output has the ellipsis' dimensions, then the letters that occur once, in
    /// alphabetical order.
    ///
    /// # Errors
    /// `InvalidGraph` if the terms do not fit the inputs, or if the output names a subscript that
    /// no input has.
    ///
    /// ```
    /// use ort_core::ops::{Equation, Label};
    /// let equation = Equation::parse("bij, bjk", &[3, 3])?;
    /// assert_eq!(equation.output, ['i', 'k'].map(Label::Letter));
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn parse(text: &str, ranks: &[usize]) -> Result<Equation> {
        // The `onnx` package's own inference drops spaces as well.
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match text.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (text.as_str(), None),
        };
        let terms: Vec<&str> = left.split(',').collect();
        ensure!(
            terms.len() == ranks.len(),
            InvalidGraph,
            help = "one term for each input, with commas between them",
            "equation '{text}' has {} terms for {} inputs",
            terms.len(),
            ranks.len()
        );
        let mut inputs = Vec::with_capacity(terms.len());
        let mut widest = 0;
        for (term, &rank) in terms.iter().zip(ranks) {
            let (labels, covered) = read_term(term, Some(rank))?;
            widest = widest.max(covered);
            inputs.push(labels);
        }
        let output = match right {
            Some(right) => read_output(right, widest)?,
            None => implicit_output(&inputs, widest),
        };
        for (index, label) in output.iter().enumerate() {
            let known = inputs.iter().any(|labels| labels.contains(label));
            ensure!(
                known,
                InvalidGraph,
                help = "the output may only name subscripts of the inputs",
                "equation '{text}' names an output subscript that no input has"
            );
            ensure!(
                !output.iter().take(index).any(|earlier| earlier == label),
                InvalidGraph,
                help = "name each subscript once behind the arrow",
                "equation '{text}' repeats an output subscript"
            );
        }
        Ok(Equation { inputs, output })
    }

    /// Returns the subscripts that are summed over, sorted.
    pub fn summed(&self) -> Vec<Label> {
        let mut labels: Vec<Label> = self.inputs.iter().flatten().copied().collect();
        labels.sort();
        labels.dedup();
        labels.retain(|label| !self.output.contains(label));
        labels
    }
}

/// Reads a term: its labels, and how many dimensions its ellipsis covers. Without a rank the
/// ellipsis covers none.
fn read_term(term: &str, rank: Option<usize>) -> Result<(Vec<Label>, usize)> {
    let (before, after) = match term.split_once("...") {
        Some((before, after)) => (before, Some(after)),
        None => (term, None),
    };
    let letters = |text: &str| -> Result<Vec<Label>> {
        let letter = |c: char| {
            let valid = c.is_ascii_alphabetic();
            valid.then_some(Label::Letter(c)).ok_or_else(|| {
                error!(InvalidGraph, "subscript '{c}' in '{term}'")
                    .help("subscripts are letters, and ... stands for any number of axes: 'ij,jk->ik'")
            })
        };
        text.chars().map(letter).collect()
    };
    let mut labels = letters(before)?;
    // A second ellipsis in the term is in `after`, and its points are refused as letters.
    let after_labels = letters(after.unwrap_or(""))?;
    let named = labels.len() + after_labels.len();
    let covered = match (rank, after) {
        (Some(rank), Some(_)) => rank.checked_sub(named),
        (Some(rank), None) => (rank == named).then_some(0),
        (None, _) => Some(0),
    };
    let covered = covered.ok_or_else(|| {
        error!(InvalidGraph, "term '{term}' does not fit an input of rank {}", rank.unwrap_or(0))
    })?;
    // Counted from the last dimension, so the first gets the largest number.
    labels.extend((0..covered).rev().map(Label::Ellipsis));
    labels.extend(after_labels);
    Ok((labels, covered))
}

fn read_output(term: &str, widest: usize) -> Result<Vec<Label>> {
    // The output has no rank yet: count its letters first, then give the ellipsis the widest span
    // of any input.
    let (named, _) = read_term(term, None)?;
    if !term.contains("...") {
        return Ok(named);
    }
    read_term(term, Some(named.len() + widest)).map(|(labels, _)| labels)
}

fn implicit_output(inputs: &[Vec<Label>], widest: usize) -> Vec<Label> {
    // A sorted map: in ASCII order capitals come first, as in numpy.
    let mut counts: BTreeMap<char, usize> = BTreeMap::new();
    for label in inputs.iter().flatten() {
        if let Label::Letter(letter) = label {
            *counts.entry(*letter).or_default() += 1;
        }
    }
    let once = counts.into_iter().filter(|(_, count)| *count == 1).map(|(letter, _)| Label::Letter(letter));
    // The ellipsis comes first, its outermost dimension in front.
    (0..widest).rev().map(Label::Ellipsis).chain(once).collect()
}
