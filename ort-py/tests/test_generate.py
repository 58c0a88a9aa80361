"""Text generation: the answers of other runtimes, in any batch, within limits."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import IS_ORIGINAL

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

if IS_ORIGINAL:
    pytest.skip("the original generates no texts", allow_module_level=True)

from ort_runtime.generate import Model, Sampling, TextCodec  # noqa: E402

DATA = Path(__file__).parents[2] / "ort-generate/tests/data"
FOLDERS = ["llama", "llama_int4", "qwen2", "gpt2"]
END = 1


def references(name: str) -> list[tuple[list[int], list[int]]]:
    """Prompts, and the tokens that another runtime generates from them, up to the end."""
    cases = json.loads((DATA / name / "generated.json").read_text())
    cut = lambda tokens: tokens[: tokens.index(END)] if END in tokens else tokens
    return [(case["prompt"], cut(case["tokens"])) for case in cases]


@pytest.fixture(scope="module")
def llama():
    with Model(DATA / "llama") as model:
        yield model


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_other_runtimes(name):
    with Model(DATA / name) as model:
        for prompt, expected in references(name):
            answer = model.generate(prompt, max_tokens=len(expected))
            assert answer.tokens == expected
            assert answer.prompt_tokens == len(prompt)
            # A stream withholds a character that is not whole.
            assert answer.text.rstrip("\ufffd") == model.codec.decode(expected).rstrip("\ufffd")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_batch_gives_the_tokens_of_its_texts(name):
    prompts, expected = zip(*references(name), strict=True)
    with Model(DATA / name) as model:
        answers = model.generate_batch(prompts, max_tokens=max(map(len, expected)))
        assert all(
            answer.tokens[: len(tokens)] == tokens for answer, tokens in zip(answers, expected)
        )
        assert model.statistics.most_requests > 1


def test_threads_share_one_batch(llama):
    cases = references("llama") * 4
    answers: list[Any] = [None] * len(cases)

    def ask(index):
        prompt, expected = cases[index]
        pieces = list(stream := llama.stream(prompt, max_tokens=len(expected)))
        answers[index] = stream.answer()
        assert "".join(pieces) == answers[index].text

    threads = [threading.Thread(target=ask, args=[index]) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.tokens for answer in answers] == [expected for _, expected in cases]


def test_streams_are_asynchronous(llama):
    cases = references("llama") * 3

    async def ask(prompt, expected):
        stream = llama.stream(prompt, max_tokens=len(expected))
        pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.answer().text
        return stream.answer().tokens

    async def ask_all():
        return await asyncio.gather(*(ask(*case) for case in cases))

    assert asyncio.run(ask_all()) == [expected for _, expected in cases]


class _Slow:
    """A constraint that allows all tokens, after some time."""

    def __init__(self, seconds=0.1):
        self.seconds = seconds
        self.begun = threading.Event()

    def mask(self):
        self.begun.set()
        time.sleep(self.seconds)
        return b"\xff" * 40

    def accept(self, token):
        pass


def wait_until_idle(model, seconds=10):
    """Waits for the end of all requests, in less time than a whole answer of `_Slow` takes."""
    last = time.monotonic() + seconds
    while model.counts != (0, 0):
        assert time.monotonic() < last, "a request still runs"
        time.sleep(0.01)


SLOW = {"max_tokens": 200, "ignore_end": True}


def test_a_cancelled_task_ends_its_request(llama):
    async def run():
        slow = _Slow()
        stream = llama.stream("The quick", constraint=slow, **SLOW)

        async def read():
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(slow.begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_until_idle(llama)


@pytest.mark.parametrize("has_started", [False, True])
def test_a_cancelled_agenerate_ends_its_request(llama, has_started):
    async def run():
        first, second = _Slow(0.3), _Slow()
        stream = llama.stream("The quick", constraint=first, **SLOW)
        await asyncio.to_thread(first.begun.wait)
        task = asyncio.create_task(llama.agenerate("The quick", constraint=second, **SLOW))
        # Without its start, the task is cancelled while it waits for a step of the first.
        await (asyncio.to_thread(second.begun.wait) if has_started else asyncio.sleep(0.05))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream.cancel()

    asyncio.run(run())
    wait_until_idle(llama)


def test_agenerate_does_not_block_the_event_loop(llama):
    async def run():
        slow = _Slow(0.5)
        stream = llama.stream("The quick", constraint=slow, **SLOW)
        await asyncio.to_thread(slow.begun.wait)
        begin = time.monotonic()
        task = asyncio.create_task(llama.agenerate("The quick", max_tokens=1, ignore_end=True))
        longest = 0.0
        while not task.done():
            await asyncio.sleep(0.01)
            longest, begin = max(longest, time.monotonic() - begin), time.monotonic()
        begin = time.monotonic()
        stream.cancel()
        longest = max(longest, time.monotonic() - begin)
        return longest, len((await task).tokens)

    longest, count = asyncio.run(run())
    assert longest < 0.3 and count == 1
    wait_until_idle(llama)


def test_a_stream_has_several_asynchronous_readers(llama):
    async def run():
        stream = llama.stream("The quick", max_tokens=40, ignore_end=True, constraint=_Slow(0.01))

        async def read():
            return [piece async for piece in stream]

        ends = asyncio.gather(read(), read(), stream.aanswer(), stream.aanswer())
        one, other, answer, same = await asyncio.wait_for(ends, timeout=60)
        assert answer == same
        assert sorted([*one, *other]) == sorted(stream._text)

    asyncio.run(run())


def test_aanswer_leaves_the_pieces_to_others(llama):
    async def run():
        stream = llama.stream("The quick", max_tokens=20, ignore_end=True)
        answer = await stream.aanswer()
        assert "".join([piece async for piece in stream]) == answer.text != ""

    asyncio.run(run())


def test_a_cancelled_stream_keeps_its_text(llama):
    stream = llama.stream("The quick", max_tokens=200, ignore_end=True)
    first = next(stream)
    stream.cancel()
    answer = stream.answer()
    assert answer.finish_reason in ("cancelled", "length")
    assert answer.text.startswith(first)
    assert "".join([first, *stream]) == answer.text


def test_a_stop_string_ends_the_text(llama):
    prompt, expected = references("llama")[0]
    whole = llama.generate(prompt, max_tokens=len(expected))
    stop = whole.text[len(whole.text) // 2 :][:3]
    answer = llama.generate(prompt, max_tokens=len(expected), stop=[stop, ""])
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert len(answer.tokens) < len(whole.tokens)


def test_one_seed_gives_one_text(llama):
    texts = [
        llama.generate(
            "The quick", max_tokens=24, seed=seed, sampling=Sampling(temperature=1.0, top_k=40)
        ).tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_texts_are_encoded_as_by_tokenizers():
    codec = TextCodec(DATA / "llama")
    for case in json.loads((DATA / "text.json").read_text())["encoded"]:
        assert codec.encode(case["text"], special=False) == case["plain"]
        assert codec.encode(case["text"]) == case["special"]
        assert codec.decode(case["special"]) == case["decoded"]


def test_conversations_are_rendered_as_by_transformers(tmp_path):
    shutil.copy(DATA / "llama/tokenizer.json", tmp_path)
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for case in json.loads((DATA / "text.json").read_text())["chats"]:
        (tmp_path / "chat_template.jinja").write_text(case["template"])
        assert TextCodec(tmp_path).render(case["messages"]) == case["text"]


def test_messages_are_a_prompt(llama):
    messages = [{"role": "user", "content": "Hello"}]
    tokens = llama.codec.encode_chat(messages)
    answer = llama.generate(messages, max_tokens=5, ignore_end=True)
    assert answer.prompt_tokens == len(tokens)
    assert answer.tokens == llama.generate(tokens, max_tokens=5, ignore_end=True).tokens


def test_plans_are_the_limits(llama):
    plan = llama.plan(128, requests=3)
    assert plan.fits and plan.is_exact and plan.requests == 3
    limit = plan.total_bytes + plan.weights_in_memory
    with Model(DATA / "llama", memory_limit=limit) as model:
        assert model.largest_requests(128) >= 1
        largest = model.largest_context(requests=3)
        assert 1 <= largest <= 256
        prompts = [[5 + index] + list(range(10, 40)) for index in range(9)]
        answers = model.generate_batch(prompts, max_tokens=20, ignore_end=True)
        assert all(len(answer.tokens) == 20 for answer in answers)
        assert model.statistics.peak_bytes <= limit
    alone = [llama.generate(prompt, max_tokens=20, ignore_end=True).tokens for prompt in prompts]
    assert [answer.tokens for answer in answers] == alone


def small_model() -> tuple[Model, int]:
    """A model with room for a part of its context."""
    for step in range(10, 200):
        try:
            model = Model(DATA / "llama", memory_limit=step << 13)
        except Exception:  # not even the weights fit
            continue
        largest = model.largest_context()
        if largest is not None and largest < 250:
            return model, largest
        model.close()
    raise AssertionError("no limit leaves room for a part of the context")


def test_what_does_not_fit_is_refused_with_the_number():
    model, largest = small_model()
    with model:
        with pytest.raises(Exception, match=f"at most {largest} tokens"):
            model.generate([5] * (largest + 1), max_tokens=1)
        assert len(model.generate([5] * largest, max_tokens=1, ignore_end=True).tokens) == 1


def test_requests_beyond_the_queue_are_refused():
    with Model(DATA / "llama", max_requests=1, max_waiting=1) as model:
        streams = [model.stream("The quick", max_tokens=200, ignore_end=True)]
        with pytest.raises(Exception, match="may wait"):
            for _ in range(20):
                streams.append(model.stream("The quick", max_tokens=200, ignore_end=True))
        for stream in streams:
            stream.cancel()
        assert len(model.generate("The quick", max_tokens=3, ignore_end=True).tokens) == 3


def test_a_conversation_reuses_its_caches():
    prompt, expected = references("llama")[1]
    with Model(DATA / "llama") as model:
        model.generate(prompt, max_tokens=8)
        before = model.statistics.prompt_tokens
        assert before == len(prompt)
        longer = prompt + expected[:12]
        assert model.generate(longer, max_tokens=8).tokens == expected[12:20]
        assert model.statistics.prompt_tokens - before == 5


class _Only:
    """A constraint that allows some tokens."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.accepted = []

    def mask(self):
        bits = bytearray(40)
        for token in self.tokens:
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def accept(self, token):
        self.accepted.append(token)


