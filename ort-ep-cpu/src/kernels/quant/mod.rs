//! Kernels between numbers and their quantized codes.

pub(super) mod codes;
mod dynamic_quantize;
mod granularity;
mod quantize;
