//! NumPy files and archives, to and from tensors.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Context, Result, bail};
use half::f16;
use ndarray::{ArrayD, IxDyn, ShapeBuilder};
use npyz::{AutoSerialize, DType as NpyType, Deserialize, NpyFile, Order, WriterBuilder};
use num_complex::Complex;
use ort_runtime::dtype::{CastOptions, Element, convert};
use ort_runtime::tensor::{byte_count, element_count};
use ort_runtime::{DType, Tensor, Value};

use crate::output::write_file;

/// Reads a tensor from a `.npy` file.
pub(crate) fn read_npy(path: &Path) -> Result<Tensor> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    read(BufReader::new(file)).with_context(|| format!("reading {}", path.display()))
}

/// Reads every array of a `.npz` archive, by name.
pub(crate) fn read_npz(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let mut archive =
        npyz::npz::NpzArchive::open(path).with_context(|| format!("opening {}", path.display()))?;
    read_archive(&mut archive).with_context(|| format!("reading {}", path.display()))
}

/// Reads every array of an opened archive, by name.
pub(crate) fn read_archive<R: Read + std::io::Seek>(
    archive: &mut npyz::npz::NpzArchive<R>,
) -> Result<Vec<(String, Tensor)>> {
    let names: Vec<String> = archive.array_names().map(str::to_string).collect();
    let mut tensors = Vec::new();
    for name in names {
        let array = parse(|| archive.by_name(&name)).with_context(|| format!("array '{name}'"))?;
        let array = array.with_context(|| format!("array '{name}' is missing"))?;
        tensors.push((name.clone(), decode(array).with_context(|| format!("array '{name}'"))?));
    }
    Ok(tensors)
}

fn read(reader: impl Read) -> Result<Tensor> {
    decode(parse(|| NpyFile::new(reader))?)
}

/// Parses a header. Where sums are checked, the parser panics on a shape of more elements than can be counted.
fn parse<T>(header: impl FnOnce() -> std::io::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(header)) {
        Ok(parsed) => Ok(parsed?),
        Err(_) => bail!("its shape has too many elements to address"),
    }
}

fn decode<R: Read>(file: NpyFile<R>) -> Result<Tensor> {
    let NpyType::Plain(ty) = file.dtype() else { bail!("structured arrays are no tensors") };
    let name = ty.to_string();
    match name.get(1..).unwrap_or_default() {
        "f4" => typed::<f32, R>(file),
        "f8" => typed::<f64, R>(file),
        "f2" => typed::<f16, R>(file),
        "i1" => typed::<i8, R>(file),
        "i2" => typed::<i16, R>(file),
        "i4" => typed::<i32, R>(file),
        "i8" => typed::<i64, R>(file),
        "u1" => typed::<u8, R>(file),
        "u2" => typed::<u16, R>(file),
        "u4" => typed::<u32, R>(file),
        "u8" => typed::<u64, R>(file),
        "b1" => typed::<bool, R>(file),
        "c8" => typed::<Complex<f32>, R>(file),
        "c16" => typed::<Complex<f64>, R>(file),
        _ => bail!("arrays of type {name} are not supported"),
    }
}

fn typed<T: Element + Deserialize, R: Read>(file: NpyFile<R>) -> Result<Tensor> {
    let shape: Vec<usize> = file.shape().iter().map(|&size| size as usize).collect();
    let fortran = file.order() == Order::Fortran;
    let count = element_count(&shape)?;
    // The header may promise more than the file holds: memory grows with what is really there.
    let mut elements: Vec<T> = Vec::with_capacity(count.min(1 << 20));
    for element in file.data::<T>()? {
        elements.push(element.context("the file is cut short")?);
    }
    if fortran {
        let array = ArrayD::from_shape_vec(IxDyn(&shape).f(), elements)?;
        return Ok(Tensor::try_from(array)?);
    }
    Ok(Tensor::from_vec(&shape, elements)?)
}

/// Writes values to a `.npz` archive, whole or not at all: a sequence as NAME[0], NAME[1] and so on, an optional as
/// what it holds, or not at all where it holds nothing.
pub(crate) fn write_npz(path: &Path, values: &[(String, Value)]) -> Result<()> {
    write_file(path, |file| {
        let mut archive = npyz::npz::NpzWriter::new(BufWriter::new(file));
        for (name, value) in values {
            write_value(&mut archive, name, value).with_context(|| format!("output '{name}'"))?;
        }
        // Dropping the archive writes its directory.
        Ok(())
    })
}

