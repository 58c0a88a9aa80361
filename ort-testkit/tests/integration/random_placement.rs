//! Random graphs on random devices: each node runs on a device that claims it, the placement costs
//! no more than that of the first claims, and the results are the CPU's alone.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Arc;

use crate::regions_support::{copies, refusing};
use ort_alloc::DeviceId;
use ort_core::dtype::DType;
use ort_core::ep::{Device, NodeView};
use ort_core::ir::{Graph, GraphBuilder};
use ort_core::placement::{Reason, Scope, partition, placement_cost};
use ort_core::rewrite::Level;
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Tolerance, compare};
use ort_core::{Result, Within, ensure};
use ort_testkit::{OpaqueDevice, Target};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

/// Operators and how many inputs they take; the opaque device has none of the last four. `MatMul`
/// has a constant beside its input.
const OPERATORS: [(&str, usize); 10] = [
    ("Neg", 1),
    ("Relu", 1),
    ("Softmax", 1),
    ("Add", 2),
    ("Sub", 2),
    ("MatMul", 1),
    ("Tanh", 1),
    ("Abs", 1),
    ("Max", 2),
    ("Sigmoid", 1),
];
const OPAQUE: usize = 6;

/// Shapes whose symbols are taken for 64, so that estimates differ by a factor of 65,536, and their
/// sizes in a run.
const SHAPES: [(&[&str], &[usize]); 5] = [
    (&["4", "4"], &[4, 4]),
    (&["2", "m", "4", "4"], &[2, 1, 4, 4]),
    (&["4", "m", "k", "4", "4"], &[4, 1, 1, 4, 4]),
    (&["1", "m", "k", "l", "4", "4"], &[1, 2, 1, 1, 4, 4]),
    (&["n", "m", "4", "4"], &[3, 1, 4, 4]),
];

/// One node: its operator and what it reads, as numbers to be taken modulo what there is.
type Choice = (u8, u16, u16);

fn grow(shape: &[&str], choices: &[Choice], outputs: &[u16]) -> Result<Graph> {
    let mut builder = GraphBuilder::new("random");
    let mut values = vec![builder.input("x", DType::F32, shape), builder.input("y", DType::F32, shape)];
    let weight: Vec<f32> = (0..16).map(|index| (index as f32 - 7.5) / 32.0).collect();
    let weight = builder.constant(Tensor::from_slice(&[4, 4], &weight)?);
    for (kind, first, second) in choices {
        let (op, count) = OPERATORS[*kind as usize % OPERATORS.len()];
        // Mostly what is new, so that graphs grow long as well as wide.
        let recent = values.len().min(6);
        let at = |choice: &u16| values[values.len() - 1 - *choice as usize % recent];
        let mut inputs = vec![at(first), at(second)];
        inputs.truncate(count);
        if op == "MatMul" {
            inputs.push(weight);
        }
        values.push(builder.node(op, &inputs, &[])?);
    }
    let mut ids: Vec<_> = outputs.iter().map(|index| values[*index as usize % values.len()]).collect();
    ids.extend(values.last());
    builder.finish(&ids)
}

/// One or two opaque devices and the CPU in any order, each without some operators; what the opaque
/// ones all refuse the CPU has.
fn devices(order: u8, refused: [u16; 3]) -> Result<Vec<Arc<dyn Device>>> {
    let bits = |mask: u16| (0..OPAQUE).filter(move |bit| mask >> bit & 1 == 1);
    let named = |provider: &'static str, mask: u16| -> Vec<(&str, &str)> {
        bits(mask).map(|bit| (provider, OPERATORS[bit].0)).collect()
    };
    let opaque = |mask: u16| {
        let device: Arc<dyn Device> = OpaqueDevice::new(None);
        refusing(&device, &named("opaque", mask))
    };
    let is_two = order.is_multiple_of(2);
    let [first, second, host] = refused;
    let nowhere_else = if is_two { first & second } else { first };
    let mut found = vec![opaque(first)?];
    if is_two {
        found.push(opaque(second)?);
    }
    for cpu in Target::cpu()?.devices {
        // Not all that the CPU could refuse, or hardly anything would ever move.
        let place = (order / 2) as usize % (found.len() + 2);
        let host = refusing(&cpu, &named("cpu", host & !nowhere_else & first.rotate_left(3)))?;
        found.insert(place.min(found.len()), host);
    }
    Ok(found)
}

