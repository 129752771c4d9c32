/*
 * What libnccl_ep adds to the NCCL EP interface (nccl_ep.h): sizes ahead of time, groups with more options and their
 * properties, updates that borrow, dispatch with scales in columns, combine with biases or without partial sums, streams and
 * events, exact counts on the host and the device, the routing record's metadata, profiling, compiling ahead, the last error
 * of a thread, and communicators of the emulated fabric, on which every ncclEp* call runs without a GPU.
 *
 * Nothing here appends a field to a struct of nccl_ep.h. Every struct here starts with `size` and `magic` and is filled
 * by its _INIT macro, as there. The conventions of all calls that nccl_ep.h opens with (results, streams, threads, memory) hold here
 * too.
 */
#ifndef NCCL_EP_EXT_H_
#define NCCL_EP_EXT_H_

#include "nccl_ep.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

/* ncclEpGetLastErrorString: the line that explains the last error an ncclEp* call of this thread returned: names the
 * argument, its value and what was expected. Empty string when no call has failed. Valid until the thread's next ncclEp*
 * call. Never NULL. What kernels report is told by ncclEpGetErrorInfo. Local; any thread. */
const char *ncclEpGetLastErrorString(void);

/* What a kernel of the group reported. Read from host-visible memory; synchronises nothing. */
typedef struct {
  unsigned int size;
  unsigned int magic;
  int code;              /* 0 none, 1 a wait timed out, 2 aborted, 3 a topk_idx was out of range, 4 overflow,
                          * 5 ranks updated with different top-k or layout; with enable_mask 1 says that the peer is masked,
                          * 6 that the peer has masked this rank, 7 that a handle was not updated since ncclEpMaskClean,
                          * 8 the peer is in another operation than this rank (expected, seen: its number, the same on both) */
  int rank;              /* this rank */
  int peer;              /* rank waited for, or that the code speaks of; -1 where there is none: codes 3, 4, 7 */
  unsigned int expected; /* generation or count expected; rows needed for code 4 */
  unsigned int seen;     /* generation or count seen; for code 4 the rows there were room for, 0 in eager groups;
                          * for code 3 the low 32 bits of the id (`text` has all) */
  char phase[48];        /* for example "dispatch: rows"; "none: nothing was waited for" */
  char text[256];        /* one line for people */
} ncclEpErrorInfo_t;
#define NCCL_EP_ERROR_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpErrorInfo_t, NCCL_EP_MAGIC)
/* ncclEpGetErrorInfo: which report it is that ncclEpGetAsyncError tells of: rank, peer and phase of a wait that ended, the id out of
 * range, the rows needed.
 *   info  in and out: filled by its _INIT macro; code 0 when nothing was reported
 * Local; reads host memory, synchronises nothing. */
ncclResult_t ncclEpGetErrorInfo(ncclEpGroup_t group, ncclEpErrorInfo_t *info);

/* ---- Sizes ------------------------------------------------------------------------------------------------------- */

typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int num_experts;        /* E, a multiple of the communicator's ranks */
  unsigned int max_tokens;         /* B, tokens a rank dispatches at most */
  unsigned int hidden;             /* elements of a token row */
  unsigned int top_k;              /* K */
  ncclDataType_t datatype;         /* of dispatched rows */
  unsigned int scale_bytes;        /* bytes of a dispatched row's scales, a multiple of 4; 0 for none */
  int allow_hybrid;                /* ignored: a communicator of several scale-up domains is sized for them */
  int multiple_reductions;         /* 1 (default); 0: for a group of single_reduction (ncclEpCreateGroupExt) */
  ncclDataType_t combine_datatype; /* of expert outputs where that is wider than `datatype`; else leave it 0 */
  int low_latency;                 /* 1: of a group of NCCL_EP_ALGO_LOW_LATENCY; 0: of high throughput */
  int enable_mask;                 /* of the group */
  unsigned int
      in_flight; /* staged operations that all_window_bytes counts, at most 8; with enable_mask: max_in_flight of the group */
} ncclEpBufferSizeConfig_t;
#ifdef __cplusplus
}
static inline ncclEpBufferSizeConfig_t ncclEpBufferSizeConfigInit() {
  ncclEpBufferSizeConfig_t c = NCCL_EP_STRUCT_INIT(ncclEpBufferSizeConfig_t, NCCL_EP_MAGIC);
  c.multiple_reductions = 1;
  return c;
}
extern "C" {
#define NCCL_EP_BUFFER_SIZE_CONFIG_INIT (ncclEpBufferSizeConfigInit())
#else
#define NCCL_EP_BUFFER_SIZE_CONFIG_INIT \
  ((ncclEpBufferSizeConfig_t){          \
      .size = (unsigned int)sizeof(ncclEpBufferSizeConfig_t), .magic = NCCL_EP_MAGIC, .multiple_reductions = 1})
#endif

typedef struct {
  unsigned int size;
  unsigned int magic;
  size_t window_bytes;   /* the symmetric window of a group: the sum of the parts below, each rounded up to 256 */
  size_t count_bytes;    /* counts and replies */
  size_t metadata_bytes; /* rows of the routing exchange */
  size_t flag_bytes;     /* arrival flags and credits */
  size_t staging_bytes;  /* rows on their way */
  size_t handle_bytes;   /* routing record of one handle (not in the window) */
  size_t scratch_bytes;  /* of a group (not in the window) */
  /* Several scale-up domains, else 0: what a group asks of NCCL's network for each rank. Queue pairs: one a context and
   * peer, and the peers are the ranks of the same index in the other domains. A group counts by the slowest rank's links and
   * its num_qp_per_rank, ncclEpCalculateBufferSize by this rank's links and NCCL_EP_NUM_QPS. */
  unsigned int gin_contexts, gin_signals, queue_pairs;
  size_t
      all_window_bytes; /* that window, with masks their words behind it, and one as large for each staged operation in flight */
} ncclEpBufferSize_t;
#define NCCL_EP_BUFFER_SIZE_INIT NCCL_EP_STRUCT_INIT(ncclEpBufferSize_t, NCCL_EP_MAGIC)

/* ncclEpCalculateBufferSize: window bytes that a group of this communicator needs, before any is created, and the parts
 * they are made of. A group's window is sized by max_token_bytes and num_topk of its configuration. Here
 * max_token_bytes is the wider of a dispatched row with its scales (rounded up to 16) and a row of expert outputs: FP8
 * with scales and BF16 outputs, for example, is datatype ncclFloat8e4m3, scale_bytes 224 and combine_datatype
 * ncclBfloat16.
 *   comm    NCCL's communicator or one of the emulated fabric; only its ranks and links are looked at
 *   config  not NULL
 *   sizes   in and out: filled by its _INIT macro
 * Local; allocates nothing that stays. ncclInvalidArgument names a limit that is exceeded. */
ncclResult_t ncclEpCalculateBufferSize(ncclComm_t comm, const ncclEpBufferSizeConfig_t *config,
                                       ncclEpBufferSize_t *sizes);

/* ---- Groups, with options ---------------------------------------------------------------------------------------- */

typedef struct {
  unsigned int size;
  unsigned int magic;
  /* How combine sums, the same on all ranks. 0: the slots of a token on one rank are summed there and rounded to the tokens' type, in
   * several scale-up domains the ranks of a domain then are, and one row travels for each. 1: nothing is summed on the way:
   * every slot travels, and all slots of a token enter one FP32 sum in ascending k, rounded once at the end. A flat row is one
   * slot, at the highest k that its rank has of the token; so within one domain flat handles give the same result either way.
   * More bytes over the link, and a window with room for K rows a token instead of one (num_topk of the group: worth setting).
   * ncclInvalidUsage: 1 in low latency. */
  int single_reduction;
  /* Several scale-up domains: the traffic class of this group's connections over the network, as NCCL's trafficClass, plus 1; 0: that
   * of the communicator. Without effect within one domain. ncclInvalidUsage before NCCL 2.30. */
  unsigned int traffic_class;
  /* Staged operations that may be in flight, 1 to 8, the same on all ranks; 0: 2. Environment: NCCL_EP_MAX_IN_FLIGHT, where 0 is none.
   * Each takes memory as large as the window, when it is first needed; with enable_mask, when the group is made. */
  unsigned int max_in_flight;
} ncclEpGroupExtConfig_t;
#define NCCL_EP_GROUP_EXT_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpGroupExtConfig_t, NCCL_EP_MAGIC)
/* ncclEpCreateGroupExt: ncclEpCreateGroup, with options.
 *   ep_group    out, as for ncclEpCreateGroup
 *   comm        as for ncclEpCreateGroup
 *   config      as for ncclEpCreateGroup
 *   ext_config  NULL: as ncclEpCreateGroup
 * Collective. ncclInvalidArgument names an option that differs between ranks. */
ncclResult_t ncclEpCreateGroupExt(ncclEpGroup_t *ep_group, ncclComm_t comm, const ncclEpGroupConfig_t *config,
                                  const ncclEpGroupExtConfig_t *ext_config);

/* ---- SMs -------------------------------------------------------------------------------------------------------- */

/* For max_num_sms of a group and num_sms of a call. FEW leaves most SMs to computation: in high throughput, within one scale-up
 * domain, as many as about half of the best bandwidth takes. ALL: the whole GPU (a call: of what its group may use). In low latency, and
 * across domains, both are all. */
#define NCCL_EP_SMS_FEW 0xfffffffeu
#define NCCL_EP_SMS_ALL 0xffffffffu

/* ---- Group properties -------------------------------------------------------------------------------------------- */

typedef struct {
  unsigned int size;
  unsigned int magic;
  int ranks, rank;                     /* of the communicator */
  int scale_up_ranks, scale_up_rank;   /* of this rank's scale-up domain, which loads and stores reach */
  int scale_out_ranks, scale_out_rank; /* domains, and which of them is this rank's */
  int hybrid;                          /* 0: plain */
  int num_experts, num_local_experts;  /* E in all, L = E / R here */
  int num_sms_update, num_sms_dispatch, num_sms_combine; /* chosen, after max_num_sms */
  int max_in_flight;                                     /* staged operations that may be open at once */
  size_t window_bytes, scratch_bytes;                    /* as in ncclEpBufferSize_t */
  unsigned long long timeout_ns;                         /* of a wait in a kernel, after the environment */
  char backend[16];                                      /* "cuda" or "emu" */
  unsigned int gin_contexts, gin_signals, queue_pairs;   /* as in ncclEpBufferSize_t */
  int num_sms_dispatch_expert_major,
      num_sms_combine_expert_major; /* those above are the flat layout's; low latency: the same */
  size_t all_window_bytes;          /* of all windows that the group has made so far: see ncclEpBufferSize_t */
} ncclEpGroupProperties_t;
#define NCCL_EP_GROUP_PROPERTIES_INIT NCCL_EP_STRUCT_INIT(ncclEpGroupProperties_t, NCCL_EP_MAGIC)
/* ncclEpGetGroupProperties: what a group is and what was chosen for it. The SM counts are those of the largest batch
 * and row.
 *   properties  in and out: filled by its _INIT macro
 * Local. */
ncclResult_t ncclEpGetGroupProperties(ncclEpGroup_t group, ncclEpGroupProperties_t *properties);

/* ---- Update, with options ------------------------------------------------------------------------------------------
 */

typedef struct {
  unsigned int size;
  unsigned int magic;
  /* 1: topk_idx stays as it is, where it is, until the first dispatch on this routing has run (for a captured dispatch:
   * in each replay). The update then launches nothing where it can, and that dispatch reads topk_idx in place: one
   * launch less. 0: as ncclEpUpdateHandle, topk_idx may be overwritten once the stream has passed the update. */
  int borrow_topk_idx;
  /* 1: layout_info.expert_counters (in low latency: those of the dispatches on this routing) are added to instead of being set, the
   * experts' (token, k) without padding: statistics over many batches that the caller alone resets. Per batch,
   * ncclEpGetDeviceCounts has the exact counts. 0: they are set. */
  int cumulative_counters;
} ncclEpUpdateExtConfig_t;
#define NCCL_EP_UPDATE_EXT_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpUpdateExtConfig_t, NCCL_EP_MAGIC)
/* ncclEpUpdateHandleExt: ncclEpUpdateHandle, with options.
 *   topk_idx     as for ncclEpUpdateHandle
 *   layout_info  as for ncclEpUpdateHandle
 *   config       NULL: as ncclEpUpdateHandle
 * A borrowed topk_idx changes no output. The update is part of the first ncclEpDispatch on the handle, and the routing
 * record (handle_mem) holds this routing once that has run. Another call that needs the routing, if it comes first,
 * launches the update before itself. Until then the counters of layout_info and the host counts of this routing are not
 * there.
 * In high throughput the update is an exchange between ranks, which then takes place inside that dispatch: borrow_topk_idx
 * and the order of calls are the same on all ranks; layout_info's counters stay valid as long as topk_idx. Groups of several
 * scale-up domains take the option and update at once. In low latency options may differ from rank to rank. */
ncclResult_t ncclEpUpdateHandleExt(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                   const ncclEpLayoutInfo_t *layout_info, const ncclEpUpdateExtConfig_t *config,
                                   cudaStream_t stream);

/* ---- Dispatch, with options ----------------------------------------------------------------------------------------
 */

/* Order of dispatch's output of scales. Matrix units that load tiles by TMA want a tile's scales of one column
 * together: columns whose distance is a multiple of 16 bytes, without a transposing copy. */
typedef enum {
  NCCL_EP_SCALE_ROW_MAJOR = 0,   /* [rows, S], dense */
  NCCL_EP_SCALE_COLUMN_MAJOR = 1 /* columns of 4 bytes (one FP32, or four UE8M0): see scale_column_stride */
} ncclEpScaleLayout_t;

typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpScaleLayout_t scale_layout; /* of outputs.scales */
  /* Expert-major: nonzero leaves padding rows (tokens, weights, scales) as they are instead of zero-filling them. Flat
   * has none. */
  int no_zero_pad;
  /* Columns only: bytes from one column to the next, a multiple of 16 and at least 4 * rows; 0: 4 * rows rounded up to
   * 16. Column c of row r is the 4 bytes at outputs.scales' address + c * stride + 4 * r: bytes 4 * c to 4 * c + 3 of
   * the row. The address is a multiple of 16. The descriptor keeps the extents [rows, S] and the type that the
   * row-major order has; the memory behind it holds S * element bytes / 4 columns. Bytes between a column's rows and
   * the next column stay untouched. */
  size_t scale_column_stride;
  unsigned int num_sms; /* thread blocks (SMs) of this call at most; 0: as the group's max_num_sms says */
  /* See "Streams and events" below. */
  cudaEvent_t start_event;    /* NULL, or: the call's work starts after it */
  cudaEvent_t epilogue_event; /* NULL, or: the receiving part starts after it; not with send_only */
  cudaEvent_t done_event;     /* NULL, or: recorded behind the call's work */
  int communication_stream;   /* 1: the work goes to the group's own stream instead of `stream` */
  /* Queue pairs to each rank of the rail that this call's rows go by, the same on all ranks, at most the group's gin_contexts; 0: the
   * group's, and with enable_mask fewer are not supported yet. In one scale-up domain there are none, and it is ignored. */
  unsigned int num_qps;
} ncclEpDispatchExtConfig_t;
#define NCCL_EP_DISPATCH_EXT_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchExtConfig_t, NCCL_EP_MAGIC)
/* ncclEpDispatchExt: ncclEpDispatch, with options.
 *   inputs       as for ncclEpDispatch
 *   outputs      as for ncclEpDispatch
 *   layout_info  as for ncclEpDispatch
 *   config       as for ncclEpDispatch
 *   ext_config   NULL: as ncclEpDispatch
 * Collective, asynchronous, capturable. Options but num_qps may differ from rank to rank. Low latency has no options: it refuses all but the defaults. */
