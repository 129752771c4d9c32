/* Ties the JIT together: key, memory of the process, disk, compiler, and what is dumped for people. Threads that ask
 * for one key wait for the first of them; a failure is handed to those who wait and then forgotten. */
#include "jit.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache.h"
#include "compile.h"
#include "dump.h"
#include "fail.h"
#include "headers.h"
#include "jit_ext.h"
#include "nvrtc.h"
#include "source.h"

#define EP_KEY_VERSION 1u

/* Everything machine code depends on. No padding: the bytes are the key. */
typedef struct {
  uint32_t version, kernelId, arch, compiler;
  uint32_t headers[4]; /* hash of the embedded headers */
  uint32_t text[4];    /* hash of the generated source and of the options */
  epConfig config;
} epJitKey;
_Static_assert(sizeof(epJitKey) == 12 * 4 + sizeof(epConfig), "padding in the key");

/* What is to be made: the key and all that it stands for. */
typedef struct {
  epJitKey key;
  char *source;
  char archOption[40], label[80];
  epHeaders headers; /* of kernels of several scale-up domains */
  epCompileJob job;
} epJitRequest;

/* One key that a thread of this process compiled, or is compiling. */
typedef struct epJitSlot {
  struct epJitSlot *next;
  epJitKey key;
  int ready; /* 0: in work */
  void *cubin;
  size_t bytes;
  epCompileUsage usage;
} epJitSlot;

struct epJit {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  epJitSlot *slots;
  epCache *cache;
  char dump[512];
  int lineInfo, verbose;
  int nccl; /* version code, atomic */
  unsigned long long headers[2];
};

