"""Calibration: the ranges of a model's values over samples, for static quantization.

Observers see the values inside of the run. So the model gets no outputs, memory is that of a run and
some KiB for each value whatever the number of samples, and inputs may have different shapes.

Needs the package `onnx`.
"""

from __future__ import annotations

import abc
import difflib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference

from .. import GraphOptimizationLevel, InferenceSession, SessionOptions
from ..capi._pybind_state import Calibration, ChannelCalibration
from ._histograms import CalibrationDataCollector as CalibrationDataCollector
from ._histograms import HistogramCollector as HistogramCollector
from ._ranges import CalibrationCacheEncoder as CalibrationCacheEncoder
from ._ranges import CalibrationMethod as CalibrationMethod
from ._ranges import TensorData as TensorData
from ._ranges import TensorsData as TensorsData
from ._ranges import load_tensors_data as load_tensors_data
from ._ranges import save_tensors_data as save_tensors_data

logger = logging.getLogger(__name__)

Model = str | os.PathLike[str] | ModelProto

_FLOATS: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype("float32"),
    TensorProto.FLOAT16: np.dtype("float16"),
}
#: Larger weights matter to no shape, so shape inference does without their bytes.
_SMALL_WEIGHT = 1024


class CalibrationDataReader(metaclass=abc.ABCMeta):
    """The samples of a calibration. Any class with a method `get_next` counts as a subclass.

    Example:
        >>> class Reader(CalibrationDataReader):
        ...     def __init__(self, samples):
        ...         self.samples = iter(samples)
        ...     def get_next(self):
        ...         return next(self.samples, None)
    """

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        """Whether a class has what readers need."""
        return callable(getattr(subclass, "get_next", None)) or NotImplemented

    @abc.abstractmethod
    def get_next(self) -> dict[str, Any] | None:
        """Returns the inputs of the next sample by name, None after the last one."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        sample = self.get_next()
        if not sample:
            raise StopIteration
        return sample

    def __len__(self) -> int:
        raise NotImplementedError

    def set_range(self, start_index: int, end_index: int) -> None:
        """Lets the next samples be those from `start_index` to before `end_index`."""
        raise NotImplementedError


def _samples(reader: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the samples of any object with `get_next`."""
    while sample := reader.get_next():
        yield sample


def inferred_skeleton(model: ModelProto) -> ModelProto:
    """Returns a copy of a model with inferred types, without the bytes of large weights."""
    held = [weight for weight in model.graph.initializer if len(weight.raw_data) > _SMALL_WEIGHT]
    raw = [weight.raw_data for weight in held]
    try:
        return _stripped(model, held)
    finally:
        for weight, data in zip(held, raw):
            weight.ClearField("data_location")
            weight.raw_data = data


def _loaded_skeleton(path: str | os.PathLike[str]) -> ModelProto:
    """Returns the model of a file as `inferred_skeleton` does, and lets its weights go at once."""
    # Weights in other files are not needed for the types of values.
    model = onnx.load(os.fspath(path), load_external_data=False)
    return _stripped(model, model.graph.initializer)


def _stripped(model: ModelProto, weights: Iterable[TensorProto]) -> ModelProto:
    """Takes the bytes out of large weights, and returns a copy with inferred types."""
    for weight in weights:
        if len(weight.raw_data) > _SMALL_WEIGHT:
            weight.ClearField("raw_data")
            weight.data_location = TensorProto.EXTERNAL
    return shape_inference.infer_shapes(model)


