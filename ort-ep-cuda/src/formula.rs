//! PTX code generation for scalar formulas. Each formula becomes a module with one entry, so the
//! driver's JIT compiles it without a CUDA toolkit.
//!
//! A thread computes one element of the result, or four adjacent ones. Simple functions become
//! instructions; the others become calls of functions that were compiled from `cu/math.cu`.

mod functions;
mod math;
mod number;
mod storage;
mod writer;

use ort_core::dtype::DType;
use ort_core::spec::{BinaryFn, ScalarExpr, UnaryFn};
use ort_core::{Result, ensure, error};

pub(crate) use number::Number;
pub(crate) use storage::is_short_float;
use writer::Writer;

/// How the index of an input's element follows from that of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputPlace {
    /// The same index.
    Same,
    /// A scalar, broadcast to all elements.
    One,
    /// Strided over the axes of the iteration space. The strides are kernel parameters, except for
    /// the last axis, whose stride is 1 or 0 as `last` says.
    Steps { last: bool },
}

/// An input of a formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) dtype: DType,
    pub(crate) place: InputPlace,
    /// The offset of its first element.
    pub(crate) start: usize,
}

/// The kernel entry `elementwise`. Its parameters are the addresses of the inputs and of the
/// result, and the element count. If an input is strided, the axis sizes and the strides of each
/// strided input follow, in structures of eight numbers.
#[derive(Clone, Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) formula: &'a ScalarExpr,
    pub(crate) number: Number,
    pub(crate) inputs: &'a [Source],
    pub(crate) output: DType,
    /// The rank of the iteration space.
    pub(crate) rank: usize,
    /// Whether a thread computes four adjacent elements of the last axis.
    pub(crate) four: bool,
}

/// Renders the module of an entry.
pub(crate) fn render(entry: &Entry<'_>) -> Result<String> {
    let mut writer = Writer::default();
    body(entry, &mut writer)?;
    let mut params: Vec<String> =
        (0..entry.inputs.len()).map(|index| format!(".param .u64 x{index}")).collect();
    params.extend([".param .u64 y".to_owned(), ".param .u32 count".to_owned()]);
    let stepped = |source: &Source| matches!(source.place, InputPlace::Steps { .. });
    // `computed` appends the sizes and the strides under the same condition and in this order.
    if entry.inputs.iter().any(stepped) {
        params.push(".param .align 4 .b8 sizes[32]".to_owned());
    }
    for (index, _) in entry.inputs.iter().enumerate().filter(|(_, source)| stepped(source)) {
        params.push(format!(".param .align 4 .b8 steps{index}[32]"));
    }
    let called: Vec<String> = writer.called.iter().cloned().collect();
    // PTX 8.1 for `sm_75` loads on every driver and device that the provider supports.
    Ok(format!(
        ".version 8.1\n.target sm_75\n.address_size 64\n{}\n.visible .entry elementwise({})\n{{\n{}{}ret;\n}}\n",
        math::functions(&called)?,
        params.join(", "),
        writer.declarations(),
        writer.text
    ))
}

