//! External data: read where it may lie, refused where it may not.
#![cfg(unix)]

use std::fs::{self, hard_link};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ort_core::onnx::proto::StringStringEntryProto;
use ort_core::onnx::{ExternalData, FileAccess, Location};
use ort_core::{ErrorKind, Result};
use tempfile::TempDir;

fn entries(pairs: &[(&str, &str)]) -> Vec<StringStringEntryProto> {
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
        key: Some(key.to_string()),
        value: Some(value.to_string()),
    };
    pairs.iter().map(entry).collect()
}

fn read(model: &Path, pairs: &[(&str, &str)], expected: usize) -> Result<Vec<u8>> {
    let location = Location::parse(&entries(pairs))?;
    let mut data = ExternalData::in_folder(model.parent().unwrap(), Some(model), FileAccess::default())?;
    data.read(&location, expected).map(|bytes| bytes.to_vec())
}

/// A folder with a secret outside of the folder `model`, which holds `model.onnx` and its data.
fn setup() -> (TempDir, PathBuf) {
    let top = TempDir::new().unwrap();
    let folder = top.path().join("model");
    fs::create_dir_all(folder.join("sub")).unwrap();
    fs::write(top.path().join("secret"), b"secret bytes").unwrap();
    fs::write(folder.join("model.onnx"), b"model").unwrap();
    fs::write(folder.join("weights.data"), b"0123456789").unwrap();
    fs::write(folder.join("sub/more.data"), b"abcdef").unwrap();
    let model = folder.join("model.onnx");
    (top, model)
}

#[test]
fn ranges_are_read_and_checked() {
    let (_top, model) = setup();
    let at = |offset: &str, length: &str, expected| {
        read(&model, &[("location", "weights.data"), ("offset", offset), ("length", length)], expected)
    };
    assert_eq!(at("0", "10", 10).unwrap(), b"0123456789");
    assert_eq!(at("3", "4", 4).unwrap(), b"3456");
    assert_eq!(at("", "", 4).unwrap(), b"0123");
    assert_eq!(at("10", "0", 0).unwrap(), b"");
    assert_eq!(read(&model, &[("location", "./sub/more.data"), ("offset", "1")], 2).unwrap(), b"bc");
    let huge = u64::MAX.to_string();
    for (offset, length, expected) in [
        ("3", "8", 8),
        ("11", "1", 1),
        ("0", "4", 5),
        ("-1", "4", 4),
        ("x", "4", 4),
        (&huge, "4", 4),
        ("0", &huge, 4),
    ] {
        let error = at(offset, length, expected).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fail, "offset {offset} length {length}: {error}");
    }
    assert!(at("0", "99999999999999999999999999", 4).is_err());
}

#[test]
fn locations_that_lead_elsewhere_are_refused() {
    let (top, model) = setup();
    let folder = model.parent().unwrap();
    symlink(top.path().join("secret"), folder.join("link.data")).unwrap();
    symlink("../secret", folder.join("relative_link.data")).unwrap();
    symlink(top.path(), folder.join("link_folder")).unwrap();
    hard_link(top.path().join("secret"), folder.join("hard.data")).unwrap();
    symlink(folder.join("hard.data"), folder.join("link_to_hard.data")).unwrap();
    let absolute = top.path().join("secret").display().to_string();
    let cases: &[(&str, &str)] = &[
        ("", "has no location"),
        (&absolute, "not relative"),
        ("../secret", "out of the model's folder"),
        ("sub/../../secret", "out of the model's folder"),
        ("sub/../../weights.data", "out of the model's folder"),
        ("link_folder/../../secret", "out of the model's folder"),
        ("sub\\..\\weights.data", "out of the model's folder"),
        ("..\\secret", "out of the model's folder"),
        ("C:\\secret", "not relative"),
        ("\\\\host\\secret", "not relative"),
        ("a\0b", "not relative"),
        ("link.data", "symbolic link"),
        ("relative_link.data", "symbolic link"),
        ("link_folder/secret", "symbolic link"),
        ("hard.data", "hard links"),
        ("link_to_hard.data", "hard links"),
        ("missing.data", "External data path does not exist"),
        ("sub", "folder"),
    ];
    for (location, part) in cases {
        let error = read(&model, &[("location", location)], 4).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fail, "{location}: {error}");
        assert!(error.to_string().contains(part), "{location}: {error}");
    }
}

