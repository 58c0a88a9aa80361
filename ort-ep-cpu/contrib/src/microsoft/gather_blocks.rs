//! Gather from a block-quantized table (`GatherBlockQuantized`).
//!
//! Only the gathered rows are dequantized, with the scales and zero points of their blocks.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ops::tensor::geometry::{contiguous_strides, normalize_axis};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;
use smallvec::SmallVec;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{elements, tables};
use ort_cpu_kernel::quantized_convert::{BLOCK, decode, encode};
use ort_cpu_threads::interrupt::{self, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "GatherBlockQuantized",
    unaligned: &[0, 2, 3],
    make: |cx| Ok(Box::new(GatherBlocks::new(cx)?)),
    ..KernelDef::BASE
}];

/// Minimum elements per task.
const LEAST_ELEMENTS: usize = 1 << 14;

struct GatherBlocks {
    gather_axis: i64,
    quantize_axis: i64,
    /// The block size; 0 if the whole axis is one block.
    block: usize,
    /// Bits per quantized value in a table of `u8`.
    bits: i64,
}

impl GatherBlocks {
    fn new(cx: &CompileCx<'_>) -> Result<GatherBlocks> {
        let attrs = cx.attrs();
        let block = attrs.int("block_size")?;
        Ok(GatherBlocks {
            gather_axis: attrs.int("gather_axis")?,
            quantize_axis: attrs.int("quantize_axis")?,
            block: usize::try_from(block).map_err(|_| error!(InvalidGraph, "a block size of {block}"))?,
            bits: attrs.int("bits")?,
        })
    }

    /// Returns the type of the quantized values: a `u8` table may pack several per byte.
    fn quantized_type(&self, dtype: DType) -> Result<DType> {
        match (dtype, self.bits) {
            (DType::U8, 2) => Ok(DType::U2),
            (DType::U8, 4) => Ok(DType::U4),
            (DType::U8, bits) if bits != 8 => Err(error!(InvalidGraph, "quantized values of {bits} bits")),
            _ => Ok(dtype),
        }
    }
}

/// Elements of any narrow type, stored in rows that each start on a byte boundary.
#[derive(Clone, Copy)]
struct Rows<'a> {
    dtype: DType,
    bytes: &'a [u8],
    /// Elements per row and bytes per row. A packed tensor without padding is a single row.
    row: [usize; 2],
}

impl<'a> Rows<'a> {
    /// Views a tensor as `shape` elements of `dtype`. If `is_padded`, the last dimension fills
    /// whole bytes.
    fn new(dtype: DType, view: TensorView<'a>, shape: &[usize], is_padded: bool) -> Result<Rows<'a>> {
        let (all, last) = (element_count(shape)?, shape.last().copied().unwrap_or(1));
        let row = if is_padded { last } else { all };
        let bytes_of = |count| dtype.byte_len(count).ok_or_else(|| error!(Fail, "no bytes of {dtype}"));
        let (row_bytes, bytes) = (bytes_of(row)?, view.bytes()?);
        // A dimension of size 0 has no rows, and its tensor no bytes.
        let count = all.checked_div(row).unwrap_or(0);
        ensure!(
            bytes.len() == count * row_bytes,
            InvalidArgument,
            "a tensor of shape {:?} does not hold {shape:?} numbers of type {dtype}",
            view.shape()
        );
        Ok(Rows { dtype, bytes, row: [row, row_bytes] })
    }

    /// Decodes the elements from `first` on: at most [`BLOCK`], all of one row.
    fn read(&self, first: usize, to: &mut [f32]) -> Result<()> {
        let [row, row_bytes] = self.row;
        let (at, inside) = (first / row.max(1), first % row.max(1));
        let bytes = self.bytes.get(at * row_bytes..).unwrap_or(&[]);
        // Eight elements fill whole bytes at any width, so decoding starts at a multiple of eight.
        let skipped = inside % 8;
        if skipped == 0 {
            return decode(self.dtype, bytes, inside, to);
        }
        let mut values = [0.0; BLOCK + 8];
        let values = &mut values[..skipped + to.len()];
        decode(self.dtype, bytes, inside - skipped, values)?;
        to.copy_from_slice(&values[skipped..]);
        Ok(())
    }
}

/// The quantized table with its scales and zero points.
struct Table<'a> {
    quantized: Rows<'a>,
    scales: Rows<'a>,
    zeros: Option<Rows<'a>>,
    /// The zero point if the node has no zero points.
    middle: f32,
    /// For each dimension: its size, the elements that share a scale, and the stride of the scales.
    dims: SmallVec<[[usize; 3]; 6]>,
}

