"""Import alias: the name `onnxruntime` for the modules of `ort_runtime`.

Three ways to run a program that says `import onnxruntime` unchanged:

- `python -m ort_runtime.as_onnxruntime program.py args...` or `... -m module args...`;
- `import ort_runtime.as_onnxruntime` before the program's own imports;
- the distribution in `ort-py/alias`, which owns the name `onnxruntime` in an environment.

`onnxruntime` and each of its submodules are then the very modules of `ort_runtime`, not copies:
classes, exceptions and module state are shared. `importlib.util.find_spec`, `importlib.metadata`
and `pkg_resources` answer for the name, so programs that ask for `onnxruntime>=1.17` start.

Children of `multiprocessing` inherit the alias, whatever the start method is. Other interpreters
that a program starts do not: they need the distribution.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing.spawn
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["install", "main"]

_ALIAS = "onnxruntime"
_TARGET = __name__.rpartition(".")[0] or "ort_runtime"
_METADATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_onnxruntime_metadata")
_USAGE = """\
usage: python -m ort_runtime.as_onnxruntime [-m module | program.py] [args ...]

Runs a program whose `import onnxruntime` gets ort_runtime."""


def _target_name(fullname: str) -> str | None:
    """Returns the name under `ort_runtime` that `fullname` stands for, None if it is no alias."""
    if fullname == _ALIAS or fullname.startswith(_ALIAS + "."):
        return _TARGET + fullname[len(_ALIAS) :]
    return None


class _AliasLoader(importlib.abc.InspectLoader):
    """Loads `onnxruntime.x` by importing `ort_runtime.x`.

    The code accessors answer for the file of the target, which `python -m onnxruntime.tools.x` and
    `inspect` need.
    """

    def __init__(self, target: importlib.machinery.ModuleSpec) -> None:
        self._target = target
        self._loader: Any = target.loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Lets importlib make a placeholder.

        Returning the target here would let importlib overwrite its `__spec__`.
        """

    def exec_module(self, module: types.ModuleType) -> None:
        """Imports the target and puts it in the placeholder's place.

        importlib returns what `sys.modules` holds after this call, so the placeholder is never
        seen.
        """
        sys.modules[module.__name__] = importlib.import_module(self._target.name)

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Returns the target's code, None for an extension module."""
        return self._loader.get_code(self._target.name)

    def get_source(self, fullname: str) -> str | None:
        """Returns the target's source, None for an extension module."""
        return self._loader.get_source(self._target.name)

    def get_filename(self, fullname: str) -> str:
        """Returns the path of the target's file."""
        return self._loader.get_filename(self._target.name)

    def is_package(self, fullname: str) -> bool:
        """Returns whether the target is a package."""
        return self._target.submodule_search_locations is not None


class _AliasFinder(importlib.metadata.DistributionFinder):
    """Finds `onnxruntime` and its submodules under `ort_runtime`, and its distribution.

    It has to be first in `sys.meta_path`: the path finder would follow `onnxruntime.__path__`,
    which is that of `ort_runtime`, and load every submodule a second time.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of an alias, None for other names and absent modules."""
        name = _target_name(fullname)
        found = importlib.util.find_spec(name) if name else None
        if found is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname,
            _AliasLoader(found),
            origin=found.origin,
            is_package=found.submodule_search_locations is not None,
        )
        # Programs look for data files in the package's folder before they import it.
        if found.submodule_search_locations is not None:
            spec.submodule_search_locations = list(found.submodule_search_locations)
        spec.has_location = found.has_location
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Returns the distribution `onnxruntime`, if `context` asks for it or for all."""
        name = context.name if context else None
        inner = importlib.metadata.DistributionFinder.Context(name=name, path=[_METADATA])
        return importlib.metadata.MetadataPathFinder.find_distributions(inner)


def install() -> None:
    """Makes `onnxruntime` the name of `ort_runtime` in this process. A second call does nothing.

    Raises:
        ImportError: another `onnxruntime` is imported already; its classes are in use.

    Example:
        >>> from ort_runtime import as_onnxruntime
        >>> as_onnxruntime.install()
        >>> import onnxruntime
        >>> onnxruntime.__name__
        'ort_runtime'
    """
    target = importlib.import_module(_TARGET)
    other = sys.modules.get(_ALIAS, target)
    if other is not target:
        place = getattr(other, "__file__", None)
        raise ImportError(
            f"onnxruntime is imported already from {place}; "
            "import ort_runtime.as_onnxruntime before it",
            name=_ALIAS,
            path=place,
        )
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
        _follow_into_children()
    if _METADATA not in sys.path:
        # pkg_resources reads folders of sys.path and knows no finders.
        sys.path.append(_METADATA)
        loaded = sys.modules.get("pkg_resources")
        if loaded is not None:
            loaded.working_set.add_entry(_METADATA)


class _InstallInChild:
    """An object whose unpickling imports this module, which installs the alias."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (__name__,)


def _follow_into_children() -> None:
    """Lets the interpreters that `multiprocessing` spawns install the alias.

    They unpickle this data before they import the program's main module. The server of the start
    method `forkserver` imports that module before there is such data, so it imports this one instead.
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_with_alias(name: str) -> dict[str, Any]:
        return {**prepare(name), _TARGET: _InstallInChild()}

    multiprocessing.spawn.get_preparation_data = prepare_with_alias
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload([__name__])


def _run(arguments: list[str]) -> None:
    """Runs `arguments` as the interpreter would: `-m module ...` or `path ...`.

    The program gets a `__main__` of its own that stays until the interpreter exits, because
    threads and exit handlers outlive the program's last statement.
    """
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = sys.modules["builtins"]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        # The interpreter's own entry for -m: it sets __spec__, __file__ and sys.argv[0], and
        # turns a missing module into exit code 1.
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    path = arguments[0]
    sys.argv = arguments
    if pkgutil.get_importer(path) is not None:
        # A folder or a zip archive with a __main__.py.
        _replace_first_path(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"can't open file {path!r}: {error}", file=sys.stderr)
        sys.exit(2)
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    # Absolute, as the interpreter has it: programs look for files beside theirs after a chdir.
    path = os.path.abspath(path)
    program.__file__ = path
    program.__dict__["__cached__"] = None
    program.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), program.__dict__)


def _replace_first_path(path: str) -> None:
    """Puts the program's folder where `-m` put the current one, unless `-P` keeps both away."""
    if sys.flags.safe_path:
        return
    sys.path[0] = path


def main(arguments: list[str] | None = None) -> None:
    """Runs a program under the alias; the entry of `python -m ort_runtime.as_onnxruntime`.

    Args:
        arguments: `["-m", module, ...]` or `[path, ...]`; the command line if None.

    Raises:
        SystemExit: code 0 for `--help`, 2 if there is nothing to run or the file cannot be opened,
            and whatever the program exits with.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        sys.exit(0)
    runs_module = arguments[:1] == ["-m"] and len(arguments) > 1
    if not runs_module and (not arguments or arguments[0].startswith("-")):
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    install()
    _run(arguments)


if __name__ == "__main__":
    # `python -m` runs this file under the name __main__; the module that programs can import has
    # the state.
    from ort_runtime import as_onnxruntime

    as_onnxruntime.main()
else:
    install()
