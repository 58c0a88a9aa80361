//! `ort bench`: latency, throughput and memory of a model.

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use ort_runtime::{DeviceId, MemoryUse, Session, Tensor, Value};
use serde::Serialize;

use crate::args::{ModelArgs, human_bytes, parts};
use crate::inputs::{explained, gather};
use crate::numbers::{above_zero, positive, seconds, whole};
use crate::operations;
use crate::output::{say, say_json};
use crate::processor;
use crate::resident;

/// Benchmarks a model: load, warm up, measure.
#[derive(Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Print one JSON object on one line.
    #[arg(long)]
    json: bool,
    /// How many seconds to measure.
    #[arg(long, value_name = "S", default_value = "3", value_parser = seconds)]
    seconds: Duration,
    /// Warm-up runs before the measurement.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = whole::<usize>)]
    warmup: usize,
    /// Concurrent callers on one session.
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive::<NonZeroUsize>)]
    concurrency: NonZeroUsize,
    /// Feed each run the next N rows of every input (slices of the first dimension), cyclically.
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>)]
    rows: Option<NonZeroUsize>,
    /// Start N runs per second per caller instead of back to back (fewer if they take longer).
    #[arg(long, value_name = "N", value_parser = above_zero::<f64>)]
    rate: Option<f64>,
}

/// The inputs of one run, by name.
type Given<'a> = Vec<(&'a str, Value)>;

/// The measurements of all callers together.
struct Measured {
    /// The time of each run, sorted ascending.
    times: Vec<Duration>,
    /// The sum of the callers' throughputs, each over its own time. Otherwise the time in which the
    /// last caller finishes its run would count against all.
    runs_per_second: f64,
    /// The CPU time of all threads.
    processor: Option<Duration>,
}

/// The JSON report. Times are in milliseconds and memory in bytes; a field is null if the platform
/// cannot measure it.
#[derive(Serialize)]
struct BenchReport {
    model: String,
    providers: Vec<String>,
    threads: usize,
    opt_level: &'static str,
    load_ms: f64,
    first_ms: f64,
    runs: usize,
    median_ms: f64,
    min_ms: f64,
    mean_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
    /// The mean CPU time of a run, over all threads.
    cpu_ms: Option<f64>,
    runs_per_second: f64,
    /// The FLOP of a run's matmuls and convolutions; null if shapes depend on data.
    operations: Option<u64>,
    baseline_rss: Option<u64>,
    peak_rss: Option<u64>,
    rss_anon: Option<u64>,
    rss_file: Option<u64>,
    planned_peak: Option<usize>,
    arena_peak: usize,
    weights: usize,
    weights_mapped: usize,
    /// The bytes of packed weights in the mapped file of `--cache`.
    weights_cached: usize,
    device_peak: Option<usize>,
    /// The host's arena for dynamically sized values; null without an arena.
    arena: Option<ArenaReport>,
    memory: MemoryReport,
}

/// The session's memory after the last run, by category.
#[derive(Serialize)]
struct MemoryReport {
    total: usize,
    weights_mapped: usize,
    weights_copied: usize,
    weights_packed: usize,
    device_constants: usize,
    slabs: usize,
    workspace: usize,
    outputs: usize,
    dynamic: usize,
    arena: usize,
    idle: usize,
    limit: usize,
}

impl From<&MemoryUse> for MemoryReport {
    fn from(memory: &MemoryUse) -> MemoryReport {
        MemoryReport {
            total: memory.total(),
            weights_mapped: memory.weights_mapped,
            weights_copied: memory.weights_copied,
            weights_packed: memory.packed,
            device_constants: memory.device_constants,
            slabs: memory.slabs,
            workspace: memory.workspace,
            outputs: memory.outputs + memory.outputs_waiting,
            dynamic: memory.dynamic,
            arena: memory.arena,
            idle: memory.idle,
            limit: memory.limit,
        }
    }
}

/// The statistics of an arena, under ONNX Runtime's names.
#[derive(Serialize)]
struct ArenaReport {
    in_use: usize,
    total_allocated: usize,
    max_in_use: usize,
    max_alloc_size: usize,
    num_allocs: u64,
    num_arena_extensions: u64,
    num_arena_shrinkages: u64,
}

