//! Any bytes as a provider library: its headers are whole, or it is refused before the system's
//! loader maps it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ort_core::ep::check_library;

fuzz_target!(|data: &[u8]| {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), data).expect("room for it");
    let _ = check_library(file.path());
});
