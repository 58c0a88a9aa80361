//! Choice of range rules by their effect on the outputs of a static model.
//!
//! Scales and zero points are inputs of one session, so each trial only replaces two numbers. The
//! errors of values add up to first order, so each value is tried alone.

use std::collections::BTreeMap;

use ort_core::Result;
use ort_core::tensor::{Tensor, Value};

use crate::integer::GridOptions;
use crate::mixed::WeightProbe;
use crate::range::ValueRange;

/// The names of the scale and the zero point of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridNames {
    /// The scale.
    pub scale: String,
    /// The zero point.
    pub zero_point: String,
}

/// The constants of the grids of values, by value.
pub type Grids = BTreeMap<String, Vec<GridNames>>;

/// The ranges that a search chose.
#[derive(Clone, Debug, PartialEq)]
pub struct RangeChoice {
    /// The range of each value.
    pub ranges: BTreeMap<String, ValueRange>,
    /// How many values have the range of each candidate.
    pub counts: Vec<usize>,
    /// The squared relative error of the outputs on the samples of the search.
    pub error: f64,
}

/// Chooses between the ranges of several rules, value by value. The probe has the model with the
/// first of them, its grids as replaceable weights, and float outputs as reference.
///
/// If all values together are better off with one rule, they all have it. `step` is called after
/// each trial.
///
/// # Errors
///
/// As [`WeightProbe::noise`].
pub fn choose_ranges(
    probe: &WeightProbe,
    grids: &Grids,
    candidates: &[BTreeMap<String, ValueRange>],
    options: &GridOptions,
    step: &mut dyn FnMut(),
) -> Result<RangeChoice> {
    let Some(first) = candidates.first() else {
        return Ok(RangeChoice { ranges: BTreeMap::new(), counts: Vec::new(), error: 0.0 });
    };
    let mut search = Search { probe, grids, candidates, options, step };
    let usual = search.error(&BTreeMap::new())?;
    let mut mixed: BTreeMap<&str, usize> = BTreeMap::new();
    for name in grids.keys() {
        let mut best = (usual, 0);
        for candidate in search.others(name)? {
            let error = search.error(&BTreeMap::from([(name.as_str(), candidate)]))?;
            if error < best.0 {
                best = (error, candidate);
            }
        }
        mixed.insert(name, best.1);
    }
    let uniform = |candidate: usize| grids.keys().map(move |name| (name.as_str(), candidate)).collect();
    let mut choices: Vec<BTreeMap<&str, usize>> = vec![uniform(0), mixed];
    choices.extend((1..candidates.len()).map(uniform));
    let mut best = (f64::INFINITY, BTreeMap::new());
    for choice in choices {
        let error = search.error(&choice)?;
        if error < best.0 {
            best = (error, choice);
        }
    }
    let (error, chosen) = best;
    let mut choice = RangeChoice { ranges: first.clone(), counts: vec![0; candidates.len()], error };
    for (name, candidate) in chosen {
        choice.counts.iter_mut().skip(candidate).take(1).for_each(|count| *count += 1);
        if let Some(range) = candidates.get(candidate).and_then(|ranges| ranges.get(name)) {
            choice.ranges.insert(name.to_string(), *range);
        }
    }
    Ok(choice)
}

struct Search<'s> {
    probe: &'s WeightProbe,
    grids: &'s Grids,
    candidates: &'s [BTreeMap<String, ValueRange>],
    options: &'s GridOptions,
    step: &'s mut dyn FnMut(),
}

impl Search<'_> {
    /// The candidates whose grid of a value is none of an earlier one.
    fn others(&self, name: &str) -> Result<Vec<usize>> {
        let mut known = Vec::new();
        let mut others = Vec::new();
        for (candidate, ranges) in self.candidates.iter().enumerate() {
            let Some(range) = ranges.get(name) else { continue };
            let grid = self.options.grid(range.low, range.high)?;
            if !known.contains(&grid) {
                known.push(grid);
                others.extend((candidate > 0).then_some(candidate));
            }
        }
        Ok(others)
    }

    /// The squared relative error of the outputs with these candidates, and the first elsewhere.
    fn error(&mut self, chosen: &BTreeMap<&str, usize>) -> Result<f64> {
        let mut replaced: Vec<(&str, Value)> = Vec::new();
        for (name, candidate) in chosen {
            let range = self.candidates.get(*candidate).and_then(|ranges| ranges.get(*name));
            let Some(range) = range.filter(|_| *candidate > 0) else { continue };
            let grid = self.options.grid(range.low, range.high)?;
            let (scale, point) = (Tensor::scalar(grid.scale)?, Tensor::scalar(grid.zero_point as u8)?);
            for names in self.grids.get(*name).into_iter().flatten() {
                if self.probe.can_replace(&names.scale) && self.probe.can_replace(&names.zero_point) {
                    replaced.push((&names.scale, scale.clone().into()));
                    replaced.push((&names.zero_point, point.clone().into()));
                }
            }
        }
        let noise = self.probe.noise(&replaced)?;
        (self.step)();
        Ok(if noise.signal > 0.0 { noise.error / noise.signal } else { noise.error })
    }
}
