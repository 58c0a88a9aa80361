//! Conversion between `TensorProto` and [`Tensor`], for every element type and storage form.
//!
//! `raw_data` and external data are zero-copy. A typed field is moved if its elements have the
//! tensor's own width, and narrowed if protobuf stores them wider.

use bytes::Bytes;
use ort_alloc::exact_bytes;

use super::external::{ExternalData, Location};
use super::proto::tensor_proto::DataLocation;
use super::proto::{SparseTensorProto, TensorProto};
use super::types::dtype_from_code;
use crate::dtype::{DType, Element};
use crate::limits::Raise;
use crate::tensor::{Shape, SparseTensor, Tensor, byte_count, element_count};
use crate::{Error, ErrorKind, Result, Within, ensure, error};

/// Reads a tensor. Its data may be in one of the `external` files of the model.
///
/// Errors: an unknown element type, a negative dimension, data that does not fill the shape
/// exactly.
pub fn tensor_from_proto(proto: TensorProto, external: &mut ExternalData) -> Result<Tensor> {
    let name = proto.name.clone().unwrap_or_default();
    read_tensor(proto, external).within(|| format!("tensor '{name}'"))
}

fn read_tensor(proto: TensorProto, external: &mut ExternalData) -> Result<Tensor> {
    let dtype = dtype_from_code(proto.data_type())
        .map_err(|problem| problem.reclassified(&[ErrorKind::InvalidArgument], ErrorKind::Fail))?;
    let shape = shape_of(&proto.dims)?;
    let external_code = DataLocation::External as i32;
    match proto.data_location() {
        // `byte_count` comes from type and shape, never from the entry's `length`, which is only
        // compared.
        code if code == external_code => {
            let location = Location::parse(&proto.external_data)?;
            from_raw(dtype, &shape, external.read(&location, byte_count(dtype, &shape)?)?)
        }
        0 if dtype == DType::String => read_strings(&shape, &proto.string_data),
        // Empty raw data beside a typed field counts as not set.
        0 => match proto.raw_data.clone().filter(|raw| !raw.is_empty() || !has_typed_data(&proto)) {
            Some(raw) => from_raw(dtype, &shape, raw),
            None => read_typed(dtype, &shape, proto),
        },
        code => Err(error!(Fail, "data location {code} is not known")),
    }
}

/// The advice if the data of a tensor does not match its shape.
const REWRITE: &str = "the data must fill the shape exactly: export the model again, or copy it again";

/// Reads a shape from the dimensions in a file.
pub(super) fn shape_of(dims: &[i64]) -> Result<Shape> {
    let size = |&dim: &i64| {
        usize::try_from(dim).map_err(|_| {
            error!(Fail, "shape {dims:?} has a negative dimension")
                .help("write the sizes of the data; only inputs may leave sizes open")
        })
    };
    let shape = dims.iter().map(size).collect::<Result<Shape>>()?;
    element_count(&shape)
        .map_err(|_| error!(Fail, "shape {dims:?} has more elements than can be addressed").help(REWRITE))?;
    Ok(shape)
}

fn has_typed_data(proto: &TensorProto) -> bool {
    !(proto.float_data.is_empty()
        && proto.int32_data.is_empty()
        && proto.int64_data.is_empty()
        && proto.double_data.is_empty()
        && proto.uint64_data.is_empty())
}

pub(super) fn from_raw(dtype: DType, shape: &[usize], raw: Bytes) -> Result<Tensor> {
    ensure!(dtype != DType::String, Fail, "strings are stored as raw bytes, which ONNX does not allow");
    // A Rust `bool` must be 0 or 1 in memory. Any other byte in a file means true.
    let raw = match dtype {
        DType::Bool if raw.iter().any(|&byte| byte > 1) => {
            raw.iter().map(|&byte| u8::from(byte != 0)).collect()
        }
        _ => raw,
    };
    let expected = byte_count(dtype, shape).map_err(blaming_model)?;
    ensure!(
        raw.len() == expected,
        Fail,
        help = REWRITE,
        "raw_data size ({} bytes) does not match expected size from shape and data type ({expected} bytes): \
         {dtype}{shape:?}",
        raw.len()
    );
    Tensor::from_bytes(dtype, shape, raw).map_err(blaming_model)
}

/// Turns a length error, which normally blames the caller, into one that blames the model.
fn blaming_model(problem: Error) -> Error {
    error!(Fail, "{}", problem.message()).help(REWRITE)
}

