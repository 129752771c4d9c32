/* The provider, driven through its table as NCCL drives it: 1 to 4 ranks, host memory and a GPU that is none, sockets of
 * one host and TCP, in one and in two network namespaces. What is checked is always the bytes that arrived. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "fake_gpu.h"
#include "rma.h"
#include "world.h"

#define TCP "NCCL_EP_RMA_LOCAL=0", "NCCL_SOCKET_IFNAME=lo"

static uint64_t nowMs(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

static void mustRun(const worldSetup *setup, rankBody body) {
  int failed = worldRun(setup, body);
  if (failed < 0) {
    print_message("SKIPPED: no network namespaces here (the kernel refuses them, or there is no ip command)\n");
    skip();
  }
  assert_int_equal(failed, 0);
}

/* ---- puts of all sizes, all pairs, many contexts -------------------------------------------------------------------- */

static const size_t sizes[] = {0,   1, 7, 8, 4096, 65537, (512 << 10) - 1, 512 << 10, (512 << 10) + 1, (3 << 20) + 13,
                               100, 0};
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]), ALL = 6 << 20 };

static char patternOf(int from, int to, size_t at) { return (char)(from * 91 + to * 37 + (int)(at * 7 + at / 251)); }

static int putsBody(rankOf *me) {
  enum { CONTEXTS = 5 };
  void *requests[MAX_RANKS * (SIZES + CONTEXTS)];
  int count = 0;
  /* One part of `ALL` bytes a rank to send from, one a rank to receive in. */
  CHECK(openRank(me, CONTEXTS, (size_t)2 * MAX_RANKS * ALL) == 0);
  char *out = me->data, *in = me->data + (size_t)MAX_RANKS * ALL;
  for (int to = 0; to < me->ranks; to++)
    for (size_t i = 0; i < ALL; i++) out[(size_t)to * ALL + i] = patternOf(me->rank, to, i);
  for (int to = 0; to < me->ranks; to++) {
    size_t at = 0;
    for (int i = 0; i < SIZES; i++) {
      int context = i % CONTEXTS;
      uint64_t from = (uint64_t)to * ALL + at, dst = (uint64_t)(MAX_RANKS + me->rank) * ALL + at;
      if (i % 2)
        CHECK(me->t->iput(me->ctx, context, from, me->window, sizes[i], dst, me->window, (uint32_t)to,
                          &requests[count++]) == EP_RMA_OK);
      else
        CHECK(me->t->iputSignal(me->ctx, context, from, me->window, sizes[i], dst, me->window, (uint32_t)to,
                                8u * (unsigned)me->rank, me->signal, 1, EP_RMA_SIGNAL_INC, true,
                                &requests[count++]) == EP_RMA_OK);
      at += sizes[i];
      napOf(me);
    }
    for (int context = 0; context < CONTEXTS; context++) /* nothing but a signal, as kernels raise them */
      CHECK(me->t->iputSignal(me->ctx, context, 0, NULL, 0, 0, NULL, (uint32_t)to, 8u * (unsigned)me->rank, me->signal,
                              1000, EP_RMA_SIGNAL_ADD, true, &requests[count++]) == EP_RMA_OK);
  }
  for (int from = 0; from < me->ranks; from++) {
    size_t at = 0;
    CHECK(waitSignal(me, from, SIZES / 2 + 1000 * CONTEXTS) == 0);
    for (int i = 0; i < SIZES; at += sizes[i++])
      for (size_t k = at; k < at + sizes[i]; k++) CHECK(in[(size_t)from * ALL + k] == patternOf(from, me->rank, k));
    for (size_t k = at; k < ALL; k++) CHECK(in[(size_t)from * ALL + k] == 0);
  }
  for (int i = 0; i < count; i++) CHECK(finish(me, requests[i]) == 0);
  CHECK(worldWarnings == 0);
  return closeRank(me);
}

static void putsTcp(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 3, .env = {TCP}}, putsBody);
}
static void putsLocal(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {"NCCL_EP_RMA_SOCKETS=4"}}, putsBody);
}
static void putsNamespaces(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 4, .namespaces = 2, .env = {"NCCL_SOCKET_IFNAME==ep0,ep1"}}, putsBody);
}
static void putsAlone(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 1}, putsBody);
}
static void putsThreads(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 3, .threads = 1}, putsBody);
}
static void putsGpu(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 3, .memory = GPU}, putsBody);
}
static void putsGpuThreads(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU, .threads = 1}, putsBody);
}
static void putsGpuStaged(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU, .env = {TCP}}, putsBody);
}
static void putsGpuPrivate(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU_PRIVATE}, putsBody);
}

/* Sockets spread over the named interfaces, both ends on the same cable. */
static int cablesBody(rankOf *me) {
  int cables[2] = {0, 0};
  CHECK(openRank(me, 1, 4096) == 0);
  for (int fd = 3; fd < 256; fd++) {
    struct sockaddr_in ends[2] = {{.sin_family = AF_UNSPEC}, {.sin_family = AF_UNSPEC}};
    socklen_t bytes[2] = {sizeof(ends[0]), sizeof(ends[1])};
    if (getsockname(fd, (struct sockaddr *)&ends[0], &bytes[0]) != 0 ||
        getpeername(fd, (struct sockaddr *)&ends[1], &bytes[1]) != 0 || ends[0].sin_family != AF_INET)
      continue;
    uint32_t nets[2] = {ntohl(ends[0].sin_addr.s_addr) >> 8, ntohl(ends[1].sin_addr.s_addr) >> 8};
    CHECK(nets[0] == nets[1] && (nets[0] == 0x0a5b07 || nets[0] == 0x0a5b08));
    cables[nets[0] & 1]++;
  }
  CHECK(cables[0] == 2 && cables[1] == 2);
  return closeRank(me);
}
static void cables(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .namespaces = 2, .env = {"NCCL_SOCKET_IFNAME=ep,fp", "NCCL_EP_RMA_SOCKETS=4"}},
          cablesBody);
}
static void putsIpv6(void **state) {
  (void)state;
  char text[256] = "";
  FILE *file = fopen("/proc/net/if_inet6", "re");
  bool has = file && fgets(text, sizeof(text), file) && strncmp(text, "00000000000000000000000000000001", 32) == 0;
  if (file) fclose(file);
  if (!has) {
    print_message("SKIPPED: no IPv6 loopback\n");
    skip();
  }
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP, "NCCL_SOCKET_FAMILY=AF_INET6"}}, putsBody);
}

/* ---- signals come behind the puts before them, and add up --------------------------------------------------------------- */

