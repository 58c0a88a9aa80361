//! Parser and writer of the `.npy` header, a Python dict literal: `{'descr': '<f4',
//! 'fortran_order': False, 'shape': (3, 4), }`.
//!
//! The format is specified in [`numpy.lib.format`]. Structured arrays and pickled objects are
//! errors.
//!
//! [`numpy.lib.format`]: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

use std::io::Read;

use ort_core::dtype::DType;
use ort_core::tensor::element_count;
use ort_core::{Result, ensure, error, shown};

/// The magic bytes at the start of a file.
const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The longest header that we read, in bytes. NumPy's own limit is 10,000 bytes, because Python's
/// parser is not safe on longer literals.
pub const HEADER_BYTES: usize = 1 << 14;

/// The most axes of an array, as in NumPy.
const MOST_AXES: usize = 64;

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// A number or a boolean.
    Number(DType),
    /// A string of N code points of 4 bytes each.
    Unicode(usize),
    /// A string of N bytes.
    Bytes(usize),
}

impl Item {
    /// Returns the bytes of one element.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Item::Number(dtype) => dtype.byte_size().unwrap_or(0),
            Item::Unicode(length) => length.saturating_mul(4),
            Item::Bytes(length) => length,
        }
    }
}

/// The header of an array: element type, byte order, memory order and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) item: Item,
    /// Whether the byte order is the opposite of this machine's.
    pub(crate) is_swapped: bool,
    /// Whether the array is in Fortran order: the first axis varies fastest.
    pub(crate) is_fortran: bool,
    pub(crate) shape: Vec<usize>,
    /// The length of the header in bytes, with the magic and the length field.
    pub(crate) length: usize,
}

impl Header {
    /// Returns the type of the tensor that the array becomes.
    pub fn dtype(&self) -> DType {
        match self.item {
            Item::Number(dtype) => dtype,
            Item::Unicode(_) | Item::Bytes(_) => DType::String,
        }
    }

    /// Returns the shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the bytes of the data after the header.
    ///
    /// # Errors
    ///
    /// The byte count overflows.
    pub fn data_bytes(&self) -> Result<usize> {
        let count = element_count(&self.shape)?;
        // Rust allocates at most `isize::MAX` bytes.
        let bytes = count.checked_mul(self.item.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
        bytes.ok_or_else(|| error!(InvalidArgument, "shape {:?} has too many bytes to address", self.shape))
    }

    /// Returns the memory needed to read the array. Fortran order needs a second copy to transpose.
    /// For strings it is a lower bound: the raw bytes and empty `String`s.
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

    /// Reads the header at the start of a file.
    ///
    /// # Errors
    ///
    /// The file is not a `.npy` file, its header is longer than [`HEADER_BYTES`], or tensors do not
    /// have the array's type.
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
        // Version 1 has a 16-bit length field. Versions 2 and 3 have 32 bits.
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
        // Reject shapes that overflow now, before anyone multiplies them.
        header.data_bytes()?;
        Ok(header)
    }
}

/// Advice for files that NumPy did not write.
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

/// A parser for the subset of Python literals in headers. It consumes its text from the front and
/// never recurses, so hostile nesting cannot exhaust the stack.
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

    /// Returns the text before the first character for which `ends` is true.
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
            // Python 2 wrote long integers with this suffix.
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

    /// Parses a type string; also returns whether its byte order is swapped.
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
        // One-byte types have no byte order. NumPy usually marks them `|`, but the mark may be
        // absent.
        let (order, text) = if "<>|=".contains(order) { (order, characters.as_str()) } else { ('=', text) };
        let is_swapped = order == if cfg!(target_endian = "little") { '>' } else { '<' };
        let length = |digits: &str| digits.parse::<usize>().map_err(|_| unknown());
        if let Some(digits) = text.strip_prefix('U') {
            return Ok((Item::Unicode(length(digits)?), is_swapped));
        }
        if let Some(digits) = text.strip_prefix('S') {
            // Byte strings have no byte order.
            return Ok((Item::Bytes(length(digits)?), false));
        }
        ensure!(
            !text.starts_with('O'),
            InvalidArgument,
            help = "convert strings with numpy's astype('U'), numbers with astype('float32')",
            "object arrays are pickles and are not loaded, because loading one can run any code"
        );
        let known = TYPES.iter().find(|(name, _)| *name == text);
        known.map(|(_, dtype)| (Item::Number(*dtype), is_swapped)).ok_or_else(unknown)
    }
}

/// NumPy's names of the element types that tensors have as well.
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

/// Returns the header of a C-order array, with magic and length field.
pub(crate) fn to_bytes(descr: &str, shape: &[usize]) -> Vec<u8> {
    let mut sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    // A one-element tuple keeps its comma; longer ones drop the last.
    sizes.truncate(if shape.len() == 1 { sizes.len() - 1 } else { sizes.len().saturating_sub(2) });
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    // The format aligns data to 64 bytes: pad with spaces and end in a newline.
    let padding = 63 - (10 + text.len()) % 64;
    text.extend(std::iter::repeat_n(' ', padding));
    text.push('\n');
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    [&MAGIC[..], &[1, 0], &length.to_le_bytes(), text.as_bytes()].concat()
}
