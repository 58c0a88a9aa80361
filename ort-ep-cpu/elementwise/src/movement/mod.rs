//! Kernels that move elements unchanged, for any element type.
//!
//! A [`Movement`] is written once, generic over [`Cell`]s. Its wrappers instantiate it by element
//! size on the bytes of a tensor, on unpacked elements of sub-byte types, and on the indices of
//! strings. The module also holds kernels that compute, such as interpolation, for the operators of
//! the same family.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as; indices that come as tensors are checked before their first use (`Indices::check`, `Tuples::new`, `normalize_axis`)"
)]

mod affine_grid;
mod cell;
mod col2im;
mod concat;
mod concat_quantized;
mod constant;
mod copy;
mod eye_like;
mod gather;
mod grid_sample;
mod indexed;
mod number;
mod one_hot;
mod pad;
mod range;
mod rearrange;
mod resize;
mod scatter;
mod select;
mod split;
mod strided;
mod trilu;
mod unique;

use ort_core::ep::{CompileCx, Executable, IoShapes, NodeView, RunCx};
use ort_core::ir::Node;
use ort_core::spec::{InputFacts, infer_concrete};
use ort_core::tensor::{CompactString, Shape, TensorView};
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use ort_cpu_kernel::heap::{elements, tables};
use ort_cpu_threads::interrupt::spending;

use cell::{Cell, Place, pack, unpack};

/// What a movement sees besides the elements that it moves.
struct Io<'a> {
    inputs: SmallVec<[Option<TensorView<'a>>; 8]>,
    outputs: SmallVec<[Option<Shape>; 4]>,
    /// The first output aliases the first input and already holds its elements.
    in_place: bool,
    threads: usize,
}

impl<'a> Io<'a> {
    /// Returns a required input.
    fn input(&self, index: usize) -> Result<TensorView<'a>> {
        self.find(index).ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
    }

    /// Returns an optional input.
    fn find(&self, index: usize) -> Option<TensorView<'a>> {
        self.inputs.get(index).copied().flatten()
    }

    /// Returns the integers of an optional input.
    fn ints(&self, index: usize) -> Result<Option<SmallVec<[i64; 8]>>> {
        self.find(index).map(|view| view.collect_ints()).transpose()
    }

    /// Returns the shape of an input. In place, input 0 has the output's shape.
    fn shape(&self, index: usize) -> Result<&[usize]> {
        if index == 0 && self.in_place { Ok(self.output_shape(0)) } else { Ok(self.input(index)?.shape()) }
    }

    /// Returns the shape of an output; empty if no consumer wants it.
    fn output_shape(&self, index: usize) -> &[usize] {
        self.outputs.get(index).and_then(Option::as_deref).unwrap_or(&[])
    }
}

/// Indices of inputs.
type Operands = SmallVec<[usize; 8]>;

/// An operator that moves elements.
trait Movement: Send + Sync + 'static {
    /// Whether elements keep their order, so that sub-byte types can stay packed.
    const KEEPS_ORDER: bool = false;

    /// Returns the inputs whose elements are moved. An absent one has no elements.
    fn operands(&self, _inputs: usize) -> Operands {
        smallvec::smallvec![0]
    }

    /// Returns an upper bound on the heap bytes of tables, as for [`Executable::heap`].
    fn heap(&self, _shapes: &IoShapes<'_>) -> usize {
        0
    }

    /// Moves the operands' elements to the outputs. An unwanted output is `None`.
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()>;
}

/// A [`Movement`] of any type: its wrappers are compiled once, and only the loops over elements for
/// each movement.
trait AnyMovement: Send + Sync {
    /// [`Movement::KEEPS_ORDER`].
    fn keeps_order(&self) -> bool;

    /// [`Movement::operands`].
    fn operands(&self, inputs: usize) -> Operands;

