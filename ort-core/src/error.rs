//! The crate's error type: the kind of failure, the place in the model, and advice.

use std::fmt;

use ort_alloc::{AllocError, exact_bytes};

use crate::text::{NAME_BYTES, into_shown, shown};

/// The advice attached to errors about a provider that panicked.
pub(crate) const DEFECT: &str = "this is a bug of the provider: report it to its authors";

/// The most bytes of a message and of the advice after it. Together with the places an error prints
/// in less than 4 KiB, however long the names in it are.
const MESSAGE_BYTES: usize = 2048;
const ADVICE_BYTES: usize = 768;
/// The most bytes of all places together.
const PLACES_BYTES: usize = 1024;

/// The kinds of failure, named after ONNX Runtime's status codes. A fault that ONNX Runtime detects
/// as well has the kind that it reports, because programs choose their handlers by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Shapes or types contradict each other, a graph has a cycle, data of a weight are missing, or
    /// something failed that no other kind describes.
    Fail,
    /// A value given by the caller does not fit: an input's name, type or shape, an option, an
    /// index. Also a model without a graph, and a node that reads a value that nothing produces.
    InvalidArgument,
    /// A file that was named does not exist.
    NoSuchFile,
    /// A compiled model is damaged, or another build made it.
    NoModel,
    /// A kernel failed while the model ran.
    RuntimeException,
    /// The bytes are not a valid protocol buffer message, such as text, an archive or a folder.
    InvalidProtobuf,
    /// The model uses something that this build cannot run.
    NotImplemented,
    /// A node contradicts the definition of its operator: its attributes, the number or the types
    /// of its inputs. Or ONNX has no such operator.
    InvalidGraph,
    /// An execution provider or its device failed.
    EpFail,
    /// A memory limit, or the machine's memory, does not suffice.
    OutOfMemory,
    /// The caller cancelled the run, or its deadline passed.
    Cancelled,
}

impl ErrorKind {
    /// Returns the kind in words. Error messages begin with it, except those of
    /// [`ErrorKind::Fail`].
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Fail => "failure",
            ErrorKind::InvalidArgument => "invalid argument",
            ErrorKind::NoSuchFile => "no such file",
            ErrorKind::NoModel => "unusable compiled model",
            ErrorKind::RuntimeException => "runtime failure",
            ErrorKind::InvalidProtobuf => "invalid file",
            ErrorKind::NotImplemented => "not implemented",
            ErrorKind::InvalidGraph => "invalid graph",
            ErrorKind::EpFail => "execution provider failure",
            ErrorKind::OutOfMemory => "out of memory",
            ErrorKind::Cancelled => "cancelled",
        }
    }
}

/// A failure with its place (`model > graph > node(op) > provider > input`) and advice.
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
    places: Vec<Place>,
    help: Option<String>,
    shortage: Option<Box<MemoryShortage>>,
}

/// A place that encloses an error.
#[derive(Clone)]
struct Place {
    text: String,
    /// Name and operator, if the place is a node that was running.
    node: Option<[String; 2]>,
}

/// The memory that a session could not get, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryShortage {
    /// The bytes needed.
    pub needed: usize,
    /// The bytes available.
    pub available: usize,
    /// The limit in force.
    pub limit: usize,
    /// The largest consumers by name, largest first: tensors of the request, or what holds the
    /// memory.
    pub largest: Vec<(String, usize)>,
}

impl MemoryShortage {
    /// Returns the smallest limit at which the same request succeeds, everything else unchanged.
    pub fn sufficient_limit(&self) -> usize {
        self.limit.saturating_add(self.missing())
    }

