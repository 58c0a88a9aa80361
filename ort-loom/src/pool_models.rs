//! The thread pool: every task runs once, a call returns only after all workers have left its
//! region, and no worker sleeps while it is needed.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use loom::thread;

use crate::explore;
use crate::pool::Pool;
use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, end_worker};

/// Runs `tasks` tasks. Two checks show that all of them happened before `run` returned: the relaxed
/// loads, which could otherwise miss an increment, and the drops of the atomics, here and in the
/// region, which otherwise fail.
fn region(pool: &Pool, tasks: usize) {
    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(pool.capacity(), tasks, &|task| {
        counts[task].fetch_add(1, Ordering::Relaxed);
    });
    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "a task did not run once");
}

/// Runs a region that only all threads together can finish. A worker that misses its wake-up
/// deadlocks the others, which loom reports. The workers end after it.
fn all_together(pool: &Pool) {
    let (arrived, all_arrived) = (Mutex::new(0), Condvar::new());
    let (threads, caller) = (pool.capacity(), thread::current().id());
    pool.run(threads, threads, &|_| {
        let mut arrived = arrived.lock();
        *arrived += 1;
        while *arrived < threads {
            all_arrived.wait(&mut arrived);
        }
        // Each thread that wakes up wakes the next: our condition variable has no `notify_all`.
        all_arrived.notify_one();
        if thread::current().id() != caller {
            end_worker();
        }
    });
}

/// Runs regions with these task counts one after the other, for several concurrent callers, on a
/// pool of `capacity` threads.
fn check<const CALLERS: usize>(preemptions: usize, capacity: usize, regions: [&'static [usize]; CALLERS]) {
    explore(Some(preemptions), move || {
        let pool = Arc::new(Pool::new(capacity));
        let call = |tasks: &'static [usize]| {
            let pool = Arc::clone(&pool);
            move || tasks.iter().for_each(|tasks| region(&pool, *tasks))
        };
        let others = regions.iter().skip(1).map(|tasks| thread::spawn(call(tasks)));
        let others: Vec<_> = others.collect();
        // The first caller is this thread, which leaves loom one thread less to interleave.
        regions.iter().take(1).for_each(|tasks| call(tasks)());
        others.into_iter().for_each(|other| other.join().unwrap());
        all_together(&pool);
    });
}

#[test]
fn a_parked_worker_wakes_up() {
    check(3, 2, [&[]]);
    check(2, 3, [&[]]);
}

#[test]
fn a_region_ends_when_its_worker_has_left() {
    check(3, 2, [&[2]]);
    check(2, 2, [&[3, 2]]);
}

#[test]
fn two_workers_share_a_region() {
    check(1, 3, [&[3]]);
}

#[test]
fn two_callers_share_a_worker() {
    check(2, 2, [&[2], &[2]]);
}

#[test]
fn a_panic_arrives_when_all_tasks_have_ended() {
    explore(Some(2), || {
        let pool = Pool::new(2);
        let ran = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(2, 2, &|task| {
                ran.fetch_add(1, Ordering::Relaxed);
                // Unlike `panic!`, this prints nothing.
                resume_unwind(Box::new(task));
            });
        }));
        assert!(result.is_err_and(|payload| payload.is::<usize>()));
        assert_eq!(ran.load(Ordering::Relaxed), 2);
        all_together(&pool);
    });
}
