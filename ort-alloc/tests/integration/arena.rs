//! The arena against a naive model, its growth against ONNX Runtime's, and its way with threads and
//! device memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ort_alloc::{
    AllocError, Allocator, Arena, ArenaConfig, Buffer, DeviceId, ExtendStrategy, HostAllocator, Stats,
};
use proptest::prelude::*;

const MIB: usize = 1 << 20;

/// Memory that the host cannot touch: handles, a total, and no bytes at all.
#[derive(Default)]
struct Opaque {
    next: AtomicU64,
    live: Arc<AtomicUsize>,
}

impl Allocator for Opaque {
    fn device(&self) -> DeviceId {
        DeviceId(3)
    }

    fn allocate(&self, bytes: usize, _alignment: usize) -> Result<Buffer, AllocError> {
        let live = Arc::clone(&self.live);
        live.fetch_add(bytes, Ordering::Relaxed);
        let release = move |_| {
            live.fetch_sub(bytes, Ordering::Relaxed);
        };
        Ok(Buffer::opaque(self.device(), bytes, self.next.fetch_add(1, Ordering::Relaxed), Box::new(release)))
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn trim(&self) -> usize {
        0
    }
}

/// Where a buffer is, in a space of its own: its region's handle, or 0 and the address.
fn extent(buffer: &Buffer) -> (u64, Range<usize>) {
    let start = match buffer.bytes() {
        Some(bytes) => bytes.as_ptr().addr(),
        None => buffer.offset(),
    };
    (buffer.handle().unwrap_or(0), start..start + buffer.len())
}

#[derive(Clone, Debug)]
enum Step {
    Allocate { bytes: usize, alignment: usize },
    Reserve { bytes: usize },
    Free(prop::sample::Index),
    Trim,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let small = (1..5000usize, 0..14u32);
    let large = (1..400_000usize, 0..8u32);
    let allocate = |(bytes, alignment): (usize, u32)| Step::Allocate { bytes, alignment: 1 << alignment };
    let step = prop_oneof![
        6 => small.prop_map(allocate),
        3 => large.prop_map(allocate),
        1 => (1..10_000usize).prop_map(|bytes| Step::Reserve { bytes }),
        8 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => Just(Step::Trim),
    ];
    prop::collection::vec(step, 0..120)
}

fn configs() -> impl Strategy<Value = ArenaConfig> {
    let extend = prop_oneof![Just(ExtendStrategy::PowerOfTwo), Just(ExtendStrategy::SameAsRequested)];
    let limit = prop_oneof![Just(None), (100_000..2_000_000usize).prop_map(Some)];
    let rest = (0..200_000usize, 0..100_000usize, any::<bool>());
    (extend, limit, rest).prop_map(|(extend, limit, (first, dead, replace))| ArenaConfig {
        extend,
        limit,
        initial_chunk_bytes: first,
        max_dead_bytes_per_chunk: dead,
        initial_growth_chunk_bytes: first / 2,
        max_power_of_two_extend_bytes: 500_000,
        replace_free_regions: replace,
    })
}

/// Plays the steps and compares with a list of what is live.
fn play(inner: Arc<dyn Allocator>, config: ArenaConfig, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let arena = Arena::new(inner, config);
    let mut live: Vec<(Buffer, u8)> = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        let mark = number as u8;
        let made = match step {
            Step::Allocate { bytes, alignment } => {
                arena.allocate(bytes, alignment).map(|made| (made, alignment))
            }
            Step::Reserve { bytes } => arena.reserve(bytes, 64).map(|made| (made, 64)),
            Step::Free(_) if live.is_empty() => continue,
            Step::Free(which) => {
                let (buffer, mark) = live.swap_remove(which.index(live.len()));
                let intact = buffer.bytes().is_none_or(|bytes| bytes.iter().all(|&byte| byte == mark));
                prop_assert!(intact, "somebody else wrote into a live buffer");
                continue;
            }
            Step::Trim => {
                let before = arena.stats();
                let given_back = arena.trim();
                prop_assert_eq!(before.total_allocated - given_back, arena.stats().total_allocated);
                prop_assert_eq!(arena.trim(), 0);
                continue;
            }
        };
        let Ok((mut buffer, alignment)) = made else {
            prop_assert!(arena.stats().limit.is_some(), "only a limit may refuse");
            continue;
        };
        let (space, range) = extent(&buffer);
        prop_assert!(range.start.is_multiple_of(alignment));
        for (other, _) in &live {
            let (other_space, other_range) = extent(other);
            let apart =
                space != other_space || range.end <= other_range.start || other_range.end <= range.start;
            prop_assert!(apart, "{range:?} overlaps {other_range:?}");
        }
        if let Some(bytes) = buffer.bytes_mut() {
            bytes.fill(mark);
        }
        live.push((buffer, mark));
        let stats = arena.stats();
        prop_assert!(stats.in_use >= live.iter().map(|(buffer, _)| buffer.len()).sum());
        prop_assert!(stats.in_use <= stats.max_in_use && stats.in_use <= stats.total_allocated);
        prop_assert!(stats.limit.is_none_or(|limit| stats.total_allocated <= limit));
    }
    drop(live);
    prop_assert_eq!(arena.stats().in_use, 0);
    let held = arena.stats().total_allocated;
    prop_assert_eq!((arena.trim(), arena.stats().total_allocated), (held, 0));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn host_buffers_never_overlap_and_all_come_back(config in configs(), steps in steps()) {
        let host = Arc::new(HostAllocator::new());
        play(Arc::clone(&host) as Arc<dyn Allocator>, config, steps)?;
        prop_assert_eq!(host.stats().in_use, 0);
    }

