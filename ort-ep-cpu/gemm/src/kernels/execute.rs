//! The blocked GEMM loops (blocks, panels and tiles) and their split over threads.

use std::array;
use std::ops::Range;

use parking_lot::Mutex;

use super::Kernel;
use super::columns::{FewColumns, MOST_TILES};
use super::pairs::STAGED;
use super::panels::{MOST_PANELS, panels_of};
use super::tile::Tile;
use crate::epilogue::{Finish, apply};
use crate::operand::{LhsOperand, RhsOperand};
use crate::{Gemm, GemmError};
use ort_cpu_threads::interrupt::{TASK_UNITS, spending};
use ort_cpu_threads::parallel::{Pool, Shares, for_each_chunk_mut};
use ort_cpu_vector::simd::Isa;

/// The maximum number of k steps for which writing C takes longer than reading panels of B.
const FEW_STEPS: usize = 32;

/// Multiply-adds of a tile per unit of `interrupt::spend`: a core does about eight in a nanosecond.
const UNIT_TERMS: usize = 16;

/// Multiply-adds that take as long as writing an element of C.
const WRITE_TERMS: usize = 16;

/// The split of a batch of GEMMs into tasks. A task computes a block of C over all of k, so the
/// split does not change the order of any sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// The instruction set for packing.
    pub(crate) isa: Isa,
    /// GEMMs in the batch.
    pub(crate) count: usize,
    /// Rows, columns and k steps of each GEMM.
    pub(crate) shape: [usize; 3],
    /// The columns of a panel of B (NR), at most those of the kernel.
    pub(crate) width: usize,
    /// Parts that the tiles of a column are cut into, and the panels of a row.
    pub(crate) parts: [usize; 2],
    /// Whether consecutive tasks share rows; otherwise they share columns.
    pub(crate) rows_first: bool,
    /// k steps in a block (KC).
    pub(crate) steps: usize,
    /// Tiles whose panels of A stay in cache together (MC in tiles).
    pub(crate) tiles_at_once: usize,
    /// Panels of B that are packed or used together (NC in panels).
    pub(crate) panels_at_once: usize,
    pub(crate) threads: usize,
    /// Whether blocks of B are packed into the workspace.
    pub(crate) packs: bool,
    /// The workspace of each thread.
    pub(crate) slot: SlotLens,
}

/// The parts of a thread's workspace, in `f32` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLens {
    /// A packed block of B.
    pub(crate) block: usize,
    /// Rows of A converted to bf16 pairs.
    pub(crate) lhs: usize,
    /// The staging buffer of a conversion.
    pub(crate) stage: usize,
}

impl SlotLens {
    pub(crate) fn len(&self) -> usize {
        self.block + self.lhs + self.stage
    }

    /// Splits a slot into its parts.
    fn split<'a>(&self, slot: &'a mut [f32]) -> Slot<'a> {
        let (block, rest) = slot.split_at_mut(self.block);
        let (lhs, stage) = rest.split_at_mut(self.lhs);
        Slot { block, lhs, stage }
    }
}

/// A thread's part of the workspace.
struct Slot<'a> {
    block: &'a mut [f32],
    lhs: &'a mut [f32],
    stage: &'a mut [f32],
}

/// Where the results go.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    pub(crate) values: &'a mut [f32],
    pub(crate) row_stride: usize,
    pub(crate) batch_stride: usize,
}

/// The first element of the output, for threads that write disjoint blocks of it.
#[derive(Clone, Copy)]
struct Start(*mut f32);

// SAFETY: the tasks of a grid write disjoint elements; `execute` gives each its own matrix, tiles
// and panels.
unsafe impl Sync for Start {}

impl Start {
    fn offset(&self, by: usize) -> *mut f32 {
        self.0.wrapping_add(by)
    }
}

