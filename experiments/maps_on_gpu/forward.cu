// A layer's forward pass, one kernel: m into shared memory, convolution, softmax, values. A block takes R queries and
// all keys of an image.
#include "layer.h"
enum { ET = K * E / 8, QS = TILE, VS = QS + ROWS * QROW, SHARED = VS + TILES * 16 * K * E * 2 };

// Zeros around m, values, queries.
DEV void prepare(const Args &a, S s, long image, int block, int warp) {
    border(s, block * R - 1, warp);
    X v = a.v + image * N * K * E;
    LOOP for (int x = warp * 32; x < TILES * 16 * K * E / 8; x += WARPS * 32) { // trips: TILES * K * E / 16 / WARPS
        I e = (lane() + in(x)) * in(8);
        U w[4];
        ldg128(v, e, e < in(N * K * E), w);
        sts128(s, e * in(2) + in(VS), w, e < in(TILES * 16 * K * E));
    }
    queries(a, s, QS, image, block * R - 1, warp);
}
#if PREV
// Convolve 16 pixels (tile jt, row r of the warp's two) and return m in their middle.
DEV void convolve(S s, I here, int jt, const U *b, F *d, U *m) {
    I at4 = here + (lane() >> 4) * in(16), at4y = here + (lane() >> 4) * in(PITCH * 16);
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
    m[0] = y[2];
    m[1] = y[3];
}
#endif
// Convolution of two rows of queries, softmax over all keys, values. Row r of the block is row r + 1 of the
// tile.
DEV void attend(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    const int i0 = block * R + 2 * warp;
    uint16_t *logits = a.logits + (image * N + i0) * N * K;
#if PREV
    U b[9]; // weight: (9 taps, 8 made, 8 taken)
#pragma unroll
    for (int tap = 0; tap < 9; tap++) b[tap] = ldg32(a.weight, in(tap * 64) + g * in(8) + t * in(2), always());
    F bias0 = ldf(a.bias, t * in(2)), bias1 = ldf(a.bias, t * in(2) + in(1));
#endif
#if GATED
    uint32_t *signs = a.signs + (image * N + i0) * GROUPS * 2;
    F beta0 = ldf(a.gates + K, t * in(2)), beta1 = ldf(a.gates + K, t * in(2) + in(1));
#endif
    U z[2][TILES][2];
    F top[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        I here = (lane() & in(15)) * in(16) + in((2 * warp + r) * PITCH * 16);
        P row = N % R ? in(i0 + r) < in(N) : always();
        U best = un(0xff80ff80u); // -inf
#pragma unroll
        for (int jt = 0; jt < TILES; jt++) {
            U m[2];
#if PREV
            F d[4] = {bias0, bias1, bias0, bias1};
            convolve(s, here, jt, b, d, m);
#else
            ldsm2(s, here + in(jt * 256 + PITCH * 16 + 16), m);
#endif
#pragma unroll
            for (int e = 0; e < 2; e++) {
                P is = g + in(16 * jt + 8 * e) < in(N);
#if GATED
                F z0 = d[2 * e], z1 = d[2 * e + 1];
                U x2 = pack(beta0 * (relu(z0) - lo(m[e])) + lo(m[e]), beta1 * (relu(z1) - hi(m[e])) + hi(m[e]));
                U even = ballot(z0 > fl(0)), odd = ballot(z1 > fl(0));
                stg32u(signs, (r * GROUPS + 2 * jt + e) * 2, even, (lane() == in(0)) && row);
                stg32u(signs, (r * GROUPS + 2 * jt + e) * 2 + 1, odd, (lane() == in(0)) && row);
#elif PREV
                U x2 = packrelu(d[2 * e], d[2 * e + 1]);
#else
                U x2 = m[e];
#endif
                if (a.logits) stg32(logits, lane() * in(2), x2, is && row, (r * N + 16 * jt + 8 * e) * K);
                if (16 * jt + 8 * e + 8 > N) x2 = sel(is, x2, un(0xff80ff80u));
                z[r][jt][e] = x2;
                best = max2(best, x2);
            }
        }
        for (int m = 4; m < 32; m *= 2) best = max2(best, shx(best, m));
        top[r][0] = lo(best) * LOG2E;
        top[r][1] = hi(best) * LOG2E;
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
                F p0 = ex2(lo(z[r][jt][e]) * LOG2E - top[r][0]),
                  p1 = ex2(hi(z[r][jt][e]) * LOG2E - top[r][1]);
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
                 top[r][c] + lg2(total[r][c]), (g == in(0)) && (in(i0 + r) < in(N)));
        }
        F s0 = shi(total[r][0], g >> 1), s1 = shi(total[r][1], g >> 1);
        F share = rcp(sel((g & in(1)) == in(1), s1, s0));
        for (int n = 0; n < ET; n++)
            for (int c = 0; c < 2; c++) {
                I col = t * in(2) + in(8 * n + c), e = col - g * in(E);
                F x = o[n][2 * r + c] * share;
                stg16(a.out + image * N * K * E, in((i0 + r) * K * E) + col, pack(x, x),
                      (e >= in(0)) && (e < in(E)) && (in(i0 + r) < in(N)));
            }
    }
}
DEV void phase(int number, const Args &a, S s, long image, int block, int warp) {
    if (number == 0) prepare(a, s, image, block, warp);
    if (number == 1) positions(a, s, QS, image, block * R - 1, warp);
    if (number == 2) mix(a, s, QS, 16, PITCH, 0, ROWS, image, block * R - 1, warp);
    if (number == 3) attend(a, s, image, block, warp);
}
KERNEL(forward, 4, SHARED, PARTS, 2)