    #[test]
    fn opaque_buffers_never_overlap_and_all_come_back(config in configs(), steps in steps()) {
        let opaque = Arc::new(Opaque { next: AtomicU64::new(1), ..Opaque::default() });
        play(Arc::clone(&opaque) as Arc<dyn Allocator>, config, steps)?;
        prop_assert_eq!(opaque.live.load(Ordering::Relaxed), 0);
    }
}

/// Region sizes as ONNX Runtime 1.31.1 was seen to choose them.
#[test]
fn growth_is_that_of_onnx_runtime() -> Result<(), AllocError> {
    let cap = |bytes| ArenaConfig { max_power_of_two_extend_bytes: bytes, ..ArenaConfig::default() };
    let same = ArenaConfig { extend: ExtendStrategy::SameAsRequested, ..ArenaConfig::default() };
    let cases: [(ArenaConfig, &[usize], &[usize]); 4] = [
        (ArenaConfig::default(), &[256_000, 1_000_000, 4_000_000], &[MIB, 2 * MIB, 4 * MIB]),
        (cap(4 * MIB), &[5_600_000, 5_600_000, 5_600_000], &[8_388_608, 8_388_608, 8_388_608]),
        (same, &[256_000, 1000, 768_000], &[256_000, 1024, 768_000]),
        (cap(2 * MIB), &[MIB, MIB, 2 * MIB, MIB], &[MIB, 2 * MIB, 2 * MIB, 0]),
    ];
    for (config, requests, regions) in cases {
        let arena = Arena::new(Arc::<HostAllocator>::default(), config);
        let mut held = Vec::new();
        for (&bytes, &region) in requests.iter().zip(regions) {
            let before = arena.stats().total_allocated;
            held.push(arena.allocate(bytes, 64)?);
            assert_eq!(arena.stats().total_allocated - before, region, "{requests:?}: {bytes}");
        }
    }
    Ok(())
}

#[test]
fn a_chunk_is_split_where_much_would_be_left() -> Result<(), AllocError> {
    let whole = ArenaConfig::default();
    let lean = ArenaConfig::lean();
    // 1.5 of the request is handed out whole by default, and split to the granule by the lean
    // settings.
    for (config, in_use) in [(whole, 768_000), (lean, 512_000)] {
        let arena = Arena::new(
            Arc::<HostAllocator>::default(),
            ArenaConfig { initial_chunk_bytes: 768_000, ..config },
        );
        drop(arena.allocate(768_000, 64)?);
        let _held = arena.allocate(512_000, 64)?;
        assert_eq!(arena.stats().in_use, in_use);
    }
    Ok(())
}

#[test]
fn the_limit_holds_and_the_arena_stays_usable() -> Result<(), AllocError> {
    let config = ArenaConfig { limit: Some(3 * MIB), ..ArenaConfig::lean() };
    let arena = Arena::new(Arc::<HostAllocator>::default(), config);
    let first = arena.allocate(2 * MIB, 64)?;
    let refused = arena.allocate(2 * MIB, 64).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(
        refused.contains("buffer of size 2097152 on host: 1048576 bytes (1.0 MiB) were available"),
        "{refused}"
    );
    assert!(arena.reserve(2 * MIB, 64).is_err());
    drop(first);
    // The free region is too small for this; it goes back, and there is room.
    drop(arena.allocate(3 * MIB, 64)?);
    assert_eq!(arena.stats().total_allocated, 3 * MIB);
    Ok(())
}

