//! What the stand-ins for NVIDIA's libraries share: work in the order of a stream, numbers in the
//! device's memory, and statuses.

use std::sync::Arc;

use half::{bf16, f16};

use super::queue::{Op, ask, fails, held};
use super::{Done, Handle, current};
use crate::{Fault, code};

/// What a library does with the device's memory, once its turn in the stream comes.
pub(super) struct Routine {
    /// Start and bytes of what it reads or writes; none of it is touched where some is not
    /// allocated.
    pub(super) memory: Vec<(u64, usize)>,
    pub(super) work: Box<dyn Fn() + Send + Sync>,
    /// The microseconds that it is said to take.
    pub(super) time: u64,
}

/// Asks a stream for some work.
pub(super) fn ask_routine(stream: Handle, routine: Routine) -> Done {
    ask(current()?, stream, Op::Routine(Arc::new(routine)))
}

/// Does some work now that its turn has come.
pub(super) fn perform(routine: &Routine) -> Done {
    routine.memory.iter().try_for_each(|(address, bytes)| held(*address, *bytes, "a library's call"))?;
    (routine.work)();
    Ok(())
}

/// A fault of what a library was asked for, which breaks the context.
pub(super) fn misaligned(what: &str, address: u64, by: u64) -> Done {
    if address.is_multiple_of(by) {
        return Ok(());
    }
    let message = format!("{what} at {address:#x} is not at a multiple of {by}");
    Err(fails(&Fault::new(code::MISALIGNED_ADDRESS, message)))
}

/// The types of elements that the libraries compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F64,
    F16,
    Bf16,
}

impl Element {
    pub(super) fn bytes(self) -> usize {
        match self {
            Element::F64 => 8,
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
        }
    }

    /// The element at a place of memory that was looked up.
    pub(super) fn read(self, address: u64, index: usize) -> f64 {
        let address = address + (index * self.bytes()) as u64;
        // SAFETY: the caller has looked the memory up, and tensors begin at multiples of their
        // elements' bytes.
        unsafe {
            match self {
                Element::F32 => f64::from(*(address as *const f32)),
                Element::F64 => *(address as *const f64),
                Element::F16 => f16::from_bits(*(address as *const u16)).to_f64(),
                Element::Bf16 => bf16::from_bits(*(address as *const u16)).to_f64(),
            }
        }
    }

    /// The same, to be written.
    pub(super) fn write(self, address: u64, index: usize, value: f64) {
        let address = address + (index * self.bytes()) as u64;
        // SAFETY: as above.
        unsafe {
            match self {
                Element::F32 => *(address as *mut f32) = value as f32,
                Element::F64 => *(address as *mut f64) = value,
                Element::F16 => *(address as *mut u16) = f16::from_f64(value).to_bits(),
                Element::Bf16 => *(address as *mut u16) = bf16::from_f64(value).to_bits(),
            }
        }
    }
}

/// A number as tensor cores read it where float32 may be shortened: 10 bits of fraction.
pub(super) fn short(value: f64) -> f64 {
    f64::from(f32::from_bits((value as f32).to_bits().wrapping_add(0x1000) & !0x1FFF))
}

/// Scratch memory is written all over, so that who takes something else for it finds that out.
pub(super) fn scribble(address: u64, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller has looked the memory up.
        unsafe { (address as *mut u8).write_bytes(0xFF, bytes) };
    }
}
