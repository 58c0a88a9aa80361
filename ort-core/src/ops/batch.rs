//! Batch rules: how the batch axis propagates through families of operators.
//!
//! A rule either sets the batch axis of each output or says why the operator mixes the items of the
//! batch. A run splits its batch only if every node that reads batched values has a rule that
//! accepts it. See `ir/spec/batch.rs` for the facts that rules work on.

use crate::dim::Dim;
use crate::ops::axes;
use crate::spec::batch::{BatchCx, BatchFact, BatchResult, broadcasts};

/// The fewest rows for which an unpacked GEMM accumulates in one fixed order. A single row takes
/// another path, whose rounding differs.
const SAME_ORDER: usize = 2;

/// Returns the attribute `axis`, normalized to this rank.
fn axis_of(cx: &BatchCx<'_>, rank: usize) -> Result<usize, String> {
    let axis = cx.attrs().int("axis").map_err(|problem| problem.to_string())?;
    axes::normalize(axis, rank).map_err(|problem| problem.to_string())
}

/// Refuses a node, with the reason, if it mixes items.
fn refuse_if(mixes: bool, why: &str) -> BatchResult {
    if mixes { Err(why.to_string()) } else { Ok(()) }
}

/// Image operators: the batch is the first axis of the first input and of all outputs. No other
/// input may hold items.
pub(super) fn images(cx: &mut BatchCx<'_>) -> BatchResult {
    refuse_if(cx.items(0)? != 0, "the batch is not the first axis of its images")?;
    cx.others_are_independent(&[0])?;
    cx.set_all(0);
    Ok(())
}

/// As [`images`], with constant weights at input `weight`. Kernels choose their algorithm when they
/// pack constant weights, so the choice cannot depend on the size of the batch.
fn convolution(cx: &mut BatchCx<'_>, weight: usize) -> BatchResult {
    images(cx)?;
    refuse_if(
        !cx.is_constant(weight),
        "how it is computed may depend on the batch, as its weights are not constant",
    )
}

/// `Conv` and the operators like it.
pub(super) fn conv(cx: &mut BatchCx<'_>) -> BatchResult {
    convolution(cx, 1)
}

/// `QLinearConv`, whose weights follow the image's scale and zero point.
pub(super) fn conv_of_codes(cx: &mut BatchCx<'_>) -> BatchResult {
    convolution(cx, 3)
}

/// `FusedConv`: the addend, its fourth input, is batched like the image.
pub(super) fn conv_with_addend(cx: &mut BatchCx<'_>) -> BatchResult {
    convolution_with_addend(cx, 3)
}

/// `ConvIntegerToFloat`: the residual, its eighth input, is batched like the image.
pub(super) fn integer_conv(cx: &mut BatchCx<'_>) -> BatchResult {
    convolution_with_addend(cx, 7)
}

fn convolution_with_addend(cx: &mut BatchCx<'_>, addend: usize) -> BatchResult {
    refuse_if(cx.items(0)? != 0, "the batch is not the first axis of its images")?;
    if cx.fact(addend).is_some() {
        refuse_if(cx.items(addend)? != 0, "its addend does not hold the items along the first axis")?;
    }
    cx.others_are_independent(&[0, addend])?;
    refuse_if(
        !cx.is_constant(1),
        "how it is computed may depend on the batch, as its weights are not constant",
    )?;
    cx.set_all(0);
    Ok(())
}

/// `BatchNormalization`, which mixes items only in training, through the batch statistics.
pub(super) fn batch_norm(cx: &mut BatchCx<'_>) -> BatchResult {
    // An unreadable attribute counts as training, which refuses the split.
    let trains = cx.attrs().flag("training_mode").unwrap_or(true);
    refuse_if(trains, "in training it takes the statistics of all items")?;
    images(cx)
}

/// Operators on each element of the first input alone.
pub(super) fn each_element(cx: &mut BatchCx<'_>) -> BatchResult {
    let items = cx.items(0)?;
    cx.others_are_independent(&[0])?;
    cx.set_all(items);
    Ok(())
}

/// Operators that mix elements along the attribute `axis` only. Outputs have the input's shape,
/// except for the size of that axis.
pub(super) fn along_axis(cx: &mut BatchCx<'_>) -> BatchResult {
    let items = cx.items(0)?;
    refuse_if(axis_of(cx, cx.shape(0)?.len())? == items, "it goes along the axis of the items")?;
    cx.others_are_independent(&[0])?;
    cx.set_all(items);
    Ok(())
}

