//! Traversal of deep trees.
//!
//! Each step waits for memory, so [`WIDTH`] traversals run in lockstep to hide the latency: several
//! rows through one tree, or one row through several trees. SIMD gathers were measured too, and on
//! processors with slow gathers they take twice as long.

use super::layout::{Node, Places};

/// Traversals that run at a time.
pub(super) const WIDTH: usize = 8;

/// Trees of up to `STEPS` levels are traversed without testing whether all traversals have ended.
/// In deeper trees one step in `STEPS_BETWEEN + 1` is tested, because trees that grew without a
/// depth limit have few long paths.
const STEPS: u32 = 8;
const STEPS_BETWEEN: u32 = 3;

/// Advances the traversals from the nodes `at` by up to `depth` steps. The features of each begin
/// at one of `starts` in `values`.
// Not inlined, because its callers leave it too few registers.
#[inline(never)]
pub(super) fn walk<N: Node>(
    (nodes, places): (&[N], Places),
    values: &[N::Value],
    starts: &[usize; WIDTH],
    at: &mut [u32; WIDTH],
    depth: u32,
) {
    let step = |at: &mut [u32; WIDTH]| {
        for (at, start) in at.iter_mut().zip(starts) {
            // Never out of bounds: the layout checked children and columns.
            let Some(node) = nodes.get(*at as usize) else { return };
            let Some(x) = values.get(start + node.column(places)) else { return };
            *at = node.child(places) + u32::from(!is_left(x, &node.split()));
        }
    };
    if depth <= STEPS {
        (0..depth).for_each(|_| step(at));
        return;
    }
    // Rounded up: steps beyond the depth stay at the leaves.
    for _ in 0..depth.div_ceil(STEPS_BETWEEN + 1) {
        (0..STEPS_BETWEEN).for_each(|_| step(at));
        let before = *at;
        step(at);
        // Leaves lead to themselves, so nothing moves once every traversal has ended.
        if *at == before {
            return;
        }
    }
}

/// Whether a feature goes left. NaN does not.
#[inline(always)]
fn is_left<T: PartialOrd>(x: &T, split: &T) -> bool {
    x <= split
}
