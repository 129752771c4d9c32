/* The disk cache under everything that file systems and other processes do to it: damage, foreign folders, errors of
 * rename and open as network file systems give them, a full disk, and two processes that want one kernel at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cache.h"
#include "fail.h"
#include "jit_ext.h"

/* The linker sends these calls here first (--wrap): a nonzero errno to fail with. */
static int failRename, failSync, failOpen;
int __real_renameat(int from, const char *old, int to, const char *name);
int __wrap_renameat(int from, const char *old, int to, const char *name);
int __wrap_renameat(int from, const char *old, int to, const char *name) {
  if (!failRename) return __real_renameat(from, old, to, name);
  errno = failRename;
  return -1;
}
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd) {
  if (!failSync) return __real_fsync(fd);
  errno = failSync;
  return -1;
}
/* Seconds by which the clock is ahead of the last look at it. */
static int clockStep, clockAhead;
int __real_clock_gettime(clockid_t id, struct timespec *t);
int __wrap_clock_gettime(clockid_t id, struct timespec *t);
int __wrap_clock_gettime(clockid_t id, struct timespec *t) {
  int rc = __real_clock_gettime(id, t);
  t->tv_sec += clockAhead += clockStep;
  return rc;
}
/* The C library's name of openat depends on the width of off_t that the build chose. */
#define WRAP_OPENAT(name)                                                \
  int __real_##name(int dir, const char *path, int flags, mode_t mode);  \
  int __wrap_##name(int dir, const char *path, int flags, mode_t mode);  \
  int __wrap_##name(int dir, const char *path, int flags, mode_t mode) { \
    if (!failOpen) return __real_##name(dir, path, flags, mode);         \
    errno = failOpen;                                                    \
    return -1;                                                           \
  }
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)

static char folder[256];
static epCache *cache;
static const char code[] = "not really machine code, but bytes all the same";
static const epCompileUsage usage = {40, 0, 16, 1024};
static const epCacheKey key = {"kernel-sm_90", "a key", 5};

static int setUp(void **state) {
  const char *base = getenv("TMPDIR");
  (void)state;
  failRename = failSync = failOpen = 0;
  snprintf(folder, sizeof(folder), "%s/ep_cache_XXXXXX", base && *base ? base : "/tmp");
  if (!mkdtemp(folder)) return 1;
  strcat(folder, "/a/b"); /* made by the cache */
  cache = epCacheOpen(folder);
  return cache ? 0 : 1;
}

static int tearDown(void **state) {
  char command[400];
  (void)state;
  epCacheClose(cache);
  folder[strlen(folder) - 4] = 0;
  snprintf(command, sizeof(command), "rm -rf '%s'", folder);
  return system(command);
}

static int found(const epCacheKey *k) {
  void *cubin = NULL;
  size_t bytes = 0;
  epCompileUsage u = {0, 0, 0, 0};
  int hit = epCacheLoad(cache, k, &cubin, &bytes, &u);
  if (hit) {
    assert_int_equal(bytes, sizeof(code));
    assert_memory_equal(cubin, code, sizeof(code));
    assert_memory_equal(&u, &usage, sizeof(u));
  }
  free(cubin);
  return hit;
}

static void store(void) { epCacheStore(cache, &key, code, sizeof(code), &usage); }

/* Path of the one entry; *others counts what else lies there. */
static int entryPath(char *path, size_t room, int *others) {
  int entries = 0;
  DIR *d = opendir(folder);
  *others = 0;
  if (!d) return 0;
  for (struct dirent *e; (e = readdir(d));) {
    size_t n = strlen(e->d_name);
    if (n > 4 && strcmp(e->d_name + n - 4, ".epc") == 0 && e->d_name[0] != '.') {
      snprintf(path, room, "%s/%s", folder, e->d_name);
      entries++;
    } else if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && strcmp(e->d_name, "lock")) {
      ++*others;
    }
  }
  closedir(d);
  return entries;
}

