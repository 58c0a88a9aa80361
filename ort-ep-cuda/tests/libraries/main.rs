//! NVIDIA's libraries in the place of kernels of the provider's own: which are found and taken, and
//! that what they are asked for is what is meant. On a machine with a GPU these are NVIDIA's,
//! elsewhere the emulator stands in for them, too.

#![cfg(unix)]

mod convolutions;
mod limits;
mod products;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Arc;

use half::{bf16, f16};
use ort_core::dtype::DType;
use ort_core::ep::{Device, ExecutionProvider, ProviderOptions};
use ort_core::ir::GraphBuilder;
use ort_core::rewrite::Level;
use ort_core::session::{Model, Profile, RunOptions, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};
use ort_ep_cuda::{CudaDevice, CudaProvider};
use ort_testkit::on_device::numbers;
use support::{DRIVER, OWN_KERNELS, emulator, is_emulated, libraries, options, run};

const LT: &str = "libcublasLt.so.12";
const DNN: &str = "libcudnn.so.9";

/// A device with these options that finds these libraries, and what keeps them; none on a machine
/// that has not got them.
struct Found {
    device: Arc<CudaDevice>,
    _folder: Option<tempfile::TempDir>,
}

fn find(names: &[&str], given: &[(&str, &str)]) -> Result<Option<Found>> {
    let mut all = options(given);
    // Products of float32 as the CPU has them.
    all.entry("use_tf32".to_owned()).or_insert("0".to_owned());
    let is_asked = |name: &str| names.contains(if name == "use_cublas" { &LT } else { &DNN });
    OWN_KERNELS.iter().filter(|(name, _)| is_asked(name)).for_each(|(name, _)| drop(all.remove(*name)));
    let folder = if is_emulated() { Some(libraries(names)?) } else { None };
    if let Some(folder) = &folder {
        all.insert("library_path".to_owned(), folder.path().to_string_lossy().into_owned());
    }
    let device = CudaDevice::open(0, &all)?;
    let asked = device.libraries().iter().filter(|report| (report.name == "cuDNN") == (names == [DNN]));
    let missing = asked.into_iter().find(|report| report.found.is_err());
    if let (Some(missing), false) = (missing, is_emulated()) {
        println!("skipped: there is no {}", missing.name);
        return Ok(None);
    }
    Ok(Some(Found { device, _folder: folder }))
}

/// What computed each node, and the results, of a run behind `warm` others.
fn profiled(session: &Session, inputs: &[(&str, Value)], warm: usize) -> Result<(Vec<String>, Vec<Value>)> {
    for _ in 0..warm {
        session.run(inputs)?;
    }
    let profile = Profile::new();
    let results =
        session.run_with(inputs, &RunOptions { profile: Some(&profile), ..RunOptions::default() })?;
    let kernels = profile.events().into_iter().filter_map(|event| event.kernels).collect();
    Ok((kernels, results.into_iter().map(|(_, value)| value).collect()))
}

fn session(device: &Arc<CudaDevice>, model: &Model) -> Result<Session> {
    let device: Arc<dyn Device> = device.clone();
    Session::builder(model).device(device).opt_level(Level::Disabled).batch_split(false).build()
}

/// Numbers of a type, in (-1, 1).
fn tensor(dtype: DType, shape: &[usize], seed: usize) -> Result<Tensor> {
    let values = numbers(shape.iter().product(), seed);
    match dtype {
        DType::F16 => {
            Tensor::from_slice(shape, &values.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>())
        }
        DType::BF16 => {
            Tensor::from_slice(shape, &values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())
        }
        DType::F64 => Tensor::from_slice(shape, &values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>()),
        _ => Tensor::from_slice(shape, &values),
    }
}

fn doubles(value: &Value) -> Result<Vec<f64>> {
    let tensor = value.tensor()?;
    Ok(match tensor.dtype() {
        DType::F16 => tensor.to_vec::<f16>()?.into_iter().map(f64::from).collect(),
        DType::BF16 => tensor.to_vec::<bf16>()?.into_iter().map(f64::from).collect(),
        DType::F64 => tensor.to_vec::<f64>()?,
        _ => tensor.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
    })
}

fn check_close(actual: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30, |largest: f64, value| largest.max(value.abs()));
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        // Not `>`: a NaN must fail.
        let close = (actual - expected).abs() <= tolerance * largest;
        assert!(close, "{what}: element {index} is {actual}, expected {expected}");
    }
}

/// `MatMul` of [rows, 256] by [256, 128] twice.
fn chain() -> Result<Model> {
    let mut builder = GraphBuilder::new("chain");
    let x = builder.input("x", DType::F32, &["rows", "256"]);
    let weights = builder.constant(Tensor::from_slice(&[256, 256], &numbers(256 * 256, 1))?);
    let first = builder.node("MatMul", &[x, weights], &[])?;
    let second = builder.node("MatMul", &[first, weights], &[])?;
    Ok(Model::from_graph(builder.finish(&[second])?))
}