enum { ROUNDS = 120, ORDER_CONTEXTS = 4, BLOCK = 24 << 10 };

static size_t blockOf(int from, int context, int round) {
  return 1 + (size_t)(from * 7919 + context * 104729 + round * 15485863) % BLOCK;
}
static uint64_t addOf(int from, int context, int round) {
  return 1 + (uint64_t)(from * 31 + context * 17 + round * 7) % 1000003u;
}
static size_t placeOf(int peer, int context, int round) {
  return ((size_t)((peer * ORDER_CONTEXTS + context) * ROUNDS + round)) * BLOCK;
}

static int orderBody(rankOf *me) {
  size_t half = placeOf(me->ranks, 0, 0);
  void *requests[MAX_RANKS][ORDER_CONTEXTS][ROUNDS];
  uint64_t sums[MAX_RANKS][ORDER_CONTEXTS] = {{0}};
  int seen[MAX_RANKS][ORDER_CONTEXTS] = {{0}}, left = (me->ranks - 1) * ORDER_CONTEXTS * ROUNDS, sent = 0;
  CHECK(openRank(me, ORDER_CONTEXTS, 2 * half) == 0);
  for (int to = 0; to < me->ranks; to++)
    for (int c = 0; c < ORDER_CONTEXTS; c++)
      for (int r = 0; r < ROUNDS; r++)
        memset(me->data + placeOf(to, c, r), 1 + (me->rank * 5 + to * 3 + c + r) % 250, BLOCK);
  uint64_t deadline = nowMs() + 30000;
  while (left > 0 || sent < ROUNDS) {
    CHECK(nowMs() < deadline);
    if (sent < ROUNDS && rollOf(me) % 3 == 0) {
      for (int c = 0; c < ORDER_CONTEXTS; c++)
        for (int to = 0; to < me->ranks; to++) {
          if (to == me->rank) continue;
          size_t bytes = blockOf(me->rank, c, sent), first = rollOf(me) % (bytes + 1);
          uint64_t from = placeOf(to, c, sent), dst = half + placeOf(me->rank, c, sent);
          void *request = NULL;
          /* The block in two puts: one alone, one with the signal that stands for both. */
          CHECK(me->t->iput(me->ctx, c, from, me->window, first, dst, me->window, (uint32_t)to, &request) == EP_RMA_OK);
          int done = 0;
          CHECK(me->t->iputSignal(me->ctx, c, from + first, me->window, bytes - first, dst + first, me->window,
                                  (uint32_t)to, 8u * (unsigned)(me->rank * ORDER_CONTEXTS + c), me->signal,
                                  addOf(me->rank, c, sent), EP_RMA_SIGNAL_ADD, true,
                                  &requests[to][c][sent]) == EP_RMA_OK);
          while (!done) { /* so that no more than ROUNDS are in flight */
            CHECK(me->t->test(me->coll, request, &done) == EP_RMA_OK);
            CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
          }
        }
      sent++;
    }
    CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
    for (int from = 0; from < me->ranks; from++)
      for (int c = 0; from != me->rank && c < ORDER_CONTEXTS; c++) {
        uint64_t now = __atomic_load_n(&me->signals[from * ORDER_CONTEXTS + c], __ATOMIC_ACQUIRE);
        while (sums[from][c] != now) {
          int r = seen[from][c]++;
          CHECK(r < ROUNDS);
          sums[from][c] += addOf(from, c, r);
          CHECK(sums[from][c] <= now); /* partial sums only */
          const char *block = me->data + half + placeOf(from, c, r);
          char value = (char)(1 + (from * 5 + me->rank * 3 + c + r) % 250);
          size_t bytes = blockOf(from, c, r);
          for (size_t k = 0; k < BLOCK; k++) CHECK(block[k] == (k < bytes ? value : 0));
          left--;
        }
      }
    napOf(me);
  }
  for (int to = 0; to < me->ranks; to++)
    for (int c = 0; to != me->rank && c < ORDER_CONTEXTS; c++)
      for (int r = 0; r < ROUNDS; r++) CHECK(finish(me, requests[to][c][r]) == 0);
  CHECK(worldWarnings == 0);
  return closeRank(me);
}

static void orderTcp(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP, "NCCL_EP_RMA_SOCKETS=3"}}, orderBody);
}
static void orderNamespaces(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .namespaces = 2, .env = {"NCCL_SOCKET_IFNAME=ep"}}, orderBody);
}
static void orderGpu(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU}, orderBody);
}
static void orderGpuStaged(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU, .env = {TCP}}, orderBody);
}

/* Puts asked for in one turn, most of them neighbours of the one before: these are copied together, and still no signal comes before
 * what it stands for. */
static int neighboursBody(rankOf *me) {
  enum { PIECES = 200, PIECE = 96, GAP = 7, GROUP = 5, HALF = PIECES * (PIECE + 8) };
  void *requests[PIECES];
  size_t places[PIECES], at = 0;
  CHECK(openRank(me, 1, 2 * HALF) == 0);
  for (int i = 0; i < PIECES; i++, at += PIECE) places[i] = at += i % GAP == 0 ? 8 : 0;
  if (me->rank == 0) {
    for (int i = 0; i < PIECES; i++) memset(me->data + places[i], 1 + i, PIECE);
    CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
    for (int i = 0; i < PIECES; i++)
      if (i % GROUP == GROUP - 1)
        CHECK(me->t->iputSignal(me->ctx, 0, places[i], me->window, PIECE, HALF + places[i], me->window, 1, 0,
                                me->signal, 1, EP_RMA_SIGNAL_INC, true, &requests[i]) == EP_RMA_OK);
      else
        CHECK(me->t->iput(me->ctx, 0, places[i], me->window, PIECE, HALF + places[i], me->window, 1, &requests[i]) ==
              EP_RMA_OK);
    for (int i = 0; i < PIECES; i++) CHECK(finish(me, requests[i]) == 0);
  } else {
    uint64_t deadline = nowMs() + 20000;
    for (uint64_t told = 0; told < PIECES / GROUP;) {
      CHECK(me->t->progress(me->ctx) == EP_RMA_OK && nowMs() < deadline);
      told = __atomic_load_n(&me->signals[0], __ATOMIC_ACQUIRE);
      for (int i = 0; i < (int)told * GROUP; i++)
        for (int k = 0; k < PIECE; k++) CHECK(me->data[HALF + places[i] + (size_t)k] == (char)(1 + i));
    }
    for (int i = 0; i < PIECES; i += GAP)
      for (int k = 1; k <= 8; k++) CHECK(me->data[HALF + places[i] - (size_t)k] == 0);
  }
  CHECK(worldWarnings == 0);
  return closeRank(me);
}
static void neighbours(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU}, neighboursBody);
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU, .env = {TCP}}, neighboursBody);
}

