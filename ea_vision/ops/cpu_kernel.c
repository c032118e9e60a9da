/* Evolving attention on a CPU, forward and backward, one image after the other so that its maps stay in the cache.
 *
 * Plain C with GNU vector extensions: `cpu.py` compiles it for the machine it runs on. All arithmetic is float32; q, k, v,
 * prev, logits and out may be stored as float32, bfloat16 or float16.
 *
 * Shape letters: B batch, K heads, H x W the map's pixels, N = H*W, D width of a query's head, E of a value's. Pixels are
 * the last axis of q, k, v and out: (K, D, N). "Own" logits are dot product and position; one row of a map is one query.
 *
 *     none (AA)  logits = own
 *     mix  (EA)  m = alpha*prev + (1-alpha)*own;  logits = beta*relu(conv(m)) + (1-beta)*m       (EA paper, eq. 3 and 4)
 *     predict (PA)  logits = alpha*relu(conv(prev)) + (1-alpha)*own;  without a convolution alpha*prev + (1-alpha)*own
 *
 * Maps lie in buffers as [row][head][P]: P floats hold a margin of zeros, the N keys, and zeros again, so that a
 * convolution may read beyond both ends. Every product, the convolutions included, is the one matrix product `gemm`.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16 /* floats of a vector */
#define MR 8  /* rows of a tile */
#define NR 3  /* vectors of a row of a tile: MR * NR sums, NR vectors and a factor fill the registers */
#elif defined(__AVX__)
#define VL 8
#define MR 6
#define NR 2
#else
#define VL 4
#define MR 6
#define NR 2
#endif

typedef float vec __attribute__((vector_size(4 * VL), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * VL), aligned(4)));
#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) (*(const vec *)(p))
#define STORE(p, x) (*(vec *)(p) = (x))

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { NONE, MIX, PREDICT };

static int round_up(int n) { return (n + VL - 1) / VL * VL; }

/* ---------------------------------------------------------------- stored numbers */

static int size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

static void read_floats(float *restrict to, const void *from, long n, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, n * sizeof(float));
    } else if (dtype == BFLOAT16) {
        const uint16_t *bits = from;
        uint32_t *words = (uint32_t *)to;
        for (long i = 0; i < n; i++) words[i] = (uint32_t)bits[i] << 16;
    } else {
#ifdef __FLT16_MANT_DIG__
        const _Float16 *half = from;
        for (long i = 0; i < n; i++) to[i] = half[i];
#endif
    }
}

static void write_floats(void *to, const float *restrict from, long n, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(to, from, n * sizeof(float));
    } else if (dtype == BFLOAT16) {
        uint16_t *bits = to;
        const uint32_t *words = (const uint32_t *)from;
        for (long i = 0; i < n; i++) { /* to nearest, ties to even */
            uint32_t w = words[i], rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
            bits[i] = (w & 0x7fffffff) > 0x7f800000 ? (w >> 16) | 0x40 : rounded; /* NaN stays NaN */
        }
    } else {
#ifdef __FLT16_MANT_DIG__
        _Float16 *half = to;
        for (long i = 0; i < n; i++) half[i] = (_Float16)from[i];
#endif
    }
}

/* (rows, n) -> (rows, ld), each row followed by zeros, everything times `factor` */
static void read_matrix(float *to, long ld, const void *from, long rows, long n, int dtype, float factor) {
    for (long r = 0; r < rows; r++) {
        float *row = to + r * ld;
        read_floats(row, (const char *)from + r * n * size_of(dtype), n, dtype);
        if (factor != 1.0f)
            for (long i = 0; i < n; i++) row[i] *= factor;
        memset(row + n, 0, (ld - n) * sizeof(float));
    }
}

static void transpose(float *restrict to, long to_ld, const float *restrict from, long from_ld, long rows, long cols) {
    memset(to, 0, cols * to_ld * sizeof(float));
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < cols; c++) to[c * to_ld + r] = from[r * from_ld + c];
}

/* ---------------------------------------------------------------- the matrix product */

/* One tile of C += A B. Row t of B begins at b + (offsets ? offsets[t] : t * ldb). */
INLINE void tile(const int rows, const int vecs, int depth, const float *a, long a_row, long a_col, const float *b,
                 long ldb, const long *offsets, float *c, long ldc) {
    vec acc[MR][NR];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) acc[r][v] = LOAD(c + r * ldc + v * VL);
    for (int t = 0; t < depth; t++) {
        const float *row = b + (offsets ? offsets[t] : t * ldb);
        vec x[NR];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) x[v] = LOAD(row + v * VL);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) acc[r][v] += a[r * a_row + t * a_col] * x[v];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) STORE(c + r * ldc + v * VL, acc[r][v]);
}

#define TILE(rows, vecs) \
    tile(rows, vecs, depth, a + i * a_row, a_row, a_col, b + j, ldb, offsets, c + i * ldc + j, ldc)
#define TILES(rows) \
    case rows: if (vecs == NR) TILE(rows, NR); else if (vecs == 2) TILE(rows, 2); else TILE(rows, 1); break;

/* C (m, n) += A (m, depth) B (depth, n); n a multiple of VL, A with any strides. Each element is summed in the order of
 * `depth` whatever the tile, so results do not depend on how the work is cut. */
static void gemm(int m, int n, int depth, const float *a, long a_row, long a_col, const float *b, long ldb,
                 const long *offsets, float *c, long ldc) {
    for (int j = 0, vecs; j < n; j += vecs * VL) {
        vecs = (n - j) / VL < NR ? (n - j) / VL : NR;
        for (int i = 0; i < m; i += MR) {
            switch (m - i < MR ? m - i : MR) {
                TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if MR == 8
                TILES(7) TILES(8)
#endif
            }
        }
    }
}

