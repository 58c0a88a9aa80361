//! Reading of the float weights of a model, one at a time.

use ort_alloc::MappedFile;
use ort_core::onnx::{ExternalData, Source, tensor_from_proto};
use ort_core::tensor::Tensor;
use ort_core::{Error, ErrorKind, Result};

use super::work::Work;
use crate::pages::WeightPages;

/// The float weights of a model.
pub(super) struct WeightReader<'s> {
    source: &'s Source,
    external: ExternalData,
}

impl WeightReader<'_> {
    pub(super) fn open(source: &Source) -> Result<WeightReader<'_>> {
        Ok(WeightReader { source, external: source.external_data()? })
    }

    /// The constant of this name, without a copy if it is raw bytes in a file.
    pub(super) fn tensor(&mut self, work: &Work, name: &str) -> Result<Tensor> {
        let missing = || Error::new(ErrorKind::Fail, format!("there is no constant '{name}'"));
        let proto = work.draft.constant(name).ok_or_else(missing)?;
        tensor_from_proto(proto.clone(), &mut self.external)
    }

    /// The pages of a weight, to give them back while it is read.
    pub(super) fn pages(&self, tensor: &Tensor) -> Option<WeightPages<'_>> {
        WeightPages::of(tensor.bytes()?, self.mappings())
    }

    fn mappings(&self) -> impl Iterator<Item = &MappedFile> {
        self.source.mapping().into_iter().chain(self.external.mappings())
    }

    /// Gives the pages of a weight back. They are read again on demand.
    pub(super) fn release(&self, tensor: &Tensor) {
        let Some(bytes) = tensor.bytes() else { return };
        for mapping in self.mappings() {
            if let Some(range) = mapping.range_of(bytes) {
                // A hint, so a failure only costs memory.
                let _ = mapping.release(range);
            }
        }
    }
}
