//! Quantization granularity: one scale per tensor, per index of an axis, or per block.

use ort_core::ep::CompileCx;
use ort_core::{Result, ensure};

/// The attributes that determine the granularity.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    axis: i64,
    block_size: i64,
}

impl Options {
    pub(super) fn new(cx: &CompileCx<'_>) -> Result<Options> {
        Ok(Options { axis: cx.attrs().int("axis")?, block_size: cx.attrs().int("block_size")? })
    }
}

/// The scales of a tensor, walked in the order of its elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granularity {
    kind: Kind,
    axis: usize,
    inner: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tensor,
    Axis,
    Blocks { size: usize, count: usize },
}

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

impl Granularity {
    /// Returns how scales of one shape belong to a tensor of another.
    pub(super) fn new(options: Options, shape: &[usize], scales: &[usize]) -> Result<Granularity> {
        let rank = shape.len() as i64;
        // A single scale serves the whole tensor, whatever the axis.
        if scales.iter().product::<usize>() == 1 && (scales.len() < 2 || options.block_size == 0) {
            return Ok(Granularity { kind: Kind::Tensor, axis: 1, inner: 1 });
        }
        ensure!(
            (-rank..rank).contains(&options.axis),
            InvalidArgument,
            "axis {} is out of range for rank {rank}",
            options.axis
        );
        let at = options.axis.rem_euclid(rank) as usize;
        let (axis, inner) = (shape[at], shape[at + 1..].iter().product());
        if options.block_size == 0 {
            ensure!(
                scales == [axis],
                InvalidArgument,
                "scales of shape {scales:?} do not fit axis {at} of {shape:?}"
            );
            return Ok(Granularity { kind: Kind::Axis, axis, inner });
        }
        let size = usize::try_from(options.block_size).unwrap_or(0);
        ensure!(size > 0, InvalidArgument, "a block size of {}", options.block_size);
        let mut expected = shape.to_vec();
        expected[at] = axis.div_ceil(size);
        ensure!(
            scales == expected,
            InvalidArgument,
            "scales of shape {scales:?} do not fit blocks of {size} on axis {at} of {shape:?}"
        );
        Ok(Granularity { kind: Kind::Blocks { size, count: expected[at] }, axis, inner })
    }

    /// Returns the run that starts at an element, with at most `limit` elements.
    pub(super) fn run(&self, element: usize, limit: usize) -> Run {
        let (inside, place) = (element % self.inner, element / self.inner % self.axis);
        match self.kind {
            Kind::Tensor => Run::One { len: limit, scale: 0 },
            // The axis is the last one, so consecutive elements have consecutive scales.
            Kind::Axis if self.inner == 1 => Run::Each { len: limit.min(self.axis - place), first: place },
            Kind::Axis => Run::One { len: limit.min(self.inner - inside), scale: place },
            Kind::Blocks { size, count } => {
                let outer = element / self.inner / self.axis;
                let first = (outer * count + place / size) * self.inner + inside;
                match self.inner {
                    // The axis is the last one, so blocks are contiguous.
                    1 => {
                        let len = (size - place % size).min(self.axis - place);
                        Run::One { len: limit.min(len), scale: first }
                    }
                    _ => Run::Each { len: limit.min(self.inner - inside), first },
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
            let granularity = Granularity::new(Options { axis, block_size }, shape, scales)?;
            let at = axis.rem_euclid(shape.len() as i64) as usize;
            let (count, inner) = (shape.iter().product::<usize>(), shape[at + 1..].iter().product::<usize>());
            let mut element = 0;
            while element < count {
                let run = granularity.run(element, count - element);
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
        assert!(Granularity::new(Options { axis: 1, block_size: 0 }, &[2, 3], &[2]).is_err());
        assert!(Granularity::new(Options { axis: 2, block_size: 0 }, &[2, 3], &[3]).is_err());
        Ok(())
    }
}
