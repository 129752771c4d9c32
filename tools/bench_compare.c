/* A B C A B C ...: each iteration makes one transfer of each kind and one call of each operation, of each case in turn,
 * so that clocks and neighbours are the same for all. Clocks are read on the way. */
#include "bench_compare.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "meet.h"
#include "transfer.h"

#define CLOCK_EVERY 8 /* iterations */

/* A rank's half of a case. */
typedef struct side {
  epBench *bench;
  epPort *port;
  epLayer *layer;
  epTransfer transfer;
  epBenchRow *transferRow[EP_TRANSFERS], *dispatchRow, *combineRow;
  size_t *send, *receive; /* [ranks] bytes of the iteration's routing */
} side;

static void countBytes(side *s, unsigned routing) {
  const epRef *ref = s->bench->ref[routing];
  size_t row = epLayerRowBytes(&s->bench->layer) + epLayerScaleBytes(&s->bench->layer);
  int mine = s->port->rank;
  for (int r = 0; r < s->port->ranks; r++) {
    s->send[r] = (size_t)ref->rank[r].perSource[mine] * row;
    s->receive[r] = (size_t)ref->rank[mine].perSource[r] * row;
  }
}

static int timeTransfer(side *s, epTransferKind kind, unsigned i) {
  const epBenchOptions *o = s->bench->options;
  epPort *port = s->port;
  /* NCCL connects ranks when a number of bytes first needs it: it may wait for the device then, and a held stream would
   * make that wait for ever. Each routing has been seen before anything is held. */
  int hold = i >= (kind == EP_TRANSFER_ALL_TO_ALL ? EP_LAYER_ROUTINGS : 1u);
  countBytes(s, i % s->bench->routings);
  if (epPortSync(port) || epPortBarrier(port) || (hold && (epPortHold(port) || epMeetQueue(port))) ||
      epPortMark(port, 0) || epTransferQueue(&s->transfer, kind, s->send, s->receive) || epPortMark(port, 1) ||
      (hold && epPortRelease(port)) || epPortSync(port))
    return -1;
  return i >= o->warmup && epBenchKeepMarks(port, s->transferRow[kind]) ? -1 : 0;
}

static int openSide(side *s, epPort *port, epBench *bench) {
  s->bench = bench;
  s->port = port;
  s->send = calloc((size_t)port->ranks, sizeof(*s->send));
  s->receive = calloc((size_t)port->ranks, sizeof(*s->receive));
  if (!s->send || !s->receive) return epToolFail("out of host memory");
  return epLayerOpen(port, &bench->layer, &s->layer) || epBenchBegin(bench, s->layer) ||
                 epTransferOpen(s->layer, &s->transfer)
             ? -1
             : 0;
}

/* The reason is the machine's, the same for all cases: told once. */
static void tellMissing(epBenchResult *result, epTransferKind kind, const char *why) {
  size_t used = strlen(result->skipped);
  if (!strstr(result->skipped, epTransferName(kind)))
    snprintf(result->skipped + used, sizeof(result->skipped) - used, "# %s: not measured: %s\n", epTransferName(kind),
             why);
}

/* In the order in which they are printed. */
static void makeRows(side *s) {
  epBenchResult *result = s->bench->result;
  unsigned ops = s->bench->options->ops;
  s->dispatchRow = ops & EP_OP_DISPATCH ? epBenchRowFor(s->bench, s->layer, "dispatch") : NULL;
  s->combineRow = ops & EP_OP_COMBINE ? epBenchRowFor(s->bench, s->layer, "combine") : NULL;
  for (int k = 0; k < EP_TRANSFERS && !s->port->rank; k++) {
    const epBenchRow *like = s->dispatchRow ? s->dispatchRow : s->combineRow;
    if (*s->transfer.missing[k]) {
      tellMissing(result, (epTransferKind)k, s->transfer.missing[k]);
      continue;
    }
    s->transferRow[k] = epBenchRowOf(result, s->bench->label, epTransferName((epTransferKind)k), 0);
    if (s->transferRow[k] && like) s->transferRow[k]->algBytes = s->transferRow[k]->busBytes = like->busBytes;
  }
}

