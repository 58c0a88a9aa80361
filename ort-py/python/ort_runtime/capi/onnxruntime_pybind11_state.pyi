"""The native module: sessions, values and bindings, and the names that are written in Python."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ._adapters import *
from ._compiler import NativeCompiler
from ._devices import *
from ._enums import *
from ._environment import *
from ._ep_context import *
from ._errors import *
from ._fp4 import *
from ._logging import *
from ._metadata import *
from ._option_values import *
from ._options import *
from ._schemas import *
from ._schemas import KernelDef, OpSchema
from ._sparse_views import *
from ._values import copy_tensors as copy_tensors

_Weights = npt.NDArray[np.float32] | npt.NDArray[np.float16]

ModelCompiler = NativeCompiler

@final
class Calibration:
    """Observers of values in the runs of a session on the CPU without optimizations.

    They keep the extremes of each value, and a histogram or moments if these are wanted. Elements
    that are NaN or infinite are counted alone. An unknown name is a KeyError.
    """

    def __init__(self, names: Sequence[str], histogram: bool, moments: bool) -> None: ...
    def run(self, session: InferenceSession, feed: dict[str, Any]) -> None:
        """Runs a sample and observes its values."""

    def observe(self, name: str, array: npt.NDArray[np.float32]) -> None:
        """Observes an array as a value of one run."""

    def counts(self, name: str) -> tuple[int, int, int, int]:
        """Returns how many elements were seen: all, zeros, NaN and infinities."""

    def extremes(self, name: str) -> tuple[float, float] | None:
        """Returns the least and the greatest element, None if no element was finite."""

    def moments(self, name: str) -> tuple[float, float] | None:
        """Returns mean and standard deviation."""

    def histogram(
        self, name: str
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], float] | None:
        """Returns the counts of negative elements by magnitude and of positive ones, and the width
        of a bin. Zeros are in neither.
        """

    def percentile(self, name: str, share: float, symmetric: bool) -> tuple[float, float] | None:
        """Returns the range that a share of the elements is in."""

    def entropy(self, name: str, levels: int, symmetric: bool) -> tuple[float, float] | None:
        """Returns the range of least divergence with this many levels on each side of zero."""

@final
class ChannelCalibration:
    """Observers of the channels of values, which are along the second axis."""

    def __init__(self, names: Sequence[str]) -> None: ...
    def run(self, session: InferenceSession, feed: dict[str, Any]) -> None:
        """Runs a sample and observes its values."""

    def take(self) -> dict[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
        """Returns the least and the greatest element of each channel, and forgets them.

        Values that were not seen are left out. Raises InvalidArgument if the number of channels of a
        value changed.
        """

@final
class HessianCalibration:
    """The Hessians of what values are multiplied with, by the length of their last axis."""

    def __init__(self, channels: dict[str, int]) -> None: ...
    def run(self, session: InferenceSession, feed: dict[str, Any]) -> None:
        """Runs a sample and observes its values."""

@final
class CancelToken:
    """A flag that ends the runs that have it."""

    def __init__(self) -> None: ...
    def cancel(self) -> None:
        """Ends the runs that have this token, and those that begin with it."""
    def reset(self) -> None:
        """Lets later runs pass."""
    @property
    def is_cancelled(self) -> bool:
        """Whether runs end."""

@final
class Plan:
    """What a run with given sizes allocates. `print(plan)` shows what `ort plan` prints."""

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that a run allocates; None if sizes are known only at run time."""
    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as `ort plan --json` writes it."""
    def to_svg(self) -> str:
        """Returns a drawing of the plan: steps to the right, addresses upwards."""
    def _repr_svg_(self) -> str: ...

@final
class OrtValue:
    """A value: a tensor, a sequence, a map or a sparse tensor. `OrtValue` of the package wraps it.

    An element type is a numpy type, dtype or its name, or ONNX's number of the type.
    """

    @staticmethod
    def ortvalue_from_numpy(array: npt.NDArray[Any], device: OrtDevice | None = None) -> OrtValue:
        """Shares the memory of a contiguous array in host memory, and copies others."""
    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(
        array: npt.NDArray[Any], onnx_element_type: int
    ) -> OrtValue:
        """Shares the memory of an array, whose elements are read as another type of their size."""
    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: npt.DTypeLike | int, device: OrtDevice | None = None
    ) -> OrtValue:
        """Makes a tensor."""
    @staticmethod
    def ortvalue_from_shape_and_onnx_type(
        shape: Sequence[int], onnx_element_type: int, device: OrtDevice, /
    ) -> OrtValue: ...
    @staticmethod
    def ortvalue_from_shape_and_type_for_memory_info(
        shape: Sequence[int], element_type: npt.DTypeLike | int, memory_info: OrtMemoryInfo, /
    ) -> OrtValue: ...
    @staticmethod
    def ortvalue_from_shape_and_onnx_type_for_memory_info(
        shape: Sequence[int], onnx_element_type: int, memory_info: OrtMemoryInfo, /
    ) -> OrtValue: ...
    def _is_webgpu_buffer(self) -> bool: ...
    @staticmethod
    def ort_value_from_sparse_tensor(sparse: SparseTensor) -> OrtValue:
        """Wraps a sparse tensor."""
    @staticmethod
    def from_dlpack(source: Any, is_bool: bool = False) -> OrtValue:
        """Shares the memory of a DLPack capsule, or of an object that gives one.

        `is_bool` says that uint8 stands for bool, as older producers send it.
        """
    def as_sparse_tensor(self) -> SparseTensor: ...
    def data_ptr(self) -> int: ...
    def data_type(self) -> str: ...
    def device_name(self) -> str: ...
    def element_type(self) -> int: ...
    def has_value(self) -> bool: ...
    def is_sparse_tensor(self) -> bool: ...
    def is_writable(self) -> bool:
        """Whether the memory may be written from outside of runs."""
    def is_tensor(self) -> bool: ...
    def is_tensor_sequence(self) -> bool: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def shape(self) -> list[int]: ...
    def tensor_size_in_bytes(self) -> int: ...
    def to_dlpack(self) -> Any: ...
    def to_object(self) -> Any: ...
    def update_inplace(self, array: npt.NDArray[Any] | OrtValue) -> None: ...
    def __dlpack__(self, *, stream: int | None = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class OrtValueVector:
    """A list of native values."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> OrtValue: ...
    def __iter__(self) -> Iterator[OrtValue]: ...
    def push_back(self, value: OrtValue) -> None: ...
    def push_back_batch(
        self,
        tensors: Sequence[Any],
        pointers: Sequence[int],
        element_types: Sequence[npt.DTypeLike | int],
        shapes: Sequence[Sequence[int]],
        devices: Sequence[OrtDevice],
    ) -> None:
        """Appends values over the memory of torch tensors at these addresses."""
    def dlpack_at(self, index: int) -> Any: ...
    def to_dlpacks(self, converter: Callable[[Any], Any] | None = None) -> list[Any]: ...
    def reserve(self, count: int) -> None: ...
    def shrink_to_fit(self) -> None: ...
    def bool_tensor_indices(self) -> list[int]: ...
    def element_type_at(self, index: int) -> int: ...

