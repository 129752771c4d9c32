/* Finds the NCCL of the process and binds it. A communicator can only be used by the library that made it, so symbols
 * and libraries that are already loaded come before what the loader would find. */
#include "cuda_nccl.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "fail.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static epNccl binding;
static int bound;

/* Frameworks also carry NCCL inside a library of their own, and load it where RTLD_DEFAULT does not look. */
static int visitLibrary(struct dl_phdr_info *info, size_t size, void *arg) {
  (void)size;
  char *found = arg;
  const char *slash = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
  const char *name = slash ? slash + 1 : info->dlpi_name ? info->dlpi_name : "";
  int candidate = strncmp(name, "libnccl.so", 10) == 0 || strncmp(name, "libnccl-", 8) == 0 ||
                  strncmp(name, "libtorch_cuda", 13) == 0;
  if (!candidate || (found[0] && strncmp(name, "libtorch", 8) == 0)) return 0;
  snprintf(found, sizeof(binding.path), "%s", info->dlpi_name);
  return 0;
}

/* 1 and a handle for dlsym. RTLD_DEFAULT, which is a null pointer, is one of them. */
static int findLoaded(void **lib) {
  char found[sizeof(binding.path)] = "";
  *lib = RTLD_DEFAULT;
  if (dlsym(RTLD_DEFAULT, "ncclCommWindowRegister")) return 1;
  if ((*lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD))) return 1;
  dl_iterate_phdr(visitLibrary, found);
  if (!found[0] || !(*lib = dlopen(found, RTLD_NOW | RTLD_NOLOAD))) return 0;
  if (dlsym(*lib, "ncclCommUserRank")) return 1;
  dlclose(*lib);
  return 0;
}

/* ISO C has no conversion from dlsym's object pointer to a function pointer; copying the bytes is what POSIX promises.
 */
static void bindSymbol(void *lib, const char *symbol, void *slot, const char **missing) {
  void *address = dlsym(lib, symbol);
  if (!address && missing && !*missing) *missing = symbol;
  memcpy(slot, &address, sizeof(address));
}

static ncclResult_t bindLibrary(void *lib, epNccl *b) {
  const char *missing = NULL;
  Dl_info info;
  memset(b, 0, sizeof(*b));
#define X(slot, symbol, result, parameters) bindSymbol(lib, #symbol, &b->slot, &missing);
  EP_NCCL_FUNCTIONS(X)
#undef X
  bindSymbol(lib, "ncclGetLsaDevicePointer", &b->getLsaDevicePointer, NULL);
  bindSymbol(lib, "ncclWinGetUserPtr", &b->winGetUserPtr, NULL);
  bindSymbol(lib, "ncclCommQueryProperties", &b->queryProperties, NULL);
  bindSymbol(lib, "ncclDevCommCreate", &b->devCommCreate, NULL);
  bindSymbol(lib, "ncclDevCommDestroy", &b->devCommDestroy, NULL);
  void *address = dlsym(lib, "ncclGetVersion");
  snprintf(b->path, sizeof(b->path), "%s",
           address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "libnccl.so.2");
  if (!b->getVersion || b->getVersion(&b->version) != ncclSuccess)
    return epFail(ncclSystemError, "NCCL at %s does not tell its version: 2.28 or newer is needed", b->path);
  if (b->version < EP_NCCL_MIN_VERSION)
    return epFail(ncclSystemError, "NCCL at %s has version code %d: 2.28 or newer is needed (symmetric windows)",
                  b->path, b->version);
  if (missing) return epFail(ncclSystemError, "NCCL at %s (version code %d) lacks %s", b->path, b->version, missing);
  return ncclSuccess;
}

ncclResult_t epNcclOpen(int mayLoad, const epNccl **out) {
  ncclResult_t rc = ncclSuccess;
  pthread_mutex_lock(&mutex);
  if (!bound) {
    void *lib;
    int found = findLoaded(&lib);
    if (!found && mayLoad) found = (lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) != NULL;
    if (!found) {
      rc = mayLoad ? epFail(ncclSystemError, "NCCL not found: no library with NCCL is loaded, and the loader says: %s",
                            dlerror())
                   : epFail(ncclSystemError,
                            "NCCL not found: no loaded library has ncclCommWindowRegister or is libnccl.so.2, "
                            "so the communicator cannot be one of NCCL's");
    } else {
      rc = bindLibrary(lib, &binding);
      if (rc == ncclSuccess)
        bound = 1;
      else if (lib != RTLD_DEFAULT)
        dlclose(lib);
    }
  }
  pthread_mutex_unlock(&mutex);
  if (rc == ncclSuccess) *out = &binding;
  return rc;
}
