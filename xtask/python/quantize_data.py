"""Makes the data that `cargo xtask quantize-bench` calibrates with and measures on.

Each task has a folder with calibration/NNN.npz, the inputs of a run each, and test/NNN.npz, which have `truth` too where it is
known. That of a model which the bench trains has training.npz, too, and calibrates with parts of it. Calibration and test have
no text, file, voice or picture in common. Everything is drawn with seeds of its own, from what this machine
has: descriptions of Debian packages, fonts, files. A task whose source is missing raises `Missing` with the reason.
"""

import ctypes
import io
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import numpy as np

LONGEST_SENTENCE = 128
SECTIONS, SENTENCES_OF_SECTION = 22, 60
FONTS = Path("/usr/share/fonts/truetype")
VOICES = ("en-us", "en", "de", "fr", "es", "it", "pt", "en-us+f2", "en+f3", "de+m3", "fr+f1")
SAMPLE_RATE, FRAME, CONTEXT = 16000, 512, 64
KINDS_OF_FILES, FILES_OF_KIND = 21, 40
# The language model's tokens, the last of which ends a text; its tokens at a time; the windows that are not trained on.
GPT_WORDS, GPT_WINDOW, GPT_TEST = 1024, 128, 400
# What the text detector was trained with.
MEAN, DEVIATION = np.array((0.485, 0.456, 0.406), np.float32), np.array((0.229, 0.224, 0.225), np.float32)
DIGITS = Path(__file__).parents[2] / "ort-train" / "tests" / "data"


class Missing(Exception):
    """What this machine lacks, and how to get it."""


def draw(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def descriptions() -> dict[str, list[str]]:
    """The one-line descriptions of Debian's packages by section, the largest sections first."""
    try:
        text = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"no list of Debian packages ({error})") from None
    sections, seen = {}, set()
    for package in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in package.split("\n") if ": " in line and line[0] != " ")
        description, section = fields.get("Description", ""), fields.get("Section", "")
        if description.isascii() and len(description) > 20 and description not in seen:
            seen.add(description)
            sections.setdefault(section, []).append(description)
    largest = sorted(sections.items(), key=lambda entry: (-len(entry[1]), entry[0]))[:SECTIONS]
    if len(largest) < SECTIONS or len(largest[-1][1]) < 2 * SENTENCES_OF_SECTION:
        raise Missing("too few descriptions of Debian packages; run apt-get update")
    return dict(largest)


def sentences(name: str) -> tuple[list[str], list[str]]:
    """64 to calibrate with, and those to test on."""
    generator, calibration, test = draw(name), [], []
    for texts in descriptions().values():
        order = [texts[index] for index in generator.permutation(len(texts))]
        test += order[:SENTENCES_OF_SECTION]
        calibration += order[SENTENCES_OF_SECTION : SENTENCES_OF_SECTION + 8]
    return [calibration[index] for index in generator.permutation(len(calibration))[:64]], test