/* ---- GPU and host memory mixed, memory whose signals others reset ------------------------------------------------------- */

static int mixedBody(rankOf *me) {
  enum { BYTES = 700000 };
  void *host = NULL, *resettable = NULL, *requests[3], *request = NULL;
  int peer = 1 - me->rank;
  CHECK(openRank(me, 2, 2 * BYTES) == 0);
  char *memory = memoryOf(me, 2 * BYTES + 8, HOST);
  uint64_t *words = memoryOf(me, 4096, GPU_PRIVATE);
  CHECK(me->t->regMrSym(me->coll, memory, 2 * BYTES + 8, EP_RMA_PTR_HOST, 0, &host) == EP_RMA_OK);
  CHECK(me->t->regMrSym(me->coll, words, 4096, EP_RMA_PTR_CUDA, 0, &resettable) == EP_RMA_OK);
  memset(memory, 7 + me->rank, BYTES);
  memset(me->data, 70 + me->rank, BYTES);
  /* Host to GPU, GPU to host, and a signal in the GPU memory that its owner also writes. */
  CHECK(me->t->iput(me->ctx, 1, 0, host, BYTES, BYTES, me->window, (uint32_t)peer, &requests[0]) == EP_RMA_OK);
  CHECK(me->t->iput(me->ctx, 1, 0, me->window, BYTES, BYTES, host, (uint32_t)peer, &requests[1]) == EP_RMA_OK);
  CHECK(me->t->iputSignal(me->ctx, 1, 0, NULL, 0, 0, NULL, (uint32_t)peer, 16, resettable, 5, EP_RMA_SIGNAL_ADD, true,
                          &requests[2]) == EP_RMA_OK);
  for (int i = 0; i < 3; i++) CHECK(finish(me, requests[i]) == 0);
  while (__atomic_load_n(&words[2], __ATOMIC_ACQUIRE) != 5) CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
  for (int i = 0; i < BYTES; i++) CHECK(me->data[BYTES + i] == 7 + peer && memory[BYTES + i] == 70 + peer);
  /* A signal in host memory stands for the GPU memory before it, too. */
  worldBarrier(me);
  memset(me->data, 90 + me->rank, BYTES);
  CHECK(me->t->iputSignal(me->ctx, 1, 0, me->window, BYTES, BYTES, me->window, (uint32_t)peer, 2 * BYTES, host, 1,
                          EP_RMA_SIGNAL_INC, true, &request) == EP_RMA_OK);
  uint64_t *hostWord = (uint64_t *)(void *)(memory + 2 * BYTES);
  while (__atomic_load_n(hostWord, __ATOMIC_ACQUIRE) != 1) CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
  for (int i = 0; i < BYTES; i++) CHECK(me->data[BYTES + i] == 90 + peer);
  CHECK(finish(me, request) == 0);
  words[2] = 100; /* the next one is added to this */
  worldBarrier(me);
  CHECK(me->t->iputSignal(me->ctx, 0, 0, NULL, 0, 0, NULL, (uint32_t)peer, 16, resettable, 0, EP_RMA_SIGNAL_INC, true,
                          &request) == EP_RMA_OK);
  CHECK(finish(me, request) == 0);
  while (__atomic_load_n(&words[2], __ATOMIC_ACQUIRE) != 101) CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
  worldBarrier(me);
  CHECK(me->t->deregMrSym(me->coll, resettable) == EP_RMA_OK);
  CHECK(me->t->deregMrSym(me->coll, host) == EP_RMA_OK);
  freeOf(memory, 2 * BYTES + 8, HOST);
  freeOf(words, 4096, GPU_PRIVATE);
  CHECK(worldWarnings == 0);
  return closeRank(me);
}
static void mixed(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU}, mixedBody);
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU, .env = {TCP}}, mixedBody);
}

/* No way between the GPUs: the same bytes by the socket. */
static int aloneBody(rankOf *me) {
  fakeAloneFn alone = NULL;
  const void *symbol = worldFake("fakeAlone");
  memcpy(&alone, &symbol, sizeof(alone));
  alone(1);
  return putsBody(me);
}
static void gpuUnreachable(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU}, aloneBody);
}

/* ---- queues ---------------------------------------------------------------------------------------------------------- */

static int depthBody(rankOf *me) {
  enum { DEPTH = 256, BYTES = 20000 };
  void *requests[2][DEPTH], *more = NULL;
  CHECK(openRank(me, 2, 2 * BYTES) == 0);
  memset(me->data, 9, BYTES);
  if (me->rank == 0) {
    for (int i = 0; i < DEPTH; i++)
      for (int c = 0; c < 2; c++)
        CHECK(me->t->iputSignal(me->ctx, c, 0, me->window, BYTES, BYTES, me->window, 1, 0, me->signal, 1,
                                EP_RMA_SIGNAL_INC, true, &requests[c][i]) == EP_RMA_OK);
    CHECK(worldWarnings == 0);
    CHECK(me->t->iput(me->ctx, 0, 0, me->window, 1, BYTES, me->window, 1, &more) == EP_RMA_INVALID_USAGE);
    CHECK(worldWarnings == 1 && strstr(worldLastWarning, "256 puts of context 0 to rank 1 are in flight"));
    usleep(100000); /* the receiver does nothing meanwhile: sockets fill up, nothing is lost */
    worldBarrier(me);
    for (int i = 0; i < DEPTH; i++)
      for (int c = 0; c < 2; c++) CHECK(finish(me, requests[c][i]) == 0);
    CHECK(me->t->iput(me->ctx, 0, 0, me->window, 1, BYTES, me->window, 1, &more) == EP_RMA_OK);
    CHECK(finish(me, more) == 0);
  } else {
    worldBarrier(me);
    CHECK(waitSignal(me, 0, 2 * DEPTH) == 0);
    for (int i = 0; i < BYTES; i++) CHECK(me->data[BYTES + i] == 9);
  }
  return closeRank(me);
}
static void depth(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP}}, depthBody);
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU}, depthBody);
}

