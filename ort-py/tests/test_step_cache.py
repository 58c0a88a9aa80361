"""The capture cache of `ORTModule`: what a later process takes from it, and what it never takes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import IS_ORIGINAL

torch = pytest.importorskip("torch", reason="torch is not installed; `cargo xtask torch` adds it")
if IS_ORIGINAL:
    pytest.skip("the original's ORTModule is a package of its own", allow_module_level=True)

from ort_runtime.training.ortmodule import ORTModule  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

PROGRAM = Path(__file__).parent / "step_module.py"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports the module with changes to its text, as another process would."""
    monkeypatch.syspath_prepend(tmp_path)

    def imported(*changes: tuple[str, str]) -> types.ModuleType:
        text = PROGRAM.read_text()
        for old, new in changes:
            assert old in text, f"{old} is not in the text"
            text = text.replace(old, new)
        (tmp_path / "edited_module.py").write_text(text)
        for name in tmp_path.glob("__pycache__/*"):
            name.unlink()
        sys.modules.pop("edited_module", None)
        torch._dynamo.reset()
        import edited_module

        return edited_module

    yield imported
    sys.modules.pop("edited_module", None)


def close(found: list[float], expected: list[float]) -> None:
    """Compares numbers; powers and sums of the module magnify errors."""
    assert found == pytest.approx(expected, rel=3e-3, abs=1e-3)


def nothing(*_: Any) -> None:
    """Changes nothing."""


class Use:
    """One process's use of the module: wraps it, changes it, trains it."""

    def __init__(
        self, source: Any, *edits: tuple[str, str], change: Callable[[Any], Any] = nothing, **more: Any
    ) -> None:
        self.code = source(*edits)
        self.change, self.more = change, more

    def model(self) -> Any:
        """Returns a changed module of the code as it is now."""
        torch.manual_seed(0)
        model = self.code.Model()
        self.change(model)
        return model

    def trained(self, folder: Path) -> bool:
        """Trains beside eager torch. Returns whether nothing was traced."""
        with self.more.get("around", contextlib.nullcontext)():
            expected = self.code.losses(self.model(), **self.more.get("given", {}))
            wrapped = ORTModule(
                self.model(), memory_limit=self.more.get("limit"), cache_dir=folder / "cache"
            )
            counters.clear()
            found = self.code.losses(wrapped, **self.more.get("given", {}))
        close(found, expected)
        return counters["frames"]["total"] == 0


def test_a_second_process_traces_nothing(tmp_path: Path):
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(tmp_path / "cache")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    assert runs[0]["frames"] > 0 and runs[1]["frames"] == 0
    assert runs[0]["losses"] == runs[1]["losses"]


def test_the_same_module_is_taken_from_the_cache(source: Any, tmp_path: Path):
    assert not Use(source).trained(tmp_path)
    assert Use(source).trained(tmp_path)
    # Lines may move.
    assert Use(source, ("FACTOR = 2.0", "# A comment.\n\nFACTOR = 2.0")).trained(tmp_path)


def freeze(model: Any) -> None:
    """Takes a part out of training."""
    model.first.requires_grad_(False)


def tie(model: Any) -> None:
    """Lets both layers have one weight."""
    model.second.linear.weight = model.first.linear.weight


EDITS: dict[str, tuple[str, str]] = {
    "forward": ("pair.left - pair.right", "pair.left + pair.right"),
    "constant of forward": ("self.calls += 1", "self.calls += 2"),
    "forward of a submodule": ("+ self.shift", "- self.shift"),
    "decorator": ("+ 1.0", "+ 4.0"),
    "function": ("return x**power", "return x**power + 1"),
    "default of a function": ("power: int = 2", "power: int = 3"),
    "default of forward": ("weight: float = 0.5", "weight: float = 0.75"),
    "closure": ("made(3.0)", "made(2.0)"),
    "function in a closure": ("return x * number", "return x / number"),
    "global": ("FACTOR = 2.0", "FACTOR = 2.5"),
    "item of a global": ('"scale": 0.5', '"scale": 0.25'),
    "list": ("SIZES = [1, 2]", "SIZES = [1, 3]"),
    "attribute of a class": ("GAIN = 1.5", "GAIN = 1.25"),
    "attribute": ("self.shift = 0.25", "self.shift = 0.5"),
    "function in an attribute": ("self.act = F.gelu", "self.act = F.relu"),
    "dropout": ("nn.Dropout(0.25)", "nn.Dropout(0.5)"),
    "fields of a dataclass": ("    left: Any\n    right: Any", "    right: Any\n    left: Any"),
    "custom gradient": ("slope * 5", "slope * 7"),
    "custom forward": ("return x * 2\n\n    @staticmethod\n    def back", "return x * 3\n\n    @staticmethod\n    def back"),
    "module of another class": ("nn.LayerNorm(size)", "nn.RMSNorm(size)"),
    "precision of the norm": ("nn.LayerNorm(size)", "nn.LayerNorm(size, eps=0.1)"),
    "size": ("Inner(size), Inner(size)\n", "Inner(size), Inner(size)\n        self.more = nn.Linear(2, 2)\n"),
}


