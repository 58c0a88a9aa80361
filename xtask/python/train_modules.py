"""PyTorch modules of the models that training is tested and timed on, and the table of their sizes.

`MODELS[name]` says how to build one, what it is fed and how it is trained; `build(name, size)` builds it with seeded weights.
Sizes: `test` is tiny, without dropout; `bench` is what is timed, with dropout.
"""

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 20
# Labels with this value do not count in a cross entropy.
IGNORED = -100


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        return x.view(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, masked: Callable[[Tensor], Tensor]) -> Tensor:
        query, key, value = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / (query.shape[-1] ** 0.5)
        weights = self.dropout(F.softmax(masked(scores), dim=-1))
        return self.output((weights @ value).transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Sequential):
    def __init__(self, hidden: int, activation: nn.Module):
        super().__init__(nn.Linear(hidden, 4 * hidden), activation, nn.Linear(4 * hidden, hidden))


class PostNormLayer(nn.Module):
    """An encoder layer that normalizes after each sum, as BERT does."""

    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.attention = Attention(hidden, heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden, nn.GELU())
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, masked: Callable[[Tensor], Tensor]) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, masked)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class PreNormLayer(nn.Module):
    """A decoder layer that normalizes what enters each branch, as GPT-2 does."""

    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden, nn.GELU(approximate="tanh"))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, masked: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), masked))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def normal_weights(model: nn.Module, deviation: float) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Bert(nn.Module):
    def __init__(self, vocabulary, positions, hidden, heads, layers, classes, dropout, deviation=0.02):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(PostNormLayer(hidden, heads, dropout) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)
        self.register_buffer("position_ids", torch.arange(positions).unsqueeze(0))
        normal_weights(self, deviation)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = self.positions(self.position_ids[:, : input_ids.shape[1]])
        x = self.dropout(self.norm(self.words(input_ids) + positions))
        lowest = torch.finfo(x.dtype).min
        addend = (1 - attention_mask[:, None, None, :].to(x.dtype)) * lowest
        for layer in self.layers:
            x = layer(x, lambda scores: scores + addend)
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


class Gpt(nn.Module):
    """The language model's head has the weights of the embedding."""

    def __init__(self, vocabulary, positions, hidden, heads, layers, dropout, deviation=0.02):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(PreNormLayer(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.register_buffer("position_ids", torch.arange(positions).unsqueeze(0))
        causal = torch.ones(positions, positions, dtype=torch.bool).tril()
        self.register_buffer("causal", causal[None, None])
        normal_weights(self, deviation)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.dropout(self.words(input_ids) + self.positions(self.position_ids[:, :length]))
        causal = self.causal[:, :, :length, :length]
        lowest = torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, lambda scores: torch.where(causal, scores, lowest))
        return self.head(self.norm(x))


class Lstm(nn.Module):
    def __init__(self, vocabulary, hidden, layers, classes, dropout):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        # Without dropout between its layers, which the exporter does not take.
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.words(input_ids))
        return self.classifier(self.dropout(last[-1]))


class ConvNorm(nn.Sequential):
    def __init__(self, inputs, outputs, kernel, stride=1, groups=1, activation=None, norm=nn.BatchNorm2d):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
        super().__init__(conv, norm(outputs), *([activation()] if activation else []))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = ConvNorm(inputs, outputs, 3, stride, activation=nn.ReLU)
        self.second = ConvNorm(outputs, outputs, 3)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class Resnet(nn.Module):
    def __init__(self, widths, blocks, classes, dropout):
        super().__init__()
        self.stem = ConvNorm(3, widths[0], 7, 2, activation=nn.ReLU)
        self.pool = nn.MaxPool2d(3, 2, 1)
        inputs, layers = widths[0], []
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(BasicBlock(inputs, width, 2 if stage > 0 and block == 0 else 1))
                inputs = width
        self.blocks = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(image)))
        return self.classifier(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1)))


