//! Differential testing of one model over session configurations: optimization levels, threads,
//! memory limits.
//!
//! Each configuration is compared with the case's expected outputs. It is also compared bit for bit
//! with the first of its group, because neither the number of threads nor a memory limit may change
//! a result. `cargo xtask fuzz-models` checks random models this way.

use std::path::Path;
use std::time::Duration;

use ort_core::dtype::DType;
use ort_core::onnx::{value_from_bytes, value_to_bytes};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Session, SessionOptions};
use ort_core::tensor::{Tensor, Value, compare};
use ort_core::{Error, ErrorKind, Limits, Result, Within, ensure, error};
use serde::Serialize;

use crate::suite::{Case, read_case};

/// The deadline of building a session and of each run; the models are tiny.
const DEADLINE: Duration = Duration::from_secs(20);
/// How often a run may be refused, each time with a larger limit, if its sizes depend on data.
const MOST_REFUSALS: usize = 100;

/// The outcome of a case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Every configuration returned the expected outputs.
    Right,
    /// No configuration runs it, because the runtime lacks an operator or a type.
    Unsupported,
    /// The model does not load or run in some configuration.
    Fails,
    /// A result is not the expected one.
    Wrong,
    /// A result differs in bits from a configuration that it must equal.
    Bits,
    /// A refusal names a memory limit that does not suffice.
    Limit,
    /// The runtime panicked.
    Panics,
}

/// The outcome of a case, and the configuration that shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// The outcome.
    pub outcome: Outcome,
    /// The options that reproduce it.
    pub options: String,
    /// The problem.
    pub problem: String,
}

impl Verdict {
    fn new(outcome: Outcome, options: impl Into<String>, problem: impl Into<String>) -> Verdict {
        Verdict { outcome, options: options.into(), problem: problem.into() }
    }

    /// The verdict of a panic that the caller caught.
    pub fn panicked(message: String) -> Verdict {
        Verdict::new(Outcome::Panics, "", message)
    }
}

/// One session configuration.
#[derive(Clone, Copy)]
struct Configuration {
    level: Level,
    threads: usize,
    /// Whether runs are planned ahead.
    planned: bool,
    poisoned: bool,
    limit: Option<usize>,
}

impl Configuration {
    const fn new(level: Level, threads: usize) -> Configuration {
        Configuration { level, threads, planned: true, poisoned: false, limit: None }
    }

    /// The options of `ort run` for this configuration.
    fn options(&self) -> String {
        let level = match self.level {
            Level::Disabled => "disabled",
            Level::Basic => "basic",
            Level::Extended => "extended",
            Level::All => "all",
        };
        let mut options = format!("--opt-level {level} --threads {}", self.threads);
        if !self.planned {
            options.push_str(" --no-mem-pattern");
        }
        if let Some(limit) = self.limit {
            options.push_str(&format!(" --memory-limit {limit}"));
        }
        if self.poisoned {
            options.push_str(" (ORT_POISON_MEMORY=1)");
        }
        options
    }

    fn session(&self, model: &Model) -> Result<Session> {
        let options = SessionOptions {
            enable_mem_pattern: self.planned,
            graph_optimization_level: self.level,
            intra_op_num_threads: self.threads,
            load_threads: 1,
            memory_limit: self.limit,
            ..SessionOptions::default()
        };
        let limits = Limits { deadline: Some(DEADLINE), ..*model.limits() };
        Session::builder(model).options(&options).provider("cpu").poison(self.poisoned).limits(limits).build()
    }
}

/// Groups of configurations whose results must have the same bits as those of the first one.
const GROUPS: &[&[Configuration]] = &[
    &[Configuration::new(Level::Disabled, 1), Configuration::new(Level::Disabled, 3)],
    // Levels rewrite the graph differently, so each has a group of its own.
    &[Configuration::new(Level::Basic, 1)],
    // Memory full of NaN shows a kernel that reads before it writes.
    &[Configuration { poisoned: true, ..Configuration::new(Level::Extended, 2) }],
    &[
        Configuration::new(Level::All, 1),
        Configuration::new(Level::All, 3),
        Configuration { planned: false, ..Configuration::new(Level::All, 2) },
    ],
];

