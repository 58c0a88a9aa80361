//! `cargo xtask soak`: leak and growth tests of memory over many loads, shapes, runs, callers and
//! processes.
//!
//! Each scenario has a bound that fails the run. ONNX Runtime's number for the same scenario is
//! printed beside ours, if it has an equivalent.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::bench::mebibytes;
use crate::compare::{Cases, chosen_cases, prepare};
use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, capture, describe};

const MIB: u64 = 1 << 20;

/// Processes that hold a model open at once.
const PROCESSES: usize = 8;

/// How long to soak.
#[derive(clap::Args, Default)]
pub(crate) struct SoakOptions {
    /// Use fewer loads, shapes and runs, small models, and no ONNX Runtime, as `cargo xtask test`
    /// does.
    #[arg(long)]
    short: bool,
}

impl SoakOptions {
    pub(crate) fn short() -> Self {
        Self { short: true }
    }

    fn of<T>(&self, short: T, long: T) -> T {
        if self.short { short } else { long }
    }
}

/// The number of scenarios, for the summary of a run that has to skip them.
pub(crate) const SCENARIOS: usize = 15;

/// The fields of `ort soak --json` and of soak_reference.py, in bytes.
#[derive(Deserialize)]
pub(crate) struct SoakReport {
    baseline: Option<u64>,
    baseline_rss: Option<u64>,
    peak_rss: Option<u64>,
    #[serde(default)]
    packed: u64,
    #[serde(default)]
    activations_peak: u64,
    same_bits: bool,
    cycles: Vec<Cycle>,
}

/// The fields of `ort soak --random-limits --json`.
#[derive(Deserialize)]
struct LimitsReport {
    ran: usize,
    refused_sessions: usize,
    refused_runs: usize,
    most_over: Option<u64>,
    wrong: Vec<String>,
}

#[derive(Deserialize)]
struct Cycle {
    #[serde(default)]
    load_peak: Option<u64>,
    #[serde(default)]
    sessions_peak: Option<u64>,
    sessions: Option<u64>,
    ran: Vec<Option<u64>>,
    trimmed: Option<u64>,
    dropped: Option<u64>,
}

impl SoakReport {
    /// Returns the maximum that remains over the baseline after a cycle.
    pub(crate) fn left(&self) -> Option<u64> {
        let dropped = self.cycles.iter().map(|cycle| cycle.dropped).collect::<Option<Vec<u64>>>()?;
        // A process that ends below its baseline left nothing. A missing measurement stays `None`.
        dropped.into_iter().max()?.checked_sub(self.baseline?).or(Some(0))
    }

    /// Returns how far the peak RSS exceeded the baseline.
    pub(crate) fn growth(&self) -> Option<u64> {
        // A peak below the baseline is a faulty measurement: `None` fails the scenario.
        self.peak_rss?.checked_sub(self.baseline_rss?)
    }

    /// Returns what remains over the baseline after a trim, in the last cycle.
    pub(crate) fn trimmed(&self) -> Option<u64> {
        Some(self.cycles.last()?.trimmed?.saturating_sub(self.baseline?))
    }

    /// Returns how far the second half of the runs exceeded the end of the first half.
    fn slope(&self) -> Option<u64> {
        let ran = self.cycles.last()?.ran.iter().copied().collect::<Option<Vec<u64>>>()?;
        // The first half is warm-up: scratch memory grows to its steady state there.
        let (middle, later) = ran.get(ran.len().checked_sub(1)? / 2..)?.split_first()?;
        Some(later.iter().max()?.saturating_sub(*middle))
    }

    /// Returns the peaks over the baseline while the model was loaded, and while the session was
    /// created.
    pub(crate) fn loading(&self) -> [Option<u64>; 2] {
        let first = self.cycles.first();
        let peaks = first.map_or([None; 2], |cycle| [cycle.load_peak, cycle.sessions_peak]);
        peaks.map(|peak| Some(peak?.saturating_sub(self.baseline?)))
    }

    /// Returns what all sessions hold over the baseline before any of them ran.
    fn sessions(&self) -> Option<u64> {
        Some(self.cycles.last()?.sessions?.saturating_sub(self.baseline?))
    }
}

/// One number that must stay within a bound.
struct Finding {
    scenario: String,
    ours: Option<u64>,
    bound: u64,
    reference: Option<u64>,
    same_bits: bool,
}

