//! Quantization and dequantization.

mod dynamic_quantize;
mod quantize;