def test_a_constraint_limits_the_tokens(llama):
    only = _Only([7, 100, 319])
    answer = llama.generate("The quick", max_tokens=9, constraint=only)
    assert set(answer.tokens) <= {7, 100, 319}
    assert only.accepted == answer.tokens and len(answer.tokens) == 9
    hot = Sampling(temperature=5.0)
    answer = llama.generate("The quick", max_tokens=9, constraint=_Only([7, 100]), sampling=hot)
    assert set(answer.tokens) == {7, 100}


def test_a_constraint_that_fails_ends_its_request_alone(llama):
    class Fails(_Only):
        def accept(self, token):
            raise KeyError("no such state")

    prompt, expected = references("llama")[0]
    slow = _Slow(0.01)
    other = llama.stream(prompt, max_tokens=len(expected), constraint=slow)
    assert slow.begun.wait(60)
    stream = llama.stream("The quick", max_tokens=9, constraint=Fails([7]))
    with pytest.raises(Exception, match="the constraint: KeyError: 'no such state'"):
        stream.answer()
    with pytest.raises(Exception, match="no token may follow"):
        llama.generate("The quick", max_tokens=9, constraint=_Only([]))
    assert other.answer().tokens == expected
    wait_until_idle(llama)
    assert len(llama.generate("The quick", max_tokens=3, ignore_end=True).tokens) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.generate("x", max_tokens=1),
        lambda model: model.close(),
        lambda model: model.counts,
        lambda model: model.plan(8),
        lambda model: model.statistics,
    ],
    ids=["generate", "close", "counts", "plan", "statistics"],
)
def test_a_constraint_must_not_call_its_model(llama, call):
    class Calls(_Only):
        def mask(self):
            call(llama)
            return super().mask()

    with pytest.raises(Exception, match="calls the model whose answer it limits"):
        llama.generate("The quick", max_tokens=3, constraint=Calls([7]))
    wait_until_idle(llama)
    assert len(llama.generate("The quick", max_tokens=3, ignore_end=True).tokens) == 3


