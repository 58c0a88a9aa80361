//! Lowers parsed instructions to operations on numbered slots (NVIDIA, "PTX ISA").
//!
//! A function's slots hold its special registers, its literals and its registers alike, so that
//! operands need no case distinction.

use std::collections::HashMap;

use crate::alu;
use crate::bulk::Bulk;
use crate::convert::Cvt;
use crate::parse::{Num, Opd, Raw};
use crate::registers::{F1, F2, F3, F4};
use crate::warp::{Atom, WarpOp};
use crate::{Fault, Result, code};

/// The types of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[rustfmt::skip]
pub(crate) enum Ty {
    Pred, B8, U8, S8, B16, U16, S16, B32, U32, S32, B64, U64, S64, F16, Bf16, F16x2, Bf16x2, F32, F64, Tf32,
}

/// The kinds of types.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Untyped bits and integers.
    Int,
    /// Floating point.
    Float,
}

impl Ty {
    #[rustfmt::skip]
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "pred" => Ty::Pred, "b8" => Ty::B8, "u8" => Ty::U8, "s8" => Ty::S8, "b16" => Ty::B16, "u16" => Ty::U16,
            "s16" => Ty::S16, "b32" => Ty::B32, "u32" => Ty::U32, "s32" => Ty::S32, "b64" => Ty::B64,
            "u64" => Ty::U64, "s64" => Ty::S64, "f16" => Ty::F16, "bf16" => Ty::Bf16, "f16x2" => Ty::F16x2,
            "bf16x2" => Ty::Bf16x2, "f32" => Ty::F32, "f64" => Ty::F64, "tf32" => Ty::Tf32,
            _ => return None,
        })
    }

    pub(crate) fn bits(self) -> u32 {
        match self {
            Ty::Pred => 1,
            Ty::B8 | Ty::U8 | Ty::S8 => 8,
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 16,
            Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => 64,
            _ => 32,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        (self.bits() as usize).div_ceil(8)
    }

    pub(crate) fn kind(self) -> Kind {
        match self {
            Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 | Ty::F32 | Ty::F64 | Ty::Tf32 => Kind::Float,
            _ => Kind::Int,
        }
    }

    pub(crate) fn is_int(self) -> bool {
        self.kind() == Kind::Int && self != Ty::Pred
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    /// The untyped bits of the same width.
    pub(crate) fn signless(self) -> Self {
        match self.bits() {
            1 => Ty::Pred,
            8 => Ty::B8,
            16 => Ty::B16,
            64 => Ty::B64,
            _ => Ty::B32,
        }
    }

    /// Returns the bits of a literal of this type.
    pub(crate) fn literal(self, number: Num) -> u64 {
        let bits = match (self, number) {
            (Ty::F64, Num::F32(v)) => f64::from(f32::from_bits(v)).to_bits(),
            (Ty::F32, Num::F64(v)) => u64::from((f64::from_bits(v) as f32).to_bits()),
            (_, Num::Int(v)) => v,
            (_, Num::F32(v)) => u64::from(v),
            (_, Num::F64(v)) => v,
        };
        if self.bits() == 64 { bits } else { bits & ((1 << self.bits()) - 1) }
    }
}

/// What a name refers to.
#[derive(Clone, Debug)]
pub(crate) enum Name {
    /// A register: its slot and type.
    Reg(u32, Ty),
    /// The index of a module variable.
    Global(usize),
    /// An offset in shared memory.
    Shared(u64),
    /// Dynamic shared memory, whose size the launch sets.
    Dynamic,
    /// An offset in the thread's local memory.
    Local(u64),
}

/// The state space of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    Local,
    Generic,
}

