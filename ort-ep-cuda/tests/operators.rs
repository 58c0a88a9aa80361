//! Operators on a CUDA device against those of the CPU, at the edges of their kernels.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_ep_cuda::CudaDevice;
use ort_testkit::on_device::{
    attention, caches, control, formulas, fp8_fp4, gradients, mma, movement, nhwc, optimizers, products,
    quant, recurrent, rows, select, sums, updates, vision, weights, windows,
};
use support::{is_emulated, options, with_device, with_oldest, with_options, with_warpgroups};

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("products_are_those_of_the_cpu")? else { return Ok(()) };
    products::products(&device)
}

#[test]
fn products_of_few_rows_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("products_of_few_rows_are_those_of_the_cpu")? else { return Ok(()) };
    products::few_rows(&device);
    Ok(())
}

#[test]
fn weights_that_lie_transposed_give_the_results_of_the_cpu() -> Result<()> {
    let name = "weights_that_lie_transposed_give_the_results_of_the_cpu";
    let Some(device) = with_device(name)? else { return Ok(()) };
    weights::transposed_weights(&device)
}

#[test]
fn convolutions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("convolutions_are_those_of_the_cpu")? else { return Ok(()) };
    windows::convolutions(&device)
}

/// Fails unless each of these is the name of a kernel that ran; where that is known of the device.
fn assert_ran(kernels: &BTreeSet<String>, expected: &[&str]) {
    let all: BTreeSet<&str> = kernels.iter().flat_map(|kernels| kernels.split(", ")).collect();
    let missing: Vec<&&str> = expected.iter().filter(|name| !all.contains(**name)).collect();
    assert!(!is_emulated() || missing.is_empty(), "{missing:?} are not among {all:?}");
}

#[test]
fn convolutions_with_channels_last_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("convolutions_with_channels_last_are_those_of_the_cpu")? else {
        return Ok(());
    };
    let kernels = nhwc::convolutions(&device)?;
    assert_ran(&kernels, &["conv_pixels_planes_f32", "conv_pixels_tiles_f32", "gemm_small_f32"]);
    Ok(())
}

#[test]
fn tensor_cores_convolve_halves_with_channels_last_as_the_cpu_does() -> Result<()> {
    let name = "tensor_cores_convolve_halves_with_channels_last_as_the_cpu_does";
    let Some(device) = with_device(name)? else { return Ok(()) };
    let kernels = nhwc::convolutions_of_halves(&device)?;
    for suffix in ["f16", "bf16"] {
        let names = ["cores_large", "cores_small", "cores_few", "join", "planes", "tiles"];
        let names = names.map(|name| format!("conv_pixels_{name}_{suffix}"));
        assert_ran(&kernels, &names.each_ref().map(String::as_str));
        let names = ["64_32", "64_64", "128_32", "128_64"];
        let names = names.map(|name| format!("conv_pixels_rows_{name}_{suffix}"));
        assert_ran(&kernels, &names.each_ref().map(String::as_str));
    }
    assert_ran(&kernels, &["gemm_cores_small_nt_f16", "gemm_cores_small_nt_bf16"]);
    Ok(())
}

#[test]
fn the_oldest_devices_convolve_with_channels_last_without_tensor_cores() -> Result<()> {
    let name = "the_oldest_devices_convolve_with_channels_last_without_tensor_cores";
    let Some(device) = with_oldest(name)? else { return Ok(()) };
    let kernels = nhwc::convolutions_of_halves(&device)?;
    assert!(!is_emulated() || kernels.iter().all(|name| !name.contains("cores")), "{kernels:?}");
    assert_ran(&kernels, &["conv_pixels_tiles_f16", "conv_pixels_tiles_bf16", "gemm_small_f16"]);
    Ok(())
}

#[test]
fn tensor_cores_multiply_halves_as_the_cpu_does() -> Result<()> {
    let Some(device) = with_device("tensor_cores_multiply_halves_as_the_cpu_does")? else { return Ok(()) };
    mma::halves(&device);
    Ok(())
}

#[test]
fn warpgroups_multiply_halves_as_the_cpu_does() -> Result<()> {
    let Some(device) = with_warpgroups("warpgroups_multiply_halves_as_the_cpu_does")? else { return Ok(()) };
    let kernels = nhwc::products_of_halves(&device)?;
    for suffix in ["f16", "bf16"] {
        for side in ["nn", "nt"] {
            let names = ["large", "square", "tall", "small"];
            let names = names.map(|name| format!("gemm_warpgroups_{name}_{side}_{suffix}"));
            assert_ran(&kernels, &names.each_ref().map(String::as_str));
            let names = ["256", "192"].map(|name| format!("gemm_maps_{name}_{side}_{suffix}"));
            assert_ran(&kernels, &names.each_ref().map(String::as_str));
        }
        let names = ["gemm_warpgroups_narrow_nt", "gemm_join"].map(|name| format!("{name}_{suffix}"));
        assert_ran(&kernels, &names.each_ref().map(String::as_str));
    }
    mma::halves(&device);
    Ok(())
}

