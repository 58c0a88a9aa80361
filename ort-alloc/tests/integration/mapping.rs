//! Mapped files: the file's bytes without a copy, alive as long as any slice, and pages that can be
//! let go.

use std::error::Error;
use std::fs::File;
use std::io::Write;

use ort_alloc::{Advice, MapError, MappedFile};
use tempfile::NamedTempFile;

type Outcome = Result<(), Box<dyn Error>>;

fn file_of(bytes: &[u8]) -> std::io::Result<NamedTempFile> {
    let mut file = NamedTempFile::new()?;
    file.write_all(bytes)?;
    Ok(file)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 % 251) as u8).collect()
}

#[test]
fn slices_are_the_files_bytes_and_keep_the_mapping() -> Outcome {
    let content = pattern(100_000);
    let file = file_of(&content)?;
    let mapped = MappedFile::open(file.path())?;
    assert_eq!((mapped.len(), &mapped.bytes()[..]), (content.len(), &content[..]));
    let slice = mapped.slice(12_345..54_321)?;
    assert!(mapped.contains(&slice) && !mapped.contains(&content) && !mapped.contains(&content[..0]));
    assert_eq!(mapped.range_of(&slice[5..10]), Some(12_350..12_355));
    // Neither the name nor the first handle is needed any more.
    drop((mapped, file));
    assert_eq!(&slice[..], &content[12_345..54_321]);
    Ok(())
}

#[test]
fn an_open_file_is_mapped_whole() -> Outcome {
    let file = file_of(b"weights")?;
    let mapped = MappedFile::open_file(File::open(file.path())?)?;
    assert_eq!(&mapped.bytes()[..], b"weights");
    Ok(())
}

#[test]
fn a_file_of_no_bytes_is_fine() -> Outcome {
    let file = file_of(b"")?;
    let mapped = MappedFile::open(file.path())?;
    assert!(mapped.is_empty() && mapped.bytes().is_empty() && !mapped.contains(b""));
    mapped.advise(0..0, Advice::WillNeed)?;
    mapped.release(0..0)?;
    assert_eq!(mapped.resident_bytes(0..0)?, 0);
    assert!(mapped.slice(0..1).is_err());
    Ok(())
}

#[test]
fn what_is_not_in_the_file_is_refused() -> Outcome {
    let file = file_of(b"0123456789")?;
    let mapped = MappedFile::open(file.path())?;
    let backwards = std::ops::Range { start: 5, end: 4 };
    for range in [5..11, 11..11, backwards, 0..usize::MAX] {
        assert!(matches!(mapped.slice(range.clone()), Err(MapError::OutOfBounds { .. })), "{range:?}");
        assert!(mapped.advise(range.clone(), Advice::Random).is_err());
        assert!(mapped.release(range.clone()).is_err());
        assert!(mapped.resident_bytes(range).is_err());
    }
    Ok(())
}

#[test]
fn what_cannot_be_mapped_says_its_name() -> Outcome {
    let folder = tempfile::tempdir()?;
    for path in [folder.path().join("missing.onnx"), folder.path().to_owned()] {
        let message = MappedFile::open(&path).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message.starts_with(&format!("cannot map {}: ", path.display())), "{message}");
    }
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn released_pages_are_no_longer_resident_and_read_the_same() -> Outcome {
    let content = pattern(8 << 20);
    let file = file_of(&content)?;
    let mapped = MappedFile::open(file.path())?;
    mapped.advise(0..mapped.len(), Advice::Random)?;
    assert_eq!(&mapped.bytes()[..], &content[..]);
    assert_eq!(mapped.resident_bytes(0..mapped.len())?, content.len());
    assert_eq!(mapped.resident_bytes(10..5010)?, 5000);
    // Only whole pages go, so both ends of the range may stay. A kernel that maps files by huge
    // pages may also drop the rest of one, hence nothing is said of the first and the third two MiB
    // outside the range.
    mapped.release(100..(4 << 20) + 100)?;
    let page = 64 << 10;
    assert_eq!(mapped.resident_bytes(page..4 << 20)?, 0);
    assert_eq!(mapped.resident_bytes(6 << 20..8 << 20)?, 2 << 20);
    assert_eq!(&mapped.bytes()[..], &content[..]);
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn advice_changes_no_byte() -> Outcome {
    let content = pattern(3 << 20);
    let file = file_of(&content)?;
    let mapped = MappedFile::open(file.path())?;
    for advice in [Advice::WillNeed, Advice::Sequential, Advice::Random] {
        mapped.advise(5000..mapped.len() - 7, advice)?;
    }
    // Not every kernel has huge pages for files; asking for them is harmless either way.
    let _ = mapped.advise(0..mapped.len(), Advice::HugePage);
    assert_eq!(&mapped.bytes()[..], &content[..]);
    Ok(())
}
