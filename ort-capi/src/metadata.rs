//! `OrtModelMetadata`: what a model says of itself.

use std::ffi::c_char;

use ort_runtime::onnx::ModelInfo;

use crate::allocator::Allocator;
use crate::entry::{In, Object, Out, Released, Text, entries, kinds};
use crate::session::Session;
use crate::status::Outcome;

/// The metadata of a model.
#[derive(Default)]
pub(crate) struct Metadata(ModelInfo);

kinds! {
    Metadata => "OrtModelMetadata", b"OrtModMe";
}

fn put(
    metadata: In<Metadata>,
    allocator: Allocator,
    mut out: Out<*mut c_char>,
    field: fn(&ModelInfo) -> &str,
) -> Outcome {
    let out = out.place()?;
    out.put(allocator.text(field(&metadata.get()?.0).as_bytes())?);
    Ok(())
}

entries! {
    /// 111
    fn SessionGetModelMetadata(session: In<Session>, out: Out<*mut Object<Metadata>>) {
        let out = out.place()?;
        out.put(Object::give(Metadata(session.get()?.engine.model().info().clone())));
        Ok(())
    }

    /// 112
    fn ModelMetadataGetProducerName(metadata: In<Metadata>, allocator: Allocator, out: Out<*mut c_char>) {
        put(metadata, allocator, out, |info| &info.producer_name)
    }

    /// 113
    fn ModelMetadataGetGraphName(metadata: In<Metadata>, allocator: Allocator, out: Out<*mut c_char>) {
        put(metadata, allocator, out, |info| &info.graph_name)
    }

    /// 114
    fn ModelMetadataGetDomain(metadata: In<Metadata>, allocator: Allocator, out: Out<*mut c_char>) {
        put(metadata, allocator, out, |info| &info.domain)
    }

    /// 115
    fn ModelMetadataGetDescription(metadata: In<Metadata>, allocator: Allocator, out: Out<*mut c_char>) {
        put(metadata, allocator, out, |info| &info.description)
    }

    /// 158
    fn ModelMetadataGetGraphDescription(metadata: In<Metadata>, allocator: Allocator, out: Out<*mut c_char>) {
        put(metadata, allocator, out, |info| &info.graph_description)
    }

    /// 116
    fn ModelMetadataLookupCustomMetadataMap(metadata: In<Metadata>, allocator: Allocator, key: Text, out: Out<*mut c_char>) {
        let out = out.place()?;
        let key = key.bytes("the key")?;
        let found = metadata.get()?.0.metadata.iter().find(|(known, _)| known.as_bytes() == key);
        out.put(match found {
            Some((_, value)) => allocator.text(value.as_bytes())?,
            None => std::ptr::null_mut(),
        });
        Ok(())
    }

    /// 123
    fn ModelMetadataGetCustomMetadataMapKeys(metadata: In<Metadata>, allocator: Allocator, keys: Out<*mut *mut c_char>, count: Out<i64>) {
        let (keys, count) = (keys.place()?, count.place()?);
        let texts = &metadata.get()?.0.metadata;
        let texts: Vec<*mut c_char> =
            texts.iter().map(|(key, _)| allocator.text(key.as_bytes())).collect::<Outcome<_>>()?;
        keys.put(allocator.array(&texts)?);
        count.put(texts.len() as i64);
        Ok(())
    }

    /// 117
    fn ModelMetadataGetVersion(metadata: In<Metadata>, out: Out<i64>) {
        let out = out.place()?;
        // What a model without a version has in ONNX Runtime.
        out.put(metadata.get()?.0.model_version.unwrap_or(i64::MAX));
        Ok(())
    }

    /// 118
    fn ReleaseModelMetadata(metadata: Released<Metadata>) -> (), else (), {
        metadata.release();
    }
}
