//! Fork-join over jobs that own their part of the results.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// Fewer elements are done before a second thread has started.
const ELEMENTS_PER_THREAD: usize = 1 << 16;

/// The number of threads that work on this many elements.
pub(crate) fn threads_for(elements: usize) -> usize {
    let most = elements / ELEMENTS_PER_THREAD;
    // The system is asked only if it matters, because the answer takes it a while.
    if most < 2 { 1 } else { thread::available_parallelism().map_or(1, usize::from).min(most) }
}

/// Does each job, on up to as many threads as there are jobs.
pub(crate) fn for_each<J: Send>(jobs: Vec<J>, work: impl Fn(J) + Sync) {
    let threads = jobs.len();
    let queue = Mutex::new(jobs);
    let drain = || {
        while let Some(job) = next(&queue) {
            work(job);
        }
    };
    thread::scope(|scope| {
        // This thread is one of them. If the system refuses another, the rest do its jobs.
        for _ in 1..threads {
            if thread::Builder::new().spawn_scoped(scope, drain).is_err() {
                break;
            }
        }
        drain();
    });
}

/// Takes a job off the queue, and releases the lock.
fn next<J>(queue: &Mutex<Vec<J>>) -> Option<J> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).pop()
}
