//! Generators and maskers: `ConstantOfShape`, `EyeLike`, `Range`, `Trilu` and `ReverseSequence`.

use ort_core::dtype::{CastOptions, DType, TypeSet, convert};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::tensor::problem::ReverseSequence;
use ort_core::tensor::{Tensor, TensorView};
use ort_core::{Result, ensure, error};

use super::copy::as_bits;
use super::elementwise::FLOATS;
use super::fill::{few_axes, fill};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::{Shader, TYPES};

wgpu_kernels![
    WgpuKernel::new(
        KernelDef {
            op: "ConstantOfShape",
            types: &[("T2", TYPES)],
            host_inputs: &[0],
            when: |node| constant_bits(node.attrs().find_tensor("value")).is_ok(),
            ..KernelDef::BASE
        },
        constant_of_shape,
    ),
    WgpuKernel::new(
        KernelDef { op: "EyeLike", types: &[("T1", TYPES), ("T2", TYPES)], ..KernelDef::BASE },
        eye_like,
    ),
    WgpuKernel::new(
        KernelDef {
            op: "Range",
            types: &[("T", FLOATS.union(TypeSet::of(&[DType::I16, DType::I32, DType::I64])))],
            host_inputs: &[0, 1, 2],
            when: fits_where_known,
            ..KernelDef::BASE
        },
        range,
    ),
    WgpuKernel::new(
        KernelDef {
            op: "Trilu",
            types: &[("T", TYPES)],
            in_place: &[(0, 0)],
            host_inputs: &[1],
            ..KernelDef::BASE
        },
        trilu,
    ),
    WgpuKernel::new(
        KernelDef { op: "ReverseSequence", types: &[("T", TYPES)], when: few_axes, ..KernelDef::BASE },
        reverse_sequence,
    ),
];

/// Clamps a diagonal to 32 bits: beyond that all are alike.
fn clamped(diagonal: i64) -> i64 {
    diagonal.clamp(i32::MIN.into(), i32::MAX.into())
}

/// Returns the bits of a tensor's single element; of a 64-bit integer, its lower word.
fn constant_bits(value: Option<&Tensor>) -> Result<u32> {
    let Some(value) = value else { return Ok(0) };
    let view = value.view();
    let integers = || view.to_ints().map(|integers| integers.first().copied());
    let fits = match view.dtype() {
        DType::I64 => integers()?.is_some_and(|integer| i32::try_from(integer).is_ok()),
        DType::U64 => integers()?.is_some_and(|integer| u32::try_from(integer).is_ok()),
        _ => true,
    };
    ensure!(fits, NotImplemented, "the value is beyond the 32 bits of the device's integers");
    let mut word = [0; 4];
    word.iter_mut().zip(view.bytes()?).for_each(|(to, byte)| *to = *byte);
    Ok(u32::from_le_bytes(word))
}

fn constant_of_shape(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = as_bits(cx.output(0)?);
    let bits = constant_bits(cx.attrs.find_tensor("value"))?;
    let shader = Shader::new(cx).write("y", &y).number("bits", bits as usize);
    Ok(vec![fill(shader, &y, "fn value(i: u32) -> y_t { return y_t(p.bits); }")?])
}

fn eye_like(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let &[_, width] = &*y.shape else {
        return Err(error!(InvalidArgument, "EyeLike needs a matrix, got {:?}", y.shape));
    };
    let shader = Shader::new(cx).write("y", y).number("width", width);
    let shader = shader.integer("diagonal", clamped(cx.attrs.int("k")?));
    let code = "fn value(i: u32) -> y_t {
        return select(y_t(0), y_t(1), i32(i % p.width) - i32(i / p.width) == p.diagonal);
    }";
    Ok(vec![fill(shader, y, code)?])
}

/// Returns whether a 64-bit range fits 32 bits, as far as start and limit are constant. A run
/// checks the rest.
fn fits_where_known(node: &NodeView<'_>) -> bool {
    let fits = |index: usize| {
        let constant = node.constant(index).and_then(|constant| constant.view().to_ints().ok());
        constant.is_none_or(|integers| integers.iter().all(|integer| i32::try_from(*integer).is_ok()))
    };
    node.dtype(0) != Some(DType::I64) || (fits(0) && fits(1))
}

