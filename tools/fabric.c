/* Ranks on GPUs or on the emulated fabric behind one interface. The two differ only where the comments say so; a
 * barrier that one rank cannot reach any more returns an error to the others instead of holding them. */
#include "fabric.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bootstrap.h"
#include "driver.h"
#include "failure.h"
#include "meet.h"

#define START_BYTES 4096 /* a page: the word that all GPUs of a host wait for */
#define HOST_GRACE_SECONDS 30

struct epFabric {
  epFabricOptions options;
  int ranks, localRanks, cuda, gpus;
  epPort *ports; /* [localRanks] */
  const epDriver *driver;
  const epNccl *nccl;
  epNet *net; /* one process per rank */
  epNetPlace place;
  epNcclId id;
  char versions[256];
  /* start word, shared by the ranks of this host */
  volatile uint32_t *start;
  char startName[96];
  int startLeader;
  /* meeting point of this process's ranks */
  pthread_mutex_t lock;
  pthread_cond_t arrived;
  int waiting, aborted;
  unsigned long round;
  unsigned char *board; /* gather: [ranks] * boardBytes */
  size_t boardBytes;
};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int toldEp(epPort *port, ncclResult_t rc, const char *what) {
  if (rc == ncclSuccess) return 0;
  return epToolFail("rank %d: %s: error %d: %s", port->rank, what, (int)rc, ncclEpGetLastErrorString());
}

static int toldCu(epPort *port, epCuResult rc, const char *what) {
  const char *text = NULL;
  const epDriver *d = port->fabric->driver;
  if (!rc) return 0;
  if (d->errorString(rc, &text) || !text) text = "unknown error";
  return epToolFail("rank %d: %s: CUDA error %d: %s", port->rank, what, rc, text);
}

/* ---- Meeting points --------------------------------------------------------------------------------------------- */

static void abortFabric(epFabric *fabric) {
  pthread_mutex_lock(&fabric->lock);
  fabric->aborted = 1;
  if (fabric->start) *fabric->start += 0x40000000u; /* opens every held stream */
  pthread_cond_broadcast(&fabric->arrived);
  pthread_mutex_unlock(&fabric->lock);
}

void epPortAbort(epPort *port) { abortFabric(port->fabric); }

static int meetLocally(epFabric *fabric) {
  unsigned long round;
  int aborted;
  pthread_mutex_lock(&fabric->lock);
  round = fabric->round;
  if (++fabric->waiting == fabric->localRanks) {
    fabric->waiting = 0;
    fabric->round++;
    pthread_cond_broadcast(&fabric->arrived);
  }
  while (round == fabric->round && !fabric->aborted) pthread_cond_wait(&fabric->arrived, &fabric->lock);
  aborted = fabric->aborted;
  pthread_mutex_unlock(&fabric->lock);
  return aborted ? -1 : 0;
}

int epPortGather(epPort *port, const void *mine, void *all, size_t bytes) {
  epFabric *fabric = port->fabric;
  int rc = 0;
  if (fabric->net) return epNetGather(fabric->net, mine, all, bytes);
  if (meetLocally(fabric)) return -1;
  pthread_mutex_lock(&fabric->lock);
  if (fabric->boardBytes < bytes) {
    unsigned char *board = realloc(fabric->board, bytes * (size_t)fabric->ranks);
    if (board) {
      fabric->board = board;
      fabric->boardBytes = bytes;
    } else {
      rc = epToolFail("out of host memory");
    }
  }
  if (!rc) memcpy(fabric->board + (size_t)port->rank * bytes, mine, bytes);
  pthread_mutex_unlock(&fabric->lock);
  if (rc) return rc;
  if (meetLocally(fabric)) return -1;
  memcpy(all, fabric->board, bytes * (size_t)fabric->ranks);
  return meetLocally(fabric);
}

int epPortBarrier(epPort *port) {
  char mine = 0, all[1024];
  if (!port->fabric->net) return meetLocally(port->fabric);
  return epNetGather(port->fabric->net, &mine, all, 1);
}

