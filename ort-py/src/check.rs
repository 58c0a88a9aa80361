//! `check` and `compile`: what the commands `ort check` and `ort compile` do with a model, on the
//! CPU.

use std::collections::HashMap;
use std::path::PathBuf;

use ort_runtime::ep::CancelToken as Token;
use ort_runtime::onnx::{Location, Source};
use ort_runtime::onnxruntime::CPU;
use ort_runtime::{Error, ErrorKind, Model, open_devices};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::build::{self, Settings};
use crate::cancel::{enter, interruptibly};
use crate::error::OrRaise;
use crate::ort_value::OrtValue;

/// Returns what `ort check` finds in a model at a path or in bytes, a line each.
pub(crate) fn check(py: Python<'_>, model: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let options = py.import("ort_runtime.capi._options")?.getattr("SessionOptions")?.call0()?;
    let source = source_of(&options, model)?;
    let settings = Settings::of(&options, &[], Vec::new())?;
    let report = interruptibly(py, Token::default(), |cancel| {
        // Without a request, the device is the CPU.
        let builder = |model: &Model| Ok(settings.builder(model).cancel(cancel));
        ort_report::check(source, || open_devices(&[]), builder)
    })?;
    Ok(report.or_raise(py)?.lines())
}

/// Writes a model at a path or in bytes to the file `out`, together with its packed weights.
pub(crate) fn compile(
    py: Python<'_>,
    model: &Bound<'_, PyAny>,
    out: &str,
    options: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let model = build::load(options, source_of(options, model)?)?;
    // As sessions ask for it: a compiled file is for the providers that it was made for.
    let providers = [(CPU.to_owned(), HashMap::new())];
    let settings = Settings::of(options, &providers, Vec::new())?;
    let written = interruptibly(py, Token::default(), |cancel| {
        settings.builder(&model).cancel(cancel).save_compiled(out)
    })?;
    written.or_raise(py)
}

/// Writes a model at a path or in bytes to the file `out`, as the options optimize it, with weights
/// where `locate` says. It is called with a name, a value and where that is in a data file, and
/// returns such a place or `None`.
pub(crate) fn save_located(
    py: Python<'_>,
    model: &Bound<'_, PyAny>,
    out: &str,
    options: &Bound<'_, PyAny>,
    locate: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let _call = enter(py);
    let model = build::load(options, source_of(options, model)?)?;
    let settings = Settings::of(options, &[], Vec::new())?;
    let optimized =
        interruptibly(py, Token::default(), |cancel| settings.builder(&model).cancel(cancel).optimized())?;
    let (graph, _) = optimized.or_raise(py)?;
    let mut raised = None;
    let saved = model.save_located(&graph, out, |name, tensor, place| {
        let place = place.map(|place| {
            (place.path.to_string_lossy().into_owned(), place.offset, place.length.unwrap_or_default())
        });
        // The memory may be that of a mapped file, so it is read-only.
        let found = OrtValue::read_only(py, tensor)
            .and_then(|value| locate.call1((name, value, place))?.extract::<Option<(PathBuf, u64, u64)>>());
        match found {
            Ok(place) => {
                Ok(place.map(|(path, offset, length)| Location { path, offset, length: Some(length) }))
            }
            Err(error) => {
                raised = Some(error);
                Err(Error::new(ErrorKind::Cancelled, "the function of the caller raised".to_owned()))
            }
        }
    });
    match raised {
        Some(error) => Err(error),
        None => saved.or_raise(py),
    }
}

/// Opens a model at a path or in bytes.
fn source_of(options: &Bound<'_, PyAny>, model: &Bound<'_, PyAny>) -> PyResult<Source> {
    match model.cast::<PyBytes>() {
        Ok(bytes) => build::wrap(options, bytes),
        Err(_) => build::open(options, model.cast::<PyString>()?.to_str()?),
    }
}
