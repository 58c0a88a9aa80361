//! What the pool's threads share and how they wait, in one place: the models in `ort-loom` have the
//! same names and try all orders.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::{thread, thread_local};

/// The standard library's, with the signatures of `parking_lot`. That one queues all waiting
/// threads of the process in one table, whose locks a `fork` may find held by threads that the
/// child lacks; here all is in the pool's own words, and a child has a pool of its own.
#[derive(Debug)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

/// The guard is away only while it waits.
pub(crate) struct MutexGuard<'a, T>(Option<std::sync::MutexGuard<'a, T>>);

#[derive(Debug)]
pub(crate) struct Condvar(std::sync::Condvar);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Nothing is left undone in the middle where a holder panics, so poison says nothing.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[allow(clippy::expect_used, reason = "only `Condvar::wait` takes the guard out, and puts it back")]
    fn deref(&self) -> &T {
        self.0.as_ref().expect("a held lock")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[allow(clippy::expect_used, reason = "only `Condvar::wait` takes the guard out, and puts it back")]
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("a held lock")
    }
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(held) = guard.0.take() {
            guard.0 = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }
}

/// How long an idle worker looks for new work before it parks, and a caller for the end of its
/// region.
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
