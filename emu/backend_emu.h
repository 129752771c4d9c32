// What the module's entry points share with the table of operations.
#pragma once
#include "fabric.h"

namespace emu {

epBackend *makeBackend(const std::shared_ptr<Fabric> &fabric, int rank);
ncclResult_t freeRegion(Lock &lock, Fabric &f, int rank, void *p, bool mapped, const char *call);
std::shared_ptr<StreamEvent> makeEvent(Fabric &f, int rank);
ncclResult_t dropEvent(Fabric &f, int rank, cudaEvent_t event, const char *call);
ncclResult_t queueEvent(Fabric &f, int rank, cudaEvent_t event, cudaStream_t stream, bool record, const char *call);
ncclResult_t queueFill(Fabric &f, int rank, void *dst, int value, size_t bytes, cudaStream_t stream, const char *call);

} // namespace emu
