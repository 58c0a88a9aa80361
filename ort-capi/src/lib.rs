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
mod compile_api;
mod compile_model;
mod compile_options;
mod config_keys;
mod containers;
mod custom_domain;
mod custom_library;
mod custom_op;
mod custom_threads;
mod devices;
mod element_type;
mod entry;
mod env;
mod external_info;
mod graph_inspect;
mod graph_objects;
mod io_binding;
mod kernel_context;
mod kernel_info;
mod key_values;
mod log;
mod logger;
mod lora;
mod memory_info;
mod metadata;
mod model_editor;
mod model_proto;
mod node_inspect;
mod op_attr;
mod others;
mod own_keys;
mod profile;
mod provider_library;
mod providers;
mod run;
mod run_options;
mod session;
mod session_allocator;
mod session_edit;
mod session_options;
mod shape_context;
mod sparse;
mod standalone;
mod status;
mod strings;
mod table;
mod type_info;
mod value;
mod vendor_options;
