//! NEON 8-bit micro-kernel: tiles of 4 rows by 8 columns. Its speed has not been measured.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Tile, TileFunction, compute};
use ort_cpu_vector::simd::{Neon, Simd};

kernel!(Neon, Neon);
