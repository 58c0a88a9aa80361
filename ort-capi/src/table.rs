//! The table of all functions: the module that has each, or `-` if it is not there.

use ort_sys::{OrtApi, OrtStatusPtr};

use crate::abi::{absent, slot};
use crate::status::not_implemented;

/// A function that is not there says its name.
macro_rules! function {
    ($name:ident -) => {{
        extern "system" fn none() -> OrtStatusPtr {
            not_implemented(stringify!($name))
        }
        absent(none)
    }};
    ($name:ident $module:ident) => {
        slot(crate::$module::$name)
    };
}

#[cfg(test)]
macro_rules! is_there {
    (-) => {
        false
    };
    ($module:ident) => {
        true
    };
}

macro_rules! table {
    ($($name:ident $module:tt)*) => {
        /// The table that clients get.
        pub(crate) static API: OrtApi = OrtApi { $($name: function!($name $module),)* };

        /// The name of each function, in the order of the table, and whether it is there.
        #[cfg(test)]
        pub(crate) const FUNCTIONS: &[(&str, bool)] = &[$((stringify!($name), is_there!($module)),)*];
    };
}

table! {
    CreateStatus status
    GetErrorCode status
    GetErrorMessage status
    CreateEnv env
    CreateEnvWithCustomLogger env
    EnableTelemetryEvents env
    DisableTelemetryEvents env
    CreateSession session
    CreateSessionFromArray session
    Run run
    CreateSessionOptions session_options
    SetOptimizedModelFilePath session_options
    CloneSessionOptions session_options
    SetSessionExecutionMode session_options
    EnableProfiling session_options
    DisableProfiling session_options
    EnableMemPattern session_options
    DisableMemPattern session_options
    EnableCpuMemArena session_options
    DisableCpuMemArena session_options
    SetSessionLogId session_options
    SetSessionLogVerbosityLevel session_options
    SetSessionLogSeverityLevel session_options
    SetSessionGraphOptimizationLevel session_options
    SetIntraOpNumThreads session_options
    SetInterOpNumThreads session_options
    CreateCustomOpDomain custom_domain
    CustomOpDomain_Add custom_domain
    AddCustomOpDomain custom_domain
    RegisterCustomOpsLibrary custom_library
    SessionGetInputCount session
    SessionGetOutputCount session
    SessionGetOverridableInitializerCount session
    SessionGetInputTypeInfo session
    SessionGetOutputTypeInfo session
    SessionGetOverridableInitializerTypeInfo session
    SessionGetInputName session
    SessionGetOutputName session
    SessionGetOverridableInitializerName session
    CreateRunOptions run_options
    RunOptionsSetRunLogVerbosityLevel run_options
    RunOptionsSetRunLogSeverityLevel run_options
    RunOptionsSetRunTag run_options
    RunOptionsGetRunLogVerbosityLevel run_options
    RunOptionsGetRunLogSeverityLevel run_options
    RunOptionsGetRunTag run_options
    RunOptionsSetTerminate run_options
    RunOptionsUnsetTerminate run_options
    CreateTensorAsOrtValue value
    CreateTensorWithDataAsOrtValue value
    IsTensor value
    GetTensorMutableData value
    FillStringTensor strings
    GetStringTensorDataLength strings
    GetStringTensorContent strings
    CastTypeInfoToTensorInfo type_info
    GetOnnxTypeFromTypeInfo type_info
    CreateTensorTypeAndShapeInfo type_info
    SetTensorElementType type_info
    SetDimensions type_info
    GetTensorElementType type_info
    GetDimensionsCount type_info
    GetDimensions type_info
    GetSymbolicDimensions type_info
    GetTensorShapeElementCount type_info
    GetTensorTypeAndShape value
    GetTypeInfo value
    GetValueType value
    CreateMemoryInfo memory_info
    CreateCpuMemoryInfo memory_info
    CompareMemoryInfo memory_info
    MemoryInfoGetName memory_info
    MemoryInfoGetId memory_info
    MemoryInfoGetMemType memory_info
    MemoryInfoGetType memory_info
    AllocatorAlloc allocator
    AllocatorFree allocator
    AllocatorGetInfo allocator
    GetAllocatorWithDefaultOptions allocator
    AddFreeDimensionOverride session_options
    GetValue containers
    GetValueCount containers
    CreateValue containers
    CreateOpaqueValue -
    GetOpaqueValue -
    KernelInfoGetAttribute_float kernel_info
    KernelInfoGetAttribute_int64 kernel_info
    KernelInfoGetAttribute_string kernel_info
    KernelContext_GetInputCount kernel_context
    KernelContext_GetOutputCount kernel_context
    KernelContext_GetInput kernel_context
    KernelContext_GetOutput kernel_context
    ReleaseEnv env
    ReleaseStatus status
    ReleaseMemoryInfo memory_info
    ReleaseSession session
    ReleaseValue value
    ReleaseRunOptions run_options
    ReleaseTypeInfo type_info
    ReleaseTensorTypeAndShapeInfo type_info
    ReleaseSessionOptions session_options
    ReleaseCustomOpDomain custom_domain
    GetDenotationFromTypeInfo type_info
    CastTypeInfoToMapTypeInfo type_info
    CastTypeInfoToSequenceTypeInfo type_info
    GetMapKeyType type_info
    GetMapValueType type_info
    GetSequenceElementType type_info
    ReleaseMapTypeInfo type_info
    ReleaseSequenceTypeInfo type_info
    SessionEndProfiling session
    SessionGetModelMetadata metadata
    ModelMetadataGetProducerName metadata
    ModelMetadataGetGraphName metadata
    ModelMetadataGetDomain metadata
    ModelMetadataGetDescription metadata
    ModelMetadataLookupCustomMetadataMap metadata
    ModelMetadataGetVersion metadata
    ReleaseModelMetadata metadata
    CreateEnvWithGlobalThreadPools env
    DisablePerSessionThreads session_options
    CreateThreadingOptions arena
    ReleaseThreadingOptions arena
    ModelMetadataGetCustomMetadataMapKeys metadata
    AddFreeDimensionOverrideByName session_options
    GetAvailableProviders providers
    ReleaseAvailableProviders providers
    GetStringTensorElementLength strings
    GetStringTensorElement strings
    FillStringTensorElement strings
    AddSessionConfigEntry session_options
    CreateAllocator allocator
    ReleaseAllocator allocator
    RunWithBinding io_binding
    CreateIoBinding io_binding
    ReleaseIoBinding io_binding
    BindInput io_binding
    BindOutput io_binding
    BindOutputToDevice io_binding
    GetBoundOutputNames io_binding
    GetBoundOutputValues io_binding
    ClearBoundInputs io_binding
    ClearBoundOutputs io_binding
    TensorAt value
    CreateAndRegisterAllocator env
    SetLanguageProjection env
    SessionGetProfilingStartTimeNs session
    SetGlobalIntraOpNumThreads arena
    SetGlobalInterOpNumThreads arena
    SetGlobalSpinControl arena
    AddInitializer session_options
    CreateEnvWithCustomLoggerAndGlobalThreadPools env
    SessionOptionsAppendExecutionProvider_CUDA providers
    SessionOptionsAppendExecutionProvider_ROCM providers
    SessionOptionsAppendExecutionProvider_OpenVINO providers
    SetGlobalDenormalAsZero arena
    CreateArenaCfg arena
    ReleaseArenaCfg arena
    ModelMetadataGetGraphDescription metadata
    SessionOptionsAppendExecutionProvider_TensorRT providers
    SetCurrentGpuDeviceId -
    GetCurrentGpuDeviceId -
    KernelInfoGetAttributeArray_float kernel_info
    KernelInfoGetAttributeArray_int64 kernel_info
    CreateArenaCfgV2 arena
    AddRunConfigEntry run_options
    CreatePrepackedWeightsContainer session
    ReleasePrepackedWeightsContainer session
    CreateSessionWithPrepackedWeightsContainer session
    CreateSessionFromArrayWithPrepackedWeightsContainer session
    SessionOptionsAppendExecutionProvider_TensorRT_V2 -
    CreateTensorRTProviderOptions providers
    UpdateTensorRTProviderOptions -
    GetTensorRTProviderOptionsAsString -
    ReleaseTensorRTProviderOptions others
    EnableOrtCustomOps custom_library
    RegisterAllocator env
    UnregisterAllocator env
    IsSparseTensor value
    CreateSparseTensorAsOrtValue -
    FillSparseTensorCoo -
    FillSparseTensorCsr -
    FillSparseTensorBlockSparse -
    CreateSparseTensorWithValuesAsOrtValue -
    UseCooIndices -
    UseCsrIndices -
    UseBlockSparseIndices -
    GetSparseTensorFormat -
    GetSparseTensorValuesTypeAndShape -
    GetSparseTensorValues -
    GetSparseTensorIndicesTypeShape -
    GetSparseTensorIndices -
    HasValue value
    KernelContext_GetGPUComputeStream kernel_context
    GetTensorMemoryInfo value
    GetExecutionProviderApi providers
    SessionOptionsSetCustomCreateThreadFn -
    SessionOptionsSetCustomThreadCreationOptions -
    SessionOptionsSetCustomJoinThreadFn -
    SetGlobalCustomCreateThreadFn -
    SetGlobalCustomThreadCreationOptions -
    SetGlobalCustomJoinThreadFn -
    SynchronizeBoundInputs io_binding
    SynchronizeBoundOutputs io_binding
    SessionOptionsAppendExecutionProvider_CUDA_V2 providers
    CreateCUDAProviderOptions providers
    UpdateCUDAProviderOptions -
    GetCUDAProviderOptionsAsString -
    ReleaseCUDAProviderOptions others
    SessionOptionsAppendExecutionProvider_MIGraphX -
    AddExternalInitializers session_options
    CreateOpAttr op_attr
    ReleaseOpAttr op_attr
    CreateOp standalone
    InvokeOp standalone
    ReleaseOp standalone
    SessionOptionsAppendExecutionProvider providers
    CopyKernelInfo kernel_info
    ReleaseKernelInfo kernel_info
    GetTrainingApi others
    SessionOptionsAppendExecutionProvider_CANN -
    CreateCANNProviderOptions -
    UpdateCANNProviderOptions -
    GetCANNProviderOptionsAsString -
    ReleaseCANNProviderOptions others
    MemoryInfoGetDeviceType memory_info
    UpdateEnvWithCustomLogLevel env
    SetGlobalIntraOpThreadAffinity -
    RegisterCustomOpsLibrary_V2 custom_library
    RegisterCustomOpsUsingFunction custom_library
    KernelInfo_GetInputCount kernel_info
    KernelInfo_GetOutputCount kernel_info
    KernelInfo_GetInputName kernel_info
    KernelInfo_GetOutputName kernel_info
    KernelInfo_GetInputTypeInfo kernel_info
    KernelInfo_GetOutputTypeInfo kernel_info
    KernelInfoGetAttribute_tensor kernel_info
    HasSessionConfigEntry session_options
    GetSessionConfigEntry session_options
    SessionOptionsAppendExecutionProvider_Dnnl -
    CreateDnnlProviderOptions -
    UpdateDnnlProviderOptions -
    GetDnnlProviderOptionsAsString -
    ReleaseDnnlProviderOptions others
    KernelInfo_GetNodeName kernel_info
    KernelInfo_GetLogger kernel_info
    KernelContext_GetLogger kernel_context
    Logger_LogMessage logger
    Logger_GetLoggingSeverityLevel logger
    KernelInfoGetConstantInput_tensor kernel_info
    CastTypeInfoToOptionalTypeInfo type_info
    GetOptionalContainedTypeInfo type_info
    GetResizedStringTensorElementBuffer strings
    KernelContext_GetAllocator kernel_context
    GetBuildInfoString env
    CreateROCMProviderOptions -
    UpdateROCMProviderOptions -
    GetROCMProviderOptionsAsString -
    ReleaseROCMProviderOptions others
    CreateAndRegisterAllocatorV2 env
    RunAsync run
    UpdateTensorRTProviderOptionsWithValue -
    GetTensorRTProviderOptionsByName -
    UpdateCUDAProviderOptionsWithValue -
    GetCUDAProviderOptionsByName -
    KernelContext_GetResource kernel_context
    SetUserLoggingFunction session_options
    ShapeInferContext_GetInputCount shape_context
    ShapeInferContext_GetInputTypeShape shape_context
    ShapeInferContext_GetAttribute shape_context
    ShapeInferContext_SetOutputTypeShape shape_context
    SetSymbolicDimensions type_info
    ReadOpAttr op_attr
    SetDeterministicCompute session_options
    KernelContext_ParallelFor kernel_context
    SessionOptionsAppendExecutionProvider_OpenVINO_V2 providers
    SessionOptionsAppendExecutionProvider_VitisAI -
    KernelContext_GetScratchBuffer kernel_context
    KernelInfoGetAllocator kernel_info
    AddExternalInitializersFromMemory session_options
    CreateLoraAdapter -
    CreateLoraAdapterFromArray -
    ReleaseLoraAdapter others
    RunOptionsAddActiveLoraAdapter -
    SetEpDynamicOptions session
    ReleaseValueInfo others
    ReleaseNode others
    ReleaseGraph others
    ReleaseModel others
    GetValueInfoName -
    GetValueInfoTypeInfo -
    GetModelEditorApi others
    CreateTensorWithDataAndDeleterAsOrtValue value
    SessionOptionsSetLoadCancellationFlag session_options
    GetCompileApi others
    CreateKeyValuePairs key_values
    AddKeyValuePair key_values
    GetKeyValue key_values
    GetKeyValuePairs key_values
    RemoveKeyValuePair key_values
    ReleaseKeyValuePairs key_values
    RegisterExecutionProviderLibrary -
    UnregisterExecutionProviderLibrary -
    GetEpDevices devices
    SessionOptionsAppendExecutionProvider_V2 providers
    SessionOptionsSetEpSelectionPolicy providers
    SessionOptionsSetEpSelectionPolicyDelegate -
    HardwareDevice_Type devices
    HardwareDevice_VendorId devices
    HardwareDevice_Vendor devices
    HardwareDevice_DeviceId devices
    HardwareDevice_Metadata devices
    EpDevice_EpName devices
    EpDevice_EpVendor devices
    EpDevice_EpMetadata devices
    EpDevice_EpOptions devices
    EpDevice_Device devices
    GetEpApi others
    GetTensorSizeInBytes value
    AllocatorGetStats -
    CreateMemoryInfo_V2 memory_info
    MemoryInfoGetDeviceMemType memory_info
    MemoryInfoGetVendorId memory_info
    ValueInfo_GetValueProducer -
    ValueInfo_GetValueNumConsumers -
    ValueInfo_GetValueConsumers -
    ValueInfo_GetInitializerValue -
    ValueInfo_GetExternalInitializerInfo -
    ValueInfo_IsRequiredGraphInput -
    ValueInfo_IsOptionalGraphInput -
    ValueInfo_IsGraphOutput -
    ValueInfo_IsConstantInitializer -
    ValueInfo_IsFromOuterScope -
    Graph_GetName -
    Graph_GetModelPath -
    Graph_GetOnnxIRVersion -
    Graph_GetNumOperatorSets -
    Graph_GetOperatorSets -
    Graph_GetNumInputs -
    Graph_GetInputs -
    Graph_GetNumOutputs -
    Graph_GetOutputs -
    Graph_GetNumInitializers -
    Graph_GetInitializers -
    Graph_GetNumNodes -
    Graph_GetNodes -
    Graph_GetParentNode -
    Graph_GetGraphView -
    Node_GetId -
    Node_GetName -
    Node_GetOperatorType -
    Node_GetDomain -
    Node_GetSinceVersion -
    Node_GetNumInputs -
    Node_GetInputs -
    Node_GetNumOutputs -
    Node_GetOutputs -
    Node_GetNumImplicitInputs -
    Node_GetImplicitInputs -
    Node_GetNumAttributes -
    Node_GetAttributes -
    Node_GetAttributeByName -
    OpAttr_GetTensorAttributeAsOrtValue op_attr
    OpAttr_GetType op_attr
    OpAttr_GetName op_attr
    Node_GetNumSubgraphs -
    Node_GetSubgraphs -
    Node_GetGraph -
    Node_GetEpName -
    ReleaseExternalInitializerInfo others
    ExternalInitializerInfo_GetFilePath others
    ExternalInitializerInfo_GetFileOffset others
    ExternalInitializerInfo_GetByteSize others
    GetRunConfigEntry run_options
    EpDevice_MemoryInfo devices
    CreateSharedAllocator -
    GetSharedAllocator env
    ReleaseSharedAllocator -
    GetTensorData value
    GetSessionOptionsConfigEntries session_options
    SessionGetMemoryInfoForInputs session
    SessionGetMemoryInfoForOutputs session
    SessionGetEpDeviceForInputs devices
    CreateSyncStreamForEpDevice -
    SyncStream_GetHandle others
    ReleaseSyncStream others
    CopyTensors -
    Graph_GetModelMetadata -
    GetModelCompatibilityForEpDevices -
    CreateExternalInitializerInfo -
    TensorTypeAndShape_HasShape type_info
    KernelInfo_GetConfigEntries kernel_info
    KernelInfo_GetOperatorDomain kernel_info
    KernelInfo_GetOperatorType kernel_info
    KernelInfo_GetOperatorSinceVersion kernel_info
    GetInteropApi others
    SessionGetEpDeviceForOutputs devices
    GetNumHardwareDevices devices
    GetHardwareDevices devices
    GetHardwareDeviceEpIncompatibilityDetails -
    DeviceEpIncompatibilityDetails_GetReasonsBitmask -
    DeviceEpIncompatibilityDetails_GetNotes -
    DeviceEpIncompatibilityDetails_GetErrorCode -
    ReleaseDeviceEpIncompatibilityDetails others
    GetCompatibilityInfoFromModel -
    GetCompatibilityInfoFromModelBytes -
    CreateEnvWithOptions -
    Session_GetEpGraphAssignmentInfo -
    EpAssignedSubgraph_GetEpName -
    EpAssignedSubgraph_GetNodes -
    EpAssignedNode_GetName -
    EpAssignedNode_GetDomain -
    EpAssignedNode_GetOperatorType -
    RunOptionsSetSyncStream others
    GetTensorElementTypeAndShapeDataReference value
    RunOptionsEnableProfiling -
    RunOptionsDisableProfiling -
    KernelInfoGetAttributeArray_string kernel_info
    SetPerSessionThreadPoolCallbacks -
    GetMemPatternEnabled session_options
    GetSessionExecutionMode session_options
    SessionReleaseCapturedGraph -
    GetExperimentalFunction others
    KernelContext_GetSyncStream kernel_context
    SessionOptionsSetWeightlessSourceModelBuffer -
    KernelContext_GetPreallocatedOutput kernel_context
    SessionOptionsSetEpContextDataReadFunc -
    GetModelPackageApi others
}

