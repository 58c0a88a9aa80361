//! The integration tests of this crate in one program, because each test program links the whole
//! crate. Tests that read the state of their process or measure time are programs of their own, in
//! `tests/`.
#![cfg(feature = "cpu")]
#![allow(clippy::too_many_lines, reason = "tables of cases")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails where it cannot go on"
)]

mod attention_refusals;
mod batch_split;
mod bool_bytes;
mod cancel;
mod case_folders;
mod changed_files;
mod channels_last;
mod compatible_models;
mod compiled_cache;
mod concurrent_runs;
mod constant_folding;
mod control_flow;
mod conv_gradients;
mod counter_dropout;
mod custom_operators;
mod data_dependent_memory;
mod deferred_weights;
mod dynamic_memory;
mod elementwise_chains;
mod fused;
mod gradient;
mod gradient_blocking;
mod gradient_composites;
mod gradient_control;
mod gradient_layers;
mod gradient_norm;
mod gradient_operators;
mod gradient_places;
mod gradient_recurrent;
mod gradient_reference;
mod gradient_support;
mod idle_memory;
mod io_binding;
mod joined;
mod largest_batch;
mod least_limit;
mod load_options;
mod lookup_tables;
mod loop_invariant;
mod lowering;
mod many_inputs;
mod memory_limit;
mod optimizer_8bit;
mod optimizer_steps;
mod optimizer_support;
mod plan_matches_run;
mod poison;
mod precision;
mod quantized_inputs;
mod quantized_weights;
mod random_graphs;
mod random_support;
mod recurrent_threads;
mod rewrite_rules;
mod rewrite_support;
mod roi_align;
mod separable;
mod session_options;
mod shared_weights;
mod size_requirements;
mod step_order;
mod streamed_weights;
#[path = "../support/mod.rs"]
mod support;
mod training_attention;
mod updates;
mod windowed_caches;
mod wrong_inputs;
