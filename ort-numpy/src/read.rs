//! Reading of array data into tensors: byte swapping, Fortran order and strings.
//!
//! The input is untrusted. `read_data` compares the size in the header with the bytes available
//! and the memory allowed before it allocates.

use std::io::Read;

use ort_core::dtype::DType;
use ort_core::tensor::{Tensor, TensorBuffer, element_count};
use ort_core::{Error, ErrorKind, Result, ensure, error};

use crate::header::{Header, Item};

/// Reads a `.npy` file of `length` bytes into a tensor, with at most `most` bytes of memory.
///
/// # Errors
///
/// The file is not a `.npy` file, it is damaged, or the array needs more memory.
///
/// ```
/// let file = b"\x93NUMPY\x01\x00\x3f\x00{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }     \n\x01\x02\x03";
/// let tensor = ort_numpy::read_npy(&file[..], file.len() as u64, 1 << 20)?;
/// assert_eq!(tensor.to_vec::<u8>()?, [1, 2, 3]);
/// # Ok::<(), ort_core::Error>(())
/// ```
pub fn read_npy(mut file: impl Read, length: u64, most: usize) -> Result<Tensor> {
    let header = Header::read(&mut file)?;
    let there = length.saturating_sub(header.length as u64);
    read_data(&header, file, there, most)
}

/// Reads the data after a header. At most `there` bytes of it are available.
pub(crate) fn read_data(header: &Header, mut file: impl Read, there: u64, most: usize) -> Result<Tensor> {
    let (bytes, needed) = (header.data_bytes()?, header.memory()?);
    // Check before allocating: a header may claim more data than the file holds.
    ensure!(
        bytes as u64 <= there,
        InvalidArgument,
        help = "copy the file again",
        "the file is cut short: shape {:?} takes {bytes} bytes, {there} are there",
        header.shape
    );
    ensure!(
        needed <= most,
        OutOfMemory,
        help = "use a smaller array, or raise the memory limit",
        "an array of shape {:?} takes {needed} bytes, but at most {most} may be read",
        header.shape
    );
    match header.item {
        Item::Number(dtype) => numbers(header, dtype, file),
        Item::Unicode(_) | Item::Bytes(_) => texts(header, &mut file),
    }
}

fn cut(problem: &std::io::Error) -> Error {
    // A truncated or damaged file is the user's input error. Anything else is an I/O failure.
    let kind = match problem.kind() {
        std::io::ErrorKind::UnexpectedEof
        | std::io::ErrorKind::InvalidData
        | std::io::ErrorKind::InvalidInput => ErrorKind::InvalidArgument,
        _ => ErrorKind::Fail,
    };
    Error::new(kind, format!("the data is cut short or damaged: {problem}")).help("copy the file again")
}

fn numbers(header: &Header, dtype: DType, mut file: impl Read) -> Result<Tensor> {
    let mut buffer = TensorBuffer::new(dtype, &header.shape)?;
    file.read_exact(buffer.bytes_mut()?).map_err(|problem| cut(&problem))?;
    if header.is_swapped {
        // The real and the imaginary part are swapped separately.
        let size = match dtype {
            DType::C64 => 4,
            DType::C128 => 8,
            _ => dtype.byte_size().unwrap_or(1),
        };
        buffer.bytes_mut()?.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
    if dtype == DType::Bool {
        // A Rust `bool` must be 0 or 1, but the file may hold any byte.
        buffer.bytes_mut()?.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    // Up to rank 1, both memory orders are the same.
    if !header.is_fortran || header.shape.len() < 2 {
        return buffer.tensor();
    }
    let mut sorted = TensorBuffer::new(dtype, &header.shape)?;
    let size = dtype.byte_size().unwrap_or(1);
    let from = buffer.view().bytes()?;
    let places = Places::new(&header.shape);
    for (place, to) in places.zip(sorted.bytes_mut()?.chunks_exact_mut(size)) {
        let element = from.get(place * size..(place + 1) * size);
        to.copy_from_slice(element.ok_or_else(|| error!(Fail, "an element lies outside of its array"))?);
    }
    sorted.tensor()
}

/// An iterator over the element indices of a Fortran-order array, in C order.
struct Places<'a> {
    shape: &'a [usize],
    index: Vec<usize>,
    strides: Vec<usize>,
    next: usize,
}

impl<'a> Places<'a> {
    fn new(shape: &'a [usize]) -> Places<'a> {
        let strides = shape.iter().scan(1usize, |stride, size| {
            let own = *stride;
            *stride = stride.saturating_mul(*size);
            Some(own)
        });
        Places { shape, index: vec![0; shape.len()], strides: strides.collect(), next: 0 }
    }
}

impl Iterator for Places<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let place = self.next;
        let axes = self.index.iter_mut().zip(self.shape).zip(&self.strides).rev();
        // The last axis advances first (C order), by its Fortran stride.
        for ((index, size), stride) in axes {
            *index += 1;
            self.next += stride;
            if *index < *size {
                break;
            }
            self.next -= stride * *index;
            *index = 0;
        }
        Some(place)
    }
}

fn texts(header: &Header, file: &mut impl Read) -> Result<Tensor> {
    let count = element_count(&header.shape)?;
    let mut texts = list_of_texts(header, count)?;
    let mut bytes = Vec::new();
    for _ in 0..count {
        bytes.clear();
        // `read_to_end` grows with the data, so a false length in the header cannot force a large
        // allocation.
        let read =
            file.take(header.item.bytes() as u64).read_to_end(&mut bytes).map_err(|problem| cut(&problem))?;
        if read < header.item.bytes() {
            return Err(cut(&std::io::ErrorKind::UnexpectedEof.into()));
        }
        texts.push(text(header, &bytes)?);
    }
    if header.is_fortran && header.shape.len() > 1 {
        let mut sorted = list_of_texts(header, count)?;
        // `Places` never ends: after the last index it starts again.
        let places = Places::new(&header.shape).take(count);
        sorted.extend(places.map(|place| texts.get_mut(place).map(std::mem::take).unwrap_or_default()));
        texts = sorted;
    }
    Tensor::from_strings(&header.shape, texts)
}

/// Allocates the list of an array's strings, and reports failure as an error.
fn list_of_texts(header: &Header, count: usize) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    let reserved = texts.try_reserve_exact(count);
    reserved.map_err(|_| error!(OutOfMemory, "{count} texts for an array of shape {:?}", header.shape))?;
    Ok(texts)
}

/// Decodes one string and strips its zero padding.
fn text(header: &Header, bytes: &[u8]) -> Result<String> {
    let is_bytes = matches!(header.item, Item::Bytes(_));
    let text = if is_bytes {
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        std::str::from_utf8(bytes.get(..end).unwrap_or_default()).ok().map(str::to_string)
    } else {
        let code = |four: &[u8]| {
            let four = <[u8; 4]>::try_from(four).ok()?;
            let own = if header.is_swapped { [four[3], four[2], four[1], four[0]] } else { four };
            char::from_u32(u32::from_ne_bytes(own))
        };
        let text: Option<String> = bytes.chunks_exact(4).map(code).collect();
        text.map(|text| text.trim_end_matches('\0').to_string())
    };
    text.ok_or_else(|| {
        error!(InvalidArgument, "a text of the array is not Unicode").help("save it as texts ('U')")
    })
}
