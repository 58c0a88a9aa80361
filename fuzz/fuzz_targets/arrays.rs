//! Any bytes as a file of NumPy: an array, or an archive of arrays, is read within its bound, or is
//! an error.
#![no_main]

use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use ort_numpy::{Archive, read_npy, write_npz};

/// What arrays may take together.
const MOST: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    if let Ok(tensor) = read_npy(data, data.len() as u64, MOST) {
        // What was read can be written and read again.
        let mut file = Cursor::new(Vec::new());
        if write_npz(&mut file, &[("x".to_string(), tensor.clone().into())]).is_ok() {
            // The test wrote this file itself, so its sizes need no bound.
            let again = Archive::open(file).and_then(|mut archive| archive.read("x", usize::MAX));
            assert_eq!(again.expect("an array").shape(), tensor.shape());
        }
    }
    if let Ok(mut archive) = Archive::open(Cursor::new(data)) {
        let _ = archive.read_all(MOST);
    }
});