fn read_strings(shape: &[usize], data: &[Bytes]) -> Result<Tensor> {
    let text = |(index, bytes): (usize, &Bytes)| {
        std::str::from_utf8(bytes).map(str::to_string).map_err(|_| {
            error!(Fail, "string {index} is not UTF-8")
                .help("write strings as UTF-8, and other bytes as a uint8 tensor")
        })
    };
    let strings = data.iter().enumerate().map(text).collect::<Result<Vec<String>>>()?;
    Tensor::from_strings(shape, strings).map_err(blaming_model)
}

fn read_typed(dtype: DType, shape: &[usize], proto: TensorProto) -> Result<Tensor> {
    let count = element_count(shape)?;
    match dtype {
        DType::F32 => whole(dtype, shape, count, proto.float_data),
        // Saturates: no list has that many entries, so `whole` refuses it.
        DType::C64 => whole(dtype, shape, count.saturating_mul(2), proto.float_data),
        DType::F64 => whole(dtype, shape, count, proto.double_data),
        DType::C128 => whole(dtype, shape, count.saturating_mul(2), proto.double_data),
        DType::I64 => whole(dtype, shape, count, proto.int64_data),
        DType::U64 => whole(dtype, shape, count, proto.uint64_data),
        DType::I32 => whole(dtype, shape, count, proto.int32_data),
        DType::U32 => {
            // ONNX stores uint32 in `uint64_data`.
            let narrow = |&value: &u64| u32::try_from(value).map_err(|_| out_of_range(dtype, value));
            whole(dtype, shape, count, proto.uint64_data.iter().map(narrow).collect::<Result<Vec<u32>>>()?)
        }
        DType::Bool => {
            let bytes: Vec<u8> = proto.int32_data.iter().map(|&value| u8::from(value != 0)).collect();
            whole(dtype, shape, count, bytes)
        }
        DType::F6E2M3 | DType::F6E3M2 => six_bit(dtype, shape, count, &proto.int32_data),
        _ if dtype.bits() == Some(16) => {
            // ONNX stores 16-bit types in `int32_data`; floats as their bits.
            let narrow = |&value: &i32| low_bits(dtype, value, 16).map(|bits| bits as u16);
            whole(dtype, shape, count, proto.int32_data.iter().map(narrow).collect::<Result<Vec<u16>>>()?)
        }
        // One entry is one byte: an 8-bit element, or several narrower ones packed as in raw data.
        _ => {
            let narrow = |&value: &i32| low_bits(dtype, value, 8).map(|bits| bits as u8);
            let bytes = dtype.byte_len(count).unwrap_or(count);
            whole(dtype, shape, bytes, proto.int32_data.iter().map(narrow).collect::<Result<Vec<u8>>>()?)
        }
    }
}

fn out_of_range(dtype: DType, value: impl std::fmt::Display) -> Error {
    error!(Fail, "{value} is out of range for {dtype}")
}

/// Returns the low bits of a value stored wider. Writers zero-extend or sign-extend; both are
/// accepted.
fn low_bits(dtype: DType, value: i32, bits: u32) -> Result<i32> {
    let fits = (-(1 << (bits - 1))..1 << bits).contains(&value);
    if fits { Ok(value & ((1 << bits) - 1)) } else { Err(out_of_range(dtype, value)) }
}

/// Creates a tensor from `data`, which must have `expected` entries.
fn whole<T: Element>(dtype: DType, shape: &[usize], expected: usize, mut data: Vec<T>) -> Result<Tensor> {
    ensure!(
        data.len() == expected,
        Fail,
        help = REWRITE,
        "data field count ({}) does not match expected count from shape ({expected}): {dtype}{shape:?}",
        data.len()
    );
    // The decoder grows vectors by doubling, so up to half of the memory is unused.
    data.shrink_to_fit();
    // `data` has the type it is stored in, such as `u16` for bfloat16. The bytes then get their
    // own.
    let plain = Tensor::from_vec(&[expected], data)?;
    let bytes = plain.bytes().cloned().unwrap_or_default();
    Tensor::from_bytes(dtype, shape, bytes).map_err(blaming_model)
}

/// Packs 6-bit elements, one per entry, into a bit stream that starts at the low bits.
fn six_bit(dtype: DType, shape: &[usize], count: usize, data: &[i32]) -> Result<Tensor> {
    ensure!(data.len() == count, Fail, help = REWRITE, "{count} elements are expected, got {}", data.len());
    let mut bytes = Vec::with_capacity((count * 6).div_ceil(8));
    for group in data.chunks(4) {
        let mut word = 0u32;
        for (index, &value) in group.iter().enumerate() {
            ensure!((0..64).contains(&value), Fail, "{value} does not fit in 6 bits");
            word |= (value as u32) << (6 * index);
        }
        // Four elements fill three bytes. A shorter last group takes only the bytes that it
        // reaches.
        bytes.extend(word.to_le_bytes().into_iter().take((group.len() * 6).div_ceil(8)));
    }
    Tensor::from_bytes(dtype, shape, bytes.into()).map_err(blaming_model)
}

