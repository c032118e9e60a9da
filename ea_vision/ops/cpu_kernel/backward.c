/* Backward: from the stored logits (or, in the last layer, logits made again) through softmax and convolution to the
 * gradients of everything. What was made forward and not stored is made again, block by block. */
#include "logits.h"
#include "softmax.h"

/* What the backward pass of an image needs beside it. */
typedef struct {
    window around;
    float *own, *conv;        /* (BLOCK, K, P): own logits, the convolution */
    int own_base, own_rows, own_size; /* of d_own: its first query; so many before they are used; its rows */
    float *d_own; /* (K, own_size, P): gradient of gain * own logits; a head's rows together, for their products */
    float *d_maps;            /* (K, GROUP, P): gradient of rows that the convolution read */
    float *exchanged, *turned; /* the convolution's weight for that: heads exchanged, turned by 180 degrees */
    float *logits;            /* (BLOCK, K, P) */
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

#define L2_FLOATS (1L << 18) /* half of what a second-level cache has, at least */

static void allocate_workspace(workspace *w, buffers *m, const image *g, const problem *p) {
    const long map_row = (long)p->K * g->P, weights = (long)g->conv.planes * p->K * g->conv.taps;
    memset(w, 0, sizeof *w);
    w->own_rows = L2_FLOATS / map_row < 32 ? 32 : L2_FLOATS / map_row;
    w->own_rows = w->own_rows < g->N ? w->own_rows : g->N;
    w->own_size = round_up(w->own_rows + WINDOW);
    w->d_own = new_floats(m, w->own_size * map_row);
    w->logits = new_floats(m, BLOCK * map_row);
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
    if (p->kind != MIX) w->own = new_floats(m, BLOCK * map_row);
    if (p->kind != NONE) {
        allocate_window(&w->around, m, g, 1);
        w->conv = new_floats(m, BLOCK * map_row);
    }
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

static float *own_row(const image *g, const workspace *w, int head, int row) {
    return w->d_own + ((long)head * w->own_size + row - w->own_base) * g->P + MARGIN;
}

/* A row through values and softmax. In: l (N) its logits, norm (2), d_out (E, Np) the gradient of its query's values
 * and v (E, Np), or E = 0 and in `d` the gradient of attn. Out: attn, and in `d` attn times its gradient, to N's next
 * multiple of VL. Returns the sum of the latter. With `drop` the values see the attn that is kept. */
INLINE float value_gradient(const image *g, float *attn, float *d, const float *l, const float *norm,
                            const float *d_out, const float *v, const int E, const dropout *drop, draws of) {
    const int n = g->N;
    vec total = {};
    for (int j = 0; j < n; j += VL) {
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

#define VALUE_GRADIENT(E, drop) value_gradient(g, attn, d, l, norm, d_out, v, E, drop, of)

static float some_value_gradient(const image *g, float *attn, float *d, const float *l, const float *norm,
                                 const float *d_out, const float *v, draws of) {
    RETURN_ROW(VALUE_GRADIENT)
}

/* The gradient of queries begin..end's logits into d_own (of gain * own, or of the mixture where nothing is convolved)
 * and d_conv; adds to d_v, and to the gates' gradients what the values of the convolution have in them. */
static void softmax_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const int r = g->conv.r;
    const long map_row = (long)p->K * g->P;
    float *made[BLOCK]; /* the logits of a query that are not stored */
    /* where nothing else is in the logits, they show what passed the ReLU */
    const int convolve_again = p->weight && !(p->logits && g->only_convolved);
    const int gated = p->d_gates && (p->weight || p->kind == PREDICT);
    if (convolve_again)
        for (int i = begin; i < end; i += GROUP)
            convolve(&g->conv, w->conv + (i - begin) * map_row, map_row, g->P, w->around.patches, i - w->around.base,
                     end - i < GROUP ? end - i : GROUP, g->weight, p->bias);
    if (p->prefix)
        for (int i = begin; i < end; i++)
            pass_prefix(g, w->conv + (i - begin) * map_row, w->around.maps + (i - w->around.base + r) * map_row, i);
    if (!p->logits)
        for (int i = begin; i < end; i++) {
            const long at = (i - begin) * map_row;
            made[i - begin] = finish_logits(g, w->logits + at, w->conv ? w->conv + at : NULL, w->around.maps,
                                            i - w->around.base + r, w->own ? w->own + at : NULL);
        }
    for (int head = 0; head < p->K; head++) {
        const long value = (long)head * p->E * g->Np, query = query_of(g, head, 0);
        const float share = p->kind == MIX ? beta_of(p, head) : alpha_of(p, head);
        if (p->E > FEW)
            gemm(FRESH, end - begin, g->Np, p->E, w->d_out + value + begin, 1, g->Np, g->v + value, g->Np, NULL,
                 w->d_attn, g->Np);
        for (int i = begin; i < end; i++) {
            const float *l, *more = NULL;
            if (p->logits) {
                l = stored_row(g, p->logits, head, i, w->scratch);
            } else {
                float *row = made[i - begin] + head * g->P + MARGIN;
                round_row(g, row);
                l = row;
            }
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
                if (more) x += g->N - j < VL ? (vec)((ivec)LOAD(more + j) & before(g->N - j)) : LOAD(more + j);
                if (!g->only_convolved) STORE(d + j, x);
                if (gate) {
                    x = (vec)((ivec)(LOAD(passed + j) > 0) & (ivec)(share * x));
                    if (j < unseen) x = (vec)((ivec)x & ~before(unseen - j));
                    STORE(gate + j, x);
                    bias += x;
                }
            }
            if (drop) /* what the values saw */
                for (int j = 0; j < g->Np; j += VL)
                    STORE(attn + j, drop->gain * (vec)((ivec)LOAD(attn + j) & kept(drop, of, j)));
            if (gate) STORE(w->d_bias + head * VL, LOAD(w->d_bias + head * VL) + bias);
            if (gated) { /* beta's: convolved - mixture; alpha's of PA: convolved, and less the own logits later */
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

/* Through the convolution, queries begin..end: d_own becomes the gradient of gain * own logits; d_prev and their share
 * of the gradients of the weight and, but for the own logits, of EA's alpha are done. */
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
                if (p->prefix) /* past the convolution, in its share */
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
                    write_scaled((void *)at(p->d_prev, map_element(g, head, i), p->dtype), predicted ? d_maps : d,
                                 predicted ? 1.0f : alpha, g->N, p->dtype, w->scratch);
            }
        }
    }
}

/* The position terms' part in a head's d_q (rows, Dp) of queries begin..end, and theirs in the tables' gradients. */
static void position_gradients(const image *g, workspace *w, int head, int begin, int end) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Dp = g->Dp, Hp = round_up(H);
    const long ld = g->position_ld;
    const ivec inside = before(W % VL); /* of a row's last vector */
    transpose(w->q_rows, Dp, g->q + (long)head * p->D * g->Np + begin, g->Np, p->D, end - begin); /* scaled */
    for (int i = begin; i < end; i++) {
        const float *row = own_row(g, w, head, i);
        float *by_row = w->position + (i - begin) * ld, *by_col = by_row + Hp;
        memset(by_row, 0, ld * sizeof(float));
        for (int y = 0; y < H; y++)
            for (int x = 0; x < W; x += VL) { /* what lies beyond W is not read again */
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
    for (int i = begin; i < end && i < begin + W; i++) { /* likewise those of one column */
        const int count = (end - i + W - 1) / W;
        const float *terms = w->position + (i - begin) * ld + Hp;
        const long first = (long)(W - 1 - i % W) * Dp, query = (long)(i - begin) * Dp;
        gemm(ADD, count, Dp, W, terms, ld * W, 1, w->width_rows + first, Dp, NULL, w->d_q + query, (long)Dp * W);
        gemm(ADD, W, Dp, count, terms, 1, ld * W, w->q_rows + query, (long)Dp * W, NULL, w->d_widths + first, Dp);
    }
}

/* From d_own of queries begin..end: their gradient, and their part in those of k and of the position tables. */
static void own_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const int D = p->D, Dp = g->Dp, last = p->channels_last;
    for (int head = 0; head < p->K; head++) {
        const long first = (long)head * D * g->Np;
        const float *d = own_row(g, w, head, begin);
        gemm(begin ? ADD : FRESH, D, g->Np, end - begin, g->q + first + begin, g->Np, 1, d, g->P, NULL, w->d_k + first,
             g->Np);
        gemm(FRESH, end - begin, Dp, g->N, d, g->P, 1, w->k_rows + (long)head * g->N * Dp, Dp, NULL, w->d_q, Dp);
        if (p->height_rel) position_gradients(g, w, head, begin, end);
        if (!last) transpose(w->d_q_columns, w->own_size, w->d_q, Dp, end - begin, D);
        for (int r = 0; r < (last ? end - begin : D); r++) { /* in the order in which it is stored */
            const float *row = last ? w->d_q + (long)r * Dp : w->d_q_columns + (long)r * w->own_size;
            const int length = last ? D : end - begin;
            if (p->d_gates) { /* alpha's: less the own logits, which are q times their gradient by q */
                const long at_q = last ? (begin + r) * p->q_row + (long)head * D : ((long)head * D + r) * g->N + begin;
                double sum = 0;
                read_floats(w->scratch, at(p->q, g->b * p->q_step + at_q, p->dtype), length, p->dtype);
                for (int i = 0; i < length; i++) sum += w->scratch[i] * row[i];
                w->d_gates[head] -= p->scale * sum;
            }
            const long element = last ? channel_of(g, D, head, begin + r, 0) : channel_of(g, D, head, begin, r);
            write_scaled((void *)at(p->d_q, element, p->dtype), row, p->scale * gain_of(p, head), length, p->dtype,
                         w->scratch);
        }
    }
}

/* Store the gradient of k or v, (K*width, Np), of an image. */
static void write_keys_gradient(const image *g, void *to, const float *from, int width) {
    const problem *p = g->p;
    const long channels = (long)p->K * width, first = g->b * channels * g->N;
    if (p->channels_last)
        write_transposed((void *)at(to, first, p->dtype), channels, from, g->Np, channels, g->N, p->dtype);
    for (long c = 0; !p->channels_last && c < channels; c++)
        write_floats((void *)at(to, first + c * g->N, p->dtype), from + c * g->Np, g->N, p->dtype);
}

static void write_rows(float *to, float *from, long rows, long n, long ld) { /* and empty `from` */
    for (long r = 0; r < rows; r++) memcpy(to + r * n, from + r * ld, n * sizeof(float));
    memset(from, 0, rows * ld * sizeof(float));
}

static void backward_image(const image *g, workspace *w) {
    const problem *p = g->p;
    const long b = g->b;
    const int N = g->N, r = g->conv.r;
    const long values = (long)p->K * p->E;
    read_pixels(g, w->d_out, p->d_out, values * N, values, values, NULL);
    memset(w->d_v, 0, (long)p->K * p->E * g->Np * sizeof(float));
    /* A block of queries after the other, each step just far enough behind the one before that its neighbours are
     * there: what they hand on is still in the cache. */
    int convolved = 0;
    w->own_base = w->around.mapped = 0;
    for (int head = 0; head < p->K; head++)
        transpose(w->k_rows + (long)head * N * g->Dp, g->Dp, g->k + (long)head * p->D * g->Np, g->Np, p->D, N);
    for (int begin = 0; begin < N; begin += BLOCK) {
        const int end = begin + BLOCK < N ? begin + BLOCK : N;
        const int through = end < N ? (end - r) / GROUP * GROUP : N;
        if (p->kind != NONE) {
            move_window(g, &w->around, convolved, begin);
            fill_window(g, &w->around, end + r < N ? end + r : N);
        }
        if (p->kind != MIX && !p->logits) own_logits(g, w->own, 0, begin, end, 0); /* else those stored are enough */
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
    write_keys_gradient(g, p->d_k, w->d_k, p->D);
    write_keys_gradient(g, p->d_v, w->d_v, p->E);

    if (p->height_rel) {
        const long heights = 2L * p->H - 1, widths = 2L * p->W - 1;
        write_rows(p->d_height_rel + b * heights * p->D, w->d_heights, heights, p->D, g->Dp);
        write_rows(p->d_width_rel + b * widths * p->D, w->d_widths, widths, p->D, g->Dp);
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

/* Each thread takes whole images; sums over images are left to the caller, in their order. Returns as forward. */
int64_t evolving_attention_backward(const problem *p) {
    const int N = p->H * p->W;
    int64_t missing = 0;
    use_large_pages(p->d_prev, (long)p->B * p->K * N * N * size_of(p->dtype));
#pragma omp parallel num_threads(p->threads < p->B ? p->threads : p->B)
    {
        static _Thread_local struct {
            problem sizes;
            buffers memory;
            image g;
            workspace w;
        } kept;
        image *g = &kept.g;
        if (!same_sizes(&kept.sizes, p)) {
            free_all(&kept.memory);
            allocate_image(g, &kept.memory, p);
            allocate_workspace(&kept.w, &kept.memory, g, p);
            kept.sizes = *p;
        }
        if (all_have_memory(&kept.memory, &missing)) {
            read_parameters(g, p);
            read_more_parameters(&kept.w, g);
#pragma omp for schedule(static)
            for (int b = 0; b < p->B; b++) {
                read_image(g, b);
                backward_image(g, &kept.w);
            }
        } else {
            free_all(&kept.memory);
            kept.sizes.K = 0; /* of no problem */
        }
    }
    return missing;
}
