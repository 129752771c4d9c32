/* ep_bench --model: from the options to the model's shape, and its answer in a table. */
#include "bench_model.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "failure.h"
#include "hybrid_layout.h"
#include "model.h"

typedef struct answer {
  const epBenchOptions *options;
  epModelMachine machine;
  epModelShape shape;
  epModelLaunch launch;
  epModelTraffic traffic;
  epModelTime dispatch, combine;
  double updateUs;
  uint64_t window;
} answer;

static uint64_t windowBytes(const epModelShape *s, uint32_t maxTokens, uint32_t rowBytes, const epModelLaunch *l) {
  epShape shape = {.ranks = s->scaleOut * s->scaleUp,
                   .experts = s->experts,
                   .topk = s->topk,
                   .maxTokens = maxTokens,
                   .stageRows = maxTokens,
                   .maxRowBytes = rowBytes};
  epWindowLayout w = epWindowLayoutOf(shape);
  epHybridLayout h;
  if (s->scaleOut > 1) epHybridLayoutOf(shape, s->scaleUp, l->channels, l->contexts, 0, &w, &h);
  return w.bytes;
}

static void printHead(const answer *a) {
  const epBenchOptions *o = a->options;
  const epModelTraffic *t = &a->traffic;
  printf("# predicted, not measured: %s\n# simulated traffic; no rank was run. ", a->machine.name);
  if (t->counted < t->tokens)
    printf("Sampled: %llu of %llu tokens were routed, rows scaled to all of them\n", (unsigned long long)t->counted,
           (unsigned long long)t->tokens);
  else
    printf("All %llu tokens were routed, rows counted one by one\n", (unsigned long long)t->tokens);
  printf("# %u x %u ranks, tokens %s, hidden %u topk %u experts %u %s, routing %s, %s: rows of %u and %u bytes\n",
         a->shape.scaleOut, a->shape.scaleUp, o->tokensText, o->hidden, o->topk, o->experts, epRefTypeName(o->type),
         o->routingText, epBenchLayoutName(o->layout), a->shape.dispatchBytes, a->shape.combineBytes);
  printf("# %u SMs (%u send), %u channels, %u queue pairs a peer, %s; window of a rank %.2f GB%s\n", a->launch.sms,
         a->launch.sendBlocks, a->launch.channels, a->launch.contexts,
         a->launch.fitted ? "as the links want" : "the library's defaults", (double)a->window / 1e9,
         (double)a->window > a->machine.hbmGb * 1e9 ? ": more than a GPU has; times are of batches that are split"
                                                    : "");
  if (t->ranks > EP_MAX_RANKS)
    printf("# %u ranks are the model's alone: the library takes %u\n", t->ranks, EP_MAX_RANKS);
  printf("%-9s %9s %12s %7s %9s %10s %10s   busy share of the time:", "", "us", "busiest link", "rank", "MB", "domains",
         "ranks");
  for (int l = 0; l < EP_MODEL_LINKS; l++) printf("%s %s", l ? "," : "", epModelLinkName(l));
  printf("\n");
}

static void printTime(const char *name, const epModelTime *t) {
  const epModelLink *b = &t->link[t->busiest];
  printf("%-9s %9.1f %12s %7u %9.1f %5.1f GB/s %5.1f GB/s  ", name, t->us, epModelLinkName(t->busiest), b->rank,
         b->bytes / 1e6, t->scaleOutGbs, t->scaleUpGbs);
  for (int l = 0; l < EP_MODEL_LINKS; l++) printf(" %3.0f %%", 100 * t->link[l].us / t->us);
  printf("\n");
}

static json_t *timeJson(const epModelTime *t) {
  json_t *links = json_object();
  for (int l = 0; l < EP_MODEL_LINKS; l++)
    json_object_set_new(
        links, epModelLinkName(l),
        json_pack("{s:f, s:f, s:i}", "us", t->link[l].us, "bytes", t->link[l].bytes, "rank", (int)t->link[l].rank));
  return json_pack("{s:f, s:s, s:f, s:f, s:o}", "us", t->us, "busiest", epModelLinkName(t->busiest), "scale_out_gbs",
                   t->scaleOutGbs, "scale_up_gbs", t->scaleUpGbs, "links", links);
}

