//! The header of a `.npy` file: a Python literal, `{'descr': '<f4', 'fortran_order': False,
//! 'shape': (3, 4), }`.

use std::io::Read;

use ort_core::dtype::DType;
use ort_core::tensor::element_count;
use ort_core::{Result, ensure, error, shown};

/// How a file begins.
const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The longest header that is read. NumPy itself refuses more than 10,000 bytes, as Python's parser
/// is not safe beyond that.
pub const HEADER_BYTES: usize = 1 << 14;

/// More axes than this NumPy's arrays do not have.
const MOST_AXES: usize = 64;

/// What an element of an array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// A number of this type.
    Number(DType),
    /// A text of N code points of 4 bytes.
    Unicode(usize),
    /// A text of N bytes.
    Bytes(usize),
}

impl Item {
    /// The bytes of one.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Item::Number(dtype) => dtype.byte_size().unwrap_or(0),
            Item::Unicode(length) => length.saturating_mul(4),
            Item::Bytes(length) => length,
        }
    }
}

/// What an array is, before any of it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) item: Item,
    /// Whether numbers have their bytes in another order than this machine's.
    pub(crate) is_swapped: bool,
    /// Whether the first axis is the innermost.
    pub(crate) is_fortran: bool,
    pub(crate) shape: Vec<usize>,
    /// The bytes of the header itself.
    pub(crate) length: usize,
}

impl Header {
    /// The type of the tensor that it becomes.
    pub fn dtype(&self) -> DType {
        match self.item {
            Item::Number(dtype) => dtype,
            Item::Unicode(_) | Item::Bytes(_) => DType::String,
        }
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes of the data after it.
    ///
    /// # Errors
    ///
    /// They cannot be counted.
    pub fn data_bytes(&self) -> Result<usize> {
        let count = element_count(&self.shape)?;
        let bytes = count.checked_mul(self.item.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
        bytes.ok_or_else(|| error!(InvalidArgument, "shape {:?} has too many bytes to address", self.shape))
    }

    /// The memory that its tensor takes, of texts at least what an empty one does; with a copy in
    /// the other order if the first axis is the innermost.
    pub(crate) fn memory(&self) -> Result<usize> {
        let (count, bytes) = (element_count(&self.shape)?, self.data_bytes()?);
        let copies = if self.is_fortran && self.shape.len() > 1 { 2 } else { 1 };
        Ok(match self.item {
            Item::Number(_) => bytes.saturating_mul(copies),
            Item::Unicode(_) | Item::Bytes(_) => {
                bytes.saturating_add(count.saturating_mul(copies * size_of::<String>()))
            }
        })
    }

    /// Reads the header that a file begins with.
    ///
    /// # Errors
    ///
    /// The file is no `.npy` file, its header is longer than [`HEADER_BYTES`], or the array is of a
    /// type that tensors do not have.
    pub fn read(file: &mut (impl Read + ?Sized)) -> Result<Header> {
        let mut start = [0; 8];
        file.read_exact(&mut start).map_err(|_| not_npy())?;
        let [magic @ .., major, _minor] = start;
        ensure!(
            magic == *MAGIC,
            InvalidArgument,
            help = SAVE,
            "it is no .npy file: it does not begin with \\x93NUMPY"
        );
        let cut = |_| error!(InvalidArgument, "the header is cut short").help("copy the file again");
        let (length, fixed) = match major {
            1 => {
                let mut bytes = [0; 2];
                file.read_exact(&mut bytes).map_err(cut)?;
                (usize::from(u16::from_le_bytes(bytes)), 10)
            }
            2 | 3 => {
                let mut bytes = [0; 4];
                file.read_exact(&mut bytes).map_err(cut)?;
                (u32::from_le_bytes(bytes) as usize, 12)
            }
            other => return Err(error!(InvalidArgument, "version {other} of .npy files, expected 1 to 3")),
        };
        ensure!(
            length <= HEADER_BYTES,
            InvalidArgument,
            help = SAVE,
            "the header has {length} bytes, expected at most {HEADER_BYTES}"
        );
        let mut text = vec![0; length];
        file.read_exact(&mut text).map_err(cut)?;
        let text = std::str::from_utf8(&text)
            .map_err(|problem| error!(InvalidArgument, "the header is no text: {problem}").help(SAVE))?;
        Header::parse(text, fixed + length)
    }

    fn parse(text: &str, length: usize) -> Result<Header> {
        let mut literal = Literal { rest: text };
        let (mut item, mut is_fortran, mut shape) = (None, None, None);
        literal.expect('{')?;
        while !literal.takes('}') {
            let key = literal.string()?;
            literal.expect(':')?;
            let known = match key {
                "descr" => item.replace(literal.item()?).is_some(),
                "fortran_order" => is_fortran.replace(literal.boolean()?).is_some(),
                "shape" => shape.replace(literal.shape()?).is_some(),
                other => return Err(malformed(&format!("the key '{}'", shown(other, 32)))),
            };
            ensure!(!known, InvalidArgument, help = SAVE, "the header has the key '{key}' twice");
            if !literal.takes(',') {
                literal.expect('}')?;
                break;
            }
        }
        ensure!(
            literal.rest.trim().is_empty(),
            InvalidArgument,
            help = SAVE,
            "the header goes on after its end"
        );
        let (Some((item, is_swapped)), Some(is_fortran), Some(shape)) = (item, is_fortran, shape) else {
            return Err(malformed("not all of descr, fortran_order and shape"));
        };
        let header = Header { item, is_swapped, is_fortran, shape, length };
        header.data_bytes()?;
        Ok(header)
    }
}

/// What to try with a file that NumPy has not written.
const SAVE: &str = "write it with numpy.save or numpy.savez";

fn not_npy() -> ort_core::Error {
    error!(InvalidArgument, "it is no .npy file: it has fewer than 8 bytes").help(SAVE)
}

fn malformed(found: &str) -> ort_core::Error {
    error!(
        InvalidArgument,
        "the header has {found}, expected {{'descr': TYPE, 'fortran_order': False, 'shape': (..)}}"
    )
    .help(SAVE)
}

/// A Python literal of the few forms that headers have, taken from its front. Nothing in it is
/// nested, so that nothing recurs.
struct Literal<'a> {
    rest: &'a str,
}

impl<'a> Literal<'a> {
    fn takes(&mut self, character: char) -> bool {
        let rest = self.rest.trim_start().strip_prefix(character);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, character: char) -> Result<()> {
        if self.takes(character) {
            return Ok(());
        }
        Err(malformed(&format!("'{}' where '{character}' is due", shown(self.rest.trim_start(), 32))))
    }

