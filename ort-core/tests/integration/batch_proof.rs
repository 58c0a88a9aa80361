//! Which graphs are proved to compute the items of a batch apart, and what stands in the way of the
//! others.

use ort_core::Result;
use ort_core::dim::Symbol;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_core::plan::{BatchProof, BatchRefusal, batch_parallel, prove};
use ort_core::tensor::Tensor;

/// What is proved for the symbol `n`: the axis of the items in each output and the fewest of a
/// part, or a piece of the refusal.
type Expected = Result<(&'static [usize], usize), &'static str>;

/// Inputs as text: `x n 3` is an input, `ids n s` one of int64, `i32 n` of int32, `i8 n` of int8;
/// `w 3 4` is a constant, `codes 3 4` one of int8, `= 0 -1` one of these integers; nothing is left
/// out.
type Given = &'static [&'static str];

#[derive(Clone, Copy)]
enum Attr {
    Int(i64),
    Ints(&'static [i64]),
}
use Attr::{Int, Ints};

type Attrs = &'static [(&'static str, Attr)];

fn value(builder: &mut GraphBuilder, text: &str, index: usize) -> Result<Option<ValueId>> {
    let words: Vec<&str> = text.split(' ').collect();
    let (&[kind, ..], sizes) = (words.as_slice(), words.get(1..).unwrap_or_default()) else {
        return Ok(None);
    };
    let name = format!("{kind}{index}");
    let numbers = || sizes.iter().map(|size| size.parse::<i64>().unwrap_or(0));
    Ok(Some(match kind {
        "" => return Ok(None),
        "x" => builder.input(&name, DType::F32, sizes),
        "ids" => builder.input(&name, DType::I64, sizes),
        "i32" => builder.input(&name, DType::I32, sizes),
        "i8" => builder.input(&name, DType::I8, sizes),
        "w" => {
            let shape: Vec<usize> = numbers().map(|size| size as usize).collect();
            let elements = vec![0.5f32; shape.iter().product()];
            builder.constant(Tensor::from_vec(&shape, elements)?)
        }
        "codes" => {
            let shape: Vec<usize> = numbers().map(|size| size as usize).collect();
            builder.constant(Tensor::from_vec(&shape, vec![3_i8; shape.iter().product()])?)
        }
        "=" => builder.constant(Tensor::from_vec(&[sizes.len()], numbers().collect::<Vec<i64>>())?),
        "=0" => builder.constant(Tensor::scalar(sizes[0].parse::<i64>().unwrap_or(0))?),
        _ => panic!("{text}"),
    }))
}

/// A graph of one node of `domain:op`, or of the standard.
fn node(op: &str, given: Given, attrs: Attrs, outputs: usize) -> Result<Graph> {
    let mut builder = GraphBuilder::new("case");
    let given = given.iter().enumerate().map(|(index, text)| value(&mut builder, text, index));
    let given = given.collect::<Result<Vec<Option<ValueId>>>>()?;
    let attrs: Vec<(&str, Attribute)> = attrs
        .iter()
        .map(|(name, value)| match value {
            Int(value) => (*name, Attribute::Int(*value)),
            Ints(values) => (*name, Attribute::Ints(values.to_vec())),
        })
        .collect();
    let operator = op.split_once(':').unwrap_or(("", op));
    let outputs = builder.add(operator, &given, &attrs, outputs, Vec::new())?;
    builder.finish(&outputs)
}

fn check(name: &str, found: Result<BatchProof, BatchRefusal>, expected: Expected) {
    match (found, expected) {
        (Ok(BatchProof { outputs, least, .. }), Ok(expected)) => {
            assert_eq!((outputs.as_slice(), least), expected, "{name}");
        }
        (Err(refusal), Err(piece)) => assert!(refusal.to_string().contains(piece), "{name}: {refusal}"),
        (found, _) => panic!("{name}: {found:?}"),
    }
}

const ROWS: Expected = Ok((&[0], 1));

fn nodes(cases: &[(&str, Given, Attrs, Expected)]) -> Result<()> {
    for (op, given, attrs, expected) in cases {
        let outputs = expected.map_or(1, |(axes, _)| axes.len());
        check(
            &format!("{op} {given:?}"),
            prove(&node(op, given, attrs, outputs)?, &Symbol::named("n")),
            *expected,
        );
    }
    Ok(())
}

