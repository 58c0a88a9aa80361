//! The host's side: pinned copies that wait for nothing, streams of their own, the caller's stream,
//! CUDA graphs, and the end in any order; memory within limits and out of pools, and the provider
//! as a library.

#[path = "streams/library.rs"]
mod library;
#[path = "streams/limits.rs"]
mod limits;
#[path = "streams/pools.rs"]
mod pools;
mod support;

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use ort_core::dtype::DType;
use ort_core::ep::{Device, ExecutionProvider};
use ort_core::ir::GraphBuilder;
use ort_core::session::{Model, RunOptions, Session};
use ort_core::tensor::{Tensor, TensorMut, TensorView, Value};
use ort_core::{ErrorKind, Result, error};
use ort_ep_cuda::{CudaDevice, CudaProvider};
use ort_testkit::on_device::numbers;
use support::{options, with_device};

/// Options under which results must have the same bits.
const WAYS: [&[(&str, &str)]; 4] = [
    &[],
    &[("do_copy_in_default_stream", "0")],
    &[("enable_cuda_graph", "1")],
    &[("do_copy_in_default_stream", "0"), ("enable_cuda_graph", "1")],
];
const SEPARATE: [&[(&str, &str)]; 2] = [WAYS[0], WAYS[1]];
/// The pinned memory of uploads.
const RING: usize = 16 << 20;

/// Some layers over x and y of [rows, 64]: y is read in the middle.
fn model() -> Result<Model> {
    let mut builder = GraphBuilder::new("layers");
    let x = builder.input("x", DType::F32, &["rows", "64"]);
    let y = builder.input("y", DType::F32, &["rows", "64"]);
    let weights = builder.constant(Tensor::from_slice(&[64, 64], &numbers(64 * 64, 1))?);
    let product = builder.node("MatMul", &[x, weights], &[])?;
    let soft = builder.node("Softmax", &[product], &[])?;
    let again = builder.node("MatMul", &[soft, weights], &[])?;
    let sum = builder.node("Add", &[again, y], &[])?;
    let third = builder.node("MatMul", &[sum, weights], &[])?;
    let last = builder.node("Softmax", &[third], &[])?;
    Ok(Model::from_graph(builder.finish(&[last])?))
}

fn session(device: &Arc<CudaDevice>) -> Result<Session> {
    Session::builder(&model()?).device(device.clone()).batch_split(false).build()
}

fn rows(rows: usize, seed: usize) -> Result<Tensor> {
    Tensor::from_slice(&[rows, 64], &numbers(rows * 64, seed))
}

/// The bits of a run.
fn run(session: &Session, count: usize, seed: usize) -> Result<Vec<u32>> {
    let inputs: [(&str, Value); 2] =
        [("x", rows(count, seed)?.into()), ("y", rows(count, seed + 100)?.into())];
    bits(&session.run(&inputs)?[0].1)
}

fn bits(value: &Value) -> Result<Vec<u32>> {
    Ok(value.tensor()?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
}

/// Memory of the device with these bytes, which are changed once they are on their way.
fn upload(device: &CudaDevice, mut bytes: Vec<u8>) -> Result<Tensor> {
    let shape = [bytes.len()];
    let copy = Tensor::from_buffer(DType::U8, &shape, device.allocator().allocate(bytes.len(), 256)?)?;
    let range = copy.view().device_range().ok_or_else(|| error!(Fail, "it is not on the device"))?;
    device.copy(TensorView::host(DType::U8, &shape, &bytes), TensorMut::device(DType::U8, &shape, range))?;
    bytes.fill(0xEE);
    Ok(copy)
}

fn download(device: &CudaDevice, tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; tensor.byte_count()];
    device.copy(tensor.view(), TensorMut::host(DType::U8, tensor.shape(), &mut bytes))?;
    Ok(bytes)
}

fn pattern(count: usize, seed: usize) -> Vec<u8> {
    (0..count).map(|index| (index.wrapping_mul(31) ^ (index >> 9) ^ seed) as u8).collect()
}

#[test]
fn uploads_wait_for_nothing() -> Result<()> {
    if with_device("uploads_wait_for_nothing")?.is_none() {
        return Ok(());
    }
    for way in SEPARATE {
        let device = CudaDevice::open(0, &options(way))?;
        assert_eq!(device.counters().pinned_bytes, 0);
        let sizes = [1, 3, 4096, 100_001, 3 << 20, 5 << 20];
        let all: Result<Vec<Tensor>> =
            sizes.iter().map(|bytes| upload(&device, pattern(*bytes, *bytes))).collect();
        assert_eq!(device.counters().waits, 0, "{way:?}");
        for (tensor, bytes) in all?.iter().zip(sizes) {
            assert!(download(&device, tensor)? == pattern(bytes, bytes), "{bytes} bytes, {way:?}");
        }
        // A wait for each part of 4 MiB that is read.
        assert_eq!(device.counters().waits, sizes.len() as u64 + 1, "{way:?}");
    }
    Ok(())
}

