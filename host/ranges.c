/* NVTX version 3: headers alone, whose functions look for a tool at run time (the library that NVTX_INJECTION64_PATH names, as profilers
 * set it) and do nothing without one. Where the headers were not there at build time, nothing is ever attached. */
#include "ranges.h"

#include <stddef.h>

#ifdef EP_NVTX
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>

static nvtxDomainHandle_t domain;
static int attached; /* atomic: 0 not looked yet, 1 no, 2 yes */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void attach(void) {
  domain = nvtxDomainCreateA("nccl_ep");
  __atomic_store_n(&attached, domain ? 2 : 1, __ATOMIC_RELEASE);
}

int epRangesOn(void) {
  int state = __atomic_load_n(&attached, __ATOMIC_ACQUIRE);
  if (state) return state == 2;
  pthread_once(&once, attach);
  return domain != NULL;
}

void epRangePush(const char *name) {
  nvtxEventAttributes_t event = {0};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name;
  (void)nvtxDomainRangePushEx(domain, &event);
}

void epRangePop(void) { (void)nvtxDomainRangePop(domain); }

#else

int epRangesOn(void) { return 0; }
void epRangePush(const char *name) { (void)name; }
void epRangePop(void) {}

#endif
