//! `OrtCustomOp`: operators of a client, as the engine sees them.
//!
//! A client's table has the fields up to its own `version`. Those beyond it may lie outside of its
//! memory, so that each field is read on its own, after a check of the version.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use ort_runtime::dtype::TypeSet;
use ort_runtime::ep::{Executable, NodeView, RunCx};
use ort_runtime::spec::{Arity, InferCx};
use ort_runtime::{CustomOperator, CustomParam, CustomSchema, DType, Error, ErrorKind};
use ort_sys::{ORT_API_VERSION, OrtCustomOp, OrtKernelContext, OrtKernelInfo};

use crate::custom_library::Library;
use crate::element_type::of_number;
use crate::entry::Object;
use crate::kernel_context::KernelContext;
use crate::kernel_info::KernelInfo;
use crate::shape_context::infer;
use crate::status::{Failure, Outcome, code, invalid, of_client};
use crate::table::API;

/// The versions from which on a group of fields exists.
mod since {
    pub(super) const CHARACTERISTICS: u32 = 8;
    pub(super) const VARIADIC: u32 = 14;
    pub(super) const STATUS: u32 = 16;
    pub(super) const INFERENCE: u32 = 17;
    pub(super) const IN_PLACE: u32 = 18;
}

/// The numbers of `OrtCustomOpInputOutputCharacteristic`.
const OPTIONAL: i32 = 1;
const VARIADIC: i32 = 2;

/// The versions of a domain that an operator without versions of its own is in, as in ONNX Runtime.
const LAST_VERSION: c_int = c_int::MAX;

/// A client's table.
#[derive(Clone, Copy)]
pub(crate) struct Table(*const OrtCustomOp);

// SAFETY: the header demands that the table stays valid and unchanged while sessions use it.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// Reads a function of a client's table; `None` if it is null.
macro_rules! field {
    ($table:expr, $name:ident) => {
        // SAFETY: the caller of the macro checked the version, so that the field exists.
        unsafe { (&raw const (*$table.0).$name).read() }
    };
    // As a function of another type with the same representation.
    ($table:expr, $name:ident as $ty:ty) => {
        // SAFETY: as above; C numbers may be none of an enumeration, so they are read as numbers.
        unsafe { (&raw const (*$table.0).$name).cast::<Option<$ty>>().read() }
    };
}

type OfIndex = unsafe extern "system" fn(*const OrtCustomOp, usize) -> i32;
type OfAll = unsafe extern "system" fn(*const OrtCustomOp) -> c_int;
type Pairs = unsafe extern "system" fn(*mut *mut c_int, *mut *mut c_int) -> usize;

/// Whether a table is asked about its inputs or its outputs.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Input,
    Output,
}

impl Table {
    pub(crate) fn new(table: *const OrtCustomOp) -> Outcome<Table> {
        if table.is_null() || !table.is_aligned() {
            return invalid("the custom operator is null");
        }
        Ok(Table(table))
    }

    fn version(self) -> u32 {
        // SAFETY: every table begins with its version.
        unsafe { (&raw const (*self.0).version).read() }.min(ORT_API_VERSION)
    }

    fn has(self, version: u32) -> bool {
        self.version() >= version
    }

    fn text(self, text: *const c_char) -> Option<String> {
        // SAFETY: the client returns null, or a text that ends with a zero.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    fn name(self) -> Outcome<String> {
        let get = field!(self, GetName).ok_or_else(|| missing("GetName"))?;
        // SAFETY: the client's function gets the client's table.
        let name = self.text(unsafe { get(self.0) });
        name.ok_or_else(|| Failure::invalid("the name of a custom operator is null"))
    }

    /// The provider that runs it; the CPU if it has none.
    fn provider(self) -> Option<String> {
        let get = field!(self, GetExecutionProviderType)?;
        // SAFETY: as in `name`.
        self.text(unsafe { get(self.0) })
    }

