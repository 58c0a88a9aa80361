//! Compiler from scalar formulas to steps over registers.
//!
//! Each step is one vector loop over a block.

use ort_core::spec::{BinaryFn, ScalarExpr, UnaryFn};
use smallvec::SmallVec;

/// The function of a step. `V` are further functions of one value for which a lane type has a loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Function<V> {
    /// The operand itself.
    Copy,
    /// One of the lane type's own functions.
    Own(V),
    /// A function of one value.
    Unary(UnaryFn),
    /// A function of two values.
    Binary(BinaryFn),
    /// The second operand if the first is not zero, else the third.
    Select,
}

/// The source of an operand.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    Input(usize),
    Constant(f64),
    Register(usize),
}

/// Constants are compared by their bits, because `x / 0` and `x / -0` differ.
impl PartialEq for Source {
    fn eq(&self, other: &Source) -> bool {
        match (self, other) {
            (Source::Input(a), Source::Input(b)) | (Source::Register(a), Source::Register(b)) => a == b,
            (Source::Constant(a), Source::Constant(b)) => a.to_bits() == b.to_bits(),
            _ => false,
        }
    }
}

/// One step. Operands that its function does not have are constants, which are never read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step<V> {
    pub(super) function: Function<V>,
    pub(super) operands: [Source; 3],
    /// The register written; the last step writes the output instead.
    pub(super) to: usize,
}

impl<V> Step<V> {
    /// Returns the inputs that the step reads.
    pub(super) fn inputs(&self) -> impl Iterator<Item = usize> + '_ {
        self.operands.iter().filter_map(|operand| match operand {
            Source::Input(index) => Some(*index),
            _ => None,
        })
    }

    /// Returns whether the step reads the input at `index`.
    pub(super) fn reads(&self, index: usize) -> bool {
        self.operands.contains(&Source::Input(index))
    }
}

/// A formula as steps. No step writes a register that it reads.
#[derive(Debug, Clone)]
pub(super) struct Program<V> {
    pub(super) steps: Vec<Step<V>>,
    pub(super) registers: usize,
    pub(super) inputs: usize,
}

const NOTHING: Source = Source::Constant(0.0);

impl<V: Copy + PartialEq> Program<V> {
    /// Returns the program of one function of the lane type's own.
    pub(super) fn own(function: V) -> Program<V> {
        let operands = [Source::Input(0), NOTHING, NOTHING];
        Program {
            steps: vec![Step { function: Function::Own(function), operands, to: 0 }],
            registers: 0,
            inputs: 1,
        }
    }

    /// Compiles a formula, with common-subexpression elimination.
    pub(super) fn compile(formula: &ScalarExpr) -> Program<V> {
        Program::compile_with(formula, |_| None)
    }

    /// Like [`compile`](Self::compile), but uses the lane type's own functions for the subformulas
    /// that `idiom` recognizes.
    pub(super) fn compile_with(formula: &ScalarExpr, idiom: FindIdiom<V>) -> Program<V> {
        let mut steps = Vec::new();
        let result = emit(&mut steps, formula, idiom);
        // The last step writes the output, so a formula that ends in no new step needs a copy.
        if steps.is_empty() || result != Source::Register(steps.len() - 1) {
            steps.push(Step {
                function: Function::Copy,
                operands: [result, NOTHING, NOTHING],
                to: steps.len(),
            });
        }
        let registers = assign_registers(&mut steps);
        Program { steps, registers, inputs: formula.input_count() }
    }
}

/// Returns the function that a formula is, and the subformula of its argument.
type FindIdiom<V> = fn(&ScalarExpr) -> Option<(V, &ScalarExpr)>;

impl<V: Copy> Program<V> {
    /// Returns the units of work for an element beyond the one that every element counts for.
    pub(super) fn extra_units(&self, of_a_remainder: usize) -> usize {
        let is_remainder =
            |step: &&Step<V>| matches!(step.function, Function::Binary(BinaryFn::Mod | BinaryFn::Fmod));
        self.steps.len().saturating_sub(1) + of_a_remainder * self.steps.iter().filter(is_remainder).count()
    }

    /// Returns whether the input at `index` is only ever one side of binary functions whose other
    /// side satisfies `whole`.
    pub(super) fn only_beside(&self, index: usize, whole: impl Fn(Source) -> bool) -> bool {
        let here = Source::Input(index);
        self.steps.iter().all(|step| match (step.function, step.operands) {
            (Function::Binary(_), [a, b, _]) if a == here => whole(b),
            (Function::Binary(_), [a, b, _]) if b == here => whole(a),
            (_, operands) => !operands.contains(&here),
        })
    }
}