INLINE float sum_of(vec x) {
    float a[4] = {x[0], x[1], x[2], x[3]};
    for (int i = 4; i < VL; i += 4)
        for (int s = 0; s < 4; s++) a[s] += x[i + s];
    return (a[0] + a[1]) + (a[2] + a[3]);
}

/* All bits set in the first n elements. */
INLINE ivec before(int n) {
    ivec lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    return lane < n;
}

/* ---------------------------------------------------------------- softmax */

#define CUTOFF -64.0f /* exp of less is 0 here: invisible in a sum, and no subnormal number comes of it */

INLINE vec near_zero_exp(vec x) { /* |x| <= log(2) / 2; the polynomial is Cephes' expf */
    vec y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    return y * (x * x) + x + 1.0f;
}

/* x <= 0; relative error about 1e-7; NaN stays NaN */
#ifdef __AVX512F__
INLINE vec exp_of(vec x) {
    const __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(CUTOFF), _CMP_NLE_UQ);
    const vec n = (vec)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
    const vec y = near_zero_exp(x - n * 0.693359375f + n * 2.12194440e-4f);
    return (vec)_mm512_maskz_scalef_ps(keep, (__m512)y, (__m512)n);
}
#else
INLINE vec exp_of(vec x) {
    const ivec keep = x > CUTOFF, bad = x != x;
    x = (vec)((ivec)x & keep);
    const vec shift = (vec){} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to whole numbers */
    vec n = x * 1.44269504f + shift;
    const ivec power = ((ivec)n - (ivec)shift) << 23;
    n -= shift;
    const vec y = near_zero_exp(x - n * 0.693359375f + n * 2.12194440e-4f);
    return (vec)((((ivec)y + power) & keep) | bad); /* all bits set is a NaN */
}
#endif

/* p[0..n) = exp(l - shift), zeros up to `padded`; returns the sum */
static float exp_row(float *p, const float *l, float shift, int n, int padded) {
    vec total = {};
    int j = 0;
    for (; j + VL <= n; j += VL) {
        const vec x = exp_of(LOAD(l + j) - shift);
        STORE(p + j, x);
        total += x;
    }
    if (j < padded) {
        const vec x = (vec)((ivec)exp_of(LOAD(l + j) - shift) & before(n - j));
        STORE(p + j, x);
        total += x;
    }
    return sum_of(total);
}

INLINE vec relu(vec x) { return (vec)((ivec)x & ~(x <= 0)); } /* NaN stays NaN */

static float max_of(const float *l, int n) {
    float most = l[0];
    int j = 0;
    if (n >= VL) {
        vec high = LOAD(l);
        for (; j + VL <= n; j += VL) {
            const vec x = LOAD(l + j);
            const ivec more = x > high;
            high = (vec)(((ivec)x & more) | ((ivec)high & ~more));
        }
        float a[4] = {high[0], high[1], high[2], high[3]};
        for (int i = 4; i < VL; i += 4)
            for (int s = 0; s < 4; s++) a[s] = high[i + s] > a[s] ? high[i + s] : a[s];
        for (int s = 0; s < 4; s++) most = a[s] > most ? a[s] : most;
    }
    for (; j < n; j++) most = l[j] > most ? l[j] : most;
    return most;
}

/* ---------------------------------------------------------------- one problem */

typedef struct {
    int32_t B, K, H, W, D, E, kernel, kind, dtype, threads;
    float alpha, beta, scale;
    int64_t q_step, k_step, v_step;                     /* elements from one image to the next */
    const void *q, *k, *v, *prev;                       /* prev (B, K, N, N) or NULL */
    const float *height_rel, *width_rel;                /* (2H-1, D), (2W-1, D), or NULL both */
    const float *weight, *bias;                         /* (K, K, kernel, kernel), (K), or NULL both */
    void *out, *logits;                                 /* (B, K, E, N); (B, K, N, N) or NULL */
    float *lse;                                         /* (B, K, N), log of the sum of exp(logits) */
    /* backward only */
    const void *d_out, *d_logits;                       /* d_logits or NULL */
    void *d_q, *d_k, *d_v, *d_prev;                     /* (B, K, D, N) twice, (B, K, E, N), (B, K, N, N) or NULL */
    float *d_height_rel, *d_width_rel, *d_weight, *d_bias; /* of each image: (B, ...) */
} problem;

/* What all rows of an image share. */
typedef struct {
    const problem *p;
    int b, N, Np, Dp, r, P;      /* padded N and D, the kernel's radius, floats of a buffered row of one head */
    float gain;                  /* of the own logits in the result */
    float *q, *k, *v;            /* (K*D, Np) scaled, times gain; (K*D, Np); (K*E, Np) */
    float *heights, *widths;     /* (D, 2H-1 + VL padded), (D, ...): the tables transposed */
    long height_ld, width_ld;
    float *position;             /* (N, Hp + Wp): position terms of one head's queries by row and column */
    long position_ld;
    long *offsets;               /* of the rows that a convolution reads, from its first one */
    float *previous;             /* (Np), a row of prev, or for passing use */
} image;

#define MARGIN VL /* zeros before a buffered row */

static float *new_floats(long n) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (n + 2 * VL) * sizeof(float))) abort(); /* as any allocation here that fails */
    memset(memory, 0, (n + 2 * VL) * sizeof(float));
    return memory;
}

/* Buffers are kept by their thread for the next problem of the same sizes: getting them anew from the system costs as
 * much as the arithmetic. What must be zero in them (margins, rows beyond the map, sums) is left so. */
