//! `Adafactor`.
//!
//! The new states are computed in the workspace. The update is never materialized. It is computed
//! twice, once for its norm and once to change the parameter.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ops::training::{FactoredShape, adafactor_epsilon};
use ort_core::spec::RUNTIME;
use ort_core::{Result, error};

use super::step::{BLOCK, Call, PART, Parameter, Stream, is_double, spare_bytes, step_number, total};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spending;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::training::{
    Adafactor, adafactor_apply, adafactor_norm, add_squares, outer_row, sum_of_squares,
};

const STEP: usize = 5;
const ROW: usize = 6;
const COLUMN: usize = 7;
const SECOND: usize = 8;
/// Columns in a task, which sums them over all rows.
const STRIP: usize = 64;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "Adafactor",
    in_place: &[(0, 0), (ROW, 1), (COLUMN, 2), (SECOND, 3)],
    make,
    ..KernelDef::BASE
}];

struct AdafactorKernel {
    beta2_decay: f64,
    epsilon: [f64; 2],
    threshold: f64,
    decay: f64,
    is_double: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (attrs, is_double) = (cx.attrs(), is_double(cx));
    let dtype = if is_double { DType::F64 } else { DType::F32 };
    Ok(Box::new(AdafactorKernel {
        beta2_decay: attrs.decimal("beta2_decay")?,
        epsilon: [adafactor_epsilon(attrs, dtype)?, attrs.decimal("epsilon2")?],
        threshold: attrs.decimal("clip_threshold")?,
        decay: attrs.decimal("weight_decay")?,
        is_double,
    }))
}

/// Returns the lengths of what the workspace holds: moments of rows, moments of columns, and means
/// of the former; or second moments.
fn workspace_lengths(layout: FactoredShape) -> [usize; 3] {
    match layout.is_matrix {
        // Rows and columns of one mean each: the sublinear memory of Shazeer and Stern (2018).
        true => [layout.matrices * layout.rows, layout.matrices * layout.columns, layout.matrices],
        false => [layout.columns, 0, 0],
    }
}

impl Executable for AdafactorKernel {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let bytes = if self.is_double { spare_bytes::<f64> } else { spare_bytes::<f32> };
        Ok(workspace_lengths(FactoredShape::of(shapes.input(0))).into_iter().map(bytes).sum())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        if self.is_double { self.run_of::<f64>(cx) } else { self.run_of::<f32>(cx) }
    }
}

impl AdafactorKernel {
    fn run_of<T: Parameter>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        // The gradient has the parameter's shape, which in-place calls do not pass as an input.
        let call = Call::of(cx)?;
        let layout = FactoredShape::of(cx.input(1)?.shape());
        let parameter = Stream::<T>::of(cx, 0, 0)?;
        let states: Vec<(usize, usize)> = match layout.is_matrix {
            true => vec![(ROW, 1), (COLUMN, 2)],
            false => vec![(SECOND, 3)],
        };
        let streams = states.into_iter().map(|(input, output)| Stream::<T>::of(cx, input, output));
        let states: Vec<Stream<'_, T>> = streams.collect::<Result<_>>()?;
        // Without elements, the means below would divide by zero.
        if !call.updates || call.gradient.len() == 0 {
            call.check(std::slice::from_ref(&parameter))?;
            std::iter::once(parameter).chain(states).for_each(Stream::keep);
            return Ok(());
        }
        call.check(std::slice::from_ref(&parameter))?;
        let number = step_number(cx, STEP)?;
        // The new squares have weight `t^beta2_decay`, the increasing decay parameter of the paper.
        let (least, weight) = (self.epsilon[0], T::of(number.powf(self.beta2_decay)));
        let moments = match cut(cx.workspace()?, workspace_lengths(layout))? {
            [second, ..] if !layout.is_matrix => second_moments(&call, weight, states, second)?,
            spaces => Moments::of(&call, layout, weight, states, spaces, T::of(least))?,
        };
        self.apply(&call, number, parameter, &moments)
    }

    /// Computes the new parameter.
    fn apply<'a, T: Parameter>(
        &self,
        call: &Call<'a>,
        number: f64,
        parameter: Stream<'a, T>,
        moments: &Moments<'_, T>,
    ) -> Result<()> {
        let (isa, changes) = (call.isa, parameter.is_wanted());
        let least = self.epsilon[0];
        // Estimates are products of squares, so epsilon limits them squared, as in PyTorch.
        let step = Adafactor { scale: T::of(call.scale), least: T::of(least * least) };
        // First pass: the norms of the parameter and of the unscaled update.
        let mut parts = call.parts([parameter]);
        call.for_each_block(&mut parts, |[x], gradient, start, sums| {
            let mut estimates = [T::zero(); BLOCK];
            let estimates = &mut estimates[..x.len()];
            moments.estimate(call, start, estimates);
            let more = [sum_of_squares(isa, x), adafactor_norm(isa, &step, gradient, estimates)];
            *sums = [sums[0] + more[0], sums[1] + more[1]];
        });
        let root = (call.gradient.len() as f64).sqrt();
        // Root mean squares: of the parameter, and of the update.
        let norms = total(&parts).map(|squares| squares.sqrt() / root);
        // The relative step size of the paper; epsilon2 lets parameters that are zero move.
        let size = norms[0].max(self.epsilon[1]) * call.rate.min(1.0 / number.sqrt());
        // Update clipping: an update whose root mean square is above the threshold shrinks to it.
        let size = size / (norms[1] / self.threshold).max(1.0);
        let factors = [T::of(1.0 - call.rate * self.decay), T::of(size)];
        if changes {
            // The first pass copied the parameter to its output, which is now updated in place.
            parts.iter_mut().for_each(|part| part.streams.iter_mut().for_each(Stream::settle));
            call.for_each_block(&mut parts, |[x], gradient, start, _| {
                let mut estimates = [T::zero(); BLOCK];
                let estimates = &mut estimates[..x.len()];
                moments.estimate(call, start, estimates);
                adafactor_apply(isa, &step, factors, x, [gradient, estimates]);
            });
        }
        Ok(())
    }
}