    /// [`Movement::heap`].
    fn heap(&self, shapes: &IoShapes<'_>) -> usize;

    /// Moves elements of `size` bytes.
    fn apply_bytes(
        &self,
        size: usize,
        io: &Io<'_>,
        from: &[&[u8]],
        to: &mut [Option<&mut [u8]>],
    ) -> Result<()>;

    /// Moves indices of strings.
    fn apply_places(&self, io: &Io<'_>, from: &[&[Place]], to: &mut [Option<&mut [Place]>]) -> Result<()>;
}

impl<M: Movement> AnyMovement for M {
    fn keeps_order(&self) -> bool {
        M::KEEPS_ORDER
    }

    fn operands(&self, inputs: usize) -> Operands {
        Movement::operands(self, inputs)
    }

    fn heap(&self, shapes: &IoShapes<'_>) -> usize {
        Movement::heap(self, shapes)
    }

    fn apply_bytes(
        &self,
        size: usize,
        io: &Io<'_>,
        from: &[&[u8]],
        to: &mut [Option<&mut [u8]>],
    ) -> Result<()> {
        // A movement sees elements only as bytes of a size, so types of equal size share code.
        match size {
            1 => self.apply::<[u8; 1]>(io, &cells(from)?, &mut cells_mut(to)?),
            2 => self.apply::<[u8; 2]>(io, &cells(from)?, &mut cells_mut(to)?),
            4 => self.apply::<[u8; 4]>(io, &cells(from)?, &mut cells_mut(to)?),
            8 => self.apply::<[u8; 8]>(io, &cells(from)?, &mut cells_mut(to)?),
            16 => self.apply::<[u8; 16]>(io, &cells(from)?, &mut cells_mut(to)?),
            _ => Err(error!(NotImplemented, "elements of {size} bytes are not moved")),
        }
    }

    fn apply_places(&self, io: &Io<'_>, from: &[&[Place]], to: &mut [Option<&mut [Place]>]) -> Result<()> {
        self.apply(io, from, to)
    }
}

/// The kernel of a movement for all types except strings.
struct Moving {
    movement: Box<dyn AnyMovement>,
    /// Whether sub-byte elements are unpacked to one byte each before the move.
    unpacks: bool,
}

/// The kernel of a movement for strings. It creates its own outputs.
struct MovingStrings {
    node: Node,
    movement: Box<dyn AnyMovement>,
}

fn moving(cx: &CompileCx<'_>, movement: Box<dyn AnyMovement>) -> Result<Box<dyn Executable>> {
    // A movement that keeps the order can move the bytes of packed elements.
    let is_packed = cx.node.output_dtype(0).is_some_and(|dtype| dtype.is_packed());
    let unpacks = is_packed && !movement.keeps_order();
    Ok(Box::new(Moving { movement, unpacks }))
}

fn moving_strings(cx: &CompileCx<'_>, movement: Box<dyn AnyMovement>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(MovingStrings { node: cx.node.node.clone(), movement }))
}

fn makes_strings(node: &NodeView<'_>) -> bool {
    node.output_dtype(0) == Some(ort_core::dtype::DType::String)
}

/// Registers a movement as the kernels of an operator, for all types.
macro_rules! movement {
    ($op:literal, $make:expr $(, $field:ident: $value:expr)* $(,)?) => {
        ort_cpu_kernel::cpu_kernels![
            ort_core::ep::KernelDef {
                op: $op,
                make: |cx| {
                    let movement: ort_core::Result<_> = $make(cx);
                    super::moving(cx, Box::new(movement?))
                },
                $($field: $value,)*
                ..ort_core::ep::KernelDef::BASE
            },
            ort_core::ep::KernelDef {
                op: $op,
                rank: 1,
                when: super::makes_strings,
                outputs: ort_core::ep::OutputsFrom::Kernel,
                make: |cx| {
                    let movement: ort_core::Result<_> = $make(cx);
                    super::moving_strings(cx, Box::new(movement?))
                },
                ..ort_core::ep::KernelDef::BASE
            },
        ];
    };
}
use movement;

fn cells<'a, T: Cell + bytemuck::Pod>(from: &[&'a [u8]]) -> Result<SmallVec<[&'a [T]; 8]>> {
    let elements = |bytes: &&'a [u8]| bytemuck::try_cast_slice(bytes).ok();
    let elements: Option<_> = from.iter().map(elements).collect();
    elements.ok_or_else(|| error!(Fail, "a tensor's bytes are no whole elements"))
}

