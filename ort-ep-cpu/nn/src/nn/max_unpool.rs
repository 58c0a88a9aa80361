//! `MaxUnpool`: scatters values to the indices that `MaxPool` returned.

use ort_core::dtype::Element;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::Windows;
use ort_core::tensor::element_count;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{self, spending};

cpu_kernels![KernelDef { op: "MaxUnpool", host_inputs: &[2], make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (attrs, dtype) = (cx.attrs().clone(), cx.node.dtype(0));
    let Some(dtype) = dtype else { return Err(error!(Fail, "the input's type is not known")) };
    for_each_type!(dtype in FLOATS, T => {
        Ok(Box::new(move |cx: &mut RunCx<'_>| unpool::<T>(cx, &attrs)))
    }, else => Err(error!(NotImplemented, "unpooling of {dtype} is not supported")))
}

/// Writes each value at its index in the pool's input. If `output_shape` asks for another shape,
/// that input is its upper left corner.
fn unpool<T: Element + Default>(cx: &mut RunCx<'_>, attrs: &Attributes) -> Result<()> {
    let x = cx.input(0)?;
    let shape = x.shape();
    let windows = Windows::of_pool(attrs, shape.len())?;
    let sizes: Vec<usize> =
        // A pool's input is what a transposed window with the same attributes covers.
        windows.transposed_on(attrs, &shape[2..])?.iter().map(|axis| axis.input).collect();
    let (values, indices) = (x.as_slice::<T>()?, cx.input(1)?.as_slice::<i64>()?);
    ensure!(
        values.len() == indices.len(),
        InvalidArgument,
        help = "the indices are the second output of MaxPool",
        "{} indices for {} values",
        indices.len(),
        values.len()
    );
    let output = cx.output(0)?;
    let to_shape = output.shape();
    ensure!(to_shape.len() == shape.len(), InvalidArgument, "output_shape {to_shape:?} has another rank");
    let to = output.as_mut_slice::<T>()?;
    interrupt::fill(to, T::default());
    // The shape that the indices count through.
    let full: Vec<usize> = shape[..2].iter().chain(&sizes).copied().collect();
    let count = element_count(&full)?;
    for (value, index) in spending(4, values.iter().zip(indices)) {
        let inside = usize::try_from(*index).ok().filter(|index| *index < count);
        let mut rest = inside.ok_or_else(|| {
            error!(
                InvalidArgument,
                "index {index} is out of range for the {count} elements of shape {full:?}"
            )
            .help("the indices are the second output of MaxPool, counted over the whole tensor")
        })?;
        // Converts an index of the pool's input to one of the output, axis by axis.
        let (mut place, mut step, mut inside) = (0, 1, true);
        for (size, to_size) in full.iter().zip(to_shape).rev() {
            let at = rest % size;
            rest /= size;
            inside &= at < *to_size;
            place += at * step;
            step *= to_size;
        }
        ensure!(inside, InvalidArgument, "an index is outside output_shape {to_shape:?}");
        to[place] = *value;
    }
    Ok(())
}