/// A case with a tolerance for each element of its outputs.
struct Measured {
    case: Case,
    slacks: Vec<Option<Vec<f64>>>,
    /// The share of its memory need that a run under a limit gets, from 0 to 1; `None` runs without
    /// limits.
    share: Option<f64>,
}

/// Reads a case and runs it in every configuration; returns the first verdict that is not right.
///
/// Besides the files of [`read_case`], `slack_N.pb` may hold a tolerance for each element of output
/// N, as doubles; infinity accepts any value. The file `limit` may hold a number from 0 to 1: the
/// share of its memory need that a run under a limit gets. Without that file no run has a limit.
///
/// # Errors
///
/// The folder holds no readable case, or the file `limit` holds no such number. A model that does
/// not load is a verdict.
pub fn check_configurations(folder: &Path) -> Result<Verdict> {
    let case = match read_case(folder) {
        Ok(case) => case,
        // A folder that lacks a file is the caller's mistake. A model that does not load is a
        // finding.
        Err(problem) if problem.kind() == ErrorKind::NoSuchFile => return Err(problem),
        Err(problem) => return Ok(refusal(&problem, "")),
    };
    let slacks = (0..case.expected.len()).map(|index| read_slack(folder, index)).collect::<Result<_>>()?;
    Measured { case, slacks, share: read_share(folder)? }.check()
}

/// Reads the file `limit` of a case, if there is one.
fn read_share(folder: &Path) -> Result<Option<f64>> {
    let path = folder.join("limit");
    if !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path).map_err(|why| error!(Fail, "{}: {why}", path.display()))?;
    let share = text.trim().parse().ok().filter(|share| (0.0..=1.0).contains(share));
    let problem = || error!(InvalidArgument, "{}: '{}', expected 0 to 1", path.display(), text.trim());
    share.map(Some).ok_or_else(problem)
}

fn refusal(problem: &Error, options: &str) -> Verdict {
    let is_lacking = problem.kind() == ErrorKind::NotImplemented;
    let outcome = if is_lacking { Outcome::Unsupported } else { Outcome::Fails };
    Verdict::new(outcome, options, problem.to_string())
}

fn read_slack(folder: &Path, index: usize) -> Result<Option<Vec<f64>>> {
    let path = folder.join("test_data_set_0").join(format!("slack_{index}.pb"));
    // Without the file, the tolerance of the case holds for the whole output.
    let Ok(bytes) = std::fs::read(&path) else { return Ok(None) };
    let value = value_from_bytes(bytes.into(), &Default::default()).within(|| path.display().to_string())?;
    value.tensor()?.to_doubles().map(Some)
}

type Outputs = Vec<(String, Value)>;

impl Measured {
    fn check(&self) -> Result<Verdict> {
        for group in GROUPS {
            let mut bits: Option<(String, Vec<Vec<u8>>)> = None;
            for configuration in *group {
                // Only the first configuration decides that the model is unsupported: a later
                // refusal is a failure, because an equivalent graph ran before.
                let is_first_of_all = configuration.level == Level::Disabled && bits.is_none();
                let options = configuration.options();
                let outputs = match self.run(configuration) {
                    Ok((outputs, _)) => outputs,
                    Err(problem) if is_first_of_all => return Ok(refusal(&problem, &options)),
                    Err(problem) => return Ok(Verdict::new(Outcome::Fails, options, problem.to_string())),
                };
                let found = bits_of(&outputs)?;
                match &bits {
                    Some((first, bits)) if *bits != found => {
                        let problem =
                            format!("other bits than with {first}: {}", difference(&outputs, bits)?);
                        return Ok(Verdict::new(Outcome::Bits, options, problem));
                    }
                    Some(_) => {}
                    None => {
                        if let Err(problem) = self.compare(&outputs) {
                            return Ok(Verdict::new(Outcome::Wrong, options, problem.to_string()));
                        }
                        bits = Some((options, found));
                    }
                }
            }
        }
        Ok(self.check_limits()?.unwrap_or_else(|| Verdict::new(Outcome::Right, "", "")))
    }

