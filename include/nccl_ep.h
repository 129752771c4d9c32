/*
 * NCCL EP: expert-parallel dispatch and combine over an NCCL communicator. API version 2.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The R ranks of one communicator share E experts, E / R on each rank. A *group* (ncclEpGroup_t) holds what depends on
 * the communicator and on sizes alone. A *handle* (ncclEpHandle_t) holds the routing of one set of top-k decisions.
 * Dispatch takes every token to the ranks of its experts, combine brings the experts' rows back and sums them.
 *
 *     ncclEpCreateGroup -> ncclEpCreateHandle -> ncclEpDispatch -> (experts) -> ncclEpCombine -> ncclEpHandleDestroy
 *                          ncclEpUpdateHandle  gives a handle new routing
 *
 * Conventions of all calls
 *   Result     ncclSuccess, or the reason of the failure: ncclInvalidArgument for an argument that can never be right,
 *              ncclInvalidUsage for a call that is not possible now or not supported. ncclEpGetLastErrorString()
 *              (nccl_ep_ext.h) has one line that names argument, value and expectation. Output arguments (handles,
 *              pointers, sizes) are set on success only.
 *   Streams    Calls that take a stream queue their work on it and return. The host is never made to wait, except by
 *              group creation and destruction and by what a call's text says. Work of one handle on several streams is
 *              ordered by the caller.
 *   Collective calls (said in their text) are made by all ranks of the group, for one group in the same order on
 *              every rank. A group and NCCL collectives may share a communicator only on streams that the caller
 *              orders. A wait for a rank that does not call ends: on the device after the group's timeout_ns, which
 *              ncclEpGetAsyncError then reports; on the host with ncclSystemError or ncclInvalidUsage, in making a group
 *              after NCCL_EP_TIMEOUT_MS, 100 s where it is unset, in destroying one after its timeout_ns, in both not
 *              before 2 s and on the emulated fabric after 30 s at most.
 *              A call that one rank alone refuses has not been made there: make it, corrected, on that rank before any
 *              other of the group (but one whose text says "under way": an event for its end turned out to be none). Ranks that are an operation apart (one dispatches while another combines, or two
 *              handles in another order) are told so: ncclEpGetErrorInfo, code 8, names a rank that is elsewhere and what both are
 *              in. The outputs of that operation are undefined, and the group is lost. Not told are, in low latency, two handles
 *              dispatched in another order (all rows arrive, on the handle of each rank's own call), ranks of different scale-up
 *              domains in low latency, and any across domains with enable_mask. A rank that updates while another dispatches or
 *              combines, or sends a staged operation while another makes a whole one, waits for the timeout.
 *   Equal      What ranks must agree on is not all checked. In one collective call all ranks give
 *                update    a handle of the same layout and top-k; topk_idx's type and T may differ, and so may the
 *                          alignment, which each rank uses for its own output
 *                dispatch  handles updated by the same update; the same hidden, element type, pass_direction,
 *                          quant_recipe and bytes of a row of scales; the order of the output of scales, padding,
 *                          numbering of ids and rows of the output may differ
 *                combine   handles as in dispatch; the same hidden, element type and pass_direction
 *              Rows of different width, type, pass, top-k or layout on different ranks are found by dispatch and combine as said
 *              above: code 8. A different top-k or layout is found by a high-throughput update, too: code 5.
 *   Threads    Calls on different groups may run at the same time. Calls on one group, and on its handles, may come
 *              from any thread, one at a time, like calls on one NCCL communicator.
 *   Memory     Tensors are device memory, row-major and dense, owned by the caller, valid and (inputs) unmodified until
 *              the stream has passed the call. Descriptors, config structs and `sizes` arrays are read before the call
 *              returns.
 *   Windows    A window-backed tensor (data NULL, win_hdl and win_offset) lies in a window that ncclCommWindowRegister
 *              made on the group's communicator with NCCL_WIN_COLL_SYMMETRIC. Any tensor may; it is then used as an
 *              address. Into outputs.tokens of a flat dispatch (high throughput, one scale-up domain, at most 32
 *              ranks, SM90 and up) the peers store rows in place, without staging and copy, where zero_copy is ON, or AUTO
 *              and few SMs may be used (with all of them staging is as fast).
 *              That window stays registered, on every rank, until the streams of all ranks have passed the call. Ranks
 *              need not agree: each may give ordinary memory, another window, another offset. A call resolves its
 *              windows itself and remembers none, so a handle value that comes back for other memory is no danger, and
 *              capturing is as good as any time; a graph keeps the addresses it was captured with. Refused: a tensor
 *              that overruns its window, and a window of another communicator (NCCL 2.28 tells neither: there the
 *              first is the caller's to avoid, and the second is staged). A window more than 32 GiB away from the
 *              group's in NCCL's address space is staged, too.
 *   Staging    Dispatch and combine with send_only do their sending part alone, which moves this rank's rows to the peers;
 *              ncclEpComplete on the handle does the receiving part, which arranges or sums what arrives. In every
 *              algorithm, layout and pass. Between the two the caller's other work runs, and other operations of the group,
 *              staged or not; the outputs are undefined, inputs and biases stay as they are. A handle has one staged operation at
 *              a time: until it is completed, calls that would update the handle or move rows along it are refused.
 *              A group has at most max_in_flight (2 unless ncclEpCreateGroupExt or NCCL_EP_MAX_IN_FLIGHT says another number;
 *              ncclEpGetGroupProperties tells it); one more is refused. All ranks send and complete in the same order. Each that is in
 *              flight takes memory as large as the group's window, made by the first call that needs it: that call is
 *              host-blocking like the making of a group, and not possible while capturing. ncclEpPrepare (in_flight) makes it
 *              before; with enable_mask it is made with the group, as a rank may be missing later. ncclEpComplete's stream is the send's, or one that waits for it. A handle that is destroyed with a
 *              staged operation leaves its memory taken until the group is destroyed. A graph holds both parts of its
 *              staged operations, and is replayed while no other ones are in flight than were when it was captured.
 *   Graphs     ncclEpUpdateHandle, ncclEpDispatch, ncclEpCombine and ncclEpComplete can be captured, once the kernels
 *              they need are compiled (by an earlier call of the same shape, or ncclEpPrepare). The number of tokens is
 *              fixed by the capture; a row of -1 in topk_idx is an inactive token.
 */
#ifndef NCCL_EP_H_
#define NCCL_EP_H_

#include <stddef.h>
#include <stdint.h>

/* CUDA's and NCCL's own headers where both are there; else the few names of theirs that this interface uses, with the
 * same values. NCCL_EP_NO_CUDA_HEADERS asks for the latter. */
