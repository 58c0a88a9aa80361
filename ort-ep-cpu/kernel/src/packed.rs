//! Weights that are packed when a session is created.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use std::marker::PhantomData;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, PackedWeights};

use crate::workspace::{bytes_of, scratch};

/// Packed weights in memory that the session accounts for.
pub struct Packed<T>(PackedWeights, PhantomData<T>);

/// Packed weights in `float`.
pub type PackedFloats = Packed<f32>;

impl<T: bytemuck::Pod> Packed<T> {
    /// Packs `len` values, which `fill` writes.
    pub fn new(
        cx: &mut CompileCx<'_>,
        len: usize,
        fill: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<Packed<T>> {
        // A weight without values still gets memory, so that its pointer can be aligned and cast.
        let bytes = bytes_of::<T>(len)?.max(4);
        let packed = cx.pack(bytes, |bytes| fill(&mut scratch::<T>(bytes)?[..len]))?;
        Ok(Packed(packed, PhantomData))
    }

    /// Packs a copy of `values`.
    pub fn copy(cx: &mut CompileCx<'_>, values: &[T]) -> Result<Packed<T>> {
        Packed::new(cx, values.len(), |packed| {
            packed.copy_from_slice(values);
            Ok(())
        })
    }

    /// Returns the packed values.
    pub fn values(&self) -> &[T] {
        let bytes = self.0.bytes();
        // The minimum above may leave a part of an element.
        let whole = bytes.len() - bytes.len() % size_of::<T>().max(1);
        bytemuck::try_cast_slice(bytes.get(..whole).unwrap_or(&[])).unwrap_or(&[])
    }
}

/// Calls `$body` with the elements of a weight of any type that packing widens. Unaligned floats
/// are read in place, because a copy would take as much memory as the packed weight.
#[macro_export]
macro_rules! with_weight {
    ($view:expr, $weights:ident => $body:expr) => {
        match $view.dtype() {
            ort_core::dtype::DType::F16 => {
                let elements = $view.to_cow::<half::f16>()?;
                let $weights = &*elements;
                $body
            }
            ort_core::dtype::DType::BF16 => {
                let elements = $view.to_cow::<half::bf16>()?;
                let $weights = &*elements;
                $body
            }
            ort_core::dtype::DType::F32 if $view.as_slice::<f32>().is_err() => {
                let $weights: &[[u8; 4]] = bytemuck::try_cast_slice($view.bytes()?).unwrap_or(&[]);
                $body
            }
            _ => {
                let $weights = $view.as_slice::<f32>()?;
                $body
            }
        }
    };
}

/// Returns whether weights of this type can be packed.
pub fn is_weight(dtype: Option<DType>) -> bool {
    matches!(dtype, Some(DType::F32 | DType::F16 | DType::BF16))
}
