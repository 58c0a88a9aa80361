//! Memory of pools is there from where its stream reaches the allocation to where it reaches the
//! end.
//!
//! A fault breaks the driver for the whole process, so each test of one has a process of its own.

use std::ffi::c_void;
use std::process::Command;
use std::ptr::null_mut;

use ort_cuda_emulator::driver::*;

const SIZE: usize = 1000;
/// What is in use by it.
const USED: u64 = 1024;
/// What a pool takes at once.
const BLOCK: u64 = 32 << 20;

struct Parts {
    pool: Handle,
    streams: [Handle; 2],
    pinned: *mut c_void,
}

fn parts() -> Parts {
    let mut parts = Parts { pool: null_mut(), streams: [null_mut(); 2], pinned: null_mut() };
    let mut context = null_mut();
    // A pinned allocation of no handle type on the device 0, and the rest of the driver's record.
    let mut properties = [0i32; 32];
    (properties[0], properties[2]) = (1, 1);
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        for stream in &mut parts.streams {
            assert_eq!(cuStreamCreate(stream, 1), 0);
        }
        assert_eq!(cuMemHostAlloc(&raw mut parts.pinned, SIZE, 0), 0);
        assert_eq!(cuMemPoolCreate(&raw mut parts.pool, properties.as_ptr().cast()), 0);
        parts.pinned.cast::<u8>().write_bytes(7, SIZE);
    }
    parts
}

impl Parts {
    fn allocate(&self) -> u64 {
        self.allocate_bytes(SIZE)
    }

    fn allocate_bytes(&self, bytes: usize) -> u64 {
        self.allocate_in(0, bytes)
    }

    /// Allocates in one of the streams.
    fn allocate_in(&self, stream: usize, bytes: usize) -> u64 {
        let (mut address, stream) = (0, self.streams[stream]);
        // SAFETY: the place is valid.
        unsafe { assert_eq!(cuMemAllocFromPoolAsync(&raw mut address, bytes, self.pool, stream), 0) };
        address
    }

    fn keep(&self, threshold: u64) {
        // SAFETY: the place is valid.
        unsafe { assert_eq!(cuMemPoolSetAttribute(self.pool, 4, &raw const threshold), 0) };
    }

    fn free(&self, address: u64) -> u32 {
        // SAFETY: nothing is used afterwards but what the tests mean to.
        unsafe { cuMemFreeAsync(address, self.streams[0]) }
    }

    /// A copy into memory in one of the streams.
    fn send(&self, address: u64, stream: usize) -> u32 {
        // SAFETY: both allocations have `SIZE` bytes.
        unsafe { cuMemcpyHtoDAsync_v2(address, self.pinned, SIZE, self.streams[stream]) }
    }

    fn wait(&self, stream: usize) -> u32 {
        // SAFETY: the stream is live.
        unsafe { cuStreamSynchronize(self.streams[stream]) }
    }

    /// The bytes that the pool holds, and those in use.
    fn held(&self) -> [u64; 2] {
        let mut held = [0; 2];
        for (value, attribute) in held.iter_mut().zip([5, 7]) {
            // SAFETY: the place is valid.
            unsafe { assert_eq!(cuMemPoolGetAttribute(self.pool, attribute, value), 0) };
        }
        held
    }
}

#[test]
fn memory_comes_again_in_the_order_of_its_stream() {
    let parts = parts();
    let first = parts.allocate();
    assert_eq!((parts.send(first, 0), parts.free(first)), (0, 0));
    assert_eq!(parts.allocate(), first, "it was freed before");
    let second = parts.allocate();
    assert_ne!(second, first);
    assert_eq!(parts.held(), [BLOCK, 2 * USED]);
    assert_eq!((parts.send(first, 0), parts.wait(0)), (0, 0));
    // SAFETY: the piece is there.
    assert_eq!(unsafe { *(first as *const u8) }, 7);
    // SAFETY: as before; what it held is not there any more once it is allocated again.
    assert_eq!(unsafe { *(second as *const u8) }, 0xFF);
    assert_eq!((parts.free(first), parts.free(first)), (0, 1), "it is freed twice");
    assert_eq!(parts.held(), [BLOCK, USED]);
    assert_eq!(parts.wait(0), 0);
    assert_eq!(parts.held(), [BLOCK, USED], "the block has a piece in use");
    parts.keep(1);
    assert_eq!((parts.free(second), parts.wait(0)), (0, 0));
    assert_eq!(parts.held(), [BLOCK, 0], "without the block it would hold less than the threshold");
    // SAFETY: the pool is live.
    unsafe {
        assert_eq!(cuMemPoolTrimTo(parts.pool, 0), 0);
        assert_eq!(parts.held(), [0, 0]);
        assert_eq!(cuMemPoolDestroy(parts.pool), 0);
        assert_eq!(cuMemPoolDestroy(parts.pool), 400);
    }
}

