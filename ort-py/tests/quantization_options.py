"""Option sets for the tests of quantization, and where the results part from onnxruntime 1.31.1.

`OPTIONS` maps names to the keywords of `quantize_static` or `quantize_dynamic`; types are names.
`DIFFERENCES` lists the pairs of model and options whose quantized models differ, and why. The list
is exact: a pair that is not in it has to be equal, and one that is has to differ.
"""

from __future__ import annotations

from typing import Any

from quantization_models import MODELS

Keywords = dict[str, Any]


def _with(**options: Any) -> Keywords:
    """Keywords of extra options alone."""
    return {"extra_options": options}


_U8, _S8 = {"activation_type": "QUInt8"}, {"activation_type": "QUInt8", "weight_type": "QInt8"}
_U8U8 = _U8 | {"weight_type": "QUInt8"}
_OPERATORS = {"quant_format": "QOperator"}

QDQ: dict[str, Keywords] = {
    "defaults": {},
    "u8s8": _S8,
    "channels": _S8 | {"per_channel": True},
    "reduced": _U8U8 | {"per_channel": True, "reduce_range": True},
    "u16": {"activation_type": "QUInt16"},
    "s16": {"activation_type": "QInt16", "weight_type": "QInt16"} | _with(ActivationSymmetric=True),
    "s4": {"activation_type": "QUInt16", "weight_type": "QInt4", "per_channel": True},
    "asymmetric": _with(ActivationSymmetric=True, WeightSymmetric=False),
    "restricted": _U8 | _with(ActivationRestrictedAsymmetric=True),
    "forced": _with(ForceQuantizeNoInputCheck=True),
    "pairs": {"per_channel": True} | _with(AddQDQPairToWeight=True),
    "float_bias": _with(QuantizeBias=False),
    "float_outputs": _with(OpTypesToExcludeOutputQuantization=["Conv", "MatMul", "Relu"]),
    "dedicated": _with(DedicatedQDQPair=True),
    "axes": {"per_channel": True} | _with(QDQOpTypePerChannelSupportToAxis={"MatMul": 1}),
    "contrib": _with(UseQDQContribOps=True),
    "least_range": _with(MinimumRealRange=0.5),
    "kept": _with(QDQKeepRemovableActivations=True),
    "clipped_bias": _with(QDQDisableWeightAdjustForInt32Bias=True),
    "blocks": _with(BlockSize=2),
    "constant_right": _with(MatMulConstBOnly=True),
    "some": {"op_types_to_quantize": ["Conv", "MatMul", "Gemm"]},
}
OPERATORS: dict[str, Keywords] = {
    "ops_u8u8": _OPERATORS | _U8U8,
    "ops_channels": _OPERATORS | _S8 | {"per_channel": True},
    "ops_s8s8": _OPERATORS,
    "ops_forced": _OPERATORS | _S8 | _with(ForceQuantizeNoInputCheck=True),
}
DYNAMIC: dict[str, Keywords] = {
    "dynamic": {},
    "dynamic_channels": {"per_channel": True},
    "dynamic_u8": {"weight_type": "QUInt8", "reduce_range": True},
    "dynamic_any": _with(MatMulConstBOnly=False),
    "dynamic_bodies": _with(EnableSubgraph=True),
}
OPTIONS = QDQ | OPERATORS | DYNAMIC

_OPS = tuple(OPERATORS)
_CHANNELS = ("channels", "reduced", "pairs", "axes", "ops_channels")

#: Reason, models, and options: those of `OPTIONS` if empty.
_REASONS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    (
        "Scales of channels need opset 13: the original writes a file that does not load.",
        ("conv_12", "conv_11", "conv_10"),
        _CHANNELS,
    ),
    (
        "DynamicQuantizeLinear needs opset 11: the original computes ranges with five other nodes.",
        ("conv_10",),
        tuple(DYNAMIC),
    ),
    (
        "DynamicQuantizeLinear takes float32 only: the original writes a file that does not load.",
        ("conv_float16",),
        tuple(DYNAMIC),
    ),
    (
        "Scales of float16 are float16: the file of the original does not load.",
        ("conv_float16",),
        ("restricted",),
    ),
    (
        "Scales of 16-bit codes are less than float16 has: the original makes them 1.",
        ("conv_float16",),
        ("u16", "s16", "s4"),
    ),
    (
        "A bias that stays float needs no wider scale: the original destroys the weight.",
        ("residual",),
        ("float_bias",),
    ),
    (
        "Two nodes with one bias have other scales: the original gives it that of the first alone.",
        ("branches",),
        _OPS,
    ),
    (
        "A Gemm adds beta times its bias: the original sets beta to 1 and loses the factor.",
        ("gemm_beta",),
        tuple(name for name in OPTIONS if name not in ("float_bias", *DYNAMIC)),
    ),
    (
        "The original raises for a bias behind weights in blocks.",
        ("mlp", "gemm_row", "tied_gemm"),
        ("blocks",),
    ),
    (
        "The bias is a row: the original raises, or gives its scales to the axis of extent 1.",
        ("gemm_row",),
        (*_CHANNELS, "s4"),
    ),
    (
        "Groups have the same channels: the original raises.",
        ("deconv_groups",),
        ("channels", "reduced", "s4", "pairs", "axes"),
    ),
    (
        "The operator on codes knows no layout: the original drops it, and cannot calibrate.",
        ("lstm_batch_first",),
        (),
    ),
    (
        "One Gemm reads the weight, one its transpose: the original turns it for both.",
        ("tied_gemm",),
        ("ops_channels", *DYNAMIC),
    ),
    ("A body reads the value as floats: the original raises.", ("subgraphs",), _OPS),
    (
        "The original drops a ReLU whose input others read too, and with it its effect.",
        ("outputs",),
        _OPS,
    ),
    (
        "Channels of a product are those of its last axis, and a vector has none.",
        ("batched",),
        ("channels", "reduced", "s4", "pairs", "ops_channels", "dynamic_channels"),
    ),
    (
        "What is filled in is out of the input's range: the original clips it.",
        ("pads",),
        _OPS,
    ),
    (
        "Where stays float unless it is forced: the original raises.",
        ("where",),
        ("ops_u8u8", "ops_channels", "ops_s8s8"),
    ),
    (
        "QEmbedLayerNormalization is not in the engine; in static mode the original raises.",
        ("bert_operators",),
        (*_OPS, *DYNAMIC),
    ),
    (
        "Clip with a positive minimum does what no range says: the original drops it.",
        ("relus",),
        tuple(name for name in OPTIONS if name not in ("float_outputs", "some", "blocks")),
    ),
]

DIFFERENCES: dict[tuple[str, str], str] = {}
for _why, _models, _options in _REASONS:
    for _model in _models:
        for _name in _options or OPTIONS:
            assert (_model, _name) not in DIFFERENCES, (_model, _name)
            DIFFERENCES[_model, _name] = _why

_WITH_BLOCKS = {"mlp", "gemm_beta", "gemm_row", "embedding", "tied", "tied_gemm", "subgraphs"}
_WITH_BLOCKS |= {"movers", "lstm", "lstm_batch_first", "outputs", "weight_inputs", "loose"}
_WITH_BLOCKS |= {"constant_fill", "where", "bert_operators", "pools"}

#: Pairs that ours refuses: other weights than matrices have no blocks, QOperator no float16.
REFUSED = {(model, "blocks") for model in MODELS.keys() - _WITH_BLOCKS}
REFUSED |= {("conv_float16", options) for options in OPERATORS}
