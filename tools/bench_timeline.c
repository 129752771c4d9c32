/* A profile drawn over time: as events for Chrome's trace viewer, and the last layer as a picture. Ranks' clocks are brought together
 * by what they showed when all ranks met. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "bench_profile.h"
#include "failure.h"

#define PATH_ROOM 1024

/* Begin of an operation by rank 0's clock. */
static double beginUs(const epProfiledRank *r, const epProfiledOp *o, double origin) {
  return 1e-3 * (double)((long long)o->op.start_ns - r->clockNs) - origin;
}

static double tookUs(const epProfiledOp *o) { return 1e-3 * (double)(o->op.end_ns - o->op.start_ns); }

/* A wait is drawn up to where the first of its kind ended: that one is about the longest. */
static void waitSpan(const ncclEpProfileWait_t *w, double *from, double *to) {
  *to = 1e-3 * w->first_ns;
  *from = *to - 1e-3 * w->longest_ns;
  if (*from < 0) *from = 0;
}

static double originOf(const epProfiledRank *ranks, unsigned count, unsigned firstOp) {
  double origin = 0;
  int found = 0;
  for (unsigned r = 0; r < count; r++)
    if (firstOp < ranks[r].count) {
      double at = beginUs(&ranks[r], &ranks[r].ops[firstOp], 0);
      if (!found || at < origin) origin = at;
      found = 1;
    }
  return origin;
}

/* ---- Chrome's trace ----------------------------------------------------------------------------------------------- */

enum { LANE_OPERATION = 0, LANE_SPANS, LANE_WAITS = LANE_SPANS + NCCL_EP_SPANS, LANES };
static const char *const laneNames[] = {"operation", "record", "send", "receive", "waits"};

static void event(json_t *all, const char *name, unsigned rank, int lane, double ts, double us) {
  json_array_append_new(all, json_pack("{s:s, s:s, s:i, s:i, s:f, s:f}", "name", name, "ph", "X", "pid", (int)rank,
                                       "tid", lane, "ts", ts, "dur", us));
}

static void label(json_t *all, const char *what, unsigned rank, int lane, const char *name) {
  json_array_append_new(all, json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", what, "ph", "M", "pid", (int)rank,
                                       "tid", lane, "args", "name", name));
}

static void eventsOf(json_t *all, const epProfiledRank *r, unsigned rank, double origin) {
  char text[96];
  for (unsigned i = 0; i < r->count; i++) {
    const epProfiledOp *o = &r->ops[i];
    double at = beginUs(r, o, origin), from, to;
    snprintf(text, sizeof(text), "%s %u", epProfileKindNames[o->op.kind], o->op.number);
    event(all, text, rank, LANE_OPERATION, at, tookUs(o));
    for (int s = 0; s < NCCL_EP_SPANS; s++)
      if (o->op.span_end_ns[s])
        event(all, epProfileSpanNames[s], rank, LANE_SPANS + s, at + 1e-3 * o->op.span_start_ns[s],
              1e-3 * (o->op.span_end_ns[s] - o->op.span_start_ns[s]));
    for (unsigned w = 0; w < o->waitCount; w++) {
      waitSpan(&o->waits[w], &from, &to);
      snprintf(text, sizeof(text), "for rank %d: %s", o->waits[w].rank, o->waits[w].phase);
      event(all, text, rank, LANE_WAITS, at + from, to - from);
    }
  }
}

static int writeTrace(const epProfiledRank *ranks, unsigned count, const char *path) {
  json_t *all = json_array(), *root;
  double origin = originOf(ranks, count, 0);
  int rc;
  for (unsigned r = 0; r < count; r++) {
    char name[32];
    snprintf(name, sizeof(name), "rank %u", r);
    label(all, "process_name", r, 0, name);
    for (int lane = 0; lane < LANES; lane++) label(all, "thread_name", r, lane, laneNames[lane]);
    eventsOf(all, &ranks[r], r, origin);
  }
  root = json_pack("{s:o, s:s}", "traceEvents", all, "displayTimeUnit", "ns");
  if (!root) return epToolFail("--profile %s: cannot build the document", path);
  rc = json_dump_file(root, path, JSON_INDENT(1));
  json_decref(root);
  return rc ? epToolFail("--profile %s: cannot write it", path) : 0;
}

/* ---- The picture -------------------------------------------------------------------------------------------------- */

#define WIDTH 960.0
#define LEFT 130.0
#define RIGHT 24.0
#define LANE 20.0
#define TOP 56.0
#define GAP 16.0

static const char *const colours[] = {"#9aa3ad", "#b07cd8", "#2f6fde", "#1b9e77", "#d8503c"};

static void bar(FILE *out, double x, double y, double width, const char *colour, const char *text) {
  fprintf(out, "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='%s'><title>%s</title></rect>\n", x, y,
          width < 1 ? 1 : width, LANE - 4, colour, text);
}

