"""The Triton kernels of `ea_vision.ops.triton_attention`, which says how they are put together and why.

Shape letters: K heads, H x W the attention map, N = H*W, D and E widths of q/k and of v, I x J a tile of query and key
pixels; a P after a letter: rounded up to a power of two (at least 16 where a dot product sums over it).

Maps lie in memory as (B, N, N, K), heads innermost: the K heads of a pixel are one aligned vector whatever N is, the
three neighbours of a tap row are one run of 3K numbers, and the head convolution is a matrix product over such runs.
Products are 3-D (heads, ., .) where they are per head. STORE is the maps' dtype, taken from a pointer; OP is the dtype
of dot operands: STORE, but float32 in Triton's interpreter, which cannot compute in bfloat16.

A share is a number, or where it has a ROW the row of `gates` (4, K): alpha, beta, 1 - alpha and 1 - beta by heads.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(
        ptr, stride_head, stride_pixel, stride_width, n,
        N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr, OP: tl.constexpr,
        UNIT: tl.constexpr,
):
    """Pixels n (any number) of one image's (K, N, D) tensor, zeros outside: (KP, n, DP).

    Strides but the last count UNITs of numbers, which tells the compiler how wide it may load.
    """
    head = tl.arange(0, KP)[:, None, None]
    pixel = n[None, :, None]
    d = tl.arange(0, DP)[None, None, :]
    mask = (head < K) & (pixel < N) & (d < D)
    at = (head * stride_head + pixel * stride_pixel) * UNIT + d * stride_width
    return tl.load(ptr + at, mask=mask, other=0.0).to(OP)


@triton.jit
def _store_rows(ptr, n, x, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr):
    """The reverse of `_rows`, for one image of a tensor laid out as (B, N, K, D)."""
    head = tl.arange(0, KP)[:, None, None]
    pixel = n[None, :, None]
    d = tl.arange(0, DP)[None, None, :]
    mask = (head < K) & (pixel < N) & (d < D)
    tl.store(ptr + (pixel * K + head) * D + d, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _map_tile(i, j, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Offsets and mask of a map's tile: (I, J, KP) each."""
    row = i[:, None, None]
    col = j[None, :, None]
    head = tl.arange(0, KP)[None, None, :]
    return (row * N + col) * K + head, (row < N) & (col < N) & (head < K)


@triton.jit
def _tap_row(
        maps, i0, j0, dy: tl.constexpr,
        N: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, RP: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
        OP: tl.constexpr,
):
    """What tap row dy of the convolution sees at each pixel of a tile: (I*J, RP), the columns (dx, head) flat."""
    pixel = tl.arange(0, I * J)[:, None]
    r = tl.arange(0, RP)[None, :]
    y = i0 + pixel // J + (dy - KS // 2)
    x = j0 + pixel % J - KS // 2
    col = x + r // K
    mask = (y >= 0) & (y < N) & (col >= 0) & (col < N) & (r < KS * K)
    return tl.load(maps + (y * N + x) * K + r, mask=mask, other=0.0).to(OP)


