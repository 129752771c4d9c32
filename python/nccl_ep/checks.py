"""Checks of arguments: each refuses by name, with the value and what was expected."""
import math
import operator

UINT32, UINT64 = 2 ** 32 - 1, 2 ** 64 - 1
MAX_EXPERTS = 2048       # of a group; these four: nccl_ep.h
MAX_TOPK = 32
MAX_ROW_BYTES = 1 << 16
MAX_ALIGNMENT = 1 << 20
ROW_ALIGNMENT = 16       # bytes
SCALE_TYPES = ('float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'uint8', 'int32', 'uint32')


def whole(least=0, most=UINT32, **numbers):
    """Refuses what is no whole number of that range: the C interface's are unsigned, of 32 bits mostly."""
    for name, value in numbers.items():
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError('%s is %r: expected a whole number' % (name, value)) from None
        if value < least:
            raise ValueError('%s is %d: expected at least %d' % (name, value, least))
        if value > most:
            raise ValueError('%s is %d: expected at most %d' % (name, value, most))


def flag(**flags):
    """Refuses what is neither true nor false; 0 and 1 are."""
    for name, value in flags.items():
        if not (type(value).__name__ in ('bool', 'bool_', 'int') and value in (0, 1)):
            raise TypeError('%s is %r: expected True or False' % (name, value))


def seconds(**numbers):
    """Refuses what is no time of a microsecond to 30 years."""
    for name, value in numbers.items():
        try:
            fits = 1e-6 <= value <= 1e9 and math.isfinite(value)
        except TypeError:
            raise TypeError('%s is %r: expected a number of seconds' % (name, value)) from None
        if not fits:
            raise ValueError('%s is %s: expected seconds, 1e-6 to 1e9' % (name, value))


def group(value):
    if not (callable(getattr(value, 'rank', None)) and callable(getattr(value, 'size', None))):
        raise TypeError('group is %r: expected a torch.distributed process group, or an nccl_ep.emu.Rank' % (value,))


def tensor(port, name, t, *extents):
    """A dense tensor of this rank with as many dimensions as `extents` names."""
    owned(port, name, t)
    if len(t.shape) != len(extents):
        raise ValueError('%s has %d dimensions: expected %d, [%s]' % (name, len(t.shape), len(extents), ', '.join(extents)))
    if not port.dense(t):
        raise ValueError('%s is not contiguous' % name)


def owned(port, name, t):
    if not port.owns(t):
        device = ' of %s' % t.device if type(t).__name__ == 'Tensor' else ''
        raise TypeError('%s is %s%s: expected a tensor of this rank\'s device' % (name, type(t).__name__, device))


def dtype(port, name, t, *types):
    if port.dtype(t) not in types:
        raise TypeError('%s is %s: expected %s' % (name, port.dtype(t), ' or '.join(types)))


def extent(name, t, dimension, size, why):
    if t.shape[dimension] != size:
        raise ValueError('%s.shape[%d] is %d: expected %d, %s' % (name, dimension, t.shape[dimension], size, why))


def row(port, name, t, itemsize):
    """Bytes of a row, which the kernels move in units of 16 bytes."""
    size = t.shape[1] * itemsize
    if not 0 < size <= MAX_ROW_BYTES or size % ROW_ALIGNMENT:
        raise ValueError('a row of %s has %d bytes: expected a multiple of %d, at most %d'
                         % (name, size, ROW_ALIGNMENT, MAX_ROW_BYTES))
    if t.shape[0] and port.address(t) % ROW_ALIGNMENT:
        raise ValueError('%s starts at %#x: expected a multiple of %d' % (name, port.address(t), ROW_ALIGNMENT))
    return size


def routing(port, topk_idx, num_topk):
    """topk_idx [T, K] of a dispatch."""
    tensor(port, 'topk_idx', topk_idx, 'tokens', 'top-k')
    dtype(port, 'topk_idx', topk_idx, 'int64', 'int32')
    most = num_topk or MAX_TOPK
    if not 0 < topk_idx.shape[1] <= most:
        raise ValueError('topk_idx.shape[1] is %d: expected a top-k of 1 to %d' % (topk_idx.shape[1], most))


def rows(port, itemsize, x, scales, weights, tokens, topk):
    """What travels along a routing of `tokens` tokens: x, its scales, the weights. Returns the bytes of a row with scales."""
    extent('x', x, 0, tokens, 'the tokens of the routing')
    size = row(port, 'x', x, itemsize(x))
    if weights is not None:
        tensor(port, 'topk_weights', weights, 'tokens', 'top-k')
        dtype(port, 'topk_weights', weights, 'float32')
        extent('topk_weights', weights, 0, tokens, 'the tokens of the routing')
        extent('topk_weights', weights, 1, topk, 'the top-k of the routing')
    if scales is None:
        return size
    dtype(port, 'scales', scales, *SCALE_TYPES)
    extent('scales', scales, 0, tokens, 'the tokens of the routing')
    width = scales.shape[1] * itemsize(scales)
    if not width or width % 4:
        raise ValueError('a row of scales has %d bytes: expected a multiple of 4' % width)
    return size + (width + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
