//! Operators with a scalar formula, compiled to a program that runs block by block.
//!
//! Some common functions are a single loop of the vector library instead.

use std::sync::OnceLock;

use ort_alloc::fork::get_or_init;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::formula::{self, Arithmetic};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::{BinaryFn, OpSpec, RUNTIME, ScalarExpr};
use ort_core::{Result, error, for_each_type};
use smallvec::{SmallVec, smallvec};

use super::blocks::{operand, output_elements, output_shape, select};
use super::lanes::{Lane, Storage};
use super::program::{Function, Program, Source, Step};
use ort_cpu_kernel::broadcast::{BLOCK, Block, Broadcast, Repeated};
use ort_cpu_kernel::idioms::{idiom, one_loop};
use ort_cpu_kernel::{DerivedKernels, cpu_kernels, inventory};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::thread_scratch::{ThreadScratch, with_thread_scratch};

type Types = &'static [(&'static str, TypeSet)];

const FLOATS: Types = &[(KernelDef::INPUTS, TypeSet::FLOATS)];
const NUMBERS: Types = &[(KernelDef::INPUTS, TypeSet::NUMERIC)];

/// The kernels of all records with a formula over numbers of one type, or over booleans.
fn derived() -> &'static [KernelDef] {
    static KERNELS: OnceLock<Vec<KernelDef>> = OnceLock::new();
    get_or_init(&KERNELS, || formula::records().filter_map(kernel).collect()).as_slice()
}

fn kernel(spec: &'static OpSpec) -> Option<KernelDef> {
    let kernel = KernelDef { make: make_formula, ..formula::kernel(spec) };
    if formula::is_logic(spec) {
        // No `types`: the record allows booleans only, and may have one type variable for the
        // inputs and another for the output.
        return Some(KernelDef { in_place: &[(0, 0), (1, 0)], ..kernel });
    }
    let is_of_floats = formula::arithmetic(spec) == Arithmetic::Float;
    let types = if is_of_floats { FLOATS } else { NUMBERS };
    formula::has_one_type(spec).then_some(KernelDef { types, ..kernel })
}

inventory::submit! { DerivedKernels(derived) }

cpu_kernels![
    // `power` computes all other pairs of types.
    KernelDef {
        op: "Pow",
        types: &[("T", TypeSet::FLOATS), ("T1", TypeSet::FLOATS)],
        rank: 1,
        in_place: &[(0, 0), (1, 0)],
        when: |node| node.dtype(0) == node.dtype(1),
        make: make_formula,
        ..KernelDef::BASE
    },
    KernelDef {
        domain: RUNTIME,
        op: "FusedElementwise",
        types: &[("T", TypeSet::FLOATS)],
        in_place: &[(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)],
        make: make_formula,
        ..KernelDef::BASE
    },
];

/// Creates the kernel of a node whose record has a formula.
fn make_formula(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let node = cx.node.node;
    make(cx, &node.spec.formula(&node.attrs, node.inputs.len())?)
}

