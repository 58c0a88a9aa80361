"""Shape rules of operators that the package `onnx` does not know: those of `com.microsoft`.

A rule gets a node and a way to look up values. It returns an element type and dimensions for each
output, None for an output whose shape it cannot tell. Dimensions are numbers, names, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import onnx

Dim = int | str | None
Known = tuple[int, list[Dim]] | None

#: ONNX's numbers of element types.
_FLOAT, _UINT8, _INT32 = 1, 2, 6


class Values(Protocol):
    """What is known of a graph's values."""

    def known(self, name: str) -> Known:
        """Returns element type and dimensions of a value, None if its shape is unknown."""

    def type_proto(self, name: str) -> onnx.TypeProto | None:
        """Returns the type of a value, None if it is unknown."""


Rule = Callable[["onnx.NodeProto", Values], list[Known]]


def _attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Returns an attribute's value."""
    import onnx

    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)


def _input(node: onnx.NodeProto, values: Values, position: int) -> Known:
    """Returns what is known of an input; None if it is left out."""
    names = node.input
    present = position < len(names) and names[position]
    return values.known(names[position]) if present else None


def _like(*outputs: int) -> Rule:
    """Returns a rule for operators whose `outputs` have type and shape of the first input."""

    def rule(node: onnx.NodeProto, values: Values) -> list[Known]:
        first = _input(node, values, 0)
        return [first if i in outputs else None for i in range(len(node.output))]

    return rule


def broadcast(left: list[Dim], right: list[Dim]) -> list[Dim]:
    """Returns the dimensions of an elementwise result; None where names differ."""
    rank = max(len(left), len(right))
    pairs = zip([1] * (rank - len(left)) + left, [1] * (rank - len(right)) + right, strict=True)
    dims: list[Dim] = []
    for a, b in pairs:
        # A number above 1 decides: the other one is the same or 1.
        numbers = [dim for dim in (a, b) if isinstance(dim, int) and dim != 1]
        same = a if a == b else None
        dims.append(b if a == 1 else a if b == 1 else numbers[0] if numbers else same)
    return dims


def _product(left: list[Dim], right: list[Dim]) -> list[Dim] | None:
    """Returns the dimensions of a matrix product, None for vectors."""
    if len(left) < 2 or len(right) < 2:
        return None
    return [*broadcast(left[:-2], right[:-2]), left[-2], right[-1]]


def _matmul(float_output: bool) -> Rule:
    """Returns a rule for products of inputs 0 and 1, with FusedMatMul's transpositions."""

    def rule(node: onnx.NodeProto, values: Values) -> list[Known]:
        sides = [_input(node, values, 0), _input(node, values, 1)]
        if None in sides or _attribute(node, "transBatchA") or _attribute(node, "transBatchB"):
            return [None]
        dims = [list(side[1]) for side in sides]
        for side, name in zip(dims, ("transA", "transB"), strict=True):
            if _attribute(node, name, 0) and len(side) >= 2:
                side[-2:] = [side[-1], side[-2]]
        found = _product(*dims)
        return [found and (_FLOAT if float_output else sides[0][0], found)]

    return rule


def _packed_weight(node: onnx.NodeProto, values: Values) -> list[Known]:
    """Products with a weight whose columns are the attribute N."""
    first, columns = _input(node, values, 0), _attribute(node, "N")
    return [first and columns and (first[0], [*first[1][:-1], columns])]


def _quantized_elementwise(node: onnx.NodeProto, values: Values) -> list[Known]:
    """QLinearAdd and QLinearMul: a, its scale and zero point, b, ..."""
    left, right = _input(node, values, 0), _input(node, values, 3)
    return [left and right and (left[0], broadcast(left[1], right[1]))]


def _quantize(node: onnx.NodeProto, values: Values) -> list[Known]:
    first, zero_point = _input(node, values, 0), _input(node, values, 2)
    return [first and (zero_point[0] if zero_point else _UINT8, first[1])]


def _dequantize(node: onnx.NodeProto, values: Values) -> list[Known]:
    first, scale = _input(node, values, 0), _input(node, values, 1)
    return [first and (scale[0] if scale else _FLOAT, first[1])]


def _standard(op_type: str, *extensions: str) -> Rule:
    """Returns a rule for a form of a standard operator with more attributes or inputs."""

    def rule(node: onnx.NodeProto, values: Values) -> list[Known]:
        import onnx

        schema = onnx.defs.get_schema(op_type)
        limit = schema.max_input
        plain = onnx.helper.make_node(op_type, node.input[:limit], node.output[:1])
        plain.attribute.extend(a for a in node.attribute if a.name not in extensions)
        types = {name: values.type_proto(name) for name in plain.input if name}
        if None in types.values():
            return [None]
        found = onnx.shape_inference.infer_node_outputs(schema, plain, types)
        proto = found.get(node.output[0])
        return [proto and from_type_proto(proto)]

    return rule


