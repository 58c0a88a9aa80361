//! `ort plan` with several sizes per dimension: one plan for each combination, and the largest that
//! fits without splitting the batch.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use ort_runtime::Session;
use ort_runtime::plan::PlanReport;
use serde_json::{Map, Value, json};

use super::report::{fits_whole, plan, to_json};
use crate::args::{ModelArgs, human_bytes, table};
use crate::output::{in_line, say, say_json};

/// The most plans of a sweep. Larger numbers are typing errors.
const MOST_PLANS: usize = 4096;

/// The sizes of one combination, and its result.
struct Planned {
    dims: Vec<(String, i64)>,
    peak_bytes: Option<usize>,
    planned_bytes: usize,
    fits: bool,
}

pub(super) fn run(session: &Session, model: &ModelArgs, as_json: bool) -> Result<ExitCode> {
    let mut all = Vec::new();
    let mut shown: Option<PlanReport> = None;
    let mut largest: Option<usize> = None;
    for dims in combinations(&model.dims)? {
        let report = plan(session, &dims)?;
        let (peak_bytes, planned_bytes, fits) =
            (report.peak_bytes, report.planned_bytes, fits_whole(&report));
        // The largest combination is the one that needs the most bytes.
        let is_larger = largest.and_then(|index: usize| all.get(index));
        // Of equal plans the last counts: sizes are usually listed in ascending order.
        let is_larger = is_larger.is_none_or(|best: &Planned| planned_bytes >= best.planned_bytes);
        if fits && is_larger {
            largest = Some(all.len());
        }
        // If nothing fits, show the first plan.
        if shown.is_none() || (fits && is_larger) {
            shown = Some(report);
        }
        all.push(Planned { dims, peak_bytes, planned_bytes, fits });
    }
    let best = largest.and_then(|index| all.get(index));
    match (as_json, shown) {
        (true, Some(report)) => say_json(&json_of(to_json(&report), &all, best))?,
        _ => print(&all, best, model.memory_limit)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the Cartesian product of the sizes. The last dimension varies fastest.
fn combinations(dims: &[(String, Vec<i64>)]) -> Result<Vec<Vec<(String, i64)>>> {
    // The number is checked first, because the product may be too large to list.
    let count = dims.iter().try_fold(1usize, |count, (_, sizes)| count.checked_mul(sizes.len()));
    ensure!(count.is_some_and(|count| count <= MOST_PLANS), "--dim asks for more than {MOST_PLANS} plans");
    let mut all = vec![Vec::new()];
    for (name, sizes) in dims {
        let longer = all.iter().flat_map(|chosen: &Vec<(String, i64)>| {
            sizes.iter().map(move |size| {
                let mut chosen = chosen.clone();
                chosen.push((name.clone(), *size));
                chosen
            })
        });
        all = longer.collect();
    }
    Ok(all)
}

fn json_of(mut object: Value, all: &[Planned], best: Option<&Planned>) -> Value {
    let dims = |planned: &Planned| -> Value {
        planned.dims.iter().map(|(name, size)| (name.clone(), json!(size))).collect::<Map<_, _>>().into()
    };
    let sweep = all.iter().map(|planned| {
        json!({"dims": dims(planned), "peak_bytes": planned.peak_bytes, "planned_bytes": planned.planned_bytes, "fits": planned.fits})
    });
    if let Some(object) = object.as_object_mut() {
        object.insert("sweep".into(), sweep.collect());
        object.insert("largest_that_fits".into(), best.map_or(Value::Null, dims));
    }
    object
}

fn print(all: &[Planned], best: Option<&Planned>, limit: Option<usize>) -> Result<()> {
    let names = all.first().map(|planned| planned.dims.iter().map(|(name, _)| name.as_str()));
    let header: Vec<&str> = names.into_iter().flatten().chain(["peak bytes", "", "fits"]).collect();
    let numbers = header.len() - 1;
    let mut rows = table(&header);
    for planned in all {
        // Values of unknown size are not in the plan, so the peak is a lower bound.
        let open = if planned.peak_bytes.is_none() { "+" } else { "" };
        let sizes = planned.dims.iter().map(|(_, size)| size.to_string());
        let fits = if planned.fits { "yes" } else { "no" };
        rows.add_row(sizes.chain([
            format!("{}{open}", planned.planned_bytes),
            human_bytes(planned.planned_bytes),
            fits.to_string(),
        ]));
    }
    say!("{}", rows.align_right(0..numbers))?;
    if all.iter().any(|planned| planned.peak_bytes.is_none()) {
        say!("\n+ and what only the run can tell")?;
    }
    let bound = limit.map_or("this machine's memory".to_string(), human_bytes);
    match best {
        Some(best) => {
            let sizes: Vec<String> = best.dims.iter().map(|(name, size)| format!("{name}={size}")).collect();
            say!("\nthe largest that fits {bound}: {}", in_line(&sizes.join(" ")))
        }
        None => say!("\nnone fits {bound}"),
    }
}
