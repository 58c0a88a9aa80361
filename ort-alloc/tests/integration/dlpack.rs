//! DLPack structures, read and made through the pointers that libraries hand each other.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_alloc::dlpack::{
    CPU, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, Layout,
    Managed, READ_ONLY, Raw, VERSION,
};
use ort_alloc::{AllocError, Allocator, HostAllocator};

const FLOAT: DLDataType = DLDataType { code: 2, bits: 32, lanes: 1 };

/// The sizes and offsets of the header on machines of 64 bits.
#[test]
fn the_layouts_are_those_of_the_header() {
    assert_eq!((size_of::<DLDataType>(), size_of::<DLDevice>(), size_of::<DLTensor>()), (4, 8, 48));
    let tensor = [
        offset_of!(DLTensor, data),
        offset_of!(DLTensor, device),
        offset_of!(DLTensor, ndim),
        offset_of!(DLTensor, dtype),
        offset_of!(DLTensor, shape),
        offset_of!(DLTensor, strides),
        offset_of!(DLTensor, byte_offset),
    ];
    assert_eq!(tensor, [0, 8, 16, 20, 24, 32, 40]);
    assert_eq!((offset_of!(DLManagedTensor, manager_ctx), offset_of!(DLManagedTensor, deleter)), (48, 56));
    let versioned = [
        offset_of!(DLManagedTensorVersioned, version),
        offset_of!(DLManagedTensorVersioned, manager_ctx),
        offset_of!(DLManagedTensorVersioned, deleter),
        offset_of!(DLManagedTensorVersioned, flags),
        offset_of!(DLManagedTensorVersioned, dl_tensor),
    ];
    assert_eq!(versioned, [0, 8, 16, 24, 32]);
}

/// What another library lends: elements, sizes, and how often it got them back.
struct Lender {
    elements: Vec<f32>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    deleted: &'static AtomicUsize,
}

/// Takes back what `lend` lent.
///
/// # Safety
///
/// `managed` is from `lend`, and its borrower calls the deleter once.
unsafe extern "C" fn delete_versioned(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: `lend` made both boxes, and this is their only deleter.
    unsafe {
        let managed = Box::from_raw(managed);
        let lender = Box::from_raw(managed.manager_ctx.cast::<Lender>());
        lender.deleted.fetch_add(1, Ordering::Relaxed);
    }
}

/// Takes back what `lend` lent to the older version of DLPack.
///
/// # Safety
///
/// As [`delete_versioned`].
unsafe extern "C" fn delete_unversioned(managed: *mut DLManagedTensor) {
    // SAFETY: as above.
    unsafe {
        let managed = Box::from_raw(managed);
        let lender = Box::from_raw(managed.manager_ctx.cast::<Lender>());
        lender.deleted.fetch_add(1, Ordering::Relaxed);
    }
}

/// A structure of six numbers as another library makes it.
fn lend(layout: Layout, version: DLPackVersion, flags: u64, deleted: &'static AtomicUsize) -> Raw {
    lend_strided(layout, version, flags, (&[2, 2], &[2, 1]), deleted)
}

