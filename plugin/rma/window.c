/* Registered memory. Registration is collective: window n of every rank is the n-th one it registers, each rank tells all
 * others the size of its own, and sends a descriptor of exported GPU memory to those of its host, who map it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rma.h"

static epRmaWindow dead; /* stands in the table for a window that was deregistered: late frames are dropped */

/* A place in the table, with a window in it that waits for its registration; NULL where there is no memory. */
static epRmaWindow **slotOf(epRmaColl *coll, uint32_t id) {
  epRmaWindow *window = NULL;
  if (id >= coll->windowRoom) {
    uint32_t room = coll->windowRoom ? 2 * coll->windowRoom : 16;
    while (room <= id) room *= 2;
    epRmaWindow **more = realloc(coll->windows, room * sizeof(epRmaWindow *));
    if (!more) goto fail;
    memset(more + coll->windowRoom, 0, (room - coll->windowRoom) * sizeof(epRmaWindow *));
    coll->windows = more, coll->windowRoom = room;
  }
  if (coll->windows[id]) return &coll->windows[id];
  window = calloc(1, sizeof(*window) + coll->ranks * sizeof(window->peers[0]));
  if (!window) goto fail;
  window->coll = coll, window->id = id, window->fd = -1;
  for (uint32_t rank = 0; rank < coll->ranks; rank++) window->peers[rank].fd = -1;
  coll->windows[id] = window;
  return &coll->windows[id];
fail:
  epRmaFail(coll, EP_RMA_SYSTEM_ERROR, "no memory for window %u", id);
  return NULL;
}

static void freeWindow(epRmaColl *coll, epRmaWindow *window) {
  for (uint32_t rank = 0; rank < coll->ranks; rank++) {
    if (window->peers[rank].mapped) epRmaGpuUnmap(window->peers[rank].mapped, window->peers[rank].allocation);
    if (window->peers[rank].fd >= 0) close(window->peers[rank].fd);
  }
  if (window->fd >= 0) close(window->fd);
  free(window->shadow);
  coll->windows[window->id] = &dead;
  free(window);
}

void epRmaWindowFreeAll(epRmaColl *coll) {
  for (uint32_t id = 0; id < coll->windowRoom; id++)
    if (coll->windows[id] && coll->windows[id] != &dead) freeWindow(coll, coll->windows[id]);
  free(coll->windows);
}

epRmaResult epRmaWindowSeen(epRmaColl *coll, uint32_t rank, const epRmaHeader *header, int fd) {
  epRmaWindow **slot = NULL;
  epRmaResult rc = EP_RMA_OK;
  /* Nobody finishes a registration before all have begun it: a peer is at most one ahead. */
  if (header->window > coll->nextWindow)
    rc = epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u registers window %u, window %u is expected", rank,
                   header->window, coll->nextWindow);
  else
    slot = slotOf(coll, header->window);
  if (slot && (*slot == &dead || (*slot)->peers[rank].known))
    rc = epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u registers window %u twice", rank, header->window);
  if (rc || !slot) {
    if (fd >= 0) close(fd);
    return coll->error;
  }
  struct epRmaPeerWindow *peer = &(*slot)->peers[rank];
  *peer = (struct epRmaPeerWindow){true, header->size, header->offset, header->value, fd, NULL};
  (*slot)->seen++;
  return EP_RMA_OK;
}

epRmaResult epRmaWindowFind(epRmaColl *coll, uint32_t rank, const epRmaHeader *header, uint64_t bytes,
                            epRmaWindow **out) {
  epRmaWindow *window = header->window < coll->windowRoom ? coll->windows[header->window] : NULL;
  *out = NULL;
  if (window == &dead) return EP_RMA_OK;
  if (!window || !window->base)
    return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u writes to window %u, which is not registered", rank,
                     header->window);
  if (header->offset > window->size || bytes > window->size - header->offset)
    return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u writes %llu bytes at %llu of window %u, which has %zu", rank,
                     (unsigned long long)bytes, (unsigned long long)header->offset, header->window, window->size);
  *out = window;
  return EP_RMA_OK;
}

static epRmaResult check(const void *data, size_t size, int type) {
  if (!data || size == 0) {
    EP_RMA_WARN("memory to register is %p of %zu bytes: some memory is expected", data, size);
    return EP_RMA_INVALID_ARGUMENT;
  }
  if (type == EP_RMA_PTR_HOST || type == EP_RMA_PTR_CUDA) return EP_RMA_OK;
  EP_RMA_WARN("memory to register is of type %#x: host memory (0x1) or CUDA's (0x2) is expected", (unsigned)type);
  return EP_RMA_INVALID_ARGUMENT;
}

/* Enters the GPU where this is the first of its memory. */
static epRmaResult openGpu(epRmaColl *coll, void *data) {
  bool was = coll->gpu.ready;
  epRmaResult rc = epRmaGpuOpen(&coll->gpu, data);
  if (rc || was) return rc;
  rc = epRmaGpuEnter(&coll->gpu);
  if (rc) {
    epRmaGpuClose(&coll->gpu);
    return rc;
  }
  rc = epRmaStageMake(&coll->leaving);
  if (!rc) rc = epRmaStageMake(&coll->arriving);
  return rc ? epRmaNote(coll, rc) : EP_RMA_OK;
}

