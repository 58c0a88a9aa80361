"""Leading dimensions of products: a weight [1, .., K, N] gives its product at least its own rank.

`MatMulNBits` has a matrix of rank 2, so that the product loses these dimensions.
"""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from ._graph_weights import graphs
from .calibrate import inferred_skeleton
from .quant_utils import get_opset_version


def ranks_of(model: ModelProto) -> dict[str, int]:
    """Returns the ranks of values that shape inference knows."""
    ranks = {}
    for graph in graphs(inferred_skeleton(model).graph):
        for group in (graph.input, graph.value_info, graph.output):
            for info in group:
                kind = info.type.tensor_type
                if info.type.HasField("tensor_type") and kind.HasField("shape"):
                    ranks[info.name] = len(kind.shape.dim)
        ranks.update((weight.name, len(weight.dims)) for weight in graph.initializer)
    return ranks


def extend_output_rank(
    model: ModelProto,
    prefix: str,
    values: tuple[str, str, str],
    rank: int | None,
    weight_rank: int,
    graph: GraphProto,
) -> list[NodeProto]:
    """Returns nodes that add the leading dimensions of a weight to a product.

    Args:
        model: the model, for its opset.
        prefix: what names of nodes, values and constants begin with.
        values: the input of the product, the product with a matrix, and the result.
        rank: the rank of the input, None if it is not known.
        weight_rank: the rank of the weight.
        graph: the graph that gets the constants.
    """
    given, product, result = values

    def constant(name: str, numbers: list[int]) -> str:
        array = np.array(numbers, np.int64)
        graph.initializer.append(numpy_helper.from_array(array, f"{prefix}_{name}"))
        return f"{prefix}_{name}"

    def node(kind: str, inputs: list[str], name: str, output: str = "") -> NodeProto:
        return helper.make_node(kind, inputs, [output or f"{prefix}_{name}"], f"{prefix}_{name}_node")

    if rank is not None:
        # A vector takes part as a matrix of one row, which the product does not have.
        axes = list(range(weight_rank - max(rank, 2)))
        if get_opset_version(model) >= 13:
            inputs = [product, constant("axes", axes)]
            return [node("Unsqueeze", inputs, "unsqueeze", result)]
        name = f"{prefix}_unsqueeze_node"
        return [helper.make_node("Unsqueeze", [product], [result], name, axes=axes)]
    # Ones in front of all dimensions; one fewer if the input is a vector.
    ones = constant("ones", [1] * weight_rank)
    start, two = constant("start", [0]), constant("two", [2])
    more = constant("more", [weight_rank - 2])
    return [
        node("Shape", [given], "shape"),
        node("Shape", [f"{prefix}_shape"], "rank"),
        node("Min", [f"{prefix}_rank", two], "least"),
        node("Add", [f"{prefix}_least", more], "count"),
        node("Slice", [ones, start, f"{prefix}_count"], "front"),
        node("Expand", [product, f"{prefix}_front"], "expand", result),
    ]
