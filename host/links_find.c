/* NVML and sysfs, read for two numbers. NVML is bound here and let go at once; a machine without it, or without
 * NICs, is an ordinary one. */
#include "links_find.h"

#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "env.h"

enum { MAX_NVLINKS = 36, NVML_FIELD_SPEED = 164, NVML_OK = 0 };

/* nvmlFieldValue_t: scope is the link, the value of this field an unsigned number of MB/s. */
typedef struct nvmlField {
  unsigned id, scope;
  long long timestamp, latency;
  int type, result;
  union {
    unsigned number;
    unsigned long long bytes;
  } value;
} nvmlField;

static int bind(void *lib, const char *symbol, void *slot) {
  void *address = dlsym(lib, symbol);
  memcpy(slot, &address, sizeof address);
  return address != NULL;
}

/* Where NVML does not tell the speed: what links of this generation carry, GB/s a direction. The codes 1, 2, 4, 6 and 7 stand for
 * NVLink 1 to 5. */
static double speedOfGeneration(unsigned generation) {
  return generation >= 7 ? 50 : generation >= 2 ? 25 : generation == 1 ? 20 : 0;
}

static double nvlinkRate(const epPciAddress *gpu, char *from, size_t room) {
  int (*init)(void), (*shutdown)(void), (*byAddress)(const char *, void **), (*state)(void *, unsigned, int *),
      (*generation)(void *, unsigned, unsigned *), (*fields)(void *, int, nvmlField *);
  char address[32];
  double sum = 0;
  unsigned count = 0;
  void *device, *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  snprintf(from, room, "NVLink unknown (no NVML)");
  if (!lib) return 0;
  if (!bind(lib, "nvmlInit_v2", &init) || !bind(lib, "nvmlShutdown", &shutdown) ||
      !bind(lib, "nvmlDeviceGetHandleByPciBusId_v2", &byAddress) || !bind(lib, "nvmlDeviceGetNvLinkState", &state) ||
      !bind(lib, "nvmlDeviceGetNvLinkVersion", &generation) || !bind(lib, "nvmlDeviceGetFieldValues", &fields) ||
      init() != NVML_OK)
    goto close;
  snprintf(address, sizeof address, "%08X:%02X:%02X.0", (unsigned)gpu->domain, (unsigned)gpu->bus,
           (unsigned)gpu->device);
  if (byAddress(address, &device) == NVML_OK) {
    for (unsigned link = 0; link < MAX_NVLINKS; link++) {
      int up = 0;
      unsigned version = 0;
      nvmlField speed = {.id = NVML_FIELD_SPEED, .scope = link};
      if (state(device, link, &up) != NVML_OK || !up) continue;
      count++;
      if (fields(device, 1, &speed) == NVML_OK && speed.result == NVML_OK && speed.value.number)
        sum += speed.value.number / 1000.0;
      else if (generation(device, link, &version) == NVML_OK)
        sum += speedOfGeneration(version);
    }
    snprintf(from, room, "%u NVLinks, %.0f GB/s", count, sum);
  }
  (void)shutdown();
close:
  (void)dlclose(lib);
  return sum;
}

/* ---- NICs ------------------------------------------------------------------------------------------------------- */

/* The first number of a file; 0 where there is none. `base`: 0 for what begins with 0x. */
static unsigned long numberIn(const char *path, int base) {
  char text[64];
  unsigned long number = 0;
  FILE *f = fopen(path, "r");
  if (!f) return 0;
  if (fgets(text, sizeof text, f)) number = strtoul(text, NULL, base);
  (void)fclose(f);
  return number;
}

/* Gb/s of the fastest port that is up. state reads "4: ACTIVE", rate "400 Gb/sec (4X NDR)". */
static unsigned long portRate(const char *root, const char *nic) {
  char path[PATH_MAX];
  unsigned long best = 0;
  DIR *ports;
  snprintf(path, sizeof path, "%s/class/infiniband/%s/ports", root, nic);
  ports = opendir(path);
  for (struct dirent *e; ports && (e = readdir(ports));) {
    unsigned long rate;
    if (e->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "%s/class/infiniband/%s/ports/%s/state", root, nic, e->d_name);
    if (numberIn(path, 10) != 4) continue;
    snprintf(path, sizeof path, "%s/class/infiniband/%s/ports/%s/rate", root, nic, e->d_name);
    rate = numberIn(path, 10);
    if (rate > best) best = rate;
  }
  if (ports) (void)closedir(ports);
  return best;
}

