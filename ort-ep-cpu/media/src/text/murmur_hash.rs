//! `MurmurHash3`: the 32-bit hash of each element's bytes.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spend;

cpu_kernels![KernelDef { domain: MICROSOFT, op: "MurmurHash3", make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    // ONNX Runtime also truncates the seed to 32 bits.
    let seed = cx.attrs().int("seed")? as u32;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let hashes = cx.output(0)?.bytes_mut()?.chunks_exact_mut(4);
        if input.dtype() == DType::String {
            let texts = input.strings()?.iter();
            texts
                .zip(hashes)
                .for_each(|(text, to)| to.copy_from_slice(&hash(text.as_bytes(), seed).to_ne_bytes()));
            return Ok(());
        }
        let size = input.dtype().byte_size().unwrap_or(4);
        let elements = input.bytes()?.chunks_exact(size);
        elements.zip(hashes).for_each(|(bytes, to)| to.copy_from_slice(&hash(bytes, seed).to_ne_bytes()));
        Ok(())
    }))
}

/// Computes MurmurHash3_x86_32 as Austin Appleby describes it.
fn hash(bytes: &[u8], seed: u32) -> u32 {
    let mixed = |block: u32| block.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
    // Little-endian, and zeros for the missing bytes of the tail.
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0u32, |word, byte| word << 8 | u32::from(*byte));
    let blocks = bytes.chunks_exact(4);
    let rest = blocks.remainder();
    let mut hash = seed;
    spend(8 + bytes.len());
    for block in blocks {
        hash = (hash ^ mixed(word(block))).rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64);
    }
    if !rest.is_empty() {
        hash ^= mixed(word(rest));
    }
    // The finalizer spreads every input bit over the whole hash.
    hash ^= bytes.len() as u32;
    hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

#[cfg(test)]
mod tests {
    use super::hash;

    /// From the hash's own verification, and from scikit-learn.
    #[test]
    fn known_hashes() {
        let table: &[(&[u8], u32, u32)] = &[
            (b"", 0, 0),
            (b"", 1, 0x514e_28b7),
            (b"", 0xffff_ffff, 0x81f1_6f39),
            (b"foo", 0, 4_138_058_784),
            (&[0xff; 4], 0, 0x7629_3b50),
            (&[0x21, 0x43, 0x65, 0x87], 0x5082_edee, 0x2362_f9de),
            (&[0x21, 0x43, 0x65], 0, 0x7e4a_8634),
        ];
        for (bytes, seed, expected) in table {
            assert_eq!(hash(bytes, *seed), *expected, "{bytes:?} with seed {seed}");
        }
    }
}
