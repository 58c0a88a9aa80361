//! The records and tables that cross the border, in C's layout. `ort_provider.h` is written from
//! this file.
//!
//! The tables of functions and the records that begin with `size` only ever grow, at their end:
//! `size` says how much of them the other side knows. Every other record stays as it is within one
//! version of the interface.

use std::ffi::{c_char, c_void};

/// The version of this interface. A library of another version is refused.
pub const ORT_PROVIDER_ABI_VERSION: u32 = 1;

/// The one symbol of a library, of the type `OrtProviderEntry`.
pub const ORT_PROVIDER_SYMBOL: &str = "ort_provider";

/// The call did what it should.
pub const ORT_PROVIDER_OK: i32 = 0;
/// Something failed that no other code describes.
pub const ORT_PROVIDER_FAIL: i32 = 1;
/// A value given by the caller does not fit, such as an option.
pub const ORT_PROVIDER_INVALID_ARGUMENT: i32 = 2;
/// A kernel failed while the model ran.
pub const ORT_PROVIDER_RUNTIME_EXCEPTION: i32 = 6;
/// There is no kernel for this node; the message says why.
pub const ORT_PROVIDER_NOT_IMPLEMENTED: i32 = 9;
/// The provider or its device failed.
pub const ORT_PROVIDER_EP_FAIL: i32 = 11;
/// The device's memory, or a limit, does not suffice.
pub const ORT_PROVIDER_OUT_OF_MEMORY: i32 = 20;

/// The input or output is left out, or nobody reads it.
pub const ORT_PROVIDER_ABSENT: u32 = 0;
/// The elements are in the host's memory, at `data`.
pub const ORT_PROVIDER_HOST: u32 = 1;
/// The elements are in the device's memory, `offset` bytes into `memory`.
pub const ORT_PROVIDER_DEVICE: u32 = 2;
/// Only type and shape are known.
pub const ORT_PROVIDER_SHAPE: u32 = 3;

/// One float. The kinds of attributes have the codes of ONNX's `AttributeProto.AttributeType`.
pub const ORT_PROVIDER_ATTRIBUTE_FLOAT: u32 = 1;
/// One integer.
pub const ORT_PROVIDER_ATTRIBUTE_INT: u32 = 2;
/// One string.
pub const ORT_PROVIDER_ATTRIBUTE_STRING: u32 = 3;
/// One tensor.
pub const ORT_PROVIDER_ATTRIBUTE_TENSOR: u32 = 4;
/// A list of floats.
pub const ORT_PROVIDER_ATTRIBUTE_FLOATS: u32 = 6;
/// A list of integers.
pub const ORT_PROVIDER_ATTRIBUTE_INTS: u32 = 7;
/// A list of strings.
pub const ORT_PROVIDER_ATTRIBUTE_STRINGS: u32 = 8;

/// A device that the library opened; only the library looks inside.
pub struct OrtProviderDevice(());

/// A compiled node; only the library looks inside.
pub struct OrtProviderKernel(());

/// Where the host collects the message of an error.
pub struct OrtProviderReport(());

/// Where the host collects what a device says of itself.
pub struct OrtProviderFacts(());

/// Where the host collects what a claim says.
pub struct OrtProviderClaim(());

/// What the host keeps of the node that is being compiled.
pub struct OrtProviderCompilation(());

/// The holder of a constant's bytes.
pub struct OrtProviderOwner(());

/// An option of the device, as text. All text is UTF-8 and ends with a zero byte.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderOption {
    /// Its name.
    pub name: *const c_char,
    /// Its value.
    pub value: *const c_char,
}

/// What is known of a value before anything runs.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderValue {
    /// `ORT_PROVIDER_ABSENT`; `ORT_PROVIDER_HOST` for a constant; else `ORT_PROVIDER_SHAPE`.
    pub kind: u32,
    /// The element type, by ONNX's `TensorProto.DataType`; 0 where it is not known.
    pub element_type: i32,
    /// The number of dimensions; -1 where it is not known.
    pub rank: i32,
    /// The sizes of the dimensions; -1 for one that only the run tells.
    pub sizes: *const i64,
    /// The sizes as expressions of the model's symbols, such as `2*batch`; `?` for one that nothing
    /// is known of.
    pub expressions: *const *const c_char,
    /// A constant's elements, row by row, little-endian, at any alignment.
    pub data: *const u8,
    /// The bytes of a constant.
    pub bytes: u64,
    /// What holds a constant's bytes. They are there during the call, and from `retain` to
    /// `release`.
    pub owner: *const OrtProviderOwner,
}

/// An attribute; the fields of its kind are set.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderAttribute {
    /// Its name.
    pub name: *const c_char,
    /// One of `ORT_PROVIDER_ATTRIBUTE_FLOAT` and so on.
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
    /// The tensor, as a constant.
    pub tensor: *const OrtProviderValue,
}

