/* The environment: one table of names, kinds, defaults and texts, from which values are read and help is printed.
 * Values are read when they are needed (a group's when it is made), never at load, so that nccl.conf has been applied.
 */
#ifndef EP_HOST_ENV_H_
#define EP_HOST_ENV_H_

#include <stdint.h>
#include <stdio.h>

/* id, name, kind, default as text, what it does. Numbers are decimal; an empty default means "not set". */
#define EP_ENV_TABLE(X)                                                                                              \
  X(DEBUG, "NCCL_EP_DEBUG", STRING, "WARN", "log level: NONE, WARN, INFO, TRACE; NCCL_DEBUG where unset")            \
  X(TIMEOUT_MS, "NCCL_EP_TIMEOUT_MS", NUMBER, "", "timeout of waits for other ranks; overrides the configuration")   \
  X(NUM_SMS, "NCCL_EP_NUM_SMS", NUMBER, "", "thread blocks of a kernel at most; overrides max_num_sms")              \
  X(NUM_QPS, "NCCL_EP_NUM_QPS", NUMBER, "", "queue pairs to each rank of the rail; overrides num_qp_per_rank")       \
  X(PUT_ROWS, "NCCL_EP_PUT_ROWS", NUMBER, "", "rows that one put to another scale-up domain carries at most")        \
  X(MAX_IN_FLIGHT, "NCCL_EP_MAX_IN_FLIGHT", NUMBER, "",                                                              \
    "staged operations in flight, 0 to 8; overrides max_in_flight")                                                  \
  X(NVLINK_GBS, "NCCL_EP_NVLINK_GBS", NUMBER, "", "a GPU's NVLink rate, GB/s a direction, instead of NVML's")        \
  X(NIC_GBS, "NCCL_EP_NIC_GBS", NUMBER, "", "a GPU's NIC rate, GB/s a direction, instead of sysfs's")                \
  X(PROFILE, "NCCL_EP_PROFILE", NUMBER, "0", "1: groups are profiled from the start (ncclEpSetProfiling)")           \
  X(EMU_MODULE, "NCCL_EP_EMU_MODULE", STRING, "", "path of libnccl_ep_emu.so; else beside the library or in ../emu") \
  X(NVRTC, "NCCL_EP_NVRTC", STRING, "", "path of libnvrtc, where the loader does not find it")                       \
  X(NCCL, "NCCL_EP_NCCL", STRING, "", "tools only: path of libnccl, where the loader does not find it")              \
  X(JIT_CACHE_DIR, "NCCL_EP_JIT_CACHE_DIR", STRING, "", "kernel cache (default ~/.cache/nccl_ep); set empty: none")  \
  X(JIT_DUMP, "NCCL_EP_JIT_DUMP", STRING, "", "folder that receives source, PTX and machine code of kernels")        \
  X(JIT_LINEINFO, "NCCL_EP_JIT_LINEINFO", NUMBER, "0", "1: line information in kernels")                             \
  X(JIT_VERBOSE, "NCCL_EP_JIT_VERBOSE", NUMBER, "0", "1: a log line for each compilation and cache hit")

typedef enum {
#define X(id, name, kind, value, doc) EP_ENV_##id,
  EP_ENV_TABLE(X)
#undef X
      EP_ENV_COUNT
} epEnvId;

const char *epEnvName(epEnvId id);
/* The variable's text, its default where it is unset; NULL where both are missing. */
const char *epEnvString(epEnvId id);
/* 1 and *value when the variable (or its default) is a number in [lowest, highest]; else 0, with a warning for a value
 * that is set but unusable. */
int epEnvNumber(epEnvId id, uint64_t lowest, uint64_t highest, uint64_t *value);
/* One line a variable. */
void epEnvPrint(FILE *out);

#endif
