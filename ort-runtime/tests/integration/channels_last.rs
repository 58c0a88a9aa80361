//! Images with the channels last on a device that prefers it: the same results as with them second,
//! and transpositions only where the model's other nodes need them.

use std::sync::Arc;

use crate::support::{branch, floats, inputs_of, ints, run};
use ort_alloc::{Allocator, DeviceId};
use ort_runtime::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, KernelDef, KernelTable, NodeView, RunCx, provider,
};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::rewrite::{Level, Optimizer};
use ort_runtime::spec::RUNTIME;
use ort_runtime::tensor::{TensorMut, TensorView, Tolerance, compare};
use ort_runtime::{DType, Model, Result, Session, SessionBuilder, Tensor};
use proptest::prelude::*;

/// The CPU with operators of images with the channels last, each computed by a session that
/// decomposes it.
struct Preferring {
    cpu: Arc<dyn Device>,
    own: KernelTable,
}

const fn own(domain: &'static str, op: &'static str) -> KernelDef {
    KernelDef { domain, op, make: |cx| decomposed(&cx.node), ..KernelDef::BASE }
}

static OWN: [KernelDef; 3] =
    [own(RUNTIME, "NhwcConv"), own(RUNTIME, "NhwcAveragePool"), own(RUNTIME, "NhwcMaxPool")];

impl Preferring {
    fn open() -> Result<Arc<Preferring>> {
        let cpu = provider("cpu")?.open(0, &Default::default())?;
        Ok(Arc::new(Preferring { cpu, own: KernelTable::new(&OWN) }))
    }
}

impl Device for Preferring {
    fn info(&self) -> &DeviceInfo {
        self.cpu.info()
    }

    fn memory(&self) -> DeviceId {
        self.cpu.memory()
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        self.cpu.allocator()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.own.claim(node).or_else(|_| self.cpu.claim(node))
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        match self.own.find(&cx.node) {
            Ok(kernel) => (kernel.make)(cx),
            Err(_) => self.cpu.compile(cx),
        }
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        self.cpu.copy(from, to)
    }

    fn prefers_channels_last(&self) -> bool {
        true
    }
}

/// A node's decomposition as a kernel.
fn decomposed(view: &NodeView<'_>) -> Result<Box<dyn Executable>> {
    let mut builder = GraphBuilder::new("one node");
    let names = (0..view.node.inputs.len()).map(|index| format!("in{index}")).collect::<Vec<_>>();
    let mut inputs = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let sizes =
            (0..view.rank(index).unwrap_or(0)).map(|axis| format!("{name}_{axis}")).collect::<Vec<_>>();
        let sizes = sizes.iter().map(String::as_str).collect::<Vec<_>>();
        inputs.push(view.input(index).map(|_| builder.input(name, DType::F32, &sizes)));
    }
    let attrs: Vec<(&str, Attribute)> =
        view.attrs().iter().map(|(name, value)| (name, value.clone())).collect();
    let operator = (view.node.spec.domain, view.node.spec.name);
    let outputs = builder.add(operator, &inputs, &attrs, 1, Vec::new())?;
    let session = plain(&Model::from_graph(builder.finish(&outputs)?)).build()?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let mut given = Vec::new();
        for (index, name) in names.iter().enumerate().filter(|(index, _)| inputs[*index].is_some()) {
            given.push((name.as_str(), cx.own_input(index)?));
        }
        let results = session.run(&given)?;
        let result = results[0].1.tensor()?.to_vec::<f32>()?;
        cx.output(0)?.as_mut_slice::<f32>()?.copy_from_slice(&result);
        Ok(())
    }))
}

fn plain(model: &Model) -> SessionBuilder {
    Session::builder(model).threads(1).opt_level(Level::Disabled)
}

fn preferring(model: &Model) -> Result<Session> {
    Session::builder(model).threads(1).device(Preferring::open()?).build()
}

fn hits(session: &Session) -> usize {
    session.rewrites().hits().iter().find(|(name, _)| *name == "channels_last").map_or(0, |(_, hits)| *hits)
}

/// The operators that a session runs, without those that move no element.
fn steps(session: &Session) -> Vec<String> {
    let steps = session.steps().into_iter().map(|(_, op, _)| op.to_string());
    steps.filter(|op| op != "Reshape").collect()
}