/// A node in the form of the newest operator set: attributes have their defaults, nothing is left
/// of older sets.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderNode {
    /// The bytes of this record.
    pub size: usize,
    /// The operator's domain; empty for ONNX's own.
    pub domain: *const c_char,
    /// The operator.
    pub op_type: *const c_char,
    /// The node's name.
    pub name: *const c_char,
    /// The inputs by position.
    pub inputs: *const OrtProviderValue,
    /// How many.
    pub input_count: usize,
    /// The outputs by position.
    pub outputs: *const OrtProviderValue,
    /// How many.
    pub output_count: usize,
    /// The attributes in no order.
    pub attributes: *const OrtProviderAttribute,
    /// How many.
    pub attribute_count: usize,
}

/// What a node is compiled with.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderCompileInfo {
    /// The bytes of this record.
    pub size: usize,
    /// The node.
    pub node: *const OrtProviderNode,
    /// The threads that may be used.
    pub threads: u32,
    /// Not 0 where products may be made in bfloat16.
    pub bf16: u8,
    /// Not 0 where the kernel is asked for its workspace and never runs: nothing need be packed.
    pub counts_only: u8,
    /// The bytes that the session's memory limit leaves.
    pub available_bytes: u64,
    /// To be given back to the host's `reserve` and `consume`, during this call.
    pub compilation: *mut OrtProviderCompilation,
}

/// A tensor of a run. The bytes of an output are to be written, those of an input only read.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderTensor {
    /// `ORT_PROVIDER_ABSENT`, `ORT_PROVIDER_HOST`, `ORT_PROVIDER_DEVICE` or `ORT_PROVIDER_SHAPE`.
    pub kind: u32,
    /// The element type, by ONNX's `TensorProto.DataType`; 0 where only the shape is known.
    pub element_type: i32,
    /// The number of dimensions.
    pub rank: u32,
    /// For an output: the input whose elements it holds at first, because both are the same memory;
    /// -1 for none. That input has the output's shape then.
    pub in_place: i32,
    /// The sizes of the dimensions.
    pub sizes: *const i64,
    /// The bytes of all elements.
    pub bytes: u64,
    /// The first byte in the host's memory.
    pub data: *mut c_void,
    /// The device's memory, as `allocate` gave it.
    pub memory: u64,
    /// The first byte in it.
    pub offset: u64,
}

/// One run of a kernel.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderRun {
    /// The bytes of this record.
    pub size: usize,
    /// The inputs by position.
    pub inputs: *const OrtProviderTensor,
    /// How many.
    pub input_count: usize,
    /// The outputs by position.
    pub outputs: *const OrtProviderTensor,
    /// How many.
    pub output_count: usize,
    /// The scratch memory that `workspace` asked for, as bytes; absent where it asked for none.
    pub workspace: *const OrtProviderTensor,
    /// The threads that may be used.
    pub threads: u32,
    /// In a question for the workspace the bytes that it is to have at most where the kernel has
    /// ways to do with less.
    pub room: u64,
}

/// What a device is.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderDeviceInfo {
    /// The bytes of this record.
    pub size: usize,
    /// The bytes of its memory; 0 where it does not tell.
    pub memory_bytes: u64,
    /// To be given back to the host's `fact`, during this call.
    pub facts: *mut OrtProviderFacts,
}

/// What the host does for a library. It stays where it is as long as the process lives.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderHost {
    /// The bytes of this table.
    pub size: usize,
    /// `ORT_PROVIDER_ABI_VERSION` of the host.
    pub abi_version: u32,
    /// The host's own version.
    pub version: *const c_char,
    /// Says why a call fails, and what the user can try (or null); returns `code`, to be returned
    /// by the call.
    pub fail: Option<
        unsafe extern "C" fn(
            report: *mut OrtProviderReport,
            code: i32,
            message: *const c_char,
            help: *const c_char,
        ) -> i32,
    >,
    /// A fact of a device: the fact `name` is its own name, all others are shown as they are.
    pub fact:
        Option<unsafe extern "C" fn(facts: *mut OrtProviderFacts, name: *const c_char, value: *const c_char)>,
    /// Says of a claimed node that an input and an output that are equally long may be the same
    /// memory. Where `grows` is not 0, the kernel itself refuses a run whose output would be
    /// longer, as that of a cache's past and present does.
    pub in_place:
        Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, input: u32, output: u32, grows: u8)>,
    /// Says of a claimed node that an input must be in the host's memory.
    pub host_input: Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, input: u32)>,
    /// Says of a claimed node that an input may be at any alignment.
    pub unaligned_input: Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, input: u32)>,
    /// Says of a claimed node that it leaves an output out where nobody reads it.
    pub left_out: Option<unsafe extern "C" fn(claim: *mut OrtProviderClaim, output: u32)>,
    /// Counts bytes that the kernel keeps against the session's memory limit, until it is released.
    /// To be called before the memory is taken; other than `ORT_PROVIDER_OK`, it must not be taken.
    pub reserve: Option<
        unsafe extern "C" fn(
            compilation: *mut OrtProviderCompilation,
            bytes: u64,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Says that runs will not read a constant input any more, which then is absent.
    pub consume: Option<unsafe extern "C" fn(compilation: *mut OrtProviderCompilation, input: u32)>,
    /// Keeps a constant's bytes until `release`.
    pub retain: Option<unsafe extern "C" fn(owner: *const OrtProviderOwner)>,
    /// Gives up what `retain` kept.
    pub release: Option<unsafe extern "C" fn(owner: *const OrtProviderOwner)>,
}

