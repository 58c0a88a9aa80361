//! Recurrent layers have the same bits on any number of threads, and whatever else is in the batch.

use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// One layer.
#[derive(Clone, Copy, Debug)]
struct Case {
    op: &'static str,
    direction: &'static str,
    is_constant: bool,
    batch_first: bool,
    has_lengths: bool,
    steps: usize,
    batch: usize,
    hidden: usize,
}

const DEPTH: usize = 10;

/// A tensor of fractions whose sums depend on the order of their terms.
fn fractions(shape: &[usize], seed: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let element = |index: usize| ((index + 1) * (seed + 7) * 7919 % 1009) as f32 / 3310.0 - 0.15;
    Tensor::from_vec(shape, (0..count).map(element).collect::<Vec<f32>>())
}

impl Case {
    fn directions(&self) -> usize {
        if self.direction == "bidirectional" { 2 } else { 1 }
    }

    /// The shapes of the weights of inputs, of the recurrence, and of the biases.
    fn weights(&self) -> [Vec<usize>; 3] {
        let gates = match self.op {
            "LSTM" => 4,
            "GRU" => 3,
            _ => 1,
        };
        let (count, rows) = (self.directions(), gates * self.hidden);
        [vec![count, rows, DEPTH], vec![count, rows, self.hidden], vec![count, 2 * rows]]
    }

    fn graph(&self) -> Result<Graph> {
        let mut b = GraphBuilder::new("layer");
        let axes = if self.batch_first { ["n", "s", "10"] } else { ["s", "n", "10"] };
        let x = b.input("x", DType::F32, &axes);
        let lengths = self.has_lengths.then(|| b.input("lengths", DType::I32, &["n"]));
        let mut given: Vec<Option<ValueId>> = vec![Some(x)];
        for (index, shape) in self.weights().iter().enumerate() {
            let id = match self.is_constant {
                true => b.constant(fractions(shape, index)?),
                false => {
                    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
                    let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
                    b.input(["w", "r", "b"][index], DType::F32, &sizes)
                }
            };
            given.push(Some(id));
        }
        given.push(lengths);
        let attrs = [
            ("hidden_size", Attribute::Int(self.hidden as i64)),
            ("direction", Attribute::String(self.direction.into())),
            ("layout", Attribute::Int(i64::from(self.batch_first))),
        ];
        let outputs = b.add(("", self.op), &given, &attrs, 2, Vec::new())?;
        b.finish(&outputs)
    }

