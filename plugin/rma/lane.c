/* Operations. Those of one context for one peer stand in a lane and leave it in order: a put into a peer's mapped GPU
 * memory once its copy is done (copies are asked for at each turn, those of neighbours as one), any other put once its last chunk is queued on the socket, a signal once it is queued
 * there itself. As a context keeps to one socket, signals arrive behind the puts before them; nothing waits for answers. */
#include <stdlib.h>
#include <string.h>

#include "rma.h"

enum { CHUNKS_A_TURN = 4 };

static void opDone(epRmaOp *op) {
  __atomic_store_n(&op->done, true, __ATOMIC_RELEASE);
  if (op->from) op->from->uses--;
  if (op->to) op->to->uses--;
  if (op->signal) op->signal->uses--;
}

void epRmaOpFrameSent(epRmaOp *op) {
  if (--op->frames == 0 && op->queued) opDone(op);
}

static void activate(epRmaLane *lane) {
  epRmaColl *coll = lane->context->coll;
  if (lane->active) return;
  lane->active = true;
  lane->next = NULL;
  if (coll->activeTail)
    coll->activeTail->next = lane;
  else
    coll->activeHead = lane;
  coll->activeTail = lane;
}

static void leave(epRmaLane *lane, epRmaOp *op) {
  lane->head = op->next;
  if (!lane->head) lane->tail = NULL;
  op->queued = true;
  if (op->frames == 0) opDone(op);
}

static int numberOf(const epRmaLane *lane) {
  return lane->context->first + (int)((size_t)(lane - lane->context->lanes) / lane->context->coll->ranks);
}

/* One chunk into a frame. *moved stays false where the ring or the staging is full. */
static epRmaResult queueChunk(epRmaSocket *to, epRmaOp *op, bool *moved) {
  epRmaColl *coll = to->coll;
  uint64_t left = op->size - op->claimed, bytes = left < EP_RMA_CHUNK ? left : EP_RMA_CHUNK;
  epRmaFrame frame = {{EP_RMA_FRAME_DATA, op->to->id, op->toOffset + op->claimed, bytes, 0},
                      op->from->base + op->fromOffset + op->claimed,
                      -1,
                      -1,
                      op};
  *moved = false;
  if (!epRmaSocketRoom(to)) return EP_RMA_OK;
  if (op->from->type == EP_RMA_PTR_CUDA) {
    epRmaResult rc = epRmaStageTake(&coll->leaving, &frame.slot);
    if (rc) return epRmaNote(coll, rc);
    if (frame.slot < 0) return EP_RMA_OK;
    char *staged = epRmaStageAt(&coll->leaving, frame.slot);
    int stream = numberOf(op->lane) % EP_RMA_OUT_STREAMS;
    rc = epRmaGpuCopy(staged, frame.payload, bytes, coll->gpu.out[stream].stream, coll->leaving.events[frame.slot]);
    if (rc) return epRmaNote(coll, rc);
    frame.payload = staged;
  }
  epRmaSocketPush(to, &frame);
  op->frames++;
  op->claimed += bytes;
  *moved = true;
  return EP_RMA_OK;
}

static epRmaResult queueSignal(epRmaLane *lane, epRmaSocket *to, epRmaOp *op, bool *moved) {
  if (lane->rank == lane->context->coll->rank) {
    *moved = true;
    return epRmaSignalApply(lane->context->coll, op->signal, op->signalOffset, op->signalValue);
  }
  *moved = epRmaSocketRoom(to);
  if (!*moved) return EP_RMA_OK;
  epRmaHeader header = {EP_RMA_FRAME_SIGNAL, op->signal->id, op->signalOffset, 0, op->signalValue};
  epRmaSocketPush(to, &(epRmaFrame){header, NULL, -1, -1, op});
  op->frames++;
  return EP_RMA_OK;
}

static epRmaGpuOut *outOf(const epRmaLane *lane) {
  return &lane->context->coll->gpu.out[numberOf(lane) % EP_RMA_OUT_STREAMS];
}