fn body(entry: &Entry<'_>, writer: &mut Writer) -> Result<()> {
    let block = writer.emit('r', "mov.u32 $, %ctaid.x;");
    let threads = writer.emit('r', "mov.u32 $, %ntid.x;");
    let thread = writer.emit('r', "mov.u32 $, %tid.x;");
    let mut at = writer.emit('r', &format!("mad.lo.u32 $, {block}, {threads}, {thread};"));
    // A thread of the vectorised form owns elements 4i to 4i + 3.
    if entry.four {
        at = writer.emit('r', &format!("shl.b32 $, {at}, 2;"));
    }
    let count = writer.emit('r', "ld.param.u32 $, [count];");
    let beyond = writer.emit('p', &format!("setp.ge.u32 $, {at}, {count};"));
    writer.line(&format!("@{beyond} ret;"));
    let places = places(entry, writer, &at)?;
    let lanes = if entry.four { 4 } else { 1 };
    let mut values = vec![Vec::new(); lanes];
    for (index, (source, place)) in entry.inputs.iter().zip(&places).enumerate() {
        let natural = Number::of(source.dtype)?;
        let address = storage::address(writer, &format!("x{index}"), source.dtype, place.as_deref())?;
        // A source with stride 0 along the last axis has one value for all four lanes: one scalar
        // load serves them.
        let side_by_side = !matches!(source.place, InputPlace::One | InputPlace::Steps { last: false });
        let loaded = if entry.four && side_by_side {
            storage::load_four(writer, source.dtype, &address)?.to_vec()
        } else {
            vec![storage::load(writer, source.dtype, &address, place.as_deref())?; lanes]
        };
        for (values, loaded) in values.iter_mut().zip(&loaded) {
            values.push(storage::convert(writer, loaded, natural, entry.number));
        }
    }
    let mut results = Vec::with_capacity(lanes);
    for values in &values {
        results.push(writer.number(entry.formula, entry.number, values)?);
    }
    let address = storage::address(writer, "y", entry.output, Some(&at))?;
    storage::store(writer, (&results, entry.number), entry.output, &address)
}

/// Returns the register with each input's element index, or `None` for the first element of the
/// tensor.
fn places(entry: &Entry<'_>, writer: &mut Writer, at: &str) -> Result<Vec<Option<String>>> {
    let mut along = Vec::new();
    if entry.inputs.iter().any(|source| matches!(source.place, InputPlace::Steps { .. })) {
        ensure!((1..=8).contains(&entry.rank), Fail, "a walk over {} axes", entry.rank);
        // Decompose the flat index into one index per axis, from the last axis to the first.
        let mut rest = at.to_owned();
        for axis in (1..entry.rank).rev() {
            let size = writer.emit('r', &format!("ld.param.u32 $, [sizes+{}];", 4 * axis));
            let whole = writer.emit('r', &format!("div.u32 $, {rest}, {size};"));
            let used = writer.emit('r', &format!("mul.lo.u32 $, {whole}, {size};"));
            along.push((axis, writer.emit('r', &format!("sub.u32 $, {rest}, {used};"))));
            rest = whole;
        }
        along.push((0, rest));
    }
    let mut places = Vec::with_capacity(entry.inputs.len());
    for (index, source) in entry.inputs.iter().enumerate() {
        let mut place = match source.place {
            InputPlace::Same => Some(at.to_owned()),
            InputPlace::One => None,
            InputPlace::Steps { last } => Some(stepped(writer, (index, last, entry.rank), &along)),
        };
        if source.start > 0 {
            // The first element of a tensor has no index register, but a start needs one to be
            // added to.
            let place_of_all = place.take().unwrap_or_else(|| writer.emit('r', "mov.u32 $, 0;"));
            place = Some(writer.emit('r', &format!("add.u32 $, {place_of_all}, {};", source.start)));
        }
        places.push(place);
    }
    Ok(places)
}

/// Emits the element index of a strided input.
fn stepped(
    writer: &mut Writer,
    (index, last, rank): (usize, bool, usize),
    along: &[(usize, String)],
) -> String {
    let mut place = writer.emit('r', "mov.u32 $, 0;");
    for (axis, along) in along {
        // The last axis has stride 1 or 0, so its step needs neither a parameter nor a product.
        if axis + 1 < rank {
            let step = writer.emit('r', &format!("ld.param.u32 $, [steps{index}+{}];", 4 * axis));
            place = writer.emit('r', &format!("mad.lo.u32 $, {along}, {step}, {place};"));
        } else if last {
            place = writer.emit('r', &format!("add.u32 $, {along}, {place};"));
        }
    }
    place
}

