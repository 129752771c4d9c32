/* Traffic through the pipeline of dispatch and of combine. An operation is cut into as many steps as a channel sends chunks; in
 * each step a rank's stages carry an equal part of what they carry in all. A stage serves its steps in the order in
 * which they come, at its rate; a receiver's begins when the first sender's does and ends no earlier than the last. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hybrid_layout.h"
#include "links.h"
#include "model.h"

/* As the library's policy has them. */
#define EP_MODEL_WARPS 8u
#define EP_MODEL_CHANNELS 64u /* where the links are not known */
#define EP_MODEL_CONTEXTS 4u
#define EP_MODEL_PLAIN_SENDERS 28u
#define EP_MODEL_STEPS 128u

const char *epModelLinkName(int link) {
  static const char *const names[EP_MODEL_LINKS] = {"NIC out", "NIC in",  "NVLink out", "NVLink in",
                                                    "HBM",     "SM send", "SM copy"};
  return names[link];
}

epModelLaunch epModelLaunchOf(const epModelMachine *m, const epModelShape *s, unsigned limit) {
  epLinks links = {m->nvlinkGbs, m->nicGbs};
  uint32_t row = s->dispatchBytes < s->combineBytes ? s->dispatchBytes : s->combineBytes;
  epLinkPlan plan = epLinkPlanOf(&links, s->scaleOut, s->scaleUp, s->experts, s->topk, row, EP_MODEL_WARPS);
  epModelLaunch l = {m->sms, plan.sendBlocks, 0, 0, plan.contexts, plan.sms > 0};
  if (plan.sms && plan.sms < l.sms) l.sms = plan.sms;
  if (limit && limit < l.sms) l.sms = limit;
  if (!l.fitted) {
    l.sendBlocks = s->scaleOut > 1 ? EP_MODEL_CHANNELS / EP_MODEL_WARPS : EP_MODEL_PLAIN_SENDERS;
    l.contexts = s->scaleOut > 1 ? EP_MODEL_CONTEXTS : 0;
    if (s->scaleOut == 1 && l.sendBlocks > l.sms / 2) l.sendBlocks = l.sms > 1 ? l.sms / 2 : 1;
  }
  if (l.sms < l.sendBlocks + 2) l.sms = l.sendBlocks + 2;
  /* One domain: senders push. */
  l.pushBlocks = s->scaleOut > 1 ? epLinkPushers(&plan, l.sms - l.sendBlocks) : l.sendBlocks;
  l.channels = l.sendBlocks * EP_MODEL_WARPS;
  return l;
}

/* ---- Stages ----------------------------------------------------------------------------------------------------- */

typedef struct epPipe {
  const epModelMachine *machine;
  const epModelShape *shape;
  const epModelTraffic *traffic;
  epModelTime *time;
  uint32_t steps;
  double bytes; /* of a row */
  double *memory, *next;
} epPipe;

/* When each step of each rank begins and ends in a stage: [ranks][steps]. */
typedef struct stage {
  double *start, *end;
} stage;

#define EP_MODEL_STAGES 12u

static int openPipe(epPipe *p, const epModelMachine *m, const epModelShape *s, const epModelLaunch *l,
                    const epModelTraffic *t, uint32_t bytes, epModelTime *out) {
  double most = 1;
  memset(out, 0, sizeof(*out));
  for (uint32_t r = 0; r < t->ranks; r++) most = fmax(most, t->rank[r].tokens);
  most = ceil(most / (l->channels * (double)epChunkRows(bytes)));
  *p = (epPipe){.machine = m, .shape = s, .traffic = t, .time = out, .bytes = bytes};
  p->steps = most < EP_MODEL_STEPS ? (uint32_t)most : EP_MODEL_STEPS;
  p->memory = p->next = calloc((size_t)t->ranks * p->steps * 2 * EP_MODEL_STAGES + 1, sizeof(double));
  return p->memory ? 0 : -1;
}

static stage newStage(epPipe *p) {
  size_t each = (size_t)p->traffic->ranks * p->steps;
  stage made = {p->next, p->next + each};
  p->next += 2 * each;
  return made;
}

/* us that `rows` of rank r take at `gbs`; the busiest rank of each link is remembered. */
static double busy(epPipe *p, int link, uint32_t r, double rows, double gbs) {
  double bytes = rows * p->bytes, us = bytes / (gbs * 1e3);
  epModelLink *l = &p->time->link[link];
  if (us > l->us) *l = (epModelLink){us, bytes, r};
  return us;
}

