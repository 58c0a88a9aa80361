//! The compiled cache: the same bits, nothing packed again, and files that are damaged, stale or
//! not to be written do no harm.

use crate::support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ort_runtime::ep::{Claim, CompileCx, Device, DeviceInfo, Executable, Fingerprint, NodeView, provider};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder};
use ort_runtime::onnx::{ModelInfo, Source, Weights, save};
use ort_runtime::rewrite::Level;
use ort_runtime::tensor::{TensorMut, TensorView};
use ort_runtime::{Budget, DType, ErrorKind, Limits, Model, Result, Session, SessionBuilder};
use support::{branch, numbers};

/// Weights that are packed as they are, after folding, in a branch, by Winograd's transforms and
/// unaligned; constants that are only folded.
fn graph() -> Result<Graph> {
    let mut builder = GraphBuilder::new("layers");
    let x = builder.input("x", DType::F32, &["rows", "64"]);
    let weight = builder.constant(numbers(&[64, 96], 1)?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let parts = [2, 3].map(|seed| numbers(&[96, 64], seed).map(|part| builder.constant(part)));
    let [one, other] = parts;
    let folded = builder.node("Add", &[one?, other?], &[])?;
    let product = builder.node("MatMul", &[product, folded], &[])?;
    let parts = [4, 5].map(|seed| numbers(&[5, 64, 64], seed).map(|part| builder.constant(part)));
    let [one, other] = parts;
    let addend = builder.node("Mul", &[one?, other?], &[])?;
    let images = builder.node("Add", &[addend, product], &[])?;
    let axes = builder.constant(support::ints(&[0])?);
    let image = builder.node("Unsqueeze", &[images, axes], &[])?;
    let filters = builder.constant(numbers(&[16, 5, 3, 3], 6)?);
    let pads = [("pads", Attribute::Ints(vec![1; 4]))];
    let image = builder.node("Conv", &[image, filters], &pads)?;
    let filters = builder.constant(numbers(&[16, 16, 3, 3], 7)?);
    let image = builder.node("Conv", &[image, filters], &pads)?;
    let taken = builder.input("taken", DType::Bool, &[]);
    let weight = builder.constant(numbers(&[64, 32], 8)?);
    let then = branch("then_branch", image, |builder, value| {
        let weight = builder.constant(numbers(&[64, 32], 8)?);
        builder.node("MatMul", &[value, weight], &[])
    })?;
    let other = branch("else_branch", image, |builder, value| builder.node("Neg", &[value], &[]))?;
    let branches = builder.add(("", "If"), &[Some(taken)], &[], 1, vec![then, other])?;
    let last = builder.node("MatMul", &[image, weight], &[])?;
    builder.finish(&[branches[0], last])
}

/// A folder with the model as a file, and one for the cache.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Result<Place> {
        let place = Place(tempfile::tempdir().expect("a folder"));
        save(&graph()?, &ModelInfo::default(), place.file(), &Weights::Inside)?;
        Ok(place)
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("model.onnx")
    }

    fn cache(&self) -> PathBuf {
        self.0.path().join("cache")
    }

    /// The names in the cache's folder that end like this.
    fn cached(&self, ending: &str) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.cache()).expect("a folder");
        let files = files.map(|entry| entry.expect("an entry").path());
        files.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
    }

    /// The one entry.
    fn entry(&self) -> PathBuf {
        let [entry] = <[PathBuf; 1]>::try_from(self.cached(".compiled")).expect("one entry");
        entry
    }

    /// A builder on the model, loaded again.
    fn builder(&self) -> Result<SessionBuilder> {
        Ok(Session::builder(&Model::load(self.file())?).threads(2))
    }

    fn with_cache(&self) -> Result<SessionBuilder> {
        Ok(self.builder()?.cache_dir(self.cache()))
    }
}

