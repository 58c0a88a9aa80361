"""Cases of loss functions: values and gradients in float64 as PyTorch computes them."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def numbers(shape: tuple[int, ...], seed: int, scale: float = 2.0) -> Tensor:
    """Float64 numbers that float32 holds exactly."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return ((drawn * scale * 64).round() / 64).double()


def flat(tensor: Tensor) -> list[float]:
    return tensor.flatten().tolist()


def case(name: str, kind: str, options: dict, logits: Tensor, target: Tensor, loss) -> dict:
    logits = logits.clone().requires_grad_()
    value = loss(logits, target)
    value.backward()
    return {
        "name": name,
        "kind": kind,
        "options": options,
        "logits": {"shape": list(logits.shape), "values": flat(logits.detach())},
        "target": {"shape": list(target.shape), "values": flat(target)},
        "loss": value.item(),
        "gradient": flat(logits.grad),
    }


def regressions() -> list[dict]:
    cases = []
    for kind, function in (("mse", F.mse_loss), ("l1", F.l1_loss)):
        for reduction in ("mean", "sum"):
            options = {"reduction": reduction}
            of = (numbers((3, 4), 1), numbers((3, 4), 2))
            cases.append(case(f"{kind}_{reduction}", kind, options, *of, lambda x, y: function(x, y, **options)))
    # Where both are equal the gradient of the absolute difference is zero.
    same = numbers((2, 3), 3)
    other = same + torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    cases.append(case("l1_some_equal", "l1", {"reduction": "mean"}, same, other, F.l1_loss))
    return cases


def cross_entropies() -> list[dict]:
    labels = torch.tensor([1, 0, 3, 2, 3, 1])
    some_ignored = torch.tensor([1, IGNORED, 3, 2, IGNORED, 1])
    tokens = torch.tensor([[1, 0, 2, IGNORED], [3, 3, 0, 1]])
    weight = [0.5, 2.0, 1.0, 0.25]
    table = (
        ("plain", labels, {}),
        ("sum", labels, {"reduction": "sum"}),
        ("label_smoothing", labels, {"label_smoothing": 0.1}),
        ("ignore_index", some_ignored, {"ignore_index": IGNORED}),
        ("ignore_index_of_a_class", labels, {"ignore_index": 3}),
        ("class_weights", labels, {"weight": weight}),
        ("class_weights_sum", labels, {"weight": weight, "reduction": "sum"}),
        ("class_weights_ignore_index", some_ignored, {"weight": weight, "ignore_index": IGNORED}),
        ("label_smoothing_ignore_index", some_ignored, {"label_smoothing": 0.1, "ignore_index": IGNORED}),
        ("label_smoothing_class_weights", labels, {"label_smoothing": 0.1, "weight": weight}),
        ("all", some_ignored, {"label_smoothing": 0.1, "weight": weight, "ignore_index": IGNORED}),
        ("tokens", tokens, {"ignore_index": IGNORED}),
        ("large_logits", labels, {}),
    )
    cases = []
    for name, target, options in table:
        options = {"reduction": "mean", **options}
        keywords = dict(options)
        if "weight" in options:
            keywords["weight"] = torch.tensor(options["weight"], dtype=torch.float64)
        logits = numbers((*target.shape, 4), 4, 400.0 if name == "large_logits" else 2.0)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            # The classes are the last dimension of the logits.
            return F.cross_entropy(x.flatten(0, -2), y.flatten(), **keywords)

        cases.append(case(f"cross_entropy_{name}", "cross_entropy", options, logits, target, loss))
    return cases


def binary_cross_entropies() -> list[dict]:
    target = torch.tensor([[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 1.0, 0.75]], dtype=torch.float64)
    table = (
        ("mean", {"reduction": "mean"}, 2.0),
        ("sum", {"reduction": "sum"}, 2.0),
        ("large_logits", {"reduction": "mean"}, 400.0),
    )
    return [
        case(
            f"bce_with_logits_{name}",
            "bce_with_logits",
            options,
            numbers((2, 4), 5, scale),
            target,
            lambda x, y: F.binary_cross_entropy_with_logits(x, y, **options),
        )
        for name, options, scale in table
    ]


def distillations() -> list[dict]:
    """T * T * KL(softmax(teacher / T) || softmax(student / T)), summed over classes, averaged over the rest."""
    cases = []
    for shape in ((5, 4), (2, 3, 4)):
        for temperature in (1.0, 2.0, 4.0):

            def loss(student: Tensor, teacher: Tensor) -> Tensor:
                of = [F.log_softmax(x.flatten(0, -2) / temperature, dim=-1) for x in (student, teacher)]
                divergence = F.kl_div(*of, reduction="batchmean", log_target=True)
                return temperature * temperature * divergence

            options = {"temperature": temperature, "reduction": "batchmean"}
            name = f"kl_divergence_rank_{len(shape)}_temperature_{temperature:g}"
            of = (numbers(shape, 6), numbers(shape, 7))
            cases.append(case(name, "kl_divergence", options, *of, loss))
    return cases


def loss_cases() -> list[dict]:
    return regressions() + cross_entropies() + binary_cross_entropies() + distillations()
