"""Delta debugging of models: the smallest one that fails in the same way.

Each pass proposes smaller models; one that still fails takes the place of the last, and the passes begin again. Expected
outputs are computed again for each, so that no proposal can be wrong: one that the reference refuses is left."""

import re
import time
from collections.abc import Iterator

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from case import Case
from evaluate import evaluate, expect
from runner import Runner

SECONDS = 40
# No axis of a model is longer.
MOST_SIZE = 1000


def copied(case: Case) -> Case:
    model = ModelProto()
    model.CopyFrom(case.model)
    return Case(model, dict(case.feeds), case.exact, case.share)


def names_read(graph) -> set[str]:
    """All names that nodes of a graph read, those of bodies included, and its outputs."""
    names = {info.name for info in graph.output}
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names |= names_read(attribute.g)
    return names


def cleaned(case: Case) -> Case:
    """Without what nothing reads."""
    graph = case.model.graph
    while True:
        read = names_read(graph)
        kept = [node for node in graph.node if any(name in read for name in node.output)]
        if len(kept) == len(graph.node):
            break
        del graph.node[:]
        graph.node.extend(kept)
    for listed in (graph.initializer, graph.input):
        kept = [item for item in listed if item.name in read]
        del listed[:]
        listed.extend(kept)
    case.feeds = {info.name: case.feeds[info.name] for info in graph.input}
    return case


def values_of(case: Case) -> dict[str, np.ndarray]:
    values = evaluate(case.model, case.feeds, intermediate=True)
    return {name: np.asarray(value) for name, value in values.items() if name and value is not None}


def info_of(name: str, array: np.ndarray, shape=None):
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


# Passes


def fewer_outputs(case: Case) -> Iterator[Case]:
    for index in range(len(case.model.graph.output)):
        if len(case.model.graph.output) > 1:
            smaller = copied(case)
            kept = smaller.model.graph.output[index]
            info = type(kept)()
            info.CopyFrom(kept)
            del smaller.model.graph.output[:]
            smaller.model.graph.output.append(info)
            yield smaller


def earlier_outputs(case: Case) -> Iterator[Case]:
    """An inner value as the only output."""
    values = values_of(case)
    ends = {info.name for info in case.model.graph.output}
    for node in case.model.graph.node:
        for name in node.output:
            if name and name in values and (name not in ends or len(ends) > 1):
                smaller = copied(case)
                del smaller.model.graph.output[:]
                smaller.model.graph.output.append(info_of(name, values[name]))
                yield smaller


def later_inputs(case: Case) -> Iterator[Case]:
    """A computed value as an input of static shape, the last ones first."""
    values = values_of(case)
    ends = {info.name for info in case.model.graph.output}
    for position, node in reversed(list(enumerate(case.model.graph.node))):
        names = [name for name in node.output if name]
        if any(name in ends or name not in values for name in names):
            continue
        for declared in (True, False):
            smaller = copied(case)
            del smaller.model.graph.node[position]
            for name in names:
                array = values[name]
                smaller.model.graph.input.append(info_of(name, array, array.shape if declared else None))
                smaller.feeds[name] = array
            yield smaller


def bypassed(case: Case) -> Iterator[Case]:
    """A node left out: whoever reads its output reads one of its inputs."""
    ends = {info.name for info in case.model.graph.output}
    for position, node in enumerate(case.model.graph.node):
        if len(node.output) != 1 or node.output[0] in ends:
            continue
        for name in filter(None, node.input):
            smaller = copied(case)
            del smaller.model.graph.node[position]
            rename(smaller.model.graph, node.output[0], name)
            yield smaller


def rename(graph, old: str, new: str) -> None:
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for attribute in node.attribute:
            if attribute.HasField("g"):
                rename(attribute.g, old, new)


def fewer_inputs(case: Case) -> Iterator[Case]:
    """An input as a constant; an input left out."""
    for index, info in enumerate(case.model.graph.input):
        smaller = copied(case)
        del smaller.model.graph.input[index]
        smaller.model.graph.initializer.append(numpy_helper.from_array(smaller.feeds.pop(info.name), info.name))
        yield smaller
    for position, node in enumerate(case.model.graph.node):
        for index, name in enumerate(node.input):
            if name and index >= 1:
                smaller = copied(case)
                chosen = smaller.model.graph.node[position]
                if index == len(node.input) - 1:
                    del chosen.input[index]
                else:
                    chosen.input[index] = ""
                yield smaller


def constants_as_initializers(case: Case) -> Iterator[Case]:
    smaller = copied(case)
    graph = smaller.model.graph
    constants = [node for node in graph.node if node.op_type == "Constant" and node.attribute[0].HasField("t")]
    for node in constants:
        graph.initializer.append(node.attribute[0].t)
        graph.initializer[-1].name = node.output[0]
        graph.node.remove(node)
    if constants:
        yield smaller


def fewer_attributes(case: Case) -> Iterator[Case]:
    for position, node in enumerate(case.model.graph.node):
        for index in range(len(node.attribute)):
            smaller = copied(case)
            del smaller.model.graph.node[position].attribute[index]
            yield smaller


def told_shapes(case: Case) -> Iterator[Case]:
    """Inputs of static shapes; outputs of no shape."""
    for index, info in enumerate(case.model.graph.input):
        static = info_of(info.name, case.feeds[info.name], case.feeds[info.name].shape)
        if static.SerializeToString() != info.SerializeToString():
            smaller = copied(case)
            smaller.model.graph.input[index].CopyFrom(static)
            yield smaller
    for index, info in enumerate(case.model.graph.output):
        if info.type.tensor_type.HasField("shape"):
            smaller = copied(case)
            smaller.model.graph.output[index].type.tensor_type.ClearField("shape")
            yield smaller


