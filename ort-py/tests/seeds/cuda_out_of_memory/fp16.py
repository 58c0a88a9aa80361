import onnxruntime as ort
import numpy as np

# ... Load ONNX model ...

sess_options = ort.SessionOptions()
sess_options.enable_fp16 = True #Enable FP16 precision

sess = ort.InferenceSession("model.onnx", sess_options)

# ... Rest of the inference code remains similar ...
