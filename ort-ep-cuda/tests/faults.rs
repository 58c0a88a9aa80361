//! What is told where CUDA cannot be used, or an option is not one: errors with what was looked for
//! and found.

mod support;

use ort_core::ep::{ExecutionProvider, ProviderOptions};
use ort_core::{Error, ErrorKind, Result};
use ort_ep_cuda::{CudaDevice, CudaProvider};
use support::{DRIVER, emulator, run};

/// Opens the first device, or says why it cannot: in the processes that the others start, and in
/// this one.
#[test]
fn opens_a_device() {
    match CudaDevice::open(0, &ProviderOptions::new()) {
        Ok(_) => println!("opened"),
        Err(problem) => {
            assert_eq!(problem.kind(), ErrorKind::EpFail, "{problem}");
            println!("{problem}");
        }
    }
}

/// Drivers, what else the process is told, and what it says then.
#[test]
fn a_driver_that_cannot_be_used_is_an_error_that_says_why() {
    let emulator = emulator().to_string_lossy().into_owned();
    let cases: [(&str, &[(&str, &str)], &[&str]); 5] = [
        (
            "/nowhere/libcuda.so",
            &[],
            &["there is no NVIDIA driver: /nowhere/libcuda.so", "install an NVIDIA driver"],
        ),
        ("libc.so.6", &[], &["libc.so.6 has no function cuInit", "too old", "install an NVIDIA driver"]),
        (&emulator, &[("ORT_CUDA_EMULATOR_DEVICES", "0")], &["cuInit", "NO_DEVICE", "nvidia-smi"]),
        (&emulator, &[("ORT_CUDA_EMULATOR_CAPABILITY", "7.0")], &["compute capability 7.0", "need 7.5"]),
        (&emulator, &[], &["opened"]),
    ];
    for (driver, others, expected) in cases {
        let variables: Vec<(&str, &str)> =
            [(DRIVER, driver)].into_iter().chain(others.iter().copied()).collect();
        let (said, is_fine) = run("opens_a_device", &variables);
        assert!(is_fine, "{variables:?}: {said}");
        for part in expected {
            assert!(said.contains(part), "{variables:?}: '{part}' is not in: {said}");
        }
    }
}

#[test]
fn the_name_of_a_library_is_said_once() {
    let (said, _) = run("opens_a_device", &[(DRIVER, "/nowhere/libcuda.so")]);
    assert_eq!(said.matches("/nowhere/libcuda.so").count(), 1, "{said}");
}

#[test]
fn options_that_are_none_are_refused_before_a_driver_is_looked_for() {
    let cases = [
        ("gpu_memory_limit", "1", "has no option 'gpu_memory_limit'"),
        (
            "gpu_mem_limit",
            "much",
            "option gpu_mem_limit of the cuda provider is 'much', expected a number of bytes",
        ),
        ("arena_extend_strategy", "Some", "expected 'kNextPowerOfTwo' or 'kSameAsRequested'"),
        ("device_id", "-1", "expected the number of a device"),
        ("enable_cuda_graph", "yes", "expected 0 or 1"),
        ("do_copy_in_default_stream", "2", "expected 0 or 1"),
        ("user_compute_stream", "0xg", "expected the address of a stream"),
        ("prefer_nhwc", "yes", "expected 0 or 1"),
        ("arena.use_cuda_mempool", "yes", "expected 0 or 1"),
        ("arena.cuda_mempool_release_threshold", "-1", "expected a number of bytes"),
        ("tunable_op_enable", "1", "has no option 'tunable_op_enable' yet; leave this option"),
        ("use_tf32", "2", "option use_tf32 of the cuda provider is '2', expected 0 or 1"),
        ("prefer_nhcw", "1", "has no option 'prefer_nhcw'; "),
    ];
    for (name, value, expected) in cases {
        let options = support::options(&[(name, value)]);
        let problem = CudaProvider.open(0, &options).err();
        let said = problem.map(|problem| problem.to_string()).unwrap_or_default();
        assert!(said.contains(expected), "{said}");
    }
}

/// Beyond the limit is an error, after which less is had; all goes back when the device does.
#[test]
fn the_limit_of_memory_holds() -> Result<()> {
    if support::with_device("the_limit_of_memory_holds")?.is_none() {
        return Ok(());
    }
    let options =
        support::options(&[("gpu_mem_limit", "8388608"), ("arena_extend_strategy", "kSameAsRequested")]);
    let device = CudaProvider.open(0, &options)?;
    let memory = device.allocator();
    let half = memory.allocate(4 << 20, 256)?;
    let problem = memory.allocate(5 << 20, 256).map_err(Error::from);
    assert_eq!(problem.err().map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    drop(memory.allocate(4 << 20, 256)?);
    assert_eq!(memory.stats().limit, Some(8 << 20));
    assert!(memory.stats().total_allocated <= 8 << 20);
    drop(half);
    memory.trim();
    assert_eq!((memory.stats().in_use, memory.stats().total_allocated), (0, 0));
    Ok(())
}
