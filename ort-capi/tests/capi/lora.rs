//! LoRA adapters, written by ONNX Runtime's Python package.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use ort_sys::{OrtAllocator, OrtLoraAdapter, OrtRunOptions, OrtValue};

use crate::library::{bytes_of, c, call, data, json, make, raw, refusal, session, session_with, tensor};

type Refused = Option<(i32, String)>;

fn adapter(name: &str) -> *mut OrtLoraAdapter {
    let path = c(data("adapters").join(name).to_str().unwrap());
    make!(CreateLoraAdapter(path.as_ptr(), null_mut()))
}

fn of_bytes(bytes: &[u8], allocator: *mut OrtAllocator) -> Refused {
    refusal(raw!(CreateLoraAdapterFromArray(bytes.as_ptr().cast(), bytes.len(), allocator, &mut null_mut())))
}

fn hex(text: &serde_json::Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Runs the model `two` with adapters. Returns its first output.
fn run(adapters: &[*mut OrtLoraAdapter], inputs: &[(&str, *mut OrtValue)]) -> Result<Vec<u8>, (i32, String)> {
    let options: *mut OrtRunOptions = make!(CreateRunOptions());
    for adapter in adapters {
        call!(RunOptionsAddActiveLoraAdapter(options, *adapter));
        // The options keep it.
        raw!(ReleaseLoraAdapter(*adapter));
    }
    let names: Vec<CString> = inputs.iter().map(|(name, _)| c(name)).collect();
    let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let values: Vec<*const OrtValue> = inputs.iter().map(|(_, value)| value.cast_const()).collect();
    let mut output = null_mut();
    let session = session("two");
    let outputs = [c"scaled".as_ptr()];
    let refused = refusal(raw!(Run(
        session,
        options,
        names.as_ptr(),
        values.as_ptr(),
        values.len(),
        outputs.as_ptr(),
        1,
        &mut output
    )));
    raw!(ReleaseRunOptions(options));
    match refused {
        Some(refused) => Err(refused),
        None => Ok(bytes_of(output)),
    }
}

#[test]
fn a_run_has_the_parameters_of_its_adapters() {
    let recorded = &json("results.json")["two_scaled"];
    let (mut x, mut given) =
        (hex(&recorded["inputs"]["x"]), [9f32.to_le_bytes(), 9f32.to_le_bytes()].concat());
    let expected = hex(&recorded["outputs"][0]);
    let x = tensor(&mut x, &[2, 2, 2], 1);
    assert_eq!(run(&[adapter("scale.onnx_adapter")], &[("x", x)]), Ok(expected.clone()));
    let twice = [adapter("scale.onnx_adapter"), adapter("scale.onnx_adapter")];
    assert_eq!(run(&twice, &[("x", x)]), Ok(expected.clone()));
    // A parameter replaces what is given.
    let given = tensor(&mut given, &[2], 1);
    assert_eq!(run(&[adapter("scale.onnx_adapter")], &[("x", x), ("scale", given)]), Ok(expected));
    let unknown = run(&[adapter("unknown.onnx_adapter")], &[("x", x)]);
    assert_eq!(unknown, Err((2, "Invalid input name: nope".to_owned())));
}

/// ONNX Runtime 1.31 warns, and leaves adapters out of these runs.
#[test]
fn adapters_have_no_effect_on_bindings_and_runs_that_call_back() {
    let mut x = hex(&json("results.json")["two_scaled"]["inputs"]["x"]);
    let x = tensor(&mut x, &[2, 2, 2], 1);
    let without = run(&[], &[("x", x)]).unwrap();
    assert_ne!(run(&[adapter("scale.onnx_adapter")], &[("x", x)]).unwrap(), without);
    let options: *mut OrtRunOptions = make!(CreateRunOptions());
    call!(RunOptionsAddActiveLoraAdapter(options, adapter("scale.onnx_adapter")));
    let session_options = make!(CreateSessionOptions());
    call!(SetIntraOpNumThreads(session_options, 2));
    let session = session_with("two", session_options);
    let binding = make!(CreateIoBinding(session));
    let mut bound = vec![0; without.len()];
    let output = tensor(&mut bound, &[2, 2, 2], 1);
    call!(BindInput(binding, c"x".as_ptr(), x));
    call!(BindOutput(binding, c"scaled".as_ptr(), output));
    call!(RunWithBinding(session, options, binding));
    assert_eq!(bytes_of(output), without);

    static DONE: AtomicBool = AtomicBool::new(false);
    extern "C" fn done(_: *mut c_void, _: *mut *mut OrtValue, count: usize, status: ort_sys::OrtStatusPtr) {
        assert!(count == 1 && status.0.is_null());
        DONE.store(true, Ordering::Release);
    }
    let (names, outputs, values) = ([c"x".as_ptr()], [c"scaled".as_ptr()], [x.cast_const()]);
    let mut made = [null_mut()];
    let made_by_run = made.as_mut_ptr();
    call!(RunAsync(
        session,
        options,
        names.as_ptr(),
        values.as_ptr(),
        1,
        outputs.as_ptr(),
        1,
        made_by_run,
        Some(done),
        null_mut()
    ));
    while !DONE.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    // SAFETY: the callback came after the last use of the array.
    assert_eq!(bytes_of(unsafe { *made_by_run }), without);
}

#[test]
fn what_is_no_adapter_is_refused() {
    let bytes = std::fs::read(data("adapters/scale.onnx_adapter")).unwrap();
    assert_eq!(of_bytes(&bytes, null_mut()), None);
    let allocator: *mut OrtAllocator = make!(GetAllocatorWithDefaultOptions());
    let scalar = std::fs::read(data("adapters/scalar.onnx_adapter")).unwrap();
    let cases: [(Refused, i32, &str); 5] = [
        (of_bytes(b"garbage!garbage!", null_mut()), 1, "does not appear to be a valid lora parameter format"),
        (of_bytes(&[], null_mut()), 1, "does not appear to be a valid lora parameter format"),
        (of_bytes(&bytes[..bytes.len() / 2], null_mut()), 1, "fails lora adapter format verification"),
        (of_bytes(&bytes, allocator), 1, "The specified allocator must be a device allocator"),
        (of_bytes(&scalar, null_mut()), 1, "Lora Param 's': dims is missing or empty"),
    ];
    for (refused, code, words) in cases {
        let (got, text) = refused.unwrap_or_else(|| panic!("'{words}' is not refused"));
        assert!(got == code && text.contains(words), "{got} {text}");
    }
    let refused = refusal(raw!(CreateLoraAdapter(c"/nonexistent".as_ptr(), null_mut(), &mut null_mut())));
    assert_eq!(refused.map(|(code, _)| code), Some(2));
    assert_eq!(
        refusal(raw!(CreateLoraAdapterFromArray(null(), 8, null_mut(), &mut null_mut()))).unwrap().0,
        2
    );
}

/// Every cut and every changed byte is a status or an adapter, and no more.
#[test]
fn damaged_adapters_are_refused() {
    let bytes = std::fs::read(data("adapters/scale.onnx_adapter")).unwrap();
    for place in 0..bytes.len() {
        let _ = of_bytes(&bytes[..place], null_mut());
        for change in [0x00, 0x7f, 0xff] {
            let mut damaged = bytes.clone();
            damaged[place] = change;
            let _ = of_bytes(&damaged, null_mut());
        }
    }
}
