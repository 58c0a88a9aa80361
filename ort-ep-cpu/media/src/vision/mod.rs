//! Vision kernels: regions of interest, box selection and image decoding.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; numbers of images are checked, and places clamped to the map, before their first use"
)]

#[cfg(feature = "image")]
mod image_decoder;
#[cfg(feature = "image")]
mod jpeg;
mod non_max_suppression;
mod roi;
