"""`quantization`: arguments, configurations, overrides, caches, errors, and the arithmetic below.

Where both packages do the same, the tables run against the original too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import CPU, IS_ORIGINAL, PACKAGE, Gives, Raises, case, check, ort, table

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, numpy_helper  # noqa: E402
from quantization_models import MODELS, Net, samples  # noqa: E402
from test_quantization import Samples, facts  # noqa: E402

quantization = importlib.import_module(f"{PACKAGE}.quantization")
utils = importlib.import_module(f"{PACKAGE}.quantization.quant_utils")
overrides_module = importlib.import_module(f"{PACKAGE}.quantization.tensor_quant_overrides")
QuantType, QuantFormat = quantization.QuantType, quantization.QuantFormat
Method = quantization.CalibrationMethod
ours_only = pytest.mark.skipif(IS_ORIGINAL, reason="ours alone")
U8, S8, U16 = QuantType.QUInt8, QuantType.QInt8, QuantType.QUInt16


def original(name: str = "") -> Any:
    """A module of onnxruntime's."""
    return pytest.importorskip("onnxruntime.quantization" + name)


def static(tmp_path: Path, model: str = "mlp", package: Any = quantization, **keywords: Any) -> Any:
    """Quantizes a model and returns the result."""
    path = tmp_path / f"{package.__name__}.onnx"
    reader = Samples(MODELS[model]())
    package.quantize_static(MODELS[model](), str(path), reader, **keywords)
    return onnx.load(str(path))


# Names.


@table(
    "expected, action",
    [
        case("type", Gives([3, 2, 17, 5, 4, 22, 21]), lambda: [t.tensor_type for t in QuantType]),
        case("values", Gives(list(range(7))), lambda: [t.value for t in QuantType]),
        case("text", Gives("QInt4 QDQ"), lambda: f"{QuantType.QInt4} {QuantFormat.QDQ}"),
        case("from_string", Gives(True), lambda: QuantType.from_string("QInt16") is QuantType.QInt16),
        case("no_type", Raises("ValueError"), lambda: QuantType.from_string("QInt5")),
        case("no_format", Raises("ValueError"), lambda: QuantFormat.from_string("qdq")),
        case("suffix", Gives("X_QuantizeLinear_Output"), lambda: utils.add_quant_output_suffix("X")),
    ],
)
def test_names(expected: Any, action: Callable[[], Any]):
    check(expected, action)


#: Parts of the original that no program needs: a plot, and the inner states of its quantizer.
NOT_HERE = {"apply_plot"}


@ours_only
@pytest.mark.parametrize(
    "module",
    ["base_quantizer", "onnx_model", "onnx_quantizer", "quant_utils", "quantize", "registry"]
    + ["tensor_quant_overrides", "shape_inference"],
)
def test_public_names(module: str):
    theirs = original("." + module) if module != "quantize" else None
    theirs = theirs or importlib.import_module("onnxruntime.quantization.quantize")
    ours = importlib.import_module(f"{PACKAGE}.quantization.{module}")
    for name, value in vars(theirs).items():
        if not name.startswith("_") and getattr(value, "__module__", "") == theirs.__name__:
            assert hasattr(ours, name) or name in NOT_HERE, name


def test_exported_names():
    for name in vars(original()):
        if not name.startswith("_") and name not in ("operators", "fusions"):
            assert hasattr(quantization, name), name


@ours_only
@pytest.mark.parametrize("name", ["QDQRegistry", "QLinearOpsRegistry", "IntegerOpsRegistry"])
def test_registry(name: str):
    ours = importlib.import_module(f"{PACKAGE}.quantization.registry")
    assert getattr(ours, name).keys() == getattr(original(".registry"), name).keys()


# Arithmetic.

KINDS = [TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16]
KINDS += [TensorProto.INT4, TensorProto.UINT4]


