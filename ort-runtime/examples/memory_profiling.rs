//! The memory of 100 runs: what the plan says, what the session held, and what the process had
//! resident.
//!
//!     cargo run -p ort-runtime --release --example memory_profiling

#[path = "support/digits.rs"]
mod digits;

use ort_runtime::{Result, Session};

/// Bytes of the process that are resident, where the system tells.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<usize>().ok()? * 1024)
}

pub(crate) fn main() -> Result<()> {
    let session = Session::builder(&digits::model()?).build()?;
    let plan = session.plan(&[("batch", 1)])?;
    println!("planned before any run: {:?} bytes", plan.peak_bytes);
    for (name, bytes) in plan.largest.iter().take(3) {
        println!("    {name}: {bytes} bytes");
    }
    let baseline = resident();
    for seed in 0..100 {
        session.run(&[("image", digits::picture(seed)?.into())])?;
    }
    let peak = resident();
    let memory = session.memory();
    println!(
        "weights {} bytes, {} of them mapped, {} packed",
        memory.weights, memory.weights_mapped, memory.packed
    );
    println!("activations: {} bytes at most, {} now", memory.activations_peak, memory.activations);
    if let (Some(baseline), Some(peak)) = (baseline, peak) {
        println!(
            "resident: {baseline} bytes before, {peak} after 100 runs, {} more",
            peak.saturating_sub(baseline)
        );
    }
    session.trim();
    println!("after trim: {} bytes of activations", session.memory().activations);
    Ok(())
}
