/* The network between scale-up domains: NCCL's device communicator (GIN), asked for when a group spans several of them and
 * never else. Its layout is that of the header set that kernels are compiled with (jit/headers.h), and so is the request. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"
#include "headers.h"
#include "nccl_abi.h"

struct epCudaGin {
  int version;    /* of the header set */
  int connection; /* to whom: EP_NCCL_CONNECTION_* */
  int created;    /* there is a device communicator */
  epCuPtr device; /* the kernels' copy of `comm` */
  _Alignas(16) uint8_t comm[512];
};
_Static_assert(sizeof(((epCudaGin *)0)->comm) >= EP_NCCL_COMM_BYTES(23203), "room for a device communicator");

static atomic_int networks;

int epCudaGinAnywhere(void) { return networks != 0; }

enum { GIN_PROXY = 2 };

static const char *ginName(int type) {
  switch (type) {
  case GIN_PROXY:
    return "proxy";
  case 3:
    return "GPUs drive the NIC";
  default:
    return "another direct one";
  }
}

static ncclResult_t query(epCuda *be, int version, epNcclProperties *p) {
  memset(p, 0, sizeof(*p));
  p->size = EP_NCCL_PROPERTIES_BYTES(version);
  p->magic = EP_NCCL_MAGIC;
  p->version = (uint32_t)version;
  return be->nccl->queryProperties(be->comm, p);
}

static int typeOf(const epNcclProperties *p) { return p->railedGinType ? p->railedGinType : p->ginType; }

int epCudaGinProxy(epCuda *be) {
  epNcclProperties p;
  int version = 0;
  return be->nccl->queryProperties && epHeadersVersion(be->nccl->version, &version) == ncclSuccess &&
         version >= 23000 && query(be, version, &p) == ncclSuccess && typeOf(&p) == GIN_PROXY;
}

/* The rail is all that kernels need queue pairs to; headers before 2.30.5 ask for it only where NCCL offers no more. */
static ncclResult_t checkProperties(epCuda *be, int version, int *connection) {
  epNcclProperties p;
  ncclResult_t r;
  *connection = EP_NCCL_CONNECTION_FULL;
  if (EP_NCCL_KNOWN(version) && version < 23000) return ncclSuccess; /* 2.28 cannot be asked */
  if (!be->nccl->queryProperties)
    return epFail(ncclInvalidUsage, "several scale-up domains: NCCL at %s lacks ncclCommQueryProperties",
                  be->nccl->path);
  r = epCudaNccl(be, query(be, version, &p), "properties of the communicator");
  if (r != ncclSuccess) return r;
  if (p.railedGinType && (version >= 23005 || !p.ginType)) *connection = EP_NCCL_CONNECTION_RAIL;
  if (!p.deviceApi || (!p.ginType && !p.railedGinType))
    return epFail(
        ncclInvalidUsage,
        "several scale-up domains: NCCL has no network for kernels on this communicator (device API %d, GIN "
        "type %d, of a rail %d): expected RDMA NICs that NCCL's GIN can use, or its provider for hosts without "
        "(NCCL_RMA_PLUGIN=ep NCCL_GIN_TYPE=2, docs/rma-plugin.md)",
        p.deviceApi, p.ginType, p.railedGinType);
  if (p.lsaTeams != be->topology.scaleOutRanks)
    return epFail(ncclInternalError, "NCCL counts %d load/store teams: expected %d", p.lsaTeams,
                  be->topology.scaleOutRanks);
  int type = typeOf(&p);
  epLog(EP_LOG_INFO, "network between %d scale-up domains: GIN type %d (%s), to %s, device headers of version code %d",
        p.lsaTeams, type, ginName(type), *connection == EP_NCCL_CONNECTION_RAIL ? "the rail" : "all ranks", version);
  return ncclSuccess;
}

