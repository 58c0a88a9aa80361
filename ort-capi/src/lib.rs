//! The C API of ONNX Runtime: `libonnxruntime.so.1` over ort-runtime.
//!
//! Clients load the library in the place of ONNX Runtime's, and call the functions of [`table`].
//! docs/C_API.md lists which of them are there.
//!
//! Each function is an item of [`entry::entries`], which lets no panic out, and takes the checked
//! argument types of [`entry`]. Names of functions are those of the header.

// A loaded library must not end the process of its client.
#![warn(clippy::exit, clippy::indexing_slicing, clippy::string_slice, clippy::unreachable)]
#![allow(non_upper_case_globals, reason = "functions are constants with the names of the header")]

mod abi;
mod allocator;
mod arena;
mod base;
mod bindings;
mod config_keys;
mod containers;
mod custom_domain;
mod custom_library;
mod custom_op;
mod devices;
mod element_type;
mod entry;
mod env;
mod io_binding;
mod kernel_context;
mod kernel_info;
mod key_values;
mod log;
mod logger;
mod memory_info;
mod metadata;
mod op_attr;
mod others;
mod own_keys;
mod profile;
mod providers;
mod run;
mod run_options;
mod session;
mod session_options;
mod shape_context;
mod standalone;
mod status;
mod strings;
mod table;
mod type_info;
mod value;
