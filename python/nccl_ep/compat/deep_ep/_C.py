"""What DeepEP's helper modules take from its compiled part."""
import torch

from nccl_ep import EventHandle, core, nccl
from nccl_ep.buffer import BUFFER_ALIGNMENT, buffer_size_of

topk_idx_t = torch.int64

__all__ = ['EventHandle', 'topk_idx_t', 'get_local_nccl_unique_id', 'create_nccl_comm', 'destroy_nccl_comm',
           'get_physical_domain_size', 'get_logical_domain_size', 'get_elastic_buffer_alignment',
           'calculate_elastic_buffer_size']

get_local_nccl_unique_id = nccl.unique_id
create_nccl_comm = nccl.init_rank
destroy_nccl_comm = nccl.destroy


def get_physical_domain_size(comm):
    ranks = nccl.count(comm)
    domains = core.domains(comm, ranks)
    return domains, ranks // domains


def get_logical_domain_size(comm, allow_hybrid_mode):
    return get_physical_domain_size(comm)


def get_elastic_buffer_alignment():
    return BUFFER_ALIGNMENT


def calculate_elastic_buffer_size(comm, *settings):
    return buffer_size_of(comm, nccl.count(comm), *settings)
