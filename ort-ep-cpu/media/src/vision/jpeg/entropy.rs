//! Huffman decoding of coefficient blocks, for sequential and progressive scans.

use super::Damage;

/// The zigzag order: the position in a block of each coefficient, in coding order.
const ZIGZAG: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39,
    46, 53, 60, 61, 54, 47, 55, 62, 63,
];

/// Returns the position of the coefficient with index `index` in coding order.
pub(super) fn place(index: usize) -> usize {
    ZIGZAG.get(index).map_or(0, |place| usize::from(*place))
}

/// The longest Huffman code, in bits, that a single table lookup decodes.
const LOOK: u32 = 9;

/// A Huffman table.
pub(super) struct Huffman {
    /// For each value of the next [`LOOK`] bits, the decoded value and the length of its code. The
    /// length is 0 if the code is longer.
    quick: Vec<(u8, u8)>,
    /// For each length, the end of its codes, left-aligned to 16 bits, and the offset from a code
    /// to the index of its value.
    ends: [u32; 17],
    offsets: [i32; 17],
    values: Vec<u8>,
}

impl Huffman {
    /// Builds the table from the number of codes of each length and the values in code order.
    pub(super) fn new(counts: &[u8; 16], values: &[u8]) -> Result<Huffman, Damage> {
        let total: usize = counts.iter().map(|count| usize::from(*count)).sum();
        // A value is a byte, so no table needs more than 256.
        if total > 256 || total != values.len() {
            return Err(Damage::Codes);
        }
        let mut table = Huffman {
            quick: vec![(0, 0); 1 << LOOK],
            ends: [0; 17],
            offsets: [0; 17],
            values: values.to_vec(),
        };
        // T.81, Annex C: codes of one length are consecutive, and the next length doubles the code.
        let (mut code, mut index) = (0u32, 0usize);
        for (length, count) in (1u32..).zip(counts) {
            let at = length as usize;
            let first = index as i32 - code as i32;
            if let Some(offset) = table.offsets.get_mut(at) {
                *offset = first;
            }
            for _ in 0..*count {
                if code >> length != 0 {
                    return Err(Damage::Codes);
                }
                if length <= LOOK {
                    let value = values.get(index).copied().unwrap_or_default();
                    // Every value of the bits behind a short code decodes to it.
                    let from = (code << (LOOK - length)) as usize;
                    let quick = table.quick.iter_mut().skip(from).take(1 << (LOOK - length));
                    quick.for_each(|entry| *entry = (value, length as u8));
                }
                code += 1;
                index += 1;
            }
            // More codes than the length has room for.
            if code > 1 << length {
                return Err(Damage::Codes);
            }
            if let Some(end) = table.ends.get_mut(at) {
                // Left-aligned, so that `code` compares the next 16 bits without a shift.
                *end = code << (16 - length);
            }
            code <<= 1;
        }
        Ok(table)
    }
}

/// A bit reader over one scan. It drops the zero bytes that are stuffed after 0xff bytes.
pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    /// The index of the next byte.
    at: usize,
    held: u64,
    count: u32,
    /// Zero bits supplied after the end of the data.
    padding: u32,
}

