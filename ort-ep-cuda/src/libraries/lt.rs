//! cuBLASLt GEMM on column-major matrices, with an optional fused bias and activation.
//!
//! The heuristic is queried once per GEMM and device, and cached. It looks at sizes only and needs
//! no device memory. The caller supplies the workspace. The library itself holds only what
//! `cublasLtCreate` allocates, and its code.

mod descriptors;
mod functions;
mod handle;
mod matmul;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ort_core::{Result, error};
use parking_lot::Mutex;

use super::load::Kind;
use super::workspace::{with_alignment, workspace_of};
use crate::driver::{RawStream, Routine};
use descriptors::{
    DESC_BIAS_POINTER, LtDescriptor, LtDescriptors, PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT_A_BYTES,
};
use functions::HeuristicResult;
pub(crate) use functions::LtFunctions;
pub(crate) use handle::Lt;
use handle::LtAlgorithm;
pub(crate) use matmul::{Compute, Epilogue, LtElement, LtLayout, Matmul};

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

/// The alignment of matrices and bias in bytes, which callers ensure.
pub(crate) const ALIGNMENT: u64 = 16;
/// The most bytes of workspace that an algorithm may need.
const MOST_WORKSPACE: usize = 32 << 20;
/// The number of algorithms requested from the heuristic.
const REQUESTED: usize = 8;
/// The most GEMMs whose algorithms are cached.
const MOST_KEPT: usize = 4096;

impl Lt {
    /// Returns the call of a GEMM with at most `room` bytes of workspace, and the bytes it needs.
    /// Returns `None` if the library has no such algorithm.
    pub(crate) fn product(
        self: &Arc<Lt>,
        matmul: &Matmul,
        [alpha, beta]: [f32; 2],
        room: usize,
    ) -> Result<Option<(LtProduct, usize)>> {
        let algorithms = self.algorithms(matmul)?;
        let Some(algorithm) = algorithms.iter().find(|algorithm| with_alignment(algorithm.workspace) <= room)
        else {
            return Ok(None);
        };
        let bytes = with_alignment(algorithm.workspace);
        let descriptors = Mutex::new(LtDescriptors::new(self.clone(), matmul)?);
        let scales = [alpha, beta].map(|scale| Scale { single: scale, double: f64::from(scale) });
        let product = LtProduct { descriptors, algorithm: algorithm.clone(), matmul: *matmul, scales };
        Ok(Some((product, bytes)))
    }

    /// Returns the algorithms for a GEMM, from the cache if it was queried before.
    fn algorithms(self: &Arc<Lt>, matmul: &Matmul) -> Result<Arc<[LtAlgorithm]>> {
        if let Some(algorithms) = self.known.lock().get(matmul) {
            return Ok(algorithms.clone());
        }
        let algorithms: Arc<[LtAlgorithm]> = match LtDescriptors::new(self.clone(), matmul) {
            Ok(descriptors) => {
                let mut algorithms = self.ask_heuristic(&descriptors, MOST_WORKSPACE)?;
                // A caller may have no room for a workspace, so the list needs an algorithm without
                // one.
                if algorithms.iter().all(|algorithm| algorithm.workspace > 0) {
                    algorithms.extend(self.ask_heuristic(&descriptors, 0)?.into_iter().take(1));
                }
                algorithms.into()
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
        known.insert(*matmul, algorithms.clone());
        Ok(algorithms)
    }

    fn ask_heuristic(
        self: &Arc<Lt>,
        descriptors: &LtDescriptors,
        workspace: usize,
    ) -> Result<Vec<LtAlgorithm>> {
        self.context.enter()?;
        let functions = &self.loaded.functions;
        let preference = LtDescriptor::preference(self.clone())?;
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
        let named = |one: &HeuristicResult| LtAlgorithm {
            algorithm: one.algorithm,
            workspace: one.workspace,
            name: functions.name(&one.algorithm, one.workspace),
        };
        Ok(found.filter(|one| one.workspace <= workspace).map(named).collect())
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
    descriptors: Mutex<LtDescriptors>,
    algorithm: LtAlgorithm,
    matmul: Matmul,
    scales: [Scale; 2],
}

impl Routine for LtProduct {
    fn name(&self) -> String {
        self.algorithm.name.clone()
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
                &self.algorithm.algorithm,
                at(workspace),
                bytes.min(self.algorithm.workspace),
                stream,
            )
        };
        lt.check(status, "cublasLtMatmul")
    }
}
