//! Scan outputs: tensors of one shape, joined in memory that grows.

use ort_alloc::Reservation;
use ort_core::dtype::{DType, packed};
use ort_core::ep::{NewTensor, RunCx};
use ort_core::tensor::{CompactString, Shape, Tensor, TensorView, byte_count, element_count};
use ort_core::{Result, ensure, error};

use ort_cpu_threads::interrupt::{PIECE, pieces, pieces_mut, spend_text, spending};

/// The tensors that the iterations of a loop produce, joined along a new leading dimension.
pub(super) struct Stack {
    /// The number of tensors to allocate at once, if it is known.
    expected: Option<usize>,
    /// Whether the tensors are joined last first.
    reversed: bool,
    count: usize,
    item: Option<(DType, Shape)>,
    items: Items,
    /// Memory-budget reservations for strings and packed elements, which are in ordinary vectors.
    held: Vec<Reservation>,
}

enum Items {
    None,
    Numbers {
        memory: NewTensor,
        capacity: usize,
    },
    Strings(Vec<CompactString>),
    /// Packed elements, one to a byte until all are there, because a tensor rarely ends at a whole
    /// byte.
    Unpacked(Vec<u8>),
}

impl Stack {
    /// Creates an empty stack that will hold `expected` tensors.
    pub(super) fn new(expected: Option<usize>) -> Stack {
        Stack { expected, reversed: false, count: 0, item: None, items: Items::None, held: Vec::new() }
    }

    /// Creates an empty stack of exactly `count` tensors, joined in order or last first.
    pub(super) fn exactly(count: usize, reversed: bool) -> Stack {
        Stack { reversed, ..Stack::new(Some(count)) }
    }

    /// Adds a tensor, which must have the type and shape of those before.
    pub(super) fn push(&mut self, cx: &RunCx<'_>, tensor: &TensorView<'_>) -> Result<()> {
        match &self.item {
            None => self.item = Some((tensor.dtype(), tensor.shape().into())),
            Some((dtype, shape)) => ensure!(
                *dtype == tensor.dtype() && shape.as_slice() == tensor.shape(),
                RuntimeException,
                "an iteration gives a {} tensor of shape {:?}, one before gave {} of {shape:?}",
                tensor.dtype().name(),
                tensor.shape(),
                dtype.name()
            ),
        }
        if tensor.dtype() == DType::String {
            return self.push_strings(cx, tensor);
        }
        if tensor.dtype().is_packed() {
            return self.push_unpacked(cx, tensor);
        }
        self.reserve(cx, tensor)?;
        let Items::Numbers { memory, capacity } = &mut self.items else {
            return Err(error!(Fail, "a stack has no memory"));
        };
        let place = if self.reversed { capacity.checked_sub(self.count + 1) } else { Some(self.count) };
        let place = place.ok_or_else(|| error!(Fail, "a stack is full"))?;
        cx.write(tensor, memory, place * byte_count(tensor.dtype(), tensor.shape())?)?;
        self.count += 1;
        Ok(())
    }

    fn push_strings(&mut self, cx: &RunCx<'_>, tensor: &TensorView<'_>) -> Result<()> {
        let strings = tensor.strings()?;
        let texts = spending(2, strings).fold(0, |sum: usize, text| sum.saturating_add(text.len() + 32));
        // Twice the headers, because the vector may double when it grows.
        self.held
            .push(cx.reserve(texts.saturating_add((strings.len() + 1) * 2 * size_of::<CompactString>()))?);
        if !matches!(self.items, Items::Strings(_)) {
            self.items = Items::Strings(Vec::new());
        }
        if let Items::Strings(all) = &mut self.items {
            // In reverse, each tensor goes before those already there.
            let at = if self.reversed { 0 } else { all.len() };
            all.splice(at..at, strings.iter().inspect(|text| spend_text(text)).cloned());
        }
        self.count += 1;
        Ok(())
    }

