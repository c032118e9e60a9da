"""What the kernels' dropout keeps, in torch's integers."""
import torch

MASK = (1 << 32) - 1


def scramble(x):
    """Wellons's triple32 of whole numbers, in int64."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = times(x ^ x >> shift, factor)
    return x ^ x >> 14


def times(x, factor):
    """x * factor modulo 2**32, in two steps that int64 holds."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & MASK


def kept_entries(seed: int, B: int, K: int, N: int, p: float) -> torch.Tensor:
    """(B, K, N, N), True where the probability is kept."""
    query, key = torch.arange(B * K * N).view(B, K, N, 1), torch.arange(N)
    high_seed = torch.tensor(seed >> 32 & MASK)
    low = scramble((seed & MASK) + scramble(high_seed) & MASK)
    high = scramble(low ^ high_seed)
    start = scramble(query + low & MASK)
    salt = scramble(start ^ high)
    x = start + key & MASK
    x = times(x ^ x >> 16, 0x7FEB352D) + salt & MASK
    x = times(x ^ x >> 15, 0x846CA68B)
    x = x ^ x >> 16
    return (x >> 8) >= round(p * (1 << 24))
