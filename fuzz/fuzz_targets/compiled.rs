//! Entries of the compiled cache and compiled models, of any bytes or with damage: sessions compute
//! what they compute without, or loading is an error.
#![no_main]

#[path = "../../ort-runtime/tests/support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use ort_runtime::ir::GraphBuilder;
use ort_runtime::onnx::{ModelInfo, Weights, save};
use ort_runtime::{DType, Model, Result, Session};
use support::numbers;
use tempfile::TempDir;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// What a session may take for its buffers.
const BUDGET: usize = 64 << 20;
/// The header's bytes, of which the last eight are the checksum; the numbers before it say where
/// the table is.
const HEADER: usize = 64;
/// The bytes of a record: start, length and checksum of a blob, and its tag.
const RECORD: usize = 32;

/// Files that are whole, and what a session computes.
struct Known {
    place: TempDir,
    model: Model,
    entry: (PathBuf, Vec<u8>),
    compiled: Vec<u8>,
    expected: Vec<u8>,
}

/// What is done to a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fix {
    /// The damage shows in the checksums.
    None,
    /// The header's checksum is right.
    Header,
    /// Those of the blobs, too.
    All,
}

fn known() -> Result<Known> {
    let place = tempfile::tempdir().expect("a folder");
    let mut builder = GraphBuilder::new("layers");
    let x = builder.input("x", DType::F32, &["rows", "16"]);
    let weight = builder.constant(numbers(&[16, 20], 1)?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let parts = [2, 3].map(|seed| numbers(&[20, 16], seed).map(|part| builder.constant(part)));
    let [one, other] = parts;
    let folded = builder.node("Add", &[one?, other?], &[])?;
    let product = builder.node("MatMul", &[product, folded], &[])?;
    let file = place.path().join("model.onnx");
    save(&builder.finish(&[product])?, &ModelInfo::default(), &file, &Weights::Inside)?;
    let model = Model::load(&file)?;
    let path = place.path().join("compiled");
    Session::builder(&model).threads(1).save_compiled(&path)?;
    let compiled = fs::read(path).expect("a file");
    let expected = outputs(&Session::builder(&model).threads(1).build()?)?;
    cached(&place, &model)?;
    let files = fs::read_dir(place.path().join("cache")).expect("a folder");
    let files = files.map(|file| file.expect("a file").path());
    let entry = files.filter(|file| file.extension().is_some_and(|ending| ending == "compiled")).next();
    let entry = entry.map(|path| (path.clone(), fs::read(path).expect("a file"))).expect("an entry");
    Ok(Known { place, model, entry, compiled, expected })
}

fn cached(place: &TempDir, model: &Model) -> Result<Session> {
    Session::builder(model).threads(1).memory_limit(BUDGET).cache_dir(place.path().join("cache")).build()
}

fn outputs(session: &Session) -> Result<Vec<u8>> {
    let outputs = session.run(&[("x", numbers(&[3, 16], 3)?.into())])?;
    let mut bytes = Vec::new();
    for (_, value) in outputs.iter() {
        bytes.extend_from_slice(value.tensor()?.bytes().expect("numbers"));
    }
    Ok(bytes)
}

/// Changes a file as the bytes say, five for each change: a place, what, and by which value.
fn damage(file: &mut Vec<u8>, changes: &[u8]) {
    for [low, high, what, value, factor] in changes.as_chunks::<5>().0 {
        // An earlier change may have emptied the file, and a remainder by 0 panics.
        let at = usize::from(u16::from_le_bytes([*low, *high])) % file.len().max(1);
        // A shift by 64 or more would panic. Shifted values reach sizes near 2^64, where sums
        // overflow.
        let number = u64::from(*value).wrapping_mul(1 << (factor % 64));
        match what % 5 {
            0 => file.iter_mut().skip(at).take(1).for_each(|byte| *byte = *value),
            1 => file.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= value),
            2 => file.truncate(at),
            3 => file.extend(std::iter::repeat_n(*value, usize::from(*factor))),
            // A number of the header or of the table.
            _ => {
                let numbers = numbers_of(file);
                let at = numbers.get(at % numbers.len().max(1)).copied().unwrap_or(0);
                let place = file.iter_mut().skip(at).take(8);
                place.zip(number.to_le_bytes()).for_each(|(to, byte)| *to = byte);
            }
        }
    }
}

