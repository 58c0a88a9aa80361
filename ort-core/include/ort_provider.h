/*
 * The interface of provider libraries of ort-runtime. A library exports one function, `ort_provider`; docs/PROVIDERS.md
 * tells what it does, and examples/provider-template-c is one.
 *
 * Written by `cargo xtask header` from ort-core/src/ep/abi/tables.rs: change that file instead.
 */

#ifndef ORT_PROVIDER_H
#define ORT_PROVIDER_H

#include <stddef.h>
#include <stdint.h>

/**
 * The version of this ABI. The host refuses a library of another version.
 */
#define ORT_PROVIDER_ABI_VERSION 1

/**
 * Success.
 */
#define ORT_PROVIDER_OK 0

/**
 * A failure that no other code describes.
 */
#define ORT_PROVIDER_FAIL 1

/**
 * An argument of the caller is invalid, for example an option.
 */
#define ORT_PROVIDER_INVALID_ARGUMENT 2

/**
 * A kernel failed during a run.
 */
#define ORT_PROVIDER_RUNTIME_EXCEPTION 6

/**
 * There is no kernel for this node; the message says why.
 */
#define ORT_PROVIDER_NOT_IMPLEMENTED 9

/**
 * The provider or its device failed.
 */
#define ORT_PROVIDER_EP_FAIL 11

/**
 * Device memory is exhausted, or a memory limit is exceeded.
 */
#define ORT_PROVIDER_OUT_OF_MEMORY 20

/**
 * The input or output is omitted, or the output has no reader.
 */
#define ORT_PROVIDER_ABSENT 0

/**
 * The elements are in host memory, at `data`.
 */
#define ORT_PROVIDER_HOST 1

/**
 * The elements are in device memory, at `offset` bytes from the start of `memory`.
 */
#define ORT_PROVIDER_DEVICE 2

/**
 * Only the type and the shape are known.
 */
#define ORT_PROVIDER_SHAPE 3

/**
 * A float. The kinds have the values of ONNX's `AttributeProto.AttributeType`.
 */
#define ORT_PROVIDER_ATTRIBUTE_FLOAT 1

/**
 * An integer.
 */
#define ORT_PROVIDER_ATTRIBUTE_INT 2

/**
 * A string.
 */
#define ORT_PROVIDER_ATTRIBUTE_STRING 3

/**
 * A tensor.
 */
#define ORT_PROVIDER_ATTRIBUTE_TENSOR 4

/**
 * A list of floats.
 */
#define ORT_PROVIDER_ATTRIBUTE_FLOATS 6

/**
 * A list of integers.
 */
#define ORT_PROVIDER_ATTRIBUTE_INTS 7

/**
 * A list of strings.
 */
#define ORT_PROVIDER_ATTRIBUTE_STRINGS 8

/**
 * Receives the details of a claim; opaque to the library.
 */
typedef struct OrtProviderClaim OrtProviderClaim;

/**
 * The compilation of one node; opaque to the library.
 */
typedef struct OrtProviderCompilation OrtProviderCompilation;

/**
 * A device that the library opened; opaque to the host.
 */
typedef struct OrtProviderDevice OrtProviderDevice;

/**
 * Receives the description of a device; opaque to the library.
 */
typedef struct OrtProviderFacts OrtProviderFacts;

/**
 * A compiled node; opaque to the host.
 */
typedef struct OrtProviderKernel OrtProviderKernel;

/**
 * The owner of a constant's bytes; opaque to the library.
 */
typedef struct OrtProviderOwner OrtProviderOwner;

/**
 * Receives the message of an error; opaque to the library.
 */
typedef struct OrtProviderReport OrtProviderReport;

/**
 * The description of a device.
 */
typedef struct OrtProviderDeviceInfo {
  /**
   * The size of this record in bytes.
   */
  size_t size;
  /**
   * The size of its memory in bytes; 0 if it is unknown.
   */
  uint64_t memory_bytes;
  /**
   * An argument for the host's `fact`, valid during this call.
   */
  struct OrtProviderFacts *facts;
} OrtProviderDeviceInfo;

/**
 * A device option. All strings of this ABI are UTF-8 and NUL-terminated.
 */
typedef struct OrtProviderOption {
  /**
   * Its name.
   */
  const char *name;
  /**
   * Its value.
   */
  const char *value;
} OrtProviderOption;

/**
 * A tensor of a run. The kernel writes outputs; inputs are read-only.
 */
