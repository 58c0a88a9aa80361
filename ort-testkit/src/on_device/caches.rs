//! Attention between transposes with a KV cache: fused, and with the results of its parts.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder, ValueId};
use ort_core::rewrite::{Level, Optimizer};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};

use super::{assert_close, cpu, numbers};

/// The origin of the mask.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    None,
    Given,
    /// Computed from the keys that the attention reads.
    OfKeys,
}

/// A decoder's attention.
#[derive(Clone, Copy, Debug)]
struct CacheCase {
    dtype: DType,
    batch: usize,
    past: usize,
    rows: usize,
    /// Query heads, and heads of keys and values.
    heads: [usize; 2],
    /// The head size of queries and keys, and of values.
    sizes: [usize; 2],
    mask: Mask,
    attribute: Option<(&'static str, i64)>,
    /// Whether it is fused to one operator.
    is_fused: bool,
}

const PLAIN: CacheCase = CacheCase {
    dtype: DType::F32,
    batch: 2,
    past: 7,
    rows: 5,
    heads: [4, 4],
    sizes: [16, 16],
    mask: Mask::Given,
    attribute: None,
    is_fused: true,
};

const CASES: &[CacheCase] = &[
    PLAIN,
    CacheCase { past: 0, ..PLAIN },
    CacheCase { past: 130, rows: 1, mask: Mask::None, ..PLAIN },
    CacheCase { dtype: DType::F16, rows: 70, sizes: [64, 64], ..PLAIN },
    CacheCase { dtype: DType::BF16, past: 0, rows: 65, sizes: [64, 32], ..PLAIN },
    // Rows that are not whole vectors, shared key heads, and values of another size.
    CacheCase { dtype: DType::F16, heads: [6, 2], sizes: [9, 7], ..PLAIN },
    CacheCase { batch: 1, heads: [3, 1], sizes: [8, 12], ..PLAIN },
    CacheCase { attribute: Some(("is_causal", 1)), is_fused: false, ..PLAIN },
    CacheCase { attribute: Some(("left_window_size", 2)), is_fused: false, ..PLAIN },
    CacheCase { mask: Mask::OfKeys, is_fused: false, ..PLAIN },
];

const OUTPUTS: usize = 3;

impl CacheCase {
    fn model(&self) -> Result<(Model, Vec<(&'static str, Value)>)> {
        let mut builder = GraphBuilder::new("caches");
        let mut inputs = Vec::new();
        let [[heads, key_heads], [size, value_size]] = [self.heads, self.sizes];
        let fresh = [("q", heads, size), ("k", key_heads, size), ("v", key_heads, value_size)];
        let mut halves: Vec<ValueId> = Vec::new();
        for (name, heads, size) in fresh {
            let x = self.input(&mut builder, name, &["batch", "rows", &(heads * size).to_string()])?;
            let shape = Tensor::from_slice(&[4], &[0, 0, heads as i64, size as i64])?;
            let shape = builder.constant(shape);
            let split = builder.node("Reshape", &[x, shape], &[])?;
            halves.push(swapped(&mut builder, split)?);
            inputs.push((name, self.numbers(&[self.batch, self.rows, heads * size])?));
        }
        for (place, (name, size)) in [("past_k", size), ("past_v", value_size)].into_iter().enumerate() {
            let axes = ["batch", &key_heads.to_string(), "past", &size.to_string()];
            let past = self.input(&mut builder, name, &axes)?;
            // The keys and values of the past come first, as in a cache.
            let both = [past, halves[1 + place]];
            halves[1 + place] = builder.node("Concat", &both, &[("axis", Attribute::Int(-2))])?;
            inputs.push((name, self.numbers(&[self.batch, key_heads, self.past, size])?));
        }
        match self.mask {
            Mask::None => {}
            Mask::Given => {
                halves.push(self.input(&mut builder, "mask", &["rows", "all"])?);
                inputs.push(("mask", self.numbers(&[self.rows, self.past + self.rows])?));
            }
            Mask::OfKeys => {
                // From [batch, heads, keys, size] to [1, keys], which broadcasts over the queries.
                let axes = builder.constant(Tensor::from_slice(&[3], &[0i64, 1, 3])?);
                halves.push(builder.node(
                    "ReduceMax",
                    &[halves[1], axes],
                    &[("keepdims", Attribute::Int(0))],
                )?);
                let first = builder.constant(Tensor::from_slice(&[1], &[0i64])?);
                halves[3] = builder.node("Unsqueeze", &[halves[3], first], &[])?;
            }
        }
        let attrs: Vec<_> =
            self.attribute.map(|(name, value)| (name, Attribute::Int(value))).into_iter().collect();
        let y = builder.node("Attention", &halves, &attrs)?;
        let y = swapped(&mut builder, y)?;
        let shape = builder.constant(Tensor::from_slice(&[2], &[-1, (heads * value_size) as i64])?);
        let y = builder.node("Reshape", &[y, shape], &[])?;
        let mut outputs = Vec::new();
        for output in [y, halves[1], halves[2]] {
            // All outputs are float32, so that one comparison serves all types.
            let to = ("to", Attribute::Int(DType::F32.onnx_code().into()));
            outputs.push(builder.node("Cast", &[output], &[to])?);
        }
        Ok((Model::from_graph(builder.finish(&outputs)?), inputs))
    }

    /// A float32 input, cast to the type of the case.
    fn input(&self, builder: &mut GraphBuilder, name: &str, shape: &[&str]) -> Result<ValueId> {
        let input = builder.input(name, DType::F32, shape);
        builder.node("Cast", &[input], &[("to", Attribute::Int(self.dtype.onnx_code().into()))])
    }

    fn numbers(&self, shape: &[usize]) -> Result<Value> {
        let count = shape.iter().product();
        Ok(Tensor::from_slice(shape, &numbers(count, count))?.into())
    }

    fn check(&self, device: &Arc<dyn Device>) -> Result<()> {
        let (model, inputs) = self.model()?;
        let run = |device: &Arc<dyn Device>, optimizer: Optimizer| -> Result<(Vec<Value>, usize)> {
            let builder = Session::builder(&model).threads(1).optimizer(optimizer);
            let session = builder.device(device.clone()).build()?;
            let hits = session.rewrites().hits().iter().find(|(name, _)| *name == "attention_cache");
            let hits = hits.map_or(0, |(_, hits)| *hits);
            let moved =
                session.steps().iter().filter(|(_, op, _)| ["Transpose", "Concat"].contains(&&**op)).count();
            assert!(hits == 0 || moved == 0, "{self:?}: {moved} nodes move heads");
            Ok((session.run(&inputs)?.into_iter().map(|(_, value)| value).collect(), hits))
        };
        let host = cpu()?;
        // The reference is the attention between its transposes, without the fusion.
        let without = Optimizer { disabled: vec!["attention_cache".to_owned()], ..Optimizer::default() };
        let (apart, _) = run(&host, without)?;
        let ((fused, hits), (actual, others)) =
            (run(&host, Optimizer::default())?, run(device, Optimizer::default())?);
        assert_eq!((hits, others), (self.is_fused.into(), self.is_fused.into()), "{self:?}");
        // The rule belongs to level `all`.
        assert_eq!(run(&host, Optimizer::at(Level::Extended))?.1, 0, "{self:?}");
        assert_eq!(apart.len(), OUTPUTS);
        let tolerance = if self.dtype == DType::F32 { 1e-5 } else { 1e-2 };
        for ((apart, fused), actual) in apart.iter().zip(&fused).zip(&actual) {
            assert_eq!(apart.tensor()?.to_vec::<f32>()?, fused.tensor()?.to_vec::<f32>()?, "{self:?}");
            assert_close(actual, apart, tolerance, &format!("{self:?}"))?;
        }
        Ok(())
    }
}

/// Transposes the second and the third axis.
fn swapped(builder: &mut GraphBuilder, value: ValueId) -> Result<ValueId> {
    builder.node("Transpose", &[value], &[("perm", Attribute::Ints(vec![0, 2, 1, 3]))])
}

/// Checks the fusion on a device, and on the CPU, where it must preserve all bits.
///
/// # Errors
///
/// The device does not run a case, or there is no CPU provider in the program.
///
/// # Panics
///
/// A result differs from the CPU's, or fusion happens where it should not, or does not where it
/// should.
pub fn attention_with_cache(device: &Arc<dyn Device>) -> Result<()> {
    CASES.iter().try_for_each(|case| case.check(device))
}
