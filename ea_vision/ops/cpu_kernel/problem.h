/* A problem as cpu.py hands it over (AttentionStruct of cpu_library.py), and what a thread keeps while it works on an
 * image of it. */
#pragma once

#include "convolution.h"
#include "dropout.h"
#include "storage.h"

enum { NONE, MIX, PREDICT };

typedef struct {
    int32_t B, K, H, W, D, E, kernel, kind, dtype, threads;
    int32_t prefix;                                     /* tokens whose rows and columns no convolution sees */
    int32_t channels_last;                              /* the order of q, k, v, out and their gradients: below */
    int32_t window_height, window_width;                /* odd: what a query sees around its pixel; 0 both for all */
    float scale, dropout;                               /* dropout: a probability */
    int64_t q_step, k_step, v_step;                     /* elements from one image to the next */
    int64_t q_row, k_row, v_row;                        /* channels last: from one pixel to the next */
    int64_t seed;                                       /* of the dropout */
    const void *q, *k, *v, *prev;                       /* prev (B, K, N, N) or NULL */
    const float *height_rel, *width_rel;                /* (2H-1, D), (2W-1, D), or NULL both */
    const float *weight, *bias;                         /* (K, K, kernel, kernel), (K), or NULL both */
    const float *gates;                                 /* (2, K): alpha and beta of each head */
    /* q, k (B, K, D, N) and v, out (B, K, E, N), or channels last (B, N, K, D) and (B, N, K, E); likewise gradients */
    void *out, *logits;                                 /* logits (B, K, N, N) or NULL */
    float *norm;                                        /* (B, K, N, 2): c and 1 / sum of exp(logits - c) */
    /* backward only */
    const void *d_out, *d_logits;                       /* d_logits or NULL */
    void *d_q, *d_k, *d_v, *d_prev;                     /* d_prev (B, K, N, N) or NULL */
    float *d_height_rel, *d_width_rel, *d_weight, *d_bias; /* of each image: (B, ...) */
    float *d_gates;                                     /* likewise, or NULL where not wanted */
} problem;

static float alpha_of(const problem *p, int head) { return p->gates[head]; }

static float beta_of(const problem *p, int head) { return p->gates[p->K + head]; }

/* Of the own logits in the result. */
static float gain_of(const problem *p, int head) { return p->kind == NONE ? 1.0f : 1.0f - alpha_of(p, head); }

#define BLOCK (2 * GROUP) /* rows whose values are summed, or whose softmax is differentiated, together */
#define TERMS (5 * BLOCK) /* queries whose position terms are kept */
#define FEW 4             /* values of a head that are summed while its softmax is made; more are a matrix product */

/* Returns ROW(E, drop), compiled for the width of a head's values, 0 where it is above FEW, with dropout and without. */
#define RETURN_BY_WIDTH(ROW, drop) \
    switch (g->p->E) { \
        case 1: return ROW(1, drop); \
        case 2: return ROW(2, drop); \
        case 3: return ROW(3, drop); \
        case 4: return ROW(4, drop); \
        default: return ROW(0, drop); \
    }
#define RETURN_ROW(ROW) \
    if (g->drop.threshold) RETURN_BY_WIDTH(ROW, &g->drop) \
    RETURN_BY_WIDTH(ROW, NULL)

/* What all rows of an image share. */
typedef struct {
    const problem *p;
    int b, N, Np, Dp, Ep, P;     /* padded N, D and E; floats of a buffered row of one head */
    dropout drop;
    int only_convolved;          /* the logits are the convolved mixture and nothing else, and no gate learns */
    float *q, *k, *v;            /* (K*D, Np) scaled, times gain; (K*D, Np); (K*E, Np) */
    float *q_factors;            /* (K*D): that scale and gain */
    float *heights, *widths;     /* (D, 2H-1 + VL padded), (D, ...): the tables transposed */
    long height_ld, width_ld;
    float *position;             /* (K, TERMS, Hp + Wp): position terms of some queries by row and column */
    long position_ld, *terms;    /* of the queries terms[0]..terms[1] */
    convolution conv;
    float *weight;               /* (planes, K, taps) */
    float *v_rows;               /* (K, N, Ep) where heads are wider than FEW: the values transposed */
    float *attn;                 /* (K, BLOCK, Np) there: exp(logits - c) of rows whose values are still to come */
    float *sums;                 /* (BLOCK, Ep) there: their values */
    float *previous;             /* (Np), a row of prev, or for passing use */
} image;

/* Buffers are kept by their thread for the next problem of the same sizes: getting them anew from the system costs as
 * much as the arithmetic. What must be zero in them (margins, rows beyond the map, sums) is left so. */