ncclResult_t ncclEpDispatchExt(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                               const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                               const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext_config,
                               cudaStream_t stream);

/* ---- Combine, with options ----------------------------------------------------------------------------------------- */

typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int num_sms; /* thread blocks (SMs) of this call at most; 0: as the group's max_num_sms says */
  /* Rows that are added to the sums: each NULL, or [T, H] of the tokens' type, 16-byte aligned. The sum of a token starts
   * with bias[0] + bias[1] in FP32; a token without selection gets their sum, rounded once. */
  const ncclEpTensor_t *bias[2];
  /* See "Streams and events" below. */
  cudaEvent_t start_event;    /* NULL, or: the call's work starts after it */
  cudaEvent_t epilogue_event; /* NULL, or: the receiving part starts after it; not with send_only */
  cudaEvent_t done_event;     /* NULL, or: recorded behind the call's work */
  int communication_stream;   /* 1: the work goes to the group's own stream instead of `stream` */
  /* Queue pairs to each rank of the rail that this call's rows go by, the same on all ranks, at most the group's gin_contexts; 0: the
   * group's. In one scale-up domain there are none, and it is ignored. */
  unsigned int num_qps;
} ncclEpCombineExtConfig_t;
#define NCCL_EP_COMBINE_EXT_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineExtConfig_t, NCCL_EP_MAGIC)
/* ncclEpCombineExt: ncclEpCombine, with options.
 *   inputs      as for ncclEpCombine
 *   outputs     as for ncclEpCombine
 *   config      as for ncclEpCombine
 *   ext_config  NULL: as ncclEpCombine
 * Collective, asynchronous, capturable. Options but num_qps may differ from rank to rank.
 * Low latency has no options: it refuses all but the defaults. */