/// `ArgMax` and `ArgMin`: as [`along_axis`], but the axis may be dropped.
pub(super) fn arg(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, axis) = (cx.items(0)?, axis_of(cx, cx.shape(0)?.len())?);
    refuse_if(axis == items, "it goes along the axis of the items")?;
    let keeps = cx.attrs().flag("keepdims").unwrap_or(false);
    // A dropped axis before the batch axis shifts it down by one.
    cx.set(0, if keeps || axis > items { items } else { items - 1 });
    Ok(())
}

/// Reductions over the axes in the second input.
pub(super) fn reduction(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, rank) = (cx.items(0)?, cx.shape(0)?.len());
    let attrs = cx.attrs();
    let axes = match cx.fact(1) {
        None => Vec::new(),
        Some(_) => cx.ints(1).ok_or("its axes are not constant")?,
    };
    // Without axes the operator reduces all of them, unless `noop_with_empty_axes` is set.
    if axes.is_empty() {
        refuse_if(!attrs.flag("noop_with_empty_axes").unwrap_or(false), "it reduces all axes")?;
        cx.set(0, items);
        return Ok(());
    }
    let mask = axes::mask(&axes, rank).map_err(|problem| problem.to_string())?;
    refuse_if(mask.get(items) == Some(&true), "it reduces the axis of the items")?;
    // Each dropped axis before the batch axis shifts it down by one.
    let gone = mask.iter().take(items).filter(|reduced| **reduced).count();
    cx.set(0, if attrs.flag("keepdims").unwrap_or(true) { items } else { items - gone });
    Ok(())
}

/// `MeanVarianceNormalization`, over the axes in an attribute.
pub(super) fn mean_variance(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, rank) = (cx.items(0)?, cx.shape(0)?.len());
    let axes = cx.attrs().ints("axes").map_err(|problem| problem.to_string())?;
    let mask = axes::mask(axes, rank).map_err(|problem| problem.to_string())?;
    refuse_if(mask.get(items) == Some(&true), "it takes the statistics of all items")?;
    cx.set(0, items);
    Ok(())
}

/// `CumSum` and `CumProd`, along the axis in the second input.
pub(super) fn cumulative(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, rank) = (cx.items(0)?, cx.shape(0)?.len());
    let Some(&[axis]) = cx.ints(1).as_deref() else { return Err("its axis is not constant".to_string()) };
    let axis = axes::normalize(axis, rank).map_err(|problem| problem.to_string())?;
    refuse_if(axis == items, "it goes along the axis of the items")?;
    cx.set(0, items);
    Ok(())
}

/// Layer normalizations, whose statistics span the axes from the attribute `axis` on.
pub(super) fn layer_norm(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, shape) = (cx.items(0)?, cx.shape(0)?);
    refuse_if(axis_of(cx, shape.len())? <= items, "it takes the statistics of all items")?;
    cx.others_are_independent(&[0])?;
    cx.given().skip(1).try_for_each(|index| broadcasts(cx, index, (shape, items)))?;
    // `Mean` and `InvStdDev` keep the input's rank, with size 1 from `axis` on.
    cx.set_all(items);
    Ok(())
}

/// As [`layer_norm`] over the last axis, after the second input, `skip`, is added.
pub(super) fn skip_norm(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, shape) = (cx.items(0)?, cx.shape(0)?);
    refuse_if(items + 1 >= shape.len(), "it takes the statistics of all items")?;
    cx.others_are_independent(&[0, 1])?;
    cx.given().skip(1).try_for_each(|index| broadcasts(cx, index, (shape, items)))?;
    cx.set_all(items);
    Ok(())
}

/// `Reshape` and the like, which keep the order and number of elements. The batch axis is the
/// output axis that counts the items and has as many elements before it as in the input.
pub(super) fn reshaped(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, from, to) = (cx.items(0)?, cx.shape(0)?, cx.output(0)?);
    let count = |sizes: &[Dim]| sizes.iter().product::<Dim>();
    // An equal product of the leading sizes keeps the elements of an item together.
    let in_front = count(from.get(..items).unwrap_or_default());
    let place = (0..to.len()).find(|place| {
        count(to.get(..*place).unwrap_or_default()) == in_front && cx.counts_items(to.get(*place))
    });
    cx.set(0, place.ok_or("items are not together in its result")?);
    Ok(())
}