@final
class CheckpointState:
    """Parameters and properties. `ort_runtime.training.api` wraps it."""

    @staticmethod
    def load(path: str) -> CheckpointState:
        """Maps a checkpoint file."""
    def save(self, path: str, include_optimizer_state: bool) -> None:
        """Writes a checkpoint file."""
    def parameter_names(self) -> list[str]: ...
    def requires_grad(self, name: str) -> bool: ...
    def data(self, name: str) -> npt.NDArray[Any]:
        """Copies a parameter."""
    def grad(self, name: str) -> npt.NDArray[Any] | None:
        """Copies a gradient; None before the first batch and for frozen parameters."""
    def set_data(self, name: str, array: npt.NDArray[Any]) -> None: ...
    def property_names(self) -> list[str]: ...
    def property(self, name: str) -> int | float | str: ...
    def set_property(self, name: str, value: int | float | str) -> None: ...

@final
class TextGenerator:
    """Runs requests of tokens together. `ort_runtime.generate.Model` wraps it."""

    def __init__(self, folder: str, options: str) -> None: ...
    @property
    def context_length(self) -> int | None: ...
    @property
    def end_tokens(self) -> list[int]: ...
    @property
    def vocabulary(self) -> int: ...
    def submit(self, prompt: Sequence[int], options: str, constraint: object | None) -> int: ...
    def step(self) -> list[tuple[int, int | None, str | None, Exception | None]]: ...
    def cancel(self, request: int) -> None: ...
    def contains(self, request: int) -> bool: ...
    def is_idle(self) -> bool: ...
    def counts(self) -> tuple[int, int]: ...
    def most_requests(self, context: int, most: int) -> int: ...
    def peak_bytes(self) -> int: ...
    def timing(self) -> tuple[int, int, float, float, int]: ...
    def plan(self, context: int, requests: int) -> dict[str, Any]: ...