impl ArenaReport {
    fn of(session: &Session) -> Option<ArenaReport> {
        // The report describes the host; arenas of other devices go to the log.
        let all = session.allocator_stats();
        let (_, stats) = all.iter().find(|(device, _)| *device == DeviceId::HOST)?;
        Some(ArenaReport {
            in_use: stats.in_use,
            total_allocated: stats.total_allocated,
            max_in_use: stats.max_in_use,
            max_alloc_size: stats.max_alloc_size,
            num_allocs: stats.num_allocs,
            num_arena_extensions: stats.num_arena_extensions,
            num_arena_shrinkages: stats.num_arena_shrinkages,
        })
    }
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    // Measure before the model is opened, so that the report can tell the process from the model.
    let baseline = resident::measure();
    let start = Instant::now();
    let model = args.model.load()?;
    let session = args.model.session(&model)?;
    let load = start.elapsed();
    let inputs = gather(&args.model, &model)?;
    let all: Given<'_> = inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let given = match args.rows {
        Some(rows) => cut(&all, rows.get())?,
        None => vec![all],
    };
    let begin = given.first().with_context(|| {
        let rows = args.rows.map_or(0, NonZeroUsize::get);
        format!(
            "--rows {rows}: the inputs have fewer rows; give {rows} or more with --inputs, --dim or --shape"
        )
    })?;
    args.model.note_split(&session, begin)?;
    let start = Instant::now();
    drop(session.run(begin).map_err(|problem| explained(&args.model, &inputs, problem))?);
    let first = start.elapsed();
    for _ in 0..args.warmup {
        drop(session.run(begin)?);
    }
    let Measured { times, runs_per_second, processor } = measure(&session, &given, args)?;
    let after = resident::measure();
    let memory = session.memory();
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
    let last = times.len().saturating_sub(1) as f64;
    // Percentiles are nearest-rank values of the sorted times.
    let at = |share: f64| times.get((last * share).round() as usize).copied().unwrap_or_default();
    let report = BenchReport {
        model: args.model.name(),
        providers: args.model.providers.names(),
        threads: session.threads(),
        opt_level: args.model.opt_level.name(),
        load_ms: milliseconds(load),
        first_ms: milliseconds(first),
        runs: times.len(),
        median_ms: milliseconds(at(0.5)),
        min_ms: milliseconds(at(0.0)),
        mean_ms: milliseconds(times.iter().sum::<Duration>()) / times.len() as f64,
        p90_ms: milliseconds(at(0.9)),
        p99_ms: milliseconds(at(0.99)),
        cpu_ms: processor.map(|processor| milliseconds(processor) / times.len() as f64),
        runs_per_second,
        operations: operations::count(&model, begin),
        baseline_rss: baseline.now,
        peak_rss: after.peak,
        rss_anon: after.anonymous,
        rss_file: after.file,
        planned_peak: session.plan_for_inputs(begin)?.peak_bytes,
        arena_peak: memory.activations_peak,
        weights: memory.weights,
        weights_mapped: memory.weights_mapped,
        weights_cached: memory.cached,
        device_peak: None,
        arena: ArenaReport::of(&session),
        memory: (&memory).into(),
    };
    for (device, stats) in session.allocator_stats() {
        tracing::info!("arena of {device}\n{stats}");
    }
    if args.json {
        say_json(&report)?;
    } else {
        print_report(&report)?;
        say!("          {}", parts(&memory))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Cuts the inputs into batches of `rows` rows. Rows left over are dropped.
fn cut<'a>(all: &[(&'a str, Value)], rows: usize) -> Result<Vec<Given<'a>>> {
    let mut batches: Vec<Given<'a>> = Vec::new();
    for (index, (name, value)) in all.iter().enumerate() {
        let found = value
            .tensor()
            .ok()
            .and_then(|tensor| Some((tensor, tensor.bytes()?, tensor.shape().split_first()?)));
        let Some((tensor, bytes, (&given, row))) = found else {
            bail!("--rows: input '{name}' is not a tensor of numbers with a first axis; leave --rows out");
        };
        let shape = [&[rows], row].concat();
        let count = given / rows;
        // An input without rows has no bytes either, so the 1 only avoids a division by 0.
        let len = bytes.len() / given.max(1) * rows;
        if index > 0 && batches.len() != count {
            bail!(
                "--rows: input '{name}' has {given} rows, other inputs have another number; give all the same number"
            );
        }
        batches.resize_with(count, Vec::new);
        for (at, batch) in batches.iter_mut().enumerate() {
            // Batches are zero-copy slices of the inputs.
            let part = bytes.slice(at * len..(at + 1) * len);
            batch.push((*name, Tensor::from_bytes(tensor.dtype(), &shape, part)?.into()));
        }
    }
    Ok(batches)
}

