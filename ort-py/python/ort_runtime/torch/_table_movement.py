"""Rows of operators that make, move and select elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ._emitter import Emitter, Size, Unsupported, expression_of
from ._rows import Arguments, Row, Table, cheap, free

__all__ = ["TABLE"]

#: `slice` ends here if it goes to the end.
_END = (1 << 63) - 1


def same(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A value as it is."""
    return e.of(a.first)


def copied(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A copy, perhaps of another type."""
    value, dtype = e.of(a.first), node.meta["val"].dtype
    if e.dtype(a.first) == dtype:
        return e.op("Identity", value)
    return e.cast(value, e.dtype(a.first), dtype)


def overwritten(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`copy`: the elements of the second operand, in the shape and type of the first."""
    source = e.cast(e.of(a.values[1]), e.dtype(a.values[1]), node.meta["val"].dtype)
    return e.op("Expand", source, e.sizes(node.meta["val"].shape))


def reshaped(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The same elements with the sizes of the result."""
    return e.reshape(e.of(a.first), node.meta["val"].shape)


def squeezed(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Drops axes of size 1."""
    return reshaped(e, node, a)


def unsqueezed(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Adds an axis of size 1."""
    axis = a["dim"] % (e.rank(a.first) + 1)
    return e.op("Unsqueeze", e.of(a.first), e.ints(axis))


def permuted(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The axes in another order."""
    return e.op("Transpose", e.of(a.first), perm=[e.axis(a.first, axis) for axis in a["dims"]])


def exchanged(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Two axes exchanged."""
    order = list(range(e.rank(a.first)))
    if len(order) < 2:
        return e.of(a.first)
    one, other = (e.axis(a.first, a.get(name, at)) for name, at in (("dim0", 0), ("dim1", 1)))
    order[one], order[other] = order[other], order[one]
    return e.op("Transpose", e.of(a.first), perm=order)


def expanded(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Repeats along axes of size 1."""
    return e.op("Expand", e.of(a.first), e.sizes(node.meta["val"].shape))


def repeated(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Tiles."""
    value, counts = e.of(a.first), a["repeats"]
    missing = len(counts) - e.rank(a.first)
    if missing:
        value = e.op("Unsqueeze", value, e.ints(*range(missing)))
    return e.op("Tile", value, e.sizes(counts))


def _end(e: Emitter, end: Size) -> str:
    return e.ints(_END) if end is None else e.size(end)


def sliced(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A range along an axis."""
    axis, start = e.ints(e.axis(a.first, a["dim"])), e.size(a.get("start") or 0)
    step = e.ints(a.get("step", 1))
    return e.op("Slice", e.of(a.first), start, _end(e, a.get("end")), axis, step)


def selected(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """One index along an axis, which is dropped."""
    axis = e.axis(a.first, a["dim"])
    index = e.op("Squeeze", e.size(a["index"]))
    return e.op("Gather", e.of(a.first), index, axis=axis)


def joined(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Concatenation. Empty vectors may be among higher ranks, and are left out."""
    rank, dtype = node.meta["val"].dim(), node.meta["val"].dtype
    parts = [part for part in a.first if e.rank(part) == rank]
    names = [e.cast(e.of(part), e.dtype(part), dtype) for part in parts]
    return e.op("Concat", *names, axis=a.get("dim", 0) % rank)


def stacked(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Concatenation along a new axis."""
    axis = a.get("dim", 0) % node.meta["val"].dim()
    parts = [e.op("Unsqueeze", e.of(part), e.ints(axis)) for part in a.first]
    return e.op("Concat", *parts, axis=axis)


def parts(e: Emitter, node: fx.Node, a: Arguments) -> tuple[str, ...]:
    """Consecutive ranges of an axis, with the sizes that the results have."""
    axis, value, names = e.axis(a.first, a.get("dim", 0)), e.of(a.first), []
    start = e.ints(0)
    for part in node.meta["val"]:
        end = e.op("Add", start, e.size(part.shape[axis]))
        names.append(e.op("Slice", value, start, end, e.ints(axis)))
        start = end
    return tuple(names)


def unbound(e: Emitter, node: fx.Node, a: Arguments) -> tuple[str, ...]:
    """Each index of an axis, which is dropped."""
    axis, value = e.axis(a.first, a.get("dim", 0)), e.of(a.first)
    count = range(len(node.meta["val"]))
    return tuple(e.op("Gather", value, e.number(at, torch.int64), axis=axis) for at in count)


def padded(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Padding with a constant; negative amounts crop."""
    rank, amounts = e.rank(a.first), list(a["pad"])
    axes = [rank - 1 - place for place in range(len(amounts) // 2)]
    pads = e.sizes([*amounts[0::2], *amounts[1::2]])
    fill = e.read(a.get("value") or 0, node.meta["val"].dtype)
    return e.op("Pad", e.of(a.first), pads, fill, e.ints(*axes))


def _rest(e: Emitter, whole: Size, start: Size) -> str:
    """How many places follow `start` in an axis of `whole` places."""
    sizes = [expression_of(size) for size in (whole, start)]
    if all(isinstance(size, int) for size in sizes):
        return e.ints(sizes[0] - sizes[1])
    return e.op("Sub", e.size(whole), e.size(start))


def unsliced(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The gradient of a slice: zeros outside its range."""
    if a["step"] != 1:
        raise Unsupported(f"the gradient of a slice with step {a['step']}")
    shape = node.meta["val"].shape
    axis = a["dim"] % len(shape)
    whole, length = shape[axis], e.shape(a.first)[axis]
    start = a["start"]
    if isinstance(start, int) and start < 0:
        start = start + whole
    after = e.op("Sub", _rest(e, whole, start), e.size(length))
    pads = e.op("Concat", e.size(start), after, axis=0)
    return e.op("Pad", e.of(a.first), pads, "", e.ints(axis))


def unselected(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The gradient of one index along an axis: zeros elsewhere."""
    shape = node.meta["val"].shape
    axis = a["dim"] % len(shape)
    index = a["index"]
    if isinstance(index, int) and index < 0:
        index = index + shape[axis]
    after = e.op("Sub", _rest(e, shape[axis], index), e.ints(1))
    value = e.op("Unsqueeze", e.of(a.first), e.ints(axis))
    return e.op("Pad", value, e.op("Concat", e.size(index), after, axis=0), "", e.ints(axis))


def slice_written(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A tensor with a range along an axis replaced."""
    if a.get("step", 1) != 1:
        raise Unsupported(f"writing to a slice with step {a['step']}")
    value, axis = e.of(a.first), e.axis(a.first, a["dim"])
    start = e.size(a.get("start") or 0)
    end = e.op("Add", start, e.size(e.shape(a["src"])[axis]))
    named = e.ints(axis)
    before = e.op("Slice", value, e.ints(0), start, named)
    after = e.op("Slice", value, end, e.ints(_END), named)
    return e.op("Concat", before, e.of(a["src"]), after, axis=axis)


def select_written(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A tensor with one index along an axis replaced."""
    axis = e.axis(a.first, a["dim"])
    value, index = e.of(a.first), a["index"]
    if isinstance(index, int) and index < 0:
        index = index + e.shape(a.first)[axis]
    start = e.size(index)
    end, named = e.op("Add", start, e.ints(1)), e.ints(axis)
    before = e.op("Slice", value, e.ints(0), start, named)
    after = e.op("Slice", value, end, e.ints(_END), named)
    source = e.op("Unsqueeze", e.of(a["src"]), named)
    return e.op("Concat", before, source, after, axis=axis)


def flipped(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """The elements in reverse along some axes."""
    axes = [e.axis(a.first, axis) for axis in a["dims"]]
    backwards = [-1] * len(axes)
    start, end = e.ints(*backwards), e.ints(*[-_END] * len(axes))
    return e.op("Slice", e.of(a.first), start, end, e.ints(*axes), e.ints(*backwards))


def triangle(upper: int) -> Row:
    """The upper or lower triangle of the last two axes."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        return e.op("Trilu", e.of(a.first), e.number(a["diagonal"], torch.int64), upper=upper)

    return row


def taken(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`gather`: elements at positions along an axis."""
    axis = e.axis(a.first, a["dim"])
    return e.op("GatherElements", e.of(a.first), e.of(a["index"]), axis=axis)


def taken_rows(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`index_select`: slices at positions along an axis."""
    return e.op("Gather", e.of(a.first), e.of(a["index"]), axis=e.axis(a.first, a["dim"]))


def scattered(reduction: str | None) -> Row:
    """Writes to, or adds to, positions along an axis."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        axis, dtype = e.axis(a.first, a["dim"]), node.meta["val"].dtype
        source = a.get("src", a.get("value"))
        if isinstance(source, fx.Node) and e.rank(source) > 0:
            # Only as many elements as there are indices are read.
            shapes = [tuple(map(expression_of, e.shape(one))) for one in (source, a["index"])]
            if shapes[0] != shapes[1]:
                raise Unsupported("a scatter whose source is larger than its index")
            updates = e.of(source)
        else:
            updates = e.op("Expand", e.read(source, dtype), e.sizes(e.shape(a["index"])))
        return e.op(
            "ScatterElements", e.of(a.first), e.of(a["index"]), updates,
            axis=axis, reduction=reduction,
        )  # fmt: skip

    return row


def _indexed(e: Emitter, node: fx.Node, source: fx.Node, indices: Sequence[Any]) -> Any:
    """Reads the index tensors of advanced indexing.

    Returns the order that brings the indexed axes to the front, the positions [..., axes], the
    rank of the indices, and where their axes go in the result.
    """
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    tensors = [indices[axis] for axis in axes]
    if any(e.dtype(index) == torch.bool for index in tensors):
        raise Unsupported("indexing by a mask: the size of the result depends on its content")
    shape = torch.broadcast_shapes(*(e.shape(index) for index in tensors))
    columns = []
    for index in tensors:
        column = e.cast(e.of(index), e.dtype(index), torch.int64)
        if tuple(map(expression_of, e.shape(index))) != tuple(map(expression_of, shape)):
            column = e.op("Expand", column, e.sizes(shape))
        columns.append(e.op("Unsqueeze", column, e.ints(len(shape))))
    positions = e.op("Concat", *columns, axis=len(shape)) if len(columns) > 1 else columns[0]
    others = [axis for axis in range(e.rank(source)) if axis not in axes]
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    return [*axes, *others], positions, len(shape), axes[0] if adjacent else 0


def _placed(order: int, at: int, rank: int) -> list[int]:
    """The permutation that moves the first `order` of `rank` axes behind `at` others."""
    first, others = list(range(order)), list(range(order, rank))
    return others[:at] + first + others[at:]


def indexed(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Advanced indexing by integers."""
    source, indices = a.first, a["indices"]
    given = [index for index in indices if index is not None]
    if len(given) == 1 and e.dtype(given[0]) != torch.bool:
        axis = next(at for at, index in enumerate(indices) if index is not None)
        return e.op("Gather", e.of(source), e.of(given[0]), axis=axis)
    order, positions, rank, at = _indexed(e, node, source, indices)
    value = e.of(source)
    if order != sorted(order):
        value = e.op("Transpose", value, perm=order)
    found = e.op("GatherND", value, positions)
    if at:
        found = e.op("Transpose", found, perm=_placed(rank, at, node.meta["val"].dim()))
    return found


def index_written(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """Advanced indexing by integers as the target of an assignment or an addition."""
    source, dtype = a.first, node.meta["val"].dtype
    order, positions, rank, at = _indexed(e, node, source, a["indices"])
    value, updates = e.of(source), e.read(a["values"], dtype)
    given = [index for index in a["indices"] if index is not None]
    remaining = [e.shape(source)[axis] for axis in order[len(given) :]]
    front = torch.broadcast_shapes(*(e.shape(index) for index in given))
    shape = [*remaining[:at], *front, *remaining[at:]]
    updates = e.op("Expand", updates, e.sizes(shape))
    if at:
        back = _placed(rank, at, len(shape))
        inverse = [back.index(axis) for axis in range(len(back))]
        updates = e.op("Transpose", updates, perm=inverse)
    turned = order != sorted(order)
    if turned:
        value = e.op("Transpose", value, perm=order)
    reduction = "add" if a.get("accumulate", False) else None
    found = e.op("ScatterND", value, positions, updates, reduction=reduction)
    if turned:
        found = e.op("Transpose", found, perm=[order.index(axis) for axis in range(len(order))])
    return found


def constant_fill(value: float | None) -> Row:
    """A tensor of one number: the given one, or the argument's."""

    def row(e: Emitter, node: fx.Node, a: Arguments) -> str:
        found = node.meta["val"]
        fill = a["fill_value"] if value is None else value
        if isinstance(fill, fx.Node):
            return e.op("Expand", e.read(fill, found.dtype), e.sizes(found.shape))
        return e.op("Expand", e.number(fill, found.dtype), e.sizes(found.shape))

    return row


def scalar(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """A number as a tensor."""
    return e.read(a.first, node.meta["val"].dtype)


def counted(e: Emitter, node: fx.Node, a: Arguments) -> str:
    """`arange`."""
    dtype = node.meta["val"].dtype
    start, end, step = a.get("start", 0), a["end"], a.get("step", 1)
    found = [e.read(value, dtype) for value in (start or 0, end, 1 if step is None else step)]
    return e.op("Range", *found)


_RESHAPES = ("view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints")
_COPIES = ("clone.default", "lift_fresh_copy.default", "to.dtype")

_UNINITIALIZED = (
    "empty.memory_format", "empty_permuted.default", "empty_strided.default",
    "empty_like.default", "new_empty_strided.default", "new_empty.default",
)  # fmt: skip

TABLE: Table = {
    **free({
        **{f"aten.{name}": reshaped for name in _RESHAPES},
        **{f"aten.squeeze.{kind}": squeezed for kind in ("default", "dim", "dims")},
        **{f"aten.arange.{kind}": counted for kind in ("default", "start", "start_step")},
        **{f"aten.{name}_like.default": constant_fill(v) for name, v in (("zeros", 0), ("ones", 1))},
        **{f"aten.{name}.default": constant_fill(v) for name, v in (("zeros", 0), ("ones", 1))},
        "aten.alias.default": same,
        "aten.detach.default": same,
        "aten.unsqueeze.default": unsqueezed,
        "aten.permute.default": permuted,
        "aten.t.default": exchanged,
        "aten.transpose.int": exchanged,
        "aten.expand.default": expanded,
        "aten.slice.Tensor": sliced,
        "aten.select.int": selected,
        "aten.split.Tensor": parts,
        "aten.split_with_sizes.default": parts,
        "aten.unbind.int": unbound,
        "aten.full.default": constant_fill(None),
        "aten.full_like.default": constant_fill(None),
        "aten.scalar_tensor.default": scalar,
    }),
    **cheap({
        "aten._to_copy.default": copied,
        "prims.convert_element_type.default": copied,
    }),
    **{f"aten.{name}": copied for name in _COPIES},
    "prims.device_put.default": same,
    "aten.copy.default": overwritten,
    "aten.repeat.default": repeated,
    "aten.cat.default": joined,
    "aten.stack.default": stacked,
    "aten.constant_pad_nd.default": padded,
    "aten.slice_backward.default": unsliced,
    "aten.select_backward.default": unselected,
    "aten.slice_scatter.default": slice_written,
    "aten.select_scatter.default": select_written,
    "aten.flip.default": flipped,
    "aten.triu.default": triangle(1),
    "aten.tril.default": triangle(0),
    "aten.gather.default": taken,
    "aten.index_select.default": taken_rows,
    "aten.scatter.src": scattered(None),
    "aten.scatter.value": scattered(None),
    "aten.scatter_add.default": scattered("add"),
    "aten.index.Tensor": indexed,
    "aten._unsafe_index.Tensor": indexed,
    "aten.index_put.default": index_written,
    "aten._unsafe_index_put.default": index_written,
    # What reads memory before it is written may find anything in it.
    **{f"aten.{name}": constant_fill(0) for name in _UNINITIALIZED},
    "aten.new_zeros.default": constant_fill(0),
    "aten.new_ones.default": constant_fill(1),
    "aten.new_full.default": constant_fill(None),
}  # fmt: skip
