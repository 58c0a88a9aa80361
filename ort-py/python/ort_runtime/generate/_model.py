"""Models of folders: requests that run together on one thread, within a memory limit."""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..capi._fields import to_size
from ..capi.onnxruntime_pybind11_state import TextGenerator
from ._constraint import Constraint, GrammarConstraint, GrammarTokens, grammar_of
from ._stream import Answer, Stream
from ._text import Message, TextCodec, TextPieces

#: A text, its tokens, or the messages of a conversation.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The bytes of requests of one length, before anything is allocated."""

    context: int
    requests: int
    prefill_chunk: int
    cache_bytes: int
    run_bytes: int
    input_bytes: int
    sampler_bytes: int
    total_bytes: int
    #: Whether the sizes of all values are known, so that the sum is the whole peak.
    is_exact: bool
    #: What the limit, or the machine, leaves beside the weights.
    room_bytes: int
    memory_limit: int | None
    fits: bool
    #: The longest context of as many requests that fits.
    largest_context: int | None
    weights_mapped: int
    weights_in_memory: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Work, time and memory of a model since it was opened."""

    #: Prompt tokens that were run; those in caches already are not.
    prompt_tokens: int
    prompt_seconds: float
    #: New tokens after the first of each answer.
    new_tokens: int
    new_seconds: float
    #: The most requests that one step ran.
    most_requests: int
    #: The most bytes that were allocated at once, packed weights included.
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. By default it is the most likely one."""

    #: Divides the logits; 0 takes the most likely token.
    temperature: float = 0.0
    #: Keeps this many most likely tokens; 0 keeps all.
    top_k: int = 0
    #: Keeps the most likely tokens whose probabilities first sum to this.
    top_p: float = 1.0
    #: Keeps tokens of at least this probability relative to the most likely one.
    min_p: float = 0.0
    #: Divides positive logits of earlier tokens, and multiplies negative ones.
    repetition_penalty: float = 1.0


