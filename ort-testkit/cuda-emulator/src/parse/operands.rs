//! The parser of operands.

use super::lex::{Num, Tok};
use super::{Opd, Parser, bad};
use crate::Result;

impl Parser {
    pub(super) fn operand(&mut self) -> Result<Opd> {
        let line = self.line();
        if self.take('{') {
            return Ok(Opd::Vector(self.list('}')?));
        }
        if self.take('(') {
            return Ok(Opd::Group(self.list(')')?));
        }
        if self.take('!') {
            return Ok(Opd::Not(self.name()?));
        }
        if self.take('[') {
            let base = self.operand()?;
            if self.take(',') {
                self.need('{')?;
                let at = self.list('}')?;
                self.need(']')?;
                return Ok(Opd::Tensor(Box::new(base), at));
            }
            let mut offset = 0i64;
            while !self.take(']') {
                let minus = self.take('-');
                if !minus {
                    self.need('+')?;
                }
                let value = self.int()? as i64;
                offset = offset.wrapping_add(if minus { value.wrapping_neg() } else { value });
            }
            return Ok(Opd::Address(Box::new(base), offset));
        }
        let minus = self.take('-');
        match self.peek().cloned() {
            Some(Tok::Num(number)) => {
                self.at += 1;
                Ok(Opd::Num(match (minus, number) {
                    (false, number) => number,
                    (true, Num::Int(v)) => Num::Int(v.wrapping_neg()),
                    (true, Num::F32(v)) => Num::F32(v ^ (1 << 31)),
                    (true, Num::F64(v)) => Num::F64(v ^ (1 << 63)),
                }))
            }
            Some(Tok::Word(name)) => {
                self.at += 1;
                if self.take('|') {
                    return Ok(Opd::Pair(name, self.name()?));
                }
                Ok(Opd::Name(name))
            }
            other => bad(line, format_args!("an operand expected, found {other:?}")),
        }
    }

    pub(super) fn list(&mut self, end: char) -> Result<Vec<Opd>> {
        let mut out = Vec::new();
        while !self.take(end) {
            out.push(self.operand()?);
            if !self.is(end) {
                self.need(',')?;
            }
        }
        Ok(out)
    }
}
