//! The provider ABI: records and function tables in C's layout. `cargo xtask header` generates
//! `ort_provider.h` from this file.
//!
//! Function tables, and records that begin with `size`, only grow, and only at their end: `size`
//! tells how many bytes the other side knows. All other records are fixed within an ABI version.

use std::ffi::{c_char, c_void};

/// The version of this ABI. The host refuses a library of another version.
pub const ORT_PROVIDER_ABI_VERSION: u32 = 1;

/// The symbol that a library exports, of type `OrtProviderEntry`.
pub const ORT_PROVIDER_SYMBOL: &str = "ort_provider";

/// Success.
pub const ORT_PROVIDER_OK: i32 = 0;
/// A failure that no other code describes.
pub const ORT_PROVIDER_FAIL: i32 = 1;
/// An argument of the caller is invalid, for example an option.
pub const ORT_PROVIDER_INVALID_ARGUMENT: i32 = 2;
/// A kernel failed during a run.
pub const ORT_PROVIDER_RUNTIME_EXCEPTION: i32 = 6;
/// There is no kernel for this node; the message says why.
pub const ORT_PROVIDER_NOT_IMPLEMENTED: i32 = 9;
/// The provider or its device failed.
pub const ORT_PROVIDER_EP_FAIL: i32 = 11;
/// Device memory is exhausted, or a memory limit is exceeded.
pub const ORT_PROVIDER_OUT_OF_MEMORY: i32 = 20;

/// The input or output is omitted, or the output has no reader.
pub const ORT_PROVIDER_ABSENT: u32 = 0;
/// The elements are in host memory, at `data`.
pub const ORT_PROVIDER_HOST: u32 = 1;
/// The elements are in device memory, at `offset` bytes from the start of `memory`.
pub const ORT_PROVIDER_DEVICE: u32 = 2;
/// Only the type and the shape are known.
pub const ORT_PROVIDER_SHAPE: u32 = 3;

/// A float. The kinds have the values of ONNX's `AttributeProto.AttributeType`.
pub const ORT_PROVIDER_ATTRIBUTE_FLOAT: u32 = 1;
/// An integer.
pub const ORT_PROVIDER_ATTRIBUTE_INT: u32 = 2;
/// A string.
pub const ORT_PROVIDER_ATTRIBUTE_STRING: u32 = 3;
/// A tensor.
pub const ORT_PROVIDER_ATTRIBUTE_TENSOR: u32 = 4;
/// A list of floats.
pub const ORT_PROVIDER_ATTRIBUTE_FLOATS: u32 = 6;
/// A list of integers.
pub const ORT_PROVIDER_ATTRIBUTE_INTS: u32 = 7;
/// A list of strings.
pub const ORT_PROVIDER_ATTRIBUTE_STRINGS: u32 = 8;

/// A device that the library opened; opaque to the host.
pub struct OrtProviderDevice(());

/// A compiled node; opaque to the host.
pub struct OrtProviderKernel(());

/// Receives the message of an error; opaque to the library.
pub struct OrtProviderReport(());

/// Receives the description of a device; opaque to the library.
pub struct OrtProviderFacts(());

/// Receives the details of a claim; opaque to the library.
pub struct OrtProviderClaim(());

/// The compilation of one node; opaque to the library.
pub struct OrtProviderCompilation(());

/// The owner of a constant's bytes; opaque to the library.
pub struct OrtProviderOwner(());

/// A device option. All strings of this ABI are UTF-8 and NUL-terminated.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderOption {
    /// Its name.
    pub name: *const c_char,
    /// Its value.
    pub value: *const c_char,
}

/// What is known of a value at compile time.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderValue {
    /// `ORT_PROVIDER_ABSENT`; `ORT_PROVIDER_HOST` for a constant; else `ORT_PROVIDER_SHAPE`.
    pub kind: u32,
    /// The element type, as ONNX's `TensorProto.DataType`; 0 if it is unknown.
    pub element_type: i32,
    /// The number of dimensions; -1 if it is unknown.
    pub rank: i32,
    /// The sizes of the dimensions; -1 for a size that only the run knows.
    pub sizes: *const i64,
    /// The sizes as expressions of the model's symbolic dimensions, such as `2*batch`; `?` for an
    /// unknown size.
    pub expressions: *const *const c_char,
    /// The elements of a constant: row-major, little-endian, at any alignment.
    pub data: *const u8,
    /// The size of a constant in bytes.
    pub bytes: u64,
    /// The owner of a constant's bytes. They are valid during the call, and from `retain` to
    /// `release`.
    pub owner: *const OrtProviderOwner,
}

/// An attribute. Only the fields of its kind are set.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderAttribute {
    /// Its name.
    pub name: *const c_char,
    /// One of the constants `ORT_PROVIDER_ATTRIBUTE_*`.
    pub kind: u32,
    /// The float.
    pub f: f32,
    /// The integer.
    pub i: i64,
    /// The string.
    pub s: *const c_char,
    /// The floats.
    pub floats: *const f32,
    /// The integers.
    pub ints: *const i64,
    /// The strings.
    pub strings: *const *const c_char,
    /// The length of the list.
    pub count: usize,
    /// The tensor, encoded as a constant.
    pub tensor: *const OrtProviderValue,
}