@ours_only
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic(kind: int, dtype: Any):
    theirs, random = original(".quant_utils"), np.random.default_rng(kind)
    for _ in range(50):
        data = (random.standard_normal((5, 7)) * 10.0 ** random.integers(-3, 3)).astype(dtype)
        for symmetric in (False, True):
            for reduced in (False, True):
                arguments = (data, kind, symmetric, reduced, 0.3 if symmetric else None)
                gets, wants = utils.quantize_data(*arguments), theirs.quantize_data(*arguments)
                for got, want in zip(gets, wants):
                    assert got.dtype == want.dtype and got.tobytes() == want.tobytes()


@ours_only
@pytest.mark.parametrize("kind", [TensorProto.INT8, TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("block", [2, 4, 16])
def test_blocks(kind: int, symmetric: bool, axis: int, block: int):
    theirs = original(".quant_utils")
    data = np.random.default_rng(5).standard_normal((10, 6)).astype(np.float32)
    weight, made = numpy_helper.from_array(data, "w"), []
    for module in (utils, theirs):
        zero, scale = module.compute_scale_zp_blocked(data, kind, axis, block, symmetric)
        codes = module.quantize_onnx_initializer(weight, kind, zero, scale, axis, None, block)
        made.append((codes, zero.astype(np.int32).tolist(), scale.tobytes()))
    assert made[0] == made[1]


# Overrides.

F32 = np.float32
SCALE = {"scale": np.array(0.25, F32), "zero_point": np.array(3, np.uint8)}
ASYMMETRIC = {"axis": 0, "symmetric": False}
OVERRIDES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "types": ("branches", {"left": [{"quant_type": U16}], "gated": [{"quant_type": S8}]}, {}),
    "range": (
        "mlp",
        {"fc1": [{"rmin": F32(-3), "rmax": F32(2)}], "w0": [{"symmetric": False}]},
        {},
    ),
    "reduced": ("mlp", {"w1": [{"reduce_range": True}], "w2": [{"rmin": F32(-0.2)}]}, {}),
    "scale": ("mlp", {"fc1": [SCALE]}, {}),
    "channels": ("residual", {"w0": [{"axis": 0, "quant_type": S8}, {}, {}]}, {}),
    "channel_ranges": ("residual", {"w1": [ASYMMETRIC, {"rmin": F32(-1)}, {}]}, {}),
    "all_channels": ("residual", {"w0": [{"axis": 1}]}, {}),
    "wide_channels": ("residual", {"w0": [{"axis": 0, "quant_type": QuantType.QInt16}]}, {}),
    "convert": ("branches", {"left": [{"convert": {"quant_type": U16}}]}, {}),
    "convert_for_one": (
        "branches",
        {"left": [{"convert": {"quant_type": U16, "recv_nodes": {"node_gate"}}}]},
        {},
    ),
    "convert_input": (
        "branches",
        {"x": [{"quant_type": U16, "convert": {"quant_type": U8, "recv_nodes": {"node_left"}}}]},
        {},
    ),
    "convert_output": ("branches", {"right": [{"convert": {"quant_type": U16}}]}, {}),
    "convert_moved": (
        "movers",
        {"first": [{"convert": {"quant_type": U16, "recv_nodes": {"node_halves"}}}]},
        {},
    ),
    "operators": ("mlp", {"w1": [{"reduce_range": True}]}, {"quant_format": "QOperator"}),
}


@ours_only
@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides(name: str, tmp_path: Path):
    model, given, keywords = OVERRIDES[name]
    made, cache = [], tmp_path / "ranges.json"
    for package in (original(), quantization):

        def translated(value: Any, package: Any = package) -> Any:
            """Returns overrides with the package's own types."""
            if isinstance(value, dict):
                return {key: translated(entry) for key, entry in value.items()}
            if isinstance(value, list):
                return [translated(entry) for entry in value]
            return package.QuantType[value.name] if isinstance(value, QuantType) else value

        more: dict[str, Any] = {"calibration_cache_path": str(cache)}
        if "quant_format" in keywords:
            more["quant_format"] = package.QuantFormat[keywords["quant_format"]]
        made.append(
            static(
                tmp_path,
                model,
                package,
                activation_type=package.QuantType.QUInt8,
                extra_options={"TensorQuantOverrides": translated(given)},
                **more,
            )
        )
    assert facts(made[0]) == facts(made[1])


W, A = "w0", "fc1"
BOTH = {"scale": np.array(1.0, F32), "zero_point": np.array(1, np.uint8)}


@table(
    "given, valid",
    [
        case("empty", {A: [{}]}, True),
        case("both", {A: [BOTH]}, True),
        case("absent", {"zz": [{}]}, False),
        case("no_list", {A: {}}, False),
        case("no_dict", {A: [3]}, False),
        case("scale_alone", {A: [{"scale": np.array(1.0, F32)}]}, False),
        case("scale_and_symmetric", {A: [BOTH | {"symmetric": True}]}, False),
        case("scale_and_range", {A: [BOTH | {"rmin": 1}]}, False),
        case("reduced_activation", {A: [{"reduce_range": True}]}, False),
        case("axis_of_activation", {A: [{"axis": 0}]}, False),
        case("axis", {W: [{"axis": 0}]}, True),
        case("no_axis", {W: [{"axis": 5}]}, False),
        case("few_channels", {W: [{"axis": 0}, {}]}, False),
        case("types_of_channels", {W: [{"axis": 0}, {"quant_type": S8}, *[{}] * 6]}, False),
        case("converted_weight", {W: [{"convert": {"quant_type": U16}}]}, False),
        case("convert", {A: [{"convert": {"quant_type": U16}}]}, True),
        case("convert_to_nothing", {A: [{"convert": {}}]}, False),
        case("convert_to_same", {A: [{"convert": {"quant_type": U8}}]}, False),
    ],
)
def test_valid_overrides(given: dict[str, Any], valid: bool):
    model = MODELS["mlp"]()
    weights = {weight.name: weight for weight in model.graph.initializer}
    names = {name for node in model.graph.node for name in node.output}
    helper = overrides_module.TensorQuantOverridesHelper(given)
    held, why = helper.is_valid(weights, names, U8)
    assert (held, why is None) == (valid, valid), why


# Arguments.


def wrong(**keywords: Any) -> dict[str, Any]:
    return keywords


@table(
    "expected, keywords",
    [
        case("s8u8", Raises("ValueError", "data format"), wrong(activation_type=S8, weight_type=U8)),
        case(
            "float8_once",
            Raises("ValueError"),
            wrong(activation_type=QuantType.QFLOAT8E4M3FN),
        ),
        case(
            "float8_ranges",
            Raises("ValueError", "Only Distribution calibration"),
            wrong(activation_type=QuantType.QFLOAT8E4M3FN, weight_type=QuantType.QFLOAT8E4M3FN),
        ),
        case(
            "sixteen_bits",
            Raises("ValueError", "Only QuantFormat.QDQ supports 16-bit"),
            wrong(activation_type=U16, quant_format=QuantFormat.QOperator),
        ),
        case("no_samples", Raises("ValueError", "calibration_data_reader"), wrong(reader=None)),
        case(
            "tensor",
            Raises("ValueError", "zz.*not present"),
            wrong(extra_options={"TensorQuantOverrides": {"zz": [{}]}}),
        ),
        case(
            "smooth",
            Raises("RuntimeError"),
            wrong(extra_options={"SmoothQuant": True}),
        ),
        case(
            "strides",
            Raises("NotImplementedError"),
            wrong(extra_options={"CalibStridedMinMax": 2}),
        ),
    ],
)
def test_refused(expected: Any, keywords: dict[str, Any], tmp_path: Path):
    class Reader(quantization.CalibrationDataReader):
        feeds = iter(samples(MODELS["mlp"]()))

        def get_next(self) -> Any:
            return next(self.feeds, None)

    given = {"calibration_data_reader": keywords.pop("reader", Reader())} | keywords
    output = str(tmp_path / "out.onnx")
    check(expected, lambda: quantization.quantize_static(MODELS["mlp"](), output, **given))


@ours_only
@table(
    "action, text",
    [
        case("static", lambda m, p: quantization.quantize_static(m, p, 0, extra_options=BAD), ""),
        case("dynamic", lambda m, p: quantization.quantize_dynamic(m, p, extra_options=BAD), ""),
        case("config", lambda m, p: quantization.get_qdq_config(m, 0, extra_options=BAD), ""),
    ],
)
def test_misspelt_option(action: Callable[..., Any], text: str, tmp_path: Path):
    with pytest.raises(ValueError, match="'WeightSymetric'; did you mean 'WeightSymmetric'"):
        action(MODELS["mlp"](), str(tmp_path / "out.onnx"))


BAD = {"WeightSymetric": True}


@ours_only
def test_integer_weights(tmp_path: Path):
    with pytest.raises(ValueError, match="8-bit"):
        quantization.quantize_dynamic(
            MODELS["mlp"](), str(tmp_path / "out.onnx"), weight_type=QuantType.QInt16
        )


def test_config_of_other_type(tmp_path: Path):
    with pytest.raises(TypeError, match="StaticQuantConfig, DynamicQuantConfig, or WeightOnly"):
        quantization.quantize(MODELS["mlp"](), str(tmp_path / "out.onnx"), None)


# Configurations.


@pytest.mark.parametrize("dynamic", [False, True])
def test_configuration(dynamic: bool, tmp_path: Path):
    model, output = MODELS["mlp"](), str(tmp_path / "out.onnx")
    if dynamic:
        quantization.quantize(model, output, quantization.DynamicQuantConfig(per_channel=True))
        want = str(tmp_path / "want.onnx")
        quantization.quantize_dynamic(MODELS["mlp"](), want, per_channel=True)
    else:
        config = quantization.get_qdq_config(model, Samples(MODELS["mlp"]()), per_channel=True)
        quantization.quantize(model, output, config)
        static_types = {"activation_type": U8, "weight_type": S8, "per_channel": True}
        options = {"extra_options": config.extra_options}
        made = static(tmp_path, **static_types, **options)
        want = str(tmp_path / "want.onnx")
        onnx.save(made, want)
    assert facts(onnx.load(output)) == facts(onnx.load(want))


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "calibration": {"calibrate_args": {"symmetric": True, "percentile": 99.0}},
    "function": {"nodes_to_exclude": lambda model, node: node.op_type == "Relu"},
    "lists": {"nodes_to_exclude": ["a"], "op_types_to_quantize": ["Gemm", "Zz"]},
    "symmetric": {"weight_symmetric": True, "activation_symmetric": True, "min_real_range": 0.1},
    "options": {"extra_options": {"ForceQuantizeNoInputCheck": False, "DedicatedQDQPair": True}},
}


