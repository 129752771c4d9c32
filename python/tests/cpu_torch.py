"""PyTorch's side of the package without a GPU: CPU tensors, ranks of the emulated fabric as threads. Tensors are copied to
emulated memory for each call and back after it, streams are waited for where a device would only order them, "cuda"
means the CPU, and the collectives of torch.distributed meet in this process. Importing this changes torch for good."""
import threading

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from nccl_ep import buffer, emu, torch_port
from nccl_ep.core import Array
from nccl_ep.library import call

torch.set_num_threads(1)
_here = threading.local()  # rank, its stream, the world


class World:
    """Where the ranks' threads exchange values."""

    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size), [None] * size

    def exchange(self, value):
        self.values[_here.rank.rank()] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def _all_to_all(out, values, out_sizes=None, sizes=None, **_):
    size = _here.rank.size()
    parts = _here.world.exchange(values.split(sizes or [len(values) // size] * size))
    out.copy_(torch.cat([p[_here.rank.rank()] for p in parts]))


class _Stream:
    def __init__(self, pointer=None):
        self.cuda_stream = pointer

    def wait(self, *_):
        """What it would wait for is over already."""

    wait_event = wait_stream = wait


class _Event:
    def record(self, stream=None):
        call('ncclEpEmuStreamSynchronize', _here.rank.comm, (stream or _here.stream).cuda_stream)

    def wait(self, stream=None):
        """The host has waited in record()."""

    def query(self):
        return True


class _OnStream:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before, _here.stream = _here.stream, self.stream

    def __exit__(self, *_):
        _here.stream = self.before


class _Operation(torch_port.Operation):
    def __init__(self, port, *how):
        super().__init__(port, *how)
        self.lent = port.lent = []

    def finish(self, tensors):
        self._port.fetch(self.lent)
        return super().finish(tensors)


class _Port(torch_port.Port):
    def __init__(self, group):
        self.group, self.comm, self.rank, self.size = group, group.comm, group.rank(), group.size()
        self.device, self.comm_stream = torch.device('cpu'), _Stream(group.stream())
        self.lent, self._kept = [], []  # of the call that is being made; of handles

    def num_sms(self):
        return self.group.num_sms

    def operation(self, previous_event, on_comm_stream, asynchronous):
        return _Operation(self, previous_event, on_comm_stream, asynchronous)

    def synchronize(self):
        self.group.synchronize()

    @staticmethod
    def owns(t):
        return isinstance(t, torch.Tensor)

    def _copy(self, to, source, size):
        call('ncclEpEmuMemcpy', self.comm, to, source, size, self.comm_stream.cuda_stream)

    def describe(self, t):
        if t is None or not t.numel():
            return torch_port.Port.describe(t)
        size = (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size()
        memory = emu.Tensor(self.group, (size,), 'uint8')
        self._copy(memory.address, t.data_ptr(), size)
        handle_memory = t.dtype == torch.uint8 and t.dim() == 1
        (self._kept if handle_memory else self.lent).append((memory, t, size))
        return Array(memory.address, self.dtype(t), tuple(t.shape))

    def fetch(self, lent):
        """Brings back what a call may have written."""
        for memory, t, size in lent:
            self._copy(t.data_ptr(), memory.address, size)
        call('ncclEpEmuStreamSynchronize', self.comm, self.comm_stream.cuda_stream)
        lent.clear()

    def counts(self, memory, address, n):
        t = torch.empty(n, dtype=torch.int32)
        self._copy(t.data_ptr(), address, 4 * n)
        call('ncclEpEmuStreamSynchronize', self.comm, self.comm_stream.cuda_stream)
        return t


class _OnCpu(TorchFunctionMode):
    """"cuda" is the CPU; comparisons of FP8, which the CPU lacks, compare bits."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get('device', '')).startswith('cuda'):
            kwargs['device'] = 'cpu'
        if function in (torch.equal, torch.Tensor.eq, torch.Tensor.__eq__) and \
                all(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in args):
            args = tuple(a.contiguous().view(torch.uint8) for a in args)
        return function(*args, **kwargs)


dist.get_rank = lambda *_: _here.rank.rank()
dist.get_world_size = lambda *_: _here.rank.size()
dist.barrier = lambda *_: _here.world.exchange(None)
dist.all_to_all_single = _all_to_all
torch.cuda.Event, torch.cuda.stream = _Event, _OnStream
torch.cuda.current_stream = lambda *_: _here.stream
torch.cuda.synchronize = lambda *_: _here.rank.synchronize()
torch.cuda.is_current_stream_capturing = lambda: False
torch.Tensor.record_stream = lambda *_: None
buffer._port = _Port
buffer._comm = lambda group: group.comm


def run(body, ranks=2, domains=1, **options):
    """emu.run, with CPU tensors for memory of the ranks, `ranks` in all."""
    world = World(ranks)

    def on_cpu(rank):
        _here.rank, _here.stream, _here.world = rank, _Stream(), world
        try:
            with _OnCpu():
                return body(rank)
        except BaseException:
            world.barrier.abort()
            raise
    return emu.run(on_cpu, ranks // domains, domains, **options)
