// What both kernels of a layer share: its numbers, its arguments, and m in shared memory.
//   own = scale * (q.k + tables);  m = alpha * prev + (1 - alpha) * own;  z = conv3x3(m) + bias
//   logits = beta * relu(z) + (1 - beta) * m;  out = softmax(logits) @ v
// PREV 0: a layer without previous logits, logits = own. GATED 0: beta is 1, alpha is not 0 and has no gradient.
#pragma once
#include "warp.h"
#ifndef H
#define H 14
#define W 14
#endif
#ifndef PREV
#define PREV 1
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef WARPS
#define WARPS 7 // of a block
#endif
enum {
    K = 8, // heads
    D = 20, // width of queries and keys
    E = 3, // of values
    N = H * W,
    R = 14, // queries of a block, two for each of seven warps
    ROWS = R + 2, // with those above and below
    PARTS = (N + R - 1) / R, // blocks of an image
    TILES = (N + 15) / 16, // of 16 keys or queries
    GROUPS = 2 * TILES, // of 8 keys
    C = 48, // numbers of a query by which m's products sum: D, and one for each row and column
    PITCH = ((N + 2) + 3) / 4 * 4 + 1, // pixels of a row of a tile, with zeros left and right
    TILE = (ROWS * PITCH + 16) * 16, // bytes
    QROW = K * C * 2 + 16,
    SLOT = 5 * 128 + 2 * K // numbers that a warp sums: five products of the weight, bias, beta
};
static_assert(D + H + W <= C && H <= 16 && W <= 16, "");
struct Args {
    const uint16_t *q, *k, *v, *height, *width, *prev, *weight, *adjoint, *hot, *pixels;
    const float *bias, *gates; // gates: alpha and beta of each head
    uint16_t *logits, *out;
    uint32_t *signs; // GATED, (N, GROUPS, 2): where the ReLU passes, 4 bits for each of 8 keys, even and odd heads
    float *lse;
    const uint16_t *d_out, *d_logits;
    uint16_t *d_maps, *d_q, *d_k, *d_v;
    float *d_weight, *d_tables, *d_alpha; // sums of a block
    uint32_t *done; // of each image: blocks whose rows of d_maps are written; 0 before and after
    float scale;
};
typedef const uint16_t *X;
#define LOOP _Pragma("unroll 1") // `trips`: how often a warp runs it, for cubins.py
#define LOG2E fl(1.4426950408889634f)
DEV P always() { return lane() >= in(0); }
DEV P inside(I i) { return (i >= in(0)) && (i < in(N)); }
// The factor of own logits in m;
DEV F share(const Args &a, int h) {
    return PREV ? (fl(1) - ldf(a.gates, in(h))) * fl(a.scale) : fl(a.scale);
}
// the gradient of own logits, not yet scaled, is d_maps times this.
DEV F share_of_stored(const Args &a, int h) {
    return PREV && !GATED ? share(a, h) * rcp(ldf(a.gates, in(h))) : share(a, h);
}

