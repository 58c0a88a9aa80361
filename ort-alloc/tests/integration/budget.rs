//! Budgets: nothing passes the limit, everything comes back, and a refusal says what holds the
//! memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_alloc::{
    AllocError, Allocator, Arena, ArenaConfig, Budget, BudgetedAllocator, Category, HostAllocator,
    allocate_in,
};
use proptest::prelude::*;

proptest! {
    /// Any sequence of reserving, shrinking and dropping agrees with plain sums.
    #[test]
    fn counts_agree_with_sums(steps in prop::collection::vec((0..3u8, 0..6usize, 0..400usize), 0..60)) {
        let budget = Budget::new(Some(1000));
        let mut held = Vec::new();
        let (mut peak, mut activation_peak) = (0, 0);
        for (action, which, bytes) in steps {
            let sum: usize = held.iter().map(ort_alloc::Reservation::bytes).sum();
            match action {
                0 => match budget.reserve(Category::ALL[which], bytes) {
                    Ok(reservation) => held.push(reservation),
                    Err(error) => {
                        prop_assert!(sum + bytes > 1000);
                        let exceeded = matches!(
                            error,
                            AllocError::BudgetExceeded { needed, available, .. }
                                if needed == bytes && available == 1000 - sum
                        );
                        prop_assert!(exceeded);
                    }
                },
                1 if which < held.len() => held[which].shrink_to(bytes),
                2 if which < held.len() => drop(held.swap_remove(which)),
                _ => {}
            }
            let of = |wanted: &dyn Fn(Category) -> bool| -> usize {
                held.iter().filter(|held| wanted(held.category())).map(ort_alloc::Reservation::bytes).sum()
            };
            peak = peak.max(of(&|_| true));
            activation_peak = activation_peak.max(of(&Category::is_activation));
            prop_assert_eq!(budget.in_use(), of(&|_| true));
            prop_assert_eq!(budget.available(), 1000 - of(&|_| true));
            prop_assert_eq!(budget.activation_in_use(), of(&Category::is_activation));
            for category in Category::ALL {
                prop_assert_eq!(budget.in_use_of(category), of(&|other| other == category));
            }
        }
        prop_assert_eq!((budget.peak(), budget.activation_peak()), (peak, activation_peak));
        drop(held);
        prop_assert_eq!((budget.in_use(), budget.activation_in_use()), (0, 0));
        budget.reset_peak();
        prop_assert_eq!((budget.peak(), budget.activation_peak()), (0, 0));
    }
}

proptest! {
    /// Any sequence over a budget and an advance in it agrees with plain sums: what was set aside
    /// can always be had.
    #[test]
    fn an_advance_is_its_owners(
        set_aside in 0..600usize,
        steps in prop::collection::vec((any::<bool>(), 0..3u8, 0..6usize, 0..300usize), 0..60),
        end in 0..60usize,
    ) {
        let budget = Budget::new(Some(1000));
        let mut advance = Some(budget.advance(set_aside).map_err(|problem| TestCaseError::fail(problem.to_string()))?);
        let advanced = advance.as_ref().map(|advance| advance.budget().clone());
        let mut held: [Vec<ort_alloc::Reservation>; 2] = Default::default();
        for (index, (own, action, which, bytes)) in steps.into_iter().enumerate() {
            if index == end {
                advance = None;
            }
            let sum = |held: &[ort_alloc::Reservation]| -> usize { held.iter().map(ort_alloc::Reservation::bytes).sum() };
            let aside = advance.as_ref().map_or(0, |_| set_aside);
            let place = usize::from(own);
            let from = advanced.as_ref().filter(|_| own).unwrap_or(&budget);
            match action {
                0 => {
                    // After the end what is left of the advance is everybody's.
                    let limit = match own {
                        true => 1000 - sum(&held[0]),
                        false => 1000 - sum(&held[1]).max(aside),
                    };
                    let outcome = from.reserve(Category::ALL[which], bytes);
                    prop_assert_eq!(outcome.is_ok(), sum(&held[place]) + bytes <= limit);
                    held[place].extend(outcome);
                }
                1 if which < held[place].len() => held[place][which].shrink_to(bytes),
                2 if which < held[place].len() => drop(held[place].swap_remove(which)),
                _ => {}
            }
            let aside = advance.as_ref().map_or(0, |_| set_aside);
            prop_assert_eq!(budget.in_use(), sum(&held[0]) + sum(&held[1]));
            prop_assert_eq!(budget.available(), 1000 - sum(&held[0]) - sum(&held[1]).max(aside));
        }
        drop((held, advance));
        prop_assert_eq!((budget.in_use(), budget.available()), (0, 1000));
    }
}

#[test]
fn no_size_of_a_refused_request_changes_an_advance() -> Result<(), AllocError> {
    for limit in [Some(1000), None] {
        let budget = Budget::new(limit);
        let before = budget.available();
        let advance = budget.advance(100)?;
        let held = advance.budget().reserve(Category::Output, 50)?;
        for bytes in [usize::MAX, usize::MAX - 49] {
            let refused = advance.budget().reserve(Category::Output, bytes).err();
            assert!(matches!(refused, Some(AllocError::BudgetExceeded { needed, .. }) if needed == bytes));
            assert_eq!((budget.in_use(), budget.available()), (50, before - 100), "{bytes}");
        }
        drop(advance.budget().reserve(Category::Output, 50)?);
        drop((held, advance));
        assert_eq!((budget.in_use(), budget.available()), (0, before));
    }
    Ok(())
}

