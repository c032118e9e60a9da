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

/* factor * from */
static void write_scaled(void *to, const float *restrict from, float factor, long n, int dtype, float *scratch) {
    if (dtype == FLOAT32) {
        float *row = to;
        long i = 0;
        for (; i + VL <= n; i += VL) STORE(row + i, factor * LOAD(from + i));
        for (; i < n; i++) row[i] = factor * from[i];
    } else {
        for (long i = 0; i < n; i++) scratch[i] = factor * from[i];
        write_floats(to, scratch, n, dtype);
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

enum { ADD, FRESH };

/* One tile of C += A B, or of C = A B where `fresh`. Row t of B begins at b + (offsets ? offsets[t] : t * ldb). */
INLINE void tile(const int rows, const int vecs, int fresh, int depth, const float *a, long a_row, long a_col,
                 const float *b, long ldb, const long *offsets, float *c, long ldc) {
    vec acc[MR][NR] = {};
    if (!fresh) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) acc[r][v] = LOAD(c + r * ldc + v * VL);
    }
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
    tile(rows, vecs, fresh, depth, a + i * a_row, a_row, a_col, b + j, ldb, offsets, c + i * ldc + j, ldc)
#define TILES(rows) \
    case rows: if (vecs == NR) TILE(rows, NR); else if (vecs == 2) TILE(rows, 2); else TILE(rows, 1); break;

/* C (m, n) += A (m, depth) B (depth, n), or C = A B where `fresh`; n a multiple of VL, A with any strides. Each element is
 * summed in the order of `depth` whatever the tile, so results do not depend on how the work is cut. */
static void gemm(int fresh, int m, int n, int depth, const float *a, long a_row, long a_col, const float *b, long ldb,
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
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float a[4] = {x[0], x[1], x[2], x[3]};
    for (int i = 4; i < VL; i += 4)
        for (int s = 0; s < 4; s++) a[s] += x[i + s];
    return (a[0] + a[1]) + (a[2] + a[3]);
#endif
}

/* All bits set in the first n elements. */
INLINE ivec before(int n) {
    ivec lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    return lane < n;
}

/* ---------------------------------------------------------------- softmax */

#define CUTOFF -64.0f /* exp of less is 0 here: invisible in a sum, and no subnormal number comes of it */

INLINE vec near_zero_exp(vec x) { /* |x| <= log(2) / 2; minimax, relative error 1.3e-7 */
    vec y = x * 8.290315047e-3f + 4.189793020e-2f;
    y = y * x + 1.666763574e-1f;
    y = y * x + 4.999915063e-1f;
    y = y * x + 9.999997020e-1f;
    return y * x + 1.0f;
}

INLINE vec without_powers(vec x, vec n) { /* x - n * log(2) */
#ifdef __FP_FAST_FMAF
    return x - n * 0.693147181f;
#else
    return x - n * 0.693359375f + n * 2.12194440e-4f;
#endif
}

/* Relative error about 2e-7; beyond 80 anything above exp(80); NaN stays NaN. */
#ifdef __AVX512F__
INLINE vec exp_of(vec x) {
    const __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(CUTOFF), _CMP_NLE_UQ);
    const vec n = (vec)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
    const vec y = near_zero_exp(without_powers(x, n));
    return (vec)_mm512_maskz_scalef_ps(keep, (__m512)y, (__m512)n);
}
#else
INLINE vec exp_of(vec x) {
    const ivec keep = x > CUTOFF, bad = x != x, high = x > 80.0f;
    x = (vec)(((ivec)x & keep & ~high) | ((ivec)((vec){} + 80.0f) & high));
    const vec shift = (vec){} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to whole numbers */
    vec n = x * 1.44269504f + shift;
    const ivec power = ((ivec)n - (ivec)shift) << 23;
    n -= shift;
    const vec y = near_zero_exp(without_powers(x, n));
    return (vec)((((ivec)y + power) & keep) | bad); /* all bits set is a NaN */
}
#endif

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
    float *norm;                                        /* (B, K, N, 2): c and 1 / sum of exp(logits - c) */
    /* backward only */
    const void *d_out, *d_logits;                       /* d_logits or NULL */
    void *d_q, *d_k, *d_v, *d_prev;                     /* (B, K, D, N) twice, (B, K, E, N), (B, K, N, N) or NULL */
    float *d_height_rel, *d_width_rel, *d_weight, *d_bias; /* of each image: (B, ...) */
} problem;

/* Whether the logits are the convolved mixture and nothing else. */
static int only_convolved(const problem *p) { return p->weight && p->kind == MIX && p->beta == 1.0f; }

/* What all rows of an image share. */
typedef struct {
    const problem *p;
    int b, N, Np, Dp, Ep, r, P;  /* padded N, D and E, the kernel's radius, floats of a buffered row of one head */
    float gain;                  /* of the own logits in the result */
    float *q, *k, *v;            /* (K*D, Np) scaled, times gain; (K*D, Np); (K*E, Np) */
    float *heights, *widths;     /* (D, 2H-1 + VL padded), (D, ...): the tables transposed */
    long height_ld, width_ld;
    float *position;             /* (N, Hp + Wp): position terms of one head's queries by row and column */
    long position_ld;
    int planes, taps;            /* of a convolution: its weight is (planes, K, taps) */
    float *weight;
    long *offsets;               /* of the rows that its taps read, from the first one */
    float *inputs, *products;    /* (planes, K, P): Winograd's */
    float *v_rows;               /* (K, N, Ep) where heads are wider than FEW: the values transposed */
    float *attn;                 /* (K, BLOCK, Np) there: exp(logits - c) of rows whose values are still to come */
    float *sums;                 /* (BLOCK, Ep) there: their values */
    float *previous;             /* (Np), a row of prev, or for passing use */
} image;

