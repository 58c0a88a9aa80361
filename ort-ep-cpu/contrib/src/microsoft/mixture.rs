//! Mixture of experts (`MoE`).
//!
//! Top-k routing picks the experts of each token. For each expert, the kernel gathers the tokens
//! that chose it, runs the expert's layers as GEMMs over them, and scatters the weighted results
//! into the output. `use_sparse_mixer` is not supported.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use ort_cpu_gemm::{Cpu, Gemm, LhsOperand, RhsOperand, RhsSource, Step, Strided, workspace_len};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{narrow, widen};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::packed_weight::PackedWeight;
use ort_cpu_matmul::real::Real;
use ort_cpu_matmul::refused;
use ort_cpu_threads::interrupt::{self, spend, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::elementwise::Unary;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "MoE",
    make: |cx| Ok(Box::new(Mixture::new(cx)?)),
    ..KernelDef::BASE
}];

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

/// The weights of one layer for all experts, each of shape (outputs, inputs).
enum Layer {
    /// Packed for GEMM at compile time, one per expert, with the shape of the tensor.
    Packed(Vec<PackedWeight>, [usize; 3]),
    /// Read from the input on each run.
    Input,
}

impl Layer {
    /// Creates the layer whose weights are the input at `index`. Only constant `f32` weights are
    /// packed.
    fn new(cx: &mut CompileCx<'_>, index: usize) -> Result<Layer> {
        let Some(view) = cx.constant(index).filter(|view| view.dtype() == DType::F32) else {
            return Ok(Layer::Input);
        };
        let &[experts, outputs, inputs] = view.shape() else { return Ok(Layer::Input) };
        let size = element_count(&[outputs, inputs])?;
        // The tensor is [experts, outputs, inputs]. The strides give GEMM its [inputs, outputs].
        let pack = |expert: usize| PackedWeight::new(cx, view, expert * size, [inputs, outputs], [1, inputs]);
        let packed = (0..experts).map(pack).collect::<Result<Vec<PackedWeight>>>()?;
        cx.consume(index);
        Ok(Layer::Packed(packed, [experts, outputs, inputs]))
    }

    fn source(&self) -> RhsSource {
        if matches!(self, Layer::Packed(..)) { RhsSource::Packed } else { RhsSource::Strided }
    }
}

/// Inputs that hold the layers' weights. Each is followed by the layer's bias.
const WEIGHTS: [usize; 3] = [2, 4, 6];

struct Mixture {
    /// Experts per token (`k`).
    chosen: usize,
    /// Whether the weights of a token's experts are scaled to sum to 1.
    normalizes: bool,
    activation: Activation,
    layers: [Layer; 3],
    has_third: bool,
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

/// Returns part of a tensor as `f32`. Other types are converted into `scratch`.
fn floats<'a>(
    threads: usize,
    view: TensorView<'a>,
    first: usize,
    len: usize,
    scratch: &'a mut [f32],
) -> Result<&'a [f32]> {
    let outside = || error!(Fail, "{len} values from {first} on are outside a tensor");
    if view.dtype() == DType::F32 {
        return view.as_slice::<f32>()?.get(first..).and_then(|values| values.get(..len)).ok_or_else(outside);
    }
    // The other types are half precision.
    let width = size_of::<u16>();
    let bytes = view.bytes()?.get(first * width..).and_then(|bytes| bytes.get(..len * width));
    let to = scratch.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
    widen(threads, TensorView::host(view.dtype(), &[len], bytes.ok_or_else(outside)?), to)?;
    Ok(to)
}

/// A layer of an expert, and the rows that it is applied to.
#[derive(Clone, Copy)]
struct ExpertLayer<'a> {
    sizes: &'a MixtureSizes,
    layer: usize,
    expert: usize,
    rows: usize,
}

impl Mixture {
    fn new(cx: &mut CompileCx<'_>) -> Result<Mixture> {
        let attrs = cx.attrs();
        ensure!(
            !attrs.flag("use_sparse_mixer")?,
            NotImplemented,
            "use_sparse_mixer, which chooses experts in another way"
        );
        let chosen = attrs.int("k")?;
        let has_third = cx.node.input(WEIGHTS[2]).is_some();
        Ok(Mixture {
            chosen: usize::try_from(chosen)
                .map_err(|_| error!(InvalidGraph, "k is {chosen}, expected 0 or more"))?,
            normalizes: attrs.flag("normalize_routing_weights")?,
            activation: Activation::new(cx)?,
            has_third,
            is_single: cx.node.dtype(0) == Some(DType::F32),
            layers: [Layer::new(cx, 2)?, Layer::new(cx, 4)?, Layer::new(cx, 6)?],
        })
    }

