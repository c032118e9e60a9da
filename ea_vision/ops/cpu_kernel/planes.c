/* The mechanism conv2d (layers/across/conv2d.py), forward and backward: the previous layer's maps mixed into the own
 * ones, and the mixture convolved over the keys' plane and over the queries' plane.
 *
 *     m = own + alpha prev;  out[a] = m[a] + sum over heads b of m[b] convolved over keys + m[b] convolved over queries
 *
 * A thread keeps an image's mixture as [query][head][P]. In a line of keys, and in the order of the queries, as many
 * zeros as the kernel's radius follow each row of the plane, which are the next row's left border, too; whole rows of
 * zeros lie above and below. So each tap of both convolutions is an offset from a query's first key, and a query's
 * result for all heads is one matrix product, with 1 added to the weight that reads m itself. Tokens before the patches
 * pass.
 */
#include "convolution.h"
#include "storage.h"

typedef struct {
    int32_t B, K, H, W, size, prefix, dtype, threads;
    float alpha;
    const void *own, *prev;              /* (B, K, N, N), N = prefix + H*W */
    const float *weight;                 /* (K, K, 2, size, size): from a head to a head, over keys, over queries */
    void *out;                           /* as own */
    const void *d_out;                   /* backward only, as are those below */
    void *d_own, *d_prev;
    float *d_weight, *d_alpha;           /* of each image: (B, K, K, 2, size, size) and (B) */
} planes;

typedef struct {
    convolution conv;                    /* its taps (K, 2, size, size) and their offsets */
    int stride, lead, tokens;            /* from row to row of a plane; floats before a query's first key; N */
    float *maps, *grads;                 /* m, and the gradient of out, among patches: (queries with borders, K, P) */
    float *weight, *transposed, *sums;   /* with m itself; of the backward pass; the weight's gradient */
    float *product;                      /* (K, Np), a query's */
    float *own, *prev;                   /* (N), a row of a map */
} plane_buffers;

static void allocate_planes(plane_buffers *g, buffers *m, const planes *p) {
    const int r = p->size / 2, area = p->size * p->size, taps = 2 * p->K * area;
    const int stride = p->W + r, lead = round_up(r * stride + r), columns = p->H * stride;
    *g = (plane_buffers){.stride = stride, .lead = lead, .tokens = p->prefix + p->H * p->W};
    convolution *c = &g->conv;
    *c = (convolution){.K = p->K, .N = columns, .Np = round_up(columns), .P = lead + round_up(columns) + lead,
                       .planes = 1, .taps = taps};
    c->offsets = (long *)new_floats(m, 2L * taps);
    for (int t = 0; c->offsets && t < taps; t++) {
        const long at = t % area, head = t / (2 * area), shift = (at / p->size - r) * stride + at % p->size - r;
        c->offsets[t] = head * c->P + shift * (t / area % 2 ? (long)p->K * c->P : 1);
    }
    const long queries = r + (p->H + 2L * r) * stride;
    g->maps = new_floats(m, queries * p->K * c->P);
    g->grads = p->d_out ? new_floats(m, queries * p->K * c->P) : NULL;
    g->weight = new_floats(m, (long)p->K * taps);
    g->transposed = new_floats(m, (long)p->K * taps);
    g->sums = new_floats(m, (long)p->K * taps * VL);
    g->product = new_floats(m, (long)p->K * c->Np);
    g->own = new_floats(m, round_up(g->tokens));
    g->prev = new_floats(m, round_up(g->tokens));
}

static void read_plane_weight(plane_buffers *g, const planes *p) {
    const int area = p->size * p->size, taps = g->conv.taps;
    read_weight(&g->conv, g->weight, p->weight);
    for (long head = 0; head < p->K; head++) g->weight[head * taps + 2 * head * area + area / 2] += 1; /* m itself */
    for (long a = 0; a < p->K; a++)
        for (long b = 0; b < p->K; b++)
            for (int plane = 0; plane < 2; plane++)
                for (int t = 0; t < area; t++)
                    g->transposed[b * taps + (2 * a + plane) * area + area - 1 - t] =
                        g->weight[a * taps + (2 * b + plane) * area + t];
}

/* The first key of a patch's row in a buffer of maps. */
static float *patch_row(const plane_buffers *g, float *maps, const planes *p, int patch, int head) {
    const int r = p->size / 2;
    const long query = r + (patch / p->W + r) * (long)g->stride + patch % p->W;
    return maps + (query * p->K + head) * g->conv.P + g->lead;
}

static long plane_element(const plane_buffers *g, const planes *p, int b, int head, int token) {
    return (((long)b * p->K + head) * g->tokens + token) * g->tokens;
}

/* g->own = m of a query's row of an image's map, g->prev = the previous map's. */
static void mix_row(const plane_buffers *g, const planes *p, long element) {
    read_floats(g->own, at(p->own, element, p->dtype), g->tokens, p->dtype);
    read_floats(g->prev, at(p->prev, element, p->dtype), g->tokens, p->dtype);
    for (int j = 0; j < g->tokens; j++) g->own[j] += p->alpha * g->prev[j];
}

