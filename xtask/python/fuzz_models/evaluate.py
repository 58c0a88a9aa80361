"""The reference: the `onnx` package's evaluator, with corrections, and how far off a right result
may be.

A model is evaluated in its own types, and again with all floats in double precision. The second is what is expected. How
far the two are apart, and how far the second moves if its inputs move by a rounding error, is what rounding alone can do:
the slack of each element is a few times that."""

from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from corrections import CORRECTED
from microsoft import MICROSOFT_OPERATORS

ONNX, MICROSOFT, ONNX_ML = "", "com.microsoft", "ai.onnx.ml"
VERSIONS = {MICROSOFT: 1, ONNX_ML: 4}
OPERATORS = [*CORRECTED, *MICROSOFT_OPERATORS]
NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)

# How much inputs move, relatively, to see how far results follow.
MOVE = 1e-6
# Unit roundoffs, and how many of them a result may be off beside what the evaluations differ by.
HALF, SINGLE, DOUBLE = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
ROUNDOFF = {HALF: 2.0**-11, SINGLE: 2.0**-24, DOUBLE: 2.0**-53}
# Of the rounding errors that were seen, and of each element itself. Doubles have digits to spare:
# what is computed in float32 by mistake is a million times further off.
FACTOR, OWN = 16, 16
SPARE = {ROUNDOFF[DOUBLE]: 16}
# Values beyond this say nothing of rounding errors elsewhere.
MOST_CANCELLED = 1e4
# Below this a float of the type has fewer digits.
LEAST_NORMAL = {HALF: 2.0**-14, SINGLE: 2.0**-126, DOUBLE: 2.0**-1022}


def evaluate_node(node: NodeProto, feeds: dict, opset: int) -> list:
    evaluator = ReferenceEvaluator(node, opsets={ONNX: opset, **VERSIONS}, new_ops=OPERATORS)
    with np.errstate(all="ignore"):
        return evaluator.run(None, feeds)


def evaluate(model: ModelProto, feeds: dict, intermediate: bool = False):
    """The outputs of a model; with `intermediate` all values by name."""
    evaluator = ReferenceEvaluator(model, new_ops=OPERATORS)
    with np.errstate(all="ignore"):
        results = evaluator.run(None, feeds, intermediate=intermediate)
    return results if intermediate else [np.asarray(result) for result in results]


def widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype in ROUNDOFF else array


def in_single(model: ModelProto, feeds: dict, kind: int) -> list:
    """The model with float32 for another type of floats."""
    single = ModelProto()
    single.CopyFrom(model)
    retype(single.graph, (kind,), TensorProto.FLOAT, lambda name, array: array.astype(np.float32))
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    feeds = {name: array.astype(np.float32) if array.dtype == dtype else array for name, array in feeds.items()}
    return evaluate(single, feeds)


def retype(graph: GraphProto, froms: tuple, to: int, change) -> None:
    """Replaces types of floats throughout; `change` has the elements of a constant for those of
    another type."""
    for info in [*graph.input, *graph.output, *graph.value_info]:
        kind = info.type.tensor_type
        if kind.elem_type in froms:
            kind.elem_type = to
    for tensor in graph.initializer:
        retype_tensor(tensor, tensor.name, (*froms, to), change)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                retype_tensor(attribute.t, node.output[0], (*froms, to), change)
            elif attribute.HasField("g"):
                retype(attribute.g, froms, to, change)
            elif attribute.name in ("to", "stash_type", "output_dtype") and attribute.i in froms:
                attribute.i = to


def retype_tensor(tensor: TensorProto, name: str, types: tuple, change) -> None:
    if tensor.data_type in types:
        array = change(name, numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), tensor.name))


