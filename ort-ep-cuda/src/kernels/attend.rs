//! Scaled dot-product attention over heads with any strides (`cu/attention.cuh`). All attention
//! operators use it.

use ort_core::dtype::DType;
use ort_core::{Result, ensure, error};

use super::heads::{Rows, kind_of, word};
use super::lines::suffix;
use crate::driver::Limits;
use crate::launch::{Launch, OpCx, Operand};
use crate::modules::TENSOR_CORES;

/// The largest head size of the tensor core kernels.
const MOST_OF_CORES: usize = 128;
/// The largest head size of the kernels for few rows.
const MOST_OF_ROWS: usize = 256;
/// The most query rows sharing a key head that the kernels for few rows take.
const FEW_ROWS: usize = 8;
/// The least number of keys worth a block of its own.
const PART: usize = 256;
/// The number of keys from which splitting them is worth the extra launch that joins the parts.
const LEAST_CUT: usize = 3 * PART;
/// Query rows of a block on tensor cores.
const OF_CORES: usize = 64;
/// Query rows of a block whose warps share the same rows.
const OF_WARP: usize = 16;
/// A window as long as all keys and queries is no window.
const NO_WINDOW: i64 = 1 << 29;

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    /// Heads of keys and values; each serves `heads / key_heads` consecutive query heads.
    pub(super) key_heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) size: usize,
    pub(super) value_size: usize,
}

/// The causal mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Causal {
    No,
    Yes,
    /// Bottom-right aligned: the last query sees all keys, as in ONNX Runtime.
    ButTheLast,
}

/// The number of keys in each batch, and the offset of the first query.
#[derive(Clone, Copy)]
pub(super) struct Lengths<'a> {
    /// The key counts are this tensor's values plus `more`, or all keys if it is `None`.
    pub(super) of: Option<&'a Operand>,
    pub(super) more: usize,
    /// Whether the queries are the last rows of the keys; if not, `before` keys precede them.
    pub(super) at_end: bool,
    pub(super) before: usize,
}

impl<'a> Lengths<'a> {
    /// All keys count, and `before` of them precede the queries.
    pub(super) fn all(before: usize) -> Lengths<'a> {
        Lengths { of: None, more: 0, at_end: false, before }
    }
}

/// A mask added to the scores by broadcasting. Of a boolean mask, false hides a key.
#[derive(Clone, Copy)]
pub(super) struct Mask<'a> {
    pub(super) operand: &'a Operand,
    /// The strides of batch, head and query.
    pub(super) steps: [usize; 3],
    /// The number of keys in the mask; keys beyond it are hidden.
    pub(super) keys: usize,
}

impl<'a> Mask<'a> {
    /// Creates a mask of shape (batches, heads, queries, keys), of which the first three may be 1.
    pub(super) fn new(operand: &'a Operand, [batch, heads, queries, keys]: [usize; 4]) -> Mask<'a> {
        let step = |size: usize, step: usize| if size == 1 { 0 } else { step };
        let (of_head, of_batch) = (queries.saturating_mul(keys), heads.saturating_mul(queries));
        let steps = [step(batch, of_batch.saturating_mul(keys)), step(heads, of_head), step(queries, keys)];
        Mask { operand, steps, keys }
    }
}

/// Padding keys, to whose scores a number is added.
#[derive(Clone, Copy)]
pub(super) struct Padding<'a> {
    pub(super) operand: &'a Operand,
    pub(super) kind: Padded,
    pub(super) added: f32,
}

/// Which keys are padding.
#[derive(Clone, Copy, Debug)]
pub(super) enum Padded {
    /// The keys from one position per batch on.
    From,
    /// Those, and the keys before a second position per batch. The tensor holds all first
    /// positions, then all second ones.
    FromAndBefore,
    /// The keys whose element is not above 0: the first element, and the strides of batches and
    /// queries.
    Elements([usize; 3]),
}

/// An extra term in each head's softmax.
#[derive(Clone, Copy)]
pub(super) enum Sinks<'a> {
    None,
    /// A score of zero.
    Zero,
    /// A score per head.
    Each(&'a Operand),
}

/// One attention.
pub(super) struct Attend<'a> {
    pub(super) sizes: Sizes,
    pub(super) q: Rows,
    /// Keys and values have one type.
    pub(super) k: Rows,
    pub(super) v: Rows,
    pub(super) y: Rows,
    /// A bias for the queries of all heads.
    pub(super) q_bias: Option<&'a Operand>,
    pub(super) scale: f32,
    /// If above 0, scores become `softcap * tanh(score / softcap)`.
    pub(super) softcap: f32,
    pub(super) causal: Causal,
    /// How many keys before and after its own position a query sees; negative for no limit.
    pub(super) windows: [i64; 2],
    pub(super) lengths: Lengths<'a>,
    pub(super) mask: Option<Mask<'a>>,
    pub(super) padding: Option<Padding<'a>>,
    pub(super) sinks: Sinks<'a>,
    /// Whether a query whose scores are all -inf yields NaN rather than 0.
    pub(super) hidden_is_nan: bool,
    /// An output for the scores, and the stage at which they are written: scaled, capped, masked,
    /// or as weights.
    pub(super) scores: Option<(&'a Operand, i64)>,
}

