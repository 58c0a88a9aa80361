//! Test of random memory limits: each session keeps to its limit with bit-identical results, or is
//! refused with correct numbers.
//!
//! A refusal before the run names the smallest limit that suffices. A refusal midway, for a
//! dynamically sized value, names what the run needs up to that point. That is a lower bound, and
//! following such refusals must lead to the smallest limit.

use std::process::ExitCode;

use anyhow::{Result, bail};
use ort_runtime::plan::{MemoryKind, PlanReport};
use ort_runtime::{Budget, Error, Model, Profile, RunOptions, Session, Value};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde::Serialize;

use super::arguments::{SoakArgs, bits_of, given, inputs_of};
use crate::args::human_bytes;
use crate::output::{say, say_json};
use crate::resident;

/// One page less than the smallest limit must be refused.
const PAGE: usize = 4096;

#[derive(Default, Serialize)]
struct LimitsReport {
    model: String,
    trials: usize,
    /// The trials that ran. Of those, the trials with weights packed on demand, and with a split
    /// batch.
    ran: usize,
    streamed: usize,
    split: usize,
    /// The trials that were refused: when the session was built, before the run, or midway for a
    /// dynamically sized value.
    refused_sessions: usize,
    refused_runs: usize,
    refused_midway: usize,
    /// The most by which anonymous memory grew beyond a limit, in bytes; null if the platform does
    /// not report it.
    most_over: Option<u64>,
    /// The failures.
    wrong: Vec<String>,
}

/// One run under a memory limit, with its expected result.
struct Trial<'a> {
    args: &'a SoakArgs,
    model: &'a Model,
    inputs: &'a [(String, Value)],
    expected: &'a [Vec<u8>],
}

enum Outcome {
    Ran { streamed: bool, split: bool, over: Option<u64> },
    Refused { at: Moment, problem: Error },
}

/// When a trial was refused.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    Building,
    Before,
    Midway,
}

/// The most refusals in a row that are followed by a run with the limit they name.
const MOST_RAISES: usize = 256;

