/* Parts of a softmax: exp, and the maximum of a row. */
#pragma once

#include "vectors.h"

#define CUTOFF -64.0f /* exp of less is 0 here: it would not change a sum, and subnormal numbers are avoided */

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
    for (int j = 1; j < n; j++) most = l[j] > most ? l[j] : most;
    return most;
}