/// How the work is divided into blocks.
struct Cut {
    /// The kind of kernel, which has one family per type, and its entry.
    kind: &'static str,
    entry: String,
    threads: u32,
    /// Blocks over the rows that share keys, and over columns of values.
    blocks: usize,
    across: usize,
    /// The number of parts that the keys are split into.
    splits: usize,
    /// In the kernels for few rows: threads per row of keys and of values, powers of two.
    lanes: [usize; 2],
}

impl Sizes {
    /// Returns the number of query rows that share keys.
    fn rows(&self) -> usize {
        self.heads.checked_div(self.key_heads).unwrap_or(0).saturating_mul(self.queries)
    }

    fn pairs(&self) -> usize {
        self.batch.saturating_mul(self.key_heads)
    }

    /// Chooses kernel and division for the given query type and key type. The number of parts never
    /// falls as the number of keys grows.
    fn cut(&self, limits: Limits, [query, key]: [DType; 2], has_scores: bool) -> Result<Cut> {
        let (rows, widest, suffix) = (self.rows(), self.size.max(self.value_size), suffix(key)?);
        let mut kept = vector_of(key)?;
        // Blocks of 64 rows would not reach all multiprocessors, and there are too few keys to
        // split.
        let is_small = self.keys < LEAST_CUT
            && self.pairs().saturating_mul(rows.div_ceil(OF_CORES)) <= limits.processors as usize;
        let has_cores = key != DType::F32 && key == query && limits.capability >= TENSOR_CORES;
        let narrow = |size: usize| if size <= 64 { 64 } else { 128 };
        // Only the tiled kernel writes scores out.
        let (kind, name, [down, columns], threads) = if has_scores {
            ("tiles", "scores".to_owned(), [64, 64], 256)
        } else if rows <= FEW_ROWS && widest <= MOST_OF_ROWS {
            // Kernels exist for 1, 4 and 8 rows.
            let many = if rows == 1 { 1 } else { rows.next_power_of_two().max(4) };
            kept = if many == 1 { kept } else { 4 };
            ("rows", format!("rows_{many}"), [many, MOST_OF_ROWS], 256)
        } else if has_cores && widest <= MOST_OF_CORES {
            let (name, down) = if is_small { ("cores_apart", OF_WARP) } else { ("cores", OF_CORES) };
            ("cores", format!("{name}_{}", narrow(widest)), [down, MOST_OF_CORES], 128)
        } else {
            let columns = narrow(self.value_size);
            ("tiles", format!("tiles_{columns}"), [64, columns], 256)
        };
        let (blocks, across) = (rows.div_ceil(down), self.value_size.div_ceil(columns));
        // If the blocks do not keep all multiprocessors busy, we split the keys between several.
        // Scores are written for all keys at once, which rules splitting out.
        let busy = (limits.processors as usize).saturating_mul(if threads == 128 { 4 } else { 2 });
        let others = self.pairs().saturating_mul(blocks).saturating_mul(across);
        let parts = self.keys.div_ceil(PART).min(busy.checked_div(others).unwrap_or(1)).max(1);
        let splits = if has_scores || self.keys < LEAST_CUT { 1 } else { parts };
        // A row of keys longer than one warp's vectors takes several passes.
        let of_keys = self.size.div_ceil(vector_of(key)?).next_power_of_two().min(32);
        let lanes = [of_keys, self.value_size.div_ceil(kept).next_power_of_two()];
        Ok(Cut { kind, entry: format!("attend_{name}_{suffix}"), threads, blocks, across, splits, lanes })
    }

    /// Reserves the partial results in the workspace; `None` if the keys are not split.
    pub(super) fn parts(
        &self,
        cx: &OpCx<'_>,
        types: [DType; 2],
        has_scores: bool,
        taken: &mut usize,
    ) -> Result<Option<Operand>> {
        let splits = self.cut(*cx.limits, types, has_scores)?.splits;
        let lines = self.pairs().saturating_mul(splits).saturating_mul(self.rows());
        let shape = [lines, self.value_size.saturating_add(2)];
        Ok((splits > 1).then(|| cx.workspace(taken, DType::F32, &shape)))
    }
}

