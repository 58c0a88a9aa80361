"""The example server, with real HTTP clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import IS_ORIGINAL

for package in ("tokenizers", "jinja2", "starlette", "uvicorn", "httpx2"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import httpx2  # noqa: E402

if IS_ORIGINAL:
    pytest.skip("the original generates no texts", allow_module_level=True)

from ort_runtime.generate import Model  # noqa: E402

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "ort-generate/tests/data/llama"
HELLO = [{"role": "user", "content": "Hello"}]
SERVER = ROOT / "examples/python/openai_server.py"

# The server, with a tenth of a second for each token of an answer of 100 tokens or more.
SLOW_SERVER = f"""
import sys, time
sys.path.insert(0, {str(SERVER.parent)!r})
import openai_server

class Slow:
    def mask(self):
        time.sleep(0.1)
        return b"\\xff" * 40

    def accept(self, token):
        pass

class SlowModel(openai_server.Model):
    def stream(self, prompt, **options):
        constraint = Slow() if options["max_tokens"] >= 100 else None
        return super().stream(prompt, ignore_end=True, constraint=constraint, **options)

openai_server.Model = SlowModel
openai_server.main()
"""


@pytest.fixture(scope="module")
def url():
    yield from serve([str(SERVER)], "--memory-limit", "64MiB")


@pytest.fixture
def slow_url():
    yield from serve(["-c", SLOW_SERVER], "--max-requests", "1", "--max-waiting", "0")


def serve(program, *options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *program, str(LLAMA), "--port", str(port), *options]
    server = subprocess.Popen(command)
    address = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(300):
            assert server.poll() is None, "the server has ended"
            try:
                httpx2.get(f"{address}/models")
                break
            except httpx2.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        assert server.wait(timeout=30) is not None


def ask(url, **options):
    body = {"model": "llama", "messages": HELLO, "temperature": 0, "max_tokens": 12, **options}
    return httpx2.post(f"{url}/chat/completions", json=body, timeout=60)


def events(url, **options):
    body = {
        "model": "llama",
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 12,
        "stream": True,
        **options,
    }
    with httpx2.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture(scope="module")
def expected():
    with Model(LLAMA) as model:
        return model.generate(HELLO, max_tokens=12)


def test_models_are_listed(url):
    assert [model["id"] for model in httpx2.get(f"{url}/models").json()["data"]] == ["llama"]


def test_an_answer_is_that_of_the_model(url, expected):
    response = ask(url)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == expected.finish_reason
    assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)


def test_a_stream_has_the_pieces(url, expected):
    chunks = events(url, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == expected.text
    assert deltas[-1]["finish_reason"] == expected.finish_reason
    assert chunks[-1]["usage"]["completion_tokens"] == len(expected.tokens)


def test_many_clients_get_their_answers(url, expected):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(ask, url) for _ in range(8)]
        streams = [pool.submit(events, url) for _ in range(8)]
        for answer in whole:
            assert answer.result().json()["choices"][0]["message"]["content"] == expected.text
        for stream in streams:
            choices = [chunk["choices"][0] for chunk in stream.result()]
            assert (
                "".join(choice["delta"].get("content", "") for choice in choices) == expected.text
            )


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_may_go_away(slow_url, is_streamed):
    body = {"messages": HELLO, "max_tokens": 200, "stream": is_streamed}
    address = f"{slow_url}/chat/completions"
    if is_streamed:
        with httpx2.stream("POST", address, json=body, timeout=60) as response:
            lines = response.iter_lines()  # the response ends with it
            next(lines)
            assert ask(slow_url).status_code == 429
    else:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(address, json=body, timeout=1)
    # The whole answer would take 20 s, and no other request runs or waits meanwhile.
    last = time.monotonic() + 10
    while (status := ask(slow_url).status_code) == 429 and time.monotonic() < last:
        time.sleep(0.05)
    assert status == 200


def test_answers_match_a_schema(url):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    # Without places for white space, of which a random model writes as much as it may.
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    answer = ask(url, response_format=form, max_tokens=60).json()["choices"][0]
    assert json.loads(answer["message"]["content"]) in ("yes", "no")
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        ({"messages": []}, 400, "messages is missing"),
        ({"messages": [{"content": "x"}]}, 400, "expected a dict with role and content"),
        ({"model": "other"}, 404, "there is no model"),
        ({"n": 2}, 400, "n is 2"),
        ({"top_p": 3}, 400, "top_p is 3"),
        (
            {"messages": [{"role": "user", "content": "x" * 4000}]},
            400,
            "the context of the model 256",
        ),
        ({"response_format": {"type": "xml"}}, 400, "response_format is 'xml'"),
        ({"response_format": "json"}, 400, "has no attribute"),
        ({"stream": True, "stream_options": 5}, 400, "stream_options is 5"),
        ({"max_tokens": "many"}, 400, "invalid type"),
        ({"stop": 5}, 400, "not iterable"),
    ],
)
def test_bad_requests_say_what_is_wrong(url, options, status, expected):
    response = ask(url, **options)
    assert response.status_code == status
    assert expected in response.json()["error"]["message"]


def ask_in_process(model, **options):
    """A response of the server in this process."""
    spec = importlib.util.spec_from_file_location("openai_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    async def post():
        transport = httpx2.ASGITransport(app=module.Server(model, "llama").app())
        async with httpx2.AsyncClient(transport=transport, base_url="http://local") as client:
            return await client.post("/v1/chat/completions", json={"messages": HELLO, **options})

    return asyncio.run(post())


def test_a_request_that_never_fits_is_a_bad_one():
    for limit in range(80 << 10, 1 << 20, 8 << 10):
        try:
            model = Model(LLAMA, memory_limit=limit)
        except Exception:  # not even the weights fit
            continue
        with model:
            if (model.largest_context() or 0) < 100:
                continue
            response = ask_in_process(model, max_tokens=256)
            assert response.status_code == 400
            assert "ask for a context of at most" in response.json()["error"]["message"]
            assert ask_in_process(model, max_tokens=2).status_code == 200
            return
    raise AssertionError("no limit leaves room for a part of the context")


def test_errors_of_the_engine_are_errors_of_the_server(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a kernel failed")

    with Model(LLAMA) as model:
        monkeypatch.setattr(model, "stream", fail)
        response = ask_in_process(model)
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "a kernel failed",
        "type": "server_error",
        "code": None,
    }


def test_the_client_of_openai_works(url, expected):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    client = openai.OpenAI(base_url=url, api_key="none")
    answer = client.chat.completions.create(
        model="llama", messages=HELLO, temperature=0, max_tokens=12
    )
    assert answer.choices[0].message.content == expected.text
    stream = client.chat.completions.create(
        model="llama", messages=HELLO, temperature=0, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected.text
