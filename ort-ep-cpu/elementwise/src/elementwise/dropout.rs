//! `Dropout`: random zeros in training, else the identity.

use std::hash::{BuildHasher, Hasher, RandomState};

use ort_alloc::fork::Mutex;
use ort_core::dtype::{CastOptions, ConvertError, DType, convert};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Error, Result, ensure, error};
use rand_mt::Mt;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{self, spend};

cpu_kernels![KernelDef { op: "Dropout", in_place: &[(0, 0)], make, ..KernelDef::BASE }];

/// Elements converted at a time.
const BLOCK: usize = 256;

/// The generator's state carries over from run to run, so that each training step drops other
/// elements.
struct Dropout {
    generator: Mutex<Mt>,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    // The generator's seed has 32 bits, as in NumPy.
    let seed = match cx.attrs().find_int("seed") {
        Some(seed) => seed as u32,
        None => RandomState::new().build_hasher().finish() as u32,
    };
    Ok(Box::new(Dropout { generator: Mutex::new(Mt::new(seed)) }))
}

impl Executable for Dropout {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        // The standard's defaults: inference mode, and a ratio of one half.
        let training = cx.find_input(2).map(|view| view.to_scalar::<bool>()).transpose()?.unwrap_or(false);
        let ratio = cx.find_input(1).map(|view| ratio(&view)).transpose()?.unwrap_or(0.5);
        let drops = training && ratio > 0.0;
        ensure!(
            !drops || ratio < 1.0,
            InvalidArgument,
            "the ratio of Dropout is {ratio}, expected 0 or more and less than 1"
        );
        let mask = if cx.wants(1) { Some(cx.output(1)?.bytes_mut()?) } else { None };
        let source = if cx.in_place(0).is_some() { None } else { Some(cx.input(0)?.bytes()?) };
        let output = cx.output(0)?;
        let dtype = output.dtype();
        let target = output.bytes_mut()?;
        if let Some(source) = source {
            interrupt::copy(source, target);
        }
        if drops {
            return drop_at_random(&mut self.generator.lock(), ratio, dtype, target, mask);
        }
        // Nothing is dropped, so the mask is true everywhere.
        if let Some(mask) = mask {
            interrupt::fill(mask, 1);
        }
        Ok(())
    }
}

fn ratio(view: &TensorView<'_>) -> Result<f64> {
    ensure!(
        view.element_count() == 1,
        InvalidArgument,
        "the ratio of Dropout has {:?} elements",
        view.shape()
    );
    let mut bytes = [0; 8];
    convert(view.dtype(), view.bytes()?, DType::F64, &mut bytes, 1, CastOptions::default())
        .map_err(failure)?;
    Ok(f64::from_le_bytes(bytes))
}

fn failure(error: ConvertError) -> Error {
    error!(InvalidArgument, "{error}")
}

/// Keeps an element, scaled by `1 / (1 - ratio)`, if a random number is not below `ratio`. The
/// numbers are those of NumPy's `uniform` with 53 bits.
fn drop_at_random(
    generator: &mut Mt,
    ratio: f64,
    dtype: DType,
    data: &mut [u8],
    mut mask: Option<&mut [u8]>,
) -> Result<()> {
    let scale = 1.0 / (1.0 - ratio);
    let size = dtype
        .byte_size()
        .ok_or_else(|| error!(NotImplemented, "Dropout of {} is not supported", dtype.name()))?;
    let mut numbers = [0u8; BLOCK * 8];
    for (index, block) in data.chunks_mut(BLOCK * size).enumerate() {
        let count = block.len() / size;
        spend(4 * count);
        let numbers = &mut numbers[..count * 8];
        convert(dtype, block, DType::F64, numbers, count, CastOptions::default()).map_err(failure)?;
        for (at, bytes) in numbers.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let kept = uniform(generator) >= ratio;
            let factor = if kept { scale } else { 0.0 };
            *bytes = (f64::from_le_bytes(*bytes) * factor).to_le_bytes();
            if let Some(place) = mask.as_deref_mut().and_then(|mask| mask.get_mut(index * BLOCK + at)) {
                *place = u8::from(kept);
            }
        }
        convert(DType::F64, numbers, dtype, block, count, CastOptions::default()).map_err(failure)?;
    }
    Ok(())
}

/// Returns a number from 0 to below 1, from 27 and 26 bits of two draws.
fn uniform(generator: &mut Mt) -> f64 {
    // 53 bits: `(high * 2^26 + low) / 2^53`.
    let (high, low) = (generator.next_u32() >> 5, generator.next_u32() >> 6);
    (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
}
