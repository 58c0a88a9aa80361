//! Values that are no plain numbers: strings, sequences, maps; and the memory of values.

use std::ffi::{CString, c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_sys::{ONNXType, OrtAllocator, OrtMemoryInfo, OrtTypeInfo, OrtValue};

use crate::library::{
    bytes_of, call, element_type, make, memory_info, raw, refusal, run, run_one, session, tensor,
};

fn allocator() -> *mut OrtAllocator {
    make!(GetAllocatorWithDefaultOptions())
}

fn strings(texts: &[&[u8]]) -> *mut OrtValue {
    let value: *mut OrtValue =
        make!(CreateTensorAsOrtValue(allocator(), &(texts.len() as i64), 1, element_type(8)));
    let texts: Vec<CString> = texts.iter().map(|text| CString::new(*text).unwrap()).collect();
    let pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
    call!(FillStringTensor(value, pointers.as_ptr(), pointers.len()));
    value
}

fn texts_of(value: *const OrtValue, count: usize) -> Vec<Vec<u8>> {
    let len: usize = make!(GetStringTensorDataLength(value));
    let (mut bytes, mut offsets) = (vec![0u8; len], vec![0usize; count]);
    let buffer = bytes.as_mut_ptr().cast::<c_void>();
    call!(GetStringTensorContent(value, buffer, len, offsets.as_mut_ptr(), count));
    let ends = offsets.iter().skip(1).copied().chain([len]);
    offsets.iter().zip(ends).map(|(start, end)| bytes[*start..end].to_vec()).collect()
}

#[test]
fn strings_go_through_a_run_and_elements_change() {
    let session = session("identity_8");
    let given: Vec<&[u8]> =
        vec![b"a", b"", "ünï".as_bytes(), b"a string of more than twenty-four bytes", b"x", b"y"];
    let value: *mut OrtValue =
        make!(CreateTensorAsOrtValue(allocator(), [2i64, 3].as_ptr(), 2, element_type(8)));
    let owned: Vec<CString> = given.iter().map(|text| CString::new(*text).unwrap()).collect();
    let pointers: Vec<*const c_char> = owned.iter().map(|text| text.as_ptr()).collect();
    call!(FillStringTensor(value, pointers.as_ptr(), 6));
    let output = run_one(session, &[("x", value)], "y");
    assert_eq!(texts_of(output, 6), given);
    call!(FillStringTensorElement(output, c"changed".as_ptr(), 1));
    let buffer: *mut c_char = make!(GetResizedStringTensorElementBuffer(output, 0, 3));
    // SAFETY: the buffer has three bytes.
    unsafe { buffer.cast::<[u8; 3]>().write([b'0', 0, b'1']) };
    let len: usize = make!(GetStringTensorElementLength(output, 1));
    assert_eq!(len, 7);
    let mut element = [0u8; 3];
    call!(GetStringTensorElement(output, 3, 0, element.as_mut_ptr().cast::<c_void>()));
    assert_eq!(element, [b'0', 0, b'1']);
    assert_eq!(texts_of(value, 6), given, "the input is another tensor");
    // The caller's own tensor takes the result.
    let target: *mut OrtValue =
        make!(CreateTensorAsOrtValue(allocator(), [2i64, 3].as_ptr(), 2, element_type(8)));
    assert_eq!(run(session, &[("x", value)], &["y"], &mut [target]), None);
    assert_eq!(texts_of(target, 6), given);
}

#[test]
fn bytes_that_are_no_text_are_kept_and_refused_by_runs() {
    let session = session("identity_8");
    let value: *mut OrtValue =
        make!(CreateTensorAsOrtValue(allocator(), [1i64, 3].as_ptr(), 2, element_type(8)));
    call!(FillStringTensorElement(value, c"\xff\xfe".as_ptr(), 2));
    assert_eq!(texts_of(value, 3)[2], b"\xff\xfe");
    let (code, text) = run(session, &[("x", value)], &["y"], &mut [null_mut()]).unwrap();
    assert!(code == 2 && text.contains("string 2") && text.contains("UTF-8"), "{text}");
}

#[test]
fn a_sequence_has_elements_that_are_copies() {
    let session = session("sequence");
    let mut input = [1f32, 2.0, 3.0, 4.0].map(f32::to_ne_bytes).concat();
    let sequence = run_one(session, &[("x", tensor(&mut input, &[2, 2], 1))], "y");
    let kind: ONNXType = make!(GetValueType(sequence));
    assert_eq!(kind, ONNXType::ONNX_TYPE_SEQUENCE);
    let count: usize = make!(GetValueCount(sequence));
    assert_eq!(count, 2);
    let second: *mut OrtValue = make!(GetValue(sequence, 1, allocator()));
    assert_eq!(bytes_of(second), [3f32, 4.0].map(f32::to_ne_bytes).concat());
    let (code, text) = refusal(raw!(GetValue(sequence, 2, allocator(), &mut null_mut()))).unwrap();
    assert!(code == 2 && text.contains("index 2"), "{text}");
    let elements = [second, second];
    let made: *mut OrtValue = {
        let mut made = null_mut();
        let kind = ONNXType::ONNX_TYPE_SEQUENCE;
        call!(CreateValue(elements.as_ptr().cast(), 2, kind, &mut made));
        made
    };
    let info: *mut OrtTypeInfo = make!(GetTypeInfo(made));
    let sequence_info = make!(CastTypeInfoToSequenceTypeInfo(info));
    let element: *mut OrtTypeInfo = make!(GetSequenceElementType(sequence_info));
    let tensor_info = make!(CastTypeInfoToTensorInfo(element));
    let number = make!(GetTensorElementType(tensor_info));
    assert_eq!(number as i32, 1);
}

/// ZipMap gives a sequence of maps, whose keys come sorted.
#[test]
fn maps_have_sorted_keys_and_their_values() {
    let mut input = [0.25f32, 0.75, 0.5, 0.125].map(f32::to_ne_bytes).concat();
    for name in ["map_ints", "map_strings"] {
        let session = session(name);
        let maps = run_one(session, &[("x", tensor(&mut input, &[2, 2], 1))], "y");
        let count: usize = make!(GetValueCount(maps));
        assert_eq!(count, 2);
        let map: *mut OrtValue = make!(GetValue(maps, 0, allocator()));
        let kind: ONNXType = make!(GetValueType(map));
        assert_eq!(kind, ONNXType::ONNX_TYPE_MAP);
        let [keys, values]: [*mut OrtValue; 2] = [0, 1].map(|index| make!(GetValue(map, index, allocator())));
        match name {
            "map_ints" => assert_eq!(bytes_of(keys), [3i64, 7].map(i64::to_ne_bytes).concat()),
            _ => assert_eq!(texts_of(keys, 2), [b"a", b"b"]),
        }
        assert_eq!(bytes_of(values), [0.75f32, 0.25].map(f32::to_ne_bytes).concat());
    }
}

#[test]
fn a_map_is_made_of_two_tensors() {
    let keys = strings(&[b"z", b"a"]);
    let mut values = [1i64, 2].map(i64::to_ne_bytes).concat();
    let elements = [keys, tensor(&mut values, &[2], 7)];
    let mut map = null_mut();
    call!(CreateValue(elements.as_ptr().cast(), 2, ONNXType::ONNX_TYPE_MAP, &mut map));
    let [keys, values]: [*mut OrtValue; 2] = [0, 1].map(|index| make!(GetValue(map, index, allocator())));
    assert_eq!(texts_of(keys, 2), [b"a", b"z"]);
    assert_eq!(bytes_of(values), [2i64, 1].map(i64::to_ne_bytes).concat());
}

#[test]
fn elements_have_addresses_and_values_describe_themselves() {
    let mut bytes = vec![0u8; 24];
    let value = tensor(&mut bytes, &[2, 3], 1);
    let element: *mut c_void = make!(TensorAt(value, [1i64, 2].as_ptr(), 2));
    assert_eq!(element.addr(), bytes.as_ptr().addr() + 20);
    let (mut number, mut dims, mut rank) = (element_type(0), std::ptr::null(), 0usize);
    call!(GetTensorElementTypeAndShapeDataReference(value, &mut number, &mut dims, &mut rank));
    // SAFETY: the dimensions are as many.
    assert_eq!((number as i32, unsafe { std::slice::from_raw_parts(dims, rank) }), (1, &[2i64, 3][..]));
    let info: *const OrtMemoryInfo = make!(GetTensorMemoryInfo(value));
    let own = memory_info();
    let difference: i32 = make!(CompareMemoryInfo(info, own));
    assert_eq!(difference, 0);
    let mut empty: Vec<u8> = Vec::new();
    let value = tensor(&mut empty, &[0, 3], 1);
    assert_eq!(bytes_of(value), b"");
}

/// An allocator of the caller, which counts what it gave and got back.
#[repr(C)]
struct Counting {
    table: OrtAllocator,
    given: AtomicUsize,
    returned: AtomicUsize,
}

extern "system" fn counting_alloc(this: *mut OrtAllocator, len: usize) -> *mut c_void {
    // SAFETY: the library passes the allocator that it got.
    unsafe { &*this.cast::<Counting>() }.given.fetch_add(1, Ordering::Relaxed);
    let mut memory = vec![0u64; len.div_ceil(8) + 1].into_boxed_slice();
    memory[0] = memory.len() as u64;
    // SAFETY: the slice has more than one element.
    unsafe { Box::into_raw(memory).cast::<u64>().add(1) }.cast()
}

extern "system" fn counting_free(this: *mut OrtAllocator, memory: *mut c_void) {
    // SAFETY: as in `counting_alloc`.
    unsafe { &*this.cast::<Counting>() }.returned.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `counting_alloc` returned the second element of a slice with its length in the first.
    unsafe {
        let start = memory.cast::<u64>().sub(1);
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, *start as usize)));
    }
}