/// Serializes a tensor under a name. Numbers become `raw_data`, which shares the tensor's memory.
///
/// Errors: the tensor is in device memory.
pub fn tensor_to_proto(name: &str, tensor: &Tensor) -> Result<TensorProto> {
    let mut proto = TensorProto {
        name: (!name.is_empty()).then(|| name.to_string()),
        dims: tensor.shape().iter().map(|&size| size as i64).collect(),
        data_type: Some(tensor.dtype().onnx_code()),
        ..TensorProto::default()
    };
    if tensor.dtype() == DType::String {
        proto.string_data =
            tensor.strings()?.iter().map(|text| Bytes::copy_from_slice(text.as_bytes())).collect();
    } else {
        let bytes = tensor.bytes();
        proto.raw_data = Some(bytes.cloned().ok_or_else(|| {
            error!(InvalidArgument, "tensor '{name}' is in device memory").help("copy it to the host first")
        })?);
    }
    Ok(proto)
}

/// Reads a sparse tensor.
pub fn sparse_from_proto(proto: SparseTensorProto, external: &mut ExternalData) -> Result<SparseTensor> {
    let name = proto.values.as_ref().map_or("", |values| values.name()).to_string();
    read_sparse(proto, external).within(|| format!("sparse tensor '{name}'"))
}

fn read_sparse(proto: SparseTensorProto, external: &mut ExternalData) -> Result<SparseTensor> {
    let part = |part: Option<TensorProto>, what| {
        part.ok_or_else(|| error!(Fail, "it has no {what}").help("it needs values and the index of each"))
    };
    let values = tensor_from_proto(part(proto.values, "values")?, external)?;
    let indices = tensor_from_proto(part(proto.indices, "indices")?, external).within(|| "sparse indices")?;
    let indices = widened(indices)?;
    let shape = shape_of(&proto.dims)?;
    let count = values.shape().first().copied().unwrap_or(1);
    ensure!(values.shape().len() == 1, Fail, "sparse values have shape {:?}", values.shape());
    // ONNX allows both forms: one offset per value, or one coordinate per axis.
    let linear = indices.shape() == [count];
    ensure!(
        indices.dtype() == DType::I64 && (linear || indices.shape() == [count, shape.len()]),
        Fail,
        help = "each value needs one index",
        "sparse indices are {}{:?}, expected int64[{count}] or int64[{count}, {}]",
        indices.dtype(),
        indices.shape(),
        shape.len()
    );
    Ok(SparseTensor { values, indices, shape })
}

/// Widens the indices of a file that ONNX Runtime saved, which have the smallest type that holds
/// them.
fn widened(indices: Tensor) -> Result<Tensor> {
    match indices.dtype() {
        DType::I8 | DType::I16 | DType::I32 => {
            Tensor::from_slice(indices.shape(), &indices.view().to_ints()?)
        }
        _ => Ok(indices),
    }
}

/// Reads a sparse tensor into dense form. A few bytes in a file can claim any shape, so its size is
/// charged to the budget `left`, which all sparse tensors share.
pub(super) fn dense_from_proto(
    proto: SparseTensorProto,
    external: &mut ExternalData,
    left: &mut usize,
) -> Result<Tensor> {
    let name = proto.values.as_ref().map_or("", |values| values.name()).to_string();
    let sparse = sparse_from_proto(proto, external)?;
    let place = || format!("sparse tensor '{name}'");
    write_out(&sparse, left).within(place)
}

fn write_out(sparse: &SparseTensor, left: &mut usize) -> Result<Tensor> {
    let bytes = byte_count(sparse.values.dtype(), &sparse.shape).map_err(blaming_model)?;
    *left = left.checked_sub(bytes).ok_or_else(|| {
        let (takes, left) = (exact_bytes(bytes), exact_bytes(*left));
        error!(Fail, "the dense form takes {takes}, at most {left} are left for it").raise("folded_bytes")
    })?;
    sparse.to_dense()
}

/// Serializes a sparse tensor under a name.
pub fn sparse_to_proto(name: &str, sparse: &SparseTensor) -> Result<SparseTensorProto> {
    Ok(SparseTensorProto {
        values: Some(tensor_to_proto(name, &sparse.values)?),
        indices: Some(tensor_to_proto("", &sparse.indices)?),
        dims: sparse.shape.iter().map(|&size| size as i64).collect(),
    })
}
