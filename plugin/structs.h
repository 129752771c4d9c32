/* Structs of any version of the interface, brought to the current one. */
#ifndef EP_PLUGIN_STRUCTS_H_
#define EP_PLUGIN_STRUCTS_H_

#include "nccl_ep.h"
#include "nccl_ep_ext.h"

/* Copies what `size` covers of the caller's struct into `to`, zeroes the rest, and sets its size and magic. `least` is
 * the size of the first version, `field` that of the smallest field appended since: a size that cuts a field leaves it
 * out whole. Refuses a struct without magic or smaller than its first version. */
ncclResult_t epTakeStruct(const char *call, const char *name, const void *from, unsigned least, unsigned field,
                          void *to, unsigned bytes);
/* The same where the caller may pass NULL for defaults. */
ncclResult_t epTakeOptional(const char *call, const char *name, const void *from, unsigned least, unsigned field,
                            void *to, unsigned bytes);
/* Copies results back into the caller's struct as far as its `size` reaches; its size and magic stay. */
void epGiveStruct(const void *from, unsigned bytes, void *to);

/* ncclEpDispatch and ncclEpDispatchExt from where they are the same; ext: of the current version. */
ncclResult_t epEntryDispatch(const char *call, ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                             const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                             const ncclEpDispatchConfig_t *config, const ncclEpDispatchExtConfig_t *ext,
                             cudaStream_t stream);
/* The same of ncclEpCombine and ncclEpCombineExt. */
ncclResult_t epEntryCombine(const char *call, ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                            const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                            const ncclEpCombineExtConfig_t *ext, cudaStream_t stream);

#endif
