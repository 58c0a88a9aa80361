//! Writing of values into `.npz` archives.
//!
//! NumPy has no sequences, maps or optionals, so those become arrays with derived names. Types that
//! NumPy lacks are widened.

use std::collections::HashSet;
use std::io::{self, Seek, SeekFrom, Write};

use ort_core::dtype::{CastOptions, DType, convert};
use ort_core::tensor::{MapKeys, MapValue, Tensor, Value, byte_count};
use ort_core::{Error, NAME_BYTES, Result, Within, ensure, error, shown};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::header::{TYPES, to_bytes};

/// The most bytes of a string array. NumPy pads each string to the longest, so one long string can
/// make an array huge.
const MOST_TEXT_BYTES: usize = 1 << 32;

/// Writes values to an archive: see [`ArchiveWriter::value`].
///
/// # Errors
///
/// NumPy cannot represent a value, two arrays would have the same name, or writing fails.
pub fn write_npz(file: impl Write + Seek, values: &[(String, Value)]) -> Result<()> {
    let mut archive = ArchiveWriter::new(file);
    for (name, value) in values {
        archive.value(name, value).within(|| format!("output '{}'", shown(name, NAME_BYTES)))?;
    }
    archive.finish().map(drop)
}

/// A `.npz` archive, open for writing. It is unreadable until [`finish`](Self::finish) writes its
/// directory.
pub struct ArchiveWriter<W: Write + Seek> {
    archive: ZipWriter<Sink<W>>,
    names: HashSet<String>,
}

fn failed(problem: &dyn std::fmt::Display) -> Error {
    error!(Fail, "the archive cannot be written: {problem}").help("check the free disk space")
}

impl<W: Write + Seek> ArchiveWriter<W> {
    /// Starts an archive.
    pub fn new(file: W) -> ArchiveWriter<W> {
        ArchiveWriter {
            archive: ZipWriter::new(Sink { file, position: 0, has_failed: false }),
            names: HashSet::new(),
        }
    }

    /// Writes a value as one or more arrays.
    ///
    /// - A tensor is written under its name, and a sparse tensor as a dense one.
    /// - The elements of a sequence are `NAME[0]`, `NAME[1]` and so on.
    /// - A map is `NAME.keys` and `NAME.values`.
    /// - An optional is written as its element, or not at all if it is empty.
    ///
    /// # Errors
    ///
    /// NumPy cannot represent the value, or the archive has an array of that name.
    pub fn value(&mut self, name: &str, value: &Value) -> Result<()> {
        match value {
            Value::Tensor(tensor) => self.tensor(name, tensor),
            Value::Sequence(sequence) => {
                let mut elements = sequence.elements.iter().enumerate();
                elements.try_for_each(|(index, element)| self.value(&format!("{name}[{index}]"), element))
            }
            Value::Optional(optional) => match &optional.element {
                Some(element) => self.value(name, element),
                None => Ok(()),
            },
            Value::Map(map) => self.map(name, map),
            Value::Sparse(sparse) => self.tensor(name, &sparse.to_dense()?),
        }
    }