static int same_sizes(const problem *a, const problem *b) {
    return a->K == b->K && a->H == b->H && a->W == b->W && a->D == b->D && a->E == b->E && a->kernel == b->kernel &&
           a->kind == b->kind && !a->height_rel == !b->height_rel && !a->weight == !b->weight &&
           !a->logits == !b->logits;
}

static void free_image(image *g) {
    float *all[] = {g->q, g->k, g->v, g->heights, g->widths, g->position, g->previous};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(g->offsets);
}

static void allocate_image(image *g, const problem *p) {
    const int N = p->H * p->W, taps = p->K * p->kernel * p->kernel;
    *g = (image){.N = N, .Np = round_up(N), .Dp = round_up(p->D), .r = p->weight ? p->kernel / 2 : 0};
    g->P = MARGIN + g->Np + VL;
    g->q = new_floats((long)p->K * p->D * g->Np);
    g->k = new_floats((long)p->K * p->D * g->Np);
    g->v = new_floats((long)p->K * p->E * g->Np);
    g->previous = new_floats(g->Np);
    if (p->height_rel) {
        g->height_ld = round_up(2 * p->H - 1) + round_up(p->H);
        g->width_ld = round_up(2 * p->W - 1) + round_up(p->W);
        g->heights = new_floats(p->D * g->height_ld);
        g->widths = new_floats(p->D * g->width_ld);
        g->position_ld = round_up(p->H) + round_up(p->W);
        g->position = new_floats(N * g->position_ld);
    }
    if (p->weight) {
        g->offsets = malloc(taps * sizeof(long));
        for (int c = 0, t = 0; c < p->K; c++)
            for (int y = 0; y < p->kernel; y++)
                for (int x = 0; x < p->kernel; x++, t++) g->offsets[t] = ((long)y * p->K + c) * g->P + x;
    }
}

static void read_parameters(image *g, const problem *p) {
    g->p = p;
    g->gain = p->kind == NONE ? 1.0f : 1.0f - p->alpha;
    if (p->height_rel) {
        transpose(g->heights, g->height_ld, p->height_rel, p->D, 2 * p->H - 1, p->D);
        transpose(g->widths, g->width_ld, p->width_rel, p->D, 2 * p->W - 1, p->D);
    }
}

static const void *at(const void *base, long element, int dtype) {
    return base ? (const char *)base + element * size_of(dtype) : NULL;
}

static void read_image(image *g, int b) {
    const problem *p = g->p;
    g->b = b;
    read_matrix(g->q, g->Np, at(p->q, b * p->q_step, p->dtype), p->K * p->D, g->N, p->dtype, p->scale * g->gain);
    read_matrix(g->k, g->Np, at(p->k, b * p->k_step, p->dtype), p->K * p->D, g->N, p->dtype, 1);
    read_matrix(g->v, g->Np, at(p->v, b * p->v_step, p->dtype), p->K * p->E, g->N, p->dtype, 1);
}

INLINE float *row_of(const image *g, float *maps, int row, int head) {
    return maps + ((long)row * g->p->K + head) * g->P + MARGIN;
}

static long map_element(const image *g, int head, int row) {
    return (((long)g->b * g->p->K + head) * g->N + row) * g->N;
}

/* Position terms of one head's queries begin..end: by key row, then by key column (AA paper, equation 4). */
static void position_terms(const image *g, int head, int begin, int end) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Hp = round_up(H), Wp = round_up(W);
    const float *q = g->q + (long)head * p->D * g->Np;
    memset(g->position + begin * g->position_ld, 0, (end - begin) * g->position_ld * sizeof(float));
    for (int i = begin; i < end;) {
        const int y = i / W, stop = (y + 1) * W < end ? (y + 1) * W : end;
        gemm(stop - i, Hp, p->D, q + i, 1, g->Np, g->heights + H - 1 - y, g->height_ld, NULL,
             g->position + i * g->position_ld, g->position_ld);
        i = stop;
    }
    for (int x = 0; x < W; x++) {
        const int first = begin + ((x - begin) % W + W) % W, count = first < end ? (end - first + W - 1) / W : 0;
        if (count)
            gemm(count, Wp, p->D, q + first, W, g->Np, g->widths + W - 1 - x, g->width_ld, NULL,
                 g->position + first * g->position_ld + Hp, g->position_ld * W);
    }
}

/* A row of prev that vectors may read beyond its end. */
static const float *previous_row(const image *g, int head, int row) {
    const problem *p = g->p;
    const long element = map_element(g, head, row), end = (long)p->B * p->K * g->N * g->N;
    const void *from = at(p->prev, element, p->dtype);
    if (p->dtype == FLOAT32 && element + g->N + VL <= end) return from;
    read_floats(g->previous, from, g->N, p->dtype);
    return g->previous;
}

/* gain * own logits (+ alpha * prev where `mix`) of queries begin..end, into maps rows first, first+1, ... */
static void own_logits(const image *g, float *maps, int first, int begin, int end, int mix) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Hp = round_up(H);
    for (int head = 0; head < p->K; head++) {
        if (p->height_rel) position_terms(g, head, begin, end);
        for (int i = begin; i < end; i++) {
            float *row = row_of(g, maps, first + i - begin, head);
            const float *prev = mix ? previous_row(g, head, i) : NULL;
            if (p->height_rel) {
                const float *by_row = g->position + i * g->position_ld, *by_col = by_row + Hp;
                for (int y = 0; y < H; y++) /* the last vector of a row reaches into the next, which overwrites it */
                    for (int x = 0, j = y * W; x < W; x += VL, j = y * W + x) {
                        const vec position = LOAD(by_col + x) + by_row[y];
                        STORE(row + j, mix ? p->alpha * LOAD(prev + j) + position : position);
                    }
            } else {
                for (int j = 0; j < g->N; j += VL) STORE(row + j, mix ? p->alpha * LOAD(prev + j) : (vec){});
            }
            memset(row + g->N, 0, (g->P - MARGIN - g->N) * sizeof(float));
        }
        gemm(end - begin, g->Np, p->D, g->q + (long)head * p->D * g->Np + begin, 1, g->Np,
             g->k + (long)head * p->D * g->Np, g->Np, NULL, row_of(g, maps, first, head), (long)p->K * g->P);
    }
}

