/* The kernel of a meeting, and what it needs of the peers. */
#include "meet.h"

#include <stdlib.h>

#include "driver.h"
#include "failure.h"

/* Thread t tells rank t that this rank is here, and waits until rank t has said so: two seconds at most, so that a rank that
 * failed before does not hold up the others' streams. */
static const char meetText[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry meet(.param .u64 mine, .param .u64 peers, .param .u32 rank, .param .u32 round, .param "
    ".u64 stamp) {\n"
    "  .reg .pred %p;\n  .reg .b32 %rank, %round, %thread, %seen;\n  .reg .b64 %mine, %peers, %at, %own, %start, "
    "%now, %stamp;\n"
    "  ld.param.u64 %mine, [mine];\n  ld.param.u64 %peers, [peers];\n"
    "  ld.param.u32 %rank, [rank];\n  ld.param.u32 %round, [round];\n"
    "  mov.u32 %thread, %tid.x;\n"
    "  mul.wide.u32 %at, %thread, 8;\n  add.u64 %at, %peers, %at;\n  ld.global.u64 %at, [%at];\n"
    "  mul.wide.u32 %own, %rank, 4;\n  add.u64 %at, %at, %own;\n"
    "  st.release.sys.global.u32 [%at], %round;\n"
    "  mul.wide.u32 %own, %thread, 4;\n  add.u64 %own, %mine, %own;\n"
    "  mov.u64 %start, %globaltimer;\n"
    "look:\n"
    "  ld.acquire.sys.global.u32 %seen, [%own];\n  sub.u32 %seen, %seen, %round;\n"
    "  setp.ge.s32 %p, %seen, 0;\n  @%p bra done;\n"
    "  mov.u64 %now, %globaltimer;\n  sub.u64 %now, %now, %start;\n"
    "  setp.lt.u64 %p, %now, 2000000000;\n  @%p bra look;\n"
    "done:\n  setp.ne.u32 %p, %thread, 0;\n  @%p bra left;\n"
    "  ld.param.u64 %stamp, [stamp];\n  mov.u64 %now, %globaltimer;\n  st.global.u64 [%stamp], %now;\n"
    "left:\n  ret;\n}\n"
    ".visible .entry delay(.param .u64 wanted) {\n  .reg .pred %p;\n  .reg .b64 %start, %now, %wanted;\n"
    "  ld.param.u64 %wanted, [wanted];\n  mov.u64 %start, %globaltimer;\n"
    "look:\n  mov.u64 %now, %globaltimer;\n  sub.u64 %now, %now, %start;\n  setp.lt.u64 %p, %now, %wanted;\n"
    "  @%p bra look;\n  ret;\n}\n";

struct epMeet {
  void *module, *kernel, *delay;
  void *words;  /* [ranks] u32, written by the peers */
  void *table;  /* device: the peers' words */
  void **peers; /* the same on the host */
  void *stamp;  /* device: this GPU's clock at the end of the last meeting */
  uint32_t round;
};

static int fill(epPort *port, struct epMeet *m) {
  const epDriver *d = epDriverOpen(NULL);
  size_t ranks = (size_t)port->ranks;
  int several = 0;
  if (epPortSeveralHosts(port, &several)) return -1;
  if (several || d->moduleLoadData(&m->module, meetText) || d->moduleGetFunction(&m->kernel, m->module, "meet") ||
      d->moduleGetFunction(&m->delay, m->module, "delay")) {
    m->kernel = NULL;
    return epPortBarrier(port);
  }
  m->peers = calloc(ranks, sizeof *m->peers);
  if (!m->peers) return epToolFail("out of host memory");
  return epPortAlloc(port, &m->words, ranks * sizeof(uint32_t), "meeting") ||
                 epPortAlloc(port, &m->table, ranks * sizeof(void *), "meeting") ||
                 epPortAlloc(port, &m->stamp, sizeof(uint64_t), "meeting") ||
                 epPortFill(port, m->words, 0, ranks * sizeof(uint32_t)) || epPortMapPeers(port, m->words, m->peers) ||
                 epPortCopy(port, m->table, m->peers, ranks * sizeof(void *)) || epPortBarrier(port)
             ? -1
             : 0;
}

int epMeetQueue(epPort *port) {
  const epDriver *d = epDriverOpen(NULL);
  struct epMeet *m = port->meet;
  unsigned long long mine, peers, stamp;
  unsigned rank = (unsigned)port->rank, round;
  void *params[] = {&mine, &peers, &rank, &round, &stamp};
  if (!m || !m->kernel) return 0;
  mine = (uintptr_t)m->words;
  peers = (uintptr_t)m->table;
  stamp = (uintptr_t)m->stamp;
  round = ++m->round;
  return epDriverCheck(
      d, d->launchKernel(m->kernel, 1, 1, 1, (unsigned)port->ranks, 1, 1, 0, (epCuStream)port->stream, params, NULL),
      "cuLaunchKernel");
}

int epMeetStamp(epPort *port, unsigned long long *ns) {
  *ns = 0;
  return port->meet && port->meet->kernel ? epPortCopy(port, ns, port->meet->stamp, sizeof(*ns)) : 0;
}

int epMeetDelay(epPort *port, unsigned microseconds) {
  const epDriver *d = port->cuda ? epDriverOpen(NULL) : NULL;
  unsigned long long ns = 1000ull * microseconds;
  void *params[] = {&ns};
  if (!port->cuda)
    return ncclEpEmuStreamDelay(port->comm, port->stream, ns) == ncclSuccess
               ? 0
               : epToolFail("rank %d: ncclEpEmuStreamDelay: %s", port->rank, ncclEpGetLastErrorString());
  if (!port->meet || !port->meet->delay) return epToolFail("rank %d: this machine cannot delay a stream", port->rank);
  return epDriverCheck(d,
                       d->launchKernel(port->meet->delay, 1, 1, 1, 1, 1, 1, 0, (epCuStream)port->stream, params, NULL),
                       "cuLaunchKernel");
}

int epMeetReady(epPort *port) {
  if (port->meet || !port->cuda || port->ranks < 2 || port->ranks > 1024) return 0;
  port->meet = calloc(1, sizeof *port->meet);
  if (!port->meet) return epToolFail("out of host memory");
  return fill(port, port->meet) || epMeetQueue(port) || epPortSync(port) ? -1 : 0;
}

void epMeetClose(epPort *port) {
  struct epMeet *m = port->meet;
  if (!m) return;
  port->meet = NULL;
  if (m->module) epDriverOpen(NULL)->moduleUnload(m->module);
  if (m->peers) epPortUnmapPeers(port, m->peers);
  free(m->peers);
  if (m->table) epPortFree(port, m->table);
  if (m->stamp) epPortFree(port, m->stamp);
  if (m->words) epPortFree(port, m->words);
  free(m);
}
