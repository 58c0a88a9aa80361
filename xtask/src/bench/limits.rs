//! The machine's peak compute and copy bandwidth, measured by the hidden command `ort limits`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::isa::Isa;
use crate::workspace::capture;

/// The limits at one thread count.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Limits {
    pub(crate) threads: usize,
    /// What `--isa` allows.
    #[serde(skip)]
    allowed: Isa,
    /// The instruction set that ours uses.
    isa: String,
    /// float32 FLOP/s of a register-resident FMA loop.
    pub(crate) flops: f64,
    /// Sizes of working sets in bytes, each with the bytes per second that a copy in it reads and
    /// writes.
    copies: Vec<(f64, f64)>,
}

impl Limits {
    /// Measures the limits of each instruction set and thread count.
    pub(crate) fn measure(ort: &Path, settings: &[(Isa, usize)]) -> Result<Vec<Limits>> {
        let measure = |&(allowed, threads): &(Isa, usize)| -> Result<Limits> {
            let mut command = Command::new(ort);
            command.args(["limits", "--threads", &threads.to_string()]);
            let text = capture(command.envs(allowed.variables().iter().copied()))?;
            let limits: Limits = serde_json::from_str(&text).context("cannot read the machine's limits")?;
            if let Some(name) = allowed.name() {
                ensure!(limits.isa == name, "this processor has no {name}: it has {}", limits.isa);
            }
            Ok(Limits { allowed, ..limits })
        };
        settings.iter().map(measure).collect()
    }

    /// Names the instruction set of a row, and says whether others were left unused.
    pub(crate) fn isa(&self) -> String {
        match self.allowed {
            Isa::Native => self.isa.clone(),
            Isa::Avx2 | Isa::Avx512 => format!("{} at most", self.isa),
        }
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
            "{} threads, {}: {:.1} GFLOP/s float32 in registers; copies {}",
            self.threads,
            self.isa(),
            self.flops / 1e9,
            copies.join(", ")
        )
    }
}

/// Returns the limits of an instruction set and thread count.
pub(crate) fn at(limits: &[Limits], (isa, threads): (Isa, usize)) -> Result<&Limits> {
    let fits = |limits: &&Limits| limits.allowed == isa && limits.threads == threads;
    limits.iter().find(fits).context("no limits for these threads")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_set_that_holds_it_bounds_a_kernel() {
        let limits = Limits {
            threads: 1,
            allowed: Isa::Native,
            isa: "avx2".to_owned(),
            flops: 1e11,
            copies: vec![(1000.0, 3e10), (2000.0, 2e10), (3000.0, 1e10)],
        };
        let speeds = [1.0, 1000.0, 1001.0, 2500.0, 9000.0].map(|bytes| limits.bandwidth(bytes) / 1e10);
        assert_eq!(speeds, [3.0, 3.0, 2.0, 1.0, 1.0]);
    }
}
