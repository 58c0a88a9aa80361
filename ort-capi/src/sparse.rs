//! Sparse tensors: the formats COO, CSR and blocks, copied or in memory of the caller.

use std::ffi::c_void;

use ort_runtime::tensor::{SparseTensor, element_count};
use ort_runtime::{DType, Tensor, Value as EngineValue};

use crate::allocator::{Allocator, default_handle};
use crate::element_type::{known, number_of};
use crate::entry::{Array, In, InMut, Object, Out, Text, entries};
use crate::memory_info::MemoryInfo;
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::strings::Strings;
use crate::type_info::TensorInfo;
use crate::value::{Dims, Lent, Numbers, Value, sizes_of};

/// The numbers of `OrtSparseFormat`.
mod format {
    pub(super) const UNDEFINED: i32 = 0;
    pub(super) const COO: i32 = 1;
    pub(super) const CSR: i32 = 2;
    pub(super) const BLOCKS: i32 = 4;
}

/// A sparse tensor. It is empty until a caller fills it.
#[derive(Clone)]
pub(crate) struct Sparse {
    dtype: DType,
    dims: Dims,
    memory: Memory,
    content: Option<Filled>,
}

/// Where the values come from.
#[derive(Clone)]
enum Memory {
    /// Copies, in memory of an allocator.
    Own(Allocator),
    /// Memory of the caller.
    Lent(Box<Value>),
}

#[derive(Clone)]
struct Filled {
    /// Numbers or strings.
    values: Box<Value>,
    places: Places,
}

/// Where the values are in the dense tensor.
#[derive(Clone)]
enum Places {
    Coo(Numbers),
    Csr { inner: Numbers, outer: Numbers },
    Blocks(Numbers),
}