/// An operation of the interpreter.
#[derive(Clone, Copy)]
#[rustfmt::skip]
pub(crate) enum Op {
    Mov { d: u32, a: u32 },
    F1 { f: F1, d: u32, a: u32 },
    F2 { f: F2, d: u32, a: u32, b: u32 },
    F3 { f: F3, d: u32, a: u32, b: u32, c: u32 },
    F4 { f: F4, d: u32, a: u32, b: u32, c: u32, e: u32 },
    Select { d: u32, a: u32, b: u32, p: u32 },
    Cvt { d: u32, a: u32, how: Cvt },
    Carry { subtract: bool, wide: bool, with: bool, out: bool, d: u32, a: u32, b: u32 },
    Clock { d: u32 },
    Active { d: u32 },
    /// Skips the next operation if the predicate equals `when`.
    Skip { p: u32, when: bool },
    Bra { to: u32 },
    BraIf { p: u32, when: bool, to: u32 },
    BraTable { a: u32, table: u32 },
    Load { space: Space, log: u8, d: u32, base: u32, offset: i32 },
    Store { space: Space, log: u8, a: u32, base: u32, offset: i32 },
    LoadMany { space: Space, log: u8, count: u8, list: u32, base: u32, offset: i32 },
    StoreMany { space: Space, log: u8, count: u8, list: u32, base: u32, offset: i32 },
    Copy { to: u32, from: u32, to_offset: i32, from_offset: i32, size: u8, real: u32 },
    Atomic { number: u32 },
    Warp { number: u32 },
    Barrier { id: u32, count: u32 },
    Bulk { number: u32 },
    Call { number: u32 },
    Ret,
    Exit,
    Trap,
    /// A proxy fence, which orders a thread's writes before reads of `wgmma` through the async
    /// proxy.
    ProxyFence,
    Nothing,
}

impl Op {
    /// Whether a thread goes on with the next operation, whatever other threads do.
    pub(crate) fn stays(&self) -> bool {
        use Op::*;
        !matches!(
            self,
            Skip { .. }
                | Bra { .. }
                | BraIf { .. }
                | BraTable { .. }
                | Warp { .. }
                | Barrier { .. }
                | Bulk { .. }
                | Call { .. }
                | Ret
                | Exit
                | Trap
        )
    }
}

/// The slot number of an absent operand.
pub(crate) const NONE: u32 = u32::MAX;

/// The special registers, in the first slots of every function.
pub(crate) mod special {
    /// `%tid`, `%ntid`, `%ctaid`, `%nctaid`: three slots each.
    pub(crate) const TID: usize = 0;
    pub(crate) const LANE: usize = 12;
    pub(crate) const WARP: usize = 13;
    /// `%lanemask_eq`, `le`, `lt`, `ge`, `gt`.
    pub(crate) const MASKS: usize = 14;
    pub(crate) const DYNAMIC: usize = 19;
    pub(crate) const LOCAL: usize = 20;
    pub(crate) const DYNAMIC_SIZE: usize = 21;
    pub(crate) const COUNT: usize = 22;
}

/// A call site.
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) target: usize,
    pub(crate) arguments: Vec<Place>,
    pub(crate) results: Vec<Place>,
}

/// The location of an argument in a function's frame.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Slot(u32),
    Local(u64),
}

/// A kernel or a device function.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) entry: bool,
    pub(crate) code: Vec<Op>,
    pub(crate) lines: Vec<u32>,
    /// The initial values of the slots.
    pub(crate) template: Vec<u64>,
    pub(crate) local: usize,
    pub(crate) shared: usize,
    /// The alignment of dynamic shared memory.
    pub(crate) dynamic_align: usize,
    pub(crate) max_threads: u32,
    /// Location and size of each parameter and result.
    pub(crate) formals: Vec<(Place, usize)>,
    pub(crate) returns: Vec<(Place, usize)>,
    pub(crate) lists: Vec<[u32; 4]>,
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) atoms: Vec<Atom>,
    pub(crate) bulks: Vec<Bulk>,
    pub(crate) warps: Vec<WarpOp>,
    pub(crate) calls: Vec<Call>,
}

/// Builds one function.
pub(crate) struct Builder {
    scopes: Vec<HashMap<String, Name>>,
    globals: Vec<u64>,
    literals: HashMap<u64, u32>,
    temporaries: Vec<u32>,
    f: Function,
    labels: HashMap<String, u32>,
    fixes: Vec<(usize, String, u32)>,
    tables: Vec<(String, Vec<String>)>,
    line: u32,
}

pub(crate) fn bad<T>(what: impl Into<String>) -> Result<T> {
    Err(Fault::new(code::INVALID_PTX, what))
}

