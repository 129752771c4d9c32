/* A CUDA driver without a GPU, for the provider's GPU paths: GPU memory is shared memory that processes can hand to each
 * other by descriptor, and streams are late. Copies and writes wait in their stream and are done one by one, at random,
 * when somebody asks for an event: whoever does not wait for the right event sees old bytes. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_gpu.h"

typedef uintptr_t ptr;
enum { OK = 0, INVALID = 1, NO_CONTEXT = 201, NOT_READY = 600, NOT_SUPPORTED = 801, RANGES = 512 };

typedef struct work {
  struct work *next;
  char *to;
  const char *from;
  char *snapshot; /* of pageable memory, read when the copy is issued */
  size_t bytes;
  uint64_t word;
  struct event *event;
} work;
typedef struct {
  work *head, *tail;
} stream;
typedef struct event {
  stream *on;
  unsigned recorded, reached;
} event;
typedef struct {
  char *at;
  size_t bytes;
  int fd; /* -1: no one else's business */
  int pinned;
} range;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static range ranges[RANGES];
static int handles[RANGES]; /* descriptor + 1 */
static int alive, alone, mistakes, failIn;
static uint64_t dice = 88172645463325252ull;
static _Thread_local int depth;

static void lock(void) { pthread_mutex_lock(&mutex); }
static int unlock(int result) {
  pthread_mutex_unlock(&mutex);
  return result;
}
static unsigned roll(void) {
  dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
  return (unsigned)(dice >> 33);
}
#define CALL(name, ...)  \
  int name(__VA_ARGS__); \
  int name(__VA_ARGS__)
#define NEED_CONTEXT()                    \
  do {                                    \
    if (depth == 0) {                     \
      __sync_fetch_and_add(&mistakes, 1); \
      return NO_CONTEXT;                  \
    }                                     \
  } while (0)

#define MAY_FAIL()                                   \
  do {                                               \
    if (failIn > 0 && --failIn == 0) return INVALID; \
  } while (0)

static range *rangeOf(ptr p) {
  for (int i = 0; i < RANGES; i++)
    if (ranges[i].at && p >= (ptr)ranges[i].at && p < (ptr)ranges[i].at + ranges[i].bytes) return &ranges[i];
  return NULL;
}
static int addRange(void *at, size_t bytes, int fd, int pinned) {
  for (int i = 0; i < RANGES; i++)
    if (!ranges[i].at) {
      ranges[i] = (range){at, bytes, fd, pinned};
      return 1;
    }
  return 0;
}
static int addHandle(int fd) {
  for (int i = 0; i < RANGES; i++)
    if (!handles[i]) {
      handles[i] = fd + 1;
      alive++;
      return i + 1;
    }
  return 0;
}

