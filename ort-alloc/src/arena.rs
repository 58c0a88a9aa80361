//! Best-fit arena with coalescing over any allocator, for sizes unknown before the run.
//!
//! It behaves like ONNX Runtime's arena. Regions from the underlying allocator are divided into
//! chunks in multiples of 256 bytes. A request takes the smallest free chunk that fits, and splits
//! off the rest. A freed chunk is coalesced with its free neighbours. Regions grow by one of two
//! strategies. Four differences lower memory use:
//!
//! - trimming releases *every* region that is entirely free, including the first;
//! - before a request fails for lack of room, such regions are released and the request is retried;
//! - a reservation counts against the limit before it is made, not only afterwards;
//! - there is no table with an entry per granule: chunks are keyed by their offset, so unused
//!   memory costs nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::buffer::{Address, Origin};
use crate::fork::Mutex;
use crate::region::round_up;
use crate::{AllocError, Allocator, Buffer, DeviceId, Stats};

/// Chunk sizes and offsets are multiples of this many bytes.
pub const GRANULE: usize = 256;

/// The number of sweeps without a request at which a free region is released.
const PATIENCE: u32 = 2;

/// Below this size, a retry requests only the bytes needed.
const SMALLEST_RETRY: usize = 8 << 10;

/// How an arena sizes its next region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ExtendStrategy {
    /// A unit that doubles with each extension, so that there are few regions.
    #[default]
    PowerOfTwo,
    /// Exactly the requested size, so that no memory is held in advance.
    SameAsRequested,
}

/// An arena's settings. The defaults are ONNX Runtime's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// How regions grow.
    pub extend: ExtendStrategy,
    /// The most bytes in regions and reservations; `None` for no limit.
    pub limit: Option<usize>,
    /// The size of the first region, for [`ExtendStrategy::PowerOfTwo`]. 1 MiB.
    pub initial_chunk_bytes: usize,
    /// A free chunk is used whole if the rest would be smaller than this and than the request. 128
    /// MiB.
    pub max_dead_bytes_per_chunk: usize,
    /// The unit of growth after a trim, for [`ExtendStrategy::PowerOfTwo`]. 2 MiB.
    pub initial_growth_chunk_bytes: usize,
    /// The upper limit of the unit. Larger requests are still rounded up to a power of two. 1 GiB.
    pub max_power_of_two_extend_bytes: usize,
    /// Whether free regions too small for a request are released before the arena allocates a new
    /// one. Without it, an arena with slowly growing requests keeps a region of every size. False,
    /// as in ONNX Runtime.
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
    /// Settings that minimize memory: regions of the requested size, chunks split down to the
    /// granule, and free regions released if they are too small.
    pub fn lean() -> Self {
        Self {
            extend: ExtendStrategy::SameAsRequested,
            max_dead_bytes_per_chunk: GRANULE,
            replace_free_regions: true,
            ..Self::default()
        }
    }
}

/// A thread-safe arena. Clones share it. Buffers may outlive it, because each keeps the shared
/// state alive.
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
    /// Whether there has been a region or a reservation. Until then, what runs ask at their begin
    /// and end needs no lock.
    is_used: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Slots are reused but never removed, so a region's index stays valid while any of its chunks
    /// is live.
    regions: Vec<Option<Region>>,
    /// Free chunks as (size, region, offset): the order for best fit.
    free: BTreeSet<(usize, usize, usize)>,
    /// The unit of the next extension.
    growth: usize,
    stats: Stats,
}

/// One allocation from the underlying allocator, divided into chunks without gaps.
struct Region {
    buffer: Buffer,
    alignment: usize,
    chunks: BTreeMap<usize, Chunk>,
    /// Calls of [`Arena::sweep`] since the region last served a request.
    sweeps: u32,
}

impl Region {
    /// Returns whether the region is entirely free. Free neighbours are always coalesced, so it is
    /// a single free chunk then.
    fn is_free(&self) -> bool {
        self.chunks.len() == 1 && self.chunks.values().all(|chunk| chunk.free)
    }

    /// Compares addresses only: the region's memory belongs to the buffers in it.
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

/// What a reserved buffer owns: an allocation from the underlying allocator, counted here.
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
    /// Creates an empty arena.
    pub fn new(inner: Arc<dyn Allocator>, config: ArenaConfig) -> Self {
        let stats = Stats { limit: config.limit, ..Stats::default() };
        let growth = config.initial_chunk_bytes.max(GRANULE);
        let state = Mutex::new(State { growth, stats, ..State::default() });
        Self { shared: Arc::new(Shared { inner, config, state, is_used: AtomicBool::new(false) }) }
    }

