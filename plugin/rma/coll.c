/* A communicator: opening, progress, its first error, closing. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include "rma.h"

enum { EVENTS = 64, FAREWELL_MS = 1000 };

uint64_t epRmaMicroseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

uint64_t epRmaMilliseconds(void) { return epRmaMicroseconds() / 1000u; }

epRmaResult epRmaNote(epRmaColl *coll, epRmaResult error) {
  if (!coll->error) __atomic_store_n(&coll->error, error, __ATOMIC_RELAXED);
  return coll->error;
}

epRmaResult epRmaFail(epRmaColl *coll, epRmaResult error, const char *format, ...) {
  char text[384];
  va_list args;
  if (coll->error) return coll->error;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  EP_RMA_WARN("rank %u: %s", coll->rank, text);
  return epRmaNote(coll, error);
}

void epRmaPause(epRmaColl *coll) {
  epRmaGpuLeave(&coll->gpu);
  pthread_mutex_unlock(&coll->mutex);
  const struct timespec moment = {0, 20000};
  nanosleep(&moment, NULL);
  coll->wanted++;
  pthread_mutex_lock(&coll->mutex);
  coll->wanted--;
  epRmaResult rc = epRmaGpuEnter(&coll->gpu);
  if (rc) epRmaNote(coll, rc);
}

/* What needs the GPU entered. */
static void clear(epRmaColl *coll) {
  for (uint32_t rank = 0; coll->peers && rank < coll->ranks; rank++)
    for (int i = 0; coll->peers[rank] && i < coll->peers[rank]->count; i++)
      epRmaSocketClose(&coll->peers[rank]->sockets[i]);
  epRmaStageFree(&coll->leaving);
  epRmaStageFree(&coll->arriving);
  epRmaWindowFreeAll(coll);
}

static void release(epRmaColl *coll) {
  for (uint32_t rank = 0; coll->peers && rank < coll->ranks; rank++) free(coll->peers[rank]);
  free(coll->peers);
  if (coll->epoll >= 0) close(coll->epoll);
  pthread_mutex_destroy(&coll->mutex);
  free(coll);
}

epRmaResult epRmaCollOpen(epRmaListener *listener, void *handles[], uint32_t ranks, uint32_t rank, epRmaColl **out) {
  epRmaResult rc = EP_RMA_SYSTEM_ERROR;
  epRmaColl *coll = calloc(1, sizeof(*coll));
  if (!coll) {
    EP_RMA_WARN("no memory for a communicator");
    return EP_RMA_SYSTEM_ERROR;
  }
  coll->ranks = ranks, coll->rank = rank, coll->epoll = -1;
  coll->settings = *epRmaListenerSettings(listener);
  coll->mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  coll->peers = calloc(ranks, sizeof(epRmaPeer *));
  coll->epoll = epoll_create1(EPOLL_CLOEXEC);
  if (!coll->peers || coll->epoll < 0) {
    EP_RMA_WARN("a communicator of %u ranks: %s", ranks, strerror(errno));
    goto fail;
  }
  rc = epRmaConnectPeers(coll, listener, handles);
  if (rc) goto fail;
  int local = 0;
  for (uint32_t peer = 0; peer < ranks; peer++) {
    local += coll->peers[peer]->local && peer != rank;
    for (int i = 0; i < coll->peers[peer]->count; i++) {
      epRmaSocket *socket = &coll->peers[peer]->sockets[i];
      struct epoll_event event = {.events = EPOLLIN, .data.ptr = socket};
      if (epoll_ctl(coll->epoll, EPOLL_CTL_ADD, socket->fd, &event) != 0) {
        EP_RMA_WARN("epoll: %s", strerror(errno));
        rc = EP_RMA_SYSTEM_ERROR;
        goto fail;
      }
    }
  }
  EP_RMA_INFO("rank %u of %u: %d peers on this host, %d by TCP, interface %s%s", rank, ranks, local,
              (int)ranks - 1 - local, coll->settings.interfaces[0].name,
              coll->settings.interfaceCount > 1 ? " and others" : "");
  *out = coll;
  return EP_RMA_OK;
fail:
  clear(coll);
  release(coll);
  return rc;
}

