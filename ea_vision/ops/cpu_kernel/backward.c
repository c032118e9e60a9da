/* Backward: from the stored logits (in the last layer, recomputed ones) through softmax and convolution to all
 * gradients. Results of forward that were not stored are recomputed, block by block. */
#include "logits.h"
#include "softmax.h"

static float *own_row(const image *g, const workspace *w, int head, int row) {
    return w->d_own + ((long)head * w->own_size + row - w->own_base) * g->P + MARGIN;
}

/* Backward of one row's values and softmax. In: its logits l (N), norm (2), and d_out (E, Np), the gradient of its
 * query's output, with v (E, Np); or E = 0 and the gradient of attn in `d`. Out: attn, and attn times its gradient in
 * `d`, both up to Np. Returns the sum of `d`. With `drop` only the attn that is kept multiplies the values. */
INLINE float value_gradient(const image *g, float *attn, float *d, const float *l, const float *norm,
                            const float *d_out, const float *v, const int E, const dropout *drop, draws of) {
    const int n = g->N;
    vec total = {};
    for (int j = 0; j < n; j += VL) {
        __builtin_prefetch(l + j + AHEAD, 0, 2);
        vec x = norm[1] * exp_of(LOAD(l + j) - norm[0]), y = E ? (vec){} : LOAD(d + j);
        if (n - j < VL) x = (vec)((ivec)x & before(n - j));
#pragma GCC unroll 4
        for (int e = 0; e < E; e++) y += d_out[e * g->Np] * LOAD(v + e * g->Np + j);
        STORE(attn + j, x);
        if (drop) y = drop->gain * (vec)((ivec)y & kept(drop, of, j));
        y *= x;
        STORE(d + j, y);
        total += y;
    }
    return sum_of(total);
}

#define VALUE_GRADIENT(E) value_gradient(g, attn, d, l, norm, d_out, v, E, g->drop.threshold ? &g->drop : NULL, of)

static float some_value_gradient(const image *g, float *attn, float *d, const float *l, const float *norm,
                                 const float *d_out, const float *v, draws of) {
    RETURN_BY_WIDTH(VALUE_GRADIENT)
}

/* Backward from the outputs of queries begin..end to their logits. Gradients go into d_own (unless only_convolved),
 * and, where the ReLU passes it, into d_conv. Adds to d_v, d_bias, and the gates' gradients (from the convolution). */