#[test]
fn more_goes_up_than_the_ring_holds() -> Result<()> {
    if with_device("more_goes_up_than_the_ring_holds")?.is_none() {
        return Ok(());
    }
    for way in SEPARATE {
        let device = CudaDevice::open(0, &options(way))?;
        let sizes = [(40 << 20) + 5, 3 << 20, (3 << 20) + 17, 9 << 20, 100, (21 << 20) - 3];
        let all: Result<Vec<Tensor>> =
            sizes.iter().enumerate().map(|(seed, bytes)| upload(&device, pattern(*bytes, seed))).collect();
        let mut all: Vec<_> = all?.into_iter().enumerate().collect();
        all.reverse();
        for (seed, tensor) in &all {
            assert!(download(&device, tensor)? == pattern(sizes[*seed], *seed), "{seed}, {way:?}");
        }
        let pinned = device.counters().pinned_bytes;
        assert!(pinned > RING && pinned <= RING + (8 << 20), "{pinned}");
        // What waits in the arena holds the device's streams, and the memory behind them.
        drop(device);
        drop(all);
    }
    Ok(())
}

/// Runs follow each other on the same memory, also before the device has done what it was asked
/// for.
#[test]
fn runs_have_the_same_bits_in_every_way() -> Result<()> {
    if with_device("runs_have_the_same_bits_in_every_way")?.is_none() {
        return Ok(());
    }
    let turns = [3, 3, 70, 3, 70, 70, 3, 1, 1, 1, 70];
    let mut expected = Vec::new();
    for way in WAYS {
        let device = CudaDevice::open(0, &options(way))?;
        let session = session(&device)?;
        let all = turns.iter().enumerate().map(|(seed, count)| run(&session, *count, seed));
        let mut all: Vec<Vec<u32>> = all.collect::<Result<_>>()?;
        // The result of each run is an input of the next one, and no call waits.
        let mut binding = session.io_binding();
        let mut state: Value = session.upload(&rows(5, 7)?, device.memory())?.into();
        binding.bind_output(&session.outputs()[0].name, device.memory())?;
        for turn in 0..6 {
            binding.bind_input("x", state)?;
            binding.bind_input("y", rows(5, turn)?)?;
            session.run_with_binding(&mut binding, &RunOptions::default())?;
            state = binding.get_outputs()?[0].1.clone();
        }
        // Waits for the uploads of these runs before anybody waits for what they compute.
        upload(&device, pattern(RING + (5 << 20), 0))?;
        all.push(bits(&session.to_host(&state)?)?);
        assert!(all.iter().flatten().all(|bits| !f32::from_bits(*bits).is_nan()), "{way:?}");
        match expected.is_empty() {
            true => expected = all,
            false => assert!(all == expected, "{way:?}"),
        }
    }
    Ok(())
}

#[test]
fn what_comes_again_is_one_launch() -> Result<()> {
    if with_device("what_comes_again_is_one_launch")?.is_none() {
        return Ok(());
    }
    let plain = session(&CudaDevice::open(0, &options(WAYS[0]))?)?;
    for way in [WAYS[2], WAYS[3]] {
        let device = CudaDevice::open(0, &options(way))?;
        let session = session(&device)?;
        for count in [4, 33] {
            run(&session, count, 0)?;
            run(&session, count, 1)?;
        }
        let before = device.counters();
        assert!(before.captures >= 2, "{before:?}");
        for turn in 0..6 {
            let count = [4, 33][turn % 2];
            assert!(run(&session, count, turn)? == run(&plain, count, turn)?, "{count} rows, {way:?}");
        }
        let after = device.counters();
        assert_eq!((after.launches, after.captures), (before.launches, before.captures), "{way:?}");
        assert!(after.replays >= before.replays + 6, "{after:?}");
    }
    Ok(())
}

/// More shapes than graphs are kept for.
#[test]
fn forgotten_graphs_are_captured_again() -> Result<()> {
    if with_device("forgotten_graphs_are_captured_again")?.is_none() {
        return Ok(());
    }
    let plain = session(&CudaDevice::open(0, &options(WAYS[0]))?)?;
    let device = CudaDevice::open(0, &options(WAYS[2]))?;
    let session = session(&device)?;
    for round in 0..3 {
        for count in 1..=40 {
            assert!(run(&session, count, round)? == run(&plain, count, round)?, "{count} rows");
        }
    }
    let counters = device.counters();
    assert!(counters.captures > 40, "{counters:?}");
    Ok(())
}

#[test]
fn threads_share_a_device() -> Result<()> {
    if with_device("threads_share_a_device")?.is_none() {
        return Ok(());
    }
    let plain = session(&CudaDevice::open(0, &options(WAYS[0]))?)?;
    let expected: Vec<Vec<u32>> =
        (0..8).map(|seed| run(&plain, 20 + seed % 3, seed)).collect::<Result<_>>()?;
    for way in WAYS {
        let device = CudaDevice::open(0, &options(way))?;
        let work = || -> Result<()> {
            let session = session(&device)?;
            for turn in 0..16 {
                let seed = turn % 8;
                assert!(run(&session, 20 + seed % 3, seed)? == expected[seed], "run {turn}, {way:?}");
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| error!(Fail, "a thread panicked"))?)
        })?;
    }
    Ok(())
}

