// GPU-initiated networking between scale-up domains, with only the ordering it promises: puts read their source late and
// land in pieces in any order; a strong signal comes after the puts before it on its context and peer, a weak one
// whenever, or where a put brings it along after that put alone; both add to a 64-bit word of the peer. Queues are finite. gin.cpp performs it, device/gin.h is what kernels
// see.
#pragma once
#include <vector>

#include "order.h"
#include "report.h"

namespace emu {

struct Fiber;
struct GinPort;
struct GinStep;

struct GinPut {
  struct GinQueue *queue;
  u32 number; // in its queue
  u8 *to;
  const u8 *from;
  u32 bytes, piecesLeft;
  bool read; // the source was
  std::vector<u8> data;
};

// What goes from one rank to one peer on one context.
struct GinQueue {
  GinPort *port;
  u32 index, domain, depth;
  u32 used = 0;                 // puts and signals that have not arrived
  u32 issued = 0;               // puts
  std::vector<GinPut *> puts;   // not settled
  std::vector<GinStep *> held;  // strong signals that wait for puts
  std::vector<Fiber *> waiters; // for room
};

// One rank's end of one window's network. Clocks of puts belong to the NIC, not to the kernel that issued them: they outlive
// it. Queue q has two slots: 2 * q says that a source was read, 2 * q + 1 that a put has settled.
struct GinPort {
  int rank = 0;
  u32 contexts = 0, signals = 0, domain = 0; // domain: its own
  std::vector<u8 *> window, signal;          // by domain: of the rank of this one's index there
  std::vector<size_t> windowBytes;
  u32 identity = 0;
  bool closed = false;
  std::vector<GinQueue> queues; // [context][domain]
  std::vector<Fiber *> flushing;
};

struct GinStep {
  enum Kind { ReadSource, Piece, Signal } kind;
  GinPut *put;
  u32 offset, bytes; // Piece
  // Signal
  GinQueue *queue;
  u32 signal, first, last; // puts it waits for; last = 0: none
  u64 add;
  ReleaseRef release;
};

} // namespace emu