/// The first device that claims each node; one that there is not for a node that none does.
fn first_claims(graph: &Graph, devices: &[Arc<dyn Device>]) -> Vec<usize> {
    let claims = |node| devices.iter().position(|device| device.claim(&NodeView { graph, node }).is_ok());
    graph.nodes.iter().map(|node| claims(node).unwrap_or(devices.len())).collect()
}

/// Whether any node of the model moved.
fn check(case: (u8, u8, [u16; 3]), choices: &[Choice], outputs: &[u16]) -> Result<bool> {
    let (shape, order, refused) = case;
    let (shape, sizes) = SHAPES[shape as usize % SHAPES.len()];
    let graph = grow(shape, choices, outputs)?;
    let devices = devices(order, refused)?;
    check_places(&graph, &devices, Scope::Subgraph)?;
    let moved = check_places(&graph, &devices, Scope::Model)?;
    run(graph, devices, sizes).map(|()| moved)
}

/// Whether any node moved.
fn check_places(graph: &Graph, devices: &[Arc<dyn Device>], scope: Scope) -> Result<bool> {
    let mut shared = Arc::new(graph.clone());
    let found = partition(&mut shared, devices, scope)?;
    let places: Vec<usize> = found.nodes.iter().map(|(device, _)| *device).collect();
    ensure!(shared.nodes.len() == graph.nodes.len(), Fail, "a node was decomposed");
    let again = partition(&mut shared, devices, scope)?;
    ensure!(again.reasons == found.reasons, Fail, "the same graph is placed in two ways");
    let first = first_claims(graph, devices);
    for ((place, first), reason) in places.iter().zip(&first).zip(&found.reasons) {
        let moved = matches!(reason, Reason::Cluster(_));
        ensure!(moved == (place != first), Fail, "device {place} instead of {first}: {reason}");
    }
    // An error where a device does not claim its node.
    let (cost, first_cost) =
        (placement_cost(graph, devices, scope, &places)?, placement_cost(graph, devices, scope, &first)?);
    ensure!(cost <= first_cost, Fail, "{places:?} costs {cost}, and {first:?} {first_cost}");
    ensure!(cost < first_cost || places == first, Fail, "{places:?} saves nothing over {first:?}");
    Ok(places != first)
}

fn run(graph: Graph, devices: Vec<Arc<dyn Device>>, sizes: &[usize]) -> Result<()> {
    let count: usize = sizes.iter().product();
    let numbers = |seed: usize| -> Result<Tensor> {
        let numbers: Vec<f32> =
            (0..count).map(|index| ((index * 7 + seed) % 13) as f32 / 8.0 - 0.75).collect();
        Tensor::from_slice(sizes, &numbers)
    };
    let inputs = [("x", numbers(0)?.into()), ("y", numbers(5)?.into())];
    let model = Model::from_graph(graph);
    // Each beside the host's.
    let memories = devices.iter().filter(|device| device.memory() != DeviceId::HOST).count();
    let mixed = Target { name: "mixed", devices, level: Level::Disabled }.session(&model)?;
    let host = Target { level: Level::Disabled, ..Target::cpu()? }.session(&model)?;
    let tolerance = Tolerance { relative: 1e-4, absolute: 1e-4 };
    for ((name, actual), (_, expected)) in mixed.run(&inputs)?.iter().zip(&host.run(&inputs)?) {
        compare(actual, expected, tolerance).within(|| format!("output '{name}'"))?;
    }
    let steps = mixed.steps();
    let copied: HashSet<&String> =
        steps.iter().filter(|(_, op, _)| op == "Copy").map(|(value, ..)| value).collect();
    ensure!(copies(&mixed) <= copied.len() * memories, Fail, "a value is copied twice: {steps:?}");
    Ok(())
}

