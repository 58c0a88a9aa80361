//! The parser of PTX modules (NVIDIA, "PTX ISA"), which builds their functions and variables.

use std::collections::HashMap;

use crate::decode::{Builder, Function, Name, Ty};
use crate::{Fault, Result, code};

mod lex;
mod operands;
mod variables;
pub(crate) use lex::Num;
use lex::{Tok, lex};

/// A parsed operand.
#[derive(Clone, Debug)]
pub(crate) enum Opd {
    /// A register, a variable, a label or `_`.
    Name(String),
    /// A literal.
    Num(Num),
    /// `{a, b}`.
    Vector(Vec<Opd>),
    /// `[base + offset]`.
    Address(Box<Opd>, i64),
    /// `[base, {a, b}]`.
    Tensor(Box<Opd>, Vec<Opd>),
    /// `p|q`.
    Pair(String, String),
    /// `!p`.
    Not(String),
    /// `(a, b)`.
    Group(Vec<Opd>),
}

/// A parsed instruction.
pub(crate) struct Raw {
    /// The predicate, and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    /// The parts of its name between the dots.
    pub(crate) words: Vec<String>,
    /// Its operands.
    pub(crate) operands: Vec<Opd>,
    /// Its line.
    pub(crate) line: u32,
}

/// A module variable in global or constant memory.
pub(crate) struct Global {
    /// Its name.
    pub(crate) name: String,
    /// Its bytes, zero if it has no initial value.
    pub(crate) data: Vec<u8>,
    /// Where the addresses of other variables are stored: offset and name.
    pub(crate) links: Vec<(usize, String)>,
    /// Its address, assigned before the functions are built.
    pub(crate) address: u64,
}

/// A module.
pub(crate) struct Module {
    /// Kernels and functions.
    pub(crate) functions: Vec<Function>,
    /// Variables.
    pub(crate) globals: Vec<Global>,
}

fn bad<T>(line: u32, what: impl std::fmt::Display) -> Result<T> {
    Err(Fault::new(code::INVALID_PTX, format!("line {line}: {what}")))
}

/// A declaration of a variable.
struct Declared {
    name: String,
    ty: Ty,
    count: Option<usize>,
    align: usize,
    open: bool,
    repeat: Option<u64>,
}

impl Declared {
    fn size(&self) -> usize {
        self.ty.bytes() * self.count.unwrap_or(1)
    }
}

struct Parser {
    tokens: Vec<(Tok, u32)>,
    at: usize,
    globals: Vec<Global>,
    /// The names in module scope.
    names: HashMap<String, Name>,
    shared: usize,
    dynamic_align: usize,
    capability: u32,
    target: u32,
    /// Whether the target is architecture-specific (`sm_90a`), and so runs only on its compute
    /// capability.
    exact: bool,
    functions: Vec<Function>,
}

const STATE_SPACES: [&str; 6] = [".reg", ".local", ".shared", ".param", ".global", ".const"];

