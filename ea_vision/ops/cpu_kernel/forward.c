/* Forward: logits, softmax and values, a piece of some rows at a time. */
#include "logits.h"
#include "softmax.h"

/* Of one row: the sum of exp(l - shift), and in `total` the `count` sums of it times rows of v; or, where `attn` is not
 * NULL, the exponentials there. With `drop`, of those that are kept; the sum is of all. */
INLINE float weigh(const image *g, const float *l, float shift, const float *v, const int count, float *total,
                   float *attn, const dropout *drop, draws of, const char *logits) {
    const int n = g->N;
    vec sum = {}, sums[FEW] = {};
    for (int j = 0; j < n; j += VL) {
        fetch(g, logits, j, 1);
        vec x = exp_of(LOAD(l + j) - shift);
        if (n - j < VL) x = (vec)((ivec)x & before(n - j));
        sum += x;
        if (drop) x = (vec)((ivec)x & kept(drop, of, j));
        if (attn) STORE(attn + j, x);
#pragma GCC unroll 4
        for (int e = 0; e < count; e++) sums[e] += x * LOAD(v + e * g->Np + j);
    }
    for (int e = 0; e < count; e++) total[e] = sum_of(sums[e]);
    return sum_of(sum);
}

#define WEIGH(count, drop) weigh(g, l, shift, v, count, total, count ? NULL : attn, drop, of, logits)

/* logits: a row that is written soon. */
static float weigh_row(const image *g, int head, int row, const float *l, float shift, float *total, float *attn,
                       const char *logits) {
    const float *v = g->v + (long)head * g->p->E * g->Np;
    const draws of = g->drop.threshold ? draws_of(&g->drop, query_of(g, head, row)) : (draws){0, 0};
    RETURN_ROW(WEIGH)
}

/* The values of queries begin..end of a head from what `attend_row` left in g->attn. */
static void sum_values(const image *g, int head, int begin, int end) {
    const problem *p = g->p;
    const int rows = end - begin;
    const long query = query_of(g, head, begin);
    gemm(FRESH, rows, g->Ep, g->N, g->attn + (long)head * BLOCK * g->Np, g->Np, 1,
         g->v_rows + (long)head * g->N * g->Ep, g->Ep, NULL, g->sums, g->Ep);
    for (int i = 0; i < rows; i++) {
        float *row = g->sums + i * g->Ep, share = p->norm[2 * (query + i) + 1] * g->drop.gain;
        for (int e = 0; e < p->E; e++) row[e] *= share;
        if (p->channels_last)
            write_floats((void *)at(p->out, channel_of(g, p->E, head, begin + i, 0), p->dtype), row, p->E, p->dtype);
    }
    if (!p->channels_last)
        write_transposed((void *)at(p->out, channel_of(g, p->E, head, begin, 0), p->dtype), g->N, g->sums, g->Ep, rows,
                         p->E, p->dtype);
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
        const int next = (head + 1) % p->K; /* whose logits are written next */
        round_row(g, l);
        if (p->logits) write_floats((void *)at(p->logits, map_element(g, head, i), p->dtype), l, g->N, p->dtype);
        hide(g, l, i);
        float sum = weigh_row(g, head, i, l, 0.0f, total, attn, soon(g, p->logits, next, i + !next, l));
        norm[0] = 0;
        if (!(sum > 1e-16f && sum < 1e16f)) { /* the largest logit is far from 0 */
            norm[0] = max_of(l, g->N);
            sum = weigh_row(g, head, i, l, norm[0], total, attn, (char *)l);
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

static void forward_rows(const image *g, window *w, int begin, int end, float *own, float *row, float *conv) {
    const problem *p = g->p;
    const int r = g->conv.r;
    const long map_row = (long)p->K * g->P;
    w->base = begin;
    w->mapped = begin > r ? begin - r : 0;
    for (int first = begin; first < end; first += BLOCK) {
        const int last = first + BLOCK < end ? first + BLOCK : end;
        if (p->kind != NONE) {
            move_window(g, w, first, 0);
            fill_window(g, w, last + r < g->N ? last + r : g->N);
        }
        if (p->kind != MIX) own_logits(g, own, 0, first, last, 0);
        for (int i = first; i < last; i++) {
            float *convolved = conv + (i - first) % GROUP * map_row;
            if (p->weight && (i - first) % GROUP == 0)
                convolve(&g->conv, conv, map_row, g->P, w->patches, i - first, last - i < GROUP ? last - i : GROUP,
                         g->weight, p->bias);
            if (p->prefix) pass_prefix(g, convolved, w->maps + (i - first + r) * map_row, i);
            attend_row(g, finish_logits(g, row, convolved, w->maps, i - first + r, own + (i - first) * map_row), i,
                       first, last);
        }
    }
}

/* Returns 0, or where a thread cannot get its memory the bytes that it needs; then nothing is done. */
int64_t evolving_attention_forward(const problem *p) {
    const int N = p->H * p->W;
    int64_t missing = 0;
    use_large_pages(p->logits, (long)p->B * p->K * N * N * size_of(p->dtype));
    /* an image is cut where there are fewer images than threads; pieces read each other's neighbouring rows again */
    const int wanted = p->B >= p->threads ? 1 : (p->threads + p->B - 1) / p->B;
    const int rows = ((N + wanted - 1) / wanted + BLOCK - 1) / BLOCK * BLOCK, pieces = (N + rows - 1) / rows;
#pragma omp parallel num_threads(p->threads)
    {
        static _Thread_local struct {
            problem sizes;
            buffers memory;
            image g;
            window w;
            float *own, *row, *conv;
        } kept;
        image *g = &kept.g;
        if (!same_sizes(&kept.sizes, p)) {
            buffers *m = &kept.memory;
            free_all(m);
            allocate_image(g, m, p);
            kept.sizes = *p;
            if (p->kind != NONE) allocate_window(&kept.w, m, g, 0);
            kept.own = new_floats(m, (long)BLOCK * p->K * g->P);
            kept.row = new_floats(m, (long)p->K * g->P);
            kept.conv = new_floats(m, (long)GROUP * p->K * g->P);
        }
        if (all_have_memory(&kept.memory, &missing)) {
            read_parameters(g, p);
            int read = -1;
#pragma omp for schedule(static)
            for (int task = 0; task < p->B * pieces; task++) {
                const int b = task / pieces, begin = task % pieces * rows, end = begin + rows < N ? begin + rows : N;
                if (b != read) {
                    read_image(g, b);
                    for (int head = 0; g->v_rows && head < p->K; head++)
                        transpose(g->v_rows + (long)head * N * g->Ep, g->Ep, g->v + (long)head * p->E * g->Np, g->Np,
                                  p->E, N);
                }
                read = b;
                forward_rows(g, &kept.w, begin, end, kept.own, kept.row, kept.conv);
            }
        } else {
            free_all(&kept.memory);
            kept.sizes.K = 0; /* of no problem */
        }
    }
    return missing;
}
