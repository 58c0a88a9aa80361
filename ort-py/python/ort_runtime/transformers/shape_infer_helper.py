"""Shapes of a model's values for given sizes of its dimensions. Needs the package `onnx`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from ..tools.symbolic_shape_infer import SymbolicShapeInference


class SymbolicShapeInferenceHelper:
    """What `SymbolicShapeInference` finds out about a model.

    Example::

        shapes = SymbolicShapeInferenceHelper(model)
        shapes.infer({"batch": 1, "sequence": 128})
        shapes.get_edge_shape("hidden")
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        verbose: int = 0,
        int_max: int = 2**31 - 1,
        auto_merge: bool = True,
        guess_output_rank: bool = False,
    ) -> None:
        self.model_ = model
        self.known_vi_: dict[str, onnx.ValueInfoProto] = {}
        self._options = int_max, auto_merge, guess_output_rank, verbose
        self._sizes: Mapping[str, int] = {}
        self._inferred: onnx.ModelProto | None = None

    def infer(self, dynamic_axis_mapping: Mapping[str, int], max_runs: int = 200) -> bool:
        """Infers all shapes, with these sizes for names of dimensions. Returns whether it succeeds."""
        if self._inferred is None:
            try:
                self._inferred = SymbolicShapeInference.infer_shapes(self.model_, *self._options)
            except Exception:
                return False
        self._sizes = dict(dynamic_axis_mapping)
        graph = self._inferred.graph
        known = (*graph.value_info, *graph.input, *graph.output)
        self.known_vi_ = {value.name: value for value in known}
        return True

    def model_with_shapes(self) -> onnx.ModelProto:
        """Returns the model with the shapes of all values. Raises RuntimeError before `infer`."""
        if self._inferred is None:
            raise RuntimeError("call infer() first")
        return self._inferred

    def get_edge_shape(self, edge: str) -> list[Any] | None:
        """Returns the sizes of a value: numbers where they are known, else names; None if unknown."""
        for tensor in self.model_.graph.initializer:
            if tensor.name == edge:
                return list(tensor.dims)
        value = self.known_vi_.get(edge)
        if value is None or not value.type.tensor_type.HasField("shape"):
            return None
        return [self._size(dim) for dim in value.type.tensor_type.shape.dim]

    def _size(self, dim: Any) -> Any:
        if dim.HasField("dim_value"):
            return dim.dim_value
        return self._sizes.get(dim.dim_param, dim.dim_param or None)

    def compare_shape(self, edge: str, edge_other: str) -> bool:
        """Whether two values have one shape. Raises ValueError if one is not known."""
        shapes = self.get_edge_shape(edge), self.get_edge_shape(edge_other)
        if None in shapes:
            raise ValueError("At least one shape is missing for edges to compare")
        return shapes[0] == shapes[1]