    /// Runs twice on one session, so that the second run reuses idle memory.
    fn run(&self, configuration: &Configuration) -> Result<(Outputs, Session)> {
        let session = configuration.session(&self.case.model)?;
        // Keeps only the bits, because outputs that are held count against the limit.
        let first = bits_of(&session.run(&self.inputs())?)?;
        let second = session.run(&self.inputs()).within(|| "second run")?;
        ensure!(first == bits_of(&second)?, Fail, "a second run on the session has other bits");
        Ok((second, session))
    }

    fn inputs(&self) -> Vec<(&str, Value)> {
        self.case.inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
    }

    fn compare(&self, outputs: &Outputs) -> Result<()> {
        let (got, expected) = (outputs.len(), self.case.expected.len());
        ensure!(got == expected, Fail, "{got} outputs, expected {expected}");
        for (((name, actual), expected), slack) in outputs.iter().zip(&self.case.expected).zip(&self.slacks) {
            let outcome = match slack {
                Some(slack) => compare_within(actual.tensor()?, expected.tensor()?, slack),
                None => compare(actual, expected, self.case.tolerance),
            };
            outcome.within(|| format!("output '{name}'"))?;
        }
        Ok(())
    }

    /// A run with a share of its memory need returns the same bits, or is refused with a limit that
    /// suffices.
    fn check_limits(&self) -> Result<Option<Verdict>> {
        let Some(share) = self.share else { return Ok(None) };
        let whole = Configuration::new(Level::All, 1);
        let (outputs, session) = self.run(&whole)?;
        let bits = bits_of(&outputs)?;
        let plan = session.plan_for_inputs(&self.inputs())?;
        let need = session.memory().packed + plan.planned_bytes;
        // If sizes are only known during the run, a refusal accounts only for those met so far.
        let refusals = if plan.peak_bytes.is_some() { 2 } else { MOST_REFUSALS };
        // The whole need is tried as well if it is known before the run.
        let shares = [Some(share), plan.peak_bytes.map(|_| 1.0)];
        for share in shares.into_iter().flatten() {
            let limit = ((need as f64 * share) as usize).max(1);
            if let Some(verdict) = self.check_limit(limit, refusals, &bits)? {
                return Ok(Some(verdict));
            }
        }
        Ok(None)
    }

    fn check_limit(&self, limit: usize, refusals: usize, bits: &[Vec<u8>]) -> Result<Option<Verdict>> {
        let mut configuration = Configuration { limit: Some(limit), ..Configuration::new(Level::All, 1) };
        // The refusal of a session may be followed by one of its run, with a larger limit.
        for _ in 0..=refusals {
            let options = configuration.options();
            let limit = configuration.limit.unwrap_or_default();
            let problem = match self.run(&configuration) {
                Ok((outputs, _)) if bits_of(&outputs)? == bits => return Ok(None),
                Ok((outputs, _)) => {
                    let problem = format!("other bits than without a limit: {}", difference(&outputs, bits)?);
                    return Ok(Some(Verdict::new(Outcome::Bits, options, problem)));
                }
                Err(problem) => problem,
            };
            match problem.shortage() {
                // A caller who follows the advice must make progress, so the named limit must
                // grow.
                Some(shortage) if shortage.sufficient_limit() > limit => {
                    configuration.limit = Some(shortage.sufficient_limit());
                }
                Some(_) => {
                    let problem = format!("the limit that the refusal names is not more: {problem}");
                    return Ok(Some(Verdict::new(Outcome::Limit, options, problem)));
                }
                None => return Ok(Some(Verdict::new(Outcome::Fails, options, problem.to_string()))),
            }
        }
        let problem = "refused again with the limit that the refusal named";
        Ok(Some(Verdict::new(Outcome::Limit, configuration.options(), problem)))
    }
}

