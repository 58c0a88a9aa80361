/*
 * A provider library in C, to start one's own from: a small device with memory of its own.
 *
 * The device stands for an accelerator: the host cannot touch its memory, only `copy` moves bytes in and out. It adds,
 * multiplies matrices and cuts off below zero, in float32. The comments say where a real device differs.
 *
 *     cc -O2 -shared -fPIC -I ort-core/include -o libtemplate_c.so examples/provider-template-c/provider.c
 *     ort run model.onnx --ep ./libtemplate_c.so --ep cpu
 */

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ort_provider.h"

/* ONNX's code of the element type float32. */
enum { FLOAT32 = 1 };

/* The host's table, which `ort_provider` was given. */
static const OrtProviderHost *host;

/* The device: how much memory it has, and how much of that is taken. */
struct OrtProviderDevice {
  pthread_mutex_t lock;
  uint64_t limit;
  uint64_t in_use;
};

/* A block of the device's memory. A real device gives a number of its driver to the host, here it is the block's address. */
typedef struct Block {
  uint64_t bytes;
  unsigned char *start;
} Block;

/* Where a tensor's elements are, for the device's own functions. */
static float *elements(const OrtProviderTensor *tensor) {
  const Block *block = (const Block *)(uintptr_t)tensor->memory;
  return block == NULL ? NULL : (float *)(block->start + tensor->offset);
}

static uint64_t element_count(const OrtProviderTensor *tensor) { return tensor->bytes / sizeof(float); }

/* What the device does for each operator: one function and one row of the table below. */
typedef struct Operator {
  const char *op_type;
  /* Whether a node can be claimed, or why not. */
  const char *(*refuse)(const OrtProviderNode *node);
  /* Whether the first input and the output may be the same memory. */
  bool in_place;
  int32_t (*run)(const OrtProviderRun *run, OrtProviderReport *report);
} Operator;

/* Whether two values have the same shape in every run: the same expressions of the model's symbols. */
static bool same_shape(const OrtProviderValue *a, const OrtProviderValue *b) {
  if (a->rank < 0 || a->rank != b->rank) {
    return false;
  }
  for (int32_t axis = 0; axis < a->rank; axis++) {
    bool known = strcmp(a->expressions[axis], "?") != 0;
    if (!known || strcmp(a->expressions[axis], b->expressions[axis]) != 0) {
      return false;
    }
  }
  return true;
}

static const char *refuse_relu(const OrtProviderNode *node) {
  (void)node;
  return NULL;
}

static const char *refuse_add(const OrtProviderNode *node) {
  return same_shape(&node->inputs[0], &node->inputs[1]) ? NULL : "the device adds tensors of one shape, and does not broadcast";
}

static const char *refuse_mat_mul(const OrtProviderNode *node) {
  bool matrices = node->inputs[0].rank == 2 && node->inputs[1].rank == 2;
  return matrices ? NULL : "the device multiplies matrices, not stacks of them";
}

static int32_t run_relu(const OrtProviderRun *run, OrtProviderReport *report) {
  (void)report;
  const float *x = elements(&run->inputs[0]);
  float *y = elements(&run->outputs[0]);
  for (uint64_t i = 0; i < element_count(&run->outputs[0]); i++) {
    /* NaN stays NaN, as ONNX has it. */
    y[i] = x[i] < 0.0f ? 0.0f : x[i];
  }
  return ORT_PROVIDER_OK;
}

static int32_t run_add(const OrtProviderRun *run, OrtProviderReport *report) {
  if (run->inputs[0].bytes != run->outputs[0].bytes || run->inputs[1].bytes != run->outputs[0].bytes) {
    return host->fail(report, ORT_PROVIDER_RUNTIME_EXCEPTION, "the inputs have different shapes", NULL);
  }
  const float *a = elements(&run->inputs[0]), *b = elements(&run->inputs[1]);
  float *y = elements(&run->outputs[0]);
  for (uint64_t i = 0; i < element_count(&run->outputs[0]); i++) {
    y[i] = a[i] + b[i];
  }
  return ORT_PROVIDER_OK;
}

