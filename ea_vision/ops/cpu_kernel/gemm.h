/* The one matrix product: computes a tile of C at a time, with its sums in registers. */
#pragma once

#include "vectors.h"

#ifdef __AVX512F__
#define MR 8 /* rows of a tile */
#define NR 3 /* vectors of a row of a tile: MR * NR sums, NR vectors and a factor fill the registers */
#else
#define MR 6
#define NR 2
#endif

enum { ADD, FRESH };

/* One tile of C += A B, or of C = A B if `fresh`. Row t of B begins at b + (offsets ? offsets[t] : t * ldb). */
INLINE void tile(const int rows, const int vecs, int fresh, int depth, const float *a, long a_row, long a_col,
                 const float *b, long ldb, const long *offsets, float *c, long ldc) {
    vec acc[MR][NR] = {};
    if (!fresh) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) acc[r][v] = LOAD(c + r * ldc + v * VL);
    }
    for (int t = 0; t < depth; t++) {
        const float *row = b + (offsets ? offsets[t] : t * ldb);
        for (int v = 0; v < vecs; v++) __builtin_prefetch(row + (vecs + v) * VL, 0, 3); /* the next tile's */
        vec x[NR];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) x[v] = LOAD(row + v * VL);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) acc[r][v] += a[r * a_row + t * a_col] * x[v];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) STORE(c + r * ldc + v * VL, acc[r][v]);
}

#define TILE(rows, vecs) \
    tile(rows, vecs, fresh, depth, a + i * a_row, a_row, a_col, b + j, ldb, offsets, c + i * ldc + j, ldc)
#define TILES(rows) \
    case rows: if (vecs == NR) TILE(rows, NR); else if (vecs == 2) TILE(rows, 2); else TILE(rows, 1); break;

/* C (m, n) += A (m, depth) B (depth, n), or C = A B if `fresh`; n is a multiple of VL, A has any strides. Each element
 * is summed in the order of `depth` in every tile, so results do not depend on how the work is split. */
static void gemm(int fresh, int m, int n, int depth, const float *a, long a_row, long a_col, const float *b, long ldb,
                 const long *offsets, float *c, long ldc) {
    for (int j = 0, vecs; j < n; j += vecs * VL) {
        vecs = (n - j) / VL < NR ? (n - j) / VL : NR;
        for (int i = 0; i < m; i += MR) {
            switch (m - i < MR ? m - i : MR) {
                TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if MR == 8
                TILES(7) TILES(8)
#endif
            }
        }
    }
}