static int flagOf(const char *name) {
  const char *value = getenv(name);
  if (!value || !*value || strcmp(value, "0") == 0) return 0;
  if (strcmp(value, "1") == 0) return 1;
  epLog(EP_LOG_WARN, "%s=%s ignored: expected 0 or 1", name, value);
  return 0;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

ncclResult_t epJitOpenAt(epJit **out, const char *folder) {
  epJit *jit = calloc(1, sizeof(*jit));
  if (!jit) return epFail(ncclSystemError, "out of memory: %zu bytes for the JIT", sizeof(*jit));
  jit->cache = epCacheOpen(folder);
  if (!jit->cache) {
    free(jit);
    return epFail(ncclSystemError, "out of memory: the JIT's cache");
  }
  pthread_mutex_init(&jit->mutex, NULL);
  pthread_cond_init(&jit->changed, NULL);
  const char *dump = getenv("NCCL_EP_JIT_DUMP");
  if (dump && *dump) {
    if (strlen(dump) >= sizeof(jit->dump))
      epLog(EP_LOG_WARN, "NCCL_EP_JIT_DUMP is longer than %zu bytes: ignored", sizeof(jit->dump) - 1);
    else
      snprintf(jit->dump, sizeof(jit->dump), "%s", dump);
  }
  jit->lineInfo = flagOf("NCCL_EP_JIT_LINEINFO");
  jit->verbose = flagOf("NCCL_EP_JIT_VERBOSE");
  epBundleHash(&epKernelBundle, jit->headers);
  *out = jit;
  return ncclSuccess;
}

ncclResult_t epJitOpen(epJit **out) { return epJitOpenAt(out, NULL); }

void epJitUseNccl(epJit *jit, int version) { __atomic_store_n(&jit->nccl, version, __ATOMIC_RELAXED); }

const char *epJitCacheFolder(epJit *jit, const char **why) { return epCacheFolder(jit->cache, why); }

void epJitClose(epJit *jit) {
  if (!jit) return;
  while (jit->slots) {
    epJitSlot *slot = jit->slots;
    jit->slots = slot->next;
    free(slot->cubin);
    free(slot);
  }
  epCacheClose(jit->cache);
  pthread_cond_destroy(&jit->changed);
  pthread_mutex_destroy(&jit->mutex);
  free(jit);
}

void epJitFree(epJitCode *code) {
  free(code->cubin);
  memset(code, 0, sizeof(*code));
}

int epJitCompilerVersion(epJit *jit) {
  (void)jit;
  const epNvrtc *nvrtc;
  return epNvrtcOpen(&nvrtc) == ncclSuccess ? nvrtc->version : 0;
}

const char *epJitCompilerPath(epJit *jit) {
  (void)jit;
  const epNvrtc *nvrtc;
  return epNvrtcOpen(&nvrtc) == ncclSuccess ? nvrtc->path : "";
}

/* What to compile for: the GPU itself where the compiler knows it, else the newest of its family below it, whose
 * machine code it also runs. */
static ncclResult_t pickTarget(const epNvrtc *nvrtc, int arch, int *target) {
  int best = 0;
  char known[256] = "";
  size_t used = 0;
  if (!nvrtc->archCount) {
    *target = arch;
    return ncclSuccess;
  }
  for (int i = 0; i < nvrtc->archCount; i++) {
    int a = nvrtc->archs[i];
    if (a / 10 == arch / 10 && a <= arch && a > best) best = a;
    if (used < sizeof(known)) used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%d", i ? ", " : "", a);
  }
  if (!best)
    return epFail(ncclSystemError, "NVRTC %d.%d at %s has no target for sm_%d (it has %s): a newer NVRTC is needed",
                  nvrtc->version / 1000, nvrtc->version % 1000 / 10, nvrtc->path, arch, known);
  *target = best;
  return ncclSuccess;
}

/* Adds NCCL's headers, and what makes NVRTC take them, to a job. */
static ncclResult_t addNccl(epJit *jit, const epNvrtc *nvrtc, epJitRequest *r) {
  epCompileJob *job = &r->job;
  ncclResult_t rc = epHeadersFind(__atomic_load_n(&jit->nccl, __ATOMIC_RELAXED), nvrtc->path, &r->headers);
  if (rc != ncclSuccess) return rc;
  job->bundles[1] = r->headers.nccl;
  job->bundles[2] = &epNcclPreludeBundle;
  job->bundles[3] = &epNcclShimBundle;
  job->options[job->optionCount++] = "-diag-suppress=1866"; /* attributes that NVRTC ignores where they stand */
  job->options[job->optionCount++] = r->headers.cuda;
  job->options[job->optionCount++] = r->headers.cccl;
  return ncclSuccess;
}

static ncclResult_t makeRequest(epJit *jit, const epNvrtc *nvrtc, int kernelId, const epConfig *config, int arch,
                                epJitRequest *r) {
  int target = 0;
  memset(r, 0, sizeof(*r));
  ncclResult_t rc = pickTarget(nvrtc, arch, &target);
  if (rc == ncclSuccess) rc = epJitSource(kernelId, config, target, &r->source);
  if (rc != ncclSuccess) return rc;

  epCompileJob *job = &r->job;
  snprintf(r->archOption, sizeof(r->archOption), "--gpu-architecture=sm_%d", target);
  job->name = epJitEntryName(kernelId);
  job->source = r->source;
  job->bundles[0] = &epKernelBundle;
  job->options[job->optionCount++] = r->archOption;
  job->options[job->optionCount++] = "--std=c++17";
  job->options[job->optionCount++] = "-default-device";
  job->options[job->optionCount++] = "--ptxas-options=-v";
  /* NVRTC 12.9 and up keeps a cache of its own through the driver, and a program found there comes without the
   * assembler's report. */
  if (nvrtc->version >= 12090) job->options[job->optionCount++] = "--no-cache";
  if (jit->lineInfo) job->options[job->optionCount++] = "-lineinfo";
  job->keepPtx = jit->dump[0] != 0;

  if (epKernelIsHybrid(kernelId)) {
    rc = addNccl(jit, nvrtc, r);
    if (rc != ncclSuccess) return rc;
  }

  XXH128_hash_t text = XXH3_128bits(r->source, strlen(r->source) + 1);
  for (int i = 0; i < job->optionCount; i++)
    text = XXH3_128bits_withSeed(job->options[i], strlen(job->options[i]) + 1, text.low64 ^ text.high64);
  for (int i = 1; i < EP_COMPILE_MAX_BUNDLES && job->bundles[i]; i++) {
    unsigned long long sum[2];
    epBundleHash(job->bundles[i], sum);
    text = XXH3_128bits_withSeed(sum, sizeof(sum), text.low64 ^ text.high64);
  }
  snprintf(r->label, sizeof(r->label), "%s-sm_%d", job->name, target);
  r->key.version = EP_KEY_VERSION;
  r->key.kernelId = (uint32_t)kernelId;
  r->key.arch = (uint32_t)target;
  r->key.compiler = (uint32_t)nvrtc->version;
  memcpy(r->key.headers, jit->headers, sizeof(r->key.headers));
  memcpy(r->key.text, &text, sizeof(r->key.text));
  r->key.config = *config;
  return ncclSuccess;
}

static void copyUsage(epJitCode *code, const epCompileUsage *usage) {
  code->registers = usage->registers;
  code->spillBytes = usage->spillBytes;
  code->localBytes = usage->localBytes;
  code->staticSmemBytes = usage->staticSmemBytes;
}

/* Disk, then compiler. */
static ncclResult_t produce(epJit *jit, const epNvrtc *nvrtc, const epJitRequest *r, epJitCode *code) {
  epCompileUsage usage;
  epCompiled compiled;
  ncclResult_t rc = ncclSuccess;
  int lock = -1;
  epCacheKey cacheKey = {r->label, &r->key, sizeof(r->key)};
  memset(&compiled, 0, sizeof(compiled));

  /* Whoever dumps wants to see everything made. */
  int look = !jit->dump[0];
  code->fromCache = look && epCacheLoad(jit->cache, &cacheKey, &code->cubin, &code->bytes, &usage);
  if (!code->fromCache) {
    lock = epCacheLock(jit->cache, &cacheKey);
    /* Whoever held the lock may have made it meanwhile. */
    code->fromCache = look && lock >= 0 && epCacheLoad(jit->cache, &cacheKey, &code->cubin, &code->bytes, &usage);
  }
  if (!code->fromCache) {
    rc = epCompile(nvrtc, &r->job, &compiled);
    if (jit->dump[0]) epJitDump(jit->dump, r->label, &r->key.config, &r->job, rc == ncclSuccess ? &compiled : NULL);
    if (rc == ncclSuccess) {
      epCacheStore(jit->cache, &cacheKey, compiled.cubin, compiled.bytes, &compiled.usage);
      code->cubin = compiled.cubin;
      code->bytes = compiled.bytes;
      usage = compiled.usage;
      compiled.cubin = NULL;
    }
  }
  if (rc == ncclSuccess) copyUsage(code, &usage);
  epCacheUnlock(lock);
  epCompiledFree(&compiled);
  return rc;
}

int epJitCached(epJit *jit, int kernelId, const epConfig *config, int arch) {
  const epNvrtc *nvrtc;
  epJitRequest request;
  void *cubin = NULL;
  size_t bytes;
  epCompileUsage usage;
  int hit = 0;
  if (epNvrtcOpen(&nvrtc) != ncclSuccess) return 0;
  if (makeRequest(jit, nvrtc, kernelId, config, arch, &request) == ncclSuccess) {
    epCacheKey key = {request.label, &request.key, sizeof(request.key)};
    hit = epCacheLoad(jit->cache, &key, &cubin, &bytes, &usage);
  }
  free(cubin);
  free(request.source);
  return hit;
}

static epJitSlot *findSlot(epJit *jit, const epJitKey *key) {
  for (epJitSlot *slot = jit->slots; slot; slot = slot->next)
    if (memcmp(&slot->key, key, sizeof(*key)) == 0) return slot;
  return NULL;
}

static void removeSlot(epJit *jit, epJitSlot *slot) {
  for (epJitSlot **at = &jit->slots; *at; at = &(*at)->next) {
    if (*at != slot) continue;
    *at = slot->next;
    free(slot->cubin);
    free(slot);
    return;
  }
}

static ncclResult_t copySlot(const epJitSlot *slot, epJitCode *code) {
  code->cubin = malloc(slot->bytes);
  if (!code->cubin) return epFail(ncclSystemError, "out of memory: %zu bytes of machine code", slot->bytes);
  memcpy(code->cubin, slot->cubin, slot->bytes);
  code->bytes = slot->bytes;
  code->fromCache = 1;
  copyUsage(code, &slot->usage);
  return ncclSuccess;
}

/* The process's memory, then produce(). */
static ncclResult_t obtain(epJit *jit, const epNvrtc *nvrtc, const epJitRequest *r, epJitCode *code) {
  epJitSlot *slot;
  void *copy = NULL;
  pthread_mutex_lock(&jit->mutex);
  while ((slot = findSlot(jit, &r->key)) && !slot->ready) pthread_cond_wait(&jit->changed, &jit->mutex);
  if (slot) {
    ncclResult_t rc = copySlot(slot, code);
    pthread_mutex_unlock(&jit->mutex);
    return rc;
  }
  slot = calloc(1, sizeof(*slot));
  if (slot) {
    memcpy(&slot->key, &r->key, sizeof(slot->key));
    slot->next = jit->slots;
    jit->slots = slot;
  }
  pthread_mutex_unlock(&jit->mutex);
  if (!slot) return epFail(ncclSystemError, "out of memory: %zu bytes for a kernel's record", sizeof(*slot));

  ncclResult_t rc = produce(jit, nvrtc, r, code);
  if (rc == ncclSuccess && (copy = malloc(code->bytes))) memcpy(copy, code->cubin, code->bytes);

  pthread_mutex_lock(&jit->mutex);
  if (copy) {
    slot->cubin = copy;
    slot->bytes = code->bytes;
    slot->usage = (epCompileUsage){code->registers, code->spillBytes, code->localBytes, code->staticSmemBytes};
    slot->ready = 1;
  } else {
    removeSlot(jit, slot); /* those who wait try for themselves and get their own error */
  }
  pthread_cond_broadcast(&jit->changed);
  pthread_mutex_unlock(&jit->mutex);
  return rc;
}

ncclResult_t epJitCompile(epJit *jit, int kernelId, const epConfig *config, int arch, epJitCode *out) {
  const epNvrtc *nvrtc;
  epJitRequest request;
  epJitCode code;
  double start = seconds();
  memset(&code, 0, sizeof(code));
  if (arch < 80)
    return epFail(ncclInvalidArgument, "sm_%d: GPUs of compute capability 8.0 and newer are supported", arch);
  ncclResult_t rc = epNvrtcOpen(&nvrtc);
  if (rc != ncclSuccess) return rc;
  rc = makeRequest(jit, nvrtc, kernelId, config, arch, &request);
  if (rc == ncclSuccess) rc = obtain(jit, nvrtc, &request, &code);
  free(request.source);
  if (rc != ncclSuccess) return rc;

  code.seconds = seconds() - start;
  if (code.spillBytes > 0)
    epLog(EP_LOG_INFO, "%s for sm_%u spills %d bytes of registers", epJitEntryName(kernelId), request.key.arch,
          code.spillBytes);
  if (jit->verbose) /* asked for by name, so whatever the log level */
    fprintf(stderr, "nccl_ep: jit: %s sm_%u %s in %.1f ms, %zu bytes, %d registers, %d bytes spilled\n",
            epJitEntryName(kernelId), request.key.arch, code.fromCache ? "found" : "compiled", 1e3 * code.seconds,
            code.bytes, code.registers, code.spillBytes);
  *out = code;
  return ncclSuccess;
}