#if !defined(NCCL_H_) && !defined(NCCL_EP_NO_CUDA_HEADERS) && defined(__has_include)
#if __has_include(<cuda_runtime.h>) && __has_include(<nccl.h>)
#include <cuda_runtime.h>
#include <nccl.h>
#endif
#endif

#ifdef NCCL_H_
#if NCCL_VERSION_CODE < 22700
typedef struct ncclWindow_vidmem *ncclWindow_t; /* windows came with NCCL 2.27 */
#endif
#if NCCL_VERSION_CODE < 22400
#define ncclFloat8e4m3 ((ncclDataType_t)10)
#define ncclFloat8e5m2 ((ncclDataType_t)11)
#endif
#else
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef enum cudaError { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 } cudaError_t;
typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7
} ncclResult_t;
typedef enum {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11
} ncclDataType_t;
#endif

/* Two packed 4-bit floats in a byte: value 12, which NCCL keeps free for it. Dispatch moves such rows as bytes; NCCL's
 * own collectives do not know the type. */
#ifndef ncclFloat4x2
#define ncclFloat4x2 ((ncclDataType_t)12)
#endif

/* Version of this interface's release, and the code ncclEpGetVersion answers with. */
#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 1
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION_CODE (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)

/* ---- Structs that can grow ---------------------------------------------------------------------------------------
 *
 * Every struct that a caller passes by pointer starts with `size` (its sizeof where the caller was compiled) and
 * `magic`. A library reads the fields that lie wholly inside `size`, takes those beyond it as 0, and ignores a tail it
 * does not know. Sizes below the struct's first version are refused. Fields are only ever appended; the sizes of both
 * versions are stated (NCCL_EP_*_V1_SIZE, _V2_SIZE) and checked when this header is compiled.
 *
 * Fill a struct with its _INIT macro, which sets `size` and `magic` and zeroes the rest, and then set fields:
 *
 *     ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
 *     in.tokens = &tokens;
 *
 * The macros are expressions (compound literals in C, a function's value in C++): they also serve in assignments. */
#define NCCL_EP_API_VERSION 2
#define NCCL_EP_MAGIC 0xC00FFFEEu

#ifdef __cplusplus
/* C++ before 20 has neither compound literals nor designated initialisers. */
template <class T> static inline T ncclEpStructInit(unsigned int magic) {
  T t = T();
  t.size = (unsigned int)sizeof(T);
  t.magic = magic;
  return t;
}
template <class T> static inline T ncclEpStructInitVersion(unsigned int magic, unsigned int version) {
  T t = ncclEpStructInit<T>(magic);
  t.version = version;
  return t;
}
#define NCCL_EP_STRUCT_INIT(type_, magic_) (ncclEpStructInit<type_>(magic_))
#else
#define NCCL_EP_STRUCT_INIT(type_, magic_) ((type_){.size = (unsigned int)sizeof(type_), .magic = (magic_)})
#endif

/* First byte after a field, and whether the struct behind a pointer reaches that far. */
/* NOLINTBEGIN(bugprone-sizeof-expression): a field may be a pointer, and its own size is meant */
#define NCCL_EP_FIELD_END(type_, field_) ((unsigned int)(offsetof(type_, field_) + sizeof(((type_ *)0)->field_)))
/* NOLINTEND(bugprone-sizeof-expression) */
#define NCCL_EP_HAS_FIELD(ptr_, type_, field_) ((ptr_) != NULL && (ptr_)->size >= NCCL_EP_FIELD_END(type_, field_))

#if defined(__cplusplus)
#define NCCL_EP_STATIC_ASSERT(cond_, msg_) static_assert((cond_), msg_)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define NCCL_EP_STATIC_ASSERT(cond_, msg_) _Static_assert((cond_), msg_)
#else
#define NCCL_EP_STATIC_ASSERT(cond_, msg_) struct ncclEpStaticAssert
#endif

