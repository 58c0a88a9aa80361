"""Hugging Face's `Trainer`, checked against itself with eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import IS_ORIGINAL

torch = pytest.importorskip("torch", reason="torch is not installed; `cargo xtask torch` adds it")
pytest.importorskip("accelerate", reason="accelerate is not installed; `cargo xtask torch` adds it")
transformers = pytest.importorskip("transformers")
if IS_ORIGINAL:
    pytest.skip("the original's ORTModule is a package of its own", allow_module_level=True)

import ort_runtime.torch as backend  # noqa: E402
from ort_runtime.training.ortmodule import ORTModule  # noqa: E402

WORDS, LENGTH, STEPS = 60, 12, 6


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets compiled graphs. A graph that runs in torch is an error."""
    torch._dynamo.reset()
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")


def bert() -> Any:
    """A BERT of two layers with dropout, for three classes."""
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    """A GPT-2 of two layers with dropout."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def examples(name: str, count: int = 40) -> list[dict[str, Any]]:
    """Returns examples; those of BERT have lengths of their own, so that they are padded."""
    random = torch.Generator().manual_seed(5)
    found = []
    for place in range(count):
        words = torch.randint(1, WORDS, (LENGTH,), generator=random)
        if name == "gpt2":
            found.append({"input_ids": words, "labels": words})
            continue
        mask = (torch.arange(LENGTH) < 4 + place % (LENGTH - 3)).long()
        found.append({"input_ids": words * mask, "attention_mask": mask, "labels": place % 3})
    return found


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "gpt2": gpt2}


def compiled_in_place(model: Any) -> Any:
    """Compiles the forward of a model, which stays what it is."""
    model.compile(backend=backend.Backend(on_missing="raise"))
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "ORTModule": ORTModule,
    "compile": compiled_in_place,
    "torch.compile": lambda model: torch.compile(
        model, backend=backend.Backend(on_missing="raise")
    ),
}


def trainer(model: Any, name: str, folder: Path, **options: Any) -> Any:
    """Returns a trainer of a model."""
    options = {"per_device_train_batch_size": 4, "max_steps": STEPS, **options}
    if hasattr(model, "_orig_mod"):
        # The signature of such a module says nothing, with any backend.
        options |= {"label_names": ["labels"], "remove_unused_columns": False}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], logging_steps=1, save_steps=3, seed=7,
        learning_rate=1e-3, disable_tqdm=True, **options,
    )  # fmt: skip
    data = examples(name)
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:10])


def losses(made: Any) -> list[float]:
    """Returns the losses that a trainer has logged."""
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def model_of(name: str) -> Any:
    """Returns the model that every run starts from."""
    torch.manual_seed(0)
    return MODELS[name]()


def near(found: list[float], expected: list[float], tolerance: float = 1e-4) -> None:
    """Compares losses of as many steps."""
    assert len(found) == len(expected) > 0
    assert max(abs(one - other) for one, other in zip(found, expected)) <= tolerance, (
        found,
        expected,
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_eager_torch_does(name: str, way: str, variant: str, tmp_path: Path):
    eager = trainer(model_of(name), name, tmp_path / "eager", **VARIANTS[variant])
    eager.train()
    ours = trainer(WAYS[way](model_of(name)), name, tmp_path / "ours", **VARIANTS[variant])
    ours.train()
    near(losses(ours), losses(eager))
    assert ours.evaluate()["eval_loss"] == pytest.approx(eager.evaluate()["eval_loss"], abs=1e-4)
    rows = [made.predict(made.eval_dataset).predictions for made in (ours, eager)]
    assert abs(rows[0] - rows[1]).max() <= 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_the_backend_is_an_argument(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []
    compile_ = backend.Backend._compile

    def noted(self: Any, graph: Any, kind: str) -> Any:
        compiled.append(kind if graph.meta.get("ort_runtime") != "torch" else "torch")
        return compile_(self, graph, kind)

    monkeypatch.setattr(backend.Backend, "_compile", noted)
    eager = trainer(model_of(name), name, tmp_path / "eager")
    eager.train()
    assert not compiled
    ours = trainer(model_of(name), name, tmp_path / "ours", torch_compile_backend="onnxrt")
    ours.train()
    near(losses(ours), losses(eager))
    assert {"forward", "backward"} <= set(compiled) and "torch" not in compiled


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_near_to_float32_as_eager_torch(name: str, way: str, tmp_path: Path):
    found = {}
    for key, wrap, options in (
        ("exact", lambda model: model, {}),
        ("eager", lambda model: model, {"bf16": True}),
        ("ours", WAYS[way], {"bf16": True}),
    ):
        made = trainer(wrap(model_of(name)), name, tmp_path / key, **options)
        made.train()
        found[key] = losses(made)
    apart = [max(abs(a - b) for a, b in zip(found[k], found["exact"])) for k in ("ours", "eager")]
    assert 0 < apart[0] <= 2 * apart[1] + 1e-3, found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_resumes_from_a_checkpoint(name: str, way: str, tmp_path: Path):
    whole = trainer(WAYS[way](model_of(name)), name, tmp_path)
    whole.train()
    torch._dynamo.reset()
    # Other parameters than those that the checkpoint has.
    resumed = trainer(WAYS[way](MODELS[name]()), name, tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    near(losses(resumed), losses(whole), 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_saves_what_transformers_loads(name: str, tmp_path: Path):
    wrapped = ORTModule(model_of(name))
    made = trainer(wrapped, name, tmp_path)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    loaded = type(wrapped.module).from_pretrained(tmp_path / "saved")
    for key, value in wrapped.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_is_an_instance_of_the_class_inside():
    inside = gpt2()
    for wrapped in (ORTModule(inside), copy.deepcopy(ORTModule(inside))):
        assert isinstance(wrapped, transformers.PreTrainedModel)
        assert isinstance(wrapped, ORTModule) and type(wrapped) is ORTModule