#define MARGIN VL         /* zeros before a buffered row */
#define GROUP 4           /* rows of a convolution made together, from a multiple of GROUP on */
#define BLOCK (2 * GROUP) /* rows whose values are summed, or whose softmax is differentiated, together */
#define FEW 4             /* values of a head that are summed while its softmax is made; more are a matrix product */

static float *new_floats(long n) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (n + 2 * VL) * sizeof(float))) abort(); /* as any allocation here that fails */
    memset(memory, 0, (n + 2 * VL) * sizeof(float));
    return memory;
}

/* ---------------------------------------------------------------- convolutions of the maps */

/* A 3x3 convolution is done by Winograd's F(4, 3) along the queries (Lavin and Gray 2016,
 * https://arxiv.org/abs/1509.09308): four of its rows are six sums of products over heads and columns where twelve were.
 * Columns stay as they are, so that every step works on whole rows. Other kernels are one sum over all their taps. */
static void allocate_convolution(image *g, const problem *p) {
    const int K = p->K, size = p->kernel, fast = size == 3, rows = fast ? 1 : size;
    g->planes = fast ? 6 : 1;
    g->taps = K * rows * size;
    g->weight = new_floats((long)g->planes * K * g->taps);
    g->offsets = malloc(g->taps * sizeof(long));
    for (int c = 0, t = 0; c < K; c++)
        for (int y = 0; y < rows; y++)
            for (int x = 0; x < size; x++, t++) g->offsets[t] = ((long)y * K + c) * g->P + x;
    if (!fast) return;
    g->inputs = new_floats((long)g->planes * K * g->P);
    g->products = new_floats((long)g->planes * K * g->P);
}

/* (K, K, kernel, kernel) -> (planes, K, taps) */
static void read_weight(const image *g, float *to, const float *from) {
    const long K = g->p->K, size = g->p->kernel, plane = K * g->taps;
    if (g->planes == 1) {
        memcpy(to, from, plane * sizeof(float));
        return;
    }
    for (long oc = 0; oc < K * K; oc++)
        for (long x = 0; x < size; x++) {
            const float *w = from + oc * 9 + x;
            const float ends = w[0] + w[6], far = w[0] + 4 * w[6];
            float *u = to + oc * 3 + x;
            u[0] = w[0] / 4;
            u[plane] = -(ends + w[3]) / 6;
            u[2 * plane] = -(ends - w[3]) / 6;
            u[3 * plane] = (far + 2 * w[3]) / 24;
            u[4 * plane] = (far - 2 * w[3]) / 24;
            u[5 * plane] = w[6];
        }
}

/* Six rows of n floats -> what the six products take. */
static void winograd_input(float *restrict to, const float *restrict from, long n) {
    for (long j = 0; j < n; j += VL) {
        vec x[6];
        for (int r = 0; r < 6; r++) x[r] = LOAD(from + r * n + j);
        const vec even = x[4] - 4 * x[2], odd = x[3] - 4 * x[1], outer = x[4] - x[2], inner = 2 * (x[3] - x[1]);
        STORE(to + j, 4 * (x[0] - x[2]) + outer);
        STORE(to + n + j, even + odd);
        STORE(to + 2 * n + j, even - odd);
        STORE(to + 3 * n + j, outer + inner);
        STORE(to + 4 * n + j, outer - inner);
        STORE(to + 5 * n + j, 4 * (x[1] - x[3]) + x[5] - x[3]);
    }
}

INLINE vec relu(vec x) { return (vec)((ivec)x & ~(x <= 0)); } /* NaN stays NaN */

/* `rows` <= GROUP rows of a convolution for all heads, with its bias and ReLU unless `bias` is NULL: to (rows, K, P),
 * `row_ld` from row to row and `head_ld` from head to head. `maps` row `top` is the topmost that they read. */
static void convolve(const image *g, float *to, long row_ld, long head_ld, const float *maps, int top, int rows,
                     const float *weight, const float *bias) {
    const int K = g->p->K;
    const long n = (long)K * g->P, plane = (long)K * g->taps;
    maps += top * n;
    if (g->planes == 1) {
        for (int i = 0; i < rows; i++)
            gemm(FRESH, K, g->Np, g->taps, weight, g->taps, 1, maps + i * n + MARGIN - g->r, 0, g->offsets,
                 to + i * row_ld + MARGIN, head_ld);
    } else {
        winograd_input(g->inputs, maps, n);
        for (int t = 0; t < g->planes; t++)
            gemm(FRESH, K, g->Np, g->taps, weight + t * plane, g->taps, 1, g->inputs + t * n + MARGIN - g->r, 0,
                 g->offsets, g->products + t * n + MARGIN, g->P);
    }
    for (int head = 0; head < K; head++) {
        const float *from = g->products + head * g->P + MARGIN;
        float *row = to + head * head_ld + MARGIN;
        for (int j = 0; j < g->Np; j += VL) {
            vec y[GROUP];
            if (g->planes == 1) {
                for (int i = 0; i < rows; i++) y[i] = LOAD(row + i * row_ld + j);
            } else {
                vec x[6];
                for (int t = 0; t < 6; t++) x[t] = LOAD(from + t * n + j);
                const vec sum = x[1] + x[2], difference = x[1] - x[2], far_sum = x[3] + x[4], far = x[3] - x[4];
                y[0] = x[0] + sum + far_sum;
                y[1] = difference + 2 * far;
                y[2] = sum + 4 * far_sum;
                y[3] = difference + 8 * far + x[5];
            }
            for (int i = 0; i < rows; i++) STORE(row + i * row_ld + j, bias ? relu(y[i] + bias[head]) : y[i]);
        }
        for (int i = 0; i < rows; i++) memset(row + i * row_ld + g->N, 0, (g->P - MARGIN - g->N) * sizeof(float));
    }
}

/* ---------------------------------------------------------------- buffers of a thread */

/* Buffers are kept by their thread for the next problem of the same sizes: getting them anew from the system costs as
 * much as the arithmetic. What must be zero in them (margins, rows beyond the map, sums) is left so. */
