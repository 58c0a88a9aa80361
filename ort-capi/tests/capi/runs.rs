//! Runs: all element types, borrowed and made values, given outputs, bindings.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use ort_sys::{OrtIoBinding, OrtRunOptions, OrtTypeInfo, OrtValue};

use crate::library::{
    bytes_of, call, json, make, memory_info, raw, refusal, run, run_one, session, string, tensor,
};

/// Bytes that are elements of any type: booleans are 0 or 1.
fn elements(number: i32, bytes: usize) -> Vec<u8> {
    let byte = |place: usize| match number {
        9 => (place % 2) as u8,
        _ => (place * 37 + 11) as u8,
    };
    (0..bytes).map(byte).collect()
}

/// The bits of each numeric element type, by its number.
const BITS: [(i32, usize); 22] = [
    (1, 32),
    (2, 8),
    (3, 8),
    (4, 16),
    (5, 16),
    (6, 32),
    (7, 64),
    (9, 8),
    (10, 16),
    (11, 64),
    (12, 32),
    (13, 64),
    (14, 64),
    (15, 128),
    (16, 16),
    (17, 8),
    (18, 8),
    (19, 8),
    (20, 8),
    (21, 4),
    (22, 4),
    (23, 4),
];

#[test]
fn all_element_types_run_into_made_and_given_outputs() {
    for (number, bits) in BITS {
        let session = session(&format!("identity_{number}"));
        let mut input = elements(number, (6 * bits).div_ceil(8));
        let expected = input.clone();
        let x = tensor(&mut input, &[2, 3], number);
        let made = run_one(session, &[("x", x)], "y");
        assert_eq!(bytes_of(made), expected, "type {number}");
        let mut output = vec![0u8; expected.len()];
        let mut given = [tensor(&mut output, &[2, 3], number)];
        let before = given[0];
        assert_eq!(run(session, &[("x", x)], &["y"], &mut given), None, "type {number}");
        assert_eq!(given[0], before, "the caller's value stays");
        assert_eq!(output, expected, "type {number}");
        [x, made, before].into_iter().for_each(|value| raw!(ReleaseValue(value)));
        raw!(ReleaseSession(session));
    }
}

#[test]
fn a_result_has_memory_of_its_own() {
    let session = session("identity_1");
    let mut input = elements(1, 24);
    let x = tensor(&mut input, &[2, 3], 1);
    let y = run_one(session, &[("x", x)], "y");
    let data: *mut c_void = make!(GetTensorMutableData(y));
    assert_ne!(data.cast::<u8>(), input.as_mut_ptr());
    input.fill(0);
    assert_eq!(bytes_of(y), elements(1, 24));
}

#[test]
fn inputs_are_read_where_they_lie_at_each_run() {
    let session = session("add");
    let mut input = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(f32::to_ne_bytes).concat();
    let x = tensor(&mut input, &[2, 3], 1);
    assert_eq!(bytes_of(run_one(session, &[("x", x)], "y"))[..4], 2f32.to_ne_bytes());
    // SAFETY: the vector has the bytes, and nothing runs.
    unsafe { std::slice::from_raw_parts_mut(input.as_mut_ptr(), 4) }.copy_from_slice(&9f32.to_ne_bytes());
    assert_eq!(bytes_of(run_one(session, &[("x", x)], "y"))[..4], 18f32.to_ne_bytes());
}

#[test]
fn memory_that_is_input_and_output_or_not_aligned_is_right_too() {
    let session = session("add");
    let mut memory = elements(1, 25 + 24);
    let numbers = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(f32::to_ne_bytes).concat();
    let doubled = [2f32, 4.0, 6.0, 8.0, 10.0, 12.0].map(f32::to_ne_bytes).concat();
    for start in [0, 1] {
        memory[start..start + 24].copy_from_slice(&numbers);
        let value = tensor(&mut memory[start..start + 24], &[2, 3], 1);
        assert_eq!(run(session, &[("x", value)], &["y"], &mut [value]), None);
        assert_eq!(memory[start..start + 24], doubled, "at {start}");
        raw!(ReleaseValue(value));
    }
}

