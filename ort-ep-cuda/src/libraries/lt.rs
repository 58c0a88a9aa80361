//! cuBLASLt GEMM on column-major matrices, with an optional fused bias and activation.
//!
//! The heuristic is queried once per GEMM and device, and cached. It looks at sizes only and needs
//! no device memory. The caller supplies the workspace. The library itself holds only what
//! `cublasLtCreate` allocates, and its code.

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

/// cuBLASLt's names and versions.
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

/// A handle or descriptor of the library.
type Handle = *mut c_void;

/// The alignment of matrices and bias in bytes, which callers ensure.
pub(crate) const ALIGNMENT: u64 = 16;
/// The most bytes of workspace that an algorithm may need.
const MOST_WORKSPACE: usize = 32 << 20;
/// The number of algorithms requested from the heuristic.
const REQUESTED: usize = 8;
/// The most GEMMs whose algorithms are cached.
const MOST_KEPT: usize = 4096;

/// The type of all matrices of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F32,
    F64,
    F16,
    Bf16,
}

/// The type of the accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Compute {
    F32,
    /// Float32, of operands rounded to TF32.
    Tf32,
    F64,
}

/// The activation of the epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    None,
    Relu,
    /// The tanh approximation.
    Gelu,
}

/// A batch of column-major matrices: element (row, column) is at offset `column * leading + row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
    /// Elements from one matrix of the batch to the next; 0 if all share one matrix.
    pub(crate) step: usize,
}

/// `d = epilogue(alpha * op(a) * op(b) + beta * c + bias)`, as types and shapes determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Matmul {
    pub(crate) element: Element,
    pub(crate) compute: Compute,
    pub(crate) batch: usize,
    /// Whether `a` and `b` are transposed.
    pub(crate) transposed: [bool; 2],
    /// The layouts of a, b, c and d.
    pub(crate) layouts: [Layout; 4],
    /// Whether there is a bias, one number per row of the result.
    pub(crate) has_bias: bool,
    pub(crate) epilogue: Epilogue,
}

/// An algorithm for a GEMM.
#[derive(Clone, Debug)]
struct Way {
    algorithm: Algorithm,
    workspace: usize,
    name: String,
}

/// The library, opened on a device.
pub(crate) struct Lt {
    loaded: Arc<Loaded<LtFunctions>>,
    handle: Handle,
    context: Arc<Context>,
    /// The algorithms of each GEMM, fastest first.
    known: Mutex<FxHashMap<Matmul, Arc<[Way]>>>,
}

// SAFETY: several threads may use a handle at the same time (cuBLAS, "cublasLtHandle_t").
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
        // SAFETY: the device's context is current. The library writes one handle, which `Drop`
        // destroys.
        let status = unsafe { (loaded.functions.cublasLtCreate)(&mut handle) };
        if status != 0 {
            return Err(format!("cublasLtCreate: {}", loaded.functions.describe(status)));
        }
        Ok(Lt { loaded, handle, context: context.clone(), known: Mutex::default() })
    }

    /// Returns the call of a GEMM with at most `room` bytes of workspace, and the bytes it needs.
    /// Returns `None` if the library has no such algorithm.
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

    /// Returns the algorithms for a GEMM, from the cache if it was queried before.
    fn ways(self: &Arc<Lt>, matmul: &Matmul) -> Result<Arc<[Way]>> {
        if let Some(ways) = self.known.lock().get(matmul) {
            return Ok(ways.clone());
        }
        let ways: Arc<[Way]> = match Descriptors::new(self.clone(), matmul) {
            Ok(descriptors) => {
                let mut ways = self.ask_heuristic(&descriptors, MOST_WORKSPACE)?;
                // A caller may have no room for a workspace, so the list needs an algorithm without
                // one.
                if ways.iter().all(|way| way.workspace > 0) {
                    ways.extend(self.ask_heuristic(&descriptors, 0)?.into_iter().take(1));
                }
                ways.into()
            }
            Err(problem) => {
                // Our own kernels compute this GEMM.
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
        // SAFETY: all descriptors are live; `found` has room for the number of results requested.
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
            // Our own kernels compute this GEMM.
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
            // SAFETY: the handle is live. Each descriptor holds an `Arc` of this, so none refers to
            // it. The library waits for the device.
            let _ = unsafe { (self.loaded.functions.cublasLtDestroy)(self.handle) };
        }
    }
}

/// A factor in both types in which the library may read it.
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

/// A GEMM ready to run. Its tensors are `a`, `b`, `c`, `d`, the bias and the workspace.
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
        // The descriptor contains the bias address, so two threads must not interleave setting it
        // and the call.
        let descriptors = self.descriptors.lock();
        if self.matmul.has_bias {
            descriptors.operation.set(DESC_BIAS_POINTER, &bias)?;
        }
        let [of_a, of_b, of_c, of_d] = descriptors.layouts.each_ref().map(|layout| layout.handle);
        let lt = &descriptors.lt;
        // SAFETY: handle and descriptors are live, the heuristic returned the algorithm for them,
        // and the factors have the scale type. The matrices are live memory of the context with
        // their layouts, and the workspace has `bytes` bytes. The context is current: `Stream::ask`
        // entered it.
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