ncclResult_t ncclEpCombineExt(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                              const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                              const ncclEpCombineExtConfig_t *ext_config, cudaStream_t stream);

/* ---- Streams and events --------------------------------------------------------------------------------------------
 *
 * Every dispatch and combine has a sending part, which moves this rank's rows to the peers, and a receiving part (its
 * epilogue), which arranges or sums what arrives. With send_only the call does the first alone, and ncclEpComplete the
 * second: see "Staging" in nccl_ep.h.
 *
 * Events are the caller's, made with timing or without. Those to wait for are looked at when the call is made, as
 * cudaStreamWaitEvent does: one that was never recorded is no wait, and it may be recorded anew or destroyed once the call has
 * returned.
 *   start_event     what the call's work waits for: beside what `stream` holds, or, on the communication stream, instead of it
 *   epilogue_event  what the receiving part waits for, so that the sending part may run before (for example) the last reader of
 *                   the outputs has finished. The call is then two launches
 *   done_event      recorded behind the call's work: with send_only behind the sending part
 *
 * The communication stream belongs to the group (ncclEpGetCommunicationStream). A call that asks for it leaves `stream` free:
 * the work waits for start_event, or without one for all that `stream` holds at the call, and nothing in `stream` waits for the
 * work but what the caller makes wait for done_event, which is therefore required unless send_only. From the moment that it is
 * made (ncclEpGetCommunicationStream, or the first call that asks for it) the group's calls that queue work run in the order in
 * which they are made, whatever their streams, and updates that borrow topk_idx have their place in it; their order after calls made before that, and while capturing, is the caller's.
 *
 * Lifetime. "Passed": the stream (or done_event) that a call's work went to has come to its end; for a staged operation that of
 * its ncclEpComplete.
 *   inputs, biases    unmodified until the operation has passed; of a staged one until its completion has
 *   outputs           not read from the start of the call's work until the operation has passed, and not read or written between the
 *                     parts: peers may store into window-backed ones as soon as this rank's sending part runs. With an epilogue_event outputs
 *                     that are not window-backed may still be read until it happens
 *   topk_idx          until the update has passed; borrowed, until the first dispatch has, and if that is staged, its sending part
 *   handle's memory   not overwritten, moved or updated while an operation of the handle has not passed
 *   descriptors, configs, `sizes`   until the call returns */