/* Folders that two resolved paths have in common. */
static int common(const char *a, const char *b) {
  int folders = 0;
  for (size_t i = 0;; i++) {
    int endA = !a[i] || a[i] == '/', endB = !b[i] || b[i] == '/';
    if (endA && endB) folders++;
    if (a[i] != b[i] || !a[i]) return folders;
  }
}

typedef struct nicSearch {
  int depth; /* of the nearest so far */
  unsigned long sum, fastest;
} nicSearch;

static void nearest(const char *root, const char *gpu, nicSearch *s, char *name, size_t room) {
  char path[PATH_MAX], real[PATH_MAX];
  DIR *nics;
  snprintf(path, sizeof path, "%s/class/infiniband", root);
  nics = opendir(path);
  for (struct dirent *e; nics && (e = readdir(nics));) {
    unsigned long rate = e->d_name[0] == '.' ? 0 : portRate(root, e->d_name);
    int depth;
    snprintf(path, sizeof path, "%s/class/infiniband/%s/device", root, e->d_name);
    if (!rate || !realpath(path, real)) continue;
    depth = common(gpu, real);
    if (depth < s->depth) continue;
    if (depth > s->depth) *s = (nicSearch){depth, 0, 0};
    s->sum += rate;
    if (rate <= s->fastest) continue;
    s->fastest = rate;
    snprintf(name, room, "%s", e->d_name);
  }
  if (nics) (void)closedir(nics);
}

/* NVIDIA's display and 3D controllers that lie as deep below the same folder. */
static unsigned sharers(const char *root, const char *gpu, int depth) {
  char path[PATH_MAX], real[PATH_MAX];
  unsigned count = 0;
  DIR *devices;
  snprintf(path, sizeof path, "%s/bus/pci/devices", root);
  devices = opendir(path);
  for (struct dirent *e; devices && (e = readdir(devices));) {
    if (e->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/vendor", root, e->d_name);
    if (numberIn(path, 0) != 0x10de) continue;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/class", root, e->d_name);
    if (numberIn(path, 0) >> 16 != 3) continue;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s", root, e->d_name);
    count += realpath(path, real) && common(gpu, real) >= depth;
  }
  if (devices) (void)closedir(devices);
  return count ? count : 1;
}

double epNicRate(const char *root, const epPciAddress *gpu, char *name, size_t room) {
  char path[PATH_MAX], real[PATH_MAX];
  nicSearch s = {0, 0, 0};
  double share;
  if (room) name[0] = 0;
  snprintf(path, sizeof path, "%s/bus/pci/devices/%04x:%02x:%02x.0", root, (unsigned)gpu->domain, (unsigned)gpu->bus,
           (unsigned)gpu->device);
  if (!realpath(path, real)) return 0;
  nearest(root, real, &s, name, room);
  if (!s.sum) return 0;
  share = (double)s.sum / sharers(root, real, s.depth);
  return (share < (double)s.fastest ? share : (double)s.fastest) / 8;
}

epLinks epLinksFind(const epPciAddress *gpu, char *from, size_t room) {
  epLinks links = {0, 0};
  uint64_t set;
  char nvlink[64] = "NVLink unknown", nic[64], nicName[40];
  snprintf(nic, sizeof nic, "NIC unknown (none is up)");
  if (epEnvNumber(EP_ENV_NVLINK_GBS, 1, 100000, &set)) {
    links.nvlinkGbs = (double)set;
    snprintf(nvlink, sizeof nvlink, "%s %.0f GB/s", epEnvName(EP_ENV_NVLINK_GBS), links.nvlinkGbs);
  } else if (gpu) {
    links.nvlinkGbs = nvlinkRate(gpu, nvlink, sizeof nvlink);
  }
  if (epEnvNumber(EP_ENV_NIC_GBS, 1, 100000, &set)) {
    links.nicGbs = (double)set;
    snprintf(nic, sizeof nic, "%s %.0f GB/s", epEnvName(EP_ENV_NIC_GBS), links.nicGbs);
  } else if (gpu && (links.nicGbs = epNicRate("/sys", gpu, nicName, sizeof nicName)) > 0) {
    snprintf(nic, sizeof nic, "NIC %.16s, %.1f GB/s a GPU", nicName, links.nicGbs);
  }
  if (room) snprintf(from, room, "%s; %s", nvlink, nic);
  return links;
}
