//! Deduplication of packed weights across the sessions of a process.
//!
//! Variants of one encoder, a model exported twice, or one model in sessions with different
//! settings often pack the same bytes. The table finds candidates by length and a hash of 64-byte
//! samples, then compares byte by byte. If the bytes are equal, the new buffer is dropped and both
//! owners share the first one. A weight without a candidate costs only the samples. A hash match
//! alone never merges.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock, Weak};

use bytes::Bytes;
use ort_alloc::fork::{Mutex, get_or_init};
use ort_alloc::{Buffer, Reservation};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use xxhash_rust::xxh3::Xxh3;

/// Weights that a kernel repacked, in memory counted by the session's budget or in the mapped
/// compiled cache.
#[derive(Debug)]
pub struct PackedWeights(Held);

#[derive(Debug)]
enum Held {
    Nothing { _reservation: Option<Reservation> },
    Memory(Share),
    Mapped(Bytes),
}

impl PackedWeights {
    /// Weights that are only counted: no bytes.
    pub(super) fn nothing(reservation: Option<Reservation>) -> PackedWeights {
        PackedWeights(Held::Nothing { _reservation: reservation })
    }

    /// Weights in the mapped compiled cache.
    pub(super) fn mapped(bytes: Bytes) -> PackedWeights {
        PackedWeights(Held::Mapped(bytes))
    }

    /// Takes a packed buffer for an owner whose budget holds the reservation. If equal bytes exist
    /// already, drops the buffer and shares those.
    pub(super) fn in_memory(buffer: Buffer, reservation: Reservation, owner: &Arc<Owner>) -> PackedWeights {
        let region = PackedRegions::global().one_of(Arc::new(Region { buffer, owners: Mutex::default() }));
        region.owners.lock().push(owner.clone());
        PackedWeights(Held::Memory(Share { region, owner: owner.clone(), _reservation: reservation }))
    }

    /// The packed bytes, 64-byte aligned; empty if they were only counted.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Held::Nothing { .. } => &[],
            Held::Memory(share) => share.region.bytes(),
            Held::Mapped(bytes) => bytes,
        }
    }
}

/// Identifies whose packed weights they are: one owner per compiled program.
#[derive(Debug, Default)]
pub(crate) struct Owner(());

/// Packed bytes that are counted more than once, for a group of owners that reports as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SharedBytes {
    /// Bytes that an owner of the group counts although an earlier owner of the group counts them,
    /// too.
    pub(crate) among: usize,
    /// Of the rest, the bytes that owners outside the group share.
    pub(crate) with_others: usize,
}

impl SharedBytes {
    /// Sums over all packed weights of the process.
    pub(crate) fn of(owners: &[&Arc<Owner>]) -> SharedBytes {
        let mut sum = SharedBytes::default();
        for SharedBytes { among, with_others } in
            PackedRegions::global().regions().iter().map(|region| region.shared(owners))
        {
            sum.among += among;
            sum.with_others += with_others;
        }
        sum
    }
}

/// An owner's share of a region. Fields drop in order: the memory is freed before the budget gets
/// its bytes back.
#[derive(Debug)]
struct Share {
    region: Arc<Region>,
    owner: Arc<Owner>,
    _reservation: Reservation,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut owners = self.region.owners.lock();
        if let Some(place) = owners.iter().position(|owner| Arc::ptr_eq(owner, &self.owner)) {
            owners.swap_remove(place);
        }
    }
}

/// A packed buffer, immutable from here on.
#[derive(Debug)]
struct Region {
    buffer: Buffer,
    /// One entry per share, so an owner with two shares appears twice.
    owners: Mutex<SmallVec<[Arc<Owner>; 2]>>,
}

impl Region {
    fn bytes(&self) -> &[u8] {
        self.buffer.bytes().unwrap_or(&[])
    }

    /// The double-counted bytes of this region for a group of owners.
    fn shared(&self, owners: &[&Arc<Owner>]) -> SharedBytes {
        let shares = self.owners.lock();
        let shares_of = |owner: &&Arc<Owner>| shares.iter().filter(|other| Arc::ptr_eq(other, owner)).count();
        let mut counts = owners.iter().map(shares_of).filter(|count| *count > 0);
        // The first owner with shares here counts the region; shares of later owners are
        // duplicates.
        let first = counts.next().unwrap_or(0);
        let again: usize = counts.sum();
        let is_others = first + again < shares.len();
        let bytes = self.buffer.len();
        SharedBytes { among: again * bytes, with_others: if is_others { first * bytes } else { 0 } }
    }
}

