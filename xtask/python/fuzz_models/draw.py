"""Random draws: numbers, shapes, elements. Each case has a generator of its own, so that it follows
from its seed alone."""

import numpy as np

# Sizes that shapes have: ones broadcast, 4 and 8 fill vectors, the others leave rests.
SIZES = [1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
# The most elements of a value; the reference computes many operators in Python's loops.
MOST_ELEMENTS = 600

FLOATS = (np.float32, np.float64, np.float16)


class Draw:
    def __init__(self, seed: list[int]):
        self.rng = np.random.default_rng(seed)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """From low to high, both among them."""
        return int(self.rng.integers(low, high + 1))

    def choice(self, options):
        return options[int(self.rng.integers(len(options)))]

    def weighted(self, weights: dict):
        options = list(weights)
        share = np.array([weights[option] for option in options], float)
        return options[int(self.rng.choice(len(options), p=share / share.sum()))]

    def some(self, options, count: int | None = None) -> list:
        """A random subset in the order of the options."""
        options = list(options)
        count = self.integer(0, len(options)) if count is None else count
        picked = self.rng.choice(len(options), count, replace=False)
        return [options[index] for index in sorted(picked)]

    def permutation(self, count: int) -> list[int]:
        return [int(index) for index in self.rng.permutation(count)]

    def shape(self, low: int = 0, high: int = 4, most: int = MOST_ELEMENTS) -> tuple[int, ...]:
        rank = self.integer(low, high)
        shape: list[int] = []
        for _ in range(rank):
            room = max(1, most // max(1, int(np.prod(shape))))
            shape.append(self.choice([size for size in SIZES if size <= room]))
        return tuple(shape)

    def broadcastable(self, shape, grow: bool = False) -> tuple[int, ...]:
        """A shape that broadcasts to another one: axes of 1, fewer axes; with `grow` also more axes
        and larger ones."""
        result = [size if self.chance(0.7) else 1 for size in shape]
        if self.chance(0.4):
            result = result[self.integer(0, len(result)):]
        if grow and self.chance(0.25):
            result = [size if size > 1 or self.chance(0.6) else self.choice(SIZES) for size in result]
        if grow and self.chance(0.2) and len(result) < 5:
            result = [self.choice([1, 1, 2, 3])] + [1] * (len(shape) - len(result)) + result
        return tuple(result)

    def ones(self, high: int = 4) -> tuple[int, ...]:
        """The shape of a constant of one element, of any rank."""
        return (1,) * self.weighted({0: 4, 1: 3, 2: 1, 3: 1, 4: 1} if high >= 4 else {0: 4, 1: 3})

    def elements(self, dtype, shape) -> np.ndarray:
        """Elements of a type: mostly tame, now and then with what kernels stumble over."""
        dtype = np.dtype(dtype)
        if dtype == np.bool_:
            return self.rng.random(shape) < self.choice([0.5, 0.5, 0.1, 0.9])
        if dtype.kind in "iu":
            low, high = self.choice([(0, 5), (-9, 9), (-100, 100)])
            info = np.iinfo(dtype)
            return self.rng.integers(max(low, info.min), min(high, info.max) + 1, shape).astype(dtype)
        kind = self.weighted({"normal": 6, "integers": 2, "quarters": 1, "large": 0.5})
        if kind == "normal":
            return self.rng.standard_normal(shape).astype(dtype)
        if kind == "integers":
            return self.rng.integers(-4, 5, shape).astype(dtype)
        if kind == "quarters":
            return (self.rng.integers(-16, 17, shape) / 4).astype(dtype)
        return (self.rng.standard_normal(shape) * 20).astype(dtype)

    def specials(self, array: np.ndarray) -> np.ndarray:
        """The same with NaN, infinities and zeros of both signs here and there."""
        result = np.array(array)
        special = self.rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0]), array.shape)
        return np.where(self.rng.random(array.shape) < 0.15, special, result).astype(array.dtype)
