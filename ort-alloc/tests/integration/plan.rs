//! The static planner: sound on random intervals by a check of its own, tight on known cases, and
//! errors on nonsense.

use std::time::{Duration, Instant};

use ort_alloc::{Alias, Interval, Overlap, Plan, PlanError, Strategy as Layout, plan, verify};
use proptest::prelude::*;

fn interval(bytes: usize, first: usize, last: usize) -> Interval {
    Interval { bytes, first, last, alignment: 1, ..Interval::default() }
}

fn alias(bytes: usize, life: (usize, usize), of: usize, offset: usize) -> Interval {
    Interval { alias: Some(Alias { of, offset }), ..interval(bytes, life.0, life.1) }
}

/// The root of an interval and its distance from the root's start, by walking.
fn root(intervals: &[Interval], mut index: usize) -> (usize, usize) {
    let mut distance = 0;
    while let Some(alias) = intervals[index].alias {
        distance += alias.offset;
        index = alias.of;
    }
    (index, distance)
}

/// First and last step of each family, under its root's index.
fn family_lives(intervals: &[Interval]) -> Vec<(usize, usize)> {
    let mut lives: Vec<_> = intervals.iter().map(|interval| (interval.first, interval.last)).collect();
    for (index, interval) in intervals.iter().enumerate() {
        let life = &mut lives[root(intervals, index).0];
        *life = (life.0.min(interval.first), life.1.max(interval.last));
    }
    lives
}

/// Whether offsets are sound, by comparing everything with everything.
fn is_sound(intervals: &[Interval], plan: &Plan) -> bool {
    let lives = family_lives(intervals);
    let extent = |index: usize| plan.offsets[index]..plan.offsets[index] + intervals[index].bytes;
    (0..intervals.len()).all(|one| {
        let interval = &intervals[one];
        let (one_root, distance) = root(intervals, one);
        let fits = plan.lane(interval.lane).is_some_and(|lane| extent(one).end <= lane.bytes);
        let apart = (0..one).all(|other| {
            let other_root = root(intervals, other).0;
            let (a, b) = (extent(one), extent(other));
            let (life, other_life) = (lives[one_root], lives[other_root]);
            one_root == other_root
                || intervals[other].lane != interval.lane
                || a.is_empty()
                || b.is_empty()
                || a.end <= b.start
                || b.end <= a.start
                || life.1 < other_life.0
                || other_life.1 < life.0
        });
        fits && apart
            && plan.offsets[one].is_multiple_of(interval.alignment)
            && plan.offsets[one] == plan.offsets[one_root] + distance
    })
}

/// The largest sum of live bytes of a lane, step by step.
fn live_bytes(intervals: &[Interval], lane: u32) -> usize {
    let lives = family_lives(intervals);
    let steps = lives.iter().map(|life| life.1).max().unwrap_or(0);
    let at = |step: usize| -> usize {
        (0..intervals.len())
            .filter(|&index| intervals[index].alias.is_none() && intervals[index].lane == lane)
            .filter(|&index| lives[index].0 <= step && step <= lives[index].1)
            .map(|index| intervals[index].bytes)
            .sum()
    };
    (0..=steps).map(at).max().unwrap_or(0)
}

