"""Torch modules for the tests of the backend: small, of every common architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Network:
    """A module that returns a loss, and its inputs.

    Attributes:
        make: makes the module.
        batch: returns the inputs of a step.
        rate: the learning rate of plain gradient descent.
        slopes: how near gradients are to eager's, as a share of the largest element.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rate: float = 0.02
    slopes: float = 1e-3


def _random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def reals(
    *shape: int, labels: int = 10, dtype: torch.dtype = torch.float32
) -> Callable[[int], Batch]:
    """Returns inputs of one shape, and a label for each."""

    def batch(step: int) -> Batch:
        random = _random(step)
        count = shape[0]
        return (
            torch.randn(shape, generator=random).to(dtype),
            torch.randint(0, labels, (count,), generator=random),
        )

    return batch


def tokens(*shape: int, words: int = 50) -> Callable[[int], Batch]:
    """Returns token numbers, and as many to predict."""

    def batch(step: int) -> Batch:
        random = _random(step)
        return tuple(torch.randint(0, words, shape, generator=random) for _ in range(2))

    return batch


class Classifier(nn.Module):
    """Layers that end in scores, and the cross entropy of these."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        return F.cross_entropy(self.layers(x), labels)


def mlp() -> nn.Module:
    """A multilayer perceptron."""
    layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 24), nn.Tanh())
    return Classifier(*layers, nn.Linear(24, 10))


def convolutional() -> nn.Module:
    """Convolutions, batch normalization, both kinds of pooling, a depthwise convolution."""
    return Classifier(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Residual(nn.Module):
    """The block of a ResNet18."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            convolution = nn.Conv2d(channels, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the branch and the shortcut."""
        inside = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inside)) + self.shortcut(x))


def resnet(width: int = 8) -> nn.Module:
    """A ResNet18, narrow."""
    sizes = [(1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1)]
    blocks = [Residual(width * a, width * b, stride) for a, b, stride in sizes]
    stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))
    return Classifier(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *tail)


class Layer(nn.Module):
    """A transformer layer: fused attention and a feed-forward part."""

    def __init__(self, size: int, heads: int, causal: bool, norm_first: bool, drop: float) -> None:
        super().__init__()
        self.projections = nn.Linear(size, 3 * size)
        self.output = nn.Linear(size, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        wide, narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.forward_part = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(drop))
        self.heads, self.causal, self.norm_first = heads, causal, norm_first

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what attention adds."""
        batch, length, size = x.shape
        parts = self.projections(x).view(batch, length, 3, self.heads, size // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(found.transpose(1, 2).reshape(batch, length, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the next hidden state."""
        if self.norm_first:
            x = x + self.attend(self.norms[0](x))
            return x + self.forward_part(self.norms[1](x))
        x = self.norms[0](x + self.attend(x))
        return self.norms[1](x + self.forward_part(x))


class Language(nn.Module):
    """A language model whose output weights are those of its embedding."""

    def __init__(
        self, *, causal: bool, drop: float = 0.0, size: int = 32, layers: int = 2, words: int = 50
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, size), nn.Embedding(64, size)
        one = [Layer(size, 4, causal, causal, drop) for _ in range(layers)]
        self.layers = nn.Sequential(*one)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        x = self.words(given) + self.places(torch.arange(given.shape[1]))
        scores = self.head(self.norm(self.layers(x)))
        return F.cross_entropy(scores.flatten(0, 1), expected.flatten())


class Recurrent(nn.Module):
    """An LSTM, at which Dynamo breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        states, _ = self.lstm(self.words(given).tanh())
        return F.cross_entropy(self.head(states).flatten(0, 1), expected.flatten())


class TripledSquare(torch.autograd.Function):
    """A square with a gradient that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns `x * x`."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        """Returns three times `x` times the upstream gradient; the derivative would be twice."""
        (x,) = ctx.saved_tensors
        return upstream * x * 3


class Custom(nn.Module):
    """A module with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        return F.cross_entropy(TripledSquare.apply(self.inner(x)), labels)


class Forms(nn.Module):
    """Nested inputs and outputs, None, flags, and a buffer that counts calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def parts(
        self, x: torch.Tensor, *, extra: dict[str, Any] | None = None, double: bool = False
    ) -> dict[str, Any]:
        """Returns scores in a structure."""
        self.calls += 1
        scores = self.inner(x)
        if extra is not None:
            scores = scores + extra["bias"][0]
        if double:
            scores = scores * 2
        return {"scores": scores, "more": (None, [scores.exp()], {"x": x}), "name": "forms"}

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        found = self.parts(x, extra={"bias": [x.mean(), None]}, double=True)
        return F.cross_entropy(found["scores"], labels) + found["more"][1][0].mean() * 0.01


def frozen() -> nn.Module:
    """A perceptron whose first layer does not learn."""
    found = mlp()
    for parameter in found.get_submodule("layers.0").parameters():
        parameter.requires_grad_(False)
    return found


NETWORKS = {
    "mlp": Network(mlp, reals(8, 16)),
    "frozen": Network(frozen, reals(8, 16)),
    "cnn": Network(convolutional, reals(4, 3, 16, 16)),
    # Batch normalization of few values amplifies rounding: at larger rates, eager torch in float32
    # is 1e-2 from eager torch in float64 after 50 steps.
    "resnet": Network(resnet, reals(8, 3, 64, 64), rate=1e-5, slopes=2e-2),
    "resnet in float64": Network(
        lambda: resnet().double(), reals(4, 3, 64, 64, dtype=torch.float64), rate=0.0005
    ),
    "bert": Network(lambda: Language(causal=False), tokens(2, 12), rate=0.005),
    "gpt": Network(lambda: Language(causal=True), tokens(2, 12), rate=0.005),
    "lstm": Network(Recurrent, tokens(4, 7)),
    "custom": Network(Custom, reals(8, 16)),
    "forms": Network(Forms, reals(8, 16)),
}
