/* Finds and loads libnccl_ep_emu.so: $NCCL_EP_EMU_MODULE, else beside the file that holds this code, else in ../emu/ of
 * it (the build tree). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include "emu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "env.h"
#include "fail.h"

#define EP_EMU_FILE "libnccl_ep_emu.so"

static pthread_mutex_t epEmuLock = PTHREAD_MUTEX_INITIALIZER; /* guards loading */
static const epEmuModule *epEmu;                              /* set once, released; read by any thread */

static ncclResult_t epEmuFailLine(ncclResult_t code, const char *line) { return epFail(code, "%s", line); }

static ncclResult_t epEmuPath(char *path, size_t bytes) {
  static const char *const places[] = {"", "../emu/"};
  const char *named = epEnvString(EP_ENV_EMU_MODULE);
  Dl_info self;
  size_t folder;
  if (named && named[0]) {
    if ((size_t)snprintf(path, bytes, "%s", named) >= bytes)
      return epFail(ncclInvalidArgument, "%s is longer than %zu bytes", epEnvName(EP_ENV_EMU_MODULE), bytes);
    return ncclSuccess;
  }
  if (!dladdr(&epEmuLock, &self) || !self.dli_fname)
    return epFail(ncclSystemError, "emulated fabric: the library's own file is not known; set %s",
                  epEnvName(EP_ENV_EMU_MODULE));
  folder = strrchr(self.dli_fname, '/') ? (size_t)(strrchr(self.dli_fname, '/') - self.dli_fname) + 1 : 0;
  for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
    if ((size_t)snprintf(path, bytes, "%.*s%s%s", (int)folder, folder ? self.dli_fname : "", places[i], EP_EMU_FILE) <
            bytes &&
        access(path, R_OK) == 0)
      return ncclSuccess;
  return epFail(ncclSystemError, "emulated fabric: %s is neither beside %s nor in ../emu; set %s", EP_EMU_FILE,
                self.dli_fname, epEnvName(EP_ENV_EMU_MODULE));
}

static ncclResult_t epEmuOpen(const epEmuModule **module) {
  char path[4096];
  void *lib;
  epEmuModuleFn entry;
  const epEmuModule *m;
  ncclResult_t r = epEmuPath(path, sizeof path);
  if (r != ncclSuccess) return r;
  lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib) return epFail(ncclSystemError, "emulated fabric: %s", dlerror());
  *(void **)&entry = dlsym(lib, EP_EMU_MODULE_SYMBOL);
  if (!entry) {
    r = epFail(ncclSystemError, "emulated fabric: %s has no %s", path, EP_EMU_MODULE_SYMBOL);
    goto close;
  }
  m = entry(epEmuFailLine);
  if (!m || m->version != EP_EMU_MODULE_VERSION) {
    r = epFail(ncclSystemError, "emulated fabric: %s has version %u: expected %u", path, m ? m->version : 0,
               EP_EMU_MODULE_VERSION);
    goto close;
  }
  *module = m;
  epLog(EP_LOG_INFO, "emulated fabric: loaded %s", path);
  return ncclSuccess;
close:
  dlclose(lib);
  return r;
}

const epEmuModule *epEmuLoaded(void) { return __atomic_load_n(&epEmu, __ATOMIC_ACQUIRE); }

ncclResult_t epEmuLoad(const epEmuModule **module) {
  const epEmuModule *m = epEmuLoaded();
  ncclResult_t r = ncclSuccess;
  if (!m) {
    pthread_mutex_lock(&epEmuLock);
    m = epEmuLoaded();
    if (!m) {
      r = epEmuOpen(&m);
      if (r == ncclSuccess) __atomic_store_n(&epEmu, m, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&epEmuLock);
  }
  if (r == ncclSuccess) *module = m;
  return r;
}