static void roundTrip(void **state) {
  char path[700];
  int others;
  struct stat st;
  const epCacheKey other = {"kernel-sm_90", "b key", 5};
  (void)state;
  assert_false(found(&key));
  store();
  assert_true(found(&key));
  assert_false(found(&other));
  assert_int_equal(entryPath(path, sizeof(path), &others), 1);
  assert_int_equal(others, 0);
  assert_int_equal(stat(folder, &st), 0);
  assert_int_equal(st.st_mode & 0777, 0700);
  store(); /* over itself */
  assert_true(found(&key));
}

static void damage(void **state) {
  char path[700];
  int others;
  struct stat st;
  (void)state;
  store();
  assert_int_equal(entryPath(path, sizeof(path), &others), 1);
  assert_int_equal(stat(path, &st), 0);
  for (off_t at = 0; at < st.st_size; at += 5) {
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseeko(f, at, SEEK_SET), 0);
    int c = fgetc(f);
    assert_int_equal(fseeko(f, at, SEEK_SET), 0);
    assert_int_not_equal(fputc(c ^ 0x10, f), EOF);
    assert_int_equal(fclose(f), 0);
    assert_false(found(&key));
    store();
    assert_true(found(&key));
  }
  assert_int_equal(truncate(path, st.st_size - 1), 0);
  assert_false(found(&key));
  assert_int_equal(truncate(path, 0), 0);
  assert_false(found(&key));
  assert_int_equal(unlink(path), 0);
  assert_int_equal(symlink("/dev/zero", path), 0);
  assert_false(found(&key));
}

static void foreignFolder(void **state) {
  (void)state;
  store();
  assert_int_equal(chmod(folder, 0777), 0);
  assert_false(found(&key)); /* anybody could have put it there */
  store();
  assert_int_equal(chmod(folder, 0755), 0);
  assert_true(found(&key));
}

static void folderIsFile(void **state) {
  (void)state;
  epCache *kept = cache;
  char path[300];
  store();
  snprintf(path, sizeof(path), "%s/lock/c", folder);
  int fd = epCacheLock(cache, &key);
  assert_true(fd >= 0);
  epCacheUnlock(fd);
  cache = epCacheOpen(path);
  assert_non_null(cache);
  assert_int_equal(epCacheLock(cache, &key), -1);
  store();
  assert_false(found(&key));
  epCacheClose(cache);
  cache = kept;
}

static void fileSystemErrors(void **state) {
  char path[700];
  int others;
  (void)state;
  failRename = ENOTEMPTY;
  store();
  assert_false(found(&key));
  assert_int_equal(entryPath(path, sizeof(path), &others), 0);
  assert_int_equal(others, 0); /* no temporary file is left */
  failRename = 0;
  failSync = ENOSPC;
  store();
  assert_int_equal(entryPath(path, sizeof(path), &others), 0);
  assert_int_equal(others, 0);
  failSync = 0;
  failOpen = EROFS;
  store();
  assert_int_equal(epCacheLock(cache, &key), -1);
  failOpen = 0;
  store(); /* trouble passes */
  assert_true(found(&key));
  failOpen = ENOENT;
  assert_false(found(&key));
}

static void lockExcludes(void **state) {
  int ready[2], go[2];
  char c = 0;
  (void)state;
  assert_int_equal(pipe(ready), 0);
  assert_int_equal(pipe(go), 0);
  pid_t child = fork();
  if (child == 0) {
    int lock = epCacheLock(cache, &key);
    int ok = lock >= 0 && write(ready[1], "r", 1) == 1 && read(go[0], &c, 1) == 1;
    usleep(50000);
    store();
    epCacheUnlock(lock);
    _exit(ok ? 0 : 1);
  }
  assert_true(child > 0);
  assert_int_equal(read(ready[0], &c, 1), 1);
  const epCacheKey other = {"kernel-sm_90", "b key", 5};
  int lock = epCacheLock(cache, &other); /* another key is free */
  assert_true(lock >= 0);
  epCacheUnlock(lock);
  assert_false(found(&key));
  assert_int_equal(write(go[1], "g", 1), 1);
  lock = epCacheLock(cache, &key);
  assert_true(lock >= 0);
  assert_true(found(&key)); /* so the child had finished */
  epCacheUnlock(lock);
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  close(ready[0]), close(ready[1]), close(go[0]), close(go[1]);
}