static int same_sizes(const problem *a, const problem *b) {
    return a->K == b->K && a->H == b->H && a->W == b->W && a->D == b->D && a->E == b->E && a->kernel == b->kernel &&
           a->kind == b->kind && !a->height_rel == !b->height_rel && !a->weight == !b->weight &&
           !a->logits == !b->logits;
}

static void free_image(image *g) {
    float *all[] = {g->q, g->k, g->v, g->heights, g->widths, g->position,  g->weight,
                    g->inputs, g->products, g->v_rows, g->attn, g->sums, g->previous};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(g->offsets);
}

static void allocate_image(image *g, const problem *p) {
    const int N = p->H * p->W;
    *g = (image){.N = N, .Np = round_up(N), .Dp = round_up(p->D), .Ep = round_up(p->E),
                 .r = p->weight ? p->kernel / 2 : 0};
    g->P = MARGIN + g->Np + VL;
    g->q = new_floats((long)p->K * p->D * g->Np);
    g->k = new_floats((long)p->K * p->D * g->Np);
    g->v = new_floats((long)p->K * p->E * g->Np);
    if (p->E > FEW) {
        g->v_rows = new_floats((long)p->K * N * g->Ep);
        g->attn = new_floats((long)p->K * BLOCK * g->Np);
        g->sums = new_floats((long)BLOCK * g->Ep);
    }
    g->previous = new_floats(g->Np);
    if (p->height_rel) {
        g->height_ld = round_up(2 * p->H - 1) + round_up(p->H);
        g->width_ld = round_up(2 * p->W - 1) + round_up(p->W);
        g->heights = new_floats(p->D * g->height_ld);
        g->widths = new_floats(p->D * g->width_ld);
        g->position_ld = round_up(p->H) + round_up(p->W);
        g->position = new_floats(N * g->position_ld);
    }
    if (p->weight) allocate_convolution(g, p);
}

static void read_parameters(image *g, const problem *p) {
    g->p = p;
    g->gain = p->kind == NONE ? 1.0f : 1.0f - p->alpha;
    if (p->height_rel) {
        transpose(g->heights, g->height_ld, p->height_rel, p->D, 2 * p->H - 1, p->D);
        transpose(g->widths, g->width_ld, p->width_rel, p->D, 2 * p->W - 1, p->D);
    }
    if (p->weight) read_weight(g, g->weight, p->weight);
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

/* A head's query among those of all images; times N: the element at which its row of a stored map begins. */
static long query_of(const image *g, int head, int row) { return ((long)g->b * g->p->K + head) * g->N + row; }

static long map_element(const image *g, int head, int row) { return query_of(g, head, row) * g->N; }

/* Position terms of one head's queries begin..end: by key row, then by key column (AA paper, equation 4). */
static void position_terms(const image *g, int head, int begin, int end) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Hp = round_up(H), Wp = round_up(W);
    const float *q = g->q + (long)head * p->D * g->Np;
    for (int i = begin; i < end;) {
        const int y = i / W, stop = (y + 1) * W < end ? (y + 1) * W : end;
        gemm(FRESH, stop - i, Hp, p->D, q + i, 1, g->Np, g->heights + H - 1 - y, g->height_ld, NULL,
             g->position + i * g->position_ld, g->position_ld);
        i = stop;
    }
    for (int x = 0; x < W; x++) {
        const int first = begin + ((x - begin) % W + W) % W, count = first < end ? (end - first + W - 1) / W : 0;
        if (count)
            gemm(FRESH, count, Wp, p->D, q + first, W, g->Np, g->widths + W - 1 - x, g->width_ld, NULL,
                 g->position + first * g->position_ld + Hp, g->position_ld * W);
    }
}

/* A row of prev, logits or d_logits that vectors may read beyond its end; in `scratch` (Np) if it must be copied. */
static const float *stored_row(const image *g, const void *maps, int head, int row, float *scratch) {
    const problem *p = g->p;
    const long element = map_element(g, head, row), end = (long)p->B * p->K * g->N * g->N;
    const void *from = at(maps, element, p->dtype);
    if (p->dtype == FLOAT32 && element + g->Np <= end) return from;
    read_floats(scratch, from, g->N, p->dtype);
    return scratch;
}

/* Asks for a row of such a map that is needed soon; short rows lie too far apart for the processor to guess. */
INLINE void fetch_row(const image *g, const void *maps, int head, int row, const int to_write) {
    if (!maps || row >= g->N) return;
    const char *from = at(maps, map_element(g, head, row), g->p->dtype);
    for (long byte = 0; byte < (long)g->N * size_of(g->p->dtype); byte += 64)
        __builtin_prefetch(from + byte, to_write, 2);
}

/* gain * own logits (+ alpha * prev where `mix`) of queries begin..end, into maps rows first, first+1, ... */
static void own_logits(const image *g, float *maps, int first, int begin, int end, int mix) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, Hp = round_up(H);
    for (int head = 0; head < p->K; head++) {
        if (p->height_rel) position_terms(g, head, begin, end);
        for (int i = begin; i < end; i++) {
            float *row = row_of(g, maps, first + i - begin, head);
            const float *prev = mix ? stored_row(g, p->prev, head, i, g->previous) : NULL;
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
        gemm(ADD, end - begin, g->Np, p->D, g->q + (long)head * p->D * g->Np + begin, 1, g->Np,
             g->k + (long)head * p->D * g->Np, g->Np, NULL, row_of(g, maps, first, head), (long)p->K * g->P);
    }
}

static void previous_logits(const image *g, float *maps, int first, int begin, int end) {
    for (int i = begin; i < end; i++)
        for (int head = 0; head < g->p->K; head++)
            read_floats(row_of(g, maps, first + i - begin, head), at(g->p->prev, map_element(g, head, i), g->p->dtype),
                        g->N, g->p->dtype);
}