impl Builder {
    pub(crate) fn new(names: HashMap<String, Name>, globals: Vec<u64>) -> Self {
        let f = Function {
            name: String::new(),
            entry: false,
            code: Vec::new(),
            lines: Vec::new(),
            // The special registers come first. A launch fills them for each thread.
            template: vec![0; special::COUNT],
            local: 0,
            shared: 0,
            dynamic_align: 16,
            max_threads: 0,
            formals: Vec::new(),
            returns: Vec::new(),
            lists: Vec::new(),
            tables: Vec::new(),
            atoms: Vec::new(),
            bulks: Vec::new(),
            warps: Vec::new(),
            calls: Vec::new(),
        };
        Self {
            scopes: vec![names, HashMap::new()],
            globals,
            literals: HashMap::new(),
            temporaries: Vec::new(),
            f,
            labels: HashMap::new(),
            fixes: Vec::new(),
            tables: Vec::new(),
            line: 0,
        }
    }

    /// Allocates a register, initialised to all ones.
    pub(crate) fn register(&mut self, ty: Ty) -> u32 {
        // All ones are a NaN in a floating-point register, so a read before a write shows.
        self.f.template.push(if ty.bits() == 64 { !0 } else { (1 << ty.bits()) - 1 });
        self.f.template.len() as u32 - 1
    }

    /// Allocates local memory.
    pub(crate) fn local(&mut self, size: usize, align: usize) -> u64 {
        let at = self.f.local.next_multiple_of(align.max(1));
        self.f.local = at + size;
        at as u64
    }

