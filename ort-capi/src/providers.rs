//! Execution providers by name.

use std::ffi::{CString, c_char, c_void};

use ort_runtime::ProviderRequest;
use ort_runtime::onnxruntime::{CPU, KNOWN, OURS, working};

use crate::devices::EpDevice;
use crate::entry::{Array, ArrayMut, In, InMut, Out, Text, entries};
use crate::env::Env;
use crate::session_options::{SessionOptions, check_entry};
use crate::status::{Outcome, code, fail, invalid};

/// Short names that ONNX Runtime takes, and ours of what is there.
const SHORT: [(&str, &str); 3] = [("CPU", "cpu"), ("CUDA", "cuda"), ("WebGPU", "wgpu")];

/// Short names of providers that are not there.
const OTHERS: [&str; 12] = [
    "ACL",
    "AZURE",
    "CoreML",
    "DML",
    "JS",
    "MIGraphX",
    "NvTensorRtRtx",
    "OpenVINO",
    "QNN",
    "SNPE",
    "WEBNN",
    "XNNPACK",
];

/// Asks for a provider by its name. Its options are configuration entries, too.
fn append(options: &mut SessionOptions, name: &str, settings: &[(&str, &str)]) -> Outcome {
    let own = SHORT.iter().chain(&OURS).find(|(theirs, _)| *theirs == name).map(|(_, own)| *own);
    let is_there =
        own.is_some_and(|own| ort_runtime::ep::providers().iter().any(|provider| provider.name() == own));
    let Some(own) = own.filter(|_| is_there) else {
        let is_known = own.is_some() || OTHERS.contains(&name) || KNOWN.contains(&name) || name == "VitisAI";
        return match is_known {
            true => invalid(format!("{name} execution provider is not supported in this build. ")),
            false => invalid(format!(
                "Unknown provider name '{name}'. Currently supported values are {}",
                SHORT.map(|(theirs, _)| theirs).join(", ")
            )),
        };
    };
    settings.iter().try_for_each(|(key, value)| check_entry(key, value))?;
    let short = name.trim_end_matches("ExecutionProvider").to_ascii_lowercase();
    for (key, value) in settings {
        options.entries.insert(format!("ep.{short}.{key}"), (*value).to_owned());
    }
    // The CPU is always there, and what has no memory of its own has no options.
    if own != "cpu" {
        let request = ProviderRequest::new(own);
        options
            .providers
            .push(settings.iter().fold(request, |request, (key, value)| request.option(key, value)));
    }
    Ok(())
}

fn pairs<'a>(
    keys: &'a Array<Text>,
    values: &'a Array<Text>,
    count: usize,
) -> Outcome<Vec<(&'a str, &'a str)>> {
    let keys = keys.get(count, "the array of keys")?;
    let values = values.get(count, "the array of values")?;
    let pair = |(key, value): (&'a Text, &'a Text)| Ok((key.get("a key")?, value.get("a value")?));
    keys.iter().zip(values).map(pair).collect()
}

/// A provider whose typed options this build does not have.
fn not_enabled<T>(name: &str) -> Outcome<T> {
    fail(code::FAIL, format!("{name} execution provider is not enabled in this build."))
}

