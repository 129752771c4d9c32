/* A small table of live objects under one lock: programs have few groups and some dozens of handles, and a miss costs
 * only an error path. */
#include "object.h"

#include <pthread.h>
#include <stdlib.h>

static struct epLiveObject {
  const void *object;
  epObjectKind kind;
} * epLive;
static int epLiveCount, epLiveRoom;
static pthread_mutex_t epLiveLock = PTHREAD_MUTEX_INITIALIZER; /* guards the three above */

static int epObjectIndex(const void *object, epObjectKind kind) {
  for (int i = epLiveCount - 1; i >= 0; i--)
    if (epLive[i].object == object && epLive[i].kind == kind) return i;
  return -1;
}

int epObjectAdd(const void *object, epObjectKind kind) {
  int ok = 1;
  pthread_mutex_lock(&epLiveLock);
  if (epLiveCount == epLiveRoom) {
    int room = epLiveRoom ? 2 * epLiveRoom : 32;
    struct epLiveObject *more = realloc(epLive, (size_t)room * sizeof *more);
    ok = more != NULL;
    if (ok) {
      epLive = more;
      epLiveRoom = room;
    }
  }
  if (ok) {
    epLive[epLiveCount].object = object;
    epLive[epLiveCount++].kind = kind;
  }
  pthread_mutex_unlock(&epLiveLock);
  return ok;
}

int epObjectRemove(const void *object, epObjectKind kind) {
  int i;
  pthread_mutex_lock(&epLiveLock);
  i = epObjectIndex(object, kind);
  if (i >= 0) epLive[i] = epLive[--epLiveCount];
  if (epLiveCount == 0) { /* nothing left: leak checkers see an empty house */
    free(epLive);
    epLive = NULL;
    epLiveRoom = 0;
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