#[cfg(test)]
mod tests {
    use super::FUNCTIONS;
    use crate::own_keys::OWN_KEYS;

    /// Joins names to lines of at most 100 columns.
    fn wrapped(names: &[&str]) -> String {
        let mut text = String::new();
        let mut column = 0;
        for (place, name) in names.iter().enumerate() {
            let word = format!("{name}{}", if place + 1 < names.len() { "," } else { "." });
            if column > 0 && column + 1 + word.len() > 100 {
                text.push('\n');
                column = 0;
            } else if column > 0 {
                text.push(' ');
                column += 1;
            }
            text.push_str(&word);
            column += word.len();
        }
        text
    }

    /// The part of docs/C_API.md that the code says.
    fn generated() -> String {
        let named = |is_there: bool| -> Vec<&str> {
            // The structs that we use call one function otherwise than the header.
            let header = |name: &'static str| match name {
                "AddExternalInitializersFromMemory" => "AddExternalInitializersFromFilesInMemory",
                name => name,
            };
            FUNCTIONS.iter().filter(|(_, there)| *there == is_there).map(|(name, _)| header(name)).collect()
        };
        let (there, absent) = (named(true), named(false));
        let mut text = String::from("## Keys\n\n| key | value | effect |\n| --- | --- | --- |\n");
        for key in &OWN_KEYS {
            text.push_str(&format!("| `{}` | {} | {} |\n", key.name, key.values, key.effect));
        }
        text.push_str(&format!(
            "\n## Functions\n\n{} of {} functions are there:\n\n{}\n\nThe others return `ORT_NOT_IMPLEMENTED` with \
             their name:\n\n{}\n",
            there.len(),
            FUNCTIONS.len(),
            wrapped(&there),
            wrapped(&absent)
        ));
        text
    }

    /// With `GOLDEN_UPDATE=1` the page is written instead.
    #[test]
    fn the_page_lists_each_function_and_key() -> std::io::Result<()> {
        const START: &str = "<!-- Generated by the test of ort-capi/src/table.rs. -->\n\n";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/C_API.md");
        let page = std::fs::read_to_string(path)?;
        let (written, listed) = page.split_once(START).unwrap_or((&page, ""));
        if std::env::var_os("GOLDEN_UPDATE").is_some() {
            std::fs::write(path, format!("{written}{START}{}", generated()))?;
        } else {
            assert_eq!(listed, generated(), "run `GOLDEN_UPDATE=1 cargo test -p ort-capi the_page`");
        }
        Ok(())
    }
}
