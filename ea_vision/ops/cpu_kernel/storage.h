/* Numbers as tensors store them: float32, bfloat16, float16. Inside the kernel everything is float32. */
#pragma once

#include "vectors.h"

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* GCC has _Float16 on x86 from version 12 on; without it float16 is left to others, see `stored_dtypes`. */
#ifdef __FLT16_MANT_DIG__
typedef _Float16 half;
#define HAS_FLOAT16 1
#else
#define HAS_FLOAT16 0
#endif

typedef uint32_t __attribute__((may_alias)) word; /* a float's bits */

/* What this library can read and write: bit FLOAT32, bit BFLOAT16, ... */
int32_t stored_dtypes(void) { return 1 << FLOAT32 | 1 << BFLOAT16 | HAS_FLOAT16 << FLOAT16; }

static int size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

static void read_floats(float *restrict to, const void *from, long n, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, n * sizeof(float));
    } else if (dtype == BFLOAT16) {
        const uint16_t *bits = from;
        word *words = (word *)to;
        for (long i = 0; i < n; i++) words[i] = (uint32_t)bits[i] << 16;
    } else {
#if HAS_FLOAT16
        const half *halves = from;
        for (long i = 0; i < n; i++) to[i] = halves[i];
#else
        abort();
#endif
    }
}

static void write_floats(void *to, const float *restrict from, long n, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, n * sizeof(float));
    } else if (dtype == BFLOAT16) {
        uint16_t *bits = to;
        const word *words = (const word *)from;
        for (long i = 0; i < n; i++) { /* to nearest, ties to even */
            uint32_t w = words[i], rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
            bits[i] = (w & 0x7fffffff) > 0x7f800000 ? (w >> 16) | 0x40 : rounded; /* NaN stays NaN */
        }
    } else {
#if HAS_FLOAT16
        half *halves = to;
        for (long i = 0; i < n; i++) halves[i] = (half)from[i];
#else
        abort();
#endif
    }
}

/* factor * from */
static void write_scaled(void *to, const float *restrict from, float factor, long n, int dtype, float *scratch) {
    if (dtype == FLOAT32) {
        float *row = to;
        long i = 0;
        for (; i + VL <= n; i += VL) STORE(row + i, factor * LOAD(from + i));
        for (; i < n; i++) row[i] = factor * from[i];
    } else {
        for (long i = 0; i < n; i++) scratch[i] = factor * from[i];
        write_floats(to, scratch, n, dtype);
    }
}

/* (rows, n) -> (rows, ld), each row followed by zeros; row i times factors[i], unless that is NULL */
static void read_matrix(float *to, long ld, const void *from, long rows, long n, int dtype, const float *factors) {
    for (long r = 0; r < rows; r++) {
        float *row = to + r * ld;
        read_floats(row, (const char *)from + r * n * size_of(dtype), n, dtype);
        for (long i = 0; factors && i < n; i++) row[i] *= factors[r];
        memset(row + n, 0, (ld - n) * sizeof(float));
    }
}

static const void *at(const void *base, long element, int dtype) {
    return base ? (const char *)base + element * size_of(dtype) : NULL;
}

/* (rows, n), `from_ld` from row to row -> (n, to_ld), each row followed by zeros up to a multiple of VL; row i times
 * factors[i], unless that is NULL */
static void read_transposed(float *to, long to_ld, const void *from, long from_ld, long rows, long n, int dtype,
                            const float *factors) {
    for (long r = 0; r < rows; r += VL)
        for (long c = 0; c < n; c += VL) {
            const long height = rows - r < VL ? rows - r : VL, width = n - c < VL ? n - c : VL;
            vec x[VL];
            if (height == VL && width == VL && dtype == FLOAT32) {
                const float *first = (const float *)from + r * from_ld + c;
#pragma GCC unroll 16
                for (int i = 0; i < VL; i++) x[i] = LOAD(first + i * from_ld);
            } else {
                memset(x, 0, sizeof x);
                for (long i = 0; i < height; i++)
                    read_floats((float *)&x[i], at(from, (r + i) * from_ld + c, dtype), width, dtype);
            }
            transpose_square(x);
            for (long i = 0; i < width; i++) STORE(to + (c + i) * to_ld + r, factors ? factors[c + i] * x[i] : x[i]);
        }
}

/* (rows, n), `from_ld` from row to row -> (n, rows), `to_ld` from row to row; reads whole vectors */
static void write_transposed(void *to, long to_ld, const float *from, long from_ld, long rows, long n, int dtype) {
    for (long r = 0; r < rows; r += VL)
        for (long c = 0; c < n; c += VL) {
            const long height = rows - r < VL ? rows - r : VL, width = n - c < VL ? n - c : VL;
            vec x[VL] = {};
            for (long i = 0; i < height; i++) x[i] = LOAD(from + (r + i) * from_ld + c);
            transpose_square(x);
            for (long i = 0; i < width; i++)
                write_floats((void *)at(to, (c + i) * to_ld + r, dtype), (float *)&x[i], height, dtype);
        }
}

static void transpose(float *to, long to_ld, const float *from, long from_ld, long rows, long n) {
    read_transposed(to, to_ld, from, from_ld, rows, n, FLOAT32, NULL);
}
