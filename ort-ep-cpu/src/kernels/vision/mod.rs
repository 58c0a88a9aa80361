//! Kernels on boxes and regions of images.

#[cfg(feature = "image")]
mod image_decoder;
mod non_max_suppression;
mod roi;
