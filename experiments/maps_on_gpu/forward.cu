// EA forward, one kernel: m = alpha*prev + (1-alpha)*own; logits = relu(conv3x3(m) + bias); softmax; values.
// 8 heads, D = 20, E = 3; a block takes one map row of queries (W of them) and all keys of an image. m stays
// in shared memory.
#include "warp.h"
#ifndef H
#define H 14
#define W 14
#endif
enum {
    K = 8,
    D = 20,
    E = 3,
    N = H * W,
    R = W,
    ROWS = 16,
    C = 48,
    TILES = (N + 15) / 16,
    WARPS = R / 2,
    ET = (K * E) / 8
};
enum {
    PITCH = ((N + 2) + 3) / 4 * 4 + 1,
    TILE = (ROWS * PITCH + 16) * 16,
    QROW = (K * C * 2) + 16,
    QS = TILE,
    VS = QS + ROWS * QROW,
    SHARED = VS + TILES * 16 * K * E * 2
};
static_assert(D + H + W <= C, "");
struct Args {
    const uint16_t *q, *k, *v, *prev, *height, *width, *hot, *weight;
    const float *bias;
    uint16_t *logits, *out;
    float *lse;
    float alpha, scale;
};
typedef const uint16_t *X;

// Zeros around m; values; queries times the tables -> rows of C numbers per (query, head).
DEV void prepare(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    int i0 = block * R - 1;
    P all = lane() >= in(0);
    U zero[4] = {un(0), un(0), un(0), un(0)};
    for (int r = warp; r < ROWS; r += WARPS) { // columns before the first and after the last key
        I col = sel(lane() == in(0), in(0), lane() + in(N));
        sts128(s, (col + in(r * PITCH)) * in(16), zero, lane() < in(PITCH - N));
    }
    if (block == 0 || block == H - 1) // the row of queries before the first or after the last
        for (int x = warp * 32; x < PITCH; x += WARPS * 32) {
            if (block == 0) sts128(s, (lane() + in(x)) * in(16), zero, lane() + in(x) < in(PITCH));
            if (block == H - 1)
                sts128(s, (lane() + in(x + (ROWS - 1) * PITCH)) * in(16), zero, lane() + in(x) < in(PITCH));
        }
    X v = a.v + image * N * K * E;
    for (int x = warp * 32; x < TILES * 16 * K * E / 8; x += WARPS * 32) {
        I e = (lane() + in(x)) * in(8);
        U w[4];
        ldg128(v, e, e < in(N * K * E), w);
        sts128(s, e * in(2) + in(VS), w, e < in(TILES * 16 * K * E));
    }
    X q = a.q + image * N * K * D;
    for (int r = warp; r < ROWS; r += WARPS) { // q itself, and zeros in the other columns
        P inside = (in(i0 + r) >= in(0)) && (in(i0 + r) < in(N));
        for (int x = 0; x < K * C / 2; x += 32) {
            I e = lane() + in(x), h = idiv(e, C / 2), c = (e - h * in(C / 2)) * in(2);
            I tt = (c & in(7)) >> 1, d = sel(c < in(16), tt * in(4) + ((c >> 3) & in(1)) * in(2), c);
            U w = ldg32(q, (in((i0 + r) * K) + h) * in(D) + d, inside && (c < in(D)));
            sts32(s, in(QS + r * QROW) + (h * in(C) + c) * in(2), w, all);
        }
    }
}
DEV void tables(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    int i0 = block * R - 1;
    X q = a.q + image * N * K * D;
    for (int unit = warp; unit < 2 * K; unit += WARPS) {
        const int h = unit >> 1, side = unit & 1;
        I r0 = g + in(i0), r1 = g + in(i0 + 8);
        P in0 = (r0 >= in(0)) && (r0 < in(N)), in1 = (r1 >= in(0)) && (r1 < in(N)), few = t < in(2);
        I e0 = (r0 * in(K) + in(h)) * in(D) + t * in(2), e1 = e0 + in(8 * K * D);
        U x0 = ldg32(q, e0, in0), x1 = ldg32(q, e1, in1), x2 = ldg32(q, e0 + in(8), in0),
          x3 = ldg32(q, e1 + in(8), in1);
        U y0 = ldg32(q, e0 + in(16), in0 && few), y1 = ldg32(q, e1 + in(16), in1 && few);
        X table = side ? a.width : a.height;
        const int side_length = side ? W : H, last = 2 * side_length - 1;
        I p0 = side ? imod(r0 + in(N), W) : idiv(r0 + in(N), W) - in(H),
          p1 = side ? imod(r1 + in(N), W) : idiv(r1 + in(N), W) - in(H);
        for (int n = 0; n < 4; n++) {
            I o = g + in(8 * n), at = o * in(D) + t * in(2);
            P has = o < in(last);
            F d[4] = {fl(0), fl(0), fl(0), fl(0)};
            mma16(d, x0, x1, x2, x3, ldg32(table, at, has), ldg32(table, at + in(8), has));
            mma8(d, y0, y1, ldg32(table, at + in(16), has && few));
            for (int e = 0; e < 4; e++) {
                I pos = t * in(2) + in(8 * n + e % 2) + (e < 2 ? p0 : p1) - in(side_length - 1);
                I to = in(QS + (h * C + D + (side ? H : 0)) * 2) + (g + in(e < 2 ? 0 : 8)) * in(QROW) +
                       pos * in(2);
                sts16(s, to, pack(d[e], d[e]),
                      (pos >= in(0)) && (pos < in(side_length)) &&
                          (t * in(2) + in(8 * n + e % 2) < in(last)));
            }
        }
    }
}
// m into shared memory: a tile of 8 queries x 16 keys x 8 heads by 24 products; each lane gets all heads of 4
// pixels.
DEV void mix(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    int i0 = block * R - 1;
    X k = a.k + image * N * K * D, prev = a.prev + image * N * N * K;
    const F alpha = fl(a.alpha), own = fl((1 - a.alpha) * a.scale);
    for (int unit = warp; unit < 2 * TILES; unit += WARPS) {
        const int jt = unit >> 1, it = unit & 1;
        I j0 = g + in(16 * jt), j1 = j0 + in(8);
        P in0 = j0 < in(N), in1 = j1 < in(N), few = t < in(2);
        I c0 = sel(in0, j0, in(N - 1)), c1 = sel(in1, j1, in(N - 1));
        I h0 = j0 * in(C) + t * in(2), h1 = h0 + in(8 * C), e0 = c0 * in(K * D) + t * in(4),
          e1 = c1 * in(K * D) + t * in(4), f0 = c0 * in(K * D) + (t & in(1)) * in(2),
          f1 = c1 * in(K * D) + (t & in(1)) * in(2);
        P any = lane() >= in(0);
        U hot[6] = {ldg32(a.hot, h0 + in(24), any), ldg32(a.hot, h1 + in(24), any),
                    ldg32(a.hot, h0 + in(32), any), ldg32(a.hot, h1 + in(32), any),
                    ldg32(a.hot, h0 + in(40), any), ldg32(a.hot, h1 + in(40), any)};
        U mid0 = ldg32(a.hot, h0 + in(16), any), mid1 = ldg32(a.hot, h1 + in(16), any);
        {
            F acc[K][4];
            U before[4][4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                I i = t * in(2) + in(i0 + 8 * it + e % 2), j = e < 2 ? c0 : c1;
                i = sel(i < in(0), in(0), sel(i < in(N), i, in(N - 1)));
                ldg128(prev, (i * in(N) + j) * in(K), lane() >= in(0), before[e]);
            }
#pragma unroll
            for (int h = 0; h < K; h++) {
                U b[4], b2[2];
                I at = in(QS + h * C * 2) + ((lane() & in(7)) + in(8 * it)) * in(QROW);
                ldsm4(s, at + (lane() >> 3) * in(16), b);
                ldsm2(s, at + in(64) + ((lane() >> 3) & in(1)) * in(16), b2);
                for (int e = 0; e < 4; e++) acc[h][e] = fl(0);
                U x0[2], x1[2];
                ldg64(k, e0, h * D, x0);
                ldg64(k, e1, h * D, x1);
                mma16(acc[h], x0[0], x1[0], x0[1], x1[1], b[0], b[1]);
                mma16(acc[h], sel(few, ldg32o(k, f0, h * D + 16), mid0),
                      sel(few, ldg32o(k, f1, h * D + 16), mid1), hot[0], hot[1], b[2], b[3]);
                mma16(acc[h], hot[2], hot[3], hot[4], hot[5], b2[0], b2[1]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                I i = t * in(2) + in(8 * it + e % 2), j = e < 2 ? j0 : j1;
                U m[4];
                P row = (i + in(i0) >= in(0)) && (i + in(i0) < in(N));
#pragma unroll
                for (int p = 0; p < 4; p++) {
                    U x = pack(acc[2 * p][e] * own + lo(before[e][p]) * alpha,
                               acc[2 * p + 1][e] * own + hi(before[e][p]) * alpha);
                    m[p] = x;
                }
                sts128(s, (i * in(PITCH) + j + in(1)) * in(16), m, row && (e < 2 ? in0 : in1));
            }
        }
    }
}
// Convolution of two rows of queries, softmax over all keys, values. Row r of the block is row r + 1 of the
// tile.
DEV void attend(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    const int i0 = block * R + 2 * warp;
    uint16_t *logits = a.logits + image * N * N * K;
    X w = a.weight; // (9 taps, 8 made, 8 taken)
    P any = lane() >= in(0);
    U b[9];
#pragma unroll
    for (int tap = 0; tap < 9; tap++) b[tap] = ldg32(w, in(tap * 64) + g * in(8) + t * in(2), any);
    U z[2][TILES][2];
    F top[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        I here = (lane() & in(15)) * in(16) + in((2 * warp + r) * PITCH * 16);
        I at4 = here + (lane() >> 4) * in(16), at4y = here + (lane() >> 4) * in(PITCH * 16);
        U best = un(0);
        F b0 = fl(0), b1 = fl(0);
#ifdef __CUDACC__
        b0 = a.bias[2 * t];
        b1 = a.bias[2 * t + 1];
#else
        L {
            b0.v[l] = a.bias[2 * (l % 4)];
            b1.v[l] = a.bias[2 * (l % 4) + 1];
        }
#endif
#pragma unroll
        for (int jt = 0; jt < TILES; jt++) {
            F d[4] = {b0, b1, b0, b1};
            U x[4], y[4], u[4], c[4], l8[2];
            ldsm4(s, at4 + in(jt * 256), x);                         // dy 0: dx 0, 1
            ldsm4(s, at4 + in(jt * 256 + PITCH * 16), y);            // dy 1: dx 0, 1
            ldsm4(s, at4 + in(jt * 256 + 2 * PITCH * 16), u);        // dy 2: dx 0, 1
            ldsm4(s, at4y + in(jt * 256 + 32), c);                   // dx 2: dy 0, 1
            ldsm2(s, here + in(jt * 256 + 2 * PITCH * 16 + 32), l8); // dx 2: dy 2
            mma16(d, x[0], x[1], x[2], x[3], b[0], b[1]);
            mma16(d, y[0], y[1], y[2], y[3], b[3], b[4]);
            mma16(d, u[0], u[1], u[2], u[3], b[6], b[7]);
            mma16(d, c[0], c[1], c[2], c[3], b[2], b[5]);
            mma8(d, l8[0], l8[1], b[8]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                P is = g + in(16 * jt + 8 * e) < in(N);
                U x2 = packrelu(d[2 * e], d[2 * e + 1]);
                if (16 * jt + 8 * e + 8 > N) x2 = sel(is, x2, un(0xff80ff80u)); // -inf
                z[r][jt][e] = x2;
                best = max2(best, x2);
                stg32(logits, ((in(i0 + r) * in(N)) + g + in(16 * jt + 8 * e)) * in(K) + t * in(2), x2, is);
            }
        }
        for (int m = 4; m < 32; m *= 2) best = max2(best, shx(best, m));
        top[r][0] = lo(best) * fl(1.4426950408889634f);
        top[r][1] = hi(best) * fl(1.4426950408889634f);
    }
    F total[2][2] = {{fl(0), fl(0)}, {fl(0), fl(0)}}, o[ET][4];
    for (int n = 0; n < ET; n++)
        for (int e = 0; e < 4; e++) o[n][e] = fl(0);
#pragma unroll
    for (int jt = 0; jt < TILES; jt++) {
        U p[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                F p0 = ex2(lo(z[r][jt][e]) * fl(1.4426950408889634f) - top[r][0]),
                  p1 = ex2(hi(z[r][jt][e]) * fl(1.4426950408889634f) - top[r][1]);
                total[r][0] = total[r][0] + p0;
                total[r][1] = total[r][1] + p1;
                p[r][e] = movm(pack(p0, p1));
            }
        I row = in(VS) + ((lane() & in(15)) + in(16 * jt)) * in(K * E * 2);
        U v[ET][2];
        ldsm4t(s, row + (lane() >> 4) * in(16), v[0]);
        ldsm2t(s, row + in(32), v[2]);
        for (int n = 0; n < ET; n++) mma16(o[n], p[0][0], p[1][0], p[0][1], p[1][1], v[n][0], v[n][1]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        for (int c = 0; c < 2; c++) {
            for (int m = 4; m < 32; m *= 2) total[r][c] = total[r][c] + shx(total[r][c], m);
            stgf(a.lse + image * K * N, (t * in(2) + in(c)) * in(N) + in(i0 + r),
                 top[r][c] + lg2(total[r][c]), g == in(0));
        }
        F s0 = shi(total[r][0], g >> 1), s1 = shi(total[r][1], g >> 1);
        F share = rcp(sel((g & in(1)) == in(1), s1, s0));
        for (int n = 0; n < ET; n++)
            for (int c = 0; c < 2; c++) {
                I col = t * in(2) + in(8 * n + c), e = col - g * in(E);
                F x = o[n][2 * r + c] * share;
                stg16(a.out + image * N * K * E, in((i0 + r) * K * E) + col, pack(x, x),
                      (e >= in(0)) && (e < in(E)));
            }
    }
}
#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) ea_forward(const Args a) {
    extern __shared__ char shared[];
    S s = (S)__cvta_generic_to_shared(shared);
    const int warp = threadIdx.x >> 5, block = blockIdx.x % H;
    const long image = blockIdx.x / H;
    prepare(a, s, image, block, warp);
    __syncthreads();
    tables(a, s, image, block, warp);
    __syncthreads();
    mix(a, s, image, block, warp);
    __syncthreads();
    attend(a, s, image, block, warp);
}
#else
#include <stdlib.h>
extern "C" int ea_forward(Args *a, int B) {
    char *s = (char *)malloc(SHARED);
    for (long b = 0; b < B; b++)
        for (int block = 0; block < H; block++) {
            memset(s, 0xff, SHARED); // NaN everywhere
            for (int w = 0; w < WARPS; w++) prepare(*a, s, b, block, w);
            for (int w = 0; w < WARPS; w++) tables(*a, s, b, block, w);
            for (int w = 0; w < WARPS; w++) mix(*a, s, b, block, w);
            for (int w = 0; w < WARPS; w++) attend(*a, s, b, block, w);
        }
    free(s);
    return SHARED;
}
#endif