/* One rank's stage: step k may begin at first[k] and has all of its bytes at last[k]. A link that waits
 * for a step's last bytes is free for the next one's first. */
static void serve(const epPipe *p, uint32_t r, stage *s, const double *first, const double *last, double us) {
  size_t at = (size_t)r * p->steps;
  double available = 0;
  for (uint32_t k = 0; k < p->steps; k++) {
    s->start[at + k] = fmax(available, first[k]);
    available = s->start[at + k] + us / p->steps;
    s->end[at + k] = fmax(available, last[k]);
  }
}

/* Two flows over one link, whichever is there first. */
static void serveTwo(const epPipe *p, uint32_t r, stage *a, const double *firstA, const double *lastA, double usA,
                     stage *b, const double *firstB, const double *lastB, double usB) {
  size_t at = (size_t)r * p->steps;
  double available = 0;
  for (uint32_t i = 0, j = 0; i < p->steps || j < p->steps;) {
    int isA = j == p->steps || (i < p->steps && firstA[i] <= firstB[j]);
    uint32_t k = isA ? i++ : j++;
    stage *s = isA ? a : b;
    s->start[at + k] = fmax(available, isA ? firstA[k] : firstB[k]);
    available = s->start[at + k] + (isA ? usA : usB) / p->steps;
    s->end[at + k] = fmax(available, isA ? lastA[k] : lastB[k]);
  }
}

/* What arrives at ranks that listen to each other: ranks first, first + stride, ..., `count` of them. The earliest start and
 * the latest end of their steps, `latency` later. */
static void arrive(const epPipe *p, const stage *from, uint32_t first, uint32_t stride, uint32_t count, double latency,
                   double *starts, double *ends) {
  for (uint32_t k = 0; k < p->steps; k++) starts[k] = INFINITY, ends[k] = 0;
  for (uint32_t i = 0; i < count; i++) {
    size_t at = (size_t)(first + i * stride) * p->steps;
    for (uint32_t k = 0; k < p->steps; k++) {
      starts[k] = fmin(starts[k], from->start[at + k] + latency);
      ends[k] = fmax(ends[k], from->end[at + k] + latency);
    }
  }
}

static double nicRate(const epModelMachine *m) {
  double nic = m->nicGbs * m->nicShare, pcie = m->pcieGbs * m->pcieShare;
  return pcie > 0 && pcie < nic ? pcie : nic;
}

static double nvlinkRate(const epModelMachine *m) { return m->nvlinkGbs * m->nvlinkShare; }

/* A stage of the NIC: `out` from `ready`, and `in` at each rank from its rail. Rows of rank r: rowsOut, rowsIn. */
static void network(epPipe *p, const stage *ready, size_t rowsOut, size_t rowsIn, stage *out, stage *in) {
  uint32_t ups = p->shape->scaleUp, domains = p->shape->scaleOut;
  double starts[EP_MODEL_STEPS], ends[EP_MODEL_STEPS], gbs = nicRate(p->machine);
  const epModelRank *rank = p->traffic->rank;
#define ROWS(r, field) (*(const double *)(const void *)((const char *)&rank[r] + (field)))
  for (uint32_t r = 0; r < p->traffic->ranks; r++)
    serve(p, r, out, ready->end + (size_t)r * p->steps, ready->end + (size_t)r * p->steps,
          busy(p, EP_MODEL_NIC_OUT, r, ROWS(r, rowsOut), gbs));
  for (uint32_t u = 0; u < ups; u++) {
    arrive(p, out, u, ups, domains, p->machine->nicUs, starts, ends);
    for (uint32_t r = u; r < p->traffic->ranks; r += ups)
      serve(p, r, in, starts, ends, busy(p, EP_MODEL_NIC_IN, r, ROWS(r, rowsIn), gbs));
  }
#undef ROWS
}

