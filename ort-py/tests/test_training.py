"""On-device training. Losses are those that onnxruntime-training 1.19.2 computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness import IS_ORIGINAL, PACKAGE, Gives, Raises, case, check, ort, table

onnx = pytest.importorskip("onnx")
from onnx import helper, numpy_helper  # noqa: E402

if IS_ORIGINAL:
    pytest.skip("onnxruntime is built without training", allow_module_level=True)

from ort_runtime import training  # noqa: E402
from ort_runtime.training import api, artifacts, onnxblock, optim  # noqa: E402
from ort_runtime.training.artifacts import LossType, OptimType, generate_artifacts  # noqa: E402

F = np.float32
X = np.cos(np.arange(20)).reshape(5, 4).astype(F)
TARGET = np.sin(np.arange(15) * 2).reshape(5, 3).astype(F)
SHARES = (1 / (1 + np.exp(-TARGET))).astype(F)
LABELS = np.array([0, 1, 2, 1, 0], np.int64)
W = np.sin(np.arange(12)).reshape(4, 3).astype(F)
value = ort.OrtValue.ortvalue_from_numpy


def linear() -> Any:
    """Returns a model of one layer: x [n, 4], W [4, 3], b [3], y [n, 3]."""
    weights = [numpy_helper.from_array(W, "W"), numpy_helper.from_array(np.zeros(3, F), "b")]
    info = helper.make_tensor_value_info
    inputs, outputs = [info("x", 1, ["n", 4])], [info("y", 1, ["n", 3])]
    node = helper.make_node("Gemm", ["x", "W", "b"], ["y"])
    graph = helper.make_graph([node], "linear", inputs, outputs, weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def made(folder: Path, **options: Any) -> Any:
    """Writes artifacts of the layer. Returns state, module and optimizer."""
    settings: dict[str, Any] = {
        "requires_grad": ["W", "b"],
        "loss": LossType.MSELoss,
        "optimizer": OptimType.SGD,
        "artifact_directory": folder,
        **options,
    }
    generate_artifacts(linear(), **settings)
    return opened(folder)


def opened(folder: Path, checkpoint: str = "checkpoint") -> Any:
    """Returns state, module and optimizer of artifacts."""
    state = api.CheckpointState.load_checkpoint(folder / checkpoint)
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return SimpleNamespace(
        state=state, module=module, optimizer=api.Optimizer(folder / "optimizer_model.onnx", module)
    )


def losses(run: Any, *inputs: np.ndarray, steps: int = 5) -> np.ndarray:
    """Trains with the rate 0.1. Returns the loss of each step."""
    run.optimizer.set_learning_rate(0.1)
    found = []
    for _ in range(steps):
        loss = run.module(*inputs)
        found.append(loss[0] if isinstance(loss, tuple) else loss)
        run.optimizer.step()
        run.module.lazy_reset_grad()
    return np.array(found, F)


class TwoLosses(onnxblock.Block):
    """A squared and an absolute error."""

    def __init__(self) -> None:
        super().__init__()
        self.first = onnxblock.loss.MSELoss()
        self.second = onnxblock.loss.L1Loss()
        self.add = onnxblock.blocks.Add()

    def build(self, output: str) -> str:
        return self.add(self.first(output), self.second(output, target_name="target2"))


CE, BCE = onnxblock.loss.CrossEntropyLoss, onnxblock.loss.BCEWithLogitsLoss
ADAMW = onnxblock.optim.AdamW
CLIPPED = onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(0.5))
STEPS = [
    case("mse", {}, [TARGET], [0.8566614, 0.7288106, 0.6225107, 0.534014, 0.4602409]),
    case(
        "l1",
        {"loss": LossType.L1Loss},
        [TARGET],
        [0.7648903, 0.7310712, 0.6972521, 0.663433, 0.6350792],
    ),
    case(
        "bce",
        {"loss": LossType.BCEWithLogitsLoss},
        [SHARES],
        [0.7407448, 0.7388788, 0.7370489, 0.7352548, 0.7334958],
    ),
    case(
        "cross entropy",
        {"loss": LossType.CrossEntropyLoss},
        [LABELS],
        [1.2022963, 1.174643, 1.1486658, 1.1242428, 1.1012598],
    ),
    case(
        "sum of squares",
        {"loss": onnxblock.loss.MSELoss("sum")},
        [TARGET],
        [12.8499203, 2.7190709, 1.4663476, 1.1363611, 1.0483769],
    ),
    case(
        "bce of weighted classes",
        {"loss": BCE(weight=np.array([1, 2, 3], F), pos_weight=np.array([2.0], F))},
        [SHARES],
        [2.2946391, 2.25963, 2.2271521, 2.1970541, 2.1691859],
    ),
    case(
        "two losses",
        {"loss": TwoLosses()},
        [TARGET, TARGET * 2],
        [2.1984336, 1.944778, 1.732175, 1.5537413, 1.4037831],
    ),
    case(
        "adamw",
        {"optimizer": ADAMW(weight_decay=0.1)},
        [TARGET],
        [0.8566614, 0.5373505, 0.3462344, 0.2420883, 0.1886781],
    ),
    case(
        "adamw without correction",
        {"optimizer": ADAMW(bias_correction=False, betas=(0.8, 0.9), eps=1e-4)},
        [TARGET],
        [0.8566614, 0.6414221, 0.4380069, 0.2971559, 0.2117936],
    ),
    case(
        "clipped gradients",
        {"optimizer": CLIPPED},
        [TARGET],
        [0.8566614, 0.7999383, 0.7454221, 0.6931064, 0.6429849],
    ),
    case(
        "one parameter",
        {"requires_grad": ["W"], "frozen_params": ["b"]},
        [TARGET],
        [0.8566614, 0.7779372, 0.7142211, 0.662638],
    ),
]


@table("options, others, expected", STEPS)
def test_steps(
    options: dict[str, Any], others: list[np.ndarray], expected: list[float], tmp_path: Path
) -> None:
    found = losses(made(tmp_path, **options), X, *others, steps=len(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_a_weighted_loss_ignores_a_class(tmp_path: Path) -> None:
    # Sum of w * -log p over sum of w, without class 2; no version of the original takes weights.
    weight = np.array([1, 2, 0.5], F)
    run = made(tmp_path, loss=CE(weight=weight, ignore_index=2), optimizer=OptimType.SGD)
    scores = X.astype(np.float64) @ W.astype(np.float64)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    counted = LABELS != 2
    factors = weight[LABELS[counted]].astype(np.float64)
    expected = -(factors * logs[counted, LABELS[counted]]).sum() / factors.sum()
    np.testing.assert_allclose(run.module(X, LABELS), expected, rtol=1e-6)


def test_a_training_block_makes_models_of_its_own(tmp_path: Path) -> None:
    class Training(onnxblock.TrainingBlock):
        def __init__(self) -> None:
            super().__init__()
            self.loss = onnxblock.loss.MSELoss()

        def build(self, output: str) -> Any:
            return self.loss(output), output

    block = Training()
    block.requires_grad("W")
    block.requires_grad("b", False)
    with onnxblock.base(linear()):
        block("y")
        models = block.to_model_proto()
        parameters = block.parameters()
    assert [[tensor.name for tensor in group] for group in parameters] == [["W"], ["b"]]
    update = onnxblock.optim.SGD()
    with onnxblock.empty_base():
        update(parameters)
        models = (*models, update.to_model_proto())
    names = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
    for model, name in zip(models, names, strict=True):
        onnx.save(model, tmp_path / name)
    onnxblock.save_checkpoint(parameters, tmp_path / "checkpoint")
    found = losses(opened(tmp_path), X, TARGET, steps=4)
    np.testing.assert_allclose(found, [0.8566614, 0.7779372, 0.7142211, 0.662638], rtol=2e-6)
    model = linear()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((4, 3), F), "W"))
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), W)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Returns a layer with cross entropy, whose scores are an additional output."""
    options = {"loss": LossType.CrossEntropyLoss, "additional_output_names": ["y"]}
    return made(tmp_path, **options)