def minilm(models: Path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models / "minilm_tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST_SENTENCE)

    def feeds(sentence: str) -> dict:
        ids = np.array([tokenizer.encode(sentence).ids], np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}

    return tuple([feeds(sentence) for sentence in part] for part in sentences("minilm"))


def fonts() -> list[Path]:
    """Those with letters; DejaVu's mathematical one has too few."""
    found = [path for path in sorted(FONTS.rglob("*.ttf")) if "Math" not in path.name]
    if len(found) < 4:
        raise Missing(f"no fonts in {FONTS}; install fonts-dejavu")
    return found


def print_line(text: str, generator: np.random.Generator, faces: list[Path]) -> np.ndarray:
    """A line of text as it comes out of a scanner: turned a little, noisy, compressed; grey from 0 to 255."""
    from PIL import Image, ImageDraw, ImageFont

    face = ImageFont.truetype(faces[generator.integers(len(faces))], int(generator.integers(20, 45)))
    left, top, right, bottom = face.getbbox(text)
    paper, ink = int(generator.integers(200, 256)), int(generator.integers(0, 80))
    picture = Image.new("L", (right - left + 12, bottom - top + 10), paper)
    ImageDraw.Draw(picture).text((6 - left, 5 - top), text, ink, face)
    picture = picture.rotate(generator.uniform(-1.5, 1.5), Image.Resampling.BILINEAR, fillcolor=paper)
    noisy = np.asarray(picture, np.float32) + generator.normal(0, generator.uniform(0, 12), picture.size[::-1])
    return compressed(noisy, generator)


def compressed(picture: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=int(generator.integers(60, 96)))
    return np.asarray(Image.open(buffer), np.float32)


def ocr_rec(models: Path):
    """Lines of 48 pixels' height in the model's range, and what is written there."""
    from PIL import Image

    generator, faces = draw("ocr_rec"), fonts()

    def feeds(text: str) -> dict:
        text = text[: generator.integers(12, 41)].strip()
        picture = Image.fromarray(print_line(text, generator, faces))
        width = max(48, round(picture.width * 48 / picture.height))
        grey = np.asarray(picture.resize((width, 48), Image.Resampling.BILINEAR)) / np.float32(127.5) - 1
        return {"x": np.repeat(grey[None, None], 3, 1).astype(np.float32), "truth": np.array(text)}

    calibration, test = sentences("ocr_rec")
    chosen = [test[index] for index in generator.permutation(len(test))[:400]]
    return [without_truth(feeds(text)) for text in calibration], [feeds(text) for text in chosen]


def page(texts: list[str], generator: np.random.Generator, faces: list[Path]) -> dict:
    """A page of 640 x 640 pixels with lines of text, and their boxes: left, top, right, bottom."""
    from PIL import Image, ImageDraw, ImageFont

    paper = int(generator.integers(200, 256))
    picture, boxes, top = Image.new("L", (640, 640), paper), [], 20
    pen = ImageDraw.Draw(picture)
    for text in texts:
        face = ImageFont.truetype(faces[generator.integers(len(faces))], int(generator.integers(14, 34)))
        corner, ink = (int(generator.integers(10, 80)), top), int(generator.integers(0, 80))
        text = text[: generator.integers(10, 60)].strip()
        while pen.textbbox(corner, text, face)[2] > 630:
            text = text[:-1].strip()
        box = pen.textbbox(corner, text, face)
        if box[3] > 620:
            break
        pen.text(corner, text, ink, face)
        boxes.append(box)
        top = int(box[3] + generator.integers(12, 40))
    noisy = np.asarray(picture, np.float32) + generator.normal(0, generator.uniform(0, 10), (640, 640))
    grey = compressed(noisy, generator)[None] / np.float32(255)
    scaled = (grey - MEAN[:, None, None]) / DEVIATION[:, None, None]
    return {"x": scaled[None].astype(np.float32), "truth": np.array(boxes, np.float32)}


def ocr_det(models: Path):
    generator, faces, parts = draw("ocr_det"), fonts(), []
    for texts, count in zip(sentences("ocr_det"), (30, 40)):
        orders = (generator.permutation(len(texts))[:14] for _ in range(count))
        parts.append([page([texts[index] for index in order], generator, faces) for order in orders])
    return [without_truth(feeds) for feeds in parts[0]], parts[1]


class Speaker:
    """eSpeak NG, as a library."""

    def __init__(self):
        import espeakng_loader

        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate = self.library.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0)
        if self.rate <= 0:
            raise Missing("eSpeak NG does not start")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.chunks = []
        # Kept, because the library calls it later.
        self.callback = kind(self.take)
        self.library.espeak_SetSynthCallback(self.callback)

    def take(self, samples, count, _events) -> int:
        if samples and count > 0:
            self.chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str) -> np.ndarray:
        """Samples from -1 to 1 at 16 kHz."""
        from scipy.signal import resample_poly

        if self.library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise Missing(f"eSpeak NG has no voice {voice}")
        self.chunks.clear()
        words = text.encode() + b"\0"
        self.library.espeak_Synth(words, ctypes.c_size_t(len(words)), 0, 1, 0, 1, None, None)
        sound = np.concatenate(self.chunks).astype(np.float32) / 32768
        return resample_poly(sound, SAMPLE_RATE, self.rate).astype(np.float32)


