//! Any bytes as a LoRA adapter: its parameters are read, each as long as its shape says, or it is
//! an error.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use ort_runtime::onnx::read_adapter;
use ort_runtime::tensor::byte_count;

fuzz_target!(|data: &[u8]| {
    let Ok(parameters) = read_adapter(Bytes::copy_from_slice(data)) else { return };
    for (name, tensor) in parameters {
        assert!(!name.is_empty());
        if tensor.dtype().bits().is_some() {
            assert_eq!(byte_count(tensor.dtype(), tensor.shape()).ok(), Some(tensor.byte_count()));
        }
    }
});