impl<'a> Table<'a> {
    fn new(kernel: &GatherBlocks, cx: &RunCx<'a>) -> Result<Table<'a>> {
        let (data, scales) = (cx.input(0)?, cx.input(2)?);
        let quantized_type = kernel.quantized_type(data.dtype())?;
        let in_bytes = data.dtype() == DType::U8;
        let mut shape: SmallVec<[usize; 6]> = data.shape().into();
        // A `u8` shape counts bytes; the table's shape counts elements.
        if let (true, Some(last), Some(bits)) = (in_bytes, shape.last_mut(), quantized_type.bits()) {
            *last = last.saturating_mul(8 / bits.max(1) as usize);
        }
        let axis = normalize_axis(kernel.quantize_axis, shape.len())?;
        // At least 1, because an empty axis would make a block of 0 and divide by it.
        let block = if kernel.block == 0 { shape[axis].max(1) } else { kernel.block };
        let strides = contiguous_strides(scales.shape());
        let mut dims = SmallVec::new();
        let mut fits = scales.shape().len() == shape.len();
        for ((at, size), (own, stride)) in shape.iter().enumerate().zip(scales.shape().iter().zip(&strides)) {
            let shared = if at == axis { block } else { 1 };
            // A stride of 0 broadcasts the scale along the dimension.
            let stride = if *own == 1 { 0 } else { *stride as usize };
            // Only tables of floats may broadcast scales, and not along the quantized axis.
            fits &= *own == size.div_ceil(shared) || *own == 1 && at != axis && !quantized_type.is_integer();
            dims.push([*size, shared, stride]);
        }
        ensure!(
            fits,
            InvalidArgument,
            "scales of shape {:?} do not fit blocks of {block} on axis {axis} of {shape:?}",
            scales.shape()
        );
        let zeros = cx.find_input(3).map(|zeros| Rows::new(quantized_type, zeros, scales.shape(), in_bytes));
        Ok(Table {
            quantized: Rows::new(quantized_type, data, &shape, in_bytes)?,
            scales: Rows::new(scales.dtype(), scales, scales.shape(), false)?,
            zeros: zeros.transpose()?,
            middle: if in_bytes { (1_i64 << (kernel.bits - 1)) as f32 } else { 0.0 },
            dims,
        })
    }

    /// Dequantizes the elements from `first` on: at most [`BLOCK`], all in one row of the last
    /// dimension.
    fn read(&self, first: usize, to: &mut [f32]) -> Result<()> {
        self.quantized.read(first, to)?;
        let Some((&[size, shared, stride], outer)) = self.dims.split_last() else { return Ok(()) };
        let (mut rest, start) = (first / size.max(1), first % size.max(1));
        let mut base = 0;
        // The offset of the row's scales, from the outer dimensions.
        for [size, shared, stride] in outer.iter().rev() {
            base += rest % size / shared * stride;
            rest /= size;
        }
        let mut at = 0;
        while at < to.len() {
            let place = start + at;
            let is_one = stride == 0 || shared > 1;
            // A scale covers the whole row, the rest of its block, or a single element.
            let len = match (stride, is_one) {
                (0, _) => to.len() - at,
                (_, true) => (shared - place % shared).min(to.len() - at),
                _ => to.len() - at,
            };
            let index = base + place / shared * stride;
            self.scale(index, is_one, &mut to[at..at + len])?;
            at += len;
        }
        Ok(())
    }

    /// Dequantizes values in place: all with the scale at `index`, or each with its own from there
    /// on.
    fn scale(&self, index: usize, is_one: bool, values: &mut [f32]) -> Result<()> {
        let (mut scales, mut zeros) = ([0.0; BLOCK], [self.middle; BLOCK]);
        let count = if is_one { 1 } else { values.len() };
        self.scales.read(index, &mut scales[..count])?;
        if let Some(given) = &self.zeros {
            given.read(index, &mut zeros[..count])?;
        }
        if is_one {
            let (scale, zero) = (scales[0], zeros[0]);
            values.iter_mut().for_each(|value| *value = (*value - zero) * scale);
        } else {
            let pairs = scales.iter().zip(&zeros);
            values.iter_mut().zip(pairs).for_each(|(value, (scale, zero))| *value = (*value - zero) * scale);
        }
        Ok(())
    }
}

impl Executable for GatherBlocks {
    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        Ok(tables(elements(shapes.input(1)).saturating_mul(size_of::<i64>())))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let table = Table::new(self, cx)?;
        let axis = normalize_axis(self.gather_axis, table.dims.len())?;
        let indices = cx.input(1)?.to_ints()?;
        let output = cx.output(0)?;
        // The output is [outer, indices, inner], read in rows of the last dimension.
        let (dtype, count) = (output.dtype(), output.element_count());
        let size = table.dims[axis][0];
        let sizes: SmallVec<[usize; 6]> = table.dims.iter().map(|dim| dim[0]).collect();
        let inner = element_count(&sizes[axis + 1..])?;
        let filled = element_count(&[element_count(&sizes[..axis])?, indices.len(), inner])?;
        ensure!(count == filled, Fail, "{} indices do not fill the output", indices.len());
        if count == 0 {
            return Ok(());
        }
        // A row is the last dimension, or one element if that dimension is gathered.
        let row = if axis + 1 == sizes.len() { 1 } else { sizes.last().copied().unwrap_or(1) };
        let element = dtype.byte_size().ok_or_else(|| error!(Fail, "{dtype} has no bytes"))?;
        let (rows_of_pick, least_rows) = (inner / row, LEAST_ELEMENTS / row + 1);
        // The parallel loop has no error path, so it keeps the first error.
        let failure = Mutex::new(None);
        let gather_row = |at: usize, bytes: &mut [u8]| -> Result<()> {
            // `before` is the place of the pick in [outer, indices], `inside` the row of its inner
            // part.
            let (before, inside) = (at / rows_of_pick, at % rows_of_pick);
            let index = indices.get(before % indices.len()).copied().unwrap_or(0);
            let index = if index < 0 { index.saturating_add(size as i64) } else { index };
            // Out-of-range indices produce zeros.
            let Some(index) = usize::try_from(index).ok().filter(|index| *index < size) else {
                interrupt::fill(bytes, 0);
                return Ok(());
            };
            // The table is [outer, size, inner].
            let first = ((before / indices.len() * size + index) * rows_of_pick + inside) * row;
            for (part, bytes) in bytes.chunks_mut(BLOCK * element).enumerate() {
                spend(16 + bytes.len());
                let mut values = [0.0; BLOCK];
                let values = &mut values[..bytes.len() / element];
                table.read(first + part * BLOCK, values)?;
                encode(values, true, dtype, bytes)?;
            }
            Ok(())
        };
        let row_bytes = row * element;
        for_each_row_chunk_mut(cx.threads(), output.bytes_mut()?, row_bytes, least_rows, |first, rows| {
            for (at, bytes) in rows.chunks_mut(row_bytes).enumerate() {
                if let Err(error) = gather_row(first + at, bytes) {
                    failure.lock().get_or_insert(error);
                }
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }
}
