//! Children of `fork` have a thread pool of their own, whatever the parent's threads did at that
//! moment.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "forking is unsafe")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu::parallel::{Pool, for_each_chunk};

const FORKS: usize = 200;
/// After this a child is taken to hang.
const PATIENCE: Duration = Duration::from_secs(20);
const SIZE: usize = 192;

fn session() -> Result<Session> {
    let mut builder = GraphBuilder::new("product");
    let size = SIZE.to_string();
    let x = builder.input("x", DType::F32, &[&size, &size]);
    let product = builder.node("MatMul", &[x, x], &[])?;
    let result = builder.node("Sin", &[product], &[])?;
    Session::builder(&Model::from_graph(builder.finish(&[result])?)).threads(2).build()
}

fn input() -> Result<Value> {
    let values = (0..SIZE * SIZE).map(|index| (index % 17) as f32 / 17.0).collect();
    Ok(Tensor::from_vec(&[SIZE, SIZE], values)?.into())
}

fn result(session: &Session) -> Result<Vec<f32>> {
    session.run(&[("x", input()?)])?.remove(0).1.tensor()?.to_vec()
}

fn thread_count() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// What a child does: 0 if the answers are right and threads of its own computed them.
fn child(session: &Session, expected: &[f32]) -> i32 {
    for _ in 0..3 {
        if result(session).is_ok_and(|found| found == expected) {
            continue;
        }
        return 1;
    }
    // A machine of one processor has no workers anywhere.
    if Pool::global().capacity() > 1 && thread_count() < 2 { 2 } else { 0 }
}

/// Forks once; how the child ended, or nothing if it did not.
fn fork_once(session: &Session, expected: &[f32]) -> Option<i32> {
    // SAFETY: the child uses what survives a fork: the session, which no other thread uses, and
    // memory of the C library.
    let id = unsafe { libc::fork() };
    assert!(id >= 0, "{}", std::io::Error::last_os_error());
    if id == 0 {
        let code = catch_unwind(AssertUnwindSafe(|| child(session, expected))).unwrap_or(3);
        // SAFETY: it does not return; nothing of the parent's is run or flushed.
        unsafe { libc::_exit(code) };
    }
    let (start, mut status) = (Instant::now(), 0);
    loop {
        // SAFETY: the child is ours, and the status lives long enough.
        let ended = unsafe { libc::waitpid(id, &mut status, libc::WNOHANG) };
        if ended == id {
            return Some(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -status });
        }
        if start.elapsed() > PATIENCE {
            // SAFETY: the child is ours and still there.
            unsafe { (libc::kill(id, libc::SIGKILL), libc::waitpid(id, &mut status, 0)) };
            return None;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn a_child_of_a_busy_process_runs_on_threads_of_its_own() {
    let (ours, other) = (session().unwrap(), session().unwrap());
    let expected = result(&ours).unwrap();
    let (is_over, sum) = (AtomicBool::new(false), AtomicUsize::new(0));
    let outcomes: Vec<Option<i32>> = std::thread::scope(|scope| {
        // Short regions, between which workers take the queue's lock, park and wake up.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for_each_chunk(2, 64, 1, |range| {
                    sum.fetch_add(range.len(), Ordering::Relaxed);
                });
                if sum.load(Ordering::Relaxed).is_multiple_of(4096) {
                    std::thread::sleep(Duration::from_micros(60));
                }
            }
        });
        let outcomes = (0..FORKS).map(|_| fork_once(&ours, &expected)).collect();
        is_over.store(true, Ordering::Relaxed);
        outcomes
    });
    let wrong: Vec<_> = outcomes.iter().enumerate().filter(|(_, outcome)| **outcome != Some(0)).collect();
    assert!(wrong.is_empty(), "{} of {FORKS}: {wrong:?}", wrong.len());
    assert_eq!(result(&other).unwrap(), expected, "the parent's threads are as they were");
}
