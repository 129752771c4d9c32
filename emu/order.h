// Happens-before: what a thread knows of the writes of others. Inside a block a View is a vector clock over threads and
// asynchronous copies; between blocks a Known maps each block to the View of it that was acquired.
//
// A write or read is stamped (actor, epoch). Actor = identity << 16 | slot; slots below the block's thread count are
// threads, those above belong to asynchronous copies. A thread's epoch rises whenever it publishes what it did, so
// "epoch <= clock entry" means "ordered before me". Actor 0 is the past that everybody knows.
#pragma once
#include <vector>

#include "base.h"

namespace emu {

using Actor = u32;
inline Actor actorOf(u32 identity, u32 slot) { return identity << 16 | slot; }
inline u32 identityOf(Actor a) { return a >> 16; }
inline u32 slotOf(Actor a) { return a & 0xffff; }

// Three clocks: ordered at all; ordered and passed through a generic -> async fence for shared memory; for all memory.
enum Clock { SEEN = 0, SHARED_FENCED, GLOBAL_FENCED, CLOCKS };

// Immutable once shared. Entries beyond the vectors have the value `floor`: what the identity did before this block.
struct View {
  mutable int refs = 0;
  u32 floor = 0;
  u32 top = 0; // largest entry of SEEN
  std::vector<u32> clock[CLOCKS];

  u32 at(Clock k, u32 slot) const { return slot < clock[k].size() ? clock[k][slot] : floor; }
  void raise(Clock k, u32 slot, u32 epoch);
  // Takes the maximum with `o`; where `fenced` says so, all that `o` has seen counts as fenced.
  void absorb(const View &o, bool sharedFenced, bool globalFenced);
  bool covers(const View &o) const;
};
using ViewRef = Ref<View>;
ViewRef floorView(u32 floor);

// Immutable. Index is the identity.
struct Known {
  mutable int refs = 0;
  std::vector<ViewRef> of;

  u32 at(Clock k, Actor a) const {
    u32 i = identityOf(a);
    return i < of.size() && of[i] ? of[i]->at(k, slotOf(a)) : 0;
  }
};
using KnownRef = Ref<Known>;
KnownRef knownWith(const KnownRef &base, u32 identity, const ViewRef &view);

// What an acquire of a released word gives: all that the releaser knew, and the part that had passed a fence.
struct Release {
  mutable int refs = 0;
  KnownRef seen, fenced;
  int rank = -1;
  bool system = false; // scope: system, else the releaser's own GPU
};
using ReleaseRef = Ref<Release>;

// Joins Knowns; remembers recent answers, because the 32 lanes of a warp usually ask for the same one.
class KnownJoiner {
public:
  KnownRef join(const KnownRef &a, const KnownRef &b);

private:
  struct Memo {
    KnownRef a, b, result;
  };
  static const size_t MEMOS = 1021;
  Memo memo[MEMOS];
};

} // namespace emu
