//! `GroupQueryAttention` of `com.microsoft`.

use super::{Causal, HeadRows, SdpaSizes, head_count, scale_of};
use crate::ir::Attributes;
use crate::{Result, ensure, error};

/// The attributes of a `GroupQueryAttention` node.
#[derive(Clone, Copy, Debug)]
pub struct GroupQuery {
    /// The heads of queries.
    pub heads: usize,
    /// The heads of keys and values.
    pub key_heads: usize,
    /// The scale of the scores, if given.
    pub scale: Option<f32>,
    /// If above 0, scores become `softcap * tanh(score / softcap)`.
    pub softcap: f32,
    /// The causal mask.
    pub causal: Causal,
    /// The attribute `local_window_size`: how many keys up to its own a query sees; -1 for all.
    pub window: i64,
    /// Whether queries and keys get a rotary embedding.
    pub rotates: bool,
    /// Whether the rotary embedding pairs adjacent elements.
    pub is_interleaved: bool,
    /// Whether 1 is added to the softmax's sum (smooth softmax).
    pub is_smooth: bool,
    /// Whether the cache holds a window of the latest positions only, and old ones leave it.
    pub slides: bool,
    /// How the cache is quantized.
    pub quantization: Option<CacheQuantization>,
}

/// How a cache is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheQuantization {
    /// Bits of an element: 8, or 4, of which two share a byte.
    pub bits: usize,
    /// Whether keys, and whether values, have a scale for each element of a head.
    pub is_by_channel: [bool; 2],
}

impl CacheQuantization {
    /// Reads the attributes; `None` if the cache holds floats.
    fn new(attrs: &Attributes) -> Result<Option<CacheQuantization>> {
        let kinds = ["k_quant_type", "v_quant_type"].map(|name| (name, attrs.find_string(name)));
        if kinds.iter().all(|(_, kind)| kind.is_none_or(|kind| kind == "NONE")) {
            return Ok(None);
        }
        let mut is_by_channel = [false; 2];
        for ((name, kind), is_by_channel) in kinds.into_iter().zip(&mut is_by_channel) {
            *is_by_channel = match kind {
                Some("PER_TENSOR") => false,
                Some("PER_CHANNEL") => true,
                other => {
                    let other = other.unwrap_or("NONE");
                    return Err(error!(
                        InvalidGraph,
                        "{name} is '{other}', expected PER_TENSOR or PER_CHANNEL, or NONE for keys and values"
                    ));
                }
            };
        }
        let bits = attrs.find_int("kv_cache_bit_width").unwrap_or(8);
        ensure!(matches!(bits, 4 | 8), InvalidGraph, "kv_cache_bit_width is {bits}, expected 4 or 8");
        Ok(Some(CacheQuantization { bits: bits as usize, is_by_channel }))
    }
}

/// The layout of a `GroupQueryAttention` node.
#[derive(Clone, Copy, Debug)]
pub struct GroupQueryProblem {
    /// The sizes; `keys` counts the new keys only.
    pub sizes: SdpaSizes,
    /// The rows of the past's tensors.
    pub past: usize,
    /// The elements of a row of the cache, which are fewer bytes than elements of 4 bits.
    pub cache_row: usize,
    /// Whether `query` also holds keys and values.
    pub is_packed: bool,
}

impl GroupQuery {
    /// Reads the attributes.
    ///
    /// # Errors
    ///
    /// A head count is below 1, or the attributes of the cache do not go together.
    pub fn new(attrs: &Attributes) -> Result<GroupQuery> {
        let flag = |name: &str| attrs.find_int(name).unwrap_or(0) != 0;
        let (slides, window) = (flag("sliding_window_cache"), attrs.int("local_window_size")?);
        ensure!(
            !slides || window > 0,
            InvalidGraph,
            "local_window_size is {window}, expected at least 1 with sliding_window_cache"
        );
        Ok(GroupQuery {
            heads: head_count(attrs, "num_heads")?,
            key_heads: head_count(attrs, "kv_num_heads")?,
            scale: scale_of(attrs),
            softcap: attrs.find_float("softcap").unwrap_or(0.0),
            causal: if attrs.flag("causal")? { Causal::Yes } else { Causal::No },
            window,
            rotates: flag("do_rotary"),
            is_interleaved: flag("rotary_interleaved"),
            // The default is -1, which means no like 0.
            is_smooth: attrs.int("smooth_softmax")? == 1,
            slides,
            quantization: CacheQuantization::new(attrs)?,
        })
    }

