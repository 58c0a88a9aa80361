"""Model compilation: `ModelCompiler`, and our own `check` and `compile`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from . import onnxruntime_pybind11_state as C
from ._errors import Fail, InvalidArgument, status
from ._fields import refuse, to_bool, to_count, to_path
from ._inference_session import InferenceSession, model_bytes
from ._values import OrtValue

__all__ = ["ModelCompiler", "check", "compile", "make_get_initializer_location_func_wrapper"]

_NATIVE = f"{__package__}.onnxruntime_pybind11_state"

GetInitializerLocationFunc = Callable[
    [str, OrtValue, C.OrtExternalInitializerInfo | None], C.OrtExternalInitializerInfo | None
]

_EXTERNAL_FILE = "session.optimized_model_external_initializers_file_name"
_EXTERNAL_BYTES = "session.optimized_model_external_initializers_min_size_in_bytes"


def make_get_initializer_location_func_wrapper(
    get_initializer_location_func: GetInitializerLocationFunc,
) -> Callable[..., C.OrtExternalInitializerInfo | None]:
    """Returns a function that calls the given one with an OrtValue for a native value.

    It also copies the location that the function returns.
    """

    def wrapper(
        name: str, value: C.OrtValue, external: C.OrtExternalInitializerInfo | None
    ) -> C.OrtExternalInitializerInfo | None:
        location = get_initializer_location_func(name, OrtValue(value), external)
        if location is None:
            return None
        return C.OrtExternalInitializerInfo(
            location.filepath, location.file_offset, location.byte_size
        )

    return wrapper


class NativeCompiler:
    """What `onnxruntime_pybind11_state.ModelCompiler` is: the compiler with plain arguments."""

    def __init__(
        self,
        options: C.SessionOptions,
        model: str | bytes,
        is_path: bool,
        embed: bool,
        external_file: str,
        external_bytes: int,
        flags: int,
        level: C.GraphOptimizationLevel,
        locate: Callable[..., C.OrtExternalInitializerInfo | None] | None = None,
    ) -> None:
        if not isinstance(options, C.SessionOptions):
            refuse("sess_options", "SessionOptions", options)
        to_bool(embed, "embed_compiled_data_into_model")
        if not model:
            raise ValueError(f"Input model {'path' if is_path else 'bytes array'} is empty")
        self._model = model
        self._locate = locate
        self._flags = to_count(flags, "flags")
        self._options = copy.copy(options)
        self._options.graph_optimization_level = level
        threshold = to_count(external_bytes, "external_initializers_size_threshold")
        if external_file:
            self._options.add_session_config_entry(_EXTERNAL_FILE, external_file)
            self._options.add_session_config_entry(_EXTERNAL_BYTES, str(threshold))

    def compile_to_file(self, output_model_path: str | os.PathLike[str] | None = None) -> None:
        """Writes the model to a file; without a path, to `<name>_ctx.onnx` beside the input.

        Raises Fail if the file exists and the flags say so, ValueError if there is no path to use.
        """
        if output_model_path is None:
            if not isinstance(self._model, str):
                raise ValueError("a model of bytes needs an output_model_path")
            output_model_path = f"{os.path.splitext(self._model)[0]}_ctx.onnx"
        path = to_path(output_model_path, "output_model_path")
        if self._flags & C.OrtCompileApiFlags.ERROR_IF_OUTPUT_FILE_EXISTS and os.path.exists(path):
            raise status(
                Fail,
                f"Failed to generate EP context model since the file '\"{path}\"' exists already. "
                "Please remove the EP context model if you want to re-generate it.",
            )
        self._write(path)

    def compile_to_bytes(self) -> bytes:
        """Returns the model as bytes."""
        import tempfile  # slow to import, and rarely needed

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.onnx")
            self._write(path)
            with open(path, "rb") as file:
                return file.read()

    def compile_to_stream(self, write_function: Callable[[bytes], None]) -> None:
        """Passes the model to a function, in one or more pieces. What it raises becomes a Fail."""
        if not callable(write_function):
            refuse("write_function", "a function", write_function)
        content = self.compile_to_bytes()
        try:
            write_function(content)
        except Exception as error:
            raise status(Fail, f"{type(error).__name__}: {error}") from error

    def set_ep_context_data_write_func(
        self, write_func: Callable[[str, C.OrtEpContextData], None]
    ) -> None:
        """Accepts the function that would get a provider's blocks. No provider here makes any."""
        if not callable(write_func):
            refuse("write_func", "a function", write_func)

    def clear_ep_context_data_write_func(self) -> None:
        """Removes the function."""

    def _write(self, path: str) -> None:
        if isinstance(self._model, str) and not os.path.exists(self._model):
            raise status(InvalidArgument, f'Input model path does not exist: "{self._model}"')
        if self._flags & C.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED:
            raise status(
                Fail,
                "Unable to compile any nodes. Check that the session EPs support compilation and "
                "can execute at least one subgraph in the model.",
            )
        folder = os.path.dirname(path)
        if folder and not os.path.isdir(folder):
            raise status(InvalidArgument, f"{path}: No such file or directory")
        if self._locate is not None:
            C.save_located(self._model, path, self._options, _placing(self._locate))
            return
        options = copy.copy(self._options)
        options.optimized_model_filepath = path
        InferenceSession(self._model, options)