/// Indices that a caller gives.
enum GivenPlaces<'a> {
    Coo(&'a [i64]),
    Csr { inner: &'a [i64], outer: &'a [i64] },
    Blocks { dims: &'a [i64], data: *const i32 },
}

impl Sparse {
    /// The sparse result of a run, in COO.
    pub(crate) fn of_engine(tensor: &SparseTensor) -> Outcome<Sparse> {
        let values = Value::of_result(tensor.values.clone().into())?;
        let Value::Numbers(places) = Value::of_result(tensor.indices.clone().into())? else {
            return invalid("the indices of a sparse tensor are no numbers");
        };
        Ok(Sparse {
            dtype: tensor.values.dtype(),
            dims: crate::value::dims_of(&tensor.shape),
            memory: Memory::Own(default_handle()),
            content: Some(Filled { values: Box::new(values), places: Places::Coo(places) }),
        })
    }

    /// What a run reads.
    pub(crate) fn engine(&self) -> Outcome<EngineValue> {
        let content = self.content()?;
        let EngineValue::Tensor(values) = content.values.engine()? else {
            return invalid("the values of a sparse tensor are no tensor");
        };
        let shape = sizes_of(&self.dims)?;
        let indices = match &content.places {
            Places::Coo(places) => places.tensor().clone(),
            Places::Csr { inner, outer } => coordinates(inner.tensor(), outer.tensor())?,
            Places::Blocks(_) => {
                return fail(
                    code::NOT_IMPLEMENTED,
                    "runs take sparse tensors of COO and CSR, not of blocks".to_owned(),
                );
            }
        };
        Ok(EngineValue::Sparse(Box::new(SparseTensor { values, indices, shape })))
    }

    /// The number of the element type, and the sizes of the dense tensor.
    pub(crate) fn described(&self) -> (i32, &[i64]) {
        (number_of(self.dtype), &self.dims)
    }

    /// The values of a tensor of strings.
    pub(crate) fn strings(&self) -> Outcome<&Strings> {
        self.content()?.values.strings()
    }

    fn content(&self) -> Outcome<&Filled> {
        match &self.content {
            Some(content) => Ok(content),
            None => fail(code::FAIL, "Sparse Tensor does not contain sparse data".to_owned()),
        }
    }

    fn indices(&self, kind: i32) -> Outcome<&Numbers> {
        let is =
            |name: &str| fail(code::FAIL, format!("Must contain {name} format. Contains: {}", self.format()));
        match (kind, &self.content()?.places) {
            (0, Places::Coo(places)) | (3, Places::Blocks(places)) => Ok(places),
            (1, Places::Csr { inner, .. }) => Ok(inner),
            (2, Places::Csr { outer, .. }) => Ok(outer),
            (0, _) => is("Coo"),
            (1 | 2, _) => is("Csr"),
            (3, _) => is("BlockSparse"),
            _ => fail(code::FAIL, format!("Unsupported indices_format passed: {kind}; it is 0 to 3")),
        }
    }

    fn format(&self) -> i32 {
        match self.content.as_ref().map(|content| &content.places) {
            None => format::UNDEFINED,
            Some(Places::Coo(_)) => format::COO,
            Some(Places::Csr { .. }) => format::CSR,
            Some(Places::Blocks(_)) => format::BLOCKS,
        }
    }

    fn check_empty(&self) -> Outcome {
        match &self.content {
            None => Ok(()),
            Some(_) => fail(code::FAIL, "this tensor already has populated sparse_indices".to_owned()),
        }
    }

    /// Copies values and indices of the caller.
    fn fill(&mut self, values: &GivenValues<'_>, given: &GivenPlaces<'_>) -> Outcome {
        self.check_empty()?;
        let Memory::Own(allocator) = self.memory else {
            return fail(
                code::FAIL,
                "This method should follow a call to constructor that supplies the allocator".to_owned(),
            );
        };
        if values.dims.iter().any(|size| *size < 0) {
            let text = "tried Filling sparse tensor with negative value in values shape";
            return fail(code::FAIL, text.to_owned());
        }
        let values = values.copied(self.dtype, allocator)?;
        let copied = |places: Numbers| Numbers::copy(places.tensor(), allocator);
        let places = match self.places(given, &values)? {
            Places::Coo(places) => Places::Coo(copied(places)?),
            Places::Csr { inner, outer } => Places::Csr { inner: copied(inner)?, outer: copied(outer)? },
            Places::Blocks(places) => Places::Blocks(copied(places)?),
        };
        self.content = Some(Filled { values: Box::new(values), places });
        Ok(())
    }

    /// Takes indices in memory of the caller, for values that are there, too.
    fn take(&mut self, given: &GivenPlaces<'_>) -> Outcome {
        self.check_empty()?;
        let values = match &self.memory {
            Memory::Lent(values) => (**values).clone(),
            Memory::Own(allocator) => Value::Numbers(Numbers::allocated(self.dtype, &[0], *allocator)?),
        };
        let places = self.places(given, &values)?;
        self.content = Some(Filled { values: Box::new(values), places });
        Ok(())
    }

    /// Checks indices of the caller, which stay in its memory.
    fn places(&self, given: &GivenPlaces<'_>, values: &Value) -> Outcome<Places> {
        let (_, dims) = values.described()?;
        let count = element_count(&sizes_of(dims)?)?;
        match given {
            GivenPlaces::Coo(indices) => Ok(Places::Coo(self.coo(indices, count)?)),
            GivenPlaces::Csr { inner, outer } => {
                self.check_csr(inner, outer, count)?;
                let (inner, outer) = (lent_ints(inner, &[inner.len()])?, lent_ints(outer, &[outer.len()])?);
                Ok(Places::Csr { inner, outer })
            }
            GivenPlaces::Blocks { dims: index_dims, data } => {
                check_blocks(index_dims, dims)?;
                let (sizes, number) = (sizes_of(index_dims)?, number_of(DType::I32));
                let len = element_count(&sizes)?.saturating_mul(size_of::<i32>());
                let lent = Lent { data: data.cast_mut().cast(), len, dims: index_dims, number };
                Ok(Places::Blocks(lent.numbers(())?))
            }
        }
    }

    fn coo(&self, indices: &[i64], count: usize) -> Outcome<Numbers> {
        let is_linear = indices.len() == count;
        if !is_linear && Some(indices.len()) != count.checked_mul(2) {
            return invalid("COO indices count must be equal to or twice the values count.");
        }
        if is_linear {
            let total = i64::try_from(element_count(&sizes_of(&self.dims)?)?).unwrap_or(i64::MAX);
            if let Some(index) = indices.iter().find(|index| !(0..total).contains(*index)) {
                return invalid(format!("COO linear index out of bounds: {index} must be in [0, {total})"));
            }
            return lent_ints(indices, &[count]);
        }
        let [rows, columns] = self.dims[..] else {
            return invalid("COO 2D indices require dense shape of 2 dimensions");
        };
        for pair in indices.chunks_exact(2) {
            let [row, column] = *pair else { continue };
            if !(0..rows).contains(&row) || !(0..columns).contains(&column) {
                return invalid(format!(
                    "COO 2D index out of bounds: ({row}, {column}) must be in [0, {rows}) x [0, {columns})"
                ));
            }
        }
        lent_ints(indices, &[count, 2])
    }

    fn check_csr(&self, inner: &[i64], outer: &[i64], count: usize) -> Outcome {
        let [rows, columns] = self.dims[..] else {
            return fail(code::FAIL, format!("dense shape must 2-D. Got: {}", self.dims.len()));
        };
        if inner.is_empty() != outer.is_empty() {
            return fail(
                code::FAIL,
                "Inner and Outer indices must either be both zero or non-zero".to_owned(),
            );
        }
        let (Some(first), Some(last)) = (outer.first(), outer.last()) else {
            return match count {
                0 => Ok(()),
                _ => fail(code::FAIL, format!("there are no indices for {count} values")),
            };
        };
        let expected = usize::try_from(rows).unwrap_or(usize::MAX).saturating_add(1);
        if outer.len() != expected {
            return fail(
                code::FAIL,
                format!("Outer index count must be rows + 1 or zero. Got: {} rows: {rows}", outer.len()),
            );
        }
        if *first != 0 {
            return invalid(format!("CSR outer index must start at 0, got: {first}"));
        }
        if usize::try_from(*last) != Ok(inner.len()) {
            let count = inner.len();
            return invalid(format!(
                "CSR outer index last element must equal inner index count ({count}), got: {last}"
            ));
        }
        if let Some((_, next)) = outer.iter().zip(outer.iter().skip(1)).find(|(one, next)| next < one) {
            return invalid(format!(
                "CSR outer index out of bounds or not monotonically non-decreasing: {next}"
            ));
        }
        match inner.iter().find(|index| !(0..columns).contains(*index)) {
            Some(index) => {
                invalid(format!("CSR inner index out of bounds: {index} must be in [0, {columns})"))
            }
            None if inner.len() != count => {
                let text = "Inner index count must be equal to the values count";
                fail(code::FAIL, format!("{text}: {} and {count}", inner.len()))
            }
            None => Ok(()),
        }
    }
}

fn check_blocks(indices: &[i64], values: &[i64]) -> Outcome {
    let [2, blocks] = *indices else {
        return match indices.len() {
            2 => fail(code::FAIL, "Indices shape must have dim[0] == 2".to_owned()),
            // No blocks.
            1 if indices == [0] && values == [0] => Ok(()),
            rank => fail(code::FAIL, format!("Expecting indices to have 2-D shape . Got: {rank}")),
        };
    };
    if values.len() < 3 {
        return fail(code::FAIL, format!("Expecting to have at lest 3-D shape. Got:{}", values.len()));
    }
    let of_values: i64 = values.iter().skip(2).fold(1, |product, size| product.saturating_mul(*size));
    match blocks == of_values {
        true => Ok(()),
        false => fail(
            code::FAIL,
            format!("Expecting index blocks: {blocks} to be equal to values blocks: {of_values}"),
        ),
    }
}

/// The coordinates of the values of CSR.
fn coordinates(inner: &Tensor, outer: &Tensor) -> Outcome<Tensor> {
    let (inner, outer) = (inner.view().to_ints()?, outer.view().to_ints()?);
    let mut places = Vec::with_capacity(inner.len().saturating_mul(2));
    for (row, (start, end)) in outer.iter().zip(outer.iter().skip(1)).enumerate() {
        // The caller may have changed lent indices since they were checked.
        let range = usize::try_from(*start).ok().zip(usize::try_from(*end).ok());
        let columns = range.and_then(|(start, end)| inner.get(start..end)).ok_or_else(|| {
            Failure::invalid(format!(
                "CSR outer indices {start} and {end} are not those of {} values",
                inner.len()
            ))
        })?;
        for column in columns {
            places.extend([i64::try_from(row).unwrap_or(i64::MAX), *column]);
        }
    }
    Ok(Tensor::from_vec(&[inner.len(), 2], places)?)
}

/// Indices in memory of the caller.
fn lent_ints(indices: &[i64], sizes: &[usize]) -> Outcome<Numbers> {
    let dims = crate::value::dims_of(sizes);
    let (data, len) = (indices.as_ptr().cast_mut().cast(), size_of_val(indices));
    Lent { data, len, dims: &dims, number: number_of(DType::I64) }.numbers(())
}

/// Values that a caller gives.
struct GivenValues<'a> {
    dims: &'a [i64],
    data: *const c_void,
}

