//! Which of several ways to compute a node is the fastest, as it was found when its shapes were
//! first met.

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::launch::Launch;

/// Choices that are kept.
const MOST_KEPT: usize = 4096;
/// The part of the time of the fastest way so far that a later one must stay below, as times vary.
const CLEARLY: f32 = 0.97;

/// What a device found. Nodes with the same ways take the same one, so that they have the same
/// bits.
#[derive(Default)]
pub(crate) struct Choices {
    /// By the launches of all ways in words: the place of the way that is taken.
    kept: Mutex<FxHashMap<String, usize>>,
}

impl Choices {
    /// The place of the way to take, which is looked for where it is not known yet.
    pub(crate) fn find<E>(
        &self,
        ways: &[Vec<Launch>],
        search: impl FnOnce() -> Result<usize, E>,
    ) -> Result<usize, E> {
        let key = format!("{ways:?}");
        if let Some(place) = self.kept.lock().get(&key) {
            return Ok(*place);
        }
        let place = search()?;
        let mut kept = self.kept.lock();
        if kept.len() >= MOST_KEPT {
            kept.clear();
        }
        // Of two threads the second takes what the first one found.
        Ok(*kept.entry(key).or_insert(place))
    }
}

/// The place of the fastest way, the first one where none could be timed.
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