/// The bytes of the outputs of a run.
fn bits(session: &Session) -> Result<Vec<Vec<u8>>> {
    let inputs = [
        ("x", numbers(&[64, 64], 3)?.into()),
        ("taken", ort_runtime::Tensor::from_bools(&[], &[true])?.into()),
    ];
    let outputs = session.run(&inputs)?;
    outputs.iter().map(|(_, value)| Ok(value.tensor()?.bytes().expect("numbers").to_vec())).collect()
}

/// Which file it is, so that a new one of the same name is another.
fn version(path: &Path) -> std::time::SystemTime {
    path.metadata().and_then(|metadata| metadata.modified()).expect("a time")
}

#[test]
fn the_bits_are_the_same_and_nothing_is_packed_again() -> Result<()> {
    let place = Place::new()?;
    for level in [Level::Disabled, Level::Basic, Level::Extended, Level::All] {
        let plain = place.builder()?.opt_level(level).build()?;
        let expected = bits(&plain)?;
        for round in 0..3 {
            let budget = Budget::new(None);
            let session = place.with_cache()?.opt_level(level).budget(&budget).build()?;
            if round > 0 {
                assert_eq!(budget.peak(), 0, "{level:?}: nothing is allocated for weights");
            }
            assert_eq!(bits(&session)?, expected, "{level:?}, round {round}");
            let memory = session.memory();
            assert_eq!((memory.packed, memory.weights), (0, plain.memory().weights));
            assert!(memory.cached >= plain.memory().packed, "{memory:?} beside {:?}", plain.memory());
        }
    }
    assert_eq!(place.cached(".compiled").len(), 4, "one for each level");
    assert!(place.cached(".unfinished").is_empty());
    Ok(())
}

