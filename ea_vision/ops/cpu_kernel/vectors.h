/* Vectors of floats, as wide as the machine's, and buffers for them. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16 /* floats of a vector */
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif

typedef float vec __attribute__((vector_size(4 * VL), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * VL), aligned(4)));
#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) (*(const vec *)(p))
#define STORE(p, x) (*(vec *)(p) = (x))

static int round_up(int n) { return (n + VL - 1) / VL * VL; }

INLINE float sum_of(vec x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float a[4] = {x[0], x[1], x[2], x[3]};
    for (int i = 4; i < VL; i += 4)
        for (int s = 0; s < 4; s++) a[s] += x[i + s];
    return (a[0] + a[1]) + (a[2] + a[3]);
#endif
}

/* All bits set in the first n elements. */
INLINE ivec before(int n) {
    ivec lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    return lane < n;
}

typedef struct {
    void *all[64];
    int count, failed; /* failed: an allocation failed */
    int64_t bytes;     /* requested in all, including failed allocations */
} buffers;             /* a thread frees them together */

/* Asks for large pages for new memory of many megabytes: clearing small pages takes as long as the work. */
static void use_large_pages(void *memory, long bytes) {
#ifdef MADV_HUGEPAGE
    const long page = 1 << 16, first = ((intptr_t)memory + page - 1) & -page; /* no system's pages are larger */
    if (memory && bytes >= 1 << 22) madvise((void *)first, ((intptr_t)memory + bytes - first) & -page, MADV_HUGEPAGE);
#endif
}

/* n zeros, and space for vectors that are read or written beyond them; NULL if there is no memory. */
static float *new_floats(buffers *m, long n) {
    const long bytes = (n + 2 * VL) * sizeof(float);
    void *memory = NULL;
    m->bytes += bytes;
    if (m->failed || m->count == 64 || posix_memalign(&memory, 64, bytes)) {
        m->failed = 1;
        return NULL;
    }
    use_large_pages(memory, bytes);
    memset(memory, 0, bytes);
    return m->all[m->count++] = memory;
}

static void free_all(buffers *m) {
    while (m->count) free(m->all[--m->count]);
    m->failed = m->bytes = 0;
}

/* Whether all threads of a team have memory; every thread must call it. `missing`: bytes that one without it needs. */
static int all_have_memory(const buffers *m, int64_t *missing) {
    if (m->failed)
#pragma omp atomic write
        *missing = m->bytes;
#pragma omp barrier
    return !*missing;
}

/* a[from], b[from], a[from + 1], b[from + 1], ... */
INLINE vec interleaved(vec a, vec b, const int from) {
    vec made;
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) made[i] = i % 2 ? b[from + i / 2] : a[from + i / 2];
    return made;
}

/* Transposes a square of VL vectors: interleaves its two halves log2(VL) times. */
INLINE void transpose_square(vec x[VL]) {
#pragma GCC unroll 4
    for (int step = 1; step < VL; step *= 2) {
        vec y[VL];
#pragma GCC unroll 8
        for (int i = 0; i < VL / 2; i++) {
            y[2 * i] = interleaved(x[i], x[i + VL / 2], 0);
            y[2 * i + 1] = interleaved(x[i], x[i + VL / 2], VL / 2);
        }
        memcpy(x, y, sizeof y);
    }
}