class CalibraterBase:
    """What all calibraters share: the model, which of its values are observed, and the session.

    Args:
        model_path: the model, or its path.
        op_types_to_calibrate: the operators whose inputs and outputs are observed, all if None.
        augmented_model_path: accepted; no model is written.
        symmetric: ranges get equal ends.
        use_external_data_format: accepted; no model is written.
        per_channel: ranges are those of the channels, along the second axis.

    Raises:
        ValueError: `model_path` is something else.
    """

    def __init__(
        self,
        model_path: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        per_channel: bool = False,
    ) -> None:
        if not isinstance(model_path, str | os.PathLike | ModelProto):
            raise ValueError(f"model_path should be model path, not {type(model_path)}.")
        self.op_types_to_calibrate = op_types_to_calibrate
        self.augmented_model_path = augmented_model_path
        self.symmetric = symmetric
        self.use_external_data_format = use_external_data_format
        self.per_channel = per_channel
        self.augment_model: ModelProto | None = None
        self.infer_session: InferenceSession | None = None
        self.execution_providers = ["CPUExecutionProvider"]
        self.calibrate_tensors_range: TensorsData | None = None
        self._source = model_path
        if isinstance(model_path, ModelProto):
            self.model = inferred_skeleton(model_path)
        else:
            self.model = _loaded_skeleton(model_path)

    def set_execution_providers(
        self, execution_providers: Sequence[str] = ("CPUExecutionProvider",)
    ) -> None:
        """Notes the providers and makes the session. Values are observed on the CPU alone."""
        others = [name for name in execution_providers if name != "CPUExecutionProvider"]
        if others:
            logger.warning("calibration runs on the CPU, not on %s", ", ".join(others))
        self.execution_providers = list(execution_providers)
        self.create_inference_session()

    def create_inference_session(self) -> None:
        """Makes the session in which each value of the model is computed.

        It is that of the model, or of the file at `augmented_model_path` if a subclass has set
        `augment_model`.
        """
        options = SessionOptions()
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
        source: Any = self._source
        if self.augment_model is not None:
            source = self.augmented_model_path
        if isinstance(source, ModelProto):
            source = source.SerializeToString()
        elif not isinstance(source, str):
            source = os.fspath(source)
        providers = ["CPUExecutionProvider"]
        self.infer_session = InferenceSession(source, options, providers=providers)

    def select_tensors_to_calibrate(
        self, model: ModelProto
    ) -> tuple[set[str], dict[str, onnx.ValueInfoProto]]:
        """Returns the names of the values that are observed, and all values of known type."""
        graph = model.graph
        infos = {
            info.name: info for group in (graph.value_info, graph.output, graph.input) for info in group
        }
        return set(self._element_types(model, infos)), infos

    def _element_types(
        self, model: ModelProto, infos: Mapping[str, onnx.ValueInfoProto]
    ) -> dict[str, np.dtype[Any]]:
        """Returns the values that are observed, in the order of the graph, with their types."""
        weights = {weight.name for weight in model.graph.initializer}
        chosen: dict[str, np.dtype[Any]] = {}
        for node in model.graph.node:
            if self.op_types_to_calibrate and node.op_type not in self.op_types_to_calibrate:
                continue
            for name in (*node.input, *node.output):
                if name not in infos or name in weights:
                    continue
                kind = infos[name].type
                element = kind.tensor_type.elem_type if kind.HasField("tensor_type") else 0
                if element in _FLOATS:
                    chosen[name] = _FLOATS[element]
        return chosen

    def observed_types(self) -> dict[str, np.dtype[Any]]:
        """Returns the values of the model that are observed, with their element types."""
        return self._element_types(self.model, self.select_tensors_to_calibrate(self.model)[1])

    def get_augment_model(self) -> ModelProto | None:
        """Returns the model that a subclass has changed, None if it is the original."""
        return self.augment_model

    def augment_graph(self) -> None:
        """Changes the model before the session is made; the classes here have no need."""
        raise NotImplementedError

    def collect_data(self, data_reader: CalibrationDataReader) -> None:
        """Runs the samples of a reader. May be called again with more."""
        raise NotImplementedError

    def clear_collected_data(self) -> None:
        """Does nothing: no values are kept. Programs call it between collections."""

    def compute_data(self) -> TensorsData | None:
        """Returns the ranges of all samples so far."""
        raise NotImplementedError

    def _run(
        self, data_reader: Any, observer: Callable[[], Calibration | ChannelCalibration]
    ) -> Iterator[None]:
        """Runs each sample, lets the observer see it, and stops after it.

        Raises:
            ValueError: the reader has no sample.
        """
        if self.infer_session is None:
            self.create_inference_session()
        assert self.infer_session is not None
        count = 0
        for sample in _samples(data_reader):
            observer().run(self.infer_session._sess, dict(sample))
            count += 1
            yield
        if not count:
            raise ValueError("No data is collected.")

    def _constants(self, names: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the values of nodes `Constant`, which no run computes."""
        return {
            node.output[0]: _value_of(node)
            for node in self.model.graph.node
            if node.op_type == "Constant" and node.output[0] in names
        }


def _value_of(node: onnx.NodeProto) -> np.ndarray:
    """Returns the value of a node `Constant`."""
    (attribute,) = node.attribute
    value = helper.get_attribute_value(attribute)
    if attribute.name == "sparse_value":
        # Zero is in every range, so that only the other elements count.
        return np.append(numpy_helper.to_array(value.values), np.float32(0))
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value, np.float32)


class MinMaxCalibrater(CalibraterBase):
    """Ranges from the least to the largest finite value.

    Args:
        model_path, op_types_to_calibrate, augmented_model_path, symmetric,
            use_external_data_format, per_channel: see `CalibraterBase`.
        moving_average: the ends are means over the runs of a call of `collect_data`; a later call
            moves them.
        averaging_constant: how far, as a share of the difference.
        max_intermediate_outputs: accepted; memory does not grow with the samples.
    """

    def __init__(
        self,
        model_path: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        moving_average: bool = False,
        averaging_constant: float = 0.01,
        max_intermediate_outputs: int | None = None,
        per_channel: bool = False,
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            augmented_model_path,
            symmetric,
            use_external_data_format,
            per_channel,
        )
        if moving_average and not 0 <= averaging_constant <= 1:
            raise ValueError(
                "Invalid averaging constant, which should not be < 0 or > 1: "
                f"{averaging_constant}"
            )
        self.moving_average = moving_average
        self.averaging_constant = averaging_constant
        self.max_intermediate_outputs = max_intermediate_outputs
        self._ends: dict[str, _Ends] | None = None

    def augment_graph(self) -> None:
        """Does nothing: observers need no outputs."""

    def collect_data(self, data_reader: CalibrationDataReader) -> None:
        """Runs the samples of a reader, and merges their ranges with those of earlier calls.

        Raises:
            ValueError: the reader has no sample.
        """
        types = self.observed_types()
        constants = self._constants(types)
        collect = self._collect_channels if self.per_channel else self._collect_values
        ends = dict(self._ends or {})
        for name, (low, high) in collect(data_reader, types, constants).items():
            found = low.astype(types[name]), high.astype(types[name])
            known = ends.get(name)
            ends[name] = found if known is None else self._merged(name, known, found)
        self._ends = ends
        self.compute_data()

    def compute_data(self) -> TensorsData | None:
        """Returns the ranges of all samples so far, None if there were none."""
        if self._ends is None:
            return None
        ranges = {}
        for name, (low, high) in self._ends.items():
            if self.symmetric:
                high = np.maximum(np.abs(low), np.abs(high))
                low = -high
            ranges[name] = np.atleast_1d(low), np.atleast_1d(high)
        self.calibrate_tensors_range = TensorsData(CalibrationMethod.MinMax, ranges)
        return self.calibrate_tensors_range

    def _merged(self, name: str, known: _Ends, found: _Ends) -> _Ends:
        if known[0].shape != found[0].shape:
            text = f"value {name!r} has {known[0].size} channels and then {found[0].size}"
            raise ValueError(text)
        if self.moving_average:
            constant = self.averaging_constant
            low, high = (old + constant * (new - old) for old, new in zip(known, found))
            return low, high
        return np.minimum(known[0], found[0]), np.maximum(known[1], found[1])

    def _collect_values(
        self, data_reader: Any, types: Mapping[str, Any], constants: Mapping[str, np.ndarray]
    ) -> dict[str, _Ends]:
        observer = Calibration(list(types), False, False)
        for name, value in constants.items():
            observer.observe(name, np.ascontiguousarray(value, np.float32))
        if self.moving_average:
            return self._collect_means(data_reader, types, observer)
        for _ in self._run(data_reader, lambda: observer):
            pass
        return {name: _ends_of(name, observer) for name in types}

    def _collect_means(
        self, data_reader: Any, types: Mapping[str, Any], constants: Calibration
    ) -> dict[str, _Ends]:
        """Returns the means of the ends over the runs, summed in float32 one after the other."""
        sums: dict[str, _Ends] = {}
        counts: dict[str, int] = {}
        last = constants

        def renewed() -> Calibration:
            nonlocal last
            last = Calibration(list(types), False, False)
            return last

        for _ in self._run(data_reader, renewed):
            for name in types:
                if last.extremes(name) is None:
                    continue
                ends = _ends_of(name, last)
                known = sums.get(name)
                sums[name] = ends if known is None else (known[0] + ends[0], known[1] + ends[1])
                counts[name] = counts.get(name, 0) + 1
        means = {
            name: (low / np.float32(counts[name]), high / np.float32(counts[name]))
            for name, (low, high) in sums.items()
        }
        return {name: means.get(name) or _ends_of(name, constants) for name in types}

    def _collect_channels(
        self, data_reader: Any, types: Mapping[str, Any], constants: Mapping[str, np.ndarray]
    ) -> dict[str, _Ends]:
        observer = ChannelCalibration(list(types))
        ends: dict[str, _Ends] = {name: _channel_ends(value) for name, value in constants.items()}
        runs: dict[str, int] = {}
        for _ in self._run(data_reader, lambda: observer):
            for name, found in observer.take().items():
                runs[name] = runs.get(name, 0) + 1
                known = ends.get(name)
                if known is None:
                    ends[name] = found
                elif known[0].shape != found[0].shape:
                    text = f"value {name!r} has {known[0].size} channels and then {found[0].size}"
                    raise ValueError(text)
                elif self.moving_average:
                    ends[name] = tuple(np.add(*pair) for pair in zip(known, found))  # type: ignore[assignment]
                else:
                    ends[name] = np.minimum(known[0], found[0]), np.maximum(known[1], found[1])
        if self.moving_average:
            for name, count in runs.items():
                low, high = ends[name]
                ends[name] = low / np.float32(count), high / np.float32(count)
        zero = np.zeros(1, np.float32)
        return {name: _finite(ends.get(name, (zero, zero))) for name in types}


_Ends = tuple[np.ndarray, np.ndarray]


def _ends_of(name: str, observer: Calibration) -> _Ends:
    """Returns the ends of what an observer has seen. A value of no finite element has no extent."""
    _warn(name, observer)
    low, high = observer.extremes(name) or (0.0, 0.0)
    return np.array(low, np.float32), np.array(high, np.float32)


def _channel_ends(value: np.ndarray) -> _Ends:
    """Returns the least and the largest value of each channel."""
    wide = np.asarray(value, np.float32)
    axes = tuple(axis for axis in range(wide.ndim) if axis != 1)
    return np.atleast_1d(wide.min(axes)), np.atleast_1d(wide.max(axes))


def _finite(ends: _Ends) -> _Ends:
    """Returns ranges of which those of no finite element have no extent."""
    low, high = (np.where(ends[0] <= ends[1], end, np.float32(0)) for end in ends)
    return low, high


def _warn(name: str, observer: Calibration) -> None:
    """Says if elements had no place in a range."""
    _, _, nan, infinite = observer.counts(name)
    if nan or infinite:
        text = "value '%s' has %d elements that are NaN and %d infinite ones; its range is without"
        logger.warning(text, name, nan, infinite)


class HistogramCalibrater(CalibraterBase):
    """Ranges from histograms; see `HistogramCollector` for the methods and their arguments."""

    _calibration_method = CalibrationMethod.Percentile

    def __init__(
        self,
        model_path: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "percentile",
        symmetric: bool = False,
        num_bins: int = 128,
        num_quantized_bins: int = 2048,
        percentile: float = 99.999,
        scenario: str = "same",
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            augmented_model_path,
            symmetric,
            use_external_data_format,
        )
        self.method = method
        self.num_bins = num_bins
        self.num_quantized_bins = num_quantized_bins
        self.percentile = percentile
        self.scenario = scenario
        self.collector = HistogramCollector(
            method, symmetric, num_bins, num_quantized_bins, percentile, scenario
        )
        self._calibration: Calibration | None = None

    def augment_graph(self) -> None:
        """Does nothing: observers need no outputs."""

    def collect_data(self, data_reader: CalibrationDataReader) -> None:
        """Runs the samples of a reader.

        Raises:
            ValueError: the reader has no sample.
        """
        if self._calibration is None:
            types = self.observed_types()
            self._calibration = self.collector.observers(types)
            for name, value in self._constants(types).items():
                self._calibration.observe(name, np.ascontiguousarray(value, np.float32))
        calibration = self._calibration
        for _ in self._run(data_reader, lambda: calibration):
            pass

    def compute_data(self) -> TensorsData:
        """Returns the ranges of all samples so far.

        Raises:
            ValueError: there were none.
        """
        if self._calibration is None:
            raise ValueError("No collector created and can't generate calibration data.")
        for name in self.observed_types():
            _warn(name, self._calibration)
        found = self.collector.compute_collection_result()
        method = {
            "distribution": CalibrationMethod.Distribution,
            "entropy": CalibrationMethod.Entropy,
            "percentile": CalibrationMethod.Percentile,
        }[self.method]
        self.calibrate_tensors_range = TensorsData(method, found)
        return self.calibrate_tensors_range


class EntropyCalibrater(HistogramCalibrater):
    """Ranges whose codes lose the least information, by Kullback-Leibler divergence."""

    def __init__(
        self,
        model_path: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "entropy",
        symmetric: bool = False,
        num_bins: int = 128,
        num_quantized_bins: int = 128,
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            augmented_model_path,
            use_external_data_format,
            method=method,
            symmetric=symmetric,
            num_bins=num_bins,
            num_quantized_bins=num_quantized_bins,
        )


class PercentileCalibrater(HistogramCalibrater):
    """Ranges that hold a share of the values; the rest is clipped."""

    def __init__(
        self,
        model_path: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "percentile",
        symmetric: bool = False,
        num_bins: int = 2048,
        percentile: float = 99.999,
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            augmented_model_path,
            use_external_data_format,
            method=method,
            symmetric=symmetric,
            num_bins=num_bins,
            percentile=percentile,
        )


class DistributionCalibrater(HistogramCalibrater):
    """Means and standard deviations, for float8."""

    def __init__(
        self,
        model_path: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "distribution",
        num_bins: int = 2048,
        scenario: str = "same",
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            augmented_model_path,
            use_external_data_format,
            method=method,
            num_bins=num_bins,
            scenario=scenario,
        )


#: The class of each method, and its options with their defaults.
_CALIBRATERS: dict[CalibrationMethod, tuple[type[CalibraterBase], dict[str, Any]]] = {
    CalibrationMethod.MinMax: (
        MinMaxCalibrater,
        {
            "symmetric": False,
            "moving_average": False,
            "averaging_constant": 0.01,
            "max_intermediate_outputs": None,
            "per_channel": False,
        },
    ),
    CalibrationMethod.Entropy: (
        EntropyCalibrater,
        {"symmetric": False, "num_bins": 128, "num_quantized_bins": 128},
    ),
    CalibrationMethod.Percentile: (
        PercentileCalibrater,
        {"symmetric": True, "num_bins": 2048, "percentile": 99.999},
    ),
    CalibrationMethod.Distribution: (
        DistributionCalibrater,
        {"num_bins": 2048, "scenario": "same"},
    ),
}
#: Options of all methods: callers pass the same ones whatever the method.
_OPTIONS = sorted({name for _, options in _CALIBRATERS.values() for name in options})


def create_calibrator(
    model: Model,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    use_external_data_format: bool = False,
    providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a calibrater that is ready for `collect_data`.

    Args:
        model: the model, or its path.
        op_types_to_calibrate: the operators whose inputs and outputs are observed, all if None.
        augmented_model_path: accepted; no model is written.
        calibrate_method: how ranges are made.
        use_external_data_format: accepted; no model is written.
        providers: accepted; values are observed on the CPU.
        extra_options: options of the method: `symmetric`, `moving_average`, `averaging_constant`,
            `max_intermediate_outputs`, `per_channel`, `num_bins`, `num_quantized_bins`,
            `percentile`, `scenario`. Those of other methods have no effect.

    Raises:
        ValueError: there is no such method or option, or the option's value is out of range.

    Example:
        >>> calibrator = create_calibrator("model.onnx")
        >>> calibrator.collect_data(reader)
        >>> calibrator.compute_data()["x"].range_value
    """
    if calibrate_method not in _CALIBRATERS:
        raise ValueError(f"Unsupported calibration method {calibrate_method}")
    given = dict(extra_options or {})
    for name in given:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, 1, 0)
            raise ValueError(f"there is no option {name!r} of calibrations; did you mean {near[0]!r}?")
    kind, defaults = _CALIBRATERS[calibrate_method]
    options = {name: given.get(name, default) for name, default in defaults.items()}
    calibrator = kind(
        model,
        op_types_to_calibrate,
        augmented_model_path,
        use_external_data_format=use_external_data_format,
        **options,
    )
    calibrator.augment_graph()
    if providers:
        calibrator.set_execution_providers(providers)
    else:
        calibrator.create_inference_session()
    return calibrator