/// The CPU, which packs a few bytes more for each node and counts how often.
struct Counting {
    cpu: Arc<dyn Device>,
    fingerprint: Option<[&'static str; 2]>,
    packed: AtomicUsize,
    /// What compiling a node takes.
    pause: Duration,
}

impl Counting {
    fn new(fingerprint: Option<[&'static str; 2]>) -> Result<Arc<Counting>> {
        Counting::slow(fingerprint, Duration::ZERO)
    }

    fn slow(fingerprint: Option<[&'static str; 2]>, pause: Duration) -> Result<Arc<Counting>> {
        let cpu = provider("cpu")?.open(0, &Default::default())?;
        Ok(Arc::new(Counting { cpu, fingerprint, packed: AtomicUsize::new(0), pause }))
    }
}

impl Device for Counting {
    fn info(&self) -> &DeviceInfo {
        self.cpu.info()
    }

    fn memory(&self) -> ort_runtime::DeviceId {
        self.cpu.memory()
    }

    fn allocator(&self) -> Arc<dyn ort_alloc::Allocator> {
        self.cpu.allocator()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.cpu.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        std::thread::sleep(self.pause);
        cx.pack(100, |bytes| {
            self.packed.fetch_add(1, Ordering::Relaxed);
            bytes.fill(1);
            Ok(())
        })?;
        self.cpu.compile(cx)
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        let [code, hardware] = self.fingerprint?.map(str::to_owned);
        Some(Fingerprint { code, hardware })
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        self.cpu.copy(from, to)
    }
}

#[test]
fn a_device_packs_once_for_each_version_of_its_code_and_hardware() -> Result<()> {
    let place = Place::new()?;
    let packed_on = |code, hardware| -> Result<usize> {
        let device = Counting::new(Some([code, hardware]))?;
        // Without rewrites nothing is folded, which would pack in sessions of its own.
        place.with_cache()?.device(device.clone()).opt_level(Level::Disabled).build()?;
        Ok(device.packed.load(Ordering::Relaxed))
    };
    let packed = |code| packed_on(code, "16 lanes");
    let first = packed("version 1")?;
    assert!(first > 5, "{first}");
    assert_eq!(packed("version 1")?, 0);
    let old = version(&place.entry());
    assert_eq!(packed("version 2")?, first);
    assert_ne!(version(&place.entry()), old, "the new entry takes the old one's place");
    assert_eq!((packed("version 2")?, packed("version 1")?), (0, first));
    // Machines that differ share a folder, and none replaces what the other has.
    assert_eq!(packed_on("version 1", "8 lanes")?, first);
    assert_eq!((packed("version 1")?, packed_on("version 1", "8 lanes")?), (0, 0));
    assert_eq!(place.cached(".compiled").len(), 2);
    let problem = place.with_cache()?.device(Counting::new(None)?).build().err().expect("it is refused");
    assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
    assert!(problem.to_string().contains("fingerprint"), "{problem}");
    Ok(())
}

/// A first load compiles twice, and has no more time for it.
#[test]
fn one_deadline_holds_for_the_whole_load() -> Result<()> {
    let place = Place::new()?;
    let builder = |device: &Arc<Counting>| -> Result<SessionBuilder> {
        Ok(place.builder()?.device(device.clone()).opt_level(Level::Disabled))
    };
    let fingerprint = Some(["version 1", "16 lanes"]);
    let quick = Counting::new(fingerprint)?;
    builder(&quick)?.build()?;
    let pause = Duration::from_millis(20);
    let one_pass = pause * u32::try_from(quick.packed.load(Ordering::Relaxed)).unwrap_or(1);
    let limits = Limits { deadline: Some(one_pass * 3 / 2), ..Limits::default() };
    let slow = Counting::slow(fingerprint, pause)?;
    let problem = builder(&slow)?.cache_dir(place.cache()).limits(limits).build().err().expect("two passes");
    assert_eq!(problem.kind(), ErrorKind::Cancelled, "{problem}");
    // No time at all is none for the files, either.
    let limits = Limits { deadline: Some(Duration::ZERO), ..limits };
    let problem = place.with_cache()?.limits(limits).build().err().expect("no time");
    assert_eq!(problem.kind(), ErrorKind::Cancelled, "{problem}");
    Ok(())
}

#[test]
fn an_entry_does_not_depend_on_threads() -> Result<()> {
    let place = Place::new()?;
    let written = |threads: usize| -> Result<Vec<u8>> {
        place.with_cache()?.threads(threads).build()?;
        let bytes = std::fs::read(place.entry()).expect("an entry");
        std::fs::remove_file(place.entry()).expect("removed");
        Ok(bytes)
    };
    let one = written(1)?;
    for threads in [2, 5] {
        assert!(written(threads)? == one, "{threads} threads");
    }
    Ok(())
}

/// The first byte from a place on that is no padding.
fn written_from(file: &[u8], place: usize) -> usize {
    place + file[place..].iter().position(|byte| *byte != 0).expect("not only padding")
}

#[test]
fn damaged_entries_are_written_anew() -> Result<()> {
    let place = Place::new()?;
    let session = place.with_cache()?.build()?;
    let expected = bits(&session)?;
    let path = place.entry();
    let whole = std::fs::read(&path).expect("an entry");
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        bytes
    };
    let blob = written_from(&whole, whole.len() / 2);
    let table: Vec<(&str, Vec<u8>)> = vec![
        ("no bytes", Vec::new()),
        ("text", b"not an entry".to_vec()),
        ("half", whole[..whole.len() / 2].to_vec()),
        ("a byte less", whole[..whole.len() - 1].to_vec()),
        ("a byte more", [&whole[..], &[0]].concat()),
        ("magic", flipped(0)),
        ("format", flipped(8)),
        ("length of the key", flipped(16)),
        ("key", flipped(70)),
        ("a large blob", flipped(blob)),
        ("the table", flipped(whole.len() - 20)),
        ("the model", std::fs::read(place.file()).expect("a model")),
    ];
    for (what, bytes) in table {
        // As renaming does; the entry in its place is mapped.
        std::fs::remove_file(&path).expect("removed");
        std::fs::write(&path, bytes).expect("written");
        let again = place.with_cache()?.build()?;
        assert_eq!(bits(&again)?, expected, "{what}");
        assert_eq!(again.memory().packed, 0, "{what}");
        assert!(std::fs::read(&path).expect("an entry") == whole, "{what}");
        let kept = version(&path);
        place.with_cache()?.build()?;
        assert_eq!(version(&path), kept, "{what}: the new entry is taken");
    }
    assert_eq!(bits(&session)?, expected, "what was mapped before stays");
    Ok(())
}

#[test]
fn entries_are_found_by_content() -> Result<()> {
    let place = Place::new()?;
    place.with_cache()?.build()?;
    let kept = version(&place.entry());
    let bytes = std::fs::read(place.file()).expect("a model");
    // Another file, and none, of the same bytes.
    let copy = place.0.path().join("copy.onnx");
    std::fs::write(&copy, &bytes).expect("a copy");
    let sources = [Model::load(&copy)?, Model::from_bytes(bytes.clone())?, Model::from_reader(&bytes[..])?];
    for model in &sources {
        let session = Session::builder(model).threads(2).cache_dir(place.cache()).build()?;
        assert_eq!((session.memory().packed, version(&place.entry())), (0, kept));
    }
    // The last bytes are an output's type: a name in the middle is one of a weight's numbers.
    let mut other = bytes;
    let middle = other.len() / 3;
    other[middle] ^= 1;
    Session::builder(&Model::from_bytes(other)?).threads(2).cache_dir(place.cache()).build()?;
    assert_eq!(place.cached(".compiled").len(), 2);
    Ok(())
}

/// Two biases of one shape, which kernels read as they lie in the file, wherever that is in memory.
#[test]
fn constants_are_not_confused_wherever_the_file_lies() -> Result<()> {
    let place = Place::new()?;
    let mut builder = GraphBuilder::new("biases");
    let x = builder.input("x", DType::F32, &["64"]);
    let mut sum = x;
    for seed in 1..9 {
        let bias = builder.constant(numbers(&[64], seed)?);
        let scaled = builder.node("Mul", &[sum, bias], &[])?;
        sum = builder.node("Add", &[scaled, x], &[])?;
    }
    save(&builder.finish(&[sum])?, &ModelInfo::default(), place.file(), &Weights::Inside)?;
    let run = |session: Session| -> Result<Vec<u8>> {
        let outputs = session.run(&[("x", numbers(&[64], 9)?.into())])?;
        Ok(outputs[0].1.tensor()?.bytes().expect("numbers").to_vec())
    };
    let expected = run(place.builder()?.build()?)?;
    let session = place.with_cache()?.build()?;
    assert_eq!(run(session)?, expected);
    let (path, kept) = (place.entry(), version(&place.entry()));
    let file = std::fs::read(place.file()).expect("a model");
    for offset in 0..16 {
        let bytes = bytes::Bytes::from([&vec![0; offset][..], &file].concat()).slice(offset..);
        let model = Model::from_bytes(bytes)?;
        let session = Session::builder(&model).threads(2).cache_dir(place.cache()).build()?;
        assert_eq!(run(session)?, expected, "at {offset}");
        assert_eq!(version(&path), kept, "at {offset}: the entry is taken");
        // What is compiled from there fits the file that it is in.
        Session::builder(&model).threads(2).save_compiled(compiled(&place))?;
        let session = Session::builder(&Model::load(compiled(&place))?).build()?;
        assert_eq!(session.memory().packed, 0, "at {offset}");
        assert_eq!(run(session)?, expected, "at {offset}, compiled");
    }
    Ok(())
}

#[test]
fn writers_at_once_leave_one_whole_entry() -> Result<()> {
    let place = Place::new()?;
    let expected = bits(&place.builder()?.build()?)?;
    for _ in 0..5 {
        std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..4).map(|_| scope.spawn(|| bits(&place.with_cache()?.build()?))).collect();
            for writer in writers {
                assert_eq!(writer.join().expect("no panic").expect("a result"), expected);
            }
        });
        let kept = version(&place.entry());
        assert!(place.cached(".unfinished").is_empty());
        assert_eq!(bits(&place.with_cache()?.build()?)?, expected);
        assert_eq!(version(&place.entry()), kept);
        std::fs::remove_file(place.entry()).expect("removed");
    }
    Ok(())
}

