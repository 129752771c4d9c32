"""ElasticBuffer under the name deep_ep, so that programs and tests written for DeepEP V2 run unchanged. Its helper
modules (deep_ep.utils) are its own: DEEPEP_SOURCE names a DeepEP source tree that has them."""
import os

from nccl_ep import (ElasticBuffer, EPBuffer, EPHandle, EventHandle, EventOverlap, get_logical_domain_size,
                     get_physical_domain_size)

from ._C import topk_idx_t

if os.environ.get('DEEPEP_SOURCE'):
    __path__.append(os.path.join(os.environ['DEEPEP_SOURCE'], 'deep_ep'))

__all__ = ['ElasticBuffer', 'EPBuffer', 'EPHandle', 'EventHandle', 'EventOverlap', 'get_logical_domain_size',
           'get_physical_domain_size', 'topk_idx_t']
