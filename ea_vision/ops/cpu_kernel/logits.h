/* The logits of an image: its own, the previous layer's, and the two combined. */
#pragma once

#include "problem.h"

/* Position terms of up to TERMS queries from `begin` on: by key row, then by key column (AA paper, equation 4). */
static void position_terms(const image *g, int begin) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Hp = round_up(H), Wp = round_up(W);
    const int wanted = begin + 4 * BLOCK + (begin ? 0 : g->conv.r), end = wanted < g->N ? wanted : g->N;
    const long ld = g->position_ld;
    for (int head = 0; head < p->K; head++) {
        const float *q = g->q + (long)head * p->D * g->Np + begin;
        float *to = g->position + (long)head * TERMS * ld;
        for (int i = begin, stop; i < end; i = stop) {
            const int y = i / W;
            stop = (y + 1) * W < end ? (y + 1) * W : end;
            gemm(FRESH, stop - i, Hp, p->D, q + i - begin, 1, g->Np, g->heights + H - 1 - y, g->height_ld, NULL,
                 to + (i - begin) * ld, ld);
        }
        for (int i = begin; i < end && i < begin + W; i++)
            gemm(FRESH, (end - i + W - 1) / W, Wp, p->D, q + i - begin, W, g->Np, g->widths + W - 1 - i % W,
                 g->width_ld, NULL, to + (i - begin) * ld + Hp, ld * W);
    }
    g->terms[0] = begin;
    g->terms[1] = end;
}

/* A row of prev, logits or d_logits that vectors may read slightly beyond its end: in place, or if that is not possible
 * copied to `scratch` (Np). */
static const float *stored_row(const image *g, const void *maps, int head, int row, float *scratch) {
    const problem *p = g->p;
    const long element = map_element(g, head, row), end = (long)p->B * p->K * g->N * g->N;
    const void *from = at(maps, element, p->dtype);
    if (p->dtype == FLOAT32 && element + g->N + VL - 1 <= end) return from;
    read_floats(scratch, from, g->N, p->dtype);
    return scratch;
}

/* The address of such a row for prefetching, or `otherwise` if there is none. */
static const char *soon(const image *g, const void *maps, int head, int row, const void *otherwise) {
    return maps && row < g->N ? at(maps, map_element(g, head, row), g->p->dtype) : otherwise;
}

/* Prefetches the cache line of the row's element j. Loops call it between arithmetic: many requests at once wait. */
INLINE void fetch(const image *g, const char *row, int j, const int to_write) {
    __builtin_prefetch(row + (long)j * size_of(g->p->dtype), to_write, 2);
}

/* gain * own logits (+ alpha * prev where `mix`) of queries begin..end, into maps rows first, first+1, ... */
static void own_logits(const image *g, float *maps, int first, int begin, int end, int mix) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Hp = round_up(H);
    if (p->height_rel && (begin < g->terms[0] || end > g->terms[1])) position_terms(g, begin);
    for (int head = 0; head < p->K; head++) {
        const float alpha = alpha_of(p, head);
        for (int i = begin; i < end; i++) {
            float *row = row_of(g, maps, first + i - begin, head);
            const float *prev = mix ? stored_row(g, p->prev, head, i, g->previous) : NULL;
            const char *next = mix ? soon(g, p->prev, head, i + 1, prev) : NULL;
            if (p->height_rel) {
                const float *by_row = g->position + (head * TERMS + i - g->terms[0]) * g->position_ld;
                const float *by_col = by_row + Hp;
                for (int y = 0; y < H; y++) /* the last vector of a row reaches into the next, which overwrites it */
                    for (int x = 0, j = y * W; x < W; x += VL, j = y * W + x) {
                        const vec position = LOAD(by_col + x) + by_row[y];
                        if (mix) fetch(g, next, j, 0);
                        STORE(row + j, mix ? alpha * LOAD(prev + j) + position : position);
                    }
            } else {
                for (int j = 0; j < g->N; j += VL) STORE(row + j, mix ? alpha * LOAD(prev + j) : (vec){});
            }
            memset(row + g->N, 0, (g->P - MARGIN - g->N) * sizeof(float));
        }
        gemm(ADD, end - begin, g->Np, p->D, g->q + (long)head * p->D * g->Np + begin, 1, g->Np,
             g->k + (long)head * p->D * g->Np, g->Np, NULL, row_of(g, maps, first, head), (long)p->K * g->P);
    }
}

/* Copies rows from..to of the maps, with zeros for the prefix, to `patches`; row `first` of both is that of query 0. */
static void without_prefix(const image *g, float *patches, const float *maps, long first, int from, int to) {
    const problem *p = g->p;
    for (int i = from; i < to; i++)
        for (int head = 0; head < p->K; head++) {
            const long at = ((first + i) * p->K + head) * g->P + MARGIN;
            const int passed = i < p->prefix ? g->N : p->prefix;
            memset(patches + at, 0, passed * sizeof(float));
            memcpy(patches + at + passed, maps + at + passed, (g->N - passed) * sizeof(float));
        }
}

