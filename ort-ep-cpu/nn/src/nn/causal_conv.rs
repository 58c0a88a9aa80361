//! `CausalConvWithState`: depthwise convolution along time, with the last inputs carried as state.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_threads::interrupt::{self, pieces_mut, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::Isa;

cpu_kernels![KernelDef {
    op: "CausalConvWithState",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
}];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let silu = match cx.attrs().string("activation")? {
        "none" => false,
        "silu" | "swish" => true,
        other => return Err(error!(InvalidGraph, "activation '{other}' is not in the ONNX standard")),
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| run(cx, silu)))
}

fn run(cx: &mut RunCx<'_>, silu: bool) -> Result<()> {
    let (input, weight) = (cx.input(0)?, cx.input(1)?);
    let (&[batch, channels, length], &[filters, 1, kernel]) = (input.shape(), weight.shape()) else {
        return Err(error!(InvalidArgument, "shapes {:?} and {:?}", input.shape(), weight.shape()));
    };
    ensure!(filters == channels && kernel > 0, InvalidArgument, "a weight of shape {:?}", weight.shape());
    // The next call still needs the last `kernel - 1` inputs, so the state carries them.
    let carried = kernel - 1;
    let floats = |index: usize, len: usize| -> Result<Option<&[f32]>> {
        let Some(view) = cx.find_input(index) else { return Ok(None) };
        let values = view.as_slice::<f32>()?;
        ensure!(values.len() == len, InvalidArgument, "input {index} has shape {:?}", view.shape());
        Ok(Some(values))
    };
    let (bias, past) = (floats(2, channels)?, floats(3, batch * channels * carried)?);
    let (input, weight) = (input.as_slice::<f32>()?, weight.as_slice::<f32>()?);
    // The value at a time of a row. Times before the input come from the state.
    // Rows are [batch, channels]; the state is [batch, channels, carried].
    let at = |row: usize, time: usize| match time.checked_sub(carried) {
        Some(time) => input[row * length + time],
        None => past.map_or(0.0, |past| past[row * carried + time]),
    };
    let threads = cx.threads();
    if cx.wants(0) {
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        for_each_chunk_mut(threads, output, length, |row, to| {
            let channel = row % channels;
            interrupt::fill(to, bias.map_or(0.0, |bias| bias[channel]));
            for (tap, factor) in weight[channel * kernel..][..kernel].iter().enumerate() {
                let places = pieces_mut(to).flatten().enumerate();
                places.for_each(|(time, to)| *to += factor * at(row, time + tap));
            }
            if silu {
                unary_in_place(Isa::current(), Unary::Silu, to);
            }
        });
    }
    // `chunks_mut` refuses a length of 0, and a kernel of 1 carries nothing.
    if cx.wants(1) && carried > 0 {
        let state = cx.output(1)?.as_mut_slice::<f32>()?;
        for (row, state) in spending(2 * carried, state.chunks_mut(carried)).enumerate() {
            state.iter_mut().enumerate().for_each(|(time, state)| *state = at(row, length + time));
        }
    }
    Ok(())
}
