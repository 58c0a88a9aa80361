//! LoRA adapters: named tensors in a FlatBuffer with the identifier `TORT`, as ONNX Runtime's
//! `AdapterFormat` writes them.
//!
//! The root has the fields `format_version`, `adapter_version`, `model_version` (int32) and
//! `parameters`. A parameter has `name`, `dims` (int64), `data_type` (an ONNX element type) and
//! `raw_data`.

use bytes::Bytes;

use super::flatbuffer::{Buffer, Table};
use super::tensor::{from_raw, shape_of};
use super::types::dtype_from_code;
use crate::tensor::Tensor;
use crate::{Result, Within, ensure, error};

/// The version of the file format that ONNX Runtime writes.
const FORMAT_VERSION: i32 = 1;

/// Bytes that the tables may take besides the data that they lead to.
const TABLE_BYTES: u64 = 1 << 24;

/// Reads the parameters of an adapter, by name. Their data share the memory of `bytes`.
///
/// # Errors
///
/// The bytes are no adapter, of another format version, or damaged. A parameter without a shape,
/// of an unknown type, or with data that do not fill its shape.
pub fn read_adapter(bytes: Bytes) -> Result<Vec<(String, Tensor)>> {
    let is_adapter = bytes.get(4..8) == Some(b"TORT");
    ensure!(is_adapter, Fail, "The buffer does not appear to be a valid lora parameter format");
    let allowed = (bytes.len() as u64).saturating_mul(2).saturating_add(TABLE_BYTES);
    let buffer = Buffer::new(bytes, allowed);
    let damaged = |problem: crate::Error| {
        let text = problem.message().to_owned();
        error!(Fail, "The buffer fails lora adapter format verification: {text}")
            .help("download or copy the file again")
    };
    let root = buffer.root().map_err(damaged)?;
    let version = root.int32(0).map_err(damaged)?.unwrap_or_default();
    ensure!(version == FORMAT_VERSION, Fail, "Unsupported adapter format version: {version}");
    let parameters = root.tables(3, Parameter::read).map_err(damaged)?;
    parameters.into_iter().map(Parameter::tensor).collect()
}

/// A parameter as the file has it.
struct Parameter {
    name: String,
    dims: Vec<i64>,
    data_type: i32,
    data: Bytes,
}

impl Parameter {
    fn read(table: Table<'_>) -> Result<Parameter> {
        Ok(Parameter {
            name: table.text(0)?.unwrap_or_default(),
            dims: table.ints(1)?,
            data_type: table.int32(2)?.unwrap_or_default(),
            data: table.bytes(3)?.unwrap_or_default(),
        })
    }

    fn tensor(self) -> Result<(String, Tensor)> {
        let Parameter { name, dims, data_type, data } = self;
        ensure!(!name.is_empty(), Fail, "a Lora Param has no name");
        ensure!(!dims.is_empty(), Fail, "Lora Param '{name}': dims is missing or empty");
        let read = || from_raw(dtype_from_code(data_type)?, &shape_of(&dims)?, data);
        let tensor = read().within(|| format!("Lora Param '{name}'"))?;
        Ok((name, tensor))
    }
}
