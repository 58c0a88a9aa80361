//! Mixture of experts (`MoE`, and `QMoE` with quantized weights).
//!
//! Top-k routing picks the experts of each token. For each expert, the kernel gathers the tokens
//! that chose it, runs the expert's layers as GEMMs over them, and scatters the weighted results
//! into the output. `use_sparse_mixer` is not supported.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, Within, ensure, error};

use super::expert_layer::{Codes, ExpertLayer, Layer, LayerInputs, LayerMemory, floats};
use super::matmul_nbits::ACCURACY_OF_BYTES;
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::narrow;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::real::Real;
use ort_cpu_threads::interrupt::{self, spend, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::elementwise::Unary;

cpu_kernels![
    KernelDef { domain: MICROSOFT, op: "MoE", make: |cx| Ok(Box::new(Mixture::new(cx)?)), ..KernelDef::BASE },
    KernelDef {
        domain: MICROSOFT,
        op: "QMoE",
        types: &[("T", FLOATS), ("T1", TypeSet::of(&[DType::U8])), ("T2", FLOATS),],
        unaligned: &[2, 3, 5, 6, 8, 9, 11, 12, 13],
        when: |node| {
            let attrs = node.attrs();
            attrs.find_string("quant_type").is_none_or(|kind| kind == "int")
                && attrs.find_int("weights_prepacked").unwrap_or(-1) != 1
        },
        takes: "quant_type = int, with weights that are not packed ahead (weights_prepacked = 1)",
        make: |cx| Ok(Box::new(Mixture::quantized(cx)?)),
        ..KernelDef::BASE
    },
];

const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

/// The inputs of the layers of `MoE`.
const OF_FLOATS: [LayerInputs; 3] = [inputs([2, 3]), inputs([4, 5]), inputs([6, 7])];

const fn inputs([weights, bias]: [usize; 2]) -> LayerInputs {
    LayerInputs { weights, bias, scales: usize::MAX, zeros: usize::MAX }
}

/// The inputs of the layers of `QMoE`.
const QUANTIZED: [LayerInputs; 3] = [
    LayerInputs { weights: 2, bias: 4, scales: 3, zeros: 11 },
    LayerInputs { weights: 5, bias: 7, scales: 6, zeros: 12 },
    LayerInputs { weights: 8, bias: 10, scales: 9, zeros: 13 },
];

/// The input of `QMoE` whose elements weigh the chosen experts instead of their probabilities.
const ROUTER_WEIGHTS: usize = 14;

/// Maximum tokens per GEMM.
const ROWS: usize = 256;

/// Where the gate and the linear factor of a SwiGLU come from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Factors {
    /// From separate layers, the first and the third.
    Apart,
    /// From alternating columns of the first layer.
    Interleaved,
    /// From the two halves of the first layer.
    Halves,
}

/// The activation between the layers of an expert.
#[derive(Clone, Copy)]
enum Activation {
    /// A function of the first layer's output, times the third layer's output if there is one.
    Plain(Option<Unary>),
    /// `g * sigmoid(alpha * g) * (l + beta)`, with `g` at most `limit` and `l` clamped to
    /// `-limit..=limit`.
    SwiGlu { factors: Factors, alpha: f32, beta: f32, limit: f32 },
}

impl Activation {
    fn new(cx: &CompileCx<'_>) -> Result<Activation> {
        let attrs = cx.attrs();
        Ok(Activation::Plain(match attrs.string("activation_type")? {
            "relu" => Some(Unary::Relu),
            "gelu" => Some(Unary::GeluTanh),
            "silu" => Some(Unary::Silu),
            "identity" => None,
            // Inference accepts no other names, so this is `swiglu`.
            _ => {
                let factors = match attrs.int("swiglu_fusion")? {
                    0 => Factors::Apart,
                    1 => Factors::Interleaved,
                    _ => Factors::Halves,
                };
                let (alpha, beta) = (attrs.float("activation_alpha")?, attrs.float("activation_beta")?);
                let limit = attrs.find_float("swiglu_limit").unwrap_or(f32::INFINITY);
                return Ok(Activation::SwiGlu { factors, alpha, beta, limit });
            }
        }))
    }

