/* Forward: logits, softmax and values, a piece of some rows at a time. */
#include "logits.h"
#include "softmax.h"

#define ROWS 32 /* queries of a piece of work: their maps stay in the second-level cache */

/* Of one row: the sum of exp(l - shift), and in `total` the `count` sums of it times rows of v; or, where `attn` is not
 * NULL, the exponentials there. With `drop`, of those that are kept; the sum is of all. */
INLINE float weigh(const float *l, float shift, const float *v, long ld, int n, const int count, float *total,
                   float *attn, const dropout *drop, draws of) {
    vec sum = {}, sums[FEW] = {};
    for (int j = 0; j < n; j += VL) {
        vec x = exp_of(LOAD(l + j) - shift);
        if (n - j < VL) x = (vec)((ivec)x & before(n - j));
        sum += x;
        if (drop) x = (vec)((ivec)x & kept(drop, of, j));
        if (attn) STORE(attn + j, x);
#pragma GCC unroll 4
        for (int e = 0; e < count; e++) sums[e] += x * LOAD(v + e * ld + j);
    }
    for (int e = 0; e < count; e++) total[e] = sum_of(sums[e]);
    return sum_of(sum);
}

INLINE float weigh_some(const float *l, float shift, const float *v, long ld, int n, int count, float *total,
                        float *attn, const dropout *drop, draws of) {
    switch (count) {
        case 1: return weigh(l, shift, v, ld, n, 1, total, NULL, drop, of);
        case 2: return weigh(l, shift, v, ld, n, 2, total, NULL, drop, of);
        case 3: return weigh(l, shift, v, ld, n, 3, total, NULL, drop, of);
        case 4: return weigh(l, shift, v, ld, n, 4, total, NULL, drop, of);
    }
    return weigh(l, shift, v, ld, n, 0, total, attn, drop, of);
}

static float weigh_dropped(const float *l, float shift, const float *v, long ld, int n, int count, float *total,
                           float *attn, const dropout *drop, draws of) {
    return weigh_some(l, shift, v, ld, n, count, total, attn, drop, of);
}

static float weigh_row(const image *g, int head, int row, const float *l, float shift, float *total, float *attn) {
    const problem *p = g->p;
    const float *v = g->v + (long)head * p->E * g->Np;
    if (!g->drop.threshold) return weigh_some(l, shift, v, g->Np, g->N, p->E, total, attn, NULL, (draws){0, 0});
    return weigh_dropped(l, shift, v, g->Np, g->N, p->E, total, attn, &g->drop,
                         draws_of(&g->drop, query_of(g, head, row)));
}

/* The values of queries begin..end of a head from what `attend_row` left in g->attn. */
static void sum_values(const image *g, int head, int begin, int end) {
    const problem *p = g->p;
    const int rows = end - begin;
    const long map = query_of(g, head, 0);
    float values[BLOCK];
    gemm(FRESH, rows, g->Ep, g->N, g->attn + (long)head * BLOCK * g->Np, g->Np, 1,
         g->v_rows + (long)head * g->N * g->Ep, g->Ep, NULL, g->sums, g->Ep);
    for (int i = 0; p->channels_last && i < rows; i++) {
        float *row = g->sums + i * g->Ep, share = p->norm[2 * (map + begin + i) + 1] * g->drop.gain;
        for (int e = 0; e < p->E; e++) row[e] *= share;
        write_floats((void *)at(p->out, channel_of(g, p->E, head, begin + i, 0), p->dtype), row, p->E, p->dtype);
    }
    for (int e = 0; !p->channels_last && e < p->E; e++) {
        for (int i = 0; i < rows; i++)
            values[i] = g->sums[i * g->Ep + e] * (p->norm[2 * (map + begin + i) + 1] * g->drop.gain);
        write_floats((void *)at(p->out, channel_of(g, p->E, head, begin, e), p->dtype), values, rows, p->dtype);
    }
}

/* Softmax and values of query i of begin..end, all heads; `rows` (K, P) holds its logits. */
static void attend_row(const image *g, float *rows, int i, int begin, int end) {
    const problem *p = g->p;
    const int place = (i - begin) % BLOCK;
    for (int head = 0; head < p->K; head++) {
        float *l = rows + head * g->P + MARGIN, total[FEW];
        float *attn = g->attn ? g->attn + ((long)head * BLOCK + place) * g->Np : NULL;
        const long query = query_of(g, head, i);
        float *norm = p->norm + 2 * query;
        round_row(g, l);
        fetch_row(g, p->prev, head, i + ROWS + g->conv.r, 0);
        fetch_row(g, p->logits, head, i + 2, 1);
        if (p->logits) write_floats((void *)at(p->logits, map_element(g, head, i), p->dtype), l, g->N, p->dtype);
        float sum = weigh_row(g, head, i, l, 0.0f, total, attn);
        norm[0] = 0;
        if (!(sum > 1e-16f && sum < 1e16f)) { /* the largest logit is far from 0 */
            norm[0] = max_of(l, g->N);
            sum = weigh_row(g, head, i, l, norm[0], total, attn);
        }
        norm[1] = 1 / sum;
        if (p->E > FEW) {
            if (place == BLOCK - 1 || i == end - 1) sum_values(g, head, i - place, i + 1);
            continue;
        }
        for (int e = 0; e < p->E; e++) {
            const float value = total[e] * (norm[1] * g->drop.gain);
            write_floats((void *)at(p->out, channel_of(g, p->E, head, i, e), p->dtype), &value, 1, p->dtype);
        }
    }
}

