//! `LinearAttention` of the standard and of `com.microsoft` by its recurrence, one time step after
//! another.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::units::for_each_unit;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::interrupt::{self, spend, spending};
use ort_cpu_vector::simd::attention::mix;
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};

const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);
const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

/// In float32 the present state may take the place of the past one.
const SINGLES: KernelDef = KernelDef {
    op: "LinearAttention",
    types: &[("T", SINGLE), ("S", SINGLE)],
    rank: 1,
    in_place: &[(3, 1)],
    make,
    ..KernelDef::BASE
};

const MIXED: KernelDef = KernelDef {
    op: "LinearAttention",
    types: &[("T", FLOATS), ("S", FLOATS)],
    make: |cx| via_f32(cx, make),
    ..KernelDef::BASE
};

cpu_kernels![
    SINGLES,
    MIXED,
    KernelDef { domain: MICROSOFT, ..SINGLES },
    KernelDef { domain: MICROSOFT, ..MIXED },
];

struct LinearAttention {
    queries: usize,
    /// Heads of values, each with a state.
    heads: usize,
    scale: f32,
    has_decay: bool,
    has_delta: bool,
    /// How many states after the last time steps are kept; 0 for the last one, without an axis.
    window: usize,
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
    let fits = queries.is_multiple_of(heads) || heads.is_multiple_of(queries);
    ensure!(fits, InvalidGraph, "{queries} query heads of {heads} heads");
    // Only the operator of com.microsoft has a window, which inference bounds.
    let window = usize::try_from(attrs.find_int("state_window").unwrap_or(0)).unwrap_or(0);
    let scale = attrs.float("scale")?;
    Ok(Box::new(LinearAttention { queries, heads, scale, has_decay, has_delta, window }))
}

/// The sizes of a run.
#[derive(Clone, Copy)]
struct LinearSizes {
    batch: usize,
    times: usize,
    /// Elements of a key and of a value.
    d_k: usize,
    d_v: usize,
}

/// The state (d_k, d_v) and the results (times, group, d_v) of one head, and where the states after
/// the last time steps go.
struct Head<'a> {
    state: &'a mut [f32],
    result: &'a mut [f32],
    window: SmallVec<[&'a mut [f32]; 1]>,
}

/// An input of `width` elements for each batch and time.
#[derive(Clone, Copy)]
struct Projection<'a> {
    values: &'a [f32],
    width: usize,
}

impl<'a> Projection<'a> {
    fn at(&self, time: usize, first: usize, len: usize) -> &'a [f32] {
        &self.values[time * self.width + first..][..len]
    }
}

/// The inputs of a run.
struct Projections<'a> {
    query: Projection<'a>,
    key: Projection<'a>,
    value: Projection<'a>,
    decay: Option<Projection<'a>>,
    beta: Option<Projection<'a>>,
}

impl LinearAttention {
    fn sizes(&self, query: &[usize], value: &[usize]) -> Result<LinearSizes> {
        let (&[batch, times, query], &[_, _, value]) = (query, value) else {
            return Err(error!(InvalidArgument, "query and value must have rank 3"));
        };
        Ok(LinearSizes { batch, times, d_k: query / self.queries, d_v: value / self.heads })
    }

    /// The results that share a state.
    fn group(&self) -> usize {
        (self.queries / self.heads).max(1)
    }

