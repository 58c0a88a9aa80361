//! Shader generation: WGSL around a kernel's code, with typed accessor functions for each tensor.
//!
//! A tensor `x` is read as `x(i)` and written as `set_x(i, value)`, where `i` counts elements.
//! `x_t` is the element type in the shader: `f32`, `i32` or `u32`. Elements narrower than a word
//! share words, which are written with atomics. Of a 64-bit integer only the lower word is used;
//! uploads reject larger values. A uniform `n` is `p.n`, and a list `shape` is `shape(axis)`.

use std::fmt::Write as _;

use ort_core::dtype::{DType, TypeSet};
use ort_core::{Result, ensure, error};
use ort_gpu::Arg;
use smallvec::SmallVec;

use crate::common;
use crate::gpu::{Limits, NUMBERS};
use crate::launch::{Dispatch, OpCx, Operand, TensorArg, Walk};
use crate::program::Program;

/// The invocations in a workgroup of [`Shader::each`].
const EACH: u32 = 64;
/// The most elements of [`Shader::sizes`], and so the most axes of a tensor.
pub(crate) const MOST_AXES: usize = 8;

/// The element types that shaders read and write.
pub(crate) const TYPES: TypeSet = TypeSet::of(&[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::U64,
    DType::I32,
    DType::U32,
    DType::I16,
    DType::U16,
    DType::I8,
    DType::U8,
    DType::Bool,
]);

/// The representation of an element type in shaders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    /// The element's type in the shader.
    pub(crate) value: &'static str,
    /// The bits of an element in memory.
    pub(crate) bits: u32,
    kind: Kind,
}

/// The encoding of an element in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Float,
    Half,
    Bfloat,
    Signed,
    Unsigned,
    Bool,
}

impl Element {
    /// Returns the representation of a type, or an error if shaders cannot read it.
    pub(crate) fn of(dtype: DType) -> Result<Element> {
        let (value, kind) = match dtype {
            DType::F32 => ("f32", Kind::Float),
            DType::F16 => ("f32", Kind::Half),
            DType::BF16 => ("f32", Kind::Bfloat),
            DType::I64 | DType::I32 | DType::I16 | DType::I8 | DType::I4 | DType::I2 => ("i32", Kind::Signed),
            DType::U64 | DType::U32 | DType::U16 | DType::U8 | DType::U4 | DType::U2 => {
                ("u32", Kind::Unsigned)
            }
            DType::Bool => ("u32", Kind::Bool),
            other => {
                return Err(error!(NotImplemented, "programs of the device do not read {}", other.name()));
            }
        };
        Ok(Element { value, bits: dtype.bits().unwrap_or(32), kind })
    }

    /// The type of a word of non-atomic storage.
    fn word(self) -> &'static str {
        if self.bits == 32 { self.value } else { "u32" }
    }

    /// The expression that decodes an element from the low end of `bits`.
    fn decoded(self, bits: &str) -> String {
        // Shifting left and back right extends the sign.
        let unused = 32u32.saturating_sub(self.bits);
        match self.kind {
            Kind::Half => format!("unpack2x16float({bits}).x"),
            Kind::Bfloat => format!("bitcast<f32>({bits} << 16u)"),
            Kind::Signed => format!("(bitcast<i32>({bits} << {unused}u) >> {unused}u)"),
            Kind::Bool => format!("select(0u, 1u, {bits} != 0u)"),
            Kind::Unsigned | Kind::Float => bits.to_owned(),
        }
    }

    /// The expression that encodes an element into the low end of a word.
    fn encoded(self, value: &str) -> String {
        let mask = 1u64.checked_shl(self.bits).map_or(0, |end| end - 1);
        match self.kind {
            Kind::Half => format!("half_bits({value})"),
            Kind::Bfloat => format!("bfloat_bits({value})"),
            Kind::Signed => format!("(bitcast<u32>({value}) & {mask}u)"),
            Kind::Unsigned | Kind::Float => format!("({value} & {mask}u)"),
            Kind::Bool => format!("select(0u, 1u, {value} != 0u)"),
        }
    }
}

/// How a shader accesses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read as `x(i)`.
    Read,
    /// Read as `x(i)` and written as `set_x(i, value)`. Elements that no invocation writes stay as
    /// they are.
    Write,
    /// As `Write`. Also, `combine_x(i, value)` atomically replaces an element by
    /// `combine(element, value)`, a function of the kernel. Not for 64-bit types.
    Combine,
}

