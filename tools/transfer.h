/* The same bytes moved by others, to compare with: the copy engine, plain stores by SMs, NCCL's all-to-all. */
#ifndef EP_TOOLS_TRANSFER_H_
#define EP_TOOLS_TRANSFER_H_

#include "layer.h"

typedef enum {
  EP_TRANSFER_COPY_ENGINE = 0, /* all that this rank sends, to the next rank */
  EP_TRANSFER_SM_STORES,       /* the same, by a kernel that loads and stores 16 bytes a thread */
  EP_TRANSFER_ALL_TO_ALL,      /* ncclSend and ncclRecv in a group: to each rank what dispatch sends it */
  EP_TRANSFERS
} epTransferKind;

typedef struct epTransfer {
  epPort *port;
  unsigned char *from, *to; /* of this rank; peers store into `to` */
  size_t room;              /* bytes of either */
  void **peers;             /* [ranks] their `to` */
  void *module, *kernel;
  unsigned blocks;                 /* of the kernel at most */
  char missing[EP_TRANSFERS][160]; /* why a kind cannot be measured here; empty: it can */
} epTransfer;

const char *epTransferName(epTransferKind kind);
/* Between the buffers of a layer. What is not there is told in `missing`, not an error. Collective. */
int epTransferOpen(epLayer *layer, epTransfer *transfer);
void epTransferClose(epTransfer *transfer); /* also one that is all zero, or whose opening failed */
/* Queued on the port's stream. send, receive: [ranks] bytes to and from each rank, own entries not looked at. */
int epTransferQueue(epTransfer *transfer, epTransferKind kind, const size_t *send, const size_t *receive);

#endif
