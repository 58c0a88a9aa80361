//! Sparse tensors in all formats, copied and in memory of the caller.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ort_sys::{OrtMemoryInfo, OrtSparseFormat, OrtSparseIndicesFormat, OrtStatusPtr, OrtValue};

use crate::library::{api, call, element_type, json, make, memory_info, raw, refusal, string};

type Refused = Option<(i32, String)>;

/// A sparse tensor of floats without content.
fn empty(dims: &[i64]) -> *mut OrtValue {
    let allocator: *mut ort_sys::OrtAllocator = make!(GetAllocatorWithDefaultOptions());
    make!(CreateSparseTensorAsOrtValue(allocator, dims.as_ptr(), dims.len(), element_type(1)))
}

const VALUES: [f32; 8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];

/// Indices that fill a tensor.
enum Indices<'a> {
    Coo(&'a [i64]),
    Csr(&'a [i64], &'a [i64]),
    Blocks(&'a [i64], &'a [i32]),
}

fn fill(value: *mut OrtValue, dims: &[i64], indices: &Indices<'_>) -> Refused {
    let info: *const OrtMemoryInfo = memory_info();
    let (shape, rank, values) = (dims.as_ptr(), dims.len(), VALUES.as_ptr().cast::<c_void>());
    refusal(match indices {
        Indices::Coo(places) => {
            raw!(FillSparseTensorCoo(value, info, shape, rank, values, places.as_ptr(), places.len()))
        }
        Indices::Csr(inner, outer) => raw!(FillSparseTensorCsr(
            value,
            info,
            shape,
            rank,
            values,
            inner.as_ptr(),
            inner.len(),
            outer.as_ptr(),
            outer.len()
        )),
        Indices::Blocks(index_dims, places) => raw!(FillSparseTensorBlockSparse(
            value,
            info,
            shape,
            rank,
            values,
            index_dims.as_ptr(),
            index_dims.len(),
            places.as_ptr()
        )),
    })
}

struct Case {
    name: &'static str,
    dense: &'static [i64],
    values: &'static [i64],
    indices: Indices<'static>,
}

const fn case(
    name: &'static str,
    dense: &'static [i64],
    values: &'static [i64],
    indices: Indices<'static>,
) -> Case {
    Case { name, dense, values, indices }
}

use Indices::{Blocks, Coo, Csr};

const REFUSED: [Case; 19] = [
    case("linear index too large", &[9, 9], &[3], Coo(&[2, 3, 81])),
    case("linear index below zero", &[9, 9], &[3], Coo(&[-1, 3, 8])),
    case("pair too large", &[9, 9], &[3], Coo(&[0, 2, 0, 9, 9, 0])),
    case("too few indices", &[9, 9], &[3], Coo(&[5, 3])),
    case("pairs of three dimensions", &[2, 2, 2], &[3], Coo(&[0, 0, 0, 1, 1, 1])),
    case("too few rows", &[3, 3], &[3], Csr(&[0, 1, 2], &[0, 1, 3])),
    case("first row not at zero", &[3, 3], &[3], Csr(&[0, 1, 2], &[1, 1, 2, 3])),
    case("last row too small", &[3, 3], &[3], Csr(&[0, 1, 2], &[0, 1, 2, 2])),
    case("rows that go back", &[3, 3], &[3], Csr(&[0, 1, 2], &[0, 2, 1, 3])),
    case("column too large", &[3, 3], &[3], Csr(&[0, 1, 3], &[0, 1, 2, 3])),
    case("column below zero", &[3, 3], &[3], Csr(&[0, -1, 2], &[0, 1, 2, 3])),
    case("too few columns", &[3, 3], &[3], Csr(&[0, 1], &[0, 1, 2, 3])),
    case("rows of a vector", &[9], &[3], Csr(&[0, 1, 2], &[0, 1, 2, 3])),
    case("rows without columns", &[3, 3], &[0], Csr(&[], &[0, 0, 0, 0])),
    case("blocks of another number", &[8, 16], &[1, 2, 4], Blocks(&[2, 1], &[0, 1])),
    case("block indices of one dimension", &[8, 16], &[2, 2, 2], Blocks(&[4], &[0, 0, 0, 1])),
    case("block indices of one row", &[8, 16], &[2, 2, 2], Blocks(&[1, 2], &[0, 0])),
    case("blocks of two dimensions", &[8, 16], &[2, 4], Blocks(&[2, 2], &[0, 0, 0, 1])),
    case("negative shape of values", &[9, 9], &[-3], Coo(&[1, 2, 3])),
];