static ncclResult_t createComm(epCuda *be, epCudaGin *gin, uint32_t contexts, uint32_t signals) {
  union {
    epNcclRequest now;
    epNcclRequest228 old;
  } request;
  memset(&request, 0, sizeof(request));
  if (gin->version < 23000 && be->base.trafficClass)
    return epFail(ncclInvalidUsage,
                  "traffic_class is %u: NCCL %d takes the communicator's alone: expected 0, or NCCL 2.30",
                  be->base.trafficClass, be->nccl->version);
  if (gin->version < 23000) {
    request.old.forceEnable = true;
    request.old.contexts = (int32_t)contexts;
    request.old.signals = (int32_t)signals;
  } else {
    epNcclRequest *q = &request.now;
    q->size = EP_NCCL_REQUEST_BYTES(gin->version);
    q->magic = EP_NCCL_MAGIC;
    q->version = (uint32_t)gin->version;
    q->contexts = (int32_t)contexts;
    q->signals = (int32_t)signals;
    q->connection = gin->connection;
    q->trafficClass = be->base.trafficClass ? (int)be->base.trafficClass - 1 : EP_NCCL_UNSET;
    q->customStride = gin->version >= 23100;
    q->strongSignals = gin->version >= 23005; /* tails; signals at addresses are not used */
  }
  ncclResult_t r = epCudaNccl(be, be->nccl->devCommCreate(be->comm, &request, gin->comm),
                              "several scale-up domains: NCCL's device communicator");
  gin->created = r == ncclSuccess;
  return r;
}

/* Kernels read it from device memory; a flush ends early when *aborted is set. */
static ncclResult_t copyComm(epCuda *be, epCudaGin *gin, const uint32_t *aborted) {
  uint8_t copy[sizeof(gin->comm)];
  int at = EP_NCCL_ABORT_FLAG(gin->version);
  memcpy(copy, gin->comm, sizeof(copy));
  if (at) memcpy(copy + at, &aborted, sizeof(aborted));
  epCuResult rc = be->cu->memAlloc(&gin->device, sizeof(copy));
  if (rc != EP_CU_SUCCESS) {
    gin->device = 0;
    return epCuFail(be->cu, rc, "%zu bytes for a device communicator", sizeof(copy));
  }
  rc = be->cu->memcpyHtoDAsync(gin->device, copy, sizeof(copy), be->stream);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
  return rc == EP_CU_SUCCESS ? ncclSuccess : epCuFail(be->cu, rc, "copying the device communicator");
}

ncclResult_t epCudaGinCreate(epBackend *base, epWindow *window, uint32_t contexts, uint32_t signals, uint32_t *aborted,
                             epGin *out) {
  int version = 0;
  ncclResult_t found = epHeadersVersion(((epCuda *)base)->nccl->version, &version);
  return epCudaGinOpen((epCuda *)base, window, found, version, contexts, signals, aborted, out);
}

ncclResult_t epCudaGinOpen(epCuda *be, epWindow *window, ncclResult_t found, int version, uint32_t contexts,
                           uint32_t signals, uint32_t *aborted, epGin *out) {
  epCudaScope scope;
  epCudaGin *gin = NULL;
  int connection = 0;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  r = found;
  if (r == ncclSuccess && !(be->nccl->devCommCreate && be->nccl->devCommDestroy))
    r = epFail(ncclInvalidUsage, "several scale-up domains: NCCL at %s lacks ncclDevCommCreate", be->nccl->path);
  if (r == ncclSuccess) r = checkProperties(be, version, &connection);
  if (r == ncclSuccess && !(gin = calloc(1, sizeof(*gin))))
    r = epFail(ncclSystemError, "out of memory: %zu bytes for a network's record", sizeof(*gin));
  if (gin) networks++;
  if ((r = epCudaAgree(be, r, "preparing the network between scale-up domains")) != ncclSuccess || !gin) goto fail;
  gin->version = version;
  gin->connection = connection;
  r = createComm(be, gin, contexts, signals);
  if (r == ncclSuccess) r = copyComm(be, gin, aborted);
  if ((r = epCudaAgree(be, r, "opening the network between scale-up domains")) != ncclSuccess) goto fail;
  out->comm = gin->device;
  out->window = (uint64_t)(uintptr_t)epCudaWindowSetGin(window, gin);
  epCudaLeave(be, &scope);
  return ncclSuccess;

fail:
  epCudaGinDestroy(be, gin);
  epCudaLeave(be, &scope);
  return r;
}

void epCudaGinDestroy(epCuda *be, epCudaGin *gin) {
  if (!gin) return;
  networks--;
  if (!be->stuck) { /* else it is still in use, and to free it is to wait for the device */
    if (gin->created)
      (void)epCudaNccl(be, be->nccl->devCommDestroy(be->comm, gin->comm), "giving the device communicator back");
    if (gin->device) (void)be->cu->memFree(gin->device);
  }
  free(gin);
}