impl Parser {
    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(0, |t| t.1)
    }

    fn peek(&self) -> Option<&Tok> {
        self.tokens.get(self.at).map(|t| &t.0)
    }

    fn word(&self) -> &str {
        match self.peek() {
            Some(Tok::Word(word)) => word,
            _ => "",
        }
    }

    fn is(&self, sign: char) -> bool {
        self.peek() == Some(&Tok::Sign(sign))
    }

    fn take(&mut self, sign: char) -> bool {
        let found = self.is(sign);
        self.at += usize::from(found);
        found
    }

    fn need(&mut self, sign: char) -> Result<()> {
        if self.take(sign) {
            return Ok(());
        }
        bad(self.line(), format_args!("expected {sign}, found {:?}", self.peek()))
    }

    fn name(&mut self) -> Result<String> {
        let word = self.word().to_owned();
        if word.is_empty() {
            return bad(self.line(), format_args!("expected a name, found {:?}", self.peek()));
        }
        self.at += 1;
        Ok(word)
    }

    fn int(&mut self) -> Result<u64> {
        let negative = self.take('-');
        match self.peek() {
            Some(Tok::Num(Num::Int(value))) => {
                let value = *value;
                self.at += 1;
                Ok(if negative { value.wrapping_neg() } else { value })
            }
            other => bad(self.line(), format_args!("expected an integer, found {other:?}")),
        }
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.at < self.tokens.len() && self.line() == line {
            self.at += 1;
        }
    }

    fn skip_past(&mut self, end: char) -> Result<()> {
        let line = self.line();
        while !self.take(end) {
            if self.at >= self.tokens.len() {
                return bad(line, format_args!("expected {end}, found the end of the text"));
            }
            self.at += 1;
        }
        Ok(())
    }

    fn module(&mut self) -> Result<()> {
        while self.at < self.tokens.len() {
            let line = self.line();
            let word = self.name()?;
            match word.as_str() {
                ".version" => {
                    let Some(Tok::Num(number)) = self.peek().cloned() else { return bad(line, "a version") };
                    self.at += 1;
                    let version = f64::from_bits(Ty::F64.literal(number));
                    // 8.7 is not exact in binary, so the bound is between two versions.
                    if version > 8.75 {
                        let text = format!("line {line}: PTX {version} is later than 8.7");
                        return Err(Fault::new(code::UNSUPPORTED_PTX_VERSION, text));
                    }
                }
                ".target" => {
                    let target = self.name()?;
                    let digits: String = target.chars().filter(char::is_ascii_digit).collect();
                    let needed = digits.parse::<u32>().unwrap_or(0);
                    if needed > self.capability {
                        return bad(line, format_args!("the device is older than .target {target}"));
                    }
                    self.target = needed;
                    self.exact = target.ends_with('a');
                    if self.exact && needed != self.capability {
                        return bad(line, format_args!("the device is newer than .target {target}"));
                    }
                    self.skip_line();
                }
                ".address_size" => match self.int()? {
                    64 => {}
                    _ => return bad(line, "addresses must have 64 bits"),
                },
                ".visible" | ".extern" | ".weak" | ".common" => {}
                ".file" | ".loc" | ".pragma" => {
                    self.at -= 1;
                    self.skip_line();
                }
                ".section" => self.skip_past('}')?,
                ".global" | ".const" | ".shared" => self.module_variable(&word)?,
                ".entry" => self.function(true)?,
                ".func" => self.function(false)?,
                other => return bad(line, format_args!("unknown: {other}")),
            }
        }
        Ok(())
    }

    /// Parses the parameters of a function's head: `(.param .b32 a, .reg .b32 b)`.
    fn formals(&mut self, builder: &mut Builder) -> Result<Vec<(Name, Ty, usize)>> {
        let mut out = Vec::new();
        while !self.take(')') {
            let space = self.name()?;
            let found = self.declaration()?;
            let name = if space == ".reg" {
                Name::Reg(builder.register(found.ty), found.ty)
            } else {
                Name::Local(builder.local(found.size(), found.align))
            };
            builder.bind(&found.name, name.clone());
            out.push((name, found.ty, found.size()));
            self.take(',');
        }
        Ok(out)
    }

    fn function(&mut self, entry: bool) -> Result<()> {
        let line = self.line();
        let mut builder = Builder::new(self.names.clone(), self.globals.iter().map(|g| g.address).collect());
        let shared = self.shared;
        let mut returns = Vec::new();
        if !entry && self.take('(') {
            returns = self.formals(&mut builder)?;
        }
        let name = self.name()?;
        let formals = if self.take('(') { self.formals(&mut builder)? } else { Vec::new() };
        // Performance directives, such as `.maxntid 256, 1, 1`.
        let mut threads = [0u32; 3];
        while !self.is('{') {
            // A prototype: the function's body is elsewhere in the module.
            if self.take(';') {
                return Ok(());
            }
            let directive = self.word().to_owned();
            self.at += 1;
            let mut values = Vec::new();
            while let Some(Tok::Num(Num::Int(value))) = self.peek() {
                values.push(*value as u32);
                self.at += 1;
                self.take(',');
            }
            if directive == ".reqntid" || directive == ".maxntid" {
                threads = std::array::from_fn(|k| values.get(k).copied().unwrap_or(1));
            }
            if self.at >= self.tokens.len() {
                return bad(line, "a function without a body");
            }
        }
        self.at += 1;
        self.body(&mut builder)?;
        let mut function = builder.finish(name, entry, returns, formals)?;
        (function.shared, function.dynamic_align) = (self.shared, self.dynamic_align);
        function.max_threads = threads.iter().product();
        self.functions.push(function);
        // Shared variables that a kernel declares are in its own scope.
        if entry {
            self.shared = shared;
        }
        Ok(())
    }

    fn body(&mut self, builder: &mut Builder) -> Result<()> {
        let mut depth = 1;
        while depth > 0 {
            let line = self.line();
            if self.take('{') {
                builder.open();
                depth += 1;
                continue;
            }
            if self.take('}') {
                builder.close();
                depth -= 1;
                continue;
            }
            if self.take(';') {
                continue;
            }
            if self.is('@') {
                self.instruction(builder)?;
                continue;
            }
            let word = self.name()?;
            if self.is(':') {
                self.at += 1;
                if self.word() == ".branchtargets" {
                    self.at += 1;
                    let mut labels = vec![self.name()?];
                    while self.take(',') {
                        labels.push(self.name()?);
                    }
                    self.need(';')?;
                    builder.targets(&word, labels);
                } else if !builder.label(&word) {
                    return bad(line, format_args!("the label {word} is there twice"));
                }
                continue;
            }
            match word.as_str() {
                ".loc" | ".file" => {
                    self.at -= 1;
                    self.skip_line();
                }
                ".pragma" => self.skip_past(';')?,
                ".extern" | ".visible" => {}
                space if STATE_SPACES.contains(&space) => self.variables(&word, builder)?,
                directive if directive.starts_with('.') => {
                    return bad(line, format_args!("unknown: {directive}"));
                }
                _ => {
                    self.at -= 1;
                    self.instruction(builder)?;
                }
            }
        }
        Ok(())
    }

    fn instruction(&mut self, builder: &mut Builder) -> Result<()> {
        let line = self.line();
        let guard = if self.take('@') {
            let not = self.take('!');
            Some((self.name()?, not))
        } else {
            None
        };
        let words: Vec<String> = self.name()?.split('.').map(str::to_owned).collect();
        let operands = self.list(';')?;
        let text = words.join(".");
        let is_of_tensors = text.starts_with("cp.async.bulk") || text.starts_with("mbarrier.try_wait");
        if is_of_tensors && self.target < 90 {
            return bad(line, format_args!("{text} needs .target sm_90"));
        }
        if matches!(&*words[0], "wgmma" | "setmaxnreg") && !self.exact {
            return bad(line, format_args!("{text} is of .target sm_90a alone"));
        }
        let raw = Raw { guard, words, operands, line };
        builder.instruction(&raw).map_err(|fault| {
            let message = format!("line {line}: {text}: {}", fault.message);
            Fault { message, ..fault }
        })
    }
}