    fn push_unpacked(&mut self, cx: &RunCx<'_>, tensor: &TensorView<'_>) -> Result<()> {
        self.held.push(cx.reserve(2 * tensor.element_count() + size_of::<Reservation>())?);
        let elements = unpacked(tensor)?;
        if !matches!(self.items, Items::Unpacked(_)) {
            self.items = Items::Unpacked(Vec::new());
        }
        if let Items::Unpacked(all) = &mut self.items {
            let at = if self.reversed { 0 } else { all.len() };
            all.splice(at..at, elements);
        }
        self.count += 1;
        Ok(())
    }

    /// Makes room for one more tensor: for all at once if their number is known, else for twice as
    /// many.
    fn reserve(&mut self, cx: &RunCx<'_>, tensor: &TensorView<'_>) -> Result<()> {
        // Taken out, so that the old memory can be copied and freed.
        let (old, capacity) = match std::mem::replace(&mut self.items, Items::None) {
            Items::Numbers { memory, capacity } if self.count < capacity => {
                self.items = Items::Numbers { memory, capacity };
                return Ok(());
            }
            Items::Numbers { memory, capacity } => (Some(memory), capacity),
            _ => (None, 0),
        };
        let capacity = match self.expected {
            Some(expected) => expected.max(self.count + 1),
            None => (capacity * 2).max(4),
        };
        let shape = with_leading(capacity, tensor.shape());
        // In the memory of the tensor, so that device values stay on their device.
        let mut memory = cx.allocate_in(tensor.memory(), tensor.dtype(), &shape)?;
        if let Some(old) = old {
            cx.write(&old.first(&with_leading(self.count, tensor.shape()))?, &mut memory, 0)?;
        }
        self.items = Items::Numbers { memory, capacity };
        Ok(())
    }

    /// Returns the joined tensor. `empty` returns the type and shape of the items if there are
    /// none.
    pub(super) fn finish(self, cx: &RunCx<'_>, empty: impl FnOnce() -> (DType, Shape)) -> Result<Tensor> {
        let (dtype, shape) = self.item.clone().unwrap_or_else(empty);
        let shape = with_leading(self.count, &shape);
        match self.items {
            Items::Strings(strings) => {
                // Released first, because `cx.strings` counts the strings again.
                drop(self.held);
                cx.strings(&shape, strings)
            }
            Items::Unpacked(elements) => repacked(dtype, &shape, &elements),
            Items::Numbers { memory, capacity } if capacity == self.count => memory.finish(),
            // Spare capacity must not outlive the loop, so the tensors are copied to exact memory.
            Items::Numbers { memory, .. } => {
                let mut exact = cx.allocate_in(memory.memory(), dtype, &shape)?;
                cx.write(&memory.first(&shape)?, &mut exact, 0)?;
                exact.finish()
            }
            Items::None if dtype == DType::String => {
                cx.strings(&shape, std::iter::repeat_n("", element_count(&shape)?))
            }
            Items::None => cx.allocate(dtype, &shape)?.finish(),
        }
    }
}

/// Unpacks the elements of a packed tensor, one to a byte.
pub(super) fn unpacked(tensor: &TensorView<'_>) -> Result<Vec<u8>> {
    let (bytes, bits) = (tensor.bytes()?, tensor.dtype().bits().unwrap_or(8));
    let mut elements = vec![0; tensor.element_count()];
    for (elements, bytes) in pieces_mut(&mut elements).zip(bytes.chunks(PIECE * bits as usize / 8)) {
        packed::unpack(bytes, bits, elements);
    }
    Ok(elements)
}

/// Packs elements that are given one to a byte.
pub(super) fn repacked(dtype: DType, shape: &[usize], elements: &[u8]) -> Result<Tensor> {
    let (mut bytes, bits) = (vec![0; byte_count(dtype, shape)?], dtype.bits().unwrap_or(8));
    for (elements, bytes) in pieces(elements).zip(bytes.chunks_mut(PIECE * bits as usize / 8)) {
        packed::pack(elements, bits, bytes);
    }
    Tensor::from_bytes(dtype, shape, bytes.into())
}

fn with_leading(count: usize, shape: &[usize]) -> Shape {
    std::iter::once(count).chain(shape.iter().copied()).collect()
}
