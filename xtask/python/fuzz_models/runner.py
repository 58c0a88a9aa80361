"""The program that runs cases in every configuration, as a child process that is started again if a
case ends it."""

import json
import select
import shutil
import subprocess
from pathlib import Path

from case import Case, write_case
from evaluate import Expected

# A case takes milliseconds; the runtime gives up by itself after twenty seconds.
SECONDS = 90


class Runner:
    def __init__(self, program: str, folder: Path):
        self.program, self.folder = program, folder
        self.child: subprocess.Popen | None = None

    def verdict(self, case: Case, expected: Expected) -> dict:
        """What the runtime makes of a case: `outcome`, `options`, `problem`."""
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        write_case(folder, case, expected)
        if self.child is None:
            pipe = subprocess.PIPE
            self.child = subprocess.Popen([self.program], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        try:
            self.child.stdin.write(f"{folder}\n")
            self.child.stdin.flush()
            answers, _, _ = select.select([self.child.stdout], [], [], SECONDS)
            line = self.child.stdout.readline() if answers else None
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        problem = "no answer" if line is None else f"the process ended ({self.stopped()})"
        self.close()
        return {"outcome": "dies", "options": "", "problem": problem}

    def stopped(self) -> str:
        try:
            return str(self.child.wait(5))
        except subprocess.TimeoutExpired:
            return "it hangs"

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None