def _kinds(outputs: Any) -> list[str]:
    return [type(output).__name__ for output in outputs]


CALLS = [
    case("arrays", lambda run: _kinds(run.module(X, LABELS)), Gives(["ndarray", "ndarray"])),
    case(
        "values",
        lambda run: _kinds(run.module(value(X), value(LABELS))),
        Gives(["OrtValue", "OrtValue"]),
    ),
    case("both", lambda run: _kinds(run.module(value(X), LABELS)), Gives(["ndarray", "ndarray"])),
    case("shapes", lambda run: [np.shape(o) for o in run.module(X, LABELS)], Gives([(), (5, 3)])),
    case("inputs", lambda run: run.module.input_names(), Gives(["x", "labels"])),
    case("outputs", lambda run: run.module.output_names(), Gives(["loss", "y"])),
    case("training", lambda run: run.module.training, Gives(True)),
    case("eval", lambda run: run.module.eval().training, Gives(False)),
    case("evaluates", lambda run: run.module.eval()(X, LABELS)[1].shape, Gives((5, 3))),
    case("size", lambda run: run.module.get_parameters_size(), Gives(15)),
    case(
        "contiguous",
        lambda run: run.module.get_contiguous_parameters().numpy(),
        Gives(np.concatenate([W.ravel(), np.zeros(3, F)])),
    ),
    case(
        "an input too few",
        lambda run: run.module(X),
        Raises("RuntimeError", "1 inputs, expected 2"),
    ),
    case("a list", lambda run: run.module([1.0], LABELS), Raises("TypeError", "numpy array")),
    case(
        "float64",
        lambda run: run.module(X.astype(np.float64), LABELS),
        Raises("RuntimeError", "x"),
    ),
    case("a size", lambda run: run.module(X[:, :3].copy(), LABELS), Raises("RuntimeError", "x")),
    case(
        "an array for all parameters",
        lambda run: run.module.copy_buffer_to_parameters(np.zeros(15, F)),
        Raises("TypeError", "OrtValue"),
    ),
    case(
        "a buffer of another size",
        lambda run: run.module.copy_buffer_to_parameters(value(np.zeros(14, F))),
        Raises("RuntimeError", "14"),
    ),
    case(
        "an output that is not there",
        lambda run: run.module.export_model_for_inferencing("no.onnx", ["nope"]),
        Raises("RuntimeError", "nope"),
    ),
    case(
        "a second module",
        lambda run: api.Module("t.onnx", run.state),
        Raises("RuntimeError", "the state has a module already"),
    ),
    case("a rate", lambda run: run.optimizer.get_learning_rate(), Gives(float(F(1e-3)))),
]


