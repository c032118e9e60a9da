// Products of maps with rows of queries, keys or values. A product sums over 16 pixels, of which a lane has four in a
// row: 4t to 4t + 3 (t = lane & 3). Both operands use this order.
#pragma once
#include "layer.h"

// D columns of four rows (`at` + c, then a stride apart) as an operand: columns 2g, then 2g + 1, then 16, 18, 17, 19.
DEV void columns(X x, I at, int c, int stride, const P *is, U b[3][2]) {
    I g = lane() >> 2, many = at + g * in(2), few = at + in(16) + (g & in(1)) * in(2);
    U w[4], f[4];
    for (int n = 0; n < 4; n++) {
        w[n] = ldg32(x, many, is[n], n * stride + c);
        f[n] = ldg32(x, few, is[n] && (g < in(4)), n * stride + c);
    }
    for (int n = 0; n < 2; n++) {
        b[0][n] = lows(w[2 * n], w[2 * n + 1]);
        b[1][n] = highs(w[2 * n], w[2 * n + 1]);
        b[2][n] = sel(g < in(2), lows(f[2 * n], f[2 * n + 1]), highs(f[2 * n], f[2 * n + 1]));
    }
}
// Store such D columns of a lane's two rows, times a factor.
DEV void store_columns(uint16_t *x, I at0, I at1, P in0, P in1, const F d[3][4], F factor) {
    I t = lane() & in(3), few = in(16) + t;
    for (int e = 0; e < 4; e += 2) {
        I at = e ? at1 : at0;
        P is = e ? in1 : in0;
        stg32(x, at + t * in(4), pack(d[0][e] * factor, d[1][e] * factor), is);
        stg32(x, at + t * in(4) + in(2), pack(d[0][e + 1] * factor, d[1][e + 1] * factor), is);
        stg16(x, at + few, pack(d[2][e] * factor, fl(0)), is && (t < in(2)));
        stg16(x, at + few + in(2), pack(d[2][e + 1] * factor, fl(0)), is && (t < in(2)));
    }
}
DEV void zero(F d[4]) {
    for (int e = 0; e < 4; e++) d[e] = fl(0);
}
