/* A group and its handles as the host runtime keeps them, and what its files offer each other. */
#ifndef EP_HOST_RUNTIME_H_
#define EP_HOST_RUNTIME_H_

#include <pthread.h>
#include <stdint.h>

#include "abi.h"
#include "backend.h"
#include "mask_layout.h"
#include "nccl_ep.h"
#include "nccl_ep_ext.h"
#include "policy.h"
#include "profile_layout.h"

#define EP_RECORD_ALIGN EP_SECTION_ALIGN
#define EP_MAX_ALIGN (1u << 20) /* of an expert's zone: keeps slot numbers inside 32 bits */

/* A compiled kernel of the group, found by what it is specialised by. */
typedef struct epKernelEntry {
  int id;
  epConfig config;
  epKernel *kernel;
} epKernelEntry;

/* Mapped memory for the host counts of EP_COUNTS_SLOTS handles; a handle takes a slot when it is initialised, so that
 * initialisation itself need not allocate. */
#define EP_COUNTS_SLOTS 16u
typedef struct epCountsChunk {
  struct epCountsChunk *next;
  uint8_t *host, *dev;
  struct ncclEpHandle *users[EP_COUNTS_SLOTS];
} epCountsChunk;

/* Host-visible words of a group: the kernels' error record, the word that ends their waits, what a re-admission came to. */
typedef struct epGroupShared {
  epErrorRecord error;
  uint32_t abortWord;
  epMaskResult meeting;
} epGroupShared;

/* What profile.c keeps of a group. `area` (device; profile_layout.h) is made once and stays with the group. */
typedef struct epProfiling {
  int on; /* kernels write into the area */
  uint8_t *area;
  epProfileHeader header;
  uint32_t told; /* operations that the caller has been told of */
} epProfiling;

/* What a staged operation works on beside its state in the group's scratch (layout.h, EP_SLOTS). */
typedef struct epSlot {
  int ready, taken;
  epWindow *window;
  void *windowTable;     /* device: R window addresses */
  epHybridGroup network; /* several scale-up domains: of the window */
} epSlot;

/* A group's own stream, and the order of its calls on different streams from then on (streams.c). */
typedef struct epStreams {
  cudaStream_t own;       /* NULL: not asked for yet */
  cudaEvent_t fork, last; /* the last call's work, on lastStream */
  cudaStream_t lastStream;
  int recorded;  /* `last` was */
  int capturing; /* the stream of the call under way */
} epStreams;

struct ncclEpGroup {
  epBackend *be;
  epTopology topology;
  ncclEpGroupConfig_t config; /* as resolved: environment applied, defaults filled in */
  epShape shape;
  epWindowLayout windowLayout;
  epScratchLayout scratchLayout;
  epHybridGroup hybrid; /* of several scale-up domains */
  unsigned sms;         /* that a kernel may use */
  uint32_t budget;      /* rows of an output; 0: eager */

  epWindow *window;
  void **windows;        /* R window addresses, as kernels of this rank see them */
  void *windowTable;     /* device: the same */
  void *scratch;         /* device */
  epGroupShared *shared; /* host address */
  uint8_t *sharedDev;    /* its device address */

  epProfiling profiling;

  pthread_mutex_t lock; /* guards everything below */
  epKernelEntry *kernels;
  int kernelCount, kernelRoom;
  epCountsChunk *counts;
  struct ncclEpHandle *handles; /* list */
  uint32_t maxInFlight;         /* staged operations */
  epSlot slots[EP_MAX_IN_FLIGHT];
  epStreams streams;
  uint32_t updatesIssued; /* generation of the last update that was launched outside of captures */
  int updatesCaptured;    /* graphs may add updates that the host cannot count */
  int lost;               /* atomic: a wait gave up, generations of the ranks may differ */
  epErrorRecord lostBy;
  int reported; /* bits of what the log has been told */
};

/* A batch's top-k decisions in the caller's memory: [tokens][topk] of `bytes` each. */
typedef struct epIndices {
  const void *data;
  uint32_t tokens, topk, bytes;
} epIndices;