    /// Returns how many bytes the request exceeds the available memory by.
    pub fn missing(&self) -> usize {
        self.needed.saturating_sub(self.available)
    }
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryShortage { needed, available, limit, largest } = self;
        let [needed, available, limit] = [needed, available, limit].map(|bytes| exact_bytes(*bytes));
        write!(f, "{needed}, but {available} of the limit of {limit} are free")?;
        let held = self.limit.saturating_sub(self.available);
        if held > 0 {
            write!(f, " (constants, outputs and other runs hold {})", exact_bytes(held))?;
        }
        for (index, (name, bytes)) in largest.iter().enumerate() {
            let separator = if index == 0 { "; the largest at the peak are" } else { "," };
            // The name of a workspace has that of its node in quotes.
            let quote = if name.contains('\'') { "" } else { "'" };
            write!(f, "{separator} {quote}{name}{quote} {}", exact_bytes(*bytes))?;
        }
        Ok(())
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Creates an error of `kind`. The message says what was found and what was expected.
    ///
    /// Messages, places and advice contain names from model files. Characters that control a
    /// terminal are escaped and long texts are cut, so no error takes more than 4 KiB.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        let message = into_shown(message.into(), MESSAGE_BYTES);
        Error(Box::new(Inner { kind, message, places: Vec::new(), help: None, shortage: None }))
    }

    /// Creates an [`ErrorKind::OutOfMemory`] error: `subject`, such as "the run", needs more memory
    /// than is available.
    pub fn out_of_memory(subject: &str, shortage: MemoryShortage) -> Error {
        let mut error = Error::new(ErrorKind::OutOfMemory, format!("{subject} needs {shortage}"));
        error.0.shortage = Some(Box::new(shortage));
        error
    }

    /// Adds an enclosing place, for example `node 'conv_1' (Conv)`.
    #[must_use]
    pub fn within(mut self, place: impl Into<String>) -> Error {
        self.0.places.push(Place { text: into_shown(place.into(), NAME_BYTES), node: None });
        self
    }

    /// Adds the node that was running as an enclosing place. The text is that of
    /// [`within`](Self::within); [`nodes`](Self::nodes) returns the parts.
    ///
    /// ```
    /// use ort_core::{Error, ErrorKind};
    /// let error = Error::new(ErrorKind::Fail, "3 and 4 differ")
    ///     .at_node("mul", "MatMul")
    ///     .within("then_branch")
    ///     .at_node("choice", "If");
    /// assert_eq!(
    ///     error.to_string(),
    ///     "node 'choice' (If) > then_branch > node 'mul' (MatMul): 3 and 4 differ"
    /// );
    /// assert_eq!(error.nodes().collect::<Vec<_>>(), [("choice", "If"), ("mul", "MatMul")]);
    /// assert_eq!(error.without_nodes(), "then_branch: 3 and 4 differ");
    /// ```
    #[must_use]
    pub fn at_node(mut self, name: &str, op: &str) -> Error {
        let text = into_shown(format!("node '{name}' ({op})"), NAME_BYTES);
        let node = [name, op].map(|part| shown(part, NAME_BYTES).into_owned());
        self.0.places.push(Place { text, node: Some(node) });
        self
    }

    /// Changes the kind to `to` if it is one of `from`.
    #[must_use]
    pub(crate) fn reclassified(mut self, from: &[ErrorKind], to: ErrorKind) -> Error {
        if from.contains(&self.0.kind) {
            self.0.kind = to;
        }
        self
    }

    /// Adds what the user can try. The first advice wins.
    #[must_use]
    pub fn help(mut self, advice: impl Into<String>) -> Error {
        self.0.help.get_or_insert_with(|| into_shown(advice.into(), ADVICE_BYTES));
        self
    }

    /// Replaces the advice of a budget, which knows nothing of the run, by that of the run.
    #[must_use]
    pub(crate) fn help_of_run(mut self, advice: impl Into<String>) -> Error {
        if self.0.help.as_deref() == Some(AllocError::BUDGET_ADVICE) {
            self.0.help = None;
        }
        self.help(advice)
    }

    /// Returns the kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns what was needed and available if a memory limit refused a session or a run.
    ///
    /// ```
    /// use ort_core::{Error, MemoryShortage};
    /// let shortage = MemoryShortage { needed: 300, available: 100, limit: 1000, largest: vec![("scores".into(), 200)] };
    /// let error = Error::out_of_memory("the run", shortage);
    /// assert_eq!(
    ///     error.to_string(),
    ///     "out of memory: the run needs 300 bytes, but 100 bytes of the limit of 1000 bytes are free \
    ///      (constants, outputs and other runs hold 900 bytes); the largest at the peak are 'scores' 200 bytes"
    /// );
    /// assert_eq!(error.shortage().map(MemoryShortage::sufficient_limit), Some(1200));
    /// ```
    pub fn shortage(&self) -> Option<&MemoryShortage> {
        self.0.shortage.as_deref()
    }

    /// Returns name and operator of the nodes that were running, outermost first: a node with a
    /// subgraph comes before the node in it. Empty if the error is not that of a run.
    pub fn nodes(&self) -> impl Iterator<Item = (&str, &str)> {
        let nodes = self.0.places.iter().rev().filter_map(|place| place.node.as_ref());
        nodes.map(|[name, op]| (name.as_str(), op.as_str()))
    }

    /// Returns the error's text without its kind and its [`nodes`](Self::nodes).
    pub fn without_nodes(&self) -> String {
        let text = self.located(false);
        match &self.0.help {
            Some(help) => format!("{text}; {help}"),
            None => text,
        }
    }

    /// Returns the message with its places, without kind and advice.
    pub(crate) fn located_message(&self) -> String {
        self.located(true)
    }

    /// Returns the message with its places. `with_nodes` keeps the nodes that were running.
    fn located(&self, with_nodes: bool) -> String {
        // Places are pushed while the error travels outward, so the outermost is the last.
        let places = self.0.places.iter().rev().filter(|place| with_nodes || place.node.is_none());
        let places: Vec<&str> = places.map(|place| place.text.as_str()).collect();
        match places.as_slice() {
            [] => self.0.message.clone(),
            places => format!("{}: {}", shown(&places.join(" > "), PLACES_BYTES), self.0.message),
        }
    }

    /// Returns what the user can try.
    pub(crate) fn advice(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    /// Returns the bare message, without kind and place.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // That it failed is known from its being an error.
        if self.0.kind != ErrorKind::Fail {
            write!(f, "{}: ", self.0.kind.name())?;
        }
        f.write_str(&self.located(true))?;
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

impl From<AllocError> for Error {
    fn from(error: AllocError) -> Error {
        match error {
            AllocError::Failed { reason } => {
                return Error::new(ErrorKind::RuntimeException, reason).help(DEFECT);
            }
            AllocError::Unsupported { .. } => {
                return Error::new(ErrorKind::InvalidArgument, error.to_string());
            }
            AllocError::Interrupted { reason } => return Error::new(ErrorKind::Cancelled, reason),
            _ => {}
        }
        let text = error.to_string();
        // The advice of a budget is the end of its text.
        let stated = text.strip_suffix(AllocError::BUDGET_ADVICE).and_then(|text| text.strip_suffix("; "));
        let mut refusal = Error::new(ErrorKind::OutOfMemory, stated.unwrap_or(&text));
        if stated.is_some() {
            refusal = refusal.help(AllocError::BUDGET_ADVICE);
        }
        if let AllocError::BudgetExceeded { needed, available, limit, largest, .. } = error {
            let largest =
                largest.into_iter().map(|(category, bytes)| (category.to_string(), bytes)).collect();
            refusal.0.shortage = Some(Box::new(MemoryShortage { needed, available, limit, largest }));
        }
        refusal
    }
}

/// Adds a place to the error of a result.
pub trait Within<T> {
    /// Wraps the error, if there is one, in the place that `place` returns.
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

/// Returns an [`Error`] from the function unless the condition holds.
///
/// Without advice: `ensure!(rank < 9, InvalidGraph, "rank {rank}")`.
/// With advice: `ensure!(rank < 9, InvalidGraph, help = "use fewer axes", "rank {rank}")`.
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
