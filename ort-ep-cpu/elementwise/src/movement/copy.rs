//! Copies for the operators that only reshape, if the session cannot make a zero-copy view.

use ort_core::ep::CompileCx;
use ort_core::tensor::element_count;
use ort_core::{Result, ensure};

use super::strided::copy_all;
use super::{Cell, Io, Movement, movement, only};

movement!["Flatten", |_: &mut CompileCx<'_>| Ok(Copy), unaligned: &[0], in_place: &[(0, 0)]];
movement!["Reshape", |_: &mut CompileCx<'_>| Ok(Copy), unaligned: &[0], in_place: &[(0, 0)]];
movement!["Squeeze", |_: &mut CompileCx<'_>| Ok(Copy), unaligned: &[0], in_place: &[(0, 0)]];
movement!["Unsqueeze", |_: &mut CompileCx<'_>| Ok(Copy), unaligned: &[0], in_place: &[(0, 0)]];

struct Copy;

impl Movement for Copy {
    const KEEPS_ORDER: bool = true;

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        if io.in_place {
            return Ok(());
        }
        let (from, to) = (from[0], only(to)?);
        // Packed types have several elements in a byte, so equal lengths do not suffice.
        let (given, wanted) = (io.input(0)?.element_count(), element_count(io.output_shape(0))?);
        ensure!(
            from.len() == to.len() && given == wanted,
            InvalidArgument,
            "the input of shape {:?} cannot be reshaped to {:?}",
            io.input(0)?.shape(),
            io.output_shape(0)
        );
        copy_all(from, to, io.threads)
    }
}
