//! Operators on boxes and regions of images.

mod image_decoder;
mod non_max_suppression;
mod roi;
