"""The Triton kernels of `ea_vision.ops.triton_attention`, which explains how they are combined, and why.

Shape letters: K heads, H x W the attention map, N = H*W, D and E widths of q/k and of v, I x J a tile of query and key
pixels; a P after a letter: rounded up to a power of two (at least 16 where a dot product sums over it). Names in
capitals are compile-time constants; S holds the problem's, a `triton_attention.Shape`.

Maps lie in memory as (B, N, N, K), heads innermost: the K heads of a pixel are one aligned vector whatever N is, the
three neighbours of a tap row are one run of 3K numbers, and the head convolution is a matrix product over such runs.
Products per head are 3-D, (heads, ., .). STORE is the maps' dtype, taken from a pointer.

None stands for a tensor that is not read or stored, and for the share of a term that is dropped. A share is the factor
of a term in a sum: a number, or if the problem is GATED the address of K numbers, one per head.
"""

import os

import triton
import triton.language as tl
from triton.language import constexpr

LOG2E = constexpr(1.4426950408889634)
INTERPRETING = constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _zeros(X, Y, Z):
    return tl.full((X, Y, Z), 0.0, tl.float32)


@triton.jit
def _block(SIDE, S):
    """Return the image and the first pixel of a program; each program takes SIDE of an image's N pixels."""
    BLOCKS: constexpr = (S.N + SIDE - 1) // SIDE
    image = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    return image.to(tl.int64), block * SIDE


@triton.jit
def _operand(x, STORE):
    """Return x as an operand of products: in the maps' dtype; in Triton's interpreter rounded to it, but float32."""
    x = x.to(STORE)
    return x.to(tl.float32) if INTERPRETING else x


@triton.jit
def _load_rows(x, image, head, pixel, d, S):
    """Load entries (head, pixel, d) of one image's (K, N, D) tensor x; the indices broadcast; zeros outside."""
    first = x.data + image * x.image * x.UNIT
    at = (head * x.head + pixel * x.pixel) * x.UNIT + d * x.width
    inside = (head < S.K) & (pixel < S.N) & (d < x.D)
    return tl.load(first + at, mask=inside, other=0.0)


@triton.jit
def _rows(x, image, n, S):
    """Load pixels n (any number): (KP, n, DP)."""
    head = tl.arange(0, S.KP)[:, None, None]
    d = tl.arange(0, x.DP)[None, None, :]
    rows = _load_rows(x, image, head, n[None, :, None], d, S)
    return _operand(rows, x.data.dtype.element_ty)


# Data that one warp loads and another needs goes through shared memory, behind two barriers. A load assigns C rows (a
# LINE) to a warp, the next C rows to the next warp, and so on; a product assigns heads, or groups of pixels, to warps.
# So rows are loaded in an order in which each warp gets the rows it needs, and reordered in registers. The result does
# not depend on C.


