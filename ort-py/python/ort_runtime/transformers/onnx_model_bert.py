"""`BertOnnxModel`: a model of transformer blocks, and what of it is fused."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import onnx

from .fusion_options import FusionOptions
from .onnx_model import OnnxModel

logger = logging.getLogger(__name__)

#: Fused operators, with what ONNX calls them if it has them by now.
_FUSED = (
    "EmbedLayerNormalization",
    "Attention",
    "MultiHeadAttention",
    "Gelu",
    "FastGelu",
    "BiasGelu",
    "GemmFastGelu",
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "RotaryEmbedding",
    "QOrderedAttention",
    "QOrderedGelu",
    "QOrderedLayerNormalization",
    "QOrderedMatMul",
)


class BertOnnxModel(OnnxModel):
    """A model of transformer blocks. `optimize_model` returns it with its fusions made."""

    def __init__(self, model: onnx.ModelProto, num_heads: int = 0, hidden_size: int = 0) -> None:
        if (num_heads == 0) != (hidden_size == 0) or (num_heads and hidden_size % num_heads):
            raise ValueError(
                "num_heads and hidden_size are both 0, or hidden_size is a multiple of num_heads: "
                f"got {num_heads} and {hidden_size}"
            )
        super().__init__(model)
        self.num_heads, self.hidden_size = num_heads, hidden_size

    def optimize(
        self, options: FusionOptions | None = None, add_dynamic_axes: bool = False
    ) -> None:
        """Makes the fusions that the options allow, and names sizes if asked."""
        from .optimizer import fuse

        self.initialize(fuse(self.model, options))
        if add_dynamic_axes:
            self.use_dynamic_axes()

    def use_dynamic_axes(
        self, dynamic_batch_dim: str = "batch_size", dynamic_seq_len: str = "max_seq_len"
    ) -> None:
        """Names the first size of int inputs and of outputs, and the second size of such inputs."""
        integers = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
        for value in self.graph().input:
            dims = value.type.tensor_type.shape.dim
            if value.type.tensor_type.elem_type in integers and len(dims) == 2:
                dims[0].dim_param, dims[1].dim_param = dynamic_batch_dim, dynamic_seq_len
        for value in self.graph().output:
            dims = value.type.tensor_type.shape.dim
            if dims:
                dims[0].dim_param = dynamic_batch_dim

    def change_graph_inputs_to_int32(self) -> None:
        """Makes the int64 inputs of the model int32."""
        for value in self.graph().input:
            if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
                self.change_graph_input_type(value, onnx.TensorProto.INT32)

    def get_fused_operator_statistics(self) -> dict[str, int]:
        """Returns how many nodes each fused operator has."""
        return {op: len(self.get_nodes_by_op_type(op)) for op in _FUSED}

    def is_fully_optimized(self, fused_op_count: Mapping[str, int] | None = None) -> bool:
        """Whether attention, Gelu and layer normalization were found and fused."""
        counts = self.get_fused_operator_statistics() if fused_op_count is None else fused_op_count

        def total(*operators: str) -> int:
            return sum(counts.get(operator, 0) for operator in operators)

        found = {
            "Attention (or MultiHeadAttention)": total(
                "Attention", "MultiHeadAttention", "QOrderedAttention"
            ),
            "Gelu": total("Gelu", "BiasGelu", "FastGelu", "GemmFastGelu", "QOrderedGelu"),
            "Layer normalization": total(
                "LayerNormalization",
                "SkipLayerNormalization",
                "SimplifiedLayerNormalization",
                "SkipSimplifiedLayerNormalization",
                "EmbedLayerNormalization",
            ),
        }
        for what, count in found.items():
            if not count:
                logger.debug("%s not fused", what)
        return all(found.values())
