//! Streams do nothing until they are waited for, and captures refuse what the driver refuses.

use std::ffi::c_void;
use std::ptr::null_mut;

use ort_cuda_emulator::driver::*;

const SIZE: usize = 64;

/// A stream that waits for no other of itself, pinned memory and memory of the device.
struct Parts {
    stream: Handle,
    pinned: *mut c_void,
    device: u64,
}

fn parts() -> Parts {
    let (mut context, mut parts) = (null_mut(), Parts { stream: null_mut(), pinned: null_mut(), device: 0 });
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuStreamCreate(&raw mut parts.stream, 1), 0);
        assert_eq!(cuMemHostAlloc(&raw mut parts.pinned, SIZE, 0), 0);
        assert_eq!(cuMemAlloc_v2(&raw mut parts.device, SIZE), 0);
    }
    parts
}

impl Parts {
    fn set(&self, value: u8) {
        // SAFETY: the allocations have `SIZE` bytes.
        unsafe { self.pinned.cast::<u8>().write_bytes(value, SIZE) };
    }

    fn send(&self) -> u32 {
        // SAFETY: the allocations have `SIZE` bytes.
        unsafe { cuMemcpyHtoDAsync_v2(self.device, self.pinned, SIZE, self.stream) }
    }

    fn on_device(&self) -> u8 {
        let mut bytes = [0u8; SIZE];
        // SAFETY: the allocations have `SIZE` bytes.
        unsafe { assert_eq!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.device, SIZE), 0) };
        bytes[SIZE - 1]
    }
}

#[test]
fn a_copy_that_nobody_waits_for_is_not_done() {
    let parts = parts();
    parts.set(1);
    assert_eq!(parts.send(), 0);
    assert_eq!(parts.on_device(), 0xFF);
    // The copy reads what is there when it is done.
    parts.set(2);
    let mut event = null_mut();
    // SAFETY: all places are valid, and nothing is used once it is gone.
    unsafe {
        assert_eq!(cuMemFreeHost(parts.pinned), 1, "a copy reads it");
        assert_eq!(cuEventCreate(&raw mut event, 2), 0);
        assert_eq!(cuEventSynchronize(event), 0);
        assert_eq!(parts.on_device(), 0xFF, "it stands for nothing yet");
        assert_eq!(cuEventRecord(event, parts.stream), 0);
        parts.set(3);
        assert_eq!(parts.send(), 0);
        parts.set(4);
        assert_eq!(cuEventSynchronize(event), 0);
        assert_eq!(parts.on_device(), 4);
        parts.set(5);
        assert_eq!(cuStreamSynchronize(parts.stream), 0);
        assert_eq!(parts.on_device(), 5);
        assert_eq!(cuMemFreeHost(parts.pinned), 0);
        assert_eq!(cuEventDestroy_v2(event), 0);
    }
}

#[test]
fn one_stream_waits_for_another() {
    let (one, other) = (parts(), parts());
    let mut event = null_mut();
    one.set(6);
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cuEventCreate(&raw mut event, 2), 0);
        assert_eq!(one.send(), 0);
        assert_eq!(cuEventRecord(event, one.stream), 0);
        assert_eq!(cuStreamWaitEvent(other.stream, event, 0), 0);
        assert_eq!(cuMemcpyDtoDAsync_v2(other.device, one.device, SIZE, other.stream), 0);
        assert_eq!(cuEventDestroy_v2(event), 0);
        assert_eq!(cuStreamSynchronize(other.stream), 0);
    }
    assert_eq!(other.on_device(), 6);
}

#[test]
fn a_graph_does_what_was_captured() {
    let parts = parts();
    let (mut graph, mut executable) = (null_mut(), null_mut());
    // SAFETY: all places are valid, and nothing is used once it is gone.
    unsafe {
        assert_eq!(cuStreamBeginCapture_v2(parts.stream, 1), 0);
        assert_eq!(parts.send(), 0);
        assert_eq!(cuStreamEndCapture(parts.stream, &raw mut graph), 0);
        assert_eq!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0), 0);
        assert_eq!(cuGraphDestroy(graph), 0);
        for value in [7, 8] {
            parts.set(value);
            assert_eq!(cuGraphLaunch(executable, parts.stream), 0);
            assert_eq!(cuStreamSynchronize(parts.stream), 0);
            assert_eq!(parts.on_device(), value);
        }
        assert_eq!(cuGraphExecDestroy(executable), 0);
        assert_eq!(cuGraphLaunch(executable, parts.stream), 400);
    }
}

#[test]
fn a_capture_refuses_calls_that_wait() {
    let (capturing, other) = (parts(), parts());
    let (mut graph, mut event, mut address) = (null_mut(), null_mut(), 0);
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cuStreamEndCapture(capturing.stream, &raw mut graph), 401);
        assert_eq!(cuEventCreate(&raw mut event, 2), 0);
        let refused: [&mut dyn FnMut() -> u32; 5] = [
            &mut || cuStreamSynchronize(capturing.stream),
            &mut || cuCtxSynchronize(),
            &mut || cuMemAlloc_v2(&raw mut address, 64),
            &mut || cuMemFree_v2(other.device),
            &mut || cuEventRecord(event, capturing.stream),
        ];
        for call in refused {
            assert_eq!(cuStreamBeginCapture_v2(capturing.stream, 1), 0);
            assert_eq!(cuStreamSynchronize(other.stream), 0, "that is another one");
            assert_eq!(call(), 900);
            assert_eq!(capturing.send(), 901);
            assert_eq!(cuStreamEndCapture(capturing.stream, &raw mut graph), 901);
            assert!(graph.is_null());
        }
        assert_eq!(cuStreamBeginCapture_v2(null_mut(), 1), 900);
    }
}
