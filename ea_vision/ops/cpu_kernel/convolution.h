/* Convolutions of the maps, heads as channels, and the gradients of their weights.
 *
 * A buffer holds a map as [row][head][P]: P floats are a margin of zeros, the N columns, and zeros again, so that a
 * convolution may read beyond both ends. One row of a buffer is the map's row of all heads.
 */
#pragma once

#include "gemm.h"

#define MARGIN VL /* zeros before a buffered row */
#define GROUP 4   /* rows of a convolution computed together, starting at a multiple of GROUP */

/* Floats of a buffered row of one head. */
static int row_length(int N) { return MARGIN + round_up(N) + VL; }

typedef struct {
    int K, size;                 /* heads; the kernel's side */
    int N, Np, P;                /* columns; padded; with the margins */
    int r;                       /* the kernel's radius; without a convolution, it and all fields below are 0 */
    int planes, taps;            /* the weight is used here as (planes, K, taps) */
    long *offsets;               /* of the rows that its taps read, relative to the first one */
    float *inputs, *products;    /* (planes, K, P): Winograd's */
} convolution;

/* A 3x3 convolution uses Winograd's F(4, 3) along the queries (Lavin and Gray 2016,
 * https://arxiv.org/abs/1509.09308): four rows take six sums of products over heads and columns instead of twelve.
 * Columns are not transformed, so every step works on whole rows. Other kernels take one sum over all taps. */
static void allocate_convolution(convolution *g, buffers *m, int K, int N, int size) {
    const int fast = size == 3, rows = fast ? 1 : size;
    *g = (convolution){.K = K, .size = size, .N = N, .Np = round_up(N), .P = row_length(N), .r = size / 2,
                       .planes = fast ? 6 : 1, .taps = K * rows * size};
    g->offsets = (long *)new_floats(m, 2L * g->taps);
    for (int c = 0, t = 0; g->offsets && c < K; c++)
        for (int y = 0; y < rows; y++)
            for (int x = 0; x < size; x++, t++) g->offsets[t] = ((long)y * K + c) * g->P + x;
    if (!fast) return;
    g->inputs = new_floats(m, (long)g->planes * K * g->P);
    g->products = new_floats(m, (long)g->planes * K * g->P);
}

/* (K, K, kernel, kernel) -> (planes, K, taps) */
static void read_weight(const convolution *g, float *to, const float *from) {
    const long K = g->K, size = g->size, plane = K * g->taps;
    if (g->planes == 1) {
        memcpy(to, from, plane * sizeof(float));
        return;
    }
    for (long oc = 0; oc < K * K; oc++)
        for (long x = 0; x < size; x++) {
            const float *w = from + oc * 9 + x;
            const float ends = w[0] + w[6], far = w[0] + 4 * w[6];
            float *u = to + oc * 3 + x;
            u[0] = w[0] / 4;
            u[plane] = -(ends + w[3]) / 6;
            u[2 * plane] = -(ends - w[3]) / 6;
            u[3 * plane] = (far + 2 * w[3]) / 24;
            u[4 * plane] = (far - 2 * w[3]) / 24;
            u[5 * plane] = w[6];
        }
}

/* Six rows of n floats -> the inputs of the six products. */
static void winograd_input(float *restrict to, const float *restrict from, long n) {
    for (long j = 0; j < n; j += VL) {
        vec x[6];
        for (int r = 0; r < 6; r++) x[r] = LOAD(from + r * n + j);
        const vec even = x[4] - 4 * x[2], odd = x[3] - 4 * x[1], outer = x[4] - x[2], inner = 2 * (x[3] - x[1]);
        STORE(to + j, 4 * (x[0] - x[2]) + outer);
        STORE(to + n + j, even + odd);
        STORE(to + 2 * n + j, even - odd);
        STORE(to + 3 * n + j, outer + inner);
        STORE(to + 4 * n + j, outer - inner);
        STORE(to + 5 * n + j, 4 * (x[1] - x[3]) + x[5] - x[3]);
    }
}

INLINE vec relu(vec x) { return (vec)((ivec)x & ~(x <= 0)); } /* NaN stays NaN */

/* Computes `rows` <= GROUP rows of a convolution for all heads, with bias and ReLU unless `bias` is NULL, into `to`
 * (rows, K, P) with strides row_ld and head_ld. They read `maps` from row `top` on. */
static void convolve(const convolution *g, float *to, long row_ld, long head_ld, const float *maps, int top,
                     int rows, const float *weight, const float *bias) {
    const int K = g->K;
    const long n = (long)K * g->P, plane = (long)K * g->taps;
    maps += top * n;
    if (g->planes == 1) {
        for (int i = 0; i < rows; i++)
            gemm(FRESH, K, g->Np, g->taps, weight, g->taps, 1, maps + i * n + MARGIN - g->r, 0, g->offsets,
                 to + i * row_ld + MARGIN, head_ld);
    } else {
        winograd_input(g->inputs, maps, n);
        for (int t = 0; t < g->planes; t++)
            gemm(FRESH, K, g->Np, g->taps, weight + t * plane, g->taps, 1, g->inputs + t * n + MARGIN - g->r, 0,
                 g->offsets, g->products + t * n + MARGIN, g->P);
    }
    for (int head = 0; head < K; head++) {
        const float *from = g->planes == 1 ? NULL : g->products + head * g->P + MARGIN;
        float *row = to + head * head_ld + MARGIN;
        for (int j = 0; j < g->Np; j += VL) {
            vec y[GROUP];
            if (g->planes == 1) {
                for (int i = 0; i < rows; i++) y[i] = LOAD(row + i * row_ld + j);
            } else {
                vec x[6];
                for (int t = 0; t < 6; t++) x[t] = LOAD(from + t * n + j);
                const vec sum = x[1] + x[2], difference = x[1] - x[2], far_sum = x[3] + x[4], far = x[3] - x[4];
                y[0] = x[0] + sum + far_sum;
                y[1] = difference + 2 * far;
                y[2] = sum + 4 * far_sum;
                y[3] = difference + 8 * far + x[5];
            }
            for (int i = 0; i < rows; i++) STORE(row + i * row_ld + j, bias ? relu(y[i] + bias[head]) : y[i]);
        }
        for (int i = 0; i < rows; i++) memset(row + i * row_ld + g->N, 0, (g->P - MARGIN - g->N) * sizeof(float));
    }
}

