"""Families of random graphs. A module has functions that make one, and a row here for each."""

from dataclasses import dataclass
from typing import Callable

from families import attention, control, convolution, elementwise, images, linear, movement, quantized, reduction
from families import integer_codes, mixed


@dataclass(frozen=True)
class Family:
    make: Callable
    weight: float = 1.0


FAMILIES = {
    "elementwise": Family(elementwise.make, 1.5),
    "wide_elementwise": Family(elementwise.make_wide, 0.3),
    "spelled": Family(elementwise.make_spelled, 1),
    "linear": Family(linear.make, 1.5),
    "attention": Family(attention.make, 2),
    "attention_operators": Family(attention.make_operators, 0.5),
    "quantized": Family(quantized.make, 2),
    "integer_codes": Family(integer_codes.make, 1),
    "convolution": Family(convolution.make, 1.5),
    "images": Family(images.make, 0.7),
    "movement": Family(movement.make, 1),
    "reduction": Family(reduction.make, 1),
    "control": Family(control.make, 1),
    "mixed": Family(mixed.make, 1.5),
}
