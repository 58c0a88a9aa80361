//! Convolutions by cuDNN.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::session::Model;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::tensor::Value;
use ort_ep_cuda::CudaDevice;
use ort_testkit::on_device::{gradients, nhwc, windows};

use super::support::{DRIVER, emulator, is_emulated, options, run, with_device};
use super::{DNN, LT, check_close, doubles, find, profiled, session, tensor};

/// Whether cuDNN computes what it is asked for: by the times of a GPU a search may take kernels of
/// ours.
fn takes_library(search: &str) -> bool {
    is_emulated() || search != "EXHAUSTIVE"
}

/// A search that takes cuDNN on any device.
fn search() -> (&'static str, &'static str) {
    ("cudnn_conv_algo_search", if is_emulated() { "EXHAUSTIVE" } else { "HEURISTIC" })
}

/// Calls with a device that has cuDNN, and whether it is taken, for each way to find an algorithm
/// and to see a signal as an image.
fn in_each_way(check: impl Fn(&CudaDevice, &Arc<dyn Device>, bool) -> Result<()>) -> Result<()> {
    for search in ["EXHAUSTIVE", "HEURISTIC", "DEFAULT"] {
        for nc1d in ["0", "1"] {
            let given = [("cudnn_conv_algo_search", search), ("cudnn_conv1d_pad_to_nc1d", nc1d)];
            let Some(found) = find(&[DNN], &given)? else { return Ok(()) };
            let device: Arc<dyn Device> = found.device.clone();
            check(&found.device, &device, takes_library(search))?;
        }
    }
    Ok(())
}

#[test]
fn convolutions_of_cudnn_are_those_of_the_cpu() -> Result<()> {
    if with_device("convolutions::convolutions_of_cudnn_are_those_of_the_cpu")?.is_none() {
        return Ok(());
    }
    in_each_way(|cuda, device, is_taken| {
        windows::convolutions(device)?;
        let counters = cuda.counters();
        assert!(!is_taken || counters.routines >= 20, "{counters:?}");
        Ok(())
    })
}

/// With the channels last: what the library has no algorithm for, or is not asked for, is computed
/// by kernels of ours.
#[test]
fn convolutions_of_cudnn_with_channels_last_are_those_of_the_cpu() -> Result<()> {
    if with_device("convolutions::convolutions_of_cudnn_with_channels_last_are_those_of_the_cpu")?.is_none() {
        return Ok(());
    }
    // There is one algorithm, however it is found.
    for nc1d in ["0", "1"] {
        let Some(found) = find(&[DNN], &[search(), ("cudnn_conv1d_pad_to_nc1d", nc1d)])? else {
            return Ok(());
        };
        let device: Arc<dyn Device> = found.device.clone();
        let kernels = nhwc::convolutions(&device)?;
        let counters = found.device.counters();
        assert!(counters.routines >= 20, "{counters:?}");
        let has = |name: &str| kernels.iter().any(|kernels| kernels.starts_with(name));
        for name in ["conv_pixels_tiles", "conv_pixels_planes", "gem", "cuDNN"] {
            assert!(has(name), "{name} is not among {kernels:?}");
        }
    }
    let Some(found) = find(&[DNN], &[("cudnn_conv_algo_search", "HEURISTIC")])? else { return Ok(()) };
    let device: Arc<dyn Device> = found.device.clone();
    let of_halves = nhwc::convolutions_of_halves(&device)?;
    // Their addend is in the place of the result, so that what follows is a pass of ours.
    let has = |name: &str| of_halves.iter().any(|kernels| kernels.starts_with(name));
    let expected = "cuDNN IMPLICIT_PRECOMP_GEMM, 65536 bytes, elementwise";
    assert!(!is_emulated() || has(expected), "{expected} is not among {of_halves:?}");
    Ok(())
}

#[test]
fn networks_of_cudnn_with_channels_last_are_those_of_the_cpu() -> Result<()> {
    if with_device("convolutions::networks_of_cudnn_with_channels_last_are_those_of_the_cpu")?.is_none() {
        return Ok(());
    }
    let Some(found) = find(&[DNN], &[search(), ("prefer_nhwc", "1")])? else { return Ok(()) };
    let device: Arc<dyn Device> = found.device.clone();
    nhwc::networks(&device)?;
    let counters = found.device.counters();
    assert!(counters.routines >= 12, "{counters:?}");
    Ok(())
}

