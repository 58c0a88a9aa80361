//! Errors of GEMM: slices that are too short, and shapes that do not match.

use std::fmt;

/// Why a GEMM was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmError {
    /// A slice is shorter than its shape requires.
    TooShort {
        /// The slice.
        what: &'static str,
        /// The length it needs, in elements.
        needed: usize,
        /// The length it has, in elements.
        len: usize,
    },
    /// Shapes or layouts that do not match.
    Shape(&'static str),
}

impl fmt::Display for GemmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GemmError::TooShort { what, needed, len } => {
                write!(f, "{what} needs {needed} values and has {len}")
            }
            GemmError::Shape(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for GemmError {}