    /// Computes the inner values of one token from the outputs of its first layer and, if there is
    /// one, its third layer.
    fn apply(self, first: &[f32], third: Option<&[f32]>, to: &mut [f32]) {
        match self {
            Activation::Plain(function) => {
                to.iter_mut().zip(first).for_each(|(to, value)| *to = *value);
                if let Some(function) = function {
                    f32::map(function, to);
                }
                // Without a third layer, this zip has no elements.
                to.iter_mut().zip(third.unwrap_or(&[])).for_each(|(to, factor)| *to *= factor);
            }
            Activation::SwiGlu { factors, alpha, beta, limit } => {
                let (left, right, step) = match factors {
                    Factors::Apart => (first, third.unwrap_or(&[]), 1),
                    // `to` has one element per pair of columns.
                    Factors::Interleaved => (first, first.get(1..).unwrap_or(&[]), 2),
                    Factors::Halves => (first, first.get(to.len()..).unwrap_or(&[]), 1),
                };
                // Comparisons instead of `min`, so that NaN propagates.
                for (to, gate) in to.iter_mut().zip(left.iter().step_by(step)) {
                    *to = if *gate > limit { limit } else { *gate };
                }
                f32::map(Unary::Swish { alpha }, to);
                for (to, factor) in to.iter_mut().zip(right.iter().step_by(step)) {
                    let factor = if *factor > limit { limit } else { *factor };
                    *to *= if factor < -limit { -limit } else { factor } + beta;
                }
            }
        }
    }
}

struct Mixture {
    /// Experts per token (`k`).
    chosen: usize,
    /// Whether the weights of a token's experts are scaled to sum to 1.
    normalizes: bool,
    activation: Activation,
    layers: [Layer; 3],
    inputs: [LayerInputs; 3],
    has_third: bool,
    /// Whether the node is `QMoE`, whose experts may have other weights than their probabilities.
    is_quantized: bool,
    /// Whether activations are `f32`; otherwise results accumulate in scratch and are narrowed at
    /// the end.
    is_single: bool,
}

/// The sizes of one run.
#[derive(Clone, Copy)]
struct MixtureSizes {
    tokens: usize,
    experts: usize,
    /// For each layer its outputs and inputs. Both are 0 for a third layer that is missing.
    layers: [[usize; 2]; 3],
}

impl MixtureSizes {
    fn hidden(&self) -> usize {
        self.layers[1][0]
    }

    fn inner(&self) -> usize {
        self.layers[1][1]
    }

    /// Returns the maximum tokens of one GEMM.
    fn rows(&self) -> usize {
        self.tokens.min(ROWS)
    }
}

/// Scratch buffers, reused from expert to expert.
struct Memory<'a> {
    tokens: &'a mut [f32],
    first: &'a mut [f32],
    third: &'a mut [f32],
    inner: &'a mut [f32],
    result: &'a mut [f32],
    /// One layer's weights and one bias converted to `f32`, if the tensors are half precision.
    weights: &'a mut [f32],
    bias: &'a mut [f32],
    gemm_workspace: &'a mut [f32],
}

impl<'a> Memory<'a> {
    fn new(rest: &mut &'a mut [f32], lens: [usize; 8]) -> Result<Memory<'a>> {
        let [tokens, first, third, inner, result, weights, bias, gemm_workspace] = lens;
        Ok(Memory {
            tokens: take(rest, tokens)?,
            first: take(rest, first)?,
            third: take(rest, third)?,
            inner: take(rest, inner)?,
            result: take(rest, result)?,
            weights: take(rest, weights)?,
            bias: take(rest, bias)?,
            gemm_workspace: take(rest, gemm_workspace)?,
        })
    }
}

/// A layer of an expert, and how many rows it is applied to.
#[derive(Clone, Copy)]
struct ExpertRows<'a> {
    sizes: &'a MixtureSizes,
    layer: usize,
    expert: usize,
    rows: usize,
}