impl Writer {
    /// Emits a formula, and returns the register of its value.
    fn number(&mut self, formula: &ScalarExpr, number: Number, inputs: &[String]) -> Result<String> {
        match formula {
            ScalarExpr::Input(index) => {
                let input = inputs.get(*index).cloned();
                input.ok_or_else(|| {
                    error!(InvalidGraph, "the formula reads input {index} of {}", inputs.len())
                })
            }
            ScalarExpr::Constant(value) => Ok(self.constant(*value, number)),
            // PTX predicates are no numbers, so a comparison selects 1 or 0 where a number is
            // expected.
            _ if is_truth(formula) => {
                let truth = self.condition(formula, number, inputs)?;
                let (one, zero) = (self.constant(1.0, number), self.constant(0.0, number));
                Ok(self.chosen(number, &one, &zero, &truth))
            }
            ScalarExpr::Unary(function, x) => {
                let x = self.number(x, number, inputs)?;
                functions::unary(self, *function, number, x)
            }
            ScalarExpr::Binary(function, a, b) => {
                let (a, b) = (self.number(a, number, inputs)?, self.number(b, number, inputs)?);
                functions::binary(self, *function, number, &a, &b)
            }
            ScalarExpr::Select(condition, then, otherwise) => {
                let truth = self.condition(condition, number, inputs)?;
                let then = self.number(then, number, inputs)?;
                let otherwise = self.number(otherwise, number, inputs)?;
                Ok(self.chosen(number, &then, &otherwise, &truth))
            }
        }
    }

    /// Emits the predicate that a formula is not zero.
    fn condition(&mut self, formula: &ScalarExpr, number: Number, inputs: &[String]) -> Result<String> {
        match formula {
            ScalarExpr::Unary(UnaryFn::Not, x) => {
                let x = self.condition(x, number, inputs)?;
                Ok(self.emit('p', &format!("not.pred $, {x};")))
            }
            ScalarExpr::Unary(function @ (UnaryFn::IsNan | UnaryFn::IsInf), x) if number.is_float() => {
                let (x, name) = (self.number(x, number, inputs)?, number.name());
                if *function == UnaryFn::IsNan {
                    // `setp.nan` is true if either operand is NaN, so one operand in both places
                    // suffices.
                    return Ok(self.emit('p', &format!("setp.nan.{name} $, {x}, {x};")));
                }
                let size = self.emit(number.class(), &format!("abs.{name} $, {x};"));
                let infinite = self.constant(f64::INFINITY, number);
                Ok(self.emit('p', &format!("setp.eq.{name} $, {size}, {infinite};")))
            }
            ScalarExpr::Unary(UnaryFn::IsNan | UnaryFn::IsInf, _) => {
                // Integers are never NaN or infinite: the constant predicate false.
                let never = self.constant(0.0, number);
                Ok(self.truth(&never, number))
            }
            ScalarExpr::Binary(function, a, b) => {
                let (comparison, logic) = match function {
                    BinaryFn::Less => ("lt", ""),
                    BinaryFn::LessOrEqual => ("le", ""),
                    BinaryFn::Equal => ("eq", ""),
                    BinaryFn::And => ("", "and"),
                    BinaryFn::Or => ("", "or"),
                    BinaryFn::Xor => ("", "xor"),
                    _ => {
                        // `is_truth` excludes arithmetic, so `number` does not call back without
                        // end.
                        let value = self.number(formula, number, inputs)?;
                        return Ok(self.truth(&value, number));
                    }
                };
                if logic.is_empty() {
                    let (a, b) = (self.number(a, number, inputs)?, self.number(b, number, inputs)?);
                    return Ok(self.emit('p', &format!("setp.{comparison}.{} $, {a}, {b};", number.name())));
                }
                let (a, b) = (self.condition(a, number, inputs)?, self.condition(b, number, inputs)?);
                Ok(self.emit('p', &format!("{logic}.pred $, {a}, {b};")))
            }
            _ => {
                let value = self.number(formula, number, inputs)?;
                Ok(self.truth(&value, number))
            }
        }
    }
}

/// Whether the value of a formula is boolean.
fn is_truth(formula: &ScalarExpr) -> bool {
    use BinaryFn::{And, Equal, Less, LessOrEqual, Or, Xor};
    match formula {
        ScalarExpr::Unary(function, _) => {
            matches!(function, UnaryFn::Not | UnaryFn::IsNan | UnaryFn::IsInf)
        }
        ScalarExpr::Binary(function, ..) => {
            matches!(function, Less | LessOrEqual | Equal | And | Or | Xor)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