/* Contexts and windows that are put away under operations nobody asked about: all of them still arrive. */
static int unaskedBody(rankOf *me) {
  enum { PUTS = 24, BYTES = 1 << 20 };
  void *request = NULL;
  CHECK(openRank(me, 2, 2 * BYTES) == 0);
  if (me->rank == 1) {
    usleep(150000);
    CHECK(waitSignal(me, 0, PUTS) == 0);
    for (int i = 0; i < BYTES; i++) CHECK(me->data[BYTES + i] == 33);
    return closeRank(me);
  }
  memset(me->data, 33, BYTES);
  for (int i = 0; i < PUTS; i++)
    CHECK(me->t->iputSignal(me->ctx, i % 2, 0, me->window, BYTES, BYTES, me->window, 1, 0, me->signal, 1,
                            EP_RMA_SIGNAL_INC, true, &request) == EP_RMA_OK);
  CHECK(me->t->deregMrSym(me->coll, me->window) == EP_RMA_OK);
  memset(me->data, 99, 2 * BYTES); /* it is ours again */
  for (int i = 0; i < 4; i++)
    CHECK(me->t->iputSignal(me->ctx, i % 2, 0, NULL, 0, 0, NULL, 1, 8, me->signal, 1, EP_RMA_SIGNAL_INC, true,
                            &request) == EP_RMA_OK);
  CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK);
  epRmaConfig14 config = {1, 0, 1};
  CHECK(me->t->createContext(me->coll, &config, &me->ctx) == EP_RMA_OK);
  CHECK(worldWarnings == 0);
  worldBarrier(me);
  CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK && me->t->closeColl(me->coll) == EP_RMA_OK);
  me->ctx = NULL;
  worldBarrier(me);
  return 0;
}
static void unasked(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP}}, unaskedBody);
  mustRun(&(worldSetup){.ranks = 2, .memory = GPU}, unaskedBody);
}

/* ---- coming and going -------------------------------------------------------------------------------------------------- */

static int descriptors(void) {
  int count = 0;
  for (int fd = 0; fd < 256; fd++) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

static int againBody(rankOf *me) {
  int before = 0;
  for (int i = 0; i < 12; i++) {
    void *ctx = NULL;
    CHECK(openRank(me, 1 + i % 3, 8192) == 0);
    CHECK(me->t->init(&ctx, 8, NULL) == EP_RMA_OK); /* NCCL calls it several times */
    void *request = NULL;
    /* The last signal is sent on the way out, and must arrive. */
    if (me->rank == 0) {
      memset(me->data, 40 + i, 4096);
      CHECK(me->t->iputSignal(me->ctx, 0, 0, me->window, 4096, 4096, me->window, (uint32_t)(me->ranks - 1), 8,
                              me->signal, 3, EP_RMA_SIGNAL_ADD, true, &request) == EP_RMA_OK);
      CHECK(finish(me, request) == 0);
      CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK);
      CHECK(me->t->closeColl(me->coll) == EP_RMA_OK);
      me->ctx = NULL;
      worldBarrier(me);
      freeOf(me->data, me->bytes, HOST);
      freeOf(me->signals, SIGNALS * sizeof(uint64_t), HOST);
      worldBarrier(me);
    } else {
      if (me->rank == me->ranks - 1) {
        CHECK(waitSignal(me, 1, 3) == 0);
        CHECK(me->data[8191] == 40 + i);
      }
      CHECK(closeRank(me) == 0);
    }
    CHECK(worldWarnings == 0);
    if (i == 1) before = descriptors();
  }
  CHECK(descriptors() == before);
  return 0;
}
static void again(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 3, .env = {TCP}}, againBody);
  mustRun(&(worldSetup){.ranks = 2}, againBody);
}

static int windowsBody(rankOf *me) {
  void *twin = NULL, *bad = NULL, *request = NULL, *other = NULL;
  int peer = (me->rank + 1) % me->ranks, before = (me->rank + me->ranks - 1) % me->ranks;
  CHECK(openRank(me, 1, 8192) == 0);
  /* The same memory twice, and under either name. */
  CHECK(me->t->regMrSym(me->coll, me->data, 8192, EP_RMA_PTR_HOST, 0, &twin) == EP_RMA_OK);
  CHECK(twin != me->window);
  me->data[0] = (char)(10 + me->rank);
  CHECK(me->t->iputSignal(me->ctx, 0, 0, me->window, 1, 4096, twin, (uint32_t)peer, 0, me->signal, 1, EP_RMA_SIGNAL_INC,
                          true, &request) == EP_RMA_OK);
  CHECK(finish(me, request) == 0);
  CHECK(waitSignal(me, 0, 1) == 0);
  CHECK(me->data[4096] == 10 + before);
  /* One rank cannot register: all are told, and go on. */
  epRmaResult rc = me->t->regMrSym(me->coll, me->rank == 1 ? NULL : me->data, 64, EP_RMA_PTR_HOST, 0, &bad);
  CHECK(rc == (me->rank == 1 ? EP_RMA_INVALID_ARGUMENT : EP_RMA_REMOTE_ERROR) && !bad);
  CHECK(strstr(worldLastWarning, me->rank == 1 ? "some memory is expected" : "rank 1 could not register"));
  /* Sizes may differ; what is written is held against the receiver's. */
  size_t mine = me->rank == 0 ? 4096 : 64;
  CHECK(me->t->regMrSym(me->coll, me->data, mine, EP_RMA_PTR_HOST, 0, &other) == EP_RMA_OK);
  if (me->rank == 0) {
    CHECK(me->t->iput(me->ctx, 0, 0, me->window, 65, 0, other, 1, &request) == EP_RMA_INVALID_ARGUMENT);
    CHECK(strstr(worldLastWarning, "destination of a put is 65 bytes at 0"));
  }
  /* A put to a window that its receiver has deregistered is dropped, and harms nobody. */
  worldBarrier(me);
  if (me->rank == 1) CHECK(me->t->deregMrSym(me->coll, twin) == EP_RMA_OK);
  worldBarrier(me);
  if (me->rank == 0) {
    CHECK(me->t->iput(me->ctx, 0, 0, me->window, 4096, 4096, twin, 1, &request) == EP_RMA_OK);
    CHECK(finish(me, request) == 0);
    CHECK(me->t->iputSignal(me->ctx, 0, 0, NULL, 0, 0, NULL, 1, 8, me->signal, 1, EP_RMA_SIGNAL_INC, true, &request) ==
          EP_RMA_OK);
    CHECK(finish(me, request) == 0);
  }
  if (me->rank == 1) {
    CHECK(waitSignal(me, 1, 1) == 0);
    CHECK(me->data[4097] == 0);
  } else {
    CHECK(me->t->deregMrSym(me->coll, twin) == EP_RMA_OK);
  }
  return closeRank(me); /* `other` is left to closeColl */
}
static void windows(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 3, .env = {TCP}}, windowsBody);
}

