/* Limits of the GPUs that kernels are compiled for. A kernel's block size depends on the shared memory of a block, so a
 * cache that is filled without a GPU must know it exactly. */
#include "cuda_targets.h"

#include <string.h>

#include "fail.h"

/* Largest dynamic shared memory of a block (opt-in), and SMs of a common model; the latter decides nothing compiled. */
static const struct {
  int arch, smemKib, sms;
} targets[] = {
    {80, 163, 108},  {86, 99, 84},   {87, 163, 16},   {88, 99, 84},   {89, 99, 142},  {90, 227, 132},
    {100, 227, 148}, {101, 227, 20}, {103, 227, 148}, {110, 227, 20}, {120, 99, 170}, {121, 99, 48},
};

ncclResult_t epCudaTarget(int arch, epTopology *out) {
  for (size_t i = 0; i < sizeof(targets) / sizeof(targets[0]); i++) {
    if (targets[i].arch != arch) continue;
    memset(out, 0, sizeof(*out));
    out->ranks = out->scaleUpRanks = out->scaleOutRanks = 1;
    out->device = -1;
    out->arch = arch;
    out->numSms = targets[i].sms;
    out->smemPerBlock = targets[i].smemKib * 1024;
    out->bulkCopies = arch >= 90;
    return ncclSuccess;
  }
  return epFail(ncclInvalidArgument, "arch %d: expected one of 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121",
                arch);
}
