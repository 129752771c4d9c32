/* How processes of one run, one a rank, find each other without MPI: rank and size from the launcher's variables, then
 * a star of TCP connections to rank 0, over which a gather (and so a barrier) runs. */
#ifndef EP_TOOLS_BOOTSTRAP_H_
#define EP_TOOLS_BOOTSTRAP_H_

#include <stddef.h>

typedef struct epNet epNet;

typedef struct epNetPlace {
  int rank, ranks, localRank;
} epNetPlace;

/* 1 when torchrun's (RANK, WORLD_SIZE, LOCAL_RANK) or OpenMPI's (OMPI_COMM_WORLD_*) variables say that this process is
 * one of several; 0 when it is alone; -1 after telling what is wrong with them. */
int epNetPlaceFromEnvironment(epNetPlace *place);

/* Where rank 0 is: NCCL_EP_BENCH_ID_FILE (a path all ranks see; rank 0 writes its address there), else MASTER_ADDR and
 * NCCL_EP_BENCH_PORT or MASTER_PORT + 1 (torchrun itself holds MASTER_PORT). */
int epNetOpen(const epNetPlace *place, epNet **out);
/* Every rank gives `bytes` and receives all, in rank order. */
int epNetGather(epNet *net, const void *mine, void *all, size_t bytes);
void epNetClose(epNet *net);

#endif