/// The inputs of the scenarios.
struct Soak<'a> {
    options: &'a SoakOptions,
    ort: PathBuf,
    cases: Cases,
    python: Python,
}

/// Runs all scenarios and prints a table; an error if one exceeds its bound.
pub(crate) fn run(workspace: &Workspace, options: &SoakOptions) -> Result<Summary> {
    let python = Python::open(workspace)?;
    let cases = Cases::standard(workspace);
    let names = ["minilm_l6_b1_s128", "mobilenet_v2_b1", "ocr_cls_b1", "silero_vad_b1"].map(str::to_owned);
    let more =
        ["bert_base_b1_s128", "resnet50_b1", "efficientnet_b0_b1", "gpt2_b1_s128_p0"].map(str::to_owned);
    let names: Vec<String> = names.into_iter().chain(more.into_iter().filter(|_| !options.short)).collect();
    prepare(workspace, &python, &cases, &chosen_cases(&cases, &names)?)?;
    let soak = Soak { options, ort: workspace.build_ort()?, cases, python };
    let mut findings = soak.loading()?;
    findings.extend(soak.cycles()?);
    findings.extend(soak.shapes()?);
    findings.extend(soak.repeated()?);
    findings.extend(soak.callers()?);
    findings.extend(soak.sessions()?);
    findings.extend(soak.processes()?);
    findings.extend(soak.random_limits()?);
    conclude(&findings)
}

fn conclude(findings: &[Finding]) -> Result<Summary> {
    let mut rows = table::new(&["scenario", "ours MiB", "bound", "ONNX Runtime", "verdict"]);
    let mut failed = 0;
    for finding in findings {
        let verdict = match finding.ours {
            // Wrong results fail a scenario even if it stays within its bound.
            _ if !finding.same_bits => "other results after a trim",
            None => "not measured",
            Some(ours) if ours > finding.bound => "too much",
            Some(_) => "ok",
        };
        failed += usize::from(verdict != "ok");
        rows.add_row([
            &finding.scenario,
            &mebibytes(finding.ours),
            &mebibytes(Some(finding.bound)),
            &mebibytes(finding.reference),
            verdict,
        ]);
    }
    println!("{rows}");
    if failed > 0 {
        bail!("{failed} of {} scenarios hold more memory than they may", findings.len());
    }
    let summary = Summary { passed: findings.len(), ..Summary::default() };
    println!("{summary}");
    Ok(summary)
}