/// A provider. Every function may be called from several threads at once; what is given to a call
/// lives as long as the call. A function that returns a code explains with the host's `fail` what
/// went wrong. None of them may let a C++ exception or the like out.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OrtProviderTable {
    /// The bytes of this table.
    pub size: usize,
    /// `ORT_PROVIDER_ABI_VERSION` of the library.
    pub abi_version: u32,
    /// The name that users write, for example `npu`.
    pub name: *const c_char,
    /// The library's own version.
    pub version: *const c_char,
    /// The number of devices that work here; the error says why there are none.
    pub device_count: Option<unsafe extern "C" fn(count: *mut u32, report: *mut OrtProviderReport) -> i32>,
    /// Describes the device at `index`.
    pub device_info: Option<
        unsafe extern "C" fn(
            index: u32,
            info: *mut OrtProviderDeviceInfo,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Opens the device at `index`. Unknown options are errors. `uses_host_memory` is set to 1
    /// where its kernels work on the host's memory, and stays 0 otherwise: such a device needs no
    /// `allocate`, `release`, `trim` and `copy`, which may be null for it.
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
    /// Closes a device, whose kernels and memory were released before.
    pub close: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice)>,
    /// Gives device memory that begins at a multiple of `alignment`: any number but 0 that the
    /// library knows it by.
    pub allocate: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            bytes: u64,
            alignment: u64,
            memory: *mut u64,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Takes device memory back.
    pub release: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice, memory: u64)>,
    /// Gives released memory that the device keeps to the system, and returns how many bytes. May
    /// be null.
    pub trim: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice) -> u64>,
    /// Copies the elements of a tensor to another of the same type and shape; one of them or both
    /// are in the device's memory.
    pub copy: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            from: *const OrtProviderTensor,
            to: *const OrtProviderTensor,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Waits until the device has done what it was given to do. May be null where it is done when
    /// calls return.
    pub synchronize:
        Option<unsafe extern "C" fn(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32>,
    /// Whether the device runs a node: `ORT_PROVIDER_OK`, or `ORT_PROVIDER_NOT_IMPLEMENTED` with
    /// the reason. Any other code says that the device does not work.
    pub claim: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            node: *const OrtProviderNode,
            claim: *mut OrtProviderClaim,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Makes the kernel of a claimed node.
    pub compile: Option<
        unsafe extern "C" fn(
            device: *mut OrtProviderDevice,
            info: *const OrtProviderCompileInfo,
            kernel: *mut *mut OrtProviderKernel,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// The bytes of scratch memory that a run with these shapes needs. May be null where no kernel
    /// needs any.
    pub workspace: Option<
        unsafe extern "C" fn(
            kernel: *mut OrtProviderKernel,
            run: *const OrtProviderRun,
            bytes: *mut u64,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Computes the outputs.
    pub run: Option<
        unsafe extern "C" fn(
            kernel: *mut OrtProviderKernel,
            run: *const OrtProviderRun,
            report: *mut OrtProviderReport,
        ) -> i32,
    >,
    /// Releases a kernel.
    pub release_kernel: Option<unsafe extern "C" fn(kernel: *mut OrtProviderKernel)>,
    /// Fails where the device can run nothing any more, for example because its driver has reset
    /// it. May be null.
    pub check:
        Option<unsafe extern "C" fn(device: *mut OrtProviderDevice, report: *mut OrtProviderReport) -> i32>,
    /// Other than 0 where images are to have the channels last: `NhwcConv` of the domain
    /// `ort-runtime` and the like, where it claims these. May be null.
    pub prefers_channels_last: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice) -> u8>,
    /// The bytes of the vectors in which matrices are read: weights of products whose rows are no
    /// multiple of that are transposed, if their columns are. 1 where weights are read as they are,
    /// or packed. May be null: 1.
    pub vector_bytes: Option<unsafe extern "C" fn(device: *mut OrtProviderDevice) -> usize>,
}

/// The type of the function `ort_provider`: the library's table for a host of this version of the
/// interface, which stays where it is as long as the process lives. A library that does not know
/// the version returns its table all the same, with its own; null says that there is no provider.
pub type OrtProviderEntry =
    unsafe extern "C" fn(abi_version: u32, host: *const OrtProviderHost) -> *const OrtProviderTable;