def recording(speaker: Speaker, texts: list[str], voice: str, generator: np.random.Generator) -> dict:
    """Sentences with pauses and noise. A frame is speech if the clean sound in it is loud enough."""
    parts = []
    for text in texts:
        parts += [np.zeros(int(generator.uniform(0.6, 2.0) * SAMPLE_RATE), np.float32), speaker.say(text, voice)]
    clean = np.concatenate([*parts, np.zeros(SAMPLE_RATE, np.float32)])
    clean = clean[: len(clean) // FRAME * FRAME] * np.float32(generator.uniform(0.3, 0.9))
    power = np.square(clean.reshape(-1, FRAME)).mean(axis=1)
    loud = power > 1e-3 * np.quantile(power, 0.95)
    # Speech goes on through the short gaps between its sounds.
    near = np.convolve(loud, np.ones(5), "same") > 0
    truth = np.convolve(near, np.ones(5), "same") >= 5
    noise = generator.normal(0, 1, len(clean)).astype(np.float32)
    level = np.sqrt(power[loud].mean() / 10 ** (generator.uniform(0, 25) / 10))
    return {"audio": clean + noise * np.float32(level), "truth": truth}


def vad(models: Path):
    """Whole recordings to test on; single frames, with the states of the float model, to calibrate with."""
    import onnxruntime

    speaker, generator, (calibration, test) = Speaker(), draw("vad"), sentences("vad")

    def recordings(texts: list[str], count: int) -> list[dict]:
        texts = iter(texts)
        return [
            recording(speaker, [next(texts) for _ in range(4)], VOICES[index % len(VOICES)], generator) for index in range(count)
        ]

    session = onnxruntime.InferenceSession(models / "silero_vad.onnx", providers=["CPUExecutionProvider"])
    frames = []
    for found in recordings(calibration, 8):
        steps = list(vad_steps(session, found["audio"]))
        frames += [feeds for feeds, _ in steps[:: len(steps) // 16]]
    shuffled = draw("frames").permutation(len(frames))
    return [frames[index] for index in shuffled], recordings(test, 60)


def vad_steps(session, audio: np.ndarray):
    """The inputs of each frame and its probability: the state, and the end of the frame before, go on."""
    state, before = np.zeros((2, 1, 128), np.float32), np.zeros(CONTEXT, np.float32)
    for frame in audio.reshape(-1, FRAME):
        feeds = {"input": np.concatenate([before, frame])[None], "state": state, "sr": np.array(SAMPLE_RATE, np.int64)}
        probability, state = session.run(None, feeds)
        yield feeds, float(probability[0, 0])
        before = frame[-CONTEXT:]


def filekind(models: Path):
    """The first and last bytes of files of this system, those of each ending apart."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")), Path("/usr/share"), Path("/usr/include")]
    endings = {}
    for path in (path for root in roots for path in sorted(root.rglob("*.*"))):
        if not path.is_symlink() and path.is_file() and path.stat().st_size >= 64:
            endings.setdefault(path.suffix.lower(), []).append(path)
    largest = sorted(endings.items(), key=lambda entry: (-len(entry[1]), entry[0]))[:KINDS_OF_FILES]
    generator, calibration, test = draw("filekind"), [], []
    for _, paths in largest:
        order = [paths[index] for index in generator.permutation(len(paths))[: FILES_OF_KIND + 4]]
        calibration += order[:4]
        test += order[4:]
    if len(test) < 300:
        raise Missing(f"only {len(test)} files of the most usual kinds")
    calibration = [calibration[index] for index in generator.permutation(len(calibration))[:64]]
    return [file_bytes(path) for path in calibration], [file_bytes(path) for path in test]


def file_bytes(path: Path) -> dict:
    """1,024 bytes of either end without white space; 256 where there are none."""
    content = path.read_bytes()
    begin, end = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
    codes = np.full(2048, 256, np.int32)
    codes[: len(begin)] = list(begin)
    codes[2048 - len(end) :] = list(end)
    return {"bytes": codes[None]}


def digits(models: Path):
    """Scans of handwritten digits: 64 of those that the model was trained on, and all others."""
    seen, held_out = (np.load(DIGITS / name) for name in ("digits.npz", "digits_held_out.npz"))
    test = zip(held_out["image"], held_out["labels"])
    return [{"image": image[None]} for image in seen["image"][:64]], [{"image": image[None], "truth": label} for image, label in test]


def gpt(models: Path):
    """Windows of text for a language model, and the tokens that follow; all but the last are trained on."""
    from tokenizers import Tokenizer, models as kinds, pre_tokenizers, trainers

    texts = [text for section in descriptions().values() for text in section]
    texts = [texts[index] for index in draw("gpt").permutation(len(texts))]
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=GPT_WORDS - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ids = [code for text in texts for code in [*tokenizer.encode(text).ids, GPT_WORDS - 1]]
    count = (len(ids) - 1) // GPT_WINDOW
    parts = (ids[:-1], ids[1:])
    given, wanted = (np.array(part[: count * GPT_WINDOW], np.int64).reshape(count, -1) for part in parts)
    calibration = [{"ids": row[None]} for row in given[:64]]
    held_out = zip(given[-GPT_TEST:], wanted[-GPT_TEST:])
    test = [{"ids": row[None], "truth": truth[None]} for row, truth in held_out]
    return calibration, test, {"ids": given[:-GPT_TEST], "labels": wanted[:-GPT_TEST]}


def pictures(models: Path):
    """Noise: for memory and time alone."""
    generator = draw("pictures")
    return [{"input": generator.standard_normal((1, 3, 224, 224), np.float32)} for _ in range(256)], []


def without_truth(feeds: dict) -> dict:
    return {key: value for key, value in feeds.items() if key != "truth"}


TASKS = {make.__name__: make for make in (minilm, ocr_rec, ocr_det, vad, filekind, digits, gpt, pictures)}


def make(task: str, folder: Path, models: Path) -> None:
    """Writes the data of a task, unless it is there and was made by this version of the script."""
    stamp = folder / "made"
    version = str(zlib.crc32(Path(__file__).read_bytes()))
    if stamp.exists() and stamp.read_text() == version:
        return
    shutil.rmtree(folder, ignore_errors=True)
    calibration, test, *training = TASKS[task](models)
    for name, samples in (("calibration", calibration), ("test", test)):
        (folder / name).mkdir(parents=True)
        for index, feeds in enumerate(samples):
            np.savez(folder / name / f"{index:04}.npz", **feeds)
    for arrays in training:
        np.savez(folder / "training.npz", **arrays)
    stamp.write_text(version)
    print(f"{task}: made its data", file=sys.stderr, flush=True)
