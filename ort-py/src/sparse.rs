//! `SparseTensor`: the format COO of ONNX, and CSR and blocks as callers may give them.

use numpy::PyUntypedArray;
use ort_runtime::{Error, ErrorKind, Tensor, tensor};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::arrays::{array_of, tensor_of};
use crate::dtypes::type_name;
use crate::error::OrRaise;

/// A sparse tensor. Its elements and their places are arrays.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
#[derive(Clone)]
pub(crate) struct SparseTensor {
    /// What runs read.
    inner: tensor::SparseTensor,
    given: Given,
}

/// The format that a sparse tensor was given in, and what COO does not tell of it.
#[derive(Clone)]
enum Given {
    Coo,
    /// Column indices and row pointers.
    Csr([Tensor; 2]),
    /// Blocks of elements, and a column of coordinates for each.
    Blocks {
        values: Tensor,
        indices: Tensor,
    },
}

impl SparseTensor {
    pub(crate) fn new(inner: tensor::SparseTensor) -> SparseTensor {
        SparseTensor { inner, given: Given::Coo }
    }

    pub(crate) fn inner(&self) -> &tensor::SparseTensor {
        &self.inner
    }
}

/// Refuses places outside of the shape.
fn check_places(sparse: &tensor::SparseTensor) -> ort_runtime::Result<()> {
    let places = sparse.indices.to_vec::<i64>()?;
    let refused = |place: &[i64]| {
        let text = format!("place {place:?} is outside of shape {:?}", sparse.shape);
        Error::new(ErrorKind::InvalidArgument, text)
    };
    let is_inside = |place: i64, size: usize| usize::try_from(place).is_ok_and(|place| place < size);
    let rank = sparse.shape.len();
    match sparse.indices.shape() {
        [_] => {
            let size = sparse.shape.iter().try_fold(1_usize, |size, dim| size.checked_mul(*dim));
            let size = size.ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("shape {:?} is too large", sparse.shape))
            })?;
            match places.iter().find(|place| !is_inside(**place, size)) {
                Some(place) => Err(refused(&[*place])),
                None => Ok(()),
            }
        }
        [_, columns] if *columns == rank && rank > 0 => {
            let fits =
                |row: &&[i64]| row.iter().zip(&sparse.shape).all(|(place, size)| is_inside(*place, *size));
            match places.chunks(rank).find(|row| !fits(row)) {
                Some(row) => Err(refused(row)),
                None => Ok(()),
            }
        }
        other => {
            let text = format!("places of shape {other:?} do not name elements of rank {rank}");
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}

/// Returns the linear places of the elements of blocks, in the order of memory. `blocks` are the
/// coordinates of each block, counted in blocks of this height and width.
fn places_of_blocks(shape: [usize; 2], blocks: &[[i32; 2]], [height, width]: [usize; 2]) -> Option<Vec<i64>> {
    let [rows, columns] = shape;
    if height == 0 || width == 0 {
        return Some(Vec::new());
    }
    let mut places = Vec::with_capacity(blocks.len() * height * width);
    for block in blocks {
        let [top, left] = [usize::try_from(block[0]).ok()?, usize::try_from(block[1]).ok()?];
        let (top, left) = (top.checked_mul(height)?, left.checked_mul(width)?);
        let is_inside = top.checked_add(height)? <= rows && left.checked_add(width)? <= columns;
        for row in (top..top + height).filter(|_| is_inside) {
            for column in left..left + width {
                places.push(i64::try_from(row.checked_mul(columns)?.checked_add(column)?).ok()?);
            }
        }
        if !is_inside {
            return None;
        }
    }
    Some(places)
}

/// Returns an array that cannot be written.
fn read_only<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let array = array_of(py, tensor)?;
    array.getattr(intern!(py, "flags"))?.setattr(intern!(py, "writeable"), false)?;
    Ok(array)
}

