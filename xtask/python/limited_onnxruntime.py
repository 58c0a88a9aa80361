"""ONNX Runtime limited to AVX2: a copy of the installed package whose library does not find AVX-512.

MLAS, its kernel library, has no setting for the instruction set. It asks the processor for AVX-512, and then whether the operating
system saves the registers: bits 5 to 7 of XCR0. In the copy these are joined by bits 3 and 4 (MPX), which no current system sets.
"""

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

# test al, 0xE0; je: taken if none of the inverted bits is set.
CHECK = bytes.fromhex("a8e00f84")
NEVER = bytes.fromhex("a8f80f84")


def import_limited() -> None:
    """Makes `import onnxruntime` find the copy, which is made once per environment and version."""
    package = Path(find_spec("onnxruntime").origin).parent
    version = next(package.parent.glob("onnxruntime-*.dist-info")).name.removesuffix(".dist-info")
    folder = Path(sys.prefix) / f"{version}-avx2"
    if not folder.exists():
        copy_to(folder, package)
    sys.path.insert(0, str(folder))


def copy_to(folder: Path, package: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        copy = Path(parent) / "copy"
        shutil.copytree(package, copy / "onnxruntime")
        (library,) = (copy / "onnxruntime" / "capi").glob("onnxruntime_pybind11_state*.so")
        code = library.read_bytes()
        if CHECK not in code:
            raise SystemExit(f"error: {library.name} has no such check for AVX-512: ONNX Runtime cannot be limited to AVX2")
        library.write_bytes(code.replace(CHECK, NEVER))
        try:
            os.rename(copy, folder)
        except OSError:
            # Another process was faster.
            if not folder.exists():
                raise
