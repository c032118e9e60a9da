// The gradients of a block's queries and of the tables (and of alpha) from d_maps in shared memory; a warp for each head.
#include "rows.h"
enum {
    PROW = 34, // numbers of a query and head by position: rows, then columns
    PS = (1 - PREV) * RS, // where dz, or log-sum-exps, are no longer needed
    TABLE = 2 * 32 * D // sums of a block and half of its heads: (height or width, offset, D)
};
// Queries i0 + g and 8 further ones, g = lane / 4, of which some are another block's or none.
DEV P is_own(I query, int block) { return (query < in(R)) && inside(query + in(block * R)); }
// Positions' gradients of four pixels' offsets from `offset` on, as an operand's two pairs.
DEV U at_offset(S s, int side, int head, I query, I pixel, I offset) {
    const int length = side ? W : H;
    I to = offset + (side ? imod(pixel, W) : idiv(pixel, W)) - in(length - 1);
    P is = (to >= in(0)) && (to < in(length)) && inside(pixel);
    return lds16(s, in(PS) + ((in(head * 16) + query) * in(PROW) + to + in(side ? H : 0)) * in(2), is);
}
DEV void products(const Args &a, S s, long image, int block, int head) {
    I t = lane() & in(3), g = lane() >> 2, i0 = g + in(block * R), i1 = i0 + in(8);
    P in0 = is_own(g, block), in1 = is_own(g + in(8), block);
    F dq[3][4], dp[4][4];
    for (int n = 0; n < 3; n++) zero(dq[n]);
    for (int n = 0; n < 4; n++) zero(dp[n]);
    X k = a.k + image * N * K * D + head * D, pixels = a.pixels;
    I pixel = in(MS + head / 2 * 4) + (g * in(MP) + t * in(4)) * in(16), key = t * in(4 * K * D),
      position = g * in(TILES * 16) + t * in(4);
#if GATED
    X prev = a.prev + image * N * N * K + head;
    I before = (i0 * in(N) + t * in(4)) * in(K);
    F d_alpha = fl(0);
#endif
    LOOP for (int jt = 0; jt < TILES; jt++) { // trips: TILES
        U w[4][2], x[4], b[3][2], hot[4][2]; // hot: ones at each key's two positions
        P is[4];
        for (int c = 0; c < 4; c++) {
            is[c] = t * in(4) + in(16 * jt + c) < in(N);
            for (int e = 0; e < 2; e++) {
                P both = is[c] && (e ? in1 : in0);
                w[c][e] = lds32(s, pixel + in((8 * e * MP + c) * 16), both);
#if GATED
                F d_m = head % 2 ? hi(w[c][e]) : lo(w[c][e]);
                d_alpha = d_alpha + lo(ldg16(prev, before, both, (8 * e * N + c) * K)) * d_m;
#endif
            }
        }
        for (int n = 0; n < 4; n++) ldg64(pixels, position, n * 8 * TILES * 16, hot[n]);
        for (int e = 0; e < 4; e++) {
            const int c = e / 2 * 2, r = e % 2;
            x[e] = head % 2 ? highs(w[c][r], w[c + 1][r]) : lows(w[c][r], w[c + 1][r]);
        }
        columns(k, key, 0, K * D, is, b);
        for (int n = 0; n < 3; n++) mma16(dq[n], x[0], x[1], x[2], x[3], b[n][0], b[n][1]);
        for (int n = 0; n < 4; n++) mma16(dp[n], x[0], x[1], x[2], x[3], hot[n][0], hot[n][1]);
        pixel = pixel + in(16 * 16);
        k += 16 * K * D;
        pixels += 16;
#if GATED
        prev += 16 * K;
#endif
    }
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 2; e++)
            sts32(s, in(PS) + ((g + in(head * 16 + 8 * e)) * in(PROW) + t * in(2) + in(8 * n)) * in(2),
                  pack(dp[n][2 * e], dp[n][2 * e + 1]), always());
    sync_warp(); // a warp reads only what it wrote
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const int last = 2 * (side ? W : H) - 1;
#pragma unroll
        for (int o = 0; o < last; o += 16) {
            I offset = t * in(4) + in(o);
            U x[4], b[3][2];
            P is[4];
            for (int c = 0; c < 4; c++) is[c] = offset + in(c) < in(last);
            for (int e = 0; e < 4; e++) {
                I query = g + in(e % 2 * 8), from = offset + in(e / 2 * 2), pixel = e % 2 ? i1 : i0;
                x[e] = lows(at_offset(s, side, head, query, pixel, from),
                            at_offset(s, side, head, query, pixel, from + in(1)));
            }
            columns(side ? a.width : a.height, offset * in(D), 0, D, is, b);
            for (int n = 0; n < 3; n++) mma16(dq[n], x[0], x[1], x[2], x[3], b[n][0], b[n][1]);
        }
    }
    I at0 = (i0 * in(K) + in(head)) * in(D), at1 = (i1 * in(K) + in(head)) * in(D);
    store_columns(a.d_q + image * N * K * D, at0, at1, in0, in1, dq, share_of_stored(a, head));