/// Intervals as raw numbers; those that draw a target become a part of an earlier one.
fn intervals() -> impl Strategy<Value = Vec<Interval>> {
    let numbers =
        (0..2000usize, 0..60usize, 0..12usize, 0..3u32, 0..9u32, any::<prop::sample::Index>(), 0..10u32);
    prop::collection::vec(numbers, 1..80).prop_map(|rows| {
        let mut intervals: Vec<Interval> = Vec::new();
        for (bytes, first, length, lane, alignment, target, kind) in rows {
            let mut next =
                Interval { bytes, first, last: first + length, lane, alignment: 1 << alignment, alias: None };
            if kind < 3 && !intervals.is_empty() {
                let of = target.index(intervals.len());
                next.lane = intervals[of].lane;
                next.bytes = bytes.min(intervals[of].bytes);
                let offset = intervals[of].bytes - next.bytes;
                // Whatever the distance from the root is a multiple of may be asked for.
                let distance = root(&intervals, of).1 + offset;
                next.alignment = next.alignment.min(1 << distance.trailing_zeros().min(8));
                next.alias = Some(Alias { of, offset });
            }
            intervals.push(next);
        }
        intervals
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn plans_are_sound(intervals in intervals()) {
        let plan = plan(&intervals)?;
        prop_assert!(is_sound(&intervals, &plan));
        prop_assert_eq!(plan.proof.intervals(), intervals.len());
        for lane in &plan.lanes {
            prop_assert_eq!(lane.lower_bound, live_bytes(&intervals, lane.lane));
            prop_assert!(lane.bytes >= lane.lower_bound);
        }
    }

    /// The proof accepts and refuses exactly what comparing everything with everything does.
    #[test]
    fn the_proof_agrees_with_a_naive_check(
        intervals in intervals(),
        moved in any::<prop::sample::Index>(),
        offset in 0..4000usize,
    ) {
        let mut plan = plan(&intervals)?;
        let moved = moved.index(intervals.len());
        plan.offsets[moved] = offset / intervals[moved].alignment * intervals[moved].alignment;
        prop_assert_eq!(verify(&intervals, &plan).is_ok(), is_sound(&intervals, &plan));
    }
}

#[test]
fn known_cases_are_as_small_as_they_can_be() -> Result<(), PlanError> {
    let cases: [(&str, Vec<Interval>, usize); 8] = [
        ("nothing", vec![], 0),
        ("empty values", vec![interval(0, 0, 9), interval(0, 3, 4)], 0),
        ("a chain needs two at a time", (0..50).map(|step| interval(100, step, step + 1)).collect(), 200),
        ("all at once", (0..50).map(|_| interval(100, 0, 1)).collect(), 5000),
        ("one after the other", (0..50).map(|step| interval(100 + step, step, step)).collect(), 149),
        (
            "a gap between two long lives",
            vec![
                interval(10, 0, 9),
                interval(30, 0, 1),
                interval(10, 0, 9),
                interval(30, 3, 9),
                interval(30, 2, 2),
            ],
            50,
        ),
        (
            "an alias in place keeps its target",
            vec![interval(64, 0, 1), alias(64, (1, 5), 0, 0), interval(64, 3, 4)],
            128,
        ),
        (
            "a chain of aliases, listed before their targets",
            vec![alias(8, (6, 7), 1, 8), alias(16, (4, 4), 2, 16), interval(64, 0, 0), interval(64, 7, 8)],
            128,
        ),
    ];
    for (name, intervals, bytes) in cases {
        let plan = plan(&intervals)?;
        assert_eq!(plan.total_bytes(), bytes, "{name}");
    }
    Ok(())
}

#[test]
fn lanes_share_nothing_and_are_listed_in_order() -> Result<(), PlanError> {
    let lane = |lane, bytes| Interval { lane, ..interval(bytes, 0, 0) };
    let plan = plan(&[lane(7, 10), lane(2, 20), lane(7, 30)])?;
    let lanes: Vec<_> = plan.lanes.iter().map(|lane| (lane.lane, lane.bytes)).collect();
    assert_eq!(lanes, [(2, 20), (7, 40)]);
    assert!(plan.lane(3).is_none());
    Ok(())
}

#[test]
fn each_strategy_wins_somewhere() -> Result<(), PlanError> {
    // In order of time the 2s leave a hole that the 3 does not fit in; largest first puts the 3
    // down before them.
    let greedy = [interval(2, 0, 1), interval(2, 0, 3), interval(3, 2, 3), interval(1, 1, 3)];
    // A chain at its lower bound, where the free list is enough.
    let fitted: Vec<_> = (0..10).map(|step| interval(64, step, step + 1)).collect();
    let strategy = |plan: Plan| plan.lanes[0].strategy;
    assert_eq!(strategy(plan(&greedy)?), Layout::GreedyBySize);
    assert_eq!(strategy(plan(&fitted)?), Layout::BestFit);
    Ok(())
}

#[test]
fn nonsense_is_an_error() {
    let good = interval(64, 0, 0);
    let other_lane = Interval { lane: 1, ..alias(1, (0, 0), 0, 0) };
    let misaligned = Interval { alignment: 64, ..alias(1, (0, 0), 0, 1) };
    let cases: [(&str, Vec<Interval>); 12] = [
        ("ends at step 1, before it starts at step 2", vec![interval(1, 2, 1)]),
        ("alignment 3", vec![Interval { alignment: 3, ..good.clone() }]),
        ("alignment 0", vec![Interval { alignment: 0, ..good.clone() }]),
        ("there is no such interval", vec![alias(1, (0, 0), 9, 0)]),
        ("another lane", vec![good.clone(), other_lane]),
        ("does not fit inside", vec![good.clone(), alias(65, (0, 0), 0, 0)]),
        ("does not fit inside", vec![good.clone(), alias(1, (0, 0), 0, usize::MAX)]),
        ("not aligned", vec![good, misaligned]),
        ("form a cycle", vec![alias(1, (0, 0), 0, 0)]),
        ("form a cycle", vec![alias(1, (0, 0), 1, 0), alias(1, (0, 0), 2, 0), alias(1, (0, 0), 1, 0)]),
        ("more memory than can be addressed", vec![interval(usize::MAX, 0, 0), interval(2, 0, 0)]),
        (
            "more memory than can be addressed",
            vec![interval(usize::MAX / 2, 0, 0), Interval { alignment: 1 << 62, ..interval(9, 0, 0) }],
        ),
    ];
    for (message, intervals) in cases {
        let error = plan(&intervals).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(message), "{error:?} does not contain {message:?}");
    }
}

#[test]
fn the_ends_of_time_are_steps_like_others() -> Result<(), PlanError> {
    let intervals: Vec<_> = (0..40)
        .map(|size| interval(100 + size % 7, if size < 20 { 0 } else { usize::MAX }, usize::MAX))
        .collect();
    assert!(plan(&intervals)?.total_bytes() > 4000);
    Ok(())
}

#[test]
fn a_wrong_plan_has_no_proof() -> Result<(), PlanError> {
    let intervals = [interval(8, 0, 1), interval(8, 1, 2)];
    let mut wrong = plan(&intervals)?;
    wrong.offsets = vec![0, 4];
    wrong.lanes[0].bytes = 12;
    assert_eq!(verify(&intervals, &wrong), Err(Overlap::Shared { first: 1, second: 0, lane: 0, step: 1 }));
    wrong.offsets = vec![0, 8];
    let refused = verify(&intervals, &wrong).err().map(|error| error.to_string());
    assert_eq!(refused.as_deref(), Some("interval 1 is misplaced: it ends beyond its lane"));
    assert!(matches!(verify(&intervals[..1], &wrong), Err(Overlap::Count { .. })));
    Ok(())
}

/// A large graph: mostly short lives, some long ones; and the worst case, everything alive at once.
#[test]
fn five_thousand_intervals_take_no_time() -> Result<(), PlanError> {
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below) as usize
    };
    let mut network = Vec::new();
    for step in 0..5000 {
        let life = if random(20) == 0 { random(500) } else { 1 + random(6) };
        network.push(Interval { alignment: 64, ..interval(1 + random(1 << 20), step, step + life) });
    }
    let crowded: Vec<_> =
        (0..5000).map(|_| interval(1 + random(1 << 20), random(2500), 2500 + random(2500))).collect();
    let tangled: Vec<_> = (0..5000)
        .map(|_| {
            let (one, other) = (random(5000), random(5000));
            interval(1 + random(1 << 20), one.min(other), one.max(other))
        })
        .collect();
    let chain: Vec<_> = (0..5000usize)
        .map(|step| match step.checked_sub(1) {
            Some(before) => alias(64, (step, step + 1), before, 0),
            None => interval(64, 0, 1),
        })
        .collect();
    for (name, intervals) in
        [("network", network), ("crowded", crowded), ("tangled", tangled), ("chain of aliases", chain)]
    {
        let start = Instant::now();
        let plan = plan(&intervals)?;
        let took = start.elapsed();
        let lane = &plan.lanes[0];
        let excess = lane.bytes as f64 / lane.lower_bound as f64;
        println!("{name}: {took:?}, {excess:.4} of the lower bound by {:?}", lane.strategy);
        assert!(took < Duration::from_secs(2), "{name} took {took:?}");
        assert!(excess < 1.05, "{name} takes {excess} of the lower bound");
    }
    Ok(())
}
