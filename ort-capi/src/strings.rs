//! Tensors of strings: lossless bytes, which have to be UTF-8 only when a run reads them.

use std::ffi::c_char;
use std::sync::Arc;

use ort_runtime::Tensor;
use ort_runtime::tensor::{CompactString, element_count};
use parking_lot::RwLock;

use crate::entry::{Array, ArrayMut, In, Out, Text, entries};
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::value::{Dims, Value, dims_of};

/// A tensor of strings, shared by its handles.
#[derive(Clone)]
pub(crate) struct Strings(Arc<Shared>);

struct Shared {
    sizes: Vec<usize>,
    dims: Dims,
    texts: RwLock<Texts>,
}

enum Texts {
    /// The result of a run.
    Result(Tensor),
    /// What the caller wrote.
    Own(Vec<Vec<u8>>),
}

impl Texts {
    fn get(&self, index: usize) -> Option<&[u8]> {
        match self {
            Texts::Result(tensor) => Some(tensor.strings().ok()?.get(index)?.as_bytes()),
            Texts::Own(texts) => Some(texts.get(index)?),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..).map_while(|index| self.get(index))
    }

    /// The bytes of one text, to be written. Results become the caller's first.
    fn get_mut(&mut self, index: usize) -> Option<&mut Vec<u8>> {
        if let Texts::Result(_) = self {
            *self = Texts::Own(self.iter().map(<[u8]>::to_vec).collect());
        }
        match self {
            Texts::Own(texts) => texts.get_mut(index),
            Texts::Result(_) => None,
        }
    }
}

impl Strings {
    fn new(sizes: &[usize], texts: Texts) -> Strings {
        Strings(Arc::new(Shared { sizes: sizes.to_vec(), dims: dims_of(sizes), texts: RwLock::new(texts) }))
    }

    /// A tensor of empty strings.
    pub(crate) fn empty(sizes: &[usize]) -> Outcome<Strings> {
        let count = element_count(sizes)?;
        let mut texts = Vec::new();
        texts.try_reserve_exact(count).map_err(|_| {
            Failure::new(code::FAIL, format!("{count} strings of shape {sizes:?} cannot be allocated"))
        })?;
        texts.resize(count, Vec::new());
        Ok(Strings::new(sizes, Texts::Own(texts)))
    }

    pub(crate) fn of_tensor(tensor: Tensor) -> Strings {
        let sizes = tensor.shape().to_vec();
        Strings::new(&sizes, Texts::Result(tensor))
    }

    pub(crate) fn dims(&self) -> &[i64] {
        &self.0.dims
    }

    /// What a run reads.
    pub(crate) fn tensor(&self) -> Outcome<Tensor> {
        let texts = self.0.texts.read();
        if let Texts::Result(tensor) = &*texts {
            return Ok(tensor.clone());
        }
        let text = |(index, bytes): (usize, &[u8])| {
            CompactString::from_utf8(bytes).map_err(|problem| {
                let shown = String::from_utf8_lossy(bytes);
                Failure::invalid(format!("string {index} of the tensor, '{shown}', is not UTF-8: {problem}"))
            })
        };
        let texts: Vec<CompactString> = texts.iter().enumerate().map(text).collect::<Outcome<_>>()?;
        Ok(Tensor::from_strings(&self.0.sizes, texts)?)
    }

    /// Takes over the elements of a tensor of the same shape.
    pub(crate) fn fill(&self, tensor: Tensor) {
        *self.0.texts.write() = Texts::Result(tensor);
    }

    /// Takes over texts of C, as many as the tensor has elements.
    pub(crate) fn set(&self, texts: &[Text]) -> Outcome {
        let owned = |text: &Text| Ok(text.bytes("a string")?.to_vec());
        let texts: Vec<Vec<u8>> = texts.iter().map(owned).collect::<Outcome<_>>()?;
        *self.0.texts.write() = Texts::Own(texts);
        Ok(())
    }

    fn count(&self) -> usize {
        self.0.sizes.iter().product()
    }