/* Asks for the copies of what came since the last time. */
static epRmaResult askForCopies(epRmaLane *lane) {
  epRmaColl *coll = lane->context->coll;
  epRmaGpuOut *out = outOf(lane);
  while (lane->fresh) {
    epRmaOp *first = lane->fresh, *end = first->next;
    uint64_t bytes = first->size, number = 0;
    lane->fresh = end;
    if (!first->direct || first->copied) continue;
    while (end && end->direct && !end->copied && end->from == first->from && end->to == first->to &&
           end->fromOffset == first->fromOffset + bytes && end->direct == first->direct + bytes) {
      bytes += end->size;
      end = end->next;
    }
    if (!epRmaGpuOutRoom(out)) {
      lane->fresh = first;
      return EP_RMA_OK;
    }
    epRmaResult rc = epRmaGpuOutCopy(out, first->direct, first->from->base + first->fromOffset, bytes, &number);
    if (rc) return epRmaNote(coll, rc);
    coll->tally.copies++;
    for (epRmaOp *op = first; op != end; op = op->next) op->number = number;
    lane->fresh = end;
  }
  return EP_RMA_OK;
}

static epRmaResult step(epRmaLane *lane) {
  epRmaColl *coll = lane->context->coll;
  epRmaSocket *to = lane->rank == coll->rank ? NULL : epRmaSocketOf(coll, lane->rank, numberOf(lane));
  int turn = 0;
  bool moved = false;
  while (lane->head) {
    epRmaOp *op = lane->head;
    epRmaResult rc = EP_RMA_OK;
    if (to && (to->fd < 0 || to->byeSeen))
      return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u has closed its communicator, and more is put to it",
                       lane->rank);
    if (op->direct && !op->copied) {
      op->copied = op->number && op->number <= outOf(lane)->done;
      if (!op->copied) return EP_RMA_OK;
    }
    while (to && !op->direct && op->claimed < op->size) {
      if (turn++ == CHUNKS_A_TURN) return EP_RMA_OK;
      rc = queueChunk(to, op, &moved);
      if (rc || !moved) return rc;
    }
    if (op->signal) {
      rc = queueSignal(lane, to, op, &moved);
      if (rc || !moved) return rc;
    }
    leave(lane, op);
  }
  return EP_RMA_OK;
}

epRmaResult epRmaLanesPump(epRmaColl *coll) {
  epRmaLane *before = NULL, *lane = coll->activeHead;
  epRmaResult rc = EP_RMA_OK;
  for (int i = 0; !rc && i < EP_RMA_OUT_STREAMS; i++) rc = epRmaGpuOutCollect(&coll->gpu.out[i]);
  if (rc) return epRmaNote(coll, rc);
  while (lane) {
    epRmaLane *next = lane->next;
    rc = step(lane);
    if (!rc) rc = askForCopies(lane);
    if (rc) return rc;
    if (lane->head) {
      before = lane;
    } else {
      lane->active = false;
      if (before)
        before->next = next;
      else
        coll->activeHead = next;
      if (coll->activeTail == lane) coll->activeTail = before;
    }
    lane = next;
  }
  for (int i = 0; !rc && i < EP_RMA_OUT_STREAMS; i++) rc = epRmaGpuOutSubmit(&coll->gpu.out[i]);
  return rc ? epRmaNote(coll, rc) : EP_RMA_OK;
}

/* ---- contexts -------------------------------------------------------------------------------------------------- */

epRmaResult epRmaContextCreate(epRmaColl *coll, int count, epRmaContext **out) {
  size_t lanes = (size_t)count * coll->ranks;
  epRmaContext *context = calloc(1, sizeof(*context) + lanes * sizeof(epRmaLane));
  if (!context) {
    EP_RMA_WARN("no memory for %d contexts of %u ranks", count, coll->ranks);
    return EP_RMA_SYSTEM_ERROR;
  }
  context->coll = coll, context->count = count, context->first = coll->contextCount;
  for (size_t i = 0; i < lanes; i++) {
    context->lanes[i].context = context;
    context->lanes[i].rank = (uint32_t)(i % coll->ranks);
  }
  coll->contextCount = (coll->contextCount + count) % EP_RMA_MAX_CONTEXTS;
  context->next = coll->contexts;
  coll->contexts = context;
  *out = context;
  return EP_RMA_OK;
}