@pytest.mark.parametrize("name", EDITS)
def test_changed_code_is_traced_again(source: Any, tmp_path: Path, name: str):
    assert not Use(source).trained(tmp_path)
    assert Use(source).trained(tmp_path)
    assert not Use(source, EDITS[name]).trained(tmp_path)
    assert Use(source, EDITS[name]).trained(tmp_path)


def autocast() -> Any:
    """Computes in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


STATES: dict[str, dict[str, Any]] = {
    "frozen part": {"change": freeze},
    "tied weights": {"change": tie},
    "evaluation": {"change": lambda model: model.eval()},
    "part in evaluation": {"change": lambda model: model.second.eval()},
    "attribute": {"change": lambda model: setattr(model.first, "shift", 0.5)},
    "function": {"change": lambda model: setattr(model.first, "act", torch.tanh)},
    "hook of a part": {
        "change": lambda model: model.first.register_forward_hook(lambda m, a, result: result * 2)
    },
    "type": {
        "change": lambda model: model.double(),
        "given": {"inputs": torch.ones(3, 8, dtype=torch.float64)},
    },
    "batch": {"given": {"inputs": torch.ones(5, 8)}},
    "strides": {"given": {"inputs": torch.ones(8, 3).t()}},
    "input with a gradient": {"given": {"inputs": torch.ones(3, 8, requires_grad=True)}},
    "argument": {"given": {"weight": 0.25}},
    "no gradients": {"around": torch.no_grad},
    "memory limit": {"limit": "1 GiB"},
}


@pytest.mark.parametrize("name", STATES)
def test_another_state_is_traced_apart(source: Any, tmp_path: Path, name: str):
    assert not Use(source).trained(tmp_path)
    assert not Use(source, **STATES[name]).trained(tmp_path)
    # A module with hooks is not kept.
    assert Use(source, **STATES[name]).trained(tmp_path) == (name != "hook of a part")
    Use(source).trained(tmp_path)


@pytest.mark.parametrize("name", ["frozen part", "tied weights"])
def test_nothing_is_taken_from_a_richer_state(source: Any, tmp_path: Path, name: str):
    assert not Use(source, **STATES[name]).trained(tmp_path)
    assert not Use(source).trained(tmp_path)


PATCHES: dict[str, Callable[[Any], Any]] = {
    "function": lambda code: setattr(code, "helper", lambda x, power=2: x**4),
    "method": lambda code: setattr(code.Inner, "forward", lambda self, x: self.linear(x)),
    "torch's function": lambda code: setattr(
        code, "F", types.SimpleNamespace(gelu=torch.tanh, relu=torch.relu)
    ),
    "global": lambda code: setattr(code, "FACTOR", 9.0),
    "attribute of a class": lambda code: setattr(code.Inner, "GAIN", 4.0),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches_are_noticed(source: Any, tmp_path: Path, name: str):
    assert not Use(source).trained(tmp_path)
    patched = Use(source)
    PATCHES[name](patched.code)
    assert not patched.trained(tmp_path)


# Dynamo does not look for another method of a class between steps.
@pytest.mark.parametrize("name", sorted(PATCHES.keys() - {"method"}))
def test_patches_are_noticed_between_steps(source: Any, tmp_path: Path, name: str):
    assert not Use(source).trained(tmp_path)
    use = Use(source)
    torch.manual_seed(0)
    wrapped, plain = ORTModule(use.model(), cache_dir=tmp_path / "cache"), use.model()
    counters.clear()
    close(use.code.losses(wrapped), use.code.losses(plain))
    assert counters["frames"]["total"] == 0
    PATCHES[name](use.code)
    close(use.code.losses(wrapped), use.code.losses(plain))


def test_two_modules_of_one_entry_are_apart(source: Any, tmp_path: Path):
    assert not Use(source).trained(tmp_path)
    use = Use(source)
    pairs = []
    for seed in range(2):
        torch.manual_seed(seed)
        plain = use.code.Model()
        torch.manual_seed(seed)
        pairs.append((ORTModule(use.code.Model(), cache_dir=tmp_path / "cache"), plain))
    counters.clear()
    for wrapped, plain in pairs * 2:
        close(use.code.losses(wrapped), use.code.losses(plain))
    assert counters["frames"]["total"] == 0


def test_damaged_files_are_as_none(source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert not Use(source).trained(tmp_path)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-100], pickle.dumps({"no": "entry"})):
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert not Use(source).trained(tmp_path)
        assert "cannot be read" in caplog.text
    assert Use(source).trained(tmp_path)


def test_a_folder_of_others_is_refused(source: Any, tmp_path: Path):
    (tmp_path / "cache").mkdir()
    os.chmod(tmp_path / "cache", 0o777)
    with pytest.raises(ValueError, match="others may write to"):
        ORTModule(source().Model(), cache_dir=tmp_path / "cache")


def test_the_environment_names_the_folder(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "named"))
    source().losses(ORTModule(source().Model()))
    assert len(list((tmp_path / "named").iterdir())) == 1
