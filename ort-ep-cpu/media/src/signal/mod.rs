//! Signal processing kernels: Fourier transforms, windows and mel filter banks.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; lengths of frames and transforms are checked before their first use"
)]

mod fft;
mod fourier;
mod window;
