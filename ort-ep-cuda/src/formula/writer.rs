//! The PTX writer: instructions, registers, constants and calls.

use std::collections::BTreeSet;
use std::fmt::Write;

use rustc_hash::FxHashMap;

use super::number::Number;

/// Instructions and their registers. `known` does common-subexpression elimination: an instruction
/// that was emitted before returns its register.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) text: String,
    counts: FxHashMap<char, usize>,
    known: FxHashMap<(char, String), String>,
    /// The called functions of `cu/math.cu`.
    pub(super) called: BTreeSet<String>,
}

impl Writer {
    /// Returns a new register of a class.
    pub(super) fn register(&mut self, class: char) -> String {
        let count = self.counts.entry(class).or_default();
        *count += 1;
        format!("%{class}{count}")
    }

    /// Returns the declarations of all registers.
    pub(super) fn declarations(&self) -> String {
        const TYPES: [(char, &str); 6] =
            [('f', ".f32"), ('d', ".f64"), ('r', ".b32"), ('l', ".b64"), ('h', ".b16"), ('p', ".pred")];
        let mut text = String::new();
        for (class, ty) in TYPES {
            if let Some(count) = self.counts.get(&class) {
                text += &format!(".reg {ty} %{class}<{}>;\n", count + 1);
            }
        }
        text
    }

    pub(super) fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Returns the register that holds an instruction's result; `$` in the text stands for that
    /// register.
    pub(super) fn emit(&mut self, class: char, instruction: &str) -> String {
        let key = (class, instruction.to_owned());
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let register = self.register(class);
        self.line(&instruction.replacen('$', &register, 1));
        self.known.insert(key, register.clone());
        register
    }

    /// Emits a call of a function of `cu/math.cu`.
    pub(super) fn call(&mut self, name: &str, arguments: &[(&str, Number)], result: Number) -> String {
        let key = (result.class(), format!("{name} {arguments:?}"));
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let register = self.register(result.class());
        let (mut before, mut names) = (String::new(), Vec::new());
        for (index, (argument, number)) in arguments.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = writeln!(before, ".param .{} a{index};", number.bits());
            let _ = writeln!(before, "st.param.{} [a{index}], {argument};", number.name());
            names.push(format!("a{index}"));
        }
        self.line(&format!(
            "{{\n{before}.param .{} result;\ncall.uni (result), {name}, ({});\nld.param.{} {register}, [result];\n}}",
            result.bits(),
            names.join(", "),
            result.name()
        ));
        // The module includes only called functions and their callees.
        self.called.insert(name.to_owned());
        self.known.insert(key, register.clone());
        register
    }

    pub(super) fn constant(&mut self, value: f64, number: Number) -> String {
        let text = match number {
            Number::F32 => format!("mov.f32 $, 0f{:08X};", (value as f32).to_bits()),
            Number::F64 => format!("mov.f64 $, 0d{:016X};", value.to_bits()),
            Number::S32 => format!("mov.b32 $, {};", value as i32),
            Number::U32 => format!("mov.b32 $, {};", value as u32),
            Number::S64 => format!("mov.b64 $, {};", value as i64),
            Number::U64 => format!("mov.b64 $, {};", value as u64),
        };
        self.emit(number.class(), &text)
    }

    /// Emits the predicate `value != 0`. NaN compares unequal to zero, so it is true.
    pub(super) fn truth(&mut self, value: &str, number: Number) -> String {
        let zero = self.constant(0.0, number);
        let differs = if number.is_float() { "neu" } else { "ne" };
        self.emit('p', &format!("setp.{differs}.{} $, {value}, {zero};", number.name()))
    }

    /// Emits `truth ? then : otherwise`.
    pub(super) fn chosen(&mut self, number: Number, then: &str, otherwise: &str, truth: &str) -> String {
        let ty = if number.is_float() { number.name() } else { number.bits() };
        self.emit(number.class(), &format!("selp.{ty} $, {then}, {otherwise}, {truth};"))
    }
}
