//! Lowering of each instruction by its name (NVIDIA, "PTX ISA").

mod memory;
mod sync;

use super::{Builder, Call, NONE, Name, Op, Place, Space, Ty, bad};
use crate::Result;
use crate::alu;
use crate::convert::Cvt;
use crate::parse::{Num, Opd, Raw};
use crate::registers::{F1, F2};
use crate::warp::WarpOp;
use memory::{access, atomic, copy};
use sync::{barrier, bulk_copy, warp, warpgroup};

fn space(words: &[String]) -> Space {
    for word in words {
        match word.as_str() {
            "global" | "const" => return Space::Global,
            "shared" | "shared::cta" => return Space::Shared,
            "local" | "param" | "param::entry" | "param::func" => return Space::Local,
            _ => {}
        }
    }
    Space::Generic
}

/// The types among an instruction's words, in order.
fn types(raw: &Raw) -> Vec<Ty> {
    raw.words[1..].iter().filter_map(|w| Ty::parse(w)).collect()
}

fn unknown<T>(raw: &Raw) -> Result<T> {
    bad(format!("unknown instruction {}", raw.words.join(".")))
}

/// Lowers `raw`. `branch` is the guard of a `bra`, as predicate and the value on which it jumps.
#[allow(clippy::too_many_lines, reason = "one arm for each instruction of PTX")]
pub(crate) fn lower(b: &mut Builder, raw: &Raw, branch: Option<(u32, bool)>) -> Result<()> {
    let name = raw.words[0].as_str();
    let has = |word: &str| raw.words[1..].iter().any(|w| w == word);
    let tys = types(raw);
    let ty = tys.last().copied().unwrap_or(Ty::B32);
    let ops = &raw.operands;
    let count = |wanted: usize| {
        if ops.len() == wanted {
            Ok(())
        } else {
            bad(format!("{wanted} operands expected, found {}", ops.len()))
        }
    };
    match name {
        "bra" => {
            count(1)?;
            let Opd::Name(label) = &ops[0] else { return bad("a label expected") };
            b.branch(label);
            b.emit(match branch {
                Some((p, when)) => Op::BraIf { p, when, to: 0 },
                None => Op::Bra { to: 0 },
            });
        }
        "brx" => {
            count(2)?;
            let a = b.source(&ops[0], Ty::U32)?;
            let Opd::Name(label) = &ops[1] else { return bad("a label expected") };
            b.branch(label);
            b.emit(Op::BraTable { a, table: 0 });
        }
        "ret" => b.emit(Op::Ret),
        "exit" => b.emit(Op::Exit),
        "trap" => b.emit(Op::Trap),
        "fence" if has("proxy") && has("async") => b.emit(Op::ProxyFence),
        // The interpreter runs the accesses of a thread in order, so memory fences and hints have
        // no effect.
        "membar" | "fence" | "prefetch" | "prefetchu" | "nanosleep" | "brkpt" | "pmevent"
        | "griddepcontrol" | "setmaxnreg" | "applypriority" | "discard" => {
            b.emit(Op::Nothing);
        }
        "call" => return call(b, raw),
        "mov" => return mov(b, raw, ty),
        "cvta" => {
            count(2)?;
            let a = b.source(&ops[1], Ty::B64)?;
            let d = b.destination(&ops[0])?.0;
            let f: F1 = match (space(&raw.words), has("to")) {
                (Space::Shared, false) => &|x: u64| crate::exec::SHARED_WINDOW | (x & 0xFFFF_FFFF),
                (Space::Local, false) => &|x: u64| crate::exec::LOCAL_WINDOW | (x & 0xFFFF_FFFF),
                (Space::Shared | Space::Local, true) => &|x: u64| x & 0xFFFF_FFFF,
                _ => &|x: u64| x,
            };
            b.emit(Op::F1 { f, d, a });
        }
        "isspacep" => {
            count(2)?;
            let a = b.source(&ops[1], Ty::B64)?;
            let d = b.destination(&ops[0])?.0;
            let f: F1 = match space(&raw.words) {
                Space::Shared => &|x: u64| u64::from(x >> 56 == crate::exec::SHARED_WINDOW >> 56),
                Space::Local => &|x: u64| u64::from(x >> 56 == crate::exec::LOCAL_WINDOW >> 56),
                _ => &|x: u64| u64::from(x >> 57 != crate::exec::SHARED_WINDOW >> 57),
            };
            b.emit(Op::F1 { f, d, a });
        }
        "ld" | "ldu" | "st" => return access(b, raw, ty),
        "cvt" => return cvt(b, raw, &tys),
        "setp" | "set" => return compare(b, raw, &tys),
        "selp" => {
            count(4)?;
            let (x, y, p) = (b.source(&ops[1], ty)?, b.source(&ops[2], ty)?, b.source(&ops[3], Ty::Pred)?);
            let d = b.destination(&ops[0])?.0;
            b.emit(Op::Select { d, a: x, b: y, p });
        }
        "slct" => {
            count(4)?;
            let (x, y, c) = (b.source(&ops[1], tys[0])?, b.source(&ops[2], tys[0])?, b.source(&ops[3], ty)?);
            let (d, zero, p) = (b.destination(&ops[0])?.0, b.constant(0), b.temporary(0));
            let Some(f) = alu::compare("ge", ty) else { return unknown(raw) };
            b.emit(Op::F2 { f, d: p, a: c, b: zero });
            b.emit(Op::Select { d, a: x, b: y, p });
        }
        "testp" => {
            count(2)?;
            let a = b.source(&ops[1], ty)?;
            let d = b.destination(&ops[0])?.0;
            let Some(f) = alu::test(&raw.words[1], ty) else { return unknown(raw) };
            b.emit(Op::F1 { f, d, a });
        }
        "add" | "sub" | "addc" | "subc" if has("cc") || name.ends_with('c') => {
            count(3)?;
            let (x, y) = (b.source(&ops[1], ty)?, b.source(&ops[2], ty)?);
            let d = b.destination(&ops[0])?.0;
            let (subtract, wide) = (name.starts_with("sub"), ty.bits() == 64);
            b.emit(Op::Carry { subtract, wide, with: name.ends_with('c'), out: has("cc"), d, a: x, b: y });
        }
        "bar" | "barrier" => {
            if has("warp") {
                let mask = b.source(&ops[0], Ty::B32)?;
                b.warp(WarpOp::Sync { mask });
            } else if has("sync") {
                let id = b.source(ops.first().unwrap_or(&Opd::Num(Num::Int(0))), Ty::U32)?;
                let threads = if ops.len() > 1 { b.source(&ops[1], Ty::U32)? } else { NONE };
                b.emit(Op::Barrier { id, count: threads });
            } else {
                return unknown(raw);
            }
        }
        "shfl" | "vote" | "activemask" | "redux" | "ldmatrix" | "stmatrix" | "mma" | "match" => {
            return warp(b, raw, ty);
        }
        "wgmma" => return warpgroup(b, raw),
        "atom" | "red" => return atomic(b, raw, ty),
        "cp" if has("bulk") => return bulk_copy(b, raw),
        "cp" => return copy(b, raw),
        "mbarrier" => return barrier(b, raw),
        "dp4a" => {
            count(4)?;
            let s = (b.source(&ops[1], Ty::B32)?, b.source(&ops[2], Ty::B32)?, b.source(&ops[3], Ty::B32)?);
            let d = b.destination(&ops[0])?.0;
            let f = alu::dot4(tys.first() == Some(&Ty::S32), ty == Ty::S32);
            b.emit(Op::F3 { f, d, a: s.0, b: s.1, c: s.2 });
        }
        _ => return arithmetic(b, raw, ty),
    }
    Ok(())
}

