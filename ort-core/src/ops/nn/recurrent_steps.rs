//! Scan construction for the gradients of recurrent layers.
//!
//! Builds a `Scan` whose body is emitted node by node, and the activations of gates.

use crate::dim::Dim;
use crate::ir::{Attribute, Attributes, Capture, Graph, Node, Subgraph, ValueId, ValueType};
use crate::spec::{GradCx, NodeEmitter, prune};
use crate::{Result, ensure, error};

/// A `Scan` over the first axis of some sequences, under construction.
pub(in crate::ops) struct Steps {
    pub(in crate::ops) graph: Graph,
    name: String,
    captures: Vec<Capture>,
    /// Loop-carried values: in the body, and the initial value outside.
    carried: Vec<(ValueId, ValueId)>,
    /// Scanned sequences: the current step in the body, and the sequence outside.
    scanned: Vec<(ValueId, ValueId)>,
}

impl Steps {
    pub(in crate::ops) fn new(cx: &GradCx<'_>) -> Steps {
        let name = format!("{}/steps_{}", cx.node.name, cx.pen.graph.value_count());
        let (captures, carried, scanned) = (Vec::new(), Vec::new(), Vec::new());
        Steps { graph: Graph::new(name.clone()), name, captures, carried, scanned }
    }

    fn value(&mut self, ty: ValueType) -> ValueId {
        let name = format!("{}/value_{}", self.name, self.graph.value_count());
        self.graph.add_value(name, ty)
    }

    /// Adds a loop-carried value that starts as `first`; returns its value in the body.
    pub(in crate::ops) fn carry(&mut self, cx: &GradCx<'_>, first: ValueId) -> ValueId {
        let inner = self.value(cx.pen.graph.value(first).ty.clone());
        self.carried.push((inner, first));
        inner
    }

    /// Adds a scanned sequence; returns the value of the current step in the body.
    pub(in crate::ops) fn scan(&mut self, cx: &GradCx<'_>, sequence: ValueId) -> Result<ValueId> {
        let value = cx.pen.graph.value(sequence);
        // A step is the sequence without its first axis.
        let shape: Option<Vec<Dim>> = value.ty.shape().and_then(|shape| shape.get(1..)).map(<[Dim]>::to_vec);
        let inner = self.value(ValueType::tensor(cx.dtype(sequence)?, shape));
        self.scanned.push((inner, sequence));
        Ok(inner)
    }

    /// Captures an outer value; returns its value in the body.
    pub(in crate::ops) fn capture(&mut self, cx: &GradCx<'_>, outer: ValueId) -> ValueId {
        let inner = self.value(cx.pen.graph.value(outer).ty.clone());
        self.captures.push(Capture { outer, inner });
        inner
    }

    /// An emitter of nodes in the body.
    pub(in crate::ops) fn pen(&mut self) -> NodeEmitter<'_> {
        NodeEmitter { graph: &mut self.graph, name: self.name.as_str().into() }
    }

    /// Adds the `Scan`, from the last step to the first if `reversed`.
    ///
    /// Returns the final loop-carried values, then the collected sequences. Those keep the step
    /// order of the scanned sequences.
    pub(in crate::ops) fn finish(
        mut self,
        cx: &mut GradCx<'_>,
        reversed: bool,
        (carried, collected): (&[ValueId], &[ValueId]),
    ) -> Result<Vec<ValueId>> {
        let mut outputs = Vec::with_capacity(carried.len() + collected.len());
        // A collected value may be an input of the body, so each output gets a node of its own.
        for &output in carried.iter().chain(collected) {
            outputs.push(self.pen().emit("Identity", &[output], &[])?);
        }
        let Steps { mut graph, mut captures, carried, scanned, .. } = self;
        graph.outputs.clone_from(&outputs);
        // Differentiation leaves dead nodes in the body; captures that only they read go too.
        prune(&mut graph, 0, outputs);
        let reads: Vec<ValueId> = graph.nodes.iter().flat_map(Node::reads).collect();
        captures.retain(|capture| reads.contains(&capture.inner));
        let count = graph.outputs.len();
        let both = || carried.iter().chain(&scanned);
        graph.inputs = both().map(|(inner, _)| *inner).collect();
        let inputs: Vec<Option<ValueId>> = both().map(|(_, outer)| Some(*outer)).collect();
        let directions = |count: usize| Attribute::Ints(vec![i64::from(reversed); count]);
        let attrs = [
            ("num_scan_inputs", Attribute::Int(scanned.len() as i64)),
            ("scan_input_directions", directions(scanned.len())),
            ("scan_output_directions", directions(collected.len())),
        ];
        let body = Subgraph { attr: "body", graph, captures };
        cx.pen.emit_flow(("Scan", &inputs), &attrs, count, vec![body])
    }
}

