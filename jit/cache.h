/* Machine code on disk, shared by the processes of a user. Every trouble (no folder, read-only, full disk, network file
 * systems that lie) costs a compile and at most one warning, never an error. */
#ifndef EP_JIT_CACHE_H_
#define EP_JIT_CACHE_H_

#include <stddef.h>
#include <stdint.h>

#include "compile.h"

typedef struct epCache epCache;

/* What identifies an entry. `text` is the whole key: an entry whose hash agrees and whose key does not is not used. */
typedef struct epCacheKey {
  const char *label; /* readable part of the file's name */
  const void *text;
  size_t bytes;
} epCacheKey;

/* folder NULL: $NCCL_EP_JIT_CACHE_DIR and its defaults (jit.h). NULL is returned only when memory is out. */
epCache *epCacheOpen(const char *folder);
void epCacheClose(epCache *cache);
/* The folder in use; NULL: no disk cache, *why says why. */
const char *epCacheFolder(const epCache *cache, const char **why);

/* 1 and a malloc'ed *cubin when a good entry is there, else 0. */
int epCacheLoad(epCache *cache, const epCacheKey *key, void **cubin, size_t *bytes, epCompileUsage *usage);
void epCacheStore(epCache *cache, const epCacheKey *key, const void *cubin, size_t bytes, const epCompileUsage *usage);

/* One process compiles a key, others wait for it, at most EP_CACHE_LOCK_SECONDS. Returns a lock to give to
 * epCacheUnlock, or -1 when none can be had: then everybody compiles for himself. */
#define EP_CACHE_LOCK_SECONDS 30
int epCacheLock(epCache *cache, const epCacheKey *key);
void epCacheUnlock(int lock);

#endif