/* The end of all, and which link was busy longest. */
static void closePipe(epPipe *p, const stage *last) {
  epModelTime *t = p->time;
  uint32_t ranks = p->traffic->ranks;
  for (uint32_t r = 0; r < ranks; r++) t->us = fmax(t->us, last->end[(size_t)r * p->steps + p->steps - 1]);
  t->us = fmax(t->us, p->machine->launchUs + t->link[EP_MODEL_HBM].us);
  for (int l = 1; l < EP_MODEL_LINKS; l++)
    if (t->link[l].us > t->link[t->busiest].us) t->busiest = l;
  for (uint32_t r = 0; r < ranks && t->us > 0; r++) {
    double scale = p->bytes / (t->us * 1e3) / ranks;
    if (p->shape->scaleOut > 1) t->scaleOutGbs += p->traffic->rank[r].domains * scale;
    t->scaleUpGbs += p->traffic->rank[r].received * scale;
  }
  free(p->memory);
}

/* ---- Operations ------------------------------------------------------------------------------------------------- */

/* Kernels of one domain move rows in bulk. */
static double smRate(const epModelMachine *m, const epModelShape *s) {
  return s->scaleOut == 1 ? m->smGbs : fmin(m->smGbs, EP_MODEL_WARPS * EP_WARP_GBS);
}

static double outputRows(const epModelShape *s, const epModelRank *r) { return s->outputRows ? r->slots : r->received; }

int epModelDispatch(const epModelMachine *m, const epModelShape *s, const epModelLaunch *l, const epModelTraffic *t,
                    epModelTime *out) {
  double nearFirst[EP_MODEL_STEPS], nearLast[EP_MODEL_STEPS], farFirst[EP_MODEL_STEPS], farLast[EP_MODEL_STEPS];
  double hop = s->scaleUp > 1 ? m->nvlinkUs : 0, sm = smRate(m, s), sendGbs = sm * l->sendBlocks;
  double copyGbs = sm * (l->sms - l->sendBlocks - (s->scaleOut > 1)), hbm = m->hbmGbs * m->hbmShare;
  epPipe p;
  if (openPipe(&p, m, s, l, t, s->dispatchBytes, out)) return -1;
  stage send = newStage(&p), nicOut = newStage(&p), nicIn = newStage(&p), near = newStage(&p), far = newStage(&p);
  stage nearIn = newStage(&p), farIn = newStage(&p), copy = newStage(&p);
  for (uint32_t k = 0; k < p.steps; k++) farFirst[k] = farLast[k] = m->launchUs;
  for (uint32_t r = 0; r < t->ranks; r++) {
    const epModelRank *x = &t->rank[r];
    serve(&p, r, &send, farFirst, farLast, busy(&p, EP_MODEL_SM_SEND, r, x->staged + x->sentNear, sendGbs));
    /* Tokens and send section read, rail and stage written and read, output written. */
    busy(&p, EP_MODEL_HBM, r,
         x->tokens + x->staged + x->toRail + x->fromRail + x->forwarded + 2 * x->gotNear +
             (x->received - x->gotNear - x->gotFar) + outputRows(s, x),
         hbm);
  }
  if (s->scaleOut > 1)
    network(&p, &send, offsetof(epModelRank, toRail), offsetof(epModelRank, fromRail), &nicOut, &nicIn);
  for (uint32_t r = 0; r < t->ranks; r++) {
    size_t at = (size_t)r * p.steps;
    const epModelRank *x = &t->rank[r];
    busy(&p, EP_MODEL_NVLINK_OUT, r, x->sentNear + x->forwarded, nvlinkRate(m));
    /* The rail's rows are there for the domain one word later. */
    for (uint32_t k = 0; k < p.steps; k++) farFirst[k] = nicIn.end[at + k] + hop;
    serveTwo(&p, r, &near, send.start + at, send.end + at, x->sentNear * p.bytes / (nvlinkRate(m) * 1e3), &far,
             farFirst, farFirst, x->forwarded * p.bytes / (nvlinkRate(m) * 1e3));
  }
  for (uint32_t d = 0; d < s->scaleOut; d++) {
    arrive(&p, &near, d * s->scaleUp, 1, s->scaleUp, hop, nearFirst, nearLast);
    arrive(&p, &far, d * s->scaleUp, 1, s->scaleUp, hop, farFirst, farLast);
    for (uint32_t r = d * s->scaleUp; r < (d + 1) * s->scaleUp; r++) {
      size_t at = (size_t)r * p.steps;
      const epModelRank *x = &t->rank[r];
      double ready[EP_MODEL_STEPS];
      busy(&p, EP_MODEL_NVLINK_IN, r, x->gotNear + x->gotFar, nvlinkRate(m));
      serveTwo(&p, r, &nearIn, nearFirst, nearLast, x->gotNear * p.bytes / (nvlinkRate(m) * 1e3), &farIn, farFirst,
               farLast, x->gotFar * p.bytes / (nvlinkRate(m) * 1e3));
      for (uint32_t k = 0; k < p.steps; k++)
        ready[k] = fmax(fmax(nearIn.end[at + k], farIn.end[at + k]), nicIn.end[at + k]);
      serve(&p, r, &copy, ready, ready, busy(&p, EP_MODEL_SM_COPY, r, outputRows(s, x), copyGbs));
    }
  }
  closePipe(&p, &copy);
  return 0;
}

