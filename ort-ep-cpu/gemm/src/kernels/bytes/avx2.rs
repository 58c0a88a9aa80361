//! AVX2 8-bit micro-kernel: tiles of 4 rows by 16 columns. Bytes are widened to 16 bits, so that no
//! product saturates.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Tile, TileFunction, compute};
use ort_cpu_vector::simd::{Avx2, Simd};

kernel!(Avx2, Avx2::new_unchecked(), target_feature(enable = "avx2,fma,f16c"));