def shaping(graph: GraphProto) -> set[str]:
    """The floats that shapes follow from."""
    names = {node.input[2] for node in graph.node if node.op_type == "Resize" and len(node.input) > 2}
    bodies = (attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g"))
    return names.union(*(shaping(body) for body in bodies))


def moving(rng: np.random.Generator | None, by: float, fixed: set[str]):
    """Makes doubles of floats and moves them by a rounding error; whole numbers stay, as they are
    often exact on purpose (a zero, an exponent)."""

    def move(name: str, array: np.ndarray) -> np.ndarray:
        array = widened(array)
        if rng is None or array.dtype != np.float64 or name in fixed:
            return array
        factor = 1 + by * rng.uniform(0.25, 1, array.shape) * rng.choice([-1, 1], array.shape)
        is_whole = ~np.isfinite(array) | (array == np.round(array))
        return np.where(is_whole, array, array * factor)

    return move


def separate(graph: GraphProto, feeds: dict) -> dict:
    """Gives each use of a constant or an input a copy of its own, and returns the inputs. A scale that
    quantizes what it also dequantized moves on both sides alike, so that a tie would stay one."""
    feeds = dict(feeds)
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        if node.attribute[0].name == "value":
            graph.initializer.add().CopyFrom(node.attribute[0].t)
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)
    sources = {value.name: (value, graph.initializer) for value in graph.initializer}
    sources |= {value.name: (value, graph.input) for value in graph.input if value.name in feeds}
    used = {output.name for output in graph.output}
    for index, node in enumerate(graph.node):
        for place, name in enumerate(node.input):
            if name not in sources:
                continue
            if name in used:
                value, values = sources[name]
                copy = values.add()
                copy.CopyFrom(value)
                copy.name = node.input[place] = f"{name}/{index}/{place}"
                if name in feeds:
                    feeds[copy.name] = feeds[name]
            used.add(name)
    return feeds


def evaluate_wide(model: ModelProto, feeds: dict, seed: int | None = None, by: float = 0) -> list:
    """The model in double precision, with inputs and constants moved if there is a seed."""
    wide = ModelProto()
    wide.CopyFrom(model)
    rng = None if seed is None else np.random.default_rng(seed)
    if rng is not None:
        feeds = separate(wide.graph, feeds)
    move = moving(rng, by, shaping(wide.graph))
    retype(wide.graph, NARROW, TensorProto.DOUBLE, move)
    return evaluate(wide, {name: move(name, array) for name, array in feeds.items()})


@dataclass
class Expected:
    outputs: list[np.ndarray]
    slacks: list[np.ndarray]


def expect(model: ModelProto, feeds: dict, exact: bool) -> Expected:
    """What a model's outputs are, and how far off each element may be."""
    own = evaluate(model, feeds)
    wide = evaluate_wide(model, feeds)
    single, between, moved, by = None, None, [], MOVE
    if not exact:
        # What is computed in float16 is moved by as much as float16 rounds.
        by = ROUNDOFF[HALF] if is_half(model.graph) else MOVE
        # Or in float32, by a kernel of several operators: near a pole that goes to another side.
        between = in_single(model, feeds, TensorProto.FLOAT16) if is_half(model.graph) else None
        moved = [evaluate_wide(model, feeds, 1, by), evaluate_wide(model, feeds, 1, -by)]
        if any(array.dtype == np.float64 for array in own):
            single = in_single(model, feeds, TensorProto.DOUBLE)
    largest = 1.0 if exact else largest_of(model, feeds)
    outputs, slacks = [], []
    with np.errstate(all="ignore"):
        for index, (array, double) in enumerate(zip(own, wide, strict=True)):
            rounding = distance(array, double)
            roundoff = roundoff_of(array, double, rounding)
            if single is not None and array.dtype == DOUBLE and roundoff == ROUNDOFF[DOUBLE]:
                rounding = distance(single[index], double) * (roundoff / ROUNDOFF[SINGLE])
            if between is not None:
                rounding = np.maximum(rounding, distance(between[index], double))
            moves = np.zeros(array.shape)
            for results in moved:
                moves = np.maximum(moves, distance(results[index], double))
            outputs.append(np.asarray(double.astype(array.dtype) if double.shape == array.shape else array))
            slacks.append(np.asarray(slack_of(array, double, rounding, Moves(moves, by, roundoff, largest))))
    return Expected(outputs, slacks)


