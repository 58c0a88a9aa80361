//! N-gram counting (`TfIdfVectorizer`), with a trie of the pool's n-grams.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::seeded::HashMap;
use ort_core::{Result, ensure, error, unknown_name};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{elements, tables};
use ort_cpu_threads::interrupt::{self, spend, spend_text, spending};

cpu_kernels![KernelDef { op: "TfIdfVectorizer", make, ..KernelDef::BASE }];

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Counts,
    Presence,
    WeightedCounts,
}

/// A node of the trie: the tokens that may follow, and the n-gram that ends here.
#[derive(Default)]
struct Branch {
    next: HashMap<u32, usize>,
    gram: Option<usize>,
}

/// Token ids: equal tokens have equal ids.
enum Tokens {
    Ints(HashMap<i64, u32>),
    Strings(HashMap<String, u32>),
}

struct TfIdf {
    mode: Mode,
    tokens: Tokens,
    tree: Vec<Branch>,
    /// The output column of each n-gram.
    columns: Vec<usize>,
    /// The weight of each n-gram.
    weights: Vec<f32>,
    width: usize,
    lengths: (usize, usize),
    /// Maximum tokens skipped between two neighbours of an n-gram.
    skips: usize,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let mode = match attrs.string("mode")? {
        "TF" => Mode::Counts,
        "IDF" => Mode::Presence,
        "TFIDF" => Mode::WeightedCounts,
        other => return Err(unknown_name("mode", other, &["TF", "IDF", "TFIDF"])),
    };
    let natural = |name: &str| -> Result<usize> {
        let value = attrs.int(name)?;
        usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}, expected 0 or more"))
    };
    let naturals = |name: &str| -> Result<Vec<usize>> {
        let values = attrs.ints(name)?.iter().map(|&value| usize::try_from(value).ok()).collect();
        let values: Option<Vec<usize>> = values;
        values.ok_or_else(|| error!(InvalidGraph, "{name} has a negative element"))
    };
    let (tokens, pool) = match (attrs.find_ints("pool_int64s"), attrs.find_strings("pool_strings")) {
        (Some(ints), None) => {
            let (numbers, pool) = number(ints.iter().copied());
            (Tokens::Ints(numbers), pool)
        }
        (None, Some(strings)) => {
            let (numbers, pool) = number(strings.iter().cloned());
            (Tokens::Strings(numbers), pool)
        }
        _ => return Err(error!(InvalidGraph, "one of pool_int64s and pool_strings must be given")),
    };
    let columns = naturals("ngram_indexes")?;
    let lengths = (natural("min_gram_length")?, natural("max_gram_length")?);
    ensure!(
        lengths.0 > 0 && lengths.0 <= lengths.1,
        InvalidGraph,
        "n-grams of {} to {} tokens",
        lengths.0,
        lengths.1
    );
    let tree = grow(&pool, &naturals("ngram_counts")?, columns.len())?;
    let width = columns.iter().max().map_or(0, |last| last + 1);
    let weights = match attrs.find_floats("weights") {
        Some(weights) if !weights.is_empty() => weights.to_vec(),
        _ => vec![1.0; columns.len()],
    };
    ensure!(
        weights.len() == columns.len(),
        InvalidGraph,
        "{} weights for {} n-grams",
        weights.len(),
        columns.len()
    );
    Ok(Box::new(TfIdf {
        mode,
        tokens,
        tree,
        weights,
        columns,
        width,
        lengths,
        skips: natural("max_skip_count")?,
    }))
}

/// Assigns ids to the distinct tokens of the pool.
fn number<T: std::hash::Hash + Eq>(pool: impl Iterator<Item = T>) -> (HashMap<T, u32>, Vec<u32>) {
    let mut numbers = HashMap::default();
    let pool = pool
        .map(|token| {
            let next = numbers.len() as u32;
            *numbers.entry(token).or_insert(next)
        })
        .collect();
    (numbers, pool)
}

