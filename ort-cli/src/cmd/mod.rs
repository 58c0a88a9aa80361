//! The subcommands of `ort`, one module each.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod compile;
pub(crate) mod demo;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod limits;
pub(crate) mod optimize;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod providers;
pub(crate) mod prune;
pub(crate) mod quantize;
pub(crate) mod run;
pub(crate) mod soak;
pub(crate) mod test;
pub(crate) mod train;
