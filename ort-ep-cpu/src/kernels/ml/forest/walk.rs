//! The way through deep trees, several at a time.
//!
//! A step waits for memory, so [`WIDTH`] ways are followed side by side: those of several rows
//! through one tree, or those of one row through several trees. Vectors that gather were measured,
//! too: on processors with slow gathers they take twice as long.

use super::layout::{Node, Places};

/// How many ways are followed at a time.
pub(super) const WIDTH: usize = 8;

/// Up to how many steps are taken without asking whether all ways have ended, and how often it is
/// asked in deeper trees: those that grew without a bound have few long ways.
const STEPS: u32 = 8;
const STEPS_BETWEEN: u32 = 3;

/// Follows ways from the nodes `at` for up to `depth` steps. Each has its features from one of
/// `starts` on in `values`.
// Inlined into its callers it finds too few registers.
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
            // Both are always there: children and columns were checked when the forest was laid
            // out.
            let Some(node) = nodes.get(*at as usize) else { return };
            let Some(x) = values.get(start + node.column(places)) else { return };
            *at = node.child(places) + u32::from(!is_left(x, &node.split()));
        }
    };
    if depth <= STEPS {
        (0..depth).for_each(|_| step(at));
        return;
    }
    for _ in 0..depth.div_ceil(STEPS_BETWEEN + 1) {
        (0..STEPS_BETWEEN).for_each(|_| step(at));
        let before = *at;
        step(at);
        if *at == before {
            return;
        }
    }
}

/// Whether a feature goes left; what is not a number does not.
#[inline(always)]
fn is_left<T: PartialOrd>(x: &T, split: &T) -> bool {
    x <= split
}
