//! GEMMs, over shapes at the edge cases of tiles.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Session};
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::tensor::{Tensor, Value};

use super::{cpu, numbers, typed};

/// A node of one operator with pseudo-random inputs.
#[derive(Debug)]
struct MatmulCase {
    op: (&'static str, &'static str),
    shapes: Vec<Vec<usize>>,
    attrs: Vec<(&'static str, Attribute)>,
}

impl MatmulCase {
    fn new(op: (&'static str, &'static str), shapes: &[&[usize]]) -> MatmulCase {
        MatmulCase { op, shapes: shapes.iter().map(|shape| shape.to_vec()).collect(), attrs: Vec::new() }
    }

    fn with(mut self, name: &'static str, value: Attribute) -> MatmulCase {
        self.attrs.push((name, value));
        self
    }

    fn model(&self) -> Result<(Model, Vec<(String, Value)>)> {
        let mut builder = GraphBuilder::new("product");
        let (mut ids, mut inputs) = (Vec::new(), Vec::new());
        for (index, shape) in self.shapes.iter().enumerate() {
            let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            let name = format!("in{index}");
            let mut id = builder.input(&name, DType::F32, &sizes);
            if index == RESIDUAL {
                // A kernel may write in place over a node's result.
                id = builder.node("Neg", &[id], &[])?;
            }
            ids.push(Some(id));
            let tensor = Tensor::from_slice(shape, &numbers(shape.iter().product(), index))?;
            inputs.push((name, tensor.into()));
        }
        let mut results = builder.add(self.op, &ids, &self.attrs, 1, Vec::new())?;
        // Another node reads the result, so that it is an activation, which may be in place.
        if let (true, [result]) = (ids.len() > RESIDUAL, &results[..]) {
            results = vec![builder.node("Neg", &[*result], &[])?];
        }
        Ok((Model::from_graph(builder.finish(&results)?), inputs))
    }

    fn check(&self, device: &Arc<dyn Device>, host: &Arc<dyn Device>) -> Result<()> {
        let (model, inputs) = self.model()?;
        let inputs: Vec<(&str, Value)> = inputs.iter().map(|(n, v)| (n.as_str(), v.clone())).collect();
        let run = |device: &Arc<dyn Device>| -> Result<Vec<f32>> {
            let builder = Session::builder(&model).threads(1).opt_level(Level::Disabled);
            let session = builder.device(device.clone()).build()?;
            let results = session.run(&inputs)?;
            let mut values = results.iter().map(|(_, value)| value.tensor()?.to_vec::<f32>());
            values.next().unwrap_or_else(|| Ok(Vec::new()))
        };
        let (actual, expected) = (run(device)?, run(host)?);
        assert_eq!(actual.len(), expected.len(), "{self:?}");
        let largest = expected.iter().fold(1e-30f32, |largest, value| largest.max(value.abs()));
        for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let error = (actual - expected).abs();
            assert!(error <= 1e-4 * largest, "{self:?}: {actual} at {index}, expected {expected}");
        }
        Ok(())
    }
}

const MATMUL: (&str, &str) = ("", "MatMul");
const GEMM: (&str, &str) = ("", "Gemm");
const FUSED: (&str, &str) = (MICROSOFT, "FusedMatMul");
const WITH_ADDENDS: (&str, &str) = (RUNTIME, "FusedMatMul");

/// The index of the input that is added to the product.
const RESIDUAL: usize = 3;

/// Sizes around those of tiles, alone and combined with small ones.
fn edges() -> Vec<MatmulCase> {
    const SIZES: [usize; 6] = [1, 3, 17, 64, 65, 130];
    let mut cases = Vec::new();
    for rows in SIZES {
        for columns in SIZES {
            for depth in [1, 17, 300] {
                cases.push(MatmulCase::new(MATMUL, &[&[rows, depth], &[depth, columns]]));
            }
        }
    }
    // Enough for large tiles.
    cases.push(MatmulCase::new(MATMUL, &[&[770, 33], &[33, 700]]));
    cases.push(MatmulCase::new(MATMUL, &[&[1, 64], &[64, 5000]]));
    cases.push(MatmulCase::new(MATMUL, &[&[0, 5], &[5, 4]]));
    cases.push(MatmulCase::new(MATMUL, &[&[3, 0], &[0, 4]]));
    cases
}

