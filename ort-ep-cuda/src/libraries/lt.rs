//! cuBLASLt: products of matrices that lie column by column, with a bias and an activation in the
//! same call.
//!
//! Which algorithm computes a product is asked once for each product of a device and kept, without
//! any memory of the device: the heuristic looks at sizes only. The workspace is the caller's. What
//! the library holds itself is what `cublasLtCreate` takes, and its code.

mod descriptors;
mod functions;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ort_core::{Result, error};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::load::{Kind, Loaded};
use super::{with_alignment, workspace_of};
use crate::driver::{Context, RawStream, Routine};
use descriptors::{
    DESC_BIAS_POINTER, Descriptor, Descriptors, PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT_A_BYTES,
};
pub(crate) use functions::LtFunctions;
use functions::{Algorithm, HeuristicResult};

/// The library.
pub(super) const KIND: Kind = Kind {
    name: "cuBLASLt",
    option: "use_cublas",
    #[cfg(windows)]
    names: &["cublasLt64_13.dll", "cublasLt64_12.dll"],
    #[cfg(not(windows))]
    names: &["libcublasLt.so.13", "libcublasLt.so.12"],
    wheels: &["cu13", "cublas"],
    oldest: 120_000,
};

/// A handle or descriptor of the library's.
type Handle = *mut c_void;

/// What matrices and a bias begin at multiples of, which callers see to.
pub(crate) const ALIGNMENT: u64 = 16;
/// The most bytes of workspace that an algorithm may ask for.
const MOST_WORKSPACE: usize = 32 << 20;
/// Algorithms that are asked for.
const REQUESTED: usize = 8;
/// Products whose algorithms are kept.
const MOST_KEPT: usize = 4096;

/// The type of all matrices of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F32,
    F64,
    F16,
    Bf16,
}

/// What sums are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Compute {
    F32,
    /// In float32, of factors that are shortened to TensorFloat-32.
    Tf32,
    F64,
}

/// What is applied to each element of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    None,
    Relu,
    /// By tanh.
    Gelu,
}

/// A matrix for each of a batch: its element (row, column) is `column * leading + row` behind its
/// first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
    /// From one matrix of the batch to the next; 0 where all are one.
    pub(crate) step: usize,
}

/// `d = epilogue(alpha * op(a) * op(b) + beta * c + bias)`: what follows from types and shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Matmul {
    pub(crate) element: Element,
    pub(crate) compute: Compute,
    pub(crate) batch: usize,
    /// Whether `a` and `b` are transposed.
    pub(crate) transposed: [bool; 2],
    /// Of a, b, c and d.
    pub(crate) layouts: [Layout; 4],
    /// Whether there is a number for each row of the result.
    pub(crate) has_bias: bool,
    pub(crate) epilogue: Epilogue,
}

/// A way to compute a product.
#[derive(Clone, Debug)]
struct Way {
    algorithm: Algorithm,
    workspace: usize,
    name: String,
}

/// The library, started on a device.
pub(crate) struct Lt {
    loaded: Arc<Loaded<LtFunctions>>,
    handle: Handle,
    context: Arc<Context>,
    /// By product: its ways, the fastest first.
    known: Mutex<FxHashMap<Matmul, Arc<[Way]>>>,
}

// SAFETY: NVIDIA lets several threads use a handle at the same time (cuBLAS, "cublasLtHandle_t").
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

impl Lt {
    pub(super) fn open(
        loaded: Arc<Loaded<LtFunctions>>,
        context: &Arc<Context>,
    ) -> std::result::Result<Lt, String> {
        context.enter().map_err(|problem| problem.to_string())?;
        let mut handle = ptr::null_mut();
        // SAFETY: the device's context is current; writes one handle, which is destroyed when this
        // is dropped.
        let status = unsafe { (loaded.functions.cublasLtCreate)(&mut handle) };
        if status != 0 {
            return Err(format!("cublasLtCreate: {}", loaded.functions.describe(status)));
        }
        Ok(Lt { loaded, handle, context: context.clone(), known: Mutex::default() })
    }

    /// The call of a product whose algorithm is content with so many bytes of workspace, and the
    /// bytes that it takes; none where the library knows no algorithm.
    pub(crate) fn product(
        self: &Arc<Lt>,
        matmul: &Matmul,
        [alpha, beta]: [f32; 2],
        room: usize,
    ) -> Result<Option<(LtProduct, usize)>> {
        let ways = self.ways(matmul)?;
        let Some(way) = ways.iter().find(|way| with_alignment(way.workspace) <= room) else {
            return Ok(None);
        };
        let bytes = with_alignment(way.workspace);
        let descriptors = Mutex::new(Descriptors::new(self.clone(), matmul)?);
        let scales = [alpha, beta].map(|scale| Scale { single: scale, double: f64::from(scale) });
        let product = LtProduct { descriptors, way: way.clone(), matmul: *matmul, scales };
        Ok(Some((product, bytes)))
    }