    /// The inputs of the sequences `first..first + count` of the batch.
    fn inputs(&self, first: usize, count: usize) -> Result<Vec<(&'static str, Value)>> {
        let rows: Vec<Tensor> =
            (first..first + count).map(|row| fractions(&[self.steps, DEPTH], row)).collect::<Result<_>>()?;
        let rows: Vec<Vec<f32>> = rows.iter().map(Tensor::to_vec::<f32>).collect::<Result<_>>()?;
        let at = |row: usize, step: usize| &rows[row][step * DEPTH..][..DEPTH];
        let (shape, x): (_, Vec<f32>) = match self.batch_first {
            true => ([count, self.steps, DEPTH], rows.concat()),
            false => {
                let steps = (0..self.steps).flat_map(|step| (0..count).map(move |row| (row, step)));
                ([self.steps, count, DEPTH], steps.flat_map(|(row, step)| at(row, step).to_vec()).collect())
            }
        };
        // Every third sequence is shorter.
        let length = |row: usize| if row % 3 == 2 { self.steps.div_ceil(2) } else { self.steps };
        let lengths = (first..first + count).map(|row| length(row) as i32).collect::<Vec<i32>>();
        let mut inputs: Vec<(&'static str, Value)> = vec![("x", Tensor::from_vec(&shape, x)?.into())];
        if self.has_lengths {
            inputs.push(("lengths", Tensor::from_vec(&[count], lengths)?.into()));
        }
        if !self.is_constant {
            for (index, shape) in self.weights().iter().enumerate() {
                inputs.push((["w", "r", "b"][index], fractions(shape, index)?.into()));
            }
        }
        Ok(inputs)
    }

    fn run(&self, threads: usize, first: usize, count: usize) -> Result<[Vec<u32>; 2]> {
        let session = Session::builder(&Model::from_graph(self.graph()?)).threads(threads).build()?;
        let outputs = session.run(&self.inputs(first, count)?)?;
        let bits = |index: usize| -> Result<Vec<u32>> {
            Ok(outputs[index].1.tensor()?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
        };
        Ok([bits(0)?, bits(1)?])
    }

    /// The last states of a sequence, from those of `count`.
    fn last_states(&self, states: &[u32], count: usize, sequence: usize) -> Vec<u32> {
        let row = |direction: usize| match self.batch_first {
            true => sequence * self.directions() + direction,
            false => direction * count + sequence,
        };
        (0..self.directions())
            .flat_map(|way| states[row(way) * self.hidden..][..self.hidden].to_vec())
            .collect()
    }
}

#[test]
fn threads_and_batches_leave_the_bits_alone() -> Result<()> {
    let plain = Case {
        op: "LSTM",
        direction: "bidirectional",
        is_constant: true,
        batch_first: false,
        has_lengths: false,
        steps: 80,
        batch: 2,
        hidden: 33,
    };
    for op in ["LSTM", "GRU", "RNN"] {
        for case in [
            plain,
            Case { batch: 9, ..plain },
            Case { batch: 9, has_lengths: true, ..plain },
            Case { batch: 3, batch_first: true, has_lengths: true, hidden: 130, ..plain },
            Case { batch: 1, batch_first: true, steps: 300, hidden: 66, ..plain },
            Case { batch: 3, direction: "reverse", has_lengths: true, hidden: 130, ..plain },
            Case { batch: 5, is_constant: false, direction: "forward", hidden: 66, ..plain },
            // Several chunks of steps.
            Case { batch: 9, hidden: 256, ..plain },
            Case { batch: 9, hidden: 130, direction: "reverse", ..plain },
            // A step of a single sequence that is long enough for a region of its own.
            Case { batch: 1, steps: 3, direction: "forward", hidden: 520, ..plain },
        ] {
            let case = Case { op, ..case };
            let one = case.run(1, 0, case.batch)?;
            for threads in [2, 3, 8] {
                assert!(case.run(threads, 0, case.batch)? == one, "{case:?} on {threads} threads");
            }
            for sequence in 0..case.batch {
                let alone = case.run(2, sequence, 1)?;
                let expected = case.last_states(&one[1], case.batch, sequence);
                assert!(case.last_states(&alone[1], 1, 0) == expected, "{case:?}, sequence {sequence}");
            }
        }
    }
    Ok(())
}

/// Without a step the last state is the first one.
#[test]
fn a_layer_of_no_steps_returns_its_state() -> Result<()> {
    let mut b = GraphBuilder::new("no steps");
    let x = b.input("x", DType::F32, &["s", "n", "3"]);
    let h = b.input("h", DType::F32, &["1", "n", "4"]);
    let [w, r] = [fractions(&[1, 4, 3], 1)?, fractions(&[1, 4, 4], 2)?].map(|weight| b.constant(weight));
    let hidden = [("hidden_size", Attribute::Int(4))];
    let given = [Some(x), Some(w), Some(r), None, None, Some(h)];
    let outputs = b.add(("", "RNN"), &given, &hidden, 2, Vec::new())?;
    let session = Session::builder(&Model::from_graph(b.finish(&outputs)?)).threads(2).build()?;
    let state = fractions(&[1, 2, 4], 3)?;
    let x = Tensor::from_vec(&[0, 2, 3], Vec::<f32>::new())?;
    let outputs = session.run(&[("x", x.into()), ("h", state.clone().into())])?;
    assert_eq!(outputs[1].1.tensor()?.to_vec::<f32>()?, state.to_vec::<f32>()?);
    Ok(())
}