fn batches() -> Vec<MatmulCase> {
    let shapes: [[&[usize]; 2]; 12] = [
        [&[300], &[300]],
        [&[17], &[17, 5]],
        [&[5, 17], &[17]],
        [&[2, 3, 5, 17], &[17]],
        [&[17], &[4, 17, 3]],
        [&[5, 4, 17], &[17, 6]],
        [&[5, 4, 17], &[5, 17, 6]],
        [&[5, 1, 17], &[5, 17, 6]],
        [&[2, 1, 4, 17], &[3, 17, 6]],
        [&[1, 4, 17], &[3, 17, 6]],
        [&[2, 12, 65, 64], &[2, 12, 64, 65]],
        [&[2, 1, 2, 1, 2, 1, 3, 4], &[1, 3, 1, 2, 1, 2, 4, 5]],
    ];
    shapes.into_iter().map(|shapes| MatmulCase::new(MATMUL, &shapes)).collect()
}

fn transposed() -> Vec<MatmulCase> {
    let int = |value: bool| Attribute::Int(i64::from(value));
    let mut cases = Vec::new();
    for (a, b) in [(false, true), (true, false), (true, true)] {
        let side = |flag: bool, sizes: [usize; 2]| if flag { [sizes[1], sizes[0]] } else { sizes };
        for [rows, columns, depth] in
            [[1, 70, 300], [70, 1, 300], [65, 67, 17], [130, 130, 64], [1100, 515, 20]]
        {
            let (left, right) = (side(a, [rows, depth]), side(b, [depth, columns]));
            let flags = |case: MatmulCase| case.with("transA", int(a)).with("transB", int(b));
            let third: &[usize] = &[columns];
            let gemm = MatmulCase::new(GEMM, &[&left, &right, third]);
            cases.push(flags(gemm).with("alpha", Attribute::Float(0.5)).with("beta", Attribute::Float(2.0)));
            let fused = MatmulCase::new(FUSED, &[&[&[3], &left[..]].concat(), &[&[3], &right[..]].concat()]);
            cases.push(flags(fused).with("alpha", Attribute::Float(0.125)));
            let whole = [2, rows, columns];
            let addends = [&[&[2], &left[..]].concat()[..], &right, third, &whole];
            let case = flags(MatmulCase::new(WITH_ADDENDS, &addends));
            cases.push(case.with("activation", Attribute::String("Gelu".to_owned())));
        }
    }
    for c in [&[][..], &[1], &[67], &[1, 67], &[65, 1], &[65, 67]] {
        cases.push(MatmulCase::new(GEMM, &[&[65, 30], &[30, 67], c]));
    }
    let batches = MatmulCase::new(FUSED, &[&[5, 3, 2, 7], &[3, 2, 7, 6]]);
    cases.push(batches.with("transBatchA", Attribute::Int(1)));
    cases
}