#[test]
fn what_cannot_be_a_cache_is_an_error() -> Result<()> {
    let place = Place::new()?;
    let file = place.file();
    let by_hand = Session::builder(&Model::from_graph(graph()?)).cache_dir(place.cache());
    let table = [
        (place.builder()?.cache_dir(&file), ErrorKind::InvalidArgument, "is a file, expected a folder"),
        (place.builder()?.cache_dir(file.join("below")), ErrorKind::NoSuchFile, "cannot be created"),
        (place.builder()?.cache_dir(""), ErrorKind::NoSuchFile, "cannot be created"),
        (by_hand, ErrorKind::InvalidArgument, "save the graph"),
    ];
    for (builder, kind, words) in table {
        let problem = builder.build().err().expect("it is refused");
        assert_eq!(problem.kind(), kind, "{problem}");
        assert!(problem.to_string().contains(words), "{problem}");
    }
    Ok(())
}

/// Folders that exist but take no files: weights stay in memory.
#[test]
fn what_cannot_be_written_stays_in_memory() -> Result<()> {
    let place = Place::new()?;
    let plain = place.builder()?.build()?;
    let expected = bits(&plain)?;
    place.with_cache()?.build()?;
    let entry = place.entry();
    std::fs::remove_file(&entry).expect("removed");
    // Nothing can take the name of a folder that is not empty.
    std::fs::create_dir_all(entry.join("full")).expect("a folder");
    let mut folders = vec![place.cache()];
    if cfg!(target_os = "linux") {
        folders.push(PathBuf::from("/proc/self"));
    }
    for folder in folders {
        let session = place.builder()?.cache_dir(&folder).build()?;
        assert_eq!(bits(&session)?, expected, "{}", folder.display());
        assert_eq!((session.memory().packed, session.memory().cached), (plain.memory().packed, 0));
    }
    assert!(place.cached(".unfinished").is_empty());
    Ok(())
}

