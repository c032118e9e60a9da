/* A problem as cpu.py passes it (AttentionStruct of cpu_library.py), and what a thread holds while it works on one of
 * its images. */
#pragma once

#include "convolution.h"
#include "dropout.h"
#include "storage.h"

enum { NONE, MIX, PREDICT };

typedef struct {
    int32_t K, H, W, D, E, kernel, kind;
    int32_t prefix;                                     /* tokens whose rows and columns no convolution sees */
    int32_t B, dtype, threads;
    int32_t window_height, window_width;                /* odd: what a query sees around its pixel; both 0: the map */
    float scale, dropout;                               /* dropout: a probability */
    int64_t q_step, k_step, v_step;                     /* elements from one image to the next */
    int64_t seed;                                       /* of the dropout */
    const void *q, *k, *v, *prev;                       /* (B, K, D, N), likewise, (B, K, E, N); (B, K, N, N) or NULL */
    const float *height_rel, *width_rel;                /* (2H-1, D), (2W-1, D), or both NULL */
    const float *weight, *bias;                         /* (K, K, kernel, kernel), (K), or both NULL */
    const float *gates;                                 /* (2, K): alpha and beta of each head */
    void *out, *logits;                                 /* logits (B, K, N, N) or NULL */
    float *norm;                                        /* (B, K, N, 2): c and 1 / sum of exp(logits - c) */
    /* backward only */
    const void *d_out, *d_logits;                       /* d_logits or NULL */
    void *d_q, *d_k, *d_v, *d_prev;                     /* d_prev (B, K, N, N) or NULL */
    float *d_height_rel, *d_width_rel, *d_weight, *d_bias; /* per image: (B, ...) */
    float *d_gates;                                     /* likewise, or NULL if not wanted */
} problem;

static float alpha_of(const problem *p, int head) { return p->gates[head]; }

static float beta_of(const problem *p, int head) { return p->gates[p->K + head]; }

/* The factor of the own logits in the result. */
static float gain_of(const problem *p, int head) { return p->kind == NONE ? 1.0f : 1.0f - alpha_of(p, head); }

#define BLOCK (2 * GROUP) /* rows whose values are summed, or whose softmax is differentiated, together */
#define TERMS (5 * BLOCK) /* queries whose position terms are kept */
#define FEW 4             /* heads with up to FEW values sum them during the softmax; wider ones by a matrix product */
#define EIGHT 8           /* in forward, heads with exactly EIGHT values, too, sum them during the softmax */

/* Returns ROW(E), compiled for each width E of a head's values; ROW(0) if E is above FEW. */
#define RETURN_BY_WIDTH(ROW) \
    switch (g->p->E) { \
        case 1: return ROW(1); \
        case 2: return ROW(2); \
        case 3: return ROW(3); \
        case 4: return ROW(4); \
        default: return ROW(0); \
    }

/* Data that all rows of an image share. */
typedef struct {
    const problem *p;
    int b, N, Np, Dp, Ep, P;     /* padded N, D and E; floats of a buffered row of one head */
    dropout drop;
    int only_convolved;          /* the logits are the convolved mixture and nothing else, and no gate learns */
    float *q, *k, *v;            /* (K*D, Np) times scale and gain; (K*D, Np); (K*E, Np) */
    float *q_factors;            /* (K*D): scale times gain */
    float *heights, *widths;     /* (D, 2H-1 + VL padded), (D, ...): the tables transposed */
    long height_ld, width_ld;
    float *position;             /* (K, TERMS, Hp + Wp): position terms by row and column, */
    long position_ld, *terms;    /* for the queries terms[0]..terms[1] */
    convolution conv;
    float *weight;               /* (planes, K, taps) */
    float *v_rows;               /* (K, N, Ep): the values transposed, if a matrix product sums them; then also: */
    float *attn;                 /* (K, BLOCK, Np): exp(logits - c) of rows whose outputs are not computed yet */
    float *sums;                 /* (BLOCK, Ep): their outputs */
    float *previous;             /* (Np): a row of prev, or scratch */
} image;

/* A thread keeps its buffers for the next problem of the same sizes: allocating them anew costs as much as the
 * arithmetic. Parts that must be zero (margins, rows beyond the map, sums) are left zero. */
static int same_sizes(const problem *a, const problem *b) {
    return !memcmp(&a->K, &b->K, offsetof(problem, B) - offsetof(problem, K)) && !a->height_rel == !b->height_rel &&
           !a->weight == !b->weight;
}

static void allocate_image(image *g, buffers *m, const problem *p) {
    const int N = p->H * p->W;
    *g = (image){.p = p, .N = N, .Np = round_up(N), .Dp = round_up(p->D), .Ep = round_up(p->E), .P = row_length(N)};
    g->q = new_floats(m, (long)p->K * p->D * g->Np);
    g->k = new_floats(m, (long)p->K * p->D * g->Np);
    g->v = new_floats(m, (long)p->K * p->E * g->Np);
    g->q_factors = new_floats(m, (long)p->K * p->D);
    if (p->E > FEW && p->E != EIGHT && !p->d_out) {
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
        transpose(g->heights, g->height_ld, FLOAT32, p->height_rel, p->D, 2 * p->H - 1, p->D);
        transpose(g->widths, g->width_ld, FLOAT32, p->width_rel, p->D, 2 * p->W - 1, p->D);
    }
    if (p->weight) read_weight(&g->conv, g->weight, p->weight);
}

static void read_image(image *g, int b) {
    const problem *p = g->p;
    const long keys = (long)p->K * p->D, values = (long)p->K * p->E;
    g->b = b;
    if (p->height_rel) g->terms[1] = 0;
    for (long c = 0; c < keys; c++) g->q_factors[c] = p->scale * gain_of(p, c / p->D);
    read_matrix(g->q, g->Np, at(p->q, b * p->q_step, p->dtype), keys, g->N, p->dtype, g->q_factors);
    read_matrix(g->k, g->Np, at(p->k, b * p->k_step, p->dtype), keys, g->N, p->dtype, NULL);
    read_matrix(g->v, g->Np, at(p->v, b * p->v_step, p->dtype), values, g->N, p->dtype, NULL);
    for (int head = 0; g->v_rows && head < p->K; head++)
        transpose(g->v_rows + (long)head * g->N * g->Ep, g->Ep, FLOAT32, g->v + (long)head * p->E * g->Np, g->Np,
                  p->E, g->N);
}

/* The index in out, or in the gradient of q, of one channel of a query. */
static long channel_of(const image *g, int width, int head, int channel, int row) {
    return (((long)g->b * g->p->K + head) * width + channel) * g->N + row;
}

/* Where a head's row begins in a buffer of maps. */
INLINE float *row_of(const image *g, float *maps, int row, int head) {
    return maps + ((long)row * g->p->K + head) * g->P + MARGIN;
}

/* The index of a head's query among those of all images; times N, the index where its row of a stored map begins. */
static long query_of(const image *g, int head, int row) { return ((long)g->b * g->p->K + head) * g->N + row; }

static long map_element(const image *g, int head, int row) { return query_of(g, head, row) * g->N; }
