/* Symmetric windows of NCCL, and where peers see them. NCCL 2.29 and up tells the addresses; 2.28 keeps them in a
 * struct in device memory that its device functions read, so it is read here the same way. Either answer is put to the
 * test before it is used: a wrong address would be a silent write into somebody's memory. */
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

struct epWindow {
  void *buffer; /* as allocated */
  ncclWindow_t handle;
  int fromNccl;   /* allocated by ncclMemAlloc, else by the driver */
  epCudaGin *gin; /* several scale-up domains */
};

ncclWindow_t epCudaWindowSetGin(epWindow *window, epCudaGin *gin) {
  window->gin = gin;
  return window->handle;
}

/* First fields of ncclWindow_vidmem, the same from 2.28 to 2.30. */
typedef struct {
  void *winHost;
  char *lsaFlatBase; /* first byte of the window at rank 0 of the load/store team */
  int lsaRank, worldRank;
  uint32_t stride4G; /* from one rank's to the next, in units of 4 GiB */
} windowHead;

/* Its headers are C++ only: tests/test_vendor_abi.cpp compares the offsets with those installed. */
_Static_assert(offsetof(windowHead, lsaFlatBase) == 8 && offsetof(windowHead, lsaRank) == 16 &&
                   offsetof(windowHead, worldRank) == 20 && offsetof(windowHead, stride4G) == 24,
               "ncclWindow_vidmem");

/* Address, for this device, of the window at a rank of the load/store team. */
static ncclResult_t addressAt(epCuda *be, ncclWindow_t window, size_t offset, int lsaRank, void **out) {
  if (be->nccl->getLsaDevicePointer)
    return epCudaNccl(be, be->nccl->getLsaDevicePointer(window, offset, lsaRank, out), "address of a window");

  windowHead head;
  unsigned type = 0;
  epCuResult rc = be->cu->pointerGetAttribute(&type, EP_CU_POINTER_MEMORY_TYPE, (epCuPtr)window);
  if (rc != EP_CU_SUCCESS || type != EP_CU_MEMORYTYPE_DEVICE)
    return epFail(ncclInvalidArgument, "window handle %p is not one of this NCCL (version code %d)", (void *)window,
                  be->nccl->version);
  rc = be->cu->memcpyDtoHAsync(&head, (epCuPtr)window, sizeof(head), be->stream);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
  if (rc != EP_CU_SUCCESS) return epCuFail(be->cu, rc, "reading the window at %p", (void *)window);
  if (head.lsaRank != be->lsa.rank || head.worldRank != be->topology.rank || !head.lsaFlatBase)
    return epFail(
        ncclInvalidArgument,
        "window handle %p is of rank %d (%d in its team): expected rank %d (%d), or NCCL %d lays its windows out "
        "in a way this library does not know",
        (void *)window, head.worldRank, head.lsaRank, be->topology.rank, be->lsa.rank, be->nccl->version);
  *out = head.lsaFlatBase + ((uint64_t)head.stride4G << 32) * (uint64_t)lsaRank + offset;
  return ncclSuccess;
}

ncclResult_t epCudaWindowAddress(epBackend *base, ncclWindow_t win, uint64_t offset, uint64_t bytes, void **dev,
                                 void **shared) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  void *address = NULL, *alias = NULL, *last;
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  if (be->nccl->winGetUserPtr) {
    /* The caller's own address, so that his kernels and ours use one alias of the memory. */
    r = epCudaNccl(be, be->nccl->winGetUserPtr(be->comm, win, &address), "address of a tensor's window");
    if (r == ncclSuccess && !address)
      r = epFail(ncclInvalidArgument, "win_hdl %p: NCCL knows no address for it", (void *)win);
    address = (char *)address + offset;
    if (r == ncclSuccess && shared) r = addressAt(be, win, offset, be->lsa.rank, &alias);
    /* NCCL refuses what is outside of the window. */
    if (r == ncclSuccess && shared && bytes) r = addressAt(be, win, offset + bytes - 1, be->lsa.rank, &last);
  } else {
    r = addressAt(be, win, offset, be->lsa.rank, &address);
    alias = address;
  }
  epCudaLeave(be, &scope);
  if (r != ncclSuccess) return r;
  *dev = address;
  if (shared) *shared = alias;
  return ncclSuccess;
}