#[test]
fn elementwise_operators() -> Result<()> {
    nodes(&[
        ("Relu", &["x n 3"], &[], ROWS),
        ("Relu", &["x 3 n"], &[], Ok((&[1], 1))),
        ("Relu", &["x 4*n 3"], &[], ROWS),
        ("Relu", &["x n n"], &[], Err("do not keep items apart")),
        ("Relu", &["x n+1 3"], &[], Err("do not keep items apart")),
        ("Add", &["x n 3", "x n 3"], &[], ROWS),
        ("Add", &["x n 3", "w 3"], &[], ROWS),
        ("Add", &["x n 3", "w 1 3"], &[], ROWS),
        ("Add", &["x n 3", "x m 3"], &[], Err("does not hold an element for each item")),
        ("Add", &["x n 3", "x 4 n 3"], &[], Ok((&[1], 1))),
        ("Add", &["x n 1", "x n"], &[], Err("along different axes")),
        ("ort-runtime:LookupTable", &["i8 3 n", "codes 256"], &[], Ok((&[1], 1))),
    ])
}

#[test]
fn products() -> Result<()> {
    nodes(&[
        ("MatMul", &["x n 3", "w 3 4"], &[], ROWS),
        ("MatMul", &["x n 5 3", "w 3 4"], &[], ROWS),
        ("MatMul", &["x 5 n 3", "w 3 4"], &[], Ok((&[1], 1))),
        // Without packing a single row has another order of sums.
        ("MatMul", &["x n 3", "x 3 4"], &[], Ok((&[0], 2))),
        ("MatMul", &["x n 5 3", "x n 3 4"], &[], Ok((&[0], 2))),
        ("MatMul", &["x n 2 5 3", "x n 2 3 4"], &[], ROWS),
        ("MatMul", &["x n 2 5 3", "x 2 3 4"], &[], ROWS),
        ("MatMul", &["x 5 3", "x n 3 4"], &[], Ok((&[0], 2))),
        ("MatMul", &["x n 2 5 3", "x m 2 3 4"], &[], Err("a matrix for each item")),
        ("MatMul", &["x 4 n", "x n 5"], &[], Err("reduces over the items")),
        ("MatMul", &["w 4 3", "x 3 n"], &[], Err("columns")),
        ("MatMul", &["w 3", "x n 3 4"], &[], Err("a vector")),
        ("Gemm", &["x n 3", "w 3 4", "w 4"], &[], ROWS),
        ("Gemm", &["x 3 n", "w 3 4"], &[("transA", Int(1))], ROWS),
        ("Gemm", &["x 3 n", "x n 4"], &[], Err("reduces over the items")),
        ("Gemm", &["x n 3", "w 3 4", "x m 4"], &[], Err("for each item")),
        ("ort-runtime:FusedMatMul", &["x n 5 3", "w 3 4", "w 4", "x n 5 4"], &[], ROWS),
        ("ort-runtime:FusedMatMul", &["x n 5 3", "w 3 4", "", "x m 5 4"], &[], Err("for each item")),
        ("ort-runtime:DequantizeMatMul", &["x n 5 3", "codes 3 4", "w 4", "", "w 4", "x n 5 4"], &[], ROWS),
        ("ort-runtime:DequantizeMatMul", &["x n 5 3", "codes 3 4", "x n"], &[], Err("a scale for each item")),
        ("com.microsoft:FusedMatMul", &["x n 2 5 3", "x n 2 5 3"], &[("transB", Int(1))], ROWS),
    ])
}

