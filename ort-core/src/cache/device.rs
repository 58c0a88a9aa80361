//! Storage for device-private files in the compile cache: files of blobs like entries, but read
//! into memory instead of mapped.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use ort_alloc::open_regular;

use super::entry::blobs_of;
use super::key::{Folder, Key};
use crate::Result;

/// What a device's packed weights depend on, each as one line of text.
///
/// ```
/// use ort_core::ep::Fingerprint;
///
/// let own = Fingerprint { code: "1.0".to_owned(), hardware: "16 lanes".to_owned() };
/// assert_ne!(own, Fingerprint { hardware: "8 lanes".to_owned(), ..own.clone() });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// The version of the code. A new version overwrites the cache entry of another version.
    pub code: String,
    /// The hardware found. Machines with different hardware have separate cache entries.
    pub hardware: String,
}

/// The largest file that is read. Device files are small compared to weights.
const MOST_BYTES: u64 = 1 << 30;

/// A folder in which a device stores files of its own, beside the entries of the compile cache.
///
/// A file has a kind, which is its extension, and a fingerprint. `hardware` determines its name; a
/// file of another `code` is refused and later overwritten. Files are written atomically, and of
/// two writers the last one wins. The bytes returned are private to this process, so no one can
/// change them after the checksum test. Checksums detect corruption, not attacks: whoever may write
/// to the folder decides what the device is given.
///
/// ```
/// use ort_core::ep::{DeviceCache, Fingerprint};
///
/// # let place = tempfile::tempdir()?;
/// # let folder = place.path();
/// let cache = DeviceCache::open(folder)?;
/// let made_for = Fingerprint { code: "1.0".to_owned(), hardware: "an adapter".to_owned() };
/// cache.write("programs", &made_for, &[b"one", b"two"])?;
/// let blobs = cache.read("programs", &made_for)?;
/// assert_eq!(blobs.as_deref(), Some(&[b"one"[..].into(), b"two"[..].into()][..]));
///
/// let newer = Fingerprint { code: "2.0".to_owned(), ..made_for };
/// assert!(cache.read("programs", &newer).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceCache(Folder);

impl DeviceCache {
    /// Opens a folder, creating it if it is missing.
    ///
    /// # Errors
    ///
    /// The path is a file, or the folder cannot be created.
    pub fn open(path: &Path) -> Result<DeviceCache> {
        Folder::open(path).map(DeviceCache)
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns the path of the file of a kind and fingerprint.
    pub fn place(&self, kind: &str, made_for: &Fingerprint) -> PathBuf {
        self.0.path().join(key(made_for).file_name(kind))
    }

    /// Reads the blobs of the file of a kind and fingerprint. Returns `None` if there is no such
    /// file.
    ///
    /// # Errors
    ///
    /// The reason why the file is unusable: it is corrupt, of other code, or unreadable.
    pub fn read(&self, kind: &str, made_for: &Fingerprint) -> Result<Option<Vec<Bytes>>, String> {
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            // Read one byte beyond the limit, to recognize a larger file.
            open_regular(&self.place(kind, made_for))?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = match read() {
            Ok(bytes) => bytes,
            Err(problem) if problem.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(problem) => return Err(problem.to_string()),
        };
        if bytes.len() as u64 > MOST_BYTES {
            return Err(format!("it has more than {MOST_BYTES} bytes, the limit"));
        }
        // The checksums come first: a corrupt key would be reported as other code.
        let (made_for_other, blobs) = blobs_of(&bytes.into())?;
        key(made_for).check_text(&made_for_other)?;
        Ok(Some(blobs))
    }

    /// Writes the file of a kind and fingerprint, replacing an old one.
    ///
    /// # Errors
    ///
    /// The folder is not writable, or the fingerprint exceeds the space reserved for it.
    pub fn write(&self, kind: &str, made_for: &Fingerprint, blobs: &[&[u8]]) -> io::Result<()> {
        let mut writer = self.0.begin(&key(made_for))?;
        for blob in blobs {
            writer.add(0, blob)?;
        }
        writer.finish(&self.place(kind, made_for)).map(drop)
    }
}

/// Quotes the texts, so that none of them can forge a line.
fn key(made_for: &Fingerprint) -> Key {
    let Fingerprint { code, hardware } = made_for;
    let own = env!("ORT_CODE_HASH");
    Key { lasting: format!("device {hardware:?}\n"), code: format!("code {own}\ndevice {code:?}\n") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    fn fingerprint() -> Fingerprint {
        Fingerprint { code: "1".to_owned(), hardware: "lanes\n\"16\"".to_owned() }
    }

    #[test]
    fn blobs_come_back_as_they_were_and_kinds_are_apart() {
        let place = tempfile::tempdir().unwrap();
        let cache = DeviceCache::open(&place.path().join("new")).unwrap();
        assert_eq!(cache.read("one", &fingerprint()), Ok(None));
        let blobs: [&[u8]; 3] = [b"", b"text", &[7; 9000]];
        cache.write("one", &fingerprint(), &blobs).unwrap();
        cache.write("other", &fingerprint(), &[]).unwrap();
        assert_eq!(cache.read("one", &fingerprint()).unwrap().unwrap(), blobs);
        assert_eq!(cache.read("other", &fingerprint()), Ok(Some(Vec::new())));
        let elsewhere = Fingerprint { hardware: "8".to_owned(), ..fingerprint() };
        assert_eq!(cache.read("one", &elsewhere), Ok(None));
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let cache = DeviceCache::open(place.path()).unwrap();
        cache.write("kind", &fingerprint(), &[&[1; 100], b"two"]).unwrap();
        let path = cache.place("kind", &fingerprint());
        let whole = std::fs::read(&path).unwrap();
        let blobs = cache.read("kind", &fingerprint()).unwrap();
        for index in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[index] ^= 0x10;
            std::fs::write(&path, &damaged).unwrap();
            // The padding between blobs is not covered by a checksum.
            let read = cache.read("kind", &fingerprint());
            assert!(read.is_err() || read == Ok(blobs.clone()), "byte {index}");
            std::fs::write(&path, &whole[..index]).unwrap();
            assert!(cache.read("kind", &fingerprint()).is_err(), "cut at {index}");
        }
        let other_code = Fingerprint { code: "2".to_owned(), ..fingerprint() };
        std::fs::write(&path, &whole).unwrap();
        assert!(cache.read("kind", &other_code).unwrap_err().contains("it was compiled for"));
        cache.write("kind", &other_code, &[b"new"]).unwrap();
        assert!(cache.read("kind", &fingerprint()).is_err());
        assert_eq!(cache.read("kind", &other_code).unwrap().unwrap(), [&b"new"[..]]);
    }
}