struct ncclEpHandle {
  struct ncclEpGroup *group; /* NULL once the group is destroyed */
  struct ncclEpHandle *next, *previous;
  ncclEpLayout_t layout;
  uint32_t align;
  uint32_t topkRoom;  /* K that the memory is sized for */
  uint32_t topkFixed; /* num_topk of the caller, 0: any */
  uint32_t topk;      /* K of the routing; 0: not known yet */
  uint32_t tokens;    /* T of the routing, when `updated` */
  int updated;        /* the routing came through this handle */
  int foreign;        /* the record was found in the caller's memory, written by another handle */
  uint8_t *record;    /* device */
  size_t recordBytes;
  int owned;            /* the record is the library's memory */
  epHostCounts *counts; /* host address, NULL: no slot */
  uint8_t *countsDev;
  uint32_t generation;     /* of the last update; meaningful unless it was captured */
  int captured;            /* the last update was captured */
  int adds;                /* low latency: dispatches add to the experts' counters */
  int dispatched;          /* low latency: the record holds what combine needs */
  cudaStream_t stream;     /* of the last update */
  struct epStaged *staged; /* operation.c; NULL: there never was one */
  struct {
    int on; /* the last update borrowed these and launched nothing: the first dispatch does its work */
    epIndices indices;
    epUpdateArgs update; /* high throughput: its arguments but for the blocks */
  } pending;
};

/* ---- group.c */
/* Staged operations of a group that asks for `asked`. */
ncclResult_t epInFlightOf(const char *call, const char *name, unsigned asked, uint32_t *count);
ncclResult_t epGroupCreate(const char *call, ncclEpGroup_t *out, ncclComm_t comm, const ncclEpGroupConfig_t *config,
                           const ncclEpGroupExtConfig_t *ext);
ncclResult_t epGroupDestroy(ncclEpGroup_t group);
/* The group if it exists, else an error. */
ncclResult_t epGroupFind(const char *call, ncclEpGroup_t group);
epGroupArgs epGroupArgsOf(const struct ncclEpGroup *group);
uint32_t epLocals(const struct ncclEpGroup *group);

/* ---- group_config.c: checks and defaults of a configuration, and the comparison between ranks; pure but for the
 * environment. */
ncclResult_t epGroupConfigCheck(const char *call, const ncclEpGroupConfig_t *given, const epTopology *topology,
                                ncclEpGroupConfig_t *resolved, epShape *shape);
#define EP_WIRE_FIELDS 16
typedef struct epGroupWire {
  uint64_t field[EP_WIRE_FIELDS];
} epGroupWire;
epGroupWire epGroupWireOf(const ncclEpGroupConfig_t *config, const epShape *shape, uint32_t maxInFlight,
                          ncclResult_t status);
ncclResult_t epGroupWireCompare(const char *call, const epGroupWire *all, int ranks);

/* ---- ahead.c */
/* Kernels that are needed now or soon. */
#define EP_WISHES 20
typedef struct epWishes {
  struct {
    int id;
    epConfig config;
  } wish[EP_WISHES];
  int count;
} epWishes;
void epWishAdd(epWishes *wishes, int id, const epConfig *config);
/* Compiles them at once, on the caller's thread and others that end before it returns. What fails is not told: it is
 * tried again by epKernelCompile. Never while capturing. */
void epCompileTogether(struct ncclEpGroup *group, const epWishes *wishes);
/* The kernel itself and those that a layer which needs it is likely to need next. */
void epForesee(const struct ncclEpGroup *group, int id, const epConfig *config, epWishes *out);
int epMayGuess(const struct ncclEpGroup *group); /* there are cores for kernels that nobody asked for yet */

/* ---- kernel.c */
/* The kernel, compiled now if need be; refused while `stream` is being captured and it is not compiled yet. */
ncclResult_t epKernelGet(const char *call, struct ncclEpGroup *group, int id, const epConfig *config,
                         cudaStream_t stream, epKernel **out);
/* The same without a stream, for ncclEpPrepare: all of them, several at once. */
ncclResult_t epKernelCompileAll(struct ncclEpGroup *group, const epWishes *wishes);
/* What a new handle will most likely launch: its first call may be under capture, when nothing can be compiled. A guess, and
 * without a word where it cannot be done. */
void epAheadOfHandle(struct ncclEpGroup *group, ncclEpLayout_t layout, uint32_t topk);
/* Every launch: hybrid.c adds what kernels of several scale-up domains need, of the window that they work on. */
ncclResult_t epLaunchKernel(struct ncclEpGroup *group, const epHybridGroup *hybrid, epKernel *kernel,
                            const epLaunch *launch, cudaStream_t stream);