fn arithmetic(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
    let (name, ops) = (raw.words[0].as_str(), &raw.operands);
    let has = |word: &str| raw.words[1..].iter().any(|w| w == word);
    let how = ["lo", "hi", "wide", "NaN"].into_iter().find(|w| has(w)).unwrap_or("");
    let mode = ["rn", "rz", "rm", "rp"].iter().position(|w| has(w)).unwrap_or(0) as u8;
    if mode != 0 && ty != Ty::F32 || has("xorsign") || has("shiftamt") && name != "bfind" {
        return unknown(raw);
    }
    if ops.len() < 2 {
        return unknown(raw);
    }
    let flush = has("ftz") && ty == Ty::F32;
    let mut s = Vec::new();
    for (at, operand) in ops[1..].iter().enumerate() {
        // Shift counts and bit-field positions are 32-bit.
        let of = match (name, at) {
            ("shl" | "shr" | "bfe", 1..) | ("bfi", 2..) => Ty::U32,
            ("mad", 2) if how == "wide" => Ty::B64,
            _ => ty,
        };
        let mut slot = b.source(operand, of)?;
        if flush && let Some(f) = alu::unary("flush", Ty::F32) {
            let d = b.temporary(at);
            b.emit(Op::F1 { f, d, a: slot });
            slot = d;
        }
        s.push(slot);
    }
    let d = b.destination(&ops[0])?.0;
    let done = match (name, s.as_slice()) {
        ("fma" | "mad", &[x, y, c]) if mode != 0 => {
            alu::rounded_fma(mode).map(|f| Op::F3 { f, d, a: x, b: y, c })
        }
        ("rcp" | "sqrt", &[x]) if mode != 0 => {
            let one = b.constant(1f32.to_bits().into());
            if name == "sqrt" {
                None
            } else {
                alu::rounded("div", mode).map(|f| Op::F2 { f, d, a: one, b: x })
            }
        }
        ("bfind", &[x]) if has("shiftamt") => {
            let f: F1 = match ty {
                Ty::U32 => &|a: u64| u64::from((a as u32).leading_zeros()),
                Ty::U64 => &|a: u64| u64::from(a.leading_zeros()),
                _ => return unknown(raw),
            };
            Some(Op::F1 { f, d, a: x })
        }
        // Names internal to this file, which are no PTX instructions.
        ("saturate" | "flush" | "pack16" | "pack32" | "select" | "relu", _) => None,
        (_, &[x]) => alu::unary(name, ty).map(|f| Op::F1 { f, d, a: x }),
        (_, &[x, y]) if mode != 0 => alu::rounded(name, mode).map(|f| Op::F2 { f, d, a: x, b: y }),
        ("add" | "sub", &[x, y]) if has("sat") && ty == Ty::S32 => {
            let f: F2 = if name == "add" {
                &|a: u64, b: u64| u64::from((a as i32).saturating_add(b as i32) as u32)
            } else {
                &|a: u64, b: u64| u64::from((a as i32).saturating_sub(b as i32) as u32)
            };
            b.emit(Op::F2 { f, d, a: x, b: y });
            return Ok(());
        }
        (_, &[x, y]) => alu::binary(name, how, ty).map(|f| Op::F2 { f, d, a: x, b: y }),
        ("shf", &[x, y, c]) if ty == Ty::B32 => {
            alu::ternary(&raw.words[..3].join("."), "", ty).map(|f| Op::F3 { f, d, a: x, b: y, c })
        }
        ("prmt", &[..]) if raw.words.len() > 2 => None,
        (_, &[x, y, c]) => alu::ternary(name, how, ty).map(|f| Op::F3 { f, d, a: x, b: y, c }),
        (_, &[x, y, c, e]) => alu::quaternary(name, ty).map(|f| Op::F4 { f, d, a: x, b: y, c, e }),
        _ => None,
    };
    let Some(op) = done else { return unknown(raw) };
    b.emit(op);
    for (wanted, name) in [(has("sat"), "saturate"), (has("relu"), "relu"), (flush, "flush")] {
        if wanted {
            let Some(f) = alu::unary(name, ty) else { return unknown(raw) };
            b.emit(Op::F1 { f, d, a: d });
        }
    }
    Ok(())
}

