"""Ranges of values from statistics that calibration collects: percentiles, entropy, distribution.

The statistics are the engine's observers. Their histograms have 2048 bins for each sign over a power
of two, so that they merge exactly and inputs may come in any order and with any shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..capi._pybind_state import Calibration

_METHODS = ("distribution", "entropy", "percentile")
_SCENARIOS = {"same": 1.0, "p3": 1 / 3}
#: The bins that a distribution has at least.
_LEAST_BINS = 512


class CalibrationDataCollector:
    """Base class of what collects values by name and makes ranges of them."""

    def collect(self, name_to_arr: Mapping[str, Any]) -> None:
        """Takes the values of a run, or of several: an array for each name, or a list of them."""
        raise NotImplementedError

    def compute_collection_result(self) -> dict[str, Any]:
        """Returns the result for each name."""
        raise NotImplementedError


class Bins(NamedTuple):
    """The counts of values between edges that ascend."""

    counts: np.ndarray
    edges: np.ndarray


class HistogramCollector(CalibrationDataCollector):
    """Statistics of values by name, and the ranges that a method makes of them.

    Args:
        method: `percentile`, `entropy` or `distribution`.
        symmetric: values are clipped at the same magnitude on both sides.
        num_bins: the bins of a distribution. The other methods always use all bins of the observers.
        num_quantized_bins: the codes for each sign, for `entropy`.
        percentile: the share of values within the range, in percent.
        scenario: `same` for the values, `p3` for their cube roots, for `distribution`.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(
        self,
        method: str,
        symmetric: bool,
        num_bins: int,
        num_quantized_bins: int,
        percentile: float,
        scenario: str,
    ) -> None:
        if method not in _METHODS:
            raise ValueError(f"there is no method {method!r}: {', '.join(_METHODS)}")
        if method == "percentile" and not 50 <= percentile <= 100:
            raise ValueError(f"Invalid percentile {percentile}: must be in range 50 to 100.")
        if method == "entropy" and num_quantized_bins < 1:
            raise ValueError(f"num_quantized_bins must be at least 1, not {num_quantized_bins}")
        if method == "distribution" and num_bins < _LEAST_BINS:
            raise ValueError(f"Invalid num_bins {num_bins}: must be at least {_LEAST_BINS}.")
        if method == "distribution" and scenario not in _SCENARIOS:
            raise ValueError(f"there is no scenario {scenario!r}: {', '.join(_SCENARIOS)}")
        self.method = method
        self.symmetric = symmetric
        self.num_bins = num_bins
        self.num_quantized_bins = num_quantized_bins
        self.percentile = percentile
        self.scenario = scenario
        self._observers: dict[str, Calibration] = {}
        self._types: dict[str, Any] = {}

    def observers(self, types: Mapping[str, Any]) -> Calibration:
        """Returns new observers for values of these types by name, whose statistics are collected."""
        made = Calibration(list(types), True, self.method == "distribution")
        self._observers.update(dict.fromkeys(types, made))
        self._types.update(types)
        return made

    def collect(self, name_to_arr: Mapping[str, Any]) -> None:
        """Takes the values of a run, or of several: an array for each name, or a list of them."""
        for name, arrays in name_to_arr.items():
            for array in arrays if isinstance(arrays, list | tuple) else [arrays]:
                array = np.asarray(array)
                if name not in self._observers:
                    self.observers({name: array.dtype})
                # The observer counts float32.
                self._observers[name].observe(name, np.ascontiguousarray(array, np.float32))

    def compute_collection_result(self) -> dict[str, Any]:
        """Returns `(lowest, highest)` for each name, or `(avg, std, hist, hist_edges)`.

        Raises:
            ValueError: nothing was collected.
        """
        if not self._observers:
            raise ValueError("Histogram has not been collected. Please run collect() first.")
        compute = {
            "distribution": self._distribution,
            "entropy": self._entropy,
            "percentile": self._percentile,
        }[self.method]
        return {name: compute(name, observer) for name, observer in self._observers.items()}

    def get_histogram_dict(self) -> dict[str, tuple[Any, ...]]:
        """Returns `(counts, edges, least, largest, largest magnitude)` for each name."""
        found = {}
        for name, observer in self._observers.items():
            least, largest = observer.extremes(name) or (0.0, 0.0)
            ends = (least, largest, max(-least, largest))
            found[name] = (*_bins(name, observer), *(np.float32(end) for end in ends))
        return found

    def _range(self, name: str, ends: tuple[float, float] | None) -> tuple[Any, Any]:
        """Returns a range in the type of the value, as tight as the values that were seen.

        One of no finite element has no extent.
        """
        low, high = ends or (0.0, 0.0)
        least, largest = self._observers[name].extremes(name) or (0.0, 0.0)
        real = np.dtype(self._types[name]).type
        return real(max(least, low)), real(min(largest, high))

    def _percentile(self, name: str, observer: Calibration) -> tuple[Any, Any]:
        share = self.percentile / 100
        return self._range(name, observer.percentile(name, share, self.symmetric))

    def _entropy(self, name: str, observer: Calibration) -> tuple[Any, Any]:
        ends = observer.entropy(name, self.num_quantized_bins, self.symmetric)
        return self._range(name, ends)

    def _distribution(self, name: str, observer: Calibration) -> tuple[Any, ...]:
        bins = _bins(name, observer)
        mean, deviation = observer.moments(name) or (0.0, 0.0)
        power = _SCENARIOS[self.scenario]
        if power != 1.0:
            mean, deviation = _moments_of_power(name, observer, power)
        real = np.dtype(self._types[name]).type
        return np.array(mean, real), np.array(deviation, real), *_resampled(bins, self.num_bins)


def _bins(name: str, observer: Calibration) -> Bins:
    """Returns the bins of both signs that have elements. Zeros are in the first positive one."""
    negative, positive, width = observer.histogram(name) or (np.zeros(1), np.zeros(1), 1.0)
    counts = np.concatenate([negative[::-1], positive]).astype(np.int64)
    zero = len(negative)
    counts[zero] += observer.counts(name)[1]
    used = np.flatnonzero(counts)
    first, last = (used[0], used[-1] + 1) if used.size else (zero, zero + 1)
    edges = (np.arange(first, last + 1) - zero) * width
    return Bins(counts[first:last], edges.astype(np.float32))


def _moments_of_power(name: str, observer: Calibration, power: float) -> tuple[float, float]:
    """Returns mean and standard deviation of a power of the magnitudes, with their signs."""
    found = observer.histogram(name)
    elements, zeros, nan, infinite = observer.counts(name)
    if found is None or elements == nan + infinite:
        return 0.0, 0.0
    negative, positive, width = found
    powers = ((np.arange(len(positive)) + 0.5) * width) ** power
    count = float(elements - nan - infinite)
    mean = float((positive.astype(np.float64) - negative) @ powers) / count
    square = float((positive.astype(np.float64) + negative) @ powers**2) / count
    return mean, max(square - mean * mean, 0.0) ** 0.5


def _resampled(bins: Bins, count: int) -> Bins:
    """Returns a number of bins of equal width; the counts of one are spread evenly over it."""
    edges = np.linspace(bins.edges[0], bins.edges[-1], count + 1)
    below = np.concatenate([[0], np.cumsum(bins.counts)])
    # Rounded sums: the counts stay whole numbers that add up.
    sums = np.rint(np.interp(edges, bins.edges, below)).astype(np.int64)
    return Bins(np.diff(sums), edges.astype(np.float32))
