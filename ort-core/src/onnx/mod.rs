//! ONNX files: protobuf messages, byte sources, and conversion to and from the graph.

mod build;
mod changes;
mod declared;
mod expansion;
mod external;
mod files;
mod flatbuffer;
mod initializers;
mod load;
mod names;
mod node;
mod order;
mod ort_format;
pub mod proto;
mod recognise;
mod save;
mod source;
mod tensor;
mod types;
mod value;
mod visit;
mod warnings;

pub use changes::LoadOptions;
pub use declared::{DeclaredShapes, DeclaredSize};
pub use external::{ExternalData, Location};
pub use files::FileAccess;
pub(crate) use load::load_warning;
pub use load::{LoadedModel, ModelInfo, NEWEST_OPSET, UnknownOperator, load, load_proto, unknown_operators};
pub(crate) use save::save_located;
pub use save::{MESSAGE_LIMIT, Weights, data_file, refer_to, save, to_proto};
pub use source::Source;
pub use tensor::{sparse_from_proto, sparse_to_proto, tensor_from_proto, tensor_to_proto};
pub use value::{tensor_name, value_from_bytes, value_to_bytes};
pub use visit::{visit_node_tensors, visit_tensors};
pub(crate) use warnings::Warnings;
pub use warnings::{ModelWarning, WarningKind};
