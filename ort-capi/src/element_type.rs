//! Element types: the numbers of `ONNXTensorElementDataType`.

use ort_runtime::DType;

use crate::status::{Outcome, code, fail};

/// The last types have other numbers in the C API than in ONNX.
const RENUMBERED: [(DType, i32); 3] = [(DType::U2, 24), (DType::I2, 25), (DType::F8E8M0, 26)];

/// Returns the number of a type.
pub(crate) fn number_of(dtype: DType) -> i32 {
    let renumbered = RENUMBERED.iter().find(|(known, _)| *known == dtype);
    renumbered.map_or_else(|| dtype.onnx_code(), |(_, number)| *number)
}

/// Returns the type of a number; `None` if there is none.
pub(crate) fn known(number: i32) -> Option<DType> {
    let renumbered = RENUMBERED.iter().find(|(_, known)| *known == number);
    renumbered.map_or_else(|| DType::from_onnx(number), |(dtype, _)| Some(*dtype))
}

/// Returns the type of a number that tensors may have.
pub(crate) fn of_number(number: i32) -> Outcome<DType> {
    match known(number) {
        Some(dtype) => Ok(dtype),
        None => {
            let text = format!("tensor type {number} is not supported; ONNXTensorElementDataType is 1 to 26");
            fail(code::NOT_IMPLEMENTED, text)
        }
    }
}
