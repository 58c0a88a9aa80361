//! Memory out of a pool of the driver's instead of the arena: the same bits in every way, within
//! the same limits, by the same names.

use std::sync::Arc;

use crate::support::{options, with_device};
use ort_core::ep::Device;
use ort_core::session::Model;
use ort_core::{Error, ErrorKind, Result};
use ort_ep_cuda::CudaDevice;
use ort_testkit::device_limits::{
    constants_come_and_go, device_keeps_to_limits, products, session_keeps_to_limits,
};

const POOL: (&str, &str) = ("arena.use_cuda_mempool", "1");
const THRESHOLD: &str = "arena.cuda_mempool_release_threshold";
const KEEP: &str = "arena.cuda_mempool_bytes_to_keep_on_shrink";

const WAYS: [&[(&str, &str)]; 4] = [
    &[POOL],
    &[POOL, ("do_copy_in_default_stream", "0")],
    &[POOL, ("enable_cuda_graph", "1"), (THRESHOLD, "1048576")],
    &[POOL, ("do_copy_in_default_stream", "0"), ("enable_cuda_graph", "1"), (KEEP, "4096")],
];

fn open(way: &[(&str, &str)], limit: Option<usize>) -> Result<Arc<dyn Device>> {
    let limit = limit.map(|bytes| bytes.to_string());
    let mut all = way.to_vec();
    all.extend(limit.as_deref().map(|limit| ("gpu_mem_limit", limit)));
    let device: Arc<dyn Device> = CudaDevice::open(0, &options(&all))?;
    Ok(device)
}

/// What a pool takes from the device for the smallest buffer: it holds multiples of that, whatever
/// the limit.
fn granule() -> Result<usize> {
    let memory = open(&[POOL], None)?.allocator();
    let _smallest = memory.allocate(1, 1)?;
    Ok(memory.stats().total_allocated)
}

#[test]
fn runs_have_the_same_bits_within_limits() -> Result<()> {
    if with_device("pools::runs_have_the_same_bits_within_limits")?.is_none() {
        return Ok(());
    }
    let (model, granule) = (Model::from_graph(products()?), granule()?);
    for way in WAYS {
        session_keeps_to_limits(&model, &|limit| open(way, limit))?;
        device_keeps_to_limits(&model, granule, &|limit| open(way, limit))?;
        constants_come_and_go(&model, &|limit| open(way, limit))?;
    }
    Ok(())
}

/// Beyond the limit is an error, after which less is had; what is free goes back as the options
/// say, in what the driver takes at once.
#[test]
fn the_limit_holds_and_what_is_free_goes_back() -> Result<()> {
    if with_device("pools::the_limit_holds_and_what_is_free_goes_back")?.is_none() {
        return Ok(());
    }
    let half = granule()?;
    assert!(half.is_multiple_of(2 << 20), "{half} bytes are no pages of the device");
    let (all, keep) = (2 * half, half.to_string());
    let threshold = (4 * half).to_string();
    // options, what the pool holds once all is free: at once, when somebody has waited, and after a
    // trim
    let cases: [(&[(&str, &str)], [usize; 3]); 3] = [
        (&[POOL], [all, 0, 0]),
        (&[POOL, (THRESHOLD, threshold.as_str())], [all, all, 0]),
        (&[POOL, (THRESHOLD, threshold.as_str()), (KEEP, keep.as_str())], [all, all, half]),
    ];
    for (way, held) in cases {
        let device = open(way, Some(all))?;
        let memory = device.allocator();
        let first = memory.allocate(half, 256)?;
        let problem = memory.allocate(half + (1 << 20), 256).map_err(Error::from);
        assert_eq!(problem.err().map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
        let other = memory.allocate(half - 100, 256)?;
        let stats = memory.stats();
        assert_eq!((stats.limit, stats.in_use, stats.num_allocs), (Some(all), all, 2));
        drop((first, other));
        let now = || memory.stats().total_allocated;
        let freed = now();
        device.synchronize()?;
        let waited = now();
        memory.trim();
        assert_eq!([freed, waited, now()], held, "{way:?}");
        let stats = memory.stats();
        assert_eq!((stats.in_use, stats.max_in_use, stats.max_alloc_size), (0, all, half));
    }
    Ok(())
}

/// A pool holds whole granules beyond a limit that is none: they are given back where all of one is
/// free, and are not waited for again and again.
#[test]
fn what_the_granularity_holds_beyond_the_limit_is_trimmed_once() -> Result<()> {
    if with_device("pools::what_the_granularity_holds_beyond_the_limit_is_trimmed_once")?.is_none() {
        return Ok(());
    }
    let granule = granule()?;
    let limit = granule + granule / 4;
    let bytes = limit.to_string();
    let all = [POOL, (THRESHOLD, "17179869184"), ("gpu_mem_limit", bytes.as_str())];
    let device = CudaDevice::open(0, &options(&all))?;
    let memory = device.allocator();
    let buffers = |count: usize| -> Result<Vec<_>> {
        (0..count).map(|_| Ok(memory.allocate(granule / 8, 256)?)).collect()
    };
    let (few, many) = (buffers(2)?, buffers(8)?);
    let held = || memory.stats().total_allocated;
    assert!((limit + 1..=2 * granule).contains(&held()), "{} bytes", held());
    let waits = device.counters().waits;
    drop(few);
    let few = buffers(2)?;
    assert_eq!(device.counters().waits, waits, "nothing goes back");
    drop((few, many));
    // One buffer of the limit's size does not fit into one granule.
    let large = memory.allocate(limit, 256)?;
    assert!((limit..=2 * granule).contains(&held()), "{} bytes", held());
    drop(large);
    Ok(())
}

#[test]
fn a_device_without_pools_says_so() {
    const NONE: &str = "ORT_CUDA_EMULATOR_POOLS";
    if std::env::var_os(NONE).is_none() {
        let emulator = crate::support::emulator().to_string_lossy().into_owned();
        let variables = [(crate::support::DRIVER, emulator.as_str()), (NONE, "0")];
        let (said, is_fine) = crate::support::run("pools::a_device_without_pools_says_so", &variables);
        assert!(is_fine && said.contains("1 passed"), "{said}");
        return;
    }
    let problem = CudaDevice::open(0, &options(&[POOL])).err();
    let said = problem.as_ref().map(ToString::to_string).unwrap_or_default();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::EpFail), "{said}");
    assert!(said.contains("has no pools of memory; leave the option out"), "{said}");
    assert!(CudaDevice::open(0, &options(&[("arena.use_cuda_mempool", "0")])).is_ok());
}