@final
class TrainingModule:
    """A model in training. `ort_runtime.training.api.Module` wraps it."""

    def __init__(
        self,
        train_model: str,
        state: CheckpointState,
        eval_model: str | None,
        session_options: SessionOptions,
        providers: Sequence[tuple[str, dict[str, str]]],
        recompute_level: int,
    ) -> None: ...
    def call(self, inputs: Sequence[npt.NDArray[Any] | OrtValue]) -> list[OrtValue]:
        """Computes the loss of a batch, and in training mode adds its gradients."""
    def train(self, mode: bool) -> None: ...
    def is_training(self) -> bool: ...
    def lazy_reset_grad(self) -> None: ...
    def input_names(self) -> list[str]: ...
    def output_names(self) -> list[str]: ...
    def parameters_size(self, trainable_only: bool) -> int: ...
    def contiguous_parameters(self, trainable_only: bool) -> OrtValue: ...
    def copy_buffer_to_parameters(self, buffer: OrtValue, trainable_only: bool) -> None: ...
    def export_model_for_inferencing(self, path: str, outputs: Sequence[str]) -> None: ...
    def memory(self, dims: dict[str, int]) -> dict[str, int]:
        """Plans the bytes of a step, by what they are for."""

@final
class TrainingOptimizer:
    """What updates the parameters of a module."""

    def __init__(self, path: str, module: TrainingModule) -> None: ...
    def step(self) -> None: ...
    def learning_rate(self) -> float: ...
    def set_learning_rate(self, learning_rate: float) -> None: ...

@final
class TrainingScheduler:
    """A learning rate that rises from 0 and falls to 0."""

    def __init__(
        self,
        optimizer: TrainingOptimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
    ) -> None: ...
    def step(self) -> None: ...

