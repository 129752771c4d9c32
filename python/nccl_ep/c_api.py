"""The C interface in ctypes: enumerations, structs and prototypes of nccl_ep.h and nccl_ep_ext.h. Nothing is decided
here. A test compiles the headers and compares every offset with these."""
import ctypes as c

MAGIC = 0xC00FFFEE
TENSOR_MAGIC = 0xCAFECAFE
API_VERSION = 2
RELEASE = (0, 1, 0)  # of this package; the library's must agree in the first two

ALGO_LOW_LATENCY, ALGO_HIGH_THROUGHPUT = 0, 1
LAYOUT_EXPERT_MAJOR, LAYOUT_RANK_MAJOR, LAYOUT_FLAT = 1, 2, 3
FWD_PASS, BWD_PASS = 0, 1
DISP_QUANT_NONE, DISP_QUANT_FWD = 0, 1
SCALE_ROW_MAJOR, SCALE_COLUMN_MAJOR = 0, 1

RESULTS = {1: 'ncclUnhandledCudaError', 2: 'ncclSystemError', 3: 'ncclInternalError', 4: 'ncclInvalidArgument',
           5: 'ncclInvalidUsage', 6: 'ncclRemoteError', 7: 'ncclInProgress'}

# Element types by their common names: NCCL's value, bytes.
TYPES = {'int8': (0, 1), 'uint8': (1, 1), 'int32': (2, 4), 'uint32': (3, 4), 'int64': (4, 8), 'uint64': (5, 8),
         'float16': (6, 2), 'float32': (7, 4), 'float64': (8, 8), 'bfloat16': (9, 2), 'float8_e4m3fn': (10, 1),
         'float8_e5m2': (11, 1)}


class Struct(c.Structure):
    """A struct that starts with `size` and `magic`; the constructor fills both, as the _INIT macros do."""
    MAGIC = MAGIC

    def __init__(self, **fields):
        super().__init__(size=c.sizeof(type(self)), magic=self.MAGIC, **fields)


def struct(name, *fields, **attributes):
    """A Struct type. `fields`: pairs of name and type, in the header's order."""
    members = [('size', c.c_uint), ('magic', c.c_uint)] + list(fields)
    return type(name, (Struct,), dict(attributes, _fields_=members))


class Alloc(c.Structure):
    _fields_ = [('alloc_fn', c.c_void_p), ('free_fn', c.c_void_p), ('context', c.c_void_p)]


_u, _i, _p, _z = c.c_uint, c.c_int, c.c_void_p, c.c_size_t

Tensor = struct('ncclEpTensor_t', ('ndim', _u), ('datatype', _i), ('data', _p), ('win_hdl', _p),
                ('win_offset', c.c_uint64), ('sizes', c.POINTER(_z)), MAGIC=TENSOR_MAGIC)
_t = c.POINTER(Tensor)

GroupConfig = struct(
    'ncclEpGroupConfig_t', ('version', _u), ('algorithm', _i), ('num_experts', _u),
    ('max_dispatch_tokens_per_rank', _u), ('max_recv_tokens_per_rank', _u), ('max_token_bytes', _u),
    ('rdma_buffer_size', c.c_ulong), ('num_qp_per_rank', _u), ('num_channels', _u), ('max_num_sms', _u),
    ('alloc', Alloc), ('enable_mask', _u), ('timeout_ns', c.c_uint64), ('zero_copy', _i), ('overflow_policy', _i),
    ('num_topk', _u), ('padding_v2', c.c_ubyte * 4))
LayoutInfo = struct('ncclEpLayoutInfo_t', ('expert_counters', _t), ('src_rank_counters', _t), ('expert_offsets', _t),
                    ('recv_total_counter', _t), ('recv_topk_idx_kind', _i), ('padding_v2', c.c_ubyte * 4))
HandleConfig = struct('ncclEpHandleConfig_t', ('dispatch_output_per_expert_alignment', _z))
DispatchInputs = struct('ncclEpDispatchInputs_t', ('tokens', _t), ('topk_weights', _t), ('scales', _t))
DispatchOutputs = struct('ncclEpDispatchOutputs_t', ('tokens', _t), ('topk_weights', _t), ('scales', _t),
                         ('topk_idx', _t))
