"""Tables of ranges that TensorRT reads: JSON, FlatBuffers and lines of text."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ._ranges import CalibrationCacheEncoder, TensorData


def _magnitude(data: Any) -> str:
    """Returns the larger end of a range as text."""
    low, high = data.range_value if isinstance(data, TensorData) else data
    return str(max(float(np.max(high)), float(np.max(low))))


def write_calibration_table(calibration_cache: Any, dir: str | os.PathLike[str] = ".") -> None:
    """Writes `calibration.json`, `calibration.flatbuffers` and `calibration.cache`.

    Args:
        calibration_cache: what a calibration has found, a `TensorsData` or a dict of `TensorData`
            or pairs of numbers by name.
        dir: the folder.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(dir)
    entries = sorted((name, _magnitude(data)) for name, data in calibration_cache.items())
    text = json.dumps(calibration_cache, cls=CalibrationCacheEncoder)
    (folder / "calibration.json").write_text(text, encoding="utf-8")
    (folder / "calibration.flatbuffers").write_bytes(_flatbuffer(entries))
    lines = "".join(f"{name} {value}\n" for name, value in entries)
    (folder / "calibration.cache").write_text(lines, encoding="utf-8")


def _flatbuffer(entries: Iterable[tuple[str, str]]) -> bytes:
    """Returns a table `{dict: [{key: string, value: string}]}` in the format of FlatBuffers.

    An offset counts from its own place, and goes forwards to a vector, a table or a string. A table
    begins with the distance back to its vtable: the sizes of both, and the place of each field.
    """
    texts = [[part.encode() for part in entry] for entry in entries]
    # The root's place; a vtable of one field; the root, whose field is the vector behind it.
    data = bytearray(struct.pack("<I3HHiII", 12, 6, 8, 4, 0, 8, 4, len(texts)))
    slots = len(data)
    data += bytes(4 * len(texts))
    data += struct.pack("<4H", 8, 12, 4, 8)
    vtable = len(data) - 8
    for place, pair in enumerate(texts):
        table = len(data)
        struct.pack_into("<I", data, slots + 4 * place, table - slots - 4 * place)
        data += struct.pack("<iII", table - vtable, 0, 0)
        for field, text in enumerate(pair):
            at = table + 4 + 4 * field
            struct.pack_into("<I", data, at, len(data) - at)
            data += struct.pack("<I", len(text)) + text + bytes(4 - len(text) % 4)
    return bytes(data)