/// `Transpose`, which moves the batch axis.
pub(super) fn transposed(cx: &mut BatchCx<'_>) -> BatchResult {
    let items = cx.items(0)?;
    let order = super::tensor::geometry::permutation(cx.attrs(), cx.shape(0)?.len());
    let order = order.map_err(|problem| problem.to_string())?;
    let place = order.iter().position(|from| *from == items);
    cx.set(0, place.ok_or("the axis of the items is no axis of the result")?);
    Ok(())
}

/// `Concat` of inputs that are all batched, along another axis.
pub(super) fn concat(cx: &mut BatchCx<'_>) -> BatchResult {
    let items = cx.items(0)?;
    refuse_if(axis_of(cx, cx.shape(0)?.len())? == items, "it goes along the axis of the items")?;
    for index in cx.given() {
        refuse_if(cx.items(index)? != items, "its inputs hold the items along different axes")?;
    }
    cx.set(0, items);
    Ok(())
}

/// Returns the batch axis, if the output keeps its size along it.
fn whole_along_items(cx: &BatchCx<'_>) -> Result<usize, String> {
    let items = cx.items(0)?;
    let same = cx.shape(0)?.get(items) == cx.output(0)?.get(items);
    refuse_if(!same, "it takes a part of the items, or repeats them")?;
    Ok(items)
}

/// `Slice` along other axes, or of the whole batch axis: from 0 in steps of 1.
pub(super) fn slice(cx: &mut BatchCx<'_>) -> BatchResult {
    let items = whole_along_items(cx)?;
    let rank = cx.shape(0)?.len();
    let starts = cx.ints(1);
    let axes = match (cx.fact(3), &starts) {
        (Some(_), _) => cx.ints(3).ok_or("its axes are not constant")?,
        (None, Some(starts)) => (0..starts.len() as i64).collect(),
        (None, None) => return Err("which axes it takes a part of is not known".to_string()),
    };
    for (place, axis) in axes.iter().enumerate() {
        let axis = axes::normalize(*axis, rank).map_err(|problem| problem.to_string())?;
        let at = |values: Option<&Vec<i64>>| values.and_then(|values| values.get(place).copied());
        // With steps of 1 from 0 and an unchanged size, the slice is the whole axis.
        let forward = cx.fact(4).is_none() || at(cx.ints(4).as_ref()) == Some(1);
        let whole = forward && at(starts.as_ref()) == Some(0);
        refuse_if(axis == items && !whole, "it takes a part of the items")?;
    }
    cx.set(0, items);
    Ok(())
}

/// `Resize` along other axes.
pub(super) fn resized(cx: &mut BatchCx<'_>) -> BatchResult {
    let items = whole_along_items(cx)?;
    // `tf_crop_and_resize` takes a region of interest, which may crop an axis whose size stays the
    // same.
    let crops = cx.attrs().find_string("coordinate_transformation_mode") == Some("tf_crop_and_resize");
    refuse_if(crops, "it may take a part of the items")?;
    cx.others_are_independent(&[0])?;
    cx.set(0, items);
    Ok(())
}

/// `MaxPool` without its indices, which are offsets into the whole batch.
pub(super) fn max_pool(cx: &mut BatchCx<'_>) -> BatchResult {
    refuse_if(cx.wants(1), "its indices count from the first image on")?;
    images(cx)
}

/// `Gather`: either batched data with shared indices, or a shared table with batched indices.
pub(super) fn gather(cx: &mut BatchCx<'_>) -> BatchResult {
    let rank = cx.shape(0)?.len();
    let axis = axis_of(cx, rank)?;
    match (cx.axis(0), cx.axis(1)) {
        (Some(items), None) => {
            refuse_if(items == axis, "it picks items by their place")?;
            // The axes of the indices replace the gathered axis.
            let added = cx.shape(1)?.len();
            cx.set(0, if items < axis { items } else { items + added - 1 });
        }
        (None, Some(items)) => cx.set(0, axis + items),
        _ => return Err("both its data and its indices hold items".to_string()),
    }
    Ok(())
}

