//! `MultiHeadAttention` of `com.microsoft`.

use super::{Causal, HeadRows, SdpaSizes, head_count, scale_of};
use crate::ir::Attributes;
use crate::{Result, ensure, error};

/// The default value that is added to the scores of padding.
const MASK_FILTER_VALUE: f32 = -10000.0;

/// The attributes of a `MultiHeadAttention` node.
#[derive(Clone, Copy, Debug)]
pub struct MultiHead {
    /// The heads of queries, keys and values.
    pub heads: usize,
    /// The scale of the scores, if given.
    pub scale: Option<f32>,
    /// The causal mask.
    pub causal: Causal,
    /// The value that is added to the scores of padding.
    pub mask_filter_value: f32,
}

/// The layout of queries, keys and values in the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkvLayout {
    /// Three inputs, each (batch, sequence, width).
    Separate,
    /// All in `query`: (batch, sequence, heads, 3, size).
    PackedQkv,
    /// Keys and values in `key`: (batch, sequence, heads, 2, size).
    PackedKv,
    /// Cross attention: keys and values are (batch, heads, sequence, size) and take no bias.
    Cross,
}

/// The layout of a `MultiHeadAttention` node.
#[derive(Clone, Copy, Debug)]
pub struct MultiHeadProblem {
    /// The layout of queries, keys and values.
    pub layout: QkvLayout,
    /// The sizes; `keys` counts the new keys only.
    pub sizes: SdpaSizes,
    /// The rows of the past's tensors.
    pub past: usize,
    /// Whether past and present share a buffer that is longer than its valid rows.
    pub is_shared: bool,
    /// Whether there is a bias for queries, keys and values.
    pub has_bias: bool,
}

impl MultiHead {
    /// Reads the attributes.
    ///
    /// # Errors
    ///
    /// A value is out of range.
    pub fn new(attrs: &Attributes) -> Result<MultiHead> {
        Ok(MultiHead {
            heads: head_count(attrs, "num_heads")?,
            scale: scale_of(attrs),
            causal: if attrs.flag("unidirectional")? { Causal::BottomRight } else { Causal::No },
            mask_filter_value: attrs.find_float("mask_filter_value").unwrap_or(MASK_FILTER_VALUE),
        })
    }

    /// Reads the shapes of the inputs, by position. `is_shared` says whether there is a
    /// `past_sequence_length`.
    ///
    /// # Errors
    ///
    /// Shapes do not fit together.
    pub fn problem<'s>(
        &self,
        shape: impl Fn(usize) -> Option<&'s [usize]>,
        is_shared: bool,
    ) -> Result<MultiHeadProblem> {
        let heads = self.heads;
        let (layout, [batch, queries, width, fresh, value_width]) =
            layout_of([shape(0), shape(1), shape(2)], heads)?;
        let divides = width.is_multiple_of(heads) && value_width.is_multiple_of(heads);
        ensure!(
            divides,
            InvalidArgument,
            "widths {width} and {value_width} do not divide into {heads} heads"
        );
        // `head_count` refused 0 heads.
        let (size, value_size) = (width / heads, value_width / heads);
        let past = match (shape(6), shape(7)) {
            (None, None) => 0,
            (Some(&[b, n, past, s]), Some(&[c, m, same, t]))
                if [b, n, s] == [batch, heads, size]
                    && [c, m, t] == [batch, heads, value_size]
                    && same == past =>
            {
                past
            }
            (key, value) => {
                return Err(error!(
                    InvalidArgument,
                    "past_key and past_value of shapes {key:?} and {value:?} do not fit"
                ));
            }
        };
        let expected = width.saturating_mul(2).saturating_add(value_width);
        let bias = shape(3);
        ensure!(
            bias.is_none_or(|bias| *bias == [expected]),
            InvalidArgument,
            "bias has shape {:?}, expected [{expected}]",
            bias.unwrap_or_default()
        );
        ensure!(!is_shared || shape(6).is_some(), InvalidArgument, "past_sequence_length without past_key");
        let sizes = SdpaSizes { batch, heads, key_heads: heads, queries, keys: fresh, size, value_size };
        Ok(MultiHeadProblem { layout, sizes, past, is_shared, has_bias: bias.is_some() })
    }
}

/// Returns the layout, followed by batches, queries, query width, new keys and value width.
fn layout_of(shapes: [Option<&[usize]>; 3], heads: usize) -> Result<(QkvLayout, [usize; 5])> {
    let wide = |size: usize| heads.saturating_mul(size);
    let [query, key, value] = shapes;
    let query = query.unwrap_or_default();
    match (query, key, value) {
        (&[batch, rows, n, 3, size], None, None) if n == heads => {
            Ok((QkvLayout::PackedQkv, [batch, rows, wide(size), rows, wide(size)]))
        }
        (&[batch, rows, width], Some(&[b, fresh, n, 2, size]), None)
            if [b, n, wide(size)] == [batch, heads, width] =>
        {
            Ok((QkvLayout::PackedKv, [batch, rows, width, fresh, width]))
        }
        (&[batch, rows, width], Some(&[b, fresh, w]), Some(&[c, same, value_width]))
            if [b, c, w, same] == [batch, batch, width, fresh] =>
        {
            Ok((QkvLayout::Separate, [batch, rows, width, fresh, value_width]))
        }
        (&[batch, rows, width], Some(&[b, n, fresh, size]), Some(&[c, m, same, value_size]))
            if [b, c, n, m, same, wide(size)] == [batch, batch, heads, heads, fresh, width] =>
        {
            Ok((QkvLayout::Cross, [batch, rows, width, fresh, wide(value_size)]))
        }
        shapes => Err(error!(InvalidArgument, "query, key and value of shapes {shapes:?} do not match")),
    }
}

