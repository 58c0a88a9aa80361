"""The example server, with real HTTP clients."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import IS_ORIGINAL

for package in ("tokenizers", "jinja2", "starlette", "uvicorn", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import httpx  # noqa: E402

if IS_ORIGINAL:
    pytest.skip("the original generates no texts", allow_module_level=True)

from ort_runtime.generate import Model  # noqa: E402

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "ort-generate/tests/data/llama"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples/python/openai_server.py"), str(LLAMA)]
    server = subprocess.Popen([*command, "--port", str(port), "--memory-limit", "64MiB"])
    address = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(300):
            assert server.poll() is None, "the server has ended"
            try:
                httpx.get(f"{address}/models")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        assert server.wait(timeout=30) is not None


def ask(url, **options):
    body = {"model": "llama", "messages": HELLO, "temperature": 0, "max_tokens": 12, **options}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def events(url, **options):
    body = {
        "model": "llama",
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 12,
        "stream": True,
        **options,
    }
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture(scope="module")
def expected():
    with Model(LLAMA) as model:
        return model.generate(HELLO, max_tokens=12)


def test_models_are_listed(url):
    assert [model["id"] for model in httpx.get(f"{url}/models").json()["data"]] == ["llama"]


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


def test_a_client_may_go_away(url):
    body = {"messages": HELLO, "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    assert ask(url).status_code == 200


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
    ],
)
def test_bad_requests_say_what_is_wrong(url, options, status, expected):
    response = ask(url, **options)
    assert response.status_code == status
    assert expected in response.json()["error"]["message"]


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
