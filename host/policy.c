/* Launch sizes, and why they are so. */
#include "policy.h"

#include "fail.h"
#include "hybrid.h"

/* Sending: 8 SMs of plain stores already reach 96 % of the link that all SMs reach; with bulk copies 24 beside the
 * epilogue were as good as 32 and better than 8 and 16 (push + expand 202 to 233 us at T = 4096). Combine's senders of
 * flat rows read one row and write one; a few more keep the link busy while the epilogue reduces. In expert-major they
 * read several slots for each row they send, so two thirds of the blocks send (T = 4096: 66 of 132 224 us, 88 211 us, 108
 * 237 us); those that are done help to reduce. */
#define EP_PUSH_BLOCKS_DISPATCH 28u
/* Of few blocks, in flat, 3 of 8: T rows are sent and 2T copied (16 SMs, T = 8192: 5, 6, 8 and 10 senders 637, 575, 722 and 935 us; 18 SMs,
 * T = 4096: 7 senders 274 us). */
#define EP_PUSH_SHARE_FLAT(blocks) ((blocks) > 4 ? ((blocks)*3 + 4) / 8 : (blocks) / 2)
/* In expert-major the epilogue writes each row several times and is the longer part, 2.4 us of an SM for 0.7 of a sender's; short rows
 * need more senders. */
#define EP_PUSH_BLOCKS_DISPATCH_MAJOR 16u
#define EP_LONG_ROW 8192u
#define EP_PUSH_BLOCKS_COMBINE_FLAT 28u
/* Into the peers' outputs senders store all rows, this rank's own too, and the epilogue is left with weights, indices, scales
 * and what comes staged: an eighth of the blocks, two at least so that one can be routing and one waiting. */
#define EP_PUSH_BLOCKS_DIRECT 28u
/* With all SMs staging is as fast (T = 4096 and 8192: 185 and 347 us for 189 and 350), with 16 slower (699 for 508). */
#define EP_DIRECT_MOST_SMS 64u
#define EP_DIRECT_RECEIVERS(blocks) ((blocks) / 8 > 2 ? (blocks) / 8 : 2)

/* Warps of a block that moves rows, beside the signaller: 8 with two stages of a whole row each were faster than 16 or
 * 24 with smaller stages (combine from expert-major, T = 4096: 267, 293 and 338 us). */
#define EP_MOVE_WARPS 8u
#define EP_UPDATE_THREADS 512u
/* Few large blocks: each reads the histograms of all before it, so more blocks cost more than they save. 128 tokens are
 * 8 a warp. */
#define EP_UPDATE_TOKENS_A_BLOCK 128u
#define EP_FUSED_TOKENS_A_BLOCK 64u /* inside a dispatch, whose blocks have half as many warps */
/* Fewer blocks of receivers are slower at the record than all blocks in a launch of its own (16 SMs, T = 8192: 762 and 699 us). */
#define EP_FUSED_RECEIVERS 16u
#define EP_EMU_UPDATE_TOKENS_A_BLOCK 8u /* there blocks are for meeting each other */
/* On the emulated fabric a thread is a fiber: two warps a block are what its checks need, more cost only time. */
#define EP_EMU_WARPS 2u

static unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

unsigned epPolicySms(const epTopology *topology, unsigned limit) {
  unsigned all = topology->numSms > 0 ? (unsigned)topology->numSms : 1;
  return limit ? least(limit, all) : all;
}

ncclResult_t epPolicyUpdate(const epTopology *topology, unsigned sms, uint32_t tokens, epConfig *config, epGrid *grid) {
  unsigned warps = topology->arch ? EP_UPDATE_THREADS / 32 : EP_EMU_WARPS;
  config->bulk = 0; /* update moves no rows */
  config->scaleUp = topology->scaleOutRanks > 1 ? (uint32_t)topology->scaleUpRanks : 0;
  /* Each warp has a histogram of all experts and ranks in shared memory. */
  for (config->threads = warps * 32; warps > 1 && epUpdateSmem(config) > (uint32_t)topology->smemPerBlock; warps--)
    config->threads = (warps - 1) * 32;
  if (epUpdateSmem(config) > (uint32_t)topology->smemPerBlock)
    return epFail(ncclInvalidUsage,
                  "update: histograms of %u experts and %u ranks take %u bytes: a block of this device has %d",
                  config->experts, config->ranks, epUpdateSmem(config), topology->smemPerBlock);
  grid->threads = config->threads;
  grid->smemBytes = epUpdateSmem(config);
  grid->pushBlocks = grid->forwardBlocks = 0;
  /* The grid waits for itself, so all of it must be resident: at most one block an SM. */
  uint32_t each = topology->arch ? EP_UPDATE_TOKENS_A_BLOCK : EP_EMU_UPDATE_TOKENS_A_BLOCK;
  grid->blocks = least(least(EP_MAX_UPDATE_BLOCKS, sms), (tokens + each - 1) / each);
  if (grid->blocks == 0) grid->blocks = 1;
  return ncclSuccess;
}

