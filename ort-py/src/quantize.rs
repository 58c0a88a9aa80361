//! Weight quantization: functions that write quantized weights into arrays of the caller.
//!
//! They have onnxruntime's names and parameters. Arrays keep any shape, because only the order of
//! their elements counts. What is written may be longer than needed; the rest is left as it is.

use half::f16;
use numpy::{
    Element, PyArrayDyn, PyArrayMethods, PyReadwriteArrayDyn, PyUntypedArray, PyUntypedArrayMethods,
};
use ort_quant::{Bits, BlockLayout, BlockQuantizer, Bnb4Quantizer, Bnb4Type, QuantizedBlocks, Weight};
use ort_runtime::DType;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::readable;
use crate::cancel::detached;
use crate::dtypes;
use crate::error::OrRaise;

/// Defines functions that quantize by blocks. Those for `DequantizeLinear` return whether the
/// values are signed, the others nothing.
macro_rules! block_functions {
    ($($name:ident: $doc:literal, $bits:ident, $layout:ident;)*) => {$(
        #[doc = $doc]
        #[pyfunction]
        #[pyo3(signature = (dst, src, scales, zero_points, block_size, n, k, is_symmetric, /))]
        #[allow(clippy::too_many_arguments, reason = "the parameters are onnxruntime's")]
        pub(crate) fn $name(
            dst: &Bound<'_, PyUntypedArray>,
            src: &Bound<'_, PyUntypedArray>,
            scales: &Bound<'_, PyUntypedArray>,
            zero_points: &Bound<'_, PyUntypedArray>,
            block_size: i64,
            n: i64,
            k: i64,
            is_symmetric: bool,
        ) -> PyResult<Option<bool>> {
            let quantizer = BlockQuantizer {
                k: size("k", k)?,
                n: size("n", n)?,
                block_size: size("block_size", block_size)?,
                bits: Bits::$bits,
                is_symmetric,
                layout: BlockLayout::$layout,
            };
            let arrays = BlockArrays { dst, src, scales, zero_points };
            match element_type(src)? {
                Float::F32 => arrays.fill::<f32>(quantizer)?,
                Float::F16 => arrays.fill::<f16>(quantizer)?,
            }
            Ok((quantizer.layout == BlockLayout::Qdq).then_some(is_symmetric))
        }
    )*};
}

block_functions! {
    quantize_matmul_2bits: "Quantizes to 2 bits for `MatMulNBits`.", Two, MatMulNBits;
    quantize_matmul_4bits: "Quantizes to 4 bits for `MatMulNBits`.", Four, MatMulNBits;
    quantize_matmul_8bits: "Quantizes to 8 bits for `MatMulNBits`.", Eight, MatMulNBits;
    quantize_qdq_matmul_2bits: "Quantizes to 2 bits for `DequantizeLinear`.", Two, Qdq;
    quantize_qdq_matmul_4bits: "Quantizes to 4 bits for `DequantizeLinear`.", Four, Qdq;
}

/// Quantizes to FP4 (type 0) or NF4 (type 1) for `MatMulBnb4`.
#[pyfunction]
#[pyo3(signature = (dst, src, absmax, block_size, quant_type, n, k, /))]
pub(crate) fn quantize_matmul_bnb4(
    dst: &Bound<'_, PyUntypedArray>,
    src: &Bound<'_, PyUntypedArray>,
    absmax: &Bound<'_, PyUntypedArray>,
    block_size: i64,
    quant_type: i64,
    n: i64,
    k: i64,
) -> PyResult<()> {
    let data_type = match quant_type {
        0 => Bnb4Type::Fp4,
        1 => Bnb4Type::Nf4,
        _ => {
            let text = format!("quant_type: {quant_type}, expected 0 (FP4) or 1 (NF4)");
            return Err(PyValueError::new_err(text));
        }
    };
    let quantizer = Bnb4Quantizer { block_size: size("block_size", block_size)?, data_type };
    let expected = size("n", n)?.checked_mul(size("k", k)?);
    if expected != Some(src.len()) {
        let text = format!("src: {} elements, expected {k} x {n}", src.len());
        return Err(PyValueError::new_err(text));
    }
    match element_type(src)? {
        Float::F32 => fill_bnb4::<f32>(quantizer, dst, src, absmax),
        Float::F16 => fill_bnb4::<f16>(quantizer, dst, src, absmax),
    }
}

