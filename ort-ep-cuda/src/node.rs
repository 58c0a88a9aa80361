//! A compiled node: its kernel's launches for the shapes that it met, and a run of them.

use std::collections::VecDeque;
use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::operand::{Arg, Given, Key};
use ort_core::ep::{Executable, IoShapes, RunCx};
use ort_core::ir::Attributes;
use ort_core::tensor::Shape;
use ort_core::{Result, Within, error};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::device::Parts;
use crate::driver::{Call, Launched};
use crate::kernels::CudaKernel;
use crate::launch::{Launch, OpCx, Operand, Param};
use crate::memory::address;
use crate::modules::Entry;

/// How many sets of shapes a node keeps its launches for.
const MOST_KEPT: usize = 8;

/// A node on the device.
pub(crate) struct Node {
    pub(crate) kernel: &'static CudaKernel,
    pub(crate) op: &'static str,
    pub(crate) attrs: Attributes,
    /// The types of inputs and outputs, as far as they are given.
    pub(crate) input_types: SmallVec<[Option<DType>; 8]>,
    pub(crate) output_types: SmallVec<[Option<DType>; 4]>,
    pub(crate) parts: Arc<Parts>,
    /// The last used first.
    pub(crate) kept: Mutex<VecDeque<(Key, Arc<[Step]>)>>,
}

/// A launch with its entry.
pub(crate) struct Step {
    entry: Entry,
    launch: Launch,
}

impl Executable for Node {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let Some(workspace) = self.kernel.workspace else { return Ok(0) };
        let operand = |arg, dtype: &Option<DType>, shape: &Option<Shape>| {
            Some(Operand { arg, dtype: (*dtype)?, shape: shape.clone()? })
        };
        let inputs = self.input_types.iter().zip(shapes.inputs).enumerate();
        let outputs = self.output_types.iter().zip(shapes.outputs).enumerate();
        workspace(&OpCx {
            op: self.op,
            attrs: &self.attrs,
            limits: self.parts.limits,
            inputs: inputs.map(|(index, (ty, shape))| operand(Arg::Input(index), ty, shape)).collect(),
            outputs: outputs.map(|(index, (ty, shape))| operand(Arg::Output(index), ty, shape)).collect(),
            host: SmallVec::new(),
        })
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let given = Given::new(cx, self.kernel.def.host_inputs, &self.input_types)?;
        let steps = self.steps(&given)?;
        steps.iter().try_for_each(|step| self.launch(step, &given))
    }
}

impl Node {
    /// The launches for what is given, as they were for the same shapes before.
    fn steps(&self, given: &Given<'_>) -> Result<Arc<[Step]>> {
        let key = given.key()?;
        if let Some(steps) = self.find(&key) {
            return Ok(steps);
        }
        let cx = OpCx {
            op: self.op,
            attrs: &self.attrs,
            limits: self.parts.limits,
            inputs: given.inputs.clone(),
            outputs: given.outputs.clone(),
            host: given.host.iter().copied().collect(),
        };
        let mut steps = Vec::new();
        for launch in (self.kernel.launches)(&cx)? {
            steps.push(Step { entry: self.parts.modules.entry(&launch)?, launch });
        }
        let steps: Arc<[Step]> = steps.into();
        let mut kept = self.kept.lock();
        kept.push_front((key, steps.clone()));
        kept.truncate(MOST_KEPT);
        Ok(steps)
    }

    fn find(&self, key: &Key) -> Option<Arc<[Step]>> {
        let mut kept = self.kept.lock();
        let place = kept.iter().position(|(kept, _)| kept == key)?;
        let found = kept.remove(place)?;
        let steps = found.1.clone();
        kept.push_front(found);
        Some(steps)
    }

    fn launch(&self, step: &Step, given: &Given<'_>) -> Result<()> {
        let launch = &step.launch;
        let mut launched = Box::new(Launched::new(step.entry.function, [launch.grid, launch.block]));
        for param in &launch.params {
            match param {
                Param::Tensor(None) => launched.bytes(&[0; 8]),
                Param::Tensor(Some(arg)) => {
                    let range = given.range(*arg).ok_or_else(|| error!(Fail, "{arg:?} has no memory"))?;
                    launched.tensor(address(self.parts.id, range)?.unwrap_or(0), range.len);
                }
                Param::Bytes(bytes) => launched.bytes(bytes),
            }
        }
        self.parts.queue.ask(Call::Launch(launched)).within(|| format!("kernel '{}'", launch.entry))
    }
}
