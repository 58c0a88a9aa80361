//! Best fit with coalescing over any allocator, for sizes that nobody knew before the run.
//!
//! The behaviour is that of ONNX Runtime's arena: regions from the allocator underneath are divided
//! into chunks in multiples of 256 bytes, a request takes the smallest free chunk that holds it and
//! splits off what is left, a freed chunk joins its free neighbours, and regions grow by one of two
//! strategies. It departs from it in four points, each of which lowers memory:
//!
//! - a trim gives back *every* region that is wholly free, the first one too;
//! - before a request fails for want of room, regions that are wholly free are given back and it is
//!   tried again;
//! - reserved memory counts against the limit when it is taken, not only afterwards;
//! - no side table per granule: chunks are kept by their start, which costs nothing for memory that
//!   is not used.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::buffer::{Address, Origin};
use crate::host::round_up;
use crate::{AllocError, Allocator, Buffer, DeviceId, Stats};

/// Chunks are multiples of this many bytes and start at multiples of it.
pub const GRANULE: usize = 256;

/// Sweeps that a free region waits through.
const PATIENCE: u32 = 2;

/// Regions smaller than this are not worth another try with a smaller one.
const SMALLEST_RETRY: usize = 8 << 10;

/// How an arena's next region is sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ExtendStrategy {
    /// A unit that doubles with each extension, so that regions are few.
    #[default]
    PowerOfTwo,
    /// Exactly what is asked for, so that nothing is held in advance.
    SameAsRequested,
}

/// An arena's settings. The defaults are ONNX Runtime's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// How regions grow.
    pub extend: ExtendStrategy,
    /// The most bytes to hold in regions and reservations; `None` for no limit.
    pub limit: Option<usize>,
    /// Size of the first region, for [`ExtendStrategy::PowerOfTwo`]. 1 MiB.
    pub initial_chunk_bytes: usize,
    /// A free chunk is handed out whole where less than this and less than the request would be
    /// left. 128 MiB.
    pub max_dead_bytes_per_chunk: usize,
    /// The unit to grow by after a trim, for [`ExtendStrategy::PowerOfTwo`]. 2 MiB.
    pub initial_growth_chunk_bytes: usize,
    /// The most that the unit grows to; larger requests are still rounded up to a power of two. 1
    /// GiB.
    pub max_power_of_two_extend_bytes: usize,
    /// Whether regions that are wholly free, but too small for a request, go back before there is a
    /// new one. Without it an arena whose requests grow little by little holds all sizes that ever
    /// were. False, as in ONNX Runtime.
    pub replace_free_regions: bool,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self {
            extend: ExtendStrategy::PowerOfTwo,
            limit: None,
            initial_chunk_bytes: 1 << 20,
            max_dead_bytes_per_chunk: 128 << 20,
            initial_growth_chunk_bytes: 2 << 20,
            max_power_of_two_extend_bytes: 1 << 30,
            replace_free_regions: false,
        }
    }
}

impl ArenaConfig {
    /// Settings that hold as little as possible: regions as large as requested, chunks split to the
    /// granule, and no free region kept that does not do.
    pub fn lean() -> Self {
        Self {
            extend: ExtendStrategy::SameAsRequested,
            max_dead_bytes_per_chunk: GRANULE,
            replace_free_regions: true,
            ..Self::default()
        }
    }
}

/// A thread-safe arena. Clones share it. Buffers may outlive it: they keep what they need of it.
///
/// ```
/// use std::sync::Arc;
/// use ort_alloc::{Allocator, Arena, ArenaConfig, HostAllocator};
///
/// let arena = Arena::new(Arc::<HostAllocator>::default(), ArenaConfig::default());
/// let buffer = arena.allocate(1000, 64)?;
/// assert_eq!((buffer.len(), arena.stats().in_use), (1000, 1024));
/// assert_eq!(arena.stats().total_allocated, 1 << 20);
/// drop(buffer);
/// assert_eq!(arena.trim(), 1 << 20);
/// # Ok::<(), ort_alloc::AllocError>(())
/// ```
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<dyn Allocator>,
    config: ArenaConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Slots are reused, so that a region's number stays true for as long as one of its chunks is
    /// live.
    regions: Vec<Option<Region>>,
    /// Free chunks by size, then by region and offset.
    free: BTreeSet<(usize, usize, usize)>,
    /// The unit of the next extension.
    growth: usize,
    stats: Stats,
}