/// The packed regions of this process, by length and sample hash.
struct PackedRegions {
    /// A random seed: a crafted file cannot aim for hash collisions.
    seed: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    regions: FxHashMap<(usize, u64), Vec<Weak<Region>>>,
    /// Entries including dead ones, and the count at which dead ones are removed.
    count: usize,
    most: usize,
}

impl PackedRegions {
    /// The table of this process.
    fn global() -> &'static PackedRegions {
        static TABLE: OnceLock<PackedRegions> = OnceLock::new();
        let new = || PackedRegions { seed: RandomState::new().hash_one(0), state: Mutex::default() };
        get_or_init(&TABLE, new)
    }
}

/// Smaller weights are not worth an entry.
const SMALLEST: usize = 4096;

/// At most this many regions of equal hash are compared, newest first. It bounds the work for a
/// file with many weights that differ only between the samples.
const MOST_COMPARED: usize = 8;

impl PackedRegions {
    /// Returns an equal region if there is one, else adds this one. Of two equal regions packed at
    /// the same time, the first to get here stays.
    fn one_of(&self, region: Arc<Region>) -> Arc<Region> {
        let bytes = region.bytes();
        if bytes.len() < SMALLEST {
            return region;
        }
        let key = (bytes.len(), self.sample(bytes));
        let mut compared: Vec<Arc<Region>> = Vec::new();
        loop {
            let candidates = match self.state.lock().add(key, &region, &compared) {
                None => return region,
                Some(candidates) => candidates,
            };
            // Compare without the lock, so that other threads can go on. They may add regions
            // meanwhile, so the loop asks again and skips what it compared.
            if let Some(same) = candidates.iter().find(|known| known.bytes() == bytes) {
                return same.clone();
            }
            compared.extend(candidates);
        }
    }

    /// Hashes 64 samples of 64 bytes, evenly spread.
    fn sample(&self, bytes: &[u8]) -> u64 {
        const LINES: usize = 64;
        const LINE: usize = 64;
        let mut hash = Xxh3::with_seed(self.seed);
        let distance = (bytes.len() / LINES).max(LINE);
        bytes.chunks(distance).for_each(|part| hash.update(part.get(..LINE).unwrap_or(part)));
        hash.digest()
    }

    fn regions(&self) -> Vec<Arc<Region>> {
        self.state.lock().regions.values().flatten().filter_map(Weak::upgrade).collect()
    }
}

impl State {
    /// Adds a region, unless there are candidates that were not compared yet: then returns those.
    fn add(
        &mut self,
        key: (usize, u64),
        region: &Arc<Region>,
        compared: &[Arc<Region>],
    ) -> Option<Vec<Arc<Region>>> {
        self.forget_dropped();
        let known = self.regions.entry(key).or_default();
        let newest = known.iter().rev().filter_map(Weak::upgrade).take(MOST_COMPARED);
        let is_new = |known: &Arc<Region>| !compared.iter().any(|other| Arc::ptr_eq(known, other));
        let candidates: Vec<Arc<Region>> = newest.filter(is_new).collect();
        if !candidates.is_empty() {
            return Some(candidates);
        }
        known.push(Arc::downgrade(region));
        self.count += 1;
        None
    }

