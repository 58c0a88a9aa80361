//! Bind group cache, and the bind group layouts by number of storage bindings.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use ort_core::{Result, error};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::gpu::{Gpu, NUMBERS};

/// The most bind groups in the cache: enough for some thousand nodes.
const MOST_GROUPS: usize = 16_384;

/// The byte range of a buffer at one storage binding.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) handle: u64,
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// The key of a bind group: handle, offset and length of each storage binding.
type Key = SmallVec<[(u64, usize, usize); 8]>;

/// The layouts and bind groups of one device.
pub(crate) struct BindGroups {
    gpu: Arc<Gpu>,
    /// Indexed by the number of storage bindings. Each layout is created on first use: a device
    /// allows many counts, and programs use few of them.
    layouts: Vec<OnceLock<BindLayout>>,
    numbers: wgpu::Buffer,
    groups: Mutex<FxHashMap<Key, wgpu::BindGroup>>,
}

struct BindLayout {
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

impl BindGroups {
    /// Creates an empty cache. `numbers` is the uniform buffer at binding 0 of every group.
    pub(crate) fn new(gpu: Arc<Gpu>, numbers: wgpu::Buffer) -> BindGroups {
        // The counts include 0 and the device's limit.
        let layouts = (0..=gpu.limits.storage_buffers).map(|_| OnceLock::new()).collect();
        BindGroups { gpu, layouts, numbers, groups: Mutex::default() }
    }

    /// Returns the pipeline layout of a program with `count` storage bindings; `None` if the device
    /// allows fewer.
    pub(crate) fn layout(&self, count: usize) -> Option<&wgpu::PipelineLayout> {
        self.made(count).map(|layout| &layout.pipeline)
    }

    /// Returns the layouts for `count` storage bindings, creating them on first use.
    fn made(&self, count: usize) -> Option<&BindLayout> {
        let slot = self.layouts.get(count)?;
        Some(slot.get_or_init(|| layout(&self.gpu.device, count)))
    }

    /// Returns the bind group of these windows, from the cache if it is known.
    pub(crate) fn get(&self, windows: &[Window]) -> Result<wgpu::BindGroup> {
        let key: Key = windows.iter().map(|window| (window.handle, window.offset, window.len)).collect();
        let mut groups = self.groups.lock();
        if let Some(group) = groups.get(&key) {
            return Ok(group.clone());
        }
        // The cache has no eviction order. Groups in use are created again by their next run.
        if groups.len() >= MOST_GROUPS {
            groups.clear();
        }
        let layout = self.made(windows.len());
        let layout = layout.ok_or_else(|| error!(Fail, "{} bindings are too many", windows.len()))?;
        let group = self.gpu.validated(|| self.make(windows, &layout.group))?;
        groups.insert(key, group.clone());
        Ok(group)
    }

    fn make(&self, windows: &[Window], layout: &wgpu::BindGroupLayout) -> wgpu::BindGroup {
        let binding = |buffer, offset: usize, len: usize| {
            let size = wgpu::BufferSize::new(len as u64);
            wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset: offset as u64, size })
        };
        // One dispatch's size: the dynamic offset moves this range to its uniforms.
        let numbers = binding(&self.numbers, 0, NUMBERS as usize);
        let storage = windows.iter().map(|window| binding(&window.buffer, window.offset, window.len));
        let entries = std::iter::once(numbers).chain(storage).enumerate();
        let entry = |(place, resource)| wgpu::BindGroupEntry { binding: place as u32, resource };
        let entries: SmallVec<[wgpu::BindGroupEntry<'_>; 9]> = entries.map(entry).collect();
        self.gpu.made.bind_groups.fetch_add(1, Ordering::Relaxed);
        let descriptor = wgpu::BindGroupDescriptor { label: None, layout, entries: &entries };
        self.gpu.device.create_bind_group(&descriptor)
    }

    /// Drops the bind groups that contain a buffer, so that they do not keep it alive.
    pub(crate) fn forget(&self, handle: u64) {
        self.groups.lock().retain(|key, _| !key.iter().any(|(other, ..)| *other == handle));
    }
}

/// Creates the layouts of a uniform buffer followed by `count` storage buffers.
fn layout(device: &wgpu::Device, count: usize) -> BindLayout {
    let entry = |place: usize| {
        // One dispatch may read and write ranges of the same buffer. wgpu allows that only if all
        // its bindings have the same usage, so inputs are read-write storage, too.
        let (ty, has_dynamic_offset) = match place {
            0 => (wgpu::BufferBindingType::Uniform, true),
            _ => (wgpu::BufferBindingType::Storage { read_only: false }, false),
        };
        wgpu::BindGroupLayoutEntry {
            binding: place as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            // The size of a binding varies by tensor, so wgpu checks it at each dispatch.
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None },
            count: None,
        }
    };
    let entries: Vec<wgpu::BindGroupLayoutEntry> = (0..=count).map(entry).collect();
    let group =
        device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
    let pipeline = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: None,
        bind_group_layouts: &[Some(&group)],
        // Uniforms take the place of immediate data, which is an optional feature.
        immediate_size: 0,
    });
    BindLayout { group, pipeline }
}
