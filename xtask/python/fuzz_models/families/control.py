"""If, Loop and Scan: bodies with values of their parents, no iterations at all, sizes that only the
run tells."""

import numpy as np

from families.elementwise import STEPS as ELEMENTWISE
from families.elementwise import float_type, grow
from families.linear import STEPS as LINEAR
from families.movement import STEPS as MOVEMENT
from families.reduction import STEPS as REDUCTION
from graph import Builder, Unfit, Value

# What keeps the shape of what is carried from one iteration to the next.
KEEPING = ["Neg", "Abs", "Tanh", "Sigmoid", "Relu", "Identity"]


def any_step(b: Builder, x: Value) -> Value:
    return grow(b, x, [*ELEMENTWISE, *LINEAR, *MOVEMENT, *REDUCTION], b.draw.integer(1, 2))


def keeping(b: Builder, x: Value) -> Value:
    """A value of the same shape and type."""
    draw = b.draw
    if draw.chance(0.5):
        other = captured(b, x) if draw.chance(0.6) else b.constant(draw.elements(x.dtype, draw.broadcastable(x.shape)))
        return b.node(draw.choice(["Add", "Mul", "Sub", "Max"]), [x, other])
    return b.node(draw.choice(KEEPING), [x])


def captured(b: Builder, x: Value) -> Value:
    """A value of the parent with the type and shape of x, made if there is none."""
    root = b.root
    fitting = [v for v in root.made + root.inputs if v.dtype == x.dtype and v.shape == x.shape]
    return b.draw.choice(fitting) if fitting else root.input(b.draw.elements(x.dtype, x.shape))


def choice(b: Builder, x: Value) -> Value:
    """If; the branches may differ in the shapes of what they give."""
    draw = b.draw
    condition = b.root.input(np.array(draw.chance(0.5)))
    if draw.chance(0.2):
        condition = b.constant(np.array(draw.chance(0.5)))
    branches, same = [], draw.chance(0.5)
    for _ in range(2):
        body = Builder(draw, b)
        y = body.node("Identity", [x]) if draw.chance(0.3) else keeping(body, x)
        if not same and draw.chance(0.5):
            y = grow(body, y, MOVEMENT, 1)
        branches.append((body, y))
    (yes, one), (no, other) = branches
    if one.dtype != other.dtype:
        raise Unfit("branches of two types")
    made_here = [value for body, _ in branches for value in body.made]
    if one not in made_here or other not in made_here:
        raise Unfit("a branch of nothing")
    return b.node("If", [condition], then_branch=yes.body([one]), else_branch=no.body([other]))


def loop(b: Builder, x: Value) -> Value:
    """Loop that carries x; with outputs that are stacked, and an end that is known, given or
    computed."""
    draw = b.draw
    count = draw.weighted({0: 3, 1: 1, 2: 2, 3: 2})
    begins = None if draw.chance(0.6) else draw.chance(0.7)
    is_empty = count == 0 or begins is False
    stacks = draw.chance(0.7)
    style = b.root.style
    is_static = not (style.symbolic or style.ranks or style.veils or style.fed)
    if is_empty and stacks and not is_static:
        # The items of no iteration have the sizes of what is carried, as far as the model tells
        # them.
        stacks = x.name in {value.name for value in b.root.inputs}
        b.root.ranks_known.add(x.name)
    trips = np.array(count, np.int64)
    trips = b.constant(trips) if draw.chance(0.3) else b.root.input(trips)
    condition = None if begins is None else b.root.input(np.array(begins))
    body = Builder(draw, b)
    number, goes_on = Value(b.name("i"), np.array(0, np.int64)), Value(b.name("k"), np.array(True))
    carried = Value(b.name("s"), x.array)
    body.inputs = [number, goes_on, carried]
    if draw.chance(0.7) or condition is None:
        next_goes_on = body.node("Identity", [goes_on])
    else:
        next_goes_on = body.node("Less", [number, body.ints(draw.integer(0, 2))])
    y = keeping(body, carried)
    results, scans = [next_goes_on, y], []
    if stacks:
        is_free = draw.chance(0.6) and (not is_empty or is_static)
        scans.append(any_step(body, y) if is_free else body.node("Mul", [y, y]))
        if scans[0] in (y, carried):
            scans = [body.node("Neg", [y])]
    graph = body.body(results + scans, body.inputs)
    outputs = b.nodes_of("Loop", [trips, condition, x], 1 + len(scans), body=graph)
    if len(outputs) > 1 and outputs[1].ndim and draw.chance(0.6):
        total = b.node("ReduceSum", [outputs[1], b.ints([0])], keepdims=0)
        return b.node("Add", [total, x]) if total.shape == x.shape else total
    return outputs[0]


def scan(b: Builder, x: Value) -> Value:
    draw = b.draw
    if x.ndim < 1 or 0 in x.shape:
        raise Unfit("nothing to scan")
    axis = draw.integer(0, x.ndim - 1)
    item = np.take(x.array, 0, axis)
    state = b.root.input(draw.elements(x.dtype, item.shape))
    body = Builder(draw, b)
    own, element = Value(b.name("s"), state.array), Value(b.name("e"), item)
    body.inputs = [own, element]
    total = body.node(draw.choice(["Add", "Max", "Sub"]), [own, element])
    scanned = any_step(body, total)
    scanned = scanned if scanned is not total and scanned in body.made else body.node("Neg", [total])
    graph = body.body([total, scanned], body.inputs)
    attributes = {"scan_input_axes": [axis], "scan_input_directions": [draw.integer(0, 1)]}
    return b.nodes_of("Scan", [state, x], 2, body=graph, num_scan_inputs=1, **attributes)[1]


STEPS = [choice, choice, loop, loop, scan]


def make(b: Builder) -> None:
    x = b.root.input(b.draw.elements(float_type(b), b.draw.shape(0, 3, 60)))
    if b.draw.chance(0.4):
        x = any_step(b, x)
    x = grow(b, x, STEPS, b.draw.integer(1, 2))
    if b.draw.chance(0.5):
        any_step(b, x)