    fn sizes<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<MixtureSizes> {
        let [input, router] = [0, 1].map(|index| shape(index).unwrap_or(&[]));
        let mut layers = [[0; 2]; 3];
        // The router's columns count the experts, and all weights must agree.
        let experts = router.last().copied().unwrap_or(0);
        for (layer, index) in
            WEIGHTS.into_iter().enumerate().filter(|(layer, _)| *layer < 2 || self.has_third)
        {
            let given = match (&self.layers[layer], shape(index)) {
                (Layer::Packed(_, shape), _) => *shape,
                (Layer::Input, Some(&[count, outputs, inputs])) => [count, outputs, inputs],
                (Layer::Input, other) => {
                    return Err(error!(
                        InvalidArgument,
                        "weights of layer {} have shape {other:?}",
                        layer + 1
                    ));
                }
            };
            let [count, outputs, inputs] = given;
            ensure!(count == experts, InvalidArgument, "weights of {count} experts, expected {experts}");
            layers[layer] = [outputs, inputs];
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
        for (layer, [outputs, inputs]) in self.layers.iter().zip(sizes.layers) {
            if !self.is_single && matches!(layer, Layer::Input) {
                weights = weights.max(element_count(&[outputs, inputs])?);
            }
            // A GEMM with fewer rows may use another blocking, so we take the maximum over all row
            // counts.
            let lens = (1..=rows).map(|rows| workspace_len(cpu, 1, [rows, outputs, inputs], layer.source()));
            gemm_workspace = gemm_workspace.max(lens.max().unwrap_or(0));
        }
        let of = |width: usize| element_count(&[rows, width]);
        let bias = first.max(hidden).max(third);
        rounded([of(hidden)?, of(first)?, of(third)?, of(inner)?, of(hidden)?, weights, bias, gemm_workspace])
    }

    /// Routes each token to its `k` most probable experts. Ties go to the later expert.
    fn choose(&self, router: TensorView<'_>, sizes: &MixtureSizes, choice: &mut Choice<'_>) -> Result<()> {
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
            for (weight, place) in weights.iter_mut().zip(places) {
                let best = row.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
                let (index, probability) =
                    best.map_or((0, 0.0), |(index, probability)| (index, *probability));
                (*weight, *place) = (probability, index as u32);
                // Excludes this expert from the token's next pick.
                row[index] = f32::NEG_INFINITY;
                // Counted one place up, so that the prefix sums below become starts.
                choice.starts[index + 1] += 1;
            }
            if self.normalizes {
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
        of: ExpertLayer<'_>,
        from: &[f32],
        to: &mut [f32],
        [weights, bias, gemm_workspace]: [&mut [f32]; 3],
    ) -> Result<()> {
        let ExpertLayer { sizes, layer, expert, rows } = of;
        // All scratch was sized for the same number of threads.
        let cpu = Cpu::with_threads(cx.threads());
        let ([outputs, inputs], index) = (sizes.layers[layer], WEIGHTS[layer]);
        let bias = match cx.find_input(index + 1) {
            None => None,
            Some(view) => {
                let expected = [sizes.experts, outputs];
                let shape = view.shape();
                ensure!(
                    *shape == expected,
                    InvalidArgument,
                    "a bias has shape {shape:?}, expected {expected:?}"
                );
                Some([Step::ColumnBias(floats(cpu.threads, view, expert * outputs, outputs, bias)?)])
            }
        };
        let rhs = match &self.layers[layer] {
            Layer::Packed(packed, _) => {
                let packed = packed.get(expert).ok_or_else(|| error!(Fail, "there is no expert {expert}"))?;
                packed.operand(cpu)?
            }
            Layer::Input => {
                let size = outputs * inputs;
                let weights = floats(cpu.threads, cx.input(index)?, expert * size, size, weights)?;
                RhsOperand::Plain(Strided::new(weights, [inputs, outputs], [1, inputs]).map_err(refused)?)
            }
        };
        let lhs = LhsOperand::Plain(Strided::row_major(from, rows, inputs).map_err(refused)?);
        let gemm = Gemm { epilogue: bias.as_ref().map_or(&[], |bias| &bias[..]), ..Gemm::new(lhs, rhs) };
        gemm.run(cpu, to, outputs, gemm_workspace).map_err(refused)
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
        let of = |layer: usize| ExpertLayer { sizes, layer, expert, rows };
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
        self.choose(cx.input(1)?, &sizes, &mut choice)?;
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
