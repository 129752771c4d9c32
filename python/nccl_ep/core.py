"""Groups and handles of the C interface as objects. Tensors are given as `Array` descriptions, so this file knows
neither NumPy nor PyTorch; who made the memory keeps it alive until the stream has passed the call."""
import ctypes
from collections import namedtuple

from . import c_api
from .library import call

# Memory as the C interface sees it: address, element type by name, extents.
Array = namedtuple('Array', 'address dtype shape')


class Unique:
    """What stands for memory, streams or the library's objects of one rank."""

    def __reduce__(self):
        raise TypeError('%s cannot be copied or pickled: it stands for what one rank has' % type(self).__name__)


class Descriptor:
    """An ncclEpTensor_t and the extents it points to; `pointer` is None for an absent tensor."""

    def __init__(self, array):
        self.pointer = None
        if array is None:
            return
        if array.dtype not in c_api.TYPES:
            raise TypeError('element type %s is not one of %s' % (array.dtype, ', '.join(sorted(c_api.TYPES))))
        self._sizes = (ctypes.c_size_t * max(1, len(array.shape)))(*array.shape)
        self._tensor = c_api.Tensor(ndim=len(array.shape), datatype=c_api.TYPES[array.dtype][0],
                                    data=array.address or None, sizes=self._sizes)
        self.pointer = ctypes.pointer(self._tensor)


def _filled(struct, **arrays):
    """A struct of tensor pointers, with what it points to kept alive on it."""
    descriptors = {name: Descriptor(array) for name, array in arrays.items()}
    filled = struct()
    for name, descriptor in descriptors.items():
        if descriptor.pointer is not None:
            setattr(filled, name, descriptor.pointer)
    filled.descriptors = descriptors
    return filled


