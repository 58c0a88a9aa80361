//! Lowering of operations on several threads: barriers, bulk copies, and operations of a warp or a
//! warpgroup.

use super::{space, types, unknown};
use crate::Result;
use crate::alu;
use crate::bulk::{Bulk, BulkOp};
use crate::decode::{Builder, NONE, Op, Space, Ty, bad};
use crate::parse::{Num, Opd, Raw};
use crate::warp::{Element, Mma, Shuffle, WarpOp};
use crate::warpgroup::{GroupOp, Product};

pub(super) fn barrier(b: &mut Builder, raw: &Raw) -> Result<()> {
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

pub(super) fn bulk_copy(b: &mut Builder, raw: &Raw) -> Result<()> {
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

pub(super) fn warp(b: &mut Builder, raw: &Raw, ty: Ty) -> Result<()> {
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
            // The last four words in reverse: the types of c, b, a and d.
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

pub(super) fn warpgroup(b: &mut Builder, raw: &Raw) -> Result<()> {
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
            // 64 rows of N columns over 128 threads are N / 2 registers in each.
            let columns = shape.strip_prefix("m64n").and_then(|rest| rest.strip_suffix("k16"));
            let is_full = columns.and_then(|columns| columns.parse().ok()) == Some(2 * d.len());
            let [left, right, adds, scales_and_turns @ ..] = sides else { return unknown(raw) };
            let [scale_a, scale_b, turn_a, turn_b] = scales_and_turns else { return unknown(raw) };
            // N is a multiple of 8, and 256 at most.
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
