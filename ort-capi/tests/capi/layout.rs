//! The layout of the table, and what the library answers about versions.

use std::mem::offset_of;

use ort_sys::{OrtAllocator, OrtApi, OrtApiBase, OrtModelEditorApi};

use crate::library::{base, string};

/// The last function of each version, and its index in ONNX Runtime's header.
#[test]
fn functions_are_at_the_offsets_of_the_header() {
    macro_rules! last {
        ($($name:ident $index:literal)*) => {
            [$((stringify!($name), offset_of!(OrtApi, $name) / 8, $index),)*]
        };
    }
    let all = last! {
        CreateStatus 0 ReleaseCustomOpDomain 101 ReleaseModelMetadata 118 AddFreeDimensionOverrideByName 124
        ReleaseAvailableProviders 126 SetGlobalSpinControl 149 ReleaseArenaCfg 157 GetCurrentGpuDeviceId 161
        CreateSessionFromArrayWithPrepackedWeightsContainer 169 GetSparseTensorIndices 191
        SynchronizeBoundOutputs 203 SessionOptionsAppendExecutionProvider_MIGraphX 209 ReleaseKernelInfo 218
        ReleaseCANNProviderOptions 224 GetSessionConfigEntry 238 GetBuildInfoString 254
        KernelContext_GetResource 265 SessionOptionsAppendExecutionProvider_OpenVINO_V2 275
        AddExternalInitializersFromMemory 279 SetEpDynamicOptions 284 GetEpApi 317
        CreateExternalInitializerInfo 389 GetTensorElementTypeAndShapeDataReference 414
        SetPerSessionThreadPoolCallbacks 418 SessionReleaseCapturedGraph 421 KernelContext_GetSyncStream 423
        SessionOptionsSetWeightlessSourceModelBuffer 424 KernelContext_GetPreallocatedOutput 425
        GetModelPackageApi 427
    };
    for (name, offset, index) in all {
        assert_eq!(offset, index, "{name}");
    }
    assert_eq!(size_of::<OrtApi>(), 428 * 8);
    assert_eq!(size_of::<OrtApiBase>(), 2 * 8);
    assert_eq!(size_of::<OrtModelEditorApi>(), 20 * 8);
    assert_eq!(offset_of!(OrtAllocator, Alloc), 8);
    assert_eq!(offset_of!(OrtAllocator, Reserve), 32);
}

#[test]
fn one_table_serves_all_versions() {
    let base = base();
    // SAFETY: the functions take any number.
    let table = |version| unsafe { (base.GetApi)(version) };
    assert!((1..=31).all(|version| !table(version).is_null() && table(version) == table(31)));
    assert!([0, 32, u32::MAX].into_iter().all(|version| table(version).is_null()));
    // SAFETY: as above.
    assert_eq!(string(unsafe { (base.GetVersionString)() }), "1.31.1");
}
