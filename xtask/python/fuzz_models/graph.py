"""Builds a random model node by node. Each node is evaluated as soon as it is added, so that
whoever adds the next one knows the shape and the elements of all values, and what the reference
refuses is never in a model."""

from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from draw import Draw
from evaluate import MICROSOFT, ONNX, ONNX_ML, evaluate_node
from schemas import check_types

# Values larger than this are no use: the reference is slow.
MOST_ELEMENTS = 4000
OPSETS = [19, 20, 21, 22, 23]
IR_VERSION = 10


class Unfit(Exception):
    """What was drawn makes no valid node; another draw may."""


@dataclass(frozen=True)
class Value:
    name: str
    array: np.ndarray
    constant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return self.array.ndim


@dataclass(frozen=True)
class Style:
    """What a model tells of its shapes. The rates are between 0 and 1."""

    symbolic: float = 0.0  # of sizes that inputs leave to the run
    ranks: float = 0.0  # of inputs that leave their rank to the run
    veils: float = 0.0  # of values that come through a node of which only the run tells the shape
    fed: float = 0.0  # of constants that are inputs instead
    shared_names: bool = False  # whether equal sizes have equal names
    constant_nodes: float = 0.2  # of constants that are nodes instead of initializers

    @classmethod
    def drawn(cls, draw: Draw) -> "Style":
        shared, nodes = draw.chance(0.5), draw.choice([0.0, 0.3, 1.0])
        kind = draw.weighted({"static": 5, "symbolic": 3, "mixed": 2, "unknown": 2})
        if kind == "static":
            return cls(fed=draw.choice([0, 0, 0.1]), constant_nodes=nodes)
        if kind == "symbolic":
            return cls(1.0, 0, draw.choice([0, 0.1]), draw.choice([0, 0.1]), shared, nodes)
        if kind == "mixed":
            return cls(0.4, 0.1, draw.choice([0, 0.1]), draw.choice([0, 0.2]), shared, nodes)
        return cls(0.7, draw.choice([0, 0.3, 1.0]), draw.choice([0.05, 0.1, 0.3]), draw.choice([0, 0.2]), shared, nodes)


