//! Shared parts of the fake libraries: stream-ordered work, numbers in device memory, and faults.

use std::sync::Arc;

use half::{bf16, f16};

use super::queue::{Op, ask, fails, held};
use super::{Done, Handle, current};
use crate::{Fault, code};

/// A library call's work on device memory, executed in stream order.
pub(super) struct Routine {
    /// Address and bytes of all memory that it reads or writes. The work does not start unless all
    /// of it is live.
    pub(super) memory: Vec<(u64, usize)>,
    pub(super) work: Box<dyn Fn() + Send + Sync>,
    /// The simulated time in microseconds.
    pub(super) time: u64,
}

/// Queues work on a stream.
pub(super) fn ask_routine(stream: Handle, routine: Routine) -> Done {
    ask(current()?, stream, Op::Routine(Arc::new(routine)))
}

/// Executes work whose turn has come.
pub(super) fn perform(routine: &Routine) -> Done {
    routine.memory.iter().try_for_each(|(address, bytes)| held(*address, *bytes, "a library's call"))?;
    (routine.work)();
    Ok(())
}

/// Raises a fault, which breaks the context, if an address is misaligned.
pub(super) fn misaligned(what: &str, address: u64, by: u64) -> Done {
    if address.is_multiple_of(by) {
        return Ok(());
    }
    let message = format!("{what} at {address:#x} is not at a multiple of {by}");
    Err(fails(&Fault::new(code::MISALIGNED_ADDRESS, message)))
}

/// The element types that the libraries support.
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

    /// Reads an element of memory that the caller looked up.
    pub(super) fn read(self, address: u64, index: usize) -> f64 {
        let address = address + (index * self.bytes()) as u64;
        // SAFETY: `perform` checked that the memory of the routine is live, and the libraries
        // require tensors aligned to their elements.
        unsafe {
            match self {
                Element::F32 => f64::from(*(address as *const f32)),
                Element::F64 => *(address as *const f64),
                Element::F16 => f16::from_bits(*(address as *const u16)).to_f64(),
                Element::Bf16 => bf16::from_bits(*(address as *const u16)).to_f64(),
            }
        }
    }

    /// Writes an element of memory that the caller looked up.
    pub(super) fn write(self, address: u64, index: usize, value: f64) {
        let address = address + (index * self.bytes()) as u64;
        // SAFETY: as in `read`.
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

/// Rounds a number to TF32, with 10 fraction bits, as tensor cores read float32.
pub(super) fn short(value: f64) -> f64 {
    f64::from(f32::from_bits((value as f32).to_bits().wrapping_add(0x1000) & !0x1FFF))
}

/// Overwrites scratch memory, so that a program which passes other memory for it notices.
pub(super) fn scribble(address: u64, bytes: usize) {
    if bytes > 0 {
        // SAFETY: `perform` checked that the memory of the routine is live.
        unsafe { (address as *mut u8).write_bytes(0xFF, bytes) };
    }
}
