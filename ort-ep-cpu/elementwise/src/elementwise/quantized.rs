//! Arithmetic on 8-bit quantized tensors.
//!
//! `QLinearAdd` and `QLinearMul` take one pass, `QLinearSigmoid`, `QLinearLeakyRelu` and
//! `LookupTable` a table of 256 entries. Nothing is widened in memory, and sums round once. The
//! zero point of the result is added after rounding, as in `QuantizeLinear`, because an odd one
//! would send ties the other way.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::{Result, error, for_each_type};

use super::blocks::{elements, output_elements, output_shape, run_in_place, zip};
use ort_cpu_kernel::broadcast::{BLOCK, Block, Broadcast};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::quantized_byte::{QuantizedByte, scale, zero};
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::bytes::{ByteLanes, ByteOp, Lanes, Numbers, dispatch_bytes};
use ort_cpu_vector::simd::{Isa, Simd, lookup};

cpu_kernels![
    KernelDef { op: "QLinearAdd", make: |cx| make_binary(cx, Formula::Add), ..ON_BYTES },
    KernelDef { op: "QLinearMul", make: |cx| make_binary(cx, Formula::Mul), ..ON_BYTES },
    KernelDef {
        op: "QLinearSigmoid",
        in_place: &[(0, 0)],
        make: |cx| make_table(cx, Unary::Sigmoid),
        ..ON_BYTES
    },
    KernelDef {
        op: "QLinearLeakyRelu",
        in_place: &[(0, 0)],
        make: |cx| {
            let alpha = cx.attrs().float("alpha")?;
            make_table(cx, Unary::LeakyRelu { alpha })
        },
        ..ON_BYTES
    },
    KernelDef {
        domain: RUNTIME,
        op: "LookupTable",
        in_place: &[(0, 0)],
        make: |_| Ok(Box::new(run_table)),
        ..KernelDef::BASE
    },
];

const ON_BYTES: KernelDef = KernelDef { domain: MICROSOFT, ..KernelDef::BASE };

#[derive(Clone, Copy)]
enum Formula {
    Add,
    Mul,
}

fn make_binary(cx: &mut CompileCx<'_>, formula: Formula) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).unwrap_or(DType::U8);
    for_each_type!(
        dtype in [U8, I8],
        T => Ok(Box::new(move |cx: &mut RunCx<'_>| run_binary::<T>(cx, formula))),
        else => Err(error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())),
    )
}

/// One of the two operands.
#[derive(Clone, Copy)]
struct Side<'a, T> {
    values: &'a [T],
    shape: &'a [usize],
    scale: f32,
    zero: f32,
}

impl<'a, T: QuantizedByte> Side<'a, T> {
    fn new(cx: &RunCx<'a>, first: usize) -> Result<Side<'a, T>> {
        let view = cx.input(first)?;
        let (scale, zero) = (scale(cx, first + 1)?, zero::<T>(cx, first + 2)?);
        Ok(Side { values: elements(&view)?, shape: view.shape(), scale, zero })
    }
}

fn run_binary<T: QuantizedByte>(cx: &mut RunCx<'_>, formula: Formula) -> Result<()> {
    let (mut a, mut b) = (Side::<T>::new(cx, 0)?, Side::<T>::new(cx, 3)?);
    let (c_scale, c_zero) = (scale(cx, 6)?, zero::<T>(cx, 7)?);
    let shape = output_shape(cx, 0)?;
    let mut walk = Broadcast::new(shape, &[a.shape, b.shape])?;
    // ONNX Runtime takes a side that is constant along a row as the second operand, and the last
    // bit of the sum depends on the order.
    if walk.strides(0).last() == Some(&0) {
        (a, b) = (b, a);
        walk = Broadcast::new(shape, &[a.shape, b.shape])?;
    }
    let threads = cx.threads();
    let out = output_elements::<T>(cx, 0)?;
    let formula = match formula {
        Formula::Add => {
            let (a_scale, b_scale) = (a.scale / c_scale, b.scale / c_scale);
            Scaled::Add { a_scale, b_scale, fixed: -a_scale.mul_add(a.zero, b_scale * b.zero) }
        }
        Formula::Mul => {
            let scale = a.scale * b.scale / c_scale;
            Scaled::Mul { zeros: [a.zero, b.zero], scale }
        }
    };
    // Flat operands need no buffers, so their blocks may be of any length.
    let limit = if walk.needs_buffers() { BLOCK } else { usize::MAX };
    let isa = Isa::current();
    walk.for_each_block(threads, limit, out, |(left, right): &mut (Vec<T>, Vec<T>), start, block| {
        let a = walk.block(0, a.values, start, block.len(), left);
        let b = walk.block(1, b.values, start, block.len(), right);
        // Without FMA vectors, each element takes a scalar FMA, which rounds the same way.
        match isa >= Isa::Avx2 {
            true => dispatch_bytes(isa, Zip { a, b, out: block, formula, zero: c_zero }),
            false => zip(a, b, block, |a: T, b: T| T::nearest(formula.of(a.number(), b.number()) + c_zero)),
        }
    });
    Ok(())
}

/// The result before its zero point is added and it is clamped.
#[derive(Clone, Copy)]
enum Scaled {
    /// `round(a * a_scale + (b * b_scale + fixed))`, each step rounded once.
    Add { a_scale: f32, b_scale: f32, fixed: f32 },
    /// `round((a - zeros[0]) * (b - zeros[1]) * scale)`.
    Mul { zeros: [f32; 2], scale: f32 },
}

impl Scaled {
    fn of(self, a: f32, b: f32) -> f32 {
        let number = match self {
            Scaled::Add { a_scale, b_scale, fixed } => a.mul_add(a_scale, b.mul_add(b_scale, fixed)),
            Scaled::Mul { zeros, scale } => (a - zeros[0]) * (b - zeros[1]) * scale,
        };
        number.round_ties_even()
    }