bool epRmaIdle(epRmaColl *coll) {
  struct epoll_event event;
  return !coll->error && !coll->activeHead && !coll->sending && !coll->held &&
         epoll_wait(coll->epoll, &event, 1, 0) == 0;
}

/* Sockets of which something was read that had to wait. */
static epRmaResult receiveHeld(epRmaColl *coll) {
  epRmaResult rc = EP_RMA_OK;
  for (uint32_t rank = 0; coll->held && !rc && rank < coll->ranks; rank++)
    for (int i = 0; !rc && i < coll->peers[rank]->count; i++)
      if (coll->peers[rank]->sockets[i].held) rc = epRmaSocketReceive(&coll->peers[rank]->sockets[i]);
  return rc;
}

epRmaResult epRmaProgress(epRmaColl *coll) {
  struct epoll_event events[EVENTS];
  if (coll->error) return coll->error;
  __atomic_store_n(&coll->progressedAt, epRmaMicroseconds(), __ATOMIC_RELAXED);
  epRmaResult rc = epRmaLanesPump(coll);
  for (epRmaSocket **at = &coll->sending; !rc && *at;) {
    epRmaSocket *socket = *at;
    rc = epRmaSocketSend(socket);
    if (socket->head != socket->tail) {
      at = &socket->next;
    } else {
      *at = socket->next;
      socket->sending = false;
    }
  }
  if (!rc) rc = receiveHeld(coll);
  if (rc) return rc;
  int count = epoll_wait(coll->epoll, events, EVENTS, 0);
  if (count < 0 && errno != EINTR) return epRmaFail(coll, EP_RMA_SYSTEM_ERROR, "epoll: %s", strerror(errno));
  for (int i = 0; !rc && i < count; i++) rc = epRmaSocketReceive(events[i].data.ptr);
  return rc ? rc : epRmaSignalsWrite(coll);
}

/* Every peer is told, and says when it has read all that was sent: a socket that is closed too early would take data
 * back. Peers that are gone or busy are not waited for long. */
static void farewell(epRmaColl *coll) {
  uint64_t deadline = epRmaMilliseconds() + FAREWELL_MS;
  bool waiting = true, told = false;
  while (waiting && !coll->error && epRmaMilliseconds() < deadline) {
    waiting = false;
    for (uint32_t rank = 0; rank < coll->ranks; rank++)
      for (int i = 0; i < coll->peers[rank]->count; i++) {
        epRmaSocket *socket = &coll->peers[rank]->sockets[i];
        if (socket->fd < 0) continue;
        if (!told && epRmaSocketRoom(socket))
          epRmaSocketPush(socket, &(epRmaFrame){{EP_RMA_FRAME_BYE, 0, 0, 0, 0}, NULL, -1, -1, NULL});
        waiting = waiting || !socket->byeAnswered;
      }
    told = true;
    if (!waiting) break;
    epRmaProgress(coll);
    epRmaPause(coll);
  }
}

epRmaResult epRmaCollClose(epRmaColl *coll) {
  pthread_mutex_lock(&coll->mutex);
  epRmaResult rc = epRmaGpuEnter(&coll->gpu);
  if (!rc && coll->contexts) {
    EP_RMA_WARN("a communicator is closed while it has contexts: destroy them first");
    rc = EP_RMA_INVALID_USAGE;
    epRmaGpuLeave(&coll->gpu);
  }
  if (rc) {
    pthread_mutex_unlock(&coll->mutex);
    return rc;
  }
  if (!coll->error) farewell(coll);
  const epRmaTally *t = &coll->tally;
  EP_RMA_INFO(
      "rank %u: %llu puts in %llu copies, %llu signals that came in %llu writes; %llu busy turns of %.1f us, %.1f "
      "of them in here",
      coll->rank, (unsigned long long)t->puts, (unsigned long long)t->copies, (unsigned long long)t->signals,
      (unsigned long long)t->writes, (unsigned long long)t->turns, t->turns ? (double)t->turnUs / (double)t->turns : 0,
      t->turns ? (double)t->workUs / (double)t->turns : 0);
  if (coll->gpu.ready) rc = epRmaGpuSync(coll->gpu.in);
  clear(coll);
  epRmaGpuLeave(&coll->gpu);
  epRmaGpuClose(&coll->gpu);
  pthread_mutex_unlock(&coll->mutex);
  release(coll);
  return rc;
}
