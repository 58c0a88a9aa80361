//! Decoder signatures: which inputs and outputs of a graph are tokens, masks, positions and caches.

use ort_core::dtype::DType;
use ort_core::ir::{Graph, Node, ValueId};
use ort_core::session::{Model, ValueSpec};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use crate::folder::ModelFolder;

/// What an input is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The new tokens, `[batch, new]`.
    Tokens,
    /// Ones for the tokens so far, `[batch, so far]`.
    Mask,
    /// The positions of the new tokens, `[batch, new]`.
    Positions,
    /// Whether the graph reads its caches, in decoders with a branch for the first run.
    UsesCache,
    /// How many rows of logits are wanted.
    RowsWanted,
    /// A cache, by its index in [`Layout::caches`].
    Cache(usize),
}

/// An input with its role.
#[derive(Clone, Debug)]
pub(crate) struct RoledInput {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) dtype: DType,
    /// The symbols of its dimensions; `None` for a size that is fixed or an expression.
    pub(crate) symbols: Vec<Option<String>>,
}

/// A cache of one layer: keys or values, `[batch, heads, tokens, size]`.
#[derive(Clone, Debug)]
pub(crate) struct CacheSpec {
    pub(crate) past: String,
    pub(crate) present: String,
    pub(crate) dtype: DType,
    pub(crate) heads: usize,
    pub(crate) size: usize,
}

impl CacheSpec {
    pub(crate) fn shape(&self, batch: usize, rows: usize) -> [usize; 4] {
        [batch, self.heads, rows, self.size]
    }

    /// The bytes of a token's row of one head.
    pub(crate) fn row_bytes(&self) -> usize {
        self.size.saturating_mul(self.dtype.bits().unwrap_or(8) as usize).div_ceil(8)
    }

    pub(crate) fn bytes(&self, batch: usize, rows: usize) -> usize {
        let bits = self.dtype.bits().unwrap_or(8) as usize;
        let elements = self.shape(batch, rows).iter().fold(1usize, |all, size| all.saturating_mul(*size));
        elements.saturating_mul(bits).div_ceil(8)
    }
}

/// The signature of a decoder.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) inputs: Vec<RoledInput>,
    pub(crate) caches: Vec<CacheSpec>,
    pub(crate) logits: String,
    pub(crate) logits_dtype: DType,
    pub(crate) vocabulary: usize,
    /// Whether past and present are one buffer that is longer than the text. Otherwise a run
    /// concatenates the past and the new rows.
    pub(crate) in_place: bool,
    /// Whether the mask may be as long as the buffer, so that its shape stays the same.
    pub(crate) mask_has_capacity: bool,
    /// Whether one run may decode texts of unequal length.
    pub(crate) mixes_lengths: bool,
}

impl Layout {
    /// Reads the signature of a model.
    ///
    /// # Errors
    ///
    /// An input that generation does not know, or caches of another layout.
    pub(crate) fn of(model: &Model, folder: &ModelFolder) -> Result<Layout> {
        let graph = model.graph();
        let mut caches = Vec::new();
        let mut inputs = Vec::new();
        for spec in model.inputs() {
            if spec.has_default {
                continue;
            }
            let role = match cache_of(graph, &spec, folder)? {
                Some(cache) => {
                    caches.push(cache);
                    Role::Cache(caches.len() - 1)
                }
                None => role_of(&spec, folder)?,
            };
            inputs.push(roled(&spec, role)?);
        }
        for role in [Role::Tokens, Role::Cache(0)] {
            ensure!(
                inputs.iter().any(|input| input.role == role),
                NotImplemented,
                help = "export the decoder with past_key_values, as onnxruntime-genai and optimum do",
                "the model has no input for {}",
                if role == Role::Tokens { "tokens" } else { "past keys and values" }
            );
        }
        let logits = graph.outputs.iter().find(|id| *graph.value(**id).name == *folder.names.logits);
        let ty = logits.map(|id| &graph.value(*id).ty);
        let vocabulary = ty.and_then(|ty| ty.shape()?.last()?.as_constant());
        let vocabulary = vocabulary.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
        let logits_dtype = ty.and_then(|ty| ty.dtype());
        let (Some(vocabulary), Some(logits_dtype)) = (vocabulary, logits_dtype) else {
            return Err(error!(
                NotImplemented,
                "the size of the vocabulary, the last dimension of '{}', is not known", folder.names.logits
            )
            .help("export the model with shape inference"));
        };
        ensure!(
            [DType::F32, DType::F16, DType::BF16].contains(&logits_dtype),
            NotImplemented,
            "logits are {}, expected float, float16 or bfloat16",
            logits_dtype.name()
        );
        let slides = |node: &&Node| node.attrs.find_int("sliding_window_cache").unwrap_or(0) != 0;
        if let Some(node) = graph.nodes.iter().filter(|node| is_group_query(node)).find(slides) {
            return Err(error!(NotImplemented, "{} has a cache that slides", node.place())
                .help("build the model with windowed_kv_cache=false"));
        }
        let in_place = caches.iter().all(|cache| is_in_place(graph, cache));
        let mask_has_capacity = in_place && mask_is_counted(graph, &inputs);
        let has = |role| inputs.iter().any(|input: &RoledInput| input.role == role);
        // Lengths come from the mask. Graphs that concatenate mask the rows before a shorter
        // text, and need its positions.
        let mixes_lengths = has(Role::Mask)
            && match in_place {
                true => mask_has_capacity,
                false => has(Role::Positions) && !graph.nodes.iter().any(is_group_query),
            };
        Ok(Layout {
            mask_has_capacity,
            mixes_lengths,
            in_place,
            inputs,
            caches,
            logits: folder.names.logits.clone(),
            logits_dtype,
            vocabulary,
        })
    }

