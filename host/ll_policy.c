/* Launch sizes of the low-latency kernels, and why they are so. */
#include "fail.h"
#include "low_latency.h"

/* A warp a piece of a row: at T = 128 and a row of 14336 bytes 640 pieces to send and 1280 to take, so that most warps have
 * one. Sixteen warps a block keep the grid, and with it the blocks that read all counts, small. */
#define EP_LL_WARPS 16u
/* A sending block scans the decisions before its own tokens: two tokens a block keep its warps busy and the scan short. */
#define EP_LL_TOKENS_A_BLOCK 2u
#define EP_LL_UPDATE_ENTRIES 2048u /* decisions a block of the update checks: one block at the sizes it is for */
#define EP_EMU_LL_WARPS 2u /* there a thread is a fiber */

static unsigned clampTo(uint64_t v, unsigned low, unsigned high) {
  return v < low ? low : v > high ? high : (unsigned)v;
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

ncclResult_t epPolicyLl(const char *call, const epTopology *topology, unsigned sms, int kernelId, uint32_t tokens,
                        epConfig *c, epGrid *grid) {
  unsigned warps = topology->arch ? EP_LL_WARPS : EP_EMU_LL_WARPS, total = sms < 2 ? 2 : sms;
  uint64_t T = tokens ? tokens : 1;
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
  if (kernelId == EP_KERNEL_LL_DISPATCH) { /* with one rank, too: heads go through the window */
    uint64_t rows = T * least(c->ranks, c->topk), pieces = epLlPieces(c->rowBytes);
    grid->pushBlocks = clampTo((T + EP_LL_TOKENS_A_BLOCK - 1) / EP_LL_TOKENS_A_BLOCK, 1, total / 2);
    grid->blocks = grid->pushBlocks + clampTo((rows * pieces + warps - 1) / warps, 1, total - grid->pushBlocks);
    return ncclSuccess;
  }
  uint64_t strips = epLlStrips(c->rowBytes), rows = T * least(c->ranks - 1, c->topk);
  grid->pushBlocks = c->ranks > 1 ? clampTo((rows * strips + warps - 1) / warps, 1, total / 2) : 0;
  grid->blocks = grid->pushBlocks + clampTo((T * strips + warps - 1) / warps, 1, total - grid->pushBlocks);
  return ncclSuccess;
}