#[test]
fn mapped_weights_count_against_no_limit() -> Result<()> {
    let place = Place::new()?;
    let plain = place.builder()?.build()?;
    let expected = bits(&plain)?;
    let run = plain.plan(&[("rows", 64)])?.planned_bytes;
    // Written without a limit, or with one that holds what is folded and packed.
    let packed = plain.memory().packed;
    for limit in [None, Some(plain.memory().weights + packed)] {
        let builder = place.with_cache()?;
        let session = match limit {
            None => builder.build()?,
            Some(limit) => builder.memory_limit(limit).build()?,
        };
        assert!(
            session.memory().packed == 0 && session.memory().cached >= packed,
            "{limit:?}: {:?}",
            session.memory()
        );
        let bounded = place.with_cache()?.memory_limit(run + 64).build()?;
        assert_eq!(bits(&bounded)?, expected);
        let report = bounded.plan(&[("rows", 64)])?;
        let bytes = |name: &str| {
            report.kinds.iter().filter(|kind| kind.kind.name() == name).map(|kind| kind.bytes).sum::<usize>()
        };
        let cached = bounded.memory().cached;
        assert_eq!(
            (bytes("weights_packed"), bytes("weights_streamed"), bytes("weights_cached")),
            (0, 0, cached)
        );
        std::fs::remove_file(place.entry()).expect("removed");
    }
    // A limit that holds nothing is refused as without a cache, and no entry is left.
    let problems =
        [place.with_cache()?, place.builder()?].map(|builder| builder.memory_limit(1000).build().err());
    let [cached, plain] = problems.map(|problem| problem.expect("it does not fit"));
    assert_eq!((cached.kind(), cached.to_string()), (ErrorKind::OutOfMemory, plain.to_string()));
    assert!(place.cached(".compiled").is_empty() && place.cached(".unfinished").is_empty());
    Ok(())
}