/// Creates the kernel of a formula for the node's element type.
fn make(cx: &CompileCx<'_>, formula: &ScalarExpr) -> Result<Box<dyn Executable>> {
    let program = match one_loop(formula) {
        Some(function) => Program::own(function),
        None => Program::compile_with(formula, idiom),
    };
    Ok(match cx.node.dtype(0) {
        Some(DType::F32) => Box::new(move |cx: &mut RunCx<'_>| run::<f32>(cx, &program)),
        Some(DType::F16) => Box::new(move |cx: &mut RunCx<'_>| run::<half::f16>(cx, &program)),
        Some(DType::BF16) => Box::new(move |cx: &mut RunCx<'_>| run::<half::bf16>(cx, &program)),
        // Idioms are loops over `f32` only.
        Some(DType::F64) => of_steps::<f64>(formula),
        // Booleans are bytes of 0 and 1.
        Some(DType::Bool) => of_steps::<u8>(formula),
        Some(dtype) if TypeSet::INTEGERS.contains(dtype) => {
            for_each_type!(dtype in INTEGERS, T => of_steps::<T>(formula), else => {
                return Err(error!(Fail, "{} is no integer", dtype.name()))
            })
        }
        other => return Err(error!(NotImplemented, "a formula of {other:?} is not supported")),
    })
}

/// Creates a kernel that uses none of the lane type's own functions.
fn of_steps<T: Storage>(formula: &ScalarExpr) -> Box<dyn Executable> {
    let program = Program::compile(formula);
    Box::new(move |cx: &mut RunCx<'_>| run::<T>(cx, &program))
}

/// Buffers that the blocks of one thread share.
struct Scratch<S: Storage> {
    /// For each input: its elements made contiguous, and the same as lanes.
    inputs: Vec<(Vec<S>, Vec<S::Lane>)>,
    registers: Vec<Register<S::Lane>>,
    result: Vec<S::Lane>,
}

impl<S: Storage> Default for Scratch<S> {
    fn default() -> Self {
        Scratch { inputs: Vec::new(), registers: Vec::new(), result: Vec::new() }
    }
}

impl<S: Storage> ThreadScratch for Scratch<S> {
    fn bytes(&self) -> usize {
        let inputs: usize = self.inputs.iter().map(ThreadScratch::bytes).sum();
        let registers: usize = self.registers.iter().map(|register| register.values.bytes()).sum();
        inputs + registers + self.result.bytes()
    }
}

/// A block of intermediate results, aligned to a cache line. Vectors that cross lines take twice as
/// long.
struct Register<L> {
    values: Vec<L>,
    /// Values before the first cache line.
    skipped: usize,
}

impl<L> Default for Register<L> {
    fn default() -> Self {
        Register { values: Vec::new(), skipped: 0 }
    }
}

impl<L: Lane> Register<L> {
    /// Bytes of a cache line.
    const LINE: usize = 64;

    /// Returns the first `len` values, whatever they hold.
    fn values(&mut self, len: usize) -> &mut [L] {
        let slack = Register::<L>::LINE / size_of::<L>();
        if self.values.len() < len + slack {
            self.values.resize(len + slack, L::default());
            // The vector moved when it grew, so its alignment is found again.
            self.skipped = self.values.as_ptr().align_offset(Register::<L>::LINE).min(slack);
        }
        &mut self.values[self.skipped..][..len]
    }

    fn read(&self, len: usize) -> &[L] {
        &self.values[self.skipped..][..len]
    }
}

type Steps<S> = Program<<<S as Storage>::Lane as Lane>::Own>;
type Inputs<'a, S> = SmallVec<[Option<&'a [S]>; 3]>;

fn run<S: Storage>(cx: &mut RunCx<'_>, program: &Steps<S>) -> Result<()> {
    let shape = output_shape(cx, 0)?;
    let mut inputs: Inputs<'_, S> = SmallVec::new();
    let mut shapes: SmallVec<[&[usize]; 3]> = SmallVec::new();
    for index in 0..program.inputs {
        let (elements, shape) = operand::<S>(cx, index)?;
        inputs.push(elements);
        shapes.push(shape);
    }
    let walk = Broadcast::new(shape, &shapes)?;
    let threads = cx.threads();
    let output = output_elements::<S>(cx, 0)?;
    // A single step over contiguous lanes needs no registers, so blocks may be of any length. What
    // the output holds may have to be copied.
    let needs_copy = !S::Lane::HAS_BINARY_IN_PLACE && inputs.iter().any(Option::is_none);
    let whole = !walk.needs_buffers() && program.steps.len() == 1 && S::lanes(&[]).is_some() && !needs_copy;
    let limit = if whole { usize::MAX } else { BLOCK };
    let extra = program.extra_units(S::Lane::REMAINDER_UNITS);
    let zip = Zip::of(program, &inputs);
    let is_short = output.len() < 4 * BLOCK;
    let mut blocks = |tiled: Tiled<'_, S>| {
        walk.for_each_block(threads, limit, output, |scratch: &mut Scratch<S>, start, block| {
            if extra > 0 {
                spend(extra * block.len());
            }
            let done = match zip {
                Some(zip) => {
                    let read = ZipOperands { walk: &walk, inputs: &inputs, tiled };
                    zip.run(&read, (start, block), scratch)
                }
                None => single_in_place(program, &walk, &inputs, start, block, scratch),
            };
            if !done {
                compute(program, &walk, &inputs, (start, block), scratch);
            }
        });
    };
    // A tile is worth it for more than a few blocks.
    if zip.is_none() || !walk.needs_buffers() || is_short {
        blocks(None);
        return Ok(());
    }
    with_thread_scratch(|Tile(tile): &mut Tile<S>| {
        let mut operands = inputs.iter().enumerate();
        let is_tiled = |(index, data): (usize, &Option<&[S]>)| {
            data.is_some_and(|data| walk.tile(index, data, tile)).then_some(index)
        };
        let operand = operands.find_map(is_tiled);
        blocks(operand.map(|operand| (operand, tile.as_slice())));
    });
    Ok(())
}

/// A short row of an input, repeated for a block ([`Broadcast::tile`]).
struct Tile<S>(Vec<S>);

impl<S> Default for Tile<S> {
    fn default() -> Self {
        Tile(Vec::new())
    }
}

impl<S: 'static> ThreadScratch for Tile<S> {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// An input and its tile.
type Tiled<'a, S> = Option<(usize, &'a [S])>;

/// A program of one function of two values, neither of which the output's memory holds. It reads
/// them where they are: with rows of some hundred elements as blocks, the general path takes longer
/// to find the operands than the loop takes.
#[derive(Clone, Copy)]
struct Zip {
    function: BinaryFn,
    operands: [Source; 2],
}

impl Zip {
    fn of<S: Storage>(program: &Steps<S>, inputs: &Inputs<'_, S>) -> Option<Zip> {
        let [Step { function: Function::Binary(function), operands: [a, b, _], .. }] =
            program.steps.as_slice()
        else {
            return None;
        };
        let is_apart = |source: &Source| match source {
            Source::Input(index) => inputs.get(*index).is_some_and(Option::is_some),
            Source::Constant(_) => true,
            Source::Register(_) => false,
        };
        let applies = is_apart(a) && is_apart(b) && S::lanes(&[]).is_some();
        applies.then_some(Zip { function: *function, operands: [*a, *b] })
    }

    /// Computes one block of the output. Returns false if it cannot.
    fn run<S: Storage>(
        self,
        from: &ZipOperands<'_, S>,
        (start, block): (usize, &mut [S]),
        scratch: &mut Scratch<S>,
    ) -> bool {
        scratch.inputs.resize_with(self.operands.len().max(scratch.inputs.len()), Default::default);
        let [(left, _), (right, _), ..] = scratch.inputs.as_mut_slice() else { return false };
        let [a, b] = self.operands;
        let place = (start, block.len());
        let (Some(a), Some(b)) = (from.read((a, b), place, left), from.read((b, a), place, right)) else {
            return false;
        };
        let Some(to) = S::lanes_mut(block) else { return false };
        match (a, b) {
            (Operand::Block(a), Operand::Block(b)) => S::Lane::binary(self.function, a, b, to),
            (Operand::Block(Block::Slice(data)), Operand::Rows(rows)) => {
                S::Lane::binary_rows(self.function, data, rows, false, to);
            }
            (Operand::Rows(rows), Operand::Block(Block::Slice(data))) => {
                S::Lane::binary_rows(self.function, data, rows, true, to);
            }
            _ => return false,
        }
        true
    }
}

/// Where a [`Zip`] reads its operands.
struct ZipOperands<'a, S> {
    walk: &'a Broadcast,
    inputs: &'a [Option<&'a [S]>],
    tiled: Tiled<'a, S>,
}

