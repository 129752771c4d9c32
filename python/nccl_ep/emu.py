"""Ranks of the emulated fabric in one process, a thread each, with memory that NumPy reads and writes. What a process
group is to PyTorch, a `Rank` is here: hand it to ElasticBuffer. `run` makes the ranks and the threads.

    def body(rank):
        buffer = ElasticBuffer(rank, num_max_tokens_per_rank=16, hidden=64)
        x = rank.tensor(numpy_array)
        ...
    results = emu.run(body, ranks=4)
"""
import contextlib
import ctypes
import math
import threading

import numpy as np

from . import c_api, checks, events, rounding
from .core import Array, Unique
from .library import call
from .progress import Progress

# How NumPy holds an element; types it does not have are bits.
STORAGE = {'int8': np.int8, 'uint8': np.uint8, 'int32': np.int32, 'uint32': np.uint32, 'int64': np.int64,
           'uint64': np.uint64, 'float16': np.float16, 'float32': np.float32, 'float64': np.float64,
           'bfloat16': np.uint16, 'float8_e4m3fn': np.uint8, 'float8_e5m2': np.uint8}


BARRIER_SECONDS = 100


def to_bfloat16(values):
    """Floating-point values to the bits of bfloat16, to the nearest, ties to even."""
    return rounding.encode(values, 'bfloat16')


def from_bfloat16(bits):
    return rounding.decode(bits, 'bfloat16')


def stored(values, dtype):
    """Values as NumPy holds elements of a type. What would change their meaning is refused."""
    values = np.asarray(values)
    kind, to = values.dtype.kind, np.dtype(STORAGE[dtype])
    if dtype in rounding.BITS and kind == 'f':
        return rounding.encode(values, dtype)
    if dtype in rounding.BITS:
        fits, expected = values.dtype == to, 'floating-point values, or their bits as %s' % to
    elif to.kind == 'f':
        fits, expected = kind in 'fiu', 'numbers'
    else:
        fits, expected = kind in 'iu', 'whole numbers'
    if not fits:
        raise TypeError('values are %s: expected %s for a tensor of %s' % (values.dtype, expected, dtype))
    if to.kind in 'iu' and values.size and not np.can_cast(values.dtype, to):
        low, high, limits = int(values.min()), int(values.max()), np.iinfo(to)
        if low < limits.min or high > limits.max:
            raise ValueError('values are %d to %d: expected %d to %d for a tensor of %s' % (low, high, limits.min, limits.max, dtype))
    return np.asarray(values, to, order='C')


class _Memory(Unique):
    """Bytes of emulated memory. They are freed when the rank next synchronises: a kernel may still use them."""

    def __init__(self, rank, size):
        pointer = ctypes.c_void_p()
        call('ncclEpEmuMalloc', rank.comm, pointer, max(1, size), b'python')
        self.rank = rank
        self.address = pointer.value

    def __del__(self):
        if getattr(self, 'address', None):
            self.rank._let_go(self.address)


