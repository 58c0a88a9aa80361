//! Fused `Attention`, without a matrix of scores, for `float` and half precision.
//!
//! A half-precision KV cache is read in place, without conversion.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, Precision, RunCx};
use ort_core::{Result, ensure, error};

use super::attention::{Attention, Layout, Reach, Sizes, join};
use super::attention_mask::Mask;
use ort_cpu_attention as attention;
use ort_cpu_attention::{Elements, Rows};
use ort_cpu_gemm::Cpu;
use ort_cpu_kernel::half_precision::{narrow, widen};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};

pub(super) fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let width = |index: usize| match cx.node.dtype(index) {
        Some(DType::F32) => 4,
        _ => 2,
    };
    let widths = [0, 1, 2].map(width);
    Ok(Box::new(Fused { inner: Attention::new(cx)?, widths, precision: cx.precision }))
}

struct Fused {
    inner: Attention<f32>,
    /// Bytes per element of queries, keys and values.
    widths: [usize; 3],
    precision: Precision,
}

/// Views bytes as elements of a type that attention computes in single precision.
pub(crate) fn elements(dtype: DType, bytes: &[u8]) -> Result<Elements<'_>> {
    fn cast<T: bytemuck::Pod>(bytes: &[u8]) -> Result<&[T]> {
        if bytes.is_empty() {
            return Ok(&[]);
        }
        bytemuck::try_cast_slice(bytes).map_err(|_| error!(Fail, "keys or values are not aligned"))
    }
    match dtype {
        DType::F32 => Ok(Elements::F32(cast(bytes)?)),
        DType::F16 => Ok(Elements::F16(cast(bytes)?)),
        DType::BF16 => Ok(Elements::BF16(cast(bytes)?)),
        other => Err(error!(InvalidArgument, "attention of type {other}")),
    }
}

/// Rounds a number of bytes up to whole cache lines.
fn lines(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

/// Converts the sizes to those of the attention loops.
fn sizes_of(sizes: &Sizes) -> attention::Sizes {
    attention::Sizes {
        batch: sizes.q.batch,
        heads: sizes.q.heads,
        key_heads: sizes.k.heads,
        queries: sizes.q.rows,
        keys: sizes.total(),
        size: sizes.q.size,
        value_size: sizes.v.size,
    }
}

/// The workspace of a run by purpose, in bytes.
struct Parts {
    /// Queries in single precision; 0 if they are already.
    queries: usize,
    /// Results in single precision; 0 if the output is.
    results: usize,
    /// Past and new keys and values joined, unless an output holds them.
    caches: [usize; 2],
    /// Scratch of the attention loops.
    loops: usize,
}

impl Fused {
    fn cpu(&self, threads: usize) -> Cpu {
        Cpu::with_threads(threads).in_precision(self.precision)
    }

    fn parts(&self, sizes: &Sizes, threads: usize, wanted: [bool; 2]) -> Result<Parts> {
        let wide = |layout: Layout| if self.widths[0] == 4 { Ok(0) } else { bytes_of::<f32>(layout.len()) };
        // No workspace if the input serves as it is, or if an output takes the joined rows.
        let cache = |layout: Layout, which: usize| match sizes.past == 0 || wanted[which] {
            true => 0,
            false => Layout { rows: sizes.total(), ..layout }.len() * self.widths[1 + which],
        };
        let is_narrow = self.widths[1..].contains(&2);
        let loops = sizes_of(sizes).scratch_len(self.cpu(threads), is_narrow);
        Ok(Parts {
            queries: lines(wide(sizes.q)?),
            results: lines(wide(Layout { size: sizes.v.size, ..sizes.q })?),
            caches: [lines(cache(sizes.k, 0)), lines(cache(sizes.v, 1))],
            loops: bytes_of::<f32>(loops)?,
        })
    }

    /// Returns the keys (0) or values (1): the input itself if there is no past and no output for
    /// them, else past and new rows joined.
    fn cache<'a>(
        &self,
        cx: &mut RunCx<'a>,
        which: usize,
        (layout, past): (Layout, usize),
        spare: &'a mut [u8],
    ) -> Result<Rows<'a>> {
        let new = cx.input(1 + which)?;
        let (dtype, new) = (new.dtype(), new.bytes()?);
        if past == 0 && !cx.wants(1 + which) {
            return Ok(Rows { elements: elements(dtype, new)?, strides: layout.strides() });
        }
        let full = Layout { rows: past + layout.rows, interleaved: false, ..layout };
        let width = self.widths[1 + which];
        let old = match cx.find_input(4 + which) {
            Some(view) => view.bytes()?,
            None => &[],
        };
        let len = full.len() * width;
        ensure!(
            old.len() + new.len() == len,
            InvalidArgument,
            "past_key or past_value does not fit the new rows"
        );
        let threads = cx.threads();
        let to = match cx.wants(1 + which) {
            true => cx.output(1 + which)?.bytes_mut()?,
            false => spare.get_mut(..len).ok_or_else(|| error!(Fail, "the workspace is too small"))?,
        };
        join(threads, (old, past), new, Layout { size: layout.size * width, ..layout }, to);
        Ok(Rows { elements: elements(dtype, to)?, strides: full.strides() })
    }
}

