//! The tests of this crate in one program: each program links the whole crate. Those that look at their process, or
//! measure times, are programs of their own.

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