static bool idle(const epRmaContext *context) {
  for (const epRmaOp *op = context->created; op; op = op->created)
    if (op->lane && !op->done) return false;
  return true;
}

/* Frames of a broken communicator are sent no more: nothing may point to operations that go away. */
static void forget(epRmaColl *coll, epRmaContext *context) {
  for (uint32_t rank = 0; rank < coll->ranks; rank++)
    for (int i = 0; i < coll->peers[rank]->count; i++) {
      epRmaSocket *socket = &coll->peers[rank]->sockets[i];
      for (unsigned at = socket->head; at != socket->tail; at++) {
        epRmaOp *op = socket->ring[at % EP_RMA_RING].op;
        if (op && op->lane->context == context) socket->ring[at % EP_RMA_RING].op = NULL;
      }
    }
  epRmaLane *lane = coll->activeHead;
  coll->activeHead = coll->activeTail = NULL;
  while (lane) {
    epRmaLane *next = lane->next;
    lane->active = false;
    if (lane->context != context) activate(lane);
    lane = next;
  }
}

epRmaResult epRmaContextDestroy(epRmaContext *context) {
  epRmaColl *coll = context->coll;
  uint64_t deadline = epRmaMilliseconds() + (uint64_t)coll->settings.timeoutMs;
  while (!coll->error && !idle(context)) {
    epRmaProgress(coll);
    if (epRmaMilliseconds() >= deadline)
      epRmaFail(coll, EP_RMA_REMOTE_ERROR, "operations are still in flight %d ms after their context was destroyed",
                coll->settings.timeoutMs);
    epRmaPause(coll);
  }
  forget(coll, context);
  epRmaResult rc = EP_RMA_OK;
  for (int i = 0; !rc && coll->gpu.ready && i < EP_RMA_OUT_STREAMS; i++) rc = epRmaGpuSync(coll->gpu.out[i].stream);
  epRmaContext **at = &coll->contexts;
  while (*at != context) at = &(*at)->next;
  *at = context->next;
  while (context->created) {
    epRmaOp *op = context->created;
    context->created = op->created;
    if (op->lane && !op->done) opDone(op);
    free(op);
  }
  free(context);
  return rc ? epRmaNote(coll, rc) : EP_RMA_OK;
}

void epRmaOpsForget(const epRmaWindow *window) {
  for (epRmaContext *context = window->coll->contexts; context; context = context->next)
    for (epRmaOp *op = context->created; op; op = op->created) {
      if (op->from == window) op->from = NULL;
      if (op->to == window) op->to = NULL;
      if (op->signal == window) op->signal = NULL;
    }
}

/* ---- operations ------------------------------------------------------------------------------------------------ */

static bool fits(const epRmaColl *coll, const epRmaWindow *window, const char *what, uint64_t offset, uint64_t bytes,
                 uint64_t room) {
  if (!window || window->coll != coll) {
    EP_RMA_WARN("the %s of a put is no memory of this communicator", what);
    return false;
  }
  if (offset <= room && bytes <= room - offset) return true;
  EP_RMA_WARN("the %s of a put is %llu bytes at %llu of window %u, which has %llu", what, (unsigned long long)bytes,
              (unsigned long long)offset, window->id, (unsigned long long)room);
  return false;
}