def arrays_of(case: Case) -> list[tuple[str, np.ndarray]]:
    constants = [(tensor.name, numpy_helper.to_array(tensor)) for tensor in case.model.graph.initializer]
    return list(case.feeds.items()) + constants


def with_arrays(case: Case, arrays: dict[str, np.ndarray]) -> Case:
    """The same with other inputs and constants; shapes that the model tells follow."""
    smaller = copied(case)
    forget_shapes_of_bodies(smaller.model.graph)
    for tensor in smaller.model.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(arrays[tensor.name]), tensor.name))
    for info in smaller.model.graph.input:
        if info.name in arrays:
            array = smaller.feeds[info.name] = np.asarray(arrays[info.name])
            for dim, size in zip(info.type.tensor_type.shape.dim, array.shape):
                if dim.HasField("dim_value"):
                    dim.dim_value = size
    return smaller


def forget_shapes_of_bodies(graph) -> None:
    """What a body tells of its inputs would not hold for other sizes."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                for info in attribute.g.input:
                    info.type.tensor_type.ClearField("shape")
                forget_shapes_of_bodies(attribute.g)


def smaller_sizes(case: Case) -> Iterator[Case]:
    """A size made smaller wherever it occurs, as an axis or in a list of whole numbers; then axis
    by axis."""
    arrays = arrays_of(case)
    sizes = sorted({size for _, array in arrays for size in array.shape if size > 1}, reverse=True)
    for size in sizes:
        for less in sorted({1, 2, size // 2, size - 1}):
            if 0 < less < size:
                yield with_arrays(case, {name: resized(array, {size: less}) for name, array in arrays})
                # Products of it become less, too, as those of merged axes are.
                multiples = {many: many // size * less for many in range(size, MOST_SIZE, size)}
                yield with_arrays(case, {name: resized(array, multiples) for name, array in arrays})
    for name, array in arrays:
        for axis, size in enumerate(array.shape):
            if size > 1:
                yield with_arrays(case, {name: np.take(array, range(1 if size < 4 else size // 2), axis)})


def resized(array: np.ndarray, sizes: dict[int, int]) -> np.ndarray:
    for axis, own in enumerate(array.shape):
        if own in sizes:
            array = np.take(array, range(sizes[own]), axis)
    if array.dtype == np.int64 and array.ndim == 1 and array.size <= 8:
        array = np.array([sizes.get(int(number), int(number)) for number in array], np.int64)
    return array


def simpler_elements(case: Case) -> Iterator[Case]:
    """Rounder numbers, equal ones, zeros and ones."""
    for name, array in arrays_of(case):
        if array.dtype.kind == "f" and array.size:
            finite = np.nan_to_num(array, nan=0, posinf=1, neginf=-1)
            for simple in (np.zeros_like(array), np.ones_like(array), np.round(finite), np.round(finite, 2)):
                if complexity(simple) < complexity(array):
                    yield with_arrays(case, {name: simple.astype(array.dtype)})
        elif array.dtype.kind in "iu" and array.ndim != 1 and np.any(array):
            yield with_arrays(case, {name: np.zeros_like(array)})


def complexity(array: np.ndarray) -> tuple:
    return len(np.unique(array)), float(np.abs(np.nan_to_num(array, posinf=1e9, neginf=1e9)).sum())


PASSES = [
    constants_as_initializers, earlier_outputs, later_inputs, fewer_outputs, bypassed, fewer_inputs, fewer_attributes,
    told_shapes, smaller_sizes, simpler_elements,
]


def weight(case: Case) -> tuple:
    """What is to become less."""
    graph = case.model.graph
    arrays = arrays_of(case)
    elements = sum(array.size for _, array in arrays)
    text = len(case.model.SerializeToString())
    symbols = sum(not dim.HasField("dim_value") for info in graph.input for dim in info.type.tensor_type.shape.dim)
    unknown = sum(not info.type.tensor_type.HasField("shape") for info in graph.input)
    variety = sum(complexity(array)[0] for _, array in arrays)
    return len(graph.node), len(graph.output), elements, len(graph.input), unknown, symbols, variety, text


def reduced(case: Case, verdict: dict, runner: Runner, seconds: float = SECONDS) -> tuple[Case, dict]:
    """The smallest case that was found to come to the same outcome, and what it comes to."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for proposals in PASSES:
            found = first_failing(proposals, case, verdict, runner, end)
            while found:
                case, verdict = found
                progress = True
                found = first_failing(proposals, case, verdict, runner, end)
    return case, verdict


def first_failing(proposals, case: Case, verdict: dict, runner: Runner, end: float):
    before = weight(case)
    for proposal in proposals(case):
        if time.monotonic() > end:
            return None
        try:
            proposal = cleaned(proposal)
            if weight(proposal) >= before:
                continue
            expected = expect(proposal.model, proposal.feeds, proposal.exact)
        except Exception:
            continue
        found = runner.verdict(proposal, expected)
        if kind_of(found) == kind_of(verdict):
            return proposal, found
    return None


def kind_of(verdict: dict) -> tuple[str, ...]:
    """What a smaller model must come to as well: for errors the message without names and
    numbers."""
    if verdict["outcome"] != "fails":
        return (verdict["outcome"],)
    message = verdict["problem"].split(">")[-1].split(";")[0]
    return verdict["outcome"], re.sub(r"'[^']*'|[-0-9.\[\], ]+", " ", message)[:60]