extern "system" fn host_info(_: *const OrtAllocator) -> *const OrtMemoryInfo {
    make!(AllocatorGetInfo(allocator()))
}

#[test]
fn memory_comes_from_the_allocator_of_the_caller_and_goes_back() {
    // Of version 1: fields behind the first three do not exist for the library.
    let table = OrtAllocator {
        version: 1,
        Alloc: Some(counting_alloc),
        Free: Some(counting_free),
        Info: Some(host_info),
        Reserve: None,
        GetStats: None,
        AllocOnStream: None,
        Shrink: None,
    };
    let mut own = Counting { table, given: AtomicUsize::new(0), returned: AtomicUsize::new(0) };
    let pointer = (&raw mut own).cast::<OrtAllocator>();
    let value: *mut OrtValue = make!(CreateTensorAsOrtValue(pointer, [2i64, 3].as_ptr(), 2, element_type(1)));
    let name: *mut c_char = make!(SessionGetInputName(session("add"), 0, pointer));
    assert_eq!(crate::library::string(name), "x");
    call!(AllocatorFree(pointer, name.cast()));
    raw!(ReleaseValue(value));
    assert_eq!((own.given.load(Ordering::Relaxed), own.returned.load(Ordering::Relaxed)), (2, 2));
    let mut memory = counting_alloc(pointer, 24);
    let given: *mut OrtValue = make!(CreateTensorWithDataAndDeleterAsOrtValue(
        pointer,
        memory,
        24,
        [2i64, 3].as_ptr(),
        2,
        element_type(1)
    ));
    raw!(ReleaseValue(given));
    assert_eq!((own.given.load(Ordering::Relaxed), own.returned.load(Ordering::Relaxed)), (3, 3));
    memory = make!(AllocatorAlloc(allocator(), 100));
    assert!(memory.addr().is_multiple_of(64));
    call!(AllocatorFree(allocator(), memory));
    memory = make!(AllocatorAlloc(allocator(), 0));
    assert!(memory.is_null());
    let (code, text) = refusal(raw!(AllocatorAlloc(allocator(), usize::MAX, &mut memory))).unwrap();
    assert!(code == 1 && text.contains("bytes"), "{text}");
}
