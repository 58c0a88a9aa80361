"""Test-case folders as `ort test` reads them, with a slack for each element beside the outputs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, numpy_helper, printer

from evaluate import Expected

# Graphs whose text is longer are cut: what is long is constants.
MOST_TEXT = 6000


@dataclass
class Case:
    model: ModelProto
    feeds: dict[str, np.ndarray]
    exact: bool
    # Which part of its memory the run under a limit is given; none without limits.
    share: float | None = None


def write_tensor(path: Path, array: np.ndarray, name: str = "") -> None:
    path.write_bytes(numpy_helper.from_array(np.asarray(array), name).SerializeToString())


def write_case(folder: Path, case: Case, expected: Expected) -> None:
    data = folder / "test_data_set_0"
    data.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(case.model.SerializeToString())
    if case.share is not None:
        (folder / "limit").write_text(f"{case.share}\n")
    for index, info in enumerate(case.model.graph.input):
        write_tensor(data / f"input_{index}.pb", case.feeds[info.name], info.name)
    for index, (output, slack) in enumerate(zip(expected.outputs, expected.slacks, strict=True)):
        write_tensor(data / f"output_{index}.pb", output)
        write_tensor(data / f"slack_{index}.pb", slack.astype(np.float64))


def text_of(model: ModelProto) -> str:
    """The graph in words, without the elements of large constants."""
    text = printer.to_text(model.graph)
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " .."


def write_finding(folder: Path, case: Case, expected: Expected, verdict: dict, heading: str) -> None:
    """A case that fails: with a tolerance for `ort test`, which knows no slacks, and a page that
    says what is wrong."""
    write_case(folder, case, expected)
    slacks = [slack[np.isfinite(slack)].max(initial=0) for slack in expected.slacks]
    (folder / "tol").write_text(f"1e-9 {max(slacks, default=0):.3g}\n")
    inputs = [f"    {name} = {np.array2string(array, threshold=60)}" for name, array in case.feeds.items()]
    outputs = [f"    {np.array2string(array, threshold=60)}" for array in expected.outputs]
    lines = [
        heading,
        "",
        f"{verdict['outcome']}: {verdict['problem']}",
        "",
        f"    ort run model.onnx {verdict['options']}",
        "",
        *("    " + line for line in text_of(case.model).splitlines()),
        "",
        "Inputs:",
        "",
        *inputs,
        "",
        "Expected:",
        "",
        *outputs,
    ]
    (folder / "README.md").write_text("\n".join(line.rstrip() for line in lines) + "\n")