fn mov(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
    let [to, from] = raw.operands.as_slice() else { return unknown(raw) };
    match (to, from) {
        (Opd::Vector(parts), from) => {
            let a = b.source(from, ty)?;
            let step = ty.bits() / parts.len().max(1) as u32;
            let f: F1 = if step == 32 { &|x: u64| x & 0xFFFF_FFFF } else { &|x: u64| x & 0xFFFF };
            let Some(shift) = alu::binary("shr", "", Ty::U64) else { return unknown(raw) };
            let moved = b.temporary(0);
            for (at, part) in parts.iter().enumerate() {
                if matches!(part, Opd::Name(name) if name == "_") {
                    continue;
                }
                let by = b.constant(at as u64 * u64::from(step));
                b.emit(Op::F2 { f: shift, d: moved, a, b: by });
                let d = b.destination(part)?.0;
                b.emit(Op::F1 { f, d, a: moved });
            }
        }
        (to, Opd::Vector(parts)) => {
            let step = ty.bits() / parts.len().max(1) as u32;
            let part = if step == 32 { Ty::B32 } else { Ty::B16 };
            let mut s = parts.iter().map(|p| b.source(p, part)).collect::<Result<Vec<_>>>()?;
            let (Some(narrow), Some(wide)) = (alu::binary("pack16", "", ty), alu::binary("pack32", "", ty))
            else {
                return unknown(raw);
            };
            if s.len() == 4 {
                let (low, high) = (b.temporary(0), b.temporary(1));
                b.emit(Op::F2 { f: narrow, d: low, a: s[0], b: s[1] });
                b.emit(Op::F2 { f: narrow, d: high, a: s[2], b: s[3] });
                s = vec![low, high];
            }
            let &[x, y] = s.as_slice() else { return unknown(raw) };
            let d = b.destination(to)?.0;
            b.emit(Op::F2 { f: if ty.bits() == 64 { wide } else { narrow }, d, a: x, b: y });
        }
        (to, Opd::Name(name)) if name.starts_with("%clock") || name.starts_with("%globaltimer") => {
            let d = b.destination(to)?.0;
            b.emit(Op::Clock { d });
        }
        (to, from) => {
            let a = b.source(from, ty)?;
            let d = b.destination(to)?.0;
            b.emit(Op::Mov { d, a });
        }
    }
    Ok(())
}

