"""Streams: the pieces of an answer as they are generated, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from ._text import TextPieces


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered."""

    text: str
    tokens: list[int]
    #: `stop` at the model's end token or a stop string, `length` at `max_tokens` or at the end of
    #: the context, `cancelled` after `Stream.cancel`.
    finish_reason: str
    prompt_tokens: int


class Stream:
    """An iterator, also asynchronous, over the pieces of one answer.

    Each piece goes to one reader. Cancelling a task that waits for the stream ends the answer.
    """

    def __init__(
        self,
        pieces: TextPieces,
        prompt_tokens: int,
        cancel: Callable[[Stream], None],
        before_wait: Callable[[], None],
    ) -> None:
        self._pieces = pieces
        self._prompt_tokens = prompt_tokens
        self._cancel = cancel
        #: Refuses to wait on the thread that generates.
        self._before_wait = before_wait
        #: The number of the request, once it is submitted.
        self.number: int | None = None
        self._condition = threading.Condition()
        self._ready: deque[str] = deque()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._reason: str | None = None
        self._problem: BaseException | None = None

    # What the thread of the model calls.

    def _push(self, token: int) -> bool:
        """Takes a token. Returns whether a stop string ends the answer."""
        with self._condition:
            if self._reason is not None:
                return False
            self._tokens.append(token)
            if piece := self._pieces.push(token):
                self._add(piece)
                self._wake()
            return self._pieces.is_stopped

    def _add(self, piece: str) -> None:
        self._text.append(piece)
        self._ready.append(piece)

    def _finish(self, reason: str) -> bool:
        """Ends the answer. Returns whether it was not complete yet."""
        with self._condition:
            if self._reason is not None:
                return False
            if rest := self._pieces.finish():
                self._add(rest)
            self._reason = reason
            self._wake()
            return True

    def _fail(self, problem: BaseException) -> None:
        with self._condition:
            if self._reason is None:
                self._reason, self._problem = "error", problem
            self._wake()

    def _wake(self) -> None:
        self._condition.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                # The loop is closed, so that no one waits.
                pass

    # What callers call.

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete."""
        return self._reason is not None

    def cancel(self) -> None:
        """Ends the answer. What was generated so far stays."""
        self._cancel(self)

    def answer(self) -> Answer:
        """Waits for the end of the answer."""
        with self._condition:
            while self._reason is None:
                self._before_wait()
                self._condition.wait()
        return self._answer()

    async def aanswer(self) -> Answer:
        """Waits for the end of the answer, whose pieces stay for other readers."""
        while True:
            with self._condition:
                if self._reason is not None:
                    return self._answer()
                future = self._waiting()
            await self._wait(future)

    def _answer(self) -> Answer:
        if self._problem is not None:
            raise self._problem
        reason = self._reason or "error"
        return Answer("".join(self._text), self._tokens, reason, self._prompt_tokens)

    def _next(self) -> str | None:
        """The next piece, or `None` if there is none yet."""
        if self._ready:
            return self._ready.popleft()
        if self._problem is not None:
            raise self._problem
        return None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        with self._condition:
            while (piece := self._next()) is None:
                if self._reason is not None:
                    raise StopIteration
                self._before_wait()
                self._condition.wait()
            return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            with self._condition:
                if (piece := self._next()) is not None:
                    return piece
                if self._reason is not None:
                    raise StopAsyncIteration
                future = self._waiting()
            await self._wait(future)

    def _waiting(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters.append((loop, future))
        return future

    async def _wait(self, future: asyncio.Future[None]) -> None:
        try:
            await future
        except asyncio.CancelledError:
            # No one reads the rest.
            self.cancel()
            raise


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