ncclResult_t epCudaAgree(epCuda *be, ncclResult_t mine, const char *step) {
  int state = (int)mine;
  int *all = calloc((size_t)be->topology.ranks, sizeof(*all));
  if (!all) return epFail(ncclSystemError, "out of memory: states of %d ranks", be->topology.ranks);
  ncclResult_t r = epCudaAllGather(&be->base, &state, all, sizeof(state));
  /* A rank with an error of its own has said it already. */
  for (int i = 0; i < be->topology.ranks && r == ncclSuccess && mine == ncclSuccess; i++)
    if (all[i] != ncclSuccess) r = epFail((ncclResult_t)all[i], "%s failed on rank %d: see its log", step, i);
  free(all);
  return mine != ncclSuccess ? mine : r;
}

static ncclResult_t put(epCuda *be, void *dev, uint64_t word) {
  epCuResult rc = be->cu->memcpyHtoDAsync((epCuPtr)dev, &word, sizeof(word), be->stream);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
  return rc == EP_CU_SUCCESS ? ncclSuccess : epCuFail(be->cu, rc, "writing to the symmetric window at %p", dev);
}

static uint64_t magicOf(int rank) { return 0x45504d4147494300ull ^ ((uint64_t)(unsigned)rank << 32 | (unsigned)rank); }

static ncclResult_t expectMark(epCuda *be, int rank, const void *dev) {
  uint64_t seen = 0;
  epCuResult rc = be->cu->memcpyDtoHAsync(&seen, (epCuPtr)dev, sizeof(seen), be->stream);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
  if (rc != EP_CU_SUCCESS) return epCuFail(be->cu, rc, "reading the window of rank %d at %p", rank, dev);
  if (seen != magicOf(rank))
    return epFail(
        ncclInternalError,
        "window of rank %d: the address %p leads to 0x%016llx, expected 0x%016llx: NCCL %d lays its windows out in "
        "a way this library does not know",
        rank, dev, (unsigned long long)seen, (unsigned long long)magicOf(rank), be->nccl->version);
  return ncclSuccess;
}

/* Each rank wrote its mark through the address it computed for itself: it must have reached its own buffer, and peers
 * must see it through the addresses they computed. */
static ncclResult_t checkPeers(epCuda *be, const epWindow *window, void *const *peers) {
  ncclResult_t r = expectMark(be, be->topology.rank, window->buffer);
  for (int p = 0; p < be->topology.ranks && r == ncclSuccess; p++)
    if (peers[p]) r = expectMark(be, p, peers[p]);
  return r;
}

/* A communicator of one rank has nobody to share with, and NCCL need not support windows on it. */
static ncclResult_t createAlone(epCuda *be, size_t bytes, epWindow *window, void **peers) {
  epCuPtr dev = 0;
  epCuResult rc = be->cu->memAlloc(&dev, bytes);
  if (rc != EP_CU_SUCCESS) return epCuFail(be->cu, rc, "%zu bytes for the window", bytes);
  rc = be->cu->memsetD8Async(dev, 0, bytes, be->stream);
  if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
  if (rc != EP_CU_SUCCESS) {
    (void)be->cu->memFree(dev);
    return epCuFail(be->cu, rc, "clearing %zu bytes of the window", bytes);
  }
  window->buffer = (void *)dev;
  peers[0] = window->buffer;
  return ncclSuccess;
}