fn cvt(b: &mut Builder, raw: &Raw, tys: &[Ty]) -> Result<()> {
    let has = |word: &str| raw.words[1..].iter().any(|w| w == word);
    let &[to, from] = tys else { return unknown(raw) };
    let round = ["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"].iter().position(|w| has(w));
    let (saturate, relu) = (has("sat") || has("satfinite"), has("relu"));
    if has("satfinite") {
        return unknown(raw);
    }
    let (d, width) = b.destination(&raw.operands[0])?;
    let mut how =
        Cvt { to, from, round: round.unwrap_or(0) as u8, saturate, relu, width: width.bits() as u8 };
    if matches!(to, Ty::F16x2 | Ty::Bf16x2) {
        let [_, high, low] = raw.operands.as_slice() else { return unknown(raw) };
        how.to = if to == Ty::F16x2 { Ty::F16 } else { Ty::Bf16 };
        how.width = 16;
        let (x, y) = (b.source(high, from)?, b.source(low, from)?);
        let (s, t) = (b.temporary(0), b.temporary(1));
        b.emit(Op::Cvt { d: s, a: x, how });
        b.emit(Op::Cvt { d: t, a: y, how });
        let Some(f) = alu::binary("pack16", "", Ty::B32) else { return unknown(raw) };
        b.emit(Op::F2 { f, d, a: t, b: s });
        return Ok(());
    }
    if raw.operands.len() != 2 {
        return unknown(raw);
    }
    let mut a = b.source(&raw.operands[1], from)?;
    let flush = alu::unary("flush", Ty::F32).filter(|_| has("ftz"));
    if let (Ty::F32, Some(f)) = (from, flush) {
        let t = b.temporary(0);
        b.emit(Op::F1 { f, d: t, a });
        a = t;
    }
    // The most frequent conversions have functions of their own.
    let plain = !saturate && !relu;
    let quick: Option<F1> = match (to, from, how.width) {
        (Ty::S64, Ty::S32, 64) if plain => Some(&|x: u64| i64::from(x as i32) as u64),
        (Ty::U64 | Ty::S64, Ty::U32, 64) | (Ty::U32 | Ty::S32, Ty::U64 | Ty::S64, 32) if plain => {
            Some(&|x: u64| x & 0xFFFF_FFFF)
        }
        (Ty::F32, Ty::F16, _) if plain && round.is_none() => {
            Some(&|x: u64| u64::from(half::f16::from_bits(x as u16).to_f32().to_bits()))
        }
        (Ty::F32, Ty::Bf16, _) if plain && round.is_none() => Some(&|x: u64| (x & 0xFFFF) << 16),
        (Ty::F32, Ty::S32, _) if round == Some(0) && plain => {
            Some(&|x: u64| u64::from((x as i32 as f32).to_bits()))
        }
        (Ty::F32, Ty::U32, _) if round == Some(0) && plain => {
            Some(&|x: u64| u64::from((x as u32 as f32).to_bits()))
        }
        _ => None,
    };
    b.emit(match quick {
        Some(f) => Op::F1 { f, d, a },
        None => Op::Cvt { d, a, how },
    });
    if let (Ty::F32, Some(f)) = (to, flush) {
        b.emit(Op::F1 { f, d, a: d });
    }
    Ok(())
}