/// Transposed convolutions and both gradients. Algorithms that add up in any order, which the
/// emulator says are the fastest, are never taken.
#[test]
fn transposed_convolutions_and_gradients_of_cudnn_are_those_of_the_cpu() -> Result<()> {
    if with_device("convolutions::transposed_convolutions_and_gradients_of_cudnn_are_those_of_the_cpu")?
        .is_none()
    {
        return Ok(());
    }
    in_each_way(|cuda, device, is_taken| {
        windows::transposed_convolutions(device)?;
        let transposed = cuda.counters().routines;
        gradients::convolutions(device);
        let all = cuda.counters().routines;
        assert!(!is_taken || transposed >= 5 && all >= transposed + 10, "{transposed}, {all}");
        Ok(())
    })
}

#[test]
fn gradients_have_the_same_bits_in_each_run() -> Result<()> {
    if with_device("convolutions::gradients_have_the_same_bits_in_each_run")?.is_none() {
        return Ok(());
    }
    for (search, expected) in [("EXHAUSTIVE", "WINOGRAD"), ("HEURISTIC", "WINOGRAD"), ("DEFAULT", "ALGO_1")] {
        let Some(found) = find(&[DNN], &[("cudnn_conv_algo_search", search)])? else { return Ok(()) };
        let mut builder = GraphBuilder::new("transposed");
        let x = builder.input("x", DType::F32, &["2", "6", "9", "8"]);
        let w = builder.input("w", DType::F32, &["6", "9", "3", "3"]);
        let y = builder.node("ConvTranspose", &[x, w], &[("pads", Attribute::Ints(vec![1; 4]))])?;
        let model = Model::from_graph(builder.finish(&[y])?);
        let inputs: [(&str, Value); 2] = [
            ("x", tensor(DType::F32, &[2, 6, 9, 8], 0)?.into()),
            ("w", tensor(DType::F32, &[6, 9, 3, 3], 1)?.into()),
        ];
        let session = session(&found.device, &model)?;
        let (_, first) = profiled(&session, &inputs, 0)?;
        let (kernels, again) = profiled(&session, &inputs, 3)?;
        assert!(doubles(&first[0])? == doubles(&again[0])?, "{search}");
        let kernels = kernels.join(";");
        assert!(!takes_library(search) || kernels.starts_with("cuDNN BackwardData "), "{search}: {kernels}");
        assert!(!kernels.contains("ALGO_0"), "{search}: {kernels}");
        assert!(!is_emulated() || kernels.contains(expected), "{search}: {kernels}");
    }
    Ok(())
}

/// `FusedConv` of x [2, 6, 9, 8] and w [9, 6, 3, 3] or [9, 6, 5, 5], or `NhwcConv` of as many
/// pixels, whose addend is of no more use behind it where it is to be in the result's place.
struct Fused {
    dtype: DType,
    channels_last: bool,
    kernel: usize,
    has_bias: bool,
    has_addend: bool,
    in_place: bool,
    activation: &'static str,
}

