//! View rules: outputs that alias an input, zero-copy.

use crate::ir::Attributes;
use crate::tensor::{Shape, TensorView, element_count};

/// A node with concrete shapes, as view rules see it.
#[derive(Debug)]
pub struct ViewCx<'a> {
    /// The attributes of the node.
    pub attrs: &'a Attributes,
    /// The shape of each tensor input. `None` if it is omitted or not a tensor.
    pub inputs: &'a [Option<Shape>],
    /// The elements of small integer inputs, if known.
    pub ints: &'a [Option<Vec<i64>>],
    /// The shape of each output.
    pub outputs: &'a [Option<Shape>],
}

/// The outputs of a node as contiguous parts of one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewOf {
    /// The input that they alias.
    pub input: usize,
    /// For each output, the offset of its first element in the input.
    pub offsets: Vec<usize>,
}

impl ViewOf {
    /// Returns a view of the whole first input under another shape. If the element counts differ,
    /// which may show only at run time, there is no view and the kernel reports the error.
    pub fn whole(cx: &ViewCx<'_>) -> Option<ViewOf> {
        let count = |shapes: &[Option<Shape>]| shapes.first()?.as_deref().map(element_count);
        let fits = match (count(cx.inputs), count(cx.outputs)) {
            (Some(input), Some(output)) => input.ok()? == output.ok()?,
            _ => true,
        };
        fits.then(|| ViewOf { input: 0, offsets: vec![0] })
    }
}

/// Returns the elements of a small integer tensor in host memory, for view rules.
pub(crate) fn known_ints(view: Option<TensorView<'_>>) -> Option<Vec<i64>> {
    let view = view?;
    // The size limit of `SymTensor`. Elements in device memory cannot be read here.
    let small = view.element_count() <= 1024 && view.is_host() && view.dtype().is_integer();
    if small { view.to_ints().ok() } else { None }
}
