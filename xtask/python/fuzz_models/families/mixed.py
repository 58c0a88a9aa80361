"""Steps of all families on one graph: what one leaves is what another takes."""

from families import control, convolution, elementwise, images, linear, movement, reduction
from families.elementwise import float_type, grow
from graph import Builder

ALL = [
    *elementwise.STEPS, *elementwise.SPELLED, *linear.STEPS, *linear.STEPS, *movement.STEPS, *reduction.STEPS, *control.STEPS,
    *convolution.STEPS, *images.STEPS,
]


def make(b: Builder) -> None:
    draw = b.draw
    x = b.root.input(draw.elements(float_type(b), draw.shape(1, 4, 120)))
    grow(b, x, ALL, draw.integer(2, 7))
    if draw.chance(0.3):
        start = draw.choice(b.made) if b.made else x
        grow(b, start, ALL, draw.integer(1, 4))
