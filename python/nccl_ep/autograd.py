"""Dispatch and combine as autograd functions: the backward pass of dispatch is a combine, that of combine a dispatch along
the same handle. Both directions are collective, so all ranks differentiate the same calls in the same order."""
import torch
from torch.autograd.function import once_differentiable

from .handle import EPHandle


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, topk_weights, topk_idx, options):
        recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(x, topk_idx, topk_weights, **options)
        ctx.buffer, ctx.handle = buffer, handle
        if recv_idx is not None:
            ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_weights, recv_idx, handle, event

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x, grad_weights, *_):
        # Without weights there are none to give a gradient to; all ranks dispatch alike.
        grad_x, grad_weights, _ = ctx.buffer.combine(
            grad_x.contiguous(), ctx.handle, topk_weights=None if grad_weights is None else grad_weights.contiguous())
        return None, grad_x, grad_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, handle, options, *bias):
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, event = buffer.combine(x, handle, bias=bias or None, **options)
        return combined, event

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        handle = ctx.handle
        grad = grad.contiguous()
        grad_x, _, _, _, _ = ctx.buffer.dispatch(grad, handle=handle, do_expand=handle.do_expand,
                                                 do_zero_padding=handle.do_expand)
        # The sums start from the biases, so each has the sums' gradient.
        return (None, grad_x, None, None) + tuple(grad if needed else None for needed in ctx.needs_input_grad[4:])


def moe_dispatch(buffer, x, topk_idx, topk_weights, num_experts, **options):
    """ElasticBuffer.dispatch, differentiable once in x and topk_weights (which may be None).

    Returns (recv_x, recv_topk_idx, recv_topk_weights, handle, event). Options are dispatch's; counts are always read
    (do_cpu_sync), because rows that no token fills would have undefined gradients. The backward pass runs on the current
    stream's side: it waits and lets wait."""
    if options.get('do_cpu_sync') not in (None, True):
        raise ValueError('do_cpu_sync is %r: expected True or nothing in a differentiable dispatch' % (options['do_cpu_sync'],))
    if isinstance(x, tuple):
        raise TypeError('x is a tuple: expected a tensor, FP8 rows with scales have no gradients')
    options['num_experts'] = num_experts
    if options.get('do_expand'):
        options.setdefault('do_zero_padding', True)  # experts work on padding rows too: no garbage there
    recv_x, recv_weights, recv_idx, handle, event = _Dispatch.apply(buffer, x, topk_weights, topk_idx, options)
    return recv_x, recv_idx, recv_weights, handle, event


def moe_combine(buffer, x, handle, bias=None, **options):
    """ElasticBuffer.combine, differentiable once in x and in bias (a tensor or a tuple of two). The handle is of a dispatch with
    do_cpu_sync: without it, the gradients of rows that no token fills would be undefined. Returns (y, event)."""
    if isinstance(handle, EPHandle) and not handle.is_exact:
        raise ValueError('handle is of a dispatch with do_cpu_sync=False: expected True for a differentiable combine')
    if options.get('topk_weights') is not None:
        raise ValueError('topk_weights is given: expected none, a differentiable combine returns no weights')
    bias = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    return _Combine.apply(buffer, x, handle, options, *bias)
