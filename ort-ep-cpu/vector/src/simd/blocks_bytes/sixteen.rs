//! Sixteen lanes of dot products of block-quantized weights: the operations, and plain Rust for
//! them.

/// Quantized weights that are processed at once: some small blocks, or a part of a large one.
pub const UNIT: usize = 64;

/// Accumulators of a dot product.
pub(super) const LANES: usize = 16;

/// Sixteen `f32` lanes, in one or more registers.
///
/// # Safety
/// All methods need a CPU with the instructions of the type. Pointers may be unaligned and must be
/// valid for what is read.
pub(super) trait Sixteen: Copy {
    type F32: Copy;
    unsafe fn zero(self) -> Self::F32;
    /// Prefetches a cache line that will be read soon; any address will do.
    unsafe fn prefetch(self, _address: *const u8) {}
    /// For each four quantized weights of 4 bits, the sum of their products with four numbers.
    /// Reads 32 bytes of weights and 64 numbers.
    unsafe fn dots_of_nibbles(self, quantized: *const u8, numbers: *const i8) -> Self::F32;
    /// The same with weights of 8 bits, of which it reads 64.
    unsafe fn dots_of_bytes(self, quantized: *const u8, numbers: *const i8) -> Self::F32;
    /// Loads the first `count` floats and permutes them by `pattern`.
    unsafe fn spread(self, from: *const u8, count: usize, pattern: &[i32; LANES]) -> Self::F32;
    /// Loads the first `count` floats and zeros the rest.
    unsafe fn load(self, from: *const u8, count: usize) -> Self::F32;
    /// Unpacks eight bytes to 16 quantized values of 4 bits.
    unsafe fn unpack_nibbles(self, bytes: [u8; 8]) -> Self::F32;
    /// Unpacks 16 quantized values of 8 bits.
    unsafe fn unpack_bytes(self, bytes: [u8; LANES]) -> Self::F32;
    unsafe fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once.
    unsafe fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The sum of all lanes, added pairwise by halves.
    unsafe fn sum(self, a: Self::F32) -> f32;
}

/// Plain Rust, which every CPU can run.
#[derive(Clone, Copy)]
pub(super) struct Plain;

/// Adds 16 lanes pairwise by halves.
pub(super) fn sum_in_halves(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

impl Sixteen for Plain {
    type F32 = [f32; LANES];
    unsafe fn zero(self) -> Self::F32 {
        [0.0; LANES]
    }
    unsafe fn dots_of_nibbles(self, quantized: *const u8, numbers: *const i8) -> Self::F32 {
        std::array::from_fn(|lane| {
            let (half, first) = (lane / 8, lane % 8 * 4);
            let product = |at: usize| {
                // SAFETY: the caller guarantees 32 bytes and 64 numbers.
                let (code, number) = unsafe { (*quantized.add(at), *numbers.add(half * UNIT / 2 + at)) };
                i32::from((code >> (half * 4)) & 15) * i32::from(number)
            };
            (first..first + 4).map(product).sum::<i32>() as f32
        })
    }
    unsafe fn dots_of_bytes(self, quantized: *const u8, numbers: *const i8) -> Self::F32 {
        std::array::from_fn(|lane| {
            let product = |at: usize| {
                // SAFETY: the caller guarantees 64 bytes and 64 numbers.
                let (code, number) = unsafe { (*quantized.add(at), *numbers.add(at)) };
                i32::from(code) * i32::from(number)
            };
            (lane * 4..lane * 4 + 4).map(product).sum::<i32>() as f32
        })
    }
    unsafe fn spread(self, from: *const u8, _count: usize, pattern: &[i32; LANES]) -> Self::F32 {
        // SAFETY: the caller guarantees `count` floats, and the pattern names only those.
        pattern.map(|place| unsafe { from.cast::<f32>().add(place as usize).read_unaligned() })
    }
    unsafe fn load(self, from: *const u8, count: usize) -> Self::F32 {
        std::array::from_fn(|lane| match lane < count {
            // SAFETY: the caller guarantees `count` floats.
            true => unsafe { from.cast::<f32>().add(lane).read_unaligned() },
            false => 0.0,
        })
    }
    unsafe fn unpack_nibbles(self, bytes: [u8; 8]) -> Self::F32 {
        std::array::from_fn(|lane| f32::from((bytes[lane / 2] >> (lane % 2 * 4)) & 15))
    }
    unsafe fn unpack_bytes(self, bytes: [u8; LANES]) -> Self::F32 {
        bytes.map(f32::from)
    }
    unsafe fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }
    unsafe fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }
    unsafe fn sum(self, a: Self::F32) -> f32 {
        sum_in_halves(a)
    }
}
