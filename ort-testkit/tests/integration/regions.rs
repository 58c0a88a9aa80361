//! Islands run where they save more than copying their values costs.

use std::sync::Arc;

use crate::regions_support::{Drawn, copies, draw, places, refusing};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{Device, KernelDef, KernelTable};
use ort_core::ir::{Attribute, Graph, GraphBuilder};
use ort_core::placement::{Cluster, Reason, Scope, partition, placement_cost};
use ort_core::rewrite::Level;
use ort_core::session::Model;
use ort_testkit::{ClaimingDevice, OpaqueDevice, Target};

/// A graph, what devices refuse, where its nodes are expected, and the number of copies.
struct Row {
    name: &'static str,
    /// The shape of all values.
    shape: [&'static str; 2],
    graph: &'static str,
    refused: &'static [(&'static str, &'static str)],
    places: &'static str,
    copies: usize,
}

const BASE: Row = Row { name: "", shape: ["4", "4"], graph: "", refused: &[], places: "", copies: 0 };
const LARGE: [&str; 2] = ["512", "512"];

/// The opaque device comes first. It has no `Sqrt` and no `Exp`.
const TABLE: &[Row] = &[
    Row {
        name: "a whole graph stays, however small it is",
        graph: "a = Neg x; b = Relu a",
        places: "a opaque, b opaque",
        copies: 2,
        ..BASE
    },
    Row { name: "and so does a single node", graph: "a = Neg x", places: "a opaque", copies: 2, ..BASE },
    Row {
        name: "a small island goes back",
        graph: "a = Sqrt x; b = Neg a; c = Relu b; d = Exp c",
        places: "a cpu, b cpu, c cpu, d cpu",
        ..BASE
    },
    Row {
        name: "an island that saves enough stays",
        shape: LARGE,
        graph: "a = Sqrt x; b = Neg a; c = Relu b; d = Neg c; e = Exp d",
        places: "a cpu, b opaque, c opaque, d opaque, e cpu",
        copies: 2,
        ..BASE
    },
    Row {
        name: "one node of it does not save enough",
        shape: ["128", "128"],
        graph: "a = Sqrt x; b = Neg a; c = Exp b",
        places: "a cpu, b cpu, c cpu",
        ..BASE
    },
    Row {
        name: "a product stays, however small it is, and what it reads twice is copied once",
        graph: "a = Sqrt x; b = MatMul a a; c = Exp b",
        places: "a cpu, b opaque, c cpu",
        copies: 2,
        ..BASE
    },
    Row {
        name: "what only the device claims stays",
        graph: "a = Sqrt x; b = Neg a; c = Exp b",
        refused: &[("cpu", "Neg")],
        places: "a cpu, b opaque, c cpu",
        copies: 2,
        ..BASE
    },
    Row {
        name: "and so does an island with such a node, where the others save a copy by it",
        graph: "a = Sqrt x; b = Neg a; c = Add b a; d = Relu c; e = Exp d",
        refused: &[("cpu", "Neg"), ("cpu", "Relu")],
        places: "a cpu, b opaque, c opaque, d opaque, e cpu",
        copies: 2,
        ..BASE
    },
    Row {
        name: "what lies between products stays with them",
        graph: "a = MatMul x x; b = Neg a; c = MatMul b b",
        places: "a opaque, b opaque, c opaque",
        copies: 2,
        ..BASE
    },
    Row {
        name: "a small island between products and the host goes to the host",
        graph: "a = MatMul x x; b = Sqrt a; c = Neg b; d = Exp c; e = MatMul d d",
        places: "a opaque, b cpu, c cpu, d cpu, e opaque",
        copies: 4,
        ..BASE
    },
    Row {
        name: "several readers of one copy go together",
        shape: ["256", "256"],
        graph: "a = Sqrt x; b = Neg a; c = Relu a; d = Sqrt b; e = Sqrt c",
        places: "a cpu, b cpu, c cpu, d cpu, e cpu",
        ..BASE
    },
    Row {
        name: "one of them alone would not",
        shape: ["256", "256"],
        graph: "a = Sqrt x; b = Neg a; c = MatMul a a; d = Sqrt b; e = Sqrt c",
        places: "a cpu, b opaque, c opaque, d cpu, e cpu",
        copies: 3,
        ..BASE
    },
    Row {
        name: "an output comes to the host in any case",
        graph: "a! = Neg x; b = Sqrt a",
        places: "a opaque, b cpu",
        copies: 2,
        ..BASE
    },
    Row {
        name: "a size that is not known is taken for 64",
        shape: ["4096", "n"],
        graph: "a = Sqrt x; b = Neg a; c = Relu b; d = Neg c; e = Exp d",
        places: "a cpu, b opaque, c opaque, d opaque, e cpu",
        copies: 2,
        ..BASE
    },
    Row {
        name: "and for one item where it is that of a batch",
        shape: ["n", "4096"],
        graph: "a = Sqrt x; b = Neg a; c = Relu b; d = Neg c; e = Exp d",
        places: "a cpu, b cpu, c cpu, d cpu, e cpu",
        ..BASE
    },
];

/// The opaque device and the CPU, for graphs as they are written.
fn mixed() -> Result<Target> {
    Ok(Target { level: Level::Disabled, ..Target::mixed(&OpaqueDevice::new(None))? })
}

#[test]
fn nodes_run_where_the_table_says() -> Result<()> {
    for row in TABLE {
        let Drawn { graph, names } = draw(&row.shape, row.graph)?;
        let mut target = mixed()?;
        target.devices =
            target.devices.iter().map(|device| refusing(device, row.refused)).collect::<Result<_>>()?;
        let session = target.session(&Model::from_graph(graph))?;
        assert_eq!(places(&session, &names), row.places, "{}", row.name);
        assert_eq!(copies(&session), row.copies, "{}", row.name);
    }
    Ok(())
}

#[test]
fn the_host_first_keeps_everything() -> Result<()> {
    for row in TABLE.iter().filter(|row| row.refused.is_empty()) {
        let Drawn { graph, .. } = draw(&row.shape, row.graph)?;
        let mut target = mixed()?;
        target.devices.reverse();
        let session = target.session(&Model::from_graph(graph))?;
        assert!(session.placement().iter().all(|placed| placed.provider == "cpu"), "{}", row.name);
        assert_eq!(copies(&session), 0, "{}", row.name);
    }
    Ok(())
}

#[test]
fn every_node_has_a_reason() -> Result<()> {
    let Drawn { graph, .. } = draw(&["4", "4"], "a = Sqrt x; b = Neg a; c = Relu b; d = Exp c")?;
    let session = mixed()?.session(&Model::from_graph(graph))?;
    let why = "moving its group of 2 nodes would save less than copying 2 values (128 B) costs";
    let (first, refusal) = ("it is the first provider that claims it", "it has no kernel for this operator");
    let told: Vec<(String, String, String)> = session
        .placement()
        .into_iter()
        .map(|placed| (placed.operator, placed.reason.to_string(), placed.refusals[0].1.clone()))
        .collect();
    let expected = [("Sqrt", first, refusal), ("Neg", why, why), ("Relu", why, why), ("Exp", first, refusal)];
    assert_eq!(told, expected.map(|(op, here, there)| (op.to_owned(), here.to_owned(), there.to_owned())));
    Ok(())
}

#[test]
fn reasons_tell_what_is_copied_less() {
    let told = [(1, 1, 64), (2, 3, 1_258_291), (1, 1, -4), (7, 0, 2048), (1, -1, 5000)]
        .map(|(nodes, copies, bytes)| Reason::Cluster(Cluster { nodes, copies, bytes }).to_string());
    let expected = [
        "moving its group of 1 node would save less than copying 1 value (64 B) costs",
        "moving its group of 2 nodes would save less than copying 3 values (1.2 MiB) costs",
        "moving its group of 1 node would save less than copying 1 value more costs",
        "moving its group of 7 nodes would save less than copying 2.0 KiB more costs",
        "moving its group of 1 node would save less than copying 4.9 KiB more costs",
    ];
    assert_eq!(told, expected);
}

/// A device that claims operators of any type, and the CPU.
fn claiming() -> Result<Vec<Arc<dyn Device>>> {
    static KERNELS: [KernelDef; 4] = [
        KernelDef { op: "Cast", ..KernelDef::BASE },
        KernelDef { op: "NonZero", ..KernelDef::BASE },
        KernelDef { op: "Relu", ..KernelDef::BASE },
        KernelDef { op: "Shape", ..KernelDef::BASE },
    ];
    let mut devices = Target::cpu()?.devices;
    devices.insert(0, ClaimingDevice::new("claiming", KernelTable::new(&KERNELS)));
    Ok(devices)
}

/// The sizes of one operator's result as floats.
fn sizes_of(op: &str) -> Result<Graph> {
    let mut builder = GraphBuilder::new("sizes");
    let x = builder.input("x", DType::F32, &["n", "4"]);
    let value = builder.node(op, &[x], &[])?;
    let shape = builder.node("Shape", &[value], &[])?;
    let floats = builder.node("Cast", &[shape], &[("to", Attribute::Int(1))])?;
    builder.finish(&[floats])
}

#[test]
fn shapes_that_the_plan_knows_stay_on_the_host() -> Result<()> {
    let partition = partition(&mut Arc::new(sizes_of("Relu")?), &claiming()?, Scope::Model)?;
    let devices: Vec<usize> = partition.nodes.iter().map(|(device, _)| *device).collect();
    assert_eq!((devices[0], devices[1]), (0, 1), "nothing of the value is read for its shape");
    assert_eq!(partition.reasons[1], Reason::Shapes);
    Ok(())
}

#[test]
fn shapes_that_only_the_run_knows_stay_between_nodes_of_the_device() -> Result<()> {
    let partition = partition(&mut Arc::new(sizes_of("NonZero")?), &claiming()?, Scope::Model)?;
    let devices: Vec<usize> = partition.nodes.iter().map(|(device, _)| *device).collect();
    assert_eq!(devices, [0, 0, 0]);
    let Reason::Cluster(island) = partition.reasons[1] else { panic!("{:?}", partition.reasons) };
    assert_eq!((island.nodes, island.copies), (1, 2), "the indices down, and their shape up");
    Ok(())
}

#[test]
fn costs_of_places_that_are_not_claimed_are_refused() -> Result<()> {
    let Drawn { graph, .. } = draw(&["4", "4"], "a = Sqrt x; b = Neg a")?;
    let devices = mixed()?.devices;
    let cost = |places: &[usize]| placement_cost(&graph, &devices, Scope::Model, places);
    assert_eq!(cost(&[1, 0])?, (160 << 10) + 64, "one copy of 64 bytes");
    assert_eq!(cost(&[1, 1])?, (16 << 10) + 128, "a call, and 128 bytes moved");
    for (places, message) in [
        (&[0, 0][..], "device 0 does not claim node 'Sqrt_0' (Sqrt)"),
        (&[1], "there is no place for node 'Neg_1' (Neg)"),
        (&[1, 2], "device 2 does not claim node 'Neg_1' (Neg)"),
    ] {
        let problem = cost(places).expect_err("not every node is claimed");
        assert!(problem.to_string().contains(message), "{problem}");
    }
    Ok(())
}

#[test]
fn what_a_subgraph_gets_and_gives_is_copied() -> Result<()> {
    let Drawn { graph, .. } = draw(&["4", "4"], "a = Neg x; b = Relu a")?;
    let devices = mixed()?.devices;
    for (scope, place) in [(Scope::Model, 0), (Scope::Subgraph, 1)] {
        let partition = partition(&mut Arc::new(graph.clone()), &devices, scope)?;
        assert!(partition.nodes.iter().all(|(device, _)| *device == place), "{scope:?}");
    }
    let both_ways = 2 * ((160 << 10) + 64);
    assert_eq!(placement_cost(&graph, &devices, Scope::Subgraph, &[0, 0])?, both_ways);
    Ok(())
}
