/* Frames over one socket: a header of 32 bytes and up to a chunk of data, written from the ring and read by a small state
 * machine, both without waiting and many by one call. Host memory is read and written in place; GPU memory passes through pinned slots. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "rma.h"

enum {
  RECEIVE_BUDGET = 4 << 20, /* bytes from one socket before others have their turn */
  SEND_PARTS = 64
};

epRmaSocket *epRmaSocketOf(epRmaColl *coll, uint32_t rank, int context) {
  epRmaPeer *peer = coll->peers[rank];
  return &peer->sockets[context % peer->count];
}

bool epRmaSocketRoom(const epRmaSocket *socket) { return socket->tail - socket->head < EP_RMA_RING; }

void epRmaSocketPush(epRmaSocket *socket, const epRmaFrame *frame) {
  if (socket->head == socket->tail) socket->movedAt = epRmaMilliseconds();
  socket->ring[socket->tail++ % EP_RMA_RING] = *frame;
  if (socket->sending) return;
  socket->sending = true;
  socket->next = socket->coll->sending;
  socket->coll->sending = socket;
}

/* ---- sending --------------------------------------------------------------------------------------------------- */

static size_t totalOf(const epRmaFrame *frame) {
  return sizeof(frame->header) + (frame->header.type == EP_RMA_FRAME_DATA ? frame->header.size : 0);
}

/* As many frames as are ready, by one call. A descriptor goes with the first byte of its frame, which stands alone. Sets *ready
 * where there is anything to send. */
static epRmaResult sendSome(epRmaSocket *from, ssize_t *sent, bool *ready) {
  struct iovec parts[SEND_PARTS];
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
  } control;
  struct msghdr message = {.msg_iov = parts};
  for (unsigned at = from->head; at != from->tail && message.msg_iovlen + 2 <= SEND_PARTS; at++) {
    epRmaFrame *frame = &from->ring[at % EP_RMA_RING];
    size_t had = at == from->head ? from->sent : 0, header = sizeof(frame->header), total = totalOf(frame);
    if (frame->fd >= 0 && at != from->head) break;
    if (frame->slot >= 0 && had == 0) {
      bool done = false;
      epRmaResult rc = epRmaGpuDone(from->coll->leaving.events[frame->slot], &done);
      if (rc) return rc;
      if (!done) break;
    }
    if (had < header) parts[message.msg_iovlen++] = (struct iovec){(char *)&frame->header + had, header - had};
    if (had < header) had = header;
    if (total > had)
      parts[message.msg_iovlen++] = (struct iovec){(void *)(uintptr_t)(frame->payload + (had - header)), total - had};
    if (frame->fd < 0) continue;
    if (from->sent == 0) {
      memset(&control, 0, sizeof(control));
      message.msg_control = &control, message.msg_controllen = sizeof(control.room);
      control.header.cmsg_level = SOL_SOCKET, control.header.cmsg_type = SCM_RIGHTS;
      control.header.cmsg_len = CMSG_LEN(sizeof(int));
      memcpy(CMSG_DATA(&control.header), &frame->fd, sizeof(int));
    }
    break;
  }
  *ready = message.msg_iovlen > 0;
  if (*ready) *sent = sendmsg(from->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return EP_RMA_OK;
}

/* The first frame is sent, or given up; bytes sent beyond it are the next one's. */
static void frameDone(epRmaSocket *from, epRmaFrame *frame) {
  size_t total = totalOf(frame);
  from->sent = from->sent > total ? from->sent - total : 0;
  if (frame->slot >= 0) from->coll->leaving.busy[frame->slot] = false;
  if (frame->fd >= 0) close(frame->fd);
  if (frame->op) epRmaOpFrameSent(frame->op);
  from->head++;
}

