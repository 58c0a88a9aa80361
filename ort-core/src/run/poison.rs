//! Memory poisoning, to find kernels that read memory before they write it.
//!
//! With `ORT_POISON_MEMORY=1`, outputs and workspaces are filled with a pattern that makes every
//! result computed from it visibly wrong.

use super::target::Target;

/// This pattern is a NaN in every floating-point type, and a signalling NaN in `double`. As an
/// integer it is not a valid index, and its bytes are not valid booleans.
const PATTERN: [u8; 2] = 0x7ff5u16.to_le_bytes();

/// Whether the environment enables poisoning.
pub(crate) fn from_environment() -> bool {
    std::env::var_os("ORT_POISON_MEMORY").is_some_and(|value| value == "1")
}

/// Poisons the memory that a step writes: its outputs, except those computed in place of an input,
/// and its workspace. `writes` holds the slices of host slabs for the targets in them, then the
/// workspace.
pub(crate) fn poison(targets: &mut [Target], writes: &mut [&mut [u8]], scratch: Option<&mut [u8]>) {
    let mut writes = writes.iter_mut();
    for target in targets {
        match target {
            Target::Slab { region: Some(_), in_place, .. } => {
                let part = writes.next();
                // An in-place output holds the input that the kernel is about to read.
                if in_place.is_none() {
                    part.into_iter().for_each(|part| fill(part));
                }
            }
            Target::Buffer(buffer, None) => buffer.bytes_mut().into_iter().for_each(fill),
            _ => {}
        }
    }
    writes.for_each(|workspace| fill(workspace));
    scratch.into_iter().for_each(fill);
}

fn fill(bytes: &mut [u8]) {
    let mut pairs = bytes.chunks_exact_mut(PATTERN.len());
    pairs.by_ref().for_each(|pair| pair.copy_from_slice(&PATTERN));
    pairs.into_remainder().fill(0xff);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_is_nan_in_each_type() {
        let mut bytes = [0u8; 9];
        fill(&mut bytes);
        let [a, b, c, d, e, f, g, h, last] = bytes;
        assert!(half::f16::from_le_bytes([a, b]).is_nan() && half::bf16::from_le_bytes([a, b]).is_nan());
        assert!(f32::from_le_bytes([a, b, c, d]).is_nan());
        let double = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        assert!(f64::from_bits(double).is_nan() && double & (1 << 51) == 0);
        assert_eq!(last, 0xff);
    }
}