/* What a row (N) of patches is in a buffer, and back. */
static void spread(const plane_buffers *g, const planes *p, float *to, const float *row) {
    for (int y = 0; y < p->H; y++) memcpy(to + y * g->stride, row + p->prefix + y * p->W, p->W * sizeof(float));
}

static void gather(const plane_buffers *g, const planes *p, float *row, const float *from) {
    for (int y = 0; y < p->H; y++) memcpy(row + p->prefix + y * p->W, from + y * g->stride, p->W * sizeof(float));
}

/* Gradients of a query's row from that of its mixture, which g->own holds; g->prev holds the previous map's row. */
static float write_row_gradients(const plane_buffers *g, const planes *p, long element) {
    float d_alpha = 0;
    for (int j = 0; j < g->tokens; j++) d_alpha += g->own[j] * g->prev[j];
    write_floats(at(p->d_own, element, p->dtype), g->own, g->tokens, p->dtype);
    write_scaled(at(p->d_prev, element, p->dtype), g->own, p->alpha, g->tokens, p->dtype, g->prev);
    return d_alpha;
}

/* The result of the queries in the plane's rows y0..y1 of an image, with the first rows that of tokens before them; or,
 * of all its rows, the gradients. */
static void planes_of_rows(const plane_buffers *g, const planes *p, int b, int y0, int y1) {
    const int r = p->size / 2, begin = p->prefix + y0 * p->W, end = p->prefix + y1 * p->W;
    double d_alpha = 0;
    for (int head = 0; head < p->K; head++)
        for (int token = y0 ? p->prefix : 0; token < g->tokens; token++) {
            const long element = plane_element(g, p, b, head, token);
            const int patch = token - p->prefix;
            if (patch >= 0 && (token < begin - r * p->W || token >= end + r * p->W)) continue;
            mix_row(g, p, element);
            if (patch >= 0) spread(g, p, patch_row(g, g->maps, p, patch, head), g->own);
            if (p->d_out) {
                read_floats(g->own, at(p->d_out, element, p->dtype), g->tokens, p->dtype);
                if (patch >= 0)
                    spread(g, p, patch_row(g, g->grads, p, patch, head), g->own);
                else
                    d_alpha += write_row_gradients(g, p, element);
            } else if (patch < 0 || (token >= begin && token < end))
                write_floats(at(p->out, element, p->dtype), g->own, patch < 0 ? g->tokens : p->prefix, p->dtype);
        }
    for (int token = begin; token < end; token++) {
        gemm(FRESH, p->K, g->conv.Np, g->conv.taps, p->d_out ? g->transposed : g->weight, g->conv.taps, 1,
             patch_row(g, p->d_out ? g->grads : g->maps, p, token - p->prefix, 0), 0, g->conv.offsets, g->product,
             g->conv.Np);
        for (int head = 0; head < p->K; head++) {
            const long element = plane_element(g, p, b, head, token), first = element + p->prefix;
            if (p->d_out) {
                read_floats(g->own, at(p->d_out, element, p->dtype), p->prefix, p->dtype);
                read_floats(g->prev, at(p->prev, element, p->dtype), g->tokens, p->dtype);
            }
            gather(g, p, g->own, g->product + (long)head * g->conv.Np);
            if (p->d_out)
                d_alpha += write_row_gradients(g, p, element);
            else
                write_floats(at(p->out, first, p->dtype), g->own + p->prefix, g->tokens - p->prefix, p->dtype);
        }
    }
    if (!p->d_out) return;
    for (int patch = 0; patch < p->H * p->W; patch += p->W)
        plane_gradient(&g->conv, g->sums, patch_row(g, g->grads, p, patch, 0) - MARGIN,
                       patch_row(g, g->maps, p, patch, 0), p->W);
    p->d_alpha[b] = d_alpha;
    write_weight_gradient(&g->conv, p->d_weight + (long)b * p->K * g->conv.taps, g->sums);
}

int64_t convolve_planes(const planes *p) { /* returns as evolving_attention */
    int64_t missing = 0;
    /* forward, an image is cut where there are fewer images than threads; pieces read each other's borders again */
    const int wanted = p->d_out || p->B >= p->threads ? 1 : (p->threads + p->B - 1) / p->B;
    const int rows = (p->H + wanted - 1) / wanted, pieces = (p->H + rows - 1) / rows;
#pragma omp parallel num_threads(p->threads)
    {
        buffers memory = {.count = 0};
        plane_buffers g;
        allocate_planes(&g, &memory, p);
        if (all_have_memory(&memory, &missing)) {
            read_plane_weight(&g, p);
#pragma omp for schedule(static)
            for (int task = 0; task < p->B * pieces; task++) {
                const int b = task / pieces, y = task % pieces * rows;
                planes_of_rows(&g, p, b, y, y + rows < p->H ? y + rows : p->H);
            }
        }
        free_all(&memory);
    }
    return missing;
}
