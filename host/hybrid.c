/* What a group of several scale-up domains has that a plain one has not: its layouts, the network of its window, kernels of
 * its own behind the plain ones' identifiers, and their launch sizes. */
#include "hybrid.h"

#include <stdlib.h>
#include <string.h>

#include "env.h"
#include "fail.h"
#include "hybrid_ll_layout.h"
#include "links_find.h"
#include "low_latency.h"

/* Equal on all ranks: signals and tails are by channel. A channel is a warp; the sum of a few of its rows in flight must
 * cover the trip over the scale-out link. On the emulated fabric more only cost time. */
#define EP_CHANNELS 64u
#define EP_EMU_CHANNELS 4u
#define EP_CONTEXTS 4u
#define EP_EMU_CONTEXTS 2u
/* NCCL's proxy takes an operation of a context and peer at a turn, and each costs its thread microseconds: many contexts, and
 * large puts. Where GPUs drive the NIC a row goes as soon as it is there. */
#define EP_PROXY_CONTEXTS 32u
#define EP_PROXY_PUT_ROWS 16u
#define EP_EMU_PUT_ROWS 2u
#define EP_MOST_PUT_ROWS 64u
/* In low latency a channel is a block, which takes one chunk at a time: a power of two, so that blocks can divide them. */
#define EP_LL_CHANNELS 64u
#define EP_HYBRID_WARPS 8u
#define EP_EMU_HYBRID_WARPS 2u

/* Experts of a token that the links are summed for: groups that leave top-k open are sized for many more. */
#define EP_USUAL_TOPK 8u

static uint32_t epChannels(const epTopology *t) {
  if (!t->arch) return EP_EMU_CHANNELS;
  return t->plan.sendBlocks ? t->plan.sendBlocks * EP_HYBRID_WARPS : EP_CHANNELS;
}
static uint32_t epContextsFor(const epTopology *t, uint32_t channels) {
  uint32_t contexts = t->plan.contexts;
  if (!contexts) contexts = !t->arch ? EP_EMU_CONTEXTS : t->ginProxy ? EP_PROXY_CONTEXTS : EP_CONTEXTS;
  return contexts < channels ? contexts : channels; /* a context more would serve no channel */
}
static uint32_t epContexts(const epTopology *t) { return epContextsFor(t, epChannels(t)); }

uint32_t epLlChannels(const epTopology *t) { return t->arch ? EP_LL_CHANNELS : EP_EMU_CHANNELS; }

static uint32_t epPutRows(const epTopology *t) {
  uint64_t wanted = t->ginProxy ? EP_PROXY_PUT_ROWS : t->arch ? 1 : EP_EMU_PUT_ROWS;
  uint32_t rows = 1;
  (void)epEnvNumber(EP_ENV_PUT_ROWS, 1, EP_MOST_PUT_ROWS, &wanted);
  while (rows * 2 <= wanted) rows *= 2;
  return rows;
}

/* From the links, unless the caller has said how many queue pairs he wants. */
static epLinkPlan epPlanOf(const epTopology *t, const epLinks *links, const epShape *s, uint32_t queuePairs) {
  uint32_t topk = s->topk < EP_USUAL_TOPK ? s->topk : EP_USUAL_TOPK;
  /* FP8 rows are half as long as the widest, which are BF16 then, and should run at full rate as well. */
  epLinkPlan plan = epLinkPlanOf(links, (uint32_t)t->scaleOutRanks, (uint32_t)t->scaleUpRanks, s->experts, topk,
                                 (s->maxRowBytes + 1) / 2, EP_HYBRID_WARPS);
  if (queuePairs) plan.contexts = queuePairs;
  return plan;
}