#[test]
fn warpgroups_convolve_halves_with_channels_last_as_the_cpu_does() -> Result<()> {
    let name = "warpgroups_convolve_halves_with_channels_last_as_the_cpu_does";
    let Some(device) = with_warpgroups(name)? else { return Ok(()) };
    let kernels = nhwc::convolutions_of_halves(&device)?;
    for suffix in ["f16", "bf16"] {
        let names = ["large", "square", "tall", "small", "narrow"];
        let names = names.map(|name| format!("conv_pixels_warpgroups_{name}_{suffix}"));
        assert_ran(&kernels, &names.each_ref().map(String::as_str));
        assert_ran(&kernels, &[&*format!("conv_pixels_join_{suffix}")]);
    }
    Ok(())
}

#[test]
fn the_oldest_devices_do_without_tensor_cores() -> Result<()> {
    let Some(device) = with_oldest("the_oldest_devices_do_without_tensor_cores")? else { return Ok(()) };
    mma::halves(&device);
    quant::products_of_codes(&device)?;
    quant::convolutions_of_codes(&device)?;
    quant::blocks_of_codes(&device)
}

#[test]
fn products_of_tf32_are_as_near_as_their_factors() -> Result<()> {
    let Some(device) = with_options("products_of_tf32_are_as_near_as_their_factors", &[])? else {
        return Ok(());
    };
    mma::floats(&device, true)
}

#[test]
fn products_of_float32_are_exact_without_tf32() -> Result<()> {
    let Some(device) = with_device("products_of_float32_are_exact_without_tf32")? else { return Ok(()) };
    mma::floats(&device, false)
}

#[test]
fn joined_and_split_tensors_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("joined_and_split_tensors_are_those_of_the_cpu")? else { return Ok(()) };
    movement::parts(&device);
    Ok(())
}

#[test]
fn pools_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("pools_are_those_of_the_cpu")? else { return Ok(()) };
    windows::pools(&device)
}

#[test]
fn pools_with_channels_last_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("pools_with_channels_last_are_those_of_the_cpu")? else { return Ok(()) };
    let kernels = nhwc::pools(&device)?;
    assert_ran(
        &kernels,
        &[
            "max_pool_pixels_i8",
            "max_pool_pixels_u8",
            "max_pool_pixels_f16",
            "max_pool_packs_f16",
            "max_pool_pair_3_f16",
            "max_pool_pair_2_bf16",
            "max_pool_pair_2_f32",
            "pool_pixels_bf16",
            "pool_packs_f32",
        ],
    );
    Ok(())
}

#[test]
fn elements_without_end_stay_in_their_windows() -> Result<()> {
    let Some(device) = with_device("elements_without_end_stay_in_their_windows")? else { return Ok(()) };
    nhwc::elements_without_end(&device)
}

#[test]
fn networks_with_channels_last_are_those_of_the_cpu() -> Result<()> {
    let options = [("prefer_nhwc", "1"), ("use_tf32", "0")];
    let Some(device) = with_options("networks_with_channels_last_are_those_of_the_cpu", &options)? else {
        return Ok(());
    };
    nhwc::networks(&device)
}

#[test]
fn reductions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("reductions_are_those_of_the_cpu")? else { return Ok(()) };
    rows::reductions(&device, &[]);
    Ok(())
}

#[test]
fn softmax_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("softmax_is_that_of_the_cpu")? else { return Ok(()) };
    rows::softmax(&device, &[]);
    Ok(())
}

#[test]
fn norms_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("norms_are_those_of_the_cpu")? else { return Ok(()) };
    rows::norms(&device, &[]);
    Ok(())
}

#[test]
fn running_sums_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("running_sums_are_those_of_the_cpu")? else { return Ok(()) };
    rows::cumulative(&device, &[]);
    Ok(())
}

#[test]
fn edges_of_lines_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("edges_of_lines_are_those_of_the_cpu")? else { return Ok(()) };
    rows::edges(&device, &[]);
    Ok(())
}

#[test]
fn resizes_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("resizes_are_those_of_the_cpu")? else { return Ok(()) };
    vision::resizes(&device);
    Ok(())
}