/// A stream in the context of the device that was opened last by this thread.
fn new_stream() -> Result<sys::CUstream> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: writes one handle.
    let code = unsafe { sys::cuStreamCreate(&mut stream, 1) };
    if code == sys::CUresult::CUDA_SUCCESS { Ok(stream) } else { Err(error!(Fail, "{code:?}")) }
}

#[test]
fn the_stream_of_the_caller_is_taken_and_left() -> Result<()> {
    if with_device("the_stream_of_the_caller_is_taken_and_left")?.is_none() {
        return Ok(());
    }
    let plain = session(&CudaDevice::open(0, &options(WAYS[0]))?)?;
    let expected = run(&plain, 9, 4)?;
    let stream = new_stream()?;
    let address = stream.expose_provenance();
    for written in [address.to_string(), format!("{address:#x}")] {
        for way in WAYS {
            let own = [way, &[("user_compute_stream", written.as_str())]].concat();
            let device = CudaProvider.open(0, &options(&own))?;
            let session = Session::builder(&model()?).device(device).batch_split(false).build()?;
            for _ in 0..3 {
                assert!(run(&session, 9, 4)? == expected, "{own:?}");
            }
        }
    }
    // SAFETY: it is live, as nothing else has destroyed it.
    let codes = unsafe { [sys::cuStreamSynchronize(stream), sys::cuStreamDestroy_v2(stream)] };
    assert_eq!(codes, [sys::CUresult::CUDA_SUCCESS; 2]);
    Ok(())
}

/// What a process holds, dropped in the order that it is told, or not at all.
#[test]
fn a_process_ends() -> Result<()> {
    const ORDER: &str = "ORT_TEST_ORDER";
    type All = (Arc<dyn Device>, Session, Tensor);
    static KEPT: OnceLock<All> = OnceLock::new();
    thread_local! { static OWN: RefCell<Option<All>> = const { RefCell::new(None) } }

    let Ok(order) = std::env::var(ORDER) else {
        let driver = std::env::var(support::DRIVER);
        let driver = driver.unwrap_or_else(|_| support::emulator().to_string_lossy().into_owned());
        for order in ["0", "1", "2", "3", "4"] {
            let (said, is_fine) =
                support::run("a_process_ends", &[(support::DRIVER, &driver), (ORDER, order)]);
            assert!(is_fine && said.contains("1 passed"), "{order}: {said}");
        }
        return Ok(());
    };
    let made = || -> Result<All> {
        let device = CudaProvider.open(0, &options(WAYS[3]))?;
        let session = Session::builder(&model()?).device(device.clone()).build()?;
        let tensor = session.upload(&rows(2, 0)?, device.memory())?;
        for _ in 0..3 {
            run(&session, 2, 0)?;
        }
        Ok((device, session, tensor))
    };
    let (device, session, tensor) = made()?;
    match order.as_str() {
        "0" => {
            drop(device);
            drop(session);
            drop(tensor);
        }
        "1" => {
            drop(tensor);
            drop(session);
            drop(device);
        }
        "2" => {
            drop(session);
            drop(tensor);
            drop(device);
        }
        "3" => drop(KEPT.set((device, session, tensor))),
        _ => {
            OWN.set(Some((device, session, tensor)));
            let other = std::thread::spawn(move || made().map(|all| OWN.set(Some(all))));
            other.join().map_err(|_| error!(Fail, "a thread panicked"))??;
        }
    }
    Ok(())
}

/// A context that is broken says so in that run and in every later call, and can be dropped.
#[test]
fn a_broken_context_stays_broken() -> Result<()> {
    const STEPS: &str = "ORT_CUDA_EMULATOR_STEPS";
    const WAY: &str = "ORT_TEST_WAY";
    let Ok(way) = std::env::var(WAY) else {
        let emulator = support::emulator().to_string_lossy().into_owned();
        for way in ["0", "1", "2", "3"] {
            let variables = [(support::DRIVER, emulator.as_str()), (STEPS, "1000"), (WAY, way)];
            let (said, is_fine) = support::run("a_broken_context_stays_broken", &variables);
            assert!(is_fine && said.contains("1 passed"), "{way}: {said}");
        }
        return Ok(());
    };
    let way = WAYS.get(way.parse().unwrap_or(0)).copied().unwrap_or_default();
    let device = CudaDevice::open(0, &options(way))?;
    let session = session(&device)?;
    for turn in 0..3 {
        let problem = run(&session, 200, turn).err();
        let said = problem.as_ref().map(|problem| problem.to_string()).unwrap_or_default();
        assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::EpFail), "{said}");
        assert!(said.contains("LAUNCH_TIMEOUT") && said.contains("start a new one"), "{said}");
        assert!(device.check().is_err() && device.synchronize().is_err());
    }
    Ok(())
}
