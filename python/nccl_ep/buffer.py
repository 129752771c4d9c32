"""ElasticBuffer: dispatch and combine with the interface of DeepEP V2, over the C interface. Options that the library
does not have yet raise NotImplementedError, which says what is missing."""
import contextlib
import gc
import sys
import threading
import warnings
import weakref

from . import c_api, checks, core
from .events import EventHandle, EventOverlap
from .handle import EPHandle, Routing, align

BUFFER_ALIGNMENT = 2 << 20
SCALE_GROUP = 128  # elements of an FP8 row that share an FP32 scale, where a size must be known ahead


def _port(group):
    """The tensors' side of a group: an emulated rank's or a PyTorch process group's."""
    if type(group).__module__ == 'nccl_ep.emu':
        from .emu import Port
    else:
        from .torch_port import Port
    return Port(group)


def _comm(group):
    """The communicator of a group."""
    if type(group).__module__ == 'nccl_ep.emu':
        return group.comm
    from .torch_port import communicator
    return communicator(group)


def _missing(what, needs):
    return NotImplementedError('%s is not supported yet: the C interface lacks %s' % (what, needs))


_collecting = threading.local()  # `now`: this thread is in a garbage collection


def _note_collection(phase, _):
    _collecting.now = phase == 'start'


gc.callbacks.append(_note_collection)


