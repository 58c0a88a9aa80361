//! Lookup of bytes in a table of 256: any function of 8-bit values.

use super::Isa;

/// Replaces each byte by the entry of the table that it indexes.
pub fn lookup(isa: Isa, table: &[u8; 256], bytes: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        let isa = isa.min(Isa::widest());
        if isa == Isa::Avx512 && is_x86_feature_detected!("avx512vbmi") {
            // SAFETY: `Isa::widest` detected AVX-512 F and BW, and the line above VBMI.
            return unsafe { vbmi(table, bytes) };
        }
        if isa >= Isa::Avx2 {
            // SAFETY: `Isa::widest` detected AVX2.
            return unsafe { avx2(table, bytes) };
        }
    }
    // Unused on targets that have portable code only.
    let _ = isa;
    one_by_one(table, bytes);
}

fn one_by_one(table: &[u8; 256], bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|byte| *byte = table[usize::from(*byte)]);
}

/// The table is four registers, of which an instruction indexes two.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VBMI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn vbmi(table: &[u8; 256], bytes: &mut [u8]) {
    use std::arch::x86_64::*;
    // SAFETY: the table has four times 64 bytes.
    let part = |at: usize| unsafe { _mm512_loadu_si512(table.as_ptr().add(64 * at).cast()) };
    let parts = [part(0), part(1), part(2), part(3)];
    let find = |index: __m512i| {
        let low = _mm512_permutex2var_epi8(parts[0], index, parts[1]);
        let high = _mm512_permutex2var_epi8(parts[2], index, parts[3]);
        // The top bit of an index, which the permutations ignore, selects the upper half.
        _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
    };
    let (whole, rest) = bytes.as_chunks_mut::<64>();
    for bytes in whole {
        let at = bytes.as_mut_ptr().cast();
        // SAFETY: `bytes` has 64 bytes.
        unsafe { _mm512_storeu_si512(at, find(_mm512_loadu_si512(at.cast_const()))) };
    }
    let mask = (1 << rest.len()) - 1;
    let at = rest.as_mut_ptr().cast();
    // SAFETY: the mask selects the bytes of `rest` alone; others are not accessed.
    unsafe { _mm512_mask_storeu_epi8(at, mask, find(_mm512_maskz_loadu_epi8(mask, at.cast_const()))) };
}

/// The table is 16 parts of 16 bytes, and a shuffle indexes one.
///
/// # Safety
/// The CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(table: &[u8; 256], bytes: &mut [u8]) {
    use std::arch::x86_64::*;
    // Four vectors share each load of a part.
    let (whole, rest) = bytes.as_chunks_mut::<128>();
    let (parts, _) = table.as_chunks::<16>();
    for bytes in whole {
        let at: *mut __m256i = bytes.as_mut_ptr().cast();
        // SAFETY: `bytes` has four vectors.
        let mut index: [__m256i; 4] = std::array::from_fn(|part| unsafe { _mm256_loadu_si256(at.add(part)) });
        let mut found = [_mm256_setzero_si256(); 4];
        for part in parts {
            // SAFETY: a part has 16 bytes.
            let part = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(part.as_ptr().cast()) });
            for vector in 0..4 {
                // The sum sets the top bit of an index in another part, for which a shuffle yields
                // 0.
                let place = _mm256_adds_epu8(index[vector], _mm256_set1_epi8(0x70));
                found[vector] = _mm256_or_si256(found[vector], _mm256_shuffle_epi8(part, place));
                index[vector] = _mm256_sub_epi8(index[vector], _mm256_set1_epi8(16));
            }
        }
        for (part, found) in found.into_iter().enumerate() {
            // SAFETY: `bytes` has four vectors.
            unsafe { _mm256_storeu_si256(at.add(part), found) };
        }
    }
    one_by_one(table, rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_found_at_every_length() {
        let table: [u8; 256] = std::array::from_fn(|at| (at * 167 + at / 16 * 29 + 5) as u8);
        for len in (0..140).chain([255, 256, 257, 1000]) {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 13 + len) as u8).collect();
            let expected: Vec<u8> = bytes.iter().map(|byte| table[usize::from(*byte)]).collect();
            for isa in Isa::available() {
                let mut found = bytes.clone();
                lookup(isa, &table, &mut found);
                assert_eq!(found, expected, "{isa:?} {len}");
            }
        }
    }
}