static void previous_logits(const image *g, float *maps, int first, int begin, int end) {
    for (int i = begin; i < end; i++)
        for (int head = 0; head < g->p->K; head++)
            read_floats(row_of(g, maps, first + i - begin, head), at(g->p->prev, map_element(g, head, i), g->p->dtype),
                        g->N, g->p->dtype);
}

/* A convolution's row for all heads, before its ReLU: to (K, P). `maps` row `top` is the topmost that it reads. */
static void convolve(const image *g, float *to, float *maps, int top, const float *weight, const float *bias) {
    const problem *p = g->p;
    const int taps = p->K * p->kernel * p->kernel;
    for (int head = 0; head < p->K; head++)
        for (int j = 0; j < g->Np; j++) to[head * g->P + MARGIN + j] = bias ? bias[head] : 0.0f;
    gemm(p->K, g->Np, taps, weight, taps, 1, row_of(g, maps, top, 0) - g->r, 0, g->offsets, to + MARGIN, g->P);
    for (int head = 0; head < p->K; head++)
        memset(to + head * g->P + MARGIN + g->N, 0, (g->P - MARGIN - g->N) * sizeof(float));
}

/* The logits of one query, all heads, in `row` (K, P). In: `maps` holds what the convolution reads (mix: the mixture,
 * predict: prev), its row `top` the topmost that it reads; `own` (predict) gain * own logits. `conv` (K, P) is left with
 * the convolution before its ReLU. */
static void finish_logits(const image *g, float *row, float *conv, float *maps, int top, const float *own) {
    const problem *p = g->p;
    const long n = (long)p->K * g->P;
    if (p->weight) convolve(g, conv, maps, top, p->weight, p->bias);
    if (p->kind == MIX) {
        const float *m = row_of(g, maps, top + g->r, 0) - MARGIN;
        if (p->weight && p->beta == 1.0f)
            for (long j = 0; j < n; j += VL) STORE(row + j, relu(LOAD(conv + j)));
        else if (p->weight)
            for (long j = 0; j < n; j += VL)
                STORE(row + j, p->beta * relu(LOAD(conv + j)) + (1 - p->beta) * LOAD(m + j));
        else
            memcpy(row, m, n * sizeof(float));
    } else {
        const float *from = p->weight ? conv : row_of(g, maps, top, 0) - MARGIN;
        for (long j = 0; j < n; j += VL) {
            const vec x = LOAD(from + j);
            STORE(row + j, LOAD(own + j) + p->alpha * (p->weight ? relu(x) : x));
        }
    }
}

/* ---------------------------------------------------------------- forward */

/* What enters the softmax is what is (or would be) stored. */
static void round_row(const image *g, float *l) {
    if (g->p->dtype == FLOAT32) return;
    write_floats(g->previous, l, g->N, g->p->dtype);
    read_floats(l, g->previous, g->N, g->p->dtype);
}

INLINE void write_values(const image *g, const float *attn, const float *v, float norm, long element, int e,
                         const int count) {
    vec total[2] = {};
    for (int j = 0; j < g->Np; j += VL) {
        const vec x = LOAD(attn + j);
        for (int s = 0; s < count; s++) total[s] += x * LOAD(v + (e + s) * g->Np + j);
    }
    for (int s = 0; s < count; s++) {
        const float value = sum_of(total[s]) * norm;
        write_floats((void *)at(g->p->out, element + (long)(e + s) * g->N, g->p->dtype), &value, 1, g->p->dtype);
    }
}

/* Softmax and values of one query, all heads; `rows` (K, P) holds its logits and is overwritten. */
static void attend_row(const image *g, float *rows, int i) {
    const problem *p = g->p;
    for (int head = 0; head < p->K; head++) {
        float *l = rows + head * g->P + MARGIN;
        round_row(g, l);
        if (p->logits) write_floats((void *)at(p->logits, map_element(g, head, i), p->dtype), l, g->N, p->dtype);
        const float most = max_of(l, g->N), sum = exp_row(l, l, most, g->N, g->Np);
        const float *v = g->v + (long)head * p->E * g->Np;
        const long element = ((long)g->b * p->K + head) * p->E * g->N + i;
        for (int e = 0; e + 2 <= p->E; e += 2) write_values(g, l, v, 1 / sum, element, e, 2);
        if (p->E % 2) write_values(g, l, v, 1 / sum, element, p->E - 1, 1);
        p->lse[((long)g->b * p->K + head) * g->N + i] = most + __builtin_logf(sum);
    }
}

