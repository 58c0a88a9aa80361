"""Command-line tools that change, check and time models: `python -m ort_runtime.tools.<name>`.

- `make_dynamic_shape_fixed`: gives symbolic dimensions or an input's shape numbers.
- `update_onnx_opset`: converts a model to a later opset.
- `optimize_onnx_model`: saves what the session's rewrites make of a model.
- `remove_initializer_from_input`: takes weights out of the inputs, so they can be folded.
- `symbolic_shape_infer`: writes the shapes of all values into a model.
- `onnxruntime_test`: times a model on random data.
- `convert_onnx_models_to_ort`: the ORT format is only read here; says what to do instead.

`onnx_model_utils` has the functions behind them. The tools need the package `onnx`.
"""
