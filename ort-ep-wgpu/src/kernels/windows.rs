//! Sliding windows of convolutions and pools over three axes, with WGSL helpers for their
//! coordinates.

use ort_core::dim::Dim;
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, ensure, error};

use crate::shader::Shader;

/// The WGSL functions for shaders with [`with_windows`].
pub(super) const WINDOWS: &str = include_str!("windows.wgsl");

/// Windows over three axes. Leading axes that the image lacks have size 1.
pub(super) type Axes = [WindowAxis; 3];

const NO_AXIS: WindowAxis =
    WindowAxis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, pads: [0; 2] };

/// Returns the windows of a convolution with these spatial kernel sizes.
pub(super) fn of_kernel(attrs: &Attributes, kernel: &[usize]) -> Result<Windows> {
    let kernel: Vec<Dim> = kernel.iter().map(|size| Dim::constant(*size as i64)).collect();
    Windows::new(attrs, &kernel)
}

/// Returns windows as three axes, after checking that coordinates fit 32 bits.
pub(super) fn three(axes: &[WindowAxis]) -> Result<Axes> {
    for axis in axes {
        let last = axis.output.saturating_mul(axis.stride).saturating_add(axis.input);
        let extent = axis.kernel.saturating_mul(axis.dilation).saturating_add(axis.pads.iter().sum());
        let fits = last.saturating_add(extent) < 1 << 31;
        ensure!(fits, NotImplemented, "windows as large as {axis:?} are beyond 32 bits");
    }
    match axes {
        [x] => Ok([NO_AXIS, NO_AXIS, *x]),
        [y, x] => Ok([NO_AXIS, *y, *x]),
        [z, y, x] => Ok([*z, *y, *x]),
        _ => Err(error!(NotImplemented, "windows over {} axes", axes.len())),
    }
}

/// Returns the product of one property over the axes.
pub(super) fn volume(axes: &Axes, of: fn(&WindowAxis) -> usize) -> usize {
    axes.iter().map(of).fold(1, usize::saturating_mul)
}

/// Adds the uniforms that the functions of [`WINDOWS`] read.
pub(super) fn with_windows(shader: Shader, axes: &Axes) -> Shader {
    let each = |of: fn(&WindowAxis) -> usize| axes.each_ref().map(of);
    shader
        .sizes("input", &each(|axis| axis.input))
        .sizes("output", &each(|axis| axis.output))
        .sizes("kernel", &each(|axis| axis.kernel))
        .sizes("strides", &each(|axis| axis.stride))
        .sizes("dilations", &each(|axis| axis.dilation))
        .sizes("pads", &each(|axis| axis.pads[0]))
}