/* The logits of one query, all heads, (K, P): `own`, `conv`, or made in `row`. `maps` holds what the convolution reads
 * (mix: the mixture, predict: prev), its row `at` that of the query; `own` (none, predict) gain * own logits; `conv`
 * (K, P) the convolution after its ReLU. */
static float *finish_logits(const image *g, float *row, float *conv, const float *maps, int at, float *own) {
    const problem *p = g->p;
    const long n = (long)p->K * g->P;
    if (p->kind == NONE) return own;
    if (only_convolved(p)) return conv;
    const float *m = maps + at * n;
    if (p->kind == MIX) {
        if (!p->weight)
            memcpy(row, m, n * sizeof(float));
        else
            for (long j = 0; j < n; j += VL) STORE(row + j, p->beta * LOAD(conv + j) + (1 - p->beta) * LOAD(m + j));
    } else {
        const float *from = p->weight ? conv : m;
        for (long j = 0; j < n; j += VL) STORE(row + j, LOAD(own + j) + p->alpha * LOAD(from + j));
    }
    return row;
}

/* ---------------------------------------------------------------- forward */

/* What enters the softmax is what is (or would be) stored. */
static void round_row(const image *g, float *l) {
    if (g->p->dtype == FLOAT32) return;
    write_floats(g->previous, l, g->N, g->p->dtype);
    read_floats(l, g->previous, g->N, g->p->dtype);
}

/* Of one row: the sum of exp(l - shift), and in `total` the `count` sums of it times rows of v; or, where `attn` is not
 * NULL, the exponentials there. */
INLINE float weigh(const float *l, float shift, const float *v, long ld, int n, const int count, float *total,
                   float *attn) {
    vec sum = {}, sums[FEW] = {};
    for (int j = 0; j < n; j += VL) {
        vec x = exp_of(LOAD(l + j) - shift);
        if (n - j < VL) x = (vec)((ivec)x & before(n - j));
        if (attn) STORE(attn + j, x);
        sum += x;
#pragma GCC unroll 4
        for (int e = 0; e < count; e++) sums[e] += x * LOAD(v + e * ld + j);
    }
    for (int e = 0; e < count; e++) total[e] = sum_of(sums[e]);
    return sum_of(sum);
}

INLINE float weigh_some(const float *l, float shift, const float *v, long ld, int n, int count, float *total,
                        float *attn) {
    switch (count) {
        case 1: return weigh(l, shift, v, ld, n, 1, total, NULL);
        case 2: return weigh(l, shift, v, ld, n, 2, total, NULL);
        case 3: return weigh(l, shift, v, ld, n, 3, total, NULL);
        case 4: return weigh(l, shift, v, ld, n, 4, total, NULL);
    }
    return weigh(l, shift, v, ld, n, 0, total, attn);
}

/* The values of queries begin..end of a head from what `attend_row` left in g->attn. */
static void sum_values(const image *g, int head, int begin, int end) {
    const problem *p = g->p;
    const int rows = end - begin;
    const long map = query_of(g, head, 0);
    float values[BLOCK];
    gemm(FRESH, rows, g->Ep, g->N, g->attn + (long)head * BLOCK * g->Np, g->Np, 1, g->v_rows + (long)head * g->N * g->Ep,
         g->Ep, NULL, g->sums, g->Ep);
    for (long e = 0; e < p->E; e++) {
        for (int i = 0; i < rows; i++) values[i] = g->sums[i * g->Ep + e] * p->norm[2 * (map + begin + i) + 1];
        write_floats((void *)at(p->out, map * p->E + e * g->N + begin, p->dtype), values, rows, p->dtype);
    }
}

#define ROWS 32 /* queries of a piece of work: their maps stay in the second-level cache */

/* Softmax and values of query i of begin..end, all heads; `rows` (K, P) holds its logits. */
static void attend_row(const image *g, float *rows, int i, int begin, int end) {
    const problem *p = g->p;
    const int place = (i - begin) % BLOCK;
    for (int head = 0; head < p->K; head++) {
        float *l = rows + head * g->P + MARGIN, total[FEW];
        float *attn = g->attn ? g->attn + ((long)head * BLOCK + place) * g->Np : NULL;
        const long query = query_of(g, head, i);
        float *norm = p->norm + 2 * query;
        const float *v = g->v + (long)head * p->E * g->Np;
        round_row(g, l);
        fetch_row(g, p->prev, head, i + ROWS + g->r, 0);
        fetch_row(g, p->logits, head, i + 2, 1);
        if (p->logits) write_floats((void *)at(p->logits, map_element(g, head, i), p->dtype), l, g->N, p->dtype);
        float sum = weigh_some(l, 0.0f, v, g->Np, g->N, p->E, total, attn);
        norm[0] = 0;
        if (!(sum > 1e-16f && sum < 1e16f)) { /* the largest logit is far from 0 */
            norm[0] = max_of(l, g->N);
            sum = weigh_some(l, norm[0], v, g->Np, g->N, p->E, total, attn);
        }
        norm[1] = 1 / sum;
        if (p->E > FEW) {
            if (place == BLOCK - 1 || i == end - 1) sum_values(g, head, i - place, i + 1);
            continue;
        }
        for (int e = 0; e < p->E; e++) {
            const float value = total[e] * norm[1];
            write_floats((void *)at(p->out, (query - i) * p->E + (long)e * g->N + i, p->dtype), &value, 1, p->dtype);
        }
    }
}

static void forward_rows(const image *g, int begin, int end, float *maps, float *own, float *row, float *conv) {
    const problem *p = g->p;
    const int N = g->N, r = g->r, top = begin - r, bottom = end + r;
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
    for (int i = begin; i < end; i++) {
        if (p->weight && (i - begin) % GROUP == 0)
            convolve(g, conv, map_row, g->P, maps, i - begin, end - i < GROUP ? end - i : GROUP, g->weight, p->bias);
        attend_row(g, finish_logits(g, row, conv + (i - begin) % GROUP * map_row, maps, i - begin + r,
                                    own + (i - begin) * map_row), i, begin, end);
    }
}