def _placing(
    locate: Callable[..., C.OrtExternalInitializerInfo | None],
) -> Callable[[str, C.OrtValue, tuple[str, int, int] | None], tuple[str, int, int] | None]:
    """Returns a function that asks the given one for the place of a weight.

    What it raises becomes a Fail.
    """

    def place(
        name: str, value: C.OrtValue, external: tuple[str, int, int] | None
    ) -> tuple[str, int, int] | None:
        known = None if external is None else C.OrtExternalInitializerInfo(*external)
        try:
            found = locate(name, value, known)
            if found is None:
                return None
            return found.filepath, found.file_offset, found.byte_size
        except Exception as error:
            raise status(Fail, f"{type(error).__name__}: {error}") from error

    return place


NativeCompiler.__module__, NativeCompiler.__name__ = _NATIVE, "ModelCompiler"
NativeCompiler.__qualname__ = "ModelCompiler"


class ModelCompiler(NativeCompiler):
    """Writes a model as the given options optimize it, as plain ONNX.

    The CPU compiles nothing ahead, so there are no EPContext nodes in the result. For a file with
    packed weights, which loads faster, see `ort_runtime.compile`.

    Raises TypeError for what is no model and no options, ValueError for an empty model or two
    places for weights.

    Example: `ModelCompiler(SessionOptions(), "model.onnx").compile_to_file("compiled.onnx")`
    """

    def __init__(
        self,
        sess_options: C.SessionOptions,
        input_model_path_or_bytes: str | os.PathLike[str] | bytes,
        embed_compiled_data_into_model: bool = False,
        external_initializers_file_path: str | os.PathLike[str] | None = None,
        external_initializers_size_threshold: int = 1024,
        flags: int = C.OrtCompileApiFlags.NONE,
        graph_optimization_level: C.GraphOptimizationLevel = (
            C.GraphOptimizationLevel.ORT_DISABLE_ALL
        ),
        get_initializer_location_func: GetInitializerLocationFunc | None = None,
    ) -> None:
        locate, path = get_initializer_location_func, external_initializers_file_path or ""
        if path and locate:
            raise ValueError(
                "Cannot initialize ModelCompiler with both `external_initializers_file_path` and "
                "`get_initializer_location_func`"
            )
        model = _source(input_model_path_or_bytes)
        super().__init__(
            sess_options,
            model,
            isinstance(model, str),
            embed_compiled_data_into_model,
            to_path(path, "external_initializers_file_path"),
            external_initializers_size_threshold,
            flags,
            graph_optimization_level,
            None if locate is None else make_get_initializer_location_func_wrapper(locate),
        )


def check(model: Any) -> list[str]:
    """Returns what keeps a model from running here, or deviates from the standard, line by line.

    `model` is what InferenceSession takes. The list is empty for a model without findings. A line
    that begins with "warning: " is about what runs nevertheless.

    Raises NoSuchFile and the like for a file that cannot be opened; one that is no model is a
    finding.

    Example: `assert not ort_runtime.check("model.onnx")`
    """
    return C.check(_source(model))


def compile(  # noqa: A001
    model: Any, out: str | os.PathLike[str], options: C.SessionOptions | None = None
) -> None:
    """Writes a model together with its packed weights into a file that sessions map.

    Sessions with the same options load such a file without packing, and processes share its
    pages. `model` is what InferenceSession takes.

    Raises what InferenceSession raises for a model, and Fail for a file that cannot be written.

    Example::

        ort_runtime.compile("model.onnx", "model.ort-compiled")
        session = ort_runtime.InferenceSession("model.ort-compiled")
    """
    if options is not None and not isinstance(options, C.SessionOptions):
        refuse("options", "SessionOptions", options)
    C.compile(_source(model), to_path(out, "out"), options or C.SessionOptions())


def _source(model: Any) -> str | bytes:
    """Returns the path of a model as text, or its bytes."""
    if isinstance(model, str | os.PathLike):
        return os.fsdecode(model)
    return model_bytes(model)
