"""The Hessians of GPTQ: one pass over the samples for all weights, or a few if they are many."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from .. import GraphOptimizationLevel, InferenceSession, SessionOptions
from ..capi._pybind_state import HessianCalibration

#: The bytes that Hessians and their factors take at a time.
_MOST_BYTES = 1 << 30
#: The bytes for each element of a Hessian: half of a square of float64 twice, and of float32.
_ELEMENT_BYTES = 12


class Hessians:
    """The Hessians of the values that weights are multiplied with.

    Args:
        source: the model, or its path.
        reader: the samples.
        channels: the length of the last axis of each value.

    Raises:
        ValueError: there are no samples.
    """

    def __init__(self, source: Any, reader: Any, channels: Mapping[str, int]) -> None:
        if reader is None:
            raise ValueError("GPTQ needs samples: give GPTQWeightOnlyQuantConfig a reader")
        self._parts: list[tuple[set[str], HessianCalibration]] = []
        with _session(source) as session:
            groups = list(_groups(channels))
            # With one group each sample is let go after its run.
            samples = iter(reader.get_next, None)
            kept = samples if len(groups) < 2 else list(_until_empty(samples))
            for group in groups:
                calibration = HessianCalibration(group)
                count = 0
                for sample in _until_empty(iter(kept)):
                    calibration.run(session._sess, dict(sample))
                    count += 1
                if not count:
                    raise ValueError("No data is collected.")
                self._parts.append((set(group), calibration))

    def of(self, name: str) -> HessianCalibration | None:
        """Returns what has the Hessian of a value, None if the value has none."""
        return next((held for names, held in self._parts if name in names), None)


def _until_empty(samples: Iterator[Any]) -> Iterator[Any]:
    for sample in samples:
        if not sample:
            return
        yield sample


def _groups(channels: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields values whose Hessians fit in memory together, or are alone."""
    group: dict[str, int] = {}
    held = 0
    for name, count in channels.items():
        size = count * count * _ELEMENT_BYTES
        if group and held + size > _MOST_BYTES:
            yield group
            group, held = {}, 0
        group[name] = count
        held += size
    if group:
        yield group


class _session:
    """A session in which each value of a model is computed."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> InferenceSession:
        options = SessionOptions()
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
        source = self.source
        if isinstance(source, ModelProto):
            if source.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
                source = source.SerializeToString()
            else:
                self.folder = tempfile.TemporaryDirectory()
                source = os.fspath(Path(self.folder.name) / "model.onnx")
                copy = ModelProto()
                copy.CopyFrom(self.source)
                onnx.save(copy, source, save_as_external_data=True)
        return InferenceSession(source, options, providers=["CPUExecutionProvider"])

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            self.folder.cleanup()
