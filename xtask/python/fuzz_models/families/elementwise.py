"""Chains of elementwise operators: activations in their spellings, broadcasting, constants of one
element, NaN."""

import numpy as np

from draw import FLOATS
from graph import Builder, Unfit, Value

UNARY = (
    "Abs Neg Relu Sigmoid Tanh Exp Sqrt Erf Softplus Softsign Reciprocal Log Sin Cos Tan Atan Asin Acos Sinh Cosh Asinh"
    " Acosh Atanh Floor Ceil Round Sign Identity Gelu HardSwish Mish Selu Elu LeakyRelu HardSigmoid ThresholdedRelu Celu"
).split()
# Those that models mostly have, and that rules look for.
COMMON = "Relu Sigmoid Tanh Exp Sqrt Erf Neg Abs HardSwish HardSigmoid LeakyRelu Elu Softplus Gelu Mish".split()
BINARY = "Add Sub Mul Div Max Min Pow".split()
FIRST_OPSETS = {"Gelu": 20}
ATTRIBUTES = {
    "LeakyRelu": {"alpha": (0.01, 0.3)},
    "Elu": {"alpha": (0.3, 1.5)},
    "Celu": {"alpha": (0.3, 1.5)},
    "ThresholdedRelu": {"alpha": (0.1, 1.5)},
    "HardSigmoid": {"alpha": (0.1, 0.4), "beta": (0.2, 0.7)},
    "Selu": {"alpha": (1.2, 1.8), "gamma": (0.9, 1.2)},
}


def is_float(value: Value) -> bool:
    return value.dtype in (np.float16, np.float32, np.float64)


def number(b: Builder, x: Value, value: float, fed: bool = True) -> Value:
    """A constant of one element with a rank of its own."""
    return b.constant(np.full(b.draw.ones(), value, x.dtype), fed)


def same_type(b: Builder, x: Value) -> list[Value]:
    return [v for v in b.made + b.inputs if v.dtype == x.dtype and v.name != x.name and v.array.size]


def partner(b: Builder, x: Value) -> Value:
    """Another operand for x."""
    draw = b.draw
    kind = draw.weighted({"number": 4, "constant": 3, "input": 2, "value": 2, "itself": 0.5})
    if kind == "number":
        plain = draw.choice([0, 1, 2, -1, 0.5, 3, 0.1, 6, 1 / 3, -2.5, 1e-6])
        return number(b, x, plain if is_float(x) else abs(int(plain)))
    if kind == "itself":
        return x
    if kind == "value":
        fitting = [v for v in same_type(b, x) if broadcasts(v.shape, x.shape)]
        if fitting:
            return draw.choice(fitting)
    array = draw.elements(x.dtype, draw.broadcastable(x.shape, grow=True))
    return b.constant(array) if kind == "constant" else b.root.input(array)


def broadcasts(one, other) -> bool:
    try:
        return np.prod(np.broadcast_shapes(one, other)) <= 1000
    except ValueError:
        return False


def unary(b: Builder, x: Value, op: str | None = None) -> Value:
    draw = b.draw
    op = op or (draw.choice(COMMON) if draw.chance(0.6) else draw.choice(UNARY))
    if FIRST_OPSETS.get(op, 1) > b.opset:
        op = "Tanh"
    attributes = {name: draw.rng.uniform(*bounds) for name, bounds in ATTRIBUTES.get(op, {}).items()}
    if draw.chance(0.3):
        attributes = {}
    if op == "Gelu" and draw.chance(0.3):
        attributes = {"approximate": "tanh"}
    if not is_float(x):
        op, attributes = draw.choice(["Abs", "Neg", "Relu", "Identity", "Sign"]), {}
        if x.dtype.kind == "u" or x.dtype == np.bool_:
            op = "Identity"
    return b.node(op, [x], **attributes)


def binary(b: Builder, x: Value) -> Value:
    op = b.draw.choice(BINARY if is_float(x) else ["Add", "Sub", "Mul", "Max", "Min"])
    if x.dtype == np.bool_:
        op = b.draw.choice(["And", "Or", "Xor", "Equal"])
    other = partner(b, x)
    operands = [x, other] if b.draw.chance(0.7) else [other, x]
    if op == "Pow" and is_float(x) and b.draw.chance(0.7):
        operands = [x, number(b, x, b.draw.choice([2, 3, 0.5, 1, -1, 0]))]
    return b.node(op, operands)


