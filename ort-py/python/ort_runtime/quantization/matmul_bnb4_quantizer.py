"""Weights of `MatMul` in the types FP4 and NF4 of bitsandbytes, for `MatMulBnb4`.

Needs the package `onnx`. `python -m ort_runtime.quantization.matmul_bnb4_quantizer --input_model
in.onnx --output_model out.onnx`
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from ..capi import _pybind_state as native
from ._graph_weights import FLOATS, bodies, constant, remove_unread
from ._weight_only_configs import require
from .onnx_model import ONNXModel

logger = logging.getLogger(__name__)

_MS_DOMAIN = "com.microsoft"


class MatMulBnb4Quantizer:
    """Quantizes the constant matrices of products in place.

    Args:
        model: the model.
        quant_type: `MatMulBnb4Quantizer.FP4` or `NF4`.
        block_size: the elements that share a scale; bitsandbytes has 64.
        nodes_to_exclude: names of nodes that stay as they are.

    Raises:
        AssertionError: another type.

    Example:
        >>> quantizer = MatMulBnb4Quantizer(onnx.load("model.onnx"), MatMulBnb4Quantizer.NF4, 64)
        >>> quantizer.process()
        >>> quantizer.model.save_model_to_file("model_nf4.onnx", use_external_data_format=True)
    """

    FP4 = 0
    NF4 = 1

    def __init__(
        self,
        model: ModelProto,
        quant_type: int,
        block_size: int,
        nodes_to_exclude: Iterable[str] | None = None,
    ) -> None:
        kinds = (self.FP4, self.NF4)
        require(quant_type in kinds, f"quant_type: {quant_type!r}, expected 0 (FP4) or 1 (NF4)")
        self.model = ONNXModel(model)
        self.quant_type = quant_type
        self.block_size = block_size
        self.nodes_to_exclude = set(nodes_to_exclude or ())
        self._written: dict[tuple[int, str], tuple[str, str]] = {}
        # Alive, so that none of them gets the identity of another.
        self._graphs: list[GraphProto] = []

    def bnb4_block_quant(self, fpweight: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns codes and the largest magnitudes of blocks for a matrix [K, N]."""
        weight = np.ascontiguousarray(fpweight)
        k, n = weight.shape
        codes = np.zeros((n * k + 1) // 2, np.uint8)
        largest = np.zeros(-(-n * k // self.block_size), weight.dtype)
        # The operator has the columns one after the other.
        columns = np.ascontiguousarray(weight.T)
        native.quantize_matmul_bnb4(
            codes, columns, largest, self.block_size, self.quant_type, n, k
        )
        return codes, largest

    def process(self) -> None:
        """Quantizes the weights; `model` has the result."""
        if all(opset.domain != _MS_DOMAIN for opset in self.model.opset_import()):
            self.model.set_opset_import(_MS_DOMAIN, 1)
        self._process_graph([self.model.graph()])
        self.model.clean_initializers()

    def _process_graph(self, stack: list[GraphProto]) -> None:
        graph = stack[-1]
        self._graphs.append(graph)
        nodes: list[NodeProto] = []
        for node in graph.node:
            for body in bodies(node):
                self._process_graph([*stack, body])
                remove_unread(body)
            nodes.append(self._replaced(node, stack) or node)
        del graph.node[:]
        graph.node.extend(nodes)

    def _replaced(self, node: NodeProto, stack: list[GraphProto]) -> NodeProto | None:
        """Returns the node that stands for a product, None if that stays as it is."""
        if node.op_type != "MatMul" or node.name in self.nodes_to_exclude:
            return None
        found = constant(node.input[1], stack)
        if found is None or found.tensor.data_type not in FLOATS or len(found.tensor.dims) != 2:
            return None
        tensor = found.tensor
        key = id(found.graph), tensor.name
        names = self._written.get(key)
        if names is None:
            names = f"{tensor.name}_Bnb4", f"{tensor.name}_absmax"
            parts = self.bnb4_block_quant(numpy_helper.to_array(tensor))
            made = (numpy_helper.from_array(part, name) for part, name in zip(parts, names))
            found.graph.initializer.extend(made)
            self._written[key] = names
        return helper.make_node(
            "MatMulBnb4",
            [node.input[0], *names],
            node.output,
            f"{node.name}_Bnb4" if node.name else "",
            domain=_MS_DOMAIN,
            K=tensor.dims[0],
            N=tensor.dims[1],
            block_size=self.block_size,
            quant_type=self.quant_type,
        )


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, that of the process if None."""
    parser = argparse.ArgumentParser(
        "matmul_bnb4_quantizer",
        description="Quantizes the constant matrices of MatMul to FP4 or NF4 for MatMulBnb4.",
    )
    parser.add_argument("--input_model", required=True, help="model to read")
    parser.add_argument("--output_model", required=True, help="model to write")
    parser.add_argument(
        "--quant_type", type=int, choices=[0, 1], default=1, help="0 FP4, 1 NF4, default 1"
    )
    parser.add_argument(
        "--block_size", type=int, default=64, help="elements that share a scale, default 64"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="logs more")
    parser.add_argument("--nodes_to_exclude", nargs="+", default=[], help="names of nodes to leave")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    quantizer = MatMulBnb4Quantizer(
        onnx.load(args.input_model), args.quant_type, args.block_size, args.nodes_to_exclude
    )
    quantizer.process()
    quantizer.model.save_model_to_file(args.output_model, True)


if __name__ == "__main__":
    main()
