/*
 * The C template with one fault in it, which FAULT names: what a host has to survive.
 */

#include <stdint.h>

/* The template's own entry gets another name; this file exports the one that the host asks for. */
#define ort_provider template_entry
#include "provider.c"
#undef ort_provider

enum Fault {
  NO_FAULT,
  OTHER_VERSION,
  SHORT_TABLE,
  EARLIER_TABLE,
  LONGER_TABLE,
  NO_TABLE,
  NO_NAME,
  ODD_NAME,
  NO_RUN,
  NO_ALLOCATE,
  NO_DEVICE_NAME,
  MANY_DEVICES,
  OPENS_NOTHING,
  CLAIMS_PLACES,
  CLAIMS_HOST_INPUT,
  CLAIMS_WITHOUT_END,
  CLAIM_FAILS,
  ODD_CODE,
  NO_REASON,
  COMPILES_NOTHING,
  COMPILE_FAILS,
  HUGE_WORKSPACE,
  ALLOCATES_NOTHING,
  RUN_FAILS,
};

static int32_t opens_nothing(uint32_t index, const OrtProviderOption *options, size_t count, OrtProviderDevice **device,
                             uint8_t *on_host, OrtProviderReport *report) {
  (void)index, (void)options, (void)count, (void)device, (void)on_host, (void)report;
  return ORT_PROVIDER_OK;
}

static int32_t no_device_name(uint32_t index, OrtProviderDeviceInfo *info, OrtProviderReport *report) {
  (void)index, (void)info, (void)report;
  return ORT_PROVIDER_OK;
}

static int32_t many_devices(uint32_t *count, OrtProviderReport *report) {
  (void)report;
  *count = UINT32_MAX;
  return ORT_PROVIDER_OK;
}

static int32_t claims_places(OrtProviderDevice *device, const OrtProviderNode *node, OrtProviderClaim *claim,
                             OrtProviderReport *report) {
  (void)device, (void)node, (void)report;
  host->in_place(claim, 7, 0, 0);
  return ORT_PROVIDER_OK;
}

static int32_t claims_host_input(OrtProviderDevice *device, const OrtProviderNode *node, OrtProviderClaim *claim,
                                 OrtProviderReport *report) {
  (void)device, (void)node, (void)report;
  host->host_input(claim, 4000000000u);
  return ORT_PROVIDER_OK;
}

static int32_t claims_without_end(OrtProviderDevice *device, const OrtProviderNode *node, OrtProviderClaim *claim,
                                  OrtProviderReport *report) {
  (void)device, (void)node, (void)report;
  for (uint32_t i = 0; i < 1000000; i++) {
    host->unaligned_input(claim, 0);
  }
  return ORT_PROVIDER_OK;
}

static int32_t claim_fails(OrtProviderDevice *device, const OrtProviderNode *node, OrtProviderClaim *claim,
                           OrtProviderReport *report) {
  (void)device, (void)node, (void)claim;
  return host->fail(report, ORT_PROVIDER_EP_FAIL, "the driver hung up", "reset the device");
}

static int32_t odd_code(OrtProviderDevice *device, const OrtProviderNode *node, OrtProviderClaim *claim,
                        OrtProviderReport *report) {
  (void)device, (void)node, (void)claim;
  return host->fail(report, 12345, "something", NULL);
}

static int32_t no_reason(OrtProviderDevice *device, const OrtProviderNode *node, OrtProviderClaim *claim,
                         OrtProviderReport *report) {
  (void)device, (void)node, (void)claim, (void)report;
  return ORT_PROVIDER_FAIL;
}

static int32_t compiles_nothing(OrtProviderDevice *device, const OrtProviderCompileInfo *info,
                                OrtProviderKernel **kernel, OrtProviderReport *report) {
  (void)device, (void)info, (void)kernel, (void)report;
  return ORT_PROVIDER_OK;
}

static int32_t compile_fails(OrtProviderDevice *device, const OrtProviderCompileInfo *info, OrtProviderKernel **kernel,
                             OrtProviderReport *report) {
  (void)device, (void)info, (void)kernel;
  return host->fail(report, ORT_PROVIDER_FAIL, "the compiler crashed", NULL);
}

static int32_t huge_workspace(OrtProviderKernel *kernel, const OrtProviderRun *run, uint64_t *bytes,
                              OrtProviderReport *report) {
  (void)kernel, (void)run, (void)report;
  *bytes = UINT64_MAX;
  return ORT_PROVIDER_OK;
}

static int32_t allocates_nothing(OrtProviderDevice *device, uint64_t bytes, uint64_t alignment, uint64_t *memory,
                                 OrtProviderReport *report) {
  (void)device, (void)bytes, (void)alignment, (void)memory, (void)report;
  return ORT_PROVIDER_OK;
}

static int32_t run_fails(OrtProviderKernel *kernel, const OrtProviderRun *run, OrtProviderReport *report) {
  (void)kernel, (void)run;
  return host->fail(report, ORT_PROVIDER_RUNTIME_EXCEPTION, "a bit was lost", "run again");
}

/* The table of a library that is newer than the host: what comes behind is none of its business. */
static struct {
  OrtProviderTable table;
  void *newer[4];
} patched;

ORT_PROVIDER_EXPORT const OrtProviderTable *ort_provider(uint32_t abi_version, const OrtProviderHost *given) {
  OrtProviderTable *table = &patched.table;
  *table = *template_entry(abi_version, given);
  table->name = "misbehaving";
  switch (FAULT) {
  case NO_FAULT: break;
  case OTHER_VERSION: table->abi_version = ORT_PROVIDER_ABI_VERSION + 1; break;
  case SHORT_TABLE: table->size = offsetof(OrtProviderTable, claim); break;
  case EARLIER_TABLE:
    /* What comes behind is none of the host's business. */
    table->size = offsetof(OrtProviderTable, prefers_channels_last);
    memset(&table->prefers_channels_last, 1, sizeof table->prefers_channels_last);
    break;
  case LONGER_TABLE: table->size = sizeof patched; break;
  case NO_TABLE: return NULL;
  case NO_NAME: table->name = NULL; break;
  case ODD_NAME: table->name = "n p u"; break;
  case NO_RUN: table->run = NULL; break;
  case NO_ALLOCATE: table->allocate = NULL; break;
  case NO_DEVICE_NAME: table->device_info = no_device_name; break;
  case MANY_DEVICES: table->device_count = many_devices; break;
  case OPENS_NOTHING: table->open = opens_nothing; break;
  case CLAIMS_PLACES: table->claim = claims_places; break;
  case CLAIMS_HOST_INPUT: table->claim = claims_host_input; break;
  case CLAIMS_WITHOUT_END: table->claim = claims_without_end; break;
  case CLAIM_FAILS: table->claim = claim_fails; break;
  case ODD_CODE: table->claim = odd_code; break;
  case NO_REASON: table->claim = no_reason; break;
  case COMPILES_NOTHING: table->compile = compiles_nothing; break;
  case COMPILE_FAILS: table->compile = compile_fails; break;
  case HUGE_WORKSPACE: table->workspace = huge_workspace; break;
  case ALLOCATES_NOTHING: table->allocate = allocates_nothing; break;
  case RUN_FAILS: table->run = run_fails; break;
  }
  return table;
}