#[test]
#[cfg(unix)]
fn a_session_outlives_its_entry() -> Result<()> {
    let place = Place::new()?;
    let session = place.with_cache()?.build()?;
    let expected = bits(&session)?;
    std::fs::remove_dir_all(place.cache()).expect("removed");
    assert_eq!(bits(&session)?, expected);
    Ok(())
}

/// Where a compiled model goes in these tests.
fn compiled(place: &Place) -> PathBuf {
    place.0.path().join("model.compiled")
}

#[test]
fn a_compiled_model_is_all_that_a_session_needs() -> Result<()> {
    let place = Place::new()?;
    save(&graph()?, &ModelInfo::default(), place.file(), &Weights::Beside { least: 100 })?;
    let plain = place.builder()?.build()?;
    let expected = bits(&plain)?;
    place.builder()?.save_compiled(compiled(&place))?;
    // Alone in another folder.
    let elsewhere = tempfile::tempdir().expect("a folder");
    let path = elsewhere.path().join("alone");
    std::fs::rename(compiled(&place), &path).expect("moved");
    drop(place);
    let model = Model::load(&path)?;
    let budget = Budget::new(None);
    let session = Session::builder(&model).budget(&budget).build()?;
    assert_eq!((session.memory().packed, budget.peak()), (0, 0));
    assert_eq!(bits(&session)?, expected);
    assert!(session.memory().cached >= plain.memory().packed);
    assert_eq!(session.memory().weights, plain.memory().weights);
    // Other settings pack the weights that are in the file.
    let other = Session::builder(&model).opt_level(Level::Disabled).build()?;
    assert!(other.memory().packed > 0 && other.memory().cached == 0);
    bits(&other)?;
    // Compiled again it is the same file.
    let again = elsewhere.path().join("again");
    Session::builder(&model).threads(1).save_compiled(&again)?;
    assert!(std::fs::read(&again).expect("a file") == std::fs::read(&path).expect("a file"));
    Ok(())
}

#[test]
fn damaged_compiled_models_are_packed_again_or_refused() -> Result<()> {
    let place = Place::new()?;
    let expected = bits(&place.builder()?.build()?)?;
    let path = compiled(&place);
    place.builder()?.save_compiled(&path)?;
    let whole = std::fs::read(&path).expect("a file");
    let model = std::fs::read(place.file()).expect("a model");
    let start = whole.windows(model.len()).position(|part| part == model).expect("the model is in it");
    let packed = written_from(&whole, start + model.len() + 5000);
    let label = whole[..start].iter().rposition(|byte| *byte != 0).expect("a label");
    for (what, flipped, fits) in [
        ("packed weights", vec![packed], true),
        ("header", vec![50], false),
        ("key", vec![70], false),
        ("label of the model", vec![label], false),
        ("packed weights and the model", vec![packed, start + model.len() / 3], false),
    ] {
        let mut damaged = whole.clone();
        flipped.into_iter().for_each(|at| damaged[at] ^= 2);
        std::fs::remove_file(&path).expect("removed");
        std::fs::write(&path, damaged).expect("written");
        let session = Model::load(&path).and_then(|model| Session::builder(&model).threads(2).build());
        match (session, fits) {
            (Ok(session), true) => {
                assert!(session.memory().packed > 0, "{what}");
                assert_eq!(bits(&session)?, expected, "{what}");
            }
            (Err(problem), false) => {
                assert_eq!(problem.kind(), ErrorKind::NoModel, "{what}: {problem}");
                assert!(problem.to_string().contains("compile the model again"), "{what}: {problem}");
            }
            (Ok(_), false) => panic!("{what}: taken"),
            (Err(problem), true) => panic!("{what}: {problem}"),
        }
    }
    Ok(())
}

