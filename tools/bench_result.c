/* Printing of ep_bench's findings. Bandwidths are defined in the header that is printed above them, so that a pasted
 * table explains itself. */
#include "bench_result.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"

epBenchRow *epBenchRowOf(epBenchResult *result, const char *label, const char *name, unsigned sms) {
  epBenchRow *row;
  for (unsigned i = 0; i < result->rowCount; i++) {
    row = &result->rows[i];
    if (!strcmp(row->label, label) && !strcmp(row->name, name) && row->sms == sms) return row;
  }
  if (result->rowCount == EP_BENCH_ROWS) return NULL;
  row = &result->rows[result->rowCount++];
  *row = (epBenchRow){.name = name, .sms = sms, .errors = -1u};
  snprintf(row->label, sizeof(row->label), "%s", label);
  return row;
}

const epBenchRow *epBenchPartner(const epBenchResult *result, const epBenchRow *row, const char *name) {
  for (unsigned i = 0; i < result->rowCount; i++)
    if (!strcmp(result->rows[i].name, name) && !strcmp(result->rows[i].label, row->label)) return &result->rows[i];
  return NULL;
}

int epBenchAddSample(epBenchRow *row, double microseconds) {
  if (row->count == row->room) {
    unsigned room = row->room * 2 + 16;
    double *more = realloc(row->samples, room * sizeof(*more));
    if (!more) return epToolFail("out of host memory");
    row->samples = more;
    row->room = room;
  }
  row->samples[row->count++] = microseconds;
  return 0;
}

void epBenchResultFree(epBenchResult *result) {
  for (unsigned i = 0; i < result->rowCount; i++) free(result->rows[i].samples);
  free(result->ranks);
  free(result->clocks);
}

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

epBenchSummary epBenchSummarise(const epBenchRow *row) {
  epBenchSummary s = {0, 0, 0, 0, 0};
  double *sorted = row->count ? malloc(row->count * sizeof(*sorted)) : NULL;
  unsigned n = row->count;
  if (!sorted) return s;
  memcpy(sorted, row->samples, n * sizeof(*sorted));
  qsort(sorted, n, sizeof(*sorted), ascending);
  s.median = n % 2 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
  s.low = sorted[0];
  s.high = sorted[n - 1];
  s.p10 = sorted[n / 10];
  s.p90 = sorted[n - 1 - n / 10];
  free(sorted);
  return s;
}

/* bytes / us = MB/s; / 1000 = GB/s */
double epBenchBandwidth(double bytes, double microseconds) {
  return microseconds > 0 ? bytes / microseconds * 1e-3 : 0;
}

