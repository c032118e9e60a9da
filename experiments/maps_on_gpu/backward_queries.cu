// The gradients of queries and tables (and of alpha) from d_maps: a block for 16 queries, all keys; a warp for two
// heads.
#include "rows.h"
enum {
    PROW = 34, // numbers of a query and head by position: rows, then columns
    SHARED = K * 16 * PROW * 2,
    TABLE = 2 * 32 * D // sums of a block: (height or width, offset, D)
};
// Positions' gradients of four pixels' offsets from `offset` on, as an operand's two pairs.
DEV U at_offset(S s, int side, int head, I query, I pixel, I offset) {
    const int length = side ? W : H;
    I to = offset + (side ? imod(pixel, W) : idiv(pixel, W)) - in(length - 1);
    P is = (to >= in(0)) && (to < in(length)) && inside(pixel);
    return lds16(s, ((in(head * 16) + query) * in(PROW) + to + in(side ? H : 0)) * in(2), is);
}
DEV void products(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2, i0 = g + in(16 * block), i1 = i0 + in(8);
    P in0 = inside(i0), in1 = inside(i1);
    F dq[2][3][4], dp[2][4][4], d_alpha[2] = {fl(0), fl(0)};
    for (int h = 0; h < 2; h++) {
        for (int n = 0; n < 3; n++) zero(dq[h][n]);
        for (int n = 0; n < 4; n++) zero(dp[h][n]);
    }
    const long first = image * N * N * K + 2 * warp;
    X k = a.k + image * N * K * D + 2 * warp * D, maps = a.d_maps + first, pixels = a.pixels;
    I pixel = (i0 * in(N) + t * in(4)) * in(K), key = t * in(4 * K * D), position = g * in(TILES * 16) + t * in(4);
#if GATED
    X prev = a.prev + first;
#endif
    LOOP for (int jt = 0; jt < TILES; jt++) { // trips: TILES
        U w[4][2], hot[4][2]; // hot: ones at each key's two positions
        P is[4];
        for (int c = 0; c < 4; c++) {
            is[c] = t * in(4) + in(16 * jt + c) < in(N);
            for (int e = 0; e < 2; e++) w[c][e] = ldg32(maps, pixel, is[c] && (e ? in1 : in0), (8 * e * N + c) * K);
        }
#if GATED
        for (int c = 0; c < 4; c++)
            for (int e = 0; e < 2; e++) {
                U x = ldg32(prev, pixel, is[c] && (e ? in1 : in0), (8 * e * N + c) * K);
                d_alpha[0] = d_alpha[0] + lo(x) * lo(w[c][e]);
                d_alpha[1] = d_alpha[1] + hi(x) * hi(w[c][e]);
            }
        prev += 16 * K;
#endif
        for (int n = 0; n < 4; n++) ldg64(pixels, position, n * 8 * TILES * 16, hot[n]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            U x[4], b[3][2];
            for (int e = 0; e < 4; e++) {
                const int c = e / 2 * 2, r = e % 2;
                x[e] = h ? highs(w[c][r], w[c + 1][r]) : lows(w[c][r], w[c + 1][r]);
            }
            columns(k, key, h * D, K * D, is, b);
            for (int n = 0; n < 3; n++) mma16(dq[h][n], x[0], x[1], x[2], x[3], b[n][0], b[n][1]);
            for (int n = 0; n < 4; n++) mma16(dp[h][n], x[0], x[1], x[2], x[3], hot[n][0], hot[n][1]);
        }
        maps += 16 * K;
        k += 16 * K * D;
        pixels += 16;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = 2 * warp + h;
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 2; e++)
                sts32(s, ((g + in(head * 16 + 8 * e)) * in(PROW) + t * in(2) + in(8 * n)) * in(2),
                      pack(dp[h][n][2 * e], dp[h][n][2 * e + 1]), always());
    }
#ifdef __CUDACC__
    __syncwarp(); // a warp reads only what it wrote
#endif
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = 2 * warp + h;
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
                for (int n = 0; n < 3; n++) mma16(dq[h][n], x[0], x[1], x[2], x[3], b[n][0], b[n][1]);
            }
        }
        I at0 = (i0 * in(K) + in(head)) * in(D), at1 = (i1 * in(K) + in(head)) * in(D);
        store_columns(a.d_q + image * N * K * D, at0, at1, in0, in1, dq[h], share_of_stored(a, head));
#if GATED // the sum of d_m * own is that of queries times their gradients
        F sum = fl(0);
        X q = a.q + image * N * K * D;
        for (int e = 0; e < 4; e++) {
            I at = (e < 2 ? at0 : at1), c = t * in(4) + in(e % 2 * 2), few = in(16) + t + in(e % 2 * 2);
            P is = e < 2 ? in0 : in1;
            U x = ldg32(q, at + c, is), y = ldg16(q, at + few, is && (t < in(2)));
            sum = sum + lo(x) * dq[h][0][e] + hi(x) * dq[h][1][e] + lo(y) * dq[h][2][e];
        }
        F part = d_alpha[h] - sum * fl(a.scale);
        for (int m = 1; m < 32; m *= 2) part = part + shx(part, m);
        stgf(a.d_alpha + (image * TILES + block) * K, in(head), part, lane() == in(0));
#endif
    }
}
// Both tables' gradients, 16 offsets at a time: sums over the block's queries and all heads.
DEV void tables(const Args &a, S s, long image, int block, int warp) {
    I t = lane() & in(3), g = lane() >> 2, i = t * in(4) + in(16 * block);
    X q = a.q + image * N * K * D;
    float *slot = a.d_tables + (image * TILES + block) * TABLE;
    const int side = warp & 1, o = warp / 2 * 16; // four warps
    F sum[3][4];
    for (int n = 0; n < 3; n++) zero(sum[n]);
    LOOP for (int head = 0; head < K; head++) { // trips: K
        F d[3][4], own = share_of_stored(a, head);
        U x[4], b[3][2];
        P is[4];
        for (int c = 0; c < 4; c++) is[c] = inside(i + in(c));
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
DEV void phase(int number, const Args &a, S s, long image, int block, int warp) {
    if (number == 0) products(a, s, image, block, warp);
    if (number == 1) tables(a, s, image, block, warp);
}
KERNEL(backward_queries, 2, SHARED, PAIRS, TILES, 3)
