//! A library of custom operators, as clients write them: its `RegisterCustomOps` adds a domain to
//! session options. The tests load it, into this library and into others with the same C API.
//!
//! Each table has the fields of its own version only. What lies behind them is no function, so that
//! a runtime that reads it crashes.
#![allow(
    unreachable_pub,
    clippy::not_unsafe_ptr_arg_deref,
    reason = "the library that loads this one calls the functions, as C does"
)]
#![allow(clippy::expect_used, reason = "a test fails where it cannot go on")]
#![allow(clippy::mut_from_ref, reason = "tensors are memory of the runtime, which a kernel may write")]

mod kernels;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock, PoisonError};

use kernels::{
    all_attributes, any_type, doubled, failing, increment, infer_repeated, infer_same, largest, no_inference,
    optional, parallel, plain, repeated, scale, shout, variadic, with_add, with_factor, with_times,
    with_top_k,
};
use ort_sys::{
    OrtApi, OrtApiBase, OrtErrorCode, OrtKernelContext, OrtKernelInfo, OrtOp, OrtSessionOptions,
    OrtShapeInferContext, OrtStatus, OrtStatusPtr,
};

/// The numbers of element types.
const ANY: i32 = 0;
const FLOAT: i32 = 1;
const INT64: i32 = 7;
const STRING: i32 = 8;

static API: OnceLock<&'static OrtApi> = OnceLock::new();
/// What was called, for tests that compare the order.
static TRACE: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn api() -> &'static OrtApi {
    API.get().expect("RegisterCustomOps comes first")
}

fn trace(what: &str) {
    TRACE.lock().unwrap_or_else(PoisonError::into_inner).push(what.to_owned());
}

/// A status, or nothing on success.
type Done = Result<(), *mut OrtStatus>;

fn checked(status: OrtStatusPtr) -> Done {
    if status.0.is_null() { Ok(()) } else { Err(status.0) }
}

fn returned(done: Done) -> OrtStatusPtr {
    done.map_or_else(OrtStatusPtr, |()| OrtStatusPtr::default())
}

fn failed(code: OrtErrorCode, text: &CStr) -> *mut OrtStatus {
    // SAFETY: the text ends with a zero.
    unsafe { (api().CreateStatus)(code, text.as_ptr()) }.0
}

/// Calls a function of the table whose last argument is the result.
macro_rules! get {
    ($name:ident($($argument:expr),*)) => {{
        let mut made = std::mem::MaybeUninit::zeroed();
        // SAFETY: the arguments are those that the header demands.
        checked(unsafe { (api().$name)($($argument,)* made.as_mut_ptr()) })?;
        // SAFETY: the function succeeded.
        unsafe { made.assume_init() }
    }};
}

pub(crate) use get;

#[derive(Clone, Copy)]
enum Kind {
    Required = 0,
    Optional = 1,
    Variadic = 2,
}

type Params = &'static [(i32, Kind)];
type Create = fn(*const OrtKernelInfo) -> Result<Kernel, *mut OrtStatus>;
type Compute = fn(&Kernel, *mut OrtKernelContext) -> Done;
type Infer = fn(*const OrtShapeInferContext) -> Done;

/// A table of functions, and what they say.
#[repr(C)]
struct Operator {
    table: [usize; 26],
    name: &'static CStr,
    inputs: Params,
    outputs: Params,
    create: Create,
    compute: Compute,
    infer: Infer,
    versions: [c_int; 2],
}

/// What a kernel reads when it is made.
struct Kernel {
    name: &'static str,
    compute: Compute,
    factor: f32,
    mode: i64,
    op: *mut OrtOp,
}

fn operator<'a>(op: *const Operator) -> &'a Operator {
    // SAFETY: the runtime passes the pointer that it got.
    unsafe { &*op }
}

extern "system" fn create_kernel(
    op: *const Operator,
    _: *const OrtApi,
    info: *const OrtKernelInfo,
) -> *mut c_void {
    let mut kernel = null_mut();
    let _ = create_kernel_v2(op, null(), info, &raw mut kernel);
    kernel
}

extern "system" fn create_kernel_v2(
    op: *const Operator,
    _: *const OrtApi,
    info: *const OrtKernelInfo,
    out: *mut *mut c_void,
) -> OrtStatusPtr {
    let op = operator(op);
    trace(&format!("create {}", op.name.to_string_lossy()));
    returned((op.create)(info).map(|kernel| {
        let name = op.name.to_str().unwrap_or_default();
        let kernel = Box::new(Kernel { name, compute: op.compute, ..kernel });
        // SAFETY: the runtime gives a place for the kernel.
        unsafe { *out = Box::into_raw(kernel).cast() };
    }))
}

