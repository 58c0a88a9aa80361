"""Writes ort-generate/tests/data/llama_cache8 and llama_cache4: the folder `llama` with quantized KV caches.

    python xtask/python/quantized_cache_reference.py

Needs onnx and onnxruntime. The scales come from the keys and values of the float model; the tokens are those that
ONNX Runtime generates from the quantized one.
"""

import json
import pathlib
import shutil

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

DATA = pathlib.Path(__file__).resolve().parents[2] / "ort-generate" / "tests" / "data"
END, LAYERS, HEADS, SIZE = 1, 2, 1, 16
KINDS = ("key", "value")


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def caches(dtype, width):
    return {f"past_key_values.{layer}.{kind}": numpy.zeros((1, HEADS, 0, width), dtype)
            for layer in range(LAYERS) for kind in KINDS}


def step(run, tokens, past, length):
    names = [output.name for output in run.get_outputs()]
    mask = numpy.ones((1, length + len(tokens)), numpy.int64)
    results = run.run(None, {"input_ids": numpy.array([tokens], numpy.int64), "attention_mask": mask, **past})
    values = dict(zip(names, results, strict=True))
    present = {name.replace("present", "past_key_values"): value for name, value in values.items() if name != "logits"}
    return values["logits"][0, -1], present


def generate(run, prompt, count, past):
    tokens, length, new = [], 0, list(prompt)
    while len(tokens) < count:
        logits, past = step(run, new, past, length)
        length += len(new)
        new = [int(logits.argmax())]
        tokens += new
        if new == [END]:
            break
    return tokens, past


def quantize(model, ranges, bits):
    graph = model.graph
    most = 2 ** (bits - 1) - 1
    for node in graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        layer = next(name for name in node.input if name.startswith("past_key_values.")).split(".")[1]
        inputs = list(node.input) + [""] * (14 - len(node.input))
        for place, kind in enumerate(KINDS):
            name = f"layer{layer}.{kind}_scale"
            scale = numpy.array([ranges[f"past_key_values.{layer}.{kind}"] / most], numpy.float32)
            graph.initializer.append(numpy_helper.from_array(scale, name))
            inputs[12 + place] = name
        del node.input[:]
        node.input.extend(inputs)
        node.attribute.extend([
            helper.make_attribute("k_quant_type", "PER_TENSOR"),
            helper.make_attribute("v_quant_type", "PER_TENSOR"),
            helper.make_attribute("kv_cache_bit_width", bits),
        ])
    for value in [*graph.input, *graph.output]:
        if ".key" in value.name or ".value" in value.name:
            value.type.tensor_type.elem_type = TensorProto.INT8 if bits == 8 else TensorProto.UINT8
            if bits == 4:
                last = value.type.tensor_type.shape.dim[3]
                last.Clear()
                last.dim_value = SIZE // 2
    return model


def main():
    cases = json.loads((DATA / "llama" / "generated.json").read_text())
    run = session(DATA / "llama" / "model.onnx")
    ranges = {}
    for case in cases:
        tokens, past = generate(run, case["prompt"], len(case["tokens"]), caches(numpy.float32, SIZE))
        assert tokens == case["tokens"], (tokens, case["tokens"])
        for name, values in past.items():
            ranges[name] = max(ranges.get(name, 0.0), float(numpy.abs(values).max()))
    for bits, dtype, width in ((8, numpy.int8, SIZE), (4, numpy.uint8, SIZE // 2)):
        folder = DATA / f"llama_cache{bits}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in ("genai_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DATA / "llama" / name, folder)
        onnx.save(quantize(onnx.load(DATA / "llama" / "model.onnx"), ranges, bits), folder / "model.onnx")
        quantized = session(folder / "model.onnx")
        answers = []
        for case in cases:
            tokens, _ = generate(quantized, case["prompt"], len(case["tokens"]), caches(dtype, width))
            same = sum(one == other for one, other in zip(tokens, case["tokens"], strict=False))
            print(bits, "bits:", same, "of", len(tokens), "tokens are those of the float cache")
            answers.append({"prompt": case["prompt"], "tokens": tokens})
        (folder / "generated.json").write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