impl Soak<'_> {
    /// Loading takes memory for the graph, and a session for the weights that it packs; mapping a
    /// compiled cache takes hardly any.
    fn loading(&self) -> Result<Vec<Finding>> {
        let models: &[&str] = self.options.of(
            &["minilm_l6_b1_s128"][..],
            &["minilm_l6_b1_s128", "resnet50_b1", "bert_base_b1_s128", "gpt2_b1_s128_p0"][..],
        );
        let mut findings = Vec::new();
        for name in models {
            let folder = tempfile::tempdir().context("a folder for the cache")?;
            let cached =
                ["--cache", folder.path().to_str().context("the folder's name is no text")?, "--runs", "1"];
            let plain = self.soaked(name, &["--runs", "1"])?;
            // The first run writes the cache, the second maps it.
            self.soaked(name, &cached)?;
            let cached = self.soaked(name, &cached)?;
            let bytes = self.model(name)?.metadata()?.len();
            let [load, session] = plain.loading();
            let rows = [
                // The weights stay in the mapped file, which does not count as anonymous memory.
                ("anonymous at most while it is loaded", load, bytes / 10 + 16 * MIB),
                // The bound allows a packed copy of the file, though most is packed by runs.
                ("while a session is built", session, bytes / 10 * 11 + 16 * MIB),
                ("while a session maps a compiled cache", cached.loading()[1], 32 * MIB),
            ];
            findings.extend(rows.map(|(what, ours, bound)| Finding {
                scenario: format!("{name}: {what}"),
                ours,
                bound,
                reference: None,
                same_bits: plain.same_bits && cached.same_bits,
            }));
        }
        Ok(findings)
    }

    /// A model is loaded, run and dropped repeatedly, and all memory comes back.
    fn cycles(&self) -> Result<Vec<Finding>> {
        let cycles = self.options.of("5", "50");
        let models: &[&str] = self.options.of(
            &["minilm_l6_b1_s128", "silero_vad_b1"][..],
            &["minilm_l6_b1_s128", "mobilenet_v2_b1", "resnet50_b1", "bert_base_b1_s128"][..],
        );
        let mut findings = Vec::new();
        for name in models {
            let (ours, reference) = self.both(name, true, &["--cycles", cycles, "--runs", "2"])?;
            findings.push(Finding {
                scenario: format!("{name}: left after {cycles} loads"),
                ours: ours.left(),
                bound: 8 * MIB,
                reference: reference.and_then(|report| report.left()),
                same_bits: ours.same_bits,
            });
        }
        Ok(findings)
    }

    /// Runs of many shapes take as much as the largest shape alone, and a trim leaves only the
    /// weights.
    fn shapes(&self) -> Result<Vec<Finding>> {
        let runs = self.options.of("40", "1000");
        let (batch, seq) = self.options.of(("3", "64"), ("8", "511"));
        let largest = [format!("batch={batch}"), format!("seq={seq}")];
        let alone = ["--dim", &largest[0], "--dim", &largest[1], "--runs", "1"];
        let random = [format!("batch=1..{batch}"), format!("seq=8..{seq}")];
        let many = ["--random-dim", &random[0], "--random-dim", &random[1], "--runs", runs];
        let (alone, _) = self.both("minilm_l6_b1_s128", false, &alone)?;
        let (ours, reference) = self.both("minilm_l6_b1_s128", false, &many)?;
        let alone = alone.growth().context("the growth cannot be measured")?;
        Ok(vec![
            Finding {
                scenario: format!("minilm_l6: growth over {runs} shapes up to {batch} x {seq}"),
                ours: ours.growth(),
                bound: alone + alone / 20 + 4 * MIB,
                reference: reference.as_ref().and_then(SoakReport::growth),
                same_bits: ours.same_bits,
            },
            Finding {
                scenario: "minilm_l6: left by a trim".to_owned(),
                ours: ours.trimmed(),
                // Packed weights outlive a trim. Slabs and other idle memory do not.
                bound: ours.packed + 8 * MIB,
                reference: reference.and_then(|report| report.trimmed()),
                same_bits: ours.same_bits,
            },
        ])
    }

    /// Repeated runs of one shape do not grow.
    fn repeated(&self) -> Result<Vec<Finding>> {
        let runs = self.options.of("500", "10000");
        let (ours, reference) = self.both("ocr_cls_b1", true, &["--runs", runs])?;
        Ok(vec![Finding {
            scenario: format!("ocr_cls: growth over the second half of {runs} runs"),
            ours: ours.slope(),
            bound: MIB / 4,
            reference: reference.and_then(|report| report.slope()),
            same_bits: ours.same_bits,
        }])
    }

    /// Concurrent callers on one session take their activations and stacks, and release them.
    fn callers(&self) -> Result<Vec<Finding>> {
        const CALLERS: u64 = 64;
        let callers = CALLERS.to_string();
        let arguments = ["--callers", &callers, "--runs", self.options.of("2", "20")];
        let (ours, reference) = self.both("minilm_l6_b1_s128", true, &arguments)?;
        Ok(vec![
            Finding {
                scenario: format!("minilm_l6: growth with {CALLERS} callers"),
                ours: ours.growth(),
                // The slack covers a stack and a heap for each caller, and the part of the file
                // that the first runs page in.
                bound: ours.packed + ours.activations_peak + CALLERS * MIB / 4 + 24 * MIB,
                reference: reference.as_ref().and_then(SoakReport::growth),
                same_bits: ours.same_bits,
            },
            Finding {
                scenario: format!("minilm_l6: left by a trim after {CALLERS} callers"),
                ours: ours.trimmed(),
                // glibc gives each caller's thread an arena of its own, and a trim does not release
                // the top of those. With one arena (MALLOC_ARENA_MAX=1) almost nothing remains.
                bound: ours.packed + 8 * MIB + CALLERS * MIB / 4,
                reference: reference.and_then(|report| report.trimmed()),
                same_bits: ours.same_bits,
            },
        ])
    }

    /// An eighth session on a model costs next to nothing.
    fn sessions(&self) -> Result<Vec<Finding>> {
        let case = self.options.of("minilm_l6_b1_s128", "bert_base_b1_s128");
        let held = |count: &str| -> Result<(Option<u64>, Option<u64>)> {
            let (ours, reference) = self.both(case, true, &["--sessions", count, "--runs", "1"])?;
            Ok((ours.sessions(), reference.and_then(|report| report.sessions())))
        };
        // The difference cancels what all sessions on a model share.
        let (seven, eight) = (held("7")?, held("8")?);
        let more = |eight: Option<u64>, seven: Option<u64>| Some(eight?.saturating_sub(seven?));
        Ok(vec![Finding {
            scenario: format!("{case}: the eighth session"),
            ours: more(eight.0, seven.0),
            bound: 2 * MIB,
            reference: more(eight.1, seven.1),
            same_bits: true,
        }])
    }

    /// Eight processes on a model share its file's pages, and the packed weights too if these are
    /// in a compiled cache.
    fn processes(&self) -> Result<Vec<Finding>> {
        let case = self.options.of("minilm_l6_b1_s128", "bert_base_b1_s128");
        let folder = tempfile::tempdir().context("a folder for the cache")?;
        let cache = folder.path().to_str().context("the folder's name is no text")?;
        let cached = ["--cache", cache, "--runs", "1"];
        // The first process writes the cache, so the measured ones only map it.
        capture(&mut self.command(case, true, &cached)?)?;
        let (pages, _) = self.held(case, &["--runs", "1"])?;
        let (cached_pages, anonymous) = self.held(case, &cached)?;
        let bytes = self.model(case)?.metadata()?.len();
        // The shares of a page add up to one page. So all processes together may map one model,
        // one binary, and 5% more.
        let bound = bytes + bytes / 20 + self.ort.metadata()?.len();
        let finding = |what: &str, ours: Option<u64>, bound: u64| Finding {
            scenario: format!("{case}: {what}"),
            ours,
            bound,
            reference: None,
            same_bits: true,
        };
        Ok(vec![
            finding(&format!("files' pages of {PROCESSES} processes, by share"), Some(pages), bound),
            finding("the same with a compiled cache, packed weights included", Some(cached_pages), bound),
            finding("left by a trim with a compiled cache, at most", anonymous, 8 * MIB),
        ])
    }

    /// Returns, for processes that hold a session open, the sum of their proportional shares of
    /// file pages, and the maximum that a trim left over the baseline.
    fn held(&self, case: &str, arguments: &[&str]) -> Result<(u64, Option<u64>)> {
        let mut command = self.command(case, true, &[arguments, &["--hold"]].concat())?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut held = Vec::new();
        for _ in 0..PROCESSES {
            held.push(command.spawn().with_context(|| format!("cannot run {}", describe(&command)))?);
        }
        // Collect both results before checking them: the processes must be ended even if one
        // failed.
        let reports = held.iter_mut().map(report).collect::<Result<Vec<SoakReport>>>();
        let shares = held.iter().map(file_share).collect::<Result<Vec<u64>>>();
        for process in &mut held {
            // The process exits when its standard input ends.
            drop(process.stdin.take());
            process.wait()?;
        }
        let trimmed: Option<Vec<u64>> = reports?.iter().map(SoakReport::trimmed).collect();
        Ok((shares?.into_iter().sum(), trimmed.and_then(|trimmed| trimmed.into_iter().max())))
    }

    /// Sessions under random memory limits stay within them, or correctly report what would
    /// suffice. A violation fails the command.
    fn random_limits(&self) -> Result<Vec<Finding>> {
        let trials = self.options.of("8", "100");
        let batches = |most: usize| format!("batch=1..{most}");
        let models: &[(&str, Vec<String>)] = &[
            ("mobilenet_v2_b1", vec![batches(4)]),
            ("minilm_l6_b1_s128", vec![batches(4), "seq=8..256".to_owned()]),
            ("bert_base_b1_s128", vec![batches(2), "seq=8..128".to_owned()]),
            ("efficientnet_b0_b1", vec![batches(4)]),
            ("resnet50_b1", vec![batches(3)]),
        ];
        let mut findings = Vec::new();
        for (case, dims) in models.iter().take(self.options.of(1, models.len())) {
            let mut command = self.command(case, false, &["--random-limits", trials])?;
            for dim in dims {
                command.args(["--random-dim", dim]);
            }
            let report: LimitsReport = serde_json::from_str(capture(&mut command)?.trim())?;
            findings.push(Finding {
                scenario: format!(
                    "{case}: beyond one of {trials} random limits ({} ran, {} were refused)",
                    report.ran,
                    report.refused_sessions + report.refused_runs
                ),
                ours: report.most_over,
                // The budget does not include the graph, the plan and code.
                bound: 16 * MIB,
                reference: None,
                same_bits: report.wrong.is_empty(),
            });
            eprintln!("soaked {case} with random limits");
        }
        Ok(findings)
    }

    /// Returns our report and, in the long form, ONNX Runtime's.
    fn both(&self, case: &str, inputs: bool, arguments: &[&str]) -> Result<(SoakReport, Option<SoakReport>)> {
        let ours = parse(&capture(&mut self.command(case, inputs, arguments)?)?)?;
        if self.options.short {
            return Ok((ours, None));
        }
        let mut command = self.python.script("soak_reference.py");
        command.arg(self.model(case)?).args(arguments);
        if inputs {
            command.arg("--inputs").arg(self.inputs(case));
        }
        // ONNX Runtime may lack a scenario, so its failure does not fail ours.
        let reference = capture(&mut command).and_then(|text| parse(&text));
        let reference = reference.inspect_err(|error| eprintln!("left out: {error:#}")).ok();
        eprintln!("soaked {case} {}", arguments.join(" "));
        Ok((ours, reference))
    }

    /// Returns our report only, on the case's inputs.
    fn soaked(&self, case: &str, arguments: &[&str]) -> Result<SoakReport> {
        parse(&capture(&mut self.command(case, true, arguments)?)?)
    }

    fn command(&self, case: &str, inputs: bool, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(&self.ort);
        // One thread: each further thread of the pool has a stack and scratch memory of its own.
        command.arg("soak").arg(self.model(case)?).args(["--json", "--threads", "1"]).args(arguments);
        if inputs {
            command.arg("--inputs").arg(self.inputs(case));
        }
        Ok(command)
    }

    fn model(&self, case: &str) -> Result<PathBuf> {
        let cases = chosen_cases(&self.cases, &[case.to_owned()])?;
        Ok(self.cases.model(cases.first().context("there is a case")?))
    }

    fn inputs(&self, case: &str) -> PathBuf {
        self.cases.folder.join(case).join("inputs.npz")
    }
}