impl<S: Storage> ZipOperands<'_, S> {
    /// Returns the operand `source` over `len` elements of the output from `start` on. It may have
    /// one element for each row only beside an operand that is dense.
    fn read<'b>(
        &'b self,
        (source, beside): (Source, Source),
        (start, len): (usize, usize),
        buffer: &'b mut Vec<S>,
    ) -> Option<Operand<'b, S::Lane>> {
        let ZipOperands { walk, inputs, tiled } = self;
        let index = match source {
            Source::Constant(value) => {
                return Some(Operand::Block(Block::Scalar(S::Lane::from_f64(value))));
            }
            Source::Input(index) => index,
            Source::Register(_) => return None,
        };
        if let Some((_, tile)) = tiled.filter(|(operand, _)| *operand == index) {
            let slice = tile.get(walk.column_of(start)..)?.get(..len)?;
            return Some(Operand::Block(Block::Slice(S::lanes(slice)?)));
        }
        let data = inputs.get(index).copied().flatten()?;
        if walk.needs_buffers()
            && matches!(beside, Source::Input(other) if walk.is_dense(other))
            && let Some(rows) = long_rows(walk, (index, data), (start, len))
        {
            let elements = S::lanes(rows.elements)?;
            return Some(Operand::Rows(Repeated { elements, first: rows.first, each: rows.each }));
        }
        Some(Operand::Block(match walk.block(index, data, start, len, buffer) {
            Block::Scalar(value) => Block::Scalar(value.widen_one()),
            Block::Slice(slice) => Block::Slice(S::lanes(slice)?),
        }))
    }
}

