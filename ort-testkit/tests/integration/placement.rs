//! What a device claims runs there, the rest runs on the next device, and copies between them are
//! steps.

use crate::support::{floats, layer, placed, round_trip, run_one};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::placement::Reason;
use ort_core::session::Model;
use ort_testkit::{OpaqueDevice, Target, Transfers};

#[test]
fn claimed_nodes_run_on_the_preferred_device() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(layer()?))?;
    let expected = ["Add", "Copy", "Copy", "MatMul", "Relu"].map(|op| (op.to_string(), "opaque".to_string()));
    assert_eq!(placed(&session), expected);
    Ok(())
}

#[test]
fn unclaimed_nodes_run_on_the_next_device() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(round_trip()?))?;
    let on = |op: &str, provider: &str| (op.to_string(), provider.to_string());
    let copies = vec![on("Copy", "opaque"); 4];
    let mut expected = vec![on("MatMul", "opaque"), on("MatMul", "opaque"), on("Sqrt", "cpu")];
    expected.extend(copies);
    expected.sort();
    assert_eq!(placed(&session), expected);
    Ok(())
}

#[test]
fn placement_tells_why_a_node_runs_on_a_later_device() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(round_trip()?))?;
    let placement = session.placement();
    let told: Vec<(&str, &str, usize)> = placement
        .iter()
        .map(|placed| (placed.operator.as_str(), placed.provider, placed.refusals.len()))
        .collect();
    assert_eq!(told, [("MatMul", "opaque", 0), ("Sqrt", "cpu", 1), ("MatMul", "opaque", 0)]);
    assert!(placement.iter().all(|placed| placed.reason == Reason::FirstClaim));
    assert_eq!(placement[1].refusals, [("opaque", "it has no kernel for this operator".to_owned())]);
    Ok(())
}

#[test]
fn placement_tells_what_follows_from_shapes() -> Result<()> {
    let mut builder = GraphBuilder::new("shapes");
    let x = builder.input("x", DType::F32, &["rows", "2"]);
    let shape = builder.node("Shape", &[x], &[])?;
    let sizes = builder.node("Cast", &[shape], &[("to", Attribute::Int(DType::F32 as i64))])?;
    let root = builder.node("Sqrt", &[sizes], &[])?;
    let scaled = builder.node("Mul", &[x, root], &[])?;
    let session = Target::cpu()?.session(&Model::from_graph(builder.finish(&[root, scaled])?))?;
    let placement = session.placement();
    let mut told: Vec<_> =
        placement.iter().map(|placed| (placed.operator.as_str(), placed.of_shapes)).collect();
    told.sort_unstable();
    assert_eq!(told, [("Cast", true), ("Mul", false), ("Shape", true), ("Sqrt", true)]);
    Ok(())
}

#[test]
fn values_go_from_the_device_to_the_host_and_back() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(round_trip()?))?;
    let weights = Transfers { uploads: 2, downloads: 0, within: 0, bytes: 32 };
    assert_eq!(device.transfers(), weights, "nothing else is copied before a run");
    let x = floats(&[2, 2], &[0.5, 2.0, 8.0, 32.0])?;
    assert_eq!(run_one(&session, x.into())?, [-1.0, -2.0, -4.0, -8.0]);
    assert_eq!(device.transfers(), Transfers { uploads: 4, downloads: 2, within: 0, bytes: 96 });
    Ok(())
}

#[test]
fn the_order_of_devices_decides() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let mut target = Target::mixed(&device)?;
    target.devices.reverse();
    let session = target.session(&Model::from_graph(layer()?))?;
    assert!(placed(&session).iter().all(|(_, provider)| provider == "cpu"), "{:?}", placed(&session));
    Ok(())
}
