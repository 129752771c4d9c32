/* Launch sizes of the low-latency kernels, and why they are so. */
#include "fail.h"
#include "hybrid_ll_layout.h"
#include "low_latency.h"

/* A warp a strip of a row (3-D expert-major takes two at a time), and one more that greets: at T = 128 and a row of 14336 bytes on
 * two ranks 1024 to send and to take, 1024 to return and as many to reduce, so that with 132 SMs every warp has one. */
#define EP_LL_WARPS 16u
#define EP_LL_HYBRID_WARPS 12u /* across scale-up domains: calls to the network take registers that 16 do not leave */
/* SMs left alone there: what is put may be copied by kernels of the driver's, which find no place beside blocks that fill an SM, and a kernel
 * that waits for them would wait for ever. */
#define EP_LL_PROXY_SMS 4u
/* A sending block counts the decisions before its own tokens: two tokens a block spread the rows over the SMs. */
#define EP_LL_TOKENS_A_BLOCK 2u
/* Few items lie on as many SMs, up to this: one SM alone would store a token's eight slots in 1.5 us. */
#define EP_LL_SPREAD 16u
#define EP_LL_UPDATE_ENTRIES 2048u /* decisions a block of the update checks: one block at the sizes it is for */
#define EP_EMU_LL_WARPS 2u         /* there a thread is a fiber */

static unsigned clampTo(uint64_t v, unsigned low, unsigned high) {
  return v < low ? low : v > high ? high : (unsigned)v;
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Blocks for `items` and `spare` warps more, a warp each. */
static unsigned blocksOf(uint64_t items, unsigned spare, unsigned warps, unsigned most) {
  uint64_t needed = (items + spare + warps - 1) / warps, spread = items < EP_LL_SPREAD ? items : EP_LL_SPREAD;
  return clampTo(needed > spread ? needed : spread, 1, most);
}

/* The most blocks of at most `most` that divide the channels and have a chunk each. */
static unsigned channelBlocks(const epTopology *t, uint32_t chunks, unsigned most) {
  unsigned blocks = epLlChannels(t);
  while (blocks > 1 && (blocks > most || blocks / 2 >= chunks)) blocks /= 2;
  return blocks;
}

uint32_t epLlTokensABlock(uint32_t tokens, const epGrid *grid, uint32_t topk) {
  if (grid->forwardBlocks) return epLlChunkTokens(topk);
  return clampTo((tokens + grid->pushBlocks - 1) / grid->pushBlocks, 1, 32 / topk);
}

ncclResult_t epPolicyLl(const char *call, const epTopology *topology, unsigned sms, int kernelId, uint32_t tokens,
                        epConfig *c, epGrid *grid) {
  int hybrid = topology->scaleOutRanks > 1;
  unsigned warps = !topology->arch ? EP_EMU_LL_WARPS : hybrid ? EP_LL_HYBRID_WARPS : EP_LL_WARPS;
  unsigned most = (unsigned)topology->numSms, total = sms;
  uint64_t T = tokens ? tokens : 1;
  if (hybrid && topology->ginProxy && most > 2 * EP_LL_PROXY_SMS && total > most - EP_LL_PROXY_SMS)
    total = most - EP_LL_PROXY_SMS;
  if (total < 4) total = 4; /* each role has a block */
  uint32_t chunks = (tokens + epLlChunkTokens(c->topk) - 1) / epLlChunkTokens(c->topk);
  c->scaleUp = hybrid ? (uint32_t)topology->scaleUpRanks : 0;
  grid->forwardBlocks = 0;
  c->bulk = 0; /* a unit carries its generation: only ordinary stores write both at once */
  for (c->threads = warps * 32; warps > 1 && epLlSmem(kernelId, c) > (uint32_t)topology->smemPerBlock; warps--)
    c->threads = (warps - 1) * 32;
  if (epLlSmem(kernelId, c) > (uint32_t)topology->smemPerBlock)
    return epFail(ncclInvalidUsage, "%s: %u experts and %u ranks take %u bytes of shared memory: a block has %d", call,
                  c->experts, c->ranks, epLlSmem(kernelId, c), topology->smemPerBlock);
  grid->threads = c->threads;
  grid->smemBytes = epLlSmem(kernelId, c);
  if (kernelId == EP_KERNEL_LL_UPDATE) {
    grid->pushBlocks = 0;
    grid->blocks = clampTo((T * c->topk + EP_LL_UPDATE_ENTRIES - 1) / EP_LL_UPDATE_ENTRIES, 1, total);
    return ncclSuccess;
  }
  if (kernelId == EP_KERNEL_LL_DISPATCH) { /* block 0 counts */
    uint64_t rows = T * least(c->layout == EP_LAYOUT_KIND_RANK_MAJOR ? c->ranks - 1 : c->ranks, c->topk);
    grid->pushBlocks = clampTo((T + EP_LL_TOKENS_A_BLOCK - 1) / EP_LL_TOKENS_A_BLOCK, 1, (total - 1) / 2);
    if (hybrid) { /* what the other domains' ranks send for this one: about as much as this rank for theirs */
      uint64_t far = T * least((uint32_t)topology->scaleOutRanks - 1, c->topk) *
                     epLlStrips(epLlTravels(c->rowBytes, c->scaleBytes));
      grid->pushBlocks = channelBlocks(topology, chunks, (total - 1) / 3);
      grid->forwardBlocks = blocksOf(far, 0, warps, (total - 1 - grid->pushBlocks) / 2);
    }
    grid->blocks = grid->pushBlocks + 1 + grid->forwardBlocks;
    grid->blocks +=
        blocksOf(rows * epLlPieces(epLlTravels(c->rowBytes, c->scaleBytes), c->layout), 1, warps, total - grid->blocks);
    return ncclSuccess;
  }
  /* 3-D: block 0 sends weights */
  uint64_t strips = epLlStrips(c->rowBytes), rows = T * least(c->ranks - 1, c->topk);
  unsigned before = c->layout == EP_LAYOUT_KIND_RANK_MAJOR ? 0 : 1;
  grid->pushBlocks = c->ranks > 1 ? before + blocksOf(rows * strips, 0, warps, (total - before) / (hybrid ? 3 : 2)) : 0;
  if (hybrid) grid->pushBlocks += grid->forwardBlocks = channelBlocks(topology, chunks, (total - before) / 3);
  grid->blocks = grid->pushBlocks + blocksOf(T * strips, 1, warps, total - grid->pushBlocks);
  return ncclSuccess;
}