def _row_bytes(hidden, use_fp8):
    """The widest row of a dispatch or combine: BF16, or FP8 with its scales."""
    fp8 = hidden + align(4 * ((hidden + SCALE_GROUP - 1) // SCALE_GROUP), 16)
    return align(max(2 * hidden, fp8 if use_fp8 else 0), 16)


def buffer_size_of(comm, ranks, max_tokens, hidden, topk, use_fp8, hybrid, multiple_reductions):
    """Bytes of the window for such batches and any number of experts."""
    experts = checks.MAX_EXPERTS // ranks * ranks
    scales = 4 * ((hidden + SCALE_GROUP - 1) // SCALE_GROUP) if use_fp8 else 0
    size = core.buffer_size(comm, experts, max_tokens, hidden, topk, 'float8_e4m3fn' if use_fp8 else 'bfloat16', scales,
                            'bfloat16', hybrid, multiple_reductions).window_bytes
    return align(size, BUFFER_ALIGNMENT)


def get_physical_domain_size(group):
    """(RDMA ranks, NVLink ranks) of a group, before there is a buffer."""
    checks.group(group)
    domains = core.domains(_comm(group), group.size())
    return domains, group.size() // domains


def get_logical_domain_size(group, allow_hybrid_mode=True):
    """(scale-out ranks, scale-up ranks) of a group, before there is a buffer."""
    checks.flag(allow_hybrid_mode=allow_hybrid_mode)
    sizes = get_physical_domain_size(group)
    if sizes[0] > 1 and not allow_hybrid_mode:
        raise _missing('allow_hybrid_mode=False across %d scale-up domains' % sizes[0],
                       'rows that cross the network once for each rank')
    return sizes


class ElasticBuffer(core.Unique):
    """Expert-parallel dispatch and combine among the ranks of a group (a torch.distributed process group, or an emulated
    `emu.Rank`). One thread at a time, the same calls in the same order on all ranks.

    Arguments, as DeepEP V2's:
      num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch: of the largest batch. num_topk 0: any.
      num_bytes: instead of these, a limit for the window in bytes.
      deterministic: always the case, whatever is said here.
      allow_hybrid_mode: no effect within one scale-up domain; several need it.
      allow_multiple_reduction: False sums a token's slots once, without rounding on the way; more bytes travel, and the
        window has room for every choice of a token.
      prefer_overlap_with_compute: use a seventh of the SMs instead of all.
      sl_idx, num_allocated_qps: taken, without effect.
      num_gpu_timeout_secs: for waits of kernels and for host waits; num_cpu_timeout_secs: taken, without effect.
      explicitly_destroy: destroy() must be called; else the buffer is destroyed when its last reference goes. Both are collective.
        Where that happens at no certain place (in a garbage collection, on another thread, at the interpreter's end), the memory is
        left to the process with a ResourceWarning instead.
    Beyond those: num_experts makes the group's memory at once instead of at the first dispatch, which is collective."""

    def __init__(self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
                 use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
                 prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
                 num_gpu_timeout_secs=100, explicitly_destroy=False, *, num_experts=0):
        checks.group(group)
        checks.whole(num_cpu_bytes=num_cpu_bytes, num_max_tokens_per_rank=num_max_tokens_per_rank,
                     num_allocated_qps=num_allocated_qps)
        checks.whole(most=checks.MAX_ROW_BYTES, hidden=hidden)
        checks.whole(most=checks.MAX_TOPK, num_topk=num_topk)
        checks.whole(most=checks.MAX_EXPERTS, num_experts=num_experts)
        if num_bytes is not None:
            checks.whole(1, checks.UINT64, num_bytes=num_bytes)
        checks.seconds(num_gpu_timeout_secs=num_gpu_timeout_secs, num_cpu_timeout_secs=num_cpu_timeout_secs)
        checks.flag(use_fp8_dispatch=use_fp8_dispatch, deterministic=deterministic, allow_hybrid_mode=allow_hybrid_mode,
                    allow_multiple_reduction=allow_multiple_reduction, explicitly_destroy=explicitly_destroy,
                    prefer_overlap_with_compute=prefer_overlap_with_compute)
        if num_cpu_bytes:
            raise _missing('num_cpu_bytes %d' % num_cpu_bytes, 'buffers in host memory')
        if num_bytes is None and not (num_max_tokens_per_rank and hidden):
            raise ValueError('num_max_tokens_per_rank is %d and hidden is %d: expected both, or num_bytes'
                             % (num_max_tokens_per_rank, hidden))
        self.group = group
        self.rank_idx, self.num_ranks = group.rank(), group.size()
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)
        self._hidden, self._num_topk, self._fp8 = hidden, num_topk, use_fp8_dispatch
        self._timeout_ns = int(num_gpu_timeout_secs * 1e9)
        self._port = _port(group)
        self._domains = core.domains(self._port.comm, self.num_ranks)
        if self._domains > 1 and not allow_hybrid_mode:
            raise _missing('allow_hybrid_mode=False across %d scale-up domains' % self._domains,
                           'rows that cross the network once for each rank')
        self._limit = num_bytes
        self._groups = {}
        self._routings = weakref.WeakSet()
        self._retired = []
        self._forgotten = []  # (name, receiving part) of deferred calls whose events nobody has any more
        self._thread = threading.current_thread()
        self._captured = []  # routings that graphs use, which may be replayed for as long as the buffer is there
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
                                                  allow_hybrid_mode, allow_multiple_reduction)
        self.num_bytes = num_bytes
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.runtime = self._port  # None once destroyed, as in DeepEP
        if num_experts:
            if not (num_max_tokens_per_rank and hidden):
                raise ValueError('num_experts is given: expected num_max_tokens_per_rank and hidden too')
            self._group_of(num_experts, num_max_tokens_per_rank, _row_bytes(hidden, use_fp8_dispatch))

    # ---- Sizes and properties ---------------------------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False,
                             allow_hybrid_mode=True, allow_multiple_reduction=True):
        """Bytes of the window for such batches and any number of experts, a multiple of 2 MB."""
        checks.group(group)
        checks.whole(1, num_max_tokens_per_rank=num_max_tokens_per_rank)
        checks.whole(1, checks.MAX_ROW_BYTES, hidden=hidden)
        checks.whole(most=checks.MAX_TOPK, num_topk=num_topk)
        checks.flag(use_fp8_dispatch=use_fp8_dispatch, allow_hybrid_mode=allow_hybrid_mode,
                    allow_multiple_reduction=allow_multiple_reduction)
        return buffer_size_of(_comm(group), group.size(), num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
                              allow_hybrid_mode, allow_multiple_reduction)

    def get_physical_domain_size(self):
        """(RDMA ranks, NVLink ranks)."""
        return self._domains, self.num_ranks // self._domains

    def get_logical_domain_size(self):
        """(scale-out ranks, scale-up ranks)."""
        return self.get_physical_domain_size()

    def get_theoretical_num_sms(self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0,
                                sm_read_gbs=200, sm_write_gbs=50):
        """SMs that a call uses by default: all, or a seventh (even, at least 4) where overlap is preferred. It depends on
        nothing else: the library divides them between sending and receiving by itself. Compute beside it should be given the
        others: docs/overlap.md."""
        checks.whole(num_experts=num_experts, num_topk=num_topk)
        all_sms = self._port.num_sms()
        return min(all_sms, max(4, all_sms // 14 * 2)) if self.prefer_overlap_with_compute else all_sms

    def get_theoretical_num_qps(self, num_sms):
        """Queue pairs, as DeepEP counts them; the library chooses its own number."""
        checks.whole(num_sms=num_sms)
        return min(num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def get_comm_stream(self):
        """The stream on which dispatch and combine run."""
        self._alive()
        return self._port.comm_stream

    @staticmethod
    def capture():
        """An event on the current stream, for `previous_event`."""
        return EventHandle()

    def barrier(self, use_comm_stream=True, with_cpu_sync=False, sequential=True):
        """All ranks' streams meet."""
        self._alive()
        self._port.barrier(use_comm_stream, with_cpu_sync)

    def check(self):
        """Raises RuntimeError for what a kernel has reported: an expert id out of range, a wait that timed out. Reads host
        memory, waits for nothing. An id out of range counts as -1 and is reported once."""
        for group in self._groups.values():
            group.check()

    # ---- Groups and handles -----------------------------------------------------------------------------------------

    def _key(self, num_experts, max_tokens, topk):
        """Of a C group. Room for every slot: of no more than there are."""
        return num_experts, max_tokens, self._num_topk or (0 if self.allow_multiple_reduction else topk)

    def _group_of(self, num_experts, max_tokens, row_bytes, topk=0):
        """The C group for such batches, made at its first use: collective."""
        self._alive()
        key = num_experts, max_tokens, topk = self._key(num_experts, max_tokens, topk)
        if key not in self._groups:
            row_bytes = max(row_bytes, _row_bytes(self._hidden, self._fp8) if self._hidden else 0)
            if self._limit is not None:
                size = core.buffer_size(self._port.comm, num_experts, max_tokens, row_bytes, topk, 'uint8', 0,
                                        'uint8', self.allow_hybrid_mode, self.allow_multiple_reduction).window_bytes
                if size > self._limit:
                    raise ValueError('num_bytes is %d: %d tokens of %d bytes on %d ranks need %d'
                                     % (self._limit, max_tokens, row_bytes, self.num_ranks, size))
            self._port.synchronize()
            self._groups[key] = core.Group(self._port.comm, num_experts, max_tokens, row_bytes, topk,
                                           self._timeout_ns, bool(self.allow_multiple_reduction))
        return self._groups[key]

    def _sweep(self):
        """Destroys C handles whose last use is over."""
        if not self._port.may_query():
            return
        keep = []
        for _ in range(len(self._retired)):  # one by one: a garbage collection may add
            handle, memory, last = self._retired.pop(0)
            if last is None or last.query():
                handle.destroy()
            else:
                keep.append((handle, memory, last))
        self._retired.extend(keep)

    def _receive_forgotten(self):
        """Deferred calls hold memory of the window until they have received."""
        while self._forgotten:
            self._forgotten.pop(0)()

    def destroy(self):
        """Waits for the device and gives everything back. Collective; handles cannot be used any more."""
        if not self.explicitly_destroy:
            raise RuntimeError('destroy() needs explicitly_destroy=True in the constructor')
        self._destroy()

    def _destroy(self):
        if self.runtime is None:
            return
        self.runtime = None
        self._port.synchronize()
        for routing in list(self._routings):
            routing.handle.destroy()
        for handle, _, _ in self._retired:
            handle.destroy()
        self._retired.clear()
        self._captured.clear()
        self._forgotten.clear()
        for group in self._groups.values():
            group.destroy()
        self._groups.clear()
        self._port.close()

    def __del__(self):
        if getattr(self, 'runtime', None) is None or self.explicitly_destroy:
            return
        if not (sys.is_finalizing() or getattr(_collecting, 'now', False) or threading.current_thread() is not self._thread):
            self._destroy()
        elif self._groups:
            warnings.warn('an ElasticBuffer was not destroyed and its memory stays with the process: destroying is collective, and no '
                          'garbage collection, other thread or end of the interpreter comes at the same place on all ranks; use '
                          'explicitly_destroy=True and destroy()', ResourceWarning)

    # ---- Arguments --------------------------------------------------------------------------------------------------

    def _alive(self):
        if self.runtime is None:
            raise RuntimeError('the buffer is destroyed')

    def _check(self, name, t, *extents):
        checks.tensor(self._port, name, t, *extents)

    def _event(self, **events):
        for name, event in events.items():
            if event is not None and not (isinstance(event, EventHandle) and event.event is not None):
                raise TypeError('%s is %s: expected an EventHandle (capture(), or the .event of a call)'
                                % (name, type(event).__name__))
            if event is not None and not self._port.owns_event(event.event):
                raise ValueError('%s is of another rank: expected one of this rank\'s streams' % name)

    @contextlib.contextmanager
    def _ordered(self, op, routings, *tensors):
        """A call that fails on the way leaves the streams ordered too: what it has launched is over before the caller's next work,
        and the handles it used live as long."""
        try:
            yield
        except BaseException:
            op.abandon([t for t in tensors if t is not None])
            if self._port.may_query():
                for routing in routings:
                    routing.last = op.end
            raise

    def _common(self, num_sms, num_qps, previous_event, before_epilogue, on_comm_stream, asynchronous, defer_epilogue):
        self._alive()
        checks.whole(num_sms=num_sms, num_qps=num_qps)
        checks.flag(async_with_compute_stream=asynchronous, allocate_on_comm_stream=on_comm_stream,
                    defer_epilogue=defer_epilogue)
        self._event(previous_event=previous_event, previous_event_before_epilogue=before_epilogue)
        if num_qps > self.num_allocated_qps:
            raise ValueError('num_qps is %d: expected at most num_allocated_qps, %d' % (num_qps, self.num_allocated_qps))
        if defer_epilogue and not asynchronous:
            raise ValueError('defer_epilogue is set: expected async_with_compute_stream too, the call cannot have ended before')
        if previous_event is not None and not on_comm_stream:
            raise ValueError('previous_event is given without allocate_on_comm_stream: memory of the current stream may '
                             'still be in use then')

    def _own(self, handle):
        if not isinstance(handle, EPHandle):
            raise TypeError('handle is %s: expected one that dispatch returned' % type(handle).__name__)
        if handle._port is not self._port:
            raise ValueError('handle is of another buffer: expected one that a dispatch of this buffer returned')

    def _cached(self, handle, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand):
        """Refuses what contradicts a cached handle."""
        if do_cpu_sync:
            raise ValueError('do_cpu_sync is set with a cached handle: its counts are known, or were not wanted')
        if do_expand != handle.do_expand:
            raise ValueError('do_expand is %s: expected %s, as the handle\'s' % (do_expand, handle.do_expand))
        for name, value, of_handle in (('num_experts', num_experts, handle.num_experts),
                                       ('num_max_tokens_per_rank', num_max_tokens_per_rank,
                                        handle.num_max_tokens_per_rank),
                                       ('expert_alignment', expert_alignment, handle.expert_alignment)):
            if value is not None and value != of_handle:
                raise ValueError('%s is %s: expected %s, as the handle\'s' % (name, value, of_handle))

    def _room(self, group, row_bytes):
        """Refuses rows wider than a group that is there already."""
        if group is not None and row_bytes > group.max_token_bytes:
            raise ValueError('a row of x with its scales has %d bytes: expected at most max_token_bytes of the group, %d, which its first '
                             'dispatch or the constructor\'s hidden has set' % (row_bytes, group.max_token_bytes))

    def _route(self, op, routings, topk_idx, num_experts, max_tokens, alignment, row_bytes, num_sms, do_handle_copy, do_expand):
        """A handle with the routing of topk_idx."""
        port, topk = self._port, topk_idx.shape[1]
        group = self._group_of(num_experts, max_tokens, row_bytes, topk)
        layout = c_api.LAYOUT_EXPERT_MAJOR if do_expand else c_api.LAYOUT_FLAT
        with op.on_comm_stream():
            memory = port.empty((group.handle_bytes(layout, topk),), 'uint8')
        stored = topk_idx
        if do_handle_copy:
            with op.allocation():
                stored = port.empty(tuple(topk_idx.shape), port.dtype(topk_idx))
            with op.on_comm_stream():
                port.copy(stored, topk_idx)
        routing = Routing(core.Handle(group, layout, alignment, topk, port.describe(memory)), memory, self._retired)
        self._routings.add(routing)
        routings.append(routing)
        routing.handle.update(port.describe(topk_idx), op.stream)
        locals_ = num_experts // self.num_ranks
        bound = align(self.num_ranks * max_tokens * min(topk, locals_) + (alignment - 1) * locals_, alignment)
        return EPHandle(port, routing, stored, do_expand, num_experts, alignment, max_tokens, num_sms,
                        self.num_scaleup_ranks, bound, captured=not port.may_query())

    def _end(self, name, op, handle, before_epilogue, defer_epilogue, tensors):
        """The end of a call, whose receiving part is still to come if it is deferred or has something to wait for. Returns its
        EventOverlap."""
        tensors = [t for t in tensors if t is not None]

        def finish():
            end = op.finish(tensors)
            self._used(op, handle)
            return EventHandle(end) if end is not None else None

        def epilogue():
            if self.runtime is None:
                raise RuntimeError('the buffer is destroyed, and this %s was not completed before: its outputs are undefined' % name)
            try:
                if before_epilogue is not None:
                    op.wait(before_epilogue)
            finally:  # what was sent must be received, for this rank's room in the window and for the others
                handle._routing.handle.complete(op.stream)
            return finish()
        if defer_epilogue:
            def forgotten():
                if self.runtime is not None:
                    self._forgotten.append(epilogue)
                    warnings.warn('the event of a deferred %s was let go of before complete() or a wait: the buffer\'s next call '
                                  'completes it' % name, RuntimeWarning)
            return EventOverlap(epilogue=epilogue, forgotten=forgotten)
        return EventOverlap(finish() if before_epilogue is None else epilogue())

    def _used(self, op, handle):
        """Notes the last use of a handle."""
        if self._port.may_query():
            handle._routing.last = op.end
        elif handle._routing not in self._captured:
            self._captured.append(handle._routing)

    # ---- Dispatch ---------------------------------------------------------------------------------------------------

    def dispatch(self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
                 num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
                 previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
                 handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False,
                 use_tma_aligned_col_major_sf=False, *, defer_epilogue=False):
        """Takes every token to the ranks of its experts. Collective.

        x [T, H], or (x, scales [T, S]); topk_idx [T, K], -1 for no selection, with topk_weights [T, K] float32 or None;
        or `handle`, whose routing is used again, with or without topk_weights. Without do_expand each token arrives
        once at a rank, in the order of (source rank, token); with it once for each local choice, grouped by expert,
        each group starting at a multiple of expert_alignment.

        previous_event_before_epilogue: what the receiving part waits for. Beyond DeepEP's: defer_epilogue (with
        async_with_compute_stream) sends only; the event's complete() or first wait receives, so that nothing of this call occupies
        SMs in between. Until then the outputs are undefined and the inputs must stay as they are. All ranks complete in the same
        order; at most two deferred calls of a buffer at a time (NCCL_EP_MAX_IN_FLIGHT), each with memory as large as the window.

        Returns (recv_x or (recv_x, recv_scales), recv_topk_idx (None when expanding), recv_topk_weights (None without
        weights), handle, EventOverlap)."""
        port = self._port
        if isinstance(x, tuple) and len(x) != 2:
            raise ValueError('x is a tuple of %d: expected (tokens, scales)' % len(x))
        scaled = isinstance(x, tuple)
        x, scales = x if scaled else (x, None)
        stats = cumulative_local_expert_recv_stats
        self._common(num_sms, num_qps, previous_event, previous_event_before_epilogue, allocate_on_comm_stream,
                     async_with_compute_stream, defer_epilogue)
        checks.flag(do_expand=do_expand, do_zero_padding=do_zero_padding, do_handle_copy=do_handle_copy,
                    use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf)
        self._check('x', x, 'tokens', 'hidden')
        checks.dtype(port, 'x', x, *c_api.TYPES)
        for name, value, least, most in (('num_experts', num_experts, 0, checks.MAX_EXPERTS),
                                         ('num_max_tokens_per_rank', num_max_tokens_per_rank, 0, checks.UINT32),
                                         ('expert_alignment', expert_alignment, 1, checks.MAX_ALIGNMENT)):
            if value is not None:
                checks.whole(least, most, **{name: value})
        if do_cpu_sync is not None:
            checks.flag(do_cpu_sync=do_cpu_sync)
        if (handle is None) == (topk_idx is None):
            raise ValueError('expected either topk_idx or a cached handle')
        if do_zero_padding and not do_expand:
            raise ValueError('do_zero_padding is set: expected do_expand, there is no padding else')
        if scaled:
            checks.owned(port, 'scales', scales)
            if len(scales.shape) != 2:
                raise ValueError('scales have %d dimensions: expected 2, [tokens, scales of a token]' % len(scales.shape))
            checks.dtype(port, 'scales', scales, *checks.SCALE_TYPES)
            if use_tma_aligned_col_major_sf and self._itemsize(scales) != 4:
                raise ValueError('scales are %s: expected elements of 4 bytes for use_tma_aligned_col_major_sf'
                                 % port.dtype(scales))
        cached = handle is not None
        if cached:
            self._own(handle)
            self._cached(handle, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand)
            num_experts, (tokens, topk) = handle.num_experts, handle.topk_idx.shape
            group = handle._routing.handle.group
        else:
            checks.routing(port, topk_idx, self._num_topk)
            if not num_experts or num_experts % self.num_ranks:
                raise ValueError('num_experts is %s: expected the number of all experts, a multiple of the %d ranks'
                                 % (num_experts, self.num_ranks))
            do_cpu_sync = True if do_cpu_sync is None else do_cpu_sync
            num_max_tokens_per_rank = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            expert_alignment = expert_alignment or 1
            tokens, topk = topk_idx.shape
            if not num_max_tokens_per_rank:
                raise ValueError('num_max_tokens_per_rank is 0: expected it here or in the constructor')
            if tokens > num_max_tokens_per_rank:
                raise ValueError('topk_idx has %d tokens: expected at most num_max_tokens_per_rank, %d'
                                 % (tokens, num_max_tokens_per_rank))
            num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk)
            group = self._groups.get(self._key(num_experts, num_max_tokens_per_rank, topk))
        self._room(group, checks.rows(port, self._itemsize, x, scales, topk_weights, tokens, topk))
        if stats is not None:
            self._check('cumulative_local_expert_recv_stats', stats, 'local experts')
            checks.dtype(port, 'cumulative_local_expert_recv_stats', stats, 'int32')
            checks.extent('cumulative_local_expert_recv_stats', stats, 0, num_experts // self.num_ranks, 'the local experts')
        self._receive_forgotten()
        self._sweep()
        if not cached:  # before anything is launched: it is collective, and may be refused
            self._group_of(num_experts, num_max_tokens_per_rank, self._needed_row_bytes(x, scales), topk)
        op = port.operation(previous_event, allocate_on_comm_stream, async_with_compute_stream)
        routings = [handle._routing] if cached else []
        with self._ordered(op, routings, x, scales, topk_idx, topk_weights, stats):
            if not cached:
                handle = self._route(op, routings, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment,
                                     self._needed_row_bytes(x, scales), num_sms, do_handle_copy, do_expand)
                if do_cpu_sync:
                    handle._synchronize()
                    op.routed()
            outputs = self._move(op, handle, x, scales, topk_weights, do_zero_padding, use_tma_aligned_col_major_sf,
                                 num_sms or handle.num_sms, num_qps,
                                 defer_epilogue or previous_event_before_epilogue is not None)
            if stats is not None and not cached:  # last: a call that is refused counts nothing
                with op.on_comm_stream():
                    port.add(stats, handle._device_counts()[1])
            recv_x, recv_scales, recv_weights, recv_idx = outputs
            event = self._end('dispatch', op, handle, previous_event_before_epilogue, defer_epilogue,
                              (x, scales, topk_idx, topk_weights, stats, handle.topk_idx) + outputs)
        return (recv_x if scales is None else (recv_x, recv_scales), recv_idx,
                recv_weights if topk_weights is not None else None, handle, event)

    def _itemsize(self, t):
        return c_api.TYPES[self._port.dtype(t)][1]

    def _needed_row_bytes(self, x, scales):
        """Of these rows with their scales, and of BF16 rows of as many elements on their way back."""
        def row(t):
            return t.shape[1] * self._itemsize(t)
        return align(max(row(x) + (align(row(scales), 16) if scales is not None else 0), 2 * x.shape[1]), 16)

    def _move(self, op, handle, x, scales, weights, zero_padding, columns, num_sms, num_qps, send_only):
        """The rows' way along a handle: (tokens, scales, weights, indices) received, None where there are none."""
        port, rows, topk = self._port, handle._rows, handle._routing.handle.topk
        flat = not handle.do_expand
        sent_weights, zeros = weights, None
        if flat and weights is None:
            # Flat indices come with the forward pass, which carries weights: zeros.
            zeros = handle._zero_weights
            if zeros is None:
                with op.on_comm_stream():
                    zeros = port.zeros((x.shape[0], topk), 'float32')
            sent_weights = zeros
        with op.allocation():
            recv_x = port.empty((rows, x.shape[1]), port.dtype(x))
            recv_weights = recv_idx = recv_scales = None
            if sent_weights is not None:
                recv_weights = port.empty((rows, topk) if flat else (rows,), 'float32')
            if flat:
                recv_idx = port.empty((rows, topk), 'int64')
            if scales is not None:
                make = port.columns if columns else lambda r, w, d: port.empty((r, w), d)
                recv_scales = make(rows, scales.shape[1], port.dtype(scales))
        with op.on_comm_stream():
            if flat and not handle._exact:  # rows that nobody fills select nothing
                port.fill(recv_idx, -1)
                port.fill(recv_weights, 0)
            if scales is not None:
                scales = port.make_dense(scales)
        handle._routing.handle.dispatch(
            dict(tokens=port.describe(x), topk_weights=port.describe(sent_weights), scales=port.describe(scales)),
            dict(tokens=port.describe(recv_x), topk_weights=port.describe(recv_weights),
                 scales=port.describe(recv_scales), topk_idx=port.describe(recv_idx)),
            backward=sent_weights is None, columns=columns and scales is not None, zero_pad=zero_padding,
            num_sms=num_sms, num_qps=num_qps, send_only=send_only, stream=op.stream)
        handle._zero_weights = handle._zero_weights if zeros is None else zeros
        return recv_x, recv_scales, recv_weights, recv_idx

    # ---- Combine ----------------------------------------------------------------------------------------------------

    def combine(self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
                previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False, *,
                defer_epilogue=False):
        """Sums the experts' rows of every token, back at the token's rank. Collective.

        x [rows, H], rows where dispatch had put its own; topk_weights as dispatch gave them, to come back as [T, K]
        (each where it was, 0 without selection); bias: a tensor [T, H] or a tuple of two, which the sums start from.
        previous_event_before_epilogue, defer_epilogue: as for dispatch.

        Returns (combined_x [T, H], combined_topk_weights or None, EventOverlap)."""
        port = self._port
        self._common(num_sms, num_qps, previous_event, previous_event_before_epilogue, allocate_on_comm_stream,
                     async_with_compute_stream, defer_epilogue)
        self._check('x', x, 'rows', 'hidden')
        checks.dtype(port, 'x', x, 'bfloat16', 'float16', 'float32')
        self._own(handle)
        if x.shape[0] != handle._rows:
            raise ValueError('x has %d rows: expected %d, as dispatch gave' % (x.shape[0], handle._rows))
        bias = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        if len(bias) > 2:
            raise ValueError('bias is a tuple of %d tensors: expected at most two' % len(bias))
        for i, t in enumerate(bias):
            self._check('bias[%d]' % i, t, 'tokens', 'hidden')
        if topk_weights is not None:
            self._check('topk_weights', topk_weights, *(('rows',) if handle.do_expand else ('rows', 'top-k')))
            checks.dtype(port, 'topk_weights', topk_weights, 'float32')
        self._receive_forgotten()
        op = port.operation(previous_event, allocate_on_comm_stream, async_with_compute_stream)
        with self._ordered(op, [handle._routing], x, topk_weights, *bias):
            shape = tuple(handle.topk_idx.shape)
            combined_weights = None
            with op.allocation():
                combined = port.empty((shape[0], x.shape[1]), port.dtype(x))
                if topk_weights is not None:
                    combined_weights = port.empty(shape, 'float32')
            handle._routing.handle.combine(
                dict(tokens=port.describe(x), topk_weights=port.describe(topk_weights)),
                dict(tokens=port.describe(combined), topk_weights=port.describe(combined_weights)),
                backward=topk_weights is not None, bias=[port.describe(t) for t in bias],
                num_sms=num_sms or handle.num_sms, num_qps=num_qps,
                send_only=defer_epilogue or previous_event_before_epilogue is not None, stream=op.stream)
            event = self._end('combine', op, handle, previous_event_before_epilogue, defer_epilogue,
                              (x, topk_weights, combined, combined_weights) + bias)
        return combined, combined_weights, event

    # ---- Parts of DeepEP V2 that are not expert parallelism ------------------------------------------------------------

    @staticmethod
    def _elsewhere(*_, **__):
        raise _missing('Engram, pipeline send/recv and all-gather sessions', 'anything but dispatch and combine')

    get_pp_buffer_size_hint = get_agrs_num_max_session_bytes = get_agrs_buffer_size_hint = _elsewhere
    get_engram_storage_size_hint = engram_write = engram_fetch = pp_set_config = pp_send = pp_recv = _elsewhere
    create_agrs_session = destroy_agrs_session = agrs_new_session = agrs_set_config = _elsewhere
    agrs_get_inplace_tensor = all_gather = _elsewhere


EPBuffer = ElasticBuffer