impl<'a> Bits<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Bits<'a> {
        Bits { bytes, at, held: 0, count: 0, padding: 0 }
    }

    fn fill(&mut self) {
        // At most 56 bits are held, so that shifting in a byte loses none.
        while self.count <= 48 {
            let byte = self.bytes.get(self.at).copied();
            let next = match byte {
                Some(0xff) if self.bytes.get(self.at + 1) == Some(&0) => {
                    self.at += 2;
                    0xff
                }
                // A marker or the end of the data: supply zeros. `drop_bits` reports an error if
                // they are used.
                Some(0xff) | None => {
                    self.padding += 8;
                    0
                }
                Some(byte) => {
                    self.at += 1;
                    byte
                }
            };
            self.held = self.held << 8 | u64::from(next);
            self.count += 8;
        }
    }

    fn peek(&mut self, bits: u32) -> u32 {
        if self.count < bits {
            self.fill();
        }
        (self.held >> (self.count - bits)) as u32 & ((1 << bits) - 1)
    }

    fn drop_bits(&mut self, bits: u32) -> Result<(), Damage> {
        self.count -= bits;
        // The padding is behind all data bits, so fewer bits left means that some were used.
        if self.count < self.padding { Err(Damage::Cut) } else { Ok(()) }
    }

    /// Returns the next `bits` bits, at most 16.
    fn take(&mut self, bits: u32) -> Result<u32, Damage> {
        if bits == 0 {
            return Ok(0);
        }
        let value = self.peek(bits);
        self.drop_bits(bits)?;
        Ok(value)
    }

    /// Returns a number of `bits` bits, of which a leading 0 means negative.
    fn signed(&mut self, bits: u32) -> Result<i32, Damage> {
        let value = self.take(bits)? as i32;
        Ok(if bits > 0 && value < 1 << (bits - 1) { value - (1 << bits) + 1 } else { value })
    }

    fn code(&mut self, table: &Huffman) -> Result<u8, Damage> {
        let next = self.peek(16);
        if let Some(&(value, length)) = table.quick.get((next >> (16 - LOOK)) as usize)
            && length > 0
        {
            self.drop_bits(u32::from(length))?;
            return Ok(value);
        }
        for length in LOOK + 1..=16 {
            let at = length as usize;
            let (Some(end), Some(offset)) = (table.ends.get(at), table.offsets.get(at)) else { break };
            // The first length whose end is above the bits is the length of the code.
            if next < *end {
                self.drop_bits(length)?;
                let index = (next >> (16 - length)) as i32 + offset;
                // Damaged data may yield any index.
                let value = usize::try_from(index).ok().and_then(|index| table.values.get(index));
                return value.copied().ok_or(Damage::Codes);
            }
        }
        Err(Damage::Codes)
    }

    /// Skips a restart marker.
    pub(super) fn restart(&mut self) -> Result<(), Damage> {
        // Bits before the marker only fill up the last byte.
        (self.held, self.count, self.padding) = (0, 0, 0);
        // Fill bytes may precede a marker.
        while self.bytes.get(self.at) == Some(&0xff) && self.bytes.get(self.at + 1) == Some(&0xff) {
            self.at += 1;
        }
        match (self.bytes.get(self.at), self.bytes.get(self.at + 1)) {
            (Some(0xff), Some(0xd0..=0xd7)) => {
                self.at += 2;
                Ok(())
            }
            _ => Err(Damage::Cut),
        }
    }

    /// Returns the position from which to look for the next marker.
    pub(super) fn end(&self) -> usize {
        self.at
    }
}

/// The bits of a scan and the decoder's state.
pub(super) struct Coded<'a> {
    pub(super) bits: Bits<'a>,
    pub(super) progress: Progress,
}

/// The coefficients that a scan codes (spectral selection), and their bits (successive
/// approximation): `low` is the shift of this scan, `high` that of the previous one, or 0 in the
/// first.
#[derive(Clone, Copy)]
pub(super) struct Band {
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) high: u32,
    pub(super) low: u32,
}

/// The decoder's state between blocks, which a restart resets.
#[derive(Default)]
pub(super) struct Progress {
    /// The DC predictor of each component.
    pub(super) dc: [i32; 4],
    /// The remaining blocks of the current end-of-band run.
    pub(super) ends: u32,
}

fn shifted(value: i32, low: u32) -> i16 {
    // The cast wraps for damaged data, like the DC prediction.
    (value << low) as i16
}

fn set(block: &mut [i16], index: usize, value: i16) -> Result<(), Damage> {
    let to = ZIGZAG.get(index).and_then(|place| block.get_mut(usize::from(*place)));
    *to.ok_or(Damage::Codes)? = value;
    Ok(())
}

/// Decodes the difference of a DC coefficient from its predictor.
fn difference(bits: &mut Bits<'_>, table: &Huffman) -> Result<i32, Damage> {
    let size = u32::from(bits.code(table)?);
    // T.81 has sizes of up to 11 for 8-bit samples; 15 keeps the arithmetic in range.
    if size > 15 { Err(Damage::Codes) } else { bits.signed(size) }
}

fn first_coefficient(
    bits: &mut Bits<'_>,
    table: &Huffman,
    dc: &mut i32,
    block: &mut [i16],
    low: u32,
) -> Result<(), Damage> {
    *dc = dc.wrapping_add(difference(bits, table)?);
    set(block, 0, shifted(*dc, low))
}

/// Decodes a whole block of a sequential scan. The block must be zeroed.
pub(super) fn sequential(
    bits: &mut Bits<'_>,
    [dc, ac]: [&Huffman; 2],
    last: &mut i32,
    block: &mut [i16],
) -> Result<(), Damage> {
    first_coefficient(bits, dc, last, block, 0)?;
    let mut index = 1;
    while index < 64 {
        let code = bits.code(ac)?;
        let (zeros, size) = (usize::from(code >> 4), u32::from(code & 15));
        match (zeros, size) {
            // ZRL: sixteen zeros, and no coefficient after them.
            (15, 0) => index += 16,
            // EOB: the rest of the block is zero.
            (_, 0) => break,
            _ => {
                index += zeros;
                let value = bits.signed(size)?;
                set(block, index, value as i16)?;
                index += 1;
            }
        }
    }
    Ok(())
}