static void forward_rows(const image *g, int begin, int end, float *maps, float *own, float *row, float *conv) {
    const problem *p = g->p;
    const int N = g->N, r = g->r, top = begin - r, bottom = end + r;
    const long map_row = (long)p->K * g->P;
    if (p->kind == NONE) {
        own_logits(g, own, 0, begin, end, 0);
        for (int i = begin; i < end; i++) attend_row(g, own + (i - begin) * map_row, i);
        return;
    }
    const int first = top < 0 ? 0 : top, last = bottom > N ? N : bottom;
    memset(maps, 0, (first - top) * map_row * sizeof(float));
    memset(maps + (last - top) * map_row, 0, (bottom - last) * map_row * sizeof(float));
    if (p->kind == MIX) {
        own_logits(g, maps, first - top, first, last, 1);
    } else {
        previous_logits(g, maps, first - top, first, last);
        own_logits(g, own, 0, begin, end, 0);
    }
    for (int i = begin; i < end; i++) {
        finish_logits(g, row, conv, maps, i - begin, own + (i - begin) * map_row);
        attend_row(g, row, i);
    }
}

void evolving_attention_forward(const problem *p) {
    const int N = p->H * p->W;
    /* an image is cut where there are fewer images than threads; pieces read each other's neighbouring rows again */
    int pieces = p->B >= p->threads ? 1 : (p->threads + p->B - 1) / p->B;
    int rows = (N + pieces - 1) / pieces;
    if (rows > 32) rows = 32; /* a piece's maps stay in the second-level cache */
    pieces = (N + rows - 1) / rows;
    const int tasks = p->B * pieces;
#pragma omp parallel num_threads(p->threads)
    {
        static _Thread_local struct {
            problem sizes;
            int rows;
            image g;
            float *maps, *own, *row, *conv;
        } kept;
        image *g = &kept.g;
        if (kept.rows != rows || !same_sizes(&kept.sizes, p)) {
            float *old[] = {kept.maps, kept.own, kept.row, kept.conv};
            for (int i = 0; i < 4; i++) free(old[i]);
            free_image(g);
            allocate_image(g, p);
            const long map_row = (long)p->K * g->P;
            kept.sizes = *p;
            kept.rows = rows;
            kept.maps = new_floats((rows + 2 * g->r) * map_row);
            kept.own = new_floats(rows * map_row);
            kept.row = new_floats(map_row);
            kept.conv = new_floats(map_row);
        }
        read_parameters(g, p);
        int read = -1;
#pragma omp for schedule(static)
        for (int task = 0; task < tasks; task++) {
            const int b = task / pieces, begin = task % pieces * rows, end = begin + rows < N ? begin + rows : N;
            if (b != read) read_image(g, b);
            read = b;
            forward_rows(g, begin, end, kept.maps, kept.own, kept.row, kept.conv);
        }
    }
}

/* ---------------------------------------------------------------- backward */

INLINE void taps_gradient(const image *g, float *sums, const float *d_conv, const float *base, int t, int o,
                          const int heads, const int count) {
    const int taps = g->p->K * g->p->kernel * g->p->kernel;
    vec acc[MR][3] = {};
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
            float *to = sums + ((long)(o + h) * taps + t + s) * VL;
            STORE(to, LOAD(to) + acc[h][s]);
        }
}

/* sums[o][tap][VL] += gradient row (of the convolution's output) times the row that the tap reads */
static void weight_gradient(const image *g, float *sums, const float *d_conv, float *maps, int top) {
    const problem *p = g->p;
    const int taps = p->K * p->kernel * p->kernel;
    const float *base = row_of(g, maps, top, 0) - g->r;
    int t = 0;
    for (; t + 3 <= taps; t += 3) {
        int o = 0;
        for (; o + MR <= p->K; o += MR) taps_gradient(g, sums, d_conv, base, t, o, MR, 3);
        for (; o + 4 <= p->K; o += 4) taps_gradient(g, sums, d_conv, base, t, o, 4, 3);
        for (; o < p->K; o++) taps_gradient(g, sums, d_conv, base, t, o, 1, 3);
    }
    for (; t < taps; t++)
        for (int o = 0; o < p->K; o++) taps_gradient(g, sums, d_conv, base, t, o, 1, 1);
}

/* What the backward pass of an image needs beside it. */
typedef struct {
    float *maps, *own, *conv, *row; /* (N + 2r, K, P): what the convolution reads; (N, K, P): own logits; (K, P) twice */
    float *d_own;                   /* (N, K, P): gradient of gain * own logits */
    float *d_conv;                  /* (N + 2r, K, P): gradient of the convolution's output, zeros around */
    float *d_maps;                  /* (K, P): gradient of a row that the convolution read */
    float *turned;                  /* the convolution's weight for that: heads exchanged, turned by 180 degrees */
    float *logits;                  /* (BLOCK, K, P) */
    float *attn, *d_attn;           /* (BLOCK, Np) */
    float *q_rows, *k_rows, *d_q;   /* (N, Dp) */
    float *d_k, *d_v, *d_out;       /* (D, Np), (K*E, Np), (K*E, Np) */
    float *position;                /* (N, Hp + Wp): gradient of one head's position terms */
    float *height_rows, *width_rows, *d_heights, *d_widths; /* (2H-1, Dp), (2W-1, Dp) */
    float *d_weight, *d_bias;       /* (K, taps, VL), (K, VL) */
} workspace;

#define BLOCK 8 /* queries whose softmax is differentiated together */

