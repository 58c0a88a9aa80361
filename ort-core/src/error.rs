//! The one error type: what kind of failure, where in the model, and what to try.

use std::fmt;

/// The kinds of failure, named after ONNX Runtime's status codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Something failed that no other kind describes.
    Fail,
    /// A value given by the caller does not fit: an input's name, type or shape, an option.
    InvalidArgument,
    /// A file that was named does not exist or cannot be opened.
    NoSuchFile,
    /// The file was opened but holds no ONNX model.
    NoModel,
    /// A kernel failed while the model ran.
    RuntimeException,
    /// The bytes are not a valid protocol buffer message.
    InvalidProtobuf,
    /// The model uses something that this build cannot run.
    NotImplemented,
    /// The model contradicts the ONNX standard.
    InvalidGraph,
    /// An execution provider or its device failed.
    EpFail,
    /// A memory limit, or the machine's memory, does not suffice.
    OutOfMemory,
    /// The caller cancelled the run, or its deadline passed.
    Cancelled,
}

impl ErrorKind {
    /// The kind in words, as it opens an error message.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Fail => "failure",
            ErrorKind::InvalidArgument => "invalid argument",
            ErrorKind::NoSuchFile => "no such file",
            ErrorKind::NoModel => "not a model",
            ErrorKind::RuntimeException => "runtime failure",
            ErrorKind::InvalidProtobuf => "invalid protobuf",
            ErrorKind::NotImplemented => "not implemented",
            ErrorKind::InvalidGraph => "invalid graph",
            ErrorKind::EpFail => "execution provider failure",
            ErrorKind::OutOfMemory => "out of memory",
            ErrorKind::Cancelled => "cancelled",
        }
    }
}

/// A failure with its place (`model > graph > node(op) > provider > input`) and a way out.
///
/// ```
/// use ort_core::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::InvalidArgument, "rank 2, expected 4")
///     .within("input 'x'")
///     .within("node 'conv_1' (Conv)")
///     .help("pass an image as [batch, channels, height, width]");
/// assert_eq!(
///     error.to_string(),
///     "invalid argument: node 'conv_1' (Conv) > input 'x': rank 2, expected 4; \
///      pass an image as [batch, channels, height, width]"
/// );
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    /// Innermost place first.
    places: Vec<String>,
    help: Option<String>,
}

/// A result whose error says where.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` with a message that says what was found and what was expected.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Box::new(Inner { kind, message: message.into(), places: Vec::new(), help: None }))
    }

    /// Adds an enclosing place, for example `node 'conv_1' (Conv)`.
    #[must_use]
    pub fn within(mut self, place: impl Into<String>) -> Error {
        self.0.places.push(place.into());
        self
    }

    /// Adds what the user can try; the first advice given stays.
    #[must_use]
    pub fn help(mut self, advice: impl Into<String>) -> Error {
        self.0.help.get_or_insert_with(|| advice.into());
        self
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The bare message, without kind and place.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.0.kind.name())?;
        for (index, place) in self.0.places.iter().rev().enumerate() {
            let separator = if index == 0 { "" } else { " > " };
            write!(f, "{separator}{place}")?;
        }
        if !self.0.places.is_empty() {
            write!(f, ": ")?;
        }
        write!(f, "{}", self.0.message)?;
        match &self.0.help {
            Some(help) => write!(f, "; {help}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

impl From<ort_alloc::AllocError> for Error {
    fn from(error: ort_alloc::AllocError) -> Error {
        Error::new(ErrorKind::OutOfMemory, error.to_string())
    }
}

/// Adds a place to the error of a result.
pub trait Within<T> {
    /// Wraps the error, if there is one, in the place that `place` names.
    fn within<S: Into<String>>(self, place: impl FnOnce() -> S) -> Result<T>;
}

impl<T> Within<T> for Result<T> {
    fn within<S: Into<String>>(self, place: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| error.within(place()))
    }
}

/// An [`Error`] of a kind with a formatted message: `error!(InvalidGraph, "rank {rank}")`.
#[macro_export]
macro_rules! error {
    ($kind:ident, $($message:tt)*) => {
        $crate::Error::new($crate::ErrorKind::$kind, format!($($message)*))
    };
}

/// Returns an [`Error`] when the condition does not hold: `ensure!(rank < 9, InvalidGraph, "rank {rank}")`, or with
/// advice `ensure!(rank < 9, InvalidGraph, help = "use fewer axes", "rank {rank}")`.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $kind:ident, help = $help:expr, $($message:tt)*) => {
        if !$condition {
            return Err($crate::error!($kind, $($message)*).help($help));
        }
    };
    ($condition:expr, $kind:ident, $($message:tt)*) => {
        if !$condition {
            return Err($crate::error!($kind, $($message)*));
        }
    };
}
