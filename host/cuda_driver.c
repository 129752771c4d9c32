/* Binds libcuda. It is looked for by its one soname, which the GPU's driver installs; nothing else is tried, because a
 * stub library from a toolkit must never be taken for a driver. */
#include "cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fail.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static epCuDriver driver;
static int bound;

/* ISO C has no conversion from dlsym's object pointer to a function pointer; copying the bytes is what POSIX promises.
 */
static void bindSymbol(void *lib, const char *symbol, void *slot, const char **missing) {
  void *address = dlsym(lib, symbol);
  if (!address && missing && !*missing) *missing = symbol;
  memcpy(slot, &address, sizeof(address));
}

static ncclResult_t bindDriver(void *lib) {
  const char *missing = NULL;
  memset(&driver, 0, sizeof(driver));
#define X(slot, symbol, parameters) bindSymbol(lib, #symbol, &driver.slot, &missing);
  EP_CU_FUNCTIONS(X)
#undef X
  bindSymbol(lib, "cuFuncLoad", &driver.funcLoad, NULL);
  bindSymbol(lib, "cuLaunchKernelEx", &driver.launchKernelEx, NULL);
  if (missing)
    return epFail(ncclSystemError, "libcuda.so.1 lacks %s: the CUDA driver is too old, 12.0 or newer is needed",
                  missing);
  epCuResult rc = driver.init(0);
  if (rc != EP_CU_SUCCESS) return epCuFail(&driver, rc, "the CUDA driver does not start: cuInit");
  rc = driver.driverGetVersion(&driver.version);
  if (rc != EP_CU_SUCCESS) return epCuFail(&driver, rc, "cuDriverGetVersion");
  return ncclSuccess;
}

ncclResult_t epCuDriverOpen(const epCuDriver **out) {
  ncclResult_t rc = ncclSuccess;
  pthread_mutex_lock(&mutex);
  if (!bound) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
      rc = epFail(ncclSystemError, "no CUDA driver: %s", dlerror());
    } else {
      rc = bindDriver(lib);
      if (rc == ncclSuccess)
        bound = 1;
      else
        dlclose(lib);
    }
  }
  pthread_mutex_unlock(&mutex);
  if (rc == ncclSuccess) *out = &driver;
  return rc;
}

ncclResult_t epCuFail(const epCuDriver *cu, epCuResult error, const char *format, ...) {
  char what[512];
  const char *name = NULL, *text = NULL;
  va_list args;
  va_start(args, format);
  vsnprintf(what, sizeof(what), format, args);
  va_end(args);
  if (cu->getErrorName(error, &name) != EP_CU_SUCCESS || !name) name = "unknown CUDA error";
  if (cu->getErrorString(error, &text) != EP_CU_SUCCESS || !text) text = "";
  return epFail(ncclUnhandledCudaError, "%s: %s (%d): %s", what, name, error, text);
}