def _attention(node: onnx.NodeProto, values: Values) -> list[Known]:
    """Attention and QAttention: input [batch, seq, hidden], weight [hidden, q + k + v]."""
    first, weight = _input(node, values, 0), _input(node, values, 1)
    if not first or not weight or len(first[1]) != 3:
        return [None]
    sizes = _attribute(node, "qkv_hidden_sizes")
    columns = weight[1][-1]
    hidden = sizes[2] if sizes else columns // 3 if isinstance(columns, int) else None
    kind = _FLOAT if node.op_type == "QAttention" else first[0]
    return [(kind, [*first[1][:2], hidden])]


def _multi_head_attention(node: onnx.NodeProto, values: Values) -> list[Known]:
    """Query [batch, seq, hidden] and value [batch, seq, hidden] or [batch, heads, seq, head]."""
    query, value = _input(node, values, 0), _input(node, values, 2)
    if not query or len(query[1]) < 3:
        return [None]
    hidden = None
    if len(query[1]) == 5:
        # Packed: [batch, seq, heads, 3, head].
        hidden = _multiply(query[1][2], query[1][4])
    elif value and len(value[1]) == 3:
        hidden = value[1][2]
    elif value and len(value[1]) == 4:
        hidden = _multiply(value[1][1], value[1][3])
    elif not value:
        # Packed keys and values: the value's head size is the query's.
        hidden = query[1][2]
    return [(query[0], [*query[1][:2], hidden])]


def _multiply(left: Dim, right: Dim) -> Dim:
    """Returns the product of two numbers, None if one is unknown."""
    return left * right if isinstance(left, int) and isinstance(right, int) else None


def _group_query_attention(node: onnx.NodeProto, values: Values) -> list[Known]:
    """Query [batch, seq, heads * head], which has keys and values too if there is no input 1."""
    query, past = _input(node, values, 0), _input(node, values, 3)
    if not query or len(query[1]) != 3:
        return [None]
    heads, shared = _attribute(node, "num_heads", 1), _attribute(node, "kv_num_heads", 1)
    hidden = query[1][2]
    if not node.input[1]:
        size = hidden // (heads + 2 * shared) if isinstance(hidden, int) else None
        hidden = _multiply(heads, size)
    else:
        size = hidden // heads if isinstance(hidden, int) else None
    present = (past[0] if past else query[0], [query[1][0], shared, None, size])
    return [(query[0], [*query[1][:2], hidden]), present, present]


def _embed_layer_norm(node: onnx.NodeProto, values: Values) -> list[Known]:
    """Ids [batch, seq] and the word table [vocabulary, hidden]."""
    ids, table = _input(node, values, 0), _input(node, values, 2)
    if not ids or not table:
        return [None]
    rows = (table[0], [*ids[1], table[1][1]])
    return [rows, (_INT32, ids[1][:1]), rows]


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        [
            "BiasAdd",
            "BiasDropout",
            "BiasGelu",
            "BiasSoftmax",
            "FastGelu",
            "Gelu",
            "GroupNorm",
            "Inverse",
            "QLinearLeakyRelu",
            "QLinearSigmoid",
            "QLinearSoftmax",
            "QuickGelu",
            "RotaryEmbedding",
            "SimplifiedLayerNormalization",
            "Trilu",
        ],
        _like(0),
    ),
    "Attention": _attention,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeMatMul": _matmul(float_output=True),
    "EmbedLayerNormalization": _embed_layer_norm,
    "FusedConv": _standard("Conv", "activation", "activation_params"),
    "FusedGemm": _standard(
        "Gemm", "activation", "activation_alpha", "activation_beta", "activation_gamma"
    ),
    "FusedMatMul": _matmul(float_output=False),
    "GridSample": _standard("GridSample"),
    "GroupQueryAttention": _group_query_attention,
    "MatMulBnb4": _packed_weight,
    "MatMulIntegerToFloat": _matmul(float_output=True),
    "MatMulNBits": _packed_weight,
    "MultiHeadAttention": _multi_head_attention,
    "QAttention": _attention,
    "QLinearAdd": _quantized_elementwise,
    "QLinearMul": _quantized_elementwise,
    "QuantizeLinear": _quantize,
    # The sum of input and skip is output 3.
    "SkipLayerNormalization": _like(0, 3),
    "SkipSimplifiedLayerNormalization": _like(0, 3),
}


def from_type_proto(proto: onnx.TypeProto) -> Known:
    """Returns element type and dimensions of a tensor type, None if it has no shape."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    dims: list[Dim] = [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in proto.tensor_type.shape.dim
    ]
    return proto.tensor_type.elem_type, dims