/* Tells every peer. size 0: this rank could not, so that nobody waits for it. */
static epRmaResult announce(epRmaColl *coll, const epRmaWindow *window, uint64_t size) {
  for (uint32_t rank = 0; rank < coll->ranks; rank++) {
    if (rank == coll->rank) continue;
    epRmaSocket *to = epRmaSocketOf(coll, rank, 0);
    int fd = -1;
    if (window->fd >= 0 && coll->peers[rank]->local) fd = fcntl(window->fd, F_DUPFD_CLOEXEC, 0);
    while (!coll->error && to->fd >= 0 && !epRmaSocketRoom(to)) {
      epRmaProgress(coll);
      epRmaPause(coll);
    }
    if (coll->error || to->fd < 0 || to->byeSeen) {
      if (fd >= 0) close(fd);
      return coll->error ? coll->error
                         : epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u has closed its communicator", rank);
    }
    epRmaHeader header = {EP_RMA_FRAME_WINDOW, window->id, window->offset, size, fd >= 0 ? window->allocation : 0};
    epRmaSocketPush(to, &(epRmaFrame){header, NULL, -1, fd, NULL});
  }
  return EP_RMA_OK;
}

static epRmaResult awaitAll(epRmaColl *coll, const epRmaWindow *window) {
  uint64_t deadline = epRmaMilliseconds() + (uint64_t)coll->settings.timeoutMs;
  while (window->seen < coll->ranks - 1) {
    epRmaResult rc = epRmaProgress(coll);
    if (rc) return rc;
    bool late = epRmaMilliseconds() >= deadline;
    for (uint32_t rank = 0; rank < coll->ranks; rank++) {
      if (rank == coll->rank || window->peers[rank].known) continue;
      const epRmaSocket *from = epRmaSocketOf(coll, rank, 0);
      if (from->byeSeen) return epRmaFail(coll, EP_RMA_REMOTE_ERROR, "rank %u has closed its communicator", rank);
      if (late)
        return epRmaFail(coll, EP_RMA_REMOTE_ERROR,
                         "rank %u did not register window %u within %d ms (NCCL_EP_RMA_TIMEOUT_MS)", rank, window->id,
                         coll->settings.timeoutMs);
    }
    epRmaPause(coll);
  }
  return EP_RMA_OK;
}

/* Peers' GPU memory on this host into our address space; where that fails, puts go over the socket. */
static void mapPeers(epRmaColl *coll, epRmaWindow *window) {
  for (uint32_t rank = 0; rank < coll->ranks; rank++) {
    struct epRmaPeerWindow *peer = &window->peers[rank];
    if (peer->fd < 0) continue;
    if (coll->gpu.ready && peer->allocation >= peer->offset && peer->allocation - peer->offset >= peer->size)
      peer->mapped = epRmaGpuMap(&coll->gpu, peer->fd, peer->allocation);
    if (!peer->mapped)
      EP_RMA_INFO("window %u of rank %u cannot be mapped on this GPU: its data goes over a socket", window->id, rank);
    close(peer->fd);
    peer->fd = -1;
  }
}

epRmaResult epRmaWindowRegister(epRmaColl *coll, void *data, size_t size, int type, uint64_t flags, epRmaWindow **out) {
  epRmaWindow **slot = coll->error ? NULL : slotOf(coll, coll->nextWindow);
  epRmaResult rc, own;
  if (!slot) return coll->error;
  epRmaWindow *window = *slot;
  coll->nextWindow++;
  own = check(data, size, type);
  if (!own && type == EP_RMA_PTR_CUDA) own = openGpu(coll, data);
  if (!own) {
    window->base = data, window->size = size, window->type = type;
    window->neverReset = (flags & EP_RMA_MR_SIGNAL_NEVER_RESET) != 0;
    if (type == EP_RMA_PTR_CUDA && coll->settings.local)
      window->fd = epRmaGpuExport(data, size, &window->offset, &window->allocation);
  }
  rc = announce(coll, window, own ? 0 : size);
  if (!rc) rc = awaitAll(coll, window);
  if (!rc) rc = own;
  for (uint32_t rank = 0; !rc && rank < coll->ranks; rank++)
    if (rank != coll->rank && window->peers[rank].size == 0) {
      EP_RMA_WARN("rank %u could not register window %u", rank, window->id);
      rc = EP_RMA_REMOTE_ERROR;
    }
  if (rc) {
    freeWindow(coll, window);
    return rc;
  }
  if (window->fd >= 0) close(window->fd);
  window->fd = -1;
  window->peers[coll->rank] = (struct epRmaPeerWindow){true, size, 0, 0, -1, NULL};
  mapPeers(coll, window);
  *out = window;
  return EP_RMA_OK;
}

epRmaResult epRmaWindowDeregister(epRmaWindow *window) {
  epRmaColl *coll = window->coll;
  epRmaResult rc = EP_RMA_OK;
  uint64_t deadline = epRmaMilliseconds() + (uint64_t)coll->settings.timeoutMs;
  while (window->uses > 0 && !coll->error) {
    epRmaProgress(coll);
    if (epRmaMilliseconds() >= deadline)
      epRmaFail(coll, EP_RMA_INVALID_USAGE, "window %u is deregistered with %u operations on it", window->id,
                window->uses);
    epRmaPause(coll);
  }
  if (window->uses > 0) epRmaOpsForget(window); /* of a broken communicator: they go no further */
  /* What arrived may still be on its way from the staging; copies that left may read it, or write to a peer's. */
  if (window->type == EP_RMA_PTR_CUDA) rc = epRmaGpuSync(coll->gpu.in);
  for (int i = 0; !rc && coll->gpu.ready && i < EP_RMA_OUT_STREAMS; i++) rc = epRmaGpuSync(coll->gpu.out[i].stream);
  freeWindow(coll, window);
  return rc ? epRmaNote(coll, rc) : EP_RMA_OK;
}
