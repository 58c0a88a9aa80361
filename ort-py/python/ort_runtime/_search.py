"""The largest size within a limit, by doubling and halving."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_fitting"]


def largest_fitting(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number up to `most` that fits, 0 if 1 does not.

    What fits, fits at all smaller numbers.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
