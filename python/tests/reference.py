"""Dispatch and combine in plain NumPy, from everybody's inputs: what the emulated fabric's results are compared with."""
import numpy as np

from nccl_ep import emu
from nccl_ep.handle import align


class Batch:
    """One rank's inputs."""

    def __init__(self, rng, tokens, hidden, topk, experts, minus_one=0.0):
        self.x = emu.from_bfloat16(emu.to_bfloat16(rng.standard_normal((tokens, hidden)).astype(np.float32)))
        self.idx = np.array([rng.permutation(experts)[:topk] for _ in range(tokens)], np.int64).reshape(tokens, topk)
        self.idx[rng.random((tokens, topk)) < minus_one] = -1
        self.weights = np.where(self.idx < 0, 0, rng.random((tokens, topk))).astype(np.float32)
        self.fp8 = rng.integers(0, 256, (tokens, hidden), np.uint8)
        self.scales = rng.random((tokens, max(1, hidden // 32))).astype(np.float32)


class Flat:
    """What rank `me` receives, a row for each token: `source` [N, 2] (rank, token), `idx` [N, K] local or -1."""

    def __init__(self, batches, me, experts):
        locals_ = experts // len(batches)
        rows, idx, weights = [], [], []
        for rank, b in enumerate(batches):
            for token in range(len(b.idx)):
                here = b.idx[token] // locals_ == me
                if here.any():
                    rows.append((rank, token))
                    idx.append(np.where(here, b.idx[token] - me * locals_, -1))
                    weights.append(np.where(here, b.weights[token], 0))
        topk = batches[0].idx.shape[1]
        self.source = np.array(rows, np.int64).reshape(-1, 2)
        self.idx = np.array(idx, np.int64).reshape(-1, topk)
        self.weights = np.array(weights, np.float32).reshape(-1, topk)
        self.per_source = [sum(1 for r, _ in rows if r == rank) for rank in range(len(batches))]
        self.per_expert = [int((self.idx == e).sum()) for e in range(locals_)]

    def gather(self, batches, field):
        width = getattr(batches[0], field).shape[1:]
        rows = [getattr(batches[r], field)[t] for r, t in self.source]
        return np.array(rows, getattr(batches[0], field).dtype).reshape((-1,) + width)


class Expanded:
    """The same grouped by expert: `slot` [N, K] of each flat row's choices or -1, `row` and `k` [M] back, -1: padding."""

    def __init__(self, flat, alignment):
        self.slot = np.full(flat.idx.shape, -1, np.int64)
        self.row, self.k = [], []
        for expert in range(len(flat.per_expert)):
            for row, k in zip(*np.nonzero(flat.idx == expert)):
                self.slot[row, k] = len(self.row)
                self.row.append(row)
                self.k.append(k)
            padding = align(len(self.row), alignment) - len(self.row)
            self.row += [-1] * padding
            self.k += [-1] * padding
        self.row, self.k = np.array(self.row, np.int64), np.array(self.k, np.int64)
        self.filled = self.row >= 0

    def gather(self, rows):
        """Rows of the flat order at their slots, zeros in padding."""
        out = np.zeros((len(self.row),) + rows.shape[1:], rows.dtype)
        out[self.filled] = rows[self.row[self.filled]]
        return out


def round_bfloat16(values):
    return emu.from_bfloat16(emu.to_bfloat16(values))


def combine(batch, y, ranks, experts, domains=1, bias=(), multiple=True):
    """Sums of one rank's tokens from y [T, K, H], the bfloat16 row that each choice's expert gave: by rank in ascending
    k, rounded, then the ranks of a domain in the order of their highest k, rounded, then the domains in that order,
    to the sum of the biases. Without `multiple` reductions all rows in ascending k."""
    locals_, up = experts // ranks, ranks // domains
    out = np.zeros((len(batch.idx), y.shape[2]), np.float32)
    for rows in bias:
        out += rows
    for token, idx in enumerate(batch.idx):
        parts = [(int(idx[k]), k, y[token, k]) for k in np.nonzero(idx >= 0)[0]]
        for group in () if not multiple else (locals_, locals_ * up) if domains > 1 else (locals_,):
            sums = {}
            for expert, k, row in parts:
                total = sums.get(expert // group, (0, 0, np.zeros(y.shape[2], np.float32)))[2]
                sums[expert // group] = (expert, k, total + row)
            parts = [(expert, k, round_bfloat16(total)) for expert, k, total in sorted(sums.values(), key=lambda s: s[1])]
        for _, _, row in parts:
            out[token] += row
    return round_bfloat16(out)
