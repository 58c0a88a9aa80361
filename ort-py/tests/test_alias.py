"""The import alias: `onnxruntime` is `ort_runtime`, by module, by runner and by distribution.

Each test runs interpreters of its own, because an alias cannot be taken back.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

if os.environ.get("ORT_PACKAGE", "ort_runtime") != "ort_runtime":
    pytest.skip("the alias belongs to ort_runtime", allow_module_level=True)

ALIAS = Path(__file__).parent.parent / "alias"
RUNNER = [sys.executable, "-m", "ort_runtime.as_onnxruntime"]


def package_parents() -> list[str]:
    """Returns the folders that hold the `ort_runtime` under test."""
    spec = importlib.util.find_spec("ort_runtime")
    return [str(Path(place).parent) for place in spec.submodule_search_locations]


def environment(*paths: str) -> dict[str, str]:
    """Returns an environment whose interpreters see `paths` and this process's packages."""
    inherited = os.environ.get("PYTHONPATH")
    parts = [*paths, *package_parents(), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(parts)}


def run(
    command: list[str], cwd: Path | None = None, paths: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs `command` and returns its exit code and its text."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(*paths),
        capture_output=True,
        text=True,
        timeout=120,
    )


def code(text: str, *paths: str) -> str:
    """Runs Python code, which has to succeed, and returns what it prints."""
    done = run([sys.executable, "-c", textwrap.dedent(text)], paths=paths)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IDENTITY = """
    import importlib
    import ort_runtime
    import onnxruntime
    assert onnxruntime is ort_runtime
    from onnxruntime.capi import _pybind_state as C
    import onnxruntime.capi._pybind_state
    assert onnxruntime.capi._pybind_state is ort_runtime.capi._pybind_state is C
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
    assert InvalidArgument is importlib.import_module(
        "ort_runtime.capi.onnxruntime_pybind11_state").InvalidArgument
    from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession
    assert InferenceSession is ort_runtime.InferenceSession
    import onnxruntime.datasets as datasets
    assert datasets is importlib.import_module("ort_runtime.datasets")
    assert onnxruntime.datasets is datasets
    import sys
    for name, module in list(sys.modules.items()):
        if name == "onnxruntime" or name.startswith("onnxruntime."):
            assert module is sys.modules["ort_runtime" + name[len("onnxruntime"):]], name
            assert module.__spec__.name == module.__name__, name
"""


def test_modules_are_the_same_objects():
    code("import ort_runtime.as_onnxruntime\n" + textwrap.dedent(IDENTITY))


def test_distribution_gives_the_same_modules():
    code(IDENTITY, str(ALIAS))


def test_a_submodule_may_come_first():
    code(
        """
        import ort_runtime.as_onnxruntime
        import onnxruntime.capi._pybind_state as ours
        import ort_runtime.capi._pybind_state as theirs
        assert ours is theirs
        """
    )


def test_absent_module_keeps_its_name():
    out = code(
        """
        import ort_runtime.as_onnxruntime
        try:
            import onnxruntime.no_such_module
        except ModuleNotFoundError as error:
            print(error, error.name)
        """
    )
    assert out == "No module named 'onnxruntime.no_such_module' onnxruntime.no_such_module"


def test_find_spec():
    out = code(
        """
        import importlib.util, os
        import ort_runtime.as_onnxruntime
        spec = importlib.util.find_spec("onnxruntime")
        assert spec.origin.endswith("__init__.py"), spec
        assert os.path.isdir(spec.submodule_search_locations[0])
        assert importlib.util.find_spec("onnxruntime.capi") is not None
        assert importlib.util.find_spec("onnxruntime.datasets").has_location
        assert importlib.util.find_spec("onnxruntime.no_such_module") is None
        import onnxruntime
        assert importlib.util.find_spec("onnxruntime") is onnxruntime.__spec__
        print("ok")
        """
    )
    assert out == "ok"


def test_metadata_and_requirements():
    out = code(
        """
        import importlib.metadata as metadata
        import ort_runtime.as_onnxruntime
        print(metadata.version("onnxruntime"), metadata.version("OnnxRuntime"))
        assert metadata.metadata("onnxruntime")["Name"] == "onnxruntime"
        assert "ort-runtime" in metadata.metadata("onnxruntime")["Summary"]
        assert any(d.name == "onnxruntime" for d in metadata.distributions())
        assert metadata.packages_distributions()["onnxruntime"]
        assert metadata.version("numpy")
        try:
            metadata.version("onnxruntime-gpu")
        except metadata.PackageNotFoundError:
            print("absent")
        """
    )
    assert out.split() == ["1.31.1", "1.31.1", "absent"]


