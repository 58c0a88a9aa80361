"""Functions of a [4, 6] tensor, one or a few ATen operators each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Function = Callable[[torch.Tensor], torch.Tensor]


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1] = 0
    y[0, 2:4] = x[1, 2:4]
    return y


def _image(x: torch.Tensor) -> torch.Tensor:
    return x.view(1, 2, 3, 4)


_PLACES = torch.tensor([0, 1, 1, 2])
_COLUMNS = torch.tensor([[0, 1], [2, 3], [1, 1], [5, 4]])

OPERATORS: dict[str, Function] = {
    "hardswish": F.hardswish,
    "elu": F.elu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "mish": F.mish,
    "glu": F.glu,
    "logsigmoid": F.logsigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "hardsigmoid": F.hardsigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf": torch.erf,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "log1p": lambda x: (x * x).log1p(),
    "remainder": lambda x: torch.remainder(x, 2.0),
    "floor_divide": lambda x: torch.arange(-12, 12).view(4, 6) // 5 * x,
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "masked_fill": lambda x: x.masked_fill(x < 0, -1.0),
    "in_place": lambda x: x.clone().add_(1).mul_(2),
    "slice": lambda x: x[:, 1:4],
    "select": lambda x: x[:, -1],
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x.exp()]),
    "split": lambda x: x.split(2, 1)[0] + x.split(2, 1)[2] * 2,
    "chunk": lambda x: x.chunk(3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "expand": lambda x: x[:, None].expand(4, 3, 6),
    "repeat": lambda x: x.repeat(2, 3),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_reflect": lambda x: F.pad(x[None], (1, 2), mode="reflect"),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, 1),
    "gather": lambda x: x.gather(1, _COLUMNS),
    "index": lambda x: x[torch.tensor([0, 0, 2])],
    "index_pair": lambda x: x[torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3])],
    "index_last": lambda x: _image(x)[:, :, torch.tensor([0, 2]), torch.tensor([1, 1])],
    "assign": _written,
    "index_add": lambda x: torch.zeros(3, 6).index_add(0, _PLACES, x),
    "scatter_add": lambda x: torch.zeros(3, 6).scatter_add(0, _PLACES[:, None].expand(4, 6), x),
    "max": lambda x: x.max(1).values,
    "amax": lambda x: x.amax(0),
    "topk": lambda x: x.topk(2).values,
    "normalize": lambda x: F.normalize(x),
    "std": lambda x: x.std(0),
    "var": lambda x: x.var(1, unbiased=False),
    "cumsum": lambda x: x.cumsum(1),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "baddbmm": lambda x: torch.baddbmm(
        x.view(2, 3, 4)[..., :3], x.view(2, 3, 4), x.view(2, 4, 3), beta=0.5, alpha=2
    ),
    "cosine": lambda x: F.cosine_similarity(x, x + 1),
    "mse": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "l1": lambda x: F.l1_loss(x, torch.ones_like(x)),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.ones_like(x)),
    "huber": lambda x: F.huber_loss(x, torch.ones_like(x)),
    "bce_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3)),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), torch.full_like(x, 1 / 6), reduction="sum"),
    "group_norm": lambda x: F.group_norm(x.view(2, 6, 2), 3),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "conv1d": lambda x: F.conv1d(x[None], torch.linspace(-1, 1, 24).view(2, 4, 3)),
    "conv_transpose": lambda x: F.conv_transpose2d(
        _image(x), torch.linspace(-1, 1, 24).view(2, 3, 2, 2), stride=2
    ),
    "nearest": lambda x: F.interpolate(_image(x), scale_factor=2),
    "bilinear": lambda x: F.interpolate(_image(x), scale_factor=2, mode="bilinear"),
    "unfold": lambda x: F.unfold(x.view(1, 1, 4, 6), 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.view(1, 4, 2, 3), 2),
    "max_pool": lambda x: F.max_pool2d(_image(x), 3, 1, 1),
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2),
    "avg_pool1d": lambda x: F.avg_pool1d(x[None], 2),
    "adaptive_pool": lambda x: F.adaptive_avg_pool2d(x.view(1, 1, 4, 6), (2, 3)),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(_image(x)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "embedding": lambda x: F.embedding(torch.tensor([1, 1, 0]), x, padding_idx=0),
    "float64": lambda x: x.double() * 2,
    "float16": lambda x: x.half() * 2,
    "bfloat16": lambda x: x.bfloat16() * 2,
}