/* `size` and `magic` lead, and the struct is as large as its current version. */
#define NCCL_EP_STATIC_ASSERT_STRUCT_ABI_AT(type_, base_, version_)                                    \
  NCCL_EP_STATIC_ASSERT((version_) <= NCCL_EP_API_VERSION, #base_ ": newer than NCCL_EP_API_VERSION"); \
  NCCL_EP_STATIC_ASSERT(offsetof(type_, size) == 0, #type_ ": size must come first");                  \
  NCCL_EP_STATIC_ASSERT(offsetof(type_, magic) == 4, #type_ ": magic must come second");               \
  NCCL_EP_STATIC_ASSERT(sizeof(type_) == base_##_V##version_##_SIZE, #type_ ": size differs from its version")
#define NCCL_EP_STATIC_ASSERT_STRUCT_ABI_OF(type_, base_, version_) \
  NCCL_EP_STATIC_ASSERT_STRUCT_ABI_AT(type_, base_, version_)
#define NCCL_EP_STATIC_ASSERT_STRUCT_ABI(type_, base_) \
  NCCL_EP_STATIC_ASSERT_STRUCT_ABI_OF(type_, base_, base_##_CURRENT_VERSION)
/* A version's last field ends where that version did. */
#define NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(type_, base_, version_)                                         \
  NCCL_EP_STATIC_ASSERT((version_) <= base_##_CURRENT_VERSION, #type_ ": newer than its current version");        \
  NCCL_EP_STATIC_ASSERT(NCCL_EP_FIELD_END(type_, base_##_V##version_##_LAST_FIELD) == base_##_V##version_##_SIZE, \
                        #type_ ": a released version's fields moved")
#define NCCL_EP_STATIC_ASSERT_OFFSET(type_, field_, offset_) \
  NCCL_EP_STATIC_ASSERT(offsetof(type_, field_) == (offset_), #type_ ": " #field_ " moved")

/* ---- Enumerations -------------------------------------------------------------------------------------------------
 */

/* "You decide": the value that a zero-filled field has. */
#define NCCL_EP_AUTO 0

typedef enum {
  NCCL_EP_ALGO_LOW_LATENCY = 0,    /* small batches (decode); fixed places, no counts beforehand; forward */
  NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 /* training and prefill */
} ncclEpAlgorithm_t;

/* What happens when a rank must receive more rows than max_recv_tokens_per_rank. */
typedef enum {
  /* Rows that fit, in output order, arrive exactly; the others are dropped, combine leaves them out, and the number
   * needed is reported by counts and by ncclEpGetAsyncError. Unlike other implementations this one never traps. */
  NCCL_EP_OVERFLOW_AUTO = NCCL_EP_AUTO,
  /* As AUTO, and the group is lost on the ranks whose rows overflowed: each further call there is refused with
   * ncclRemoteError. The CUDA context lives. Low latency, whose places are fixed, does not read it */
  NCCL_EP_OVERFLOW_TRAP,
  NCCL_EP_OVERFLOW_DROP /* as AUTO */
} ncclEpOverflowPolicy_t;

/* Shape and order of a dispatch output. N: received rows, M: padded slots, H: hidden, K: top-k, L: local experts,
 * B: max_dispatch_tokens_per_rank. */
typedef enum {
  NCCL_EP_LAYOUT_UNSET = NCCL_EP_AUTO, /* refused: a layout must be named */
  /* High throughput: tokens [M, H], topk_weights [M]. One slot per valid (token, k), grouped by local expert; inside an
   * expert ordered by (source rank, source token, k). Every expert's zone starts at a multiple of the handle's
   * alignment; padding rows are zero; an expert without tokens takes no rows. The expert side applies the weights.
   * Low latency (3-D): tokens [L, R * B, H], in the order of high throughput from each expert's first place on; places
   * without a token stay as they are. Dispatch carries no weights: combine applies those it is given. */
  NCCL_EP_LAYOUT_EXPERT_MAJOR,
  /* Low latency only: tokens [R, B, H], topk_weights [R, B, K], topk_idx int32 [R, B, K]. Each token that chose at
   * least one local expert, once, by source rank, in the order of its tokens there; places behind the last token of a
   * rank have -1 in topk_idx and are untouched otherwise. The expert side applies the weights and sums, as in flat. */
  NCCL_EP_LAYOUT_RANK_MAJOR,
  /* High throughput only: tokens [N, H], topk_weights [N, K], topk_idx [N, K]. Each token that chose at least one local
   * expert, once, ordered by (source rank, source token). The expert side sums a row's local experts, weighted, before
   * combine. */
  NCCL_EP_LAYOUT_FLAT
} ncclEpLayout_t;

/* Direction of a pass. Forward dispatch carries routing weights; the backward pass of combine is a dispatch without
 * them along the same handle; the backward pass of dispatch is a combine that carries the gradients of the weights too.
 */
typedef enum {
  NCCL_EP_FWD_PASS = 0, /* dispatch takes topk_weights, combine tokens only */
  NCCL_EP_BWD_PASS = 1  /* dispatch takes tokens only, combine topk_weights too. High throughput */
} ncclEpPassDir_t;

/* Whether rows of dispatch may go straight into window-backed outputs of the peers (see "Windows" above). */
typedef enum {
  NCCL_EP_ZERO_COPY_AUTO =
      NCCL_EP_AUTO,      /* into those that can be written so, where it pays: with few SMs; else staged */
  NCCL_EP_ZERO_COPY_OFF, /* staging */
  NCCL_EP_ZERO_COPY_ON   /* a dispatch whose outputs.tokens cannot be written so is refused (with more than one rank).
                          Combine is as ever. Not supported yet across scale-up domains; low latency does not read it */
} ncclEpZeroCopyMode_t;

/* Numbering of the expert ids that dispatch writes to its topk_idx output; -1 always means "not on this rank". */
typedef enum {
  NCCL_EP_EXPERT_ID_AUTO = NCCL_EP_AUTO, /* LOCAL, today */
  NCCL_EP_EXPERT_ID_LOCAL = 1,           /* [0, L) */
  NCCL_EP_EXPERT_ID_GLOBAL = 2           /* [rank * L, (rank + 1) * L) */
} ncclEpExpertIdKind_t;

/* Low-precision recipes of dispatch. */
typedef enum {
  NCCL_EP_DISP_QUANT_NONE = 0, /* rows travel as they are, no scales */
  NCCL_EP_DISP_QUANT_FWD = 1,  /* the caller's rows of scales travel beside the token rows, both bit for bit */
  NCCL_EP_DISP_QUANT_DS_FP8E3M4 =
      2 /* BF16 in, E4M3 and an FP32 scale for each 128 elements out; low latency. See ncclEpDispatch */
} ncclEpDispQuant_t;

/* Low-precision recipes of combine. */
typedef enum {
  NCCL_EP_COMB_QUANT_NONE = 0, /* rows travel as they are */
  NCCL_EP_COMB_QUANT_NVFP4 = 1 /* BF16 expert outputs travel as NVFP4; low latency. See ncclEpCombine */
} ncclEpCombQuant_t;

/* ---- Tensors --------------------------------------------------------------------------------------------------------
 */

#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu

/* A dense row-major tensor. The descriptor is the caller's, on its stack or from ncclEpTensorAlloc, and owns nothing;
 * the memory it points to and the `sizes` array are the caller's too.
 *
 *     size_t dims[2] = {tokens, hidden};
 *     ncclEpTensor_t t = NCCL_EP_TENSOR_INIT;
 *     t.ndim = 2; t.datatype = ncclBfloat16; t.data = pointer; t.sizes = dims;
 */
typedef struct ncclEpTensor {
  unsigned int size;       /* set by NCCL_EP_TENSOR_INIT */
  unsigned int magic;      /* set by NCCL_EP_TENSOR_INIT; 0: refused as uninitialised */
  unsigned int ndim;       /* number of dimensions */
  ncclDataType_t datatype; /* of an element */
  void *data;              /* device address; NULL for a window-backed tensor, or when there are no elements */
  ncclWindow_t win_hdl;    /* registered window that holds the tensor, or NULL */
  uint64_t win_offset;     /* bytes from the window's start */
  size_t *sizes;           /* [ndim] elements in each dimension, outermost first */
} ncclEpTensor_t;

/* For a brace initialiser with further fields: `ncclEpTensor_t t = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, ...};` (C
 * and C++20) */
#define NCCL_EP_TENSOR_INIT_INLINE .size = (unsigned int)sizeof(ncclEpTensor_t), .magic = NCCL_EP_TENSOR_MAGIC
#define NCCL_EP_TENSOR_INIT NCCL_EP_STRUCT_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)
#define NCCL_EP_TENSOR_SIZE ((unsigned int)sizeof(ncclEpTensor_t))
#define NCCL_EP_TENSOR_V1_LAST_FIELD sizes
#define NCCL_EP_TENSOR_V1_SIZE 48u
#define NCCL_EP_TENSOR_CURRENT_VERSION 1
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpTensor_t, NCCL_EP_TENSOR);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpTensor_t, NCCL_EP_TENSOR, 1);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpTensor_t, ndim, 8);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpTensor_t, datatype, 12);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpTensor_t, data, 16);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpTensor_t, win_hdl, 24);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpTensor_t, win_offset, 32);

typedef struct {
  unsigned int size;
  unsigned int magic;
} ncclEpTensorAllocConfig_t; /* no options yet */
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_SIZE ((unsigned int)sizeof(ncclEpTensorAllocConfig_t))
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE 8u
#define NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION 1
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpTensorAllocConfig_t, NCCL_EP_TENSOR_ALLOC_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpTensorAllocConfig_t, NCCL_EP_TENSOR_ALLOC_CONFIG, 1);

/* ---- Group configuration --------------------------------------------------------------------------------------------
 */

/* The caller's device allocator. `context` is handed through. Both functions or neither; NULL: the CUDA runtime's. The
 * group's window does not come from it: symmetric memory is NCCL's to allocate. */
typedef cudaError_t (*ncclEpAllocFn_t)(void **ptr, size_t size, void *context);
typedef cudaError_t (*ncclEpFreeFn_t)(void *ptr, void *context);
typedef struct {
  ncclEpAllocFn_t alloc_fn; /* device memory of `size` bytes, 256-byte aligned, into *ptr; NULL: CUDA's */
  ncclEpFreeFn_t free_fn;   /* releases what alloc_fn gave; given with it or not at all */
  void *context;            /* handed to both as it is */
} ncclEpAllocConfig_t;
NCCL_EP_STATIC_ASSERT(sizeof(ncclEpAllocConfig_t) == 24, "ncclEpAllocConfig_t: size");

typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int version;        /* NCCL_EP_API_VERSION of the caller */
  ncclEpAlgorithm_t algorithm; /* zero is NCCL_EP_ALGO_LOW_LATENCY, as in the original interface */
  unsigned int num_experts;    /* E: a multiple of the number of ranks, at most 2048 */
  /* B > 0: tokens a rank dispatches at most. B times top-k is at most 1048576. */
  unsigned int max_dispatch_tokens_per_rank;
  /* Budget: rows of a rank's dispatch output (padded slots in expert-major), at least B. NCCL_EP_AUTO: eager mode, the
   * caller sizes its outputs to the counts of each routing. Low latency has fixed places and does not use it. */
  unsigned int max_recv_tokens_per_rank;
  /* Widest row of dispatch or combine, bytes: a multiple of 16, at most 65536. A dispatched row counts with its scales,
   * which are rounded up to 16. */
  unsigned int max_token_bytes;
  unsigned long int rdma_buffer_size; /* ignored: the window's size follows from the fields above */
  /* Several scale-up domains: queue pairs to each rank of the rail (GIN contexts), equal on all ranks, at most one a channel;
   * NCCL_EP_AUTO: what the links want. Environment: NCCL_EP_NUM_QPS. ncclEpGetGroupProperties tells what became of it. */
  unsigned int num_qp_per_rank;
  unsigned int num_channels; /* ignored: see max_num_sms */
  /* Thread blocks (SMs) of a kernel at most; NCCL_EP_AUTO: in high throughput the fewest that reach 95 % of the best bandwidth,
   * by the rates of the links and the layout, where those rates are known; else the whole GPU. NCCL_EP_SMS_FEW and
   * NCCL_EP_SMS_ALL of nccl_ep_ext.h are about half of that bandwidth, and all SMs. Environment: NCCL_EP_NUM_SMS. With more than
   * one rank dispatch and combine have at least two blocks, a sender and a receiver, and with several scale-up domains
   * a few more; they also work one after the other. */
  unsigned int max_num_sms;
  ncclEpAllocConfig_t alloc;              /* for the group's and the handles' device memory */
  unsigned int enable_mask;               /* nonzero: a rank that does not answer is masked and left out, see "Masks" */
  uint64_t timeout_ns;                    /* of a wait inside a kernel; 0: 100 s. Environment: NCCL_EP_TIMEOUT_MS */
  ncclEpZeroCopyMode_t zero_copy;         /* (version 2) dispatch straight into window-backed outputs */
  ncclEpOverflowPolicy_t overflow_policy; /* (version 2) what becomes of rows beyond the budget */
  unsigned int num_topk;                  /* (version 2) largest K of any handle; 0: 32, or what B allows */
  unsigned char padding_v2[4];
} ncclEpGroupConfig_t;
#ifdef __cplusplus
#define NCCL_EP_GROUP_CONFIG_INIT (ncclEpStructInitVersion<ncclEpGroupConfig_t>(NCCL_EP_MAGIC, NCCL_EP_API_VERSION))
#else
#define NCCL_EP_GROUP_CONFIG_INIT \
  ((ncclEpGroupConfig_t){         \
      .size = (unsigned int)sizeof(ncclEpGroupConfig_t), .magic = NCCL_EP_MAGIC, .version = NCCL_EP_API_VERSION})
