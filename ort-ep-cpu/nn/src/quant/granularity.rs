//! Runs of elements that share a scale, or whose scales are contiguous.

use ort_core::ops::quant::problem::{Granularity, GranularityKind};

/// Contiguous elements with one scale, or with scales that are contiguous too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    One { len: usize, scale: usize },
    Each { len: usize, first: usize },
}

impl Run {
    pub(super) fn len(self) -> usize {
        match self {
            Run::One { len, .. } | Run::Each { len, .. } => len,
        }
    }
}

/// Returns the run that starts at an element, with at most `limit` elements.
pub(super) fn run_of(granularity: &Granularity, element: usize, limit: usize) -> Run {
    let Granularity { kind, axis, inner } = *granularity;
    let (inside, place) = (element % inner, element / inner % axis);
    match kind {
        GranularityKind::Tensor => Run::One { len: limit, scale: 0 },
        // The axis is the last one, so consecutive elements have consecutive scales.
        GranularityKind::Axis if inner == 1 => Run::Each { len: limit.min(axis - place), first: place },
        GranularityKind::Axis => Run::One { len: limit.min(inner - inside), scale: place },
        GranularityKind::Blocks { size, count } => {
            let outer = element / inner / axis;
            let first = (outer * count + place / size) * inner + inside;
            match inner {
                // The axis is the last one, so blocks are contiguous.
                1 => {
                    let len = (size - place % size).min(axis - place);
                    Run::One { len: limit.min(len), scale: first }
                }
                _ => Run::Each { len: limit.min(inner - inside), first },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ort_core::Result;
    use ort_core::ops::quant::problem::Quantization;

    use super::*;

    #[test]
    fn every_element_finds_its_scale() -> Result<()> {
        // shape, axis, block size, shape of the scales, index of the scale at (outer, place,
        // inside)
        type Index = fn(usize, usize, usize) -> usize;
        let cases: [(&[usize], i64, i64, &[usize], Index); 6] = [
            (&[2, 3, 4], 1, 0, &[], |_, _, _| 0),
            (&[2, 3, 4], 1, 0, &[3], |_, place, _| place),
            (&[2, 3, 4], -1, 0, &[4], |_, place, _| place),
            (&[2, 5, 4], 1, 2, &[2, 3, 4], |outer, place, inside| (outer * 3 + place / 2) * 4 + inside),
            (&[2, 5], 1, 3, &[2, 2], |outer, place, _| outer * 2 + place / 3),
            (&[5, 2], 0, 3, &[2, 2], |_, place, inside| place / 3 * 2 + inside),
        ];
        for (shape, axis, block_size, scales, index) in cases {
            let granularity = Quantization { axis, block_size }.granularity(shape, scales)?;
            let at = axis.rem_euclid(shape.len() as i64) as usize;
            let (count, inner) = (shape.iter().product::<usize>(), shape[at + 1..].iter().product::<usize>());
            let mut element = 0;
            while element < count {
                let run = run_of(&granularity, element, count - element);
                for step in 0..run.len() {
                    let found = match run {
                        Run::One { scale, .. } => scale,
                        Run::Each { first, .. } => first + step,
                    };
                    let e = element + step;
                    assert_eq!(
                        found,
                        index(e / inner / shape[at], e / inner % shape[at], e % inner),
                        "{shape:?} {e}"
                    );
                }
                element += run.len();
            }
        }
        assert!(Quantization { axis: 1, block_size: 0 }.granularity(&[2, 3], &[2]).is_err());
        assert!(Quantization { axis: 2, block_size: 0 }.granularity(&[2, 3], &[3]).is_err());
        Ok(())
    }
}
