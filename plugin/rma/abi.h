/* What NCCL and an RMA plugin must agree on, as far as binary compatibility needs it: values, field orders, argument
 * lists of versions 13 and 14 of the plugin interface. Names are ours, so that NCCL's own headers are never needed. */
#ifndef EP_RMA_ABI_H_
#define EP_RMA_ABI_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ncclResult_t */
typedef enum {
  EP_RMA_OK = 0,
  EP_RMA_CUDA_ERROR = 1,
  EP_RMA_SYSTEM_ERROR = 2,
  EP_RMA_INTERNAL_ERROR = 3,
  EP_RMA_INVALID_ARGUMENT = 4,
  EP_RMA_INVALID_USAGE = 5,
  EP_RMA_REMOTE_ERROR = 6
} epRmaResult;

enum { EP_RMA_LOG_WARN = 2, EP_RMA_LOG_INFO = 3 };
enum { EP_RMA_SUBSYS_INIT = 0x1, EP_RMA_SUBSYS_NET = 0x10 };
typedef void (*epRmaLogger)(int level, unsigned long subsystems, const char *where, int line, const char *format, ...);

enum { EP_RMA_HANDLE_BYTES = 128 };                    /* what a listener may tell its peers */
enum { EP_RMA_PTR_HOST = 0x1, EP_RMA_PTR_CUDA = 0x2 }; /* kinds of memory */
enum { EP_RMA_DEVICE_GIN_PROXY = 2 };                  /* kind of network device: NCCL's progress thread drives it */
enum { EP_RMA_MR_SIGNAL_NEVER_RESET = 0x2 };           /* only signals change this memory: its value can be shadowed */
enum { EP_RMA_SIGNAL_INC = 0x1, EP_RMA_SIGNAL_ADD = 0x2 };
enum { EP_RMA_REQUESTS_PER_RECV = 32 }; /* requests in flight for a context and peer, times maxRecvs */
enum { EP_RMA_ID_UNDEFINED = -1 };

/* ncclNetProperties_v12_t */
typedef struct {
  char *name;
  char *pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed; /* Mbit/s */
  int port;
  float latency; /* us */
  int maxComms;
  int maxRecvs;
  int netDeviceType;
  int netDeviceVersion;
  struct {
    int count;
    int devices[8];
  } virtualDevice;
  size_t maxP2pBytes;
  size_t maxCollBytes;
  int maxMultiRequestSize;
  int16_t railId;
  int16_t planeId;
} epRmaProperties;

typedef struct {
  int nContexts;
  int trafficClass;
  int rankStride;
} epRmaConfig14;

typedef struct {
  int nSignals;
  int nCounters;
  int nContexts;
  int queueDepth;
  int trafficClass;
} epRmaConfig13;

/* ncclNetDeviceHandle_v11_t */
typedef struct {
  int netDeviceType;
  int netDeviceVersion;
  void *handle;
  size_t size;
  int needsProxyProgress;
} epRmaDeviceHandle;

/* ncclRma_v14_t: symbol ncclRmaPlugin_v14. */
typedef struct {
  const char *name;
  epRmaResult (*init)(void **ctx, uint64_t commId, epRmaLogger logger);
  epRmaResult (*devices)(int *count);
  epRmaResult (*getProperties)(int dev, epRmaProperties *properties);
  epRmaResult (*listen)(void *ctx, int dev, void *handle, void **listenComm);
  epRmaResult (*connect)(void *ctx, void *handles[], int nranks, int rank, void *listenComm, void **collComm);
  epRmaResult (*createContext)(void *collComm, epRmaConfig14 *config, void **rmaCtx);
  epRmaResult (*regMrSym)(void *collComm, void *data, size_t size, int type, uint64_t flags, void **mhandle);
  epRmaResult (*regMrSymDmaBuf)(void *collComm, void *data, size_t size, int type, uint64_t offset, int fd,
                                uint64_t flags, void **mhandle);
  epRmaResult (*deregMrSym)(void *collComm, void *mhandle);
  epRmaResult (*destroyContext)(void *rmaCtx);
  epRmaResult (*closeColl)(void *collComm);
  epRmaResult (*closeListen)(void *listenComm);
  epRmaResult (*iput)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size, uint64_t dstOff,
                      void *dstMhandle, uint32_t rank, void **request);
  epRmaResult (*iputSignal)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size, uint64_t dstOff,
                            void *dstMhandle, uint32_t rank, uint64_t signalOff, void *signalMhandle,
                            uint64_t signalValue, uint32_t signalOp, bool strong, void **request);
  epRmaResult (*iget)(void *rmaCtx, int context, uint64_t remoteOff, void *remoteMhandle, size_t size,
                      uint64_t localOff, void *localMhandle, uint32_t rank, void **request);
  epRmaResult (*iflush)(void *rmaCtx, int context, void *mhandle, uint32_t rank, void **request);
  epRmaResult (*test)(void *collComm, void *request, int *done);
  epRmaResult (*progress)(void *rmaCtx);
  epRmaResult (*queryLastError)(void *rmaCtx, bool *hasError);
  epRmaResult (*finalize)(void *ctx);
} epRmaTable14;

/* ncclGin_v13_t: symbol ncclRmaPlugin_v13. */
typedef struct {
  const char *name;
  epRmaResult (*init)(void **ctx, uint64_t commId, epRmaLogger logger);
  epRmaResult (*devices)(int *count);
  epRmaResult (*getProperties)(int dev, epRmaProperties *properties);
  epRmaResult (*listen)(void *ctx, int dev, void *handle, void **listenComm);
  epRmaResult (*connect)(void *ctx, void *handles[], int nranks, int rank, void *listenComm, void **collComm);
  epRmaResult (*createContext)(void *collComm, epRmaConfig13 *config, void **rmaCtx, epRmaDeviceHandle **device);
  epRmaResult (*regMrSym)(void *collComm, void *data, size_t size, int type, uint64_t flags, void **mhandle,
                          void **ginHandle);
  epRmaResult (*regMrSymDmaBuf)(void *collComm, void *data, size_t size, int type, uint64_t offset, int fd,
                                uint64_t flags, void **mhandle, void **ginHandle);
  epRmaResult (*deregMrSym)(void *collComm, void *mhandle);
  epRmaResult (*destroyContext)(void *rmaCtx);
  epRmaResult (*closeColl)(void *collComm);
  epRmaResult (*closeListen)(void *listenComm);
  epRmaResult (*iput)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size, uint64_t dstOff,
                      void *dstMhandle, uint32_t rank, void **request);
  epRmaResult (*iputSignal)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size, uint64_t dstOff,
                            void *dstMhandle, uint32_t rank, uint64_t signalOff, void *signalMhandle,
                            uint64_t signalValue, uint32_t signalOp, void **request);
  epRmaResult (*iget)(void *rmaCtx, int context, uint64_t remoteOff, void *remoteMhandle, size_t size,
                      uint64_t localOff, void *localMhandle, uint32_t rank, void **request);
  epRmaResult (*iflush)(void *rmaCtx, int context, void *mhandle, uint32_t rank, void **request);
  epRmaResult (*test)(void *collComm, void *request, int *done);
  epRmaResult (*progress)(void *rmaCtx);
  epRmaResult (*queryLastError)(void *rmaCtx, bool *hasError);
  epRmaResult (*finalize)(void *ctx);
} epRmaTable13;

#endif