impl Fused {
    fn model(&self) -> Result<Model> {
        let mut builder = GraphBuilder::new("fused");
        let mut input = |name: &str| {
            let sizes = self.shape(name).into_iter().map(|size| size.to_string()).collect::<Vec<_>>();
            builder.input(name, self.dtype, &sizes.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let [x, w, bias, mut addend] = ["x", "w", "b", "z"].map(&mut input);
        if self.in_place {
            addend = builder.node("Neg", &[addend], &[])?;
        }
        let given = |value, is_given: bool| is_given.then_some(value);
        let inputs = [Some(x), Some(w), given(bias, self.has_bias), given(addend, self.has_addend)];
        let attrs = [
            ("pads", Attribute::Ints(vec![(self.kernel / 2) as i64; 4])),
            ("activation", Attribute::String(self.activation.to_owned())),
        ];
        let op = if self.channels_last { (RUNTIME, "NhwcConv") } else { (MICROSOFT, "FusedConv") };
        let results = builder.add(op, &inputs, &attrs, 1, Vec::new())?;
        // What is read behind it keeps its place.
        let last = match self.has_addend && !self.in_place {
            true => builder.node("Add", &[results[0], addend], &[])?,
            false => builder.node("Neg", &[results[0]], &[])?,
        };
        Ok(Model::from_graph(builder.finish(&[last])?))
    }

    /// The shape of an input.
    fn shape(&self, name: &str) -> Vec<usize> {
        let mut shape = match name {
            "x" => vec![2, 6, 9, 8],
            "w" => vec![9, 6, self.kernel, self.kernel],
            "b" => return vec![9],
            _ => vec![2, 9, 9, 8],
        };
        if self.channels_last {
            shape[1..].rotate_left(1);
        }
        shape
    }

    fn inputs(&self) -> Result<[(&'static str, Value); 4]> {
        let input = |name, seed| tensor(self.dtype, &self.shape(name), seed).map(|x| (name, Value::from(x)));
        Ok([input("x", 0)?, input("w", 1)?, input("b", 2)?, input("z", 3)?])
    }
}

/// What follows a convolution is in its call where that is exactly what is needed; also where the
/// library has no code for it.
#[test]
fn what_follows_a_convolution_is_in_its_call_or_behind_it() -> Result<()> {
    const NAME: &str = "convolutions::what_follows_a_convolution_is_in_its_call_or_behind_it";
    const IN_CALL: &str = "ORT_CUDA_EMULATOR_CUDNN_FUSED";
    if std::env::var_os(DRIVER).is_none() {
        let emulator = emulator().to_string_lossy().into_owned();
        let (said, is_fine) = run(NAME, &[(DRIVER, &emulator), (IN_CALL, "0")]);
        assert!(is_fine && said.contains("1 passed"), "{said}");
    }
    if with_device(NAME)?.is_none() {
        return Ok(());
    }
    let refuses = std::env::var(IN_CALL).is_ok_and(|value| value == "0");
    let own = CudaDevice::open(0, &options(&[("use_tf32", "0")]))?;
    let Some(found) = find(&[DNN], &[search()])? else { return Ok(()) };
    let types = [(DType::F32, 1e-5), (DType::F16, 3e-3)];
    let layouts = [false, true].into_iter();
    for (channels_last, (dtype, tolerance)) in layouts.flat_map(|last| types.map(|of| (last, of))) {
        for (has_bias, has_addend, in_place) in [
            (false, false, false),
            (true, false, false),
            (true, true, false),
            (true, true, true),
            (false, true, false),
        ] {
            for activation in ["Relu", "Tanh", ""] {
                let fused =
                    Fused { dtype, channels_last, kernel: 3, has_bias, has_addend, in_place, activation };
                let what = format!(
                    "{dtype:?} last {channels_last} bias {has_bias} addend {has_addend} in place {in_place} {activation}"
                );
                let (model, inputs) = (fused.model()?, fused.inputs()?);
                // The first run searches, and must have the right result, too.
                let of_library = session(&found.device, &model)?;
                let (_, first) = profiled(&of_library, &inputs, 0)?;
                let (kernels, results) = profiled(&of_library, &inputs, 0)?;
                let (_, expected) = profiled(&session(&own, &model)?, &inputs, 0)?;
                let kernels = kernels.into_iter().find(|kernel| kernel.contains("cuDNN")).unwrap_or_default();
                let is_fused = has_bias && !in_place && activation == "Relu";
                let in_call = kernels.contains("with bias and Relu");
                assert!(
                    kernels.starts_with("cuDNN ") && in_call == (is_fused && !refuses),
                    "{what}: {kernels}"
                );
                let has_pass = !is_fused && (has_bias || has_addend && !in_place || !activation.is_empty());
                assert_eq!(kernels.contains("elementwise"), has_pass, "{what}: {kernels}");
                // The emulator's fastest algorithm is slow with what follows in its call. Behind
                // it, a pass of ours takes much longer than any.
                let is_winograd = kernels.contains("WINOGRAD");
                let is_expected = !channels_last && (!is_fused || refuses);
                let is_told = is_emulated() && !has_pass;
                assert!(!is_told || is_winograd == is_expected, "{what}: {kernels}");
                for results in [first, results] {
                    check_close(&doubles(&results[0])?, &doubles(&expected[0])?, tolerance, &what);
                }
            }
        }
    }
    Ok(())
}

/// Where kernels of our own are faster they are taken, unless the options name another search; also
/// where an addend is in the place of the result.
#[test]
fn a_convolution_is_never_slower_than_by_our_kernels() -> Result<()> {
    const NAME: &str = "convolutions::a_convolution_is_never_slower_than_by_our_kernels";
    const STEP_TIME: &str = "ORT_CUDA_EMULATOR_STEP_TIME";
    if std::env::var_os(STEP_TIME).is_none() {
        let emulator = emulator().to_string_lossy().into_owned();
        let (said, is_fine) = run(NAME, &[(DRIVER, &emulator), (STEP_TIME, "0")]);
        assert!(is_fine && said.contains("1 passed"), "{said}");
        return Ok(());
    }
    let own = CudaDevice::open(0, &options(&[("use_tf32", "0")]))?;
    for (search, graphs, in_place) in [
        ("EXHAUSTIVE", "0", false),
        ("EXHAUSTIVE", "0", true),
        ("EXHAUSTIVE", "1", true),
        ("HEURISTIC", "0", false),
        ("DEFAULT", "0", true),
    ] {
        let given = [("cudnn_conv_algo_search", search), ("enable_cuda_graph", graphs)];
        let Some(found) = find(&[DNN], &given)? else { return Ok(()) };
        let (dtype, activation) = (DType::F32, "Relu");
        let (has_bias, has_addend, channels_last) = (true, true, false);
        let fused = Fused { dtype, channels_last, kernel: 3, has_bias, has_addend, in_place, activation };
        let (model, inputs) = (fused.model()?, fused.inputs()?);
        let of_library = session(&found.device, &model)?;
        let (_, expected) = profiled(&session(&own, &model)?, &inputs, 0)?;
        for turn in 0..3 {
            let (kernels, results) = profiled(&of_library, &inputs, 0)?;
            let name = if search == "EXHAUSTIVE" { "conv_tiles" } else { "cuDNN" };
            let is_taken = kernels.iter().any(|kernels| kernels.starts_with(name));
            assert!(is_taken, "{given:?}, run {turn}: {kernels:?}");
            check_close(&doubles(&results[0])?, &doubles(&expected[0])?, 1e-5, search);
        }
    }
    Ok(())
}

/// Convolutions that are products with the channels last are also tried as such, by cuBLASLt.
#[test]
fn pointwise_convolutions_are_products_where_these_are_faster() -> Result<()> {
    if with_device("convolutions::pointwise_convolutions_are_products_where_these_are_faster")?.is_none()
        || !is_emulated()
    {
        return Ok(());
    }
    let own = CudaDevice::open(0, &options(&[("use_tf32", "0")]))?;
    for (names, expected) in [([LT, DNN].as_slice(), "cuBLASLt "), (&[DNN], "cuDNN IMPLICIT_PRECOMP_GEMM")] {
        let Some(found) = find(names, &[])? else { return Ok(()) };
        let (dtype, activation) = (DType::F32, "Relu");
        let (has_bias, has_addend, channels_last, in_place) = (true, true, true, true);
        let fused = Fused { dtype, channels_last, kernel: 1, has_bias, has_addend, in_place, activation };
        let (model, inputs) = (fused.model()?, fused.inputs()?);
        let (kernels, results) = profiled(&session(&found.device, &model)?, &inputs, 0)?;
        assert!(kernels.iter().any(|kernels| kernels.starts_with(expected)), "{kernels:?}");
        let (_, expected) = profiled(&session(&own, &model)?, &inputs, 0)?;
        check_close(&doubles(&results[0])?, &doubles(&expected[0])?, 1e-5, "NhwcConv");
    }
    Ok(())
}

/// The workspace of convolutions: as much as there is, 32 MiB at most, and less where the budget
/// has less.
#[test]
fn a_convolution_has_the_workspace_that_there_is() -> Result<()> {
    if with_device("convolutions::a_convolution_has_the_workspace_that_there_is")?.is_none() || !is_emulated()
    {
        return Ok(());
    }
    // By the emulator, the faster an algorithm the more memory it takes: 48 MiB, 4 MiB, 64 KiB,
    // nothing.
    let cases: [(&str, &str, &str, &str); 6] = [
        ("EXHAUSTIVE", "1", "200000000", "cuDNN FFT, 50331648 bytes"),
        ("EXHAUSTIVE", "0", "200000000", "cuDNN GEMM, 4194304 bytes"),
        ("EXHAUSTIVE", "1", "2000000", "cuDNN IMPLICIT_PRECOMP_GEMM, 65536 bytes"),
        ("EXHAUSTIVE", "1", "70000", "cuDNN IMPLICIT_GEMM, 0 bytes"),
        ("HEURISTIC", "1", "200000000", "cuDNN FFT, 50331648 bytes"),
        ("DEFAULT", "1", "200000000", "cuDNN IMPLICIT_PRECOMP_GEMM, 65536 bytes"),
    ];
    for (search, most, limit, expected) in cases {
        let given = [
            ("cudnn_conv_algo_search", search),
            ("cudnn_conv_use_max_workspace", most),
            ("gpu_mem_limit", limit),
            ("arena_extend_strategy", "kSameAsRequested"),
        ];
        let Some(found) = find(&[DNN], &given)? else { return Ok(()) };
        let fused = Fused {
            dtype: DType::F32,
            channels_last: false,
            kernel: 5,
            has_bias: false,
            has_addend: false,
            in_place: false,
            activation: "",
        };
        let of_library = session(&found.device, &fused.model()?)?;
        let (kernels, _) = profiled(&of_library, &fused.inputs()?, 1)?;
        assert!(kernels.iter().any(|kernel| kernel == expected), "{given:?}: {kernels:?}");
        let stats = found.device.stats();
        assert!(stats.max_in_use <= limit.parse().unwrap_or(0), "{given:?}: {stats}");
    }
    Ok(())
}

/// A convolution is searched once, by what is asked for first, and never while a graph is captured.
#[test]
fn convolutions_are_captured_behind_their_search() -> Result<()> {
    if with_device("convolutions::convolutions_are_captured_behind_their_search")?.is_none() {
        return Ok(());
    }
    let fused = |in_place| Fused {
        dtype: DType::F32,
        channels_last: false,
        kernel: 3,
        has_bias: true,
        has_addend: true,
        in_place,
        activation: "Relu",
    };
    let own = CudaDevice::open(0, &options(&[("use_tf32", "0")]))?;
    let ways: [&[(&str, &str)]; 3] = [
        &[("do_copy_in_default_stream", "0")],
        &[("enable_cuda_graph", "1")],
        &[("enable_cuda_graph", "1"), ("do_copy_in_default_stream", "0")],
    ];
    for way in ways {
        let Some(found) = find(&[DNN], &[way, &[search()]].concat())? else { return Ok(()) };
        for in_place in [false, true] {
            let (fused, has_graphs) = (fused(in_place), way[0].0 == "enable_cuda_graph");
            let of_library = session(&found.device, &fused.model()?)?;
            let expected = doubles(&session(&own, &fused.model()?)?.run(&fused.inputs()?)?[0].1)?;
            for turn in 0..5 {
                let before = found.device.counters();
                let actual = doubles(&of_library.run(&fused.inputs()?)?[0].1)?;
                check_close(&actual, &expected, 1e-5, &format!("run {turn}, {way:?}"));
                let after = found.device.counters();
                let replayed = (after.routines == before.routines, after.replays > before.replays);
                let comes_again = has_graphs && turn > 2;
                if turn > 2 {
                    assert_eq!(replayed, (comes_again, comes_again), "run {turn}, {way:?}");
                }
            }
        }
    }
    Ok(())
}

/// ONNX's own `Conv` has bfloat16.
#[test]
fn convolutions_of_bfloat16_are_those_of_our_kernels() -> Result<()> {
    if with_device("convolutions::convolutions_of_bfloat16_are_those_of_our_kernels")?.is_none() {
        return Ok(());
    }
    let Some(found) = find(&[DNN], &[search()])? else { return Ok(()) };
    let mut builder = GraphBuilder::new("conv");
    let x = builder.input("x", DType::BF16, &["2", "6", "9", "8"]);
    let w = builder.input("w", DType::BF16, &["9", "6", "3", "3"]);
    let b = builder.input("b", DType::BF16, &["9"]);
    let y = builder.node("Conv", &[x, w, b], &[])?;
    let model = Model::from_graph(builder.finish(&[y])?);
    let inputs: [(&str, Value); 3] = [
        ("x", tensor(DType::BF16, &[2, 6, 9, 8], 0)?.into()),
        ("w", tensor(DType::BF16, &[9, 6, 3, 3], 1)?.into()),
        ("b", tensor(DType::BF16, &[9], 2)?.into()),
    ];
    let (kernels, results) = profiled(&session(&found.device, &model)?, &inputs, 0)?;
    assert!(kernels.iter().any(|kernel| kernel.starts_with("cuDNN ")), "{kernels:?}");
    let own = CudaDevice::open(0, &options(&[("use_tf32", "0")]))?;
    let (_, expected) = profiled(&session(&own, &model)?, &inputs, 0)?;
    check_close(&doubles(&results[0])?, &doubles(&expected[0])?, 2e-2, "Conv");
    Ok(())
}