/// A node, upgraded to the newest opset, with all default attributes filled in.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderNode {
    /// The size of this record in bytes.
    pub size: usize,
    /// The operator's domain; empty for the ONNX domain.
    pub domain: *const c_char,
    /// The operator.
    pub op_type: *const c_char,
    /// The node's name.
    pub name: *const c_char,
    /// The inputs by position.
    pub inputs: *const OrtProviderValue,
    /// The number of them.
    pub input_count: usize,
    /// The outputs by position.
    pub outputs: *const OrtProviderValue,
    /// The number of them.
    pub output_count: usize,
    /// The attributes, unordered.
    pub attributes: *const OrtProviderAttribute,
    /// The number of them.
    pub attribute_count: usize,
}

/// The parameters of a compilation.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderCompileInfo {
    /// The size of this record in bytes.
    pub size: usize,
    /// The node.
    pub node: *const OrtProviderNode,
    /// The number of threads that may be used.
    pub threads: u32,
    /// Non-zero if GEMMs may use bfloat16.
    pub bf16: u8,
    /// Non-zero if the kernel is only asked for its workspace and never runs: it need not pack
    /// weights.
    pub counts_only: u8,
    /// The bytes left under the session's memory limit.
    pub available_bytes: u64,
    /// An argument for the host's `reserve` and `consume`, valid during this call.
    pub compilation: *mut OrtProviderCompilation,
}

/// A tensor of a run. The kernel writes outputs; inputs are read-only.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderTensor {
    /// `ORT_PROVIDER_ABSENT`, `ORT_PROVIDER_HOST`, `ORT_PROVIDER_DEVICE` or `ORT_PROVIDER_SHAPE`.
    pub kind: u32,
    /// The element type, as ONNX's `TensorProto.DataType`; 0 if only the shape is known.
    pub element_type: i32,
    /// The number of dimensions.
    pub rank: u32,
    /// For an output: the input that it aliases, or -1. The output then holds that input's elements
    /// when the run starts, and both have the same shape.
    pub in_place: i32,
    /// The sizes of the dimensions.
    pub sizes: *const i64,
    /// The size of all elements in bytes.
    pub bytes: u64,
    /// The first byte in host memory.
    pub data: *mut c_void,
    /// The device memory, as `allocate` returned it.
    pub memory: u64,
    /// The offset of the first byte in `memory`.
    pub offset: u64,
}

/// One run of a kernel.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderRun {
    /// The size of this record in bytes.
    pub size: usize,
    /// The inputs by position.
    pub inputs: *const OrtProviderTensor,
    /// The number of them.
    pub input_count: usize,
    /// The outputs by position.
    pub outputs: *const OrtProviderTensor,
    /// The number of them.
    pub output_count: usize,
    /// The scratch memory that `workspace` asked for; absent if it asked for none.
    pub workspace: *const OrtProviderTensor,
    /// The number of threads that may be used.
    pub threads: u32,
    /// For `workspace` only: the most bytes that a kernel should ask for if it can run with less.
    pub room: u64,
}

/// The description of a device.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderDeviceInfo {
    /// The size of this record in bytes.
    pub size: usize,
    /// The size of its memory in bytes; 0 if it is unknown.
    pub memory_bytes: u64,
    /// An argument for the host's `fact`, valid during this call.
    pub facts: *mut OrtProviderFacts,
}

/// The functions of the host. The table is valid for the life of the process.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderHost {
    /// The size of this table in bytes.
    pub size: usize,
    /// `ORT_PROVIDER_ABI_VERSION` of the host.
    pub abi_version: u32,
    /// The version of the host.
    pub version: *const c_char,
    /// Reports why a call fails, and what the user can try (or null). Returns `code`, which the
    /// failing call returns in turn.
    pub fail: Option<
        unsafe extern "C" fn(
            report: *mut OrtProviderReport,
            code: i32,
            message: *const c_char,
            help: *const c_char,
        ) -> i32,
    >,
    /// Adds a property to the description of a device. The property `name` is the device's name;
    /// all others are shown verbatim.
    pub fact:
        Option<unsafe extern "C" fn(facts: *mut OrtProviderFacts, name: *const c_char, value: *const c_char)>,
    /// Allows an input and an output of equal size to alias. A kernel for which `grows` is non-zero
    /// refuses runs whose output would be longer itself, like the past and the present of a KV
    /// cache.
    pub in_place:
        Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, input: u32, output: u32, grows: u8)>,
    /// Requires an input to be in host memory.
    pub host_input: Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, input: u32)>,
    /// Allows an input to be at any alignment.
    pub unaligned_input: Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, input: u32)>,
    /// Declares that the kernel does not compute an output that has no reader.
    pub left_out: Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, output: u32)>,
    /// Reserves bytes that the kernel keeps until it is released, under the session's memory limit.
    /// Call it before the allocation; if it does not return `ORT_PROVIDER_OK`, do not allocate.
    pub reserve: Option<
        unsafe extern "C" fn(
            compilation: *mut OrtProviderCompilation,
            bytes: u64,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Declares that runs do not read a constant input any more; it is then absent.
    pub consume: Option<unsafe extern "C" fn(compilation: *mut OrtProviderCompilation, input: u32)>,
    /// Keeps a constant's bytes valid until `release`.
    pub retain: Option<unsafe extern "C" fn(owner: *const OrtProviderOwner)>,
    /// Undoes one `retain`.
    pub release: Option<unsafe extern "C" fn(owner: *const OrtProviderOwner)>,
}

