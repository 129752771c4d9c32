"""Expert-parallel dispatch and combine (libnccl_ep) for Python, with the interface of DeepEP V2's ElasticBuffer.

PyTorch is needed for GPUs, NumPy for the emulated fabric (nccl_ep.emu); importing this needs neither."""
from . import c_api
from .buffer import ElasticBuffer, EPBuffer, get_logical_domain_size, get_physical_domain_size
from .events import EventHandle, EventOverlap
from .handle import EPHandle
from .library import EpError, version

__all__ = ['ElasticBuffer', 'EPBuffer', 'EPHandle', 'EventHandle', 'EventOverlap', 'EpError', 'version', 'get_logical_domain_size',
           'get_physical_domain_size']
__version__ = '%d.%d.%d' % c_api.RELEASE


def __getattr__(name):
    if name == 'topk_idx_t':  # the type of topk_idx, DeepEP's name for it
        import torch
        return torch.int64
    raise AttributeError('module %r has no attribute %r' % (__name__, name))
