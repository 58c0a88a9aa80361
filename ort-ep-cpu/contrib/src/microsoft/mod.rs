//! Kernels of contrib operators (domain `com.microsoft`) that have no decomposition, or that beat
//! theirs.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; lengths, positions, beams, groups and rows that come as tensors are checked before their first use"
)]

mod attend;
mod block_product;
mod distance;
mod expert_layer;
mod gather_blocks;
mod group_cache;
mod group_query;
mod inverse;
mod matmul_bnb4;
mod matmul_nbits;
mod mixture;
mod multi_head;
mod rotary;
