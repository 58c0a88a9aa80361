"""Resize in all modes, of floats and of codes, and other operators that sample images."""

import numpy as np

from families.elementwise import grow, unary
from graph import Builder, Unfit, Value

TRANSFORMS = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"]
NEAREST = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
TYPES = [np.float32, np.float32, np.float32, np.float64, np.float16, np.uint8, np.int8, np.int32]


def elements(b: Builder, dtype, shape) -> np.ndarray:
    """Now and then of one value, which stays that of a resized image."""
    array = b.draw.elements(dtype, shape)
    return np.full(shape, array.flat[0] if array.size else 0, dtype) if b.draw.chance(0.2) else array


def resize(b: Builder, x: Value) -> Value:
    draw = b.draw
    if x.ndim < 1 or x.array.size == 0 or x.dtype == np.bool_:
        raise Unfit("nothing to resize")
    free = draw.some(range(x.ndim), draw.integer(1, min(2, x.ndim))) if draw.chance(0.2) else range(max(0, x.ndim - 2), x.ndim)
    sizes = list(x.shape)
    for axis in free:
        sizes[axis] = draw.integer(1, 3 * sizes[axis] + 1)
    mode = draw.weighted({"nearest": 3, "linear": 3, "cubic": 1})
    attributes = {"mode": mode, "coordinate_transformation_mode": draw.choice(TRANSFORMS)}
    if mode == "nearest":
        attributes["nearest_mode"] = draw.choice(NEAREST)
    if mode == "cubic":
        attributes["cubic_coeff_a"] = draw.choice([None, -0.5])
        attributes["exclude_outside"] = draw.choice([None, 1])
    if mode != "nearest" and draw.chance(0.15):
        attributes["antialias"] = 1
    if draw.chance(0.5):
        return b.node("Resize", [x, None, None, b.ints(sizes)], **attributes)
    scales = [1.0] * x.ndim
    for axis in free:
        # Half a pixel more than whole sizes, quotients of small numbers, powers of two.
        scales[axis] = draw.choice([2, 3, 0.5, 1.5, (sizes[axis] + 0.01) / x.shape[axis], sizes[axis] / x.shape[axis]])
    scales = np.array(scales, np.float32)
    exact = [int(np.floor(size * float(scale))) for size, scale in zip(x.shape, scales)]
    if min(exact) < 1 or exact != [int(np.float32(size) * scale) for size, scale in zip(x.shape, scales)]:
        raise Unfit("an axis that vanishes, or whose size follows from the rounding of a product")
    return b.node("Resize", [x, None, b.constant(scales)], **attributes)


def grid_sample(b: Builder, x: Value) -> Value:
    if x.ndim != 4 or x.dtype not in (np.float32, np.float64):
        raise Unfit("no image")
    draw = b.draw
    mode = draw.choice(["linear", "nearest", "cubic"] if b.opset >= 20 else ["bilinear", "nearest", "bicubic"])
    # Outside of the image the standard does not say which comes first, padding or the cubic
    # function.
    bound = 0.5 if "cubic" in mode else 1.3
    grid = draw.rng.uniform(-bound, bound, (x.shape[0], draw.integer(1, 4), draw.integer(1, 4), 2)).astype(x.dtype)
    return b.node(
        "GridSample", [x, b.root.input(grid)], mode=mode, align_corners=draw.integer(0, 1),
        padding_mode=draw.choice(["zeros", "border", "reflection"]),
    )


def depth_to_space(b: Builder, x: Value) -> Value:
    if x.ndim != 4 or x.shape[1] % 4:
        raise Unfit("too few channels")
    return b.node("DepthToSpace", [x], blocksize=2, mode=b.draw.choice(["DCR", "CRD"]))


def space_to_depth(b: Builder, x: Value) -> Value:
    if x.ndim != 4 or x.shape[2] % 2 or x.shape[3] % 2:
        raise Unfit("odd sizes")
    return b.node("SpaceToDepth", [x], blocksize=2)


STEPS = [resize, resize, resize, resize, grid_sample, depth_to_space, space_to_depth, unary]


def make(b: Builder) -> None:
    draw = b.draw
    shape = draw.choice([(1, 1, 1, draw.integer(1, 20)), (draw.integer(1, 2), draw.choice([1, 2, 4]), draw.integer(1, 7), draw.integer(1, 7))])
    shape = draw.choice([shape, shape, shape, draw.shape(1, 3, 60)])
    x = b.root.input(elements(b, draw.choice(TYPES), shape))
    x = resize(b, x)
    grow(b, x, STEPS, draw.integer(0, 2))
