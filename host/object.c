/* Small tables of live objects, one a kind, under one lock: programs have few groups, some dozens of handles and of
 * heap tensors, and a miss costs only an error path. What a thread has found it need not look for again, nor take the lock
 * that the threads of all devices share, until an object of that kind goes. */
#include "object.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

static struct epLiveObjects {
  const void **object;
  int count, room;
  unsigned removals; /* atomic */
} epLive[EP_OBJECT_KINDS];
#define EP_FOUND 4u /* micro-batches in flight have a handle each */
static _Thread_local struct {
  const void *object;
  unsigned removals;
} epFound[EP_OBJECT_KINDS][EP_FOUND];
static pthread_mutex_t epLiveLock = PTHREAD_MUTEX_INITIALIZER; /* guards the tables */

static int epObjectIndex(const void *object, epObjectKind kind) {
  for (int i = epLive[kind].count - 1; i >= 0; i--)
    if (epLive[kind].object[i] == object) return i;
  return -1;
}

int epObjectAdd(const void *object, epObjectKind kind) {
  struct epLiveObjects *live = &epLive[kind];
  int ok = 1;
  pthread_mutex_lock(&epLiveLock);
  if (live->count == live->room) {
    int room = live->room ? 2 * live->room : 32;
    const void **more = (const void **)realloc((void *)live->object, (size_t)room * sizeof *more);
    ok = more != NULL;
    if (ok) {
      live->object = more;
      live->room = room;
    }
  }
  if (ok) live->object[live->count++] = object;
  pthread_mutex_unlock(&epLiveLock);
  return ok;
}

int epObjectRemove(const void *object, epObjectKind kind) {
  struct epLiveObjects *live = &epLive[kind];
  int i;
  pthread_mutex_lock(&epLiveLock);
  i = epObjectIndex(object, kind);
  if (i >= 0) {
    live->object[i] = live->object[--live->count];
    __atomic_fetch_add(&live->removals, 1, __ATOMIC_RELAXED);
  }
  if (live->count == 0) { /* nothing left: leak checkers see an empty house */
    free((void *)live->object);
    live->object = NULL;
    live->room = 0;
  }
  pthread_mutex_unlock(&epLiveLock);
  return i >= 0;
}

int epObjectExists(const void *object, epObjectKind kind) {
  unsigned slot = (unsigned)((uintptr_t)object >> 6) % EP_FOUND;
  unsigned removals = __atomic_load_n(&epLive[kind].removals, __ATOMIC_RELAXED);
  int i;
  if (object && epFound[kind][slot].object == object && epFound[kind][slot].removals == removals) return 1;
  pthread_mutex_lock(&epLiveLock);
  i = epObjectIndex(object, kind);
  pthread_mutex_unlock(&epLiveLock);
  if (i >= 0) {
    epFound[kind][slot].object = object;
    epFound[kind][slot].removals = removals;
  }
  return i >= 0;
}
