//! Provider libraries: shared libraries loaded at run time that implement the C ABI of
//! [`abi::tables`](super::abi::tables).
//!
//! A loaded library is never unloaded. So devices, kernels and buffers never outlive their code,
//! and neither do threads and thread-local destructors that the library created on its own.

mod device;
mod elf;
mod host;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::mem::{MaybeUninit, offset_of};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::abi::encode::NodeRecords;
use super::abi::tables::{
    ORT_PROVIDER_ABI_VERSION, ORT_PROVIDER_SYMBOL, OrtProviderEntry, OrtProviderOption, OrtProviderTable,
};
use super::{Device, DeviceInfo, ExecutionProvider, ProviderOptions};
use crate::{Result, Within, ensure, error};
use device::LibraryDevice;
pub use elf::check_library;
use host::{Facts, HOST, c_text, call};

/// The environment variable with the folders to search for provider libraries, separated as in
/// `PATH`.
pub const PROVIDER_PATH: &str = "ORT_PROVIDER_PATH";

/// Sanity limit on the device count that a library reports.
const MOST_DEVICES: u32 = 1 << 10;

/// Finds a provider by library path, or by name among the libraries in the folders of
/// [`PROVIDER_PATH`].
pub(super) fn find(name: &str) -> Option<Result<&'static dyn ExecutionProvider>> {
    if is_path(name) {
        return Some(load_provider(Path::new(name)));
    }
    // A broken library must not hide a good one; `provider` lists the errors if nothing matches.
    let providers = provider_libraries().into_iter().filter_map(|(_, provider)| provider.ok());
    providers.into_iter().find(|provider| provider.name() == name).map(Ok)
}

/// Whether a provider name is a library path.
fn is_path(name: &str) -> bool {
    let suffix = std::env::consts::DLL_SUFFIX;
    name.contains(['/', std::path::MAIN_SEPARATOR]) || (name.ends_with(suffix) && name != suffix)
}

/// Loads the provider library at `path`, once per process.
///
/// # Errors
///
/// The file does not exist, it is not a shared library for this machine or exports no provider, or
/// its ABI version differs.
///
/// ```
/// use std::path::Path;
///
/// let problem = ort_core::ep::load_provider(Path::new("missing/libnpu.so")).err();
/// assert!(problem.is_some_and(|problem| problem.to_string().contains("missing/libnpu.so")));
/// ```
pub fn load_provider(path: &Path) -> Result<&'static dyn ExecutionProvider> {
    static LOADED: Mutex<BTreeMap<PathBuf, &'static LibraryProvider>> = Mutex::new(BTreeMap::new());
    let place = || format!("provider library {}", path.display());
    // Canonical, so that two paths to one file share a provider.
    let absolute = path
        .canonicalize()
        .map_err(|problem| error!(NoSuchFile, "{problem}").help("check the path"))
        .within(place)?;
    // Held while loading, so that no other thread loads the same library.
    let mut loaded = LOADED.lock();
    if let Some(known) = loaded.get(&absolute) {
        return Ok(*known);
    }
    let provider: &'static LibraryProvider = Box::leak(Box::new(load(&absolute).within(place)?));
    tracing::info!(library = %absolute.display(), provider = provider.name, version = provider.version, "loaded");
    loaded.insert(absolute, provider);
    Ok(provider)
}

/// Lists the libraries in the folders of [`PROVIDER_PATH`], by folder and then by file name, each
/// with its provider or the error.
pub fn provider_libraries() -> Vec<(PathBuf, Result<&'static dyn ExecutionProvider>)> {
    let Some(folders) = std::env::var_os(PROVIDER_PATH) else { return Vec::new() };
    let mut found = Vec::new();
    for folder in std::env::split_paths(&folders).filter(|folder| !folder.as_os_str().is_empty()) {
        match libraries_in(&folder) {
            Ok(files) => found.extend(files.into_iter().map(|file| (file.clone(), load_provider(&file)))),
            Err(problem) => found.push((folder, Err(problem))),
        }
    }
    found
}

