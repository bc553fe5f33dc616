/* A driver without a GPU: the functions that cuda.rs calls, on the host's memory. Calls outside the context fail as the real
 * driver's do; an event is complete at the second query. */
#include <stdint.h>
#include <stdlib.h>

enum { OK, OUT_OF_MEMORY = 2, NO_DEVICE = 101, INVALID_CONTEXT = 201, NOT_READY = 600 };

static int context, depth, blocks, events, waits, steps;

enum { STEP = 1 << 21, MEMORY = 32, STEPS = 80 };
/* A range of addresses: what is mapped to each step, and whether it can be accessed. */
static int mapped[STEPS], open_[STEPS];
static const uint64_t base = (uint64_t)1 << 44;

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
/* Without CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED the functions below are not called. */
int cuDeviceGetAttribute(int *out, int attribute, int device) {
    return depth && device == 7 && attribute == 102 ? (*out = 1, OK) : INVALID_CONTEXT;
}
int cuDeviceTotalMem_v2(size_t *out, int device) { return device == 7 ? (*out = (size_t)STEP * MEMORY, OK) : NO_DEVICE; }

struct kind {
    int kind, exported, location, device;
    void *security;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access { int location, device, flags; };

static int right(const struct kind *kind) {
    return sizeof *kind == 32 && kind->kind == 1 && !kind->exported && kind->location == 1 && kind->device == 7 &&
        !kind->security && !kind->compression && !kind->rdma && !kind->usage;
}
int cuMemGetAllocationGranularity(size_t *out, const struct kind *kind, int option) {
    return right(kind) && !option ? (*out = STEP, OK) : INVALID_CONTEXT;
}
int cuMemAddressReserve(uint64_t *out, size_t bytes, size_t align, uint64_t at, uint64_t flags) {
    return depth && bytes <= (size_t)STEP * STEPS && !align && !at && !flags ? (*out = base, OK) : INVALID_CONTEXT;
}
int cuMemCreate(uint64_t *out, size_t bytes, const struct kind *kind, uint64_t flags) {
    if (!right(kind) || flags || bytes % STEP) return INVALID_CONTEXT;
    if (MEMORY < steps + (int)(bytes / STEP)) return OUT_OF_MEMORY;
    steps += bytes / STEP;
    *out = 4000 + bytes / STEP;
    return OK;
}
/* A handle may be released as soon as it is mapped; an unmapped one has its memory back then. */
static uint64_t held;
int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    size_t first = (at - base) / STEP, n = bytes / STEP;
    if (!depth || (at - base) % STEP || offset || flags || handle != 4000 + n || STEPS < first + n || mapped[first]) return INVALID_CONTEXT;
    mapped[first] = n;
    held = handle;
    return OK;
}
int cuMemRelease(uint64_t handle) { return handle == held ? (held = 0, OK) : (steps -= handle - 4000, OK); }
int cuMemSetAccess(uint64_t at, size_t bytes, const struct access *access, size_t n) {
    if (!depth || n != 1 || access->location != 1 || access->device != 7 || access->flags != 3) return INVALID_CONTEXT;
    for (size_t i = (at - base) / STEP, end = i + bytes / STEP; i < end; i += mapped[i]) {
        if (!mapped[i]) return INVALID_CONTEXT;
        open_[i] = 1;
    }
    return OK;
}
int cuMemUnmap(uint64_t at, size_t bytes) {
    size_t first = (at - base) / STEP;
    if (!depth || mapped[first] != (int)(bytes / STEP)) return INVALID_CONTEXT;
    steps -= mapped[first];
    mapped[first] = open_[first] = 0;
    return OK;
}

int cuGetErrorName(int status, const char **name) {
    *name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : status == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : 0;
    return OK;
}

/* For the test. */
int cuSteps(void) {
    int n = 0;
    for (int i = 0; i < STEPS; i++) n += open_[i] ? mapped[i] : 0;
    return n == steps ? n : -1;
}
int cuLeft(void) { return depth * 10000 + blocks * 100 + events; }