// Queries times the tables -> rows of C numbers per (query, head) in shared memory at `base`: q itself, zeros, then
DEV void queries(const Args &a, S s, int base, long image, int i0, int warp) {
    X q = a.q + image * N * K * D;
    LOOP for (int r = warp; r < ROWS; r += WARPS) { // trips: ROWS / WARPS
        P row = inside(in(i0 + r));
#pragma unroll
        for (int x = 0; x < K * C / 2; x += 32) {
            I e = lane() + in(x), h = idiv(e, C / 2), c = (e - h * in(C / 2)) * in(2);
            I t = (c & in(7)) >> 1, d = sel(c < in(16), t * in(4) + ((c >> 3) & in(1)) * in(2), c);
            U w = ldg32(q, (in((i0 + r) * K) + h) * in(D) + d, row && (c < in(D)));
            sts32(s, in(base + r * QROW) + (h * in(C) + c) * in(2), w, always());
        }
    }
}
// the terms of each row and column as seen from the query.
DEV void positions(const Args &a, S s, int base, long image, int i0, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    X q = a.q + image * N * K * D;
    LOOP for (int unit = warp; unit < 2 * K; unit += WARPS) { // trips: 2 * K / WARPS
        const int h = unit >> 1, side = unit & 1;
        I r0 = g + in(i0), r1 = g + in(i0 + 8);
        P in0 = inside(r0), in1 = inside(r1), few = t < in(2);
        I e0 = (r0 * in(K) + in(h)) * in(D) + t * in(2), e1 = e0 + in(8 * K * D);
        U x0 = ldg32(q, e0, in0), x1 = ldg32(q, e1, in1), x2 = ldg32(q, e0 + in(8), in0),
          x3 = ldg32(q, e1 + in(8), in1);
        U y0 = ldg32(q, e0 + in(16), in0 && few), y1 = ldg32(q, e1 + in(16), in1 && few);
        X table = side ? a.width : a.height;
        const int length = side ? W : H, last = 2 * length - 1;
        I p0 = side ? imod(r0 + in(N), W) : idiv(r0 + in(N), W) - in(H),
          p1 = side ? imod(r1 + in(N), W) : idiv(r1 + in(N), W) - in(H);
        LOOP for (int n = 0; n < 4; n++) { // trips: 4
            I o = g + in(8 * n), at = o * in(D) + t * in(2);
            P has = o < in(last);
            F d[4] = {fl(0), fl(0), fl(0), fl(0)};
            mma16(d, x0, x1, x2, x3, ldg32(table, at, has), ldg32(table, at + in(8), has));
            mma8(d, y0, y1, ldg32(table, at + in(16), has && few));
            for (int e = 0; e < 4; e++) {
                I offset = t * in(2) + in(8 * n + e % 2), to = offset + (e < 2 ? p0 : p1) - in(length - 1);
                sts16(s,
                      in(base + (h * C + D + (side ? H : 0)) * 2) + (g + in(e < 2 ? 0 : 8)) * in(QROW) +
                          to * in(2),
                      pack(d[e], d[e]), (to >= in(0)) && (to < in(length)) && (offset < in(last)));
            }
        }
    }
}
// m (own logits if PREV is 0) of queries i0 + [first, last) into a tile at `to` whose first row is that of query
// i0 + first: 8 queries x 16 keys x 8 heads by 24 products; each lane gets all heads of 4 pixels.
DEV void mix(const Args &a, S s, int base, int to, int pitch, int first, int last, long image, int i0, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    X k = a.k + image * N * K * D, prev = a.prev + image * N * N * K;
    LOOP for (int unit = warp; unit < 2 * TILES; unit += WARPS) { // trips: 2 * TILES / WARPS
        const int jt = unit >> 1, it = unit & 1;
        I j0 = g + in(16 * jt), j1 = j0 + in(8);
        P in0 = j0 < in(N), in1 = j1 < in(N), few = t < in(2);
        I c0 = sel(in0, j0, in(N - 1)), c1 = sel(in1, j1, in(N - 1));
        I h0 = j0 * in(C) + t * in(2), h1 = h0 + in(8 * C), e0 = c0 * in(K * D) + t * in(4),
          e1 = c1 * in(K * D) + t * in(4), f0 = c0 * in(K * D) + (t & in(1)) * in(2),
          f1 = c1 * in(K * D) + (t & in(1)) * in(2);
        U hot[6] = {ldg32(a.hot, h0 + in(24), always()), ldg32(a.hot, h1 + in(24), always()),
                    ldg32(a.hot, h0 + in(32), always()), ldg32(a.hot, h1 + in(32), always()),
                    ldg32(a.hot, h0 + in(40), always()), ldg32(a.hot, h1 + in(40), always())};
        U mid0 = ldg32(a.hot, h0 + in(16), always()), mid1 = ldg32(a.hot, h1 + in(16), always());
        F acc[K][4];
        U before[4][4];
#pragma unroll
        for (int e = 0; e < 4 * PREV; e++) {
            I i = t * in(2) + in(i0 + 8 * it + e % 2), j = e < 2 ? c0 : c1;
            i = sel(i < in(0), in(0), sel(i < in(N), i, in(N - 1)));
            ldg128(prev, (i * in(N) + j) * in(K), always(), before[e]);
        }
#pragma unroll
        for (int h = 0; h < K; h++) {
            U b[4], b2[2];
            I at = in(base + h * C * 2) + ((lane() & in(7)) + in(8 * it)) * in(QROW);
            ldsm4(s, at + (lane() >> 3) * in(16), b);
            ldsm2(s, at + in(64) + ((lane() >> 3) & in(1)) * in(16), b2);
            for (int e = 0; e < 4; e++) acc[h][e] = fl(0);
            U x0[2], x1[2];
            ldg64(k, e0, h * D, x0);
            ldg64(k, e1, h * D, x1);
            mma16(acc[h], x0[0], x1[0], x0[1], x1[1], b[0], b[1]);
            mma16(acc[h], sel(few, ldg32o(k, f0, h * D + 16), mid0), sel(few, ldg32o(k, f1, h * D + 16), mid1),
                  hot[0], hot[1], b[2], b[3]);
            mma16(acc[h], hot[2], hot[3], hot[4], hot[5], b2[0], b2[1]);
        }
#pragma unroll
        for (int h = 0; h < K; h++) {
            F own = share(a, h), alpha = PREV ? ldf(a.gates, in(h)) : fl(0);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                acc[h][e] = acc[h][e] * own;
                if (PREV) acc[h][e] = acc[h][e] + (h % 2 ? hi(before[e][h / 2]) : lo(before[e][h / 2])) * alpha;
            }
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            I r = t * in(2) + in(8 * it + e % 2), j = e < 2 ? j0 : j1;
            U m[4];
#pragma unroll
            for (int p = 0; p < 4; p++) m[p] = pack(acc[2 * p][e], acc[2 * p + 1][e]);
            sts128(s, in(to) + ((r - in(first)) * in(pitch) + j) * in(16), m,
                   inside(r + in(i0)) && (r >= in(first)) && (r < in(last)) && (e < 2 ? in0 : in1));
        }
    }
}
// Zeros around a tile: columns before the first and after the last key, and rows of no query.
DEV void border(S s, int i0, int warp) {
    U zero[4] = {un(0), un(0), un(0), un(0)};
    LOOP for (int r = warp; r < ROWS; r += WARPS) { // trips: ROWS / WARPS
        I col = sel(lane() == in(0), in(0), lane() + in(N));
        sts128(s, (col + in(r * PITCH)) * in(16), zero, lane() < in(PITCH - N));
        if (i0 + r < 0 || i0 + r >= N)
            LOOP for (int x = 0; x < PITCH; x += 32) // trips: PITCH / 16 / PARTS / ROWS
                sts128(s, (lane() + in(x + r * PITCH)) * in(16), zero, lane() + in(x) < in(PITCH));
    }
}
// A kernel of so many phases with a barrier between two of them; a block for each image and part, so many of which fit
// on a multiprocessor. `layout` tells who launches it the bytes of shared memory, the threads and the parts.
DEV void phase(int number, const Args &a, S s, long image, int block, int warp);
#ifdef __CUDACC__
template <int number> DEV void phases_to(const Args &a, S s, long image, int block, int warp) {
    if constexpr (number > 0) {
        phases_to<number - 1>(a, s, image, block, warp);
        __syncthreads();
    }
    phase(number, a, s, image, block, warp);
}
#define KIB (__CUDA_ARCH__ == 800 ? 164 : __CUDA_ARCH__ == 900 ? 228 : 100) // of shared memory on a multiprocessor
#define SMALL(SHARED) (2 * (SHARED + 1024) > KIB * 1024) // it holds one block
#define KERNEL(NAME, PHASES, SHARED, PARTS, BLOCKS)                                                          \
    extern "C" __constant__ int layout[3] = {SHARED, WARPS * 32, PARTS};                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, SMALL(SHARED) ? 1 : BLOCKS) NAME(const Args a) {    \
        extern __shared__ char shared[];                                                                     \
        S s = (S)__cvta_generic_to_shared(shared);                                                           \
        phases_to<PHASES - 1>(a, s, blockIdx.x / PARTS, blockIdx.x % PARTS, threadIdx.x >> 5);               \
    }
#else
#include <stdlib.h>
#define KERNEL(NAME, PHASES, SHARED, PARTS, BLOCKS)                                                          \
    extern "C" int layout[3];                                                                                \
    int layout[3] = {SHARED, WARPS * 32, PARTS};                                                             \
    extern "C" void NAME(Args *a, int images) {                                                              \
        char *s = (char *)malloc(SHARED + 1);                                                                \
        for (long image = 0; image < images; image++)                                                        \
            for (int block = PARTS - 1; block >= 0; block--) { /* any order will do */                       \
                memset(s, 0xff, SHARED + 1); /* NaN everywhere */                                            \
                for (int number = 0; number < PHASES; number++)                                              \
                    for (int warp = 0; warp < WARPS; warp++) phase(number, *a, s, image, block, warp);       \
            }                                                                                                \
        free(s);                                                                                             \
    }
#endif