#[test]
fn grids_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("grids_are_those_of_the_cpu")? else { return Ok(()) };
    vision::grids(&device);
    Ok(())
}

#[test]
fn regions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("regions_are_those_of_the_cpu")? else { return Ok(()) };
    vision::regions(&device);
    Ok(())
}

#[test]
fn moved_windows_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("moved_windows_are_those_of_the_cpu")? else { return Ok(()) };
    vision::moved_windows(&device);
    Ok(())
}

#[test]
fn sorts_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("sorts_are_those_of_the_cpu")? else { return Ok(()) };
    sums::sorts(&device);
    Ok(())
}

#[test]
fn bits_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("bits_are_those_of_the_cpu")? else { return Ok(()) };
    sums::bits(&device);
    Ok(())
}

#[test]
fn einsums_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("einsums_are_those_of_the_cpu")? else { return Ok(()) };
    sums::einsums(&device);
    Ok(())
}

#[test]
fn norms_of_sums_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("norms_of_sums_are_those_of_the_cpu")? else { return Ok(()) };
    sums::norms(&device);
    Ok(())
}

#[test]
fn recurrent_layers_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("recurrent_layers_are_those_of_the_cpu")? else { return Ok(()) };
    recurrent::recurrent(&device);
    Ok(())
}

#[test]
fn attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("attention_is_that_of_the_cpu")? else { return Ok(()) };
    rows::attention(&device, &[]);
    attention::attention(&device);
    Ok(())
}

#[test]
fn attention_with_a_cache_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("attention_with_a_cache_is_that_of_the_cpu")? else { return Ok(()) };
    caches::attention_with_cache(&device)
}

#[test]
fn multi_head_attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("multi_head_attention_is_that_of_the_cpu")? else { return Ok(()) };
    rows::multi_head_attention(&device, &[]);
    attention::multi_head_attention(&device);
    Ok(())
}

#[test]
fn group_query_attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("group_query_attention_is_that_of_the_cpu")? else { return Ok(()) };
    rows::group_query_attention(&device, &[]);
    attention::group_query_attention(&device);
    Ok(())
}

#[test]
fn rotary_embeddings_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("rotary_embeddings_are_those_of_the_cpu")? else { return Ok(()) };
    attention::rotary_embedding(&device);
    Ok(())
}

#[test]
fn codes_of_numbers_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("codes_of_numbers_are_those_of_the_cpu")? else { return Ok(()) };
    quant::codes_of_numbers(&device)
}

#[test]
fn products_of_codes_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("products_of_codes_are_those_of_the_cpu")? else { return Ok(()) };
    quant::products_of_codes(&device)
}

#[test]
fn convolutions_of_codes_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("convolutions_of_codes_are_those_of_the_cpu")? else { return Ok(()) };
    quant::convolutions_of_codes(&device)
}

#[test]
fn functions_of_codes_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("functions_of_codes_are_those_of_the_cpu")? else { return Ok(()) };
    quant::functions_of_codes(&device)
}

#[test]
fn blocks_of_codes_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("blocks_of_codes_are_those_of_the_cpu")? else { return Ok(()) };
    quant::blocks_of_codes(&device)
}

#[test]
fn updates_are_in_place() -> Result<()> {
    let Some(device) = with_device("updates_are_in_place")? else { return Ok(()) };
    updates::in_place(&device)?;
    updates::elsewhere(&device)
}

#[test]
fn optimizers_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("optimizers_are_those_of_the_cpu")? else { return Ok(()) };
    optimizers::optimizers(&device);
    Ok(())
}

#[test]
fn numbers_of_gradients_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("numbers_of_gradients_are_those_of_the_cpu")? else { return Ok(()) };
    optimizers::numbers_of_gradients(&device);
    Ok(())
}

#[test]
fn batch_norms_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("batch_norms_are_those_of_the_cpu")? else { return Ok(()) };
    gradients::batch_norms(&device);
    Ok(())
}

#[test]
fn dropouts_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("dropouts_are_those_of_the_cpu")? else { return Ok(()) };
    gradients::dropouts(&device);
    Ok(())
}

#[test]
fn attention_in_training_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("attention_in_training_is_that_of_the_cpu")? else { return Ok(()) };
    gradients::attention(&device);
    Ok(())
}

#[test]
fn an_operator_runs_and_differentiates_by_its_formula() -> Result<()> {
    let name = "an_operator_runs_and_differentiates_by_its_formula";
    let Some(device) = with_device(name)? else { return Ok(()) };
    formulas::gated_add(&device)
}

#[test]
fn losses_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("losses_are_those_of_the_cpu")? else { return Ok(()) };
    gradients::losses(&device);
    Ok(())
}