extern "system" fn name(op: *const Operator) -> *const c_char {
    operator(op).name.as_ptr()
}

extern "system" fn provider(_: *const Operator) -> *const c_char {
    null()
}

extern "system" fn input_type(op: *const Operator, index: usize) -> i32 {
    operator(op).inputs[index].0
}

extern "system" fn input_count(op: *const Operator) -> usize {
    operator(op).inputs.len()
}

extern "system" fn output_type(op: *const Operator, index: usize) -> i32 {
    operator(op).outputs[index].0
}

extern "system" fn output_count(op: *const Operator) -> usize {
    operator(op).outputs.len()
}

extern "system" fn compute(kernel: *mut c_void, context: *mut OrtKernelContext) {
    let _ = compute_v2(kernel, context);
}

extern "system" fn compute_v2(kernel: *mut c_void, context: *mut OrtKernelContext) -> OrtStatusPtr {
    // SAFETY: the runtime passes the kernel that it got.
    let kernel = unsafe { &*kernel.cast::<Kernel>() };
    trace(&format!("compute {}", kernel.name));
    returned((kernel.compute)(kernel, context))
}

extern "system" fn destroy(kernel: *mut c_void) {
    if kernel.is_null() {
        return;
    }
    // SAFETY: `create_kernel_v2` made it, and the runtime gives it back once.
    let kernel = unsafe { Box::from_raw(kernel.cast::<Kernel>()) };
    trace(&format!("destroy {}", kernel.name));
    if !kernel.op.is_null() {
        // SAFETY: `CreateOp` made it.
        unsafe { (api().ReleaseOp)(kernel.op) };
    }
}

extern "system" fn input_kind(op: *const Operator, index: usize) -> i32 {
    operator(op).inputs[index].1 as i32
}

extern "system" fn output_kind(op: *const Operator, index: usize) -> i32 {
    operator(op).outputs[index].1 as i32
}

extern "system" fn memory_kind(_: *const Operator, _: usize) -> i32 {
    0
}

extern "system" fn one(_: *const Operator) -> c_int {
    1
}

extern "system" fn none(_: *const Operator) -> c_int {
    0
}

extern "system" fn infer(op: *const Operator, context: *mut OrtShapeInferContext) -> OrtStatusPtr {
    let op = operator(op);
    returned((op.infer)(context))
}

extern "system" fn start(op: *const Operator) -> c_int {
    operator(op).versions[0]
}

extern "system" fn end(op: *const Operator) -> c_int {
    operator(op).versions[1]
}

extern "system" fn may_in_place(inputs: *mut *mut c_int, outputs: *mut *mut c_int) -> usize {
    // SAFETY: the runtime gives places for the lists.
    unsafe {
        *inputs = Box::into_raw(Box::new(0));
        *outputs = Box::into_raw(Box::new(0));
    }
    1
}

extern "system" fn release_in_place(inputs: *mut c_int, outputs: *mut c_int) {
    for list in [inputs, outputs] {
        // SAFETY: `may_in_place` made it.
        drop(unsafe { Box::from_raw(list) });
    }
}

/// The number of fields of a version.
fn fields(version: u32) -> usize {
    match version {
        0..8 => 10,
        8..13 => 12,
        13 => 13,
        14..16 => 17,
        16 => 19,
        17 => 22,
        _ => 26,
    }
}

/// A table of a version. Version 117 is 17 with inference.
fn table(version: u32) -> [usize; 26] {
    let (version, infers) = if version > 100 { (version - 100, true) } else { (version, false) };
    let homogeneous = one as *const () as usize;
    let mut table = [
        version as usize,
        create_kernel as *const () as usize,
        name as *const () as usize,
        provider as *const () as usize,
        input_type as *const () as usize,
        input_count as *const () as usize,
        output_type as *const () as usize,
        output_count as *const () as usize,
        compute as *const () as usize,
        destroy as *const () as usize,
        input_kind as *const () as usize,
        output_kind as *const () as usize,
        memory_kind as *const () as usize,
        one as *const () as usize,
        homogeneous,
        one as *const () as usize,
        none as *const () as usize,
        create_kernel_v2 as *const () as usize,
        compute_v2 as *const () as usize,
        if infers { infer as *const () as usize } else { 0 },
        start as *const () as usize,
        end as *const () as usize,
        may_in_place as *const () as usize,
        release_in_place as *const () as usize,
        0,
        0,
    ];
    // No function is there.
    table[fields(version)..].fill(8);
    table
}

struct Row {
    name: &'static CStr,
    version: u32,
    inputs: Params,
    outputs: Params,
    create: Create,
    compute: Compute,
    infer: Infer,
}

const ONE: Params = &[(FLOAT, Kind::Required)];