/// ONNX Runtime's texts have places of its source before ours.
#[test]
fn refusals_are_those_of_onnx_runtime() {
    let recorded = json("sparse.json");
    for Case { name, dense, values, indices } in &REFUSED {
        let value = empty(dense);
        let (code, text) = fill(value, values, indices).unwrap_or_else(|| panic!("'{name}' is not refused"));
        let expected = recorded.get(name).unwrap_or_else(|| panic!("'{name}' is not recorded"));
        assert_eq!(i64::from(code), expected["code"].as_i64().unwrap(), "{name}: {text}");
        let words = expected["text"].as_str().unwrap();
        assert!(words.contains(text.split(": [").next().unwrap()), "{name}: '{text}' is not in '{words}'");
        // A refused call leaves the tensor empty.
        assert!(make!(GetSparseTensorFormat(value)) == OrtSparseFormat::ORT_SPARSE_UNDEFINED, "{name}");
        raw!(ReleaseValue(value));
    }
    assert_eq!(REFUSED.len(), recorded.as_object().unwrap().len(), "each recorded case is tested");
}

/// The dimensions and the elements of indices.
fn indices(value: *const OrtValue, kind: OrtSparseIndicesFormat) -> (Vec<i64>, Vec<i64>) {
    let info: *mut ort_sys::OrtTensorTypeAndShapeInfo = make!(GetSparseTensorIndicesTypeShape(value, kind));
    let (mut count, mut data) = (0, null());
    call!(GetSparseTensorIndices(value, kind, &mut count, &mut data));
    let is_narrow = kind == OrtSparseIndicesFormat::ORT_SPARSE_BLOCK_SPARSE_INDICES;
    let element = |at: usize| -> i64 {
        // SAFETY: the tensor has as many indices, of this width.
        unsafe {
            if is_narrow { i64::from(*data.cast::<i32>().add(at)) } else { *data.cast::<i64>().add(at) }
        }
    };
    let dims = dims_of(info);
    raw!(ReleaseTensorTypeAndShapeInfo(info));
    (dims, (0..count).map(element).collect())
}

fn dims_of(info: *const ort_sys::OrtTensorTypeAndShapeInfo) -> Vec<i64> {
    let rank: usize = make!(GetDimensionsCount(info));
    let mut dims = vec![0; rank];
    call!(GetDimensions(info, dims.as_mut_ptr(), rank));
    dims
}

fn floats(value: *const OrtValue, count: usize) -> Vec<f32> {
    let data: *const c_void = make!(GetSparseTensorValues(value));
    // SAFETY: the tensor has as many values.
    unsafe { std::slice::from_raw_parts(data.cast::<f32>(), count) }.to_vec()
}

fn value_dims(value: *const OrtValue) -> Vec<i64> {
    let info: *mut ort_sys::OrtTensorTypeAndShapeInfo = make!(GetSparseTensorValuesTypeAndShape(value));
    let dims = dims_of(info);
    raw!(ReleaseTensorTypeAndShapeInfo(info));
    dims
}

use OrtSparseIndicesFormat::*;

#[test]
fn a_tensor_has_the_content_that_it_was_filled_with() {
    let linear = empty(&[9, 9]);
    assert_eq!(fill(linear, &[3], &Coo(&[2, 3, 5])), None);
    assert_eq!(indices(linear, ORT_SPARSE_COO_INDICES), (vec![3], vec![2, 3, 5]));
    let pairs = empty(&[9, 9]);
    assert_eq!(fill(pairs, &[3], &Coo(&[0, 2, 0, 3, 0, 5])), None);
    assert_eq!(indices(pairs, ORT_SPARSE_COO_INDICES), (vec![3, 2], vec![0, 2, 0, 3, 0, 5]));
    let rows = empty(&[3, 3]);
    assert_eq!(fill(rows, &[3], &Csr(&[0, 1, 2], &[0, 1, 2, 3])), None);
    assert_eq!(indices(rows, ORT_SPARSE_CSR_INNER_INDICES), (vec![3], vec![0, 1, 2]));
    assert_eq!(indices(rows, ORT_SPARSE_CSR_OUTER_INDICES), (vec![4], vec![0, 1, 2, 3]));
    let blocks = empty(&[8, 16]);
    assert_eq!(fill(blocks, &[2, 2, 2], &Blocks(&[2, 2], &[0, 0, 0, 1])), None);
    assert_eq!(indices(blocks, ORT_SPARSE_BLOCK_SPARSE_INDICES), (vec![2, 2], vec![0, 0, 0, 1]));
    assert_eq!(value_dims(blocks), [2, 2, 2]);
    for (value, count) in [(linear, 3), (pairs, 3), (rows, 3), (blocks, 8)] {
        assert_eq!(floats(value, count), VALUES[..count]);
        assert_eq!((make!(IsSparseTensor(value)), make!(IsTensor(value)), make!(HasValue(value))), (1, 0, 1));
        // It is filled once.
        assert_eq!(fill(value, &[3], &Coo(&[2, 3, 5])).map(|(code, _)| code), Some(1));
    }
    let info: *mut ort_sys::OrtTensorTypeAndShapeInfo = make!(GetTensorTypeAndShape(rows));
    assert_eq!(dims_of(info), [3, 3]);
    for value in [linear, pairs, rows, blocks] {
        raw!(ReleaseValue(value));
    }
}

