//! `OrtLoraAdapter`: parameters that replace defaults of inputs in the runs that have it.

use std::sync::Arc;

use bytes::Bytes;
use ort_runtime::onnx::{FileAccess, Source, read_adapter};

use crate::allocator::Allocator;
use crate::entry::{Array, In, Object, Out, Owned, PathText, Released, entries, kinds};
use crate::run_options::RunOptions;
use crate::status::{Outcome, code, fail, invalid};
use crate::value::Value;

/// A parameter, by the name of the input that it replaces.
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) value: Owned<Value>,
}

/// An adapter. Run options that have it keep its parameters.
pub(crate) struct LoraAdapter(pub(crate) Arc<Vec<Parameter>>);

kinds! {
    LoraAdapter => "OrtLoraAdapter", b"OrtLoraA";
}

fn adapter(bytes: Bytes, allocator: Allocator) -> Outcome<LoraAdapter> {
    if !allocator.is_null() {
        // An allocator asks for the parameters on its device.
        return match allocator.info()?.get()?.is_host() {
            true => fail(code::FAIL, "The specified allocator must be a device allocator".to_owned()),
            false => invalid("adapters are kept in host memory; give no allocator"),
        };
    }
    let parameter = |(name, tensor): (String, ort_runtime::Tensor)| {
        Ok(Parameter { name, value: Owned::new(Value::of_constant(&tensor)?) })
    };
    let parameters: Outcome<Vec<Parameter>> = read_adapter(bytes)?.into_iter().map(parameter).collect();
    Ok(LoraAdapter(Arc::new(parameters?)))
}

entries! {
    /// 280. The file is mapped.
    fn CreateLoraAdapter(path: PathText, allocator: Allocator, out: Out<*mut Object<LoraAdapter>>) {
        let out = out.place()?;
        let path = path.get("the path of the adapter")?;
        if !path.exists() {
            return invalid(format!("the adapter file {path:?} does not exist"));
        }
        let source = Source::open(&path, FileAccess::default())?;
        out.put(Object::give(adapter(source.bytes().clone(), allocator)?));
        Ok(())
    }

    /// 281
    fn CreateLoraAdapterFromArray(bytes: Array<u8>, len: usize, allocator: Allocator, out: Out<*mut Object<LoraAdapter>>) {
        let out = out.place()?;
        let bytes = Bytes::copy_from_slice(bytes.get(len, "the adapter")?);
        out.put(Object::give(adapter(bytes, allocator)?));
        Ok(())
    }

    /// 282
    fn ReleaseLoraAdapter(adapter: Released<LoraAdapter>) -> (), else (), {
        adapter.release();
    }

    /// 283
    fn RunOptionsAddActiveLoraAdapter(options: In<RunOptions>, adapter: In<LoraAdapter>) {
        let options = options.get()?;
        options.add_adapter(adapter.get()?.0.clone());
        Ok(())
    }
}