    fn count(self, side: Side) -> Outcome<usize> {
        let (get, what) = match side {
            Side::Input => (field!(self, GetInputTypeCount), "GetInputTypeCount"),
            Side::Output => (field!(self, GetOutputTypeCount), "GetOutputTypeCount"),
        };
        // SAFETY: as in `name`.
        Ok(unsafe { get.ok_or_else(|| missing(what))?(self.0) })
    }

    /// The element type; `None` for any.
    fn dtype(self, side: Side, index: usize) -> Outcome<Option<DType>> {
        let (get, what) = match side {
            Side::Input => (field!(self, GetInputType as OfIndex), "GetInputType"),
            Side::Output => (field!(self, GetOutputType as OfIndex), "GetOutputType"),
        };
        // SAFETY: as in `name`.
        match unsafe { get.ok_or_else(|| missing(what))?(self.0, index) } {
            0 => Ok(None),
            number => of_number(number).map(Some),
        }
    }

    fn arity(self, side: Side, index: usize) -> Arity {
        if !self.has(since::CHARACTERISTICS) {
            return Arity::Single;
        }
        let get = match side {
            Side::Input => field!(self, GetInputCharacteristic as OfIndex),
            Side::Output => field!(self, GetOutputCharacteristic as OfIndex),
        };
        // SAFETY: as in `name`.
        match get.map_or(0, |get| unsafe { get(self.0, index) }) {
            OPTIONAL => Arity::Optional,
            VARIADIC if self.has(since::VARIADIC) => self.variadic(side),
            _ => Arity::Single,
        }
    }

    fn variadic(self, side: Side) -> Arity {
        let (min, homogeneous) = match side {
            Side::Input => (
                field!(self, GetVariadicInputMinArity as OfAll),
                field!(self, GetVariadicInputHomogeneity as OfAll),
            ),
            Side::Output => (
                field!(self, GetVariadicOutputMinArity as OfAll),
                field!(self, GetVariadicOutputHomogeneity as OfAll),
            ),
        };
        // SAFETY: as in `name`.
        let [min, homogeneous] = [min, homogeneous].map(|get| get.map_or(1, |get| unsafe { get(self.0) }));
        Arity::Variadic { min: usize::try_from(min).unwrap_or(0), homogeneous: homogeneous != 0 }
    }

    fn has_inference(self) -> bool {
        self.has(since::INFERENCE) && field!(self, InferOutputShapeFn).is_some()
    }

    fn first_and_last(self) -> [c_int; 2] {
        if !self.has(since::INFERENCE) {
            return [1, LAST_VERSION];
        }
        let (first, last) = (field!(self, GetStartVersion), field!(self, GetEndVersion));
        // SAFETY: as in `name`.
        let ask = |get: Option<OfAll>, other| get.map_or(other, |get| unsafe { get(self.0) });
        [ask(first, 1).max(1), ask(last, LAST_VERSION)]
    }

    /// The pairs of inputs and outputs that may share memory.
    fn in_place(self) -> Vec<(usize, usize)> {
        if !self.has(since::IN_PLACE) {
            return Vec::new();
        }
        let mut pairs = Vec::new();
        let may = (field!(self, GetMayInplace), field!(self, ReleaseMayInplace));
        let alias = (field!(self, GetAliasMap), field!(self, ReleaseAliasMap));
        for (get, release) in [may, alias] {
            let Some(get) = get else { continue };
            pairs.extend(read_pairs(get, release));
        }
        pairs.dedup();
        pairs
    }
}

/// Reads two lists of numbers that the client allocates, and gives them back.
fn read_pairs(
    get: Pairs,
    release: Option<unsafe extern "system" fn(*mut c_int, *mut c_int)>,
) -> Vec<(usize, usize)> {
    let (mut inputs, mut outputs) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the client writes a list of as many numbers as it returns to each place.
    let count = unsafe { get(&raw mut inputs, &raw mut outputs) };
    if count == 0 || inputs.is_null() || outputs.is_null() {
        return Vec::new();
    }
    let pair = |index: usize| {
        // SAFETY: as above.
        let (input, output) = unsafe { (*inputs.add(index), *outputs.add(index)) };
        Some((usize::try_from(input).ok()?, usize::try_from(output).ok()?))
    };
    let pairs = (0..count).filter_map(pair).collect();
    if let Some(release) = release {
        // SAFETY: the client gets the lists back, once.
        unsafe { release(inputs, outputs) };
    }
    pairs
}