/// Computes the whole grid. `workspace` holds a slot for each thread. `first` is the GEMM at index
/// 0, so that those without a batch are described once.
///
/// The caller has checked that `output` holds `count` matrices, and that neither their rows nor the
/// matrices overlap.
pub(crate) fn execute<'a>(
    kernel: &Kernel,
    grid: &Grid,
    first: &Gemm<'a>,
    problem: &(dyn Fn(usize) -> Result<Gemm<'a>, GemmError> + Sync),
    output: Output,
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    let [rows, columns, _] = grid.shape;
    if rows == 0 || columns == 0 || grid.count == 0 {
        return Ok(());
    }
    let panels = columns.div_ceil(grid.width);
    let [row_parts, column_parts] = grid.parts;
    let parts = row_parts * column_parts;
    let start = Start(output.values.as_mut_ptr());
    // Tasks cannot return errors, so the last one is kept here.
    let failure = Mutex::new(None);
    let run = |task: usize, slot: &mut [f32]| {
        let (index, part) = (task / parts, task % parts);
        // Consecutive tasks share the parts of the dimension that was split first.
        let [row_part, column_part] = match grid.rows_first {
            true => [part / column_parts, part % column_parts],
            false => [part % row_parts, part / row_parts],
        };
        let fail = |error| *failure.lock() = Some(error);
        let other;
        let gemm = if index == 0 {
            first
        } else {
            other = match problem(index) {
                Ok(gemm) if gemm.shape() == Ok(grid.shape) => gemm,
                Ok(_) => return fail(GemmError::Shape("the products of a batch differ in shape")),
                Err(error) => return fail(error),
            };
            &other
        };
        let finish = match Finish::new(gemm.epilogue, gemm.origin, rows, columns) {
            Ok(finish) => finish,
            Err(error) => return fail(error),
        };
        let height = gemm.lhs.height(kernel);
        let tiles = rows.div_ceil(height);
        let block = Block {
            kernel,
            gemm,
            finish,
            c: start.offset(index * output.batch_stride),
            c_row: output.row_stride,
            grid,
            height,
        };
        // SAFETY: `run_batch` checked that the output holds every matrix of the batch, and this is
        // the only task with this combination of matrix, tiles and panels.
        unsafe {
            block.run(
                cut(tiles, row_parts, row_part),
                cut(panels, column_parts, column_part),
                &mut grid.slot.split(slot),
            );
        }
    };
    distribute(grid, parts * grid.count, workspace, &run);
    failure.into_inner().map_or(Ok(()), Err)
}

/// Runs each task on some thread, with that thread's part of the workspace.
fn distribute(grid: &Grid, tasks: usize, workspace: &mut [f32], run: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    let slot_len = grid.slot.len();
    if slot_len == 0 {
        Pool::global().run(grid.threads, tasks, &|task| run(task, &mut []));
        return;
    }
    let shares = Shares::new(grid.threads, tasks);
    let slots = &mut workspace[..grid.threads * slot_len];
    for_each_chunk_mut(grid.threads, slots, slot_len, |taker, slot| {
        spending(TASK_UNITS, shares.of(taker)).for_each(|task| run(task, slot));
    });
}

/// Returns part `index` of `parts` nearly equal parts of `0..len`.
fn cut(len: usize, parts: usize, index: usize) -> Range<usize> {
    len * index / parts..len * (index + 1) / parts
}

/// The address pattern of the panels of an operand. It has the strides between panels, between the
/// rows of a panel of A (columns of B are contiguous), and between k steps.
#[derive(Clone, Copy)]
pub(super) struct Strips {
    pub(super) start: *const f32,
    /// Stride from one tile of A, or one panel of B, to the next.
    pub(super) next: usize,
    pub(super) row: usize,
    pub(super) step: usize,
}

/// Tiles and panels that are computed together over one k block.
pub(super) struct Group {
    pub(super) tiles: Range<usize>,
    pub(super) panels: Range<usize>,
    pub(super) steps: Range<usize>,
    /// The k block of the tiles' A, and of the panels' B.
    pub(super) a: Strips,
    pub(super) b: Strips,
}

/// One GEMM as a task sees it.
pub(super) struct Block<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) gemm: &'a Gemm<'a>,
    pub(super) finish: Finish<'a>,
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    pub(super) grid: &'a Grid,
    pub(super) height: usize,
}

