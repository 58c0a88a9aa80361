//! GEMMs as cuBLASLt computes them: types, column-major layouts and the epilogue.

/// The type of all matrices of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LtElement {
    F32,
    F64,
    F16,
    Bf16,
}

/// The type of the accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Compute {
    F32,
    /// Float32, of operands rounded to TF32.
    Tf32,
    F64,
}

/// The activation of the epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    None,
    Relu,
    /// The tanh approximation.
    Gelu,
}

/// A batch of column-major matrices: element (row, column) is at offset `column * leading + row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LtLayout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
    /// Elements from one matrix of the batch to the next; 0 if all share one matrix.
    pub(crate) step: usize,
}

/// `d = epilogue(alpha * op(a) * op(b) + beta * c + bias)`, as types and shapes determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Matmul {
    pub(crate) element: LtElement,
    pub(crate) compute: Compute,
    pub(crate) batch: usize,
    /// Whether `a` and `b` are transposed.
    pub(crate) transposed: [bool; 2],
    /// The layouts of a, b, c and d.
    pub(crate) layouts: [LtLayout; 4],
    /// Whether there is a bias, one number per row of the result.
    pub(crate) has_bias: bool,
    pub(crate) epilogue: Epilogue,
}