def rounded(channels: float) -> int:
    """The nearest multiple of 8 that is no more than a tenth below."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        squeezed = rounded(channels / 4)
        self.squeeze, self.excite = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return x * F.hardsigmoid(scale)


def mobile_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=0.001, momentum=0.01)


class InvertedResidual(nn.Module):
    def __init__(self, inputs, kernel, expanded, outputs, excite, activation, stride):
        super().__init__()
        kind = {"activation": activation, "norm": mobile_norm}
        parts = [ConvNorm(inputs, expanded, 1, **kind)] if expanded != inputs else []
        parts.append(ConvNorm(expanded, expanded, kernel, stride, groups=expanded, **kind))
        parts += [SqueezeExcite(expanded)] if excite else []
        parts.append(ConvNorm(expanded, outputs, 1, norm=mobile_norm))
        self.parts = nn.Sequential(*parts)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x) if self.residual else self.parts(x)


# Kernel, expanded channels, channels, squeeze and excite, hard swish, stride.
MOBILENET_V3_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
MOBILENET_TEST = ((3, 8, 8, False, False, 1), (3, 24, 12, True, False, 2), (5, 36, 12, True, True, 1))


class Mobilenet(nn.Module):
    def __init__(self, table, first, last, classes, dropout):
        super().__init__()
        self.stem = ConvNorm(3, first, 3, 2, activation=nn.Hardswish, norm=mobile_norm)
        blocks, inputs = [], first
        for kernel, expanded, outputs, excite, swish, stride in table:
            activation = nn.Hardswish if swish else nn.ReLU
            blocks.append(InvertedResidual(inputs, kernel, expanded, outputs, excite, activation, stride))
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.top = ConvNorm(inputs, 6 * inputs, 1, activation=nn.Hardswish, norm=mobile_norm)
        self.hidden = nn.Linear(6 * inputs, last)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(last, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.top(self.blocks(self.stem(image))), 1).flatten(1)
        return self.classifier(self.dropout(F.hardswish(self.hidden(x))))


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int):
        def norm(channels: int) -> nn.Module:
            return nn.GroupNorm(4, channels)

        kind = {"activation": nn.SiLU, "norm": norm}
        super().__init__(ConvNorm(inputs, outputs, 3, **kind), ConvNorm(outputs, outputs, 3, **kind))


class Unet(nn.Module):
    def __init__(self, widths, dropout):
        super().__init__()
        pairs = list(zip(widths, widths[1:]))
        self.entry = DoubleConv(3, widths[0])
        self.down = nn.ModuleList(DoubleConv(narrow, wide) for narrow, wide in pairs)
        self.rise = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in reversed(pairs))
        self.up = nn.ModuleList(DoubleConv(2 * narrow, narrow) for narrow, _ in reversed(pairs))
        self.dropout = nn.Dropout(dropout)
        self.exit = nn.Conv2d(widths[0], 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        kept = [self.entry(image)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = self.dropout(kept.pop())
        for rise, up in zip(self.rise, self.up):
            x = up(torch.cat([kept.pop(), rise(x)], dim=1))
        return self.exit(x)


@dataclass
class Model:
    """How a model is built, fed and trained. `extents` are those of the two sizes: what `draw` makes the data of."""

    make: Callable[..., nn.Module]
    sizes: dict[str, dict]
    extents: dict[str, dict]
    draw: Callable[[dict, torch.Generator], dict[str, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    loss_kind: str = "cross_entropy"
    label: str = "labels"
    adamw: bool = False
    learning_rate: float = 0.05


def tokens(extent: dict, generator: torch.Generator) -> Tensor:
    shape = (extent["batch"], extent["sequence"])
    return torch.randint(extent["vocabulary"], shape, generator=generator)


def classes(extent: dict, generator: torch.Generator) -> Tensor:
    return torch.randint(extent["classes"], (extent["batch"],), generator=generator)


def images(extent: dict, generator: torch.Generator) -> Tensor:
    """On a coarse grid, which is exact in each type and packs well."""
    side = extent["side"]
    drawn = torch.randn((extent["batch"], 3, side, side), generator=generator)
    return (drawn * 2).round().clamp(-4, 4) / 2


def draw_bert(extent: dict, generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(extent, generator)
    shortest = ids.shape[1] // 2
    lengths = torch.randint(shortest, ids.shape[1] + 1, (ids.shape[0], 1), generator=generator)
    mask = (torch.arange(ids.shape[1])[None] < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": classes(extent, generator)}


def draw_gpt(extent: dict, generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(extent, generator)
    # The last position has no next token.
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    return {"input_ids": ids, "labels": labels}


def draw_lstm(extent: dict, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": tokens(extent, generator), "labels": classes(extent, generator)}


def draw_images(extent: dict, generator: torch.Generator) -> dict[str, Tensor]:
    return {"image": images(extent, generator), "labels": classes(extent, generator)}


def draw_segments(extent: dict, generator: torch.Generator) -> dict[str, Tensor]:
    image = images(extent, generator)
    target = (F.avg_pool2d(image.mean(1, keepdim=True), 3, 1, 1) > 0).float()
    return {"image": image, "target": target}


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


TEXT = {
    "test": {"batch": 4, "sequence": 12, "vocabulary": 60, "classes": 4},
    "bench": {"batch": 16, "sequence": 256, "vocabulary": 4000, "classes": 4},
}
TRANSFORMER = {
    "test": {"vocabulary": 60, "positions": 16, "hidden": 32, "heads": 4, "layers": 2, "dropout": 0.0},
    "bench": {"vocabulary": 4000, "positions": 256, "hidden": 256, "heads": 8, "layers": 4, "dropout": 0.1},
}
IMAGES = {
    "test": {"batch": 8, "side": 32, "classes": 5},
    "bench": {"batch": 16, "side": 64, "classes": 1000},
}

MODELS = {
    "bert": Model(
        Bert,
        {size: {**extents, "classes": 4} for size, extents in TRANSFORMER.items()},
        TEXT,
        draw_bert,
        adamw=True,
        learning_rate=1e-3,
    ),
    "gpt": Model(Gpt, TRANSFORMER, TEXT, draw_gpt, loss=token_loss, adamw=True, learning_rate=1e-3),
    "lstm": Model(
        Lstm,
        {
            "test": {"vocabulary": 60, "hidden": 32, "layers": 2, "classes": 4, "dropout": 0.0},
            "bench": {"vocabulary": 4000, "hidden": 256, "layers": 2, "classes": 4, "dropout": 0.1},
        },
        TEXT,
        draw_lstm,
        adamw=True,
        learning_rate=1e-3,
    ),
    "resnet18": Model(
        Resnet,
        {
            "test": {"widths": (8, 12, 16), "blocks": 1, "classes": 5, "dropout": 0.0},
            "bench": {"widths": (64, 128, 256, 512), "blocks": 2, "classes": 1000, "dropout": 0.1},
        },
        IMAGES,
        draw_images,
        learning_rate=0.01,
    ),
    "mobilenet_v3": Model(
        Mobilenet,
        {
            "test": {"table": MOBILENET_TEST, "first": 8, "last": 32, "classes": 5, "dropout": 0.0},
            "bench": {
                "table": MOBILENET_V3_LARGE,
                "first": 16,
                "last": 1280,
                "classes": 1000,
                "dropout": 0.1,
            },
        },
        IMAGES,
        draw_images,
        learning_rate=0.01,
    ),
    "unet": Model(
        Unet,
        {
            "test": {"widths": (4, 8, 12), "dropout": 0.0},
            "bench": {"widths": (32, 64, 128, 256), "dropout": 0.1},
        },
        {"test": {"batch": 4, "side": 16}, "bench": {"batch": 16, "side": 64}},
        draw_segments,
        loss=F.binary_cross_entropy_with_logits,
        loss_kind="bce_with_logits",
        label="target",
    ),
}


class WithLoss(nn.Module):
    """A module of a batch, labels included, that returns the loss."""

    def __init__(self, module: nn.Module, model: Model):
        super().__init__()
        self.module, self.loss, self.label = module, model.loss, model.label

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: tensor for key, tensor in batch.items() if key != self.label}
        return self.loss(self.module(**inputs), batch[self.label])


def build(name: str, size: str, **changes) -> nn.Module:
    """The model with its seeded weights, as for training. `changes` replace entries of its size."""
    torch.manual_seed(SEED)
    model = MODELS[name]
    return model.make(**{**model.sizes[size], **changes}).train()


def drawn(name: str, size: str, batches: int) -> list[dict[str, Tensor]]:
    """Seeded inputs and labels, the latter under the name `MODELS[name].label`."""
    generator = torch.Generator().manual_seed(SEED)
    model = MODELS[name]
    return [model.draw(model.extents[size], generator) for _ in range(batches)]


def optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    model = MODELS[name]
    if model.adamw:
        return torch.optim.AdamW(module.parameters(), lr=model.learning_rate)
    return torch.optim.SGD(module.parameters(), lr=model.learning_rate, momentum=0.9)