ncclResult_t epRefuseCapture(const char *call, struct ncclEpGroup *group, cudaStream_t stream, const char *why);

/* ---- error.c */
/* The ranks have not made the memory of a staged operation together: their operations are out of step. */
void epGroupLoseSlot(struct ncclEpGroup *group);
/* Refuses when the group is lost, with the line that says who waited for whom. */
ncclResult_t epGroupUsable(const char *call, struct ncclEpGroup *group);
int epGroupAsyncError(struct ncclEpGroup *group);
void epGroupErrorClear(struct ncclEpGroup *group);
void epGroupErrorInfo(struct ncclEpGroup *group, ncclEpErrorInfo_t *info);

const char *epPhaseName(uint32_t phase);

/* ---- profile.c */
/* Whether NCCL_EP_PROFILE asks for it. */
int epProfileWanted(void);
ncclResult_t epProfileSet(struct ncclEpGroup *group, int on);
ncclResult_t epProfileGet(struct ncclEpGroup *group, ncclEpProfile_t *out);
ncclResult_t epProfileRelease(struct ncclEpGroup *group);

/* ---- handle.c */
ncclResult_t epHandleFind(const char *call, ncclEpHandle_t handle);
ncclResult_t epHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config,
                             size_t *bytes, int topk);
ncclResult_t epHandleInit(ncclEpHandle_t *out, ncclEpGroup_t group, ncclEpLayout_t layout,
                          const ncclEpHandleConfig_t *config, int topk, const ncclEpTensor_t *memory);
ncclResult_t epHandleCreate(ncclEpHandle_t *out, ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpTensor_t *topk,
                            const ncclEpLayoutInfo_t *info, const ncclEpHandleConfig_t *config, cudaStream_t stream);
ncclResult_t epHandleDestroy(ncclEpHandle_t handle);
/* Takes the group away from a handle: its memory is released, the object stays until its own destroy. */
ncclResult_t epHandleOrphan(struct ncclEpHandle *handle);
epRecordLayout epHandleRecordLayout(const struct ncclEpHandle *handle);
/* The handle has routing, a pending update launched now: its own, or a record found in the caller's memory (looked at once). */
ncclResult_t epHandleRouted(const char *call, struct ncclEpHandle *handle, cudaStream_t stream);
uint32_t epLayoutKind(const struct ncclEpGroup *group, ncclEpLayout_t layout);

/* ---- update.c, dispatch.c, combine.c */
/* An update has been launched, by itself or inside a dispatch: what that makes of the handle. */
void epUpdateIssued(struct ncclEpHandle *handle, int capturing, cudaStream_t stream);
/* `options`: of EP_UPDATE_*. */
enum { EP_UPDATE_BORROW = 1, EP_UPDATE_ADD = 2 /* to the experts' counters */ };
ncclResult_t epUpdate(const char *call, ncclEpHandle_t handle, const ncclEpTensor_t *topk,
                      const ncclEpLayoutInfo_t *info, int options, cudaStream_t stream);
/* Launches the update that is pending, if one is. */
ncclResult_t epUpdatePending(const char *call, struct ncclEpHandle *handle, cudaStream_t stream);
/* `call`: ncclEpDispatch or ncclEpDispatchExt, for messages. */
ncclResult_t epDispatch(const char *call, ncclEpHandle_t handle, const ncclEpDispatchInputs_t *in,
                        const ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info,
                        const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext,
                        cudaStream_t stream);
ncclResult_t epCombine(const char *call, ncclEpHandle_t handle, const ncclEpCombineInputs_t *in,
                       const ncclEpCombineOutputs_t *out, const ncclEpCombineConfig_t *config,
                       const ncclEpCombineExtConfig_t *ext, cudaStream_t stream);
/* ---- direct.c */
/* Whether peers may store rows into any window-backed output of a handle of this layout. */
int epMayGoDirect(const struct ncclEpGroup *group, ncclEpLayout_t layout);
/* Sets config->direct and the arguments for it where they may do so with this rank's outputs.tokens, `t` (`shared`: of
 * epTensorShared), and returns NULL; else why not. */