impl Block<'_> {
    /// Computes these tiles and panels over all of k.
    ///
    /// # Safety
    ///
    /// `c` must hold the whole matrix, and no other thread may touch these tiles and panels of it.
    unsafe fn run(&self, tiles: Range<usize>, panels: Range<usize>, slot: &mut Slot<'_>) {
        if tiles.is_empty() || panels.is_empty() {
            return;
        }
        // SAFETY: this function has the same contract as the functions it calls.
        unsafe {
            if self.run_vector(&tiles, &panels) {
                return;
            }
            // A packed block of B serves all tiles at once. Without packing, fewer tiles at a time
            // keep their part of C in cache from one k block to the next.
            let at_once = if self.grid.packs { tiles.len() } else { self.grid.tiles_at_once };
            for tile in tiles.clone().step_by(at_once) {
                let tiles = tile..(tile + at_once).min(tiles.end);
                for first in panels.clone().step_by(self.grid.panels_at_once) {
                    let group = first..(first + self.grid.panels_at_once).min(panels.end);
                    self.run_group(&tiles, group, slot);
                }
            }
        }
    }

    /// Computes a group of panels over all of k.
    ///
    /// # Safety
    ///
    /// As [`Block::run`].
    unsafe fn run_group(&self, tiles: &Range<usize>, panels: Range<usize>, slot: &mut Slot<'_>) {
        let [_, _, k] = self.grid.shape;
        let mut step = 0;
        loop {
            let end = (step + self.grid.steps).min(k);
            let b = self.strips_of_b(&panels, step..end, slot);
            for tile in tiles.clone().step_by(self.grid.tiles_at_once) {
                let tiles = tile..(tile + self.grid.tiles_at_once).min(tiles.end);
                let a = self.strips_of_a(&tiles, step..end, slot);
                // SAFETY: the caller's contract is that of `run`. `strips_of_a` and `strips_of_b`
                // returned panels that hold this k block.
                unsafe { self.run_strips(&Group { tiles, panels: panels.clone(), steps: step..end, a, b }) };
            }
            step = end;
            if step == k {
                return;
            }
        }
    }

    /// Returns the columns that a run of panels covers.
    pub(super) fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        let width = self.grid.width;
        panels.start * width..(panels.end * width).min(self.grid.shape[1])
    }

    /// Returns one k block of B for a group of panels: in place, or packed into the slot.
    fn strips_of_b(&self, panels: &Range<usize>, steps: Range<usize>, slot: &mut Slot<'_>) -> Strips {
        let (kernel, width) = (self.kernel, self.grid.width);
        let next = kernel.elements(steps.len()) * width;
        let packed = |start| Strips { start, next, row: 0, step: width };
        match &self.gemm.rhs {
            RhsOperand::Packed(b) => {
                let next = kernel.elements(b.k) * width;
                let first = panels.start * next + kernel.elements(steps.start) * width;
                Strips { start: b.values.as_ptr().wrapping_add(first), next, row: 0, step: width }
            }
            RhsOperand::Plain(matrix) if !self.grid.packs => {
                let first = panels.start * width + steps.start * matrix.row_stride;
                let start = matrix.values.as_ptr().wrapping_add(first);
                Strips { start, next: width, row: 0, step: matrix.row_stride }
            }
            RhsOperand::Im2col(image) if image.terms == kernel.terms() => {
                let steps = kernel.elements(steps.start)..kernel.elements(steps.end);
                kernel.pack_windows(image, steps, self.columns(panels), slot.block, [width, next]);
                packed(slot.block.as_ptr())
            }
            _ => {
                for (panel, to) in panels.clone().zip(slot.block.chunks_exact_mut(next.max(1))) {
                    let columns = self.columns(&(panel..panel + 1));
                    match kernel.terms() {
                        1 => self.pack_panel(steps.clone(), columns, to),
                        _ => self.pack_pairs(steps.clone(), columns, to, slot.stage),
                    }
                }
                packed(slot.block.as_ptr())
            }
        }
    }

    /// Packs k steps and columns of B into a panel with one element per k step.
    fn pack_panel(&self, steps: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        let width = self.grid.width;
        match &self.gemm.rhs {
            RhsOperand::Plain(matrix) => self.kernel.pack_plain(matrix, steps, columns, to),
            RhsOperand::Blocks(blocks) => blocks.pack(self.grid.isa, steps, columns, to, width),
            RhsOperand::Quantized(matrix) => matrix.pack(self.grid.isa, steps, columns, to, width),
            RhsOperand::Im2col(image) => {
                self.kernel.pack_windows(image, steps, columns, to, [width, 0]);
            }
            RhsOperand::Packed(_) => {}
        }
    }

    /// The same with one bf16 pair per two k steps.
    fn pack_pairs(&self, steps: Range<usize>, columns: Range<usize>, to: &mut [f32], stage: &mut [f32]) {
        let width = self.grid.width;
        // Contiguous rows are paired straight from B, without the staging buffer.
        if let RhsOperand::Plain(matrix) = &self.gemm.rhs
            && (matrix.column_stride == 1 || columns.len() == 1)
        {
            let first = steps.start * matrix.row_stride + columns.start * matrix.column_stride;
            let from = matrix.values.get(first..).unwrap_or(&[]);
            return self.kernel.pair_rows_into(
                (from, matrix.row_stride),
                [steps.len(), columns.len()],
                (to, width),
            );
        }
        for (start, to) in steps.clone().step_by(STAGED).zip(to.chunks_mut(STAGED / 2 * width)) {
            let part = start..(start + STAGED).min(steps.end);
            let staged = &mut stage[..part.len() * width];
            self.pack_panel(part.clone(), columns.clone(), staged);
            self.kernel.pair_rows((staged, width), [part.len(), width], to);
        }
    }

    /// Returns one k block of A for a group of tiles: in place, or converted to bf16 pairs in the
    /// slot.
    fn strips_of_a(&self, tiles: &Range<usize>, steps: Range<usize>, slot: &mut Slot<'_>) -> Strips {
        let (kernel, height) = (self.kernel, self.height);
        match &self.gemm.lhs {
            LhsOperand::Packed(packed) => {
                let next = kernel.elements(packed.k) * height;
                let first = tiles.start * next + kernel.elements(steps.start) * height;
                Strips { start: packed.values.as_ptr().wrapping_add(first), next, row: 1, step: height }
            }
            LhsOperand::Plain(matrix) if matrix.terms == kernel.terms() => {
                let [row, step] = [matrix.row_stride, matrix.column_stride];
                let first = tiles.start * height * row + kernel.elements(steps.start) * step;
                let start = matrix.values.as_ptr().wrapping_add(first);
                Strips { start, next: height * row, row, step }
            }
            LhsOperand::Plain(matrix) => {
                let rows = tiles.start * height..(tiles.end * height).min(self.grid.shape[0]);
                let [row, step] = kernel.pair_lhs(matrix, rows, steps, slot.lhs, slot.stage);
                Strips { start: slot.lhs.as_ptr(), next: height * row, row, step }
            }
        }
    }

    /// Computes all tiles of a group over one k block.
    ///
    /// # Safety
    ///
    /// As [`Block::run`], and the panels of A and B must hold the k block of these tiles and
    /// panels.
    unsafe fn run_strips(&self, group: &Group) {
        let ([rows, _, k], Group { tiles, steps, .. }) = (self.grid.shape, group);
        // The multiply-adds of a tile, and the cost of writing it, which dominates if k is short.
        let units = self.height * self.grid.width * (steps.len() + WRITE_TERMS) / UNIT_TERMS;
        let few = self.few_columns(&group.panels);
        let beside = few.and_then(|few| few.beside).filter(|_| self.has_column_beside(group));
        let last = usize::from(few.is_some()) + usize::from(beside.is_some());
        let panels = group.panels.start..group.panels.end - last;
        // Tile by tile, rows of C are written in long runs and a panel of the weights stays in L1.
        // Panels of B then do not stay there, which matters if they are long and were not packed.
        let long = !self.grid.packs && steps.len() > FEW_STEPS;
        let by_tile = matches!(self.gemm.lhs, LhsOperand::Packed(_)) && !long;
        // SAFETY: the functions called have the contract of this function.
        unsafe {
            if by_tile {
                spending(units * panels.len(), tiles.clone())
                    .for_each(|tile| self.run_row(tile, panels.clone(), group));
            } else {
                let panels = self.run_few_rows(panels, group, units);
                spending(units * tiles.len(), panels)
                    .for_each(|panel| self.run_column(panel, tiles.clone(), group));
            }
            // Last, because few columns would wait for rows of A that are not in cache yet.
            if let Some(beside) = beside {
                self.run_beside(beside, group, units);
            } else if let Some(few) = few {
                self.run_few_columns(few, group, units);
            }
        }
        if steps.end == k && !self.finish.rest.is_empty() {
            // Whole rows of the group: a call for each row of a tile would cost as much as its
            // work.
            let rows = tiles.start * self.height..(tiles.end * self.height).min(rows);
            // SAFETY: `run` requires these rows and columns of C to be this thread's.
            unsafe { self.apply_rest(rows, &self.columns(&group.panels)) };
        }
    }

    /// Computes several panels at a time if there are few rows. Returns the panels that are left.
    ///
    /// # Safety
    ///
    /// As [`Block::run_strips`].
    unsafe fn run_few_rows(&self, panels: Range<usize>, group: &Group, units: usize) -> Range<usize> {
        let ([rows, columns, _], width) = (self.grid.shape, self.grid.width);
        let is_whole = width == self.kernel.width() && group.b.step == width;
        let Some(function) = self.kernel.few_rows.get(rows - 1).filter(|_| is_whole) else {
            return panels;
        };
        let (at_once, whole) = (panels_of(rows), panels.start..panels.end.min(columns / width));
        let rest = whole.start + whole.len() / at_once * at_once;
        for first in spending(units * at_once, (whole.start..rest).step_by(at_once)) {
            let calls: [Tile; MOST_PANELS] =
                array::from_fn(|at| self.tile(group.tiles.start, first + at.min(at_once - 1), group));
            // SAFETY: as in `run_tiles`.
            unsafe { function(&calls[..at_once]) };
        }
        rest..panels.end
    }

    /// Returns the kernel's functions for few columns if the last of these panels is to take them.
    fn few_columns(&self, panels: &Range<usize>) -> Option<&FewColumns> {
        let columns = self.columns(&(panels.end - 1..panels.end)).len();
        let has = matches!(self.gemm.lhs, LhsOperand::Packed(_))
            && self.kernel.has_few_columns(self.grid.shape[0], columns);
        self.kernel.few_columns.as_ref().filter(|_| has)
    }

    /// Computes the last panel with rows as lanes.
    ///
    /// # Safety
    ///
    /// As [`Block::run_strips`].
    unsafe fn run_few_columns(&self, few: &FewColumns, group: &Group, units: usize) {
        let (tiles, last) = (&group.tiles, group.panels.end - 1);
        let call = |tile: usize| self.tile(tile, last, group);
        let whole = tiles.start..(self.grid.shape[0] / self.height).clamp(tiles.start, tiles.end);
        // SAFETY: the contract of this function is that of `run_tiles`; see there.
        unsafe {
            for first in spending(units, whole.clone().step_by(MOST_TILES)) {
                let count = MOST_TILES.min(whole.end - first);
                let calls: [Tile; MOST_TILES] = array::from_fn(|at| call(first + at.min(count - 1)));
                (few.compute)(&calls[..count]);
            }
            (whole.end..tiles.end).for_each(|tile| self.run_tiles(self.tile(tile, last, group), tile));
        }
    }

    /// Applies the rest of the epilogue to these rows and columns.
    ///
    /// # Safety
    ///
    /// As [`Block::run`].
    unsafe fn apply_rest(&self, rows: Range<usize>, columns: &Range<usize>) {
        for row in rows {
            // SAFETY: `run` requires these elements of C to be this thread's.
            let values = unsafe {
                let start = self.c.wrapping_add(row * self.c_row + columns.start);
                std::slice::from_raw_parts_mut(start, columns.len())
            };
            apply(self.finish.rest, self.gemm.origin, [row, columns.start], values);
        }
    }
}
