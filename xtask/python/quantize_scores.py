"""How good the answers of a model are, on the test data of its task and against those of the float model.

`score(task, ...)` returns metrics by name. Models run in ONNX Runtime without optimizations of graphs, so that what is measured is
the quantization and not the integer kernels of a processor: QuantizeLinear and DequantizeLinear are computed as they stand.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from quantize_data import vad_steps

NEIGHBOURS = 10


def open_session(model: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    # Products of uint8 and int8 saturate without it, where a processor has AVX2 alone.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def samples(folder: Path):
    for path in sorted((folder / "test").glob("*.npz")):
        feeds = dict(np.load(path))
        yield feeds.pop("truth", None), feeds


def answers(model: Path, folder: Path) -> list[np.ndarray]:
    """The first output of each test sample."""
    session = open_session(model)
    return [session.run(None, feeds)[0] for _, feeds in samples(folder)]


def truths(folder: Path) -> list:
    return [truth for truth, _ in samples(folder)]


def unit_rows(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def nearest(embeddings: np.ndarray) -> np.ndarray:
    likeness = embeddings @ embeddings.T
    np.fill_diagonal(likeness, -np.inf)
    return np.argsort(-likeness, axis=1, kind="stable")[:, :NEIGHBOURS]


def minilm(found: list, floats: list, folder: Path, model: Path) -> dict:
    """Of the sentences' embeddings: the mean cosine to the float ones, and the neighbours kept."""
    found, floats = (unit_rows(np.stack([answer[0].mean(axis=0) for answer in part])) for part in (found, floats))
    kept = [len(np.intersect1d(ours, theirs)) for ours, theirs in zip(nearest(found), nearest(floats))]
    cosine = float((found * floats).sum(axis=1).mean())
    return {"cosine": cosine, "noise": 1 - cosine, "kept": 100 * float(np.mean(kept)) / NEIGHBOURS}


def edits(text: str, truth: str) -> int:
    """The least number of characters to insert, delete or replace."""
    row = list(range(len(truth) + 1))
    for number, left in enumerate(text, 1):
        before, row[0] = row[0], number
        for place, right in enumerate(truth, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (left != right))
    return row[-1]


def ocr_rec(found: list, floats: list, folder: Path, model: Path) -> dict:
    """Wrong characters in 100, spaces aside."""
    properties = onnx.load(model, load_external_data=False).metadata_props
    (characters,) = (entry.value.splitlines() for entry in properties if entry.key == "character")
    alphabet = ["", *characters, " "]

    def read(answer: np.ndarray) -> str:
        best = answer[0].argmax(axis=1)
        changed = np.concatenate([[True], best[1:] != best[:-1]])
        return "".join(alphabet[index] for index in best[changed])

    wanted = [str(truth).replace(" ", "") for truth in truths(folder)]
    wrong = sum(edits(read(answer).replace(" ", ""), truth) for answer, truth in zip(found, wanted))
    return {"cer": 100 * wrong / sum(map(len, wanted))}


def boxes(answer: np.ndarray) -> list[np.ndarray]:
    """The boxes of the components, grown by what the model is trained to shrink text by."""
    from scipy import ndimage

    labels, count = ndimage.label(answer[0, 0] > 0.3)
    found = []
    for number, (rows, columns) in enumerate(ndimage.find_objects(labels, count), 1):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if min(height, width) < 3 or answer[0, 0][labels == number].mean() < 0.6:
            continue
        grown = 1.5 * height * width / (2 * (height + width))
        found.append(np.array([columns.start - grown, rows.start - grown, columns.stop + grown, rows.stop + grown]))
    return found


def overlap(left: np.ndarray, right: np.ndarray) -> float:
    shared = np.prod(np.maximum(0, np.minimum(left[2:], right[2:]) - np.maximum(left[:2], right[:2])))
    area = lambda box: np.prod(box[2:] - box[:2])
    return float(shared / (area(left) + area(right) - shared))


def ocr_det(found: list, floats: list, folder: Path, model: Path) -> dict:
    """The harmonic mean of precision and recall of boxes that overlap the truth by half."""
    hits = predicted = wanted = 0
    for answer, truth in zip(found, truths(folder)):
        left = list(truth)
        mine = boxes(answer)
        predicted, wanted = predicted + len(mine), wanted + len(left)
        for box in mine:
            hit = next((index for index, other in enumerate(left) if overlap(box, other) >= 0.5), None)
            if hit is not None:
                hits += 1
                del left[hit]
    return {"hmean": 200 * hits / max(1, predicted + wanted)}


def vad_answers(model: Path, folder: Path) -> list[np.ndarray]:
    """The probabilities of all frames of each recording."""
    session = open_session(model)
    return [np.array([found for _, found in vad_steps(session, feeds["audio"])]) for _, feeds in samples(folder)]


def vad(found: list, floats: list, folder: Path, model: Path) -> dict:
    truth, found, floats = np.concatenate(truths(folder)), np.concatenate(found), np.concatenate(floats)
    speech = found > 0.5
    f1 = 2 * (speech & truth).sum() / max(1, speech.sum() + truth.sum())
    return {"f1": float(f1), "largest": float(np.abs(found - floats).max())}


def filekind(found: list, floats: list, folder: Path, model: Path) -> dict:
    same = [ours.argmax() == theirs.argmax() for ours, theirs in zip(found, floats)]
    return {"agreement": 100 * float(np.mean(same))}


def digits(found: list, floats: list, folder: Path, model: Path) -> dict:
    right = [answer.argmax() == truth for answer, truth in zip(found, truths(folder))]
    return {"accuracy": 100 * float(np.mean(right))}


def gpt(found: list, floats: list, folder: Path, model: Path) -> dict:
    """The perplexity of the tokens that follow."""

    def surprise(logits: np.ndarray, truth: np.ndarray) -> float:
        logits = logits[0].astype(np.float64)
        greatest = logits.max(axis=1, keepdims=True)
        all_words = np.log(np.exp(logits - greatest).sum(axis=1)) + greatest[:, 0]
        return float((all_words - logits[np.arange(len(logits)), truth[0]]).mean())

    return {"perplexity": float(np.exp(np.mean([surprise(*pair) for pair in zip(found, truths(folder))])))}


SCORES = {score.__name__: score for score in (minilm, ocr_rec, ocr_det, vad, filekind, digits, gpt)}


def score(task: str, folder: Path, floats: Path, model: Path) -> dict:
    """The metrics of a model; those of the float model itself too, as `float_NAME`."""
    run = vad_answers if task == "vad" else answers
    expected, metrics = float_answers(run, task, folder, floats)
    found = SCORES[task](run(model, folder), expected, folder, floats)
    return {**metrics, **found}


def float_answers(run, task: str, folder: Path, floats: Path) -> tuple[list, dict]:
    """Kept beside the data."""
    kept, key = folder / "float.npz", json.dumps([zlib.crc32(Path(__file__).read_bytes()), zlib.crc32(floats.read_bytes())])
    if not (kept.exists() and str(np.load(kept)["key"]) == key):
        np.savez(kept, *run(floats, folder), key=np.array(key))
    stored = np.load(kept)
    expected = [stored[f"arr_{index}"] for index in range(len(stored.files) - 1)]
    metrics = SCORES[task](expected, expected, folder, floats)
    return expected, {f"float_{name}": value for name, value in metrics.items()}