#[test]
fn updates_that_are_added_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("updates_that_are_added_are_those_of_the_cpu")? else { return Ok(()) };
    gradients::scatters(&device);
    Ok(())
}

#[test]
fn gradients_of_convolutions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("gradients_of_convolutions_are_those_of_the_cpu")? else { return Ok(()) };
    gradients::convolutions(&device);
    Ok(())
}

#[test]
fn fp8_and_fp4_types_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("fp8_and_fp4_types_are_those_of_the_cpu")? else { return Ok(()) };
    fp8_fp4::casts_and_quantization(&device);
    Ok(())
}

#[test]
fn linear_attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("linear_attention_is_that_of_the_cpu")? else { return Ok(()) };
    attention::linear_attention(&device);
    Ok(())
}

#[test]
fn control_flow_on_the_device_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("control_flow_on_the_device_is_that_of_the_cpu")? else { return Ok(()) };
    control::results(&device)?;
    control::bits(&device)
}

#[test]
fn control_flow_in_a_pool_and_as_graphs_is_that_of_the_cpu() -> Result<()> {
    let ways =
        [("arena.use_cuda_mempool", "1"), ("enable_cuda_graph", "1"), ("do_copy_in_default_stream", "0")];
    let test = "control_flow_in_a_pool_and_as_graphs_is_that_of_the_cpu";
    if with_device(test)?.is_none() {
        return Ok(());
    }
    for way in ways {
        let device: Arc<dyn Device> = CudaDevice::open(0, &options(&[way, ("use_tf32", "0")]))?;
        control::results(&device)?;
    }
    Ok(())
}

#[test]
fn iterations_wait_for_nothing_but_their_condition() -> Result<()> {
    if with_device("iterations_wait_for_nothing_but_their_condition")?.is_none() {
        return Ok(());
    }
    let device = CudaDevice::open(0, &options(&[]))?;
    let shared: Arc<dyn Device> = device.clone();
    for (op, runs) in control::counts(&shared, || device.counters())? {
        let [few, many] =
            runs.map(|(before, after)| (after.waits - before.waits, after.launches - before.launches));
        assert_eq!(few.0, many.0, "{op}: waits of 2 and of 9 iterations");
        assert!(few.1 < many.1, "{op}: launches of 2 and of 9 iterations");
    }
    Ok(())
}

#[test]
fn sizes_that_the_run_tells_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("sizes_that_the_run_tells_are_those_of_the_cpu")? else { return Ok(()) };
    select::results(&device)
}

const WAYS: [&[(&str, &str)]; 5] = [
    &[],
    &[("arena.use_cuda_mempool", "1")],
    &[("enable_cuda_graph", "1")],
    &[("do_copy_in_default_stream", "0")],
    &[("enable_cuda_graph", "1"), ("do_copy_in_default_stream", "0")],
];

#[test]
fn results_of_any_size_are_read_where_they_are() -> Result<()> {
    if with_device("results_of_any_size_are_read_where_they_are")?.is_none() {
        return Ok(());
    }
    for way in WAYS {
        let device: Arc<dyn Device> = CudaDevice::open(0, &options(&[way, &[("use_tf32", "0")]].concat()))?;
        select::chains(&device)?;
        select::bodies(&device)?;
        select::bound(&device)?;
        select::planned(&device)?;
    }
    Ok(())
}

#[test]
fn the_host_reads_a_count_and_nothing_else() -> Result<()> {
    if with_device("the_host_reads_a_count_and_nothing_else")?.is_none() {
        return Ok(());
    }
    for way in WAYS {
        let device = CudaDevice::open(0, &options(way))?;
        let shared: Arc<dyn Device> = device.clone();
        let (before, after) = select::counts(&shared, || device.counters())?;
        assert_eq!(after.waits - before.waits, 3 + 4, "three counts and four outputs, {way:?}");
        if way.contains(&("enable_cuda_graph", "1")) {
            assert!(
                after.replays > before.replays && after.captures == before.captures,
                "{before:?}, {after:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn results_that_do_not_fit_are_refused_by_name() -> Result<()> {
    if with_device("results_that_do_not_fit_are_refused_by_name")?.is_none() {
        return Ok(());
    }
    for way in WAYS {
        select::limits(&|limit| {
            let limit = limit.map(|bytes| bytes.to_string());
            let mut all = [way, &[("arena_extend_strategy", "kSameAsRequested")]].concat();
            all.extend(limit.as_deref().map(|limit| ("gpu_mem_limit", limit)));
            let device: Arc<dyn Device> = CudaDevice::open(0, &options(&all))?;
            Ok(device)
        })?;
    }
    Ok(())
}