DispatchConfig = struct('ncclEpDispatchConfig_t', ('send_only', _u), ('round_scales', _u), ('pass_direction', _i),
                        ('quant_recipe', _i))
CombineInputs = struct('ncclEpCombineInputs_t', ('tokens', _t), ('topk_weights', _t), ('scales', _t))
CombineOutputs = struct('ncclEpCombineOutputs_t', ('tokens', _t), ('topk_weights', _t))
CombineConfig = struct('ncclEpCombineConfig_t', ('send_only', _u), ('pass_direction', _i), ('quant_recipe', _i))

BufferSizeConfig = struct(
    'ncclEpBufferSizeConfig_t', ('num_experts', _u), ('max_tokens', _u), ('hidden', _u), ('top_k', _u),
    ('datatype', _i), ('scale_bytes', _u), ('allow_hybrid', _i), ('multiple_reductions', _i),
    ('combine_datatype', _i), ('low_latency', _i), ('enable_mask', _i), ('in_flight', _u))
BufferSize = struct('ncclEpBufferSize_t', ('window_bytes', _z), ('count_bytes', _z), ('metadata_bytes', _z),
                    ('flag_bytes', _z), ('staging_bytes', _z), ('handle_bytes', _z), ('scratch_bytes', _z),
                    ('gin_contexts', _u), ('gin_signals', _u), ('queue_pairs', _u), ('all_window_bytes', _z))
GroupExtConfig = struct('ncclEpGroupExtConfig_t', ('single_reduction', _i), ('traffic_class', _u), ('max_in_flight', _u))
GroupProperties = struct(
    'ncclEpGroupProperties_t', ('ranks', _i), ('rank', _i), ('scale_up_ranks', _i), ('scale_up_rank', _i),
    ('scale_out_ranks', _i), ('scale_out_rank', _i), ('hybrid', _i), ('num_experts', _i), ('num_local_experts', _i),
    ('num_sms_update', _i), ('num_sms_dispatch', _i), ('num_sms_combine', _i), ('max_in_flight', _i),
    ('window_bytes', _z), ('scratch_bytes', _z), ('timeout_ns', c.c_ulonglong), ('backend', c.c_char * 16),
    ('gin_contexts', _u), ('gin_signals', _u), ('queue_pairs', _u), ('num_sms_dispatch_expert_major', _i),
    ('num_sms_combine_expert_major', _i), ('all_window_bytes', _z))
_events = (('start_event', _p), ('epilogue_event', _p), ('done_event', _p), ('communication_stream', _i))
DispatchExtConfig = struct('ncclEpDispatchExtConfig_t', ('scale_layout', _i), ('no_zero_pad', _i),
                           ('scale_column_stride', _z), ('num_sms', _u), *_events, ('num_qps', _u))
CombineExtConfig = struct('ncclEpCombineExtConfig_t', ('num_sms', _u), ('bias', _t * 2), *_events, ('num_qps', _u))
HostCounts = struct('ncclEpHostCounts_t', ('total', _u), ('total_padded', _u), ('per_source', c.POINTER(_u)),
                    ('per_expert', c.POINTER(_u)), ('per_expert_padded', c.POINTER(_u)))
DeviceCounts = struct('ncclEpDeviceCounts_t', ('per_source', _p), ('per_expert', _p), ('expert_start', _p))
HandleMetadata = struct(
    'ncclEpHandleMetadata_t', ('received', _u), ('source_rank', c.POINTER(_i)), ('source_token', c.POINTER(_i)),
    ('sent_slot', c.POINTER(c.c_longlong)), ('received_capacity', _z), ('sent_capacity', _z),
    ('received_slot', c.POINTER(c.c_longlong)))
ErrorInfo = struct('ncclEpErrorInfo_t', ('code', _i), ('rank', _i), ('peer', _i), ('expected', _u), ('seen', _u),
                   ('phase', c.c_char * 48), ('text', c.c_char * 256))
EmuOptions = struct('ncclEpEmuOptions_t', ('seed', c.c_ulonglong), ('num_sms', _u), ('bug', _u),
                    ('no_weak_memory', _u), ('no_bulk_copies', _u))
