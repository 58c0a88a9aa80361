//! Bit packing of 2-, 4- and 6-bit elements: a bit stream with the first element in the lowest bits
//! of the first byte.

/// Unpacks elements of `bits` bits, one to a byte. Stops at the end of `packed` or `codes`.
///
/// ```
/// let mut codes = [0; 3];
/// ort_core::dtype::packed::unpack(&[0x21, 0x03], 4, &mut codes);
/// assert_eq!(codes, [1, 2, 3]);
/// ```
pub fn unpack(packed: &[u8], bits: u32, codes: &mut [u8]) {
    // In 32 bits, because `bits` may be 8.
    let mask = ((1_u32 << bits) - 1) as u8;
    let (mut window, mut filled) = (0_u32, 0);
    let mut bytes = packed.iter();
    // The first element is in the low bits, as ONNX packs 4-bit types. 6-bit elements cross bytes.
    for code in codes {
        if filled < bits {
            let Some(byte) = bytes.next() else { return };
            window |= u32::from(*byte) << filled;
            filled += 8;
        }
        *code = window as u8 & mask;
        window >>= bits;
        filled -= bits;
    }
}

/// Packs the low `bits` bits of each element. Unused bits of the last byte are 0. Stops at the end
/// of `packed`.
pub fn pack(codes: &[u8], bits: u32, packed: &mut [u8]) {
    let mask = (1_u32 << bits) - 1;
    let (mut window, mut filled) = (0_u32, 0);
    let mut bytes = packed.iter_mut();
    for code in codes {
        window |= (u32::from(*code) & mask) << filled;
        filled += bits;
        if filled >= 8 {
            let Some(byte) = bytes.next() else { return };
            *byte = window as u8;
            window >>= 8;
            filled -= 8;
        }
    }
    if filled > 0
        && let Some(byte) = bytes.next()
    {
        *byte = window as u8;
    }
}

/// Sign-extends a two's complement number of `bits` bits.
pub fn sign_extend(code: u8, bits: u32) -> i8 {
    let unused = 8 - bits;
    ((code << unused) as i8) >> unused
}

/// Same as [`unpack`] for signed numbers.
pub fn unpack_signed(packed: &[u8], bits: u32, values: &mut [i8]) {
    let codes: &mut [u8] = bytemuck::cast_slice_mut(values);
    unpack(packed, bits, codes);
    codes.iter_mut().for_each(|code| *code = sign_extend(*code, bits) as u8);
}

/// Same as [`unpack`] for any type of up to 8 bits.
pub(super) fn unpack_any(dtype: super::DType, packed: &[u8], codes: &mut [u8]) {
    unpack(packed, dtype.bits().unwrap_or(8).min(8), codes);
}
