//! `DynamicQuantizeLinear`, and the same for kernels that quantize on their way.

use ort_core::Result;
use ort_core::ep::{Executable, KernelDef, RunCx};

use crate::cpu_kernels;
use crate::parallel::for_each_chunk_mut;
use crate::simd::bytes::{ByteLanes, ByteOp, dispatch_bytes};
use crate::simd::{Isa, Simd};
use crate::vector::reduce;

cpu_kernels![KernelDef {
    op: "DynamicQuantizeLinear",
    make: |_| Ok(Box::new(run) as Box<dyn Executable>),
    ..KernelDef::BASE
}];

/// Values of one task.
const CHUNK: usize = 1 << 14;

/// The scale and zero point of codes in a byte.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ByteCodes {
    pub(crate) scale: f32,
    /// A whole number from 0 to 255.
    pub(crate) zero: f32,
}

impl ByteCodes {
    /// The codes whose range is that of `values`, and always includes zero, so that zero has a code.
    pub(crate) fn covering(isa: Isa, values: &[f32]) -> ByteCodes {
        let (least, greatest) = (reduce::min(isa, values).min(0.0), reduce::max(isa, values).max(0.0));
        let scale = (greatest - least) / 255.0;
        let quotient = if scale == 0.0 { 0.0 } else { -least / scale };
        ByteCodes { scale, zero: quotient.clamp(0.0, 255.0).round_ties_even() }
    }

    /// The codes of `from`, as many as `to` takes.
    pub(crate) fn encode(self, isa: Isa, threads: usize, from: &[f32], to: &mut [u8]) {
        let divisor = if self.scale == 0.0 { 1.0 } else { self.scale };
        quantize(isa, threads, from, (divisor, self.zero, [0.0, 255.0]), to);
    }
}

/// `round(from / scale) + zero`, nearest in the range from `least` to `greatest`, as bytes; what is not a number becomes
/// 0.
pub(super) fn quantize(
    isa: Isa,
    threads: usize,
    from: &[f32],
    (scale, zero, range): (f32, f32, [f32; 2]),
    to: &mut [u8],
) {
    for_each_chunk_mut(threads, to, CHUNK, |chunk, to| {
        let from = &from[chunk * CHUNK..][..to.len()];
        dispatch_bytes(isa, Encode { from, scale, zero, range, to });
    });
}

struct Encode<'a> {
    from: &'a [f32],
    scale: f32,
    zero: f32,
    range: [f32; 2],
    to: &'a mut [u8],
}

impl ByteOp for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(self, lanes: L) {
        let (simd, step) = (lanes.base(), L::Base::LANES);
        let (scale, zero) = (simd.splat(self.scale), simd.splat(self.zero));
        let (least, greatest) = (simd.splat(self.range[0]), simd.splat(self.range[1]));
        let mut at = 0;
        while at < self.to.len() {
            let count = (self.to.len() - at).min(step);
            let values = match count == step {
                true => simd.load(self.from, at),
                false => simd.load_partial(self.from, at, count, 0.0),
            };
            let codes = simd.add(simd.round_even(simd.div(values, scale)), zero);
            let codes = simd.select(simd.is_nan(codes), simd.splat(0.0), codes);
            let codes = simd.min_or_second(simd.max_or_second(codes, least), greatest);
            lanes.store_low_bytes(self.to, at, count, simd.to_i32(codes));
            at += count;
        }
    }
}

fn run(cx: &mut RunCx<'_>) -> Result<()> {
    let isa = Isa::current();
    let (threads, x) = (cx.threads(), cx.input(0)?.as_slice::<f32>()?);
    let codes = ByteCodes::covering(isa, x);
    codes.encode(isa, threads, x, cx.output(0)?.as_mut_slice()?);
    if cx.wants(1) {
        cx.output(1)?.as_mut_slice::<f32>()?.fill(codes.scale);
    }
    if cx.wants(2) {
        cx.output(2)?.as_mut_slice::<u8>()?.fill(codes.zero as u8);
    }
    Ok(())
}