@ours_only
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_qdq_config(name: str):
    told = []
    for package in (quantization, original()):
        config = package.get_qdq_config(MODELS["mlp"](), None, **CONFIGURATIONS[name])
        about = {key: value for key, value in vars(config).items() if key != "extra_options"}
        about["op_types_to_quantize"] = sorted(config.op_types_to_quantize)
        told.append(({key: str(value) for key, value in about.items()}, config.extra_options))
    assert told[0] == told[1]


# Files.


@ours_only
def test_caches_are_exchanged(tmp_path: Path):
    cache, made = tmp_path / "ranges.json", []
    for package in (quantization, original()):
        made.append(static(tmp_path, package=package, calibration_cache_path=str(cache)))
    assert facts(made[0]) == facts(made[1])
    with pytest.raises(ValueError, match="was produced with"):
        static(tmp_path, calibration_cache_path=str(cache), calibrate_method=Method.Entropy)


@ours_only
@pytest.mark.parametrize("model", ["conv_13", "mlp", "transformer", "mobile"])
def test_own_ranges(model: str, tmp_path: Path):
    ours, theirs = static(tmp_path, model), static(tmp_path, model, original())
    left, right = (
        {w.name: numpy_helper.to_array(w) for w in made.graph.initializer} for made in (ours, theirs)
    )
    assert left.keys() == right.keys()
    for name, want in right.items():
        # Sums in another order move a range in its last bits.
        if name.endswith("_scale"):
            np.testing.assert_allclose(left[name], want, rtol=2e-6)