def test_a_constraint_must_not_wait_for_its_model(llama):
    started: list[Any] = []

    class Waits(_Only):
        def mask(self):
            while not started:
                time.sleep(0.01)
            started[0].answer()

    started.append(llama.stream("The quick", max_tokens=3, constraint=Waits([7])))
    with pytest.raises(Exception, match="calls the model whose answer it limits"):
        started[0].answer()


class _Handed(_Only):
    """A constraint that begins once its model alone has it."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self.begins = threading.Event()

    def mask(self):
        assert self.begins.wait(60)
        return super().mask()


def hand(model, make, **options):
    """Begins a stream with a constraint that no one else has."""
    constraint = make([7])
    stream = model.stream("The quick", constraint=constraint, **options)
    begins = constraint.begins
    del constraint, options
    begins.set()
    return stream


def test_a_finalizer_of_a_constraint_must_not_call_its_model(llama):
    problems = []

    class Finalizes(_Handed):
        def __del__(self):
            try:
                llama.generate("x", max_tokens=1)
            except Exception as problem:
                problems.append(str(problem))

    hand(llama, Finalizes, max_tokens=3).answer()
    wait_until_idle(llama)
    assert len(problems) == 1 and "calls the model" in problems[0]


def test_the_end_of_a_request_drops_its_constraint():
    dropped = []

    class Dropped(_Handed):
        def __del__(self):
            # Without the interpreter's lock this would crash.
            dropped.append(threading.current_thread().name)

    model = Model(DATA / "llama", max_requests=1)
    assert hand(model, Dropped, max_tokens=3).answer().tokens == [7, 7, 7]
    wait_until_idle(model)
    assert dropped == ["ort-generate"]
    slow = _Slow()
    model.stream("The quick", constraint=slow, **SLOW)
    assert slow.begun.wait(60)
    waiting = hand(model, Dropped, max_tokens=3)
    model.close()
    assert waiting.answer().finish_reason == "cancelled"
    assert dropped == ["ort-generate", threading.current_thread().name]


def test_answers_match_their_grammars(llama):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    hot = Sampling(temperature=1.0)
    for seed in range(3):
        answer = llama.generate("The quick", regex="[a-c]{3}-[0-9]{2}", sampling=hot, seed=seed)
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", answer.text) and answer.finish_reason == "stop"
        schema = {
            "type": "object",
            "properties": {"name": {"enum": ["ab", "cd"]}, "many": {"type": "boolean"}},
            "required": ["name", "many"],
            "additionalProperties": False,
        }
        answer = llama.generate(
            "The quick", json_schema=schema, sampling=hot, seed=seed, max_tokens=200
        )
        value = json.loads(answer.text)
        assert value["name"] in ("ab", "cd") and isinstance(value["many"], bool)
        answer = llama.generate("The quick", grammar='start: "yes" | "no"', sampling=hot, seed=seed)
        assert answer.text in ("yes", "no")
    with pytest.raises(ValueError, match="expected one of them"):
        llama.generate("x", regex="a", grammar="b")
    with pytest.raises(ValueError, match="the grammar"):
        llama.generate("x", grammar="start: (")


def test_bad_requests_say_what_is_wrong(llama, tmp_path):
    for prompt, options, expected in [
        ([], {}, "a prompt is empty"),
        ([5] * 257, {}, "has 257 tokens, the context of the model 256"),
        ([320], {}, "token 320 is not in the vocabulary of 320"),
        ([-1], {}, "expected a text, messages, or tokens"),
        ([{"content": "x"}], {}, "expected a dict with role and content"),
        ([5], {"sampling": Sampling(top_p=2.0)}, "top_p is 2"),
        ([5], {"context": 300}, "longer than the model's, which is 256"),
    ]:
        with pytest.raises(Exception, match=re.escape(expected)):
            llama.generate(prompt, **options)
    with pytest.raises(Exception, match="must be a size"):
        Model(DATA / "llama", memory_limit="2 parsecs")
    with pytest.raises(Exception, match="is not a folder"):
        Model(tmp_path / "nowhere")
    for path in (DATA / "llama").iterdir():
        if path.name not in ("tokenizer.json", "chat_template.jinja"):
            shutil.copy(path, tmp_path)
    with Model(tmp_path) as model, pytest.raises(FileNotFoundError, match="tokenizer.json"):
        model.generate("x")
    shutil.copy(DATA / "llama/tokenizer.json", tmp_path)
    with Model(tmp_path) as model, pytest.raises(ValueError, match="no chat template"):
        model.generate([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="closed"):
        model.generate("x")


@pytest.mark.parametrize(
    ("package", "extra"), [("tokenizers", "generate"), ("llguidance", "constraints")]
)
def test_a_missing_package_is_named(package, extra):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from ort_runtime.generate import Model\n"
        f"Model({str(DATA / 'llama')!r}).generate('x', regex='a')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"install ort-runtime[{extra}]" in done.stderr


# weakref's exit hook is then older than that of the native module, and runs after it.
FINALIZER = "import tempfile; folder = tempfile.TemporaryDirectory()\n"
SLEEPER = """
import time
class Sleeper:
    def mask(self):
        time.sleep(3600)
    def accept(self, token):
        pass