fn lend_strided(
    layout: Layout,
    version: DLPackVersion,
    flags: u64,
    (shape, strides): (&[i64], &[i64]),
    deleted: &'static AtomicUsize,
) -> Raw {
    let elements = (0..6).map(|number| number as f32).collect();
    let mut lender = Box::new(Lender { elements, shape: shape.to_vec(), strides: strides.to_vec(), deleted });
    let dl_tensor = DLTensor {
        data: lender.elements.as_mut_ptr().cast(),
        device: DLDevice { device_type: CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: FLOAT,
        shape: lender.shape.as_mut_ptr(),
        strides: lender.strides.as_mut_ptr(),
        byte_offset: 8,
    };
    let manager_ctx = Box::into_raw(lender).cast::<c_void>();
    match layout {
        Layout::Versioned => {
            let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
            let managed = DLManagedTensorVersioned { version, manager_ctx, deleter, flags, dl_tensor };
            Raw::Versioned(NonNull::from(Box::leak(Box::new(managed))))
        }
        Layout::Unversioned => {
            let deleter = Some(delete_unversioned as unsafe extern "C" fn(_));
            let managed = DLManagedTensor { dl_tensor, manager_ctx, deleter };
            Raw::Unversioned(NonNull::from(Box::leak(Box::new(managed))))
        }
    }
}

#[test]
fn what_is_lent_is_read_and_given_back_once() -> Result<(), AllocError> {
    static DELETED: AtomicUsize = AtomicUsize::new(0);
    for (round, layout) in [Layout::Versioned, Layout::Unversioned].into_iter().enumerate() {
        // SAFETY: `lend` fills the structures as the header says.
        let managed = unsafe { Managed::from_raw(lend(layout, VERSION, 0, &DELETED)) }?;
        assert_eq!(
            (managed.dtype(), managed.shape(), managed.strides()),
            (FLOAT, &[2, 2][..], Some(&[2, 1][..]))
        );
        let shared = managed.into_shared(16)?;
        let view = shared.bytes();
        drop(shared);
        assert_eq!(DELETED.load(Ordering::Relaxed), round, "a view still reads it");
        let expected: Vec<u8> = (2..6).flat_map(|number| (number as f32).to_le_bytes()).collect();
        assert_eq!(view.as_deref(), Some(&expected[..]));
        drop(view);
        assert_eq!(DELETED.load(Ordering::Relaxed), round + 1);
    }
    Ok(())
}

#[test]
fn what_is_only_to_be_read_is_not_written() -> Result<(), AllocError> {
    static DELETED: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: as above.
    let managed = unsafe { Managed::from_raw(lend(Layout::Versioned, VERSION, READ_ONLY, &DELETED)) }?;
    assert!(managed.is_read_only());
    assert!(managed.into_buffer(16).is_err());
    assert_eq!(DELETED.load(Ordering::Relaxed), 1, "a refused structure is given back");
    // SAFETY: as above.
    let managed = unsafe { Managed::from_raw(lend(Layout::Versioned, VERSION, 0, &DELETED)) }?;
    let mut buffer = managed.into_buffer(16)?;
    buffer.bytes_mut().expect("it is writable").fill(0);
    drop(buffer);
    assert_eq!(DELETED.load(Ordering::Relaxed), 2);
    Ok(())
}

#[test]
fn gaps_and_other_orders_are_not_compact() -> Result<(), AllocError> {
    static DELETED: AtomicUsize = AtomicUsize::new(0);
    // (shape, strides, whether it is compact)
    let cases: [(&[i64], &[i64], bool); 7] = [
        (&[2, 2], &[2, 1], true),
        (&[2, 2], &[1, 2], false),
        (&[2, 2], &[3, 1], false),
        (&[1, 4], &[77, 1], true),
        (&[2, 1, 2], &[2, 9, 1], true),
        (&[2], &[0], false),
        (&[0, 3], &[8, 8], true),
    ];
    for (shape, strides, expected) in cases {
        let raw = lend_strided(Layout::Versioned, VERSION, 0, (shape, strides), &DELETED);
        // SAFETY: as above; the elements are not read.
        let managed = unsafe { Managed::from_raw(raw) }?;
        assert_eq!(managed.is_compact(), expected, "{shape:?} {strides:?}");
    }
    assert_eq!(DELETED.load(Ordering::Relaxed), cases.len());
    Ok(())
}

#[test]
fn another_version_is_refused_and_given_back() {
    static DELETED: AtomicUsize = AtomicUsize::new(0);
    let version = DLPackVersion { major: 2, minor: 0 };
    // SAFETY: as above.
    let refused = unsafe { Managed::from_raw(lend(Layout::Versioned, version, 0, &DELETED)) };
    let text = refused.map_err(|problem| problem.to_string()).expect_err("version 2 is not known");
    assert!(text.contains("DLPack version 2.0 is not supported"), "{text}");
    assert_eq!(DELETED.load(Ordering::Relaxed), 1);
}

#[test]
fn what_is_made_here_reads_as_the_header_says() -> Result<(), AllocError> {
    for layout in [Layout::Versioned, Layout::Unversioned] {
        let mut buffer = HostAllocator::global().allocate(24, 64)?;
        buffer.bytes_mut().expect("host memory").fill(7);
        let start = buffer.bytes().map(<[u8]>::as_ptr);
        let raw = Managed::give(buffer, FLOAT, &[3, 2], layout)?.into_raw();
        // SAFETY: the structure is alive until its deleter is called below.
        let tensor = unsafe {
            match &raw {
                Raw::Versioned(pointer) => {
                    assert_eq!((pointer.as_ref().version, pointer.as_ref().flags), (VERSION, 0));
                    &pointer.as_ref().dl_tensor
                }
                Raw::Unversioned(pointer) => &pointer.as_ref().dl_tensor,
            }
        };
        assert_eq!(Some(tensor.data.cast_const().cast()), start);
        assert_eq!((tensor.ndim, tensor.dtype, tensor.device.device_type), (2, FLOAT, CPU));
        // SAFETY: there are two numbers each.
        let numbers = unsafe {
            [std::slice::from_raw_parts(tensor.shape, 2), std::slice::from_raw_parts(tensor.strides, 2)]
        };
        assert_eq!(numbers, [&[3, 2], &[2, 1]]);
        // SAFETY: the structure is ours again, and goes back through its own deleter.
        drop(unsafe { Managed::from_raw(raw) }?);
    }
    let lent = Managed::lend(bytes::Bytes::from_static(&[1, 2, 3, 4]), FLOAT, &[]);
    assert!(lent.is_read_only() && lent.shape().is_empty());
    assert_eq!(lent.into_shared(4)?.as_slice(), Some(&[1, 2, 3, 4][..]));
    Ok(())
}
