"""Translation of an FX graph of ATen operators into a model, and what a caller binds to it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from . import _model_bytes
from ._emitter import Computed, Draw, Emitter, Unsupported, element_type_of, expression_of, named
from ._table import TABLE, emit

__all__ = ["Kind", "Output", "Program", "missing", "translate"]

@dataclass
class Output:
    """What an output of the graph is: a tensor of the run, an argument, or a number."""

    #: The name of the session's output.
    name: str = ""
    #: The argument that the graph returns as it is.
    argument: int | None = None
    #: The random booleans that the graph returns as they were drawn.
    draw: str = ""
    #: The size that the graph returns.
    expression: int | sympy.Expr | None = None
    #: The sizes and strides that torch expects, unless they are contiguous.
    strides: tuple[list[int | sympy.Expr], list[int | sympy.Expr]] | None = None


@dataclass
class Program:
    """A model, and how the arguments and results of its graph are those of a session."""

    model: bytes
    #: The session's input for each argument that it reads, by place.
    inputs: dict[int, str] = field(default_factory=dict)
    #: The symbols that arguments have as sizes: symbol, place, axis (None: the argument itself).
    sizes: list[tuple[str, int, int | None]] = field(default_factory=list)
    #: The shapes of the session's inputs.
    shapes: list[list[int | sympy.Expr]] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)


class Kind:
    """What an FX node is."""

    @staticmethod
    def is_size(node: fx.Node) -> bool:
        """Whether a node computes a number from sizes, which no model needs to compute."""
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | bool)

    @staticmethod
    def is_check(node: fx.Node) -> bool:
        """Whether a node only asserts what sizes are."""
        return "assert" in str(node.target) or "sym_constrain" in str(node.target)


def translate(graph: fx.GraphModule, name: str, *, saved_from: int | None = None) -> Program:
    """Translates a graph. Raises Unsupported, whose text has a line for each kind of problem.

    Outputs from the place `saved_from` on go to our own backward graph, which needs no strides.
    """
    e = Emitter()
    program = Program(b"", computed=e.computed, draws=e.draws)
    problems: dict[str, None] = {}
    returned: list[Any] = []
    place = 0
    for node in graph.graph.nodes:
        try:
            if node.op == "placeholder":
                place += 1
                _argument(e, program, node, place - 1)
            elif node.op == "output":
                returned = list(node.args[0])
            else:
                _add(e, graph, node)
        except Unsupported as problem:
            problems[str(problem)] = None
    if not problems:
        try:
            infos = _outputs(e, program, graph, returned, saved_from)
        except Unsupported as problem:
            problems[str(problem)] = None
    if problems:
        raise Unsupported("\n".join(problems))
    program.model = e.model(name, infos)
    return program


def missing(graph: fx.GraphModule) -> list[str]:
    """Returns what keeps a graph from being translated, a line each."""
    try:
        translate(graph, "check")
    except Unsupported as problem:
        return str(problem).split("\n")
    return []


def _add(e: Emitter, graph: fx.GraphModule, node: fx.Node) -> None:
    """Emits one node, or notes what it stands for. After a problem the readers are skipped."""
    if node.op == "get_attr":
        e.values[node] = e.frozen(_attribute(graph, str(node.target)))
    elif Kind.is_size(node) or Kind.is_check(node):
        return
    elif node.target is operator.getitem:
        source, place = node.args
        values = e.values.get(source)  # type: ignore[arg-type]
        if values is None:
            return
        if values[place] is not None:
            e.values[node] = values[place]
    elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        if str(node.target) not in TABLE:
            raise Unsupported(f"{node.target} is not in the table")
        if not _reads_unknown(e, node):
            e.values[node] = emit(e, node)
    else:
        raise Unsupported(f"{node.op} {node.target}")


def _reads_unknown(e: Emitter, node: fx.Node) -> bool:
    """Whether an operand has no value since its own translation failed."""
    for source in node.all_input_nodes:
        if source in e.values or not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        # One of several results that is not computed, of an operator that is.
        is_part = source.target is operator.getitem and source.args[0] in e.values
        if not is_part:
            return True
    return False


def _attribute(graph: fx.GraphModule, path: str) -> torch.Tensor:
    found: Any = graph
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor):
        raise Unsupported(f"the graph reads {path}, which is no tensor")
    return found


def _argument(e: Emitter, program: Program, node: fx.Node, place: int) -> None:
    """Makes a placeholder a graph input, and notes which symbols its sizes bind."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        if expression.is_Symbol:
            program.sizes.append((str(expression), place, None))
        return
    if not isinstance(value, torch.Tensor):
        return
    name = node.name
    shape = [expression_of(size) for size in value.shape]
    for axis, size in enumerate(shape):
        if isinstance(size, sympy.Symbol):
            program.sizes.append((str(size), place, axis))
            e.symbols.setdefault(size, (name, axis))
    if any(user.op != "output" for user in node.users):
        info = _model_bytes.value_info(name, element_type_of(value.dtype), list(map(named, shape)))
        e.inputs.append(info)
        program.inputs[place] = name
        program.shapes.append(shape)
    e.values[node] = name


def _outputs(
    e: Emitter,
    program: Program,
    graph: fx.GraphModule,
    returned: list[Any],
    saved_from: int | None,
) -> list[bytes]:
    """Notes what each result is. Returns the infos of the session's outputs."""
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    fed, drawn = {node.name for node in arguments}, {draw.name for draw in e.draws}
    infos: dict[str, bytes] = {}
    for place, node in enumerate(returned):
        if not isinstance(node, fx.Node):
            expression = None if node is None else expression_of(node)
            program.outputs.append(Output(expression=expression))
            continue
        if node in arguments:
            program.outputs.append(Output(argument=arguments.index(node)))
            continue
        if Kind.is_size(node):
            program.outputs.append(Output(expression=expression_of(node)))
            continue
        value, name = node.meta["val"], e.of(node)
        if name in drawn:
            program.outputs.append(Output(draw=name))
            continue
        if name in fed:
            name = e.op("Identity", name)
            e.values[node] = name
        code = element_type_of(value.dtype)
        shape = [expression_of(size) for size in value.shape]
        infos[name] = _model_bytes.value_info(name, code, list(map(named, shape)))
        strides = None
        is_saved = saved_from is not None and place >= saved_from
        if not is_saved and not value.is_contiguous():
            strides = (shape, [expression_of(stride) for stride in value.stride()])
        program.outputs.append(Output(name=name, strides=strides))
    return list(infos.values())
