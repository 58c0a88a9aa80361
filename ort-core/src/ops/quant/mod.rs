//! Quantization and dequantization.

mod dynamic_quantize;
pub mod problem;
mod quantize;