#[test]
fn links_that_stay_inside_are_followed() {
    let (top, model) = setup();
    let folder = model.parent().unwrap();
    symlink("sub/more.data", folder.join("link.data")).unwrap();
    hard_link(folder.join("weights.data"), folder.join("sub/hard.data")).unwrap();
    assert_eq!(read(&model, &[("location", "link.data")], 3).unwrap(), b"abc");
    assert_eq!(read(&model, &[("location", "sub/hard.data")], 3).unwrap(), b"012");
    // `..` takes back the name before it, wherever that leads.
    symlink(top.path(), folder.join("out")).unwrap();
    for location in ["sub/../weights.data", "out/../weights.data", "./sub/./../weights.data"] {
        assert_eq!(read(&model, &[("location", location)], 3).unwrap(), b"012", "{location}");
    }
}

#[test]
fn hard_links_are_read_where_they_are_allowed() {
    let (top, model) = setup();
    let folder = model.parent().unwrap();
    hard_link(top.path().join("secret"), folder.join("hard.data")).unwrap();
    let access = FileAccess { hard_links: true, ..FileAccess::default() };
    let mut data = ExternalData::in_folder(folder, Some(&model), access).unwrap();
    let location = Location::parse(&entries(&[("location", "hard.data")])).unwrap();
    assert_eq!(data.read(&location, 6).unwrap().as_ref(), b"secret");
}

#[test]
fn a_file_that_is_swapped_while_it_is_opened_shows_nothing_from_outside() {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};
    let (top, model) = setup();
    let folder = model.parent().unwrap();
    let (secret, swapped, other) = (top.path().join("secret"), folder.join("sub"), folder.join("aside"));
    // Outside there is a folder with a file of the same name, too.
    fs::create_dir(top.path().join("outside")).unwrap();
    fs::write(top.path().join("outside/more.data"), b"secret bytes").unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // The file itself becomes a link of either kind, and its folder a link, in turn.
                let inside = swapped.join("more.data");
                let _ = fs::rename(&inside, folder.join("kept.data"));
                let _ = hard_link(&secret, &inside);
                let _ = fs::remove_file(&inside);
                let _ = symlink(&secret, &inside);
                let _ = fs::remove_file(&inside);
                let _ = fs::rename(folder.join("kept.data"), &inside);
                let _ = fs::rename(&swapped, &other);
                let _ = symlink("../outside", &swapped);
                let _ = fs::remove_file(&swapped);
                let _ = fs::rename(&other, &swapped);
            }
        });
        let (start, mut leaked) = (Instant::now(), Vec::new());
        while start.elapsed() < Duration::from_secs(2) {
            match read(&model, &[("location", "sub/more.data")], 6) {
                Ok(bytes) if bytes != b"abcdef" => leaked.push(bytes),
                _ => {}
            }
        }
        // The scope waits for its thread, so nothing above may panic.
        is_over.store(true, Ordering::Relaxed);
        assert!(leaked.is_empty(), "read from outside: {leaked:?}");
    });
    // Refusing every read would pass so far: once nothing is swapped any more, the file is read.
    assert_eq!(read(&model, &[("location", "sub/more.data")], 6).unwrap(), b"abcdef");
}

/// `models--x/snapshots/abc/model.onnx` and its data link into `models--x/blobs`, as in a Hugging
/// Face cache.
fn cache() -> (TempDir, PathBuf) {
    let top = TempDir::new().unwrap();
    let repository = top.path().join("models--x");
    let snapshot = repository.join("snapshots/abc/onnx");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("blobs")).unwrap();
    fs::create_dir_all(top.path().join("models--y/blobs")).unwrap();
    fs::write(top.path().join("models--y/blobs/cc33"), b"other repository").unwrap();
    fs::write(repository.join("blobs/aa11"), b"model").unwrap();
    fs::write(repository.join("blobs/bb22"), b"0123456789").unwrap();
    fs::write(repository.join("refs"), b"abc").unwrap();
    symlink("../../../blobs/aa11", snapshot.join("model.onnx")).unwrap();
    symlink("../../../blobs/bb22", snapshot.join("model.onnx_data")).unwrap();
    symlink("../../../../models--y/blobs/cc33", snapshot.join("stranger")).unwrap();
    symlink("../../../refs", snapshot.join("refs")).unwrap();
    (top, snapshot.join("model.onnx"))
}

