/* The primitives that go beyond a scale-up domain (GPU-initiated networking), beside those of prim.h; only hybrid kernels
 * include them. Two implementations: NCCL's device API (gin_nccl.h) and the emulated fabric (emu/gin_host.h). `domain` names
 * the rank of this rank's index in another scale-up domain; offsets are bytes of the group's window, equal on all ranks.
 *
 *   gin_put(gin, context, domain, to, from, bytes)   from my window to the peer's; reads its source and lands whenever.
 *                                                    What this thread did or knows before it is what it reads
 *   gin_signal(gin, context, domain, signal, add)    strong: adds to the peer's 64-bit signal once all puts before it on
 *                                                    this context to this peer have settled
 *   gin_put_signal(gin, context, domain, to, from, bytes, signal, add)    the put, and a strong signal behind it: one operation
 *   gin_put_signal_weak(...)                         the same, but the signal waits for this put alone
 *   gin_signal_weak(...)                             adds without waiting for puts; what this thread did and knew goes along
 *   gin_read(gin, context, signal) -> u64            my signal of that context (each has signals of its own), acquire: what came
 *                                                    before its adds is visible after it
 *   gin_flush(gin, context, giveUp)                  whole warp: sources of the context's puts may be written again; they may not
 *                                                    have arrived. giveUp(round) as in any wait: true ends it, and has set the
 *                                                    word that the host gave the network for this */
#ifndef EP_DEVICE_GIN_H_
#define EP_DEVICE_GIN_H_

#include "hybrid_layout.h"
#include "prim.h"

#ifdef EP_EMU
#include "gin_host.h"
#else
#include "gin_nccl.h"
#endif

#endif
