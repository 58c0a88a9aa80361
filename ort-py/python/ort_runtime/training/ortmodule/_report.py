"""The report of what ORTModule does to a module: features, recomputation plans, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ort_runtime
from ort_runtime.torch._clusters import Cluster
from ort_runtime.torch._partition import Partition, bytes_of

from ._options import Environment, MemoryLevel

__all__ = ["Row", "insight", "report", "savings_of", "table"]

_TITLE = "***** ONNX Runtime Training (ORTModule) is accelerating your model *****"
_HEADER = ["", "", "", "", "Configs", "Freq", "Max Saving(Bytes)", "Saving Symbolic(Bytes)"]
_OFF = (
    "Enable with env ORTMODULE_MEMORY_OPT_LEVEL=1/2 or ORTMODULE_MEMORY_OPT_CONFIG=<config.json>"
)


@dataclass
class Row:
    """A row of the table, with the table that belongs to it."""

    cells: Sequence[str]
    below: list[Sequence[str]] = field(default_factory=list)


def table(rows: Sequence[Row]) -> str:
    """Returns a table with left-justified columns, each two wider than its widest cell."""
    own = _widths([row.cells for row in rows])
    lines = []
    for row in rows:
        lines.append(_line(row.cells, own))
        if row.below:
            widths = _widths(row.below)
            for column in (0, 2):
                widths[column] = max(widths[column], own[column])
            lines += [_line(cells, widths) for cells in row.below]
    return "".join(lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    count = max(map(len, rows), default=0)
    return [
        max((len(row[column]) for row in rows if column < len(row)), default=0) + 2
        for column in range(count)
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() + "\n"


def _symbolic(cluster: Cluster) -> str:
    """The bytes of a cluster as an expression of symbolic sizes."""
    total: Any = 0
    for node in cluster.nodes:
        value = node.meta["val"]
        count: Any = value.element_size()
        for size in value.shape:
            count = count * (size if isinstance(size, int) else size.node.expr)
        total = total + count
    return str(total)


def savings_of(partition: Partition) -> list[Sequence[str]]:
    """Returns the rows of the plans, of largest saving first."""
    ordered = sorted(partition.clusters, key=lambda c: (-sum(map(bytes_of, c.nodes)), c.id))
    rows: list[Sequence[str]] = [_HEADER]
    for place, cluster in enumerate(ordered, 1):
        saving = sum(map(bytes_of, cluster.nodes))
        rows.append(
            [
                f" - Plan {place}", ":", "ON" if cluster.applied else "OFF", ":",
                f"{cluster.id}:1:-1", str(len(cluster.places)), f"{saving:,}", _symbolic(cluster),
            ]
        )  # fmt: skip
    return rows


def report(
    mode: str,
    environment: Environment,
    partition: Partition | None,
    seconds: float,
    kept_bytes: int | None,
) -> str:
    """Returns the whole report.

    Args:
        mode: "training" or "inference".
        environment: the settings.
        partition: how the joint graph was cut, to list its recomputation plans.
        seconds: what capture, translation and planning took.
        kept_bytes: what is kept for the backward pass; None without one.
    """
    level = environment.level
    is_on = bool(level or environment.config)
    text = _OFF
    if is_on:
        name = f"Memory Optimization Level: [{level.name}]"
        text = f"{name}, Optimization Config: [{environment.config}]"
    memory = Row(["Memory Optimizer", ":", "ON" if is_on else "OFF", ":", text])
    if partition is not None:
        memory.below = savings_of(partition)
    fallback = "OFF" if environment.policy.is_disabled() else "ON"
    rows = [
        Row(["ATen Executor", ":", "OFF", ":", "Graphs with other operators run in torch"]),
        Row(["Auto Fallback", ":", fallback, ":", "Run in torch what has no translation"]),
        Row(["Custom Function", ":", "ON", ":", "torch.autograd.Function keeps its own backward"]),
        memory,
    ]
    parts = [
        f"{_TITLE}\n\n",
        f"ORTModule is enabled with following features ON/OFF for [{mode}] mode:\n\n",
        table(sorted(rows, key=lambda row: row.cells[0])),
        f"\nTotal ORT initialization overhead is {seconds:.2f}s.\n",
        f"Versions: ort-runtime - {ort_runtime.get_runtime_version()}\n",
    ]
    if kept_bytes is not None:
        parts.append(f"Activations kept for the backward pass: {kept_bytes:,} bytes\n")
        if not is_on:
            parts.append(
                "Note 1: use ORTMODULE_MEMORY_OPT_LEVEL=1 or 2 to compute activations again\n"
            )
        if level == MemoryLevel.USER_SPECIFIED:
            parts.append("Note 2: or name plans in ORTMODULE_MEMORY_OPT_CONFIG=<config.json>\n")
    return "".join(parts)


def insight(partition: Partition, config: str) -> str:
    """Returns what level DEVINFO adds: each plan's activations, and how to enable it."""
    lines = [f"MemoryInsight Summary - User config file path: {config or 'not provided'}"]
    border = "=" * 100
    lines += [border, f"{'Freq':<7}| Activations"]
    ordered = sorted(partition.clusters, key=lambda c: (-len(c.places), c.id))
    for cluster in ordered:
        lines.append("_ " * 50)
        status = f"Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG={cluster.id}:1:-1"
        if cluster.applied:
            status = f"Enabled, actual applied count={cluster.applied}"
        lines += [
            f"{len(cluster.places):<7}|For each row options are mutually exclusive, "
            "only one of them can be enabled.",
            f"{'':<7}|>>Option 1     : Recompute subgraph {cluster.id}",
            f"{'':<7}|  Status       : {status}",
            f"{'':<7}|  Stashed Activations:",
        ]
        for place, node in enumerate(cluster.places[0].nodes):
            value = node.meta["val"]
            shape = " x ".join(str(size) for size in value.shape)
            size = value.element_size()
            text = f"   - Output {place}  : [{shape}], byte/elem: {size}, 100% saved"
            lines.append(f"{'':<7}|{text}")
    lines += [border, "Note: use comma as a separator for enabling more than one subgraphs."]
    return "\n".join(lines)