/// Runs a graph as it is and on the device that prefers channels last, and gives the latter's
/// session.
fn check(graph: Graph) -> Result<Session> {
    let model = Model::from_graph(graph);
    let (plain, preferring) = (plain(&model).build()?, preferring(&model)?);
    let inputs = inputs_of(&plain, 2)?;
    for ((name, expected), (other, actual)) in run(&plain, &inputs)?.iter().zip(&run(&preferring, &inputs)?) {
        assert_eq!(name, other);
        compare(actual, expected, Tolerance { relative: 1e-4, absolute: 1e-4 })?;
    }
    Ok(preferring)
}

/// A network under construction: images as [batch, channels, height, width].
struct Net {
    builder: GraphBuilder,
    images: Vec<(ValueId, [usize; 4])>,
    seed: usize,
}

impl Net {
    fn new() -> Net {
        let mut builder = GraphBuilder::new("net");
        let x = builder.input("x", DType::F32, &["n", "3", "9", "8"]);
        Net { builder, images: vec![(x, [2, 3, 9, 8])], seed: 0 }
    }

    /// Small numbers that are the same for each test.
    fn constant(&mut self, shape: &[usize]) -> Result<ValueId> {
        self.seed += 1;
        let count: usize = shape.iter().product();
        let numbers: Vec<f32> =
            (0..count).map(|index| ((index * 7 + self.seed * 5) % 11) as f32 / 16.0 - 0.3).collect();
        Ok(self.builder.constant(floats(shape, &numbers)?))
    }

    fn node(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        self.builder.node(op, inputs, attrs)
    }

    fn conv(&mut self, x: ValueId, channels: usize, filters: usize, kernel: usize) -> Result<ValueId> {
        let (w, b) = (self.constant(&[filters, channels, kernel, kernel])?, self.constant(&[filters])?);
        let pads = Attribute::Ints(vec![(kernel / 2) as i64; 4]);
        self.node("Conv", &[x, w, b], &[("pads", pads)])
    }

    fn ints(&mut self, list: &[i64]) -> Result<ValueId> {
        Ok(self.builder.constant(ints(list)?))
    }

    fn finish(self, outputs: &[ValueId]) -> Result<Graph> {
        self.builder.finish(outputs)
    }
}

