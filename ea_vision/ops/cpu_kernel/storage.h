/* Numbers as tensors store them: float32 or bfloat16. Inside the kernel everything is float32. */
#pragma once

#include "vectors.h"

enum { FLOAT32, BFLOAT16 };

typedef uint32_t __attribute__((may_alias)) word; /* a float's bits */

static int size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

static void *at(const void *base, long element, int dtype) {
    return base ? (char *)base + element * size_of(dtype) : NULL;
}

static void read_floats(float *restrict to, const void *from, long n, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, n * sizeof(float));
        return;
    }
    const uint16_t *bits = from;
    word *words = (word *)to;
    for (long i = 0; i < n; i++) words[i] = (uint32_t)bits[i] << 16;
}

static void write_floats(void *to, const float *restrict from, long n, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, n * sizeof(float));
        return;
    }
    uint16_t *bits = to;
    const word *words = (const word *)from;
    for (long i = 0; i < n; i++) { /* to nearest, ties to even */
        uint32_t w = words[i], rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
        bits[i] = (w & 0x7fffffff) > 0x7f800000 ? (w >> 16) | 0x40 : rounded; /* NaN stays NaN */
    }
}

/* factor * from */
static void write_scaled(void *to, const float *restrict from, float factor, long n, int dtype,
                         float *restrict scratch) {
    float *restrict row = dtype == FLOAT32 ? to : scratch;
    for (long i = 0; i < n; i++) row[i] = factor * from[i];
    if (dtype != FLOAT32) write_floats(to, row, n, dtype);
}

/* (rows, n) -> (rows, ld), each row followed by zeros; row i times factors[i], unless that is NULL */
static void read_matrix(float *to, long ld, const void *from, long rows, long n, int dtype, const float *factors) {
    for (long r = 0; r < rows; r++) {
        float *row = to + r * ld;
        read_floats(row, at(from, r * n, dtype), n, dtype);
        for (long i = 0; factors && i < n; i++) row[i] *= factors[r];
        memset(row + n, 0, (ld - n) * sizeof(float));
    }
}

/* (rows, n), `from_ld` from row to row -> (n, rows), `to_ld` from row to row */
static void transpose(void *to, long to_ld, int dtype, const float *from, long from_ld, long rows, long n) {
    for (long r = 0; r < rows; r += VL)
        for (long c = 0; c < n; c += VL) {
            const long height = rows - r < VL ? rows - r : VL, width = n - c < VL ? n - c : VL;
            vec x[VL] = {};
            for (long i = 0; i < height; i++) memcpy(&x[i], from + (r + i) * from_ld + c, width * sizeof(float));
            transpose_square(x);
            for (long i = 0; i < width; i++)
                write_floats(at(to, (c + i) * to_ld + r, dtype), (float *)&x[i], height, dtype);
        }
}