impl Executable for Fused {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let inputs = [shapes.input(0), shapes.input(1), shapes.input(2)];
        let sizes = self.inner.sizes(inputs, shapes.input(4), false)?;
        let wanted = [1, 2].map(|output| shapes.outputs.get(output).is_some_and(Option::is_some));
        let Parts { queries, results, caches, loops } = self.parts(&sizes, shapes.threads, wanted)?;
        Ok(queries + results + caches[0] + caches[1] + loops)
    }

    fn heap(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        self.inner.heap(shapes)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let threads = cx.threads();
        // If the result is computed in place of the queries, it has their shape.
        let q = if cx.in_place(0) == Some(0) { None } else { Some(cx.input(0)?) };
        let q_shape = q.map_or_else(|| cx.output_shape(0).unwrap_or_default(), |q| q.shape());
        let (k, v) = (cx.input(1)?, cx.input(2)?);
        let past = cx.find_input(4).map_or(&[][..], |past| past.shape());
        let sizes = self.inner.sizes([q_shape, k.shape(), v.shape()], past, false)?;
        let parts = self.parts(&sizes, threads, [cx.wants(1), cx.wants(2)])?;
        let mut rest = cx.workspace()?;
        let wide = take(&mut rest, parts.queries)?;
        let result = take(&mut rest, parts.results)?;
        let [spare_keys, spare_values] =
            [take(&mut rest, parts.caches[0])?, take(&mut rest, parts.caches[1])?];
        let keys = self.cache(cx, 0, (sizes.k, sizes.past), spare_keys)?;
        let values = self.cache(cx, 1, (sizes.v, sizes.past), spare_values)?;
        let queries = match q {
            None => None,
            Some(q) if q.dtype() == DType::F32 => Some(q.as_slice::<f32>()?),
            Some(q) => {
                let wide = &mut scratch::<f32>(wide)?[..sizes.q.len()];
                widen(threads, q, wide)?;
                Some(&*wide)
            }
        };
        let strides = sizes.q.strides();
        let queries = queries.map(|values| Rows { elements: Elements::F32(values), strides });
        let reach = Reach::new(cx, &sizes)?;
        let total = sizes.total();
        let full = [sizes.q.batch, sizes.q.heads, sizes.q.rows, total];
        let mask = cx.find_input(3).map(|view| Mask::<f32>::new(view, full)).transpose()?;
        let write = |place: [usize; 3], keys: std::ops::Range<usize>, to: &mut [f32]| {
            if let Some(mask) = &mask {
                mask.write(place, keys, to);
            }
        };
        let attention = attention::Attention {
            sizes: sizes_of(&sizes),
            queries,
            keys,
            values,
            scale: self.inner.scale.unwrap_or(1.0 / (sizes.q.size as f32).sqrt()),
            softcap: self.inner.softcap,
            visible: &|[batch, query]| self.inner.allowed(&reach, batch, query, total),
            mask: mask
                .as_ref()
                .map(|mask| attention::Mask { write: &write, is_by_query: mask.is_by_query() }),
            sinks: None,
            hidden_is_nan: self.inner.hidden_is_nan,
        };
        let strides = Layout { size: sizes.v.size, ..sizes.q }.strides();
        let output = cx.output(0)?;
        let refused = |refused: attention::Refused| error!(InvalidArgument, "{refused}");
        let (cpu, loops) = (self.cpu(threads), scratch(rest)?);
        if output.dtype() == DType::F32 {
            return attention.run(cpu, output.as_mut_slice()?, strides, loops).map_err(refused);
        }
        // Half precision is rounded once, from a result in single precision.
        let result = &mut scratch::<f32>(result)?[..output.element_count()];
        attention.run(cpu, result, strides, loops).map_err(refused)?;
        narrow(threads, result, output)
    }
}