typedef struct {
  unsigned int size;
  unsigned int magic;
  cudaEvent_t start_event;  /* NULL, or: the receiving part starts after it */
  cudaEvent_t done_event;   /* NULL, or: recorded behind it */
  int communication_stream; /* 1: on the group's own stream instead of `stream` */
} ncclEpCompleteExtConfig_t;
#define NCCL_EP_COMPLETE_EXT_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCompleteExtConfig_t, NCCL_EP_MAGIC)
/* ncclEpCompleteExt: ncclEpComplete, with events and the communication stream.
 *   config  NULL: as ncclEpComplete
 * Collective, asynchronous, capturable. With nothing staged it does what the events ask for and no more. */
ncclResult_t ncclEpCompleteExt(ncclEpHandle_t handle, const ncclEpCompleteExtConfig_t *config, cudaStream_t stream);

/* A staged operation whose completion is due later, and what it has to wait for. The caller's own memory; nothing is to be
 * released. */
typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpHandle_t handle; /* with the staged operation */
  cudaEvent_t event;     /* NULL, or what the completion waits for, for example the done_event of the sending part */
  int done;              /* 0; set to 1 by ncclEpDeferredRun */
} ncclEpDeferred_t;
#define NCCL_EP_DEFERRED_INIT NCCL_EP_STRUCT_INIT(ncclEpDeferred_t, NCCL_EP_MAGIC)
/* ncclEpDeferredRun: wait, then run the deferred epilogue, once: makes `stream` wait for deferred->event and completes the handle's staged
 * operation on it; any further call with the same struct does nothing.
 *   deferred  in and out: filled by its _INIT macro, then handle and event set
 * Collective, asynchronous, capturable. When it fails, `done` stays 0. */
ncclResult_t ncclEpDeferredRun(ncclEpDeferred_t *deferred, cudaStream_t stream);

/* ncclEpGetCommunicationStream: the group's own stream, made at first use, non-blocking and of the device's highest priority, so that
 * blocks of communication start before those of other work that waits.
 *   stream  out, the group's: not to be destroyed by the caller
 * Local. */
ncclResult_t ncclEpGetCommunicationStream(ncclEpGroup_t group, cudaStream_t *stream);

/* ---- Exact counts on the host ------------------------------------------------------------------------------------ */

typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int total;              /* received rows (flat), unpadded slots (expert-major) */
  unsigned int total_padded;       /* the same, padded: rows of the output */
  unsigned int *per_source;        /* caller's [R] or NULL: rows from each rank */
  unsigned int *per_expert;        /* caller's [L] or NULL: unpadded slots of each local expert */
  unsigned int *per_expert_padded; /* caller's [L] or NULL */
} ncclEpHostCounts_t;
#define NCCL_EP_HOST_COUNTS_INIT NCCL_EP_STRUCT_INIT(ncclEpHostCounts_t, NCCL_EP_MAGIC)

/* ncclEpGetHostCounts: exact counts of a handle's routing, after a bounded wait. Waits on the host, at most the group's timeout,
 * until the handle's last update has run.
 *   counts  in and out: filled by its _INIT macro, with the caller's arrays or NULL
 * Blocks the calling thread only; not allowed while the update's stream is being captured. An update inside a graph
 * runs when the graph does: synchronise the replay first. Once any update of the group was captured, the wait is for
 * the stream of the handle's last update. Local. ncclInvalidUsage: in low latency, where dispatch's layout_info has the counts, and
 * where no update has run yet. ncclSystemError: the timeout passed. ncclRemoteError: a kernel gave up. */
ncclResult_t ncclEpGetHostCounts(ncclEpHandle_t handle, ncclEpHostCounts_t *counts);

/* ---- Counts on the device ---------------------------------------------------------------------------------------- */

/* Addresses inside the handle's memory. */
typedef struct {
  unsigned int size;
  unsigned int magic;
  const unsigned int *per_source; /* OUT: [R] rows from each rank (a token once, in both layouts) */
  const unsigned int *per_expert; /* OUT: [L] unpadded slots of each local expert */
  const unsigned int
      *expert_start; /* OUT: [L + 1] first slot of each local expert, aligned; [L]: all slots with their padding */
} ncclEpDeviceCounts_t;
#define NCCL_EP_DEVICE_COUNTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDeviceCounts_t, NCCL_EP_MAGIC)
/* ncclEpGetDeviceCounts: where kernels of the caller find the exact counts of a handle's routing, without the host.
 *   counts  in and out: filled by its _INIT macro
 * What lies there is the caller's to read, in stream order behind the handle's last update, or where that borrowed its topk_idx behind the
 * first dispatch that followed; the next update overwrites it. The addresses stay as long as the handle and its top-k. Local; waits
 * for nothing; allowed while capturing. ncclInvalidUsage: in low latency, and where no update was made yet. */
ncclResult_t ncclEpGetDeviceCounts(ncclEpHandle_t handle, ncclEpDeviceCounts_t *counts);

/* ---- The routing record's metadata --------------------------------------------------------------------------------
 */

