//! The CPU provider and its one device, the host's cores and memory.

use std::sync::{Arc, OnceLock};

use ort_alloc::fork::get_or_init;
use ort_alloc::{Allocator, DeviceId, HostAllocator};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, ExecutionProvider, Fingerprint, KernelTable, NodeView,
    Precision, ProviderEntry, ProviderOptions, check_options,
};
use ort_core::ops::fused::activation::Activation;
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, Within, ensure, error};

use ort_cpu_kernel::activation::has_loop;
use ort_cpu_kernel::{CpuKernel, DerivedKernels};
use ort_cpu_threads::environment::{AFFINITIES, AFFINITY, choice};
use ort_cpu_vector::simd::isa::Isa;

/// The CPU execution provider.
#[derive(Debug)]
pub struct CpuProvider;

inventory::submit! { ProviderEntry(&CpuProvider) }

impl ExecutionProvider for CpuProvider {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        check_environment()?;
        Ok(vec![CpuDevice::describe()])
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        ensure!(index == 0, InvalidArgument, "the cpu provider has one device, there is no device {index}");
        check_options("cpu", options, &[])?;
        check_environment()?;
        Ok(Arc::new(CpuDevice { info: CpuDevice::describe() }))
    }
}

#[derive(Debug)]
struct CpuDevice {
    info: DeviceInfo,
}

impl CpuDevice {
    fn describe() -> DeviceInfo {
        let threads = ort_alloc::processors();
        let bf16 = if Isa::current().has_bf16_products() { "yes" } else { "no" };
        DeviceInfo {
            provider: "cpu",
            name: std::env::consts::ARCH.to_string(),
            memory_bytes: None,
            facts: vec![
                ("isa (ORT_ISA lowers it)".to_string(), Isa::current().name().to_string()),
                ("bfloat16 GEMM (AVX512-BF16)".to_string(), bf16.to_string()),
                ("threads".to_string(), threads.to_string()),
            ],
        }
    }

    /// The kernel table, built on first use from everything the kernel files submitted.
    fn table() -> &'static KernelTable {
        static TABLE: OnceLock<KernelTable> = OnceLock::new();
        get_or_init(&TABLE, || {
            let named = inventory::iter::<CpuKernel>.into_iter().map(|kernel| &kernel.0);
            let derived = inventory::iter::<DerivedKernels>.into_iter().flat_map(|kernels| (kernels.0)());
            KernelTable::new(named.chain(derived))
        })
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        DeviceId::HOST
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        HostAllocator::global().clone()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        if let Some(activation) = Activation::missing_of(node.node, has_loop) {
            return Err(format!("activation '{}' has no vector loop", activation.name));
        }
        CpuDevice::table().claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        ensure!(
            // The kernels would silently fall back to float32, so we refuse here.
            cx.precision == Precision::Fp32 || Isa::current().has_bf16_products(),
            NotImplemented,
            "precision bf16 needs a CPU with AVX512-BF16, and this process uses {} without it; use precision fp32",
            Isa::current().name()
        );
        let kernel =
            CpuDevice::table().find(&cx.node).map_err(|reason| error!(NotImplemented, "{reason}"))?;
        (kernel.make)(cx).within(|| "provider cpu")
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        let (isa, widest) = (Isa::current(), Isa::widest());
        // The packed layout is part of the fingerprint: two CPUs of one ISA level can still choose
        // different tiles, and cached packed weights fit only one of them.
        let layout = ort_cpu_gemm::packed_layout(isa);
        let hardware = format!("{} of {} {layout}", isa.name(), widest.name());
        Some(Fingerprint { code: env!("ORT_CODE_HASH").to_owned(), hardware })
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        let (from, to) = (from.bytes()?, to.bytes_mut()?);
        ensure!(from.len() == to.len(), Fail, "cannot copy {} bytes into {} bytes", from.len(), to.len());
        to.copy_from_slice(from);
        Ok(())
    }
}

/// Fails if an environment variable of the provider has an unknown value.
fn check_environment() -> Result<()> {
    let all = [Isa::allowed().map(drop), choice(AFFINITY, &AFFINITIES).map(drop)];
    all.into_iter().collect::<Result<(), String>>().map_err(|problem| {
        error!(InvalidArgument, "{problem}").help("unset the variable to leave the choice to the provider")
    })
}
