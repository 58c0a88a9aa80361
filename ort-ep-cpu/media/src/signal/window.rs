//! Window functions and the mel filter bank: `HannWindow`, `HammingWindow`, `BlackmanWindow` and
//! `MelWeightMatrix`.

use std::f64::consts::{LN_10, TAU};

use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::number::Number;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::spending;

/// A cosine window: `a0 - a1 cos(t) + a2 cos(2t)`, with `t` from 0 to 2 pi.
type Coefficients = [f64; 3];

const HANN: Coefficients = [0.5, 0.5, 0.0];
const HAMMING: Coefficients = [25.0 / 46.0, 21.0 / 46.0, 0.0];
const BLACKMAN: Coefficients = [0.42, 0.5, 0.08];

cpu_kernels![
    KernelDef { op: "HannWindow", make: |cx| make_window(cx, HANN), ..KernelDef::BASE },
    KernelDef { op: "HammingWindow", make: |cx| make_window(cx, HAMMING), ..KernelDef::BASE },
    KernelDef { op: "BlackmanWindow", make: |cx| make_window(cx, BLACKMAN), ..KernelDef::BASE },
    KernelDef { op: "MelWeightMatrix", make: make_mel, ..KernelDef::BASE },
];

fn make_window(
    cx: &mut CompileCx<'_>,
    [constant, first, second]: Coefficients,
) -> Result<Box<dyn Executable>> {
    let periodic = cx.attrs().flag("periodic")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let output = cx.output(0)?;
        let dtype = output.dtype();
        // The period in samples. A periodic window is a symmetric one, one sample longer, without
        // its last sample.
        let steps = output.element_count() as f64 - if periodic { 0.0 } else { 1.0 };
        for_each_type!(dtype in NUMERIC, T => {
            for (place, to) in spending(8, output.as_mut_slice::<T>()?).enumerate() {
                // A symmetric window of one element is its peak.
                let angle = if steps > 0.0 { TAU * place as f64 / steps } else { TAU / 2.0 };
                *to = T::from_f64(constant - first * angle.cos() + second * (2.0 * angle).cos());
            }
            Ok(())
        }, else => Err(error!(NotImplemented, "a window of {} is not supported", dtype.name())))
    }))
}

fn make_mel(_: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(|cx: &mut RunCx<'_>| {
        let number = |index: usize| -> Result<f64> {
            let values = cx.input(index)?.to_ints()?;
            let value = values.first().ok_or_else(|| error!(InvalidArgument, "input {index} is empty"))?;
            Ok(*value as f64)
        };
        let (length, rate) = (number(1)?, number(2)?);
        ensure!(rate > 0.0, InvalidArgument, "sample_rate is {rate}, expected more than 0");
        let edge = |index: usize| -> Result<f64> {
            let values = to_f64s(&cx.input(index)?)?;
            values.first().copied().ok_or_else(|| error!(InvalidArgument, "input {index} is empty"))
        };
        let (low, high) = (edge(3)?, edge(4)?);
        let output = cx.output(0)?;
        let &[bins, bands] = output.shape() else {
            return Err(error!(Fail, "the output is not a matrix"));
        };
        let _points = cx.reserve(bands.saturating_add(2).saturating_mul(size_of::<f64>()))?;
        let points = band_points([low, high], bands, length, rate);
        ensure!(
            points.iter().all(|point| (0.0..=bins as f64).contains(point)),
            InvalidArgument,
            "frequencies from {low} to {high} are outside of the spectrum"
        );
        let dtype = output.dtype();
        for_each_type!(dtype in NUMERIC, T => {
            for (index, to) in spending(2, output.as_mut_slice::<T>()?).enumerate() {
                let (bin, band) = ((index / bands) as f64, index % bands);
                *to = T::from_f64(triangle(bin, [points[band], points[band + 1], points[band + 2]]));
            }
            Ok(())
        }, else => Err(error!(NotImplemented, "a matrix of {} is not supported", dtype.name())))
    }))
}

/// Returns the bins where bands begin, peak and end, equidistant on the mel scale.
fn band_points([low, high]: [f64; 2], bands: usize, length: f64, rate: f64) -> Vec<f64> {
    // HTK's mel scale, as in the standard: `2595 * log10(1 + hertz / 700)`.
    let mel = |hertz: f64| 2595.0 * (hertz / 700.0).ln_1p() / LN_10;
    let step = (mel(high) - mel(low)) / (bands + 2) as f64;
    let hertz = |mel: f64| 700.0 * (mel / 2595.0 * LN_10).exp_m1();
    let point = |index: usize| ((length + 1.0) * hertz(index as f64 * step + mel(low)) / rate).floor();
    (0..bands + 2).map(point).collect()
}

/// Returns the weight of a bin in a band that rises from `low` to `peak` and falls to `high`.
fn triangle(bin: f64, [low, peak, high]: [f64; 3]) -> f64 {
    if bin >= peak && bin < high {
        (high - bin) / (high - peak)
    } else if bin >= low && bin <= peak && peak > low {
        (bin - low) / (peak - low)
    // Bands may be so narrow that their corners share a bin.
    } else if bin == peak {
        1.0
    } else {
        0.0
    }
}
