//! Memory that is to be written holds NaN first, where a session is asked for it: what reads it
//! before shows.

use crate::support;

use std::sync::Arc;

use ort_alloc::Allocator;
use ort_runtime::ep::{Claim, CompileCx, Device, DeviceInfo, Executable, NodeView, RunCx, provider};
use ort_runtime::ir::{Graph, GraphBuilder};
use ort_runtime::tensor::{TensorMut, TensorView};
use ort_runtime::{DType, DeviceId, Model, Result, Session};
use support::{counter, inputs_of, ints, layer, run};

/// The CPU, whose `Neg` writes every other element.
struct Forgetful(Arc<dyn Device>);

fn half(cx: &mut RunCx<'_>) -> Result<()> {
    let input = cx.input(0)?.as_slice::<f32>()?;
    let output = cx.output(0)?.as_mut_slice::<f32>()?;
    output.iter_mut().zip(input).step_by(2).for_each(|(to, from)| *to = -from);
    Ok(())
}

impl Device for Forgetful {
    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    fn memory(&self) -> DeviceId {
        self.0.memory()
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        self.0.allocator()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        let claim = self.0.claim(node)?;
        Ok(if node.node.spec.name == "Neg" { Claim { in_place: &[], ..claim } } else { claim })
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        if cx.node.node.spec.name == "Neg" { Ok(Box::new(half)) } else { self.0.compile(cx) }
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        self.0.copy(from, to)
    }
}

/// A negation between others, or as the output, or of unknown size.
fn negation(kind: &str) -> Result<Graph> {
    let mut builder = GraphBuilder::new(kind);
    let x = builder.input("x", DType::F32, &["n"]);
    let shape = builder.input("shape", DType::I64, &["1"]);
    let before = match kind {
        "dynamic" => builder.node("Reshape", &[x, shape], &[])?,
        _ => x,
    };
    let negative = builder.node("Neg", &[before], &[])?;
    let last = match kind {
        "output" => negative,
        _ => builder.node("Softplus", &[negative], &[])?,
    };
    builder.finish(&[last])
}

#[test]
fn what_a_kernel_does_not_write_is_nan() -> Result<()> {
    let cpu = provider("cpu")?.open(0, &Default::default())?;
    for kind in ["between", "output", "dynamic"] {
        for poison in [true, false] {
            let device = Arc::new(Forgetful(cpu.clone()));
            let builder = Session::builder(&Model::from_graph(negation(kind)?)).threads(1).device(device);
            let builder = builder.opt_level(ort_runtime::rewrite::Level::Disabled).poison(poison);
            let x = support::floats(&[2000], &[1.0; 2000])?;
            let inputs = [("x", x.into()), ("shape", ints(&[-1])?.into())];
            let outputs = builder.build()?.run(&inputs)?;
            let elements = outputs[0].1.tensor()?.to_vec::<f32>()?;
            let wrong = elements.iter().filter(|element| element.is_nan()).count();
            assert_eq!(wrong, if poison { 1000 } else { 0 }, "{kind}");
        }
    }
    Ok(())
}

#[test]
fn what_is_written_is_as_ever() -> Result<()> {
    for graph in [layer, counter] {
        let of = |poison| -> Result<Vec<Vec<f32>>> {
            let session = Session::builder(&Model::from_graph(graph()?)).threads(1).poison(poison).build()?;
            let inputs = inputs_of(&session, 3)?;
            run(&session, &inputs)?;
            run(&session, &inputs)?.iter().map(|(_, value)| value.tensor()?.to_vec()).collect()
        };
        assert_eq!(of(true)?, of(false)?);
    }
    Ok(())
}
