/* Two emulated ranks, four experts: every token goes to its two experts and comes back as their sum. On GPUs the
 * communicator is NCCL's and the memory is CUDA's; the ncclEp* calls in oneRank stay the same. */
#include <nccl_ep_ext.h>
#include <pthread.h>
#include <stdio.h>

enum { RANKS = 2, EXPERTS = 4, TOPK = 2, TOKENS = 3, HIDDEN = 64, ROWS = RANKS * TOKENS * TOPK };

/* A tensor in device memory that holds a copy of `from`. */
static ncclEpTensor_t tensor(ncclComm_t comm, ncclDataType_t type, unsigned ndim, size_t sizes[2], const void *from) {
  size_t bytes = sizes[0] * (ndim > 1 ? sizes[1] : 1) * (type == ncclInt64 ? 8 : 4);
  ncclEpTensor_t t = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = type, .sizes = sizes};
  ncclResult_t rc = ncclEpEmuMalloc(comm, &t.data, bytes, "tensor");
  if (rc == ncclSuccess && from) rc = ncclEpEmuMemcpy(comm, t.data, from, bytes, NULL);
  if (rc != ncclSuccess) t.magic = 0; /* the next call refuses it */
  return t;
}

static ncclResult_t oneRank(ncclComm_t comm, const int64_t *experts, const float *weights, const float *x, float *y) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT, config.num_experts = EXPERTS;
  config.max_dispatch_tokens_per_rank = TOKENS, config.max_recv_tokens_per_rank = ROWS;
  config.max_token_bytes = HIDDEN * sizeof(float);
  size_t choices[2] = {TOKENS, TOPK}, mine[2] = {TOKENS, HIDDEN}, received[2] = {ROWS, HIDDEN};
  ncclEpTensor_t idx = tensor(comm, ncclInt64, 2, choices, experts);
  ncclEpTensor_t w = tensor(comm, ncclFloat32, 2, choices, weights), tokens = tensor(comm, ncclFloat32, 2, mine, x);
  ncclEpTensor_t rows = tensor(comm, ncclFloat32, 2, received, NULL), sums = tensor(comm, ncclFloat32, 2, mine, NULL);
  ncclEpTensor_t rowWeights = tensor(comm, ncclFloat32, 1, received, NULL);
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sum = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &tokens, in.topk_weights = &w, out.tokens = &rows, out.topk_weights = &rowWeights;
  back.tokens = &rows, sum.tokens = &sums; /* an expert here gives back what it got */
  ncclEpGroup_t group = NULL;
  ncclEpHandle_t handle = NULL;
  ncclResult_t rc = ncclEpCreateGroup(&group, comm, &config);
  if (!rc) rc = ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &idx, NULL, NULL, NULL);
  if (!rc) rc = ncclEpDispatch(handle, &in, &out, NULL, NULL, NULL);
  if (!rc) rc = ncclEpCombine(handle, &back, &sum, NULL, NULL);
  if (!rc) rc = ncclEpEmuMemcpy(comm, y, sums.data, sizeof(float) * TOKENS * HIDDEN, NULL);
  if (!rc) rc = ncclEpEmuStreamSynchronize(comm, NULL);
  if (rc) fprintf(stderr, "%s\n", ncclEpGetLastErrorString());
  ncclEpHandleDestroy(handle);
  return ncclEpGroupDestroy(group), rc;
}

static void *threadOf(void *comm) { /* returns NULL when every token is the sum of its experts */
  const int64_t experts[TOKENS * TOPK] = {0, 3, 1, 2, 2, 0};
  const float weights[TOKENS * TOPK] = {1, 1, 1, 1, 1, 1};
  float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
  for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)i;
  int wrong = oneRank(*(ncclComm_t *)comm, experts, weights, x, y) != ncclSuccess;
  for (int i = 0; i < TOKENS * HIDDEN && !wrong; i++) wrong = y[i] != TOPK * x[i];
  return wrong ? comm : NULL;
}

int main(void) {
  ncclComm_t comms[RANKS];
  pthread_t other;
  void *bad = NULL;
  if (ncclEpEmuCommInitAll(comms, 1, RANKS, NULL) != ncclSuccess) return 1;
  if (pthread_create(&other, NULL, threadOf, &comms[1])) return 1;
  int wrong = threadOf(&comms[0]) != NULL;
  wrong |= pthread_join(other, &bad) || bad;
  puts(wrong ? "wrong" : "every token came back as the sum of its experts");
  return ncclEpEmuCommDestroy(comms[0]) | ncclEpEmuCommDestroy(comms[1]) | wrong;
}
