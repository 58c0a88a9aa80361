"""Fits the tables of cases to the package under test (see `harness.py`).

With `ORT_PACKAGE=onnxruntime` every row listed in `deviations.py` expects what the original does.
The list is exact: an entry without a row is an error, and an entry whose row holds on the original
as it stands is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deviations import DEVIATIONS
from harness import IS_ORIGINAL, Deviates, ort


def _key(item: pytest.Item) -> str:
    """`test_run.py::test_value[tuple]`, whatever folder pytest was started in."""
    file, row = item.nodeid.split("::", 1)
    return f"{file.rsplit('/', 1)[-1]}::{row}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Swaps the expectations of deviating rows; finds entries that name no row."""
    rows = {_key(item): item for item in items}
    whole = not any("::" in arg for arg in config.args)
    files = {key.split("::")[0] for key in rows}
    stale = [key for key in DEVIATIONS if key not in rows and key.split("::")[0] in files]
    if whole and stale:
        raise pytest.UsageError("deviations.py names rows that are not there: " + ", ".join(stale))
    if not IS_ORIGINAL:
        return
    for key, deviation in DEVIATIONS.items():
        item = rows.get(key)
        if item is not None:
            given = item.callspec.params
            given["expected"] = Deviates(deviation.original, given["expected"])


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Only fatal log lines, so that expected failures do not fill the report."""
    ort.set_default_logger_severity(4)
    yield
    ort.set_default_logger_severity(2)