#[test]
fn images() -> Result<()> {
    let pool: Attrs = &[("kernel_shape", Ints(&[2, 2]))];
    nodes(&[
        ("Conv", &["x n 3 8 8", "w 4 3 3 3", "w 4"], &[], ROWS),
        ("Conv", &["x n 3 8 8", "x 4 3 3 3"], &[], Err("not constant")),
        ("ConvTranspose", &["x n 3 8 8", "w 3 4 3 3"], &[], ROWS),
        ("com.microsoft:FusedConv", &["x n 3 8 8", "w 4 3 1 1", "w 4", "x n 4 8 8"], &[], ROWS),
        ("com.microsoft:FusedConv", &["x n 3 8 8", "w 4 3 1 1", "w 4", "x 1 4 8 8"], &[], Err("")),
        (
            "ort-runtime:ConvIntegerToFloat",
            &["i8 n 3 8 8", "codes 4 3 1 1", "w", "w 4", "", "", "w 4", "x n 4 8 8"],
            &[],
            ROWS,
        ),
        ("ort-runtime:ConvIntegerToFloat", &["i8 n 3 8 8", "i8 4 3 1 1", "w", "w"], &[], Err("not constant")),
        ("MaxPool", &["x n 3 8 8"], pool, ROWS),
        ("AveragePool", &["x n 3 8 8"], pool, ROWS),
        ("AveragePool", &["x 3 n 8 8"], pool, Err("not the first axis")),
        ("GlobalAveragePool", &["x n 3 8 8"], &[], ROWS),
        ("BatchNormalization", &["x n 3 8 8", "w 3", "w 3", "w 3", "w 3"], &[], ROWS),
        ("InstanceNormalization", &["x n 3 8 8", "w 3", "w 3"], &[], ROWS),
        ("DepthToSpace", &["x n 4 8 8"], &[("blocksize", Int(2))], ROWS),
    ])?;
    let indices = node("MaxPool", &["x n 3 8 8"], pool, 2)?;
    check("MaxPool with indices", prove(&indices, &Symbol::named("n")), Err("count from the first image"));
    let given: Given = &["x n 3 8 8", "w 3", "w 3", "w 3", "w 3"];
    let trains = node("BatchNormalization", given, &[("training_mode", Int(1))], 3)?;
    check("training", prove(&trains, &Symbol::named("n")), Err("statistics of all items"));
    Ok(())
}

#[test]
fn along_an_axis() -> Result<()> {
    nodes(&[
        ("Softmax", &["x n 3"], &[], ROWS),
        ("Softmax", &["x n 3"], &[("axis", Int(0))], Err("along the axis of the items")),
        ("Softmax", &["x 3 n"], &[], Err("along the axis of the items")),
        ("LayerNormalization", &["x n 5 3", "w 3", "w 3"], &[], Ok((&[0, 0, 0], 1))),
        ("LayerNormalization", &["x n 5 3", "w 5 3"], &[("axis", Int(1))], ROWS),
        ("LayerNormalization", &["x 5 n", "x n"], &[], Err("statistics of all items")),
        ("com.microsoft:SkipLayerNormalization", &["x n 5 3", "x n 5 3", "w 3"], &[], ROWS),
        ("ReduceMean", &["x n 5 3", "= 1"], &[("keepdims", Int(0))], ROWS),
        ("ReduceMean", &["x 5 n 3", "= 0"], &[("keepdims", Int(0))], ROWS),
        ("ReduceMean", &["x 5 n 3", "= 0"], &[], Ok((&[1], 1))),
        ("ReduceMean", &["x n 5 3", "= 0"], &[], Err("reduces the axis of the items")),
        ("ReduceMean", &["x n 5 3", "= -3"], &[], Err("reduces the axis of the items")),
        ("ReduceSum", &["x n 5 3"], &[], Err("reduces all axes")),
        ("ArgMax", &["x 5 n 3"], &[("keepdims", Int(0))], ROWS),
        ("ArgMax", &["x n 3"], &[], Err("along the axis of the items")),
        ("CumSum", &["x n 3", "=0 1"], &[], ROWS),
        ("CumSum", &["x n 3", "=0 0"], &[], Err("along the axis of the items")),
        ("TopK", &["x n 9", "= 2"], &[], Ok((&[0, 0], 1))),
        ("TopK", &["x n 9", "= 2"], &[("axis", Int(0))], Err("")),
        ("Concat", &["x n 3", "x n 4"], &[("axis", Int(1))], ROWS),
        ("Concat", &["x n 3", "x n 3"], &[("axis", Int(0))], Err("along the axis of the items")),
        ("Concat", &["x n 3", "x m 4"], &[("axis", Int(1))], Err("holds no items")),
        ("Split", &["x n 8"], &[("axis", Int(1)), ("num_outputs", Int(2))], Ok((&[0, 0], 1))),
        ("Slice", &["x n 8", "= 1", "= 3", "= 1"], &[], ROWS),
        ("Slice", &["x n 8", "= 1", "= 3", "= 0"], &[], Err("a part of the items")),
        ("Slice", &["x n 8", "= 0", "= 9223372036854775807", "= 0"], &[], ROWS),
        (
            "Slice",
            &["x n 8", "= -1", "= -9223372036854775807", "= 0", "= -1"],
            &[],
            Err("a part of the items"),
        ),
    ])
}

