/* The rule: what an SM spends on a token's rows, over the time that the busiest of link and memory takes for the token. Its rates
 * are those of curves over SMs on H200 (docs/performance.md), of rows of 14,336 bytes; a shorter row costs nearly as much
 * (FP8: seven eighths), because trips and flags do not get shorter. What a token costs and what the link carries of it follow from the layout, the number of
 * ranks and top-k, so that other shapes and other links get other numbers. */
#include "sm_policy.h"

#include "links.h"

/* Microseconds of an SM for 14,336 bytes: a row read, stored over the link, stored to memory once, and once more. */
#define EP_SM_ROW_BYTES 14336.0
#define EP_SM_LEAST_BYTES 12288.0
#define EP_SM_READ_US 0.15
#define EP_SM_SEND_US 0.53
#define EP_SM_STORE_US 0.26
/* Combine: a part read and added, a sum rounded and stored. */
#define EP_SM_ADD_US 0.35
#define EP_SM_SUM_US 0.42
/* Above the sum: what a link needs ahead of it not to idle, and memory. Combine's reducers take tokens in order, and wait for rows while
 * others have come. */
#define EP_SM_LINK_HEADROOM 1.3
#define EP_SM_MEMORY_HEADROOM 1.15
#define EP_SM_COMBINE_HEADROOM 2.1
#define EP_SM_MEMORY_SHARE 0.65 /* of the stated rate, of copies to rows in any order */
#define EP_SM_FEW_SHARE 0.5     /* of the best bandwidth, of NCCL_EP_SMS_FEW */
#define EP_SM_LEAST 18u         /* 16 receivers beside two senders: fewer are slow at the record */

/* What a token of a rank costs, summed over what the rank does for its own and for others' tokens: rows read, sent and stored. */
typedef struct epTokenCost {
  double us;    /* of an SM, per EP_SM_ROW_BYTES */
  double sent;  /* rows over the link */
  double moved; /* rows read from and written to memory */
} epTokenCost;

static epTokenCost epCostOf(int kernelId, const epConfig *c) {
  epLinkRows r = epLinkRowsOf(1, c->ranks, c->experts, c->topk);
  double slots = c->topk, own = r.ranks - r.sent, remote = slots * (c->ranks - 1) / c->ranks;
  int major = c->layout == EP_LAYOUT_KIND_EXPERT_MAJOR;
  epTokenCost t = {0, r.sent, 0};
  if (kernelId == EP_KERNEL_DISPATCH && c->direct) { /* senders store all rows */
    t.us = r.ranks * (EP_SM_READ_US + EP_SM_SEND_US);
    t.moved = 2 * r.ranks;
  } else if (kernelId == EP_KERNEL_DISPATCH) {
    t.us =
        r.sent * (EP_SM_READ_US + EP_SM_SEND_US) + r.ranks * EP_SM_READ_US + (major ? slots : r.ranks) * EP_SM_STORE_US;
    t.moved = 1 + r.sent + r.ranks + (major ? slots : r.ranks);
  } else {
    double first = major ? remote : r.sent, last = r.sent + (major ? slots - remote : own); /* parts of both sums */
    t.us = (first + last) * EP_SM_ADD_US + (r.sent + 1) * EP_SM_SUM_US;
    t.moved = first + last + r.sent + 1;
  }
  return t;
}

unsigned epSmPolicy(const epTopology *topology, unsigned wanted, int kernelId, const epConfig *c) {
  unsigned all = topology->numSms > 0 ? (unsigned)topology->numSms : 1, sms;
  double row = c->rowBytes + epTailBytes(c), link, memory, us, rate;
  epTokenCost t;
  if (wanted && wanted != NCCL_EP_SMS_FEW && wanted != NCCL_EP_SMS_ALL) return wanted < all ? wanted : all;
  if (wanted == NCCL_EP_SMS_ALL || !(topology->linkGbs > 0) || topology->scaleOutRanks > 1 || c->ranks < 2) return all;
  t = epCostOf(kernelId, c);
  link = t.sent * row / (1e3 * topology->linkGbs);
  memory = topology->memoryGbs > 0 ? t.moved * row / (1e3 * topology->memoryGbs * EP_SM_MEMORY_SHARE) : 0;
  us = t.us * (row > EP_SM_LEAST_BYTES ? row : EP_SM_LEAST_BYTES) / EP_SM_ROW_BYTES;
  rate = kernelId == EP_KERNEL_DISPATCH ? EP_SM_LINK_HEADROOM / link : EP_SM_COMBINE_HEADROOM / link;
  if (kernelId == EP_KERNEL_DISPATCH && memory > 0 && rate > EP_SM_MEMORY_HEADROOM / memory)
    rate = EP_SM_MEMORY_HEADROOM / memory;
  us *= rate;
  if (wanted == NCCL_EP_SMS_FEW) us *= EP_SM_FEW_SHARE;
  if (us >= all) return all;
  sms = (unsigned)us + 1;
  return sms < EP_SM_LEAST && EP_SM_LEAST < all ? EP_SM_LEAST : sms;
}