static void softmax_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const int r = g->conv.r;
    const long map_row = (long)p->K * g->P;
    float *made[BLOCK]; /* logits of queries, recomputed if they are not stored */
    /* stored logits that are the ReLU's output show where it passed */
    const int convolve_again = p->weight && !(p->logits && g->only_convolved);
    const int gated = p->d_gates && (p->weight || p->kind == PREDICT);
    if (convolve_again) convolve_block(g, w, begin, end);
    if (!p->logits)
        for (int i = begin; i < end; i++) made[i - begin] = finish_logits(g, w, i, i - begin) + MARGIN;
    for (int head = 0; head < p->K; head++) {
        const long value = (long)head * p->E * g->Np, query = query_of(g, head, 0);
        const float share = p->kind == MIX ? beta_of(p, head) : alpha_of(p, head);
        if (p->E > FEW)
            gemm(FRESH, end - begin, g->Np, p->E, w->d_out + value + begin, 1, g->Np, g->v + value, g->Np, NULL,
                 w->d_attn, g->Np);
        for (int i = begin; i < end; i++) {
            const float *l = p->logits ? stored_row(g, p->logits, head, i, w->scratch) : made[i - begin] + head * g->P;
            const float *more = NULL;
            if (p->d_logits) more = stored_row(g, p->d_logits, head, i, w->scratch + g->Np);
            float *attn = w->attn + (long)(i - begin) * g->Np, *d_attn = w->d_attn + (long)(i - begin) * g->Np;
            const float *seen = p->window_height ? g->previous : l;
            if (seen != l) {
                memcpy(g->previous, l, g->N * sizeof(float));
                hide(g, g->previous, i);
            }
            const dropout *drop = g->drop.threshold ? &g->drop : NULL;
            const draws of = drop ? draws_of(drop, query + i) : (draws){0, 0};
            const float *norm = p->norm + 2 * (query + i), *d_out = w->d_out + value + i, *v = g->v + value;
            const float mean = some_value_gradient(g, attn, d_attn, seen, norm, d_out, v, of);
            const float *passed = convolve_again ? w->conv + (i - begin) * map_row + head * g->P + MARGIN : l;
            float *d = own_row(g, w, head, i);
            float *gate = p->weight ? row_of(g, w->around.d_conv, i - w->around.base + r, head) : NULL;
            const int unseen = !gate ? 0 : i < p->prefix ? g->N : p->prefix;
            vec bias = {};
            for (int j = 0; j < g->Np; j += VL) {
                vec x = LOAD(d_attn + j) - mean * LOAD(attn + j);
                if (more) __builtin_prefetch(more + j + AHEAD, 0, 2);
                if (more) x += g->N - j < VL ? (vec)((ivec)LOAD(more + j) & before(g->N - j)) : LOAD(more + j);
                if (!g->only_convolved) STORE(d + j, x);
                if (gate) {
                    x = (vec)((ivec)(LOAD(passed + j) > 0) & (ivec)(share * x));
                    if (j < unseen) x = (vec)((ivec)x & ~before(unseen - j));
                    STORE(gate + j, x);
                    bias += x;
                }
            }
            if (drop) /* the attn that multiplied the values */
                for (int j = 0; j < g->Np; j += VL)
                    STORE(attn + j, drop->gain * (vec)((ivec)LOAD(attn + j) & kept(drop, of, j)));
            if (gate) STORE(w->d_bias + head * VL, LOAD(w->d_bias + head * VL) + bias);
            if (gated) { /* beta: convolved - mixture; PA's alpha: convolved (less the own logits, later) */
                const float *m = row_of(g, w->around.maps, i - w->around.base + r, head), *high = p->weight ? passed : m;
                vec sum = {};
                for (int j = 0; j < g->Np; j += VL)
                    sum += LOAD(d + j) * (p->kind == MIX ? LOAD(high + j) - LOAD(m + j) : LOAD(high + j));
                w->d_gates[p->kind == MIX ? p->K + head : head] += sum_of(sum);
            }
        }
        gemm(ADD, p->E, g->Np, end - begin, w->d_out + value + begin, g->Np, 1, w->attn, g->Np, NULL, w->d_v + value,
             g->Np);
    }
}

/* Backward through the convolution for queries begin..end: turns d_own into the gradient of gain * own logits, writes
 * d_prev, and adds to the gradients of the weight and of EA's alpha (`own_gradients` subtracts the own logits). */
static void convolution_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const long map_row = (long)p->K * g->P;
    const int predicted = p->kind == PREDICT && p->weight, direct = g->only_convolved;
    for (int first = begin; first < end; first += GROUP) {
        const int rows = end - first < GROUP ? end - first : GROUP;
        if (p->weight) {
            const int top = first - w->around.base;
            convolve(&g->conv, direct ? own_row(g, w, 0, first) - MARGIN : w->d_maps, g->P,
                     (direct ? w->own_size : GROUP) * (long)g->P, w->around.d_conv, top, rows, w->turned, NULL);
            weight_gradient(&g->conv, w->d_weight, w->around.d_conv + (top + g->conv.r) * map_row, w->around.patches, top, rows);
        }
        for (int head = 0; head < p->K; head++) {
            const float alpha = alpha_of(p, head), kept = 1 - beta_of(p, head);
            for (int i = first; i < first + rows; i++) {
                float *d = own_row(g, w, head, i);
                float *d_maps = w->d_maps + ((long)head * GROUP + i - first) * g->P + MARGIN;
                if (p->prefix) /* the prefix bypasses the convolution, with the same factor */
                    for (int j = 0; j < (i < p->prefix ? g->N : p->prefix); j++)
                        d_maps[j] = (p->kind == MIX ? 1 - kept : alpha) * d[j];
                if (p->kind == MIX && p->weight && !direct)
                    for (int j = 0; j < g->Np; j += VL) STORE(d + j, kept * LOAD(d + j) + LOAD(d_maps + j));
                if (p->kind == MIX && p->d_gates) {
                    const float *prev = stored_row(g, p->prev, head, i, w->scratch);
                    vec sum = {};
                    for (int j = 0; j < g->Np; j += VL) {
                        const vec x = LOAD(prev + j);
                        sum += LOAD(d + j) * (g->N - j < VL ? (vec)((ivec)x & before(g->N - j)) : x);
                    }
                    w->d_gates[head] += sum_of(sum);
                }
                if (p->d_prev)
                    write_scaled(at(p->d_prev, map_element(g, head, i), p->dtype), predicted ? d_maps : d,
                                 predicted ? 1.0f : alpha, g->N, p->dtype, w->scratch);
            }
        }
    }
}

