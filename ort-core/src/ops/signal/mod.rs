//! Signal processing: Fourier transforms and windows.

mod fourier;
mod gradients;
mod window;
