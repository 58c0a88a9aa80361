//! Portable 8-bit micro-kernel in plain Rust: tiles of 4 rows by 8 columns.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Tile, TileFunction, compute};
use ort_cpu_vector::simd::{Portable, Simd};

kernel!(Portable, Portable);