@table("action, expected", CALLS)
def test_modules(action: Callable[[Any], Any], expected: Any, run: Any) -> None:
    check(expected, lambda: action(run))


def _set(target: Any, name: Any, item: Any) -> Any:
    target[name] = item
    return target[name]


def _data(run: Any, array: Any) -> Any:
    run.state.parameters["W"].data = array
    return run.state.parameters["W"].data


STATES = [
    case("count", lambda run: len(run.state.parameters), Gives(2)),
    case("names", lambda run: [name for name, _ in run.state.parameters], Gives(["W", "b"])),
    case("in", lambda run: "W" in run.state.parameters, Gives(True)),
    case(
        "text",
        lambda run: repr(run.state.parameters["W"]),
        Gives("Parameter(name=W, requires_grad=True)"),
    ),
    case("value", lambda run: run.state.parameters["W"].data, Gives(W)),
    case("no gradient yet", lambda run: run.state.parameters["W"].grad, Gives(None)),
    case("set", lambda run: _data(run, W * 2), Gives(W * 2)),
    case(
        "missing",
        lambda run: run.state.parameters["nope"],
        Raises("KeyError", "Parameter nope not found."),
    ),
    case("a number as name", lambda run: run.state.parameters[3], Raises("TypeError", "int")),
    case("a shape", lambda run: _data(run, W.T.copy()), Raises("RuntimeError", "W")),
    case("a type", lambda run: _data(run, W.astype(np.float64)), Raises("RuntimeError", "W")),
    case("a list", lambda run: _data(run, [1]), Raises("TypeError", "numpy array")),
    case("an int", lambda run: _set(run.state.properties, "a", 1), Gives(1)),
    case("a float", lambda run: _set(run.state.properties, "a", 1.5), Gives(1.5)),
    case("a str", lambda run: _set(run.state.properties, "a", "x"), Gives("x")),
    case("None", lambda run: _set(run.state.properties, "a", None), Raises("TypeError", "")),
    case("a list", lambda run: _set(run.state.properties, "a", [1]), Raises("TypeError", "")),
    case(
        "no property",
        lambda run: run.state.properties["zz"],
        Raises("KeyError", "Property zz not found."),
    ),
    case(
        "no file",
        lambda run: api.CheckpointState.load_checkpoint("nope"),
        Raises("RuntimeError", "nope"),
    ),
    case(
        "made by hand",
        lambda run: api.CheckpointState(3),
        Raises("TypeError", "Invalid argument for CheckpointState received <class 'int'>"),
    ),
]


