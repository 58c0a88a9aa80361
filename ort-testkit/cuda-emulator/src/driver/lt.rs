//! A fake of NVIDIA's cuBLASLt: the functions that a provider calls.
//!
//! It reads matrices as NVIDIA documents their layouts (cuBLAS, "Using the cuBLASLt API"):
//! column-major, with a leading dimension and a stride between the matrices of a batch. It refuses
//! what the document forbids with the status that it names.
//!
//! `ORT_CUDA_EMULATOR_CUBLASLT` sets the version that it reports (120400); with 0, creating a
//! handle fails.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};

use parking_lot::Mutex;

use super::routine::{Element, Routine, ask_routine, misaligned, scribble, short};
use super::{Handle, current, setting};

/// The simulated time of a GEMM in microseconds.
const LT_TIME: u64 = 1000;
const NOT_INITIALIZED: c_int = 1;
const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

type Status = Result<(), c_int>;

#[derive(Clone, Copy, Debug)]
struct Layout {
    element: Element,
    rows: usize,
    columns: usize,
    leading: usize,
    batch: usize,
    step: usize,
}

#[derive(Clone, Copy, Debug)]
struct Operation {
    compute: c_int,
    scale: c_int,
    transposed: [bool; 2],
    epilogue: c_int,
    bias: u64,
}

#[derive(Clone, Copy, Debug)]
struct Preference {
    workspace: usize,
    /// Guaranteed alignments in bytes of the matrices A, B, C and D.
    alignment: [u32; 4],
}

#[derive(Clone, Copy, Debug)]
enum Object {
    Library,
    Layout(Layout),
    Operation(Operation),
    Preference(Preference),
}

/// The live objects by address.
static OBJECTS: Mutex<BTreeMap<u64, Object>> = Mutex::new(BTreeMap::new());

/// An algorithm of a GEMM, in the opaque words that a program keeps of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Algorithm {
    id: u64,
    workspace: u64,
    alignment: [u32; 4],
    rest: [u64; 4],
}

/// A heuristic result: an algorithm with the workspace that it needs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Found {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// Number and workspace in bytes of each algorithm, the fastest first.
const ALGORITHMS: [(u64, usize); 3] = [(21, 8 << 20), (31, 64 << 10), (6, 0)];

fn version() -> usize {
    setting("ORT_CUDA_EMULATOR_CUBLASLT", 120_400)
}

fn new(to: *mut Handle, object: Object) -> Status {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut objects = OBJECTS.lock();
    let key = objects.last_key_value().map_or(0x1_0000, |(key, _)| key + 16);
    objects.insert(key, object);
    // SAFETY: `to` is not null, and the API requires a valid pointer for a handle.
    unsafe { to.write(key as Handle) };
    Ok(())
}

fn find(handle: Handle) -> Result<Object, c_int> {
    OBJECTS.lock().get(&(handle as u64)).copied().ok_or(INVALID_VALUE)
}

fn library(handle: Handle) -> Status {
    matches!(find(handle), Ok(Object::Library)).then_some(()).ok_or(NOT_INITIALIZED)
}

fn layout(handle: Handle) -> Result<Layout, c_int> {
    if let Object::Layout(layout) = find(handle)? { Ok(layout) } else { Err(INVALID_VALUE) }
}

fn operation(handle: Handle) -> Result<Operation, c_int> {
    if let Object::Operation(operation) = find(handle)? { Ok(operation) } else { Err(INVALID_VALUE) }
}

/// Reads the value of an attribute, whose size must match.
fn value<T: Copy>(from: *const c_void, bytes: usize) -> Result<T, c_int> {
    if from.is_null() || bytes != size_of::<T>() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `from` is not null, and the size that the caller passes equals that of `T`.
    Ok(unsafe { from.cast::<T>().read_unaligned() })
}

fn element(number: c_int) -> Result<Element, c_int> {
    // The numbers of `cudaDataType`.
    match number {
        0 => Ok(Element::F32),
        1 => Ok(Element::F64),
        2 => Ok(Element::F16),
        14 => Ok(Element::Bf16),
        _ => Err(NOT_SUPPORTED),
    }
}

/// The library's `cublasLtGetVersion`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    version()
}

/// The library's `cublasLtGetStatusString`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: c_int) -> *const c_char {
    let text = match status {
        0 => c"success",
        NOT_INITIALIZED => c"the library was not initialized",
        INVALID_VALUE => c"an unsupported value or parameter was passed to the function",
        EXECUTION_FAILED => c"the function failed to launch on the GPU",
        NOT_SUPPORTED => c"the functionality requested is not supported",
        _ => c"<unknown>",
    };
    text.as_ptr()
}

