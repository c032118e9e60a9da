/* Vectors of floats, as wide as the machine's, and the buffers they lie in. */
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

/* n zeros, and room for vectors that are read or written beyond them. */
static float *new_floats(long n) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (n + 2 * VL) * sizeof(float))) abort();
    memset(memory, 0, (n + 2 * VL) * sizeof(float));
    return memory;
}

/* (rows, cols), `from_ld` from row to row -> (cols, to_ld), each row followed by zeros */
static void transpose(float *restrict to, long to_ld, const float *restrict from, long from_ld, long rows, long cols) {
    memset(to, 0, cols * to_ld * sizeof(float));
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < cols; c++) to[c * to_ld + r] = from[r * from_ld + c];
}