/// Returns an input that has one element for each of several rows of a block, if the rows are long
/// enough.
fn long_rows<'b, S: Storage>(
    walk: &Broadcast,
    (index, data): (usize, &'b [S]),
    (start, len): (usize, usize),
) -> Option<Repeated<'b, S>> {
    walk.repeated(index, data, start, len).filter(|rows| rows.each >= SHORTEST_ROW)
}

/// Runs a program of one step in place, if the output already holds its input and the lane type has
/// a loop for that. Returns whether it did.
fn single_in_place<S: Storage>(
    program: &Steps<S>,
    walk: &Broadcast,
    inputs: &Inputs<'_, S>,
    start: usize,
    block: &mut [S],
    scratch: &mut Scratch<S>,
) -> bool {
    // `None` marks the input whose elements are in the output.
    let ([step], Some(shared)) = (program.steps.as_slice(), inputs.iter().position(Option::is_none)) else {
        return false;
    };
    let Some(data) = S::lanes_mut(block) else { return false };
    let here = Source::Input(shared);
    match (step.function, step.operands) {
        (Function::Own(function), [x, ..]) if x == here => S::Lane::own_in_place(function, data),
        (Function::Unary(function), [x, ..]) if x == here => S::Lane::unary_in_place(function, data),
        (Function::Copy, [x, ..]) if x == here => {}
        // Not both: a loop that reads the output twice would need a copy.
        (Function::Binary(function), [a, b, _]) if (a == here) != (b == here) => {
            let other = match if a == here { b } else { a } {
                Source::Constant(value) => Block::Scalar(S::Lane::from_f64(value)),
                Source::Input(index) => {
                    scratch.inputs.resize_with(1, Default::default);
                    let Some(from) = inputs.get(index).copied().flatten() else { return false };
                    let rows = walk.repeated(index, from, start, data.len());
                    if let Some((rows, elements)) =
                        rows.and_then(|rows| Some((rows, S::lanes(rows.elements)?)))
                    {
                        let rows = Repeated { elements, first: rows.first, each: rows.each };
                        return S::Lane::binary_rows_in_place(function, data, rows, b == here);
                    }
                    match walk.block(index, from, start, data.len(), &mut scratch.inputs[0].0) {
                        Block::Scalar(value) => Block::Scalar(value.widen_one()),
                        Block::Slice(slice) => match S::lanes(slice) {
                            Some(lanes) => Block::Slice(lanes),
                            None => return false,
                        },
                    }
                }
                Source::Register(_) => return false,
            };
            return S::Lane::binary_in_place(function, data, other, b == here);
        }
        _ => return false,
    }
    true
}