impl Attend<'_> {
    /// Returns the launches. The partial results follow the `taken` bytes of the workspace.
    pub(super) fn launches(&self, cx: &OpCx<'_>, mut taken: usize) -> Result<Vec<Launch>> {
        let Sizes { heads, key_heads, value_size, .. } = self.sizes;
        let divides = heads.checked_rem(key_heads) == Some(0);
        ensure!(divides, InvalidArgument, "{heads} query heads are not a multiple of {key_heads} key heads");
        ensure!(self.k.operand.dtype == self.v.operand.dtype, Fail, "keys and values of two types");
        let rows = self.sizes.pairs().saturating_mul(self.sizes.rows());
        if rows == 0 || value_size == 0 {
            return Ok(Vec::new());
        }
        let types = [self.q.operand.dtype, self.k.operand.dtype];
        let cut = self.sizes.cut(*cx.limits, types, self.scores.is_some())?;
        let parts = self.sizes.parts(cx, types, self.scores.is_some(), &mut taken)?;
        let words = self.words(&cut)?;
        let blocks = self.sizes.pairs().saturating_mul(cut.blocks).saturating_mul(cut.splits);
        let sinks = match self.sinks {
            Sinks::Each(sinks) => Some(sinks),
            _ => None,
        };
        let attend =
            Launch::of_type(&format!("attention_{}", cut.kind), suffix(self.k.operand.dtype)?, cut.entry)?
                .grid([blocks, cut.across, 1])?
                .block([cut.threads, 1, 1])
                .tensor(&self.q.operand)
                .tensor(&self.k.operand)
                .tensor(&self.v.operand)
                .find_tensor(self.q_bias)
                .find_tensor(self.lengths.of)
                .find_tensor(self.mask.map(|mask| mask.operand))
                .find_tensor(self.padding.map(|padding| padding.operand))
                .find_tensor(sinks)
                .find_tensor(self.scores.map(|(scores, _)| scores))
                .tensor(&self.y.operand)
                .find_tensor(parts.as_ref())
                .ints::<WORDS>(&words)?;
        // Without a split, the first launch has written the result.
        let Some(parts) = parts else { return Ok(vec![attend]) };
        let results = rows.saturating_mul(value_size);
        let join = Launch::new("attention_join", "attend_join").threads(results)?;
        let join = join.tensor(&parts).tensor(&self.y.operand).ints::<WORDS>(&words)?;
        Ok(vec![attend, join.uint(results)?])
    }

    /// Fills the kernels' `Attend` structure.
    fn words(&self, cut: &Cut) -> Result<Vec<i64>> {
        let Sizes { batch, heads, key_heads, queries, keys, size, value_size } = self.sizes;
        let sharing = heads.checked_div(key_heads).unwrap_or(0);
        let own = [heads, key_heads, queries, keys, size, value_size, sharing, self.sizes.rows()];
        let mut words: Vec<i64> = own.into_iter().chain([cut.blocks, cut.splits]).map(word).collect();
        for rows in [&self.q, &self.k, &self.v, &self.y] {
            words.extend(rows.words());
        }
        words.extend([kind_of(self.q.operand.dtype)?, kind_of(self.y.operand.dtype)?]);
        let Lengths { of, more, at_end, before } = self.lengths;
        words.extend([word(before), word(more), i64::from(at_end)]);
        words.push(of.map_or(Ok(0), |lengths| kind_of(lengths.dtype))?);
        words.push(match self.causal {
            Causal::No => 0,
            Causal::Yes => 1,
            Causal::ButTheLast => 2,
        });
        words.extend(self.windows.map(|size| size.clamp(-1, NO_WINDOW)));
        let (kind, steps, limit) = match self.mask {
            Some(mask) => (kind_of(mask.operand.dtype)?, mask.steps, mask.keys),
            None => (0, [0; 3], keys),
        };
        words.push(kind);
        words.extend(steps.into_iter().chain([limit]).map(word));
        let (padding, places) = match self.padding.map(|padding| padding.kind) {
            None => (0, [0; 3]),
            Some(Padded::From) => (1, [0; 3]),
            Some(Padded::FromAndBefore) => (2, [0; 3]),
            Some(Padded::Elements(places)) => (3, places),
        };
        words.push(padding);
        words.extend(places.into_iter().chain([batch]).map(word));
        words.push(match self.sinks {
            Sinks::None => 0,
            Sinks::Zero => 1,
            Sinks::Each(_) => 2,
        });
        words.push(self.scores.map_or(-1, |(_, stage)| stage));
        for (rows, size) in [(&self.q, size), (&self.k, size), (&self.v, value_size), (&self.y, value_size)] {
            words.push(i64::from(rows.in_vectors(size, vector_of(rows.operand.dtype)?)));
        }
        words.extend(cut.lanes.map(word));
        let padded = self.padding.map_or(0.0, |padding| padding.added);
        let without_weights = if self.hidden_is_nan && keys > 0 { f32::NAN } else { 0.0 };
        words.extend(
            [self.scale, self.softcap, padded, without_weights]
                .map(|number| i64::from(number.to_bits().cast_signed())),
        );
        Ok(words)
    }
}

/// The number of words in `Attend`.
const WORDS: usize = 57;

/// Returns how many elements fit into 16 bytes.
fn vector_of(dtype: DType) -> Result<usize> {
    let bytes = dtype.byte_len(1).filter(|bytes| *bytes > 0);
    bytes
        .map(|bytes| 16 / bytes)
        .ok_or_else(|| error!(NotImplemented, "attention of {dtype} is not supported"))
}