static void allocate_workspace(workspace *w, const image *g, const problem *p) {
    const long map_row = (long)p->K * g->P, taps = (long)p->K * p->kernel * p->kernel;
    memset(w, 0, sizeof *w);
    w->d_own = new_floats(g->N * map_row);
    w->logits = new_floats(BLOCK * map_row);
    w->attn = new_floats((long)BLOCK * g->Np);
    w->d_attn = new_floats((long)BLOCK * g->Np);
    w->q_rows = new_floats((long)g->N * g->Dp);
    w->k_rows = new_floats((long)g->N * g->Dp);
    w->d_q = new_floats((long)g->N * g->Dp);
    w->d_k = new_floats((long)p->D * g->Np);
    w->d_v = new_floats((long)p->K * p->E * g->Np);
    w->d_out = new_floats((long)p->K * p->E * g->Np);
    if (p->kind != MIX) w->own = new_floats(g->N * map_row);
    if (p->kind != NONE) {
        w->maps = new_floats((g->N + 2 * g->r) * map_row);
        w->row = new_floats(map_row);
        w->conv = new_floats(map_row);
    }
    if (p->weight) {
        w->d_conv = new_floats((g->N + 2 * g->r) * map_row);
        w->d_maps = new_floats(map_row);
        w->turned = new_floats(p->K * taps);
        w->d_weight = new_floats(p->K * taps * VL);
        w->d_bias = new_floats((long)p->K * VL);
    }
    if (p->height_rel) {
        const long heights = 2L * p->H - 1, widths = 2L * p->W - 1;
        w->position = new_floats(g->N * g->position_ld);
        w->height_rows = new_floats(heights * g->Dp);
        w->width_rows = new_floats(widths * g->Dp);
        w->d_heights = new_floats(heights * g->Dp);
        w->d_widths = new_floats(widths * g->Dp);
    }
}

static void read_more_parameters(workspace *w, const image *g) {
    const problem *p = g->p;
    const int area = p->kernel * p->kernel;
    if (p->weight)
        for (int o = 0; o < p->K; o++)
            for (int c = 0; c < p->K; c++)
                for (int t = 0; t < area; t++)
                    w->turned[((long)c * p->K + o) * area + t] = p->weight[((long)o * p->K + c) * area + area - 1 - t];
    if (p->height_rel) {
        read_matrix(w->height_rows, g->Dp, p->height_rel, 2L * p->H - 1, p->D, FLOAT32, 1);
        read_matrix(w->width_rows, g->Dp, p->width_rel, 2L * p->W - 1, p->D, FLOAT32, 1);
    }
}

static void free_workspace(workspace *w) {
    float *all[] = {w->maps, w->own, w->conv, w->row, w->d_own, w->d_conv, w->d_maps, w->turned, w->logits, w->attn,
                    w->d_attn, w->q_rows, w->k_rows, w->d_q, w->d_k, w->d_v, w->d_out, w->position, w->height_rows,
                    w->width_rows, w->d_heights, w->d_widths, w->d_weight, w->d_bias};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* The gradient of queries begin..end's logits into d_own (of gain * own, or of the mixture where nothing is convolved)
 * and d_conv; adds to d_v. */
static void softmax_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const long map_row = (long)p->K * g->P;
    const int rows = end - begin;
    /* the sign of the convolution can be read off EA's stored logits where nothing else is in them */
    const int convolve_again = p->weight && !(p->logits && p->kind == MIX && p->beta == 1.0f);
    if (p->logits)
        for (int head = 0; head < p->K; head++) /* rows of a head follow each other in memory */
            for (int i = begin; i < end; i++)
                read_floats(w->logits + (i - begin) * map_row + head * g->P + MARGIN,
                            at(p->logits, map_element(g, head, i), p->dtype), g->N, p->dtype);
    for (int i = begin; i < end; i++) {
        float *l = w->logits + (i - begin) * map_row;
        if (p->logits) {
            if (convolve_again) convolve(g, w->conv, w->maps, i, p->weight, p->bias);
        } else {
            if (p->kind == NONE)
                memcpy(l, w->own + i * map_row, map_row * sizeof(float));
            else
                finish_logits(g, l, w->conv, w->maps, i, w->own ? w->own + i * map_row : NULL);
            for (int head = 0; head < p->K; head++) round_row(g, l + head * g->P + MARGIN);
        }
        if (p->weight) { /* all bits set where the convolution passed its ReLU */
            const float *passed = convolve_again ? w->conv : l;
            for (long j = 0; j < map_row; j += VL)
                STORE(w->d_conv + (i + g->r) * map_row + j, (vec)(LOAD(passed + j) > 0));
        }
    }
    for (int head = 0; head < p->K; head++) {
        const long value = (long)head * p->E * g->Np, query = ((long)g->b * p->K + head) * g->N;
        memset(w->d_attn, 0, (long)rows * g->Np * sizeof(float));
        gemm(rows, g->Np, p->E, w->d_out + value + begin, 1, g->Np, g->v + value, g->Np, NULL, w->d_attn, g->Np);
        for (int i = begin; i < end; i++) {
            float *l = w->logits + (i - begin) * map_row + head * g->P + MARGIN;
            float *attn = w->attn + (long)(i - begin) * g->Np, *d_attn = w->d_attn + (long)(i - begin) * g->Np;
            exp_row(attn, l, p->lse[query + i], g->N, g->Np);
            vec total = {};
            for (int j = 0; j < g->Np; j += VL) total += LOAD(attn + j) * LOAD(d_attn + j);
            const float mean = sum_of(total);
            float *d = row_of(g, w->d_own, i, head);
            for (int j = 0; j < g->Np; j += VL) STORE(d + j, LOAD(attn + j) * (LOAD(d_attn + j) - mean));
            if (p->d_logits) {
                float *more = d_attn; /* free from here */
                read_floats(more, at(p->d_logits, map_element(g, head, i), p->dtype), g->N, p->dtype);
                memset(more + g->N, 0, (g->Np - g->N) * sizeof(float));
                for (int j = 0; j < g->Np; j += VL) STORE(d + j, LOAD(d + j) + LOAD(more + j));
            }
            if (p->weight) {
                const float share = p->kind == MIX ? p->beta : p->alpha;
                float *gate = row_of(g, w->d_conv, i + g->r, head);
                vec bias = {};
                for (int j = 0; j < g->Np; j += VL) {
                    const vec passed = (vec)((ivec)LOAD(gate + j) & (ivec)(LOAD(d + j) * share));
                    STORE(gate + j, passed);
                    bias += passed;
                }
                STORE(w->d_bias + head * VL, LOAD(w->d_bias + head * VL) + bias);
            }
        }
        gemm(p->E, g->Np, rows, w->d_out + value + begin, g->Np, 1, w->attn, g->Np, NULL, w->d_v + value, g->Np);
    }
}

