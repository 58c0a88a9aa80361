//! `Cast` and `CastLike` between all pairs of types.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use num_traits::AsPrimitive;
use ort_core::dtype::text::{format_elements, parse_elements};
use ort_core::dtype::{CastOptions, DType, RoundMode, TypeSet, convert};
use ort_core::ep::{CompileCx, Executable, KernelDef, NodeView, OutputsFrom, RunCx};
use ort_core::tensor::CompactString;
use ort_core::{Result, error, for_each_type};

use super::identity::copy;
use ort_cpu_kernel::broadcast::chunk_len;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{PIECE, UNITS_OF_A_TEXT, spend, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;

const STRINGS: TypeSet = TypeSet::of(&[DType::String]);
const NUMBERS: TypeSet = TypeSet::ALL.difference(STRINGS);

/// Elements that fill whole bytes in every packed type.
const WHOLE_BYTES: usize = 64;

const fn numbers(op: &'static str) -> KernelDef {
    KernelDef {
        op,
        rank: 1,
        types: &[("T1", NUMBERS), ("T2", NUMBERS)],
        unaligned: &[0, 1],
        make,
        ..KernelDef::BASE
    }
}

/// The cast to the same type, which can run in place.
const fn unchanged(op: &'static str) -> KernelDef {
    KernelDef {
        rank: 2,
        in_place: &[(0, 0)],
        when: |node: &NodeView<'_>| node.dtype(0) == node.output_dtype(0),
        make: |_| Ok(Box::new(copy)),
        ..numbers(op)
    }
}

const fn from_strings(op: &'static str) -> KernelDef {
    KernelDef { op, types: &[("T1", STRINGS), ("T2", NUMBERS)], make: make_parse, ..KernelDef::BASE }
}

const fn to_strings(op: &'static str) -> KernelDef {
    KernelDef {
        op,
        outputs: OutputsFrom::Kernel,
        unaligned: &[0],
        when: |node: &NodeView<'_>| node.output_dtype(0) == Some(DType::String),
        make: |_| Ok(Box::new(format)),
        ..KernelDef::BASE
    }
}

/// Strings that are parsed or formatted at a time. This many packed elements fill whole bytes.
const TEXTS: usize = 1 << 10;

cpu_kernels![
    numbers("Cast"),
    numbers("CastLike"),
    unchanged("Cast"),
    unchanged("CastLike"),
    from_strings("Cast"),
    from_strings("CastLike"),
    to_strings("Cast"),
    to_strings("CastLike"),
];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let unknown = || error!(Fail, "a cast has no type");
    let from = cx.node.dtype(0).ok_or_else(unknown)?;
    let to = cx.node.output_dtype(0).ok_or_else(unknown)?;
    let round_mode = match cx.attrs().string("round_mode")? {
        "up" => RoundMode::Up,
        "down" => RoundMode::Down,
        "nearest" => RoundMode::Nearest,
        other => return Err(error!(InvalidGraph, "the round_mode is '{other}'")),
    };
    let options = CastOptions { saturate: cx.attrs().flag("saturate")?, round_mode };
    Ok(Box::new(move |cx: &mut RunCx<'_>| cast(cx, (from, to), options)))
}

fn cast(cx: &mut RunCx<'_>, (from, to): (DType, DType), options: CastOptions) -> Result<()> {
    let threads = cx.threads();
    let view = cx.input(0)?;
    let (source, count) = (view.bytes()?, view.element_count());
    let target = cx.output(0)?.bytes_mut()?;
    // A chunk must not end within a byte of a packed type.
    let chunk = chunk_len(threads, count).next_multiple_of(WHOLE_BYTES);
    let size = |dtype: DType, count: usize| {
        dtype.byte_len(count).ok_or_else(|| error!(Fail, "{} has no byte length", dtype.name()))
    };
    let (source_bytes, target_bytes) = (size(from, chunk)?, size(to, chunk)?);
    let piece_bytes = (size(from, PIECE)?, size(to, PIECE)?);
    // The parallel loop has no error path, so it keeps the first error.
    let failure = parking_lot::Mutex::new(None);
    for_each_chunk_mut(threads, target, target_bytes, |index, piece| {
        let start = (index * source_bytes).min(source.len());
        let part = &source[start..(start + source_bytes).min(source.len())];
        // Packed bytes do not tell how many elements they hold.
        let mut left = chunk.min(count - (index * chunk).min(count));
        for (part, piece) in part.chunks(piece_bytes.0).zip(piece.chunks_mut(piece_bytes.1)) {
            let elements = left.min(PIECE);
            left -= elements;
            // Common pairs of types have vectorized loops. All others are converted one by one.
            if half_slices((from, to), part, piece) || widened((from, to), part, piece) {
                spend(elements);
                continue;
            }
            spend(8 * elements);
            if let Err(error) = convert(from, part, to, piece, elements, options) {
                failure.lock().get_or_insert(error);
            }
        }
    });
    match failure.into_inner() {
        None => Ok(()),
        Some(error) => Err(error!(InvalidArgument, "{error}")),
    }
}

/// Views a source and a destination as slices of their types; none if one is unaligned.
fn slices<'a, S: Pod, D: Pod>(from: &'a [u8], to: &'a mut [u8]) -> Option<(&'a [S], &'a mut [D])> {
    // Constants may be unaligned in the file; the general conversion then takes them.
    Some((bytemuck::try_cast_slice(from).ok()?, bytemuck::try_cast_slice_mut(to).ok()?))
}

/// Converts the 16-bit floats for which there are whole-slice instructions; returns false for other
/// pairs of types.
fn half_slices(pair: (DType, DType), from: &[u8], to: &mut [u8]) -> bool {
    match pair {
        (DType::F16, DType::F32) => {
            slices::<f16, f32>(from, to).map(|(from, to)| from.convert_to_f32_slice(to)).is_some()
        }
        (DType::BF16, DType::F32) => {
            slices::<bf16, f32>(from, to).map(|(from, to)| from.convert_to_f32_slice(to)).is_some()
        }
        (DType::F32, DType::F16) => {
            slices::<f32, f16>(from, to).map(|(from, to)| to.convert_from_f32_slice(from)).is_some()
        }
        (DType::F32, DType::BF16) => {
            slices::<f32, bf16>(from, to).map(|(from, to)| to.convert_from_f32_slice(from)).is_some()
        }
        _ => false,
    }
}

/// Converts integers, and between the wide floats, in one loop; returns false for other pairs of
/// types. Floats to integers are not among them, because values out of range need special
/// treatment.
fn widened((from, to): (DType, DType), source: &[u8], target: &mut [u8]) -> bool {
    fn each<S: Pod + AsPrimitive<D>, D: Pod>(source: &[u8], target: &mut [u8]) -> bool {
        let Some((source, target)) = slices::<S, D>(source, target) else { return false };
        target.iter_mut().zip(source).for_each(|(target, &x)| *target = x.as_());
        true
    }
    // Any byte but 0 is true: callers view bytes of other libraries as booleans.
    if from == DType::Bool {
        return for_each_type!(to in [F32, F64, I32, I64], D => {
            let Some((source, target)) = slices::<u8, D>(source, target) else { return false };
            target.iter_mut().zip(source).for_each(|(target, &x)| *target = u8::from(x != 0).as_());
            true
        }, else => false);
    }
    if matches!(from, DType::F32 | DType::F64) {
        return for_each_type!(from in [F32, F64], S => for_each_type!(to in [F32, F64], D => {
            each::<S, D>(source, target)
        }, else => false), else => false);
    }
    for_each_type!(from in [U8, I8, U16, I32, I64], S => for_each_type!(to in [F32, F64, I32, I64], D => {
        each::<S, D>(source, target)
    }, else => false), else => false)
}

fn make_parse(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let to = cx.node.output_dtype(0).ok_or_else(|| error!(Fail, "a cast has no type"))?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let strings = cx.input(0)?.strings()?;
        let target = cx.output(0)?.bytes_mut()?;
        let bytes = to.byte_len(TEXTS).ok_or_else(|| error!(Fail, "{} has no byte length", to.name()))?;
        let parts = strings.chunks(TEXTS).zip(target.chunks_mut(bytes.max(1)));
        spending(TEXTS * UNITS_OF_A_TEXT, parts).try_for_each(|(strings, target)| parse(strings, to, target))
    }))
}

fn parse(strings: &[CompactString], to: DType, target: &mut [u8]) -> Result<()> {
    parse_elements(strings, to, target, CastOptions::default())
        .map_err(|error| error!(RuntimeException, "{error}"))
}

fn format(cx: &mut RunCx<'_>) -> Result<()> {
    let view = cx.input(0)?;
    let strings = match view.dtype() {
        DType::String => cx.strings(view.shape(), view.strings()?.iter().cloned())?,
        dtype => {
            // In parts, so that the memory budget sees the strings as they come.
            let (bytes, count) = (view.bytes()?, view.element_count());
            let format = |bytes: &[u8], count: usize| {
                format_elements(dtype, bytes, count).map_err(|error| error!(InvalidArgument, "{error}"))
            };
            // An unsupported type must fail here: the iterator below cannot return an error.
            format(&[], 0)?;
            let step = dtype.byte_len(TEXTS).unwrap_or(1).max(1);
            let parts = bytes.chunks(step).zip((0..count).step_by(TEXTS));
            let texts =
                parts.flat_map(|(part, first)| format(part, TEXTS.min(count - first)).unwrap_or_default());
            cx.strings(view.shape(), texts)?
        }
    };
    cx.set(0, strings)
}
