"""ElasticBuffer on the emulated fabric: every byte of dispatch and combine against plain NumPy, and what is refused."""
import gc
import unittest

import numpy as np

import reference
from nccl_ep import ElasticBuffer, EpError, emu, get_logical_domain_size, get_physical_domain_size

HIDDEN, EXPERTS, TOPK, ROOM = 64, 8, 3, 8


def batches(seed, ranks, tokens=None, minus_one=0.0, hidden=HIDDEN, topk=TOPK, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    tokens = tokens or [int(t) for t in rng.integers(1, ROOM + 1, ranks)]
    return [reference.Batch(rng, t, hidden, topk, experts, minus_one) for t in tokens]


def buffer_of(rank, **options):
    return ElasticBuffer(rank, **dict(dict(num_max_tokens_per_rank=ROOM, hidden=HIDDEN, num_topk=TOPK,
                                           explicitly_destroy=True), **options))


def experts_of(flat, batches_, rank):
    """The row that each choice's expert here would give: its token times the choice's weight, rounded. [N, K, H]"""
    x = flat.gather(batches_, 'x')
    return reference.round_bfloat16(x[:, None, :] * flat.weights[:, :, None])


def expected_combine(batches_, rank, domains=1, bias=(), multiple=True):
    b = batches_[rank]
    y = reference.round_bfloat16(b.x[:, None, :] * b.weights[:, :, None])
    return reference.combine(b, y, len(batches_), EXPERTS, domains, bias, multiple)


def reduced(flat, y):
    """An expert side's sum of a flat row: its local choices in ascending k, rounded."""
    total = np.zeros((len(flat.idx), y.shape[2]), np.float32)
    for k in range(y.shape[1]):
        total += np.where(flat.idx[:, k:k + 1] >= 0, y[:, k], 0)
    return reference.round_bfloat16(total)


class Case(unittest.TestCase):
    maxDiff = 2000

    def equal(self, got, want, what):
        np.testing.assert_array_equal(got, want, what)


class Flat(Case):
    def check(self, seed, ranks, cpu_sync=True, domains=1, **how):
        data = batches(seed, ranks, **how)

        def body(rank):
            me, b = rank.rank(), data[rank.rank()]
            flat = reference.Flat(data, me, EXPERTS)
            n = len(flat.source)
            buffer = buffer_of(rank)
            x, idx, weights = rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights)
            recv, recv_idx, recv_weights, handle, event = buffer.dispatch(
                x, idx, weights, num_experts=EXPERTS, expert_alignment=4, do_cpu_sync=cpu_sync)
            self.assertIsNone(event.event)
            self.assertEqual(recv.shape[0], n if cpu_sync else ranks * ROOM)
            self.equal(recv.float()[:n], flat.gather(data, 'x'), 'tokens')
            self.equal(recv_idx.numpy()[:n], flat.idx, 'indices')
            self.equal(recv_weights.numpy()[:n], flat.weights, 'weights')
            self.assertTrue((recv_idx.numpy()[n:] == -1).all() and (recv_weights.numpy()[n:] == 0).all())
            padded = [reference.align(c, 4) for c in flat.per_expert]
            self.assertEqual(handle.num_recv_tokens_per_expert_list, padded if cpu_sync else [])
            self.equal(handle.psum_num_recv_tokens_per_expert.numpy(), np.cumsum(padded), 'sums by expert')
            up = ranks // domains
            by_rank = [sum(flat.per_source[u::up]) for u in range(up)]
            self.equal(handle.psum_num_recv_tokens_per_scaleup_rank.numpy(), np.cumsum(by_rank), 'by rank')
            self.equal(handle.num_unaligned_recv_tokens_per_expert.numpy(), flat.per_expert, 'by expert')
            source = handle.recv_src_metadata.numpy()
            self.equal(source[:, 0], flat.source[:, 0] * ROOM + flat.source[:, 1], 'sources')
            last = np.where(flat.idx >= 0, np.arange(TOPK), -1).max(axis=1, initial=-1)
            self.equal(source[:, 1], flat.source[:, 0] * TOPK + last, 'last choices')
            self.equal(handle.dst_buffer_slot_idx.numpy() >= 0, b.idx >= 0, 'slots sent')

            y = np.zeros(recv.shape, np.float32)
            y[:n] = reduced(flat, experts_of(flat, data, me))
            combined, none, _ = buffer.combine(rank.tensor(y, 'bfloat16'), handle)
            self.assertIsNone(none)
            self.equal(combined.float(), expected_combine(data, me, domains), 'combine')
            bias, other = (rank.tensor(reference.round_bfloat16(v), 'bfloat16') for v in (b.x * 3, b.x + 1))
            biased, _, _ = buffer.combine(rank.tensor(y, 'bfloat16'), handle, bias=bias, num_sms=3, num_qps=1)
            self.equal(biased.float(), expected_combine(data, me, domains, [bias.float()]), 'a bias')
            biased, _, _ = buffer.combine(rank.tensor(y, 'bfloat16'), handle, bias=(bias, other))
            self.equal(biased.float(), expected_combine(data, me, domains, [bias.float(), other.float()]), 'two biases')
            again, weights_back, _ = buffer.combine(rank.tensor(y, 'bfloat16'), handle, topk_weights=recv_weights)
            self.equal(again.float(), expected_combine(data, me, domains), 'combine with weights')
            self.equal(weights_back.numpy(), b.weights, 'weights back')

            # The routing once more, with other tokens: without weights, indices all the same.
            other, other_idx, none, same, _ = buffer.dispatch(rank.tensor(-b.x, 'bfloat16'), handle=handle)
            self.assertIs(same, handle)
            self.assertIsNone(none)
            self.equal(other.float()[:n], -flat.gather(data, 'x'), 'cached tokens')
            self.equal(other_idx.numpy()[:n], flat.idx, 'cached indices')
            buffer.destroy()
        emu.run(body, ranks // domains, domains, seed=seed)

    def test_four_ranks(self):
        self.check(1, 4, minus_one=0.2)

    def test_without_cpu_sync(self):
        self.check(2, 2, cpu_sync=False)

    def test_one_rank(self):
        self.check(3, 1)

    def test_rank_without_tokens(self):
        self.check(4, 2, tokens=[0, 5])

    def test_nothing_selected(self):
        self.check(5, 2, minus_one=1.0)

    def test_two_domains(self):
        self.check(6, 4, domains=2, minus_one=0.1)


class Expanded(Case):
    def check(self, seed, ranks, alignment, cpu_sync=True, domains=1, multiple=True, **how):
        data = batches(seed, ranks, **how)

        def body(rank):
            me, b = rank.rank(), data[rank.rank()]
            flat = reference.Flat(data, me, EXPERTS)
            want = reference.Expanded(flat, alignment)
            m = len(want.row)
            buffer = buffer_of(rank, allow_multiple_reduction=multiple)
            weights = rank.tensor(b.weights)
            recv, none, recv_weights, handle, _ = buffer.dispatch(
                rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), weights, num_experts=EXPERTS,
                expert_alignment=alignment, do_expand=True, do_zero_padding=True, do_cpu_sync=cpu_sync)
            self.assertIsNone(none)
            x = want.gather(flat.gather(data, 'x'))
            w = np.where(want.filled, flat.weights[want.row, want.k] if m and len(flat.source) else 0, 0)
            self.equal(recv.float()[:m], x, 'tokens')
            self.equal(recv_weights.numpy()[:m], w, 'weights')
            starts = np.cumsum([0] + [reference.align(c, alignment) for c in flat.per_expert])
            self.equal(handle.psum_num_recv_tokens_per_expert.numpy(), starts[:-1] + flat.per_expert, 'sums by expert')
            self.equal(handle.recv_src_metadata.numpy()[:, 2:], want.slot, 'slots')
            if cpu_sync:
                self.assertEqual(recv.shape[0], m)

            again, _, again_weights, _, _ = buffer.dispatch(
                rank.tensor(-b.x, 'bfloat16'), handle=handle, topk_weights=weights, do_expand=True, do_zero_padding=True)
            self.equal(again.float()[:m], -x, 'cached tokens')
            self.equal(again_weights.numpy()[:m], w, 'cached weights')
            # Backward of combine: without weights
            back, _, none, _, _ = buffer.dispatch(rank.tensor(b.x, 'bfloat16'), handle=handle, do_expand=True)
            self.assertIsNone(none)
            self.equal(back.float()[:m][want.filled], x[want.filled], 'rows of the backward pass')

            y = np.zeros(recv.shape, np.float32)
            y[:m] = reference.round_bfloat16(x * w[:, None])
            combined, weights_back, _ = buffer.combine(rank.tensor(y, 'bfloat16'), handle, topk_weights=recv_weights)
            self.equal(combined.float(), expected_combine(data, me, domains, multiple=multiple), 'combine')
            self.equal(weights_back.numpy(), b.weights, 'weights back')
            bias = rank.tensor(reference.round_bfloat16(b.x * 3), 'bfloat16')
            biased, weights_back, _ = buffer.combine(rank.tensor(y, 'bfloat16'), handle, topk_weights=recv_weights,
                                                     bias=(bias, bias), num_sms=2)
            self.equal(biased.float(), expected_combine(data, me, domains, [bias.float()] * 2, multiple),
                       'two biases')
            self.equal(weights_back.numpy(), b.weights, 'weights back')
            buffer.destroy()
        emu.run(body, ranks // domains, domains, seed=seed)

    def test_four_ranks(self):
        self.check(11, 4, 4, minus_one=0.2)

    def test_without_alignment(self):
        self.check(12, 2, 1)

    def test_without_cpu_sync(self):
        self.check(13, 2, 8, cpu_sync=False)

    def test_rank_without_tokens(self):
        self.check(14, 2, 4, tokens=[4, 0])

    def test_two_domains(self):
        self.check(15, 4, 4, domains=2, minus_one=0.1)

    def test_single_reduction(self):
        self.check(16, 2, 4, multiple=False, minus_one=0.1)

    def test_single_reduction_two_domains(self):
        self.check(17, 4, 1, domains=2, multiple=False)


class Types(Case):
    def test_sums(self):
        """Biases and rows of the other types that combine sums: whole numbers, which all of them hold."""
        data = batches(25, 2)
        for b in data:
            b.x = np.round(b.x * 4)

        def body(rank):
            b, flat = data[rank.rank()], reference.Flat(data, rank.rank(), EXPERTS)
            buffer = buffer_of(rank, hidden=2 * HIDDEN)
            owners = np.array([len(set(i[i >= 0] // (EXPERTS // 2))) for i in b.idx])
            for dtype in ('float16', 'float32'):
                recv, _, _, handle, _ = buffer.dispatch(rank.tensor(b.x.astype(dtype)), rank.tensor(b.idx),
                                                        rank.tensor(b.weights), num_experts=EXPERTS)
                self.equal(recv.numpy(), flat.gather(data, 'x').astype(dtype), 'tokens')
                bias = [rank.tensor(np.full(b.x.shape, v, dtype)) for v in (5, -2)]
                combined, _, _ = buffer.combine(recv, handle, bias=tuple(bias))
                self.assertEqual(combined.dtype, dtype)
                self.equal(combined.numpy(), b.x * owners[:, None] + 3, 'sums')
            buffer.destroy()
        emu.run(body, 2, seed=4)


class Scales(Case):
    def check(self, expand, columns):
        data = batches(21, 2, hidden=256)

        def body(rank):
            b = data[rank.rank()]
            flat = reference.Flat(data, rank.rank(), EXPERTS)
            buffer = buffer_of(rank, hidden=256, use_fp8_dispatch=True)
            (recv, scales), _, _, handle, _ = buffer.dispatch(
                (rank.tensor(b.fp8, 'float8_e4m3fn'), rank.tensor(b.scales)), rank.tensor(b.idx),
                rank.tensor(b.weights), num_experts=EXPERTS, expert_alignment=4, do_expand=expand,
                do_zero_padding=expand, use_tma_aligned_col_major_sf=columns)
            rows, want_scales = flat.gather(data, 'fp8'), flat.gather(data, 'scales')
            if expand:
                want = reference.Expanded(flat, 4)
                rows, want_scales = want.gather(rows), want.gather(want_scales)
            self.equal(recv.numpy(), rows, 'rows')
            self.equal(scales.numpy(), want_scales, 'scales')
            self.assertEqual(scales._strides, (1, reference.align(len(rows), 4)) if columns else None)
            buffer.destroy()
        emu.run(body, 2, seed=3)

    def test_flat(self):
        self.check(False, False)

    def test_flat_columns(self):
        self.check(False, True)

    def test_expanded_columns(self):
        self.check(True, True)


class Streams(Case):
    def test_two_batches_on_the_communication_stream(self):
        """Asynchronous calls from a stream of the caller's, an event before the second, inputs written just before."""
        first, second = batches(31, 2), batches(32, 2)

        def body(rank):
            me = rank.rank()
            buffer = buffer_of(rank)
            rank.current = rank.stream()
            started = []
            for data in (first, second):
                b = data[me]
                x, idx, weights = rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights)
                started.append(buffer.dispatch(x, idx, weights, num_experts=EXPERTS, previous_event=buffer.capture(),
                                               async_with_compute_stream=True, allocate_on_comm_stream=True))
            back = []
            for data, (recv, _, _, handle, event) in zip((first, second), started):
                flat = reference.Flat(data, me, EXPERTS)
                with event:
                    y = rank.tensor(reduced(flat, experts_of(flat, data, me)), 'bfloat16')
                self.equal(recv.float(), flat.gather(data, 'x'), 'tokens')
                back.append(buffer.combine(y, handle, async_with_compute_stream=True))
            for data, (combined, _, event) in zip((first, second), back):
                event.current_stream_wait()
                self.equal(combined.float(), expected_combine(data, me), 'combine')
            buffer.destroy()
        emu.run(body, 2, seed=5)

    def deferred(self, seed, expand, ranks=2, domains=1, **how):
        """Two batches in flight, each part of the one beside one of the other, and then a plain call between two parts."""
        first, second = batches(seed, ranks, **how), batches(seed + 1, ranks, **how)

        def expert_rows(data, me):
            flat = reference.Flat(data, me, EXPERTS)
            want = reference.Expanded(flat, 4)
            x = flat.gather(data, 'x')
            if not expand:
                return x, reduced(flat, experts_of(flat, data, me))
            w = np.where(want.filled, flat.weights[want.row, want.k] if len(flat.source) else 0, 0)
            return want.gather(x), reference.round_bfloat16(want.gather(x) * w[:, None])

        def body(rank):
            me = rank.rank()
            buffer = buffer_of(rank)
            sent, back, how = [], [], dict(async_with_compute_stream=True, defer_epilogue=True)
            for data in (first, second):
                b = data[me]
                sent.append(buffer.dispatch(
                    rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights), num_experts=EXPERTS,
                    expert_alignment=4, do_expand=expand, do_zero_padding=expand, **how))
                self.assertIsNone(sent[-1][-1].event)
            for data, (recv, _, _, handle, event) in zip((first, second), sent):
                x, y = expert_rows(data, me)
                with event:
                    rows = rank.tensor(y, 'bfloat16')
                event.complete()  # once is enough
                self.equal(recv.float(), x, 'tokens')
                back.append(buffer.combine(rows, handle, **how))
            plain, *_ = buffer.dispatch(rank.tensor(first[me].x, 'bfloat16'), rank.tensor(first[me].idx),
                                        rank.tensor(first[me].weights), num_experts=EXPERTS)
            self.equal(plain.float(), reference.Flat(first, me, EXPERTS).gather(first, 'x'), 'a call between')
            for data, (combined, _, event) in zip((first, second), back):
                event.complete()
                event.current_stream_wait()
                self.equal(combined.float(), expected_combine(data, me, domains), 'combine')
            with self.assertRaisesRegex(ValueError, 'defer_epilogue is set: expected async'):
                buffer.combine(rows, handle, defer_epilogue=True)
            buffer.destroy()
        emu.run(body, ranks // domains, domains, seed=seed)

    def test_deferred(self):
        self.deferred(61, False, minus_one=0.1)

    def test_deferred_expanded(self):
        self.deferred(63, True, minus_one=0.1)

    def test_deferred_two_domains(self):
        self.deferred(65, True, ranks=4, domains=2)

    def test_event_before_epilogue(self):
        """Outputs that another stream still reads may be written when it has: here, when it has written them."""
        data = batches(67, 2)

        def body(rank):
            me, b = rank.rank(), data[rank.rank()]
            flat = reference.Flat(data, me, EXPERTS)
            buffer = buffer_of(rank)
            x, idx, weights = rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights)
            recv, _, _, handle, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS,
                                                    previous_event_before_epilogue=buffer.capture())
            self.equal(recv.float(), flat.gather(data, 'x'), 'tokens')
            y = rank.tensor(reduced(flat, experts_of(flat, data, me)), 'bfloat16')
            combined, _, event = buffer.combine(y, handle, async_with_compute_stream=True,
                                                previous_event_before_epilogue=buffer.capture())
            event.current_stream_wait()
            self.equal(combined.float(), expected_combine(data, me), 'combine')
            buffer.destroy()
        emu.run(body, 2, seed=9)

    def test_many_handles(self):
        """Handles that are let go of while the device works are destroyed later, and in the end."""
        data = batches(33, 2)

        def body(rank):
            b = data[rank.rank()]
            buffer = buffer_of(rank)
            x, idx, weights = rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights)
            for i in range(6):
                buffer.dispatch(x, idx, weights, num_experts=EXPERTS, do_expand=i % 2 == 1, do_cpu_sync=False)
                gc.collect()
                if i == 3:
                    rank.synchronize()
            self.assertLess(len(buffer._retired), 4)
            buffer.destroy()
        emu.run(body, 2, seed=6)

    def test_stats(self):
        data = batches(34, 2)

        def body(rank):
            b = data[rank.rank()]
            flat = reference.Flat(data, rank.rank(), EXPERTS)
            buffer = buffer_of(rank)
            stats = rank.tensor(np.ones(EXPERTS // 2, np.int32))
            for expand, cpu_sync in ((False, True), (True, True), (False, False), (True, False)):
                *_, handle, _ = buffer.dispatch(
                    rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights), num_experts=EXPERTS,
                    do_expand=expand, do_cpu_sync=cpu_sync, cumulative_local_expert_recv_stats=stats)
                buffer.dispatch(rank.tensor(b.x, 'bfloat16'), handle=handle, do_expand=expand,
                                cumulative_local_expert_recv_stats=stats)  # counts a routing once
            self.equal(stats.numpy(), 1 + 4 * np.array(flat.per_expert), 'cumulative counts')
            buffer.destroy()
        emu.run(body, 2, seed=7)


class Sizes(Case):
    def test_hint(self):
        def body(rank):
            hint = ElasticBuffer.get_buffer_size_hint(rank, ROOM, HIDDEN, TOPK)
            self.assertEqual(hint % (2 << 20), 0)
            self.assertLess(hint, ElasticBuffer.get_buffer_size_hint(rank, 4096, 7168, 8))
            buffer = ElasticBuffer(rank, num_bytes=hint, explicitly_destroy=True)
            b = batches(41, 2)[rank.rank()]
            args = (rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights))
            buffer.dispatch(*args, num_experts=EXPERTS, num_max_tokens_per_rank=ROOM)
            with self.assertRaisesRegex(ValueError, 'num_bytes is .*: 32768 tokens .* need'):
                buffer.dispatch(*args, num_experts=EXPERTS, num_max_tokens_per_rank=32768)
            buffer.destroy()
        emu.run(body, 2)

    def test_domains(self):
        def body(rank):
            buffer = buffer_of(rank, num_experts=EXPERTS)
            self.assertEqual(buffer.get_logical_domain_size(), (1, 2))
            self.assertEqual(get_physical_domain_size(rank), (1, 2))
            self.assertEqual(get_logical_domain_size(rank, allow_hybrid_mode=False), (1, 2))
            self.assertEqual((buffer.scaleout_rank_idx, buffer.scaleup_rank_idx), (0, rank.rank()))
            self.assertEqual(buffer.get_theoretical_num_sms(EXPERTS, TOPK), 4)
            self.assertLessEqual(buffer.get_theoretical_num_qps(4), buffer.num_allocated_qps)
            buffer.destroy()
        emu.run(body, 2)


class Refusals(Case):
    """Errors that name the argument, its value and what was expected."""

    def test_arguments(self):
        b = batches(51, 1)[0]

        def body(rank):
            buffer = buffer_of(rank)
            x, idx, weights = rank.tensor(b.x, 'bfloat16'), rank.tensor(b.idx), rank.tensor(b.weights)
            recv, _, _, handle, event = buffer.dispatch(x, idx, weights, num_experts=EXPERTS, num_sms=4)
            mark = buffer.capture()

            def refused(error, text, call, *args, **options):
                with self.assertRaisesRegex(error, text):
                    call(*args, **options)
            dispatch, combine = buffer.dispatch, buffer.combine
            refused(TypeError, 'x is ndarray: expected', dispatch, b.x, idx, weights, num_experts=EXPERTS)
            refused(ValueError, 'either topk_idx or a cached handle', dispatch, x)
            refused(ValueError, 'num_experts is None', dispatch, x, idx, weights)
            line = rank.empty((HIDDEN,), 'bfloat16')
            refused(ValueError, r'x has 1 dimensions: expected 2, \[tokens, hidden\]', dispatch, line, idx, weights,
                    num_experts=EXPERTS)
            refused(ValueError, r'topk_idx has 1 dimensions: expected 2, \[tokens, top-k\]', dispatch, x,
                    rank.empty((len(b.x),), 'int64'), weights, num_experts=EXPERTS)
            refused(ValueError, 'topk_weights has 1 dimensions', dispatch, x, idx, rank.empty((len(b.x),), 'float32'),
                    num_experts=EXPERTS)
            refused(ValueError, 'scales have 1 dimensions', dispatch, (x, rank.empty((len(b.x),), 'float32')), idx, weights,
                    num_experts=EXPERTS)
            refused(ValueError, 'x is a tuple of 3', dispatch, (x, x, x), idx, weights, num_experts=EXPERTS)
            refused(ValueError, 'num_experts is -8: expected at least 0', dispatch, x, idx, weights, num_experts=-8)
            refused(ValueError, 'num_max_tokens_per_rank is -1: expected', dispatch, x, idx, weights, num_experts=EXPERTS,
                    num_max_tokens_per_rank=-1)
            refused(ValueError, 'expert_alignment is 0: expected at least 1', dispatch, x, idx, weights,
                    num_experts=EXPERTS, expert_alignment=0)
            refused(ValueError, 'num_sms is -1: expected at least 0', dispatch, x, idx, weights, num_experts=EXPERTS, num_sms=-1)
            refused(TypeError, 'num_sms is 1.5: expected a whole number', combine, recv, handle, num_sms=1.5)
            refused(ValueError, 'num_qps is -2', combine, recv, handle, num_qps=-2)
            refused(ValueError, 'x has 1 dimensions', combine, line, handle)
            refused(ValueError, r'bias\[0\] has 1 dimensions', combine, recv, handle, bias=line)
            refused(TypeError, 'handle is int: expected', combine, recv, 3)
            refused(ValueError, 'recv_stats.shape.0. is 1: expected 8', dispatch, x, handle=handle,
                    cumulative_local_expert_recv_stats=rank.empty((1,), 'int32'))
            for name in ('num_max_tokens_per_rank', 'hidden', 'num_topk', 'num_bytes', 'num_experts', 'num_cpu_bytes',
                         'num_allocated_qps', 'num_gpu_timeout_secs'):
                refused(ValueError, name + ' is -1: expected', buffer_of, rank, **{name: -1})
            refused(ValueError, 'hidden is -64: expected', ElasticBuffer.get_buffer_size_hint, rank, 8, -64)
            other = buffer_of(rank)
            refused(ValueError, 'handle is of another buffer', other.combine, recv, handle)
            other.destroy()
            refused(ValueError, 'num_experts is 4096: expected', dispatch, x, idx, weights, num_experts=4096)
            refused(ValueError, r'x.shape\[0\] is 3: expected \d, the tokens of the routing', dispatch,
                    rank.empty((3, HIDDEN), 'bfloat16'), handle=handle)
            refused(TypeError, 'topk_idx is float32: expected int64 or int32', dispatch, x, weights, weights, num_experts=EXPERTS)
            refused(TypeError, 'topk_weights is int64: expected float32', dispatch, x, idx, idx, num_experts=EXPERTS)
            refused(ValueError, 'at most max_token_bytes', dispatch,
                    rank.empty((len(b.x), 4 * HIDDEN), 'bfloat16'), handle=handle)
            refused(ValueError, 'do_zero_padding is set', dispatch, x, handle=handle, do_zero_padding=True)
            refused(ValueError, 'do_expand is True: expected False', dispatch, x, handle=handle, do_expand=True)
            refused(ValueError, 'expert_alignment is 2: expected 1', dispatch, x, handle=handle, expert_alignment=2)
            refused(ValueError, 'do_cpu_sync is set', dispatch, x, handle=handle, do_cpu_sync=True)
            refused(ValueError, 'without allocate_on_comm_stream', dispatch, x, handle=handle, previous_event=mark)
            refused(ValueError, 'num_qps is 1000', dispatch, x, handle=handle, num_qps=1000)
            refused(ValueError, r'x has 1 rows: expected', combine, rank.empty((1, HIDDEN), 'bfloat16'), handle)
            refused(ValueError, 'tuple of 3 tensors', combine, recv, handle, bias=(x, x, x))
            refused(EpError, r'ncclEpCombineExt: ext_config.bias\[1\] is float32: expected bfloat16', combine, recv, handle,
                    bias=(x, rank.empty(x.shape, 'float32')))
            refused(EpError, r'bias\[0\].sizes\[0\] is 1: expected', combine, recv, handle,
                    bias=rank.empty((1, HIDDEN), 'bfloat16'))
            refused(TypeError, 'x is int32: expected bfloat16 or', combine, rank.empty(recv.shape, 'int32'), handle)
            refused(RuntimeError, 'no event to wait for', event.current_stream_wait)
            refused(RuntimeError, 'explicitly_destroy', ElasticBuffer.destroy,
                    ElasticBuffer(rank, num_max_tokens_per_rank=ROOM, hidden=HIDDEN))
            refused(ValueError, 'expected both, or num_bytes', ElasticBuffer, rank)
            buffer.destroy()
            refused(RuntimeError, 'the buffer is destroyed', dispatch, x, idx, weights, num_experts=EXPERTS)
            refused(RuntimeError, 'the buffer is destroyed', combine, recv, handle)
        emu.run(body, 1)

    def test_bad_id(self):
        """An id out of range selects nothing, and is reported."""
        data = batches(53, 2)
        bad = [np.where(b.idx == 3, EXPERTS + 7, b.idx) for b in data]
        self.assertTrue(any((b > EXPERTS).any() for b in bad))
        for b in data:
            b.weights[b.idx == 3] = 0
            b.idx[b.idx == 3] = -1

        def body(rank):
            buffer = buffer_of(rank)
            b, flat = data[rank.rank()], reference.Flat(data, rank.rank(), EXPERTS)
            buffer.check()
            recv, _, _, handle, _ = buffer.dispatch(rank.tensor(b.x, 'bfloat16'), rank.tensor(bad[rank.rank()]),
                                                    rank.tensor(b.weights), num_experts=EXPERTS)
            self.equal(recv.float(), flat.gather(data, 'x'), 'tokens')
            if (bad[rank.rank()] > EXPERTS).any():
                with self.assertRaisesRegex(RuntimeError, r'topk_idx\[\d\]\[\d\] is 15: expected'):
                    buffer.check()
            buffer.check()
            buffer.destroy()
        emu.run(body, 2, seed=8)

    def test_not_there_yet(self):
        """What the C interface lacks is said, not left out."""
        b = batches(52, 1)[0]

        def body(rank):
            buffer = buffer_of(rank)
            idx = rank.tensor(b.idx)
            calls = {'num_cpu_bytes 4096': lambda: buffer_of(rank, num_cpu_bytes=4096),
                     'Engram': lambda: buffer.engram_fetch(idx)}
            for text, call in calls.items():
                with self.assertRaisesRegex(NotImplementedError, text):
                    call()
            buffer.destroy()
        emu.run(body, 1)


if __name__ == '__main__':
    unittest.main()