impl Mixture {
    fn new(cx: &mut CompileCx<'_>) -> Result<Mixture> {
        let layers = [0, 1, 2].map(|layer| Layer::of_floats(cx, OF_FLOATS[layer].weights));
        let [first, second, third] = layers;
        Mixture::of_layers(cx, [first?, second?, third?], OF_FLOATS)
    }

    fn quantized(cx: &mut CompileCx<'_>) -> Result<Mixture> {
        let attrs = cx.attrs();
        let bits = attrs.int("expert_weight_bits")?;
        let block = attrs.find_int("block_size").filter(|block| *block > 0);
        let block = block.map(|block| {
            let size = usize::try_from(block).ok().filter(|size| size.is_power_of_two() && *size >= 16);
            size.ok_or_else(|| {
                error!(InvalidGraph, "block_size is {block}, expected a power of two from 16 on")
            })
        });
        let (block, rounds) = (block.transpose()?, attrs.int("accuracy_level")? == ACCURACY_OF_BYTES);
        let mut layers = [Layer::Input, Layer::Input, Layer::Input];
        let names = ["fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits"];
        for (layer, name) in layers.iter_mut().zip(names) {
            let bits = attrs.find_int(name).unwrap_or(bits);
            ensure!(matches!(bits, 2 | 4 | 8), InvalidGraph, "{name} is {bits}, expected 2, 4 or 8");
            *layer = Layer::Codes(Codes { bits: bits as usize, block, rounds });
        }
        Mixture::of_layers(cx, layers, QUANTIZED)
    }

    fn of_layers(cx: &CompileCx<'_>, layers: [Layer; 3], inputs: [LayerInputs; 3]) -> Result<Mixture> {
        let attrs = cx.attrs();
        ensure!(
            !attrs.flag("use_sparse_mixer")?,
            NotImplemented,
            "use_sparse_mixer, which chooses experts in another way"
        );
        let chosen = attrs.int("k")?;
        Ok(Mixture {
            chosen: usize::try_from(chosen)
                .map_err(|_| error!(InvalidGraph, "k is {chosen}, expected 0 or more"))?,
            normalizes: attrs.flag("normalize_routing_weights")?,
            activation: Activation::new(cx)?,
            has_third: cx.node.input(inputs[2].weights).is_some(),
            is_single: cx.node.dtype(0) == Some(DType::F32),
            is_quantized: matches!(layers[0], Layer::Codes(_)),
            layers,
            inputs,
        })
    }

    fn sizes<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<MixtureSizes> {
        let [input, router] = [0, 1].map(|index| shape(index).unwrap_or(&[]));
        let mut layers = [[0; 2]; 3];
        // The router's columns count the experts, and all weights must agree.
        let experts = router.last().copied().unwrap_or(0);
        for (layer, to) in layers.iter_mut().enumerate().filter(|(layer, _)| *layer < 2 || self.has_third) {
            let given = self.layers[layer].shape(shape(self.inputs[layer].weights));
            let [count, outputs, inputs] = given.within(|| format!("layer {}", layer + 1))?;
            ensure!(count == experts, InvalidArgument, "weights of {count} experts, expected {experts}");
            *to = [outputs, inputs];
        }
        let [[first, from], [hidden, inner], third] = layers;
        // A fused first layer has two columns for each inner value: gate and linear factor.
        let fused = match self.activation {
            Activation::SwiGlu { factors: Factors::Interleaved | Factors::Halves, .. } => 2,
            _ => 1,
        };
        // The sizes come from the model; a product that overflows agrees with nothing.
        let agree = inner.checked_mul(fused) == Some(first)
            && from == hidden
            && input.last() == Some(&hidden)
            && (!self.has_third || third == [inner, hidden]);
        ensure!(agree, InvalidArgument, "layers of sizes {layers:?} do not match for an input of {input:?}");
        let tokens = element_count(input.split_last().map_or(&[], |(_, rows)| rows))?;
        ensure!(
            *router == [tokens, experts],
            InvalidArgument,
            "router_probs has shape {router:?}, expected [{tokens}, experts]"
        );
        let chosen = self.chosen;
        ensure!(chosen <= experts, InvalidArgument, "k is {chosen}, but there are {experts} experts");
        Ok(MixtureSizes { tokens, experts, layers })
    }