class _Runner:
    """The requests of a model, and the thread that runs them."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator: TextGenerator | None = generator
        self._condition = threading.Condition()
        self._streams: dict[int, Stream] = {}
        # They end before the next step: `cancel` does not wait for the one that runs.
        self._cancelled: deque[int] = deque()
        self._is_closed = False
        self._problem: Exception | None = None
        self._thread: threading.Thread | None = None
        _runners.add(self)

    @property
    def generator(self) -> TextGenerator:
        generator = self._generator
        if generator is None:
            raise self._refusal()
        return generator

    def _refusal(self) -> Exception:
        if self._problem is not None:
            return RuntimeError(f"the model is closed, because it failed: {self._problem}")
        return ValueError("the model is closed")

    def submit(
        self, tokens: list[int], options: str, constraint: Constraint | None, stream: Stream
    ) -> None:
        # Another thread may have the lock, and wait for the step.
        self.refuse_own_thread()
        with self._condition:
            if self._is_closed:
                raise self._refusal()
            generator = self.generator
            # They would count as requests that wait.
            self._end_cancelled(generator)
            number = generator.submit(tokens, options, constraint)
            stream.number = number
            self._streams[number] = stream
            if self._thread is None:
                # A daemon: the program may end in the middle of an answer.
                self._thread = threading.Thread(target=self._run, name="ort-generate", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def refuse_own_thread(self) -> None:
        """Refuses calls of a constraint, which would wait for the step that it is a part of."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a constraint calls the model whose answer it limits")

    def cancel(self, stream: Stream) -> None:
        if stream._finish("cancelled") and stream.number is not None:
            self._cancelled.append(stream.number)

    def close(self) -> None:
        """Ends all requests, waits for the step that runs, and frees the model."""
        self.stop()
        self.join()
        self._generator = None

    def stop(self, patience: float = -1) -> None:
        """Ends all requests. Waits for the lock for `patience` seconds, without a bound if -1."""
        self._is_closed = True
        if not self._condition.acquire(timeout=patience):
            return
        try:
            for stream in self._streams.values():
                stream._finish("cancelled")
            self._streams.clear()
            self._cancelled.clear()
            self._condition.notify_all()
        finally:
            self._condition.release()

    def join(self, patience: float | None = None) -> None:
        """Waits for the step that runs."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as problem:
            # A panic of the native module is no Exception. The engine's state is unknown after it.
            self._abort(problem)

    def _step(self) -> bool:
        """Runs one step. Returns whether there may be another one."""
        with self._condition:
            while not self._streams and not self._is_closed:
                self._condition.wait()
            if self._is_closed:
                return False
            generator = self.generator
            self._end_cancelled(generator)
            if not self._streams:
                return True
        try:
            events = generator.step()
        except Exception as problem:
            self._fail(generator, problem)
            return True
        with self._condition:
            for number, token, reason, failure in events:
                if failure is None:
                    self._handle(generator, number, token, reason)
                elif (stream := self._streams.pop(number, None)) is not None:
                    stream._fail(failure)
        return True

    def _end_cancelled(self, generator: TextGenerator) -> None:
        while self._cancelled:
            number = self._cancelled.popleft()
            if self._streams.pop(number, None) is not None:
                generator.cancel(number)

    def _handle(
        self, generator: TextGenerator, number: int, token: int | None, reason: str | None
    ) -> None:
        # `cancel` or `close` may have ended the request during the step.
        stream = self._streams.get(number)
        if stream is None:
            return
        try:
            if token is not None and stream._push(token):
                generator.cancel(number)
                reason = "stop"
        except BaseException as problem:  # the tokenizer is a native module, which may panic
            generator.cancel(number)
            self._streams.pop(number)._fail(_as_exception(problem))
            return
        if reason is not None:
            self._streams.pop(number)._finish(reason)

    def _fail(self, generator: TextGenerator, problem: Exception) -> None:
        """Ends the requests that ran in a step which failed. Those that wait go on."""
        with self._condition:
            for number in list(self._streams):
                if not generator.contains(number):
                    self._streams.pop(number)._fail(problem)

    def _abort(self, problem: BaseException) -> None:
        """Ends all requests, and refuses further ones."""
        with self._condition:
            self._problem = _as_exception(problem)
            self._is_closed = True
            for stream in self._streams.values():
                stream._fail(self._problem)
            self._streams.clear()
            self._cancelled.clear()
            self._generator = None


def _as_exception(problem: BaseException) -> Exception:
    """An exception that `except Exception` catches, for a panic."""
    if isinstance(problem, Exception):
        return problem
    wrapped = RuntimeError(f"{type(problem).__name__}: {problem}")
    # The frames of the traceback would keep the generator.
    wrapped.__cause__ = problem.with_traceback(None)
    return wrapped


#: The seconds for which a program that ends waits for the steps that run.
_EXIT_PATIENCE = 2.0

_runners: weakref.WeakSet[_Runner] = weakref.WeakSet()


def _stop_runners() -> None:
    deadline = time.monotonic() + _EXIT_PATIENCE
    runners = list(_runners)
    for runner in runners:
        runner.stop(max(deadline - time.monotonic(), 0.0))
    for runner in runners:
        runner.join(max(deadline - time.monotonic(), 0.0))


# Exit hooks run in reverse order. The one of the native module, registered by the import above,
# parks the threads that return from native code: they must be joined before it.
atexit.register(_stop_runners)


class Model:
    """A language model of a folder of onnxruntime-genai, optimum or Transformers.js.

    Requests of any thread and of asyncio tasks run together in one batch: they join and leave it at
    any token. What does not fit the memory limit beside the others waits.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        memory_limit: int | str | None = None,
        threads: int | None = None,
        prefill_chunk: int | None = None,
        model_file: str | Path | None = None,
        cache: str | Path | None = None,
        max_requests: int | None = None,
        max_waiting: int | None = None,
        kept_texts: int = 4,
    ) -> None:
        """Loads the model of a folder.

        `memory_limit` bounds packed weights, caches, prefill, logits and the sampler: a number of
        bytes, or a text such as "2GiB". Weights that are read from the mapped file do not count.
        `max_requests` run at once, `max_waiting` may wait; further ones are refused. The prefix
        cache has the caches of `kept_texts` answers, as long as there is room.
        """
        self.folder = Path(folder)
        options = {
            "memory_limit": to_size(memory_limit, "memory_limit"),
            "threads": threads,
            "prefill_chunk": prefill_chunk,
            "model_file": None if model_file is None else str(model_file),
            "cache": None if cache is None else str(cache),
            "max_requests": max_requests,
            "max_waiting": max_waiting,
            "kept_texts": kept_texts,
        }
        generator = TextGenerator(str(self.folder), json.dumps(options))
        self._runner = _Runner(generator)
        self._finalizer = weakref.finalize(self, _Runner.close, self._runner)
        # weakref's exit hook may be older than the native module's, and would run after it.
        self._finalizer.atexit = False
        self._codec: TextCodec | None = None
        self._grammar_tokens: GrammarTokens | None = None
        self._lock = threading.Lock()

    @property
    def codec(self) -> TextCodec:
        """The tokenizer and the chat template of the folder."""
        with self._lock:
            if self._codec is None:
                self._codec = TextCodec(self.folder)
            return self._codec

    @property
    def context_length(self) -> int | None:
        """The longest text in tokens, if the configuration says it."""
        return self._runner.generator.context_length

    def plan(self, context: int | None = None, requests: int = 1) -> ContextPlan:
        """The bytes of requests with `context` tokens each, the model's longest by default."""
        if context is None and (context := self.context_length) is None:
            raise ValueError("the configuration has no context length; give context")
        return ContextPlan(**self._runner.generator.plan(context, requests))

    def largest_context(self, requests: int = 1) -> int | None:
        """The longest context of as many requests that fits; `None` if not even one token does."""
        return self.plan(1, requests).largest_context

    def largest_requests(self, context: int, most: int = 1024) -> int:
        """How many requests of `context` tokens fit at once, up to `most`."""
        return self._runner.generator.most_requests(context, most)

    @property
    def statistics(self) -> Statistics:
        """Work, time and memory since the model was opened."""
        prompt, new, prompt_seconds, new_seconds, most = self._runner.generator.timing()
        peak = self._runner.generator.peak_bytes()
        return Statistics(prompt, prompt_seconds, new, new_seconds, most, peak)

    @property
    def counts(self) -> tuple[int, int]:
        """The requests that run, and those that wait."""
        return self._runner.generator.counts()

    def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt: a text, messages of a conversation, or tokens."""
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.codec.encode_chat([item for item in items if isinstance(item, Mapping)])
        return [_token(item) for item in items]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        context: int | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        constraint: Constraint | None = None,
    ) -> Stream:
        """Begins an answer. Iterating over the stream gives its pieces, also with `async for`.

        The answer matches a JSON schema, a regular expression or a grammar (in the dialect of Lark
        that llguidance reads) if one is given, and ends before the first of the texts `stop`.
        """
        codec = self.codec
        tokens = self.tokens(prompt)
        source = grammar_of(json_schema, regex, grammar)
        if source is not None:
            if constraint is not None:
                raise ValueError("a grammar and a constraint were given, expected one of them")
            constraint = GrammarConstraint(self._tokens_of_grammars(), source)
        options = {
            "max_tokens": max_tokens,
            "seed": seed,
            "ignore_end": ignore_end,
            "context": context,
            **asdict(sampling or Sampling()),
        }
        stops = [stop] if isinstance(stop, str) else list(stop)
        stream = Stream(
            TextPieces(codec, stops), len(tokens), self._cancel, self._runner.refuse_own_thread
        )
        self._runner.submit(tokens, json.dumps(options), constraint, stream)
        return stream

    def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """Answers a prompt. The options are those of `stream`."""
        stream = self.stream(prompt, **options)
        try:
            return stream.answer()
        except BaseException:
            stream.cancel()
            raise

    def generate_batch(
        self, prompts: Sequence[Prompt], *, seed: int = 0, **options: Any
    ) -> list[Answer]:
        """Answers prompts, as many at once as fit. Seeds count up from `seed`."""
        streams: list[Stream] = []
        try:
            for index, prompt in enumerate(prompts):
                streams.append(self.stream(prompt, seed=seed + index, **options))
            return [stream.answer() for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise

    async def agenerate(self, prompt: Prompt, **options: Any) -> Answer:
        """Answers a prompt without blocking the event loop. A cancelled task ends its request."""
        started: list[Stream] = []
        is_cancelled = threading.Event()

        def start() -> None:
            started.append(self.stream(prompt, **options))
            if is_cancelled.is_set():
                started[0].cancel()

        try:
            # In a thread: it encodes the prompt, and waits for the step that runs.
            await asyncio.to_thread(start)
        except asyncio.CancelledError:
            # The thread goes on. Either it sees the event, or its stream is here already.
            is_cancelled.set()
            for stream in started:
                stream.cancel()
            raise
        return await started[0].aanswer()

    def _cancel(self, stream: Stream) -> None:
        # A method of the model, so that a stream keeps its model open.
        self._runner.cancel(stream)

    def _tokens_of_grammars(self) -> GrammarTokens:
        codec = self.codec
        with self._lock:
            if self._grammar_tokens is None:
                generator = self._runner.generator
                if not generator.end_tokens:
                    raise ValueError(
                        "a grammar needs a token that ends a text; the configuration has none"
                    )
                self._grammar_tokens = GrammarTokens(
                    codec, generator.vocabulary, generator.end_tokens[0]
                )
            return self._grammar_tokens

    def close(self) -> None:
        """Cancels all requests and frees the model. Later requests and plans are refused."""
        self._runner.refuse_own_thread()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _token(item: object) -> int:
    if isinstance(item, int) and 0 <= item < 1 << 32:
        return item
    raise TypeError(f"a prompt has {item!r}, expected a text, messages, or tokens")