#[test]
fn a_refusal_says_what_was_needed_what_there_was_and_what_to_try() -> Result<(), AllocError> {
    let budget = Budget::new(Some(1000));
    let _weights = budget.reserve(Category::Weights, 100)?;
    let _slab = budget.reserve(Category::Slab, 600)?;
    let message = budget.reserve(Category::Workspace, 301).err().map(|error| error.to_string());
    let expected = "over the memory limit: 301 bytes were needed for workspace, but 300 bytes of the limit of 1000 bytes are free \
                    (700 bytes in use: planned activations 600 bytes, weights 100 bytes); use a smaller batch or sequence, fewer runs \
                    at a time, or a larger limit";
    assert_eq!(message.as_deref(), Some(expected));
    assert!(budget.reserve(Category::Output, usize::MAX).is_err());
    assert_eq!(budget.in_use(), 700);
    Ok(())
}

#[test]
fn without_a_limit_everything_is_counted_and_only_overflow_is_refused() -> Result<(), AllocError> {
    let budget = Budget::new(None);
    let _held = budget.reserve(Category::Dynamic, usize::MAX - 5)?;
    assert_eq!((budget.limit(), budget.available()), (None, 5));
    assert!(budget.reserve(Category::Dynamic, 6).is_err());
    Ok(())
}

#[test]
fn a_buffer_carries_its_reservation() -> Result<(), AllocError> {
    let budget = Budget::new(Some(1 << 20));
    let host = HostAllocator::new();
    let buffer = allocate_in(&budget, Category::Output, &host, 1000, 64)?;
    let shared = buffer.freeze();
    let view = shared.bytes();
    drop(shared);
    assert_eq!(budget.in_use_of(Category::Output), 1000);
    drop(view);
    assert_eq!((budget.in_use(), budget.peak_of(Category::Output)), (0, 1000));
    // What the allocator refuses is not left reserved.
    assert!(allocate_in(&budget, Category::Output, &host, 1000, 3).is_err());
    assert_eq!(budget.in_use(), 0);
    Ok(())
}

#[test]
fn an_arena_over_a_budgeted_allocator_stays_inside_it() -> Result<(), AllocError> {
    let budget = Budget::new(Some(3 << 20));
    let inner: Arc<dyn Allocator> = Arc::new(BudgetedAllocator {
        inner: Arc::<HostAllocator>::default(),
        budget: Arc::clone(&budget),
        category: Category::Dynamic,
    });
    let arena = Arena::new(inner, ArenaConfig::default());
    let small = arena.allocate(1000, 64)?;
    assert_eq!(budget.in_use(), 1 << 20);
    // The next power of two would pass the budget; the arena settles for what is left.
    let large = arena.allocate(1_900_000, 64)?;
    assert!(budget.in_use() <= 3 << 20);
    assert!(matches!(arena.allocate(1 << 20, 64), Err(AllocError::BudgetExceeded { .. })));
    drop((small, large));
    // What is free goes back before a request is refused.
    drop(arena.allocate(3 << 20, 64)?);
    arena.trim();
    assert_eq!(budget.in_use(), 0);
    Ok(())
}

#[test]
fn threads_together_never_pass_the_limit() {
    let budget = Budget::new(Some(1000));
    let refused = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (budget, refused) = (&budget, &refused);
            scope.spawn(move || {
                for round in 0..5000usize {
                    match budget.reserve(Category::ALL[(thread + round) % 6], 100 + round % 300) {
                        Ok(reservation) => assert!(budget.in_use() <= 1000 && reservation.bytes() >= 100),
                        Err(_) => drop(refused.fetch_add(1, Ordering::Relaxed)),
                    }
                }
            });
        }
    });
    assert_eq!((budget.in_use(), budget.activation_in_use()), (0, 0));
    assert!(budget.peak() <= 1000 && refused.into_inner() < 20_000);
}

proptest! {
    /// Budgets within one another count like one, and a refusal takes nothing anywhere.
    #[test]
    fn budgets_within_a_budget_share_its_limit(
        steps in prop::collection::vec((any::<bool>(), 0..3usize, 0..400usize), 0..60),
    ) {
        let shared = Budget::new(Some(1000));
        let parts = [Budget::within(&shared, None), Budget::within(&shared, Some(300))];
        let parts = [parts[0].clone(), parts[1].clone(), Budget::within(&parts[1], Some(200))];
        let mut held: Vec<(usize, ort_alloc::Reservation)> = Vec::new();
        for (takes, which, bytes) in steps {
            if takes {
                let available = parts[which].available();
                match parts[which].reserve(Category::Slab, bytes) {
                    Ok(reservation) => held.push((which, reservation)),
                    Err(_) => prop_assert!(bytes > available),
                }
            } else if which < held.len() {
                drop(held.swap_remove(which));
            }
            let sum = |of: &[usize]| -> usize {
                held.iter().filter(|(part, _)| of.contains(part)).map(|(_, held)| held.bytes()).sum()
            };
            let sums = [sum(&[0]), sum(&[1, 2]), sum(&[2]), sum(&[0, 1, 2])];
            prop_assert_eq!([parts[0].in_use(), parts[1].in_use(), parts[2].in_use(), shared.in_use()], sums);
            prop_assert!(sums[1] <= 300 && sums[2] <= 200 && sums[3] <= 1000);
        }
    }
}
