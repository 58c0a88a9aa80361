//! Model files that are changed in place, replaced or removed while a session runs.
#![cfg(unix)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use ort_runtime::ir::GraphBuilder;
use ort_runtime::onnx::{FileAccess, ModelInfo, Source, Weights, save};
use ort_runtime::{DType, Model, Result, Session, Tensor};

/// y = x + w, with the weight in the file or beside it.
fn write(path: &Path, weight: f32, weights: &Weights) {
    let mut builder = GraphBuilder::new("sum");
    let x = builder.input("x", DType::F32, &["1024"]);
    let w = builder.constant(Tensor::from_slice(&[1024], &[weight; 1024]).unwrap());
    let y = builder.node("Add", &[x, w], &[]).unwrap();
    save(&builder.finish(&[y]).unwrap(), &ModelInfo::default(), path, weights).unwrap();
}

fn run(session: &Session) -> Result<f32> {
    // Sessions look at their files every quarter of a second at the latest.
    std::thread::sleep(Duration::from_millis(300));
    let x = Tensor::from_slice(&[1024], &[0f32; 1024])?;
    Ok(session.run(&[("x", x.into())])?[0].1.tensor()?.to_vec::<f32>()?[0])
}

fn session(path: &Path, map: bool) -> (Model, Session) {
    let source = Source::open(path, FileAccess { map, ..FileAccess::default() }).unwrap();
    let model = Model::from_source(source).unwrap();
    let session = Session::builder(&model).threads(1).build().unwrap();
    (model, session)
}

/// Where the weight lies, and the file that holds it.
const LAYOUTS: [(Weights, &str); 2] =
    [(Weights::Inside, "m.onnx"), (Weights::Beside { least: 64 }, "m.onnx.data")];

#[test]
fn a_change_in_place_is_an_error_and_a_replacement_is_none() {
    for (weights, name) in LAYOUTS {
        let folder = tempfile::tempdir().unwrap();
        let (path, file) = (folder.path().join("m.onnx"), folder.path().join(name));
        write(&path, 1.0, &weights);
        let (model, mapped) = session(&path, true);
        let (_copied, copied) = session(&path, false);
        assert_eq!((run(&mapped).unwrap(), run(&copied).unwrap()), (1.0, 1.0));
        // The writer renames: what is mapped stays.
        write(&path, 2.0, &weights);
        assert_eq!(run(&mapped).unwrap(), 1.0);
        let (changed, session) = session(&path, true);
        assert_eq!(run(&session).unwrap(), 2.0);
        let bytes = fs::read(&file).unwrap();
        // A file system's clock may tick every 10 ms only.
        std::thread::sleep(Duration::from_millis(20));
        let writer = File::options().write(true).open(&file).unwrap();
        writer.write_all_at(&bytes, 0).unwrap();
        for _ in 0..3 {
            let problem = run(&session).unwrap_err().to_string();
            assert!(problem.contains("was changed in place") && problem.contains(name), "{problem}");
        }
        let problem = Session::builder(&changed).threads(2).build().map(drop).unwrap_err().to_string();
        assert!(problem.contains("was changed in place"), "{problem}");
        fs::remove_file(&file).unwrap();
        assert_eq!((run(&mapped).unwrap(), run(&copied).unwrap()), (1.0, 1.0));
        drop(model);
    }
}
