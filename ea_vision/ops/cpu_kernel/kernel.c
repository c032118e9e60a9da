/* Evolving attention on a CPU, forward and backward, one image after another so that its maps stay in the cache; and
 * the pooling before it.
 *
 * Plain C with GNU vector extensions: `cpu_library.py` compiles this file, which includes the others, for its machine.
 * All arithmetic is float32; q, k, v, prev, logits and out may be stored as float32 or bfloat16.
 *
 * Shape letters: B batch, K heads, H x W the map's pixels, N = H*W, D width of a query's head, E of a value's. q, k, v
 * and out are stored as (K, D, N). "Own" logits are dot products plus position terms; one row of a map is one query.
 *
 *     none (AA)     logits = own
 *     mix (EA)      m = alpha*prev + (1-alpha)*own;  logits = beta*relu(conv(m)) + (1-beta)*m   (EA paper, eq. 3 and 4)
 *     predict (PA)  logits = alpha*relu(conv(prev)) + (1-alpha)*own;  without a convolution alpha*prev + (1-alpha)*own
 *
 * A window hides keys from the softmax; maps are computed, mixed and stored whole. alpha and beta are given per head.
 * Their gradients, if wanted, need no further map: sum dm*own is sum q*dq, since own is linear in q.
 */
#include "backward.c"
#include "forward.c"
#include "pooling.c"

/* Forward, or backward if p->d_out is given; the caller sums gradients over images, in their order. Returns 0, or if a
 * thread cannot allocate its memory the bytes that it needs; then nothing is computed. */
int64_t evolving_attention(const problem *p) {
    const int N = p->H * p->W, backward = p->d_out != NULL;
    int64_t missing = 0;
    use_large_pages(backward ? p->d_prev : p->logits, (long)p->B * p->K * N * N * size_of(p->dtype));
    /* forward splits images if there are fewer images than threads; pieces recompute the rows of their neighbours */
    const int wanted = backward || p->B >= p->threads ? 1 : (p->threads + p->B - 1) / p->B;
    const int rows = ((N + wanted - 1) / wanted + BLOCK - 1) / BLOCK * BLOCK, pieces = (N + rows - 1) / rows;
#pragma omp parallel num_threads(p->threads < p->B * pieces ? p->threads : p->B * pieces)
    {
        static _Thread_local struct {
            problem sizes;
            buffers memory;
            image g;
            workspace w;
        } both[2], *kept;
        kept = &both[backward];
        image *g = &kept->g;
        if (!same_sizes(&kept->sizes, p)) {
            free_all(&kept->memory);
            allocate_image(g, &kept->memory, p);
            allocate_workspace(&kept->w, &kept->memory, g, p);
            kept->sizes = *p;
        }
        if (all_have_memory(&kept->memory, &missing)) {
            read_parameters(g, p);
            if (backward) read_more_parameters(&kept->w, g);
            int read = -1;
#pragma omp for schedule(static)
            for (int task = 0; task < p->B * pieces; task++) {
                const int b = task / pieces, begin = task % pieces * rows;
                if (b != read) read_image(g, read = b);
                if (backward)
                    backward_image(g, &kept->w);
                else
                    forward_rows(g, &kept->w, begin, begin + rows < N ? begin + rows : N);
            }
        } else {
            free_all(&kept->memory);
            kept->sizes.K = 0; /* equal to no problem's */
        }
    }
    return missing;
}
