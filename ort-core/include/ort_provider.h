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
 * The version of this interface. A library of another version is refused.
 */
#define ORT_PROVIDER_ABI_VERSION 1

/**
 * The call did what it should.
 */
#define ORT_PROVIDER_OK 0

/**
 * Something failed that no other code describes.
 */
#define ORT_PROVIDER_FAIL 1

/**
 * A value given by the caller does not fit, such as an option.
 */
#define ORT_PROVIDER_INVALID_ARGUMENT 2

/**
 * A kernel failed while the model ran.
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
 * The device's memory, or a limit, does not suffice.
 */
#define ORT_PROVIDER_OUT_OF_MEMORY 20

/**
 * The input or output is left out, or nobody reads it.
 */
#define ORT_PROVIDER_ABSENT 0

/**
 * The elements are in the host's memory, at `data`.
 */
#define ORT_PROVIDER_HOST 1

/**
 * The elements are in the device's memory, `offset` bytes into `memory`.
 */
#define ORT_PROVIDER_DEVICE 2

/**
 * Only type and shape are known.
 */
#define ORT_PROVIDER_SHAPE 3

/**
 * One float. The kinds of attributes have the codes of ONNX's `AttributeProto.AttributeType`.
 */
#define ORT_PROVIDER_ATTRIBUTE_FLOAT 1

/**
 * One integer.
 */
#define ORT_PROVIDER_ATTRIBUTE_INT 2

/**
 * One string.
 */
#define ORT_PROVIDER_ATTRIBUTE_STRING 3

/**
 * One tensor.
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
 * Where the host collects what a claim says.
 */
typedef struct OrtProviderClaim OrtProviderClaim;

/**
 * What the host keeps of the node that is being compiled.
 */
typedef struct OrtProviderCompilation OrtProviderCompilation;

/**
 * A device that the library opened; only the library looks inside.
 */
typedef struct OrtProviderDevice OrtProviderDevice;

/**
 * Where the host collects what a device says of itself.
 */
typedef struct OrtProviderFacts OrtProviderFacts;

/**
 * A compiled node; only the library looks inside.
 */
typedef struct OrtProviderKernel OrtProviderKernel;

/**
 * The holder of a constant's bytes.
 */
typedef struct OrtProviderOwner OrtProviderOwner;

/**
 * Where the host collects the message of an error.
 */
typedef struct OrtProviderReport OrtProviderReport;

/**
 * What a device is.
 */
typedef struct OrtProviderDeviceInfo {
  /**
   * The bytes of this record.
   */
  size_t size;
  /**
   * The bytes of its memory; 0 where it does not tell.
   */
  uint64_t memory_bytes;
  /**
   * To be given back to the host's `fact`, during this call.
   */
  struct OrtProviderFacts *facts;
} OrtProviderDeviceInfo;

/**
 * An option of the device, as text. All text is UTF-8 and ends with a zero byte.
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
 * A tensor of a run. The bytes of an output are to be written, those of an input only read.
 */
typedef struct OrtProviderTensor {
  /**
   * `ORT_PROVIDER_ABSENT`, `ORT_PROVIDER_HOST`, `ORT_PROVIDER_DEVICE` or `ORT_PROVIDER_SHAPE`.
   */
  uint32_t kind;
  /**
   * The element type, by ONNX's `TensorProto.DataType`; 0 where only the shape is known.
   */
  int32_t element_type;
  /**
   * The number of dimensions.
   */
  uint32_t rank;
  /**
   * For an output: the input whose elements it holds at first, because both are the same memory;
   * -1 for none. That input has the output's shape then.
   */
  int32_t in_place;
  /**
   * The sizes of the dimensions.
   */
  const int64_t *sizes;
  /**
   * The bytes of all elements.
   */
  uint64_t bytes;
  /**
   * The first byte in the host's memory.
   */
  void *data;
  /**
   * The device's memory, as `allocate` gave it.
   */
  uint64_t memory;
  /**
   * The first byte in it.
   */
  uint64_t offset;
} OrtProviderTensor;

/**
 * What is known of a value before anything runs.
 */
typedef struct OrtProviderValue {
  /**
   * `ORT_PROVIDER_ABSENT`; `ORT_PROVIDER_HOST` for a constant; else `ORT_PROVIDER_SHAPE`.
   */
  uint32_t kind;
  /**
   * The element type, by ONNX's `TensorProto.DataType`; 0 where it is not known.
   */
  int32_t element_type;
  /**
   * The number of dimensions; -1 where it is not known.
   */
  int32_t rank;
  /**
   * The sizes of the dimensions; -1 for one that only the run tells.
   */
  const int64_t *sizes;
  /**
   * The sizes as expressions of the model's symbols, such as `2*batch`; `?` for one that nothing
   * is known of.
   */
  const char *const *expressions;
  /**
   * A constant's elements, row by row, little-endian, at any alignment.
   */
  const uint8_t *data;
  /**
   * The bytes of a constant.
   */
  uint64_t bytes;
  /**
   * What holds a constant's bytes. They are there during the call, and from `retain` to
   * `release`.
   */
  const struct OrtProviderOwner *owner;
} OrtProviderValue;