/// Runs all callers for the requested time.
fn measure(session: &Session, given: &[Given<'_>], args: &BenchArgs) -> Result<Measured> {
    // The clock counts all threads of the process, so the difference covers every caller.
    let busy = processor::time();
    let one = || {
        let begin = Instant::now();
        call(session, given, args).map(|times| (times, begin.elapsed()))
    };
    let callers = std::thread::scope(|scope| -> Result<Vec<(Vec<Duration>, Duration)>> {
        // This thread is one of the callers.
        let others: Vec<_> = (1..args.concurrency.get()).map(|_| scope.spawn(one)).collect();
        let mut callers = vec![one()?];
        for other in others {
            callers.push(other.join().map_err(|_| anyhow::anyhow!("a caller panicked"))??);
        }
        Ok(callers)
    })?;
    let processor = processor::time().zip(busy).and_then(|(now, then)| now.checked_sub(then));
    let rate = |(times, elapsed): &(Vec<Duration>, Duration)| times.len() as f64 / elapsed.as_secs_f64();
    let runs_per_second = callers.iter().map(rate).sum();
    let mut times: Vec<Duration> = callers.into_iter().flat_map(|(times, _)| times).collect();
    times.sort();
    Ok(Measured { times, runs_per_second, processor })
}

/// Runs one caller and returns the time of each run.
fn call(session: &Session, given: &[Given<'_>], args: &BenchArgs) -> Result<Vec<Duration>> {
    let begin = Instant::now();
    let mut times = Vec::new();
    for given in given.iter().cycle() {
        if let Some(rate) = args.rate {
            // A run that is overdue starts at once.
            let due = Duration::try_from_secs_f64(times.len() as f64 / rate)?;
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
        }
        // A caller runs at least once, because the statistics need one run.
        if !times.is_empty() && begin.elapsed() >= args.seconds {
            break;
        }
        let start = Instant::now();
        drop(session.run(given)?);
        times.push(start.elapsed());
    }
    Ok(times)
}

fn print_report(report: &BenchReport) -> Result<()> {
    let bytes = |bytes: Option<u64>| bytes.map_or("unknown".to_string(), |bytes| human_bytes(bytes as usize));
    say!("{} on {} with {} threads", report.model, report.providers.join(", "), report.threads)?;
    say!(
        "  time    median {:.3} ms, min {:.3}, mean {:.3}, p90 {:.3}, p99 {:.3} over {} runs",
        report.median_ms,
        report.min_ms,
        report.mean_ms,
        report.p90_ms,
        report.p99_ms,
        report.runs
    )?;
    let cpu = report.cpu_ms.map_or("unknown".to_string(), |cpu| format!("{cpu:.3} ms per run"));
    let speed = report.operations.map_or("unknown".to_string(), |operations| {
        format!(
            "{:.3} GFLOP per run, {:.1} GFLOP/s",
            operations as f64 / 1e9,
            // FLOP per millisecond, divided by a million, are GFLOP/s.
            operations as f64 / 1e6 / report.median_ms
        )
    });
    say!("  work    {:.1} runs per second; CPU time {cpu}; GEMM/Conv work {speed}", report.runs_per_second)?;
    say!("  start   load {:.1} ms, first run {:.1} ms", report.load_ms, report.first_ms)?;
    say!(
        "  memory  peak {} over a baseline of {}; activations {} (planned {}); weights of the model {}",
        bytes(report.peak_rss.zip(report.baseline_rss).map(|(peak, base)| peak.saturating_sub(base))),
        bytes(report.baseline_rss),
        human_bytes(report.arena_peak),
        report.planned_peak.map_or("unknown".to_string(), human_bytes),
        human_bytes(report.weights),
    )
}
