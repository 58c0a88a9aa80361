"""Three small models for first steps and tests.

- `sigmoid.onnx`: `x`, float [3, 4, 5]; `y`, float [3, 4, 5], is `1 / (1 + exp(-x))`.
- `mul_1.onnx`: `X`, float [3, 2]; `Y`, float [3, 2], is `X * [[1, 2], [3, 4], [5, 6]]`.
- `logreg_iris.onnx`: `float_input`, float [3, 2], has sepal length and width in cm; `label`, int64
  [3], and `probabilities`, three dictionaries from class to probability.

`tests/make_datasets.py` of the source tree makes them.
"""

import os

__all__ = ["get_example"]


def get_example(name: str) -> str:
    """Returns the absolute path of an example model.

    Args:
        name: `sigmoid.onnx`, `mul_1.onnx` or `logreg_iris.onnx`.

    Raises:
        FileNotFoundError: there is no such example.

    Example:
        >>> import ort_runtime as ort
        >>> from ort_runtime.datasets import get_example
        >>> ort.InferenceSession(get_example("mul_1.onnx")).get_inputs()[0].name
        'X'
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    examples = sorted(file for file in os.listdir(folder) if file.endswith(".onnx"))
    if name not in examples:
        raise FileNotFoundError(
            f"Unable to find example {name!r}; there are {', '.join(examples)}"
        )
    return os.path.join(folder, name)
