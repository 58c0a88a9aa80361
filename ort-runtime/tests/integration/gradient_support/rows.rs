//! Operators as rows of a table, each checked against finite differences, with fixed sizes and
//! with sizes that only the run knows.

use ort_runtime::Result;

use super::{Build, DOUBLE, Precision, SINGLE, check_in};

/// The sizes of the first input that a gradient takes as symbols.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Symbolic {
    None,
    Batch,
    AllButChannels,
}

/// One operator on some inputs.
pub(crate) struct Row {
    name: &'static str,
    build: Build,
    shapes: &'static [&'static [usize]],
    /// The sizes of the first input that may be symbolic.
    symbolic: Symbolic,
    /// Whether its inputs are positive.
    positive: bool,
    precision: Precision,
}

pub(crate) const fn row(name: &'static str, build: Build, shapes: &'static [&'static [usize]]) -> Row {
    Row { name, build, shapes, symbolic: Symbolic::AllButChannels, positive: false, precision: DOUBLE }
}

impl Row {
    pub(crate) const fn fixed(mut self) -> Row {
        self.symbolic = Symbolic::None;
        self
    }

    /// With spatial sizes that are numbers, as the gradient needs them.
    pub(crate) const fn symbolic_batch(mut self) -> Row {
        self.symbolic = Symbolic::Batch;
        self
    }

    pub(crate) const fn positive(mut self) -> Row {
        self.positive = true;
        self
    }

    /// In `float`, for an operator that knows no `double`.
    pub(crate) const fn single(mut self) -> Row {
        self.precision = SINGLE;
        self
    }

    /// Numbers of both signs, no two alike and none near zero or another.
    fn elements(&self, index: usize) -> Vec<f64> {
        let count = self.shapes[index].iter().product::<usize>();
        let number = |at: usize| {
            let place = (at * 37 + index * 17 + 5) % 101;
            let size = 0.2 + place as f64 / 40.0 + index as f64 * 0.003;
            if place.is_multiple_of(2) || self.positive { size } else { -size }
        };
        (0..count).map(number).collect()
    }

    /// Checks with these sizes of the first input named instead of given.
    fn check(&self, named: bool) -> Result<()> {
        let sizes = self.shapes.iter().enumerate().map(|(index, shape)| {
            let is_symbol = |axis: usize| match self.symbolic {
                Symbolic::None => false,
                Symbolic::Batch => axis == 0,
                Symbolic::AllButChannels => axis != 1,
            };
            let size = |(axis, size): (usize, &usize)| match named && index == 0 && is_symbol(axis) {
                true => format!("d{axis}"),
                false => size.to_string(),
            };
            shape.iter().enumerate().map(size).collect::<Vec<String>>()
        });
        let sizes: Vec<Vec<String>> = sizes.collect();
        let dims: Vec<Vec<&str>> =
            sizes.iter().map(|sizes| sizes.iter().map(String::as_str).collect()).collect();
        let dims: Vec<&[&str]> = dims.iter().map(Vec::as_slice).collect();
        let elements: Vec<Vec<f64>> = (0..self.shapes.len()).map(|index| self.elements(index)).collect();
        let given: Vec<(&[usize], &[f64])> = self
            .shapes
            .iter()
            .zip(&elements)
            .map(|(shape, elements)| (*shape, elements.as_slice()))
            .collect();
        check_in(self.name, self.build, &given, &dims, self.precision)
    }
}

pub(crate) fn check_all(rows: &[Row]) {
    let mut problems = Vec::new();
    for row in rows {
        for named in [false, true].into_iter().take(if row.symbolic == Symbolic::None { 1 } else { 2 }) {
            if let Err(problem) = row.check(named) {
                problems.push(format!("{}{}: {problem}", row.name, if named { ", sizes named" } else { "" }));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
