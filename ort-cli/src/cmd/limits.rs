//! `ort limits`, a hidden command: the roofline of this CPU, that is its peak FLOP/s and copy
//! bandwidth.
//!
//! Benchmarks compare their times with these limits.

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use ort_ep_cpu::simd::Isa;
use ort_ep_cpu::simd::roofline::multiply_adds;
use serde_json::json;

use crate::args::threads;
use crate::output::say;

/// Measures register-resident multiply-adds, and copies within working sets of several sizes.
/// Prints one JSON object.
#[derive(Args)]
pub(crate) struct LimitsArgs {
    /// Threads that measure at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = threads)]
    threads: usize,
}

pub(crate) fn run(args: &LimitsArgs) -> Result<ExitCode> {
    let threads = args.threads;
    let flops = best(threads, || || multiply_adds(Isa::current(), 20_000));
    let copies = SETS.map(|set| json!([set, best(threads, || copier(set / threads)).round()]));
    say!(
        "{}",
        json!({"threads": threads, "isa": Isa::current().name(), "flops": flops.round(), "copies": copies})
    )?;
    Ok(ExitCode::SUCCESS)
}

/// The working sets in bytes: about half of L2, about half of a share of L3, and far beyond both.
const SETS: [usize; 3] = [512 << 10, 8 << 20, 128 << 20];
/// The duration of one attempt, and the number of attempts. The best one counts: on a busy machine
/// a short attempt is more likely to run undisturbed.
const BUDGET: Duration = Duration::from_millis(2);
const ATTEMPTS: usize = 150;

/// Returns the best rate of all attempts, in work per second, summed over the threads. Each call of
/// `work` returns the work that it did.
fn best<W: FnMut() -> f64>(threads: usize, make: impl Fn() -> W + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let rates = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut work = make();
                    // Warm up caches and page in the buffers.
                    work();
                    (0..ATTEMPTS).map(|_| rate(&barrier, &mut work)).collect::<Vec<f64>>()
                })
            })
            .collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect::<Vec<_>>()
    });
    // Rates of one attempt belong together, so they are summed before the best is chosen.
    let attempts = (0..ATTEMPTS).map(|attempt| rates.iter().filter_map(|rates| rates.get(attempt)).sum());
    attempts.fold(0.0, f64::max)
}

/// Returns the work per second of one attempt of one thread. The barrier makes all threads start
/// together.
fn rate(barrier: &Barrier, work: &mut impl FnMut() -> f64) -> f64 {
    barrier.wait();
    let (start, mut done) = (Instant::now(), 0.0);
    while start.elapsed() < BUDGET {
        done += work();
    }
    done / start.elapsed().as_secs_f64()
}

/// Returns a function that copies one half of a thread's working set onto the other.
fn copier(bytes: usize) -> impl FnMut() -> f64 {
    let (from, mut to) = (vec![1u8; bytes / 2], vec![0u8; bytes / 2]);
    move || {
        black_box(&mut to).copy_from_slice(black_box(&from));
        // A copy reads one half and writes the other.
        bytes as f64
    }
}
