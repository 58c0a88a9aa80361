//! Session options, configuration entries, metadata, providers, profiles.

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};

use ort_sys::{OrtEpDevice, OrtKeyValuePairs, OrtModelMetadata, OrtSessionOptions};

use crate::library::{c, call, env, make, raw, refusal, run_one, session, session_with, string, tensor};

fn options() -> *mut OrtSessionOptions {
    make!(CreateSessionOptions())
}

fn set(options: *mut OrtSessionOptions, key: &str, value: &str) -> Option<(i32, String)> {
    refusal(raw!(AddSessionConfigEntry(options, c(key).as_ptr(), c(value).as_ptr())))
}

#[test]
fn entries_are_kept_and_read_back() {
    let options = options();
    assert_eq!(set(options, "some.other.key", "a value"), None);
    let copy: *mut OrtSessionOptions = make!(CloneSessionOptions(options));
    raw!(ReleaseSessionOptions(options));
    let has: i32 = make!(HasSessionConfigEntry(copy, c"some.other.key".as_ptr()));
    assert_eq!(has, 1);
    let mut size = 0usize;
    call!(GetSessionConfigEntry(copy, c"some.other.key".as_ptr(), null_mut(), &mut size));
    assert_eq!(size, 8);
    let mut buffer = [1 as c_char; 8];
    call!(GetSessionConfigEntry(copy, c"some.other.key".as_ptr(), buffer.as_mut_ptr(), &mut size));
    assert_eq!(string(buffer.as_ptr()), "a value");
    size = 3;
    let refused = refusal(raw!(GetSessionConfigEntry(
        copy,
        c"some.other.key".as_ptr(),
        buffer.as_mut_ptr(),
        &mut size
    )));
    assert!(refused.is_some_and(|(code, _)| code == 2) && size == 8);
    let pairs: *mut OrtKeyValuePairs = make!(GetSessionOptionsConfigEntries(copy));
    assert_eq!(string(raw!(GetKeyValue(pairs, c"some.other.key".as_ptr()))), "a value");
    raw!(ReleaseKeyValuePairs(pairs));
}

#[test]
fn keys_of_our_own_limit_memory_and_write_plans() {
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json");
    let own = options();
    assert_eq!(set(own, "ort_runtime.memory_limit", "1GiB"), None);
    assert_eq!(set(own, "ort_runtime.budget", "of the test=2GiB"), None);
    assert_eq!(set(own, "ort_runtime.cache_dir", folder.path().join("cache").to_str().unwrap()), None);
    assert_eq!(set(own, "ort_runtime.batch_split", "false"), None);
    assert_eq!(set(own, "ort_runtime.plan", &format!("{};batch=8", plan.display())), None);
    let (code, text) = set(own, "ort_runtime.memory_limits", "1").unwrap();
    assert!(code == 2 && text.contains("did you mean 'ort_runtime.memory_limit'?"), "{text}");
    let (code, text) = set(own, "ort_runtime.memory_limit", "much").unwrap();
    assert!(code == 2 && text.contains("512MiB"), "{text}");
    raw!(ReleaseSession(session_with("two", own)));
    let plan: serde_json::Value = serde_json::from_slice(&std::fs::read(plan).unwrap()).unwrap();
    assert!(plan.as_object().is_some_and(|plan| !plan.is_empty()));
    let tight = options();
    assert_eq!(set(tight, "ort_runtime.memory_limit", "8"), None);
    let session = session_with("identity_1", tight);
    let mut input = vec![0u8; 1 << 20];
    let x = tensor(&mut input, &[(1 << 18) / 3, 3], 1);
    let refused = crate::library::run(session, &[("x", x)], &["y"], &mut [null_mut()]);
    assert!(
        refused.is_some_and(|(code, text)| code == 1 && text.contains("limit")),
        "8 bytes do not suffice"
    );
}

#[test]
fn sizes_of_dimensions_are_fixed_by_name() {
    let options = options();
    call!(AddFreeDimensionOverrideByName(options, c"batch".as_ptr(), 2));
    let session = session_with("two", options);
    let info = make!(SessionGetInputTypeInfo(session, 0));
    let tensor = make!(CastTypeInfoToTensorInfo(info));
    let mut dims = [0i64; 3];
    call!(GetDimensions(tensor, dims.as_mut_ptr(), 3));
    assert_eq!(dims, [2, -1, 2]);
}