entries! {
    /// 125. One block: the pointers, and the texts behind them.
    fn GetAvailableProviders(out: Out<*mut *mut c_char>, count: Out<i32>) {
        let (out, count) = (out.place()?, count.place()?);
        let names: Vec<*mut c_char> =
            working().iter().map(|name| CString::new(*name).unwrap_or_default().into_raw()).collect();
        count.put(names.len() as i32);
        out.put(Box::into_raw(names.into_boxed_slice()).cast());
        Ok(())
    }

    /// 126
    fn ReleaseAvailableProviders(names: ArrayMut<*mut c_char>, count: i32) {
        if names.is_null() {
            return Ok(());
        }
        let count = usize::try_from(count).unwrap_or(0);
        if count != working().len() {
            return invalid(format!("the list has {} providers, not {count}", working().len()));
        }
        let slice = std::ptr::slice_from_raw_parts_mut(names.address(), count);
        // SAFETY: `GetAvailableProviders` made this slice of as many texts, and the caller gives it
        // back once.
        for name in unsafe { Box::from_raw(slice) } {
            // SAFETY: as above.
            drop(unsafe { CString::from_raw(name) });
        }
        Ok(())
    }

    /// 216
    fn SessionOptionsAppendExecutionProvider(options: InMut<SessionOptions>, name: Text, keys: Array<Text>, values: Array<Text>, count: usize) {
        let name = name.get("the name of the provider")?;
        append(options.get()?, name, &pairs(&keys, &values, count)?)
    }

    /// 304
    fn SessionOptionsAppendExecutionProvider_V2(options: InMut<SessionOptions>, env: In<Env>, devices: Array<In<EpDevice>>, device_count: usize, keys: Array<Text>, values: Array<Text>, count: usize) {
        env.get()?;
        let devices = devices.get(device_count, "the array of devices")?;
        if devices.is_empty() {
            return invalid("Must provide one or more OrtEpDevice instances.");
        }
        devices.iter().try_for_each(|device| device.get().map(drop))?;
        append(options.get()?, CPU, &pairs(&keys, &values, count)?)
    }

    /// 305. Sessions run on the providers that the options name, and on the CPU.
    fn SessionOptionsSetEpSelectionPolicy(options: InMut<SessionOptions>, policy: i32) {
        options.get()?;
        match policy {
            0..=6 => Ok(()),
            _ => invalid(format!("there is no selection policy {policy}; it is 0 to 6")),
        }
    }

    /// 195
    fn GetExecutionProviderApi(name: Text, _version: u32, out: Out<*const c_void>) {
        out.place()?;
        invalid(format!("Provider '{}' has no API of its own in this build.", name.get("the name")?))
    }

    /// 152
    fn SessionOptionsAppendExecutionProvider_CUDA(options: InMut<SessionOptions>, settings: *const c_void) {
        options.get()?;
        if settings.is_null() {
            return invalid("the options of the provider are null");
        }
        cuda(options.get()?)
    }

    /// 204
    fn SessionOptionsAppendExecutionProvider_CUDA_V2(options: InMut<SessionOptions>, settings: *const c_void) {
        options.get()?;
        if settings.is_null() {
            return invalid("the options of the provider are null");
        }
        cuda(options.get()?)
    }

    /// 205
    fn CreateCUDAProviderOptions(out: Out<*mut c_void>) {
        out.place()?;
        not_enabled("CUDA")
    }

    /// 171
    fn CreateTensorRTProviderOptions(out: Out<*mut c_void>) {
        out.place()?;
        not_enabled("TensorRT")
    }

    /// 275
    fn SessionOptionsAppendExecutionProvider_OpenVINO_V2(options: InMut<SessionOptions>, _keys: *const c_void, _values: *const c_void, _count: usize) {
        options.get()?;
        not_enabled("OpenVINO")
    }

    /// 153
    fn SessionOptionsAppendExecutionProvider_ROCM(options: InMut<SessionOptions>, _settings: *const c_void) {
        options.get()?;
        not_enabled("ROCM")
    }

    /// 154
    fn SessionOptionsAppendExecutionProvider_OpenVINO(options: InMut<SessionOptions>, _settings: *const c_void) {
        options.get()?;
        not_enabled("OpenVINO")
    }

    /// 159
    fn SessionOptionsAppendExecutionProvider_TensorRT(options: InMut<SessionOptions>, _settings: *const c_void) {
        options.get()?;
        not_enabled("TensorRT")
    }
}

/// Asks for CUDA with its defaults, if it is in this build.
pub(crate) fn cuda(options: &mut SessionOptions) -> Outcome {
    match ort_runtime::ep::providers().iter().any(|provider| provider.name() == "cuda") {
        true => append(options, "CUDA", &[]),
        false => not_enabled("CUDA"),
    }
}