    /// Whatever stands up to the next character that `ends` says.
    fn until(&mut self, ends: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest.trim_start();
        let (found, rest) = rest.split_at(rest.find(ends).unwrap_or(rest.len()));
        self.rest = rest;
        found
    }

    fn string(&mut self) -> Result<&'a str> {
        let quote = ['\'', '"'].into_iter().find(|quote| self.takes(*quote));
        let quote = quote.ok_or_else(|| malformed("no text in quotes where one is due"))?;
        let (found, rest) =
            self.rest.split_once(quote).ok_or_else(|| malformed("a text that does not end"))?;
        self.rest = rest;
        Ok(found)
    }

    fn boolean(&mut self) -> Result<bool> {
        match self.until(|character| !character.is_ascii_alphabetic()) {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(malformed(&format!("fortran_order '{}'", shown(other, 32)))),
        }
    }

    fn shape(&mut self) -> Result<Vec<usize>> {
        let mut shape = Vec::new();
        self.expect('(')?;
        while !self.takes(')') {
            let digits = self.until(|character| !character.is_ascii_digit());
            let size = digits.parse().map_err(|_| {
                malformed(&format!(
                    "the size '{}'",
                    shown(if digits.is_empty() { self.rest } else { digits }, 32)
                ))
            })?;
            // Python 2 wrote long integers so.
            let _ = self.takes('L');
            shape.push(size);
            ensure!(shape.len() <= MOST_AXES, InvalidArgument, "an array of more than {MOST_AXES} axes");
            if !self.takes(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(shape)
    }

    /// The type of the elements, and whether their bytes are in the other order.
    fn item(&mut self) -> Result<(Item, bool)> {
        ensure!(
            !self.rest.trim_start().starts_with('['),
            InvalidArgument,
            help = "save each field as an array of its own",
            "structured arrays are no tensors"
        );
        let text = self.string()?;
        let unknown = || {
            error!(InvalidArgument, "arrays of type '{}' are not supported", shown(text, 32))
                .help("convert it with numpy's astype: to a number, a boolean, or a text ('U')")
        };
        let mut characters = text.chars();
        let order = characters.next().ok_or_else(unknown)?;
        // Types of one byte have no order and mostly say so.
        let (order, text) = if "<>|=".contains(order) { (order, characters.as_str()) } else { ('=', text) };
        let is_swapped = order == if cfg!(target_endian = "little") { '>' } else { '<' };
        let length = |digits: &str| digits.parse::<usize>().map_err(|_| unknown());
        if let Some(digits) = text.strip_prefix('U') {
            return Ok((Item::Unicode(length(digits)?), is_swapped));
        }
        if let Some(digits) = text.strip_prefix('S') {
            return Ok((Item::Bytes(length(digits)?), false));
        }
        ensure!(
            !text.starts_with('O'),
            InvalidArgument,
            help = "convert it first, texts with numpy's astype('U')",
            "arrays of Python objects are pickles, which are not read: reading one runs code that is in it"
        );
        let known = TYPES.iter().find(|(name, _)| *name == text);
        known.map(|(_, dtype)| (Item::Number(*dtype), is_swapped)).ok_or_else(unknown)
    }
}

/// NumPy's names of the types that tensors have, too.
pub(crate) const TYPES: [(&str, DType); 14] = [
    ("f4", DType::F32),
    ("f8", DType::F64),
    ("f2", DType::F16),
    ("i1", DType::I8),
    ("i2", DType::I16),
    ("i4", DType::I32),
    ("i8", DType::I64),
    ("u1", DType::U8),
    ("u2", DType::U16),
    ("u4", DType::U32),
    ("u8", DType::U64),
    ("b1", DType::Bool),
    ("c8", DType::C64),
    ("c16", DType::C128),
];

/// The header of an array, with what stands before it.
pub(crate) fn to_bytes(descr: &str, shape: &[usize]) -> Vec<u8> {
    let mut sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    // A tuple of one keeps its comma, others end without.
    sizes.truncate(if shape.len() == 1 { sizes.len() - 1 } else { sizes.len().saturating_sub(2) });
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    // The data begins at a multiple of 64 bytes, behind the end of a line.
    let padding = 63 - (10 + text.len()) % 64;
    text.extend(std::iter::repeat_n(' ', padding));
    text.push('\n');
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    [&MAGIC[..], &[1, 0], &length.to_le_bytes(), text.as_bytes()].concat()
}