impl GivenValues<'_> {
    fn copied(&self, dtype: DType, allocator: Allocator) -> Outcome<Value> {
        let sizes = sizes_of(self.dims)?;
        let count = element_count(&sizes)?;
        if dtype == DType::String {
            let texts = Array::<Text>::of(self.data.cast());
            let texts = texts.get(count, "the array of strings")?;
            let strings = Strings::empty(&sizes)?;
            strings.set(texts)?;
            return Ok(Value::Strings(strings));
        }
        let len = ort_runtime::tensor::byte_count(dtype, &sizes)?;
        let lent = Lent { data: self.data.cast_mut(), len, dims: self.dims, number: number_of(dtype) };
        Ok(Value::Numbers(Numbers::copy(lent.numbers(())?.tensor(), allocator)?))
    }
}

fn sparse(value: &Value) -> Outcome<&Sparse> {
    match value {
        Value::Sparse(sparse) => Ok(sparse),
        _ => invalid("expected a sparse tensor, got another value"),
    }
}

fn sparse_mut(value: &mut Value) -> Outcome<&mut Sparse> {
    match value {
        Value::Sparse(sparse) => Ok(sparse),
        _ => invalid("expected a sparse tensor, got another value"),
    }
}

/// The element type of a sparse tensor. Complex numbers have no sparse form in ONNX Runtime.
fn sparse_type(number: i32) -> Outcome<DType> {
    match known(number).filter(|dtype| !matches!(dtype, DType::C64 | DType::C128)) {
        Some(dtype) => Ok(dtype),
        None => fail(code::NOT_IMPLEMENTED, format!("sparse tensor type {number} is not supported")),
    }
}

