/* A driver without a GPU: the functions that cuda.rs calls, on the host's memory. Calls outside the context fail as the real
 * driver's do; an event is complete at the second query. */
#include <stdint.h>
#include <stdlib.h>

enum { OK, OUT_OF_MEMORY = 2, NO_DEVICE = 101, INVALID_CONTEXT = 201, NOT_READY = 600 };

static int context, depth, blocks, events, waits;

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { return ordinal < 1 ? (*device = 7, OK) : NO_DEVICE; }
int cuDevicePrimaryCtxRetain(void **out, int device) { return device == 7 ? (*out = &context, OK) : NO_DEVICE; }
int cuCtxPushCurrent_v2(void *pushed) { return pushed == &context ? (depth++, OK) : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void **out) { return 0 < depth ? (depth--, *out = &context, OK) : INVALID_CONTEXT; }
int cuCtxSynchronize(void) { return depth ? OK : INVALID_CONTEXT; }

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (!depth) return INVALID_CONTEXT;
    if ((size_t)1 << 24 < bytes) return OUT_OF_MEMORY;
    blocks++;
    *address = (uint64_t)(uintptr_t)aligned_alloc(512, (bytes + 511) / 512 * 512);
    return OK;
}
int cuMemFree_v2(uint64_t address) { return depth ? (blocks--, free((void *)(uintptr_t)address), OK) : INVALID_CONTEXT; }

int cuEventCreate(void **event, unsigned flags) {
    if (!depth || flags != 2) return INVALID_CONTEXT;
    events++;
    *event = calloc(1, sizeof(int));
    return OK;
}
int cuEventRecord(void *event, void *stream) { return depth && event && stream != (void *)99 ? OK : INVALID_CONTEXT; }
int cuEventQuery(void *event) { return depth ? (++*(int *)event == 2 ? OK : NOT_READY) : INVALID_CONTEXT; }
int cuEventDestroy_v2(void *event) { return depth ? (events--, free(event), OK) : INVALID_CONTEXT; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream;
    return depth && event && !flags ? (waits++, OK) : INVALID_CONTEXT;
}
int cuGetErrorName(int status, const char **name) {
    *name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : status == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : 0;
    return OK;
}

/* For the test. */
int cuLeft(void) { return depth * 10000 + blocks * 100 + events; }