fn missing(function: &str) -> Failure {
    Failure::invalid(format!("a custom operator has no function {function}"))
}

/// An operator of a client, in a domain.
pub(crate) struct Operator {
    table: Table,
    schema: CustomSchema,
    entries: Arc<BTreeMap<String, String>>,
    /// Dropped last: the table may lie in one of them.
    _libraries: Vec<Arc<Library>>,
}

/// What all operators of a session share.
pub(crate) struct Shared<'a> {
    pub(crate) entries: &'a Arc<BTreeMap<String, String>>,
    pub(crate) libraries: &'a [Arc<Library>],
}

impl Operator {
    pub(crate) fn new(domain: &str, table: Table, shared: &Shared<'_>) -> Outcome<Operator> {
        let name = table.name()?;
        let [first, last] = table.first_and_last();
        let mut schema = CustomSchema::new(domain, &*name);
        schema.versions = i64::from(first)..=i64::from(last);
        let count = table.count(Side::Input)?;
        let mut dynamic = 0;
        for index in 0..count {
            let dtype = table.dtype(Side::Input, index)?;
            dynamic += usize::from(dtype.is_none());
            schema.inputs.push(param(table, Side::Input, index, dtype));
        }
        for index in 0..table.count(Side::Output)? {
            let dtype = table.dtype(Side::Output, index)?;
            let mut output = param(table, Side::Output, index, dtype);
            if dtype.is_none() {
                // The one input of any type decides it, or inference does.
                let decides = schema.inputs.iter().find(|input| input.types == TypeSet::ALL);
                match decides.filter(|_| dynamic == 1) {
                    Some(input) => output.variable.clone_from(&input.variable),
                    None if table.has_inference() => {}
                    None => return Err(undecided(&name, dynamic)),
                }
            }
            schema.outputs.push(output);
        }
        if let Some(provider) = table.provider() {
            let ours = ort_runtime::onnxruntime::OURS.iter().find(|known| known.0 == provider);
            schema.provider = ours.map_or(provider, |known| known.1.to_owned());
        }
        schema.in_place = table.in_place();
        schema.has_exact_shapes = table.has_inference();
        let Shared { entries, libraries } = shared;
        Ok(Operator { table, schema, entries: Arc::clone(entries), _libraries: libraries.to_vec() })
    }
}

fn param(table: Table, side: Side, index: usize, dtype: Option<DType>) -> CustomParam {
    let (kind, letter) = match side {
        Side::Input => ("Input", "T"),
        Side::Output => ("Output", "U"),
    };
    let types = dtype.map_or(TypeSet::ALL, |dtype| TypeSet::of(&[dtype]));
    CustomParam::one(format!("{kind}{index}"), format!("{letter}{index}"), types)
        .taking(table.arity(side, index))
}

fn undecided(name: &str, dynamic: usize) -> Failure {
    Failure::invalid(format!(
        "The type of a dynamically typed output can be inferred from a single dynamically typed input, or by a user \
         provided OrtCustomOp->InferOutputShapeFn that sets the output type. Custom operator {name} has {dynamic} \
         dynamically typed inputs and no such function"
    ))
}

/// An error of the engine with a client's code and words.
pub(crate) fn error_of(failure: Failure) -> Error {
    let kind = match failure.code {
        2 => ErrorKind::InvalidArgument,
        3 => ErrorKind::NoSuchFile,
        4 => ErrorKind::NoModel,
        6 => ErrorKind::RuntimeException,
        7 => ErrorKind::InvalidProtobuf,
        9 => ErrorKind::NotImplemented,
        10 => ErrorKind::InvalidGraph,
        11 => ErrorKind::EpFail,
        _ => ErrorKind::Fail,
    };
    Error::new(kind, failure.message)
}