static epRmaResult checkPut(const epRmaContext *context, const epRmaPut *put) {
  const epRmaColl *coll = context->coll;
  if (put->context < 0 || put->context >= context->count || put->rank >= coll->ranks) {
    EP_RMA_WARN("a put names context %d and rank %u: there are %d and %u", put->context, put->rank, context->count,
                coll->ranks);
    return EP_RMA_INVALID_ARGUMENT;
  }
  if (put->size > 0 &&
      (!fits(coll, put->from, "source", put->fromOffset, put->size, put->from ? put->from->size : 0) ||
       !fits(coll, put->to, "destination", put->toOffset, put->size, put->to ? put->to->peers[put->rank].size : 0)))
    return EP_RMA_INVALID_ARGUMENT;
  if (!put->signal) return EP_RMA_OK;
  if (!fits(coll, put->signal, "signal", put->signalOffset, sizeof(uint64_t), put->signal->peers[put->rank].size))
    return EP_RMA_INVALID_ARGUMENT;
  if (put->signalOffset % sizeof(uint64_t) == 0) return EP_RMA_OK;
  EP_RMA_WARN("the signal of a put is at %llu: a multiple of 8 is expected", (unsigned long long)put->signalOffset);
  return EP_RMA_INVALID_ARGUMENT;
}

/* The put's destination in this process's memory, or NULL where it must go over the socket. */
static char *reach(const epRmaColl *coll, const epRmaPut *put) {
  const struct epRmaPeerWindow *peer = &put->to->peers[put->rank];
  if (put->rank == coll->rank) return put->to->base + put->toOffset;
  return peer->mapped ? peer->mapped + peer->offset + put->toOffset : NULL;
}

epRmaResult epRmaPutIssue(epRmaContext *context, const epRmaPut *put, epRmaOp **out) {
  epRmaColl *coll = context->coll;
  epRmaResult rc = coll->error ? coll->error : checkPut(context, put);
  if (rc) return rc;
  epRmaLane *lane = &context->lanes[(size_t)put->context * coll->ranks + put->rank];
  if (lane->inFlight >= EP_RMA_DEPTH) {
    EP_RMA_WARN("%u puts of context %d to rank %u are in flight: no more are taken until one was tested and done",
                lane->inFlight, put->context, put->rank);
    return EP_RMA_INVALID_USAGE;
  }
  epRmaOp *op = context->free;
  if (op) {
    context->free = op->next;
  } else {
    op = calloc(1, sizeof(*op));
    if (!op) return epRmaFail(coll, EP_RMA_SYSTEM_ERROR, "no memory for an operation");
    op->created = context->created;
    context->created = op;
  }
  *op = (epRmaOp){.created = op->created, .lane = lane};
  op->direct = put->size > 0 ? reach(coll, put) : NULL;
  if (op->direct && put->from->type == EP_RMA_PTR_HOST && put->to->type == EP_RMA_PTR_HOST) {
    memmove(op->direct, put->from->base + put->fromOffset, put->size);
    op->copied = true;
  }
  if (put->size > 0) {
    op->from = put->from, op->to = put->to;
    op->from->uses++, op->to->uses++;
  }
  if (put->signal) (op->signal = put->signal)->uses++;
  op->fromOffset = put->fromOffset, op->toOffset = put->toOffset, op->size = put->size;
  op->signalOffset = put->signalOffset, op->signalValue = put->signalValue;
  coll->tally.puts++;
  lane->inFlight++;
  if (lane->tail)
    lane->tail->next = op;
  else
    lane->head = op;
  lane->tail = op;
  if (!lane->fresh) lane->fresh = op;
  activate(lane);
  *out = op;
  return EP_RMA_OK;
}

bool epRmaOpLooksDone(const epRmaOp *op) { return __atomic_load_n(&op->done, __ATOMIC_ACQUIRE); }

epRmaResult epRmaOpTest(epRmaOp *op, bool *done) {
  epRmaLane *lane = op->lane;
  const epRmaColl *coll = lane->context->coll;
  *done = op->done;
  if (!op->done) return coll->error;
  lane->inFlight--;
  op->lane = NULL;
  op->next = lane->context->free;
  lane->context->free = op;
  return EP_RMA_OK;
}