@ours_only
def test_nothing_beside(tmp_path: Path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    onnx.save(MODELS["mlp"](), str(source / "model.onnx"))
    quantization.quantize_static(
        source / "model.onnx", target / "a.onnx", Samples(MODELS["mlp"]())
    )
    quantization.quantize_dynamic(
        source / "model.onnx", target / "b.onnx", use_external_data_format=True
    )
    assert os.listdir(source) == ["model.onnx"]
    assert sorted(os.listdir(target))[:2] == ["a.onnx", "b.onnx"]
    onnx.checker.check_model(str(target / "b.onnx"))


@ours_only
def test_nodes_by_index(tmp_path: Path):
    model = MODELS["mlp"]()
    for node in model.graph.node:
        node.name = ""
    path = tmp_path / "out.onnx"
    quantization.quantize_static(
        model, path, Samples(MODELS["mlp"]()), nodes_to_exclude=["#0"]
    )
    weights = {weight.name for weight in onnx.load(str(path)).graph.initializer}
    assert "w0" in weights and "w1_quantized" in weights


@ours_only
def test_input_is_left_alone(tmp_path: Path):
    model = MODELS["gemm_beta"]()
    before = model.SerializeToString()
    quantization.quantize_static(model, tmp_path / "a.onnx", Samples(MODELS["gemm_beta"]()))
    quantization.quantize_dynamic(model, tmp_path / "b.onnx")
    assert model.SerializeToString() == before


FLOAT8 = {"activation_type": "QFLOAT8E4M3FN", "weight_type": "QFLOAT8E4M3FN"}


@ours_only
@pytest.mark.parametrize("per_channel", [False, True])
def test_float8(per_channel: bool, tmp_path: Path):
    made, cache = [], str(tmp_path / "ranges.json")
    for package in (original(), quantization):
        types = {key: package.QuantType[value] for key, value in FLOAT8.items()}
        method = package.CalibrationMethod.Distribution
        made.append(
            static(
                tmp_path,
                "conv_13",
                package,
                calibrate_method=method,
                per_channel=per_channel,
                calibration_cache_path=cache,
                **types,
            )
        )
    assert facts(made[0]) == facts(made[1])
    assert samples(MODELS["conv_13"]())


# Qualcomm's QNN.


def _qnn_model() -> Any:
    """Nodes for which QNN fixes types or scales."""
    net = Net("qnn")
    x, y = net.input("x", [1, 4, 8]), net.input("y", [1, 8, 4])
    first = net.node("MatMul", "first", x, net.weight("w", [8, 8]))
    made = [net.node("MatMul", "second", first, y)]
    made += [net.node(op, op.lower(), first) for op in ("Sigmoid", "Tanh", "Softmax")]
    norm = net.weight("norm.w", [8]), net.weight("norm.b", [8])
    made.append(net.node("LayerNormalization", "norm", first, *norm))
    added = net.node("Add", "added", first, net.constant("one", np.ones(8)))
    made += [net.node(op, op.lower(), added) for op in ("Relu", "Neg")]
    return net.model(*made, net.node("Cast", "half", added, to=TensorProto.FLOAT16))


WIDE, NARROW = {"quant_type": "QUInt16"}, {"quant_type": "QInt8"}
FIXED = {"scale": np.array(1.0, F32), "zero_point": np.array(0, np.uint16)}
QNN: dict[str, dict[str, Any]] = {
    "defaults": {},
    "u16": {"activation_type": "QUInt16"},
    "u16_channels": {"activation_type": "QUInt16", "weight_type": "QInt8", "per_channel": True},
    "s16": {"activation_type": "QInt16", "weight_type": "QInt8"},
    "s4": {"weight_type": "QInt4"},
    "lists": {"nodes_to_exclude": ["node_first"], "op_types_to_quantize": ["MatMul", "Cast"]},
    "symmetric": {"activation_symmetric": True, "weight_symmetric": True, "stride": 2},
    "kept": {"keep_removable_activations": True},
    "wide": {"init_overrides": {"first": [WIDE]}},
    "wide_alone": {"init_overrides": {"first": [WIDE]}, "add_qtype_converts": False},
    "wide_sigmoid": {"init_overrides": {"sigmoid": [WIDE]}},
    "wide_sum": {"init_overrides": {"added": [WIDE]}},
    "wide_ends": {"init_overrides": {"x": [WIDE], "softmax": [WIDE]}},
    "given": {"activation_type": "QUInt16", "init_overrides": {"sigmoid": [WIDE | FIXED]}},
    "weight": {"activation_type": "QUInt16", "init_overrides": {"one": [NARROW]}},
}


@ours_only
@pytest.mark.parametrize("name", QNN)
def test_qnn_config(name: str):
    told = []
    for package in (quantization, original()):
        qnn = importlib.import_module(f"{package.__name__}.execution_providers.qnn")

        def typed(value: Any, package: Any = package) -> Any:
            """Returns arguments with the package's own types."""
            if isinstance(value, dict):
                return {key: typed(entry) for key, entry in value.items()}
            if isinstance(value, list):
                return [typed(entry) for entry in value]
            known = isinstance(value, str) and value in package.QuantType.__members__
            return package.QuantType[value] if known else value

        def plain(value: Any) -> Any:
            """Returns what is left of a value without its package."""
            if isinstance(value, dict):
                return {key: plain(entry) for key, entry in sorted(value.items())}
            if isinstance(value, set | list):
                return sorted((plain(entry) for entry in value), key=str)
            return repr(value) if isinstance(value, np.ndarray) else str(value)

        told.append(plain(vars(qnn.get_qnn_qdq_config(_qnn_model(), None, **typed(QNN[name])))))
    assert told[0] == told[1]


@ours_only
def test_qnn_model(tmp_path: Path):
    qnn = importlib.import_module(f"{PACKAGE}.quantization.execution_providers.qnn")
    model, path = _qnn_model(), str(tmp_path / "out.onnx")
    overrides = {"first": [{"quant_type": U16}]}
    config = qnn.get_qnn_qdq_config(model, Samples(model), init_overrides=overrides)
    quantization.quantize(model, path, config)
    feed = samples(model)[0]
    wants = ort.InferenceSession(model.SerializeToString(), providers=[CPU]).run(None, feed)
    gets = ort.InferenceSession(path, providers=[CPU]).run(None, feed)
    for want, got in zip(wants, gets):
        lost = np.linalg.norm((want - got).astype(np.float64))
        assert lost <= 0.05 * np.linalg.norm(want.astype(np.float64))


class Strided(Samples):
    """A reader whose samples can be chosen."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.all = list(self.feeds)

    def __len__(self) -> int:
        return len(self.all)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.feeds = iter(self.all[start_index:end_index])


@ours_only
@pytest.mark.parametrize("stride", [1, 3])
def test_strides(stride: int, tmp_path: Path):
    made = []
    for package in (quantization, original()):
        path, model = str(tmp_path / "out.onnx"), MODELS["mlp"]()
        options = {"CalibStridedMinMax": stride}
        package.quantize_static(model, path, Strided(MODELS["mlp"]()), extra_options=options)
        made.append({w.name: numpy_helper.to_array(w) for w in onnx.load(path).graph.initializer})
    assert made[0].keys() == made[1].keys()
    for name, want in made[1].items():
        if name.endswith("_scale"):
            np.testing.assert_allclose(made[0][name], want, rtol=2e-6)


@ours_only
def test_weights_alone(tmp_path: Path):
    module = importlib.import_module(f"{PACKAGE}.quantization.matmul_nbits_quantizer")
    config = module.DefaultWeightOnlyQuantConfig(block_size=16)
    path = str(tmp_path / "out.onnx")
    quantization.quantize(MODELS["transformer"](), path, config)
    types = [node.op_type for node in onnx.load(path).graph.node]
    assert types.count("MatMulNBits") == 6
