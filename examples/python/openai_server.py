"""A server of the OpenAI chat protocol on `ort_runtime.generate`.

    pip install 'ort-runtime[generate]' starlette uvicorn
    pip install 'ort-runtime[constraints]'         # for response_format
    python openai_server.py llama --memory-limit 2GiB --port 8000

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
        "model": "llama", "stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'

All requests run in one batch. Those that do not fit the memory limit beside the others wait, and
beyond `--max-waiting` they get the status 429. A client that goes away ends its request. Requests
that can never run get the status 400, and errors of the engine the status 500.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from ort_runtime.capi.onnxruntime_pybind11_state import OutOfMemory
from ort_runtime.generate import Answer, Model, Sampling, Stream
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

# What a body raises that is no JSON, or has values of a wrong type.
BODY_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    ClientDisconnect,
)
REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


def error(status: int, message: str, kind: str = "invalid_request_error") -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": None}}, status)


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, whose content may be a list of texts."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is missing, expected a list of messages")
    result = []
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"a message is {message!r}, expected an object with role and content")
        content = message.get("content")
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                raise ValueError(
                    "a part of a message is no text, which is all that the model reads"
                )
            content = "".join(part["text"] for part in content)
        result.append({**message, "content": content or ""})
    return result


def options_of(body: dict[str, Any]) -> dict[str, Any]:
    """The options of `Model.stream`."""
    if body.get("n") not in (None, 1):
        raise ValueError(f"n is {body['n']}, expected 1")
    sampling = Sampling(
        temperature=_or(body.get("temperature"), 1.0),
        top_p=_or(body.get("top_p"), 1.0),
        top_k=_or(body.get("top_k"), 0),
        min_p=_or(body.get("min_p"), 0.0),
        repetition_penalty=_or(body.get("repetition_penalty"), 1.0),
    )
    most = _or(body.get("max_completion_tokens"), _or(body.get("max_tokens"), 256))
    seed = body.get("seed")
    options: dict[str, Any] = {
        "max_tokens": most,
        "sampling": sampling,
        "seed": uuid.uuid4().int >> 64 if seed is None else seed,
        "stop": body.get("stop") or (),
    }
    form = body.get("response_format") or {"type": "text"}
    match form.get("type"):
        case "text":
            pass
        case "json_object":
            options["json_schema"] = {"type": "object"}
        case "json_schema":
            options["json_schema"] = form["json_schema"]["schema"]
        case other:
            raise ValueError(
                f"response_format is {other!r}, expected text, json_object or json_schema"
            )
    return options


def usage_is_wanted(body: dict[str, Any]) -> bool:
    """Whether a stream ends with the count of its tokens."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ValueError(f"stream_options is {options!r}, expected an object")
    return bool(options.get("include_usage"))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


class Server:
    """The routes of one model."""

    def __init__(self, model: Model, name: str) -> None:
        self.model = model
        self.name = name
        self.started = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self.lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.model.close)

    async def models(self, _request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("the body is not an object")
            if body.get("model", self.name) != self.name:
                return error(404, f"there is no model {body['model']!r}; it is {self.name!r}")
            messages, options = messages_of(body), options_of(body)
            usage = usage_is_wanted(body)
        except BODY_ERRORS as problem:
            return error(400, str(problem))
        try:
            # In a thread: it waits for the step that runs.
            stream = await asyncio.to_thread(self.model.stream, messages, **options)
        except OutOfMemory as problem:
            if await asyncio.to_thread(self.fits_alone, messages, options["max_tokens"]):
                return error(429, str(problem), "rate_limit_error")
            return error(400, str(problem))
        except (ValueError, TypeError) as problem:  # also the engine's InvalidArgument
            return error(400, str(problem))
        except Exception as problem:
            return error(500, str(problem), "server_error")
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        if body.get("stream"):
            return StreamingResponse(
                self.events(stream, answer_id, usage), media_type="text/event-stream"
            )
        return await self.whole(request, stream, answer_id)

    def fits_alone(self, messages: list[dict[str, Any]], max_tokens: int) -> bool:
        """Whether the memory suffices once no other request runs."""
        # The last token of an answer is not fed.
        needed = len(self.model.tokens(messages)) + max(max_tokens - 1, 0)
        context = min(needed, self.model.context_length or needed)
        return self.model.largest_requests(context, 1) > 0

    async def whole(self, request: Request, stream: Stream, answer_id: str) -> Response:
        answering = asyncio.create_task(stream.aanswer())
        while not answering.done():
            await asyncio.wait([answering], timeout=0.5)
            if await request.is_disconnected():
                stream.cancel()
        try:
            answer = answering.result()
        except Exception as problem:
            return error(500, str(problem), "server_error")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": REASONS[answer.finish_reason],
        }
        head = self.head(answer_id, "chat.completion")
        return JSONResponse({**head, "choices": [choice], "usage": usage_of(answer)})

    async def events(self, stream: Stream, answer_id: str, usage: bool) -> AsyncIterator[str]:
        head = self.head(answer_id, "chat.completion.chunk")

        def event(delta: dict[str, Any], reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

        try:
            yield event({"role": "assistant", "content": ""})
            async for piece in stream:
                yield event({"content": piece})
            answer = stream.answer()
            yield event({}, REASONS[answer.finish_reason])
            if usage:
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage_of(answer)})}\n\n"
        except Exception as problem:
            yield f"data: {json.dumps({'error': {'message': str(problem)}})}\n\n"
        finally:
            # A client that goes away closes the generator here.
            stream.cancel()
        yield "data: [DONE]\n\n"

    def head(self, answer_id: str, kind: str) -> dict[str, Any]:
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": self.name}


def usage_of(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.tokens),
        "total_tokens": answer.prompt_tokens + len(answer.tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves the OpenAI chat protocol.")
    parser.add_argument(
        "folder", type=Path, help="a folder of onnxruntime-genai, optimum or Transformers.js"
    )
    parser.add_argument("--name", help="the name of the model [default: that of the folder]")
    parser.add_argument("--memory-limit", help="a hard limit, such as 2GiB")
    parser.add_argument("--max-requests", type=int, help="requests that run at once")
    parser.add_argument(
        "--max-waiting", type=int, default=64, help="requests that wait [default: 64]"
    )
    parser.add_argument("--threads", type=int, help="threads of the model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    model = Model(
        given.folder,
        memory_limit=given.memory_limit,
        max_requests=given.max_requests,
        max_waiting=given.max_waiting,
        threads=given.threads,
        kept_texts=16,
    )
    if not model.codec.has_template:
        parser.error(f"'{given.folder}' has no chat template")
    server = Server(model, given.name or given.folder.resolve().name)
    uvicorn.run(server.app(), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