pub(crate) fn parse(text: &str) -> Result<SoakReport> {
    serde_json::from_str(text.trim()).context("cannot read a report")
}

/// Waits for the report of a process that holds its session open.
fn report(process: &mut Child) -> Result<SoakReport> {
    let output = process.stdout.take().context("the output is piped")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    parse(&line)
}

/// Returns a process's proportional share of file pages, in bytes.
fn file_share(process: &Child) -> Result<u64> {
    let path = Path::new("/proc").join(process.id().to_string()).join("smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    // The kernel divides each file page by the number of processes that map it.
    let kibibytes = text.lines().find_map(|line| line.strip_prefix("Pss_File:")).and_then(|rest| {
        let number = rest.trim().strip_suffix("kB")?;
        number.trim().parse::<u64>().ok()
    });
    kibibytes.map(|kibibytes| kibibytes * 1024).context("the system tells no shares of pages")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(ran: &[u64], dropped: &[u64]) -> SoakReport {
        let cycle = |dropped: &u64| Cycle {
            load_peak: Some(18),
            sessions_peak: Some(35),
            sessions: Some(30),
            ran: ran.iter().copied().map(Some).collect(),
            trimmed: Some(25),
            dropped: Some(*dropped),
        };
        SoakReport {
            baseline: Some(10),
            baseline_rss: Some(100),
            peak_rss: Some(150),
            packed: 0,
            activations_peak: 0,
            same_bits: true,
            cycles: dropped.iter().map(cycle).collect(),
        }
    }

    #[test]
    fn numbers_are_taken_over_the_baseline() {
        let report = report(&[20, 30, 30, 34], &[12, 17, 11]);
        assert_eq!((report.left(), report.growth(), report.trimmed()), (Some(7), Some(50), Some(15)));
        assert_eq!((report.slope(), report.sessions()), (Some(4), Some(20)));
        assert_eq!(report.loading(), [Some(8), Some(25)]);
    }

    #[test]
    fn what_is_not_measured_or_too_much_fails() {
        let finding =
            |ours, same_bits| Finding { scenario: String::new(), ours, bound: 5, reference: None, same_bits };
        assert!(conclude(&[finding(Some(5), true)]).is_ok());
        for bad in [finding(Some(6), true), finding(None, true), finding(Some(5), false)] {
            assert!(conclude(&[bad]).is_err());
        }
    }
}