    /// Returns the lengths of the scratch buffers of a [`Choice`].
    fn choice_lens(&self, sizes: &MixtureSizes) -> Result<[usize; 4]> {
        // Slots are stored as `u32`.
        let slots = element_count(&[sizes.tokens, self.chosen])?;
        ensure!(
            u32::try_from(slots).is_ok(),
            InvalidArgument,
            "{} experts for {} tokens",
            self.chosen,
            sizes.tokens
        );
        // Weights and experts of the slots, the start of each expert's slots, and one row.
        rounded([slots, slots, sizes.experts + 1, sizes.experts])
    }

    /// Returns the length of the `f32` accumulators, which are the output itself if that is `f32`.
    fn accumulators_len(&self, sizes: &MixtureSizes) -> Result<usize> {
        if self.is_single { Ok(0) } else { element_count(&[sizes.tokens, sizes.hidden()]) }
    }

    /// Returns the lengths of the buffers of [`Memory`].
    fn memory_lens(&self, sizes: &MixtureSizes, threads: usize) -> Result<[usize; 8]> {
        let (cpu, rows) = (Cpu::with_threads(threads), sizes.rows());
        let [[first, _], [hidden, inner], [third, _]] = sizes.layers;
        let (mut weights, mut gemm_workspace) = (0, 0);
        for (layer, shape) in self.layers.iter().zip(sizes.layers) {
            let [of_weights, of_product] = layer.scratch_lens(cpu, rows, shape, self.is_single)?;
            (weights, gemm_workspace) = (weights.max(of_weights), gemm_workspace.max(of_product));
        }
        let of = |width: usize| element_count(&[rows, width]);
        let bias = first.max(hidden).max(third);
        rounded([of(hidden)?, of(first)?, of(third)?, of(inner)?, of(hidden)?, weights, bias, gemm_workspace])
    }

