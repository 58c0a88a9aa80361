//! `CausalConvWithState` of the standard and of `com.microsoft`: depthwise convolution along time,
//! with the last inputs carried as state.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_threads::interrupt::{self, spend, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::Isa;

const OF_STANDARD: KernelDef = KernelDef {
    op: "CausalConvWithState",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
};

cpu_kernels![
    OF_STANDARD,
    KernelDef {
        domain: MICROSOFT,
        when: |node| node.attrs().find_int("ndim").unwrap_or(1) == 1,
        takes: "ndim = 1",
        ..OF_STANDARD
    },
];

struct CausalConv {
    is_silu: bool,
    /// Whether inputs and states are (batch, time, channels) instead of (batch, channels, time).
    is_last: bool,
    dilation: usize,
    /// How many states after the last times are kept; 0 for the last one, without an axis.
    window: usize,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let is_silu = match attrs.string("activation")? {
        "none" => false,
        "silu" | "swish" => true,
        other => return Err(error!(InvalidGraph, "activation '{other}' is not in the ONNX standard")),
    };
    // The standard's operator does not have these attributes.
    let size = |name: &str, default: i64| {
        let value = attrs.find_int(name).unwrap_or(default);
        usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}, expected 0 or more"))
    };
    Ok(Box::new(CausalConv {
        is_silu,
        is_last: size("channels_last", 0)? != 0,
        dilation: size("dilation", 1)?,
        window: size("state_window", 0)?,
    }))
}

/// The sizes of a run.
#[derive(Clone, Copy)]
struct ConvSizes {
    batch: usize,
    channels: usize,
    times: usize,
    kernel: usize,
    /// The inputs that a state carries.
    carried: usize,
}

/// The inputs of a run.
struct Timeline<'a> {
    input: &'a [f32],
    /// The last state of the previous run; without it, inputs before the first are 0.
    past: Option<&'a [f32]>,
    sizes: ConvSizes,
    is_last: bool,
}

impl Timeline<'_> {
    /// Returns the value of a channel at a time that counts from the first carried input.
    fn at(&self, batch: usize, channel: usize, time: usize) -> f32 {
        let ConvSizes { channels, times, carried, .. } = self.sizes;
        let place = |time: usize, times: usize| match self.is_last {
            true => (batch * times + time) * channels + channel,
            false => (batch * channels + channel) * times + time,
        };
        match time.checked_sub(carried) {
            Some(time) => self.input[place(time, times)],
            None => self.past.map_or(0.0, |past| past[place(time, carried)]),
        }
    }
}

impl CausalConv {
    fn sizes(&self, input: &[usize], weight: &[usize]) -> Result<ConvSizes> {
        let (batch, channels, times) = match *input {
            [batch, times, ref channels @ ..] if self.is_last => (batch, channels.iter().product(), times),
            [batch, channels, times] => (batch, channels, times),
            _ => return Err(error!(InvalidArgument, "input has shape {input:?}, expected rank 3")),
        };
        let kernel = match *weight {
            [filters, 1, kernel] if filters == channels && kernel > 0 => kernel,
            _ => {
                return Err(error!(
                    InvalidArgument,
                    "weight has shape {weight:?}, expected [{channels}, 1, at least 1]"
                ));
            }
        };
        let carried = (kernel - 1).checked_mul(self.dilation);
        let carried = carried.ok_or_else(|| error!(InvalidArgument, "a dilation of {}", self.dilation))?;
        Ok(ConvSizes { batch, channels, times, kernel, carried })
    }

    /// Writes the outputs of one channel, or with the channels last of one time.
    fn convolve(
        &self,
        line: &Timeline<'_>,
        taps: &[f32],
        bias: Option<&[f32]>,
        index: usize,
        to: &mut [f32],
    ) {
        let ConvSizes { channels, times, kernel, .. } = line.sizes;
        let of = |index: usize| if self.is_last { index / times } else { index / channels };
        let batch = of(index);
        for (at, to) in to.iter_mut().enumerate() {
            let (channel, time) = if self.is_last { (at, index % times) } else { (index % channels, at) };
            let taps = taps[channel * kernel..][..kernel].iter().enumerate();
            let values =
                taps.map(|(tap, factor)| factor * line.at(batch, channel, time + tap * self.dilation));
            *to = values.fold(bias.map_or(0.0, |bias| bias[channel]), |sum, value| sum + value);
        }
        if self.is_silu {
            unary_in_place(Isa::current(), Unary::Silu, to);
        }
    }

    /// Writes the states after the last times, aligned to the right.
    fn carry(&self, line: &Timeline<'_>, states: &mut [f32]) {
        let ConvSizes { batch, channels, times, carried, .. } = line.sizes;
        let slots = states.chunks_mut((batch * channels * carried).max(1));
        for (slot, states) in slots.enumerate() {
            // The state after the time before `first`, which is counted from the first input.
            let first = (times + 1 + slot).checked_sub(self.window.max(1));
            let Some(first) = first.filter(|first| *first > 0 || self.window == 0) else {
                interrupt::fill(states, 0.0);
                continue;
            };
            for (index, to) in spending(2, states.iter_mut()).enumerate() {
                let (outer, inner) = match self.is_last {
                    true => (index / channels, index % channels),
                    false => (index / carried, index % carried),
                };
                *to = match self.is_last {
                    true => line.at(outer / carried, inner, first + outer % carried),
                    false => line.at(outer / channels, outer % channels, first + inner),
                };
            }
        }
    }
}

impl Executable for CausalConv {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (input, weight) = (cx.input(0)?, cx.input(1)?);
        let sizes = self.sizes(input.shape(), weight.shape())?;
        let ConvSizes { batch, channels, times, kernel, carried } = sizes;
        let floats = |index: usize, len: usize| -> Result<Option<&[f32]>> {
            let Some(view) = cx.find_input(index) else { return Ok(None) };
            let values = view.as_slice::<f32>()?;
            ensure!(values.len() == len, InvalidArgument, "input {index} has shape {:?}", view.shape());
            Ok(Some(values))
        };
        let state = batch * channels * carried;
        let bias = floats(2, channels)?;
        let past = floats(3, self.window.max(1) * state)?.map(|past| &past[past.len() - state..]);
        let (input, weight) = (input.as_slice::<f32>()?, weight.as_slice::<f32>()?);
        let line = Timeline { input, past, sizes, is_last: self.is_last };
        let threads = cx.threads();
        if cx.wants(0) {
            let output = cx.output(0)?.as_mut_slice::<f32>()?;
            let unit = if self.is_last { channels } else { times };
            for_each_chunk_mut(threads, output, unit, |index, to| {
                spend(2 * kernel * to.len());
                self.convolve(&line, weight, bias, index, to);
            });
        }
        // `chunks_mut` refuses a length of 0, and a kernel of 1 carries nothing.
        if cx.wants(1) && state > 0 {
            self.carry(&line, cx.output(1)?.as_mut_slice::<f32>()?);
        }
        Ok(())
    }
}
