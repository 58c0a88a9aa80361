//! Masks of attention scores: added ones that broadcast, and padding masks.

use super::SdpaSizes;
use crate::{Result, ensure, error};

/// A mask that broadcasts to (batch, heads, queries, keys).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BroadcastMask {
    /// The strides of batch, head and query, in elements.
    pub strides: [usize; 3],
    /// The keys of a row. Later keys are hidden.
    pub keys: usize,
}

impl BroadcastMask {
    /// Reads the shape of a mask of rank 1 to 4, which may have fewer keys.
    ///
    /// # Errors
    ///
    /// The mask does not broadcast to the scores.
    pub fn new(shape: &[usize], sizes: &SdpaSizes) -> Result<BroadcastMask> {
        let mut full = [1; 4];
        ensure!(
            (1..=4).contains(&shape.len()),
            InvalidArgument,
            "the mask has shape {shape:?}, expected rank 1 to 4"
        );
        // Missing leading axes have size 1, as in NumPy.
        full.iter_mut().rev().zip(shape.iter().rev()).for_each(|(full, size)| *full = *size);
        let whole = [sizes.batch, sizes.heads, sizes.queries];
        let scores = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
        let fits = full.iter().zip(whole).all(|(size, whole)| *size == 1 || *size == whole);
        let [.., keys] = full;
        ensure!(
            fits && keys <= sizes.keys,
            InvalidArgument,
            "the mask of shape {shape:?} does not broadcast to the scores of shape {scores:?}"
        );
        Ok(BroadcastMask::of_full(full))
    }

    /// Reads the shape of `attention_bias` of `com.microsoft`: (batch or 1, heads or 1, queries, at
    /// least the keys).
    ///
    /// # Errors
    ///
    /// Another shape.
    pub fn bias(shape: &[usize], sizes: &SdpaSizes) -> Result<BroadcastMask> {
        let one_or = |size: usize, whole: usize| size == 1 || size == whole;
        match *shape {
            [batch, heads, queries, keys]
                if one_or(batch, sizes.batch)
                    && one_or(heads, sizes.heads)
                    && queries == sizes.queries
                    && keys >= sizes.keys =>
            {
                Ok(BroadcastMask::of_full([batch, heads, queries, keys]))
            }
            _ => {
                let SdpaSizes { batch, heads, queries, keys, .. } = sizes;
                Err(error!(
                    InvalidArgument,
                    "attention_bias has shape {shape:?}, expected [{batch} or 1, {heads} or 1, {queries}, {keys}]"
                ))
            }
        }
    }

    fn of_full([batch, heads, queries, keys]: [usize; 4]) -> BroadcastMask {
        // A stride of 0 repeats the only element along its axis.
        let stride = |size: usize, stride: usize| if size == 1 { 0 } else { stride };
        let head = queries.saturating_mul(keys);
        let strides = [stride(batch, heads.saturating_mul(head)), stride(heads, head), stride(queries, keys)];
        BroadcastMask { strides, keys }
    }
}

/// Which keys a `key_padding_mask` marks as padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingMask {
    /// The keys from a position per batch on.
    From,
    /// Those, and the keys before a second position per batch. The tensor holds all first
    /// positions, then all second ones.
    FromAndBefore,
    /// The keys whose element is not above 0.
    Elements {
        /// The first element.
        first: usize,
        /// The strides of batch and query.
        strides: [usize; 2],
    },
}

impl PaddingMask {
    /// Reads the shape of the mask: lengths (batch), ends and starts (2 * batch), lengths and
    /// offsets (3 * batch + 2), or elements: (batch, keys), (batch, queries, keys), or (batch, 1,
    /// rows, columns) with at least as many rows and columns as keys. `None` if the mask has no
    /// effect.
    ///
    /// # Errors
    ///
    /// Another shape.
    pub fn new(shape: &[usize], sizes: &SdpaSizes) -> Result<Option<PaddingMask>> {
        let SdpaSizes { batch, queries, keys, .. } = *sizes;
        // The lengths differ for every batch but 0, so they tell the forms apart.
        let (double, triple) = (batch.saturating_mul(2), batch.saturating_mul(3).saturating_add(2));
        let elements = |first, strides| Some(PaddingMask::Elements { first, strides });
        Ok(match *shape {
            [len] if len == batch || len == triple => Some(PaddingMask::From),
            [len] if len == double => Some(PaddingMask::FromAndBefore),
            [b, k] if [b, k] == [batch, keys] => elements(0, [keys, 0]),
            // A mask of one column would shift all scores alike, without effect. ONNX Runtime
            // ignores it too.
            [b, 1] if b == batch || b == 1 => None,
            [b, q, k] if [b, q, k] == [batch, queries, keys] => {
                elements(0, [queries.saturating_mul(keys), keys])
            }
            // Of a square mask over all positions, the queries have the last of the keys' rows.
            [b, 1, rows, columns] if b == batch && rows >= keys && columns >= keys && keys >= queries => {
                elements((keys - queries).saturating_mul(columns), [rows.saturating_mul(columns), columns])
            }
            _ => {
                return Err(error!(
                    InvalidArgument,
                    "the padding mask has shape {shape:?}, expected [{batch}], [{double}], [{triple}], [{batch}, {keys}], \
                     [{batch}, {queries}, {keys}], or [{batch}, 1, positions, positions]"
                ));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: SdpaSizes =
        SdpaSizes { batch: 2, heads: 3, key_heads: 3, queries: 4, keys: 5, size: 8, value_size: 8 };

    #[test]
    fn axes_of_size_1_are_not_stepped_over() -> Result<()> {
        let strides = |shape: &[usize]| BroadcastMask::new(shape, &SIZES).map(|mask| mask.strides);
        assert_eq!(strides(&[2, 3, 4, 5])?, [60, 20, 5]);
        assert_eq!(strides(&[2, 1, 4, 5])?, [20, 0, 5]);
        assert_eq!(strides(&[5])?, [0; 3]);
        assert_eq!(BroadcastMask::new(&[4, 3], &SIZES)?.keys, 3);
        assert!(strides(&[4, 6]).is_err() && strides(&[3, 5]).is_err());
        assert!(BroadcastMask::bias(&[1, 3, 4, 5], &SIZES).is_ok());
        assert!(BroadcastMask::bias(&[4, 5], &SIZES).is_err());
        Ok(())
    }

    #[test]
    fn a_padding_mask_is_told_by_its_shape() -> Result<()> {
        let mask = |shape: &[usize]| PaddingMask::new(shape, &SIZES);
        let elements = |first, strides| Some(PaddingMask::Elements { first, strides });
        assert_eq!(mask(&[2])?, Some(PaddingMask::From));
        assert_eq!(mask(&[8])?, Some(PaddingMask::From));
        assert_eq!(mask(&[4])?, Some(PaddingMask::FromAndBefore));
        assert_eq!(mask(&[2, 5])?, elements(0, [5, 0]));
        assert_eq!(mask(&[2, 1])?, None);
        assert_eq!(mask(&[2, 4, 5])?, elements(0, [20, 5]));
        // The queries are the last 4 of 5 positions, so the first row of the square is skipped.
        assert_eq!(mask(&[2, 1, 6, 6])?, elements(6, [36, 6]));
        assert!(mask(&[2, 4]).is_err());
        Ok(())
    }
}