fn write_value(archive: &mut Archive<'_>, name: &str, value: &Value) -> Result<()> {
    match value {
        Value::Tensor(tensor) => write_tensor(archive, name, tensor),
        Value::Sequence(sequence) => {
            for (index, element) in sequence.elements.iter().enumerate() {
                write_value(archive, &format!("{name}[{index}]"), element)?;
            }
            Ok(())
        }
        Value::Optional(optional) => match &optional.element {
            Some(element) => write_value(archive, name, element),
            None => Ok(()),
        },
        other => bail!("NumPy archives hold no {}; leave out --outputs", other.kind_name()),
    }
}

type Archive<'a> = npyz::npz::NpzWriter<BufWriter<&'a mut File>>;

fn write_tensor(archive: &mut Archive<'_>, name: &str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F32 => write_typed::<f32>(archive, name, tensor),
        DType::F64 => write_typed::<f64>(archive, name, tensor),
        DType::F16 => write_typed::<f16>(archive, name, tensor),
        DType::I8 => write_typed::<i8>(archive, name, tensor),
        DType::I16 => write_typed::<i16>(archive, name, tensor),
        DType::I32 => write_typed::<i32>(archive, name, tensor),
        DType::I64 => write_typed::<i64>(archive, name, tensor),
        DType::U8 => write_typed::<u8>(archive, name, tensor),
        DType::U16 => write_typed::<u16>(archive, name, tensor),
        DType::U32 => write_typed::<u32>(archive, name, tensor),
        DType::U64 => write_typed::<u64>(archive, name, tensor),
        DType::Bool => write_typed::<bool>(archive, name, tensor),
        DType::C64 => write_typed::<Complex<f32>>(archive, name, tensor),
        DType::C128 => write_typed::<Complex<f64>>(archive, name, tensor),
        DType::String => bail!("strings cannot be written to NumPy files; leave out --outputs"),
        // Types that NumPy lacks fit into float32 and int8 without loss.
        other if other.is_float() => write_typed::<f32>(archive, name, &cast(tensor, DType::F32)?),
        _ => write_typed::<i8>(archive, name, &cast(tensor, DType::I8)?),
    }
}

fn cast(tensor: &Tensor, to: DType) -> Result<Tensor> {
    let (view, shape) = (tensor.view(), tensor.shape());
    let mut bytes = vec![0u8; byte_count(to, shape)?];
    let count = tensor.element_count();
    convert(tensor.dtype(), view.bytes()?, to, &mut bytes, count, CastOptions::default())?;
    Ok(Tensor::from_bytes(to, shape, bytes.into())?.to_owned_copy()?)
}

fn write_typed<T: Element + AutoSerialize>(
    archive: &mut Archive<'_>,
    name: &str,
    tensor: &Tensor,
) -> Result<()> {
    let shape: Vec<u64> = tensor.shape().iter().map(|&size| size as u64).collect();
    let mut writer = archive.array(name, Default::default())?.default_dtype().shape(&shape).begin_nd()?;
    writer.extend(tensor.to_vec::<T>()?)?;
    Ok(writer.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ort_runtime::ir::ValueType;
    use ort_runtime::tensor::{OptionalValue, SequenceValue};

    #[test]
    fn values_of_every_kind_are_written() -> Result<()> {
        let tensor = |values: &[f32]| Tensor::from_slice(&[values.len()], values).map(Value::from);
        let half = Tensor::from_slice(&[2], &[half::bf16::from_f32(1.5), half::bf16::from_f32(-2.0)])?;
        let (element_type, elements) = (ValueType::Unknown, vec![tensor(&[1.0])?, tensor(&[2.0, 3.0])?]);
        let sequence = SequenceValue { element_type: element_type.clone(), elements };
        let optional =
            |element| Value::Optional(OptionalValue { element_type: element_type.clone(), element });
        let values = [
            ("s".to_string(), Value::Sequence(sequence)),
            ("absent".to_string(), optional(None)),
            ("present".to_string(), optional(Some(Box::new(tensor(&[4.0])?)))),
            ("half".to_string(), half.into()),
        ];
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("values.npz");
        write_npz(&path, &values)?;
        let mut read = Vec::new();
        for (name, tensor) in read_npz(&path)? {
            read.push((name, tensor.to_vec::<f32>()?));
        }
        read.sort_by(|a, b| a.0.cmp(&b.0));
        let expected = [
            ("half", vec![1.5, -2.0]),
            ("present", vec![4.0]),
            ("s[0]", vec![1.0]),
            ("s[1]", vec![2.0, 3.0]),
        ];
        assert_eq!(read, expected.map(|(name, values)| (name.to_string(), values)));
        Ok(())
    }

    #[test]
    fn a_file_with_a_value_that_numpy_lacks_is_not_there() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("values.npz");
        let text = Tensor::from_strings(&[1], vec!["text".to_string()])?;
        assert!(write_npz(&path, &[("t".to_string(), text.into())]).is_err());
        assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
        Ok(())
    }
}