int epPortHold(epPort *port) {
  epFabric *fabric = port->fabric;
  epCuPointer word;
  port->holds++;
  if (!port->cuda || !fabric->start) return 0;
  if (toldCu(port, fabric->driver->hostDevicePointer(&word, (void *)(uintptr_t)fabric->start, 0),
             "cuMemHostGetDevicePointer"))
    return -1;
  return toldCu(port, fabric->driver->streamWaitValue((epCuStream)port->stream, word, port->holds, EP_CU_WAIT_GEQ),
                "cuStreamWaitValue32");
}

int epPortRelease(epPort *port) {
  epFabric *fabric = port->fabric;
  int failed = epPortBarrier(port);
  if (fabric->start && !failed && fabric->startLeader && port == fabric->ports) *fabric->start = port->holds;
  return failed;
}

/* ---- Ranks on threads ------------------------------------------------------------------------------------------- */

typedef struct threadRun {
  epPort *port;
  int (*body)(epPort *port, void *context);
  void *context;
  int rc;
} threadRun;

static void *threadMain(void *argument) {
  threadRun *run = argument;
  epFabric *fabric = run->port->fabric;
  run->rc = 0;
  if (run->port->cuda && run->port->context)
    run->rc = toldCu(run->port, fabric->driver->contextSet(run->port->context), "cuCtxSetCurrent");
  if (!run->rc) run->rc = run->body(run->port, run->context);
  if (run->rc) abortFabric(fabric);
  return NULL;
}

int epFabricRun(epFabric *fabric, int (*body)(epPort *, void *), void *context) {
  threadRun *runs = calloc((size_t)fabric->localRanks, sizeof(*runs));
  pthread_t *threads = calloc((size_t)fabric->localRanks, sizeof(*threads));
  int started = 0, rc = 0;
  if (!runs || !threads) {
    rc = epToolFail("out of host memory");
    goto done;
  }
  for (; started < fabric->localRanks; started++) {
    runs[started] = (threadRun){.port = &fabric->ports[started], .body = body, .context = context};
    if (pthread_create(&threads[started], NULL, threadMain, &runs[started])) {
      rc = epToolFail("cannot start a thread for rank %d", fabric->ports[started].rank);
      abortFabric(fabric);
      break;
    }
  }
  for (int i = 0; i < started; i++) {
    pthread_join(threads[i], NULL);
    rc |= runs[i].rc;
  }
  epToolCalm();
done:
  free(runs);
  free(threads);
  return rc ? -1 : 0;
}

/* ---- Opening ---------------------------------------------------------------------------------------------------- */

epFabricKind epFabricChoose(epFabricKind wanted, int *gpus, const char **reason) {
  static const char *const none = "the driver finds no GPU";
  const char *why = "";
  const epDriver *driver = epDriverOpen(&why);
  *gpus = 0;
  if (driver && driver->deviceCount(gpus)) *gpus = 0;
  if (reason) *reason = *gpus ? "" : driver ? none : why;
  if (wanted != EP_FABRIC_AUTO) return wanted;
  return *gpus > 0 ? EP_FABRIC_CUDA : EP_FABRIC_EMU;
}

int epFabricLaunchedRanks(void) {
  epNetPlace place = {0, 0, 0};
  int launched = epNetPlaceFromEnvironment(&place);
  return launched > 0 ? place.ranks : launched;
}

static int openEmulated(epFabric *fabric) {
  ncclEpEmuOptions_t options = NCCL_EP_EMU_OPTIONS_INIT;
  ncclComm_t *comms = calloc((size_t)fabric->ranks, sizeof(ncclComm_t));
  ncclResult_t rc;
  if (!comms) return epToolFail("out of host memory");
  options.seed = fabric->options.seed;
  options.num_sms = fabric->options.emuSms;
  options.bug = fabric->options.emuBug;
  options.no_weak_memory = fabric->options.emuPlain;
  options.no_bulk_copies = fabric->options.emuNoBulk;
  rc = ncclEpEmuCommInitAll(comms, (int)fabric->options.scaleOut, (int)fabric->options.scaleUp, &options);
  for (int r = 0; r < fabric->ranks && rc == ncclSuccess; r++) {
    fabric->ports[r].comm = comms[r];
    snprintf(fabric->ports[r].name, sizeof(fabric->ports[r].name), "emulated");
    rc = ncclEpEmuEventCreate(comms[r], &fabric->ports[r].done);
  }
  free(comms);
  return toldEp(&fabric->ports[0], rc, "ncclEpEmuCommInitAll");
}