/// Runs all steps over one block of the output.
fn compute<S: Storage>(
    program: &Steps<S>,
    walk: &Broadcast,
    inputs: &Inputs<'_, S>,
    (start, block): (usize, &mut [S]),
    scratch: &mut Scratch<S>,
) {
    let Scratch { inputs: buffers, registers, result } = scratch;
    buffers.resize_with(inputs.len(), Default::default);
    registers.resize_with(program.registers, Default::default);
    let len = block.len();
    let Some((last, steps)) = program.steps.split_last() else { return };
    let gathering = Gathering { program, walk, inputs: inputs.as_slice(), start, len };
    if !steps.is_empty() {
        // Steps before the last read what the output holds in place.
        // An input that several steps read is gathered once per block.
        let operands = gathering.gather(steps, block, buffers);
        for step in steps {
            // Taken out, so that other registers can be read while it is written.
            let mut target = std::mem::take(&mut registers[step.to]);
            apply(step, &operands, registers, target.values(len));
            registers[step.to] = target;
        }
    }
    // Half precision computes in `f32` and rounds once.
    if S::lanes(block).is_none() {
        result.resize(len, S::Lane::default());
        let operands = gathering.gather(std::slice::from_ref(last), block, buffers);
        apply(last, &operands, registers, result);
        drop(operands);
        S::narrow(result, block);
        return;
    }
    // The last step writes the output, so we first copy what it reads there.
    let shared = inputs.iter().position(Option::is_none).filter(|shared| last.reads(*shared));
    let mut held = Vec::new();
    if let Some(shared) = shared {
        held = std::mem::take(&mut buffers[shared].0);
        held.clear();
        held.extend_from_slice(block);
    }
    let operands = gathering.gather(std::slice::from_ref(last), &held, buffers);
    if let Some(output) = S::lanes_mut(block) {
        apply(last, &operands, registers, output);
    }
    drop(operands);
    if let Some(shared) = shared {
        buffers[shared].0 = held;
    }
}

/// The sources of a block's operands.
struct Gathering<'a, S: Storage> {
    program: &'a Steps<S>,
    walk: &'a Broadcast,
    inputs: &'a [Option<&'a [S]>],
    /// The start of the block in the output.
    start: usize,
    /// The length of the block.
    len: usize,
}

type Operands<'b, L> = SmallVec<[Operand<'b, L>; 3]>;

impl<S: Storage> Gathering<'_, S> {
    /// Returns the block of each input that one of the steps reads. `held` is the input that the
    /// output's memory holds.
    fn gather<'b>(
        &'b self,
        steps: &[Step<<S::Lane as Lane>::Own>],
        held: &'b [S],
        buffers: &'b mut [(Vec<S>, Vec<S::Lane>)],
    ) -> Operands<'b, S::Lane> {
        // Inputs that these steps do not read keep their position, so that steps index operands
        // directly.
        let nothing = Operand::Block(Block::Scalar(S::Lane::default()));
        let mut read: SmallVec<[bool; 16]> = smallvec![false; self.inputs.len()];
        for input in steps.iter().flat_map(Step::inputs) {
            if let Some(read) = read.get_mut(input) {
                *read = true;
            }
        }
        let mut operands = Operands::new();
        for (index, (input, (elements, lanes))) in self.inputs.iter().zip(buffers).enumerate() {
            operands.push(match input {
                _ if !read[index] => nothing,
                None => Operand::Block(Block::Slice(as_lanes(held, lanes))),
                Some(data) => match rows_of(self.program, self.walk, (index, data), (self.start, self.len)) {
                    Some(Repeated { elements, first, each }) => {
                        Operand::Rows(Repeated { elements: as_lanes(elements, lanes), first, each })
                    }
                    None => {
                        Operand::Block(match self.walk.block(index, data, self.start, self.len, elements) {
                            Block::Scalar(value) => Block::Scalar(value.widen_one()),
                            Block::Slice(slice) => Block::Slice(as_lanes(slice, lanes)),
                        })
                    }
                },
            });
        }
        operands
    }
}

/// Views elements as lanes, converted through `buffer` if they are not.
fn as_lanes<'b, S: Storage>(elements: &'b [S], buffer: &'b mut Vec<S::Lane>) -> &'b [S::Lane] {
    match S::lanes(elements) {
        Some(lanes) => lanes,
        None => {
            S::widen(elements, buffer);
            buffer
        }
    }
}

/// An input over one block.
#[derive(Clone, Copy)]
enum Operand<'a, L> {
    Block(Block<'a, L>),
    Rows(Repeated<'a, L>),
}

/// The shortest row that is worth a call of its own. Shorter ones are faster when written out.
const SHORTEST_ROW: usize = 256;

/// Returns an input that has one element for each of several rows of a block, if the program can
/// use it as such.
fn rows_of<'b, S: Storage>(
    program: &Steps<S>,
    walk: &Broadcast,
    (index, data): (usize, &'b [S]),
    (start, len): (usize, usize),
) -> Option<Repeated<'b, S>> {
    let rows = long_rows(walk, (index, data), (start, len))?;
    // Rows are read beside data that has an element for each position.
    let whole = |source| match source {
        Source::Register(_) => true,
        Source::Input(other) => walk.is_dense(other),
        Source::Constant(_) => false,
    };
    program.only_beside(index, whole).then_some(rows)
}