@table("action, expected", STATES)
def test_states(action: Callable[[Any], Any], expected: Any, run: Any) -> None:
    check(expected, lambda: action(run))


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"optimizer": OptimType.AdamW}
    whole = losses(made(tmp_path, **options), X, TARGET, steps=6)
    first = opened(tmp_path)
    np.testing.assert_array_equal(losses(first, X, TARGET, steps=3), whole[:3])
    first.state.properties["epoch"] = 3
    api.CheckpointState.save_checkpoint(first.state, tmp_path / "later", True)
    second = opened(tmp_path, "later")
    assert second.state.properties["epoch"] == 3
    np.testing.assert_array_equal(losses(second, X, TARGET, steps=3), whole[3:])


def test_trained_parameters_go_into_an_exported_model(run: Any, tmp_path: Path) -> None:
    losses(run, X, LABELS)
    run.module.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    (found,) = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": X})
    weights = {name: parameter.data for name, parameter in run.state.parameters}
    np.testing.assert_allclose(found, X @ weights["W"] + weights["b"], rtol=1e-5, atol=1e-6)
    assert not np.array_equal(weights["W"], W)


def test_gradients_add_up_until_they_are_reset(run: Any) -> None:
    run.module(X, LABELS)
    once = run.state.parameters["W"].grad
    run.module(X, LABELS)
    np.testing.assert_allclose(run.state.parameters["W"].grad, 2 * once, rtol=1e-6)
    run.module.lazy_reset_grad()
    run.module(X, LABELS)
    np.testing.assert_array_equal(run.state.parameters["W"].grad, once)


def test_a_limit_is_kept_or_refused_with_its_number(tmp_path: Path) -> None:
    made(tmp_path)
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = api.Module(tmp_path / "training_model.onnx", state)
    planned = module.plan(n=5)
    assert planned["parameters"] == 60 and planned["activations"] > 0
    options = ort.SessionOptions()
    options.memory_limit = 100
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")

    def limited() -> Any:
        module = api.Module(tmp_path / "training_model.onnx", state, session_options=options)
        return module(X, TARGET)

    check(Raises("RuntimeError", "100 bytes"), limited)


def test_the_linear_schedule(run: Any) -> None:
    # The original of version 1.19.2 takes the two counts in the other order.
    schedule = api.LinearLRScheduler(run.optimizer, 2, 6, 1.0)
    rates = [run.optimizer.get_learning_rate()]
    for _ in range(7):
        run.module(X, LABELS)
        run.optimizer.step()
        schedule.step()
        rates.append(run.optimizer.get_learning_rate())
    np.testing.assert_allclose(rates, [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0], atol=1e-7)


GENERATE = [
    case(
        "trained and frozen",
        {"frozen_params": ["W"]},
        Raises("RuntimeError", "cannot be frozen and require gradient .* at the same time {'W'}"),
    ),
    case("no such parameter", {"requires_grad": ["Z"]}, Raises("RuntimeError", "Z")),
    case("a loss by name", {"loss": "MSE"}, Raises("RuntimeError", "Unknown loss provided")),
    case(
        "an optimizer by name",
        {"optimizer": "SGD"},
        Raises("TypeError", "Unknown optimizer provided"),
    ),
    case(
        "a name for a list",
        {"additional_output_names": "y"},
        Raises("RuntimeError", "Unknown type provided for additional output names"),
    ),
    case("no such output", {"additional_output_names": ["zz"]}, Raises("RuntimeError", "zz")),
    case("no such loss input", {"loss_input_names": ["zz"]}, Raises("RuntimeError", "zz")),
    case("ORT format", {"ort_format": True}, Raises("NotImplementedError", "ONNX format")),
]


