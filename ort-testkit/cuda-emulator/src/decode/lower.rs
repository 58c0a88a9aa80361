//! What each instruction turns into, by its name (NVIDIA, "PTX ISA").

use super::{Builder, Call, NONE, Name, Op, Place, Space, Ty, bad};
use crate::Result;
use crate::alu::{self, F1};
use crate::bulk::{Bulk, BulkOp};
use crate::convert::Cvt;
use crate::parse::{Num, Opd, Raw};
use crate::warp::{Atom, Element, Mma, Shuffle, WarpOp};
use crate::warpgroup::{GroupOp, Product};

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

/// The last type and its words.
fn types(raw: &Raw) -> Vec<Ty> {
    raw.words[1..].iter().filter_map(|w| Ty::parse(w)).collect()
}

fn unknown<T>(raw: &Raw) -> Result<T> {
    bad(format!("unknown instruction {}", raw.words.join(".")))
}

/// Emits `raw`; `branch`: the guard of a `bra`.
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
                (Space::Shared, false) => |x| crate::exec::SHARED_WINDOW | (x & 0xFFFF_FFFF),
                (Space::Local, false) => |x| crate::exec::LOCAL_WINDOW | (x & 0xFFFF_FFFF),
                (Space::Shared | Space::Local, true) => |x| x & 0xFFFF_FFFF,
                _ => |x| x,
            };
            b.emit(Op::F1 { f, d, a });
        }
        "isspacep" => {
            count(2)?;
            let a = b.source(&ops[1], Ty::B64)?;
            let d = b.destination(&ops[0])?.0;
            let f: F1 = match space(&raw.words) {
                Space::Shared => |x| u64::from(x >> 56 == crate::exec::SHARED_WINDOW >> 56),
                Space::Local => |x| u64::from(x >> 56 == crate::exec::LOCAL_WINDOW >> 56),
                _ => |x| u64::from(x >> 57 != crate::exec::SHARED_WINDOW >> 57),
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
        // Shifts and fields are counted by 32-bit numbers.
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
        ("add", &[x, y]) if ty.is_int() && ty.bits() == 32 && !has("sat") => {
            Some(Op::Add32 { d, a: x, b: y })
        }
        ("add", &[x, y]) if ty.is_int() && ty.bits() == 64 => Some(Op::Add64 { d, a: x, b: y }),
        ("add", &[x, y]) if ty == Ty::F32 && mode == 0 => Some(Op::AddF { d, a: x, b: y }),
        ("mul", &[x, y]) if ty == Ty::F32 && mode == 0 => Some(Op::MulF { d, a: x, b: y }),
        ("mul", &[x, y]) if ty == Ty::S32 && how == "wide" => Some(Op::Wide { d, a: x, b: y }),
        ("and", &[x, y]) if ty == Ty::B32 => Some(Op::And32 { d, a: x, b: y }),
        ("mad", &[x, y, c]) if how == "lo" && ty.bits() == 32 => Some(Op::Mad32 { d, a: x, b: y, c }),
        ("fma" | "mad", &[x, y, c]) if ty == Ty::F32 && mode == 0 => Some(Op::FmaF { d, a: x, b: y, c }),
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
                Ty::U32 => |a| u64::from((a as u32).leading_zeros()),
                Ty::U64 => |a| u64::from(a.leading_zeros()),
                _ => return unknown(raw),
            };
            Some(Op::F1 { f, d, a: x })
        }
        ("saturate" | "flush" | "pack16" | "pack32" | "select" | "relu", _) => None,
        (_, &[x]) => alu::unary(name, ty).map(|f| Op::F1 { f, d, a: x }),
        (_, &[x, y]) if mode != 0 => alu::rounded(name, mode).map(|f| Op::F2 { f, d, a: x, b: y }),
        ("add" | "sub", &[x, y]) if has("sat") && ty == Ty::S32 => {
            let f: alu::F2 = if name == "add" {
                |a, b| u64::from((a as i32).saturating_add(b as i32) as u32)
            } else {
                |a, b| u64::from((a as i32).saturating_sub(b as i32) as u32)
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
            let f: F1 = if step == 32 { |x| x & 0xFFFF_FFFF } else { |x| x & 0xFFFF };
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

fn access(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
    let load = raw.words[0] != "st";
    let [x, y] = raw.operands.as_slice() else { return unknown(raw) };
    let (value, at) = if load { (x, y) } else { (y, x) };
    let space = space(&raw.words);
    let (base, offset) = b.address(at)?;
    let log = ty.bytes().trailing_zeros() as u8;
    let one = [value.clone()];
    let values = if let Opd::Vector(values) = value { values.as_slice() } else { &one };
    if values.len() > 4 {
        return unknown(raw);
    }
    if !load {
        let s = values.iter().map(|v| b.source(v, ty)).collect::<Result<Vec<_>>>()?;
        if let [a] = s[..] {
            b.emit(Op::Store { space, log, a, base, offset });
        } else {
            let list = b.list(&s);
            b.emit(Op::StoreMany { space, log, count: s.len() as u8, list, base, offset });
        }
        return Ok(());
    }
    let d = values.iter().map(|v| b.destination(v)).collect::<Result<Vec<_>>>()?;
    if let [(d, _)] = d[..] {
        b.emit(Op::Load { space, log, d, base, offset });
    } else {
        let list = b.list(&d.iter().map(|d| d.0).collect::<Vec<_>>());
        b.emit(Op::LoadMany { space, log, count: d.len() as u8, list, base, offset });
    }
    for (d, width) in d {
        if ty.is_signed() && width.bits() > ty.bits() {
            let how =
                Cvt { to: ty, from: ty, round: 0, saturate: false, relu: false, width: width.bits() as u8 };
            b.emit(Op::Cvt { d, a: d, how });
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
    // The most frequent ones have their own functions.
    let plain = !saturate && !relu;
    let quick: Option<F1> = match (to, from, how.width) {
        (Ty::S64, Ty::S32, 64) if plain => Some(|x| i64::from(x as i32) as u64),
        (Ty::U64 | Ty::S64, Ty::U32, 64) | (Ty::U32 | Ty::S32, Ty::U64 | Ty::S64, 32) if plain => {
            Some(|x| x & 0xFFFF_FFFF)
        }
        (Ty::F32, Ty::F16, _) if plain && round.is_none() => {
            Some(|x| u64::from(half::f16::from_bits(x as u16).to_f32().to_bits()))
        }
        (Ty::F32, Ty::Bf16, _) if plain && round.is_none() => Some(|x| (x & 0xFFFF) << 16),
        (Ty::F32, Ty::S32, _) if round == Some(0) && plain => {
            Some(|x| u64::from((x as i32 as f32).to_bits()))
        }
        (Ty::F32, Ty::U32, _) if round == Some(0) && plain => {
            Some(|x| u64::from((x as u32 as f32).to_bits()))
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
    // To a temporary: a destination may be what is combined.
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

fn atomic(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
    let mut ops = raw.operands.as_slice();
    let mut d = NONE;
    if raw.words[0] == "atom" {
        let [first, rest @ ..] = ops else { return unknown(raw) };
        (d, ops) = (b.destination(first)?.0, rest);
    }
    let [at, values @ ..] = ops else { return unknown(raw) };
    let (base, offset) = b.address(at)?;
    let how = ["add", "min", "max", "cas", "exch", "and", "or", "xor", "inc", "dec"];
    let Some(how) = how.into_iter().find(|w| raw.words.iter().any(|r| r == w)) else { return unknown(raw) };
    let s = values.iter().map(|v| b.source(v, ty)).collect::<Result<Vec<_>>>()?;
    let f: Option<alu::F2> = match how {
        "exch" => Some(|_, b| b),
        "cas" => Some(|a, _| a),
        "inc" => Some(|a, b| if a as u32 >= b as u32 { 0 } else { a + 1 }),
        "dec" => Some(|a, b| if a == 0 || a as u32 > b as u32 { b } else { a - 1 }),
        _ => alu::binary(how, "", ty),
    };
    let (Some(f), Some(value)) = (f, s.first()) else { return unknown(raw) };
    let (compare, value) = match (how, s.get(1)) {
        ("cas", Some(new)) => (*value, *new),
        ("cas", None) => return unknown(raw),
        _ => (NONE, *value),
    };
    let log = ty.bytes().trailing_zeros() as u8;
    b.atom(Atom { f, log, space: space(&raw.words), d, base, offset, value, compare });
    Ok(())
}

fn copy(b: &mut Builder, raw: &Raw) -> Result<()> {
    let has = |word: &str| raw.words[1..].iter().any(|w| w == word);
    if raw.words.get(1).is_none_or(|w| w != "async") || has("mbarrier") {
        return unknown(raw);
    }
    if has("commit_group") || has("wait_group") || has("wait_all") {
        b.emit(Op::Nothing);
        return Ok(());
    }
    let [to, from, Opd::Num(Num::Int(size)), rest @ ..] = raw.operands.as_slice() else {
        return unknown(raw);
    };
    let ((to, to_offset), (from, from_offset)) = (b.address(to)?, b.address(from)?);
    let real = if let Some(real) = rest.first() { b.source(real, Ty::U32)? } else { NONE };
    if ![4, 8, 16].contains(size) {
        return unknown(raw);
    }
    b.emit(Op::Copy { to, from, to_offset, from_offset, size: *size as u8, real });
    Ok(())
}

fn barrier(b: &mut Builder, raw: &Raw) -> Result<()> {
    let words: Vec<&str> = raw.words[1..].iter().map(String::as_str).collect();
    let [words @ .., "shared" | "shared::cta", "b64"] = words.as_slice() else { return unknown(raw) };
    let is_dropped = |state: &Opd| matches!(state, Opd::Name(name) if name == "_");
    let (op, at) = match (words, raw.operands.as_slice()) {
        (["init"], [at, count]) => (BulkOp::Init { count: b.source(count, Ty::U32)? }, at),
        (["arrive"], [state, at]) if is_dropped(state) => (BulkOp::Arrive { bytes: None }, at),
        (["arrive", "expect_tx"], [state, at, bytes]) if is_dropped(state) => {
            (BulkOp::Arrive { bytes: Some(b.source(bytes, Ty::U32)?) }, at)
        }
        (["try_wait", "parity"], [d, at, parity]) => {
            let parity = b.source(parity, Ty::U32)?;
            (BulkOp::TryWait { d: b.destination(d)?.0, parity }, at)
        }
        _ => return unknown(raw),
    };
    let barrier = b.address(at)?;
    b.bulk(Bulk { op, barrier });
    Ok(())
}

fn bulk_copy(b: &mut Builder, raw: &Raw) -> Result<()> {
    let words: Vec<&str> = raw.words[1..].iter().map(String::as_str).collect();
    let ["async", "bulk", "tensor", rank, "shared::cluster", "global", "mbarrier::complete_tx::bytes"] =
        words.as_slice()
    else {
        return unknown(raw);
    };
    let [to, Opd::Tensor(map, at), barrier] = raw.operands.as_slice() else { return unknown(raw) };
    if *rank != format!("{}d", at.len()) {
        return bad("other coordinates than the copy's rank");
    }
    let (to, barrier) = (b.address(to)?, b.address(barrier)?);
    let map = b.address(&Opd::Address(map.clone(), 0))?;
    let at = at.iter().map(|at| b.source(at, Ty::S32)).collect::<Result<Vec<_>>>()?;
    b.bulk(Bulk { op: BulkOp::Copy { to, map, at }, barrier });
    Ok(())
}

fn warp(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
    let has = |word: &str| raw.words[1..].iter().any(|w| w == word);
    let ops = raw.operands.as_slice();
    match (raw.words[0].as_str(), ops) {
        ("activemask", [d]) => {
            let d = b.destination(d)?.0;
            b.emit(Op::Active { d });
        }
        ("shfl", [to, a, lane, clamp, mask]) if has("sync") => {
            let (d, p) = match to {
                Opd::Pair(d, p) => {
                    (b.destination(&Opd::Name(d.clone()))?.0, b.destination(&Opd::Name(p.clone()))?.0)
                }
                other => (b.destination(other)?.0, NONE),
            };
            let how = match () {
                () if has("up") => Shuffle::Up,
                () if has("down") => Shuffle::Down,
                () if has("bfly") => Shuffle::Butterfly,
                () => Shuffle::Index,
            };
            let (a, lane, clamp) =
                (b.source(a, Ty::B32)?, b.source(lane, Ty::B32)?, b.source(clamp, Ty::B32)?);
            let mask = b.source(mask, Ty::B32)?;
            b.warp(WarpOp::Shuffle { how, d, p, a, lane, clamp, mask });
        }
        ("vote", [d, a, mask]) if has("sync") => {
            let (a, mask) = (b.source(a, Ty::Pred)?, b.source(mask, Ty::B32)?);
            let d = b.destination(d)?.0;
            let how = ["all", "any", "uni", "ballot"].iter().position(|w| has(w)).unwrap_or(0) as u8;
            b.warp(WarpOp::Vote { how, d, a, mask });
        }
        ("redux", [d, a, mask]) => {
            let how = ["add", "min", "max", "and", "or", "xor"].into_iter().find(|w| has(w)).unwrap_or("");
            let Some(f) = alu::binary(how, "", ty) else { return unknown(raw) };
            let (a, mask) = (b.source(a, ty)?, b.source(mask, Ty::B32)?);
            let d = b.destination(d)?.0;
            b.warp(WarpOp::Reduce { f, d, a, mask });
        }
        ("ldmatrix", [d, at]) if has("m8n8") && has("b16") => {
            let one = [d.clone()];
            let list = if let Opd::Vector(list) = d { list.as_slice() } else { &one };
            let d = list.iter().map(|d| Ok(b.destination(d)?.0)).collect::<Result<Vec<_>>>()?;
            let (base, offset) = b.address(at)?;
            let generic = space(&raw.words) == Space::Generic;
            b.warp(WarpOp::Matrix { d, transpose: has("trans"), base, offset, generic });
        }
        ("stmatrix", [at, a]) if has("m8n8") && has("b16") => {
            let one = [a.clone()];
            let list = if let Opd::Vector(list) = a { list.as_slice() } else { &one };
            let a = list.iter().map(|a| b.source(a, Ty::B32)).collect::<Result<Vec<_>>>()?;
            let (base, offset) = b.address(at)?;
            let generic = space(&raw.words) == Space::Generic;
            b.warp(WarpOp::StoreMatrix { a, transpose: has("trans"), base, offset, generic });
        }
        ("mma", [d, x, y, c]) => {
            let shape = ["m16n8k16", "m16n8k8", "m16n8k32", "m16n8k4", "m8n8k4"].into_iter().find(|w| has(w));
            let tys = types(raw);
            let formats: Vec<&str> = raw.words.iter().rev().take(4).map(String::as_str).collect();
            let Some(kind) = Mma::find(shape.unwrap_or(""), &formats) else { return unknown(raw) };
            let _ = tys;
            let lists = [d, x, y, c].map(|operand| {
                let one = [operand.clone()];
                let list = if let Opd::Vector(list) = operand { list.clone() } else { one.to_vec() };
                list.iter().map(|v| b.source(v, Ty::B32)).collect::<Result<Vec<_>>>()
            });
            let [d, x, y, c] = lists;
            b.warp(WarpOp::Multiply { kind, d: d?, a: x?, b: y?, c: c? });
        }
        _ => return unknown(raw),
    }
    Ok(())
}

fn warpgroup(b: &mut Builder, raw: &Raw) -> Result<()> {
    let words: Vec<&str> = raw.words[1..].iter().map(String::as_str).collect();
    let op = match (words.as_slice(), raw.operands.as_slice()) {
        (["fence", "sync", "aligned"], []) => GroupOp::Fence,
        (["commit_group", "sync", "aligned"], []) => GroupOp::Commit,
        (["wait_group", "sync", "aligned"], [Opd::Num(Num::Int(left))]) => GroupOp::Wait(*left),
        (["mma_async", "sync", "aligned", shape, "f32", x, y], [Opd::Vector(d), sides @ ..]) if x == y => {
            let element = match *x {
                "f16" => Element::F16,
                "bf16" => Element::Bf16,
                _ => return unknown(raw),
            };
            let columns = shape.strip_prefix("m64n").and_then(|rest| rest.strip_suffix("k16"));
            let is_full = columns.and_then(|columns| columns.parse().ok()) == Some(2 * d.len());
            let [left, right, adds, scales_and_turns @ ..] = sides else { return unknown(raw) };
            let [scale_a, scale_b, turn_a, turn_b] = scales_and_turns else { return unknown(raw) };
            if !is_full || !(4..=128).contains(&d.len()) || d.len() % 4 != 0 {
                return unknown(raw);
            }
            let flag = |operand: &Opd, no: u64, yes: u64| match operand {
                Opd::Num(Num::Int(value)) if [no, yes].contains(value) => Ok(*value == yes),
                _ => bad("an immediate of a product is not one of its two"),
            };
            let minus = 1u64.wrapping_neg();
            let negative = [flag(scale_a, 1, minus)?, flag(scale_b, 1, minus)?];
            let across = [flag(turn_a, 0, 1)?, flag(turn_b, 0, 1)?];
            let sides = [b.source(left, Ty::B64)?, b.source(right, Ty::B64)?];
            let adds = b.source(adds, Ty::Pred)?;
            let d = d.iter().map(|d| Ok(b.destination(d)?.0)).collect::<Result<Vec<_>>>()?;
            GroupOp::Multiply(Product { element, d, sides, adds, negative, across })
        }
        _ => return unknown(raw),
    };
    b.warp(WarpOp::Group(op));
    Ok(())
}