def largest_of(model: ModelProto, feeds: dict) -> float:
    values = [np.asarray(value) for value in evaluate(model, feeds, intermediate=True).values() if isinstance(value, np.ndarray)]
    sizes = [np.abs(value[np.isfinite(value)].astype(np.float64)).max(initial=0) for value in values if value.dtype in ROUNDOFF]
    return float(min(max(sizes, default=1.0), MOST_CANCELLED))


def roundoff_of(own: np.ndarray, double: np.ndarray, rounding: np.ndarray) -> float:
    """The unit roundoff of the narrowest type that an output was computed in, which may be narrower
    than its own."""
    if own.dtype not in ROUNDOFF or own.shape != double.shape:
        return 0.0
    relative = rounding / np.maximum(np.abs(double), LEAST_NORMAL[own.dtype])
    seen = float(np.max(relative, initial=0, where=np.isfinite(relative)))
    narrower = [roundoff for roundoff in ROUNDOFF.values() if roundoff >= ROUNDOFF[own.dtype]]
    # A few operations round by a few units each.
    return min(roundoff for roundoff in narrower if seen <= 1000 * roundoff or roundoff == max(narrower))


def is_half(graph: GraphProto) -> bool:
    types = [info.type.tensor_type.elem_type for info in graph.input] + [tensor.data_type for tensor in graph.initializer]
    casts = [attribute.i for node in graph.node for attribute in node.attribute if attribute.name == "to"]
    return TensorProto.FLOAT16 in types + casts


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Element by element; 0 for equal ones, infinite for a NaN or an infinity that the other is
    not."""
    if one.shape != other.shape:
        return np.full(one.shape, np.inf)
    one, other = one.astype(np.float64), other.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    apart = np.abs(one - other)
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def typical(distances: np.ndarray) -> float:
    """A large one of the distances that is not an outlier."""
    finite = distances[np.isfinite(distances)]
    return float(np.quantile(finite, 0.9)) if finite.size else 0.0


@dataclass
class Moves:
    """How far elements move if inputs move by so much, and what a rounding error of the model
    is."""

    distances: np.ndarray
    by: float
    roundoff: float
    # Of all values of the model, as far as rounding errors of it are to be expected.
    largest: float


def slack_of(own: np.ndarray, double: np.ndarray, rounding: np.ndarray, moves: Moves) -> np.ndarray:
    if own.dtype == object or own.dtype.kind not in "fiub":
        return np.zeros(own.shape)
    if own.dtype not in ROUNDOFF:
        # Integers that follow from floats: what a rounding error turns over may be either, and of places any.
        apart = rounding + moves.distances
        return np.where(apart > 0, np.inf, 0) if own.dtype == np.int64 else apart
    roundoff = moves.roundoff
    followed = moves.distances * (roundoff / moves.by)
    # What jumps does not follow in proportion: it may be anywhere between.
    jumps = moves.distances > np.sqrt(moves.by) * (1 + np.abs(double))
    error = rounding + np.where(jumps, moves.distances, followed)
    size = np.where(np.isfinite(double), np.abs(double.astype(np.float64)), 0)
    size = np.maximum(size, LEAST_NORMAL[own.dtype])
    slack = SPARE.get(roundoff, 1) * (FACTOR * np.maximum(error, typical(error)) + OWN * roundoff * size)
    # Rounding errors cancel out here, and need not where values are computed in another order. Those
    # of double precision are the evaluation's own.
    negligible = OWN * ROUNDOFF[DOUBLE] * moves.largest
    cancelled = (error <= (0 if roundoff == ROUNDOFF[DOUBLE] else negligible)) & (size <= roundoff * moves.largest)
    slack = np.where(cancelled, np.maximum(slack, SPARE.get(roundoff, 1) * OWN * roundoff * moves.largest), slack)
    # Near the end of the type's range the largest number and infinity are both right.
    return np.where(size + slack >= np.finfo(own.dtype).max, np.inf, slack)