/**
 * An attribute; the fields of its kind are set.
 */
typedef struct OrtProviderAttribute {
  /**
   * Its name.
   */
  const char *name;
  /**
   * One of `ORT_PROVIDER_ATTRIBUTE_FLOAT` and so on.
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
   * The tensor, as a constant.
   */
  const struct OrtProviderValue *tensor;
} OrtProviderAttribute;

/**
 * A node in the form of the newest operator set: attributes have their defaults, nothing is left
 * of older sets.
 */
typedef struct OrtProviderNode {
  /**
   * The bytes of this record.
   */
  size_t size;
  /**
   * The operator's domain; empty for ONNX's own.
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
   * How many.
   */
  size_t input_count;
  /**
   * The outputs by position.
   */
  const struct OrtProviderValue *outputs;
  /**
   * How many.
   */
  size_t output_count;
  /**
   * The attributes in no order.
   */
  const struct OrtProviderAttribute *attributes;
  /**
   * How many.
   */
  size_t attribute_count;
} OrtProviderNode;

/**
 * What a node is compiled with.
 */
typedef struct OrtProviderCompileInfo {
  /**
   * The bytes of this record.
   */
  size_t size;
  /**
   * The node.
   */
  const struct OrtProviderNode *node;
  /**
   * The threads that may be used.
   */
  uint32_t threads;
  /**
   * Not 0 where products may be made in bfloat16.
   */
  uint8_t bf16;
  /**
   * Not 0 where the kernel is asked for its workspace and never runs: nothing need be packed.
   */
  uint8_t counts_only;
  /**
   * The bytes that the session's memory limit leaves.
   */
  uint64_t available_bytes;
  /**
   * To be given back to the host's `reserve` and `consume`, during this call.
   */
  struct OrtProviderCompilation *compilation;
} OrtProviderCompileInfo;

/**
 * One run of a kernel.
 */
typedef struct OrtProviderRun {
  /**
   * The bytes of this record.
   */
  size_t size;
  /**
   * The inputs by position.
   */
  const struct OrtProviderTensor *inputs;
  /**
   * How many.
   */
  size_t input_count;
  /**
   * The outputs by position.
   */
  const struct OrtProviderTensor *outputs;
  /**
   * How many.
   */
  size_t output_count;
  /**
   * The scratch memory that `workspace` asked for, as bytes; absent where it asked for none.
   */
  const struct OrtProviderTensor *workspace;
  /**
   * The threads that may be used.
   */
  uint32_t threads;
  /**
   * In a question for the workspace the bytes that it is to have at most where the kernel has
   * ways to do with less.
   */
  uint64_t room;
} OrtProviderRun;

/**
 * A provider. Every function may be called from several threads at once; what is given to a call
 * lives as long as the call. A function that returns a code explains with the host's `fail` what
 * went wrong. None of them may let a C++ exception or the like out.
 */
