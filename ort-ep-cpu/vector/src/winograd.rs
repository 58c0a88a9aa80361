//! Winograd convolution: the transforms for kernels of 3 by 3, with one channel in each lane.
//!
//! See Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015,
//! arXiv:1509.09308). A tile of M by M results is `A^T ((G g G^T) . (B^T d B)) A`, with the kernel
//! g and an input tile d of N by N, N = M + 2. It takes `N * N` multiplications for each channel
//! instead of `9 * M * M`.
//!
//! The matrices follow from N - 1 points of interpolation. These are 0, 1 and -1 for M = 2; they
//! are 0 and the positive and negative roots of 1/2 and 2 for M = 4. The balance of the latter
//! loses about a quarter of the accuracy that 1 and 2 lose.

use crate::simd::steps::{Steps, StepsOp, dispatch_steps};
use crate::simd::{Isa, MAX_LANES, Simd, SimdOp, dispatch};

/// The side of a tile of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// 2 by 2 results, with 2.25 times fewer multiplications.
    Two,
    /// 4 by 4 results, with 4 times fewer multiplications and a digit less of accuracy.
    Four,
}

impl Tile {
    /// Returns the number of results along an axis of a tile.
    #[inline]
    pub fn side(self) -> usize {
        match self {
            Tile::Two => 2,
            Tile::Four => 4,
        }
    }

    /// Returns the number of inputs along an axis that the results of a tile depend on.
    #[inline]
    pub fn reach(self) -> usize {
        self.side() + 2
    }

    /// Returns the number of multiplications for each channel of a tile.
    #[inline]
    pub fn points(self) -> usize {
        self.reach() * self.reach()
    }
}

/// The greatest [`Tile::reach`].
pub const MOST_REACH: usize = 6;

/// Returns how many channels a transform processes at once.
pub fn lanes(isa: Isa) -> usize {
    // Not `Simd::LANES`, because the layout of packed weights must be known outside of a dispatch.
    match isa.min(Isa::widest()) {
        Isa::Avx512 => 16,
        Isa::Avx2 => 8,
        Isa::Neon | Isa::Scalar => 4,
    }
}

/// The transforms along one axis.
trait Filtering<const N: usize, const M: usize>: Copy {
    /// Multiplies `B^T` by a column of inputs.
    fn input<S: Simd>(self, s: S, d: [S::F32; N]) -> [S::F32; N];
    /// Multiplies `G` by a column of the kernel.
    fn kernel<S: Simd>(self, s: S, g: [S::F32; 3]) -> [S::F32; N];
    /// Multiplies `A^T` by a column of accumulators.
    fn output<S: Simd>(self, s: S, m: [S::F32; N]) -> [S::F32; M];
}

#[derive(Clone, Copy)]
struct Two;

impl Filtering<4, 2> for Two {
    #[inline(always)]
    fn input<S: Simd>(self, s: S, [d0, d1, d2, d3]: [S::F32; 4]) -> [S::F32; 4] {
        [s.sub(d0, d2), s.add(d1, d2), s.sub(d2, d1), s.sub(d3, d1)]
    }
    #[inline(always)]
    fn kernel<S: Simd>(self, s: S, [g0, g1, g2]: [S::F32; 3]) -> [S::F32; 4] {
        let half = s.splat(0.5);
        // The factors of 1/2 belong to the kernel, which is transformed once, rather than to the
        // inputs.
        let (outer, inner) = (s.mul(s.add(g0, g2), half), s.mul(g1, half));
        [g0, s.add(outer, inner), s.sub(outer, inner), g2]
    }
    #[inline(always)]
    fn output<S: Simd>(self, s: S, [m0, m1, m2, m3]: [S::F32; 4]) -> [S::F32; 2] {
        [s.add(m0, s.add(m1, m2)), s.add(s.sub(m1, m2), m3)]
    }
}

#[derive(Clone, Copy)]
struct Four;

/// The root of 1/2, a point of interpolation. The other is its double.
const P: f32 = std::f32::consts::FRAC_1_SQRT_2;
const Q: f32 = std::f32::consts::SQRT_2;

