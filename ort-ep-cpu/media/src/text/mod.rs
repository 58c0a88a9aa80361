//! String kernels.

#![allow(
    clippy::indexing_slicing,
    reason = "the tree of n-grams, its columns and weights are made and checked with the kernel"
)]

mod murmur_hash;
mod strings;
mod tf_idf;
mod tokenizer;
