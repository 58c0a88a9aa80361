//! Runs cases in ONNX's layout on a CUDA device, with the CPU for what it does not claim, and says
//! how many ran on the device alone. Products of float32 are of float32, as the expected outputs
//! are.
//!
//! The arguments are folders of cases; `--only TEXT` takes those whose names contain it,
//! `--library` the provider in the library that cargo built beside this example. Kernels are the
//! provider's own, whatever the machine has; `--libraries` takes NVIDIA's libraries where they are
//! found, `--library-path FOLDER` those of a folder. A first line says which they are. The other
//! lines are those of [`run_device_cases`].

use std::path::PathBuf;

use ort_core::Result;
use ort_core::ep::{ExecutionProvider, ProviderOptions};
use ort_ep_cpu as _;
use ort_ep_cuda::{CudaDevice, CudaProvider, LibraryReport};
use ort_testkit::{built_provider, run_device_cases};

fn main() -> Result<()> {
    let (mut folders, mut only) = (Vec::new(), None);
    let mut on: &'static dyn ExecutionProvider = &CudaProvider;
    let mut options: ProviderOptions =
        ["use_cublas", "use_cudnn", "use_tf32"].map(|name| (name.to_owned(), "0".to_owned())).into();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => only = arguments.next(),
            "--library" => on = built_provider("ort_cuda_provider")?,
            "--libraries" => options.retain(|name, _| name == "use_tf32"),
            "--library-path" => {
                options.retain(|name, _| name == "use_tf32");
                options.extend(arguments.next().map(|folder| ("library_path".to_owned(), folder)));
            }
            _ => folders.push(PathBuf::from(argument)),
        }
    }
    if let Ok(device) = CudaDevice::open(0, &options) {
        for LibraryReport { name, found } in device.libraries() {
            match found {
                Ok(found) => println!("library {name} {} at {}", found.version, found.path.display()),
                Err(reason) => println!("library {name}: none, {reason}"),
            }
        }
    }
    run_device_cases(on, &options, &folders, only.as_deref())
}
