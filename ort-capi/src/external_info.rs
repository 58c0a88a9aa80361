//! `OrtExternalInitializerInfo`: where the data of an initializer lies in a file.

use std::path::PathBuf;

use ort_sys::os_char;

use crate::entry::{In, Object, Out, PathText, Released, entries, kinds};
use crate::status::invalid;

/// A range of a file.
pub(crate) struct ExternalInfo {
    /// As C reads it, with a zero at the end.
    file: Vec<os_char>,
    offset: i64,
    len: usize,
}

kinds! {
    ExternalInfo => "OrtExternalInitializerInfo", b"OrtExtIn";
}

impl ExternalInfo {
    pub(crate) fn new(path: &std::path::Path, offset: i64, len: usize) -> ExternalInfo {
        ExternalInfo { file: os_text(path), offset, len }
    }

    /// The path of the file.
    #[cfg(unix)]
    pub(crate) fn path(&self) -> PathBuf {
        use std::os::unix::ffi::OsStringExt;
        let bytes = self.file.iter().take_while(|unit| **unit != 0).map(|unit| *unit as u8).collect();
        PathBuf::from(std::ffi::OsString::from_vec(bytes))
    }

    /// The path of the file.
    #[cfg(windows)]
    pub(crate) fn path(&self) -> PathBuf {
        use std::os::windows::ffi::OsStringExt;
        let len = self.file.iter().take_while(|unit| **unit != 0).count();
        PathBuf::from(std::ffi::OsString::from_wide(self.file.get(..len).unwrap_or_default()))
    }

    pub(crate) fn offset(&self) -> i64 {
        self.offset
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// A path as C reads it, with a zero at its end.
#[cfg(unix)]
pub(crate) fn os_text(path: &std::path::Path) -> Vec<os_char> {
    use std::os::unix::ffi::OsStrExt;
    path.as_os_str().as_bytes().iter().map(|byte| *byte as os_char).chain([0]).collect()
}

/// A path as C reads it, with a zero at its end.
#[cfg(windows)]
pub(crate) fn os_text(path: &std::path::Path) -> Vec<os_char> {
    use std::os::windows::ffi::OsStrExt;
    path.as_os_str().encode_wide().chain([0]).collect()
}

entries! {
    /// 389
    fn CreateExternalInitializerInfo(file: PathText, offset: i64, len: usize, out: Out<*mut Object<ExternalInfo>>) {
        let out = out.place()?;
        let path = file.get("the path of the file")?;
        if offset < 0 {
            return invalid(format!("the offset in the file is {offset}, expected 0 or more"));
        }
        out.put(Object::give(ExternalInfo::new(&path, offset, len)));
        Ok(())
    }

    /// 369
    fn ReleaseExternalInitializerInfo(info: Released<ExternalInfo>) -> (), else (), {
        info.release();
    }

    /// 370
    fn ExternalInitializerInfo_GetFilePath(info: In<ExternalInfo>) -> *const os_char, else std::ptr::null(), {
        info.get().map_or(std::ptr::null(), |info| info.file.as_ptr())
    }

    /// 371
    fn ExternalInitializerInfo_GetFileOffset(info: In<ExternalInfo>) -> i64, else 0, {
        info.get().map_or(0, ExternalInfo::offset)
    }

    /// 372
    fn ExternalInitializerInfo_GetByteSize(info: In<ExternalInfo>) -> usize, else 0, {
        info.get().map_or(0, ExternalInfo::len)
    }
}