/// All operators but the overloads.
const ROWS: &[Row] = &[
    Row { name: c"Scale1", version: 1, create: with_factor, compute: scale, ..ROW },
    Row { name: c"Scale16", version: 16, create: with_factor, compute: scale, ..ROW },
    Row { name: c"ScaleNew", version: 31, create: with_factor, compute: scale, ..ROW },
    Row {
        name: c"Optional10",
        version: 10,
        inputs: &[(FLOAT, Kind::Required), (FLOAT, Kind::Optional)],
        outputs: &[(FLOAT, Kind::Required), (FLOAT, Kind::Optional)],
        compute: optional,
        ..ROW
    },
    Row {
        name: c"Variadic14",
        version: 14,
        inputs: &[(FLOAT, Kind::Variadic)],
        outputs: &[(FLOAT, Kind::Variadic)],
        compute: variadic,
        ..ROW
    },
    Row { name: c"Attributes16", version: 16, create: all_attributes, compute: failing, ..ROW },
    Row {
        name: c"Repeat17",
        version: 117,
        create: with_times,
        compute: repeated,
        infer: infer_repeated,
        ..ROW
    },
    Row { name: c"Increment18", version: 118, compute: increment, infer: infer_same, ..ROW },
    Row {
        name: c"Any",
        version: 16,
        inputs: &[(ANY, Kind::Required)],
        outputs: &[(ANY, Kind::Required)],
        compute: any_type,
        ..ROW
    },
    Row {
        name: c"Shout",
        version: 16,
        inputs: &[(STRING, Kind::Required)],
        outputs: &[(STRING, Kind::Required)],
        compute: shout,
        ..ROW
    },
    Row { name: c"Parallel", version: 17, create: with_factor, compute: parallel, ..ROW },
    Row { name: c"Double", version: 16, create: with_add, compute: doubled, ..ROW },
    Row {
        name: c"Largest",
        version: 16,
        inputs: &[(FLOAT, Kind::Required), (INT64, Kind::Required)],
        outputs: &[(FLOAT, Kind::Required), (INT64, Kind::Required)],
        create: with_top_k,
        compute: largest,
        ..ROW
    },
    // Overloads of one name.
    Row { name: c"Over", version: 16, compute: any_type, ..ROW },
    Row {
        name: c"Over",
        version: 16,
        inputs: &[(INT64, Kind::Required)],
        outputs: &[(INT64, Kind::Required)],
        compute: any_type,
        ..ROW
    },
];

const ROW: Row = Row {
    name: c"",
    version: 16,
    inputs: ONE,
    outputs: ONE,
    create: plain,
    compute: scale,
    infer: no_inference,
};

fn new_operator(row: &Row) -> Operator {
    Operator {
        table: table(row.version),
        name: row.name,
        inputs: row.inputs,
        outputs: row.outputs,
        create: row.create,
        compute: row.compute,
        infer: row.infer,
        versions: [1, c_int::MAX],
    }
}

fn register(options: *mut OrtSessionOptions) -> Done {
    static OPERATORS: OnceLock<Vec<Operator>> = OnceLock::new();
    let domain = get!(CreateCustomOpDomain(c"test.custom".as_ptr()));
    for operator in OPERATORS.get_or_init(|| ROWS.iter().map(new_operator).collect()) {
        // SAFETY: the table is static, and begins with the fields of its version.
        checked(unsafe { (api().CustomOpDomain_Add)(domain, (&raw const *operator).cast()) })?;
    }
    // The domain stays: sessions may be made until the library is unloaded.
    // SAFETY: both are valid.
    checked(unsafe { (api().AddCustomOpDomain)(options, domain) })
}

/// Adds the operators to session options.
// SAFETY: this library has one function of this name.
#[unsafe(no_mangle)]
pub extern "system" fn RegisterCustomOps(
    options: *mut OrtSessionOptions,
    base: *const OrtApiBase,
) -> OrtStatusPtr {
    // SAFETY: the runtime passes its own functions.
    let table = unsafe { ((*base).GetApi)(17).as_ref() };
    match table {
        Some(table) => {
            API.get_or_init(|| table);
            returned(register(options))
        }
        None => OrtStatusPtr::default(),
    }
}

/// Takes the list of calls since the last time: as many bytes as fit, a line for each.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "system" fn custom_ops_trace(buffer: *mut u8, len: usize) -> usize {
    let lines = std::mem::take(&mut *TRACE.lock().unwrap_or_else(PoisonError::into_inner)).join("\n");
    let count = lines.len().min(len);
    // SAFETY: the caller gives a buffer of this length.
    unsafe { buffer.copy_from_nonoverlapping(lines.as_ptr(), count) };
    count
}
