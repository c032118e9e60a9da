/* Evolving attention on a CPU, forward and backward, one image after the other so that its maps stay in the cache; the
 * pooling that comes before it; and the maps of conv2d.
 *
 * Plain C with GNU vector extensions: `cpu_library.py` compiles this file, which takes in the others, for the machine it
 * runs on. All arithmetic is float32; q, k, v, prev, logits and out may be stored as float32, bfloat16 or float16.
 *
 *     forward.c, backward.c   the operator, a block of queries at a time
 *     planes.c                conv2d: convolutions over the two planes of a map
 *     pooling.c               3x3 average pooling
 *     problem.h, logits.h     what the first two share: an image's buffers, and its logits
 *     convolution.h           the convolutions of the maps
 *     gemm.h, softmax.h       the matrix product; exp
 *     dropout.h               which probabilities are dropped
 *     storage.h, vectors.h    stored numbers; vectors of floats
 *
 * Shape letters: B batch, K heads, H x W the map's pixels, N = H*W, D width of a query's head, E of a value's. q, k, v
 * and out are stored as (K, D, N) or, channels last, as (N, K, D); the work is done on (K, D, N). "Own" logits are dot
 * product and position; one row of a map is one query.
 *
 *     none (AA)     logits = own
 *     mix (EA)      m = alpha*prev + (1-alpha)*own;  logits = beta*relu(conv(m)) + (1-beta)*m   (EA paper, eq. 3 and 4)
 *     predict (PA)  logits = alpha*relu(conv(prev)) + (1-alpha)*own;  without a convolution alpha*prev + (1-alpha)*own
 *
 * A window hides keys from the softmax; the maps are made, mixed and stored whole. alpha and beta are given by heads.
 * Their gradients, where wanted, need no further map: sum dm*own is sum q*dq, as own is linear in q.
 *
 * Every product, the convolutions included, is the one matrix product `gemm`.
 */
#include "forward.c"
#include "backward.c"
#include "planes.c"
#include "pooling.c"
