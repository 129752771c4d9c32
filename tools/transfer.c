/* Transfers that move what dispatch moves, without routing or placing it: what the hardware and NCCL can do. */
#include "transfer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "failure.h"

#define THREADS 256u
#define UNITS_A_ROUND (THREADS * 4u) /* of 16 bytes, that a block moves at once */

/* Units of 16 bytes from one address to another: each thread has four on their way, then what is left one by one. PTX,
 * because the driver alone can make it run. */
static const char copyText[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry copy16(.param .u64 to, .param .u64 from, .param .u64 units) {\n"
    "  .reg .pred %p;\n"
    "  .reg .b32 %thread, %block, %blocks, %v<16>;\n"
    "  .reg .b64 %to, %from, %units, %i, %at, %last, %step, %row, %src, %dst;\n"
    "  ld.param.u64 %to, [to];\n  ld.param.u64 %from, [from];\n  ld.param.u64 %units, [units];\n"
    "  cvta.to.global.u64 %to, %to;\n  cvta.to.global.u64 %from, %from;\n"
    "  mov.u32 %thread, %tid.x;\n  mov.u32 %block, %ctaid.x;\n  mov.u32 %blocks, %nctaid.x;\n"
    "  mul.wide.u32 %step, %blocks, 1024;\n"                      /* units a round of the grid */
    "  shr.u64 %last, %units, 10;\n  shl.b64 %last, %last, 10;\n" /* units in whole rounds of a block */
    "  mul.wide.u32 %i, %block, 1024;\n  cvt.u64.u32 %row, %thread;\n"
    "rounds:\n"
    "  setp.ge.u64 %p, %i, %last;\n  @%p bra rest;\n"
    "  add.u64 %at, %i, %row;\n  shl.b64 %at, %at, 4;\n  add.u64 %src, %from, %at;\n  add.u64 %dst, %to, %at;\n"
    "  ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%src];\n"
    "  ld.global.v4.u32 {%v4, %v5, %v6, %v7}, [%src+4096];\n"
    "  ld.global.v4.u32 {%v8, %v9, %v10, %v11}, [%src+8192];\n"
    "  ld.global.v4.u32 {%v12, %v13, %v14, %v15}, [%src+12288];\n"
    "  st.global.v4.u32 [%dst], {%v0, %v1, %v2, %v3};\n"
    "  st.global.v4.u32 [%dst+4096], {%v4, %v5, %v6, %v7};\n"
    "  st.global.v4.u32 [%dst+8192], {%v8, %v9, %v10, %v11};\n"
    "  st.global.v4.u32 [%dst+12288], {%v12, %v13, %v14, %v15};\n"
    "  add.u64 %i, %i, %step;\n  bra rounds;\n"
    "rest:\n" /* of the last part round: the first block's */
    "  setp.ne.u32 %p, %block, 0;\n  @%p bra done;\n"
    "  add.u64 %i, %last, %row;\n"
    "ones:\n"
    "  setp.ge.u64 %p, %i, %units;\n  @%p bra done;\n"
    "  shl.b64 %at, %i, 4;\n  add.u64 %src, %from, %at;\n  add.u64 %dst, %to, %at;\n"
    "  ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%src];\n  st.global.v4.u32 [%dst], {%v0, %v1, %v2, %v3};\n"
    "  add.u64 %i, %i, 256;\n  bra ones;\n"
    "done:\n  ret;\n}\n";

const char *epTransferName(epTransferKind kind) {
  static const char *const names[] = {"link-copy-engine", "link-sm-stores", "nccl-all-to-all"};
  return names[kind];
}

static void lacks(epTransfer *t, epTransferKind kind, const char *why) {
  snprintf(t->missing[kind], sizeof(t->missing[kind]), "%s", why);
}

static int openKernel(epTransfer *t) {
  const epDriver *d = epDriverOpen(NULL);
  epCuDevice device;
  int sms = 0;
  char why[160];
  epCuResult rc = d->moduleLoadData(&t->module, copyText);
  if (!rc) rc = d->moduleGetFunction(&t->kernel, t->module, "copy16");
  if (rc) {
    snprintf(why, sizeof(why), "the driver does not take the kernel: CUDA error %d", rc);
    lacks(t, EP_TRANSFER_SM_STORES, why);
    return 0;
  }
  if (epDriverCheck(d, d->deviceGet(&device, t->port->device), "cuDeviceGet") ||
      epDriverCheck(d, d->deviceAttribute(&sms, EP_CU_ATTR_SMS, device), "cuDeviceGetAttribute"))
    return -1;
  t->blocks = 2 * (unsigned)sms;
  return 0;
}

int epTransferOpen(epLayer *layer, epTransfer *t) {
  epPort *port = layer->port;
  int several = 0;
  const char *none = !port->cuda ? "the emulated fabric has none" : port->ranks < 2 ? "one rank sends nothing" : NULL;
  memset(t, 0, sizeof(*t));
  t->port = port;
  t->from = layer->outTokens.data;
  t->to = layer->expertOut.data; /* ordinary memory, which every GPU of a host can map */
  t->room = layer->expertOut.bytes < layer->outTokens.bytes ? layer->expertOut.bytes : layer->outTokens.bytes;
  for (int k = 0; none && k < EP_TRANSFERS; k++) lacks(t, (epTransferKind)k, none);
  if (none) return 0;
  if (epPortSeveralHosts(port, &several)) return -1;
  if (several) {
    lacks(t, EP_TRANSFER_COPY_ENGINE, "ranks of several hosts");
    lacks(t, EP_TRANSFER_SM_STORES, "ranks of several hosts");
    return 0;
  }
  t->peers = calloc((size_t)port->ranks, sizeof(*t->peers));
  if (!t->peers) return epToolFail("out of host memory");
  return epPortMapPeers(port, layer->expertOut.base, t->peers) || openKernel(t) ? -1 : 0;
}

void epTransferClose(epTransfer *t) {
  if (t->module) epDriverOpen(NULL)->moduleUnload(t->module);
  if (t->peers) epPortUnmapPeers(t->port, t->peers);
  free(t->peers);
}

/* The next rank's `to`; buffers lie at the same place in each rank's allocation. */
static unsigned char *nextOf(const epTransfer *t) {
  const epPort *port = t->port;
  unsigned char *base = t->peers[port->rank], *next = t->peers[(port->rank + 1) % port->ranks];
  return next + (t->to - base);
}

static int queueKernel(epTransfer *t, size_t bytes) {
  const epDriver *d = epDriverOpen(NULL);
  unsigned long long to = (uintptr_t)nextOf(t), from = (uintptr_t)t->from, units = bytes / 16;
  void *params[] = {&to, &from, &units};
  unsigned blocks = (unsigned)((units + UNITS_A_ROUND - 1) / UNITS_A_ROUND);
  if (blocks > t->blocks) blocks = t->blocks;
  return epDriverCheck(d,
                       d->launchKernel(t->kernel, blocks ? blocks : 1, 1, 1, THREADS, 1, 1, 0,
                                       (epCuStream)t->port->stream, params, NULL),
                       "cuLaunchKernel");
}

static int queueAllToAll(epTransfer *t, const size_t *send, const size_t *receive) {
  const epNccl *n = epNcclOpen(NULL);
  epPort *port = t->port;
  size_t out = 0, in = 0;
  int rc = n->groupStart();
  for (int r = 0; r < port->ranks && !rc; r++) {
    if (r == port->rank) continue;
    if (send[r]) rc = n->send(t->from + out, send[r], EP_NCCL_BYTES, r, port->comm, port->stream);
    if (!rc && receive[r]) rc = n->receive(t->to + in, receive[r], EP_NCCL_BYTES, r, port->comm, port->stream);
    out += send[r];
    in += receive[r];
  }
  rc = rc ? rc : n->groupEnd();
  return rc ? epToolFail("rank %d: NCCL's all-to-all: error %d: %s", port->rank, rc, n->getErrorString(rc)) : 0;
}

int epTransferQueue(epTransfer *t, epTransferKind kind, const size_t *send, const size_t *receive) {
  size_t out = 0, in = 0;
  for (int r = 0; r < t->port->ranks; r++) {
    out += r == t->port->rank ? 0 : send[r];
    in += r == t->port->rank ? 0 : receive[r];
  }
  if (out > t->room || in > t->room)
    return epToolFail(
        "rank %d: %s: %zu bytes to send and %zu to receive, but buffers of %zu: expected a larger --max-recv",
        t->port->rank, epTransferName(kind), out, in, t->room);
  if (kind == EP_TRANSFER_COPY_ENGINE) return epPortCopyAsync(t->port, nextOf(t), t->from, out);
  return kind == EP_TRANSFER_SM_STORES ? queueKernel(t, out) : queueAllToAll(t, send, receive);
}
