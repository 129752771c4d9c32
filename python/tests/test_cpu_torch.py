"""PyTorch's side of the package on the emulated fabric: gradients, the example layer, and, where DEEPEP_SOURCE names a
source tree of DeepEP V2, its own test of the elastic buffer at a small size. Skipped without PyTorch."""
import importlib.util
import os
import sys
import threading
import types
import unittest

os.environ['TORCH_COMPILE_DISABLE'] = '1'
try:
    import torch
    import cpu_torch
except ImportError:
    raise unittest.SkipTest('no PyTorch') from None

from nccl_ep import ElasticBuffer
from nccl_ep.autograd import moe_combine, moe_dispatch

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load(path):
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Gradients(unittest.TestCase):
    EXPERTS, TOPK, HIDDEN, TOKENS = 8, 3, 64, (5, 7)

    def check(self, expand):
        """Experts that scale: y = sum of w * scale[e] * x, whose gradients PyTorch knows."""
        torch.manual_seed(1)
        x = [torch.randn(t, self.HIDDEN).bfloat16() for t in self.TOKENS]
        idx = [torch.stack([torch.randperm(self.EXPERTS)[:self.TOPK] for _ in range(t)]) for t in self.TOKENS]
        weights = [torch.rand(t, self.TOPK) for t in self.TOKENS]
        grad = [torch.randn(t, self.HIDDEN).bfloat16() for t in self.TOKENS]
        idx[0][0, 1] = -1
        scale = torch.randn(self.EXPERTS)

        def body(rank):
            me, locals_ = rank.rank(), self.EXPERTS // 2
            buffer = ElasticBuffer(rank, num_max_tokens_per_rank=8, hidden=self.HIDDEN, explicitly_destroy=True)
            xs, ws = x[me].clone().requires_grad_(), weights[me].clone().requires_grad_()
            rows, row_idx, row_weights, handle, _ = moe_dispatch(buffer, xs, idx[me], ws, self.EXPERTS,
                                                                 do_expand=expand, expert_alignment=4)
            mine = scale[me * locals_:(me + 1) * locals_]
            if expand:
                counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
                factor = row_weights * mine.repeat_interleave(counts)
            else:
                factor = (row_weights * mine[row_idx.clamp(min=0)] * (row_idx >= 0)).sum(1)
            y, _ = moe_combine(buffer, (rows.float() * factor[:, None]).bfloat16(), handle)
            y.backward(grad[me])
            buffer.destroy()
            return y.detach(), xs.grad, ws.grad
        for me, got in enumerate(cpu_torch.run(body)):
            xs, ws = x[me].float().requires_grad_(), weights[me].clone().requires_grad_()
            y = (xs[:, None] * (ws * (idx[me] >= 0) * scale[idx[me].clamp(min=0)])[..., None]).sum(1)
            y.backward(grad[me].float())
            for name, a, b in zip(('y', 'x', 'weights'), got, (y.detach(), xs.grad, ws.grad)):
                self.assertLess(((a.float() - b).norm() / b.norm()).item(), 0.01, name)

    def test_flat(self):
        self.check(False)

    def test_expanded(self):
        self.check(True)

    def test_bias_and_no_weights(self):
        """Biases have the sums' gradients; a dispatch without weights has none for them."""
        def body(rank):
            torch.manual_seed(rank.rank())
            buffer = ElasticBuffer(rank, num_max_tokens_per_rank=8, hidden=self.HIDDEN, explicitly_destroy=True)
            x, first, second, grad = (torch.randn(4, self.HIDDEN).bfloat16() for _ in range(4))
            idx = torch.tensor([[0, 5, -1]] * 4)
            x.requires_grad_()
            first.requires_grad_()
            rows, _, weights, handle, _ = moe_dispatch(buffer, x, idx, None, self.EXPERTS)
            self.assertIsNone(weights)
            y, _ = moe_combine(buffer, rows, handle, bias=(first, second))
            y.backward(grad)
            self.assertTrue(torch.equal(first.grad, grad) and second.grad is None)
            self.assertTrue(torch.equal(x.grad, 2 * grad))  # once from each of two ranks
            *_, bounded, _ = buffer.dispatch(x.detach(), idx, None, num_experts=self.EXPERTS, do_cpu_sync=False)
            with self.assertRaisesRegex(ValueError, 'handle is of a dispatch with do_cpu_sync=False'):
                moe_combine(buffer, rows, bounded)
            with self.assertRaisesRegex(ValueError, 'topk_weights is given'):
                moe_combine(buffer, rows, handle, topk_weights=rows)
            with self.assertRaisesRegex(ValueError, 'do_cpu_sync is False'):
                moe_dispatch(buffer, x, idx, None, self.EXPERTS, do_cpu_sync=False)
            buffer.destroy()
        cpu_torch.run(body)


