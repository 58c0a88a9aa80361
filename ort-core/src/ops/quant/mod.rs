//! Operators between numbers and their quantized codes.

mod dynamic_quantize;
mod quantize;
