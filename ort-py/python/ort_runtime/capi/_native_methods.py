"""Methods of the native classes that need nothing of the engine but their other methods.

`install` adds them to the classes. Their names and arguments are onnxruntime's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _async
from . import onnxruntime_pybind11_state as C
from ._devices import OrtDevice, OrtEpDevice, OrtMemoryInfo, memory_device, get_ep_devices
from ._errors import InvalidArgument, status
from ._fields import refuse
from ._run_options import RunOptions, check_options
from ._sparse_views import SparseBlockSparseView, SparseCooView, SparseCsrView

_NO_CONTEXT = -1


class _OrtValueMethods:
    @staticmethod
    def ortvalue_from_shape_and_onnx_type(
        shape: Sequence[int], onnx_element_type: int, device: OrtDevice, /
    ) -> C.OrtValue:
        """Makes a tensor; the type is ONNX's number of it."""
        element_type = operator.index(onnx_element_type)
        return C.OrtValue.ortvalue_from_shape_and_type(shape, element_type, device)

    @staticmethod
    def ortvalue_from_shape_and_type_for_memory_info(
        shape: Sequence[int], element_type: Any, memory_info: OrtMemoryInfo, /
    ) -> C.OrtValue:
        """Makes a tensor in the memory that `memory_info` describes."""
        device = memory_device(memory_info)
        return C.OrtValue.ortvalue_from_shape_and_type(shape, element_type, device)

    @staticmethod
    def ortvalue_from_shape_and_onnx_type_for_memory_info(
        shape: Sequence[int], onnx_element_type: int, memory_info: OrtMemoryInfo, /
    ) -> C.OrtValue:
        """Makes a tensor in the memory that `memory_info` describes."""
        element_type, device = operator.index(onnx_element_type), memory_device(memory_info)
        return C.OrtValue.ortvalue_from_shape_and_type(shape, element_type, device)

    def _is_webgpu_buffer(self: Any) -> bool:
        return self.device_name() == "webgpu"


class _SparseTensorMethods:
    def get_coo_data(self: Any) -> SparseCooView:
        """Returns the places. Raises RuntimeError if the format is not COO."""
        return SparseCooView(self.coo_indices())

    def get_csrc_data(self: Any) -> SparseCsrView:
        """Returns columns and rows. Raises RuntimeError if the format is not CSR."""
        return SparseCsrView(*self.csr_indices())

    def get_blocksparse_data(self: Any) -> SparseBlockSparseView:
        """Returns the places of blocks. Raises RuntimeError if the format has none."""
        return SparseBlockSparseView(self.block_indices())


class _SessionMethods:
    @property
    def input_epdevices(self: Any) -> list[OrtEpDevice]:
        """The device that each input is read by first."""
        first = self.get_providers()[0]
        device = next(device for device in get_ep_devices() if device.ep_name == first)
        return [device for _ in self.inputs_meta]

    def create_ortvalue_from_shape_and_onnx_type(
        self: Any, shape: Sequence[int], onnx_element_type: int, device: OrtDevice, /
    ) -> C.OrtValue:
        """Makes a tensor in the memory of one of the session's devices."""
        element_type = operator.index(onnx_element_type)
        return self.create_ortvalue_from_shape_and_type(shape, element_type, device)

    def run_async(
        self: Any,
        output_names: Sequence[str],
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None,
        /,
    ) -> None:
        """Starts a run in another thread, which then calls `callback(results, user_data, error)`."""
        check_options(run_options)
        names, feed = list(output_names), dict(input_feed)
        _async.start(lambda: self.run(names, feed, run_options), callback, user_data)

    def run_with_ortvaluevector(
        self: Any,
        run_options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: C.OrtValueVector,
        fetch_names: Sequence[str],
        fetches: C.OrtValueVector,
        fetch_devices: Sequence[OrtDevice],
        /,
    ) -> None:
        """Runs the model on a vector of values.

        The results are appended to `fetches` if that is empty, and otherwise written to its values.
        `fetch_devices` is accepted: results lie where the model's last nodes write them.
        """
        for names in (feed_names, fetch_names):
            if isinstance(names, str | bytes):
                refuse("feed_names and fetch_names", "sequences of names", names)
        _check_count("feed", feed_names, feeds)
        if len(fetch_names) and len(fetches):
            _check_count("fetch", fetch_names, fetches)
        feed = dict(zip(feed_names, feeds, strict=True))
        results = self.run_with_ort_values(feed, list(fetch_names), run_options)
        if not len(fetches):
            for result in results:
                fetches.push_back(result)
            return
        for name, result, target in zip(fetch_names, results, fetches, strict=True):
            _write(name, result, target)

    def get_tuning_results(self: Any) -> list[dict[str, Any]]:
        """Returns an empty list: kernels are not tuned at run time."""
        return []

    def set_tuning_results(
        self: Any, results: Sequence[Mapping[str, Any]], error_on_invalid: bool, /
    ) -> None:
        """Ignores results; with `error_on_invalid`, any is a RuntimeError."""
        for index, result in enumerate(results):
            name = result["ep"]
            if not error_on_invalid:
                continue
            if name not in self.get_providers():
                raise RuntimeError(f"Cannot find execution provider {name}")
            raise RuntimeError(
                f"Invalid TuningResults (index={index}). {name} does not support TunableOp."
            )

    def set_ep_dynamic_options(self: Any, options: dict[str, Any], /) -> None:
        """Accepts options for running sessions; none is a RuntimeError. No provider has any."""
        if not isinstance(options, dict):
            refuse("options", "a dict", options)
        if not options:
            raise RuntimeError("No options were provided")

    def release_captured_graph(self: Any, graph_annotation_id: int, /) -> None:
        """Does nothing: no graph of device calls is captured."""
        operator.index(graph_annotation_id)

    def is_webgpu_graph_capture_enabled(self: Any) -> bool:
        """Returns False: no graph of device calls is captured."""
        return False

    def webgpu_context_id(self: Any) -> int:
        """Returns -1: there is no such context."""
        return _NO_CONTEXT


def install(native: Any) -> None:
    """Adds the methods to the classes of the native module."""
    for methods, target in (
        (_OrtValueMethods, native.OrtValue),
        (_SparseTensorMethods, native.SparseTensor),
        (_SessionMethods, native.InferenceSession),
    ):
        for name, method in vars(methods).items():
            if not name.startswith("__"):
                setattr(target, name, method)


def _check_count(what: str, names: Sequence[str], values: C.OrtValueVector) -> None:
    if len(names) != len(values):
        text = f"{what} names has {len(names)} elements, but {what} has {len(values)} elements."
        raise status(InvalidArgument, text)


def _write(name: str, result: C.OrtValue, target: C.OrtValue) -> None:
    """Copies a result to the memory of a value of its type and shape."""
    if result.data_type() != target.data_type():
        raise status(
            InvalidArgument,
            f"Unexpected output data type. Actual: ({target.data_type()}) , "
            f"expected: ({result.data_type()})",
        )
    if result.shape() != target.shape():
        raise status(
            InvalidArgument,
            f"output '{name}' has shape {result.shape()}, its value has {target.shape()}",
        )
    target.update_inplace(result)