#endif
#define NCCL_EP_GROUP_CONFIG_SIZE ((unsigned int)sizeof(ncclEpGroupConfig_t))
#define NCCL_EP_GROUP_CONFIG_V1_LAST_FIELD timeout_ns
#define NCCL_EP_GROUP_CONFIG_V1_SIZE 96u
#define NCCL_EP_GROUP_CONFIG_V2_LAST_FIELD padding_v2
#define NCCL_EP_GROUP_CONFIG_V2_SIZE 112u
#define NCCL_EP_GROUP_CONFIG_CURRENT_VERSION 2
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG, 2);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, version, 8);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, algorithm, 12);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, num_experts, 16);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank, 20);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, max_recv_tokens_per_rank, 24);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, max_token_bytes, 28);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, rdma_buffer_size, 32);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, num_qp_per_rank, 40);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, num_channels, 44);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, max_num_sms, 48);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, alloc, 56);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, enable_mask, 80);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, timeout_ns, 88);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, zero_copy, 96);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, overflow_policy, 100);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpGroupConfig_t, num_topk, 104);

typedef struct ncclEpGroup *ncclEpGroup_t;
typedef struct ncclEpHandle *ncclEpHandle_t;

/* ---- Handle-time structs --------------------------------------------------------------------------------------------
 */

/* Counters and numbering. Tensors are optional (NULL), 1-D, int32 or int64 each, filled on the call's stream.
 * High throughput: given to ncclEpCreateHandle or ncclEpUpdateHandle they are filled with the routing's counts; of those
 * given to ncclEpDispatch only recv_topk_idx_kind is read. Low latency: given to ncclEpDispatch (not earlier) they are
 * filled with what it delivers: expert_counters unpadded slots, recv_total_counter rows (rank-major) or slots. */
typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpTensor_t *expert_counters;         /* [L] flat, rank-major: choices (token, k) of each local expert;
                                              expert-major: slots (padded, in high throughput, and cut where they
                                              would pass max_recv_tokens_per_rank) */
  ncclEpTensor_t *src_rank_counters;       /* [R] low latency: tokens from each rank */
  ncclEpTensor_t *expert_offsets;          /* [L] high throughput, expert-major: first slot of each local expert,
                                              at most max_recv_tokens_per_rank */
  ncclEpTensor_t *recv_total_counter;      /* [1] flat, rank-major: received rows; expert-major: slots in all; what did
                                              not fit is counted */
  ncclEpExpertIdKind_t recv_topk_idx_kind; /* (version 2) numbering of dispatch's topk_idx output */
  unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;
#define NCCL_EP_LAYOUT_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)
#define NCCL_EP_LAYOUT_INFO_SIZE ((unsigned int)sizeof(ncclEpLayoutInfo_t))
#define NCCL_EP_LAYOUT_INFO_V1_LAST_FIELD recv_total_counter
#define NCCL_EP_LAYOUT_INFO_V1_SIZE 40u
#define NCCL_EP_LAYOUT_INFO_V2_LAST_FIELD padding_v2
#define NCCL_EP_LAYOUT_INFO_V2_SIZE 48u
#define NCCL_EP_LAYOUT_INFO_CURRENT_VERSION 2
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO, 2);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpLayoutInfo_t, expert_counters, 8);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpLayoutInfo_t, src_rank_counters, 16);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpLayoutInfo_t, expert_offsets, 24);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpLayoutInfo_t, recv_total_counter, 32);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpLayoutInfo_t, recv_topk_idx_kind, 40);

typedef struct {
  unsigned int size;
  unsigned int magic;
  size_t dispatch_output_per_expert_alignment; /* expert-major: rows that an expert's zone is aligned to, any number up
                                                  to 1048576; 0 and 1: none */
} ncclEpHandleConfig_t;
#define NCCL_EP_HANDLE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpHandleConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_HANDLE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpHandleConfig_t))
#define NCCL_EP_HANDLE_CONFIG_V1_LAST_FIELD dispatch_output_per_expert_alignment
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE 16u
#define NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION 1
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG, 1);

/* ---- Dispatch and combine structs
 * ------------------------------------------------------------------------------------ */

typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpTensor_t *tokens;       /* required: [T, H]; data NULL when T is 0 */
  ncclEpTensor_t *topk_weights; /* [T, K] FP32: required forward, forbidden backward; 3-D: not read */
  ncclEpTensor_t *scales;       /* [T, S]: required by NCCL_EP_DISP_QUANT_FWD, forbidden else; see ncclEpDispatch */
} ncclEpDispatchInputs_t;
#define NCCL_EP_DISPATCH_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_INPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchInputs_t))
#define NCCL_EP_DISPATCH_INPUTS_V1_LAST_FIELD scales
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE 32u
#define NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION 1
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpDispatchInputs_t, NCCL_EP_DISPATCH_INPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpDispatchInputs_t, NCCL_EP_DISPATCH_INPUTS, 1);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpDispatchInputs_t, tokens, 8);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpDispatchInputs_t, topk_weights, 16);

typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpTensor_t *tokens;       /* required, the input's type: [rows, H], see ncclEpDispatch for the number of rows;
                                   low latency: all places, [R, B, H] or [L, R * B, H] */
  ncclEpTensor_t *topk_weights; /* FP32, required forward: flat [rows, K], expert-major [rows], rank-major [R, B, K];
                                   forbidden backward and in 3-D */
  ncclEpTensor_t *scales;       /* [rows, S], the input's type: with inputs.scales; low latency: all places, S wide;
                                   columns: ncclEpDispatchExt */
  ncclEpTensor_t *topk_idx;     /* required forward: flat [rows, K] int64, rank-major [R, B, K] int32; forbidden else */
} ncclEpDispatchOutputs_t;
#define NCCL_EP_DISPATCH_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchOutputs_t))
#define NCCL_EP_DISPATCH_OUTPUTS_V1_LAST_FIELD topk_idx
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE 40u
#define NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION 1
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpDispatchOutputs_t, NCCL_EP_DISPATCH_OUTPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpDispatchOutputs_t, NCCL_EP_DISPATCH_OUTPUTS, 1);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpDispatchOutputs_t, tokens, 8);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpDispatchOutputs_t, topk_weights, 16);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpDispatchOutputs_t, scales, 24);

typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int send_only;    /* nonzero: only the sending part, ncclEpComplete does the rest: see "Staging" above */
  unsigned int round_scales; /* scales are powers of two: NCCL_EP_DISP_QUANT_DS_FP8E3M4; else must be 0 */
  ncclEpPassDir_t pass_direction; /* forward unless set */
  ncclEpDispQuant_t quant_recipe; /* (version 2) whether scales travel too */
} ncclEpDispatchConfig_t;
#define NCCL_EP_DISPATCH_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_CONFIG_SIZE ((unsigned int)sizeof(ncclEpDispatchConfig_t))
#define NCCL_EP_DISPATCH_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE 20u
#define NCCL_EP_DISPATCH_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_DISPATCH_CONFIG_V2_SIZE 24u
#define NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION 2
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG, 2);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpDispatchConfig_t, send_only, 8);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpDispatchConfig_t, round_scales, 12);

typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpTensor_t *tokens;       /* required, shaped as dispatch's output: the experts' outputs where it had put
                                   their inputs */
  ncclEpTensor_t *topk_weights; /* backward only: flat [rows, K], expert-major [rows], FP32 */
  ncclEpTensor_t *scales;       /* (version 2) FP32, of rows: required by NCCL_EP_COMB_QUANT_NVFP4, forbidden else; see
                                   ncclEpCombine */
} ncclEpCombineInputs_t;
#define NCCL_EP_COMBINE_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_INPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineInputs_t))
#define NCCL_EP_COMBINE_INPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_INPUTS_V2_LAST_FIELD scales
#define NCCL_EP_COMBINE_INPUTS_V2_SIZE 32u
#define NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION 2
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS, 2);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpCombineInputs_t, tokens, 8);

typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpTensor_t *tokens;       /* required: [T, H], the input's type */
  ncclEpTensor_t *topk_weights; /* [T, K] FP32. Backward: receives each weight's gradient, 0 where the index was -1.
                                   Low latency, 3-D: required, and an INPUT: the weights that combine applies, as in
                                   the original interface. Else not read and left alone */
} ncclEpCombineOutputs_t;
#define NCCL_EP_COMBINE_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineOutputs_t))
#define NCCL_EP_COMBINE_OUTPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION 1
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCombineOutputs_t, NCCL_EP_COMBINE_OUTPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCombineOutputs_t, NCCL_EP_COMBINE_OUTPUTS, 1);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpCombineOutputs_t, tokens, 8);

typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int send_only;         /* as in ncclEpDispatchConfig_t */
  ncclEpPassDir_t pass_direction; /* forward unless set */
  ncclEpCombQuant_t quant_recipe; /* (version 2) how expert outputs travel */
} ncclEpCombineConfig_t;
#define NCCL_EP_COMBINE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCombineConfig_t))
#define NCCL_EP_COMBINE_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE 16u
#define NCCL_EP_COMBINE_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_COMBINE_CONFIG_V2_SIZE 20u
#define NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION 2
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG, 2);
NCCL_EP_STATIC_ASSERT_OFFSET(ncclEpCombineConfig_t, send_only, 8);

typedef struct ncclEpCompleteConfig {
  unsigned int size;
  unsigned int magic;
} ncclEpCompleteConfig_t; /* no options yet */
#define NCCL_EP_COMPLETE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMPLETE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCompleteConfig_t))
#define NCCL_EP_COMPLETE_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE 8u
#define NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION 1
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCompleteConfig_t, NCCL_EP_COMPLETE_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCompleteConfig_t, NCCL_EP_COMPLETE_CONFIG, 1);

/* ---- Functions
 * ------------------------------------------------------------------------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

/* ncclEpGetVersion: the library's release, as NCCL_EP_VERSION_CODE.
 *   version  out, not NULL
 * Local; any thread. ncclInvalidArgument: version is NULL. */
ncclResult_t ncclEpGetVersion(int *version);

/* ncclEpTensorAlloc: a descriptor on the heap with its own copy of `sizes`. It allocates no tensor memory: the caller
 * sets `data`, or `win_hdl` and `win_offset`.
 *   tensor    out, released by ncclEpTensorDestroy
 *   ndim      1 to 8
 *   datatype  element type
 *   sizes     [ndim] extents, copied
 *   config    NULL or NCCL_EP_TENSOR_ALLOC_CONFIG_INIT
 * Local; any thread. */
ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned int ndim, ncclDataType_t datatype, const size_t *sizes,
                               const ncclEpTensorAllocConfig_t *config);

/* ncclEpTensorDestroy: releases a descriptor from ncclEpTensorAlloc, not the memory it points to. NULL is accepted.
 * ncclInvalidArgument: a descriptor that ncclEpTensorAlloc did not make (a copy is none), or that is destroyed. */
ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor);

/* ncclEpCreateGroup: a group over all ranks of a communicator.
 *   ep_group  out
 *   comm      NCCL's communicator, not NULL (PyTorch's is NULL until its first collective unless the process group was
 *             made with a device id), or one of the emulated fabric. It must outlive the group.
 *   config    not NULL; equal on all ranks except for max_num_sms, timeout_ns and alloc. Ranks compare it, and name the
 *             first field that differs with both values.
 * Collective; blocks the host. Reads the NCCL_EP_* environment. Allocates one symmetric window (its size:
 * ncclEpCalculateBufferSize), registers it, and allocates scratch by `alloc`. Not allowed while the
 * device's stream is being captured. ncclInvalidUsage also answers for several scale-up domains without GIN, and
 * other things not supported yet. A rank that refuses its own arguments, or never calls, is waited for: see "Collective" above. When that wait
 * ends, this process keeps the group's memory, because NCCL's exchange still runs on the device. */
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group, ncclComm_t comm, const ncclEpGroupConfig_t *config);

/* ncclEpGroupDestroy: releases a group's window, scratch and kernels.
 * Collective, because ranks store into each other's windows: it waits until all ranks have called it, or the
 * communicator has an error or is aborted (with a rank that is gone, abort the communicator first), or the group's
 * timeout_ns has passed, 2 s at least; operations that were left unfinished or failed make it no longer. With enable_mask
 * masked ranks are not waited for, so their processes must have ended, or their work on the group (see "Masks"). The caller
 * has synchronised its streams with the group's work. Handles of the group become invalid (further calls on them answer
 * ncclInvalidArgument) and their device memory is released; the handles themselves are released by ncclEpHandleDestroy, before or
 * after. NULL is accepted. */
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group);

/* ncclEpHandleMemSize: bytes of device memory that a handle's routing record takes.
 *   layout    high throughput: NCCL_EP_LAYOUT_FLAT or NCCL_EP_LAYOUT_EXPERT_MAJOR; low latency:
 *             NCCL_EP_LAYOUT_RANK_MAJOR or NCCL_EP_LAYOUT_EXPERT_MAJOR
 *   config    NULL: defaults; low latency takes no alignment
 *   size_out  out
 *   num_topk  K, 1 to the group's num_topk, or -1: for any of them
 * Local. */
ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config,
                                 size_t *size_out, int num_topk);

/* ncclEpInitHandle: a handle without routing, to be followed by ncclEpUpdateHandle.
 *   handle      out
 *   layout      of this handle's dispatch outputs, as for ncclEpHandleMemSize
 *   config      NULL: defaults
 *   num_topk    K of the routings, 1 to 32 and at most the group's num_topk, or -1: known at the first update
 *   handle_mem  NULL: the group's allocator. Else the caller's memory: 1-D ncclUint8, at least ncclEpHandleMemSize
 *               bytes, 256-byte aligned, which must outlive the handle and stays the caller's.
 * Local. With handle_mem it allocates nothing on the device and may be called while capturing; without it not. Memory
 * that already holds a routing record of this group's shape (written through another handle, moved or copied by the
 * caller) can be used by dispatch and combine without an update: give the K that wrote it; with -1 the first call reads
 * it back, which synchronises that call's stream and is refused while capturing. */
ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t *config, int num_topk, const ncclEpTensor_t *handle_mem);

/* ncclEpUpdateHandle: gives a handle the routing of a batch.
 *   topk_idx     [T, K] int64 or int32 global expert ids; -1: no selection. T is at most max_dispatch_tokens_per_rank,
 *                may differ from rank to rank and may be 0 (data may then be NULL). An id outside [0, E) counts as -1
 *                and is reported by ncclEpGetAsyncError. The same id twice in a row is two selections. May be
 *                overwritten once the stream has passed this call.
 *   layout_info  NULL, or counters to fill on the stream (high throughput)
 * Collective (local in low latency, where dispatch exchanges the routing), asynchronous, capturable. Compiles at first
 * use of a shape. */
ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream);