static int leftBody(rankOf *me) {
  void *request = NULL;
  CHECK(openRank(me, 1, 4096) == 0);
  if (me->rank == 1) {
    CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK);
    CHECK(me->t->closeColl(me->coll) == EP_RMA_OK);
    me->ctx = NULL;
  }
  worldBarrier(me);
  if (me->rank == 1) return 0;
  bool failed = true;
  CHECK(me->t->queryLastError(me->ctx, &failed) == EP_RMA_OK && !failed); /* to leave is no error */
  epRmaResult rc = me->t->iput(me->ctx, 0, 0, me->window, 8, 8, me->window, 1, &request);
  for (int done = 0; !rc && !done;) rc = me->t->test(me->coll, request, &done);
  CHECK(rc == EP_RMA_REMOTE_ERROR && strstr(worldLastWarning, "rank 1 has closed its communicator"));
  CHECK(me->t->queryLastError(me->ctx, &failed) == EP_RMA_OK && failed);
  CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK && me->t->closeColl(me->coll) == EP_RMA_OK);
  return 0;
}
static void putToOneThatLeft(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP}}, leftBody);
}

/* ---- losses ------------------------------------------------------------------------------------------------------------ */

/* Rank 1 dies, or stands still, while rank 0 sends to it. */
static int lossOf(rankOf *me, bool dies) {
  void *requests[64];
  CHECK(openRank(me, 2, 2 << 20) == 0);
  if (me->rank == 1) {
    if (dies) raise(SIGKILL);
    while (!me->shared->flags[0]) usleep(1000); /* no progress */
    _exit(0);
  }
  uint64_t start = nowMs();
  epRmaResult rc = EP_RMA_OK;
  int count = 0;
  while (!rc && count < 64) {
    rc = me->t->iput(me->ctx, count % 2, 0, me->window, 1 << 20, 1 << 20, me->window, 1, &requests[count]);
    count += !rc;
  }
  while (!rc && nowMs() - start < 20000) rc = me->t->progress(me->ctx);
  CHECK(rc == EP_RMA_REMOTE_ERROR);
  CHECK(nowMs() - start < 6000);
  CHECK(worldWarnings == 1);
  CHECK(strstr(worldLastWarning, dies ? "rank 1 (127.0.0.1 port" : "has taken no data for 500 ms"));
  int done = 1;
  bool failed = false;
  rc = me->t->test(me->coll, requests[count - 1], &done); /* a short-lived peer may leave it time to be sent */
  CHECK((rc == EP_RMA_REMOTE_ERROR && !done) || (dies && rc == EP_RMA_OK && done));
  CHECK(me->t->queryLastError(me->ctx, &failed) == EP_RMA_OK && failed);
  void *again = NULL;
  CHECK(me->t->regMrSym(me->coll, me->data, 64, EP_RMA_PTR_HOST, 0, &again) == EP_RMA_REMOTE_ERROR && !again);
  /* All can be put away, in any order, without waiting. */
  start = nowMs();
  CHECK(me->t->deregMrSym(me->coll, me->window) == EP_RMA_OK);
  CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK);
  CHECK(me->t->deregMrSym(me->coll, me->signal) == EP_RMA_OK);
  CHECK(me->t->closeColl(me->coll) == EP_RMA_OK);
  CHECK(nowMs() - start < 1000);
  me->shared->flags[0] = 1;
  return 0;
}
static int deathBody(rankOf *me) { return lossOf(me, true); }
static int stillBody(rankOf *me) { return lossOf(me, false); }
static void death(void **state) {
  (void)state;
  assert_int_equal(worldRun(&(worldSetup){.ranks = 2, .env = {TCP}}, deathBody), 1); /* the one that was killed */
}
static void standstill(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP}, .timeoutMs = 500}, stillBody);
}

/* The cable between the hosts is cut: both ranks find out, one with data to send, one that only waits. */
static int cutBody(rankOf *me) {
  void *request = NULL;
  CHECK(openRank(me, 1, 4096) == 0);
  if (me->rank == 0) {
    CHECK(system("ip link set ep0 down") == 0);
    CHECK(me->t->iput(me->ctx, 0, 0, me->window, 2048, 2048, me->window, 1, &request) == EP_RMA_OK);
  }
  uint64_t start = nowMs();
  epRmaResult rc = EP_RMA_OK;
  while (!rc && nowMs() - start < 20000) {
    rc = me->t->progress(me->ctx);
    usleep(1000);
  }
  CHECK(rc == EP_RMA_REMOTE_ERROR && nowMs() - start < 8000);
  CHECK(worldWarnings == 1 &&
        strstr(worldLastWarning, me->rank == 0 ? "rank 1 (10.91.7.2 port" : "rank 0 (10.91.7.1 port"));
  CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK && me->t->closeColl(me->coll) == EP_RMA_OK);
  return 0;
}
static void cut(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .namespaces = 2, .env = {"NCCL_SOCKET_IFNAME=ep"}, .timeoutMs = 1000}, cutBody);
}

/* A rank that never registers. */
static int absentBody(rankOf *me) {
  void *window = NULL;
  CHECK(connectRank(me) == EP_RMA_OK);
  char *memory = memoryOf(me, 4096, HOST);
  uint64_t start = nowMs();
  if (me->rank == 0) {
    CHECK(me->t->regMrSym(me->coll, memory, 4096, EP_RMA_PTR_HOST, 0, &window) == EP_RMA_REMOTE_ERROR && !window);
    CHECK(nowMs() - start < 3000 && strstr(worldLastWarning, "rank 1 did not register window 0 within 500 ms"));
  }
  worldBarrier(me);
  CHECK(me->t->closeColl(me->coll) == EP_RMA_OK);
  return 0;
}
static void absent(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .timeoutMs = 500}, absentBody);
}

/* What a peer out of its mind may send: named in an error, never followed. */
static const struct {
  epRmaHeader header;
  const char *words;
} frames[] = {
    {{0x12345678, 0, 0, 0, 0}, "unknown type 0x12345678"},
    {{EP_RMA_FRAME_DATA, 0, 0, 0, 0}, "a frame of 0 bytes"},
    {{EP_RMA_FRAME_DATA, 0, 0, EP_RMA_CHUNK + 1, 0}, "a frame of 524289 bytes"},
    {{EP_RMA_FRAME_DATA, 0, 4095, 2, 0}, "writes 2 bytes at 4095 of window 0"},
    {{EP_RMA_FRAME_DATA, 0, UINT64_MAX, 2, 0}, "of window 0"},
    {{EP_RMA_FRAME_DATA, 2, 0, 2, 0}, "window 2, which is not registered"},
    {{EP_RMA_FRAME_SIGNAL, 1, 8u * SIGNALS - 7, 0, 1}, "of window 1"},
    {{EP_RMA_FRAME_SIGNAL, 1, 3, 0, 1}, "not aligned"},
    {{EP_RMA_FRAME_SIGNAL, UINT32_MAX, 0, 0, 1}, "which is not registered"},
    {{EP_RMA_FRAME_WINDOW, 7, 0, 64, 0}, "window 2 is expected"},
    {{EP_RMA_FRAME_WINDOW, 1, 0, 64, 0}, "registers window 1 twice"},
};
static int frameNumber;