    /// Allocates directly from the underlying allocator, for long-lived memory that would pin a
    /// region. It counts against the limit, and is released when dropped.
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
        shared.is_used.store(true, Ordering::Relaxed);
        state.stats.num_reserves += 1;
        state.stats.total_allocated += bytes;
        state.stats.handed_out(bytes);
        drop(state);
        let address = buffer.address();
        let block = ReservedBlock { shared: Arc::clone(shared), buffer: Box::new(buffer) };
        Ok(Buffer::new(address, bytes, device, Origin::Reserved(block)))
    }

    /// Releases the regions that are free and have served no request since before the previous
    /// call. Returns their bytes. The growth unit is not reset.
    pub fn sweep(&self) -> usize {
        if !self.shared.is_used.load(Ordering::Relaxed) {
            return 0;
        }
        let mut state = self.shared.state.lock();
        state.regions.iter_mut().flatten().for_each(|region| region.sweeps += 1);
        state.give_back(|region| region.sweeps >= PATIENCE)
    }

    /// Returns the bytes of chunks and reservations in use.
    pub fn in_use(&self) -> usize {
        match self.shared.is_used.load(Ordering::Relaxed) {
            true => self.shared.state.lock().stats.in_use,
            false => 0,
        }
    }

    /// Returns whether these host bytes are in one of the arena's regions.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        let state = self.shared.state.lock();
        state.regions.iter().flatten().any(|region| region.holds(bytes))
    }

    /// Returns the bytes of free regions, which a trim would release.
    pub fn idle_bytes(&self) -> usize {
        if !self.shared.is_used.load(Ordering::Relaxed) {
            return 0;
        }
        let state = self.shared.state.lock();
        state
            .regions
            .iter()
            .flatten()
            .filter(|region| region.is_free())
            .map(|region| region.buffer.len())
            .sum()
    }

    /// Returns the settings.
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
                // Only now that no free chunk fits: one of these regions could have served the
                // request.
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

    /// Releases every free region.
    fn trim(&self) -> usize {
        self.shared.state.lock().trim(&self.shared.config)
    }
}

impl Shared {
    /// Returns the bytes that regions and reservations may still take.
    fn available(&self, state: &State) -> usize {
        self.config.limit.unwrap_or(usize::MAX).saturating_sub(state.stats.total_allocated)
    }

    /// Adds a region of at least `need` bytes. If that fails, releases free regions and tries once
    /// more.
    fn extend(&self, state: &mut State, need: usize, alignment: usize) -> Result<(), AllocError> {
        match self.try_extend(state, need, alignment) {
            Err(_) if state.trim(&self.config) > 0 => self.try_extend(state, need, alignment),
            outcome => outcome,
        }
    }

    fn try_extend(&self, state: &mut State, need: usize, alignment: usize) -> Result<(), AllocError> {
        let device = self.inner.device();
        // Rounded down, because regions are whole granules.
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
                    self.is_used.store(true, Ordering::Relaxed);
                    state.growth = growth;
                    state.add_region(buffer, alignment);
                    return Ok(());
                }
                // Retry with a smaller region than the strategy's, as long as it holds the request.
                Err(_) if wanted > need => {
                    // Nine tenths is ONNX Runtime's back-pedal factor.
                    let less = wanted / 10 * 9 / GRANULE * GRANULE;
                    wanted = if less > SMALLEST_RETRY { less.max(need) } else { need };
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the size of the next region and the growth unit after it.
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

/// A free chunk that can serve a request, and the bytes that alignment skips at its front.
#[derive(Clone, Copy)]
struct Found {
    bytes: usize,
    region: usize,
    offset: usize,
    skip: usize,
}

impl State {
    /// Returns the smallest free chunk that holds `need` bytes at a multiple of `alignment`.
    fn find(&self, need: usize, alignment: usize) -> Option<Found> {
        self.free.range((need, 0, 0)..).find_map(|&(bytes, region, offset)| {
            if alignment <= GRANULE {
                return Some(Found { bytes, region, offset, skip: 0 });
            }
            // An aligned offset implies an aligned address only up to the region's own alignment.
            self.regions.get(region)?.as_ref().filter(|region| region.alignment >= alignment)?;
            let skip = round_up(offset, alignment)? - offset;
            (skip.checked_add(need)? <= bytes).then_some(Found { bytes, region, offset, skip })
        })
    }

    /// Marks a chunk as used. The bytes skipped for alignment stay free, and so does the rest
    /// behind it if it is large.
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

    /// Frees a chunk and coalesces it with its free neighbours.
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

    /// Releases all free regions and resets the growth unit.
    fn trim(&mut self, config: &ArenaConfig) -> usize {
        let given_back = self.give_back(|_| true);
        if given_back > 0 {
            self.growth = config.initial_growth_chunk_bytes.max(GRANULE);
        }
        given_back
    }

    /// Releases the free regions that `chosen` selects.
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
    /// Counts bytes given to a buffer.
    fn handed_out(&mut self, bytes: usize) {
        self.in_use += bytes;
        self.max_in_use = self.max_in_use.max(self.in_use);
        self.max_alloc_size = self.max_alloc_size.max(bytes);
    }
}