/// `GatherElements`, if data and indices are batched along the same axis and gather along another.
pub(super) fn gather_elements(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, indices) = (cx.items(0)?, cx.items(1)?);
    refuse_if(items != indices, "its inputs hold the items along different axes")?;
    refuse_if(axis_of(cx, cx.shape(0)?.len())? == items, "it goes along the axis of the items")?;
    cx.set(0, items);
    Ok(())
}

/// `Expand` and `Tile`, of a batched input or of one that they repeat for each item.
pub(super) fn repeated(cx: &mut BatchCx<'_>) -> BatchResult {
    let to = cx.output(0)?;
    if let Some(items) = cx.axis(0) {
        let aligned =
            (items + to.len()).checked_sub(cx.shape(0)?.len()).ok_or("its result has fewer axes")?;
        refuse_if(cx.shape(0)?.get(items) != to.get(aligned), "it repeats the items")?;
        cx.set(0, aligned);
        return Ok(());
    }
    let own = cx.shape(0)?;
    // The input is shared, so the batch axis is the one that is broadcast from size 1 to a size
    // that counts items. With several candidates we cannot tell which it is.
    let grown = (0..to.len()).filter(|&place| {
        let size = (place + own.len()).checked_sub(to.len()).and_then(|place| own.get(place));
        size.is_none_or(|size| size.as_constant() == Some(1)) && cx.counts_items(to.get(place))
    });
    let grown: Vec<usize> = grown.collect();
    match grown.as_slice() {
        [place] => cx.set(0, *place),
        _ => return Err("where its result counts items is not known".to_string()),
    }
    Ok(())
}

/// `ConstantOfShape`, whose elements are all equal: the first axis that counts items is the batch
/// axis.
pub(super) fn constant_of_shape(cx: &mut BatchCx<'_>) -> BatchResult {
    let to = cx.output(0)?;
    let place = (0..to.len()).find(|place| cx.counts_items(to.get(*place)));
    cx.set(0, place.ok_or("where its result counts items is not known")?);
    Ok(())
}

/// `Pad`, without padding along the batch axis.
pub(super) fn padded(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, rank) = (whole_along_items(cx)?, cx.shape(0)?.len());
    let pads = cx.ints(1).ok_or("its pads are not constant")?;
    let axes = match cx.fact(3) {
        Some(_) => cx.ints(3).ok_or("its axes are not constant")?,
        None => (0..rank as i64).collect(),
    };
    for (place, axis) in axes.iter().enumerate() {
        let axis = axes::normalize(*axis, rank).map_err(|problem| problem.to_string())?;
        // `pads` lists all the begins, then all the ends.
        let pads = [pads.get(place), pads.get(place + axes.len())];
        refuse_if(axis == items && pads != [Some(&0); 2], "it pads the items")?;
    }
    cx.set(0, items);
    Ok(())
}

/// `Trilu` and other operators on matrices, whose batch axes precede the last two.
pub(super) fn of_matrices(cx: &mut BatchCx<'_>) -> BatchResult {
    let items = cx.items(0)?;
    refuse_if(items + 2 >= cx.shape(0)?.len(), "the items are in its matrices")?;
    cx.others_are_independent(&[0])?;
    cx.set(0, items);
    Ok(())
}

/// `QuantizeLinear` and `DequantizeLinear`, per tensor or per channel along another axis.
pub(super) fn quantized(cx: &mut BatchCx<'_>) -> BatchResult {
    let (items, rank) = (cx.items(0)?, cx.shape(0)?.len());
    cx.others_are_independent(&[0])?;
    let scale = cx.shape(1)?;
    let one = scale.iter().all(|size| size.as_constant() == Some(1));
    if !one {
        refuse_if(scale.len() != 1, "its scales are of blocks")?;
        refuse_if(axis_of(cx, rank)? == items, "it has a scale for each item")?;
    }
    cx.set(0, items);
    Ok(())
}

/// Returns whether the attribute `name`, such as `transA`, is set.
fn is_exchanged(cx: &BatchCx<'_>, name: &str) -> bool {
    cx.attrs().find_int(name).unwrap_or(0) != 0
}

/// `MatMul` and the like: the items are batched matrices, or rows of A.
pub(super) fn matmul(cx: &mut BatchCx<'_>) -> BatchResult {
    let exchanged = [is_exchanged(cx, "transA"), is_exchanged(cx, "transB")];
    let mixed = is_exchanged(cx, "transBatchA") || is_exchanged(cx, "transBatchB");
    refuse_if(mixed, "it exchanges axes of its batches")?;
    let items = product(cx, exchanged)?;
    cx.set(0, items);
    Ok(())
}