epRmaResult epRmaSocketSend(epRmaSocket *from) {
  epRmaColl *coll = from->coll;
  if (from->byeOwed && epRmaSocketRoom(from)) {
    from->byeOwed = false;
    epRmaSocketPush(from, &(epRmaFrame){{EP_RMA_FRAME_BYE_SEEN, 0, 0, 0, 0}, NULL, -1, -1, NULL});
  }
  while (from->fd >= 0 && from->head != from->tail) {
    ssize_t sent = 0;
    bool ready = false;
    epRmaResult rc = sendSome(from, &sent, &ready);
    if (rc) return epRmaNote(coll, rc);
    if (!ready) {
      from->movedAt = epRmaMilliseconds();
      return EP_RMA_OK;
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && from->byeSeen) { /* it left, as it had said */
      epRmaSocketClose(from);
      return EP_RMA_OK;
    }
    if (sent < 0 && errno != EAGAIN)
      return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u (%s) is lost: %s", from->rank, coll->peers[from->rank]->name,
                       strerror(errno));
    uint64_t now = epRmaMilliseconds();
    if (sent < 0 && now - from->movedAt > (uint64_t)coll->settings.timeoutMs)
      return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u (%s) has taken no data for %d ms (NCCL_EP_RMA_TIMEOUT_MS)",
                       from->rank, coll->peers[from->rank]->name, coll->settings.timeoutMs);
    if (sent < 0) return EP_RMA_OK;
    from->movedAt = now;
    from->sent += (size_t)sent;
    while (from->head != from->tail && from->sent >= totalOf(&from->ring[from->head % EP_RMA_RING]))
      frameDone(from, &from->ring[from->head % EP_RMA_RING]);
  }
  return EP_RMA_OK;
}

/* ---- receiving ------------------------------------------------------------------------------------------------- */

static ssize_t receiveInto(epRmaSocket *to, void *at, size_t bytes) {
  struct iovec part = {at, bytes};
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
  } control;
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control.room)};
  ssize_t got = recvmsg(to->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) return got;
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    if (to->inFd >= 0) close(to->inFd);
    memcpy(&to->inFd, CMSG_DATA(header), sizeof(int));
  }
  return got;
}

/* Small frames are read many at once. No read goes past a descriptor, so there is one for the frames looked at before the next. */
static ssize_t receiveSome(epRmaSocket *to, void *at, size_t bytes) {
  if (to->aheadAt == to->aheadEnd) {
    if (bytes >= sizeof(to->ahead)) return receiveInto(to, at, bytes);
    ssize_t got = receiveInto(to, to->ahead, sizeof(to->ahead));
    if (got <= 0) return got;
    to->aheadAt = 0, to->aheadEnd = (size_t)got;
  }
  size_t left = to->aheadEnd - to->aheadAt, got = bytes < left ? bytes : left;
  memcpy(at, to->ahead + to->aheadAt, got);
  to->aheadAt += got;
  return (ssize_t)got;
}

/* A frame without data. */
static epRmaResult control(epRmaSocket *to) {
  epRmaColl *coll = to->coll;
  epRmaWindow *window = NULL;
  epRmaResult rc = EP_RMA_OK;
  switch (to->in.type) {
  case EP_RMA_FRAME_SIGNAL:
    rc = epRmaWindowFind(coll, to->rank, &to->in, sizeof(uint64_t), &window);
    if (!rc && window) rc = epRmaSignalApply(coll, window, to->in.offset, to->in.value);
    break;
  case EP_RMA_FRAME_WINDOW:
    /* Frames before it may have been read together with its descriptor. */
    rc = epRmaWindowSeen(coll, to->rank, &to->in, to->in.value ? to->inFd : -1);
    if (to->in.value) to->inFd = -1;
    break;
  case EP_RMA_FRAME_BYE:
    to->byeSeen = to->byeOwed = true;
    rc = epRmaSocketSend(to);
    break;
  case EP_RMA_FRAME_BYE_SEEN:
    to->byeAnswered = true;
    break;
  default:
    rc = epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u sent a frame of unknown type %#x", to->rank, to->in.type);
  }
  to->got = 0;
  return rc;
}