fn compare(b: &mut Builder, raw: &Raw, tys: &[Ty]) -> Result<()> {
    let has = |word: &str| raw.words[1..].iter().any(|w| w == word);
    let (Some(&ty), Some(how)) = (tys.last(), raw.words.get(1)) else { return unknown(raw) };
    let [to, x, y, rest @ ..] = raw.operands.as_slice() else { return unknown(raw) };
    let (mut x, mut y) = (b.source(x, ty)?, b.source(y, ty)?);
    if has("ftz")
        && ty == Ty::F32
        && let Some(f) = alu::unary("flush", ty)
    {
        let (s, t) = (b.temporary(0), b.temporary(1));
        b.emit(Op::F1 { f, d: s, a: x });
        b.emit(Op::F1 { f, d: t, a: y });
        (x, y) = (s, t);
    }
    let Some(f) = alu::compare(how, ty) else { return unknown(raw) };
    let with = match rest {
        [c] => {
            let Some(name) = ["and", "or", "xor"].into_iter().find(|w| has(w)) else { return unknown(raw) };
            let Some(f) = alu::binary(name, "", Ty::Pred) else { return unknown(raw) };
            Some((f, b.source(c, Ty::Pred)?))
        }
        [] => None,
        _ => return unknown(raw),
    };
    if raw.words[0] == "set" {
        let p = b.temporary(2);
        b.emit(Op::F2 { f, d: p, a: x, b: y });
        if let Some((f, c)) = with {
            b.emit(Op::F2 { f, d: p, a: p, b: c });
        }
        let (yes, no) = (if tys[0] == Ty::F32 { 0x3F80_0000 } else { 0xFFFF_FFFF }, b.constant(0));
        let (yes, d) = (b.constant(yes), b.destination(to)?.0);
        b.emit(Op::Select { d, a: yes, b: no, p });
        return Ok(());
    }
    let (d, second) = match to {
        Opd::Pair(p, q) => {
            (b.destination(&Opd::Name(p.clone()))?.0, Some(b.destination(&Opd::Name(q.clone()))?.0))
        }
        other => (b.destination(other)?.0, None),
    };
    // The comparison goes to a temporary first, because a destination may also be the predicate
    // that is combined.
    let p = if with.is_some() || second.is_some() { b.temporary(2) } else { d };
    b.emit(Op::F2 { f, d: p, a: x, b: y });
    let mut c = NONE;
    if let Some((_, slot)) = with {
        c = b.temporary(3);
        b.emit(Op::Mov { d: c, a: slot });
    }
    for (d, not) in [(Some(d), false), (second, true)] {
        let Some(d) = d.filter(|d| *d != p) else { continue };
        let mut from = p;
        if not && let Some(f) = alu::unary("not", Ty::Pred) {
            from = b.temporary(4);
            b.emit(Op::F1 { f, d: from, a: p });
        }
        b.emit(match with {
            Some((f, _)) => Op::F2 { f, d, a: from, b: c },
            None => Op::Mov { d, a: from },
        });
    }
    Ok(())
}

fn call(b: &mut Builder, raw: &Raw) -> Result<()> {
    let mut place = |operand: &Opd| match operand {
        Opd::Name(name) => match b.find(name).cloned() {
            Some(Name::Local(offset)) => Ok(Place::Local(offset)),
            Some(Name::Reg(slot, _)) => Ok(Place::Slot(slot)),
            _ => bad(format!("unknown argument {name}")),
        },
        number => Ok(Place::Slot(b.source(number, Ty::B64)?)),
    };
    let mut all = |list: &[Opd]| list.iter().map(&mut place).collect::<Result<Vec<_>>>();
    let (results, name, arguments) = match raw.operands.as_slice() {
        [Opd::Group(results), Opd::Name(name), Opd::Group(arguments)] => {
            (all(results)?, name, all(arguments)?)
        }
        [Opd::Group(results), Opd::Name(name)] => (all(results)?, name, Vec::new()),
        [Opd::Name(name), Opd::Group(arguments)] => (Vec::new(), name, all(arguments)?),
        [Opd::Name(name)] => (Vec::new(), name, Vec::new()),
        _ => return unknown(raw),
    };
    b.call(Call { name: name.clone(), target: 0, arguments, results });
    Ok(())
}
