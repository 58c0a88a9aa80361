//! Products by cuBLASLt.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::session::Model;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::Value;
use ort_ep_cuda::CudaDevice;
use ort_testkit::on_device::products;

use super::support::{is_emulated, options, with_device, with_warpgroups};
use super::{LT, chain, check_close, doubles, find, profiled, rows, session, tensor};

#[test]
fn products_of_cublaslt_are_those_of_the_cpu() -> Result<()> {
    if with_device("products::products_of_cublaslt_are_those_of_the_cpu")?.is_none() {
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
            (MICROSOFT, "FusedGemm")
        }
        None => ("", "Gemm"),
    };
    let results = builder.add(op, &inputs, &attrs, 1, Vec::new())?;
    Ok(Model::from_graph(builder.finish(&results)?))
}

/// Results whose rows are no whole vectors, as of a vocabulary of 50257 words, are products of
/// warpgroups.
#[test]
fn halves_with_odd_rows_of_results_are_products_of_our_kernels() -> Result<()> {
    if with_warpgroups("products::halves_with_odd_rows_of_results_are_products_of_our_kernels")?.is_none() {
        return Ok(());
    }
    let Some(found) = find(&[LT], &[])? else { return Ok(()) };
    let own = CudaDevice::open(0, &options(&[]))?;
    for (columns, expected) in [("51", "gemm_warpgroups"), ("56", "cuBLASLt")] {
        let mut builder = GraphBuilder::new("logits");
        let x = builder.input("x", DType::F16, &["40", "72"]);
        let w = builder.input("w", DType::F16, &[columns, "72"]);
        let y = builder.node("Gemm", &[x, w], &[("transB", Attribute::Int(1))])?;
        let model = Model::from_graph(builder.finish(&[y])?);
        let count = columns.parse().unwrap_or(0);
        let inputs: [(&str, Value); 2] = [
            ("x", tensor(DType::F16, &[40, 72], 0)?.into()),
            ("w", tensor(DType::F16, &[count, 72], 1)?.into()),
        ];
        let (kernels, results) = profiled(&session(&found.device, &model)?, &inputs, 0)?;
        assert!(kernels.iter().any(|kernel| kernel.starts_with(expected)), "{columns}: {kernels:?}");
        let (_, same) = profiled(&session(&own, &model)?, &inputs, 0)?;
        check_close(&doubles(&results[0])?, &doubles(&same[0])?, 3e-3, columns);
    }
    Ok(())
}

/// All types, addends of all kinds, activations of the call and of a pass behind it.
#[test]
fn what_follows_a_product_is_in_its_call_or_behind_it() -> Result<()> {
    if with_device("products::what_follows_a_product_is_in_its_call_or_behind_it")?.is_none() {
        return Ok(());
    }
    let Some(found) = find(&[LT], &[])? else { return Ok(()) };
    let own = CudaDevice::open(0, &options(&[("use_tf32", "0")]))?;
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

/// The workspace lies in the run's memory; where there is less of it, an algorithm that needs less
/// is taken.
#[test]
fn a_small_budget_has_an_algorithm_that_needs_less() -> Result<()> {
    if with_device("products::a_small_budget_has_an_algorithm_that_needs_less")?.is_none() || !is_emulated() {
        return Ok(());
    }
    // The emulator's algorithms take 8 MiB, 64 KiB and nothing.
    for (limit, workspace) in [("64000000", 8 << 20), ("4000000", 64 << 10), ("450000", 0)] {
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
    if with_device("products::calls_of_libraries_keep_their_order_in_every_way")?.is_none() {
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
