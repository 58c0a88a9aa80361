//! Pipelines across devices and processes: what a folder keeps of a first run is compiled before
//! the next one's, and damage is never used.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Graph, GraphBuilder};
use ort_core::onnx::{ModelInfo, Weights, save};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_wgpu::{Counters, WgpuDevice};
use support::{cpu, numbers, open};

/// Names the folder to the second process.
const FOLDER: &str = "ORT_TEST_PIPELINE_CACHE";

/// `exp` of the cumulative sums of x along an axis that only the run tells: the program
/// cannot be compiled ahead.
fn sums(op: &str) -> Result<Graph> {
    let mut builder = GraphBuilder::new("sums");
    let x = builder.input("x", DType::F32, &["rows", "64"]);
    let axis = builder.input("axis", DType::I64, &[]);
    let sums = builder.node("CumSum", &[x, axis], &[])?;
    let result = builder.node(op, &[sums], &[])?;
    builder.finish(&[result])
}

fn opened(folder: &Path) -> Option<Arc<WgpuDevice>> {
    open(&[("pipeline_cache", &folder.to_string_lossy())])
}

fn built(device: &Arc<WgpuDevice>, op: &str) -> Result<Session> {
    Session::builder(&Model::from_graph(sums(op)?)).device(device.clone()).batch_split(false).build()
}

/// Runs along the last axis, and holds the first row against the host's own arithmetic.
fn run(session: &Session, result: fn(f32) -> f32) -> Result<()> {
    let x: Vec<f32> = numbers(3 * 64, 1).iter().map(|x| x / 64.0).collect();
    let axis: Value = Tensor::from_slice(&[], &[1i64])?.into();
    let outputs = session.run(&[("x", Tensor::from_slice(&[3, 64], &x)?.into()), ("axis", axis)])?;
    let outputs = outputs[0].1.tensor()?.to_vec::<f32>()?;
    let mut sum = 0.0;
    for (x, output) in x.iter().zip(outputs).take(64) {
        sum += x;
        assert!((output - result(sum)).abs() < 1e-5, "{sum}: {output}");
    }
    Ok(())
}

/// What a device with this folder has made once the session is built, and after a first run.
fn first_run(folder: &Path) -> Result<Option<[Counters; 2]>> {
    let Some(device) = opened(folder) else { return Ok(None) };
    let session = built(&device, "Exp")?;
    let ready = device.counters();
    run(&session, f32::exp)?;
    Ok(Some([ready, device.counters()]))
}

/// The pipelines, those compiled ahead of the run, and those of the list.
fn pipelines(counters: Counters) -> [usize; 3] {
    [counters.pipelines, counters.pipelines_ahead, counters.pipelines_listed]
}

/// The one file of a kind in a folder.
fn file(folder: &Path, kind: &str) -> PathBuf {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries.filter(|path| path.extension().is_some_and(|it| it == kind)).collect();
    assert_eq!(found.len(), 1, "{kind}: {found:?}");
    found.remove(0)
}

#[test]
fn what_a_first_device_took_is_compiled_before_the_first_run_of_a_second() -> Result<()> {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("made");
    let Some([_, first]) = first_run(&folder)? else { return Ok(()) };
    // The exponential is foreseen, the sums are not.
    assert_eq!((first.pipelines, first.pipelines_listed), (2, 0));
    assert!(first.pipelines_ahead < 2, "{first:?}");
    let list = file(&folder, "programs");
    let written = || std::fs::metadata(&list).and_then(|file| file.modified()).unwrap();
    let first_written = written();
    for _ in 0..2 {
        let [ready, after] = first_run(&folder)?.unwrap();
        assert_eq!(pipelines(ready), [2, 2, 2]);
        assert_eq!(pipelines(after), [2, 2, 2]);
    }
    assert_eq!(written(), first_written, "what is known is not written again");
    Ok(())
}

