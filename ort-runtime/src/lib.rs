//! An ONNX runtime that knows its memory before it runs.