def clip(b: Builder, x: Value) -> Value:
    if x.dtype == np.bool_:
        raise Unfit("Clip of booleans")
    draw = b.draw
    low, high = sorted(draw.choice([[0, 6], [-1, 1], [0.1, 0.7], [-0.3, 1.7], [-2.5, -0.1], [0, 0]]))
    bounds = [b.constant(np.array(bound).astype(x.dtype)) if draw.chance(0.85) else None for bound in (low, high)]
    return b.node("Clip", [x, *(bounds if bounds[1] else bounds[:1] if bounds[0] else [])])


def where(b: Builder, x: Value) -> Value:
    draw = b.draw
    other = partner(b, x)
    if draw.chance(0.4) and x.dtype.kind in "fiu":
        condition = b.node(draw.choice(["Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"]), [x, partner(b, x)])
    else:
        condition = b.random(np.bool_, draw.broadcastable(x.shape, grow=True))
    choices = [x, other] if draw.chance(0.5) else [other, x]
    return b.node("Where", [condition, *choices])


def several(b: Builder, x: Value) -> Value:
    if x.dtype == np.bool_:
        raise Unfit("Max of booleans")
    op = b.draw.choice(["Max", "Min", "Sum", "Mean"]) if is_float(x) else b.draw.choice(["Max", "Min"])
    return b.node(op, [x, *(partner(b, x) for _ in range(b.draw.integer(0, 2)))])


def prelu(b: Builder, x: Value) -> Value:
    if not is_float(x):
        raise Unfit("PRelu of integers")
    slope = b.draw.elements(x.dtype, b.draw.broadcastable(x.shape))
    return b.node("PRelu", [x, b.constant(slope)])


def cast(b: Builder, x: Value) -> Value:
    to = b.draw.choice([np.float32, np.float32, np.float64, np.float16, np.int32, np.int64, np.bool_])
    if is_float(x) and np.dtype(to).kind == "i" and not np.all(np.abs(x.array) < 1e4):
        raise Unfit("a cast out of range")
    from onnx import helper

    if b.draw.chance(0.2):
        return b.node("CastLike", [x, b.constant(np.zeros(1, to))])
    return b.node("Cast", [x], to=helper.np_dtype_to_tensor_dtype(np.dtype(to)))


def modulo(b: Builder, x: Value) -> Value:
    if not is_float(x) and x.dtype == np.bool_:
        raise Unfit("Mod of booleans")
    divisor = number(b, x, b.draw.choice([2, 3, 5]))
    return b.node("Mod", [x, divisor], fmod=1 if is_float(x) else b.draw.integer(0, 1))


# Activations in the words of exporters. `~` stands for constants that may be other ones.


def constant_near(b: Builder, x: Value, value: float) -> Value:
    return number(b, x, value if b.draw.chance(0.85) else b.draw.choice([value + 0.5, 2, 1, 0]))


def swapped(b: Builder, op: str, one: Value, other: Value) -> Value:
    return b.node(op, [one, other] if b.draw.chance(0.6) else [other, one])


def spelled_silu(b: Builder, x: Value) -> Value:
    inner = x if b.draw.chance(0.5) else swapped(b, "Mul", x, constant_near(b, x, 1.702))
    return swapped(b, "Mul", x, b.node("Sigmoid", [inner]))


def spelled_gelu(b: Builder, x: Value) -> Value:
    draw = b.draw
    if draw.chance(0.5):
        inner = b.node("Div", [x, constant_near(b, x, np.sqrt(2))])
    else:
        inner = swapped(b, "Mul", x, constant_near(b, x, np.sqrt(0.5)))
    return halved(b, x, swapped(b, "Add", b.node("Erf", [inner]), constant_near(b, x, 1)))


def spelled_gelu_tanh(b: Builder, x: Value) -> Value:
    cube = b.node("Pow", [x, number(b, x, 3)]) if b.draw.chance(0.5) else b.node("Mul", [b.node("Mul", [x, x]), x])
    inner = swapped(b, "Add", x, swapped(b, "Mul", cube, constant_near(b, x, 0.044715)))
    tanh = b.node("Tanh", [swapped(b, "Mul", inner, constant_near(b, x, np.sqrt(2 / np.pi)))])
    return halved(b, x, swapped(b, "Add", tanh, constant_near(b, x, 1)))


def halved(b: Builder, x: Value, gate: Value) -> Value:
    half = constant_near(b, x, 0.5)
    order = b.draw.integer(0, 2)
    if order == 0:
        return swapped(b, "Mul", swapped(b, "Mul", x, gate), half)
    if order == 1:
        return swapped(b, "Mul", swapped(b, "Mul", x, half), gate)
    return swapped(b, "Mul", x, swapped(b, "Mul", half, gate))