/* From operation `first` on, of all ranks. */
static void drawRanks(FILE *out, const epProfiledRank *ranks, unsigned count, unsigned first, double origin,
                      double scale) {
  for (unsigned r = 0; r < count; r++) {
    double y = TOP + r * (LANES * LANE + GAP);
    char text[128];
    fprintf(out, "<text x='12' y='%.1f' font-weight='600'>rank %u</text>\n", y + 13, r);
    for (int lane = 1; lane < LANES; lane++)
      fprintf(out, "<text x='%.1f' y='%.1f' text-anchor='end'>%s</text>\n", LEFT - 8, y + lane * LANE + 13,
              laneNames[lane]);
    for (unsigned i = first; i < ranks[r].count; i++) {
      const epProfiledOp *o = &ranks[r].ops[i];
      double at = beginUs(&ranks[r], o, origin), from, to;
      snprintf(text, sizeof(text), "%s %u: %.1f us", epProfileKindNames[o->op.kind], o->op.number, tookUs(o));
      bar(out, LEFT + at * scale, y, tookUs(o) * scale, colours[LANE_OPERATION], text);
      fprintf(out, "<text x='%.1f' y='%.1f' fill='white'>%s</text>\n", LEFT + at * scale + 4, y + 12,
              epProfileKindNames[o->op.kind]);
      for (int s = 0; s < NCCL_EP_SPANS; s++) {
        from = 1e-3 * o->op.span_start_ns[s], to = 1e-3 * o->op.span_end_ns[s];
        if (!o->op.span_end_ns[s]) continue;
        snprintf(text, sizeof(text), "%s: %.1f to %.1f us", epProfileSpanNames[s], from, to);
        bar(out, LEFT + (at + from) * scale, y + (LANE_SPANS + s) * LANE, (to - from) * scale, colours[LANE_SPANS + s],
            text);
      }
      for (unsigned w = o->waitCount; w-- > 0;) {
        waitSpan(&o->waits[w], &from, &to);
        snprintf(text, sizeof(text), "for rank %d in %s: longest %.1f us", o->waits[w].rank, o->waits[w].phase,
                 1e-3 * o->waits[w].longest_ns);
        bar(out, LEFT + (at + from) * scale, y + LANE_WAITS * LANE, (to - from) * scale, colours[LANE_WAITS], text);
      }
    }
  }
}

static int writePicture(const epProfiledRank *ranks, unsigned count, const char *path) {
  FILE *out = fopen(path, "w");
  unsigned first = 0;
  double origin, end = 1, height = TOP + count * (LANES * LANE + GAP) + 24;
  int bad;
  if (!out) return epToolFail("--profile %s: cannot write it: %s", path, strerror(errno));
  for (unsigned i = 0; i < ranks[0].count; i++) /* the last layer begins with its update or its dispatch */
    if (ranks[0].ops[i].op.kind != NCCL_EP_PROFILE_COMBINE &&
        (i == 0 || ranks[0].ops[i - 1].op.kind == NCCL_EP_PROFILE_COMBINE))
      first = i;
  origin = originOf(ranks, count, first);
  for (unsigned r = 0; r < count; r++)
    for (unsigned i = first; i < ranks[r].count; i++) {
      double at = beginUs(&ranks[r], &ranks[r].ops[i], origin) + tookUs(&ranks[r].ops[i]);
      end = at > end ? at : end;
    }
  fprintf(out,
          "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %.0f %.0f' width='%.0f' height='%.0f'>\n"
          "<style>text{font:12px system-ui,sans-serif;fill:#222}</style>\n<rect width='100%%' height='100%%' "
          "fill='white'/>\n<text x='12' y='24' style='font-size:16px;font-weight:600'>The last layer: blocks of each "
          "kind, and waits for other ranks</text>\n",
          WIDTH, height, WIDTH, height);
  drawRanks(out, ranks, count, first, origin, (WIDTH - LEFT - RIGHT) / end);
  for (int i = 0; i <= 4; i++)
    fprintf(out, "<text x='%.1f' y='%.1f' text-anchor='middle'>%.0f us</text>\n", LEFT + (WIDTH - LEFT - RIGHT) * i / 4,
            height - 8, end * i / 4);
  fputs("</svg>\n", out);
  bad = ferror(out);
  return fclose(out) || bad ? epToolFail("--profile %s: cannot write it: %s", path, strerror(errno)) : 0;
}

int epTimelineWrite(const epProfiledRank *ranks, unsigned count, const char *base) {
  char path[PATH_ROOM];
  if ((size_t)snprintf(path, sizeof(path), "%s.json", base) >= sizeof(path))
    return epToolFail("--profile %.64s...: expected a shorter name", base);
  if (writeTrace(ranks, count, path)) return -1;
  snprintf(path, sizeof(path), "%s.svg", base);
  return writePicture(ranks, count, path);
}
