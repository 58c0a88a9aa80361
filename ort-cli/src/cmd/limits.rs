//! `ort limits`, which the help does not list: what this processor can do at the most, for the
//! tables that hold times against it.

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use ort_ep_cpu::simd::{Isa, Simd, SimdOp, dispatch};
use serde_json::json;

use crate::args::threads;
use crate::output::say;

/// Measures multiply-adds in registers, and copies within working sets of several sizes; prints one
/// JSON object.
#[derive(Args)]
pub(crate) struct LimitsArgs {
    /// Threads that work at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = threads)]
    threads: usize,
}

pub(crate) fn run(args: &LimitsArgs) -> Result<ExitCode> {
    let threads = args.threads;
    let flops = best(threads, || || dispatch(Isa::current(), MultiplyAdds { rounds: 20_000 }));
    let copies = SETS.map(|set| json!([set, best(threads, || copier(set / threads)).round()]));
    say!(
        "{}",
        json!({"threads": threads, "isa": Isa::current().name(), "flops": flops.round(), "copies": copies})
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Sums that do not wait for each other: enough to hide a latency of four cycles on two units, and
/// few enough for 16 registers.
const SUMS: usize = 12;
/// Bytes of the working sets, about half the second-level cache, of a share of the third, and much
/// more than both.
const SETS: [usize; 3] = [512 << 10, 8 << 20, 128 << 20];
/// Time of one attempt, and how many there are. On a busy machine the best counts, and a short one
/// is the likelier to be left alone.
const BUDGET: Duration = Duration::from_millis(2);
const ATTEMPTS: usize = 150;

/// Multiply-adds in registers.
struct MultiplyAdds {
    rounds: usize,
}

impl SimdOp for MultiplyAdds {
    /// How many operations that were.
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        let (factor, term) = (simd.splat(black_box(0.999)), simd.splat(black_box(0.001)));
        let mut sums = [simd.splat(black_box(1.0)); SUMS];
        for _ in 0..self.rounds {
            for sum in &mut sums {
                *sum = simd.mul_add(*sum, factor, term);
            }
        }
        let last = sums.into_iter().fold(simd.splat(0.0), |all, sum| simd.add(all, sum));
        black_box(simd.horizontal_sum(last));
        (2 * self.rounds * SUMS * S::LANES) as f64
    }
}

/// The most work per second, of all threads together, that `work` did in one attempt; a call says
/// how much it did.
fn best<W: FnMut() -> f64>(threads: usize, make: impl Fn() -> W + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let rates = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut work = make();
                    work();
                    (0..ATTEMPTS).map(|_| rate(&barrier, &mut work)).collect::<Vec<f64>>()
                })
            })
            .collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect::<Vec<_>>()
    });
    let attempts = (0..ATTEMPTS).map(|attempt| rates.iter().filter_map(|rates| rates.get(attempt)).sum());
    attempts.fold(0.0, f64::max)
}

/// The work per second of one thread, beside the others.
fn rate(barrier: &Barrier, work: &mut impl FnMut() -> f64) -> f64 {
    barrier.wait();
    let (start, mut done) = (Instant::now(), 0.0);
    while start.elapsed() < BUDGET {
        done += work();
    }
    done / start.elapsed().as_secs_f64()
}

/// Copies one half of the thread's part of a working set onto the other.
fn copier(bytes: usize) -> impl FnMut() -> f64 {
    let (from, mut to) = (vec![1u8; bytes / 2], vec![0u8; bytes / 2]);
    move || {
        black_box(&mut to).copy_from_slice(black_box(&from));
        bytes as f64
    }
}
