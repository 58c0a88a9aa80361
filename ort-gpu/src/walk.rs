//! Strides, and strided loop nests over broadcast tensors.

use ort_core::{Result, ensure, error};

/// Row-major strides of a shape, in elements.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1usize;
    for (place, size) in strides.iter_mut().zip(shape).rev() {
        *place = stride;
        // A tensor with elements cannot saturate here; of an empty one no stride is used.
        stride = stride.saturating_mul(*size);
    }
    strides
}

/// A strided loop nest over a shape, with one stride per tensor and axis. Adjacent axes that every
/// tensor strides contiguously are merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walk {
    /// The loop extents.
    pub sizes: Vec<usize>,
    /// The stride along each axis, in elements, per tensor.
    pub steps: Vec<Vec<i64>>,
}

impl Walk {
    /// Builds the loop nest over `sizes` with these strides, merged into as few axes as possible.
    pub fn new(sizes: &[usize], steps: &[Vec<i64>]) -> Walk {
        let mut walk = Walk { sizes: Vec::new(), steps: vec![Vec::new(); steps.len()] };
        for (axis, size) in sizes.iter().copied().enumerate() {
            // A tensor without a stride for an axis broadcasts along it.
            let step = |all: &Vec<i64>| all.get(axis).copied().unwrap_or(0);
            let own: Vec<i64> = steps.iter().map(step).collect();
            let joins =
                |(last, own): (&Vec<i64>, &i64)| last.last() == Some(&own.saturating_mul(size as i64));
            match walk.sizes.last_mut() {
                // An axis of size 1 never advances, so its stride is irrelevant.
                _ if size == 1 => continue,
                // Merge if the previous axis's stride is this stride times extent for every tensor.
                Some(last) if walk.steps.iter().zip(&own).all(joins) => {
                    *last *= size;
                    for (steps, own) in walk.steps.iter_mut().zip(own) {
                        // The merged axis advances by the stride of its inner part.
                        steps.last_mut().into_iter().for_each(|step| *step = own);
                    }
                }
                _ => {
                    walk.sizes.push(size);
                    walk.steps.iter_mut().zip(own).for_each(|(steps, own)| steps.push(own));
                }
            }
        }
        walk
    }

    /// Builds the loop nest over an output for inputs that broadcast to it.
    pub fn broadcast(output: &[usize], inputs: &[&[usize]]) -> Result<Walk> {
        let mut all = Vec::with_capacity(inputs.len());
        for shape in inputs {
            let skipped = output.len().checked_sub(shape.len());
            let skipped =
                skipped.ok_or_else(|| error!(Fail, "shape {shape:?} does not broadcast to {output:?}"))?;
            let mut steps = vec![0; skipped];
            for ((size, stride), whole) in shape.iter().zip(strides(shape)).zip(output.iter().skip(skipped)) {
                ensure!(
                    size == whole || *size == 1,
                    Fail,
                    "shape {shape:?} does not broadcast to {output:?}"
                );
                // A broadcast axis has stride 0: every iteration reads the same element.
                steps.push(if *size == 1 { 0 } else { stride as i64 });
            }
            all.push(steps);
        }
        Ok(Walk::new(output, &all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_all_walk_as_one_are_one() {
        let walk = Walk::broadcast(&[2, 3, 4], &[&[2, 3, 4], &[3, 4]]).unwrap();
        assert_eq!(walk, Walk { sizes: vec![2, 12], steps: vec![vec![12, 1], vec![0, 1]] });
        let walk = Walk::broadcast(&[2, 3, 4], &[&[2, 3, 4], &[]]).unwrap();
        assert_eq!(walk, Walk { sizes: vec![24], steps: vec![vec![1], vec![0]] });
        let walk = Walk::broadcast(&[2, 3, 4], &[&[2, 1, 4]]).unwrap();
        assert_eq!(walk, Walk { sizes: vec![2, 3, 4], steps: vec![vec![4, 0, 1]] });
        assert!(Walk::broadcast(&[2, 3], &[&[2]]).is_err());
    }
}