/// The runtime's `FusedMatMul`, with a bias for each column and a residual of the output's shape.
pub(super) fn matmul_with_addends(cx: &mut BatchCx<'_>) -> BatchResult {
    matmul_with_addends_from(cx, 2)
}

/// The runtime's `DequantizeMatMul`, whose addends come after scales and zero points.
pub(super) fn quantized_matmul(cx: &mut BatchCx<'_>) -> BatchResult {
    refuse_if([2, 3].into_iter().any(|index| cx.axis(index).is_some()), "it has a scale for each item")?;
    matmul_with_addends_from(cx, 4)
}

/// A matmul with addends at the inputs from `first` on.
fn matmul_with_addends_from(cx: &mut BatchCx<'_>, first: usize) -> BatchResult {
    let items = product(cx, [is_exchanged(cx, "transA"), is_exchanged(cx, "transB")])?;
    let shape = cx.output(0)?;
    for index in cx.given().filter(|index| *index >= first) {
        broadcasts(cx, index, (shape, items))?;
    }
    cx.set(0, items);
    Ok(())
}

/// `Gemm`.
pub(super) fn gemm(cx: &mut BatchCx<'_>) -> BatchResult {
    matmul_with_addends(cx)
}

/// Returns the batch axis of a matmul's output.
///
/// A constant B of rank 2 or less is packed, and a packed GEMM accumulates in one order whatever A
/// is. An unpacked GEMM uses another order for a single row.
fn product(cx: &mut BatchCx<'_>, exchanged: [bool; 2]) -> Result<usize, String> {
    let (left, right, result) = (cx.shape(0)?, cx.shape(1)?, cx.output(0)?);
    let packed = cx.is_constant(1) && right.len() <= 2;
    let matrix = |shape: &[Dim]| shape.len().checked_sub(2);
    // `batches` counts the output's axes before its matrices.
    let columns = usize::from(right.len() > 1);
    let batches = result.len().checked_sub(1 + columns).filter(|_| left.len() > 1);
    let (batches, rows) = batches.zip(matrix(left)).ok_or("its left side is a vector")?;
    let aligned = |axis: usize, own: usize| (axis + batches).checked_sub(own).ok_or("an axis is missing");
    if let Some(items) = cx.axis(0).filter(|items| *items >= rows) {
        // The items are rows of A: its last axis if A is transposed, else the one before. Along the
        // other axis they would be summed.
        refuse_if((items == rows) == exchanged[0], "it reduces over the items")?;
        refuse_if(cx.axis(1).is_some(), "both sides hold items, but not in their batches")?;
        refuse_if(exchanged[0] && left.len() > 2, "the items are in its matrices")?;
        if !packed {
            cx.at_least(SAME_ORDER);
        }
        return Ok(batches);
    }
    // Otherwise the items are among the leading axes of A or B, which must broadcast together.
    let steps = matrix(right).unwrap_or(0);
    refuse_if(
        cx.axis(1).is_some_and(|items| items >= steps),
        "the items are columns, or it reduces over them",
    )?;
    let axes = [(cx.axis(0), rows), (cx.axis(1), steps)];
    let axes = axes.into_iter().filter_map(|(axis, own)| axis.map(|axis| aligned(axis, own)));
    let axes: Vec<usize> = axes.collect::<Result<_, _>>()?;
    let Some(&items) = axes.first() else { return Err("neither side holds items".to_string()) };
    refuse_if(axes.iter().any(|axis| *axis != items), "its sides hold the items along different axes")?;
    for (index, shape, own) in [(0, left, rows), (1, right, steps)] {
        let size = (items + own)
            .checked_sub(batches)
            .filter(|place| *place < own)
            .and_then(|place| shape.get(place));
        let fits = match cx.axis(index) {
            Some(_) => size == result.get(items),
            None => size.is_none_or(|size| size.as_constant() == Some(1)),
        };
        refuse_if(!fits, "a side has neither a matrix for each item nor one for all")?;
    }
    // A GEMM over a B with several matrices per item is never folded into one larger GEMM. With a
    // single matrix it might be, and then the number of rows depends on the batch.
    let several = right.iter().take(steps).any(|size| size.as_constant().is_some_and(|size| size > 1));
    if !packed && !several {
        cx.at_least(SAME_ORDER);
    }
    Ok(items)
}