EmuReport = struct('ncclEpEmuReport_t', ('faults', _u), ('switches', c.c_ulonglong), ('clock_ns', c.c_ulonglong),
                   ('text', c.c_char * 4096), ('gin_puts', c.c_ulonglong), ('gin_put_bytes', c.c_ulonglong),
                   ('gin_contexts_used', c.c_ulonglong))

STRUCTS = (Tensor, GroupConfig, LayoutInfo, HandleConfig, DispatchInputs, DispatchOutputs, DispatchConfig,
           CombineInputs, CombineOutputs, CombineConfig, BufferSizeConfig, BufferSize, GroupProperties,
           GroupExtConfig, DispatchExtConfig, CombineExtConfig, HostCounts, DeviceCounts, HandleMetadata, ErrorInfo, EmuOptions, EmuReport)

_pp = c.POINTER(c.c_void_p)

# Arguments of the functions used, all of which return an ncclResult_t.
PROTOTYPES = {
    'ncclEpGetVersion': [c.POINTER(_i)],
    'ncclEpCreateGroupExt': [_pp, _p, c.POINTER(GroupConfig), c.POINTER(GroupExtConfig)],
    'ncclEpGroupDestroy': [_p],
    'ncclEpGetGroupProperties': [_p, c.POINTER(GroupProperties)],
    'ncclEpCalculateBufferSize': [_p, c.POINTER(BufferSizeConfig), c.POINTER(BufferSize)],
    'ncclEpHandleMemSize': [_p, _i, c.POINTER(HandleConfig), c.POINTER(_z), _i],
    'ncclEpInitHandle': [_pp, _p, _i, c.POINTER(HandleConfig), _i, _t],
    'ncclEpUpdateHandle': [_p, _t, c.POINTER(LayoutInfo), _p],
    'ncclEpHandleDestroy': [_p],
    'ncclEpDispatchExt': [_p, c.POINTER(DispatchInputs), c.POINTER(DispatchOutputs), c.POINTER(LayoutInfo),
                          c.POINTER(DispatchConfig), c.POINTER(DispatchExtConfig), _p],
    'ncclEpCombineExt': [_p, c.POINTER(CombineInputs), c.POINTER(CombineOutputs), c.POINTER(CombineConfig),
                         c.POINTER(CombineExtConfig), _p],
    'ncclEpComplete': [_p, _p, _p],
    'ncclEpGetHostCounts': [_p, c.POINTER(HostCounts)],
    'ncclEpGetDeviceCounts': [_p, c.POINTER(DeviceCounts)],
    'ncclEpGetHandleMetadata': [_p, c.POINTER(HandleMetadata)],
    'ncclEpGetAsyncError': [_p, c.POINTER(_i)],
    'ncclEpGetErrorInfo': [_p, c.POINTER(ErrorInfo)],
    'ncclEpErrorClear': [_p],
    'ncclEpEmuCommInitAll': [_pp, _i, _i, c.POINTER(EmuOptions)],
    'ncclEpEmuCommDestroy': [_p],
    'ncclEpEmuMalloc': [_p, _pp, _z, c.c_char_p],
    'ncclEpEmuFree': [_p, _p],
    'ncclEpEmuMemcpy': [_p, _p, _p, _z, _p],
    'ncclEpEmuStreamCreate': [_p, _pp],
    'ncclEpEmuStreamDestroy': [_p, _p],
    'ncclEpEmuStreamSynchronize': [_p, _p],
    'ncclEpEmuEventCreate': [_p, _pp],
    'ncclEpEmuEventDestroy': [_p, _p],
    'ncclEpEmuEventRecord': [_p, _p, _p],
    'ncclEpEmuStreamWaitEvent': [_p, _p, _p],
    'ncclEpEmuGetReport': [_p, c.POINTER(EmuReport)],
}


def declare(lib):
    """Gives every function of a loaded library its prototype. An AttributeError names one that is missing."""
    for name, arguments in PROTOTYPES.items():
        function = getattr(lib, name)
        function.argtypes = arguments
        function.restype = _i
    lib.ncclEpGetLastErrorString.argtypes = []
    lib.ncclEpGetLastErrorString.restype = c.c_char_p