impl Filtering<6, 4> for Four {
    #[inline(always)]
    fn input<S: Simd>(self, s: S, [d0, d1, d2, d3, d4, d5]: [S::F32; 6]) -> [S::F32; 6] {
        // x^4 - 5/2 x^2 + 1 vanishes at all points but 0.
        let sum = s.splat(2.5);
        // At +-p: (x^2 - 2) (x +- p) x, split into even and odd powers.
        let near_even = s.neg_mul_add(s.splat(2.0), d2, d4);
        let near_odd = s.mul(s.splat(P), s.neg_mul_add(s.splat(2.0), d1, d3));
        let far_even = s.neg_mul_add(s.splat(0.5), d2, d4);
        let far_odd = s.mul(s.splat(Q), s.neg_mul_add(s.splat(0.5), d1, d3));
        [
            s.add(s.neg_mul_add(sum, d2, d4), d0),
            s.add(near_even, near_odd),
            s.sub(near_even, near_odd),
            s.add(far_even, far_odd),
            s.sub(far_even, far_odd),
            s.add(s.neg_mul_add(sum, d3, d5), d1),
        ]
    }
    #[inline(always)]
    fn kernel<S: Simd>(self, s: S, [g0, g1, g2]: [S::F32; 3]) -> [S::F32; 6] {
        // The products of a point's differences to the others: -3/2 at +-p, 6 at +-q.
        let (near, far) = (s.splat(-2.0 / 3.0), s.splat(1.0 / 6.0));
        let near_even = s.mul(s.mul_add(s.splat(0.5), g2, g0), near);
        let near_odd = s.mul(s.mul(s.splat(P), g1), near);
        let far_even = s.mul(s.mul_add(s.splat(2.0), g2, g0), far);
        let far_odd = s.mul(s.mul(s.splat(Q), g1), far);
        [
            g0,
            s.add(near_even, near_odd),
            s.sub(near_even, near_odd),
            s.add(far_even, far_odd),
            s.sub(far_even, far_odd),
            g2,
        ]
    }
    #[inline(always)]
    fn output<S: Simd>(self, s: S, [m0, m1, m2, m3, m4, m5]: [S::F32; 6]) -> [S::F32; 4] {
        // Points come in pairs of opposite sign: their sums serve even powers and their differences
        // odd ones.
        let (near, far) = (s.add(m1, m2), s.add(m3, m4));
        let near_odd = s.mul(s.splat(P), s.sub(m1, m2));
        let far_odd = s.mul(s.splat(Q), s.sub(m3, m4));
        [
            s.add(m0, s.add(near, far)),
            s.add(near_odd, far_odd),
            s.mul_add(s.splat(2.0), far, s.mul(s.splat(0.5), near)),
            s.add(s.mul_add(s.splat(2.0), far_odd, s.mul(s.splat(0.5), near_odd)), m5),
        ]
    }
}

/// The points of a row of tiles for some channels, or their accumulators, with strides in elements.
pub struct Points<T> {
    /// The values, starting with the first channel of the first tile.
    pub values: T,
    /// The stride between tiles.
    pub tile: usize,
    /// The stride between points.
    pub point: usize,
}

/// A row of tiles that is transformed at a time.
#[derive(Clone, Copy, Debug)]
pub struct TileRow {
    /// The size of a tile.
    pub tile: Tile,
    /// The number of tiles.
    pub tiles: usize,
    /// Positions in a row of pixels.
    pub columns: usize,
}

/// Transforms the inputs of a row of tiles. `pixels` has [`Tile::reach`] rows of positions, each
/// with [`lanes`] channels. If `paired`, points hold pairs of channels.
///
/// # Panics
/// If a slice is too short, or if `paired` and the instruction set lacks bf16 products.
pub fn input(isa: Isa, paired: bool, row: TileRow, pixels: &[f32], points: Points<&mut [f32]>) {
    dispatch_steps(isa, paired, InputOp { row, pixels, points });
}

struct InputOp<'a> {
    row: TileRow,
    pixels: &'a [f32],
    points: Points<&'a mut [f32]>,
}

impl StepsOp for InputOp<'_> {
    #[inline(always)]
    fn run<T: Steps>(self, t: T) {
        match self.row.tile {
            Tile::Two => self.with(t, Two),
            Tile::Four => self.with(t, Four),
        }
    }
}

