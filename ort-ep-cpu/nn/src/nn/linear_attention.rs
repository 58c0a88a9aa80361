//! `LinearAttention` by its recurrence, one time step after another.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::{Result, ensure, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::units::for_each_unit;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::interrupt::{self, spend, spending};

cpu_kernels![KernelDef {
    op: "LinearAttention",
    types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
}];

struct LinearAttention {
    queries: usize,
    heads: usize,
    scale: f32,
    has_decay: bool,
    has_delta: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let count = |name: &str| -> Result<usize> {
        let value = attrs.int(name)?;
        usize::try_from(value)
            .ok()
            .filter(|v| *v > 0)
            .ok_or_else(|| error!(InvalidGraph, "{name} is {value}"))
    };
    let (has_decay, has_delta) = match attrs.string("update_rule")? {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return Err(error!(InvalidGraph, "update_rule '{other}' is not in the ONNX standard")),
    };
    let (queries, heads) = (count("q_num_heads")?, count("kv_num_heads")?);
    ensure!(queries.is_multiple_of(heads), InvalidGraph, "{queries} query heads of {heads} heads");
    Ok(Box::new(LinearAttention { queries, heads, scale: attrs.float("scale")?, has_decay, has_delta }))
}

/// The state (d_k, d_v) and the results (times, group, d_v) of one head.
struct Head<'a> {
    state: &'a mut [f32],
    result: &'a mut [f32],
}

impl LinearAttention {
    /// Returns the batch, the number of time steps, and the sizes of keys and values.
    fn sizes(&self, query: &[usize], value: &[usize]) -> Result<[usize; 4]> {
        let (&[batch, times, query], &[_, _, value]) = (query, value) else {
            return Err(error!(InvalidArgument, "query and value must have rank 3"));
        };
        Ok([batch, times, query / self.queries, value / self.heads])
    }
}

impl Executable for LinearAttention {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let [batch, times, d_k, d_v] = self.sizes(shapes.input(0), shapes.input(2))?;
        bytes_of::<f32>(batch * (self.heads * d_k * d_v + times * self.queries * d_v))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let (query, value) = (cx.input(0)?, cx.input(2)?);
        let [batch, times, d_k, d_v] = self.sizes(query.shape(), value.shape())?;
        let (heads, group) = (self.heads, self.queries / self.heads);
        let floats = |index: usize, widths: &[usize]| -> Result<(&[f32], usize)> {
            let view = cx.input(index)?;
            let width = view.shape().last().copied().unwrap_or(0);
            let fits = widths.contains(&width) && view.element_count() == batch * times * width;
            ensure!(fits, InvalidArgument, "input {index} has shape {:?}", view.shape());
            Ok((view.as_slice::<f32>()?, width))
        };
        let (q, q_width) = floats(0, &[self.queries * d_k])?;
        let (k, k_width) = floats(1, &[heads * d_k])?;
        let (v, v_width) = floats(2, &[heads * d_v])?;
        ensure!(cx.has_input(4) == self.has_decay, InvalidArgument, "decay does not go with the update rule");
        ensure!(cx.has_input(5) == self.has_delta, InvalidArgument, "beta does not go with the update rule");
        let decay = if self.has_decay { Some(floats(4, &[heads, heads * d_k])?) } else { None };
        let beta = if self.has_delta { Some(floats(5, &[heads, 1])?) } else { None };
        let states = take(&mut rest, batch * heads * d_k * d_v)?;
        match cx.find_input(3) {
            Some(past) if past.element_count() == states.len() => interrupt::copy(past.as_slice()?, states),
            Some(past) => {
                let (shape, expected) = (past.shape(), states.len());
                return Err(error!(
                    InvalidArgument,
                    "past_state has shape {shape:?}, expected {expected} elements"
                ));
            }
            None => interrupt::fill(states, 0.0),
        }
        let results = take(&mut rest, batch * times * self.queries * d_v)?;
        // A scale of 0 stands for the default.
        let scale = if self.scale == 0.0 { 1.0 / (d_k as f32).sqrt() } else { self.scale };
        let per_head =
            states.chunks_mut((d_k * d_v).max(1)).zip(results.chunks_mut((times * group * d_v).max(1)));
        let mut units: Vec<Head<'_>> = per_head.map(|(state, result)| Head { state, result }).collect();
        for_each_unit(cx.threads(), (&mut units, 1), (&mut [0_u8; 0][..], 0), |unit, units, _| {
            let (batch, head) = (unit / heads, unit % heads);
            let mut update = vec![0.0; d_v];
            for Head { state, result } in units {
                for time in 0..times {
                    spend(4 * d_k * d_v);
                    let at = batch * times + time;
                    let key = &k[at * k_width + head * d_k..][..d_k];
                    if let Some((decay, width)) = decay {
                        // The decay is per head, or per head and element of the key.
                        let per_key = width != heads;
                        for (i, row) in state.chunks_mut(d_v).enumerate() {
                            let place = if per_key { head * d_k + i } else { head };
                            let factor = decay[at * width + place].exp();
                            row.iter_mut().for_each(|s| *s *= factor);
                        }
                    }
                    update.copy_from_slice(&v[at * v_width + head * d_v..][..d_v]);
                    // The delta rule subtracts what the state already holds for the key.
                    if let Some((beta, width)) = beta {
                        for (row, key) in state.chunks(d_v).zip(key) {
                            update.iter_mut().zip(row).for_each(|(update, s)| *update -= s * key);
                        }
                        // All heads share one beta, or each has its own.
                        let rate = beta[at * width + if width == 1 { 0 } else { head }];
                        update.iter_mut().for_each(|update| *update *= rate);
                    }
                    for (row, key) in state.chunks_mut(d_v).zip(key) {
                        row.iter_mut().zip(&update).for_each(|(s, update)| *s += key * update);
                    }
                    for member in 0..group {
                        let query = &q[at * q_width + (head * group + member) * d_k..][..d_k];
                        let out = &mut result[(time * group + member) * d_v..][..d_v];
                        out.fill(0.0);
                        for (row, query) in state.chunks(d_v).zip(query) {
                            out.iter_mut().zip(row).for_each(|(out, s)| *out += s * query);
                        }
                        out.iter_mut().for_each(|out| *out *= scale);
                    }
                }
            }
        });
        drop(units);
        if cx.wants(1) {
            interrupt::copy(states, cx.output(1)?.as_mut_slice::<f32>()?);
        }
        if cx.wants(0) && d_v > 0 {
            // Transposes (batch, head, time, member) to (batch, time, head, member).
            let width = group * d_v;
            let rows = cx.output(0)?.as_mut_slice::<f32>()?.chunks_mut(width);
            for (index, to) in spending(4 + width / 4, rows).enumerate() {
                let (head, at) = (index % heads, index / heads);
                let from = ((at / times * heads + head) * times + at % times) * width;
                to.copy_from_slice(&results[from..][..width]);
            }
        }
        Ok(())
    }
}
