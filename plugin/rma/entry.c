/* The exported tables: arguments checked, the communicator's mutex taken, its GPU entered. Everything else is behind. */
#include <unistd.h>

#include "rma.h"

#define EP_RMA_EXPORT __attribute__((visibility("default")))

/* A caller that waits without calling progress is served at once; NCCL's threads that do are left to it, so that a turn's
 * operations are worked on together. */
enum { IDLE_US = 10, DRIVEN_US = 1000 };
static int instance; /* what init hands out: there is no state but the communicators' */
static char name[] = "ep";

static epRmaResult missing(const char *call, const char *what) {
  EP_RMA_WARN("%s: %s is NULL", call, what);
  return EP_RMA_INVALID_ARGUMENT;
}
#define NEED(argument) \
  if (!(argument)) return missing(__func__, #argument)

static epRmaResult enter(epRmaColl *coll) {
  coll->wanted++;
  pthread_mutex_lock(&coll->mutex);
  coll->wanted--;
  epRmaResult rc = epRmaGpuEnter(&coll->gpu);
  if (!rc) return EP_RMA_OK;
  epRmaNote(coll, rc);
  pthread_mutex_unlock(&coll->mutex);
  return rc;
}

static void leave(epRmaColl *coll) {
  epRmaGpuLeave(&coll->gpu);
  pthread_mutex_unlock(&coll->mutex);
}

static epRmaResult init(void **ctx, uint64_t commId, epRmaLogger logger) {
  (void)commId;
  NEED(ctx);
  if (logger) epRmaLogSet(logger);
  *ctx = &instance;
  return EP_RMA_OK;
}

static epRmaResult finalize(void *ctx) {
  (void)ctx;
  return EP_RMA_OK;
}

static epRmaResult devices(int *count) {
  epRmaSettings settings;
  NEED(count);
  epRmaResult rc = epRmaSettingsRead(&settings);
  if (!rc) *count = 1;
  return rc;
}

static epRmaResult getProperties(int dev, epRmaProperties *properties) {
  epRmaSettings settings;
  NEED(properties);
  if (dev != 0) {
    EP_RMA_WARN("device %d does not exist: there is one, 0", dev);
    return EP_RMA_INVALID_ARGUMENT;
  }
  epRmaResult rc = epRmaSettingsRead(&settings);
  if (rc) return rc;
  *properties = (epRmaProperties){
      .name = name,
      .guid = 0x6570,
      .ptrSupport = EP_RMA_PTR_HOST | EP_RMA_PTR_CUDA,
      .maxComms = 1 << 16,
      .maxRecvs = EP_RMA_MAX_RECVS,
      .netDeviceType = EP_RMA_DEVICE_GIN_PROXY,
      .virtualDevice = {.count = 1},
      .maxP2pBytes = (size_t)1 << 40,
      .maxCollBytes = (size_t)1 << 40,
      .maxMultiRequestSize = 1,
      .railId = EP_RMA_ID_UNDEFINED,
      .planeId = EP_RMA_ID_UNDEFINED,
  };
  for (int i = 0; i < settings.interfaceCount; i++) properties->speed += settings.interfaces[i].speed;
  return EP_RMA_OK;
}

static epRmaResult startListening(void *ctx, int dev, void *handle, void **listenComm) {
  epRmaListener *listener = NULL;
  (void)ctx;
  NEED(handle);
  NEED(listenComm);
  if (dev != 0) {
    EP_RMA_WARN("device %d does not exist: there is one, 0", dev);
    return EP_RMA_INVALID_ARGUMENT;
  }
  epRmaResult rc = epRmaListen(handle, &listener);
  if (!rc) *listenComm = listener;
  return rc;
}

static epRmaResult closeListen(void *listenComm) {
  NEED(listenComm);
  epRmaCloseListener(listenComm);
  return EP_RMA_OK;
}

static epRmaResult connectAll(void *ctx, void *handles[], int nranks, int rank, void *listenComm, void **collComm) {
  epRmaColl *coll = NULL;
  (void)ctx; /* NCCL 2.30.7 hands over another plugin's here */
  NEED(handles);
  NEED(listenComm);
  NEED(collComm);
  if (nranks < 1 || rank < 0 || rank >= nranks) {
    EP_RMA_WARN("rank %d of %d ranks does not exist", rank, nranks);
    return EP_RMA_INVALID_ARGUMENT;
  }
  epRmaResult rc = epRmaCollOpen(listenComm, handles, (uint32_t)nranks, (uint32_t)rank, &coll);
  if (!rc) *collComm = coll;
  return rc;
}

static epRmaResult closeColl(void *collComm) {
  NEED(collComm);
  return epRmaCollClose(collComm);
}

static epRmaResult makeContext(epRmaColl *coll, int count, int stride, void **rmaCtx) {
  epRmaContext *context = NULL;
  if (count < 1 || count > EP_RMA_MAX_CONTEXTS) {
    EP_RMA_WARN("%d contexts are asked for: 1 to %d are expected", count, EP_RMA_MAX_CONTEXTS);
    return EP_RMA_INVALID_ARGUMENT;
  }
  if (stride < 1 || coll->ranks % (uint32_t)stride != 0) {
    EP_RMA_WARN("ranks in steps of %d are asked for: a divisor of %u is expected", stride, coll->ranks);
    return EP_RMA_INVALID_ARGUMENT;
  }
  epRmaResult rc = enter(coll);
  if (rc) return rc;
  rc = coll->error ? coll->error : epRmaContextCreate(coll, count, &context);
  leave(coll);
  if (!rc) *rmaCtx = context;
  return rc;
}

static epRmaResult createContext(void *collComm, epRmaConfig14 *config, void **rmaCtx) {
  NEED(collComm);
  NEED(config);
  NEED(rmaCtx);
  return makeContext(collComm, config->nContexts, config->rankStride, rmaCtx);
}

static epRmaResult createContext13(void *collComm, epRmaConfig13 *config, void **rmaCtx, epRmaDeviceHandle **device) {
  static epRmaDeviceHandle handle = {.netDeviceType = EP_RMA_DEVICE_GIN_PROXY, .needsProxyProgress = 1};
  NEED(collComm);
  NEED(config);
  NEED(rmaCtx);
  if (device) *device = &handle;
  return makeContext(collComm, config->nContexts, 1, rmaCtx);
}

static epRmaResult destroyContext(void *rmaCtx) {
  NEED(rmaCtx);
  epRmaColl *coll = ((epRmaContext *)rmaCtx)->coll;
  epRmaResult rc = enter(coll);
  if (rc) return rc;
  rc = epRmaContextDestroy(rmaCtx);
  leave(coll);
  return rc;
}

static epRmaResult regMrSym(void *collComm, void *data, size_t size, int type, uint64_t flags, void **mhandle) {
  epRmaWindow *window = NULL;
  NEED(collComm);
  NEED(mhandle);
  epRmaResult rc = enter(collComm);
  if (rc) return rc;
  rc = epRmaWindowRegister(collComm, data, size, type, flags, &window);
  leave(collComm);
  if (!rc) *mhandle = window;
  return rc;
}

static epRmaResult regMrSym13(void *collComm, void *data, size_t size, int type, uint64_t flags, void **mhandle,
                              void **ginHandle) {
  epRmaResult rc = regMrSym(collComm, data, size, type, flags, mhandle);
  if (!rc && ginHandle) *ginHandle = *mhandle;
  return rc;
}

static epRmaResult noDmaBuf(void) {
  EP_RMA_WARN("DMA-BUF descriptors cannot be registered, and getProperties says so: use regMrSym");
  return EP_RMA_INVALID_USAGE;
}

static epRmaResult regMrSymDmaBuf(void *collComm, void *data, size_t size, int type, uint64_t offset, int fd,
                                  uint64_t flags, void **mhandle) {
  (void)collComm, (void)data, (void)size, (void)type, (void)offset, (void)fd, (void)flags, (void)mhandle;
  return noDmaBuf();
}

static epRmaResult regMrSymDmaBuf13(void *collComm, void *data, size_t size, int type, uint64_t offset, int fd,
                                    uint64_t flags, void **mhandle, void **ginHandle) {
  (void)collComm, (void)data, (void)size, (void)type, (void)offset, (void)fd, (void)flags, (void)mhandle,
      (void)ginHandle;
  return noDmaBuf();
}

static epRmaResult deregMrSym(void *collComm, void *mhandle) {
  NEED(collComm);
  NEED(mhandle);
  epRmaResult rc = enter(collComm);
  if (rc) return rc;
  rc = epRmaWindowDeregister(mhandle);
  leave(collComm);
  return rc;
}

static void lockProgress(epRmaColl *coll) {
  if (coll->wanted > 0) usleep(1); /* the progress thread comes back as soon as it has left: it lets others go first */
  pthread_mutex_lock(&coll->mutex);
}

static epRmaResult progressOf(epRmaColl *coll) {
  epRmaResult rc = EP_RMA_OK;
  lockProgress(coll);
  if (epRmaIdle(coll)) {
    __atomic_store_n(&coll->progressedAt, epRmaMicroseconds(), __ATOMIC_RELAXED);
  } else {
    rc = epRmaGpuEnter(&coll->gpu);
    if (rc) epRmaNote(coll, rc);
    if (!rc) {
      rc = epRmaProgress(coll);
      epRmaGpuLeave(&coll->gpu);
    }
  }
  __atomic_store_n(&coll->busy, coll->activeHead != NULL, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&coll->mutex);
  return rc;
}

static bool driven(const epRmaColl *coll) {
  return epRmaMicroseconds() - __atomic_load_n(&coll->drivenAt, __ATOMIC_RELAXED) < DRIVEN_US;
}

static epRmaResult issue(epRmaContext *context, const epRmaPut *put, void **request) {
  epRmaColl *coll = context->coll;
  epRmaOp *op = NULL;
  lockProgress(coll);
  epRmaResult rc = epRmaPutIssue(context, put, &op);
  pthread_mutex_unlock(&coll->mutex);
  if (rc) return rc;
  *request = op;
  if (!driven(coll)) (void)progressOf(coll); /* an error is the communicator's: the next call tells it */
  return EP_RMA_OK;
}

static epRmaResult iput(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size, uint64_t dstOff,
                        void *dstMhandle, uint32_t rank, void **request) {
  NEED(rmaCtx);
  NEED(request);
  const epRmaPut put = {.from = srcMhandle,
                        .to = dstMhandle,
                        .fromOffset = srcOff,
                        .toOffset = dstOff,
                        .size = size,
                        .rank = rank,
                        .context = context};
  return issue(rmaCtx, &put, request);
}

static epRmaResult iputSignal13(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size,
                                uint64_t dstOff, void *dstMhandle, uint32_t rank, uint64_t signalOff,
                                void *signalMhandle, uint64_t signalValue, uint32_t signalOp, void **request) {
  NEED(rmaCtx);
  NEED(signalMhandle);
  NEED(request);
  if (signalOp != EP_RMA_SIGNAL_INC && signalOp != EP_RMA_SIGNAL_ADD) {
    EP_RMA_WARN("signal operation %u is not known: increment (1) or add (2) is expected", signalOp);
    return EP_RMA_INVALID_ARGUMENT;
  }
  const epRmaPut put = {.from = srcMhandle,
                        .to = dstMhandle,
                        .signal = signalMhandle,
                        .fromOffset = srcOff,
                        .toOffset = dstOff,
                        .size = size,
                        .signalOffset = signalOff,
                        .signalValue = signalOp == EP_RMA_SIGNAL_INC ? 1 : signalValue,
                        .rank = rank,
                        .context = context};
  return issue(rmaCtx, &put, request);
}

/* Every signal here is a strong one: behind all puts before it, not only its own. */
static epRmaResult iputSignal(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size,
                              uint64_t dstOff, void *dstMhandle, uint32_t rank, uint64_t signalOff, void *signalMhandle,
                              uint64_t signalValue, uint32_t signalOp, bool strong, void **request) {
  (void)strong;
  return iputSignal13(rmaCtx, context, srcOff, srcMhandle, size, dstOff, dstMhandle, rank, signalOff, signalMhandle,
                      signalValue, signalOp, request);
}

static epRmaResult iget(void *rmaCtx, int context, uint64_t remoteOff, void *remoteMhandle, size_t size,
                        uint64_t localOff, void *localMhandle, uint32_t rank, void **request) {
  (void)rmaCtx, (void)context, (void)remoteOff, (void)remoteMhandle, (void)size, (void)localOff, (void)localMhandle,
      (void)rank, (void)request;
  EP_RMA_WARN("get is not supported: this provider only puts");
  return EP_RMA_INVALID_USAGE;
}

/* It makes what gets brought visible; there are none, so it is done at once. */
static epRmaResult iflush(void *rmaCtx, int context, void *mhandle, uint32_t rank, void **request) {
  (void)rmaCtx, (void)context, (void)mhandle, (void)rank;
  NEED(request);
  *request = NULL;
  return EP_RMA_OK;
}

static epRmaResult test(void *collComm, void *request, int *done) {
  bool finished = false;
  NEED(collComm);
  NEED(request);
  NEED(done);
  *done = 0;
  epRmaColl *coll = collComm;
  /* NCCL asks for everything in flight at every turn of its progress thread: mostly the answer takes no lock. */
  if (!epRmaOpLooksDone(request) && !__atomic_load_n(&coll->error, __ATOMIC_RELAXED) &&
      (driven(coll) || epRmaMicroseconds() - __atomic_load_n(&coll->progressedAt, __ATOMIC_RELAXED) <= IDLE_US))
    return EP_RMA_OK;
  lockProgress(coll);
  epRmaResult rc = epRmaOpTest(request, &finished);
  bool idle = !rc && !finished && epRmaMicroseconds() - coll->progressedAt > IDLE_US;
  pthread_mutex_unlock(&coll->mutex);
  *done = finished;
  return idle ? progressOf(coll) : rc; /* some callers wait here and do not call progress */
}

static epRmaResult progress(void *rmaCtx) {
  NEED(rmaCtx);
  epRmaColl *coll = ((epRmaContext *)rmaCtx)->coll;
  uint64_t now = epRmaMicroseconds(), last = __atomic_exchange_n(&coll->drivenAt, now, __ATOMIC_RELAXED);
  bool busy = __atomic_load_n(&coll->busy, __ATOMIC_RELAXED);
  epRmaResult rc = progressOf(coll);
  if (!busy || now - last > DRIVEN_US) return rc;
  pthread_mutex_lock(&coll->mutex);
  coll->tally.turns++;
  coll->tally.turnUs += now - last;
  coll->tally.workUs += epRmaMicroseconds() - now;
  pthread_mutex_unlock(&coll->mutex);
  return rc;
}

static epRmaResult queryLastError(void *rmaCtx, bool *hasError) {
  /* NCCL 2.30.4 hands over its own context instead: that, too, begins with the communicator. */
  NEED(rmaCtx);
  NEED(hasError);
  epRmaColl *coll = ((epRmaContext *)rmaCtx)->coll;
  coll->wanted++;
  pthread_mutex_lock(&coll->mutex);
  coll->wanted--;
  *hasError = coll->error != EP_RMA_OK;
  pthread_mutex_unlock(&coll->mutex);
  return EP_RMA_OK;
}

EP_RMA_EXPORT extern const epRmaTable14 ncclRmaPlugin_v14;
EP_RMA_EXPORT extern const epRmaTable13 ncclRmaPlugin_v13;
EP_RMA_EXPORT extern const epRmaTable13 ncclGinPlugin_v13;

/* The versions differ in four calls. */
#define TABLE(create, reg, regDmaBuf, putSignal)                                                               \
  {                                                                                                            \
    name, init, devices, getProperties, startListening, connectAll, create, reg, regDmaBuf, deregMrSym,        \
        destroyContext, closeColl, closeListen, iput, putSignal, iget, iflush, test, progress, queryLastError, \
        finalize                                                                                               \
  }
const epRmaTable14 ncclRmaPlugin_v14 = TABLE(createContext, regMrSym, regMrSymDmaBuf, iputSignal);
const epRmaTable13 ncclRmaPlugin_v13 = TABLE(createContext13, regMrSym13, regMrSymDmaBuf13, iputSignal13);
/* The same by the name that NCCL 2.30.3 and 2.30.4 look up. */
const epRmaTable13 ncclGinPlugin_v13 = TABLE(createContext13, regMrSym13, regMrSymDmaBuf13, iputSignal13);

/* Twenty calls behind a name, and what NCCL's own structs measure. */
_Static_assert(sizeof(epRmaTable14) == 21 * sizeof(void *) && sizeof(epRmaTable13) == 21 * sizeof(void *), "tables");
_Static_assert(sizeof(epRmaProperties) == 128 && offsetof(epRmaProperties, maxP2pBytes) == 104, "properties");
_Static_assert(sizeof(epRmaConfig14) == 12 && sizeof(epRmaConfig13) == 20, "configurations");
_Static_assert(sizeof(epRmaDeviceHandle) == 32, "device handle");
