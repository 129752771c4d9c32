/* The disk cache. An entry is one file:
 *
 *   epEntryHeader | key | machine code          checksum over everything after the checksum field
 *
 * It is written under a temporary name, synced, and renamed; a reader that finds anything odd takes it for a miss. The
 * folder must belong to us (or to root) and nobody else may write to it: what lies there is run on the GPU. */
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "fail.h"

#define EP_ENTRY_MAGIC 0x31435045u /* "EPC1" */
#define EP_ENTRY_MAX_BYTES (64u << 20)

typedef struct {
  uint32_t magic, headerBytes;
  uint64_t checksum;
  uint64_t keyBytes, cubinBytes;
  int32_t registers, spillBytes, localBytes, staticSmemBytes;
} epEntryHeader;
#define EP_CHECKED_FROM (offsetof(epEntryHeader, checksum) + sizeof(uint64_t))

struct epCache {
  char folder[900]; /* empty: no disk cache */
  char why[200];
  atomic_int warned;
  atomic_uint temporaries;
};

static void warnOnce(epCache *cache, const char *what, int error) {
  if (atomic_exchange(&cache->warned, 1)) return;
  epLog(EP_LOG_WARN, "kernel cache %s: %s: %s; kernels are compiled in memory (said once)", cache->folder, what,
        strerror(error));
}