/// Builds the trie of the pool's n-grams. `starts` says where the n-grams of each length begin.
fn grow(pool: &[u32], starts: &[usize], grams: usize) -> Result<Vec<Branch>> {
    let mut tree = vec![Branch::default()];
    let mut gram = 0;
    for (index, &start) in starts.iter().enumerate() {
        // The n-grams of the last length reach to the end of the pool.
        let end = starts.get(index + 1).copied().unwrap_or(pool.len());
        let length = index + 1;
        let part = pool.get(start..end);
        let part = part.ok_or_else(|| error!(InvalidGraph, "ngram_counts {starts:?} are out of range"))?;
        ensure!(part.len() % length == 0, InvalidGraph, "{} tokens are no {length}-grams", part.len());
        for tokens in part.chunks_exact(length) {
            let mut at = 0;
            for &token in tokens {
                let fresh = tree.len();
                at = *tree[at].next.entry(token).or_insert(fresh);
                if at == fresh {
                    tree.push(Branch::default());
                }
            }
            ensure!(gram < grams, InvalidGraph, "there are more n-grams than ngram_indexes");
            // Of equal n-grams the last one counts.
            tree[at].gram = Some(gram);
            gram += 1;
        }
    }
    Ok(tree)
}

impl TfIdf {
    /// Adds the n-grams of one row to the columns of its output.
    fn count(&self, row: &[Option<u32>], counts: &mut [f32]) {
        let (shortest, longest) = self.lengths;
        // Longer skips leave the row.
        let most = self.skips.min(row.len());
        // A step of n skips n - 1 tokens between neighbours.
        for step in 1..=most + 1 {
            for start in spending(4, 0..row.len()) {
                let mut at = 0;
                let mut place = start;
                for length in 1..=longest {
                    let token = row.get(place).copied().flatten();
                    // Unknown tokens are in no n-gram, so the walk ends at them.
                    let Some(&next) = token.and_then(|token| self.tree[at].next.get(&token)) else { break };
                    at = next;
                    // Single tokens have nothing to skip, so count them in one pass only.
                    let counted = length >= shortest && (length > 1 || step == 1);
                    if let (Some(gram), true) = (self.tree[at].gram, counted) {
                        let (count, weight) = (&mut counts[self.columns[gram]], self.weights[gram]);
                        match self.mode {
                            Mode::Counts => *count += 1.0,
                            // ONNX calls this mode IDF: the weight alone, without the count.
                            Mode::Presence => *count = weight,
                            // Several n-grams may share a column, so each occurrence adds its own
                            // weight, as in ONNX Runtime.
                            Mode::WeightedCounts => *count += weight,
                        }
                    }
                    place += step;
                }
            }
        }
    }
}

impl Executable for TfIdf {
    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // An optional token id per element, and integers converted from another type.
        Ok(tables(elements(shapes.input(0)).saturating_mul(2 * size_of::<i64>())))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.input(0)?;
        let tokens: Vec<Option<u32>> = match (&self.tokens, input.dtype()) {
            (Tokens::Strings(numbers), DType::String) => {
                let texts = input.strings()?.iter().inspect(|text| spend_text(text));
                texts.map(|text| numbers.get(text.as_str()).copied()).collect()
            }
            (Tokens::Ints(numbers), DType::I32 | DType::I64) => {
                spending(8, &input.to_ints()?).map(|token| numbers.get(token).copied()).collect()
            }
            (_, other) => {
                return Err(error!(InvalidArgument, "the pool does not hold {} tokens", other.name()));
            }
        };
        let row = input.shape().last().copied().unwrap_or(1);
        let output = cx.output(0)?.as_mut_slice::<f32>()?;
        interrupt::fill(output, 0.0);
        // `chunks` refuses a length of 0.
        if self.width == 0 || row == 0 {
            return Ok(());
        }
        for (tokens, counts) in tokens.chunks(row).zip(output.chunks_mut(self.width)) {
            spend(self.width);
            self.count(tokens, counts);
        }
        Ok(())
    }
}
