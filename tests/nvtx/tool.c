/* A tool that attaches to NVTX, as profilers do: it writes down domains and ranges. */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <string.h>

static int depth;

static nvtxDomainHandle_t create(const char *name) {
  printf("domain %s\n", name);
  return (nvtxDomainHandle_t)(void *)name;
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
  printf("push %s %s\n", (const char *)(void *)domain, event->message.ascii);
  return depth++;
}

static int pop(nvtxDomainHandle_t domain) {
  printf("pop %s\n", (const char *)(void *)domain);
  return --depth;
}

static int put(NvtxFunctionTable table, unsigned size, unsigned id, const void *function) {
  if (id >= size) return 0;
  memcpy((void *)table[id], function, sizeof(void *));
  return 1;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t exports);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t exports) {
  const NvtxExportTableCallbacks *callbacks = exports(NVTX_ETID_CALLBACKS);
  nvtxDomainHandle_t (*creates)(const char *) = create;
  int (*pushes)(nvtxDomainHandle_t, const nvtxEventAttributes_t *) = push;
  int (*pops)(nvtxDomainHandle_t) = pop;
  NvtxFunctionTable table;
  unsigned size;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  return put(table, size, NVTX_CBID_CORE2_DomainCreateA, &creates) &&
         put(table, size, NVTX_CBID_CORE2_DomainRangePushEx, &pushes) &&
         put(table, size, NVTX_CBID_CORE2_DomainRangePop, &pops);
}
