/* Finds libnvrtc and binds the few functions that the JIT calls. The order of the search makes the process's own copy
 * win, so that a framework and this library never compile with two different versions by accident. */
#include "nvrtc.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fail.h"

#define EP_NVRTC_MIN_VERSION 12000 /* older ones know no sm_90 bulk copies */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static epNvrtc binding;
static int bound;

static const char *const sonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
enum { SONAMES = sizeof(sonames) / sizeof(sonames[0]) };

/* Folders in which a pip or toolkit NVRTC lies, seen from the folder of a library that is already loaded. */
static const char *const relatives[] = {".", "../../cu13/lib", "../../cuda_nvrtc/lib", "../../nvidia/cu13/lib",
                                        "../../nvidia/cuda_nvrtc/lib"};
enum { RELATIVES = sizeof(relatives) / sizeof(relatives[0]) };

static const char *baseName(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static int startsWith(const char *s, const char *prefix) { return strncmp(s, prefix, strlen(prefix)) == 0; }

/* What the process has loaded: an NVRTC under any file name (wheels rename theirs), and folders to search from. */
typedef struct {
  char nvrtc[1024];
  char folders[16][1024];
  int folderCount;
} loadedLibraries;

static int visitLibrary(struct dl_phdr_info *info, size_t size, void *arg) {
  (void)size;
  loadedLibraries *found = arg;
  const char *name = info->dlpi_name ? baseName(info->dlpi_name) : "";
  if (startsWith(name, "libnvrtc") && !startsWith(name, "libnvrtc-builtins") && !found->nvrtc[0]) {
    snprintf(found->nvrtc, sizeof(found->nvrtc), "%s", info->dlpi_name);
  } else if ((startsWith(name, "libcudart") || startsWith(name, "libnccl") || startsWith(name, "libtorch")) &&
             name != info->dlpi_name && found->folderCount < 16) {
    snprintf(found->folders[found->folderCount++], sizeof(found->folders[0]), "%.*s", (int)(name - info->dlpi_name - 1),
             info->dlpi_name);
  }
  return 0;
}

static void *tryFolder(const char *folder) {
  for (int i = 0; i < SONAMES; i++) {
    char path[2304];
    snprintf(path, sizeof(path), "%s/%s", folder, sonames[i]);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (lib) return lib;
  }
  return NULL;
}

static void *tryPattern(const char *prefix, const char *pattern) {
  void *lib = NULL;
  char path[2304];
  glob_t matches;
  snprintf(path, sizeof(path), "%s%s", prefix, pattern);
  if (glob(path, 0, NULL, &matches) != 0) return NULL;
  for (size_t i = 0; i < matches.gl_pathc && !lib; i++) lib = tryFolder(matches.gl_pathv[i]);
  globfree(&matches);
  return lib;
}

static void *findLibrary(void) {
  static const char *const roots[] = {"VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"};
  static const char *const patterns[] = {"/lib/python3*/site-packages/nvidia/cu13/lib",
                                         "/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib", "/lib64", "/lib"};
  void *lib = NULL;
  loadedLibraries loaded;
  memset(&loaded, 0, sizeof(loaded));
  dl_iterate_phdr(visitLibrary, &loaded);

  for (int i = 0; i < SONAMES; i++)
    if ((lib = dlopen(sonames[i], RTLD_NOW | RTLD_NOLOAD))) return lib;
  if (loaded.nvrtc[0] && (lib = dlopen(loaded.nvrtc, RTLD_NOW | RTLD_NOLOAD))) return lib;

  const char *named = getenv("NCCL_EP_NVRTC");
  if (named && *named) {
    if ((lib = dlopen(named, RTLD_NOW | RTLD_LOCAL))) return lib;
    epLog(EP_LOG_WARN, "NCCL_EP_NVRTC=%s cannot be loaded: %s", named, dlerror());
  }
  for (int i = 0; i < SONAMES; i++)
    if ((lib = dlopen(sonames[i], RTLD_NOW | RTLD_LOCAL))) return lib;
  for (int i = 0; i < loaded.folderCount; i++) {
    for (int j = 0; j < RELATIVES; j++) {
      char folder[1152];
      snprintf(folder, sizeof(folder), "%s/%s", loaded.folders[i], relatives[j]);
      if ((lib = tryFolder(folder))) return lib;
    }
  }
  for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++) {
    const char *root = getenv(roots[i]);
    for (size_t j = 0; root && *root && j < sizeof(patterns) / sizeof(patterns[0]); j++)
      if ((lib = tryPattern(root, patterns[j]))) return lib;
  }
  return tryFolder("/usr/local/cuda/lib64");
}