/* Adds the weight gradient from `rows` rows for `count` taps from t on and `heads` output heads from o on. */
INLINE void taps_gradient(const convolution *g, float *sums, const float *d_conv, const float *base, int rows, int t,
                          int o, const int heads, const int count) {
    vec acc[MR][3] = {};
    for (int i = 0; i < rows; i++, d_conv += g->K * g->P, base += g->K * g->P)
        for (int j = 0; j < g->Np; j += VL) {
            vec x[3];
#pragma GCC unroll 3
            for (int s = 0; s < count; s++) x[s] = LOAD(base + g->offsets[t + s] + j);
#pragma GCC unroll 8
            for (int h = 0; h < heads; h++) {
                const vec d = LOAD(d_conv + (o + h) * g->P + MARGIN + j);
#pragma GCC unroll 3
                for (int s = 0; s < count; s++) acc[h][s] += d * x[s];
            }
        }
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 3
        for (int s = 0; s < count; s++) {
            float *to = sums + ((long)(o + h) * g->taps + t + s) * VL;
            STORE(to, LOAD(to) + acc[h][s]);
        }
}

/* sums (K, taps, VL) += rows of d_conv (rows, K, P) times the input of each tap, from `base` on */
static void plane_gradient(const convolution *g, float *sums, const float *d_conv, const float *base, int rows) {
    const int K = g->K, taps = g->taps;
    int t = 0;
    for (; t + 3 <= taps; t += 3) {
        int o = 0;
        for (; o + MR <= K; o += MR) taps_gradient(g, sums, d_conv, base, rows, t, o, MR, 3);
        for (; o + 4 <= K; o += 4) taps_gradient(g, sums, d_conv, base, rows, t, o, 4, 3);
        for (; o < K; o++) taps_gradient(g, sums, d_conv, base, rows, t, o, 1, 3);
    }
    for (; t < taps; t++)
        for (int o = 0; o < K; o++) taps_gradient(g, sums, d_conv, base, rows, t, o, 1, 1);
}

/* sums (planes, K, taps, VL) += gradient of the weight from `rows` <= GROUP rows of d_conv, whose convolution read the
 * maps from row `top` on. Winograd's products, transposed: of the transformed input rows and of the gradient's rows,
 * transformed from four to six. */
static void weight_gradient(const convolution *g, float *sums, const float *d_conv, const float *maps, int top,
                            int rows) {
    const long n = (long)g->K * g->P, plane = (long)g->K * g->taps * VL;
    maps += top * n;
    if (g->planes == 1) {
        plane_gradient(g, sums, d_conv, maps + MARGIN - g->r, rows);
        return;
    }
    winograd_input(g->inputs, maps, n);
    for (long j = 0; j < n; j += VL) {
        vec d[4];
        for (int r = 0; r < 4; r++) d[r] = LOAD(d_conv + r * n + j);
        const vec even = d[0] + d[2], odd = d[1] + d[3], far_even = d[0] + 4 * d[2], far_odd = 2 * d[1] + 8 * d[3];
        STORE(g->products + j, d[0]);
        STORE(g->products + n + j, even + odd);
        STORE(g->products + 2 * n + j, even - odd);
        STORE(g->products + 3 * n + j, far_even + far_odd);
        STORE(g->products + 4 * n + j, far_even - far_odd);
        STORE(g->products + 5 * n + j, d[3]);
    }
    for (int t = 0; t < g->planes; t++)
        plane_gradient(g, sums + t * plane, g->products + t * n, g->inputs + t * n + MARGIN - g->r, 1);
}

/* sums (planes, K, taps, VL) -> (K, K, kernel, kernel); resets the sums to 0 */
static void write_weight_gradient(const convolution *g, float *to, float *sums) {
    const long K = g->K, plane = K * g->taps;
    if (g->planes == 1) {
        for (long t = 0; t < plane; t++) to[t] = sum_of(LOAD(sums + t * VL));
    } else {
        for (long oc = 0; oc < K * K; oc++)
            for (long x = 0; x < 3; x++) {
                float u[6];
                for (int t = 0; t < 6; t++) u[t] = sum_of(LOAD(sums + (t * plane + oc * 3 + x) * VL));
                float *w = to + oc * 9 + x;
                w[0] = u[0] / 4 - (u[1] + u[2]) / 6 + (u[3] + u[4]) / 24;
                w[3] = (u[2] - u[1]) / 6 + (u[3] - u[4]) / 12;
                w[6] = (u[3] + u[4] - u[1] - u[2]) / 6 + u[5];
            }
    }
    memset(sums, 0, g->planes * plane * VL * sizeof(float));
}
