//! `--ranges auto`: the rule of each value, found by what it changes in the outputs.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use ort_runtime::onnx::Source;
use ort_runtime::quant::{Mode, Quantizer, RangeRule, StaticFormat, ValueRange, WeightProbe, choose_ranges};
use ort_runtime::{Error, ErrorKind, Model};

use super::arguments::QuantizeArgs;
use crate::comparison::{Inputs, Progress, Ran};

/// The samples on which ranges are tried.
const SAMPLES: usize = 8;

/// Chooses between candidates of which the first are the ranges of the options. Returns how many
/// values have each rule.
pub(super) fn search_ranges(
    args: &QuantizeArgs,
    (quantizer, source): (&mut Quantizer, &Source),
    (model, inputs): (&Model, &Inputs),
    candidates: &[BTreeMap<String, ValueRange>],
) -> Result<BTreeMap<String, usize>> {
    let Mode::Static(options) = &quantizer.mode else { return Ok(BTreeMap::new()) };
    let grid = options.activations();
    // In that form scales are constants of their own; integer biases would depend on them.
    let mut trial = quantizer.clone();
    if let Mode::Static(options) = &mut trial.mode {
        options.format = StaticFormat::Qdq;
    }
    let samples = inputs.spread(SAMPLES)?;
    let floats = Ran::of(&args.model, model, &samples)?;
    let quantization = trial.quantize(source)?;
    let grids = quantization.grids().clone();
    let mut chosen = None;
    let written = quantization.write(&args.output, &args.weights(), &mut |model: &Model| {
        let names = grids.values().flatten().flat_map(|names| [&names.scale, &names.zero_point]);
        let replaceable = WeightProbe::model(model, names.map(String::as_str));
        let session = args.model.builder(&replaceable).and_then(|builder| Ok(builder.build()?));
        let session = session.map_err(|problem| Error::new(ErrorKind::Fail, format!("{problem:#}")))?;
        let mut probe = WeightProbe::new(session);
        for (sample, outputs) in samples.iter().zip(floats.outputs()) {
            probe.add_reference(sample.clone(), outputs.clone());
        }
        let progress = Progress::new("trying ranges", "trials", grids.len() * (candidates.len() - 1));
        chosen = Some(choose_ranges(&probe, &grids, candidates, &grid, &mut || progress.step())?);
        // Leaves no file.
        Err(Error::new(ErrorKind::Fail, "the model is not kept"))
    });
    let chosen = match (chosen, written) {
        (Some(chosen), _) => chosen,
        (None, Err(problem)) => return Err(problem.into()),
        (None, Ok(_)) => return Err(anyhow::anyhow!("no range was tried")),
    };
    let Mode::Static(options) = &mut quantizer.mode else { return Ok(BTreeMap::new()) };
    options.ranges = chosen.ranges;
    let rules = args.ranges.rules();
    let counted = rules.iter().zip(chosen.counts).filter(|(_, count)| *count > 0);
    counted.map(|(rule, count)| Ok((name(*rule).context("a rule has a name")?, count))).collect()
}

/// The rule as it is given on the command line.
fn name(rule: RangeRule) -> Option<String> {
    Some(match rule {
        RangeRule::MinMax => "minmax".to_string(),
        RangeRule::Average => "average".to_string(),
        RangeRule::Percentile(share) => format!("percentile={}", 100.0 * share),
        RangeRule::Entropy => "entropy".to_string(),
        RangeRule::SquaredError => "mse".to_string(),
    })
}
