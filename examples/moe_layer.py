#!/usr/bin/env python3
"""A mixture-of-experts layer in PyTorch, trained for a step: two micro-batches, so that the experts of one work while the
other's tokens travel. Compares output and gradient with the same layer computed on one GPU.

    python3 examples/moe_layer.py                                   # all GPUs of this machine, at most 8
    torchrun --nproc_per_node 2 examples/moe_layer.py
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'python'))

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 512, 1024, 512, 16, 4


def skip(why):
    print('moe_layer: skipped: ' + why)
    sys.exit(77)


try:
    import torch
    import torch.distributed as dist
except ImportError:
    skip('no PyTorch')
from nccl_ep import ElasticBuffer
from nccl_ep.autograd import moe_combine, moe_dispatch


class MoE(torch.nn.Module):
    """Every rank has EXPERTS / ranks experts, of weights that all ranks could make: a reference for the comparison."""

    def __init__(self, buffer, rank, ranks):
        super().__init__()
        torch.manual_seed(1)

        def weights(*shape):
            return torch.randn(*shape, device='cuda').div(shape[-2] ** 0.5).bfloat16()
        self.gate = torch.nn.Parameter(weights(HIDDEN, EXPERTS))
        self.all_up, self.all_down = weights(EXPERTS, HIDDEN, INNER), weights(EXPERTS, INNER, HIDDEN)
        mine = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        self.up = torch.nn.Parameter(self.all_up[mine].clone())
        self.down = torch.nn.Parameter(self.all_down[mine].clone())
        self.buffer = buffer

    def route(self, x):
        weights, idx = (x @ self.gate).float().softmax(-1).topk(TOPK)
        return idx, weights / weights.sum(-1, keepdim=True)

    def experts(self, rows, weights, counts):
        """Each expert's zone of rows through its two matrices; the rows' weights are applied here."""
        out = [torch.relu(zone @ up) @ down for zone, up, down in zip(rows.split(counts), self.up, self.down)]
        return (torch.cat(out).float() * weights[:, None]).bfloat16()

    def forward(self, x):
        options = dict(do_expand=True, expert_alignment=16, async_with_compute_stream=True)
        sent, back = [], []
        for micro in x.chunk(2):
            sent.append(moe_dispatch(self.buffer, micro, *self.route(micro), EXPERTS, **options))
        for rows, _, weights, handle, event in sent:
            event.current_stream_wait()
            y = self.experts(rows, weights, handle.num_recv_tokens_per_expert_list)
            back.append(moe_combine(self.buffer, y, handle, async_with_compute_stream=True))
        for _, event in back:
            event.current_stream_wait()
        return torch.cat([y for y, _ in back])

    def reference(self, x):
        """The same by plain gathering of all experts' weights: one row at a time for each choice."""
        idx, weights = self.route(x)
        y = torch.zeros_like(x, dtype=torch.float32)
        for e in range(EXPERTS):
            token, k = (idx == e).nonzero(as_tuple=True)
            out = torch.relu(x[token] @ self.all_up[e]) @ self.all_down[e]
            y = y.index_add(0, token, out.float() * weights[token, k, None])
        return y.bfloat16()


def step(forward, x, target):
    x = x.clone().requires_grad_()
    y = forward(x)
    torch.nn.functional.mse_loss(y.float(), target.float(), reduction='sum').backward()
    return y.detach().float(), x.grad.float()


def main(rank, ranks):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group('nccl', rank=rank, world_size=ranks, device_id=torch.device('cuda', torch.cuda.current_device()))
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK,
                           explicitly_destroy=True)
    layer = MoE(buffer, rank, ranks)
    torch.manual_seed(100 + rank)
    x, target = (torch.randn(TOKENS, HIDDEN, device='cuda').bfloat16() for _ in range(2))
    y, grad = step(layer, x, target)
    want_y, want_grad = step(layer.reference, x, target)
    errors = [((a - b).norm() / b.norm()).item() for a, b in ((y, want_y), (grad, want_grad))]
    print('moe_layer: rank %d of %d: relative difference %.4f (output), %.4f (gradient)' % (rank, ranks, *errors))
    buffer.destroy()
    dist.destroy_process_group()
    if max(errors) > 0.02:
        sys.exit('moe_layer: rank %d: expected at most 0.02, the rounding of bfloat16' % rank)


if __name__ == '__main__':
    if not torch.cuda.is_available():
        skip('no GPU')
    if 'RANK' in os.environ:
        main(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))
    else:
        os.environ.setdefault('MASTER_ADDR', '127.0.0.1')
        os.environ.setdefault('MASTER_PORT', '29431')
        count = 1 << (min(8, torch.cuda.device_count()).bit_length() - 1)  # a divisor of EXPERTS
        torch.multiprocessing.spawn(main, args=(count,), nprocs=count)