/// A tensor that the shader binds.
struct Tensor {
    name: &'static str,
    element: Element,
    access: Access,
    arg: Arg,
    /// The bindings that it takes; each but the last is as large as the device allows.
    windows: usize,
}

/// Builder of a shader and of one dispatch of it.
pub(crate) struct Shader {
    limits: Limits,
    tensors: SmallVec<[Tensor; 8]>,
    /// Uniforms: lists of eight words each, then single words.
    sizes: Vec<(String, &'static str, [u32; MOST_AXES])>,
    numbers: Vec<(String, &'static str, u32)>,
    /// Constants, and functions generated with them.
    constants: String,
    /// The last error of the builder methods, which `finish` returns.
    problem: Option<ort_core::Error>,
}

impl Shader {
    /// Creates an empty shader.
    pub(crate) fn new(cx: &OpCx<'_>) -> Shader {
        Shader {
            limits: cx.limits,
            tensors: SmallVec::new(),
            sizes: Vec::new(),
            numbers: Vec::new(),
            constants: String::new(),
            problem: None,
        }
    }

    /// Returns whether it runs on a software adapter.
    pub(crate) fn is_software(&self) -> bool {
        self.limits.is_software
    }

    /// Adds a tensor that is read.
    pub(crate) fn read(self, name: &'static str, tensor: &Operand) -> Shader {
        self.tensor(name, tensor, Access::Read)
    }

    /// Adds a tensor that is written, or read and written.
    pub(crate) fn write(self, name: &'static str, tensor: &Operand) -> Shader {
        self.tensor(name, tensor, Access::Write)
    }

    /// Adds a tensor with any access.
    pub(crate) fn tensor(mut self, name: &'static str, tensor: &Operand, access: Access) -> Shader {
        match Element::of(tensor.dtype) {
            Ok(element) => {
                // The first window begins at an aligned offset before the tensor, so up to one
                // alignment more is bound.
                let bytes = tensor.bytes() + self.limits.storage_alignment;
                let windows = bytes.div_ceil(self.limits.binding).max(1);
                self.tensors.push(Tensor { name, element, access, arg: tensor.arg, windows });
            }
            Err(problem) => self.problem = Some(problem),
        }
        self
    }

    /// Adds an unsigned uniform, `p.name`.
    pub(crate) fn number(mut self, name: &str, value: usize) -> Shader {
        match u32::try_from(value) {
            Ok(value) => self.numbers.push((name.to_owned(), "u32", value)),
            Err(_) => self.problem = Some(error!(NotImplemented, "{name} of {value} is beyond 32 bits")),
        }
        self
    }

    /// Adds a signed uniform, `p.name`.
    pub(crate) fn integer(mut self, name: &str, value: i64) -> Shader {
        match i32::try_from(value) {
            Ok(value) => self.numbers.push((name.to_owned(), "i32", value.cast_unsigned())),
            Err(_) => self.problem = Some(error!(NotImplemented, "{name} of {value} is beyond 32 bits")),
        }
        self
    }

    /// Adds a float uniform, `p.name`.
    pub(crate) fn float(mut self, name: &str, value: f32) -> Shader {
        self.numbers.push((name.to_owned(), "f32", value.to_bits()));
        self
    }

    /// Adds a uniform list of up to eight unsigned numbers, `name(axis)`.
    pub(crate) fn sizes(mut self, name: &str, values: &[usize]) -> Shader {
        let fits = values.len() <= MOST_AXES && values.iter().all(|value| u32::try_from(*value).is_ok());
        let mut words = [0; MOST_AXES];
        words.iter_mut().zip(values).for_each(|(word, value)| *word = *value as u32);
        match fits {
            true => self.sizes.push((name.to_owned(), "u32", words)),
            false => self.problem = Some(error!(NotImplemented, "{name} of {values:?} is too much")),
        }
        self
    }

    /// Adds a uniform list of up to eight signed numbers, `name(axis)`.
    pub(crate) fn integers(mut self, name: &str, values: &[i64]) -> Shader {
        let fits = values.len() <= MOST_AXES && values.iter().all(|value| i32::try_from(*value).is_ok());
        let mut words = [0; MOST_AXES];
        words.iter_mut().zip(values).for_each(|(word, value)| *word = (*value as i32).cast_unsigned());
        match fits {
            true => self.sizes.push((name.to_owned(), "i32", words)),
            false => self.problem = Some(error!(NotImplemented, "{name} of {values:?} is too much")),
        }
        self
    }

    /// Adds an unsigned constant. Another value makes another shader, which is compiled separately.
    pub(crate) fn constant(mut self, name: &str, value: usize) -> Shader {
        // Writing to a string does not fail.
        let _ = writeln!(self.constants, "const {name}: u32 = {value}u;");
        self
    }

    /// Adds the strided loop nest `walk`. For each name `x`, a function `at_x(i: u32) -> u32`
    /// returns the index in the tensor of element `i` of the walk.
    pub(crate) fn walk(self, walk: &Walk, names: &[&str]) -> Shader {
        self.walk_over("walk", walk, names)
    }

    /// As [`Shader::walk`], with a name for the uniform of the sizes, for shaders with several
    /// walks.
    pub(crate) fn walk_over(mut self, sizes: &str, walk: &Walk, names: &[&str]) -> Shader {
        self = self.sizes(sizes, &walk.sizes);
        for (name, steps) in names.iter().zip(&walk.steps) {
            let place = match steps.as_slice() {
                // No division for a scalar or a contiguous tensor.
                [] | [0] => "return 0u;".to_owned(),
                [1] => "return i;".to_owned(),
                steps => {
                    self = self.integers(&format!("{name}_step"), steps);
                    let mut place = String::from("var rest = i;\nvar place = 0;\n");
                    // From the innermost axis out. The outermost takes what remains, without a
                    // division.
                    for axis in (1..steps.len()).rev() {
                        let _ = writeln!(
                            place,
                            "place += i32(rest % {sizes}({axis}u)) * {name}_step({axis}u); rest /= {sizes}({axis}u);"
                        );
                    }
                    place + &format!("return bitcast<u32>(place + i32(rest) * {name}_step(0u));")
                }
            };
            let _ = writeln!(self.constants, "fn at_{name}(i: u32) -> u32 {{\n{place}\n}}");
        }
        self
    }

    /// Finishes a dispatch that calls `element(i: u32)` for each `i` below `count`.
    pub(crate) fn each(self, count: usize, code: &str) -> Result<Dispatch> {
        let main = format!(
            "@compute @workgroup_size({EACH})\n\
             fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(num_workgroups) total: vec3<u32>, \
             @builtin(local_invocation_index) lane: u32) {{\n\
             let i = ((place.z * total.y + place.y) * total.x + place.x) * {EACH}u + lane;\n\
             if (i < p.count) {{ element(i); }}\n}}\n"
        );
        // Folding rounds the number of invocations up. The margin keeps `i` within 32 bits.
        ensure!(count < u32::MAX as usize - (1 << 24), NotImplemented, "{count} elements are beyond 32 bits");
        self.finish(count, count.div_ceil(EACH as usize), code, &main)
    }

    /// Finishes a dispatch that calls `group(index: u32, lane: u32)` for each `index` below
    /// `count`, in a workgroup of `LANES` invocations.
    pub(crate) fn groups(mut self, count: usize, lanes: usize, code: &str) -> Result<Dispatch> {
        self = self.constant("LANES", lanes);
        let main = "@compute @workgroup_size(LANES)\n\
             fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(num_workgroups) total: vec3<u32>, \
             @builtin(local_invocation_index) lane: u32) {\n\
             let index = (place.z * total.y + place.y) * total.x + place.x;\n\
             if (index < p.count) { group(index, lane); }\n}\n";
        self.finish(count, count, code, main)
    }

    /// Lays the uniforms out, checks the limits, and generates the shader.
    fn finish(mut self, count: usize, workgroups: usize, code: &str, main: &str) -> Result<Dispatch> {
        if let Some(problem) = self.problem.take() {
            return Err(problem);
        }
        let workgroups = folded(workgroups, self.limits.workgroups as usize)?;
        self = self.number("count", count);
        let bindings: usize = self.tensors.iter().map(|tensor| tensor.windows).sum();
        let most = self.limits.storage_buffers;
        ensure!(bindings <= most, NotImplemented, "it binds {bindings} buffers, the device takes {most}");
        let mut tensors = SmallVec::new();
        // The word of each tensor's base offset comes after all other uniforms.
        let first = self.sizes.len() * MOST_AXES + self.numbers.len();
        for (place, tensor) in self.tensors.iter().enumerate() {
            let Tensor { arg, windows, element, .. } = *tensor;
            tensors.push(TensorArg { arg, windows, bits: element.bits, base: first + place });
        }
        let mut numbers: Vec<u32> = self.sizes.iter().flat_map(|(.., words)| *words).collect();
        numbers.extend(self.numbers.iter().map(|(.., word)| *word));
        numbers.resize(first + self.tensors.len(), 0);
        let bytes = numbers.len() * 4;
        ensure!(bytes as u64 <= NUMBERS, NotImplemented, "{bytes} bytes of numbers for one dispatch");
        let text = self.text(code, main).map_err(|_| error!(Fail, "a program cannot be written"))?;
        Ok(Dispatch { program: Program { text: text.into(), bindings }, tensors, numbers, workgroups })
    }

    /// Generates the WGSL of the whole shader.
    fn text(&self, code: &str, main: &str) -> Result<String, std::fmt::Error> {
        let mut text = String::from("struct Numbers {\n");
        for (name, ty, _) in &self.sizes {
            // Uniform arrays have a stride of 16 bytes, so eight words are two `vec4`.
            writeln!(text, "{name}_: array<vec4<{ty}>, 2>,")?;
        }
        for (name, ty, _) in &self.numbers {
            writeln!(text, "{name}: {ty},")?;
        }
        for tensor in &self.tensors {
            writeln!(text, "{}_base: u32,", tensor.name)?;
        }
        text.push_str("}\n@group(0) @binding(0) var<uniform> p: Numbers;\n");
        for (name, ty, _) in &self.sizes {
            writeln!(text, "fn {name}(axis: u32) -> {ty} {{ return p.{name}_[axis >> 2u][axis & 3u]; }}")?;
        }
        text.push_str(&self.constants);
        let mut binding = 1;
        for tensor in &self.tensors {
            tensor.write(&mut text, &mut binding, self.limits.binding / 4)?;
        }
        text.push_str(code);
        text.push('\n');
        text.push_str(main);
        common::complete(&mut text);
        Ok(text)
    }
}

impl Tensor {
    /// Declares the bindings and accessor functions of a tensor. `words` is the size of a window.
    fn write(&self, text: &mut String, binding: &mut u32, words: usize) -> std::fmt::Result {
        let Tensor { name, element, access, windows, .. } = *self;
        // Invocations that write different elements of one word race unless the writes are atomic.
        let atomic = access == Access::Combine || (access == Access::Write && element.bits < 32);
        let cell = if atomic { "atomic<u32>" } else { element.word() };
        for window in 0..windows {
            writeln!(
                text,
                "@group(0) @binding({binding}) var<storage, read_write> {name}_{window}: array<{cell}>;"
            )?;
            *binding += 1;
        }
        let value = element.value;
        writeln!(text, "alias {name}_t = {value};")?;
        let word = if atomic { "u32" } else { cell };
        // Selects the window of word `w`; `line` gets the window and the index within it.
        let in_windows = |line: &dyn Fn(usize, &str) -> String| -> String {
            let last = windows - 1;
            let early = (0..last).map(|window| {
                let end = (window + 1) * words;
                format!("if (w < {end}u) {{ {} }}\n", line(window, &format!("w - {}u", window * words)))
            });
            early.collect::<String>() + &line(last, &format!("w - {}u", last * words))
        };
        let get = in_windows(&|window, at| match atomic {
            true => format!("return atomicLoad(&{name}_{window}[{at}]);"),
            false => format!("return {name}_{window}[{at}];"),
        });
        writeln!(text, "fn {name}_word(w: u32) -> {word} {{\n{get}\n}}")?;
        let read = match element.bits {
            32 if atomic => format!("return bitcast<{value}>({name}_word(p.{name}_base + i));"),
            32 => format!("return {name}_word(p.{name}_base + i);"),
            64 => format!("return bitcast<{value}>({name}_word(2u * (p.{name}_base + i)));"),
            bits => {
                // `k` counts bits: the element is in word k / 32, from bit k mod 32 on.
                let (log, mask) = (bits.trailing_zeros(), (1u32 << bits) - 1);
                let element = element.decoded("bits");
                format!(
                    "let k = (p.{name}_base + i) << {log}u;\n\
                     let bits = ({name}_word(k >> 5u) >> (k & 31u)) & {mask}u;\nreturn {element};"
                )
            }
        };
        writeln!(text, "fn {name}(i: u32) -> {value} {{\n{read}\n}}")?;
        if access == Access::Read {
            return Ok(());
        }
        let put = in_windows(&|window, at| match atomic {
            true => format!("atomicStore(&{name}_{window}[{at}], v); return;"),
            false => format!("{name}_{window}[{at}] = v; return;"),
        });
        writeln!(text, "fn {name}_put(w: u32, v: {word}) {{\n{put}\n}}")?;
        // Two atomics suffice: each invocation clears and sets only the bits of its own element.
        let merge = in_windows(&|window, at| {
            format!("atomicAnd(&{name}_{window}[{at}], ~mask); atomicOr(&{name}_{window}[{at}], v); return;")
        });
        let write = match element.bits {
            32 if atomic => format!("{name}_put(p.{name}_base + i, bitcast<u32>(v));"),
            32 => format!("{name}_put(p.{name}_base + i, v);"),
            64 => {
                // Sign-extend, so that the host reads the full 64-bit integer.
                let upper = if value == "i32" { "bitcast<u32>(v >> 31u)" } else { "0u" };
                format!(
                    "let w = 2u * (p.{name}_base + i);\n\
                     {name}_put(w, bitcast<u32>(v));\n{name}_put(w + 1u, {upper});"
                )
            }
            bits => {
                writeln!(text, "fn {name}_merge(w: u32, mask: u32, v: u32) {{\n{merge}\n}}")?;
                let (log, mask) = (bits.trailing_zeros(), (1u32 << bits) - 1);
                let bits = element.encoded("v");
                format!(
                    "let k = (p.{name}_base + i) << {log}u;\n\
                     {name}_merge(k >> 5u, {mask}u << (k & 31u), {bits} << (k & 31u));"
                )
            }
        };
        writeln!(text, "fn set_{name}(i: u32, v: {value}) {{\n{write}\n}}")?;
        if access == Access::Combine {
            self.write_combine(text, &in_windows)?;
        }
        Ok(())
    }

    /// Declares `combine_x`, a compare-exchange loop.
    fn write_combine(
        &self,
        text: &mut String,
        in_windows: &dyn Fn(&dyn Fn(usize, &str) -> String) -> String,
    ) -> std::fmt::Result {
        let Tensor { name, element, .. } = *self;
        let exchange = in_windows(&|window, at| {
            format!(
                "let r = atomicCompareExchangeWeak(&{name}_{window}[{at}], old, new_word); \
                 return r.exchanged;"
            )
        });
        writeln!(text, "fn {name}_exchange(w: u32, old: u32, new_word: u32) -> bool {{\n{exchange}\n}}")?;
        let value = element.value;
        let (place, new_word) = match element.bits {
            bits if bits < 32 => {
                let (log, mask) = (bits.trailing_zeros(), (1u32 << bits) - 1);
                let decoded = element.decoded(&format!("((old >> s) & {mask}u)"));
                let encoded = element.encoded(&format!("combine({decoded}, v)"));
                (
                    format!("let k = (p.{name}_base + i) << {log}u;\nlet w = k >> 5u;\nlet s = k & 31u;"),
                    format!("(old & ~({mask}u << s)) | ({encoded} << s)"),
                )
            }
            _ => (
                format!("let w = p.{name}_base + i;"),
                format!("bitcast<u32>(combine(bitcast<{value}>(old), v))"),
            ),
        };
        writeln!(
            text,
            "fn combine_{name}(i: u32, v: {value}) {{\n{place}\n\
             loop {{\nlet old = {name}_word(w);\nif ({name}_exchange(w, old, {new_word})) {{ return; }}\n}}\n}}"
        )
    }
}

/// Folds a workgroup count into three dimensions of at most `most` each. The total may exceed
/// `count`.
fn folded(count: usize, most: usize) -> Result<[u32; 3]> {
    let z = count.div_ceil(most.saturating_mul(most)).max(1);
    let y = count.div_ceil(z).div_ceil(most).max(1);
    let x = count.div_ceil(z).div_ceil(y);
    ensure!(z <= most && count < u32::MAX as usize, NotImplemented, "{count} workgroups are too many");
    Ok([x as u32, y as u32, z as u32])
}

#[cfg(test)]
mod tests {
    use super::folded;

    #[test]
    fn workgroups_fold_where_one_dimension_does_not_do() {
        assert_eq!(folded(7, 10).unwrap(), [7, 1, 1]);
        for count in [11, 99, 100, 101, 999, 1000] {
            let [x, y, z] = folded(count, 10).unwrap().map(|size| size as usize);
            assert!(x <= 10 && y <= 10 && z <= 10 && x * y * z >= count, "{count}: {x} {y} {z}");
        }
        assert!(folded(1001, 10).is_err());
    }
}
