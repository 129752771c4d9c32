/* Binds the CUDA driver and NCCL by name, once a process. A missing library or symbol is an answer, not a failure: the
 * caller says what it means. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"

static pthread_once_t driverOnce = PTHREAD_ONCE_INIT, ncclOnce = PTHREAD_ONCE_INIT;
static epDriver driver;
static epNccl nccl;
static char driverReason[256], ncclReason[256]; /* empty: usable */

/* ISO C has no cast from object to function pointer; POSIX promises that this copy works. */
static int bind(void *library, const char *symbol, void *field, char *reason, size_t size) {
  void *found = dlsym(library, symbol);
  if (!found) snprintf(reason, size, "symbol %s is missing", symbol);
  memcpy(field, &found, sizeof(found));
  return found ? 0 : -1;
}

static void openDriver(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  epCuResult rc;
  if (!library) {
    snprintf(driverReason, sizeof(driverReason), "libcuda.so.1 was not found: no NVIDIA driver");
    return;
  }
#define X(field, symbol, arguments) \
  if (bind(library, symbol, &driver.field, driverReason, sizeof(driverReason))) return;
  EP_DRIVER_CALLS(X)
#undef X
  rc = driver.init(0);
  if (rc) snprintf(driverReason, sizeof(driverReason), "cuInit failed with %d", rc);
}

static void openNccl(void) {
  char missing[64];
  const char *path = getenv("NCCL_EP_NCCL");
  void *library = dlopen(path && *path ? path : "libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    const char *why = dlerror();
    snprintf(ncclReason, sizeof(ncclReason),
             "NCCL was not found (%s); put it on LD_LIBRARY_PATH or name it in NCCL_EP_NCCL",
             why ? why : "libnccl.so.2");
    return;
  }
  if (bind(library, "ncclGetVersion", &nccl.getVersion, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclGetUniqueId", &nccl.getUniqueId, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclCommInitRank", &nccl.commInitRank, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclCommDestroy", &nccl.commDestroy, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclCommAbort", &nccl.commAbort, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclGetErrorString", &nccl.getErrorString, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclGroupStart", &nccl.groupStart, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclGroupEnd", &nccl.groupEnd, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclSend", &nccl.send, ncclReason, sizeof(ncclReason)) ||
      bind(library, "ncclRecv", &nccl.receive, ncclReason, sizeof(ncclReason)))
    return;
  bind(library, "ncclMemAlloc", &nccl.memAlloc, missing, sizeof(missing));
  bind(library, "ncclMemFree", &nccl.memFree, missing, sizeof(missing));
  bind(library, "ncclCommWindowRegister", &nccl.windowRegister, missing, sizeof(missing));
  bind(library, "ncclCommWindowDeregister", &nccl.windowDeregister, missing, sizeof(missing));
}

const epDriver *epDriverOpen(const char **reason) {
  pthread_once(&driverOnce, openDriver);
  if (reason) *reason = driverReason;
  return *driverReason ? NULL : &driver;
}

const epNccl *epNcclOpen(const char **reason) {
  pthread_once(&ncclOnce, openNccl);
  if (reason) *reason = ncclReason;
  return *ncclReason ? NULL : &nccl;
}

int epDriverCheck(const epDriver *d, epCuResult result, const char *what) {
  const char *text = NULL;
  if (!result) return 0;
  if (d->errorString(result, &text) || !text) text = "unknown error";
  return epToolFail("%s: CUDA error %d: %s", what, result, text);
}