class Group(Unique):
    """An ncclEpGroup_t in high throughput, eager (outputs are sized by the caller). Making one is collective."""

    def __init__(self, comm, num_experts, max_tokens, max_token_bytes, num_topk, timeout_ns, multiple_reductions=True):
        config = c_api.GroupConfig(
            version=c_api.API_VERSION, algorithm=c_api.ALGO_HIGH_THROUGHPUT, num_experts=num_experts,
            max_dispatch_tokens_per_rank=max_tokens, max_token_bytes=max_token_bytes, num_topk=num_topk,
            timeout_ns=timeout_ns)
        pointer = ctypes.c_void_p()
        call('ncclEpCreateGroupExt', pointer, comm, config,
             c_api.GroupExtConfig(single_reduction=not multiple_reductions))
        self.pointer, self.max_token_bytes = pointer, max_token_bytes
        self.queue_pairs = self.properties().gin_contexts  # to each rank of the rail; 0 in one scale-up domain

    def properties(self):
        properties = c_api.GroupProperties()
        call('ncclEpGetGroupProperties', self.pointer, properties)
        return properties

    def handle_bytes(self, layout, topk):
        size = ctypes.c_size_t()
        call('ncclEpHandleMemSize', self.pointer, layout, None, size, topk)
        return size.value

    def check(self):
        """Raises what a kernel of the group has reported, if anything."""
        reported = ctypes.c_int()
        call('ncclEpGetAsyncError', self.pointer, reported)
        if reported.value:
            info = c_api.ErrorInfo()
            call('ncclEpGetErrorInfo', self.pointer, info)
            call('ncclEpErrorClear', self.pointer)
            raise RuntimeError('rank %d: %s' % (info.rank, info.text.decode(errors='replace')))

    def destroy(self):
        """Collective. The caller has synchronised its streams."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            call('ncclEpGroupDestroy', pointer)


Counts = namedtuple('Counts', 'per_source per_expert total_padded')
Metadata = namedtuple('Metadata', 'source_rank source_token received_slot')


class Handle(Unique):
    """An ncclEpHandle_t over the caller's memory: the routing of one batch."""

    def __init__(self, group, layout, alignment, topk, memory):
        self.group = group
        self.layout = layout
        self.topk = topk
        self.tokens = 0
        config = c_api.HandleConfig(dispatch_output_per_expert_alignment=alignment)
        pointer = ctypes.c_void_p()
        call('ncclEpInitHandle', pointer, group.pointer, layout, config, topk, Descriptor(memory).pointer)
        self.pointer = pointer

    def live(self):
        """Its pointer."""
        if self.pointer is None:
            raise RuntimeError('the handle was destroyed with its buffer')
        return self.pointer

    def update(self, topk_idx, stream):
        call('ncclEpUpdateHandle', self.live(), Descriptor(topk_idx).pointer, None, stream)
        self.tokens = topk_idx.shape[0]

    def dispatch(self, inputs, outputs, backward, columns, zero_pad, num_sms, num_qps, send_only, stream):
        """`inputs`, `outputs`: dicts of Arrays by the C structs' field names. `columns`: scales column-major."""
        config = c_api.DispatchConfig(
            send_only=send_only, pass_direction=c_api.BWD_PASS if backward else c_api.FWD_PASS,
            quant_recipe=c_api.DISP_QUANT_FWD if inputs.get('scales') else c_api.DISP_QUANT_NONE)
        ext = c_api.DispatchExtConfig(
            scale_layout=c_api.SCALE_COLUMN_MAJOR if columns else c_api.SCALE_ROW_MAJOR, no_zero_pad=not zero_pad,
            num_sms=num_sms, num_qps=min(num_qps, self.group.queue_pairs))
        call('ncclEpDispatchExt', self.live(), _filled(c_api.DispatchInputs, **inputs),
             _filled(c_api.DispatchOutputs, **outputs), None, config, ext, stream)

    def combine(self, inputs, outputs, backward, bias, num_sms, num_qps, send_only, stream):
        """`bias`: up to two Arrays."""
        config = c_api.CombineConfig(send_only=send_only,
                                     pass_direction=c_api.BWD_PASS if backward else c_api.FWD_PASS)
        ext = c_api.CombineExtConfig(num_sms=num_sms, num_qps=min(num_qps, self.group.queue_pairs))
        descriptors = [Descriptor(array) for array in bias]
        for i, descriptor in enumerate(descriptors):
            ext.bias[i] = descriptor.pointer
        call('ncclEpCombineExt', self.live(), _filled(c_api.CombineInputs, **inputs),
             _filled(c_api.CombineOutputs, **outputs), config, ext, stream)

    def complete(self, stream):
        """The receiving part of what was sent only."""
        call('ncclEpComplete', self.live(), None, stream)

    def counts(self):
        """Waits on the host until the last update has run; exact counts of this rank, as lists."""
        self.live()
        properties = self.group.properties()
        source = (ctypes.c_uint * properties.ranks)()
        expert = (ctypes.c_uint * properties.num_local_experts)()
        counts = c_api.HostCounts(per_source=source, per_expert=expert)
        call('ncclEpGetHostCounts', self.live(), counts)
        return Counts(list(source), list(expert), counts.total_padded)

    def device_counts(self):
        """Addresses of the counts in the handle's memory: by source, by expert unpadded, first slots."""
        counts = c_api.DeviceCounts()
        call('ncclEpGetDeviceCounts', self.live(), counts)
        return counts

    def metadata(self, received):
        """Waits for the last update; source rank, token and slots of the `received` rows, as ctypes arrays."""
        rank, token = (ctypes.c_int * max(1, received))(), (ctypes.c_int * max(1, received))()
        slot = (ctypes.c_longlong * max(1, received * self.topk))()
        metadata = c_api.HandleMetadata(source_rank=rank, source_token=token, received_slot=slot,
                                        received_capacity=received)
        call('ncclEpGetHandleMetadata', self.live(), metadata)
        return Metadata(rank, token, slot)

    def sent_slots(self):
        """Waits for the last update; for each of this rank's choices, its row at the owner's rank, or -1."""
        entries = self.tokens * self.topk
        slot = (ctypes.c_longlong * max(1, entries))()
        call('ncclEpGetHandleMetadata', self.live(), c_api.HandleMetadata(sent_slot=slot, sent_capacity=entries))
        return slot

    def destroy(self):
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            call('ncclEpHandleDestroy', pointer)


def buffer_size(comm, num_experts, max_tokens, hidden, topk, datatype, scale_bytes, combine_datatype, hybrid,
                multiple_reductions):
    """An ncclEpBufferSize_t: what such a group takes. Local."""
    config = c_api.BufferSizeConfig(
        num_experts=num_experts, max_tokens=max_tokens, hidden=hidden, top_k=topk,
        datatype=c_api.TYPES[datatype][0], scale_bytes=scale_bytes, allow_hybrid=hybrid,
        multiple_reductions=multiple_reductions, combine_datatype=c_api.TYPES[combine_datatype][0])
    sizes = c_api.BufferSize()
    call('ncclEpCalculateBufferSize', comm, config, sizes)
    return sizes


def domains(comm, ranks):
    """Scale-up domains of a communicator, before there is a group. A rank has a queue pair for each
    context and each of the other domains."""
    sizes = buffer_size(comm, ranks, 1, 16, 1, 'uint8', 0, 'uint8', True, True)
    return 1 + (sizes.queue_pairs // sizes.gin_contexts if sizes.gin_contexts else 0)