    /// Whether the cache of a node is unquantized and holds all positions.
    pub fn has_full_cache(attrs: &Attributes) -> bool {
        let plain = |name: &str| attrs.find_string(name).is_none_or(|kind| kind == "NONE");
        let slides = attrs.find_int("sliding_window_cache").unwrap_or(0) != 0;
        plain("k_quant_type") && plain("v_quant_type") && !slides
    }

    /// Reads the shapes of the inputs, by position.
    ///
    /// # Errors
    ///
    /// Shapes do not fit together.
    pub fn problem<'s>(&self, shape: impl Fn(usize) -> Option<&'s [usize]>) -> Result<GroupQueryProblem> {
        let (heads, key_heads) = (self.heads, self.key_heads);
        // `head_count` refused 0 heads, so the division below is defined.
        let (batch, queries, width, is_packed) = match (shape(0), shape(1), shape(2)) {
            (Some(&[batch, queries, width]), None, None) => (batch, queries, width, true),
            (Some(&[batch, queries, width]), Some(key), Some(value))
                if key == value && key == [batch, queries, (width / heads).saturating_mul(key_heads)] =>
            {
                (batch, queries, width, false)
            }
            shapes => {
                return Err(error!(
                    InvalidArgument,
                    "query, key and value of shapes {shapes:?} do not match"
                ));
            }
        };
        let all = if is_packed { self.all_heads() } else { heads };
        ensure!(
            width.is_multiple_of(all),
            InvalidArgument,
            "query has width {width}, expected a multiple of the {all} heads"
        );
        let size = width / all;
        let cache_row = match self.quantization {
            Some(CacheQuantization { bits: 4, .. }) => size.div_ceil(2),
            _ => size,
        };
        let past = match (shape(3), shape(4)) {
            (None, None) => 0,
            (Some(&[b, n, rows, s]), Some(same))
                if [b, n, s] == [batch, key_heads, cache_row] && same == [b, n, rows, s] =>
            {
                rows
            }
            shapes => {
                return Err(error!(
                    InvalidArgument,
                    "past_key and past_value of shapes {shapes:?} do not fit, expected [{batch}, {key_heads}, rows, {cache_row}]"
                ));
            }
        };
        let sizes = SdpaSizes { batch, heads, key_heads, queries, keys: queries, size, value_size: size };
        Ok(GroupQueryProblem { sizes, past, cache_row, is_packed })
    }

    /// Returns the positions that a sliding cache of `capacity` rows holds after `total` tokens.
    /// When it is full, as many leave at once as its rows exceed the window, and one more.
    pub fn resident(&self, total: usize, capacity: usize) -> usize {
        let window = usize::try_from(self.window).unwrap_or(0);
        match total.checked_sub(capacity) {
            None | Some(0) => total,
            Some(excess) => {
                let leave = capacity.saturating_sub(window).saturating_add(1);
                total.saturating_sub(leave.saturating_mul(excess.div_ceil(leave)))
            }
        }
    }

    /// The heads of a query that also holds keys and values.
    fn all_heads(&self) -> usize {
        self.heads.saturating_add(self.key_heads.saturating_mul(2))
    }
}

impl GroupQueryProblem {
    /// The most rows that the cache can have after a run.
    pub fn bound(&self) -> usize {
        self.past.saturating_add(self.sizes.queries)
    }

    /// Returns the keys of the longest batch, new ones included, from `total_sequence_length`. In a
    /// shared buffer any total that fits is valid; else past and new rows must add up.
    ///
    /// # Errors
    ///
    /// Another total.
    pub fn total(&self, given: i64) -> Result<usize> {
        let (past, most) = (self.past, self.bound());
        let total = usize::try_from(given).ok().filter(|total| *total == most || *total <= past);
        total.ok_or_else(|| {
            error!(
                InvalidArgument,
                "total_sequence_length is {given}, expected {most} (past and new), or 0 to {past} in a shared buffer"
            )
        })
    }

    /// The input that holds the new queries (0), keys (1) or values (2), and their rows in it.
    pub fn incoming(&self, which: usize) -> (usize, HeadRows) {
        let SdpaSizes { heads, key_heads, queries, size, .. } = self.sizes;
        if !self.is_packed {
            let own = if which == 0 { heads } else { key_heads };
            return (which, HeadRows::by_token([own, queries, size]));
        }
        // A packed token is its query heads, its key heads and its value heads, in this order.
        let before = match which {
            0 => 0,
            1 => heads,
            _ => heads.saturating_add(key_heads),
        };
        let all = heads.saturating_add(key_heads.saturating_mul(2));
        let rows = HeadRows::by_token([all, queries, size]);
        (0, HeadRows { first: before.saturating_mul(size), ..rows })
    }
}
