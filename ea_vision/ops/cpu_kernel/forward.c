/* Forward: logits, softmax and values, a block of rows at a time. */
#include "logits.h"
#include "softmax.h"

/* For one row: returns the sum of exp(l - shift); `total` gets its `count` products with rows of v; or `attn`, if not
 * NULL, gets the exponentials. With `drop`, both get only those that are kept, and the sum is of all. */
INLINE float weigh(const image *g, const float *l, float shift, const float *v, const int count, float *total,
                   float *attn, const dropout *drop, draws of, const char *logits) {
    const int n = g->N;
    vec sum = {}, sums[EIGHT] = {};
    for (int j = 0; j < n; j += VL) {
        fetch(g, logits, j, 1);
        vec x = exp_of(LOAD(l + j) - shift);
        if (n - j < VL) x = (vec)((ivec)x & before(n - j));
        sum += x;
        if (drop) x = (vec)((ivec)x & kept(drop, of, j));
        if (attn) STORE(attn + j, x);
#pragma GCC unroll 8
        for (int e = 0; e < count; e++) sums[e] += x * LOAD(v + e * g->Np + j);
    }
    for (int e = 0; e < count; e++) total[e] = sum_of(sums[e]);
    return sum_of(sum);
}

#define WEIGH(count) weigh(g, l, shift, v, count, total, count ? NULL : attn, drop, of, logits)

/* logits: a row that is written soon, to be prefetched. */
static float weigh_row(const image *g, int head, int row, const float *l, float shift, float *total, float *attn,
                       const char *logits) {
    const float *v = g->v + (long)head * g->p->E * g->Np;
    const dropout *drop = g->drop.threshold ? &g->drop : NULL;
    const draws of = drop ? draws_of(drop, query_of(g, head, row)) : (draws){0, 0};
    if (g->p->E == EIGHT) return WEIGH(EIGHT);
    RETURN_BY_WIDTH(WEIGH)
}

/* The outputs of queries begin..end of a head, from the exponentials that `attend_row` left in g->attn. */
static void sum_values(const image *g, int head, int begin, int end) {
    const problem *p = g->p;
    const int rows = end - begin;
    const long query = query_of(g, head, begin);
    gemm(FRESH, rows, g->Ep, g->N, g->attn + (long)head * BLOCK * g->Np, g->Np, 1,
         g->v_rows + (long)head * g->N * g->Ep, g->Ep, NULL, g->sums, g->Ep);
    for (int i = 0; i < rows; i++) {
        float *row = g->sums + i * g->Ep, share = p->norm[2 * (query + i) + 1] * g->drop.gain;
        for (int e = 0; e < p->E; e++) row[e] *= share;
    }
    transpose(at(p->out, channel_of(g, p->E, head, 0, begin), p->dtype), g->N, p->dtype, g->sums, g->Ep, rows, p->E);
}

/* Softmax and values of query i of begin..end, all heads; `rows` (K, P) holds its logits. */
static void attend_row(const image *g, float *rows, int i, int begin, int end) {
    const problem *p = g->p;
    const int place = (i - begin) % BLOCK;
    for (int head = 0; head < p->K; head++) {
        float *l = rows + head * g->P + MARGIN, total[EIGHT];
        float *attn = g->attn ? g->attn + ((long)head * BLOCK + place) * g->Np : NULL;
        const long query = query_of(g, head, i);
        float *norm = p->norm + 2 * query;
        const int next = (head + 1) % p->K; /* whose logits are written next */
        if (p->logits) { /* the softmax takes the logits as they are stored, rounded: backward reads these */
            void *stored = at(p->logits, map_element(g, head, i), p->dtype);
            write_floats(stored, l, g->N, p->dtype);
            if (p->dtype != FLOAT32) read_floats(l, stored, g->N, p->dtype);
        }
        hide(g, l, i);
        float sum = weigh_row(g, head, i, l, 0.0f, total, attn, soon(g, p->logits, next, i + !next, l));
        norm[0] = 0;
        if (!(sum > 1e-16f && sum < 1e16f)) { /* the largest logit is far from 0 */
            norm[0] = max_of(l, g->N);
            sum = weigh_row(g, head, i, l, norm[0], total, attn, (char *)l);
        }
        norm[1] = 1 / sum;
        if (g->v_rows && (place == BLOCK - 1 || i == end - 1)) sum_values(g, head, i - place, i + 1);
        for (int e = 0; e < p->E && !g->v_rows; e++) {
            const float value = total[e] * (norm[1] * g->drop.gain);
            write_floats(at(p->out, channel_of(g, p->E, head, e, i), p->dtype), &value, 1, p->dtype);
        }
    }
}

static void forward_rows(const image *g, workspace *w, int begin, int end) {
    const int r = g->conv.r;
    w->around.base = begin;
    w->around.mapped = begin > r ? begin - r : 0;
    for (int first = begin; first < end; first += BLOCK) {
        const int last = first + BLOCK < end ? first + BLOCK : end;
        if (g->p->kind != NONE) {
            move_window(g, &w->around, first, 0);
            fill_window(g, &w->around, last + r < g->N ? last + r : g->N);
        }
        if (g->p->kind != MIX) own_logits(g, w->own, 0, first, last, 0);
        if (g->p->weight) convolve_block(g, w, first, last);
        for (int i = first; i < last; i++) attend_row(g, finish_logits(g, w, i, i - first), i, first, last);
    }
}