/// One allocation from underneath, divided into chunks without gaps.
struct Region {
    buffer: Buffer,
    alignment: usize,
    chunks: BTreeMap<usize, Chunk>,
    /// Calls of [`Arena::sweep`] since the last request that it served.
    sweeps: u32,
}

impl Region {
    /// Free neighbours are always joined, so a wholly free region is one free chunk.
    fn is_free(&self) -> bool {
        self.chunks.len() == 1 && self.chunks.values().all(|chunk| chunk.free)
    }

    /// By addresses alone: what is in the region belongs to the buffers over it.
    fn holds(&self, bytes: &[u8]) -> bool {
        let Address::Host(start) = self.buffer.address() else { return false };
        let distance = bytes.as_ptr().addr().checked_sub(start.as_ptr().addr());
        let end = distance.and_then(|distance| distance.checked_add(bytes.len()));
        end.is_some_and(|end| end <= self.buffer.len())
    }
}

#[derive(Clone, Copy)]
struct Chunk {
    bytes: usize,
    free: bool,
}

/// What a buffer from an arena owns: one chunk.
pub(crate) struct ArenaBlock {
    shared: Arc<Shared>,
    region: usize,
    offset: usize,
}

impl Drop for ArenaBlock {
    fn drop(&mut self) {
        self.shared.state.lock().release(self.region, self.offset);
    }
}

/// What a reserved buffer owns: an allocation from underneath, which is counted here.
pub(crate) struct ReservedBlock {
    shared: Arc<Shared>,
    buffer: Box<Buffer>,
}

impl Drop for ReservedBlock {
    fn drop(&mut self) {
        let bytes = self.buffer.len();
        let mut state = self.shared.state.lock();
        state.stats.in_use -= bytes;
        state.stats.total_allocated -= bytes;
    }
}

impl Arena {
    /// An arena that holds nothing yet.
    pub fn new(inner: Arc<dyn Allocator>, config: ArenaConfig) -> Self {
        let stats = Stats { limit: config.limit, ..Stats::default() };
        let growth = config.initial_chunk_bytes.max(GRANULE);
        let state = Mutex::new(State { growth, stats, ..State::default() });
        Self { shared: Arc::new(Shared { inner, config, state }) }
    }

    /// Allocates straight from underneath, for what lives long and would pin a region. It counts
    /// against the limit and goes back as soon as it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Allocator::allocate`].
    pub fn reserve(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        let shared = &self.shared;
        let device = shared.inner.device();
        let mut state = shared.state.lock();
        if shared.available(&state) < bytes {
            state.trim(&shared.config);
        }
        let available = shared.available(&state);
        if available < bytes {
            return Err(AllocError::OutOfMemory { requested: bytes, available: Some(available), device });
        }
        let buffer = shared.inner.allocate(bytes, alignment)?;
        state.stats.num_reserves += 1;
        state.stats.total_allocated += bytes;
        state.stats.handed_out(bytes);
        drop(state);
        let address = buffer.address();
        let block = ReservedBlock { shared: Arc::clone(shared), buffer: Box::new(buffer) };
        Ok(Buffer::new(address, bytes, device, Origin::Reserved(block)))
    }

    /// Gives back the regions that are wholly free and served no request since the call before the
    /// last; returns their bytes. Growth does not start over.
    pub fn sweep(&self) -> usize {
        let mut state = self.shared.state.lock();
        state.regions.iter_mut().flatten().for_each(|region| region.sweeps += 1);
        state.give_back(|region| region.sweeps >= PATIENCE)
    }