ncclResult_t epHybridPlan(const char *call, struct ncclEpGroup *g) {
  struct {
    epLinks links;
    uint64_t queuePairs, putRows;
  } mine = {{0, 0}, g->config.num_qp_per_rank, epPutRows(&g->topology)}, *all = calloc(g->shape.ranks, sizeof *all);
  epTopology *t = &g->topology;
  char from[160] = "not those of a GPU";
  ncclResult_t r;
  if (!all) return epFail(ncclSystemError, "%s: out of host memory", call);
  if (t->arch && !epIsLl(g)) mine.links = epLinksFind(&t->pci, from, sizeof from);
  r = g->be->ops->allGather(g->be, &mine, all, sizeof mine);
  for (uint32_t i = 0; r == ncclSuccess && i < g->shape.ranks; i++) {
    if (all[i].queuePairs != all[0].queuePairs)
      r = epFail(ncclInvalidArgument, "%s: num_qp_per_rank differs between ranks: %llu on rank 0, %llu on rank %u",
                 call, (unsigned long long)all[0].queuePairs, (unsigned long long)all[i].queuePairs, i);
    if (all[i].links.nvlinkGbs < mine.links.nvlinkGbs) mine.links.nvlinkGbs = all[i].links.nvlinkGbs;
    if (all[i].links.nicGbs < mine.links.nicGbs) mine.links.nicGbs = all[i].links.nicGbs;
    if (all[i].putRows < mine.putRows) mine.putRows = all[i].putRows;
  }
  free(all);
  if (r != ncclSuccess) return r;
  if (epIsLl(g)) { /* latency is all: as many SMs as have work, and nothing to sum from the links */
    t->plan.contexts = g->config.num_qp_per_rank;
    return ncclSuccess;
  }
  g->hybrid.layout.putRows = (uint32_t)mine.putRows;
  t->plan = epPlanOf(t, &mine.links, &g->shape, g->config.num_qp_per_rank);
  if (t->plan.sms && !g->config.max_num_sms) g->sms = epPolicySms(t, t->plan.sms);
  epLog(EP_LOG_INFO,
        "group %p: links here: %s; slowest: %.0f and %.1f GB/s: %s: %u channels, %u queue pairs a peer, %u rows a put",
        (void *)g, from, mine.links.nvlinkGbs, mine.links.nicGbs,
        t->plan.sms ? "launches fit them" : "not all known, so defaults", epChannels(t), epContexts(t),
        g->hybrid.layout.putRows);
  return ncclSuccess;
}

int epIsHybrid(const struct ncclEpGroup *g) { return g->topology.scaleOutRanks > 1; }

void epHybridLayouts(struct ncclEpGroup *g) {
  uint64_t end = g->scratchLayout.bytes;
  uint32_t ups = (uint32_t)g->topology.scaleUpRanks, channels = epLlChannels(&g->topology);
  if (epIsLl(g)) {
    epLlHybridLayoutOf(g->shape, ups, channels, epContextsFor(&g->topology, channels), &g->windowLayout,
                       &g->hybrid.layout);
    g->hybrid.layout.state = epTake(&end, epLlToldBytes((uint32_t)g->topology.scaleOutRanks, channels));
    g->scratchLayout.bytes = end;
    return;
  }
  epHybridLayoutOf(g->shape, ups, epChannels(&g->topology), epContexts(&g->topology), g->config.enable_mask,
                   &g->windowLayout, &g->hybrid.layout);
  epHybridScratchOf(&end, &g->hybrid.layout);
  g->scratchLayout.bytes = end;
}

/* With masks the first window has those of their words, too. */
static uint32_t epMaskSignals(uint32_t domains, int masks) { return masks ? EP_RAIL_KINDS * domains : 0; }

uint32_t epHybridSignals(const struct ncclEpGroup *g, unsigned slot) {
  uint32_t domains = (uint32_t)g->topology.scaleOutRanks, channels = g->hybrid.layout.channels;
  return (epIsLl(g) ? epLlSignalCount(domains, channels) : epSignalCount(domains, channels)) +
         epMaskSignals(domains, g->config.enable_mask && !slot);
}

