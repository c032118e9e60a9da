// A layer's backward pass, one kernel. A block makes d_maps of R queries and all keys of an image, and from them the
// gradients of these queries. The last block of an image to come so far makes those of its keys and values: sums over all
// queries, whose d_maps lie in the L2 cache by then.
#define WARPS 8 // one for each head
#include "backward_maps.h"
#include "backward_queries.h"
#include "backward_keys.h"
enum {
    FLAG = PS, // which block comes
    NEEDED = RS + ROWS * ROW * 4,
    POSITIONS = PS + K * 16 * PROW * 2,
    SHARED = NEEDED > POSITIONS ? NEEDED : POSITIONS,
    UNITS = TILES * K / 2 // of keys
};
static_assert(WARPS == K, "");

DEV void phase(int number, const Args &a, S s, long image, int block, int warp) {
    const int i0 = block * R - 1;
    if (number == 0) constants(a, s, image, i0, warp);
#if PREV
    if (number == 0) {
        queries(a, s, 0, image, i0, warp);
        pad(s, i0, warp);
    }
    if (number == 1) positions(a, s, 0, image, i0, warp);
    if (number == 2) mix(a, s, 0, MS, MP, 1, R + 1, image, i0, warp);
    if (number == 3) {
        border(s, i0, warp);
        U zero[4] = {un(0), un(0), un(0), un(0)};
        sts128(s, in(ROWS * PITCH * 16) + lane() * in(16), zero, (lane() < in(16)) && (in(warp) == in(0)));
    }
#endif
    if (number == 3) gradients(a, s, image, i0, warp);
#if PREV
    if (number == 4 && warp < R / 2) core(a, s, image, block, warp);
#endif
    if (number == 5) products(a, s, image, block, warp);
    if (number == 6) {
        tables(a, s, image, block, warp);
        fence();
    }
    if (number == 7 && warp == 0) add_one(a.done + image, s, FLAG);
    if (number == 8 && lds_all(s, FLAG) == PARTS - 1) {
        fence();
        if (warp == 0) stg32u(a.done + image, 0, un(0), lane() == in(0));
        LOOP for (int unit = warp; unit < UNITS; unit += WARPS) // trips: UNITS / WARPS / PARTS
            keys(a, image, unit / (K / 2), unit % (K / 2));
    }
}
KERNEL(backward, 9, SHARED, PARTS, 2)