/// A session remembers the memory of runs with given outputs, by its address and shape.
#[test]
fn given_memory_is_read_and_written_again() {
    let session = session("identity_1");
    let (mut input, mut outputs) = (elements(1, 48), [vec![0u8; 48], vec![0u8; 48]]);
    for rows in [4, 2, 4, 2] {
        let len = rows * 12;
        for output in &mut outputs {
            input.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
            output.fill(0);
            let dims = [rows as i64, 3];
            let (x, y) = (tensor(&mut input[..len], &dims, 1), tensor(&mut output[..len], &dims, 1));
            assert_eq!(run(session, &[("x", x)], &["y"], &mut [y]), None);
            assert_eq!(output[..len], input[..len]);
            assert!(output[len..].iter().all(|byte| *byte == 0));
            [x, y].into_iter().for_each(|value| raw!(ReleaseValue(value)));
        }
    }
}

fn unhex(text: &serde_json::Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// The model has two outputs and an input with a default.
#[test]
fn outputs_are_those_of_onnx_runtime_in_any_order() {
    let session = session("two");
    let results = json("results.json");
    for name in ["two", "two_scaled"] {
        let recorded = &results[name];
        let mut x = unhex(&recorded["inputs"]["x"]);
        let mut scale = recorded["inputs"].get("scale").map(unhex).unwrap_or_default();
        let mut inputs = vec![("x", tensor(&mut x, &[2, 2, 2], 1).cast_const())];
        if !scale.is_empty() {
            inputs.insert(0, ("scale", tensor(&mut scale, &[2], 1)));
        }
        let expected = [unhex(&recorded["outputs"][0]), unhex(&recorded["outputs"][1])];
        let orders: [&[&str]; 4] =
            [&["scaled", "sum"], &["sum", "scaled"], &["sum"], &["scaled", "scaled", "sum"]];
        for order in orders {
            let mut outputs = vec![null_mut::<OrtValue>(); order.len()];
            assert_eq!(run(session, &inputs, order, &mut outputs), None);
            for (output, value) in order.iter().zip(outputs) {
                assert_close(&bytes_of(value), &expected[usize::from(*output == "sum")]);
                raw!(ReleaseValue(value));
            }
        }
    }
    let count: usize = make!(SessionGetInputCount(session));
    let defaults: usize = make!(SessionGetOverridableInitializerCount(session));
    assert_eq!((count, defaults), (1, 1));
}

/// sherpa-onnx gives a scalar as a tensor of one element.
#[test]
fn a_scalar_input_takes_one_element_of_any_rank() {
    let recorded = &json("results.json")["scalar"];
    let [mut x, mut s] = ["x", "s"].map(|name| unhex(&recorded["inputs"][name]));
    let x = tensor(&mut x, &[3], 1).cast_const();
    for dims in [&[][..], &[1], &[1, 1]] {
        let inputs = [("x", x), ("s", tensor(&mut s, dims, 1).cast_const())];
        let y = run_one(session("scalar"), &inputs, "y");
        assert_eq!(bytes_of(y), unhex(&recorded["outputs"][0]), "{dims:?}");
    }
    let mut several = elements(1, 12);
    let inputs = [("x", x), ("s", tensor(&mut several, &[3], 1).cast_const())];
    let refused = run(session("scalar"), &inputs, &["y"], &mut [null_mut()]);
    assert!(
        refused.is_some_and(|(code, text)| code == 2 && text.starts_with("Invalid rank for input: s Got: 1"))
    );
}

/// Compares floats: sums may be in another order.
fn assert_close(actual: &[u8], expected: &[u8]) {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks(4).map(|four| f32::from_ne_bytes(four.try_into().unwrap())).collect()
    };
    let (actual, expected) = (floats(actual), floats(expected));
    assert_eq!(actual.len(), expected.len());
    for (one, other) in actual.iter().zip(&expected) {
        assert!((one - other).abs() <= 1e-5 * other.abs().max(1.0), "{actual:?} {expected:?}");
    }
}

#[test]
fn types_of_ports_have_names_and_sizes() {
    let session = session("two");
    let info: *mut OrtTypeInfo = make!(SessionGetInputTypeInfo(session, 0));
    let tensor = make!(CastTypeInfoToTensorInfo(info));
    let rank: usize = make!(GetDimensionsCount(tensor));
    assert_eq!(rank, 3);
    let mut dims = [0i64; 3];
    call!(GetDimensions(tensor, dims.as_mut_ptr(), 3));
    assert_eq!(dims, [-1, -1, 2]);
    let mut names = [null::<c_char>(); 3];
    call!(GetSymbolicDimensions(tensor, names.as_mut_ptr(), 3));
    assert_eq!(names.map(string), ["batch", "", ""]);
    let sequence = make!(CastTypeInfoToSequenceTypeInfo(info));
    assert!(sequence.is_null());
    assert!(raw!(TensorTypeAndShape_HasShape(tensor)));
    raw!(ReleaseTypeInfo(info));
}

