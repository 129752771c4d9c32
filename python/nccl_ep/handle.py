"""EPHandle: the routing of a batch, as dispatch returns it and as cached dispatches and combine take it."""

from .core import Unique


def align(value, alignment):
    return (value + alignment - 1) // alignment * alignment


class Routing(Unique):
    """A C handle, its memory, and the last event that concerns them. What is let go of is put on `retired`, where its
    buffer finds it: the C handle must live until the streams have passed its last use."""

    def __init__(self, handle, memory, retired):
        self.handle, self.memory, self.last = handle, memory, None
        self._retired = retired

    def __del__(self):
        if self.handle.pointer is not None:
            self._retired.append((self.handle, self.memory, self.last))


class EPHandle:
    """The routing of one batch and what DeepEP V2's handle tells of it.

    Known at once: do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms, topk_idx (a copy unless
    do_handle_copy was off), num_recv_tokens, num_expanded_tokens (upper bounds without do_cpu_sync) and
    num_recv_tokens_per_expert_list (aligned; empty without do_cpu_sync).

    Made when first asked for, on the current stream, which must have waited for the dispatch; no wait of the host, also in a
    graph: psum_num_recv_tokens_per_scaleup_rank [U], psum_num_recv_tokens_per_expert [L], num_unaligned_recv_tokens_per_expert
    [L], all int32.

    Read when first asked for, by a wait of the host for the routing (local): recv_src_metadata [N, 2 + K] (source
    rank * num_max_tokens_per_rank + token; source rank * K + its last choice here; for each choice its row of the
    output, or -1) and dst_buffer_slot_idx [T, K] (the row at the expert's rank, or -1), both int32."""

    token_metadata_at_forward = None  # of several scale-up domains
    channel_linked_list = None

    def __init__(self, port, routing, topk_idx, do_expand, num_experts, expert_alignment, num_max_tokens_per_rank,
                 num_sms, num_scaleup_ranks, rows_bound, captured=False):
        self._port, self._routing = port, routing
        self.topk_idx = topk_idx
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.num_recv_tokens = port.size * num_max_tokens_per_rank
        self.num_expanded_tokens = rows_bound
        self.num_recv_tokens_per_expert_list = []
        self._scaleup = num_scaleup_ranks
        self._captured = captured  # a graph updates it at each replay: nothing that was read stays true
        self._counts = None
        self._exact = False  # the numbers of rows are no bounds
        self._zero_weights = None
        self._read = {}

    @property
    def is_exact(self):
        """Whether the numbers of rows are no upper bounds."""
        return self._exact

    @property
    def _rows(self):
        """Rows of dispatch's outputs and combine's inputs."""
        return self.num_expanded_tokens if self.do_expand else self.num_recv_tokens

    def _know_counts(self):
        if self._counts is None or self._captured:
            self._counts = self._routing.handle.counts()
        return self._counts

    def _synchronize(self):
        """Exact counts in place of bounds."""
        counts = self._know_counts()
        self.num_recv_tokens = sum(counts.per_source)
        self.num_recv_tokens_per_expert_list = [align(n, self.expert_alignment) for n in counts.per_expert]
        self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
        self._exact = True

    def _device_counts(self):
        """By source, by expert unpadded, and the experts' first slots, in the handle's memory."""
        routing, locals_ = self._routing, self.num_experts // self._port.size
        at = routing.handle.device_counts()
        return [self._port.counts(routing.memory, address, n) for address, n in
                ((at.per_source, self._port.size), (at.per_expert, locals_), (at.expert_start, locals_ + 1))]

    def _from_device(self, name, make):
        """What is made of them, once; in a graph's capture as a part of the graph."""
        if name not in self._read or self._captured:
            self._read[name] = make(*self._device_counts())
        return self._read[name]

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self):
        return self._from_device('per_rank', lambda source, expert, start: self._port.sums_by_rank(source, self._scaleup))

    @property
    def psum_num_recv_tokens_per_expert(self):
        return self._from_device('per_expert', lambda source, expert, start: self._port.sums_by_expert(
            expert, start, self.expert_alignment, self.do_expand))

    @property
    def num_unaligned_recv_tokens_per_expert(self):
        return self._from_device('unaligned', lambda source, expert, start: self._port.clone(expert))

    @property
    def recv_src_metadata(self):
        if 'metadata' not in self._read or self._captured:
            received = sum(self._know_counts().per_source)
            self._read['metadata'] = self._port.source_metadata(
                self._routing.handle.metadata(received), received, self._routing.handle.topk,
                self.num_max_tokens_per_rank)
        return self._read['metadata']

    @recv_src_metadata.setter
    def recv_src_metadata(self, value):
        self._read['metadata'] = value

    @property
    def dst_buffer_slot_idx(self):
        if 'sent' not in self._read or self._captured:
            handle = self._routing.handle
            slots = handle.sent_slots()
            self._read['sent'] = self._port.integers(slots[:handle.tokens * handle.topk],
                                                     (handle.tokens, handle.topk), 'int32')
        return self._read['sent']