typedef struct OrtProviderTensor {
  /**
   * `ORT_PROVIDER_ABSENT`, `ORT_PROVIDER_HOST`, `ORT_PROVIDER_DEVICE` or `ORT_PROVIDER_SHAPE`.
   */
  uint32_t kind;
  /**
   * The element type, as ONNX's `TensorProto.DataType`; 0 if only the shape is known.
   */
  int32_t element_type;
  /**
   * The number of dimensions.
   */
  uint32_t rank;
  /**
   * For an output: the input that it aliases, or -1. The output then holds that input's elements
   * when the run starts, and both have the same shape.
   */
  int32_t in_place;
  /**
   * The sizes of the dimensions.
   */
  const int64_t *sizes;
  /**
   * The size of all elements in bytes.
   */
  uint64_t bytes;
  /**
   * The first byte in host memory.
   */
  void *data;
  /**
   * The device memory, as `allocate` returned it.
   */
  uint64_t memory;
  /**
   * The offset of the first byte in `memory`.
   */
  uint64_t offset;
} OrtProviderTensor;

/**
 * What is known of a value at compile time.
 */
typedef struct OrtProviderValue {
  /**
   * `ORT_PROVIDER_ABSENT`; `ORT_PROVIDER_HOST` for a constant; else `ORT_PROVIDER_SHAPE`.
   */
  uint32_t kind;
  /**
   * The element type, as ONNX's `TensorProto.DataType`; 0 if it is unknown.
   */
  int32_t element_type;
  /**
   * The number of dimensions; -1 if it is unknown.
   */
  int32_t rank;
  /**
   * The sizes of the dimensions; -1 for a size that only the run knows.
   */
  const int64_t *sizes;
  /**
   * The sizes as expressions of the model's symbolic dimensions, such as `2*batch`; `?` for an
   * unknown size.
   */
  const char *const *expressions;
  /**
   * The elements of a constant: row-major, little-endian, at any alignment.
   */
  const uint8_t *data;
  /**
   * The size of a constant in bytes.
   */
  uint64_t bytes;
  /**
   * The owner of a constant's bytes. They are valid during the call, and from `retain` to
   * `release`.
   */
  const struct OrtProviderOwner *owner;
} OrtProviderValue;

/**
 * An attribute. Only the fields of its kind are set.
 */
typedef struct OrtProviderAttribute {
  /**
   * Its name.
   */
  const char *name;
  /**
   * One of the constants `ORT_PROVIDER_ATTRIBUTE_*`.
   */
  uint32_t kind;
  /**
   * The float.
   */
  float f;
  /**
   * The integer.
   */
  int64_t i;
  /**
   * The string.
   */
  const char *s;
  /**
   * The floats.
   */
  const float *floats;
  /**
   * The integers.
   */
  const int64_t *ints;
  /**
   * The strings.
   */
  const char *const *strings;
  /**
   * The length of the list.
   */
  size_t count;
  /**
   * The tensor, encoded as a constant.
   */
  const struct OrtProviderValue *tensor;
} OrtProviderAttribute;

/**
 * A node, upgraded to the newest opset, with all default attributes filled in.
 */
typedef struct OrtProviderNode {
  /**
   * The size of this record in bytes.
   */
  size_t size;
  /**
   * The operator's domain; empty for the ONNX domain.
   */
  const char *domain;
  /**
   * The operator.
   */
  const char *op_type;
  /**
   * The node's name.
   */
  const char *name;
  /**
   * The inputs by position.
   */
  const struct OrtProviderValue *inputs;
  /**
   * The number of them.
   */
  size_t input_count;
  /**
   * The outputs by position.
   */
  const struct OrtProviderValue *outputs;
  /**
   * The number of them.
   */
  size_t output_count;
  /**
   * The attributes, unordered.
   */
  const struct OrtProviderAttribute *attributes;
  /**
   * The number of them.
   */
  size_t attribute_count;
} OrtProviderNode;

/**
 * The parameters of a compilation.
 */
typedef struct OrtProviderCompileInfo {
  /**
   * The size of this record in bytes.
   */
  size_t size;
  /**
   * The node.
   */
  const struct OrtProviderNode *node;
  /**
   * The number of threads that may be used.
   */
  uint32_t threads;
  /**
   * Non-zero if GEMMs may use bfloat16.
   */
  uint8_t bf16;
  /**
   * Non-zero if the kernel is only asked for its workspace and never runs: it need not pack
   * weights.
   */
  uint8_t counts_only;
  /**
   * The bytes left under the session's memory limit.
   */
  uint64_t available_bytes;
  /**
   * An argument for the host's `reserve` and `consume`, valid during this call.
   */
  struct OrtProviderCompilation *compilation;
} OrtProviderCompileInfo;