/// The error of a kernel that cannot be made. ONNX Runtime has one code for all of them.
fn not_created(failure: Failure) -> Error {
    let message = format!("Exception during initialization: {}", failure.message);
    error_of(Failure::new(code::RUNTIME_EXCEPTION, message))
}

impl CustomOperator for Operator {
    fn schema(&self) -> &CustomSchema {
        &self.schema
    }

    fn infer(&self, cx: &mut InferCx<'_>) -> ort_runtime::Result<()> {
        if !self.table.has_inference() {
            return Ok(());
        }
        let Some(function) = field!(self.table, InferOutputShapeFn) else { return Ok(()) };
        infer(cx, |context| {
            // SAFETY: the context is valid for the call.
            of_client(unsafe { function(self.table.0, context) })
        })
        .map_err(error_of)
    }

    fn kernel(&self, node: &NodeView<'_>) -> ort_runtime::Result<Box<dyn Executable>> {
        let info = KernelInfo::of_node(node, &self.entries).map_err(error_of)?;
        let kernel = Kernel::create(self.table, info).map_err(not_created)?;
        // The kernel lies in the library, which it must not outlive.
        let kernel = Held { kernel, _libraries: self._libraries.clone() };
        Ok(Box::new(kernel))
    }
}

/// A kernel of a client.
struct Kernel {
    table: Table,
    kernel: *mut c_void,
    /// Kernels may keep the pointer that they were created with.
    info: Box<Object<KernelInfo>>,
}

// SAFETY: the header demands that kernels may be called from any thread, and from several at once.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    fn create(table: Table, info: KernelInfo) -> Outcome<Kernel> {
        let info = Box::new(Object::new(info));
        let pointer = (&raw const *info).cast::<OrtKernelInfo>();
        let with_status = if table.has(since::STATUS) { field!(table, CreateKernelV2) } else { None };
        let mut kernel = std::ptr::null_mut();
        match (with_status, field!(table, CreateKernel)) {
            // SAFETY: the client's function gets the client's table, our table, and an info that
            // outlives the kernel.
            (Some(create), _) => {
                // SAFETY: as below; the client writes the kernel to the place.
                of_client(unsafe { create(table.0, &raw const API, pointer, &raw mut kernel) })?
            }
            // SAFETY: as above.
            (None, Some(create)) => kernel = unsafe { create(table.0, &raw const API, pointer) },
            (None, None) => return Err(missing("CreateKernel")),
        }
        Ok(Kernel { table, kernel, info })
    }

    fn compute(&self, context: *mut OrtKernelContext) -> Outcome {
        let table = self.table;
        let with_status = if table.has(since::STATUS) { field!(table, KernelComputeV2) } else { None };
        match (with_status, field!(table, KernelCompute)) {
            // SAFETY: the client's function gets the client's kernel, and a context that is valid
            // for the call.
            (Some(compute), _) => of_client(unsafe { compute(self.kernel, context) }),
            (None, Some(compute)) => {
                // SAFETY: as above.
                unsafe { compute(self.kernel, context) };
                Ok(())
            }
            (None, None) => Err(missing("KernelCompute")),
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Some(destroy) = field!(self.table, KernelDestroy) {
            // SAFETY: the client made the kernel, and gets it back once.
            unsafe { destroy(self.kernel) };
        }
    }
}

/// A kernel, and what its code lies in. Fields are dropped in their order.
struct Held {
    kernel: Kernel,
    _libraries: Vec<Arc<Library>>,
}

impl Executable for Held {
    fn run(&self, cx: &mut RunCx<'_>) -> ort_runtime::Result<()> {
        let kernel = &self.kernel;
        let mut context = KernelContext::of_run(cx, &kernel.info.inner).map_err(error_of)?;
        let computed = kernel.compute(context.pointer());
        // A run that is over says so, whatever the kernel makes of it.
        cx.check()?;
        computed.and_then(|()| context.finish(cx)).map_err(error_of)
    }
}