ncclResult_t epHybridQueuePairs(const char *call, const struct ncclEpGroup *g, unsigned asked, uint32_t *contexts) {
  uint32_t most = g->hybrid.layout.contexts;
  *contexts = 0;
  if (!epIsHybrid(g) || !asked) return ncclSuccess;
  if (asked > most)
    return epFail(ncclInvalidArgument, "%s: ext_config.num_qps is %u: expected at most the group's, %u", call, asked,
                  most);
  if (g->config.enable_mask && asked != most)
    return epFail(ncclInvalidUsage,
                  "%s: ext_config.num_qps is %u: expected 0 or %u: fewer in a group with masks are not supported yet",
                  call, asked, most);
  *contexts = asked;
  return ncclSuccess;
}

ncclResult_t epHybridConnect(struct ncclEpGroup *g, epWindow *window, unsigned slot, epGin *out) {
  const epHybridLayout *l = &g->hybrid.layout;
  epGroupState *state = (epGroupState *)((uint8_t *)g->scratch + epSlotState(slot));
  return g->be->ops->ginCreate(g->be, window, l->contexts, epHybridSignals(g, slot), &state->aborted, out);
}

size_t epHybridRecordBytes(const struct ncclEpGroup *g, uint32_t topk) {
  const epShape *s = &g->shape;
  uint64_t plain = epRecordLayoutOf(s->ranks, s->experts, topk, s->maxTokens).bytes;
  return (size_t)epHybridRecordOf(plain, (uint32_t)g->topology.scaleOutRanks, topk, s->maxTokens).bytes;
}

int epHybridKernel(int id, const epConfig *config) {
  if (!config->scaleUp || id == EP_KERNEL_LL_UPDATE) return id; /* that one is local */
  if (id == EP_KERNEL_MASK) return EP_KERNEL_HYBRID_MASK;
  return id < EP_KERNEL_LL_UPDATE ? id + EP_KERNEL_HYBRID_UPDATE
                                  : id - EP_KERNEL_LL_DISPATCH + EP_KERNEL_HYBRID_LL_DISPATCH;
}

ncclResult_t epLaunchKernel(struct ncclEpGroup *g, const epHybridGroup *hybrid, epKernel *kernel,
                            const epLaunch *launch, cudaStream_t stream) {
  union {
    epHybridUpdateArgs update;
    epHybridDispatchArgs dispatch;
    epHybridCombineArgs combine;
    epHybridLlDispatchArgs llDispatch;
    epHybridLlCombineArgs llCombine;
    uint8_t bytes[1];
  } args;
  epLaunch wide = *launch;
  if (!epIsHybrid(g)) return g->be->ops->launch(g->be, kernel, launch, stream);
  if (launch->argBytes + sizeof *hybrid > sizeof args)
    return epFail(ncclInternalError, "arguments of %zu bytes: a hybrid kernel has at most %zu", launch->argBytes,
                  sizeof args - sizeof *hybrid);
  memcpy(args.bytes, launch->args, launch->argBytes);
  memcpy(args.bytes + launch->argBytes, hybrid, sizeof *hybrid);
  wide.args = &args;
  wide.argBytes = launch->argBytes + sizeof *hybrid;
  return g->be->ops->launch(g->be, kernel, &wide, stream);
}

/* Dispatch: a warp for each channel sends, one block forwards. Combine: a warp for each channel forwards, the others push and
 * reduce, half of them each where the links have not told more. All roles have a block at least; none waits for a later one. */