epCache *epCacheOpen(const char *folder) {
  epCache *cache = calloc(1, sizeof(*cache));
  if (!cache) return NULL;
  const char *named = folder ? folder : getenv("NCCL_EP_JIT_CACHE_DIR");
  const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  int n = 0;
  if (named) {
    if (*named)
      n = snprintf(cache->folder, sizeof(cache->folder), "%s", named);
    else
      snprintf(cache->why, sizeof(cache->why), "switched off by an empty NCCL_EP_JIT_CACHE_DIR");
  } else if (xdg && xdg[0] == '/') {
    n = snprintf(cache->folder, sizeof(cache->folder), "%s/nccl_ep", xdg);
  } else if (home && home[0] == '/') {
    n = snprintf(cache->folder, sizeof(cache->folder), "%s/.cache/nccl_ep", home);
  } else {
    snprintf(cache->why, sizeof(cache->why), "none of NCCL_EP_JIT_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
  }
  if (n < 0 || (size_t)n >= sizeof(cache->folder)) {
    cache->folder[0] = 0;
    snprintf(cache->why, sizeof(cache->why), "the folder's name is longer than %zu bytes", sizeof(cache->folder) - 1);
  }
  return cache;
}

void epCacheClose(epCache *cache) { free(cache); }

const char *epCacheFolder(const epCache *cache, const char **why) {
  if (why) *why = cache->why;
  return cache->folder[0] ? cache->folder : NULL;
}

/* Creates the folder and what is above it, each private. Existing ones are left as they are. */
static void makeFolder(const char *folder) {
  char path[900];
  snprintf(path, sizeof(path), "%s", folder);
  for (char *at = path + 1; *at; at++) {
    if (*at != '/') continue;
    *at = 0;
    (void)mkdir(path, 0700); /* an error shows when the folder is opened */
    *at = '/';
  }
  (void)mkdir(path, 0700);
}

/* A descriptor of the folder, or -1. Checked each time it is opened, and used by the *at calls, so that what was
 * checked is what is used. */
static int openFolder(epCache *cache, int create) {
  struct stat st;
  if (!cache->folder[0]) return -1;
  int dir = open(cache->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0 && errno == ENOENT && create) {
    makeFolder(cache->folder);
    dir = open(cache->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  if (dir < 0) {
    if (create || errno != ENOENT) warnOnce(cache, "cannot be opened", errno);
    return -1;
  }
  if (fstat(dir, &st) != 0) {
    warnOnce(cache, "cannot be examined", errno);
    close(dir);
    return -1;
  }
  if ((st.st_uid != geteuid() && st.st_uid != 0) || (st.st_mode & 022)) {
    if (!atomic_exchange(&cache->warned, 1))
      epLog(EP_LOG_WARN,
            "kernel cache %s: owner %u, mode %03o: must belong to this user or root and be writable by the owner only; "
            "kernels are compiled in memory (said once)",
            cache->folder, (unsigned)st.st_uid, (unsigned)(st.st_mode & 0777));
    close(dir);
    return -1;
  }
  return dir;
}

static XXH128_hash_t keyHash(const epCacheKey *key) { return XXH3_128bits(key->text, key->bytes); }

static void entryName(const epCacheKey *key, char *name, size_t room) {
  XXH128_hash_t h = keyHash(key);
  snprintf(name, room, "%s-%016llx%016llx.epc", key->label, (unsigned long long)h.high64, (unsigned long long)h.low64);
}

static int readAll(int fd, void *to, size_t bytes) {
  char *at = to;
  while (bytes) {
    ssize_t n = read(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return 0;
    at += n;
    bytes -= (size_t)n;
  }
  return 1;
}

static int writeAll(int fd, const void *from, size_t bytes) {
  const char *at = from;
  while (bytes) {
    ssize_t n = write(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return 0;
    at += n;
    bytes -= (size_t)n;
  }
  return 1;
}

int epCacheLoad(epCache *cache, const epCacheKey *key, void **cubin, size_t *bytes, epCompileUsage *usage) {
  char name[200];
  int hit = 0, fd = -1;
  char *file = NULL;
  void *code = NULL;
  struct stat st;
  epEntryHeader h;
  int dir = openFolder(cache, 0);
  if (dir < 0) return 0;

  entryName(key, name, sizeof(name));
  fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 || fstat(fd, &st) != 0) goto done; /* a miss, whatever the reason: storing will tell */
  if (!S_ISREG(st.st_mode) || (st.st_uid != geteuid() && st.st_uid != 0) || st.st_size < (off_t)sizeof(h) ||
      st.st_size > (off_t)EP_ENTRY_MAX_BYTES)
    goto done;
  file = malloc((size_t)st.st_size);
  if (!file || !readAll(fd, file, (size_t)st.st_size)) goto done;
  memcpy(&h, file, sizeof(h));
  if (h.magic != EP_ENTRY_MAGIC || h.headerBytes != sizeof(h) || h.keyBytes != key->bytes || h.cubinBytes == 0 ||
      h.cubinBytes > EP_ENTRY_MAX_BYTES || sizeof(h) + h.keyBytes + h.cubinBytes != (uint64_t)st.st_size ||
      h.checksum != XXH3_64bits(file + EP_CHECKED_FROM, (size_t)st.st_size - EP_CHECKED_FROM) ||
      memcmp(file + sizeof(h), key->text, key->bytes) != 0)
    goto done;
  code = malloc((size_t)h.cubinBytes);
  if (!code) goto done;
  memcpy(code, file + sizeof(h) + h.keyBytes, (size_t)h.cubinBytes);
  *cubin = code;
  *bytes = (size_t)h.cubinBytes;
  usage->registers = h.registers;
  usage->spillBytes = h.spillBytes;
  usage->localBytes = h.localBytes;
  usage->staticSmemBytes = h.staticSmemBytes;
  hit = 1;

done:
  free(file);
  if (fd >= 0) close(fd);
  close(dir);
  return hit;
}

void epCacheStore(epCache *cache, const epCacheKey *key, const void *cubin, size_t bytes, const epCompileUsage *usage) {
  char name[200], temporary[300];
  int fd = -1, error = 0;
  const char *failed = NULL;
  char *file = NULL;
  size_t total = sizeof(epEntryHeader) + key->bytes + bytes;
  int dir = openFolder(cache, 1);
  if (dir < 0) return;

  file = malloc(total);
  if (!file) {
    failed = "out of memory";
    error = ENOMEM;
    goto done;
  }
  epEntryHeader h;
  memset(&h, 0, sizeof(h));
  h.magic = EP_ENTRY_MAGIC;
  h.headerBytes = sizeof(h);
  h.keyBytes = key->bytes;
  h.cubinBytes = bytes;
  h.registers = usage->registers;
  h.spillBytes = usage->spillBytes;
  h.localBytes = usage->localBytes;
  h.staticSmemBytes = usage->staticSmemBytes;
  memcpy(file, &h, sizeof(h));
  memcpy(file + sizeof(h), key->text, key->bytes);
  memcpy(file + sizeof(h) + key->bytes, cubin, bytes);
  h.checksum = XXH3_64bits(file + EP_CHECKED_FROM, total - EP_CHECKED_FROM);
  memcpy(file, &h, sizeof(h));

  entryName(key, name, sizeof(name));
  /* The clock is in the name because process ids repeat across the nodes of a network file system. */
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(temporary, sizeof(temporary), ".tmp-%ld-%lld-%u-%s", (long)getpid(),
           (long long)now.tv_sec * 1000000000ll + now.tv_nsec, atomic_fetch_add(&cache->temporaries, 1), name);
  fd = openat(dir, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd < 0) {
    failed = "cannot be written to";
    error = errno;
    goto done;
  }
  if (!writeAll(fd, file, total) || fsync(fd) != 0) {
    failed = "an entry cannot be written";
    error = errno;
  }
  if (close(fd) != 0 && !failed) {
    failed = "an entry cannot be written";
    error = errno;
  }
  if (!failed && renameat(dir, temporary, dir, name) != 0) {
    failed = "an entry cannot be renamed";
    error = errno;
  }
  if (failed) (void)unlinkat(dir, temporary, 0);

done:
  if (failed) warnOnce(cache, failed, error);
  free(file);
  close(dir);
}

/* Open-file-description locks: one byte of one lock file stands for a key, so nothing is left behind for each key, and
 * threads of one process exclude one another as processes do. */
int epCacheLock(epCache *cache, const epCacheKey *key) {
  struct timespec nap = {0, 2 * 1000 * 1000}, start, now;
  int dir = openFolder(cache, 1);
  if (dir < 0) return -1;
  int fd = openat(dir, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
  close(dir);
  if (fd < 0) return -1; /* storing will say why */
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (;;) {
    struct flock range;
    memset(&range, 0, sizeof(range));
    range.l_type = F_WRLCK;
    range.l_whence = SEEK_SET;
    range.l_start = (off_t)(keyHash(key).low64 & 0x3fffffffu);
    range.l_len = 1;
    if (fcntl(fd, F_OFD_SETLK, &range) == 0) return fd;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if ((errno != EAGAIN && errno != EACCES && errno != EINTR) || now.tv_sec - start.tv_sec >= EP_CACHE_LOCK_SECONDS)
      break;
    nanosleep(&nap, NULL);
    if (nap.tv_nsec < 8 * 1000 * 1000) nap.tv_nsec *= 2; /* late by little beside what was waited for */
  }
  close(fd);
  return -1;
}

void epCacheUnlock(int lock) {
  if (lock >= 0) close(lock);
}
