//! Run after run with other inputs and sizes, compared with the CPU.

use std::sync::Arc;

use ort_core::ep::Device;
use ort_core::{Result, ensure};
use ort_testkit::device_models::{Runs, run_on_device};
use ort_testkit::made_up::Given;

use crate::Arguments;

/// Runs the model, prints what was found, and fails where results are too far apart.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let all = |list: &String| list.split(',').map(str::to_owned).collect();
    let given: Given = arguments.sizes.iter().map(|(name, list)| (name.clone(), all(list))).collect();
    let device: Arc<dyn Device> = arguments.open()?;
    let runs = Runs { count: arguments.runs, threads: 2, only_shapes_on_host: arguments.only_shapes_on_host };
    let found = run_on_device(&arguments.model, &given, &device, runs, |_| {})?;
    println!("{}: {found}", arguments.model);
    ensure!(
        found.is_within(arguments.tolerance),
        Fail,
        "{:.1e} apart, beyond {} of the largest value",
        found.worst,
        arguments.tolerance
    );
    Ok(())
}