/* Adds the position terms' part to a head's d_q (rows, Dp) of queries begin..end, and to the tables' gradients. */
static void position_gradients(const image *g, workspace *w, int head, int begin, int end) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Dp = g->Dp, Hp = round_up(H);
    const long ld = g->position_ld;
    const ivec inside = before(W % VL); /* of a row's last vector */
    transpose(w->q_rows, Dp, FLOAT32, g->q + (long)head * p->D * g->Np + begin, g->Np, p->D, end - begin); /* scaled */
    for (int i = begin; i < end; i++) {
        const float *row = own_row(g, w, head, i);
        float *by_row = w->position + (i - begin) * ld, *by_col = by_row + Hp;
        memset(by_row, 0, ld * sizeof(float));
        for (int y = 0; y < H; y++)
            for (int x = 0; x < W; x += VL) { /* entries beyond W are not read again */
                const vec part = LOAD(row + y * W + x);
                STORE(by_col + x, LOAD(by_col + x) + part);
                by_row[y] += sum_of(W - x < VL ? (vec)((ivec)part & inside) : part);
            }
    }
    for (int i = begin, stop; i < end; i = stop) { /* the queries of one row see the same part of the table */
        const int y = i / W;
        stop = (y + 1) * W < end ? (y + 1) * W : end;
        const float *terms = w->position + (i - begin) * ld;
        const long first = (long)(H - 1 - y) * Dp, query = (long)(i - begin) * Dp;
        gemm(ADD, stop - i, Dp, H, terms, ld, 1, w->height_rows + first, Dp, NULL, w->d_q + query, Dp);
        gemm(ADD, H, Dp, stop - i, terms, 1, ld, w->q_rows + query, Dp, NULL, w->d_heights + first, Dp);
    }
    for (int i = begin; i < end && i < begin + W; i++) { /* likewise the queries of one column */
        const int count = (end - i + W - 1) / W;
        const float *terms = w->position + (i - begin) * ld + Hp;
        const long first = (long)(W - 1 - i % W) * Dp, query = (long)(i - begin) * Dp;
        gemm(ADD, count, Dp, W, terms, ld * W, 1, w->width_rows + first, Dp, NULL, w->d_q + query, (long)Dp * W);
        gemm(ADD, W, Dp, count, terms, 1, ld * W, w->q_rows + query, (long)Dp * W, NULL, w->d_widths + first, Dp);
    }
}

/* From d_own of queries begin..end: writes d_q, and adds to the gradients of k, the position tables and alpha. */
static void own_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const int D = p->D, Dp = g->Dp;
    for (int head = 0; head < p->K; head++) {
        const long first = (long)head * D * g->Np;
        const float *d = own_row(g, w, head, begin);
        gemm(begin ? ADD : FRESH, D, g->Np, end - begin, g->q + first + begin, g->Np, 1, d, g->P, NULL, w->d_k + first,
             g->Np);
        gemm(FRESH, end - begin, Dp, g->N, d, g->P, 1, w->k_rows + (long)head * g->N * Dp, Dp, NULL, w->d_q, Dp);
        if (p->height_rel) position_gradients(g, w, head, begin, end);
        transpose(w->d_q_columns, w->own_size, FLOAT32, w->d_q, Dp, end - begin, D);
        for (int c = 0; c < D; c++) {
            const float *row = w->d_q_columns + (long)c * w->own_size;
            if (p->d_gates) { /* alpha: subtract the own logits' part, which is q times their gradient by q */
                const long channel = g->b * p->q_step + ((long)head * D + c) * g->N + begin;
                double sum = 0;
                read_floats(w->scratch, at(p->q, channel, p->dtype), end - begin, p->dtype);
                for (int i = 0; i < end - begin; i++) sum += w->scratch[i] * row[i];
                w->d_gates[head] -= p->scale * sum;
            }
            write_scaled(at(p->d_q, channel_of(g, D, head, c, begin), p->dtype), row, p->scale * gain_of(p, head),
                         end - begin, p->dtype, w->scratch);
        }
    }
}

