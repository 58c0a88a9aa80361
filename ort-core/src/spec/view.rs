//! When an output is part of an input without any element moving.

use crate::ir::Attributes;
use crate::tensor::{Shape, TensorView, element_count};

/// A node with concrete shapes, as view rules see it.
#[derive(Debug)]
pub struct ViewCx<'a> {
    /// The attributes.
    pub attrs: &'a Attributes,
    /// The shape of each tensor input; none where it is left out or no tensor.
    pub inputs: &'a [Option<Shape>],
    /// The elements of small integer inputs that are known.
    pub ints: &'a [Option<Vec<i64>>],
    /// The shape of each output.
    pub outputs: &'a [Option<Shape>],
}

/// Each output as a contiguous part of one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewOf {
    /// The input that the outputs are parts of.
    pub input: usize,
    /// For each output, the element of the input it starts at.
    pub offsets: Vec<usize>,
}

impl ViewOf {
    /// One output that is all of the first input under another shape. Where only the sizes of a run
    /// show that it is more or less than all, the kernel is left to refuse it.
    pub fn whole(cx: &ViewCx<'_>) -> Option<ViewOf> {
        let count = |shapes: &[Option<Shape>]| shapes.first()?.as_deref().map(element_count);
        let fits = match (count(cx.inputs), count(cx.outputs)) {
            (Some(input), Some(output)) => input.ok()? == output.ok()?,
            _ => true,
        };
        fits.then(|| ViewOf { input: 0, offsets: vec![0] })
    }
}

/// The known facts of a run-time tensor for view rules.
pub(crate) fn known_ints(view: Option<TensorView<'_>>) -> Option<Vec<i64>> {
    let view = view?;
    let small = view.element_count() <= 1024 && view.is_host() && view.dtype().is_integer();
    if small { view.to_ints().ok() } else { None }
}
