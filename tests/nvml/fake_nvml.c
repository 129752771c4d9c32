/* An NVML without a driver: GPU 0000:01:00.0 has 18 links of which one is down and one does not tell its speed; every other
 * GPU has none. */
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, LINKS = 18, DOWN = 3, SILENT = 5, SPEED_FIELD = 164 };

typedef struct field {
  unsigned id, scope;
  long long timestamp, latency;
  int type, result;
  union {
    unsigned number;
    unsigned long long bytes;
  } value;
} field;

static int gpus[2];
static int running;

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device);
int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *up);
int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *version);
int nvmlDeviceGetFieldValues(void *device, int count, field *values);

int nvmlInit_v2(void) { return running++, OK; }
int nvmlShutdown(void) { return running-- > 0 ? OK : NOT_FOUND; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
  if (!running || strlen(address) != strlen("00000000:01:00.0")) return NOT_FOUND;
  *device = &gpus[strcmp(address, "00000000:01:00.0") != 0];
  return OK;
}
int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *up) {
  if (device != &gpus[0] || link >= LINKS) return NOT_SUPPORTED;
  *up = link != DOWN;
  return OK;
}
int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *version) {
  *version = 6;
  return device == &gpus[0] && link < LINKS ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetFieldValues(void *device, int count, field *values) {
  for (int i = 0; i < count; i++) {
    values[i].result = device != &gpus[0] || values[i].id != SPEED_FIELD || values[i].scope == SILENT;
    values[i].value.number = 26000;
  }
  return OK;
}