/* Copies of the record, synchronous (the handle's last update is waited for). Caller's host arrays, NULL to skip. */
typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int received;    /* OUT: received rows N (flat order) */
  int *source_rank;         /* [N] source rank of each received row */
  int *source_token;        /* [N] its token index there */
  long long *sent_slot;     /* [T][K] output row at the owner's rank that (token, k) occupies, or -1 */
  size_t received_capacity; /* rows that source_rank, source_token and received_slot have room for */
  size_t sent_capacity;     /* elements of sent_slot */
  long long *received_slot; /* [N][K] output row here that each received row's k occupies, or -1 */
} ncclEpHandleMetadata_t;
#define NCCL_EP_HANDLE_METADATA_INIT NCCL_EP_STRUCT_INIT(ncclEpHandleMetadata_t, NCCL_EP_MAGIC)
/* ncclEpGetHandleMetadata: where each row came from and where each sent row lies, copied from the routing record to the host.
 * sent_slot and received_slot are flat rows or expert-major slots, as the handle's layout says.
 *   metadata  in and out: filled by its _INIT macro, with the caller's arrays and their capacities
 * Local; waits for the handle's last update. ncclInvalidUsage: in low latency, whose places are fixed. A capacity that is too small is refused and the number needed named; then nothing is promised of the arrays. */
ncclResult_t ncclEpGetHandleMetadata(ncclEpHandle_t handle, ncclEpHandleMetadata_t *metadata);

/* ---- Compiling ahead ----------------------------------------------------------------------------------------------
 */

typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpLayout_t layout;        /* of the handles */
  unsigned int hidden;          /* elements of a dispatched row */
  unsigned int top_k;           /* K of their routings */
  ncclDataType_t dispatch_type; /* of dispatched tokens */
  ncclDataType_t combine_type;  /* of expert outputs */
  ncclDataType_t index_type;    /* ncclInt64 or ncclInt32 */
  int backward;                 /* also compile the backward pass */
  unsigned int scale_bytes;     /* of a dispatched row's scales (NCCL_EP_DISP_QUANT_FWD), 0: without scales */
  unsigned int num_bias;        /* 1 or 2: combine with that many biases (ncclEpCombineExt), 0: without; low latency: 0 */
  int borrow_topk_idx; /* 1: also compile the dispatch that makes the routing record itself (ncclEpUpdateHandleExt) */
  int window_output;   /* 1: dispatch's outputs.tokens will be window-backed, see "Windows" in nccl_ep.h */
  unsigned int in_flight;          /* staged operations (send_only) to be ready for, at most max_in_flight; 0: none */
  ncclEpCombQuant_t combine_quant; /* how expert outputs travel (quant_recipe of combine) */
} ncclEpPrepareConfig_t;
#define NCCL_EP_PREPARE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpPrepareConfig_t, NCCL_EP_MAGIC)
/* ncclEpPrepare: compiles and loads every kernel that calls of this shape need, so that no later call compiles.
 *   config  not NULL: the shape
 * Update,
 * forward dispatch and combine, with `backward` those of the backward pass too, with `borrow_topk_idx` the forward dispatch
 * that follows a borrowing update (low latency's serves both), with `window_output` those of dispatch for a window-backed
 * output instead of an ordinary one, with `combine_quant` those of combine with that recipe instead of without one. Low
 * latency refuses `backward`. With `in_flight` also
 * both parts of staged operations, and the memory of as many in flight. Not while
 * capturing. Local, but collective with `in_flight`. */
ncclResult_t ncclEpPrepare(ncclEpGroup_t group, const ncclEpPrepareConfig_t *config);

/* ---- Profiling ---------------------------------------------------------------------------------------------------- */

typedef enum {
  NCCL_EP_PROFILE_UPDATE = 0,   /* an update that is a launch of its own */
  NCCL_EP_PROFILE_DISPATCH = 1, /* a dispatch, with the update that it does */
  NCCL_EP_PROFILE_COMBINE = 2   /* a combine */
} ncclEpProfileKind_t;
/* What thread blocks of an operation do, each from the first one's begin to the last one's end. */
typedef enum {
  NCCL_EP_SPAN_RECORD = 0,  /* make the routing record */
  NCCL_EP_SPAN_SEND = 1,    /* send rows */
  NCCL_EP_SPAN_RECEIVE = 2, /* take what arrives, and with combine, sum it */
  NCCL_EP_SPANS = 3         /* how many there are */
} ncclEpProfileSpan_t;

/* One kernel: an update of its own, a dispatch (with the update that it does) or a combine. */
typedef struct {
  unsigned int number;                       /* of the group's profiled operations, from 1 on */
  ncclEpProfileKind_t kind;                  /* which call it was */
  unsigned long long start_ns, end_ns;       /* by the device's clock: devices' clocks may differ */
  unsigned int span_start_ns[NCCL_EP_SPANS]; /* since start_ns */
  unsigned int span_end_ns[NCCL_EP_SPANS];   /* 0: there was no such span */
} ncclEpProfileOperation_t;

