//! Computer vision: boxes, regions and image decoding.

mod image_decoder;
mod non_max_suppression;
pub mod problem;
mod roi;
