//! Kernels between numbers and their quantized codes.

pub(super) mod codes;
pub(super) mod dynamic_quantize;
mod granularity;
mod quantize;