library_api! {
    fn cublasLtCreate(handle: *mut Handle) {
        drop(current().map_err(|_| NOT_INITIALIZED)?);
        if version() == 0 { Err(NOT_INITIALIZED) } else { new(handle, Object::Library) }
    }
    fn cublasLtDestroy(handle: Handle) {
        library(handle)?;
        destroy(handle)
    }
    fn cublasLtMatrixLayoutCreate(handle: *mut Handle, ty: c_int, rows: u64, columns: u64, leading: i64) {
        let leading = usize::try_from(leading).map_err(|_| INVALID_VALUE)?;
        let (rows, columns) = (rows as usize, columns as usize);
        let layout = Layout { element: element(ty)?, rows, columns, leading, batch: 1, step: 0 };
        new(handle, Object::Layout(layout))
    }
    fn cublasLtMatrixLayoutDestroy(handle: Handle) {
        layout(handle)?;
        destroy(handle)
    }
    fn cublasLtMatrixLayoutSetAttribute(handle: Handle, attribute: c_int, from: *const c_void, bytes: usize) {
        let mut layout = layout(handle)?;
        // 5 is `BATCH_COUNT`, 6 is `STRIDED_BATCH_OFFSET`.
        match attribute {
            5 => layout.batch = usize::try_from(value::<i32>(from, bytes)?).map_err(|_| INVALID_VALUE)?,
            6 => layout.step = usize::try_from(value::<i64>(from, bytes)?).map_err(|_| INVALID_VALUE)?,
            _ => return Err(INVALID_VALUE),
        }
        set(handle, Object::Layout(layout))
    }
    fn cublasLtMatmulDescCreate(handle: *mut Handle, compute: c_int, scale: c_int) {
        let operation = Operation { compute, scale, transposed: [false; 2], epilogue: 1, bias: 0 };
        new(handle, Object::Operation(operation))
    }
    fn cublasLtMatmulDescDestroy(handle: Handle) {
        operation(handle)?;
        destroy(handle)
    }
    fn cublasLtMatmulDescSetAttribute(handle: Handle, attribute: c_int, from: *const c_void, bytes: usize) {
        let mut operation = operation(handle)?;
        // 3 and 4 are `TRANSA` and `TRANSB`, 7 is `EPILOGUE`, 8 is `BIAS_POINTER`.
        match attribute {
            3 | 4 => {
                let transposed = value::<i32>(from, bytes)?;
                if !(0..=1).contains(&transposed) {
                    return Err(INVALID_VALUE);
                }
                operation.transposed[attribute as usize - 3] = transposed == 1;
            }
            7 => operation.epilogue = value(from, bytes)?,
            8 => operation.bias = value(from, bytes)?,
            _ => return Err(INVALID_VALUE),
        }
        set(handle, Object::Operation(operation))
    }
    fn cublasLtMatmulPreferenceCreate(handle: *mut Handle) {
        // cuBLASLt assumes 256 bytes of alignment unless a program says otherwise.
        new(handle, Object::Preference(Preference { workspace: 0, alignment: [256; 4] }))
    }
    fn cublasLtMatmulPreferenceDestroy(handle: Handle) {
        let Object::Preference(_) = find(handle)? else { return Err(INVALID_VALUE) };
        destroy(handle)
    }
    fn cublasLtMatmulPreferenceSetAttribute(handle: Handle, attribute: c_int, from: *const c_void, bytes: usize) {
        let Object::Preference(mut preference) = find(handle)? else { return Err(INVALID_VALUE) };
        // 1 is `MAX_WORKSPACE_BYTES`, 5 to 8 are `MIN_ALIGNMENT_A_BYTES` to
        // `MIN_ALIGNMENT_D_BYTES`.
        match attribute {
            1 => preference.workspace = value::<u64>(from, bytes)? as usize,
            5..=8 => preference.alignment[attribute as usize - 5] = value(from, bytes)?,
            _ => return Err(INVALID_VALUE),
        }
        set(handle, Object::Preference(preference))
    }
    fn cublasLtMatmulAlgoConfigGetAttribute(
        algorithm: *const Algorithm,
        attribute: c_int,
        to: *mut c_void,
        bytes: usize,
        written: *mut usize,
    ) {
        if algorithm.is_null() || to.is_null() || bytes != 4 || !(0..=6).contains(&attribute) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: both pointers are not null, and the API requires an algorithm that it returned
        // and room for `bytes`.
        // 0 is `CUBLASLT_ALGO_CONFIG_ID`.
        unsafe {
            to.cast::<u32>().write_unaligned(if attribute == 0 { (*algorithm).id as u32 } else { 1 });
            if !written.is_null() {
                written.write(4);
            }
        }
        Ok(())
    }
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: Handle,
        of: Handle,
        a: Handle,
        b: Handle,
        c: Handle,
        d: Handle,
        preference: Handle,
        requested: c_int,
        found: *mut Found,
        count: *mut c_int,
    ) {
        library(handle)?;
        let Object::Preference(preference) = find(preference)? else { return Err(INVALID_VALUE) };
        if requested < 1 || found.is_null() || count.is_null() {
            return Err(INVALID_VALUE);
        }
        check(&operation(of)?, &[layout(a)?, layout(b)?, layout(c)?, layout(d)?])?;
        let fitting = ALGORITHMS.iter().filter(|(_, workspace)| *workspace <= preference.workspace);
        let mut some = 0;
        for (id, workspace) in fitting.take(requested as usize) {
            let (alignment, rest) = (preference.alignment, [0; 4]);
            let algorithm = Algorithm { id: *id, workspace: *workspace as u64, alignment, rest };
            let one = Found { algorithm, workspace: *workspace, ..Found::default() };
            // SAFETY: `found` is not null, and the API requires room for `requested` results, which
            // `take` bounds.
            unsafe { found.add(some).write(one) };
            some += 1;
        }
        // SAFETY: `count` is not null, and the API requires a valid pointer for a result.
        unsafe { count.write(some as c_int) };
        Ok(())
    }
    fn cublasLtMatmul(
        handle: Handle,
        of: Handle,
        alpha: *const c_void,
        a: u64,
        a_layout: Handle,
        b: u64,
        b_layout: Handle,
        beta: *const c_void,
        c: u64,
        c_layout: Handle,
        d: u64,
        d_layout: Handle,
        algorithm: *const Algorithm,
        workspace: u64,
        workspace_bytes: usize,
        stream: Handle,
    ) {
        library(handle)?;
        let (operation, layouts) =
            (operation(of)?, [layout(a_layout)?, layout(b_layout)?, layout(c_layout)?, layout(d_layout)?]);
        check(&operation, &layouts)?;
        if algorithm.is_null() || alpha.is_null() || beta.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `algorithm` is not null, and the API requires one that it returned.
        let algorithm = unsafe { *algorithm };
        let needed = algorithm.workspace as usize;
        let scratch = workspace_bytes >= needed && (needed == 0 || workspace != 0 && workspace.is_multiple_of(256));
        // Bit 2 of `cublasLtEpilogue_t` is the bias.
        let bias = operation.epilogue & 4 != 0;
        if !ALGORITHMS.iter().any(|(id, _)| *id == algorithm.id) || !scratch || bias && operation.bias == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: both pointers are not null, and the API requires numbers of the scale's type
        // there.
        let scales = [alpha, beta].map(|at| unsafe {
            if operation.scale == 1 { at.cast::<f64>().read() } else { f64::from(at.cast::<f32>().read()) }
        });
        let places = [a, b, c, d];
        // In place, C and D must have the same layout, because D's elements are written where C's
        // are read.
        let [_, _, of_c, of_d] = layouts;
        if c == d && scales[1] != 0.0 && (of_c.leading, of_c.step) != (of_d.leading, of_d.step) {
            return Err(INVALID_VALUE);
        }
        for ((at, layout), by) in places.iter().zip(&layouts).zip(algorithm.alignment) {
            let by = u64::from(by).max(layout.element.bytes() as u64);
            misaligned("a matrix", *at, by).map_err(|_| EXECUTION_FAILED)?;
        }
        let mut memory: Vec<(u64, usize)> = places.iter().zip(&layouts).map(|(at, layout)| (*at, layout.bytes())).collect();
        memory.push((workspace, needed));
        if bias {
            memory.push((operation.bias, of_d.rows * of_d.element.bytes()));
        }
        let work = move || {
            scribble(workspace, needed);
            multiply(&operation, &layouts, places, scales);
        };
        ask_routine(stream, Routine { memory, work: Box::new(work), time: LT_TIME }).map_err(|_| EXECUTION_FAILED)
    }
}