#[test]
fn placements_are_claimed_and_cheap_and_change_no_result() {
    let case = (any::<u8>(), any::<u8>(), any::<[u16; 3]>());
    let choices = prop::collection::vec(any::<Choice>(), 1..24);
    let outputs = prop::collection::vec(any::<u16>(), 0..3);
    let config = ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() };
    let moved = Cell::new(0);
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&(case, choices, outputs), |(case, choices, outputs)| {
        let any_moved = check(case, &choices, &outputs);
        let any_moved = any_moved.map_err(|problem| TestCaseError::fail(problem.to_string()))?;
        moved.set(moved.get() + usize::from(any_moved));
        Ok(())
    });
    result.unwrap_or_else(|problem| panic!("{problem}"));
    println!("nodes moved in {} graphs", moved.get());
    assert!(moved.get() >= 100, "nodes moved in {} graphs only", moved.get());
}

/// The least that any placement costs in which products are where they are claimed first.
fn least_cost(graph: &Graph, devices: &[Arc<dyn Device>], first: &[usize]) -> Result<u64> {
    let is_fixed = |node: usize| graph.nodes[node].spec.name == "MatMul";
    let mut found = vec![Vec::new()];
    for (index, node) in graph.nodes.iter().enumerate() {
        let view = NodeView { graph, node };
        let mut own: Vec<usize> =
            (0..devices.len()).filter(|device| devices[*device].claim(&view).is_ok()).collect();
        own.retain(|device| !is_fixed(index) || *device == first[index]);
        let longer = |places: &Vec<usize>| -> Vec<Vec<usize>> {
            own.iter().map(|device| [places.as_slice(), &[*device]].concat()).collect()
        };
        found = found.iter().flat_map(longer).collect();
    }
    let costs = found.iter().map(|places| placement_cost(graph, devices, Scope::Model, places));
    Ok(costs.collect::<Result<Vec<u64>>>()?.into_iter().min().unwrap_or(0))
}

/// How the places that are found compare with the best there are, where all can be tried.
#[test]
fn small_graphs_are_placed_nearly_as_well_as_can_be() {
    let case = (any::<u8>(), any::<[u16; 3]>());
    let choices = prop::collection::vec(any::<Choice>(), 4..9);
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let (best, spent, least) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&(case, choices), |((shape, refused), choices)| {
        let costs = || -> Result<(u64, u64)> {
            let graph = grow(SHAPES[shape as usize % SHAPES.len()].0, &choices, &[])?;
            // One opaque device, and the CPU after it.
            let devices = devices(3, refused)?;
            let first = first_claims(&graph, &devices);
            let found = partition(&mut Arc::new(graph.clone()), &devices, Scope::Model)?;
            let places: Vec<usize> = found.nodes.iter().map(|(device, _)| *device).collect();
            let cost = placement_cost(&graph, &devices, Scope::Model, &places)?;
            Ok((cost, least_cost(&graph, &devices, &first)?))
        };
        let (cost, minimum) = costs().map_err(|problem| TestCaseError::fail(problem.to_string()))?;
        best.set(best.get() + usize::from(cost == minimum));
        spent.set(spent.get() + cost);
        least.set(least.get() + minimum);
        Ok(())
    });
    result.unwrap_or_else(|problem| panic!("{problem}"));
    println!("{} of 300 are the best, {} spent where {} would do", best.get(), spent.get(), least.get());
    assert!(best.get() >= 270, "{} of 300 are the best", best.get());
    assert!(spent.get() as f64 <= 1.05 * least.get() as f64, "{} instead of {}", spent.get(), least.get());
}
