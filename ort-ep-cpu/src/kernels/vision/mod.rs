//! Kernels on boxes and regions of images.

mod non_max_suppression;
mod roi;
