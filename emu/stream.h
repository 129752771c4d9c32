// A stream of one rank: operations that run one after the other. Kernels, copies and events order memory at their ends,
// as on a GPU; the engine starts the head of each stream after a delay of its own choosing.
#pragma once
#include <deque>
#include <memory>

#include "engine.h"

namespace emu {

struct StreamEvent {
  u64 recordsQueued = 0, recordsDone = 0;
  KnownRef known;
};

struct StreamOp {
  enum Kind { Kernel, Copy, Fill, Record, Wait, Delay };
  explicit StreamOp(Kind k) : kind(k) {}
  Kind kind;
  KnownRef hostKnown; // what the host had synchronised with when it queued this
  // Kernel
  std::string name;
  std::function<void()> body;
  u32 blocks = 0, threads = 0, sharedBytes = 0;
  bool together = true; // its blocks wait for each other, so all must be resident
  // Copy, Fill
  u8 *dst = nullptr;
  const u8 *src = nullptr;
  size_t bytes = 0;
  int value = 0;
  std::vector<u8> staged; // host source, taken when queued
  // Record, Wait
  std::shared_ptr<StreamEvent> event;
  u64 record = 0;
  // Delay
  u64 delayNs = 0, untilNs = 0; // until: by the simulated clock, when it has begun
};

struct Stream {
  int rank = 0;
  u32 identity = 0, epoch = 0;
  std::deque<StreamOp> ops;
  KnownRef known;
  bool starting = false; // a start is scheduled
  Launch *running = nullptr;
  bool dropped = false; // abandon() threw its operations away
};

} // namespace emu