/* The rows of the maps around a block of queries: row i lies at i - base + r; rows beyond the map are zero. */
typedef struct {
    int base, mapped; /* mapped: rows of `maps` before this one are computed */
    float *maps;      /* (WINDOW + 2r, K, P): the maps before the convolution */
    float *patches;   /* likewise, the convolution's input; the same as `maps` without a prefix */
    float *d_conv;    /* likewise, the gradient of its output; NULL in forward */
} window;

#define WINDOW (BLOCK + 3 * GROUP) /* a block's rows, and earlier ones whose gradient is not finished (r < GROUP) */

/* Moves the window to begin at map row `base`; rows of d_conv before `made` are computed. */
static void move_window(const image *g, window *w, int base, int made) {
    const int r = g->conv.r;
    const long map_row = (long)g->p->K * g->P, size = WINDOW + 2 * r;
    float *buffers[] = {w->maps, w->d_conv, w->patches == w->maps ? NULL : w->patches};
    for (int i = 0; i < 3; i++) {
        const long kept = (i == 1 ? made : w->mapped) - base + r;
        if (!buffers[i]) continue;
        if (base == 0)
            memset(buffers[i], 0, r * map_row * sizeof(float));
        else
            memmove(buffers[i], buffers[i] + (base - w->base) * map_row, kept * map_row * sizeof(float));
        if (base + size > r + g->N) memset(buffers[i] + kept * map_row, 0, (size - kept) * map_row * sizeof(float));
    }
    w->base = base;
}

/* Computes the missing rows of the maps before `to`. */
static void fill_window(const image *g, window *w, int to) {
    const problem *p = g->p;
    const long row = g->conv.r - w->base;
    if (p->kind == MIX) own_logits(g, w->maps, row + w->mapped, w->mapped, to, 1);
    for (int i = w->mapped; p->kind == PREDICT && i < to; i++)
        for (int head = 0; head < p->K; head++)
            read_floats(row_of(g, w->maps, row + i, head), at(p->prev, map_element(g, head, i), p->dtype), g->N,
                        p->dtype);
    if (p->prefix) without_prefix(g, w->patches, w->maps, row, w->mapped, to);
    w->mapped = to;
}

/* Buffers for the rows of an image. */
typedef struct {
    window around;
    float *own, *conv, *logits; /* (BLOCK, K, P): own logits, the convolution's output, the combined logits */
    /* backward only */
    int own_base, own_rows, own_size; /* of d_own: its first query; rows to collect before they are used; its size */
    float *d_own; /* (K, own_size, P): gradient of gain * own logits; a head's rows together, for matrix products */
    float *d_maps;            /* (K, GROUP, P): gradient of the convolution's input */
    float *exchanged, *turned; /* the convolution's weight for d_maps: heads exchanged, rotated by 180 degrees */
    float *attn, *d_attn;     /* (BLOCK, Np) */
    float *scratch;           /* (2, Np), and Dp */
    float *q_rows, *k_rows;   /* (own_size, Dp), (K, N, Dp) */
    float *d_q, *d_q_columns; /* (own_size, Dp), (D, own_size) */
    float *d_k, *d_v, *d_out; /* (K*D, Np), (K*E, Np), (K*E, Np) */
    float *position;          /* (own_size, Hp + Wp): gradient of one head's position terms */
    float *height_rows, *width_rows, *d_heights, *d_widths; /* (2H-1, Dp), (2W-1, Dp) */
    float *d_weight, *d_bias; /* (planes, K, taps, VL), (K, VL) */
    double *d_gates;          /* (2, K) */
} workspace;

#define L2_FLOATS (1L << 18) /* half of the smallest second-level cache */
#define AHEAD 512 /* floats: how far ahead backward prefetches stored rows; the processor stops at a page's end */

