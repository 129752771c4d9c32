/* NVML, bound at run time by name; where it is not there, that is what is recorded. */
#include "clocks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { CLOCK_SM = 1, CLOCK_MEMORY = 2 };

static struct {
  int (*init)(void);
  int (*byBusId)(const char *busId, void **device);
  int (*clock)(void *device, int kind, unsigned *mhz);
  int (*maxClock)(void *device, int kind, unsigned *mhz);
  int (*driverVersion)(char *text, unsigned bytes);
} nvml;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char reason[160]; /* empty: usable */

static int bind(void *library, const char *symbol, void *field) {
  void *found = dlsym(library, symbol);
  memcpy(field, &found, sizeof(found));
  if (!found) snprintf(reason, sizeof(reason), "libnvidia-ml.so.1 lacks %s", symbol);
  return found ? 0 : -1;
}

static void openNvml(void) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  int rc;
  if (!library) {
    snprintf(reason, sizeof(reason), "libnvidia-ml.so.1 was not found");
    return;
  }
  if (bind(library, "nvmlInit_v2", &nvml.init) || bind(library, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.byBusId) ||
      bind(library, "nvmlDeviceGetClockInfo", &nvml.clock) ||
      bind(library, "nvmlDeviceGetMaxClockInfo", &nvml.maxClock) ||
      bind(library, "nvmlSystemGetDriverVersion", &nvml.driverVersion))
    return;
  rc = nvml.init();
  if (rc) snprintf(reason, sizeof(reason), "nvmlInit failed with %d", rc);
}

void epClocksRead(const char *busId, epClocks *c) {
  void *device = NULL;
  unsigned sm = 0;
  int rc;
  pthread_once(&once, openNvml);
  if (*reason) {
    snprintf(c->missing, sizeof(c->missing), "%s", reason);
    return;
  }
  rc = nvml.byBusId(busId, &device);
  if (!rc) rc = nvml.clock(device, CLOCK_SM, &sm);
  if (!rc && !c->readings) rc = nvml.maxClock(device, CLOCK_SM, &c->smMax);
  if (!rc && !c->readings) rc = nvml.clock(device, CLOCK_MEMORY, &c->memory);
  if (!rc && !c->readings) rc = nvml.driverVersion(c->driver, sizeof(c->driver));
  if (rc) {
    snprintf(c->missing, sizeof(c->missing), "NVML answers %d for the GPU at %s", rc, busId);
    return;
  }
  if (!c->readings || sm < c->smLow) c->smLow = sm;
  if (!c->readings || sm > c->smHigh) c->smHigh = sm;
  c->readings++;
}