#[test]
fn what_moves() -> Result<()> {
    nodes(&[
        ("Transpose", &["x n 3 4"], &[("perm", Ints(&[1, 0, 2]))], Ok((&[1], 1))),
        ("Reshape", &["x n 12 4", "= 0 3 4 4"], &[], ROWS),
        ("Reshape", &["x n 12 4", "= -1 4"], &[], ROWS),
        ("Reshape", &["x 12*n 4", "= -1 12 4"], &[], ROWS),
        ("Reshape", &["x 3 n 4", "= -1 4"], &[], Err("not together")),
        ("Reshape", &["x 3 n 4", "= 3 1 -1"], &[], Ok((&[2], 1))),
        ("Flatten", &["x n 3 4"], &[], ROWS),
        ("Flatten", &["x n 3 4"], &[("axis", Int(2))], ROWS),
        ("Unsqueeze", &["x n 3", "= 0 2"], &[], Ok((&[1], 1))),
        ("Squeeze", &["x 1 n 3", "= 0"], &[], ROWS),
        ("Gather", &["w 9 4", "ids n s"], &[], ROWS),
        ("Gather", &["x 2 9 4", "ids n s"], &[("axis", Int(1))], Ok((&[1], 1))),
        ("Gather", &["x n 9 4", "=0 0"], &[("axis", Int(1))], ROWS),
        ("Gather", &["x n 9 4", "=0 0"], &[], Err("picks items by their place")),
        ("Gather", &["x n 9 4", "ids n 2"], &[("axis", Int(1))], Err("both its data and its indices")),
        ("GatherElements", &["x n 9", "ids n 2"], &[("axis", Int(1))], ROWS),
        ("Pad", &["x n 4", "= 0 1 0 1"], &[], ROWS),
        ("Pad", &["x n 4", "= 1 0 -1 0"], &[], Err("pads the items")),
        ("Tile", &["x n 4", "= 1 3"], &[], ROWS),
        ("Tile", &["x n 4", "= 2 1"], &[], Err("repeats the items")),
        ("Trilu", &["x n 4 4"], &[], ROWS),
        ("Trilu", &["x 4 n"], &[], Err("in its matrices")),
        ("DequantizeLinear", &["i32 n 4", "w 4"], &[], ROWS),
        ("DequantizeLinear", &["i32 n 4", "w 3"], &[("axis", Int(0))], Err("a scale for each item")),
        ("NonZero", &["x n 4"], &[], Err("")),
        ("DynamicQuantizeLinear", &["x n 4"], &[], Err("how a batch goes through it is not known")),
        ("RandomNormalLike", &["x n 4"], &[], Err("random")),
    ])
}

#[test]
fn attention_and_recurrence() -> Result<()> {
    let heads: Attrs = &[("num_heads", Int(2))];
    let two: Attrs = &[("q_num_heads", Int(2)), ("kv_num_heads", Int(2))];
    nodes(&[
        ("Attention", &["x n s 8", "x n t 8", "x n t 8"], two, ROWS),
        ("Attention", &["x n s 8", "x n t 8", "x n t 8", "x n 1 s t"], two, ROWS),
        ("Attention", &["x n s 8", "x n t 8", "x n t 8", "x s t"], two, ROWS),
        ("Attention", &["x n s 8", "x n t 8", "x n t 8", "x m 1 s t"], two, Err("mask")),
        ("Attention", &["x n s 8", "x 1 t 8", "x 1 t 8"], two, Err("holds no items")),
        ("com.microsoft:MultiHeadAttention", &["x n s 8", "x n s 8", "x n s 8"], heads, ROWS),
        ("com.microsoft:MultiHeadAttention", &["x n s 8", "x n s 8", "x n s 8", "", "i32 n s"], heads, ROWS),
        ("LSTM", &["x s n 3", "w 1 16 3", "w 1 16 4"], &[("hidden_size", Int(4))], Ok((&[2, 1, 1], 1))),
        ("LSTM", &["x s n 3", "x 1 16 3", "w 1 16 4"], &[("hidden_size", Int(4))], Ok((&[2, 1, 1], 2))),
        (
            "GRU",
            &["x n s 3", "w 1 12 3", "w 1 12 4"],
            &[("hidden_size", Int(4)), ("layout", Int(1))],
            Ok((&[0, 0], 1)),
        ),
        ("LSTM", &["x n s 3", "w 1 16 3", "w 1 16 4"], &[("hidden_size", Int(4))], Err("its layout")),
    ])
}

type Build = fn(&mut GraphBuilder) -> Result<ValueId>;