/**
 * One run of a kernel.
 */
typedef struct OrtProviderRun {
  /**
   * The size of this record in bytes.
   */
  size_t size;
  /**
   * The inputs by position.
   */
  const struct OrtProviderTensor *inputs;
  /**
   * The number of them.
   */
  size_t input_count;
  /**
   * The outputs by position.
   */
  const struct OrtProviderTensor *outputs;
  /**
   * The number of them.
   */
  size_t output_count;
  /**
   * The scratch memory that `workspace` asked for; absent if it asked for none.
   */
  const struct OrtProviderTensor *workspace;
  /**
   * The number of threads that may be used.
   */
  uint32_t threads;
  /**
   * For `workspace` only: the most bytes that a kernel should ask for if it can run with less.
   */
  uint64_t room;
} OrtProviderRun;

/**
 * A provider. Functions may be called from several threads at once. Arguments are valid during the
 * call. A function that returns an error code reports the reason with the host's `fail`. No
 * exception may leave a function.
 */
typedef struct OrtProviderTable {
  /**
   * The size of this table in bytes.
   */
  size_t size;
  /**
   * `ORT_PROVIDER_ABI_VERSION` of the library.
   */
  uint32_t abi_version;
  /**
   * The name by which users select the provider, for example `npu`.
   */
  const char *name;
  /**
   * The version of the library.
   */
  const char *version;
  /**
   * Returns the number of usable devices; if there are none, an error says why.
   */
  int32_t (*device_count)(uint32_t *count, struct OrtProviderReport *report);
  /**
   * Describes the device at `index`.
   */
  int32_t (*device_info)(uint32_t index, struct OrtProviderDeviceInfo *info, struct OrtProviderReport *report);
  /**
   * Opens the device at `index`. Unknown options are errors. A device whose kernels work in host
   * memory sets `uses_host_memory` to 1. It needs no `allocate`, `release`, `trim` and `copy`,
   * which may then be null.
   */
  int32_t (*open)(uint32_t index,
                  const struct OrtProviderOption *options,
                  size_t option_count,
                  struct OrtProviderDevice **device,
                  uint8_t *uses_host_memory,
                  struct OrtProviderReport *report);
  /**
   * Closes a device. Its kernels and memory have been released before.
   */
  void (*close)(struct OrtProviderDevice *device);
  /**
   * Allocates device memory at a multiple of `alignment`. `memory` is a handle of the library's
   * choice, not 0.
   */
  int32_t (*allocate)(struct OrtProviderDevice *device,
                      uint64_t bytes,
                      uint64_t alignment,
                      uint64_t *memory,
                      struct OrtProviderReport *report);
  /**
   * Frees device memory.
   */
  void (*release)(struct OrtProviderDevice *device, uint64_t memory);
  /**
   * Returns cached free memory to the system, and its size in bytes to the caller. May be null.
   */
  uint64_t (*trim)(struct OrtProviderDevice *device);
  /**
   * Copies a tensor to another of the same type and shape. At least one of them is in device
   * memory.
   */
  int32_t (*copy)(struct OrtProviderDevice *device,
                  const struct OrtProviderTensor *from,
                  const struct OrtProviderTensor *to,
                  struct OrtProviderReport *report);
  /**
   * Waits for all work submitted to the device. May be null if calls are synchronous.
   */
  int32_t (*synchronize)(struct OrtProviderDevice *device, struct OrtProviderReport *report);
  /**
   * Asks whether the device can run a node: `ORT_PROVIDER_OK`, or `ORT_PROVIDER_NOT_IMPLEMENTED`
   * with the reason. Any other code means that the device has failed.
   */
  int32_t (*claim)(struct OrtProviderDevice *device,
                   const struct OrtProviderNode *node,
                   struct OrtProviderClaim *claim,
                   struct OrtProviderReport *report);
  /**
   * Compiles a claimed node to a kernel.
   */
  int32_t (*compile)(struct OrtProviderDevice *device,
                     const struct OrtProviderCompileInfo *info,
                     struct OrtProviderKernel **kernel,
                     struct OrtProviderReport *report);
  /**
   * Returns the bytes of scratch memory that a run with these shapes needs. May be null if no
   * kernel needs any.
   */
  int32_t (*workspace)(struct OrtProviderKernel *kernel,
                       const struct OrtProviderRun *run,
                       uint64_t *bytes,
                       struct OrtProviderReport *report);
  /**
   * Runs the kernel.
   */
  int32_t (*run)(struct OrtProviderKernel *kernel,
                 const struct OrtProviderRun *run,
                 struct OrtProviderReport *report);
  /**
   * Frees a kernel.
   */
  void (*release_kernel)(struct OrtProviderKernel *kernel);
  /**
   * Fails if the device is lost, for example because its driver has reset it. May be null.
   */
  int32_t (*check)(struct OrtProviderDevice *device, struct OrtProviderReport *report);
  /**
   * Non-zero if the device prefers NHWC, that is `NhwcConv` of the domain `ort-runtime` and
   * similar operators, as far as it claims them. May be null.
   */
  uint8_t (*prefers_channels_last)(struct OrtProviderDevice *device);
  /**
   * The width in bytes of the vector loads from weight matrices. GEMM weights whose rows are not
   * a multiple of it are transposed if their columns are. 1 if the device needs no alignment, or
   * packs weights. Null means 1.
   */
  size_t (*vector_bytes)(struct OrtProviderDevice *device);
} OrtProviderTable;

