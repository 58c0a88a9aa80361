//! Lowering of loads, stores, atomics and asynchronous copies.

use super::{space, unknown};
use crate::Result;
use crate::alu;
use crate::convert::Cvt;
use crate::decode::{Builder, NONE, Op, Ty};
use crate::parse::{Num, Opd, Raw};
use crate::registers::F2;
use crate::warp::Atom;

pub(super) fn access(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
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
    // A load sign-extends to the width of its register.
    for (d, width) in d {
        if ty.is_signed() && width.bits() > ty.bits() {
            let how =
                Cvt { to: ty, from: ty, round: 0, saturate: false, relu: false, width: width.bits() as u8 };
            b.emit(Op::Cvt { d, a: d, how });
        }
    }
    Ok(())
}

pub(super) fn atomic(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
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
    let f: Option<F2> = match how {
        // The exchange of `cas` needs no function: `Atom::run` stores the new value itself.
        "exch" => Some(&|_: u64, b: u64| b),
        "cas" => Some(&|a: u64, _: u64| a),
        // `inc` wraps to zero at the bound. `dec` wraps to the bound at zero, or from above it.
        "inc" => Some(&|a: u64, b: u64| if a as u32 >= b as u32 { 0 } else { a + 1 }),
        "dec" => Some(&|a: u64, b: u64| if a == 0 || a as u32 > b as u32 { b } else { a - 1 }),
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

pub(super) fn copy(b: &mut Builder, raw: &Raw) -> Result<()> {
    let has = |word: &str| raw.words[1..].iter().any(|w| w == word);
    if raw.words.get(1).is_none_or(|w| w != "async") || has("mbarrier") {
        return unknown(raw);
    }
    // Copies run at once, so there is nothing to commit or to wait for.
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
