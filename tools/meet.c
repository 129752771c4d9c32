/* The kernel of a meeting, and what it needs of the peers. */
#include "meet.h"

#include <stdlib.h>

#include "driver.h"
#include "failure.h"

/* Thread t tells rank t that this rank is here, and waits until rank t has said so: two seconds at most, so that a rank that
 * failed before does not hold up the others' streams. */
static const char meetText[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry meet(.param .u64 mine, .param .u64 peers, .param .u32 rank, .param .u32 round) {\n"
    "  .reg .pred %p;\n  .reg .b32 %rank, %round, %thread, %seen;\n  .reg .b64 %mine, %peers, %at, %own, %start, "
    "%now;\n"
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
    "done:\n  ret;\n}\n";

struct epMeet {
  void *module, *kernel;
  void *words;  /* [ranks] u32, written by the peers */
  void *table;  /* device: the peers' words */
  void **peers; /* the same on the host */
  uint32_t round;
};

static int fill(epPort *port, struct epMeet *m) {
  const epDriver *d = epDriverOpen(NULL);
  size_t ranks = (size_t)port->ranks;
  int several = 0;
  if (epPortSeveralHosts(port, &several)) return -1;
  if (several || d->moduleLoadData(&m->module, meetText) || d->moduleGetFunction(&m->kernel, m->module, "meet")) {
    m->kernel = NULL;
    return epPortBarrier(port);
  }
  m->peers = calloc(ranks, sizeof *m->peers);
  if (!m->peers) return epToolFail("out of host memory");
  return epPortAlloc(port, &m->words, ranks * sizeof(uint32_t), "meeting") ||
                 epPortAlloc(port, &m->table, ranks * sizeof(void *), "meeting") ||
                 epPortFill(port, m->words, 0, ranks * sizeof(uint32_t)) || epPortMapPeers(port, m->words, m->peers) ||
                 epPortCopy(port, m->table, m->peers, ranks * sizeof(void *)) || epPortBarrier(port)
             ? -1
             : 0;
}

int epMeetQueue(epPort *port) {
  const epDriver *d = epDriverOpen(NULL);
  struct epMeet *m = port->meet;
  unsigned long long mine, peers;
  unsigned rank = (unsigned)port->rank, round;
  void *params[] = {&mine, &peers, &rank, &round};
  if (!m || !m->kernel) return 0;
  mine = (uintptr_t)m->words;
  peers = (uintptr_t)m->table;
  round = ++m->round;
  return epDriverCheck(
      d, d->launchKernel(m->kernel, 1, 1, 1, (unsigned)port->ranks, 1, 1, 0, (epCuStream)port->stream, params, NULL),
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
  if (m->words) epPortFree(port, m->words);
  free(m);
}
