"""Symbolic shape inference: writes the shapes of all values into a model.

Dimensions keep the names that the inputs give them; sizes that are no input's get the names
`unk__0`, `unk__1`, ... Standard operators are inferred by the package `onnx`, contrib operators by
the rules of `_contrib_shapes`, by turns until nothing is added. With the package `sympy`, sizes
that nodes compute are expressions such as `2*batch`.

`python -m ort_runtime.tools.symbolic_shape_infer --input in.onnx --output out.onnx --auto_merge`
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

from ._contrib_shapes import RULES, Dim, Known, from_type_proto
from ._symbolic_values import SymbolicValues

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger(__name__)

#: Initializers above this size are weights: inference needs their types alone.
_SMALL_BYTES = 1024

#: Operators whose inputs are broadcast to one shape.
_ELEMENTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "Where", "PRelu"),
        *("And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BiasGelu"),
    }
)

#: Operators whose output has the element type of their first input.
_SAME_TYPE = frozenset({"Concat", "Expand", "Range", "Reshape", "Resize", "Slice", "Tile"})

#: Operators whose first two inputs have one shape.
_RESIDUAL = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy without the data of weights, so that models of any size can be inferred."""
    import onnx

    def without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if tensor.ByteSize() <= _SMALL_BYTES and tensor.data_location != tensor.EXTERNAL:
            return tensor
        return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)

    graph = model.graph
    opsets = list(model.opset_import)
    # Old exporters forget to import the domain of contrib operators.
    if "com.microsoft" not in {opset.domain for opset in opsets}:
        opsets.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return onnx.ModelProto(
        ir_version=model.ir_version,
        opset_import=opsets,
        functions=model.functions,
        graph=onnx.GraphProto(
            name=graph.name,
            node=graph.node,
            input=graph.input,
            output=[_without_names(output) for output in graph.output],
            value_info=graph.value_info,
            initializer=[without_data(tensor) for tensor in graph.initializer],
            sparse_initializer=graph.sparse_initializer,
        ),
    )


