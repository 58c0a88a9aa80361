//! Runs test-case folders in every session configuration: the folders are arguments, or lines of
//! standard input. Prints a line of JSON for each, the verdict, as soon as it is known.

use std::cell::RefCell;
use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ort_core::{Result, error};
use ort_ep_cpu as _;
use ort_testkit::{Verdict, check_configurations};

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

fn main() -> Result<()> {
    std::panic::set_hook(Box::new(|panic| PANIC.with(|place| *place.borrow_mut() = panic.to_string())));
    let folders: Vec<String> = std::env::args().skip(1).collect();
    if !folders.is_empty() {
        return folders.iter().try_for_each(|folder| answer(folder));
    }
    for line in std::io::stdin().lock().lines() {
        answer(&line.map_err(|problem| error!(Fail, "{problem}"))?)?;
    }
    Ok(())
}

fn answer(folder: &str) -> Result<()> {
    let outcome = catch_unwind(AssertUnwindSafe(|| check_configurations(Path::new(folder))));
    let verdict = outcome.unwrap_or_else(|_| Ok(Verdict::panicked(PANIC.with(|place| place.take()))))?;
    let line = serde_json::to_string(&verdict).map_err(|problem| error!(Fail, "{problem}"))?;
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).map_err(|problem| error!(Fail, "{problem}"))
}