impl MultiHeadProblem {
    /// The rows of the present's tensors.
    pub fn capacity(&self) -> usize {
        if self.is_shared { self.past } else { self.past.saturating_add(self.sizes.keys) }
    }

    /// The elements of a query (0), key (1) or value (2).
    pub fn row_size(&self, which: usize) -> usize {
        if which == 2 { self.sizes.value_size } else { self.sizes.size }
    }

    /// Whether attention can read keys and values directly from the inputs.
    pub fn reads_inputs(&self) -> bool {
        self.past == 0 && !self.is_shared && (!self.has_bias || self.layout == QkvLayout::Cross)
    }

    /// The input that holds the new queries (0), keys (1) or values (2), and their rows in it.
    pub fn incoming(&self, which: usize) -> (usize, HeadRows) {
        let SdpaSizes { heads, queries, keys, size, .. } = self.sizes;
        let rows = if which == 0 { queries } else { keys };
        let own = [heads, rows, self.row_size(which)];
        match (self.layout, which) {
            (QkvLayout::PackedQkv, _) => (0, HeadRows::packed([heads, queries, size], which, 3)),
            (QkvLayout::PackedKv, 1 | 2) => (1, HeadRows::packed([heads, keys, size], which - 1, 2)),
            (QkvLayout::Cross, 1 | 2) => (which, HeadRows::by_head(own)),
            _ => (which, HeadRows::by_token(own)),
        }
    }

    /// The first element of the bias of the queries (0), keys (1) or values (2). `None` without a
    /// bias.
    pub fn bias_start(&self, which: usize) -> Option<usize> {
        let has_bias = self.has_bias && (which == 0 || self.layout != QkvLayout::Cross);
        // Queries and keys have one width, so the bias of the values starts at twice that.
        has_bias.then(|| which.saturating_mul(self.sizes.heads).saturating_mul(self.sizes.size))
    }

    /// Returns the valid rows of the past. `given` is `past_sequence_length`, which is only read if
    /// past and present share a buffer.
    ///
    /// # Errors
    ///
    /// The new rows do not fit behind the given ones.
    pub fn past_length(&self, given: i64) -> Result<usize> {
        let (fresh, capacity) = (self.sizes.keys, self.past);
        if !self.is_shared {
            return Ok(capacity);
        }
        let length = usize::try_from(given).ok();
        // `past_sequence_length` is data of the run, so it may be negative or beyond the buffer.
        let length = length.filter(|length| length.checked_add(fresh).is_some_and(|total| total <= capacity));
        length.ok_or_else(|| {
            error!(
                InvalidArgument,
                "past_sequence_length is {given}; with {fresh} new keys a buffer of {capacity} takes 0 to {}",
                capacity.saturating_sub(fresh)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the shapes of query, key and value for two heads, without a past.
    fn layout_of_shapes(shapes: [&[usize]; 3]) -> Result<MultiHeadProblem> {
        let node = MultiHead { heads: 2, scale: None, causal: Causal::No, mask_filter_value: 0.0 };
        let shape = |index: usize| shapes.get(index).copied().filter(|shape| !shape.is_empty());
        node.problem(shape, false)
    }

    #[test]
    fn inputs_are_told_apart_by_their_shapes() -> Result<()> {
        let separate = layout_of_shapes([&[1, 3, 8], &[1, 5, 8], &[1, 5, 12]])?;
        assert_eq!((separate.layout, separate.sizes.keys), (QkvLayout::Separate, 5));
        assert_eq!(separate.incoming(2), (2, HeadRows { first: 0, strides: [60, 6, 12] }));
        let all = layout_of_shapes([&[1, 3, 2, 3, 4], &[], &[]])?;
        assert_eq!(all.incoming(1), (0, HeadRows { first: 4, strides: [72, 12, 24] }));
        let keys = layout_of_shapes([&[1, 3, 8], &[1, 5, 2, 2, 4], &[]])?;
        assert_eq!(keys.incoming(2), (1, HeadRows { first: 4, strides: [80, 8, 16] }));
        let cross = layout_of_shapes([&[1, 3, 8], &[1, 2, 5, 4], &[1, 2, 5, 6]])?;
        assert_eq!(cross.incoming(2), (2, HeadRows { first: 0, strides: [60, 30, 6] }));
        assert!(layout_of_shapes([&[1, 3, 8], &[1, 5, 6], &[1, 5, 6]]).is_err());
        assert!(layout_of_shapes([&[1, 3, 7], &[1, 5, 7], &[1, 5, 8]]).is_err());
        Ok(())
    }
}
