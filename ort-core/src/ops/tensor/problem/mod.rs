//! Problem descriptors of tensor operators: a node's attributes and shapes, read once.
//!
//! A descriptor is plain data: extents, strides, pads and counts. Providers share the reading; each
//! renders and launches its own kernel. Elements and devices are left out.

mod index;
mod movement;
mod pad;
mod resample;

pub use index::{
    ElementTargets, GatherBlocks, IndexTuples, OneHot, Scatter, ScatterTargets, TensorScatter, axis_extents,
    check_source, combines,
};
pub use movement::{AxisParts, BlockRearrangement, ReverseSequence, split_sizes};
pub use pad::{PadMode, Padded, PaddedAxis, Pads};
pub use resample::{AffineGrid, Col2Im, Col2ImAxis, GridSample, Resize, ResizeAxis, ResizeInputs};