int epModelCombine(const epModelMachine *m, const epModelShape *s, const epModelLaunch *l, const epModelTraffic *t,
                   epModelTime *out) {
  double first[EP_MODEL_STEPS], last[EP_MODEL_STEPS], hop = s->scaleUp > 1 ? m->nvlinkUs : 0;
  double hbm = m->hbmGbs * m->hbmShare, sm = smRate(m, s), forwardGbs = sm * l->sendBlocks;
  double pushGbs = sm * l->pushBlocks;
  double reduceGbs = sm * (l->sms - l->pushBlocks - (s->scaleOut > 1 ? l->sendBlocks : 0));
  epPipe p;
  if (openPipe(&p, m, s, l, t, s->combineBytes, out)) return -1;
  stage pushed = newStage(&p), nvOut = newStage(&p), nvIn = newStage(&p), forward = newStage(&p);
  stage nicOut = newStage(&p), nicIn = newStage(&p), reduce = newStage(&p);
  for (uint32_t k = 0; k < p.steps; k++) first[k] = m->launchUs;
  for (uint32_t r = 0; r < t->ranks; r++) {
    const epModelRank *x = &t->rank[r];
    size_t at = (size_t)r * p.steps;
    double rows = x->gotNear + x->gotFar;
    serve(&p, r, &pushed, first, first, busy(&p, EP_MODEL_SM_COPY, r, x->received, pushGbs));
    serve(&p, r, &nvOut, pushed.start + at, pushed.end + at, busy(&p, EP_MODEL_NVLINK_OUT, r, rows, nvlinkRate(m)));
    /* Slots read; partial sums written and read, of others and my own; sums of domains written, sent, received, read. */
    busy(&p, EP_MODEL_HBM, r,
         outputRows(s, x) + 2 * (x->sentNear + x->forwarded) + 2 * (x->received - rows) + 2 * x->fromRail +
             2 * x->toRail + x->tokens,
         hbm);
  }
  for (uint32_t d = 0; d < s->scaleOut; d++) {
    arrive(&p, &nvOut, d * s->scaleUp, 1, s->scaleUp, hop, first, last);
    for (uint32_t r = d * s->scaleUp; r < (d + 1) * s->scaleUp; r++) {
      const epModelRank *x = &t->rank[r];
      size_t at = (size_t)r * p.steps;
      serve(&p, r, &nvIn, first, last, busy(&p, EP_MODEL_NVLINK_IN, r, x->sentNear + x->forwarded, nvlinkRate(m)));
      serve(&p, r, &forward, nvIn.end + at, nvIn.end + at, busy(&p, EP_MODEL_SM_SEND, r, x->fromRail, forwardGbs));
    }
  }
  if (s->scaleOut > 1)
    network(&p, &forward, offsetof(epModelRank, fromRail), offsetof(epModelRank, toRail), &nicOut, &nicIn);
  for (uint32_t r = 0; r < t->ranks; r++) {
    size_t at = (size_t)r * p.steps;
    for (uint32_t k = 0; k < p.steps; k++) first[k] = fmax(nvIn.end[at + k], nicIn.end[at + k]);
    serve(&p, r, &reduce, first, first, t->rank[r].tokens * p.bytes / (reduceGbs * 1e3));
  }
  closePipe(&p, &reduce);
  return 0;
}

double epModelUpdateUs(const epModelMachine *m, const epModelShape *s, uint32_t tokens) {
  double us = m->updateUs + m->updateTokenNs * tokens / 1e3;
  if (s->scaleOut == 1) return us;
  /* Counts and replies cross once more each; every domain gets all decisions, two words each. */
  us += 2 * m->nicUs + (double)tokens * 8 * s->topk * (s->scaleOut - 1) / (nicRate(m) * 1e3);
  return us;
}
