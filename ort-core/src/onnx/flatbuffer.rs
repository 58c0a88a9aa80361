//! FlatBuffers: bounds-checked access to tables, vectors and strings.
//!
//! <https://flatbuffers.dev/internals/> has the encoding. Every offset and length is checked where
//! it is read, because no verifier runs before. Offsets to tables, vectors and strings lead forward
//! only: one of 0 leads to an empty table or vector, and the fields of a table lie behind its
//! start. So no path through a file comes back to where it was. But many paths may lead to one
//! table, and a small file could decode to any size. So everything that is decoded counts against
//! a limit.

use std::cell::Cell;

use bytes::Bytes;

use crate::limits::Raise;
use crate::{Error, Result, error};

/// A file, and the memory that its decoded form may still take.
pub(super) struct Buffer {
    bytes: Bytes,
    left: Cell<u64>,
}

/// A table of the file.
#[derive(Clone, Copy)]
pub(super) struct Table<'b> {
    buffer: &'b Buffer,
    place: usize,
}

/// Returns the error for a file whose structure is broken.
pub(super) fn damaged(what: &str) -> Error {
    error!(Fail, "ORT model verification failed: {what}").help("download or copy the file again")
}

fn cut_short() -> Error {
    damaged("an offset or a length leads out of the file")
}

impl Buffer {
    /// `allowed` is the memory that the decoded form may take.
    pub(super) fn new(bytes: Bytes, allowed: u64) -> Buffer {
        Buffer { bytes, left: Cell::new(allowed) }
    }

    /// Returns the table at the root.
    pub(super) fn root(&self) -> Result<Table<'_>> {
        Ok(Table { buffer: self, place: self.follow(0)? })
    }

    fn read<const N: usize>(&self, place: usize) -> Result<[u8; N]> {
        let found = self.bytes.get(place..).and_then(|rest| rest.first_chunk::<N>());
        found.copied().ok_or_else(cut_short)
    }

    /// Returns where the offset at `place` leads.
    fn follow(&self, place: usize) -> Result<usize> {
        let offset = u32::from_le_bytes(self.read(place)?);
        usize::try_from(offset).ok().and_then(|offset| place.checked_add(offset)).ok_or_else(cut_short)
    }

    /// Returns the first byte and the count of the vector that the offset at `place` leads to. Its
    /// elements of `size` bytes are in the file.
    fn vector(&self, place: usize, size: usize) -> Result<(usize, usize)> {
        let start = self.follow(place)?;
        let count = u32::from_le_bytes(self.read(start)?) as usize;
        let first = start.checked_add(4).ok_or_else(cut_short)?;
        let end = count.checked_mul(size).and_then(|length| first.checked_add(length));
        match end {
            Some(end) if end <= self.bytes.len() => Ok((first, count)),
            _ => Err(cut_short()),
        }
    }

    /// Returns the bytes of the string or vector of bytes that the offset at `place` leads to. They
    /// share the memory of the file, but count: strings are copied later, and many may be one.
    fn slice(&self, place: usize) -> Result<Bytes> {
        let (first, count) = self.vector(place, 1)?;
        self.spend(count)?;
        Ok(self.bytes.slice(first..first + count))
    }

    /// Counts memory of the decoded form.
    fn spend(&self, bytes: usize) -> Result<()> {
        let left = self.left.get().checked_sub(bytes as u64).ok_or_else(|| {
            error!(Fail, "ORT model verification failed: the file would take too much memory").raise("bytes")
        })?;
        self.left.set(left);
        Ok(())
    }

    fn text(&self, place: usize) -> Result<String> {
        String::from_utf8(self.slice(place)?.into()).map_err(|_| damaged("a name or text is not UTF-8"))
    }
}

