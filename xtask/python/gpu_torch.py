"""The PyTorch side of gpu_speed.py: the same architectures with random weights, and timing by CUDA events.

Nothing is downloaded. Convolutions are in the layout `channels_last` and with cuDNN's search on, which suits PyTorch best.
"""

import inspect

from gpu_machine import Skipped, needs

# A sample is so many calls as take this long, like those of ours.
SAMPLE_MS = 10.0
WARM_UP = 5


class Torch:
    def __init__(self, seconds: float):
        self.torch, self.seconds, self.device = needs("torch"), seconds, "cuda"
        if not self.torch.cuda.is_available():
            raise Skipped("torch sees no CUDA device")
        self.torch.backends.cudnn.benchmark = True

    def timed(self, call) -> float:
        """The median of the samples, in milliseconds a call."""
        torch = self.torch
        with torch.inference_mode():
            for _ in range(WARM_UP):
                call()
            runs = max(1, round(SAMPLE_MS / max(self.sample(call, 3), 1e-3)))
            samples, spent = [], 0.0
            while not samples or spent < self.seconds * 1e3:
                samples.append(self.sample(call, runs))
                spent += samples[-1] * runs
        return sorted(samples)[len(samples) // 2]

    def sample(self, call, runs: int) -> float:
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(runs):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / runs

    def architecture(self, name: str, dims: dict):
        """A module on the device in float16, and what calls it."""
        module, inputs = {"resnet50": self.resnet50, "bert_base": self.bert, "gpt2_small_kv": self.gpt2}[name](dims)
        return module.half().to(self.device).eval(), inputs

    def half(self) -> dict:
        return {"device": self.device, "dtype": self.torch.float16}

    def resnet50(self, dims: dict):
        needs("torchvision")
        from torchvision.models import resnet50

        last = self.torch.channels_last
        image = self.torch.randn(dims["batch"], 3, 224, 224, **self.half())
        return resnet50(weights=None).to(memory_format=last), (image.to(memory_format=last),)

    def ids(self, *shape: int):
        return self.torch.randint(0, 100, shape, device=self.device)

    def bert(self, dims: dict):
        needs("transformers")
        from transformers import BertConfig, BertModel

        model = BertModel(BertConfig(), add_pooling_layer=False)
        return plain(self.torch, model, "last_hidden_state"), (self.ids(dims["batch"], dims["seq"]),)

    def gpt2(self, dims: dict):
        needs("transformers")
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config())
        shape = (dims["batch"], 12, dims["past"], 64)
        past = [self.torch.randn(shape, **self.half()) for _ in range(2 * 12 if dims["past"] else 0)]
        return plain(self.torch, model, "logits"), (self.ids(dims["batch"], dims["seq"]), *past)

    def times(self, name: str, dims: dict, modes: list) -> dict:
        """Milliseconds by way of running: eager, and torch.compile in each mode; a text where it does not run."""
        module, inputs = self.architecture(name, dims)
        found = {"eager": self.attempt(lambda: module(*inputs))}
        for mode in modes:
            self.torch.compiler.reset()
            compiled = self.torch.compile(module, mode=mode, dynamic=False)

            def call(compiled=compiled):
                # A new step may write over the outputs of the last one, which nobody keeps.
                self.torch.compiler.cudagraph_mark_step_begin()
                compiled(*inputs)

            found[mode] = self.attempt(call)
        del module, inputs
        self.torch.cuda.empty_cache()
        return found

    def attempt(self, call):
        try:
            return self.timed(call)
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]

    def matmul(self, m: int, n: int, k: int) -> float:
        a, b = (self.torch.randn(shape, **self.half()) for shape in ((m, k), (k, n)))
        out = self.torch.empty((m, n), **self.half())
        return self.timed(lambda: self.torch.matmul(a, b, out=out))

    def copy_bandwidth(self, size: int) -> float:
        """Bytes read and written a second, by a copy of so many bytes from the device to itself."""
        source = self.torch.empty(size, device=self.device, dtype=self.torch.uint8)
        target = self.torch.empty_like(source)
        return 2 * size / self.timed(lambda: target.copy_(source)) * 1e3


def plain(torch, model, output: str):
    """A model of transformers as a module of tensors alone: token ids, then keys and values by layer."""

    # The name that newer versions have for it.
    past_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, *past):
            given = {past_name: cache(past)} if past else {}
            return getattr(self.model(input_ids=ids, **given), output)

    return Plain()


def cache(past: tuple):
    """Keys and values as the installed transformers takes them: a cache, or in older ones tuples."""
    layers = list(zip(past[::2], past[1::2]))
    try:
        from transformers import DynamicCache
    except ImportError:
        return tuple(layers)
    made = DynamicCache()
    for layer, (keys, values) in enumerate(layers):
        made.update(keys, values, layer)
    return made
