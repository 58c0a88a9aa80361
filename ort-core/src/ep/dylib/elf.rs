//! ELF sanity check for provider libraries, before the system's loader maps them.
//!
//! The loader trusts the headers and maps what they say. In a truncated file the pages past the end
//! are missing, and reading one kills the process with `SIGBUS`. So we first compare the headers
//! with the file length. This detects damage, not malice: the user chose to run this code.

use std::io::Read;
use std::path::Path;

use ort_alloc::open_regular;

use crate::{Error, Result, ensure, error};

/// Rejects a file that is not a complete shared library for this machine. On systems other than
/// 64-bit little-endian Linux it only checks that the path is a regular file.
///
/// # Errors
///
/// The file cannot be opened, is a pipe or a device, or is not a complete library.
pub fn check_library(path: &Path) -> Result<()> {
    let file =
        open_regular(path).map_err(|problem| error!(NoSuchFile, "{problem}").help("check the path"))?;
    let length = file.metadata().map_err(|problem| error!(NoSuchFile, "{problem}"))?.len();
    if cfg!(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))) {
        return Ok(());
    }
    let mut headers = Vec::new();
    file.take(MOST_HEADERS).read_to_end(&mut headers).map_err(|problem| error!(NoSuchFile, "{problem}"))?;
    check_elf(&headers, length)
}

/// Bytes read from the start of the file. ELF headers and the program header table are there.
const MOST_HEADERS: u64 = 1 << 16;

const ELF: &[u8] = b"\x7fELF";
/// ELFCLASS64, little-endian, version 1.
const FORM: [u8; 3] = [2, 1, 1];
/// `ET_DYN`.
const SHARED: u16 = 3;
const HEADER: usize = 64;
const SEGMENT: usize = 56;
/// Segment types `PT_LOAD`, which is mapped, and `PT_DYNAMIC`, which has the dynamic symbols.
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;

fn truncated(found: &str) -> Error {
    error!(EpFail, "it is not a complete shared library: {found}").help("build it or copy it again")
}

/// Reads a little-endian number of `COUNT` bytes at `at`.
fn number<const COUNT: usize>(bytes: &[u8], at: usize) -> Result<u64> {
    let own = bytes.get(at..at + COUNT).ok_or_else(|| truncated("its headers are truncated"))?;
    Ok(own.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn check_elf(headers: &[u8], length: u64) -> Result<()> {
    ensure!(
        headers.starts_with(ELF),
        EpFail,
        help = "name a shared library of this system",
        "it cannot be loaded: it is not a shared library"
    );
    ensure!(
        headers.get(4..7) == Some(&FORM),
        EpFail,
        help = "use a build of the library for this machine",
        "it is a library for another kind of machine"
    );
    // The `e_machine` numbers that we know; other architectures go unchecked.
    let machine = match std::env::consts::ARCH {
        "x86_64" => Some(62),
        "aarch64" => Some(183),
        "riscv64" => Some(243),
        _ => None,
    };
    let found = number::<2>(headers, 18)?;
    ensure!(
        machine.is_none_or(|machine| machine == found),
        EpFail,
        help = "use a build of the library for this machine",
        "it is built for another processor (ELF machine {found})"
    );
    // `e_type`.
    if number::<2>(headers, 16)? != u64::from(SHARED) {
        return Err(truncated("it is a program or an object file"));
    }
    // The program header table: `e_phoff`, `e_phentsize` and `e_phnum`.
    let (first, size) = (number::<8>(headers, 32)?, number::<2>(headers, 54)?);
    let count = number::<2>(headers, 56)?;
    ensure!(size == SEGMENT as u64 && count > 0, EpFail, "it has {count} segments of {size} bytes");
    let first = usize::try_from(first).ok().filter(|first| (HEADER..MOST_HEADERS as usize).contains(first));
    let first = first.ok_or_else(|| truncated("its segment table is out of range"))?;
    let mut has_symbols = false;
    for index in 0..count as usize {
        let at = first + index * SEGMENT;
        let kind = number::<4>(headers, at)? as u32;
        // `p_offset` and `p_filesz`; `p_memsz` is at 40.
        let (start, bytes) = (number::<8>(headers, at + 8)?, number::<8>(headers, at + 32)?);
        has_symbols |= kind == DYNAMIC;
        let end = start.checked_add(bytes);
        let is_there = end.is_some_and(|end| end <= length) && bytes <= number::<8>(headers, at + 40)?;
        if matches!(kind, LOAD | DYNAMIC) && !is_there {
            return Err(truncated(&format!(
                "segment {index} of {bytes} bytes at offset {start} is out of range for the file of {length} bytes"
            )));
        }
    }
    if has_symbols { Ok(()) } else { Err(truncated("it has no symbols")) }
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    /// The bytes of libc, which every dynamically linked process has mapped.
    fn library() -> Option<Vec<u8>> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|path| path.contains("libc.so"));
        path.map(|path| std::fs::read(path).unwrap())
    }

    fn check(bytes: &[u8]) -> Result<()> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        check_library(file.path())
    }

    #[test]
    fn a_library_that_is_cut_or_of_another_machine_is_refused() {
        // A static binary maps no libc.
        let Some(whole) = library() else { return };
        check(&whole).unwrap();
        for length in [0, 3, 16, 63, 64, 200, 1000, whole.len() / 4, whole.len() / 2] {
            assert!(check(&whole[..length]).is_err(), "{length} bytes");
        }
        let cases: [(&str, usize, &[u8]); 8] = [
            ("another magic", 0, b"ELF\x7f"),
            ("32 bits", 4, &[1]),
            ("big-endian", 5, &[2]),
            ("a program", 16, &[2, 0]),
            ("another processor", 18, &[8, 0]),
            ("a table far away", 32, &[0xff; 8]),
            ("no segments", 56, &[0, 0]),
            ("65,535 segments", 56, &[0xff, 0xff]),
        ];
        for (name, at, bytes) in cases {
            let mut changed = whole.clone();
            changed[at..at + bytes.len()].copy_from_slice(bytes);
            assert!(check(&changed).is_err(), "{name}");
        }
        for path in ["/dev/zero", "/dev", "/nowhere"] {
            assert!(check_library(Path::new(path)).is_err(), "{path}");
        }
    }
}