    /// The shape of an input for `rows` cached and `new` new tokens, of which the text then has
    /// `total`.
    pub(crate) fn shape_of(&self, input: &RoledInput, sizes: &StepSizes) -> Vec<usize> {
        let StepSizes { batch, past, new, total } = *sizes;
        match input.role {
            Role::Tokens | Role::Positions => vec![batch, new],
            Role::Mask => vec![batch, if self.mask_has_capacity { past } else { total }],
            Role::UsesCache => vec![1],
            Role::RowsWanted => input.symbols.iter().map(|_| 1).collect(),
            Role::Cache(index) => {
                self.caches.get(index).map(|cache| cache.shape(batch, past).to_vec()).unwrap_or_default()
            }
        }
    }

    /// The bytes of the logits of `batch` texts.
    pub(crate) fn logits_bytes(&self, batch: usize) -> usize {
        let width = self.logits_dtype.byte_size().unwrap_or(4);
        batch.saturating_mul(self.vocabulary).saturating_mul(width)
    }

    /// The bytes of all caches.
    pub(crate) fn cache_bytes(&self, batch: usize, rows: usize) -> usize {
        self.caches.iter().fold(0, |all: usize, cache| all.saturating_add(cache.bytes(batch, rows)))
    }

    /// The bytes of the other inputs.
    pub(crate) fn input_bytes(&self, sizes: &StepSizes) -> usize {
        let others = self.inputs.iter().filter(|input| !matches!(input.role, Role::Cache(_)));
        others
            .map(|input| {
                let count: usize = self.shape_of(input, sizes).iter().product();
                count.saturating_mul(input.dtype.byte_size().unwrap_or(1))
            })
            .sum()
    }

    /// The sizes of the graph's symbols.
    pub(crate) fn dims(&self, sizes: &StepSizes) -> Vec<(String, i64)> {
        let mut dims: Vec<(String, i64)> = Vec::new();
        for input in &self.inputs {
            for (symbol, size) in input.symbols.iter().zip(self.shape_of(input, sizes)) {
                let Some(symbol) = symbol else { continue };
                if !dims.iter().any(|(known, _)| known == symbol) {
                    dims.push((symbol.clone(), size as i64));
                }
            }
        }
        dims
    }
}

/// The sizes of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepSizes {
    pub(crate) batch: usize,
    /// The rows of the tensors of the past: their capacity if they are updated in place.
    pub(crate) past: usize,
    pub(crate) new: usize,
    /// The tokens of the text after the run.
    pub(crate) total: usize,
}

fn roled(spec: &ValueSpec, role: Role) -> Result<RoledInput> {
    let (Some(dtype), Some(shape)) = (spec.ty.dtype(), spec.ty.shape()) else {
        return Err(error!(NotImplemented, "input '{}' is {}, expected a tensor", spec.name, spec.ty));
    };
    let (expected_rank, types): (_, &[DType]) = match role {
        Role::Tokens | Role::Positions | Role::Mask => (Some(2), &[DType::I64, DType::I32]),
        Role::UsesCache => (Some(1), &[DType::Bool]),
        Role::RowsWanted => (None, &[DType::I64]),
        Role::Cache(_) => (Some(4), &[DType::F32, DType::F16, DType::BF16, DType::I8, DType::U8]),
    };
    ensure!(
        expected_rank.is_none_or(|rank| rank == shape.len()) && types.contains(&dtype),
        NotImplemented,
        help = "export the decoder again with onnxruntime-genai or optimum",
        "input '{}' is {}, which generation does not feed",
        spec.name,
        spec.ty
    );
    let symbols = shape.iter().map(|dim| dim.as_symbol().map(ToString::to_string)).collect();
    Ok(RoledInput { name: spec.name.clone(), role, dtype, symbols })
}

fn role_of(spec: &ValueSpec, folder: &ModelFolder) -> Result<Role> {
    let names = &folder.names;
    let roles = [
        (names.input_ids.as_str(), Role::Tokens),
        (names.attention_mask.as_str(), Role::Mask),
        (names.position_ids.as_str(), Role::Positions),
        ("use_cache_branch", Role::UsesCache),
        ("num_logits_to_keep", Role::RowsWanted),
    ];
    let found = roles.iter().find(|(name, _)| *name == spec.name);
    found.map(|(_, role)| *role).ok_or_else(|| {
        error!(NotImplemented, "generation does not know the input '{}' ({})", spec.name, spec.ty)
            .help("export the decoder with input_ids, attention_mask, position_ids and past_key_values alone")
    })
}

