"""Compiles CUDA C to PTX with NVRTC, or assembles PTX with ptxas, out of the installed packages of NVIDIA's; no GPU is needed.

    compile_cuda.py ptx INCLUDE SOURCE COMPUTE OUTPUT [SOURCE COMPUTE OUTPUT ...]
    compile_cuda.py assemble PTX SM [PTX SM ...]

The first writes a file for each source, compressed by gzip, the second prints what `ptxas -v` says of each kernel. An error of the compiler is printed, and ends
the script with status 1.
"""

import ctypes
import gzip
import subprocess
import sys
import tempfile
from pathlib import Path

import nvidia.cuda_nvcc
import nvidia.cuda_nvrtc
import nvidia.cuda_runtime


def folder(package):
    return Path(package.__file__).parent


class Compiler:
    def __init__(self, include):
        library = next(folder(nvidia.cuda_nvrtc).glob("lib/libnvrtc.so.*"))
        self.nvrtc = ctypes.CDLL(str(library))
        self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        includes = [include, folder(nvidia.cuda_runtime) / "include"]
        self.options = ["--std=c++17", "--fmad=true", "-default-device", *(f"-I{path}" for path in includes)]

    def check(self, code, what):
        if code != 0:
            sys.exit(f"{what}: {self.nvrtc.nvrtcGetErrorString(code).decode()}")

    def text(self, program, of):
        """What a pair of functions, one for the size and one for the text, says of a program."""
        size = ctypes.c_size_t()
        self.check(getattr(self.nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size)), of)
        text = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.nvrtc, f"nvrtcGet{of}")(program, text), of)
        return text.value.decode()

    def compile(self, source, compute):
        program = ctypes.c_void_p()
        text = Path(source).read_bytes()
        name = Path(source).name.encode()
        created = self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
        self.check(created, "nvrtcCreateProgram")
        options = [option.encode() for option in [*self.options, f"--gpu-architecture=compute_{compute}"]]
        code = self.nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self.text(program, "ProgramLog").strip()
        if log:
            print(log, file=sys.stderr)
        self.check(code, f"{source} for compute_{compute}")
        return self.text(program, "PTX")


def in_groups(arguments, size):
    return [arguments[at : at + size] for at in range(0, len(arguments), size)]


def compile_all(include, arguments):
    compiler = Compiler(include)
    for source, compute, output in in_groups(arguments, 3):
        Path(output).write_bytes(gzip.compress(compiler.compile(source, compute).encode(), mtime=0))


def assemble_all(arguments):
    ptxas = folder(nvidia.cuda_nvcc) / "bin" / "ptxas"
    ptxas.chmod(0o755)
    with tempfile.TemporaryDirectory() as place:
        for ptx, sm in in_groups(arguments, 2):
            text = Path(place) / "text.ptx"
            text.write_bytes(gzip.decompress(Path(ptx).read_bytes()))
            command = [ptxas, "-v", f"--gpu-name=sm_{sm}", text, "-o", f"{place}/cubin"]
            done = subprocess.run(command, capture_output=True, text=True)
            print(f"file {Path(ptx).name.split('.')[0]} {sm}")
            print(done.stdout + done.stderr)
            if done.returncode != 0:
                sys.exit(1)


if __name__ == "__main__":
    task, *rest = sys.argv[1:]
    if task == "ptx":
        compile_all(rest[0], rest[1:])
    else:
        assemble_all(rest)