/// A provider. Functions may be called from several threads at once. Arguments are valid during the
/// call. A function that returns an error code reports the reason with the host's `fail`. No
/// exception may leave a function.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderTable {
    /// The size of this table in bytes.
    pub size: usize,
    /// `ORT_PROVIDER_ABI_VERSION` of the library.
    pub abi_version: u32,
    /// The name by which users select the provider, for example `npu`.
    pub name: *const c_char,
    /// The version of the library.
    pub version: *const c_char,
    /// Returns the number of usable devices; if there are none, an error says why.
    pub device_count: Option<unsafe extern "C" fn(count: *mut u32, report: *mut OrtProviderReport) -> i32>,
    /// Describes the device at `index`.
    pub device_info: Option<
        unsafe extern "C" fn(
            index: u32,
            info: *mut OrtProviderDeviceInfo,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Opens the device at `index`. Unknown options are errors. A device whose kernels work in host
    /// memory sets `uses_host_memory` to 1. It needs no `allocate`, `release`, `trim` and `copy`,
    /// which may then be null.
    pub open: Option<
        unsafe extern "C" fn(
            index: u32,
            options: *const OrtProviderOption,
            option_count: usize,
            device: *mut *mut OrtProviderDevice,
            uses_host_memory: *mut u8,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Closes a device. Its kernels and memory have been released before.
    pub close: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice)>,
    /// Allocates device memory at a multiple of `alignment`. `memory` is a handle of the library's
    /// choice, not 0.
    pub allocate: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            bytes: u64,
            alignment: u64,
            memory: *mut u64,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Frees device memory.
    pub release: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice, memory: u64)>,
    /// Returns cached free memory to the system, and its size in bytes to the caller. May be null.
    pub trim: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice) -> u64>,
    /// Copies a tensor to another of the same type and shape. At least one of them is in device
    /// memory.
    pub copy: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            from: *const OrtProviderTensor,
            to: *const OrtProviderTensor,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Waits for all work submitted to the device. May be null if calls are synchronous.
    pub synchronize:
        Option<unsafe extern "C" fn(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32>,
    /// Asks whether the device can run a node: `ORT_PROVIDER_OK`, or `ORT_PROVIDER_NOT_IMPLEMENTED`
    /// with the reason. Any other code means that the device has failed.
    pub claim: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            node: *const OrtProviderNode,
            claim: *mut OrtProviderClaim,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Compiles a claimed node to a kernel.
    pub compile: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            info: *const OrtProviderCompileInfo,
            kernel: *mut *mut OrtProviderKernel,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Returns the bytes of scratch memory that a run with these shapes needs. May be null if no
    /// kernel needs any.
    pub workspace: Option<
        unsafe extern "C" fn(
            kernel: *mut OrtProviderKernel,
            run: *const OrtProviderRun,
            bytes: *mut u64,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Runs the kernel.
    pub run: Option<
        unsafe extern "C" fn(
            kernel: *mut OrtProviderKernel,
            run: *const OrtProviderRun,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Frees a kernel.
    pub release_kernel: Option<unsafe extern "C" fn(kernel: *mut OrtProviderKernel)>,
    /// Fails if the device is lost, for example because its driver has reset it. May be null.
    pub check:
        Option<unsafe extern "C" fn(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32>,
    /// Non-zero if the device prefers NHWC, that is `NhwcConv` of the domain `ort-runtime` and
    /// similar operators, as far as it claims them. May be null.
    pub prefers_channels_last: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice) -> u8>,
    /// The width in bytes of the vector loads from weight matrices. GEMM weights whose rows are not
    /// a multiple of it are transposed if their columns are. 1 if the device needs no alignment, or
    /// packs weights. Null means 1.
    pub vector_bytes: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice) -> usize>,
}

/// The type of the function `ort_provider`. It returns the library's table for a host of this ABI
/// version, valid for the life of the process. A library of another version returns a table with
/// its own version. Null means that there is no provider.
pub type OrtProviderEntry =
    unsafe extern "C" fn(abi_version: u32, host: *const OrtProviderHost) -> *const OrtProviderTable;
