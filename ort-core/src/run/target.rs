//! The targets of a step's outputs: where their memory comes from.

use std::ops::Range;

use ort_alloc::{Buffer, SharedBuffer};

use crate::dtype::DType;
use crate::error;
use crate::tensor::{Shape, TensorBuffer, Value};

/// The type and shape of each output, if they are known before the kernel runs.
pub(crate) type KnownShapes = Vec<Option<(DType, Shape)>>;

/// The outputs that a kernel allocates itself and hands over to the run, by output. Empty if there
/// are none.
pub(crate) type HandedOver = Vec<Option<Value>>;

/// Where the memory of an output comes from in this run.
pub(crate) enum Target {
    Unwanted,
    /// A range of a slab. `region` is the host region that it is in, or `None` in a device slab.
    /// `in_place` is the input whose memory it takes over.
    Slab {
        slab: usize,
        region: Option<usize>,
        range: Range<usize>,
        in_place: Option<usize>,
    },
    /// A host buffer of its own and, if the output is computed in place, the index of the input
    /// that is in the buffer.
    Buffer(Buffer, Option<usize>),
    /// A device buffer of its own.
    DeviceBuffer(SharedBuffer),
    /// The binding's buffer at this index. It is put back there after the step.
    Bound {
        place: usize,
        buffer: TensorBuffer,
        in_place: Option<usize>,
    },
    /// The kernel allocates the output itself and hands over the value.
    HandedOver,
}

/// The error for an output whose shape must be known but is not.
pub(crate) fn no_shape() -> crate::Error {
    error!(Fail, "an output's shape is not known")
}
