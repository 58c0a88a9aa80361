//! Autotuning cache: which candidate implementation of a node is the fastest, as measured when its
//! shapes were first met.

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::launch::Launch;

/// The most choices the cache keeps.
const MOST_KEPT: usize = 4096;
/// A later candidate replaces the best so far only below this fraction of its time, because timings
/// are noisy.
const CLEARLY: f32 = 0.97;

/// The choices measured on one device. Nodes with the same candidates share a choice, so that their
/// results are bitwise equal.
#[derive(Default)]
pub(crate) struct Choices {
    /// Index of the chosen candidate, keyed by the `Debug` text of all candidates' launches.
    kept: Mutex<FxHashMap<String, usize>>,
}

impl Choices {
    /// Returns the index of the candidate to run; `search` measures it if it is not cached yet.
    pub(crate) fn find<E>(
        &self,
        ways: &[Vec<Launch>],
        search: impl FnOnce() -> Result<usize, E>,
    ) -> Result<usize, E> {
        let key = format!("{ways:?}");
        if let Some(place) = self.kept.lock().get(&key) {
            return Ok(*place);
        }
        // `search` runs on the device, so the lock is not held meanwhile.
        let place = search()?;
        let mut kept = self.kept.lock();
        // Dropping everything is enough at this size: the next runs measure again what they need.
        if kept.len() >= MOST_KEPT {
            kept.clear();
        }
        // If two threads searched at once, the second adopts the first one's choice, so both agree.
        Ok(*kept.entry(key).or_insert(place))
    }
}

/// Returns the index of the fastest candidate, or the first if none could be timed.
pub(crate) fn fastest(times: &[Option<f32>]) -> usize {
    let (mut place, mut least) = (0, f32::INFINITY);
    for (index, time) in times.iter().enumerate() {
        if let Some(time) = time.filter(|time| *time < least * CLEARLY) {
            (place, least) = (index, time);
        }
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_ways_are_searched_once() {
        let (choices, ways) = (Choices::default(), [vec![Launch::new("pool", "a")], Vec::new()]);
        let searched = |place| choices.find(&ways, || Ok::<usize, ()>(place));
        assert_eq!((searched(1), searched(0)), (Ok(1), Ok(1)));
        let others = [vec![Launch::new("pool", "b")], Vec::new()];
        assert_eq!(choices.find(&others, || Err(())), Err(()));
        assert_eq!(choices.find(&others, || Ok::<usize, ()>(0)), Ok(0));
    }

    #[test]
    fn a_later_way_is_taken_where_it_is_clearly_faster() {
        assert_eq!(fastest(&[Some(1.0), Some(0.99), Some(0.5), Some(0.6)]), 2);
        assert_eq!(fastest(&[None, Some(3.0), Some(3.0)]), 1);
        assert_eq!(fastest(&[None, None]), 0);
    }
}