void epBenchVersion(char *out, size_t size) {
  int version = 0;
  if (ncclEpGetVersion(&version) != ncclSuccess) version = 0;
  snprintf(out, size, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

const char *epBenchSmsText(const epBenchOptions *o) {
  return o->curveCount               ? "a curve"
         : o->sms == NCCL_EP_SMS_FEW ? "few"
         : o->sms == NCCL_EP_SMS_ALL ? "all"
         : o->sms                    ? "a limit"
                                     : "the library's choice";
}

int epBenchSms(const ncclEpGroupProperties_t *p, epRefLayout layout, int combine) {
  if (layout == EP_REF_EXPERT_MAJOR)
    return combine ? p->num_sms_combine_expert_major : p->num_sms_dispatch_expert_major;
  return combine ? p->num_sms_combine : p->num_sms_dispatch;
}

static const char *scalesName(const epBenchOptions *o) {
  return o->scales == EP_SCALES_FP32 ? "fp32" : o->scales == EP_SCALES_UE8M0 ? "ue8m0" : "none";
}

double epBenchLink(const epBenchResult *result, const epBenchRow *row) {
  static const char *const names[] = {"link-copy-engine", "link-sm-stores"};
  double best = 0;
  for (int i = 0; i < 2; i++) {
    const epBenchRow *limit = epBenchPartner(result, row, names[i]);
    double value = limit ? epBenchBandwidth(limit->busBytes, epBenchSummarise(limit).median) : 0;
    best = value > best ? value : best;
  }
  return best;
}

/* ---- Text ------------------------------------------------------------------------------------------------------- */

void epBenchPrintHeader(const epBenchResult *r) {
  const epBenchOptions *o = r->options;
  char version[32], align[32] = "", budget[32] = "eager";
  epBenchVersion(version, sizeof(version));
  if (o->layout == EP_REF_EXPERT_MAJOR) snprintf(align, sizeof(align), " align %u", o->align);
  if (r->budget) snprintf(budget, sizeof(budget), "%llu rows", (unsigned long long)r->budget);
  printf("# ep_bench: NCCL EP %s (API %d)%s, backend %s\n", version, NCCL_EP_API_VERSION, r->versions,
         r->cuda ? "cuda" : "emu");
  printf("# command: %s\n", o->command);
  for (uint32_t i = 0; i < o->ranks; i++)
    if (r->cuda)
      printf("# rank %3d pid %7ld on %s %s\n", r->ranks[i].rank, r->ranks[i].pid, r->ranks[i].host, r->ranks[i].name);
  printf("# ranks: %u = %d scale-out x %d scale-up%s\n", o->ranks, r->properties.scale_out_ranks,
         r->properties.scale_up_ranks, r->cuda ? "" : ", emulated");
  if (!o->compare)
    printf("# SMs: %s: update %d, dispatch %d, combine %d%s\n", epBenchSmsText(o), r->properties.num_sms_update,
           epBenchSms(&r->properties, o->layout, 0), epBenchSms(&r->properties, o->layout, 1),
           o->curveCount ? " at the first point" : "");
  if (r->properties.hybrid)
    printf("# network of a rank: %u contexts, %u signals, %u queue pairs\n", r->properties.gin_contexts,
           r->properties.gin_signals, r->properties.queue_pairs);
  printf("# layer: ");
  if (!o->compare) printf("tokens %s %s%s ", o->tokensText, epBenchLayoutName(o->layout), align);
  printf("hidden %u topk %u experts %u %s index %s, routing %s", o->hidden, o->topk, o->experts, epRefTypeName(o->type),
         o->index32 ? "int32" : "int64", o->routingText);
  if (r->scaleBytes)
    printf(", %s scales of %u bytes a row in %s", scalesName(o), r->scaleBytes, o->scaleColumns ? "columns" : "rows");
  if (o->noZeroPad) printf(", padding left alone");
  if (o->windowOut) printf(", output tokens in a window");
  if (o->single) printf(", single reduction");
  if (o->masks) printf(", masks");
  if (o->bias) printf(", bias %d", o->bias);
  if (o->queuePairs) printf(", %d queue pairs a peer", o->queuePairs);
  if (o->staged) printf(", staged%s", o->staged == 2 ? " (sent on the group's stream)" : "");
  if (o->type == EP_REF_E4M3) printf(", combine bf16");
  if (o->nvfp4) printf(", combine's rows as nvfp4");
  if (o->route.minusOne > 0) printf(" (%g of the entries -1)", o->route.minusOne);
  printf(", seed %llu, %d routings\n", o->seed, r->routings);
  if (o->compare)
    printf("# cases are measured in turn, iteration by iteration: their transfers, then their operations\n");
  else
    printf("# memory of a rank: window %zu (counts %zu, metadata %zu, flags %zu, staging %zu), handle %zu, scratch %zu "
           "bytes; output %s\n",
           r->properties.window_bytes, r->sizes.count_bytes, r->sizes.metadata_bytes, r->sizes.flag_bytes,
           r->sizes.staging_bytes, r->sizes.handle_bytes, r->sizes.scratch_bytes, budget);
  if (o->graph) printf("# graphs: what is checked and timed is replays, of one graph for each routing\n");
  if (r->cuda)
    printf("# time: CUDA events on the stream; new routing each iteration, ranks start together, the largest of the "
           "ranks; "
           "median of %u iterations after %u\n",
           o->iters, o->warmup);
  else
    printf("# time: the host's, for %u emulated ranks on this machine: says nothing about GPUs; %u schedules\n",
           o->ranks, o->schedules);
  if (o->hostTime)
    printf("# host-prepare: ncclEpPrepare, cold or from the disk cache; host-update, host-dispatch, host-combine: from "
           "call "
           "to return on the host, stream idle before and the thread busy\n");
  printf("# dispatch includes the update of the routing (topk_idx %s); combine is the call alone\n",
         o->noFused ? "copied by a launch of its own: --no-fused"
                    : "borrowed: no launch of its own where it can be fused");
  printf("# algbytes: rows (with their scales) that a rank receives (a token once a rank, with --single-reduction "
         "combine's once a slot), its own included; busbytes: "
         "rows that cross its "
         "link, the "
         "larger direction; both the largest of the ranks; bandwidth = bytes / median time\n");
  fflush(stdout);
}

static void printErrors(const epBenchRow *row) {
  if (row->errors == -1u)
    printf(" %8s\n", "N/A");
  else
    printf(" %8u\n", row->errors);
}

static void printPlain(const epBenchResult *r) {
  printf("#\n# %-18s %14s %14s %10s %10s %10s %9s %9s %8s\n", "operation", "algbytes", "busbytes", "median", "min",
         "max", "algbw", "busbw", "errors");
  printf("# %-18s %14s %14s %10s %10s %10s %9s %9s\n", "", "(B)", "(B)", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)");
  for (unsigned i = 0; i < r->rowCount; i++) {
    const epBenchRow *row = &r->rows[i];
    epBenchSummary s = epBenchSummarise(row);
    printf("  %-18s %14.0f %14.0f", row->name, row->algBytes, row->busBytes);
    if (row->count)
      printf(" %10.*f %10.*f %10.*f", row->host ? 2 : 1, s.median, row->host ? 2 : 1, s.low, row->host ? 2 : 1, s.high);
    if (row->count && !row->host)
      printf(" %9.2f %9.2f", epBenchBandwidth(row->algBytes, s.median), epBenchBandwidth(row->busBytes, s.median));
    else if (row->count)
      printf(" %9s %9s", "-", "-");
    else
      printf(" %10s %10s %10s %9s %9s", "-", "-", "-", "-", "-");
    printErrors(row);
  }
}

/* A number with its unit, or what stands for none. */
static void printOr(int there, double value, const char *unit) {
  if (there)
    printf(" %8.*f%s", *unit == '%' ? 0 : 2, value, unit);
  else
    printf(" %8s ", "-");
}

/* Beside each operation: its share of the faster link limit, and how much faster than NCCL's all-to-all it is. */
static void printCompared(const epBenchResult *r) {
  printf("#\n# %-22s %-17s %4s %13s %9s %9s %9s %9s %9s %9s %9s %8s\n", "case", "operation", "SMs", "busbytes",
         "median", "p10", "p90", "min", "busbw", "of link", "all-to-all", "errors");
  printf("# %-22s %-17s %4s %13s %9s %9s %9s %9s %9s\n", "", "", "", "(B)", "(us)", "(us)", "(us)", "(us)", "(GB/s)");
  for (unsigned i = 0; i < r->rowCount; i++) {
    const epBenchRow *row = &r->rows[i];
    epBenchSummary s = epBenchSummarise(row);
    double own = epBenchBandwidth(row->busBytes, s.median), link = epBenchLink(r, row);
    const epBenchRow *other = epBenchPartner(r, row, "nccl-all-to-all");
    char sms[12] = "";
    if (row->sms) snprintf(sms, sizeof(sms), "%u", row->sms);
    printf("  %-22s %-17s %4s %13.0f %9.1f %9.1f %9.1f %9.1f %9.2f", row->label, row->name, sms, row->busBytes,
           s.median, s.p10, s.p90, s.low, own);
    printOr(link > 0 && own > 0, link > 0 ? 100 * own / link : 0, "%");
    printOr(other && other->count && s.median > 0, other ? epBenchSummarise(other).median / s.median : 0, "x");
    printErrors(row);
  }
}

static void printClocks(const epBenchResult *r) {
  for (uint32_t i = 0; r->clocks && i < r->options->ranks; i++) {
    const epClocks *c = &r->clocks[i];
    if (*c->missing)
      printf("# clocks of rank %u: not recorded: %s\n", i, c->missing);
    else
      printf("# clocks of rank %u: SM %u to %u MHz (at most %u), memory %u MHz; driver %s\n", i, c->smLow, c->smHigh,
             c->smMax, c->memory, c->driver);
  }
}

void epBenchPrintRows(const epBenchResult *r) {
  int compared = 0;
  for (unsigned i = 0; i < r->rowCount; i++) compared |= *r->rows[i].label || r->rows[i].sms;
  if (compared)
    printCompared(r);
  else
    printPlain(r);
  fputs(r->skipped, stdout);
  printClocks(r);
  printf("# errors: %u%s%s\n", epToolFailures(), epToolFailures() ? ", the first: " : "", epToolFirstFailure());
  fflush(stdout);
}

/* ---- JSON ------------------------------------------------------------------------------------------------------- */

static json_t *jsonRows(const epBenchResult *r) {
  json_t *rows = json_array();
  for (unsigned i = 0; i < r->rowCount; i++) {
    const epBenchRow *row = &r->rows[i];
    epBenchSummary s = epBenchSummarise(row);
    json_t *samples = json_array();
    for (unsigned j = 0; j < row->count; j++) json_array_append_new(samples, json_real(row->samples[j]));
    json_array_append_new(
        rows, json_pack("{s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:o}", "case", row->label,
                        "operation", row->name, "sms", (int)row->sms, "alg_bytes", row->algBytes, "bus_bytes",
                        row->busBytes, "median_us", s.median, "min_us", s.low, "max_us", s.high, "p10_us", s.p10,
                        "p90_us", s.p90, "algbw_gbps", epBenchBandwidth(row->algBytes, s.median), "busbw_gbps",
                        epBenchBandwidth(row->busBytes, s.median), "errors",
                        row->errors == -1u ? json_null() : json_integer(row->errors), "samples_us", samples));
  }
  return rows;
}

static json_t *jsonConfig(const epBenchResult *r) {
  const epBenchOptions *o = r->options;
  return json_pack(
      "{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:f, s:I, s:i, s:i, s:i, s:i, s:b, s:b, s:I, s:i, s:s, "
      "s:s, s:i, s:b, s:b, s:b, s:b, s:b, s:b, s:b, s:b, s:i, s:i, s:b, s:s}",
      "backend", r->cuda ? "cuda" : "emu", "layout", epBenchLayoutName(o->layout), "dtype", epRefTypeName(o->type),
      "tokens", o->tokensText, "max_tokens", (int)o->maxTokens, "hidden", (int)o->hidden, "topk", (int)o->topk,
      "experts", (int)o->experts, "align", (int)o->align, "index", o->index32 ? "int32" : "int64", "routing",
      o->routingText, "minus_one", o->route.minusOne, "seed", (json_int_t)o->seed, "schedules", (int)o->schedules,
      "sms",
      o->sms < NCCL_EP_SMS_FEW    ? (int)o->sms
      : o->sms == NCCL_EP_SMS_FEW ? -2
                                  : -1,
      "warmup", (int)o->warmup, "iters", (int)o->iters, "check", o->check, "backward", o->backward, "budget_rows",
      (json_int_t)r->budget, "routings", r->routings, "scales", scalesName(o), "scale_layout",
      o->scaleColumns ? "column" : "row", "scale_bytes", (int)r->scaleBytes, "zero_pad", !o->noZeroPad, "no_bulk",
      o->fabric.emuNoBulk != 0, "graph", o->graph, "fused", !o->noFused, "host_time", o->hostTime, "window_out",
      o->windowOut, "single_reduction", o->single, "masks", o->masks, "bias", o->bias, "num_qps", o->queuePairs,
      "staged", o->staged != 0, "combine_quant", o->nvfp4 ? "nvfp4" : "none");
}

static json_t *jsonGroup(const epBenchResult *r) {
  const ncclEpGroupProperties_t *p = &r->properties;
  return json_pack("{s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f}", "scale_out_ranks",
                   p->scale_out_ranks, "scale_up_ranks", p->scale_up_ranks, "sms_update", p->num_sms_update,
                   "sms_dispatch", epBenchSms(p, r->options->layout, 0), "sms_combine",
                   epBenchSms(p, r->options->layout, 1), "window_bytes", (json_int_t)p->window_bytes, "count_bytes",
                   (json_int_t)r->sizes.count_bytes, "metadata_bytes", (json_int_t)r->sizes.metadata_bytes,
                   "flag_bytes", (json_int_t)r->sizes.flag_bytes, "staging_bytes", (json_int_t)r->sizes.staging_bytes,
                   "handle_bytes", (json_int_t)r->sizes.handle_bytes, "scratch_bytes", (json_int_t)p->scratch_bytes,
                   "output_rows", r->outputRows);
}

static json_t *jsonClocks(const epBenchResult *r) {
  json_t *all = json_array();
  for (uint32_t i = 0; r->clocks && i < r->options->ranks; i++) {
    const epClocks *c = &r->clocks[i];
    json_array_append_new(all, *c->missing ? json_pack("{s:s}", "missing", c->missing)
                                           : json_pack("{s:i, s:i, s:i, s:i, s:s}", "sm_low_mhz", (int)c->smLow,
                                                       "sm_high_mhz", (int)c->smHigh, "sm_max_mhz", (int)c->smMax,
                                                       "memory_mhz", (int)c->memory, "driver", c->driver));
  }
  return all;
}

int epBenchWriteJson(const epBenchResult *r, const char *path) {
  char version[32];
  json_t *ranks = json_array(), *root;
  int rc;
  epBenchVersion(version, sizeof(version));
  for (uint32_t i = 0; i < r->options->ranks; i++)
    json_array_append_new(ranks,
                          json_pack("{s:i, s:I, s:s, s:s}", "rank", r->ranks[i].rank, "pid",
                                    (json_int_t)r->ranks[i].pid, "host", r->ranks[i].host, "device", r->ranks[i].name));
  root = json_pack("{s:s, s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:s, s:i, s:s}", "nccl_ep", version, "versions",
                   r->versions, "command", r->options->command, "config", jsonConfig(r), "group", jsonGroup(r), "ranks",
                   ranks, "results", jsonRows(r), "clocks", jsonClocks(r), "skipped", r->skipped, "errors",
                   (int)epToolFailures(), "first_error", epToolFirstFailure());
  if (!root) return epToolFail("--json %s: cannot build the document", path);
  rc = json_dump_file(root, path, JSON_INDENT(2));
  json_decref(root);
  return rc ? epToolFail("--json %s: cannot write it", path) : 0;
}
