"""What ElasticBuffer needs of PyTorch: the communicator of a process group, tensors, streams and events."""
import torch
import torch.distributed as dist

from . import nccl
from .core import Array

_TYPES = {getattr(torch, name): name for name in (
    'int8', 'uint8', 'int32', 'uint32', 'int64', 'uint64', 'float16', 'float32', 'float64', 'bfloat16',
    'float8_e4m3fn', 'float8_e5m2') if hasattr(torch, name)}
_NAMES = {name: dtype for dtype, name in _TYPES.items()}
_comms = {}


def communicator(group):
    """The group's NCCL communicator: PyTorch's own where it tells, else one made for this purpose and kept. Collective
    at its first use of a group."""
    if group in _comms:
        return _comms[group]
    device = torch.device('cuda', torch.cuda.current_device())
    backend = group._get_backend(device) if hasattr(group, '_get_backend') else None
    comm = backend._comm_ptr() if hasattr(backend, '_comm_ptr') else 0
    if not comm and hasattr(backend, '_comm_ptr'):  # made by the group's first collective
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
        torch.cuda.synchronize()
        comm = backend._comm_ptr()
    if not comm:
        ids = [None] * group.size()
        dist.all_gather_object(ids, nccl.unique_id() if group.rank() == 0 else None, group)
        comm = nccl.init_rank(ids[0], group.size(), group.rank())
    _comms[group] = comm
    return comm


class Operation:
    """One call's work on the communication stream: waits for what must come first, and at the end either lets the
    caller's stream wait (synchronous) or gives an event (asynchronous)."""

    def __init__(self, port, previous_event, on_comm_stream, asynchronous):
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
            raise RuntimeError('torch.utils.deterministic.fill_uninitialized_memory is on: expected off, because PyTorch '
                               'then fills new tensors beside the communication that writes them')
        self._port, self._asynchronous = port, asynchronous
        self._caller = torch.cuda.current_stream(port.device)
        self._comm = port.comm_stream
        self._on_comm_stream = on_comm_stream
        self.stream = self._comm.cuda_stream
        if previous_event is not None:
            self._comm.wait_event(previous_event.event)
        else:
            self._comm.wait_stream(self._caller)
        self.end = None

    def on_comm_stream(self):
        """Context: work and memory of the communication stream."""
        return torch.cuda.stream(self._comm)

    def allocation(self):
        """Context in which the tensors that the caller gets are made."""
        return torch.cuda.stream(self._comm if self._on_comm_stream else self._caller)

    def wait(self, event):
        self._comm.wait_event(event.event)

    def routed(self):
        """The host has waited for the routing: PyTorch's allocator needs no word of it."""

    def finish(self, tensors):
        self.end = torch.cuda.Event()
        self.end.record(self._comm)
        if not self._asynchronous:
            self._caller.wait_event(self.end)
        if self._asynchronous or self._on_comm_stream:
            for t in tensors:
                t.record_stream(self._comm)
                t.record_stream(self._caller)
        return self.end if self._asynchronous else None


    def abandon(self, tensors):
        """The end of a call that failed: the caller's stream waits in any case."""
        self._asynchronous = False
        self.finish(tensors)


class Port:
    def __init__(self, group):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.device = torch.device('cuda', torch.cuda.current_device())
        self.comm = communicator(group)
        self.comm_stream = torch.cuda.Stream(self.device, priority=-1)

    def close(self):
        """PyTorch's streams come from a pool."""

    def num_sms(self):
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def operation(self, previous_event, on_comm_stream, asynchronous):
        return Operation(self, previous_event, on_comm_stream, asynchronous)

    def synchronize(self):
        torch.cuda.synchronize(self.device)

    @staticmethod
    def may_query():
        """Events must not be asked while a graph is being captured."""
        return not torch.cuda.is_current_stream_capturing()

    def barrier(self, use_comm_stream, with_cpu_sync):
        caller = torch.cuda.current_stream(self.device)
        stream = self.comm_stream if use_comm_stream else caller
        if with_cpu_sync:
            torch.cuda.synchronize(self.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), group=self.group)
        caller.wait_stream(stream)
        if with_cpu_sync:
            torch.cuda.synchronize(self.device)

    def owns(self, t):
        return isinstance(t, torch.Tensor) and t.device == self.device

    @staticmethod
    def owns_event(event):
        """PyTorch's may be of any device."""
        return True

    @staticmethod
    def address(t):
        return t.data_ptr()

    @staticmethod
    def describe(t):
        return None if t is None else Array(t.data_ptr() if t.numel() else None, Port.dtype(t), tuple(t.shape))

    @staticmethod
    def dtype(t):
        return _TYPES.get(t.dtype, str(t.dtype))

    @staticmethod
    def dense(t):
        return t.is_contiguous()

    @staticmethod
    def make_dense(t):
        return t.contiguous()

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=_NAMES[dtype], device=self.device)

    def zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=_NAMES[dtype], device=self.device)

    def columns(self, rows, width, dtype):
        """[rows, width] in columns that start 16 bytes aligned, of elements of 4 bytes."""
        return torch.empty_strided((rows, width), (1, (rows + 3) // 4 * 4), dtype=_NAMES[dtype], device=self.device)

    @staticmethod
    def fill(t, value):
        t.fill_(value)

    @staticmethod
    def copy(to, t):
        to.copy_(t)

    def integers(self, values, shape, dtype):
        """A device tensor with the host's values, a list or an array of ctypes."""
        return torch.tensor(list(values), dtype=_NAMES[dtype], device='cpu').reshape(shape).to(self.device)

    def counts(self, memory, address, n):
        """n counts inside a handle's memory, int32."""
        memory.record_stream(torch.cuda.current_stream(self.device))  # where it is about to be read
        at = address - memory.data_ptr()
        return memory[at:at + 4 * n].view(torch.int32)

    @staticmethod
    def sums_by_rank(per_source, scaleup):
        """Running sums by index inside the domain, over all domains."""
        return per_source.reshape(-1, scaleup).sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @staticmethod
    def sums_by_expert(per_expert, start, alignment, expand):
        """Where each expert's rows end: with their padding, or (expand) without."""
        if expand:
            return start[:-1] + per_expert
        return ((per_expert + (alignment - 1)) // alignment * alignment).cumsum(0, dtype=torch.int32)

    @staticmethod
    def clone(t):
        return t.clone()

    @staticmethod
    def add(t, other):
        t.add_(other)

    def source_metadata(self, metadata, received, topk, max_tokens):
        """[received, 2 + topk]: number of the source token among all ranks' rooms, source rank and last local k in one,
        and the slot of each k or -1."""
        def host(values, n, dtype):
            return torch.frombuffer(values, dtype=dtype)[:n].to(torch.int32)
        with torch.device('cpu'):
            slot = host(metadata.received_slot, received * topk, torch.int64).reshape(received, topk)
            rank = host(metadata.source_rank, received, torch.int32)
            token = host(metadata.source_token, received, torch.int32)
            k = torch.arange(1, topk + 1, dtype=torch.int32)
            last = ((slot >= 0).to(torch.int32) * k).amax(dim=1) - 1
            rows = torch.cat([(rank * max_tokens + token)[:, None], (rank * topk + last)[:, None], slot], dim=1)
            return rows.to(torch.int32).to(self.device)
