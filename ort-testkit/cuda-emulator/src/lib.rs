//! A stand-in for NVIDIA's driver library `libcuda.so.1`: it interprets PTX on the CPU, for tests
//! without a GPU. Under the name of a link to it, it stands in for `libcublasLt.so.12` or
//! `libcudnn.so.9` as well (`driver/lt.rs`, `driver/dnn.rs`), which so share its streams.
//!
//! What the instructions mean is taken from NVIDIA's document "PTX ISA"; the code is our own. A
//! stream that a program makes does nothing until something waits for it (`driver/queue.rs`).
//! Environment variables: `ORT_CUDA_EMULATOR_DEVICES` (1), `ORT_CUDA_EMULATOR_MEMORY` (bytes, 8
//! GiB), `ORT_CUDA_EMULATOR_CAPABILITY` (`8.0`), `ORT_CUDA_EMULATOR_POOLS` (1: there are pools of
//! memory) and `ORT_CUDA_EMULATOR_STEPS` (instructions of one launch, 200e9). What events tell is
//! not the emulator's own time: an instruction of a thread takes `ORT_CUDA_EMULATOR_STEP_TIME`
//! microseconds (1), and a library's call as many as are laid down for it.

mod alu;
mod bulk;
mod contract;
mod convert;
mod decode;
pub mod driver;
mod exec;
mod memory;
mod number;
mod parse;
mod warp;
mod warpgroup;

/// Result codes of the driver.
pub mod code {
    /// An argument is wrong.
    pub const INVALID_VALUE: u32 = 1;
    /// The memory does not suffice.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `cuInit` was not called.
    pub const NOT_INITIALIZED: u32 = 3;
    /// There is no device.
    pub const NO_DEVICE: u32 = 100;
    /// There is no such device.
    pub const INVALID_DEVICE: u32 = 101;
    /// The image is no PTX.
    pub const INVALID_IMAGE: u32 = 200;
    /// No context is current.
    pub const INVALID_CONTEXT: u32 = 201;
    /// The PTX is wrong, or unknown to the emulator.
    pub const INVALID_PTX: u32 = 218;
    /// The PTX is of a later version.
    pub const UNSUPPORTED_PTX_VERSION: u32 = 222;
    /// There is no such handle.
    pub const INVALID_HANDLE: u32 = 400;
    /// Not as things are.
    pub const ILLEGAL_STATE: u32 = 401;
    /// The module has no such name.
    pub const NOT_FOUND: u32 = 500;
    /// A kernel touched memory that is not allocated.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// A kernel took too many steps.
    pub const LAUNCH_TIMEOUT: u32 = 702;
    /// A kernel touched memory at an address that its size does not divide.
    pub const MISALIGNED_ADDRESS: u32 = 716;
    /// A kernel failed.
    pub const LAUNCH_FAILED: u32 = 719;
    /// The device cannot do it.
    pub const NOT_SUPPORTED: u32 = 801;
    /// A capture does not allow the call.
    pub const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;
    /// Something was called that the capture did not allow.
    pub const STREAM_CAPTURE_INVALIDATED: u32 = 901;
    /// A capture would wait for what is not captured.
    pub const STREAM_CAPTURE_ISOLATION: u32 = 905;
    /// Another thread began the capture.
    pub const STREAM_CAPTURE_WRONG_THREAD: u32 = 908;
}

/// Why a module cannot be loaded or a launch failed.
#[derive(Debug)]
pub(crate) struct Fault {
    /// One of [`code`].
    pub(crate) code: u32,
    /// What happened, for a person.
    pub(crate) message: String,
}

impl Fault {
    pub(crate) fn new(code: u32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Fault>;
