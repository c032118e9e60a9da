// The convolution's backward in one pass over shared tiles: d_prev = alpha * adjoint(dz) and the weight's
// gradient. dz is read as given here (the full kernel would make it from logits and d_logits in the same
// place).
#include "warp.h"
#define H 14
#define W 14
enum {
    K = 8,
    N = H * W,
    R = W,
    ROWS = 16,
    TILES = 13,
    WARPS = 7,
    PITCH = 201,
    TILE = (ROWS * PITCH + 16) * 16,
    MP = 209,
    MS = TILE,
    SHARED = TILE + R * MP * 16
};
typedef const uint16_t *X;
struct Args {
    X dz, m, adjoint;
    uint16_t *d_prev;
    float *d_weight;
    float alpha;
};
DEV void load(const Args &a, S s, long image, int block, int warp) {
    U zero[4] = {un(0), un(0), un(0), un(0)};
    int i0 = block * R - 1;
    X dz = a.dz + image * N * N * K, m = a.m + image * N * N * K;
    for (int r = warp; r < ROWS; r += WARPS) {
        P row = (in(i0 + r) >= in(0)) && (in(i0 + r) < in(N));
        for (int x = 0; x < PITCH + 16; x += 32) {
            I j = lane() + in(x) - in(1);
            U w[4];
            ldg128(dz, (in((i0 + r) * N) + j) * in(K), row && (j >= in(0)) && (j < in(N)), w);
            sts128(s, (in(r * PITCH + x) + lane()) * in(16), w,
                   (lane() + in(x) < in(r == ROWS - 1 ? PITCH + 16 : PITCH)));
        }
        if (r < R)
            for (int x = 0; x < MP; x += 32) {
                I j = lane() + in(x);
                U w[4];
                ldg128(m, (in((i0 + 1 + r) * N) + j) * in(K), j < in(N), w);
                sts128(s, in(MS) + (in(r * MP) + j) * in(16), w, j < in(MP));
            }
    }
}
DEV void work(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    P any = lane() >= in(0);
    U b[9];
    F dw[5][4];
    for (int tap = 0; tap < 9; tap++) b[tap] = ldg32(a.adjoint, in(tap * 64) + g * in(8) + t * in(2), any);
    for (int n = 0; n < 5; n++)
        for (int e = 0; e < 4; e++) dw[n][e] = fl(0);
    uint16_t *d_prev = a.d_prev + image * N * N * K;
    const F alpha = fl(a.alpha);
#pragma unroll 1
    for (int r = 2 * warp; r < 2 * warp + 2; r++) {
        I here = (lane() & in(15)) * in(16) + in(r * PITCH * 16), at4 = here + (lane() >> 4) * in(16),
          at4y = here + (lane() >> 4) * in(PITCH * 16);
        I px = ((lane() & in(7)) + (lane() >> 4) * in(8)) * in(16) + in(r * PITCH * 16),
          second = (lane() >> 3) & in(1);
        I tx = px + second * in(16), ty = px + second * in(PITCH * 16),
          mx = in(MS + r * MP * 16) + (lane() & in(15)) * in(16);
#pragma unroll
        for (int jt = 0; jt < TILES; jt++) {
            const int o = jt * 256;
            F d[4] = {fl(0), fl(0), fl(0), fl(0)};
            U x[4], l8[2], m[2];
            ldsm4(s, at4 + in(o), x);
            mma16(d, x[0], x[1], x[2], x[3], b[0], b[1]);
            ldsm4(s, at4 + in(o + PITCH * 16), x);
            mma16(d, x[0], x[1], x[2], x[3], b[3], b[4]);
            ldsm4(s, at4 + in(o + 2 * PITCH * 16), x);
            mma16(d, x[0], x[1], x[2], x[3], b[6], b[7]);
            ldsm4(s, at4y + in(o + 32), x);
            mma16(d, x[0], x[1], x[2], x[3], b[2], b[5]);
            ldsm2(s, here + in(o + 2 * PITCH * 16 + 32), l8);
            mma8(d, l8[0], l8[1], b[8]);
            ldsm2t(s, mx + in(o), m);
            ldsm4t(s, tx + in(o), x);
            mma16(dw[0], x[0], x[1], x[2], x[3], m[0], m[1]);
            ldsm4t(s, tx + in(o + PITCH * 16), x);
            mma16(dw[1], x[0], x[1], x[2], x[3], m[0], m[1]);
            ldsm4t(s, tx + in(o + 2 * PITCH * 16), x);
            mma16(dw[2], x[0], x[1], x[2], x[3], m[0], m[1]);
            ldsm4t(s, ty + in(o + 32), x);
            mma16(dw[3], x[0], x[1], x[2], x[3], m[0], m[1]);
            ldsm4t(s, px + in(o + 2 * PITCH * 16 + 32), x);
            mma16(dw[4], x[0], x[1], x[2], x[3], m[0], m[1]);
            for (int e = 0; e < 2; e++) {
                P is = g + in(16 * jt + 8 * e) < in(N);
                stg32(d_prev, (in((block * R + r) * N) + g + in(16 * jt + 8 * e)) * in(K) + t * in(2),
                      pack(d[2 * e] * alpha, d[2 * e + 1] * alpha), is);
            }
        }
    }
    float *slot = a.d_weight + ((image * H + block) * WARPS + warp) * 640; // (5 products, 16 rows, 8)
    for (int n = 0; n < 5; n++)
        for (int e = 0; e < 4; e++)
            stgf(slot, in(n * 128) + (g + in(e < 2 ? 0 : 8)) * in(8) + t * in(2) + in(e % 2), dw[n][e], any);
}
#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) core(const Args a) {
    extern __shared__ char shared[];
    S s = (S)__cvta_generic_to_shared(shared);
    const int warp = threadIdx.x >> 5, block = blockIdx.x % H;
    const long image = blockIdx.x / H;
    load(a, s, image, block, warp);
    __syncthreads();
    work(a, s, image, block, warp);
}
#else
#include <stdlib.h>
extern "C" int core(Args *a, int B) {
    char *s = (char *)malloc(SHARED);
    for (long b = 0; b < B; b++)
        for (int block = 0; block < H; block++) {
            memset(s, 0xff, SHARED);
            for (int w = 0; w < WARPS; w++) load(*a, s, b, block, w);
            for (int w = 0; w < WARPS; w++) work(*a, s, b, block, w);
        }
    free(s);
    return SHARED;
}
#endif
