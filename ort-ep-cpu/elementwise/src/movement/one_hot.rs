//! One-hot encoding (`OneHot`).

use num_traits::AsPrimitive;
use ort_core::ep::{CompileCx, IoShapes};
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, for_each_type};
use smallvec::smallvec;

use ort_cpu_kernel::heap::elements;

use super::{Cell, Io, Movement, Operands, movement, only};
use ort_cpu_threads::interrupt::{self, spending};

movement!["OneHot", |cx: &mut CompileCx<'_>| Ok(OneHot { axis: cx.attrs().int("axis")? })];

struct OneHot {
    axis: i64,
}

/// Returns indices of any numeric type; floats are truncated.
fn whole_numbers(view: &TensorView<'_>) -> Result<Vec<i64>> {
    let dtype = view.dtype();
    for_each_type!(dtype in [F32, F64, F16], T => {
        Ok(spending(1, view.as_slice::<T>()?).map(|&value| AsPrimitive::<f64>::as_(value) as i64).collect())
    }, else => view.to_ints())
}

impl Movement for OneHot {
    fn heap(&self, shapes: &IoShapes<'_>) -> usize {
        elements(shapes.input(0)).saturating_mul(size_of::<i64>())
    }

    fn operands(&self, _inputs: usize) -> Operands {
        smallvec![2]
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        // The standard's order: the value of other places first.
        let &[off, on] = from[0] else {
            return Err(ort_core::error!(InvalidArgument, "OneHot needs two values, got {}", from[0].len()));
        };
        let shape = io.output_shape(0);
        let axis = normalize_axis(self.axis, shape.len())?;
        let (depth, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let indices = whole_numbers(&io.input(0)?)?;
        let to = only(to)?;
        ensure!(to.len() == indices.len() * depth, Fail, "the output has shape {shape:?}");
        interrupt::fill(to, off);
        for (place, &index) in spending(2, &indices).enumerate() {
            // An out-of-range index leaves its row off.
            if let Ok(index) = normalize_axis(index, depth) {
                to[(place / inner * depth + index) * inner + place % inner] = on;
            }
        }
        Ok(())
    }
}
