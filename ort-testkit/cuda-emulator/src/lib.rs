//! An emulator of NVIDIA's driver library `libcuda.so.1`: it interprets PTX on the CPU, for tests
//! without a GPU. Through a link with that name it also stands in for `libcublasLt.so.12` or
//! `libcudnn.so.9` (`driver/lt.rs`, `driver/dnn.rs`), which then share its streams.
//!
//! The semantics of the instructions follow NVIDIA's document "PTX ISA"; the code is our own. A
//! stream that a program creates executes lazily, only once something waits for it
//! (`driver/queue.rs`).
//!
//! Environment variables: `ORT_CUDA_EMULATOR_DEVICES` (1), `ORT_CUDA_EMULATOR_MEMORY` (bytes, 8
//! GiB), `ORT_CUDA_EMULATOR_CAPABILITY` (`8.0`), `ORT_CUDA_EMULATOR_POOLS` (1: memory pools are
//! supported), `ORT_CUDA_EMULATOR_APART` (0; with 1 the threads of a warp run one after the other)
//! and `ORT_CUDA_EMULATOR_STEPS` (maximum instructions of one launch, 200e9). Events report
//! simulated time: an instruction of a thread takes `ORT_CUDA_EMULATOR_STEP_TIME` microseconds (1),
//! and a library call a fixed time.

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
mod registers;
mod warp;
mod warpgroup;

/// Result codes of the driver.
pub mod code {
    /// An argument is invalid.
    pub const INVALID_VALUE: u32 = 1;
    /// Out of memory.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `cuInit` was not called.
    pub const NOT_INITIALIZED: u32 = 3;
    /// There is no device.
    pub const NO_DEVICE: u32 = 100;
    /// There is no device with this number.
    pub const INVALID_DEVICE: u32 = 101;
    /// The image is not PTX.
    pub const INVALID_IMAGE: u32 = 200;
    /// No context is current.
    pub const INVALID_CONTEXT: u32 = 201;
    /// The PTX is invalid, or not supported by the emulator.
    pub const INVALID_PTX: u32 = 218;
    /// The PTX is of a later version.
    pub const UNSUPPORTED_PTX_VERSION: u32 = 222;
    /// The handle does not exist.
    pub const INVALID_HANDLE: u32 = 400;
    /// The call is illegal in the current state.
    pub const ILLEGAL_STATE: u32 = 401;
    /// The module has no such name.
    pub const NOT_FOUND: u32 = 500;
    /// A kernel accessed memory that is not allocated.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// A kernel executed too many instructions.
    pub const LAUNCH_TIMEOUT: u32 = 702;
    /// A kernel accessed memory at a misaligned address.
    pub const MISALIGNED_ADDRESS: u32 = 716;
    /// A kernel failed.
    pub const LAUNCH_FAILED: u32 = 719;
    /// The operation is not supported.
    pub const NOT_SUPPORTED: u32 = 801;
    /// The call is illegal during a capture.
    pub const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;
    /// An illegal call invalidated the capture.
    pub const STREAM_CAPTURE_INVALIDATED: u32 = 901;
    /// A capture would depend on uncaptured work.
    pub const STREAM_CAPTURE_ISOLATION: u32 = 905;
    /// Another thread began the capture.
    pub const STREAM_CAPTURE_WRONG_THREAD: u32 = 908;
}

/// The reason why a module does not load or a launch failed.
#[derive(Debug)]
pub(crate) struct Fault {
    /// One of [`code`].
    pub(crate) code: u32,
    /// A message for people.
    pub(crate) message: String,
}

impl Fault {
    pub(crate) fn new(code: u32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Fault>;