/* ncclEpCreateHandle: ncclEpInitHandle with memory of the group's allocator and K of topk_idx, then ncclEpUpdateHandle.
 *   handle       out
 *   layout       of this handle's dispatch outputs, as for ncclEpHandleMemSize
 *   topk_idx     as for ncclEpUpdateHandle
 *   layout_info  as for ncclEpUpdateHandle
 *   config       NULL: defaults
 * Collective (local in low latency). Not allowed while `stream` is being captured. */
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                const ncclEpTensor_t *topk_idx, const ncclEpLayoutInfo_t *layout_info,
                                const ncclEpHandleConfig_t *config, cudaStream_t stream);

/* ncclEpHandleDestroy: releases a handle and the device memory it owns. Local. The caller has synchronised the streams
 * that work on the handle, or its allocator is stream-safe. Allowed after the group is gone. NULL is accepted. */
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

/* ncclEpDispatch: takes every token to the ranks of its experts.
 *   inputs       tokens [T, H], T as in the update; any element type, moved bit for bit; H * element bytes is a
 *                multiple of 16 and at most max_token_bytes; 16-byte aligned. topk_weights [T, K] in the forward pass.
 *   outputs      tokens [rows, H] and, forward, topk_weights and (flat) topk_idx with as many rows. With a budget, rows
 *                is at least the budget (max_recv_tokens_per_rank). Eager: rows is at least what the routing needs
 *                (recv_total_counter, or ncclEpGetHostCounts); where the host knows the counts already fewer rows are
 *                refused, naming the number needed, else the rows that fit arrive and ncclEpGetAsyncError says so.
 *                Flat: token rows past the received ones stay untouched; with a budget, topk_idx and topk_weights past
 *                them are set to -1 and 0.
 *   layout_info  NULL, or recv_topk_idx_kind; in low latency counters too
 *   config       NULL: forward, no recipe
 * Collective, asynchronous, capturable. Any number of times per update. Bytes and order of the outputs depend on the
 * inputs only.
 *
 * Low precision (config.quant_recipe NCCL_EP_DISP_QUANT_FWD, all layouts, both passes of high throughput): inputs.scales
 * [T, S] and outputs.scales [rows, S] (low latency: [R, B, S] or [L, R * B, S]) are both required. A token's row of scales goes wherever its row goes, bit for
 * bit: FP32 per 128 elements, UE8M0 as bytes or four to an int32, one per 32 or 16 elements, whatever it means. Types:
 * FP32, FP16, BF16, FP8 (both), uint8, int32 and uint32. A row of scales has a multiple of 4 bytes (fill up to it with
 * bytes of your own), the same on all ranks, and starts 4-byte aligned; with the row of tokens, and rounded up to 16,
 * it fits max_token_bytes. Flat: rows past the received ones stay untouched. Expert-major: padding rows are zero.
 *
 * NCCL_EP_DISP_QUANT_DS_FP8E3M4 (low latency) makes the scales: inputs.tokens are BF16, H a multiple of 128, inputs.scales
 * is NULL, outputs.tokens are E4M3 and outputs.scales FP32 [..., H / 128]. Of a block of 128 elements, amax (at least
 * 1e-4) gives the scale amax * (1 / 448) in FP32, and an element x becomes x * (448 / amax), rounded to nearest even. With
 * config.round_scales the scale is the power of two that is not below it, and x is multiplied by its inverse.
 *
 * In low latency (forward pass) the outputs have fixed places and are 3-D:
 *   rank-major        tokens [R, B, H], topk_weights [R, B, K], topk_idx [R, B, K] int32: region s holds the tokens of
 *                     rank s that selected a local expert, packed at its front in source order, with the source's K
 *                     weights and local ids (-1 elsewhere); unused rows of topk_idx are -1, those of the others untouched
 *   3-D expert-major  tokens [L, R * B, H], no weights, no indices: region e holds the slots of local expert e, packed at
 *                     its front in (source rank, source token, k) order. Slots beyond R * B, which repeated ids alone can
 *                     cause, are dropped and reported
 * Rank-major requires inputs.topk_weights, outputs.topk_weights and outputs.topk_idx. 3-D expert-major refuses the two
 * outputs; inputs.topk_weights may be given there and is not read. The exchange of the routing is part of dispatch, so
 * ncclEpUpdateHandle is local and quick. */
ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                            const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                            const ncclEpDispatchConfig_t *config, cudaStream_t stream);

/* ncclEpCombine: sums the experts' rows of every token, back at the token's rank.
 *   inputs   tokens [rows, H] (low latency: [R, B, H] or [L, R * B, H]) BF16, FP16 or FP32, rows as in dispatch;
 *            backward also topk_weights
 *   outputs  tokens [T, H] of the same type; backward also topk_weights [T, K]
 *   config   NULL: forward, no recipe
 * y[t] is the sum over the slots that token t has, in FP32 and in a fixed order: the slots of one rank in ascending k,
 * rounded to the token type, then the ranks' sums in the order of the highest k that chose each (also where that row was
 * dropped for a budget), rounded once. Weights are applied by the expert side, but for low latency's 3-D layout, where
 * combine applies them. A token without selection gets zeros. Collective, asynchronous, capturable, any number of times
 * per update.
 *
 * In low latency (forward pass) it follows a dispatch on the same routing; inputs are shaped as that dispatch's outputs.
 * 3-D expert-major takes the weights: outputs.topk_weights [T, K], which is required and read, never written.
 * Rank-major leaves it alone, as there the expert side has applied the weights. A slot enters its rank's sum by fused
 * multiply-add with its weight; else sums, their order and their rounding are as above.
 *
 * NCCL_EP_COMB_QUANT_NVFP4 (low latency, one scale-up domain): inputs.tokens are BF16, H a multiple of 16, and
 * inputs.scales FP32 [R, B, 1] or [L, R * B, 1]: of each row that is there 2688 / amax, 0 of a row of zeros. What a rank
 * returns of a token, the row or in 3-D the weighted sum in FP32, is quantised instead of rounded: E2M1 elements, an E4M3
 * scale for each 16 and one in FP32 for the row travel, 4.5 bits an element. A rank's own share goes the same way, so that
 * sums do not depend on where experts are. On any GPU, the same bytes everywhere: to nearest even, every product and
 * quotient rounded to FP32. A row has r = 1 / scale, the scale taken as 2^117 where it is larger; a sum has the sum of
 * |weight| * r over its slots in ascending k, at least 2^-117 where it is above 0. 16 elements have s = amax * ((1 / r) * (1 / 6)) in
 * E4M3, at most 448. An element x becomes q = x * ((1 / r) / s) in E2M1, at most 6, or 0 where s is 0, and q enters the
 * token's sum by fused multiply-add with s * r; the sum is rounded once. A scale of 0 counts as r = 0: such a row, or a sum of such slots alone,
 * is zeros, and a slot with it beside others adds nothing to the sum of |weight| * r (its elements are added, so they should be zeros).
 * With a larger scale than 2688 / amax what is past 2688 / scale becomes that, with a smaller one small elements lose bits.
 * Nothing is hidden: 16 elements with a NaN or an infinity among them arrive as NaN, and so does a row whose scale is NaN
 * or negative. */
ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                           const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                           cudaStream_t stream);