void evolving_attention_forward(const problem *p) {
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
            kept.maps = new_floats((rows + 2 * g->r + GROUP - 1) * map_row);
            kept.own = new_floats(rows * map_row);
            kept.row = new_floats(map_row);
            kept.conv = new_floats(GROUP * map_row);
        }
        read_parameters(g, p);
        int read = -1;
#pragma omp for schedule(static)
        for (int task = 0; task < tasks; task++) {
            const int b = task / pieces, begin = task % pieces * rows, end = begin + rows < N ? begin + rows : N;
            if (b != read) {
                read_image(g, b);
                for (int head = 0; g->v_rows && head < p->K; head++)
                    transpose(g->v_rows + (long)head * N * g->Ep, g->Ep, g->v + (long)head * p->E * g->Np, g->Np, p->E, N);
            }
            read = b;
            forward_rows(g, begin, end, kept.maps, kept.own, kept.row, kept.conv);
        }
    }
}

/* ---------------------------------------------------------------- backward */

INLINE void taps_gradient(const image *g, float *sums, const float *d_conv, const float *base, int t, int o,
                          const int heads, const int count) {
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
            float *to = sums + ((long)(o + h) * g->taps + t + s) * VL;
            STORE(to, LOAD(to) + acc[h][s]);
        }
}

/* sums (K, taps, VL) += the row d_conv (K, P) times what each tap reads from `base` on */
static void plane_gradient(const image *g, float *sums, const float *d_conv, const float *base) {
    const int K = g->p->K, taps = g->taps;
    int t = 0;
    for (; t + 3 <= taps; t += 3) {
        int o = 0;
        for (; o + MR <= K; o += MR) taps_gradient(g, sums, d_conv, base, t, o, MR, 3);
        for (; o + 4 <= K; o += 4) taps_gradient(g, sums, d_conv, base, t, o, 4, 3);
        for (; o < K; o++) taps_gradient(g, sums, d_conv, base, t, o, 1, 3);
    }
    for (; t < taps; t++)
        for (int o = 0; o < K; o++) taps_gradient(g, sums, d_conv, base, t, o, 1, 1);
}

/* sums (planes, K, taps, VL) += gradient of the weight from `rows` <= GROUP rows of d_conv; maps row `top` is the topmost
 * that they read. Winograd's products, transposed: of the rows that entered and of the gradient's, four to six. */
static void weight_gradient(const image *g, float *sums, const float *d_conv, const float *maps, int top, int rows) {
    const long n = (long)g->p->K * g->P, plane = (long)g->p->K * g->taps * VL;
    maps += top * n;
    if (g->planes == 1) {
        for (int i = 0; i < rows; i++) plane_gradient(g, sums, d_conv + i * n, maps + i * n + MARGIN - g->r);
        return;
    }
    winograd_input(g->inputs, maps, n);
    for (long j = 0; j < n; j += VL) {
        vec d[4];
        for (int r = 0; r < 4; r++) d[r] = LOAD(d_conv + r * n + j);
        const vec even = d[0] + d[2], odd = d[1] + d[3], far_even = d[0] + 4 * d[2], far_odd = 2 * d[1] + 8 * d[3];
        STORE(g->products + j, d[0]);
        STORE(g->products + n + j, even + odd);
        STORE(g->products + 2 * n + j, even - odd);
        STORE(g->products + 3 * n + j, far_even + far_odd);
        STORE(g->products + 4 * n + j, far_even - far_odd);
        STORE(g->products + 5 * n + j, d[3]);
    }
    for (int t = 0; t < g->planes; t++)
        plane_gradient(g, sums + t * plane, g->products + t * n, g->inputs + t * n + MARGIN - g->r);
}

/* sums (planes, K, taps, VL) -> (K, K, kernel, kernel), and empty the sums */
static void write_weight_gradient(const image *g, float *to, float *sums) {
    const long K = g->p->K, plane = K * g->taps;
    if (g->planes == 1) {
        for (long t = 0; t < plane; t++) to[t] = sum_of(LOAD(sums + t * VL));
    } else {
        for (long oc = 0; oc < K * K; oc++)
            for (long x = 0; x < 3; x++) {
                float u[6];
                for (int t = 0; t < 6; t++) u[t] = sum_of(LOAD(sums + (t * plane + oc * 3 + x) * VL));
                float *w = to + oc * 9 + x;
                w[0] = u[0] / 4 - (u[1] + u[2]) / 6 + (u[3] + u[4]) / 24;
                w[3] = (u[2] - u[1]) / 6 + (u[3] - u[4]) / 12;
                w[6] = (u[3] + u[4] - u[1] - u[2]) / 6 + u[5];
            }
    }
    memset(sums, 0, g->planes * plane * VL * sizeof(float));
}

/* What the backward pass of an image needs beside it. */
typedef struct {
    int base;                 /* the map row that lies at r in `maps` and `d_conv` */
    float *maps;              /* (WINDOW + 2r, K, P): what the convolution reads */
    float *d_conv;            /* (WINDOW + 2r, K, P): gradient of its output, zeros around */
    float *own, *conv;        /* (BLOCK, K, P): own logits, the convolution */
    float *d_own;             /* (K, N, P): gradient of gain * own logits; a head's rows together, for their products */
    float *d_maps;            /* (K, GROUP, P): gradient of rows that the convolution read */
    float *turned;            /* the convolution's weight for that: heads exchanged, turned by 180 degrees */
    float *logits;            /* (BLOCK, K, P) */
    float *attn, *d_attn;     /* (BLOCK, Np) */
    float *scratch;           /* (2, Np) */
    float *q_rows, *k_rows, *d_q; /* (N, Dp) */
    float *d_k, *d_v, *d_out; /* (D, Np), (K*E, Np), (K*E, Np) */
    float *position;          /* (N, Hp + Wp): gradient of one head's position terms */
    float *height_rows, *width_rows, *d_heights, *d_widths; /* (2H-1, Dp), (2W-1, Dp) */
    float *d_weight, *d_bias; /* (planes, K, taps, VL), (K, VL) */
} workspace;

