#!/usr/bin/env python3
"""Communication beside compute: a GEMM that alone takes as long as a dispatch (or combine), and both together, with few SMs
for the communication and the others for the GEMM. Prints times and their ratio, and can write a timeline.

    python3 examples/overlap.py                                     # two GPUs of this machine
    python3 examples/overlap.py --sms 8,16,24 --svg timeline.svg --json times.json
"""
import argparse
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'python'))

WIDTH, ITERATIONS, WARMUP = 4096, 30, 5  # of the GEMM's result; of a measurement
OPERATIONS = ('dispatch', 'combine', 'dispatch-expanded', 'combine-expanded')


def skip(why):
    print('overlap: skipped: ' + why)
    sys.exit(77)


try:
    import torch
    import torch.distributed as dist
except ImportError:
    skip('no PyTorch')
from nccl_ep import ElasticBuffer


def median(values):
    return sorted(values)[len(values) // 2]


def event():
    return torch.cuda.Event(enable_timing=True)


class Bench:
    def __init__(self, args, rank):
        self.args, self.rank = args, rank
        self.buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=args.tokens, hidden=args.hidden,
                                    num_topk=args.topk, explicitly_destroy=True)
        self.one = torch.zeros(1, device='cuda')
        self.left = torch.randn(1 << 14, args.hidden, device='cuda').bfloat16()
        self.right = torch.randn(args.hidden, WIDTH, device='cuda').bfloat16()
        self.result = torch.empty(len(self.left), WIDTH, device='cuda', dtype=torch.bfloat16)
        self.x = torch.randn(args.tokens, args.hidden, device='cuda').bfloat16()
        self.idx = torch.rand(args.tokens, args.experts, device='cuda').topk(args.topk).indices
        self.weights = torch.rand(args.tokens, args.topk, device='cuda')
        self.routed = {}

    def gemm(self, rows, spared):
        """The first rows of the product, on all SMs but `spared`: as compute kernels beside communication should be."""
        torch._C._set_sm_carveout_experimental(spared or None)
        torch.mm(self.left[:rows], self.right, out=self.result[:rows])
        torch._C._set_sm_carveout_experimental(None)

    def communicate(self, operation, sms):
        """Queues it on the communication stream."""
        expand = operation.endswith('expanded')
        if expand not in self.routed:
            self.routed[expand] = self.buffer.dispatch(self.x, self.idx, self.weights, num_experts=self.args.experts,
                                                       do_expand=expand, expert_alignment=128 if expand else 1)
        rows, _, _, handle, _ = self.routed[expand]
        if operation.startswith('dispatch'):
            self.buffer.dispatch(self.x, handle=handle, topk_weights=self.weights, do_expand=expand, num_sms=sms,
                                 async_with_compute_stream=True)
        else:
            self.buffer.combine(rows, handle, num_sms=sms, async_with_compute_stream=True)

    def once(self, communicate, gemm):
        """Both ranks' streams meet, then what is given runs. Events: (start, end of communication, GEMM's start, end)."""
        torch.cuda._sleep(2000000)  # until the host has queued everything
        dist.all_reduce(self.one)
        start, sent, begin, end = event(), event(), event(), event()
        start.record()
        if communicate:
            communicate()
            sent.record(self.buffer.get_comm_stream())
        if gemm:
            begin.record()
            gemm()
            end.record()
        torch.cuda.current_stream().wait_stream(self.buffer.get_comm_stream())
        return start, sent if communicate else None, begin if gemm else None, end if gemm else None

    def measure(self, communicate, gemm):
        """Medians in microseconds after the start: (end of communication, GEMM's start, end, end of all), of the slower rank."""
        times = []
        for i in range(WARMUP + ITERATIONS):
            start, *others = self.once(communicate, gemm)
            torch.cuda.synchronize()
            t = [start.elapsed_time(e) * 1e3 if e else 0.0 for e in others]
            if i >= WARMUP:
                times.append(t + [max(t)])
        slower = torch.tensor([median(t) for t in zip(*times)], dtype=torch.float64, device='cuda')
        dist.all_reduce(slower, dist.ReduceOp.MAX)
        return slower.tolist()

    def rows_for(self, wanted):
        """Rows whose product takes about `wanted` microseconds on all SMs, and how long it takes."""
        rows = 4096
        for _ in range(3):
            _, begin, end, _ = self.measure(None, lambda: self.gemm(rows, 0))
            better = min(len(self.left), max(128, int(rows * wanted / (end - begin) / 128 + 0.5) * 128))
            if better == rows:
                break
            rows = better
        _, begin, end, _ = self.measure(None, lambda: self.gemm(rows, 0))
        return rows, end - begin

    def case(self, operation, sms, spare):
        def communicate():
            self.communicate(operation, sms)
        sent = self.measure(communicate, None)[0]
        rows, alone = self.rows_for(sent)
        spared = sms + spare
        _, begin, end, _ = self.measure(None, lambda: self.gemm(rows, spared))
        both = self.measure(communicate, lambda: self.gemm(rows, spared))
        r = dict(operation=operation, sms=sms, spared=spared, communication_us=sent, gemm_rows=rows, gemm_us=alone,
                 gemm_on_fewer_us=end - begin, together_us=both[3], communication_together_us=both[0],
                 gemm_start_us=both[1], gemm_end_us=both[2], ratio=both[3] / max(sent, alone))
        if self.rank == 0:
            print('%-18s %3d SMs: alone %5.0f us; GEMM of %5d rows alone %5.0f us, without %d SMs %5.0f us; together %5.0f us '
                  '(communication %5.0f, GEMM %5.0f): %.2f x the longer'
                  % (operation, sms, sent, rows, alone, spared, end - begin, both[3], both[0], both[2], r['ratio']), flush=True)
        return r, communicate, lambda: self.gemm(rows, spared)

    def timeline(self, communicate, gemm):
        """Kernels of one run together, from the profiler: (name, stream, start, length) in microseconds."""
        from torch.profiler import ProfilerActivity, profile
        self.once(communicate, gemm)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                self.once(communicate, gemm)
                torch.cuda.synchronize()
        path = '/tmp/nccl_ep_overlap_%d.json' % os.getpid()
        profiler.export_chrome_trace(path)
        with open(path) as file:
            trace = json.load(file)
        os.remove(path)
        kernels = sorted((e['ts'], e['dur'], e['name'], e['args'].get('stream')) for e in trace['traceEvents']
                         if e.get('cat') == 'kernel')
        last = max(i for i, k in enumerate(kernels) if 'nccl' in k[2].lower() and 'AllReduce' in k[2])
        zero = kernels[last][0] + kernels[last][1]
        return [dict(name=name, stream=stream, start_us=ts - zero, length_us=length)
                for ts, length, name, stream in kernels[last + 1:]]


