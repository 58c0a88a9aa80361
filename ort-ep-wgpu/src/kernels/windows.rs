//! Sliding windows of convolutions and pools over three axes, with WGSL helpers for their
//! coordinates.

use ort_core::ops::nn::geometry::WindowAxis;
use ort_core::ops::nn::problem::WindowAxes;

use crate::shader::Shader;

/// The WGSL functions for shaders with [`with_windows`].
pub(super) const WINDOWS: &str = include_str!("windows.wgsl");

/// Adds the uniforms that the functions of [`WINDOWS`] read.
pub(super) fn with_windows(shader: Shader, axes: &WindowAxes) -> Shader {
    let each = |of: fn(&WindowAxis) -> usize| axes.each_ref().map(of);
    shader
        .sizes("input", &each(|axis| axis.input))
        .sizes("output", &each(|axis| axis.output))
        .sizes("kernel", &each(|axis| axis.kernel))
        .sizes("strides", &each(|axis| axis.stride))
        .sizes("dilations", &each(|axis| axis.dilation))
        .sizes("pads", &each(|axis| axis.pads[0]))
}
