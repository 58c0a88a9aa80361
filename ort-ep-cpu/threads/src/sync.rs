//! Synchronisation primitives of the pool, in one place.
//!
//! The models in `ort-loom` replace this module by one with the same names and explore all
//! interleavings.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::{thread, thread_local};

/// A `std` mutex with the signatures of `parking_lot`. `parking_lot` queues all waiting threads of
/// the process in one global table. A `fork` may find that table's locks held by threads that the
/// child lacks. Here all state is in the pool itself, and a child creates its own pool.
#[derive(Debug)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

/// A held lock. The inner guard is absent only during `Condvar::wait`.
pub(crate) struct MutexGuard<'a, T>(Option<std::sync::MutexGuard<'a, T>>);

#[derive(Debug)]
pub(crate) struct Condvar(std::sync::Condvar);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Locks, ignoring poison: no holder leaves an invariant broken if it panics.
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

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// How long an idle worker spins for new work, and a caller for the end of its region, before
/// parking.
const SPIN: Duration = Duration::from_micros(40);

/// Polls between two reads of the clock.
const LOOKS: usize = 32;

/// Polls a condition until it holds or [`SPIN`] has passed. Returns the last result.
pub(crate) fn spin_until(is: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // Polling is nearly free while no other core writes the cache line; reading the clock is
        // not.
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

/// Returns true: real workers live as long as the process. Those of the loom models end.
pub(crate) fn worker_goes_on() -> bool {
    true
}