/// What more than one node shows.
const GRAPHS: &[(&str, Build, Expected)] = &[
    (
        "heads, there and back through the sizes of the input",
        |b| {
            let x = b.input("x", DType::F32, &["n", "s", "8"]);
            let parts = b.constant(Tensor::from_slice(&[4], &[0i64, 0, 2, 4])?);
            let heads = b.node("Reshape", &[x, parts], &[])?;
            let turned = b.node("Transpose", &[heads], &[("perm", Attribute::Ints(vec![0, 2, 1, 3]))])?;
            let shape = b.node("Shape", &[x], &[])?;
            let back = b.node("Transpose", &[turned], &[("perm", Attribute::Ints(vec![0, 2, 1, 3]))])?;
            b.node("Reshape", &[back, shape], &[])
        },
        ROWS,
    ),
    (
        "a constant of the shape of the input",
        |b| {
            let x = b.input("x", DType::F32, &["n", "4"]);
            let shape = b.node("Shape", &[x], &[])?;
            let zeros = b.node("ConstantOfShape", &[shape], &[])?;
            b.node("Add", &[x, zeros], &[])
        },
        ROWS,
    ),
    (
        "positions expanded to all items",
        |b| {
            let x = b.input("x", DType::F32, &["n", "4"]);
            let row = b.constant(Tensor::from_slice(&[1, 4], &[1.0f32, 2.0, 3.0, 4.0])?);
            let shape = b.node("Shape", &[x], &[])?;
            let rows = b.node("Expand", &[row, shape], &[])?;
            b.node("Concat", &[x, rows], &[("axis", Attribute::Int(1))])
        },
        ROWS,
    ),
    (
        "the number of items as data",
        |b| {
            let x = b.input("x", DType::F32, &["n", "4"]);
            let shape = b.node("Shape", &[x], &[])?;
            let sizes = b.node("Cast", &[shape], &[("to", Attribute::Int(1))])?;
            let first = b.constant(Tensor::scalar(0i64)?);
            let count = b.node("Gather", &[sizes, first], &[])?;
            b.node("Mul", &[x, count], &[])
        },
        Err("the number of items is among the data"),
    ),
    (
        "items numbered",
        |b| {
            let x = b.input("x", DType::F32, &["n", "4"]);
            let first = b.constant(Tensor::scalar(0i64)?);
            let one = b.constant(Tensor::scalar(1i64)?);
            let shape = b.node("Shape", &[x], &[])?;
            let count = b.node("Gather", &[shape, first], &[])?;
            let places = b.node("Range", &[first, count, one], &[])?;
            let axes = b.constant(Tensor::from_slice(&[1], &[1i64])?);
            let places = b.node("Unsqueeze", &[places, axes], &[])?;
            let places = b.node("CastLike", &[places, x], &[])?;
            b.node("Add", &[x, places], &[])
        },
        Err("tells the places of items"),
    ),
    ("each item's part of a flat mask, by its place", |b| pick_by_place(b, 0), Ok((&[0], 1))),
    ("the part of the next item", |b| pick_by_place(b, 1), Err("another number of rows")),
    (
        "an output that is the same for all",
        |b| {
            let x = b.input("x", DType::F32, &["n", "4"]);
            let y = b.input("y", DType::F32, &["n", "m"]);
            let _unread = b.node("Relu", &[y], &[])?;
            b.node("ReduceSum", &[x], &[])
        },
        Err("the first output"),
    ),
    (
        "another symbol than the first",
        |b| {
            let x = b.input("x", DType::F32, &["s", "n", "3"]);
            let [w, r] = [[1, 16, 3], [1, 16, 4]].map(|shape: [usize; 3]| {
                let elements = vec![0.5f32; shape.iter().product()];
                Tensor::from_vec(&shape, elements).map(|tensor| b.constant(tensor))
            });
            b.node("LSTM", &[x, w?, r?], &[("hidden_size", Attribute::Int(4))])
        },
        Ok((&[2], 1)),
    ),
];

/// Each for the symbol that is found.
#[test]
fn graphs() -> Result<()> {
    for (name, build, expected) in GRAPHS {
        let mut builder = GraphBuilder::new("case");
        let output = build(&mut builder)?;
        check(name, batch_parallel(&builder.finish(&[output])?), *expected);
    }
    Ok(())
}

