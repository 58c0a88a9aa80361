"""Cases of learning-rate schedules: what the rate is multiplied by at each step.

Warm-up, linear and cosine are as Hugging Face's `get_*_schedule*` define them, the step decay as PyTorch's `StepLR`.
"""

import math

STEPS = 50


def warmed_up(step: int, warmup: int) -> float | None:
    return step / max(1, warmup) if step < warmup else None


def constant(step: int, options: dict) -> float:
    rising = warmed_up(step, options["warmup_steps"])
    return 1.0 if rising is None else rising


def linear(step: int, options: dict) -> float:
    warmup, total = options["warmup_steps"], options["total_steps"]
    rising = warmed_up(step, warmup)
    return max(0.0, (total - step) / max(1, total - warmup)) if rising is None else rising


def cosine(step: int, options: dict) -> float:
    warmup, total = options["warmup_steps"], options["total_steps"]
    rising = warmed_up(step, warmup)
    if rising is not None:
        return rising
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * options["cycles"] * 2.0 * progress)))


def step_decay(step: int, options: dict) -> float:
    return options["gamma"] ** (step // options["step_size"])


SCHEDULES = (
    (constant, {"warmup_steps": 0}),
    (constant, {"warmup_steps": 8}),
    (linear, {"warmup_steps": 0, "total_steps": 50}),
    (linear, {"warmup_steps": 10, "total_steps": 50}),
    (linear, {"warmup_steps": 10, "total_steps": 40}),
    (cosine, {"warmup_steps": 0, "total_steps": 50, "cycles": 0.5}),
    (cosine, {"warmup_steps": 10, "total_steps": 50, "cycles": 0.5}),
    (cosine, {"warmup_steps": 5, "total_steps": 45, "cycles": 1.5}),
    (step_decay, {"step_size": 10, "gamma": 0.5}),
    (step_decay, {"step_size": 7, "gamma": 0.1}),
)


def schedule_cases() -> list[dict]:
    return [
        {
            "kind": schedule.__name__,
            "options": options,
            "factors": [schedule(step, options) for step in range(STEPS + 1)],
        }
        for schedule, options in SCHEDULES
    ]