fn apply<L: Lane>(step: &Step<L::Own>, inputs: &[Operand<'_, L>], registers: &[Register<L>], to: &mut [L]) {
    let read = |source: Source| match source {
        Source::Input(index) => inputs[index],
        Source::Constant(value) => Operand::Block(Block::Scalar(L::from_f64(value))),
        Source::Register(index) => Operand::Block(Block::Slice(registers[index].read(to.len()))),
    };
    let operands = step.operands.map(read);
    if let Function::Binary(function) = step.function {
        match operands {
            [Operand::Block(Block::Slice(data)), Operand::Rows(rows), _] => {
                return L::binary_rows(function, data, rows, false, to);
            }
            [Operand::Rows(rows), Operand::Block(Block::Slice(data)), _] => {
                return L::binary_rows(function, data, rows, true, to);
            }
            _ => {}
        }
    }
    // `rows_of` returns rows only beside whole blocks, which were handled above. This case is never
    // read.
    let [a, b, c] = operands.map(|operand| match operand {
        Operand::Block(block) => block,
        Operand::Rows(_) => Block::Scalar(L::default()),
    });
    match step.function {
        Function::Copy => copy(a, to),
        Function::Own(function) => match a {
            Block::Slice(from) => L::own(function, from, to),
            Block::Scalar(value) => {
                to.fill(value);
                L::own_in_place(function, to);
            }
        },
        Function::Unary(function) => match a {
            Block::Slice(from) => L::unary(function, from, to),
            Block::Scalar(value) => {
                to.fill(value);
                L::unary_in_place(function, to);
            }
        },
        Function::Binary(function) => L::binary(function, a, b, to),
        Function::Select => select(a, b, c, to),
    }
}

fn copy<L: Copy>(from: Block<'_, L>, to: &mut [L]) {
    match from {
        Block::Slice(from) => to.copy_from_slice(from),
        Block::Scalar(value) => to.fill(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ort_core::ir::Attributes;

    fn evaluate<S: Storage>(program: &Steps<S>, input: &[S]) -> Vec<S> {
        let walk = Broadcast::same(input.len(), 1);
        let mut output = input.to_vec();
        let inputs: Inputs<'_, S> = std::iter::once(Some(input)).collect();
        walk.for_each_block(1, 7, &mut output, |scratch: &mut Scratch<S>, start, block| {
            compute(program, &walk, &inputs, (start, block), scratch);
        });
        output
    }

    /// Checks each loop of the vector library that stands for an operator against the operator's
    /// formula in double precision. Does the same for the formula's program in single precision.
    #[test]
    fn loops_and_programs_agree_with_formulas() -> Result<()> {
        let values: Vec<f32> = (-400..=400).map(|step| step as f32 * 0.02 + 0.001).collect();
        let wide: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
        let (mut loops, mut programs) = (0, 0);
        for spec in formula::records().filter(|spec| spec.domain.is_empty()) {
            let Some(scalar) = spec.scalar else { continue };
            let Ok(attrs) = Attributes::new(spec, Vec::new()) else { continue };
            let formula = scalar(&attrs)?;
            if formula.input_count() != 1 {
                continue;
            }
            let expected = evaluate::<f64>(&Program::compile(&formula), &wide);
            let mut results = vec![
                evaluate::<f32>(&Program::compile(&formula), &values),
                evaluate::<f32>(&Program::compile_with(&formula, idiom), &values),
            ];
            programs += 1;
            if let Some(function) = one_loop(&formula) {
                results.push(evaluate::<f32>(&Program::own(function), &values));
                loops += 1;
            }
            for result in results {
                for ((x, got), want) in values.iter().zip(result).zip(&expected) {
                    let got = f64::from(got);
                    let close = (got - want).abs() <= 3e-6 * (1.0 + want.abs());
                    assert!(
                        close || (got.is_nan() && want.is_nan()),
                        "{}({x}) is {want}, got {got}",
                        spec.name
                    );
                }
            }
        }
        assert!(loops >= 12 && programs >= 35, "{loops} loops and {programs} programs were compared");
        Ok(())
    }

    /// Programs of one function of two values have a path of their own. It agrees with coordinates
    /// for rows shorter and longer than a block, for columns, scalars and constants.
    #[test]
    fn broadcast_operands_meet_by_coordinates() -> Result<()> {
        use ort_core::spec::ScalarExpr::Input;
        let shapes: [(&[usize], &[usize]); 10] = [
            (&[70, 3], &[3]),
            (&[40, 100], &[100]),
            (&[3, 1500], &[1500]),
            (&[70, 3], &[70, 1]),
            (&[9, 300], &[9, 1]),
            (&[3, 1500], &[3, 1]),
            (&[4, 30, 8], &[4, 1, 8]),
            (&[4, 30, 8], &[30, 1]),
            (&[2000], &[]),
            (&[2000], &[2000]),
        ];
        for (output, shape) in shapes {
            let total: usize = output.iter().product();
            let count: usize = shape.iter().product();
            let a: Vec<u8> = (0..total).map(|i| (i * 7 % 251) as u8).collect();
            let b: Vec<u8> = (0..count).map(|i| (i * 13 % 241) as u8).collect();
            let places: Vec<usize> = (0..count).collect();
            let walk = Broadcast::new(output, &[output, shape])?;
            let mut places_under = Vec::new();
            for start in 0..total {
                let mut buffer = Vec::new();
                places_under.push(match walk.block(1, &places, start, 1, &mut buffer) {
                    Block::Slice(place) => place[0],
                    Block::Scalar(place) => place,
                });
            }
            for (formula, swapped) in [(Input(0) - Input(1), false), (Input(1) - Input(0), true)] {
                let program = Program::compile(&formula);
                let mut got = vec![0; total];
                let inputs: Inputs<'_, u8> = [Some(a.as_slice()), Some(b.as_slice())].into_iter().collect();
                let zip = Zip::of::<u8>(&program, &inputs);
                assert!(zip.is_some());
                let mut tile = Vec::new();
                let tiled = walk.tile(1, &b, &mut tile).then_some((1, tile.as_slice()));
                walk.for_each_block(1, BLOCK, &mut got, |scratch: &mut Scratch<u8>, start, block| {
                    let read = ZipOperands { walk: &walk, inputs: &inputs, tiled };
                    let done = zip.is_some_and(|zip| zip.run(&read, (start, block), scratch));
                    assert!(done, "{shape:?} under {output:?} at {start}");
                });
                for (at, got) in got.into_iter().enumerate() {
                    let (a, b) = (a[at], b[places_under[at]]);
                    let want = if swapped { b.wrapping_sub(a) } else { a.wrapping_sub(b) };
                    assert_eq!(got, want, "{shape:?} under {output:?} at {at}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn sharing_memory_changes_nothing() -> Result<()> {
        use ort_core::spec::ScalarExpr::Input;
        let a: Vec<f32> = (0..300).map(|i| i as f32 * 0.25 - 30.0).collect();
        let b: Vec<f32> = (0..300).map(|i| 7.0 - i as f32 * 0.5).collect();
        let walk = Broadcast::new(&[300], &[&[300], &[300]])?;
        let formulas =
            [Input(0) - Input(1), Input(1) - Input(0), (Input(0) - Input(1)) * Input(0) + Input(1)];
        for formula in formulas {
            let program = Program::compile(&formula);
            let run = |inputs: &Inputs<'_, f32>, mut output: Vec<f32>| {
                walk.for_each_block(1, 64, &mut output, |scratch: &mut Scratch<f32>, start, block| {
                    if !single_in_place(&program, &walk, inputs, start, block, scratch) {
                        compute(&program, &walk, inputs, (start, block), scratch);
                    }
                });
                output
            };
            let both = [Some(a.as_slice()), Some(b.as_slice())];
            let expected = run(&both.into_iter().collect(), vec![0.0; 300]);
            assert_eq!(run(&[None, both[1]].into_iter().collect(), a.clone()), expected);
            assert_eq!(run(&[both[0], None].into_iter().collect(), b.clone()), expected);
        }
        Ok(())
    }
}