    /// Like [`of`](Self::of) for vectors, with the zero point added, clamped to the range.
    #[inline(always)]
    fn of_lanes<L: ByteLanes>(
        self,
        lanes: L,
        [a, b]: [Numbers<L>; 2],
        zero: f32,
        [least, greatest]: [f32; 2],
    ) -> Lanes<L> {
        let simd = lanes.base();
        let number = match self {
            Scaled::Add { a_scale, b_scale, fixed } => {
                simd.mul_add(a, simd.splat(a_scale), simd.mul_add(b, simd.splat(b_scale), simd.splat(fixed)))
            }
            Scaled::Mul { zeros: [a_zero, b_zero], scale } => {
                let product = simd.mul(simd.sub(a, simd.splat(a_zero)), simd.sub(b, simd.splat(b_zero)));
                simd.mul(product, simd.splat(scale))
            }
        };
        // NaN becomes zero, as for single elements.
        let number = simd.add(simd.round_even(number), simd.splat(zero));
        let number = simd.select(simd.is_nan(number), simd.splat(0.0), number);
        simd.to_i32(simd.min_or_second(simd.max_or_second(number, simd.splat(least)), simd.splat(greatest)))
    }
}

/// Quantized values of two tensors.
struct Zip<'a, T> {
    a: Block<'a, T>,
    b: Block<'a, T>,
    out: &'a mut [T],
    formula: Scaled,
    /// The zero point of the result.
    zero: f32,
}

impl<T: QuantizedByte> ByteOp for Zip<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(self, lanes: L) {
        match T::DTYPE.is_signed() {
            true => self.run_as::<L, true>(lanes, [-128.0, 127.0]),
            false => self.run_as::<L, false>(lanes, [0.0, 255.0]),
        }
    }
}

impl<T: QuantizedByte> Zip<'_, T> {
    #[inline(always)]
    fn run_as<L: ByteLanes, const SIGNED: bool>(self, lanes: L, range: [f32; 2]) {
        let out: &mut [u8] = bytemuck::cast_slice_mut(self.out);
        let (a, b) = (Side8::<L>::new(lanes, &self.a), Side8::<L>::new(lanes, &self.b));
        let mut at = 0;
        if let (Side8::Quantized(a), Side8::Quantized(b), Scaled::Add { a_scale, b_scale, fixed }) =
            (&a, &b, self.formula)
            && [a_scale, b_scale, fixed].iter().all(|scale| scale.abs() < LARGE)
        {
            // Four vectors of lanes make one vector of bytes.
            let whole = out.len() - out.len() % (4 * L::Base::LANES);
            let scales = [a_scale, b_scale, fixed];
            let zero = self.zero as i32;
            add_vectors::<L, SIGNED>(lanes, [&a[..whole], &b[..whole]], &mut out[..whole], scales, zero);
            at = whole;
        }
        // The rest, and all other cases, take one vector at a time.
        while at < out.len() {
            let count = (out.len() - at).min(L::Base::LANES);
            let sides = [a.load::<SIGNED>(lanes, at, count), b.load::<SIGNED>(lanes, at, count)];
            lanes.store_low_bytes(out, at, count, self.formula.of_lanes(lanes, sides, self.zero, range));
            at += count;
        }
    }
}

/// Scales below this bound give sums that fit in 32 bits, whatever the quantized values.
const LARGE: f32 = 1e6;