#[pymethods]
impl SparseTensor {
    /// Makes a tensor of format COO: linear places, or one row of coordinates for each element.
    #[staticmethod]
    #[pyo3(signature = (dense_shape, values, indices, device=None))]
    fn sparse_coo_from_numpy(
        dense_shape: Vec<usize>,
        values: &Bound<'_, PyUntypedArray>,
        indices: &Bound<'_, PyUntypedArray>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<SparseTensor> {
        let py = values.py();
        crate::device::require_host(device)?;
        let (values, indices) = (tensor_of(values)?, tensor_of(indices)?);
        if indices.shape().first() != values.shape().first() {
            let [places, count] = [indices.shape(), values.shape()];
            let text = format!("there are {count:?} values for places of shape {places:?}");
            return Err(PyRuntimeError::new_err(text));
        }
        let inner = tensor::SparseTensor { values, indices, shape: dense_shape.into_iter().collect() };
        check_places(&inner).or_raise(py)?;
        Ok(SparseTensor::new(inner))
    }

    /// Makes a tensor of format CSR from column indices (`inner`) and row pointers (`outer`).
    #[staticmethod]
    #[pyo3(signature = (dense_shape, values, inner, outer, device=None))]
    fn sparse_csr_from_numpy(
        dense_shape: Vec<usize>,
        values: &Bound<'_, PyUntypedArray>,
        inner: &Bound<'_, PyUntypedArray>,
        outer: &Bound<'_, PyUntypedArray>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<SparseTensor> {
        crate::device::require_host(device)?;
        let py = values.py();
        let [rows, columns] = dense_shape[..] else {
            return Err(PyRuntimeError::new_err(format!("format CSR has two sizes, not {dense_shape:?}")));
        };
        let csr = [tensor_of(inner)?, tensor_of(outer)?];
        let [places, starts] = [csr[0].to_vec::<i64>().or_raise(py)?, csr[1].to_vec::<i64>().or_raise(py)?];
        let refused = || PyRuntimeError::new_err("the indices of format CSR do not describe the rows");
        // A tensor without elements needs no rows.
        let is_empty = places.is_empty() && starts.is_empty();
        if !is_empty
            && (Some(starts.len()) != rows.checked_add(1)
                || starts.last().copied() != i64::try_from(places.len()).ok())
        {
            return Err(refused());
        }
        let mut linear = Vec::with_capacity(places.len());
        for (row, pair) in starts.windows(2).enumerate() {
            let range = usize::try_from(pair[0]).and_then(|first| Ok(first..usize::try_from(pair[1])?));
            let columns_of = range.ok().and_then(|range| places.get(range)).ok_or_else(refused)?;
            for column in columns_of {
                let column = usize::try_from(*column).ok().filter(|column| *column < columns);
                let place = row.checked_mul(columns).zip(column);
                let place = place.and_then(|(start, column)| i64::try_from(start.checked_add(column)?).ok());
                linear.push(place.ok_or_else(refused)?);
            }
        }
        let indices = Tensor::from_slice(&[linear.len()], &linear).or_raise(py)?;
        let shape = dense_shape.into_iter().collect();
        let values = tensor_of(values)?;
        if values.shape() != indices.shape() {
            return Err(refused());
        }
        let inner = tensor::SparseTensor { values, indices, shape };
        check_places(&inner).or_raise(py)?;
        Ok(SparseTensor { inner, given: Given::Csr(csr) })
    }