#[test]
fn reserved_memory_goes_back_at_once() -> Result<(), AllocError> {
    let arena = Arena::new(Arc::<HostAllocator>::default(), ArenaConfig::default());
    let reserved = arena.reserve(5000, 64)?;
    let stats = arena.stats();
    assert_eq!((stats.num_reserves, stats.num_arena_extensions, stats.total_allocated), (1, 0, 5000));
    drop(reserved);
    assert_eq!((arena.stats().total_allocated, arena.stats().in_use), (0, 0));
    Ok(())
}

#[test]
fn a_trim_leaves_what_is_live() -> Result<(), AllocError> {
    let arena = Arena::new(Arc::<HostAllocator>::default(), ArenaConfig::lean());
    let mut kept = arena.allocate(100_000, 64)?;
    let dropped = arena.allocate(200_000, 64)?;
    drop(dropped);
    assert_eq!(arena.trim(), 200_192);
    if let Some(bytes) = kept.bytes_mut() {
        bytes.fill(7);
    }
    let stats = arena.stats();
    assert_eq!((stats.num_arena_extensions, stats.num_arena_shrinkages), (1, 1));
    // Buffers outlive the arena's last handle.
    drop(arena);
    assert!(kept.bytes().is_some_and(|bytes| bytes.iter().all(|&byte| byte == 7)));
    Ok(())
}

#[test]
fn sizes_that_grow_do_not_add_up() -> Result<(), AllocError> {
    let host = Arc::new(HostAllocator::new());
    let arena = Arena::new(Arc::clone(&host) as Arc<dyn Allocator>, ArenaConfig::lean());
    let lasting = arena.allocate(5000, 64)?;
    for bytes in (10_000..100_000).step_by(1000) {
        let one = arena.allocate(bytes, 64)?;
        drop(arena.allocate(2 * bytes, 64)?);
        drop(one);
        assert!(arena.stats().total_allocated < 6000 + 4 * bytes, "{:?}", arena.stats());
    }
    assert_eq!(arena.idle_bytes(), arena.stats().total_allocated - arena.stats().in_use);
    // What served nothing between two sweeps goes; what is in use stays.
    let again = arena.allocate(90_000, 64)?;
    assert!(arena.holds(again.bytes().unwrap_or_default()) && !arena.holds(&[0; 10]));
    drop(again);
    assert_eq!(arena.sweep(), 0);
    assert!(arena.sweep() > 0);
    assert_eq!(arena.stats().total_allocated, arena.stats().in_use);
    assert_eq!((lasting.len(), host.stats().in_use), (5000, 5120));
    Ok(())
}

#[test]
fn statistics_read_like_onnx_runtimes() -> Result<(), AllocError> {
    let arena = Arena::new(
        Arc::<HostAllocator>::default(),
        ArenaConfig { limit: Some(MIB), ..ArenaConfig::default() },
    );
    let _held = arena.allocate(1000, 64)?;
    let text = arena.stats().to_string();
    let lines: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once(':')).collect();
    let expected =
        [("Limit", "1048576"), ("InUse", "1024"), ("TotalAllocated", "1048576"), ("NumAllocs", "1")];
    for (name, value) in expected {
        assert_eq!(lines.get(name).map(|text| text.trim()), Some(value), "{text}");
    }
    Ok(())
}

#[test]
fn nonsense_is_refused() {
    let arena = Arena::new(Arc::<HostAllocator>::default(), ArenaConfig::default());
    assert!(matches!(arena.allocate(8, 3), Err(AllocError::Unsupported { .. })));
    assert!(matches!(arena.allocate(8, 0), Err(AllocError::Unsupported { .. })));
    for bytes in [usize::MAX, usize::MAX - 255, isize::MAX as usize] {
        assert!(matches!(arena.allocate(bytes, 64), Err(AllocError::OutOfMemory { .. })), "{bytes}");
    }
    assert!(arena.allocate(0, 64).is_ok_and(|empty| empty.is_empty()));
}

#[test]
fn threads_share_an_arena() {
    let arena = Arena::new(Arc::<HostAllocator>::default(), ArenaConfig::default());
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let arena = &arena;
            scope.spawn(move || {
                let mut held = Vec::new();
                for round in 0..2000usize {
                    let made = arena.allocate(1 + (round * 97 + usize::from(thread)) % 9000, 64);
                    let Ok(mut buffer) = made else { continue };
                    buffer.bytes_mut().into_iter().for_each(|bytes| bytes.fill(thread));
                    held.push(buffer);
                    if held.len() > 8 {
                        let old: Buffer = held.swap_remove(round % 8);
                        assert!(old.bytes().is_some_and(|bytes| bytes.iter().all(|&byte| byte == thread)));
                    }
                }
            });
        }
    });
    let stats = arena.stats();
    assert_eq!((stats.in_use, stats.num_allocs), (0, 8000));
    assert_eq!(arena.trim(), stats.total_allocated);
}