/// Splits the workspace into slices of these lengths.
fn cut<T: Parameter>(mut bytes: &mut [u8], lengths: [usize; 3]) -> Result<[&mut [T]; 3]> {
    let mut spaces = [const { None }; 3];
    for (space, len) in spaces.iter_mut().zip(lengths) {
        // Each space is whole cache lines, as `workspace` counted them, so the next one is aligned.
        let piece = bytes.split_off_mut(..spare_bytes::<T>(len));
        *space = piece.and_then(|piece| piece.get_mut(..len * size_of::<T>())).map(bytemuck::cast_slice_mut);
    }
    match spaces {
        [Some(one), Some(two), Some(three)] => Ok([one, two, three]),
        _ => Err(error!(Fail, "the workspace is too short")),
    }
}

/// The source of the second moments' estimates.
enum Moments<'a, T> {
    /// Moments of rows and of columns, and the mean of each matrix's row moments.
    Factored { layout: FactoredShape, rows: &'a [T], columns: &'a [T], means: &'a [T] },
    /// The second moments themselves.
    Full(&'a [T]),
}

/// Interpolates from the nearer end, like `torch.lerp`.
fn nearer<T: Parameter>(from: T, to: T, weight: T) -> T {
    let way = to - from;
    if weight < T::of(0.5) { from + weight * way } else { to - way * (T::one() - weight) }
}

fn second_moments<'a, T: Parameter>(
    call: &Call<'_>,
    weight: T,
    states: Vec<Stream<'_, T>>,
    new: &'a mut [T],
) -> Result<Moments<'a, T>> {
    for state in states {
        state.check_len(new.len())?;
        let (old, scale) = (state.elements(), T::of(call.scale));
        for_each_chunk_mut(call.threads, new, PART, |index, piece| {
            let mut converted = [T::zero(); BLOCK];
            for (block, piece) in piece.chunks_mut(BLOCK).enumerate() {
                let start = index * PART + block * BLOCK;
                let range = start..start + piece.len();
                let gradient = call.gradient.block(call.isa, range.clone(), &mut converted);
                for ((new, &old), &gradient) in piece.iter_mut().zip(&old[range]).zip(gradient) {
                    let gradient = gradient * scale;
                    *new = nearer(old, gradient * gradient, weight);
                }
            }
        });
        state.write(new);
    }
    Ok(Moments::Full(new))
}