impl InputOp<'_> {
    #[inline(always)]
    fn with<T: Steps, F: Filtering<N, M>, const N: usize, const M: usize>(self, t: T, filtering: F) {
        let s = t.base();
        let InputOp { row: TileRow { tiles, columns, .. }, pixels, points } = self;
        for tile in 0..tiles {
            // Columns first, then rows. The values in between stay on the stack, which is in L1.
            let mut half = [[s.splat(0.0); N]; N];
            for (x, half) in half.iter_mut().enumerate() {
                let place = |y: usize| s.load(pixels, (y * columns + tile * M + x) * T::Base::LANES);
                *half = filtering.input(s, std::array::from_fn(place));
            }
            for y in 0..N {
                let row = filtering.input(s, half.map(|column| column[y]));
                for (x, value) in row.into_iter().enumerate() {
                    t.store(points.values, tile * points.tile + (y * N + x) * points.point, value);
                }
            }
        }
    }
}

/// The epilogue, applied in registers: adds a bias for each of [`lanes`] channels, then clamps.
#[derive(Clone, Copy)]
pub struct Finish {
    /// The bias of each channel.
    pub bias: [f32; MAX_LANES],
    /// The bounds of the result.
    pub clamp: super::activation::Clamp,
}

/// Transforms the accumulators of a row of tiles to results. `pixels` receives [`Tile::side`]
/// rows of positions, each with [`lanes`] channels.
///
/// # Panics
/// If a slice is too short.
pub fn output(isa: Isa, row: TileRow, accumulators: Points<&[f32]>, finish: Finish, pixels: &mut [f32]) {
    dispatch(isa, OutputOp { row, accumulators, finish, pixels });
}

struct OutputOp<'a> {
    row: TileRow,
    accumulators: Points<&'a [f32]>,
    finish: Finish,
    pixels: &'a mut [f32],
}

impl SimdOp for OutputOp<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.row.tile {
            Tile::Two => self.with(s, Two),
            Tile::Four => self.with(s, Four),
        }
    }
}

impl OutputOp<'_> {
    #[inline(always)]
    fn with<S: Simd, F: Filtering<N, M>, const N: usize, const M: usize>(self, s: S, filtering: F) {
        use crate::simd::slices::UnaryOp;
        let OutputOp { row: TileRow { tiles, columns, .. }, accumulators, finish, pixels } = self;
        // A lane is a channel, so the bias is a vector, loaded once.
        let bias = s.from_array(&finish.bias);
        for tile in 0..tiles {
            let mut half = [[s.splat(0.0); M]; N];
            for (x, half) in half.iter_mut().enumerate() {
                let sum = |y: usize| {
                    s.load(accumulators.values, tile * accumulators.tile + (y * N + x) * accumulators.point)
                };
                *half = filtering.output(s, std::array::from_fn(sum));
            }
            for y in 0..M {
                let row = filtering.output(s, half.map(|column| column[y]));
                for (x, value) in row.into_iter().enumerate() {
                    let value = finish.clamp.apply(s, s.add(value, bias));
                    s.store(pixels, (y * columns + tile * M + x) * S::LANES, value);
                }
            }
        }
    }
}

/// Transforms kernels. `kernels` holds for each of 9 taps, row by row, a value of each of [`lanes`]
/// filters. `points` receives as many for each point, `point` apart.
///
/// # Panics
/// If a slice is too short.
pub fn kernel(isa: Isa, tile: Tile, kernels: &[f32], points: &mut [f32], point: usize) {
    dispatch(isa, KernelOp { tile, kernels, points, point });
}

struct KernelOp<'a> {
    tile: Tile,
    kernels: &'a [f32],
    points: &'a mut [f32],
    point: usize,
}

impl SimdOp for KernelOp<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.tile {
            Tile::Two => self.with(s, Two),
            Tile::Four => self.with(s, Four),
        }
    }
}

impl KernelOp<'_> {
    #[inline(always)]
    fn with<S: Simd, F: Filtering<N, M>, const N: usize, const M: usize>(self, s: S, filtering: F) {
        let tap = |y: usize, x: usize| s.load(self.kernels, (y * 3 + x) * S::LANES);
        let half: [[S::F32; N]; 3] =
            std::array::from_fn(|x| filtering.kernel(s, std::array::from_fn(|y| tap(y, x))));
        for y in 0..N {
            let row = filtering.kernel(s, half.map(|column| column[y]));
            for (x, value) in row.into_iter().enumerate() {
                s.store(self.points, (y * N + x) * self.point, value);
            }
        }
    }
}