    fn projections<'a>(&self, cx: &RunCx<'a>, sizes: &LinearSizes) -> Result<Projections<'a>> {
        let (heads, d_k) = (self.heads, sizes.d_k);
        let floats = |index: usize, fits: &dyn Fn(usize) -> bool| -> Result<Projection<'a>> {
            let view = cx.input(index)?;
            let width = view.shape().last().copied().unwrap_or(0);
            let fits = fits(width) && view.element_count() == sizes.batch * sizes.times * width;
            ensure!(fits, InvalidArgument, "input {index} has shape {:?}", view.shape());
            Ok(Projection { values: view.as_slice::<f32>()?, width })
        };
        // Several heads may share a key.
        let of_keys = |width: usize| match width.checked_div(d_k) {
            Some(keys) => keys > 0 && keys * d_k == width && heads.is_multiple_of(keys),
            None => width == 0,
        };
        let optional = |index: usize, is_used: bool, fits: &dyn Fn(usize) -> bool| match is_used {
            true => floats(index, fits).map(Some),
            false => Ok(None),
        };
        ensure!(cx.has_input(4) == self.has_decay, InvalidArgument, "decay does not go with the update rule");
        ensure!(cx.has_input(5) == self.has_delta, InvalidArgument, "beta does not go with the update rule");
        Ok(Projections {
            query: floats(0, &|width| width == self.queries * d_k)?,
            key: floats(1, &of_keys)?,
            value: floats(2, &|width| width == heads * sizes.d_v)?,
            decay: optional(4, self.has_decay, &|width| width == heads || width == heads * d_k)?,
            beta: optional(5, self.has_delta, &|width| width == heads || width == 1)?,
        })
    }

    /// Computes all time steps of a head of a batch.
    fn run_head(&self, inputs: &Projections<'_>, sizes: &LinearSizes, unit: usize, to: &mut Head<'_>) {
        let LinearSizes { times, d_k, d_v, .. } = *sizes;
        let (isa, heads, group) = (Isa::current(), self.heads, self.group());
        let (batch, head) = (unit / heads, unit % heads);
        let Head { state, result, window } = to;
        // A scale of 0 stands for the default.
        let scale = if self.scale == 0.0 { 1.0 / (d_k as f32).sqrt() } else { self.scale };
        let keys = inputs.key.width.checked_div(d_k).unwrap_or(1).max(1);
        let mut scratch = vec![0.0; 2 * d_k + d_v];
        let (factors, rest) = scratch.split_at_mut(d_k);
        let (weights, update) = rest.split_at_mut(d_k);
        for time in 0..times {
            spend(4 * d_k * d_v);
            let at = batch * times + time;
            let key = inputs.key.at(at, head * keys / heads * d_k, d_k);
            // The decay is per head, or per head and element of the key.
            match inputs.decay {
                None => factors.fill(1.0),
                Some(decay) if decay.width == heads => factors.fill(decay.at(at, head, 1)[0].exp()),
                Some(decay) => {
                    let logarithms = decay.at(at, head * d_k, d_k);
                    factors.iter_mut().zip(logarithms).for_each(|(factor, log)| *factor = log.exp());
                }
            }
            let value = inputs.value.at(at, head * d_v, d_v);
            update.copy_from_slice(value);
            // The delta rule subtracts what the decayed state already holds for the key.
            if let Some(beta) = inputs.beta {
                let factors = factors.iter().zip(key);
                weights.iter_mut().zip(factors).for_each(|(weight, (factor, key))| *weight = factor * key);
                mix(isa, state, d_v, weights, 0.0, update);
                // All heads share one beta, or each has its own.
                let rate = beta.at(at, if beta.width == 1 { 0 } else { head }, 1)[0];
                update.iter_mut().zip(value).for_each(|(held, value)| *held = rate * (value - *held));
            }
            dispatch(isa, Update { state, factors, key, update });
            for member in 0..group {
                let query = match self.queries >= heads {
                    true => head * group + member,
                    // Several heads share a query.
                    false => head * self.queries / heads,
                };
                let query = inputs.query.at(at, query * d_k, d_k);
                let out = &mut result[(time * group + member) * d_v..][..d_v];
                out.fill(0.0);
                mix(isa, state, d_v, query, 0.0, out);
                out.iter_mut().for_each(|out| *out *= scale);
            }
            // The window is aligned to the right: its last slot has the state after the last time.
            let slot = (time + window.len()).checked_sub(times);
            if let Some(slot) = slot.and_then(|slot| window.get_mut(slot)) {
                slot.copy_from_slice(state);
            }
        }
        // Slots of times before the first one, and without times all of them.
        for slot in window.iter_mut().rev().skip(times) {
            slot.fill(0.0);
        }
    }

    /// Copies the past state, or the last one of a window, to `states`.
    fn load(&self, past: Option<&[f32]>, states: &mut [f32]) -> Result<()> {
        let (len, slots) = (states.len(), self.window.max(1));
        match past {
            Some(past) if past.len() == slots * len => interrupt::copy(&past[past.len() - len..], states),
            Some(past) => {
                let expected = slots * len;
                return Err(error!(
                    InvalidArgument,
                    "past_state has {} elements, expected {expected}",
                    past.len()
                ));
            }
            None => interrupt::fill(states, 0.0),
        }
        Ok(())
    }
}

/// `state[i] = factors[i] * state[i] + key[i] * update` for all rows.
struct Update<'a> {
    state: &'a mut [f32],
    factors: &'a [f32],
    key: &'a [f32],
    update: &'a [f32],
}

impl SimdOp for Update<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let rows = self.state.chunks_exact_mut(self.update.len().max(1));
        for ((row, factor), key) in rows.zip(self.factors).zip(self.key) {
            for (state, update) in row.iter_mut().zip(self.update) {
                *state = *state * factor + key * update;
            }
        }
    }
}

impl Executable for LinearAttention {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let LinearSizes { batch, times, d_k, d_v } = self.sizes(shapes.input(0), shapes.input(2))?;
        // The present state is updated where it is, unless it has a window.
        let has_present = shapes.outputs.get(1).is_some_and(Option::is_some);
        let states = if has_present && self.window == 0 { 0 } else { batch * self.heads * d_k * d_v };
        bytes_of::<f32>(states + batch * times * self.heads * self.group() * d_v)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let (query, value) = (cx.input(0)?, cx.input(2)?);
        let sizes = self.sizes(query.shape(), value.shape())?;
        let LinearSizes { batch, times, d_k, d_v } = sizes;
        let inputs = self.projections(cx, &sizes)?;
        let (heads, group, per_head) = (self.heads, self.group(), d_k * d_v);
        let past = cx.find_input(3).map(|past| past.as_slice::<f32>()).transpose()?;
        let is_in_place = cx.in_place(1) == Some(3);
        let present = if cx.wants(1) { cx.output(1)?.as_mut_slice::<f32>()? } else { &mut [] };
        let is_here = self.window == 0 && !present.is_empty();
        let (states, slots) = match is_here {
            true => (present, &mut [][..]),
            false => (take(&mut rest, batch * heads * per_head)?, present),
        };
        match is_in_place {
            // The present state holds the past one.
            true if is_here => {}
            true => self.load(Some(&*slots), states)?,
            false => self.load(past, states)?,
        }
        let results = take(&mut rest, batch * times * heads * group * d_v)?;
        let mut windows: Vec<_> = slots
            .chunks_mut((batch * heads * per_head).max(1))
            .map(|slot| slot.chunks_mut(per_head.max(1)))
            .collect();
        let per_head =
            states.chunks_mut(per_head.max(1)).zip(results.chunks_mut((times * group * d_v).max(1)));
        let mut units: Vec<Head<'_>> = per_head
            .map(|(state, result)| {
                let window = windows.iter_mut().filter_map(Iterator::next).collect();
                Head { state, result, window }
            })
            .collect();
        for_each_unit(cx.threads(), (&mut units, 1), (&mut [0_u8; 0][..], 0), |unit, units, _| {
            units.iter_mut().for_each(|head| self.run_head(&inputs, &sizes, unit, head));
        });
        drop(units);
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