/* Waits of an operation for one rank: of all warps and threads that did not find there what they needed. Their times overlap.
 * Rows of another scale-up domain are waited for at the rank of the own domain that they come through. */
typedef struct {
  unsigned int number;     /* of the operation */
  int rank;                /* that was waited for */
  char phase[32];          /* for example "dispatch: rows" */
  unsigned int waits;      /* how many */
  unsigned int longest_ns; /* of one */
  /* Since the operation's start_ns: when the first and the last of them ended. The first of counts, routing rows and rows is about
   * how late the rank was. */
  unsigned int first_ns, last_ns;
  unsigned long long total_ns; /* of all */
} ncclEpProfileWait_t;

typedef struct {
  unsigned int size;
  unsigned int magic;
  ncclEpProfileOperation_t *operations;           /* caller's [operation_capacity] */
  ncclEpProfileWait_t *waits;                     /* caller's [wait_capacity], or NULL */
  unsigned int operation_capacity, wait_capacity; /* elements of the arrays */
  unsigned int operation_count;                   /* OUT: operations told, oldest first */
  unsigned int wait_count;                        /* OUT: waits told, in their operations' order */
  unsigned int lost;                              /* OUT: operations that were overwritten before this call */
  char advice[256];                               /* OUT: one line for people where a wait dominates, else empty */
} ncclEpProfile_t;
#define NCCL_EP_PROFILE_INIT NCCL_EP_STRUCT_INIT(ncclEpProfile_t, NCCL_EP_MAGIC)

/* ncclEpSetProfiling: from now on kernels of the group write down where their time goes (on: 1), or no longer (0). A group
 * of NCCL_EP_PROFILE=1 does so from the start. Kernels that do are others, compiled when they are first needed; those that do not are
 * the same as without this call.
 *   on  0 or 1
 * Local; ranks may differ. No operation of the group may be running or be under capture: synchronise its streams first. The first time allocates
 * device memory, at most 4 MiB unless the group has many ranks. A captured graph keeps the kernels it was captured with, which write
 * nothing while this is 0. Staged operations (send_only) are not told. */
ncclResult_t ncclEpSetProfiling(ncclEpGroup_t group, int on);

/* ncclEpGetProfile: the profiled operations that have ended since the last call, oldest first, as many as there is room for. At
 * least the last 7 are kept, and as many as 255 where ranks are few.
 *   profile  in and out: filled by its _INIT macro, with the caller's arrays and their capacities
 * Local; synchronise the group's streams first: what runs is left out. ncclInvalidUsage: profiling was never on. Waits that do
 * not fit are left out with their operation, which the next call tells; where not one operation fits, the capacity is refused and the number
 * needed named. */
ncclResult_t ncclEpGetProfile(ncclEpGroup_t group, ncclEpProfile_t *profile);

/* ---- Emulated communicators ----------------------------------------------------------------------------------------
 */

/* A communicator of the emulated fabric is accepted by ncclEpCreateGroup like any other; tensors of such a group live
 * in memory from ncclEpEmuMalloc, and streams come from ncclEpEmuStreamCreate (NULL is each rank's default stream). As
 * with NCCL, collective calls of several ranks in one process come from one thread per rank. Host code may read
 * emulated memory directly once the stream that used it is synchronised; it fills it with ncclEpEmuMemcpy or
 * ncclEpEmuMemset only (memory counts as never written until these or a kernel wrote it, and its reads are reported).
 */
typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned long long seed;     /* schedule: same seed, same interleaving, visibility and order */
  unsigned int num_sms;        /* resident blocks of a rank, default 8 */
  unsigned int bug;            /* planted fault in the kernels, 0 none: tests of the emulator itself */
  unsigned int no_weak_memory; /* 1: only random scheduling, for comparison */
  unsigned int no_bulk_copies; /* 1: kernels as on SM80, without bulk copies */
} ncclEpEmuOptions_t;
#define NCCL_EP_EMU_OPTIONS_INIT NCCL_EP_STRUCT_INIT(ncclEpEmuOptions_t, NCCL_EP_MAGIC)

typedef struct {
  unsigned int size;
  unsigned int magic;
  unsigned int faults;         /* reports since the communicator was made or last asked */
  unsigned long long switches; /* context switches run */
  unsigned long long clock_ns; /* simulated clock */
  char text[4096];             /* the first reports: cause, rank, block, thread, place */
  /* Between scale-up domains, of all ranks since the communicators were made. */
  unsigned long long gin_puts, gin_put_bytes;
  unsigned long long gin_contexts_used; /* bit c: something was put by context c; the last bit: by any from there on */
} ncclEpEmuReport_t;
#define NCCL_EP_EMU_REPORT_INIT NCCL_EP_STRUCT_INIT(ncclEpEmuReport_t, NCCL_EP_MAGIC)

/* ncclEpEmuCommInitAll: makes scaleOut * scaleUp communicators of one fabric, rank = o * scaleUp + u.
 *   comms     out: array of scaleOut * scaleUp
 *   scaleOut  scale-up domains, at least 1
 *   scaleUp   ranks of a domain, at least 1
 *   options   NULL: defaults
 * Local; any thread. ncclSystemError: libnccl_ep_emu.so was not found or does not fit this library. */
