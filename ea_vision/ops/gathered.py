"""Attention in windows of pixels and of heads, a row of keys at a time: nothing N x N, and nothing kept of the maps.

For each neighbouring head and each offset of rows, the queries of a row meet the keys of one row, H small matrix
products of W x W, or on wide maps of some columns and those that they see. The softmax over all of them is accumulated
with a running maximum, and backward computes each row's probabilities again from their sum, as `FlashAttention`
(https://arxiv.org/abs/2205.14135) does with its blocks.

Shape letters: B batch, K heads, H x W the map, N = H*W its pixels (row-major), D width of a query's head, E a value's,
h x w the window.
"""
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ea_vision.ops.problem import Implementation, Problem
from ea_vision.ops.rel_pos import by_position, cover_offsets, reach

AT_ONCE = 2 ** 16  # logits of a step, as far as whole heads allow
LEAST_BLOCK = 8  # columns of queries, where the map has so many


class Step(NamedTuple):
    """Queries that meet keys: slices of images, heads, rows and columns, and which offset of rows that is, counted
    from 0."""

    query: tuple[slice, ...]  # of (B, K, H, W, ...)
    key: tuple[slice, ...]
    offset: int


class Neighbours(NamedTuple):
    """Sizes of the map and of the windows; `row_reach` and `col_reach` count the query's own row and column."""

    num_heads: int
    height: int
    width: int
    head_window: int
    wrap: bool
    row_reach: int
    col_reach: int
    scale: float

    def heads(self, chunk: slice) -> Iterator[tuple[slice, slice]]:
        """Of the query heads in `chunk` those that meet other heads, or their own, and which; in pieces."""
        K, radius = self.num_heads, self.head_window // 2
        for offset in range(-radius, radius + 1):
            for turn in (-K, 0, K) if self.wrap else (0,):
                first, last = max(chunk.start, -offset - turn), min(chunk.stop, K - offset - turn)
                if first < last:
                    yield slice(first, last), slice(first + offset + turn, last + offset + turn)

    def steps(self, chunk: slice, queries: slice, keys: slice) -> Iterator[Step]:
        """All that the columns `queries` of a chunk of heads meet; `keys` are the columns that they see of."""
        for query_heads, key_heads in self.heads(chunk):
            for offset in range(-self.row_reach + 1, self.row_reach):
                first, last = max(0, -offset), min(self.height, self.height - offset)
                yield Step((slice(None), query_heads, slice(first, last), queries),
                           (slice(None), key_heads, slice(first + offset, last + offset), keys),
                           offset + self.row_reach - 1)

    def blocks(self) -> list[tuple[slice, slice]]:
        """Columns of queries, and of the keys that they see: all of a row, or some at a time where that leaves out two
        thirds of the products. (Where it leaves out less, larger products are as fast: a 28x28 map, window 7.)"""
        radius = self.col_reach - 1
        size = max(LEAST_BLOCK, 2 * radius + 1)
        if 3 * (size + 2 * radius) > self.width:
            size = self.width
        return [(slice(first, min(first + size, self.width)),
                 slice(max(0, first - radius), min(first + size + radius, self.width)))
                for first in range(0, self.width, size)]

    def parts(self, batch: int) -> Iterator[tuple[slice, slice, slice]]:
        """A few heads and a block of columns at a time, so that what is at hand stays small: heads, queries, keys."""
        blocks = self.blocks()
        most = max((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in blocks)
        size = max(1, AT_ONCE // (batch * self.height * most))
        for first in range(0, self.num_heads, size):
            for queries, keys in blocks:
                yield slice(first, min(self.num_heads, first + size)), queries, keys

    def by_col(self, q: Tensor, table: Tensor | None, queries: slice, keys: slice) -> Tensor | None:
        """What the columns add to the logits, of q (B, heads, H, W, D) at `queries`: the term of the position, -inf
        outside the window. (B, heads, H, queries, keys), or without a table (queries, keys), or None for nothing."""
        terms = None
        if table is not None:
            terms = torch.einsum("bkhwd,wpd->bkhwp", q[..., queries, :], table[queries, keys])
        if self.col_reach < self.width:
            col = torch.arange(self.width, device=q.device)
            far = (col[keys].unsqueeze(0) - col[queries].unsqueeze(1)).abs() >= self.col_reach
            terms = q.new_zeros(far.shape) if terms is None else terms
            terms = terms.masked_fill_(far, float("-inf"))
        return terms

    def logits(self, step: Step, chunk: slice, q: Tensor, k: Tensor, by_row: Tensor | None, by_col: Tensor | None):
        """Of a step, (B, heads, rows, queries, keys); by_col is the chunk's and its block's."""
        logits = (q[step.query] @ k[step.key].transpose(-2, -1)).mul_(self.scale)
        if by_row is not None:
            logits += by_row[step.query][..., step.offset].unsqueeze(-1)
        if by_col is not None:
            logits += by_col if by_col.ndim == 2 else by_col[within(step, chunk)]
        return logits


def within(step: Step, chunk: slice) -> tuple[slice, ...]:
    """A step's queries, in a tensor of the chunk's heads and the block's columns alone."""
    images, heads, rows, _ = step.query
    return images, slice(heads.start - chunk.start, heads.stop - chunk.start), rows


class _Attend(torch.autograd.Function):
    """q, k (B, K, H, W, D), v (B, K, H, W, E), by_row (B, K, H, W, h), table (W, W, D) by column of query and key,
    multiplied by the scale -> out (B, K, H, W, E)."""

    @staticmethod
    def forward(ctx, q, k, v, by_row, table, neighbours: Neighbours):
        out = v.new_zeros(v.shape)
        log_total = q.new_empty(q.shape[:-1])
        for chunk, queries, keys in neighbours.parts(len(q)):
            by_col = neighbours.by_col(q[:, chunk], table, queries, keys)
            top = torch.full_like(log_total[:, chunk, :, queries], float("-inf"))  # of the logits so far
            total = torch.zeros_like(top)  # of exp(logits - top)
            for step in neighbours.steps(chunk, queries, keys):
                logits = neighbours.logits(step, chunk, q, k, by_row, by_col)
                here = within(step, chunk)
                old = top[here].clone()
                new = torch.maximum(old, logits.amax(-1))
                weight = (old - new).exp_()
                attn = logits.sub_(new.unsqueeze(-1)).exp_()
                top[here] = new
                total[here] = total[here] * weight + attn.sum(-1)
                out[step.query] = out[step.query] * weight.unsqueeze(-1) + attn @ v[step.key]
            out[:, chunk, :, queries] /= total.unsqueeze(-1)
            log_total[:, chunk, :, queries] = top + total.log()
        ctx.neighbours = neighbours
        ctx.save_for_backward(q, k, v, by_row, table, out, log_total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, by_row, table, out, log_total = ctx.saved_tensors
        neighbours = ctx.neighbours
        dots = (grad * out).sum(-1, keepdim=True)  # (B, K, H, W, 1)
        d_q, d_k, d_v = (t.new_zeros(t.shape) for t in (q, k, v))
        d_row, d_table = (None if t is None else torch.zeros_like(t) for t in (by_row, table))
        for chunk, queries, keys in neighbours.parts(len(q)):
            by_col = neighbours.by_col(q[:, chunk], table, queries, keys)
            d_col = None if table is None else torch.zeros_like(by_col)
            for step in neighbours.steps(chunk, queries, keys):
                query, key, offset = step
                attn = neighbours.logits(step, chunk, q, k, by_row, by_col)
                attn.sub_(log_total[query].unsqueeze(-1)).exp_()
                d_v[key] += attn.transpose(-2, -1) @ grad[query]
                d_logits = (grad[query] @ v[key].transpose(-2, -1)).sub_(dots[query]).mul_(attn)
                if table is not None:
                    d_row[query][..., offset] += d_logits.sum(-1)
                    d_col[within(step, chunk)] += d_logits
                d_logits.mul_(neighbours.scale)
                d_q[query] += d_logits @ k[key]
                d_k[key] += d_logits.transpose(-2, -1) @ q[query]
            if table is not None:
                own = q[:, chunk, :, queries]
                d_q[:, chunk, :, queries] += torch.einsum("bkhwp,wpd->bkhwd", d_col, table[queries, keys])
                d_table[queries, keys] += torch.einsum("bkhwp,bkhwd->wpd", d_col, own)
        return d_q, d_k, d_v, d_row, d_table, None


class Gathered(Implementation):
    """A row of keys at a time."""

    name = "gathered"
    windows = True
    evolves = logits = False

    def forward(self, problem: Problem) -> tuple[Tensor, None]:
        p, (B, K, N, _), (H, W) = problem, problem.q.shape, problem.feat_size
        dtype = torch.float32 if p.v.dtype in (torch.float16, torch.bfloat16) else p.v.dtype
        rows, cols = (H, W) if p.window is None else (reach(H, p.window[0]), reach(W, p.window[1]))
        with torch.autocast(p.q.device.type, enabled=False):
            query, key, value = (t.reshape(B, K, H, W, t.shape[-1]).to(dtype) for t in (p.q, p.k, p.v))
            by_row = table = None
            if p.height_rel is not None:
                by_row = query @ (p.scale * p.height_rel.to(dtype)).t()  # (B, K, H, W, h)
                table = by_position(cover_offsets(p.scale * p.width_rel.to(dtype), W), W)
            out = _Attend.apply(query, key, value, by_row, table,
                                Neighbours(K, H, W, p.head_window, p.wrap, rows, cols, p.scale))
        return out.to(p.v.dtype).view(B, K, N, p.v.shape[-1]), None


GATHERED = Gathered()