fn dense_dims(dims: &[i64]) -> Outcome<Dims> {
    sizes_of(dims)?;
    Ok(dims.iter().copied().collect())
}

entries! {
    /// 179
    fn CreateSparseTensorAsOrtValue(allocator: Allocator, dims: Array<i64>, rank: usize, number: i32, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        allocator.info()?;
        let dims = dense_dims(dims.get(rank, "the dense shape")?)?;
        let dtype = sparse_type(number)?;
        let sparse = Sparse { dtype, dims, memory: Memory::Own(allocator), content: None };
        out.put(Object::give(Value::Sparse(Box::new(sparse))));
        Ok(())
    }

    /// 180
    fn FillSparseTensorCoo(value: InMut<Value>, info: In<MemoryInfo>, dims: Array<i64>, rank: usize, data: *const c_void, indices: Array<i64>, count: usize) {
        let sparse = sparse_mut(value.get()?)?;
        info.get()?.require_host()?;
        let values = GivenValues { dims: dims.get(rank, "the shape of the values")?, data };
        sparse.fill(&values, &GivenPlaces::Coo(indices.get(count, "the array of indices")?))
    }

    /// 181
    fn FillSparseTensorCsr(value: InMut<Value>, info: In<MemoryInfo>, dims: Array<i64>, rank: usize, data: *const c_void, inner: Array<i64>, inner_count: usize, outer: Array<i64>, outer_count: usize) {
        let sparse = sparse_mut(value.get()?)?;
        info.get()?.require_host()?;
        let values = GivenValues { dims: dims.get(rank, "the shape of the values")?, data };
        let inner = inner.get(inner_count, "the array of inner indices")?;
        let outer = outer.get(outer_count, "the array of outer indices")?;
        sparse.fill(&values, &GivenPlaces::Csr { inner, outer })
    }

    /// 182
    fn FillSparseTensorBlockSparse(value: InMut<Value>, info: In<MemoryInfo>, dims: Array<i64>, rank: usize, data: *const c_void, index_dims: Array<i64>, index_rank: usize, indices: *const i32) {
        let sparse = sparse_mut(value.get()?)?;
        info.get()?.require_host()?;
        let values = GivenValues { dims: dims.get(rank, "the shape of the values")?, data };
        let dims = index_dims.get(index_rank, "the shape of the indices")?;
        sparse.fill(&values, &GivenPlaces::Blocks { dims, data: indices })
    }

    /// 183
    fn CreateSparseTensorWithValuesAsOrtValue(info: In<MemoryInfo>, data: *mut c_void, dims: Array<i64>, rank: usize, value_dims: Array<i64>, value_rank: usize, number: i32, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        info.get()?.require_host()?;
        let dims = dense_dims(dims.get(rank, "the dense shape")?)?;
        let dtype = sparse_type(number)?;
        if dtype == DType::String {
            return invalid(
                "Can not use strings in pre-allocated memory. Use CreateSparseTensorAsOrtValue() to allocate memory \
                 inside and copy",
            );
        }
        let value_dims = value_dims.get(value_rank, "the shape of the values")?;
        let len = ort_runtime::tensor::byte_count(dtype, &sizes_of(value_dims)?)?;
        let values = Lent { data, len, dims: value_dims, number }.numbers(())?;
        let memory = Memory::Lent(Box::new(Value::Numbers(values)));
        let sparse = Sparse { dtype, dims, memory, content: None };
        out.put(Object::give(Value::Sparse(Box::new(sparse))));
        Ok(())
    }

    /// 184
    fn UseCooIndices(value: InMut<Value>, indices: Array<i64>, count: usize) {
        let indices = indices.get(count, "the array of indices")?;
        sparse_mut(value.get()?)?.take(&GivenPlaces::Coo(indices))
    }

    /// 185
    fn UseCsrIndices(value: InMut<Value>, inner: Array<i64>, inner_count: usize, outer: Array<i64>, outer_count: usize) {
        let inner = inner.get(inner_count, "the array of inner indices")?;
        let outer = outer.get(outer_count, "the array of outer indices")?;
        sparse_mut(value.get()?)?.take(&GivenPlaces::Csr { inner, outer })
    }

    /// 186
    fn UseBlockSparseIndices(value: InMut<Value>, dims: Array<i64>, rank: usize, indices: *const i32) {
        let dims = dims.get(rank, "the shape of the indices")?;
        sparse_mut(value.get()?)?.take(&GivenPlaces::Blocks { dims, data: indices })
    }

    /// 187
    fn GetSparseTensorFormat(value: In<Value>, out: Out<i32>) {
        let out = out.place()?;
        out.put(sparse(value.get()?)?.format());
        Ok(())
    }

    /// 188
    fn GetSparseTensorValuesTypeAndShape(value: In<Value>, out: Out<*mut Object<TensorInfo>>) {
        let out = out.place()?;
        let (number, dims) = sparse(value.get()?)?.content()?.values.described()?;
        out.put(Object::give(TensorInfo::of_sizes(number, dims)));
        Ok(())
    }

    /// 189
    fn GetSparseTensorValues(value: In<Value>, out: Out<*const c_void>) {
        let out = out.place()?;
        let values = &sparse(value.get()?)?.content()?.values;
        if let Value::Strings(_) = &**values {
            return invalid("Use GetStringTensor*() API to retrieve strings");
        }
        out.put(values.numbers()?.pointer().cast());
        Ok(())
    }

    /// 190
    fn GetSparseTensorIndicesTypeShape(value: In<Value>, kind: i32, out: Out<*mut Object<TensorInfo>>) {
        let out = out.place()?;
        let indices = sparse(value.get()?)?.indices(kind)?;
        out.put(Object::give(TensorInfo::of_sizes(number_of(indices.tensor().dtype()), indices.dims())));
        Ok(())
    }

    /// 191
    fn GetSparseTensorIndices(value: In<Value>, kind: i32, count: Out<usize>, out: Out<*const c_void>) {
        let (count, out) = (count.place()?, out.place()?);
        let indices = sparse(value.get()?)?.indices(kind)?;
        count.put(indices.tensor().element_count());
        out.put(indices.pointer().cast());
        Ok(())
    }
}