static int iterate(side *s, unsigned i) {
  unsigned ops = s->bench->options->ops;
  for (int k = 0; k < EP_TRANSFERS; k++)
    if (!*s->transfer.missing[k] && timeTransfer(s, (epTransferKind)k, i)) return -1;
  if ((ops & EP_OP_DISPATCH) &&
      epBenchTimeOnce(s->bench, s->layer, s->dispatchRow, EP_PART_UPDATE | EP_PART_DISPATCH, i))
    return -1;
  return (ops & EP_OP_COMBINE) && epBenchTimeOnce(s->bench, s->layer, s->combineRow, EP_PART_COMBINE, i) ? -1 : 0;
}

static int keepClocks(epPort *port, epBenchResult *result, const epClocks *mine) {
  epClocks *all = calloc((size_t)port->ranks, sizeof(*all));
  if (!all) return epToolFail("out of host memory");
  if (epPortGather(port, mine, all, sizeof(*mine)) || port->rank) {
    free(all);
    return port->rank ? 0 : -1;
  }
  free(result->clocks);
  result->clocks = all;
  return 0;
}

int epBenchCompare(epPort *port, void *context) {
  epBenchComparison *c = context;
  const epBenchOptions *o = c->cases[0].options;
  side *sides = calloc(c->count, sizeof(*sides));
  epClocks clocks;
  int rc = 0;
  if (!sides) return epToolFail("out of host memory");
  memset(&clocks, 0, sizeof(clocks));
  if (!port->cuda) snprintf(clocks.missing, sizeof(clocks.missing), "the emulated fabric has none");
  for (unsigned i = 0; i < c->count && !rc; i++) {
    rc = openSide(&sides[i], port, &c->cases[i]);
    if (!rc) makeRows(&sides[i]);
  }
  if (!rc) rc = epMeetReady(port);
  for (unsigned i = 0; i < o->warmup + o->iters && !rc; i++) {
    for (unsigned s = 0; s < c->count && !rc; s++) rc = iterate(&sides[s], i);
    if (port->cuda && i >= o->warmup && i % CLOCK_EVERY == 0) epClocksRead(port->bus, &clocks);
  }
  for (unsigned s = 0; s < c->count && !rc; s++) rc = epBenchSettled(sides[s].bench, sides[s].layer);
  if (!rc) rc = keepClocks(port, c->cases[0].result, &clocks);
  for (unsigned s = 0; s < c->count; s++) {
    if (rc) epPortAbort(port);
    epTransferClose(&sides[s].transfer);
    if (sides[s].layer) rc |= epBenchEnd(sides[s].layer, rc);
    free(sides[s].send);
    free(sides[s].receive);
  }
  free(sides);
  return rc ? -1 : 0;
}

int epBenchCurve(epPort *port, void *context) {
  epBench *bench = context;
  const epBenchOptions *o = bench->options;
  int rc = 0;
  for (unsigned p = 0; p < o->curveCount && !rc; p++) {
    epLayerConfig config = bench->layer;
    epLayer *layer = NULL;
    epBenchRow *row;
    config.sms = o->curve[p];
    rc = epLayerOpen(port, &config, &layer);
    if (rc) break;
    rc = epBenchBegin(bench, layer);
    if (!rc && (o->ops & EP_OP_DISPATCH)) {
      row = epBenchRowFor(bench, layer, "dispatch");
      for (unsigned i = 0; i < o->warmup + o->iters && !rc; i++)
        rc = epBenchTimeOnce(bench, layer, row, EP_PART_UPDATE | EP_PART_DISPATCH, i);
    }
    if (!rc && (o->ops & EP_OP_COMBINE)) {
      row = epBenchRowFor(bench, layer, "combine");
      for (unsigned i = 0; i < o->warmup + o->iters && !rc; i++)
        rc = epBenchTimeOnce(bench, layer, row, EP_PART_COMBINE, i);
    }
    if (!rc) rc = epBenchSettled(bench, layer);
    rc = epBenchEnd(layer, rc);
  }
  return rc ? -1 : 0;
}
