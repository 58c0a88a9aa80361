//! `OrtLogger`: the log of the environment, for kernels.

use std::ffi::c_int;

use ort_runtime::onnxruntime::log::{Line, severity};

use crate::entry::{In, Object, Out, PathText, Text, entries, kinds};
use crate::log::send;
use crate::status::invalid;

/// The one logger: severities are those of the process.
pub(crate) struct Logger;

kinds! {
    Logger => "OrtLogger", b"OrtLoggr";
}

static LOGGER: Object<Logger> = Object::new(Logger);

pub(crate) fn logger() -> *const Object<Logger> {
    &raw const LOGGER
}

entries! {
    /// 247
    fn Logger_LogMessage(logger: In<Logger>, level: i32, message: Text, file: PathText, line: c_int, function: Text) {
        logger.get()?;
        if !(0..=4).contains(&level) {
            return invalid(format!("the severity is {level}; OrtLoggingLevel is 0 to 4"));
        }
        let message = String::from_utf8_lossy(message.bytes("the message")?).into_owned();
        let file = file.get("the file")?;
        let function = String::from_utf8_lossy(function.bytes("the function")?).into_owned();
        if level >= severity() {
            let file = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            send(&Line { severity: level, place: format!("{file}:{line} {function}"), message });
        }
        Ok(())
    }

    /// 248
    fn Logger_GetLoggingSeverityLevel(logger: In<Logger>, out: Out<i32>) {
        let out = out.place()?;
        logger.get()?;
        out.put(severity().clamp(0, 4));
        Ok(())
    }
}