    /// The ways to compute a product, as they were asked for before.
    fn ways(self: &Arc<Lt>, matmul: &Matmul) -> Result<Arc<[Way]>> {
        if let Some(ways) = self.known.lock().get(matmul) {
            return Ok(ways.clone());
        }
        let ways: Arc<[Way]> = match Descriptors::new(self.clone(), matmul) {
            Ok(descriptors) => {
                let mut ways = self.ask_heuristic(&descriptors, MOST_WORKSPACE)?;
                // There may be no room for any of them.
                if ways.iter().all(|way| way.workspace > 0) {
                    ways.extend(self.ask_heuristic(&descriptors, 0)?.into_iter().take(1));
                }
                ways.into()
            }
            Err(problem) => {
                // Such a product is computed by kernels of our own.
                tracing::debug!("not by cuBLASLt: {problem}");
                [].into()
            }
        };
        let mut known = self.known.lock();
        if known.len() >= MOST_KEPT {
            known.clear();
        }
        known.insert(*matmul, ways.clone());
        Ok(ways)
    }

    fn ask_heuristic(self: &Arc<Lt>, descriptors: &Descriptors, workspace: usize) -> Result<Vec<Way>> {
        self.context.enter()?;
        let functions = &self.loaded.functions;
        let preference = Descriptor::preference(self.clone())?;
        preference.set(PREF_MAX_WORKSPACE_BYTES, &(workspace as u64))?;
        for matrix in 0..4 {
            preference.set(PREF_MIN_ALIGNMENT_A_BYTES + matrix, &(ALIGNMENT as u32))?;
        }
        let none =
            HeuristicResult { algorithm: [0; 8], workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let (mut found, mut count) = ([none; REQUESTED], 0);
        let [a, b, c, d] = descriptors.layouts.each_ref().map(|layout| layout.handle);
        // SAFETY: all descriptors are live; there is room for as many results as are asked for.
        let status = unsafe {
            (functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                descriptors.operation.handle,
                a,
                b,
                c,
                d,
                preference.handle,
                REQUESTED as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status != 0 {
            // Such a product is computed by kernels of our own.
            tracing::debug!("cuBLASLt has no algorithm: {}", functions.describe(status));
            return Ok(Vec::new());
        }
        let found = found.iter().take(usize::try_from(count).unwrap_or(0)).filter(|one| one.state == 0);
        let named = |one: &HeuristicResult| Way {
            algorithm: one.algorithm,
            workspace: one.workspace,
            name: functions.name(&one.algorithm, one.workspace),
        };
        Ok(found.filter(|one| one.workspace <= workspace).map(named).collect())
    }

    fn check(&self, status: c_int, what: &str) -> Result<()> {
        self.loaded.functions.check(status, what)
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the handle is live, and no descriptor refers to it; the library waits for the
            // device.
            let _ = unsafe { (self.loaded.functions.cublasLtDestroy)(self.handle) };
        }
    }
}

/// A factor in both types that the library reads it in.
#[derive(Clone, Copy, Debug)]
struct Scale {
    single: f32,
    double: f64,
}

impl Scale {
    fn address(&self, compute: Compute) -> *const c_void {
        match compute {
            Compute::F64 => (&raw const self.double).cast(),
            Compute::F32 | Compute::Tf32 => (&raw const self.single).cast(),
        }
    }
}

/// A product, ready to be asked for. Its tensors are `a`, `b`, `c`, `d`, the bias and the
/// workspace.
pub(crate) struct LtProduct {
    descriptors: Mutex<Descriptors>,
    way: Way,
    matmul: Matmul,
    scales: [Scale; 2],
}

impl Routine for LtProduct {
    fn name(&self) -> String {
        self.way.name.clone()
    }

    fn ask(&self, stream: RawStream, tensors: &[(u64, u64)]) -> Result<()> {
        let [(a, _), (b, _), (c, _), (d, _), (bias, _), scratch] = *tensors else {
            return Err(error!(Fail, "a product of {} tensors", tensors.len()));
        };
        let (workspace, bytes) = workspace_of(scratch);
        let [alpha, beta] = self.scales.each_ref().map(|scale| scale.address(self.matmul.compute));
        let at = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        // The bias is a part of the description: two threads must not exchange theirs.
        let descriptors = self.descriptors.lock();
        if self.matmul.has_bias {
            descriptors.operation.set(DESC_BIAS_POINTER, &bias)?;
        }
        let [of_a, of_b, of_c, of_d] = descriptors.layouts.each_ref().map(|layout| layout.handle);
        let lt = &descriptors.lt;
        // SAFETY: handle and descriptors are live, the algorithm is one for them, the factors have
        // the type of the scale; the matrices lie in live memory of the context as the layouts say,
        // and the workspace has as many bytes. The context is current.
        let status = unsafe {
            (lt.loaded.functions.cublasLtMatmul)(
                lt.handle,
                descriptors.operation.handle,
                alpha,
                at(a),
                of_a,
                at(b),
                of_b,
                beta,
                at(c),
                of_c,
                at(d),
                of_d,
                &self.way.algorithm,
                at(workspace),
                bytes.min(self.way.workspace),
                stream,
            )
        };
        lt.check(status, "cublasLtMatmul")
    }
}