    /// Removes dead entries once they may be half of the table, which makes the sweep amortized
    /// O(1).
    fn forget_dropped(&mut self) {
        if self.count < self.most {
            return;
        }
        self.regions.retain(|_, known| {
            known.retain(|region| region.strong_count() > 0);
            !known.is_empty()
        });
        self.count = self.regions.values().map(Vec::len).sum();
        self.most = 64 + 2 * self.count;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ort_alloc::{Allocator, Budget, Category, HostAllocator};

    use super::*;

    fn table() -> PackedRegions {
        PackedRegions { seed: 1, state: Mutex::default() }
    }

    fn region(bytes: &[u8]) -> Arc<Region> {
        let mut buffer = HostAllocator::global().allocate(bytes.len(), 64).unwrap();
        buffer.bytes_mut().unwrap().copy_from_slice(bytes);
        Arc::new(Region { buffer, owners: Mutex::default() })
    }

    /// A weight of sevens except for `value` at `place`. Each KiB has one 64-byte sample, at its
    /// start.
    fn weight(place: usize, value: u8) -> Vec<u8> {
        let mut bytes = vec![7; 1 << 16];
        *bytes.get_mut(place).unwrap() = value;
        bytes
    }

    #[test]
    fn equal_bytes_are_one_region_and_others_of_the_same_hash_are_not() {
        let table = table();
        let [one, same, other] = [weight(100, 1), weight(100, 1), weight(100, 2)];
        assert_eq!(table.sample(&one), table.sample(&other), "only a comparison tells them apart");
        let one = table.one_of(region(&one));
        assert!(Arc::ptr_eq(&one, &table.one_of(region(&same))));
        let second = table.one_of(region(&other));
        assert!(!Arc::ptr_eq(&one, &second));
        assert!(Arc::ptr_eq(&second, &table.one_of(region(&other))), "behind the first of its hash");
        // One byte shorter, or below the minimum.
        assert_eq!(table.one_of(region(&same[1..])).bytes(), &same[1..]);
        let small = table.one_of(region(&[1; SMALLEST - 1]));
        assert!(!Arc::ptr_eq(&small, &table.one_of(region(&[1; SMALLEST - 1]))));
        drop(one);
        let again = table.one_of(region(&same));
        assert_eq!(Arc::strong_count(&again), 1, "a dropped region is not found");
    }

    #[test]
    fn the_table_does_not_grow_with_what_was_dropped() {
        let table = table();
        for round in 0..1000u32 {
            let mut bytes = vec![0; SMALLEST];
            bytes.get_mut(..4).unwrap().copy_from_slice(&round.to_le_bytes());
            table.one_of(region(&bytes));
        }
        assert!(table.state.lock().count <= 65, "{}", table.state.lock().count);
    }

    /// Many weights that differ only between the samples are not all compared with one another.
    #[test]
    fn comparisons_are_bounded() {
        let table = table();
        let all: Vec<_> = (0..=255)
            .flat_map(|value| [100, 200].map(|place| table.one_of(region(&weight(place, value)))))
            .collect();
        let key = (1 << 16, table.sample(&weight(100, 0)));
        let found = table.state.lock().add(key, &region(&weight(300, 1)), &[]).unwrap();
        assert_eq!((found.len(), all.len()), (MOST_COMPARED, 512));
    }

    #[test]
    fn those_who_pack_at_the_same_time_have_one_region() {
        let table = table();
        let (bytes, barrier) = (weight(0, 3), std::sync::Barrier::new(8));
        let regions: Vec<Arc<Region>> = std::thread::scope(|scope| {
            let pack = || {
                let region = region(&bytes);
                barrier.wait();
                table.one_of(region)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(pack)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(regions.windows(2).all(|pair| Arc::ptr_eq(pair.first().unwrap(), pair.last().unwrap())));
    }

    /// Each owner's budget counts every byte, and the shared bytes are reported to those who share.
    #[test]
    fn shares_count_in_each_budget() {
        let bytes: Vec<u8> = (0..8192u32).map(|index| (index * index % 251) as u8).collect();
        let packed = |owner: &Arc<Owner>, budget: &Arc<Budget>| {
            let reservation = budget.reserve(Category::PackedWeights, bytes.len()).unwrap();
            PackedWeights::in_memory(Arc::into_inner(region(&bytes)).unwrap().buffer, reservation, owner)
        };
        let [one, other] = [Arc::<Owner>::default(), Arc::default()];
        let budgets = [Budget::new(None), Budget::new(None)];
        let twice = [packed(&one, &budgets[0]), packed(&one, &budgets[0])];
        let of = |owners: &[&Arc<Owner>]| {
            let SharedBytes { among, with_others } = SharedBytes::of(owners);
            (among, with_others)
        };
        assert_eq!((of(&[&one]), budgets[0].in_use()), ((0, 0), 2 * 8192));
        let third = packed(&other, &budgets[1]);
        assert_eq!((of(&[&one]), of(&[&other]), budgets[1].in_use()), ((0, 2 * 8192), (0, 8192), 8192));
        assert_eq!((of(&[&one, &other]), of(&[&other, &one])), ((8192, 0), (2 * 8192, 0)));
        assert_eq!(third.bytes().as_ptr(), twice[0].bytes().as_ptr());
        let last = Arc::default();
        let fourth = packed(&last, &budgets[1]);
        assert_eq!(of(&[&one, &other]), (8192, 2 * 8192), "of the pair, what the last has as well");
        drop((twice, fourth));
        assert_eq!((of(&[&other]), budgets[0].in_use()), ((0, 0), 0));
        assert_eq!(third.bytes(), bytes);
    }
}
