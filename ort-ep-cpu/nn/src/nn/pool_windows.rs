//! The windows of pooling nodes.

use ort_core::ep::NodeView;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, error};

/// Returns the windows of a pooling node.
pub(super) fn windows_of_pool(node: &NodeView<'_>) -> Result<Windows> {
    let rank = node.attrs().ints("kernel_shape")?.len() + 2;
    Windows::of_pool(node.attrs(), rank)
}

/// Returns the number of planes (batch times channels), and the windows on each.
pub(super) fn planes(windows: &Windows, image: &[usize]) -> Result<(usize, Vec<WindowAxis>)> {
    match image {
        [batch, channels, spatial @ ..] => Ok((batch * channels, windows.on(spatial)?)),
        _ => Err(error!(InvalidArgument, "an image of shape {image:?}")),
    }
}