const char *epDirectOutput(const struct ncclEpHandle *handle, const ncclEpTensor_t *t, const void *shared,
                           epConfig *config, epDispatchArgs *args);
/* Whether that is worth it, with so many SMs asked for by the call (0: none), where the caller leaves it open. */
int epDirectPays(const struct ncclEpGroup *group, unsigned askedSms, const epConfig *config);
/* Refuses a dispatch that is not direct where the group asks for that. */
ncclResult_t epDirectAsked(const char *call, const struct ncclEpGroup *group, const epConfig *config,
                           const char *obstacle);

/* ---- dispatch.c, combine.c */
/* SMs of a call that asks for `asked`, 0: any number: at most the group's. */
unsigned epCallSms(const struct ncclEpGroup *group, unsigned asked, int kernelId, const epConfig *config);
/* Configurations of the kernels, shared with ncclEpPrepare; threads and bulk are set by the policy, scaleBytes by the
 * caller. */
epConfig epConfigOf(const struct ncclEpGroup *group, uint32_t kind, uint32_t topk); /* what all have */
epConfig epUpdateConfig(const struct ncclEpGroup *group, uint32_t kind, uint32_t topk, uint32_t indexBytes);
epConfig epMoveConfig(const struct ncclEpGroup *group, uint32_t kind, uint32_t topk, uint32_t rowBytes, uint32_t dtype,
                      int weights);
/* Makes it a dispatch that makes the routing record itself. */
void epMoveFused(epConfig *config, uint32_t indexBytes);
ncclResult_t epCombineType(const char *call, const char *argument, ncclDataType_t type, uint32_t *dtype);
/* The group has the recipe of combine; `name` is the argument. Where there is none, there are no scales. */
ncclResult_t epCombineRecipe(const char *call, const char *name, const struct ncclEpGroup *group,
                             ncclEpCombQuant_t recipe);
ncclResult_t epCombineNoScales(const char *call, const ncclEpCombineInputs_t *inputs);
/* Bytes of a row of `tensor`, checked against 16 and the group's limit; `name` is the call. */
ncclResult_t epRowBytes(const char *name, const struct ncclEpGroup *group, const char *tensor, uint64_t hidden,
                        ncclDataType_t type, uint32_t *rowBytes);
/* Bytes of a row of scales beside a row of `rowBytes`, checked against 4 and the group's limit. */
ncclResult_t epScaleBytes(const char *name, const struct ncclEpGroup *group, const char *tensor, uint64_t bytes,
                          uint32_t rowBytes, uint32_t *scaleBytes);

/* ---- counts.c */
size_t epCountsBytes(const struct ncclEpGroup *group);
/* A slot for the handle; allocates a chunk when none is free and `mayAllocate`. No slot is not an error. */
ncclResult_t epCountsTake(struct ncclEpGroup *group, struct ncclEpHandle *handle, int mayAllocate);
void epCountsGive(struct ncclEpGroup *group, struct ncclEpHandle *handle);
ncclResult_t epCountsFree(struct ncclEpGroup *group);
/* Waits until the handle's last update has run. */
ncclResult_t epUpdateWait(const char *call, struct ncclEpHandle *handle);
/* 1 when the counts of the last update are already there. */
int epCountsKnown(const struct ncclEpHandle *handle);
ncclResult_t epHostCountsGet(ncclEpHandle_t handle, ncclEpHostCounts_t *counts);
/* ---- metadata.c */
ncclResult_t epDeviceCounts(ncclEpHandle_t handle, ncclEpDeviceCounts_t *counts);

/* ---- metadata.c, properties.c */
ncclResult_t epHandleMetadata(ncclEpHandle_t handle, ncclEpHandleMetadata_t *metadata);
ncclResult_t epGroupProperties(ncclEpGroup_t group, ncclEpGroupProperties_t *properties);
ncclResult_t epPrepare(ncclEpGroup_t group, const ncclEpPrepareConfig_t *config);
/* The kernels it compiles. Of the group only what kernels are chosen by is looked at: algorithm, shape, topology, sms. */
ncclResult_t epPrepareWishes(const struct ncclEpGroup *group, const ncclEpPrepareConfig_t *config, epWishes *out);
ncclResult_t epBufferSize(ncclComm_t comm, const ncclEpBufferSizeConfig_t *config, ncclEpBufferSize_t *sizes);

#endif
