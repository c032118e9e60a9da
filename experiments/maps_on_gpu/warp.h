// One source for two machines: on the GPU a "warp value" is a register; on the CPU it is 32 lanes (an
// emulator).
#pragma once
#include <stdint.h>
#ifdef __CUDACC__
typedef float F;
typedef int I;
typedef uint32_t U;
typedef bool P;
#define DEV __device__ __forceinline__
typedef uint32_t S; // shared-memory address
DEV I lane() { return threadIdx.x & 31; }
DEV F fl(float x) { return x; }
DEV I in(int x) { return x; }
DEV U un(uint32_t x) { return x; }
template <class T> DEV T sel(P p, T a, T b) { return p ? a : b; }
DEV I idiv(I a, int b) { return a / b; }
DEV I imod(I a, int b) { return a % b; }
// `c`, known when compiled, becomes a part of the instruction
DEV U ldg32(const uint16_t *b, I e, P p, int c = 0) { return p ? __ldg((const uint32_t *)((b + e) + c)) : 0u; }
DEV void ldg64(const uint16_t *b, I e, int c, U *o) {
    uint2 x = __ldg((const uint2 *)((b + e) + c));
    o[0] = x.x;
    o[1] = x.y;
}
DEV U ldg32o(const uint16_t *b, I e, int c) { return __ldg((const uint32_t *)((b + e) + c)); }
DEV void ldg128(const uint16_t *b, I e, P p, U *o) {
    uint4 x = p ? __ldg((const uint4 *)(b + e)) : make_uint4(0, 0, 0, 0);
    o[0] = x.x;
    o[1] = x.y;
    o[2] = x.z;
    o[3] = x.w;
}
DEV void stg32(uint16_t *b, I e, U x, P p, int c = 0) {
    if (p) *(uint32_t *)((b + e) + c) = x;
}
DEV void stg16(uint16_t *b, I e, U x, P p) {
    if (p) b[e] = (uint16_t)x;
}
DEV void stgf(float *b, I e, F x, P p) {
    if (p) b[e] = x;
}
DEV void sts128(S s, I a, const U *x, P p) {
    if (p)
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(s + a), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                     "r"(x[3])
                     : "memory");
}
DEV void sts32(S s, I a, U x, P p) {
    if (p) asm volatile("st.shared.b32 [%0], %1;" ::"r"(s + a), "r"(x) : "memory");
}
DEV void sts16(S s, I a, U x, P p) {
    if (p) asm volatile("st.shared.b16 [%0], %1;" ::"r"(s + a), "h"((uint16_t)x) : "memory");
}
DEV void ldsm4(S s, I a, U *o) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(o[0]), "=r"(o[1]), "=r"(o[2]), "=r"(o[3])
                 : "r"(s + a)
                 : "memory");
}
DEV void ldsm2(S s, I a, U *o) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(o[0]), "=r"(o[1])
                 : "r"(s + a)
                 : "memory");
}
DEV void ldsm2t(S s, I a, U *o) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(o[0]), "=r"(o[1])
                 : "r"(s + a)
                 : "memory");
}
DEV void ldsm4t(S s, I a, U *o) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(o[0]), "=r"(o[1]), "=r"(o[2]), "=r"(o[3])
                 : "r"(s + a)
                 : "memory");
}
DEV void mma16(F *d, U a0, U a1, U a2, U a3, U b0, U b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma8(F *d, U a0, U a1, U b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
DEV U movm(U x) {
    U y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEV U pack(F lo, F hi) {
    U y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
DEV U packrelu(F lo, F hi) {
    U y;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
DEV F lo(U x) { return __uint_as_float(x << 16); }
DEV F hi(U x) { return __uint_as_float(x & 0xffff0000u); }
DEV U max2(U a, U b) {
    U y;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEV U shx(U x, int m) { return __shfl_xor_sync(~0u, x, m); }
DEV F shx(F x, int m) { return __shfl_xor_sync(~0u, x, m); }
DEV F shi(F x, I l) { return __shfl_sync(~0u, x, l); }
DEV F ex2(F x) {
    F y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV F lg2(F x) { return __log2f(x); }
DEV F rcp(F x) { return __fdividef(1.f, x); }
DEV P has(U x, int bit) { return x >> bit & 1; }
DEV U ballot(P p) { return __ballot_sync(~0u, p); }
DEV U shr(U x, I n) { return x >> n; }
DEV U ldg32u(const uint32_t *b, I e, P p) { return p ? __ldg(b + e) : 0u; }
DEV void stg32u(uint32_t *b, int e, U x, P p) {
    if (p) b[e] = x;
}
DEV F relu(F x) { return fmaxf(x, 0.f); }
DEV F ldf(const float *b, I e) { return __ldg(b + e); }
DEV F ldf(const float *b, I e, P p, int c, float other) { return p ? __ldg((b + e) + c) : other; }
DEV U ldg16(const uint16_t *b, I e, P p, int c = 0) { return p ? (U)__ldg((b + e) + c) : 0u; }
DEV U ld32(const uint16_t *b, I e, P p, int c = 0) { // of what this launch writes
    return p ? *(const uint32_t *)((b + e) + c) : 0u;
}
DEV void stg128(uint16_t *b, I e, const U *x, P p) {
    if (p) *(uint4 *)(b + e) = make_uint4(x[0], x[1], x[2], x[3]);
}
DEV void stsf(S s, I a, F x, P p) {
    if (p) asm volatile("st.shared.f32 [%0], %1;" ::"r"(s + a), "f"(x) : "memory");
}
DEV void ldsf4(S s, I a, F *x) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(s + a)
                 : "memory");
}
DEV U lds16(S s, I a, P p) {
    uint16_t x = 0;
    if (p) asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(s + a) : "memory");
    return x;
}
DEV U lds32(S s, I a, P p) {
    U x = 0;
    if (p) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(s + a) : "memory");
    return x;
}
DEV void fence() { __threadfence(); } // what this thread wrote before is seen before what it writes after
DEV void sync_warp() { __syncwarp(); }
DEV void add_one(uint32_t *count, S s, int a) { // to a counter; the value before into shared memory
    if (lane() == 0) sts32(s, a, atomicAdd(count, 1), true);
}
DEV uint32_t lds_all(S s, int a) { return lds32(s, a, true); } // the same for all lanes
DEV U lows(U a, U b) { return __byte_perm(a, b, 0x5410); }  // the lower halves of a and b
DEV U highs(U a, U b) { return __byte_perm(a, b, 0x7632); } // the upper halves
#else
#include <math.h>
#include <string.h>
#define DEV static inline
#define L for (int l = 0; l < 32; l++)
struct F {
    float v[32];
};
struct P {
    bool v[32];
};
struct U {
    uint32_t v[32];
};
struct I {
    int v[32];
    I() {}
    I(int x) { L v[l] = x; }
};
typedef char *S;
#define OP(T, o)                                                                                             \
    DEV T operator o(T a, T b) {                                                                             \
        T r;                                                                                                 \
        L r.v[l] = a.v[l] o b.v[l];                                                                          \
        return r;                                                                                            \
    }
OP(F, +)
OP(F, -) OP(F, *) OP(I, +) OP(I, -) OP(I, *) OP(I, &) OP(I, |) OP(U, |) OP(U, &) OP(I, ^)
#define SH(o)                                                                                                \
    DEV I operator o(I a, int b) {                                                                           \
        I r;                                                                                                 \
        L r.v[l] = a.v[l] o b;                                                                               \
        return r;                                                                                            \
    }                                                                                                        \
    DEV U operator o(U a, int b) {                                                                           \
        U r;                                                                                                 \
        L r.v[l] = a.v[l] o b;                                                                               \
        return r;                                                                                            \
    }
    SH(<<) SH(>>)
#define CMP(o)                                                                                               \
    DEV P operator o(I a, I b) {                                                                             \
        P r;                                                                                                 \
        L r.v[l] = a.v[l] o b.v[l];                                                                          \
        return r;                                                                                            \
    }
        CMP(<) CMP(>=) CMP(==) CMP(>) DEV P operator&&(P a, P b) {
    P r;
    L r.v[l] = a.v[l] && b.v[l];
    return r;
}
DEV I lane() {
    I r;
    L r.v[l] = l;
    return r;
}
DEV F fl(float x) {
    F r;
    L r.v[l] = x;
    return r;
}
DEV I in(int x) { return I(x); }
DEV U un(uint32_t x) {
    U r;
    L r.v[l] = x;
    return r;
}
template <class T> DEV T sel(P p, T a, T b) {
    T r;
    L r.v[l] = p.v[l] ? a.v[l] : b.v[l];
    return r;
}
DEV I idiv(I a, int b) {
    I r;
    L r.v[l] = a.v[l] / b;
    return r;
}
DEV I imod(I a, int b) {
    I r;
    L r.v[l] = a.v[l] % b;
    return r;
}
DEV U ldg32(const uint16_t *b, I e, P p, int c = 0) {
    U r;
    L {
        r.v[l] = 0;
        if (p.v[l]) memcpy(&r.v[l], b + e.v[l] + c, 4);
    }
    return r;
}
DEV void ldg128(const uint16_t *b, I e, P p, U *o) {
    for (int n = 0; n < 4; n++) L {
            o[n].v[l] = 0;
            if (p.v[l]) memcpy(&o[n].v[l], b + e.v[l] + 2 * n, 4);
        }
}
DEV void ldg64(const uint16_t *b, I e, int c, U *o) {
    for (int n = 0; n < 2; n++) L memcpy(&o[n].v[l], b + e.v[l] + c + 2 * n, 4);
}
DEV U ldg32o(const uint16_t *b, I e, int c) {
    U r;
    L memcpy(&r.v[l], b + e.v[l] + c, 4);
    return r;
}
DEV void stg32(uint16_t *b, I e, U x, P p, int c = 0) { L if (p.v[l]) memcpy(b + e.v[l] + c, &x.v[l], 4); }
DEV void stg16(uint16_t *b, I e, U x, P p) { L if (p.v[l]) b[e.v[l]] = (uint16_t)x.v[l]; }
DEV void stgf(float *b, I e, F x, P p) { L if (p.v[l]) b[e.v[l]] = x.v[l]; }
DEV void sts128(S s, I a, const U *x, P p) {
    for (int n = 0; n < 4; n++) L if (p.v[l]) memcpy(s + a.v[l] + 4 * n, &x[n].v[l], 4);
}
DEV void sts32(S s, I a, U x, P p) { L if (p.v[l]) memcpy(s + a.v[l], &x.v[l], 4); }
DEV void sts16(S s, I a, U x, P p) { L if (p.v[l]) memcpy(s + a.v[l], &x.v[l], 2); }
DEV void ldsm(S s, I a, U *o, int n, bool t) {
    for (int m = 0; m < n; m++) L {
            uint16_t h[2];
            for (int c = 0; c < 2; c++) {
                int r = l / 4, k = 2 * (l % 4) + c;
                int row = t ? k : r, col = t ? r : k;
                memcpy(&h[c], s + a.v[8 * m + row] + 2 * col, 2);
            }
            memcpy(&o[m].v[l], h, 4);
        }
}
DEV void ldsm4(S s, I a, U *o) { ldsm(s, a, o, 4, false); }
DEV void ldsm2(S s, I a, U *o) { ldsm(s, a, o, 2, false); }
DEV void ldsm2t(S s, I a, U *o) { ldsm(s, a, o, 2, true); }
DEV void ldsm4t(S s, I a, U *o) { ldsm(s, a, o, 4, true); }
DEV float bf(uint32_t x, int c) {
    uint32_t w = c ? x & 0xffff0000u : x << 16;
    float f;
    memcpy(&f, &w, 4);
    return f;
}
DEV void mmak(F *d, const U *a, const U *b, int k8) {
    float A[16][16], B[16][8];
    L for (int c = 0; c < 2; c++) for (int kk = 0; kk < k8; kk++) {
        A[l / 4][8 * kk + 2 * (l % 4) + c] = bf(a[2 * kk].v[l], c);
        A[l / 4 + 8][8 * kk + 2 * (l % 4) + c] = bf(a[2 * kk + 1].v[l], c);
        B[8 * kk + 2 * (l % 4) + c][l / 4] = bf(b[kk].v[l], c);
    }
    L for (int e = 0; e < 4; e++) {
        float s = d[e].v[l];
        for (int k = 0; k < 8 * k8; k++) s += A[l / 4 + 8 * (e / 2)][k] * B[k][2 * (l % 4) + e % 2];
        d[e].v[l] = s;
    }
}
DEV void mma16(F *d, U a0, U a1, U a2, U a3, U b0, U b1) {
    U a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    mmak(d, a, b, 2);
}
DEV void mma8(F *d, U a0, U a1, U b0) {
    U a[2] = {a0, a1};
    mmak(d, a, &b0, 1);
}
DEV U movm(U x) {
    U r;
    L {
        uint32_t w = 0;
        for (int c = 0; c < 2; c++) {
            int row = 2 * (l % 4) + c, col = l / 4;
            w |= ((x.v[row * 4 + col / 2] >> (16 * (col % 2))) & 0xffff) << (16 * c);
        }
        r.v[l] = w;
    }
    return r;
}
DEV uint32_t rn(float f) {
    uint32_t w;
    memcpy(&w, &f, 4);
    return (w + 0x7fff + ((w >> 16) & 1)) >> 16;
}
DEV U pack(F a, F b) {
    U r;
    L r.v[l] = rn(a.v[l]) | rn(b.v[l]) << 16;
    return r;
}
DEV F lo(U x) {
    F r;
    L r.v[l] = bf(x.v[l], 0);
    return r;
}
DEV F hi(U x) {
    F r;
    L r.v[l] = bf(x.v[l], 1);
    return r;
}
DEV U max2(U a, U b) {
    U r;
    L r.v[l] = rn(fmaxf(bf(a.v[l], 0), bf(b.v[l], 0))) | rn(fmaxf(bf(a.v[l], 1), bf(b.v[l], 1))) << 16;
    return r;
}
DEV U shx(U x, int m) {
    U r;
    L r.v[l] = x.v[l ^ m];
    return r;
}
DEV F shx(F x, int m) {
    F r;
    L r.v[l] = x.v[l ^ m];
    return r;
}
DEV F shi(F x, I k) {
    F r;
    L r.v[l] = x.v[k.v[l]];
    return r;
}
DEV F ex2(F x) {
    F r;
    L r.v[l] = exp2f(x.v[l]);
    return r;
}
DEV F lg2(F x) {
    F r;
    L r.v[l] = log2f(x.v[l]);
    return r;
}
DEV F rcp(F x) {
    F r;
    L r.v[l] = 1 / x.v[l];
    return r;
}
DEV P operator>(F a, F b) {
    P r;
    L r.v[l] = a.v[l] > b.v[l];
    return r;
}
DEV F relu(F x) {
    F r;
    L r.v[l] = x.v[l] < 0 ? 0 : x.v[l]; // NaN stays
    return r;
}
DEV P has(U x, int bit) {
    P r;
    L r.v[l] = x.v[l] >> bit & 1;
    return r;
}
DEV U packrelu(F a, F b) { return pack(relu(a), relu(b)); }
DEV U ballot(P p) {
    uint32_t bits = 0;
    L bits |= (uint32_t)p.v[l] << l;
    return un(bits);
}
DEV U shr(U x, I n) {
    U r;
    L r.v[l] = x.v[l] >> n.v[l];
    return r;
}
DEV U ldg32u(const uint32_t *b, I e, P p) {
    U r;
    L r.v[l] = p.v[l] ? b[e.v[l]] : 0;
    return r;
}
DEV void stg32u(uint32_t *b, int e, U x, P p) { L if (p.v[l]) b[e] = x.v[l]; }
DEV F ldf(const float *b, I e, P p, int c, float other) {
    F r;
    L r.v[l] = p.v[l] ? b[e.v[l] + c] : other;
    return r;
}
DEV F ldf(const float *b, I e) { return ldf(b, e, e >= in(-1 << 30), 0, 0); }
DEV U ldg16(const uint16_t *b, I e, P p, int c = 0) {
    U r;
    L r.v[l] = p.v[l] ? b[e.v[l] + c] : 0;
    return r;
}
DEV U ld32(const uint16_t *b, I e, P p, int c = 0) { return ldg32(b, e, p, c); }
DEV void stg128(uint16_t *b, I e, const U *x, P p) {
    for (int n = 0; n < 4; n++) L if (p.v[l]) memcpy(b + e.v[l] + 2 * n, &x[n].v[l], 4);
}
DEV void stsf(S s, I a, F x, P p) { L if (p.v[l]) memcpy(s + a.v[l], &x.v[l], 4); }
DEV void ldsf4(S s, I a, F *x) {
    for (int n = 0; n < 4; n++) L memcpy(&x[n].v[l], s + a.v[l] + 4 * n, 4);
}
DEV U lds16(S s, I a, P p) {
    U r;
    L {
        uint16_t h = 0;
        if (p.v[l]) memcpy(&h, s + a.v[l], 2);
        r.v[l] = h;
    }
    return r;
}
DEV U lds32(S s, I a, P p) {
    U r;
    L {
        r.v[l] = 0;
        if (p.v[l]) memcpy(&r.v[l], s + a.v[l], 4);
    }
    return r;
}
DEV void fence() {}
DEV void sync_warp() {}
DEV void add_one(uint32_t *count, S s, int a) {
    memcpy(s + a, count, 4);
    ++*count;
}
DEV uint32_t lds_all(S s, int a) { return lds32(s, in(a), in(0) == in(0)).v[0]; }
DEV U lows(U a, U b) { return (a & un(0xffffu)) | (b << 16); }
DEV U highs(U a, U b) { return (a >> 16) | (b & un(0xffff0000u)); }
#endif