fn libraries_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let unread = |problem: std::io::Error| {
        error!(NoSuchFile, "folder {} of {PROVIDER_PATH}: {problem}", folder.display())
    };
    let entries = std::fs::read_dir(folder).map_err(unread)?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(unread)?.path();
        let is_library = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| is_path(name) && path.is_file());
        files.extend(is_library.then_some(path));
    }
    files.sort();
    Ok(files)
}

fn load(path: &Path) -> Result<LibraryProvider> {
    let advice =
        "a provider library is a shared library for this machine that exports `ort_provider`: ort_provider.h";
    // The system's loader may crash on a truncated file, so check it first.
    check_library(path)?;
    // SAFETY: loading runs the library's initializers. The user asked for this file, by name or in
    // a folder of `PROVIDER_PATH`, and `check_library` found it complete.
    let library = unsafe { libloading::Library::new(path) }
        .map_err(|problem| error!(EpFail, "it cannot be loaded: {problem}").help(advice))?;
    // SAFETY: the ABI fixes the type of this symbol.
    let entry = unsafe { library.get::<OrtProviderEntry>(ORT_PROVIDER_SYMBOL.as_bytes()) };
    let entry = *entry.map_err(|_| {
        error!(EpFail, "it has no symbol {ORT_PROVIDER_SYMBOL}: it is not a provider library").help(advice)
    })?;
    // SAFETY: called with the type that the ABI fixes; `HOST` is a static.
    let table = unsafe { entry(ORT_PROVIDER_ABI_VERSION, &HOST.0) };
    // SAFETY: by the ABI, the library's table is null or valid and immutable while the library is
    // loaded, which is forever.
    let table = unsafe { read_table(table) }?;
    let (name, version) = names(&table)?;
    Ok(LibraryProvider {
        table: Box::leak(Box::new(table)),
        name,
        version,
        path: path.to_owned(),
        _library: library,
    })
}

/// Reads a library's table after a check of its version and size.
///
/// # Safety
///
/// `table` is null, or points to a readable table that starts with `size` and `abi_version`; for
/// this version, with at least `size` bytes.
unsafe fn read_table(table: *const OrtProviderTable) -> Result<OrtProviderTable> {
    ensure!(!table.is_null(), EpFail, "it returns no function table: it has no provider");
    // SAFETY: not null, as checked above. These two fields come first in every ABI version.
    let (size, version) =
        unsafe { ((&raw const (*table).size).read(), (&raw const (*table).abi_version).read()) };
    ensure!(
        version == ORT_PROVIDER_ABI_VERSION,
        EpFail,
        help = "use a build of the library for this version",
        "its interface version is {version}, expected {ORT_PROVIDER_ABI_VERSION}"
    );
    // The fields from here on were added after the first release of this version, so older
    // libraries lack them.
    let least = offset_of!(OrtProviderTable, prefers_channels_last);
    ensure!(
        size >= least,
        EpFail,
        help = "the library sets `size` of its table to the bytes of OrtProviderTable",
        "its table of functions has {size} bytes, expected at least {least}"
    );
    let mut known = MaybeUninit::<OrtProviderTable>::zeroed();
    // SAFETY: both sides have at least `size.min(…)` bytes. Every field is an integer, a raw
    // pointer or an optional function pointer, for which zero is valid. Missing functions become
    // `None`.
    Ok(unsafe {
        known.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(table.cast(), size.min(size_of_val(&known)));
        known.assume_init()
    })
}