@triton.jit
def _weight_row(
        weight, dy: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr,
        STORE: tl.constexpr, OP: tl.constexpr, ADJOINT: tl.constexpr,
):
    """The (K, K, KS, KS) weight as the matrix that `_tap_row`'s columns meet: (RP, KP)."""
    r = tl.arange(0, RP)[:, None]
    to = tl.arange(0, KP)[None, :]
    if ADJOINT:
        at = ((r % K * K + to) * KS + (KS - 1 - dy)) * KS + (KS - 1 - r // K)
    else:
        at = ((to * K + r % K) * KS + dy) * KS + r // K
    return tl.load(weight + at, mask=(r < KS * K) & (to < K), other=0.0).to(STORE).to(OP)


@triton.jit
def _convolve(
        maps, weight, i0, j0,
        N: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr,
        I: tl.constexpr, J: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr, ADJOINT: tl.constexpr,
):
    """Same-padded KS x KS convolution, heads -> heads, of a tile of maps; or its adjoint: (I*J, KP) float32."""
    STORE: tl.constexpr = maps.dtype.element_ty
    out = tl.zeros((I * J, KP), dtype=tl.float32)
    for dy in tl.static_range(KS):
        taps = _tap_row(maps, i0, j0, dy, N, K, KS, RP, I, J, OP)
        w = _weight_row(weight, dy, K, KS, KP, RP, STORE, OP, ADJOINT)
        out = tl.dot(taps, w, out, input_precision=PRECISION)
    return out


@triton.jit
def _bias(bias, K: tl.constexpr, KP: tl.constexpr, STORE: tl.constexpr):
    head = tl.arange(0, KP)
    return tl.load(bias + head, mask=head < K, other=0.0).to(STORE).to(tl.float32)[None, :]


@triton.jit
def _share(number, gates, ROW: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """The number, or a row of `gates` by heads, (1, 1, KP)."""
    if ROW < 0:
        return number
    else:
        head = tl.arange(0, KP)
        return tl.load(gates + ROW * K + head, mask=head < K, other=0.0)[None, None, :]


# Dropout: what is kept is a function of seed, query and key, the one of cpu_kernel/dropout.h.


@triton.jit
def _scramble(x):
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _draws(seed, image, i, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Two numbers for each head and query, (KP, I) each."""
    drawn = tl.load(seed + tl.zeros((1, 1), dtype=tl.int32))
    high_seed = (drawn >> 32).to(tl.uint32)
    low = _scramble(drawn.to(tl.uint32) + _scramble(high_seed))
    high = _scramble(low ^ high_seed)
    query = (image * K + tl.arange(0, KP)[:, None]) * N + i[None, :]
    key = _scramble(query.to(tl.uint32) + low)
    return key, _scramble(key ^ high)


@triton.jit
def _kept(key, salt, j, threshold):
    """Of the draws (KP, I) and keys j (J), True where the probability is kept: (KP, I, J)."""
    x = key[:, :, None] + j[None, None, :].to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D + salt[:, :, None]
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32) >= threshold


@triton.jit
def _table(table, T: tl.constexpr, D: tl.constexpr, TP: tl.constexpr, DP: tl.constexpr, STORE: tl.constexpr,
           OP: tl.constexpr):
    """The position tables (T, D), padded with zeros: (TP, DP)."""
    t = tl.arange(0, TP)[:, None]
    d = tl.arange(0, DP)[None, :]
    return tl.load(table + t * D + d, mask=(t < T) & (d < D), other=0.0).to(STORE).to(OP)


# Positions of a pixel: its row in 0..H-1 and H plus its column in H..H+W-1, so that both axes are one matrix product.
# The tables lie one after the other: offset o of rows at o + H-1, of columns at (2H-1) + o + W-1.


@triton.jit
def _position_products(
        q, table, i, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, SP: tl.constexpr, TP: tl.constexpr,
        STORE: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):
    """q (KP, I, DP) of pixels i, times the embedding of each position s as seen from i: (KP, I, SP).

    Positions from H+W on hold numbers that nothing uses.
    """
    KP: tl.constexpr = q.shape[0]
    I: tl.constexpr = q.shape[1]
    DP: tl.constexpr = q.shape[2]
    t = _table(table, 2 * H + 2 * W - 2, D, TP, DP, STORE, OP)
    by_offset = tl.dot(tl.reshape(q, (KP * I, DP)), tl.trans(t), input_precision=PRECISION)  # (KP*I, TP)
    s = tl.arange(0, SP)[None, :]
    at = tl.where(s < H, s - i[:, None] // W + (H - 1), s - H - i[:, None] % W + (2 * H + W - 2))
    at = tl.minimum(tl.maximum(at, 0), TP - 1)
    at = tl.reshape(tl.broadcast_to(at[None, :, :], (KP, I, SP)), (KP * I, SP))
    return tl.reshape(tl.gather(by_offset, at, 1), (KP, I, SP)).to(STORE).to(OP)


@triton.jit
def _by_offset(
        d_products, i, H: tl.constexpr, W: tl.constexpr, SP: tl.constexpr, TP: tl.constexpr, STORE: tl.constexpr,
        OP: tl.constexpr,
):
    """The adjoint of the reordering in `_position_products`: (KP, I, SP) by position -> (KP*I, TP) by offset."""
    KP: tl.constexpr = d_products.shape[0]
    I: tl.constexpr = d_products.shape[1]
    t = tl.arange(0, TP)[None, :]
    rows = t < 2 * H - 1
    s = tl.where(rows, t + i[:, None] // W - (H - 1), t + i[:, None] % W - (2 * H + W - 2) + H)
    used = ((rows & (s >= 0)) & (s < H)) | (((t >= 2 * H - 1) & (s >= H)) & (s < H + W))
    s = tl.minimum(tl.maximum(s, 0), SP - 1)
    s = tl.reshape(tl.broadcast_to(s[None, :, :], (KP, I, TP)), (KP * I, TP))
    used = tl.reshape(tl.broadcast_to(used[None, :, :], (KP, I, TP)), (KP * I, TP))
    x = tl.gather(tl.reshape(d_products, (KP * I, SP)), s, 1)
    return tl.where(used, x, 0.0).to(STORE).to(OP)


@triton.jit
def _positions(j, H: tl.constexpr, W: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, OP: tl.constexpr):
    """One at both positions of each pixel j, zero elsewhere, the same for each head: (KP, J, SP)."""
    s = tl.arange(0, SP)[None, None, :]
    hot = (j[None, :, None] // W == s) | (j[None, :, None] % W + H == s)
    return tl.broadcast_to(hot, (KP, j.shape[0], SP)).to(OP)


@triton.jit
def evolve(
        q, k, v, table, maps, weight, bias, gates, seed, logits, out, lse,
        q_image, q_head, q_pixel, q_width, k_image, k_head, k_pixel, k_width, v_image, v_head, v_pixel, v_width,
        conv_share, maps_share, own_share, scale, threshold, kept_gain,
        H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, KS: tl.constexpr,
        KP: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr,
        SP: tl.constexpr, TP: tl.constexpr, UNIT: tl.constexpr, UNIT_V: tl.constexpr,
        I: tl.constexpr, J: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
        OWN: tl.constexpr, MAPS: tl.constexpr, CONV: tl.constexpr, RELATIVE: tl.constexpr,
        SAVE: tl.constexpr, ATTEND: tl.constexpr,
        CONV_ROW: tl.constexpr, MAPS_ROW: tl.constexpr, OWN_ROW: tl.constexpr, DROP: tl.constexpr,
):
    """logits = conv_share * relu(conv(maps)) + maps_share * maps + own_share * own; SAVE stores them, ATTEND attends.

    A program: I queries of an image, all heads, all keys by blocks of J. `lse` is the rows' log2 of sum of exp.
    """
    N: tl.constexpr = H * W
    BLOCKS: tl.constexpr = (N + I - 1) // I
    STORE: tl.constexpr = q.dtype.element_ty
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i0 = tl.program_id(0) % BLOCKS * I
    i = i0 + tl.arange(0, I)
    maps += image * (N * N * K)
    logits += image * (N * N * K)
    k += image * k_image * UNIT
    v += image * v_image * UNIT_V
    if OWN:
        qi = _rows(q + image * q_image * UNIT, q_head, q_pixel, q_width, i, N, K, D, KP, DP, OP, UNIT)
        if RELATIVE:
            by_position = _position_products(qi, table, i, H, W, D, SP, TP, STORE, OP, PRECISION)
    conv_gate = _share(conv_share, gates, CONV_ROW, K, KP)
    maps_gate = _share(maps_share, gates, MAPS_ROW, K, KP)
    own_gate = _share(own_share, gates, OWN_ROW, K, KP) * scale
    if ATTEND:
        top = tl.full((KP, I), float("-inf"), dtype=tl.float32)
        total = tl.zeros((KP, I), dtype=tl.float32)
        mean = tl.zeros((KP, I, EP), dtype=tl.float32)
    if DROP:
        key, salt = _draws(seed, image, i, N, K, KP)

    for j0 in range(0, N, J):
        j = j0 + tl.arange(0, J)
        at, inside = _map_tile(i, j, N, K, KP)
        s = tl.zeros((I, J, KP), dtype=tl.float32)
        if CONV:
            z = _convolve(maps, weight, i0, j0, N, K, KS, KP, RP, I, J, OP, PRECISION, False)
            z = tl.maximum(z + _bias(bias, K, KP, STORE), 0.0)
            s += conv_gate * tl.reshape(z, (I, J, KP))
        if MAPS:
            s += maps_gate * tl.load(maps + at, mask=inside, other=0.0).to(tl.float32)
        if OWN:
            kj = _rows(k, k_head, k_pixel, k_width, j, N, K, D, KP, DP, OP, UNIT)
            own = tl.dot(qi, tl.permute(kj, (0, 2, 1)), input_precision=PRECISION)  # (KP, I, J)
            if RELATIVE:
                positions = tl.permute(_positions(j, H, W, KP, SP, OP), (0, 2, 1))
                own = tl.dot(by_position, positions, own, input_precision=PRECISION)
            s += own_gate * tl.permute(own, (1, 2, 0))
        s = s.to(STORE)  # what backward will read: the softmax is of the rounded logits
        if SAVE:
            tl.store(logits + at, s, mask=inside)
        if ATTEND:
            t = tl.permute(s, (2, 0, 1)).to(tl.float32) * LOG2E
            t = tl.where((j < N)[None, None, :], t, float("-inf"))
            new_top = tl.maximum(top, tl.max(t, 2))
            p = tl.exp2(t - new_top[:, :, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 2)
            if DROP:
                p = tl.where(_kept(key, salt, j, threshold), p, 0.0)
            vj = _rows(v, v_head, v_pixel, v_width, j, N, K, E, KP, EP, OP, UNIT_V)
            mean = tl.dot(p.to(STORE).to(OP), vj, mean * shrink[:, :, None], input_precision=PRECISION)
            top = new_top

    if ATTEND:
        if DROP:
            mean *= kept_gain
        _store_rows(out + image * (N * K * E), i, mean / total[:, :, None], N, K, E, KP, EP)
        head = tl.arange(0, KP)[:, None]
        tl.store(lse + image * (K * N) + head * N + i[None, :], top + tl.log2(total),
                 mask=(head < K) & (i[None, :] < N))


@triton.jit
def _grouped(taps, GROUPS: tl.constexpr):
    """(I*J, RP) -> (GROUPS, RP, I*J/GROUPS): sums over pixels are shared among the warps, one group each."""
    PIXELS: tl.constexpr = taps.shape[0]
    RP: tl.constexpr = taps.shape[1]
    return tl.permute(tl.reshape(taps, (GROUPS, PIXELS // GROUPS, RP)), (0, 2, 1))


@triton.jit
def _store_weight_part(ptr, x, dy: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, KP: tl.constexpr,
                       RP: tl.constexpr):
    """x (RP, KP), summed over a program's pixels, to tap row dy of its (K, K, KS, KS) slot."""
    r = tl.arange(0, RP)[:, None]
    to = tl.arange(0, KP)[None, :]
    tl.store(ptr + ((to * K + r % K) * KS + dy) * KS + r // K, x, mask=(r < KS * K) & (to < K))


@triton.jit
def logits_backward(
        v, maps, weight, bias, gates, seed, logits, d_logits, d_out, lse, delta, d_conv, d_maps, d_v, d_weight, d_bias,
        d_gate,
        v_image, v_head, v_pixel, v_width, do_image, do_head, do_pixel, do_width,
        conv_share, maps_share, threshold, kept_gain,
        H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, E: tl.constexpr, KS: tl.constexpr,
        KP: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr,
        I: tl.constexpr, J: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
        UNIT_V: tl.constexpr, UNIT_OUT: tl.constexpr, GROUPS: tl.constexpr,
        MAPS: tl.constexpr, CONV: tl.constexpr, REBUILD: tl.constexpr, FROM_NEXT: tl.constexpr,
        SAVE: tl.constexpr, CONV_ROW: tl.constexpr, MAPS_ROW: tl.constexpr, DROP: tl.constexpr,
):
    """Back through softmax and ReLU. A program: J keys of an image, all heads, all queries by blocks of I.

    With g the gradient of the logits, of the output's and (FROM_NEXT) of the next layer's making, it writes d_v, for
    CONV d_conv = conv_share * g * (conv > 0) and its share of d_weight and d_bias, and for SAVE g itself to d_maps.
    The logits are read, or REBUILD computes them from maps. With a CONV_ROW, d_weight and d_bias are without that
    share, which may be 0, and for MAPS it also writes the heads' sums of g * maps to d_gate, a slot a program.
    """
    N: tl.constexpr = H * W
    BLOCKS: tl.constexpr = (N + J - 1) // J
    STORE: tl.constexpr = v.dtype.element_ty
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    j0 = tl.program_id(0) % BLOCKS * J
    j = j0 + tl.arange(0, J)
    head = tl.arange(0, KP)[:, None]
    maps += image * (N * N * K)
    logits += image * (N * N * K)
    d_logits += image * (N * N * K)
    d_conv += image * (N * N * K)
    d_maps += image * (N * N * K)
    d_out += image * do_image * UNIT_OUT
    lse += image * (K * N)
    delta += image * (K * N)
    vj = _rows(v + image * v_image * UNIT_V, v_head, v_pixel, v_width, j, N, K, E, KP, EP, OP, UNIT_V)
    dv = tl.zeros((KP, J, EP), dtype=tl.float32)
    conv_gate = _share(conv_share, gates, CONV_ROW, K, KP)
    maps_gate = _share(maps_share, gates, MAPS_ROW, K, KP)
    if MAPS_ROW >= 0:
        dg = tl.zeros((I, KP), dtype=tl.float32)
    if CONV:
        db = tl.zeros((KP,), dtype=tl.float32)
        dw0 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)  # a tap row each
        w0 = _weight_row(weight, 0, K, KS, KP, RP, STORE, OP, False)
        if KS == 3:
            w1 = _weight_row(weight, 1, K, KS, KP, RP, STORE, OP, False)
            w2 = _weight_row(weight, 2, K, KS, KP, RP, STORE, OP, False)
            dw1 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)
            dw2 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)

    for i0 in range(0, N, I):
        i = i0 + tl.arange(0, I)
        at, inside = _map_tile(i, j, N, K, KP)
        if CONV:
            taps0 = _tap_row(maps, i0, j0, 0, N, K, KS, RP, I, J, OP)
            z = tl.dot(taps0, w0, input_precision=PRECISION)
            if KS == 3:
                taps1 = _tap_row(maps, i0, j0, 1, N, K, KS, RP, I, J, OP)
                z = tl.dot(taps1, w1, z, input_precision=PRECISION)
                taps2 = _tap_row(maps, i0, j0, 2, N, K, KS, RP, I, J, OP)
                z = tl.dot(taps2, w2, z, input_precision=PRECISION)
            z += _bias(bias, K, KP, STORE)
        if REBUILD:
            s = conv_gate * tl.reshape(tl.maximum(z, 0.0), (I, J, KP))
            if MAPS:
                s += maps_gate * tl.load(maps + at, mask=inside, other=0.0).to(tl.float32)
            s = s.to(STORE)
        else:
            s = tl.load(logits + at, mask=inside, other=0.0)
        row = head * N + i[None, :]
        row_mask = (head < K) & (i[None, :] < N)
        row_lse = tl.load(lse + row, mask=row_mask, other=0.0)
        row_delta = tl.load(delta + row, mask=row_mask, other=0.0)
        do = _rows(d_out, do_head, do_pixel, do_width, i, N, K, E, KP, EP, OP, UNIT_OUT)
        p = tl.exp2(tl.permute(s, (2, 0, 1)).to(tl.float32) * LOG2E - row_lse[:, :, None])
        p = tl.where(row_mask[:, :, None] & (j < N)[None, None, :], p, 0.0)
        seen = p  # by the values
        if DROP:
            key, salt = _draws(seed, image, i, N, K, KP)
            kept = _kept(key, salt, j, threshold)
            seen = tl.where(kept, kept_gain * p, 0.0)
        dv = tl.dot(tl.permute(seen.to(STORE).to(OP), (0, 2, 1)), do, dv, input_precision=PRECISION)
        dp = tl.dot(do, tl.permute(vj, (0, 2, 1)), input_precision=PRECISION)
        if DROP:
            dp = tl.where(kept, kept_gain * dp, 0.0)
        g = tl.permute(p * (dp - row_delta[:, :, None]), (1, 2, 0))  # (I, J, KP)
        if FROM_NEXT:
            g += tl.load(d_logits + at, mask=inside, other=0.0).to(tl.float32)
        if SAVE:
            tl.store(d_maps + at, g.to(STORE), mask=inside)
        if MAPS_ROW >= 0:
            dg += tl.sum(g * tl.load(maps + at, mask=inside, other=0.0).to(tl.float32), 1)
        if CONV:
            if CONV_ROW >= 0:
                dz = tl.where(z > 0.0, tl.reshape(g, (I * J, KP)), 0.0)
                tl.store(d_conv + at, (conv_gate * tl.reshape(dz, (I, J, KP))).to(STORE), mask=inside)
            else:
                dz = tl.where(z > 0.0, conv_gate * tl.reshape(g, (I * J, KP)), 0.0)
            db += tl.sum(dz, 0)
            dz = dz.to(STORE)
            if CONV_ROW < 0:
                tl.store(d_conv + at, tl.reshape(dz, (I, J, KP)), mask=inside)
            dz = tl.reshape(dz.to(OP), (GROUPS, I * J // GROUPS, KP))
            dw0 = tl.dot(_grouped(taps0, GROUPS), dz, dw0, input_precision=PRECISION)
            if KS == 3:
                dw1 = tl.dot(_grouped(taps1, GROUPS), dz, dw1, input_precision=PRECISION)
                dw2 = tl.dot(_grouped(taps2, GROUPS), dz, dw2, input_precision=PRECISION)

    _store_rows(d_v + image * (N * K * E), j, dv, N, K, E, KP, EP)
    if CONV:
        part = tl.program_id(0).to(tl.int64)
        d_weight += part * (K * K * KS * KS)
        _store_weight_part(d_weight, tl.sum(dw0, 0), 0, K, KS, KP, RP)
        if KS == 3:
            _store_weight_part(d_weight, tl.sum(dw1, 0), 1, K, KS, KP, RP)
            _store_weight_part(d_weight, tl.sum(dw2, 0), 2, K, KS, KP, RP)
        to = tl.arange(0, KP)
        tl.store(d_bias + part * K + to, db, mask=to < K)
        if MAPS_ROW >= 0:
            tl.store(d_gate + part * K + to, tl.sum(dg, 0), mask=to < K)


@triton.jit
def queries_backward(
        q, k, table, weight, gates, prev, d_conv, d_logits, d_maps, d_q, d_table, d_gate,
        q_image, q_head, q_pixel, q_width, k_image, k_head, k_pixel, k_width,
        logits_share, maps_share, own_share, scale,
        H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, D: tl.constexpr, KS: tl.constexpr,
        KP: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr,
        SP: tl.constexpr, TP: tl.constexpr, UNIT: tl.constexpr,
        I: tl.constexpr, J: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
        RELATIVE: tl.constexpr, CONV: tl.constexpr, LOGITS: tl.constexpr, OWN_FROM_MAPS: tl.constexpr,
        SAVE: tl.constexpr, LOGITS_ROW: tl.constexpr, OWN_ROW: tl.constexpr, FROM_PREV: tl.constexpr,
):
    """Back through the convolution and the query's side of the dot product. A program: as `evolve`'s.

    With m = adjoint conv(d_conv) [CONV] + logits_share * d_logits [LOGITS], it writes d_maps = maps_share * m [SAVE],
    and the gradients of q and of both tables (a slot a program) from own_share * m, or, where not OWN_FROM_MAPS,
    from own_share * d_logits. With an OWN_ROW also, a slot a program, the gradient of alpha as far as 1 - alpha stands
    before the own logits (which are q times their gradient by q) and alpha before prev [FROM_PREV].
    """
    N: tl.constexpr = H * W
    BLOCKS: tl.constexpr = (N + I - 1) // I
    STORE: tl.constexpr = q.dtype.element_ty
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i0 = tl.program_id(0) % BLOCKS * I
    i = i0 + tl.arange(0, I)
    d_conv += image * (N * N * K)
    d_logits += image * (N * N * K)
    d_maps += image * (N * N * K)
    k += image * k_image * UNIT
    dq = tl.zeros((KP, I, DP), dtype=tl.float32)
    logits_gate = _share(logits_share, gates, LOGITS_ROW, K, KP)
    if OWN_ROW >= 0:
        prev += image * (N * N * K)
        dg = tl.zeros((I, KP), dtype=tl.float32)
    if RELATIVE:
        d_position = tl.zeros((KP, I, SP), dtype=tl.float32)

    for j0 in range(0, N, J):
        j = j0 + tl.arange(0, J)
        at, inside = _map_tile(i, j, N, K, KP)
        m = tl.zeros((I, J, KP), dtype=tl.float32)
        if CONV:
            m += tl.reshape(
                _convolve(d_conv, weight, i0, j0, N, K, KS, KP, RP, I, J, OP, PRECISION, True), (I, J, KP))
        if LOGITS:
            g = tl.load(d_logits + at, mask=inside, other=0.0).to(tl.float32)
            m += logits_gate * g
        if SAVE:
            tl.store(d_maps + at, (maps_share * m).to(STORE), mask=inside)
        if OWN_FROM_MAPS:
            own = tl.where(inside, m, 0.0)  # the adjoint conv reaches one pixel past the edge
        else:
            own = g
        if OWN_ROW < 0:
            own = own_share * own  # else it comes last, since it may be 0
        elif FROM_PREV:
            earlier = tl.load(prev + at, mask=inside, other=0.0).to(tl.float32)
            dg += tl.sum(own * earlier, 1)
        own = own.to(STORE).to(OP)
        own = tl.permute(own, (2, 0, 1))  # (KP, I, J)
        kj = _rows(k, k_head, k_pixel, k_width, j, N, K, D, KP, DP, OP, UNIT)
        dq = tl.dot(own, kj, dq, input_precision=PRECISION)
        if RELATIVE:
            d_position = tl.dot(own, _positions(j, H, W, KP, SP, OP), d_position, input_precision=PRECISION)

    if RELATIVE or OWN_ROW >= 0:
        qi = _rows(q + image * q_image * UNIT, q_head, q_pixel, q_width, i, N, K, D, KP, DP, OP, UNIT)
        own_gate = tl.permute(_share(own_share, gates, OWN_ROW, K, KP), (2, 0, 1)) if OWN_ROW >= 0 else 1.0
        queries = qi
    if RELATIVE:
        T: tl.constexpr = 2 * H + 2 * W - 2
        d_offset = _by_offset(d_position, i, H, W, SP, TP, STORE, OP)  # (KP*I, TP)
        embedding = _table(table, T, D, TP, DP, STORE, OP)
        dq += tl.reshape(tl.dot(d_offset, embedding, input_precision=PRECISION), (KP, I, DP))
        if OWN_ROW >= 0:
            qi = (qi * own_gate).to(STORE).to(OP)
        dt = tl.dot(tl.trans(d_offset), tl.reshape(qi, (KP * I, DP)), input_precision=PRECISION)
        t = tl.arange(0, TP)[:, None]
        d = tl.arange(0, DP)[None, :]
        part = tl.program_id(0).to(tl.int64)
        tl.store(d_table + part * (T * D) + t * D + d, scale * dt, mask=(t < T) & (d < D))
    if OWN_ROW >= 0:
        d_alpha = tl.sum(dg, 0) - scale * tl.sum(tl.sum(queries.to(tl.float32) * dq, 2), 1)
        head = tl.arange(0, KP)
        tl.store(d_gate + tl.program_id(0).to(tl.int64) * K + head, d_alpha, mask=head < K)
        dq = own_gate * dq
    _store_rows(d_q + image * (N * K * D), i, scale * dq, N, K, D, KP, DP)


@triton.jit
def keys_backward(
        q, maps, gates, d_k, q_image, q_head, q_pixel, q_width, share,
        N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr,
        UNIT: tl.constexpr, I: tl.constexpr, J: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
        SHARE_ROW: tl.constexpr, STORED_ROW: tl.constexpr,
):
    """d_k = share * transposed(maps) @ q. A program: J keys of an image, all heads, all queries by blocks of I.

    With a SHARE_ROW, share is times that; with a STORED_ROW, the maps are multiplied by that, in place, when read.
    """
    BLOCKS: tl.constexpr = (N + J - 1) // J
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    j = tl.program_id(0) % BLOCKS * J + tl.arange(0, J)
    maps += image * (N * N * K)
    q += image * q_image * UNIT
    dk = tl.zeros((KP, J, DP), dtype=tl.float32)
    for i0 in range(0, N, I):
        i = i0 + tl.arange(0, I)
        at, inside = _map_tile(i, j, N, K, KP)
        m = tl.load(maps + at, mask=inside, other=0.0)
        if STORED_ROW >= 0:
            stored = _share(1.0, gates, STORED_ROW, K, KP) * m.to(tl.float32)
            tl.store(maps + at, stored.to(m.dtype), mask=inside)
        m = m.to(OP)
        qi = _rows(q, q_head, q_pixel, q_width, i, N, K, D, KP, DP, OP, UNIT)
        dk = tl.dot(tl.permute(m, (2, 1, 0)), qi, dk, input_precision=PRECISION)
    if SHARE_ROW >= 0:
        dk = tl.permute(_share(1.0, gates, SHARE_ROW, K, KP), (2, 0, 1)) * dk
    _store_rows(d_k + image * (N * K * D), j, share * dk, N, K, D, KP, DP)