/// A branch that reads items is refused; one that reads none gives the same for all.
#[test]
fn branches() -> Result<()> {
    for (reads_items, expected) in [(true, Err("subgraphs")), (false, ROWS)] {
        let mut b = GraphBuilder::new("branches");
        let x = b.input("x", DType::F32, &["n", "4"]);
        let condition = b.input("condition", DType::Bool, &[]);
        let row = b.constant(Tensor::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?);
        let outer = if reads_items { x } else { row };
        let branch = |attr| -> Result<Subgraph> {
            let mut graph = Graph::new(attr);
            let inner = graph.add_value("inner", ValueType::Unknown);
            let mut body = GraphBuilder::extend(graph);
            let result = body.node("Neg", &[inner], &[])?;
            let captures = vec![Capture { outer, inner }];
            Ok(Subgraph { attr, graph: body.finish_subgraph(&[result]), captures })
        };
        let subgraphs = vec![branch("else_branch")?, branch("then_branch")?];
        let chosen = b.add(("", "If"), &[Some(condition)], &[], 1, subgraphs)?;
        let sum = b.node("Add", &[x, chosen[0]], &[])?;
        check("If", prove(&b.finish(&[sum])?, &Symbol::named("n")), expected);
    }
    Ok(())
}

/// Rows of a mask [n, s] that is flattened, as exporters pick them: `place * (s + wrong) + column`.
fn pick_by_place(b: &mut GraphBuilder, wrong: i64) -> Result<ValueId> {
    let mask = b.input("mask", DType::F32, &["n", "s"]);
    let scalar =
        |b: &mut GraphBuilder, value: i64| Ok::<_, ort_core::Error>(b.constant(Tensor::scalar(value)?));
    let (zero, one, wrong) = (scalar(b, 0)?, scalar(b, 1)?, scalar(b, wrong)?);
    let shape = b.node("Shape", &[mask], &[])?;
    let count = b.node("Gather", &[shape, zero], &[])?;
    let width = b.node("Gather", &[shape, one], &[])?;
    let places = b.node("Range", &[zero, count, one], &[])?;
    let column = b.constant(Tensor::from_slice(&[1], &[1i64])?);
    let places = b.node("Unsqueeze", &[places, column], &[])?;
    let columns = b.node("Range", &[zero, width, one], &[])?;
    let step = b.node("Add", &[width, wrong], &[])?;
    let begins = b.node("Mul", &[places, step], &[])?;
    let index = b.node("Add", &[columns, begins], &[])?;
    let flat = b.node("Flatten", &[mask], &[("axis", Attribute::Int(2))])?;
    let picked = b.node("Gather", &[flat, index], &[])?;
    b.node("Neg", &[picked], &[])
}

/// Where sizes decide whether an index stays within its item, they are asked at each run.
#[test]
fn conditions() -> Result<()> {
    let mut b = GraphBuilder::new("condition");
    let mask = b.input("mask", DType::F32, &["n", "total"]);
    let x = b.input("x", DType::F32, &["n", "s"]);
    let scalar =
        |b: &mut GraphBuilder, value: i64| Ok::<_, ort_core::Error>(b.constant(Tensor::scalar(value)?));
    let (zero, one) = (scalar(&mut b, 0)?, scalar(&mut b, 1)?);
    let of = |b: &mut GraphBuilder, value, place| {
        let shape = b.node("Shape", &[value], &[])?;
        b.node("Gather", &[shape, place], &[])
    };
    let (count, width, step) = (of(&mut b, x, zero)?, of(&mut b, x, one)?, of(&mut b, mask, one)?);
    let places = b.node("Range", &[zero, count, one], &[])?;
    let column = b.constant(Tensor::from_slice(&[1], &[1i64])?);
    let places = b.node("Unsqueeze", &[places, column], &[])?;
    let columns = b.node("Range", &[zero, width, one], &[])?;
    let begins = b.node("Mul", &[places, step], &[])?;
    let index = b.node("Add", &[begins, columns], &[])?;
    let flat = b.constant(Tensor::from_slice(&[1], &[-1i64])?);
    let flat = b.node("Reshape", &[mask, flat], &[])?;
    let picked = b.node("Gather", &[flat, index], &[])?;
    let sum = b.node("Add", &[picked, x], &[])?;
    let Ok(proof) = batch_parallel(&b.finish(&[sum])?) else { panic!("it is proved") };
    for (total, s, holds) in [(4, 4, true), (5, 4, true), (3, 4, false)] {
        let sizes = [("n", 2), ("total", total), ("s", s)];
        let bindings = sizes.into_iter().map(|(name, size)| (Symbol::named(name), size)).collect();
        assert_eq!(proof.check(&bindings).is_ok(), holds, "{total} {s}");
    }
    Ok(())
}