/* Through the convolution, queries begin..end: d_own becomes the gradient of gain * own logits, d_prev and their share of
 * the weight's gradient are done. */
static void convolution_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const long map_row = (long)p->K * g->P;
    for (int i = begin; i < end; i++) {
        float *d = w->d_own + i * map_row;
        if (p->weight) {
            convolve(g, w->d_maps, w->d_conv, i, w->turned, NULL);
            weight_gradient(g, w->d_weight, w->d_conv + (i + g->r) * map_row, w->maps, i);
            if (p->kind == MIX)
                for (long j = 0; j < map_row; j += VL)
                    STORE(d + j, (1 - p->beta) * LOAD(d + j) + LOAD(w->d_maps + j));
        }
        if (!p->d_prev) continue;
        const int predicted = p->kind == PREDICT && p->weight;
        for (int head = 0; head < p->K; head++) {
            float *from = predicted ? w->d_maps : d, *row = w->row + head * g->P + MARGIN;
            from += head * g->P + MARGIN;
            const float share = predicted ? 1.0f : p->alpha;
            for (int j = 0; j < g->Np; j += VL) STORE(row + j, share * LOAD(from + j));
            write_floats((void *)at(p->d_prev, map_element(g, head, i), p->dtype), row, g->N, p->dtype);
        }
    }
}

/* From d_own: gradients of q and k, and of the position tables. */
static void own_gradients(const image *g, workspace *w, int head) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, D = p->D, N = g->N, Dp = g->Dp, Hp = round_up(H);
    const long map_row = (long)p->K * g->P, ld = g->position_ld, element = ((long)g->b * p->K + head) * D * N;
    const float *q = g->q + (long)head * D * g->Np, *d = row_of(g, w->d_own, 0, head);
    transpose(w->k_rows, Dp, g->k + (long)head * D * g->Np, g->Np, D, N);
    transpose(w->q_rows, Dp, q, g->Np, D, N); /* with scale and gain */

    memset(w->d_k, 0, (long)D * g->Np * sizeof(float));
    gemm(D, g->Np, N, q, g->Np, 1, d, map_row, NULL, w->d_k, g->Np);
    for (int c = 0; c < D; c++) write_floats((void *)at(p->d_k, element + (long)c * N, p->dtype), w->d_k + c * g->Np, N, p->dtype);

    memset(w->d_q, 0, (long)N * Dp * sizeof(float));
    gemm(N, Dp, N, d, map_row, 1, w->k_rows, Dp, NULL, w->d_q, Dp);
    if (p->height_rel) {
        const ivec inside = before(W % VL); /* of a row's last vector */
        for (int i = 0; i < N; i++) {
            const float *row = d + i * map_row;
            float *by_row = w->position + i * ld, *by_col = by_row + Hp;
            memset(by_row, 0, ld * sizeof(float));
            for (int y = 0; y < H; y++)
                for (int x = 0; x < W; x += VL) { /* what lies beyond W is not read again */
                    const vec part = LOAD(row + y * W + x);
                    STORE(by_col + x, LOAD(by_col + x) + part);
                    by_row[y] += sum_of(W - x < VL ? (vec)((ivec)part & inside) : part);
                }
        }
        for (int y = 0; y < H; y++) { /* the queries of one row see the same part of the table */
            const float *terms = w->position + (long)y * W * ld;
            const long first = (long)(H - 1 - y) * Dp, query = (long)y * W * Dp;
            gemm(W, Dp, H, terms, ld, 1, w->height_rows + first, Dp, NULL, w->d_q + query, Dp);
            gemm(H, Dp, W, terms, 1, ld, w->q_rows + query, Dp, NULL, w->d_heights + first, Dp);
        }
        for (int x = 0; x < W; x++) {
            const float *terms = w->position + x * ld + Hp;
            const long first = (long)(W - 1 - x) * Dp, query = (long)x * Dp;
            gemm(H, Dp, W, terms, ld * W, 1, w->width_rows + first, Dp, NULL, w->d_q + query, (long)Dp * W);
            gemm(W, Dp, H, terms, 1, ld * W, w->q_rows + query, (long)Dp * W, NULL, w->d_widths + first, Dp);
        }
    }
    transpose(w->d_k, g->Np, w->d_q, Dp, N, D);
    for (int c = 0; c < D; c++) {
        float *row = w->d_k + c * g->Np;
        for (int i = 0; i < N; i++) row[i] *= p->scale * g->gain;
        write_floats((void *)at(p->d_q, element + (long)c * N, p->dtype), row, N, p->dtype);
    }
}

static void write_rows(float *to, float *from, long rows, long n, long ld) { /* and empty `from` */
    for (long r = 0; r < rows; r++) memcpy(to + r * n, from + r * ld, n * sizeof(float));
    memset(from, 0, rows * ld * sizeof(float));
}