class Example(unittest.TestCase):
    def test_layer(self):
        example = load(os.path.join(PACKAGE, '..', 'examples', 'moe_layer.py'))
        example.TOKENS, example.HIDDEN, example.INNER, example.EXPERTS, example.TOPK = 16, 64, 32, 8, 3
        one_at_a_time = threading.Lock()  # torch's generator is common to the threads

        def body(rank):
            buffer = ElasticBuffer(rank, num_max_tokens_per_rank=16, hidden=64, explicitly_destroy=True)
            with one_at_a_time:
                layer = example.MoE(buffer, rank.rank(), 2)
                x, target = (torch.randn(16, 64).bfloat16() for _ in range(2))
            pairs = list(zip(example.step(layer, x, target), example.step(layer.reference, x, target)))
            buffer.destroy()
            return [((a - b).norm() / b.norm()).item() for a, b in pairs]
        for errors in cpu_torch.run(body):
            self.assertLess(max(errors), 0.01)

    def test_decode(self):
        """Its step without a graph, which the emulated fabric has not."""
        example = load(os.path.join(PACKAGE, '..', 'examples', 'decode_graph.py'))
        example.TOKENS, example.HIDDEN, example.INNER, example.EXPERTS, example.TOPK = 8, 64, 32, 8, 3
        one_at_a_time = threading.Lock()

        def body(rank):
            buffer = ElasticBuffer(rank, num_max_tokens_per_rank=8, hidden=64, explicitly_destroy=True)
            with one_at_a_time:
                decoder = example.Decoder(buffer, rank.rank(), 2)
            errors = [decoder.difference(decoder.step) for _ in range(3)]
            buffer.destroy()
            return errors
        for errors in cpu_torch.run(body):
            self.assertLess(max(errors), 0.01)


@unittest.skipUnless(os.environ.get('DEEPEP_SOURCE'), 'DEEPEP_SOURCE is not set')
class DeepEp(unittest.TestCase):
    def check(self, ranks=2, domains=1, num_experts=8, num_topk=3, **options):
        sys.path.insert(0, os.path.join(PACKAGE, 'nccl_ep', 'compat'))
        import deep_ep
        from deep_ep.utils import envs
        test = load(os.path.join(os.environ['DEEPEP_SOURCE'], 'tests', 'elastic', 'test_ep.py'))
        args = types.SimpleNamespace(**dict(dict(
            num_tokens=12, hidden=256, num_topk=num_topk, num_experts=num_experts, num_sms=0, num_qps=0, do_cpu_sync=1,
            allow_hybrid_mode=1, allow_multiple_reduction=1, deterministic=False, masked_ratio=0.0,
            unbalanced_ratio=1.0, precise_unbalanced_ratio=False, skip_check=False, skip_perf_test=True,
            dump_profile_traces='', ignore_local_traffic=False, test_first_only=False), **options))
        envs._global_seed, test.dist_print = 0, lambda *_, **__: None

        @torch.inference_mode()
        def body(rank):
            buffer = deep_ep.ElasticBuffer(
                rank, num_max_tokens_per_rank=args.num_tokens, hidden=args.hidden, deterministic=args.deterministic,
                allow_multiple_reduction=args.allow_multiple_reduction, prefer_overlap_with_compute=False,
                explicitly_destroy=True)
            test.test_dispatch_combine(buffer, args)
            buffer.destroy()
        cpu_torch.run(body, ranks, domains)

    def test_all_modes(self):
        self.check()

    def test_all_modes_without_cpu_sync(self):
        self.check(do_cpu_sync=0)

    def test_four_ranks(self):
        self.check(ranks=4, num_experts=16, num_topk=6, masked_ratio=0.2, test_first_only=True)

    def test_two_domains(self):
        self.check(ranks=4, domains=2, num_experts=16, num_topk=6, masked_ratio=0.2, test_first_only=True)

    def test_single_reduction(self):
        self.check(allow_multiple_reduction=0, masked_ratio=0.2)

    def test_single_reduction_two_domains(self):
        self.check(ranks=4, domains=2, num_experts=16, num_topk=6, allow_multiple_reduction=0, test_first_only=True)

    def test_deterministic(self):
        self.check(deterministic=True, unbalanced_ratio=2.0, num_sms=6, test_first_only=True)


if __name__ == '__main__':
    unittest.main()