fn rows(count: usize, seed: usize) -> Result<[(&'static str, Value); 1]> {
    Ok([("x", tensor(DType::F32, &[count, 256], seed)?.into())])
}

/// Opens a device with the options of a variable, and says what it found: in the processes that the
/// next test starts, and in this one.
#[test]
fn says_what_it_finds() {
    let given = std::env::var(GIVEN).unwrap_or_default();
    let given: ProviderOptions = given
        .split(',')
        .filter_map(|option| option.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    match CudaDevice::open(0, &given) {
        Ok(device) => {
            device.libraries().iter().for_each(|report| println!("{report:?}"));
            device.info().facts.iter().for_each(|(name, value)| println!("{name} = {value}"));
            let model = chain().and_then(|model| session(&device, &model));
            let kernels = model.and_then(|session| profiled(&session, &rows(64, 0)?, 0));
            println!("computed by {:?}", kernels.map(|(kernels, _)| kernels));
        }
        Err(problem) => println!("{:?}: {problem}", problem.kind()),
    }
}

const GIVEN: &str = "ORT_TEST_OPTIONS";

#[test]
fn what_is_not_there_or_cannot_be_used_is_told() -> Result<()> {
    let (full, products) = (libraries(&[LT, DNN])?, libraries(&[LT])?);
    let (empty, broken, alien) = (libraries(&[])?, libraries(&[])?, libraries(&[])?);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let of_system = paths.find(|path| path.contains("/libc.so")).unwrap_or_default().to_owned();
    for name in [LT, DNN] {
        let write = std::fs::write(broken.path().join(name), "no library");
        let link = std::os::unix::fs::symlink(&of_system, alien.path().join(name));
        assert!(write.is_ok() && link.is_ok());
    }
    let at = |folder: &tempfile::TempDir| format!("library_path={}", folder.path().display());
    let own = "computed by Ok([\"gemm_";
    let cases: [(String, &[(&str, &str)], &[&str]); 13] = [
        (at(&full), &[], &["cuBLASLt = 12.4.0 at /", LT, "computed by Ok([\"cuBLASLt "]),
        (at(&full), &[], &["cuDNN = 9.1.0 at /", DNN]),
        (
            at(&full) + ",use_cublas=0",
            &[],
            &["cuBLASLt = none, own kernels: use_cublas is off", "9.1.0", own],
        ),
        (at(&products) + ",use_cudnn=0", &[], &["cuDNN = none, own kernels: use_cudnn is off", "12.4.0"]),
        (
            at(&products),
            &[],
            &["InvalidArgument: ", "there is no cuDNN in library_path", "set use_cudnn to 0"],
        ),
        (String::new(), &[], &["own kernels: another driver than the system's is named", own]),
        (at(&empty), &[], &["there is no cuBLASLt in library_path", "set use_cublas to 0"]),
        (at(&empty) + ",use_cublas=0,use_cudnn=0", &[], &[own]),
        (at(&broken), &[], &["cuBLASLt = none, own kernels: /", "cuDNN = none, own kernels: /", own]),
        (
            at(&alien),
            &[],
            &["it has no function cublasLtGetVersion", "it has no function cudnnGetVersion", own],
        ),
        (at(&full), &[(LT_VERSION, "110801")], &["it is version 11.8.1, and 12.0.0 is needed", own]),
        (
            at(&full),
            &[(DNN_VERSION, "8800")],
            &["it is version 8.8.0, and 8.9.0 is needed", "cuBLASLt = 12.4.0"],
        ),
        (
            at(&full),
            &[(LT_VERSION, "0"), (DNN_VERSION, "0")],
            &["it is version 0.0.0, and 12.0.0 is needed", own],
        ),
    ];
    for (given, others, expected) in cases {
        let emulator = emulator().to_string_lossy().into_owned();
        let variables = [&[(DRIVER, emulator.as_str()), (GIVEN, given.as_str())], others].concat();
        let (said, is_fine) = run("says_what_it_finds", &variables);
        assert!(is_fine, "{variables:?}: {said}");
        for part in expected {
            assert!(said.contains(part), "{variables:?}: '{part}' is not in: {said}");
        }
    }
    Ok(())
}

/// The versions that the emulator says the libraries have.
const LT_VERSION: &str = "ORT_CUDA_EMULATOR_CUBLASLT";
const DNN_VERSION: &str = "ORT_CUDA_EMULATOR_CUDNN";

#[test]
fn options_of_libraries_are_checked() {
    for (name, value, expected) in [
        ("library_path", "", "expected a folder"),
        ("use_cublas", "yes", "expected 0 or 1"),
        ("use_cudnn", "no", "expected 0 or 1"),
        ("cudnn_conv_algo_search", "FAST", "expected 'EXHAUSTIVE', 'HEURISTIC' or 'DEFAULT'"),
        ("cudnn_conv_use_max_workspace", "2", "expected 0 or 1"),
        ("cudnn_conv1d_pad_to_nc1d", "x", "expected 0 or 1"),
    ] {
        let problem = CudaProvider.open(0, &options(&[(name, value)])).err();
        assert_eq!(problem.as_ref().map(|problem| problem.kind()), Some(ErrorKind::InvalidArgument));
        let said = problem.map(|problem| problem.to_string()).unwrap_or_default();
        assert!(said.contains(expected), "{said}");
    }
}
