//! The parser of variables and their initial values.

use super::lex::Tok;
use super::{Declared, Global, Parser, bad};
use crate::Result;
use crate::decode::{Builder, Kind, Name, Ty};

impl Parser {
    /// Parses what follows a state space: `.align 8 .b8 name[4][4]`.
    pub(super) fn declaration(&mut self) -> Result<Declared> {
        let (mut align, mut ty, mut lanes) = (0, None, 1);
        while self.word().starts_with('.') {
            let word = self.name()?;
            match word.as_str() {
                ".align" => align = self.int()? as usize,
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                ".ptr" => {
                    while [".global", ".shared", ".local", ".const"].contains(&self.word()) {
                        self.at += 1;
                    }
                    if self.word() == ".align" {
                        self.at += 1;
                        self.int()?;
                    }
                }
                other => match Ty::parse(&other[1..]) {
                    Some(found) => ty = Some(found),
                    None => return bad(self.line(), format_args!("unknown in a declaration: {other}")),
                },
            }
        }
        let Some(ty) = ty else { return bad(self.line(), "a declaration without a type") };
        let name = self.name()?;
        let mut found = Declared { name, ty, count: None, align, open: false, repeat: None };
        self.dimensions(&mut found)?;
        if lanes > 1 {
            found.count = Some(found.count.unwrap_or(1) * lanes);
        }
        // The default alignment is that of the whole vector.
        let natural = ty.bytes() * lanes;
        found.align = if align == 0 { natural.max(1) } else { align };
        Ok(found)
    }

    pub(super) fn dimensions(&mut self, found: &mut Declared) -> Result<()> {
        if self.take('<') {
            found.repeat = Some(self.int()?);
            self.need('>')?;
        }
        while self.take('[') {
            if self.take(']') {
                found.open = true;
                found.count = Some(found.count.unwrap_or(1));
            } else {
                found.count = Some(found.count.unwrap_or(1) * self.int()? as usize);
                self.need(']')?;
            }
        }
        Ok(())
    }

    pub(super) fn initial(&mut self, ty: Ty, global: &mut Global, at: &mut usize) -> Result<()> {
        if self.take('{') {
            while !self.take('}') {
                self.initial(ty, global, at)?;
                self.take(',');
            }
            return Ok(());
        }
        let size = ty.bytes();
        if global.data.len() < *at + size {
            global.data.resize(*at + size, 0);
        }
        let value = if let Tok::Word(word) = self.peek().cloned().unwrap_or(Tok::Str) {
            self.at += 1;
            let mut target = word;
            if target == "generic" {
                self.need('(')?;
                target = self.name()?;
                self.need(')')?;
            }
            let offset = if self.take('+') { self.int()? } else { 0 };
            global.links.push((*at, target));
            offset
        } else {
            let negative = self.take('-');
            let Some(Tok::Num(number)) = self.peek().cloned() else {
                return bad(self.line(), "an initial value expected");
            };
            self.at += 1;
            let bits = ty.literal(number);
            match (negative, ty.kind()) {
                (false, _) => bits,
                (true, Kind::Float) => bits ^ (1 << (ty.bits() - 1)),
                (true, _) => bits.wrapping_neg(),
            }
        };
        // No type has more than eight bytes.
        global.data[*at..*at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        *at += size;
        Ok(())
    }

    pub(super) fn module_variable(&mut self, space: &str) -> Result<()> {
        loop {
            let found = self.declaration()?;
            if space == ".shared" {
                let name = self.shared_name(&found);
                self.names.insert(found.name, name);
            } else {
                let data = if found.open { Vec::new() } else { vec![0; found.size()] };
                let mut global = Global { name: found.name.clone(), data, links: Vec::new(), address: 0 };
                if self.take('=') {
                    self.initial(found.ty, &mut global, &mut 0)?;
                }
                // Every variable is an allocation of its own, whose alignment exceeds any that PTX
                // can ask for.
                self.names.insert(found.name, Name::Global(self.globals.len()));
                self.globals.push(global);
            }
            if !self.take(',') {
                return self.need(';');
            }
        }
    }

    pub(super) fn shared_name(&mut self, found: &Declared) -> Name {
        if found.open {
            self.dynamic_align = self.dynamic_align.max(found.align);
            return Name::Dynamic;
        }
        self.shared = self.shared.next_multiple_of(found.align);
        let offset = self.shared;
        self.shared += found.size();
        Name::Shared(offset as u64)
    }

    pub(super) fn variables(&mut self, space: &str, builder: &mut Builder) -> Result<()> {
        if space == ".global" || space == ".const" {
            return bad(self.line(), "a variable in global memory within a function");
        }
        let mut found = self.declaration()?;
        loop {
            let make = |builder: &mut Builder| Name::Reg(builder.register(found.ty), found.ty);
            match (space, found.repeat) {
                (".reg", Some(count)) => {
                    for number in 0..count {
                        let name = make(builder);
                        builder.bind(&format!("{}{number}", found.name), name);
                    }
                }
                (".reg", None) => {
                    let name = make(builder);
                    builder.bind(&found.name, name);
                }
                (".shared", _) => {
                    let name = self.shared_name(&found);
                    builder.bind(&found.name, name);
                }
                _ => {
                    let name = Name::Local(builder.local(found.size(), found.align));
                    builder.bind(&found.name, name);
                }
            }
            if !self.take(',') {
                return self.need(';');
            }
            found = Declared { name: self.name()?, count: None, open: false, repeat: None, ..found };
            self.dimensions(&mut found)?;
        }
    }
}
