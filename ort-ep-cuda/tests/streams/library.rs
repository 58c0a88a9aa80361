//! The provider as a library: the same bits as the same code inside this program, within the same
//! limits, in memory that comes back.

use std::path::PathBuf;
use std::sync::Arc;

use crate::support::{options, with_device};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{Device, ExecutionProvider, ProviderOptions, load_provider};
use ort_core::ir::GraphBuilder;
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cuda::CudaProvider;
use ort_testkit::device_limits::{constants_come_and_go, products, session_keeps_to_limits};
use ort_testkit::made_up::{Given, inputs};
use ort_testkit::on_device::{control, cpu, nhwc, outputs};

/// The library that cargo built beside the tests.
fn library() -> PathBuf {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let own = std::env::current_exe().unwrap_or_default();
    own.with_file_name(format!("{prefix}ort_cuda_provider{suffix}"))
}

fn loaded(of_device: &ProviderOptions) -> Result<Arc<dyn Device>> {
    load_provider(&library())?.open(0, of_device)
}

#[test]
fn it_computes_the_same_bits() -> Result<()> {
    if with_device("library::it_computes_the_same_bits")?.is_none() {
        return Ok(());
    }
    let model = Model::from_graph(products()?);
    for way in [&[][..], &[("do_copy_in_default_stream", "0"), ("enable_cuda_graph", "1")]] {
        let (inside, outside) = (CudaProvider.open(0, &options(way))?, loaded(&options(way))?);
        assert_eq!(outside.info().name, inside.info().name);
        let given: Given = vec![("rows".to_owned(), ["1", "33", "7"].map(str::to_owned).to_vec())];
        for run in 0..6 {
            let inputs = inputs(&model, &given, run)?;
            let ours = outputs(&model, outside.clone(), &inputs)?;
            for (ours, expected) in ours.iter().zip(&outputs(&model, inside.clone(), &inputs)?) {
                assert_eq!(ours.tensor()?.to_vec::<f32>()?, expected.tensor()?.to_vec::<f32>()?, "run {run}");
            }
        }
        let stats = outside.allocator().stats();
        assert!(stats.num_allocs > 0 && stats.in_use == 0, "{stats:?}");
    }
    Ok(())
}

/// Copies within its memory cross the border, too.
#[test]
fn it_runs_the_bodies_of_control_flow() -> Result<()> {
    if with_device("library::it_runs_the_bodies_of_control_flow")?.is_none() {
        return Ok(());
    }
    let device = loaded(&options(&[("use_tf32", "0")]))?;
    control::results(&device)?;
    control::bits(&device)
}

/// That a device prefers channels last crosses the border as well.
#[test]
fn it_prefers_channels_last_where_it_is_told_to() -> Result<()> {
    if with_device("library::it_prefers_channels_last_where_it_is_told_to")?.is_none() {
        return Ok(());
    }
    let device = loaded(&options(&[("prefer_nhwc", "1"), ("use_tf32", "0")]))?;
    assert!(device.prefers_channels_last() && !loaded(&options(&[]))?.prefers_channels_last());
    nhwc::networks(&device)
}

/// A kernel that allocates its outputs does not cross the border: the host says why, and runs the
/// node.
#[test]
fn it_leaves_sizes_that_the_run_tells_to_the_host() -> Result<()> {
    if with_device("library::it_leaves_sizes_that_the_run_tells_to_the_host")?.is_none() {
        return Ok(());
    }
    let mut builder = GraphBuilder::new("places");
    let x = builder.input("x", DType::F32, &["n", "4"]);
    let found = builder.node("NonZero", &[x], &[])?;
    let model = Model::from_graph(builder.finish(&[found])?);
    let session = Session::builder(&model).device(loaded(&options(&[]))?).device(cpu()?).build()?;
    let placed = session.placement();
    let refusal = placed.iter().flat_map(|placed| &placed.refusals).map(|(_, why)| why.as_str());
    assert_eq!(
        refusal.collect::<Vec<_>>(),
        ["provider libraries cannot run kernels that allocate their own outputs"]
    );
    let x: Value = Tensor::from_slice(&[2, 4], &[0.0f32, 1.0, 0.0, 2.0, -0.0, 0.0, 3.0, 0.0])?.into();
    let outputs = session.run(&[("x", x)])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<i64>()?, [0, 0, 1, 1, 3, 2]);
    Ok(())
}

/// Constants stream into its memory as into that of a provider of the program's.
#[test]
fn it_keeps_to_the_limits_of_sessions() -> Result<()> {
    if with_device("library::it_keeps_to_the_limits_of_sessions")?.is_none() {
        return Ok(());
    }
    let model = Model::from_graph(products()?);
    let open = |_: Option<usize>| loaded(&options(&[("arena_extend_strategy", "kSameAsRequested")]));
    session_keeps_to_limits(&model, &open)?;
    constants_come_and_go(&model, &open)
}

#[test]
fn its_options_and_its_errors_cross_the_border() -> Result<()> {
    if with_device("library::its_options_and_its_errors_cross_the_border")?.is_none() {
        return Ok(());
    }
    for (option, expected) in [
        (("arena_extend_strategy", "most"), "'kNextPowerOfTwo' or 'kSameAsRequested'"),
        (("sdpa_kernel", "1"), "has no option 'sdpa_kernel' yet"),
        (("device_id", "7"), "there is no device 7"),
    ] {
        let problem =
            loaded(&options(&[option])).err().map(|problem| problem.to_string()).unwrap_or_default();
        assert!(problem.contains(expected), "{problem}");
    }
    let small = loaded(&options(&[("gpu_mem_limit", "20000")]))?;
    let model = Model::from_graph(products()?);
    let given: Given = vec![("rows".to_owned(), vec!["500".to_owned()])];
    let problem = outputs(&model, small, &inputs(&model, &given, 0)?).err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ort_core::ErrorKind::OutOfMemory));
    Ok(())
}
