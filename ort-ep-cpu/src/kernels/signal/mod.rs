//! Kernels of signal processing: Fourier transforms and windows.

mod fourier;
mod window;