static void backward_image(const image *g, workspace *w) {
    const problem *p = g->p;
    const long taps = (long)p->K * p->kernel * p->kernel, b = g->b;
    const int N = g->N;
    read_matrix(w->d_out, g->Np, at(p->d_out, b * p->K * p->E * N, p->dtype), p->K * p->E, N, p->dtype, 1);
    memset(w->d_v, 0, (long)p->K * p->E * g->Np * sizeof(float));
    /* A block of queries after the other, each step just far enough behind the one before that its neighbours are there:
     * what they hand on is still in the cache. */
    int mapped = 0, convolved = 0;
    for (int begin = 0; begin < N; begin += BLOCK) {
        const int end = begin + BLOCK < N ? begin + BLOCK : N;
        const int map = end + g->r < N ? end + g->r : N, through = end < N ? end - g->r : N;
        if (p->kind == MIX) own_logits(g, w->maps, g->r + mapped, mapped, map, 1);
        if (p->kind == PREDICT) previous_logits(g, w->maps, g->r + mapped, mapped, map);
        if (p->kind != MIX && !p->logits) own_logits(g, w->own, begin, begin, end, 0); /* else those stored are enough */
        mapped = map;
        softmax_gradients(g, w, begin, end);
        if (p->kind != NONE) convolution_gradients(g, w, convolved, through);
        convolved = through;
    }
    for (int c = 0; c < p->K * p->E; c++)
        write_floats((void *)at(p->d_v, (b * p->K * p->E + c) * N, p->dtype), w->d_v + (long)c * g->Np, N, p->dtype);
    for (int head = 0; head < p->K; head++) own_gradients(g, w, head);

    if (p->height_rel) {
        const long heights = 2L * p->H - 1, widths = 2L * p->W - 1;
        write_rows(p->d_height_rel + b * heights * p->D, w->d_heights, heights, p->D, g->Dp);
        write_rows(p->d_width_rel + b * widths * p->D, w->d_widths, widths, p->D, g->Dp);
    }
    if (p->weight) {
        for (long t = 0; t < p->K * taps; t++) p->d_weight[b * p->K * taps + t] = sum_of(LOAD(w->d_weight + t * VL));
        for (int h = 0; h < p->K; h++) p->d_bias[b * p->K + h] = sum_of(LOAD(w->d_bias + h * VL));
        memset(w->d_weight, 0, p->K * taps * VL * sizeof(float));
        memset(w->d_bias, 0, (long)p->K * VL * sizeof(float));
    }
}

/* Each thread takes whole images; sums over images are left to the caller, in their order. */
void evolving_attention_backward(const problem *p) {
#pragma omp parallel num_threads(p->threads < p->B ? p->threads : p->B)
    {
        static _Thread_local struct {
            problem sizes;
            image g;
            workspace w;
        } kept;
        image *g = &kept.g;
        if (!same_sizes(&kept.sizes, p)) {
            free_workspace(&kept.w);
            free_image(g);
            allocate_image(g, p);
            allocate_workspace(&kept.w, g, p);
            kept.sizes = *p;
        }
        read_parameters(g, p);
        read_more_parameters(&kept.w, g);
#pragma omp for schedule(static)
        for (int b = 0; b < p->B; b++) {
            read_image(g, b);
            backward_image(g, &kept.w);
        }
    }
}

/* ---------------------------------------------------------------- pooling */

/* 3x3 average, stride 2, padding 1 that does not count: (planes, H, W) -> (planes, ceil(H/2), ceil(W/2)), float32. */
void pool_forward(float *to, const float *from, long planes, int H, int W, int threads) {
    const int h = (H + 1) / 2, w = (W + 1) / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long plane = 0; plane < planes; plane++) {
        const float *x = from + plane * H * W;
        float *y = to + plane * h * w, sums[W + 2];
        sums[0] = sums[W + 1] = 0;
        for (int r = 0; r < h; r++) {
            const int first = 2 * r - 1 < 0 ? 0 : 2 * r - 1, last = 2 * r + 1 < H ? 2 * r + 1 : H - 1;
            for (int c = 0; c < W; c++) sums[c + 1] = x[first * W + c];
            for (int row = first + 1; row <= last; row++)
                for (int c = 0; c < W; c++) sums[c + 1] += x[row * W + c];
            for (int c = 0; c < w; c++) {
                const int columns = 3 - (c == 0) - (2 * c + 1 >= W);
                y[r * w + c] = (sums[2 * c] + sums[2 * c + 1] + sums[2 * c + 2]) / ((last - first + 1) * columns);
            }
        }
    }
}

void pool_backward(float *d_from, const float *d_to, long planes, int H, int W, int threads) {
    const int h = (H + 1) / 2, w = (W + 1) / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long plane = 0; plane < planes; plane++) {
        const float *dy = d_to + plane * h * w;
        float *dx = d_from + plane * H * W, shares[W + 2];
        memset(dx, 0, (long)H * W * sizeof(float));
        for (int r = 0; r < h; r++) {
            const int first = 2 * r - 1 < 0 ? 0 : 2 * r - 1, last = 2 * r + 1 < H ? 2 * r + 1 : H - 1;
            memset(shares, 0, (W + 2) * sizeof(float));
            for (int c = 0; c < w; c++) {
                const int columns = 3 - (c == 0) - (2 * c + 1 >= W);
                const float share = dy[r * w + c] / ((last - first + 1) * columns);
                shares[2 * c] += share;
                shares[2 * c + 1] += share;
                shares[2 * c + 2] += share;
            }
            for (int row = first; row <= last; row++)
                for (int c = 0; c < W; c++) dx[row * W + c] += shares[c + 1];
        }
    }
}
