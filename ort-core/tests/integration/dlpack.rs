//! Tensors that go to another library and come back through DLPack: the same type, shape, bytes and
//! address.

use bytes::Bytes;
use ort_alloc::dlpack::{DLDataType, Layout, Managed};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::tensor::{Tensor, TensorBuffer};

#[test]
fn every_type_of_whole_bytes_comes_back() -> Result<()> {
    for dtype in DType::all() {
        let Some(size) = dtype.byte_size() else { continue };
        let bytes = Bytes::from((0..6 * size).map(|byte| (byte % 2) as u8).collect::<Vec<u8>>());
        let tensor = Tensor::from_bytes(dtype, &[3, 1, 2], bytes)?.to_owned_copy()?;
        let back = Tensor::from_dlpack(tensor.to_dlpack()?)?;
        assert_eq!((back.dtype(), back.shape()), (dtype, tensor.shape()), "{dtype}");
        assert_eq!(back.bytes(), tensor.bytes(), "{dtype}");
        let start = |tensor: &Tensor| tensor.bytes().map(|bytes| bytes.as_ptr());
        assert_eq!(start(&back), start(&tensor), "{dtype}: no bytes move");
    }
    Ok(())
}

#[test]
fn what_is_given_away_can_be_written() -> Result<()> {
    for layout in [Layout::Versioned, Layout::Unversioned] {
        let mut buffer = TensorBuffer::new(DType::BF16, &[2, 3])?;
        buffer.bytes_mut()?.fill(1);
        let mut back = TensorBuffer::from_dlpack(buffer.into_dlpack(layout)?)?;
        assert_eq!((back.dtype(), back.shape()), (DType::BF16, &[2, 3][..]));
        back.bytes_mut()?.fill(2);
        assert_eq!(back.view().bytes()?, [2; 12]);
    }
    Ok(())
}

#[test]
fn what_is_lent_to_be_read_is_not_written() -> Result<()> {
    let tensor = Tensor::from_slice(&[2], &[1.0f32, 2.0])?;
    let problem = TensorBuffer::from_dlpack(tensor.to_dlpack()?).expect_err("it is is read-only");
    assert!(problem.to_string().contains("is read-only"), "{problem}");
    let buffer = TensorBuffer::copy_of(&tensor)?;
    let held = buffer.tensor()?;
    let problem = buffer.into_dlpack(Layout::Versioned).expect_err("a tensor holds the memory");
    assert!(problem.to_string().contains("still held by a tensor"), "{problem}");
    assert_eq!(held.to_vec::<f32>()?, [1.0, 2.0]);
    Ok(())
}

/// A DLPack type of four bytes that ONNX does not have, and what the error says.
const TYPES: [(DLDataType, &str); 3] = [
    (DLDataType { code: 3, bits: 64, lanes: 1 }, "code 3, 64 bits, 1 lanes"),
    (DLDataType { code: 2, bits: 32, lanes: 4 }, "code 2, 32 bits, 4 lanes"),
    (DLDataType { code: 0, bits: 4, lanes: 1 }, "code 0, 4 bits, 1 lanes"),
];

#[test]
fn types_that_onnx_does_not_have_are_refused() -> Result<()> {
    for (dtype, expected) in TYPES {
        let lent = Managed::lend(Bytes::from_static(&[0; 64]), dtype, &[1]);
        let problem = Tensor::from_dlpack(lent).expect_err(expected);
        assert!(problem.to_string().contains(expected), "{problem}");
    }
    let strings = Tensor::from_strings(&[1], vec!["a"])?;
    assert!(strings.to_dlpack().is_err_and(|problem| problem.to_string().contains("no type for string")));
    Ok(())
}

#[test]
fn unaligned_memory_is_not_lent() -> Result<()> {
    let bytes = Bytes::from(vec![0u8; 9]);
    let start = usize::from((bytes.as_ptr() as usize).is_multiple_of(4));
    let tensor = Tensor::from_bytes(DType::F32, &[2], bytes.slice(start..start + 8))?;
    let problem = tensor.to_dlpack().expect_err("it begins at no multiple of 4");
    assert!(problem.to_string().contains("not aligned"), "{problem}");
    assert!(tensor.to_owned_copy()?.to_dlpack().is_ok());
    Ok(())
}