static int32_t run_mat_mul(const OrtProviderRun *run, OrtProviderReport *report) {
  const OrtProviderTensor *a = &run->inputs[0], *b = &run->inputs[1], *y = &run->outputs[0];
  int64_t m = a->sizes[0], k = a->sizes[1], n = b->sizes[1];
  if (b->sizes[0] != k) {
    char message[120];
    snprintf(message, sizeof message, "a matrix of %lld columns by one of %lld rows", (long long)k, (long long)b->sizes[0]);
    return host->fail(report, ORT_PROVIDER_RUNTIME_EXCEPTION, message, "make them equal");
  }
  const float *from = elements(a), *with = elements(b);
  float *to = elements(y);
  for (int64_t row = 0; row < m; row++) {
    for (int64_t column = 0; column < n; column++) {
      float sum = 0.0f;
      for (int64_t i = 0; i < k; i++) {
        sum += from[row * k + i] * with[i * n + column];
      }
      to[row * n + column] = sum;
    }
  }
  return ORT_PROVIDER_OK;
}

/* To add an operator, write its two functions and a row. */
static const Operator operators[] = {
  {"Add", refuse_add, true, run_add},
  {"MatMul", refuse_mat_mul, false, run_mat_mul},
  {"Relu", refuse_relu, true, run_relu},
};

static const Operator *find_operator(const OrtProviderNode *node) {
  for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
    if (node->domain[0] == '\0' && strcmp(node->op_type, operators[i].op_type) == 0) {
      return &operators[i];
    }
  }
  return NULL;
}

/* A kernel: what `run` needs of the node. A real device compiles its program here. */
struct OrtProviderKernel {
  const Operator *operation;
};

static int32_t device_count(uint32_t *count, OrtProviderReport *report) {
  (void)report;
  *count = 1;
  return ORT_PROVIDER_OK;
}

static int32_t device_info(uint32_t index, OrtProviderDeviceInfo *info, OrtProviderReport *report) {
  if (index != 0) {
    return host->fail(report, ORT_PROVIDER_INVALID_ARGUMENT, "there is one device only", "open device 0");
  }
  host->fact(info->facts, "name", "template device");
  host->fact(info->facts, "operators", "Add, MatMul, Relu");
  return ORT_PROVIDER_OK;
}

static int32_t open_device(uint32_t index, const OrtProviderOption *options, size_t option_count,
                           OrtProviderDevice **device, uint8_t *uses_host_memory, OrtProviderReport *report) {
  (void)uses_host_memory; /* It stays 0: the device has memory of its own. */
  uint64_t limit = UINT64_MAX;
  if (index != 0) {
    return host->fail(report, ORT_PROVIDER_INVALID_ARGUMENT, "there is one device only", "open device 0");
  }
  for (size_t i = 0; i < option_count; i++) {
    char *end = NULL;
    if (strcmp(options[i].name, "memory_limit") != 0) {
      return host->fail(report, ORT_PROVIDER_INVALID_ARGUMENT, "the template has one option: memory_limit", NULL);
    }
    limit = strtoull(options[i].value, &end, 10);
    if (end == options[i].value || *end != '\0') {
      return host->fail(report, ORT_PROVIDER_INVALID_ARGUMENT, "memory_limit is no number of bytes", NULL);
    }
  }
  OrtProviderDevice *opened = calloc(1, sizeof *opened);
  if (opened == NULL) {
    return host->fail(report, ORT_PROVIDER_OUT_OF_MEMORY, "no memory for the device", NULL);
  }
  pthread_mutex_init(&opened->lock, NULL);
  opened->limit = limit;
  *device = opened;
  return ORT_PROVIDER_OK;
}

static void close_device(OrtProviderDevice *device) {
  pthread_mutex_destroy(&device->lock);
  free(device);
}

