//! The memory budget under concurrent reservations, releases and advances: no limit is exceeded and
//! no byte is lost.

use std::sync::Arc;

use loom::thread;

use crate::budget::{Budget, Category};
use crate::{AllocError, explore};

/// What a thread of a model does with a budget.
type Step = fn(&Arc<Budget>);

/// Runs `steps` concurrently on the budgets that `make` creates, the first of which is the
/// outermost. Checks the peaks against the limits, and afterwards that everything was released.
fn check<const THREADS: usize>(
    preemptions: Option<usize>,
    make: fn() -> Vec<Arc<Budget>>,
    steps: [(usize, Step); THREADS],
) {
    explore(preemptions, move || {
        let budgets = make();
        let available: Vec<usize> = budgets.iter().map(|budget| budget.available()).collect();
        let start = |(budget, step): (usize, Step)| {
            let budget = Arc::clone(&budgets[budget]);
            thread::spawn(move || step(&budget))
        };
        let threads = steps.map(start);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for (budget, available) in budgets.iter().zip(available) {
            assert!(budget.peak() <= budget.limit().unwrap(), "the limit was passed");
            assert_eq!((budget.in_use(), budget.activation_in_use()), (0, 0));
            assert!(budget.largest().is_empty());
            assert_eq!(budget.available(), available, "bytes were lost or given back twice");
        }
    });
}

/// Reserves `BYTES`, unless refused, and releases them.
fn take<const BYTES: usize>(budget: &Arc<Budget>) {
    match budget.reserve(Category::Slab, BYTES) {
        Ok(held) => assert!(held.bytes() == BYTES && budget.in_use() >= BYTES),
        Err(problem) => {
            assert!(matches!(problem, AllocError::BudgetExceeded { needed, .. } if needed == BYTES))
        }
    }
}

/// Reserves 50 bytes and shrinks the reservation to 20 before releasing it.
fn take_50_and_shrink(budget: &Arc<Budget>) {
    if let Ok(mut held) = budget.reserve(Category::Output, 50) {
        held.shrink_to(20);
    }
}

/// Takes an advance of 40 bytes, which must then be reservable, and reserves more than it, which
/// may be refused.
fn advance_40(budget: &Arc<Budget>) {
    let Ok(advance) = budget.advance(40) else { return };
    // Twice, because what is released must be reservable from the advance again.
    for _ in 0..2 {
        drop(advance.budget().reserve(Category::Slab, 40).unwrap());
    }
    let more = advance.budget().reserve(Category::Slab, 60);
    if more.is_err() {
        drop(advance.budget().reserve(Category::Slab, 40).unwrap());
    }
    // The reservation outlives the advance.
    drop(advance);
    drop(more);
}

/// Ends an advance of 40 bytes while another thread reserves 60 bytes from it, 20 of them beyond
/// it, and releases them.
fn end_while_used(budget: &Arc<Budget>) {
    let Ok(advance) = budget.advance(40) else { return };
    let from = Arc::clone(advance.budget());
    let other = thread::spawn(move || {
        let held = [30, 30].map(|bytes| from.reserve(Category::Output, bytes));
        drop(held);
        from
    });
    drop(advance);
    // Drop the advance's budget only after the join, because loom does not model the ordering of
    // the standard library's `Arc`.
    drop(other.join().unwrap());
}

fn one() -> Vec<Arc<Budget>> {
    vec![Budget::new(Some(100))]
}

/// One outer budget and two within it, the second of which has a limit of its own.
fn nested() -> Vec<Arc<Budget>> {
    let shared = Budget::new(Some(100));
    let parts = [Budget::within(&shared, None), Budget::within(&shared, Some(70))];
    [shared].into_iter().chain(parts).collect()
}

#[test]
fn two_reserve() {
    check(None, one, [(0, take::<60>), (0, take_50_and_shrink)]);
}

#[test]
fn three_reserve() {
    // Three threads have too many interleavings to explore all of them.
    check(Some(1), one, [(0, take::<60>), (0, take::<60>), (0, take_50_and_shrink)]);
}

#[test]
fn two_reserve_within_another_budget() {
    check(Some(3), nested, [(1, take::<60>), (2, take::<60>)]);
    check(Some(3), nested, [(2, take::<60>), (2, take_50_and_shrink)]);
}

#[test]
fn three_reserve_within_another_budget() {
    check(Some(1), nested, [(0, take::<60>), (1, take::<60>), (2, take_50_and_shrink)]);
}

#[test]
fn what_was_set_aside_is_there_whatever_others_reserve() {
    check(Some(2), one, [(0, advance_40), (0, take::<60>)]);
    check(Some(1), one, [(0, advance_40), (0, take::<60>), (0, take::<30>)]);
    check(Some(2), nested, [(1, advance_40), (2, take::<60>)]);
}

#[test]
fn an_advance_ends_while_its_reservations_come_and_go() {
    check(Some(3), one, [(0, end_while_used)]);
    check(Some(1), nested, [(2, end_while_used), (1, take::<60>)]);
}

#[test]
fn two_advances() {
    check(Some(2), one, [(0, advance_40), (0, advance_40)]);
}
