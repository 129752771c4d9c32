/* NVLink through NVML and RDMA NICs through libibverbs, both bound at run time. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "cuda_driver.h"
#include "info.h"
#include "links_find.h"

enum { MAX_LINKS = 36 };

typedef struct {
  int (*init)(void);
  int (*shutdown)(void);
  int (*deviceGetCount)(unsigned *count);
  int (*deviceGetHandleByIndex)(unsigned index, void **device);
  int (*deviceGetName)(void *device, char *name, unsigned bytes);
  int (*deviceGetNvLinkState)(void *device, unsigned link, int *active);
  int (*deviceGetNvLinkVersion)(void *device, unsigned link, unsigned *version);
} nvml;

static int bindSymbol(void *lib, const char *symbol, void *slot) {
  void *address = dlsym(lib, symbol);
  memcpy(slot, &address, sizeof(address));
  return address != NULL;
}

static void showLinks(const nvml *n) {
  unsigned count = 0;
  if (n->deviceGetCount(&count) != 0) count = 0;
  if (!count) infoMissing("NVLink", "NVML shows no GPU", "nothing to link");
  for (unsigned i = 0; i < count; i++) {
    void *device;
    char name[96] = "?", label[32];
    unsigned links = 0, version = 0;
    snprintf(label, sizeof(label), "NVML GPU %u", i);
    if (n->deviceGetHandleByIndex(i, &device) != 0) continue;
    (void)n->deviceGetName(device, name, sizeof(name));
    for (unsigned link = 0; link < MAX_LINKS; link++) {
      int active = 0;
      if (n->deviceGetNvLinkState(device, link, &active) == 0 && active) {
        links++;
        (void)n->deviceGetNvLinkVersion(device, link, &version);
      }
    }
    if (links)
      infoFound(label, "%s, %u NVLinks up (generation code %u)", name, links, version);
    else
      infoMissing(label, "no NVLink is up", "tokens go over PCIe where peer access allows it, ten times slower");
  }
}

void infoNvlink(void) {
  nvml n;
  infoSection("NVLink");
  void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    infoMissing("NVML", "libnvidia-ml.so.1 is not there", "links are not shown; nothing else depends on it");
    return;
  }
  if (bindSymbol(lib, "nvmlInit_v2", &n.init) && bindSymbol(lib, "nvmlShutdown", &n.shutdown) &&
      bindSymbol(lib, "nvmlDeviceGetCount_v2", &n.deviceGetCount) &&
      bindSymbol(lib, "nvmlDeviceGetHandleByIndex_v2", &n.deviceGetHandleByIndex) &&
      bindSymbol(lib, "nvmlDeviceGetName", &n.deviceGetName) &&
      bindSymbol(lib, "nvmlDeviceGetNvLinkState", &n.deviceGetNvLinkState) &&
      bindSymbol(lib, "nvmlDeviceGetNvLinkVersion", &n.deviceGetNvLinkVersion) && n.init() == 0) {
    showLinks(&n);
    (void)n.shutdown();
  } else {
    infoMissing("NVML", "it does not start", "links are not shown; nothing else depends on it");
  }
  (void)dlclose(lib);
}

/* The first line of a file in sysfs, without its newline. */
static const char *sysfs(const char *device, const char *leaf, char *text, size_t room) {
  char path[256];
  snprintf(text, room, "?");
  snprintf(path, sizeof(path), "/sys/class/infiniband/%s/%s", device, leaf);
  FILE *f = fopen(path, "r");
  if (!f) return text;
  if (fgets(text, (int)room, f)) text[strcspn(text, "\n")] = 0;
  (void)fclose(f);
  return text;
}

void infoNics(void) {
  void **(*getDeviceList)(int *count) = NULL;
  void (*freeDeviceList)(void **list) = NULL;
  const char *(*getDeviceName)(void *device) = NULL;
  static const char meaning[] = "scale-out over libnccl-rma-ep.so alone; one scale-up domain works";
  int count = 0;
  infoSection("RDMA");
  void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    infoMissing("verbs", "libibverbs.so.1 is not there", meaning);
    return;
  }
  if (!bindSymbol(lib, "ibv_get_device_list", &getDeviceList) ||
      !bindSymbol(lib, "ibv_free_device_list", &freeDeviceList) ||
      !bindSymbol(lib, "ibv_get_device_name", &getDeviceName)) {
    infoMissing("verbs", "libibverbs.so.1 lacks its functions", meaning);
  } else {
    void **list = getDeviceList(&count);
    if (!list || !count) infoMissing("NICs", "verbs shows none", meaning);
    for (int i = 0; list && i < count; i++) {
      char state[64], rate[64], layer[64];
      const char *name = getDeviceName(list[i]);
      infoFound(name, "port 1: %s, %s, %s", sysfs(name, "ports/1/link_layer", layer, sizeof(layer)),
                sysfs(name, "ports/1/state", state, sizeof(state)), sysfs(name, "ports/1/rate", rate, sizeof(rate)));
    }
    if (list) freeDeviceList(list);
  }
  (void)dlclose(lib);
}

/* ---- Sums ------------------------------------------------------------------------------------------------------- */

/* DeepSeek-V3's layer in FP8, in domains of 8 ranks. */
enum { SUM_EXPERTS = 256, SUM_TOPK = 8, SUM_ROW_BYTES = 7168, SUM_WARPS = 8, SUM_SCALE_UP = 8 };

static void showSums(const epLinks *links) {
  for (unsigned domains = 2; domains <= 8; domains *= 2) {
    epLinkRows r = epLinkRowsOf(domains, SUM_SCALE_UP, SUM_EXPERTS, SUM_TOPK);
    epLinkPlan p = epLinkPlanOf(links, domains, SUM_SCALE_UP, SUM_EXPERTS, SUM_TOPK, SUM_ROW_BYTES, SUM_WARPS);
    char name[32];
    snprintf(name, sizeof(name), "  %u x %d", domains, SUM_SCALE_UP);
    infoFound(
        name,
        "a token loads the NIC with %.2f rows, NVLink with %.2f: %s is the limit: %u SMs, %u of them send, %u queue "
        "pairs a peer",
        r.domains, r.nvlink, p.nicBound ? "the NIC" : "NVLink", p.sms, p.sendBlocks, p.contexts);
  }
}

void infoSums(void) {
  static const char meaning[] =
      "several scale-up domains take the whole GPU, and fixed numbers of channels and queue pairs; set "
      "NCCL_EP_NVLINK_GBS and NCCL_EP_NIC_GBS to have them computed";
  const epCuDriver *cu;
  epPciAddress pci = {0, 0, 0};
  epCuDevice device;
  char from[160];
  int gpu = epCuDriverOpen(&cu) == ncclSuccess && cu->deviceGet(&device, 0) == EP_CU_SUCCESS &&
            cu->deviceGetAttribute(&pci.domain, EP_CU_ATTR_PCI_DOMAIN_ID, device) == EP_CU_SUCCESS &&
            cu->deviceGetAttribute(&pci.bus, EP_CU_ATTR_PCI_BUS_ID, device) == EP_CU_SUCCESS &&
            cu->deviceGetAttribute(&pci.device, EP_CU_ATTR_PCI_DEVICE_ID, device) == EP_CU_SUCCESS;
  epLinks links = epLinksFind(gpu ? &pci : NULL, from, sizeof(from));
  infoSection("What links want (H=7168 FP8, K=8, E=256)");
  if (links.nvlinkGbs > 0 && links.nicGbs > 0) {
    infoFound("rates", "%s", from);
    showSums(&links);
  } else {
    infoMissing("rates", from, meaning);
  }
}