/* Writes rows of n floats to `to`, one after another. */
static void write_matrix(void *to, const float *from, long rows, long n, long ld, int dtype) {
    for (long r = 0; r < rows; r++) write_floats(at(to, r * n, dtype), from + r * ld, n, dtype);
}

static void backward_image(const image *g, workspace *w) {
    const problem *p = g->p;
    const long b = g->b;
    const int N = g->N, r = g->conv.r;
    const long values = (long)p->K * p->E;
    const long keys = (long)p->K * p->D, heights = 2L * p->H - 1, widths = 2L * p->W - 1;
    read_matrix(w->d_out, g->Np, at(p->d_out, b * values * N, p->dtype), values, N, p->dtype, NULL);
    memset(w->d_v, 0, values * g->Np * sizeof(float));
    /* One block of queries after another. Each step trails the one before by just enough rows that the neighbours it
     * needs are computed, and still in the cache. */
    int convolved = 0;
    w->own_base = w->around.mapped = 0;
    for (int head = 0; head < p->K; head++)
        transpose(w->k_rows + (long)head * N * g->Dp, g->Dp, FLOAT32, g->k + (long)head * p->D * g->Np, g->Np, p->D, N);
    for (int begin = 0; begin < N; begin += BLOCK) {
        const int end = begin + BLOCK < N ? begin + BLOCK : N;
        const int through = end < N ? (end - r) / GROUP * GROUP : N;
        if (p->kind != NONE) {
            move_window(g, &w->around, convolved, begin);
            fill_window(g, &w->around, end + r < N ? end + r : N);
        }
        if (p->kind != MIX && !p->logits) own_logits(g, w->own, 0, begin, end, 0); /* else stored logits are enough */
        softmax_gradients(g, w, begin, end);
        if (p->kind != NONE && convolved < through) convolution_gradients(g, w, convolved, through);
        convolved = p->kind == NONE ? end : through > convolved ? through : convolved;
        if (convolved - w->own_base >= w->own_rows || end == N) {
            own_gradients(g, w, w->own_base, convolved);
            for (int head = 0; head < p->K && convolved < end; head++)
                memmove(own_row(g, w, head, w->own_base), own_row(g, w, head, convolved),
                        (end - convolved) * g->P * sizeof(float));
            w->own_base = convolved;
        }
    }
    write_matrix(at(p->d_k, b * keys * N, p->dtype), w->d_k, keys, N, g->Np, p->dtype);
    write_matrix(at(p->d_v, b * values * N, p->dtype), w->d_v, values, N, g->Np, p->dtype);
    if (p->height_rel) {
        write_matrix(p->d_height_rel + b * heights * p->D, w->d_heights, heights, p->D, g->Dp, FLOAT32);
        write_matrix(p->d_width_rel + b * widths * p->D, w->d_widths, widths, p->D, g->Dp, FLOAT32);
        memset(w->d_heights, 0, heights * g->Dp * sizeof(float));
        memset(w->d_widths, 0, widths * g->Dp * sizeof(float));
    }
    if (p->weight) {
        write_weight_gradient(&g->conv, p->d_weight + b * p->K * p->K * p->kernel * p->kernel, w->d_weight);
        for (int h = 0; h < p->K; h++) p->d_bias[b * p->K + h] = sum_of(LOAD(w->d_bias + h * VL));
        memset(w->d_bias, 0, (long)p->K * VL * sizeof(float));
    }
    if (p->d_gates) {
        for (int i = 0; i < 2 * p->K; i++) p->d_gates[2 * b * p->K + i] = w->d_gates[i];
        memset(w->d_gates, 0, 2L * p->K * sizeof(double));
    }
}
