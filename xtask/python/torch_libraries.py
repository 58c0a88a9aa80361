"""Makes stand-ins for the CUDA libraries that PyTorch links, so that it imports without them.

PyPI has builds of PyTorch for CUDA only, whose libraries are a download of 3 GB that a machine
without a GPU never calls. For each library that `torch/lib` needs and lacks, this writes a shared
library of the same name beside the others, which defines the symbols asked of it under the versions
asked for. Each function returns an error. It needs gcc, readelf and nm.

usage: torch_libraries.py
"""

import collections
import glob
import importlib.util
import os
import re
import subprocess
import tempfile

#: Names of NVIDIA's libraries, and of the symbols that are looked up without a version.
LIBRARY = re.compile(r"lib(cu|nv|nccl)")
SYMBOL = re.compile(r"(nccl|cudnn|cusparse|nvrtc|cuFile|nvshmem|cufft|cusolver|cublas|cuda)\w+")


def output(*command: str) -> str:
    """Returns what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def torch_libraries() -> str:
    """Returns the folder of PyTorch's libraries, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed")
    return os.path.join(os.path.dirname(spec.origin), "lib")


def needed(paths: list[str]) -> dict[str, dict[str, set[str]]]:
    """Returns the symbols by library and version that these libraries ask of absent ones."""
    own = {os.path.basename(path) for path in paths}
    wanted: dict[str, dict[str, set[str]]] = collections.defaultdict(
        lambda: collections.defaultdict(set)
    )
    owners: dict[str, str] = {}
    for path in paths:
        for match in re.finditer(r"NEEDED.*\[(.*?)\]", output("readelf", "-d", "-W", path)):
            if LIBRARY.match(match[1]) and match[1] not in own:
                _ = wanted[match[1]]
        file = ""
        for line in output("readelf", "-V", "-W", path).splitlines():
            if match := re.search(r"File: (\S+)", line):
                file = match[1]
            match = re.search(r"Name: (\S+)\s+Flags", line)
            if match and LIBRARY.match(file) and file not in own:
                owners[match[1]] = file
                _ = wanted[file][match[1]]
    unversioned = next((name for name in wanted if name.startswith("libcudart")), None)
    for path in paths:
        for line in output("nm", "-D", "--undefined-only", path).splitlines():
            match = re.match(r"\s+\w (\w+)(?:@+(\S+))?$", line)
            if match and match[2] in owners:
                wanted[owners[match[2]]][match[2]].add(match[1])
            elif match and not match[2] and unversioned and SYMBOL.fullmatch(match[1]):
                wanted[unversioned][""].add(match[1])
    return wanted


def write(folder: str, name: str, versions: dict[str, set[str]]) -> None:
    """Writes one library."""
    source = "".join(
        f"long {symbol}(void) {{ return 100; }}\n" for symbol in sorted(set().union(*versions.values()))
    )
    script = "".join(
        f"{version} {{ global: {''.join(f'{symbol}; ' for symbol in sorted(symbols))}}};\n"
        for version, symbols in sorted(versions.items())
        if version
    )
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
    with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
        file.write(script)
        file.flush()
        if script:
            command.append(f"-Wl,--version-script={file.name}")
        command += ["-x", "c", "-", "-o", os.path.join(folder, name)]
        subprocess.run(command, input=source, text=True, check=True)


def main() -> None:
    """Writes all libraries that are absent, and prints their names."""
    folder = torch_libraries()
    found = needed(sorted(glob.glob(os.path.join(folder, "*.so*"))))
    for name, versions in sorted(found.items()):
        write(folder, name, versions)
    print("stand-ins:", ", ".join(sorted(found)) or "none")


if __name__ == "__main__":
    main()