/// The cache that an input is the past of.
fn cache_of(graph: &Graph, spec: &ValueSpec, folder: &ModelFolder) -> Result<Option<CacheSpec>> {
    let outputs: Vec<&str> = graph.outputs.iter().map(|id| &*graph.value(*id).name).collect();
    let presents = folder.names.caches.iter().filter_map(|(past, present)| {
        let layer = layer_of(past, &spec.name)?;
        Some(present.replacen("%d", layer, 1))
    });
    let mut presents = presents.peekable();
    if presents.peek().is_none() {
        return Ok(None);
    }
    let present = presents.find(|present| outputs.contains(&present.as_str())).ok_or_else(|| {
        error!(InvalidArgument, "no output is the new value of the cache '{}'", spec.name)
            .help(format!("the outputs are {}", ort_core::shown(&outputs.join(", "), 200)))
    })?;
    let (Some(dtype), Some([_, heads, _, size])) = (spec.ty.dtype(), spec.ty.shape()) else {
        return Err(error!(
            NotImplemented,
            "the cache '{}' is {}, expected batch, heads, tokens and size of a head", spec.name, spec.ty
        )
        .help("export the decoder with caches of four dimensions"));
    };
    // Builders leave these sizes free although the configuration has them.
    let size_of = |dim: &ort_core::dim::Dim, configured: Option<usize>, what: &str| {
        let fixed = dim.as_constant().and_then(|size| usize::try_from(size).ok());
        fixed.or(configured).filter(|size| *size > 0).ok_or_else(|| {
            error!(InvalidArgument, "the {what} of the cache '{}' ({}) is not known", spec.name, spec.ty)
                .help("add head_size and num_key_value_heads to the configuration")
        })
    };
    // Two quantized values of 4 bits in a byte.
    let head_size = folder.head_size.map(|size| if dtype == DType::U8 { size.div_ceil(2) } else { size });
    Ok(Some(CacheSpec {
        past: spec.name.clone(),
        present,
        dtype,
        heads: size_of(heads, folder.key_heads, "number of heads")?,
        size: size_of(size, head_size, "head size")?,
    }))
}

/// The layer in a name that has the form of `pattern`.
fn layer_of<'n>(pattern: &str, name: &'n str) -> Option<&'n str> {
    let (before, after) = pattern.split_once("%d")?;
    let layer = name.strip_prefix(before)?.strip_suffix(after)?;
    (!layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit())).then_some(layer)
}

/// Whether a `GroupQueryAttention` reads the past and writes the present of a cache.
fn is_in_place(graph: &Graph, cache: &CacheSpec) -> bool {
    let past = graph.inputs.iter().copied().find(|id| *graph.value(*id).name == *cache.past);
    let present = graph.outputs.iter().copied().find(|id| *graph.value(*id).name == *cache.present);
    let joins = |node: &Node| {
        let pair = |input: usize, output: usize| {
            node.inputs.get(input).copied().flatten() == past
                && node.outputs.get(output).copied().flatten() == present
        };
        is_group_query(node) && (pair(3, 1) || pair(4, 2))
    };
    past.is_some() && present.is_some() && graph.nodes.iter().any(joins)
}

fn is_group_query(node: &Node) -> bool {
    node.spec.domain == MICROSOFT && node.spec.name == "GroupQueryAttention"
}

/// Whether the mask is only summed and measured, as the builder of onnxruntime-genai does: zeros
/// behind the text then change nothing.
fn mask_is_counted(graph: &Graph, inputs: &[RoledInput]) -> bool {
    let Some(mask) = inputs.iter().find(|input| input.role == Role::Mask) else { return true };
    let id: Option<ValueId> = graph.inputs.iter().copied().find(|id| *graph.value(*id).name == *mask.name);
    let reads = |node: &&Node| node.reads().any(|read| Some(read) == id);
    let mut readers = graph.nodes.iter().filter(reads);
    readers.all(|node| {
        // Positions that come from the measured length would be those of the buffer's end.
        let measures = node.spec.name == "Shape" && only_for_totals(graph, node);
        node.spec.name == "ReduceSum" || measures
    })
}

/// Whether a length is read by `GroupQueryAttention` alone, as its total sequence length.
fn only_for_totals(graph: &Graph, node: &Node) -> bool {
    let mut open: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
    while let Some(value) = open.pop() {
        for reader in graph.nodes.iter().filter(|reader| reader.reads().any(|read| read == value)) {
            let is_total = is_group_query(reader) && reader.inputs.get(6) == Some(&Some(value));
            match reader.spec.name {
                _ if is_total => {}
                "Gather" | "Cast" | "Squeeze" | "Unsqueeze" | "Slice" | "Reshape" => {
                    open.extend(reader.outputs.iter().flatten());
                }
                _ => return false,
            }
        }
    }
    true
}