static int framesBody(rankOf *me) {
  CHECK(openRank(me, 1, 4096) == 0);
  if (me->rank == 1) {
    struct sockaddr_storage address;
    int fd = 3, type;
    for (; fd < 256; fd++) { /* a socket that is connected */
      socklen_t bytes = sizeof(address), typeBytes = sizeof(type);
      if (getpeername(fd, (struct sockaddr *)&address, &bytes) == 0 &&
          getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &typeBytes) == 0)
        break;
    }
    CHECK(fd < 256);
    CHECK(send(fd, &frames[frameNumber].header, sizeof(epRmaHeader), MSG_NOSIGNAL) == sizeof(epRmaHeader));
    while (!me->shared->flags[0]) usleep(1000);
    _exit(0);
  }
  uint64_t start = nowMs();
  epRmaResult rc = EP_RMA_OK;
  while (!rc && nowMs() - start < 5000) rc = me->t->progress(me->ctx);
  CHECK(rc == EP_RMA_REMOTE_ERROR && worldWarnings == 1);
  CHECK(strstr(worldLastWarning, frames[frameNumber].words));
  for (size_t i = 0; i < SIGNALS; i++) CHECK(me->signals[i] == 0);
  for (size_t i = 0; i < 4096; i++) CHECK(me->data[i] == 0);
  CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK && me->t->closeColl(me->coll) == EP_RMA_OK);
  me->shared->flags[0] = 1;
  return 0;
}
static void wildFrames(void **state) {
  (void)state;
  for (frameNumber = 0; frameNumber < (int)(sizeof(frames) / sizeof(frames[0])); frameNumber++)
    mustRun(&(worldSetup){.ranks = 2, .env = {TCP, "NCCL_EP_RMA_SOCKETS=1"}}, framesBody);
}

/* Each call of CUDA's fails once: an error, and everything is given back. */
static int cudaFailsBody(rankOf *me) {
  enum { BYTES = 8192 };
  fakeFailFn failCall = NULL;
  fakeAliveFn alive = NULL;
  const void *symbol = worldFake("fakeFail");
  memcpy(&failCall, &symbol, sizeof(failCall));
  symbol = worldFake("fakeAlive");
  memcpy(&alive, &symbol, sizeof(alive));
  char *data = memoryOf(me, BYTES, GPU);
  uint64_t *signals = memoryOf(me, 4096, GPU_PRIVATE);
  int failed = 0, n = 1;
  for (;; n += n < 30 ? 1 : n < 1060 ? 97 : 1) { /* most are the making of events, one like the other */
    void *window = NULL, *signal = NULL, *request = NULL;
    CHECK(connectRank(me) == EP_RMA_OK);
    epRmaConfig14 config = {1, 0, 1};
    CHECK(me->t->createContext(me->coll, &config, &me->ctx) == EP_RMA_OK);
    memset(data, 5, BYTES);
    memset(signals, 0, 4096);
    int warnings = worldWarnings;
    failCall(n);
    epRmaResult rc = me->t->regMrSym(me->coll, data, BYTES, EP_RMA_PTR_CUDA, 0, &window);
    if (!rc) rc = me->t->regMrSym(me->coll, signals, 4096, EP_RMA_PTR_CUDA, 0, &signal);
    data[0] = 6;
    if (!rc)
      rc = me->t->iputSignal(me->ctx, 0, 0, window, 100, 4096, window, 0, 8, signal, 2, EP_RMA_SIGNAL_ADD, true,
                             &request);
    for (int done = 0; !rc && !done;) {
      rc = me->t->progress(me->ctx);
      if (!rc) rc = me->t->test(me->coll, request, &done);
    }
    if (!rc) CHECK(data[4096] == 6 && signals[1] == 2);
    epRmaResult last = me->t->destroyContext(me->ctx);
    me->ctx = NULL;
    if (signal && me->t->deregMrSym(me->coll, signal)) last = EP_RMA_CUDA_ERROR;
    if (window && me->t->deregMrSym(me->coll, window)) last = EP_RMA_CUDA_ERROR;
    epRmaResult closed = me->t->closeColl(me->coll);
    CHECK(closed == EP_RMA_OK || closed == EP_RMA_CUDA_ERROR);
    if (closed) last = closed;
    bool never = failCall(0) > 0;
    CHECK(alive() == 0);
    if (rc || last) CHECK(worldWarnings > warnings && (rc == EP_RMA_OK || rc == EP_RMA_CUDA_ERROR));
    failed += rc || last;
    if (never) break;
    CHECK(n < 2000);
  }
  CHECK(failed > 30);
  freeOf(data, BYTES, GPU);
  freeOf(signals, 4096, GPU_PRIVATE);
  return 0;
}
static void cudaFails(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 1}, cudaFailsBody);
}

/* ---- secrets ----------------------------------------------------------------------------------------------------------- */

static void keyedHash(void **state) {
  (void)state;
  uint8_t key[16], message[64], out[16];
  for (int i = 0; i < 64; i++) message[i] = (uint8_t)i;
  memcpy(key, message, 16);
  /* The first and the sixteenth vector of SipHash's own list. */
  static const uint8_t none[] = {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6,
                                 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93};
  epRmaKeyedHash(key, message, 0, out);
  assert_memory_equal(out, none, 16);
  uint8_t other[16];
  for (size_t bytes = 1; bytes < 64; bytes++) {
    epRmaKeyedHash(key, message, bytes, out);
    message[bytes - 1] ^= 1;
    epRmaKeyedHash(key, message, bytes, other);
    message[bytes - 1] ^= 1;
    assert_false(epRmaSameSecret(out, other));
    epRmaKeyedHash(key, message, bytes - 1, other);
    assert_false(epRmaSameSecret(out, other));
  }
  assert_true(epRmaSameSecret(out, out));
}