fn range(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let given =
        |index| cx.find_host(index).ok_or_else(|| error!(InvalidArgument, "input {index} is missing"));
    let (start, delta) = (given(0)?, given(2)?);
    let shader = Shader::new(cx).write("y", y);
    if FLOATS.contains(y.dtype) {
        let (start, delta) = (float(start)?, float(delta)?);
        // Split the step: products with its twelve high bits are exact.
        let high = f32::from_bits(delta.to_bits() & 0xffff_f000);
        let shader = shader.float("start", start).float("high", high).float("low", delta - high);
        return Ok(vec![fill(shader, y, include_str!("range.wgsl"))?]);
    }
    let (start, delta) = (integer(start)?, integer(delta)?);
    // In 128 bits neither the product nor the sum overflows.
    let steps = y.count().saturating_sub(1) as i128;
    let last = i128::from(start) + steps * i128::from(delta);
    let fits = i32::try_from(start).is_ok() && i32::try_from(last).is_ok();
    // Narrower types wrap as on the CPU; only 64-bit results would differ.
    let wraps = y.dtype != DType::I64 || y.count() == 0;
    ensure!(fits || wraps, NotImplemented, "a range from {start} to {last} is beyond 32 bits");
    let shader = shader.integer("start", i64::from(start as i32)).integer("delta", i64::from(delta as i32));
    let code = "fn value(i: u32) -> y_t { return p.start + bitcast<i32>(i) * p.delta; }";
    Ok(vec![fill(shader, y, code)?])
}

fn integer(view: TensorView<'_>) -> Result<i64> {
    view.to_ints()?.first().copied().ok_or_else(|| error!(InvalidArgument, "a number is missing"))
}

/// Returns the single number of a float tensor as `f32`.
pub(super) fn float(view: TensorView<'_>) -> Result<f32> {
    let (mut bytes, one) = ([0; 4], CastOptions::default());
    convert(view.dtype(), view.bytes()?, DType::F32, &mut bytes, 1, one)
        .map_err(|problem| error!(InvalidArgument, "{problem}"))?;
    Ok(f32::from_le_bytes(bytes))
}

fn trilu(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (as_bits(cx.input(0)?), as_bits(cx.output(0)?));
    let &[.., height, width] = &*y.shape else {
        return Err(error!(InvalidArgument, "Trilu needs rank 2 or more, got {:?}", y.shape));
    };
    let diagonal = cx.find_host(1).map(integer).transpose()?.unwrap_or(0);
    let shader = Shader::new(cx).read("x", &x).write("y", &y).number("height", height);
    let shader = shader.number("width", width).integer("diagonal", clamped(diagonal));
    let kept = if cx.attrs.flag("upper")? { ">=" } else { "<=" };
    let code = format!(
        "fn value(i: u32) -> y_t {{
            let away = i32(i % p.width) - i32(i / p.width % p.height);
            if (away {kept} p.diagonal) {{ return x(i); }}
            return y_t(0);
        }}"
    );
    Ok(vec![fill(shader, &y, &code)?])
}

fn reverse_sequence(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y, lengths) = (as_bits(cx.input(0)?), as_bits(cx.output(0)?), cx.input(1)?);
    let sequences = ReverseSequence::new(cx.attrs.int("time_axis")? == 0, &x.shape, lengths.count())?;
    let time_first = sequences.time_first;
    let shader = Shader::new(cx).read("x", &x).write("y", &y).read("lengths", lengths);
    let shader = shader.number("second", sequences.second()).number("time", sequences.time);
    let shader = shader.number("run", sequences.run);
    let (sequence, step) = if time_first { ("column", "row") } else { ("row", "column") };
    let code = format!(
        "fn value(i: u32) -> y_t {{
            let line = i / p.run;
            let row = line / p.second;
            let column = line % p.second;
            let used = u32(clamp(lengths({sequence}), 0, i32(p.time)));
            if ({step} >= used) {{ return x(i); }}
            let reversed = used - 1u - {step};
            return x(i + (reversed - {step}) * {});
        }}",
        if time_first { "p.second * p.run" } else { "p.run" }
    );
    Ok(vec![fill(shader, &y, &code)?])
}
