//! Kernels that read several neighbouring places for each result.