def test_version_attribute_is_that_of_the_metadata():
    """Packages compare either with a minimum."""
    code(
        """
        import importlib.metadata, ort_runtime.as_onnxruntime, onnxruntime
        assert onnxruntime.__version__ == importlib.metadata.version("onnxruntime")
        """
    )


@pytest.mark.parametrize("first", ["pkg_resources", "ort_runtime.as_onnxruntime"])
def test_pkg_resources(first: str):
    pytest.importorskip("pkg_resources")
    out = code(
        f"""
        import warnings
        warnings.simplefilter("ignore")
        import {first}
        import ort_runtime.as_onnxruntime, pkg_resources
        print(pkg_resources.require("onnxruntime>=1.17,<2")[0].version)
        """
    )
    assert out == "1.31.1"


def test_alias_version_is_that_of_the_interface():
    project = tomllib.loads((ALIAS / "pyproject.toml").read_text())["project"]
    out = code(
        """
        import importlib.metadata, ort_runtime.as_onnxruntime
        print(importlib.metadata.version("onnxruntime"))
        """
    )
    assert project["version"] == out
    assert project["name"] == "onnxruntime"


def test_another_onnxruntime_in_use_is_refused(tmp_path: Path):
    (tmp_path / "onnxruntime.py").write_text("")
    out = code(
        """
        import onnxruntime
        try:
            import ort_runtime.as_onnxruntime
        except ImportError as error:
            print(error)
        """,
        str(tmp_path),
    )
    assert out.startswith("onnxruntime is imported already from ")


PROGRAM = '''
"""A program."""
import os
import sys
import onnxruntime as ort
from onnxruntime.capi import _pybind_state

class Local:
    pass

def main():
    print(ort.__name__, __name__, sys.argv[1:], Local.__module__, __doc__.strip())
    import __main__
    assert __main__.Local is Local
    assert __main__.__file__ == __file__ and os.path.isabs(__file__)
    import beside
    sys.exit(int(sys.argv[1]))

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program, as a script, a package and a folder that is run."""
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PROGRAM)
    (package / "beside.py").write_text("")
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return script


@pytest.mark.parametrize("status", [0, 3])
def test_runs_a_script(program: Path, tmp_path: Path, status: int):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = os.path.relpath(program, elsewhere)
    done = run([*RUNNER, path, str(status), "-m", "--help"], cwd=elsewhere)
    expected = f"ort_runtime __main__ ['{status}', '-m', '--help'] __main__ A program.\n"
    assert (done.returncode, done.stdout) == (status, expected), done.stderr


def test_runs_a_module(program: Path):
    done = run([*RUNNER, "-m", "tool", "4", "-x"], cwd=program.parent)
    expected = "ort_runtime __main__ ['4', '-x'] __main__ A program.\n"
    assert (done.returncode, done.stdout) == (4, expected), done.stderr


def test_runs_a_folder(program: Path):
    done = run([*RUNNER, str(program.parent / "tool"), "5"])
    assert done.returncode == 5, done.stderr


def test_runs_a_submodule_of_the_alias():
    name = "onnxruntime.tools.remove_initializer_from_input"
    done = run([*RUNNER, "-m", name, "--help"])
    assert done.returncode == 0, done.stderr
    assert "--input" in done.stdout


def test_uncaught_error_is_exit_code_1(tmp_path: Path):
    script = tmp_path / "fails.py"
    script.write_text("import onnxruntime\nraise ValueError('no')\n")
    done = run([*RUNNER, str(script)])
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: no")
    assert f'File "{script}", line 2' in done.stderr


def test_main_outlives_the_last_statement(tmp_path: Path):
    script = tmp_path / "exits.py"
    script.write_text(
        "import atexit, pickle\n"
        "class Local: pass\n"
        "atexit.register(lambda: print(len(pickle.dumps(Local())) > 0))\n"
    )
    done = run([*RUNNER, str(script)])
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_of_multiprocessing(tmp_path: Path, method: str):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this system")
    script = tmp_path / "parallel.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            import onnxruntime

            def name(_):
                return onnxruntime.__name__

            if __name__ == "__main__":
                with multiprocessing.get_context("{method}").Pool(1) as pool:
                    print(pool.map(name, [1]))
            """
        )
    )
    done = run([*RUNNER, str(script)])
    assert (done.returncode, done.stdout) == (0, "['ort_runtime']\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "usage:"),
        (["-m"], 2, "usage:"),
        (["--unknown"], 2, "usage:"),
        (["--help"], 0, "usage:"),
        (["no_such_file.py"], 2, "can't open file 'no_such_file.py'"),
        (["-m", "no_such_module"], 1, "No module named no_such_module"),
    ],
)
def test_command_line_errors(arguments: list[str], status: int, text: str):
    done = run([*RUNNER, *arguments])
    assert done.returncode == status
    assert text in done.stdout + done.stderr
