//! Problem descriptors of neural network layers: a node's attributes and shapes, read once.
//!
//! A descriptor is plain data: sizes, windows, groups and counts. Providers share the reading; each
//! renders and launches its own kernel.

mod conv;
mod embed;
mod norm;
mod pool;
mod recurrent;

pub use conv::{ConvShape, DeformConv, ImageShape, NO_AXIS, PixelLayout, WindowAxes, three_axes, volume};
pub use embed::EmbedLayerNorm;
pub use norm::{ChannelGroups, LocalResponse, MVN_EPSILON, RowNorm, centers, channels_of, check_parameter};
pub use pool::{PoolFold, PoolKind, UnpooledImage, pool_windows};
pub use recurrent::{CellActivation, CellFunction, Recurrent, activations, gate_count};
