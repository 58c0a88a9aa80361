"""The notebook of the examples: its code runs cell after cell, and shows what its text says."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if os.environ.get("ORT_PACKAGE", "ort_runtime") != "ort_runtime":
    pytest.skip("the notebook shows what ort_runtime alone has", allow_module_level=True)
pytest.importorskip("onnx")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python" / "memory.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.fixture(name="notebook", scope="module")
def executed() -> tuple[dict[str, Any], dict[str, str]]:
    """Runs all code cells in one namespace; returns it, and what each cell printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: dict[str, str] = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
            printed[cell["id"]] = out.getvalue()
    return names, printed


def test_file_has_the_format_and_no_results():
    whole = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_plan(notebook: Any):
    names, printed = notebook
    plan = names["plan"]
    assert plan.peak_bytes == plan.to_dict()["peak_bytes"] == names["peaks"][8]
    assert str(plan).strip() == printed["plan"].strip() and "relu1" in str(plan)
    assert plan._repr_svg_() == plan.to_svg() == (names["folder"] / "plan.svg").read_text()
    assert plan.to_svg().startswith("<svg")


def test_largest_batch_is_the_last_that_fits(notebook: Any):
    names, _ = notebook
    session, largest = names["session"], names["largest"]
    assert names["peaks"][1] < names["peaks"][8] < names["peaks"][32]
    # The budget includes the packed weights.
    held, budget = session.memory_use()["packed"], 64 * 2**20
    assert session.plan(batch=largest).peak_bytes <= budget
    assert session.plan(batch=largest + 1).peak_bytes + held > budget


def test_trim_frees_what_is_idle(notebook: Any):
    names, _ = notebook
    before, after = names["before"], names["after"]
    planned = names["session"].plan(batch=16).peak_bytes
    assert planned * 0.95 <= before["activations_peak"] <= planned
    assert before["idle"] > 0 and after["idle"] == 0
    assert after["total"] <= before["total"] - before["idle"]


def test_limit_splits_or_refuses(notebook: Any):
    names, _ = notebook
    assert names["expected"].shape == (16, 1000)
    assert np.array_equal(names["split"], names["expected"])
    assert names["limited"].memory_use()["activations_peak"] <= 16 * 2**20
    assert "raise the memory limit to" in names["refusal"]


def test_cache_is_mapped(notebook: Any):
    names, printed = notebook
    plain, cached = names["plain"].memory_use(), names["cached"].memory_use()
    assert plain["packed"] > 0 and plain["cached"] == 0
    assert cached["packed"] == 0 and cached["cached"] >= plain["packed"]
    assert list((names["folder"] / "cache").iterdir())
    assert printed["cache"].startswith("without a cache")
