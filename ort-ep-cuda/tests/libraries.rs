//! NVIDIA's libraries in the place of kernels of the provider's own: which are found and taken, and that what they are asked for is what is meant.
//! On a machine with a GPU these are NVIDIA's, elsewhere the emulator stands in for them, too.

#![cfg(unix)]

mod support;

use std::sync::Arc;

use half::{bf16, f16};
use ort_core::dtype::DType;
use ort_core::ep::{Device, ExecutionProvider, ProviderOptions};
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Profile, RunOptions, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};
use ort_ep_cuda::{CudaDevice, CudaProvider};
use ort_testkit::on_device::{numbers, products};
use support::{DRIVER, OWN_KERNELS, emulator, is_emulated, libraries, options, run, with_device};

const LT: &str = "libcublasLt.so.12";

/// A device with these options that finds these libraries, and what keeps them; none on a machine that has not got them.
struct Found {
    device: Arc<CudaDevice>,
    _folder: Option<tempfile::TempDir>,
}

fn find(names: &[&str], given: &[(&str, &str)]) -> Result<Option<Found>> {
    let mut all = options(given);
    OWN_KERNELS.iter().for_each(|(name, _)| drop(all.remove(*name)));
    let folder = if is_emulated() { Some(libraries(names)?) } else { None };
    if let Some(folder) = &folder {
        all.insert("library_path".to_owned(), folder.path().to_string_lossy().into_owned());
    }
    let device = CudaDevice::open(0, &all)?;
    let missing = device.libraries().iter().find(|report| report.found.is_err());
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

#[test]
fn products_of_cublaslt_are_those_of_the_cpu() -> Result<()> {
    if with_device("products_of_cublaslt_are_those_of_the_cpu")?.is_none() {
        return Ok(());
    }
    let Some(found) = find(&[LT], &[])? else { return Ok(()) };
    let device: Arc<dyn Device> = found.device.clone();
    products::products(&device)?;
    let counters = found.device.counters();
    assert!(counters.routines >= 60, "{counters:?}");
    Ok(())
}

/// `Gemm` and `FusedGemm` of `x` [65, 200] and `y` [200, 72] with an addend of this shape.
fn gemm(dtype: DType, addend: &[usize], activation: Option<&str>, beta: f32) -> Result<Model> {
    let mut builder = GraphBuilder::new("gemm");
    let sizes: Vec<String> = addend.iter().map(usize::to_string).collect();
    let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
    let inputs = [
        Some(builder.input("x", dtype, &["65", "200"])),
        Some(builder.input("y", dtype, &["72", "200"])),
        Some(builder.input("c", dtype, &sizes)),
    ];
    let mut attrs = vec![
        ("transB", Attribute::Int(1)),
        ("alpha", Attribute::Float(0.25)),
        ("beta", Attribute::Float(beta)),
    ];
    let op = match activation {
        Some(name) => {
            attrs.push(("activation", Attribute::String(name.to_owned())));
            (ort_core::spec::MICROSOFT, "FusedGemm")
        }
        None => ("", "Gemm"),
    };
    let results = builder.add(op, &inputs, &attrs, 1, Vec::new())?;
    Ok(Model::from_graph(builder.finish(&results)?))
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

/// All types, addends of all kinds, activations of the call and of a pass behind it.
#[test]
fn what_follows_a_product_is_in_its_call_or_behind_it() -> Result<()> {
    if with_device("what_follows_a_product_is_in_its_call_or_behind_it")?.is_none() {
        return Ok(());
    }
    let Some(found) = find(&[LT], &[])? else { return Ok(()) };
    let own = CudaDevice::open(0, &options(&[]))?;
    let types = [(DType::F32, 1e-5), (DType::F16, 3e-3), (DType::BF16, 2e-2), (DType::F64, 1e-12)];
    // The addend, the activation, the factor of the addend, and whether a pass is needed.
    type Case = (&'static [usize], Option<&'static str>, f32, bool);
    let cases: [Case; 8] = [
        (&[72], None, 1.0, false),
        (&[72], Some("Relu"), 1.0, false),
        (&[72], Some("FastGelu"), 1.0, false),
        (&[65, 72], Some("Relu"), 0.5, false),
        (&[72], None, 0.5, true),
        (&[65, 1], Some("Relu"), 1.0, true),
        (&[65, 72], Some("Gelu"), 1.0, true),
        (&[], Some("Tanh"), 2.0, true),
    ];
    for (dtype, tolerance) in types {
        for (addend, activation, beta, has_pass) in cases {
            // `FusedGemm` is not for them.
            if matches!(dtype, DType::F64 | DType::BF16) && activation.is_some() {
                continue;
            }
            let what = format!("{dtype:?} {addend:?} {activation:?} {beta}");
            let model = gemm(dtype, addend, activation, beta)?;
            let inputs: [(&str, Value); 3] = [
                ("x", tensor(dtype, &[65, 200], 0)?.into()),
                ("y", tensor(dtype, &[72, 200], 1)?.into()),
                ("c", tensor(dtype, addend, 2)?.into()),
            ];
            let (kernels, results) = profiled(&session(&found.device, &model)?, &inputs, 0)?;
            let (others, expected) = profiled(&session(&own, &model)?, &inputs, 0)?;
            let (kernels, others) = (kernels.join(";"), others.join(";"));
            assert!(
                kernels.contains("cuBLASLt") && !others.contains("cuBLASLt"),
                "{what}: {kernels}, {others}"
            );
            // Sums of doubles have no bias in the call.
            let has_pass = has_pass || dtype == DType::F64 && addend == [72];
            assert_eq!(kernels.contains("elementwise"), has_pass, "{what}: {kernels}");
            check_close(&doubles(&results[0])?, &doubles(&expected[0])?, tolerance, &what);
        }
    }
    Ok(())
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

/// The workspace lies in the run's memory; where there is less of it, an algorithm that needs less is taken.
#[test]
fn a_small_budget_has_an_algorithm_that_needs_less() -> Result<()> {
    if with_device("a_small_budget_has_an_algorithm_that_needs_less")?.is_none() || !is_emulated() {
        return Ok(());
    }
    // The emulator's algorithms take 8 MiB, 64 KiB and nothing.
    for (limit, workspace) in [("64000000", 8 << 20), ("4000000", 64 << 10), ("650000", 0)] {
        let given = [("gpu_mem_limit", limit), ("arena_extend_strategy", "kSameAsRequested")];
        let Some(found) = find(&[LT], &given)? else { return Ok(()) };
        let session = session(&found.device, &chain()?)?;
        let (kernels, _) = profiled(&session, &rows(64, 0)?, 1)?;
        let expected = format!(", {workspace} bytes");
        assert!(!kernels.is_empty(), "{limit}");
        assert!(kernels.iter().all(|kernel| kernel.ends_with(&expected)), "{limit}: {kernels:?}");
        let used = found.device.stats().max_in_use;
        let limit: usize = limit.parse().unwrap_or(0);
        assert!(used <= limit && used >= workspace, "{used} of {limit}");
    }
    Ok(())
}

#[test]
fn calls_of_libraries_keep_their_order_in_every_way() -> Result<()> {
    if with_device("calls_of_libraries_keep_their_order_in_every_way")?.is_none() {
        return Ok(());
    }
    let ways: [&[(&str, &str)]; 3] = [
        &[("do_copy_in_default_stream", "0")],
        &[("enable_cuda_graph", "1")],
        &[("enable_cuda_graph", "1"), ("do_copy_in_default_stream", "0")],
    ];
    let Some(plain) = find(&[LT], &[])? else { return Ok(()) };
    let plain = session(&plain.device, &chain()?)?;
    for way in ways {
        let Some(found) = find(&[LT], way)? else { return Ok(()) };
        let session = session(&found.device, &chain()?)?;
        for (turn, count) in [64, 9, 64, 9, 64, 64, 9].into_iter().enumerate() {
            let before = found.device.counters();
            let actual = doubles(&session.run(&rows(count, turn)?)?[0].1)?;
            assert!(actual == doubles(&plain.run(&rows(count, turn)?)?[0].1)?, "run {turn}, {way:?}");
            let after = found.device.counters();
            if turn > 3 && way.len() + usize::from(way[0].0 == "enable_cuda_graph") > 1 {
                assert_eq!((after.routines, after.replays), (before.routines, before.replays + 1), "{way:?}");
            }
        }
    }
    Ok(())
}

/// Opens a device with the options of a variable, and says what it found: in the processes that the next test starts, and in this one.
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
    let (full, empty, broken, alien) = (libraries(&[LT])?, libraries(&[])?, libraries(&[])?, libraries(&[])?);
    let write = std::fs::write(broken.path().join(LT), "no library");
    let link = std::os::unix::fs::symlink("/proc/self/exe", alien.path().join(LT));
    assert!(write.is_ok() && link.is_ok());
    let at = |folder: &tempfile::TempDir| format!("library_path={}", folder.path().display());
    let own = "computed by Ok([\"gemm_";
    let cases: [(String, &[(&str, &str)], &[&str]); 8] = [
        (at(&full), &[], &["cuBLASLt = 12.4.0 at /", LT, "computed by Ok([\"cuBLASLt "]),
        (at(&full) + ",use_cublas=0", &[], &["cuBLASLt = none, own kernels: use_cublas is off", own]),
        (String::new(), &[], &["own kernels: another driver than the system's is named", own]),
        (
            at(&empty),
            &[],
            &["InvalidArgument: ", "there is no cuBLASLt in library_path", "set use_cublas to 0"],
        ),
        (at(&empty) + ",use_cublas=0", &[], &[own]),
        (at(&broken), &[], &["cuBLASLt = none, own kernels: /", own]),
        (at(&full), &[(VERSION, "110801")], &["it is version 11.8.1, and 12.0.0 is needed", own]),
        (at(&full), &[(VERSION, "0")], &["own kernels", own]),
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

/// The version that the emulator says cuBLASLt has.
const VERSION: &str = "ORT_CUDA_EMULATOR_CUBLASLT";

#[test]
fn options_of_libraries_are_checked() {
    for (name, value, expected) in
        [("library_path", "", "expected a folder"), ("use_cublas", "yes", "expected 0 or 1")]
    {
        let problem = CudaProvider.open(0, &options(&[(name, value)])).err();
        assert_eq!(problem.as_ref().map(|problem| problem.kind()), Some(ErrorKind::InvalidArgument));
        let said = problem.map(|problem| problem.to_string()).unwrap_or_default();
        assert!(said.contains(expected), "{said}");
    }
}
