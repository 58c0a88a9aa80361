"""`Session`: what can be done with a loaded model.

`InferenceSession`, which makes it, is in `_inference_session.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import _async, _logging
from . import onnxruntime_pybind11_state as C
from ._binding import IOBinding
from ._errors import Fail, status
from ._fields import refuse, to_size
from ._profiling import Profile
from ._providers import CPU, warn
from ._public_devices import OrtDeviceVendorId, native_device
from ._run_options import check_options
from ._sparse_tensor import SparseTensor
from ._values import OrtValue, make_tensor

__all__ = ["Session"]


class Session:
    """A loaded model. Any number of threads may run it at once."""

    # `InferenceSession` builds it and sets what a rebuild without a provider needs.
    _sess: C.InferenceSession
    _fallback_providers: list[str]

    def __init__(self, enable_fallback: bool = True) -> None:
        self._profile: Profile | None = None
        self._enable_fallback = enable_fallback

    def get_session_options(self) -> C.SessionOptions:
        """Returns a copy of the options that the session was made with."""
        return self._sess_options

    def get_inputs(self) -> list[C.NodeArg]:
        """Returns the inputs; those with a default are in `get_overridable_initializers`."""
        return self._inputs_meta

    def get_outputs(self) -> list[C.NodeArg]:
        """Returns the outputs."""
        return self._outputs_meta

    def get_overridable_initializers(self) -> list[C.NodeArg]:
        """Returns the inputs that have a default."""
        return self._overridable_initializers

    def get_modelmeta(self) -> C.ModelMetadata:
        """Returns what the author of the model wrote into it."""
        return self._model_meta

    def get_input_memory_infos(self) -> list[C.OrtMemoryInfo]:
        """Returns where each input is read from."""
        return [host_memory() for _ in self._inputs_meta]

    def get_output_memory_infos(self) -> list[C.OrtMemoryInfo]:
        """Returns where each output is written to."""
        return [host_memory() for _ in self._outputs_meta]

    def get_input_epdevices(self) -> list[C.OrtEpDevice]:
        """Returns the device that each input is read by first."""
        return self._sess.input_epdevices

    def get_providers(self) -> list[str]:
        """Returns the names of the providers in use, CPU last."""
        return self._providers

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Returns the options of each provider."""
        return self._provider_options

    def get_provider_graph_assignment_info(self) -> list[C.OrtEpAssignedSubgraph]:
        """Returns which provider runs which nodes.

        Raises Fail unless the configuration entry `session.record_ep_graph_assignment_info` is "1".
        """
        if self._sess_options._entries.get("session.record_ep_graph_assignment_info") != "1":
            raise status(
                Fail,
                "Session configuration entry 'session.record_ep_graph_assignment_info' must be "
                'set to "1" to retrieve EP graph assignment information.',
            )
        return self._sess.get_provider_graph_assignment_info()

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Makes the session anew for other providers.

        The arguments are those of `InferenceSession`. Raises RuntimeError for a provider that no
        build has.
        """
        self._reset_session(providers, provider_options)

    def _reset_session(self, providers: Any, provider_options: Any) -> None:
        raise NotImplementedError

    def disable_fallback(self) -> None:
        """Lets the failure of a provider be an EPFail, instead of a run without it."""
        self._enable_fallback = False

    def enable_fallback(self) -> None:
        """Lets a run go on without a provider that failed, once."""
        self._enable_fallback = True

    def run(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        run_options: C.RunOptions | None = None,
    ) -> list[Any]:
        """Runs the model.

        `output_names` are the outputs to return, in order; None or none is all of them.
        `input_feed` has a value for each input: an array (used in place), an OrtValue, a list for
        sequences, a dict for maps, or None for an optional input that is absent.

        Returns a list: arrays for tensors, lists for sequences, dicts for maps, None for an absent
        optional. Arrays are writable, outlive the session, and never alias an input.

        Raises ValueError for a missing input, InvalidArgument for an input that is unknown or of
        another type or shape, Fail or another class of its module if an operator fails.

        Example: `(y,) = session.run(None, {"x": np.zeros((1, 3), np.float32)})`
        """
        # Most calls are like this one, and need nothing that is below.
        names = self._output_names if output_names is None else output_names
        if (
            isinstance(names, list)
            and names
            and run_options is None
            and type(input_feed) is dict
            and self._is_plain
        ):
            # The engine refuses a feed that lacks inputs, too, but in other words than `_feed`.
            try:
                return self._sess.run_plain(names, input_feed)
            except (RuntimeError, TypeError) as error:
                is_same = (
                    self._required <= input_feed.keys()
                    and self._names(names) == names
                    and self._feed(input_feed) is input_feed
                )
                if is_same and not isinstance(error, C.EPFail):
                    if isinstance(error, RuntimeError):
                        self._log_failure(error, None)
                    raise
        names, feed = self._names(output_names), self._feed(input_feed)
        check_options(run_options)
        results = self._call("run", run_options, names, feed, run_options)
        if self._has_sparse_output:
            return [SparseTensor(r) if isinstance(r, C.SparseTensor) else r for r in results]
        return results

    def run_async(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: C.RunOptions | None = None,
    ) -> None:
        """Starts a run in another thread, which then calls `callback(results, user_data, error)`.

        If the run fails, `results` is empty and `error` says why; otherwise `error` is empty. The
        arguments are checked before the call returns. The feed is kept alive. At most 32 such runs
        of a process go on at once; more wait.
        """
        # A copy: the caller may go on with the dict.
        names, feed = self._names(output_names), dict(self._feed(input_feed))
        check_options(run_options)
        _async.start(lambda: self.run(names, feed, run_options), callback, user_data)

    def run_with_ort_values(
        self,
        output_names: Iterable[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: C.RunOptions | None = None,
    ) -> list[OrtValue]:
        """Does what `run` does, on values and with values as results."""
        names, feed = self._names(output_names), self._feed(input_dict_ort_values)
        check_options(run_options)
        results = self._call("run_with_ort_values", run_options, feed, names, run_options)
        return [OrtValue(value) for value in results]

    def run_donating(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        donated: dict[str, Any],
    ) -> list[OrtValue]:
        """Does what `run_with_ort_values` does, and takes over the memory of some inputs.

        The run may overwrite the values in `donated`, and frees each after its last use. The dict
        is emptied. Nothing else may hold the values, or share their memory.
        """
        # Not `_call`: after a failure, the donated values are gone.
        results = self._sess.run_donating(dict(input_feed), donated, self._names(output_names))
        return [OrtValue(value) for value in results]

    def run_with_ortvaluevector(
        self,
        run_options: C.RunOptions | None,
        feed_names: Sequence[str],
        feeds: C.OrtValueVector,
        fetch_names: Sequence[str],
        fetches: C.OrtValueVector,
        fetch_devices: Sequence[C.OrtDevice],
    ) -> None:
        """Runs the model on a vector of values.

        The results are appended to `fetches` if that is empty, and otherwise written to its values.
        `fetch_devices` is accepted: results lie where the model's last nodes write them.
        """
        values = feed_names, feeds, fetch_names, fetches, fetch_devices
        self._call("run_with_ortvaluevector", run_options, run_options, *values)

    def run_with_iobinding(
        self, iobinding: IOBinding, run_options: C.RunOptions | None = None
    ) -> None:
        """Runs the model on the memory of a binding.

        Raises ValueError if another session made the binding.
        """
        if iobinding._session is not self:
            raise ValueError("IOBinding must be used with the session that created it.")
        if run_options is None and self._profile is None:
            # No fallback, here and below: the binding belongs to the native session.
            self._sess.run_with_iobinding(iobinding._iobinding)
            return
        check_options(run_options)
        self._profiled("run_with_iobinding", iobinding._iobinding, run_options)

    def io_binding(self) -> IOBinding:
        """Returns a new binding for `run_with_iobinding`."""
        return IOBinding(self)

    def create_ortvalue_from_shape_and_type(
        self,
        shape: Sequence[int],
        element_type: Any,
        device_type: str,
        device_id: int = 0,
        vendor_id: int | OrtDeviceVendorId = -1,
    ) -> OrtValue:
        """Returns a tensor in the memory of one of the session's devices.

        The arguments are those of `OrtValue.ortvalue_from_shape_and_type`.
        """
        device = native_device(device_type, device_id, vendor_id)
        owner: Any = C.OrtValue if device.device_type() == 0 else self._sess
        return OrtValue(make_tensor(owner, shape, element_type, device), session=self._sess)

    def end_profiling(self) -> str:
        """Ends the profile and returns the name of its file, "" if there is none.

        Raises OSError if the file cannot be written. A session that is dropped writes it, too.
        """
        return self._profile.finish() if self._profile else ""

    def get_profiling_start_time_ns(self) -> int:
        """Returns when the profile began, in nanoseconds of `time.time_ns`, 0 if there is none."""
        return self._profile.start_ns if self._profile else 0

    def get_tuning_results(self) -> list[dict[str, Any]]:
        """Returns an empty list: kernels are not tuned at run time."""
        return self._sess.get_tuning_results()

    def set_tuning_results(
        self, results: Sequence[dict[str, Any]], *, error_on_invalid: bool = False
    ) -> None:
        """Ignores results; with `error_on_invalid`, any is a RuntimeError."""
        self._sess.set_tuning_results(results, error_on_invalid)

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Accepts options for running sessions; none is a RuntimeError. No provider has any."""
        self._sess.set_ep_dynamic_options(dict(options))

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        """Does nothing: no graph of device calls is captured."""

    def plan(self, dims: Mapping[str, int] | None = None, /, **named: int) -> C.Plan:
        """Returns what a run with these sizes allocates, without running.

        Sizes are given by name, or in a dict where the names are no Python names. A size that is
        not given counts as 1. `print` shows the plan as tables, and a notebook draws it.

        Raises InvalidArgument for a dimension that the model does not have.

        Example: `session.plan(batch=8, sequence=128).peak_bytes`
        """
        return self._sess.plan({**(dims or {}), **named})

    def memory_use(self) -> dict[str, int]:
        """Returns the bytes that the session holds now, by purpose."""
        return self._sess.memory_use()

    def largest_batch(self, dim: str, budget: int | str) -> int | None:
        """Returns the largest size of a dimension whose run allocates at most `budget` bytes.

        None if no run does. `budget` may be text such as "2GiB".

        Example: `session.largest_batch("batch", "512 MiB")`
        """
        size = to_size(budget, "budget")
        if size is None:
            refuse("budget", "a number of bytes", budget)
        return self._sess.largest_batch(dim, size)

    def trim(self) -> None:
        """Gives memory that waits for the next run back to the system."""
        self._sess.trim()

    def _validate_input(self, feed_input_names: Iterable[str]) -> None:
        names = list(feed_input_names)
        if missing := [name for name in self._required_names if name not in names]:
            raise ValueError(
                f"Required inputs ({missing}) are missing from input feed ({names})."
            )

    def _feed(self, input_feed: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the feed as a dict without absent values."""
        feed = input_feed
        if type(feed) is not dict:
            feed = dict(zip(feed.keys(), feed.values(), strict=True))
        # Arrays compare element by element, so `None in feed.values()` would not do.
        for value in feed.values():
            if value is None:
                feed = {name: value for name, value in feed.items() if value is not None}
                break
        if not self._required <= feed.keys():
            self._validate_input(feed)
        return feed

    def _names(self, output_names: Iterable[str] | None) -> list[str]:
        if output_names is None:
            return self._output_names
        if isinstance(output_names, str | bytes) and output_names:
            raise TypeError(
                f"output_names must be a list of names, not a {type(output_names).__name__}: "
                f"[{output_names!r}]"
            )
        names = [name.decode() if isinstance(name, bytes) else name for name in output_names]
        return names or self._output_names

    def _call(self, method: str, options: C.RunOptions | None, *arguments: Any) -> Any:
        """Calls a method of the native session; if a provider fails, once more without it."""
        try:
            if self._profile is None:
                return getattr(self._sess, method)(*arguments)
            return self._profiled(method, *arguments)
        except C.EPFail as error:
            self._fall_back(error)
            return self._profiled(method, *arguments)
        except RuntimeError as error:
            self._log_failure(error, options)
            raise

    def _log_failure(self, error: Exception, options: C.RunOptions | None) -> None:
        """Logs why a run failed, unless the run or the session asks for silence."""
        chosen = options if options and options.log_severity_level >= 0 else self._sess_options
        _logging.log(
            _logging.ERROR,
            _async.message(error),
            logid=chosen.logid,
            threshold=chosen.log_severity_level,
        )

    def _profiled(self, method: str, *arguments: Any) -> Any:
        run = getattr(self._sess, method)
        if self._profile is None:
            return run(*arguments)
        with self._profile.span("model_run"):
            return run(*arguments)

    def _fall_back(self, error: C.EPFail) -> None:
        """Makes the session anew without the provider that failed, if that is allowed."""
        if not self._enable_fallback or self._providers == [CPU]:
            raise error
        warn(
            f"EP Error: {error} using {self._providers}. "
            f"Falling back to {self._fallback_providers} and retrying."
        )
        self.set_providers(self._fallback_providers)
        self.disable_fallback()

    def _describe(self) -> None:
        """Reads what the native session says of the model."""
        native = self._sess
        self._sess_options = native.session_options
        self._inputs_meta = native.inputs_meta
        self._outputs_meta = native.outputs_meta
        self._overridable_initializers = native.overridable_initializers
        self._model_meta = native.model_meta
        self._providers = native.get_providers()
        self._provider_options = native.get_provider_options()
        self._output_names = [output.name for output in self._outputs_meta]
        self._has_sparse_output = any("sparse" in output.type for output in self._outputs_meta)
        self._is_plain = self._profile is None and not self._has_sparse_output
        self._required_names = [
            arg.name for arg in self._inputs_meta if not arg.type.startswith("optional")
        ]
        self._required = frozenset(self._required_names)


def host_memory() -> C.OrtMemoryInfo:
    kind, memory = C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, C.OrtMemType.DEFAULT
    return C.OrtMemoryInfo("Cpu", kind, 0, memory)
