"""Compiles CUDA C to PTX with NVRTC, or assembles PTX with ptxas, out of the installed packages of NVIDIA's; no GPU is needed.

    compile_cuda.py ptx INCLUDE SOURCE COMPUTE OUTPUT [SOURCE COMPUTE OUTPUT ...]
    compile_cuda.py assemble PTX SM [PTX SM ...]

The first writes a file for each source, compressed by gzip, the second prints what `ptxas -v` says of each kernel. An error of the compiler is printed, and ends
the script with status 1.
"""

import ctypes
import gzip
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import nvidia.cuda_nvcc
import nvidia.cuda_nvrtc
import nvidia.cuda_runtime


def folder(package):
    return Path(package.__file__).parent


def in_c(texts):
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])


class Compiler:
    """NVRTC, which numbers registers as its own memory lies. So that a source is the same PTX each time and everywhere, its memory is laid out alike: at addresses
    that are not random, in a thread that has a heap of its own, without a path of this machine in it."""

    def __init__(self, include):
        library = next(folder(nvidia.cuda_nvrtc).glob("lib/libnvrtc.so.*"))
        self.nvrtc = ctypes.CDLL(str(library))
        self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.folders = [Path(include), folder(nvidia.cuda_runtime) / "include"]
        self.options = ["--std=c++17", "--fmad=true", "-default-device"]

    def headers(self, text, found):
        """The headers that a text includes, and those that they include, by the names that they are included by."""
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', text, re.MULTILINE):
            path = next((at / name for at in self.folders if (at / name).is_file()), None)
            if path and name not in found:
                found[name] = path.read_text()
                self.headers(found[name], found)
        return found

    def check(self, code, what):
        if code != 0:
            raise RuntimeError(f"{what}: {self.nvrtc.nvrtcGetErrorString(code).decode()}")

    def text(self, program, of):
        """What a pair of functions, one for the size and one for the text, says of a program."""
        size = ctypes.c_size_t()
        self.check(getattr(self.nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size)), of)
        text = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.nvrtc, f"nvrtcGet{of}")(program, text), of)
        return text.value.decode()

    def compile(self, source, compute):
        program = ctypes.c_void_p()
        text = Path(source).read_text()
        headers = self.headers(text, {})
        contents, names = in_c(headers.values()), in_c(headers.keys())
        name, count = Path(source).name.encode(), len(headers)
        created = self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name, count, contents, names)
        self.check(created, "nvrtcCreateProgram")
        options = in_c([*self.options, f"--gpu-architecture=compute_{compute}"])
        code = self.nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = self.text(program, "ProgramLog").strip()
        if log:
            print(log, file=sys.stderr)
        self.check(code, f"{source} for compute_{compute}")
        return self.text(program, "PTX")


def without_random_addresses():
    """Begins this script once more where addresses are random (personality(2))."""
    no_random_addresses = 0x0040000
    personality = getattr(ctypes.CDLL(None, use_errno=True), "personality", None)
    current = personality(0xFFFFFFFF) if personality else -1
    if current != -1 and not current & no_random_addresses and personality(current | no_random_addresses) != -1:
        os.execv(sys.executable, [sys.executable, "-B", *sys.argv])


def in_groups(arguments, size):
    return [arguments[at : at + size] for at in range(0, len(arguments), size)]


def compile_all(include, arguments):
    for source, compute, output in in_groups(arguments, 3):
        # A process for each, whose compiler has seen no other source.
        compiled = subprocess.run([sys.executable, "-B", __file__, "one", include, source, compute], stdout=subprocess.PIPE)
        if compiled.returncode != 0:
            sys.exit(1)
        Path(output).write_bytes(gzip.compress(compiled.stdout, mtime=0))


def compile_one(include, source, compute):
    def work():
        os.chdir("/")
        done.append(Compiler(include).compile(source, compute))

    include, source, done = Path(include).resolve(), Path(source).resolve(), []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not done:
        sys.exit(1)
    sys.stdout.write(done[0])


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
    elif task == "one":
        without_random_addresses()
        compile_one(*rest)
    else:
        assemble_all(rest)
