// Counts a program's bytes from malloc and similar functions: LD_PRELOAD=heap.so. `heap_peak()` is the largest number
// since `heap_reset()`; with HEAP_REPORT set, it is printed to standard error at the end. Sizes of blocks come from
// the allocator. Built by benches/step_time.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_long now, peak;

static void *count(void *block) {
    if (block) {
        long bytes = atomic_fetch_add(&now, malloc_usable_size(block)) + malloc_usable_size(block);
        long most = atomic_load(&peak);
        while (most < bytes && !atomic_compare_exchange_weak(&peak, &most, bytes)) {
        }
    }
    return block;
}
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

void *malloc(size_t n) { return count(__libc_malloc(n)); }
void *calloc(size_t n, size_t each) { return count(__libc_calloc(n, each)); }
void free(void *block) {
    if (block) atomic_fetch_sub(&now, malloc_usable_size(block));
    __libc_free(block);
}
void *realloc(void *block, size_t n) {
    long before = block ? malloc_usable_size(block) : 0;
    void *moved = __libc_realloc(block, n);
    if (moved || n == 0) atomic_fetch_sub(&now, before);
    return count(moved);
}
void *memalign(size_t align, size_t n) { return count(__libc_memalign(align, n)); }
void *aligned_alloc(size_t align, size_t n) { return count(__libc_memalign(align, n)); }
int posix_memalign(void **block, size_t align, size_t n) {
    *block = count(__libc_memalign(align, n));
    return *block ? 0 : ENOMEM;
}

long heap_peak(void) { return atomic_load(&peak); }
void heap_reset(void) { atomic_store(&peak, atomic_load(&now)); }

__attribute__((destructor)) static void report(void) {
    if (getenv("HEAP_REPORT")) fprintf(stderr, "heap_peak %ld\n", heap_peak());
}
