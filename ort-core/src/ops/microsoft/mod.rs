//! Operators of the domain `com.microsoft` that exported and optimized models contain. Their records follow the schemas
//! that ONNX Runtime registers.
//!
//! An operator that is one of the standard's under another name or with another default becomes that one when a model
//! is loaded (`upgrades`), so that nothing after the loader knows it. One that is made of several of the standard's is
//! decomposed where no provider has a kernel for it (`lower`).

mod quant_blocks;
