//! Multidirectional broadcasting, as in "Broadcasting in ONNX" of the ONNX specification.

use crate::dim::Dim;
use crate::tensor::Shape;
use crate::{Result, error};

/// Help text for sizes that do not broadcast.
const BROADCAST: &str =
    "sizes are compared from the last on, and must be equal or 1: insert a Reshape, Unsqueeze or Transpose";

/// Broadcasts concrete shapes.
///
/// ```
/// use ort_core::spec::broadcast::shapes;
/// assert_eq!(shapes(&[&[2, 1, 4], &[3, 1]])?.as_slice(), [2, 3, 4]);
/// assert!(shapes(&[&[2], &[3]]).is_err());
/// # Ok::<(), ort_core::Error>(())
/// ```
pub fn shapes(shapes: &[&[usize]]) -> Result<Shape> {
    let rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut result: Shape = std::iter::repeat_n(1, rank).collect();
    for shape in shapes {
        // `rank` is the largest, so nothing wraps here.
        let start = rank - shape.len();
        for (size, &other) in result.iter_mut().skip(start).zip(*shape) {
            match (*size, other) {
                (a, b) if a == b => {}
                // A size of 1 broadcasts to 0 as well: the result is empty.
                (1, b) => *size = b,
                (_, 1) => {}
                _ => {
                    return Err(error!(InvalidArgument, "shapes {shapes:?} do not broadcast").help(BROADCAST));
                }
            }
        }
    }
    Ok(result)
}

/// Broadcasts symbolic shapes. Of a constant other than 1 and a symbolic size, the constant is the
/// result. Two different symbolic sizes yield an expression of their broadcast. Whether such sizes
/// agree is checked at run time.
pub fn dims(shapes: &[&[Dim]]) -> Result<Vec<Dim>> {
    let rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut result = vec![Dim::constant(1); rank];
    for shape in shapes {
        let start = rank - shape.len();
        for (size, other) in result.iter_mut().skip(start).zip(*shape) {
            *size = pair(size, other).ok_or_else(|| {
                error!(InvalidGraph, "sizes {size} and {other} of shapes {shapes:?} do not broadcast")
                    .help(BROADCAST)
            })?;
        }
    }
    Ok(result)
}

fn pair(a: &Dim, b: &Dim) -> Option<Dim> {
    match (a.as_constant(), b.as_constant()) {
        _ if a == b => Some(a.clone()),
        (Some(1), _) => Some(b.clone()),
        (_, Some(1)) => Some(a.clone()),
        (Some(_), Some(_)) => None,
        // The symbolic size must be 1 or equal to the constant.
        (Some(_), None) => Some(a.clone()),
        (None, Some(_)) => Some(b.clone()),
        (None, None) => {
            // The larger of two sizes, or 0 if one of them is 0. `min(size, 1)` is 0 exactly for
            // size 0.
            let one = Dim::constant(1);
            let (larger, [a_is, b_is]) = (a.max(b), [a, b].map(|size| size.min(&one)));
            Some(match () {
                // Either both are 0 or neither is.
                () if a_is == b_is => larger,
                () if larger == *a => larger * b_is,
                () if larger == *b => larger * a_is,
                () => larger * a_is * b_is,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::{Bindings, Symbol};

    #[test]
    fn sizes_that_are_0_together_have_their_larger_one() -> Result<()> {
        let a = Dim::named("a");
        let part = a.min(&Dim::constant(16));
        assert_eq!(dims(&[&[part], std::slice::from_ref(&a)])?, [a]);
        Ok(())
    }

    #[test]
    fn symbolic_sizes_broadcast_as_numbers_do() -> Result<()> {
        let (a, b) = (Symbol::named("a"), Symbol::named("b"));
        let symbolic = dims(&[&[Dim::symbol(a.clone())], &[Dim::symbol(b.clone())]])?;
        for (x, y) in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 5), (5, 1), (5, 5)] {
            let bindings: Bindings = [(a.clone(), x as i64), (b.clone(), y as i64)].into_iter().collect();
            assert_eq!(symbolic[0].evaluate(&bindings), Ok(shapes(&[&[x], &[y]])?[0] as i64), "{x} and {y}");
        }
        Ok(())
    }
}
