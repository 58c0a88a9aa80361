//! ONNX files: their messages, where their bytes come from, and the way to the graph and back.

mod external;
pub mod proto;
mod recognise;
mod source;

pub use external::{ExternalData, Location};
pub use source::{FileAccess, Source};