/// The arguments that are arrays.
struct BlockArrays<'a, 'py> {
    dst: &'a Bound<'py, PyUntypedArray>,
    src: &'a Bound<'py, PyUntypedArray>,
    scales: &'a Bound<'py, PyUntypedArray>,
    zero_points: &'a Bound<'py, PyUntypedArray>,
}

impl BlockArrays<'_, '_> {
    fn fill<T: Weight + Element>(&self, quantizer: BlockQuantizer) -> PyResult<()> {
        let py = self.src.py();
        let sizes = quantizer.sizes().or_raise(py)?;
        let src = readable(self.src)?;
        let src = typed::<T>("src", &src)?.try_readonly()?;
        let weights = src.as_slice()?;
        let mut dst = writable::<u8>("dst", self.dst)?;
        let mut scales = writable::<T>("scales", self.scales)?;
        // Symmetric blocks have no zero points; then the array may be anything.
        let mut zero_points = match quantizer.is_symmetric {
            true => None,
            false => Some(writable::<u8>("zero_points", self.zero_points)?),
        };
        let out = QuantizedBlocks {
            codes: prefix("dst", &mut dst, sizes.codes)?,
            scales: prefix("scales", &mut scales, sizes.scales)?,
            zero_points: match &mut zero_points {
                Some(array) => prefix("zero_points", array, sizes.zero_points)?,
                None => &mut [],
            },
        };
        detached(py, || quantizer.quantize(weights, out)).or_raise(py)
    }
}

fn fill_bnb4<T: Weight + Element>(
    quantizer: Bnb4Quantizer,
    dst: &Bound<'_, PyUntypedArray>,
    src: &Bound<'_, PyUntypedArray>,
    absmax: &Bound<'_, PyUntypedArray>,
) -> PyResult<()> {
    let py = src.py();
    let sizes = quantizer.sizes(src.len()).or_raise(py)?;
    let src = readable(src)?;
    let src = typed::<T>("src", &src)?.try_readonly()?;
    let weights = src.as_slice()?;
    let mut dst = writable::<u8>("dst", dst)?;
    let mut absmax = writable::<T>("absmax", absmax)?;
    let codes = prefix("dst", &mut dst, sizes.codes)?;
    let absmax = prefix("absmax", &mut absmax, sizes.absmax)?;
    detached(py, || quantizer.quantize(weights, codes, absmax)).or_raise(py)
}

/// The element types of weights.
pub(crate) enum Float {
    F32,
    F16,
}

pub(crate) fn element_type(src: &Bound<'_, PyUntypedArray>) -> PyResult<Float> {
    match dtypes::of_descr(&src.dtype())? {
        Some(DType::F32) => Ok(Float::F32),
        Some(DType::F16) => Ok(Float::F16),
        _ => {
            let text = format!("src: an array of {}, expected float32 or float16", src.dtype());
            Err(PyTypeError::new_err(text))
        }
    }
}

/// Returns an argument as a size.
fn size(name: &str, value: i64) -> PyResult<usize> {
    usize::try_from(value).map_err(|_| PyValueError::new_err(format!("{name}: {value} is no size")))
}

/// Returns an array as one of this element type.
pub(crate) fn typed<'a, 'py, T: Element>(
    name: &str,
    array: &'a Bound<'py, PyUntypedArray>,
) -> PyResult<&'a Bound<'py, PyArrayDyn<T>>> {
    array.cast::<PyArrayDyn<T>>().map_err(|_| {
        let (found, expected) = (array.dtype(), numpy::dtype::<T>(array.py()));
        PyTypeError::new_err(format!("{name}: an array of {found}, expected {expected}"))
    })
}

/// Borrows an array for writing. Arguments that share memory are refused.
fn writable<'py, T: Element>(
    name: &str,
    array: &Bound<'py, PyUntypedArray>,
) -> PyResult<PyReadwriteArrayDyn<'py, T>> {
    let typed = typed::<T>(name, array)?;
    if !array.is_c_contiguous() || !array.is_aligned() {
        return Err(PyValueError::new_err(format!("{name}: the array is not contiguous and aligned")));
    }
    typed.try_readwrite().map_err(|problem| PyValueError::new_err(format!("{name}: {problem}")))
}

/// The first elements of an array.
fn prefix<'a, T: Element>(
    name: &str,
    array: &'a mut PyReadwriteArrayDyn<'_, T>,
    len: usize,
) -> PyResult<&'a mut [T]> {
    let elements = array.as_slice_mut()?;
    let found = elements.len();
    elements
        .get_mut(..len)
        .ok_or_else(|| PyValueError::new_err(format!("{name}: {found} elements, expected {len}")))
}
