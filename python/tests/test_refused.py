"""What is left behind by calls that are refused, fail or are forgotten: nothing. And values that would change their meaning."""
import copy
import gc
import os
import pickle
import re
import sys
import threading
import unittest
import warnings
from unittest import mock

import numpy as np

from nccl_ep import ElasticBuffer, EpError, EventHandle, core, emu, rounding

HIDDEN, EXPERTS, TOPK, ROOM = 64, 8, 3, 8
DEFERRED = dict(num_experts=EXPERTS, async_with_compute_stream=True, defer_epilogue=True)


def buffer_of(rank, **options):
    return ElasticBuffer(rank, **dict(dict(num_max_tokens_per_rank=ROOM, hidden=HIDDEN, num_topk=TOPK,
                                           explicitly_destroy=True), **options))


def batch(rank, tokens=4):
    rng = np.random.default_rng(rank.rank())
    idx = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in range(tokens)], np.int64)
    return (rank.tensor(rng.standard_normal((tokens, HIDDEN)), 'bfloat16'), rank.tensor(idx),
            rank.tensor(rng.random((tokens, TOPK)).astype(np.float32)), idx)


class LeftBehind(unittest.TestCase):
    def test_failed_dispatch(self):
        """Streams stay in order after a call that failed with its update on the way, and nothing was counted."""
        def body(rank):
            buffer = buffer_of(rank)
            x, idx, weights, values = batch(rank)
            stats = rank.tensor(np.zeros(EXPERTS, np.int32))
            for options in dict(), dict(async_with_compute_stream=True), dict(do_cpu_sync=False):
                with mock.patch.object(core.Handle, 'dispatch', side_effect=EpError(4, 'refused')):
                    with self.assertRaisesRegex(EpError, 'refused'):
                        buffer.dispatch(x, idx, weights, num_experts=EXPERTS, cumulative_local_expert_recv_stats=stats, **options)
                idx.set(values[::-1].copy())  # the fabric's checkers see it where an update may still read
                idx.set(values)
            self.assertEqual(stats.numpy().tolist(), [0] * (EXPERTS))
            recv, *_, handle, _ = buffer.dispatch(x, idx, None, num_experts=EXPERTS)
            with mock.patch.object(core.Handle, 'combine', side_effect=EpError(4, 'refused')):
                with self.assertRaisesRegex(EpError, 'refused'):
                    buffer.combine(recv, handle, async_with_compute_stream=True)
            buffer.destroy()
        emu.run(body, 1, seed=1)

    def test_wrong_cached(self):
        """A wrong cached dispatch without weights leaves a handle as it was."""
        def body(rank):
            buffer = buffer_of(rank)
            x, idx, weights, _ = batch(rank)
            recv, *_, handle, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS)
            with self.assertRaisesRegex(ValueError, r'x.shape\[0\] is 3: expected 4, the tokens of the routing'):
                buffer.dispatch(rank.empty((3, HIDDEN), 'bfloat16'), handle=handle)
            again, *_ = buffer.dispatch(x, handle=handle)
            np.testing.assert_array_equal(again.float(), recv.float())
            buffer.destroy()
            with self.assertRaisesRegex(RuntimeError, 'the handle was destroyed with its buffer'):
                handle.psum_num_recv_tokens_per_expert
        emu.run(body, 2)

    def test_before_anything(self):
        """Refused before anything is launched or counted."""
        def body(rank):
            buffer = buffer_of(rank)
            x, idx, weights, _ = batch(rank)
            stats = rank.tensor(np.zeros(EXPERTS // 2, np.int32))
            for error, text, options in (
                    (ValueError, r'topk_weights.shape\[1\] is 2: expected 3', dict(topk_weights=rank.empty((4, 2), 'float32'))),
                    (TypeError, 'previous_event_before_epilogue is str', dict(previous_event_before_epilogue='x')),
                    (TypeError, 'previous_event is EventOverlap', dict(previous_event=buffer.dispatch(
                        x, idx, weights, num_experts=EXPERTS)[-1], allocate_on_comm_stream=True)),
                    (TypeError, 'recv_stats is float32: expected int32', dict(
                        cumulative_local_expert_recv_stats=rank.empty((EXPERTS // 2,), 'float32'))),
                    (TypeError, 'do_expand is None: expected True or False', dict(do_expand=None)),
                    (TypeError, 'x is Tensor of rank', dict(x=self.others[1 - rank.rank()])),
                    (ValueError, 'num_experts is 4294967304: expected at most 2048', dict(num_experts=2 ** 32 + 8)),
                    (ValueError, 'expert_alignment is 18446744073709551617', dict(expert_alignment=2 ** 64 + 1)),
                    (ValueError, 'num_sms is 4294967296', dict(num_sms=2 ** 32)),
                    (ValueError, 'num_max_tokens_per_rank is 4294967304', dict(num_max_tokens_per_rank=2 ** 32 + 8))):
                with self.assertRaisesRegex(error, text):
                    buffer.dispatch(**dict(dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS,
                                                cumulative_local_expert_recv_stats=stats), **options))
            self.assertFalse(stats.numpy().any())
            for error, text, options in ((ValueError, 'hidden is 4294967360', dict(hidden=2 ** 32 + 64)),
                                         (ValueError, 'num_topk is 4294967299', dict(num_topk=2 ** 32 + 3)),
                                         (TypeError, 'allow_hybrid_mode is None', dict(allow_hybrid_mode=None)),
                                         (ValueError, 'num_gpu_timeout_secs is inf', dict(num_gpu_timeout_secs=float('inf'))),
                                         (ValueError, 'num_gpu_timeout_secs is 1e-12', dict(num_gpu_timeout_secs=1e-12))):
                with self.assertRaisesRegex(error, text):
                    buffer_of(rank, **options)
            with self.assertRaisesRegex(ValueError, 'num_sms is -1'):
                buffer.get_theoretical_num_qps(-1)
            with self.assertRaisesRegex(NotImplementedError, 'Engram'):
                buffer.get_engram_storage_size_hint(1)
            with self.assertRaisesRegex(NotImplementedError, 'pipeline'):
                type(buffer).get_pp_buffer_size_hint(1, 1)
            buffer.destroy()
        meet = threading.Barrier(2)
        self.others = [None, None]

        def both(rank):
            self.others[rank.rank()] = rank.empty((4, HIDDEN), 'bfloat16')
            meet.wait()
            body(rank)
        emu.run(both, 2)
        self.others = None
        for group in None, 3:
            with self.assertRaisesRegex(TypeError, 'group is %s: expected a torch.distributed' % group):
                ElasticBuffer(group, num_max_tokens_per_rank=ROOM, hidden=HIDDEN)

    def test_forgotten(self):
        """Deferred calls whose events are lost are completed by the next call, with a warning."""
        def body(rank):
            buffer = buffer_of(rank)
            x, idx, weights, _ = batch(rank)
            for _ in range(4):
                buffer.dispatch(x, idx, weights, **DEFERRED)
            recv, *_, handle, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS)
            late = buffer.dispatch(x, idx, weights, **DEFERRED)[-1]
            buffer.destroy()
            for wait in late.complete, late.current_stream_wait:
                with self.assertRaisesRegex(RuntimeError, 'the buffer is destroyed, and this dispatch was not completed'):
                    wait()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            emu.run(body, 2)
        self.assertEqual(sum('the event of a deferred dispatch was let go of' in str(w.message) for w in seen), 8)

    def test_event_of_another_rank(self):
        """Refused before the send, which would hold room in the window; a wait that fails later receives all the same."""
        meet, marks = threading.Barrier(2), [None, None]

        def failing(stream):
            raise EpError(4, 'refused')

        def body(rank):
            buffer = buffer_of(rank)
            x, idx, weights, _ = batch(rank)
            marks[rank.rank()] = EventHandle()
            meet.wait()
            with self.assertRaisesRegex(ValueError, 'previous_event_before_epilogue is of another rank'):
                buffer.dispatch(x, idx, weights, num_experts=EXPERTS, previous_event_before_epilogue=marks[1 - rank.rank()])
            for _ in range(3):
                bad = EventHandle()
                bad.event.wait = failing
                with self.assertRaisesRegex(EpError, 'refused'):
                    buffer.dispatch(x, idx, weights, num_experts=EXPERTS, previous_event_before_epilogue=bad)
            buffer.dispatch(x, idx, weights, **DEFERRED)[-1].complete()
            buffer.destroy()
            meet.wait()
        emu.run(body, 2)

    def test_collected_buffer(self):
        """Garbage collections are no place for collective calls."""
        def body(rank):
            buffer = buffer_of(rank, explicitly_destroy=False)
            x, idx, weights, _ = batch(rank)
            buffer.dispatch(x, idx, weights, num_experts=EXPERTS)
            buffer.itself = buffer
            del buffer
            gc.collect()
            kept.append(buffer_of(rank, explicitly_destroy=False))
            kept[-1].dispatch(x, idx, weights, num_experts=EXPERTS)
        kept = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            emu.run(body, 2)
            kept.clear()  # on a thread that is none of the ranks'
            gc.collect()
        self.assertEqual(sum('an ElasticBuffer was not destroyed' in str(w.message) for w in seen), 4)

    def test_outlives(self):
        """What is let go of after the ranks have ended is quiet."""
        def body(rank):
            kept.append((ElasticBuffer(rank, num_max_tokens_per_rank=ROOM, hidden=HIDDEN), rank.mark(None), rank.empty((2,), 'int32')))
        kept = []
        emu.run(body, 2)
        with mock.patch.object(sys, 'unraisablehook') as raised:
            kept.clear()
            gc.collect()
        raised.assert_not_called()

    def test_memory(self):
        """Without a synchronize() what is over is let go of, handles too."""
        def body(rank):
            buffer = buffer_of(rank)
            x, idx, weights, _ = batch(rank)
            for _ in range(20):
                recv, *_, handle, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS)
                buffer.combine(recv, handle)
            sizes = len(rank._garbage), len(rank._pending), len(rank._dead_events), len(buffer._retired)
            buffer.destroy()
            return max(sizes), len(rank._streams)
        for most, streams in emu.run(body, 2):
            self.assertLess(most, 12)
            self.assertEqual(streams, 0)

    def test_barrier(self):
        came = []

        def body(rank):
            buffer = buffer_of(rank)
            came.append(rank.rank())
            buffer.barrier()
            self.assertEqual(len(came), 3)
            buffer.destroy()
        emu.run(body, 3)

        def fails(rank):
            if rank.rank():
                raise KeyError('mine')
            rank.barrier()
        with self.assertRaises(KeyError):
            emu.run(fails, 2)

    def test_copies(self):
        error = pickle.loads(pickle.dumps(EpError(4, 'text')))
        self.assertEqual((str(error), error.code, str(copy.copy(error))), ('ncclInvalidArgument: text', 4, str(error)))

        def body(rank):
            for thing in rank, rank.empty((2,), 'int32'), rank.mark(None), EventHandle():
                for way in copy.deepcopy, pickle.dumps:
                    with self.assertRaisesRegex(TypeError, 'cannot be copied or pickled'):
                        way(thing)
        emu.run(body, 1)

    def test_thread_of_no_rank(self):
        def body(rank):
            buffer = buffer_of(rank)
            with self.assertRaisesRegex(RuntimeError, 'expected a thread that emu.run started'):
                self.elsewhere(buffer.capture)
            buffer.destroy()
        emu.run(body, 1)

    @staticmethod
    def elsewhere(call):
        raised = []

        def one():
            try:
                call()
            except Exception as e:
                raised.append(e)
        thread = threading.Thread(target=one)
        thread.start()
        thread.join()
        raise raised[0]


class Values(unittest.TestCase):
    def test_rounding(self):
        """Against a table of all codes: the nearest, the even one of two."""
        for dtype, largest in ('bfloat16', 0x7F7F), ('float8_e4m3fn', 0x7E), ('float8_e5m2', 0x7B):
            codes = np.arange(largest + 1)
            values = rounding.decode(codes, dtype).astype(np.float64)
            self.assertTrue((np.diff(values) > 0).all(), dtype)
            np.testing.assert_array_equal(rounding.encode(values, dtype), codes)
            middle = (values[:-1] + values[1:]) / 2
            np.testing.assert_array_equal(rounding.encode(middle, dtype), codes[:-1] + codes[:-1] % 2)
            np.testing.assert_array_equal(rounding.encode(np.nextafter(middle, np.inf), dtype), codes[1:])
            np.testing.assert_array_equal(rounding.decode(rounding.encode(-values, dtype), dtype), -values)
            self.assertTrue(np.isnan(rounding.decode(rounding.encode([np.nan], dtype), dtype)).all())
        self.assertEqual(rounding.decode(rounding.encode([1.5, 448, -57344], 'float8_e5m2'), 'float8_e5m2').tolist(), [1.5, 448, -57344])
        self.assertEqual(rounding.decode(rounding.encode([np.inf, 1e9], 'bfloat16'), 'bfloat16')[0], np.inf)

    def test_tensors(self):
        def body(rank):
            for values in np.array([[1.5, -2]]), [[1.5, -2.0]], np.float16([[1.5, -2]]), np.float32([[1.5, -2]]):
                for dtype in 'bfloat16', 'float8_e4m3fn', 'float8_e5m2':
                    self.assertEqual(rank.tensor(values, dtype).float().tolist(), [[1.5, -2]])
            self.assertEqual(rank.tensor(np.uint8([0x38]), 'float8_e4m3fn').float().tolist(), [1])
            self.assertEqual(rank.tensor(np.float32(3)).numpy(), 3)
            self.assertEqual(rank.tensor(np.array([1, 2], '>i4')).numpy().tolist(), [1, 2])
            for error, text, values, dtype in (
                    (TypeError, 'values are int64: expected floating-point values, or their bits as uint16', [1, 2], 'bfloat16'),
                    (TypeError, 'values are float32: expected whole numbers', np.float32([1.7]), 'int32'),
                    (ValueError, 'values are 300 to 300: expected -128 to 127', [300], 'int8'),
                    (TypeError, "dtype is 'bool': expected one of", [True], None),
                    (TypeError, "dtype is 'float99': expected one of", [1.0], 'float99')):
                with self.assertRaisesRegex(error, text):
                    rank.tensor(values, dtype)
            with self.assertRaisesRegex(TypeError, 'without dimensions'):
                len(rank.tensor(np.float32(3)))
        emu.run(body, 1)

    def test_documentation(self):
        """The example in docs/python.md gives what it says."""
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'docs', 'python.md')) as f:
            example, = (code for code in re.findall(r'```python\n(.*?)```', f.read(), re.S) if 'emu.run' in code)
        printed = []
        exec(example, dict(print=printed.append))
        np.testing.assert_array_equal(printed[0], np.full((2, 64), 3.0))


if __name__ == '__main__':
    unittest.main()
