/* The sums: a block more than a link can use costs an SM that could compute; a block fewer idles the link. */
#include "links.h"

/* Blocks above the sum, so that a late one does not idle the link. */
#define EP_HEADROOM 1.25
/* Putting a row: a slot of the queue, its descriptor, the doorbell. Posts to one queue pair come one after the other, so a NIC
 * that takes a row every 0.15 us needs several. An assumption: it is to be measured on a NIC. */
#define EP_POST_SECONDS 1e-6
#define EP_ROW_POSTS 2 /* the row, and the signal that moves its channel's tail */
#define EP_MOST_CONTEXTS 16u
/* A reducer stores one row a token and reads several: that costs about one more. */
#define EP_REDUCE_ROWS 2.0

static uint32_t up(double x) {
  uint32_t n = (uint32_t)x;
  return n < x ? n + 1 : n;
}

/* Probability that none of topk distinct experts out of `experts` is among `some` of them. */
static double none(uint32_t experts, uint32_t some, uint32_t topk) {
  double p = 1;
  for (uint32_t k = 0; k < topk && p > 0; k++)
    p *= some + k >= experts ? 0 : (double)(experts - some - k) / (double)(experts - k);
  return p;
}

epLinkRows epLinkRowsOf(uint32_t scaleOut, uint32_t scaleUp, uint32_t experts, uint32_t topk) {
  uint32_t ranks = scaleOut * scaleUp;
  double rank = 1 - none(experts, experts / ranks, topk), domain = 1 - none(experts, experts / scaleOut, topk);
  epLinkRows r;
  r.domains = (scaleOut - 1) * domain;
  r.ranks = ranks * rank;
  r.nvlink = (ranks - scaleOut) * rank; /* to a rank of the token's own index it goes by the rail, or not at all */
  r.sent = (scaleUp - 1) * rank;
  if (scaleOut > 1) r.sent += 1 - none(experts, experts - experts / scaleOut, topk);
  return r;
}

epLinkPlan epLinkPlanOf(const epLinks *links, uint32_t scaleOut, uint32_t scaleUp, uint32_t experts, uint32_t topk,
                        uint32_t rowBytes, uint32_t warps) {
  epLinkPlan plan = {0, 0, 0, 0, 0, 0};
  epLinkRows r = epLinkRowsOf(scaleOut, scaleUp, experts, topk);
  double nic, nvlink, busiest, block = warps * EP_WARP_GBS, blocks, posts;
  uint32_t dispatch, combine;
  if (scaleOut < 2 || !(links->nicGbs > 0) || (scaleUp > 1 && !(links->nvlinkGbs > 0))) return plan;
  nic = r.domains / (EP_NIC_SHARE * links->nicGbs);
  nvlink = scaleUp > 1 ? r.nvlink / (EP_NVLINK_SHARE * links->nvlinkGbs) : 0;
  busiest = nic > nvlink ? nic : nvlink;
  if (!(busiest > 0)) return plan;
  plan.nicBound = nic >= nvlink;
  /* For each row that a role stores for a token: blocks that store it in the time that the busiest link takes for the token. */
  blocks = EP_HEADROOM / (busiest * (block < EP_SM_STORE_GBS ? block : EP_SM_STORE_GBS));
  plan.sendBlocks = up(blocks * (r.sent > r.domains ? r.sent : r.domains));
  plan.pushBlocks = up(blocks * r.ranks);
  plan.reduceBlocks = up(blocks * EP_REDUCE_ROWS);
  dispatch = plan.sendBlocks + 1 + up(blocks * r.ranks); /* one watches the tails, the others copy to the output */
  combine = plan.sendBlocks + plan.pushBlocks + plan.reduceBlocks;
  plan.sms = dispatch > combine ? dispatch : combine;
  posts = EP_ROW_POSTS * EP_NIC_SHARE * links->nicGbs * 1e9 / rowBytes * EP_POST_SECONDS;
  plan.contexts = up(posts / (scaleOut - 1));
  if (plan.contexts > EP_MOST_CONTEXTS) plan.contexts = EP_MOST_CONTEXTS;
  if (plan.contexts > plan.sendBlocks * warps) plan.contexts = plan.sendBlocks * warps;
  return plan;
}

uint32_t epLinkPushers(const epLinkPlan *plan, uint32_t blocks) {
  uint32_t roles = plan->pushBlocks + plan->reduceBlocks, push = roles ? blocks * plan->pushBlocks / roles : blocks / 2;
  return push < 1 ? 1 : push >= blocks ? blocks - 1 : push;
}