fn destroy(handle: Handle) -> Status {
    OBJECTS.lock().remove(&(handle as u64)).map(drop).ok_or(INVALID_VALUE)
}

fn set(handle: Handle, object: Object) -> Status {
    OBJECTS.lock().insert(handle as u64, object);
    Ok(())
}

impl Layout {
    /// Returns the bytes from the first to the last element.
    fn bytes(&self) -> usize {
        // `check` refused zero sizes by `is_sound`, so the subtractions do not wrap.
        let last = (self.batch - 1) * self.step + (self.columns - 1) * self.leading + self.rows;
        last * self.element.bytes()
    }

    fn is_sound(&self) -> bool {
        self.rows > 0 && self.columns > 0 && self.batch > 0 && self.leading >= self.rows
    }
}

/// Checks that the matrices fit each other, and that their types are in the document's table.
fn check(operation: &Operation, layouts: &[Layout; 4]) -> Status {
    let [a, b, c, d] = layouts;
    if !layouts.iter().all(Layout::is_sound) {
        return Err(INVALID_VALUE);
    }
    let turned = |layout: &Layout, turned: bool| {
        if turned { (layout.columns, layout.rows) } else { (layout.rows, layout.columns) }
    };
    let ((rows, depth), (steps, columns)) =
        (turned(a, operation.transposed[0]), turned(b, operation.transposed[1]));
    let fits = depth == steps
        && [c, d].iter().all(|layout| (layout.rows, layout.columns) == (rows, columns))
        && layouts.iter().all(|layout| layout.batch == d.batch && layout.element == d.element)
        // The matrices of D must not overlap. Those of A and B may: a step of 0 repeats one.
        && (d.batch == 1 || d.step >= (columns - 1) * d.leading + rows);
    if !fits {
        return Err(INVALID_VALUE);
    }
    // Compute types: 68 is 32F, 70 is 64F, 77 is 32F_FAST_TF32.
    let types = match (operation.compute, operation.scale, d.element) {
        (68, 0, Element::F32 | Element::F16 | Element::Bf16) | (77, 0, Element::F32) => true,
        (70, 1, Element::F64) => operation.epilogue == 1,
        _ => false,
    };
    let epilogue = matches!(operation.epilogue, 1 | 2 | 4 | 6 | 32 | 36);
    if types && epilogue { Ok(()) } else { Err(NOT_SUPPORTED) }
}

