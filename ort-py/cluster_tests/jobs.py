"""The large jobs: 10,000 images through a MobileNet, and 5,000 texts through a MiniLM."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

Columns = Mapping[str, np.ndarray]

SIDE, WORDS = 224, 32
#: A text is some of these words.
DICTIONARY = "a batch of texts goes to each worker and comes back as vectors in the same order".split()


@lru_cache
def photograph() -> np.ndarray:
    """Returns the image that all others are shifts of."""
    rows, columns = np.mgrid[:SIDE, :SIDE] / 20
    layers = [np.sin(rows * (1 + layer) + columns**1.2) for layer in range(3)]
    noise = np.random.default_rng(1).standard_normal((3, SIDE, SIDE))
    return (np.stack(layers) + 0.3 * noise).astype(np.float32)


def images(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the images of ids."""
    made = np.empty((len(ids), 3, SIDE, SIDE), np.float32)
    for image, number in zip(made, ids.tolist()):
        image[:] = np.roll(photograph(), (7 * number % SIDE, number // 32), (1, 2))
    return {"input": made}


def text(number: int) -> str:
    """Returns the text of an id: 4 to 31 words."""
    random = np.random.default_rng(number)
    return " ".join(random.choice(DICTIONARY, 4 + number % (WORDS - 4)))


def texts(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the numbers of the words of texts, padded. A word's number is a hash of it."""
    words = np.zeros((len(ids), WORDS), np.int64)
    for row, number in zip(words, ids.tolist()):
        numbers = [1000 + zlib.crc32(word.encode()) % 29000 for word in text(number).split()]
        row[: len(numbers)] = numbers
    mask = (words != 0).astype(np.int64)
    return {"input_ids": words, "attention_mask": mask, "token_type_ids": np.zeros_like(words)}


def means(states: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the mean of the hidden states of a text's words."""
    mask = texts(ids)["attention_mask"][:, :, None].astype(np.float32)
    return (states.reshape(len(ids), WORDS, -1) * mask).sum(1) / mask.sum(1)


def unchanged(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the scores."""
    return scores


@dataclass(frozen=True)
class Job:
    """A model, what it reads for an id, and what is kept of its output.

    Attributes:
        file: the model's file in the folder of models.
        rows: the number of ids.
        dims: the sizes of its dimensions other than the batch.
        output: the output, and how it is reduced.
    """

    file: str
    rows: int
    inputs: Callable[[np.ndarray], dict[str, np.ndarray]]
    dims: Mapping[str, int]
    output: str
    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray]

    @property
    def path(self) -> Path:
        """The model, which `cargo xtask models` makes."""
        return Path(os.environ.get("ORT_MODELS", "")) / self.file


JOBS = {
    "images": Job("mobilenet_v2.onnx", 10_000, images, {}, "output", unchanged),
    "texts": Job("minilm_l6.onnx", 5_000, texts, {"seq": WORDS}, "last_hidden_state", means),
}
