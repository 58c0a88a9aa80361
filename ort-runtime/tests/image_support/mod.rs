//! A session that decodes images.

use ort_runtime::ir::GraphBuilder;
use ort_runtime::{DType, Model, Result, Session, Tensor};

pub(crate) fn session() -> Session {
    let mut builder = GraphBuilder::new("decoder");
    let file = builder.input("file", DType::U8, &["bytes"]);
    let pixels = builder.node("ImageDecoder", &[file], &[]).unwrap();
    let model = Model::from_graph(builder.finish(&[pixels]).unwrap());
    Session::builder(&model).threads(1).memory_limit(64 << 20).build().unwrap()
}

pub(crate) fn decode(session: &Session, file: &[u8]) -> Result<Tensor> {
    let outputs = session.run(&[("file", Tensor::from_slice(&[file.len()], file)?.into())])?;
    outputs[0].1.tensor().cloned()
}