#[test]
fn memory_is_taken_and_given_back_in_blocks() {
    let parts = parts();
    let block = BLOCK as usize;
    let small = parts.allocate();
    let large = parts.allocate_bytes(block + 1);
    let rest = parts.allocate_bytes(block - 2 * USED as usize);
    assert_eq!(
        parts.held(),
        [3 * BLOCK, 2 * BLOCK - USED + 256],
        "the rest is of the block of the small one"
    );
    assert_eq!((parts.free(small), parts.free(large)), (0, 0));
    assert_eq!(parts.held()[0], 3 * BLOCK, "no call has waited");
    assert_eq!(parts.wait(0), 0);
    assert_eq!(parts.held(), [BLOCK, BLOCK - 2 * USED], "of its block only a part is free");
    // Pieces of other sizes take the place of what was freed in their stream.
    assert_eq!(parts.free(rest), 0);
    let pieces = [1, 2].map(|_| parts.allocate_bytes(block / 2));
    assert_eq!(parts.held(), [BLOCK; 2]);
    parts.keep(BLOCK);
    let more = parts.allocate_bytes(1);
    assert_eq!(parts.held()[0], 2 * BLOCK);
    [pieces[0], pieces[1], more].into_iter().for_each(|piece| assert_eq!(parts.free(piece), 0));
    assert_eq!(parts.wait(0), 0);
    assert_eq!(parts.held(), [BLOCK, 0], "as much as the threshold stays");
    // SAFETY: the pool is live.
    unsafe { assert_eq!((cuMemPoolTrimTo(parts.pool, 1), parts.held()), (0, [BLOCK, 0])) };
    // SAFETY: as before.
    unsafe { assert_eq!((cuMemPoolTrimTo(parts.pool, 0), parts.held()), (0, [0, 0])) };
}

#[test]
fn a_block_whose_free_another_stream_awaits_has_no_room() {
    let parts = parts();
    let block = BLOCK as usize;
    let whole = parts.allocate_bytes(block);
    assert_eq!(parts.free(whole), 0);
    let half = parts.allocate_bytes(block / 2);
    assert_eq!(parts.held(), [BLOCK, BLOCK / 2], "its stream frees the whole block first");
    let other = parts.allocate_in(1, block / 2);
    assert_eq!(parts.held(), [2 * BLOCK, BLOCK], "for the other stream nothing is freed yet");
    assert_eq!((parts.wait(0), parts.wait(1)), (0, 0));
    [half, other].into_iter().for_each(|piece| assert_eq!(parts.free(piece), 0));
    assert_eq!((parts.wait(0), parts.held()), (0, [0, 0]));
}

/// Runs a test of this program in a process of its own, which this one is not if there is something
/// to do.
fn alone(test: &str) -> bool {
    const ALONE: &str = "ORT_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let own = std::env::current_exe().unwrap_or_default();
    let done = Command::new(own).args(["--exact", test]).env(ALONE, "1").output();
    let said =
        done.map(|output| (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()));
    assert!(said.as_ref().is_ok_and(|(fine, said)| *fine && said.contains("1 passed")), "{said:?}");
    false
}

#[test]
fn a_use_before_the_allocation_is_reached_is_a_fault() {
    if alone("a_use_before_the_allocation_is_reached_is_a_fault") {
        let parts = parts();
        let memory = parts.allocate();
        // The other stream waits for nothing.
        assert_eq!((parts.send(memory, 1), parts.wait(1)), (0, 700));
    }
}

#[test]
fn a_use_after_the_end_is_a_fault() {
    if alone("a_use_after_the_end_is_a_fault") {
        let parts = parts();
        let memory = parts.allocate();
        assert_eq!((parts.free(memory), parts.send(memory, 0), parts.wait(0)), (0, 0, 700));
    }
}