static void releaseWindow(epCuda *be, epWindow *window) {
  epCudaGinDestroy(be, window->gin);
  if (be->stuck) { /* peers may still store into it, and to free it is to wait for the device */
    free(window);
    return;
  }
  if (window->handle)
    (void)epCudaNccl(be, be->nccl->windowDeregister(be->comm, window->handle), "giving the symmetric window back");
  if (window->buffer && window->fromNccl)
    (void)epCudaNccl(be, be->nccl->memFree(window->buffer), "freeing the symmetric window");
  else if (window->buffer)
    (void)be->cu->memFree((epCuPtr)window->buffer);
  free(window);
}

ncclResult_t epCudaWindowCreate(epBackend *base, size_t bytes, epWindow **out, void **peers) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  ncclResult_t r;
  epTopology *t = &be->topology;
  epWindow *window = NULL;
  if (bytes < sizeof(uint64_t)) bytes = sizeof(uint64_t);
  for (int p = 0; p < t->ranks; p++) peers[p] = NULL;
  if ((r = epCudaEnter(be, &scope)) != ncclSuccess) return r;
  window = calloc(1, sizeof(*window));
  if (!window) r = epFail(ncclSystemError, "out of memory: %zu bytes for a window's record", sizeof(*window));
  if (t->ranks == 1) {
    if (r == ncclSuccess) r = createAlone(be, bytes, window, peers);
    goto done;
  }

  if (r == ncclSuccess) {
    r = epCudaNccl(be, be->nccl->memAlloc(&window->buffer, bytes), "allocating the symmetric window");
    window->fromNccl = 1;
  }
  if ((r = epCudaAgree(be, r, "allocating the symmetric window")) != ncclSuccess || !window) goto done;
  r = epCudaNccl(be,
                 be->nccl->windowRegister(be->comm, window->buffer, bytes, &window->handle, EP_NCCL_WIN_COLL_SYMMETRIC),
                 "registering the symmetric window");
  if (r == ncclSuccess && !window->handle)
    r = epFail(
        ncclInvalidUsage,
        "NCCL has no symmetric memory on this communicator: that takes GPUs with peer-to-peer access, and neither "
        "NCCL_CUMEM_ENABLE=0 nor NCCL_WIN_ENABLE=0");
  for (int i = 0; i < t->scaleUpRanks && r == ncclSuccess; i++)
    r = addressAt(be, window->handle, 0, i, &peers[t->rank - t->scaleUpRank + i]);
  if (r == ncclSuccess) {
    epCuResult rc = be->cu->memsetD8Async((epCuPtr)peers[t->rank], 0, bytes, be->stream);
    if (rc == EP_CU_SUCCESS) rc = be->cu->streamSynchronize(be->stream);
    if (rc != EP_CU_SUCCESS) r = epCuFail(be->cu, rc, "clearing %zu bytes of the window", bytes);
  }
  if (r == ncclSuccess) r = put(be, peers[t->rank], magicOf(t->rank));
  if ((r = epCudaAgree(be, r, "registering the symmetric window")) != ncclSuccess) goto done;
  r = checkPeers(be, window, peers);
  if ((r = epCudaAgree(be, r, "reaching the symmetric windows of the peers")) != ncclSuccess) goto done;
  r = put(be, peers[t->rank], 0);
  r = epCudaAgree(be, r, "clearing the symmetric window");

done:
  if (r == ncclSuccess)
    *out = window;
  else if (window)
    releaseWindow(be, window);
  epCudaLeave(be, &scope);
  return r;
}

ncclResult_t epCudaWindowDestroy(epBackend *base, epWindow *window) {
  epCuda *be = (epCuda *)base;
  epCudaScope scope;
  if (!window) return ncclSuccess;
  if (be->stuck) {
    releaseWindow(be, window);
    return ncclSuccess;
  }
  ncclResult_t r = epCudaEnter(be, &scope);
  if (r != ncclSuccess) return r;
  /* Kernels of the group may still run on streams that nobody told us of. */
  epCuResult rc = be->cu->ctxSynchronize();
  if (rc != EP_CU_SUCCESS)
    r = epCuFail(be->cu, rc, "waiting for device %d before its window goes", be->topology.device);
  releaseWindow(be, window);
  epCudaLeave(be, &scope);
  return r;
}