ncclResult_t ncclEpEmuCommInitAll(ncclComm_t *comms, int scaleOut, int scaleUp, const ncclEpEmuOptions_t *options);
/* ncclEpEmuCommDestroy: releases one rank's communicator; the fabric goes with its last one. Its groups are to be destroyed before. */
ncclResult_t ncclEpEmuCommDestroy(ncclComm_t comm);
/* ncclEpEmuMalloc: emulated device memory of the communicator's rank, 0xA5 in every byte and counted as never written.
 *   ptr    out, released by ncclEpEmuFree
 *   bytes  its size
 *   name   copied; appears in reports */
ncclResult_t ncclEpEmuMalloc(ncclComm_t comm, void **ptr, size_t bytes, const char *name);
/* ncclEpEmuFree: releases memory of ncclEpEmuMalloc.
 *   ptr  as ncclEpEmuMalloc gave it */
ncclResult_t ncclEpEmuFree(ncclComm_t comm, void *ptr);
/* ncclEpEmuMemcpy: copies in stream order.
 *   dst    host or emulated memory
 *   src    host or emulated memory
 *   bytes  how many */
ncclResult_t ncclEpEmuMemcpy(ncclComm_t comm, void *dst, const void *src, size_t bytes, cudaStream_t stream);
/* ncclEpEmuMemset: fills in stream order.
 *   dst    host or emulated memory
 *   value  of each byte
 *   bytes  how many */
ncclResult_t ncclEpEmuMemset(ncclComm_t comm, void *dst, int value, size_t bytes, cudaStream_t stream);
/* ncclEpEmuStreamCreate: a stream of the communicator's rank.
 *   stream  out, released by ncclEpEmuStreamDestroy */
ncclResult_t ncclEpEmuStreamCreate(ncclComm_t comm, cudaStream_t *stream);
/* ncclEpEmuStreamDestroy: releases a stream of ncclEpEmuStreamCreate. */
ncclResult_t ncclEpEmuStreamDestroy(ncclComm_t comm, cudaStream_t stream);
/* ncclEpEmuStreamSynchronize: waits on the host until the stream has run all its work; the fabric runs meanwhile. */
ncclResult_t ncclEpEmuStreamSynchronize(ncclComm_t comm, cudaStream_t stream);
/* ncclEpEmuStreamDelay: what the stream is given from now on begins so much later, by the simulated clock.
 *   ns  nanoseconds */
ncclResult_t ncclEpEmuStreamDelay(ncclComm_t comm, cudaStream_t stream, unsigned long long ns);
/* ncclEpEmuEventCreate: an event of the communicator's rank.
 *   event  out, released by ncclEpEmuEventDestroy */
ncclResult_t ncclEpEmuEventCreate(ncclComm_t comm, cudaEvent_t *event);
/* ncclEpEmuEventDestroy: releases an event of ncclEpEmuEventCreate.
 *   event  of ncclEpEmuEventCreate */
ncclResult_t ncclEpEmuEventDestroy(ncclComm_t comm, cudaEvent_t event);
/* ncclEpEmuEventRecord: the event has happened once the stream has passed this call.
 *   event  of ncclEpEmuEventCreate */
ncclResult_t ncclEpEmuEventRecord(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream);
/* ncclEpEmuStreamWaitEvent: what the stream is given from now on waits for the event.
 *   event  of ncclEpEmuEventCreate */
ncclResult_t ncclEpEmuStreamWaitEvent(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event);
/* ncclEpEmuWindowRegister: a window over emulated memory, as ncclCommWindowRegister makes one.
 *   buffer  memory of ncclEpEmuMalloc
 *   bytes   its size
 *   window  out, released by ncclEpEmuWindowDeregister
 * Collective. */
ncclResult_t ncclEpEmuWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window);
/* ncclEpEmuWindowDeregister: releases a window of ncclEpEmuWindowRegister, not the memory under it.
 *   window  of this communicator */
ncclResult_t ncclEpEmuWindowDeregister(ncclComm_t comm, ncclWindow_t window);
/* ncclEpEmuRankStop: a rank that stops, dies, or goes on: for tests of what the others then do.
 *   stopped  1: the fabric no longer waits for calls of this rank's host, so that timeouts of the others' kernels pass; 0: it does again,
 *            and the rank's kernels go on
 *   after    with `stopped`: after so many more steps of the fabric the rank's kernels stay where they are, as those of a killed
 *            process do; ~0: they end what was queued
 * Any thread. A rank must have gone on before its communicator is destroyed. */
ncclResult_t ncclEpEmuRankStop(ncclComm_t comm, int stopped, unsigned long long after);
/* ncclEpEmuGetReport: what the fabric's checkers saw: data races, missing fences, reads of memory nothing wrote, deadlocks.
 *   report  in and out: filled by its _INIT macro */
ncclResult_t ncclEpEmuGetReport(ncclComm_t comm, ncclEpEmuReport_t *report);

#ifdef __cplusplus
}
#endif

#endif