@table("options, expected", GENERATE)
def test_refusals(options: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    check(expected, lambda: made(tmp_path, **options))


SOURCES = [
    case("a number", 3, Raises("RuntimeError", "either a string or an ONNX ModelProto")),
    case("no file", "nope.onnx", Raises("FileNotFoundError", "nope.onnx")),
]


@table("model, expected", SOURCES)
def test_sources(model: Any, expected: Any) -> None:
    check(expected, lambda: generate_artifacts(model, requires_grad=["W"]))


def _rates(scheduler: Any) -> list[float]:
    config = SimpleNamespace(lr=0.1)
    steps = range(12)
    infos = [SimpleNamespace(optimization_step=step, optimizer_config=config) for step in steps]
    return [scheduler.get_lr(info)[0] for info in infos]


WARMUP = [0, 0.1 / 3, 0.2 / 3]
SCHEDULES = [
    case("constant", optim.ConstantWarmupLRScheduler, WARMUP + [0.1] * 9),
    case(
        "cosine",
        optim.CosineWarmupLRScheduler,
        [*WARMUP, 0.1, 0.09504844, 0.08117449, 0.06112605, 0.03887395, 0.01882551, 0.00495156]
        + [0, 0.00495156],
    ),
    case(
        "linear",
        optim.LinearWarmupLRScheduler,
        [*WARMUP, 0.1, 0.08571429, 0.07142857, 0.05714286, 0.04285714, 0.02857143, 0.01428571]
        + [0, 0],
    ),
    case(
        "polynomial",
        optim.PolyWarmupLRScheduler,
        [*WARMUP, 0.1, 0.0857143, 0.0714286, 0.0571429, 0.0428572, 0.0285715, 0.0142858]
        + [1e-7, 1e-7],
    ),
]


@table("kind, expected", SCHEDULES)
def test_schedules(kind: Any, expected: list[float]) -> None:
    np.testing.assert_allclose(_rates(kind(10, warmup=0.3)), expected, atol=1e-8)
    check(Raises("AssertionError", "total_steps must be a strict positive"), lambda: kind(-1))
    check(Raises("AssertionError", "warmup must be a float"), lambda: kind(10, warmup=1.5))


def test_a_loss_scale_follows_the_steps() -> None:
    scaler = training.amp.DynamicLossScaler(up_scale_window=2, loss_scale=8.0)
    steps = [True, True, True, False, False, True, True]
    scales = [scaler.update(SimpleNamespace(all_finite=is_finite)) for is_finite in steps]
    assert scales == [8, 16, 16, 8, 4, 4, 8]
    scaler.reset()
    assert scaler.loss_scale == 8.0


CONFIGS = [
    case("adam", lambda: optim.AdamConfig().name, Gives("AdamOptimizer")),
    case("lamb", lambda: optim.LambConfig().epsilon, Gives(1e-6)),
    case(
        "a group",
        lambda: optim.AdamConfig(params=[{"params": ["a"], "alpha": 0.8}]).params[0]["beta"],
        Gives(0.999),
    ),
    case("alpha", lambda: optim.AdamConfig(alpha=-1), Raises("AssertionError", "'alpha' must be")),
    case(
        "an unknown setting",
        lambda: optim.AdamConfig(params=[{"params": ["a"], "zz": 1}]),
        Raises("AssertionError", "'params' has zz hyper parameter not present at 'defaults'"),
    ),
    case(
        "a ratio",
        lambda: optim.LambConfig(ratio_min=3, ratio_max=1),
        Raises("AssertionError", "'ratio_min'"),
    ),
    case(
        "groups of SGD",
        lambda: optim.SGDConfig(params=[{"params": ["a"]}]),
        Raises("AssertionError", "Each dict inside 'params'"),
    ),
]


@table("action, expected", CONFIGS)
def test_configs(action: Callable[[], Any], expected: Any) -> None:
    check(expected, action)


def test_a_table_is_as_wide_as_its_cells() -> None:
    made_table = training.utils.PTable()
    made_table.add_row(["a", "bbb"])
    made_table.add_row(["cccc", "d"])
    assert made_table.get_string() == "a     bbb  \ncccc  d    \n"


def test_the_package_has_the_names_of_the_original() -> None:
    assert PACKAGE == "ort_runtime"
    assert [kind.name for kind in artifacts.OptimType] == ["AdamW", "SGD"]
    names = ["MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss", "L1Loss"]
    assert [kind.name for kind in artifacts.LossType] == names