/* ncclEpComplete: the receiving part of the handle's staged (send_only) operation: see "Staging" above. With nothing staged it
 * succeeds and does nothing.
 *   config  NULL, or without options
 *   stream  the sending part's, or one that waits for it
 * Collective, asynchronous, capturable. */
ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config, cudaStream_t stream);

/* ---- Masks ----------------------------------------------------------------------------------------------------------
 *
 * In a group with enable_mask a rank whose part of an operation has not come within timeout_ns is masked by the rank that waits, and the
 * operation ends without it: after about the timeout, at most one and a half of it. What then holds:
 *   its rows   an update counts none from it, nor does low latency's dispatch. High throughput: along a record that has rows of it, dispatch
 *              leaves their places empty (index -1, weight 0, zeros); a row that came before is whole. Low latency: all or none of them
 *              are there; where some had come, 3-D expert-major counts them and has zeros
 *   its sums   are left out of combine's; weights that would come from it are 0
 *   reports    ncclEpGetAsyncError gives 1, ncclEpGetErrorInfo the rank, phase, peer, generation expected and seen. The group goes on
 *   later      calls wait for it no more
 *   staged     masks are the group's, whichever operation found out: a sending part sends nothing to a rank that is masked, and a completion
 *              waits for none of its rows. A rank that has sent and does not complete is missed when it is next waited for
 * A mask is each rank's own, and ranks find out at different times: in the operation in which a rank falls out, one may have its rows
 * and another may not; each row, and each rank's part of a token's sum, is there in whole or not at all, and every output is what one
 * set of ranks that answered gives. Who masks a rank tells it: one that was only late finds out at its first wait, masks in turn who
 * has masked it (code 6 of ncclEpGetErrorInfo), and returns. A rank that waits for another shows that it lives, so that who waits for it
 * does not take it for dead. A timeout must be longer than ranks are apart in healthy use.
 *
 * Across scale-up domains (rank o * U + u in domain o) what rank (o, u) sends to another domain p goes by (p, u), and its tokens' sums return by
 * it. So with (p, u) masked, domain p is out of reach for the ranks of index u in all other domains:
 *   update     decisions for a masked rank, and of (o, u) for domain p, are as -1: no row, no place in a sum, output and sums as if they had not
 *              been chosen. So is an update in which the rank falls out, but for the places that the sources' records keep
 *   dispatch   along a record that has such rows, their places stay empty
 *   combine    along such a record, the masked rank's part is left out, and for (o, u) all of domain p. In high throughput a domain's sum keeps its
 *              place: that of the highest k in the record
 *   who knows  a rank waits for those of its domain and those of its index alone, and finds out about them. About others it is told by
 *              the rank of their index in its domain: with their missing decisions or rows, in the next update at the latest
 *   metadata   sent_slot is -1 also for ranks of (p, u)'s index as seen from domain p: it was (p, u) who told those places
 *   low latency  whose updates are local: what is said of an update holds for its dispatch, and what is said of the next update for the next
 *              dispatch. Of the rows of a source all are there or none, on each rank; along a record that has rows of (o, u) in domain p combine leaves
 *              them out there. A rank that the token's rank knows to be masked gives a domain's sum no place, whichever the record: sums are as if it had
 *              not been chosen
 * All ranks that go on must give ncclEpMaskUpdate the same masks. ncclEpMaskClean admits a rank through those that it reaches, in two rounds:
 * with ranks missing it takes up to two and a half timeouts.
 *
 * A masked rank takes part again after ncclEpMaskClean, and then every handle must be updated again on all ranks before it is
 * dispatched or combined along: such a call along an older record moves nothing and is reported (code 7).
 *
 * A masked rank that lives may still load from windows, store into them and send to them. So a group may be destroyed while a rank is masked only
 * where that rank's process has ended, or its streams have come to the end of its work on the group and it issues no more. Otherwise it meets memory
 * that was given back, or has become something else: NCCL promises nothing of accesses after a window was deregistered.
 * ncclEpMaskClean, which lets it in again, makes the destruction wait for it.
 *
 * Outputs of such groups are always staged (zero_copy ON is refused), and combine sends rows of long tokens in one piece. */

/* ncclEpMaskQuery: which ranks take part (1) or are masked (0), in stream order.
 *   mask_status  out, device memory, [R]
 * Local, asynchronous, capturable. ncclInvalidUsage: the group has no masks. */
ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int *mask_status, cudaStream_t stream);
/* ncclEpMaskUpdate: masks ranks, as a timeout would, in stream order; they are told.
 *   mask  host memory, [R], read before the call returns: 0 masks a rank, 1 leaves it as it is (ncclEpMaskClean alone brings a rank
 *         back: it has missed operations). This rank's own must be 1
 * Local, asynchronous, capturable; sensible where all ranks that go on do the same. Reports nothing. ncclInvalidUsage: the group
 * has no masks. */
ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int *mask, cudaStream_t stream);
/* ncclEpMaskClean: re-admits ranks: all that call it together (each after its earlier operations, on its stream) take part again, and
 * their counters agree, however they were masked and wherever they had stopped. A rank that does not call within timeout_ns stays
 * masked, or is masked now. Waits on the host until the stream has come that far. Does not clear the asynchronous error.
 * Collective among those that call; not while capturing. Handles have to be updated afterwards, see above. ncclInvalidUsage: the group
 * has no masks, or a staged operation of it is in flight here (complete it before, which takes a timeout at most). What staged operations
 * of destroyed handles kept is free again. */
ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream);

/* ncclEpGetAsyncError: whether a kernel of the group has reported something.
 *   error_out  out: 0 nothing; 1 a wait timed out or was aborted, ranks disagree, an expert id was out of range, or
 *              rows were dropped.
 * Which of these: ncclEpGetErrorInfo (nccl_ep_ext.h). Local; reads host memory, synchronises nothing. */
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int *error_out);

/* ncclEpErrorClear: makes ncclEpGetAsyncError answer 0 until the next report. After a bad id or dropped rows the group
 * is as good as before, and so it is after a timeout in a group with masks. After an abort, or a timeout without masks, it is not: ranks may disagree about how many operations they have
 * finished, so collective calls on it stay refused, and the group is to be destroyed and made anew on all ranks. Local.
 */
ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group);

#ifdef __cplusplus
}
#endif

#endif