/// Operators whose inputs and outputs are batched along their first axis. Only the inputs at
/// `shared` may be the same for all items.
fn rows(cx: &mut BatchCx<'_>, shared: &[usize]) -> BatchResult {
    for index in cx.given() {
        match cx.fact(index) {
            Some(BatchFact::Along(0)) => {}
            Some(BatchFact::Along(_)) => {
                return Err(format!("{} does not hold items along its first axis", cx.name(index)));
            }
            _ if shared.contains(&index) => {}
            _ => return Err(format!("{} holds no items", cx.name(index))),
        }
    }
    cx.set_all(0);
    Ok(())
}

/// Operators whose inputs and outputs are all batched along their first axis.
pub(super) fn items_first(cx: &mut BatchCx<'_>) -> BatchResult {
    rows(cx, &[])
}

/// Refuses an attention mask that is neither shared nor batched along the first of four axes.
fn mask(cx: &BatchCx<'_>, index: usize) -> BatchResult {
    if cx.fact(index).is_none() {
        return Ok(());
    }
    let shape = cx.shape(index)?;
    // A mask of fewer than four axes has no batch axis, because it broadcasts from the right over
    // [batch, heads, queries, keys].
    let fits = match cx.axis(index) {
        Some(axis) => axis == 0 && shape.len() == 4,
        None => shape.len() < 4 || shape.first().and_then(Dim::as_constant) == Some(1),
    };
    refuse_if(!fits, "its mask is neither the same for all items nor one for each")
}

/// The standard's `Attention`.
pub(super) fn attention(cx: &mut BatchCx<'_>) -> BatchResult {
    mask(cx, 3)?;
    rows(cx, &[3])
}

/// `MultiHeadAttention`.
pub(super) fn multi_head(cx: &mut BatchCx<'_>) -> BatchResult {
    refuse_if(cx.fact(9).is_some(), "beams exchange items")?;
    refuse_if(cx.axis(3).is_some(), "its bias holds items")?;
    mask(cx, 5)?;
    // The bias, the attention bias and `past_sequence_length`.
    rows(cx, &[3, 5, 8])
}

/// `GroupQueryAttention`.
pub(super) fn group_query(cx: &mut BatchCx<'_>) -> BatchResult {
    // The lengths, caches, attention bias, sinks, scales and norm weights. Of these only the
    // attention bias, 10, may also be batched.
    let shared = [6, 7, 8, 10, 11, 12, 13, 14, 15];
    let wrong = shared.into_iter().find(|index| *index != 10 && cx.axis(*index).is_some());
    if let Some(index) = wrong {
        return Err(format!("{} holds items", cx.name(index)));
    }
    mask(cx, 10)?;
    rows(cx, &shared)
}

/// The standard's `RotaryEmbedding`, whose caches of angles may be shared.
pub(super) fn rotary(cx: &mut BatchCx<'_>) -> BatchResult {
    rows(cx, &[1, 2])
}

/// `RotaryEmbedding` of `com.microsoft`, whose positions may be one offset shared by all items.
pub(super) fn rotary_with_offset(cx: &mut BatchCx<'_>) -> BatchResult {
    rows(cx, &[1, 2, 3])
}

/// Recurrent layers, whose weights and peepholes are shared.
pub(super) fn recurrent(cx: &mut BatchCx<'_>) -> BatchResult {
    let batch_first = cx.attrs().find_int("layout").unwrap_or(0) != 0;
    let axis = usize::from(!batch_first);
    refuse_if(cx.items(0)? != axis, "the batch is not the axis that its layout says")?;
    cx.others_are_independent(&[0, 4, 5, 6])?;
    // `sequence_lens` has the batch first in every layout; the initial states follow `layout`.
    for (index, own) in [(4, 0), (5, axis), (6, axis)] {
        refuse_if(cx.fact(index).is_some() && cx.items(index)? != own, "its states do not hold the items")?;
    }
    if !(cx.is_constant(1) && cx.is_constant(2)) {
        cx.at_least(SAME_ORDER);
    }
    // `Y` is [length, directions, batch, size], or [batch, length, directions, size] with the batch
    // first.
    cx.set(0, if batch_first { 0 } else { 2 });
    cx.set(1, axis);
    cx.set(2, axis);
    Ok(())
}