/// Compares element by element, each with its own tolerance.
fn compare_within(actual: &Tensor, expected: &Tensor, slack: &[f64]) -> Result<()> {
    let (a, e) = (actual.dtype(), expected.dtype());
    ensure!(a == e, Fail, "type {}, expected {}", a.name(), e.name());
    let (a, e) = (actual.shape(), expected.shape());
    ensure!(a == e, Fail, "shape {a:?}, expected {e:?}");
    let (actual, expected) = (actual.to_doubles()?, expected.to_doubles()?);
    ensure!(slack.len() == expected.len(), Fail, "{} slacks for {} elements", slack.len(), expected.len());
    let far = |(index, ((a, e), slack)): (usize, ((&f64, &f64), &f64))| {
        // Equality covers infinities of the same sign, whose difference is NaN.
        let is_close = a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= *slack;
        // Tested apart, because a NaN is not within an infinite tolerance either.
        (!is_close && *slack != f64::INFINITY).then_some((index, *a, *e, *slack))
    };
    let far: Vec<_> = actual.iter().zip(&expected).zip(slack).enumerate().filter_map(far).collect();
    let Some((index, a, e, slack)) = far.first() else { return Ok(()) };
    let (many, all) = (far.len(), actual.len());
    Err(error!(
        Fail,
        "{many} of {all} elements differ; element {index} is {a}, expected {e}, at most {slack} off"
    ))
}

fn bits_of(outputs: &Outputs) -> Result<Vec<Vec<u8>>> {
    outputs.iter().map(|(_, value)| value_to_bytes("", &with_one_nan(value)?)).collect()
}

/// Canonicalizes NaNs. IEEE 754 (6.2.3, 6.3) leaves sign and payload of a generated NaN to the
/// implementation, and compilers commute the operands of a multiplication.
fn with_one_nan(value: &Value) -> Result<Value> {
    let Value::Tensor(tensor) = value else { return Ok(value.clone()) };
    let width = match tensor.dtype() {
        DType::F16 | DType::BF16 => 2,
        DType::F32 | DType::C64 => 4,
        DType::F64 | DType::C128 => 8,
        _ => return Ok(value.clone()),
    };
    let mut bytes = tensor.view().bytes()?.to_vec();
    for (element, number) in bytes.chunks_exact_mut(width).zip(tensor.to_doubles()?) {
        if number.is_nan() {
            // All ones are a NaN in every width.
            element.fill(0xff);
        }
    }
    Ok(Value::Tensor(Tensor::from_bytes(tensor.dtype(), tensor.shape(), bytes.into())?))
}

/// Describes where the bits differ.
fn difference(outputs: &Outputs, bits: &[Vec<u8>]) -> Result<String> {
    for ((name, value), bits) in outputs.iter().zip(bits) {
        // `bits` have canonical NaNs, so those of the value must be, too.
        if value_to_bytes("", &with_one_nan(value)?)? == *bits {
            continue;
        }
        let first = value_from_bytes(bits.clone().into(), &Default::default())?;
        // A comparison of values does not see the sign of a zero.
        let exact = ort_core::tensor::Tolerance { relative: 0.0, absolute: 0.0 };
        let difference = compare(value, &first, exact).err().map(|problem| problem.message().to_string());
        return Ok(format!("output '{name}': {}", difference.unwrap_or_else(|| "signs of zero".to_string())));
    }
    Ok("other outputs".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_differ_by_the_sign_of_zero_and_not_of_nan() -> Result<()> {
        let bits = |element: f32| -> Result<_> {
            bits_of(&[("y".into(), Value::Tensor(Tensor::from_slice(&[1], &[element])?))].into())
        };
        assert_eq!(bits(f32::NAN)?, bits(-f32::NAN)?);
        assert_ne!(bits(0.0)?, bits(-0.0)?);
        assert_ne!(bits(f32::NAN)?, bits(f32::INFINITY)?);
        Ok(())
    }

    #[test]
    fn the_output_whose_bits_differ_is_named_after_one_with_a_nan() -> Result<()> {
        let outputs = |second: f32| -> Result<Outputs> {
            let of = |name: &str, element: f32| -> Result<_> {
                Ok((name.to_string(), Value::Tensor(Tensor::from_slice(&[1], &[element])?)))
            };
            Ok(vec![of("first", f32::NAN)?, of("second", second)?])
        };
        let problem = difference(&outputs(1.0)?, &bits_of(&outputs(2.0)?)?)?;
        assert!(problem.contains("'second'"), "{problem}");
        Ok(())
    }
}