    pub(crate) fn bind(&mut self, name: &str, value: Name) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_owned(), value);
        }
    }

    pub(crate) fn open(&mut self) {
        self.scopes.push(HashMap::new());
    }

    pub(crate) fn close(&mut self) {
        self.scopes.pop();
    }

    /// Defines a label here; returns whether it is new.
    pub(crate) fn label(&mut self, name: &str) -> bool {
        self.labels.insert(name.to_owned(), self.f.code.len() as u32).is_none()
    }

    pub(crate) fn targets(&mut self, name: &str, labels: Vec<String>) {
        self.tables.push((name.to_owned(), labels));
    }

    pub(crate) fn emit(&mut self, op: Op) {
        self.f.code.push(op);
        self.f.lines.push(self.line);
    }

    pub(crate) fn constant(&mut self, bits: u64) -> u32 {
        if let Some(slot) = self.literals.get(&bits) {
            return *slot;
        }
        self.f.template.push(bits);
        let slot = self.f.template.len() as u32 - 1;
        self.literals.insert(bits, slot);
        slot
    }

    /// Returns the temporary slot of this number.
    pub(crate) fn temporary(&mut self, number: usize) -> u32 {
        while self.temporaries.len() <= number {
            self.f.template.push(0);
            self.temporaries.push(self.f.template.len() as u32 - 1);
        }
        self.temporaries[number]
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Name> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name))
    }

    fn special(name: &str) -> Option<usize> {
        let axis = |name: &str| match name {
            "x" => Some(0),
            "y" => Some(1),
            "z" => Some(2),
            _ => None,
        };
        if let Some((base, component)) = name.split_once('.') {
            let start = match base {
                "%tid" => 0,
                "%ntid" => 3,
                "%ctaid" => 6,
                "%nctaid" => 9,
                _ => return None,
            };
            return Some(special::TID + start + axis(component)?);
        }
        Some(match name {
            "%laneid" => special::LANE,
            "%warpid" => special::WARP,
            "%lanemask_eq" => special::MASKS,
            "%lanemask_le" => special::MASKS + 1,
            "%lanemask_lt" => special::MASKS + 2,
            "%lanemask_ge" => special::MASKS + 3,
            "%lanemask_gt" => special::MASKS + 4,
            "%dynamic_smem_size" => special::DYNAMIC_SIZE,
            _ => return None,
        })
    }

    /// Returns the slot of a source operand.
    pub(crate) fn source(&mut self, operand: &Opd, ty: Ty) -> Result<u32> {
        match operand {
            Opd::Num(number) => Ok(self.constant(ty.literal(*number))),
            Opd::Name(name) => {
                if let Some(Name::Reg(slot, _)) = self.find(name) {
                    return Ok(*slot);
                }
                if let Some(slot) = Self::special(name) {
                    return Ok(slot as u32);
                }
                if name == "WARP_SZ" {
                    return Ok(self.constant(32));
                }
                // Not modelled, so they read as 0.
                if ["%smid", "%gridid", "%nsmid", "%nwarpid"].contains(&name.as_str()) {
                    return Ok(self.constant(0));
                }
                let (base, offset) = self.variable(name)?;
                // Only local and dynamic shared variables start at a special register. Other slots
                // hold the whole address.
                if base as usize >= special::COUNT {
                    return Ok(base);
                }
                if offset == 0 {
                    return Ok(base);
                }
                let (d, b) = (self.temporary(9), self.constant(offset as u64));
                let Some(f) = alu::binary("add", "", Ty::U64) else { return bad("no add") };
                self.emit(Op::F2 { f, d, a: base, b });
                Ok(d)
            }
            Opd::Not(name) => {
                let a = self.source(&Opd::Name(name.clone()), Ty::Pred)?;
                let (d, b) = (self.temporary(10), self.constant(1));
                let Some(f) = alu::binary("xor", "", Ty::Pred) else { return bad("no xor") };
                self.emit(Op::F2 { f, d, a, b });
                Ok(d)
            }
            other => bad(format!("a register or a number expected, found {other:?}")),
        }
    }

    /// Returns a variable's address as slot and offset.
    fn variable(&mut self, name: &str) -> Result<(u32, i64)> {
        match self.find(name).cloned() {
            Some(Name::Reg(slot, _)) => Ok((slot, 0)),
            Some(Name::Global(number)) => {
                let address = self.globals.get(number).copied().unwrap_or(0);
                Ok((self.constant(address), 0))
            }
            Some(Name::Shared(offset)) => Ok((self.constant(offset), 0)),
            Some(Name::Dynamic) => Ok((special::DYNAMIC as u32, 0)),
            Some(Name::Local(offset)) => Ok((special::LOCAL as u32, offset as i64)),
            None => bad(format!("unknown name {name}")),
        }
    }

    /// Returns slot and offset of `[base + offset]`.
    pub(crate) fn address(&mut self, operand: &Opd) -> Result<(u32, i32)> {
        let Opd::Address(base, offset) = operand else {
            return bad(format!("an address expected, found {operand:?}"));
        };
        let (slot, more) = match &**base {
            Opd::Name(name) => self.variable(name)?,
            Opd::Num(Num::Int(value)) => (self.constant(*value), 0),
            other => return bad(format!("an address of {other:?}")),
        };
        match i32::try_from(offset + more) {
            Ok(offset) => Ok((slot, offset)),
            Err(_) => bad("an offset beyond 32 bits"),
        }
    }

    /// Returns the slot and type of a destination; `_` is a temporary.
    pub(crate) fn destination(&mut self, operand: &Opd) -> Result<(u32, Ty)> {
        match operand {
            Opd::Name(name) if name == "_" => Ok((self.temporary(11), Ty::B64)),
            Opd::Name(name) => match self.find(name) {
                Some(Name::Reg(slot, ty)) => Ok((*slot, *ty)),
                _ => bad(format!("unknown register {name}")),
            },
            other => bad(format!("a register expected, found {other:?}")),
        }
    }

    pub(crate) fn list(&mut self, slots: &[u32]) -> u32 {
        self.f.lists.push(std::array::from_fn(|k| slots.get(k).copied().unwrap_or(NONE)));
        self.f.lists.len() as u32 - 1
    }

    pub(crate) fn warp(&mut self, op: WarpOp) {
        self.f.warps.push(op);
        self.emit(Op::Warp { number: self.f.warps.len() as u32 - 1 });
    }

    pub(crate) fn atom(&mut self, atom: Atom) {
        self.f.atoms.push(atom);
        self.emit(Op::Atomic { number: self.f.atoms.len() as u32 - 1 });
    }

    pub(crate) fn bulk(&mut self, bulk: Bulk) {
        self.f.bulks.push(bulk);
        self.emit(Op::Bulk { number: self.f.bulks.len() as u32 - 1 });
    }

    pub(crate) fn call(&mut self, call: Call) {
        self.f.calls.push(call);
        self.emit(Op::Call { number: self.f.calls.len() as u32 - 1 });
    }

    pub(crate) fn branch(&mut self, label: &str) {
        self.fixes.push((self.f.code.len(), label.to_owned(), self.line));
    }

    /// Lowers one instruction with its guard.
    pub(crate) fn instruction(&mut self, raw: &Raw) -> Result<()> {
        self.line = raw.line;
        let Some((guard, not)) = &raw.guard else { return crate::decode::lower(self, raw, None) };
        let p = self.source(&Opd::Name(guard.clone()), Ty::Pred)?;
        if raw.words[0] == "bra" {
            return crate::decode::lower(self, raw, Some((p, !not)));
        }
        // The guard jumps over the operations that the instruction expands to.
        let at = self.f.code.len();
        self.emit(Op::Nothing);
        crate::decode::lower(self, raw, None)?;
        let end = self.f.code.len();
        self.f.code[at] = if end == at + 2 {
            Op::Skip { p, when: *not }
        } else {
            Op::BraIf { p, when: *not, to: end as u32 }
        };
        Ok(())
    }

    pub(crate) fn finish(
        mut self,
        name: String,
        entry: bool,
        returns: Vec<(Name, Ty, usize)>,
        formals: Vec<(Name, Ty, usize)>,
    ) -> Result<Function> {
        // A body may end without `ret` or `exit`, but the interpreter must not run past its end.
        self.emit(if entry { Op::Exit } else { Op::Ret });
        // Labels are resolved last, because branches may go forward.
        for (at, label, line) in std::mem::take(&mut self.fixes) {
            let find = |label: &str| match self.labels.get(label) {
                Some(to) => Ok(*to),
                None => bad(format!("line {line}: unknown label {label}")),
            };
            let table = self.tables.iter().find(|t| t.0 == label).map(|t| t.1.clone());
            match &mut self.f.code[at] {
                Op::Bra { to } | Op::BraIf { to, .. } => *to = find(&label)?,
                Op::BraTable { table: number, .. } => {
                    let Some(labels) = table else { return bad(format!("line {line}: unknown {label}")) };
                    *number = self.f.tables.len() as u32;
                    let targets = labels.iter().map(|l| find(l)).collect::<Result<Vec<_>>>()?;
                    self.f.tables.push(targets);
                }
                _ => {}
            }
        }
        let place = |(name, _, size): (Name, Ty, usize)| match name {
            Name::Reg(slot, _) => (Place::Slot(slot), size),
            Name::Local(offset) => (Place::Local(offset), size),
            // The parser makes parameters either registers or local variables.
            _ => (Place::Local(0), 0),
        };
        // The frames of calls are stacked in local memory, so each must keep the alignment of the
        // next.
        self.f.local = self.f.local.next_multiple_of(16);
        self.f.returns = returns.into_iter().map(place).collect();
        self.f.formals = formals.into_iter().map(place).collect();
        self.f.name = name;
        self.f.entry = entry;
        Ok(self.f)
    }
}

/// Resolves the targets of calls.
pub(crate) fn link(functions: &mut [Function]) -> Result<()> {
    let names: HashMap<String, usize> =
        functions.iter().enumerate().map(|(at, f)| (f.name.clone(), at)).collect();
    for at in 0..functions.len() {
        for call in 0..functions[at].calls.len() {
            let site = &functions[at].calls[call];
            let Some(target) = names.get(&site.name) else {
                return bad(format!("{}: unknown function {}", functions[at].name, site.name));
            };
            let callee = &functions[*target];
            if callee.formals.len() != site.arguments.len() || callee.returns.len() != site.results.len() {
                return bad(format!("{}: other arguments than {} has", functions[at].name, site.name));
            }
            functions[at].calls[call].target = *target;
        }
    }
    Ok(())
}

mod lower;
pub(crate) use lower::lower;