impl<'b> Table<'b> {
    /// Returns the place of a field; `None` if it has its default. Fields count from 0 in the order
    /// of the schema.
    fn field(&self, index: usize) -> Result<Option<usize>> {
        let Table { buffer, place } = *self;
        // The offset of the field list is subtracted, and may be negative.
        let offset = i64::from(i32::from_le_bytes(buffer.read(place)?));
        let list = i64::try_from(place).ok().map(|place| place - offset);
        let list = list.and_then(|list| usize::try_from(list).ok()).ok_or_else(cut_short)?;
        let length = usize::from(u16::from_le_bytes(buffer.read(list)?));
        let entry = 4 + 2 * index;
        if entry + 2 > length {
            return Ok(None);
        }
        let at = list.checked_add(entry).ok_or_else(cut_short)?;
        match usize::from(u16::from_le_bytes(buffer.read(at)?)) {
            0 => Ok(None),
            offset => place.checked_add(offset).map(Some).ok_or_else(cut_short),
        }
    }

    fn scalar<const N: usize>(&self, index: usize) -> Result<Option<[u8; N]>> {
        self.field(index)?.map(|place| self.buffer.read(place)).transpose()
    }

    pub(super) fn byte(&self, index: usize) -> Result<Option<u8>> {
        Ok(self.scalar(index)?.map(u8::from_le_bytes))
    }

    pub(super) fn int32(&self, index: usize) -> Result<Option<i32>> {
        Ok(self.scalar(index)?.map(i32::from_le_bytes))
    }

    pub(super) fn int64(&self, index: usize) -> Result<Option<i64>> {
        Ok(self.scalar(index)?.map(i64::from_le_bytes))
    }

    pub(super) fn float(&self, index: usize) -> Result<Option<f32>> {
        Ok(self.scalar(index)?.map(f32::from_le_bytes))
    }

    pub(super) fn bytes(&self, index: usize) -> Result<Option<Bytes>> {
        self.field(index)?.map(|place| self.buffer.slice(place)).transpose()
    }

    pub(super) fn text(&self, index: usize) -> Result<Option<String>> {
        self.field(index)?.map(|place| self.buffer.text(place)).transpose()
    }

    pub(super) fn table(&self, index: usize) -> Result<Option<Table<'b>>> {
        let Some(place) = self.field(index)? else { return Ok(None) };
        Ok(Some(Table { buffer: self.buffer, place: self.buffer.follow(place)? }))
    }

    /// Reads a table into a box.
    pub(super) fn boxed<T>(
        &self,
        index: usize,
        read: impl FnOnce(Table<'b>) -> Result<T>,
    ) -> Result<Option<Box<T>>> {
        let Some(table) = self.table(index)? else { return Ok(None) };
        self.buffer.spend(size_of::<T>())?;
        Ok(Some(Box::new(read(table)?)))
    }

    /// Reads the elements of a vector of offsets.
    fn elements<T>(&self, index: usize, read: impl Fn(usize) -> Result<T>) -> Result<Vec<T>> {
        let Some(place) = self.field(index)? else { return Ok(Vec::new()) };
        let (first, count) = self.buffer.vector(place, 4)?;
        self.buffer.spend(count.saturating_mul(size_of::<T>()))?;
        (0..count).map(|element| read(first + 4 * element)).collect()
    }

    pub(super) fn tables<T>(&self, index: usize, read: impl Fn(Table<'b>) -> Result<T>) -> Result<Vec<T>> {
        let buffer = self.buffer;
        self.elements(index, |place| read(Table { buffer, place: buffer.follow(place)? }))
    }

    pub(super) fn texts(&self, index: usize) -> Result<Vec<String>> {
        self.elements(index, |place| self.buffer.text(place))
    }

    pub(super) fn byte_strings(&self, index: usize) -> Result<Vec<Bytes>> {
        self.elements(index, |place| self.buffer.slice(place))
    }

    fn numbers<const N: usize, T>(&self, index: usize, read: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let Some(place) = self.field(index)? else { return Ok(Vec::new()) };
        let (first, count) = self.buffer.vector(place, N)?;
        self.buffer.spend(count.saturating_mul(size_of::<T>()))?;
        (0..count).map(|element| Ok(read(self.buffer.read(first + N * element)?))).collect()
    }

    pub(super) fn ints(&self, index: usize) -> Result<Vec<i64>> {
        self.numbers(index, i64::from_le_bytes)
    }

    pub(super) fn floats(&self, index: usize) -> Result<Vec<f32>> {
        self.numbers(index, f32::from_le_bytes)
    }
}