/**
 * The functions of the host. The table is valid for the life of the process.
 */
typedef struct OrtProviderHost {
  /**
   * The size of this table in bytes.
   */
  size_t size;
  /**
   * `ORT_PROVIDER_ABI_VERSION` of the host.
   */
  uint32_t abi_version;
  /**
   * The version of the host.
   */
  const char *version;
  /**
   * Reports why a call fails, and what the user can try (or null). Returns `code`, which the
   * failing call returns in turn.
   */
  int32_t (*fail)(struct OrtProviderReport *report, int32_t code, const char *message, const char *help);
  /**
   * Adds a property to the description of a device. The property `name` is the device's name;
   * all others are shown verbatim.
   */
  void (*fact)(struct OrtProviderFacts *facts, const char *name, const char *value);
  /**
   * Allows an input and an output of equal size to alias. A kernel for which `grows` is non-zero
   * refuses runs whose output would be longer itself, like the past and the present of a KV
   * cache.
   */
  void (*in_place)(struct OrtProviderClaim *claim, uint32_t input, uint32_t output, uint8_t grows);
  /**
   * Requires an input to be in host memory.
   */
  void (*host_input)(struct OrtProviderClaim *claim, uint32_t input);
  /**
   * Allows an input to be at any alignment.
   */
  void (*unaligned_input)(struct OrtProviderClaim *claim, uint32_t input);
  /**
   * Declares that the kernel does not compute an output that has no reader.
   */
  void (*left_out)(struct OrtProviderClaim *claim, uint32_t output);
  /**
   * Reserves bytes that the kernel keeps until it is released, under the session's memory limit.
   * Call it before the allocation; if it does not return `ORT_PROVIDER_OK`, do not allocate.
   */
  int32_t (*reserve)(struct OrtProviderCompilation *compilation,
                     uint64_t bytes,
                     struct OrtProviderReport *report);
  /**
   * Declares that runs do not read a constant input any more; it is then absent.
   */
  void (*consume)(struct OrtProviderCompilation *compilation, uint32_t input);
  /**
   * Keeps a constant's bytes valid until `release`.
   */
  void (*retain)(const struct OrtProviderOwner *owner);
  /**
   * Undoes one `retain`.
   */
  void (*release)(const struct OrtProviderOwner *owner);
} OrtProviderHost;

/**
 * The type of the function `ort_provider`. It returns the library's table for a host of this ABI
 * version, valid for the life of the process. A library of another version returns a table with
 * its own version. Null means that there is no provider.
 */
typedef const struct OrtProviderTable *(*OrtProviderEntry)(uint32_t abi_version,
                                                           const struct OrtProviderHost *host);

#endif  /* ORT_PROVIDER_H */

#if defined(_WIN32)
#define ORT_PROVIDER_EXPORT __declspec(dllexport)
#else
#define ORT_PROVIDER_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The one function that a library exports, of the type `OrtProviderEntry`.
 */
ORT_PROVIDER_EXPORT const OrtProviderTable *ort_provider(uint32_t abi_version, const OrtProviderHost *host);

#ifdef __cplusplus
}
#endif