/// The number at this place.
fn number(file: &[u8], at: usize) -> Option<usize> {
    let bytes = file.get(at..at.checked_add(8)?)?;
    usize::try_from(u64::from_le_bytes(bytes.try_into().ok()?)).ok()
}

/// Where the table is.
fn table(file: &[u8]) -> Option<std::ops::Range<usize>> {
    // The header's numbers at 24 and 32 are the table's start and its count of records.
    let (start, count) = (number(file, 24)?, number(file, 32)?);
    let range = start..start.checked_add(count.checked_mul(RECORD)?)?;
    (range.end <= file.len()).then_some(range)
}

/// Where the numbers of the header and of the table are.
fn numbers_of(file: &[u8]) -> Vec<usize> {
    (0..HEADER).step_by(8).chain(table(file).into_iter().flat_map(|table| table.step_by(8))).collect()
}

/// Makes checksums right where what they are of is in the file.
fn mend(file: &mut [u8], fix: Fix) -> Option<()> {
    let table = table(file)?;
    for record in table.clone().step_by(RECORD).filter(|_| fix == Fix::All) {
        let (start, len) = (number(file, record)?, number(file, record + 8)?);
        let Some(blob) = start.checked_add(len).and_then(|end| file.get(start..end)) else { continue };
        let checksum = xxh3_64(blob).to_le_bytes();
        file.get_mut(record + 16..record + 24)?.copy_from_slice(&checksum);
    }
    let mut checksum = Xxh3::new();
    // The checksum covers the header's numbers behind the magic bytes, the key, and the table.
    checksum.update(file.get(8..HEADER - 8)?);
    checksum.update(file.get(HEADER..HEADER.checked_add(number(file, 16)?)?)?);
    checksum.update(file.get(table)?);
    file.get_mut(HEADER - 8..HEADER)?.copy_from_slice(&checksum.digest().to_le_bytes());
    Some(())
}

/// Puts a file in the place of another, which stays whole for whoever has mapped it.
fn replace(path: &Path, bytes: &[u8]) {
    // Removing the file keeps the mapping of an open session whole; a write into it would not.
    let _ = fs::remove_file(path);
    fs::write(path, bytes).expect("written");
}

/// A cache never does harm: what cannot be used is made again.
fn check_entry(known: &Known, bytes: &[u8], fix: Fix) {
    let (path, _) = &known.entry;
    replace(path, bytes);
    let found = cached(&known.place, &known.model).and_then(|session| outputs(&session));
    let found = found.expect("sessions do without a cache");
    // Whoever makes the checksums of blobs right decides what is computed.
    assert!(fix > Fix::Header || found == known.expected, "a damaged entry was used");
}

fn check_compiled(known: &Known, bytes: &[u8]) {
    let path = known.place.path().join("compiled");
    replace(&path, bytes);
    let session =
        Model::load(&path).and_then(|model| Session::builder(&model).threads(1).memory_limit(BUDGET).build());
    if let Err(problem) = session.and_then(|session| outputs(&session)) {
        // The checksums of a compiled model may be mended, so wrong numbers are allowed here, and
        // panics are not.
        assert!(!problem.to_string().contains("panicked"), "{problem}");
    }
}

fuzz_target!(|data: &[u8]| {
    static KNOWN: OnceLock<Known> = OnceLock::new();
    let known = KNOWN.get_or_init(|| known().expect("a model"));
    let Some((mode, rest)) = data.split_first() else { return };
    let (is_entry, is_raw) = (mode & 1 == 0, mode & 2 != 0);
    let fix = [Fix::None, Fix::Header, Fix::All, Fix::All][usize::from(mode >> 2 & 3)];
    let mut file = if is_entry { known.entry.1.clone() } else { known.compiled.clone() };
    if is_raw {
        file = rest.to_vec();
    } else {
        damage(&mut file, rest);
    }
    if fix > Fix::None {
        let _ = mend(&mut file, fix);
    }
    if is_entry {
        check_entry(known, &file, fix);
    } else {
        check_compiled(known, &file);
    }
});
