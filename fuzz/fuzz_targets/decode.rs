//! Any bytes as a model file: it loads and can be saved again, or is an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ort_core::onnx::{Source, load, to_proto};

fuzz_target!(|data: &[u8]| {
    if let Ok(model) = load(&Source::from_bytes(data.to_vec())) {
        let _ = to_proto(&model.graph, &model.info);
    }
});
