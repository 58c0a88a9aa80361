"""Makes test cases from scikit-learn models that skl2onnx converts, with scikit-learn's own predictions as expected values.

usage: python sklearn_cases.py OUT TABLE.json...

Writes OUT/STEM/NAME with `model.onnx`, `test_data_set_0/{input,output}_M.pb` and `tol`, as `ort test` reads them.
A table is a list of entries, and an entry makes one case for each of its models on each of its data with each opset:

    {"models": ["SVC(kernel='poly')", "NuSVC()"], "data": ["binary", "texts"], "opsets": [1], "methods": ["predict"]}

models      Python expressions over scikit-learn's estimators; the name of a case is made of it
data        what the model is fitted on and asked about: keys of DATA below
opsets      versions of ai.onnx.ml that models import
methods     one for each output: how scikit-learn is asked for the expected values. `decision_pair` is the
            decision function of two classes as a column for each; `dictionaries` are `predict_proba` as maps
options     skl2onnx's options of the model; "types": "float64" for inputs of that type
tolerance   [RTOL, ATOL], by default [0.001, 0.00001]

Everything that draws at random is given the seed 0. Prints one line `STEM COUNT` for each table.
"""

import functools
import inspect
import itertools
import re
from pathlib import Path

import numpy as np
import onnx
import sklearn
from skl2onnx import to_onnx
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, Int64TensorType, StringTensorType
from sklearn.datasets import make_classification, make_regression
from sklearn.utils import all_estimators

from dump_cases import make_tables, write_model

STANDARD_OPSET = 21
TOLERANCE = [1e-3, 1e-5]
ROWS = 160
FEATURES = 6
ASKED = 24
NAMES = np.array(["ant", "bee", "cat"])


def classes(count: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_classification(ROWS, FEATURES, n_informative=FEATURES, n_redundant=0, n_classes=count, random_state=1)
    return x.astype(np.float32), y


def holes(x: np.ndarray) -> np.ndarray:
    """Features of which every seventh is missing."""
    flat = x.copy().ravel()
    flat[::7] = np.nan
    return flat.reshape(x.shape)


def counts() -> tuple[np.ndarray, np.ndarray]:
    """Small counts whose sizes depend on the class."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, ROWS)
    means = 1.0 + 4.0 * rng.random((3, FEATURES))
    return rng.poisson(means[y]).astype(np.float32), y


def words() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    choices = np.array([["red", "green", "blue"], ["small", "large", "huge"]], dtype=object)
    return np.stack([rng.choice(column, ROWS) for column in choices], axis=1), rng.integers(0, 2, ROWS)


def regression(targets: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_regression(ROWS, FEATURES, n_targets=targets, noise=4.0, random_state=1)
    return x.astype(np.float32), y / 50.0


BINARY, MULTI = classes(2), classes(3)
DATA = {
    "binary": BINARY,
    "multi": MULTI,
    "texts": (MULTI[0], NAMES[MULTI[1]]),
    "two_texts": (BINARY[0], NAMES[BINARY[1]]),
    "holes": (holes(MULTI[0]), MULTI[1]),
    "counts": counts(),
    "words": words(),
    "number": regression(1),
    "holes_number": (holes(regression(1)[0]), regression(1)[1]),
    "positive_number": (regression(1)[0], np.exp(regression(1)[1] / 4.0)),
    "numbers": regression(3),
}
INPUT_TYPES = {"f4": FloatTensorType, "f8": DoubleTensorType, "i8": Int64TensorType, "O": StringTensorType}


def whole_attribute(make):
    """skl2onnx puts truth values among whole numbers, which newer versions of protobuf refuse."""

    def made(key, value, *others, **named):
        if isinstance(value, list) and any(isinstance(item, bool) for item in value):
            value = [int(item) for item in value]
        return make(key, value, *others, **named)

    return made


onnx.helper.make_attribute = whole_attribute(onnx.helper.make_attribute)


def estimators() -> dict:
    """scikit-learn's estimators by name, each with the seed 0 where it takes one."""

    def seeded(kind: type):
        takes_seed = "random_state" in inspect.signature(kind).parameters
        return (lambda *given, **named: kind(*given, **{"random_state": 0, **named})) if takes_seed else kind

    found = {name: seeded(kind) for name, kind in all_estimators()}
    return found | {"make_pipeline": sklearn.pipeline.make_pipeline, "sklearn": sklearn, "np": np}


def ask(model, method: str, x: np.ndarray):
    if method == "decision_pair":
        score = model.decision_function(x)
        return np.stack([-score, score], axis=1)
    if method == "dictionaries":
        names = [name.item() for name in model.classes_]
        return [dict(zip(names, map(np.float32, row), strict=True)) for row in model.predict_proba(x)]
    return getattr(model, method)(x)


def declared(value, info: onnx.ValueInfoProto):
    """The expected values in the type and the rank that the model declares."""
    if isinstance(value, list):
        return value
    kind = info.type.tensor_type
    value = np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    if len(kind.shape.dim) == 2 and value.ndim == 1:
        value = value.reshape(-1, 1)
    return value.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))


def make(entry: dict, choice: tuple[str, str, int], folder: Path) -> int:
    expression, data, opset = choice
    x, y = DATA[data]
    x = x.astype(entry["types"]) if "types" in entry else x
    model = eval(expression, estimators())
    model.fit(x[ASKED:], y[ASKED:])
    asked = x[:ASKED]
    kind = INPUT_TYPES["O" if x.dtype == object else x.dtype.str[1:]]
    options = {id(model): entry["options"]} if "options" in entry else None
    converted = to_onnx(
        model,
        initial_types=[("x", kind([None, x.shape[1]]))],
        options=options,
        target_opset={"": STANDARD_OPSET, "ai.onnx.ml": opset},
    )
    outputs = zip(converted.graph.output, entry["methods"], strict=True)
    expected = [declared(ask(model, method, asked), info) for info, method in outputs]
    write_model(folder, converted, [asked], expected, entry.get("tolerance", TOLERANCE))
    return 1


def name_of(entry: dict, expression: str, data: str, opset: int) -> str:
    words = re.findall(r"\w+", expression)
    return "_".join([*words, *entry.get("options", {}), *([entry["types"]] if "types" in entry else []), data, str(opset)])


def cases_of(entries: list):
    for entry in entries:
        for choice in itertools.product(entry["models"], entry["data"], entry["opsets"]):
            yield name_of(entry, *choice), functools.partial(make, entry, choice)


if __name__ == "__main__":
    make_tables(cases_of)
