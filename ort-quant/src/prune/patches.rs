//! The rows that a layer multiplies its weight with: those of a matrix, or the patches of a
//! convolution (im2col), a few output positions at a time.

/// Which rows of a value a layer multiplies.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum InputView {
    /// The last axis has the columns.
    Rows,
    /// Patches of [N, C, D1, ..], with columns in the order of
    /// [`MatrixView::filters`](super::MatrixView::filters).
    Patches(Patches),
}

/// Where the patches of a convolution are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Patches {
    pub(crate) kernel: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) dilations: Vec<usize>,
    /// At the begin of each axis, then at the end of each.
    pub(crate) pads: Vec<usize>,
    pub(crate) auto_pad: AutoPad,
    pub(crate) groups: usize,
}

/// The attribute `auto_pad`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AutoPad {
    /// `pads` says it.
    NotSet,
    /// No padding.
    Valid,
    /// Padding to the size of the input over the stride, an odd element at the end.
    SameUpper,
    /// The same, an odd element at the begin.
    SameLower,
}

/// The patches that are copied at once.
const PATCHES: usize = 256;

/// An axis of the positions of patches.
struct SpatialAxis {
    size: usize,
    outputs: usize,
    begin: usize,
    stride: usize,
    dilation: usize,
}

impl SpatialAxis {
    /// The element that a patch has at a place of its kernel; `None` in the padding.
    fn element(&self, output: usize, place: usize) -> Option<usize> {
        let position = output * self.stride + place * self.dilation;
        position.checked_sub(self.begin).filter(|position| *position < self.size)
    }
}

