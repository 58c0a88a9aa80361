//! Seeds of random numbers for nodes that have none of their own.

use std::hash::{BuildHasher, Hasher, RandomState};

use ort_alloc::fork::Mutex;

/// The next seed of a sequence that [`set_seed`] began.
static NEXT: Mutex<Option<u64>> = Mutex::new(None);

/// The step of the sequence: 2^64 divided by the golden ratio, as in the generator SplitMix64.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Makes random numbers repeat: nodes without a seed take one after another from a sequence that
/// begins with `seed`. Corresponds to ONNX Runtime's `set_seed`. Without this call each run of such
/// a node starts from the system's entropy.
///
/// Runs that are made in the same order draw the same numbers. Runs on several threads at once take
/// their seeds in the order in which they come.
///
/// ```
/// use ort_core::random;
///
/// random::set_seed(7);
/// let first = random::next_seed();
/// random::set_seed(7);
/// assert_eq!(random::next_seed(), first);
/// assert_ne!(random::next_seed(), first);
/// ```
pub fn set_seed(seed: i64) {
    *NEXT.lock() = Some(seed as u64);
}

/// Returns a seed for one run of a node that has none.
pub fn next_seed() -> u32 {
    match &mut *NEXT.lock() {
        Some(next) => {
            *next = next.wrapping_add(STEP);
            mixed(*next)
        }
        // Each `RandomState` has its own keys, which come from the system.
        None => RandomState::new().build_hasher().finish() as u32,
    }
}

/// The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
/// Generators, 2014), its upper half.
fn mixed(state: u64) -> u32 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((state ^ (state >> 31)) >> 32) as u32
}
