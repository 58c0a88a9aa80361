//! `Concat` and `Split`: parts of all widths along any axis, in one launch and in several.

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::Attribute;

use super::typed::{Case, Given, case, check_all, ints, run};

/// Sizes before and after the axis, and those of the parts along it.
const PARTS: [([usize; 2], &[usize]); 11] = [
    ([1, 1], &[1, 1]),
    ([12, 64], &[128, 1]),
    ([1, 24], &[0, 5]),
    ([5, 1], &[16, 16, 16]),
    ([5, 1], &[768, 768, 768]),
    ([3, 7], &[1, 0, 2, 5]),
    ([2, 4], &[6, 2, 1]),
    // As many parts as a launch takes, one more, and more than two launches take.
    ([3, 2], &[1, 2, 3, 4, 5, 6, 7, 8]),
    ([3, 2], &[1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ([2, 1], &[3, 0, 1, 2, 0, 0, 1, 1, 0, 4, 1, 1, 1, 1, 1, 1, 1, 2]),
    // A long row, whose parts are moved separately if few elements are moved at once.
    ([1, 1], &[70_000, 3, 8]),
];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let axis = [("axis", Attribute::Int(1))];
    // One type for each size of element.
    for dtype in [DType::U8, DType::F16, DType::F32, DType::I64] {
        for ([before, behind], parts) in PARTS {
            let of = |size: usize| run(dtype, &[before, size, behind]);
            let joined: Vec<Given> = parts.iter().map(|size| of(*size)).collect();
            cases.push(Case { tolerance: 0.0, ..case("Concat", joined, &axis) });
            let sizes: Vec<i64> = parts.iter().map(|size| *size as i64).collect();
            let whole = vec![of(parts.iter().sum()), ints(&sizes)];
            let split = case("Split", whole, &axis);
            cases.push(Case { outputs: parts.len(), tolerance: 0.0, ..split });
        }
    }
    cases
}

/// Checks `Concat` and `Split`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn parts(device: &Arc<dyn Device>) {
    check_all(device, &cases());
}