/* The start word lies in ordinary shared memory that every rank of the host registers with its GPU. The lowest rank of
 * a host makes it; the others learn its name, since names are told to all and hosts are told apart by theirs. */
typedef struct startNote {
  char host[128], name[96];
} startNote;

static volatile uint32_t *mapStart(const char *name, int create) {
  int fd = shm_open(name, create ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
  void *page;
  if (fd < 0) return NULL;
  page = create && ftruncate(fd, START_BYTES) ? MAP_FAILED
                                              : mmap(NULL, START_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return page == MAP_FAILED ? NULL : page;
}

static int openStart(epFabric *fabric, epPort *port) {
  startNote mine, *all = calloc((size_t)fabric->ranks, sizeof(*all));
  int leader = 0, failed;
  if (!all) return epToolFail("out of host memory");
  memset(&mine, 0, sizeof(mine));
  gethostname(mine.host, sizeof(mine.host) - 1);
  snprintf(mine.name, sizeof(mine.name), "/nccl_ep_bench.%ld.%llx", (long)getpid(), (unsigned long long)(now() * 1e6));
  failed = epPortGather(port, &mine, all, sizeof(mine));
  while (!failed && strcmp(all[leader].host, mine.host) != 0) leader++;
  fabric->startLeader = leader == port->rank;
  if (!failed && fabric->startLeader) {
    snprintf(fabric->startName, sizeof(fabric->startName), "%s", mine.name);
    fabric->start = mapStart(mine.name, 1);
  }
  failed = failed || epPortBarrier(port);
  if (!failed && !fabric->startLeader) fabric->start = mapStart(all[leader].name, 0);
  failed = failed || epPortBarrier(port);
  if (fabric->startLeader && *fabric->startName) shm_unlink(fabric->startName);
  free(all);
  return failed ? -1 : 0;
}

static int openRank(epPort *port, void *unused) {
  epFabric *fabric = port->fabric;
  const epDriver *d = fabric->driver;
  char name[96] = "";
  epCuDevice device;
  epCuStream stream;
  epCuEvent done = NULL;
  void *comm = NULL;
  int rc;
  (void)unused;
  if (toldCu(port, d->deviceGet(&device, port->device), "cuDeviceGet") ||
      toldCu(port, d->contextRetain(&port->context, device), "cuDevicePrimaryCtxRetain") ||
      toldCu(port, d->contextSet(port->context), "cuCtxSetCurrent") ||
      toldCu(port, d->deviceName(name, sizeof(name), device), "cuDeviceGetName") ||
      toldCu(port, d->devicePciBusId(port->bus, sizeof(port->bus), device), "cuDeviceGetPCIBusId") ||
      toldCu(port, d->streamCreate(&stream, EP_CU_STREAM_NON_BLOCKING), "cuStreamCreate"))
    return -1;
  port->stream = (cudaStream_t)stream;
  snprintf(port->name, sizeof(port->name), "device %d [%s] %s", port->device, port->bus, name);
  for (int i = 0; i < EP_PORT_EVENTS; i++)
    if (toldCu(port, d->eventCreate(&port->events[i], EP_CU_EVENT_DEFAULT), "cuEventCreate")) return -1;
  if (toldCu(port, d->eventCreate(&done, EP_CU_EVENT_DEFAULT), "cuEventCreate")) return -1;
  port->done = (cudaEvent_t)done;
  if (fabric->net && openStart(fabric, port)) return -1;
  if (fabric->start && (fabric->net || port->rank == 0) &&
      d->hostRegister((void *)(uintptr_t)fabric->start, START_BYTES, EP_CU_HOST_PORTABLE | EP_CU_HOST_DEVICEMAP))
    fabric->start = NULL; /* times then include the skew of the host's barrier */
  rc = fabric->nccl->commInitRank(&comm, fabric->ranks, fabric->id, port->rank);
  if (rc)
    return epToolFail("rank %d: ncclCommInitRank: error %d: %s", port->rank, rc, fabric->nccl->getErrorString(rc));
  port->comm = (ncclComm_t)comm;
  return epPortBarrier(port);
}

static int openCuda(epFabric *fabric) {
  const char *reason = "";
  int version = 0, cuda = 0;
  fabric->driver = epDriverOpen(&reason);
  if (!fabric->driver) return epToolFail("backend cuda: %s", reason);
  fabric->nccl = epNcclOpen(&reason);
  if (!fabric->nccl) return epToolFail("backend cuda: %s", reason);
  if (fabric->place.rank == 0 && fabric->nccl->getUniqueId(&fabric->id)) return epToolFail("ncclGetUniqueId failed");
  if (fabric->net) {
    epNcclId *ids = calloc((size_t)fabric->ranks, sizeof(*ids));
    if (!ids) return epToolFail("out of host memory");
    if (epNetGather(fabric->net, &fabric->id, ids, sizeof(*ids))) {
      free(ids);
      return -1;
    }
    fabric->id = ids[0];
    free(ids);
  } else {
    void *page = mmap(NULL, START_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fabric->start = page == MAP_FAILED ? NULL : page;
    fabric->startLeader = 1;
  }
  fabric->nccl->getVersion(&version);
  fabric->driver->driverVersion(&cuda);
  snprintf(fabric->versions, sizeof(fabric->versions), ", NCCL %d.%d.%d, CUDA driver %d.%d", version / 10000,
           version / 100 % 100, version % 100, cuda / 1000, cuda / 10 % 100);
  return epFabricRun(fabric, openRank, NULL);
}

/* NCCL's own setting: several ranks may have the same GPU. Good for checks; times then mean little. */
static int ranksShareGpus(void) {
  const char *setting = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return setting && strtol(setting, NULL, 10) > 0;
}

/* Ranks of the run, and which of them this process holds. */
static int countRanks(epFabric *fabric) {
  epFabricOptions *o = &fabric->options;
  const char *reason = "";
  int gpus, launched = epNetPlaceFromEnvironment(&fabric->place);
  if (launched < 0) return -1;
  o->kind = epFabricChoose(o->kind, &gpus, &reason);
  fabric->gpus = gpus;
  fabric->cuda = o->kind == EP_FABRIC_CUDA;
  if (!fabric->cuda && launched)
    return epToolFail("backend emu: all ranks live in one process, but the launcher started %d", fabric->place.ranks);
  if (fabric->cuda && !gpus) return epToolFail("backend cuda: %s", reason);
  if (!fabric->cuda) {
    if (!o->scaleOut || !o->scaleUp) return epToolFail("backend emu: the topology must be given");
    fabric->ranks = fabric->localRanks = (int)(o->scaleOut * o->scaleUp);
  } else if (launched) {
    if (o->scaleUp && (int)(o->scaleOut * o->scaleUp) != fabric->place.ranks)
      return epToolFail("topology of %u ranks, but the launcher started %d", o->scaleOut * o->scaleUp,
                        fabric->place.ranks);
    fabric->ranks = fabric->place.ranks;
    fabric->localRanks = 1;
  } else {
    fabric->place.rank = 0;
    fabric->ranks = fabric->localRanks = o->scaleUp ? (int)(o->scaleOut * o->scaleUp) : gpus;
    if (fabric->ranks > gpus && !ranksShareGpus())
      return epToolFail(
          "topology of %d ranks, but there are %d GPUs: expected no more ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1 and an "
          "NCCL that knows it (2.30)",
          fabric->ranks, gpus);
  }
  if (fabric->ranks < 1 || fabric->ranks > 1024) return epToolFail("%d ranks: expected 1 to 1024", fabric->ranks);
  return launched && epNetOpen(&fabric->place, &fabric->net) ? -1 : 0;
}

int epFabricOpen(const epFabricOptions *options, epFabric **out) {
  epFabric *fabric = calloc(1, sizeof(*fabric));
  int rc = -1;
  if (!fabric) return epToolFail("out of host memory");
  fabric->options = *options;
  pthread_mutex_init(&fabric->lock, NULL);
  pthread_cond_init(&fabric->arrived, NULL);
  if (countRanks(fabric)) goto fail;
  fabric->ports = calloc((size_t)fabric->localRanks, sizeof(*fabric->ports));
  if (!fabric->ports) {
    epToolFail("out of host memory");
    goto fail;
  }
  for (int i = 0; i < fabric->localRanks; i++) {
    fabric->ports[i].fabric = fabric;
    fabric->ports[i].rank = fabric->net ? fabric->place.rank : i;
    fabric->ports[i].ranks = fabric->ranks;
    fabric->ports[i].cuda = fabric->cuda;
    fabric->ports[i].device = fabric->net ? fabric->place.localRank : fabric->cuda ? i % fabric->gpus : i;
  }
  rc = fabric->cuda ? openCuda(fabric) : openEmulated(fabric);
  if (rc) goto fail;
  *out = fabric;
  return 0;
fail:
  epFabricClose(fabric);
  return -1;
}

/* The aborted communicator of a failed run must not make the exit wait for peers. */
static int closeRank(epPort *port, void *unused) {
  epFabric *fabric = port->fabric;
  (void)unused;
  if (!port->cuda) {
    if (port->comm) ncclEpEmuCommDestroy(port->comm);
    port->comm = NULL;
    return 0;
  }
  epMeetClose(port);
  if (port->comm) (fabric->aborted ? fabric->nccl->commAbort : fabric->nccl->commDestroy)(port->comm);
  port->comm = NULL;
  for (int i = 0; i < EP_PORT_EVENTS; i++)
    if (port->events[i]) fabric->driver->eventDestroy(port->events[i]);
  if (port->done) fabric->driver->eventDestroy((epCuEvent)port->done);
  if (port->stream) fabric->driver->streamDestroy((epCuStream)port->stream);
  if (fabric->start && (fabric->net || port->rank == 0))
    fabric->driver->hostUnregister((void *)(uintptr_t)fabric->start);
  return 0; /* the primary context stays until the process ends: others may use it */
}

void epFabricClose(epFabric *fabric) {
  if (!fabric) return;
  if (fabric->ports) {
    if (fabric->cuda && fabric->driver)
      epFabricRun(fabric, closeRank, NULL);
    else
      for (int i = 0; i < fabric->localRanks; i++) closeRank(&fabric->ports[i], NULL);
  }
  if (fabric->start) munmap((void *)(uintptr_t)fabric->start, START_BYTES);
  epNetClose(fabric->net);
  pthread_cond_destroy(&fabric->arrived);
  pthread_mutex_destroy(&fabric->lock);
  free(fabric->board);
  free(fabric->ports);
  free(fabric);
}

int epFabricRanks(const epFabric *fabric) { return fabric->ranks; }
int epFabricIsCuda(const epFabric *fabric) { return fabric->cuda; }
const char *epFabricVersions(const epFabric *fabric) { return fabric->versions; }

/* ---- Memory and streams ----------------------------------------------------------------------------------------- */

static epCuPointer addressOf(const void *pointer) { return (epCuPointer)(uintptr_t)pointer; }

int epPortAlloc(epPort *port, void **device, size_t bytes, const char *name) {
  epCuPointer pointer = 0;
  if (!port->cuda) return toldEp(port, ncclEpEmuMalloc(port->comm, device, bytes, name), name);
  if (port->fabric->driver->memAlloc(&pointer, bytes))
    return epToolFail("rank %d: %s: cannot allocate %zu bytes of device memory", port->rank, name, bytes);
  *device = (void *)(uintptr_t)pointer;
  return 0;
}

void epPortFree(epPort *port, void *device) {
  if (!device) return;
  if (port->cuda)
    port->fabric->driver->memFree(addressOf(device));
  else
    ncclEpEmuFree(port->comm, device);
}

static int toldNccl(epPort *port, int rc, const char *what) {
  if (!rc) return 0;
  return epToolFail("rank %d: %s: error %d: %s", port->rank, what, rc, port->fabric->nccl->getErrorString(rc));
}

int epPortAllocWindow(epPort *port, void **device, size_t bytes, const char *name, ncclWindow_t *window) {
  const epNccl *nccl = port->fabric->nccl;
  void *memory = NULL, *registered = NULL;
  int rc;
  if (!port->cuda) {
    if (epPortAlloc(port, device, bytes, name)) return -1;
    return toldEp(port, ncclEpEmuWindowRegister(port->comm, *device, bytes, window), "ncclEpEmuWindowRegister");
  }
  if (!nccl->memAlloc || !nccl->memFree || !nccl->windowRegister || !nccl->windowDeregister)
    return epToolFail("rank %d: %s: this NCCL has no windows: 2.27 or newer is needed", port->rank, name);
  if (toldNccl(port, nccl->memAlloc(&memory, bytes), "ncclMemAlloc")) return -1;
  rc = toldNccl(port, nccl->windowRegister(port->comm, memory, bytes, &registered, EP_NCCL_SYMMETRIC),
                "ncclCommWindowRegister");
  if (!rc && !registered)
    rc = epToolFail("rank %d: %s: NCCL has no symmetric memory on this communicator", port->rank, name);
  if (rc) {
    nccl->memFree(memory);
    return -1;
  }
  *device = memory;
  *window = (ncclWindow_t)registered;
  return 0;
}

int epPortFreeWindow(epPort *port, void *device, ncclWindow_t window) {
  const epNccl *nccl = port->fabric->nccl;
  int rc = 0;
  if (!port->cuda) {
    if (window) rc = toldEp(port, ncclEpEmuWindowDeregister(port->comm, window), "ncclEpEmuWindowDeregister");
    epPortFree(port, device);
    return rc;
  }
  if (window) rc = toldNccl(port, nccl->windowDeregister(port->comm, window), "ncclCommWindowDeregister");
  if (device) rc |= toldNccl(port, nccl->memFree(device), "ncclMemFree");
  return rc ? -1 : 0;
}

int epPortCopyAsync(epPort *port, void *to, const void *from, size_t bytes) {
  if (!bytes) return 0;
  if (!port->cuda) return toldEp(port, ncclEpEmuMemcpy(port->comm, to, from, bytes, port->stream), "copy");
  return toldCu(port,
                port->fabric->driver->memcpyAsync(addressOf(to), addressOf(from), bytes, (epCuStream)port->stream),
                "cuMemcpyAsync");
}

int epPortCopy(epPort *port, void *to, const void *from, size_t bytes) {
  return epPortCopyAsync(port, to, from, bytes) || epPortSync(port) ? -1 : 0;
}

int epPortFill(epPort *port, void *device, int value, size_t bytes) {
  int rc;
  if (!bytes) return 0;
  if (!port->cuda)
    rc = toldEp(port, ncclEpEmuMemset(port->comm, device, value, bytes, port->stream), "fill");
  else
    rc = toldCu(
        port,
        port->fabric->driver->memsetAsync(addressOf(device), (unsigned char)value, bytes, (epCuStream)port->stream),
        "cuMemsetD8Async");
  return rc || epPortSync(port) ? -1 : 0;
}

int epPortSync(epPort *port) {
  double deadline = now() + 1e-3 * port->fabric->options.timeoutMs + HOST_GRACE_SECONDS;
  epCuResult rc;
  if (!port->cuda) return toldEp(port, ncclEpEmuStreamSynchronize(port->comm, port->stream), "stream");
  while ((rc = port->fabric->driver->streamQuery((epCuStream)port->stream)) == EP_CU_NOT_READY) {
    struct timespec nap = {0, 20 * 1000};
    if (now() > deadline)
      return epToolFail("rank %d: the stream did not finish within %u ms and %d s", port->rank,
                        port->fabric->options.timeoutMs, HOST_GRACE_SECONDS);
    nanosleep(&nap, NULL);
  }
  return toldCu(port, rc, "stream");
}

int epPortMark(epPort *port, unsigned event) {
  if (port->cuda)
    return toldCu(port, port->fabric->driver->eventRecord(port->events[event], (epCuStream)port->stream),
                  "cuEventRecord");
  if (epPortSync(port)) return -1;
  port->hostTime[event] = now();
  return 0;
}

int epPortElapsed(epPort *port, unsigned from, unsigned to, double *microseconds) {
  float milliseconds = 0;
  if (!port->cuda) {
    *microseconds = (port->hostTime[to] - port->hostTime[from]) * 1e6;
    return 0;
  }
  if (toldCu(port, port->fabric->driver->eventElapsed(&milliseconds, port->events[from], port->events[to]),
             "cuEventElapsedTime"))
    return -1;
  *microseconds = milliseconds * 1e3;
  return 0;
}

/* ---- Graphs ----------------------------------------------------------------------------------------------------- */

/* Thread-local: other ranks of this process allocate and wait while this one captures. */
int epPortCaptureBegin(epPort *port) {
  if (!port->cuda) return epToolFail("rank %d: the emulated fabric has no graphs", port->rank);
  return toldCu(port, port->fabric->driver->captureBegin((epCuStream)port->stream, EP_CU_CAPTURE_THREAD_LOCAL),
                "cuStreamBeginCapture");
}

int epPortCaptureEnd(epPort *port, void **graph) {
  const epDriver *d = port->fabric->driver;
  epCuGraph captured = NULL;
  int rc = toldCu(port, d->captureEnd((epCuStream)port->stream, &captured), "cuStreamEndCapture") ||
           toldCu(port, d->graphInstantiate(graph, captured, 0), "cuGraphInstantiate");
  if (captured) d->graphDestroy(captured);
  return rc ? -1 : 0;
}

int epPortReplay(epPort *port, void *graph) {
  return toldCu(port, port->fabric->driver->graphLaunch(graph, (epCuStream)port->stream), "cuGraphLaunch");
}

void epPortGraphFree(epPort *port, void *graph) {
  if (graph) port->fabric->driver->graphExecDestroy(graph);
}

/* ---- Peers ------------------------------------------------------------------------------------------------------ */

typedef struct peerNote {
  void *pointer, *context;
  epCuIpcHandle handle;
} peerNote;

int epPortSeveralHosts(epPort *port, int *several) {
  char mine[64] = "", (*all)[64] = calloc((size_t)port->ranks, sizeof(*all));
  if (!all) return epToolFail("out of host memory");
  gethostname(mine, sizeof(mine) - 1);
  if (epPortGather(port, mine, all, sizeof(mine))) {
    free(all);
    return -1;
  }
  *several = 0;
  for (int r = 0; r < port->ranks; r++) *several |= strcmp(all[r], mine) != 0;
  free(all);
  return 0;
}

int epPortMapPeers(epPort *port, void *mine, void **peers) {
  epFabric *fabric = port->fabric;
  peerNote note = {.pointer = mine, .context = port->context}, *all;
  int rc = -1;
  for (int r = 0; r < port->ranks; r++) peers[r] = NULL;
  if (!port->cuda) return epToolFail("rank %d: the emulated fabric has no copy engine", port->rank);
  all = calloc((size_t)port->ranks, sizeof(*all));
  if (!all) return epToolFail("out of host memory");
  if ((fabric->net && toldCu(port, fabric->driver->ipcGet(&note.handle, addressOf(mine)), "cuIpcGetMemHandle")) ||
      epPortGather(port, &note, all, sizeof(note)))
    goto done;
  for (int r = 0; r < port->ranks; r++) {
    epCuResult cu;
    if (r == port->rank) {
      peers[r] = mine;
    } else if (fabric->net) {
      epCuPointer opened = 0;
      if (toldCu(port, fabric->driver->ipcOpen(&opened, all[r].handle, EP_CU_IPC_LAZY_PEER), "cuIpcOpenMemHandle"))
        goto done;
      peers[r] = (void *)(uintptr_t)opened;
    } else {
      cu = all[r].context == port->context ? EP_CU_PEER_ALREADY_ENABLED : fabric->driver->peerEnable(all[r].context, 0);
      if (cu != EP_CU_PEER_ALREADY_ENABLED && toldCu(port, cu, "cuCtxEnablePeerAccess")) goto done;
      peers[r] = all[r].pointer;
    }
  }
  rc = 0;
done:
  free(all);
  return rc;
}

void epPortUnmapPeers(epPort *port, void **peers) {
  for (int r = 0; r < port->ranks && port->fabric->net; r++)
    if (r != port->rank && peers[r]) port->fabric->driver->ipcClose(addressOf(peers[r]));
}

int epPortFaults(epPort *port) {
  ncclEpEmuReport_t report = NCCL_EP_EMU_REPORT_INIT;
  if (port->cuda) return 0;
  if (toldEp(port, ncclEpEmuGetReport(port->comm, &report), "ncclEpEmuGetReport")) return -1;
  if (report.faults)
    return epToolFail("rank %d: the fabric reports %u faults: %s", port->rank, report.faults, report.text);
  return 0;
}