fn view(dims: &[i64], values: &mut [f32], value_dims: &[i64]) -> *mut OrtValue {
    make!(CreateSparseTensorWithValuesAsOrtValue(
        memory_info(),
        values.as_mut_ptr().cast(),
        dims.as_ptr(),
        dims.len(),
        value_dims.as_ptr(),
        value_dims.len(),
        element_type(1)
    ))
}

#[test]
fn a_tensor_in_memory_of_the_caller_shows_what_is_written_there() {
    let (mut values, mut places) = (VALUES, vec![2i64, 3, 5]);
    let coo = view(&[9, 9], &mut values, &[3]);
    call!(UseCooIndices(coo, places.as_mut_ptr(), 3));
    (values[0], places[0]) = (42.0, 7);
    assert_eq!(floats(coo, 1), [42.0]);
    assert_eq!(indices(coo, ORT_SPARSE_COO_INDICES), (vec![3], vec![7, 3, 5]));
    let (mut inner, mut outer) = ([0i64, 1, 2], [0i64, 1, 2, 3]);
    let csr = view(&[3, 3], &mut values, &[3]);
    call!(UseCsrIndices(csr, inner.as_mut_ptr(), 3, outer.as_mut_ptr(), 4));
    assert_eq!(indices(csr, ORT_SPARSE_CSR_OUTER_INDICES), (vec![4], vec![0, 1, 2, 3]));
    let mut corners = [0i32, 0, 0, 1];
    let blocks = view(&[8, 16], &mut values, &[2, 2, 2]);
    call!(UseBlockSparseIndices(blocks, [2i64, 2].as_ptr(), 2, corners.as_mut_ptr()));
    assert_eq!(indices(blocks, ORT_SPARSE_BLOCK_SPARSE_INDICES), (vec![2, 2], vec![0, 0, 0, 1]));
    // Memory of the caller is not filled.
    let other = view(&[9, 9], &mut values, &[3]);
    assert_eq!(fill(other, &[3], &Coo(&[2, 3, 5])).map(|(code, _)| code), Some(1));
}

#[test]
fn strings_are_values_of_sparse_tensors() {
    let allocator: *mut ort_sys::OrtAllocator = make!(GetAllocatorWithDefaultOptions());
    let value: *mut OrtValue =
        make!(CreateSparseTensorAsOrtValue(allocator, [9i64, 9].as_ptr(), 2, element_type(8)));
    let texts = [c"a".as_ptr(), c"bb".as_ptr(), c"ccc".as_ptr()];
    let places = [2i64, 3, 5];
    let values = texts.as_ptr().cast();
    let info: *const OrtMemoryInfo = memory_info();
    call!(FillSparseTensorCoo(value, info, [3i64].as_ptr(), 1, values, places.as_ptr(), 3));
    assert_eq!(make!(GetStringTensorDataLength(value)), 6usize);
    let (mut buffer, mut offsets) = ([0u8; 7], [0usize; 3]);
    call!(GetStringTensorContent(value, buffer.as_mut_ptr().cast(), 6, offsets.as_mut_ptr(), 3));
    assert_eq!((string(buffer.as_ptr().cast()).as_str(), offsets), ("abbccc", [0, 1, 3]));
    let refused = refusal(raw!(GetSparseTensorValues(value, &mut null())));
    assert_eq!(refused, Some((2, "Use GetStringTensor*() API to retrieve strings".to_owned())));
    // Only the library can hold strings.
    let mut made = null_mut();
    let (info, dims) = (memory_info(), [9i64, 9]);
    let refused = refusal(raw!(CreateSparseTensorWithValuesAsOrtValue(
        info,
        texts.as_ptr().cast_mut().cast(),
        dims.as_ptr(),
        2,
        [3i64].as_ptr(),
        1,
        element_type(8),
        &mut made
    )));
    assert_eq!(refused.map(|(code, _)| code), Some(2));
}

#[test]
fn types_that_have_no_sparse_form_are_refused() {
    type Create = unsafe extern "C" fn(
        *mut ort_sys::OrtAllocator,
        *const i64,
        usize,
        i32,
        *mut *mut OrtValue,
    ) -> OrtStatusPtr;
    // SAFETY: an enumeration of C is an `i32`, and the library takes any number.
    let create = unsafe { std::mem::transmute::<usize, Create>(api().CreateSparseTensorAsOrtValue as usize) };
    let allocator: *mut ort_sys::OrtAllocator = make!(GetAllocatorWithDefaultOptions());
    for number in [0, 14, 16_777_215] {
        // SAFETY: the arguments are those that the header demands.
        let refused = refusal(unsafe { create(allocator, [9i64].as_ptr(), 1, number, &mut null_mut()) });
        assert_eq!(refused, Some((9, format!("sparse tensor type {number} is not supported"))));
    }
}