static int wrongSecretBody(rankOf *me) {
  uint64_t start = nowMs();
  int rc = connectRank(me);
  CHECK(rc == EP_RMA_REMOTE_ERROR && !me->coll);
  CHECK(nowMs() - start < 5000);
  CHECK(worldWarnings == 1 || me->rank == 0);
  CHECK(strstr(worldLastWarning, me->rank == 0 ? "rank 1" : "no connection with rank 0"));
  CHECK(strstr(worldLastWarning, me->rank == 0 ? "did not connect to rank 0" : "does not hold the secret"));
  return 0;
}
static void wrongSecret(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP}, .spoiled = 2, .timeoutMs = 1000}, wrongSecretBody);
  mustRun(&(worldSetup){.ranks = 2, .spoiled = 2, .timeoutMs = 1000}, wrongSecretBody);
}

/* Strangers call at rank 0 before its peer does: with noise, with silence, with a hello and no proof. */
static int strangerBody(rankOf *me) {
  worldShared *shared = me->shared;
  void *handles[2] = {shared->handles[0], shared->handles[1]}, *ctx = NULL;
  me->t = worldTable14();
  CHECK(me->t && me->t->init(&ctx, 1, NULL) == EP_RMA_OK);
  CHECK(me->t->listen(ctx, 0, shared->handles[me->rank], &me->listen) == EP_RMA_OK);
  worldBarrier(me);
  int fds[3] = {-1, -1, -1};
  if (me->rank == 1) {
    uint16_t port;
    memcpy(&port, shared->handles[0] + 44, sizeof(port)); /* the first of the ports */
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = port, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct {
      uint64_t magic;
      uint32_t from, to, socket, ranks;
      uint8_t nonce[16];
    } hello = {0x316f6c6c65687065ull, 1, 0, 0, 2, {0}};
    for (int i = 0; i < 3; i++) {
      fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      CHECK(connect(fds[i], (struct sockaddr *)&to, sizeof(to)) == 0);
    }
    char noise[4096], answer[32];
    memset(noise, 0x5a, sizeof(noise));
    CHECK(send(fds[0], noise, sizeof(noise), MSG_NOSIGNAL) == sizeof(noise));
    CHECK(send(fds[2], &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello));
    worldBarrier(me);
    CHECK(recv(fds[2], answer, sizeof(answer), MSG_WAITALL) == sizeof(answer));
    CHECK(send(fds[2], noise, 16, MSG_NOSIGNAL) == 16);  /* no proof */
    CHECK(recv(fds[2], answer, sizeof(answer), 0) <= 0); /* and shown the door */
    CHECK(recv(fds[0], answer, sizeof(answer), 0) <= 0);
  } else {
    worldBarrier(me);
  }
  CHECK(me->t->connect(ctx, handles, 2, me->rank, me->listen, &me->coll) == EP_RMA_OK);
  CHECK(me->t->closeListen(me->listen) == EP_RMA_OK);
  if (me->rank == 1)
    for (int i = 0; i < 3; i++) close(fds[i]);
  worldBarrier(me);
  CHECK(me->t->closeColl(me->coll) == EP_RMA_OK);
  return 0;
}
static void strangers(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP}}, strangerBody);
}

/* ---- arguments --------------------------------------------------------------------------------------------------------- */

static int argumentsBody(rankOf *me) {
  void *request = NULL, *window = NULL, *ctx = NULL, *listen = NULL;
  int count = 0, done = 0;
  bool failed = false;
  char handle[EP_RMA_HANDLE_BYTES] = "";
  void *handles[] = {handle};
  epRmaProperties properties;
  CHECK(openRank(me, 2, 4096) == 0);
  const epRmaTable14 *t = me->t;
  CHECK(strcmp(t->name, "ep") == 0);
  CHECK(t->devices(&count) == EP_RMA_OK && count == 1);
  CHECK(t->getProperties(0, &properties) == EP_RMA_OK);
  CHECK(properties.netDeviceType == EP_RMA_DEVICE_GIN_PROXY && properties.ptrSupport == 3 && !properties.pciPath);
  CHECK(properties.maxRecvs == 8 && properties.speed > 0 && properties.railId == -1 &&
        properties.maxP2pBytes > 1u << 30);
#define REFUSED(call, code, words)          \
  do {                                      \
    int lines = worldWarnings;              \
    CHECK((call) == (code));                \
    CHECK(worldWarnings == lines + 1);      \
    CHECK(strstr(worldLastWarning, words)); \
  } while (0)
  REFUSED(t->getProperties(1, &properties), EP_RMA_INVALID_ARGUMENT, "device 1 does not exist");
  REFUSED(t->listen(NULL, 3, handle, &listen), EP_RMA_INVALID_ARGUMENT, "device 3 does not exist");
  REFUSED(t->listen(NULL, 0, NULL, &listen), EP_RMA_INVALID_ARGUMENT, "handle is NULL");
  REFUSED(t->init(NULL, 0, NULL), EP_RMA_INVALID_ARGUMENT, "ctx is NULL");
  CHECK(t->listen(NULL, 0, handle, &listen) == EP_RMA_OK);
  REFUSED(t->connect(NULL, handles, 1, 1, listen, &window), EP_RMA_INVALID_ARGUMENT, "rank 1 of 1");
  handle[0] ^= 1;
  REFUSED(t->connect(NULL, handles, 1, 0, listen, &window), EP_RMA_INVALID_ARGUMENT, "not of this version");
  handle[0] ^= 1, handle[30] ^= 1;
  REFUSED(t->connect(NULL, handles, 1, 0, listen, &window), EP_RMA_INVALID_ARGUMENT, "not that of the listener");
  CHECK(t->closeListen(listen) == EP_RMA_OK);
  epRmaConfig14 config = {0, 0, 1};
  REFUSED(t->createContext(me->coll, &config, &ctx), EP_RMA_INVALID_ARGUMENT, "0 contexts are asked for");
  config.nContexts = 1, config.rankStride = 3;
  REFUSED(t->createContext(me->coll, &config, &ctx), EP_RMA_INVALID_ARGUMENT, "steps of 3");
  REFUSED(t->createContext(NULL, &config, &ctx), EP_RMA_INVALID_ARGUMENT, "collComm is NULL");
  REFUSED(t->iput(me->ctx, 2, 0, me->window, 1, 0, me->window, 0, &request), EP_RMA_INVALID_ARGUMENT, "context 2");
  REFUSED(t->iput(me->ctx, 0, 0, me->window, 1, 0, me->window, 2, &request), EP_RMA_INVALID_ARGUMENT, "rank 2");
  REFUSED(t->iput(me->ctx, 0, 4096, me->window, 1, 0, me->window, 0, &request), EP_RMA_INVALID_ARGUMENT, "source");
  REFUSED(t->iput(me->ctx, 0, 0, me->window, 1, UINT64_MAX, me->window, 0, &request), EP_RMA_INVALID_ARGUMENT,
          "destination");
  REFUSED(t->iput(me->ctx, 0, 0, NULL, 1, 0, me->window, 0, &request), EP_RMA_INVALID_ARGUMENT, "source");
  REFUSED(t->iputSignal(me->ctx, 0, 0, NULL, 0, 0, NULL, 0, 4, me->signal, 1, EP_RMA_SIGNAL_ADD, true, &request),
          EP_RMA_INVALID_ARGUMENT, "multiple of 8");
  REFUSED(
      t->iputSignal(me->ctx, 0, 0, NULL, 0, 0, NULL, 0, 8u * SIGNALS, me->signal, 1, EP_RMA_SIGNAL_ADD, true, &request),
      EP_RMA_INVALID_ARGUMENT, "signal of a put");
  REFUSED(t->iputSignal(me->ctx, 0, 0, NULL, 0, 0, NULL, 0, 0, me->signal, 1, 3, true, &request),
          EP_RMA_INVALID_ARGUMENT, "signal operation 3");
  REFUSED(t->iputSignal(me->ctx, 0, 0, NULL, 0, 0, NULL, 0, 0, NULL, 1, 1, true, &request), EP_RMA_INVALID_ARGUMENT,
          "signalMhandle is NULL");
  REFUSED(t->iget(me->ctx, 0, 0, me->window, 1, 0, me->window, 0, &request), EP_RMA_INVALID_USAGE,
          "get is not supported");
  REFUSED(t->regMrSymDmaBuf(me->coll, me->data, 1, 2, 0, 0, 0, &window), EP_RMA_INVALID_USAGE, "DMA-BUF");
  REFUSED(t->test(me->coll, NULL, &done), EP_RMA_INVALID_ARGUMENT, "request is NULL");
  REFUSED(t->closeColl(me->coll), EP_RMA_INVALID_USAGE, "while it has contexts");
  request = &done;
  CHECK(t->iflush(me->ctx, 0, me->window, 0, &request) == EP_RMA_OK && !request);
  CHECK(t->queryLastError(me->ctx, &failed) == EP_RMA_OK && !failed);
  CHECK(t->regMrSym(me->coll, me->data, 4096, 4, 0, &window) == EP_RMA_INVALID_ARGUMENT && !window);
  CHECK(strstr(worldLastWarning, "of type 0x4"));
  CHECK(t->regMrSym(me->coll, me->data, 0, 1, 0, &window) == EP_RMA_INVALID_ARGUMENT && !window);
  /* Host memory passed off as a GPU's. */
  CHECK(t->regMrSym(me->coll, me->data, 4096, EP_RMA_PTR_CUDA, 0, &window) == EP_RMA_CUDA_ERROR && !window);
  CHECK(strstr(worldLastWarning, "not CUDA's"));
  setenv("NCCL_SOCKET_IFNAME", "=nosuch0", 1);
  REFUSED(t->devices(&count), EP_RMA_SYSTEM_ERROR, "no network interface");
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  setenv("NCCL_EP_RMA_SOCKETS", "many", 1);
  REFUSED(t->listen(NULL, 0, handle, &listen), EP_RMA_INVALID_USAGE, "a number from 1 to 8");
  return closeRank(me);
}
static void arguments(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2, .env = {TCP}}, argumentsBody);
}

