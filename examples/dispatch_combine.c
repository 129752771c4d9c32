/* Two emulated ranks, four experts: each token goes to its two experts and comes back as their sum. On GPUs the communicator is
 * NCCL's and the memory CUDA's; every ncclEp* call stays the same. */
#include <nccl_ep.h>
#include <nccl_ep_ext.h>
#include <pthread.h>
#include <stdio.h>

enum { RANKS = 2, EXPERTS = 4, TOPK = 2, TOKENS = 3, HIDDEN = 64, ROWS = RANKS * TOKENS * TOPK };
#define TRY(call) do { if ((call) != ncclSuccess) { fprintf(stderr, "%s\n", ncclEpGetLastErrorString()); return rank; } } while (0)
#define TENSOR(name, type, elements, n, ...) size_t name##Sizes[] = {__VA_ARGS__}; \
  ncclEpTensor_t name = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = (n), .datatype = (type), .sizes = name##Sizes}; \
  TRY(ncclEpEmuMalloc(comm, &name.data, (elements) * (type == ncclInt64 ? 8 : 4), #name))

static void *oneRank(void *rank) { /* returns NULL when all went well */
  ncclComm_t comm = *(ncclComm_t *)rank;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = EXPERTS;
  config.max_dispatch_tokens_per_rank = TOKENS;
  config.max_recv_tokens_per_rank = ROWS;
  config.max_token_bytes = HIDDEN * sizeof(float);
  TRY(ncclEpCreateGroup(&group, comm, &config));

  TENSOR(topkIdx, ncclInt64, TOKENS * TOPK, 2, TOKENS, TOPK);       /* who chose which experts */
  TENSOR(weights, ncclFloat32, TOKENS * TOPK, 2, TOKENS, TOPK);
  TENSOR(tokens, ncclFloat32, TOKENS * HIDDEN, 2, TOKENS, HIDDEN);
  TENSOR(rows, ncclFloat32, ROWS * HIDDEN, 2, ROWS, HIDDEN);        /* what this rank's experts see */
  TENSOR(rowWeights, ncclFloat32, ROWS, 1, ROWS);
  TENSOR(result, ncclFloat32, TOKENS * HIDDEN, 2, TOKENS, HIDDEN);
  int64_t chosen[TOKENS * TOPK] = {0, 3, 1, 2, 2, 0};
  float ones[TOKENS * TOPK] = {1, 1, 1, 1, 1, 1}, x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
  for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)i;
  TRY(ncclEpEmuMemcpy(comm, topkIdx.data, chosen, sizeof(chosen), NULL));
  TRY(ncclEpEmuMemcpy(comm, weights.data, ones, sizeof(ones), NULL));
  TRY(ncclEpEmuMemcpy(comm, tokens.data, x, sizeof(x), NULL));

  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t sum = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &tokens, in.topk_weights = &weights;
  out.tokens = &rows, out.topk_weights = &rowWeights;
  back.tokens = &rows, sum.tokens = &result; /* the expert here is the identity */
  TRY(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &topkIdx, NULL, NULL, NULL));
  TRY(ncclEpDispatch(handle, &in, &out, NULL, NULL, NULL));
  TRY(ncclEpCombine(handle, &back, &sum, NULL, NULL));
  TRY(ncclEpEmuMemcpy(comm, y, result.data, sizeof(y), NULL));
  TRY(ncclEpEmuStreamSynchronize(comm, NULL));
  for (int i = 0; i < TOKENS * HIDDEN; i++) if (y[i] != TOPK * x[i]) return rank;
  TRY(ncclEpHandleDestroy(handle));
  TRY(ncclEpGroupDestroy(group));
  return NULL;
}

int main(void) {
  ncclComm_t comms[RANKS];
  pthread_t threads[RANKS];
  void *bad, *anyBad = NULL;
  if (ncclEpEmuCommInitAll(comms, 1, RANKS, NULL) != ncclSuccess) return 1;
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, oneRank, &comms[r]);
  for (int r = 0; r < RANKS; r++) { pthread_join(threads[r], &bad); if (bad) anyBad = bad; }
  for (int r = 0; r < RANKS; r++) ncclEpEmuCommDestroy(comms[r]);
  puts(anyBad ? "wrong" : "every token came back as the sum of its experts");
  return anyBad != NULL;
}
