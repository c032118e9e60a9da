/* 3x3 average pooling, forward and backward; it needs none of the other files. */
#include <string.h>

/* For each of n outputs along a side of `length`: 1 / the number of pixels that it averages. */
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
        float *y = to + plane * h * w, sums[2 * w + 1], zeros[W];
        memset(sums, 0, sizeof sums);
        memset(zeros, 0, sizeof zeros);
        for (int r = 0; r < h; r++, y += w) {
            const float *middle = x + 2L * r * W, *above = r ? middle - W : zeros;
            const float *below = 2 * r + 1 < H ? middle + W : zeros;
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
        float *dx = d_from + plane * H * W, row[2 * w + 1]; /* what an output row adds to each of its 3 input rows */
        for (int r = 0; r < h; r++, dy += w) {
            float last = 0;
            for (int c = 0; c < w; c++) {
                const float share = dy[c] * (by_row[r] * by_col[c]);
                row[2 * c] = last + share;
                row[2 * c + 1] = last = share;
            }
            row[2 * w] = last;
            for (int y = r ? 2 * r - 1 : 0; y < H && y <= 2 * r + 1; y++) /* row 2r-1 also belongs to output row r-1 */
                for (int c = 0; c < W; c++) dx[y * W + c] = row[c + 1] + (y < 2 * r ? dx[y * W + c] : 0);
        }
    }
}