/* The older table is the same provider. */
static int olderBody(rankOf *me) {
  const epRmaTable13 *t = worldTable13("ncclRmaPlugin_v13"), *gin = worldTable13("ncclGinPlugin_v13");
  void *ginWindow = NULL, *ctx = NULL, *request = NULL;
  epRmaDeviceHandle *device = NULL;
  CHECK(t && gin && memcmp(t, gin, sizeof(*t)) == 0);
  CHECK(openRank(me, 1, 4096) == 0);
  epRmaConfig13 config = {4, 0, 2, 64, 0};
  CHECK(t->createContext(me->coll, &config, &ctx, &device) == EP_RMA_OK);
  CHECK(device && device->netDeviceType == EP_RMA_DEVICE_GIN_PROXY && device->needsProxyProgress == 1);
  void *window = NULL;
  CHECK(t->regMrSym(me->coll, me->data, 4096, EP_RMA_PTR_HOST, 0, &window, &ginWindow) == EP_RMA_OK);
  CHECK(window && window == ginWindow);
  me->data[0] = (char)(3 + me->rank);
  CHECK(t->iputSignal(ctx, 1, 0, window, 1, 100, window, (uint32_t)(1 - me->rank), 8, me->signal, 4, EP_RMA_SIGNAL_ADD,
                      &request) == EP_RMA_OK);
  CHECK(finish(me, request) == 0);
  CHECK(waitSignal(me, 1, 4) == 0);
  CHECK(me->data[100] == 3 + 1 - me->rank);
  void *theirs[] = {me->coll, NULL}; /* NCCL 2.30.4's own context, as it begins */
  bool failed = true;
  CHECK(t->queryLastError(theirs, &failed) == EP_RMA_OK && !failed);
  CHECK(t->destroyContext(ctx) == EP_RMA_OK);
  return closeRank(me);
}
static void older(void **state) {
  (void)state;
  mustRun(&(worldSetup){.ranks = 2}, olderBody);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(keyedHash),
      cmocka_unit_test(putsAlone),
      cmocka_unit_test(putsTcp),
      cmocka_unit_test(putsIpv6),
      cmocka_unit_test(cables),
      cmocka_unit_test(putsLocal),
      cmocka_unit_test(putsNamespaces),
      cmocka_unit_test(putsThreads),
      cmocka_unit_test(putsGpu),
      cmocka_unit_test(putsGpuThreads),
      cmocka_unit_test(putsGpuStaged),
      cmocka_unit_test(putsGpuPrivate),
      cmocka_unit_test(gpuUnreachable),
      cmocka_unit_test(orderTcp),
      cmocka_unit_test(orderNamespaces),
      cmocka_unit_test(orderGpu),
      cmocka_unit_test(orderGpuStaged),
      cmocka_unit_test(neighbours),
      cmocka_unit_test(mixed),
      cmocka_unit_test(depth),
      cmocka_unit_test(unasked),
      cmocka_unit_test(wildFrames),
      cmocka_unit_test(cudaFails),
      cmocka_unit_test(again),
      cmocka_unit_test(windows),
      cmocka_unit_test(putToOneThatLeft),
      cmocka_unit_test(death),
      cmocka_unit_test(standstill),
      cmocka_unit_test(cut),
      cmocka_unit_test(absent),
      cmocka_unit_test(wrongSecret),
      cmocka_unit_test(strangers),
      cmocka_unit_test(arguments),
      cmocka_unit_test(older),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