    /// Routes each token to its `k` most probable experts. Ties go to the later expert.
    fn choose(&self, cx: &RunCx<'_>, sizes: &MixtureSizes, choice: &mut Choice<'_>) -> Result<()> {
        let router = cx.input(1)?;
        let others = if self.is_quantized { cx.find_input(ROUTER_WEIGHTS) } else { None };
        if let Some(view) = others {
            let (shape, expected) = (view.shape(), [sizes.tokens, sizes.experts]);
            ensure!(
                *shape == expected,
                InvalidArgument,
                "router_weights has shape {shape:?}, expected {expected:?}"
            );
        }
        let (chosen, experts) = (self.chosen, sizes.experts);
        let slots = choice
            .weights
            .chunks_exact_mut(chosen.max(1))
            .zip(choice.experts.chunks_exact_mut(chosen.max(1)));
        choice.starts.fill(0);
        for (token, (weights, places)) in slots.take(sizes.tokens).enumerate() {
            spend(experts * (4 + 2 * chosen));
            let row =
                choice.row.get_mut(..experts).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
            // One thread, because a row of router probabilities is short.
            load(1, router, token * experts, row)?;
            // Over all experts, before the choice; `normalizes` rescales the chosen ones
            // afterwards.
            f32::softmax(row);
            for (weight, place) in weights.iter_mut().zip(places.iter_mut()) {
                let best = row.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
                let (index, probability) =
                    best.map_or((0, 0.0), |(index, probability)| (index, *probability));
                (*weight, *place) = (probability, index as u32);
                // Excludes this expert from the token's next pick.
                row[index] = f32::NEG_INFINITY;
                // Counted one place up, so that the prefix sums below become starts.
                choice.starts[index + 1] += 1;
            }
            if let Some(others) = others {
                load(1, others, token * experts, row)?;
                weights.iter_mut().zip(places).for_each(|(weight, place)| *weight = row[*place as usize]);
            }
            // ONNX Runtime's `QMoE` normalizes probabilities with and without the attribute.
            if self.normalizes || (self.is_quantized && others.is_none()) {
                let sum: f32 = weights.iter().sum();
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
        }
        // Prefix sums turn the counts into the start of each expert's slots.
        for expert in 0..experts {
            choice.starts[expert + 1] += choice.starts[expert];
        }
        Ok(())
    }

    /// Runs one layer of an expert: a GEMM with the bias in its epilogue.
    fn multiply(
        &self,
        cx: &RunCx<'_>,
        of: ExpertRows<'_>,
        from: &[f32],
        to: &mut [f32],
        [weights, bias, product]: [&mut [f32]; 3],
    ) -> Result<()> {
        let ExpertRows { sizes, layer, expert, rows } = of;
        let (inputs, shape) = (self.inputs[layer], sizes.layers[layer]);
        let of = ExpertLayer { inputs, shape, experts: sizes.experts, expert, rows };
        self.layers[layer].multiply(cx, of, from, to, LayerMemory { weights, bias, product })
    }

    /// Overwrites `accumulators` with the weighted results of all experts, added in the order of
    /// the experts.
    fn run_experts(
        &self,
        cx: &RunCx<'_>,
        sizes: &MixtureSizes,
        (choice, order): (&Choice<'_>, &[u32]),
        accumulators: &mut [f32],
        memory: &mut Memory<'_>,
    ) -> Result<()> {
        let hidden = sizes.hidden();
        interrupt::fill(accumulators, 0.0);
        // A fixed order of experts keeps the bits of a token's sum.
        for expert in 0..sizes.experts {
            let slots = choice.starts[expert] as usize..choice.starts[expert + 1] as usize;
            for slots in order[slots].chunks(ROWS) {
                self.run_expert(cx, sizes, expert, slots, memory)?;
                for (slot, result) in slots.iter().zip(memory.result.chunks_exact(hidden)) {
                    // Slots of one token are adjacent, so the quotient is the token.
                    let slot = *slot as usize;
                    let accumulators = &mut accumulators[slot / self.chosen * hidden..][..hidden];
                    let weight = choice.weights[slot];
                    accumulators.iter_mut().zip(result).for_each(|(sum, value)| *sum += weight * value);
                }
            }
        }
        Ok(())
    }

    /// Runs an expert on up to [`ROWS`] tokens and leaves the results in `memory.result`.
    fn run_expert(
        &self,
        cx: &RunCx<'_>,
        sizes: &MixtureSizes,
        expert: usize,
        slots: &[u32],
        memory: &mut Memory<'_>,
    ) -> Result<()> {
        let (threads, hidden, inner, rows) = (cx.threads(), sizes.hidden(), sizes.inner(), slots.len());
        let input = cx.input(0)?;
        // Gathers the tokens: [rows, hidden].
        for (slot, row) in slots.iter().zip(memory.tokens.chunks_exact_mut(hidden.max(1))) {
            load(threads, input, *slot as usize / self.chosen * hidden, row)?;
        }
        let Memory { tokens, first, third, inner: between, result, weights, bias, gemm_workspace } = memory;
        let of = |layer: usize| ExpertRows { sizes, layer, expert, rows };
        self.multiply(cx, of(0), tokens, first, [weights, bias, gemm_workspace])?;
        if self.has_third {
            self.multiply(cx, of(2), tokens, third, [weights, bias, gemm_workspace])?;
        }
        // [rows, width] to [rows, inner]; `width` is twice `inner` if the first layer is fused.
        let width = sizes.layers[0][0];
        let (first, third) = (&**first, if self.has_third { Some(&**third) } else { None });
        let values =
            between.get_mut(..rows * inner).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
        for_each_row_chunk_mut(threads, values, inner, 1, |row, values| {
            for (at, to) in values.chunks_exact_mut(inner).enumerate() {
                let first = first.get((row + at) * width..).and_then(|values| values.get(..width));
                let third = third.and_then(|values| values.get((row + at) * inner..)?.get(..inner));
                self.activation.apply(first.unwrap_or(&[]), third, to);
            }
        });
        self.multiply(cx, of(1), values, result, [weights, bias, gemm_workspace])
    }
}

/// Rounds lengths up to whole cache lines.
fn rounded<const N: usize>(mut lens: [usize; N]) -> Result<[usize; N]> {
    for len in &mut lens {
        let whole = len.checked_next_multiple_of(16);
        *len = whole.ok_or_else(|| error!(OutOfMemory, "a workspace of {len} values"))?;
    }
    Ok(lens)
}

/// Copies part of a tensor to `to`, converted to `f32`.
fn load(threads: usize, view: TensorView<'_>, first: usize, to: &mut [f32]) -> Result<()> {
    if view.dtype() == DType::F32 {
        let len = to.len();
        to.copy_from_slice(floats(threads, view, first, len, &mut [])?);
        return Ok(());
    }
    floats(threads, view, first, to.len(), to).map(|_| ())
}

/// The routing of all tokens. A slot is one (token, expert) pair: slot `s` belongs to token
/// `s / k`.
struct Choice<'a> {
    /// The weight of each slot.
    weights: &'a mut [f32],
    /// The expert of each slot.
    experts: &'a mut [u32],
    /// For each expert the number of slots of the experts before it, then the total.
    starts: &'a mut [u32],
    /// Scratch for one token's router probabilities.
    row: &'a mut [f32],
}

impl Choice<'_> {
    /// Writes to `order` the slots sorted by expert: a counting sort, stable within an expert.
    fn sort(&mut self, slots: usize, order: &mut [u32]) {
        for (slot, expert) in spending(4, &self.experts[..slots]).enumerate() {
            let start = &mut self.starts[*expert as usize];
            order[*start as usize] = slot as u32;
            *start += 1;
        }
        // Each start has advanced to the next expert's start, so shift them back.
        let count = self.starts.len();
        self.starts.copy_within(..count - 1, 1);
        self.starts[0] = 0;
    }
}