/// Reads the provider's name and version, which live as long as the library: forever. Also checks
/// that the required functions are present.
fn names(table: &OrtProviderTable) -> Result<(&'static str, &'static str)> {
    let read = |field: &str, pointer: *const std::ffi::c_char| {
        ensure!(!pointer.is_null(), EpFail, "it returns no {field}");
        // SAFETY: not null, as checked above. By the ABI, it is a NUL-terminated string that never
        // changes.
        let text = unsafe { CStr::from_ptr::<'static>(pointer) };
        text.to_str().map_err(|problem| error!(EpFail, "its {field} is not UTF-8: {problem}"))
    };
    let (name, version) = (read("name", table.name)?, read("version", table.version)?);
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    ensure!(is_name, EpFail, "its name is '{name}', expected letters, digits, '-' and '_' only");
    let required = [
        ("device_count", table.device_count.is_some(), offset_of!(OrtProviderTable, device_count)),
        ("device_info", table.device_info.is_some(), offset_of!(OrtProviderTable, device_info)),
        ("open", table.open.is_some(), offset_of!(OrtProviderTable, open)),
        ("close", table.close.is_some(), offset_of!(OrtProviderTable, close)),
        ("claim", table.claim.is_some(), offset_of!(OrtProviderTable, claim)),
        ("compile", table.compile.is_some(), offset_of!(OrtProviderTable, compile)),
        ("run", table.run.is_some(), offset_of!(OrtProviderTable, run)),
        ("release_kernel", table.release_kernel.is_some(), offset_of!(OrtProviderTable, release_kernel)),
    ];
    match required.iter().find(|(_, is_there, _)| !is_there) {
        None => Ok((name, version)),
        Some((missing, _, offset)) => {
            Err(error!(EpFail, "its table of functions has no '{missing}' at byte {offset}"))
        }
    }
}

/// The provider of a loaded library.
struct LibraryProvider {
    table: &'static OrtProviderTable,
    name: &'static str,
    version: &'static str,
    path: PathBuf,
    /// Keeps the library loaded: forever, because `load_provider` leaks this struct.
    _library: libloading::Library,
}

// SAFETY: by the ABI, the functions of the table may be called from any thread, and its strings
// never change.
unsafe impl Send for LibraryProvider {}
// SAFETY: as for `Send`.
unsafe impl Sync for LibraryProvider {}

impl ExecutionProvider for LibraryProvider {
    fn name(&self) -> &'static str {
        self.name
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let mut count = 0;
        // SAFETY: `count` and the report live through the call.
        call(|report| unsafe { Some((self.table.device_count?)(&mut count, report)) })?;
        ensure!(count <= MOST_DEVICES, EpFail, "it reports {count} devices, expected at most {MOST_DEVICES}");
        (0..count).map(|index| self.device_info(index)).collect()
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        let index =
            u32::try_from(index).map_err(|_| error!(InvalidArgument, "there is no device {index}"))?;
        let info = self.device_info(index)?;
        let mut texts = Vec::with_capacity(options.len());
        for (name, value) in options {
            texts.push((c_text("option", name)?, c_text("option", value)?));
        }
        let given = texts.iter();
        let given =
            given.map(|(name, value)| OrtProviderOption { name: name.as_ptr(), value: value.as_ptr() });
        let given: Vec<OrtProviderOption> = given.collect();
        let (mut device, mut on_host) = (std::ptr::null_mut(), 0);
        call(|report| {
            let open = self.table.open?;
            // SAFETY: the options and the out parameters live through the call.
            Some(unsafe { open(index, given.as_ptr(), given.len(), &mut device, &mut on_host, report) })
        })?;
        Ok(LibraryDevice::new(self.table, device, info, on_host != 0)?)
    }
}

impl LibraryProvider {
    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        let mut facts = Facts::default();
        let mut info = facts.record();
        // SAFETY: the record and the facts that it points to live through the call.
        call(|report| unsafe { Some((self.table.device_info?)(index, &mut info, report)) })?;
        let memory_bytes = Some(info.memory_bytes).filter(|bytes| *bytes > 0);
        let mut facts = facts.list;
        // The ABI reports the device's name as the fact `name`.
        let own_name = facts.iter().position(|(name, _)| name == "name").map(|place| facts.remove(place).1);
        facts.push(("library".to_owned(), format!("{} {}", self.path.display(), self.version)));
        let name = own_name.ok_or_else(|| error!(EpFail, "device {index} of {} has no name", self.name))?;
        Ok(DeviceInfo { provider: self.name, name, memory_bytes, facts })
    }
}