pub(super) fn run(args: &SoakArgs, trials: usize) -> Result<ExitCode> {
    let model = args.model.load()?;
    // A budget without a limit measures everything. A plan would miss folded constants and
    // dynamically sized values.
    let everything = Budget::new(None);
    let whole = args.model.builder(&model)?.budget(&everything).build()?;
    let building = everything.peak();
    let mut report = LimitsReport { model: args.model.name(), trials, ..LimitsReport::default() };
    for number in 0..trials {
        let inputs = inputs_of(args, &model, number)?;
        everything.reset_peak();
        let expected = bits_of(whole.run(&given(&inputs))?)?;
        // Building may need more memory than a run, and the limit applies to both.
        let largest = everything.peak().max(building);
        // Free what this run left, which would count in the peak of the next.
        whole.trim();
        let trial = Trial { args, model: &model, inputs: &inputs, expected: &expected };
        let limit = draw(args.model.seed.wrapping_add(number as u64), largest);
        if let Err(wrong) = trial.judge(limit, &mut report) {
            report.wrong.push(format!("run {number} with a limit of {limit} bytes: {wrong:#}"));
        }
    }
    show(args, &report)?;
    match report.wrong.first() {
        Some(first) => {
            bail!("{} of {trials} sessions did not keep to their limits; {first}", report.wrong.len())
        }
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Returns a random limit from 1/50 to 1.2 times the unlimited peak, log-uniform: small limits are
/// as likely as large ones.
fn draw(seed: u64, largest: usize) -> usize {
    // The inputs are drawn from `seed`. Invert it, so that the limit does not follow from the same
    // numbers.
    let exponent: f64 = Pcg64::seed_from_u64(!seed).random_range(0.0..1.0);
    // 1.2 × 50 is 60.
    (largest as f64 / 50.0 * 60f64.powf(exponent)) as usize
}

impl Trial<'_> {
    /// Runs with this limit. If it is refused, checks that the limit it names suffices, and that a
    /// page less does not.
    fn judge(&self, limit: usize, report: &mut LimitsReport) -> Result<()> {
        let (at, problem) = match self.attempt(limit)? {
            Outcome::Ran { streamed, split, over } => {
                report.ran += 1;
                report.streamed += usize::from(streamed);
                report.split += usize::from(split);
                report.most_over = report.most_over.max(over);
                return Ok(());
            }
            Outcome::Refused { at, problem } => (at, problem),
        };
        *match at {
            Moment::Building => &mut report.refused_sessions,
            Moment::Before => &mut report.refused_runs,
            Moment::Midway => &mut report.refused_midway,
        } += 1;
        let sufficient = self.least_limit(limit, (at, problem))?;
        // The first limit was refused already, so there is nothing below it to try.
        match self.attempt(sufficient.saturating_sub(PAGE).max(limit))? {
            Outcome::Refused { .. } => Ok(()),
            Outcome::Ran { .. } => {
                bail!("the refusal asked for {sufficient} bytes, but one page less is enough")
            }
        }
    }

    /// Follows the limits that refusals name until one suffices, and returns it.
    ///
    /// A limit named before any node ran must suffice. There are two exceptions: a session that is
    /// refused while it is built cannot know the inputs of the run, and no plan knows dynamically
    /// sized values.
    fn least_limit(&self, limit: usize, first: (Moment, Error)) -> Result<usize> {
        let (mut limit, (mut at, mut problem)) = (limit, first);
        for _ in 0..MOST_RAISES {
            let Some(shortage) = problem.shortage() else {
                bail!("the refusal does not say how many bytes are enough: {problem}")
            };
            let named = shortage.sufficient_limit();
            if named <= limit {
                bail!("the refusal asks for a limit of {named} bytes, which is not higher: {problem}");
            }
            (at, problem) = match (self.attempt(named)?, at) {
                (Outcome::Ran { .. }, _) => return Ok(named),
                (Outcome::Refused { at: Moment::Before, problem }, Moment::Building) => {
                    (Moment::Before, problem)
                }
                (Outcome::Refused { at: Moment::Midway, problem }, _) => (Moment::Midway, problem),
                (Outcome::Refused { problem, .. }, _) => {
                    bail!("the refusal said that {named} bytes are enough, but they are not: {problem}")
                }
            };
            limit = named;
        }
        bail!("{MOST_RAISES} refusals in a row each asked for a higher limit; the last one: {problem}")
    }

    /// Builds a session and runs it once. Neither a refusal nor the right result is an error.
    fn attempt(&self, limit: usize) -> Result<Outcome> {
        let before = resident::measure().anonymous;
        let budget = Budget::new(Some(limit));
        let session = match self.args.model.builder(self.model)?.budget(&budget).build() {
            Ok(session) => session,
            Err(problem) => return Ok(Outcome::Refused { at: Moment::Building, problem }),
        };
        let profile = Profile::default();
        let options = RunOptions { profile: Some(&profile), ..RunOptions::default() };
        let outcome = session.run_with(&given(self.inputs), &options);
        // Check this before the result: a run over its limit is wrong whatever it returns.
        if budget.peak() > limit {
            bail!("{} bytes were in use at once", budget.peak());
        }
        match outcome {
            Ok(outputs) => {
                let over = before.zip(resident::measure().anonymous);
                let over =
                    over.map(|(before, after)| after.saturating_sub(before).saturating_sub(limit as u64));
                if bits_of(outputs)? != self.expected {
                    bail!("the result differs from the one without a limit");
                }
                let all = session.plan_for_inputs(&given(self.inputs))?;
                Ok(Outcome::Ran { streamed: streams(&all), split: all.batch_split.is_some(), over })
            }
            // No recorded node means that the refusal came before the run.
            Err(problem) if profile.events().is_empty() => {
                self.next_request(&session)?;
                Ok(Outcome::Refused { at: Moment::Before, problem })
            }
            Err(problem) if problem.shortage().is_some() && self.has_unknown_sizes(&session)? => {
                self.next_request(&session)?;
                Ok(Outcome::Refused { at: Moment::Midway, problem })
            }
            Err(problem) => bail!("it was refused after nodes had run: {problem}"),
        }
    }

    /// Returns whether the plan for the inputs leaves out dynamically sized values.
    fn has_unknown_sizes(&self, session: &Session) -> Result<bool> {
        Ok(session.plan_for_inputs(&given(self.inputs))?.peak_bytes.is_none())
    }

    /// Checks that the session still works after a refusal, with the smallest sizes. Being refused
    /// for memory again is fine.
    fn next_request(&self, session: &Session) -> Result<()> {
        let mut args = self.args.model.clone();
        // The lowest sizes are the most likely to fit the limit.
        for (name, low, _) in &self.args.random_dims {
            args.dims.retain(|(known, _)| known != name);
            args.dims.push((name.clone(), vec![*low]));
        }
        let inputs = crate::inputs::gather(&args, self.model)?;
        match session.run(&given(&inputs)) {
            Err(problem) if problem.shortage().is_none() => bail!("the next run fails: {problem}"),
            _ => Ok(()),
        }
    }
}

/// Returns whether some weights are packed on demand in each run.
fn streams(plan: &PlanReport) -> bool {
    plan.kinds.iter().any(|kind| kind.kind == MemoryKind::WeightsStreamed && kind.bytes > 0)
}

fn show(args: &SoakArgs, report: &LimitsReport) -> Result<()> {
    if args.json {
        return say_json(report);
    }
    say!(
        "{} sessions with random limits: {} ran ({} with streamed weights, {} with a split batch), {} were refused before a run, {} midway, {} when they were built",
        report.trials,
        report.ran,
        report.streamed,
        report.split,
        report.refused_runs,
        report.refused_midway,
        report.refused_sessions
    )?;
    let over = report.most_over.map_or("-".to_owned(), |bytes| human_bytes(bytes as usize));
    say!("anonymous memory exceeded a limit by at most {over}")?;
    report.wrong.iter().try_for_each(|wrong| say!("{wrong}"))
}
