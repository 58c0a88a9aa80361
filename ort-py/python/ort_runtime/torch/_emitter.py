"""Graph builder: emits the nodes of one model, and the sizes and constants that they read.

Symbolic sizes of an FX graph become dimensions of the same name. Where an operator needs a size as
a tensor, it is read from the shape of a graph input, so that the memory plan can follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from . import _model_bytes

__all__ = [
    "Computed",
    "Draw",
    "Emitter",
    "Size",
    "Unsupported",
    "element_type_of",
    "expression_of",
    "named",
]

#: The domain of the runtime's own operators.
RUNTIME = "ort-runtime"
OPSETS = [("", 22), ("com.microsoft", 1), (RUNTIME, 1)]

#: ONNX's element type of each torch type that a graph may have.
ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}

#: A size: a number, a symbolic one, or an FX node that computes one.
Size = Any


class Unsupported(Exception):
    """An operator, or a use of it, that has no translation."""


@dataclass
class Computed:
    """A graph input that the caller computes from sizes before each run."""

    name: str
    expression: sympy.Expr


@dataclass
class Draw:
    """A graph input of random booleans, which are true with a probability."""

    name: str
    shape: list[int | sympy.Expr]
    probability: float


def expression_of(size: Size) -> int | sympy.Expr:
    """Returns a size as a number or as a sympy expression."""
    if isinstance(size, fx.Node):
        size = size.meta["val"]
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else expression
    return int(size)


class Emitter:
    """Collects nodes, constants and graph inputs under unique names."""

    def __init__(self) -> None:
        self.nodes: list[bytes] = []
        self.initializers: list[bytes] = []
        self.inputs: list[bytes] = []
        self.computed: list[Computed] = []
        self.values: dict[fx.Node, Any] = {}
        #: The input and axis that each symbol is the size of.
        self.symbols: dict[sympy.Symbol, tuple[str, int]] = {}
        self.draws: list[Draw] = []
        self._constants: dict[Any, str] = {}
        self._sizes: dict[Any, str] = {}
        self._count = 0
        self.scope = ""

    def fresh(self, hint: str) -> str:
        """Returns a name that no other value has: arguments have no dot in theirs."""
        self._count += 1
        return f"{hint}.{self._count}"

    # Nodes.

    def op(
        self,
        operator: str,
        *inputs: str,
        domain: str = "",
        outputs: int = 1,
        **attributes: Any,
    ) -> Any:
        """Emits a node and returns the name of its output, or a tuple of them."""
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        names = [self.fresh(self.scope or operator) for _ in range(outputs)]
        items = [(key, value) for key, value in attributes.items() if value is not None]
        name = f"{self.scope or operator}/{self._count}"
        self.nodes.append(_model_bytes.node(name, operator, domain, given, names, items))
        return names[0] if outputs == 1 else tuple(names)

    def own(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Emits a node of one of the runtime's own operators."""
        return self.op(operator, *inputs, domain=RUNTIME, outputs=outputs, **attributes)

    # Constants.

    def constant(self, array: np.ndarray) -> str:
        """Returns the name of a constant. Equal ones are one."""
        array = np.asarray(array)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            element_type = {np.dtype(np.bool_): 9, np.dtype(np.int64): 7, np.dtype(np.float32): 1}
            name = self._constants[key] = self.fresh("constant")
            data = array.tobytes()
            code = element_type[array.dtype]
            self.initializers.append(_model_bytes.tensor(name, code, array.shape, data))
        return self._constants[key]

    def ints(self, *numbers: int) -> str:
        """Returns the name of a constant vector of int64."""
        return self.constant(np.array(numbers, np.int64))

    def number(self, value: float, dtype: torch.dtype) -> str:
        """Returns the name of a scalar constant of a torch type."""
        return self.frozen(torch.tensor(value, dtype=dtype))

    def frozen(self, data: torch.Tensor) -> str:
        """Returns the name of a constant with a tensor's contents."""
        data = data.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        key = (data.dtype, tuple(data.shape), raw)
        if key not in self._constants:
            name = self._constants[key] = self.fresh("constant")
            code = element_type_of(data.dtype)
            self.initializers.append(_model_bytes.tensor(name, code, data.shape, raw))
        return self._constants[key]

    def drawn(self, shape: list[int | sympy.Expr], probability: float) -> str:
        """Returns a graph input whose booleans torch draws before each run."""
        name = self.fresh("drawn")
        self.inputs.append(_model_bytes.value_info(name, 9, [named(size) for size in shape]))
        self.draws.append(Draw(name, shape, probability))
        return name

    # FX values.

    def of(self, node: fx.Node) -> str:
        """Returns the name of the tensor that an FX node computes."""
        if not isinstance(node, fx.Node):
            raise Unsupported(f"expected a tensor, not {node!r}")
        value = self.values.get(node)
        if not isinstance(value, str) or not value:
            raise Unsupported(f"{node.format_node()} has no value that can be read")
        return value

    def dtype(self, node: fx.Node) -> torch.dtype:
        """Returns the element type of an FX node's tensor."""
        return node.meta["val"].dtype

    def shape(self, node: fx.Node) -> Sequence[Size]:
        """Returns the sizes of an FX node's tensor."""
        return node.meta["val"].shape

    def rank(self, node: fx.Node) -> int:
        """Returns the number of axes of an FX node's tensor."""
        return len(node.meta["val"].shape)

    def axis(self, node: fx.Node, axis: int) -> int:
        """Returns an axis counted from the front."""
        return axis % max(self.rank(node), 1)

    def cast(self, name: str, source: torch.dtype, to: torch.dtype) -> str:
        """Returns a value as another element type."""
        if source == to:
            return name
        return self.op("Cast", name, to=element_type_of(to))

    def read(self, value: Any, dtype: torch.dtype) -> str:
        """Returns a tensor or a Python number as a value of an element type."""
        if not isinstance(value, fx.Node):
            if isinstance(value, int | float | bool):
                return self.number(value, dtype)
            return self.cast(self.op("Squeeze", self.size(value)), torch.int64, dtype)
        if not isinstance(value.meta["val"], torch.Tensor):
            return self.cast(self.op("Squeeze", self.size(value)), torch.int64, dtype)
        return self.cast(self.of(value), self.dtype(value), dtype)

    # Sizes.

    def size(self, size: Size) -> str:
        """Returns a size as a vector of one int64."""
        return self._size(expression_of(size))

    def _size(self, expression: int | sympy.Expr) -> str:
        if isinstance(expression, int):
            return self.ints(expression)
        if expression not in self._sizes:
            self._sizes[expression] = self._emit_size(expression)
        return self._sizes[expression]

    def _emit_size(self, expression: sympy.Expr) -> str:
        if expression.is_Integer:
            return self.ints(int(expression))
        if expression in self.symbols:
            name, axis = self.symbols[expression]
            return self.op("Shape", name, start=axis, end=axis + 1)
        operators = {"Add": "Add", "Mul": "Mul"}
        operator = operators.get(type(expression).__name__)
        arguments = expression.args
        if operator and all(part.is_Integer or part.is_Symbol for part in arguments):
            first, *others = (self._size(part) for part in arguments)
            for other in others:
                first = self.op(operator, first, other)
            return first
        name = self.fresh("size")
        self.inputs.append(_model_bytes.value_info(name, 7, [1]))
        self.computed.append(Computed(name, expression))
        return name

    def sizes(self, sizes: Iterable[Size], *, infer: bool = False) -> str:
        """Returns sizes as a vector. With `infer`, a single symbolic one becomes -1."""
        found = [expression_of(size) for size in sizes]
        symbolic = [place for place, size in enumerate(found) if not isinstance(size, int)]
        if infer and len(symbolic) == 1 and 0 not in found:
            found[symbolic[0]] = -1
            symbolic = []
        if not symbolic:
            return self.ints(*found)
        return self.op("Concat", *(self._size(size) for size in found), axis=0)

    def reshape(self, name: str, sizes: Sequence[Size]) -> str:
        """Returns a value with other sizes and the same elements."""
        zero = any(expression_of(size) == 0 for size in sizes)
        shape = self.sizes(sizes, infer=True)
        return self.op("Reshape", name, shape, allowzero=1 if zero else None)

    def model(self, name: str, outputs: Iterable[bytes]) -> bytes:
        """Returns the model as bytes."""
        return _model_bytes.model(
            name, self.nodes, self.initializers, self.inputs, outputs, OPSETS
        )


def named(size: int | sympy.Expr) -> int | str:
    """Returns a size as a model states it: a number, or the name of a dimension."""
    return size if isinstance(size, int) else str(size).replace(" ", "")


def element_type_of(dtype: torch.dtype) -> int:
    """Returns ONNX's element type. Raises Unsupported for types that models do not have."""
    if dtype not in ELEMENT_TYPES:
        raise Unsupported(f"tensors of {dtype}")
    return ELEMENT_TYPES[dtype]


#: What a row of the table does: emits an FX node, returns the name of each of its outputs.
Emit = Callable[[Emitter, fx.Node], Any]
