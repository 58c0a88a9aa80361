//! The provider `cuda` as a provider library, for programs that were built without it.
//!
//! ```text
//! cargo build --release -p ort-cuda-provider
//! ort run model.onnx --ep target/release/libort_cuda_provider.so --ep cpu
//! ```

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "a symbol is exported")]
mod library {
    //! The one symbol of the library.
    ort_core::export_provider!(ort_ep_cuda::CudaProvider);
}
