//! Values whose size only the run tells live on the device, too.

use crate::support::{floats, ints};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::session::Model;
use ort_testkit::{OpaqueDevice, Target};

#[test]
fn a_shape_given_at_run_time() -> Result<()> {
    let mut builder = GraphBuilder::new("dynamic");
    let x = builder.input("x", DType::F32, &["6"]);
    let shape = builder.input("shape", DType::I64, &["2"]);
    let flat = builder.constant(ints(&[-1])?);
    let negative = builder.node("Neg", &[x], &[])?;
    let table = builder.node("Reshape", &[negative, shape], &[])?;
    let turned = builder.node("Transpose", &[table], &[])?;
    let positive = builder.node("Relu", &[turned], &[])?;
    let line = builder.node("Reshape", &[positive, flat], &[])?;
    let doubled = builder.node("Add", &[line, line], &[])?;
    let graph = builder.finish(&[doubled, turned])?;
    let x = floats(&[6], &[-1.0, -2.0, -3.0, -4.0, -5.0, 6.0])?;
    let device = OpaqueDevice::new(None);
    for target in [Target::cpu()?, Target::opaque(&device), Target::mixed(&device)?] {
        let session = target.session(&Model::from_graph(graph.clone()))?;
        assert_eq!(session.plan(&[])?.peak_bytes, None, "the plan says that it does not know");
        for (shape, expected) in
            [([2, 3], [2.0, 8.0, 4.0, 10.0, 6.0, 0.0]), ([3, 2], [2.0, 6.0, 10.0, 4.0, 8.0, 0.0])]
        {
            let given = ints(&shape)?;
            let outputs = session.run(&[("x", x.clone().into()), ("shape", given.into())])?;
            assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, expected, "{}", target.name);
            let turned = outputs[1].1.tensor()?;
            assert_eq!(turned.shape(), [shape[1] as usize, shape[0] as usize]);
        }
    }
    assert_eq!(device.stats().in_use, 0);
    Ok(())
}
