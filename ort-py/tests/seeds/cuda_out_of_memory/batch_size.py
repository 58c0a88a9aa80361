import onnxruntime as ort

# ... Load ONNX model ...

sess_options = ort.SessionOptions()
sess = ort.InferenceSession("model.onnx", sess_options)

input_name = sess.get_inputs()[0].name
output_name = sess.get_outputs()[0].name

# Reduced batch size
batch_size = 1  # Experiment with different values

input_data = np.random.rand(batch_size, 3, 224, 224).astype(np.float32) #Example input

outputs = sess.run([output_name], {input_name: input_data})
