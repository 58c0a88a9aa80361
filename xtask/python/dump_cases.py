"""Dumps the test cases of the `onnx` package as case folders.

usage: python dump_cases.py OUT

Writes OUT/SUITE/NAME with `model.onnx`, `test_data_set_N/{input,output}_M.pb` and `tol`, a line
`RTOL ATOL` with the case's own tolerances, and `check` where outputs are drawn at random. The suites are `node` (the operators, collected from the
package's code), `simple`, `pytorch-converted` and `pytorch-operator` (folders in the package) and
`light` (well-known networks whose weights a ConstantOfShape makes, with the package's expected outputs).
OUT/index.tsv has a line per case: `SUITE/NAME`, a tab, and the operators of its model, spaced.
Prints one line `SUITE COUNT` per suite.
"""

import json
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import MapProto, SequenceProto, TensorProto, TypeProto, numpy_helper
from onnx.backend.test.loader import DATA_DIR, load_model_tests

# The package's own runner grants bfloat16 outputs two units in the last place.
BFLOAT16_RTOL = 2.0**-6


def map_message(value: dict, name: str) -> MapProto:
    """The message of a map; the package's own function takes no text for a key."""
    keys = list(value)
    of_texts = isinstance(keys[0], str)
    values = numpy_helper.from_list([np.asarray(item) for item in value.values()])
    message = MapProto(name=name, key_type=TensorProto.STRING if of_texts else TensorProto.INT64, values=values)
    if of_texts:
        message.string_keys.extend(key.encode() for key in keys)
    else:
        message.keys.extend(keys)
    return message


def encode(value, type_proto: TypeProto, name: str) -> bytes:
    """The bytes of a value in the message that its declared type calls for."""
    if type_proto.HasField("optional_type"):
        return numpy_helper.from_optional(value, name).SerializeToString()
    if type_proto.HasField("sequence_type"):
        if type_proto.sequence_type.elem_type.HasField("map_type"):
            maps = [map_message(item, "") for item in value]
            return SequenceProto(name=name, elem_type=SequenceProto.MAP, map_values=maps).SerializeToString()
        return numpy_helper.from_list(value, name).SerializeToString()
    if type_proto.HasField("map_type"):
        return map_message(value, name).SerializeToString()
    if isinstance(value, TensorProto):
        named = TensorProto()
        named.CopyFrom(value)
        named.name = name
        return named.SerializeToString()
    return numpy_helper.from_array(np.asarray(value), name).SerializeToString()


def write_tolerance(folder: Path, rtol: float, atol: float) -> None:
    (folder / "tol").write_text(f"{rtol:g} {atol:g}\n")


def has_bfloat16_output(model: onnx.ModelProto) -> bool:
    return any(o.type.tensor_type.elem_type == TensorProto.BFLOAT16 for o in model.graph.output)


def write_data_set(folder: Path, graph: onnx.GraphProto, inputs, outputs) -> None:
    """Writes values in the order of the graph's; inputs that are constants are not given."""
    folder.mkdir(parents=True, exist_ok=True)
    constants = {tensor.name for tensor in graph.initializer}
    given = [info for info in graph.input if info.name not in constants]
    for kind, infos, values in (("input", given, inputs), ("output", graph.output, outputs)):
        for index, (info, value) in enumerate(zip(infos, values, strict=True)):
            (folder / f"{kind}_{index}.pb").write_bytes(encode(value, info.type, info.name))


def write_model(folder: Path, model: onnx.ModelProto, inputs, outputs, tolerance) -> None:
    """Writes a case of one data set: `inputs` and `outputs` in the order of the model's, `tolerance` as (RTOL, ATOL)."""
    write_data_set(folder / "test_data_set_0", model.graph, inputs, outputs)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    write_tolerance(folder, *tolerance)


