"""Tells which versions of the standard's operators have no case.

usage: python version_coverage.py [--missing FILE] TABLE.json...

A version of an operator has a case where an entry of a table gives an opset from that version up to the next, or where a
model among the `onnx` package's own node cases imports such an opset and has a node of it. FILE lists the versions that
are known to have none, `DOMAIN:OPERATOR VERSION` a line; the list must be exactly right. Prints the counts.
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


def uses_of_package():
    for case in load_model_tests(kind="node"):
        imports = {entry.domain: entry.version for entry in case.model.opset_import}
        for node in nodes_of(case.model.graph):
            yield node.domain, node.op_type, imports.get(node.domain, 0)


def uses_of_tables(tables: list[Path]):
    for entry in (entry for table in tables for entry in json.loads(table.read_text())):
        for opset in entry["opsets"]:
            yield entry.get("domain", ""), entry["op"], opset


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--missing", type=Path)
    arguments.add_argument("tables", type=Path, nargs="+")
    given = arguments.parse_args()
    warnings.filterwarnings("ignore")
    known, covered = versions(), set()
    for domain, op, opset in [*uses_of_package(), *uses_of_tables(given.tables)]:
        reached = [version for version in known.get((domain, op), []) if version <= opset]
        if reached:
            covered.add((domain, op, reached[-1]))
    every = {(domain, op, version) for (domain, op), numbers in known.items() for version in numbers}
    missing = {f"{domain}:{op} {version}" for domain, op, version in every - covered}
    listed = set(given.missing.read_text().splitlines()) if given.missing else set()
    print(f"{len(every)} versions, {len(every) - len(missing)} with a case")
    problems = [f"{line}: has no case" for line in sorted(missing - listed)]
    problems += [f"{line}: has a case, take it off the list" for line in sorted(listed - missing)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