impl Patches {
    /// Calls a function with the number of a group and rows of its patches. `None` if a value of
    /// this shape has no patches.
    pub(crate) fn each(
        &self,
        values: &[f32],
        shape: &[usize],
        columns: usize,
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Option<()> {
        let [batch, channels, sizes @ ..] = shape else { return None };
        let per_group = channels.checked_div(self.groups)?;
        let axes: Vec<SpatialAxis> =
            sizes.iter().enumerate().map(|(axis, size)| self.axis(axis, *size)).collect::<Option<_>>()?;
        let positions: usize = self.kernel.iter().product();
        if self.kernel.len() != sizes.len() || per_group * positions != columns || columns == 0 {
            return None;
        }
        let plane: usize = sizes.iter().product();
        let outputs: usize = axes.iter().map(|axis| axis.outputs).product();
        let places: Vec<Vec<usize>> = (0..positions).map(|place| unraveled(place, &self.kernel)).collect();
        let counts: Vec<usize> = axes.iter().map(|axis| axis.outputs).collect();
        let mut rows = Vec::with_capacity(PATCHES.min(outputs) * columns);
        for (image, group) in (0..*batch).flat_map(|image| (0..self.groups).map(move |group| (image, group)))
        {
            let first = (image * channels + group * per_group) * plane;
            let channels = values.get(first..first + per_group * plane)?;
            for start in (0..outputs).step_by(PATCHES) {
                rows.clear();
                for output in start..outputs.min(start + PATCHES) {
                    let output = unraveled(output, &counts);
                    for place in &places {
                        let offset = offset(&axes, &output, place);
                        let elements = (0..per_group).map(|channel| {
                            let element = offset.and_then(|offset| channels.get(channel * plane + offset));
                            element.copied().unwrap_or_default()
                        });
                        rows.extend(elements);
                    }
                }
                visit(group, &rows);
            }
        }
        Some(())
    }

    /// An axis of a value with this size.
    fn axis(&self, axis: usize, size: usize) -> Option<SpatialAxis> {
        let (kernel, stride) = (*self.kernel.get(axis)?, *self.strides.get(axis)?);
        let dilation = *self.dilations.get(axis)?;
        if kernel == 0 || stride == 0 {
            return None;
        }
        let extent = (kernel - 1) * dilation + 1;
        let (begin, end) = match self.auto_pad {
            AutoPad::NotSet => (*self.pads.get(axis)?, *self.pads.get(axis + self.kernel.len())?),
            AutoPad::Valid => (0, 0),
            AutoPad::SameUpper | AutoPad::SameLower => {
                let total = ((size.div_ceil(stride).max(1) - 1) * stride + extent).saturating_sub(size);
                let (less, more) = (total / 2, total - total / 2);
                if self.auto_pad == AutoPad::SameUpper { (less, more) } else { (more, less) }
            }
        };
        let outputs = (size + begin + end).checked_sub(extent).map_or(0, |rest| rest / stride + 1);
        Some(SpatialAxis { size, outputs, begin, stride, dilation })
    }
}

/// The place of an element in a channel; `None` in the padding.
fn offset(axes: &[SpatialAxis], output: &[usize], place: &[usize]) -> Option<usize> {
    axes.iter().zip(output).zip(place).try_fold(0, |offset, ((axis, output), place)| {
        Some(offset * axis.size + axis.element(*output, *place)?)
    })
}

/// The indices of an element of a shape.
fn unraveled(mut place: usize, shape: &[usize]) -> Vec<usize> {
    let mut indices = vec![0; shape.len()];
    for (index, size) in indices.iter_mut().zip(shape).rev() {
        *index = place % size.max(&1);
        place /= size.max(&1);
    }
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patches(kernel: &[usize], auto_pad: AutoPad) -> Patches {
        let axes = kernel.len();
        Patches {
            kernel: kernel.to_vec(),
            strides: vec![1; axes],
            dilations: vec![1; axes],
            pads: vec![0; 2 * axes],
            auto_pad,
            groups: 1,
        }
    }

    fn rows(patches: &Patches, shape: &[usize], columns: usize) -> Vec<(usize, Vec<f32>)> {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (1..=count as u16).map(f32::from).collect();
        let mut found = Vec::new();
        patches.each(&values, shape, columns, |group, rows| found.push((group, rows.to_vec()))).unwrap();
        found
    }

    /// By `torch.nn.functional.unfold`, with the columns ordered by position and then by channel.
    #[test]
    fn patches_are_the_columns_of_im2col() {
        let plain = patches(&[2], AutoPad::NotSet);
        // Two channels of three elements: 1 2 3 and 4 5 6.
        assert_eq!(rows(&plain, &[1, 2, 3], 4), [(0, vec![1.0, 4.0, 2.0, 5.0, 2.0, 5.0, 3.0, 6.0])]);
        let strided = Patches { strides: vec![2], pads: vec![1, 0], ..plain.clone() };
        assert_eq!(rows(&strided, &[1, 2, 3], 4), [(0, vec![0.0, 0.0, 1.0, 4.0, 2.0, 5.0, 3.0, 6.0])]);
        let dilated = Patches { dilations: vec![2], ..plain.clone() };
        assert_eq!(rows(&dilated, &[1, 2, 3], 4), [(0, vec![1.0, 4.0, 3.0, 6.0])]);
        let grouped = Patches { groups: 2, ..plain.clone() };
        let expected = [(0, vec![1.0, 2.0, 2.0, 3.0]), (1, vec![4.0, 5.0, 5.0, 6.0])];
        assert_eq!(rows(&grouped, &[1, 2, 3], 2), expected);
        // A plane: 1 2 3, 4 5 6.
        let plane = patches(&[2, 2], AutoPad::NotSet);
        assert_eq!(rows(&plane, &[1, 1, 2, 3], 4), [(0, vec![1.0, 2.0, 4.0, 5.0, 2.0, 3.0, 5.0, 6.0])]);
        // The odd element of the padding is at the end, or at the begin.
        let upper = rows(&patches(&[2], AutoPad::SameUpper), &[1, 1, 2], 2);
        assert_eq!(upper, [(0, vec![1.0, 2.0, 2.0, 0.0])]);
        let lower = rows(&patches(&[2], AutoPad::SameLower), &[1, 1, 2], 2);
        assert_eq!(lower, [(0, vec![0.0, 1.0, 1.0, 2.0])]);
        assert_eq!(rows(&patches(&[2], AutoPad::Valid), &[1, 1, 2], 2), [(0, vec![1.0, 2.0])]);
    }

    #[test]
    fn values_of_other_shapes_have_no_patches() {
        let plain = patches(&[2], AutoPad::NotSet);
        for shape in [&[1, 2, 3, 1][..], &[1], &[], &[1, 3, 3]] {
            let values = vec![0.0; shape.iter().product()];
            assert_eq!(plain.each(&values, shape, 4, |_, _| ()), None, "{shape:?}");
        }
        // A value that is shorter than the kernel has no outputs.
        assert!(rows(&plain, &[1, 2, 1], 4).is_empty());
    }
}
