//! Gradients of recurrent layers against central finite differences, on the CPU, in `double`.

use crate::gradient_support::rows::{Row, check_all, row};
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{Result, Tensor};

type Attrs<'a> = &'a [(&'static str, Attribute)];

/// A layer of the inputs given, by position; the output at `wanted`, or all of them joined.
fn layer(
    b: &mut GraphBuilder,
    op: &str,
    inputs: &[Option<ValueId>],
    attrs: Attrs<'_>,
    outputs: usize,
) -> Result<ValueId> {
    let mut attrs = attrs.to_vec();
    attrs.push(("hidden_size", Attribute::Int(2)));
    let outputs = b.add(("", op), inputs, &attrs, outputs, vec![])?;
    let flat = b.constant(Tensor::from_slice(&[1], &[-1i64])?);
    let mut lists = Vec::new();
    for output in outputs {
        lists.push(b.node("Reshape", &[output, flat], &[])?);
    }
    b.node("Concat", &lists, &[("axis", Attribute::Int(0))])
}

fn text(name: &'static str, value: &str) -> (&'static str, Attribute) {
    (name, Attribute::String(value.into()))
}

fn names(list: &[&str]) -> (&'static str, Attribute) {
    ("activations", Attribute::Strings(list.iter().map(|name| name.to_string()).collect()))
}

/// All inputs but lengths: those of one direction, then peepholes where `x` has them.
fn all(x: &[ValueId], lengths: Option<ValueId>) -> Vec<Option<ValueId>> {
    let mut inputs: Vec<Option<ValueId>> = x.iter().copied().map(Some).collect();
    if inputs.len() > 4 {
        inputs.insert(4, lengths);
    }
    inputs
}

fn lengths(b: &mut GraphBuilder) -> Result<Option<ValueId>> {
    Ok(Some(b.constant(Tensor::from_slice(&[3], &[4i32, 0, 2])?)))
}

#[test]
fn lstm() {
    check_all(&[
        row("plain", |b, x| layer(b, "LSTM", &all(x, None), &[], 1), LSTM_PLAIN),
        row("last state only", |b, x| last(b, "LSTM", &all(x, None)), LSTM_BIASED),
        row("all inputs, all outputs", |b, x| layer(b, "LSTM", &all(x, None), &[], 3), LSTM_ALL),
        row("reverse", |b, x| layer(b, "LSTM", &all(x, None), &[text("direction", "reverse")], 3), LSTM_ALL),
        row(
            "both directions",
            |b, x| layer(b, "LSTM", &all(x, None), &[text("direction", "bidirectional")], 3),
            LSTM_BOTH,
        ),
        row(
            "lengths",
            |b, x| {
                let lengths = lengths(b)?;
                layer(b, "LSTM", &all(x, lengths), &[text("direction", "bidirectional")], 3)
            },
            LSTM_BOTH,
        ),
        row(
            "batch first",
            |b, x| layer(b, "LSTM", &all(x, None), &[("layout", Attribute::Int(1))], 3),
            LSTM_BATCH_FIRST,
        ),
        row(
            "clip and coupled gates",
            |b, x| {
                let attrs = [("clip", Attribute::Float(1.3)), ("input_forget", Attribute::Int(1))];
                layer(b, "LSTM", &all(x, None), &attrs, 3)
            },
            LSTM_ALL,
        ),
        row(
            "other activations",
            |b, x| {
                let attrs = [
                    names(&["HardSigmoid", "ScaledTanh", "Softsign"]),
                    ("activation_alpha", Attribute::Floats(vec![0.11, 1.2])),
                    ("activation_beta", Attribute::Floats(vec![0.45, 0.7])),
                ];
                layer(b, "LSTM", &all(x, None), &attrs, 3)
            },
            LSTM_ALL,
        ),
    ]);
}

/// The last hidden state, without the others.
fn last(b: &mut GraphBuilder, op: &str, inputs: &[Option<ValueId>]) -> Result<ValueId> {
    let outputs = b.add(("", op), inputs, &[("hidden_size", Attribute::Int(2))], 2, vec![])?;
    Ok(outputs[1])
}

const LSTM_PLAIN: &[&[usize]] = &[&[4, 3, 2], &[1, 8, 2], &[1, 8, 2]];
const LSTM_BIASED: &[&[usize]] = &[&[4, 3, 2], &[1, 8, 2], &[1, 8, 2], &[1, 16]];
const LSTM_ALL: &[&[usize]] =
    &[&[4, 3, 2], &[1, 8, 2], &[1, 8, 2], &[1, 16], &[1, 3, 2], &[1, 3, 2], &[1, 6]];
const LSTM_BOTH: &[&[usize]] =
    &[&[4, 3, 2], &[2, 8, 2], &[2, 8, 2], &[2, 16], &[2, 3, 2], &[2, 3, 2], &[2, 6]];
const LSTM_BATCH_FIRST: &[&[usize]] = &[&[3, 4, 2], &[1, 8, 2], &[1, 8, 2], &[1, 16], &[3, 1, 2], &[3, 1, 2]];

#[test]
fn gru() {
    let rows: Vec<Row> = vec![
        row("plain", |b, x| layer(b, "GRU", &all(x, None), &[], 1), GRU_PLAIN),
        row("all inputs, all outputs", |b, x| layer(b, "GRU", &all(x, None), &[], 2), GRU_ALL),
        row("product before reset", |b, x| layer(b, "GRU", &all(x, None), &[after_product()], 2), GRU_ALL),
        row(
            "product before reset, plain",
            |b, x| layer(b, "GRU", &all(x, None), &[after_product(), text("direction", "reverse")], 1),
            GRU_PLAIN,
        ),
        row(
            "both directions, lengths",
            |b, x| {
                let lengths = lengths(b)?;
                layer(b, "GRU", &all(x, lengths), &[text("direction", "bidirectional")], 2)
            },
            GRU_BOTH,
        ),
        row(
            "both directions, lengths, product before reset, clip",
            |b, x| {
                let lengths = lengths(b)?;
                let attrs =
                    [text("direction", "bidirectional"), after_product(), ("clip", Attribute::Float(1.3))];
                layer(b, "GRU", &all(x, lengths), &attrs, 2)
            },
            GRU_BOTH,
        ),
        row(
            "batch first",
            |b, x| layer(b, "GRU", &all(x, None), &[("layout", Attribute::Int(1))], 2),
            GRU_BATCH_FIRST,
        ),
    ];
    check_all(&rows);
}

fn after_product() -> (&'static str, Attribute) {
    ("linear_before_reset", Attribute::Int(1))
}

const GRU_PLAIN: &[&[usize]] = &[&[4, 3, 2], &[1, 6, 2], &[1, 6, 2]];
const GRU_ALL: &[&[usize]] = &[&[4, 3, 2], &[1, 6, 2], &[1, 6, 2], &[1, 12], &[1, 3, 2]];
const GRU_BOTH: &[&[usize]] = &[&[4, 3, 2], &[2, 6, 2], &[2, 6, 2], &[2, 12], &[2, 3, 2]];
const GRU_BATCH_FIRST: &[&[usize]] = &[&[3, 4, 2], &[1, 6, 2], &[1, 6, 2], &[1, 12], &[3, 1, 2]];

#[test]
fn rnn() {
    check_all(&[
        row("plain", |b, x| layer(b, "RNN", &all(x, None), &[], 1), RNN_PLAIN),
        row(
            "both directions, lengths",
            |b, x| {
                let lengths = lengths(b)?;
                let attrs = [
                    text("direction", "bidirectional"),
                    names(&["Affine", "LeakyRelu"]),
                    ("activation_alpha", Attribute::Floats(vec![0.7, 0.2])),
                    ("activation_beta", Attribute::Floats(vec![0.1])),
                ];
                layer(b, "RNN", &all(x, lengths), &attrs, 2)
            },
            RNN_BOTH,
        ),
    ]);
}

const RNN_PLAIN: &[&[usize]] = &[&[4, 3, 2], &[1, 2, 2], &[1, 2, 2]];
const RNN_BOTH: &[&[usize]] = &[&[4, 3, 2], &[2, 2, 2], &[2, 2, 2], &[2, 4], &[2, 3, 2]];