static int writeJson(const answer *a) {
  const epBenchOptions *o = a->options;
  json_t *root = json_pack(
      "{s:s, s:s, s:s, s:b, s:I, s:I, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:f}", "command", o->command, "model",
      o->modelPath, "machine", a->machine.name, "predicted", 1, "tokens", (json_int_t)a->traffic.tokens,
      "tokens_counted", (json_int_t)a->traffic.counted, "scale_out_ranks", (int)a->shape.scaleOut, "scale_up_ranks",
      (int)a->shape.scaleUp, "dispatch_row_bytes", (int)a->shape.dispatchBytes, "combine_row_bytes",
      (int)a->shape.combineBytes, "sms", (int)a->launch.sms, "send_blocks", (int)a->launch.sendBlocks,
      "queue_pairs_a_peer", (int)a->launch.contexts, "window_bytes", (json_int_t)a->window, "update_us", a->updateUs);
  int rc = -1;
  if (root && (o->ops & EP_OP_DISPATCH)) rc = json_object_set_new(root, "dispatch", timeJson(&a->dispatch));
  if (root && (o->ops & EP_OP_COMBINE)) rc = json_object_set_new(root, "combine", timeJson(&a->combine));
  if (!rc) rc = json_dump_file(root, o->jsonPath, JSON_INDENT(2));
  json_decref(root);
  return rc ? epToolFail("--json %s: cannot write it", o->jsonPath) : 0;
}

int epBenchModel(const epBenchOptions *o) {
  epLayerConfig layer = {.hidden = o->hidden,
                         .topk = o->topk,
                         .type = o->type,
                         .combineType = o->type == EP_REF_E4M3 ? EP_REF_BF16 : o->type,
                         .scales = o->scales};
  answer a = {.options = o};
  uint32_t weights = epWeightBytes(o->topk), combineRow = (uint32_t)epLayerCombineRowBytes(&layer), widest;
  int rc = -1;
  if (epModelRead(o->modelPath, &a.machine)) return -1;
  if (o->fabric.scaleOut > 1 && !(a.machine.nicGbs > 0))
    return epToolFail("--model %s: the machine has no NIC: expected --topology 1xU, not %ux%u", o->modelPath,
                      o->fabric.scaleOut, o->fabric.scaleUp);
  a.shape = (epModelShape){.scaleOut = o->fabric.scaleOut,
                           .scaleUp = o->fabric.scaleUp,
                           .experts = o->experts,
                           .topk = o->topk,
                           .dispatchBytes = (uint32_t)(epLayerRowBytes(&layer) + epLayerScaleBytes(&layer)) + weights,
                           .combineBytes = combineRow,
                           .outputRows = o->layout == EP_REF_EXPERT_MAJOR};
  widest = a.shape.dispatchBytes > combineRow + weights ? a.shape.dispatchBytes - weights : combineRow;
  a.launch = epModelLaunchOf(&a.machine, &a.shape, o->sms);
  a.window = windowBytes(&a.shape, o->maxTokens, widest, &a.launch);
  if (epModelCount(&a.shape, &o->route, o->seed, &a.traffic)) return -1;
  if (epModelDispatch(&a.machine, &a.shape, &a.launch, &a.traffic, &a.dispatch) ||
      epModelCombine(&a.machine, &a.shape, &a.launch, &a.traffic, &a.combine)) {
    epToolFail("model: out of host memory");
    goto done;
  }
  a.updateUs = epModelUpdateUs(&a.machine, &a.shape, o->maxTokens);
  printHead(&a);
  printf("%-9s %9.1f   (routing, before dispatch)\n", "update", a.updateUs);
  if (o->ops & EP_OP_DISPATCH) printTime("dispatch", &a.dispatch);
  if (o->ops & EP_OP_COMBINE) printTime("combine", &a.combine);
  rc = o->jsonPath ? writeJson(&a) : 0;
done:
  epModelTrafficFree(&a.traffic);
  return rc;
}
