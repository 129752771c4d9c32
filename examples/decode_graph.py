#!/usr/bin/env python3
"""A decode loop with a CUDA graph: one step of a mixture-of-experts layer (gate, dispatch, experts, combine) is captured once and
replayed for each token position, with new tokens and so new routing in place. Each step is compared with the plain layer.

    python3 examples/decode_graph.py                                # all GPUs of this machine, at most 8
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'python'))

TOKENS, HIDDEN, INNER, EXPERTS, TOPK, STEPS = 64, 1024, 256, 16, 4, 50


def skip(why):
    print('decode_graph: skipped: ' + why)
    sys.exit(77)


try:
    import torch
    import torch.distributed as dist
except ImportError:
    skip('no PyTorch')
from nccl_ep import ElasticBuffer


class Decoder:
    """Every rank has EXPERTS / ranks experts, of weights that all ranks could make. `x` is the state of the loop: a step reads it
    and writes it."""

    def __init__(self, buffer, rank, ranks):
        torch.manual_seed(1)

        def weights(*shape):
            return torch.randn(*shape, device='cuda').div(shape[-2] ** 0.5).bfloat16()
        self.gate, self.all_up, self.all_down = weights(HIDDEN, EXPERTS), weights(EXPERTS, HIDDEN, INNER), \
            weights(EXPERTS, INNER, HIDDEN)
        mine = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        self.up, self.down = self.all_up[mine], self.all_down[mine]
        self.buffer = buffer
        torch.manual_seed(100 + rank)
        self.x = torch.randn(TOKENS, HIDDEN, device='cuda').bfloat16()

    def route(self, x):
        weights, idx = (x @ self.gate).float().softmax(-1).topk(TOPK)
        return idx, weights / weights.sum(-1, keepdim=True)

    def experts(self, rows, idx, weights):
        """All experts here on all rows, of a number that does not depend on the routing, and then the sum of those selected."""
        each = torch.relu(rows @ self.up) @ self.down  # [experts, rows, hidden]
        scale = torch.zeros(len(rows), len(each), device=rows.device).scatter_add_(1, idx.clamp(min=0), weights * (idx >= 0))
        # Rows that nobody filled may hold anything: they are summed away by nobody, but 0 * NaN is NaN.
        return torch.where(scale.t()[..., None] > 0, each.float() * scale.t()[..., None], 0).sum(0).bfloat16()

    def normalised(self, y):
        y = y.float()
        return (y / y.norm(dim=1, keepdim=True) * HIDDEN ** 0.5).bfloat16()

    def step(self):
        idx, weights = self.route(self.x)
        rows, row_idx, row_weights, handle, _ = self.buffer.dispatch(self.x, idx, weights, num_experts=EXPERTS,
                                                                     do_cpu_sync=False)
        y, _, _ = self.buffer.combine(self.experts(rows, row_idx, row_weights), handle)
        self.x.copy_(self.normalised(self.x + y))

    def reference(self, x):
        idx, weights = self.route(x)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in range(EXPERTS):
            token, k = (idx == e).nonzero(as_tuple=True)
            out = torch.relu(x[token] @ self.all_up[e]) @ self.all_down[e]
            y = y.index_add(0, token, out.float() * weights[token, k, None])
        return self.normalised(x + y.bfloat16())

    def difference(self, replay):
        """Of one step from the plain layer's, relative."""
        want = self.reference(self.x)
        replay()
        return ((self.x.float() - want.float()).norm() / want.float().norm()).item()


def main(rank, ranks):
    torch.cuda.set_device(rank)
    dist.init_process_group('nccl', rank=rank, world_size=ranks, device_id=torch.device('cuda', rank))
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK,
                           explicitly_destroy=True)
    decoder = Decoder(buffer, rank, ranks)
    decoder.step()  # makes the buffer's memory and compiles; a capture can do neither
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode='thread_local'):  # PyTorch's own threads may ask for events meanwhile
        decoder.step()
    errors = [decoder.difference(graph.replay if i % 10 else decoder.step) for i in range(STEPS)]  # eager calls between
    buffer.check()
    print('decode_graph: rank %d of %d: %d steps, relative difference at most %.4f' % (rank, ranks, STEPS, max(errors)))
    torch.cuda.synchronize()
    graph.reset()
    buffer.destroy()
    dist.destroy_process_group()
    if max(errors) > 0.02:
        sys.exit('decode_graph: rank %d: expected at most 0.02, the rounding of bfloat16' % rank)


if __name__ == '__main__':
    if not torch.cuda.is_available():
        skip('no GPU')
    os.environ.setdefault('MASTER_ADDR', '127.0.0.1')
    os.environ.setdefault('MASTER_PORT', '29433')
    count = 1 << (min(8, torch.cuda.device_count()).bit_length() - 1)  # a divisor of EXPERTS
    torch.multiprocessing.spawn(main, args=(count,), nprocs=count)
