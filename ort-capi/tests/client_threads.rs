//! Threads that a client makes for a session or for the environment. The environment must be the
//! first one of its process.
//!
//! The numbers of threads are those of ONNX Runtime 1.31.1.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may panic")]
#![allow(dead_code, reason = "the calls that tests share are for other tests, too")]

#[path = "capi/library.rs"]
mod library;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use library::{call, data, make, raw, refusal};
use ort_sys::{
    ExecutionMode, OrtCustomThreadHandle, OrtEnv, OrtLoggingLevel, OrtSession, OrtSessionOptions,
    OrtThreadWorkerFn,
};

static JOINED: AtomicUsize = AtomicUsize::new(0);

/// Counts in the memory that the options give.
extern "C" fn create(
    made: *mut c_void,
    work: OrtThreadWorkerFn,
    parameter: *mut c_void,
) -> OrtCustomThreadHandle {
    // SAFETY: the options of the tests have a counter.
    unsafe { &*made.cast::<AtomicUsize>() }.fetch_add(1, Ordering::SeqCst);
    let parameter = parameter.expose_provenance();
    // SAFETY: the library gives the parameter of its own function.
    let thread =
        std::thread::spawn(move || unsafe { work(std::ptr::with_exposed_provenance_mut(parameter)) });
    Box::into_raw(Box::new(thread)).cast_const().cast()
}

extern "C" fn create_none(_: *mut c_void, _: OrtThreadWorkerFn, _: *mut c_void) -> OrtCustomThreadHandle {
    std::ptr::null()
}

extern "C" fn join(handle: OrtCustomThreadHandle) {
    // SAFETY: `create` made the handle, and the library gives it back once.
    let thread = unsafe { Box::from_raw(handle.cast_mut().cast::<JoinHandle<()>>()) };
    thread.join().unwrap();
    JOINED.fetch_add(1, Ordering::SeqCst);
}

/// The sizes of pools, 0 for the default, and the threads that are made.
struct Case {
    mode: ExecutionMode,
    intra: i32,
    inter: i32,
    made: usize,
}

fn session(options: *mut OrtSessionOptions, env: *mut OrtEnv) -> Result<*mut OrtSession, String> {
    let path = library::c(data("models/add_3.onnx").to_str().unwrap());
    let mut session = null_mut();
    match refusal(raw!(CreateSession(env, path.as_ptr(), options, &raw mut session))) {
        None => Ok(session),
        Some((_, text)) => Err(text),
    }
}

fn run(session: *mut OrtSession) {
    let mut x: Vec<u8> = [1f32, 2.0, 3.0].iter().flat_map(|x| x.to_ne_bytes()).collect();
    let x = library::tensor(&mut x, &[3], 1);
    let y = library::run_one(session, &[("x", x)], "y");
    let expected: Vec<u8> = [2f32, 4.0, 6.0].iter().flat_map(|x| x.to_ne_bytes()).collect();
    assert_eq!(library::bytes_of(y), expected);
}

fn options(case: &Case, made: &AtomicUsize) -> *mut OrtSessionOptions {
    let options: *mut OrtSessionOptions = make!(CreateSessionOptions());
    call!(SetSessionExecutionMode(options, case.mode));
    call!(SetIntraOpNumThreads(options, case.intra));
    call!(SetInterOpNumThreads(options, case.inter));
    call!(SessionOptionsSetCustomCreateThreadFn(options, Some(create)));
    call!(SessionOptionsSetCustomThreadCreationOptions(options, std::ptr::from_ref(made).cast_mut().cast()));
    call!(SessionOptionsSetCustomJoinThreadFn(options, Some(join)));
    options
}

fn sessions_have_threads_of_their_own(env: *mut OrtEnv) {
    use ExecutionMode::{ORT_PARALLEL as PARALLEL, ORT_SEQUENTIAL as SEQUENTIAL};
    let others = std::thread::available_parallelism().unwrap().get() - 1;
    let cases = [
        Case { mode: PARALLEL, intra: 3, inter: 3, made: 4 },
        Case { mode: SEQUENTIAL, intra: 3, inter: 3, made: 2 },
        Case { mode: SEQUENTIAL, intra: 1, inter: 1, made: 0 },
        Case { mode: SEQUENTIAL, intra: 0, inter: 0, made: others },
        Case { mode: PARALLEL, intra: 0, inter: 0, made: 2 * others },
    ];
    for case in &cases {
        let (made, before) = (AtomicUsize::new(0), JOINED.load(Ordering::SeqCst));
        let session = session(options(case, &made), env).unwrap();
        run(session);
        raw!(ReleaseSession(session));
        let joined = JOINED.load(Ordering::SeqCst) - before;
        let Case { intra, inter, .. } = case;
        assert_eq!((made.into_inner(), joined), (case.made, case.made), "{intra} and {inter} threads");
    }
    let none = AtomicUsize::new(0);
    let shared = options(&cases[0], &none);
    call!(DisablePerSessionThreads(shared));
    raw!(ReleaseSession(session(shared, env).unwrap()));
    assert_eq!(none.load(Ordering::SeqCst), 0);
    let without_join = options(&cases[2], &none);
    call!(SessionOptionsSetCustomJoinThreadFn(without_join, None));
    let refused = session(without_join, env).unwrap_err();
    assert!(refused.contains("custom join thread function not set"), "{refused}");
    let without_handles = options(&cases[0], &none);
    call!(SessionOptionsSetCustomCreateThreadFn(without_handles, Some(create_none)));
    let refused = session(without_handles, env).unwrap_err();
    assert!(refused.contains("custom_create_thread_fn returned invalid handle."), "{refused}");
}

/// The threads of an environment end with it.
fn the_environment_has_threads(intra: i32, inter: i32, expected: usize) {
    let (made, before) = (AtomicUsize::new(0), JOINED.load(Ordering::SeqCst));
    let options: *mut ort_sys::OrtThreadingOptions = make!(CreateThreadingOptions());
    call!(SetGlobalIntraOpNumThreads(options, intra));
    call!(SetGlobalInterOpNumThreads(options, inter));
    call!(SetGlobalCustomCreateThreadFn(options, Some(create)));
    call!(SetGlobalCustomThreadCreationOptions(options, std::ptr::from_ref(&made).cast_mut().cast()));
    call!(SetGlobalCustomJoinThreadFn(options, Some(join)));
    let level = OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR;
    let env: *mut OrtEnv = make!(CreateEnvWithGlobalThreadPools(level, c"test".as_ptr(), options));
    raw!(ReleaseThreadingOptions(options));
    let shared: *mut OrtSessionOptions = make!(CreateSessionOptions());
    call!(DisablePerSessionThreads(shared));
    let session = session(shared, env).unwrap();
    run(session);
    raw!(ReleaseSession(session));
    assert_eq!(JOINED.load(Ordering::SeqCst), before);
    raw!(ReleaseEnv(env));
    assert_eq!((made.into_inner(), JOINED.load(Ordering::SeqCst) - before), (expected, expected));
}

#[test]
fn threads_of_a_client_work_for_the_pool() {
    the_environment_has_threads(3, 3, 4);
    the_environment_has_threads(3, 1, 2);
    sessions_have_threads_of_their_own(library::env());
}