impl<'a, T: Parameter> Moments<'a, T> {
    /// Computes the new states of matrices, and writes them to the outputs as well.
    fn of(
        call: &Call<'_>,
        layout: FactoredShape,
        weight: T,
        states: Vec<Stream<'_, T>>,
        [rows, columns, means]: [&'a mut [T]; 3],
        least: T,
    ) -> Result<Moments<'a, T>> {
        let Ok([row, column]) = <[Stream<'_, T>; 2]>::try_from(states) else {
            return Err(error!(Fail, "a matrix has two states"));
        };
        row.check_len(rows.len())?;
        column.check_len(columns.len())?;
        // The squares are of the unscaled gradient, so the scale enters squared.
        let square = call.scale * call.scale;
        let mean = |squares: f64, count: usize| T::of(squares * square / count as f64);
        let old = row.elements();
        // A task takes whole rows of about `PART` elements, so no row is summed by two threads.
        let chunk = (PART / layout.columns.max(1)).max(1);
        for_each_chunk_mut(call.threads, rows, chunk, |index, piece| {
            for (row, new) in (index * chunk..).zip(piece) {
                let squares = row_squares::<T>(call, row * layout.columns, layout.columns);
                *new = nearer(old[row], mean(squares, layout.columns), weight);
            }
        });
        let old = column.elements();
        for_each_chunk_mut(call.threads, columns, STRIP, |index, piece| {
            // A strip runs over all rows in order, so the sums do not depend on the threads.
            let (start, mut sums) = (index * STRIP, [0.0; STRIP]);
            column_squares::<T>(call, layout, start, &mut sums[..piece.len()]);
            for ((new, &old), &squares) in piece.iter_mut().zip(&old[start..]).zip(&sums) {
                *new = nearer(old, mean(squares, layout.rows), weight);
            }
        });
        row.write(rows);
        column.write(columns);
        // `chunks` of zero rows would panic; `run_of` returned for a gradient without elements.
        for (new, rows) in means.iter_mut().zip(rows.chunks(layout.rows)) {
            let sum: f64 = rows.iter().map(|&x| x.into()).sum();
            let mean = T::of(sum / layout.rows as f64);
            // The comparison is false for NaN, so NaN stays.
            *new = if mean < least { least } else { mean };
        }
        Ok(Moments::Factored { layout, rows, columns, means })
    }

    /// Writes the estimates of the elements from `start` on.
    fn estimate(&self, call: &Call<'_>, start: usize, to: &mut [T]) {
        match self {
            Moments::Full(values) => to.copy_from_slice(&values[start..start + to.len()]),
            Moments::Factored { layout, rows, columns, means } => {
                let mut at = 0;
                // `start..` may cross rows and matrices. Each turn covers the rest of one row.
                while at < to.len() {
                    let (row, first) = ((start + at) / layout.columns, (start + at) % layout.columns);
                    let (matrix, count) = (row / layout.rows, (layout.columns - first).min(to.len() - at));
                    let columns = &columns[matrix * layout.columns + first..][..count];
                    outer_row(call.isa, [rows[row], means[matrix]], columns, &mut to[at..at + count]);
                    at += count;
                }
            }
        }
    }
}

/// Returns the sum of the squares of `len` elements of the gradient, in doubles.
fn row_squares<T: Parameter>(call: &Call<'_>, start: usize, len: usize) -> f64 {
    let mut converted = [T::zero(); BLOCK];
    let blocks = spending(BLOCK, (start..start + len).step_by(BLOCK)).map(|at| {
        let range = at..(at + BLOCK).min(start + len);
        sum_of_squares(call.isa, call.gradient.block(call.isa, range, &mut converted))
    });
    blocks.sum()
}

/// Sums the squares of the gradient over the rows. The columns are those of all matrices, one
/// matrix after another, from `start` on.
fn column_squares<T: Parameter>(call: &Call<'_>, layout: FactoredShape, start: usize, sums: &mut [f64]) {
    // `sums` is at most a strip long, so a row's part fits the buffer.
    let mut converted = [T::zero(); STRIP];
    let mut at = 0;
    while at < sums.len() {
        let (matrix, first) = ((start + at) / layout.columns, (start + at) % layout.columns);
        let count = (layout.columns - first).min(sums.len() - at);
        for row in spending(16 + count, 0..layout.rows) {
            let place = (matrix * layout.rows + row) * layout.columns + first;
            let gradient = call.gradient.block(call.isa, place..place + count, &mut converted);
            add_squares(call.isa, gradient, &mut sums[at..at + count]);
        }
        at += count;
    }
}
