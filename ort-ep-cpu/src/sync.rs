//! What the pool's threads share and how they wait, in one place: the models in `ort-loom` have the same names and try
//! all orders.

use std::time::{Duration, Instant};

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::{thread, thread_local};

pub(crate) use parking_lot::{Condvar, Mutex};

/// How long an idle worker looks for new work before it parks, and a caller for the end of its region.
const SPIN: Duration = Duration::from_micros(40);

/// Looks between two looks at the clock.
const LOOKS: usize = 32;

/// Looks again and again whether something `is` so, for a while. Returns what it saw last.
pub(crate) fn spin_until(is: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // Asking costs next to nothing as long as nobody writes, the clock does not.
        for _ in 0..LOOKS {
            if is() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

/// Workers stay as long as the process; those of models end.
pub(crate) fn worker_goes_on() -> bool {
    true
}
