"""Ranges of values by name, and the JSON in which calibrations are kept and exchanged.

The format is that of `onnxruntime.quantization`: arrays are objects with `data` and `dtype`, and
each object says its class in `CLS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np


class CalibrationMethod(Enum):
    """How ranges are made of the values that were seen."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class TensorData:
    """What is known of a value: `lowest` and `highest`, or `avg` and `std`, and a histogram.

    Raises:
        ValueError: another name, or a number that is no NumPy array or scalar of floats.

    Example:
        >>> data = TensorData(lowest=np.float32(-1), highest=np.float32(2))
        >>> data.range_value
        (np.float32(-1.0), np.float32(2.0))
    """

    _allowed = frozenset(["avg", "std", "lowest", "highest", "hist", "hist_edges", "bins"])
    _floats = frozenset(["avg", "std", "lowest", "highest", "hist_edges"])

    lowest: Any
    highest: Any
    avg: Any
    std: Any

    def __init__(self, **kwargs: Any) -> None:
        self._attrs = list(kwargs)
        for name, value in kwargs.items():
            if name not in self._allowed:
                raise ValueError(f"Unexpected value {name!r} not in {sorted(self._allowed)}.")
            if name in self._floats:
                dtype = getattr(value, "dtype", None)
                if dtype is None:
                    raise ValueError(f"Unexpected type {type(value)} for k={name!r}")
                if dtype not in (np.float16, np.float32):
                    raise ValueError(f"Unexpected dtype {dtype} for k={name!r}")
            setattr(self, name, value)

    @property
    def range_value(self) -> tuple[Any, Any]:
        """The least and the largest value, AttributeError if they are not known."""
        return self._pair("lowest", "highest")

    @property
    def avg_std(self) -> tuple[Any, Any]:
        """Mean and standard deviation, AttributeError if they are not known."""
        return self._pair("avg", "std")

    def _pair(self, first: str, second: str) -> tuple[Any, Any]:
        if first not in self._attrs or second not in self._attrs:
            raise AttributeError(f"Attributes {first!r} and/or {second!r} missing in {self._attrs}.")
        return getattr(self, first), getattr(self, second)

    def to_dict(self) -> dict[str, Any]:
        """Returns the values by name, and the name of the class."""
        return {name: getattr(self, name) for name in self._attrs} | {"CLS": "TensorData"}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> TensorData:
        """Returns what `to_dict` has returned; numbers become arrays of float32."""
        return cls(
            **{
                name: np.array(value, np.float32) if isinstance(value, int | float) else value
                for name, value in d.items()
                if name != "CLS"
            }
        )


class TensorsData:
    """What a calibration has found for each value by name.

    Args:
        calibration_method: the method that found it.
        data: a `TensorData` for each name, or a tuple: `(lowest, highest)` with or without
            `(hist, bins)`, or `(avg, std, hist, hist_edges)` for the method Distribution.

    Raises:
        TypeError: something else.
    """

    def __init__(
        self,
        calibration_method: CalibrationMethod,
        data: Mapping[str, TensorData | tuple[Any, ...]],
    ) -> None:
        self.calibration_method = calibration_method
        self.data = {name: self._wrapped(name, value) for name, value in data.items()}
        #: Whether the ranges are those of a model after SmoothQuant.
        self.smooth_quant = False

    def _wrapped(self, name: str, value: Any) -> TensorData:
        if isinstance(value, TensorData):
            return value
        if not isinstance(value, tuple):
            raise TypeError(f"Values must be TensorData not {type(value)}.")
        names: tuple[str, ...] = ("lowest", "highest", "hist", "bins")
        if self.calibration_method == CalibrationMethod.Distribution:
            names = ("avg", "std", "hist", "hist_edges")
        if len(value) not in (2, len(names)):
            raise TypeError(f"Unexpected tuple of {len(value)} for {name!r}: expected {names}.")
        return TensorData(**dict(zip(names, value)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def __getitem__(self, key: str) -> TensorData:
        return self.data[key]

    def __setitem__(self, key: str, value: TensorData) -> None:
        """Replaces what is known of a value; RuntimeError for a new one."""
        if key not in self.data:
            raise RuntimeError(f"Only an existing tensor can be modified, {key!r} is not.")
        self.data[key] = value

    def keys(self) -> Iterable[str]:
        """Returns the names of the values."""
        return self.data.keys()

    def values(self) -> Iterable[TensorData]:
        """Returns what is known of the values."""
        return self.data.values()

    def items(self) -> Iterable[tuple[str, TensorData]]:
        """Returns names, and what is known of the values."""
        return self.data.items()

    def to_dict(self) -> dict[str, Any]:
        """Returns data, method, and the name of the class."""
        return {
            "CLS": "TensorsData",
            "data": self.data,
            "calibration_method": self.calibration_method,
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> TensorsData:
        """Returns what `to_dict` has returned."""
        return cls(d["calibration_method"], d["data"])


class CalibrationCacheEncoder(json.JSONEncoder):
    """Writes calibrations as JSON."""

    def default(self, obj: Any) -> Any:
        """Returns what JSON has for an object."""
        if isinstance(obj, TensorData | TensorsData):
            return obj.to_dict()
        if isinstance(obj, np.ndarray):
            return {"data": obj.tolist(), "dtype": str(obj.dtype), "CLS": "numpy.array"}
        if isinstance(obj, np.generic):
            return obj.item()
        if isinstance(obj, CalibrationMethod):
            return {"CLS": "CalibrationMethod", "value": str(obj)}
        return super().default(obj)


def _decoded(found: dict[str, Any]) -> Any:
    """Returns the object that a JSON object stands for."""
    kind = found.get("CLS")
    if kind == "numpy.array":
        return np.array(found["data"], found["dtype"])
    if kind == "TensorData":
        return TensorData.from_dict(found)
    if kind == "CalibrationMethod":
        return CalibrationMethod[str(found["value"]).rpartition(".")[2]]
    return found


def save_tensors_data(
    tensors_data: TensorsData, path: str | os.PathLike[str], *, smooth_quant: bool = False
) -> None:
    """Writes a calibration to a file, which `quantize_static` reads as `calibration_cache_path`.

    Args:
        tensors_data: the calibration.
        path: the file; nothing is left there if it cannot be written.
        smooth_quant: whether the ranges are those of a model after SmoothQuant.
    """
    whole = tensors_data.to_dict() | {"smooth_quant": smooth_quant}
    text = json.dumps(whole, cls=CalibrationCacheEncoder)
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_tensors_data(path: str | os.PathLike[str]) -> TensorsData:
    """Reads a calibration that `save_tensors_data` or `ort quantize --calibration` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no calibration.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"Calibration cache not found: {os.fspath(path)}")
    with open(path, encoding="utf-8") as file:
        try:
            whole = json.load(file, object_hook=_decoded)
            if whole["CLS"] != "TensorsData":
                raise KeyError("CLS")
            loaded = TensorsData.from_dict(whole)
        except (KeyError, TypeError, ValueError) as problem:
            text = f"{os.fspath(path)} is no calibration: {problem!r}"
            raise ValueError(text) from problem
    loaded.smooth_quant = bool(whole.get("smooth_quant", False))
    return loaded
