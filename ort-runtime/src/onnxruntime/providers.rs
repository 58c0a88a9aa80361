//! ONNX Runtime's names of our providers, and which of them work on this machine.

use std::path::Path;
use std::sync::OnceLock;

use ort_alloc::fork::get_or_init;
use ort_core::ep::{DeviceInfo, ExecutionProvider, providers};

/// The provider that every session has.
pub const CPU: &str = "CPUExecutionProvider";

/// ONNX Runtime's name and ours of each provider, in the order of preference.
pub const OURS: [(&str, &str); 3] =
    [("CUDAExecutionProvider", "cuda"), ("WebGpuExecutionProvider", "wgpu"), (CPU, "cpu")];

/// The providers that some build of ONNX Runtime has, in its order.
pub const KNOWN: [&str; 21] = [
    "NvTensorRTRTXExecutionProvider",
    "TensorrtExecutionProvider",
    "CUDAExecutionProvider",
    "MIGraphXExecutionProvider",
    "OpenVINOExecutionProvider",
    "DnnlExecutionProvider",
    "VitisAIExecutionProvider",
    "QNNExecutionProvider",
    "NnapiExecutionProvider",
    "VSINPUExecutionProvider",
    "JsExecutionProvider",
    "CoreMLExecutionProvider",
    "ACLExecutionProvider",
    "DmlExecutionProvider",
    "RknpuExecutionProvider",
    "WebNNExecutionProvider",
    "WebGpuExecutionProvider",
    "XnnpackExecutionProvider",
    "CANNExecutionProvider",
    "AzureExecutionProvider",
    CPU,
];

/// Returns the names of our providers that have a device here, CPU last. The first call looks for
/// GPUs.
pub fn working() -> &'static [&'static str] {
    static WORKING: OnceLock<Vec<&str>> = OnceLock::new();
    let names: &Vec<&str> = get_or_init(&WORKING, || {
        let linked = providers();
        let works = |own: &str| linked.iter().any(|provider| provider.name() == own && has_device(*provider));
        OURS.into_iter().filter(|(_, own)| works(own)).map(|(theirs, _)| theirs).collect()
    });
    names
}

/// Returns ONNX Runtime's name of a provider of ours.
pub fn name_of(own: &str) -> &str {
    OURS.iter().find(|(_, known)| *known == own).map_or(own, |(theirs, _)| *theirs)
}

/// Where Linux shows GPUs: the direct rendering manager, NVIDIA's driver, Windows' subsystem, and
/// the GPUs of Qualcomm and Arm.
const GPU_NODES: [&str; 5] = ["/dev/dri", "/dev/nvidiactl", "/dev/dxg", "/dev/kgsl-3d0", "/dev/mali0"];

/// Whether the machine may have a GPU. Without one no driver is loaded, which takes time, and some
/// print what they miss.
fn may_have_gpu() -> bool {
    !cfg!(target_os = "linux") || GPU_NODES.iter().any(|node| Path::new(node).exists())
}

/// Whether a provider has a device that is worth its use: drivers that compute on the CPU are not.
fn has_device(provider: &dyn ExecutionProvider) -> bool {
    if provider.name() != "cpu" && !may_have_gpu() {
        return false;
    }
    let is_software = |device: &DeviceInfo| {
        provider.name() != "cpu" && device.facts.iter().any(|(name, kind)| name == "kind" && kind == "Cpu")
    };
    provider.devices().is_ok_and(|devices| devices.iter().any(|device| !is_software(device)))
}
