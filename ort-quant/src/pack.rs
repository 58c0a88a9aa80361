//! Bit packing: small values into bytes, the first in the lowest bits.

use crate::grid::Bits;

/// Writes values one after the other. A byte may hold values of two calls.
pub(crate) struct BitWriter<'a> {
    bytes: std::slice::IterMut<'a, u8>,
    bits: Bits,
    /// The values of a byte that is not full, and how many bits they take.
    pending: u8,
    used: usize,
}

impl<'a> BitWriter<'a> {
    pub(crate) fn new(bytes: &'a mut [u8], bits: Bits) -> BitWriter<'a> {
        BitWriter { bytes: bytes.iter_mut(), bits, pending: 0, used: 0 }
    }

    /// Appends values.
    pub(crate) fn push(&mut self, mut codes: &[u8]) {
        while self.used > 0
            && let Some((first, rest)) = codes.split_first()
        {
            self.push_one(*first);
            codes = rest;
        }
        let groups = codes.chunks_exact(self.bits.per_byte());
        let rest = groups.remainder();
        // The groups come first in the zip, so that their end takes no byte from the iterator.
        for (group, byte) in groups.zip(self.bytes.by_ref()) {
            let shift = self.bits.stored();
            // In 32 bits, because a byte cannot be shifted by 8.
            *byte = group.iter().rev().fold(0_u32, |packed, code| packed << shift | u32::from(*code)) as u8;
        }
        for code in rest {
            self.push_one(*code);
        }
    }

    /// Writes the last byte. Its free bits are 0.
    pub(crate) fn finish(mut self) {
        if self.used > 0 {
            self.flush();
        }
    }

    fn push_one(&mut self, code: u8) {
        self.pending |= code << self.used;
        self.used += self.bits.stored();
        if self.used == 8 {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if let Some(byte) = self.bytes.next() {
            *byte = self.pending;
        }
        (self.pending, self.used) = (0, 0);
    }
}