#[test]
fn a_second_process_compiles_nothing_in_its_first_run() -> Result<()> {
    if let Some(folder) = std::env::var_os(FOLDER) {
        let [ready, after] = first_run(Path::new(&folder))?.expect("the first process had an adapter");
        assert_eq!((pipelines(ready), pipelines(after)), ([2, 2, 2], [2, 2, 2]));
        return Ok(());
    }
    let place = tempfile::tempdir().unwrap();
    if first_run(place.path())?.is_none() {
        return Ok(());
    }
    let own = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(own);
    let name = "a_second_process_compiles_nothing_in_its_first_run";
    let output = command.args(["--exact", name, "--nocapture"]).env(FOLDER, place.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    Ok(())
}

#[test]
fn the_compiled_cache_of_a_session_keeps_them_too() -> Result<()> {
    let place = tempfile::tempdir().unwrap();
    let (path, folder) = (place.path().join("sums.onnx"), place.path().join("cache"));
    save(&sums("Exp")?, &ModelInfo::default(), &path, &Weights::Inside)?;
    for expected in [0, 2] {
        let Some(device) = open(&[]) else { return Ok(()) };
        let builder = Session::builder(&Model::load(&path)?).device(device.clone()).device(cpu()?);
        let session = builder.cache_dir(&folder).build()?;
        assert_eq!(device.counters().pipelines_listed, expected);
        run(&session, f32::exp)?;
        assert_eq!(device.counters().pipelines, 2);
        file(&folder, "programs");
        file(&folder, "compiled");
    }
    // Without the folder there is no list.
    let Some(device) = open(&[]) else { return Ok(()) };
    run(&built(&device, "Exp")?, f32::exp)?;
    assert_eq!(device.counters().pipelines_listed, 0);
    Ok(())
}

#[test]
fn damaged_and_foreign_files_are_refused_and_written_anew() -> Result<()> {
    let (place, foreign) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    if first_run(place.path())?.is_none() {
        return Ok(());
    }
    let path = file(place.path(), "programs");
    let whole = std::fs::read(&path).unwrap();
    let with_limits = open(&[("limits", "minimum"), ("pipeline_cache", &foreign.path().to_string_lossy())]);
    run(&built(&with_limits.unwrap(), "Exp")?, f32::exp)?;
    let of_others = file(foreign.path(), "programs");
    assert_ne!(of_others.file_name(), path.file_name(), "other limits have a file of their own");
    let text = whole.windows(4).position(|bytes| bytes == b"@com").unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let cases = [
        ("a changed text", flipped(text)),
        ("a changed header", flipped(9)),
        ("a changed table", flipped(whole.len() - 1)),
        ("half a file", whole[..whole.len() / 2].to_vec()),
        ("no bytes", Vec::new()),
        ("something else", b"a text".repeat(1000)),
        ("the file of another device", std::fs::read(of_others).unwrap()),
    ];
    for (what, bytes) in cases {
        std::fs::write(&path, bytes).unwrap();
        let [ready, after] = first_run(place.path())?.unwrap();
        assert_eq!((ready.pipelines_listed, after.pipelines), (0, 2), "{what}");
        assert_eq!(std::fs::read(&path).unwrap(), whole, "{what}");
        assert_eq!(pipelines(first_run(place.path())?.unwrap()[0]), [2, 2, 2], "{what}");
    }
    Ok(())
}

#[test]
fn devices_in_turn_add_to_each_other_and_writers_at_once_leave_a_whole_file() -> Result<()> {
    let place = tempfile::tempdir().unwrap();
    let models: [(&str, fn(f32) -> f32); 2] = [("Exp", f32::exp), ("Neg", |x| -x)];
    let each = |(op, result): (&str, fn(f32) -> f32)| -> Result<Option<usize>> {
        let Some(device) = opened(place.path()) else { return Ok(None) };
        run(&built(&device, op)?, result)?;
        Ok(Some(device.counters().pipelines_listed))
    };
    // The sums of the second model are those of the first.
    for (model, listed) in models.into_iter().chain(models).zip([0, 1, 2, 2]) {
        match each(model)? {
            None => return Ok(()),
            Some(found) => assert_eq!(found, listed, "{}", model.0),
        }
    }
    for _ in 0..4 {
        std::fs::remove_file(file(place.path(), "programs")).unwrap();
        std::thread::scope(|scope| {
            let threads = models.map(|model| scope.spawn(move || each(model)));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap().map(drop))
        })?;
        let left = std::fs::read_dir(place.path()).unwrap().count();
        assert!(left <= 2, "{left} files: the list, and the driver's where it has one");
        // The sums are in the list of either.
        assert!(each(models[0])? >= Some(1));
    }
    Ok(())
}

#[test]
fn a_folder_that_cannot_be_is_refused_and_one_that_cannot_be_written_is_not() -> Result<()> {
    let place = tempfile::tempdir().unwrap();
    if first_run(place.path())?.is_none() {
        return Ok(());
    }
    let path = file(place.path(), "programs");
    let options = [("pipeline_cache".to_owned(), path.to_string_lossy().into_owned())].into();
    let problem = WgpuDevice::open(0, &options).err().map(|problem| problem.to_string());
    assert!(problem.as_ref().is_some_and(|problem| problem.contains("is a file")), "{problem:?}");
    // In the place of the file stands what is none.
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let [_, after] = first_run(place.path())?.unwrap();
    assert_eq!((after.pipelines, after.pipelines_listed), (2, 0));
    Ok(())
}