/* A process that holds a lock and is killed leaves it to the next; one that never lets go is waited for no longer than
 * the limit, and then everybody compiles for himself. */
static void lockWaitEnds(void **state) {
  int ready[2], status, lock;
  char c;
  (void)state;
  assert_int_equal(pipe(ready), 0);
  pid_t child = fork();
  if (child == 0) {
    lock = epCacheLock(cache, &key);
    _exit(lock < 0 || write(ready[1], "r", 1) != 1 || pause());
  }
  assert_true(child > 0);
  assert_int_equal(read(ready[0], &c, 1), 1);
  clockStep = EP_CACHE_LOCK_SECONDS / 3; /* each look at the clock */
  assert_int_equal(epCacheLock(cache, &key), -1);
  clockStep = 0;
  assert_int_equal(kill(child, SIGKILL), 0);
  lock = epCacheLock(cache, &key);
  assert_true(lock >= 0);
  epCacheUnlock(lock);
  assert_int_equal(waitpid(child, &status, 0), child);
  close(ready[0]), close(ready[1]);
}

/* Exit status of a child: 0 found, 1 compiled, 2 failed. */
static int compileInChild(int failing) {
  epJit *jit;
  epJitCode made;
  epConfig config;
  failRename = failing;
  memset(&config, 0, sizeof(config));
  config.ranks = 2;
  config.experts = 8;
  config.topk = 2;
  config.indexBytes = 8;
  config.threads = 64;
  if (epJitOpenAt(&jit, folder) != ncclSuccess ||
      epJitCompile(jit, EP_KERNEL_UPDATE, &config, 80, &made) != ncclSuccess)
    return 2;
  int status = made.fromCache ? 0 : 1;
  if (!made.cubin || made.bytes == 0 || made.spillBytes != 0 || made.registers <= 0) status = 2;
  epJitFree(&made);
  epJitClose(jit);
  return status;
}

static void race(int failing, int *compiled, int *failed) {
  pid_t children[3];
  *compiled = *failed = 0;
  for (int i = 0; i < 3; i++) {
    children[i] = fork();
    if (children[i] == 0) _exit(compileInChild(failing));
    assert_true(children[i] > 0);
  }
  for (int i = 0; i < 3; i++) {
    int status;
    assert_int_equal(waitpid(children[i], &status, 0), children[i]);
    assert_true(WIFEXITED(status));
    *compiled += WEXITSTATUS(status) == 1;
    *failed += WEXITSTATUS(status) == 2;
  }
}

static void processes(void **state) {
  int compiled, failed, status;
  (void)state;
  /* Asked in a child, so that no forked process inherits a compiler that has run. */
  pid_t probe = fork();
  if (probe == 0) {
    epJit *jit;
    _exit(epJitOpenAt(&jit, "") == ncclSuccess && epJitCompilerVersion(jit) ? 0 : 1);
  }
  assert_int_equal(waitpid(probe, &status, 0), probe);
  if (status) skip(); /* no NVRTC here */
  race(ENOTEMPTY, &compiled, &failed);
  assert_int_equal(failed, 0);
  assert_int_equal(compiled, 3); /* nobody could publish, all have their own */
  race(0, &compiled, &failed);
  assert_int_equal(failed, 0);
  assert_int_equal(compiled, 1); /* one for all */
  race(0, &compiled, &failed);
  assert_int_equal(compiled + failed, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(roundTrip, setUp, tearDown),
      cmocka_unit_test_setup_teardown(damage, setUp, tearDown),
      cmocka_unit_test_setup_teardown(foreignFolder, setUp, tearDown),
      cmocka_unit_test_setup_teardown(folderIsFile, setUp, tearDown),
      cmocka_unit_test_setup_teardown(fileSystemErrors, setUp, tearDown),
      cmocka_unit_test_setup_teardown(lockExcludes, setUp, tearDown),
      cmocka_unit_test_setup_teardown(lockWaitEnds, setUp, tearDown),
      cmocka_unit_test_setup_teardown(processes, setUp, tearDown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