fn cells_mut<'a, T: Cell + bytemuck::Pod>(
    to: &'a mut [Option<&mut [u8]>],
) -> Result<SmallVec<[Option<&'a mut [T]>; 4]>> {
    let elements = |bytes: &'a mut Option<&mut [u8]>| match bytes.as_deref_mut() {
        Some(bytes) => bytemuck::try_cast_slice_mut(bytes).ok().map(Some),
        None => Some(None),
    };
    let elements: Option<_> = to.iter_mut().map(elements).collect();
    elements.ok_or_else(|| error!(Fail, "an output's bytes are no whole elements"))
}

impl Executable for Moving {
    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let mut bytes = self.movement.heap(shapes);
        if self.unpacks {
            let operands = self.movement.operands(shapes.inputs.len()).into_iter();
            // Unpacking produces whole bytes of elements, so the count rounds up.
            let unpacked = |shape: &[usize]| (elements(shape) / 4 * 4).saturating_add(4);
            let moved = operands.map(|index| unpacked(shapes.input(index)));
            let made = shapes.outputs.iter().flatten().map(|shape| unpacked(shape));
            bytes = moved.chain(made).fold(bytes, usize::saturating_add);
        }
        Ok(tables(bytes))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let in_place = cx.in_place(0) == Some(0);
        let inputs: SmallVec<_> = (0..cx.input_count()).map(|index| cx.find_input(index)).collect();
        let mut io = Io { inputs, outputs: SmallVec::new(), in_place, threads: cx.threads() };
        let mut dtype = None;
        let mut from: SmallVec<[&[u8]; 8]> = SmallVec::new();
        // An operand that is in place is not passed; its elements are in the output.
        for index in self.movement.operands(cx.input_count()) {
            let view = io.find(index);
            dtype = dtype.or(view.map(|view| view.dtype()));
            from.push(view.map(|view| view.bytes()).transpose()?.unwrap_or(&[]));
        }
        let mut to: SmallVec<[Option<&mut [u8]>; 4]> = SmallVec::new();
        for index in 0..cx.output_count() {
            let output = if cx.wants(index) { Some(cx.output(index)?) } else { None };
            io.outputs.push(output.as_ref().map(|output| output.shape().into()));
            dtype = dtype.or(output.as_ref().map(|output| output.dtype()));
            to.push(output.map(|output| output.bytes_mut()).transpose()?);
        }
        // Without operands and outputs there is nothing to move.
        let Some(dtype) = dtype else { return Ok(()) };
        let movement = &*self.movement;
        match (dtype.byte_size(), dtype.bits()) {
            (Some(size), _) => movement.apply_bytes(size, &io, &from, &mut to),
            (None, Some(_)) if movement.keeps_order() => movement.apply_bytes(1, &io, &from, &mut to),
            (None, Some(bits @ (2 | 4))) => apply_unpacked(movement, &io, bits, &from, &mut to),
            _ => Err(error!(NotImplemented, "elements of type {} are not moved", dtype.name())),
        }
    }
}

/// Runs a movement on elements of 2 or 4 bits, unpacked to a byte each.
fn apply_unpacked(
    movement: &dyn AnyMovement,
    io: &Io<'_>,
    bits: u32,
    from: &[&[u8]],
    to: &mut [Option<&mut [u8]>],
) -> Result<()> {
    let unpacked: Vec<Vec<u8>> = from.iter().map(|bytes| unpack(bytes, bits)).collect();
    let counts = movement
        .operands(io.inputs.len())
        .into_iter()
        .map(|index| io.find(index).map_or(0, |view| view.element_count()));
    let from: Vec<&[u8]> =
        // Unpacking makes whole bytes of elements, so the padding is cut off here.
        unpacked.iter().zip(counts).map(|(cells, count)| &cells[..count.min(cells.len())]).collect();
    let mut outputs: Vec<Vec<u8>> = Vec::with_capacity(to.len());
    for (index, (shape, bytes)) in io.outputs.iter().zip(&*to).enumerate() {
        let count = shape.as_ref().map_or(0, |shape| shape.iter().product());
        // In place, the output's memory holds the elements of the first operand.
        let mut cells = match bytes {
            Some(bytes) if index == 0 && io.in_place => unpack(bytes, bits),
            _ => Vec::new(),
        };
        cells.resize(count, 0);
        outputs.push(cells);
    }
    let mut slots: Vec<Option<&mut [u8]>> =
        outputs.iter_mut().map(|cells| Some(cells.as_mut_slice())).collect();
    movement.apply_bytes(1, io, &from, &mut slots)?;
    for (cells, bytes) in outputs.iter().zip(to) {
        if let Some(bytes) = bytes {
            pack(cells, bits, bytes);
        }
    }
    Ok(())
}

