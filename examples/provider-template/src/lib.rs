//! A provider library in Rust, to start one's own from: a small device with memory of its own.
//!
//! The device stands for an accelerator: the host cannot touch its memory, only [`Device::copy`]
//! moves bytes in and out. It adds, multiplies matrices and cuts off below zero, in float32.
//! `memory` is its memory, `kernels` is what it computes; to add an operator, write its function
//! there and a row.
//!
//! ```text
//! cargo build --release -p provider-template
//! ort run model.onnx --ep target/release/libprovider_template.so --ep cpu
//! ```

#![deny(unsafe_code)]

mod kernels;
mod memory;

use std::sync::Arc;

use ort_alloc::{Allocator, DeviceId};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, ExecutionProvider, KernelTable, NodeView,
    ProviderOptions, check_options,
};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, ensure, error};

use crate::kernels::{KERNELS, TemplateKernel};
use crate::memory::Memory;

/// The name that users write, and that sessions show.
const NAME: &str = "template";

/// The factory of devices.
pub struct TemplateProvider;

#[allow(unsafe_code, reason = "a symbol is exported")]
mod library {
    //! The one symbol of the library.
    ort_core::export_provider!(crate::TemplateProvider);
}

impl ExecutionProvider for TemplateProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        // A real provider asks its driver, and its error says what was looked for.
        Ok(vec![info()])
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        ensure!(index == 0, InvalidArgument, "there is no device {index}: there is one");
        check_options(NAME, options, &["memory_limit"])?;
        let limit = options.get("memory_limit").map(|text| text.parse::<usize>()).transpose();
        let limit = limit.map_err(|_| error!(InvalidArgument, "memory_limit is no number of bytes"))?;
        let table = KernelTable::new(KERNELS.iter().map(|kernel| &kernel.def));
        Ok(Arc::new(TemplateDevice { info: info(), memory: Memory::new(limit), table }))
    }
}

fn info() -> DeviceInfo {
    let operators: Vec<&str> = KERNELS.iter().map(|kernel| kernel.def.op).collect();
    DeviceInfo {
        provider: NAME,
        name: "template device".to_owned(),
        memory_bytes: None,
        facts: vec![("operators".to_owned(), operators.join(", "))],
    }
}

/// An open device.
struct TemplateDevice {
    info: DeviceInfo,
    memory: Memory,
    table: KernelTable,
}

impl Device for TemplateDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.memory.device()
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        Arc::new(self.memory.clone())
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.table.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let def = self.table.find(&cx.node).map_err(|reason| error!(NotImplemented, "{reason}"))?;
        let kernel = KERNELS.iter().find(|kernel: &&TemplateKernel| std::ptr::eq(&kernel.def, def));
        let kernel = kernel.ok_or_else(|| error!(Fail, "operator {} has no kernel", def.op))?;
        Ok(Box::new(kernel.on(&self.memory)))
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        match (from.device_range(), to.device_range()) {
            (None, Some(range)) => self.memory.write(range, from.bytes()?),
            (Some(range), None) => {
                to.bytes_mut()?.copy_from_slice(&self.memory.read(range)?);
                Ok(())
            }
            (Some(from), Some(to)) => self.memory.write(to, &self.memory.read(from)?),
            (None, None) => Err(error!(Fail, "neither side of a copy is in the device's memory")),
        }
    }
}
