//! A provider library whose device fails where it is told to: the option `fails_in` names a call,
//! `how` says `error` or `panic`.
//!
//! Without options it works: its one kernel computes Relu in the host's memory, with a workspace,
//! and packs its constant input.

#![deny(unsafe_code)]

use std::sync::Arc;

use ort_alloc::{Allocator, DeviceId, HostAllocator};
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, ExecutionProvider, IoShapes, KernelDef, KernelTable,
    NodeView, PackedWeights, ProviderOptions, RunCx, Unary, check_options,
};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, ensure, error};

const NAME: &str = "faulty";

struct FaultyProvider;

#[allow(unsafe_code, reason = "a symbol is exported")]
mod library {
    //! The one symbol of the library.
    ort_core::export_provider!(crate::FaultyProvider);
}

/// Where the device fails, and how.
#[derive(Clone, Default)]
struct Fault {
    fails_in: String,
    panics: bool,
}

impl Fault {
    #[allow(clippy::panic, reason = "that is what is asked for")]
    fn happens_in(&self, call: &str) -> Result<()> {
        match (self.fails_in == call, self.panics) {
            (false, _) => Ok(()),
            (true, true) => panic!("told to panic in {call}"),
            (true, false) => {
                Err(error!(RuntimeException, "told to fail in {call}").help("do not tell it to"))
            }
        }
    }
}

impl ExecutionProvider for FaultyProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let (provider, name) = (NAME, "a device that fails".to_owned());
        Ok(vec![DeviceInfo { provider, name, memory_bytes: Some(1 << 30), facts: Vec::new() }])
    }

    fn open(&self, _: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        check_options(NAME, options, &["fails_in", "how"])?;
        let option = |name: &str| options.get(name).cloned().unwrap_or_default();
        let fault = Fault { fails_in: option("fails_in"), panics: option("how") == "panic" };
        fault.happens_in("open")?;
        let info = self.devices()?.into_iter().next();
        let info = info.ok_or_else(|| error!(Fail, "there is no device"))?;
        let table = KernelTable::new([&RELU]);
        Ok(Arc::new(FaultyDevice { info, fault, table }))
    }
}

static RELU: KernelDef = KernelDef {
    op: "Relu",
    types: &[("T", TypeSet::of(&[DType::F32]))],
    in_place: &[(0, 0)],
    ..KernelDef::BASE
};

struct FaultyDevice {
    info: DeviceInfo,
    fault: Fault,
    table: KernelTable,
}

impl Device for FaultyDevice {
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
        let fault = self.fault.happens_in("claim");
        fault.map_err(|problem| problem.to_string()).and_then(|()| self.table.claim(node))
    }

    fn check(&self) -> Result<()> {
        self.fault.happens_in("check")
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        self.fault.happens_in("compile")?;
        // As many bytes as a kernel with weights would keep.
        let packed = cx.pack(4096, |bytes| {
            bytes.fill(1);
            Ok(())
        })?;
        Ok(Box::new(Relu { fault: self.fault.clone(), packed }))
    }

    fn copy(&self, _: TensorView<'_>, _: TensorMut<'_>) -> Result<()> {
        Err(error!(Fail, "the device works on the host's memory"))
    }
}

struct Relu {
    fault: Fault,
    packed: PackedWeights,
}

impl Executable for Relu {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        self.fault.happens_in("workspace")?;
        Ok(shapes.output(0).iter().product::<usize>() * size_of::<f32>())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        self.fault.happens_in("run")?;
        ensure!(self.packed.bytes().iter().all(|byte| *byte == 1), Fail, "what was packed has changed");
        let scratch = cx.workspace()?;
        scratch.fill(0);
        // A NaN is not below 0, so it stays.
        let relu = |x: &f32| if *x < 0.0 { 0.0 } else { *x };
        match cx.unary::<f32>(0, 0)? {
            Unary::Apart(x, y) => y.iter_mut().zip(x).for_each(|(y, x)| *y = relu(x)),
            Unary::InPlace(y) => y.iter_mut().for_each(|y| *y = relu(y)),
        }
        Ok(())
    }
}