    fn map(&mut self, name: &str, map: &MapValue) -> Result<()> {
        let keys = match &map.keys {
            MapKeys::Ints(_, keys) => Tensor::from_slice(&[keys.len()], keys)?,
            MapKeys::Strings(keys) => Tensor::from_strings(&[keys.len()], keys.clone())?,
        };
        self.tensor(&format!("{name}.keys"), &keys)?;
        self.value(&format!("{name}.values"), &map.values)
    }

    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        if tensor.dtype() == DType::String {
            return self.texts(name, tensor);
        }
        let known = |dtype: DType| TYPES.iter().find(|(_, known)| *known == dtype).map(|(name, _)| *name);
        let (descr, cast) = match known(tensor.dtype()) {
            Some(descr) => (descr, None),
            // Types that NumPy lacks widen to float32 or int8 without loss.
            None if tensor.dtype().is_float() => ("f4", Some(cast(tensor, DType::F32)?)),
            None => ("i1", Some(cast(tensor, DType::I8)?)),
        };
        self.begin(name)?;
        let order = match descr {
            "i1" | "u1" | "b1" => '|',
            _ if cfg!(target_endian = "big") => '>',
            _ => '<',
        };
        self.write(&to_bytes(&format!("{order}{descr}"), tensor.shape()))?;
        match cast {
            Some(bytes) => self.write(&bytes),
            None => self.write(tensor.view().bytes()?),
        }
    }

    fn texts(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let texts = tensor.strings()?;
        // NumPy has no strings of width 0.
        let longest = texts.iter().map(|text| text.chars().count()).max().unwrap_or(0).max(1);
        let bytes = longest.saturating_mul(4).saturating_mul(texts.len());
        ensure!(
            bytes <= MOST_TEXT_BYTES,
            InvalidArgument,
            help = "leave the output out, or take it by the library",
            "{} texts of up to {longest} characters take {bytes} bytes as an array of NumPy, where each is as long as the longest",
            texts.len()
        );
        // Trailing zeros are NumPy's padding, so this string would not survive a round trip.
        if let Some(text) = texts.iter().find(|text| text.ends_with('\0')) {
            return Err(error!(
                InvalidArgument,
                "the text '{}' ends in a zero, which NumPy drops",
                shown(text, 64)
            ));
        }
        self.begin(name)?;
        let order = if cfg!(target_endian = "big") { '>' } else { '<' };
        self.write(&to_bytes(&format!("{order}U{longest}"), tensor.shape()))?;
        let mut row = Vec::new();
        for text in texts {
            row.clear();
            row.extend(text.chars().flat_map(|character| u32::from(character).to_ne_bytes()));
            row.resize(longest * 4, 0);
            self.write(&row)?;
        }
        Ok(())
    }

    fn begin(&mut self, name: &str) -> Result<()> {
        ensure!(
            self.names.insert(name.to_string()),
            InvalidArgument,
            help = "rename that output of the model",
            "two arrays would have the name '{}'",
            shown(name, NAME_BYTES)
        );
        // `large_file` allows entries beyond 4 GiB.
        let options =
            SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(true);
        self.archive.start_file(format!("{name}.npy"), options).map_err(|problem| failed(&problem))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.archive.write_all(bytes).map_err(|problem| failed(&problem))
    }

    /// Writes the directory and returns the file. Without a directory the archive is unreadable.
    ///
    /// # Errors
    ///
    /// Writing fails.
    pub fn finish(self) -> Result<W> {
        Ok(self.archive.finish().map_err(|problem| failed(&problem))?.file)
    }
}

/// The file under a [`ZipWriter`]. After the first failure, every operation does nothing and
/// succeeds: dropping a `ZipWriter` finishes the archive again and would print the same failure to
/// standard error.
struct Sink<W> {
    file: W,
    /// The position that the archive assumes. It advances even after a failure.
    position: u64,
    has_failed: bool,
}

impl<W> Sink<W> {
    fn attempt<T>(&mut self, otherwise: T, work: impl FnOnce(&mut W) -> io::Result<T>) -> io::Result<T> {
        if self.has_failed {
            return Ok(otherwise);
        }
        work(&mut self.file).inspect_err(|_| self.has_failed = true)
    }
}

impl<W: Write> Write for Sink<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.attempt(bytes.len(), |file| file.write(bytes))?;
        self.position = self.position.saturating_add(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt((), W::flush)
    }
}

impl<W: Seek> Seek for Sink<W> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let unwritten = match to {
            SeekFrom::Start(position) => position,
            SeekFrom::Current(offset) | SeekFrom::End(offset) => self.position.saturating_add_signed(offset),
        };
        self.position = self.attempt(unwritten, |file| file.seek(to))?;
        Ok(self.position)
    }
}

fn cast(tensor: &Tensor, to: DType) -> Result<Vec<u8>> {
    let (mut bytes, length) = (Vec::new(), byte_count(to, tensor.shape())?);
    let reserved = bytes.try_reserve_exact(length);
    reserved.map_err(|_| error!(OutOfMemory, "{length} bytes for an array of {}", to.name()))?;
    bytes.resize(length, 0);
    let count = tensor.element_count();
    convert(tensor.dtype(), tensor.view().bytes()?, to, &mut bytes, count, CastOptions::default())
        .map_err(|problem| error!(Fail, "{problem}"))?;
    Ok(bytes)
}