def _without_names(output: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Returns an output without the names of its dimensions: those that its node has are better."""
    import onnx

    result = onnx.ValueInfoProto()
    result.CopyFrom(output)
    for dim in result.type.tensor_type.shape.dim if output.type.HasField("tensor_type") else ():
        if dim.HasField("dim_param"):
            dim.Clear()
    return result


def _check_branches(graph: onnx.GraphProto) -> None:
    """Raises ValueError for an If whose branches give tensors of different element types."""
    import onnx

    for node in graph.node:
        branches = {a.name: a.g for a in node.attribute if a.type == a.GRAPH}
        for branch in branches.values():
            _check_branches(branch)
        if node.op_type != "If" or len(branches) != 2:
            continue
        then_branch, else_branch = branches["then_branch"], branches["else_branch"]
        for outputs in zip(then_branch.output, else_branch.output, strict=False):
            kinds = [output.type.tensor_type.elem_type for output in outputs]
            if 0 not in kinds and kinds[0] != kinds[1]:
                names = " and ".join(onnx.TensorProto.DataType.Name(kind) for kind in kinds)
                raise ValueError(f"The branches of node {node.name} give {names}")


class _Inference:
    """The state of one inference: a skeleton of the model that gains shapes turn by turn."""

    def __init__(self, model: onnx.ModelProto, auto_merge: bool, guess_output_rank: bool) -> None:
        self._auto_merge = auto_merge
        self._guess_output_rank = guess_output_rank
        self.model = _skeleton(model)
        self._types: dict[str, onnx.TypeProto] = {}
        self._symbols = 0

    def run(self) -> None:
        """Infers until a turn adds no shape and merges no symbol."""
        import onnx

        while True:
            self.model = onnx.shape_inference.infer_shapes(self.model, data_prop=True)
            self._read_types()
            added = self._apply_rules()
            added = self._apply_expressions() or added
            if not (self._auto_merge and self._merge()) and not added:
                break
        for dim in self._found_dims():
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = self._symbol()

    def known(self, name: str) -> Known:
        """Returns element type and dimensions of a value, None if its shape is unknown."""
        proto = self._types.get(name)
        return from_type_proto(proto) if proto is not None else None

    def type_proto(self, name: str) -> onnx.TypeProto | None:
        """Returns the type of a value, None if it is unknown."""
        return self._types.get(name)

    def unknown(self) -> list[str]:
        """Returns the values that have no shape, in the order of the nodes."""
        names = (name for node in self.model.graph.node for name in node.output if name)
        return [name for name in names if self._is_unknown(name)]

    def _is_unknown(self, name: str) -> bool:
        """Returns whether a value is a tensor without shape, or has no type at all."""
        proto = self._types.get(name)
        kind = proto.WhichOneof("value") if proto is not None else None
        return kind in (None, "tensor_type") and self.known(name) is None

    def _read_types(self) -> None:
        """Collects the types of all values of the main graph."""
        import onnx

        graph = self.model.graph
        self._types = {
            tensor.name: onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            for tensor in graph.initializer
        }
        for values in (graph.value_info, graph.output, graph.input):
            self._types.update((value.name, value.type) for value in values)

    def _apply_rules(self) -> bool:
        """Adds the shapes that the rules know; returns whether there were any."""
        added = False
        for node in self.model.graph.node:
            if not any(name and self._is_unknown(name) for name in node.output):
                continue
            rule = RULES.get(node.op_type)
            found = rule(node, self) if rule else []
            if self._guess_output_rank and not any(found):
                first = self.known(node.input[0]) if node.input else None
                found = [first and (first[0], [None] * len(first[1]))]
            for name, known in zip(node.output, found, strict=False):
                if name and known and self._is_unknown(name):
                    self._add(name, known)
                    added = True
        return added

    def _apply_expressions(self) -> bool:
        """Writes the sizes that nodes compute; returns whether there were any new ones."""
        if importlib.util.find_spec("sympy") is None:
            return False
        changed = False
        values = SymbolicValues(self.model.graph, self)
        for node in self.model.graph.node:
            dims = values.visit(node)
            if dims is None:
                continue
            name, known = node.output[0], self.known(node.output[0])
            if known is None:
                proto = self._types.get(name)
                first = self._types.get(node.input[0]) if node.input else None
                kind = next((p.tensor_type.elem_type for p in (proto, first) if p is not None), 0)
                if kind and node.op_type in _SAME_TYPE:
                    self._add(name, (kind, dims))
                    changed = True
            elif len(known[1]) == len(dims):
                for axis, (old, new) in enumerate(zip(known[1], dims, strict=True)):
                    is_open = old is None or (isinstance(old, str) and _is_made(old))
                    if new is not None and is_open:
                        changed = self._set(name, axis, old, new) or changed
        if changed:
            # What was made of the unknown dimensions may be known in the next turn.
            for dim in self._found_dims():
                if _is_made(dim.dim_param):
                    dim.Clear()
        return changed

    def _set(self, name: str, axis: int, old: Dim, new: Dim) -> bool:
        """Writes a dimension of a value and all of its name; returns whether it is new."""
        if old == new or (isinstance(new, str) and _is_made(new)):
            return False
        graph = self.model.graph
        if isinstance(old, str):
            places = [dim for dim in self._dims() if dim.dim_param == old]
        else:
            infos = [info for info in [*graph.output, *graph.value_info] if info.name == name]
            places = [info.type.tensor_type.shape.dim[axis] for info in infos]
        for dim in places:
            if isinstance(new, int):
                dim.dim_value = new
            else:
                dim.dim_param = new
        if places:
            self._read_types()
        return bool(places)

    def _add(self, name: str, known: tuple[int, list[Dim]]) -> None:
        """Writes a shape to the model; unknown dimensions get new names."""
        import onnx

        kind, dims = known
        named = [dim if dim is not None else self._symbol() for dim in dims]
        proto = onnx.helper.make_tensor_type_proto(kind, named)
        self._types[name] = proto
        values = [*self.model.graph.output, *self.model.graph.value_info]
        value = next((value for value in values if value.name == name), None)
        if value is None:
            value = self.model.graph.value_info.add(name=name)
        value.type.CopyFrom(proto)

    def _symbol(self) -> str:
        """Returns a name that no dimension has."""
        taken = {dim.dim_param for dim in self._dims()}
        while f"unk__{self._symbols}" in taken:
            self._symbols += 1
        self._symbols += 1
        return f"unk__{self._symbols - 1}"

    def _dims(self) -> Iterator[onnx.TensorShapeProto.Dimension]:
        """Yields all dimensions of the main graph's values."""
        graph = self.model.graph
        for values in (graph.input, graph.output, graph.value_info):
            for value in values:
                yield from value.type.tensor_type.shape.dim

    def _found_dims(self) -> Iterator[onnx.TensorShapeProto.Dimension]:
        """Yields the dimensions of what nodes write."""
        for value in [*self.model.graph.value_info, *self.model.graph.output]:
            if value.type.HasField("tensor_type"):
                yield from value.type.tensor_type.shape.dim

    def _merge(self) -> bool:
        """Gives dimensions that have to be equal one name; returns whether any changed."""
        names: dict[str, str] = {}
        # The model's own names come first, in the order of its inputs; made ones last.
        seen = dict.fromkeys(dim.dim_param for dim in self._dims())
        order = {name: i for i, name in enumerate(sorted(seen, key=_is_made))}

        def find(name: str) -> str:
            while name in names:
                name = names[name]
            return name

        for left, right in self._equal_dims():
            if isinstance(left, str) and isinstance(right, str):
                pair = sorted({find(left), find(right)}, key=order.__getitem__)
                if len(pair) == 2:
                    names[pair[1]] = pair[0]
        for dim in self._dims():
            if dim.dim_param in names:
                dim.dim_param = find(dim.dim_param)
        return bool(names)

    def _equal_dims(self) -> Iterator[tuple[Dim, Dim]]:
        """Yields pairs of dimensions that are equal in every run that succeeds.

        Two different names in an elementwise operator may also be 1 and something else; that is
        the assumption of `auto_merge`.
        """
        for node in self.model.graph.node:
            inputs = [self.known(name) for name in node.input]
            shapes = [known[1] for known in inputs if known]
            output = self.known(node.output[0])
            if node.op_type in _RESIDUAL:
                shapes = shapes[:2]
            if node.op_type in _ELEMENTWISE or node.op_type in _RESIDUAL:
                # Earlier turns named the output's dimension before its inputs were one.
                shapes += [output[1]] if output and len(shapes) == len(inputs) else []
                for column in zip_longest(*map(reversed, shapes)):
                    named = [dim for dim in column if isinstance(dim, str)]
                    yield from zip(named, named[1:], strict=False)
            elif node.op_type == "MatMul" and len(shapes) == 2 and min(map(len, shapes)) >= 2:
                left, right = shapes
                yield left[-1], right[-2]
                yield from zip(reversed(left[:-2]), reversed(right[:-2]), strict=False)


def _name_unknown(found: onnx.ValueInfoProto, declared: onnx.ValueInfoProto) -> None:
    """Gives dimensions without a name of their own the names that the model declares."""
    dims = found.type.tensor_type.shape.dim if found.type.HasField("tensor_type") else ()
    for dim, given in zip(dims, declared.type.tensor_type.shape.dim, strict=False):
        has_size = dim.HasField("dim_value") or (dim.dim_param and not _is_made(dim.dim_param))
        if not has_size and given.dim_param:
            dim.dim_param = given.dim_param


def _is_made(name: str) -> bool:
    """Returns whether inference made a name, so that the model's are better."""
    return name.startswith("unk__")


class SymbolicShapeInference:
    """Symbolic shape inference of models; see `infer_shapes`."""

    @staticmethod
    def infer_shapes(
        in_mp: onnx.ModelProto,
        int_max: int = 2**31 - 1,
        auto_merge: bool = False,
        guess_output_rank: bool = False,
        verbose: int = 0,
    ) -> onnx.ModelProto:
        """Returns a copy of a model that has the shapes of its values in `value_info`.

        Those of the outputs are there as well. A name that the model declares for a dimension of an
        output gives way to what its node computes. Values that stay unknown are named in a log
        message. Nodes in the bodies of control flow are inferred as far as the package `onnx` does
        it.

        Args:
            in_mp: the model, which is not changed.
            int_max: unused; slices up to any large number end at the dimension.
            auto_merge: takes dimensions with different names as equal if an elementwise operator
                or a matrix product needs it.
            guess_output_rank: gives outputs of unknown operators the rank of the first input.
            verbose: logs what was found if above 0.

        Raises:
            ValueError: the branches of an If have different types.

        Example:
            >>> model = onnx.load("model.onnx")
            >>> inferred = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
            >>> len(inferred.graph.value_info)
        """
        import onnx

        _check_branches(in_mp.graph)
        inference = _Inference(in_mp, auto_merge, guess_output_rank)
        inference.run()
        inferred = inference.model.graph
        result = onnx.ModelProto()
        result.CopyFrom(in_mp)
        del result.graph.value_info[:]
        result.graph.value_info.extend(inferred.value_info)
        for output, found in zip(result.graph.output, inferred.output, strict=True):
            _name_unknown(found, output)
            output.CopyFrom(found)
            result.graph.value_info.append(output)
        missing = inference.unknown()
        if missing:
            shown = ", ".join(missing[:5])
            logger.warning("Shape inference is incomplete: %d values, %s", len(missing), shown)
        if verbose > 0:
            logger.info("Inferred %d values", len(inferred.value_info))
        return result


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        "symbolic_shape_infer", description="Writes the shapes of all values into a model."
    )
    parser.add_argument("--input", required=True, help="model to read")
    parser.add_argument("--output", help="model to write; none if left out")
    parser.add_argument(
        "--auto_merge", action="store_true", help="take names as equal if operators need it"
    )
    parser.add_argument("--int_max", type=int, default=2**31 - 1, help="unused")
    parser.add_argument("--verbose", type=int, default=0, help="1 logs what was found")
    parser.add_argument(
        "--guess_output_rank",
        action="store_true",
        help="give outputs of unknown operators the rank of their first input",
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the tool on `arguments`, the command line if None."""
    import onnx

    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    model = onnx.load(args.input)
    inferred = SymbolicShapeInference.infer_shapes(
        model, args.int_max, args.auto_merge, args.guess_output_rank, args.verbose
    )
    if args.output:
        onnx.save(inferred, args.output)


if __name__ == "__main__":
    main()
