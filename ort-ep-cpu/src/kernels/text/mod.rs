//! Kernels on strings.

mod strings;
mod tf_idf;
