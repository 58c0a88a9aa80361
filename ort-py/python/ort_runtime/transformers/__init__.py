"""What packages for transformer models take from `onnxruntime.transformers`."""
