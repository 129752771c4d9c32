/* Ranks as processes or threads, their bootstrap, and two network namespaces joined by a virtual cable. */
#define _GNU_SOURCE
#include "world.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fake_gpu.h"

enum { DEADLINE_S = 40 };

_Atomic int worldWarnings;
char worldLastWarning[512];

static void logger(int level, unsigned long subsystems, const char *where, int line, const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  if (getenv("EP_RMA_TEST_LOG")) fprintf(stderr, "[%d] %s:%d %s %lx\n", (int)getpid(), where, line, text, subsystems);
  if (level != EP_RMA_LOG_WARN) return;
  worldWarnings++;
  memcpy(worldLastWarning, text, sizeof(text));
}

static const void *symbolOf(const char *name) {
  void *lib = dlopen(getenv("EP_RMA_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
  if (!lib) fprintf(stderr, "%s\n", dlerror());
  return lib ? dlsym(lib, name) : NULL;
}
const epRmaTable14 *worldTable14(void) { return symbolOf("ncclRmaPlugin_v14"); }
const epRmaTable13 *worldTable13(const char *symbol) { return symbolOf(symbol); }
const void *worldFake(const char *symbol) {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW);
  return lib ? dlsym(lib, symbol) : NULL;
}

static uint64_t nowMs(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

void worldBarrier(rankOf *me) {
  worldShared *shared = me->shared;
  unsigned round = shared->round;
  if (atomic_fetch_add(&shared->arrived, 1) + 1 == (unsigned)me->ranks) {
    shared->arrived = 0;
    shared->round++;
  }
  while (shared->round == round && !shared->failed) {
    /* As NCCL's own thread does meanwhile. */
    if (me->ctx) me->t->progress(me->ctx);
    usleep(50);
  }
}

unsigned rollOf(rankOf *me) {
  me->dice ^= me->dice << 13, me->dice ^= me->dice >> 7, me->dice ^= me->dice << 17;
  return (unsigned)(me->dice >> 33);
}

void napOf(rankOf *me) {
  unsigned face = rollOf(me) % 32;
  if (face == 0) usleep(rollOf(me) % 300);
  if (face < 4) sched_yield();
}

static void *(*fakeAllocateOf(void))(size_t, int) {
  fakeAllocateFn fn = NULL;
  const void *symbol = worldFake("fakeAllocate");
  memcpy(&fn, &symbol, sizeof(fn));
  return fn;
}

void *memoryOf(rankOf *me, size_t bytes, memoryKind kind) {
  (void)me;
  if (kind == HOST) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
  }
  fakeAllocateFn allocate = fakeAllocateOf();
  return allocate ? allocate(bytes, kind == GPU) : NULL;
}

void freeOf(void *memory, size_t bytes, memoryKind kind) {
  fakeReleaseFn release = NULL;
  const void *symbol = kind == HOST ? NULL : worldFake("fakeRelease");
  memcpy(&release, &symbol, sizeof(release));
  if (kind == HOST)
    munmap(memory, bytes);
  else if (release)
    release(memory);
}

int connectRank(rankOf *me) {
  worldShared *shared = me->shared;
  void *handles[MAX_RANKS], *ctx = NULL;
  char copies[MAX_RANKS][EP_RMA_HANDLE_BYTES];
  me->t = worldTable14();
  CHECK(me->t);
  CHECK(me->t->init(&ctx, 7, logger) == EP_RMA_OK);
  CHECK(me->t->listen(ctx, 0, shared->handles[me->rank], &me->listen) == EP_RMA_OK);
  worldBarrier(me);
  memcpy(copies, shared->handles, sizeof(copies));
  if (me->setup->spoiled && me->rank == 0) copies[me->setup->spoiled - 1][30] ^= 1; /* in the secret */
  if (me->setup->spoiled && me->rank == me->setup->spoiled - 1) copies[0][30] ^= 1;
  for (int rank = 0; rank < me->ranks; rank++) handles[rank] = copies[rank];
  /* NCCL 2.30.7 gives connect a context that is not ours. */
  epRmaResult rc = me->t->connect((void *)0x1, handles, me->ranks, me->rank, me->listen, &me->coll);
  CHECK(me->t->closeListen(me->listen) == EP_RMA_OK);
  me->listen = NULL;
  return (int)rc;
}

int openRank(rankOf *me, int contexts, size_t bytes) {
  CHECK(connectRank(me) == EP_RMA_OK);
  memoryKind kind = me->setup->memory;
  epRmaConfig14 config = {contexts, 0, 1};
  CHECK(me->t->createContext(me->coll, &config, &me->ctx) == EP_RMA_OK);
  me->contexts = contexts, me->bytes = bytes;
  me->data = memoryOf(me, bytes, kind);
  me->signals = memoryOf(me, SIGNALS * sizeof(uint64_t), kind == HOST ? HOST : GPU_PRIVATE);
  CHECK(me->data && me->signals);
  int type = kind == HOST ? EP_RMA_PTR_HOST : EP_RMA_PTR_CUDA;
  CHECK(me->t->regMrSym(me->coll, me->data, bytes, type, 0, &me->window) == EP_RMA_OK);
  CHECK(me->t->regMrSym(me->coll, me->signals, SIGNALS * sizeof(uint64_t), type, EP_RMA_MR_SIGNAL_NEVER_RESET,
                        &me->signal) == EP_RMA_OK);
  worldBarrier(me);
  return 0;
}

int closeRank(rankOf *me) {
  memoryKind kind = me->setup->memory;
  worldBarrier(me);
  CHECK(me->t->destroyContext(me->ctx) == EP_RMA_OK);
  me->ctx = NULL;
  CHECK(me->t->deregMrSym(me->coll, me->signal) == EP_RMA_OK);
  CHECK(me->t->deregMrSym(me->coll, me->window) == EP_RMA_OK);
  CHECK(me->t->closeColl(me->coll) == EP_RMA_OK);
  CHECK(me->t->finalize(NULL) == EP_RMA_OK);
  me->coll = NULL;
  freeOf(me->data, me->bytes, kind);
  freeOf(me->signals, SIGNALS * sizeof(uint64_t), kind == HOST ? HOST : GPU_PRIVATE);
  worldBarrier(me);
  if (kind == HOST || me->setup->threads) return 0;
  fakeAliveFn alive = NULL;
  fakeMistakesFn mistakes = NULL;
  const void *symbol = worldFake("fakeAlive");
  memcpy(&alive, &symbol, sizeof(alive));
  symbol = worldFake("fakeMistakes");
  memcpy(&mistakes, &symbol, sizeof(mistakes));
  CHECK(alive() == 0);
  CHECK(mistakes() == 0);
  return 0;
}

int finish(rankOf *me, void *request) {
  uint64_t deadline = nowMs() + 20000;
  for (int done = 0; !done;) {
    CHECK(me->t->test(me->coll, request, &done) == EP_RMA_OK);
    if (done) break;
    CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
    CHECK(nowMs() < deadline);
    napOf(me);
  }
  return 0;
}

int waitSignal(rankOf *me, int index, uint64_t value) {
  uint64_t deadline = nowMs() + 20000;
  while (__atomic_load_n(&me->signals[index], __ATOMIC_ACQUIRE) != value) {
    CHECK(me->t->progress(me->ctx) == EP_RMA_OK);
    CHECK(nowMs() < deadline);
    napOf(me);
  }
  return 0;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

typedef struct {
  rankOf me;
  rankBody body;
  int result;
} threadOf;

static void *threadBody(void *at) {
  threadOf *thread = at;
  thread->result = thread->body(&thread->me);
  if (thread->result) thread->me.shared->failed = 1;
  return NULL;
}

static rankOf newRank(const worldSetup *setup, worldShared *shared, int rank) {
  return (rankOf){.setup = setup,
                  .shared = shared,
                  .rank = rank,
                  .ranks = setup->ranks,
                  .dice = 0x9e3779b97f4a7c15ull * (uint64_t)(rank + 1)};
}

static int runThreads(const worldSetup *setup, worldShared *shared, rankBody body) {
  threadOf threads[MAX_RANKS];
  pthread_t ids[MAX_RANKS];
  int failed = 0;
  for (int rank = 0; rank < setup->ranks; rank++) {
    threads[rank] = (threadOf){newRank(setup, shared, rank), body, 1};
    if (pthread_create(&ids[rank], NULL, threadBody, &threads[rank]) != 0) return 1;
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    pthread_join(ids[rank], NULL);
    failed += threads[rank].result != 0;
  }
  return failed;
}

static int runProcesses(const worldSetup *setup, worldShared *shared, rankBody body, const int *namespaces) {
  int failed = 0;
  for (int rank = 0; rank < setup->ranks; rank++) {
    pid_t pid = fork();
    if (pid < 0) return MAX_RANKS;
    if (pid == 0) {
      alarm(DEADLINE_S);
      shared->pids[rank] = getpid();
      if (namespaces && setns(namespaces[rank % 2], CLONE_NEWNET) != 0) _exit(2);
      rankOf me = newRank(setup, shared, rank);
      int rc = body(&me);
      if (rc) shared->failed = 1;
      _exit(rc ? 1 : 0);
    }
    shared->pids[rank] = pid;
  }
  for (int rank = 0; rank < setup->ranks; rank++) {
    int status = 0;
    waitpid((pid_t)shared->pids[rank], &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      if (!WIFEXITED(status)) fprintf(stderr, "rank %d ended by signal %d\n", rank, WTERMSIG(status));
      shared->failed = 1;
      failed++;
    }
  }
  return failed;
}

static bool writeText(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  bool ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
  close(fd);
  return ok;
}

static bool retry(const char *command) { /* until the caller's alarm */
  int rc;
  while ((rc = system(command)) > 0) usleep(10000);
  return rc == 0;
}
/* A cable that is up drops packets until the kernel's own work on it is done, and a lost SYN comes again after a second. */
#define CARRIES(cable) "ip link show " cable " | grep -q 'state UP'"

/* Names the first namespace to ip by being in it, and sets up its ends of the cables once they are there. */
static bool keepFirst(void) {
  alarm(DEADLINE_S);
  return retry("ip addr add 10.91.8.1/24 dev fp0 2>/dev/null") &&
         system("ip addr add 10.91.7.1/24 dev ep0 && ip link set lo up && ip link set ep0 up && ip link set fp0 up") ==
             0 &&
         retry(CARRIES("ep0")) && retry(CARRIES("fp0"));
}

/* Two namespaces, and two cables: ep0 10.91.7.1 to ep1 10.91.7.2, fp0 10.91.8.1 to fp1 10.91.8.2. */
static bool twoNamespaces(int fds[2]) {
  char text[128];
  unsigned uid = getuid(), gid = getgid();
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  snprintf(text, sizeof(text), "0 %u 1", uid);
  if (!writeText("/proc/self/uid_map", text)) return false;
  writeText("/proc/self/setgroups", "deny");
  snprintf(text, sizeof(text), "0 %u 1", gid);
  if (!writeText("/proc/self/gid_map", text)) return false;
  fds[0] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  if (fds[0] < 0) return false;
  alarm(DEADLINE_S);
  pid_t keeper = fork();
  if (keeper < 0) return false;
  if (keeper == 0) _exit(keepFirst() ? 0 : 1);
  bool ok = unshare(CLONE_NEWNET) == 0 && (fds[1] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)) >= 0;
  snprintf(text, sizeof(text), "ip link set ep0 netns %d && ip link set fp0 netns %d", (int)keeper, (int)keeper);
  ok = ok && system("ip link add ep1 type veth peer name ep0 && ip link add fp1 type veth peer name fp0") == 0 &&
       system(text) == 0 &&
       system("ip addr add 10.91.7.2/24 dev ep1 && ip addr add 10.91.8.2/24 dev fp1 && ip link set lo up && "
              "ip link set ep1 up && ip link set fp1 up") == 0 &&
       retry(CARRIES("ep1")) && retry(CARRIES("fp1"));
  int status = 1;
  if (!ok) kill(keeper, SIGKILL);
  waitpid(keeper, &status, 0);
  alarm(0);
  return ok && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int worldRun(const worldSetup *setup, rankBody body) {
  char timeout[16];
  int status = 0;
  worldShared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return MAX_RANKS;
  fflush(NULL);
  /* In a process of its own: its environment and namespaces go with it. */
  pid_t pid = fork();
  if (pid < 0) return MAX_RANKS;
  if (pid == 0) {
    int fds[2];
    static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGSYS};
    for (size_t i = 0; i < sizeof(crashes) / sizeof(crashes[0]); i++) signal(crashes[i], SIG_DFL); /* not cmocka's */
    snprintf(timeout, sizeof(timeout), "%d", setup->timeoutMs ? setup->timeoutMs : 10000);
    setenv("NCCL_EP_RMA_TIMEOUT_MS", timeout, 1);
    for (int i = 0; i < 8 && setup->env[i]; i++) putenv((char *)(uintptr_t)setup->env[i]);
    if (setup->namespaces == 2 && !twoNamespaces(fds)) _exit(99);
    if (setup->threads) alarm(DEADLINE_S);
    _exit(setup->threads ? runThreads(setup, shared, body)
                         : runProcesses(setup, shared, body, setup->namespaces == 2 ? fds : NULL));
  }
  waitpid(pid, &status, 0);
  munmap(shared, sizeof(*shared));
  if (!WIFEXITED(status)) return MAX_RANKS;
  return WEXITSTATUS(status) == 99 ? -1 : WEXITSTATUS(status);
}
