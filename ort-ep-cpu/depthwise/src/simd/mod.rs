//! The loops of depthwise convolutions. All unsafe code of this crate is here.

pub mod plane;
pub mod stencil;
