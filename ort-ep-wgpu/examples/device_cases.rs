//! Runs cases in ONNX's layout on a wgpu device, with the CPU for what it does not claim, and says
//! how many ran on the device alone.
//!
//! The arguments and the lines are those of [`device_cases_as_told`]. `ORT_WGPU_LIMITS=minimum`
//! runs within the limits that every implementation of WebGPU has.

use ort_core::Result;
use ort_core::ep::ProviderOptions;
use ort_ep_cpu as _;
use ort_ep_wgpu::WgpuProvider;
use ort_testkit::device_cases_as_told;

fn main() -> Result<()> {
    let limits = std::env::var("ORT_WGPU_LIMITS").unwrap_or_else(|_| "adapter".to_owned());
    let options = ProviderOptions::from([("limits".to_owned(), limits)]);
    device_cases_as_told(&WgpuProvider, "ort_wgpu_provider", &options)
}
