//! The integration tests of this crate in one program, because each test program links the whole
//! crate. Tests that read the state of their process or measure time are programs of their own, in
//! `tests/`.

mod binding;
mod both_ways;
mod both_ways_support;
mod budget;
mod conducted;
mod configurations;
mod control_flow;
mod copies;
mod device_limits;
mod dynamic;
mod memory;
mod on_device;
mod placement;
mod plan;
mod provider;
mod random_placement;
mod regions;
mod regions_support;
mod suite;
mod support;
mod types;
mod views;
