//! Any bytes as an image: it is decoded within the memory limit, or is an error.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use ort_runtime::ir::GraphBuilder;
use ort_runtime::{DType, ErrorKind, Model, Session, Tensor};

fn session() -> &'static Session {
    static SESSION: OnceLock<Session> = OnceLock::new();
    SESSION.get_or_init(|| {
        let mut builder = GraphBuilder::new("decoder");
        let file = builder.input("file", DType::U8, &["bytes"]);
        let pixels = builder.node("ImageDecoder", &[file], &[]).expect("a node");
        let model = Model::from_graph(builder.finish(&[pixels]).expect("a graph"));
        Session::builder(&model).threads(1).memory_limit(64 << 20).build().expect("a session")
    })
}

fuzz_target!(|data: &[u8]| {
    let file = Tensor::from_slice(&[data.len()], data).expect("bytes");
    if let Err(problem) = session().run(&[("file", file.into())]) {
        // A panic in a kernel is a defect, which the session reports as this kind.
        assert!(
            problem.kind() != ErrorKind::RuntimeException || !problem.message().contains("panicked"),
            "{problem}"
        );
    }
});
