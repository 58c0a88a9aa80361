//! Element types: ONNX's, as numpy types and as the type strings of onnxruntime.

use numpy::{PyArrayDescr, PyArrayDescrMethods};
use ort_runtime::DType;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;

/// An element type and its names elsewhere.
struct Row {
    dtype: DType,
    /// In a type string such as `tensor(float)`.
    name: &'static str,
    /// numpy's name, or that of the package `ml_dtypes`.
    numpy: &'static str,
    /// Whether the type is of `ml_dtypes`.
    is_extended: bool,
}

const fn row(dtype: DType, name: &'static str, numpy: &'static str, is_extended: bool) -> Row {
    Row { dtype, name, numpy, is_extended }
}

const ROWS: &[Row] = &[
    row(DType::F32, "float", "float32", false),
    row(DType::U8, "uint8", "uint8", false),
    row(DType::I8, "int8", "int8", false),
    row(DType::U16, "uint16", "uint16", false),
    row(DType::I16, "int16", "int16", false),
    row(DType::I32, "int32", "int32", false),
    row(DType::I64, "int64", "int64", false),
    row(DType::String, "string", "object", false),
    row(DType::Bool, "bool", "bool", false),
    row(DType::F16, "float16", "float16", false),
    row(DType::F64, "double", "float64", false),
    row(DType::U32, "uint32", "uint32", false),
    row(DType::U64, "uint64", "uint64", false),
    row(DType::C64, "complex64", "complex64", false),
    row(DType::C128, "complex128", "complex128", false),
    row(DType::BF16, "bfloat16", "bfloat16", true),
    row(DType::F8E4M3FN, "float8e4m3fn", "float8_e4m3fn", true),
    row(DType::F8E4M3FNUZ, "float8e4m3fnuz", "float8_e4m3fnuz", true),
    row(DType::F8E5M2, "float8e5m2", "float8_e5m2", true),
    row(DType::F8E5M2FNUZ, "float8e5m2fnuz", "float8_e5m2fnuz", true),
    row(DType::U4, "uint4", "uint4", true),
    row(DType::I4, "int4", "int4", true),
    row(DType::F4E2M1, "float4e2m1", "float4_e2m1fn", true),
    row(DType::F8E8M0, "float8e8m0", "float8_e8m0fnu", true),
    row(DType::U2, "uint2", "uint2", true),
    row(DType::I2, "int2", "int2", true),
];

fn row_of(dtype: DType) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.dtype == dtype)
}

/// Returns the name in a type string.
pub(crate) fn type_name(dtype: DType) -> &'static str {
    row_of(dtype).map_or("undefined", |row| row.name)
}

/// Returns the type of ONNX's code.
pub(crate) fn of_code(code: i64) -> Option<DType> {
    ROWS.iter().map(|row| row.dtype).find(|dtype| i64::from(dtype.onnx_code()) == code)
}

/// Returns the type of an array's elements; `None` if ONNX has none like it.
pub(crate) fn of_descr(descr: &Bound<'_, PyArrayDescr>) -> PyResult<Option<DType>> {
    Ok(match (descr.kind(), descr.itemsize()) {
        (b'f', 4) => Some(DType::F32),
        (b'f', 8) => Some(DType::F64),
        (b'f', 2) if !is_extended(descr)? => Some(DType::F16),
        (b'i', 1) if !is_extended(descr)? => Some(DType::I8),
        (b'i', 2) => Some(DType::I16),
        (b'i', 4) => Some(DType::I32),
        (b'i', 8) => Some(DType::I64),
        (b'u', 1) if !is_extended(descr)? => Some(DType::U8),
        (b'u', 2) => Some(DType::U16),
        (b'u', 4) => Some(DType::U32),
        (b'u', 8) => Some(DType::U64),
        (b'b', 1) => Some(DType::Bool),
        (b'c', 8) => Some(DType::C64),
        (b'c', 16) => Some(DType::C128),
        (b'O' | b'U' | b'S' | b'T', _) => Some(DType::String),
        (b'V', _) if !is_extended(descr)? => Some(DType::String),
        _ => {
            let name = descr.getattr("name")?.cast_into::<PyString>()?;
            let name = name.to_str()?;
            ROWS.iter().find(|row| row.is_extended && row.numpy == name).map(|row| row.dtype)
        }
    })
}

/// Whether a type was registered by a package, as `ml_dtypes` does; its number is above numpy's.
fn is_extended(descr: &Bound<'_, PyArrayDescr>) -> PyResult<bool> {
    Ok(descr.num() >= 256)
}

/// Returns the type that a caller names: a numpy type, a dtype, its name, or ONNX's code.
pub(crate) fn named(py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<DType> {
    if let Ok(code) = name.extract::<i64>() {
        return of_code(code)
            .ok_or_else(|| PyRuntimeError::new_err(format!("tensor type {code} is not supported")));
    }
    let descr = PyArrayDescr::new(py, name)
        .map_err(|problem| PyRuntimeError::new_err(format!("Not a valid numpy type: {problem}")))?;
    of_descr(&descr)?.ok_or_else(|| unknown(&descr))
}

/// The refusal of an element type.
pub(crate) fn unknown(descr: &Bound<'_, PyArrayDescr>) -> PyErr {
    PyRuntimeError::new_err(format!("Numpy_type {} can't be converted to MLDataType.", descr.num()))
}

/// Returns the numpy type of the arrays that hold elements of a type.
///
/// Types of `ml_dtypes` need that package. Without it they are an error, except 8-bit floats, which
/// are always `uint8`, as in onnxruntime.
pub(crate) fn descr_of(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyArrayDescr>> {
    static CACHE: PyOnceLock<parking_lot::Mutex<Vec<Option<Py<PyArrayDescr>>>>> = PyOnceLock::new();
    let place = usize::try_from(dtype.onnx_code()).unwrap_or(0);
    let cache = CACHE.get_or_init(py, || parking_lot::Mutex::new(Vec::new()));
    if let Some(Some(descr)) = cache.lock().get(place) {
        return Ok(descr.bind(py).clone());
    }
    let descr = new_descr(py, dtype)?;
    let mut known = cache.lock();
    if known.len() <= place {
        known.resize_with(place + 1, || None);
    }
    if let Some(entry) = known.get_mut(place) {
        *entry = Some(descr.clone().unbind());
    }
    Ok(descr)
}

fn new_descr(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyArrayDescr>> {
    let missing = || {
        let name = type_name(dtype);
        PyRuntimeError::new_err(format!("No corresponding Numpy type for Tensor Type. {name}"))
    };
    let row = row_of(dtype).ok_or_else(missing)?;
    if !row.is_extended {
        return PyArrayDescr::new(py, row.numpy);
    }
    if dtype.bits() == Some(8) {
        return PyArrayDescr::new(py, "uint8");
    }
    let package = py.import("ml_dtypes").map_err(|_| missing())?;
    PyArrayDescr::new(py, package.getattr(row.numpy)?)
}