/// Decodes the DC coefficient of a block in a progressive scan.
pub(super) fn progressive_first(
    bits: &mut Bits<'_>,
    table: Option<&Huffman>,
    band: Band,
    last: &mut i32,
    block: &mut [i16],
) -> Result<(), Damage> {
    if band.high == 0 {
        return first_coefficient(bits, table.ok_or(Damage::Codes)?, last, block, band.low);
    }
    // A refining scan codes one raw bit per block.
    if bits.take(1)? == 1
        && let Some(coefficient) = block.first_mut()
    {
        *coefficient |= 1 << band.low;
    }
    Ok(())
}

/// Decodes the AC coefficients of a block in a progressive scan.
pub(super) fn progressive_rest(
    bits: &mut Bits<'_>,
    table: &Huffman,
    band: Band,
    ends: &mut u32,
    block: &mut [i16],
) -> Result<(), Damage> {
    if band.high == 0 {
        new_rest(bits, table, band, ends, block)
    } else {
        refine_rest(bits, table, band, ends, block)
    }
}

fn new_rest(
    bits: &mut Bits<'_>,
    table: &Huffman,
    band: Band,
    ends: &mut u32,
    block: &mut [i16],
) -> Result<(), Damage> {
    if *ends > 0 {
        *ends -= 1;
        return Ok(());
    }
    let mut index = band.first;
    while index <= band.last {
        let code = bits.code(table)?;
        let (zeros, size) = (usize::from(code >> 4), u32::from(code & 15));
        match (zeros, size) {
            (15, 0) => index += 16,
            // EOBn: the band ends in this block and in `ends` more, this one not counted.
            (run, 0) => {
                *ends = (1 << run) - 1 + bits.take(run as u32)?;
                break;
            }
            _ => {
                index += zeros;
                let value = bits.signed(size)?;
                set(block, index, shifted(value, band.low))?;
                index += 1;
            }
        }
    }
    Ok(())
}

/// Refines the nonzero coefficients by a bit, and inserts new ones between them.
fn refine_rest(
    bits: &mut Bits<'_>,
    table: &Huffman,
    band: Band,
    ends: &mut u32,
    block: &mut [i16],
) -> Result<(), Damage> {
    // `band` limits the shift to 13.
    let one = 1i16 << band.low;
    let mut index = band.first;
    if *ends == 0 {
        while index <= band.last {
            let code = bits.code(table)?;
            let (mut zeros, size) = (u32::from(code >> 4), u32::from(code & 15));
            let mut new = 0;
            match (zeros, size) {
                // Skips fifteen zeros and ends at the sixteenth, which stays zero.
                (15, 0) => {}
                (run, 0) => {
                    *ends = (1 << run) + bits.take(run)?;
                    break;
                }
                (_, 1) => new = if bits.take(1)? == 1 { one } else { -one },
                _ => return Err(Damage::Codes),
            }
            while index <= band.last {
                let coefficient = block.get_mut(place(index)).ok_or(Damage::Codes)?;
                // Only zero coefficients count for the run; the others get a correction bit.
                if *coefficient != 0 {
                    refine(bits, coefficient, one)?;
                } else if zeros == 0 {
                    *coefficient = new;
                    break;
                } else {
                    zeros -= 1;
                }
                index += 1;
            }
            index += 1;
        }
    }
    // An end-of-band run still refines the coefficients that are nonzero.
    if *ends > 0 {
        while index <= band.last {
            let coefficient = block.get_mut(place(index)).ok_or(Damage::Codes)?;
            if *coefficient != 0 {
                refine(bits, coefficient, one)?;
            }
            index += 1;
        }
        *ends -= 1;
    }
    Ok(())
}

fn refine(bits: &mut Bits<'_>, coefficient: &mut i16, one: i16) -> Result<(), Damage> {
    // The bit adds to the magnitude. One that is set already stays, as in libjpeg.
    if bits.take(1)? == 1 && *coefficient & one == 0 {
        *coefficient = coefficient.wrapping_add(if *coefficient >= 0 { one } else { -one });
    }
    Ok(())
}
