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
    CreateOpaqueValue others
    GetOpaqueValue others
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
    CreateAllocator session_allocator
    ReleaseAllocator session_allocator
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
    SetCurrentGpuDeviceId vendor_options
    GetCurrentGpuDeviceId vendor_options
    KernelInfoGetAttributeArray_float kernel_info
    KernelInfoGetAttributeArray_int64 kernel_info
    CreateArenaCfgV2 arena
    AddRunConfigEntry run_options
    CreatePrepackedWeightsContainer session
    ReleasePrepackedWeightsContainer session
    CreateSessionWithPrepackedWeightsContainer session
    CreateSessionFromArrayWithPrepackedWeightsContainer session
    SessionOptionsAppendExecutionProvider_TensorRT_V2 vendor_options
    CreateTensorRTProviderOptions providers
    UpdateTensorRTProviderOptions vendor_options
    GetTensorRTProviderOptionsAsString vendor_options
    ReleaseTensorRTProviderOptions others
    EnableOrtCustomOps custom_library
    RegisterAllocator env
    UnregisterAllocator env
    IsSparseTensor value
    CreateSparseTensorAsOrtValue sparse
    FillSparseTensorCoo sparse
    FillSparseTensorCsr sparse
    FillSparseTensorBlockSparse sparse
    CreateSparseTensorWithValuesAsOrtValue sparse
    UseCooIndices sparse
    UseCsrIndices sparse
    UseBlockSparseIndices sparse
    GetSparseTensorFormat sparse
    GetSparseTensorValuesTypeAndShape sparse
    GetSparseTensorValues sparse
    GetSparseTensorIndicesTypeShape sparse
    GetSparseTensorIndices sparse
    HasValue value
    KernelContext_GetGPUComputeStream kernel_context
    GetTensorMemoryInfo value
    GetExecutionProviderApi providers
    SessionOptionsSetCustomCreateThreadFn session_options
    SessionOptionsSetCustomThreadCreationOptions session_options
    SessionOptionsSetCustomJoinThreadFn session_options
    SetGlobalCustomCreateThreadFn arena
    SetGlobalCustomThreadCreationOptions arena
    SetGlobalCustomJoinThreadFn arena
    SynchronizeBoundInputs io_binding
    SynchronizeBoundOutputs io_binding
    SessionOptionsAppendExecutionProvider_CUDA_V2 providers
    CreateCUDAProviderOptions providers
    UpdateCUDAProviderOptions vendor_options
    GetCUDAProviderOptionsAsString vendor_options
    ReleaseCUDAProviderOptions others
    SessionOptionsAppendExecutionProvider_MIGraphX vendor_options
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
    SessionOptionsAppendExecutionProvider_CANN vendor_options
    CreateCANNProviderOptions vendor_options
    UpdateCANNProviderOptions vendor_options
    GetCANNProviderOptionsAsString vendor_options
    ReleaseCANNProviderOptions others
    MemoryInfoGetDeviceType memory_info
    UpdateEnvWithCustomLogLevel env
    SetGlobalIntraOpThreadAffinity arena
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
    SessionOptionsAppendExecutionProvider_Dnnl vendor_options
    CreateDnnlProviderOptions vendor_options
    UpdateDnnlProviderOptions vendor_options
    GetDnnlProviderOptionsAsString vendor_options
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
    CreateROCMProviderOptions vendor_options
    UpdateROCMProviderOptions vendor_options
    GetROCMProviderOptionsAsString vendor_options
    ReleaseROCMProviderOptions others
    CreateAndRegisterAllocatorV2 env
    RunAsync run
    UpdateTensorRTProviderOptionsWithValue vendor_options
    GetTensorRTProviderOptionsByName vendor_options
    UpdateCUDAProviderOptionsWithValue vendor_options
    GetCUDAProviderOptionsByName vendor_options
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
    SessionOptionsAppendExecutionProvider_VitisAI vendor_options
    KernelContext_GetScratchBuffer kernel_context
    KernelInfoGetAllocator kernel_info
    AddExternalInitializersFromMemory session_options
    CreateLoraAdapter lora
    CreateLoraAdapterFromArray lora
    ReleaseLoraAdapter lora
    RunOptionsAddActiveLoraAdapter lora
    SetEpDynamicOptions session
    ReleaseValueInfo graph_objects
    ReleaseNode graph_objects
    ReleaseGraph graph_objects
    ReleaseModel graph_objects
    GetValueInfoName node_inspect
    GetValueInfoTypeInfo node_inspect
    GetModelEditorApi model_editor
    CreateTensorWithDataAndDeleterAsOrtValue value
    SessionOptionsSetLoadCancellationFlag session_options
    GetCompileApi compile_api
    CreateKeyValuePairs key_values
    AddKeyValuePair key_values
    GetKeyValue key_values
    GetKeyValuePairs key_values
    RemoveKeyValuePair key_values
    ReleaseKeyValuePairs key_values
    RegisterExecutionProviderLibrary provider_library
    UnregisterExecutionProviderLibrary provider_library
    GetEpDevices devices
    SessionOptionsAppendExecutionProvider_V2 providers
    SessionOptionsSetEpSelectionPolicy providers
    SessionOptionsSetEpSelectionPolicyDelegate provider_library
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
    AllocatorGetStats allocator
    CreateMemoryInfo_V2 memory_info
    MemoryInfoGetDeviceMemType memory_info
    MemoryInfoGetVendorId memory_info
    ValueInfo_GetValueProducer node_inspect
    ValueInfo_GetValueNumConsumers node_inspect
    ValueInfo_GetValueConsumers node_inspect
    ValueInfo_GetInitializerValue node_inspect
    ValueInfo_GetExternalInitializerInfo node_inspect
    ValueInfo_IsRequiredGraphInput node_inspect
    ValueInfo_IsOptionalGraphInput node_inspect
    ValueInfo_IsGraphOutput node_inspect
    ValueInfo_IsConstantInitializer node_inspect
    ValueInfo_IsFromOuterScope node_inspect
    Graph_GetName graph_inspect
    Graph_GetModelPath graph_inspect
    Graph_GetOnnxIRVersion graph_inspect
    Graph_GetNumOperatorSets graph_inspect
    Graph_GetOperatorSets graph_inspect
    Graph_GetNumInputs graph_inspect
    Graph_GetInputs graph_inspect
    Graph_GetNumOutputs graph_inspect
    Graph_GetOutputs graph_inspect
    Graph_GetNumInitializers graph_inspect
    Graph_GetInitializers graph_inspect
    Graph_GetNumNodes graph_inspect
    Graph_GetNodes graph_inspect
    Graph_GetParentNode graph_inspect
    Graph_GetGraphView graph_inspect
    Node_GetId node_inspect
    Node_GetName node_inspect
    Node_GetOperatorType node_inspect
    Node_GetDomain node_inspect
    Node_GetSinceVersion node_inspect
    Node_GetNumInputs node_inspect
    Node_GetInputs node_inspect
    Node_GetNumOutputs node_inspect
    Node_GetOutputs node_inspect
    Node_GetNumImplicitInputs node_inspect
    Node_GetImplicitInputs node_inspect
    Node_GetNumAttributes node_inspect
    Node_GetAttributes node_inspect
    Node_GetAttributeByName node_inspect
    OpAttr_GetTensorAttributeAsOrtValue op_attr
    OpAttr_GetType op_attr
    OpAttr_GetName op_attr
    Node_GetNumSubgraphs node_inspect
    Node_GetSubgraphs node_inspect
    Node_GetGraph node_inspect
    Node_GetEpName node_inspect
    ReleaseExternalInitializerInfo external_info
    ExternalInitializerInfo_GetFilePath external_info
    ExternalInitializerInfo_GetFileOffset external_info
    ExternalInitializerInfo_GetByteSize external_info
    GetRunConfigEntry run_options
    EpDevice_MemoryInfo devices
    CreateSharedAllocator provider_library
    GetSharedAllocator env
    ReleaseSharedAllocator provider_library
    GetTensorData value
    GetSessionOptionsConfigEntries session_options
    SessionGetMemoryInfoForInputs session
    SessionGetMemoryInfoForOutputs session
    SessionGetEpDeviceForInputs devices
    CreateSyncStreamForEpDevice provider_library
    SyncStream_GetHandle others
    ReleaseSyncStream others
    CopyTensors provider_library
    Graph_GetModelMetadata graph_inspect
    GetModelCompatibilityForEpDevices provider_library
    CreateExternalInitializerInfo external_info
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
    GetCompatibilityInfoFromModel provider_library
    GetCompatibilityInfoFromModelBytes provider_library
    CreateEnvWithOptions env
    Session_GetEpGraphAssignmentInfo provider_library
    EpAssignedSubgraph_GetEpName provider_library
    EpAssignedSubgraph_GetNodes provider_library
    EpAssignedNode_GetName provider_library
    EpAssignedNode_GetDomain provider_library
    EpAssignedNode_GetOperatorType provider_library
    RunOptionsSetSyncStream others
    GetTensorElementTypeAndShapeDataReference value
    RunOptionsEnableProfiling run_options
    RunOptionsDisableProfiling run_options
    KernelInfoGetAttributeArray_string kernel_info
    SetPerSessionThreadPoolCallbacks env
    GetMemPatternEnabled session_options
    GetSessionExecutionMode session_options
    SessionReleaseCapturedGraph others
    GetExperimentalFunction others
    KernelContext_GetSyncStream kernel_context
    SessionOptionsSetWeightlessSourceModelBuffer session_options
    KernelContext_GetPreallocatedOutput kernel_context
    SessionOptionsSetEpContextDataReadFunc session_options
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
