//! The driver's own cache of pipelines, with what it had learned in an earlier process: the one
//! place of unsafe code in this crate.
//!
//! Only Vulkan has one, and not all of its drivers put anything into it: what is no more than a new
//! cache's data is not kept. The file is named by vendor, device and adapter, and made anew for
//! another driver or other code.

use ort_core::ep::{DeviceCache, Fingerprint};

use crate::gpu::Gpu;

/// The kind of its files.
const KIND: &str = "driver";

/// The driver's cache, and what of it is in a file.
pub(crate) struct DriverCache {
    cache: wgpu::PipelineCache,
    made_for: Fingerprint,
    /// Whether a file was there that fits, and was taken.
    is_loaded: bool,
    /// The bytes of data that are not worth a file: those of a cache without pipelines.
    empty: usize,
}

impl DriverCache {
    /// The driver's cache with the data of the file, where the file is whole and of this driver;
    /// none where the device has no such cache.
    pub(crate) fn open(gpu: &Gpu, files: &DeviceCache) -> Option<DriverCache> {
        if !gpu.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let made_for = made_for(&gpu.adapter)?;
        // What is read is this process's own memory, and its checksum was compared.
        let data = match files.read(KIND, &made_for) {
            Ok(blobs) => blobs.and_then(|blobs| blobs.into_iter().next()),
            Err(refusal) => {
                tracing::info!("the driver's cache of pipelines is made anew: {refusal}");
                None
            }
        };
        match make(gpu, data.as_deref()) {
            Ok(cache) => {
                let len = cache.get_data().map_or(0, |data| data.len());
                // What wgpu or the driver does not take they leave out silently.
                let is_loaded = data.is_some_and(|data| len > data.len() / 2);
                Some(DriverCache { cache, made_for, is_loaded, empty: if is_loaded { 0 } else { len } })
            }
            Err(problem) => {
                tracing::warn!("pipelines are compiled without the driver's cache: {problem}");
                None
            }
        }
    }

    /// What pipelines are made with.
    pub(crate) fn cache(&self) -> &wgpu::PipelineCache {
        &self.cache
    }

    /// Whether it knows what an earlier process learned.
    pub(crate) fn is_loaded(&self) -> bool {
        self.is_loaded
    }

    /// Writes what it has learned so far, unless that is nothing.
    pub(crate) fn save(&self, files: &DeviceCache) -> std::io::Result<()> {
        match self.cache.get_data().filter(|data| data.len() > self.empty) {
            Some(data) => files.write(KIND, &self.made_for, &[&data]),
            None => Ok(()),
        }
    }
}

/// What the driver's data depend on; none where the backend has no such cache.
fn made_for(adapter: &wgpu::AdapterInfo) -> Option<Fingerprint> {
    let key = wgpu::util::pipeline_cache_key(adapter)?;
    let wgpu::AdapterInfo { name, driver, driver_info, .. } = adapter;
    Some(Fingerprint {
        code: format!("{driver} {driver_info} {}", env!("ORT_CODE_HASH")),
        hardware: format!("{key} {name}"),
    })
}

#[allow(unsafe_code, reason = "wgpu cannot check what a driver takes for its own data")]
fn make(gpu: &Gpu, data: Option<&[u8]>) -> ort_core::Result<wgpu::PipelineCache> {
    let descriptor = wgpu::PipelineCacheDescriptor { label: None, data, fallback: true };
    gpu.validated(|| {
        // SAFETY: data have to come from `get_data` of an earlier cache. They do: `save` alone
        // writes files of this kind and they appear whole; their checksum was compared after they
        // were read into memory that nobody else has; the key in the file says that adapter, driver
        // and the code that wrote them, wgpu's version included, are the same. wgpu holds its
        // header against the device besides. That nobody forges a file with a right checksum is the
        // part of whoever chooses the folder, as it is for the packed weights there.
        unsafe { gpu.device.create_pipeline_cache(&descriptor) }
    })
}

#[cfg(test)]
mod tests {
    use ort_testkit::skip_test;

    use super::*;
    use crate::provider::{NO_ADAPTER, adapters};

    #[test]
    fn only_whole_data_of_the_same_driver_and_code_are_given_to_the_driver() {
        let Some(adapter) = adapters().into_iter().next() else { return skip_test(NO_ADAPTER) };
        let gpu = Gpu::open(&adapter, false).unwrap();
        let place = tempfile::tempdir().unwrap();
        let files = DeviceCache::open(place.path()).unwrap();
        let is_loaded = || DriverCache::open(&gpu, &files).map(|driver| driver.is_loaded());
        let Some(new) = DriverCache::open(&gpu, &files) else {
            let backend = gpu.adapter.backend;
            return skip_test(&format!("{backend} has no cache of pipelines, Vulkan has one: {NO_ADAPTER}"));
        };
        assert!(!new.is_loaded());
        // Without pipelines there is nothing worth a file.
        new.save(&files).unwrap();
        assert_eq!(is_loaded(), Some(false));
        let (data, made_for) = (new.cache().get_data().unwrap(), made_for(&gpu.adapter).unwrap());
        files.write(KIND, &made_for, &[&data]).unwrap();
        assert_eq!(is_loaded(), Some(true));
        let path = files.place(KIND, &made_for);
        let whole = std::fs::read(&path).unwrap();
        let of_data = whole.windows(data.len()).position(|bytes| bytes == data).unwrap();
        for at in [0, 20, of_data, of_data + data.len() - 1, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(is_loaded(), Some(false), "byte {at}");
        }
        let older = Fingerprint { code: "an older driver".to_owned(), ..made_for };
        files.write(KIND, &older, &[&data]).unwrap();
        assert_eq!(is_loaded(), Some(false));
    }
}