class Tensor(Unique):
    """A dense tensor in emulated memory. bfloat16 and FP8 are bits to NumPy (uint16, uint8)."""

    def __init__(self, rank, shape, dtype, strides=None, elements=None):
        if dtype not in STORAGE:
            raise TypeError('dtype is %r: expected one of %s' % (dtype, ', '.join(sorted(STORAGE))))
        for n in shape:
            checks.whole(most=checks.UINT64, extent=n)
        self.rank, self.shape, self.dtype = rank, tuple(int(n) for n in shape), dtype
        self.itemsize = c_api.TYPES[dtype][1]
        self._elements = math.prod(self.shape) if elements is None else elements
        self._strides = strides
        self._memory = _Memory(rank, self._elements * self.itemsize)
        self.address = self._memory.address

    def part(self, address, shape, dtype):
        """A tensor inside this one's memory."""
        part = object.__new__(Tensor)
        part.rank, part.shape, part.dtype, part.address, part._memory = self.rank, shape, dtype, address, self._memory
        part.itemsize, part._elements, part._strides = c_api.TYPES[dtype][1], math.prod(shape), None
        return part

    @property
    def device(self):
        return 'rank %d' % self.rank.rank()

    def __len__(self):
        if not self.shape:
            raise TypeError('len() of a tensor without dimensions')
        return self.shape[0]

    def _copy(self, to, source, size):
        if size:
            self.rank._progress.queue(self.rank.current)
            call('ncclEpEmuMemcpy', self.rank.comm, to, source, size, self.rank.current)

    def set(self, values):
        """Copies from NumPy, in the order of the rank's current stream; see Rank.tensor."""
        values = stored(values, self.dtype)
        if values.shape != self.shape:
            raise ValueError('values have shape %s: expected %s' % (values.shape, self.shape))
        self.rank._keep(values)
        self._copy(self.address, values.ctypes.data, values.nbytes)
        return self

    def numpy(self):
        """A copy for NumPy: waits for the rank's current stream, as a framework's copy to the host does."""
        flat = np.zeros(self._elements, STORAGE[self.dtype])
        self._copy(flat.ctypes.data, self.address, flat.nbytes)
        self.rank.wait()
        if self._strides is None:
            return flat.reshape(self.shape)
        return np.lib.stride_tricks.as_strided(flat, self.shape, [s * self.itemsize for s in self._strides]).copy()

    def float(self):
        """The values as float32."""
        values = self.numpy()
        return rounding.decode(values, self.dtype) if self.dtype in rounding.BITS else values.astype(np.float32)


class Event(Unique):
    """An event of a rank's streams."""

    def __init__(self, rank):
        pointer = ctypes.c_void_p()
        call('ncclEpEmuEventCreate', rank.comm, pointer)
        self.rank, self.pointer, self._point = rank, pointer, None

    def record(self, stream):
        call('ncclEpEmuEventRecord', self.rank.comm, self.pointer, stream)
        self._point = self.rank._progress.record(stream)

    def wait(self, stream=None):
        stream = stream or self.rank.current
        call('ncclEpEmuStreamWaitEvent', self.rank.comm, stream, self.pointer)
        if self._point is not None:
            self.rank._progress.order(stream, self._point)

    def query(self):
        """Whether the host has waited for it, or for what came after it."""
        return self._point is None or self.rank._progress.passed(self._point)

    def __del__(self):
        if getattr(self, 'pointer', None) is not None:
            self.rank._dead_events.append(self.pointer)