    /// Calls `read` with the text at an index.
    fn with<T>(&self, index: usize, read: impl FnOnce(&[u8]) -> Outcome<T>) -> Outcome<T> {
        let texts = self.0.texts.read();
        read(texts.get(index).ok_or_else(|| self.out_of_bounds(index))?)
    }

    fn out_of_bounds(&self, index: usize) -> Failure {
        let count = self.count();
        Failure::invalid(format!("index is out of bounds: {index}, the tensor has {count} elements"))
    }

    fn write(&self, index: usize, text: Vec<u8>) -> Outcome {
        let mut texts = self.0.texts.write();
        *texts.get_mut(index).ok_or_else(|| self.out_of_bounds(index))? = text;
        Ok(())
    }
}

entries! {
    /// 52
    fn FillStringTensor(value: In<Value>, texts: Array<Text>, count: usize) {
        let strings = value.get()?.strings()?;
        if count != strings.count() {
            return invalid(format!(
                "input array doesn't equal tensor size: {count} strings, the tensor has {}",
                strings.count()
            ));
        }
        strings.set(texts.get(count, "the array of strings")?)
    }

    /// 53
    fn GetStringTensorDataLength(value: In<Value>, out: Out<usize>) {
        let out = out.place()?;
        let strings = value.get()?.strings()?;
        let len = strings.0.texts.read().iter().map(<[u8]>::len).sum();
        out.put(len);
        Ok(())
    }

    /// 54
    fn GetStringTensorContent(value: In<Value>, buffer: ArrayMut<u8>, len: usize, offsets: ArrayMut<usize>, count: usize) {
        let strings = value.get()?.strings()?;
        if count != strings.count() {
            return fail(code::FAIL, format!(
                "offsets buffer is not equal to tensor size: {count}, the tensor has {} elements",
                strings.count()
            ));
        }
        let texts = strings.0.texts.read();
        let needed: usize = texts.iter().map(<[u8]>::len).sum();
        if len < needed {
            return fail(code::FAIL, format!(
                "output buffer is too small. Use GetStringTensorDataLength. It has {len} bytes, expected {needed}"
            ));
        }
        let (mut rest, offsets) = (buffer.get(needed, "the buffer")?, offsets.get(count, "the array of offsets")?);
        let mut offset = 0;
        for (text, place) in texts.iter().zip(offsets) {
            // `needed` is the sum of all lengths.
            let Some((to, after)) = rest.split_at_mut_checked(text.len()) else { break };
            to.copy_from_slice(text);
            (*place, rest) = (offset, after);
            offset += text.len();
        }
        Ok(())
    }

    /// 127
    fn GetStringTensorElementLength(value: In<Value>, index: usize, out: Out<usize>) {
        let out = out.place()?;
        out.put(value.get()?.strings()?.with(index, |text| Ok(text.len()))?);
        Ok(())
    }

    /// 128
    fn GetStringTensorElement(value: In<Value>, len: usize, index: usize, buffer: ArrayMut<u8>) {
        value.get()?.strings()?.with(index, |text| {
            if len < text.len() {
                return fail(code::FAIL, format!(
                    "buffer size is too small for string element: {len} bytes, expected {}",
                    text.len()
                ));
            }
            buffer.get(text.len(), "the buffer")?.copy_from_slice(text);
            Ok(())
        })
    }

    /// 129
    fn FillStringTensorElement(value: In<Value>, text: Text, index: usize) {
        value.get()?.strings()?.write(index, text.bytes("the string")?.to_vec())
    }

    /// 252
    fn GetResizedStringTensorElementBuffer(value: In<Value>, index: usize, len: usize, out: Out<*mut c_char>) {
        let out = out.place()?;
        let strings = value.get()?.strings()?;
        let mut resized = Vec::new();
        if resized.try_reserve_exact(len).is_err() {
            return fail(code::FAIL, format!("a string of {len} bytes cannot be allocated"));
        }
        resized.resize(len, 0u8);
        let buffer = resized.as_mut_ptr();
        // The memory of a vector stays where it is when the vector moves.
        strings.write(index, resized)?;
        out.put(buffer.cast());
        Ok(())
    }
}