def spelled_hard(b: Builder, x: Value) -> Value:
    """HardSigmoid and HardSwish of Add, Clip and a quotient or a product."""
    bounds = [b.constant(np.array(bound, x.dtype)) for bound in (0, 6 if b.draw.chance(0.8) else 5)]
    gate = b.node("Clip", [swapped(b, "Add", x, constant_near(b, x, 3)), *bounds])
    gate = gate if b.draw.chance(0.4) else swapped(b, "Mul", x, gate)
    if b.draw.chance(0.5):
        return b.node("Div", [gate, constant_near(b, x, 6)])
    return swapped(b, "Mul", gate, constant_near(b, x, 1 / 6))


def spelled_softplus(b: Builder, x: Value) -> Value:
    y = b.node("Log", [swapped(b, "Add", b.node("Exp", [x]), constant_near(b, x, 1))])
    return y if b.draw.chance(0.5) else swapped(b, "Mul", x, b.node("Tanh", [y]))


def spelled_relu(b: Builder, x: Value) -> Value:
    zero = constant_near(b, x, 0)
    return b.node("Max", [x, zero] if b.draw.chance(0.5) else [zero, x])


def twice(b: Builder, x: Value) -> Value:
    """Pairs that cancel, or are one."""
    op = b.draw.choice(["Neg", "Relu", "Identity", "Abs", "Floor", "Sigmoid"])
    return b.node(op, [b.node(op, [x])])


def neutral(b: Builder, x: Value) -> Value:
    """What does nothing to elements, and something to shapes if the constant has more axes."""
    op, value = b.draw.choice([("Add", 0), ("Sub", 0), ("Mul", 1), ("Div", 1), ("Pow", 1), ("Pow", 2)])
    if x.dtype == np.bool_ or (op == "Pow" and x.dtype in (np.int8, np.uint8)):
        raise Unfit("no arithmetic of this type")
    operands = [x, number(b, x, value)]
    if op in ("Add", "Mul") and b.draw.chance(0.4):
        operands.reverse()
    return b.node(op, operands)


SPELLED = [
    spelled_silu, spelled_gelu, spelled_gelu_tanh, spelled_hard, spelled_softplus, spelled_relu, twice, neutral, neutral,
]
STEPS = [unary, unary, unary, binary, binary, binary, clip, where, several, prelu, cast, modulo, neutral]


def float_type(b: Builder):
    return b.draw.choice([np.float32, np.float32, np.float32, np.float64, np.float64, np.float16])


def start(b: Builder, dtype, shape) -> Value:
    array = b.draw.elements(dtype, shape)
    if np.dtype(dtype).kind == "f" and b.draw.chance(0.25):
        array = b.draw.specials(array)
    return b.root.input(array)


def grow(b: Builder, x: Value, steps: list, count: int) -> Value:
    """Applies random steps; those that do not fit are left out."""
    for _ in range(count):
        try:
            x = b.draw.choice(steps)(b, x)
        except Unfit:
            continue
    return x


def make(b: Builder) -> None:
    dtype = b.draw.choice([*FLOATS, np.float32, np.float32, np.float64, np.int32, np.int64, np.int8, np.uint8, np.bool_])
    x = start(b, dtype, b.draw.shape(0, 4, 120))
    grow(b, x, STEPS, b.draw.integer(1, 8))


def make_wide(b: Builder) -> None:
    """Enough elements for several threads: where work is cut must not show."""
    draw = b.draw
    size = draw.choice([20000, 33333, 70001])
    shape = draw.choice([(size,), (size // 7, 7), (3, size // 3)])
    array = draw.rng.standard_normal(shape).astype(draw.choice([np.float32, np.float32, np.float64, np.float16]))
    # Most arguments are small, some are large: whole vectors of both, and mixed ones.
    large = draw.rng.random(shape) < draw.choice([0, 0.02, 0.2])
    array = np.where(large, array * draw.choice([100, 1e4, 1e6]), array).astype(array.dtype)
    x = b.root.input(array)
    for _ in range(draw.integer(1, 3)):
        x = unary(b, x, draw.choice(UNARY))


def make_spelled(b: Builder) -> None:
    x = start(b, float_type(b), b.draw.shape(0, 4, 120))
    if b.draw.chance(0.3):
        x = grow(b, x, [unary, binary], 1)
    x = grow(b, x, SPELLED, b.draw.integer(1, 3))
    if b.draw.chance(0.5):
        grow(b, x, [unary, binary, clip], 1)
