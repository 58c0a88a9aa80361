//! Why a JPEG cannot be decoded.

use std::fmt;

/// Why an image cannot be decoded.
#[derive(Debug)]
pub(in crate::vision) enum Damage {
    /// The data ends too early, or an expected marker is missing.
    Cut,
    /// An invalid Huffman code, or a value that does not fit.
    Codes,
    /// A malformed part of the file.
    Form(&'static str),
    /// A form of JPEG that is not supported.
    Unsupported(&'static str),
}

impl fmt::Display for Damage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Damage::Cut => formatter.write_str("the JPEG is cut short"),
            Damage::Codes => formatter.write_str("the JPEG is damaged: a code is none, or does not fit"),
            Damage::Form(what) => write!(formatter, "the JPEG is damaged: {what}"),
            Damage::Unsupported(what) => {
                write!(formatter, "JPEG {what} is not decoded; save it as a baseline JPEG")
            }
        }
    }
}