void *fakeAllocate(size_t bytes, int exportable);
void *fakeAllocate(size_t bytes, int exportable) {
  bytes = (bytes + 4095) / 4096 * 4096;
  int fd = memfd_create("fake gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) return NULL;
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (!exportable) close(fd);
  lock();
  addRange(at, bytes, exportable ? fd : -1, 0);
  unlock(0);
  return at;
}
void fakeRelease(void *memory);
void fakeRelease(void *memory) {
  lock();
  range *of = rangeOf((ptr)memory);
  if (of) {
    munmap(of->at, of->bytes);
    if (of->fd >= 0) close(of->fd);
    of->at = NULL;
  }
  unlock(0);
}
int fakeAlive(void);
int fakeAlive(void) { return alive; }
void fakeAlone(int on);
void fakeAlone(int on) { alone = on; }
int fakeMistakes(void);
int fakeMistakes(void) { return mistakes; }

int fakeFail(int n);
int fakeFail(int n) {
  int left = failIn;
  failIn = n;
  return left;
}

/* ---- streams --------------------------------------------------------------------------------------------------- */

static void doOne(stream *on) {
  work *first = on->head;
  on->head = first->next;
  if (!on->head) on->tail = NULL;
  if (first->event)
    first->event->reached++;
  else if (first->from || first->snapshot)
    memcpy(first->to, first->snapshot ? first->snapshot : first->from, first->bytes);
  else
    __atomic_store_n((uint64_t *)(void *)first->to, first->word, __ATOMIC_RELEASE);
  free(first->snapshot);
  free(first);
}
static int enqueue(stream *on, work what) {
  work *copy = malloc(sizeof(*copy));
  if (!copy) return INVALID;
  *copy = what;
  if (on->tail)
    on->tail->next = copy;
  else
    on->head = copy;
  on->tail = copy;
  return OK;
}

CALL(cuCtxGetStreamPriorityRange, int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
CALL(cuStreamCreateWithPriority, void **out, unsigned flags, int priority) {
  if (priority != -5) return INVALID;
  NEED_CONTEXT();
  MAY_FAIL();
  (void)flags;
  *out = calloc(1, sizeof(stream));
  lock();
  alive++;
  return unlock(OK);
}
CALL(cuStreamSynchronize, void *of) {
  stream *on = of;
  NEED_CONTEXT();
  MAY_FAIL();
  lock();
  while (on->head) doOne(on);
  return unlock(OK);
}
CALL(cuStreamDestroy_v2, void *of) {
  stream *on = of;
  NEED_CONTEXT();
  lock();
  while (on->head) doOne(on);
  free(of);
  alive--;
  return unlock(OK);
}
CALL(cuEventCreate, void **out, unsigned flags) {
  NEED_CONTEXT();
  MAY_FAIL();
  (void)flags;
  *out = calloc(1, sizeof(event));
  lock();
  alive++;
  return unlock(OK);
}
CALL(cuEventDestroy_v2, void *of) {
  NEED_CONTEXT();
  event *e = of;
  lock();
  while (e->on && e->reached < e->recorded) doOne(e->on);
  alive--;
  free(e);
  return unlock(OK);
}
CALL(cuEventRecord, void *of, void *on) {
  NEED_CONTEXT();
  MAY_FAIL();
  event *e = of;
  lock();
  e->on = on;
  e->recorded++;
  return unlock(enqueue(on, (work){.event = e}));
}
CALL(cuEventQuery, void *of) {
  NEED_CONTEXT();
  MAY_FAIL();
  event *e = of;
  lock();
  if (e->on && e->on->head && e->reached < e->recorded && roll() % 2) doOne(e->on);
  return unlock(e->reached < e->recorded ? NOT_READY : OK);
}
CALL(cuMemcpyAsync, ptr to, ptr from, size_t bytes, void *on) {
  NEED_CONTEXT();
  MAY_FAIL();
  work what = {.to = (char *)to, .from = (const char *)from, .bytes = bytes};
  lock();
  if (!rangeOf(from)) {
    what.snapshot = malloc(bytes);
    if (!what.snapshot) return unlock(INVALID);
    memcpy(what.snapshot, (const void *)from, bytes);
  }
  int rc = enqueue(on, what);
  if (rc) free(what.snapshot);
  return unlock(rc);
}
typedef struct {
  int type;
  ptr to;
  uint64_t word;
  uint64_t rest[3];
} writeOperation;
CALL(cuStreamBatchMemOp_v2, void *on, unsigned count, writeOperation *operations, unsigned flags) {
  NEED_CONTEXT();
  MAY_FAIL();
  if (flags || !count || count > 256) return INVALID;
  for (unsigned i = 0; i < count; i++)
    if (operations[i].type != 5 || operations[i].to % 8) return INVALID;
  lock();
  /* Nobody asks for an event after a signal: it is done by and by. */
  int rc = OK;
  for (unsigned i = 0; rc == OK && i < count; i++)
    rc = enqueue(on, (work){.to = (char *)operations[i].to, .word = operations[i].word});
  stream *of = on;
  while (rc == OK && of->head && roll() % 8) doOne(of);
  while (rc == OK && of->head) doOne(of);
  return unlock(rc);
}

/* ---- devices and contexts ---------------------------------------------------------------------------------------- */

CALL(cuInit, unsigned flags) { return flags ? INVALID : OK; }
CALL(cuGetErrorName, int error, const char **name) {
  *name = error == NO_CONTEXT ? "FAKE_NO_CONTEXT" : "FAKE_ERROR";
  return OK;
}
CALL(cuDeviceGet, int *device, int ordinal) {
  *device = ordinal;
  return OK;
}
CALL(cuDeviceGetAttribute, int *value, int attribute, int device) {
  *value = attribute == 122 && device == 0;
  return OK;
}
CALL(cuDevicePrimaryCtxRetain, void **context, int device) {
  MAY_FAIL();
  *context = (void *)(ptr)(0x1000 + device);
  lock();
  alive++;
  return unlock(OK);
}
CALL(cuDevicePrimaryCtxRelease_v2, int device) {
  (void)device;
  lock();
  alive--;
  return unlock(OK);
}
CALL(cuCtxPushCurrent_v2, void *context) {
  if (!context) return INVALID;
  depth++;
  return OK;
}
CALL(cuCtxPopCurrent_v2, void **context) {
  NEED_CONTEXT();
  *context = NULL;
  depth--;
  return OK;
}
CALL(cuThreadExchangeStreamCaptureMode, int *mode) {
  static _Thread_local int current;
  int old = current;
  current = *mode;
  *mode = old;
  return OK;
}
CALL(cuPointerGetAttribute, void *value, int attribute, ptr p) {
  MAY_FAIL();
  lock();
  range *of = rangeOf(p);
  if (of && !of->pinned) *(int *)value = 0;
  return unlock(of && !of->pinned && attribute == 9 ? OK : INVALID);
}
CALL(cuMemHostAlloc, void **out, size_t bytes, unsigned flags) {
  NEED_CONTEXT();
  MAY_FAIL();
  (void)flags;
  *out = malloc(bytes);
  lock();
  addRange(*out, bytes, -1, 1);
  alive++;
  return unlock(*out ? OK : INVALID);
}
CALL(cuMemFreeHost, void *host) {
  NEED_CONTEXT();
  lock();
  range *of = rangeOf((ptr)host);
  if (of) of->at = NULL;
  free(host);
  alive--;
  return unlock(of ? OK : INVALID);
}

/* ---- exported memory --------------------------------------------------------------------------------------------- */

CALL(cuMemGetAddressRange_v2, ptr *base, size_t *bytes, ptr p) {
  MAY_FAIL();
  lock();
  range *of = rangeOf(p);
  if (of) *base = (ptr)of->at, *bytes = of->bytes;
  return unlock(of ? OK : INVALID);
}
CALL(cuMemRetainAllocationHandle, unsigned long long *handle, void *p) {
  MAY_FAIL();
  lock();
  range *of = rangeOf((ptr)p);
  if (!of || of->pinned) return unlock(INVALID);
  *handle = (unsigned long long)addHandle(of->fd < 0 ? 1 << 20 : dup(of->fd));
  return unlock(OK);
}
CALL(cuMemRelease, unsigned long long handle) {
  lock();
  if (handles[handle - 1] <= 1 << 20) close(handles[handle - 1] - 1);
  handles[handle - 1] = 0;
  alive--;
  return unlock(OK);
}
CALL(cuMemGetAllocationPropertiesFromHandle, int *properties, unsigned long long handle) {
  lock();
  properties[1] = handles[handle - 1] <= 1 << 20; /* requestedHandleTypes */
  return unlock(OK);
}
CALL(cuMemExportToShareableHandle, int *fd, unsigned long long handle, int type, unsigned long long flags) {
  MAY_FAIL();
  lock();
  *fd = type == 1 && flags == 0 ? dup(handles[handle - 1] - 1) : -1;
  return unlock(*fd >= 0 ? OK : INVALID);
}
CALL(cuMemImportFromShareableHandle, unsigned long long *handle, void *fd, int type) {
  if (type != 1) return INVALID;
  lock();
  *handle = (unsigned long long)addHandle(dup((int)(intptr_t)fd));
  return unlock(OK);
}
CALL(cuMemAddressReserve, ptr *at, size_t bytes, size_t alignment, ptr wish, unsigned long long flags) {
  if (bytes % 4096 || alignment || wish || flags) return INVALID;
  *at = (ptr)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  lock();
  alive++;
  return unlock(OK);
}
CALL(cuMemAddressFree, ptr at, size_t bytes) {
  munmap((void *)at, bytes);
  lock();
  alive--;
  return unlock(OK);
}
CALL(cuMemMap, ptr at, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  if (offset || flags) return INVALID;
  lock();
  void *got = mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle - 1] - 1, 0);
  if (got != MAP_FAILED) addRange(got, bytes, -1, 0), alive++;
  return unlock(got != MAP_FAILED ? OK : INVALID);
}
CALL(cuMemUnmap, ptr at, size_t bytes) {
  lock();
  range *of = rangeOf(at);
  if (!of || of->bytes != bytes) return unlock(INVALID);
  of->at = NULL;
  alive--;
  return unlock(mprotect((void *)at, bytes, PROT_NONE) == 0 ? OK : INVALID);
}
CALL(cuMemSetAccess, ptr at, size_t bytes, const int *access, size_t count) {
  if (alone) return NOT_SUPPORTED;
  if (count != 1 || access[0] != 1 || access[2] != 3) return INVALID;
  return mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) == 0 ? OK : INVALID;
}
