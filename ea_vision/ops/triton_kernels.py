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
from triton.language import constexpr

LOG2E = constexpr(1.4426950408889634)


@triton.jit
def _block(N: constexpr, SIDE: constexpr):
    """Return image and first pixel of a program, of which there is one for SIDE of the N pixels of an image."""
    BLOCKS: constexpr = (N + SIDE - 1) // SIDE
    return (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS * SIDE


@triton.jit
def _rows(
        ptr, stride_head, stride_pixel, stride_width, n,
        N: constexpr, K: constexpr, D: constexpr, KP: constexpr, DP: constexpr, OP: constexpr,
        UNIT: constexpr,
):
    """Load pixels n (any number) of one image's (K, N, D) tensor, zeros outside: (KP, n, DP).

    Strides but the last count UNITs of numbers, which tells the compiler how wide it may load.
    """
    head = tl.arange(0, KP)[:, None, None]
    pixel = n[None, :, None]
    d = tl.arange(0, DP)[None, None, :]
    mask = (head < K) & (pixel < N) & (d < D)
    at = (head * stride_head + pixel * stride_pixel) * UNIT + d * stride_width
    return tl.load(ptr + at, mask=mask, other=0.0).to(OP)


# What one warp loads and another needs goes through shared memory, behind two barriers. A load of rows gives C rows in
# a line to a warp, C to the next, and so on, and a product has its heads, or groups of pixels, lie by warps. So rows
# are loaded in the order in which each warp gets its own, and put into theirs in registers. Any C gives one result.


@triton.jit
def _rows_by_warps(
        ptr, stride_head, stride_pixel, stride_width, n0,
        N: constexpr, K: constexpr, D: constexpr, KP: constexpr, DP: constexpr, OP: constexpr,
        UNIT: constexpr, I: constexpr,
):
    """Load pixels n0 to n0 + I - 1 of one image's (K, N, D) tensor, zeros outside: (KP, I, DP)."""
    C: constexpr = min(I, max(1, 32 * UNIT // DP))
    row = tl.arange(0, KP * I)[:, None]
    head = row // C % KP
    pixel = n0 + row // (C * KP) * C + row % C
    d = tl.arange(0, DP)[None, :]
    mask = (head < K) & (pixel < N) & (d < D)
    at = (head * stride_head + pixel * stride_pixel) * UNIT + d * stride_width
    x = tl.load(ptr + at, mask=mask, other=0.0).to(OP)
    return tl.reshape(tl.permute(tl.reshape(x, (I // C, KP, C, DP)), (1, 0, 2, 3)), (KP, I, DP))


@triton.jit
def _store_rows(ptr, n, x, N: constexpr, K: constexpr, D: constexpr, KP: constexpr, DP: constexpr):
    """Store what `_rows` loads, for one image of a tensor laid out as (B, N, K, D)."""
    head = tl.arange(0, KP)[:, None, None]
    pixel = n[None, :, None]
    d = tl.arange(0, DP)[None, None, :]
    mask = (head < K) & (pixel < N) & (d < D)
    tl.store(ptr + (pixel * K + head) * D + d, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _map_tile(i, j, N: constexpr, K: constexpr, KP: constexpr):
    """Return offsets and mask of a map's tile: (I, J, KP) each."""
    row = i[:, None, None]
    col = j[None, :, None]
    head = tl.arange(0, KP)[None, None, :]
    return (row * N + col) * K + head, (row < N) & (col < N) & (head < K)


@triton.jit
def _flat_tile(i0, j0, N: constexpr, K: constexpr, KP: constexpr, I: constexpr, J: constexpr):
    """Return, of a tile whose pixels are one axis, offsets (I*J, KP), and rows and columns of the map (I*J, 1)."""
    pixel = tl.arange(0, I * J)[:, None]
    row = i0 + pixel // J
    col = j0 + pixel % J
    return (row * N + col) * K + tl.arange(0, KP)[None, :], row, col


@triton.jit
def _tap_row(
        maps, pixel, i0, j0, dy: constexpr,
        N: constexpr, K: constexpr, KS: constexpr, RP: constexpr, PREFIX: constexpr,
        J: constexpr, OP: constexpr, NEAR: constexpr,
):
    """Load what the convolution's tap row dy sees at pixels (X, 1) of a tile: (X, RP), the columns (dx, head) flat.

    NEAR: all tap rows share their addresses, from which they are a number away that the compiler knows.
    """
    r = tl.arange(0, RP)[None, :]
    y = i0 + pixel // J
    x = j0 + pixel % J - KS // 2
    col = x + r // K
    tap_y = y + (dy - KS // 2)
    mask = (tap_y >= PREFIX) & (tap_y < N) & (col >= PREFIX) & (col < N) & (r < KS * K)
    if NEAR:
        at = maps + (dy - KS // 2) * N * K + ((y * N + x) * K + r)
    else:
        at = maps + (tap_y * N + x) * K + r
    return tl.load(at, mask=mask, other=0.0).to(OP)


@triton.jit
def _among_patches(i, j, PREFIX: constexpr):
    """Return where the convolution runs, (I, J, 1)."""
    return (i >= PREFIX)[:, None, None] & (j >= PREFIX)[None, :, None]


@triton.jit
def _weight_row(
        weight, w_to, w_from, w_y, w_x, gates, dy: constexpr,
        K: constexpr, KS: constexpr, KP: constexpr, RP: constexpr,
        STORE: constexpr, OP: constexpr, ADJOINT: constexpr, ROW: constexpr,
):
    """Load the (K, K, KS, KS) weight as the matrix for `_tap_row`'s columns, these times a row of gates: (RP, KP)."""
    r = tl.arange(0, RP)[:, None]
    to = tl.arange(0, KP)[None, :]
    if ADJOINT:
        at = r % K * w_to + to * w_from + (KS - 1 - dy) * w_y + (KS - 1 - r // K) * w_x
    else:
        at = to * w_to + r % K * w_from + dy * w_y + r // K * w_x
    w = tl.load(weight + at, mask=(r < KS * K) & (to < K), other=0.0).to(STORE)
    if ROW >= 0:
        w = (w.to(tl.float32) * tl.load(gates + ROW * K + r % K)).to(STORE)
    return w.to(OP)


@triton.jit
def _convolve(
        maps, weight, w_to, w_from, w_y, w_x, gates, i0, j0,
        N: constexpr, K: constexpr, KS: constexpr, KP: constexpr, RP: constexpr, PREFIX: constexpr,
        I: constexpr, J: constexpr, OP: constexpr, PRECISION: constexpr, SPLIT: constexpr,
        ADJOINT: constexpr, ROW: constexpr,
):
    """Convolve a tile of maps, KS x KS, same-padded, heads -> heads, or by the adjoint: (I*J, KP) float32.

    The maps are first multiplied by that ROW of gates, unless it is -1.
    """
    STORE: constexpr = maps.dtype.element_ty
    out = tl.zeros((I * J, KP), dtype=tl.float32)
    pixel = tl.arange(0, I * J)[:, None]
    for dy in tl.static_range(KS):
        taps = _tap_row(maps, pixel, i0, j0, dy, N, K, KS, RP, PREFIX, J, OP, False)
        w = _weight_row(weight, w_to, w_from, w_y, w_x, gates, dy, K, KS, KP, RP, STORE, OP, ADJOINT, ROW)
        out += _product(taps, w, SPLIT, PRECISION)
    return out


@triton.jit
def _bias(bias, K: constexpr, KP: constexpr, STORE: constexpr):
    head = tl.arange(0, KP)
    return tl.load(bias + head, mask=head < K, other=0.0).to(STORE).to(tl.float32)[None, :]


@triton.jit
def _share(number, gates, ROW: constexpr, K: constexpr, KP: constexpr):
    """Return the number, or a row of `gates` by heads, (1, 1, KP)."""
    if ROW < 0:
        return number
    else:
        head = tl.arange(0, KP)
        return tl.load(gates + ROW * K + head, mask=head < K, other=0.0)[None, None, :]


@triton.jit
def _product(a, b, SPLIT: constexpr, PRECISION: constexpr):
    """Return a (M, X) @ b (X, N) in float32. SPLIT: by groups of 32 rows, see `triton_attention.BY_GROUPS`."""
    M: constexpr = a.shape[0]
    X: constexpr = a.shape[1]
    Y: constexpr = b.shape[1]
    if SPLIT and M > 32:
        groups = tl.reshape(a, (M // 32, 32, X))
        shared = tl.broadcast_to(tl.reshape(b, (1, X, Y)), (M // 32, X, Y))
        return tl.reshape(tl.dot(groups, shared, input_precision=PRECISION), (M, Y))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


# Dropout: what is kept is a function of seed, query and key, the one of cpu_kernel/dropout.h.


@triton.jit
def _scramble(x):
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _draws(seed, image, i, N: constexpr, K: constexpr, KP: constexpr):
    """Draw two numbers for each head and query, (KP, I) each."""
    drawn = tl.load(seed + tl.zeros((1, 1), dtype=tl.int32))
    high_seed = (drawn >> 32).to(tl.uint32)
    low = _scramble(drawn.to(tl.uint32) + _scramble(high_seed))
    high = _scramble(low ^ high_seed)
    query = (image * K + tl.arange(0, KP)[:, None]) * N + i[None, :]
    key = _scramble(query.to(tl.uint32) + low)
    return key, _scramble(key ^ high)


@triton.jit
def _kept(key, salt, j, threshold):
    """Return True where draws and keys j, which broadcast to (KP, I, J) in any order, keep the probability."""
    x = key + j.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D + salt
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32) >= threshold


@triton.jit
def _table(height_rel, width_rel, H: constexpr, W: constexpr, D: constexpr, TP: constexpr,
           DP: constexpr, STORE: constexpr, OP: constexpr):
    """Load the position tables (2H-1, D) and (2W-1, D), one after the other, padded with zeros: (TP, DP)."""
    t = tl.arange(0, TP)[:, None]
    d = tl.arange(0, DP)[None, :]
    rows = tl.load(height_rel + t * D + d, mask=(t < 2 * H - 1) & (d < D), other=0.0)
    t -= 2 * H - 1
    columns = tl.load(width_rel + t * D + d, mask=(t >= 0) & (t < 2 * W - 1) & (d < D), other=0.0)
    return (rows + columns).to(STORE).to(OP)


# Positions of a pixel: its row in 0..H-1 and H plus its column in H..H+W-1, so that both axes are one matrix product.
# The tables lie one after the other: offset o of rows at o + H-1, of columns at (2H-1) + o + W-1.


@triton.jit
def _position_products(
        q, height_rel, width_rel, i, H: constexpr, W: constexpr, D: constexpr, SP: constexpr,
        TP: constexpr, STORE: constexpr, OP: constexpr, PRECISION: constexpr, SPLIT: constexpr,
):
    """Multiply q (KP, I, DP) of pixels i by the embedding of each position s as seen from i: (KP, I, SP).

    Positions from H+W on hold numbers that nothing uses.
    """
    KP: constexpr = q.shape[0]
    I: constexpr = q.shape[1]
    DP: constexpr = q.shape[2]
    t = _table(height_rel, width_rel, H, W, D, TP, DP, STORE, OP)
    by_offset = _product(tl.reshape(q, (KP * I, DP)), tl.trans(t), SPLIT, PRECISION)  # (KP*I, TP)
    s = tl.arange(0, SP)[None, :]
    at = tl.where(s < H, s - i[:, None] // W + (H - 1), s - H - i[:, None] % W + (2 * H + W - 2))
    at = tl.minimum(tl.maximum(at, 0), TP - 1)
    at = tl.reshape(tl.broadcast_to(at[None, :, :], (KP, I, SP)), (KP * I, SP))
    return tl.reshape(tl.gather(by_offset, at, 1), (KP, I, SP)).to(STORE).to(OP)


@triton.jit
def _by_offset(
        d_products, i, H: constexpr, W: constexpr, SP: constexpr, TP: constexpr, STORE: constexpr,
        OP: constexpr,
):
    """Undo the reordering of `_position_products`, by its adjoint: (KP, I, SP) by position -> (KP*I, TP) by offset."""
    KP: constexpr = d_products.shape[0]
    I: constexpr = d_products.shape[1]
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
def _positions(j0, J: constexpr, H: constexpr, W: constexpr, KP: constexpr, SP: constexpr,
               OP: constexpr):
    """Return one at both positions of each pixel from j0 on, zero elsewhere, the same for each head: (KP, SP, J)."""
    s = tl.arange(0, SP)[None, :, None]
    j = j0 + tl.arange(0, J)[None, None, :]
    hot = (j // W == s) | (j % W + H == s)
    return tl.broadcast_to(hot, (KP, SP, J)).to(OP)


@triton.jit
def _own(qi, by_position, k, k_head, k_pixel, k_width, j0, J: constexpr,
         H: constexpr, W: constexpr, K: constexpr, D: constexpr, KP: constexpr, DP: constexpr,
         SP: constexpr, UNIT: constexpr, OP: constexpr, PRECISION: constexpr, RELATIVE: constexpr):
    """Return q times keys and, RELATIVE, positions, without the scale: (KP, I, J)."""
    kj = _rows_by_warps(k, k_head, k_pixel, k_width, j0, H * W, K, D, KP, DP, OP, UNIT, J)
    own = tl.dot(qi, tl.permute(kj, (0, 2, 1)), input_precision=PRECISION)
    if RELATIVE:
        positions = _positions(j0, J, H, W, KP, SP, OP)
        own = tl.dot(by_position, positions, own, input_precision=PRECISION)
    return own


@triton.jit
def evolve(
        q, k, v, height_rel, width_rel, maps, weight, bias, gates, seed, logits, signs, out, lse,
        w_to, w_from, w_y, w_x, q_image, q_head, q_pixel, q_width, k_image, k_head, k_pixel, k_width,
        v_image, v_head, v_pixel, v_width, conv_share, maps_share, own_share, scale, threshold, kept_gain,
        H: constexpr, W: constexpr, K: constexpr, D: constexpr, E: constexpr, KS: constexpr,
        KP: constexpr, DP: constexpr, EP: constexpr, RP: constexpr, PREFIX: constexpr,
        SP: constexpr, TP: constexpr, UNIT: constexpr, UNIT_V: constexpr,
        I: constexpr, J: constexpr, OP: constexpr, PRECISION: constexpr, SPLIT: constexpr,
        OWN: constexpr, MAPS: constexpr, CONV: constexpr, RELATIVE: constexpr,
        SAVE: constexpr, SIGNS: constexpr, ATTEND: constexpr,
        CONV_ROW: constexpr, MAPS_ROW: constexpr, OWN_ROW: constexpr, DROP: constexpr,
):
    """Form conv_share * relu(conv(maps)) + maps_share * maps + own_share * own; SAVE stores them, ATTEND attends.

    In rows and columns of the first PREFIX tokens maps take the place of relu(conv(maps)), and the convolution does
    not see them. SIGNS stores a bit a head where the gradient passes. A program: I queries of an image, all heads, all
    keys by blocks of J. `lse` is the rows' log2 of sum of exp.
    """
    N: constexpr = H * W
    STORE: constexpr = q.dtype.element_ty
    image, i0 = _block(N, I)
    i = i0 + tl.arange(0, I)
    maps += image * (N * N * K)
    logits += image * (N * N * K)
    signs += image * (N * N)
    k += image * k_image * UNIT
    v += image * v_image * UNIT_V
    if OWN:
        qi = _rows(q + image * q_image * UNIT, q_head, q_pixel, q_width, i, N, K, D, KP, DP, OP, UNIT)
        by_position = qi
        if RELATIVE:
            by_position = _position_products(qi, height_rel, width_rel, i, H, W, D, SP, TP, STORE, OP, PRECISION, SPLIT)
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
        if MAPS or (CONV and PREFIX > 0):
            here = tl.load(maps + at, mask=inside, other=0.0).to(tl.float32)
        if CONV:
            z = _convolve(maps, weight, w_to, w_from, w_y, w_x, gates, i0, j0, N, K, KS, KP, RP, PREFIX, I, J, OP,
                          PRECISION, SPLIT, False, -1)
            z = tl.reshape(z + _bias(bias, K, KP, STORE), (I, J, KP))
            passes = z > 0.0
            z = tl.maximum(z, 0.0)
            if PREFIX > 0:
                patches = _among_patches(i, j, PREFIX)
                passes = passes | (patches == 0)
                z = tl.where(patches, z, here)
            s += conv_gate * z
            if SIGNS:
                head = tl.arange(0, KP)[None, None, :]
                bits = tl.sum(tl.where(passes, tl.full((I, J, KP), 1, tl.int32) << head, 0), 2)
                tl.store(signs + i[:, None] * N + j[None, :], bits.to(signs.dtype.element_ty),
                         mask=(i[:, None] < N) & (j[None, :] < N))
        if MAPS:
            s += maps_gate * here
        if OWN:
            own = _own(qi, by_position, k, k_head, k_pixel, k_width, j0, J, H, W, K, D, KP, DP, SP, UNIT, OP, PRECISION,
                       RELATIVE)
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
                p = tl.where(_kept(key[:, :, None], salt[:, :, None], j[None, None, :], threshold), p, 0.0)
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
def row_products(
        out, d_out, delta, do_image, do_head, do_pixel, do_width,
        N: constexpr, K: constexpr, E: constexpr, KP: constexpr, EP: constexpr,
        UNIT_OUT: constexpr, I: constexpr,
):
    """Store delta (B, K, N), the sum over E of out * d_out. A program: I pixels of an image, all heads."""
    image, i0 = _block(N, I)
    i = i0 + tl.arange(0, I)
    x = _rows(out + image * (N * K * E), E, K * E, 1, i, N, K, E, KP, EP, tl.float32, 1)
    dx = _rows(d_out + image * do_image * UNIT_OUT, do_head, do_pixel, do_width, i, N, K, E, KP, EP, tl.float32,
               UNIT_OUT)
    head = tl.arange(0, KP)[:, None]
    tl.store(delta + image * (K * N) + head * N + i[None, :], tl.sum(x * dx, 2), mask=(head < K) & (i[None, :] < N))


@triton.jit
def logits_backward(
        v, seed, logits, signs, d_logits, d_out, lse, delta, d_conv, d_maps, d_v, d_bias,
        v_image, v_head, v_pixel, v_width, do_image, do_head, do_pixel, do_width,
        conv_share, threshold, kept_gain,
        H: constexpr, W: constexpr, K: constexpr, E: constexpr,
        KP: constexpr, EP: constexpr, PREFIX: constexpr,
        I: constexpr, J: constexpr, OP: constexpr, PRECISION: constexpr,
        UNIT_V: constexpr, UNIT_OUT: constexpr,
        CONV: constexpr, SIGNS: constexpr, FROM_NEXT: constexpr,
        SAVE: constexpr, CONV_ROW: constexpr, DROP: constexpr,
):
    """Go back through softmax and ReLU. A program: J keys of an image, all heads, all queries by blocks of I.

    With g the gradient of the logits, of the output's and (FROM_NEXT) of the next layer's making, it writes d_v, for
    CONV d_conv = conv_share * g where the ReLU passes it (with a CONV_ROW without the share, which may be 0), a slot a
    program of that's sum, d_bias, and for SAVE g itself to d_maps. The ReLU passes where `signs` has a bit, or
    without SIGNS where the logits, which then are the ReLU's, are positive.
    """
    N: constexpr = H * W
    STORE: constexpr = v.dtype.element_ty
    image, j0 = _block(N, J)
    j = j0 + tl.arange(0, J)
    head = tl.arange(0, KP)[:, None]
    logits += image * (N * N * K)
    signs += image * (N * N)
    d_logits += image * (N * N * K)
    d_conv += image * (N * N * K)
    d_maps += image * (N * N * K)
    d_out += image * do_image * UNIT_OUT
    lse += image * (K * N)
    delta += image * (K * N)
    vj = _rows(v + image * v_image * UNIT_V, v_head, v_pixel, v_width, j, N, K, E, KP, EP, OP, UNIT_V)
    dv = tl.zeros((KP, J, EP), dtype=tl.float32)
    if CONV:
        db = tl.zeros((I, J, KP), dtype=tl.float32)

    for i0 in range(0, N, I):
        i = i0 + tl.arange(0, I)
        at, inside = _map_tile(i, j, N, K, KP)
        s = tl.load(logits + at, mask=inside, other=0.0)
        row = head * N + i[None, :]
        row_mask = (head < K) & (i[None, :] < N)
        row_lse = tl.load(lse + row, mask=row_mask, other=float("inf"))  # so that p is 0 there
        row_delta = tl.load(delta + row, mask=row_mask, other=0.0)
        do = _rows(d_out, do_head, do_pixel, do_width, i, N, K, E, KP, EP, OP, UNIT_OUT)
        # Keys before queries: what leaves one product enters the other as it lies in registers
        p = tl.exp2(tl.permute(s, (2, 1, 0)).to(tl.float32) * LOG2E - row_lse[:, None, :])  # (KP, J, I)
        dp = tl.dot(vj, tl.permute(do, (0, 2, 1)), input_precision=PRECISION)
        seen = p  # by the values
        if DROP:
            key, salt = _draws(seed, image, i, N, K, KP)
            kept = _kept(key[:, None, :], salt[:, None, :], j[None, :, None], threshold)
            seen = tl.where(kept, kept_gain * p, 0.0)
            dp = tl.where(kept, kept_gain * dp, 0.0)
        dv = tl.dot(seen.to(STORE).to(OP), do, dv, input_precision=PRECISION)
        g = tl.permute(p * (dp - row_delta[:, None, :]), (2, 1, 0))  # (I, J, KP)
        if FROM_NEXT:
            g += tl.load(d_logits + at, mask=inside, other=0.0).to(tl.float32)
        if SAVE:
            tl.store(d_maps + at, g.to(STORE), mask=inside)
        if CONV:
            if SIGNS:
                bits = tl.load(signs + i[:, None, None] * N + j[None, :, None],
                               mask=(i[:, None, None] < N) & (j[None, :, None] < N), other=0).to(tl.int32)
                dz = tl.where((bits >> tl.arange(0, KP)[None, None, :]) & 1 != 0, g, 0.0)
            else:
                dz = tl.where(s > 0.0, g, 0.0)
            if CONV_ROW < 0:
                dz = conv_share * dz
            if PREFIX > 0:
                db += tl.where(_among_patches(i, j, PREFIX), dz, 0.0)
            else:
                db += dz
            tl.store(d_conv + at, dz.to(STORE), mask=inside)

    _store_rows(d_v + image * (N * K * E), j, dv, N, K, E, KP, EP)
    if CONV:
        to = tl.arange(0, KP)
        tl.store(d_bias + tl.program_id(0).to(tl.int64) * K + to, tl.sum(tl.reshape(db, (I * J, KP)), 0), mask=to < K)


@triton.jit
def _grouped(x, GROUPS: constexpr):
    """Split (pixels, X) into (GROUPS, pixels/GROUPS, X): sums over pixels are shared among the warps."""
    PIXELS: constexpr = x.shape[0]
    return tl.reshape(x, (GROUPS, PIXELS // GROUPS, x.shape[1]))


@triton.jit
def _add_weight_part(
        dw, d_conv, i0, j0, dy: constexpr, m,
        N: constexpr, K: constexpr, KS: constexpr, RP: constexpr, PREFIX: constexpr,
        I: constexpr, J: constexpr, OP: constexpr, PRECISION: constexpr,
):
    """Add to dw (GROUPS, RP, KP) what the adjoint's tap row dy sees at each pixel, times m (GROUPS, pixels, KP)."""
    GROUPS: constexpr = m.shape[0]
    BITS: constexpr = d_conv.dtype.element_ty.primitive_bitwidth
    # Rows are dealt out to the groups' warps as in _rows_by_warps
    C: constexpr = max(1, min(m.shape[1], 32 * min(K & -K, 128 // BITS) // RP))
    RUNS: constexpr = m.shape[1] // C
    row = tl.arange(0, I * J)[:, None]
    pixel = (row // C % GROUPS * RUNS + row // (C * GROUPS)) * C + row % C
    taps = tl.reshape(_tap_row(d_conv, pixel, i0, j0, dy, N, K, KS, RP, PREFIX, J, OP, True), (RUNS, GROUPS, C, RP))
    taps = tl.reshape(tl.permute(taps, (1, 0, 2, 3)), (GROUPS, RUNS * C, RP))
    return tl.dot(tl.permute(taps, (0, 2, 1)), m, dw, input_precision=PRECISION)


@triton.jit
def _store_weight_part(ptr, x, w_to, w_from, w_y, w_x, dy: constexpr, K: constexpr, KS: constexpr,
                       KP: constexpr, RP: constexpr):
    """Store x (GROUPS, RP, KP), what the adjoint's tap row dy met, in a program's (K, K, KS, KS) slot."""
    r = tl.arange(0, RP)[:, None]
    to = tl.arange(0, KP)[None, :]
    at = r % K * w_to + to * w_from + (KS - 1 - dy) * w_y + (KS - 1 - r // K) * w_x
    tl.store(ptr + at, tl.sum(x, 0), mask=(r < KS * K) & (to < K))


@triton.jit
def weight_backward(
        q, k, height_rel, width_rel, gates, prev, d_conv, d_logits, d_weight, d_beta,
        part_stride, w_to, w_from, w_y, w_x, q_image, q_head, q_pixel, q_width, k_image, k_head, k_pixel, k_width,
        prev_share, own_share, scale,
        H: constexpr, W: constexpr, K: constexpr, D: constexpr, KS: constexpr,
        KP: constexpr, DP: constexpr, RP: constexpr, PREFIX: constexpr,
        SP: constexpr, TP: constexpr, UNIT: constexpr, GROUPS: constexpr,
        I: constexpr, J: constexpr, OP: constexpr, PRECISION: constexpr, SPLIT: constexpr,
        RELATIVE: constexpr, MIXES: constexpr, PREV_ROW: constexpr, OWN_ROW: constexpr,
        BETA: constexpr,
):
    """Store the gradient of the convolution's weight, a slot a program, of which there are as many as of `evolve`.

    What the convolution took is prev_share * prev + own_share * own [MIXES], computed again, or prev. BETA: also, a
    slot a program, what 1 - beta before the maps gives to beta's gradient, which are those that the convolution took.
    """
    N: constexpr = H * W
    STORE: constexpr = q.dtype.element_ty
    image, i0 = _block(N, I)
    i = i0 + tl.arange(0, I)
    prev += image * (N * N * K)
    d_conv += image * (N * N * K)
    d_logits += image * (N * N * K)
    k += image * k_image * UNIT
    prev_gate = _share(prev_share, gates, PREV_ROW, K, KP)
    if PREV_ROW >= 0:
        prev_gate = tl.reshape(prev_gate, (1, KP))
    own_gate = _share(own_share, gates, OWN_ROW, K, KP) * scale
    if MIXES:
        qi = _rows(q + image * q_image * UNIT, q_head, q_pixel, q_width, i, N, K, D, KP, DP, OP, UNIT)
        by_position = qi
        if RELATIVE:
            by_position = _position_products(qi, height_rel, width_rel, i, H, W, D, SP, TP, STORE, OP, PRECISION, SPLIT)
    if BETA:
        db = tl.zeros((I * J, KP), dtype=tl.float32)
    dw0 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)  # a tap row each
    if KS >= 3:
        dw1 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)
        dw2 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)
    if KS == 5:
        dw3 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)
        dw4 = tl.zeros((GROUPS, RP, KP), dtype=tl.float32)

    for j0 in range(0, N, J):
        if MIXES:
            own = _own(qi, by_position, k, k_head, k_pixel, k_width, j0, J, H, W, K, D, KP, DP, SP, UNIT, OP, PRECISION,
                       RELATIVE)
            own = tl.reshape(own_gate * tl.permute(own, (1, 2, 0)), (I * J, KP))
        at, row, col = _flat_tile(i0, j0, N, K, KP, I, J)
        inside = (row < N) & (col < N) & (tl.arange(0, KP)[None, :] < K)
        took = tl.load(prev + at, mask=inside, other=0.0).to(tl.float32)
        if MIXES:
            took = prev_gate * took + own
        if PREFIX > 0:
            took = tl.where(inside & (row >= PREFIX) & (col >= PREFIX), took, 0.0)
        else:
            took = tl.where(inside, took, 0.0)
        if BETA:
            db -= took * tl.load(d_logits + at, mask=inside, other=0.0).to(tl.float32)
        m = _grouped(took.to(STORE).to(OP), GROUPS)
        dw0 = _add_weight_part(dw0, d_conv, i0, j0, 0, m, N, K, KS, RP, PREFIX, I, J, OP, PRECISION)
        if KS >= 3:
            dw1 = _add_weight_part(dw1, d_conv, i0, j0, 1, m, N, K, KS, RP, PREFIX, I, J, OP, PRECISION)
            dw2 = _add_weight_part(dw2, d_conv, i0, j0, 2, m, N, K, KS, RP, PREFIX, I, J, OP, PRECISION)
        if KS == 5:
            dw3 = _add_weight_part(dw3, d_conv, i0, j0, 3, m, N, K, KS, RP, PREFIX, I, J, OP, PRECISION)
            dw4 = _add_weight_part(dw4, d_conv, i0, j0, 4, m, N, K, KS, RP, PREFIX, I, J, OP, PRECISION)

    part = tl.program_id(0).to(tl.int64) * part_stride
    _store_weight_part(d_weight + part, dw0, w_to, w_from, w_y, w_x, 0, K, KS, KP, RP)
    if KS >= 3:
        _store_weight_part(d_weight + part, dw1, w_to, w_from, w_y, w_x, 1, K, KS, KP, RP)
        _store_weight_part(d_weight + part, dw2, w_to, w_from, w_y, w_x, 2, K, KS, KP, RP)
    if KS == 5:
        _store_weight_part(d_weight + part, dw3, w_to, w_from, w_y, w_x, 3, K, KS, KP, RP)
        _store_weight_part(d_weight + part, dw4, w_to, w_from, w_y, w_x, 4, K, KS, KP, RP)
    if BETA:
        head = tl.arange(0, KP)
        tl.store(d_beta + part + head, tl.sum(db, 0), mask=head < K)


@triton.jit
def queries_backward(
        q, k, height_rel, width_rel, weight, gates, prev, d_conv, d_logits, d_maps, d_q, d_table, d_alpha,
        part_stride, w_to, w_from, w_y, w_x, q_image, q_head, q_pixel, q_width, k_image, k_head, k_pixel, k_width,
        logits_share, maps_share, own_share, scale,
        H: constexpr, W: constexpr, K: constexpr, D: constexpr, KS: constexpr,
        KP: constexpr, DP: constexpr, RP: constexpr, PREFIX: constexpr,
        SP: constexpr, TP: constexpr, UNIT: constexpr,
        I: constexpr, J: constexpr, OP: constexpr, PRECISION: constexpr, SPLIT: constexpr,
        RELATIVE: constexpr, CONV: constexpr, LOGITS: constexpr, KEPT: constexpr,
        OWN_FROM_MAPS: constexpr, SAVE: constexpr, CONV_ROW: constexpr,
        LOGITS_ROW: constexpr, OWN_ROW: constexpr, SMALL: constexpr,
):
    """Go back through the convolution and the query's side of the dot product. A program: as `evolve`'s.

    With a = adjoint conv(d_conv, times the share of a CONV_ROW) [CONV] + logits_share * d_logits [KEPT], it writes
    d_maps = maps_share * a [SAVE], and the gradients of q and of both tables (a slot a program) from own_share * a, or,
    where not OWN_FROM_MAPS, from own_share * d_logits [LOGITS]. With an OWN_ROW also, a slot a program, what alpha's
    gradient has beside the convolution's part: what 1 - alpha before the own logits gives (which are q times their
    gradient by q), and alpha before prev where prev is not convolved.
    """
    N: constexpr = H * W
    STORE: constexpr = q.dtype.element_ty
    image, i0 = _block(N, I)
    i = i0 + tl.arange(0, I)
    prev += image * (N * N * K)
    d_conv += image * (N * N * K)
    d_logits += image * (N * N * K)
    d_maps += image * (N * N * K)
    k += image * k_image * UNIT
    dq = tl.zeros((KP, I, DP), dtype=tl.float32)
    logits_gate = _share(logits_share, gates, LOGITS_ROW, K, KP)
    if OWN_ROW >= 0:
        da = tl.zeros((I, J, KP), dtype=tl.float32)
    if RELATIVE:
        d_position = tl.zeros((KP, I, SP), dtype=tl.float32)

    for j0 in range(0, N, J):
        j = j0 + tl.arange(0, J)
        at, inside = _map_tile(i, j, N, K, KP)
        if LOGITS:
            g = tl.load(d_logits + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.zeros((I, J, KP), dtype=tl.float32)
        if CONV:
            a = tl.reshape(_convolve(d_conv, weight, w_to, w_from, w_y, w_x, gates, i0, j0, N, K, KS, KP, RP, PREFIX,
                                     I, J, OP, PRECISION, SPLIT, True, CONV_ROW), (I, J, KP))
            if PREFIX > 0:
                past = _share(1.0, gates, CONV_ROW, K, KP) * tl.load(d_conv + at, mask=inside, other=0.0).to(tl.float32)
                a = tl.where(_among_patches(i, j, PREFIX), a, past)
        if KEPT:
            a += logits_gate * g
        if SAVE:
            tl.store(d_maps + at, (maps_share * a).to(STORE), mask=inside)
        if OWN_FROM_MAPS:
            own = tl.where(inside, a, 0.0)  # the adjoint conv reaches past the edge
        else:
            own = g
        if OWN_ROW < 0:
            own = own_share * own  # else it comes last, since it may be 0
        elif OWN_FROM_MAPS or not CONV or PREFIX > 0:
            earlier = own * tl.load(prev + at, mask=inside, other=0.0).to(tl.float32)
            if CONV and not OWN_FROM_MAPS:
                earlier = tl.where(_among_patches(i, j, PREFIX), 0.0, earlier)
            da += earlier
        own = tl.permute(own.to(STORE).to(OP), (2, 0, 1))  # (KP, I, J)
        if SMALL:  # there the shorter way costs more registers than there are
            kj = _rows(k, k_head, k_pixel, k_width, j, N, K, D, KP, DP, OP, UNIT)
        else:
            kj = _rows_by_warps(k, k_head, k_pixel, k_width, j0, N, K, D, KP, DP, OP, UNIT, J)
        dq = tl.dot(own, kj, dq, input_precision=PRECISION)
        if RELATIVE:
            positions = tl.permute(_positions(j0, J, H, W, KP, SP, OP), (0, 2, 1))
            d_position = tl.dot(own, positions, d_position, input_precision=PRECISION)

    part = tl.program_id(0).to(tl.int64) * part_stride
    q += image * q_image * UNIT
    own_gate = tl.permute(_share(own_share, gates, OWN_ROW, K, KP), (2, 0, 1)) if OWN_ROW >= 0 else 1.0
    if RELATIVE:
        d_offset = _by_offset(d_position, i, H, W, SP, TP, STORE, OP)  # (KP*I, TP)
        embedding = _table(height_rel, width_rel, H, W, D, TP, DP, STORE, OP)
        dq += tl.reshape(_product(d_offset, embedding, SPLIT, PRECISION), (KP, I, DP))
    if OWN_ROW >= 0:
        qi = _rows(q, q_head, q_pixel, q_width, i, N, K, D, KP, DP, OP, UNIT)
        by_head = tl.sum(tl.reshape(da, (I * J, KP)), 0)
        by_head -= scale * tl.sum(tl.sum(qi.to(tl.float32) * dq, 2), 1)
        head = tl.arange(0, KP)
        tl.store(d_alpha + part + head, by_head, mask=head < K)
        dq = own_gate * dq
    _store_rows(d_q + image * (N * K * D), i, scale * dq, N, K, D, KP, DP)
    if RELATIVE:  # last, so that fewer registers are held
        T: constexpr = 2 * H + 2 * W - 2
        qi = _rows(q, q_head, q_pixel, q_width, i, N, K, D, KP, DP, OP, UNIT)
        if OWN_ROW >= 0:
            qi = (qi * own_gate).to(STORE).to(OP)
        dt = _product(tl.trans(d_offset), tl.reshape(qi, (KP * I, DP)), SPLIT, PRECISION)
        t = tl.arange(0, TP)[:, None]
        d = tl.arange(0, DP)[None, :]
        tl.store(d_table + part + t * D + d, scale * dt, mask=(t < T) & (d < D))


@triton.jit
def keys_backward(
        q, maps, gates, d_k, q_image, q_head, q_pixel, q_width, share,
        N: constexpr, K: constexpr, D: constexpr, KP: constexpr, DP: constexpr,
        UNIT: constexpr, I: constexpr, J: constexpr, OP: constexpr, PRECISION: constexpr,
        SHARE_ROW: constexpr, STORED_ROW: constexpr,
):
    """Store d_k = share * transposed(maps) @ q. A program: J keys of an image, all heads, all queries by blocks of I.

    With a SHARE_ROW, share is times that; with a STORED_ROW, the maps are multiplied by that, in place, when read.
    """
    image, j0 = _block(N, J)
    j = j0 + tl.arange(0, J)
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
        qi = _rows_by_warps(q, q_head, q_pixel, q_width, i0, N, K, D, KP, DP, OP, UNIT, I)
        dk = tl.dot(tl.permute(m, (2, 1, 0)), qi, dk, input_precision=PRECISION)
    if SHARE_ROW >= 0:
        dk = tl.permute(_share(1.0, gates, SHARE_ROW, K, KP), (2, 0, 1)) * dk
    _store_rows(d_k + image * (N * K * D), j, share * dk, N, K, D, KP, DP)