/* Where the rest of a data frame goes: NULL where it must wait for a slot. */
static epRmaResult target(epRmaSocket *to, char **at, epRmaWindow **window) {
  size_t had = to->got - sizeof(to->in);
  epRmaResult rc;
  *at = NULL;
  if (to->in.size == 0 || to->in.size > EP_RMA_CHUNK)
    return epRmaFail(to->coll, EP_RMA_REMOTE_ERROR, "rank %u sent a frame of %llu bytes, at most %d are expected",
                     to->rank, (unsigned long long)to->in.size, EP_RMA_CHUNK);
  rc = epRmaWindowFind(to->coll, to->rank, &to->in, to->in.size, window);
  if (rc || !*window) return rc;
  if ((*window)->type == EP_RMA_PTR_HOST) {
    *at = (*window)->base + to->in.offset + had;
    return EP_RMA_OK;
  }
  if (to->inSlot < 0) rc = epRmaStageTake(&to->coll->arriving, &to->inSlot);
  if (rc) return epRmaNote(to->coll, rc);
  if (to->inSlot >= 0) *at = epRmaStageAt(&to->coll->arriving, to->inSlot) + had;
  return EP_RMA_OK;
}

static epRmaResult dataDone(epRmaSocket *to, epRmaWindow *window) {
  epRmaStage *stage = &to->coll->arriving;
  int slot = to->inSlot;
  to->got = 0;
  to->inSlot = -1;
  if (slot < 0) return EP_RMA_OK;
  if (!window) {
    stage->busy[slot] = false;
    return EP_RMA_OK;
  }
  stage->ending[slot] = true;
  epRmaResult rc = epRmaGpuCopy(window->base + to->in.offset, epRmaStageAt(stage, slot), to->in.size, to->coll->gpu.in,
                                stage->events[slot]);
  return rc ? epRmaNote(to->coll, rc) : EP_RMA_OK;
}

static epRmaResult receiveAll(epRmaSocket *to) {
  epRmaColl *coll = to->coll;
  char discarded[4096];
  for (size_t budget = RECEIVE_BUDGET; to->fd >= 0;) {
    epRmaWindow *window = NULL;
    char *at = (char *)&to->in + to->got;
    size_t want = sizeof(to->in) - to->got;
    if (to->got >= sizeof(to->in)) {
      epRmaResult rc = target(to, &at, &window);
      if (rc) return rc;
      if (window && !at) return EP_RMA_OK;
      want = sizeof(to->in) + to->in.size - to->got;
      if (!window) at = discarded, want = want < sizeof(discarded) ? want : sizeof(discarded);
    }
    if (budget < want) return EP_RMA_OK;
    ssize_t got = receiveSome(to, at, want);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return EP_RMA_OK;
    if (got <= 0 && to->byeSeen) { /* as announced */
      epRmaSocketClose(to);
      return EP_RMA_OK;
    }
    if (got <= 0)
      return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u (%s) is lost: %s", to->rank, coll->peers[to->rank]->name,
                       got < 0 ? strerror(errno) : "it closed its connection");
    budget -= (size_t)got;
    to->got += (size_t)got;
    if (to->got < sizeof(to->in)) continue;
    epRmaResult rc = EP_RMA_OK;
    if (to->in.type != EP_RMA_FRAME_DATA)
      rc = control(to);
    else if (to->got == sizeof(to->in) + to->in.size && to->in.size > 0)
      rc = dataDone(to, window);
    if (rc) return rc;
  }
  return EP_RMA_OK;
}

epRmaResult epRmaSocketReceive(epRmaSocket *to) {
  epRmaResult rc = receiveAll(to);
  bool held = to->fd >= 0 && to->aheadAt < to->aheadEnd; /* what the kernel will not tell us of again */
  to->coll->held += (unsigned)held - (unsigned)to->held;
  to->held = held;
  return rc;
}

void epRmaSocketClose(epRmaSocket *socket) {
  while (socket->head != socket->tail) frameDone(socket, &socket->ring[socket->head % EP_RMA_RING]);
  if (socket->inSlot >= 0) socket->coll->arriving.busy[socket->inSlot] = false;
  socket->inSlot = -1;
  if (socket->inFd >= 0) close(socket->inFd);
  if (socket->fd >= 0) close(socket->fd);
  socket->inFd = socket->fd = -1;
}