fn perm(order: &[i64]) -> [(&'static str, Attribute); 1] {
    [("perm", Attribute::Ints(order.to_vec()))]
}

/// A residual block, squeeze and excitation, and the mean: one transposition in front, none
/// between, and none at the end, where the image has one pixel.
#[test]
fn nothing_moves_inside_of_a_network() -> Result<()> {
    let mut net = Net::new();
    let x = net.images[0].0;
    let stem = net.conv(x, 3, 8, 3)?;
    let stem = net.node("HardSwish", &[stem], &[])?;
    let pooled = net.node("GlobalAveragePool", &[stem], &[])?;
    let squeezed = net.conv(pooled, 8, 4, 1)?;
    let squeezed = net.node("Relu", &[squeezed], &[])?;
    let excited = net.conv(squeezed, 4, 8, 1)?;
    let factor = net.node("Sigmoid", &[excited], &[])?;
    let scaled = net.node("Mul", &[stem, factor], &[])?;
    let inner = net.conv(scaled, 8, 8, 3)?;
    let sum = net.node("Add", &[inner, stem], &[])?;
    let sum = net.node("Relu", &[sum], &[])?;
    let (scale, whole) = (net.constant(&[8, 1, 1])?, net.constant(&[1, 8, 9, 8])?);
    let scaled = net.node("Sub", &[sum, scale], &[])?;
    let scaled = net.node("Div", &[whole, scaled], &[])?;
    let last = net.conv(scaled, 8, 6, 1)?;
    let mean = net.node("GlobalAveragePool", &[last], &[])?;
    let flat = net.node("Flatten", &[mean], &[])?;
    let session = check(net.finish(&[flat])?)?;
    let steps = steps(&session);
    assert_eq!(steps.iter().filter(|op| *op == "Transpose").count(), 1, "{steps:?}");
    assert!(!steps.iter().any(|op| op.contains("FusedConv") || op == "Conv"), "{steps:?}");
    Ok(())
}

/// A model that has its images with the channels last and moves them around each convolution
/// itself.
#[test]
fn the_models_own_transpositions_vanish() -> Result<()> {
    let mut net = Net::new();
    let x = net.builder.input("image", DType::F32, &["n", "6", "5", "3"]);
    let mut value = x;
    for (channels, filters) in [(3, 4), (4, 5)] {
        let second = net.node("Transpose", &[value], &perm(&[0, 3, 1, 2]))?;
        let y = net.conv(second, channels, filters, 3)?;
        value = net.node("Transpose", &[y], &perm(&[0, 2, 3, 1]))?;
    }
    let session = check(net.finish(&[value])?)?;
    let steps = steps(&session);
    assert!(!steps.contains(&"Transpose".to_string()), "{steps:?}");
    Ok(())
}

/// What reads a result in other ways gets it as it was: an output of the graph, a subgraph, an
/// operator that counts elements.
#[test]
fn other_readers_find_the_channels_second() -> Result<()> {
    let mut net = Net::new();
    let x = net.images[0].0;
    let y = net.conv(x, 3, 4, 3)?;
    let z = net.conv(y, 4, 4, 1)?;
    let count = net.ints(&[-1])?;
    let flat = net.node("Reshape", &[z, count], &[])?;
    let condition = net.builder.input("condition", DType::Bool, &[]);
    let branches = vec![
        branch("then_branch", z, |graph, captured| graph.node("Neg", &[captured], &[]))?,
        branch("else_branch", y, |graph, captured| graph.node("Exp", &[captured], &[]))?,
    ];
    let chosen = net.builder.add(("", "If"), &[Some(condition)], &[], 1, branches)?;
    let sum = net.node("ReduceSum", &[z], &[])?;
    let session = check(net.finish(&[y, flat, chosen[0], sum])?)?;
    assert_eq!(hits(&session), 2);
    Ok(())
}

/// It can be left out, and is no part of what only fuses operators.
#[test]
fn it_is_a_rewrite_among_the_others() -> Result<()> {
    let mut net = Net::new();
    let x = net.images[0].0;
    let y = net.conv(x, 3, 4, 3)?;
    let model = Model::from_graph(net.finish(&[y])?);
    let hits_with = |optimizer: Optimizer| -> Result<usize> {
        let builder = Session::builder(&model).threads(1).device(Preferring::open()?);
        Ok(hits(&builder.optimizer(optimizer).build()?))
    };
    assert_eq!(hits_with(Optimizer::at(Level::All))?, 1);
    assert_eq!(hits_with(Optimizer::at(Level::Extended))?, 0);
    let disabled = vec!["channels_last".to_string()];
    assert_eq!(hits_with(Optimizer { disabled, ..Optimizer::at(Level::All) })?, 0);
    let cpu = Session::builder(&model).threads(1).build()?;
    assert_eq!(hits(&cpu), 0);
    Ok(())
}

impl Net {
    /// Adds what a number chooses of an image that is there.
    fn grow(&mut self, (kind, first, second): (u8, u16, u16)) -> Result<()> {
        let (x, shape) = self.images[first as usize % self.images.len()];
        let [batch, channels, height, width] = shape;
        let alike: Vec<ValueId> =
            self.images.iter().filter(|(_, other)| *other == shape).map(|(id, _)| *id).collect();
        let other = alike[second as usize % alike.len()];
        let ints = |list: &[i64]| Attribute::Ints(list.to_vec());
        let axis = |axis: i64| [("axis", Attribute::Int(axis))];
        let large = height >= 3 && width >= 3;
        let (image, shape) = match kind % 20 {
            0 | 1 => (self.conv(x, channels, 4, 1 + 2 * (second % 2) as usize)?, [batch, 4, height, width]),
            2 if large => {
                let (w, strides) = (self.constant(&[2 * channels, 1, 3, 3])?, ints(&[2, 2]));
                let group = Attribute::Int(channels as i64);
                let y = self.node("Conv", &[x, w], &[("group", group), ("strides", strides)])?;
                (y, [batch, 2 * channels, (height - 3) / 2 + 1, (width - 3) / 2 + 1])
            }
            3 => (self.node("LeakyRelu", &[x], &[])?, shape),
            4 => (self.node("Add", &[x, other], &[])?, shape),
            5 => (self.node("Concat", &[x, other], &axis(1))?, [batch, 2 * channels, height, width]),
            6 => (self.node("Concat", &[x, other], &axis(-1))?, [batch, channels, height, 2 * width]),
            7 if channels.is_multiple_of(2) => {
                let mut attrs = axis(1).to_vec();
                attrs.push(("num_outputs", Attribute::Int(2)));
                let halves = self.builder.add(("", "Split"), &[Some(x)], &attrs, 2, Vec::new())?;
                self.images.push((halves[0], [batch, channels / 2, height, width]));
                (halves[1], [batch, channels / 2, height, width])
            }
            8 if large => {
                let kernel = [("kernel_shape", ints(&[2, 3])), ("pads", ints(&[0, 1, 1, 0]))];
                let op = if second.is_multiple_of(2) { "MaxPool" } else { "AveragePool" };
                (self.node(op, &[x], &kernel)?, [batch, channels, height, width - 1])
            }
            9 => {
                let op = if second.is_multiple_of(2) { "GlobalMaxPool" } else { "GlobalAveragePool" };
                let factor = self.node(op, &[x], &[])?;
                self.images.push((factor, [batch, channels, 1, 1]));
                (self.node("Mul", &[factor, x], &[])?, shape)
            }
            10 => {
                let factor = [
                    vec![channels, 1, 1],
                    vec![1, channels, 1, 1],
                    vec![1],
                    vec![width],
                    vec![1, 1, height, 1],
                ];
                let factor = self.constant(&factor[second as usize % 5])?;
                (self.node("Mul", &[x, factor], &[])?, shape)
            }
            11 => (self.node("Softmax", &[x], &axis(i64::from(second % 4) - 3))?, shape),
            12 => {
                let axes: Vec<i64> =
                    [vec![2, 3], vec![1], vec![-1, 1], vec![0, 2]][second as usize % 4].clone();
                let mut reduced = shape;
                axes.iter().for_each(|axis| reduced[axis.rem_euclid(4) as usize] = 1);
                let axes = self.ints(&axes)?;
                (self.node("ReduceMean", &[x, axes], &[])?, reduced)
            }
            13 if height * width < 200 => {
                let roi_and_scales = [
                    self.builder.constant(floats(&[0], &[])?),
                    self.builder.constant(floats(&[4], &[1.0, 1.0, 2.0, 1.0])?),
                ];
                let attrs = [("mode", Attribute::String("nearest".to_string()))];
                let y = self.node("Resize", &[x, roi_and_scales[0], roi_and_scales[1]], &attrs)?;
                (y, [batch, channels, 2 * height, width])
            }
            14 => {
                let pads = self.ints(&[0, 1, 0, 2, 0, 0, 1, 0])?;
                (self.node("Pad", &[x, pads], &[])?, [batch, channels + 1, height + 1, width + 2])
            }
            15 => {
                let y = self.node("Transpose", &[x], &perm(&[0, 2, 3, 1]))?;
                let y = self.node("Relu", &[y], &[])?;
                (self.node("Transpose", &[y], &perm(&[0, 3, 1, 2]))?, shape)
            }
            16 => (self.node("Transpose", &[x], &perm(&[0, 1, 3, 2]))?, [batch, channels, width, height]),
            17 => {
                let (low, high) = (
                    self.builder.constant(Tensor::scalar(-0.5f32)?),
                    self.builder.constant(Tensor::scalar(1.5f32)?),
                );
                (self.node("Clip", &[x, low, high], &[])?, shape)
            }
            18 => {
                let (axes, left): (&[i64], _) = match second % 4 {
                    0 => (&[2, 3], [batch, channels, 1, 1]),
                    1 => (&[1], [batch, height, width, 1]),
                    2 => (&[-2], [batch, channels, width, 1]),
                    _ => (&[1, 0], [height, width, 1, 1]),
                };
                let axes = self.ints(axes)?;
                let mean = self.node("ReduceMean", &[x, axes], &[("keepdims", Attribute::Int(0))])?;
                let sizes = self.ints(&left.map(|size| size as i64))?;
                (self.node("Reshape", &[mean, sizes], &[])?, left)
            }
            // What has no form with the channels last.
            _ => {
                let axis = self.builder.constant(Tensor::scalar(i64::from(second % 4))?);
                (self.node("CumSum", &[x, axis], &[])?, shape)
            }
        };
        if shape.iter().product::<usize>() <= 4096 {
            self.images.push((image, shape));
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_networks_give_the_same(
        choices in prop::collection::vec(any::<(u8, u16, u16)>(), 1..30),
        outputs in prop::collection::vec(any::<u16>(), 0..3),
    ) {
        let network = || -> Result<()> {
            let mut net = Net::new();
            choices.iter().try_for_each(|choice| net.grow(*choice))?;
            let mut results: Vec<ValueId> = net.images.iter().rev().take(4).map(|(id, _)| *id).collect();
            results.extend(outputs.iter().map(|output| net.images[*output as usize % net.images.len()].0));
            results.sort_unstable();
            results.dedup();
            // An input is no output of its own.
            results.retain(|id| *id != net.images[0].0);
            if results.is_empty() {
                return Ok(());
            }
            check(net.finish(&results)?).map(|_| ())
        };
        network().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }
}
