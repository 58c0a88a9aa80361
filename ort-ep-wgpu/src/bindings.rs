//! Layouts of bindings and the groups that were bound before, to be bound again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use ort_core::{Result, error};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::gpu::{Gpu, NUMBERS};

/// The most groups that are kept: those of some thousand nodes.
const MOST_GROUPS: usize = 16_384;

/// What stands at one storage binding.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) handle: u64,
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// Handle, offset and length of each storage binding.
type Key = SmallVec<[(u64, usize, usize); 8]>;

/// The layouts by number of storage bindings, and the groups in use.
pub(crate) struct BindGroups {
    gpu: Arc<Gpu>,
    /// Each is made for the first program that takes it: few counts are used of the many that a
    /// device may have.
    layouts: Vec<OnceLock<Layout>>,
    numbers: wgpu::Buffer,
    groups: Mutex<FxHashMap<Key, wgpu::BindGroup>>,
}

struct Layout {
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

impl BindGroups {
    /// `numbers` is the uniform buffer that every group begins with.
    pub(crate) fn new(gpu: Arc<Gpu>, numbers: wgpu::Buffer) -> BindGroups {
        let layouts = (0..=gpu.limits.storage_buffers).map(|_| OnceLock::new()).collect();
        BindGroups { gpu, layouts, numbers, groups: Mutex::default() }
    }

    /// The layout of a program with so many storage bindings.
    pub(crate) fn layout(&self, count: usize) -> Option<&wgpu::PipelineLayout> {
        self.made(count).map(|layout| &layout.pipeline)
    }

    fn made(&self, count: usize) -> Option<&Layout> {
        let slot = self.layouts.get(count)?;
        Some(slot.get_or_init(|| layout(&self.gpu.device, count)))
    }

    /// The group of these windows.
    pub(crate) fn get(&self, windows: &[Window]) -> Result<wgpu::BindGroup> {
        let key: Key = windows.iter().map(|window| (window.handle, window.offset, window.len)).collect();
        let mut groups = self.groups.lock();
        if let Some(group) = groups.get(&key) {
            return Ok(group.clone());
        }
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
        let numbers = binding(&self.numbers, 0, NUMBERS as usize);
        let storage = windows.iter().map(|window| binding(&window.buffer, window.offset, window.len));
        let entries = std::iter::once(numbers).chain(storage).enumerate();
        let entry = |(place, resource)| wgpu::BindGroupEntry { binding: place as u32, resource };
        let entries: SmallVec<[wgpu::BindGroupEntry<'_>; 9]> = entries.map(entry).collect();
        self.gpu.made.bind_groups.fetch_add(1, Ordering::Relaxed);
        let descriptor = wgpu::BindGroupDescriptor { label: None, layout, entries: &entries };
        self.gpu.device.create_bind_group(&descriptor)
    }

    /// Lets go of the groups that a buffer is in.
    pub(crate) fn forget(&self, handle: u64) {
        self.groups.lock().retain(|key, _| !key.iter().any(|(other, ..)| *other == handle));
    }
}

fn layout(device: &wgpu::Device, count: usize) -> Layout {
    let entry = |place: usize| {
        // Ranges of one buffer may be read and written in one dispatch: all storage is of the kind
        // that both goes with.
        let (ty, has_dynamic_offset) = match place {
            0 => (wgpu::BufferBindingType::Uniform, true),
            _ => (wgpu::BufferBindingType::Storage { read_only: false }, false),
        };
        wgpu::BindGroupLayoutEntry {
            binding: place as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
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
        immediate_size: 0,
    });
    Layout { group, pipeline }
}