int epPolicyDirectPays(const epTopology *topology, unsigned sms) {
  return !topology->arch || sms <= EP_DIRECT_MOST_SMS;
}

unsigned epPolicyFusedBlocks(const epTopology *topology, const epGrid *grid, uint32_t tokens) {
  uint32_t each = topology->arch ? EP_FUSED_TOKENS_A_BLOCK : EP_EMU_UPDATE_TOKENS_A_BLOCK;
  unsigned blocks = least(least(EP_MAX_UPDATE_BLOCKS, grid->blocks - grid->pushBlocks), (tokens + each - 1) / each);
  return blocks ? blocks : 1;
}

static unsigned epPushBlocks(int kernelId, const epConfig *config, unsigned blocks) {
  unsigned half = blocks / 2, few = blocks > 4 ? blocks * 3 / 11 : half;
  int major = config->layout != EP_LAYOUT_KIND_FLAT && config->rowBytes >= EP_LONG_ROW;
  if (kernelId == EP_KERNEL_DISPATCH && config->direct && blocks > 2 * EP_DIRECT_RECEIVERS(blocks))
    return least(EP_PUSH_BLOCKS_DIRECT, blocks - EP_DIRECT_RECEIVERS(blocks));
  if (kernelId == EP_KERNEL_DISPATCH)
    return config->layout == EP_LAYOUT_KIND_FLAT ? least(EP_PUSH_BLOCKS_DISPATCH, EP_PUSH_SHARE_FLAT(blocks))
           : major                               ? least(EP_PUSH_BLOCKS_DISPATCH_MAJOR, few)
                                                 : least(EP_PUSH_BLOCKS_DISPATCH, few);
  return config->layout == EP_LAYOUT_KIND_FLAT ? least(EP_PUSH_BLOCKS_COMBINE_FLAT, half) : blocks * 2 / 3;
}

ncclResult_t epPolicyMove(const char *call, const epTopology *topology, unsigned sms, int kernelId, epConfig *config,
                          epGrid *grid) {
  uint32_t smem = (uint32_t)topology->smemPerBlock, warps;
  if (topology->scaleOutRanks > 1) return epPolicyHybridMove(topology, sms, kernelId, config, grid);
  config->bulk = topology->bulkCopies != 0;
  warps = epMovePlan(kernelId, config, smem, topology->arch ? EP_MOVE_WARPS : EP_EMU_WARPS);
  if (!warps && config->bulk) { /* two such rows do not fit: plain copies need no room, and any row passes */
    config->bulk = 0;
    warps = epMovePlan(kernelId, config, smem, topology->arch ? EP_MOVE_WARPS : EP_EMU_WARPS);
  }
  if (!warps)
    return epFail(ncclInvalidArgument,
                  "%s: a row of %u bytes takes %u bytes of shared memory: a block of this device has %u", call,
                  config->rowBytes, epMoveSmem(config), smem);
  if (config->fused && epUpdateSmem(config) > smem) config->fused = config->indexBytes = 0;
  config->direct = config->direct && config->bulk; /* only they are stored into the peers' outputs */
  grid->threads = config->threads;
  grid->smemBytes = epMoveSmem(config);
  grid->blocks = sms;
  grid->pushBlocks = grid->forwardBlocks = 0;
  if (config->ranks > 1) { /* one rank sends nothing */
    /* A sender and a receiver at least, also with a limit of one SM. Senders come first in the grid and never wait for
     * the epilogue, so they need not be resident together. */
    if (grid->blocks < 2) grid->blocks = 2;
    grid->pushBlocks = epPushBlocks(kernelId, config, grid->blocks);
  }
  if (topology->arch && grid->blocks - grid->pushBlocks < EP_FUSED_RECEIVERS) config->fused = config->indexBytes = 0;
  return ncclSuccess;
}