/// A compiled model of one model that says that it is another, and one whose model was damaged
/// beside packed weights that fit.
#[test]
fn a_compiled_model_is_not_believed_what_model_it_is() -> Result<()> {
    let place = Place::new()?;
    let expected = bits(&place.builder()?.build()?)?;
    let path = compiled(&place);
    place.builder()?.save_compiled(&path)?;
    let whole = std::fs::read(&path).expect("a file");
    let model = std::fs::read(place.file()).expect("a model");
    let start = whole.windows(model.len()).position(|part| part == model).expect("the model is in it");
    // One bit of a weight, with the checksum of the table left as it is: as damage and as malice it
    // is the hash that tells.
    let mut false_one = whole;
    false_one[start + model.len() / 3] ^= 1;
    std::fs::remove_file(&path).expect("removed");
    std::fs::write(&path, false_one).expect("written");
    let problem = Model::load(&path).map(drop).expect_err("it is damaged");
    assert_eq!(problem.kind(), ErrorKind::NoModel, "{problem}");
    assert!(problem.to_string().contains("compile the model again"), "{problem}");
    assert_eq!(bits(&place.with_cache()?.build()?)?, expected);
    Ok(())
}

#[test]
fn a_compiled_model_replaces_no_file_of_the_model() -> Result<()> {
    let place = Place::new()?;
    save(&graph()?, &ModelInfo::default(), place.file(), &Weights::Beside { least: 100 })?;
    let files = || {
        let files =
            std::fs::read_dir(place.0.path()).expect("a folder").map(|entry| entry.expect("an entry"));
        let mut files: Vec<_> = files.map(|file| (file.path(), std::fs::read(file.path()).ok())).collect();
        files.sort();
        files
    };
    let link = place.0.path().join("link");
    std::fs::hard_link(place.file(), &link).expect("a link");
    let before = files();
    assert_eq!(before.len(), 3, "the model, its data and the link");
    for path in before.iter().map(|(path, _)| path.as_path()) {
        let problem = place.builder()?.save_compiled(path).expect_err("it is refused");
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument, "{problem}");
        assert!(problem.to_string().contains("give another file"), "{problem}");
    }
    let problem = place.builder()?.save_compiled(place.0.path()).expect_err("it is refused");
    assert!(problem.to_string().contains("it is a folder"), "{problem}");
    place.builder()?.save_compiled(Path::new("/dev/null"))?;
    assert!(files() == before, "nothing changes");
    Ok(())
}

#[test]
fn what_is_no_compiled_model_says_what_to_do() -> Result<()> {
    let place = Place::new()?;
    place.with_cache()?.build()?;
    let path = compiled(&place);
    place.builder()?.save_compiled(&path)?;
    let bytes = std::fs::read(&path).expect("a file");
    let read = ort_runtime::onnx::FileAccess { map: false, ..Default::default() };
    let model = Model::load(place.file())?;
    let table = [
        (Model::load(place.entry()).map(drop), "without the model"),
        (Model::from_bytes(bytes).map(drop), "load it from its file"),
        (Source::open(&path, read).map(drop), "must be mapped, not read"),
        (Session::builder(&Model::from_graph(graph()?)).save_compiled(&path), "save the graph"),
        (Session::builder(&model).save_compiled(path.join("below")), "check that its folder exists"),
    ];
    for (outcome, words) in table {
        let problem = outcome.expect_err("it is refused");
        assert!(problem.to_string().contains(words), "{problem}");
    }
    let kept = Model::load(&path)?;
    assert_eq!(Session::builder(&kept).build()?.memory().packed, 0, "what was there before stays");
    Ok(())
}