static int32_t allocate(OrtProviderDevice *device, uint64_t bytes, uint64_t alignment, uint64_t *memory,
                        OrtProviderReport *report) {
  pthread_mutex_lock(&device->lock);
  bool fits = bytes <= device->limit - device->in_use;
  device->in_use += fits ? bytes : 0;
  pthread_mutex_unlock(&device->lock);
  if (!fits) {
    return host->fail(report, ORT_PROVIDER_OUT_OF_MEMORY, "the device's memory_limit is reached", "raise memory_limit");
  }
  Block *block = malloc(sizeof *block);
  void *start = NULL;
  uint64_t least = alignment < sizeof(void *) ? sizeof(void *) : alignment;
  if (block == NULL || posix_memalign(&start, least, bytes) != 0) {
    free(block);
    pthread_mutex_lock(&device->lock);
    device->in_use -= bytes;
    pthread_mutex_unlock(&device->lock);
    return host->fail(report, ORT_PROVIDER_OUT_OF_MEMORY, "the device has no memory left", NULL);
  }
  *block = (Block){bytes, start};
  *memory = (uint64_t)(uintptr_t)block;
  return ORT_PROVIDER_OK;
}

static void release(OrtProviderDevice *device, uint64_t memory) {
  Block *block = (Block *)(uintptr_t)memory;
  pthread_mutex_lock(&device->lock);
  device->in_use -= block->bytes;
  pthread_mutex_unlock(&device->lock);
  free(block->start);
  free(block);
}

/* The first byte of a tensor wherever it is. Only this function may mix the two memories. */
static void *first_byte(const OrtProviderTensor *tensor) {
  return tensor->kind == ORT_PROVIDER_HOST ? tensor->data : (void *)elements(tensor);
}

static int32_t copy(OrtProviderDevice *device, const OrtProviderTensor *from, const OrtProviderTensor *to,
                    OrtProviderReport *report) {
  (void)device;
  (void)report;
  if (from->bytes > 0) {
    memmove(first_byte(to), first_byte(from), from->bytes);
  }
  return ORT_PROVIDER_OK;
}

static int32_t claim(OrtProviderDevice *device, const OrtProviderNode *node, OrtProviderClaim *claim,
                     OrtProviderReport *report) {
  (void)device;
  const Operator *found = find_operator(node);
  if (found == NULL) {
    return host->fail(report, ORT_PROVIDER_NOT_IMPLEMENTED, "the device has no such operator", NULL);
  }
  for (size_t i = 0; i < node->input_count; i++) {
    if (node->inputs[i].element_type != FLOAT32) {
      return host->fail(report, ORT_PROVIDER_NOT_IMPLEMENTED, "the device computes in float32 only", NULL);
    }
  }
  const char *reason = found->refuse(node);
  if (reason != NULL) {
    return host->fail(report, ORT_PROVIDER_NOT_IMPLEMENTED, reason, NULL);
  }
  if (found->in_place) {
    host->in_place(claim, 0, 0, 0);
  }
  return ORT_PROVIDER_OK;
}

static int32_t compile(OrtProviderDevice *device, const OrtProviderCompileInfo *info, OrtProviderKernel **kernel,
                       OrtProviderReport *report) {
  (void)device;
  OrtProviderKernel *made = malloc(sizeof *made);
  if (made == NULL) {
    return host->fail(report, ORT_PROVIDER_OUT_OF_MEMORY, "no memory for the kernel", NULL);
  }
  made->operation = find_operator(info->node);
  *kernel = made;
  return ORT_PROVIDER_OK;
}

static int32_t run(OrtProviderKernel *kernel, const OrtProviderRun *run, OrtProviderReport *report) {
  return kernel->operation->run(run, report);
}

static void release_kernel(OrtProviderKernel *kernel) { free(kernel); }

/* Functions that are left out are null: this device is done when its calls return, keeps no released memory, and its
 * kernels need no scratch memory. */
static const OrtProviderTable table = {
  .size = sizeof(OrtProviderTable),
  .abi_version = ORT_PROVIDER_ABI_VERSION,
  .name = "template-c",
  .version = "0.1.0",
  .device_count = device_count,
  .device_info = device_info,
  .open = open_device,
  .close = close_device,
  .allocate = allocate,
  .release = release,
  .copy = copy,
  .claim = claim,
  .compile = compile,
  .run = run,
  .release_kernel = release_kernel,
};

const OrtProviderTable *ort_provider(uint32_t abi_version, const OrtProviderHost *given) {
  /* A host of another version reads this library's version in the table, and says so. */
  if (abi_version == ORT_PROVIDER_ABI_VERSION) {
    host = given;
  }
  return &table;
}