class Builder:
    """A graph that grows. One with a parent is the body of a node of its parent, whose values it
    may read."""

    def __init__(self, draw: Draw, parent: "Builder | None" = None, opset: int | None = None):
        self.draw = draw
        self.parent = parent
        self.root: Builder = parent.root if parent else self
        self.opset = parent.opset if parent else (opset or draw.choice(OPSETS))
        self.style = parent.style if parent else Style.drawn(draw)
        # Arithmetic that rounds nowhere: results are known to the last bit, ties among them.
        self.exact = False
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: list[Value] = []
        self.made: list[Value] = []
        self.read: set[str] = set()
        self.ranks_known: set[str] = set()
        self.count = 0

    # Names and values

    def name(self, prefix: str) -> str:
        self.root.count += 1
        return f"{prefix}{self.root.count}"

    def visible(self) -> dict[str, np.ndarray]:
        values = dict(self.parent.visible()) if self.parent else {}
        values.update({value.name: value.array for value in self.inputs + self.made})
        values.update({tensor.name: numpy_helper.to_array(tensor) for tensor in self.initializers})
        return values

    def input(self, array: np.ndarray, name: str | None = None) -> Value:
        value = Value(name or self.name("x"), np.asarray(array))
        self.inputs.append(value)
        return value

    def random(self, dtype, shape) -> Value:
        """A value with random elements: mostly an input, sometimes a constant."""
        array = self.draw.elements(dtype, shape)
        return self.constant(array) if self.draw.chance(0.15) else self.root.input(array)

    def constant(self, array, fed: bool = True) -> Value:
        """A constant; in some models an input instead, unless it must be known."""
        array = np.asarray(array)
        if fed and self.draw.chance(self.style.fed):
            return self.root.input(array)
        if self.draw.chance(self.style.constant_nodes):
            name = self.name("c")
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
            value = Value(name, array, True)
            self.made.append(value)
            self.read.add(name)
            return value
        tensor = numpy_helper.from_array(array, self.name("c"))
        owner = self if self.draw.chance(0.5) else self.root
        owner.initializers.append(tensor)
        return Value(tensor.name, array, True)

    def ints(self, numbers, fed: bool = True) -> Value:
        return self.constant(np.array(numbers, np.int64), fed)

    # Nodes

    def node(self, op: str, inputs: list, domain: str = ONNX, **attributes) -> Value:
        return self.nodes_of(op, inputs, 1, domain, **attributes)[0]

    def nodes_of(self, op: str, inputs: list, outputs: int, domain: str = ONNX, **attributes) -> list[Value]:
        """Adds a node with several outputs."""
        inputs = [value and self.veiled(value) for value in inputs]
        return self.plain(op, inputs, outputs, domain, **attributes)

    def plain(self, op: str, inputs: list, outputs: int, domain: str = ONNX, **attributes) -> list[Value]:
        """The same without a node before it that hides the shapes of its inputs."""
        attributes = {name: value for name, value in attributes.items() if value is not None}
        names = ["" if value is None else value.name for value in inputs]
        feeds = {value.name: value.array for value in inputs if value is not None}
        try:
            node = helper.make_node(op, names, [self.name("v") for _ in range(outputs)], domain=domain, **attributes)
            if any(attribute.HasField("g") for attribute in node.attribute):
                feeds = {**self.visible(), **feeds}
            if domain == ONNX:
                check_types(op, self.opset, [value and value.dtype for value in inputs])
            results = evaluate_node(node, feeds, self.opset)
        except Exception as problem:
            raise Unfit(f"{op}: {problem}") from problem
        results = [np.asarray(result) for result in results]
        if any(result.size > MOST_ELEMENTS and result.size > self.largest() for result in results):
            raise Unfit(f"{op}: too large")
        self.nodes.append(node)
        self.read.update(names)
        values = [Value(name, result) for name, result in zip(node.output, results, strict=True)]
        self.made.extend(values)
        return values

    def largest(self) -> int:
        return max((value.array.size for value in self.root.inputs), default=0)

    def veiled(self, value: Value) -> Value:
        """The value, or the same through a node that hides its shape from whoever looks before the
        run."""
        if value.constant or value.array.size == 0 or not self.draw.chance(self.style.veils):
            return value
        if value.dtype == object:
            return value
        shape = list(value.shape)
        kind = self.draw.weighted({"reshape": 5, "expand": 2, "slice": 1, "if": 1, "squeeze": 1})
        if kind == "reshape":
            return self.plain("Reshape", [value, self.sizes(shape)], 1)[0]
        if kind == "expand":
            return self.plain("Expand", [value, self.sizes(shape)], 1)[0]
        if kind == "slice" and shape:
            ends = self.root.input(np.array(shape, np.int64))
            return self.plain("Slice", [value, self.ints([0] * len(shape), fed=False), ends], 1)[0]
        if kind == "if":
            return self.veiled_by_choice(value)
        raised = self.plain("Reshape", [value, self.sizes([1] + shape)], 1)[0]
        return self.plain("Squeeze", [raised, self.root.input(np.array([0], np.int64))], 1)[0]

    def sizes(self, shape: list[int]) -> Value:
        """A shape that only the run tells, with a number of axes that in half of all models only
        the run tells, too."""
        sizes = self.root.input(np.array(shape, np.int64))
        if self.draw.chance(0.5):
            self.root.ranks_known.add(sizes.name)
        return sizes

    def veiled_by_choice(self, value: Value) -> Value:
        condition = self.root.input(np.array(self.draw.chance(0.5)))
        branches = []
        for keeps in (True, False):
            body = Builder(self.draw, self)
            if bool(condition.array) == keeps:
                body.plain("Identity", [value], 1)
            else:
                body.plain("Unsqueeze", [value, body.ints([0], fed=False)], 1)
            branches.append(body.body(body.made[-1:]))
        return self.plain("If", [condition], 1, then_branch=branches[0], else_branch=branches[1])[0]

    def body(self, outputs: list[Value], formals: list[Value] = ()) -> GraphProto:
        """This graph as the attribute of a node; what it reads of its parent counts as read
        there."""
        own = {value.name for value in self.made}
        if self.parent:
            self.parent.read.update(self.read - own)
            self.parent.read.update(value.name for value in outputs)
        infos = [helper.make_tensor_value_info(v.name, type_of(v), self.declared(v)) for v in formals]
        results = [helper.make_tensor_value_info(v.name, type_of(v), None) for v in outputs]
        return helper.make_graph(self.nodes, self.name("body"), infos, results, self.initializers)

    # The whole

    def unread(self) -> list[Value]:
        return [value for value in self.made if value.name not in self.read]

    def declared(self, value: Value):
        """The shape that a model tells of an input: sizes, names, or nothing."""
        draw, style = self.draw, self.style
        if value.name not in self.root.ranks_known and draw.chance(style.ranks):
            return None
        def one(axis: int, size: int):
            if not draw.chance(style.symbolic):
                return size
            if style.shared_names:
                return f"n{size}"
            return draw.choice([f"{value.name}_{axis}", f"{value.name}_{axis}", None])
        if value.name.startswith("x") and value.ndim == 1 and value.dtype == np.int64 and value.array.size <= 6:
            # A shape or a list of axes: its own length is known, or not, as was drawn.
            known = value.name in self.root.ranks_known
            return list(value.shape) if known else [one(0, value.shape[0])]
        return [one(axis, size) for axis, size in enumerate(value.shape)]

    def output_info(self, value: Value):
        """An output with its rank in words, or nothing told of its shape."""
        shape = None
        if self.draw.chance(0.3):
            shape = [None if self.draw.chance(0.3) else f"{value.name}_{axis}" for axis in range(value.ndim)]
        return helper.make_tensor_value_info(value.name, type_of(value), shape)

    def model(self) -> ModelProto:
        """The model: what no node reads is an output, and now and then what some node reads."""
        outputs = [value for value in self.unread() if value.dtype != object]
        others = [v for v in self.made if v.name in self.read and not v.constant and v.dtype != object]
        outputs += [value for value in others if self.draw.chance(0.06)]
        if not outputs:
            raise Unfit("no outputs")
        read = self.read | {value.name for value in outputs}
        inputs = [value for value in self.inputs if value.name in read]
        self.inputs = inputs
        initializers = [tensor for tensor in self.initializers if tensor.name in read]
        infos = [helper.make_tensor_value_info(v.name, type_of(v), self.declared(v)) for v in inputs]
        graph = helper.make_graph(
            self.nodes, "fuzzed", infos, [self.output_info(value) for value in outputs], initializers
        )
        imports = [(ONNX, self.opset), (MICROSOFT, 1), (ONNX_ML, 4)]
        opsets = [helper.make_opsetid(domain, version) for domain, version in imports]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="fuzz-models")

    def feeds(self) -> dict[str, np.ndarray]:
        return {value.name: value.array for value in self.inputs}


def type_of(value: Value) -> int:
    return helper.np_dtype_to_tensor_dtype(value.dtype)
