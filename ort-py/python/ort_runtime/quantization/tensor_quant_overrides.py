"""`TensorQuantOverrides`: parameters of single tensors that replace what options and ranges give.

A tensor has a list of dicts: one dict for all of it, or one for each channel, with `axis` in the
first. Keys are `quant_type`, `axis`, `scale` with `zero_point`, `symmetric`, `reduce_range`,
`rmin`, `rmax` and `convert`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ._options import unknown_name
from .quant_utils import QuantType, normalize_axis

Override = dict[str, Any]
#: What scale and zero point leave nothing to say about.
_RANGE_KEYS = ("symmetric", "reduce_range", "rmax", "rmin")
_KEYS = ("quant_type", "axis", "scale", "zero_point", *_RANGE_KEYS, "convert")
_CONVERT_KEYS = (*_KEYS[:-1], "recv_nodes")


@dataclass
class QuantTypeInfo:
    """How a tensor is quantized, without its numbers."""

    quant_type: QuantType
    symmetric: bool | None = None
    reduce_range: bool | None = None
    axis: int | None = None

    def __eq__(self, other: object) -> bool:
        # Channels are of one tensor each, so two tensors are quantized alike whatever their axes.
        return isinstance(other, QuantTypeInfo) and (
            (self.quant_type, self.axis) == (other.quant_type, other.axis)
            and (self.symmetric in (None, other.symmetric) or other.symmetric is None)
            and (self.reduce_range in (None, other.reduce_range) or other.reduce_range is None)
        )

    @staticmethod
    def load_from_dict(
        raw_dict: Override,
        default_qtype: QuantType | None = None,
        default_symmetric: bool | None = None,
        default_reduce_range: bool | None = None,
    ) -> QuantTypeInfo:
        """Returns what an override says, or the defaults."""
        return QuantTypeInfo(
            raw_dict.get("quant_type", default_qtype),  # type: ignore[arg-type]
            raw_dict.get("symmetric", default_symmetric),
            raw_dict.get("reduce_range", default_reduce_range),
            raw_dict.get("axis"),
        )

    def save_to_dict(self, raw_dict: Override) -> None:
        """Writes itself into an override."""
        raw_dict["quant_type"] = self.quant_type
        for key in ("symmetric", "reduce_range", "axis"):
            if getattr(self, key) is not None:
                raw_dict[key] = getattr(self, key)


class TensorQuantOverridesHelper(MutableMapping[str, list[Override]]):
    """Reads, checks and changes overrides; a mapping of tensor names to lists."""

    def __init__(self, raw_overrides: dict[str, list[Override]]) -> None:
        self.overrides = raw_overrides

    # What a tensor has.

    def has_per_tensor_overrides(self, tensor_name: str) -> bool:
        """Returns whether the tensor has overrides for all of it."""
        return bool(self.overrides.get(tensor_name)) and not self._has_axis(tensor_name)

    def has_per_channel_overrides(self, tensor_name: str) -> bool:
        """Returns whether the tensor has overrides of its channels."""
        return self._has_axis(tensor_name)

    def _has_axis(self, tensor_name: str) -> bool:
        given = self.overrides.get(tensor_name) or [{}]
        return "axis" in given[0]

    def overrides_scale_zp(self, tensor_name: str) -> bool:
        """Returns whether scale and zero point are given."""
        given = self.overrides.get(tensor_name) or [{}]
        return "scale" in given[0] and "zero_point" in given[0]

    def get_per_tensor_overrides(
        self, tensor_name: str, default_val: Override | None = None
    ) -> Override | None:
        """Returns the overrides of a tensor, or the default.

        Raises:
            ValueError: they are of its channels.
        """
        if self._has_axis(tensor_name):
            raise ValueError(
                f"Expected tensor '{tensor_name}' to use per-tensor quantization overrides, but "
                "found per-channel overrides."
            )
        given = self.overrides.get(tensor_name)
        return given[0] if given else default_val

    def get_per_channel_overrides(
        self, tensor_name: str, default_val: list[Override] | None = None
    ) -> list[Override] | None:
        """Returns the overrides of a tensor's channels, or the default.

        Raises:
            ValueError: they are of all of it.
        """
        if not self.overrides.get(tensor_name):
            return default_val
        if not self._has_axis(tensor_name):
            raise ValueError(
                f"Expected tensor '{tensor_name}' to have per-channel quantization overrides "
                "(axis value is missing)."
            )
        return self.overrides[tensor_name]

    def get_quant_types(self) -> set[QuantType]:
        """Returns the types of all overrides, those of conversions too."""
        given = [entry for entries in self.overrides.values() for entry in entries]
        given += [entry["convert"] for entry in given if "convert" in entry]
        return {entry["quant_type"] for entry in given if "quant_type" in entry}

    # Checks.

    def is_valid(
        self,
        initializers: Mapping[str, Any],
        activation_names: Collection[str],
        default_activation_qtype: QuantType,
    ) -> tuple[bool, str | None]:
        """Returns whether the overrides fit the model, and what is wrong if not."""
        for name, entries in self.overrides.items():
            if name not in initializers and name not in activation_names:
                return False, f"Tensor '{name}' in TensorQuantOverrides is not present in the model"
            if not isinstance(entries, list):
                return False, f"Tensor quantization overrides for '{name}' are not in a list"
            fault = self._fault(name, entries, initializers.get(name), default_activation_qtype)
            if fault:
                return False, fault
        return True, None

    def _fault(self, name: str, entries: list[Any], weight: Any, default: QuantType) -> str | None:
        """Returns what is wrong with the overrides of one tensor."""
        for place, entry in enumerate(entries):
            if not isinstance(entry, dict):
                return (
                    f"Tensor quantization overrides at index {place} for '{name}' are not in a dict"
                )
            fault = _entry_fault(name, entry, weight, _KEYS)
            if fault:
                return fault
        if self._has_axis(name):
            return _channel_fault(name, entries, weight)
        return _conversion_fault(name, entries[0], weight, default) if entries else None

    # Changes.

    def update_tensor_overrides(
        self,
        tensor_name: str,
        new_vals: Override,
        channels: list[int] | None = None,
        overwrite: bool = True,
    ) -> bool:
        """Adds to the overrides of a tensor, or of some of its channels.

        Returns:
            Whether it did: without `overwrite`, not if a key is there with another value.
        """
        entries = self.overrides.setdefault(tensor_name, [{}]) or [{}]
        self.overrides[tensor_name] = entries
        for place in channels if channels is not None else range(len(entries)):
            entries.extend({} for _ in range(place + 1 - len(entries)))
            if not overwrite and any(entries[place].get(k, v) != v for k, v in new_vals.items()):
                return False
        for place in channels if channels is not None else range(len(entries)):
            entries[place].update(new_vals)
        return True

    def get_node_output_qtype_info(
        self,
        output_name: str,
        default_qtype: QuantType | None,
        default_symmetric: bool | None = None,
    ) -> QuantTypeInfo:
        """Returns how the node that makes a tensor quantizes it."""
        given = self.overrides.get(output_name) or [{}]
        return QuantTypeInfo.load_from_dict(given[0], default_qtype, default_symmetric)

    def get_node_input_qtype_info(
        self,
        input_name: str,
        node_name: str,
        default_qtype: QuantType | None,
        default_symmetric: bool | None = None,
        default_reduce_range: bool | None = None,
    ) -> QuantTypeInfo:
        """Returns how a tensor is quantized for one of its readers."""
        given = (self.overrides.get(input_name) or [{}])[0]
        convert = given.get("convert")
        if convert is not None and node_name in convert.get("recv_nodes", (node_name,)):
            given = convert
        return QuantTypeInfo.load_from_dict(
            given, default_qtype, default_symmetric, default_reduce_range
        )

    # A mapping.

    def get_dict(self) -> dict[str, list[Override]]:
        """Returns the overrides themselves."""
        return self.overrides

    def empty(self) -> bool:
        """Returns whether there are none."""
        return not self.overrides

    def pprint_str(self, indent: int | None = None) -> str:
        """Returns the overrides as JSON, with what JSON has no type for as text."""
        return json.dumps(self.overrides, default=_as_text, indent=indent)

    def __setitem__(self, key: str, value: list[Override]) -> None:
        self.overrides[key] = value

    def __getitem__(self, key: str) -> list[Override]:
        return self.overrides[key]

    def __delitem__(self, key: str) -> None:
        del self.overrides[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.overrides)

    def __len__(self) -> int:
        return len(self.overrides)

    def __str__(self) -> str:
        return str(self.overrides)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.overrides!r})"


def _as_text(value: Any) -> Any:
    """Returns what `json` cannot write in a form that it can."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _entry_fault(name: str, entry: Override, weight: Any, keys: tuple[str, ...]) -> str | None:
    """Returns what is wrong with one dict."""
    for key in entry:
        if key not in keys:
            return unknown_name(f"override of tensor '{name}'", key, keys)
    if ("scale" in entry) != ("zero_point" in entry):
        return (
            "Must provide both 'scale' and 'zero_point' if one of the overrides is provided "
            f"(tensor '{name}')"
        )
    if "scale" in entry:
        moot = [key for key in _RANGE_KEYS if key in entry]
        if moot:
            return (
                f"Tensor override option(s) [{', '.join(moot)}] are invalid with 'scale' and "
                f"'zero_point' (tensor '{name}')"
            )
    if "reduce_range" in entry and weight is None:
        return (
            "Option 'reduce_range' is only supported for initializers, not for activation "
            f"{name}"
        )
    return None