typedef struct OrtProviderTable {
  /**
   * The bytes of this table.
   */
  size_t size;
  /**
   * `ORT_PROVIDER_ABI_VERSION` of the library.
   */
  uint32_t abi_version;
  /**
   * The name that users write, for example `npu`.
   */
  const char *name;
  /**
   * The library's own version.
   */
  const char *version;
  /**
   * The number of devices that work here; the error says why there are none.
   */
  int32_t (*device_count)(uint32_t *count, struct OrtProviderReport *report);
  /**
   * Describes the device at `index`.
   */
  int32_t (*device_info)(uint32_t index, struct OrtProviderDeviceInfo *info, struct OrtProviderReport *report);
  /**
   * Opens the device at `index`. Unknown options are errors. `uses_host_memory` is set to 1
   * where its kernels work on the host's memory, and stays 0 otherwise: such a device needs no
   * `allocate`, `release`, `trim` and `copy`, which may be null for it.
   */
  int32_t (*open)(uint32_t index,
                  const struct OrtProviderOption *options,
                  size_t option_count,
                  struct OrtProviderDevice **device,
                  uint8_t *uses_host_memory,
                  struct OrtProviderReport *report);
  /**
   * Closes a device, whose kernels and memory were released before.
   */
  void (*close)(struct OrtProviderDevice *device);
  /**
   * Gives device memory that begins at a multiple of `alignment`: any number but 0 that the
   * library knows it by.
   */
  int32_t (*allocate)(struct OrtProviderDevice *device,
                      uint64_t bytes,
                      uint64_t alignment,
                      uint64_t *memory,
                      struct OrtProviderReport *report);
  /**
   * Takes device memory back.
   */
  void (*release)(struct OrtProviderDevice *device, uint64_t memory);
  /**
   * Gives released memory that the device keeps to the system, and returns how many bytes. May
   * be null.
   */
  uint64_t (*trim)(struct OrtProviderDevice *device);
  /**
   * Copies the elements of a tensor to another of the same type and shape; one of them or both
   * are in the device's memory.
   */
  int32_t (*copy)(struct OrtProviderDevice *device,
                  const struct OrtProviderTensor *from,
                  const struct OrtProviderTensor *to,
                  struct OrtProviderReport *report);
  /**
   * Waits until the device has done what it was given to do. May be null where it is done when
   * calls return.
   */
  int32_t (*synchronize)(struct OrtProviderDevice *device, struct OrtProviderReport *report);
  /**
   * Whether the device runs a node: `ORT_PROVIDER_OK`, or `ORT_PROVIDER_NOT_IMPLEMENTED` with
   * the reason. Any other code says that the device does not work.
   */
  int32_t (*claim)(struct OrtProviderDevice *device,
                   const struct OrtProviderNode *node,
                   struct OrtProviderClaim *claim,
                   struct OrtProviderReport *report);
  /**
   * Makes the kernel of a claimed node.
   */
  int32_t (*compile)(struct OrtProviderDevice *device,
                     const struct OrtProviderCompileInfo *info,
                     struct OrtProviderKernel **kernel,
                     struct OrtProviderReport *report);
  /**
   * The bytes of scratch memory that a run with these shapes needs. May be null where no kernel
   * needs any.
   */
  int32_t (*workspace)(struct OrtProviderKernel *kernel,
                       const struct OrtProviderRun *run,
                       uint64_t *bytes,
                       struct OrtProviderReport *report);
  /**
   * Computes the outputs.
   */
  int32_t (*run)(struct OrtProviderKernel *kernel,
                 const struct OrtProviderRun *run,
                 struct OrtProviderReport *report);
  /**
   * Releases a kernel.
   */
  void (*release_kernel)(struct OrtProviderKernel *kernel);
  /**
   * Fails where the device can run nothing any more, for example because its driver has reset
   * it. May be null.
   */
  int32_t (*check)(struct OrtProviderDevice *device, struct OrtProviderReport *report);
  /**
   * Other than 0 where images are to have the channels last: `NhwcConv` of the domain
   * `ort-runtime` and the like, where it claims these. May be null.
   */
  uint8_t (*prefers_channels_last)(struct OrtProviderDevice *device);
  /**
   * The bytes of the vectors in which matrices are read: weights of products whose rows are no
   * multiple of that are transposed, if their columns are. 1 where weights are read as they are,
   * or packed. May be null: 1.
   */
  size_t (*vector_bytes)(struct OrtProviderDevice *device);
} OrtProviderTable;

/**
 * What the host does for a library. It stays where it is as long as the process lives.
 */
typedef struct OrtProviderHost {
  /**
   * The bytes of this table.
   */
  size_t size;
  /**
   * `ORT_PROVIDER_ABI_VERSION` of the host.
   */
  uint32_t abi_version;
  /**
   * The host's own version.
   */
  const char *version;
  /**
   * Says why a call fails, and what the user can try (or null); returns `code`, to be returned
   * by the call.
   */
  int32_t (*fail)(struct OrtProviderReport *report, int32_t code, const char *message, const char *help);
  /**
   * A fact of a device: the fact `name` is its own name, all others are shown as they are.
   */
  void (*fact)(struct OrtProviderFacts *facts, const char *name, const char *value);
  /**
   * Says of a claimed node that an input and an output that are equally long may be the same
   * memory. Where `grows` is not 0, the kernel itself refuses a run whose output would be
   * longer, as that of a cache's past and present does.
   */
  void (*in_place)(struct OrtProviderClaim *claim, uint32_t input, uint32_t output, uint8_t grows);
  /**
   * Says of a claimed node that an input must be in the host's memory.
   */
  void (*host_input)(struct OrtProviderClaim *claim, uint32_t input);
  /**
   * Says of a claimed node that an input may be at any alignment.
   */
  void (*unaligned_input)(struct OrtProviderClaim *claim, uint32_t input);
  /**
   * Says of a claimed node that it leaves an output out where nobody reads it.
   */
  void (*left_out)(struct OrtProviderClaim *claim, uint32_t output);
  /**
   * Counts bytes that the kernel keeps against the session's memory limit, until it is released.
   * To be called before the memory is taken; other than `ORT_PROVIDER_OK`, it must not be taken.
   */
  int32_t (*reserve)(struct OrtProviderCompilation *compilation,
                     uint64_t bytes,
                     struct OrtProviderReport *report);
  /**
   * Says that runs will not read a constant input any more, which then is absent.
   */
  void (*consume)(struct OrtProviderCompilation *compilation, uint32_t input);
  /**
   * Keeps a constant's bytes until `release`.
   */
  void (*retain)(const struct OrtProviderOwner *owner);
  /**
   * Gives up what `retain` kept.
   */
  void (*release)(const struct OrtProviderOwner *owner);
} OrtProviderHost;

/**
 * The type of the function `ort_provider`: the library's table for a host of this version of the
 * interface, which stays where it is as long as the process lives. A library that does not know
 * the version returns its table all the same, with its own; null says that there is no provider.
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