    /// Whether these bytes of the host are in one of its regions.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        let state = self.shared.state.lock();
        state.regions.iter().flatten().any(|region| region.holds(bytes))
    }

    /// Bytes of regions that are wholly free: what a trim gives back.
    pub fn idle_bytes(&self) -> usize {
        let state = self.shared.state.lock();
        state
            .regions
            .iter()
            .flatten()
            .filter(|region| region.is_free())
            .map(|region| region.buffer.len())
            .sum()
    }

    /// The settings.
    pub fn config(&self) -> &ArenaConfig {
        &self.shared.config
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Arena")
            .field("device", &self.device())
            .field("config", self.config())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Allocator for Arena {
    fn device(&self) -> DeviceId {
        self.shared.inner.device()
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        let device = self.device();
        AllocError::check_alignment(device, alignment)?;
        if bytes == 0 {
            return Ok(Buffer::empty(device));
        }
        let shared = &self.shared;
        let out_of_memory = || AllocError::OutOfMemory { requested: bytes, available: None, device };
        let need = round_up(bytes, GRANULE).ok_or_else(out_of_memory)?;
        let mut state = shared.state.lock();
        let found = match state.find(need, alignment) {
            Some(found) => found,
            None => {
                if shared.config.replace_free_regions {
                    state.give_back(|_| true);
                }
                shared.extend(&mut state, need, alignment)?;
                state.find(need, alignment).ok_or_else(out_of_memory)?
            }
        };
        let (region, offset, address) =
            state.take(found, need, shared.config.max_dead_bytes_per_chunk).ok_or_else(out_of_memory)?;
        drop(state);
        let block = ArenaBlock { shared: Arc::clone(shared), region, offset };
        Ok(Buffer::new(address, bytes, device, Origin::Arena(block)))
    }

    fn stats(&self) -> Stats {
        self.shared.state.lock().stats
    }

    /// Gives back every region that is wholly free.
    fn trim(&self) -> usize {
        self.shared.state.lock().trim(&self.shared.config)
    }
}

impl Shared {
    /// Bytes that regions and reservations may still take.
    fn available(&self, state: &State) -> usize {
        self.config.limit.unwrap_or(usize::MAX).saturating_sub(state.stats.total_allocated)
    }

    /// Gets a region that holds at least `need` bytes. Where that fails, what is free goes back
    /// first, and only the second failure counts.
    fn extend(&self, state: &mut State, need: usize, alignment: usize) -> Result<(), AllocError> {
        match self.try_extend(state, need, alignment) {
            Err(_) if state.trim(&self.config) > 0 => self.try_extend(state, need, alignment),
            outcome => outcome,
        }
    }

    fn try_extend(&self, state: &mut State, need: usize, alignment: usize) -> Result<(), AllocError> {
        let device = self.inner.device();
        let available = self.available(state) / GRANULE * GRANULE;
        if need > available {
            return Err(AllocError::OutOfMemory { requested: need, available: Some(available), device });
        }
        let alignment = alignment.max(GRANULE);
        let (mut wanted, growth) = match self.config.extend {
            ExtendStrategy::SameAsRequested => (need, state.growth),
            ExtendStrategy::PowerOfTwo => self.next_power_of_two(state.growth, need),
        };
        wanted = wanted.min(available);
        loop {
            match self.inner.allocate(wanted, alignment) {
                Ok(buffer) => {
                    state.growth = growth;
                    state.add_region(buffer, alignment);
                    return Ok(());
                }
                // A smaller region than the strategy's may still be had, as long as it holds the
                // request.
                Err(_) if wanted > need => {
                    let less = wanted / 10 * 9 / GRANULE * GRANULE;
                    wanted = if less > SMALLEST_RETRY { less.max(need) } else { need };
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The size of the next region and the unit after it.
    fn next_power_of_two(&self, growth: usize, need: usize) -> (usize, usize) {
        let mut unit = growth;
        while unit < need {
            match unit.checked_mul(2) {
                Some(double) => unit = double,
                None => return (need, growth),
            }
        }
        if need > growth {
            return (unit, unit);
        }
        let cap = self.config.max_power_of_two_extend_bytes;
        (unit, unit.checked_mul(2).filter(|&double| double < cap).unwrap_or(cap.max(GRANULE)))
    }
}

/// A free chunk that serves a request, and how much of its front alignment skips.
#[derive(Clone, Copy)]
struct Found {
    bytes: usize,
    region: usize,
    offset: usize,
    skip: usize,
}

impl State {
    /// The smallest free chunk that holds `need` bytes at a multiple of `alignment`.
    fn find(&self, need: usize, alignment: usize) -> Option<Found> {
        self.free.range((need, 0, 0)..).find_map(|&(bytes, region, offset)| {
            if alignment <= GRANULE {
                return Some(Found { bytes, region, offset, skip: 0 });
            }
            // Offsets tell of alignment only as far as the region itself is aligned.
            self.regions.get(region)?.as_ref().filter(|region| region.alignment >= alignment)?;
            let skip = round_up(offset, alignment)? - offset;
            (skip.checked_add(need)? <= bytes).then_some(Found { bytes, region, offset, skip })
        })
    }

    /// Hands a found chunk out, without what alignment skips in front and, where that is much, what
    /// is left behind.
    fn take(&mut self, found: Found, need: usize, max_dead: usize) -> Option<(usize, usize, Address)> {
        let Found { bytes, region: number, offset, skip } = found;
        let region = self.regions.get_mut(number)?.as_mut()?;
        self.free.remove(&(bytes, number, offset));
        let (start, mut size) = (offset + skip, bytes - skip);
        if skip > 0 {
            region.chunks.insert(offset, Chunk { bytes: skip, free: true });
            self.free.insert((skip, number, offset));
        }
        if size / 2 >= need || size - need >= max_dead.max(GRANULE) {
            let rest = Chunk { bytes: size - need, free: true };
            region.chunks.insert(start + need, rest);
            self.free.insert((rest.bytes, number, start + need));
            size = need;
        }
        region.chunks.insert(start, Chunk { bytes: size, free: false });
        region.sweeps = 0;
        let address = region.buffer.address().advanced(start);
        self.stats.num_allocs += 1;
        self.stats.handed_out(size);
        Some((number, start, address))
    }

    /// Takes a chunk back and joins it with its free neighbours.
    fn release(&mut self, number: usize, offset: usize) {
        let Some(region) = self.regions.get_mut(number).and_then(Option::as_mut) else {
            return;
        };
        let Some(chunk) = region.chunks.remove(&offset) else {
            return;
        };
        self.stats.in_use -= chunk.bytes;
        let (mut start, mut bytes) = (offset, chunk.bytes);
        if let Some(next) = region.chunks.get(&(start + bytes)).copied().filter(|next| next.free) {
            region.chunks.remove(&(start + bytes));
            self.free.remove(&(next.bytes, number, start + bytes));
            bytes += next.bytes;
        }
        if let Some((&before, &previous)) = region.chunks.range(..start).next_back()
            && previous.free
        {
            self.free.remove(&(previous.bytes, number, before));
            start = before;
            bytes += previous.bytes;
        }
        region.chunks.insert(start, Chunk { bytes, free: true });
        self.free.insert((bytes, number, start));
    }

    fn add_region(&mut self, buffer: Buffer, alignment: usize) {
        let bytes = buffer.len();
        let chunks = BTreeMap::from([(0, Chunk { bytes, free: true })]);
        let region = Some(Region { buffer, alignment, chunks, sweeps: 0 });
        let free = self.regions.iter_mut().enumerate().find(|(_, region)| region.is_none());
        let number = match free {
            Some((number, place)) => {
                *place = region;
                number
            }
            None => {
                self.regions.push(region);
                self.regions.len() - 1
            }
        };
        self.free.insert((bytes, number, 0));
        self.stats.total_allocated += bytes;
        self.stats.num_arena_extensions += 1;
    }

    /// Gives wholly free regions back and starts growth over.
    fn trim(&mut self, config: &ArenaConfig) -> usize {
        let given_back = self.give_back(|_| true);
        if given_back > 0 {
            self.growth = config.initial_growth_chunk_bytes.max(GRANULE);
        }
        given_back
    }

    /// Gives those of the wholly free regions back that are chosen.
    fn give_back(&mut self, chosen: impl Fn(&Region) -> bool) -> usize {
        let mut given_back = 0;
        for (number, slot) in self.regions.iter_mut().enumerate() {
            let bytes = match slot {
                Some(region) if region.is_free() && chosen(region) => region.buffer.len(),
                _ => continue,
            };
            self.free.remove(&(bytes, number, 0));
            *slot = None;
            self.stats.total_allocated -= bytes;
            self.stats.num_arena_extensions -= 1;
            given_back += bytes;
        }
        self.stats.num_arena_shrinkages += u64::from(given_back > 0);
        given_back
    }
}

impl Stats {
    /// Counts bytes that went to a buffer.
    fn handed_out(&mut self, bytes: usize) {
        self.in_use += bytes;
        self.max_in_use = self.max_in_use.max(self.in_use);
        self.max_alloc_size = self.max_alloc_size.max(bytes);
    }
}