fn einsums() -> Vec<MatmulCase> {
    let cases: [(&str, &[&[usize]]); 18] = [
        ("bij,bjk->bik", &[&[3, 17, 20], &[3, 20, 33]]),
        ("ij,jk", &[&[70, 65], &[65, 66]]),
        ("bqhd,bkhd->bhqk", &[&[2, 17, 3, 16], &[2, 19, 3, 16]]),
        ("bhqk,bkhd->bqhd", &[&[2, 3, 17, 19], &[2, 19, 3, 16]]),
        ("...ij,...jk->...ki", &[&[2, 1, 5, 6], &[3, 6, 7]]),
        ("abij,bjk->aibk", &[&[2, 3, 4, 5], &[3, 5, 6]]),
        ("aij,ajk->ik", &[&[3, 4, 5], &[3, 5, 6]]),
        ("abi,abj->ij", &[&[3, 40, 5], &[3, 40, 6]]),
        ("ij,j->i", &[&[40, 300], &[300]]),
        ("j,ij->i", &[&[300], &[40, 300]]),
        ("i,i", &[&[300], &[300]]),
        ("bi,bi->b", &[&[7, 300], &[7, 300]]),
        ("ij,kl->jl", &[&[5, 6], &[7, 8]]),
        ("i,j->ij", &[&[5], &[6]]),
        ("...ii->...i", &[&[3, 4, 4]]),
        ("ij->ji", &[&[5, 6]]),
        ("ij->", &[&[5, 6]]),
        ("ab,bc,cd->ad", &[&[3, 4], &[4, 5], &[5, 6]]),
    ];
    let case = |(equation, shapes): (&str, &[&[usize]])| {
        MatmulCase::new(("", "Einsum"), shapes).with("equation", Attribute::String(equation.to_owned()))
    };
    cases.into_iter().map(case).collect()
}

/// Checks `MatMul`, `Gemm` and the fused GEMMs.
///
/// # Errors
///
/// The device does not run a case, or there is no CPU provider in the program.
pub fn products(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, edges().into_iter().chain(batches()).chain(transposed()))
}

/// Checks `Einsum`.
///
/// # Errors
///
/// As for [`products`].
pub fn einsum(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, einsums())
}

fn check_all(device: &Arc<dyn Device>, cases: impl IntoIterator<Item = MatmulCase>) -> Result<()> {
    let host = cpu()?;
    cases.into_iter().try_for_each(|case| case.check(device, &host))
}

/// Checks GEMMs of one to four rows, or as few columns, for all types that have kernels for them.
///
/// # Panics
///
/// A result differs from the CPU's, or the device does not run a case.
pub fn few_rows(device: &Arc<dyn Device>) {
    let mut cases = Vec::new();
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I32, DType::I64] {
        for (index, [depth, columns]) in FEW.into_iter().enumerate() {
            let rows = index % 4 + 1;
            let shapes = [
                // Few rows, a single row, few columns, a matrix-vector product, and batches whose
                // matrices start unaligned.
                [vec![rows, depth], vec![depth, columns]],
                [vec![1, depth], vec![depth, columns]],
                [vec![columns, depth], vec![depth, rows]],
                [vec![columns, depth], vec![depth]],
                [vec![2, rows, depth], vec![2, depth, columns]],
            ];
            let inputs = shapes.map(|sides| sides.map(|shape| typed::run(dtype, &shape)).into());
            cases.extend(inputs.map(|inputs| typed::case("MatMul", inputs, &[])));
            if matches!(dtype, DType::F64 | DType::I32 | DType::I64) {
                continue;
            }
            for transposed in [false, true] {
                let right = if transposed { [columns, depth] } else { [depth, columns] };
                let shapes = [&[rows, depth][..], &right, &[columns], &[rows, columns]];
                let attrs = [
                    ("transB", Attribute::Int(i64::from(transposed))),
                    ("activation", Attribute::String("Gelu".to_owned())),
                ];
                let inputs = shapes.map(|shape| typed::run(dtype, shape)).into();
                let case = typed::case("FusedMatMul", inputs, &attrs);
                cases.push(typed::Case { domain: RUNTIME, ..case });
            }
        }
    }
    typed::check_all(device, &cases);
}

/// Depths and columns of GEMMs with few rows: multiples of 16 bytes and others, a depth of as many
/// slices as blocks process and more, columns for all block widths, and depths from one thread per
/// column up to a whole block.
const FEW: [[usize; 2]; 12] = [
    [0, 3],
    [1, 1],
    [7, 9],
    [64, 16],
    [257, 24],
    [1600, 17],
    [2000, 8],
    [40, 200],
    [33, 1001],
    [24, 2048],
    [9000, 1],
    [8200, 3],
];
