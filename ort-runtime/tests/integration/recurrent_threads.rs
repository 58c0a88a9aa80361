//! Recurrent layers have the same bits on any number of threads, and whatever else is in the batch.

use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::{Budget, DType, ErrorKind, Model, Result, Session, Tensor, Value};

/// One layer.
#[derive(Clone, Copy, Debug)]
struct Case {
    op: &'static str,
    direction: &'static str,
    is_constant: bool,
    batch_first: bool,
    /// The longest sequence, if sequences have lengths of their own.
    longest: Option<usize>,
    steps: usize,
    batch: usize,
    depth: usize,
    hidden: usize,
}

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
        [vec![count, rows, self.depth], vec![count, rows, self.hidden], vec![count, 2 * rows]]
    }

    fn graph(&self) -> Result<Graph> {
        let mut b = GraphBuilder::new("layer");
        let depth = self.depth.to_string();
        let axes = if self.batch_first { ["n", "s", &depth] } else { ["s", "n", &depth] };
        let x = b.input("x", DType::F32, &axes);
        let lengths = self.longest.map(|_| b.input("lengths", DType::I32, &["n"]));
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
        let rows: Vec<Tensor> = (first..first + count)
            .map(|row| fractions(&[self.steps, self.depth], row))
            .collect::<Result<_>>()?;
        let rows: Vec<Vec<f32>> = rows.iter().map(Tensor::to_vec::<f32>).collect::<Result<_>>()?;
        let at = |row: usize, step: usize| &rows[row][step * self.depth..][..self.depth];
        let (shape, x): (_, Vec<f32>) = match self.batch_first {
            true => ([count, self.steps, self.depth], rows.concat()),
            false => {
                let steps = (0..self.steps).flat_map(|step| (0..count).map(move |row| (row, step)));
                (
                    [self.steps, count, self.depth],
                    steps.flat_map(|(row, step)| at(row, step).to_vec()).collect(),
                )
            }
        };
        // Every third sequence is shorter, and every fourth is empty.
        let length = |row: usize, longest: usize| match row {
            row if row % 4 == 3 => 0,
            row if row % 3 == 2 => longest.div_ceil(2),
            _ => longest,
        };
        let mut inputs: Vec<(&'static str, Value)> = vec![("x", Tensor::from_vec(&shape, x)?.into())];
        if let Some(longest) = self.longest {
            let lengths: Vec<i32> = (first..first + count).map(|row| length(row, longest) as i32).collect();
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
        let builder = Session::builder(&Model::from_graph(self.graph()?));
        // What a kernel reads before it writes it would be NaN.
        let session = builder.threads(threads).poison(true).build()?;
        let outputs = session.run(&self.inputs(first, count)?)?;
        let bits = |index: usize| -> Result<Vec<u32>> {
            Ok(outputs[index].1.tensor()?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
        };
        Ok([bits(0)?, bits(1)?])
    }

    /// The outputs of all steps of a sequence, from those of `count`.
    fn outputs(&self, y: &[u32], count: usize, sequence: usize) -> Vec<u32> {
        let ways = self.directions();
        let row = |step: usize, way: usize| match self.batch_first {
            true => (sequence * self.steps + step) * ways + way,
            false => (step * ways + way) * count + sequence,
        };
        let rows = (0..self.steps).flat_map(|step| (0..ways).map(move |way| row(step, way)));
        rows.flat_map(|row| y[row * self.hidden..][..self.hidden].to_vec()).collect()
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
        longest: None,
        steps: 80,
        batch: 2,
        depth: 10,
        hidden: 33,
    };
    for op in ["LSTM", "GRU", "RNN"] {
        for case in [
            plain,
            Case { batch: 9, ..plain },
            Case { batch: 9, longest: Some(80), ..plain },
            Case { batch: 3, batch_first: true, longest: Some(80), hidden: 130, ..plain },
            Case { batch: 1, batch_first: true, steps: 300, hidden: 66, ..plain },
            Case { batch: 3, direction: "reverse", longest: Some(71), hidden: 130, ..plain },
            Case { batch: 5, is_constant: false, direction: "forward", hidden: 66, ..plain },
            // Several chunks of steps.
            Case { batch: 9, hidden: 256, ..plain },
            Case { batch: 9, hidden: 130, direction: "reverse", ..plain },
            // Several k blocks in the GEMM of the inputs.
            Case { batch: 3, steps: 50, depth: 800, ..plain },
            // The GEMM of the inputs takes two threads and little workspace for all steps, but one
            // thread and more workspace for those up to the longest sequence.
            Case {
                is_constant: false,
                longest: Some(31),
                steps: 32,
                batch: 1,
                depth: 32,
                hidden: 256,
                ..plain
            },
            // A step of a single sequence that is long enough for a region of its own.
            Case { batch: 1, steps: 3, direction: "forward", hidden: 520, ..plain },
        ] {
            let case = Case { op, ..case };
            let one = case.run(1, 0, case.batch)?;
            assert!(one.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()), "{case:?}");
            for threads in [2, 3, 8] {
                assert!(case.run(threads, 0, case.batch)? == one, "{case:?} on {threads} threads");
            }
            for sequence in 0..case.batch {
                let alone = case.run(2, sequence, 1)?;
                let expected = [
                    case.outputs(&one[0], case.batch, sequence),
                    case.last_states(&one[1], case.batch, sequence),
                ];
                assert!(alone == expected, "{case:?}, sequence {sequence}");
                // The tensors of one sequence are the same in both layouts.
                if sequence == 0 {
                    let other = Case { batch_first: !case.batch_first, ..case };
                    assert!(other.run(2, 0, 1)? == alone, "{case:?} has other bits in the other layout");
                }
            }
        }
    }
    Ok(())
}

/// With less memory than the plan of a layer, a run is refused. The limit that the error names is
/// enough.
#[test]
fn a_layer_stays_in_its_memory_limit() -> Result<()> {
    let plain = Case {
        op: "LSTM",
        direction: "bidirectional",
        is_constant: true,
        batch_first: false,
        longest: None,
        steps: 300,
        batch: 4,
        depth: 10,
        hidden: 130,
    };
    for (op, case, threads) in [
        ("LSTM", plain, 3),
        ("LSTM", Case { longest: Some(300), ..plain }, 2),
        ("GRU", Case { batch_first: true, ..plain }, 3),
        ("GRU", plain, 1),
        ("RNN", Case { is_constant: false, direction: "reverse", ..plain }, 2),
    ] {
        let case = Case { op, ..case };
        let (model, inputs) = (Model::from_graph(case.graph()?), case.inputs(0, case.batch)?);
        let builder = || Session::builder(&model).batch_split(false).threads(threads);
        let sizes = [("s", case.steps as i64), ("n", case.batch as i64)];
        let mut limit = builder().build()?.plan(&sizes)?.planned_bytes - 1;
        let mut refusals = 0;
        let outputs = loop {
            let budget = Budget::new(Some(limit));
            let outcome = builder().budget(&budget).build().and_then(|session| session.run(&inputs));
            assert!(budget.peak() <= limit, "{case:?}: {} bytes of {limit}", budget.peak());
            let problem = match outcome {
                Ok(outputs) => break outputs,
                Err(problem) => problem,
            };
            assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{case:?}: {problem}");
            let named = problem.shortage().map(|shortage| shortage.sufficient_limit());
            let named = named.filter(|named| *named > limit).unwrap_or_else(|| panic!("{case:?}: {problem}"));
            (limit, refusals) = (named, refusals + 1);
        };
        assert!(refusals > 0, "{case:?}");
        let states = outputs[1].1.tensor()?.to_vec::<f32>()?;
        let states: Vec<u32> = states.into_iter().map(f32::to_bits).collect();
        assert!(states == case.run(1, 0, case.batch)?[1], "{case:?} has other bits in a limit");
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