/* ISO C forbids converting the object pointer that dlsym returns; copying its bytes is what POSIX promises works. */
static int bindSymbol(void *lib, const char *name, void *slot, const char **missing) {
  void *symbol = dlsym(lib, name);
  if (!symbol && !*missing) *missing = name;
  memcpy(slot, &symbol, sizeof(symbol));
  return symbol != NULL;
}

static ncclResult_t bindLibrary(void *lib, epNvrtc *b) {
  int (*version)(int *, int *) = NULL;
  int (*numArchs)(int *) = NULL;
  int (*archs)(int *) = NULL;
  const char *missing = NULL;
  memset(b, 0, sizeof(*b));
  bindSymbol(lib, "nvrtcVersion", &version, &missing);
  bindSymbol(lib, "nvrtcGetNumSupportedArchs", &numArchs, &missing);
  bindSymbol(lib, "nvrtcGetSupportedArchs", &archs, &missing);
  bindSymbol(lib, "nvrtcGetErrorString", &b->getErrorString, &missing);
  bindSymbol(lib, "nvrtcCreateProgram", &b->createProgram, &missing);
  bindSymbol(lib, "nvrtcDestroyProgram", &b->destroyProgram, &missing);
  bindSymbol(lib, "nvrtcCompileProgram", &b->compileProgram, &missing);
  bindSymbol(lib, "nvrtcGetProgramLogSize", &b->getProgramLogSize, &missing);
  bindSymbol(lib, "nvrtcGetProgramLog", &b->getProgramLog, &missing);
  bindSymbol(lib, "nvrtcGetCUBINSize", &b->getCubinSize, &missing);
  bindSymbol(lib, "nvrtcGetCUBIN", &b->getCubin, &missing);
  bindSymbol(lib, "nvrtcGetPTXSize", &b->getPtxSize, &missing);
  bindSymbol(lib, "nvrtcGetPTX", &b->getPtx, &missing);

  Dl_info info;
  void *address = dlsym(lib, "nvrtcVersion");
  snprintf(b->path, sizeof(b->path), "%s",
           address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "libnvrtc");
  if (missing)
    return epFail(ncclSystemError, "NVRTC at %s lacks %s: too old, 12.0 or newer is needed", b->path, missing);

  int major = 0, minor = 0, count = 0;
  int rc = version(&major, &minor);
  if (rc != EP_NVRTC_SUCCESS)
    return epFail(ncclSystemError, "NVRTC at %s: nvrtcVersion failed: %s", b->path, b->getErrorString(rc));
  b->version = 1000 * major + 10 * minor;
  if (b->version < EP_NVRTC_MIN_VERSION)
    return epFail(ncclSystemError, "NVRTC at %s is version %d.%d: 12.0 or newer is needed", b->path, major, minor);
  if (numArchs(&count) == EP_NVRTC_SUCCESS && count > 0 && count <= EP_NVRTC_MAX_ARCHS &&
      archs(b->archs) == EP_NVRTC_SUCCESS)
    b->archCount = count;
  return ncclSuccess;
}

/* NVRTC opens its builtins by bare name, which fails where the loader would not have found NVRTC itself (pip's packages have
 * no run path). Loaded from beside it first, the name is already known. Where there is none, NVRTC says so when it compiles. */
static void loadBuiltins(const epNvrtc *b) {
  const char *base = baseName(b->path);
  char path[sizeof(b->path) + 64];
  if (base == b->path) return;
  snprintf(path, sizeof(path), "%.*slibnvrtc-builtins.so.%d.%d", (int)(base - b->path), b->path, b->version / 1000,
           b->version % 1000 / 10);
  if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) epLog(EP_LOG_INFO, "NVRTC's builtins are not beside it: %s", dlerror());
}

ncclResult_t epNvrtcOpen(const epNvrtc **out) {
  ncclResult_t rc = ncclSuccess;
  pthread_mutex_lock(&mutex);
  if (!bound) {
    void *lib = findLibrary();
    if (!lib) {
      rc = epFail(ncclSystemError,
                  "NVRTC not found: looked for libnvrtc.so.13 and libnvrtc.so.12 among loaded libraries, in "
                  "$NCCL_EP_NVRTC, through the loader, beside libcudart, libnccl and libtorch, under $VIRTUAL_ENV, "
                  "$CONDA_PREFIX, $CUDA_HOME and /usr/local/cuda; `pip install nvidia-cuda-nvrtc` provides it");
    } else {
      rc = bindLibrary(lib, &binding);
      if (rc == ncclSuccess) {
        loadBuiltins(&binding);
        bound = 1;
      } else {
        dlclose(lib);
      }
    }
  }
  pthread_mutex_unlock(&mutex);
  if (rc == ncclSuccess) *out = &binding;
  return rc;
}
