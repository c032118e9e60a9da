// The gradients of keys from d_maps and of values from the logits, of an image whose d_maps are complete: 16 keys, all
// queries and two heads (2 * pair and the next) at a time. GATED: it then multiplies d_maps by alpha, in place.
#include "rows.h"
DEV void keys(const Args &a, long image, int tile, int pair) {
    I t = lane() & in(3), g = lane() >> 2, j0 = g + in(16 * tile), j1 = j0 + in(8);
    P in0 = inside(j0), in1 = inside(j1);
    F dk[2][3][4], dv[2][4];
    for (int h = 0; h < 2; h++) {
        for (int n = 0; n < 3; n++) zero(dk[h][n]);
        zero(dv[h]);
    }
    const long first = image * N * N * K + 2 * pair;
    X q = a.q + image * N * K * D + 2 * pair * D, logits = a.logits + first,
      d_out = a.d_out + image * N * K * E + 2 * pair * E;
    uint16_t *maps = a.d_maps + first;
    const float *lse = a.lse + (image * K + 2 * pair) * N;
    I pixel = (t * in(4 * N) + j0) * in(K), query = t * in(4 * K * D), value = t * in(4 * K * E) + g;
#if GATED
    F alpha0 = ldf(a.gates, in(2 * pair)), alpha1 = ldf(a.gates, in(2 * pair + 1));
#endif
    LOOP for (int it = 0; it < TILES; it++) { // trips: TILES
        U w[4][2], l[4][2];
        P is[4];
        for (int c = 0; c < 4; c++) {
            is[c] = t * in(4) + in(16 * it + c) < in(N);
            for (int e = 0; e < 2; e++) {
                P both = is[c] && (e ? in1 : in0);
                w[c][e] = ld32(maps, pixel, both, (c * N + 8 * e) * K);
                l[c][e] = ldg32(logits, pixel, both, (c * N + 8 * e) * K);
#if GATED
                stg32(maps, pixel, pack(lo(w[c][e]) * alpha0, hi(w[c][e]) * alpha1), both, (c * N + 8 * e) * K);
#endif
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            U x[4], p[4], b[3][2], o[4];
            F f[4];
            for (int c = 0; c < 4; c++) { // the sum of an invalid query is infinite, so that p is 0 there
                f[c] = ldf(lse, t * in(4), is[c], h * N + c, 3e38f);
                o[c] = ldg16(d_out, value, is[c] && (g < in(E)), c * K * E + h * E);
            }
            for (int e = 0; e < 4; e++) {
                const int c = e / 2 * 2, r = e % 2;
                x[e] = h ? highs(w[c][r], w[c + 1][r]) : lows(w[c][r], w[c + 1][r]);
                F p0 = ex2((h ? hi(l[c][r]) : lo(l[c][r])) * LOG2E - f[c]),
                  p1 = ex2((h ? hi(l[c + 1][r]) : lo(l[c + 1][r])) * LOG2E - f[c + 1]);
                p[e] = pack(p0, p1);
            }
            columns(q, query, h * D, K * D, is, b);
            for (int n = 0; n < 3; n++) mma16(dk[h][n], x[0], x[1], x[2], x[3], b[n][0], b[n][1]);
            mma16(dv[h], p[0], p[1], p[2], p[3], lows(o[0], o[1]), lows(o[2], o[3]));
        }
        maps += 16 * N * K;
        logits += 16 * N * K;
        q += 16 * K * D;
        d_out += 16 * K * E;
        lse += 16;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = 2 * pair + h;
        I at0 = j0 * in(K) + in(head), at1 = j1 * in(K) + in(head);
        store_columns(a.d_k + image * N * K * D, at0 * in(D), at1 * in(D), in0, in1, dk[h], share_of_stored(a, head));
        for (int e = 0; e < 4; e++) {
            I c = t * in(2) + in(e % 2);
            stg16(a.d_v + image * N * K * E, (e < 2 ? at0 : at1) * in(E) + c, pack(dv[h][e], fl(0)),
                  (e < 2 ? in0 : in1) && (c < in(E)));
        }
    }
}
