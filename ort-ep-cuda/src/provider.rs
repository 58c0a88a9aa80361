//! The CUDA execution provider: device discovery, and the devices that sessions share.

use std::sync::{Arc, Weak};

use ort_core::ep::{Device, DeviceInfo, ExecutionProvider, ProviderEntry, ProviderOptions};
use ort_core::{Result, ensure};
use parking_lot::Mutex;

use crate::device::CudaDevice;
use crate::device_info::describe;
use crate::driver::{Driver, NO_DEVICE};
use crate::libraries::reports;
use crate::options::{NAME, Options};

/// The CUDA execution provider, with one [`CudaDevice`] per GPU that the NVIDIA driver shows.
///
/// Its options have ONNX Runtime's names:
///
/// | option | value |
/// | --- | --- |
/// | `device_id` | the device number, as `nvidia-smi` counts; default: the opened device |
/// | `gpu_mem_limit` | the most bytes of device memory the arena holds; default: no limit |
/// | `arena_extend_strategy` | `kNextPowerOfTwo` (the default) or `kSameAsRequested` |
/// | `do_copy_in_default_stream` | `0`: copies have own streams; `1` (the default): they do not |
/// | `user_compute_stream` | address of the caller's compute stream; 0 or absent: our own |
/// | `library_path` | the folder of NVIDIA's libraries; without it they are searched for |
/// | `use_cublas` | `1` (the default): cuBLASLt computes GEMMs, if found; `0`: it is not used |
/// | `arena.use_cuda_mempool` | `1`: a stream-ordered pool replaces the arena; `0` (the default) |
/// | `arena.cuda_mempool_release_threshold` | free bytes the pool keeps at a sync; default: 0 |
/// | `arena.cuda_mempool_bytes_to_keep_on_shrink` | bytes that a trim leaves; default: 0 |
/// | `use_cudnn` | `1` (the default): cuDNN computes convolutions, if found; `0`: it is not used |
/// | `cudnn_conv_algo_search` | `EXHAUSTIVE` (the default), `HEURISTIC` or `DEFAULT` |
/// | `cudnn_conv_use_max_workspace` | `1` (the default): up to all free memory; `0`: 32 MiB |
/// | `cudnn_conv1d_pad_to_nc1d` | `1`: 1-D convolutions as NC1D; `0` (the default): as NCD1 |
/// | `prefer_nhwc` | `1`: convolutions and the nodes between them run in NHWC; `0` (the default) |
/// | `enable_cuda_graph` | `1`: runs of the same shapes replay CUDA graphs; `0` (the default) |
/// | `use_tf32` | `1` (the default): float32 GEMMs and convolutions may use TF32; `0`: never |
#[derive(Debug)]
pub struct CudaProvider;

inventory::submit! { ProviderEntry(&CudaProvider) }

impl ExecutionProvider for CudaProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let driver = Driver::get()?;
        let count = driver.count()?;
        ensure!(count > 0, EpFail, help = NO_DEVICE, "the NVIDIA driver shows no device");
        let libraries = reports();
        (0..count).map(|index| describe(driver, driver.device(index)?, &libraries)).collect()
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        // Sessions with the same options share a device, and with it the compiled modules and the
        // free memory. A device whose context is broken is dropped from the list.
        static OPEN: Mutex<Vec<(Options, Weak<CudaDevice>)>> = Mutex::new(Vec::new());
        let parsed = Options::parse(index, options)?;
        // The lock is held while a device opens, so that two sessions cannot open the same one
        // twice.
        let mut open = OPEN.lock();
        open.retain(|(_, device)| device.upgrade().is_some_and(|device| device.check().is_ok()));
        let same = open.iter().find(|(options, _)| *options == parsed);
        if let Some(device) = same.and_then(|(_, device)| device.upgrade()) {
            return Ok(device);
        }
        let device = CudaDevice::open(index, options)?;
        open.push((parsed, Arc::downgrade(&device)));
        Ok(device)
    }
}