ncclResult_t epPolicyHybridMove(const epTopology *t, unsigned sms, int kernelId, epConfig *config, epGrid *grid) {
  unsigned channels, blocks;
  config->scaleUp = (uint32_t)t->scaleUpRanks;
  config->bulk = 0; /* rows go by plain loads and stores, which a few SMs' links cannot tell from bulk copies */
  config->stageBytes = 0;
  config->threads = 32 * (t->arch ? EP_HYBRID_WARPS : EP_EMU_HYBRID_WARPS);
  channels = epChannelBlocks(epChannels(t), config->threads);
  blocks = sms < channels + 2 ? channels + 2 : sms;
  grid->threads = config->threads;
  grid->smemBytes = epHybridMoveSmem(config);
  grid->blocks = blocks;
  grid->forwardBlocks = 0;
  grid->pushBlocks = kernelId == EP_KERNEL_DISPATCH ? channels : epLinkPushers(&t->plan, blocks - channels);
  return ncclSuccess;
}

ncclResult_t epHybridLlBufferSize(const epTopology *topology, const epShape *shape, int masks,
                                  ncclEpBufferSize_t *sizes) {
  epTopology here = *topology;
  uint32_t domains = (uint32_t)here.scaleOutRanks, channels = epLlChannels(&here);
  uint64_t queuePairs = 0, near = sizes->window_bytes;
  epWindowLayout w;
  epHybridLayout h;
  here.plan.contexts = epEnvNumber(EP_ENV_NUM_QPS, 1, UINT32_MAX, &queuePairs) ? (uint32_t)queuePairs : 0;
  epLlHybridLayoutOf(*shape, (uint32_t)here.scaleUpRanks, channels, epContextsFor(&here, channels), &w, &h);
  sizes->window_bytes = w.bytes;
  sizes->count_bytes += h.outMeta - near;
  sizes->metadata_bytes += h.rail - h.outMeta;
  sizes->staging_bytes += w.bytes - h.rail;
  sizes->handle_bytes = epHybridRecordOf(sizes->handle_bytes, domains, shape->topk, shape->maxTokens).bytes;
  sizes->scratch_bytes = epAlignUp(sizes->scratch_bytes + epLlToldBytes(domains, channels), EP_SECTION_ALIGN);
  sizes->gin_contexts = h.contexts;
  sizes->gin_signals = epLlSignalCount(domains, channels) + epMaskSignals(domains, masks);
  sizes->queue_pairs = h.contexts * (domains - 1);
  return epLlWindowCheck("ncclEpCalculateBufferSize", shape, w.bytes);
}

void epHybridBufferSize(const epTopology *topology, const epShape *shape, int masks, ncclEpBufferSize_t *sizes) {
  epTopology here = *topology, *t = &here;
  uint32_t domains = (uint32_t)t->scaleOutRanks;
  epLinks links = {0, 0};
  uint64_t queuePairs = 0;
  uint64_t scratch = epScratchLayoutOf(shape->ranks, shape->experts).bytes;
  epWindowLayout w;
  epHybridLayout h;
  if (t->arch) links = epLinksFind(&t->pci, NULL, 0);
  if (!epEnvNumber(EP_ENV_NUM_QPS, 1, UINT32_MAX, &queuePairs)) queuePairs = 0;
  here.plan = epPlanOf(t, &links, shape, (uint32_t)queuePairs);
  epHybridLayoutOf(*shape, (uint32_t)t->scaleUpRanks, epChannels(t), epContexts(t), masks != 0, &w, &h);
  sizes->window_bytes = w.bytes;
  sizes->count_bytes = h.railTails - w.counts;
  sizes->flag_bytes = w.meta - h.railTails;
  sizes->metadata_bytes = w.stage - w.meta;
  sizes->staging_bytes = w.bytes - w.stage;
  sizes->handle_bytes =
      epHybridRecordOf(epRecordLayoutOf(shape->ranks, shape->experts, shape->topk, shape->maxTokens).bytes, domains,
                       shape->topk, shape->maxTokens)
          .bytes;
  epHybridScratchOf(&scratch, &h);
  sizes->scratch_bytes = scratch;
  sizes->gin_contexts = h.contexts;
  sizes->gin_signals = epSignalCount(domains, h.channels) + epMaskSignals(domains, masks);
  sizes->queue_pairs = h.contexts * (domains - 1);
}
