// Backward through softmax, ReLU and convolution, for a block's R queries and all keys:
//   g = p * (v.d_out - delta) + d_logits;  dz = g where the ReLU passes;  d_m = adjoint(dz) + (1 - beta) * g
// `adjoint` holds the weight of the adjoint times beta. It stores alpha * d_m (GATED d_m, PREV 0 g) in d_maps and, in
// m's place, in shared memory; and the sums of each warp for weight, bias and beta: d_weight and d_bias without their
// factor beta, and -sum(g * m).
#include "layer.h"
enum {
    MP = TILES * 16 + 1, // pixels of a row of m, zeros after the last key
    MS = PREV * TILE,
    ROW = (2 + E) * K, // numbers of a query: log-sum-exp of each head, delta, and E times d_out
    RS = MS + R * MP * 16,
    STRIPS = (N + 31) / 32, // of 32 keys
    TOGETHER = 4 // queries for which a lane keeps its values
};
static_assert(ROWS * QROW <= TILE, "queries lie where dz will");

DEV void constants(const Args &a, S s, long image, int i0, int warp) {
    LOOP for (int x = warp * 32; x < ROWS * K; x += WARPS * 32) { // trips: ROWS * K / 32 / WARPS
        I e = lane() + in(x), r = e >> 3, h = e & in(K - 1), i = r + in(i0);
        P is = inside(i) && (r < in(ROWS));
        I at = (i * in(K) + h) * in(E);
        F delta = fl(0), d_out[E];
        for (int n = 0; n < E; n++) {
            d_out[n] = lo(ldg16(a.d_out + image * N * K * E, at + in(n), is));
            delta = delta + d_out[n] * lo(ldg16(a.out + image * N * K * E, at + in(n), is));
        }
        I to = in(RS) + (r * in(ROW) + h) * in(4);
        stsf(s, to, ldf(a.lse + image * K * N, sel(is, h * in(N) + i, in(0))), r < in(ROWS));
        stsf(s, to + in(K * 4), delta, r < in(ROWS));
        for (int n = 0; n < E; n++) stsf(s, to + in((2 + n) * K * 4), d_out[n], r < in(ROWS));
    }
}
// g and dz: a lane has a key and all its heads.
DEV void gradients(const Args &a, S s, long image, int i0, int warp) {
    X logits = a.logits + image * N * N * K, d_logits = a.d_logits + image * N * N * K;
    uint16_t *d_maps = a.d_maps + image * N * N * K;
    LOOP for (int unit = warp; unit < STRIPS * ROWS / TOGETHER; unit += WARPS) { // trips: STRIPS * ROWS / TOGETHER / WARPS
        I j = lane() + in(unit % STRIPS * 32);
        P key = j < in(N);
        F v[K * E];
        for (int n = 0; n < K * E; n += 8) {
            U w[4];
            ldg128(a.v + image * N * K * E, j * in(K * E) + in(n), key, w);
            for (int e = 0; e < 8; e++) v[n + e] = e % 2 ? hi(w[e / 2]) : lo(w[e / 2]);
        }
        const int first = unit / STRIPS * TOGETHER;
        LOOP for (int r = first; r < first + TOGETHER; r++) { // trips: TOGETHER
            const int i = i0 + r;
            if (i < 0 || i >= N) continue;
            const bool own = r > 0 && r <= R;
            if (!PREV && !own) continue;
            I pixel = in(i * N) + j;
            U x[4], more[4] = {un(0), un(0), un(0), un(0)}, g[4], dz[4];
            ldg128(logits, pixel * in(K), key, x);
            if (a.d_logits) ldg128(d_logits, pixel * in(K), key, more);
#if GATED
            I group = (in(i * GROUPS) + (j >> 3)) * in(2), within = (j & in(7)) << 2;
            const uint32_t *signs = a.signs + image * N * GROUPS * 2;
            U even = shr(ldg32u(signs, group, key), within), odd = shr(ldg32u(signs + 1, group, key), within);
#endif
#pragma unroll
            for (int four = 0; four < K; four += 4) {
                F of[2 + E][4], both[4], kept[4];
                for (int n = 0; n < 2 + E; n++) ldsf4(s, in(RS + (r * ROW + n * K + four) * 4), of[n]);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int h = four + c;
                    F logit = h % 2 ? hi(x[h / 2]) : lo(x[h / 2]), dp = fl(0) - of[1][c];
                    for (int n = 0; n < E; n++) dp = dp + v[h * E + n] * of[2 + n][c];
                    both[c] = ex2(logit * LOG2E - of[0][c]) * dp + (h % 2 ? hi(more[h / 2]) : lo(more[h / 2]));
#if GATED
                    kept[c] = sel(has(h % 2 ? odd : even, h / 2), both[c], fl(0));
#else
                    kept[c] = sel(logit > fl(0), both[c], fl(0));
#endif
                }
                for (int c = 0; c < 4; c += 2) {
                    g[(four + c) / 2] = pack(both[c], both[c + 1]);
                    dz[(four + c) / 2] = pack(kept[c], kept[c + 1]);
                }
            }
            if (!PREV || (GATED && own)) stg128(d_maps, pixel * in(K), g, key);
            if (PREV) sts128(s, (in(r * PITCH + 1) + j) * in(16), dz, key);
            else sts128(s, in(MS) + (in((r - 1) * MP) + j) * in(16), g, key);
        }
    }
}
#if PREV
// Zeros after m's last key and in rows of no query.
DEV void pad(S s, int i0, int warp) {
    U zero[4] = {un(0), un(0), un(0), un(0)};
    LOOP for (int r = warp; r < R; r += WARPS) // trips: R / WARPS
        LOOP for (int x = i0 + 1 + r < N ? N : 0; x < MP; x += 32) // trips: 1
            sts128(s, in(MS) + (in(r * MP + x) + lane()) * in(16), zero, lane() + in(x) < in(MP));
}
DEV void core(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2;
    U b[9];
    F dw[5][4], db[4] = {fl(0), fl(0), fl(0), fl(0)};
    for (int tap = 0; tap < 9; tap++) b[tap] = ldg32(a.adjoint, in(tap * 64) + g * in(8) + t * in(2), always());
    for (int n = 0; n < 5; n++)
        for (int e = 0; e < 4; e++) dw[n][e] = fl(0);
    uint16_t *d_maps = a.d_maps + image * N * N * K;
    F alpha0 = ldf(a.gates, t * in(2)), alpha1 = ldf(a.gates, t * in(2) + in(1));
#if GATED
    F rest0 = fl(1) - ldf(a.gates + K, t * in(2)), rest1 = fl(1) - ldf(a.gates + K, t * in(2) + in(1));
    F d_beta0 = fl(0), d_beta1 = fl(0);
#endif
    LOOP for (int r = 2 * warp; r < 2 * warp + 2; r++) { // trips: R / WARPS
        if (block * R + r >= N) break;
        I here = (lane() & in(15)) * in(16) + in(r * PITCH * 16), at4 = here + (lane() >> 4) * in(16),
          at4y = here + (lane() >> 4) * in(PITCH * 16);
        I px = ((lane() & in(7)) + (lane() >> 4) * in(8)) * in(16) + in(r * PITCH * 16),
          second = (lane() >> 3) & in(1);
        I tx = px + second * in(16), ty = px + second * in(PITCH * 16),
          mx = in(MS + r * MP * 16) + (lane() & in(15)) * in(16), at = in((block * R + r) * N * K) + lane() * in(2);
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
            U one[2]; // for keys 2t and 2t + 1, and 8 further ones
            for (int e = 0; e < 2; e++) {
                I j = t * in(2) + in(16 * jt + 8 * e);
                one[e] = un(0x3f803f80u);
                if (16 * jt + 8 * e + 8 > N) one[e] = sel(j + in(1) < in(N), un(0x3f803f80u), sel(j < in(N), un(0x3f80u), un(0)));
            }
            mma16(db, x[0], x[1], x[2], x[3], one[0], one[1]);
            ldsm4t(s, tx + in(o + 2 * PITCH * 16), x);
            mma16(dw[2], x[0], x[1], x[2], x[3], m[0], m[1]);
            ldsm4t(s, ty + in(o + 32), x);
            mma16(dw[3], x[0], x[1], x[2], x[3], m[0], m[1]);
            ldsm4t(s, px + in(o + 2 * PITCH * 16 + 32), x);
            mma16(dw[4], x[0], x[1], x[2], x[3], m[0], m[1]);
#if GATED
            ldsm2(s, mx + in(o), m);
#endif
            sync_warp(); // m of these keys was read
            for (int e = 0; e < 2; e++) {
                P is = g + in(16 * jt + 8 * e) < in(N);
                const int to = (16 * jt + 8 * e) * K;
                F d0 = d[2 * e], d1 = d[2 * e + 1];
#if GATED
                U both = ld32(d_maps, at, is, to); // g
                d_beta0 = d_beta0 - lo(both) * lo(m[e]);
                d_beta1 = d_beta1 - hi(both) * hi(m[e]);
                d0 = d0 + rest0 * lo(both);
                d1 = d1 + rest1 * hi(both);
#else
                d0 = d0 * alpha0;
                d1 = d1 * alpha1;
#endif
                U x2 = pack(d0, d1);
                stg32(d_maps, at, x2, is, to);
                sts32(s, in(MS + r * MP * 16 + to * 2) + lane() * in(4), x2, is);
            }
        }
    }
    float *slot = a.d_weight + ((image * PARTS + block) * (R / 2) + warp) * SLOT; // (5 products, 16 rows, 8)
    for (int n = 0; n < 5; n++)
        for (int e = 0; e < 4; e++)
            stgf(slot, in(n * 128) + (g + in(e < 2 ? 0 : 8)) * in(8) + t * in(2) + in(e % 2), dw[n][e], always());
    stgf(slot + 640, g, db[2], t == in(0));
#if GATED
    for (int m = 4; m < 32; m *= 2) {
        d_beta0 = d_beta0 + shx(d_beta0, m);
        d_beta1 = d_beta1 + shx(d_beta1, m);
    }
    stgf(slot + 640 + K, t * in(2), d_beta0, g == in(0));
    stgf(slot + 640 + K, t * in(2) + in(1), d_beta1, g == in(0));
#endif
}
#endif
