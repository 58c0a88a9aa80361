//! An ONNX runtime that computes the peak memory of a run before it starts.
//!
//! ```no_run
//! use ort_runtime::{Model, Session, Tensor};
//!
//! let model = Model::load("model.onnx")?;
//! let session = Session::builder(&model).threads(2).build()?;
//! println!("a run takes {:?} bytes", session.plan(&[("batch", 1)])?.peak_bytes);
//!
//! let image = Tensor::from_slice(&[1, 3, 224, 224], &vec![0.0f32; 3 * 224 * 224])?;
//! for (name, value) in session.run(&[("input", image.into())])? {
//!     println!("{name}: {:?}", value.tensor()?.shape());
//! }
//! # Ok::<(), ort_runtime::Error>(())
//! ```
//!
//! Each execution provider is a cargo feature: `cpu` (on by default), `cuda` and `wgpu`. The
//! feature `train` adds the module `train`, which trains models; `generate` generates text, with
//! the tokenizers of `text`.
//!
//! With the feature `mimalloc` or `jemalloc`, `Heap` is that allocator, and a trim also returns its
//! free pages to the system. A program opts in with `#[global_allocator] static HEAP:
//! ort_runtime::Heap = ort_runtime::Heap;`; a library leaves that choice to the program.

// Tests may panic: there a panic is an ordinary failure. In library code it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![forbid(unsafe_code)]

// A provider registers itself. The import only makes sure that its crate is linked.
#[cfg(feature = "cpu")]
use ort_ep_cpu as _;
#[cfg(feature = "cuda")]
use ort_ep_cuda as _;
#[cfg(feature = "wgpu")]
use ort_ep_wgpu as _;

pub mod onnxruntime;

pub use ort_alloc::{
    ArenaConfig, Budget, Buffer, Category, DeviceId, ExtendStrategy, Heap, MappedFile, SharedBuffer,
    Stats as AllocatorStats, dlpack, exact_bytes, fail_writes_beyond_file_size_limit, fork,
    host_memory_bytes, human_bytes, open_regular,
};
pub use ort_core::custom::{self, CustomOperator, CustomOperators, CustomParam, CustomSchema};
pub use ort_core::dtype::{self, DType};
pub use ort_core::onnx::LoadOptions;
pub use ort_core::session::{
    ArenaDevice, BatchSplit, EventMemory, EventTensor, ExecutionMode, IdleMemory, InputSource, IoBinding,
    MemoryUse, Model, NodePlacement, OutputTarget, Profile, ProfileEvent, ProviderRequest, RunOptions,
    Session, SessionBuilder, SessionOptions, SharedMemory, ValueObserver, ValueSpec, open_devices,
    release_idle_memory,
};
pub use ort_core::tensor::{self, Tensor, TensorBuffer, Value};
pub use ort_core::{
    Error, ErrorKind, Limits, MemoryShortage, NAME_BYTES, Result, Within, advise, dim, ep, files, ir,
    nearest, onnx, pass, placement, plan, random, rewrite, shown, spec, steers,
};
#[cfg(feature = "generate")]
pub use ort_generate as generate;
#[cfg(feature = "quant")]
pub use ort_quant as quant;
#[cfg(feature = "text")]
pub use ort_text as text;
#[cfg(feature = "train")]
pub use ort_train as train;