/// Adds whole vectors of quantized values. Packing saturates, so nothing else has to clamp.
#[inline(always)]
fn add_vectors<L: ByteLanes, const SIGNED: bool>(
    lanes: L,
    [a, b]: [&[u8]; 2],
    out: &mut [u8],
    [a_scale, b_scale, fixed]: [f32; 3],
    zero: i32,
) {
    let (simd, width) = (lanes.base(), 4 * L::Base::LANES);
    let (a_scale, b_scale, fixed) = (simd.splat(a_scale), simd.splat(b_scale), simd.splat(fixed));
    // Interleaving with zeros widens the bytes to 32 bits without sign.
    let none = simd.splat_i32(0);
    for at in (0..out.len()).step_by(width) {
        let a = lanes.interleave_bytes([lanes.load_bytes(a, at, width), none, none, none]);
        let b = lanes.interleave_bytes([lanes.load_bytes(b, at, width), none, none, none]);
        let mut sums = a;
        for vector in 0..4 {
            let a = number_of::<L, SIGNED>(lanes, a[vector]);
            let b = number_of::<L, SIGNED>(lanes, b[vector]);
            sums[vector] = simd.to_i32(simd.mul_add(a, a_scale, simd.mul_add(b, b_scale, fixed)));
        }
        lanes.store_bytes(out, at, width, lanes.pack_interleaved(sums, zero, SIGNED));
    }
}

/// Converts the bytes in lanes to floats, sign-extended if `SIGNED`.
#[inline(always)]
fn number_of<L: ByteLanes, const SIGNED: bool>(lanes: L, values: Lanes<L>) -> Numbers<L> {
    // `(x ^ 0x80) - 0x80` sign-extends a byte.
    let (simd, sign) = (lanes.base(), lanes.base().splat_i32(0x80));
    simd.to_f32(if SIGNED { simd.sub_i32(simd.xor_i32(values, sign), sign) } else { values })
}

/// The bytes of a block, or its single value.
enum Side8<'a, L: ByteLanes> {
    Quantized(&'a [u8]),
    One(Numbers<L>),
}

impl<'a, L: ByteLanes> Side8<'a, L> {
    #[inline(always)]
    fn new<T: QuantizedByte>(lanes: L, block: &Block<'a, T>) -> Side8<'a, L> {
        match *block {
            Block::Slice(values) => Side8::Quantized(bytemuck::cast_slice(values)),
            Block::Scalar(value) => Side8::One(lanes.base().splat(value.number())),
        }
    }

    #[inline(always)]
    fn load<const SIGNED: bool>(&self, lanes: L, at: usize, count: usize) -> Numbers<L> {
        match self {
            Side8::Quantized(values) => lanes.load_quantized::<SIGNED>(values, at, count),
            Side8::One(number) => *number,
        }
    }
}

fn make_table(cx: &mut CompileCx<'_>, function: Unary) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).unwrap_or(DType::U8);
    for_each_type!(
        dtype in [U8, I8],
        T => Ok(Box::new(move |cx: &mut RunCx<'_>| {
            let table: [u8; 256] = bytemuck::cast(table::<T>(cx, function)?);
            run_in_place::<u8>(cx, |block| lookup(Isa::current(), &table, block))
        })),
        else => Err(error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())),
    )
}

fn run_table(cx: &mut RunCx<'_>) -> Result<()> {
    let table = cx.input(1)?.bytes()?;
    let len = table.len();
    let table: &[u8; 256] =
        table.try_into().map_err(|_| error!(InvalidArgument, "a table of {len} bytes, expected 256"))?;
    run_in_place::<u8>(cx, |block| lookup(Isa::current(), table, block))
}

/// Returns the result for each quantized value, in the order of the values' bits.
fn table<T: QuantizedByte>(cx: &RunCx<'_>, function: Unary) -> Result<[T; 256]> {
    let (x, y) = ((scale(cx, 1)?, zero::<T>(cx, 2)?), (scale(cx, 3)?, zero::<T>(cx, 4)?));
    let mut numbers = numbers::<T>(x);
    // 256 evaluations serve any number of elements.
    unary_in_place(Isa::current(), function, &mut numbers);
    Ok(numbers.map(|number| nearest(number, y)))
}

/// Returns the table that requantizes from one scale and zero point to another, in the order of the
/// values' bits.
pub(crate) fn requantization<T: QuantizedByte>(from: (f32, f32), to: (f32, f32)) -> [T; 256] {
    numbers::<T>(from).map(|number| nearest(number, to))
}

/// Dequantizes all quantized values.
fn numbers<T: QuantizedByte>((scale, zero): (f32, f32)) -> [f32; 256] {
    std::array::from_fn(|bits| (bytemuck::cast::<u8, T>(bits as u8).number() - zero) * scale)
}

fn nearest<T: QuantizedByte>(number: f32, (scale, zero): (f32, f32)) -> T {
    T::nearest((number / scale).round_ties_even() + zero)
}