/// Computes `d = epilogue(alpha * a * b + beta * c)`.
fn multiply(operation: &Operation, layouts: &[Layout; 4], [a, b, c, d]: [u64; 4], [alpha, beta]: [f64; 2]) {
    let [of_a, of_b, of_c, of_d] = layouts;
    let depth = if operation.transposed[0] { of_a.rows } else { of_a.columns };
    let read = |at: u64, layout: &Layout, transposed: bool, batch: usize, row: usize, column: usize| {
        let (row, column) = if transposed { (column, row) } else { (row, column) };
        let value = layout.element.read(at, batch * layout.step + column * layout.leading + row);
        if operation.compute == 77 { short(value) } else { value }
    };
    for batch in 0..of_d.batch {
        // Gather each side once, so that the inner loop reads contiguous values.
        let [ta, tb] = operation.transposed;
        let left: Vec<f64> = (0..of_d.rows)
            .flat_map(|row| (0..depth).map(move |k| (row, k)))
            .map(|(row, k)| read(a, of_a, ta, batch, row, k))
            .collect();
        for column in 0..of_d.columns {
            let right: Vec<f64> = (0..depth).map(|k| read(b, of_b, tb, batch, k, column)).collect();
            for row in 0..of_d.rows {
                let line = &left[row * depth..(row + 1) * depth];
                let mut sum = alpha * line.iter().zip(&right).map(|(x, y)| x * y).sum::<f64>();
                // Beta 0 must not read C, which may hold NaN.
                if beta != 0.0 {
                    sum += beta * of_c.element.read(c, batch * of_c.step + column * of_c.leading + row);
                }
                if operation.epilogue & 4 != 0 {
                    sum += of_d.element.read(operation.bias, row);
                }
                let result = match operation.epilogue & !4 {
                    2 => sum.max(0.0),
                    // The tanh approximation of GELU. The first constant is sqrt(2 / pi).
                    32 => {
                        0.5 * sum * (1.0 + (0.797_884_560_802_865_4 * (sum + 0.044_715 * sum.powi(3))).tanh())
                    }
                    _ => sum,
                };
                of_d.element.write(d, batch * of_d.step + column * of_d.leading + row, result);
            }
        }
    }
}
