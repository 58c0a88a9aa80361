//! The machine's peak compute and copy bandwidth, measured by the hidden command `ort limits`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::workspace::capture;

/// The limits at one thread count.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Limits {
    pub(crate) threads: usize,
    isa: String,
    /// float32 FLOP/s of a register-resident FMA loop.
    pub(crate) flops: f64,
    /// Sizes of working sets in bytes, each with the bytes per second that a copy in it reads and
    /// writes.
    copies: Vec<(f64, f64)>,
}

impl Limits {
    /// Measures the limits at each thread count.
    pub(crate) fn measure(ort: &Path, threads: &[usize]) -> Result<Vec<Limits>> {
        let measure = |threads: &usize| -> Result<Limits> {
            let text = capture(Command::new(ort).args(["limits", "--threads", &threads.to_string()]))?;
            serde_json::from_str(&text).context("cannot read the machine's limits")
        };
        threads.iter().map(measure).collect()
    }

    /// Returns the copy bandwidth, in bytes per second, of the smallest measured working set that
    /// holds `bytes`.
    pub(crate) fn bandwidth(&self, bytes: f64) -> f64 {
        // `find` relies on the ascending order in which `ort limits` lists the sets.
        let holds = self.copies.iter().find(|(set, _)| *set >= bytes).or(self.copies.last());
        holds.map_or(f64::NAN, |(_, speed)| *speed)
    }

    /// Describes the limits in one line.
    pub(crate) fn describe(&self) -> String {
        let copies = self.copies.iter();
        let copies: Vec<String> = copies
            .map(|(set, speed)| format!("{:.1} GB/s in {:.1} MiB", speed / 1e9, set / 1048576.0))
            .collect();
        format!(
            "{} threads ({}): {:.1} GFLOP/s float32 in registers; copies {}",
            self.threads,
            self.isa,
            self.flops / 1e9,
            copies.join(", ")
        )
    }
}

/// Returns the limits measured at `threads`.
pub(crate) fn at(limits: &[Limits], threads: usize) -> Result<&Limits> {
    limits.iter().find(|limits| limits.threads == threads).context("no limits for these threads")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_set_that_holds_it_bounds_a_kernel() {
        let limits = Limits {
            threads: 1,
            isa: "avx2".to_owned(),
            flops: 1e11,
            copies: vec![(1000.0, 3e10), (2000.0, 2e10), (3000.0, 1e10)],
        };
        let speeds = [1.0, 1000.0, 1001.0, 2500.0, 9000.0].map(|bytes| limits.bandwidth(bytes) / 1e10);
        assert_eq!(speeds, [3.0, 3.0, 2.0, 1.0, 1.0]);
    }
}