model.stream('The quick', constraint=Sleeper())
time.sleep(0.5)
"""


@pytest.mark.parametrize("before", ["", FINALIZER])
@pytest.mark.parametrize(
    "after",
    ["print(next(model.stream('The quick', max_tokens=200, ignore_end=True)))", SLEEPER],
    ids=["answer", "step"],
)
def test_a_program_may_end_in_the_middle_of_an_answer(before, after):
    code = (
        f"{before}from ort_runtime.generate import Model\n"
        f"model = Model({str(DATA / 'llama')!r})\n{after}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


class _Panic(BaseException):
    """A panic of the native module is no `Exception`, either."""


class _Panics:
    """A generator whose steps panic."""

    def __init__(self, generator):
        self.generator = generator

    def __getattr__(self, name):
        return getattr(self.generator, name)

    def step(self):
        raise _Panic("index out of bounds")


def test_a_panic_closes_the_model():
    with Model(DATA / "llama") as model:
        model._runner._generator = _Panics(model._runner.generator)
        with pytest.raises(RuntimeError, match="_Panic: index out of bounds"):
            model.generate("The quick", max_tokens=4)
        with pytest.raises(RuntimeError, match="closed, because it failed"):
            model.generate("The quick", max_tokens=4)


def test_a_closed_model_refuses_requests_and_plans():
    model = Model(DATA / "llama")
    slow = _Slow()
    stream = model.stream("The quick", constraint=slow, **SLOW)
    assert slow.begun.wait(60)
    model.close()
    assert stream.answer().finish_reason == "cancelled"
    for call in (lambda: model.generate("x"), lambda: model.plan(8), lambda: model.counts):
        with pytest.raises(ValueError, match="the model is closed"):
            call()
    model.close()
