//! Runs of register tiles, each of which the micro-kernel computes in one call.

use std::ops::Range;

use super::RegisterActivation;
use super::execute::{Block, Group};
use super::tile::{LINE, Next, STEPS, Tile};
use crate::operand::{LhsOperand, RhsOperand};
use ort_cpu_threads::interrupt::spending;

/// Tiles of a run with a column beside them: few enough to be interrupted in between.
const TILES_BESIDE: usize = 64;

impl Block<'_> {
    /// Computes one row of tiles of a group.
    ///
    /// # Safety
    ///
    /// As [`Block::run_strips`].
    pub(super) unsafe fn run_row(&self, tile: usize, panels: Range<usize>, group: &Group) {
        let whole = panels.end.min(self.grid.shape[1] / self.grid.width).max(panels.start);
        // What the first panels of a run prefetch, the last ones do not.
        let first = match self.shares_prefetch(tile, panels.start, group) {
            true => whole.min(group.panels.end - 1),
            false => panels.start + 1,
        };
        let first = first.clamp(panels.start, whole);
        let next = Next {
            b: group.b.next,
            c: self.grid.width,
            column_bias: self.grid.width,
            residual: self.grid.width,
            prefetch: group.b.next,
            ..Next::default()
        };
        for run in [panels.start..first, first..whole, whole..panels.end] {
            if !run.is_empty() {
                let call = self.tile(tile, run.start, group);
                // SAFETY: as in `run_tiles`; all panels of the run have the same columns.
                unsafe { self.run_tiles(call.repeated(run.len(), next), tile) };
            }
        }
    }

    /// Computes one column of tiles of a group.
    ///
    /// # Safety
    ///
    /// As [`Block::run_strips`].
    pub(super) unsafe fn run_column(&self, panel: usize, tiles: Range<usize>, group: &Group) {
        let whole = tiles.end.min(self.grid.shape[0] / self.height).max(tiles.start);
        let first = (group.tiles.start + self.lines()).clamp(tiles.start, whole);
        for run in [tiles.start..first, first..whole, whole..tiles.end] {
            if !run.is_empty() {
                let tile = run.start;
                // SAFETY: as in `run_tiles`; all tiles of the run have the same rows.
                unsafe { self.run_tiles(self.below(run, panel, group), tile) };
            }
        }
    }

    /// Describes a run of tiles below one another.
    fn below(&self, tiles: Range<usize>, panel: usize, group: &Group) -> Tile {
        let call = self.tile(tiles.start, panel, group);
        let shares = self.shares_prefetch(tiles.start, panel, group);
        let next = Next {
            a: group.a.next,
            c: self.height * self.c_row,
            row_bias: self.height,
            residual: self.height * call.residual_row,
            prefetch: if shares { LINE } else { group.a.next },
            ..Next::default()
        };
        call.repeated(tiles.len(), next)
    }

    /// Whether the last panel of a group is one column, and the panel before it can take it along.
    pub(super) fn has_column_beside(&self, group: &Group) -> bool {
        let panels = &group.panels;
        panels.len() > 1
            && self.columns(&(panels.end - 1..panels.end)).len() == 1
            && self.grid.width == self.kernel.width()
            && (1..=STEPS).contains(&group.steps.len())
    }

    /// Computes the last two panels of a group, of which the last one is a column.
    ///
    /// # Safety
    ///
    /// As [`Block::run_strips`].
    pub(super) unsafe fn run_beside(
        &self,
        function: unsafe fn(&mut Tile, &mut Tile),
        group: &Group,
        units: usize,
    ) {
        let (tiles, last) = (&group.tiles, group.panels.end - 1);
        let whole = tiles.start..(self.grid.shape[0] / self.height).clamp(tiles.start, tiles.end);
        // SAFETY: as in `run_tiles`; all tiles of a run have the same rows.
        unsafe {
            for first in spending(units * TILES_BESIDE, whole.clone().step_by(TILES_BESIDE)) {
                let run = first..(first + TILES_BESIDE).min(whole.end);
                let mut column = self.below(run.clone(), last, group);
                function(&mut self.below(run, last - 1, group), &mut column);
            }
            for tile in whole.end..tiles.end {
                self.run_tiles(self.tile(tile, last - 1, group), tile);
                self.run_tiles(self.tile(tile, last, group), tile);
            }
        }
    }

    /// Computes a run of tiles of a group, of which `tile` is the first.
    ///
    /// # Safety
    ///
    /// As [`Block::run_strips`].
    #[inline]
    pub(super) unsafe fn run_tiles(&self, mut call: Tile, tile: usize) {
        let (count, vectors) = (self.rows_of(tile), call.columns.div_ceil(self.kernel.lanes));
        // Packing pads panels to whole vectors, so only a panel read in place can end inside one.
        let packed = self.grid.packs || matches!(self.gemm.rhs, RhsOperand::Packed(_));
        let whole = packed || call.columns == vectors * self.kernel.lanes;
        let functions = if whole { self.kernel.whole } else { self.kernel.partial };
        let function = functions[(count - 1) * self.kernel.vectors + vectors - 1];
        // SAFETY: `run_strips` requires panels that hold the rows, columns and k steps of these
        // tiles. `Kernel::of` chose the kernel for this CPU, and `run` requires the tiles of C to
        // be this thread's.
        unsafe { function(&mut call) };
    }

    /// Returns the cache lines of a k step of a panel.
    fn lines(&self) -> usize {
        (self.grid.width / LINE).max(1)
    }

    /// Whether a tile prefetches a line of each k step of the next panel.
    fn shares_prefetch(&self, tile: usize, panel: usize, group: &Group) -> bool {
        tile - group.tiles.start < self.lines() && panel + 1 < group.panels.end
    }

    /// Returns the rows of a tile.
    #[inline]
    pub(super) fn rows_of(&self, tile: usize) -> usize {
        self.height.min(self.grid.shape[0] - tile * self.height)
    }

    /// Describes one tile of a group.
    #[inline]
    pub(super) fn tile(&self, tile: usize, panel: usize, group: &Group) -> Tile {
        let ([_, _, k], Group { tiles, panels, steps, a, b }) = (self.grid.shape, group);
        let columns = self.columns(&(panel..panel + 1));
        let strip = b.start.wrapping_add((panel - panels.start) * b.next);
        let row = tile * self.height;
        let mut call = Tile {
            k: self.kernel.elements(steps.len()),
            a: a.start.wrapping_add((tile - tiles.start) * a.next),
            a_row: a.row,
            a_step: a.step,
            b: strip,
            b_step: b.step,
            c: self.c.wrapping_add(row * self.c_row + columns.start),
            c_row: self.c_row,
            columns: columns.len(),
            alpha: self.gemm.alpha,
            beta: if steps.start == 0 { self.gemm.beta } else { 1.0 },
            row_bias: std::ptr::null(),
            column_bias: std::ptr::null(),
            residual: std::ptr::null(),
            residual_row: 0,
            activation: RegisterActivation::None,
            prefetch: strip,
            prefetch_step: 0,
            count: 1,
            next: Next::default(),
        };
        // The first tiles of a panel prefetch the next panel together, each tile one cache line of
        // every k step.
        let index = tile - tiles.start;
        if self.shares_prefetch(tile, panel, group) {
            call.prefetch = strip.wrapping_add(b.next + index * LINE);
            call.prefetch_step = b.step;
        } else if panel == panels.start && matches!(self.gemm.lhs, LhsOperand::Packed(_)) {
            // Packed weights are read from memory once. The last tile prefetches what lies behind.
            call.prefetch = call.a.wrapping_add(a.next);
            call.prefetch_step = a.step;
        }
        if steps.end == k {
            self.add_finish(&mut call, row, columns.start);
        }
        call
    }

    fn add_finish(&self, call: &mut Tile, row: usize, column: usize) {
        call.activation = self.finish.activation;
        if let Some(bias) = self.finish.row_bias {
            call.row_bias = bias.as_ptr().wrapping_add(row);
        }
        if let Some(bias) = self.finish.column_bias {
            call.column_bias = bias.as_ptr().wrapping_add(column);
        }
        if let Some((values, stride)) = self.finish.residual {
            call.residual = values.as_ptr().wrapping_add(row * stride + column);
            call.residual_row = stride;
        }
        if self.finish.is_held {
            // A tile reads its whole part of C before it writes any of it.
            call.residual = call.c.cast_const();
            call.residual_row = call.c_row;
        }
    }
}