#[test]
fn the_hugging_face_cache_loads() {
    let (_top, model) = cache();
    assert_eq!(read(&model, &[("location", "model.onnx_data"), ("offset", "2")], 3).unwrap(), b"234");
    for location in ["stranger", "refs"] {
        let error = read(&model, &[("location", location)], 3).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{location}: {error}");
    }
}

/// `here/model.onnx` is a link to `store/model.onnx`. `here` and `store` have the files that the
/// test's names say.
fn linked() -> (TempDir, PathBuf) {
    let top = TempDir::new().unwrap();
    let (here, store) = (top.path().join("here"), top.path().join("store"));
    for folder in [&here, &store.join("sub"), &top.path().join("third")] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(store.join("model.onnx"), b"model").unwrap();
    fs::write(store.join("beside_target"), b"0123456789").unwrap();
    fs::write(store.join("sub/below_target"), b"0123456789").unwrap();
    fs::write(here.join("beside_link"), b"0123456789").unwrap();
    fs::write(top.path().join("third/file"), b"secret bytes").unwrap();
    hard_link(top.path().join("third/file"), store.join("hard")).unwrap();
    symlink("../store/model.onnx", here.join("model.onnx")).unwrap();
    symlink("../store/beside_target", here.join("link_beside")).unwrap();
    symlink("../store/sub/below_target", here.join("link_below")).unwrap();
    symlink("../store", here.join("link_folder")).unwrap();
    symlink("../third/file", here.join("link_third")).unwrap();
    symlink("../third/file", store.join("link_third")).unwrap();
    symlink("../store/link_third", here.join("link_to_link")).unwrap();
    symlink("../store/hard", here.join("link_hard")).unwrap();
    (top, here.join("model.onnx"))
}

#[test]
fn data_of_a_linked_model_may_be_links_into_the_folder_of_its_target() {
    let (top, model) = linked();
    for location in ["beside_link", "link_beside", "link_below", "link_folder/sub/below_target"] {
        assert_eq!(read(&model, &[("location", location)], 3).unwrap(), b"012", "{location}");
    }
    let refused = [
        ("link_third", "External data path escapes model directory"),
        ("link_to_link", "External data path escapes model directory"),
        ("../store/beside_target", "External data path escapes model directory"),
        // Data that lies beside the target alone is not found, as in ONNX Runtime.
        ("beside_target", "External data path does not exist"),
        ("link_hard", "hard links"),
    ];
    for (location, part) in refused {
        let error = read(&model, &[("location", location)], 3).unwrap_err();
        assert!(error.to_string().contains(part), "{location}: {error}");
    }
    // A model that is a file of its own has no other folder.
    let own = top.path().join("here/own.onnx");
    fs::write(&own, b"model").unwrap();
    for location in ["link_beside", "link_below", "link_folder/sub/below_target"] {
        let error = read(&own, &[("location", location)], 3).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{location}: {error}");
    }
}

#[test]
fn a_model_that_is_no_cache_link_cannot_reach_blobs() {
    let (_top, model) = cache();
    let own = model.with_file_name("own.onnx");
    fs::write(&own, b"model").unwrap();
    assert!(read(&own, &[("location", "model.onnx_data")], 3).is_err());
}

#[test]
fn a_file_is_opened_once() {
    let (_top, model) = setup();
    let mut data =
        ExternalData::in_folder(model.parent().unwrap(), Some(&model), FileAccess::default()).unwrap();
    let location = |offset: &str| {
        Location::parse(&entries(&[("location", "weights.data"), ("offset", offset)])).unwrap()
    };
    let first = data.read(&location("0"), 4).unwrap();
    let second = data.read(&location("4"), 4).unwrap();
    assert_eq!(data.mappings().count(), 1);
    assert_eq!(second.as_ptr().addr() - first.as_ptr().addr(), 4);
}

#[test]
fn a_model_without_a_folder_has_no_external_data() {
    let location = Location::parse(&entries(&[("location", "weights.data")])).unwrap();
    let error = ExternalData::unavailable().read(&location, 4).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fail, "{error}");
}
