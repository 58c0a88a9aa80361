"""What the parts of gpu_run.py share: the programs and models of the folder, and the table of what was found."""

import json
import os
import subprocess
import tarfile
import time
from pathlib import Path

from gpu_fill import fill

# A program that is silent for longer hangs.
PATIENCE = 900
EMULATOR = "libort_cuda_emulator.so"
# What is tested and timed are kernels of our own, also where the machine has NVIDIA's libraries.
OWN_KERNELS = ["use_cublas=0", "use_cudnn=0"]
# Networks of images, which run with the channels last, too.
OF_IMAGES = ["resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny"]


class Skipped(Exception):
    """A part cannot run here; the text says why."""


class Failed(Exception):
    """Something did not do what it should; the text says what."""


def needs(name: str):
    """A package, or Skipped where there is none, or none that can be loaded."""
    try:
        return __import__(name)
    except Exception as problem:
        raise Skipped(f"no {name}: {problem}".splitlines()[0]) from problem


class Machine:
    """The folder's contents, unpacked, and how its programs are run."""

    def __init__(self, given):
        self.here, self.work = Path(__file__).resolve().parent, given.work.resolve()
        self.seconds, self.quick = given.seconds, given.quick
        self.work.mkdir(parents=True, exist_ok=True)
        # Programs run in a folder of their own, so that a path must be a whole one; a bare name is looked for by the loader.
        path = self.program(EMULATOR) if given.driver == "emulator" else Path(given.driver)
        self.driver = str(path.resolve()) if path.exists() else given.driver
        # NVIDIA's libraries are looked for, but beside the emulator, which stands in for them under their names.
        self.libraries = self.linked(path) if given.driver == "emulator" else None

    def linked(self, emulator: Path) -> Path:
        """A folder with links to the emulator by the names of NVIDIA's libraries."""
        folder = self.work / "libraries"
        folder.mkdir(exist_ok=True)
        for name in ["libcublasLt.so.12", "libcudnn.so.9"]:
            link = folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(emulator.resolve())
        return folder

    def unpacked(self, name: str) -> Path:
        """The folder that an archive is unpacked to, anew where the archive is another one."""
        archive, folder = self.here / f"{name}.tar.xz", self.work / name
        stat = archive.stat()
        stamp, key = self.work / f"{name}.unpacked", f"{stat.st_size} {stat.st_mtime_ns}"
        if not stamp.exists() or stamp.read_text() != key:
            with tarfile.open(archive) as tar:
                tar.extractall(folder)
            stamp.write_text(key)
        return folder

    def program(self, name: str) -> Path:
        return self.unpacked("bin") / name

    def test_programs(self) -> list[Path]:
        """The test executables begin with `test_`."""
        return sorted(self.unpacked("bin").glob("test_*"))

    def model(self, name: str) -> Path:
        """A model with its values, which are drawn when it is first asked for."""
        skeleton, model = self.here / "models" / f"{name}.skeleton.onnx", self.work / "models" / f"{name}.onnx"
        if not skeleton.exists():
            raise Failed(f"the folder has no model {name}")
        if not model.exists() or model.stat().st_mtime < skeleton.stat().st_mtime:
            model.parent.mkdir(parents=True, exist_ok=True)
            try:
                fill(skeleton, model)
            except ImportError as problem:
                raise Skipped(f"no numpy to fill {name} with") from problem
        return model

    def environment(self) -> dict:
        return {**os.environ, "ORT_CUDA_DRIVER": self.driver, "RUST_BACKTRACE": "0"}

    def run(self, command: list, check: bool = True, patience: float = PATIENCE) -> subprocess.CompletedProcess:
        """Runs a program of the folder; Failed with the end of its messages where it fails."""
        words = [str(word) for word in command]
        try:
            done = subprocess.run(
                words, env=self.environment(), cwd=self.work, text=True, capture_output=True, timeout=patience
            )
        except subprocess.TimeoutExpired as late:
            raise Failed(f"{Path(words[0]).name}: silent for {patience:.0f} s") from late
        if check and done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise Failed(f"{Path(words[0]).name} ended with {done.returncode}: {said[-1] if said else 'no message'}")
        return done

    def json(self, command: list) -> dict:
        """The object on the last line that a program prints."""
        return json.loads(self.run(command).stdout.splitlines()[-1])


class Report:
    """Rows of what was found; the file has them as soon as each is there, as a machine may be taken away."""

    def __init__(self, file: Path, about: dict):
        self.file, self.about, self.rows = file, about, []
        self.begin = time.monotonic()
        self.write()

    def write(self) -> None:
        text = json.dumps({"about": self.about, "rows": self.rows}, indent=1)
        partial = self.file.with_name(f"{self.file.name}.partial")
        partial.write_text(text + "\n")
        partial.replace(self.file)

    def add(self, what: str, result: str, bound: str = "-", verdict: str = "-", **values) -> None:
        """A row; `values` are numbers for the file alone."""
        result = " ".join(result.split())
        self.rows.append({"what": what, "result": result, "bound": bound, "verdict": verdict, **values})
        self.write()
        print(f"[{time.monotonic() - self.begin:6.1f} s] {what}: {result} ({bound}): {verdict}", flush=True)

    def judge(self, what: str, result: str, bound: str, is_within: bool, **values) -> None:
        self.add(what, result, bound, "ok" if is_within else "MISSED", **values)

    def attempt(self, what: str, work) -> None:
        """Does one thing: what keeps it from being done is a row, and what comes after goes on."""
        try:
            work()
        except Skipped as why:
            self.add(what, "-", "-", f"skipped: {why}")
        except Exception as problem:
            text = " ".join(str(problem).split()) or type(problem).__name__
            self.add(what, "-", "-", f"FAILED: {text[:300]}")

    def table(self) -> str:
        names = ["what", "result", "bound", "verdict"]
        lines = [names] + [[row[name] for name in names] for row in self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(names))]
        padded = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])

    def is_fine(self) -> bool:
        return not any(row["verdict"].startswith(("MISSED", "FAILED")) for row in self.rows)