class Rank(Unique):
    """One rank of an emulated communicator; calls come from one thread."""

    def __init__(self, comm, rank, size, num_sms, meeting):
        self.comm, self._rank, self._size, self.num_sms = comm, rank, size, num_sms
        self.current = None  # the rank's default stream
        self._progress = Progress()
        self._garbage, self._pending, self._dead_events = [], [], []  # (what it awaits, address), (what it awaits, objects), events
        self._streams = []
        self._meeting = meeting

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def stream(self):
        """A new stream, for `current`."""
        pointer = ctypes.c_void_p()
        call('ncclEpEmuStreamCreate', self.comm, pointer)
        self._streams.append(pointer)
        return pointer

    def drop_stream(self, stream):
        """Gives back a stream that was waited for."""
        self._streams.remove(stream)
        call('ncclEpEmuStreamDestroy', self.comm, stream)

    def mark(self, stream):
        """An event on a stream."""
        event = Event(self)
        event.record(stream)
        return event

    def empty(self, shape, dtype):
        return Tensor(self, shape, dtype)

    def _keep(self, *objects):
        """Alive until what is queued now is over."""
        self._pending.append((self._progress.now(), objects))

    def _let_go(self, address):
        self._garbage.append((self._progress.now(), address))

    def tensor(self, values, dtype=None):
        """A tensor with NumPy's values, of their type or of `dtype`. For 'bfloat16', 'float8_e4m3fn' and 'float8_e5m2', which NumPy
        lacks: floating-point values, which are rounded to the nearest (ties to even), or the bits, as uint16 or uint8."""
        values = np.asarray(values)
        return Tensor(self, values.shape, dtype or values.dtype.name).set(values)

    def wait(self):
        """Waits for the current stream."""
        self._wait(self.current)
        self._tidy()

    def _wait(self, stream):
        call('ncclEpEmuStreamSynchronize', self.comm, stream)
        self._progress.reach(self._progress.record(stream))

    def _tidy(self):
        """Frees what nothing that is queued can use any more."""
        def over(entries):
            done = []
            for _ in range(len(entries)):  # one by one: a garbage collection may add
                entry = entries.pop(0)
                (done if self._progress.passed(entry[0]) else entries).append(entry)
            return done
        over(self._pending)
        for _, address in over(self._garbage):
            call('ncclEpEmuFree', self.comm, address)
        while self._dead_events:
            call('ncclEpEmuEventDestroy', self.comm, self._dead_events.pop())

    def barrier(self):
        """Waits for this rank's streams, then for all ranks to come here."""
        self.synchronize()
        try:
            self._meeting.wait(BARRIER_SECONDS)
        except threading.BrokenBarrierError:
            raise RuntimeError('barrier: another rank failed, or did not come within %d s' % BARRIER_SECONDS) from None

    def synchronize(self):
        """Waits for all of the rank's streams, and frees what was let go of."""
        for stream in [None] + self._streams:
            self._wait(stream)
        self._tidy()

    def report(self):
        """What the fabric's checkers saw: (number of faults, text)."""
        report = c_api.EmuReport()
        call('ncclEpEmuGetReport', self.comm, report)
        return report.faults, report.text.decode(errors='replace')


def run(body, ranks=2, domains=1, seed=0, num_sms=8, bulk_copies=True):
    """Runs body(rank) on a thread for each of domains * ranks emulated ranks, and returns their results. Raises the
    first exception of a body, and RuntimeError for what the fabric's checkers saw."""
    checks.whole(domains=domains, ranks=ranks, num_sms=num_sms)
    checks.whole(most=checks.UINT64, seed=seed)
    size = domains * ranks
    comms = (ctypes.c_void_p * size)()
    call('ncclEpEmuCommInitAll', comms, domains, ranks,
         c_api.EmuOptions(seed=seed, num_sms=num_sms, no_bulk_copies=not bulk_copies))
    results, failures = [None] * size, []
    meeting = threading.Barrier(max(1, size))

    def one(index):
        rank = events.thread.rank = Rank(comms[index], index, size, num_sms, meeting)
        try:
            results[index] = body(rank)
            rank.synchronize()
        except BaseException as e:  # the caller's thread raises it
            failures.append(e)
            meeting.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = c_api.EmuReport()
    call('ncclEpEmuGetReport', comms[0], report)
    for comm in comms:
        call('ncclEpEmuCommDestroy', comm)
    if failures:
        raise failures[0]
    if report.faults:
        raise RuntimeError('the emulated fabric reports %d faults: %s' % (report.faults, report.text.decode()))
    return results


class Operation:
    """One call's work on the communication stream; see torch_port.Operation."""

    def __init__(self, port, previous_event, asynchronous):
        self._port, self._asynchronous = port, asynchronous
        self.stream = port.comm_stream
        if previous_event is not None:
            previous_event.event.wait(self.stream)
        else:
            port.group.mark(port.group.current).wait(self.stream)
        self._start = port.group._progress.start(self.stream)
        self.end = None

    @contextlib.contextmanager
    def on_comm_stream(self):
        rank = self._port.group
        caller, rank.current = rank.current, self.stream
        try:
            yield
        finally:
            rank.current = caller

    def allocation(self):
        return contextlib.nullcontext()

    def wait(self, event):
        event.event.wait(self.stream)

    def routed(self):
        """The host has waited for the routing, so what came before the call is over."""
        self._port.group._progress.reach(self._start)
        self._port.group._tidy()

    def finish(self, tensors):
        self.end = self._port.group.mark(self.stream)
        if not self._asynchronous:
            self.end.wait()
        self._port.group._keep(*tensors)
        return self.end if self._asynchronous else None

    def abandon(self, tensors):
        """The end of a call that failed: the caller's stream waits in any case."""
        self._asynchronous = False
        self.finish(tensors)