/// Splits a value into `count` equal parts along an axis.
pub(in crate::ops) fn parts(
    pen: &mut NodeEmitter<'_>,
    value: ValueId,
    axis: i64,
    count: usize,
) -> Result<Vec<ValueId>> {
    let attrs = [("axis", Attribute::Int(axis)), ("num_outputs", Attribute::Int(count as i64))];
    pen.emit_many("Split", &[Some(value)], &attrs, count)
}

/// The activation of a gate, with its parameters.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Activation {
    name: String,
    alpha: f32,
    beta: f32,
}

/// The activations of each direction, `defaults` if the attribute names none.
pub(in crate::ops) fn activations(
    attrs: &Attributes,
    directions: usize,
    defaults: &[&str],
) -> Result<Vec<Vec<Activation>>> {
    let mut names: Vec<String> = attrs.find_strings("activations").unwrap_or(&[]).to_vec();
    if names.is_empty() {
        names = (0..directions).flat_map(|_| defaults.iter().map(|name| name.to_string())).collect();
    }
    let needed = directions * defaults.len();
    ensure!(names.len() >= needed, InvalidGraph, "{} activations, expected {needed}", names.len());
    let mut alphas = attrs.find_floats("activation_alpha").unwrap_or(&[]).iter().copied();
    let mut betas = attrs.find_floats("activation_beta").unwrap_or(&[]).iter().copied();
    let mut all = Vec::with_capacity(needed);
    for name in names.into_iter().take(needed) {
        let name = name.to_ascii_lowercase();
        // Which parameters an activation has, and their defaults. The attribute lists have entries
        // only for activations with that parameter.
        let (alpha, beta) = match name.as_str() {
            "affine" => (Some(1.0), Some(0.0)),
            "scaledtanh" => (Some(1.0), Some(1.0)),
            "hardsigmoid" => (Some(0.2), Some(0.5)),
            "leakyrelu" => (Some(0.01), None),
            "thresholdedrelu" | "elu" => (Some(1.0), None),
            _ => (None, None),
        };
        let beta = beta.map_or(0.0, |default| betas.next().unwrap_or(default));
        let alpha = alpha.map_or(0.0, |default| alphas.next().unwrap_or(default));
        all.push(Activation { name, alpha, beta });
    }
    // Each layer has defaults for its functions, so a chunk is never of size 0.
    Ok(all.chunks(defaults.len()).map(<[Activation]>::to_vec).collect())
}

impl Activation {
    /// Emits the activation of a value, which is clipped first if there is a bound.
    pub(in crate::ops) fn emit(
        &self,
        pen: &mut NodeEmitter<'_>,
        mut x: ValueId,
        clip: Option<f32>,
    ) -> Result<ValueId> {
        let dtype = pen.dtype(x)?;
        // The standard applies `clip` to the input of the activations.
        if let Some(bound) = clip {
            let (least, most) = (pen.number(-f64::from(bound), dtype)?, pen.number(f64::from(bound), dtype)?);
            x = pen.emit("Clip", &[x, least, most], &[])?;
        }
        let (alpha, beta) = (Attribute::Float(self.alpha), Attribute::Float(self.beta));
        let scaled = |pen: &mut NodeEmitter<'_>, x: ValueId, factor: f32| {
            let factor = pen.number(f64::from(factor), dtype)?;
            pen.emit("Mul", &[x, factor], &[])
        };
        match self.name.as_str() {
            "relu" => pen.emit("Relu", &[x], &[]),
            "tanh" => pen.emit("Tanh", &[x], &[]),
            "sigmoid" => pen.emit("Sigmoid", &[x], &[]),
            "affine" => {
                // `alpha * x + beta`.
                let product = scaled(pen, x, self.alpha)?;
                let shift = pen.number(f64::from(self.beta), dtype)?;
                pen.emit("Add", &[product, shift], &[])
            }
            "scaledtanh" => {
                // `alpha * tanh(beta * x)`.
                let inner = scaled(pen, x, self.beta)?;
                let tanh = pen.emit("Tanh", &[inner], &[])?;
                scaled(pen, tanh, self.alpha)
            }
            "leakyrelu" => pen.emit("LeakyRelu", &[x], &[("alpha", alpha)]),
            "thresholdedrelu" => pen.emit("ThresholdedRelu", &[x], &[("alpha", alpha)]),
            "hardsigmoid" => pen.emit("HardSigmoid", &[x], &[("alpha", alpha), ("beta", beta)]),
            "elu" => pen.emit("Elu", &[x], &[("alpha", alpha)]),
            "softsign" => pen.emit("Softsign", &[x], &[]),
            "softplus" => pen.emit("Softplus", &[x], &[]),
            name => Err(error!(InvalidGraph, "activation '{name}' is not in the ONNX standard")),
        }
    }
}
