    quantize_dynamic("model.onnx", "model_q.onnx")