#if GATED // the sum of d_m * own is that of queries times their gradients
    F sum = fl(0);
    X q = a.q + image * N * K * D;
    for (int e = 0; e < 4; e++) {
        I at = (e < 2 ? at0 : at1), c = t * in(4) + in(e % 2 * 2), few = in(16) + t + in(e % 2 * 2);
        P is = e < 2 ? in0 : in1;
        U x = ldg32(q, at + c, is), y = ldg16(q, at + few, is && (t < in(2)));
        sum = sum + lo(x) * dq[0][e] + hi(x) * dq[1][e] + lo(y) * dq[2][e];
    }
    F part = d_alpha - sum * fl(a.scale);
    for (int m = 1; m < 32; m *= 2) part = part + shx(part, m);
    stgf(a.d_alpha + (image * PARTS + block) * K, in(head), part, lane() == in(0));
#endif
}
// Both tables' gradients, 16 offsets at a time: sums over the block's queries and half of the heads.
DEV void tables(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2, i = t * in(4) + in(block * R);
    X q = a.q + image * N * K * D;
    const int side = warp & 1, o = (warp >> 1 & 1) * 16, half = warp >> 2;
    float *slot = a.d_tables + ((image * PARTS + block) * 2 + half) * TABLE;
    F sum[3][4];
    for (int n = 0; n < 3; n++) zero(sum[n]);
    LOOP for (int head = half * K / 2; head < (half + 1) * K / 2; head++) { // trips: K / 2
        F d[3][4], own = share_of_stored(a, head);
        U x[4], b[3][2];
        P is[4];
        for (int c = 0; c < 4; c++) is[c] = is_own(t * in(4) + in(c), block);
        for (int e = 0; e < 4; e++) {
            I offset = g + in(o + e % 2 * 8), query = t * in(4) + in(e / 2 * 2), pixel = i + in(e / 2 * 2);
            x[e] = lows(at_offset(s, side, head, query, pixel, offset),
                        at_offset(s, side, head, query + in(1), pixel + in(1), offset));
        }
        columns(q, (i * in(K) + in(head)) * in(D), 0, K * D, is, b);
        for (int n = 0; n < 3; n++) {
            zero(d[n]);
            mma16(d[n], x[0], x[1], x[2], x[3], b[n][0], b[n][1]);
            for (int e = 0; e < 4; e++) sum[n][e] = sum[n][e] + d[n][e] * own;
        }
    }
    for (int e = 0; e < 4; e++) {
        I at = (g + in(side * 32 + o + e / 2 * 8)) * in(D);
        I c = t * in(4) + in(e % 2 * 2), few = in(16) + t + in(e % 2 * 2);
        stgf(slot, at + c, sum[0][e], always());
        stgf(slot, at + c + in(1), sum[1][e], always());
        stgf(slot, at + few, sum[2][e], t < in(2));
    }
}