/// How many earlier steps are searched for one that equals a new step.
const MOST_COMPARED: usize = 256;

fn emit<V: Copy + PartialEq>(steps: &mut Vec<Step<V>>, formula: &ScalarExpr, idiom: FindIdiom<V>) -> Source {
    let mut part = |part: &ScalarExpr| emit(steps, part, idiom);
    let (function, operands) = match (idiom(formula), formula) {
        (Some((function, x)), _) => (Function::Own(function), [part(x), NOTHING, NOTHING]),
        (_, ScalarExpr::Input(index)) => return Source::Input(*index),
        (_, ScalarExpr::Constant(value)) => return Source::Constant(*value),
        (_, ScalarExpr::Unary(function, x)) => (Function::Unary(*function), [part(x), NOTHING, NOTHING]),
        (_, ScalarExpr::Binary(function, a, b)) => (Function::Binary(*function), [part(a), part(b), NOTHING]),
        (_, ScalarExpr::Select(condition, then, otherwise)) => {
            (Function::Select, [part(condition), part(then), part(otherwise)])
        }
    };
    let same = |step: &Step<V>| step.function == function && step.operands == operands;
    // Searching all of very many steps would take quadratic time.
    let first = steps.len().saturating_sub(MOST_COMPARED);
    let known = steps.iter().skip(first).position(same).map(|place| first + place);
    let index = known.unwrap_or_else(|| {
        steps.push(Step { function, operands, to: steps.len() });
        steps.len() - 1
    });
    Source::Register(index)
}

/// Register allocation: replaces one register for each step by as few as suffice, and returns how
/// many.
fn assign_registers<V>(steps: &mut [Step<V>]) -> usize {
    let mut last_use = vec![usize::MAX; steps.len()];
    for (index, step) in steps.iter().enumerate() {
        for operand in step.operands {
            if let Source::Register(register) = operand {
                last_use[register] = index;
            }
        }
    }
    let (mut free, mut count) = (Vec::new(), 0);
    let mut place = vec![0; steps.len()];
    let last = steps.len().saturating_sub(1);
    // Linear scan: steps are in order, and each register dies at its last reader.
    for index in 0..steps.len() {
        // The last step writes the output, so it needs no register.
        if index < last {
            place[index] = free.pop().unwrap_or_else(|| {
                count += 1;
                count - 1
            });
            steps[index].to = place[index];
        }
        // Registers that die here are freed after the step got its own. No step writes what it
        // reads.
        let mut done: SmallVec<[usize; 3]> = SmallVec::new();
        for operand in &mut steps[index].operands {
            if let Source::Register(register) = operand {
                if last_use[*register] == index && !done.contains(register) {
                    done.push(*register);
                }
                *register = place[*register];
            }
        }
        free.extend(done.into_iter().map(|register| place[register]));
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parts_are_computed_once_and_registers_are_reused() {
        let x = || ScalarExpr::Input(0);
        let twice = || x().apply(UnaryFn::Exp) + 1.0;
        let program = Program::<()>::compile(&((twice() * twice()).apply(UnaryFn::Log) / x()));
        assert_eq!(program.steps.len(), 5, "exp, add, mul, log, div");
        assert_eq!(program.registers, 2);
        for step in &program.steps[..4] {
            assert!(!step.operands.contains(&Source::Register(step.to)), "{step:?} reads what it writes");
        }
    }

    #[test]
    fn zeros_of_both_signs_are_two_constants() {
        let over = |zero: f64| ScalarExpr::Input(0) / ScalarExpr::Constant(zero);
        let steps = |formula: ScalarExpr| Program::<()>::compile(&formula).steps.len();
        assert_eq!(steps(over(0.0) + over(-0.0)), 3, "two quotients of different sign, and their sum");
        assert_eq!(steps(over(f64::NAN) + over(f64::NAN)), 2, "equal bits are one constant");
    }

    #[test]
    fn a_bare_input_is_copied() {
        let program = Program::<()>::compile(&ScalarExpr::Input(0));
        assert_eq!((program.steps.len(), program.inputs), (1, 1));
        assert_eq!(program.steps[0].function, Function::Copy);
    }
}