#[test]
fn a_binding_reads_and_writes_the_memory_that_is_bound() {
    let session = session("add");
    let binding: *mut OrtIoBinding = make!(CreateIoBinding(session));
    let (mut input, mut output) = ([1f32; 6].map(f32::to_ne_bytes).concat(), vec![0u8; 24]);
    let (x, y) = (tensor(&mut input, &[2, 3], 1), tensor(&mut output, &[2, 3], 1));
    call!(BindInput(binding, c"x".as_ptr(), x));
    call!(BindOutput(binding, c"y".as_ptr(), y));
    for factor in [1f32, 5.0] {
        // SAFETY: the vector has the bytes, and nothing runs.
        let bytes = unsafe { std::slice::from_raw_parts_mut(input.as_mut_ptr(), 24) };
        bytes.copy_from_slice(&[factor; 6].map(f32::to_ne_bytes).concat());
        call!(RunWithBinding(session, null(), binding));
        assert_eq!(bytes_of(y), [2.0 * factor; 6].map(f32::to_ne_bytes).concat());
    }
    let info = memory_info();
    call!(BindOutputToDevice(binding, c"y".as_ptr(), info));
    call!(RunWithBinding(session, null(), binding));
    call!(RunWithBinding(session, null(), binding));
    let allocator = make!(GetAllocatorWithDefaultOptions());
    let (mut values, mut count) = (null_mut::<*mut OrtValue>(), 0usize);
    call!(GetBoundOutputValues(binding, allocator, &mut values, &mut count));
    assert_eq!(count, 1);
    // SAFETY: the array has one value.
    let value = unsafe { *values };
    assert_eq!(bytes_of(value), [10f32; 6].map(f32::to_ne_bytes).concat());
    raw!(ReleaseValue(value));
    call!(AllocatorFree(allocator, values.cast()));
    let (mut names, mut lengths) = (null_mut::<c_char>(), null_mut::<usize>());
    call!(GetBoundOutputNames(binding, allocator, &mut names, &mut lengths, &mut count));
    // SAFETY: there is one name of one letter, without a zero.
    assert_eq!(unsafe { (count, *lengths, *names as u8) }, (1, 1, b'y'));
    call!(AllocatorFree(allocator, names.cast()));
    call!(AllocatorFree(allocator, lengths.cast()));
    raw!(ClearBoundOutputs(binding));
    raw!(ClearBoundInputs(binding));
    call!(GetBoundOutputNames(binding, allocator, &mut names, &mut lengths, &mut count));
    assert!(count == 0 && names.is_null() && lengths.is_null());
    raw!(ReleaseIoBinding(binding));
}

#[test]
fn a_run_ends_by_its_options_until_they_are_unset() {
    let session = session("add");
    let options: *mut OrtRunOptions = make!(CreateRunOptions());
    let mut input = vec![0u8; 24];
    let x = tensor(&mut input, &[2, 3], 1).cast_const();
    let with_options = || {
        let mut output = null_mut();
        let (input_name, output_name) = (c"x".as_ptr(), c"y".as_ptr());
        refusal(raw!(Run(session, options, &input_name, &x, 1, &output_name, 1, &mut output)))
    };
    assert_eq!(with_options(), None);
    call!(RunOptionsSetTerminate(options));
    assert_eq!(with_options(), Some((1, "Exiting due to terminate flag being set to true.".to_owned())));
    call!(RunOptionsUnsetTerminate(options));
    assert_eq!(with_options(), None);
}

#[test]
fn many_threads_run_one_session() {
    let session = session("add") as usize;
    let runs = move || {
        for round in 0..100u16 {
            let mut input = [f32::from(round); 6].map(f32::to_ne_bytes).concat();
            let mut output = vec![0u8; 24];
            let (x, y) = (tensor(&mut input, &[2, 3], 1), tensor(&mut output, &[2, 3], 1));
            assert_eq!(run(session as *mut _, &[("x", x)], &["y"], &mut [y]), None);
            assert_eq!(output, [2.0 * f32::from(round); 6].map(f32::to_ne_bytes).concat());
            [x, y].into_iter().for_each(|value| raw!(ReleaseValue(value)));
        }
    };
    let threads: Vec<_> = (0..8).map(|_| std::thread::spawn(runs)).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