static void forward_rows(const image *g, int begin, int end, float *maps, float *patches, float *own, float *row,
                         float *conv) {
    const problem *p = g->p;
    const int N = g->N, r = g->conv.r, top = begin - r, bottom = end + r;
    const long map_row = (long)p->K * g->P;
    if (p->kind == NONE) {
        own_logits(g, own, 0, begin, end, 0);
        for (int i = begin; i < end; i++) attend_row(g, own + (i - begin) * map_row, i, begin, end);
        return;
    }
    const int first = top < 0 ? 0 : top, last = bottom > N ? N : bottom;
    memset(maps, 0, (first - top) * map_row * sizeof(float));
    memset(maps + (last - top) * map_row, 0, (bottom + GROUP - 1 - last) * map_row * sizeof(float));
    if (p->kind == MIX) {
        own_logits(g, maps, first - top, first, last, 1);
    } else {
        previous_logits(g, maps, first - top, first, last);
        own_logits(g, own, 0, begin, end, 0);
    }
    if (patches) {
        memset(patches, 0, (first - top) * map_row * sizeof(float));
        memset(patches + (last - top) * map_row, 0, (bottom + GROUP - 1 - last) * map_row * sizeof(float));
        without_prefix(g, patches, maps, -top, first, last);
    }
    for (int i = begin; i < end; i++) {
        if (p->weight && (i - begin) % GROUP == 0)
            convolve(&g->conv, conv, map_row, g->P, patches ? patches : maps, i - begin,
                     end - i < GROUP ? end - i : GROUP, g->weight, p->bias);
        if (patches) pass_prefix(g, conv + (i - begin) % GROUP * map_row, maps + (i - begin + r) * map_row, i);
        attend_row(g, finish_logits(g, row, conv + (i - begin) % GROUP * map_row, maps, i - begin + r,
                                    own + (i - begin) * map_row), i, begin, end);
    }
}

/* Returns 0, or where a thread cannot get its memory the bytes that it needs; then nothing is done. */
int64_t evolving_attention_forward(const problem *p) {
    int64_t missing = 0;
    const int N = p->H * p->W;
    /* an image is cut where there are fewer images than threads; pieces read each other's neighbouring rows again */
    int pieces = p->B >= p->threads ? 1 : (p->threads + p->B - 1) / p->B;
    int rows = ((N + pieces - 1) / pieces + GROUP - 1) / GROUP * GROUP;
    if (rows > ROWS) rows = ROWS;
    pieces = (N + rows - 1) / rows;
    const int tasks = p->B * pieces;
#pragma omp parallel num_threads(p->threads)
    {
        static _Thread_local struct {
            problem sizes;
            int rows;
            buffers memory;
            image g;
            float *maps, *patches, *own, *row, *conv;
        } kept;
        image *g = &kept.g;
        if (kept.rows != rows || !same_sizes(&kept.sizes, p)) {
            buffers *m = &kept.memory;
            free_all(m);
            allocate_image(g, m, p);
            const long map_row = (long)p->K * g->P;
            kept.sizes = *p;
            kept.rows = rows;
            kept.maps = new_floats(m, (rows + 2 * g->conv.r + GROUP - 1) * map_row);
            kept.patches = p->prefix ? new_floats(m, (rows + 2 * g->conv.r + GROUP - 1) * map_row) : NULL;
            kept.own = new_floats(m, rows * map_row);
            kept.row = new_floats(m, map_row);
            kept.conv = new_floats(m, GROUP * map_row);
        }
        if (all_have_memory(&kept.memory, &missing)) {
            read_parameters(g, p);
            int read = -1;
#pragma omp for schedule(static)
            for (int task = 0; task < tasks; task++) {
                const int b = task / pieces, begin = task % pieces * rows, end = begin + rows < N ? begin + rows : N;
                if (b != read) {
                    read_image(g, b);
                    for (int head = 0; g->v_rows && head < p->K; head++)
                        transpose(g->v_rows + (long)head * N * g->Ep, g->Ep, g->v + (long)head * p->E * g->Np, g->Np,
                                  p->E, N);
                }
                read = b;
                forward_rows(g, begin, end, kept.maps, kept.patches, kept.own, kept.row, kept.conv);
            }
        } else {
            free_all(&kept.memory);
            kept.sizes.K = 0; /* of no problem */
        }
    }
    return missing;
}
