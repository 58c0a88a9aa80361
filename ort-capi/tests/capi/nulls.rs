//! Null pointers, wrong handles and functions that are not there: a status each, and no crash.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

use ort_sys::{OrtApi, OrtStatusPtr};

use crate::library::{api, make, raw, refusal};

/// A function of any slot. In the calling conventions of the systems that we test on, arguments
/// that a function does not have are ignored.
type Any = extern "system" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
) -> OrtStatusPtr;

/// The slots of functions that return no status, by their index in the header.
const NO_STATUS: [usize; 66] = [
    1, 2, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 108, 109, 118, 122, 132, 135, 141, 142, 157, 167, 174,
    208, 212, 215, 218, 219, 224, 225, 243, 254, 258, 282, 285, 286, 287, 288, 291, 294, 295, 296, 297, 298,
    299, 300, 307, 308, 309, 310, 311, 312, 313, 314, 315, 316, 317, 321, 322, 369, 370, 371, 372, 373, 374,
    384,
];
const MORE_WITHOUT_STATUS: [usize; 7] = [385, 390, 395, 403, 413, 422, 427];

/// Functions that take null: releasing no list of providers.
const TAKES_NULL: [usize; 1] = [126];

/// Functions whose first argument is no handle of the library.
const FIRST_IS_NO_HANDLE: [usize; 21] =
    [0, 3, 4, 10, 39, 48, 57, 68, 69, 75, 76, 77, 78, 82, 119, 121, 125, 151, 156, 164, 166];

fn function(index: usize) -> Any {
    let table = (api() as *const OrtApi).cast::<Any>();
    // SAFETY: the table has 428 function pointers, and each function ignores what it does not take.
    unsafe { *table.add(index) }
}

fn has_status(index: usize) -> bool {
    !NO_STATUS.contains(&index) && !MORE_WITHOUT_STATUS.contains(&index)
}

#[test]
fn null_is_refused_with_a_status() {
    for index in 0..428 {
        let status = function(index)(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        if has_status(index) && !TAKES_NULL.contains(&index) {
            let (code, text) = refusal(status).unwrap_or_else(|| panic!("function {index} takes null"));
            assert!(code > 0 || index == 0, "function {index}: {code} {text}");
        }
    }
}

#[test]
fn wrong_handles_are_refused_with_a_status() {
    let memory = [0u64; 64];
    let wrong = memory.as_ptr() as usize;
    // An object of another type, and an address that no object has.
    let other = raw_info() as usize;
    for index in (0..428).filter(|index| has_status(*index)) {
        if FIRST_IS_NO_HANDLE.contains(&index) || index > 166 && is_value_first(index) {
            continue;
        }
        for first in [wrong, wrong + 1, other] {
            let status = function(index)(first, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            assert!(
                refusal(status).is_some() || TAKES_NULL.contains(&index),
                "function {index} takes {first:#x}"
            );
        }
    }
}

/// Later functions whose first argument is a text, a number or a place for a result.
fn is_value_first(index: usize) -> bool {
    const FIRST: [usize; 21] = [
        171, 179, 183, 195, 205, 211, 223, 242, 255, 280, 281, 292, 318, 319, 320, 386, 388, 389, 404, 405,
        406,
    ];
    FIRST.contains(&index) && index != 318
}

/// A handle of a type that few functions take first.
fn raw_info() -> *mut c_void {
    let pairs: *mut ort_sys::OrtKeyValuePairs = {
        let mut pairs = null_mut();
        raw!(CreateKeyValuePairs(&raw mut pairs));
        pairs
    };
    pairs.cast()
}

#[test]
fn what_is_not_there_says_its_name() {
    let table: *const Any = raw!(GetEpApi()).cast();
    // SAFETY: the table has functions, and each ignores its arguments.
    let function = unsafe { *table };
    let (code, text) = refusal(function(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)).unwrap();
    assert_eq!(code, 9);
    assert!(text.contains("plug-in providers"), "{text}");
    assert!(raw!(GetTrainingApi(31)).is_null());
    assert!(raw!(GetExperimentalFunction(c"OrtApi_Anything".as_ptr())).is_null());
}

#[test]
fn an_object_that_was_released_is_refused() {
    let options: *mut ort_sys::OrtRunOptions = make!(CreateRunOptions());
    let tag: *const c_char = make!(RunOptionsGetRunTag(options));
    assert!(!tag.is_null());
    raw!(ReleaseRunOptions(options));
    raw!(ReleaseRunOptions(null_mut()));
}
