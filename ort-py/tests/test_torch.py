"""The backend of `torch.compile`, checked against eager torch."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
from harness import IS_ORIGINAL

torch = pytest.importorskip("torch", reason="torch is not installed; `cargo xtask torch` adds it")
if IS_ORIGINAL:
    pytest.skip("onnxruntime has no backend of torch.compile", allow_module_level=True)

import ort_runtime.torch as backend  # noqa: E402
from torch_models import NETWORKS, Forms, Language, Network, mlp, reals, tokens  # noqa: E402
from torch_operators import OPERATORS  # noqa: E402

STEPS = 50


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forgets compiled graphs, whose number Dynamo limits."""
    torch._dynamo.reset()


def made(network: Network) -> Any:
    """Returns the module that every run starts from."""
    torch.manual_seed(0)
    return network.make()


def gradients(module: Any) -> dict[str, Any]:
    """Returns the gradients by name, without those that are None."""
    named = module.named_parameters()
    return {name: value.grad.clone() for name, value in named if value.grad is not None}


def train(module: Any, called: Any, network: Network, steps: int) -> tuple[list[float], Any]:
    """Trains a module by what `called` computes. Returns the losses and the first gradients."""
    optimizer = torch.optim.SGD(module.parameters(), network.rate)
    losses, first = [], None
    for step in range(steps):
        torch.manual_seed(step)
        loss = called(*network.batch(step))
        loss.backward()
        first = gradients(module) if first is None else first
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def near(found: Any, expected: Any, tolerance: float) -> None:
    """Compares tensors by the largest element of what is expected."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    largest = expected.abs().max().item() if expected.numel() else 0.0
    difference = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    assert difference <= tolerance * max(largest, 1e-3), (difference, largest)


def compiled(module: Any, **options: Any) -> Any:
    """Compiles with a backend that raises what it lacks."""
    options.setdefault("on_missing", "raise")
    return torch.compile(module, backend=backend.Backend(**options))


@pytest.mark.parametrize("name", NETWORKS)
def test_training(name: str):
    network = NETWORKS[name]
    eager, ours = made(network), made(network)
    expected, slopes = train(eager, eager, network, STEPS)
    found, our_slopes = train(ours, compiled(ours), network, STEPS)
    assert max(abs(one - other) for one, other in zip(found, expected)) <= 1e-4
    assert our_slopes.keys() == slopes.keys()
    for key, slope in slopes.items():
        near(our_slopes[key], slope, network.slopes)
    # Buffers, such as the running statistics, are the module's own.
    for (_, ours_value), (_, value) in zip(ours.named_buffers(), eager.named_buffers()):
        near(ours_value.double(), value.double(), 1e-4)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str):
    function = OPERATORS[name]
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(name, 1e-5)
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    results = []
    for call in (function, compiled(function)):
        x = data.clone().requires_grad_()
        torch.manual_seed(3)
        found = call(x)
        weights = torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).view(found.shape)
        (found * weights).sum().backward()
        results.append((found.detach(), x.grad))
    near(results[1][0], results[0][0], tolerance)
    near(results[1][1], results[0][1], 10 * tolerance)
    with torch.no_grad():
        torch.manual_seed(3)
        near(compiled(function)(data), results[0][0], tolerance)


AUTOCAST = {
    "mlp": torch.bfloat16,
    "cnn": torch.bfloat16,
    "gpt": torch.bfloat16,
    "bert": torch.float16,
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str):
    """Gradients under autocast are as near to those in float32 as eager torch's are."""
    network = NETWORKS[name]
    modules = [made(network) for _ in range(3)]
    modules[0](*network.batch(0)).backward()
    for module, call in ((modules[1], modules[1]), (modules[2], compiled(modules[2]))):
        with torch.autocast("cpu", dtype=AUTOCAST[name]):
            loss = call(*network.batch(0))
        loss.backward()
    exact, eager, ours = (
        torch.cat([slope.flatten() for slope in gradients(module).values()]) for module in modules
    )
    assert (ours - exact).norm() <= 1.5 * (eager - exact).norm()


SIZES = {
    "tokens": (lambda: Language(causal=True), [(2, 8), (2, 8), (3, 8), (2, 12), (5, 7)]),
}


@pytest.mark.parametrize("name", SIZES)
def test_symbolic_sizes(name: str):
    make, sizes = SIZES[name]
    kinds: list[str] = []
    torch.manual_seed(0)
    module = make()
    ours = copy.deepcopy(module)
    call = compiled(ours, on_compiled=lambda kind, graph: kinds.append(kind))
    for step, size in enumerate(sizes):
        batch = tokens(*size)(step)
        expected, found = module(*batch), call(*batch)
        expected.backward()
        found.backward()
        near(found.detach(), expected.detach(), 1e-5)
    for (_, one), (_, other) in zip(ours.named_parameters(), module.named_parameters()):
        near(one.grad, other.grad, 1e-3)
    # Once for the first sizes, and once or twice for symbolic ones.
    assert 2 <= kinds.count("forward") <= 3, kinds


