"""Tokenizers and chat templates of model folders.

They need the packages `tokenizers` and `jinja2`, which are imported when a folder is opened.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The largest tokenizers have 35 MB.
_MOST_BYTES = 256 << 20

Message = Mapping[str, Any]


def imported(name: str, extra: str = "generate") -> Any:
    """Imports a package of an extra."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as problem:
        package = name.partition(".")[0]
        raise ImportError(
            f"ort_runtime.generate needs the package {package} ({problem}); "
            f"install ort-runtime[{extra}]"
        ) from problem


def _read(path: Path) -> str:
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"'{path}' has {size} bytes, expected at most {_MOST_BYTES}")
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as problem:
        raise ValueError(f"'{path}' is not valid JSON: {problem}") from problem


class TextCodec:
    """The tokenizer of a folder and its chat template."""

    def __init__(self, folder: Path) -> None:
        tokenizers = imported("tokenizers")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no '{path}'; copy tokenizer.json of the original model into the folder"
            )
        self.source = _read(path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(self.source)
        except Exception as problem:  # the package raises Exception itself
            raise ValueError(f"'{path}': {problem}") from problem
        # Both are settings for batches of training examples.
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._folder = folder
        self._render = self._template()

    @property
    def has_template(self) -> bool:
        """Whether the folder has a chat template."""
        return self._render is not None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; with `special`, also those that begin and end one."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to the start of the next answer."""
        # The template writes the special tokens itself.
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to the start of the next answer."""
        if self._render is None:
            raise ValueError(
                f"'{self._folder}' has no chat template: give a prompt, or copy "
                "chat_template.jinja into the folder"
            )
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"a message is {message!r}, expected a dict with role and content")
        try:
            return self._render(messages=[dict(message) for message in messages])
        except Exception as problem:
            raise ValueError(f"the chat template fails: {problem}") from problem

    def _template(self) -> Callable[..., str] | None:
        settings_path = self._folder / "tokenizer_config.json"
        settings = _read_json(settings_path) if settings_path.is_file() else {}
        alone = self._folder / "chat_template.jinja"
        source = _read(alone) if alone.is_file() else _named(settings.get("chat_template"))
        if source is None:
            return None
        sandbox = imported("jinja2.sandbox")
        ext = imported("jinja2.ext")
        jinja2 = imported("jinja2")
        # As in transformers.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols]
        )

        def refuse(text: str) -> None:
            raise jinja2.exceptions.TemplateError(text)

        def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as problem:
            raise ValueError(f"the chat template of '{self._folder}': {problem}") from problem
        names = ("bos_token", "eos_token")
        tokens = {name: _token(settings.get(name)) for name in names}

        def render(messages: list[dict[str, Any]]) -> str:
            text: str = template.render(messages=messages, add_generation_prompt=True, **tokens)
            return text

        return render


def _named(value: Any) -> str | None:
    """A template that is a text, or the default one of a list."""
    if value is None or isinstance(value, str):
        return value
    by_name = {entry.get("name"): entry.get("template") for entry in value}
    template: str | None = by_name.get("default", next(iter(by_name.values()), None))
    return template


def _token(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


class TextPieces:
    """Text as tokens arrive, up to a stop string.

    A piece is withheld while it may be the start of a stop string, or of a character of several
    tokens.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        decoders = imported("tokenizers.decoders")
        self._tokenizer = codec.tokenizer
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is certain now."""
        if self.is_stopped:
            return ""
        self._pending += self._stream.step(self._tokenizer, token) or ""
        places = [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            piece, self._pending = self._pending[: min(places)], ""
            return piece
        withheld = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        cut = len(self._pending) - withheld
        piece, self._pending = self._pending[:cut], self._pending[cut:]
        return piece

    def finish(self) -> str:
        """Ends the text and returns what was withheld."""
        rest, self._pending = self._pending, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
