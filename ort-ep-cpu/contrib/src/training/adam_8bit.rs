//! `AdamW8bit`: a block of 256 elements is dequantized, updated as by `AdamW`, and quantized again.

use ort_core::Result;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ops::training::{ADAM_8BIT_BLOCK, AdamMode};
use ort_core::spec::RUNTIME;

use super::adam::{AdamRule, STEP};
use super::step::{Call, PART, Parameter, Stream, is_double, step_number};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::dynamic_quantization::DynamicQuantization;
use ort_cpu_vector::training::{Adam, adam};

/// The inputs of the quantized moments, first and second.
const QUANTIZED: [usize; 2] = [6, 8];
/// The inputs of their scales.
const SCALES: [usize; 2] = [7, 9];
/// How far the index of a state's input is above that of its output. Output 0 is the parameter.
const STATES: usize = 5;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "AdamW8bit",
    in_place: &[(0, 0), (6, 1), (7, 2), (8, 3), (9, 4)],
    make,
    ..KernelDef::BASE
}];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let rule = AdamRule::of(cx.attrs())?;
    Ok(match is_double(cx) {
        true => Box::new(move |cx: &mut RunCx<'_>| run::<f64>(cx, rule)),
        false => Box::new(move |cx: &mut RunCx<'_>| run::<f32>(cx, rule)),
    })
}

/// A part of all tensors, in whole blocks.
struct QuantizedPart<'a, T> {
    start: usize,
    len: usize,
    parameter: Stream<'a, T>,
    quantized: [Stream<'a, u8>; 2],
    scales: [Stream<'a, f32>; 2],
}

fn run<T: Parameter>(cx: &mut RunCx<'_>, rule: AdamRule) -> Result<()> {
    let call = Call::of(cx)?;
    let mut parameter = Stream::<T>::of(cx, 0, 0)?;
    let mut quantized = [stream(cx, QUANTIZED[0])?, stream(cx, QUANTIZED[1])?];
    let mut scales = [stream(cx, SCALES[0])?, stream(cx, SCALES[1])?];
    let len = call.gradient.len();
    call.check(std::slice::from_ref(&parameter))?;
    quantized.iter().try_for_each(|quantized: &Stream<'_, u8>| quantized.check_len(len))?;
    let blocks = len.div_ceil(ADAM_8BIT_BLOCK);
    scales.iter().try_for_each(|scales: &Stream<'_, f32>| scales.check_len(blocks))?;
    // Lengths are checked before this return, so that a skipped update refuses the same tensors.
    if !call.updates {
        parameter.keep();
        quantized.into_iter().for_each(Stream::keep);
        scales.into_iter().for_each(Stream::keep);
        return Ok(());
    }
    let step: Adam<T> = rule.step(AdamMode::Torch, (call.rate, call.scale), step_number(cx, STEP)?);
    // A part is a multiple of a block, so no two tasks share a block or its scale.
    let part = |start: usize| {
        let len = PART.min(len - start);
        QuantizedPart {
            start,
            len,
            parameter: parameter.take(len),
            quantized: quantized.each_mut().map(|quantized| quantized.take(len)),
            scales: scales.each_mut().map(|scales| scales.take(len.div_ceil(ADAM_8BIT_BLOCK))),
        }
    };
    let mut parts: Vec<QuantizedPart<'_, T>> = (0..len).step_by(PART).map(part).collect();
    for_each_chunk_mut(call.threads, &mut parts, 1, |_, parts| {
        parts.iter_mut().for_each(|part| part.update(&call, &step));
    });
    Ok(())
}

fn stream<'a, T: ort_core::dtype::Element>(cx: &mut RunCx<'a>, input: usize) -> Result<Stream<'a, T>> {
    Stream::of(cx, input, input - STATES)
}

impl<T: Parameter> QuantizedPart<'_, T> {
    fn update(&mut self, call: &Call<'_>, step: &Adam<T>) {
        // The first moment has a sign; the second one is a mean of squares.
        let tables = [DynamicQuantization::signed(), DynamicQuantization::unsigned()];
        let (mut converted, mut spare) = ([T::zero(); ADAM_8BIT_BLOCK], [T::zero(); ADAM_8BIT_BLOCK]);
        let mut moments = [[T::zero(); ADAM_8BIT_BLOCK]; 2];
        for (block, at) in (0..self.len).step_by(ADAM_8BIT_BLOCK).enumerate() {
            let range = at..(at + ADAM_8BIT_BLOCK).min(self.len);
            let place = self.start + range.start..self.start + range.end;
            let gradient = call.gradient.block(call.isa, place, &mut converted);
            // Both moments are decoded first, because the new bytes may overwrite the old ones in
            // place.
            let states = self.quantized.iter().zip(&self.scales).zip(&mut moments).zip(tables);
            for (((quantized, scales), moment), table) in states {
                decode(table, &quantized.elements()[range.clone()], scales.elements()[block], moment);
            }
            let [first, second] = moments.each_mut().map(|moment| &mut moment[..range.len()]);
            let x = self.parameter.block(range.clone(), &mut spare);
            adam(call.isa, step, [x, first, second], gradient);
            let states = self.quantized.iter_mut().zip(&mut self.scales).zip(&moments).zip(tables);
            for (((quantized, scales), moment), table) in states {
                quantize(table, &moment[..range.len()], (quantized, range.clone()), (scales, block));
            }
        }
    }
}

fn decode<T: Parameter>(table: &DynamicQuantization, quantized: &[u8], scale: f32, to: &mut [T]) {
    for (to, &byte) in to.iter_mut().zip(quantized) {
        *to = T::of(f64::from(table.value(byte) * scale));
    }
}

fn quantize<T: Parameter>(
    table: &DynamicQuantization,
    moment: &[T],
    (quantized, range): (&mut Stream<'_, u8>, std::ops::Range<usize>),
    (scales, block): (&mut Stream<'_, f32>, usize),
) {
    // The table encodes `f32`; moments of doubles are rounded to it first.
    let mut singles = [0.0; ADAM_8BIT_BLOCK];
    let singles = &mut singles[..moment.len()];
    for (single, &x) in singles.iter_mut().zip(moment) {
        let wide: f64 = x.into();
        *single = wide as f32;
    }
    // States that are not an output are encoded too, and dropped.
    let (mut spare, mut spare_scale) = ([0; ADAM_8BIT_BLOCK], [0.0]);
    let scale = table.encode(singles, quantized.target(range, &mut spare));
    scales.target(block..block + 1, &mut spare_scale).fill(scale);
}
