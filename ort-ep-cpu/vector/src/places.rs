//! Source and destination of a function: two slices, or one in place.

use crate::simd::Simd;

/// A source and a destination of equal length, or one slice that is both.
pub(super) struct Places<'a> {
    from: Option<&'a [f32]>,
    to: &'a mut [f32],
}

impl<'a> Places<'a> {
    /// # Panics
    /// If the lengths differ.
    pub(super) fn apart(from: &'a [f32], to: &'a mut [f32]) -> Places<'a> {
        assert_eq!(from.len(), to.len(), "source and target have one length");
        Places { from: Some(from), to }
    }

    pub(super) fn same(data: &'a mut [f32]) -> Places<'a> {
        Places { from: None, to: data }
    }

    pub(super) fn source(&self) -> &[f32] {
        self.from.unwrap_or(self.to)
    }

    pub(super) fn target(&mut self) -> &mut [f32] {
        self.to
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.to.len()
    }

    /// Loads `count` values (at most a vector). The other lanes are `fill`.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, s: S, at: usize, count: usize, fill: f32) -> S::F32 {
        load(s, self.from.unwrap_or(self.to), at, count, fill)
    }

    /// Stores `count` lanes.
    #[inline(always)]
    pub(super) fn store<S: Simd>(&mut self, s: S, at: usize, count: usize, value: S::F32) {
        store(s, self.to, at, count, value);
    }
}

/// Loads `count` values (at most a vector) of `from[at..]`. The other lanes are `fill`.
#[inline(always)]
pub(super) fn load<S: Simd>(s: S, from: &[f32], at: usize, count: usize, fill: f32) -> S::F32 {
    // Only the last vector of a slice takes the slower masked load.
    if count >= S::LANES { s.load(from, at) } else { s.load_partial(from, at, count, fill) }
}

/// Stores `count` lanes (at most a vector) at `to[at..]`.
#[inline(always)]
pub(super) fn store<S: Simd>(s: S, to: &mut [f32], at: usize, count: usize, value: S::F32) {
    if count >= S::LANES { s.store(to, at, value) } else { s.store_partial(to, at, count, value) }
}