    /// Makes a tensor of two sizes from blocks, [count, height, width], and their coordinates,
    /// [2, count], counted in blocks.
    #[staticmethod]
    fn blocksparse_from_numpy(
        dense_shape: Vec<usize>,
        values: &Bound<'_, PyUntypedArray>,
        indices: &Bound<'_, PyUntypedArray>,
        device: &Bound<'_, PyAny>,
    ) -> PyResult<SparseTensor> {
        crate::device::require_host(Some(device))?;
        let py = values.py();
        let (values, indices) = (tensor_of(values)?, tensor_of(indices)?);
        let refused = |text: String| Err(PyRuntimeError::new_err(text));
        let &[count, height, width] = values.shape() else {
            let rank = values.shape().len();
            return refused(format!("Expecting values to have 3-D shape. Got: {rank}"));
        };
        let &[axes, places] = indices.shape() else {
            let rank = indices.shape().len();
            return refused(format!("Expecting indices to have 2-D shape. Got: {rank}"));
        };
        if places != count {
            let text = format!("Expecting index blocks: {places} to be equal to values blocks: {count}");
            return refused(text);
        }
        let &[rows, columns] = dense_shape.as_slice() else {
            return refused(format!("a tensor of blocks has two sizes, not {dense_shape:?}"));
        };
        if axes != 2 {
            return refused(format!("a block has two coordinates, not {axes}"));
        }
        let Some(bytes) = values.bytes().cloned() else {
            return refused("blocks of strings are not supported".to_owned());
        };
        let coordinates = indices.to_vec::<i32>().or_raise(py)?;
        let (tops, lefts) = coordinates.split_at(count);
        let blocks: Vec<[i32; 2]> = tops.iter().zip(lefts).map(|(top, left)| [*top, *left]).collect();
        let Some(linear) = places_of_blocks([rows, columns], &blocks, [height, width]) else {
            return refused(format!("a block is outside of shape {dense_shape:?}"));
        };
        let inner = tensor::SparseTensor {
            values: Tensor::from_bytes(values.dtype(), &[linear.len()], bytes).or_raise(py)?,
            indices: Tensor::from_slice(&[linear.len()], &linear).or_raise(py)?,
            shape: dense_shape.into_iter().collect(),
        };
        Ok(SparseTensor { inner, given: Given::Blocks { values, indices } })
    }

    /// Returns the elements, read-only.
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.given {
            Given::Blocks { values, .. } => read_only(py, values),
            _ => read_only(py, &self.inner.values),
        }
    }

    /// Returns the places of format COO, read-only.
    fn coo_indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.given {
            Given::Coo => read_only(py, &self.inner.indices),
            _ => Err(PyRuntimeError::new_err("This sparse tensor does not contain COO format")),
        }
    }

    /// Returns column indices and row pointers of format CSR, read-only.
    fn csr_indices<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        match &self.given {
            Given::Csr([inner, outer]) => Ok((read_only(py, inner)?, read_only(py, outer)?)),
            _ => Err(PyRuntimeError::new_err("This sparse tensor does not contain CSR(C) format")),
        }
    }

    /// Returns the coordinates of blocks, a column for each, read-only.
    fn block_indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.given {
            Given::Blocks { indices, .. } => read_only(py, indices),
            _ => Err(PyRuntimeError::new_err("This sparse tensor does not contain BlockSparse format")),
        }
    }

    /// Returns the sizes of the dense tensor.
    fn dense_shape(&self) -> Vec<usize> {
        self.inner.shape.to_vec()
    }

    /// The format, as `OrtSparseFormat`.
    #[getter]
    fn format<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let number = match self.given {
            Given::Coo => 1,
            Given::Csr(_) => 2,
            Given::Blocks { .. } => 4,
        };
        py.import("ort_runtime.capi._enums")?.getattr("OrtSparseFormat")?.call1((number,))
    }

    /// The name of the memory: sparse tensors lie in the host's.
    fn device_name(&self) -> &'static str {
        "Cpu"
    }

    /// Raises RuntimeError: sparse tensors stay in host memory.
    fn to_cuda(&self, device: &Bound<'_, PyAny>) -> PyResult<()> {
        let _ = device;
        Err(PyRuntimeError::new_err("Cuda is not available in this build"))
    }

    /// Returns the type as text, such as `sparse_tensor(float)`.
    fn data_type(&self) -> String {
        format!("sparse_tensor({})", type_name(self.inner.values.dtype()))
    }

    /// Returns the dense tensor as an array.
    fn to_dense<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array_of(py, &self.inner.to_dense().or_raise(py)?)
    }
}
