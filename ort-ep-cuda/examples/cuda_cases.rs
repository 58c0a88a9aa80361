//! Runs cases in ONNX's layout on a CUDA device, with the CPU for what it does not claim, and says how many ran on the device alone.
//!
//! The arguments are folders of cases; `--only TEXT` takes those whose names contain it. The lines are those of [`run_device_cases`].

use std::path::PathBuf;

use ort_core::Result;
use ort_core::ep::ProviderOptions;
use ort_ep_cpu as _;
use ort_ep_cuda::CudaProvider;
use ort_testkit::run_device_cases;

fn main() -> Result<()> {
    let (mut folders, mut only) = (Vec::new(), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => only = arguments.next(),
            _ => folders.push(PathBuf::from(argument)),
        }
    }
    run_device_cases(&CudaProvider, &ProviderOptions::new(), &folders, only.as_deref())
}