def _channel_fault(name: str, entries: list[Override], weight: Any) -> str | None:
    """Returns what is wrong with the dicts of channels."""
    if weight is None:
        return f"Tensor '{name}' has per-channel overrides, but is not an initializer"
    rank = len(weight.dims)
    exists, axis = normalize_axis(entries[0]["axis"], rank)
    if not exists:
        return f"Axis override value is out-of-bounds for tensor {name} (rank {rank})"
    # One dict stands for all channels.
    if len(entries) not in (1, weight.dims[axis]):
        return (
            f"Incorrect number of channel overrides for tensor {name} (axis {axis}), expected "
            f"{weight.dims[axis]}, but found {len(entries)}."
        )
    for key in ("quant_type", "symmetric", "reduce_range"):
        common = entries[0].get(key)
        if any(entry.get(key, common) != common for entry in entries):
            return f"Channel {key} values for tensor '{name}' do not match."
    if any("convert" in entry for entry in entries):
        return "Cannot use 'convert' override for initializers"
    return None


def _conversion_fault(name: str, entry: Override, weight: Any, default: QuantType) -> str | None:
    """Returns what is wrong with a conversion to another type."""
    convert = entry.get("convert")
    if convert is None:
        return None
    if weight is not None:
        return "Cannot use 'convert' override for initializers"
    if "quant_type" not in convert:
        return f"'convert' options (tensor '{name}') must specify a 'quant_type'"
    if convert["quant_type"] == entry.get("quant_type", default):
        return f"'convert' quant_type must differ from original quant_type (tensor '{name}')"
    return _entry_fault(name, convert, None, _CONVERT_KEYS)
