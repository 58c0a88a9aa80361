//! Kernels of normalizations and softmax.

mod softmax;
