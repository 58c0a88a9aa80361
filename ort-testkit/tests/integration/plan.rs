//! The plan counts the device's slab: what it says is what a run takes.

use crate::support::{floats, layer, round_trip};
use ort_core::Result;
use ort_core::ir::Graph;
use ort_core::session::Model;
use ort_testkit::{OpaqueDevice, Target};

#[test]
fn the_planned_peak_is_the_measured_one() -> Result<()> {
    let graphs: [(Graph, usize); 2] = [(layer()?, 3), (round_trip()?, 2)];
    for (graph, columns) in graphs {
        let device = OpaqueDevice::new(None);
        let name = graph.name.clone();
        for rows in [1usize, 5, 64] {
            let session = Target::mixed(&device)?.session(&Model::from_graph(graph.clone()))?;
            let planned = session.plan(&[("rows", rows as i64)])?.peak_bytes;
            let x = floats(&[rows, columns], &vec![1.0; rows * columns])?;
            let outputs = session.run(&[("x", x.into())])?;
            assert_eq!(planned, Some(session.memory().activations_peak), "{name} with {rows} rows");
            drop(outputs);
        }
    }
    Ok(())
}

#[test]
fn the_slab_is_in_the_devices_memory() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::opaque(&device).session(&Model::from_graph(layer()?))?;
    let weights = device.stats().in_use;
    let rows = 32;
    let planned = session.plan(&[("rows", rows)])?;
    let x = floats(&[rows as usize, 3], &[1.0; 96])?;
    let outputs = session.run(&[("x", x.into())])?;
    let output = outputs[0].1.byte_count();
    // The host holds the output and nothing else; x, the product and what is in place of it are on
    // the device.
    let slab = device.stats().max_in_use - weights;
    assert_eq!(planned.peak_bytes, Some(slab + output));
    assert_eq!(slab, 96 * 4 + 128 * 4);
    let kinds: Vec<&str> = planned.values.iter().map(|value| value.kind.name()).collect();
    assert_eq!(kinds, ["planned", "planned", "in_place", "in_place", "planned"]);
    Ok(())
}
