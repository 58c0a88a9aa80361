//! Persistent driver pipeline cache (`VkPipelineCache`): what the driver compiled in earlier
//! processes.
//!
//! This is the only module of the crate with unsafe code. Only Vulkan has such a cache, and not all
//! of its drivers fill it: data no larger than an empty cache's is not saved. The file name is made
//! of vendor, device and adapter. Another driver version or other code starts a new cache.

use ort_core::ep::{DeviceCache, Fingerprint};

use crate::gpu::Gpu;

/// The kind of its files in a [`DeviceCache`].
const KIND: &str = "driver";

/// The driver's cache and the key of its file.
pub(crate) struct DriverCache {
    cache: wgpu::PipelineCache,
    made_for: Fingerprint,
    /// Whether the driver accepted the data of a file.
    is_loaded: bool,
    /// The size of the data of a cache without pipelines, which is not worth a file.
    empty: usize,
}

impl DriverCache {
    /// Opens the driver's cache with the file's data, if the file is intact and of this driver.
    /// Returns `None` if the device has no such cache.
    pub(crate) fn open(gpu: &Gpu, files: &DeviceCache) -> Option<DriverCache> {
        if !gpu.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let made_for = made_for(&gpu.adapter)?;
        // `read` copied the data into this process's own memory and compared its checksum.
        let data = match files.read(KIND, &made_for) {
            Ok(blobs) => blobs.and_then(|blobs| blobs.into_iter().next()),
            Err(refusal) => {
                tracing::info!("creating the driver's pipeline cache again: {refusal}");
                None
            }
        };
        match make(gpu, data.as_deref()) {
            Ok(cache) => {
                let len = cache.get_data().map_or(0, |data| data.len());
                // wgpu and the driver drop data that they reject without an error, so compare
                // sizes.
                let is_loaded = data.is_some_and(|data| len > data.len() / 2);
                Some(DriverCache { cache, made_for, is_loaded, empty: if is_loaded { 0 } else { len } })
            }
            Err(problem) => {
                tracing::warn!("pipelines are compiled without the driver's cache: {problem}");
                None
            }
        }
    }

    /// Returns the cache to create pipelines with.
    pub(crate) fn cache(&self) -> &wgpu::PipelineCache {
        &self.cache
    }

    /// Returns whether it started with an earlier process's data.
    pub(crate) fn is_loaded(&self) -> bool {
        self.is_loaded
    }

    /// Writes the driver's data, unless the cache holds no pipelines.
    pub(crate) fn save(&self, files: &DeviceCache) -> std::io::Result<()> {
        match self.cache.get_data().filter(|data| data.len() > self.empty) {
            Some(data) => files.write(KIND, &self.made_for, &[&data]),
            None => Ok(()),
        }
    }
}

/// The key of the driver's data; `None` if the backend has no such cache.
fn made_for(adapter: &wgpu::AdapterInfo) -> Option<Fingerprint> {
    let key = wgpu::util::pipeline_cache_key(adapter)?;
    let wgpu::AdapterInfo { name, driver, driver_info, .. } = adapter;
    Some(Fingerprint {
        code: format!("{driver} {driver_info} {}", env!("ORT_CODE_HASH")),
        hardware: format!("{key} {name}"),
    })
}

/// Creates the driver's cache from earlier data, or an empty one.
#[allow(unsafe_code, reason = "wgpu cannot check what a driver takes for its own data")]
fn make(gpu: &Gpu, data: Option<&[u8]>) -> ort_core::Result<wgpu::PipelineCache> {
    // `fallback` has wgpu create an empty cache if its header check rejects the data.
    let descriptor = wgpu::PipelineCacheDescriptor { label: None, data, fallback: true };
    gpu.validated(|| {
        // SAFETY: `data` must come from `get_data` of an earlier cache. Only `save` writes files of
        // this kind, and they appear whole. `DeviceCache::read` copied the bytes into memory that
        // this process owns, then compared their checksum. `made_for`, the file's key, establishes
        // the same adapter and driver, and the same code, which includes wgpu's version. wgpu also
        // checks its header against the device. A forged file with a correct checksum is up to
        // whoever chooses the folder, as for packed weights.
        unsafe { gpu.device.create_pipeline_cache(&descriptor) }
    })
}

#[cfg(test)]
mod tests {
    use ort_testkit::skip_test;

    use super::*;
    use crate::adapters::{NO_ADAPTER, adapters};

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
        // An empty cache is not saved.
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
