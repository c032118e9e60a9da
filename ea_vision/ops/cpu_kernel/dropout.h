/* Dropout on the probabilities. Seed, query and key determine whether one is kept: backward repeats forward's draws
 * however the work is split, and nothing is stored. */
#pragma once

#include "vectors.h"

typedef uint32_t uvec __attribute__((vector_size(4 * VL), aligned(4)));

typedef struct {
    int32_t threshold; /* 24 random bits below it drop a probability; 0 without dropout */
    float gain;        /* factor of those kept */
    uint32_t low, high;
} dropout;

typedef struct {
    uint32_t key, salt;
} draws; /* of one query */

/* A bijection whose output bits each depend on all of the input's (Wellons's triple32). */
static uint32_t scramble(uint32_t x) {
    x = (x ^ x >> 17) * 0xed5ad4bbu;
    x = (x ^ x >> 11) * 0xac4c1b51u;
    x = (x ^ x >> 15) * 0x31848babu;
    return x ^ x >> 14;
}

static dropout new_dropout(float p, int64_t seed) {
    const uint32_t low = scramble((uint32_t)seed + scramble((uint64_t)seed >> 32));
    return (dropout){.threshold = p * 16777216.0f + 0.5f, .gain = p < 1 ? 1 / (1 - p) : 0, .low = low,
                     .high = scramble(low ^ (uint32_t)((uint64_t)seed >> 32))};
}

static draws draws_of(const dropout *d, long query) {
    const uint32_t key = scramble((uint32_t)query + d->low);
    return (draws){key, scramble(key ^ d->high)};
}

/* All bits set where the keys j, j + 1, ... are kept. */
INLINE ivec kept(const dropout *d, draws of, int j) {
    uvec x;
    for (int i = 0; i < VL; i++) x[i] = i;
    x += of.key + (uint32_t)j;
    x = (x ^ x >> 16) * 0x7feb352du + of.salt;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x ^= x >> 16;
    return (ivec)(x >> 8) >= d->threshold;
}