def draw(path, result, kernels):
    """One line a stream."""
    streams = sorted({k['stream'] for k in kernels})
    end = max(k['start_us'] + k['length_us'] for k in kernels)
    scale, height = 900 / end, 34
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="980" height="%d" font-family="sans-serif" font-size="12">'
           % (60 + height * len(streams)),
           '<text x="10" y="18">%s on %d SMs beside a GEMM of the same length: %.0f us for %.0f and %.0f alone</text>'
           % (result['operation'], result['sms'], result['together_us'], result['communication_us'], result['gemm_us'])]
    for k in kernels:
        y = 30 + height * streams.index(k['stream'])
        ours = 'ep_' in k['name']
        out.append('<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/><text x="%.1f" y="%d">%s %.0f us</text>'
                   % (40 + k['start_us'] * scale, y, max(1, k['length_us'] * scale), height - 8,
                      '#8fbf8f' if ours else '#9fb4d8', 44 + k['start_us'] * scale, y + 17,
                      'dispatch' if 'dispatch' in k['name'] else 'combine' if 'combine' in k['name'] else 'GEMM',
                      k['length_us']))
    y = 44 + height * len(streams)
    out.append('<text x="40" y="%d">0</text><text x="940" y="%d" text-anchor="end">%.0f us</text></svg>' % (y, y, end))
    with open(path, 'w') as file:
        file.write('\n'.join(out) + '\n')


def main(rank, ranks, args):
    torch.cuda.set_device(rank)
    torch.backends.cuda.preferred_blas_library('cublaslt')  # the one that takes a number of SMs
    dist.init_process_group('nccl', rank=rank, world_size=ranks, device_id=torch.device('cuda', rank))
    torch.manual_seed(rank)
    bench = Bench(args, rank)
    default = bench.buffer.get_theoretical_num_sms(args.experts, args.topk)
    results, drawn = [], None
    for operation in args.operations.split(','):
        for sms in [int(s) for s in args.sms.split(',')] if args.sms else [default]:
            result, communicate, gemm = bench.case(operation, sms, args.spare)
            results.append(result)
            drawn = drawn or (result, communicate, gemm)
    kernels = bench.timeline(*drawn[1:]) if args.svg or args.json else []
    if rank == 0 and args.svg:
        draw(args.svg, drawn[0], kernels)
    if rank == 0 and args.json:
        with open(args.json, 'w') as file:
            json.dump(dict(device=torch.cuda.get_device_name(), tokens=args.tokens, hidden=args.hidden, topk=args.topk,
                           experts=args.experts, results=results, timeline=kernels), file, indent=1)
    bench.buffer.destroy()
    dist.destroy_process_group()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--hidden', type=int, default=7168)
    parser.add_argument('--topk', type=int, default=8)
    parser.add_argument('--experts', type=int, default=256)
    parser.add_argument('--operations', default=','.join(OPERATIONS), help='a list of ' + ', '.join(OPERATIONS))
    parser.add_argument('--sms', default='', help='for the communication: a list (default: the overlap setting)')
    parser.add_argument('--spare', type=int, default=0, help='SMs that neither the communication nor the GEMM has')
    parser.add_argument('--svg', help='timeline of the first case')
    parser.add_argument('--json', help='all figures, and the timeline')
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        skip('fewer than two GPUs')
    os.environ.setdefault('MASTER_ADDR', '127.0.0.1')
    os.environ.setdefault('MASTER_PORT', '29432')
    torch.multiprocessing.spawn(main, args=(2, options), nprocs=2)