static int same_sizes(const problem *a, const problem *b) {
    return a->K == b->K && a->H == b->H && a->W == b->W && a->D == b->D && a->E == b->E && a->kernel == b->kernel &&
           a->kind == b->kind && !a->height_rel == !b->height_rel && !a->weight == !b->weight &&
           !a->logits == !b->logits && !a->prefix == !b->prefix;
}

static void allocate_image(image *g, buffers *m, const problem *p) {
    const int N = p->H * p->W;
    *g = (image){.p = p, .N = N, .Np = round_up(N), .Dp = round_up(p->D), .Ep = round_up(p->E), .P = row_length(N)};
    g->q = new_floats(m, (long)p->K * p->D * g->Np);
    g->k = new_floats(m, (long)p->K * p->D * g->Np);
    g->v = new_floats(m, (long)p->K * p->E * g->Np);
    g->q_factors = new_floats(m, (long)p->K * p->D);
    if (p->E > FEW) {
        g->v_rows = new_floats(m, (long)p->K * N * g->Ep);
        g->attn = new_floats(m, (long)p->K * BLOCK * g->Np);
        g->sums = new_floats(m, (long)BLOCK * g->Ep);
    }
    g->previous = new_floats(m, g->Np);
    if (p->height_rel) {
        g->height_ld = round_up(2 * p->H - 1) + round_up(p->H);
        g->width_ld = round_up(2 * p->W - 1) + round_up(p->W);
        g->heights = new_floats(m, p->D * g->height_ld);
        g->widths = new_floats(m, p->D * g->width_ld);
        g->position_ld = round_up(p->H) + round_up(p->W);
        g->position = new_floats(m, (long)p->K * TERMS * g->position_ld);
        g->terms = (long *)new_floats(m, 4);
    }
    if (p->weight) {
        allocate_convolution(&g->conv, m, p->K, N, p->kernel);
        g->weight = new_floats(m, (long)g->conv.planes * p->K * g->conv.taps);
    }
}

static void read_parameters(image *g, const problem *p) {
    g->p = p;
    g->only_convolved = p->weight && p->kind == MIX && !p->d_gates && !p->prefix;
    g->drop = new_dropout(p->dropout, p->seed);
    for (int head = 0; head < p->K; head++) g->only_convolved &= beta_of(p, head) == 1.0f;
    if (p->height_rel) {
        transpose(g->heights, g->height_ld, p->height_rel, p->D, 2 * p->H - 1, p->D);
        transpose(g->widths, g->width_ld, p->width_rel, p->D, 2 * p->W - 1, p->D);
    }
    if (p->weight) read_weight(&g->conv, g->weight, p->weight);
}

/* An image's queries, keys or values, or their gradient: `channels` of them -> (channels, Np). Channel i times
 * factors[i], unless that is NULL; `row`: from pixel to pixel where channels lie last. */
static void read_pixels(const image *g, float *to, const void *from, long step, long row, long channels,
                        const float *factors) {
    const int dtype = g->p->dtype;
    from = at(from, g->b * step, dtype);
    if (g->p->channels_last)
        read_transposed(to, g->Np, from, row, g->N, channels, dtype, factors);
    else
        read_matrix(to, g->Np, from, channels, g->N, dtype, factors);
}

static void read_image(image *g, int b) {
    const problem *p = g->p;
    g->b = b;
    if (p->height_rel) g->terms[1] = 0;
    for (long c = 0; c < (long)p->K * p->D; c++) g->q_factors[c] = p->scale * gain_of(p, c / p->D);
    read_pixels(g, g->q, p->q, p->q_step, p->q_row, (long)p->K * p->D, g->q_factors);
    read_pixels(g, g->k, p->k, p->k_step, p->k_row, (long)p->K * p->D, NULL);
    read_pixels(g, g->v, p->v, p->v_step, p->v_row, (long)p->K * p->E, NULL);
}

/* The element of out, or of q's gradient, with `width` channels a head, at which a query's channel c lies; and how far
 * it is from there to its next. */
static long channel_of(const image *g, int width, int head, int row, int c) {
    const long K = g->p->K, b = g->b;
    return g->p->channels_last ? ((b * g->N + row) * K + head) * width + c : ((b * K + head) * width + c) * g->N + row;
}

/* Where a head's row begins in a buffer of maps. */
INLINE float *row_of(const image *g, float *maps, int row, int head) {
    return maps + ((long)row * g->p->K + head) * g->P + MARGIN;
}

/* A head's query among those of all images; times N: the element at which its row of a stored map begins. */
static long query_of(const image *g, int head, int row) { return ((long)g->b * g->p->K + head) * g->N + row; }

static long map_element(const image *g, int head, int row) { return query_of(g, head, row) * g->N; }