impl Executable for Mixture {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let sizes = self.sizes(|index| shapes.inputs.get(index)?.as_deref())?;
        let (choice, memory) = (self.choice_lens(&sizes)?, self.memory_lens(&sizes, shapes.threads)?);
        // The sorted slots take as much as the experts of the slots.
        let order = choice[1];
        let parts =
            choice.into_iter().chain(memory).chain([order, rounded([self.accumulators_len(&sizes)?])?[0]]);
        bytes_of::<f32>(parts.fold(0, usize::saturating_add))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let threads = cx.threads();
        let sizes = self.sizes(|index| cx.find_input(index).map(|view| view.shape()))?;
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let output = cx.output(0)?;
        // Without tokens or hidden values, the chunks below would have length 0.
        if output.element_count() == 0 {
            return Ok(());
        }
        let [weights, experts, starts, row] = self.choice_lens(&sizes)?;
        let mut choice = Choice {
            weights: take(&mut rest, weights)?,
            experts: bytemuck::cast_slice_mut(take(&mut rest, experts)?),
            starts: bytemuck::cast_slice_mut(take(&mut rest, starts)?),
            row: take(&mut rest, row)?,
        };
        self.choose(cx, &sizes, &mut choice)?;
        let order: &mut [u32] = bytemuck::cast_slice_mut(take(&mut rest, experts)?);
        choice.sort(sizes.tokens * self.chosen, order);
        let accumulators = take(&mut rest, rounded([self.accumulators_len(&sizes)?])?[0])?;
        let mut memory = Memory::new(&mut rest, self.memory_lens(&sizes, threads)?)?;
        if self.is_single {
            let accumulators = output.as_mut_slice::<f32>()?;
            return self.run_experts(cx, &sizes, (&choice, order), accumulators, &mut memory);
        }
        let accumulators = &mut accumulators[..output.element_count()];
        self.run_experts(cx, &sizes, (&choice, order), accumulators, &mut memory)?;
        narrow(threads, accumulators, output)
    }
}