@final
class SparseTensor:
    """A sparse tensor. `SparseTensor` of the package wraps it."""

    @staticmethod
    def sparse_coo_from_numpy(
        dense_shape: Sequence[int],
        values: npt.NDArray[Any],
        indices: npt.NDArray[np.int64],
        device: OrtDevice | None = None,
    ) -> SparseTensor:
        """Makes a tensor of format COO: linear places, or one row of coordinates each."""
    @staticmethod
    def sparse_csr_from_numpy(
        dense_shape: Sequence[int],
        values: npt.NDArray[Any],
        inner: npt.NDArray[np.int64],
        outer: npt.NDArray[np.int64],
        device: OrtDevice | None = None,
    ) -> SparseTensor:
        """Makes a tensor of format CSR from columns (inner) and where rows begin (outer)."""
    @staticmethod
    def blocksparse_from_numpy(
        dense_shape: Sequence[int],
        values: npt.NDArray[Any],
        indices: npt.NDArray[np.int32],
        device: OrtDevice,
    ) -> SparseTensor:
        """Makes a tensor from blocks and a column of coordinates for each, counted in blocks."""
    def values(self) -> npt.NDArray[Any]: ...
    def coo_indices(self) -> npt.NDArray[np.int64]: ...
    def csr_indices(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def block_indices(self) -> npt.NDArray[np.int32]: ...
    def get_coo_data(self) -> SparseCooView: ...
    def get_csrc_data(self) -> SparseCsrView: ...
    def get_blocksparse_data(self) -> SparseBlockSparseView: ...
    def dense_shape(self) -> list[int]: ...
    def to_dense(self) -> npt.NDArray[Any]: ...
    @property
    def format(self) -> OrtSparseFormat: ...
    def data_type(self) -> str: ...
    def device_name(self) -> str: ...
    def to_cuda(self, device: OrtDevice) -> None:
        """Raises RuntimeError: sparse tensors stay in host memory."""

@final
class InferenceSession:
    """A loaded model, and the session once it is built."""

    def __init__(
        self, options: SessionOptions, path_or_bytes: str | bytes, is_path: bool, read_config: bool
    ) -> None: ...
    def initialize_session(
        self,
        providers: Sequence[str],
        provider_options: Sequence[Mapping[str, str]],
        disabled: set[str],
    ) -> None:
        """Builds the session. Raises EPFail if a provider cannot be opened."""
    @property
    def inputs_meta(self) -> list[NodeArg]: ...
    @property
    def outputs_meta(self) -> list[NodeArg]: ...
    @property
    def overridable_initializers(self) -> list[NodeArg]: ...
    @property
    def model_meta(self) -> ModelMetadata: ...
    @property
    def session_options(self) -> SessionOptions: ...
    @property
    def get_profiling_start_time_ns(self) -> int: ...
    @property
    def warnings(self) -> list[str]: ...
    @property
    def input_meminfos(self) -> list[OrtMemoryInfo]: ...
    @property
    def output_meminfos(self) -> list[OrtMemoryInfo]: ...
    def end_profiling(self) -> str:
        """Writes the profile, if no session of the package does, and returns the file's name."""
    def get_providers(self) -> list[str]: ...
    def get_provider_options(self) -> dict[str, dict[str, str]]: ...
    def run(
        self,
        output_names: Sequence[str],
        input_feed: dict[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Any]: ...
    def run_plain(self, output_names: Sequence[str], input_feed: dict[str, Any]) -> list[Any]:
        """Runs the model without options. Raises TypeError if the name of an input is no `str`."""

    def run_with_ort_values(
        self,
        input_feed: dict[str, Any],
        output_names: Sequence[str],
        run_options: RunOptions | None = None,
    ) -> OrtValueVector: ...
    def run_donating(
        self, input_feed: dict[str, Any], donated: dict[str, Any], output_names: Sequence[str]
    ) -> OrtValueVector:
        """Runs the model, and takes over the memory of the values in `donated`.

        It may be overwritten, and is freed after its last use. `donated` is emptied.
        """
    def run_with_iobinding(
        self,
        binding: SessionIOBinding,
        run_options: RunOptions | None = None,
    ) -> None:
        """Runs the model on the memory of a binding."""
    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: npt.DTypeLike | int, device: OrtDevice
    ) -> OrtValue:
        """Makes a tensor in the memory of one of the session's devices."""
    def create_ortvalue_from_shape_and_onnx_type(
        self, shape: Sequence[int], onnx_element_type: int, device: OrtDevice, /
    ) -> OrtValue: ...
    def run_async(
        self,
        output_names: Sequence[str],
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None,
        /,
    ) -> None: ...
    def run_with_ortvaluevector(
        self,
        run_options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: OrtValueVector,
        fetch_names: Sequence[str],
        fetches: OrtValueVector,
        fetch_devices: Sequence[OrtDevice],
        /,
    ) -> None: ...
    @property
    def input_epdevices(self) -> list[OrtEpDevice]: ...
    def get_tuning_results(self) -> list[dict[str, Any]]: ...
    def set_tuning_results(
        self, results: Sequence[Mapping[str, Any]], error_on_invalid: bool, /
    ) -> None: ...
    def set_ep_dynamic_options(self, options: dict[str, Any], /) -> None: ...
    def release_captured_graph(self, graph_annotation_id: int, /) -> None: ...
    def is_webgpu_graph_capture_enabled(self) -> bool: ...
    def webgpu_context_id(self) -> int: ...
    def get_provider_graph_assignment_info(self) -> list[OrtEpAssignedSubgraph]: ...
    def profile_events(self) -> list[dict[str, Any]]:
        """Returns a dict of each node that ran: times in microseconds, bytes, types and shapes."""
    def stop_profiling(self) -> None:
        """Drops the events, and collects no more."""
    def plan(self, dims: Mapping[str, int], donated: Sequence[str] = ...) -> Plan: ...
    def memory_use(self) -> dict[str, int]: ...
    def largest_batch(self, dim: str, budget: int) -> int | None: ...
    def trim(self) -> None: ...

@final
class SessionIOBinding:
    """The memory that the runs of one session read and write."""

    def __init__(self, session: InferenceSession) -> None: ...
    def bind_input(
        self,
        name: str,
        source: Any,
        element_type: npt.DTypeLike | int | None = None,
        shape: Sequence[int] | None = None,
        pointer: int | None = None,
    ) -> None:
        """Binds to an array, or with all arguments to memory at an address on a device."""
    def bind_output(
        self,
        name: str,
        device: OrtDevice,
        element_type: npt.DTypeLike | int | None = None,
        shape: Sequence[int] | None = None,
        pointer: int | None = None,
    ) -> None:
        """Binds to a device, or with all arguments to memory at an address on it."""
    def bind_ortvalue_input(self, name: str, value: OrtValue) -> None: ...
    def bind_ortvalue_output(self, name: str, value: OrtValue) -> None: ...
    def clear_binding_inputs(self) -> None: ...
    def clear_binding_outputs(self) -> None: ...
    def synchronize_inputs(self) -> None: ...
    def synchronize_outputs(self) -> None: ...
    def get_outputs(self) -> OrtValueVector: ...
    def copy_outputs_to_cpu(self) -> list[Any]: ...

def check(model: str | bytes) -> list[str]:
    """Returns what keeps a model from running, or deviates from the standard, a line each."""

def compile(model: str | bytes, out: str, options: SessionOptions) -> None:
    """Writes a model with its packed weights into a file that sessions map."""

def save_located(
    model: str | bytes,
    out: str,
    options: SessionOptions,
    locate: Callable[
        [str, OrtValue, tuple[str, int, int] | None], tuple[str, int, int] | None
    ],
) -> None:
    """Writes a model as it is optimized, with weights where a function says."""

def get_all_operator_schema() -> list[OpSchema]:
    """Returns the operators that are known."""

def get_all_opkernel_def() -> list[KernelDef]:
    """Returns the kernels of all providers."""

def get_all_providers() -> list[str]:
    """Returns the names of all providers that any build has, CPU last."""

def get_available_providers() -> list[str]:
    """Returns the names of the providers that work here, CPU last."""

def get_build_info() -> str:
    """Returns what the module was built from."""

def get_device() -> str:
    """Returns `CPU` or `GPU`: what the build computes on."""

def get_rewrite_rules_above_basic() -> list[str]:
    """Returns the names of the rewrite rules above level basic."""

def get_runtime_version() -> str:
    """Returns the version of the runtime itself."""

def get_version_string() -> str:
    """Returns the version of onnxruntime whose interface this is."""

def quantize_blocks(
    weights: _Weights,
    block_size: int,
    bits: int,
    is_symmetric: bool,
    method: str,
    hessian: tuple[HessianCalibration, str] | None = None,
    damping: float = 0.01,
    act_order: bool = False,
) -> tuple[npt.NDArray[np.uint8], _Weights, npt.NDArray[Any] | None, bool]:
    """Quantizes a matrix [k, n] by blocks of its columns, for `MatMulNBits`.

    The method is `minmax`, `mse`, `k_quant` or `hqq`. With the Hessian of a value it is GPTQ, and the
    method chooses the grids. Returns codes, scales and zero points, flat, and whether GPTQ was
    possible. The zero points of `hqq` are numbers; symmetric blocks have none.
    """

def quantize_matmul_2bits(
    dst: npt.NDArray[np.uint8],
    src: _Weights,
    scales: _Weights,
    zero_points: npt.NDArray[np.uint8],
    block_size: int,
    n: int,
    k: int,
    is_symmetric: bool,
    /,
) -> None:
    """Quantizes to 2 bits for `MatMulNBits`; see `quantize_matmul_4bits`."""

def quantize_matmul_4bits(
    dst: npt.NDArray[np.uint8],
    src: _Weights,
    scales: _Weights,
    zero_points: npt.NDArray[np.uint8],
    block_size: int,
    n: int,
    k: int,
    is_symmetric: bool,
    /,
) -> None:
    """Quantizes to 4 bits for `MatMulNBits`.

    `src` is [k, n]. Writes the inputs of the operator: `dst` [n, blocks, block_size * 4 / 8],
    `scales` [n, blocks], `zero_points` [n, blocks] packed by rows. Blocks have 16, 32, 64, 128 or
    256 rows. Raises ValueError if an array is too short, TypeError for other element types.
    """

def quantize_matmul_8bits(
    dst: npt.NDArray[np.uint8],
    src: _Weights,
    scales: _Weights,
    zero_points: npt.NDArray[np.uint8],
    block_size: int,
    n: int,
    k: int,
    is_symmetric: bool,
    /,
) -> None:
    """Quantizes to 8 bits for `MatMulNBits`; see `quantize_matmul_4bits`."""

def quantize_matmul_bnb4(
    dst: npt.NDArray[np.uint8],
    src: _Weights,
    absmax: _Weights,
    block_size: int,
    quant_type: int,
    n: int,
    k: int,
    /,
) -> None:
    """Quantizes to FP4 (type 0) or NF4 (type 1) for `MatMulBnb4`.

    Writes `dst`, two values in a byte, and `absmax`, an element for each block of weights in the
    order of memory.
    """

def quantize_qdq_matmul_2bits(
    dst: npt.NDArray[np.uint8],
    src: _Weights,
    scales: _Weights,
    zero_points: npt.NDArray[np.uint8],
    block_size: int,
    n: int,
    k: int,
    is_symmetric: bool,
    /,
) -> bool:
    """Quantizes to 2 bits for `DequantizeLinear`; see `quantize_qdq_matmul_4bits`."""

def quantize_qdq_matmul_4bits(
    dst: npt.NDArray[np.uint8],
    src: _Weights,
    scales: _Weights,
    zero_points: npt.NDArray[np.uint8],
    block_size: int,
    n: int,
    k: int,
    is_symmetric: bool,
    /,
) -> bool:
    """Quantizes to 4 bits for `DequantizeLinear`.

    Writes the inputs of the operator: `dst` [k, n], `scales` and `zero_points` [blocks, n]. Returns
    whether the values are signed, as those of symmetric blocks are.
    """

def register_execution_provider_library(name: str, path: str) -> None:
    """Loads a library that has a provider. Raises Fail if it cannot be loaded."""

def set_engine_log_severity(severity: int) -> None:
    """Lets only the engine's log lines of this severity on be written."""

def set_seed(seed: int) -> None:
    """Sets the seed of random operators."""

def write_unraisable(error: BaseException, source: object) -> None:
    """Reports an exception that no caller can handle, as Python does for destructors."""

def unregister_execution_provider_library(name: str) -> None:
    """Forgets a library's provider. Raises Fail for an unknown name."""

def write_artifacts(model: str | bytes, session_options: SessionOptions, options: str) -> None:
    """Writes the artifacts of on-device training. `options` is JSON."""
