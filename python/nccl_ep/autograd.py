"""Dispatch and combine as autograd functions: the backward pass of dispatch is a combine, that of combine a dispatch along
the same handle. Both directions are collective, so all ranks differentiate the same calls in the same order."""
import torch


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, topk_weights, topk_idx, options):
        recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(x, topk_idx, topk_weights, **options)
        ctx.buffer, ctx.handle = buffer, handle
        if recv_idx is not None:
            ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_weights, recv_idx, handle, event

    @staticmethod
    def backward(ctx, grad_x, grad_weights, *_):
        grad_x, grad_weights, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.handle,
                                                     topk_weights=grad_weights.contiguous())
        return None, grad_x, grad_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, handle, options):
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, event = buffer.combine(x, handle, **options)
        return combined, event

    @staticmethod
    def backward(ctx, grad, *_):
        handle = ctx.handle
        grad_x, _, _, _, _ = ctx.buffer.dispatch(grad.contiguous(), handle=handle, do_expand=handle.do_expand,
                                                 do_zero_padding=handle.do_expand)
        return None, grad_x, None, None


def moe_dispatch(buffer, x, topk_idx, topk_weights, num_experts, **options):
    """ElasticBuffer.dispatch, differentiable in x and topk_weights.

    Returns (recv_x, recv_topk_idx, recv_topk_weights, handle, event). Options are dispatch's; counts are always read
    (do_cpu_sync), because rows that no token fills would have undefined gradients. The backward pass runs on the current
    stream's side: it waits and lets wait."""
    if options.get('do_cpu_sync') is False:
        raise ValueError('do_cpu_sync is False: expected True or nothing in a differentiable dispatch')
    options['num_experts'] = num_experts
    if options.get('do_expand'):
        options.setdefault('do_zero_padding', True)  # experts work on padding rows too: no garbage there
    recv_x, recv_weights, recv_idx, handle, event = _Dispatch.apply(buffer, x, topk_weights, topk_idx, options)
    return recv_x, recv_idx, recv_weights, handle, event


def moe_combine(buffer, x, handle, **options):
    """ElasticBuffer.combine, differentiable in x. Returns (y, event)."""
    return _Combine.apply(buffer, x, handle, options)
