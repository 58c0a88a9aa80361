//! The checks and the run of an 8-bit GEMM.

use super::super::kernels::{ByteKernel, execute_bytes};
use super::super::{Cpu, GemmError};
use super::{Addend, Factors, IntegerGemm, Target};

impl IntegerGemm<'_> {
    /// Computes the GEMM, with the same bits on any number of threads and any instruction set.
    ///
    /// # Errors
    ///
    /// If shapes do not match or a slice is too short.
    pub fn run(&self, cpu: Cpu, target: Target<'_>) -> Result<(), GemmError> {
        let kernel = ByteKernel::of(cpu.isa);
        self.rhs.check()?;
        let (rows, columns) = (self.lhs.rows, self.rhs.columns);
        if self.lhs.groups != self.rhs.groups.saturating_mul(self.rhs.starts.len()) {
            return Err(GemmError::Shape("A has a different number of columns than B has rows"));
        }
        // The run that starts last decides how far a row is read.
        let last = self.rhs.starts.iter().map(|[start, _]| *start).max();
        self.lhs.check(last.map_or(0, |last| last.saturating_add(self.rhs.groups.saturating_mul(4))))?;
        let [wide, wanted] = self.strip;
        if wide == 0 || wanted > wide {
            return Err(GemmError::Shape("strips of columns are longer than the columns"));
        }
        let results = columns / wide * wanted + (columns % wide).min(wanted);
        if self.row_stride < results && rows > 1 {
            return Err(GemmError::Shape("the rows of a result overlap"));
        }
        let needed = match rows {
            0 => 0,
            _ => (rows - 1).saturating_mul(self.row_stride).saturating_add(results),
        };
        let (len, factors, biases) = match &target {
            Target::Accumulators(accumulators) => (accumulators.len(), Factors::One(1.0), [0, 0]),
            Target::Numbers { values, scaling } => {
                (values.len(), scaling.factors, [scaling.row_bias.len(), scaling.column_bias.len()])
            }
            Target::Quantized { values, factors, .. } => (values.len(), *factors, [0, 0]),
        };
        if len < needed {
            return Err(GemmError::TooShort { what: "a result", needed, len });
        }
        if let Target::Numbers { scaling, .. } = &target
            && let Addend::Matrix(addend) = scaling.addend
            && addend.len() < needed
        {
            return Err(GemmError::TooShort { what: "an addend", needed, len: addend.len() });
        }
        let terms = &self.terms;
        let [row_bias, column_bias] = biases;
        let of_rows = [terms.rows.len(), terms.outer[0].0.len(), terms.outer[1].0.len(), row_bias];
        let of_columns = [terms.columns.len(), terms.outer[0].1.len(), terms.outer[1].1.len(), column_bias];
        let (row_factors, column_factors) = match factors {
            Factors::One(_) => (rows, columns),
            Factors::Rows(factors) => (factors.len(), columns),
            Factors::Columns(factors) => (rows, factors.len()),
        };
        let fit = |len: &usize, count: usize| *len == 0 || *len >= count;
        let windows = terms.window_sums.as_ref();
        let windows_fit = windows.is_none_or(|(factors, ones)| {
            factors.len() >= rows && ones.rows == 1 && ones.groups == self.lhs.groups && self.signed_lhs
        });
        let fits = of_rows.iter().all(|len| fit(len, rows))
            && of_columns.iter().all(|len| fit(len, columns))
            && terms.outer.iter().all(|(rows, columns)| rows.is_empty() == columns.is_empty())
            && row_factors >= rows
            && column_factors >= columns
            && windows_fit;
        if !fits {
            return Err(GemmError::Shape("a term or factor is not there for each row or column"));
        }
        execute_bytes(kernel, cpu.threads, self, target);
        Ok(())
    }
}