def test_two_forwards_before_a_backward():
    network = NETWORKS["mlp"]
    eager, ours = made(network), made(network)
    for call, module in ((eager, eager), (compiled(ours), ours)):
        first, second = call(*network.batch(0)), call(*network.batch(1))
        second.backward()
        first.backward()
        assert module.get_parameter("layers.0.weight").grad is not None
    for key, slope in gradients(eager).items():
        near(gradients(ours)[key], slope, 1e-4)


def test_structures():
    torch.manual_seed(0)
    module = Forms()
    ours = copy.deepcopy(module)
    x, _ = reals(8, 16)(0)
    for given in ({}, {"double": True}, {"extra": {"bias": [torch.ones(10), None]}}):
        expected = module.parts(x, **given)
        found = compiled(ours.parts)(x, **given)
        assert found.keys() == expected.keys() and found["name"] == "forms"
        near(found["scores"].detach(), expected["scores"].detach(), 1e-5)
        assert found["more"][0] is None and found["more"][2]["x"] is x
    assert ours.calls == module.calls == 3


RECOMPUTATIONS = {
    "level 1": backend.Recompute(level=1),
    "level 2": backend.Recompute(level=2),
    "one cluster": backend.Recompute(requests=[backend.Request("BatchNormalization+Relu+", 1, 2)]),
    "a gelu": backend.Recompute(requests=[backend.Request("BiasGelu+", 1, -1)]),
}
DROPPED = {
    "gpt": Network(lambda: Language(causal=True, drop=0.1, layers=4), tokens(4, 32), 0.005),
    "bert": Network(lambda: Language(causal=False, drop=0.1, layers=4), tokens(4, 32), 0.005),
    "cnn": NETWORKS["cnn"],
    "resnet": NETWORKS["resnet"],
}
APPLIES = [
    (name, kind)
    for name in DROPPED
    for kind in RECOMPUTATIONS
    if kind.startswith("level") or (kind == "a gelu") == (name in ("gpt", "bert"))
]


@pytest.mark.parametrize(("name", "kind"), APPLIES)
def test_recomputation_changes_no_bit(name: str, kind: str):
    network, kept, results = DROPPED[name], [], []
    chosen = RECOMPUTATIONS[kind]
    # With requests, only what they name is computed again, not what is cheap: count 0 is none.
    none = backend.Recompute(requests=[replace(one, count=0) for one in chosen.requests])
    for recompute in (none, chosen):
        torch._dynamo.reset()
        module = made(network)
        parts: list[Any] = []
        call = compiled(module, recompute=recompute, on_partition=parts.append)
        results.append(train(module, call, network, 4)[0])
        kept.append(sum(part.kept_bytes() for part in parts))
    assert results[1] == results[0]
    assert kept[1] < kept[0], kept


class Lacking(torch.nn.Module):
    """Operators that the table does not have."""

    def forward(self, x: Any) -> Any:
        """Returns a number."""
        return torch.special.bessel_j0(x).sum() + torch.linalg.det(x[:3, :3]) + x.sum()


def test_what_is_lacking_is_listed_at_once():
    x = torch.randn(4, 6)
    with pytest.raises(Exception) as raised:
        compiled(Lacking())(x)
    text = str(raised.value)
    assert "NotTranslated" in text and "bessel_j0" in text and "det" in text, text


def test_what_is_lacking_runs_in_torch_with_one_warning():
    x = torch.randn(4, 6)
    call = compiled(Lacking(), on_missing="torch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [call(x), call(x)]
    ours = [str(one.message) for one in caught if "runs in torch" in str(one.message)]
    assert len(ours) == 1 and "bessel_j0" in ours[0]
    near(found[1], Lacking()(x), 1e-6)


def test_tensors_cross_without_a_copy():
    from ort_runtime.torch import _compiled

    tensor = torch.randn(3, 5)
    assert _compiled._lent(tensor).__array_interface__["data"][0] == tensor.data_ptr()
    module = mlp()
    x, labels = reals(8, 16)(0)
    graphs: list[Any] = []
    call = compiled(module, on_compiled=lambda kind, graph: graphs.append(graph))
    with torch.no_grad():
        call(x, labels)
    (graph,) = graphs
    results: list[Any] = []
    run = graph.session.run
    graph.session.run = lambda names, feed: results.append(run(names, feed)) or results[-1]
    with torch.no_grad():
        found = call(x, labels)
    assert results[0][0].__array_interface__["data"][0] == found.data_ptr()


def test_name_and_policy():
    assert "ort_runtime" in torch._dynamo.list_backends(exclude_tags=())
    call = torch.compile(lambda x: x * 2, backend="ort_runtime")
    near(call(torch.ones(3)), torch.full((3,), 2.0), 0.0)
    with pytest.raises(ValueError, match="'torch' or 'raise'"):
        backend.Backend(on_missing="ignore")