impl Executable for MovingStrings {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let inputs: SmallVec<[Option<TensorView<'_>>; 8]> =
            (0..cx.input_count()).map(|index| cx.find_input(index)).collect();
        // Values of inputs decide some shapes, so inference gets the tensors and not only the
        // types.
        let facts: Vec<_> = inputs.iter().map(|view| view.map(InputFacts::concrete)).collect();
        // The kernel makes string outputs itself, so it infers their shapes from the inputs.
        let mut shapes: SmallVec<[Option<Shape>; 4]> = SmallVec::new();
        for output in infer_concrete(&self.node, &facts)? {
            shapes.push(output.and_then(|(_, shape)| shape));
        }
        let operands = self.movement.operands(cx.input_count()).into_iter();
        let given = operands.filter_map(|index| inputs.get(index).copied().flatten());
        let moved: usize = given.map(|view| view.element_count()).sum();
        let mut made = 0usize;
        for shape in shapes.iter().flatten() {
            made = made.saturating_add(ort_core::tensor::element_count(shape)?);
        }
        // A reference and an index for each input string, and an index for each output string.
        let bytes = moved.saturating_mul(2).saturating_add(made).saturating_mul(size_of::<usize>());
        // The strings themselves are counted when `cx.strings` clones them.
        let _tables = cx.reserve(bytes)?;
        // A place counts through the strings of all operands, in the order of the operands.
        let mut strings: Vec<&CompactString> = Vec::with_capacity(moved);
        let mut places: Vec<Vec<Place>> = Vec::new();
        for index in self.movement.operands(cx.input_count()) {
            let elements = inputs.get(index).copied().flatten().map(|view| view.strings()).transpose()?;
            let elements = elements.unwrap_or(&[]);
            places.push(spending(1, 0..elements.len()).map(|place| Place(strings.len() + place)).collect());
            strings.extend(spending(1, elements));
        }
        let io = Io { inputs, outputs: shapes, in_place: false, threads: 1 };
        let from: Vec<&[Place]> = places.iter().map(Vec::as_slice).collect();
        let mut moved: Vec<Vec<Place>> = Vec::new();
        for shape in &io.outputs {
            let shape = shape.as_ref().ok_or_else(|| error!(Fail, "an output's shape is not known"))?;
            moved.push(vec![Place::ZERO; ort_core::tensor::element_count(shape)?]);
        }
        let mut to: Vec<Option<&mut [Place]>> = moved.iter_mut().map(|cells| Some(&mut cells[..])).collect();
        self.movement.apply_places(&io, &from, &mut to)?;
        for (index, (places, shape)) in moved.iter().zip(&io.outputs).enumerate() {
            // `Place::ZERO` has no string, so padding becomes the empty string.
            let string = |place: &Place| strings.get(place.0).map(|text| (*text).clone()).unwrap_or_default();
            let shape = shape.as_deref().unwrap_or(&[]);
            let moved = cx.strings(shape, places.iter().map(string))?;
            cx.set(index, moved)?;
        }
        Ok(())
    }
}

/// Returns the single output of a movement.
fn only<'o, T>(to: &'o mut [Option<&mut [T]>]) -> Result<&'o mut [T]> {
    let output = to.first_mut().and_then(Option::as_deref_mut);
    output.ok_or_else(|| error!(Fail, "the output has no memory"))
}

/// Returns the operand at `index`, after checking its length against `shape`.
fn operand<'f, T>(from: &[&'f [T]], index: usize, shape: &[usize]) -> Result<&'f [T]> {
    let cells = from.get(index).copied().unwrap_or(&[]);
    let count: usize = shape.iter().product();
    ensure!(cells.len() == count, Fail, "an operand of {} elements has shape {shape:?}", cells.len());
    Ok(cells)
}
