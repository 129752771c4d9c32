/* Small tables of live objects, one a kind, under one lock: programs have few groups, some dozens of handles and of
 * heap tensors, and a miss costs only an error path. */
#include "object.h"

#include <pthread.h>
#include <stdlib.h>

static struct epLiveObjects {
  const void **object;
  int count, room;
} epLive[EP_OBJECT_KINDS];
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
  if (i >= 0) live->object[i] = live->object[--live->count];
  if (live->count == 0) { /* nothing left: leak checkers see an empty house */
    free((void *)live->object);
    live->object = NULL;
    live->room = 0;
  }
  pthread_mutex_unlock(&epLiveLock);
  return i >= 0;
}

int epObjectExists(const void *object, epObjectKind kind) {
  int i;
  pthread_mutex_lock(&epLiveLock);
  i = epObjectIndex(object, kind);
  pthread_mutex_unlock(&epLiveLock);
  return i >= 0;
}