def make_table(path: Path, out: Path, cases) -> tuple[int, list[str]]:
    """Makes the cases of a table, pairs of a name and a function that makes the case's folder and gives how many folders
    it made, under OUT/TABLE. Returns how many there are and what went wrong."""
    made, problems, count = set(), [], 0
    for name, make in cases:
        if name in made:
            problems.append(f"{path.name}: {name}: there are two cases of this name")
            continue
        made.add(name)
        try:
            count += make(out / path.stem / name)
        except Exception as error:  # each case that cannot be made is told, not only the first
            problems.append(f"{path.name}: {name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return count, problems


def make_tables(cases_of) -> None:
    """The program of a maker of cases, with the arguments OUT TABLE...: `cases_of` gives the cases of a table's entries.
    Prints one line `TABLE COUNT` per table; what went wrong comes last."""
    warnings.filterwarnings("ignore")
    problems = []
    for path in map(Path, sys.argv[2:]):
        count, found = make_table(path, Path(sys.argv[1]), cases_of(json.loads(path.read_text())))
        print(path.stem, count)
        problems += found
    if problems:
        sys.exit("\n".join(problems))


def random_check(model: onnx.ModelProto) -> str | None:
    """What `ort test` is told of a model that draws by probabilities: the expected draw is one of many.

    The operator draws 1 with the input's probability. The function body that the package gives of it compares
    the other way round (`Greater(random, input)`), so there ones come with the rest of the probability.
    """
    nodes = {node.op_type: node for node in model.graph.node}
    if "Bernoulli" in nodes:
        words, draw = ["bernoulli"], nodes["Bernoulli"]
    elif "RandomUniformLike" in nodes and "Greater" in nodes:
        words, draw = ["bernoulli", "complement"], nodes["RandomUniformLike"]
    else:
        return None
    if any(attribute.name == "seed" for attribute in draw.attribute):
        words.append("seeded")
    return " ".join(words)


def dump_node_cases(out: Path) -> int:
    cases = load_model_tests(kind="node")
    for case in cases:
        folder = out / case.name
        for index, (inputs, outputs) in enumerate(case.data_sets):
            write_data_set(folder / f"test_data_set_{index}", case.model.graph, inputs, outputs)
        (folder / "model.onnx").write_bytes(case.model.SerializeToString())
        rtol = max(case.rtol, BFLOAT16_RTOL) if has_bfloat16_output(case.model) else case.rtol
        write_tolerance(folder, rtol, case.atol)
        if check := random_check(case.model):
            (folder / "check").write_text(check + "\n")
    return len(cases)


def dump_folder_cases(suite: str, out: Path) -> int:
    cases = load_model_tests(kind=suite)
    for case in cases:
        shutil.copytree(case.model_dir, out / case.name, dirs_exist_ok=True)
        write_tolerance(out / case.name, case.rtol, case.atol)
    return len(cases)


def ramp(info: onnx.ValueInfoProto) -> np.ndarray:
    """The input that the package's expected outputs were made with: 0, 1/n, 2/n, ..."""
    shape = tuple(d.dim_value if d.HasField("dim_value") else 1 for d in info.type.tensor_type.shape.dim)
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) / count).astype(np.float32)


def dump_light_cases(out: Path) -> int:
    light = Path(DATA_DIR) / "light"
    specs = sorted((Path(DATA_DIR) / "real").glob("*/data.json"))
    for spec_path in specs:
        spec = json.loads(spec_path.read_text())
        source = light / f"light_{spec['model_name']}.onnx"
        model = onnx.load(source)
        folder = out / f"light_{spec['model_name']}"
        data = folder / "test_data_set_0"
        data.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / "model.onnx")
        weights = {tensor.name for tensor in model.graph.initializer}
        inputs = [info for info in model.graph.input if info.name not in weights]
        for index, info in enumerate(inputs):
            (data / f"input_{index}.pb").write_bytes(encode(ramp(info), info.type, info.name))
        for index in range(len(model.graph.output)):
            shutil.copyfile(light / f"light_{spec['model_name']}_output_{index}.pb", data / f"output_{index}.pb")
        write_tolerance(folder, spec["rtol"], spec["atol"])
    return len(specs)


def operators(graph: onnx.GraphProto) -> set[str]:
    found = set()
    for node in graph.node:
        found.add(f"{node.domain}:{node.op_type}" if node.domain else node.op_type)
        for attribute in node.attribute:
            for subgraph in [attribute.g, *attribute.graphs]:
                found |= operators(subgraph)
    return found


def write_index(out: Path) -> None:
    lines = []
    for path in sorted(out.glob("*/*/model.onnx")):
        model = onnx.load(path)
        lines.append(f"{path.parent.relative_to(out).as_posix()}\t{' '.join(sorted(operators(model.graph)))}\n")
    (out / "index.tsv").write_text("".join(lines))


def main() -> None:
    # The package's generators overflow on purpose here and there.
    warnings.filterwarnings("ignore")
    out = Path(sys.argv[1])
    print("node", dump_node_cases(out / "node"))
    for suite in ("simple", "pytorch-converted", "pytorch-operator"):
        print(suite, dump_folder_cases(suite, out / suite))
    print("light", dump_light_cases(out / "light"))
    write_index(out)


if __name__ == "__main__":
    main()
