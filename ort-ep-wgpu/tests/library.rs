//! The provider as a library: the same bits as the same code inside this program, in memory that
//! comes back.

mod support;

use std::path::PathBuf;

use ort_core::dtype::DType;
use ort_core::ep::{Device, ProviderOptions, load_provider};
use ort_core::ir::GraphBuilder;
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};
use support::{numbers, open, outputs};

#[allow(clippy::expect_used, reason = "a test binary has a path")]
fn library() -> PathBuf {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let test = std::env::current_exe().expect("the test has a path");
    test.with_file_name(format!("{prefix}ort_wgpu_provider{suffix}"))
}

/// A product with weights, its softmax, and a sum over one axis.
fn model() -> Result<Model> {
    let mut builder = GraphBuilder::new("library");
    let x = builder.input("x", DType::F32, &["rows", "48"]);
    let weights = builder.constant(Tensor::from_slice(&[48, 32], &numbers(48 * 32, 5))?);
    let product = builder.node("MatMul", &[x, weights], &[])?;
    let likely = builder.node("Softmax", &[product], &[])?;
    let axes = builder.constant(Tensor::from_slice(&[1], &[1i64])?);
    let sums = builder.node("ReduceSumSquare", &[likely, axes], &[])?;
    Ok(Model::from_graph(builder.finish(&[likely, sums])?))
}

fn inputs(rows: usize) -> Result<Vec<(String, Value)>> {
    Ok(vec![("x".to_owned(), Tensor::from_slice(&[rows, 48], &numbers(rows * 48, rows))?.into())])
}

#[test]
fn it_computes_the_same_bits() -> Result<()> {
    let Some(inside) = open(&[]) else { return Ok(()) };
    let model = model()?;
    let loaded = load_provider(&library())?.open(0, &ProviderOptions::new())?;
    assert_eq!(loaded.info().name, inside.info().name);
    for rows in [1, 33, 7] {
        let (ours, expected) = (
            outputs(&model, loaded.clone(), &inputs(rows)?)?,
            outputs(&model, inside.clone(), &inputs(rows)?)?,
        );
        for (ours, expected) in ours.iter().zip(&expected) {
            assert_eq!(ours.tensor()?.to_vec::<f32>()?, expected.tensor()?.to_vec::<f32>()?, "{rows} rows");
        }
    }
    let stats = loaded.allocator().stats();
    assert!(stats.num_allocs > 0 && stats.in_use == 0, "{stats:?}");
    Ok(())
}

#[test]
fn its_options_and_its_errors_cross_the_border() -> Result<()> {
    if open(&[]).is_none() {
        return Ok(());
    }
    let provider = load_provider(&library())?;
    let wrong = ProviderOptions::from([("limits".to_owned(), "most".to_owned())]);
    let problem = provider.open(0, &wrong).err().map(|problem| problem.to_string()).unwrap_or_default();
    assert!(problem.contains("'adapter' or 'minimum'"), "{problem}");
    let small = ProviderOptions::from([("memory_limit".to_owned(), "20000".to_owned())]);
    let problem = outputs(&model()?, provider.open(0, &small)?, &inputs(500)?).err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    Ok(())
}
