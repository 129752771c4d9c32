/* The network primitives of device/gin.h on the emulated fabric: calls into the engine. */
#ifndef EP_EMU_GIN_HOST_H_
#define EP_EMU_GIN_HOST_H_

#include "prim_host.h"

namespace p {

inline emu::GinPort *port(const epGin &g) { return reinterpret_cast<emu::GinPort *>(g.comm); }

DEV void gin_put(const epGin &g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from, uint32_t bytes,
                 Here h = Here::current()) {
  e().ginPut(port(g), context, domain, to, from, bytes, at(h));
}
DEV void gin_put_signal(const epGin &g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from, uint32_t bytes,
                        uint32_t signal, uint64_t add, Here h = Here::current()) {
  e().ginPutSignal(port(g), context, domain, to, from, bytes, signal, add, true, at(h));
}
DEV void gin_put_signal_weak(const epGin &g, uint32_t context, uint32_t domain, uint64_t to, uint64_t from,
                             uint32_t bytes, uint32_t signal, uint64_t add, Here h = Here::current()) {
  e().ginPutSignal(port(g), context, domain, to, from, bytes, signal, add, false, at(h));
}
DEV void gin_signal(const epGin &g, uint32_t context, uint32_t domain, uint32_t signal, uint64_t add,
                    Here h = Here::current()) {
  e().ginSignal(port(g), context, domain, signal, add, true, at(h));
}
DEV void gin_signal_weak(const epGin &g, uint32_t context, uint32_t domain, uint32_t signal, uint64_t add,
                         Here h = Here::current()) {
  e().ginSignal(port(g), context, domain, signal, add, false, at(h));
}
DEV uint64_t gin_read(const epGin &g, uint32_t context, uint32_t signal, Here h = Here::current()) {
  return e().ginRead(port(g), context, signal, at(h));
}
/* The emulated network always gets there, so nobody needs to give up. */
template <class F> DEV bool gin_flush(const epGin &g, uint32_t context, F) {
  if (lane() == 0) e().ginFlush(port(g), context);
  sync_warp();
  return true;
}

} // namespace p

#endif
