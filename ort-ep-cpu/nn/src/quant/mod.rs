//! Quantization and dequantization.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

mod dynamic_quantize;
mod granularity;
mod quantize;
