//! `LRN`: local response normalization across channels.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use super::row::Row;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::layout::around_axis;
use ort_cpu_threads::interrupt::{self, PIECE, pieces, pieces_mut, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

cpu_kernels![KernelDef { op: "LRN", make, ..KernelDef::BASE }];

#[derive(Clone, Copy)]
struct LrnSettings {
    alpha: f64,
    beta: f64,
    bias: f64,
    size: usize,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let size = attrs.int("size")?;
    let size = usize::try_from(size)
        .map_err(|_| error!(InvalidGraph, "size of LRN is {size}, expected 1 or more"))?;
    ensure!(size > 0, InvalidGraph, "LRN over no channels");
    let settings = LrnSettings {
        // The standard divides the sum of squares by the size.
        alpha: f64::from(attrs.float("alpha")?) / size as f64,
        beta: f64::from(attrs.float("beta")?),
        bias: f64::from(attrs.float("bias")?),
        size,
    };
    // Each thread holds the squares of a plane.
    let bound = |shapes: &IoShapes<'_>| {
        let plane = shapes.input(0).get(2..).map_or(0, elements);
        let planes = shapes.input(0).get(..2).map_or(0, elements);
        plane.saturating_mul(size_of::<f64>()).saturating_mul(shapes.threads.min(planes))
    };
    let run = move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let dtype = input.dtype();
        for_each_type!(dtype in FLOATS, T => run::<T>(cx, settings, input), else => {
            Err(error!(NotImplemented, "normalizing {}", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn run<T: Row>(cx: &mut RunCx<'_>, settings: LrnSettings, input: TensorView<'_>) -> Result<()> {
    let [_, channels, spatial] = around_axis(input.shape(), 1)?;
    let from = input.as_slice::<T>()?;
    let to = cx.output(0)?.as_mut_slice::<T>()?;
    for_each_row_chunk_mut(cx.threads(), to, spatial, 1, |first, rows| {
        let mut squares = vec![0f64; spatial];
        for (index, to) in rows.chunks_exact_mut(spatial).enumerate() {
            let (image, channel) = ((first + index) / channels, (first + index) % channels);
            // The window is centered on the channel, with the extra channel of an even size after
            // it.
            let start = channel.saturating_sub((settings.size - 1) / 2);
            let end = channel.saturating_add(settings.size / 2).min(channels - 1);
            // The window is summed again for each channel: a running sum would carry rounding
            // errors from channel to channel.
            interrupt::fill(&mut squares, 0.0);
            for neighbour in start..=end {
                spend(spatial.min(PIECE));
                let row = &from[(image * channels + neighbour) * spatial..][..spatial];
                for (squares, row) in squares.chunks_mut(PIECE).zip(pieces(row)) {
                    for (sum, x) in squares.iter_mut().zip(row) {
                        let x = x.to_f64();
                        *sum += x * x;
                    }
                }
            }
            spend(8 * spatial.min(PIECE));
            let row = &from[(first + index) * spatial..][..spatial];
            for ((row, to), squares) in row.chunks(PIECE).zip(pieces_mut(to)).zip(squares.chunks(PIECE)) {
                for ((x, y), sum) in row.iter().zip(to).zip(squares) {
                    let norm = (settings.bias + settings.alpha * *sum).powf(settings.beta);
                    *y = T::from_f64(x.to_f64() / norm);
                }
            }
        }
    });
    Ok(())
}