static void allocate_workspace(workspace *w, buffers *m, const image *g, const problem *p) {
    const long map_row = (long)p->K * g->P, weights = (long)g->conv.planes * p->K * g->conv.taps;
    *w = (workspace){.own = new_floats(m, BLOCK * map_row), .conv = new_floats(m, BLOCK * map_row),
                     .logits = new_floats(m, BLOCK * map_row)};
    if (p->kind != NONE) {
        const long size = (WINDOW + 2L * g->conv.r) * map_row;
        w->around.maps = new_floats(m, size);
        w->around.patches = p->prefix ? new_floats(m, size) : w->around.maps;
        w->around.d_conv = p->d_out && p->weight ? new_floats(m, size) : NULL;
    }
    if (!p->d_out) return;
    w->own_rows = L2_FLOATS / map_row < 32 ? 32 : L2_FLOATS / map_row;
    w->own_rows = w->own_rows < g->N ? w->own_rows : g->N;
    w->own_size = round_up(w->own_rows + WINDOW);
    w->d_own = new_floats(m, w->own_size * map_row);
    w->attn = new_floats(m, (long)BLOCK * g->Np);
    w->d_attn = new_floats(m, (long)BLOCK * g->Np);
    w->scratch = new_floats(m, 2L * g->Np + g->Dp + w->own_size);
    w->q_rows = new_floats(m, (long)w->own_size * g->Dp);
    w->k_rows = new_floats(m, (long)p->K * g->N * g->Dp);
    w->d_q = new_floats(m, (long)w->own_size * g->Dp);
    w->d_q_columns = new_floats(m, (long)p->D * w->own_size);
    w->d_k = new_floats(m, (long)p->K * p->D * g->Np);
    w->d_v = new_floats(m, (long)p->K * p->E * g->Np);
    w->d_out = new_floats(m, (long)p->K * p->E * g->Np);
    w->d_gates = (double *)new_floats(m, 4L * p->K);
    if (p->weight) {
        w->d_maps = new_floats(m, GROUP * map_row);
        w->exchanged = new_floats(m, (long)p->K * p->K * p->kernel * p->kernel);
        w->turned = new_floats(m, weights);
        w->d_weight = new_floats(m, weights * VL);
        w->d_bias = new_floats(m, (long)p->K * VL);
    }
    if (p->height_rel) {
        const long heights = 2L * p->H - 1, widths = 2L * p->W - 1;
        w->position = new_floats(m, w->own_size * g->position_ld);
        w->height_rows = new_floats(m, heights * g->Dp);
        w->width_rows = new_floats(m, widths * g->Dp);
        w->d_heights = new_floats(m, heights * g->Dp);
        w->d_widths = new_floats(m, widths * g->Dp);
    }
}

static void read_more_parameters(workspace *w, const image *g) {
    const problem *p = g->p;
    const int area = p->kernel * p->kernel;
    if (p->weight) {
        for (int o = 0; o < p->K; o++)
            for (int c = 0; c < p->K; c++)
                for (int t = 0; t < area; t++)
                    w->exchanged[(c * p->K + o) * area + t] = p->weight[(o * p->K + c) * area + area - 1 - t];
        read_weight(&g->conv, w->turned, w->exchanged);
    }
    if (p->height_rel) {
        read_matrix(w->height_rows, g->Dp, p->height_rel, 2L * p->H - 1, p->D, FLOAT32, NULL);
        read_matrix(w->width_rows, g->Dp, p->width_rel, 2L * p->W - 1, p->D, FLOAT32, NULL);
    }
}

/* The convolution of queries begin..end; rows and columns of the prefix are copied from the maps. */
static void convolve_block(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const long n = (long)p->K * g->P;
    for (int i = begin; i < end; i += GROUP)
        convolve(&g->conv, w->conv + (i - begin) * n, n, g->P, w->around.patches, i - w->around.base,
                 end - i < GROUP ? end - i : GROUP, g->weight, p->bias);
    for (int i = begin; p->prefix && i < end; i++)
        for (int head = 0; head < p->K; head++)
            memcpy(row_of(g, w->conv, i - begin, head), row_of(g, w->around.maps, i - w->around.base + g->conv.r, head),
                   (i < p->prefix ? g->N : p->prefix) * sizeof(float));
}

/* The logits of query i, at `place` in its block, of all heads, (K, P): where they are, or computed in w->logits. The
 * window holds the convolution's input (mix: the mixture, predict: prev), w->own (none, predict) gain * own logits. */
static float *finish_logits(const image *g, const workspace *w, int i, int place) {
    const problem *p = g->p;
    const long n = (long)p->K * g->P;
    float *row = w->logits + place * n, *own = w->own + place * n, *conv = w->conv + place * n;
    if (p->kind == NONE) return own;
    if (g->only_convolved) return conv;
    float *m = w->around.maps + (i - w->around.base + g->conv.r) * n;
    if (p->kind == MIX && !p->weight) return m;
    const float *from = p->weight ? conv : m;
    for (int head = 0; head < p->K; head++) {
        const float alpha = alpha_of(p, head), beta = beta_of(p, head);
        for (long j = (long)head * g->P, end = j + g->P; j < end; j += VL)
            STORE(row + j, p->kind == MIX ? beta * LOAD(from + j) + (1 - beta) * LOAD(m + j)
                                          : LOAD(own + j) + alpha * LOAD(from + j));
    }
    return row;
}

/* Hides keys outside query i's window from its softmax. */
static void hide(const image *g, float *l, int i) {
    const problem *p = g->p;
    const int y = i / p->W, x = i % p->W, high = p->window_height / 2, wide = p->window_width / 2;
    const int left = x > wide ? x - wide : 0, right = x + wide < p->W ? x + wide + 1 : p->W;
    for (int row = 0; p->window_height && row < p->H; row++, l += p->W) {
        const int far = row < y - high || row > y + high;
        for (int j = 0; j < (far ? p->W : left); j++) l[j] = -INFINITY;
        for (int j = right; j < p->W; j++) l[j] = -INFINITY;
    }
}