#define WINDOW (BLOCK + 3 * GROUP) /* a block's rows and those before whose convolution still waits (r < GROUP) */

static void allocate_workspace(workspace *w, const image *g, const problem *p) {
    const long map_row = (long)p->K * g->P, weights = (long)g->planes * p->K * g->taps;
    memset(w, 0, sizeof *w);
    w->d_own = new_floats(g->N * map_row);
    w->logits = new_floats(BLOCK * map_row);
    w->attn = new_floats((long)BLOCK * g->Np);
    w->d_attn = new_floats((long)BLOCK * g->Np);
    w->scratch = new_floats(2L * g->Np);
    w->q_rows = new_floats((long)g->N * g->Dp);
    w->k_rows = new_floats((long)g->N * g->Dp);
    w->d_q = new_floats((long)g->N * g->Dp);
    w->d_k = new_floats((long)p->D * g->Np);
    w->d_v = new_floats((long)p->K * p->E * g->Np);
    w->d_out = new_floats((long)p->K * p->E * g->Np);
    if (p->kind != MIX) w->own = new_floats(BLOCK * map_row);
    if (p->kind != NONE) {
        w->maps = new_floats((WINDOW + 2 * g->r) * map_row);
        w->conv = new_floats(BLOCK * map_row);
    }
    if (p->weight) {
        w->d_conv = new_floats((WINDOW + 2 * g->r) * map_row);
        w->d_maps = new_floats(GROUP * map_row);
        w->turned = new_floats(weights);
        w->d_weight = new_floats(weights * VL);
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
    if (p->weight) {
        float *turned = new_floats((long)p->K * p->K * area);
        for (int o = 0; o < p->K; o++)
            for (int c = 0; c < p->K; c++)
                for (int t = 0; t < area; t++)
                    turned[(c * p->K + o) * area + t] = p->weight[(o * p->K + c) * area + area - 1 - t];
        read_weight(g, w->turned, turned);
        free(turned);
    }
    if (p->height_rel) {
        read_matrix(w->height_rows, g->Dp, p->height_rel, 2L * p->H - 1, p->D, FLOAT32, 1);
        read_matrix(w->width_rows, g->Dp, p->width_rel, 2L * p->W - 1, p->D, FLOAT32, 1);
    }
}

static void free_workspace(workspace *w) {
    float *all[] = {w->maps, w->own, w->conv, w->d_own, w->d_conv, w->d_maps, w->turned, w->logits, w->attn,
                    w->d_attn, w->scratch, w->q_rows, w->k_rows, w->d_q, w->d_k, w->d_v, w->d_out, w->position,
                    w->height_rows, w->width_rows, w->d_heights, w->d_widths, w->d_weight, w->d_bias};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static float *own_row(const image *g, const workspace *w, int head, int row) {
    return w->d_own + ((long)head * g->N + row) * g->P + MARGIN;
}

/* A row through values and softmax. In: l (n) its logits, norm (2), d_out (E, ld) the gradient of its query's values and
 * v (E, ld), or E = 0 and in `d` the gradient of attn. Out: attn, and in `d` attn times its gradient, to n's next multiple
 * of VL. Returns the sum of the latter. */
INLINE float value_gradient(float *attn, float *d, const float *l, const float *norm, const float *d_out, const float *v,
                            long ld, int n, const int E) {
    vec total = {};
    for (int j = 0; j < n; j += VL) {
        vec x = norm[1] * exp_of(LOAD(l + j) - norm[0]), y = E ? (vec){} : LOAD(d + j);
        if (n - j < VL) x = (vec)((ivec)x & before(n - j));
#pragma GCC unroll 4
        for (int e = 0; e < E; e++) y += d_out[e * ld] * LOAD(v + e * ld + j);
        STORE(attn + j, x);
        y *= x;
        STORE(d + j, y);
        total += y;
    }
    return sum_of(total);
}

static float some_value_gradient(float *attn, float *d, const float *l, const float *norm, const float *d_out,
                                 const float *v, long ld, int n, int E) {
    switch (E) {
        case 1: return value_gradient(attn, d, l, norm, d_out, v, ld, n, 1);
        case 2: return value_gradient(attn, d, l, norm, d_out, v, ld, n, 2);
        case 3: return value_gradient(attn, d, l, norm, d_out, v, ld, n, 3);
        case 4: return value_gradient(attn, d, l, norm, d_out, v, ld, n, 4);
    }
    return value_gradient(attn, d, l, norm, d_out, v, ld, n, 0);
}

/* The gradient of queries begin..end's logits into d_own (of gain * own, or of the mixture where nothing is convolved)
 * and d_conv; adds to d_v. */
static void softmax_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const long map_row = (long)p->K * g->P;
    const float share = p->kind == MIX ? p->beta : p->alpha;
    float *made[BLOCK]; /* the logits of a query that are not stored */
    /* where nothing else is in the logits, they show what passed the ReLU */
    const int convolve_again = p->weight && !(p->logits && only_convolved(p));
    if (convolve_again)
        for (int i = begin; i < end; i += GROUP)
            convolve(g, w->conv + (i - begin) * map_row, map_row, g->P, w->maps, i - w->base,
                     end - i < GROUP ? end - i : GROUP, g->weight, p->bias);
    if (!p->logits)
        for (int i = begin; i < end; i++) {
            const long at = (i - begin) * map_row;
            made[i - begin] = finish_logits(g, w->logits + at, w->conv ? w->conv + at : NULL, w->maps, i - w->base + g->r,
                                            w->own ? w->own + at : NULL);
        }
    for (int head = 0; head < p->K; head++) {
        const long value = (long)head * p->E * g->Np, query = query_of(g, head, 0);
        if (p->E > FEW)
            gemm(FRESH, end - begin, g->Np, p->E, w->d_out + value + begin, 1, g->Np, g->v + value, g->Np, NULL, w->d_attn,
                 g->Np);
        for (int i = begin; i < end; i++) {
            const float *l, *more = NULL;
            fetch_row(g, p->logits, head, i + BLOCK, 0);
            fetch_row(g, p->d_logits, head, i + BLOCK, 0);
            fetch_row(g, p->prev, head, i + BLOCK + g->r, 0);
            fetch_row(g, p->d_prev, head, i, 1);
            if (p->logits) {
                l = stored_row(g, p->logits, head, i, w->scratch);
            } else {
                float *row = made[i - begin] + head * g->P + MARGIN;
                round_row(g, row);
                l = row;
            }
            if (p->d_logits) more = stored_row(g, p->d_logits, head, i, w->scratch + g->Np);
            float *attn = w->attn + (long)(i - begin) * g->Np, *d_attn = w->d_attn + (long)(i - begin) * g->Np;
            const float mean = some_value_gradient(attn, d_attn, l, p->norm + 2 * (query + i), w->d_out + value + i,
                                                   g->v + value, g->Np, g->N, p->E);
            const float *passed = convolve_again ? w->conv + (i - begin) * map_row + head * g->P + MARGIN : l;
            float *d = own_row(g, w, head, i);
            float *gate = p->weight ? row_of(g, w->d_conv, i - w->base + g->r, head) : NULL;
            vec bias = {};
            for (int j = 0; j < g->Np; j += VL) {
                vec x = LOAD(d_attn + j) - mean * LOAD(attn + j);
                if (more) x += g->N - j < VL ? (vec)((ivec)LOAD(more + j) & before(g->N - j)) : LOAD(more + j);
                if (!only_convolved(p)) STORE(d + j, x);
                if (gate) {
                    x = (vec)((ivec)(LOAD(passed + j) > 0) & (ivec)(share * x));
                    STORE(gate + j, x);
                    bias += x;
                }
            }
            if (gate) STORE(w->d_bias + head * VL, LOAD(w->d_bias + head * VL) + bias);
        }
        gemm(ADD, p->E, g->Np, end - begin, w->d_out + value + begin, g->Np, 1, w->attn, g->Np, NULL, w->d_v + value,
             g->Np);
    }
}

/* Through the convolution, queries begin..end: d_own becomes the gradient of gain * own logits, d_prev and their share of
 * the weight's gradient are done. */
static void convolution_gradients(const image *g, workspace *w, int begin, int end) {
    const problem *p = g->p;
    const long map_row = (long)p->K * g->P;
    const int predicted = p->kind == PREDICT && p->weight, direct = only_convolved(p);
    for (int first = begin; first < end; first += GROUP) {
        const int rows = end - first < GROUP ? end - first : GROUP;
        if (p->weight) {
            convolve(g, direct ? own_row(g, w, 0, first) - MARGIN : w->d_maps, g->P, (direct ? g->N : GROUP) * (long)g->P,
                     w->d_conv, first - w->base, rows, w->turned, NULL);
            weight_gradient(g, w->d_weight, w->d_conv + (first - w->base + g->r) * map_row, w->maps, first - w->base, rows);
        }
        for (int head = 0; head < p->K; head++)
            for (int i = first; i < first + rows; i++) {
                float *d = own_row(g, w, head, i);
                const float *d_maps = w->d_maps + ((long)head * GROUP + i - first) * g->P + MARGIN;
                if (p->kind == MIX && p->weight && !direct)
                    for (int j = 0; j < g->Np; j += VL) STORE(d + j, (1 - p->beta) * LOAD(d + j) + LOAD(d_maps + j));
                if (p->d_prev)
                    write_scaled((void *)at(p->d_prev, map_element(g, head, i), p->dtype), predicted ? d_maps : d,
                                 predicted ? 1.0f : p->alpha, g->N, p->dtype, w->scratch);
            }
    }
}

/* From d_own: gradients of q and k, and of the position tables. */
static void own_gradients(const image *g, workspace *w, int head) {
    const problem *p = g->p;
    const int H = p->H, W = p->W, D = p->D, N = g->N, Dp = g->Dp, Hp = round_up(H);
    const long ld = g->position_ld, element = query_of(g, head, 0) * D;
    const float *q = g->q + (long)head * D * g->Np, *d = own_row(g, w, head, 0);
    transpose(w->k_rows, Dp, g->k + (long)head * D * g->Np, g->Np, D, N);
    transpose(w->q_rows, Dp, q, g->Np, D, N); /* with scale and gain */

    gemm(FRESH, D, g->Np, N, q, g->Np, 1, d, g->P, NULL, w->d_k, g->Np);
    for (int c = 0; c < D; c++)
        write_floats((void *)at(p->d_k, element + (long)c * N, p->dtype), w->d_k + c * g->Np, N, p->dtype);

    gemm(FRESH, N, Dp, N, d, g->P, 1, w->k_rows, Dp, NULL, w->d_q, Dp);
    if (p->height_rel) {
        const ivec inside = before(W % VL); /* of a row's last vector */
        for (int i = 0; i < N; i++) {
            const float *row = d + i * g->P;
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
            gemm(ADD, W, Dp, H, terms, ld, 1, w->height_rows + first, Dp, NULL, w->d_q + query, Dp);
            gemm(ADD, H, Dp, W, terms, 1, ld, w->q_rows + query, Dp, NULL, w->d_heights + first, Dp);
        }
        for (int x = 0; x < W; x++) {
            const float *terms = w->position + x * ld + Hp;
            const long first = (long)(W - 1 - x) * Dp, query = (long)x * Dp;
            gemm(ADD, H, Dp, W, terms, ld * W, 1, w->width_rows + first, Dp, NULL, w->d_q + query, (long)Dp * W);
            gemm(ADD, W, Dp, H, terms, 1, ld * W, w->q_rows + query, (long)Dp * W, NULL, w->d_widths + first, Dp);
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

/* Lets the window begin at map row `base`; of d_conv the rows before `made`, of maps those before `mapped` are there. What
 * lies around the map is zero. */
static void move_window(const image *g, workspace *w, int base, int made, int mapped) {
    const long map_row = (long)g->p->K * g->P, size = WINDOW + 2 * g->r;
    float *buffers[] = {w->maps, w->d_conv};
    const long ready[] = {g->r + mapped - base, g->r + made - base};
    for (int i = 0; i < 2 && buffers[i]; i++) {
        float *rows = buffers[i], *rest = rows + ready[i] * map_row;
        if (base == 0)
            memset(rows, 0, g->r * map_row * sizeof(float));
        else
            memmove(rows, rows + (base - w->base) * map_row, ready[i] * map_row * sizeof(float));
        if (base + size > g->r + g->N) memset(rest, 0, (size - ready[i]) * map_row * sizeof(float));
    }
    w->base = base;
}

static void backward_image(const image *g, workspace *w) {
    const problem *p = g->p;
    const long b = g->b;
    const int N = g->N;
    read_matrix(w->d_out, g->Np, at(p->d_out, b * p->K * p->E * N, p->dtype), p->K * p->E, N, p->dtype, 1);
    memset(w->d_v, 0, (long)p->K * p->E * g->Np * sizeof(float));
    /* A block of queries after the other, each step just far enough behind the one before that its neighbours are there:
     * what they hand on is still in the cache. */
    int mapped = 0, convolved = 0;
    for (int begin = 0; begin < N; begin += BLOCK) {
        const int end = begin + BLOCK < N ? begin + BLOCK : N;
        const int map = end + g->r < N ? end + g->r : N, through = end < N ? (end - g->r) / GROUP * GROUP : N;
        if (p->kind != NONE) move_window(g, w, convolved, begin, mapped);
        if (p->kind == MIX) own_logits(g, w->maps, g->r + mapped - w->base, mapped, map, 1);
        if (p->kind == PREDICT) previous_logits(g, w->maps, g->r + mapped - w->base, mapped, map);
        if (p->kind != MIX && !p->logits) own_logits(g, w->own, 0, begin, end, 0); /* else those stored are enough */
        mapped = map;
        softmax_gradients(g, w, begin, end);
        if (p->kind != NONE && convolved < through) {
            convolution_gradients(g, w, convolved, through);
            convolved = through;
        }
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
        write_weight_gradient(g, p->d_weight + b * p->K * p->K * p->kernel * p->kernel, w->d_weight);
        for (int h = 0; h < p->K; h++) p->d_bias[b * p->K + h] = sum_of(LOAD(w->d_bias + h * VL));
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

/* Of each of n outputs along a side of `length`: 1 / the number of pixels it averages. */
static void pool_shares(float *shares, int n, int length) {
    for (int i = 0; i < n; i++) shares[i] = 1.0f / (3 - (i == 0) - (2 * i + 1 >= length));
}

/* 3x3 average, stride 2, padding 1 that does not count: (planes, H, W) -> (planes, ceil(H/2), ceil(W/2)), float32. */
void pool_forward(float *to, const float *from, long planes, int H, int W, int threads) {
    const int h = (H + 1) / 2, w = (W + 1) / 2;
    float by_row[h], by_col[w];
    pool_shares(by_row, h, H);
    pool_shares(by_col, w, W);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long plane = 0; plane < planes; plane++) {
        const float *x = from + plane * H * W;
        float *y = to + plane * h * w, sums[2 * w + 1];
        memset(sums, 0, sizeof sums);
        for (int r = 0; r < h; r++, y += w) {
            const float *middle = x + 2L * r * W, *above = middle - W, *below = middle + W;
            if (r == 0 && 2 * r + 1 == H)
                for (int c = 0; c < W; c++) sums[c + 1] = middle[c];
            else if (r == 0)
                for (int c = 0; c < W; c++) sums[c + 1] = middle[c] + below[c];
            else if (2 * r + 1 == H)
                for (int c = 0; c < W; c++) sums[c + 1] = above[c] + middle[c];
            else
                for (int c = 0; c < W; c++) sums[c + 1] = above[c] + middle[c] + below[c];
            for (int c = 0; c < w; c++)
                y[c] = (sums[2 * c] + sums[2 * c + 1] + sums[2 * c + 2]) * (by_row[r] * by_col[c]);
        }
    }
}

void pool_backward(float *d_from, const float *d_to, long planes, int H, int W, int threads) {
    const int h = (H + 1) / 2, w = (W + 1) / 2;
    float by_row[h], by_col[w];
    pool_shares(by_row, h, H);
    pool_shares(by_col, w, W);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long plane = 0; plane < planes; plane++) {
        const float *dy = d_to + plane * h * w;
        float *dx = d_from + plane * H * W, two[2][2 * w + 1]; /* what a row of outputs gives each of its three rows */
        memset(two, 0, sizeof two);
        for (int r = 0; r <= h; r++) {
            float *before = two[(r + 1) % 2], *now = two[r % 2];
            if (r < h) {
                float last = 0;
                for (int c = 0; c < w; c++) {
                    const float share = dy[r * w + c] * (by_row[r] * by_col[c]);
                    now[2 * c] = last + share;
                    now[2 * c + 1] = share;
                    last = share;
                }
                now[2 * w] = last;
            }
            if (r > 0 && 2 * r - 1 < H)
                for (int c = 0; c < W; c++) dx[(2 * r - 1L) * W + c] = before[c + 1] + (r < h ? now[c + 1] : 0);
            if (r < h)
                for (int c = 0; c < W; c++) dx[2L * r * W + c] = now[c + 1];
        }
    }
}