class Port:
    """What ElasticBuffer needs of tensors, streams and events, over emulated memory."""

    def __init__(self, group):
        self.group, self.comm, self.rank, self.size = group, group.comm, group.rank(), group.size()
        self.comm_stream = group.stream()

    def close(self):
        self.group.drop_stream(self.comm_stream)

    def num_sms(self):
        return self.group.num_sms

    def operation(self, previous_event, on_comm_stream, asynchronous):
        return Operation(self, previous_event, asynchronous)

    def synchronize(self):
        self.group.synchronize()

    @staticmethod
    def may_query():
        return True

    def barrier(self, use_comm_stream, with_cpu_sync):
        """More than a device's: the hosts wait, too."""
        self.group.barrier()

    def owns(self, t):
        return isinstance(t, Tensor) and t.rank is self.group

    def owns_event(self, event):
        return isinstance(event, Event) and event.rank is self.group

    @staticmethod
    def address(t):
        return t.address

    @staticmethod
    def describe(t):
        return None if t is None else Array(t.address if t._elements else None, t.dtype, t.shape)

    @staticmethod
    def dtype(t):
        return t.dtype

    @staticmethod
    def dense(t):
        return t._strides is None

    @staticmethod
    def make_dense(t):
        return t if t._strides is None else t.rank.tensor(t.numpy(), t.dtype)

    def empty(self, shape, dtype):
        return self.group.empty(shape, dtype)

    def zeros(self, shape, dtype):
        return self.group.empty(shape, dtype).set(np.zeros(shape, STORAGE[dtype]))

    def columns(self, rows, width, dtype):
        stride = (rows + 3) // 4 * 4
        return Tensor(self.group, (rows, width), dtype, strides=(1, stride), elements=stride * width)

    @staticmethod
    def fill(t, value):
        t.set(np.full(t.shape, value, STORAGE[t.dtype]))

    @staticmethod
    def copy(to, t):
        to.set(t.numpy())

    def integers(self, values, shape, dtype):
        return self.group.tensor(np.array(values[:math.prod(shape)], STORAGE[dtype]).reshape(shape), dtype)

    def counts(self, memory, address, n):
        return memory.part(address, (n,), 'int32')

    def sums_by_rank(self, per_source, scaleup):
        return self.group.tensor(np.cumsum(per_source.numpy().reshape(-1, scaleup).sum(0), dtype=np.int32))

    def sums_by_expert(self, per_expert, start, alignment, expand):
        n = per_expert.numpy()
        ends = start.numpy()[:-1] + n if expand else np.cumsum((n + alignment - 1) // alignment * alignment)
        return self.group.tensor(ends.astype(np.int32))

    def clone(self, t):
        return self.group.tensor(t.numpy(), t.dtype)

    def add(self, t, other):
        t.set(t.numpy() + other.numpy())

    def source_metadata(self, metadata, received, topk, max_tokens):
        slot = np.array(metadata.received_slot[:received * topk], np.int32).reshape(received, topk)
        rank, token = (np.array(v[:received], np.int32) for v in (metadata.source_rank, metadata.source_token))
        last = np.where(slot >= 0, np.arange(topk, dtype=np.int32), -1).max(axis=1, initial=-1)
        rows = np.concatenate([(rank * max_tokens + token)[:, None], (rank * topk + last)[:, None], slot], axis=1)
        return self.group.tensor(rows.astype(np.int32))