#[test]
fn initializers_are_the_callers() {
    let options = options();
    let mut scale = [3f32, 4.0].map(f32::to_ne_bytes).concat();
    call!(AddInitializer(options, c"scale".as_ptr(), tensor(&mut scale, &[2], 1)));
    let session = session_with("two", options);
    let mut x = [1f32, 1.0].map(f32::to_ne_bytes).concat();
    let y = run_one(session, &[("x", tensor(&mut x, &[1, 1, 2], 1))], "scaled");
    assert_eq!(crate::library::bytes_of(y), scale);
}

#[test]
fn the_optimized_model_and_the_profile_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let (optimized, prefix) = (folder.path().join("optimized.onnx"), folder.path().join("profile"));
    let options = options();
    call!(SetOptimizedModelFilePath(options, c(optimized.to_str().unwrap()).as_ptr()));
    call!(EnableProfiling(options, c(prefix.to_str().unwrap()).as_ptr()));
    let session = session_with("add", options);
    let again = make!(CreateSession(env(), c(optimized.to_str().unwrap()).as_ptr(), null()));
    let mut x = vec![0u8; 24];
    let x = tensor(&mut x, &[2, 3], 1);
    run_one(again, &[("x", x)], "y");
    run_one(session, &[("x", x)], "y");
    let allocator = make!(GetAllocatorWithDefaultOptions());
    let path: *mut c_char = make!(SessionEndProfiling(session, allocator));
    let events: serde_json::Value = serde_json::from_slice(&std::fs::read(string(path)).unwrap()).unwrap();
    assert!(events[0]["args"]["op_name"].is_string(), "{events}");
    let path: *mut c_char = make!(SessionEndProfiling(again, allocator));
    assert_eq!(string(path), "", "it was off");
}

#[test]
fn metadata_is_that_of_the_model() {
    let metadata: *mut OrtModelMetadata = make!(SessionGetModelMetadata(session("two")));
    let allocator = make!(GetAllocatorWithDefaultOptions());
    let texts: [*mut c_char; 5] = [
        make!(ModelMetadataGetProducerName(metadata, allocator)),
        make!(ModelMetadataGetGraphName(metadata, allocator)),
        make!(ModelMetadataGetDomain(metadata, allocator)),
        make!(ModelMetadataGetDescription(metadata, allocator)),
        make!(ModelMetadataGetGraphDescription(metadata, allocator)),
    ];
    let expected = ["a producer", "graph", "a.domain", "a description", "of the graph"];
    assert_eq!(texts.map(|text| string(text)), expected);
    let version: i64 = make!(ModelMetadataGetVersion(metadata));
    assert_eq!(version, 42);
    let value: *mut c_char =
        make!(ModelMetadataLookupCustomMetadataMap(metadata, allocator, c"other".as_ptr()));
    assert_eq!(string(value), "ünï");
    let value: *mut c_char =
        make!(ModelMetadataLookupCustomMetadataMap(metadata, allocator, c"absent".as_ptr()));
    assert!(value.is_null());
    let (mut keys, mut count) = (null_mut::<*mut c_char>(), 0i64);
    call!(ModelMetadataGetCustomMetadataMapKeys(metadata, allocator, &mut keys, &mut count));
    assert_eq!(count, 2);
    // SAFETY: the array has two texts.
    assert_eq!(unsafe { [string(*keys), string(*keys.add(1))] }, ["key", "other"]);
}

#[test]
fn the_cpu_is_there() {
    let (mut names, mut count) = (null_mut::<*mut c_char>(), 0i32);
    call!(GetAvailableProviders(&mut names, &mut count));
    // SAFETY: the list has as many texts.
    let last = unsafe { *names.add(count as usize - 1) };
    assert_eq!(string(last), "CPUExecutionProvider");
    call!(ReleaseAvailableProviders(names, count));
    let options = options();
    for name in [c"CPU", c"CPUExecutionProvider"] {
        call!(SessionOptionsAppendExecutionProvider(options, name.as_ptr(), null(), null(), 0));
    }
    let (code, text) =
        refusal(raw!(SessionOptionsAppendExecutionProvider(options, c"Nope".as_ptr(), null(), null(), 0)))
            .unwrap();
    assert!(code == 2 && text.starts_with("Unknown provider name 'Nope'."), "{text}");
    let (mut devices, mut count) = (null::<*const OrtEpDevice>(), 0usize);
    call!(GetEpDevices(env(), &mut devices, &mut count));
    // SAFETY: there is one device.
    let device = unsafe { *devices };
    assert_eq!((count, string(raw!(EpDevice_EpName(device))).as_str()), (1, "CPUExecutionProvider"));
    // SAFETY: the library returns a text that ends with a zero.
    let info = unsafe { CStr::from_ptr(raw!(GetBuildInfoString())) };
    assert!(info.to_string_lossy().starts_with("ORT Build Info: ort-runtime "));
}
