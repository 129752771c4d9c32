"""ElasticBuffer: dispatch and combine with the interface of DeepEP V2, over the C interface. Options that the library
does not have yet raise NotImplementedError, which says what is missing."""
import operator
import weakref

from . import c_api, core
from .events import EventHandle, EventOverlap
from .handle import EPHandle, Routing, align

BUFFER_ALIGNMENT = 2 << 20
MAX_EXPERTS = 2048  # of a group: nccl_ep.h
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


def _whole(least=0, **numbers):
    """Refuses what is no whole number, or less than the least: the C interface's are unsigned."""
    for name, value in numbers.items():
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError('%s is %r: expected a whole number' % (name, value)) from None
        if value < least:
            raise ValueError('%s is %d: expected at least %d' % (name, value, least))


def _row_bytes(hidden, use_fp8):
    """The widest row of a dispatch or combine: BF16, or FP8 with its scales."""
    fp8 = hidden + align(4 * ((hidden + SCALE_GROUP - 1) // SCALE_GROUP), 16)
    return align(max(2 * hidden, fp8 if use_fp8 else 0), 16)


def buffer_size_of(comm, ranks, max_tokens, hidden, topk, use_fp8, hybrid, multiple_reductions):
    """Bytes of the window for such batches and any number of experts."""
    experts = MAX_EXPERTS // ranks * ranks
    scales = 4 * ((hidden + SCALE_GROUP - 1) // SCALE_GROUP) if use_fp8 else 0
    size = core.buffer_size(comm, experts, max_tokens, hidden, topk, 'float8_e4m3fn' if use_fp8 else 'bfloat16', scales,
                            'bfloat16', hybrid, multiple_reductions).window_bytes
    return align(size, BUFFER_ALIGNMENT)


class ElasticBuffer:
    """Expert-parallel dispatch and combine among the ranks of a group (a torch.distributed process group, or an emulated
    `emu.Rank`). One thread at a time, the same calls in the same order on all ranks.

    Arguments, as DeepEP V2's:
      num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch: of the largest batch. num_topk 0: any.
      num_bytes: instead of these, a limit for the window in bytes.
      deterministic: always the case, whatever is said here.
      allow_hybrid_mode: no effect within one scale-up domain; several need it.
      allow_multiple_reduction: False sums a token's slots once, without rounding on the way; more bytes travel, and the
        window has room for every choice of a token.
      prefer_overlap_with_compute: use an eighth of the SMs instead of all.
      sl_idx, num_allocated_qps: taken, without effect.
      num_gpu_timeout_secs: for waits of kernels and for host waits; num_cpu_timeout_secs: taken, without effect.
      explicitly_destroy: destroy() must be called; else the buffer is destroyed with the object. Both are collective.
    Beyond those: num_experts makes the group's memory at once instead of at the first dispatch, which is collective."""

    def __init__(self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
                 use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
                 prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
                 num_gpu_timeout_secs=100, explicitly_destroy=False, *, num_experts=0):
        _whole(num_cpu_bytes=num_cpu_bytes, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden,
               num_topk=num_topk, num_allocated_qps=num_allocated_qps, num_experts=num_experts)
        if num_bytes is not None:
            _whole(1, num_bytes=num_bytes)
        for name, value in ('num_gpu_timeout_secs', num_gpu_timeout_secs), ('num_cpu_timeout_secs', num_cpu_timeout_secs):
            if not value > 0:
                raise ValueError('%s is %s: expected more than 0' % (name, value))
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
        _whole(1, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden)
        _whole(num_topk=num_topk)
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
        """SMs that a call uses by default: all, or an eighth (even, at least 4) where overlap is preferred. It depends on
        nothing else: the library divides them between sending and receiving by itself. Compute beside it should be given the
        others: docs/overlap.md."""
        all_sms = self._port.num_sms()
        return min(all_sms, max(4, all_sms // 16 * 2)) if self.prefer_overlap_with_compute else all_sms

    def get_theoretical_num_qps(self, num_sms):
        """Queue pairs, as DeepEP counts them; the library chooses its own number."""
        return min(num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def get_comm_stream(self):
        """The stream on which dispatch and combine run."""
        return self._port.comm_stream

    @staticmethod
    def capture():
        """An event on the current stream, for `previous_event`."""
        return EventHandle()

    def barrier(self, use_comm_stream=True, with_cpu_sync=False, sequential=True):
        """All ranks' streams meet."""
        self._port.barrier(use_comm_stream, with_cpu_sync)

    def check(self):
        """Raises RuntimeError for what a kernel has reported: an expert id out of range, a wait that timed out. Reads host
        memory, waits for nothing. An id out of range counts as -1 and is reported once."""
        for group in self._groups.values():
            group.check()

    # ---- Groups and handles -----------------------------------------------------------------------------------------

    def _group_of(self, num_experts, max_tokens, row_bytes, topk=0):
        """The C group for such batches, made at its first use: collective."""
        if self.runtime is None:
            raise RuntimeError('the buffer is destroyed')
        # Room for every slot: of no more than there are.
        topk = self._num_topk or (0 if self.allow_multiple_reduction else topk)
        key = (num_experts, max_tokens, topk)
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
        retired, self._retired[:] = list(self._retired), []
        for handle, memory, last in retired:
            if last is None or last.query():
                handle.destroy()
            else:
                keep.append((handle, memory, last))
        self._retired.extend(keep)

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
        for group in self._groups.values():
            group.destroy()
        self._groups.clear()

    def __del__(self):
        if getattr(self, 'runtime', None) is not None and not self.explicitly_destroy:
            self._destroy()

    # ---- Arguments --------------------------------------------------------------------------------------------------

    def _check(self, name, t, *extents):
        """A dense tensor of this rank with as many dimensions as `extents` names."""
        if not self._port.owns(t):
            raise TypeError('%s is %s: expected a tensor of this rank\'s device' % (name, type(t).__name__))
        if len(t.shape) != len(extents):
            raise ValueError('%s has %d dimensions: expected %d, [%s]'
                             % (name, len(t.shape), len(extents), ', '.join(extents)))
        if not self._port.dense(t):
            raise ValueError('%s is not contiguous' % name)

    def _common(self, num_sms, num_qps, previous_event, on_comm_stream, asynchronous, defer_epilogue):
        _whole(num_sms=num_sms, num_qps=num_qps)
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

    def _route(self, op, topk_idx, num_experts, max_tokens, alignment, row_bytes, num_sms, do_handle_copy, do_expand):
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
        routing.handle.update(port.describe(topk_idx), op.stream)
        locals_ = num_experts // self.num_ranks
        bound = align(self.num_ranks * max_tokens * min(topk, locals_) + (alignment - 1) * locals_, alignment)
        return EPHandle(port, routing, stored, do_expand, num_experts, alignment, max_tokens, num_sms,
                        self.num_scaleup_ranks, bound, captured=not port.may_query())

    def _end(self, op, handle, before_epilogue, defer_epilogue, tensors):
        """The end of a call, whose receiving part is still to come if it is deferred or has something to wait for. Returns its
        EventOverlap."""
        tensors = [t for t in tensors if t is not None]

        def finish():
            end = op.finish(tensors)
            self._used(op, handle)
            return EventHandle(end) if end is not None else None

        def epilogue():
            if before_epilogue is not None:
                op.wait(before_epilogue)
            handle._routing.handle.complete(op.stream)
            return finish()
        if defer_epilogue:
            return EventOverlap(epilogue=epilogue)
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
        x, scales = x if isinstance(x, tuple) else (x, None)
        self._common(num_sms, num_qps, previous_event, allocate_on_comm_stream, async_with_compute_stream, defer_epilogue)
        self._check('x', x, 'tokens', 'hidden')
        for name, value, least in (('num_experts', num_experts, 0), ('num_max_tokens_per_rank', num_max_tokens_per_rank, 0),
                                   ('expert_alignment', expert_alignment, 1)):
            if value is not None:
                _whole(least, **{name: value})
        if (handle is None) == (topk_idx is None):
            raise ValueError('expected either topk_idx or a cached handle')
        if do_zero_padding and not do_expand:
            raise ValueError('do_zero_padding is set: expected do_expand, there is no padding else')
        if scales is not None and not port.owns(scales):
            raise TypeError('scales are %s: expected a tensor of this rank\'s device' % type(scales).__name__)
        if scales is not None and len(scales.shape) != 2:
            raise ValueError('scales have %d dimensions: expected 2, [tokens, scales of a token]' % len(scales.shape))
        if scales is not None and use_tma_aligned_col_major_sf and c_api.TYPES[port.dtype(scales)][1] != 4:
            raise ValueError('scales are %s: expected elements of 4 bytes for use_tma_aligned_col_major_sf'
                             % port.dtype(scales))
        if topk_weights is not None:
            self._check('topk_weights', topk_weights, 'tokens', 'top-k')
        if handle is not None:
            self._own(handle)
            self._cached(handle, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand)
            if self.runtime is None:
                raise RuntimeError('the buffer is destroyed')
        else:
            self._check('topk_idx', topk_idx, 'tokens', 'top-k')
            if not num_experts:
                raise ValueError('num_experts is %s: expected the number of all experts' % num_experts)
            do_cpu_sync = True if do_cpu_sync is None else do_cpu_sync
            num_max_tokens_per_rank = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            expert_alignment = expert_alignment or 1
            num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.shape[1])
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            self._check('cumulative_local_expert_recv_stats', stats, 'local experts')
            locals_ = (handle.num_experts if handle is not None else num_experts) // self.num_ranks
            if stats.shape[0] != locals_:
                raise ValueError('cumulative_local_expert_recv_stats has %d elements: expected %d, the local experts'
                                 % (stats.shape[0], locals_))
        self._sweep()
        op = port.operation(previous_event, allocate_on_comm_stream, async_with_compute_stream)
        cached = handle is not None
        if not cached:
            handle = self._route(op, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment,
                                 self._needed_row_bytes(x, scales), num_sms, do_handle_copy, do_expand)
            if do_cpu_sync:
                handle._synchronize()
            if stats is not None:
                with op.on_comm_stream():
                    port.add(stats, handle._device_counts()[1])
        outputs = self._move(op, handle, x, scales, topk_weights, do_zero_padding, use_tma_aligned_col_major_sf,
                             num_sms or handle.num_sms, defer_epilogue or previous_event_before_epilogue is not None)
        recv_x, recv_scales, recv_weights, recv_idx = outputs
        event = self._end(op, handle, previous_event_before_epilogue, defer_epilogue,
                          (x, scales, topk_idx, topk_weights, stats, handle.topk_idx) + outputs)
        return (recv_x if scales is None else (recv_x, recv_scales), recv_idx,
                recv_weights if topk_weights is not None else None, handle, event)

    def _needed_row_bytes(self, x, scales):
        """Of these rows with their scales, and of BF16 rows of as many elements on their way back."""
        def row(t):
            return t.shape[1] * c_api.TYPES[self._port.dtype(t)][1]
        return align(max(row(x) + (align(row(scales), 16) if scales is not None else 0), 2 * x.shape[1]), 16)

    def _move(self, op, handle, x, scales, weights, zero_padding, columns, num_sms, send_only):
        """The rows' way along a handle: (tokens, scales, weights, indices) received, None where there are none."""
        port, rows, topk = self._port, handle._rows, handle._routing.handle.topk
        flat = not handle.do_expand
        sent_weights = weights
        if flat and weights is None:
            # Flat indices come with the forward pass, which carries weights: zeros.
            if handle._zero_weights is None:
                with op.on_comm_stream():
                    handle._zero_weights = port.zeros((x.shape[0], topk), 'float32')
            sent_weights = handle._zero_weights
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
            num_sms=num_sms, send_only=send_only, stream=op.stream)
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
        self._common(num_sms, num_qps, previous_event, allocate_on_comm_stream, async_with_compute_stream, defer_epilogue)
        self._check('x', x, 'rows', 'hidden')
        self._own(handle)
        if self.runtime is None:
            raise RuntimeError('the buffer is destroyed')
        if x.shape[0] != handle._rows:
            raise ValueError('x has %d rows: expected %d, as dispatch gave' % (x.shape[0], handle._rows))
        bias = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        if len(bias) > 2:
            raise ValueError('bias is a tuple of %d tensors: expected at most two' % len(bias))
        for i, t in enumerate(bias):
            self._check('bias[%d]' % i, t, 'tokens', 'hidden')
        if topk_weights is not None:
            self._check('topk_weights', topk_weights, *(('rows',) if handle.do_expand else ('rows', 'top-k')))
        op = port.operation(previous_event, allocate_on_comm_stream, async_with_compute_stream)
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
            num_sms=num_sms or handle.num_sms, send_only=defer_epilogue or previous_event_before_epilogue is not None,
            stream=op.stream)
        event = self._end(op, handle, previous_event_before_epilogue, defer_epilogue,
                          (x, topk_weights, combined, combined_weights) + bias)
        return combined, combined_weights, event

    # ---- Parts of DeepEP V2 that are not expert parallelism ------------------------------------------------------------

    def _elsewhere(self, *_, **__):
        raise _missing('Engram, pipeline send/recv and all-gather sessions', 'anything but dispatch and combine')

    engram_write = engram_fetch = pp_set_config = pp_send = pp_recv = _elsewhere
    create_agrs_session = destroy_agrs_session = agrs_new_session = agrs_set_config = _elsewhere
    agrs_get_inplace_tensor = all_gather = _elsewhere


EPBuffer = ElasticBuffer
