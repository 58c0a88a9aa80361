"""Tells which versions of the standard's operators have no case, and fails where there is one.

usage: python version_coverage.py [--write] PACKAGE.json IGNORE TABLE.json...

A version of an operator has a case where an entry of a table gives an opset from that version up to the next, or where a
model among the `onnx` package's own cases imports such an opset and has a node of it. IGNORE lists the package's cases that
do not count, `SUITE/CASE` first in each line. PACKAGE.json tells what the package's cases cover, in the form of a table; it
must be exactly right, or is written with --write. Prints the counts.
"""

import argparse
import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import onnx.defs
from onnx.backend.test.loader import load_model_tests


def versions() -> dict[tuple[str, str], list[int]]:
    found = defaultdict(set)
    for schema in onnx.defs.get_all_schemas_with_history():
        found[schema.domain, schema.name].add(schema.since_version)
    return {key: sorted(numbers) for key, numbers in found.items()}


def nodes_of(graph: onnx.GraphProto):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for subgraph in [attribute.g, *attribute.graphs]:
                yield from nodes_of(subgraph)


def uses_of_package(ignored: set[str]):
    for suite in ("node", "simple"):
        for case in load_model_tests(kind=suite):
            if f"{suite}/{case.name}" in ignored:
                continue
            model = case.model or onnx.load(Path(case.model_dir) / "model.onnx")
            imports = {entry.domain: entry.version for entry in model.opset_import}
            for node in nodes_of(model.graph):
                yield node.domain, node.op_type, imports.get(node.domain, 0)


def uses_of_tables(tables: list[Path]):
    for entry in (entry for table in tables for entry in json.loads(table.read_text())):
        for opset in entry["opsets"]:
            yield entry.get("domain", ""), entry["op"], opset


def covered(known: dict[tuple[str, str], list[int]], uses) -> set[tuple[str, str, int]]:
    found = set()
    for domain, op, opset in uses:
        reached = [version for version in known.get((domain, op), []) if version <= opset]
        if reached:
            found.add((domain, op, reached[-1]))
    return found


def as_table(covered: set[tuple[str, str, int]]) -> str:
    opsets = defaultdict(list)
    for domain, op, version in sorted(covered):
        opsets[domain, op].append(version)
    entries = [{"op": op, "domain": domain, "opsets": numbers} for (domain, op), numbers in opsets.items()]
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("package", type=Path)
    arguments.add_argument("ignore", type=Path)
    arguments.add_argument("tables", type=Path, nargs="+")
    given = arguments.parse_args()
    warnings.filterwarnings("ignore")
    known = versions()
    ignored = {line.split("#")[0].strip() for line in given.ignore.read_text().splitlines()}
    of_package = covered(known, uses_of_package(ignored))
    if given.write:
        given.package.write_text(as_table(of_package))
    elif not given.package.exists() or given.package.read_text() != as_table(of_package):
        sys.exit(f"{given.package.name} is stale: run `cargo xtask reference --bless`")
    every = {(domain, op, version) for (domain, op), numbers in known.items() for version in numbers}
    missing = every - of_package - covered(known, uses_of_tables(given.tables))
    print(f"{len(every)} versions, {len(every) - len(missing)} with a case")
    if missing:
        sys.exit("\n".join(f"{domain}:{op} {version}: has no case" for domain, op, version in sorted(missing)))


if __name__ == "__main__":
    main()