@triton.jit
def _rows_by_warps(x, image, n0, I, S):
    """Load pixels n0 to n0 + I - 1: (KP, I, DP)."""
    C: constexpr = x.LINE if x.LINE < I else I
    row = tl.arange(0, S.KP * I)[:, None]
    d = tl.arange(0, x.DP)[None, :]
    head = row // C % S.KP
    pixel = n0 + row // (C * S.KP) * C + row % C
    rows = _load_rows(x, image, head, pixel, d, S)
    rows = _operand(rows, x.data.dtype.element_ty)
    run_first = tl.reshape(rows, (I // C, S.KP, C, x.DP))
    head_first = tl.permute(run_first, (1, 0, 2, 3))
    return tl.reshape(head_first, (S.KP, I, x.DP))


@triton.jit
def _store_rows(ptr, image, n, x, D, S):
    """Store x, shaped as `_rows` loads it, in a tensor laid out as (B, N, K, D)."""
    head = tl.arange(0, S.KP)[:, None, None]
    pixel = n[None, :, None]
    d = tl.arange(0, x.shape[2])[None, None, :]
    first = ptr + image * (S.N * S.K * D)
    at = (pixel * S.K + head) * D + d
    inside = (head < S.K) & (pixel < S.N) & (d < D)
    tl.store(first + at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _by_query(image, i, S):
    """Return offsets and mask of one number per head and query, in (B, K, N): (KP, I) each."""
    head = tl.arange(0, S.KP)[:, None]
    query = i[None, :]
    at = image * (S.K * S.N) + (head * S.N + query)
    return at, (head < S.K) & (query < S.N)


@triton.jit
def _map_tile(i, j, S):
    """Return offsets and mask of a map's tile: (I, J, KP) each."""
    row = i[:, None, None]
    col = j[None, :, None]
    head = tl.arange(0, S.KP)[None, None, :]
    at = (row * S.N + col) * S.K + head
    return at, (row < S.N) & (col < S.N) & (head < S.K)


@triton.jit
def _load_map(maps, image, at, inside, S):
    first = maps + image * (S.N * S.N * S.K)
    return tl.load(first + at, mask=inside, other=0.0)


@triton.jit
def _store_map(maps, image, at, x, inside, S):
    """Store a tile, unless `maps` is None."""
    if maps is not None:
        first = maps + image * (S.N * S.N * S.K)
        tl.store(first + at, x.to(maps.dtype.element_ty), mask=inside)


@triton.jit
def _signs(signs, image, i, j, S):
    """Return addresses and mask of a tile of signs, for pixels i and j that broadcast."""
    first = signs + image * (S.N * S.N)
    return first + (i * S.N + j), (i < S.N) & (j < S.N)


@triton.jit
def _tap_row(maps, image, pixel, i0, j0, dy, J, NEAR, S):
    """Load the input of the convolution's tap row dy at pixels (X, 1) of a tile: (X, RP), columns are (dx, head), flat.

    NEAR: all tap rows share one set of addresses, plus an offset that is known at compile time.
    """
    maps += image * (S.N * S.N * S.K)
    r = tl.arange(0, S.RP)[None, :]
    y = i0 + pixel // J
    x = j0 + pixel % J - S.KS // 2
    col = x + r // S.K
    tap_y = y + (dy - S.KS // 2)
    in_row = (tap_y >= S.PREFIX) & (tap_y < S.N)
    in_column = (col >= S.PREFIX) & (col < S.N)
    mask = in_row & in_column & (r < S.KS * S.K)
    if NEAR:
        middle = (y * S.N + x) * S.K + r
        at = maps + (dy - S.KS // 2) * S.N * S.K + middle
    else:
        at = maps + (tap_y * S.N + x) * S.K + r
    return _operand(tl.load(at, mask=mask, other=0.0), maps.dtype.element_ty)


@triton.jit
def _among_patches(i, j, S):
    """Return a mask of where the convolution runs, (I, J, 1)."""
    return (i >= S.PREFIX)[:, None, None] & (j >= S.PREFIX)[None, :, None]


@triton.jit
def _taps(weight, head, r, dy, ADJOINT, S):
    """Return the offsets of tap row dy in the (K, K, KS, KS) weight; r = (dx, input head), flat. ADJOINT: those of the
    convolution's adjoint."""
    other = r % S.K
    dx = r // S.K
    if ADJOINT:
        heads = other * weight.makes + head * weight.takes
        return heads + (S.KS - 1 - dy) * weight.y + (S.KS - 1 - dx) * weight.x
    else:
        heads = head * weight.makes + other * weight.takes
        return heads + dy * weight.y + dx * weight.x


@triton.jit
def _weight_row(weight, share, dy, ADJOINT, STORE, S):
    """Load the matrix (RP, KP) that multiplies `_tap_row`'s result; if ADJOINT and GATED, its rows times a share."""
    r = tl.arange(0, S.RP)[:, None]
    head = tl.arange(0, S.KP)[None, :]
    at = weight.data + _taps(weight, head, r, dy, ADJOINT, S)
    inside = (r < S.KS * S.K) & (head < S.K)
    w = tl.load(at, mask=inside, other=0.0).to(STORE)
    if ADJOINT and S.GATED:
        w = w.to(tl.float32) * tl.load(share + r % S.K)
    return _operand(w, STORE)


@triton.jit
def _weight_rows(weight, share, ADJOINT, STORE, S):
    """Load the matrices of all tap rows, once per program."""
    KS: constexpr = S.KS
    rows = ()
    for dy in tl.static_range(KS):
        rows += (_weight_row(weight, share, dy, ADJOINT, STORE, S),)
    return rows


@triton.jit
def _convolve(maps, image, rows, i0, j0, I, J, S):
    """Convolve a tile of maps, KS x KS, same padding, heads -> heads: (I*J, KP) float32. ADJOINT: apply the adjoint; if
    GATED, to the maps times a share per head."""
    KS: constexpr = S.KS
    out = tl.full((I * J, S.KP), 0.0, tl.float32)
    pixel = tl.arange(0, I * J)[:, None]
    for dy in tl.static_range(KS):
        taps = _tap_row(maps, image, pixel, i0, j0, dy, J, False, S)
        out += _product(taps, rows[dy], S)
    return out


@triton.jit
def _share(share, S):
    """Return a share as a number or, if GATED, as numbers per head, (1, 1, KP); 0 for None."""
    if share is None:
        return 0.0
    elif S.GATED:
        head = tl.arange(0, S.KP)
        numbers = tl.load(share + head, mask=head < S.K, other=0.0)
        return numbers[None, None, :]
    else:
        return share


@triton.jit
def _dot(a, b, c):
    """Return a @ b, added to c unless that is None, in float32."""
    PRECISION: constexpr = "tf32x3" if a.dtype == tl.float32 else "tf32"
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def _product(a, b, S):
    """Return a (M, X) @ b (X, N) in float32. SPLIT: in groups of 32 rows, see `triton_attention.Shape`."""
    M: constexpr = a.shape[0]
    X: constexpr = a.shape[1]
    Y: constexpr = b.shape[1]
    if S.SPLIT and M > 32:
        groups = tl.reshape(a, (M // 32, 32, X))
        once = tl.reshape(b, (1, X, Y))
        shared = tl.broadcast_to(once, (M // 32, X, Y))
        products = _dot(groups, shared, None)
        return tl.reshape(products, (M, Y))
    else:
        return _dot(a, b, None)


# Dropout: whether a probability is kept is a function of seed, query and key, the same as in cpu_kernel/dropout.h.


@triton.jit
def _scramble(x):
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _draws(seed, image, i, S):
    """Draw two numbers for each head and query, (KP, I) each."""
    drawn = tl.load(seed + tl.zeros((1, 1), dtype=tl.int32))
    high_seed = (drawn >> 32).to(tl.uint32)
    low = _scramble(drawn.to(tl.uint32) + _scramble(high_seed))
    high = _scramble(low ^ high_seed)
    head = tl.arange(0, S.KP)[:, None]
    query = (image * S.K + head) * S.N + i[None, :]
    key = _scramble(query.to(tl.uint32) + low)
    return key, _scramble(key ^ high)


@triton.jit
def _kept(key, salt, j, threshold):
    """Return where probabilities are kept: draws (key, salt) and keys j broadcast to (KP, I, J) in any order."""
    x = key + j.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D + salt
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32) >= threshold


# A pixel has two positions: its row, in 0..H-1, and H plus its column, in H..H+W-1. So one matrix product serves both
# axes. The tables are concatenated: offset o of rows is at o + H-1, offset o of columns at (2H-1) + o + W-1.


@triton.jit
def _table(height_rel, width_rel, q, S):
    """Load the position tables (2H-1, D) and (2W-1, D), one after the other, padded with zeros: (TP, DP)."""
    t = tl.arange(0, S.TP)[:, None]
    d = tl.arange(0, q.DP)[None, :]
    in_rows = (t < 2 * S.H - 1) & (d < q.D)
    rows = tl.load(height_rel + t * q.D + d, mask=in_rows, other=0.0)
    t -= 2 * S.H - 1
    in_columns = (t >= 0) & (t < 2 * S.W - 1) & (d < q.D)
    columns = tl.load(width_rel + t * q.D + d, mask=in_columns, other=0.0)
    return _operand(rows + columns, q.data.dtype.element_ty)


@triton.jit
def _for_each_head(x, S):
    """Repeat x (I, X) for each head: (KP*I, X)."""
    I: constexpr = x.shape[0]
    X: constexpr = x.shape[1]
    repeated = tl.broadcast_to(x[None, :, :], (S.KP, I, X))
    return tl.reshape(repeated, (S.KP * I, X))


@triton.jit
def _queries(q, height_rel, width_rel, image, i, S):
    """Load q of pixels i, (KP, I, DP), and multiply it by the embedding of each position s as seen from i, (KP, I, SP).

    Entries of positions from H+W on are not used; without tables q is returned twice.
    """
    KP: constexpr = S.KP
    SP: constexpr = S.SP
    I: constexpr = i.shape[0]
    qi = _rows(q, image, i, S)
    if S.RELATIVE:
        t = _table(height_rel, width_rel, q, S)
        flat = tl.reshape(qi, (KP * I, q.DP))
        offset_terms = _product(flat, tl.trans(t), S)  # (KP*I, TP)
        s = tl.arange(0, SP)[None, :]
        query = i[:, None]
        row_at = s - query // S.W + (S.H - 1)
        column_at = s - S.H - query % S.W + (2 * S.H + S.W - 2)
        at = tl.where(s < S.H, row_at, column_at)
        at = _for_each_head(tl.minimum(tl.maximum(at, 0), S.TP - 1), S)
        position_terms = tl.reshape(tl.gather(offset_terms, at, 1), (KP, I, SP))
        return qi, _operand(position_terms, q.data.dtype.element_ty)
    else:
        return qi, qi


@triton.jit
def _by_offset(d_products, i, STORE, S):
    """Apply the adjoint of `_queries`' reordering: (KP, I, SP) by position -> (KP*I, TP) by offset."""
    I: constexpr = i.shape[0]
    t = tl.arange(0, S.TP)[None, :]
    query = i[:, None]
    in_rows = t < 2 * S.H - 1
    row = t + query // S.W - (S.H - 1)
    column = t + query % S.W - (2 * S.H + S.W - 2) + S.H
    s = tl.where(in_rows, row, column)
    is_row = in_rows & (s >= 0) & (s < S.H)
    is_column = (t >= 2 * S.H - 1) & (s >= S.H) & (s < S.H + S.W)
    used = _for_each_head(is_row | is_column, S)
    s = _for_each_head(tl.minimum(tl.maximum(s, 0), S.SP - 1), S)
    flat = tl.reshape(d_products, (S.KP * I, S.SP))
    x = tl.where(used, tl.gather(flat, s, 1), 0.0)
    return _operand(x, STORE)


@triton.jit
def _positions(j0, J, DTYPE, S):
    """Return ones at both positions of each pixel from j0 on, else zeros, the same for each head: (KP, SP, J)."""
    s = tl.arange(0, S.SP)[None, :, None]
    j = j0 + tl.arange(0, J)[None, None, :]
    hot = (j // S.W == s) | (j % S.W + S.H == s)
    return tl.broadcast_to(hot, (S.KP, S.SP, J)).to(DTYPE)


@triton.jit
def _own(qi, position_terms, k, image, j0, J, S):
    """Return q times keys, plus position terms if RELATIVE, without the scale: (I, J, KP)."""
    keys = _rows_by_warps(k, image, j0, J, S)
    logits = _dot(qi, tl.permute(keys, (0, 2, 1)), None)
    if S.RELATIVE:
        logits = _dot(position_terms, _positions(j0, J, qi.dtype, S), logits)
    return tl.permute(logits, (1, 2, 0))


@triton.jit
def evolve(
    q,
    k,
    v,
    height_rel,
    width_rel,
    maps,
    weight,
    bias,
    logits,
    signs,
    out,
    lse,
    conv,
    kept,
    own,
    scale,
    dropout,
    S: constexpr,
    I: constexpr,
    J: constexpr,
):
    """Compute logits = conv * relu(conv(maps)) + kept * maps + own * own logits, and attend.

    A program takes I queries of an image, all heads, and all keys in blocks of J. It stores the logits, the attention's
    output in `out`, log2 of each row's sum of exp in `lse`, and in `signs` one bit per head where the gradient passes.
    In rows and columns of the first PREFIX tokens, maps replace relu(conv(maps)); the convolution does not read them.
    """
    STORE: constexpr = q.data.dtype.element_ty
    image, i0 = _block(I, S)
    i = i0 + tl.arange(0, I)
    head = tl.arange(0, S.KP)
    if own is not None:
        qi, position_terms = _queries(q, height_rel, width_rel, image, i, S)
    conv_gate = _share(conv, S)
    kept_gate = _share(kept, S)
    own_gate = _share(own, S) * scale
    if conv is not None:
        rows = _weight_rows(weight, None, False, STORE, S)
        added = tl.load(bias + head, mask=head < S.K, other=0.0)
        added = added.to(STORE).to(tl.float32)
    if out is not None:
        top = tl.full((S.KP, I), float("-inf"), dtype=tl.float32)
        total = tl.full((S.KP, I), 0.0, tl.float32)
        mean = _zeros(S.KP, I, v.DP)
    if dropout is not None:
        key, salt = _draws(dropout.seed, image, i, S)

    for j0 in range(0, S.N, J):
        j = j0 + tl.arange(0, J)
        at, inside = _map_tile(i, j, S)
        s = _zeros(I, J, S.KP)
        if kept is not None or (conv is not None and S.PREFIX > 0):
            here = _load_map(maps, image, at, inside, S).to(tl.float32)
        if conv is not None:
            z = _convolve(maps, image, rows, i0, j0, I, J, S)
            z = tl.reshape(z + added[None, :], (I, J, S.KP))
            passes = z > 0.0
            z = tl.maximum(z, 0.0)
            if S.PREFIX > 0:
                patches = _among_patches(i, j, S)
                passes = passes | (patches == 0)
                z = tl.where(patches, z, here)
            s += conv_gate * z
            if signs is not None:
                bit = tl.full((I, J, S.KP), 1, tl.int32) << head[None, None, :]
                bits = tl.sum(tl.where(passes, bit, 0), 2)
                places, mask = _signs(signs, image, i[:, None], j[None, :], S)
                tl.store(places, bits.to(signs.dtype.element_ty), mask=mask)
        if kept is not None:
            s += kept_gate * here
        if own is not None:
            s += own_gate * _own(qi, position_terms, k, image, j0, J, S)
        s = s.to(STORE)  # what backward will read: the softmax takes the rounded logits
        _store_map(logits, image, at, s, inside, S)
        if out is not None:
            t = tl.permute(s, (2, 0, 1)).to(tl.float32) * LOG2E
            t = tl.where((j < S.N)[None, None, :], t, float("-inf"))
            new_top = tl.maximum(top, tl.max(t, 2))
            p = tl.exp2(t - new_top[:, :, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 2)
            if dropout is not None:
                keys = j[None, None, :]
                stays = _kept(key[:, :, None], salt[:, :, None], keys, dropout.threshold)
                p = tl.where(stays, p, 0.0)
            values = _rows(v, image, j, S)
            mean = _dot(_operand(p, STORE), values, mean * shrink[:, :, None])
            top = new_top

    if out is not None:
        if dropout is not None:
            mean *= dropout.gain
        _store_rows(out, image, i, mean / total[:, :, None], v.D, S)
        at, inside = _by_query(image, i, S)
        tl.store(lse + at, top + tl.log2(total), mask=inside)


@triton.jit
def row_products(out, d_out, delta, S: constexpr, I: constexpr):
    """Store delta (B, K, N), the sum over E of out * d_out. A program takes I pixels of an image, and all heads."""
    image, i0 = _block(I, S)
    i = i0 + tl.arange(0, I)
    o = _rows(out, image, i, S).to(tl.float32)
    do = _rows(d_out, image, i, S).to(tl.float32)
    at, inside = _by_query(image, i, S)
    tl.store(delta + at, tl.sum(o * do, 2), mask=inside)


@triton.jit
def logits_backward(
    v,
    logits,
    signs,
    d_logits,
    d_out,
    lse,
    delta,
    d_conv,
    d_maps,
    d_v,
    d_bias,
    conv,
    dropout,
    S: constexpr,
    I: constexpr,
    J: constexpr,
):
    """Backpropagate through softmax and ReLU. A program takes J keys of an image, all heads, queries in blocks of I.

    g is the gradient of the logits: the part from the output plus the part from the next layer (`d_logits`). The kernel
    stores d_v; in `d_conv` conv * g where the ReLU passes it (if GATED without conv, which may be 0); in d_bias the sum
    of d_conv, one slot per program; and g in `d_maps`. The ReLU passes where `signs` has a bit. Without `signs` the
    logits are the ReLU's output, and it passes where they are positive.
    """
    STORE: constexpr = v.data.dtype.element_ty
    image, j0 = _block(J, S)
    j = j0 + tl.arange(0, J)
    head = tl.arange(0, S.KP)
    vj = _rows(v, image, j, S)
    dv = _zeros(S.KP, J, v.DP)
    if conv is not None:
        db = _zeros(I, J, S.KP)

    for i0 in range(0, S.N, I):
        i = i0 + tl.arange(0, I)
        at, inside = _map_tile(i, j, S)
        s = _load_map(logits, image, at, inside, S)
        row, row_mask = _by_query(image, i, S)
        row_lse = tl.load(lse + row, mask=row_mask, other=float("inf"))  # so that p is 0 there
        row_delta = tl.load(delta + row, mask=row_mask, other=0.0)
        do = _rows(d_out, image, i, S)
        # keys before queries: one product's result is the next one's operand without moving between registers
        key_first = tl.permute(s, (2, 1, 0)).to(tl.float32)  # (KP, J, I)
        p = tl.exp2(key_first * LOG2E - row_lse[:, None, :])
        dp = _dot(vj, tl.permute(do, (0, 2, 1)), None)
        seen = p  # by which the values were multiplied
        if dropout is not None:
            key, salt = _draws(dropout.seed, image, i, S)
            kept = _kept(key[:, None, :], salt[:, None, :], j[None, :, None], dropout.threshold)
            seen = tl.where(kept, dropout.gain * p, 0.0)
            dp = tl.where(kept, dropout.gain * dp, 0.0)
        dv = _dot(_operand(seen, STORE), do, dv)
        g = tl.permute(p * (dp - row_delta[:, None, :]), (2, 1, 0))  # (I, J, KP)
        if d_logits is not None:
            g += _load_map(d_logits, image, at, inside, S).to(tl.float32)
        _store_map(d_maps, image, at, g, inside, S)
        if conv is not None:
            if signs is not None:
                places, mask = _signs(signs, image, i[:, None, None], j[None, :, None], S)
                bits = tl.load(places, mask=mask, other=0).to(tl.int32)
                dz = tl.where((bits >> head[None, None, :]) & 1 != 0, g, 0.0)
            else:
                dz = tl.where(s > 0.0, g, 0.0)
            if not S.GATED:
                dz = conv * dz
            if S.PREFIX > 0:
                db += tl.where(_among_patches(i, j, S), dz, 0.0)
            else:
                db += dz
            _store_map(d_conv, image, at, dz, inside, S)

    _store_rows(d_v, image, j, dv, v.D, S)
    if conv is not None:
        db = tl.sum(tl.reshape(db, (I * J, S.KP)), 0)
        slot = tl.program_id(0).to(tl.int64) * S.K
        tl.store(d_bias + slot + head, db, mask=head < S.K)


@triton.jit
def _add_weight_part(dw, d_conv, image, i0, j0, dy, m, I, J, S):
    """Add to dw (GROUPS, RP, KP) the input of the adjoint's tap row dy at each pixel, times m (GROUPS, pixels, KP)."""
    GROUPS: constexpr = m.shape[0]
    # rows are assigned to the groups' warps as in _rows_by_warps
    C: constexpr = S.LINE if S.LINE < m.shape[1] else m.shape[1]
    RUNS: constexpr = m.shape[1] // C
    row = tl.arange(0, I * J)[:, None]
    pixel = (row // C % GROUPS * RUNS + row // (C * GROUPS)) * C + row % C
    taps = _tap_row(d_conv, image, pixel, i0, j0, dy, J, True, S)
    run_first = tl.reshape(taps, (RUNS, GROUPS, C, S.RP))
    group_first = tl.permute(run_first, (1, 0, 2, 3))
    taps = tl.reshape(group_first, (GROUPS, RUNS * C, S.RP))
    return _dot(tl.permute(taps, (0, 2, 1)), m, dw)


@triton.jit
def weight_backward(
    q,
    k,
    height_rel,
    width_rel,
    weight,
    maps,
    d_conv,
    d_logits,
    d_weight,
    d_beta,
    part_stride,
    kept,
    own,
    scale,
    S: constexpr,
    I: constexpr,
    J: constexpr,
    GROUPS: constexpr = 8,
):
    """Store the gradient of the convolution's weight, one slot per program; programs are as in `evolve`.

    The convolution's input is kept * maps + own * own logits, recomputed; without an own share it is the maps. If not
    None, `d_beta` gets, one slot per program, the part of beta's gradient from (1 - beta) * input in the logits.
    Each of GROUPS groups of pixels is summed by its own warps.
    """
    KS: constexpr = S.KS
    STORE: constexpr = q.data.dtype.element_ty
    image, i0 = _block(I, S)
    i = i0 + tl.arange(0, I)
    head = tl.arange(0, S.KP)[None, :]
    if own is not None:
        qi, position_terms = _queries(q, height_rel, width_rel, image, i, S)
        own_gate = _share(own, S) * scale
        kept_gate = tl.reshape(_share(kept, S), (1, S.KP)) if S.GATED else kept
    db = tl.full((I * J, S.KP), 0.0, tl.float32)
    dw = (_zeros(GROUPS, S.RP, S.KP),) * KS  # one per tap row

    for j0 in range(0, S.N, J):
        if own is not None:
            own_logits = own_gate * _own(qi, position_terms, k, image, j0, J, S)
            mixed = tl.reshape(own_logits, (I * J, S.KP))
        pixel = tl.arange(0, I * J)[:, None]
        row = i0 + pixel // J
        col = j0 + pixel % J
        at = (row * S.N + col) * S.K + head
        inside = (row < S.N) & (col < S.N) & (head < S.K)
        took = _load_map(maps, image, at, inside, S).to(tl.float32)
        if own is not None:
            took = kept_gate * took + mixed
        taken = inside
        if S.PREFIX > 0:
            taken = inside & (row >= S.PREFIX) & (col >= S.PREFIX)
        took = tl.where(taken, took, 0.0)
        if d_beta is not None:
            g = _load_map(d_logits, image, at, inside, S)
            db -= took * g.to(tl.float32)
        m = tl.reshape(_operand(took, STORE), (GROUPS, I * J // GROUPS, S.KP))
        added = ()
        for dy in tl.static_range(KS):
            added += (_add_weight_part(dw[dy], d_conv, image, i0, j0, dy, m, I, J, S),)
        dw = added

    part = tl.program_id(0).to(tl.int64) * part_stride
    r = tl.arange(0, S.RP)[:, None]
    within = (r < KS * S.K) & (head < S.K)
    for dy in tl.static_range(KS):
        at = part + _taps(weight, head, r, dy, True, S)
        tl.store(d_weight + at, tl.sum(dw[dy], 0), mask=within)
    if d_beta is not None:
        tl.store(d_beta + part + head, tl.sum(db, 0)[None, :], mask=head < S.K)


@triton.jit
def queries_backward(
    q,
    k,
    height_rel,
    width_rel,
    weight,
    maps,
    d_conv,
    d_logits,
    d_maps,
    d_q,
    d_table,
    d_alpha,
    part_stride,
    conv,
    kept,
    maps_share,
    own,
    scale,
    S: constexpr,
    I: constexpr,
    J: constexpr,
    OWN_FROM_MAPS: constexpr,
):
    """Backpropagate through the convolution and the query's side of the dot product; programs are as in `evolve`.

    With a = conv * adjoint conv(d_conv) + kept * d_logits (without the factor conv if it is a number, which d_conv then
    includes), the kernel stores d_maps = maps_share * a, and the gradients of q and of both tables (one slot per
    program) from own * a if OWN_FROM_MAPS, else from own * d_logits. If GATED, it also stores alpha's gradient in
    `d_alpha` (one slot per program), except for the part through the convolution: the part from 1 - alpha, the factor
    of the own logits (q times their gradient with respect to q), and the part from alpha where it multiplies previous
    maps that are not convolved.
    """
    STORE: constexpr = q.data.dtype.element_ty
    image, i0 = _block(I, S)
    i = i0 + tl.arange(0, I)
    dq = _zeros(S.KP, I, q.DP)
    kept_gate = _share(kept, S)
    conv_gate = _share(conv, S)
    da = _zeros(I, J, S.KP)
    if conv is not None:
        rows = _weight_rows(weight, conv, True, STORE, S)
    if S.RELATIVE:
        d_position = _zeros(S.KP, I, S.SP)

    for j0 in range(0, S.N, J):
        j = j0 + tl.arange(0, J)
        at, inside = _map_tile(i, j, S)
        if d_logits is not None:
            g = _load_map(d_logits, image, at, inside, S).to(tl.float32)
        a = _zeros(I, J, S.KP)
        if conv is not None:
            a = _convolve(d_conv, image, rows, i0, j0, I, J, S)
            a = tl.reshape(a, (I, J, S.KP))
            if S.PREFIX > 0:
                past = _load_map(d_conv, image, at, inside, S).to(tl.float32)
                if S.GATED:
                    past = conv_gate * past
                a = tl.where(_among_patches(i, j, S), a, past)
        if kept is not None:
            a += kept_gate * g
        _store_map(d_maps, image, at, maps_share * a, inside, S)
        if OWN_FROM_MAPS:
            d_own = tl.where(inside, a, 0.0)  # the adjoint conv reaches past the edge
        else:
            d_own = g
        if d_alpha is None:
            d_own = own * d_own  # a share per head is applied last, since it may be 0
        elif OWN_FROM_MAPS or conv is None or S.PREFIX > 0:
            previous = _load_map(maps, image, at, inside, S)
            earlier = d_own * previous.to(tl.float32)
            if conv is not None and not OWN_FROM_MAPS:
                earlier = tl.where(_among_patches(i, j, S), 0.0, earlier)
            da += earlier
        d_own = tl.permute(_operand(d_own, STORE), (2, 0, 1))  # (KP, I, J)
        if S.SMALL:  # _rows_by_warps would need too many registers there
            kj = _rows(k, image, j, S)
        else:
            kj = _rows_by_warps(k, image, j0, J, S)
        dq = _dot(d_own, kj, dq)
        if S.RELATIVE:
            positions = _positions(j0, J, d_own.dtype, S)
            d_position = _dot(d_own, tl.permute(positions, (0, 2, 1)), d_position)

    part = tl.program_id(0).to(tl.int64) * part_stride
    if S.RELATIVE:
        d_offset = _by_offset(d_position, i, STORE, S)  # (KP*I, TP)
        table = _table(height_rel, width_rel, q, S)
        dq += tl.reshape(_product(d_offset, table, S), (S.KP, I, q.DP))
    if d_alpha is not None:
        head_sums = tl.sum(tl.reshape(da, (I * J, S.KP)), 0)
        products = _rows(q, image, i, S).to(tl.float32) * dq
        head_sums -= scale * tl.sum(tl.sum(products, 2), 1)
        head = tl.arange(0, S.KP)
        tl.store(d_alpha + part + head, head_sums, mask=head < S.K)
        own_gate = tl.permute(_share(own, S), (2, 0, 1))
        dq = own_gate * dq
    _store_rows(d_q, image, i, scale * dq, q.D, S)
    if S.RELATIVE:  # last, so that fewer registers are held
        qi = _rows(q, image, i, S)
        if d_alpha is not None:
            qi = _operand(qi * own_gate, STORE)
        flat = tl.reshape(qi, (S.KP * I, q.DP))
        dt = scale * _product(tl.trans(d_offset), flat, S)
        t = tl.arange(0, S.TP)[:, None]
        d = tl.arange(0, q.DP)[None, :]
        inside = (t < 2 * S.H + 2 * S.W - 2) & (d < q.D)
        tl.store(d_table + part + t * q.D + d, dt, mask=inside)


@triton.jit
def keys_backward(q, maps, d_k, share, own, stored, S: constexpr, I: constexpr, J: constexpr):
    """Store d_k = share * transposed(maps) @ q. A program takes J keys of an image, all heads, queries in blocks of I.

    `own`, if not None, is a share per head that multiplies d_k as well. `stored`, if not None, is a share per head by
    which the maps are multiplied in place after they are read.
    """
    image, j0 = _block(J, S)
    j = j0 + tl.arange(0, J)
    dk = _zeros(S.KP, J, q.DP)
    stored_gate = _share(stored, S)
    for i0 in range(0, S.N, I):
        at, inside = _map_tile(i0 + tl.arange(0, I), j, S)
        m = _load_map(maps, image, at, inside, S)
        if stored is not None:
            multiplied = stored_gate * m.to(tl.float32)
            _store_map(maps, image, at, multiplied, inside, S)
        m = tl.permute(_operand(m, maps.dtype.element_ty), (2, 1, 0))
        dk = _dot(m, _rows_by_warps(q, image, i0, I, S), dk)
    if own is not None:
        dk = tl.permute(_share(own, S), (2, 0, 1)) * dk
    _store_rows(d_k, image, j, share * dk, q.D, S)