/// Parses a module; `place` allocates each variable.
pub(crate) fn parse(
    text: &str,
    capability: u32,
    place: &mut dyn FnMut(&Global) -> Option<u64>,
) -> Result<Module> {
    let mut parser = Parser {
        tokens: lex(text)?,
        at: 0,
        globals: Vec::new(),
        names: HashMap::new(),
        shared: 0,
        dynamic_align: 16,
        capability,
        target: 0,
        exact: false,
        functions: Vec::new(),
    };
    // Addresses become literals of the instructions, so the variables are placed before the
    // functions are built.
    parser.module_with(place)?;
    let mut module = Module { functions: parser.functions, globals: parser.globals };
    // Addresses in initial values are resolved last, because variables may refer to later ones.
    crate::decode::link(&mut module.functions)?;
    for at in 0..module.globals.len() {
        for (offset, name) in std::mem::take(&mut module.globals[at].links) {
            let Some(target) = module.globals.iter().find(|g| g.name == name).map(|g| g.address) else {
                return bad(0, format_args!("the address of {name} is not known"));
            };
            let data = &mut module.globals[at].data;
            let mut word = [0; 8];
            let end = (offset + 8).min(data.len());
            word[..end - offset].copy_from_slice(&data[offset..end]);
            let value = u64::from_le_bytes(word).wrapping_add(target);
            data[offset..end].copy_from_slice(&value.to_le_bytes()[..end - offset]);
        }
    }
    Ok(module)
}

impl Parser {
    fn module_with(&mut self, place: &mut dyn FnMut(&Global) -> Option<u64>) -> Result<()> {
        // A first pass over the tokens handles only variables, a second one the functions.
        let all = self.tokens.len();
        let (mut at, mut depth) = (0, 0);
        let mut variables = Vec::new();
        while at < all {
            match &self.tokens[at].0 {
                Tok::Sign('{') => depth += 1,
                Tok::Sign('}') => depth -= 1,
                Tok::Sign('(') => depth += 1,
                Tok::Sign(')') => depth -= 1,
                // Variables of a function are inside of its braces, and parameters inside of
                // parentheses.
                Tok::Word(word)
                    if depth == 0 && [".global", ".const", ".shared"].contains(&word.as_str()) =>
                {
                    variables.push((at, word.clone()));
                }
                _ => {}
            }
            at += 1;
        }
        for (at, space) in &variables {
            self.at = at + 1;
            self.module_variable(space)?;
        }
        for global in &mut self.globals {
            match place(global) {
                Some(address) => global.address = address,
                None => return Err(Fault::new(code::OUT_OF_MEMORY, "no memory for a variable")),
            }
        }
        // Remove the declarations, which the second pass must not see again.
        // From the last to the first, so that the other positions stay valid.
        for (at, _) in variables.iter().rev() {
            let mut end = *at;
            while end < self.tokens.len() && self.tokens[end].0 != Tok::Sign(';') {
                end += 1;
            }
            self.tokens.drain(*at..(end + 1).min(self.tokens.len()));
        }
        self.at = 0;
        self.module()
    }
}
